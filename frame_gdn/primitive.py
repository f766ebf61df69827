"""`cp_frame_gdn_scan`: the states of a given frame recurrence over all ranks' frames."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks, parallel
from .agreement import Call
from .kernels.backends import backend_name, pick_backend
from .kernels.types import Backend, accumulation_dtype
from .scan import ScanOptions, frame_scan


class CpFrameGdnScanResult(NamedTuple):
    """Every local frame's states, and the state after the last active frame, the same on every rank.

    S_kv_all (BH, T_local, D, D) and S_z_all (BH, T_local, D) in the inputs' dtype; terminal_state_kv (BH, D, D) and
    terminal_state_z (BH, D) in float32 (float64 for float64 inputs).
    """

    S_kv_all: Tensor
    S_z_all: Tensor
    terminal_state_kv: Tensor
    terminal_state_z: Tensor


def cp_frame_gdn_scan(
    W_kv: Tensor,
    U_kv: Tensor,
    W_z: Tensor,
    U_z: Tensor,
    group: ProcessGroup | None = None,
    reverse: bool = False,
    truncate_to_active: int | None = None,
    *,
    initial_state: tuple[Tensor, Tensor] | None = None,
    frames_per_rank: Sequence[int] | None = None,
    gather: str = "collective",
    backend: str | Backend[Any] = "auto",
) -> tuple[Tensor, Tensor] | CpFrameGdnScanResult:
    """S_t = S_{t-1} W_kv_t + U_kv_t and z_t = W_z_t z_{t-1} + U_z_t over the frames of all ranks, in rank order.

    One exchange of O(D²) a head between ranks forward, one backward; none without a group. W need not be symmetric.
    First-order differentiable in every tensor. The recurrence is that of gated DeltaNet (arXiv 2412.06464) with a
    frame as the step, as SANA-WM uses it.

    Args:
        W_kv, U_kv, W_z: (BH, T_local, D, D). W_kv multiplies from the right, W_z from the left.
        U_z: (BH, T_local, D).
        group: the context-parallel group; None or a group of one communicates nothing.
        reverse: the chain of ranks runs from the last to the first. Each rank's tensors are taken in the order given,
            so the caller passes them already flipped in time.
        truncate_to_active: k, 1 <= k <= total frames: frames >= k, counted in time, are padding (transition I, input
            0). The result is then a `CpFrameGdnScanResult`, with the state after global frame k-1 on every rank (one
            broadcast more forward, one all-reduce more backward: its gradient is summed over the ranks that used it).
        initial_state: (S (BH, D, D), z (BH, D)), enters at the chain's first rank.
        frames_per_rank: every rank's T_local, if known; else asked in one tiny exchange, only for a truncation.
        gather: "collective", "list" or "p2p", how states travel; the results agree to the bit.
        backend: "torch", "triton", or "auto": triton where `backend_of` says so; or an object, as of
            `bidirectional_gdn`.

    Returns:
        (S_kv (BH, T_local, D, D), S_z (BH, T_local, D)) in the inputs' dtype, computed in float32 at least; or, where
        truncated, a `CpFrameGdnScanResult`.

    Raises:
        ValueError: for shapes, dtypes or devices that do not fit, a k out of range (on every rank alike), an unknown
            gather or backend, a group this process is not in, or ranks that disagree (found on the group's first
            call, and where `truncate_to_active` is given without `frames_per_rank`). On other calls, ranks whose calls
            differ return NaN, and so do the others where one refuses its initial_state. Where one refuses anything
            else, sends a message of another size, or has "p2p" where another has not, they fail when the transport
            does, at the group's timeout at the latest; the same call with a new group finds out why.
    """
    due = truncate_to_active is not None and frames_per_rank is None
    with parallel.checked(group, due=due):
        rank, size = parallel.rank_and_size(group)
        BH, T, D = _check(W_kv, U_kv, W_z, U_z)
        refused = parallel.refusal(partial(_check_state, initial_state, W_kv), group, due=due)
        if refused is not None:
            initial_state = None
        checks.flag("reverse", reverse)
        if truncate_to_active is not None and not checks.is_integer(truncate_to_active):
            raise ValueError(f"truncate_to_active must be None or an int, got {checks.shown(truncate_to_active)}")
        checks.choice("gather", gather, parallel.GATHERS)
        parallel.check_frames_per_rank(frames_per_rank, T, group)
        kernels = pick_backend(backend, W_kv)
        k = truncate_to_active
        facts = {
            "BH": BH, "D": D, "dtype": W_kv.dtype, "reverse": reverse, "truncate_to_active": k, "gather": gather,
            "backend": backend_name(backend),
        }  # fmt: skip
        if refused is not None:
            facts["refused"] = str(refused)
        given: str | None = "given" if initial_state is not None else "None"
        if initial_state is None and rank != (size - 1 if reverse else 0):
            given = None  # only the chain's first rank needs it, so that this one cannot tell
        call = Call("cp_frame_gdn_scan", facts, T, {"initial_state": given})
    counts, _, call = parallel.agree(call, group, frames_per_rank, positions=k is not None, check=False)

    wide = accumulation_dtype(W_kv.dtype)
    A = [W_kv.to(wide), W_z.to(wide).mT]
    B = [U_kv.to(wide), U_z.to(wide).unsqueeze(-2)]
    initial: list[Tensor | None] = [None, None]
    if initial_state is not None:
        initial = [initial_state[0].to(wide), initial_state[1].to(wide).unsqueeze(-2)]
    terminal = None
    if k is not None:
        assert counts is not None
        terminal, active = _truncation(k, counts, group, reverse)
        if active < T:
            positions = torch.arange(T, device=W_kv.device)
            keep = (positions >= T - active if reverse else positions < active).view(1, T, 1, 1)
            eye = torch.eye(D, dtype=wide, device=W_kv.device)
            A = [torch.where(keep, a, eye) for a in A]
            B = [torch.where(keep, b, 0.0) for b in B]
    S, z, *ends = frame_scan(A, B, initial, ScanOptions(reverse, group, gather, terminal, kernels, call))
    if refused is not None:
        raise refused
    S, z = S.to(W_kv.dtype), z.squeeze(-2).to(W_kv.dtype)
    return CpFrameGdnScanResult(S, z, ends[0], ends[1].squeeze(-2)) if ends else (S, z)


def _truncation(
    k: int, counts: Sequence[int], group: ProcessGroup | None, reverse: bool
) -> tuple[tuple[int, int], int]:
    """(rank, local position) of global frame k-1, and how many of this rank's frames are active."""
    total = sum(counts)
    if not 1 <= k <= total:
        raise ValueError(f"truncate_to_active must be between 1 and the total of {total} frames, got {k}")
    rank, _ = parallel.rank_and_size(group)
    start = 0
    owner = position = 0
    for r, count in enumerate(counts):
        if start <= k - 1 < start + count:
            owner, position = r, k - 1 - start
        start += count
    if reverse:
        position = counts[owner] - 1 - position
    return (owner, position), min(max(k - sum(counts[:rank]), 0), counts[rank])


def _check(W_kv: Tensor, U_kv: Tensor, W_z: Tensor, U_z: Tensor) -> tuple[int, int, int]:
    checks.tensor("W_kv", W_kv, ("BH", "T_local", "D", "D"))
    BH, T, D, _ = W_kv.shape
    shapes = {"W_kv": (W_kv, (BH, T, D, D)), "U_kv": (U_kv, (BH, T, D, D)), "W_z": (W_z, (BH, T, D, D))}
    for name, (tensor, shape) in {**shapes, "U_z": (U_z, (BH, T, D))}.items():
        checks.tensor(name, tensor, shape, dtype=W_kv.dtype, beside=("W_kv", W_kv))
    return BH, T, D


def _check_state(initial_state: tuple[Tensor, Tensor] | None, W_kv: Tensor) -> None:
    if initial_state is not None:
        BH, _, D, _ = W_kv.shape
        checks.pair("initial_state", initial_state, "(S, z)")
        checks.tensor("initial_state's S", initial_state[0], (BH, D, D), beside=("W_kv", W_kv))
        checks.tensor("initial_state's z", initial_state[1], (BH, D), beside=("W_kv", W_kv))
