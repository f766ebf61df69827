"""The kernels around attention and feed-forward at SANA-WM's size on a GPU, and a swapped SANA-WM in the compiler."""

import pytest
import torch

from ..helpers import NEEDS_GPU, relative_error
from ..kernels.test_block_operators import (
    fused_modulated_norm,
    fused_residual,
    fused_rotary,
    modulated_norm,
    padded,
    residual,
    rotary,
    slices,
)
from ..kernels.test_layer_operators import check, random

pytestmark = NEEDS_GPU

T, S, H, D = 5, 880, 20, 112
C = H * D
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_modulated_norm(dtype, masked):
    shift, scale = slices(1, T, C, dtype)
    inputs = {"x": random(1, T * S, C, dtype=dtype), "shift": shift, "scale": 0.3 * scale}
    check(modulated_norm(padded(1, T) if masked else None), inputs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_residual_with_gate_and_more(dtype, masked):
    inputs = {name: random(1, T * S, C, dtype=dtype) for name in ("x", "h", "extra")}
    check(residual(T, padded(1, T) if masked else None), inputs | {"gate": slices(1, T, C, dtype)[0]})


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary(dtype):
    angle = 6.28 * torch.rand(1, T * S, D // 2, device="cuda")
    check(rotary(angle.cos(), angle.sin()), {"x": random(1, T * S, C, dtype=dtype).unflatten(-1, (H, D))})


def test_more_elements_than_an_int32_counts():
    """A part of 2240 channels of 3 · 2240 and 440 frames: its last token is 2.6e9 elements in."""
    frames = 440
    wide = torch.zeros(1, frames * S, 3 * C, device="cuda", dtype=torch.bfloat16)
    x, last = wide[..., C : 2 * C], slice(-S, None)
    x[:, last].normal_()
    modulation = torch.randn(1, frames, C, device="cuda", dtype=torch.bfloat16)
    alone = x[:, last].clone()
    of_last = modulation[:, -1:]
    angle = torch.rand(1, frames * S, D // 2, device="cuda")
    heads, turned = x.unflatten(-1, (H, D)), alone.unflatten(-1, (H, D))
    for whole, part in (
        (
            fused_modulated_norm(x, modulation, modulation, None, 1e-6)[0],
            fused_modulated_norm(alone, of_last, of_last, None, 1e-6)[0],
        ),
        (
            fused_residual(x, x, modulation, None, None, frames),
            fused_residual(alone, alone, of_last, None, None, 1),
        ),
        (
            fused_rotary(heads, angle, angle, False),
            fused_rotary(turned, angle[:, last], angle[:, last], False),
        ),
    ):
        assert torch.equal(whole[:, last], part)


@pytest.mark.parametrize("softmax_every_n", [0, 2], ids=["gdn", "every second softmax"])
def test_inductor_takes_every_block_whole(softmax_every_n, monkeypatch):
    """Forward and training of a swapped SANA-WM under `compile_repeated_blocks(fullgraph=True)`."""
    pytest.importorskip("diffusers", minversion="0.42")
    from frame_gdn import swap
    from frame_gdn.hosts import sana_wm

    from ..hosts.sana_wm import output_and_gradients, tiny_inputs, tiny_model

    monkeypatch.setattr(sana_wm, "HALF", torch.float32)  # or the softmax block's rounding would hide an error
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()
    model = swap(tiny_model(num_layers=2, softmax_every_n=softmax_every_n)).cuda()
    inputs = {name: t.cuda() for name, t in tiny_inputs(mask=torch.tensor([[1] * 5, [1, 1, 0, 1, 0]]).bool()).items()}
    expected, gradients = output_and_gradients(model, inputs)
    model.compile_repeated_blocks(fullgraph=True)
    with torch.no_grad():
        assert relative_error(model(**inputs).sample, expected) <= 1e-4
    ours, compiled = output_and_gradients(model, inputs)
    assert relative_error(ours, expected) <= 1e-4
    assert compiled.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(compiled[name], gradient) <= 1e-3, name
