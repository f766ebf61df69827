"""UCPE, what SANA-WM's camera branch does to queries, keys and values before its scan and to the output after it.

The first half of a head's channels, four at a time, is multiplied by the 4 x 4 matrix of the token's ray, the second
half is rotated. `rays` is the host's tuple (P, Pᵀ, P⁻¹, table or None): matrices (B, N, 4, 4), a complex table
(..., N, D/4).
Source: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import functional
from ...kernels import plain
from ...kernels.backends import pick_backend
from ...kernels.types import accumulation_dtype


def into_rays(
    qkv: Sequence[Tensor], rays: Sequence[Any], backend: str, rescale: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q by Pᵀ, k and v by P⁻¹, each (B, N, H, D), scaled back by min(1, rms before / rms after) a token and head
    unless `rescale` is False.

    Returns them, and (‖k after‖ / ‖k before‖)² (B, N, H), by which the camera branch discounts β.
    """
    _, P_T, P_inv, table = rays
    if not rescale:  # `turn` the other way round leaves the rms as it comes
        table = None if table is None else table.conj().resolve_conj()
        q, k, v = (turn(x, M, table, backend, inverse=True)[0] for x, M in zip(qkv, (P_T, P_inv, P_inv), strict=True))
        before, after = (lengths_of(x.to(accumulation_dtype(x.dtype))) for x in (qkv[1], k))
        return q, k, v, after / before
    (q, _), (k, inflation), (v, _) = (
        turn(x, M, table, backend) for x, M in zip(qkv, (P_T, P_inv, P_inv), strict=True)
    )
    return q, k, v, inflation


def out_of_rays(out: Tensor, rays: Sequence[Any], backend: str) -> Tensor:
    """The scan's output (B, N, H, D) back in the world's frame, by P and the conjugate table."""
    P, _, _, table = rays
    return turn(out, P, table, backend, inverse=True)[0]


def turn(
    x: Tensor, matrix: Tensor, table: Tensor | None, backend: str, *, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """x (B, N, H, D) by matrix and table, within its own rms; and (‖after‖ / ‖before‖)².

    With inverse by the conjugate table, its rms left as it comes; the second result is then empty.
    """
    B, N, _, D = x.shape
    wide = accumulation_dtype(x.dtype)
    matrix = matrix.to(wide)
    if table is None:
        turns = torch.stack([matrix.new_ones(1, N, D // 4), matrix.new_zeros(1, N, D // 4)], -1)
    else:
        turns = torch.view_as_real(table).reshape(math.prod(table.shape[:-2]), N, D // 4, 2).to(wide)
    if matrix.requires_grad or pick_backend(backend, x) is plain:
        return _turn(x, matrix, turns, inverse)
    from ...kernels.triton import ucpe  # here, since it imports triton

    turned: tuple[Tensor, Tensor] = ucpe.turn(x, matrix, turns, inverse)
    return turned


def _turn(x: Tensor, matrix: Tensor, turns: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """The same from cosines and sines (1 or B, N, D/4, 2)."""
    before = x.to(matrix.dtype)
    first, second = before.chunk(2, -1)
    turned = first.unflatten(-1, (-1, 4)).flatten(2, 3) @ matrix.mT
    rotated = functional.rotary(second, *turns.unbind(-1), inverse=inverse, backend="torch")
    after = torch.cat([turned.reshape(first.shape), rotated], -1)
    if inverse:
        return after.to(x.dtype), after.new_empty(0)
    rms = [(t.square().mean(-1, keepdim=True) + 1e-6).sqrt() for t in (before, after)]
    after = after * (rms[0] / rms[1]).clamp(max=1.0)
    return after.to(x.dtype), lengths_of(after) / lengths_of(before)


def lengths_of(x: Tensor) -> Tensor:
    """‖x‖² of each head of a token, never 0."""
    return x.square().sum(-1).clamp_min(1e-12)
