"""The transitions of every frame on Triton, W = g (I - A) and U, and their gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import Edges, Inputs, States
from .launch import Settings, Tiles, channel_blocks, dense
from .projection import mask_bytes, project_tokens, rotary_source, token_strides
from .scan import FactoredTransitions, packed_rows
from .tiles import (
    load_sum,
    load_tables,
    load_tokens,
    matmul,
    matrix_operand,
    outer_products,
    rotate,
    scaled,
    token_operand,
    tokens_times_matrix,
)


@triton.jit
def _transitions_kernel(
    k_ptr, kr_ptr, v_ptr, beta_ptr, decay_ptr, mask_ptr, cos_ptr, sin_ptr, A_ptr, U_ptr, gate_ptr,
    k_b, k_n, k_h, kr_b, kr_n, kr_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, decay_b, decay_t, decay_h,
    H, T, S, A_kind,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, MASK: tl.constexpr, SEPARATE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of one product of one frame: U (kind 0), A (1), or A of the denominator where its keys differ (2)."""
    pid = tl.program_id(0)
    PARTS: tl.constexpr = NB * NB * (3 if SEPARATE else 2)
    part = pid % PARTS
    h = (pid // PARTS) % H
    t = (pid // (PARTS * H)) % T
    b = (pid // (PARTS * H * T)).to(tl.int64)
    kind = part // (NB * NB)
    i, j = (part // NB) % NB, part % NB
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S

    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    if part == 0:
        gate = tl.load(decay_ptr + b * decay_b + t * decay_t + h * decay_h).to(tl.float32)
        tl.store(gate_ptr + frame, tl.where(active, gate, 1.0))

    tokens = tl.where(active, S, 0)  # a padded frame is never read
    k_ptr += b * k_b + token * k_n + h * k_h
    kr_ptr += b * kr_b + token * kr_n + h * kr_h
    v_ptr += b * v_b + token * v_n + h * v_h
    beta_ptr += b * beta_b + token * beta_n + h * beta_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)
    offs_i = i * BD + tl.arange(0, BD)
    offs_j = j * BD + tl.arange(0, BD)
    block = offs_i[:, None] * D + offs_j[None, :]
    inside = (offs_i < D)[:, None] & (offs_j < D)[None, :]
    U_ptr += frame * R * D
    A_ptr += tl.where(kind == 2, A_kind, 0) + frame * D * D
    TABLES: tl.constexpr = ROTARY == "tables"
    if ROTARY == "none":
        kr_ptr, kr_n = k_ptr, k_n
    if kind == 0:
        u, _ = outer_products(
            v_ptr, v_n, kr_ptr, kr_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, 0.0, 0.0,
            D, BD, NB, BN, False, TABLES, "beta", PRECISION, STAGES,
        )  # fmt: skip
        tl.store(U_ptr + block, u, mask=inside)
    elif kind == 1:
        a, total = outer_products(
            kr_ptr, kr_n, kr_ptr, kr_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, 0.0, 0.0,
            D, BD, NB, BN, True, TABLES, "beta", PRECISION, STAGES,
        )  # fmt: skip
        tl.store(A_ptr + block, a.to(A_ptr.dtype.element_ty), mask=inside)
        if R > D and not SEPARATE:  # noqa: SIM102 (known when compiling, the inner one is not)
            if i == 0:
                tl.store(U_ptr + D * D + offs_j, total, mask=offs_j < D)
    else:
        if SEPARATE:
            a, total = outer_products(
                k_ptr, k_n, k_ptr, k_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, 0.0, 0.0,
                D, BD, NB, BN, True, False, "beta", PRECISION, STAGES,
            )  # fmt: skip
            tl.store(A_ptr + block, a.to(A_ptr.dtype.element_ty), mask=inside)
            if i == 0:
                tl.store(U_ptr + D * D + offs_j, total, mask=offs_j < D)


@triton.jit
def _inner_product(left_ptr, right_ptr, i, j, exists, D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr,
                   PRECISION: tl.constexpr):  # fmt: skip
    """Block (i, j) of leftᵀ right of two (D, D) matrices; zero unless the left one exists."""
    EXACT: tl.constexpr = PRECISION != "tf32"
    d = tl.arange(0, BD)
    row, col = i * BD + d, j * BD + d
    product = tl.zeros((BD, BD), dtype=tl.float32)
    for c in range(NB):
        inner = c * BD + d
        offs, live = inner[:, None] * D, (inner < D)[:, None]
        left = tl.load(left_ptr + offs + row[None, :], mask=live & (row < D)[None, :] & exists, other=0.0)
        right = tl.load(right_ptr + offs + col[None, :], mask=live & (col < D)[None, :], other=0.0)
        left, left_size = scaled(left, EXACT)
        right, right_size = scaled(right, EXACT)
        product += tl.dot(tl.trans(left), right, input_precision=PRECISION) * (left_size * right_size)
    return product


@triton.jit
def _transition_gradient_kernel(
    A_ptr, decay_ptr, mask_ptr, S_ptr, R_ptr, entering_ptr, G_ptr, F_ptr, P_ptr, Q_ptr, ddecay_ptr,
    H, T, A_kind, decay_b, decay_t, decay_h, ddecay_block,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr,
    MASK: tl.constexpr, SEPARATE: tl.constexpr, ENTERING: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of one frame's P = -g (dW + dWᵀ) with dW = S_{t-1}ᵀ G_t + R_{t+1}ᵀ F_t, Q the same of dW°, and the
    block's part of ddecay = <dW, I - A>.

    Where numerator and denominator share their keys, P is the sum of both and there is no Q.
    """
    sequence = tl.program_id(0).to(tl.int64)
    t, block = tl.program_id(1), tl.program_id(2)
    i, j = block // NB, block % NB
    b, h = sequence // H, sequence % H
    frame = sequence * T + t
    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    decay = tl.load(decay_ptr + b * decay_b + t * decay_t + h * decay_h).to(tl.float32)
    decay = tl.where(active, decay, 0.0)
    d = tl.arange(0, BD)
    row, col = i * BD + d, j * BD + d
    square = row[:, None] * D + col[None, :]
    keep = (row < D)[:, None] & (col < D)[None, :]
    diagonal = tl.where(row[:, None] == col[None, :], 1.0, 0.0)

    before_ptr = S_ptr + (frame - 1) * R * D
    if ENTERING:
        before_ptr = tl.where(t > 0, before_ptr, entering_ptr + sequence * R * D)
    exists = ENTERING | (t > 0)
    S_ptr += frame * R * D
    R_ptr += frame * R * D
    G_ptr += frame * R * D
    F_ptr += frame * R * D
    dW = _inner_product(before_ptr, G_ptr, i, j, exists, D, BD, NB, PRECISION)
    if REVERSE:
        dW += _inner_product(R_ptr, F_ptr, i, j, True, D, BD, NB, PRECISION)
    a = tl.load(A_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
    ddecay = tl.sum(tl.sum(dW * (diagonal - a), 1), 0)
    mirrored = dW
    if NB > 1:
        mirrored = _inner_product(before_ptr, G_ptr, j, i, exists, D, BD, NB, PRECISION)
        if REVERSE:
            mirrored += _inner_product(R_ptr, F_ptr, j, i, True, D, BD, NB, PRECISION)
    both = dW + tl.trans(mirrored)
    if R > D:
        # of the rows' channels and of the columns'
        z_i = tl.load(before_ptr + D * D + row, mask=(row < D) & exists, other=0.0)
        z_j = tl.load(before_ptr + D * D + col, mask=(col < D) & exists, other=0.0)
        gamma_i = tl.load(G_ptr + D * D + row, mask=row < D, other=0.0)
        gamma_j = tl.load(G_ptr + D * D + col, mask=col < D, other=0.0)
        dW_z = gamma_i[:, None] * z_j[None, :]
        twice = dW_z + z_i[:, None] * gamma_j[None, :]
        if REVERSE:
            y_i = tl.load(R_ptr + D * D + row, mask=row < D, other=0.0)
            y_j = tl.load(R_ptr + D * D + col, mask=col < D, other=0.0)
            phi_i = tl.load(F_ptr + D * D + row, mask=row < D, other=0.0)
            phi_j = tl.load(F_ptr + D * D + col, mask=col < D, other=0.0)
            dW_z += phi_i[:, None] * y_j[None, :]
            twice += phi_i[:, None] * y_j[None, :] + y_i[:, None] * phi_j[None, :]
        if SEPARATE:
            a = tl.load(A_ptr + A_kind + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
            tl.store(Q_ptr + frame * D * D + square, (-decay * twice).to(Q_ptr.dtype.element_ty), mask=keep)
        else:
            both += twice
        ddecay += tl.sum(tl.sum(dW_z * (diagonal - a), 1), 0)
    tl.store(P_ptr + frame * D * D + square, (-decay * both).to(P_ptr.dtype.element_ty), mask=keep)
    ddecay = tl.where(active, ddecay, 0.0)
    tl.store(ddecay_ptr + block * ddecay_block + (b * T + t) * H + h, ddecay.to(ddecay_ptr.dtype.element_ty))


@triton.jit
def _key_gradient_kernel(
    k_ptr, kr_ptr, v_ptr, beta_ptr, mask_ptr, cos_ptr, sin_ptr, G_ptr, F_ptr, P_ptr, Q_ptr, dk_ptr, dkr_ptr, dbeta_ptr,
    k_b, k_n, k_h, kr_b, kr_n, kr_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, dk_b, dk_n, dk_h,
    dbeta_b, dbeta_n, dbeta_h, H, T, S,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One frame: dk~ = beta (dUᵀ v + P k~), dk = beta (w + Q k), w the sum of the denominator's adjoints, and dbeta.

    dbeta = vᵀ dU k~ + k~ᵀ P k~ / 2 + wᵀ k + kᵀ Q k / 2. Without a rotation the two of dk are one, and so are P and Q.
    """
    pid = tl.program_id(0)
    h = pid % H
    t = (pid // H) % T
    b = (pid // (H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    EXACT: tl.constexpr = PRECISION != "tf32"
    BF16: tl.constexpr = k_ptr.dtype.element_ty == tl.bfloat16
    NORMALIZE: tl.constexpr = R > D
    SEPARATE: tl.constexpr = NORMALIZE and ROTARY != "none"

    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    k_ptr += b * k_b + token * k_n + h * k_h
    kr_ptr += b * kr_b + token * kr_n + h * kr_h
    v_ptr += b * v_b + token * v_n + h * v_h
    beta_ptr += b * beta_b + token * beta_n + h * beta_h
    dk_ptr += b * dk_b + token * dk_n + h * dk_h
    dkr_ptr += b * dk_b + token * dk_n + h * dk_h
    dbeta_ptr += b * dbeta_b + token * dbeta_n + h * dbeta_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)

    d = tl.arange(0, BD)
    square = d[:, None] * D + d[None, :]
    keep = (d < D)[:, None] & (d < D)[None, :]
    p = tl.load(P_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
    p, _, p_size = matrix_operand(p, BF16, EXACT)
    du = load_sum(G_ptr, F_ptr, frame * R * D + square, keep, REVERSE)
    du, _, du_size = matrix_operand(du, BF16, EXACT)
    if SEPARATE:
        q = tl.load(Q_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
        q, _, q_size = matrix_operand(q, BF16, EXACT)
    if NORMALIZE:
        w = load_sum(G_ptr, F_ptr, frame * R * D + D * D + d, d < D, REVERSE)

    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        out = n[:, None] * dk_n + d[None, :]
        out_keep = live[:, None] & (d < D)[None, :]
        beta = tl.load(beta_ptr + n * beta_n, mask=read, other=0.0).to(tl.float32)
        raw_v = load_tokens(v_ptr, n, read, v_n, d, D)
        raw = load_tokens(k_ptr, n, read, k_n, d, D)
        raw_rotated = raw
        if ROTARY == "given":
            raw_rotated = load_tokens(kr_ptr, n, read, kr_n, d, D)
        rotated = raw_rotated.to(tl.float32)
        if ROTARY == "tables":
            cos, sin = load_tables(cos_ptr, sin_ptr, n, read, 0, BD, D)
            rotated = rotate(rotated, cos, sin, BN, BD)
        rows, size = token_operand(raw_v, raw_v.to(tl.float32), False, EXACT)
        v_dU = matmul(rows, du, du, False, PRECISION) * (size * du_size)[:, None]
        rows, size = token_operand(raw_rotated, rotated, ROTARY == "tables", EXACT)
        k_P = matmul(rows, p, p, False, PRECISION) * (size * p_size)[:, None]
        dbeta = tl.sum((v_dU + 0.5 * k_P) * rotated, 1)
        dk_rot = beta[:, None] * (v_dU + k_P)
        dk = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            k = raw.to(tl.float32)
            dk += w[None, :]
            if SEPARATE:
                rows, size = token_operand(raw, k, False, EXACT)
                k_Q = matmul(rows, q, q, False, PRECISION) * (size * q_size)[:, None]
                dbeta += 0.5 * tl.sum(k_Q * k, 1)
                dk += k_Q
            dbeta += tl.sum(k * w[None, :], 1)
            dk *= beta[:, None]
        if ROTARY == "given":
            tl.store(dkr_ptr + out, dk_rot.to(dkr_ptr.dtype.element_ty), mask=out_keep)
        elif ROTARY == "tables":
            dk += rotate(dk_rot, cos, -sin, BN, BD)
        else:
            dk += dk_rot
        tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=out_keep)
        dbeta = tl.where(active, dbeta, 0.0)
        tl.store(dbeta_ptr + n * dbeta_n, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)


@triton.jit
def _wide_key_gradient_kernel(
    k_ptr, kr_ptr, v_ptr, beta_ptr, mask_ptr, cos_ptr, sin_ptr, G_ptr, F_ptr, P_ptr, Q_ptr, dk_ptr, dkr_ptr, dbeta_ptr,
    k_b, k_n, k_h, kr_b, kr_n, kr_h, v_b, v_n, v_h, beta_b, beta_n, beta_h, dk_b, dk_n, dk_h,
    dbeta_b, dbeta_n, dbeta_h, H, T, S, dbeta_block,
    D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, MASK: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_key_gradient_kernel`, a block of channels a program; dbeta's parts of the blocks are (NB, B, N, H)."""
    pid = tl.program_id(0)
    i = pid % NB
    h = (pid // NB) % H
    t = (pid // (NB * H)) % T
    b = (pid // (NB * H * T)).to(tl.int64)
    frame = (b * H + h) * T + t
    token = t.to(tl.int64) * S
    NORMALIZE: tl.constexpr = R > D
    active = True
    if MASK:
        active = tl.load(mask_ptr + b * T + t) != 0
    k_ptr += b * k_b + token * k_n + h * k_h
    kr_ptr += b * kr_b + token * kr_n + h * kr_h
    v_ptr += b * v_b + token * v_n + h * v_h
    beta_ptr += b * beta_b + token * beta_n + h * beta_h
    dk_ptr += b * dk_b + token * dk_n + h * dk_h
    dkr_ptr += b * dk_b + token * dk_n + h * dk_h
    dbeta_ptr += i.to(tl.int64) * dbeta_block + b * dbeta_b + token * dbeta_n + h * dbeta_h
    cos_ptr += token * (D // 2)
    sin_ptr += token * (D // 2)
    G_ptr += frame * R * D
    F_ptr += frame * R * D
    P_ptr += frame * D * D
    Q_ptr += frame * D * D
    if ROTARY != "given":
        kr_ptr, kr_n = k_ptr, k_n
    TABLES: tl.constexpr = ROTARY == "tables"
    d = i * BD + tl.arange(0, BD)
    for n0 in tl.range(0, S, BN):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        beta = tl.load(beta_ptr + n * beta_n, mask=read, other=0.0).to(tl.float32)
        v_dU = tokens_times_matrix(
            v_ptr, n, read, v_n, cos_ptr, sin_ptr, G_ptr, F_ptr, i,
            D, BD, NB, BN, False, REVERSE, False, False, PRECISION,
        )  # fmt: skip
        k_P = tokens_times_matrix(
            kr_ptr, n, read, kr_n, cos_ptr, sin_ptr, P_ptr, P_ptr, i,
            D, BD, NB, BN, TABLES, False, False, False, PRECISION,
        )  # fmt: skip
        rotated = load_tokens(kr_ptr, n, read, kr_n, d, D).to(tl.float32)
        if TABLES:
            cos, sin = load_tables(cos_ptr, sin_ptr, n, read, i, BD, D)
            rotated = rotate(rotated, cos, sin, BN, BD)
        dbeta = tl.sum((v_dU + 0.5 * k_P) * rotated, 1)
        dk_rot = beta[:, None] * (v_dU + k_P)
        dk = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            k = load_tokens(k_ptr, n, read, k_n, d, D).to(tl.float32)
            w = load_sum(G_ptr, F_ptr, D * D + d, d < D, REVERSE)
            dk += w[None, :]
            dbeta += tl.sum(k * w[None, :], 1)
            if ROTARY != "none":
                k_Q = tokens_times_matrix(
                    k_ptr, n, read, k_n, cos_ptr, sin_ptr, Q_ptr, Q_ptr, i,
                    D, BD, NB, BN, False, False, False, False, PRECISION,
                )  # fmt: skip
                dbeta += 0.5 * tl.sum(k_Q * k, 1)
                dk += k_Q
            dk *= beta[:, None]
        out = n[:, None] * dk_n + d[None, :]
        keep = live[:, None] & (d < D)[None, :]
        if ROTARY == "given":
            tl.store(dkr_ptr + out, dk_rot.to(dkr_ptr.dtype.element_ty), mask=keep)
        elif TABLES:
            dk += rotate(dk_rot, cos, -sin, BN, BD)
        else:
            dk += dk_rot
        tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=keep)
        tl.store(dbeta_ptr + n * dbeta_n, tl.where(active, dbeta, 0.0), mask=live)


# --- host functions ---------------------------------------------------------------------------------------------


_TRANSITIONS_TILES: Tiles = {
    "tf32": [
        {"BN": 64, "STAGES": 2, "num_warps": 4},
        {"BN": 32, "STAGES": 2, "num_warps": 4},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
    "tf32x3": [
        {"BN": 32, "STAGES": 2, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
}


_TRANSITION_GRADIENT_TILES: Tiles = {
    "tf32": [{"num_warps": 8}],
    "tf32x3": [{"num_warps": 8}],
}


_KEY_TILES: Tiles = {
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


_WIDE_KEY_TILES: Tiles = {
    "tf32": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    "tf32x3": [{"BN": 32, "num_warps": 8}],
}


def transitions(settings: Settings, x: Inputs, normalize: bool) -> FactoredTransitions:
    B, N, H, D = x.k.shape
    T = x.decay.shape[1]
    k, v, k_rot = dense(x.k), dense(x.v), None if x.k_rot is None else dense(x.k_rot)
    rotary, cos, sin = rotary_source(x, k_rot, k)
    separate = normalize and rotary != "none"
    R = D + 1 if normalize else D
    BD, NB = channel_blocks(D)
    precision = settings.state_precision(k.dtype)
    A_dtype = torch.float16 if precision == "tf32" else torch.float32
    A = torch.empty(2 if separate else 1, B, H, T, D, D, dtype=A_dtype, device=k.device)
    U = torch.empty(B, H, T, R, D, dtype=torch.float32, device=k.device)
    gate = torch.empty(B, H, T, dtype=torch.float32, device=k.device)
    kr = k if k_rot is None else k_rot
    if A.numel():
        settings.launcher.launch(
            _transitions_kernel, lambda tile: (B * T * H * NB * NB * (3 if separate else 2), 1, 1),
            (k, kr, v, x.beta, x.decay, mask_bytes(x, k), cos, sin, A, U, gate),
            (*token_strides(k), *token_strides(kr), *token_strides(v), *x.beta.stride(), *x.decay.stride(),
             H, T, N // T, A.stride(0) if separate else 0),
            {"D": D, "R": R, "BD": BD, "NB": NB, "ROTARY": rotary, "MASK": x.mask is not None,
             "SEPARATE": separate, "PRECISION": settings.token_precision(k.dtype)}, _TRANSITIONS_TILES,
        )  # fmt: skip
    return FactoredTransitions(A, U, gate, precision)


def transitions_backward(
    settings: Settings, x: Inputs, tr: FactoredTransitions, entering: Edges, states: States, adjoint: States
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    B, N, H, D = x.k.shape
    T = x.decay.shape[1]
    k, v, k_rot = dense(x.k), dense(x.v), None if x.k_rot is None else dense(x.k_rot)
    rotary, cos, sin = rotary_source(x, k_rot, k)
    kr = k if k_rot is None else k_rot
    R = D if states.z is None else D + 1
    BD, NB = settings.gradient_blocks(k)
    separate = tr.A.shape[0] > 1
    reverse = states.R is not None
    before = packed_rows(entering.S, entering.z, R)
    P_dtype = (
        torch.bfloat16 if settings.token_precision(k.dtype) == "tf32" and k.dtype == torch.bfloat16 else torch.float32
    )
    P = torch.empty(1 + separate, B, H, T, D, D, dtype=P_dtype, device=k.device)
    dk = torch.empty(B, N, H, D, dtype=k.dtype, device=k.device)
    dk_rot = torch.empty_like(dk) if rotary == "given" else dk
    # Blocks of channels each give a part of the gates' gradients.
    parts = (NB, NB * NB) if NB > 1 else (1, 1)
    dbeta = torch.empty(parts[0], B, N, H, dtype=torch.float32 if NB > 1 else x.beta.dtype, device=k.device)
    ddecay = torch.empty(parts[1], B, T, H, dtype=torch.float32 if NB > 1 else x.decay.dtype, device=k.device)
    S, G = states.S, adjoint.S
    R_, F = (S, G) if states.R is None or adjoint.R is None else (states.R, adjoint.R)
    if dk.numel():
        settings.launcher.launch(
            _transition_gradient_kernel, lambda tile: (B * H, T, NB * NB),
            (tr.A, x.decay, mask_bytes(x, k), S, R_, S if before is None else before, G, F, P[0], P[-1], ddecay),
            (H, T, tr.A.stride(0), *x.decay.stride(), ddecay.stride(0)),
            {"D": D, "R": R, "BD": BD, "NB": NB, "MASK": x.mask is not None, "SEPARATE": separate,
             "ENTERING": before is not None, "REVERSE": reverse, "PRECISION": tr.precision},
            _TRANSITION_GRADIENT_TILES,
        )  # fmt: skip
        tensors = k, kr, v, x.beta, mask_bytes(x, k), cos, sin, G, F, P[0], P[-1], dk, dk_rot, dbeta
        strides = (
            *token_strides(k),
            *token_strides(kr),
            *token_strides(v),
            *x.beta.stride(),
            *token_strides(dk),
            *dbeta.stride()[1:],
        )
        options = {"D": D, "R": R, "BD": BD, "ROTARY": rotary, "MASK": x.mask is not None, "REVERSE": reverse}
        if NB > 1:
            settings.launcher.launch(
                _wide_key_gradient_kernel, lambda tile: (B * T * H * NB, 1, 1),
                tensors, (*strides, H, T, N // T, dbeta.stride(0)),
                {**options, "NB": NB, "PRECISION": settings.token_precision(k.dtype)}, _WIDE_KEY_TILES,
            )  # fmt: skip
        else:
            settings.launcher.launch(
                _key_gradient_kernel, lambda tile: (B * T * H, 1, 1), tensors, (*strides, H, T, N // T),
                {**options, "PRECISION": settings.token_precision(k.dtype)}, _KEY_TILES,
            )  # fmt: skip
    # dv = beta dU k~: keys meet the adjoint states as queries meet the states.
    dv = project_tokens(settings, k, k_rot, x.beta, "beta", x, G, F if reverse else None, R > D, 0.0)
    gates = dbeta.sum(0).to(x.beta.dtype), ddecay.sum(0).to(x.decay.dtype)
    if NB == 1:
        gates = dbeta[0], ddecay[0]
    return dk, dv, *gates, dk_rot if rotary == "given" else None
