"""The kernels around attention and feed-forward against plain PyTorch in float64, values and every gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ..helpers import relative_error
from .test_layer_operators import DTYPES, check, random
from .test_steps import DEVICE, poisoned_memory  # noqa: F401 (a fixture)

pytest.importorskip("triton")

from frame_gdn.kernels.triton.modulation import modulated_norm as fused_modulated_norm
from frame_gdn.kernels.triton.residual import residual as fused_residual
from frame_gdn.kernels.triton.rotary import rotary as fused_rotary

#: B, T, S, C: one token, odd counts, a warp's turns and more than one share of a frame's tokens.
SIZES = [(1, 1, 1, 24), (2, 3, 5, 24), (1, 2, 7, 5), (2, 1, 35, 336)]


def by_frame(x: Tensor, frames: int) -> Tensor:
    return x.unflatten(1, (frames, -1))


def select(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x
    return torch.where(mask.repeat_interleave(x.shape[1] // mask.shape[1], 1)[..., None], x, 0.0)


def padded(B: int, T: int) -> Tensor:
    """Every second frame of the first sample, the others whole."""
    mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    mask[0, 1::2] = False
    return mask


def slices(B: int, T: int, C: int, dtype: torch.dtype, count: int = 2) -> list[Tensor]:
    """Modulations (B, T, C) as a block cuts them from one tensor."""
    return list(random(B, T, 6, C, dtype=dtype).unbind(2)[:count])


def modulated_norm(mask: Tensor | None = None):
    def run(backend, x, shift, scale):
        if backend == "triton":
            return fused_modulated_norm(x, shift, scale, mask, 1e-6)[0]
        normed = by_frame(F.layer_norm(x, x.shape[-1:], eps=1e-6), scale.shape[1])
        return select((normed * (1 + scale)[:, :, None] + shift[:, :, None]).flatten(1, 2), mask)

    return run


def residual(frames: int, mask: Tensor | None = None):
    def run(backend, x, h, gate=None, extra=None):
        if backend == "triton":
            return fused_residual(x, h, gate, extra, mask, frames)
        if gate is not None:
            h = (by_frame(h, frames) * gate[:, :, None]).flatten(1, 2)
        return select(x + h if extra is None else x + h + extra, mask)

    return run


def rotary(cos: Tensor, sin: Tensor, inverse: bool = False):
    def run(backend, x):
        if backend == "triton":
            return fused_rotary(x, cos, sin, inverse)
        even, odd = x.double().unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos.double()[:, :, None], sin.double()[:, :, None] * (-1 if inverse else 1)
        return torch.stack([even * c - odd * s, even * s + odd * c], -1).flatten(-2).to(x.dtype)

    return run


def strided(B: int, N: int, C: int, dtype: torch.dtype) -> Tensor:
    """Tokens as a part of wider ones."""
    return random(B, N, 3 * C, dtype=dtype).chunk(3, -1)[1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "T", "S", "C"), SIZES)
def test_modulated_norm(B, T, S, C, dtype, masked):
    shift, scale = slices(B, T, C, dtype)
    inputs = {"x": 0.5 + strided(B, T * S, C, dtype), "shift": shift, "scale": 0.3 * scale}
    check(modulated_norm(padded(B, T) if masked else None), inputs)


def test_norm_of_tokens_far_from_zero():
    """Mean 100, standard deviation 1: sums of squares alone would leave nothing of the variance in half the digits."""
    shift, scale = slices(1, 2, 336, torch.float32)
    x = 100 + random(1, 2 * 3, 336, dtype=torch.float32)
    found, exact = (modulated_norm()(b, *(t.to(k) for t in (x, shift, scale))) for b, k in
                    (("triton", torch.float32), ("torch", torch.float64)))  # fmt: skip
    assert relative_error(found, exact) <= 1e-5


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("parts", [("gate", "extra"), ("gate",), ("extra",), ()], ids="+".join)
@pytest.mark.parametrize(("B", "T", "S", "C"), SIZES)
def test_residual_with_gate_and_more(B, T, S, C, parts, masked):
    dtype = torch.float32
    inputs = {"x": strided(B, T * S, C, dtype), "h": strided(B, T * S, C, dtype)}
    inputs |= {name: t for name, t in {"gate": slices(B, T, C, dtype)[1], "extra": random(B, T * S, C)}.items()
               if name in parts}  # fmt: skip
    check(residual(T, padded(B, T) if masked else None), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_residual_in_every_dtype(dtype):
    B, T, S, C = 2, 3, 5, 112
    inputs = {name: random(B, T * S, C, dtype=dtype) for name in ("x", "h", "extra")}
    check(residual(T, padded(B, T)), inputs | {"gate": slices(B, T, C, dtype)[0]})


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "N", "H", "D", "tables"), [(1, 1, 1, 2, 1), (2, 5, 3, 24, 2), (2, 7, 2, 112, 1)])
def test_rotary(B, N, H, D, tables, dtype, inverse):
    angle = 6.28 * torch.rand(tables, N, D // 2, device=DEVICE)
    x = strided(B, N, H * D, dtype).unflatten(-1, (H, D))
    check(rotary(angle.cos(), angle.sin(), inverse), {"x": x})


def test_what_16_bit_tokens_and_float32_modulation_make_is_float32():
    """What autocast gives, with the gradients in each input's own dtype."""
    x, h, extra = (random(1, 6, 24, dtype=torch.float16).requires_grad_() for _ in range(3))
    shift, scale, gate = (t.requires_grad_() for t in random(3, 1, 2, 24).unbind(0))
    for given, out in (
        ((x, shift, scale), fused_modulated_norm(x, shift, scale, None, 1e-6)[0]),
        ((x, h, gate, extra), fused_residual(x, h, gate, extra, None, 2)),
        ((x, h, extra), fused_residual(x, h, None, extra, None, 2).float()),
    ):
        assert out.dtype == torch.float32
        for t, d in zip(given, torch.autograd.grad(out.sum(), given), strict=True):
            assert d.dtype == t.dtype


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_a_padded_frame_holds_reaches_nothing(poison):
    """Neither values nor gradients, those of the padded frames included."""
    B, T, S, C = 2, 3, 5, 24
    mask = padded(B, T)
    dead = ~mask.repeat_interleave(S, 1)
    for run, tokens, modulations in (
        (modulated_norm(mask), ("x",), ("shift", "scale")),
        (residual(T, mask), ("x", "h", "extra"), ("gate",)),
    ):
        inputs = {name: random(B, T * S, C) for name in tokens} | {name: random(B, T, C) for name in modulations}
        found = []
        for value in (0.0, poison):
            given = {n: t.detach().clone() for n, t in inputs.items()}
            for t in given.values():
                t[dead if t.shape[1] == T * S else ~mask] = value
            out = run("triton", **{n: t.requires_grad_() for n, t in given.items()})
            direction = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).clone()
            direction[dead] = value
            found.append([out, *torch.autograd.grad(out, list(given.values()), direction)])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        assert not found[1][0][dead].any()


def test_nothing_at_all():
    x, h, modulation = random(1, 0, 24).requires_grad_(), random(1, 0, 24), random(1, 0, 24).requires_grad_()
    out = fused_residual(fused_modulated_norm(x, modulation, modulation, None, 1e-6)[0], h, modulation,
                                None, None, 0)  # fmt: skip
    out = fused_rotary(out.view(1, 0, 2, 12), random(1, 0, 6), random(1, 0, 6), False)
    out.sum().backward()
    assert x.grad.shape == x.shape and modulation.grad.shape == modulation.shape


def test_two_runs_are_equal_to_the_bit():
    B, T, S, C = 2, 2, 70, 24
    x, h = random(2, B, T * S, C).unbind(0)
    shift, scale, gate = (t.requires_grad_() for t in random(3, B, T, C).unbind(0))

    def run():
        out = residual(T)("triton", x, modulated_norm()("triton", h, shift, scale), gate)
        return [out, *torch.autograd.grad(out.square().sum(), (shift, scale, gate))]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_the_operators_keep_the_rules_of_operators():
    x, h, extra = (t.requires_grad_() for t in random(3, 2, 6, 8).unbind(0))
    shift, scale, gate = (t.requires_grad_() for t in random(3, 2, 3, 8).unbind(0))
    mask = padded(2, 3)
    for operator, arguments in (
        (fused_modulated_norm, (x, shift, scale, mask, 1e-6)),
        (fused_modulated_norm, (x, shift, scale, None, 1e-6)),
        (fused_residual, (x, h, gate, extra, mask, 3)),
        (fused_residual, (x, h, gate, None, None, 3)),
        (fused_residual, (x, h, None, None, mask, 3)),
        (fused_residual, (x, h, None, extra, None, 3)),
        (fused_rotary, (x.unflatten(-1, (2, 4)), random(1, 6, 2), random(1, 6, 2), False)),
    ):
        torch.library.opcheck(
            operator, arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
        )  # fmt: skip
