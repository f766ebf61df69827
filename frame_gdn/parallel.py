"""Everything that is said between ranks: the handshake, the exchange of states, the halo. No other file issues a
collective.

Frames are sharded over the ranks of a context-parallel (CP) group in order; shards may be uneven or empty. Every rank
takes part in every collective, in the same order, whatever it holds.
"""

import contextlib
import copy
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from . import checks
from .kernels.types import accumulation_dtype

GATHERS = ("collective", "list", "p2p")

#: Up to this many ranks, one all-gather; beyond, a scan in ceil(log2 P) rounds, whose memory no longer grows with P.
MAX_GATHER_RANKS = 16


class FrameSharded(nn.Module):
    """A module that looks across frames. `group` is its CP group, None for all frames in one process.

    The group may be set at any time, is in no configuration and no `state_dict`, dropped by pickle and kept by
    reference in `copy.deepcopy`. `frame_gdn.parallelize` sets it on every such module of a model.
    """

    group: ProcessGroup | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FrameSharded":
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        clone.group = self.group
        return clone


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in `group` and the group's size; (0, 1) without a group.

    Raises ValueError for a group that this process is not in.
    """
    if group is None:
        return 0, 1
    rank = dist.get_rank(group) if isinstance(group, ProcessGroup) else -1
    if rank < 0:
        raise ValueError(f"group must be None or a process group that this process is a member of, got {group!r}")
    return rank, dist.get_world_size(group)


# --- agreement --------------------------------------------------------------------------------------------------

_met_before: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()
_FIELDS = ("call", "B", "H", "D", "dtype", "flags", "k")
_CALLS = ("cp_frame_gdn_scan", "bidirectional_gdn", "BidirectionalGDN", "other")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Call(NamedTuple):
    """What the ranks of a group must agree on. `flags` and `k` are the call's options and its chunk or truncation
    length."""

    name: str
    B: int
    H: int
    D: int
    dtype: torch.dtype
    flags: int
    frames: int
    k: int


@contextlib.contextmanager
def checked(group: ProcessGroup | None, *, due: bool = False) -> Iterator[None]:
    """Checks of one rank's input, made so that a ValueError on one rank is one on all where a handshake is due.

    Inside, raise ValueError freely. On a group's first call, and where the call makes a handshake `due` anyway, the
    ranks that found nothing wrong are in `agree` by then, and learn there that a peer refused.
    """
    try:
        yield
    except ValueError:
        _, size = rank_and_size(group)
        if group is not None and size > 1 and (due or group not in _met_before):
            gather_ints([1] + [0] * (len(_FIELDS) + 1), group)
        raise


def agree(
    call: Call, group: ProcessGroup | None, frames_per_rank: Sequence[int] | None, *, positions: bool, check: bool
) -> list[int] | None:
    """Every rank's frame count, by rank; None where nobody needs it and nobody said.

    A handshake (one fixed-size message) takes place on a group's first call, with check=True, and where `positions`
    are needed but `frames_per_rank` was not given. Disagreement is a ValueError on every rank.
    """
    rank, size = rank_and_size(group)
    if group is None or size == 1:
        return [call.frames]
    if not (check or group not in _met_before or (positions and frames_per_rank is None)):
        return None if frames_per_rank is None else list(frames_per_rank)
    dtype = _DTYPES.index(call.dtype) if call.dtype in _DTYPES else -1
    fields = [_CALLS.index(call.name), call.B, call.H, call.D, dtype, call.flags, call.k]
    table = gather_ints([0, *fields, call.frames], group)
    refused = [r for r, row in enumerate(table) if row[0]]
    if refused:
        raise ValueError(f"rank {refused[0]} of the group refused its input, see its error; rank {rank} stops with it")
    for i, field in enumerate(_FIELDS, start=1):
        values = [row[i] for row in table]
        if len(set(values)) > 1:
            names = {"call": _CALLS, "dtype": _DTYPES}.get(field)
            shown = values if names is None else [names[value] for value in values]
            raise ValueError(f"the ranks of the group disagree on {field}: rank by rank it is {shown}")
    frames = [row[-1] for row in table]
    if frames_per_rank is not None and list(frames_per_rank) != frames:
        raise ValueError(f"frames_per_rank says {list(frames_per_rank)}, the ranks hold {frames} frames")
    _met_before.add(group)
    return frames


def check_frames_per_rank(frames_per_rank: Sequence[int] | None, frames: int, group: ProcessGroup | None) -> None:
    """ValueError where a caller's frames_per_rank contradicts the group's size or this rank's own shard."""
    if frames_per_rank is None:
        return
    checks.integers("frames_per_rank", frames_per_rank, 0)
    rank, size = rank_and_size(group)
    if len(frames_per_rank) != size or frames_per_rank[rank] != frames:
        raise ValueError(
            f"frames_per_rank is {list(frames_per_rank)}, but the group has {size} ranks "
            f"and rank {rank} holds {frames} frames"
        )


def gather_ints(values: Sequence[int], group: ProcessGroup) -> list[list[int]]:
    """Every rank's integers, by rank: one tiny all-gather, on the CPU where the group can do that."""
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(values))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    return [[int(value) for value in row] for row in everyone.view(-1, len(values)).tolist()]


def frames_of_ranks(
    frames: int, group: ProcessGroup | None, frames_per_rank: Sequence[int] | None = None
) -> list[int]:
    """Every rank's frame count: what the caller said, else asked in one tiny exchange (none without a group)."""
    check_frames_per_rank(frames_per_rank, frames, group)
    if frames_per_rank is not None:
        return list(frames_per_rank)
    if group is None or rank_and_size(group)[1] == 1:
        return [frames]
    return [row[0] for row in gather_ints([frames], group)]


# --- the exchange of states -------------------------------------------------------------------------------------


class Arrivals(NamedTuple):
    """What an exchange brought to this rank. Lists run over the chains (numerator, denominator).

    rightward: the state that enters at this shard's first frame, from the ranks before it.
    leftward: the state that enters at its last frame, from the ranks after it.
    total: the rightward chain's end, the same on every rank; empty unless asked for.
    kept: every rank's transitions (P, ...), to be handed to the backward exchange; empty where nothing is kept.
    """

    rightward: list[Tensor]
    leftward: list[Tensor]
    total: list[Tensor]
    kept: list[Tensor]


def exchange(
    transitions: Sequence[Tensor],
    rightward: Sequence[Tensor],
    leftward: Sequence[Tensor],
    group: ProcessGroup,
    *,
    gather: str = "collective",
    kept: Sequence[Tensor] = (),
    rightward_open: Sequence[bool] | None = None,
    leftward_open: Sequence[bool] | None = None,
    leftward_initial: Sequence[Tensor] = (),
    total: bool = False,
) -> Arrivals:
    """Compose the shards' actions on the states that pass through them: X -> X M + h going right, X -> X Mᵀ + h left.

    Args:
        transitions: this shard's M, one a chain, (..., D, D).
        rightward, leftward: this shard's own contribution h, one a chain, (..., R, D); an empty list is no such
            direction.
        kept: `Arrivals.kept` of an exchange with the same transitions: they are then not sent again.
        rightward_open, leftward_open: by rank, whether the shard lets a state pass at all (False: M counts as 0).
        leftward_initial: this rank's share of what enters the leftward chain at its start; summed over ranks.
        total: also return the rightward chain's end.
    """
    rank, size = rank_and_size(group)
    if size > MAX_GATHER_RANKS:
        return _exchange_in_rounds(
            transitions, rightward, leftward, group, rightward_open, leftward_open, leftward_initial, total
        )
    chains = len(transitions)
    sent = [*([] if kept else transitions), *rightward, *leftward, *leftward_initial]
    received = _gather_packed(sent, group, gather)
    M = list(kept) or received[:chains]
    received = received if kept else received[chains:]
    rights, received = received[: len(rightward)], received[len(rightward) :]
    lefts, initials = received[: len(leftward)], received[len(leftward) :]

    right_in, left_in, totals = [], [], []
    for i in range(len(rights)):
        A = _closed(M[i], rightward_open)
        right_in.append(_fold(A[:rank], rights[i][:rank]))
        if total:
            totals.append(_fold(A, rights[i]))
    for i in range(len(lefts)):
        A, h = _closed(M[i], leftward_open).mT.flip(0), lefts[i].flip(0)
        if initials:
            A, h = torch.cat([torch.zeros_like(A[:1]), A]), torch.cat([initials[i].sum(0, keepdim=True), h])
        left_in.append(_fold(A[: len(A) - rank - 1], h[: len(h) - rank - 1]))
    return Arrivals(right_in, left_in, totals, M)


def _closed(M: Tensor, is_open: Sequence[bool] | None) -> Tensor:
    if is_open is None or all(is_open):
        return M
    return torch.stack([m if passes else torch.zeros_like(m) for m, passes in zip(M, is_open, strict=True)])


def _fold(A: Tensor, h: Tensor) -> Tensor:
    """The state after a chain of shards, from zero: a tree of depth ceil(log2 n). A (n, ..., D, D), h (n, ..., R,
    D)."""
    if len(h) == 0:
        return h.new_zeros(h.shape[1:])
    while len(h) > 1:
        even = len(h) // 2 * 2
        first, second = slice(0, even, 2), slice(1, even, 2)
        h = torch.cat([h[first] @ A[second] + h[second], h[even:]])
        A = torch.cat([A[first] @ A[second], A[even:]]) if len(h) > 1 else A
    return h[0]


def _gather_packed(tensors: Sequence[Tensor], group: ProcessGroup, gather: str) -> list[Tensor]:
    """One message a rank: every tensor of every rank, each as (P, *shape)."""
    size = dist.get_world_size(group)
    mine = _pack(tensors)
    everyone = mine.new_empty(size, mine.numel())
    if gather == "collective":
        dist.all_gather_into_tensor(everyone.view(-1), mine, group=group)
    elif gather == "list":
        dist.all_gather(list(everyone.unbind(0)), mine, group=group)
    else:
        rank = dist.get_rank(group)
        everyone[rank] = mine
        _point_to_point([(peer, mine, everyone[peer]) for peer in range(size) if peer != rank], group)
    pieces = everyone.split([t.numel() for t in tensors], dim=1)
    return [piece.reshape(size, *t.shape) for piece, t in zip(pieces, tensors, strict=True)]


def _point_to_point(messages: Sequence[tuple[int, Tensor, Tensor]], group: ProcessGroup) -> None:
    """Send and receive with each (peer, outgoing, incoming) at once."""
    operations = []
    for peer, outgoing, incoming in messages:
        operations.append(dist.P2POp(dist.isend, outgoing, group=group, group_peer=peer))
        operations.append(dist.P2POp(dist.irecv, incoming, group=group, group_peer=peer))
    for request in dist.batch_isend_irecv(operations) if operations else ():
        request.wait()


def _exchange_in_rounds(
    transitions: Sequence[Tensor],
    rightward: Sequence[Tensor],
    leftward: Sequence[Tensor],
    group: ProcessGroup,
    rightward_open: Sequence[bool] | None,
    leftward_open: Sequence[bool] | None,
    leftward_initial: Sequence[Tensor],
    total: bool,
) -> Arrivals:
    """The same as an exclusive scan in ceil(log2 P) rounds, both ways at once: after round i a rank knows 2^(i+1) - 1
    neighbours.

    Every rank joins every round: a round is one all_to_all_single, in which a rank writes only to rank ± 2^i.
    """
    rank, size = rank_and_size(group)
    start: list[Tensor] = []
    if leftward_initial:
        start = sum_over_ranks(leftward_initial, group)

    def own(h: Sequence[Tensor], is_open: Sequence[bool] | None, transpose: bool) -> list[tuple[Tensor, Tensor]]:
        passes = is_open is None or is_open[rank]
        own_M = [(M.mT if transpose else M).contiguous() if passes else torch.zeros_like(M) for M in transitions]
        return list(zip(own_M, h, strict=False))

    right, left = own(rightward, rightward_open, False), own(leftward, leftward_open, True)
    if start and rank == size - 1:  # what enters the leftward chain enters at the last rank
        left = [(M, X @ M + h) for (M, h), X in zip(left, start, strict=True)]
    right_before: list[tuple[Tensor, Tensor]] = []
    left_before: list[tuple[Tensor, Tensor]] = []
    distance = 1
    while distance < size:
        from_left, from_right = _round(right, left, distance, group)
        right, right_before = _join(from_left, right), _join(from_left, right_before)
        left, left_before = _join(from_right, left), _join(from_right, left_before)
        distance *= 2

    def arrived(before: list[tuple[Tensor, Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
        return [h for _, h in before] if before else [torch.zeros_like(h) for h in like]

    left_in = arrived(left_before, leftward)
    if start and rank == size - 1:
        left_in = start
    totals = broadcast([h for _, h in right], size - 1, group) if total else []
    return Arrivals(arrived(right_before, rightward), left_in, totals, [])


def _join(earlier: list[tuple[Tensor, Tensor]], later: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    if not earlier or not later:
        return earlier or later
    return [(A @ B, h @ B + g) for (A, h), (B, g) in zip(earlier, later, strict=True)]


def _round(
    right: list[tuple[Tensor, Tensor]], left: list[tuple[Tensor, Tensor]], distance: int, group: ProcessGroup
) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Send the rightward composites to rank + distance and the leftward ones to rank - distance; receive likewise."""
    rank, size = rank_and_size(group)
    pack = {side: [t for pair in pairs for t in pair] for side, pairs in (("right", right), ("left", left))}
    length = {side: sum(t.numel() for t in tensors) for side, tensors in pack.items()}
    before, after = rank - distance, rank + distance
    outgoing, send, receive = [], [0] * size, [0] * size
    if before >= 0:
        outgoing += pack["left"]
        send[before], receive[before] = length["left"], length["right"]
    if after < size:
        outgoing += pack["right"]
        send[after], receive[after] = length["right"], length["left"]
    example = (right or left)[0][0]
    message = _pack(outgoing) if outgoing else example.new_empty(0)
    arrived = example.new_empty(sum(receive))
    dist.all_to_all_single(arrived, message, receive, send, group=group)
    from_left, from_right = arrived.split(
        [receive[before] if before >= 0 else 0, receive[after] if after < size else 0]
    )

    def unpack(flat: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        if flat.numel() == 0:
            return []
        pieces = _unpack(flat, [t for pair in pairs for t in pair])
        return list(zip(pieces[0::2], pieces[1::2], strict=True))

    return unpack(from_left, right), unpack(from_right, left)


def broadcast(tensors: Sequence[Tensor], source: int, group: ProcessGroup) -> list[Tensor]:
    """The source rank's tensors, on every rank, in one broadcast."""
    packed = _pack(tensors)
    dist.broadcast(packed, group=group, group_src=source)
    return _unpack(packed, tensors)


def sum_over_ranks(tensors: Sequence[Tensor], group: ProcessGroup) -> list[Tensor]:
    """Each tensor summed over the ranks, in one all-reduce."""
    packed = _pack(tensors)
    dist.all_reduce(packed, group=group)
    return _unpack(packed, tensors)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors])


def _unpack(packed: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    return [piece.view(t.shape) for piece, t in zip(packed.split([t.numel() for t in like]), like, strict=True)]


# --- frames of other ranks --------------------------------------------------------------------------------------


class _FetchFrames(torch.autograd.Function):
    """Each rank receives the frames it wants from whoever holds them: one all_to_all_single.

    Backward sends every received frame's gradient back to its owner, who adds them up; nothing is saved but the plan.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: "_FetchPlan", group: ProcessGroup) -> Tensor:
        ctx.plan, ctx.group, ctx.frames = plan, group, x.shape[1]
        frames = x.transpose(0, 1)
        message = torch.cat([frames[:0], *(frames[first:stop] for first, stop in plan.runs)])
        arrived = message.new_empty(sum(plan.receive), *frames.shape[1:])
        _all_to_all(arrived, message, plan.receive, plan.send, group)
        return arrived.transpose(0, 1).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        plan: _FetchPlan = ctx.plan
        message = grad.transpose(0, 1).contiguous()
        arrived = message.new_empty(sum(plan.send), *message.shape[1:])
        _all_to_all(arrived, message, plan.send, plan.receive, ctx.group)
        dx = message.new_zeros(ctx.frames, *message.shape[1:], dtype=accumulation_dtype(grad.dtype))
        pieces = arrived.split([stop - first for first, stop in plan.runs])
        for (first, stop), piece in zip(plan.runs, pieces, strict=True):
            dx[first:stop] += piece
        return dx.transpose(0, 1).to(grad.dtype), None, None


class _FetchPlan(NamedTuple):
    """runs: which local frames are sent, as (first, stop), in the order of their receivers; send, receive: frames by
    rank."""

    runs: list[tuple[int, int]]
    send: list[int]
    receive: list[int]


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """[2, 3, 4, 7] -> [(2, 5), (7, 8)]"""
    runs: list[tuple[int, int]] = []
    for index in indices:
        if runs and runs[-1][1] == index:
            runs[-1] = (runs[-1][0], index + 1)
        else:
            runs.append((index, index + 1))
    return runs


def fetch_frames(
    x: Tensor, wanted: Sequence[Sequence[int]], group: ProcessGroup, frames_per_rank: Sequence[int]
) -> Tensor:
    """The frames that this rank wants, from whoever holds them: x (B, T_local, ...) -> (B, len(wanted[rank]), ...).

    `wanted` holds every rank's global frame indices in rising order, the same on all ranks. Differentiable; one
    all_to_all_single forward and one backward, whatever the shards hold.
    """
    rank, size = rank_and_size(group)
    start = sum(frames_per_rank[:rank])
    stop = start + frames_per_rank[rank]
    outgoing = [[index - start for index in indices if start <= index < stop] for indices in wanted]
    receive, first = [], 0
    for count in frames_per_rank:
        receive.append(sum(first <= index < first + count for index in wanted[rank]))
        first += count
    plan = _FetchPlan([run for indices in outgoing for run in _runs(indices)], [len(o) for o in outgoing], receive)
    fetched: Tensor = _FetchFrames.apply(x, plan, group)  # type: ignore[no-untyped-call]
    return fetched


def halo(
    x: Tensor, left: int, right: int, group: ProcessGroup | None, frames_per_rank: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """The `left` frames before and the `right` frames after this shard: x (B, T_local, ...) -> two of (B, width, ...).

    Zeros beyond the clip. Shards shorter than the halo are fine: the frames then come from several ranks.
    Differentiable; one all_to_all_single forward and one backward, none without a group.
    """
    rank, size = rank_and_size(group)
    if group is None or size == 1:
        return x.new_zeros(x.shape[0], left, *x.shape[2:]), x.new_zeros(x.shape[0], right, *x.shape[2:])
    counts = frames_of_ranks(x.shape[1], group, frames_per_rank)
    total, first, wanted, edges = sum(counts), 0, [], []
    for count in counts:
        before = list(range(max(first - left, 0), first)) if count else []
        after = list(range(first + count, min(first + count + right, total))) if count else []
        wanted.append(before + after)
        edges.append((len(before), len(after)))
        first += count
    got_left, got_right = fetch_frames(x, wanted, group, counts).split(edges[rank], dim=1)
    padding = x.new_zeros(x.shape[0], left + right, *x.shape[2:])
    return (
        torch.cat([padding[:, : left - edges[rank][0]], got_left], 1),
        torch.cat([got_right, padding[:, : right - edges[rank][1]]], 1),
    )


def gather_frames(x: Tensor, group: ProcessGroup | None, frames_per_rank: Sequence[int] | None = None) -> Tensor:
    """All frames of the clip on every rank: x (B, T_local, ...) -> (B, T, ...). Backward sums the ranks' gradients."""
    _, size = rank_and_size(group)
    if group is None or size == 1:
        return x
    counts = frames_of_ranks(x.shape[1], group, frames_per_rank)
    return fetch_frames(x, [range(sum(counts))] * size, group, counts)


def _all_to_all(arrived: Tensor, message: Tensor, receive: list[int], send: list[int], group: ProcessGroup) -> None:
    """all_to_all_single over the first dimension, as bytes: every dtype travels on every backend."""
    flat = [t.reshape(t.shape[0], -1) if t.numel() else t.new_empty(t.shape[0], 0) for t in (arrived, message)]
    dist.all_to_all_single(flat[0].view(torch.uint8), flat[1].view(torch.uint8), receive, send, group=group)
