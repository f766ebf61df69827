"""The projection of a frame's queries by its states on Triton, and its gradients.

The two directions are added and each frame's queries multiplied once. Beyond D 128, and where whole matrices are
beyond the device's shared memory, a program takes a block of the gradients' channels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import Inputs, States
from .launch import Settings, Tiles, cdiv, channel_blocks, dense
from .scan import split_rows
from .tiles import (
    denominator,
    load_sum,
    load_tables,
    load_tokens,
    matmul,
    matrix_operand,
    outer_products,
    rotate,
    scaled,
    scaled_rows,
    token_operand,
    tokens_times_matrix,
)


@triton.jit
def _project_kernel(
    q_ptr, qr_ptr, beta_ptr, mask_ptr, cos_ptr, sin_ptr, S_ptr, R_ptr, out_ptr, eps,
    q_b, q_n, q_h, qr_b, qr_n, qr_h, beta_b, beta_n, beta_h, out_b, out_n, out_h,
    H, T, S, per_program,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHT: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of value channels of one frame's tokens (or of a share of them): w (S + R) q~.

    WEIGHT says what w is: "den" for 1 / ((z + y)ᵀ q + eps), "beta", or "none" for 1.
    """
    pid, share = tl.program_id(0), tl.program_id(1)
    i = pid % NB
    h = (pid // NB) % H
    t = (pid // (NB * H)) % T
    b = (pid // (NB * H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    EXACT: tl.constexpr = PRECISION != "tf32"

    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    q_ptr += b * q_b + token * q_n + h * q_h
    qr_ptr += b * qr_b + token * qr_n + h * qr_h
    beta_ptr += b * beta_b + token * beta_n + h * beta_h
    out_ptr += b * out_b + token * out_n + h * out_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)

    d0 = tl.arange(0, BD)
    d1 = BD + d0
    v = i * BD + d0
    offs = frame * R * D + v[:, None] * D + d0[None, :]
    x0, size0 = scaled(load_sum(S_ptr, R_ptr, offs, (v < D)[:, None] & (d0 < D)[None, :], REVERSE), EXACT)
    if NB == 2:
        x1, size1 = scaled(load_sum(S_ptr, R_ptr, offs + BD, (v < D)[:, None] & (d1 < D)[None, :], REVERSE), EXACT)
    if WEIGHT == "den":
        z0 = load_sum(S_ptr, R_ptr, frame * R * D + D * D + d0, d0 < D, REVERSE)
        if NB == 2:
            z1 = load_sum(S_ptr, R_ptr, frame * R * D + D * D + d1, d1 < D, REVERSE)

    first = share * per_program
    last = tl.minimum(S, first + per_program)
    readable = tl.where(active, last, 0)  # a padded frame is never read
    # Every tile is read a turn ahead of its use.
    n = first + tl.arange(0, BN)
    next_q0 = load_tokens(q_ptr, n, n < readable, q_n, d0, D)
    next_rotated0 = next_q0
    if ROTARY == "given":
        next_rotated0 = load_tokens(qr_ptr, n, n < readable, qr_n, d0, D)
    if ROTARY == "tables":
        next_cos, next_sin = load_tables(cos_ptr, sin_ptr, n, n < readable, 0, BD, D)
    for n0 in tl.range(first, last, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        live = n < last
        q0, rotated0 = next_q0.to(tl.float32), next_rotated0.to(tl.float32)
        if ROTARY == "tables":
            cos, sin = next_cos, next_sin
        ahead = n + BN
        next_q0 = load_tokens(q_ptr, ahead, ahead < readable, q_n, d0, D)
        if ROTARY == "given":
            next_rotated0 = load_tokens(qr_ptr, ahead, ahead < readable, qr_n, d0, D)
        else:
            next_rotated0 = next_q0
        if ROTARY == "tables":
            next_cos, next_sin = load_tables(cos_ptr, sin_ptr, ahead, ahead < readable, 0, BD, D)
        scale = tl.full((BN,), 1.0, tl.float32)
        if NB == 2:
            q1 = load_tokens(q_ptr, n, n < readable, q_n, d1, D).to(tl.float32)
        if WEIGHT == "beta":
            scale = tl.load(beta_ptr + n * beta_n, mask=n < readable, other=0.0).to(tl.float32)
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
                q1 = load_tokens(qr_ptr, n, n < readable, qr_n, d1, D).to(tl.float32)
            if ROTARY == "tables":
                cos, sin = load_tables(cos_ptr, sin_ptr, n, n < readable, 1, BD, D)
                q1 = rotate(q1, cos, sin, BN, BD)
        operand, row_size = scaled_rows(q0, EXACT)
        out = tl.dot(operand, tl.trans(x0), input_precision=PRECISION) * (row_size * scale * size0)[:, None]
        if NB == 2:
            operand, row_size = scaled_rows(q1, EXACT)
            out += tl.dot(operand, tl.trans(x1), input_precision=PRECISION) * (row_size * scale * size1)[:, None]
        out = tl.where(active, out, 0.0)
        tl.store(
            out_ptr + n[:, None] * out_n + v[None, :],
            out.to(out_ptr.dtype.element_ty),
            mask=live[:, None] & (v < D)[None, :],
        )


@triton.jit
def _state_input_gradient_kernel(
    dout_ptr, q_ptr, qr_ptr, mask_ptr, cos_ptr, sin_ptr, S_ptr, R_ptr, dX_ptr, weight_ptr, eps,
    dout_b, dout_n, dout_h, q_b, q_n, q_h, qr_b, qr_n, qr_h, H, T, S,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of one frame's gradient of the summed numerator states, dX = dout diag(w) Q~ᵀ.

    w = 1 / ((z + y)ᵀ q + eps) is found here where a block is all channels, else read from weight_ptr (B, H, T, S).
    """
    pid = tl.program_id(0) // (NB * NB)
    i, j = (tl.program_id(0) // NB) % NB, tl.program_id(0) % NB
    h = pid % H
    t = (pid // H) % T
    b = (pid // (H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    tokens = tl.where(active, S, 0)
    dout_ptr += b * dout_b + token * dout_n + h * dout_h
    q_ptr += b * q_b + token * q_n + h * q_h
    qr_ptr += b * qr_b + token * qr_n + h * qr_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)
    d = tl.arange(0, BD)
    z = tl.zeros((BD,), dtype=tl.float32)
    if R > D and NB == 1:
        z = load_sum(S_ptr, R_ptr, frame * R * D + D * D + d, d < D, REVERSE)
    if ROTARY == "none":
        qr_ptr, qr_n = q_ptr, q_n
    if NB == 1:
        weights, weights_n = q_ptr, q_n
    else:
        weights, weights_n = weight_ptr + frame * S, 1
    dX, _ = outer_products(
        dout_ptr, dout_n, q_ptr if ROTARY == "tables" else qr_ptr, q_n if ROTARY == "tables" else qr_n,
        weights, weights_n, cos_ptr, sin_ptr, tokens, i, j, z, eps,
        D, BD, NB, BN, False, ROTARY == "tables",
        "none" if R == D else "found" if NB > 1 else "den_given" if ROTARY == "given" else "den", PRECISION, STAGES,
    )  # fmt: skip
    row, col = i * BD + d, j * BD + d
    tl.store(
        dX_ptr + frame * R * D + row[:, None] * D + col[None, :], dX, mask=(row < D)[:, None] & (col < D)[None, :]
    )


@triton.jit
def _query_gradient_kernel(
    dout_ptr, q_ptr, qr_ptr, mask_ptr, cos_ptr, sin_ptr, S_ptr, R_ptr, dq_ptr, dqr_ptr, dX_ptr, eps,
    dout_b, dout_n, dout_h, q_b, q_n, q_h, qr_b, qr_n, qr_h, dq_b, dq_n, dq_h,
    H, T, S,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One frame: dq~ = w Xᵀ dout, dq, and the gradient of z + y, the last row of dX."""
    pid = tl.program_id(0)
    h = pid % H
    t = (pid // H) % T
    b = (pid // (H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    EXACT: tl.constexpr = PRECISION != "tf32"
    TWO: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    NORMALIZE: tl.constexpr = R > D

    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    q_ptr += b * q_b + token * q_n + h * q_h
    qr_ptr += b * qr_b + token * qr_n + h * qr_h
    dout_ptr += b * dout_b + token * dout_n + h * dout_h
    dq_ptr += b * dq_b + token * dq_n + h * dq_h
    dqr_ptr += b * dq_b + token * dq_n + h * dq_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)

    d = tl.arange(0, BD)
    square = d[:, None] * D + d[None, :]
    keep = (d < D)[:, None] & (d < D)[None, :]
    x = load_sum(S_ptr, R_ptr, frame * R * D + square, keep, REVERSE)
    x_high, x_low, size = matrix_operand(x, TWO, EXACT)
    if NORMALIZE:
        z = load_sum(S_ptr, R_ptr, frame * R * D + D * D + d, d < D, REVERSE)
        dz = tl.zeros((BN, BD), dtype=tl.float32)

    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        raw = load_tokens(dout_ptr, n, read, dout_n, d, D)
        rows, row_size = token_operand(raw, raw.to(tl.float32), False, EXACT)
        weight = row_size * size
        if NORMALIZE:
            q = load_tokens(q_ptr, n, read, q_n, d, D).to(tl.float32)
            scale = tl.where(read, 1.0 / (tl.sum(q * z[None, :], 1) + eps), 0.0)
            weight *= scale
        if ROTARY == "tables":
            cos, sin = load_tables(cos_ptr, sin_ptr, n, read, 0, BD, D)
        dq_rot = matmul(rows, x_high, x_low, TWO, PRECISION) * weight[:, None]
        dq = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            # num . dnum without num: q~ . (Xᵀ dnum), and the second factor is dq~.
            rotated = q
            if ROTARY == "given":
                rotated = load_tokens(qr_ptr, n, read, qr_n, d, D).to(tl.float32)
            if ROTARY == "tables":
                rotated = rotate(q, cos, sin, BN, BD)
            dden = -tl.sum(dq_rot * rotated, 1) * scale
            dz += q * dden[:, None]
            dq = dden[:, None] * z[None, :]
        out = n[:, None] * dq_n + d[None, :]
        out_keep = live[:, None] & (d < D)[None, :]
        if ROTARY == "given":
            tl.store(dqr_ptr + out, dq_rot.to(dqr_ptr.dtype.element_ty), mask=out_keep)
        elif ROTARY == "tables":
            dq += rotate(dq_rot, cos, -sin, BN, BD)
        else:
            dq += dq_rot
        tl.store(dq_ptr + out, dq.to(dq_ptr.dtype.element_ty), mask=out_keep)

    if NORMALIZE:
        tl.store(dX_ptr + frame * R * D + D * D + d, tl.sum(dz, 0), mask=d < D)


# --- heads too wide for a whole matrix in shared memory: an output's channels in blocks, a program each ----------


@triton.jit
def _wide_project_kernel(
    q_ptr, qr_ptr, beta_ptr, mask_ptr, cos_ptr, sin_ptr, S_ptr, R_ptr, out_ptr, eps,
    q_b, q_n, q_h, qr_b, qr_n, qr_h, beta_b, beta_n, beta_h, out_b, out_n, out_h, H, T, S,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, WEIGHT: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_project_kernel`: a block of w (S + R) q~ of one frame's tokens."""
    pid = tl.program_id(0)
    i = pid % NB
    h = (pid // NB) % H
    t = (pid // (NB * H)) % T
    b = (pid // (NB * H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    q_ptr += b * q_b + token * q_n + h * q_h
    qr_ptr += b * qr_b + token * qr_n + h * qr_h
    beta_ptr += b * beta_b + token * beta_n + h * beta_h
    out_ptr += b * out_b + token * out_n + h * out_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)
    S_ptr += frame * R * D
    R_ptr += frame * R * D
    if ROTARY != "given":
        qr_ptr, qr_n = q_ptr, q_n
    d = i * BD + tl.arange(0, BD)
    for n0 in tl.range(0, S, BN):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active  # a padded frame is never read
        out = tokens_times_matrix(
            qr_ptr, n, read, qr_n, cos_ptr, sin_ptr, S_ptr, R_ptr, i,
            D, BD, NB, BN, ROTARY == "tables", REVERSE, True, False, PRECISION,
        )  # fmt: skip
        if WEIGHT == "beta":
            out *= tl.load(beta_ptr + n * beta_n, mask=read, other=0.0).to(tl.float32)[:, None]
        if WEIGHT == "den":
            den = denominator(q_ptr, n, read, q_n, S_ptr + D * D, R_ptr + D * D, D, BD, NB, BN, REVERSE)
            out /= (den + eps)[:, None]
        out = tl.where(read[:, None], out, 0.0).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + n[:, None] * out_n + d[None, :], out, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _wide_query_gradient_kernel(
    dout_ptr, q_ptr, qr_ptr, mask_ptr, cos_ptr, sin_ptr, S_ptr, R_ptr, dq_ptr, dqr_ptr, dX_ptr, weight_ptr, dden_ptr,
    eps, dout_b, dout_n, dout_h, q_b, q_n, q_h, qr_b, qr_n, qr_h, dq_b, dq_n, dq_h, H, T, S, dden_block,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, ONLY_DEN: tl.constexpr,
    ROTARY: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_query_gradient_kernel`, a block of channels a program, in two launches.

    The first, with ONLY_DEN, finds w = 1 / ((z + y)ᵀ q + eps) of every token (B, H, T, S) and each block's part of the
    denominator's gradient, (NB, B, H, T, S); the second adds the parts up.
    """
    pid = tl.program_id(0)
    i = pid % NB
    h = (pid // NB) % H
    t = (pid // (NB * H)) % T
    b = (pid // (NB * H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    TWO: tl.constexpr = q_ptr.dtype.element_ty == tl.bfloat16
    NORMALIZE: tl.constexpr = R > D
    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    q_ptr += b * q_b + token * q_n + h * q_h
    qr_ptr += b * qr_b + token * qr_n + h * qr_h
    dout_ptr += b * dout_b + token * dout_n + h * dout_h
    dq_ptr += b * dq_b + token * dq_n + h * dq_h
    dqr_ptr += b * dq_b + token * dq_n + h * dq_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)
    S_ptr += frame * R * D
    R_ptr += frame * R * D
    weight_ptr += frame * S
    dden_ptr += frame * S
    d = i * BD + tl.arange(0, BD)
    if NORMALIZE:
        z = load_sum(S_ptr, R_ptr, D * D + d, d < D, REVERSE)
        dz = tl.zeros((BN, BD), dtype=tl.float32)
    for n0 in tl.range(0, S, BN):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        dq_rot = tokens_times_matrix(
            dout_ptr, n, read, dout_n, cos_ptr, sin_ptr, S_ptr, R_ptr, i,
            D, BD, NB, BN, False, REVERSE, False, TWO, PRECISION,
        )  # fmt: skip
        if ROTARY == "tables":
            cos, sin = load_tables(cos_ptr, sin_ptr, n, read, i, BD, D)
        if ONLY_DEN:
            den = denominator(q_ptr, n, read, q_n, S_ptr + D * D, R_ptr + D * D, D, BD, NB, BN, REVERSE)
            weight = tl.where(read, 1.0 / (den + eps), 0.0)
            if ROTARY == "given":
                rotated = load_tokens(qr_ptr, n, read, qr_n, d, D).to(tl.float32)
            else:
                rotated = load_tokens(q_ptr, n, read, q_n, d, D).to(tl.float32)
            if ROTARY == "tables":
                rotated = rotate(rotated, cos, sin, BN, BD)
            dden = -tl.sum(dq_rot * rotated, 1) * weight * weight
            tl.store(dden_ptr + i.to(tl.int64) * dden_block + n, dden, mask=live)
            if i == 0:
                tl.store(weight_ptr + n, weight, mask=live)
        else:
            dq = tl.zeros((BN, BD), dtype=tl.float32)
            if NORMALIZE:
                dq_rot *= tl.load(weight_ptr + n, mask=live, other=0.0)[:, None]
                dden = tl.zeros((BN,), dtype=tl.float32)
                for c in range(NB):
                    dden += tl.load(dden_ptr + c * dden_block + n, mask=live, other=0.0)
                dz += load_tokens(q_ptr, n, read, q_n, d, D).to(tl.float32) * dden[:, None]
                dq = dden[:, None] * z[None, :]
            out = n[:, None] * dq_n + d[None, :]
            keep = live[:, None] & (d < D)[None, :]
            if ROTARY == "given":
                tl.store(dqr_ptr + out, dq_rot.to(dqr_ptr.dtype.element_ty), mask=keep)
            elif ROTARY == "tables":
                dq += rotate(dq_rot, cos, -sin, BN, BD)
            else:
                dq += dq_rot
            tl.store(dq_ptr + out, dq.to(dq_ptr.dtype.element_ty), mask=keep)
    if NORMALIZE and not ONLY_DEN:
        tl.store(dX_ptr + frame * R * D + D * D + d, tl.sum(dz, 0), mask=d < D)


# --- host functions ---------------------------------------------------------------------------------------------


_PROJECT_TILES: Tiles = {
    "tf32": [
        {"BN": 64, "STAGES": 1, "num_warps": 8, "maxnreg": 128},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
    "tf32x3": [
        {"BN": 32, "STAGES": 1, "num_warps": 4},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
}


_STATE_INPUT_TILES: Tiles = {
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


_QUERY_TILES: Tiles = {
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


_WIDE_PROJECT_TILES: Tiles = {
    "tf32x3": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
}


_WIDE_QUERY_TILES: Tiles = {
    "tf32": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    "tf32x3": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
}


def token_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, tokens and heads."""
    return x.stride(0), x.stride(1), x.stride(2)


def mask_bytes(x: Inputs, like: Tensor) -> Tensor:
    """The mask as bytes; any tensor where there is none."""
    return like if x.mask is None else x.mask.contiguous().view(torch.uint8)


def rotary_source(x: Inputs, given: Tensor | None, like: Tensor) -> tuple[str, Tensor, Tensor]:
    """How the numerator's tokens come about: "given", from "tables" (cos, sin of (N, D / 2)), or "none"."""
    if given is not None:
        return "given", like, like
    if x.cos is not None and x.sin is not None:
        return "tables", x.cos.contiguous(), x.sin.contiguous()
    return "none", like, like


def project(settings: Settings, x: Inputs, states: States, eps: float) -> Tensor:
    q, q_rot = dense(x.q), None if x.q_rot is None else dense(x.q_rot)
    weight = "none" if states.z is None else "den"
    return project_tokens(settings, q, q_rot, q, weight, x, states.S, states.R, states.z is not None, eps)


def project_tokens(
    settings: Settings, q: Tensor, q_rot: Tensor | None, beta: Tensor, weight: str, x: Inputs, S: Tensor,
    R: Tensor | None, has_denominator: bool, eps: float,
) -> Tensor:  # fmt: skip
    """(S + R) q~ of every token of q, times its weight."""
    B, N, H, D = q.shape
    T = x.decay.shape[1]
    rotary, cos, sin = rotary_source(x, q_rot, q)
    qr = q if q_rot is None else q_rot
    out = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    precision = settings.token_precision(q.dtype)
    wide = D > 128 and precision != "tf32"
    BD, NB = (64, cdiv(D, 64)) if precision != "tf32" and D > 64 else channel_blocks(D)
    if out.numel():
        settings.launcher.launch(
            _wide_project_kernel if wide else _project_kernel, lambda tile: (B * T * H * NB, 1, 1),
            (q, qr, beta, mask_bytes(x, q), cos, sin, S, S if R is None else R, out),
            (eps, *token_strides(q), *token_strides(qr), *token_strides(beta), *token_strides(out), H, T,
             *[N // T] * (1 if wide else 2)),
            {"D": D, "R": D + has_denominator, "BD": BD, "NB": NB, "ROTARY": rotary, "WEIGHT": weight,
             "MASK": x.mask is not None, "REVERSE": R is not None, "PRECISION": precision},
            _WIDE_PROJECT_TILES if wide else _PROJECT_TILES,
        )  # fmt: skip
    return out


def project_backward(
    settings: Settings, dout: Tensor, x: Inputs, states: States, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    B, N, H, D = x.q.shape
    T = x.decay.shape[1]
    q, q_rot, dout = dense(x.q), None if x.q_rot is None else dense(x.q_rot), dense(dout)
    rotary, cos, sin = rotary_source(x, q_rot, q)
    qr = q if q_rot is None else q_rot
    R = D if states.z is None else D + 1
    dq = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
    dq_rot = torch.empty_like(dq) if rotary == "given" else dq
    dX = torch.empty(B, H, T, R, D, dtype=torch.float32, device=q.device)
    if dq.numel():
        S, R_ = states.S, states.S if states.R is None else states.R
        BD, NB = settings.gradient_blocks(q)
        tensors = dout, q, qr, mask_bytes(x, q), cos, sin, S, R_
        strides = eps, *token_strides(dout), *token_strides(q), *token_strides(qr)
        options = {"D": D, "R": R, "BD": BD, "ROTARY": rotary, "MASK": x.mask is not None,
                   "REVERSE": states.R is not None}  # fmt: skip
        weight = dX
        if NB > 1:
            weight = torch.empty(B, H, T, N // T, dtype=torch.float32, device=q.device)
            dden = torch.empty(NB, *weight.shape, dtype=torch.float32, device=q.device)
            for only_den in (True, False)[R == D :]:
                settings.launcher.launch(
                    _wide_query_gradient_kernel, lambda tile: (B * T * H * NB, 1, 1),
                    (*tensors, dq, dq_rot, dX, weight, dden),
                    (*strides, *token_strides(dq), H, T, N // T, weight.numel()),
                    {**options, "NB": NB, "ONLY_DEN": only_den, "PRECISION": settings.token_precision(q.dtype)},
                    _WIDE_QUERY_TILES,
                )  # fmt: skip
        else:
            settings.launcher.launch(
                _query_gradient_kernel, lambda tile: (B * T * H, 1, 1),
                (*tensors, dq, dq_rot, dX), (*strides, *token_strides(dq), H, T, N // T),
                {**options, "PRECISION": settings.token_precision(q.dtype)}, _QUERY_TILES,
            )  # fmt: skip
        # float16 has no room for a weight of any size.
        settings.launcher.launch(
            _state_input_gradient_kernel, lambda tile: (B * T * H * NB * NB, 1, 1),
            (*tensors, dX, weight), (*strides, H, T, N // T),
            {**options, "NB": NB, "PRECISION": settings.state_precision(q.dtype)}, _STATE_INPUT_TILES,
        )  # fmt: skip
    return dq, dq_rot if rotary == "given" else None, *split_rows(dX)  # type: ignore[return-value]
