"""UCPE on Triton: tokens into a camera's rays and out of them, one read and one write each, forward and backward.

A program holds the matrices and rotations of a block of tokens in registers and walks over heads. Both halves of a
head's channels come and go as (tokens, channels) tiles, in words as wide as they lie; channels 4g ... 4g + 3 and the
pairs of a rotation are taken apart where they stand, in a thread's own registers. Everything is float32 between load
and store.

Operators of `torch.library`; only inputs are kept for the backward pass.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, launch, operator, strided

#: Tokens and heads of a program.
_TOKENS, _HEADS = 16, 10


@triton.jit
def _tile(ptr, n, live, stride_n, HALF: tl.constexpr, BC: tl.constexpr):
    """HALF channels of tokens n in float32, zero where there is nothing."""
    c = tl.arange(0, BC)
    mask = live[:, None] & (c < HALF)[None, :]
    return tl.load(ptr + n[:, None] * stride_n + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store_tile(ptr, n, live, stride_n, x, HALF: tl.constexpr, BC: tl.constexpr):
    c = tl.arange(0, BC)
    mask = live[:, None] & (c < HALF)[None, :]
    tl.store(ptr + n[:, None] * stride_n + c[None, :], x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _matrices(ptr, n, live, stride_n, row, column):
    """The 16 numbers of each token's matrix, row by row; in 64 bits, for any strides."""
    ptr += n * stride_n
    zero = tl.full([], 0, tl.int64)
    row, column = zero + row, zero + column
    return (
        _matrix_row(ptr, live, column)
        + _matrix_row(ptr + row, live, column)
        + _matrix_row(ptr + 2 * row, live, column)
        + _matrix_row(ptr + 3 * row, live, column)
    )


@triton.jit
def _matrix_row(ptr, live, column):
    m0 = tl.load(ptr, mask=live, other=0.0)[:, None]
    m1 = tl.load(ptr + column, mask=live, other=0.0)[:, None]
    m2 = tl.load(ptr + 2 * column, mask=live, other=0.0)[:, None]
    m3 = tl.load(ptr + 3 * column, mask=live, other=0.0)[:, None]
    return (m0, m1, m2, m3)


@triton.jit
def _pairs(x):
    """Even and odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _interleaved(even, odd):
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _multiplied(m, x, TRANSPOSE: tl.constexpr):
    """Each token's matrix, or its transpose, times every four of its channels."""
    row: tl.constexpr = 1 if TRANSPOSE else 4
    column: tl.constexpr = 4 if TRANSPOSE else 1
    even, odd = _pairs(x)
    a, c = _pairs(even)
    b, d = _pairs(odd)
    out0 = m[0] * a + m[column] * b + m[2 * column] * c + m[3 * column] * d
    out1 = m[row] * a + m[row + column] * b + m[row + 2 * column] * c + m[row + 3 * column] * d
    out2 = m[2 * row] * a + m[2 * row + column] * b + m[2 * row + 2 * column] * c + m[2 * row + 3 * column] * d
    out3 = m[3 * row] * a + m[3 * row + column] * b + m[3 * row + 2 * column] * c + m[3 * row + 3 * column] * d
    return _interleaved(_interleaved(out0, out2), _interleaved(out1, out3))


@triton.jit
def _rotated(x, cos, sin):
    """Pairs of channels as complex numbers times cos + i sin."""
    even, odd = _pairs(x)
    return _interleaved(even * cos - odd * sin, even * sin + odd * cos)


@triton.jit
def _rotation(table_ptr, n, live, INVERSE: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr):
    """Cosines and sines (tokens, BC / 2) of each token's pairs."""
    cos, sin = _pairs(_tile(table_ptr, n, live, HALF, HALF, BC))
    if INVERSE:
        sin = -sin
    return cos, sin


@triton.jit
def _turns_of_program(
    matrix, table, shape,
    INVERSE: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """This program's batch, first head and tokens, which of these there are, and their matrices, cosines and sines."""
    tokens, heads = shape
    tiles, groups = tl.cdiv(tokens, BN), tl.cdiv(heads, HEADS)
    index = tl.program_id(0)
    first = index // tiles % groups * HEADS
    batch = (index // tiles // groups).to(tl.int64)
    n = (index % tiles * BN + tl.arange(0, BN)).to(tl.int64)
    live = n < tokens
    m = _matrices(matrix[0] + batch * matrix[1], n, live, matrix[2], matrix[3], matrix[4])
    cos, sin = _rotation(table[0] + batch * table[1], n, live, INVERSE, HALF, BC)
    return batch, first, n, live, m, cos, sin


@triton.jit
def _turn_kernel(
    x, matrix, table, out_ptr, inflation_ptr, shape,
    D: tl.constexpr, INVERSE: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """out = s M x a token and head; s = min(1, rms x / rms M x) and inflation = (|out| / |x|)².

    INVERSE: the rotation is turned round, s = 1, and there is no inflation.
    """
    HALF: tl.constexpr = D // 2
    tokens, heads = shape
    zero = tl.full([], 0, tl.int64)
    batch, first, n, live, m, cos, sin = _turns_of_program(matrix, table, shape, INVERSE, BN, HEADS, HALF, BC)
    x_ptr = x[0] + batch * x[1]
    out_ptr += batch * tokens * heads * D
    inflation_ptr += batch * tokens * heads
    for h in range(first, tl.minimum(first + HEADS, heads)):
        head = zero + h
        ray = _tile(x_ptr + head * x[3], n, live, x[2], HALF, BC)
        place = _tile(x_ptr + head * x[3] + HALF, n, live, x[2], HALF, BC)
        before = tl.sum(ray * ray + place * place, 1)
        ray, place = _multiplied(m, ray, False), _rotated(place, cos, sin)
        if not INVERSE:
            after = tl.sum(ray * ray + place * place, 1)
            s = tl.minimum(tl.sqrt((before * (1 / D) + 1e-6) / (after * (1 / D) + 1e-6)), 1.0)
            inflation = tl.maximum(s * s * after, 1e-12) / tl.maximum(before, 1e-12)
            tl.store(inflation_ptr + (n * heads + head)[:, None], inflation[:, None], mask=live[:, None])
            ray, place = ray * s[:, None], place * s[:, None]
        _store_tile(out_ptr + head * D, n, live, heads * D, ray, HALF, BC)
        _store_tile(out_ptr + head * D + HALF, n, live, heads * D, place, HALF, BC)


@triton.jit
def _turn_backward_kernel(
    x, matrix, table, dout_ptr, dinflation_ptr, dx_ptr, shape,
    D: tl.constexpr, INVERSE: tl.constexpr, BN: tl.constexpr, HEADS: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """dx from dout and dinflation; what the forward computed is computed again.

    With y = M x, u = |x|², w = |y|²: out = s y, inflation = s² w / u, and s² = (u/D + e) / (w/D + e) where below 1.
    """
    HALF: tl.constexpr = D // 2
    tokens, heads = shape
    zero = tl.full([], 0, tl.int64)
    batch, first, n, live, m, cos, sin = _turns_of_program(matrix, table, shape, INVERSE, BN, HEADS, HALF, BC)
    x_ptr = x[0] + batch * x[1]
    dout_ptr += batch * tokens * heads * D
    dx_ptr += batch * tokens * heads * D
    dinflation_ptr += batch * tokens * heads
    for h in range(first, tl.minimum(first + HEADS, heads)):
        head = zero + h
        dray = _tile(dout_ptr + head * D, n, live, heads * D, HALF, BC)
        dplace = _tile(dout_ptr + head * D + HALF, n, live, heads * D, HALF, BC)
        if not INVERSE:
            ray = _tile(x_ptr + head * x[3], n, live, x[2], HALF, BC)
            place = _tile(x_ptr + head * x[3] + HALF, n, live, x[2], HALF, BC)
            yray, yplace = _multiplied(m, ray, False), _rotated(place, cos, sin)
            u, w = tl.sum(ray * ray + place * place, 1), tl.sum(yray * yray + yplace * yplace, 1)
            ds = tl.sum(dray * yray + dplace * yplace, 1)
            mean_u, mean_w = u * (1 / D) + 1e-6, w * (1 / D) + 1e-6
            s = tl.minimum(tl.sqrt(mean_u / mean_w), 1.0)
            grad = tl.load(dinflation_ptr + n * heads + head, mask=live, other=0.0)
            length, shrunk = s * s * w, 1.0 / tl.maximum(u, 1e-12)
            grad *= shrunk
            dlength = tl.where(length > 1e-12, grad, 0.0)
            du = tl.where(u > 1e-12, -grad * tl.maximum(length, 1e-12) * shrunk, 0.0)
            ds = tl.where(mean_u <= mean_w, ds * s + dlength * 2 * length, 0.0) * (1 / D)
            du = (2 * du + ds / mean_u)[:, None]
            dw = (2 * dlength * s * s - ds / mean_w)[:, None]
            dray, dplace = s[:, None] * dray + dw * yray, s[:, None] * dplace + dw * yplace
        dray, dplace = _multiplied(m, dray, True), _rotated(dplace, cos, -sin)
        if not INVERSE:
            dray, dplace = dray + du * ray, dplace + du * place
        _store_tile(dx_ptr + head * D, n, live, heads * D, dray, HALF, BC)
        _store_tile(dx_ptr + head * D + HALF, n, live, heads * D, dplace, HALF, BC)


@operator("turn")
def turn(x: Tensor, matrix: Tensor, table: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """`hosts.sana_wm.rays.turn`: x (B, N, H, D), matrix (B, N, 4, 4) and table (1 or B, N, D/4, 2), both float32 ->
    out (B, N, H, D) contiguous and inflation (B, N, H) float32, empty where `inverse`."""
    B, N, H, _ = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inflation = matrix.new_empty((B, N, H) if not inverse else (0,))
    _launch(_turn_kernel, x, matrix, table, (out, inflation), inverse)
    return out, inflation


@operator("turn_backward")
def turn_backward(dout: Tensor, dinflation: Tensor, x: Tensor, matrix: Tensor, table: Tensor, inverse: bool) -> Tensor:
    """The gradient of x."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(_turn_backward_kernel, x, matrix, table, (dout.contiguous(), dinflation.contiguous(), dx), inverse)
    return dx


def _launch(kernel: Any, x: Tensor, matrix: Tensor, table: Tensor, others: tuple[Tensor, ...], inverse: bool) -> None:
    B, N, H, D = x.shape
    if x.numel() == 0:
        return
    table = table.contiguous()
    launch(
        kernel, triton.cdiv(N, _TOKENS) * triton.cdiv(H, _HEADS) * B,
        (strided(dense(x)), (matrix, *matrix.stride()), (table, table.stride(0) if len(table) > 1 else 0), *others,
         (N, H)),
        D=D, INVERSE=inverse, BN=_TOKENS, HEADS=_HEADS, BC=triton.next_power_of_2(D // 2),
    )  # fmt: skip


@turn.register_fake
def _(x: Tensor, matrix: Tensor, table: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    return out, matrix.new_empty(x.shape[:3] if not inverse else (0,))


@turn_backward.register_fake
def _(dout: Tensor, dinflation: Tensor, x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.inverse = inputs[3]


def _backward(ctx: Any, dout: Tensor, dinflation: Tensor) -> tuple[Tensor | None, ...]:
    return turn_backward(dout, dinflation, *ctx.saved_tensors, ctx.inverse), None, None, None


turn.register_autograd(_backward, setup_context=_save)
