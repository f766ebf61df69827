"""The middle of a gated depthwise feed-forward on Triton: activation, depthwise convolution, bias and GLU in one pass.

Bound by memory traffic and, closely behind, by instructions: a program walks along the columns of a strip of rows of
one image, a few channels a thread, its neighbourhood in registers, so that every pixel but those of a strip's border
is read and activated once. Everything is float32 between load and store. Gradients of weights are summed by program,
then over programs in a fixed order: two runs are equal to the bit.

A `torch.library` operator; only inputs are kept for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, operator
from .tiles import empty_tuple

#: Channels of a program and its warps, two channels a thread; the most rows of a strip.
_CHANNELS, _WARPS, _ROWS = 128, 2, 11

#: How the kernels take a sigmoid: as Triton does, which guards subnormal numbers in three times as many instructions;
#: by the instructions meant for it, to the last bits of float32; by the hardware's tanh, to 2^-12, for bfloat16.
_PORTABLE, _PTX, _TANH = 0, 1, 2


@triton.jit
def _tanh(x):
    return tl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def _sigmoid(x, HOW: tl.constexpr):
    if HOW == 0:
        return tl.sigmoid(x)
    if HOW == 2:
        return 0.5 + 0.5 * _tanh(0.5 * x)
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t;
        mul.ftz.f32 t, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 t, t;
        add.ftz.f32 t, t, 0f3F800000;
        rcp.approx.ftz.f32 $0, t;
        }""", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _silu(x, HOW: tl.constexpr):
    if HOW == 2:
        x = 0.5 * x
        return x + x * _tanh(x)
    return x * _sigmoid(x, HOW)


@triton.jit
def _load_column(ptrs, row, below, stride, live, COUNT: tl.constexpr):
    """COUNT pixels of a column, `stride` apart, from `row` on, which is at ptrs; zeros but in rows 0 ... below - 1."""
    pixels = empty_tuple()
    for i in tl.static_range(COUNT):
        inside = (row + i).to(tl.uint32, bitcast=True) < below.to(tl.uint32, bitcast=True)
        pixels = pixels + (tl.load(ptrs, mask=live & inside, other=0.0),)
        ptrs += stride
    return pixels


@triton.jit
def _load_taps(ptr, c, live, TAPS: tl.constexpr):
    taps = empty_tuple()
    for i in tl.static_range(TAPS):
        taps = taps + (tl.load(ptr + c.to(tl.int64) * TAPS + i, mask=live, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _activate(pixels, COUNT: tl.constexpr, SILU: tl.constexpr, HOW: tl.constexpr):
    out = empty_tuple()
    for i in tl.static_range(COUNT):
        x = pixels[i].to(tl.float32)
        if SILU:
            x = _silu(x, HOW)
        out = out + (x,)
    return out


@triton.jit
def _spread(h, taps, sums, bias, K: tl.constexpr, ROWS: tl.constexpr):
    """What a column h of ROWS + K - 1 pixels adds to the K columns that see it, of which K - 1 have begun.

    Returns the ROWS sums of the first of them, which that completes, and those of the rest.
    """
    done, rest = empty_tuple(), empty_tuple()
    for a in tl.static_range(K):
        for r in tl.static_range(ROWS):
            if a < K - 1:
                total = sums[a * ROWS + r]
            else:
                total = bias
            for i in tl.static_range(K):
                total += taps[i * K + K - 1 - a] * h[r + i]
            if a == 0:
                done = done + (total,)
            else:
                rest = rest + (total,)
    return done, rest


@triton.jit
def _glu_conv_kernel(
    x_ptr, weight_ptr, bias_ptr, dout_ptr, out_ptr, H, W,
    F: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    BACKWARD: tl.constexpr, HOW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A strip of rows, a block of channels of both halves: the GLU, or its gradient in the convolution's two halves.

    While one column is worked on, the next is on its way.
    """
    REACH: tl.constexpr = K // 2
    TALL: tl.constexpr = ROWS + K - 1
    OUT: tl.constexpr = 2 * F if BACKWARD else F
    tiles, blocks = tl.cdiv(H, ROWS), tl.cdiv(F, BC)
    pid = tl.program_id(0)
    first = (pid % tiles) * ROWS
    c = (pid // tiles % blocks) * BC + tl.arange(0, BC)
    image = (pid // tiles // blocks).to(tl.int64) * H * W
    live = c < F
    row = tl.full([], W, tl.int64)
    x_ptrs = x_ptr + (image + (first - REACH) * row) * (2 * F) + c
    out_ptrs = out_ptr + (image + first * row - REACH) * OUT + c
    dout_ptrs = dout_ptr + (image + first * row - REACH) * F + c
    value_taps = _load_taps(weight_ptr, c, live, K * K)
    gate_taps = _load_taps(weight_ptr + F * K * K, c, live, K * K)
    value_bias, gate_bias = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
    if HAS_BIAS:
        value_bias += tl.load(bias_ptr + c, mask=live, other=0.0).to(tl.float32)
        gate_bias += tl.load(bias_ptr + F + c, mask=live, other=0.0).to(tl.float32)
    value_sums, gate_sums = empty_tuple(), empty_tuple()
    for _ in tl.static_range((K - 1) * ROWS):
        value_sums, gate_sums = value_sums + (value_bias,), gate_sums + (gate_bias,)
    values = _load_column(x_ptrs, first - REACH, H, row * 2 * F, live, TALL)
    gates = _load_column(x_ptrs + F, first - REACH, H, row * 2 * F, live, TALL)
    douts = empty_tuple()
    if BACKWARD:
        douts = _load_column(dout_ptrs, first, tl.where(REACH == 0, H, 0), row * F, live, ROWS)
    for w in range(W + REACH):
        x_ptrs += 2 * F
        below = tl.where(w + 1 < W, H, 0)
        next_values = _load_column(x_ptrs, first - REACH, below, row * 2 * F, live, TALL)
        next_gates = _load_column(x_ptrs + F, first - REACH, below, row * 2 * F, live, TALL)
        next_douts = empty_tuple()
        if BACKWARD:
            dout_ptrs += F
            below = tl.where((w + 1 >= REACH) & (w + 1 < W + REACH), H, 0)
            next_douts = _load_column(dout_ptrs, first, below, row * F, live, ROWS)
        h = _activate(values, TALL, SILU, HOW)
        values, value_sums = _spread(h, value_taps, value_sums, value_bias, K, ROWS)
        h = _activate(gates, TALL, SILU, HOW)
        gates, gate_sums = _spread(h, gate_taps, gate_sums, gate_bias, K, ROWS)
        below = tl.where(w >= REACH, H, 0)
        ptrs = out_ptrs
        for r in tl.static_range(ROWS):
            keep = live & (first + r < below)
            gate = gates[r]
            kind = out_ptr.dtype.element_ty
            if BACKWARD:
                dout = douts[r].to(tl.float32)
                open_ = _sigmoid(gate, HOW)
                dvalue = dout * gate * open_
                dgate = dout * values[r] * open_ * (1.0 + gate * (1.0 - open_))
                tl.store(ptrs, dvalue.to(kind), mask=keep)
                tl.store(ptrs + F, dgate.to(kind), mask=keep)
            else:
                tl.store(ptrs, (values[r] * _silu(gate, HOW)).to(kind), mask=keep)
            ptrs += row * OUT
        out_ptrs += OUT
        values, gates, douts = next_values, next_gates, next_douts


@triton.jit
def _conv_backward_kernel(
    x_ptr, weight_ptr, dconv_ptr, dx_ptr, partial_ptr, H, W,
    C: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr, HOW: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """A strip of rows, a block of channels: dx from the convolution's gradient, and this strip's part of dweight and
    dbias.

    `window` holds the K columns of that gradient around a column of x, K - 1 rows more than the strip has.
    """
    REACH: tl.constexpr = K // 2
    TALL: tl.constexpr = ROWS + K - 1
    tiles, blocks = tl.cdiv(H, ROWS), tl.cdiv(C, BC)
    pid = tl.program_id(0)
    tile = pid % tiles
    first = tile * ROWS
    c = (pid // tiles % blocks) * BC + tl.arange(0, BC)
    image = (pid // tiles // blocks).to(tl.int64)
    live = c < C
    row = tl.full([], W, tl.int64)
    stride = row * C
    pixel = (image * H + first) * row
    x_ptrs = x_ptr + pixel * C + c
    dx_ptrs = dx_ptr + pixel * C + c
    d_ptrs = dconv_ptr + (pixel - REACH * row) * C + c
    partial_ptr += (image * tiles + tile) * (K * K + 1) * C + c
    taps = _load_taps(weight_ptr, c, live, K * K)
    dtaps = empty_tuple()
    for _ in tl.static_range(K * K):
        dtaps = dtaps + (tl.zeros((BC,), dtype=tl.float32),)
    dbias = tl.zeros((BC,), dtype=tl.float32)
    window = empty_tuple()
    for i in tl.static_range(K - 1):
        below = tl.where((i >= REACH) & (i - REACH < W), H, 0)
        column = _load_column(d_ptrs + (i - REACH) * C, first - REACH, below, stride, live, TALL)
        window = window + _activate(column, TALL, False, HOW)
    d_ptrs += (K - 1 - REACH) * C
    coming = _load_column(d_ptrs, first - REACH, tl.where(K - 1 - REACH < W, H, 0), stride, live, TALL)
    pixels = _load_column(x_ptrs, first, H, stride, live, ROWS)
    for w in range(W):
        d_ptrs += C
        x_ptrs += C
        next_coming = _load_column(
            d_ptrs, first - REACH, tl.where(w + K - REACH < W, H, 0), stride, live, TALL
        )  # fmt: skip
        next_pixels = _load_column(x_ptrs, first, tl.where(w + 1 < W, H, 0), stride, live, ROWS)
        window = window + _activate(coming, TALL, False, HOW)
        ptrs = dx_ptrs
        for r in tl.static_range(ROWS):
            x = pixels[r].to(tl.float32)
            h, slope = x, 1.0
            if SILU:
                open_ = _sigmoid(x, HOW)
                h = x * open_
                slope = open_ + h * (1.0 - open_)
            dh = tl.zeros((BC,), dtype=tl.float32)
            new = empty_tuple()
            for i in tl.static_range(K):
                for j in tl.static_range(K):
                    d = window[(K - 1 - j) * TALL + r + K - 1 - i]
                    dh += taps[i * K + j] * d
                    new = new + (dtaps[i * K + j] + h * d,)
            dtaps = new
            dbias += window[REACH * TALL + r + REACH]
            tl.store(ptrs, (dh * slope).to(dx_ptr.dtype.element_ty), mask=live & (first + r < H))
            ptrs += stride
        dx_ptrs += C
        window, coming, pixels = window[TALL:], next_coming, next_pixels
    for i in tl.static_range(K * K):
        tl.store(partial_ptr, dtaps[i], mask=live)
        partial_ptr += C
    tl.store(partial_ptr, dbias, mask=live)


def _strips(H: int) -> tuple[int, int]:
    """How many strips an image of H rows is cut into, and their rows."""
    strips = triton.cdiv(H, _ROWS)
    return strips, triton.cdiv(H, strips)


def _how(x: Tensor) -> int:
    if not x.is_cuda or torch.version.cuda is None:
        return _PORTABLE
    return _TANH if x.dtype == torch.bfloat16 else _PTX


def _run_glu_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, dout: Tensor | None, out: Tensor
) -> None:
    images, H, W, C = x.shape
    strips, rows = _strips(H)
    launch(
        _glu_conv_kernel, strips * triton.cdiv(C // 2, _CHANNELS) * images,
        (x, weight, x if bias is None else bias, x if dout is None else dout, out, H, W),
        F=C // 2, K=weight.shape[-1], ROWS=rows, SILU=silu, HAS_BIAS=bias is not None, BACKWARD=dout is not None,
        HOW=_how(x), BC=_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip


@operator("glu_conv")
def glu_conv(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """value · SiLU(gate), where value and gate are the halves of depthwise(SiLU(x)) + bias, or of depthwise(x) + bias.

    x (images, height, width, 2 F), weight (2 F, 1, K, K), K odd, zeros around an image; bias (2 F) or None -> (images,
    height, width, F) contiguous, in x's dtype.
    """
    images, H, W, C = x.shape
    out = torch.empty(images, H, W, C // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        _run_glu_conv(x.contiguous(), weight.contiguous(), bias, silu, None, out)
    return out


@operator("glu_conv_backward")
def glu_conv_backward(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> list[Tensor]:
    """Gradients of x, weight and bias (empty where there is none)."""
    images, H, W, C = x.shape
    K = weight.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    strips, rows = _strips(H)
    partial = torch.empty(images * strips, K * K + 1, C, dtype=torch.float32, device=x.device)
    if dx.numel():
        x, weight = x.contiguous(), weight.contiguous()
        dconv = torch.empty_like(x)
        _run_glu_conv(x, weight, bias, silu, dout.contiguous(), dconv)
        launch(
            _conv_backward_kernel, strips * triton.cdiv(C, _CHANNELS) * images,
            (x, weight, dconv, dx, partial, H, W),
            C=C, K=K, ROWS=rows, SILU=silu, HOW=_how(x), BC=_CHANNELS, num_warps=_WARPS,
        )  # fmt: skip
    else:
        partial = partial.new_zeros(1, K * K + 1, C)
    sums = partial.sum(0)
    dweight = sums[:-1].t().reshape(weight.shape).to(weight.dtype).contiguous()
    return [dx, dweight, x.new_empty(0) if bias is None else sums[-1].to(bias.dtype, copy=True)]


@glu_conv.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


@glu_conv_backward.register_fake
def _(dout: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> list[Tensor]:
    return [
        dout.new_empty(0) if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in (x, weight, bias)
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.silu = inputs[3]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    given = ctx.saved_tensors
    grads = glu_conv_backward(dout, *given, ctx.silu)
    return (*(None if t is None else d for t, d in zip(given, grads, strict=True)), None)


glu_conv.register_autograd(_backward, setup_context=_save)
