"""The Triton backend: the local steps of the frame scan as fused kernels, forward and backward.

Offers the functions of `torch_kernels` for bfloat16, float16 and float32 tokens of D <= 256 on a GPU (or in Triton's
interpreter). A step is one launch, and no step waits for the device:

- `transitions` reads k and v once and writes each frame's A, U and A°, u°;
- `scan_states` runs both directions of both states at once, one program a block of state rows, which are independent.
  Where those leave most of the GPU idle, the clip is cut into spans of frames, scanned side by side as shards over
  ranks are: what leaves each span and its transition, from span to span, then each span from what entered it;
- `project` adds the two directions and multiplies each frame's queries once;
- the backward is the same three with time turned round; what the forward built is built again. Beyond D 128, and
  where whole matrices are beyond the device's shared memory, a program takes a block of the gradients' channels.

No shape falls back to plain PyTorch; with 99 KiB of shared memory a block every launch has a tile that fits.

Layouts, R = D + 1 rows of which the last is the denominator's (R = D without one):
    A     (1 or 2, B, H, T, D, D)   W = g (I - A); the second for the denominator, absent where its keys are the same
    gate  (B, H, T)                 g, or 1 in a padded frame
    U, states, adjoints (B, H, T, R, D)
A is kept in place of W because a state then meets only a correction in tensor-core precision: S W = g (S - S A)
carries S itself in float32, and the I of W is exact. W, S and every sum are float32.

Precision. bfloat16 tokens: products of tokens in bfloat16; where a state takes part, in float16 scaled by powers of
two, which holds as many bits as TF32 in half the bytes, and so A is stored in float16. float16 tokens: the same, but A
in float32 and states multiplied as three TF32 products. float32 tokens, and every dtype with precision="exact":
float32's accuracy throughout, as three TF32 products.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem
from triton.runtime.errors import OutOfResources

from . import torch_kernels
from .torch_kernels import Edges, Inputs, States

# --- shared pieces ----------------------------------------------------------------------------------------------

_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _dot16(a, b, acc):
    """a b + acc of 16-bit operands; widened in the interpreter, which takes bfloat16's bits for integers."""
    if _INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc)


@triton.jit
def _load_tokens(ptr, n, live, stride_n, d, D: tl.constexpr):
    """A (tokens, channels) tile, zero beyond the frame's tokens and beyond D."""
    return tl.load(ptr + n[:, None] * stride_n + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _load_tables(cos, sin, n, live, BLOCK: tl.constexpr, BD: tl.constexpr, D: tl.constexpr):
    """The rotary tables (tokens, BD / 2) of channel block BLOCK."""
    d = BLOCK * (BD // 2) + tl.arange(0, BD // 2)
    offs = n[:, None] * (D // 2) + d[None, :]
    keep = live[:, None] & (d < D // 2)[None, :]
    return tl.load(cos + offs, mask=keep, other=0.0), tl.load(sin + offs, mask=keep, other=0.0)


@triton.jit
def _rotate(x, cos, sin, BN: tl.constexpr, BD: tl.constexpr):
    """Interleaved pairs (2i, 2i + 1) as complex numbers times cos + i sin, in float32."""
    even, odd = tl.split(tl.reshape(x, (BN, BD // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (BN, BD))


@triton.jit
def _power_of_two(size):
    """2^e <= size < 2^(e+1) and 2^-e, kept away from both ends of float32's range."""
    bits = size.to(tl.int32, bitcast=True) & 0x7F800000
    bits = tl.minimum(tl.maximum(bits, 1 << 23), 253 << 23)
    return bits.to(tl.float32, bitcast=True), ((254 << 23) - bits).to(tl.float32, bitcast=True)


@triton.jit
def _scaled_rows(x, EXACT: tl.constexpr):
    """x as a product's operand and the factor of each row: float16 of x / 2^e, or x itself."""
    if EXACT:
        return x, tl.full((x.shape[0],), 1.0, tl.float32)
    else:
        scale, inverse = _power_of_two(tl.max(tl.abs(x), 1))
        return (x * inverse[:, None]).to(tl.float16), scale


@triton.jit
def _scaled(x, EXACT: tl.constexpr):
    """x as a product's operand and the factor of the whole tile: float16 of x / 2^e, or x itself."""
    if EXACT:
        return x, 1.0
    else:
        scale, inverse = _power_of_two(tl.max(tl.max(tl.abs(x), 1), 0))
        return (x * inverse).to(tl.float16), scale


# --- transitions ------------------------------------------------------------------------------------------------


@triton.jit
def _outer_products(
    left_ptr, left_n, k_ptr, k_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, z, eps,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    KEYS: tl.constexpr, TABLES: tl.constexpr, WEIGHT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Block (i, j) of the sum over a frame's tokens of left (w k)ᵀ, and block j of that of w k.

    WEIGHT says what w is: "beta"; "den" for 1 / (zᵀ k + eps), k not yet rotated; "den_given" for the same of other
    tokens, at beta_ptr; "found" for the same at beta_ptr; or "none" for 1.
    """
    EXACT: tl.constexpr = PRECISION != "tf32"
    offs_n = tl.arange(0, BN)
    offs_i = i * BD + tl.arange(0, BD)
    offs_j = j * BD + tl.arange(0, BD)
    product = tl.zeros((BD, BD), dtype=tl.float32)
    total = tl.zeros((16, BD), dtype=tl.float32)  # summed over its rows once, after the loop
    # Too narrow for an asynchronous copy, beta is read a turn ahead by hand; the compiler does that for the tiles.
    if WEIGHT == "beta" or WEIGHT == "found":
        next_beta = tl.load(beta_ptr + offs_n * beta_n, mask=offs_n < tokens, other=0.0)
    for n0 in tl.range(0, tokens, BN, num_stages=STAGES):
        n = n0 + offs_n
        live = n < tokens
        if WEIGHT == "beta" or WEIGHT == "found":
            weight = next_beta.to(tl.float32)
            next_beta = tl.load(beta_ptr + (n + BN) * beta_n, mask=n + BN < tokens, other=0.0)
        raw = _load_tokens(k_ptr, n, live, k_n, offs_j, D)
        left = raw
        if not KEYS or NB > 1:
            left = _load_tokens(left_ptr, n, live, left_n, offs_i, D)
        key = raw.to(tl.float32)
        if WEIGHT == "den" or WEIGHT == "den_given":
            plain = key
            if WEIGHT == "den_given":
                plain = _load_tokens(beta_ptr, n, live, beta_n, offs_j, D).to(tl.float32)
            weight = tl.where(live, 1.0 / (tl.sum(plain * z[None, :], 1) + eps), 0.0)
        if TABLES:
            cos, sin = _load_tables(cos_ptr, sin_ptr, n, live, j, BD, D)
            key = _rotate(key, cos, sin, BN, BD)
        written = key
        if WEIGHT != "none":
            written = key * weight[:, None]
        if KEYS and NB == 1:
            if EXACT or TABLES:
                left = key.to(tl.float32 if EXACT else raw.dtype)
        else:
            if KEYS and TABLES:
                cos, sin = _load_tables(cos_ptr, sin_ptr, n, live, i, BD, D)
                left = _rotate(left.to(tl.float32), cos, sin, BN, BD).to(tl.float32 if EXACT else raw.dtype)
            if EXACT:
                left = left.to(tl.float32)
        if KEYS and not TABLES:
            total += tl.sum(tl.reshape(written, (BN // 16, 16, BD)), 0)
        if EXACT:
            product = tl.dot(tl.trans(left), written, product, input_precision=PRECISION)
        else:
            rounded = written.to(raw.dtype)
            product = _dot16(tl.trans(left), rounded, product)
            if WEIGHT != "beta":  # what enters the adjoint of the whole scan keeps its last bits
                product = _dot16(tl.trans(left), (written - rounded.to(tl.float32)).to(raw.dtype), product)
    return product, tl.sum(total, 0)


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
        u, _ = _outer_products(
            v_ptr, v_n, kr_ptr, kr_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, 0.0, 0.0,
            D, BD, NB, BN, False, TABLES, "beta", PRECISION, STAGES,
        )  # fmt: skip
        tl.store(U_ptr + block, u, mask=inside)
    elif kind == 1:
        a, total = _outer_products(
            kr_ptr, kr_n, kr_ptr, kr_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, 0.0, 0.0,
            D, BD, NB, BN, True, TABLES, "beta", PRECISION, STAGES,
        )  # fmt: skip
        tl.store(A_ptr + block, a.to(A_ptr.dtype.element_ty), mask=inside)
        if R > D and not SEPARATE:  # noqa: SIM102 (known when compiling, the inner one is not)
            if i == 0:
                tl.store(U_ptr + D * D + offs_j, total, mask=offs_j < D)
    else:
        if SEPARATE:
            a, total = _outer_products(
                k_ptr, k_n, k_ptr, k_n, beta_ptr, beta_n, cos_ptr, sin_ptr, tokens, i, j, 0.0, 0.0,
                D, BD, NB, BN, True, False, "beta", PRECISION, STAGES,
            )  # fmt: skip
            tl.store(A_ptr + block, a.to(A_ptr.dtype.element_ty), mask=inside)
            if i == 0:
                tl.store(U_ptr + D * D + offs_j, total, mask=offs_j < D)


# --- scans ------------------------------------------------------------------------------------------------------


@triton.jit
def _load_square(
    ptr, row, col,
    stride_k: tl.constexpr, stride_n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Block (row, col) of a (D, D) matrix as the right operand; TRANSPOSED where memory runs along its rows' index."""
    offs = tl.arange(0, BD)
    k, n = row * BD + offs, col * BD + offs
    if TRANSPOSED:
        tile = tl.load(ptr + n[:, None] * stride_n + k[None, :], mask=(n < D)[:, None] & (k < D)[None, :], other=0.0)
        return tl.trans(tile)
    else:
        return tl.load(
            ptr + k[:, None] * stride_k + n[None, :] * stride_n, mask=(k < D)[:, None] & (n < D)[None, :], other=0.0
        )


@triton.jit
def _times_square(
    s0, s1, ptr,
    stride_k: tl.constexpr, stride_n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows (s0 | s1) times a (D, D) matrix, each half scaled as the precision asks; s1 is anything where NB is 1."""
    EXACT: tl.constexpr = PRECISION != "tf32"
    a00 = _load_square(ptr, 0, 0, stride_k, stride_n, D, BD, TRANSPOSED)
    x0, size0 = _scaled_rows(s0, EXACT)
    p0 = tl.dot(x0, a00, input_precision=PRECISION) * size0[:, None]
    p1 = p0
    if NB == 2:
        x1, size1 = _scaled_rows(s1, EXACT)
        a10 = _load_square(ptr, 1, 0, stride_k, stride_n, D, BD, TRANSPOSED)
        p0 += tl.dot(x1, a10, input_precision=PRECISION) * size1[:, None]
        a01 = _load_square(ptr, 0, 1, stride_k, stride_n, D, BD, TRANSPOSED)
        p1 = tl.dot(x0, a01, input_precision=PRECISION) * size0[:, None]
        a11 = _load_square(ptr, 1, 1, stride_k, stride_n, D, BD, TRANSPOSED)
        p1 += tl.dot(x1, a11, input_precision=PRECISION) * size1[:, None]
    return p0, p1


@triton.jit
def _rows_of(row_block, R, D: tl.constexpr, BR: tl.constexpr):
    """A block's first row, the row where it has to stop, and whether it is one of the rows from D on."""
    blocks: tl.constexpr = (D + BR - 1) // BR
    second = row_block >= blocks
    first_row = tl.where(second, D + (row_block - blocks) * BR, row_block * BR)
    return first_row, tl.where(second, R, tl.minimum(R, D)), second


@triton.jit
def _scan_rows(
    first_row, last_row, sequence, edge, first, last, direction, transition,
    A_ptr, U_ptr, gate_ptr, in0_ptr, in1_ptr, states0_ptr, states1_ptr, out_ptr,
    T, A_frame, first_end, period,
    R, A_k: tl.constexpr, A_n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr,
    GATED: tl.constexpr, TRANSPOSED: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN0: tl.constexpr, HAS_IN1: tl.constexpr, HAS_STATES: tl.constexpr, CUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of one sequence through its frames from `first` to before `last`, in one of two directions.

    Direction 0 is inclusive: S_t = S_{t-1} W_t + U_t upwards, or with ADJOINT G_t = U_t + G_{t+1} W_{t+1} downwards.
    Direction 1 is exclusive: R_t = R_{t+1} W_t + U_t downwards, or with ADJOINT F_{t+1} = U_t + F_t W_t upwards; what
    is kept of frame t is the state it meets, and a chunk's end cuts. `edge` is where a state enters in in_ptr and
    leaves in out_ptr. With `transition` the rows are those of I and there is no U: what leaves is the W's product.
    """
    rows = first_row + tl.arange(0, BR)
    row_live = rows < last_row
    gate_ptr += sequence * T
    cols = tl.arange(0, BD)
    tile = rows[:, None] * D + cols[None, :]
    keep0 = row_live[:, None] & (cols < D)[None, :]
    keep1 = row_live[:, None] & (cols + BD < D)[None, :]

    states_ptr, in_ptr = states0_ptr, in0_ptr
    if direction == 1:
        states_ptr, in_ptr = states1_ptr, in1_ptr
    has_u = transition == 0
    has_in = (HAS_IN0 and direction == 0) or (HAS_IN1 and direction == 1)
    s0 = tl.load(in_ptr + edge + tile, mask=keep0 & has_in, other=0.0)
    s0 = tl.where(transition & (rows[:, None] == cols[None, :]), 1.0, s0)
    s1 = s0
    if NB == 2:
        s1 = tl.load(in_ptr + edge + tile + BD, mask=keep1 & has_in, other=0.0)
        s1 = tl.where(transition & (rows[:, None] == cols[None, :] + BD), 1.0, s1)

    down = (direction == 1) != ADJOINT
    step = tl.where(down, -1, 1)
    t = tl.where(down, last - 1, first)
    add_first = ADJOINT and direction == 0
    if direction == 1:
        if CUT and not ADJOINT:  # noqa: SIM102
            if t % period == first_end:
                s0 = tl.zeros_like(s0)
                s1 = tl.zeros_like(s1)
        if HAS_STATES:
            slot = states_ptr + (sequence * T + t) * R * D + tile
            tl.store(slot, s0, mask=keep0)
            if NB == 2:
                tl.store(slot + BD, s1, mask=keep1)

    for _ in tl.range(first, last, num_stages=STAGES):
        U_tile = U_ptr + (sequence * T + t) * R * D + tile
        u0 = tl.load(U_tile, mask=keep0 & has_u, other=0.0)
        u1 = u0
        if NB == 2:
            u1 = tl.load(U_tile + BD, mask=keep1 & has_u, other=0.0)
        if ADJOINT:
            s0 = tl.where(add_first, s0 + u0, s0)
            s1 = tl.where(add_first, s1 + u1, s1)
        A_frame_ptr = A_ptr + t.to(tl.int64) * A_frame
        p0, p1 = _times_square(s0, s1, A_frame_ptr, A_k, A_n, D, BD, NB, TRANSPOSED, PRECISION)
        if GATED:
            gate = tl.load(gate_ptr + t)
            p0 = gate * (s0 - p0)
            p1 = gate * (s1 - p1)
        kept0, kept1 = s0, s1
        s0, s1 = p0, p1
        if not ADJOINT:
            s0, s1 = p0 + u0, p1 + u1
            kept0, kept1 = s0, s1
        else:
            s0 = tl.where(add_first, p0, p0 + u0)
            s1 = tl.where(add_first, p1, p1 + u1)
        slot_t = tl.where(direction == 1, t + step, t)
        if CUT:  # noqa: SIM102
            if direction == 1:
                end = t if ADJOINT else slot_t
                if (end >= 0) & (end % period == first_end):
                    s0 = tl.zeros_like(s0)
                    s1 = tl.zeros_like(s1)
        if HAS_STATES:
            if not add_first:
                kept0, kept1 = s0, s1
            inside = (slot_t >= first) & (slot_t < last)
            slot = states_ptr + (sequence * T + slot_t) * R * D + tile
            tl.store(slot, kept0, mask=keep0 & inside)
            if NB == 2:
                tl.store(slot + BD, kept1, mask=keep1 & inside)
        t += step

    tl.store(out_ptr + edge + tile, s0, mask=keep0)
    if NB == 2:
        tl.store(out_ptr + edge + tile + BD, s1, mask=keep1)


@triton.jit
def _scan_kernel(
    A_ptr, U_ptr, gate_ptr, in0_ptr, in1_ptr, states0_ptr, states1_ptr, out0_ptr, out1_ptr, M_ptr,
    T, spans, length, A_kind, A_seq, A_frame, first_end, period, R,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN0: tl.constexpr, HAS_IN1: tl.constexpr, HAS_STATES: tl.constexpr, KINDS: tl.constexpr, CUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both directions of both states, by W = g (I - A), A symmetric, over spans of `length` frames side by side.

    Before them, KINDS of A's transitions of each span: the product of its W in the order that direction 0 meets them.
    """
    row_block, direction = tl.program_id(0), tl.program_id(2) - KINDS
    edge = tl.program_id(1).to(tl.int64)
    sequence = edge // spans
    first = (tl.program_id(1) % spans) * length
    last = tl.minimum(T, first + length)
    first_row, last_row, second = _rows_of(row_block, R, D, BR)
    edge = edge * R * D
    out_ptr = out0_ptr
    if direction == 1:
        out_ptr = out1_ptr
    transition = False
    if KINDS > 0:
        transition = direction < 0
        if transition:
            last = tl.where(second, first, last)  # no such rows
            last_row = tl.where(second, 0, last_row)
            second = direction == -1 if KINDS == 2 else second
            edge = (tl.program_id(1).to(tl.int64) * KINDS + direction + KINDS) * D * D
            out_ptr = M_ptr
            direction = 0
    _scan_rows(
        first_row, last_row, sequence, edge, first, last, direction, transition,
        A_ptr + tl.where(second, 1, 0) * A_kind + sequence * A_seq,
        U_ptr, gate_ptr, in0_ptr, in1_ptr, states0_ptr, states1_ptr, out_ptr,
        T, A_frame, first_end, period, R, 1, D, D, BD, NB, BR,
        True, True, ADJOINT, HAS_IN0, HAS_IN1, HAS_STATES, CUT, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def _chains_kernel(
    A0_ptr, A1_ptr, B0_ptr, B1_ptr, in_ptr, states0_ptr, states1_ptr, out_ptr, M_ptr,
    T, spans, length, A0_seq, A0_frame, A1_seq, A1_frame, R1,
    A0_k: tl.constexpr, A0_n: tl.constexpr, A1_k: tl.constexpr, A1_n: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN: tl.constexpr, HAS_STATES: tl.constexpr, KINDS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two chains X_t = X_{t-1} A_t + B_t of D and R1 rows, any A, side by side, in spans as those of `_scan_kernel`.

    What enters and leaves holds both chains' rows, chain 0's first.
    """
    row_block, part = tl.program_id(0), tl.program_id(2) - KINDS
    edge = tl.program_id(1).to(tl.int64)
    sequence = edge // spans
    first = (tl.program_id(1) % spans) * length
    last = tl.minimum(T, first + length)
    first_row, last_row, second = _rows_of(row_block, D + R1, D, BR)
    edge = edge * (D + R1) * D
    transition = False
    if KINDS > 0:
        transition = part < 0
        if transition:
            last = tl.where(second, first, last)  # no such rows
            last_row = tl.where(second, 0, last_row)
            second = part == -1
            edge = (tl.program_id(1).to(tl.int64) * KINDS + part + KINDS) * D * D
            out_ptr = M_ptr
    if second:
        start = tl.where(transition, 0, D)  # chain 1's rows count from 0 in its own tensors
        _scan_rows(
            first_row - start, last_row - start, sequence, edge + start * D, first, last, 0, transition,
            A1_ptr + sequence * A1_seq, B1_ptr, B1_ptr, in_ptr, in_ptr, states1_ptr, states1_ptr, out_ptr,
            T, A1_frame, 0, 1, R1, A1_k, A1_n, D, BD, NB, BR,
            False, A1_k == 1, ADJOINT, HAS_IN, False, HAS_STATES, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _scan_rows(
            first_row, last_row, sequence, edge, first, last, 0, transition,
            A0_ptr + sequence * A0_seq, B0_ptr, B0_ptr, in_ptr, in_ptr, states0_ptr, states0_ptr, out_ptr,
            T, A0_frame, 0, 1, D, A0_k, A0_n, D, BD, NB, BR,
            False, A0_k == 1, ADJOINT, HAS_IN, False, HAS_STATES, False, PRECISION, STAGES,
        )  # fmt: skip


@triton.jit
def _compose_rows(
    row_block, sequence, M_ptr, h_ptr, in_ptr, into_ptr, out_ptr,
    T, spans, length, M_kind, M_span, first_end, period, R,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr,
    DOWN: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_IN: tl.constexpr, CUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of one sequence from span to span, X -> X M + h, or Mᵀ where TRANSPOSED: what enters each."""
    first_row, last_row, second = _rows_of(row_block, R, D, BR)
    rows = first_row + tl.arange(0, BR)
    cols = tl.arange(0, BD)
    tile = rows[:, None] * D + cols[None, :]
    keep0 = (rows < last_row)[:, None] & (cols < D)[None, :]
    keep1 = (rows < last_row)[:, None] & (cols + BD < D)[None, :]
    M_ptr += sequence * spans * M_span + tl.where(second, 1, 0) * M_kind
    edge = sequence * R * D + tile
    s0 = tl.load(in_ptr + edge, mask=keep0 & HAS_IN, other=0.0)
    s1 = s0
    if NB == 2:
        s1 = tl.load(in_ptr + edge + BD, mask=keep1 & HAS_IN, other=0.0)
    for i in tl.range(0, spans, num_stages=STAGES):
        span = spans - 1 - i if DOWN else i
        slot = (sequence * spans + span) * R * D + tile
        tl.store(into_ptr + slot, s0, mask=keep0)
        h0 = tl.load(h_ptr + slot, mask=keep0, other=0.0)
        h1 = h0
        if NB == 2:
            tl.store(into_ptr + slot + BD, s1, mask=keep1)
            h1 = tl.load(h_ptr + slot + BD, mask=keep1, other=0.0)
        k, n = (1, D) if TRANSPOSED else (D, 1)
        s0, s1 = _times_square(s0, s1, M_ptr + span * M_span, k, n, D, BD, NB, TRANSPOSED, PRECISION)
        if CUT:
            # Nothing passes a span that holds a chunk's end; (t + period - 1 - first_end) // period are before t.
            before = (span * length + period - 1 - first_end) // period
            after = (tl.minimum(T, (span + 1) * length) + period - 1 - first_end) // period
            s0 = tl.where(after == before, s0, 0.0)
            s1 = tl.where(after == before, s1, 0.0)
        s0 += h0
        s1 += h1
    tl.store(out_ptr + edge, s0, mask=keep0)
    if NB == 2:
        tl.store(out_ptr + edge + BD, s1, mask=keep1)


@triton.jit
def _compose_kernel(
    M_ptr, h0_ptr, h1_ptr, in0_ptr, in1_ptr, into0_ptr, into1_ptr, out0_ptr, out1_ptr,
    T, spans, length, M_kind, M_span, first_end, period, R,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN0: tl.constexpr, HAS_IN1: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states that enter the spans of `_scan_kernel` in both directions, or of `_chains_kernel` in its one."""
    row_block, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.program_id(2) == 0:
        _compose_rows(
            row_block, sequence, M_ptr, h0_ptr, in0_ptr, into0_ptr, out0_ptr,
            T, spans, length, M_kind, M_span, first_end, period, R, D, BD, NB, BR,
            ADJOINT, False, HAS_IN0, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _compose_rows(
            row_block, sequence, M_ptr, h1_ptr, in1_ptr, into1_ptr, out1_ptr,
            T, spans, length, M_kind, M_span, first_end, period, R, D, BD, NB, BR,
            not ADJOINT, True, HAS_IN1, CUT, PRECISION, STAGES,
        )  # fmt: skip


# --- projection -------------------------------------------------------------------------------------------------


@triton.jit
def _load_met(S_ptr, R_ptr, offs, keep, REVERSE: tl.constexpr):
    """What a frame's queries meet: the forward state plus the reverse one."""
    x = tl.load(S_ptr + offs, mask=keep, other=0.0)
    if REVERSE:
        x += tl.load(R_ptr + offs, mask=keep, other=0.0)
    return x


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
    x0, size0 = _scaled(_load_met(S_ptr, R_ptr, offs, (v < D)[:, None] & (d0 < D)[None, :], REVERSE), EXACT)
    if NB == 2:
        x1, size1 = _scaled(_load_met(S_ptr, R_ptr, offs + BD, (v < D)[:, None] & (d1 < D)[None, :], REVERSE), EXACT)
    if WEIGHT == "den":
        z0 = _load_met(S_ptr, R_ptr, frame * R * D + D * D + d0, d0 < D, REVERSE)
        if NB == 2:
            z1 = _load_met(S_ptr, R_ptr, frame * R * D + D * D + d1, d1 < D, REVERSE)

    first = share * per_program
    last = tl.minimum(S, first + per_program)
    readable = tl.where(active, last, 0)  # a padded frame is never read
    # Every tile is read a turn ahead of its use.
    n = first + tl.arange(0, BN)
    next_q0 = _load_tokens(q_ptr, n, n < readable, q_n, d0, D)
    next_rotated0 = next_q0
    if ROTARY == "given":
        next_rotated0 = _load_tokens(qr_ptr, n, n < readable, qr_n, d0, D)
    if ROTARY == "tables":
        next_cos, next_sin = _load_tables(cos_ptr, sin_ptr, n, n < readable, 0, BD, D)
    for n0 in tl.range(first, last, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        live = n < last
        q0, rotated0 = next_q0.to(tl.float32), next_rotated0.to(tl.float32)
        if ROTARY == "tables":
            cos, sin = next_cos, next_sin
        ahead = n + BN
        next_q0 = _load_tokens(q_ptr, ahead, ahead < readable, q_n, d0, D)
        if ROTARY == "given":
            next_rotated0 = _load_tokens(qr_ptr, ahead, ahead < readable, qr_n, d0, D)
        else:
            next_rotated0 = next_q0
        if ROTARY == "tables":
            next_cos, next_sin = _load_tables(cos_ptr, sin_ptr, ahead, ahead < readable, 0, BD, D)
        scale = tl.full((BN,), 1.0, tl.float32)
        if NB == 2:
            q1 = _load_tokens(q_ptr, n, n < readable, q_n, d1, D).to(tl.float32)
        if WEIGHT == "beta":
            scale = tl.load(beta_ptr + n * beta_n, mask=n < readable, other=0.0).to(tl.float32)
        if WEIGHT == "den":
            den = tl.sum(q0 * z0[None, :], 1)
            if NB == 2:
                den += tl.sum(q1 * z1[None, :], 1)
            scale = 1.0 / (den + eps)
        q0 = rotated0
        if ROTARY == "tables":
            q0 = _rotate(q0, cos, sin, BN, BD)
        if NB == 2:
            if ROTARY == "given":
                q1 = _load_tokens(qr_ptr, n, n < readable, qr_n, d1, D).to(tl.float32)
            if ROTARY == "tables":
                cos, sin = _load_tables(cos_ptr, sin_ptr, n, n < readable, 1, BD, D)
                q1 = _rotate(q1, cos, sin, BN, BD)
        operand, row_size = _scaled_rows(q0, EXACT)
        out = tl.dot(operand, tl.trans(x0), input_precision=PRECISION) * (row_size * scale * size0)[:, None]
        if NB == 2:
            operand, row_size = _scaled_rows(q1, EXACT)
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
        z = _load_met(S_ptr, R_ptr, frame * R * D + D * D + d, d < D, REVERSE)
    if ROTARY == "none":
        qr_ptr, qr_n = q_ptr, q_n
    if NB == 1:
        weights, weights_n = q_ptr, q_n
    else:
        weights, weights_n = weight_ptr + frame * S, 1
    dX, _ = _outer_products(
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
def _matrix_operand(x, BF16: tl.constexpr, EXACT: tl.constexpr):
    """A float32 matrix as the right operand of products with tokens, in two parts, and its factor.

    bfloat16 needs no factor and leaves a rest that a second product adds; float16 is scaled by a power of two.
    """
    if EXACT:
        return x, x, 1.0
    elif BF16:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16), 1.0
    else:
        scaled, size = _scaled(x, False)
        return scaled, scaled, size


@triton.jit
def _token_operand(raw, x, CHANGED: tl.constexpr, EXACT: tl.constexpr):
    """Tokens as the left operand and the factor of each row: as loaded where nothing CHANGED them."""
    if EXACT:
        return x, tl.full((x.shape[0],), 1.0, tl.float32)
    elif not CHANGED:
        return raw, tl.full((x.shape[0],), 1.0, tl.float32)
    elif raw.dtype == tl.bfloat16:
        return x.to(tl.bfloat16), tl.full((x.shape[0],), 1.0, tl.float32)
    else:
        return _scaled_rows(x, False)


@triton.jit
def _product(tokens, high, low, TWO: tl.constexpr, PRECISION: tl.constexpr):
    """tokens @ (high + low), low only where TWO."""
    if PRECISION != "tf32":
        return tl.dot(tokens, high, input_precision=PRECISION)
    else:
        acc = tl.zeros((tokens.shape[0], high.shape[1]), dtype=tl.float32)
        acc = _dot16(tokens, high, acc)
        if TWO:
            acc = _dot16(tokens, low, acc)
        return acc


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
    x = _load_met(S_ptr, R_ptr, frame * R * D + square, keep, REVERSE)
    x_high, x_low, size = _matrix_operand(x, TWO, EXACT)
    if NORMALIZE:
        z = _load_met(S_ptr, R_ptr, frame * R * D + D * D + d, d < D, REVERSE)
        dz = tl.zeros((BN, BD), dtype=tl.float32)

    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        raw = _load_tokens(dout_ptr, n, read, dout_n, d, D)
        rows, row_size = _token_operand(raw, raw.to(tl.float32), False, EXACT)
        weight = row_size * size
        if NORMALIZE:
            q = _load_tokens(q_ptr, n, read, q_n, d, D).to(tl.float32)
            scale = tl.where(read, 1.0 / (tl.sum(q * z[None, :], 1) + eps), 0.0)
            weight *= scale
        if ROTARY == "tables":
            cos, sin = _load_tables(cos_ptr, sin_ptr, n, read, 0, BD, D)
        dq_rot = _product(rows, x_high, x_low, TWO, PRECISION) * weight[:, None]
        dq = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            # num . dnum without num: q~ . (Xᵀ dnum), and the second factor is dq~.
            rotated = q
            if ROTARY == "given":
                rotated = _load_tokens(qr_ptr, n, read, qr_n, d, D).to(tl.float32)
            if ROTARY == "tables":
                rotated = _rotate(q, cos, sin, BN, BD)
            dden = -tl.sum(dq_rot * rotated, 1) * scale
            dz += q * dden[:, None]
            dq = dden[:, None] * z[None, :]
        out = n[:, None] * dq_n + d[None, :]
        out_keep = live[:, None] & (d < D)[None, :]
        if ROTARY == "given":
            tl.store(dqr_ptr + out, dq_rot.to(dqr_ptr.dtype.element_ty), mask=out_keep)
        elif ROTARY == "tables":
            dq += _rotate(dq_rot, cos, -sin, BN, BD)
        else:
            dq += dq_rot
        tl.store(dq_ptr + out, dq.to(dq_ptr.dtype.element_ty), mask=out_keep)

    if NORMALIZE:
        tl.store(dX_ptr + frame * R * D + D * D + d, tl.sum(dz, 0), mask=d < D)


# --- gradients of the transitions -------------------------------------------------------------------------------


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
        left, left_size = _scaled(left, EXACT)
        right, right_size = _scaled(right, EXACT)
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
    p, _, p_size = _matrix_operand(p, BF16, EXACT)
    du = _load_met(G_ptr, F_ptr, frame * R * D + square, keep, REVERSE)
    du, _, du_size = _matrix_operand(du, BF16, EXACT)
    if SEPARATE:
        q = tl.load(Q_ptr + frame * D * D + square, mask=keep, other=0.0).to(tl.float32)
        q, _, q_size = _matrix_operand(q, BF16, EXACT)
    if NORMALIZE:
        w = _load_met(G_ptr, F_ptr, frame * R * D + D * D + d, d < D, REVERSE)

    for n0 in tl.range(0, S, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        out = n[:, None] * dk_n + d[None, :]
        out_keep = live[:, None] & (d < D)[None, :]
        beta = tl.load(beta_ptr + n * beta_n, mask=read, other=0.0).to(tl.float32)
        raw_v = _load_tokens(v_ptr, n, read, v_n, d, D)
        raw = _load_tokens(k_ptr, n, read, k_n, d, D)
        raw_rotated = raw
        if ROTARY == "given":
            raw_rotated = _load_tokens(kr_ptr, n, read, kr_n, d, D)
        rotated = raw_rotated.to(tl.float32)
        if ROTARY == "tables":
            cos, sin = _load_tables(cos_ptr, sin_ptr, n, read, 0, BD, D)
            rotated = _rotate(rotated, cos, sin, BN, BD)
        rows, size = _token_operand(raw_v, raw_v.to(tl.float32), False, EXACT)
        v_dU = _product(rows, du, du, False, PRECISION) * (size * du_size)[:, None]
        rows, size = _token_operand(raw_rotated, rotated, ROTARY == "tables", EXACT)
        k_P = _product(rows, p, p, False, PRECISION) * (size * p_size)[:, None]
        dbeta = tl.sum((v_dU + 0.5 * k_P) * rotated, 1)
        dk_rot = beta[:, None] * (v_dU + k_P)
        dk = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            k = raw.to(tl.float32)
            dk += w[None, :]
            if SEPARATE:
                rows, size = _token_operand(raw, k, False, EXACT)
                k_Q = _product(rows, q, q, False, PRECISION) * (size * q_size)[:, None]
                dbeta += 0.5 * tl.sum(k_Q * k, 1)
                dk += k_Q
            dbeta += tl.sum(k * w[None, :], 1)
            dk *= beta[:, None]
        if ROTARY == "given":
            tl.store(dkr_ptr + out, dk_rot.to(dkr_ptr.dtype.element_ty), mask=out_keep)
        elif ROTARY == "tables":
            dk += _rotate(dk_rot, cos, -sin, BN, BD)
        else:
            dk += dk_rot
        tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=out_keep)
        dbeta = tl.where(active, dbeta, 0.0)
        tl.store(dbeta_ptr + n * dbeta_n, dbeta.to(dbeta_ptr.dtype.element_ty), mask=live)


# --- heads too wide for a whole matrix in shared memory: an output's channels in blocks, a program each ----------


@triton.jit
def _through(
    ptr, n, live, stride_n, cos_ptr, sin_ptr, X_ptr, Y_ptr, j,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr,
    TABLES: tl.constexpr, BOTH: tl.constexpr, TRANSPOSED: tl.constexpr, TWO: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Block j of a tile of tokens, rotated by TABLES, times X, or X + Y where BOTH, or the TRANSPOSED of that."""
    EXACT: tl.constexpr = PRECISION != "tf32"
    d = tl.arange(0, BD)
    out = j * BD + d
    product = tl.zeros((BN, BD), dtype=tl.float32)
    for c in range(NB):
        inner = c * BD + d
        raw = _load_tokens(ptr, n, live, stride_n, inner, D)
        x = raw.to(tl.float32)
        if TABLES:
            cos, sin = _load_tables(cos_ptr, sin_ptr, n, live, c, BD, D)
            x = _rotate(x, cos, sin, BN, BD)
        rows, row_size = _token_operand(raw, x, TABLES, EXACT)
        if TRANSPOSED:
            keep = (out < D)[:, None] & (inner < D)[None, :]
            matrix = tl.trans(_load_met(X_ptr, Y_ptr, out[:, None] * D + inner[None, :], keep, BOTH))
        else:
            keep = (inner < D)[:, None] & (out < D)[None, :]
            matrix = _load_met(X_ptr, Y_ptr, inner[:, None] * D + out[None, :], keep, BOTH)
        high, low, size = _matrix_operand(matrix.to(tl.float32), raw.dtype == tl.bfloat16, EXACT)
        product += _product(rows, high, low, TWO, PRECISION) * (row_size * size)[:, None]
    return product


@triton.jit
def _denominator(
    q_ptr, n, live, q_n, z_ptr, y_ptr,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BN: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """(z + y)ᵀ q of a tile of tokens."""
    den = tl.zeros((BN,), dtype=tl.float32)
    for c in range(NB):
        d = c * BD + tl.arange(0, BD)
        z = _load_met(z_ptr, y_ptr, d, d < D, REVERSE)
        den += tl.sum(_load_tokens(q_ptr, n, live, q_n, d, D).to(tl.float32) * z[None, :], 1)
    return den


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
        out = _through(
            qr_ptr, n, read, qr_n, cos_ptr, sin_ptr, S_ptr, R_ptr, i,
            D, BD, NB, BN, ROTARY == "tables", REVERSE, True, False, PRECISION,
        )  # fmt: skip
        if WEIGHT == "beta":
            out *= tl.load(beta_ptr + n * beta_n, mask=read, other=0.0).to(tl.float32)[:, None]
        if WEIGHT == "den":
            den = _denominator(q_ptr, n, read, q_n, S_ptr + D * D, R_ptr + D * D, D, BD, NB, BN, REVERSE)
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
        z = _load_met(S_ptr, R_ptr, D * D + d, d < D, REVERSE)
        dz = tl.zeros((BN, BD), dtype=tl.float32)
    for n0 in tl.range(0, S, BN):
        n = n0 + tl.arange(0, BN)
        live = n < S
        read = live & active
        dq_rot = _through(
            dout_ptr, n, read, dout_n, cos_ptr, sin_ptr, S_ptr, R_ptr, i,
            D, BD, NB, BN, False, REVERSE, False, TWO, PRECISION,
        )  # fmt: skip
        if ROTARY == "tables":
            cos, sin = _load_tables(cos_ptr, sin_ptr, n, read, i, BD, D)
        if ONLY_DEN:
            den = _denominator(q_ptr, n, read, q_n, S_ptr + D * D, R_ptr + D * D, D, BD, NB, BN, REVERSE)
            weight = tl.where(read, 1.0 / (den + eps), 0.0)
            if ROTARY == "given":
                rotated = _load_tokens(qr_ptr, n, read, qr_n, d, D).to(tl.float32)
            else:
                rotated = _load_tokens(q_ptr, n, read, q_n, d, D).to(tl.float32)
            if ROTARY == "tables":
                rotated = _rotate(rotated, cos, sin, BN, BD)
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
                dz += _load_tokens(q_ptr, n, read, q_n, d, D).to(tl.float32) * dden[:, None]
                dq = dden[:, None] * z[None, :]
            out = n[:, None] * dq_n + d[None, :]
            keep = live[:, None] & (d < D)[None, :]
            if ROTARY == "given":
                tl.store(dqr_ptr + out, dq_rot.to(dqr_ptr.dtype.element_ty), mask=keep)
            elif ROTARY == "tables":
                dq += _rotate(dq_rot, cos, -sin, BN, BD)
            else:
                dq += dq_rot
            tl.store(dq_ptr + out, dq.to(dq_ptr.dtype.element_ty), mask=keep)
    if NORMALIZE and not ONLY_DEN:
        tl.store(dX_ptr + frame * R * D + D * D + d, tl.sum(dz, 0), mask=d < D)


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
        v_dU = _through(
            v_ptr, n, read, v_n, cos_ptr, sin_ptr, G_ptr, F_ptr, i,
            D, BD, NB, BN, False, REVERSE, False, False, PRECISION,
        )  # fmt: skip
        k_P = _through(
            kr_ptr, n, read, kr_n, cos_ptr, sin_ptr, P_ptr, P_ptr, i,
            D, BD, NB, BN, TABLES, False, False, False, PRECISION,
        )  # fmt: skip
        rotated = _load_tokens(kr_ptr, n, read, kr_n, d, D).to(tl.float32)
        if TABLES:
            cos, sin = _load_tables(cos_ptr, sin_ptr, n, read, i, BD, D)
            rotated = _rotate(rotated, cos, sin, BN, BD)
        dbeta = tl.sum((v_dU + 0.5 * k_P) * rotated, 1)
        dk_rot = beta[:, None] * (v_dU + k_P)
        dk = tl.zeros((BN, BD), dtype=tl.float32)
        if NORMALIZE:
            k = _load_tokens(k_ptr, n, read, k_n, d, D).to(tl.float32)
            w = _load_met(G_ptr, F_ptr, D * D + d, d < D, REVERSE)
            dk += w[None, :]
            dbeta += tl.sum(k * w[None, :], 1)
            if ROTARY != "none":
                k_Q = _through(
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
            dk += _rotate(dk_rot, cos, -sin, BN, BD)
        else:
            dk += dk_rot
        tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=keep)
        tl.store(dbeta_ptr + n * dbeta_n, tl.where(active, dbeta, 0.0), mask=live)


# --- launches ---------------------------------------------------------------------------------------------------


class Transitions(NamedTuple):
    """What `transitions` leaves for the scans: A, U and gate in this module's layouts, and the precision to use."""

    A: Tensor
    U: Tensor
    gate: Tensor
    precision: str


#: Tiles by kernel, best first, as measured on an H200; a launch takes the first that fits its device's shared memory.
_TILES: dict[Any, list[dict[str, int]]] = {
    (_transitions_kernel, "tf32"): [
        {"BN": 64, "STAGES": 2, "num_warps": 4},
        {"BN": 32, "STAGES": 2, "num_warps": 4},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
    (_transitions_kernel, "tf32x3"): [
        {"BN": 32, "STAGES": 2, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_scan_kernel, "tf32"): [
        {"BR": 32, "STAGES": 2, "num_warps": 4},
        {"BR": 16, "STAGES": 2, "num_warps": 2},
        {"BR": 16, "STAGES": 1, "num_warps": 4},
    ],
    (_scan_kernel, "tf32x3"): [
        {"BR": 64, "STAGES": 1, "num_warps": 8},
        {"BR": 32, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_chains_kernel, "tf32x3"): [
        {"BR": 32, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_compose_kernel, "tf32x3"): [
        {"BR": 16, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_project_kernel, "tf32"): [
        {"BN": 64, "STAGES": 1, "num_warps": 8, "maxnreg": 128},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
    (_project_kernel, "tf32x3"): [
        {"BN": 32, "STAGES": 1, "num_warps": 4},
        {"BN": 16, "STAGES": 1, "num_warps": 4},
    ],
    (_state_input_gradient_kernel, "tf32"): [
        {"BN": 64, "STAGES": 2, "num_warps": 8, "maxnreg": 128},
        {"BN": 32, "STAGES": 2, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_state_input_gradient_kernel, "tf32x3"): [
        {"BN": 32, "STAGES": 2, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_query_gradient_kernel, "tf32"): [
        {"BN": 64, "STAGES": 2, "num_warps": 8},
        {"BN": 32, "STAGES": 1, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_query_gradient_kernel, "tf32x3"): [
        {"BN": 32, "STAGES": 1, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_transition_gradient_kernel, "tf32"): [{"num_warps": 8}],
    (_transition_gradient_kernel, "tf32x3"): [{"num_warps": 8}],
    (_wide_project_kernel, "tf32x3"): [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    (_wide_query_gradient_kernel, "tf32"): [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    (_wide_query_gradient_kernel, "tf32x3"): [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    (_wide_key_gradient_kernel, "tf32"): [{"BN": 64, "num_warps": 8}, {"BN": 32, "num_warps": 8}],
    (_wide_key_gradient_kernel, "tf32x3"): [{"BN": 32, "num_warps": 8}],
    (_key_gradient_kernel, "tf32"): [
        {"BN": 64, "STAGES": 2, "num_warps": 8},
        {"BN": 32, "STAGES": 1, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
    (_key_gradient_kernel, "tf32x3"): [
        {"BN": 32, "STAGES": 1, "num_warps": 8},
        {"BN": 16, "STAGES": 1, "num_warps": 8},
    ],
}
_compiled: dict[Any, Any] = {}


def _launch(
    kernel: Any,
    grid: Any,
    tensors: Sequence[Tensor],
    numbers: tuple[int | float, ...],
    options: dict[str, Any],
    tiles: list[dict[str, int]] | None = None,
) -> None:
    """Launches with the best tile that fits; `grid` maps the tile to the grid.

    What was compiled is found again by the arguments' types, alignments and values, which costs a fraction of the
    binding that Triton does on every launch; for a short clip the launches are what takes the time.
    """
    if _INTERPRETED:
        tile = (tiles or _TILES[kernel, options["PRECISION"]])[0]
        kernel[grid(tile)](*tensors, *numbers, **options, **tile)
        return
    device = tensors[0].device
    if device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(kernel, grid, tensors, numbers, options, tiles)
        return
    kinds = [(x.dtype, x.data_ptr() & 15) for x in tensors]
    key = (kernel.__name__, device.index, *options.values(), *numbers, *kinds)
    found = _compiled.get(key)
    if found is None:
        for tile in tiles or _TILES[kernel, options["PRECISION"]]:
            try:
                compiled = kernel[grid(tile)](*tensors, *numbers, **options, **tile)
            except OutOfResources as error:
                failure = error
                continue
            constants = {**options, **tile}
            _compiled[key] = compiled, tile, [constants[p.name] for p in kernel.params if p.is_constexpr]
            return
        raise failure
    compiled, tile, constants = found
    compiled[grid(tile)](*tensors, *numbers, *constants)


def supports(like: Tensor) -> bool:
    """Whether `check_supported` would pass."""
    return like.is_cuda and like.dtype in (torch.float32, torch.bfloat16, torch.float16) and like.shape[-1] <= 256


def check_supported(like: Tensor) -> None:
    """Raises ValueError where tensors like this one are beyond this backend."""
    if not (like.is_cuda or _INTERPRETED):
        raise ValueError(f"backend 'triton' needs tensors on a GPU, got {like.device}")
    if like.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"backend 'triton' takes float32, bfloat16 or float16, got {like.dtype}")
    if like.shape[-1] > 256:
        raise ValueError(f"backend 'triton' takes head dimensions up to 256, got {like.shape[-1]}")


def _blocks(D: int) -> tuple[int, int]:
    """The width of a channel block and their number: one up to D 128, then two of 128."""
    return (max(16, 1 << (D - 1).bit_length()), 1) if D <= 128 else (128, 2)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _tokens(x: Tensor) -> tuple[int, int, int]:
    return x.stride(0), x.stride(1), x.stride(2)


def _dense(x: Tensor | None) -> Tensor | None:
    """Channels next to one another; any other strides are taken as they come."""
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def _flags(x: Inputs, like: Tensor) -> Tensor:
    """The mask as bytes; any tensor where there is none."""
    return like if x.mask is None else x.mask.contiguous().view(torch.uint8)


def _rotary(x: Inputs, given: Tensor | None, like: Tensor) -> tuple[str, Tensor, Tensor]:
    """How the numerator's tokens come about: "given", from "tables" (cos, sin of (N, D / 2)), or "none"."""
    if given is not None:
        return "given", like, like
    if x.cos is not None and x.sin is not None:
        return "tables", x.cos.contiguous(), x.sin.contiguous()
    return "none", like, like


def _chunks(ends: Sequence[bool]) -> tuple[bool, int, int]:
    """Whether any chunk ends here, the first frame that is the last of its chunk, and the chunks' length."""
    first = next((t for t, end in enumerate(ends) if end), None)
    if first is None:
        return False, 0, 1
    second = next((t for t in range(first + 1, len(ends)) if ends[t]), None)
    return True, first, len(ends) if second is None else second - first


def _packed(S: Tensor | None, z: Tensor | None, rows: int) -> Tensor | None:
    """States that enter a shard, (B, H, D, D) and (B, H, D), as one (B, H, R, D); absent is zero."""
    if S is None and z is None:
        return None
    if rows == (S if S is not None else z).shape[-1]:  # type: ignore[union-attr]
        return None if S is None else S.float().contiguous()
    D = rows - 1
    like = S if S is not None else z
    assert like is not None
    packed = torch.zeros(*like.shape[:2], rows, D, dtype=torch.float32, device=like.device)
    if S is not None:
        packed[..., :D, :] = S
    if z is not None:
        packed[..., D, :] = z
    return packed


def _states(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(..., R, D) as views S (..., D, D) and z (..., D)."""
    if x is None:
        return None, None
    R, D = x.shape[-2:]
    if R == D:
        return x, None
    S, z = x.split((D, 1), -2)
    return S, z.squeeze(-2)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """How many multiprocessors the device has; one in the interpreter, where nothing runs side by side."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """How many bytes a block of threads can have; an H200's in the interpreter."""
    return int(max_shared_mem(device.index)) if device.type == "cuda" else 232448


@functools.cache
def _best_span(T: int, programs: int, transitions: int, multiprocessors: int) -> int:
    """The length of the spans that should take a scan of T frames the least time.

    A step takes the same time, its latency, until more than about 2.5 programs share a multiprocessor. One span takes
    T steps with `programs`. More take three passes: what leaves each span from zero, and its transition, which
    `transitions` programs more a span find; from span to span, in steps that multiply in float32 and cost about 1.7;
    and the scan of each span. Two launches more cost about four steps.
    """

    def load(count: int) -> float:
        return max(1.0, count / (2.5 * multiprocessors))

    best, least = T, T * load(programs)
    spans = 2
    while spans <= T:
        length = _cdiv(T, spans)
        n = _cdiv(T, length)
        passes = length * (load(n * (programs + transitions)) + load(n * programs)) + 1.7 * n * load(programs) + 4
        if passes < least:
            best, least = length, passes
        spans *= 2
    return best


def _compose(
    M: Tensor, h: Sequence[Tensor], initial: Sequence[Tensor | None], T: int, length: int,
    chunks: tuple[bool, int, int], adjoint: bool,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """The states that enter each span, (B, H, spans, R, D) a direction, and what leaves the last, (B, H, R, D).

    M (B, H, spans, kinds, D, D) are the spans' transitions in the order of direction 0, h what leaves them from zero.
    """
    B, H, spans, R, D = h[0].shape
    BD, NB = _blocks(D)
    cut, first, period = chunks
    into = [torch.empty_like(x) for x in h]
    out = [x.new_empty(B, H, R, D) for x in h]
    in0, in1 = (*initial, None)[:2]
    _launch(
        _compose_kernel, lambda tile: (_cdiv(D, tile["BR"]) + _cdiv(R - D, tile["BR"]), B * H, len(h)),
        (M, h[0], h[-1], M if in0 is None else in0, M if in1 is None else in1, into[0], into[-1], out[0], out[-1]),
        (T, spans, length, D * D if M.shape[3] > 1 else 0, M.stride(2), first, period, R),
        {"D": D, "BD": BD, "NB": NB, "ADJOINT": adjoint, "HAS_IN0": in0 is not None, "HAS_IN1": in1 is not None,
         "CUT": cut, "PRECISION": "tf32x3"},
    )  # fmt: skip
    return into, out


@dataclass(frozen=True)
class TritonSteps:
    """The steps of `torch_kernels`, by the kernels above.

    exact: float32's accuracy whatever the tokens' dtype.
    spans: into how many spans of frames, side by side, a scan is cut; None leaves it to `_best_span`.
    """

    exact: bool = False
    spans: int | None = None

    def _precision(self, dtype: torch.dtype) -> str:
        return "tf32x3" if self.exact or dtype == torch.float32 else "tf32"

    def _states(self, dtype: torch.dtype) -> str:
        """How states are multiplied: float16 tokens have as many bits as a product in TF32, and ask for more."""
        return "tf32" if dtype == torch.bfloat16 and not self.exact else "tf32x3"

    def _gradient_blocks(self, like: Tensor) -> tuple[int, int]:
        """As `_blocks`, for the gradients of tokens: narrower blocks where the three whole matrices that the keys'
        kernel holds, and 16 KiB of tokens, are beyond the device's shared memory."""
        BD, NB = _blocks(like.shape[-1])
        size = 8 if self._precision(like.dtype) == "tf32x3" else 2  # in bytes; three TF32 products take two copies
        if NB == 1 and 3 * BD * BD * size + 2**14 <= _shared_memory(like.device):
            return BD, 1
        return (64, _cdiv(like.shape[-1], 64)) if BD > 64 else (BD // 2, 2)

    def transitions(self, x: Inputs, normalize: bool) -> Transitions:
        B, N, H, D = x.k.shape
        T = x.decay.shape[1]
        k, v, k_rot = _dense(x.k), _dense(x.v), _dense(x.k_rot)
        assert k is not None and v is not None
        rotary, cos, sin = _rotary(x, k_rot, k)
        separate = normalize and rotary != "none"
        R = D + 1 if normalize else D
        BD, NB = _blocks(D)
        precision = self._states(k.dtype)
        A_dtype = torch.float16 if precision == "tf32" else torch.float32
        A = torch.empty(2 if separate else 1, B, H, T, D, D, dtype=A_dtype, device=k.device)
        U = torch.empty(B, H, T, R, D, dtype=torch.float32, device=k.device)
        gate = torch.empty(B, H, T, dtype=torch.float32, device=k.device)
        kr = k if k_rot is None else k_rot
        if A.numel():
            _launch(
                _transitions_kernel, lambda tile: (B * T * H * NB * NB * (3 if separate else 2), 1, 1),
                (k, kr, v, x.beta, x.decay, _flags(x, k), cos, sin, A, U, gate),
                (*_tokens(k), *_tokens(kr), *_tokens(v), *x.beta.stride(), *x.decay.stride(),
                 H, T, N // T, A.stride(0) if separate else 0),
                {"D": D, "R": R, "BD": BD, "NB": NB, "ROTARY": rotary, "MASK": x.mask is not None,
                 "SEPARATE": separate, "PRECISION": self._precision(k.dtype)},
            )  # fmt: skip
        return Transitions(A, U, gate, precision)

    def _scan(
        self, tr: Transitions, U: Tensor, entering: tuple[Tensor | None, Tensor | None], ends: Sequence[bool],
        *, reverse: bool, adjoint: bool, keep: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
        """Both directions' states (B, H, T, R, D) where kept, and what leaves (B, H, R, D)."""
        B, H, T, R, D = U.shape
        both = 2 if reverse else 1
        if U.numel() == 0:
            states, out = [U] * both, [U.new_zeros(B, H, R, D) if x is None else x for x in entering[:both]]
        else:
            length = self._span_length(T, B * H, D, R - D, both, tr.A.shape[0], U.device)
            spans = _cdiv(T, length)
            came: Sequence[Tensor | None] = entering
            states = [U] * both
            if spans > 1:
                _, h, M = self._scan_spans(tr, U, (), ends, both, adjoint, length, tr.A.shape[0], keep=False)
                came, out = _compose(M, h, entering, T, length, _chunks(ends), adjoint)
            if keep or spans == 1:
                states, edges, _ = self._scan_spans(tr, U, came, ends, both, adjoint, length, 0, keep=keep)
                last = (0, -1) if adjoint else (-1, 0)
                out = [x[:, :, span] for x, span in zip(edges, last, strict=False)]
        S, R_ = (*states, None)[:2] if keep else (None, None)
        return S, R_, out[0], out[1] if reverse else None

    def _scan_spans(
        self, tr: Transitions, U: Tensor, entering: Sequence[Tensor | None], ends: Sequence[bool], directions: int,
        adjoint: bool, length: int, kinds: int, *, keep: bool,
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
        """Spans of `length` frames side by side: the states (B, H, T, R, D) of each direction where kept, what leaves
        each span (B, H, spans, R, D), and of the first `kinds` of A its transition (B, H, spans, kinds, D, D).

        What enters is one state a span, (B, H, spans, R, D), which for a single span is (B, H, R, D).
        """
        A = tr.A
        B, H, T, R, D = U.shape
        BD, NB = _blocks(D)
        spans = _cdiv(T, length)
        states = [torch.empty_like(U) if keep else U for _ in range(directions)]
        out = [U.new_empty(B, H, spans, R, D) for _ in range(directions)]
        M = U.new_empty(B, H, spans, kinds, D, D)
        cut, first, period = _chunks(ends)
        in0, in1 = (*entering, None, None)[:2]
        _launch(
            _scan_kernel,
            lambda tile: (_cdiv(D, tile["BR"]) + _cdiv(R - D, tile["BR"]), B * H * spans, kinds + directions),
            (A, U, tr.gate, U if in0 is None else in0, U if in1 is None else in1,
             *(x for xs in (states or [U], out or [U]) for x in (xs[0], xs[-1])), M),
            (T, spans, length, A.stride(0) if A.shape[0] > 1 else 0, T * D * D, D * D, first, period, R),
            {"D": D, "BD": BD, "NB": NB, "ADJOINT": adjoint, "HAS_IN0": in0 is not None, "HAS_IN1": in1 is not None,
             "HAS_STATES": keep, "KINDS": kinds, "CUT": cut and directions == 2, "PRECISION": tr.precision},
        )  # fmt: skip
        return states, out, M

    def _span_length(
        self, T: int, BH: int, D: int, more: int, directions: int, kinds: int, device: torch.device
    ) -> int:
        """How many frames a scan takes one after the other; the rest of T runs beside them. See `_best_span`."""
        if self.spans is not None:
            return max(_cdiv(T, self.spans), 1)
        rows = _cdiv(D, 32) + _cdiv(more, 32)
        return _best_span(T, BH * directions * rows, BH * kinds * _cdiv(D, 32), _multiprocessors(device))

    def shard_transitions(self, tr: Transitions) -> list[Tensor]:
        """W_first ... W_last of the numerator and of the denominator, (B, H, D, D) each."""
        kinds, B, H, T, D, _ = tr.A.shape
        normalize = tr.U.shape[-2] > D
        eye = torch.eye(D, dtype=torch.float32, device=tr.A.device)
        if tr.A.numel() == 0:
            M = eye.expand(B, H, 1, kinds, D, D)
        else:
            length = self._span_length(T, B * H, D, 0, 0, kinds, tr.A.device)
            M = self._scan_spans(tr, tr.U, (), (), 0, False, length, kinds, keep=False)[2]
            if length < T:  # rows that start at I, with no input, in full float32 whatever torch allows a product
                rows = eye.repeat(B, H, kinds, 1)
                nothing = M.new_zeros(M.shape).flatten(3, 4)
                M = _compose(M, [nothing], [rows], T, length, (False, 0, 1), False)[1][0].unflatten(2, (1, kinds, D))
        found = [m.contiguous() for m in M[:, :, 0].unbind(2)]
        return found + found if normalize and kinds == 1 else found

    def scan_states(
        self, tr: Transitions, entering: Edges, ends: Sequence[bool], reverse: bool
    ) -> tuple[States, Edges]:
        rows = tr.U.shape[-2]
        came = _packed(entering.S, entering.z, rows), _packed(entering.R, entering.y, rows)
        S, R, S_out, R_out = self._scan(tr, tr.U, came, ends, reverse=reverse, adjoint=False, keep=True)
        kept = States(*_states(S), *_states(R))  # type: ignore[arg-type]
        return kept, Edges(*_states(S_out), *_states(R_out))

    def scan_states_adjoint(
        self, tr: Transitions, dX: Tensor, dx: Tensor | None, entering: Edges, ends: Sequence[bool], reverse: bool
    ) -> tuple[States, Edges]:
        dU = _whole(dX, dx)
        came = _packed(entering.S, entering.z, dU.shape[-2]), _packed(entering.R, entering.y, dU.shape[-2])
        G, F, G_out, F_out = self._scan(tr, dU, came, ends, reverse=reverse, adjoint=True, keep=True)
        kept = States(*_states(G), *_states(F))  # type: ignore[arg-type]
        return kept, Edges(*_states(G_out), *_states(F_out))

    def leaving(self, tr: Transitions, entering: Edges, ends: Sequence[bool], reverse: bool) -> Edges:
        rows = tr.U.shape[-2]
        came = _packed(entering.S, entering.z, rows), _packed(entering.R, entering.y, rows)
        _, _, S, R = self._scan(tr, tr.U, came, ends, reverse=reverse, adjoint=False, keep=False)
        return Edges(*_states(S), *_states(R))

    def leaving_adjoint(
        self, tr: Transitions, dX: Tensor, dx: Tensor | None, ends: Sequence[bool], reverse: bool
    ) -> Edges:
        _, _, G, F = self._scan(tr, _whole(dX, dx), (None, None), ends, reverse=reverse, adjoint=True, keep=False)
        return Edges(*_states(G), *_states(F))

    def project(self, x: Inputs, states: States, eps: float) -> Tensor:
        q, q_rot = _dense(x.q), _dense(x.q_rot)
        assert q is not None
        weight = "none" if states.z is None else "den"
        return self._met_by(q, q_rot, q, weight, x, states.S, states.R, states.z is not None, eps)

    def _met_by(
        self, q: Tensor, q_rot: Tensor | None, beta: Tensor, weight: str, x: Inputs, S: Tensor, R: Tensor | None,
        denominator: bool, eps: float,
    ) -> Tensor:  # fmt: skip
        """(S + R) q~ of every token of q, times its weight."""
        B, N, H, D = q.shape
        T = x.decay.shape[1]
        rotary, cos, sin = _rotary(x, q_rot, q)
        qr = q if q_rot is None else q_rot
        out = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
        precision = self._precision(q.dtype)
        wide = D > 128 and precision != "tf32"
        BD, NB = (64, _cdiv(D, 64)) if precision != "tf32" and D > 64 else _blocks(D)
        if out.numel():
            _launch(
                _wide_project_kernel if wide else _project_kernel, lambda tile: (B * T * H * NB, 1, 1),
                (q, qr, beta, _flags(x, q), cos, sin, S, S if R is None else R, out),
                (eps, *_tokens(q), *_tokens(qr), *_tokens(beta), *_tokens(out), H, T, *[N // T] * (1 if wide else 2)),
                {"D": D, "R": D + denominator, "BD": BD, "NB": NB, "ROTARY": rotary, "WEIGHT": weight,
                 "MASK": x.mask is not None, "REVERSE": R is not None, "PRECISION": precision},
            )  # fmt: skip
        return out

    def project_backward(
        self, dout: Tensor, x: Inputs, states: States, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        B, N, H, D = x.q.shape
        T = x.decay.shape[1]
        q, q_rot, dout = _dense(x.q), _dense(x.q_rot), _dense(dout)  # type: ignore[assignment]
        assert q is not None
        rotary, cos, sin = _rotary(x, q_rot, q)
        qr = q if q_rot is None else q_rot
        R = D if states.z is None else D + 1
        dq = torch.empty(B, N, H, D, dtype=q.dtype, device=q.device)
        dq_rot = torch.empty_like(dq) if rotary == "given" else dq
        dX = torch.empty(B, H, T, R, D, dtype=torch.float32, device=q.device)
        if dq.numel():
            S, R_ = states.S, states.S if states.R is None else states.R
            BD, NB = self._gradient_blocks(q)
            tensors = dout, q, qr, _flags(x, q), cos, sin, S, R_
            strides = eps, *_tokens(dout), *_tokens(q), *_tokens(qr)
            options = {"D": D, "R": R, "BD": BD, "ROTARY": rotary, "MASK": x.mask is not None,
                       "REVERSE": states.R is not None}  # fmt: skip
            weight = dX
            if NB > 1:
                weight = torch.empty(B, H, T, N // T, dtype=torch.float32, device=q.device)
                dden = torch.empty(NB, *weight.shape, dtype=torch.float32, device=q.device)
                for only_den in (True, False)[R == D :]:
                    _launch(
                        _wide_query_gradient_kernel, lambda tile: (B * T * H * NB, 1, 1),
                        (*tensors, dq, dq_rot, dX, weight, dden),
                        (*strides, *_tokens(dq), H, T, N // T, weight.numel()),
                        {**options, "NB": NB, "ONLY_DEN": only_den, "PRECISION": self._precision(q.dtype)},
                    )  # fmt: skip
            else:
                _launch(
                    _query_gradient_kernel, lambda tile: (B * T * H, 1, 1),
                    (*tensors, dq, dq_rot, dX), (*strides, *_tokens(dq), H, T, N // T),
                    {**options, "PRECISION": self._precision(q.dtype)},
                )  # fmt: skip
            # float16 has no room for a weight of any size.
            _launch(
                _state_input_gradient_kernel, lambda tile: (B * T * H * NB * NB, 1, 1),
                (*tensors, dX, weight), (*strides, H, T, N // T),
                {**options, "NB": NB, "PRECISION": self._states(q.dtype)},
            )  # fmt: skip
        return dq, dq_rot if rotary == "given" else None, *_states(dX)  # type: ignore[return-value]

    def transitions_backward(
        self, x: Inputs, tr: Transitions, entering: Edges, states: States, adjoint: States
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        B, N, H, D = x.k.shape
        T = x.decay.shape[1]
        k, v, k_rot = _dense(x.k), _dense(x.v), _dense(x.k_rot)
        assert k is not None and v is not None
        rotary, cos, sin = _rotary(x, k_rot, k)
        kr = k if k_rot is None else k_rot
        R = D if states.z is None else D + 1
        BD, NB = self._gradient_blocks(k)
        separate = tr.A.shape[0] > 1
        reverse = states.R is not None
        before = _packed(entering.S, entering.z, R)
        P_dtype = torch.bfloat16 if self._precision(k.dtype) == "tf32" and k.dtype == torch.bfloat16 else torch.float32
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
            _launch(
                _transition_gradient_kernel, lambda tile: (B * H, T, NB * NB),
                (tr.A, x.decay, _flags(x, k), S, R_, S if before is None else before, G, F, P[0], P[-1], ddecay),
                (H, T, tr.A.stride(0), *x.decay.stride(), ddecay.stride(0)),
                {"D": D, "R": R, "BD": BD, "NB": NB, "MASK": x.mask is not None, "SEPARATE": separate,
                 "ENTERING": before is not None, "REVERSE": reverse, "PRECISION": tr.precision},
            )  # fmt: skip
            tensors = k, kr, v, x.beta, _flags(x, k), cos, sin, G, F, P[0], P[-1], dk, dk_rot, dbeta
            strides = (*_tokens(k), *_tokens(kr), *_tokens(v), *x.beta.stride(), *_tokens(dk), *dbeta.stride()[1:])
            options = {"D": D, "R": R, "BD": BD, "ROTARY": rotary, "MASK": x.mask is not None, "REVERSE": reverse}
            if NB > 1:
                _launch(
                    _wide_key_gradient_kernel, lambda tile: (B * T * H * NB, 1, 1),
                    tensors, (*strides, H, T, N // T, dbeta.stride(0)),
                    {**options, "NB": NB, "PRECISION": self._precision(k.dtype)},
                )  # fmt: skip
            else:
                _launch(
                    _key_gradient_kernel, lambda tile: (B * T * H, 1, 1), tensors, (*strides, H, T, N // T),
                    {**options, "PRECISION": self._precision(k.dtype)},
                )  # fmt: skip
        # dv = beta dU k~: keys meet the adjoint states as queries meet the states.
        dv = self._met_by(k, k_rot, x.beta, "beta", x, G, F if reverse else None, R > D, 0.0)
        gates = dbeta.sum(0).to(x.beta.dtype), ddecay.sum(0).to(x.decay.dtype)
        if NB == 1:
            gates = dbeta[0], ddecay[0]
        return dk, dv, *gates, dk_rot if rotary == "given" else None

    # the primitive's two chains: X_t = X_{t-1} A_t + B_t with any A (BH, T, D, D), B (BH, T, R, D), R = D and R = 1

    def _chains(
        self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None], *, adjoint: bool, keep: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Every state of both, and their last ones; the adjoint runs downwards with Aᵀ."""
        B = [b.contiguous() for b in B]
        BH, T, D, _ = B[0].shape
        rows = [D, B[1].shape[2]]
        if B[0].numel() == 0:
            ends = [b.new_zeros(BH, r, D) if x is None else x for x, b, r in zip(initial, B, rows, strict=True)]
            return B, ends
        came = None
        if any(x is not None for x in initial):
            came = torch.cat(
                [B[0].new_zeros(BH, r, D) if x is None else x for x, r in zip(initial, rows, strict=True)], 1
            )
        length = self._span_length(T, BH, D, rows[1], 1, 2, B[0].device)
        states = B
        if length < T:
            _, h, M = self._chains_spans(A, B, None, adjoint, length, 2, keep=False)
            into, ends = _compose(M[:, None], [h[:, None]], [came], T, length, (False, 0, 1), adjoint)
            came, out = into[0], ends[0].squeeze(1)
        if keep or length >= T:
            states, last, _ = self._chains_spans(A, B, came, adjoint, length, 0, keep=keep)
            out = last[:, 0 if adjoint else -1]
        return states, list(out.split(rows, 1))

    def _chains_spans(
        self, A: Sequence[Tensor], B: Sequence[Tensor], entering: Tensor | None, adjoint: bool, length: int,
        kinds: int, *, keep: bool,
    ) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
        """As `_scan_spans`: the states of each chain where kept, what leaves each span (BH, spans, D + R1, D), and the
        transition of both chains or of none (BH, spans, kinds, D, D)."""
        A0, A1 = A
        BH, T, D, _ = B[0].shape
        R1 = B[1].shape[2]
        BD, NB = _blocks(D)
        spans = _cdiv(T, length)
        states = [torch.empty_like(b) if keep else b for b in B]
        out = B[0].new_empty(BH, spans, D + R1, D)
        M = B[0].new_empty(BH, spans, kinds, D, D)
        rows, cols = (3, 2) if adjoint else (2, 3)
        _launch(
            _chains_kernel,
            lambda tile: (_cdiv(D, tile["BR"]) + _cdiv(R1, tile["BR"]), BH * spans, kinds + 1),
            (A0, A1, *B, out if entering is None else entering, *states, out, M),
            (T, spans, length, A0.stride(0), A0.stride(1), A1.stride(0), A1.stride(1), R1),
            {"A0_k": A0.stride(rows), "A0_n": A0.stride(cols), "A1_k": A1.stride(rows), "A1_n": A1.stride(cols),
             "D": D, "BD": BD, "NB": NB, "ADJOINT": adjoint, "HAS_IN": entering is not None, "HAS_STATES": keep,
             "KINDS": kinds, "PRECISION": self._precision(B[0].dtype)},
        )  # fmt: skip
        return states, out, M

    def scans(self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]:
        return self._chains(A, B, initial, adjoint=False, keep=True)[0]

    def scans_adjoint(
        self, A: Sequence[Tensor], dX: Sequence[Tensor], entering: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        return self._chains(A, dX, entering, adjoint=True, keep=True)

    def last_states(self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]:
        return self._chains(A, B, initial, adjoint=False, keep=False)[1]

    product = staticmethod(torch_kernels.product)


def _whole(dX: Tensor, dx: Tensor | None) -> Tensor:
    """dX and dx as one (B, H, T, R, D); where `project_backward` made them, they are views of it."""
    if dx is None:
        return dX.contiguous()
    B, H, T, D, _ = dX.shape
    if dX.stride(-3) == (D + 1) * D:
        return dX.as_strided((B, H, T, D + 1, D), dX.stride())
    return torch.cat([dX, dx.unsqueeze(-2)], -2)
