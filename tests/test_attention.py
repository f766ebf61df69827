"""The choice of a softmax attention, and flash-attn-4's operators around a stand-in for its kernels."""

import math
import sys
from types import ModuleType

import pytest
import torch
from torch import Tensor

from frame_gdn import functional
from frame_gdn.kernels import flash4
from frame_gdn.kernels.backends import Hardware

from .helpers import relative_error

HOPPER = Hardware("cuda:0", "cuda", "NVIDIA H200", (9, 0), flash4=True)


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    scores = scale * torch.einsum("bnhd,bmhd->bhnm", q, k)
    return torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v), scores.logsumexp(-1)


def backward_of(q, k, v, out, dout, lse, softmax_scale, deterministic, dlse):
    shares = torch.exp(softmax_scale * torch.einsum("bnhd,bmhd->bhnm", q, k) - lse[..., None])
    rows = (dout * out).sum(-1).transpose(1, 2) - (0 if dlse is None else dlse)
    dscores = softmax_scale * shares * (torch.einsum("bnhd,bmhd->bhnm", dout, v) - rows[..., None])
    dq = torch.einsum("bhnm,bmhd->bnhd", dscores, k)
    dk = torch.einsum("bhnm,bnhd->bmhd", dscores, q)
    return dq.contiguous(), dk.contiguous(), torch.einsum("bhnm,bnhd->bmhd", shares, dout).contiguous()


@pytest.fixture
def stand_in(monkeypatch):
    """Modules under flash-attn-4's names that compute in plain PyTorch, and the widths of heads they were given."""
    widths: list[int] = []

    def flash_attn_func(q, k, v, *, softmax_scale, return_lse):
        assert return_lse and q.is_contiguous()
        widths.append(q.shape[-1])
        return tuple(t.contiguous() for t in reference(q, k, v, softmax_scale))

    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["flash_attn.cute"].flash_attn_func = flash_attn_func
    sys.modules["flash_attn.cute.interface"]._flash_attn_bwd = backward_of
    return widths


def heads(D: int, count: int = 3) -> list[Tensor]:
    return [torch.randn(2, 5 + i, 3, D, dtype=torch.float64).requires_grad_() for i in (0, 2, 2)][:count]


@pytest.mark.parametrize(("D", "width"), [(112, 128), (128, 128), (64, 64), (14, 64)])
def test_padded_heads_change_nothing_and_the_scale_is_the_true_heads(stand_in, D, width):
    q, k, v = heads(D)
    found = flash4.attend(q, k, v, D**-0.5)
    expected = reference(q, k, v, D**-0.5)
    directions = [torch.randn_like(t) for t in expected]
    gradients = [torch.autograd.grad(outs, (q, k, v), directions) for outs in (found, expected)]
    assert stand_in == [width]
    for ours, exact in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert relative_error(ours, exact) <= 1e-14


def test_parts_of_the_keys_join_by_their_log_sum_exp(stand_in):
    """What a ring does with keys that lie on other ranks, gradients included."""
    q, k, v = heads(24)
    parts = [flash4.attend(q, k[:, keys], v[:, keys], 0.3) for keys in (slice(0, 3), slice(3, None))]
    whole = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    joined = sum(out * (lse - whole).exp().transpose(1, 2)[..., None] for out, lse in parts)
    expected, _ = reference(q, k, v, 0.3)
    direction = torch.randn_like(expected)
    for ours, exact in zip(
        (joined, *torch.autograd.grad(joined, (q, k, v), direction)),
        (expected, *torch.autograd.grad(expected, (q, k, v), direction)),
        strict=True,
    ):
        assert relative_error(ours, exact) <= 1e-13


def test_the_operators_keep_the_rules_of_operators(stand_in):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    q, k, v = (t.detach().float().requires_grad_() for t in heads(64))
    torch.library.opcheck(flash4.flash4, (q, k, v, 0.125), test_utils=tests)
    torch.library.opcheck(flash4.pad_heads, (q, 128), test_utils=tests)


@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_flash_attn_cannot_serve_is_torchs_own(kernel, masked):
    q, k, v = heads(14)
    mask = torch.tensor([True] * 5 + [False] * 2)[None, None, None] if masked else None
    out = functional.attention(q, k, v, mask=mask, scale=0.2, kernel=kernel)
    seen = slice(0, 5) if masked else slice(None)
    assert relative_error(out, reference(q, k[:, seen], v[:, seen], 0.2)[0]) <= 1e-14


def test_asking_for_flash_attn_where_it_cannot_serve_is_a_value_error_that_says_why():
    q, k, v = (t.detach().bfloat16() for t in heads(14))
    for hardware, reason in (
        (HOPPER._replace(flash4=False), "'flash4' cannot serve this call: flash-attn-4 is not installed"),
        (HOPPER._replace(device="cpu", type="cpu"), "needs an NVIDIA GPU, the tensors are on cpu"),
        (HOPPER._replace(rocm=True), "needs an NVIDIA GPU, the tensors are on cuda:0"),
        (HOPPER._replace(name="AMD Radeon RX 7900 XTX"), "needs an NVIDIA GPU, the tensors are on cuda:0"),
        (HOPPER._replace(capability=(8, 0)), "compute capability 9 or 10"),
    ):
        with pytest.raises(ValueError, match=reason):
            functional.attention(q, k, v, kernel="flash4", hardware=hardware)
        assert torch.isfinite(functional.attention(q, k, v, hardware=hardware)).all()
    for like, head_dim, masked, reason in (
        (q.float(), 14, False, "bfloat16 or float16, got torch.float32"),
        (q, 192, False, "up to 128 channels, got 192"),
        (q, 14, True, "no mask"),
    ):
        assert reason in flash4.refusal(like, head_dim, masked, HOPPER)
    assert flash4.refusal(q, 112, hardware=HOPPER) is None
    with pytest.raises(ValueError, match="one dtype"):
        functional.attention(q, k.half(), v, kernel="flash4", hardware=HOPPER)


def test_auto_takes_flash_attn_where_it_serves(stand_in):
    q, k, v = (t.detach().bfloat16() for t in heads(14))
    out = functional.attention(q, k, v, hardware=HOPPER)
    assert stand_in == [64]
    assert relative_error(out, reference(*(t.double() for t in (q, k, v)), 1 / math.sqrt(14))[0]) <= 2**-6
    functional.attention(q, k, v, kernel="sdpa", hardware=HOPPER)
    assert stand_in == [64]


def test_a_name_that_is_not_known_is_a_value_error():
    with pytest.raises(ValueError, match="attention must be one of .*got 'flash3'"):
        functional.attention(*heads(14), kernel="flash3")
