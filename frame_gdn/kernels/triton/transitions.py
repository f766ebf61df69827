"""The transitions of every frame on Triton, W = g (I - A) and U, and their gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import Edges, Inputs, States
from .launch import Settings, Tiles, channel_blocks, dense, needs_int64, strided
from .projection import TOKEN_GRADIENT_TILES, both, mask_of, project_tokens, rotary_of
from .scan import FactoredTransitions, packed_rows
from .tiles import (
    frame_sizes,
    frame_tables,
    frame_tokens,
    is_active,
    load_scalars,
    load_sum,
    load_tables,
    load_tokens,
    locate,
    matmul,
    matrix_operand,
    outer_products,
    rotate,
    scalar_addresses,
    scaled,
    split_index,
    store,
    token_addresses,
    token_indices,
    token_operand,
    tokens_times_matrix,
)


@triton.jit
def _transitions_kernel(
    k, k_rot, v, beta, decay, mask_ptr, tables, A_ptr, U_ptr, g_ptr, shape, A_kind,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, SEPARATE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One block of one product of one frame: U (kind 0), A (1), or A of the denominator where its keys differ (2)."""
    H, T, S = frame_sizes(shape, INT64)
    PARTS: tl.constexpr = NB * NB * (3 if SEPARATE else 2)
    part = tl.program_id(0) % PARTS
    kind = part // (NB * NB)
    i, j = (part // NB) % NB, part % NB
    b, t, h = split_index(tl.program_id(0) // PARTS, H, T)
    frame, token = (b * H + h) * T + t, t * S
    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    if part == 0:
        g = tl.load(locate(decay, b, t, h)).to(tl.float32)
        tl.store(g_ptr + frame, tl.where(active, g, 1.0))

    tokens = tl.where(active, S, 0)  # a padded frame is never read
    keys, values = frame_tokens(k, b, token, h), frame_tokens(v, b, token, h)
    rotated = keys if ROTARY == "none" else frame_tokens(k_rot, b, token, h)
    weights = frame_tokens(beta, b, token, h)
    tables = frame_tables(tables, token, D)
    offs_i = i * BD + tl.arange(0, BD)
    offs_j = j * BD + tl.arange(0, BD)
    block = offs_i[:, None] * D + offs_j[None, :]
    inside = (offs_i < D)[:, None] & (offs_j < D)[None, :]
    U_ptr += frame * ROWS * D
    A_ptr += tl.where(kind == 2, A_kind, 0) + frame * D * D
    TABLES: tl.constexpr = ROTARY == "tables"
    if kind == 0:
        u, _ = outer_products(
            values, rotated, weights, tables, tokens, i, j, 0.0, 0.0,
            D, BD, NB, BN, False, TABLES, "beta", PRECISION, STAGES,
        )  # fmt: skip
        tl.store(U_ptr + block, u, mask=inside)
    elif kind == 1:
        a, total = outer_products(
            rotated, rotated, weights, tables, tokens, i, j, 0.0, 0.0,
            D, BD, NB, BN, True, TABLES, "beta", PRECISION, STAGES,
        )  # fmt: skip
        tl.store(A_ptr + block, a.to(A_ptr.dtype.element_ty), mask=inside)
        if ROWS > D and not SEPARATE:  # noqa: SIM102 (known when compiling, the inner one is not)
            if i == 0:
                tl.store(U_ptr + D * D + offs_j, total, mask=offs_j < D)
    else:
        if SEPARATE:
            a, total = outer_products(
                keys, keys, weights, tables, tokens, i, j, 0.0, 0.0,
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
    A_ptr, decay, mask_ptr, states, entering_ptr, adjoints, dA_ptr, dA_z_ptr, ddecay_ptr,
    shape, A_kind, ddecay_block,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr,
    HAS_MASK: tl.constexpr, SEPARATE: tl.constexpr, ENTERING: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of one frame's dA = -g (dW + dWᵀ) with dW = S_{t-1}ᵀ G_t + R_{t+1}ᵀ F_t, dA_z the same of dW°, and
    the block's part of ddecay = <dW, I - A>. `states` are S and R, `adjoints` G and F, the sequences' first.

    Where numerator and denominator share their keys, dA is the sum of both and there is no dA_z.
    """
    BH, H, T = shape
    sequence = (tl.program_id(0) % BH).to(tl.int64)
    t = (tl.program_id(0) // BH % T).to(tl.int64)
    block = tl.program_id(0) // BH // T
    i, j = block // NB % NB, block % NB
    b, h = sequence // H, sequence % H
    frame = sequence * T + t
    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    g = tl.load(locate(decay, b, t, h)).to(tl.float32)
    g = tl.where(active, g, 0.0)
    d = tl.arange(0, BD)
    row, col = i * BD + d, j * BD + d
    square = row[:, None] * D + col[None, :]
    keep = (row < D)[:, None] & (col < D)[None, :]
    diagonal = tl.where(row[:, None] == col[None, :], 1.0, 0.0)

    before_ptr = states[0] + (frame - 1) * ROWS * D
    if ENTERING:
        before_ptr = tl.where(t > 0, before_ptr, entering_ptr + sequence * ROWS * D)
    exists = ENTERING | (t > 0)
    reverse_ptr = states[1] + frame * ROWS * D
    G_ptr = adjoints[0] + frame * ROWS * D
    F_ptr = adjoints[1] + frame * ROWS * D
    dW = _inner_product(before_ptr, G_ptr, i, j, exists, D, BD, NB, PRECISION)
    if REVERSE:
        dW += _inner_product(reverse_ptr, F_ptr, i, j, True, D, BD, NB, PRECISION)
    a = tl.load(A_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
    ddecay = tl.sum(tl.sum(dW * (diagonal - a), 1), 0)
    mirrored = dW
    if NB > 1:
        mirrored = _inner_product(before_ptr, G_ptr, j, i, exists, D, BD, NB, PRECISION)
        if REVERSE:
            mirrored += _inner_product(reverse_ptr, F_ptr, j, i, True, D, BD, NB, PRECISION)
    both = dW + tl.trans(mirrored)
    if ROWS > D:
        z_i = tl.load(before_ptr + D * D + row, mask=(row < D) & exists, other=0.0)
        z_j = tl.load(before_ptr + D * D + col, mask=(col < D) & exists, other=0.0)
        gamma_i = tl.load(G_ptr + D * D + row, mask=row < D, other=0.0)
        gamma_j = tl.load(G_ptr + D * D + col, mask=col < D, other=0.0)
        dW_z = gamma_i[:, None] * z_j[None, :]
        twice = dW_z + z_i[:, None] * gamma_j[None, :]
        if REVERSE:
            y_i = tl.load(reverse_ptr + D * D + row, mask=row < D, other=0.0)
            y_j = tl.load(reverse_ptr + D * D + col, mask=col < D, other=0.0)
            phi_i = tl.load(F_ptr + D * D + row, mask=row < D, other=0.0)
            phi_j = tl.load(F_ptr + D * D + col, mask=col < D, other=0.0)
            dW_z += phi_i[:, None] * y_j[None, :]
            twice += phi_i[:, None] * y_j[None, :] + y_i[:, None] * phi_j[None, :]
        if SEPARATE:
            a = tl.load(A_ptr + A_kind + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
            tl.store(dA_z_ptr + frame * D * D + square, (-g * twice).to(dA_z_ptr.dtype.element_ty), mask=keep)
        else:
            both += twice
        ddecay += tl.sum(tl.sum(dW_z * (diagonal - a), 1), 0)
    tl.store(dA_ptr + frame * D * D + square, (-g * both).to(dA_ptr.dtype.element_ty), mask=keep)
    ddecay = tl.where(active, ddecay, 0.0)
    ddecay_ptr += block.to(tl.int64) * ddecay_block + (b * T + t) * H + h
    tl.store(ddecay_ptr, ddecay.to(ddecay_ptr.dtype.element_ty))


@triton.jit
def _key_gradient_kernel(
    k, k_rot, v, beta, mask_ptr, tables, adjoints, dA_ptr, dA_z_ptr, dk, dk_rot, dbeta, shape,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One frame: dk~ = beta (dUᵀ v + dA k~), dk = beta (w + dA_z k), w the sum of the denominator's adjoints; dbeta.

    dbeta = vᵀ dU k~ + k~ᵀ dA k~ / 2 + wᵀ k + kᵀ dA_z k / 2. Without a rotation the two of dk are one, and so are the
    two of dA.
    """
    H, T, S = frame_sizes(shape, INT64)
    b, t, h = split_index(tl.program_id(0), H, T)
    frame, token = (b * H + h) * T + t, t * S
    EXACT: tl.constexpr = PRECISION != "tf32"
    BF16: tl.constexpr = k[0].dtype.element_ty == tl.bfloat16
    NORMALIZE: tl.constexpr = ROWS > D
    SEPARATE: tl.constexpr = NORMALIZE and ROTARY != "none"

    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    keys, values = frame_tokens(k, b, token, h), frame_tokens(v, b, token, h)
    rotated_keys, weights = frame_tokens(k_rot, b, token, h), frame_tokens(beta, b, token, h)
    dkeys, drotated = frame_tokens(dk, b, token, h), frame_tokens(dk_rot, b, token, h)
    dweights = frame_tokens(dbeta, b, token, h)
    tables = frame_tables(tables, token, D)

    d = tl.arange(0, BD)
    square = d[:, None] * D + d[None, :]
    keep = (d < D)[:, None] & (d < D)[None, :]
    dA = tl.load(dA_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
    dA, _, dA_size = matrix_operand(dA, BF16, EXACT)
    dU = load_sum(adjoints, frame * ROWS * D + square, keep, REVERSE)
    dU, _, dU_size = matrix_operand(dU, BF16, EXACT)
    if SEPARATE:
        dA_z = tl.load(dA_z_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
        dA_z, _, dA_z_size = matrix_operand(dA_z, BF16, EXACT)
    if NORMALIZE:
        w = load_sum(adjoints, frame * ROWS * D + D * D + d, d < D, REVERSE)

    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + token_indices(S, BN)
        live = n < S
        read = live & active
        out_keep = live[:, None] & (d < D)[None, :]
        weight = load_scalars(weights, n, read).to(tl.float32)
        raw_v = load_tokens(values, n, read, d, D)
        raw = load_tokens(keys, n, read, d, D)
        raw_rotated = raw
        if ROTARY == "given":
            raw_rotated = load_tokens(rotated_keys, n, read, d, D)
        rotated = raw_rotated.to(tl.float32)
        if ROTARY == "tables":
            cos, sin = load_tables(tables, n, read, 0, BD, D)
            rotated = rotate(rotated, cos, sin, BN, BD)
        rows, size = token_operand(raw_v, raw_v.to(tl.float32), False, EXACT)
        v_dU = matmul(rows, dU, dU, False, PRECISION) * (size * dU_size)[:, None]
        rows, size = token_operand(raw_rotated, rotated, ROTARY == "tables", EXACT)
        k_dA = matmul(rows, dA, dA, False, PRECISION) * (size * dA_size)[:, None]
        dweight = tl.sum((v_dU + 0.5 * k_dA) * rotated, 1)
        drotated_key = weight[:, None] * (v_dU + k_dA)
        dkey = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            key = raw.to(tl.float32)
            dkey += w[None, :]
            if SEPARATE:
                rows, size = token_operand(raw, key, False, EXACT)
                k_dA_z = matmul(rows, dA_z, dA_z, False, PRECISION) * (size * dA_z_size)[:, None]
                dweight += 0.5 * tl.sum(k_dA_z * key, 1)
                dkey += k_dA_z
            dweight += tl.sum(key * w[None, :], 1)
            dkey *= weight[:, None]
        if ROTARY == "given":
            store(token_addresses(drotated, n, d), drotated_key, out_keep)
        elif ROTARY == "tables":
            dkey += rotate(drotated_key, cos, -sin, BN, BD)
        else:
            dkey += drotated_key
        store(token_addresses(dkeys, n, d), dkey, out_keep)
        store(scalar_addresses(dweights, n), tl.where(active, dweight, 0.0), live)


@triton.jit
def _blocked_key_gradient_kernel(
    k, k_rot, v, beta, mask_ptr, tables, adjoints, dA_ptr, dA_z_ptr, dk, dk_rot, dbeta, shape, dbeta_block,
    D: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    ROTARY: tl.constexpr, HAS_MASK: tl.constexpr, INT64: tl.constexpr, REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As `_key_gradient_kernel`, a block of channels a program; dbeta's parts of the blocks are (NB, B, N, H)."""
    H, T, S = frame_sizes(shape, INT64)
    i = tl.program_id(0) % NB
    b, t, h = split_index(tl.program_id(0) // NB, H, T)
    frame, token = (b * H + h) * T + t, t * S
    NORMALIZE: tl.constexpr = ROWS > D
    TABLES: tl.constexpr = ROTARY == "tables"
    active = is_active(mask_ptr, b * T + t, HAS_MASK)
    keys, values = frame_tokens(k, b, token, h), frame_tokens(v, b, token, h)
    rotated_keys = frame_tokens(k_rot, b, token, h) if ROTARY == "given" else keys
    weights = frame_tokens(beta, b, token, h)
    dkeys, drotated = frame_tokens(dk, b, token, h), frame_tokens(dk_rot, b, token, h)
    dweight_ptr, dweight_n = frame_tokens(dbeta, b, token, h)
    dweights = (dweight_ptr + i.to(tl.int64) * dbeta_block, dweight_n)
    tables = frame_tables(tables, token, D)
    dU = (adjoints[0] + frame * ROWS * D, adjoints[1] + frame * ROWS * D)
    dA, dA_z = dA_ptr + frame * D * D, dA_z_ptr + frame * D * D
    d = i * BD + tl.arange(0, BD)
    for n0 in tl.range(0, S, BN):
        n = n0 + token_indices(S, BN)
        live = n < S
        read = live & active
        weight = load_scalars(weights, n, read).to(tl.float32)
        v_dU = tokens_times_matrix(
            values, n, read, tables, dU, i, D, BD, NB, BN, False, REVERSE, False, False, PRECISION
        )
        k_dA = tokens_times_matrix(
            rotated_keys, n, read, tables, (dA, dA), i, D, BD, NB, BN, TABLES, False, False, False, PRECISION
        )
        rotated = load_tokens(rotated_keys, n, read, d, D).to(tl.float32)
        if TABLES:
            cos, sin = load_tables(tables, n, read, i, BD, D)
            rotated = rotate(rotated, cos, sin, BN, BD)
        dweight = tl.sum((v_dU + 0.5 * k_dA) * rotated, 1)
        drotated_key = weight[:, None] * (v_dU + k_dA)
        dkey = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            key = load_tokens(keys, n, read, d, D).to(tl.float32)
            w = load_sum(dU, D * D + d, d < D, REVERSE)
            dkey += w[None, :]
            dweight += tl.sum(key * w[None, :], 1)
            if ROTARY != "none":
                k_dA_z = tokens_times_matrix(
                    keys, n, read, tables, (dA_z, dA_z), i, D, BD, NB, BN, False, False, False, False, PRECISION
                )
                dweight += 0.5 * tl.sum(k_dA_z * key, 1)
                dkey += k_dA_z
            dkey *= weight[:, None]
        keep = live[:, None] & (d < D)[None, :]
        if ROTARY == "given":
            store(token_addresses(drotated, n, d), drotated_key, keep)
        elif TABLES:
            dkey += rotate(drotated_key, cos, -sin, BN, BD)
        else:
            dkey += drotated_key
        store(token_addresses(dkeys, n, d), dkey, keep)
        store(scalar_addresses(dweights, n), tl.where(active, dweight, 0.0), live)


# --- host functions ---------------------------------------------------------------------------------------------


_TRANSITIONS_TILES: dict[str, Tiles] = {
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


_TRANSITION_GRADIENT_TILES: Tiles = [{"num_warps": 8}]


_BLOCKED_KEY_TILES: dict[str, Tiles] = {
    "tf32": [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    "tf32x3": [{"BN": 32, "num_warps": 8}],
}


def transitions(settings: Settings, x: Inputs, normalize: bool) -> FactoredTransitions:
    B, N, H, D = x.k.shape
    T = x.decay.shape[1]
    k, v = dense(x.k), dense(x.v)
    rotary = rotary_of(x, k, x.k_rot)
    separate = normalize and rotary.source != "none"
    ROWS = D + 1 if normalize else D
    BD, NB = channel_blocks(D)
    precision, state_precision = settings.token_precision(k.dtype), settings.state_precision(k.dtype)
    A_dtype = torch.float16 if state_precision == "tf32" else torch.float32
    A = torch.empty(2 if separate else 1, B, H, T, D, D, dtype=A_dtype, device=k.device)
    U = torch.empty(B, H, T, ROWS, D, dtype=torch.float32, device=k.device)
    g = torch.empty(B, H, T, dtype=torch.float32, device=k.device)
    if A.numel():
        int64 = needs_int64(N // T, k, rotary.tokens, v, x.beta)
        settings.launcher.launch(
            _transitions_kernel, lambda tile: B * T * H * NB * NB * (3 if separate else 2),
            (strided(k), strided(rotary.tokens), strided(v), strided(x.beta), strided(x.decay), mask_of(x, k),
             rotary.tables, A, U, g, (H, T, N // T), A.stride(0) if separate else 0),
            {"D": D, "ROWS": ROWS, "BD": BD, "NB": NB, "ROTARY": rotary.source, "HAS_MASK": x.mask is not None,
             "INT64": int64, "SEPARATE": separate, "PRECISION": precision}, _TRANSITIONS_TILES[precision],
        )  # fmt: skip
    return FactoredTransitions(A, U, g, state_precision)


def transitions_backward(
    settings: Settings, x: Inputs, tr: FactoredTransitions, entering: Edges, states: States, adjoint: States
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    B, N, H, D = x.k.shape
    T = x.decay.shape[1]
    k, v = dense(x.k), dense(x.v)
    rotary = rotary_of(x, k, x.k_rot)
    ROWS = D if states.z is None else D + 1
    BD, NB = settings.gradient_blocks(k)
    separate = tr.A.shape[0] > 1
    before = packed_rows(entering.S, entering.z, ROWS)
    precision = settings.token_precision(k.dtype)
    dA_dtype = torch.bfloat16 if precision == "tf32" and k.dtype == torch.bfloat16 else torch.float32
    dA = torch.empty(1 + separate, B, H, T, D, D, dtype=dA_dtype, device=k.device)
    dk = torch.empty(B, N, H, D, dtype=k.dtype, device=k.device)
    dk_rot = torch.empty_like(dk) if rotary.source == "given" else dk
    # Blocks of channels each give a part of the gates' gradients.
    parts = (NB, NB * NB) if NB > 1 else (1, 1)
    dbeta = torch.empty(parts[0], B, N, H, dtype=torch.float32 if NB > 1 else x.beta.dtype, device=k.device)
    ddecay = torch.empty(parts[1], B, T, H, dtype=torch.float32 if NB > 1 else x.decay.dtype, device=k.device)
    if dk.numel():
        mask = mask_of(x, k)
        settings.launcher.launch(
            _transition_gradient_kernel, lambda tile: B * H * T * NB * NB,
            (tr.A, strided(x.decay), mask, both(states), states.S if before is None else before, both(adjoint),
             dA[0], dA[-1], ddecay, (B * H, H, T), tr.A.stride(0), ddecay.stride(0)),
            {"D": D, "ROWS": ROWS, "BD": BD, "NB": NB, "HAS_MASK": x.mask is not None, "SEPARATE": separate,
             "ENTERING": before is not None, "REVERSE": states.R is not None, "PRECISION": tr.precision},
            _TRANSITION_GRADIENT_TILES,
        )  # fmt: skip
        int64 = needs_int64(N // T, k, rotary.tokens, v, x.beta, dk)
        arguments = (
            strided(k), strided(rotary.tokens), strided(v), strided(x.beta), mask, rotary.tables, both(adjoint),
            dA[0], dA[-1], strided(dk), strided(dk_rot), strided(dbeta[0]), (H, T, N // T),
        )  # fmt: skip
        options = {"D": D, "ROWS": ROWS, "BD": BD, "ROTARY": rotary.source, "HAS_MASK": x.mask is not None,
                   "INT64": int64, "REVERSE": states.R is not None, "PRECISION": precision}  # fmt: skip
        if NB > 1:
            settings.launcher.launch(
                _blocked_key_gradient_kernel, lambda tile: B * T * H * NB, (*arguments, dbeta.stride(0)),
                {**options, "NB": NB}, _BLOCKED_KEY_TILES[precision],
            )  # fmt: skip
        else:
            settings.launcher.launch(
                _key_gradient_kernel, lambda tile: B * T * H, arguments, options, TOKEN_GRADIENT_TILES[precision]
            )  # fmt: skip
    # dv = beta dU k~: keys multiply the adjoint states as queries multiply the states.
    dv = project_tokens(settings, x, k, rotary, (x.beta, "beta"), adjoint, 0.0)
    gates = dbeta.sum(0).to(x.beta.dtype), ddecay.sum(0).to(x.decay.dtype)
    if NB == 1:
        gates = dbeta[0], ddecay[0]
    return dk, dv, *gates, dk_rot if rotary.source == "given" else None
