"""What the hosts share of a call: where its frames lie in the clip (`Span`), their rotary positions, and softmax
attention over a clip whose frames are sharded or chunked.

A swapped model makes one `Span` a call, and passes it to its blocks as their argument `clip`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from einops import rearrange, repeat
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .. import functional, parallel
from ..agreement import Call, described
from ..chunks import ChunkEnds, ChunkGrid, KeyFrames, SoftmaxWindow, frames_at
from ..rollout_state import RolloutState
from . import Swapped


@dataclass(frozen=True)
class Keys:
    """Which keys of softmax attention a call's frames see; nothing here differs from chunk to chunk of a rollout whose
    window is full, so that a compiled block is one graph for all of them.

    Attributes:
        past: frames of earlier calls that the state keeps.
        seen: as `KeyFrames.seen`.
        kept: the runs of frames that the next state keeps; none where no state is asked for.
    """

    past: int
    seen: list[tuple[int, int, list[tuple[int, int]]]]
    kept: list[tuple[int, int]]


@dataclass(frozen=True)
class Span:
    """Where the frames of one call lie; a dataclass, so that no wrapper casts or moves what is in it.

    Attributes:
        counts: every rank's number of frames; `start` ... `start + frames - 1` of them are here.
        grid: the grid of chunks, past whose ends no frame sees; None: one chunk.
        call: what the ranks of a group compare the messages of this call by.
        mask: (B, T_local) bool, the frames here that are not padding; `clip_mask` (B, T) those of all ranks. None: all
            are.
        keys: which keys softmax attention sees; None: those of this call, without a window.
        active: the frames of this call after which a state is asked for; None where none is.
    """

    counts: list[int]
    start: int
    frames: int
    grid: ChunkGrid
    call: Call | None = field(default=None, kw_only=True)
    mask: Tensor | None = field(default=None, kw_only=True)
    clip_mask: Tensor | None = field(default=None, kw_only=True)
    keys: Keys | None = field(default=None, kw_only=True)
    active: int | None = field(default=None, kw_only=True)

    @property
    def is_plain(self) -> bool:
        """All frames are here and see one another: what the host does by itself is right."""
        return self.grid.chunk_frames is None and len(self.counts) == 1

    @property
    def visible(self) -> Keys:
        """Which keys softmax attention sees."""
        if self.keys is not None:
            return self.keys
        frames = KeyFrames(self.grid or ChunkGrid(), SoftmaxWindow(), sum(self.counts))
        return Keys(0, list(frames.seen(self.start, self.start + self.frames)), [])

    def horizons(self) -> Iterator[tuple[int, int, int]]:
        """(first, last, end): of the frames here, first ... last - 1 attend to frames 0 ... end - 1 of the clip."""
        return (self.grid or ChunkGrid()).horizons(self.start, self.start + self.frames, sum(self.counts))

    @property
    def ends(self) -> ChunkEnds | None:
        """The ends of chunks, counted from the first frame here."""
        return self.grid.ends(self.start, sum(self.counts))

    def to(self, device: torch.device) -> "Span":
        """The same for a block that lives on this device."""
        if self.mask is None or self.clip_mask is None:
            return self
        return changed(self, mask=self.mask.to(device), clip_mask=self.clip_mask.to(device))

    def select(self, x: Tensor) -> Tensor:
        """Tokens x (B, N, C) with zeros in padded frames: selected, not multiplied, so that no NaN passes."""
        return functional.select(x, self.mask)


def facts_of(model: Swapped, frames_dims: Mapping[str, int], arguments: Mapping[str, object]) -> dict[str, object]:
    """What all ranks must have alike of a call of a model: its configuration, and what of its arguments can be told
    without a look at the device.

    Args:
        frames_dims: by argument, the dimension in which a rank has its own frames.
    """
    if parallel.rank_and_size(model.group)[1] == 1:  # a process alone, compiled perhaps, has nobody to agree with
        return {}
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    given = {name: described(value, frames_dims.get(name)) for name, value in arguments.items()}
    return {**config, **given, "gradient_checkpointing": torch.is_grad_enabled() and model.gradient_checkpointing}


def locate(
    site: Swapped,
    x: Tensor,
    frames: int,
    facts: Mapping[str, object] | None = None,
    frame_valid_mask: Tensor | None = None,
    *,
    grid: ChunkGrid | None = None,
    state: RolloutState | None = None,
    output_state: bool = False,
) -> Span:
    """The span of a call of `site` in which this rank holds so many frames; x's first dimension is the batch.

    One tiny exchange under a group. `facts`, by name, are what all ranks must have alike beside what is seen here.
    `grid` is that of the site unless a state is continued.
    Raises ValueError, on all ranks alike, for ranks that disagree or have no frame, for a mask that is not one of 0/1
    a frame, and for a state asked for after active frames that are no prefix, the same in every sample.
    """
    grid = site.grid if grid is None else grid
    with parallel.checked(site.group, due=True):
        mask = None if frame_valid_mask is None else as_bool(frame_valid_mask, x.shape[0], frames).to(x.device)
    seen = {
        "B": x.shape[0], "dtype": x.dtype, "frame_valid_mask": described(mask, 1),
        **grid.facts, "backend": site.backend, "attention": site.attention, "output_state": output_state,
    }  # fmt: skip
    call = Call(type(site).__name__, {**(facts or {}), **seen}, frames)
    counts, _, call = parallel.agree(call, site.group, None, positions=True, check=False)
    assert counts is not None
    if 0 in counts:
        raise ValueError(f"every rank needs at least one frame, the ranks hold {counts}")
    rank, _ = parallel.rank_and_size(site.group)
    brief = call.brief() if len(counts) > 1 else None
    clip_mask = None if mask is None else parallel.gather_frames(mask, site.group, counts, brief)
    active = None
    if output_state:
        active = sum(counts) if clip_mask is None else count_active("frame_valid_mask", clip_mask)
    start, where = sum(counts[:rank]), key_frames(site, grid, sum(counts), state)
    visible = list(where.seen(start, start + frames))
    keys = Keys(where.past, visible, [] if active is None else where.after(active)[2])
    return Span(counts, start, frames, grid, call=brief, mask=mask, clip_mask=clip_mask, keys=keys, active=active)


def key_frames(site: Swapped, grid: ChunkGrid, total: int, state: RolloutState | None) -> KeyFrames:
    """Where the keys of softmax attention lie in a call of `total` frames that continues a state."""
    chunks, kept = (0, ()) if state is None else (state.chunks, state.kept)
    return KeyFrames(grid, site.window, total, chunks, kept)


def count_active(name: str, clip_mask: Tensor) -> int:
    """The active frames of a whole clip (B, T) by the mask of that name; ValueError unless they are one prefix, the
    same in every sample."""
    active = int(clip_mask[0].sum())
    prefix = torch.arange(clip_mask.shape[1], device=clip_mask.device) < active
    if not torch.equal(clip_mask, prefix.expand_as(clip_mask)):
        raise ValueError(
            f"a state was asked for: {name} must be True for the same first frames of every sample and False after "
            f"them, got {clip_mask.int().tolist()}"
        )
    return active


def as_bool(mask: Tensor, batch: int, frames: int) -> Tensor:
    """A mask of frames in one of SANA-WM's shapes, (B, 1, T, 1, 1), (B, 1, T) or (B, T), as bool (B, T).

    Anything but 0 and 1 is a ValueError: the scan selects frames, it does not weigh them. (That look costs a
    synchronisation, which a bool mask does not.)
    """
    flat = mask[:, 0, :, 0, 0] if mask.dim() == 5 else mask[:, 0] if mask.dim() == 3 and mask.shape[1] == 1 else mask
    if tuple(flat.shape) != (batch, frames):
        raise ValueError(
            f"frame_valid_mask must be (B, 1, T, 1, 1), (B, 1, T) or (B, T) with B {batch} and T {frames}, got "
            f"{tuple(mask.shape)}"
        )
    if flat.dtype == torch.bool:
        return flat
    if not bool(((flat == 0) | (flat == 1)).all()):
        raise ValueError("frame_valid_mask must be bool, or hold nothing but 0 and 1: a frame is there or it is not")
    return flat != 0


def call_block(model: Any, block: nn.Module, *arguments: Any) -> Any:
    """`block(*arguments)`, under the model's gradient checkpointing where that is enabled."""
    if torch.is_grad_enabled() and model.gradient_checkpointing:
        return model._gradient_checkpointing_func(block, *arguments)
    return block(*arguments)


# --- positions --------------------------------------------------------------------------------------------------


def rotary_angles(
    head_dim: int,
    first_frame: int | Tensor,
    size: Sequence[int],
    device: torch.device,
    float32_frames: int | None = None,
) -> Tensor:
    """The angles of diffusers' 3-D rotary embedding, (T·h·w, head_dim/2): 2⌊D/6⌋ channels for h, as many for w, the
    rest for t, theta 10000. A formula and no table, so that a clip may be of any length.

    Args:
        first_frame: the clip's number of the first of these frames, a tensor () int64 where a captured graph reads it.
        size: T, h, w.
        float32_frames: of SANA-WM, whose table is made in float32: the length of that table. So are the angles then,
            the same to the bit; those of later frames, for which float32 has too few digits, are made in float64 and
            returned within one turn.

    Returns:
        float64, or float32 where `float32_frames` is given.
    """
    frames, height, width = size
    wide = torch.float32 if device.type == "mps" else torch.float64

    def along(first: int | Tensor, count: int, dim: int) -> Tensor:
        position = (first + torch.arange(count, device=device))[:, None]

        def angles(dtype: torch.dtype) -> Tensor:
            frequencies = 1.0 / (10000.0 ** (torch.arange(0, dim, 2, dtype=dtype, device=device) / dim))
            return position.to(dtype) * frequencies

        if float32_frames is None:
            return angles(wide)
        if not isinstance(first, Tensor) and first + count <= float32_frames:
            return angles(torch.float32)
        within_a_turn = angles(wide).remainder(2 * math.pi).float()
        return torch.where(position < float32_frames, angles(torch.float32), within_a_turn)

    side = 2 * (head_dim // 6)
    t = repeat(along(first_frame, frames, head_dim - 2 * side), "t d -> (t h w) d", h=height, w=width)
    y = repeat(along(0, height, side), "h d -> (t h w) d", t=frames, w=width)
    x = repeat(along(0, width, side), "w d -> (t h w) d", t=frames, h=height)
    return torch.cat([t, y, x], -1)


def rotary_tables(
    head_dim: int, first_frame: int | Tensor, size: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Wan's and SanaVideo's `rotary_emb` from a frame on: cos and sin, each (1, N, 1, D), float32, every pair's value
    twice."""
    angles = rotary_angles(head_dim, first_frame, size, device)
    cos, sin = (repeat(t.float(), "n d -> 1 n 1 (d two)", two=2) for t in (angles.cos(), angles.sin()))
    return cos, sin


def pairs(rotary_emb: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`rotary_emb` as `functional.rotary` takes it: cos and sin (N, D/2), each pair's value once."""
    cos, sin = rotary_emb
    return cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]


# --- softmax attention ------------------------------------------------------------------------------------------


def as_values(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in one dtype, that of the values, as the scan and softmax want them.

    Values leave a linear layer in the dtype that is computed in: autocast's, or the weights'. A norm in float32 leaves
    queries and keys in float32; rounding them too keeps the error that of the host (tests/hosts/test_autocast.py).
    """
    return q.to(v.dtype), k.to(v.dtype), v


def diffusers_chose(backend: Any) -> bool:
    """Whether diffusers' user has chosen an attention, of a processor (`backend`) or of all; native is no choice."""
    active = _AttentionBackendRegistry.get_active_backend()[0] if backend is None else backend
    return bool(active != AttentionBackendName.NATIVE)


def softmax(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    attention: str = "auto",
    backend: Any = None,
) -> Tensor:
    """`functional.attention` whose "sdpa" is diffusers' dispatcher, so that `set_attention_backend` reaches it.

    "auto" leaves the choice to diffusers where its user has made one. `backend` is a processor's.
    """
    if attention == "auto" and diffusers_chose(backend):
        attention = "sdpa"
    sdpa = partial(dispatch_attention_fn, backend=backend)
    return functional.attention(q, k, v, mask=mask, scale=scale, kernel=attention, sdpa=sdpa)


def gathered(k: Tensor, v: Tensor, clip: Span, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Keys and values (B, N_local, H, D) of the frames here -> those of all ranks."""
    if len(clip.counts) == 1:
        return k, v
    kv = rearrange(torch.stack([k, v]), "two b (t s) h d -> b t two s h d", t=clip.frames)
    kv = parallel.gather_frames(kv, group, clip.counts, clip.call)
    k, v = rearrange(kv, "b t two s h d -> two b (t s) h d")
    return k, v


def attend_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    clip: Span,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
    attention: str = "auto",
    backend: Any = None,
) -> Tensor:
    """Softmax attention of the frames here, q (B, N_local, H, D), to the keys of the past and of all
    ranks, k and v (B, M, H, D), that they may see.

    allowed (B, T) bool: the clip's frames whose keys count; a sample with none of them gets finite nonsense.
    """
    tokens = q.shape[1] // clip.frames
    keys = clip.visible
    k, v = (rearrange(t, "b (t s) h d -> b t s h d", s=tokens) for t in (k, v))
    if allowed is not None:
        allowed = F.pad(allowed, (keys.past, 0), value=True)
    out = []
    for first, last, runs in keys.seen:
        mask = None
        if allowed is not None:
            some = frames_at(allowed, runs)
            mask = repeat(some | ~some.any(1, keepdim=True), "b t -> b 1 1 (t s)", s=tokens)
        seen = (frames_at(t, runs).flatten(1, 2) for t in (k, v))
        queries = q[:, first * tokens : last * tokens]
        out.append(softmax(queries, *seen, mask=mask, scale=scale, attention=attention, backend=backend))
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def attend(q: Tensor, k: Tensor, v: Tensor, clip: Span, group: ProcessGroup | None, **options: Any) -> Tensor:
    """`attend_to` the frames of all ranks: q, k, v (B, N_local, H, D) of the frames here; options as there."""
    return attend_to(q, *gathered(k, v, clip, group), clip, **options)
