"""The projection of a frame's queries by its states on Triton, and its gradients.

The two directions are added and each frame's queries multiplied once. Beyond D 128, and where whole matrices are
beyond the device's shared memory, a program takes a block of the gradients' channels.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import Inputs, States
from .launch import Settings, Tiles, cdiv, channel_blocks, dense, needs_int64, strided
from .scan import split_rows
from .tiles import (
    denominator,
    frame_sizes,
    frame_tables,
    frame_tokens,
    is_active,
    load_scalars,
    load_sum,
    load_tables,
    load_tokens,
    matmul,
    matrix_operand,
    outer_products,
    rotate,
    scaled,
    scaled_rows,
    split_index,
    store,
    token_addresses,
    token_indices,
    token_operand,
    tokens_times_matrix,
)


@triton.jit
def _project_kernel(
    q, q_rot, beta, mask_ptr, tables, states, out, eps, shape,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHT: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of value channels of one frame's tokens: w X q~, with X the sum of a frame's two states.

    `states` are those of both directions, the first frame's.
    WEIGHT says what w is: "den" for 1 / ((z + y)ᵀ q + eps), "beta", or "none" for 1.
    """
    H, T, S = frame_sizes(shape, INT64)
    i = tl.program_id(0) % NB
    b, t, h = split_index(tl.program_id(0) // NB, H, T)
    frame, token = (b * H + h) * T + t, t * S
    EXACT: tl.constexpr = PRECISION != "tf32"

    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    queries, rotated_queries = frame_tokens(q, b, token, h), frame_tokens(q_rot, b, token, h)
    weights, outs = frame_tokens(beta, b, token, h), frame_tokens(out, b, token, h)
    tables = frame_tables(tables, token, D)

    d0 = tl.arange(0, BD)
    d1 = BD + d0
    v = i * BD + d0
    offs = frame * ROWS * D + v[:, None] * D + d0[None, :]
    x0, size0 = scaled(load_sum(states, offs, (v < D)[:, None] & (d0 < D)[None, :], REVERSE), EXACT)
    if NB == 2:
        x1, size1 = scaled(load_sum(states, offs + BD, (v < D)[:, None] & (d1 < D)[None, :], REVERSE), EXACT)
    if WEIGHT == "den":
        z0 = load_sum(states, frame * ROWS * D + D * D + d0, d0 < D, REVERSE)
        if NB == 2:
            z1 = load_sum(states, frame * ROWS * D + D * D + d1, d1 < D, REVERSE)

    readable = tl.where(active, S, 0)  # a padded frame is never read
    # Every tile is read an iteration ahead of its use.
    n = token_indices(S, BN)
    next_q0 = load_tokens(queries, n, n < readable, d0, D)
    next_rotated0 = next_q0
    if ROTARY == "given":
        next_rotated0 = load_tokens(rotated_queries, n, n < readable, d0, D)
    if ROTARY == "tables":
        next_cos, next_sin = load_tables(tables, n, n < readable, 0, BD, D)
    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + token_indices(S, BN)
        live = n < S
        q0, rotated0 = next_q0.to(tl.float32), next_rotated0.to(tl.float32)
        if ROTARY == "tables":
            cos, sin = next_cos, next_sin
        ahead = n + BN
        next_q0 = load_tokens(queries, ahead, ahead < readable, d0, D)
        if ROTARY == "given":
            next_rotated0 = load_tokens(rotated_queries, ahead, ahead < readable, d0, D)
        else:
            next_rotated0 = next_q0
        if ROTARY == "tables":
            next_cos, next_sin = load_tables(tables, ahead, ahead < readable, 0, BD, D)
        scale = tl.full((BN,), 1.0, tl.float32)
        if NB == 2:
            q1 = load_tokens(queries, n, n < readable, d1, D).to(tl.float32)
        if WEIGHT == "beta":
            scale = load_scalars(weights, n, n < readable).to(tl.float32)
        if WEIGHT == "den":
            den = tl.sum(q0 * z0[None, :], 1)
            if NB == 2:
                den += tl.sum(q1 * z1[None, :], 1)
            scale = 1.0 / (den + eps)
        q0 = rotated0
        if ROTARY == "tables":
            q0 = rotate(q0, cos, sin, BN, BD)
        if NB == 2:
            if ROTARY == "given":
                q1 = load_tokens(rotated_queries, n, n < readable, d1, D).to(tl.float32)
            if ROTARY == "tables":
                cos, sin = load_tables(tables, n, n < readable, 1, BD, D)
                q1 = rotate(q1, cos, sin, BN, BD)
        operand, row_size = scaled_rows(q0, EXACT)
        values = tl.dot(operand, tl.trans(x0), input_precision=PRECISION) * (row_size * scale * size0)[:, None]
        if NB == 2:
            operand, row_size = scaled_rows(q1, EXACT)
            values += tl.dot(operand, tl.trans(x1), input_precision=PRECISION) * (row_size * scale * size1)[:, None]
        values = tl.where(active, values, 0.0)
        store(token_addresses(outs, n, v), values, live[:, None] & (v < D)[None, :])


@triton.jit
def _state_input_gradient_kernel(
    dout, q, q_rot, mask_ptr, tables, states, dX_ptr, weight_ptr, eps, shape,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of one frame's gradient of the summed numerator states, dX = dout diag(w) Q~ᵀ.

    w = 1 / ((z + y)ᵀ q + eps) is computed here where a block is all channels, else read from weight_ptr (B, H, T, S).
    """
    H, T, S = frame_sizes(shape, INT64)
    i, j = (tl.program_id(0) // NB) % NB, tl.program_id(0) % NB
    b, t, h = split_index(tl.program_id(0) // (NB * NB), H, T)
    frame, token = (b * H + h) * T + t, t * S
    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    tokens = tl.where(active, S, 0)
    douts, queries = frame_tokens(dout, b, token, h), frame_tokens(q, b, token, h)
    rotated = frame_tokens(q_rot, b, token, h) if ROTARY == "given" else queries
    weights = queries if NB == 1 else (weight_ptr + frame * S, 1)
    d = tl.arange(0, BD)
    z = tl.zeros((BD,), dtype=tl.float32)
    if ROWS > D and NB == 1:
        z = load_sum(states, frame * ROWS * D + D * D + d, d < D, REVERSE)
    dX, _ = outer_products(
        douts, rotated, weights, frame_tables(tables, token, D), tokens, i, j, z, eps,
        D, BD, NB, BN, False, ROTARY == "tables",
        "none" if ROWS == D else "stored" if NB > 1 else "den_given" if ROTARY == "given" else "den",
        PRECISION, STAGES,
    )  # fmt: skip
    row, col = i * BD + d, j * BD + d
    block = frame * ROWS * D + row[:, None] * D + col[None, :]
    tl.store(dX_ptr + block, dX, mask=(row < D)[:, None] & (col < D)[None, :])


@triton.jit
def _query_gradient_kernel(
    dout, q, q_rot, mask_ptr, tables, states, dq, dq_rot, dX_ptr, eps, shape,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One frame: dq~ = w Xᵀ dout, dq, and the gradient of z + y, the last row of dX."""
    H, T, S = frame_sizes(shape, INT64)
    b, t, h = split_index(tl.program_id(0), H, T)
    frame, token = (b * H + h) * T + t, t * S
    EXACT: tl.constexpr = PRECISION != "tf32"
    TWO: tl.constexpr = q[0].dtype.element_ty == tl.bfloat16
    NORMALIZE: tl.constexpr = ROWS > D

    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    douts = frame_tokens(dout, b, token, h)
    queries, rotated_queries = frame_tokens(q, b, token, h), frame_tokens(q_rot, b, token, h)
    dqueries, drotated = frame_tokens(dq, b, token, h), frame_tokens(dq_rot, b, token, h)
    tables = frame_tables(tables, token, D)

    d = tl.arange(0, BD)
    square = d[:, None] * D + d[None, :]
    keep = (d < D)[:, None] & (d < D)[None, :]
    x = load_sum(states, frame * ROWS * D + square, keep, REVERSE)
    x_high, x_low, size = matrix_operand(x, TWO, EXACT)
    if NORMALIZE:
        z = load_sum(states, frame * ROWS * D + D * D + d, d < D, REVERSE)
        dz = tl.zeros((BN, BD), dtype=tl.float32)

    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + token_indices(S, BN)
        live = n < S
        read = live & active
        raw = load_tokens(douts, n, read, d, D)
        rows, row_size = token_operand(raw, raw.to(tl.float32), False, EXACT)
        weight = row_size * size
        if NORMALIZE:
            query = load_tokens(queries, n, read, d, D).to(tl.float32)
            scale = tl.where(read, 1.0 / (tl.sum(query * z[None, :], 1) + eps), 0.0)
            weight *= scale
        if ROTARY == "tables":
            cos, sin = load_tables(tables, n, read, 0, BD, D)
        drotated_query = matmul(rows, x_high, x_low, TWO, PRECISION) * weight[:, None]
        dquery = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            # num . dnum without num: q~ . (Xᵀ dnum), and the second factor is dq~.
            rotated = query
            if ROTARY == "given":
                rotated = load_tokens(rotated_queries, n, read, d, D).to(tl.float32)
            if ROTARY == "tables":
                rotated = rotate(query, cos, sin, BN, BD)
            dden = -tl.sum(drotated_query * rotated, 1) * scale
            dz += query * dden[:, None]
            dquery = dden[:, None] * z[None, :]
        out_keep = live[:, None] & (d < D)[None, :]
        if ROTARY == "given":
            store(token_addresses(drotated, n, d), drotated_query, out_keep)
        elif ROTARY == "tables":
            dquery += rotate(drotated_query, cos, -sin, BN, BD)
        else:
            dquery += drotated_query
        store(token_addresses(dqueries, n, d), dquery, out_keep)

    if NORMALIZE:
        tl.store(dX_ptr + frame * ROWS * D + D * D + d, tl.sum(dz, 0), mask=d < D)


# --- heads too wide for a whole matrix in shared memory: an output's channels in blocks, a program each ----------


@triton.jit
def _blocked_project_kernel(
    q, q_rot, beta, mask_ptr, tables, states, out, eps, shape,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHT: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_project_kernel`: a block of w X q~ of one frame's tokens."""
    H, T, S = frame_sizes(shape, INT64)
    i = tl.program_id(0) % NB
    b, t, h = split_index(tl.program_id(0) // NB, H, T)
    frame, token = (b * H + h) * T + t, t * S
    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    queries = frame_tokens(q, b, token, h)
    rotated = frame_tokens(q_rot, b, token, h) if ROTARY == "given" else queries
    weights, outs = frame_tokens(beta, b, token, h), frame_tokens(out, b, token, h)
    tables = frame_tables(tables, token, D)
    sums = (states[0] + frame * ROWS * D, states[1] + frame * ROWS * D)
    d = i * BD + tl.arange(0, BD)
    for n0 in tl.range(0, S, BN):
        n = n0 + token_indices(S, BN)
        live = n < S
        read = live & active  # a padded frame is never read
        values = tokens_times_matrix(
            rotated, n, read, tables, sums, i, D, BD, NB, BN, ROTARY == "tables", REVERSE, True, False, PRECISION
        )
        if WEIGHT == "beta":
            values *= load_scalars(weights, n, read).to(tl.float32)[:, None]
        if WEIGHT == "den":
            values /= (denominator(queries, n, read, sums, D * D, D, BD, NB, BN, REVERSE) + eps)[:, None]
        values = tl.where(read[:, None], values, 0.0)
        store(token_addresses(outs, n, d), values, live[:, None] & (d < D)[None, :])


@triton.jit
def _blocked_query_gradient_kernel(
    dout, q, q_rot, mask_ptr, tables, states, dq, dq_rot, dX_ptr, weight_ptr, dden_ptr, eps, shape, dden_block,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, ONLY_DEN: tl.constexpr,
    ROTARY: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_query_gradient_kernel`, a block of channels a program, in two launches.

    The first, with ONLY_DEN, computes w = 1 / ((z + y)ᵀ q + eps) of every token (B, H, T, S) and each block's part of
    the denominator's gradient, (NB, B, H, T, S); the second adds the parts up.
    """
    H, T, S = frame_sizes(shape, INT64)
    i = tl.program_id(0) % NB
    b, t, h = split_index(tl.program_id(0) // NB, H, T)
    frame, token = (b * H + h) * T + t, t * S
    TWO: tl.constexpr = q[0].dtype.element_ty == tl.bfloat16
    NORMALIZE: tl.constexpr = ROWS > D
    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    douts = frame_tokens(dout, b, token, h)
    queries = frame_tokens(q, b, token, h)
    rotated_queries = frame_tokens(q_rot, b, token, h) if ROTARY == "given" else queries
    dqueries, drotated = frame_tokens(dq, b, token, h), frame_tokens(dq_rot, b, token, h)
    tables = frame_tables(tables, token, D)
    sums = (states[0] + frame * ROWS * D, states[1] + frame * ROWS * D)
    weight_ptr += frame * S
    dden_ptr += frame * S
    d = i * BD + tl.arange(0, BD)
    if NORMALIZE:
        z = load_sum(sums, D * D + d, d < D, REVERSE)
        dz = tl.zeros((BN, BD), dtype=tl.float32)
    for n0 in tl.range(0, S, BN):
        n = n0 + token_indices(S, BN)
        live = n < S
        read = live & active
        drotated_query = tokens_times_matrix(
            douts, n, read, tables, sums, i, D, BD, NB, BN, False, REVERSE, False, TWO, PRECISION
        )
        if ROTARY == "tables":
            cos, sin = load_tables(tables, n, read, i, BD, D)
        if ONLY_DEN:
            den = denominator(queries, n, read, sums, D * D, D, BD, NB, BN, REVERSE)
            weight = tl.where(read, 1.0 / (den + eps), 0.0)
            rotated = load_tokens(rotated_queries, n, read, d, D).to(tl.float32)
            if ROTARY == "tables":
                rotated = rotate(rotated, cos, sin, BN, BD)
            dden = -tl.sum(drotated_query * rotated, 1) * weight * weight
            tl.store(dden_ptr + i.to(tl.int64) * dden_block + n, dden, mask=live)
            if i == 0:
                tl.store(weight_ptr + n, weight, mask=live)
        else:
            dquery = tl.zeros((BN, BD), dtype=tl.float32)
            if NORMALIZE:
                drotated_query *= tl.load(weight_ptr + n, mask=live, other=0.0)[:, None]
                dden = tl.zeros((BN,), dtype=tl.float32)
                parts = dden_ptr + n
                for _ in tl.static_range(NB):
                    dden += tl.load(parts, mask=live, other=0.0)
                    parts += dden_block
                dz += load_tokens(queries, n, read, d, D).to(tl.float32) * dden[:, None]
                dquery = dden[:, None] * z[None, :]
            keep = live[:, None] & (d < D)[None, :]
            if ROTARY == "given":
                store(token_addresses(drotated, n, d), drotated_query, keep)
            elif ROTARY == "tables":
                dquery += rotate(drotated_query, cos, -sin, BN, BD)
            else:
                dquery += drotated_query
            store(token_addresses(dqueries, n, d), dquery, keep)
    if NORMALIZE and not ONLY_DEN:
        tl.store(dX_ptr + frame * ROWS * D + D * D + d, tl.sum(dz, 0), mask=d < D)


# --- host functions ---------------------------------------------------------------------------------------------


_PROJECT_TILES: dict[str, Tiles] = {
    "tf32": [
        {"BN": 64, "STAGES": 1, "num_warps": 8, "maxnreg": 128},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
    "tf32x3": [
        {"BN": 32, "STAGES": 1, "num_warps": 4},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
}


_STATE_INPUT_TILES: dict[str, Tiles] = {
    "tf32": [
        {"BN": 64, "STAGES": 2, "num_warps": 8, "maxnreg": 128},
        {"BN": 32, "STAGES": 2, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    "tf32x3": [
        {"BN": 32, "STAGES": 2, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
}


#: Of the gradients of a frame's queries, and of its keys.
TOKEN_GRADIENT_TILES: dict[str, Tiles] = {
    "tf32": [
        {"BN": 64, "STAGES": 2, "num_warps": 8},
        {"BN": 32, "STAGES": 1, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    "tf32x3": [
        {"BN": 32, "STAGES": 1, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
}


_BLOCKED_PROJECT_TILES: dict[str, Tiles] = {
    "tf32x3": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
}


_BLOCKED_QUERY_TILES: dict[str, Tiles] = {
    "tf32": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    "tf32x3": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
}


class Rotary(NamedTuple):
    """How the numerator's tokens come about, and what kernels are given for it.

    source: "given", tokens of their own; "tables", rotated in the kernels by cosines and sines (N, D / 2); or "none".
    """

    source: str
    tokens: Tensor
    tables: tuple[Tensor, Tensor]


def rotary_of(x: Inputs, plain: Tensor, rotated: Tensor | None) -> Rotary:
    """What is not used is `plain`, for kernels to have some pointer."""
    if rotated is not None:
        return Rotary("given", dense(rotated), (plain, plain))
    if x.cos is not None and x.sin is not None:
        return Rotary("tables", plain, (x.cos.contiguous(), x.sin.contiguous()))
    return Rotary("none", plain, (plain, plain))


def mask_of(x: Inputs, like: Tensor) -> Tensor:
    """The mask as bytes; any tensor where there is none."""
    return like if x.mask is None else x.mask.contiguous().view(torch.uint8)


def project(settings: Settings, x: Inputs, states: States, eps: float) -> Tensor:
    q = dense(x.q)
    weight = "none" if states.z is None else "den"
    return project_tokens(settings, x, q, rotary_of(x, q, x.q_rot), (q, weight), states, eps)


def project_tokens(
    settings: Settings, x: Inputs, q: Tensor, rotary: Rotary, weight: tuple[Tensor, str], states: States, eps: float
) -> Tensor:
    """w X q~ of every token of q, X the sum of a frame's two states: `weight` is (beta, "beta"), or any tensor and
    "den" or "none", as in `_project_kernel`."""
    B, N, H, D = q.shape
    T = x.decay.shape[1]
    out = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    precision = settings.token_precision(q.dtype)
    blocked = D > 128 and precision != "tf32"
    BD, NB = (64, cdiv(D, 64)) if precision != "tf32" and D > 64 else channel_blocks(D)
    if out.numel():
        int64 = needs_int64(N // T, q, rotary.tokens, weight[0], out)
        settings.launcher.launch(
            _blocked_project_kernel if blocked else _project_kernel, lambda tile: B * T * H * NB,
            (strided(q), strided(rotary.tokens), strided(weight[0]), mask_of(x, q), rotary.tables, both(states),
             strided(out), eps, (H, T, N // T)),
            {"D": D, "ROWS": D if states.z is None else D + 1, "BD": BD, "NB": NB, "ROTARY": rotary.source,
             "WEIGHT": weight[1], "HAS_MASK": x.mask is not None, "INT64": int64, "REVERSE": states.R is not None,
             "PRECISION": precision},
            (_BLOCKED_PROJECT_TILES if blocked else _PROJECT_TILES)[precision],
        )  # fmt: skip
    return out


def project_backward(
    settings: Settings, dout: Tensor, x: Inputs, states: States, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    B, N, H, D = x.q.shape
    T = x.decay.shape[1]
    q, dout = dense(x.q), dense(dout)
    rotary = rotary_of(x, q, x.q_rot)
    ROWS = D if states.z is None else D + 1
    dq = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    dq_rot = torch.empty_like(dq) if rotary.source == "given" else dq
    dX = torch.empty(B, H, T, ROWS, D, dtype=torch.float32, device=q.device)
    if dq.numel():
        BD, NB = settings.gradient_blocks(q)
        precision, state_precision = settings.token_precision(q.dtype), settings.state_precision(q.dtype)
        inputs = strided(dout), strided(q), strided(rotary.tokens), mask_of(x, q), rotary.tables, both(states)
        shape = H, T, N // T
        int64 = needs_int64(N // T, dout, q, rotary.tokens, dq)
        options = {"D": D, "ROWS": ROWS, "BD": BD, "ROTARY": rotary.source, "HAS_MASK": x.mask is not None,
                   "INT64": int64, "REVERSE": states.R is not None, "PRECISION": precision}  # fmt: skip
        weight = dX
        if NB > 1:
            weight = torch.empty(B, H, T, N // T, dtype=torch.float32, device=q.device)
            dden = torch.empty(NB, *weight.shape, dtype=torch.float32, device=q.device)
            for only_den in (True, False)[ROWS == D :]:
                settings.launcher.launch(
                    _blocked_query_gradient_kernel, lambda tile: B * T * H * NB,
                    (*inputs, strided(dq), strided(dq_rot), dX, weight, dden, eps, shape, weight.numel()),
                    {**options, "NB": NB, "ONLY_DEN": only_den}, _BLOCKED_QUERY_TILES[precision],
                )  # fmt: skip
        else:
            settings.launcher.launch(
                _query_gradient_kernel, lambda tile: B * T * H,
                (*inputs, strided(dq), strided(dq_rot), dX, eps, shape), options, TOKEN_GRADIENT_TILES[precision],
            )  # fmt: skip
        # float16 does not hold a weight of any size.
        settings.launcher.launch(
            _state_input_gradient_kernel, lambda tile: B * T * H * NB * NB, (*inputs, dX, weight, eps, shape),
            {**options, "NB": NB, "PRECISION": state_precision}, _STATE_INPUT_TILES[state_precision],
        )  # fmt: skip
    return dq, dq_rot if rotary.source == "given" else None, *split_rows(dX)  # type: ignore[return-value]


def both(states: States) -> tuple[Tensor, Tensor]:
    """The numerator states of both directions, each with the denominator's as its last row; the first twice where
    there is no reverse direction."""
    return states.S, states.S if states.R is None else states.R
