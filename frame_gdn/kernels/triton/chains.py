"""The primitive's two chains on Triton, X_t = X_{t-1} A_t + B_t: any A (BH, T, D, D), B (BH, T, R, D) of R = D and
R = 1 rows, in spans of frames as those of `scan.py`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Settings, Tiles, cdiv, channel_blocks
from .scan import compose, rows_of, scan_rows, span_length


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
    first_row, last_row, second = rows_of(row_block, D + R1, D, BR)
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
        scan_rows(
            first_row - start, last_row - start, sequence, edge + start * D, first, last, 0, transition,
            A1_ptr + sequence * A1_seq, B1_ptr, B1_ptr, in_ptr, in_ptr, states1_ptr, states1_ptr, out_ptr,
            T, A1_frame, 0, 1, R1, A1_k, A1_n, D, BD, NB, BR,
            False, A1_k == 1, ADJOINT, HAS_IN, False, HAS_STATES, False, PRECISION, STAGES,
        )  # fmt: skip
    else:
        scan_rows(
            first_row, last_row, sequence, edge, first, last, 0, transition,
            A0_ptr + sequence * A0_seq, B0_ptr, B0_ptr, in_ptr, in_ptr, states0_ptr, states0_ptr, out_ptr,
            T, A0_frame, 0, 1, D, A0_k, A0_n, D, BD, NB, BR,
            False, A0_k == 1, ADJOINT, HAS_IN, False, HAS_STATES, False, PRECISION, STAGES,
        )  # fmt: skip


# --- host functions ---------------------------------------------------------------------------------------------


_CHAINS_TILES: Tiles = {
    "tf32x3": [
        {"BR": 32, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 2, "num_warps": 8},
        {"BR": 16, "STAGES": 1, "num_warps": 8},
    ],
}


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
    came = None
    if any(x is not None for x in initial):
        came = torch.cat([B[0].new_zeros(BH, r, D) if x is None else x for x, r in zip(initial, rows, strict=True)], 1)
    length = span_length(settings, T, BH, D, rows[1], 1, 2, B[0].device)
    states = B
    if length < T:
        _, h, M = _chains_spans(settings, A, B, None, adjoint, length, 2, keep=False)
        into, ends = compose(settings, M[:, None], [h[:, None]], [came], T, length, (False, 0, 1), adjoint)
        came, out = into[0], ends[0].squeeze(1)
    if keep or length >= T:
        states, last, _ = _chains_spans(settings, A, B, came, adjoint, length, 0, keep=keep)
        out = last[:, 0 if adjoint else -1]
    return states, list(out.split(rows, 1))


def _chains_spans(
    settings: Settings, A: Sequence[Tensor], B: Sequence[Tensor], entering: Tensor | None, adjoint: bool, length: int,
    kinds: int, *, keep: bool,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """As `_scan_spans`: the states of each chain where kept, what leaves each span (BH, spans, D + R1, D), and the
    transition of both chains or of none (BH, spans, kinds, D, D)."""
    A0, A1 = A
    BH, T, D, _ = B[0].shape
    R1 = B[1].shape[2]
    BD, NB = channel_blocks(D)
    spans = cdiv(T, length)
    states = [torch.empty_like(b) if keep else b for b in B]
    out = B[0].new_empty(BH, spans, D + R1, D)
    M = B[0].new_empty(BH, spans, kinds, D, D)
    rows, cols = (3, 2) if adjoint else (2, 3)
    settings.launcher.launch(
        _chains_kernel,
        lambda tile: (cdiv(D, tile["BR"]) + cdiv(R1, tile["BR"]), BH * spans, kinds + 1),
        (A0, A1, *B, out if entering is None else entering, *states, out, M),
        (T, spans, length, A0.stride(0), A0.stride(1), A1.stride(0), A1.stride(1), R1),
        {"A0_k": A0.stride(rows), "A0_n": A0.stride(cols), "A1_k": A1.stride(rows), "A1_n": A1.stride(cols),
         "D": D, "BD": BD, "NB": NB, "ADJOINT": adjoint, "HAS_IN": entering is not None, "HAS_STATES": keep,
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
