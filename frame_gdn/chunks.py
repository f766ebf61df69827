"""The grid of chunks over the frames of a clip: where each chunk begins and ends, written once for every site.

The first chunk has `first_chunk_frames` frames (None: as the others), every later one `chunk_frames`: borders 0, c0,
c0 + c, c0 + 2c, ... A short tail is a chunk of its own; with `merge_tail` it joins the chunk before it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks


class ChunkEnds(NamedTuple):
    """The frames that are the last of their chunk, counted from the first frame of a shard: first, first + period,
    first + 2 period, ... below `stop`. Three numbers, so that a kernel needs neither a table nor the clip's length."""

    first: int
    period: int
    stop: int

    def count(self, frames: int) -> int:
        """How many of the frames 0 ... frames - 1 are the last of their chunk."""
        return max(0, -(-(min(frames, self.stop) - self.first) // self.period))

    def holds(self, frame: int) -> bool:
        """Whether a frame is the last of its chunk."""
        return self.first <= frame < self.stop and (frame - self.first) % self.period == 0

    def flags(self, frames: int) -> list[bool]:
        """By frame, whether it is the last of its chunk."""
        return [self.holds(frame) for frame in range(frames)]

    def frames_after(self, frames: int, device: torch.device) -> Tensor:
        """By frame, how many frames of its chunk follow it: (frames) int64, very many where the chunk has no end."""
        t = torch.arange(frames, device=device)
        beyond = t - self.first
        after = torch.where(beyond > 0, -beyond % self.period, -beyond)
        return torch.where(t + after < self.stop, after, checks.LARGEST)


@dataclass(frozen=True)
class ChunkGrid:
    """The grid of chunks; a dataclass, so that no wrapper casts or moves what is in it.

    Attributes:
        chunk_frames: frames of a chunk; None: the clip is one chunk.
        first_chunk_frames: frames of the clip's first chunk; None: as the others.
        merge_tail: a tail shorter than chunk_frames joins the chunk before it, in place of being one of its own.

    Raises:
        ValueError: a value out of its range, and first_chunk_frames or merge_tail without chunk_frames.
    """

    chunk_frames: int | None = None
    first_chunk_frames: int | None = None
    merge_tail: bool = False

    def __post_init__(self) -> None:
        checks.integer("chunk_frames", self.chunk_frames, 1, optional=True)
        checks.integer("first_chunk_frames", self.first_chunk_frames, 1, optional=True)
        checks.flag("merge_tail", self.merge_tail)
        if self.chunk_frames is None and self.first_chunk_frames is not None:
            raise ValueError(
                f"first_chunk_frames {self.first_chunk_frames} is for a clip in chunks, but chunk_frames is None"
            )
        if self.chunk_frames is None and self.merge_tail:
            raise ValueError("merge_tail is for a clip in chunks, but chunk_frames is None")

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "ChunkGrid":
        """The grid that a model's configuration holds; one saved before an entry existed has its default."""
        return cls(config.get("chunk_frames"), config.get("first_chunk_frames"), bool(config.get("merge_tail", False)))

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes by name, as arguments, configurations and ranks that compare them have them."""
        return {
            "chunk_frames": self.chunk_frames,
            "first_chunk_frames": self.first_chunk_frames,
            "merge_tail": self.merge_tail,
        }

    @property
    def is_causal(self) -> bool:
        """Every frame is a chunk: none sees past itself."""
        return self.chunk_frames == 1 and self.first_chunk_frames in (None, 1)

    @property
    def needs_positions(self) -> bool:
        """Whether a shard must know where its frames lie in the clip."""
        return self.chunk_frames is not None and not self.is_causal

    def bounds(self, index: int) -> tuple[int, int]:
        """A chunk's first frame and the frame after its last, by its number, in a clip without end."""
        assert self.chunk_frames is not None
        first = self.first_chunk_frames or self.chunk_frames
        return (
            (0, first) if index == 0 else (first + (index - 1) * self.chunk_frames, first + index * self.chunk_frames)
        )

    def index(self, frame: int) -> int:
        """The number of the chunk that holds a frame of a clip without end; 0 where the clip is one chunk."""
        if self.chunk_frames is None:
            return 0
        first = self.first_chunk_frames or self.chunk_frames
        return 0 if frame < first else 1 + (frame - first) // self.chunk_frames

    def begins_at(self, frame: int) -> bool:
        """Whether a chunk begins at a frame; without chunks, any frame may be the first of a call."""
        return self.chunk_frames is None or self.bounds(self.index(frame))[0] == frame

    def after(self, name: str, frames: int) -> "ChunkGrid":
        """The grid of a call that continues after so many frames, counted from the call's first frame.

        Raises ValueError, which names the argument, where these frames end inside a chunk.
        """
        if not self.begins_at(frames):
            first, stop = self.bounds(self.index(frames))
            raise ValueError(
                f"a call begins with a chunk, but {name} stands after {frames} frames, inside the chunk of frames "
                f"{first} to {stop - 1}"
            )
        return self.continued if frames else self

    @property
    def continued(self) -> "ChunkGrid":
        """The grid of a call that begins with a chunk other than the clip's first."""
        return replace(self, first_chunk_frames=None)

    def check_tail(self, frames: int) -> None:
        """ValueError where a call that continues holds a short tail alone, which `merge_tail` would have joined."""
        if self.merge_tail and self.chunk_frames is not None and 0 < frames < self.chunk_frames:
            raise ValueError(
                f"merge_tail joins a short tail to the chunk before it within one call: a call that continues needs "
                f"chunk_frames {self.chunk_frames} frames or more, got {frames}"
            )

    def end(self, frame: int, total: int) -> int:
        """The frame after the last of the chunk that holds a frame, in a clip of `total` frames."""
        if self.chunk_frames is None:
            return total
        stop = self.bounds(self.index(frame))[1]
        return total if self.merge_tail and total - stop < self.chunk_frames else min(stop, total)

    def horizons(self, start: int, stop: int, total: int) -> Iterator[tuple[int, int, int]]:
        """(first, last, end): of the frames start ... stop - 1 of a clip of `total` frames, start + first ...
        start + last - 1 lie in one chunk, which ends before frame `end`."""
        first = start
        while first < stop:
            end = self.end(first, total)
            last = min(end, stop)
            yield first - start, last - start, end
            first = last

    def ends(self, start: int, total: int) -> ChunkEnds | None:
        """The ends of chunks counted from frame `start` of a clip of `total` frames, the clip's own end aside; None
        without chunks."""
        if self.chunk_frames is None:
            return None
        first = (self.first_chunk_frames or self.chunk_frames) - 1 - start
        stop = total - self.chunk_frames - start if self.merge_tail else checks.LARGEST
        return ChunkEnds(first if first >= 0 else first % self.chunk_frames, self.chunk_frames, stop)


@dataclass(frozen=True)
class SoftmaxWindow:
    """Which earlier chunks a chunk of softmax attention sees beside itself.

    Attributes:
        chunks: how many of them, the sink counted; None: all.
        sink: the clip's first chunk is one of them.

    Raises:
        ValueError: a value out of its range.

    Source: `num_cached_blocks` and `sink_token` of SANA-WM's streaming model (NVlabs/Sana).
    """

    chunks: int | None = None
    sink: bool = False

    def __post_init__(self) -> None:
        checks.integer("softmax_window", self.chunks, 1, optional=True)
        checks.flag("softmax_sink", self.sink)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SoftmaxWindow":
        """The window that a model's configuration holds; one saved before an entry existed has its default."""
        return cls(config.get("softmax_window"), bool(config.get("softmax_sink", False)))

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes by the names that arguments and configurations give them."""
        return {"softmax_window": self.chunks, "softmax_sink": self.sink}

    def check(self, grid: ChunkGrid) -> None:
        """ValueError where there are no chunks to count."""
        if self.chunks is not None and grid.chunk_frames is None:
            raise ValueError(f"softmax_window {self.chunks} counts chunks, but chunk_frames is None")

    def kept(self, number: int) -> list[int]:
        """The numbers of the chunks that the chunk of this number sees beside itself."""
        if self.chunks is None or number <= self.chunks:
            return list(range(number))
        sink = [0] if self.sink else []
        return [*sink, *range(number - self.chunks + len(sink), number)]


@dataclass(frozen=True)
class KeyFrames:
    """Where the keys of one call's softmax attention lie: those that a state keeps, then those of the call's frames.

    Attributes:
        grid: the grid, counted from the call's first frame.
        window: which earlier chunks a chunk sees.
        total: frames of the call, those of all ranks.
        number: the number in the clip of the call's first chunk.
        kept: the lengths of the chunks that the state keeps, in the order of the clip.
    """

    grid: ChunkGrid
    window: SoftmaxWindow
    total: int
    number: int = 0
    kept: tuple[int, ...] = ()

    @property
    def past(self) -> int:
        """Frames that the state keeps, which lie before those of the call."""
        return sum(self.kept)

    def seen(self, start: int, stop: int) -> Iterator[tuple[int, int, list[tuple[int, int]]]]:
        """(first, last, runs): of the call's frames start ... stop - 1, start + first ... start + last - 1 see the
        frames in these runs (begin, end) of what the state keeps and the call brings.

        Where no frame is asked for, one empty entry that sees all: an empty shard takes part in a gather's backward.
        """
        if start == stop:
            yield 0, 0, [(0, self.past + self.total)]
        elif self.window.chunks is None:
            for first, last, end in self.grid.horizons(start, stop, self.total):
                yield first, last, [(0, self.past + end)]
        else:
            places = self._places(self.total)
            for number, (begin, end) in places.items():
                first, last = max(begin - self.past, start), min(end - self.past, stop)
                if number >= self.number and first < last:
                    yield first - start, last - start, _runs([places[n] for n in (*self.window.kept(number), number)])

    def after(self, frames: int) -> tuple[int, tuple[int, ...], list[tuple[int, int]]]:
        """What a state keeps after so many of the call's frames: how many chunks of the clip there have been, the
        lengths of those that are kept, and their runs as in `seen`."""
        places = self._places(frames)
        chunks = [*places][-1] + 1 if places else self.number  # they rise
        kept = [places[number] for number in self.window.kept(chunks)]
        return chunks, tuple(end - begin for begin, end in kept), _runs(kept)

    def _places(self, frames: int) -> dict[int, tuple[int, int]]:
        """By number, where the chunks that the state keeps lie, and those of the call's first frames."""
        places, end = {}, 0
        for number, length in zip(self.window.kept(self.number), self.kept, strict=True):
            places[number] = (end, end + length)
            end += length
        for ahead, (first, last, _) in enumerate(self.grid.horizons(0, self.total, self.total)):
            if first < frames:
                places[self.number + ahead] = (end + first, end + min(last, frames))
        return places


def _runs(places: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours joined: [(0, 4), (7, 10), (10, 13)] -> [(0, 4), (7, 13)]."""
    runs: list[tuple[int, int]] = []
    for begin, end in places:
        if runs and runs[-1][1] == begin:
            runs[-1] = (runs[-1][0], end)
        else:
            runs.append((begin, end))
    return runs


def frames_at(x: Tensor, runs: list[tuple[int, int]]) -> Tensor:
    """The frames in these runs of x (B, T, ...): a view of one run, a copy of several."""
    parts = [x[:, begin:end] for begin, end in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1) if parts else x[:, :0]
