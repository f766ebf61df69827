"""UCPE on Triton: tokens into a camera's rays and out of them, one read and one write each, forward and backward.

A program takes a block of tokens of one head. Channels 4g ... 4g + 3 of a head's first half lie in four planes
(tokens, G), pairs of its second half in two (tokens, R): a token's 4 x 4 matrix and its rotation then act plane by
plane. Everything is float32 between load and store.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BN = 16


@triton.jit
def _planes(ptr, n, live, stride_n, D: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    """The four planes of the first half and the two of the second, zero where there is nothing."""
    g, r = tl.arange(0, G), tl.arange(0, R)
    quad = ptr + n[:, None] * stride_n + 4 * g[None, :]
    pair = ptr + n[:, None] * stride_n + D // 2 + 2 * r[None, :]
    in_quad, in_pair = live[:, None] & (g < D // 8)[None, :], live[:, None] & (r < D // 4)[None, :]
    a = tl.load(quad, mask=in_quad, other=0.0).to(tl.float32)
    b = tl.load(quad + 1, mask=in_quad, other=0.0).to(tl.float32)
    c = tl.load(quad + 2, mask=in_quad, other=0.0).to(tl.float32)
    d = tl.load(quad + 3, mask=in_quad, other=0.0).to(tl.float32)
    even = tl.load(pair, mask=in_pair, other=0.0).to(tl.float32)
    odd = tl.load(pair + 1, mask=in_pair, other=0.0).to(tl.float32)
    return a, b, c, d, even, odd


@triton.jit
def _store_planes(ptr, n, live, stride_n, a, b, c, d, even, odd, D: tl.constexpr, G: tl.constexpr, R: tl.constexpr):
    g, r = tl.arange(0, G), tl.arange(0, R)
    quad = ptr + n[:, None] * stride_n + 4 * g[None, :]
    pair = ptr + n[:, None] * stride_n + D // 2 + 2 * r[None, :]
    in_quad, in_pair = live[:, None] & (g < D // 8)[None, :], live[:, None] & (r < D // 4)[None, :]
    kind = ptr.dtype.element_ty
    tl.store(quad, a.to(kind), mask=in_quad)
    tl.store(quad + 1, b.to(kind), mask=in_quad)
    tl.store(quad + 2, c.to(kind), mask=in_quad)
    tl.store(quad + 3, d.to(kind), mask=in_quad)
    tl.store(pair, even.to(kind), mask=in_pair)
    tl.store(pair + 1, odd.to(kind), mask=in_pair)


@triton.jit
def _matrix_product(m, n, live, a, b, c, d, TRANSPOSE: tl.constexpr):
    """Each token's matrix (16 numbers at m) times the planes."""
    row: tl.constexpr = 1 if TRANSPOSE else 4
    column: tl.constexpr = 4 if TRANSPOSE else 1
    base = m + n * 16
    out0 = _row_product(base, live, a, b, c, d, column)
    out1 = _row_product(base + row, live, a, b, c, d, column)
    out2 = _row_product(base + 2 * row, live, a, b, c, d, column)
    out3 = _row_product(base + 3 * row, live, a, b, c, d, column)
    return out0, out1, out2, out3


@triton.jit
def _row_product(base, live, a, b, c, d, column: tl.constexpr):
    m0 = tl.load(base, mask=live, other=0.0)
    m1 = tl.load(base + column, mask=live, other=0.0)
    m2 = tl.load(base + 2 * column, mask=live, other=0.0)
    m3 = tl.load(base + 3 * column, mask=live, other=0.0)
    return m0[:, None] * a + m1[:, None] * b + m2[:, None] * c + m3[:, None] * d


@triton.jit
def _squares(a, b, c, d, even, odd):
    return tl.sum(a * a + b * b + c * c + d * d, 1) + tl.sum(even * even + odd * odd, 1)


@triton.jit
def _load_table(cos_ptr, sin_ptr, n, live, D: tl.constexpr, R: tl.constexpr):
    r = tl.arange(0, R)
    offs = n[:, None] * (D // 4) + r[None, :]
    keep = live[:, None] & (r < D // 4)[None, :]
    return tl.load(cos_ptr + offs, mask=keep, other=0.0), tl.load(sin_ptr + offs, mask=keep, other=0.0)


@triton.jit
def _turn_kernel(
    x_ptr, m_ptr, cos_ptr, sin_ptr, out_ptr, inflation_ptr,
    tokens, heads, x_b, x_n, x_h, table_b,
    D: tl.constexpr, G: tl.constexpr, R: tl.constexpr, WITHIN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """out = s M x a token and head; s = min(1, rms x / rms M x) and inflation = (|out| / |x|)² WITHIN, else s = 1."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    live = n < tokens
    x_ptr += batch.to(tl.int64) * x_b + head * x_h
    m_ptr += batch.to(tl.int64) * tokens * 16
    table = batch.to(tl.int64) * table_b
    a, b, c, d, even, odd = _planes(x_ptr, n, live, x_n, D, G, R)
    cos, sin = _load_table(cos_ptr + table, sin_ptr + table, n, live, D, R)
    before = _squares(a, b, c, d, even, odd)
    a, b, c, d = _matrix_product(m_ptr, n, live, a, b, c, d, False)
    even, odd = even * cos - odd * sin, even * sin + odd * cos
    if WITHIN:
        after = _squares(a, b, c, d, even, odd)
        s = tl.minimum(tl.sqrt((before / D + 1e-6) / (after / D + 1e-6)), 1.0)
        inflation = tl.maximum(s * s * after, 1e-12) / tl.maximum(before, 1e-12)
        tl.store(inflation_ptr + (batch * tokens + n) * heads + head, inflation, mask=live)
        s = s[:, None]
        a, b, c, d, even, odd = a * s, b * s, c * s, d * s, even * s, odd * s
    out_ptr += (batch.to(tl.int64) * tokens * heads + head) * D
    _store_planes(out_ptr, n, live, heads * D, a, b, c, d, even, odd, D, G, R)


@triton.jit
def _turn_backward_kernel(
    x_ptr, m_ptr, cos_ptr, sin_ptr, dout_ptr, dinflation_ptr, dx_ptr,
    tokens, heads, x_b, x_n, x_h, table_b,
    D: tl.constexpr, G: tl.constexpr, R: tl.constexpr, WITHIN: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """dx from dout and dinflation; what the forward computed is computed again.

    With y = M x, u = |x|², w = |y|²: out = s y, inflation = s² w / u, and s² = (u/D + e) / (w/D + e) where below 1.
    """
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    n = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    live = n < tokens
    x_ptr += batch.to(tl.int64) * x_b + head * x_h
    m_ptr += batch.to(tl.int64) * tokens * 16
    table = batch.to(tl.int64) * table_b
    own = (batch.to(tl.int64) * tokens * heads + head) * D
    da, db, dc, dd, deven, dodd = _planes(dout_ptr + own, n, live, heads * D, D, G, R)
    cos, sin = _load_table(cos_ptr + table, sin_ptr + table, n, live, D, R)
    if WITHIN:
        a, b, c, d, even, odd = _planes(x_ptr, n, live, x_n, D, G, R)
        ya, yb, yc, yd = _matrix_product(m_ptr, n, live, a, b, c, d, False)
        yeven, yodd = even * cos - odd * sin, even * sin + odd * cos
        u, w = _squares(a, b, c, d, even, odd), _squares(ya, yb, yc, yd, yeven, yodd)
        wide_u, wide_w = u / D + 1e-6, w / D + 1e-6
        s = tl.minimum(tl.sqrt(wide_u / wide_w), 1.0)
        ds = tl.sum(da * ya + db * yb + dc * yc + dd * yd, 1) + tl.sum(deven * yeven + dodd * yodd, 1)
        grad = tl.load(dinflation_ptr + (batch * tokens + n) * heads + head, mask=live, other=0.0)
        length, held = s * s * w, tl.maximum(u, 1e-12)
        dlength = tl.where(length > 1e-12, grad / held, 0.0)
        du = tl.where(u > 1e-12, -grad * tl.maximum(length, 1e-12) / (held * held), 0.0)
        dw = dlength * s * s
        ds += dlength * 2 * s * w
        ds = tl.where(wide_u <= wide_w, ds, 0.0)
        du = 2 * (du + ds * s / (2 * wide_u * D))[:, None]
        dw = 2 * (dw - ds * s / (2 * wide_w * D))[:, None]
        s = s[:, None]
        da, db, dc, dd = s * da + dw * ya, s * db + dw * yb, s * dc + dw * yc, s * dd + dw * yd
        deven, dodd = s * deven + dw * yeven, s * dodd + dw * yodd
    da, db, dc, dd = _matrix_product(m_ptr, n, live, da, db, dc, dd, True)
    deven, dodd = deven * cos + dodd * sin, dodd * cos - deven * sin
    if WITHIN:
        da, db, dc, dd = da + du * a, db + du * b, dc + du * c, dd + du * d
        deven, dodd = deven + du * even, dodd + du * odd
    _store_planes(dx_ptr + own, n, live, heads * D, da, db, dc, dd, deven, dodd, D, G, R)


def turn(x: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, within: bool) -> tuple[Tensor, Tensor]:
    """x (B, N, H, D) with channels next to one another, matrix (B, N, 4, 4), cos and sin (1 or B, N, D/4), all three
    float32 and contiguous -> out (B, N, H, D) and inflation (B, N, H) float32, empty unless `within`."""
    B, N, H, _ = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    inflation = matrix.new_empty((B, N, H) if within else (0,))
    _launch(_turn_kernel, x, matrix, cos, sin, (out, inflation), within)
    return out, inflation


def turn_backward(
    x: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, dout: Tensor, dinflation: Tensor, within: bool
) -> Tensor:
    """dx (B, N, H, D)"""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gradients = dout.contiguous(), dinflation.contiguous(), dx
    _launch(_turn_backward_kernel, x, matrix, cos, sin, gradients, within)
    return dx


def _launch(
    kernel: Any, x: Tensor, matrix: Tensor, cos: Tensor, sin: Tensor, others: tuple[Tensor, ...], within: bool
) -> None:
    B, N, H, D = x.shape
    if x.numel() == 0:
        return
    kernel[(triton.cdiv(N, BN), B * H)](
        x, matrix, cos, sin, *others,
        N, H, x.stride(0), x.stride(1), x.stride(2), cos.stride(0) if len(cos) > 1 else 0,
        D=D, G=triton.next_power_of_2(D // 8), R=triton.next_power_of_2(D // 4), WITHIN=within, BN=BN,
    )  # fmt: skip
