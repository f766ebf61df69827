"""Rotary embedding of tokens by tables on Triton, forward and backward, in float32 between load and store."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import dense, launch, operator, strided


@triton.jit
def _rotary_kernel(
    x, cos_ptr, sin_ptr, out_ptr, rows, N, table_b,
    INVERSE: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BP: tl.constexpr, BLOCKS: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BN tokens, all heads: each pair of channels by its token's angle."""
    row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    b, n = row // N, row % N
    for i in tl.static_range(BLOCKS):
        pair = i * BP + tl.arange(0, BP)
        c = i * 2 * BP + tl.arange(0, 2 * BP)
        live = (row < rows)[:, None] & (c < H * D)[None, :]
        channels = (c // D).to(tl.int64) * x[3] + c % D
        tokens = tl.load(x[0] + (b * x[1] + n * x[2])[:, None] + channels[None, :], mask=live, other=0.0)
        at = (b * table_b + n * (D // 2))[:, None] + (pair % (D // 2))[None, :]
        live_pair = (row < rows)[:, None] & (pair < H * D // 2)[None, :]
        cos = tl.load(cos_ptr + at, mask=live_pair, other=0.0)
        sin = tl.load(sin_ptr + at, mask=live_pair, other=0.0)
        if INVERSE:
            sin = -sin
        even, odd = tl.split(tl.reshape(tokens.to(tl.float32), (BN, BP, 2)))
        out = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BN, 2 * BP))
        tl.store(out_ptr + row[:, None] * (H * D) + c[None, :], out.to(out_ptr.dtype.element_ty), mask=live)


@operator("rotary")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Interleaved pairs of x (B, N, H, D) rotated by the angles of the tables (1 or B, N, D/2), backwards with
    `inverse` -> like x, contiguous. The tables get no gradient."""
    B, N, H, D = x.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        x = dense(x)
        cos, sin = cos.float().contiguous(), sin.float().contiguous()
        BN, BP = 4, min(128, triton.next_power_of_2(H * D // 2))
        launch(
            _rotary_kernel, triton.cdiv(B * N, BN),
            (strided(x), cos, sin, out, B * N, N, 0 if len(cos) == 1 else cos.stride(0)),
            INVERSE=inverse, H=H, D=D, BP=BP, BLOCKS=triton.cdiv(H * D // 2, BP), BN=BN, num_warps=BN,
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
