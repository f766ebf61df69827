"""Layer norm, scale and shift of a block's modulation on Triton, forward and backward.

Bound by memory traffic alone: every token is read and written once. Scale and shift are one row a frame: their
gradients are sums over a frame's tokens, first by program, then over programs in a fixed order, so that two runs are
equal to the bit. Everything is float32 between load and store. Padded frames are selected away, never multiplied.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import channel_tile, dense, launch, mask_bytes, operator, promoted_dtype, rows_strided
from .tiles import empty_tuple, is_active

#: Tokens of a program that sums a frame's gradients.
_SHARE = 32


@triton.jit
def _modulated_norm_kernel(
    x, shift, scale, mask_ptr, out_ptr, stats_ptr, shape, rows, eps,
    HAS_MASK: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN tokens of a frame, a warp each: (x - mean) / std · (1 + scale) + shift. Mean and 1 / std go to `stats`."""
    T, S = shape
    tiles = tl.cdiv(S, BN)
    pid = tl.program_id(0)
    frame = (pid // tiles).to(tl.int64)
    s = (pid % tiles) * BN + tl.arange(0, BN)
    b, t = frame // T, frame % T
    c = tl.arange(0, BC)
    there = (s < S)[:, None]
    x_ptr = x[0] + b * x[1] + (t * S + s)[:, None] * x[2]
    shift_ptr = shift[0] + b * shift[1] + t * shift[2]
    scale_ptr = scale[0] + b * scale[1] + t * scale[2]
    row = frame * S + s
    out_ptr += row[:, None] * C
    xs = empty_tuple()
    total = tl.zeros((BN, BC), dtype=tl.float32)
    for i in tl.static_range(BLOCKS):
        live = there & (i * BC + c < C)[None, :]
        xs = xs + (tl.load(x_ptr + (i * BC + c)[None, :], mask=live, other=0.0).to(tl.float32),)
        total += xs[i]
    mean = tl.sum(total, 1) / C
    total = tl.zeros((BN, BC), dtype=tl.float32)
    for i in tl.static_range(BLOCKS):
        centred = xs[i] - mean[:, None]
        if i * BC + BC > C:
            centred = tl.where((i * BC + c < C)[None, :], centred, 0.0)
        total += centred * centred
    std = 1.0 / tl.sqrt(tl.sum(total, 1) / C + eps)
    if HAS_MASK:
        active = is_active(mask_ptr, frame, HAS_MASK)
    for i in tl.static_range(BLOCKS):
        inside = i * BC + c < C
        factor = 1.0 + tl.load(scale_ptr + i * BC + c, mask=inside, other=0.0).to(tl.float32)
        offset = tl.load(shift_ptr + i * BC + c, mask=inside, other=0.0).to(tl.float32)
        out = (xs[i] - mean[:, None]) * std[:, None] * factor[None, :] + offset[None, :]
        if HAS_MASK:
            out = tl.where(active, out, 0.0)
        live = there & inside[None, :]
        tl.store(out_ptr + (i * BC + c)[None, :], out.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(stats_ptr + row, mean, mask=s < S)
    tl.store(stats_ptr + rows + row, std, mask=s < S)


@triton.jit
def _load_row(ptr, c, there, C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr):
    """A row's channels as they lie, by turns."""
    row = empty_tuple()
    for i in tl.static_range(BLOCKS):
        row = row + (tl.load(ptr + i * BC + c, mask=there & (i * BC + c < C), other=0.0),)
    return row


@triton.jit
def _modulated_norm_backward_kernel(
    x, scale, mask_ptr, stats_ptr, dout_ptr, dx_ptr, partial_ptr, shape, rows,
    HAS_MASK: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """SHARE tokens of a frame, one after another, the next on its way. With x^ the normalised token and
    g = dout (1 + scale): dx = (g - mean g - x^ mean(g x^)) / std; these tokens' part of dscale = Σ dout x^ and of
    dshift = Σ dout."""
    T, S = shape
    shares = tl.cdiv(S, SHARE)
    pid = tl.program_id(0)
    frame = (pid // shares).to(tl.int64)
    first = (pid % shares) * SHARE
    stop = tl.minimum(first + SHARE, S)
    b, t = frame // T, frame % T
    c = tl.arange(0, BC)
    x_ptr = x[0] + b * x[1] + t * S * x[2]
    scale_ptr = scale[0] + b * scale[1] + t * scale[2]
    stats_ptr += frame * S
    dout_ptr += frame * S * C
    dx_ptr += frame * S * C
    dscale_ptr = partial_ptr + pid.to(tl.int64) * C
    dshift_ptr = dscale_ptr + tl.num_programs(0).to(tl.int64) * C
    if HAS_MASK:
        active = is_active(mask_ptr, frame, HAS_MASK)
    factors, dscales, dshifts = empty_tuple(), empty_tuple(), empty_tuple()
    for i in tl.static_range(BLOCKS):
        factors = factors + (1.0 + tl.load(scale_ptr + i * BC + c, mask=i * BC + c < C, other=0.0).to(tl.float32),)
        dscales = dscales + (tl.zeros((BC,), dtype=tl.float32),)
        dshifts = dshifts + (tl.zeros((BC,), dtype=tl.float32),)
    zero = tl.full([], 0, tl.int64)
    next_x = _load_row(x_ptr + (zero + first) * x[2], c, True, C, BC, BLOCKS)
    next_dout = _load_row(dout_ptr + (zero + first) * C, c, True, C, BC, BLOCKS)
    next_mean, next_std = tl.load(stats_ptr + first), tl.load(stats_ptr + rows + first)
    for s in range(first, stop):
        xs, douts, mean, std = next_x, next_dout, next_mean, next_std
        more = s + 1 < stop
        next_x = _load_row(x_ptr + (zero + s + 1) * x[2], c, more, C, BC, BLOCKS)
        next_dout = _load_row(dout_ptr + (zero + s + 1) * C, c, more, C, BC, BLOCKS)
        next_mean = tl.load(stats_ptr + s + 1, mask=more, other=0.0)
        next_std = tl.load(stats_ptr + rows + s + 1, mask=more, other=0.0)
        sums, products = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
        by_scale, by_shift = empty_tuple(), empty_tuple()
        for i in tl.static_range(BLOCKS):
            normed, dout = (xs[i].to(tl.float32) - mean) * std, douts[i].to(tl.float32)
            sums += dout * factors[i]
            products += dout * factors[i] * normed
            by_scale = by_scale + (dscales[i] + dout * normed,)
            by_shift = by_shift + (dshifts[i] + dout,)
        dscales, dshifts = by_scale, by_shift
        along, across = tl.sum(products, 0) / C, tl.sum(sums, 0) / C
        for i in tl.static_range(BLOCKS):
            normed, dout = (xs[i].to(tl.float32) - mean) * std, douts[i].to(tl.float32)
            dx = (dout * factors[i] - across - normed * along) * std
            if HAS_MASK:
                dx = tl.where(active, dx, 0.0)
            tl.store(dx_ptr + (zero + s) * C + i * BC + c, dx.to(dx_ptr.dtype.element_ty), mask=i * BC + c < C)
    for i in tl.static_range(BLOCKS):
        dscale, dshift = dscales[i], dshifts[i]
        if HAS_MASK:
            dscale, dshift = tl.where(active, dscale, 0.0), tl.where(active, dshift, 0.0)
        tl.store(dscale_ptr + i * BC + c, dscale, mask=i * BC + c < C)
        tl.store(dshift_ptr + i * BC + c, dshift, mask=i * BC + c < C)


@operator("modulated_norm")
def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, mask: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """layer_norm(x) · (1 + scale) + shift, 0 in padded frames: x (B, T·S, C), shift and scale (B, T, C), mask (B, T)
    bool or None -> like x, contiguous, and mean and 1 / std of every token (2, B·T·S), which carry no gradient."""
    (B, N, C), T = x.shape, scale.shape[1]
    out = torch.empty(x.shape, dtype=promoted_dtype(x, shift, scale), device=x.device)
    stats = torch.empty(2, B * N, dtype=torch.float32, device=x.device)
    if out.numel():
        inputs = (rows_strided(dense(t)) for t in (x, shift, scale))
        BN = 4
        launch(
            _modulated_norm_kernel, B * T * triton.cdiv(N // T, BN),
            (*inputs, mask_bytes(mask), out, stats, (T, N // T), B * N, eps),
            HAS_MASK=mask is not None, C=C, **channel_tile(C, 512, 5), BN=BN, num_warps=BN,
        )  # fmt: skip
    return out, stats


@operator("modulated_norm_backward")
def modulated_norm_backward(
    dout: Tensor, x: Tensor, shift: Tensor, scale: Tensor, mask: Tensor | None, stats: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, shift and scale."""
    (B, N, C), T = x.shape, scale.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, shift.new_zeros(shift.shape), scale.new_zeros(scale.shape)
    shares = triton.cdiv(N // T, _SHARE)
    partial = torch.empty(2, B, T, shares, C, dtype=torch.float32, device=x.device)
    launch(
        _modulated_norm_backward_kernel, B * T * shares,
        (rows_strided(dense(x)), rows_strided(dense(scale)), mask_bytes(mask), stats, dout.contiguous(), dx, partial,
         (T, N // T), B * N),
        HAS_MASK=mask is not None, C=C, **channel_tile(C, 512, 5), SHARE=_SHARE,
    )  # fmt: skip
    dscale, dshift = (shares.sum(2) for shares in partial)
    return dx, dshift.to(shift.dtype), dscale.to(scale.dtype)


@modulated_norm.register_fake
def _(x: Tensor, shift: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    stats = x.new_empty(2, x.shape[0] * x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=promoted_dtype(x, shift, scale)), stats


@modulated_norm_backward.register_fake
def _(dout: Tensor, x: Tensor, shift: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), shift.new_empty(shift.shape), scale.new_empty(scale.shape)


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _norm_backward(ctx: Any, dout: Tensor, dstats: None) -> tuple[Tensor | None, ...]:
    dx, dshift, dscale = modulated_norm_backward(dout, *ctx.saved_tensors)
    return dx, dshift, dscale, None, None


modulated_norm.register_autograd(_norm_backward, setup_context=_save_norm)
