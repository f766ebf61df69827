"""Everything that is said between ranks: the handshake (in `handshake`), the exchange of states, the halo. No other
file issues a collective.

Frames are sharded over the ranks of a context-parallel (CP) group in order; shards may be uneven or empty. Every rank
takes part in every collective, in the same order, whatever it holds.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from . import agreement
from .agreement import Call
from .handshake import Agreed as Agreed
from .handshake import agree as agree
from .handshake import check_frames_per_rank as check_frames_per_rank
from .handshake import checked as checked
from .handshake import gather_ints as gather_ints
from .handshake import rank_and_size as rank_and_size
from .handshake import refusal as refusal
from .handshake import sending
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
    call: Call | None = None,
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
        call: what the message belongs to. Where another rank's call differs, every state in the result is NaN, also
            that which enters the first shard, which is zero otherwise. The host does not wait for it.
    """
    rank, size = rank_and_size(group)
    if size > MAX_GATHER_RANKS:
        return _exchange_in_rounds(
            transitions, rightward, leftward, group, rightward_open, leftward_open, leftward_initial, total, call
        )
    chains = len(transitions)
    sent = [*([] if kept else transitions), *rightward, *leftward, *leftward_initial]
    # A header comes first: of a message that is shorter than this rank's own, it has arrived.
    headers, *received = _gather_packed([_header(call, sent[0]), *sent], group, gather)
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
    if call is not None:
        poison = agreement.poison(agreement.merged(headers))
        right_in, left_in, totals = ([t + poison for t in states] for states in (right_in, left_in, totals))
    return Arrivals(right_in, left_in, totals, M)


def _header(call: Call | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if call is None else call.header(like)


def _closed(M: Tensor, is_open: Sequence[bool] | None) -> Tensor:
    if is_open is None or all(is_open):
        return M
    return torch.stack([m if passes else torch.zeros_like(m) for m, passes in zip(M, is_open, strict=True)])


def _fold(A: Tensor, h: Tensor) -> Tensor:
    """The state after a chain of shards, from zero: a tree of depth ceil(log2 n). A (n, ..., D, D), h (n, ..., R, D).

    In float64: what is composed is small, and no switch of torch lowers the precision of such a product.
    """
    if len(h) == 0:
        return h.new_zeros(h.shape[1:])
    dtype = h.dtype
    if len(h) > 1:
        A, h = A.double(), h.double()
    while len(h) > 1:
        even = len(h) // 2 * 2
        first, second = slice(0, even, 2), slice(1, even, 2)
        h = torch.cat([_product(h[first], A[second]) + h[second], h[even:]])
        A = torch.cat([_product(A[first], A[second]), A[even:]]) if len(h) > 1 else A
    return h[0].to(dtype)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return torch.einsum("...ij,...jk->...ik", a, b)


def _gather_packed(tensors: Sequence[Tensor], group: ProcessGroup, gather: str) -> list[Tensor]:
    """One message a rank: every tensor of every rank, each as (P, *shape)."""
    size = dist.get_world_size(group)
    mine = _pack(tensors)
    everyone = mine.new_empty(size, mine.numel())
    with sending("an exchange of states"):
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
    call: Call | None,
) -> Arrivals:
    """The same as an exclusive scan in ceil(log2 P) rounds, both ways at once: after round i a rank knows 2^(i+1) - 1
    neighbours.

    Every rank joins every round: a round is one all_to_all_single, in which a rank writes only to rank ± 2^i. With
    the composites travels the header of all ranks that they are of, so that in the end every rank has seen all.
    """
    rank, size = rank_and_size(group)
    start: list[Tensor] = []
    if leftward_initial:
        start = sum_over_ranks(leftward_initial, group, call)

    def own(h: Sequence[Tensor], is_open: Sequence[bool] | None, transpose: bool) -> list[tuple[Tensor, Tensor]]:
        passes = is_open is None or is_open[rank]
        own_M = [(M.mT if transpose else M).contiguous() if passes else torch.zeros_like(M) for M in transitions]
        return list(zip(own_M, h, strict=False))

    right, left = own(rightward, rightward_open, False), own(leftward, leftward_open, True)
    if start and rank == size - 1:  # what enters the leftward chain enters at the last rank
        left = [(M, _after(X, M, h)) for (M, h), X in zip(left, start, strict=True)]
    right_before: list[tuple[Tensor, Tensor]] = []
    left_before: list[tuple[Tensor, Tensor]] = []
    header = _header(call, transitions[0])
    distance = 1
    while distance < size:
        headers, from_left, from_right = _round(header, right, left, distance, group)
        header = header if call is None else agreement.merged(torch.stack(headers))
        right, right_before = _join(from_left, right), _join(from_left, right_before)
        left, left_before = _join(from_right, left), _join(from_right, left_before)
        distance *= 2

    def arrived(before: list[tuple[Tensor, Tensor]], like: Sequence[Tensor]) -> list[Tensor]:
        return [h for _, h in before] if before else [torch.zeros_like(h) for h in like]

    left_in = arrived(left_before, leftward)
    if start and rank == size - 1:
        left_in = start
    right_in = arrived(right_before, rightward)
    totals = broadcast([h for _, h in right], size - 1, group, call) if total else []
    if call is not None:
        poison = agreement.poison(header)
        right_in, left_in, totals = ([t + poison for t in states] for states in (right_in, left_in, totals))
    return Arrivals(right_in, left_in, totals, [])


def _join(earlier: list[tuple[Tensor, Tensor]], later: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    if not earlier or not later:
        return earlier or later
    return [(_after(A, B), _after(h, B, g)) for (A, h), (B, g) in zip(earlier, later, strict=True)]


def _after(X: Tensor, M: Tensor, h: Tensor | None = None) -> Tensor:
    """X M + h, computed in float64, in X's dtype."""
    after = _product(X.double(), M.double())
    return (after if h is None else after + h).to(X.dtype)


def _round(
    header: Tensor,
    right: list[tuple[Tensor, Tensor]],
    left: list[tuple[Tensor, Tensor]],
    distance: int,
    group: ProcessGroup,
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Send the rightward composites to rank + distance and the leftward ones to rank - distance; receive likewise.

    Before either goes the header. Returns this rank's header and those that arrived, then what came from either side.
    """
    rank, size = rank_and_size(group)
    mine = {rank - distance: [t for pair in left for t in pair], rank + distance: [t for pair in right for t in pair]}
    # What a neighbour sends this way is like what this rank sends the other way.
    theirs = dict(zip(mine, reversed(mine.values()), strict=True))
    send, receive, outgoing = [0] * size, [0] * size, []
    for peer in mine:
        if 0 <= peer < size:
            outgoing += [header, *mine[peer]]
            send[peer] = sum(t.numel() for t in (header, *mine[peer]))
            receive[peer] = sum(t.numel() for t in (header, *theirs[peer]))
    message = _pack(outgoing) if outgoing else header[:0]
    arrived = message.new_empty(sum(receive))
    with sending("an exchange of states"):
        dist.all_to_all_single(arrived, message, receive, send, group=group)
    headers, sides = [header], []
    for peer, part in zip(mine, arrived.split([receive[p] if 0 <= p < size else 0 for p in mine]), strict=True):
        pieces = _unpack(part, [header, *theirs[peer]]) if 0 <= peer < size else []
        headers += pieces[:1]
        sides.append(list(zip(pieces[1::2], pieces[2::2], strict=True)))
    return headers, sides[0], sides[1]


def broadcast(tensors: Sequence[Tensor], source: int, group: ProcessGroup, call: Call | None = None) -> list[Tensor]:
    """The source rank's tensors, on every rank, in one broadcast; NaN where that rank's call differs from this one."""
    header = _header(call, tensors[0])
    packed = _pack([header, *tensors])
    with sending("a broadcast"):
        dist.broadcast(packed, group=group, group_src=source)
    sent, *received = _unpack(packed, [header, *tensors])
    if call is None:
        return received
    poison = agreement.poison(agreement.merged(torch.stack([sent, header])))
    return [t + poison for t in received]


def sum_over_ranks(tensors: Sequence[Tensor], group: ProcessGroup, call: Call | None = None) -> list[Tensor]:
    """Each tensor summed over the ranks, in one all-reduce; NaN where the ranks' calls differ."""
    header = _header(call, tensors[0])
    packed = _pack([header, *tensors])
    with sending("a sum over the ranks"):
        dist.all_reduce(packed, group=group)
    summed, *sums = _unpack(packed, [header, *tensors])
    if call is None:
        return sums
    poison = agreement.poison_of_sum(summed, header, dist.get_world_size(group))
    return [t + poison for t in sums]


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
    def forward(ctx: Any, x: Tensor, plan: "_FetchPlan", group: ProcessGroup, call: Call) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.group, ctx.call, ctx.frames = plan, group, call, x.shape[1]
        frames = x.transpose(0, 1)
        outgoing = [[frames[first:stop] for first, stop in runs] for runs in plan.runs]
        arrived, poison = _swap_frames(outgoing, plan.receive, frames, group, call)
        fetched = x.new_empty(x.shape[0], sum(plan.receive), *x.shape[2:])
        for frame, piece in zip(fetched.split(plan.receive, 1), arrived, strict=True):
            if x.is_floating_point():
                torch.add(piece.transpose(0, 1), poison, out=frame)
            else:
                frame.copy_(piece.transpose(0, 1))
        ctx.mark_non_differentiable(poison)
        return fetched, poison

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        plan: _FetchPlan = ctx.plan
        wide = accumulation_dtype(grad.dtype)
        outgoing = [[piece] for piece in grad.transpose(0, 1).split(plan.receive)]
        counts = [sum(stop - first for first, stop in runs) for runs in plan.runs]
        arrived, poison = _swap_frames(outgoing, counts, grad.transpose(0, 1), ctx.group, ctx.call.also(backward=True))
        dx = poison.to(wide).expand(ctx.frames, *arrived[0].shape[1:]).contiguous()
        for runs, pieces in zip(plan.runs, arrived, strict=True):
            lengths = [stop - first for first, stop in runs]
            for (first, stop), piece in zip(runs, pieces.split(lengths), strict=True):
                dx[first:stop] += piece
        return dx.transpose(0, 1).to(grad.dtype), None, None, None


class _FetchPlan(NamedTuple):
    """runs: by receiving rank, which local frames it is sent, as (first, stop); receive: by sending rank, how many
    frames arrive from it."""

    runs: list[list[tuple[int, int]]]
    receive: list[int]


def _swap_frames(
    outgoing: Sequence[Sequence[Tensor]], receive: Sequence[int], like: Tensor, group: ProcessGroup, call: Call
) -> tuple[list[Tensor], Tensor]:
    """One all_to_all_single of bytes, so that every dtype travels on every backend.

    Args:
        outgoing: by receiving rank, pieces of frames (n, ...).
        receive: by sending rank, how many frames.
        like: (any number, ...), of a frame's shape and dtype.

    Returns:
        By sending rank, its frames (n, ...); and 0, or NaN where a rank's call differs.
    """
    header = call.header(like.new_empty(0, dtype=torch.float32)).view(torch.uint8)
    frame_bytes = math.prod(like.shape[1:]) * like.element_size()

    def padding(frames: int) -> int:  # so that headers and frames start where their dtype can
        return -frames * frame_bytes % 16

    pieces: list[Tensor] = []
    send: list[int] = []
    as_bytes: dict[tuple[int, int], Tensor] = {}  # a gather sends the same frames to every rank: lay them out once
    for runs in outgoing:
        start = len(pieces)
        pieces.append(header)
        for run in runs:
            place = (int(run.storage_offset()), len(run))
            if place not in as_bytes:
                as_bytes[place] = run.contiguous().view(-1).view(torch.uint8) if run.numel() else header[:0]
            pieces.append(as_bytes[place])
        pieces.append(header.new_zeros(padding(sum(len(run) for run in runs))))
        send.append(sum(len(piece) for piece in pieces[start:]))
    expected = [len(header) + frames * frame_bytes + padding(frames) for frames in receive]
    message, arrived = torch.cat(pieces), header.new_empty(sum(expected))
    with sending("a fetch of frames"):
        dist.all_to_all_single(arrived, message, expected, send, group=group)
    headers, swapped = [], []
    for part, frames in zip(arrived.split(expected), receive, strict=True):
        headers.append(part[: len(header)].view(torch.float32))
        content = part[len(header) : len(header) + frames * frame_bytes]
        shape = (frames, *like.shape[1:])
        swapped.append(content.view(like.dtype).view(shape) if len(content) else like.new_empty(shape))
    return swapped, agreement.poison(agreement.merged(torch.stack(headers)))


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
    x: Tensor,
    wanted: Sequence[Sequence[int]],
    group: ProcessGroup,
    frames_per_rank: Sequence[int],
    call: Call | None = None,
) -> Tensor:
    """The frames that this rank wants, from whoever holds them: x (B, T_local, ...) -> (B, len(wanted[rank]), ...).

    `wanted` holds every rank's global frame indices in rising order, the same on all ranks. Differentiable; one
    all_to_all_single forward and one backward, whatever the shards hold.

    Where another rank's call or shapes differ, what is fetched is NaN in a floating dtype, and the gradient of x too;
    another dtype cannot tell. The host does not wait for it.
    """
    return _fetch(x, wanted, group, frames_per_rank, call or Call("fetch_frames", {}, x.shape[1]))[0]


def _fetch(
    x: Tensor, wanted: Sequence[Sequence[int]], group: ProcessGroup, frames_per_rank: Sequence[int], call: Call
) -> tuple[Tensor, Tensor]:
    """`fetch_frames`, and the scalar 0, or NaN where another rank's call differs."""
    rank, size = rank_and_size(group)
    start = sum(frames_per_rank[:rank])
    stop = start + frames_per_rank[rank]
    outgoing = [[index - start for index in indices if start <= index < stop] for indices in wanted]
    receive, first = [], 0
    for count in frames_per_rank:
        receive.append(sum(first <= index < first + count for index in wanted[rank]))
        first += count
    plan = _FetchPlan([_runs(indices) for indices in outgoing], receive)
    call = call.also(fetched=[_runs(indices) for indices in wanted], held=list(frames_per_rank), dtype_fetched=x.dtype)
    call = call._replace(partial={**call.partial, "frame": _frame_shape(x)})
    fetched: tuple[Tensor, Tensor] = _FetchFrames.apply(x, plan, group, call)  # type: ignore[no-untyped-call]
    return fetched


def halo(
    x: Tensor,
    left: int,
    right: int,
    group: ProcessGroup | None,
    frames_per_rank: Sequence[int] | None = None,
    call: Call | None = None,
) -> tuple[Tensor, Tensor]:
    """The `left` frames before and the `right` frames after this shard: x (B, T_local, ...) -> two of (B, width, ...).

    Zeros beyond the clip. Shards shorter than the halo are fine: the frames then come from several ranks.
    Differentiable; one all_to_all_single forward and one backward, none without a group. Ranks that disagree: as in
    `fetch_frames`, and as in `agree` where a handshake is due (with `frames_per_rank` on a group's first call alone).
    """
    rank, size = rank_and_size(group)
    if group is None or size == 1:
        return x.new_zeros(x.shape[0], left, *x.shape[2:]), x.new_zeros(x.shape[0], right, *x.shape[2:])
    sides = {"left": left, "right": right}
    counts, call = _frames_of_ranks(call or Call("halo", {}, x.shape[1]), sides, x, group, frames_per_rank)
    total, first, wanted, edges = sum(counts), 0, [], []
    for count in counts:
        before = list(range(max(first - left, 0), first)) if count else []
        after = list(range(first + count, min(first + count + right, total))) if count else []
        wanted.append(before + after)
        edges.append((len(before), len(after)))
        first += count
    fetched, poison = _fetch(x, wanted, group, counts, call)
    got_left, got_right = fetched.split(edges[rank], dim=1)
    padding = x.new_zeros(x.shape[0], left + right, *x.shape[2:])
    if x.is_floating_point():
        padding = padding + poison
    return (
        torch.cat([padding[:, : left - edges[rank][0]], got_left], 1),
        torch.cat([got_right, padding[:, : right - edges[rank][1]]], 1),
    )


def gather_frames(
    x: Tensor, group: ProcessGroup | None, frames_per_rank: Sequence[int] | None = None, call: Call | None = None
) -> Tensor:
    """All frames of the clip on every rank: x (B, T_local, ...) -> (B, T, ...). Backward sums the ranks' gradients.

    Ranks that disagree: as in `halo`.
    """
    _, size = rank_and_size(group)
    if group is None or size == 1:
        return x
    counts, call = _frames_of_ranks(call or Call("gather_frames", {}, x.shape[1]), {}, x, group, frames_per_rank)
    return _fetch(x, [range(sum(counts))] * size, group, counts, call)[0]


def _frames_of_ranks(
    call: Call, options: dict[str, int], x: Tensor, group: ProcessGroup, frames_per_rank: Sequence[int] | None
) -> tuple[list[int], Call]:
    """Every rank's frame count, from the caller or else by a handshake, and the call with its options."""
    with checked(group, due=frames_per_rank is None):
        check_frames_per_rank(frames_per_rank, x.shape[1], group)
    call = call.also(**options)._replace(frames=x.shape[1])
    known = call._replace(partial={**call.partial, "frame": _frame_shape(x)}).also(dtype=x.dtype)
    counts, _, known = agree(known, group, frames_per_rank, positions=True, check=False)
    assert counts is not None
    within = known.facts.get("within")
    return counts, call if within is None else call.also(within=within)


def _frame_shape(x: Tensor) -> tuple[int, ...] | None:
    """The shape of a frame with its batch, which an empty shard does not know."""
    return (x.shape[0], *x.shape[2:]) if x.shape[1] else None
