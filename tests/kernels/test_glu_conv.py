"""The feed-forward's fused middle against the plain chain in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ..helpers import relative_error
from .test_layer_operators import FLOAT32, check, random, values_and_gradients
from .test_steps import DEVICE, poisoned_memory  # noqa: F401 (a fixture)

pytest.importorskip("triton")

from frame_gdn.kernels.triton.glu_conv import glu_conv

#: The interpreter cuts bfloat16 off where a GPU rounds.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])


def gated_convolution(silu: bool = True):
    """Of images (images, height, width, 2 F): diffusers' chain, or the kernel."""

    def run(backend: str, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if backend == "triton":
            return glu_conv(x, weight, bias, silu)
        h = F.silu(x) if silu else x
        padding = weight.shape[-1] // 2
        h = F.conv2d(h.permute(0, 3, 1, 2), weight, bias, padding=padding, groups=weight.shape[0])
        value, gate = h.permute(0, 2, 3, 1).chunk(2, -1)
        return value * F.silu(gate)

    return run


def inputs_of(images: int, H: int, W: int, channels: int, K: int, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "x": random(images, H, W, 2 * channels, dtype=dtype),
        "weight": random(2 * channels, 1, K, K, dtype=dtype) / K,
        "bias": random(2 * channels, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("images", "H", "W", "channels", "K"),
    [
        (2, 3, 5, 24, 3), (1, 1, 1, 5, 3), (2, 1, 4, 8, 3), (1, 4, 1, 8, 3), (1, 13, 3, 130, 3), (1, 3, 2, 8, 5),
        (2, 2, 3, 8, 1),
    ],
)  # fmt: skip
def test_values_and_gradients_of_ugly_shapes(dtype, images, H, W, channels, K):
    check(gated_convolution(), inputs_of(images, H, W, channels, K, dtype))


def test_without_an_activation_and_without_a_bias():
    inputs = inputs_of(2, 3, 4, 8, 3, torch.float32)
    check(gated_convolution(silu=False), inputs)
    del inputs["bias"]
    check(gated_convolution(), inputs)


def test_channels_that_lie_apart_and_a_gradient_that_is_expanded():
    inputs = inputs_of(2, 3, 4, 8, 3, torch.float32)
    x = inputs["x"].permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    weight = inputs["weight"].to(memory_format=torch.channels_last)
    check(gated_convolution(), {**inputs, "x": x, "weight": weight})
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    totals = [gated_convolution()(backend, **leaves).sum() for backend in ("torch", "triton")]
    plain, ours = (torch.autograd.grad(total, list(leaves.values())) for total in totals)
    for name, a, b in zip(leaves, plain, ours, strict=True):
        assert relative_error(b, a) <= FLOAT32, name


def test_no_images():
    inputs = {name: t.requires_grad_() for name, t in inputs_of(0, 3, 4, 8, 3, torch.float32).items()}
    out = gated_convolution()("triton", **inputs)
    assert out.shape == (0, 3, 4, 8)
    out.sum().backward()
    assert all(t.grad is not None and t.grad.shape == t.shape and not t.grad.any() for t in inputs.values())


def test_float32_weights_around_16_bit_images():
    """What autocast gives."""
    inputs = inputs_of(2, 3, 4, 8, 3, torch.float32)
    run, direction = gated_convolution(), random(2, 3, 4, 8)
    exact = values_and_gradients(lambda **x: run("torch", **x), inputs, direction, torch.float64)
    inputs["x"] = inputs["x"].half()
    ours = values_and_gradients(lambda **x: run("triton", **x), inputs, direction)
    for name, value in exact.items():
        assert ours[name].dtype == (torch.float16 if name in ("out", "dx") else torch.float32), name
        assert relative_error(ours[name], value) <= 2**-9, name


def test_a_nan_stays_within_its_reach():
    inputs = inputs_of(2, 5, 5, 4, 3, torch.float32)
    inputs["x"][0, 1, 1, 2] = float("nan")
    wrong = gated_convolution()("triton", **inputs).isnan()
    assert wrong[0, :3, :3, 2].all() and wrong.sum() == 9


def test_extreme_inputs_stay_finite():
    inputs = inputs_of(1, 3, 3, 4, 3, torch.float32)
    inputs["x"] = 1e4 * inputs["x"]
    found = values_and_gradients(lambda **x: gated_convolution()("triton", **x), inputs, random(1, 3, 3, 4))
    assert all(t.isfinite().all() for t in found.values())


def test_two_calls_are_equal_to_the_bit():
    inputs, direction = inputs_of(3, 3, 4, 8, 3, torch.float32), random(3, 3, 4, 8)
    first, second = (
        values_and_gradients(lambda **x: gated_convolution()("triton", **x), inputs, direction) for _ in range(2)
    )
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_compiler_takes_it_whole():
    inputs, direction = inputs_of(2, 3, 4, 8, 3, torch.float32), random(2, 3, 4, 8)
    run = gated_convolution()
    eager = values_and_gradients(lambda **x: run("triton", **x), inputs, direction)
    compiled = torch.compile(lambda **x: run("triton", **x), fullgraph=True, backend="aot_eager")
    for name, value in values_and_gradients(compiled, inputs, direction).items():
        assert relative_error(value, eager[name]) <= FLOAT32, name


def test_the_operator_keeps_the_rules_of_operators():
    inputs = {name: t.requires_grad_() for name, t in inputs_of(1, 2, 3, 4, 3, torch.float32).items()}
    for bias in (inputs["bias"], None):
        torch.library.opcheck(
            glu_conv, (inputs["x"], inputs["weight"], bias, True),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
        )  # fmt: skip
