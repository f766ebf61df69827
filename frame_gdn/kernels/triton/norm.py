"""RMS norm, ReLU and a factor on Triton, forward and backward.

Bound by memory traffic alone: a program holds a row. Everything is float32 between load and store. The weight's
gradient is summed by program, then over programs in a fixed order: two runs are equal to the bit. Only inputs are kept
for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, launch, operator, rows_strided
from .tiles import empty_tuple

#: Programs of the backward pass, each of which sums the weight's gradient over its share of the rows.
_PROGRAMS = 512


@triton.jit
def _load_row(ptr, C: tl.constexpr, BC: tl.constexpr):
    """Channels by blocks: padded to a power of two in one piece, up to half the work would be on nothing."""
    row = empty_tuple()
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
def _norm_kernel(x, weight_ptr, out_ptr, N, eps, scale, C: tl.constexpr, BC: tl.constexpr):
    """One row: scale · relu(x / rms · w). A NaN stays one."""
    zero = tl.full([], 0, tl.int64)
    row = tl.program_id(0)
    channels = _load_row(x[0] + (zero + row // N) * x[1] + (zero + row % N) * x[2], C, BC)
    weight = _load_row(weight_ptr, C, BC)
    squares = tl.zeros((BC,), dtype=tl.float32)
    for i in tl.static_range(len(channels)):
        squares += channels[i].to(tl.float32) * channels[i].to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(squares, 0) / C + eps)
    for i in tl.static_range(len(channels)):
        out = channels[i].to(tl.float32) * r * weight[i].to(tl.float32)
        out = tl.maximum(out, 0.0, propagate_nan=tl.PropagateNan.ALL) * scale
        _store_block(out_ptr + (zero + row) * C, out, i, C, BC)


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _norm_backward_kernel(
    x, weight_ptr, dout_ptr, dx_ptr, partial_ptr, rows, N, eps, scale, C: tl.constexpr, BC: tl.constexpr
):  # fmt: skip
    """With r = 1 / rms and g = dout where the ReLU was open: dx = scale r (g w - x r² <g w, x> / C) and
    dw = sum over rows of scale r g x. The next row is on its way while one is worked on."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    zero = tl.full([], 0, tl.int64)
    weight = _load_row(weight_ptr, C, BC)
    dweight = empty_tuple()
    for _ in tl.static_range(len(weight)):
        dweight = dweight + (tl.zeros((BC,), dtype=tl.float32),)
    for row in tl.range(pid, rows, programs, num_stages=3):
        channels = _load_row(x[0] + (zero + row // N) * x[1] + (zero + row % N) * x[2], C, BC)
        dout = _load_row(dout_ptr + (zero + row) * C, C, BC)
        squares, products = tl.zeros((BC,), dtype=tl.float32), tl.zeros((BC,), dtype=tl.float32)
        xs, g = empty_tuple(), empty_tuple()
        for i in tl.static_range(len(channels)):
            xs = xs + (channels[i].to(tl.float32),)
            before_relu = xs[i] * weight[i].to(tl.float32)
            g = g + (tl.where(before_relu <= 0.0, 0.0, dout[i].to(tl.float32)),)
            squares += xs[i] * xs[i]
            products += g[i] * before_relu
        square, product = tl.reduce((squares, products), 0, _add_pairs)
        r = 1.0 / tl.sqrt(square / C + eps)
        along = scale * r * r * r * product / C
        sums = empty_tuple()
        for i in tl.static_range(len(channels)):
            rg = scale * r * g[i]
            dx = rg * weight[i].to(tl.float32) - along * xs[i]
            _store_block(dx_ptr + (zero + row) * C, dx, i, C, BC)
            sums = sums + (dweight[i] + rg * xs[i],)
        dweight = sums
    for i in tl.static_range(len(dweight)):
        _store_block(partial_ptr + (zero + pid) * C, dweight[i], i, C, BC)


def _rows(x: Tensor) -> Tensor:
    """(..., C) as (B, N, C), a view where the strides allow one."""
    x = dense(x)
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
        launch(_norm_kernel, B * N, (rows_strided(x), weight.contiguous(), out, N, eps, scale), **_norm_options(C))
    return out


@operator("norm_relu_backward")
def norm_relu_backward(
    dout: Tensor, x: Tensor, weight: Tensor, eps: float, scale: float, programs: int = _PROGRAMS
) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, by at most so many programs."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, torch.zeros_like(weight, memory_format=torch.contiguous_format)
    x = _rows(x)
    B, N, C = x.shape
    programs = min(programs, B * N)
    partial = torch.empty(programs, C, dtype=torch.float32, device=x.device)
    launch(
        _norm_backward_kernel, programs,
        (rows_strided(x), weight.contiguous(), dout.contiguous(), dx, partial, B * N, N, eps, scale),
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
