"""What surrounds attention and feed-forward in a block, on Triton: modulated norm, gated residual, rotary embedding.

Each is bound by memory traffic alone, and reads and writes every token once. Scale, shift and gate are one row a
frame: their gradients are sums over a frame's tokens, first by program, then over programs in a fixed order, so that
two runs are equal to the bit. Everything is float32 between load and store. Padded frames are selected away, never
multiplied.

They are `torch.library` operators, as in `triton_layer`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_layer import _dense, _nothing, operator

#: Tokens of a program that sums a frame's gradients.
_SHARE = 32


def _tile(C: int, most: int, blocks: int) -> dict[str, int]:
    """Channels a turn, and turns: `most` or the power of two above C, more where that takes more than `blocks`."""
    BC = max(min(most, triton.next_power_of_2(C)), triton.next_power_of_2(triton.cdiv(C, blocks)))
    return {"BC": BC, "BLOCKS": triton.cdiv(C, BC)}


def _ends(x: Tensor | None) -> tuple[int, int]:
    """Strides of batch and tokens, or of batch and frames."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def _kind(*tensors: Tensor | None) -> torch.dtype:
    """What torch makes of a sum of these."""
    kind = torch.bool
    for t in tensors:
        kind = kind if t is None else torch.promote_types(kind, t.dtype)
    return kind


def _frames(mask: Tensor | None) -> Tensor | None:
    """One byte a frame, in order."""
    return None if mask is None else mask.contiguous()


# --- norm and modulation ----------------------------------------------------------------------------------------


@triton.jit
def _modulated_norm_kernel(
    x_ptr, shift_ptr, scale_ptr, mask_ptr, out_ptr, stats_ptr,
    T, S, x_b, x_n, shift_b, shift_t, scale_b, scale_t, rows, eps,
    HAS_MASK: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R tokens of a frame, a warp each: (x - mean) / std · (1 + scale) + shift. Mean and 1 / std go to `stats`."""
    tiles = tl.cdiv(S, R)
    pid = tl.program_id(0)
    frame = (pid // tiles).to(tl.int64)
    s = (pid % tiles) * R + tl.arange(0, R)
    b, t = frame // T, frame % T
    c = tl.arange(0, BC)
    there = (s < S)[:, None]
    x_ptr += b * x_b + (t * S + s)[:, None] * x_n
    shift_ptr += b * shift_b + t * shift_t
    scale_ptr += b * scale_b + t * scale_t
    row = frame * S + s
    out_ptr += row[:, None] * C
    xs = _nothing()
    total = tl.zeros((R, BC), dtype=tl.float32)
    for i in tl.static_range(BLOCKS):
        live = there & (i * BC + c < C)[None, :]
        xs = xs + (tl.load(x_ptr + (i * BC + c)[None, :], mask=live, other=0.0).to(tl.float32),)
        total += xs[i]
    mean = tl.sum(total, 1) / C
    total = tl.zeros((R, BC), dtype=tl.float32)
    for i in tl.static_range(BLOCKS):
        x = xs[i] - mean[:, None]
        if i * BC + BC > C:
            x = tl.where((i * BC + c < C)[None, :], x, 0.0)
        total += x * x
    std = 1.0 / tl.sqrt(tl.sum(total, 1) / C + eps)
    if HAS_MASK:
        alive = tl.load(mask_ptr + frame) != 0
    for i in tl.static_range(BLOCKS):
        inside = i * BC + c < C
        scale = tl.load(scale_ptr + i * BC + c, mask=inside, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + i * BC + c, mask=inside, other=0.0).to(tl.float32)
        out = (xs[i] - mean[:, None]) * std[:, None] * (1.0 + scale)[None, :] + shift[None, :]
        if HAS_MASK:
            out = tl.where(alive, out, 0.0)
        live = there & inside[None, :]
        tl.store(out_ptr + (i * BC + c)[None, :], out.to(out_ptr.dtype.element_ty), mask=live)
    tl.store(stats_ptr + row, mean, mask=s < S)
    tl.store(stats_ptr + rows + row, std, mask=s < S)


@triton.jit
def _load_row(ptr, c, there, C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr):
    """A row's channels as they lie, by turns."""
    row = _nothing()
    for i in tl.static_range(BLOCKS):
        row = row + (tl.load(ptr + i * BC + c, mask=there & (i * BC + c < C), other=0.0),)
    return row


@triton.jit
def _modulated_norm_backward_kernel(
    x_ptr, scale_ptr, mask_ptr, stats_ptr, dout_ptr, dx_ptr, partial_ptr,
    T, S, x_b, x_n, scale_b, scale_t, rows,
    HAS_MASK: tl.constexpr, C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """SHARE tokens of a frame, one after another, the next on its way. With x^ the normalised token and
    g = dout (1 + scale): dx = (g - mean g - x^ mean(g x^)) / std; these tokens' part of dscale = Σ dout x^ and of
    dshift = Σ dout."""
    shares = tl.cdiv(S, SHARE)
    pid = tl.program_id(0)
    frame = (pid // shares).to(tl.int64)
    first = (pid % shares) * SHARE
    stop = tl.minimum(first + SHARE, S)
    b, t = frame // T, frame % T
    c = tl.arange(0, BC)
    x_ptr += b * x_b + t * S * x_n
    scale_ptr += b * scale_b + t * scale_t
    stats_ptr += frame * S
    dout_ptr += frame * S * C
    dx_ptr += frame * S * C
    dscale_ptr = partial_ptr + pid.to(tl.int64) * C
    dshift_ptr = dscale_ptr + tl.num_programs(0).to(tl.int64) * C
    if HAS_MASK:
        alive = tl.load(mask_ptr + frame) != 0
    factors, dscales, dshifts = _nothing(), _nothing(), _nothing()
    for i in tl.static_range(BLOCKS):
        factors = factors + (1.0 + tl.load(scale_ptr + i * BC + c, mask=i * BC + c < C, other=0.0).to(tl.float32),)
        dscales = dscales + (tl.zeros((BC,), dtype=tl.float32),)
        dshifts = dshifts + (tl.zeros((BC,), dtype=tl.float32),)
    zero = tl.full([], 0, tl.int64)
    next_x = _load_row(x_ptr + (zero + first) * x_n, c, True, C, BC, BLOCKS)
    next_dout = _load_row(dout_ptr + (zero + first) * C, c, True, C, BC, BLOCKS)
    next_mean, next_std = tl.load(stats_ptr + first), tl.load(stats_ptr + rows + first)
    for s in range(first, stop):
        xs, douts, mean, std = next_x, next_dout, next_mean, next_std
        more = s + 1 < stop
        next_x = _load_row(x_ptr + (zero + s + 1) * x_n, c, more, C, BC, BLOCKS)
        next_dout = _load_row(dout_ptr + (zero + s + 1) * C, c, more, C, BC, BLOCKS)
        next_mean = tl.load(stats_ptr + s + 1, mask=more, other=0.0)
        next_std = tl.load(stats_ptr + rows + s + 1, mask=more, other=0.0)
        sums, products = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
        by_scale, by_shift = _nothing(), _nothing()
        for i in tl.static_range(BLOCKS):
            x, dout = (xs[i].to(tl.float32) - mean) * std, douts[i].to(tl.float32)
            sums += dout * factors[i]
            products += dout * factors[i] * x
            by_scale = by_scale + (dscales[i] + dout * x,)
            by_shift = by_shift + (dshifts[i] + dout,)
        dscales, dshifts = by_scale, by_shift
        along, across = tl.sum(products, 0) / C, tl.sum(sums, 0) / C
        for i in tl.static_range(BLOCKS):
            x, dout = (xs[i].to(tl.float32) - mean) * std, douts[i].to(tl.float32)
            dx = (dout * factors[i] - across - x * along) * std
            if HAS_MASK:
                dx = tl.where(alive, dx, 0.0)
            tl.store(dx_ptr + (zero + s) * C + i * BC + c, dx.to(dx_ptr.dtype.element_ty), mask=i * BC + c < C)
    for i in tl.static_range(BLOCKS):
        dscale, dshift = dscales[i], dshifts[i]
        if HAS_MASK:
            dscale, dshift = tl.where(alive, dscale, 0.0), tl.where(alive, dshift, 0.0)
        tl.store(dscale_ptr + i * BC + c, dscale, mask=i * BC + c < C)
        tl.store(dshift_ptr + i * BC + c, dshift, mask=i * BC + c < C)


@operator("modulated_norm")
def modulated_norm(
    x: Tensor, shift: Tensor, scale: Tensor, mask: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """layer_norm(x) · (1 + scale) + shift, 0 in padded frames: x (B, T·S, C), shift and scale (B, T, C), mask (B, T)
    bool or None -> like x, contiguous, and mean and 1 / std of every token (2, B·T·S), which carry no gradient."""
    (B, N, C), T = x.shape, scale.shape[1]
    out = torch.empty(x.shape, dtype=_kind(x, shift, scale), device=x.device)
    stats = torch.empty(2, B * N, dtype=torch.float32, device=x.device)
    if out.numel():
        x, shift, scale = _dense(x), _dense(shift), _dense(scale)
        R = 4
        _modulated_norm_kernel[(B * T * triton.cdiv(N // T, R),)](
            x, shift, scale, _frames(mask), out, stats,
            T, N // T, *_ends(x), *_ends(shift), *_ends(scale), B * N, eps,
            HAS_MASK=mask is not None, C=C, **_tile(C, 512, 5), R=R, num_warps=R,
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
    x, scale = _dense(x), _dense(scale)
    shares = triton.cdiv(N // T, _SHARE)
    partial = torch.empty(2, B, T, shares, C, dtype=torch.float32, device=x.device)
    _modulated_norm_backward_kernel[(B * T * shares,)](
        x, scale, _frames(mask), stats, dout.contiguous(), dx, partial,
        T, N // T, *_ends(x), *_ends(scale), B * N,
        HAS_MASK=mask is not None, C=C, **_tile(C, 512, 5), SHARE=_SHARE, num_warps=4,
    )  # fmt: skip
    dscale, dshift = (shares.sum(2) for shares in partial)
    return dx, dshift.to(shift.dtype), dscale.to(scale.dtype)


@modulated_norm.register_fake
def _(x: Tensor, shift: Tensor, scale: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    stats = x.new_empty(2, x.shape[0] * x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape, dtype=_kind(x, shift, scale)), stats


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


# --- gated residual ---------------------------------------------------------------------------------------------

#: A tile of tokens and channels, on 4 warps.
_ROWS, _CHANNELS = 8, 256


@triton.jit
def _residual_kernel(
    x_ptr, h_ptr, gate_ptr, extra_ptr, mask_ptr, out_ptr,
    T, S, x_b, x_n, h_b, h_n, gate_b, gate_t, extra_b, extra_n,
    HAS_GATE: tl.constexpr, HAS_EXTRA: tl.constexpr, HAS_MASK: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one frame by channels: x + gate · h + extra."""
    tiles = tl.cdiv(S, R)
    pid = tl.program_id(0)
    frame = (pid // BLOCKS // tiles).to(tl.int64)
    s = (pid // BLOCKS) % tiles * R + tl.arange(0, R)
    c = (pid % BLOCKS) * BC + tl.arange(0, BC)
    b, t = frame // T, frame % T
    n = (t * S + s)[:, None]
    live = (s < S)[:, None] & (c < C)[None, :]
    out = tl.load(h_ptr + b * h_b + n * h_n + c[None, :], mask=live, other=0.0).to(tl.float32)
    if HAS_GATE:
        gate = tl.load(gate_ptr + b * gate_b + t * gate_t + c, mask=c < C, other=0.0).to(tl.float32)
        out = out * gate[None, :]
    out = tl.load(x_ptr + b * x_b + n * x_n + c[None, :], mask=live, other=0.0).to(tl.float32) + out
    if HAS_EXTRA:
        out += tl.load(extra_ptr + b * extra_b + n * extra_n + c[None, :], mask=live, other=0.0).to(tl.float32)
    if HAS_MASK:
        out = tl.where(tl.load(mask_ptr + frame) != 0, out, 0.0)
    row = (frame * S + s)[:, None]
    tl.store(out_ptr + row * C + c[None, :], out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _residual_backward_kernel(
    h_ptr, gate_ptr, mask_ptr, dout_ptr, dx_ptr, dh_ptr, partial_ptr, T, S, h_b, h_n, gate_b, gate_t,
    HAS_GATE: tl.constexpr, HAS_MASK: tl.constexpr,
    C: tl.constexpr, BC: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr, SHARE: tl.constexpr,
):  # fmt: skip
    """Some channels of SHARE tokens of a frame: dx = dout where the frame is there (without a mask dx is dout itself
    and is not written); dh = gate · dout; these tokens' part of dgate = Σ dout h."""
    shares = tl.cdiv(S, SHARE)
    pid = tl.program_id(0)
    frame = (pid // BLOCKS // shares).to(tl.int64)
    share = pid // BLOCKS % shares
    c = (pid % BLOCKS) * BC + tl.arange(0, BC)
    b, t = frame // T, frame % T
    if HAS_MASK:
        alive = tl.load(mask_ptr + frame) != 0
    if HAS_GATE:
        gate = tl.load(gate_ptr + b * gate_b + t * gate_t + c, mask=c < C, other=0.0).to(tl.float32)
        total = tl.zeros((R, BC), dtype=tl.float32)
    for i in tl.static_range(SHARE // R):
        s = share * SHARE + i * R + tl.arange(0, R)
        live = (s < S)[:, None] & (c < C)[None, :]
        at = (frame * S + s)[:, None] * C + c[None, :]
        dout = tl.load(dout_ptr + at, mask=live, other=0.0).to(tl.float32)
        if HAS_MASK:
            dout = tl.where(alive, dout, 0.0)
            tl.store(dx_ptr + at, dout.to(dx_ptr.dtype.element_ty), mask=live)
        if HAS_GATE:
            h = tl.load(h_ptr + b * h_b + (t * S + s)[:, None] * h_n + c[None, :], mask=live, other=0.0)
            dh = dout * gate[None, :]
            if HAS_MASK:
                dh = tl.where(alive, dh, 0.0)
            tl.store(dh_ptr + at, dh.to(dh_ptr.dtype.element_ty), mask=live)
            total += dout * h.to(tl.float32)
    if HAS_GATE:
        dgate = tl.sum(total, 0)
        if HAS_MASK:
            dgate = tl.where(alive, dgate, 0.0)
        tl.store(partial_ptr + (frame * shares + share) * C + c, dgate, mask=c < C)


@operator("residual")
def residual(
    x: Tensor, h: Tensor, gate: Tensor | None, extra: Tensor | None, mask: Tensor | None, frames: int
) -> Tensor:
    """x + gate · h + extra, 0 in padded frames: x, h, extra (B, T·S, C), gate (B, T, C), mask (B, T) bool, `frames` T
    -> (B, T·S, C) contiguous. No gate is 1, no extra 0."""
    B, N, C = x.shape
    out = torch.empty(x.shape, dtype=_kind(x, h, gate, extra), device=x.device)
    if out.numel():
        x, h = _dense(x), _dense(h)
        gate, extra = (None if t is None else _dense(t) for t in (gate, extra))
        tile = _tile(C, _CHANNELS, C)
        _residual_kernel[(B * frames * triton.cdiv(N // frames, _ROWS) * tile["BLOCKS"],)](
            x, h, gate, extra, _frames(mask), out,
            frames, N // frames, *_ends(x), *_ends(h), *_ends(gate), *_ends(extra),
            HAS_GATE=gate is not None, HAS_EXTRA=extra is not None, HAS_MASK=mask is not None,
            C=C, **tile, R=_ROWS, num_warps=4,
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
    h, gate = _dense(h), None if gate is None else _dense(gate)
    shares, tile = triton.cdiv(N // frames, _SHARE), _tile(C, _CHANNELS, C)
    partial = dout.new_empty((B, frames, shares, C) if gate is not None else 0, dtype=torch.float32)
    _residual_backward_kernel[(B * frames * shares * tile["BLOCKS"],)](
        h, gate, _frames(mask), dout.contiguous(), dx, dh, partial,
        frames, N // frames, *_ends(h), *_ends(gate),
        HAS_GATE=gate is not None, HAS_MASK=mask is not None, C=C, **tile, R=_ROWS, SHARE=_SHARE, num_warps=4,
    )  # fmt: skip
    return dx, dh, h.new_empty(0) if gate is None else partial.sum(2).to(gate.dtype)


@residual.register_fake
def _(x: Tensor, h: Tensor, gate: Tensor | None, extra: Tensor | None, *args: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=_kind(x, h, gate, extra))


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


# --- rotary embedding -------------------------------------------------------------------------------------------


@triton.jit
def _rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, out_ptr, rows, N, x_b, x_n, x_h, table_b,
    INVERSE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R tokens, all heads: each pair of channels by its token's angle."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    b, n = row // N, row % N
    for i in tl.static_range(BLOCKS):
        pair = i * BP + tl.arange(0, BP)
        c = i * 2 * BP + tl.arange(0, 2 * BP)
        live = (row < rows)[:, None] & (c < H * D)[None, :]
        x = tl.load(x_ptr + (b * x_b + n * x_n)[:, None] + (c // D * x_h + c % D)[None, :], mask=live, other=0.0)
        at = (b * table_b + n * (D // 2))[:, None] + (pair % (D // 2))[None, :]
        live_pair = (row < rows)[:, None] & (pair < H * D // 2)[None, :]
        cos = tl.load(cos_ptr + at, mask=live_pair, other=0.0)
        sin = tl.load(sin_ptr + at, mask=live_pair, other=0.0)
        if INVERSE:
            sin = -sin
        even, odd = tl.split(tl.reshape(x.to(tl.float32), (R, BP, 2)))
        out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (R, 2 * BP))
        tl.store(out_ptr + row[:, None] * (H * D) + c[None, :], out.to(out_ptr.dtype.element_ty), mask=live)


@operator("rotary")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Interleaved pairs of x (B, N, H, D) turned by the angles of the tables (1 or B, N, D/2), backwards with
    `inverse` -> like x, contiguous. The tables get no gradient."""
    B, N, H, D = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = _dense(x)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        R, BP = 4, min(128, triton.next_power_of_2(H * D // 2))
        _rotary_kernel[(triton.cdiv(B * N, R),)](
            x, cos, sin, out, B * N, N, *x.stride()[:3], 0 if len(cos) == 1 else cos.stride(0),
            INVERSE=inverse, H=H, D=D, BP=BP, BLOCKS=triton.cdiv(H * D // 2, BP), R=R, num_warps=R,
        )  # fmt: skip
    return out


@rotary.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save_rotary(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.inverse = inputs
    ctx.save_for_backward(cos, sin)


def _rotary_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return rotary(dout, *ctx.saved_tensors, not ctx.inverse), None, None, None


rotary.register_autograd(_rotary_backward, setup_context=_save_rotary)
