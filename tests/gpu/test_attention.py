"""flash-attn-4 in place of torch's own attention, at SANA-WM's size, in models, compilers and deterministic runs."""

import pytest
import torch

from frame_gdn import functional
from frame_gdn.kernels import flash4

from ..helpers import NEEDS_GPU, relative_error

REASON = flash4.refusal(torch.empty(0, dtype=torch.bfloat16, device="cuda"), 112) if torch.cuda.is_available() else ""
pytestmark = [*NEEDS_GPU, pytest.mark.skipif(REASON is not None, reason=f"flash-attn-4: {REASON}")]


def heads(N: int, M: int, D: int, dtype: torch.dtype, H: int = 20) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(N)
    return [torch.randn(1, n, H, D, device="cuda", generator=generator).to(dtype).requires_grad_() for n in (N, M, M)]


def output_and_gradients(qkv, kernel, direction):
    out = functional.attention(*qkv, kernel=kernel)
    return out, *torch.autograd.grad(out, qkv, direction.to(out.dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("N", "M", "D"), [(3520, 3520, 112), (880, 2640, 112), (1, 77, 128), (333, 100, 64), (50, 50, 24)]
)
def test_it_is_as_exact_as_torchs_own_attention(N, M, D, dtype):
    qkv = heads(N, M, D, dtype)
    direction = torch.randn(1, N, 20, D, device="cuda").to(dtype)
    exact = output_and_gradients([t.detach().double().requires_grad_() for t in qkv], "sdpa", direction)
    found, plain = (output_and_gradients(qkv, kernel, direction) for kernel in ("flash4", "sdpa"))
    for name, a, b, x in zip(("out", "dq", "dk", "dv"), found, plain, exact, strict=True):
        assert a.dtype == dtype
        assert relative_error(a, x) <= 2 * relative_error(b, x), name


def test_auto_takes_it_and_a_mask_does_not():
    q, k, v = (t.detach() for t in heads(64, 64, 112, torch.bfloat16))
    assert torch.equal(functional.attention(q, k, v), functional.attention(q, k, v, kernel="flash4"))
    with pytest.raises(ValueError, match="no mask"):
        functional.attention(q, k, v, mask=torch.ones(1, 1, 64, 64, dtype=torch.bool, device="cuda"), kernel="flash4")


def test_the_log_sum_exp_joins_parts_of_the_keys():
    q, k, v = heads(512, 1024, 112, torch.bfloat16)
    parts = [flash4.attend(q, k[:, keys], v[:, keys], 112**-0.5) for keys in (slice(0, 300), slice(300, None))]
    whole = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    joined = sum(out.float() * (lse - whole).exp().transpose(1, 2)[..., None] for out, lse in parts)
    direction = torch.randn_like(joined)
    exact = output_and_gradients([t.detach().double().requires_grad_() for t in (q, k, v)], "sdpa", direction)
    for ours, x in zip((joined, *torch.autograd.grad(joined, (q, k, v), direction)), exact, strict=True):
        assert relative_error(ours, x) <= 2**-6


def test_a_deterministic_backward_is_equal_on_every_run():
    qkv = heads(1000, 1000, 112, torch.bfloat16)
    direction = torch.randn(1, 1000, 20, 112, device="cuda").bfloat16()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        runs = [output_and_gradients(qkv, "flash4", direction) for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


def test_the_compiler_takes_it_whole():
    qkv = heads(256, 256, 112, torch.bfloat16)
    direction = torch.randn(1, 256, 20, 112, device="cuda")
    eager = output_and_gradients(qkv, "auto", direction)
    call = torch.compile(lambda q, k, v: functional.attention(q, k, v), fullgraph=True)
    out = call(*qkv)
    for a, b in zip((out, *torch.autograd.grad(out, qkv, direction.to(out.dtype))), eager, strict=True):
        assert relative_error(a, b) <= 2**-8


def test_video_dit_and_a_swapped_sana_wm_take_it():
    pytest.importorskip("diffusers", minversion="0.42")
    from frame_gdn import swap

    from ..hosts.sana_wm import tiny_inputs, tiny_model
    from ..models import helpers

    model = helpers.tiny_model(torch.float32).cuda().bfloat16()
    inputs = {name: t.cuda() for name, t in helpers.tiny_inputs(3, torch.bfloat16).items()}
    outs = []
    for attention in ("sdpa", "flash4", "auto"):
        model.set_attention(attention)
        outs.append(model(**inputs).sample)
    assert relative_error(outs[1], outs[0]) <= 2**-5
    assert torch.equal(outs[1], outs[2])

    host = tiny_model(num_layers=2, softmax_every_n=2).cuda()
    given = {name: t.cuda() for name, t in tiny_inputs().items()}
    outs = [swap(host, attention=attention)(**given).sample for attention in ("sdpa", "flash4", "auto")]
    assert relative_error(outs[1], outs[0]) <= 2**-5
    assert torch.equal(outs[1], outs[2])
