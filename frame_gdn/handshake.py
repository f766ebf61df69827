"""The handshake: whether all ranks of a group make the same call, and what each of them holds.

Its one message is a small all-gather of integers, on the CPU where the group can do that. `parallel` issues all other
collectives, and offers what stands here beside them.
"""

import contextlib
import functools
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from . import agreement, checks
from .agreement import Call


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


#: The groups whose ranks have agreed on a call: a handshake is due on the first. It holds no group alive.
_agreed_before: "weakref.WeakSet[ProcessGroup]" = weakref.WeakSet()

HOW_TO_FIND_OUT = (
    "where every rank is alive, their calls may differ in something that changes a message's size. To see in what, "
    "call bidirectional_gdn with check=True, anything else without frames_per_rank, or either with a new group"
)


class Counts(list[int]):
    """Every rank's frames by rank, as one call found them. What is called within that call with these as its
    `frames_per_rank` belongs to it: its messages say so. A wrapper's copy of them is a list like any other."""

    call: Call | None = None

    @classmethod
    def of(cls, call: Call, counts: Sequence[int]) -> "Counts":
        """The counts that `call` found."""
        made = cls(counts)
        made.call = call
        return made

    @functools.cached_property
    def digest(self) -> int:
        """The call as one number, 0 where there is none."""
        return 0 if self.call is None else self.call.digest()

    @property
    def facts(self) -> dict[str, object]:
        """What all ranks must have alike of the call, as facts of a call within it."""
        return {} if self.call is None else {f"{self.call.name}'s {name}": f for name, f in self.call.facts.items()}


class Agreed(NamedTuple):
    """What a handshake told. counts: every rank's frames by rank, None where nobody needs them and nobody said.
    active: frames of the whole clip that are no padding. call: what later messages of this call are compared by."""

    counts: list[int] | None
    active: int | None
    call: Call


class _Row(NamedTuple):
    """One rank's part of a handshake: its text is a call's facts or, refused, the error. digest: of all facts, since a
    long text is cut. values: what else the call sends."""

    refused: bool
    frames: int
    digest: int
    text: str
    values: list[int]


def refusal(check: Callable[[], None], group: ProcessGroup | None, *, due: bool) -> Exception | None:
    """Why this rank refuses what it alone may have wrong, a state or a mask; None where the check finds nothing wrong.

    Where no handshake is due the others are in the call's first message by then. So the call goes on without what was
    refused and with this error as one of its facts: the others receive NaN at once, instead of waiting for the group's
    timeout, and this rank raises the error in the end. Where a handshake is due, or nobody waits, the check raises.
    """
    try:
        check()
    except Exception as error:
        if not _has_peers(group) or due or group not in _agreed_before:
            raise
        return error
    return None


def _has_peers(group: object) -> bool:
    return isinstance(group, ProcessGroup) and dist.get_rank(group) >= 0 and dist.get_world_size(group) > 1


@contextlib.contextmanager
def checked(group: ProcessGroup | None, *, due: bool = False) -> Iterator[None]:
    """Checks of one rank's input, made so that an error on one rank is one on all where a handshake is due.

    Inside, raise freely. On a group's first call, and where the call makes a handshake `due` anyway, the ranks that
    found nothing wrong are in `agree` by then, and learn there that a peer refused, and why.
    """
    try:
        yield
    except Exception as error:
        if group is not None and _has_peers(group) and (due or group not in _agreed_before):
            said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            with contextlib.suppress(RuntimeError):  # of the transport: this rank's own error says more
                _gather_rows(_Row(True, 0, 0, said, [0, 0]), group)
        raise


def agree(
    call: Call,
    group: ProcessGroup | None,
    frames_per_rank: Sequence[int] | None,
    *,
    positions: bool,
    check: bool,
    active: Sequence[int] | None = None,
) -> Agreed:
    """Find out whether all ranks make the same call, where a handshake (one message of fixed size) is due.

    It is due on a group's first call, with check=True, where `positions` are needed but `frames_per_rank` was not
    given, and where `active` is: by sample, how many of the frames here are no padding; None for all of them.

    Raises ValueError, on every rank alike, where a rank refused its input, the calls differ, `frames_per_rank` is not
    what the ranks hold, or the clip's samples have different counts of active frames.
    """
    rank, size = rank_and_size(group)
    if group is None or size == 1:
        if active is not None and len(set(active)) > 1:
            raise ValueError(_different_counts(active))
        return Agreed([call.frames], call.frames if active is None else next(iter(active), 0), call)
    counts = None if frames_per_rank is None else list(frames_per_rank)
    around = frames_per_rank if isinstance(frames_per_rank, Counts) else Counts()
    total_active = None
    if check or active is not None or group not in _agreed_before or (positions and counts is None):
        said = call.also(**around.facts)._replace(partial={**call.partial, "frames_per_rank": counts})
        values = [0, 0] if not active else [active[0], _weighted_sum(active)]
        rows = _compared(said, values, group)
        counts = [row.frames for row in rows]
        if active is not None:
            total_active = sum(row.values[0] for row in rows)
            weighted = sum(row.values[1] for row in rows) - total_active * _weighted_sum([1] * len(active))
            if weighted % _PRIME:  # they differ: tell how
                by_rank = gather_ints(active, group)
                raise ValueError(_different_counts([sum(ranks) for ranks in zip(*by_rank, strict=True)]))
        _agreed_before.add(group)
    if active is None and counts is not None:
        total_active = sum(counts)
    if around.call is not None:
        call = call.also(within=around.digest)
    if counts is not None:
        call = call.also(frames_per_rank=counts) if positions else call
        counts = Counts.of(call, counts)
    return Agreed(counts, total_active, call)


#: Counts of a batch are compared by their sum, each weighted by a power of this prime's primitive root.
_PRIME = 2**31 - 1


def _weighted_sum(counts: Sequence[int]) -> int:
    return sum(count * pow(7, sample + 1, _PRIME) for sample, count in enumerate(counts)) % _PRIME


def _different_counts(counts: Sequence[int]) -> str:
    return f"a state was asked for, but the samples have different counts of active frames: {list(counts)}"


def _compared(call: Call, values: Sequence[int], group: ProcessGroup) -> list[_Row]:
    """Every rank's row, by rank, if all make the same call."""
    rank, _ = rank_and_size(group)
    own = call._replace(partial=dict.fromkeys(call.partial))
    rows = _gather_rows(_Row(False, call.frames, own.digest(), call.text(), list(values)), group)
    for r, row in enumerate(rows):
        said = row.text if row.refused else agreement.value_of("refused", row.text)
        if said is not None:
            raise ValueError(f"rank {r} of the group refused its input, rank {rank} stops with it: {said}")
    found = agreement.disagreement([row.text for row in rows])
    if found is None and len({row.digest for row in rows}) > 1:
        found = f"their call beyond the first {agreement.TEXT_BYTES} bytes of its description"
    if found is not None:
        raise ValueError(f"the ranks of the group disagree on {found}")
    frames = [row.frames for row in rows]
    for r, row in enumerate(rows):
        said = agreement.value_of("frames_per_rank", row.text)
        if said not in (None, agreement.UNKNOWN, str(frames)):
            raise ValueError(f"frames_per_rank is {said} on rank {r}, but the ranks hold {frames} frames")
    return rows


def _gather_rows(row: _Row, group: ProcessGroup) -> list[_Row]:
    """Every rank's row, by rank, in one small all-gather, whose size depends on the number of values alone."""
    size = agreement.TEXT_BYTES
    text = struct.unpack(f"<{size // 8}q", row.text.encode()[:size].ljust(size, b"\0"))
    rows = []
    for refused, frames, digest, *rest in gather_ints(
        [row.refused, row.frames, row.digest, *text, *row.values], group
    ):
        encoded = struct.pack(f"<{size // 8}q", *rest[: size // 8]).rstrip(b"\0")
        rows.append(_Row(bool(refused), frames, digest, encoded.decode(errors="ignore"), rest[size // 8 :]))
    return rows


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


def gather_ints(values: Sequence[int], group: ProcessGroup, call: Call | None = None) -> list[list[int]]:
    """Every rank's integers, by rank: one tiny all-gather, on the CPU where the group can do that.

    With a call the ranks compare it by the way, as in a handshake, and raise ValueError where it differs.
    """
    if call is not None:
        return [row.values for row in _compared(call, values, group)]
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(list(values), dtype=torch.int64, device=device)
    everyone = mine.new_empty(dist.get_world_size(group) * len(values))
    with sending("a handshake"):
        dist.all_gather_into_tensor(everyone, mine, group=group)
    return [[int(value) for value in row] for row in everyone.view(-1, len(values)).tolist()]


@contextlib.contextmanager
def sending(what: str) -> Iterator[None]:
    """What a transport says of a failure, with what may be behind it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise type(error)(
            f"{what} between the ranks failed; {HOW_TO_FIND_OUT}. The transport says: {error}"
        ) from error
