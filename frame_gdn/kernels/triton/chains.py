"""The primitive's two chains on Triton, X_t = X_{t-1} A_t + B_t: any A (BH, T, D, D), B (BH, T, ROWS, D) of D rows and
of one row, in spans of frames as those of `scan.py`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Settings, Tiles, cdiv, channel_blocks
from .scan import Cut, compose, row_blocks, rows_of, scan_rows, span_length, split_program


@triton.jit
def _chains_kernel(
    A0, A1, B, in_ptr, states, out_ptr, M_ptr, spans, R1,
    A0_k: tl.constexpr, A0_n: tl.constexpr, A1_k: tl.constexpr, A1_n: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr, ADJOINT: tl.constexpr,
    HAS_IN: tl.constexpr, HAS_STATES: tl.constexpr, KINDS: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Two chains X_t = X_{t-1} A_t + B_t of D and R1 rows, any A, side by side, in spans as those of `_scan_kernel`.

    A0 and A1 are (pointer, the strides of sequence and frame), B and `states` hold a pointer for each chain, `spans`
    is as there. What enters and leaves holds both chains' rows, chain 0's first.
    """
    T, count, length, slots = spans
    row_block, part, slot = split_program(D + R1, slots, D, BR)
    sequence, first = slot // count, (slot % count).to(tl.int32) * length
    last = tl.minimum(T, first + length)
    first_row, last_row, second = rows_of(row_block, D + R1, D, BR)
    edge = slot * (D + R1) * D
    transition = False
    if KINDS > 0:
        transition = part < KINDS
        if transition:
            last = tl.where(second, first, last)  # no such rows
            last_row = tl.where(second, 0, last_row)
            second = part == KINDS - 1
            edge = (slot * KINDS + part) * D * D
            out_ptr = M_ptr
    if second:
        start = tl.where(transition, 0, D)  # chain 1's rows count from 0 in its own tensors
        scan_rows(
            first_row - start, last_row - start, sequence, edge + start * D, first, last, 0, transition,
            A1[0] + sequence * A1[1], A1[2], B[1], B[1], (in_ptr, in_ptr), (states[1], states[1]), out_ptr, T,
            (0, 1, 0), R1, A1_k, A1_n, D, BD, NB, BR,
            False, A1_k == 1, ADJOINT, HAS_IN, False, HAS_STATES, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        scan_rows(
            first_row, last_row, sequence, edge, first, last, 0, transition,
            A0[0] + sequence * A0[1], A0[2], B[0], B[0], (in_ptr, in_ptr), (states[0], states[0]), out_ptr, T,
            (0, 1, 0), D, A0_k, A0_n, D, BD, NB, BR,
            False, A0_k == 1, ADJOINT, HAS_IN, False, HAS_STATES, False, PRECISION, STAGES,
        )  # fmt: skip


# --- host functions ---------------------------------------------------------------------------------------------


_CHAINS_TILES: Tiles = [
    {"BR": 32, "STAGES": 2, "num_warps": 8},
    {"BR": 16, "STAGES": 2, "num_warps": 8},
    {"BR": 16, "STAGES": 1, "num_warps": 8},
]


def _chains(
    settings: Settings,
    A: Sequence[Tensor],
    B: Sequence[Tensor],
    initial: Sequence[Tensor | None],
    *,
    adjoint: bool,
    keep: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Every state of both, and their last ones; the adjoint runs downwards with Aᵀ."""
    B = [b.contiguous() for b in B]
    BH, T, D, _ = B[0].shape
    rows = [D, B[1].shape[2]]
    if B[0].numel() == 0:
        ends = [b.new_zeros(BH, r, D) if x is None else x for x, b, r in zip(initial, B, rows, strict=True)]
        return B, ends
    entering = None
    if any(x is not None for x in initial):
        states = [B[0].new_zeros(BH, r, D) if x is None else x for x, r in zip(initial, rows, strict=True)]
        entering = torch.cat(states, 1)
    cut = Cut(span_length(settings, T, BH, D, rows[1], 1, 2, B[0].device), adjoint=adjoint)
    states = B
    if cut.length < T:
        _, h, M = _chains_spans(settings, A, B, None, cut, kinds=2, keep=False)
        into, ends = compose(settings, M[:, None], [h[:, None]], [entering], T, cut)
        entering, out = into[0], ends[0].squeeze(1)
    if keep or cut.length >= T:
        states, last, _ = _chains_spans(settings, A, B, entering, cut, kinds=0, keep=keep)
        out = last[:, 0 if adjoint else -1]
    return states, list(out.split(rows, 1))


def _chains_spans(
    settings: Settings, A: Sequence[Tensor], B: Sequence[Tensor], entering: Tensor | None, cut: Cut,
    *, kinds: int, keep: bool,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """As `_scan_spans`: the states of each chain where kept, what leaves each span (BH, spans, D + R1, D), and the
    transition of both chains or of none (BH, spans, kinds, D, D)."""
    A0, A1 = A
    BH, T, D, _ = B[0].shape
    R1 = B[1].shape[2]
    BD, NB = channel_blocks(D)
    spans = cdiv(T, cut.length)
    states = [torch.empty_like(b) if keep else b for b in B]
    out = B[0].new_empty(BH, spans, D + R1, D)
    M = B[0].new_empty(BH, spans, kinds, D, D)
    rows, cols = (3, 2) if cut.adjoint else (2, 3)
    settings.launcher.launch(
        _chains_kernel, lambda tile: row_blocks(D + R1, D, tile) * BH * spans * (kinds + 1),
        ((A0, *A0.stride()[:2]), (A1, *A1.stride()[:2]), tuple(B), out if entering is None else entering,
         tuple(states), out, M, (T, spans, cut.length, BH * spans), R1),
        {"A0_k": A0.stride(rows), "A0_n": A0.stride(cols), "A1_k": A1.stride(rows), "A1_n": A1.stride(cols),
         "D": D, "BD": BD, "NB": NB, "ADJOINT": cut.adjoint, "HAS_IN": entering is not None, "HAS_STATES": keep,
         "KINDS": kinds, "PRECISION": settings.token_precision(B[0].dtype)}, _CHAINS_TILES,
    )  # fmt: skip
    return states, out, M


def scans(
    settings: Settings, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]
) -> list[Tensor]:
    return _chains(settings, A, B, initial, adjoint=False, keep=True)[0]


def scans_adjoint(
    settings: Settings, A: Sequence[Tensor], dX: Sequence[Tensor], entering: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    return _chains(settings, A, dX, entering, adjoint=True, keep=True)


def last_states(
    settings: Settings, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]
) -> list[Tensor]:
    return _chains(settings, A, B, initial, adjoint=False, keep=False)[1]
