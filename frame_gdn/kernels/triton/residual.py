"""The gated residual of a block on Triton, x + gate · h, forward and backward.

Bound by memory traffic alone: every token is read and written once. The gate is one row a frame: its gradient is a sum
over the frame's tokens, first by program, then over programs in a fixed order, so that two runs are equal to the bit.
Everything is float32 between load and store. Padded frames are selected away, never multiplied.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import channel_tile, dense, launch, mask_bytes, operator, promoted_dtype, rows_strided
from .tiles import is_active

#: Tokens of a program that sums a frame's gradients.
_SHARE = 32
#: A tile of tokens and channels, on 4 warps.
_ROWS, _CHANNELS = 8, 256


@triton.jit
def _residual_kernel(
    x, h, gate, extra, mask_ptr, out_ptr, shape,
    HAS_GATE: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_MASK: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one frame by channels: x + gate · h + extra."""
    T, S = shape
    tiles = tl.cdiv(S, BN)
    pid = tl.program_id(0)
    frame = (pid // BLOCKS // tiles).to(tl.int64)
    s = (pid // BLOCKS) % tiles * BN + tl.arange(0, BN)
    c = (pid % BLOCKS) * BC + tl.arange(0, BC)
    b, t = frame // T, frame % T
    n = (t * S + s)[:, None]
    live = (s < S)[:, None] & (c < C)[None, :]
    out = tl.load(h[0] + b * h[1] + n * h[2] + c[None, :], mask=live, other=0.0).to(tl.float32)
    if HAS_GATE:
        factor = tl.load(gate[0] + b * gate[1] + t * gate[2] + c, mask=c < C, other=0.0).to(tl.float32)
        out = out * factor[None, :]
    out = tl.load(x[0] + b * x[1] + n * x[2] + c[None, :], mask=live, other=0.0).to(tl.float32) + out
    if HAS_EXTRA:
        out += tl.load(extra[0] + b * extra[1] + n * extra[2] + c[None, :], mask=live, other=0.0).to(tl.float32)
    if HAS_MASK:
        out = tl.where(is_active(mask_ptr, frame, HAS_MASK), out, 0.0)
    row = (frame * S + s)[:, None]
    tl.store(out_ptr + row * C + c[None, :], out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _residual_backward_kernel(
    h, gate, mask_ptr, dout_ptr, dx_ptr, dh_ptr, partial_ptr, shape,
    HAS_GATE: tl.constexpr, HAS_MASK: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some channels of SHARE tokens of a frame: dx = dout where the frame is there (without a mask dx is dout itself
    and is not written); dh = gate · dout; these tokens' part of dgate = Σ dout h."""
    T, S = shape
    shares = tl.cdiv(S, SHARE)
    pid = tl.program_id(0)
    frame = (pid // BLOCKS // shares).to(tl.int64)
    share = pid // BLOCKS % shares
    c = (pid % BLOCKS) * BC + tl.arange(0, BC)
    b, t = frame // T, frame % T
    if HAS_MASK:
        active = is_active(mask_ptr, frame, HAS_MASK)
    if HAS_GATE:
        factor = tl.load(gate[0] + b * gate[1] + t * gate[2] + c, mask=c < C, other=0.0).to(tl.float32)
        total = tl.zeros((BN, BC), dtype=tl.float32)
    for i in tl.static_range(SHARE // BN):
        s = share * SHARE + i * BN + tl.arange(0, BN)
        live = (s < S)[:, None] & (c < C)[None, :]
        at = (frame * S + s)[:, None] * C + c[None, :]
        dout = tl.load(dout_ptr + at, mask=live, other=0.0).to(tl.float32)
        if HAS_MASK:
            dout = tl.where(active, dout, 0.0)
            tl.store(dx_ptr + at, dout.to(dx_ptr.dtype.element_ty), mask=live)
        if HAS_GATE:
            added = tl.load(h[0] + b * h[1] + (t * S + s)[:, None] * h[2] + c[None, :], mask=live, other=0.0)
            dh = dout * factor[None, :]
            if HAS_MASK:
                dh = tl.where(active, dh, 0.0)
            tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=live)
            total += dout * added.to(tl.float32)
    if HAS_GATE:
        dgate = tl.sum(total, 0)
        if HAS_MASK:
            dgate = tl.where(active, dgate, 0.0)
        tl.store(partial_ptr + (frame * shares + share) * C + c, dgate, mask=c < C)


@operator("residual")
def residual(
    x: Tensor, h: Tensor, gate: Tensor | None, extra: Tensor | None, mask: Tensor | None, frames: int
) -> Tensor:
    """x + gate · h + extra, 0 in padded frames: x, h, extra (B, T·S, C), gate (B, T, C), mask (B, T) bool, `frames` T
    -> (B, T·S, C) contiguous. No gate is 1, no extra 0."""
    B, N, C = x.shape
    out = torch.empty(x.shape, dtype=promoted_dtype(x, h, gate, extra), device=x.device)
    if out.numel():
        inputs = (rows_strided(None if t is None else dense(t)) for t in (x, h, gate, extra))
        tile = channel_tile(C, _CHANNELS, C)
        launch(
            _residual_kernel, B * frames * triton.cdiv(N // frames, _ROWS) * tile["BLOCKS"],
            (*inputs, mask_bytes(mask), out, (frames, N // frames)),
            HAS_GATE=gate is not None, HAS_EXTRA=extra is not None, HAS_MASK=mask is not None,
            C=C, **tile, BN=_ROWS,
        )  # fmt: skip
    return out


@operator("residual_backward")
def residual_backward(
    dout: Tensor, h: Tensor, gate: Tensor | None, mask: Tensor | None, frames: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, empty without a mask, for then it is dout; dh and dgate, empty without a gate, for then dh is dx."""
    B, N, C = h.shape
    dx = dout.new_empty(0 if mask is None else dout.shape)
    dh = h.new_empty(0 if gate is None else h.shape)
    if h.numel() == 0 or (gate is None and mask is None):
        return dx, dh, h.new_empty(0) if gate is None else gate.new_zeros(gate.shape)
    shares, tile = triton.cdiv(N // frames, _SHARE), channel_tile(C, _CHANNELS, C)
    partial = dout.new_empty((B, frames, shares, C) if gate is not None else 0, dtype=torch.float32)
    launch(
        _residual_backward_kernel, B * frames * shares * tile["BLOCKS"],
        (rows_strided(dense(h)), rows_strided(None if gate is None else dense(gate)), mask_bytes(mask),
         dout.contiguous(), dx, dh, partial, (frames, N // frames)),
        HAS_GATE=gate is not None, HAS_MASK=mask is not None, C=C, **tile, BN=_ROWS, SHARE=_SHARE,
    )  # fmt: skip
    return dx, dh, h.new_empty(0) if gate is None else partial.sum(2).to(gate.dtype)


@residual.register_fake
def _(x: Tensor, h: Tensor, gate: Tensor | None, extra: Tensor | None, *args: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=promoted_dtype(x, h, gate, extra))


@residual_backward.register_fake
def _(
    dout: Tensor, h: Tensor, gate: Tensor | None, mask: Tensor | None, frames: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        dout.new_empty(0 if mask is None else dout.shape),
        h.new_empty(0 if gate is None else h.shape),
        h.new_empty(0) if gate is None else gate.new_empty(gate.shape),
    )


def _save_residual(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, h, gate, extra, mask, ctx.frames = inputs
    ctx.kinds = x.dtype, h.dtype, None if extra is None else extra.dtype
    ctx.save_for_backward(h, gate, mask)


def _residual_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    h, gate, mask = ctx.saved_tensors
    dx, dh, dgate = residual_backward(dout, h, gate, mask, ctx.frames)
    dx = dout if mask is None else dx
    of_x, of_h, of_extra = ctx.kinds
    return (
        dx.to(of_x),
        dx.to(of_h) if gate is None else dh,
        None if gate is None else dgate,
        None if of_extra is None else dx.to(of_extra),
        None,
        None,
    )


residual.register_autograd(_residual_backward, setup_context=_save_residual)
