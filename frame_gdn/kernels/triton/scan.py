"""The scans of states on Triton: both directions of both states in one launch, in spans of frames side by side.

A program takes a block of state rows, which are independent. Where those leave most of the GPU idle, the clip is cut
into spans of frames, scanned side by side as shards over ranks are: what leaves each span and its transition, from
span to span, then each span from what entered it.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..types import Edges, States
from .launch import Settings, Tiles, cdiv, channel_blocks
from .tiles import scaled_rows


@triton.jit
def _load_square(
    ptr, row, col,
    stride_k: tl.constexpr, stride_n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, TRANSPOSED: tl.constexpr,
    DIAGONAL: tl.constexpr,
):  # fmt: skip
    """Block (row, col) of a (D, D) matrix as the right operand; TRANSPOSED where memory runs along its rows' index.

    With DIAGONAL the matrix's diagonal is zero here, for `_times_square` to multiply it apart.
    """
    offs = tl.arange(0, BD)
    k, n = row * BD + offs, col * BD + offs
    if TRANSPOSED:
        addresses = (ptr + n.to(tl.int64) * stride_n)[:, None] + k[None, :]
        keep = (n < D)[:, None] & (k < D)[None, :]
        if DIAGONAL and row == col:
            keep &= offs[:, None] != offs[None, :]
        return tl.trans(tl.load(addresses, mask=keep, other=0.0))
    else:
        across = n if stride_n == 1 else n.to(tl.int64) * stride_n
        addresses = (ptr + k.to(tl.int64) * stride_k)[:, None] + across[None, :]
        keep = (k < D)[:, None] & (n < D)[None, :]
        if DIAGONAL and row == col:
            keep &= offs[:, None] != offs[None, :]
        return tl.load(addresses, mask=keep, other=0.0)


@triton.jit
def _times_diagonal(s, ptr, block, stride: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Columns `block` of the rows times the matrix's diagonal, whose elements are `stride` apart, in float32."""
    n = block * BD + tl.arange(0, BD)
    return s * tl.load(ptr + n.to(tl.int64) * stride, mask=n < D, other=0.0)[None, :]


@triton.jit
def _times_square(
    s0, s1, ptr,
    stride_k: tl.constexpr, stride_n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr,
    TRANSPOSED: tl.constexpr, DIAGONAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows (s0 | s1) times a (D, D) matrix, each half scaled as the precision asks; s1 is anything where NB is 1.

    With DIAGONAL the matrix's diagonal is multiplied apart, on float32 units. A transition is near a diagonal matrix,
    and tensor cores cut off what does not fit their sums: over 121 frames a state that passed through them whole would
    lose 2e-5 of itself.
    """
    EXACT: tl.constexpr = PRECISION != "tf32"
    a00 = _load_square(ptr, 0, 0, stride_k, stride_n, D, BD, TRANSPOSED, DIAGONAL)
    x0, size0 = scaled_rows(s0, EXACT)
    p0 = tl.dot(x0, a00, input_precision=PRECISION) * size0[:, None]
    if DIAGONAL:
        p0 += _times_diagonal(s0, ptr, 0, stride_k + stride_n, D, BD)
    p1 = p0
    if NB == 2:
        x1, size1 = scaled_rows(s1, EXACT)
        a10 = _load_square(ptr, 1, 0, stride_k, stride_n, D, BD, TRANSPOSED, DIAGONAL)
        p0 += tl.dot(x1, a10, input_precision=PRECISION) * size1[:, None]
        a01 = _load_square(ptr, 0, 1, stride_k, stride_n, D, BD, TRANSPOSED, DIAGONAL)
        p1 = tl.dot(x0, a01, input_precision=PRECISION) * size0[:, None]
        a11 = _load_square(ptr, 1, 1, stride_k, stride_n, D, BD, TRANSPOSED, DIAGONAL)
        p1 += tl.dot(x1, a11, input_precision=PRECISION) * size1[:, None]
        if DIAGONAL:
            p1 += _times_diagonal(s1, ptr, 1, stride_k + stride_n, D, BD)
    return p0, p1


@triton.jit
def rows_of(row_block, ROWS, D: tl.constexpr, BR: tl.constexpr):
    """A block's first row, the row where it has to stop, and whether it is one of the rows from D on."""
    blocks: tl.constexpr = (D + BR - 1) // BR
    second = row_block >= blocks
    first_row = tl.where(second, D + (row_block - blocks) * BR, row_block * BR)
    return first_row, tl.where(second, ROWS, tl.minimum(ROWS, D)), second


@triton.jit
def split_program(ROWS, slots, D: tl.constexpr, BR: tl.constexpr):
    """The row block, which of a launch's parts, and which of its `slots`, in 64 bits, this program works on.

    All three are in the grid's first dimension, the others of which end at 65,535.
    """
    blocks = tl.cdiv(D, BR) + tl.cdiv(ROWS - D, BR)
    index = tl.program_id(0)
    return index % blocks, index // blocks // slots, (index // blocks % slots).to(tl.int64)


@triton.jit
def _is_end(t, ends):
    """Whether frame t is the last of its chunk; `ends` as `chunks.ChunkEnds`."""
    first, period, stop = ends
    return (t >= first) & (t < stop) & ((t - first) % period == 0)


@triton.jit
def _ends_before(t, ends):
    """How many of the frames 0 ... t - 1 are the last of their chunk."""
    first, period, stop = ends
    return tl.maximum((tl.minimum(t, stop) - first + period - 1) // period, 0)


@triton.jit
def scan_rows(
    first_row, last_row, sequence, edge, first, last, direction, transition,
    A_ptr, A_frame, U_ptr, g_ptr, entering, states, out_ptr, T, ends,
    ROWS, A_k: tl.constexpr, A_n: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr,
    FACTORED: tl.constexpr, TRANSPOSED: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN0: tl.constexpr, HAS_IN1: tl.constexpr, HAS_STATES: tl.constexpr, CUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of one sequence through its frames from `first` to before `last`, in one of two directions.

    Direction 0 is inclusive: S_t = S_{t-1} W_t + U_t upwards, or with ADJOINT G_t = U_t + G_{t+1} W_{t+1} downwards.
    Direction 1 is exclusive: R_t = R_{t+1} W_t + U_t downwards, or with ADJOINT F_{t+1} = U_t + F_t W_t upwards; what
    is kept of frame t is the state its queries multiply, and a chunk's end cuts. `entering` and `states` hold a
    pointer for each direction; `edge` is where a state enters in `entering` and leaves in out_ptr. With `transition`
    the rows are those of I and there is no U: what leaves is the W's product.
    """
    rows = first_row + tl.arange(0, BR)
    row_live = rows < last_row
    g_ptr += sequence * T
    cols = tl.arange(0, BD)
    tile = rows[:, None] * D + cols[None, :]
    keep0 = row_live[:, None] & (cols < D)[None, :]
    keep1 = row_live[:, None] & (cols + BD < D)[None, :]

    states_ptr, in_ptr = states[0], entering[0]
    if direction == 1:
        states_ptr, in_ptr = states[1], entering[1]
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
            if _is_end(t, ends):
                s0 = tl.zeros_like(s0)
                s1 = tl.zeros_like(s1)
        if HAS_STATES:
            slot = states_ptr + (sequence * T + t) * ROWS * D + tile
            tl.store(slot, s0, mask=keep0)
            if NB == 2:
                tl.store(slot + BD, s1, mask=keep1)

    for _ in tl.range(first, last, num_stages=STAGES):
        U_tile = U_ptr + (sequence * T + t) * ROWS * D + tile
        u0 = tl.load(U_tile, mask=keep0 & has_u, other=0.0)
        u1 = u0
        if NB == 2:
            u1 = tl.load(U_tile + BD, mask=keep1 & has_u, other=0.0)
        if ADJOINT:
            s0 = tl.where(add_first, s0 + u0, s0)
            s1 = tl.where(add_first, s1 + u1, s1)
        A_frame_ptr = A_ptr + t.to(tl.int64) * A_frame
        p0, p1 = _times_square(s0, s1, A_frame_ptr, A_k, A_n, D, BD, NB, TRANSPOSED, not FACTORED, PRECISION)
        if FACTORED:
            g = tl.load(g_ptr + t)
            p0 = g * (s0 - p0)
            p1 = g * (s1 - p1)
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
                if _is_end(end, ends):
                    s0 = tl.zeros_like(s0)
                    s1 = tl.zeros_like(s1)
        if HAS_STATES:
            if not add_first:
                kept0, kept1 = s0, s1
            inside = (slot_t >= first) & (slot_t < last)
            slot = states_ptr + (sequence * T + slot_t) * ROWS * D + tile
            tl.store(slot, kept0, mask=keep0 & inside)
            if NB == 2:
                tl.store(slot + BD, kept1, mask=keep1 & inside)
        t += step

    tl.store(out_ptr + edge + tile, s0, mask=keep0)
    if NB == 2:
        tl.store(out_ptr + edge + tile + BD, s1, mask=keep1)


@triton.jit
def _scan_kernel(
    A, U_ptr, g_ptr, entering, states, leaving, M_ptr, spans, ends, ROWS,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN0: tl.constexpr, HAS_IN1: tl.constexpr, HAS_STATES: tl.constexpr, KINDS: tl.constexpr, CUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Both directions of both states, by W = g (I - A), A symmetric, over spans of `length` frames side by side.

    Before them, KINDS of A's transitions of each span: the product of its W in the order that direction 0 takes them.
    A is (pointer, the strides of kind, sequence and frame); `spans` is T, their number, their length and B H times
    their number; `entering`, `states` and `leaving` hold a pointer for each direction.
    """
    A_ptr, A_kind, A_sequence, A_frame = A
    T, count, length, sequences_and_spans = spans
    row_block, part, slot = split_program(ROWS, sequences_and_spans, D, BR)
    direction = part - KINDS
    sequence, first = slot // count, (slot % count).to(tl.int32) * length
    last = tl.minimum(T, first + length)
    first_row, last_row, second = rows_of(row_block, ROWS, D, BR)
    edge = slot * ROWS * D
    out_ptr = leaving[0]
    if direction == 1:
        out_ptr = leaving[1]
    transition = False
    if KINDS > 0:
        transition = direction < 0
        if transition:
            last = tl.where(second, first, last)  # no such rows
            last_row = tl.where(second, 0, last_row)
            second = direction == -1 if KINDS == 2 else second
            edge = (slot * KINDS + part) * D * D
            out_ptr = M_ptr
            direction = 0
    scan_rows(
        first_row, last_row, sequence, edge, first, last, direction, transition,
        A_ptr + tl.where(second, A_kind, 0) + sequence * A_sequence, A_frame,
        U_ptr, g_ptr, entering, states, out_ptr, T, ends, ROWS, 1, D, D, BD, NB, BR,
        True, True, ADJOINT, HAS_IN0, HAS_IN1, HAS_STATES, CUT, PRECISION, STAGES,
    )  # fmt: skip


@triton.jit
def _compose_rows(
    row_block, sequence, M, h_ptr, in_ptr, into_ptr, out_ptr, spans, ends, ROWS,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr,
    DOWN: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_IN: tl.constexpr, CUT: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A block of rows of one sequence from span to span, X -> X M + h, or Mᵀ where TRANSPOSED: what enters each."""
    M_ptr, M_kind, M_span = M
    T, count, length, _ = spans
    first_row, last_row, second = rows_of(row_block, ROWS, D, BR)
    rows = first_row + tl.arange(0, BR)
    cols = tl.arange(0, BD)
    tile = rows[:, None] * D + cols[None, :]
    keep0 = (rows < last_row)[:, None] & (cols < D)[None, :]
    keep1 = (rows < last_row)[:, None] & (cols + BD < D)[None, :]
    M_ptr += sequence * count * M_span + tl.where(second, M_kind, 0)
    edge = sequence * ROWS * D + tile
    s0 = tl.load(in_ptr + edge, mask=keep0 & HAS_IN, other=0.0)
    s1 = s0
    if NB == 2:
        s1 = tl.load(in_ptr + edge + BD, mask=keep1 & HAS_IN, other=0.0)
    for i in tl.range(0, count, num_stages=STAGES):
        span = count - 1 - i if DOWN else i
        slot = (sequence * count + span) * ROWS * D + tile
        tl.store(into_ptr + slot, s0, mask=keep0)
        h0 = tl.load(h_ptr + slot, mask=keep0, other=0.0)
        h1 = h0
        if NB == 2:
            tl.store(into_ptr + slot + BD, s1, mask=keep1)
            h1 = tl.load(h_ptr + slot + BD, mask=keep1, other=0.0)
        M_of_span = M_ptr + span.to(tl.int64) * M_span
        if TRANSPOSED:
            s0, s1 = _times_square(s0, s1, M_of_span, 1, D, D, BD, NB, True, False, PRECISION)
        else:
            s0, s1 = _times_square(s0, s1, M_of_span, D, 1, D, BD, NB, False, False, PRECISION)
        if CUT:
            # Nothing passes a span that holds a chunk's end.
            before = _ends_before(span * length, ends)
            after = _ends_before(tl.minimum(T, (span + 1) * length), ends)
            s0 = tl.where(after == before, s0, 0.0)
            s1 = tl.where(after == before, s1, 0.0)
        s0 += h0
        s1 += h1
    tl.store(out_ptr + edge, s0, mask=keep0)
    if NB == 2:
        tl.store(out_ptr + edge + BD, s1, mask=keep1)


@triton.jit
def _compose_kernel(
    M, h, entering, into, leaving, spans, ends, ROWS,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN0: tl.constexpr, HAS_IN1: tl.constexpr, CUT: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The states that enter the spans of `_scan_kernel` in both directions, or of `_chains_kernel` in its one.

    M is (pointer, the strides of kind and span), `spans` T, their number, their length and B H; `h`, `entering`,
    `into` and `leaving` hold a pointer for each direction.
    """
    row_block, direction, sequence = split_program(ROWS, spans[3], D, BR)
    if direction == 0:
        _compose_rows(
            row_block, sequence, M, h[0], entering[0], into[0], leaving[0], spans, ends, ROWS, D, BD, NB, BR,
            ADJOINT, False, HAS_IN0, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        _compose_rows(
            row_block, sequence, M, h[1], entering[1], into[1], leaving[1], spans, ends, ROWS, D, BD, NB, BR,
            not ADJOINT, True, HAS_IN1, CUT, PRECISION, STAGES,
        )  # fmt: skip


# --- host functions ---------------------------------------------------------------------------------------------


_SCAN_TILES: dict[str, Tiles] = {
    "tf32": [
        {"BR": 32, "STAGES": 2, "num_warps": 4},
        {"BR": 16, "STAGES": 2, "num_warps": 2},
        {"BR": 16, "STAGES": 1, "num_warps": 4},
    ],
    "tf32x3": [
        {"BR": 64, "STAGES": 1, "num_warps": 8},
        {"BR": 32, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 1, "num_warps": 8},
    ],
}


_COMPOSE_TILES: Tiles = [
    {"BR": 16, "STAGES": 2, "num_warps": 8},
    {"BR": 16, "STAGES": 1, "num_warps": 8},
]


class FactoredTransitions(NamedTuple):
    """W = g (I - A) of every frame, kept as A and g, and U, in the layouts of `steps.py`; the precision of states.

    A is kept in place of W because a state then multiplies only a correction in tensor-core precision:
    S W = g (S - S A) carries S itself in float32, and the I of W is exact.
    """

    A: Tensor
    U: Tensor
    g: Tensor
    precision: str


#: Where no chunk ends, in the form of `_ends`.
_NO_ENDS = (0, 1, 0)


def _ends(flags: Sequence[bool]) -> tuple[int, int, int]:
    """The frames that are the last of their chunk as `chunks.ChunkEnds`: the first, their distance, where they stop.

    They are of one grid: between the first of a shard and the last, a whole number of distances lies.
    """
    ends = [t for t, is_end in enumerate(flags) if is_end]
    if not ends:
        return _NO_ENDS
    return ends[0], ends[1] - ends[0] if len(ends) > 1 else 1, ends[-1] + 1


def packed_rows(S: Tensor | None, z: Tensor | None, rows: int) -> Tensor | None:
    """States that enter a shard, (B, H, D, D) and (B, H, D), as one (B, H, ROWS, D) of `rows` ROWS; absent is zero."""
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


def split_rows(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """(..., ROWS, D) as views S (..., D, D) and z (..., D)."""
    if x is None:
        return None, None
    ROWS, D = x.shape[-2:]
    if ROWS == D:
        return x, None
    return x.narrow(-2, 0, D), x.select(-2, D)  # in half the time of a split


def _gradient_rows(dX: Tensor, dx: Tensor | None) -> Tensor:
    """dX and dx as one (B, H, T, ROWS, D); where `project_backward` made them, they are views of it."""
    if dx is None:
        return dX.contiguous()
    B, H, T, D, _ = dX.shape
    if dX.stride(-3) == (D + 1) * D:
        return dX.as_strided((B, H, T, D + 1, D), dX.stride())
    return torch.cat([dX, dx.unsqueeze(-2)], -2)


@functools.cache
def best_span(T: int, programs: int, transitions: int, multiprocessors: int) -> int:
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
        length = cdiv(T, spans)
        n = cdiv(T, length)
        passes = length * (load(n * (programs + transitions)) + load(n * programs)) + 1.7 * n * load(programs) + 4
        if passes < least:
            best, least = length, passes
        spans *= 2
    return best


def span_length(
    settings: Settings, T: int, BH: int, D: int, more: int, directions: int, kinds: int, device: torch.device
) -> int:
    """How many frames a scan takes one after the other; the rest of T runs beside them. See `best_span`."""
    if settings.spans is not None:
        return max(cdiv(T, settings.spans), 1)
    rows = cdiv(D, 32) + cdiv(more, 32)
    return best_span(T, BH * directions * rows, BH * kinds * cdiv(D, 32), settings.launcher.multiprocessors(device))


class Cut(NamedTuple):
    """How a scan runs over its frames: spans of `length`, where chunks end (as `_ends`), against time or along it,
    in one direction or in two."""

    length: int
    ends: tuple[int, int, int] = _NO_ENDS
    adjoint: bool = False
    directions: int = 1


def compose(
    settings: Settings, M: Tensor, h: Sequence[Tensor], initial: Sequence[Tensor | None], T: int, cut: Cut
) -> tuple[list[Tensor], list[Tensor]]:
    """The states that enter each span, (B, H, spans, ROWS, D) a direction, and what leaves the last, (B, H, ROWS, D).

    M (B, H, spans, kinds, D, D) are the spans' transitions in the order of direction 0, h what leaves them from zero.
    """
    B, H, spans, ROWS, D = h[0].shape
    BD, NB = channel_blocks(D)
    into = [torch.empty_like(x) for x in h]
    out = [x.new_empty(B, H, ROWS, D) for x in h]
    in0, in1 = (*initial, None)[:2]
    settings.launcher.launch(
        _compose_kernel, lambda tile: row_blocks(ROWS, D, tile) * B * H * len(h),
        ((M, D * D if M.shape[3] > 1 else 0, M.stride(2)), _pair(h),
         (M if in0 is None else in0, M if in1 is None else in1), _pair(into), _pair(out),
         (T, spans, cut.length, B * H), cut.ends, ROWS),
        {"D": D, "BD": BD, "NB": NB, "ADJOINT": cut.adjoint, "HAS_IN0": in0 is not None, "HAS_IN1": in1 is not None,
         "CUT": cut.ends != _NO_ENDS, "PRECISION": "tf32x3"}, _COMPOSE_TILES,
    )  # fmt: skip
    return into, out


def row_blocks(ROWS: int, D: int, tile: dict[str, int]) -> int:
    """How many blocks of rows `rows_of` counts: those below D and those from there on have blocks of their own."""
    return cdiv(D, tile["BR"]) + cdiv(ROWS - D, tile["BR"])


def _pair(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A tensor for each direction; the only one twice where there is no second direction."""
    return tensors[0], tensors[-1]


def _scan(
    settings: Settings, tr: FactoredTransitions, U: Tensor, entering: tuple[Tensor | None, Tensor | None],
    ends: Sequence[bool], *, reverse: bool, adjoint: bool, keep: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """Both directions' states (B, H, T, ROWS, D) where kept, and what leaves (B, H, ROWS, D)."""
    B, H, T, ROWS, D = U.shape
    directions = 2 if reverse else 1
    states = [U] * directions
    if U.numel() == 0:
        out = [U.new_zeros(B, H, ROWS, D) if x is None else x for x in entering[:directions]]
    else:
        length = span_length(settings, T, B * H, D, ROWS - D, directions, tr.A.shape[0], U.device)
        cut = Cut(length, _ends(ends), adjoint, directions)
        of_spans: Sequence[Tensor | None] = entering
        if length < T:
            _, h, M = _scan_spans(settings, tr, U, (), cut, kinds=tr.A.shape[0], keep=False)
            of_spans, out = compose(settings, M, h, entering, T, cut)
        if keep or length >= T:
            states, edges, _ = _scan_spans(settings, tr, U, of_spans, cut, kinds=0, keep=keep)
            last = (0, -1) if adjoint else (-1, 0)
            out = [x[:, :, span] for x, span in zip(edges, last, strict=False)]
    forward, backward = (*states, None)[:2] if keep else (None, None)
    return forward, backward, out[0], out[1] if reverse else None


def _scan_spans(
    settings: Settings, tr: FactoredTransitions, U: Tensor, entering: Sequence[Tensor | None], cut: Cut,
    *, kinds: int, keep: bool,
) -> tuple[list[Tensor], list[Tensor], Tensor]:  # fmt: skip
    """Spans of frames side by side: the states (B, H, T, ROWS, D) of each direction where kept, what leaves
    each span (B, H, spans, ROWS, D), and of the first `kinds` of A its transition (B, H, spans, kinds, D, D).

    What enters is one state a span, (B, H, spans, ROWS, D), which for a single span is (B, H, ROWS, D).
    """
    B, H, T, ROWS, D = U.shape
    BD, NB = channel_blocks(D)
    spans = cdiv(T, cut.length)
    states = [torch.empty_like(U) if keep else U for _ in range(cut.directions)]
    out = [U.new_empty(B, H, spans, ROWS, D) for _ in range(cut.directions)]
    M = U.new_empty(B, H, spans, kinds, D, D)
    in0, in1 = (*entering, None, None)[:2]
    settings.launcher.launch(
        _scan_kernel, lambda tile: row_blocks(ROWS, D, tile) * B * H * spans * (kinds + cut.directions),
        ((tr.A, tr.A.stride(0) if tr.A.shape[0] > 1 else 0, T * D * D, D * D), U, tr.g,
         (U if in0 is None else in0, U if in1 is None else in1), _pair(states or [U]), _pair(out or [U]), M,
         (T, spans, cut.length, B * H * spans), cut.ends, ROWS),
        {"D": D, "BD": BD, "NB": NB, "ADJOINT": cut.adjoint, "HAS_IN0": in0 is not None, "HAS_IN1": in1 is not None,
         "HAS_STATES": keep, "KINDS": kinds, "CUT": cut.ends != _NO_ENDS and cut.directions == 2,
         "PRECISION": tr.precision},
        _SCAN_TILES[tr.precision],
    )  # fmt: skip
    return states, out, M


def shard_transitions(settings: Settings, tr: FactoredTransitions) -> list[Tensor]:
    """W_first ... W_last of the numerator and of the denominator, (B, H, D, D) each."""
    kinds, B, H, T, D, _ = tr.A.shape
    normalize = tr.U.shape[-2] > D
    eye = torch.eye(D, dtype=torch.float32, device=tr.A.device)
    if tr.A.numel() == 0:
        M = eye.expand(B, H, 1, kinds, D, D)
    else:
        length = span_length(settings, T, B * H, D, 0, 0, kinds, tr.A.device)
        M = _scan_spans(settings, tr, tr.U, (), Cut(length, directions=0), kinds=kinds, keep=False)[2]
        if length < T:  # rows that start at I, with no input, in full float32 whatever torch allows a product
            rows = eye.repeat(B, H, kinds, 1)
            nothing = M.new_zeros(M.shape).flatten(3, 4)
            M = compose(settings, M, [nothing], [rows], T, Cut(length))[1][0].unflatten(2, (1, kinds, D))
    transitions = [m.contiguous() for m in M[:, :, 0].unbind(2)]
    return transitions * 2 if normalize and kinds == 1 else transitions


def scan_states(
    settings: Settings, tr: FactoredTransitions, entering: Edges, ends: Sequence[bool], reverse: bool
) -> tuple[States, Edges]:
    rows = tr.U.shape[-2]
    packed = packed_rows(entering.S, entering.z, rows), packed_rows(entering.R, entering.y, rows)
    S, R, S_out, R_out = _scan(settings, tr, tr.U, packed, ends, reverse=reverse, adjoint=False, keep=True)
    kept = States(*split_rows(S), *split_rows(R))  # type: ignore[arg-type]
    return kept, Edges(*split_rows(S_out), *split_rows(R_out))


def scan_states_adjoint(
    settings: Settings,
    tr: FactoredTransitions,
    dX: Tensor,
    dx: Tensor | None,
    entering: Edges,
    ends: Sequence[bool],
    reverse: bool,
) -> tuple[States, Edges]:
    dU = _gradient_rows(dX, dx)
    packed = packed_rows(entering.S, entering.z, dU.shape[-2]), packed_rows(entering.R, entering.y, dU.shape[-2])
    G, F, G_out, F_out = _scan(settings, tr, dU, packed, ends, reverse=reverse, adjoint=True, keep=True)
    kept = States(*split_rows(G), *split_rows(F))  # type: ignore[arg-type]
    return kept, Edges(*split_rows(G_out), *split_rows(F_out))


def leaving(
    settings: Settings, tr: FactoredTransitions, entering: Edges, ends: Sequence[bool], reverse: bool
) -> Edges:
    rows = tr.U.shape[-2]
    packed = packed_rows(entering.S, entering.z, rows), packed_rows(entering.R, entering.y, rows)
    _, _, S, R = _scan(settings, tr, tr.U, packed, ends, reverse=reverse, adjoint=False, keep=False)
    return Edges(*split_rows(S), *split_rows(R))


def leaving_adjoint(
    settings: Settings, tr: FactoredTransitions, dX: Tensor, dx: Tensor | None, ends: Sequence[bool], reverse: bool
) -> Edges:
    _, _, G, F = _scan(
        settings, tr, _gradient_rows(dX, dx), (None, None), ends, reverse=reverse, adjoint=True, keep=False
    )
    return Edges(*split_rows(G), *split_rows(F))
