"""Offsets beyond 2^31 elements on a GPU: head-major views of a clip of a million tokens."""

import torch

from frame_gdn import bidirectional_gdn

from ..helpers import NEEDS_GPU

pytestmark = NEEDS_GPU

T, S, H, D = 1150, 880, 20, 112  # SANA-WM's frame; the last head begins 2.15e9 elements in


def test_head_major_tokens_of_a_long_clip_equal_contiguous_ones():
    torch.manual_seed(0)
    N = T * S
    head_major = {
        name: torch.rand(1, H, N, D, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for name in ("q", "k", "v")
    }
    head_major["k"].mul_((D * S) ** -0.5)
    beta, decay = torch.rand(1, N, H, device="cuda"), 0.9 + 0.1 * torch.rand(1, T, H, device="cuda")

    def run(tokens):
        inputs = {name: t.detach().requires_grad_() for name, t in tokens.items()}
        out, _ = bidirectional_gdn(**inputs, beta=beta, decay=decay, backend="triton")
        grads = torch.autograd.grad(out, list(inputs.values()), out.detach())
        return {"out": out.detach(), **dict(zip(inputs, grads, strict=True))}

    expected = run({name: t.contiguous() for name, t in head_major.items()})
    for name, found in run(head_major).items():
        assert torch.isfinite(found).all(), name
        assert torch.equal(found, expected[name]), name


def test_more_heads_than_a_grid_has_rows():
    torch.manual_seed(0)
    T, S, heads, D = 3, 2, 70000, 16
    q, k, v = (torch.rand(1, T * S, heads, D, device="cuda") for _ in range(3))
    beta, decay = torch.rand(1, T * S, heads, device="cuda"), 0.9 + 0.1 * torch.rand(1, T, heads, device="cuda")
    k = k * (D * S) ** -0.5
    out, _ = bidirectional_gdn(q, k, v, beta, decay, backend="triton")
    plain, _ = bidirectional_gdn(q, k, v, beta, decay, backend="torch")
    assert (out - plain).norm() <= 1e-5 * plain.norm()
