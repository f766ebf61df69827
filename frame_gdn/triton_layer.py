"""What surrounds the scan in a layer, on Triton: short convolution, norm with ReLU, output gate, forward and backward.

Each is bound by memory traffic alone, and reads and writes every token once: the convolution walks along time with its
window in registers, the norm holds a row, the gate needs no neighbours. Everything is float32 between load and store.
Gradients of weights are summed by program, then over programs in a fixed order: two runs are equal to the bit.

They are `torch.library` operators, eager or not: `torch.compile(fullgraph=True)` takes them, nothing waits for the
device, and only inputs are kept for the backward pass.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op`, run on its first tensor's device: Triton launches on the current one, another GPU
    where a model was moved to "cuda:1" or spread by a device map."""

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first):
                return function(first, *others)

        return torch.library.custom_op(f"frame_gdn::{name}", run, mutates_args=())

    return register


# --- short convolution ------------------------------------------------------------------------------------------

#: Channels of a program, and how many frames are on their way to it while it works on one: forward, backward.
_CHANNELS, _AHEAD, _AHEAD_BACK = 256, 3, 2
#: How many turns of its walk are written out, which saves moving the window along: forward, backward, and backward
#: with a halo, where it would cost registers.
_UNROLL, _UNROLL_BACK, _UNROLL_HALO = 4, 2, 1
#: Programs of the backward pass: as many as an H200 holds at once, or its last round would be nearly empty.
_CONV_PROGRAMS = 1024


@triton.jit
def _nothing():
    """The empty tuple, of a type that grows."""
    return ()


@triton.jit
def _load_frame(
    x_ptr, past_ptr, future_ptr, t, T, x_t, past_t, future_t, c, live,
    REACH: tl.constexpr, HAS_PAST: tl.constexpr, HAS_FUTURE: tl.constexpr,
):  # fmt: skip
    """Channels c of frame t, an int64; frames from -REACH on are the past's, from T on the future's, others zero."""
    ptr = x_ptr + t * x_t
    inside = (t >= 0) & (t < T)
    if HAS_PAST:
        before = (t >= -REACH) & (t < 0)
        ptr = tl.where(before, past_ptr + (t + REACH) * past_t, ptr)
        inside = inside | before
    if HAS_FUTURE:
        after = (t >= T) & (t < T + REACH)
        ptr = tl.where(after, future_ptr + (t - T) * future_t, ptr)
        inside = inside | after
    return tl.load(ptr + c, mask=live & inside, other=0.0)


@triton.jit
def _load_taps(weight_ptr, c, live, K: tl.constexpr):
    """Taps by their distance from the centre, which is the last of the K."""
    taps = _nothing()
    for j in tl.static_range(K):
        taps = taps + (tl.load(weight_ptr + c * K + (K - 1 - j), mask=live, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _conv_kernel(
    x_ptr, past_ptr, future_ptr, weight_ptr, out_ptr,
    T, S, C, x_b, x_t, x_s, past_b, past_t, past_s, future_b, future_t, future_s, first_frame, chunk_frames,
    K: tl.constexpr, HAS_PAST: tl.constexpr, HAS_FUTURE: tl.constexpr, CHUNKED: tl.constexpr,
    BC: tl.constexpr, AHEAD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A block of channels of one token, through all its frames.

    `window` holds frames t - REACH ... t + REACH in float32, `coming` the AHEAD after them as they arrive: converting
    one waits for it.
    """
    REACH: tl.constexpr = K - 1
    blocks = tl.cdiv(C, BC)
    pid = tl.program_id(0)
    c = (pid % blocks) * BC + tl.arange(0, BC)
    s = ((pid // blocks) % S).to(tl.int64)
    b = (pid // blocks // S).to(tl.int64)
    zero = tl.full([], 0, tl.int64)
    live = c < C
    x_ptr += b * x_b + s * x_s
    past_ptr += b * past_b + s * past_s
    future_ptr += b * future_b + s * future_s
    out_ptr += (b * T * S + s) * C
    taps = _load_taps(weight_ptr, c, live, K)
    window, coming = _nothing(), _nothing()
    for i in tl.static_range(2 * REACH + AHEAD):
        frame = _load_frame(
            x_ptr, past_ptr, future_ptr, zero + (i - REACH), T, x_t, past_t, future_t, c, live,
            REACH, HAS_PAST, HAS_FUTURE,
        )  # fmt: skip
        if i < 2 * REACH:
            window = window + (frame.to(tl.float32),)
        else:
            coming = coming + (frame,)
    for t in tl.range(T, loop_unroll_factor=UNROLL):
        frame = _load_frame(
            x_ptr, past_ptr, future_ptr, zero + t + (REACH + AHEAD), T, x_t, past_t, future_t, c, live,
            REACH, HAS_PAST, HAS_FUTURE,
        )  # fmt: skip
        coming = coming + (frame,)
        window = window + (coming[0].to(tl.float32),)
        out = taps[0] * window[REACH]
        for j in tl.static_range(1, K):
            after = window[REACH + j]
            if CHUNKED:
                after = tl.where((first_frame + t) % chunk_frames + j < chunk_frames, after, 0.0)
            out += taps[j] * (window[REACH - j] + after)
        tl.store(out_ptr + (zero + t) * S * C + c, out.to(out_ptr.dtype.element_ty), mask=live)
        window, coming = window[1:], coming[1:]


@triton.jit
def _conv_backward_kernel(
    x_ptr, past_ptr, future_ptr, weight_ptr, dout_ptr, dx_ptr, dpast_ptr, dfuture_ptr, partial_ptr,
    T, S, C, x_b, x_t, x_s, past_b, past_t, past_s, future_b, future_t, future_s, first_frame, chunk_frames, tokens,
    K: tl.constexpr, HAS_PAST: tl.constexpr, HAS_FUTURE: tl.constexpr, CHUNKED: tl.constexpr,
    BC: tl.constexpr, AHEAD: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """A block of channels of every so many-th of the B S tokens, through all frames and the halo: dx, and these
    tokens' part of dweight.

    Frame t met tap j in out_{t+j}, and in out_{t-j} unless a chunk ends between: with g_j = dout_{t+j} + dout_{t-j},
    dx_t = sum of w_j g_j, and dw_j = sum over t of x_t g_j.
    """
    REACH: tl.constexpr = K - 1
    blocks = tl.cdiv(C, BC)
    group, groups = tl.program_id(0) // blocks, tl.num_programs(0) // blocks
    c = (tl.program_id(0) % blocks) * BC + tl.arange(0, BC)
    zero = tl.full([], 0, tl.int64)
    live = c < C
    partial_ptr += group * K * C
    taps = _load_taps(weight_ptr, c, live, K)
    dtaps = _nothing()
    for _ in tl.static_range(K):
        dtaps = dtaps + (tl.zeros((BC,), dtype=tl.float32),)
    first, stop = 0, T
    if HAS_PAST:
        first = -REACH
    if HAS_FUTURE:
        stop = T + REACH
    for token in range(group, tokens, groups):
        b, s = zero + token // S, zero + token % S
        x_row, past_row, future_row = x_ptr + b * x_b + s * x_s, past_ptr, future_ptr
        if HAS_PAST:
            past_row += b * past_b + s * past_s
        if HAS_FUTURE:
            future_row += b * future_b + s * future_s
        dout_row = dout_ptr + (b * T * S + s) * C
        window, coming, xs = _nothing(), _nothing(), _nothing()
        for i in tl.static_range(2 * REACH + AHEAD):
            frame = _load_frame(
                dout_row, dout_ptr, dout_ptr, zero + first + (i - REACH), T, S * C, 0, 0, c, live,
                REACH, False, False,
            )  # fmt: skip
            if i < 2 * REACH:
                window = window + (frame.to(tl.float32),)
            else:
                coming = coming + (frame,)
        for i in tl.static_range(AHEAD):
            frame = _load_frame(
                x_row, past_row, future_row, zero + first + i, T, x_t, past_t, future_t, c, live,
                REACH, HAS_PAST, HAS_FUTURE,
            )  # fmt: skip
            xs = xs + (frame,)
        for t in tl.range(first, stop, loop_unroll_factor=UNROLL):
            frame = _load_frame(
                dout_row, dout_ptr, dout_ptr, zero + t + (REACH + AHEAD), T, S * C, 0, 0, c, live,
                REACH, False, False,
            )  # fmt: skip
            coming = coming + (frame,)
            frame = _load_frame(
                x_row, past_row, future_row, zero + t + AHEAD, T, x_t, past_t, future_t, c, live,
                REACH, HAS_PAST, HAS_FUTURE,
            )  # fmt: skip
            xs = xs + (frame,)
            window = window + (coming[0].to(tl.float32),)
            x = xs[0].to(tl.float32)
            dx = taps[0] * window[REACH]
            sums = _nothing() + (dtaps[0] + x * window[REACH],)
            for j in tl.static_range(1, K):
                earlier = window[REACH - j]
                if CHUNKED:  # what is before frame 0 is zero anyway, so its remainder need not be right
                    earlier = tl.where((first_frame + t - j) % chunk_frames + j < chunk_frames, earlier, 0.0)
                g = window[REACH + j] + earlier
                dx += taps[j] * g
                sums = sums + (dtaps[j] + x * g,)
            dtaps = sums
            ptr = dx_ptr + ((b * T + t) * S + s) * C
            if HAS_PAST:
                ptr = tl.where(t < 0, dpast_ptr + ((b * REACH + t + REACH) * S + s) * C, ptr)
            if HAS_FUTURE:
                ptr = tl.where(t >= T, dfuture_ptr + ((b * REACH + t - T) * S + s) * C, ptr)
            tl.store(ptr + c, dx.to(dx_ptr.dtype.element_ty), mask=live)
            window, coming, xs = window[1:], coming[1:], xs[1:]
    for j in tl.static_range(K):
        tl.store(partial_ptr + j * C + c, dtaps[K - 1 - j], mask=live)


def _conv_sizes(
    x: Tensor, past: Tensor, future: Tensor, first_frame: int, chunk_frames: int | None
) -> tuple[int, ...]:
    strides = [stride for tensor in (x, past, future) for stride in tensor.stride()[:3]]
    return (*x.shape[1:], *strides, first_frame, chunk_frames or 1)


def _dense(x: Tensor) -> Tensor:
    """Channels next to one another."""
    return x if x.stride(-1) == 1 else x.contiguous()


@operator("short_conv")
def short_conv(
    x: Tensor, past: Tensor | None, future: Tensor | None, weight: Tensor, chunk_frames: int | None, first_frame: int
) -> Tensor:
    """`layer.TemporalShortConv`: x (B, T, S, C), past and future (B, K-1, S, C) of its dtype or None for zeros, weight
    (C, 1, K) -> (B, T, S, C) contiguous."""
    B, T, S, C = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = _dense(x)
        before, after = (x if halo is None else _dense(halo) for halo in (past, future))
        _conv_kernel[(triton.cdiv(C, _CHANNELS) * S * B,)](
            x, before, after, weight.contiguous(), out, *_conv_sizes(x, before, after, first_frame, chunk_frames),
            K=weight.shape[-1], HAS_PAST=past is not None, HAS_FUTURE=future is not None,
            CHUNKED=chunk_frames is not None, BC=_CHANNELS, AHEAD=_AHEAD, UNROLL=_UNROLL, num_warps=2,
        )  # fmt: skip
    return out


@operator("short_conv_backward")
def short_conv_backward(
    dout: Tensor, x: Tensor, past: Tensor | None, future: Tensor | None, weight: Tensor, chunk_frames: int | None,
    first_frame: int,
) -> list[Tensor]:  # fmt: skip
    """Gradients of x, past, future and weight; empty where there is no such halo."""
    B, T, S, C = x.shape
    K = weight.shape[-1]
    dx, dpast, dfuture = (dout.new_empty(0 if t is None else t.shape) for t in (x, past, future))
    blocks = triton.cdiv(C, _CHANNELS)
    groups = min(max(_CONV_PROGRAMS // blocks, 1), B * S)
    if dx.numel() == 0:
        return [dx, dpast.zero_(), dfuture.zero_(), torch.zeros_like(weight, memory_format=torch.contiguous_format)]
    x = _dense(x)
    before, after = (x if halo is None else _dense(halo) for halo in (past, future))
    partial = torch.empty(groups, K, C, dtype=torch.float32, device=x.device)
    _conv_backward_kernel[(blocks * groups,)](
        x, before, after, weight.contiguous(), dout.contiguous(), dx, dpast, dfuture, partial,
        *_conv_sizes(x, before, after, first_frame, chunk_frames), B * S,
        K=K, HAS_PAST=past is not None, HAS_FUTURE=future is not None, CHUNKED=chunk_frames is not None,
        BC=_CHANNELS, AHEAD=_AHEAD_BACK, num_warps=2,
        UNROLL=_UNROLL_BACK if past is None and future is None else _UNROLL_HALO,
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
    return (*(None if x is None else d for x, d in zip(given, grads, strict=True)), None, None)


short_conv.register_autograd(_conv_backward, setup_context=_save_conv)


# --- norm, ReLU and scale ---------------------------------------------------------------------------------------

#: Programs of the backward pass, each of which sums the weight's gradient over its share of the rows.
_PROGRAMS = 512


@triton.jit
def _load_row(ptr, C: tl.constexpr, BC: tl.constexpr):
    """Channels by blocks: padded to a power of two in one piece, up to half the work would be on nothing."""
    row = _nothing()
    for first in tl.static_range(0, C, BC):
        c = first + tl.arange(0, BC)
        if first + BC <= C:
            row = row + (tl.load(ptr + c),)
        else:
            row = row + (tl.load(ptr + c, mask=c < C, other=0.0),)
    return row


@triton.jit
def _store_block(ptr, x, i, C: tl.constexpr, BC: tl.constexpr):
    c = i * BC + tl.arange(0, BC)
    if (i + 1) * BC <= C:
        tl.store(ptr + c, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + c, x.to(ptr.dtype.element_ty), mask=c < C)


@triton.jit
def _norm_kernel(x_ptr, weight_ptr, out_ptr, N, x_b, x_n, eps, scale, C: tl.constexpr, BC: tl.constexpr):
    """One row: scale · relu(x / rms · w). A NaN stays one."""
    zero = tl.full([], 0, tl.int64)
    row = tl.program_id(0)
    x = _load_row(x_ptr + (zero + row // N) * x_b + (zero + row % N) * x_n, C, BC)
    weight = _load_row(weight_ptr, C, BC)
    squares = tl.zeros((BC,), dtype=tl.float32)
    for i in tl.static_range(len(x)):
        squares += x[i].to(tl.float32) * x[i].to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(squares, 0) / C + eps)
    for i in tl.static_range(len(x)):
        out = x[i].to(tl.float32) * r * weight[i].to(tl.float32)
        out = tl.maximum(out, 0.0, propagate_nan=tl.PropagateNan.ALL) * scale
        _store_block(out_ptr + (zero + row) * C, out, i, C, BC)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_backward_kernel(
    x_ptr, weight_ptr, dout_ptr, dx_ptr, partial_ptr, rows, N, x_b, x_n, eps, scale, C: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """With r = 1 / rms and g = dout where the ReLU was open: dx = scale r (g w - x r² <g w, x> / C) and
    dw = sum over rows of scale r g x. The next row is on its way while one is worked on."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    zero = tl.full([], 0, tl.int64)
    weight = _load_row(weight_ptr, C, BC)
    dweight = _nothing()
    for _ in tl.static_range(len(weight)):
        dweight = dweight + (tl.zeros((BC,), dtype=tl.float32),)
    for row in tl.range(pid, rows, programs, num_stages=3):
        x = _load_row(x_ptr + (zero + row // N) * x_b + (zero + row % N) * x_n, C, BC)
        dout = _load_row(dout_ptr + (zero + row) * C, C, BC)
        squares, products = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
        wide, g = _nothing(), _nothing()
        for i in tl.static_range(len(x)):
            wide = wide + (x[i].to(tl.float32),)
            before_relu = wide[i] * weight[i].to(tl.float32)
            g = g + (tl.where(before_relu <= 0.0, 0.0, dout[i].to(tl.float32)),)
            squares += wide[i] * wide[i]
            products += g[i] * before_relu
        square, product = tl.reduce((squares, products), 0, _add_pairs)
        r = 1.0 / tl.sqrt(square / C + eps)
        along = scale * r * r * r * product / C
        sums = _nothing()
        for i in tl.static_range(len(x)):
            rg = scale * r * g[i]
            dx = rg * weight[i].to(tl.float32) - along * wide[i]
            _store_block(dx_ptr + (zero + row) * C, dx, i, C, BC)
            sums = sums + (dweight[i] + rg * wide[i],)
        dweight = sums
    for i in tl.static_range(len(dweight)):
        _store_block(partial_ptr + pid * C, dweight[i], i, C, BC)


def _rows(x: Tensor) -> Tensor:
    """(..., C) as (B, N, C), a view where the strides allow one."""
    x = _dense(x)
    return x if x.dim() == 3 else x.reshape(1, -1, x.shape[-1])


def _norm_options(C: int) -> dict[str, int]:
    """Eight to thirty-two channels a thread, four at a time."""
    num_warps = min(max(triton.next_power_of_2(C) // 1024, 1), 16)
    return {"C": C, "BC": 128 * num_warps, "num_warps": num_warps}


@operator("norm_relu")
def norm_relu(x: Tensor, weight: Tensor, eps: float, scale: float) -> Tensor:
    """scale · relu(rms_norm(x)): x (..., C) and weight (C) -> like x, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = _rows(x)
        B, N, C = x.shape
        _norm_kernel[(B * N,)](
            x, weight.contiguous(), out, N, x.stride(0), x.stride(1), eps, scale, **_norm_options(C)
        )
    return out


@operator("norm_relu_backward")
def norm_relu_backward(dout: Tensor, x: Tensor, weight: Tensor, eps: float, scale: float) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight, memory_format=torch.contiguous_format)
    x = _rows(x)
    B, N, C = x.shape
    programs = min(_PROGRAMS, B * N)
    partial = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    _norm_backward_kernel[(programs,)](
        x, weight.contiguous(), dout.contiguous(), dx, partial, B * N, N, x.stride(0), x.stride(1), eps, scale,
        **_norm_options(C),
    )  # fmt: skip
    return dx, partial.sum(0).to(weight.dtype)


@norm_relu.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@norm_relu_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(weight, memory_format=torch.contiguous_format),
    )


def _save_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.options = inputs[2:]


def _norm_backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    dx, dweight = norm_relu_backward(dout, *ctx.saved_tensors, *ctx.options)
    return dx, dweight, None, None


norm_relu.register_autograd(_norm_backward, setup_context=_save_norm)


# --- output gate ------------------------------------------------------------------------------------------------

_ELEMENTS = 1024


@triton.jit
def _gate_kernel(x_ptr, gate_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """x · SiLU(gate)"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    x = tl.load(x_ptr + i, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=live, other=0.0).to(tl.float32)
    out = x * gate * tl.sigmoid(gate)
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gate_backward_kernel(x_ptr, gate_ptr, dout_ptr, dx_ptr, dgate_ptr, n, BLOCK: tl.constexpr):
    """d SiLU(g) = σ(g) (1 + g (1 - σ(g)))"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    x = tl.load(x_ptr + i, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=live, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + i, mask=live, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    dx = dout * gate * open_
    dgate = dout * x * open_ * (1.0 + gate * (1.0 - open_))
    tl.store(dx_ptr + i, dx.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(dgate_ptr + i, dgate.to(dgate_ptr.dtype.element_ty), mask=live)


@operator("silu_gate")
def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x · SiLU(gate), both of one shape -> like x, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n := out.numel():
        _gate_kernel[(triton.cdiv(n, _ELEMENTS),)](x.contiguous(), gate.contiguous(), out, n, BLOCK=_ELEMENTS)
    return out


@operator("silu_gate_backward")
def silu_gate_backward(dout: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gate."""
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    if n := dx.numel():
        _gate_backward_kernel[(triton.cdiv(n, _ELEMENTS),)](
            x.contiguous(), gate.contiguous(), dout.contiguous(), dx, dgate, n, BLOCK=_ELEMENTS
        )
    return dx, dgate


@silu_gate.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@silu_gate_backward.register_fake
def _(dout: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(gate, memory_format=torch.contiguous_format),
    )


def _save_gate(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate = silu_gate_backward(dout, *ctx.saved_tensors)
    return dx, dgate


silu_gate.register_autograd(_gate_backward, setup_context=_save_gate)
