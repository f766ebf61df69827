"""The short convolution over frames on Triton, forward and backward.

Bound by memory traffic alone: a program goes along time with its window in registers, and reads and writes every token
once. Everything is float32 between load and store. The weight's gradient is summed by program, then over programs in a
fixed order: two runs are equal to the bit. Only inputs are kept for the backward pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, launch, operator, strided
from .tiles import empty_tuple

#: Channels of a program, and how many frames are on their way to it while it works on one: forward, backward.
_CHANNELS, _AHEAD, _AHEAD_BACK = 256, 3, 2
#: How many frames of the forward loop are written out, which saves moving the window along.
_UNROLL = 4
#: Programs of the backward pass: as many as an H200 holds at once, or its last round would be nearly empty.
_CONV_PROGRAMS = 1024
#: The same of the backward loop. With a halo it would cost registers. Without one, triton 3.6 takes 156 registers by
#: itself, and fewer programs run at a time; under the limit it takes 116 and spills none.
_BACK: dict[str, int] = {"UNROLL": 2, "maxnreg": 128}
_BACK_WITH_HALO: dict[str, int] = {"UNROLL": 1}
#: What stands for the ends of chunks where there are none.
_NO_ENDS = (0, 1, 0)


@triton.jit
def _load_frame(
    x, past, future, t, T, c, live,
    REACH: tl.constexpr, HAS_PAST: tl.constexpr, HAS_FUTURE: tl.constexpr,
):  # fmt: skip
    """Channels c of frame t, an int64; frames from -REACH on are the past's, from T on the future's, others zero.

    x, past and future are one token's (address, stride of frames).
    """
    ptr = x[0] + t * x[1]
    inside = (t >= 0) & (t < T)
    if HAS_PAST:
        before = (t >= -REACH) & (t < 0)
        ptr = tl.where(before, past[0] + (t + REACH) * past[1], ptr)
        inside = inside | before
    if HAS_FUTURE:
        after = (t >= T) & (t < T + REACH)
        ptr = tl.where(after, future[0] + (t - T) * future[1], ptr)
        inside = inside | after
    return tl.load(ptr + c, mask=live & inside, other=0.0)


@triton.jit
def _token(tensor, b, s):
    """Token s of batch b in all frames, of (pointer, strides of b, t, s): its address and the stride of frames."""
    return tensor[0] + b * tensor[1] + s * tensor[3], tensor[2]


@triton.jit
def _load_taps(weight_ptr, c, live, K: tl.constexpr):
    """Taps by their distance from the centre, which is the last of the K."""
    taps = empty_tuple()
    for j in tl.static_range(K):
        taps = taps + (tl.load(weight_ptr + c.to(tl.int64) * K + (K - 1 - j), mask=live, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _chunk_ends_within(t, j, ends):
    """Whether one of the frames t ... t + j - 1 is the last of its chunk; `ends` as `chunks.ChunkEnds`."""
    first, period, stop = ends
    beyond = t - first
    after = tl.where(beyond > 0, (period - beyond % period) % period, -beyond)
    return (after < j) & (t + after < stop)


@triton.jit
def _conv_kernel(
    x, past, future, weight_ptr, out_ptr, shape, ends,
    K: tl.constexpr, HAS_PAST: tl.constexpr, HAS_FUTURE: tl.constexpr, CHUNKED: tl.constexpr,
    BC: tl.constexpr, AHEAD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A block of channels of one token, through all its frames.

    `window` holds frames t - REACH ... t + REACH in float32, `coming` the AHEAD after them as they arrive: converting
    one waits for it. `ends` as `chunks.ChunkEnds`.
    """
    T, S, C = shape
    REACH: tl.constexpr = K - 1
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    s = ((pid // blocks) % S).to(tl.int64)
    b = (pid // blocks // S).to(tl.int64)
    zero = tl.full([], 0, tl.int64)
    live = c < C
    x, past, future = _token(x, b, s), _token(past, b, s), _token(future, b, s)
    out_ptr += (b * T * S + s) * C
    taps = _load_taps(weight_ptr, c, live, K)
    window, coming = empty_tuple(), empty_tuple()
    for i in tl.static_range(2 * REACH + AHEAD):
        frame = _load_frame(
            x, past, future, zero + (i - REACH), T, c, live, REACH, HAS_PAST, HAS_FUTURE
        )  # fmt: skip
        if i < 2 * REACH:
            window = window + (frame.to(tl.float32),)
        else:
            coming = coming + (frame,)
    for t in tl.range(T, loop_unroll_factor=UNROLL):
        frame = _load_frame(
            x, past, future, zero + t + (REACH + AHEAD), T, c, live, REACH, HAS_PAST, HAS_FUTURE
        )  # fmt: skip
        coming = coming + (frame,)
        window = window + (coming[0].to(tl.float32),)
        out = taps[0] * window[REACH]
        for j in tl.static_range(1, K):
            after = window[REACH + j]
            if CHUNKED:
                after = tl.where(_chunk_ends_within(t, j, ends), 0.0, after)
            out += taps[j] * (window[REACH - j] + after)
        tl.store(out_ptr + (zero + t) * S * C + c, out.to(out_ptr.dtype.element_ty), mask=live)
        window, coming = window[1:], coming[1:]


@triton.jit
def _conv_backward_kernel(
    x, past, future, weight_ptr, dout_ptr, dx_ptr, dpast_ptr, dfuture_ptr, partial_ptr, shape, ends, tokens,
    K: tl.constexpr, HAS_PAST: tl.constexpr, HAS_FUTURE: tl.constexpr, CHUNKED: tl.constexpr,
    BC: tl.constexpr, AHEAD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A block of channels of every so many-th of the B S tokens, through all frames and the halo: dx, and these
    tokens' part of dweight.

    Frame t met tap j in out_{t+j}, and in out_{t-j} unless a chunk ends between: with g_j = dout_{t+j} + dout_{t-j},
    dx_t = sum of w_j g_j, and dw_j = sum over t of x_t g_j.
    """
    T, S, C = shape
    REACH: tl.constexpr = K - 1
    blocks = tl.cdiv(C, BC)
    group, groups = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    zero = tl.full([], 0, tl.int64)
    live = c < C
    partial_ptr += group.to(tl.int64) * K * C
    taps = _load_taps(weight_ptr, c, live, K)
    dtaps = empty_tuple()
    for _ in tl.static_range(K):
        dtaps = dtaps + (tl.zeros((BC,), dtype=tl.float32),)
    first, stop = 0, T
    if HAS_PAST:
        first = -REACH
    if HAS_FUTURE:
        stop = T + REACH
    for token in range(group, tokens, groups):
        b, s = zero + token // S, zero + token % S
        x_token, past_token, future_token = _token(x, b, s), _token(past, b, s), _token(future, b, s)
        dout = (dout_ptr + (b * T * S + s) * C, (zero + S) * C)
        window, coming, xs = empty_tuple(), empty_tuple(), empty_tuple()
        for i in tl.static_range(2 * REACH + AHEAD):
            frame = _load_frame(
                dout, dout, dout, zero + first + (i - REACH), T, c, live, REACH, False, False
            )  # fmt: skip
            if i < 2 * REACH:
                window = window + (frame.to(tl.float32),)
            else:
                coming = coming + (frame,)
        for i in tl.static_range(AHEAD):
            frame = _load_frame(
                x_token, past_token, future_token, zero + first + i, T, c, live, REACH, HAS_PAST, HAS_FUTURE
            )  # fmt: skip
            xs = xs + (frame,)
        for t in tl.range(first, stop, loop_unroll_factor=UNROLL):
            frame = _load_frame(
                dout, dout, dout, zero + t + (REACH + AHEAD), T, c, live, REACH, False, False
            )  # fmt: skip
            coming = coming + (frame,)
            frame = _load_frame(
                x_token, past_token, future_token, zero + t + AHEAD, T, c, live, REACH, HAS_PAST, HAS_FUTURE
            )  # fmt: skip
            xs = xs + (frame,)
            window = window + (coming[0].to(tl.float32),)
            key = xs[0].to(tl.float32)
            dx = taps[0] * window[REACH]
            sums = empty_tuple() + (dtaps[0] + key * window[REACH],)
            for j in tl.static_range(1, K):
                earlier = window[REACH - j]
                if CHUNKED:
                    earlier = tl.where(_chunk_ends_within(t - j, j, ends), 0.0, earlier)
                g = window[REACH + j] + earlier
                dx += taps[j] * g
                sums = sums + (dtaps[j] + key * g,)
            dtaps = sums
            ptr = dx_ptr + ((b * T + t) * S + s) * C
            if HAS_PAST:
                ptr = tl.where(t < 0, dpast_ptr + ((b * REACH + t + REACH) * S + s) * C, ptr)
            if HAS_FUTURE:
                ptr = tl.where(t >= T, dfuture_ptr + ((b * REACH + t - T) * S + s) * C, ptr)
            tl.store(ptr + c, dx.to(dx_ptr.dtype.element_ty), mask=live)
            window, coming, xs = window[1:], coming[1:], xs[1:]
    for j in tl.static_range(K):
        tl.store(partial_ptr + (zero + j) * C + c, dtaps[K - 1 - j], mask=live)


@operator("short_conv")
def short_conv(
    x: Tensor, past: Tensor | None, future: Tensor | None, weight: Tensor, ends: Sequence[int] | None
) -> Tensor:
    """`layer.TemporalShortConv`: x (B, T, S, C), past and future (B, K-1, S, C) of its dtype or None for zeros, weight
    (C, 1, K) -> (B, T, S, C) contiguous."""
    B, T, S, C = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = dense(x)
        before, after = (x if halo is None else dense(halo) for halo in (past, future))
        launch(
            _conv_kernel, triton.cdiv(C, _CHANNELS) * S * B,
            (strided(x), strided(before), strided(after), weight.contiguous(), out, (T, S, C),
             _NO_ENDS if ends is None else tuple(ends)),
            K=weight.shape[-1], HAS_PAST=past is not None, HAS_FUTURE=future is not None,
            CHUNKED=ends is not None, BC=_CHANNELS, AHEAD=_AHEAD, UNROLL=_UNROLL, num_warps=2,
        )  # fmt: skip
    return out


@operator("short_conv_backward")
def short_conv_backward(
    dout: Tensor, x: Tensor, past: Tensor | None, future: Tensor | None, weight: Tensor,
    ends: Sequence[int] | None, programs: int = _CONV_PROGRAMS,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, past, future and weight, empty where there is no such halo, by at most so many programs."""
    B, T, S, C = x.shape
    K = weight.shape[-1]
    dx, dpast, dfuture = (dout.new_empty(0 if t is None else t.shape) for t in (x, past, future))
    blocks = triton.cdiv(C, _CHANNELS)
    groups = min(max(programs // blocks, 1), B * S)
    if dx.numel() == 0:
        return [dx, dpast.zero_(), dfuture.zero_(), torch.zeros_like(weight, memory_format=torch.contiguous_format)]
    x = dense(x)
    before, after = (x if halo is None else dense(halo) for halo in (past, future))
    partial = torch.empty(groups, K, C, dtype=torch.float32, device=x.device)
    launch(
        _conv_backward_kernel, blocks * groups,
        (strided(x), strided(before), strided(after), weight.contiguous(), dout.contiguous(), dx, dpast, dfuture,
         partial, (T, S, C), _NO_ENDS if ends is None else tuple(ends), B * S),
        K=K, HAS_PAST=past is not None, HAS_FUTURE=future is not None, CHUNKED=ends is not None,
        BC=_CHANNELS, AHEAD=_AHEAD_BACK, num_warps=2,
        **(_BACK if past is None and future is None else _BACK_WITH_HALO),
    )  # fmt: skip
    return [dx, dpast, dfuture, partial.sum(0).t().unsqueeze(1).to(weight.dtype).contiguous()]


@short_conv.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@short_conv_backward.register_fake
def _(dout: Tensor, *inputs: Any) -> list[Tensor]:
    return [
        dout.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs[:4]
    ]


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _conv_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    grads = short_conv_backward(dout, *given, *ctx.options)
    return (*(None if x is None else d for x, d in zip(given, grads, strict=True)), None)


short_conv.register_autograd(_conv_backward, setup_context=_save_conv)
