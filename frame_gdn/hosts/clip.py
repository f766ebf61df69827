"""Where a call's frames lie in the clip, and softmax attention over a clip whose frames are sharded or chunked; for
Wan and SanaVideo also the rotary embedding that tells every block.

These two hand what `rope` returns to every `attn1` and look at it nowhere else, so that is what the clip rides on.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import functional, parallel
from ..agreement import Call, described
from . import Swapped


@dataclass(frozen=True)
class Span:
    """Where the frames of one call lie; a dataclass, so that no wrapper casts or moves what is in it.

    Attributes:
        counts: every rank's number of frames; `start` ... `start + frames - 1` of them are here.
        chunk_frames: no frame sees past the end of its chunk; None means one chunk.
        call: what the ranks of a group compare the messages of this call by.
    """

    counts: list[int]
    start: int
    frames: int
    chunk_frames: int | None
    call: Call | None = field(default=None, kw_only=True)

    @property
    def is_plain(self) -> bool:
        """All frames are here and see one another: what the host does by itself is right."""
        return self.chunk_frames is None and len(self.counts) == 1

    def horizons(self) -> Iterator[tuple[int, int, int]]:
        """(first, last, end): of the frames here, first ... last - 1 attend to frames 0 ... end - 1 of the clip."""
        total, stop = sum(self.counts), self.start + self.frames
        first = self.start
        while first < stop:
            end = total
            if self.chunk_frames is not None:
                end = min((first // self.chunk_frames + 1) * self.chunk_frames, total)
            last = min(end, stop)
            yield first - self.start, last - self.start, end
            first = last


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


def locate(site: Swapped, frames: int, facts: Mapping[str, object]) -> Span:
    """The span of a call in which this rank holds so many frames. One tiny exchange under a group.

    `facts`, by name, are what else must be alike on all ranks. Raises ValueError, on all ranks alike, for ranks that
    disagree or have no frame.
    """
    rank, _ = parallel.rank_and_size(site.group)
    facts = {**facts, "chunk_frames": site.chunk_frames, "backend": site.backend, "attention": site.attention}
    call = Call(type(site).__name__, facts, frames)
    counts, _, call = parallel.agree(call, site.group, None, positions=True, check=False)
    assert counts is not None
    if 0 in counts:
        raise ValueError(f"every rank needs at least one frame, the ranks hold {counts}")
    return Span(counts, sum(counts[:rank]), frames, site.chunk_frames, call=call.brief() if len(counts) > 1 else None)


def check_positions(span: Span, known: int) -> None:
    """ValueError, on all ranks alike, for a clip that goes on after the host's rotary table has ended."""
    if sum(span.counts) > known:
        raise ValueError(
            f"the clip has {sum(span.counts)} frames, but the host's rotary table knows the positions of {known}"
        )


@dataclass(frozen=True)
class Clip(Span):
    """One call's clip as every site sees it.

    Attributes:
        cos, sin: the host's tables of the frames here, each (1, N_local, 1, D), every pair's value twice.
    """

    cos: Tensor
    sin: Tensor

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin as the host's own attention takes them."""
        return self.cos.to(device), self.sin.to(device)

    def pairs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin (N_local, D/2), each pair's value once, for `functional.rotary`."""
        cos, sin = self.tables(device)
        return cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]


class ClipRotary(Swapped):
    """The host's rotary embedding from the shard's first frame on, with what else the blocks must know of the clip.

    Attributes:
        facts: what else the ranks must have alike in the call that is under way, where the model said so.
    """

    facts: Mapping[str, object] = {}

    def release(self) -> list[str]:
        self.__dict__.pop("facts", None)
        return super().release()

    def forward(self, hidden_states: Tensor) -> Clip:
        """(B, C, T_local, h, w) latents, whose shape alone is looked at. One tiny exchange under a group.

        Raises ValueError, on all ranks alike, for ranks that disagree or have no frame, for a T that is no multiple of
        the patches' length, and for a clip longer than the host's table.
        """
        with parallel.checked(self.group, due=True):
            _, _, length, height, width = hidden_states.shape
            patch = self.patch_size[0]
            if length % patch:
                raise ValueError(f"the latents' {length} frames are no multiple of the patch size {patch}")
            facts: dict[str, object] = {"hidden_states": described(hidden_states, 2), "dtype": hidden_states.dtype}
            facts |= self.facts
        span = locate(self, length // patch, facts)
        check_positions(span, self.max_seq_len)
        start, frames = span.start, span.frames
        tables = super().forward(hidden_states.new_empty(0, 0, (start + frames) * patch, height, width))
        tokens = tables[0].shape[1] // (start + frames)
        cos, sin = (table[:, start * tokens :] for table in tables)
        return Clip(span.counts, start, frames, span.chunk_frames, cos, sin, call=span.call)


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


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    clip: Span,
    group: ProcessGroup | None,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
    attention: str = "auto",
    backend: Any = None,
) -> Tensor:
    """Softmax attention of the frames here, q, k, v (B, N_local, H, D), to those of the clip that they may see.

    allowed (B, T) bool: the clip's frames whose keys count; a sample with none of them gets finite nonsense.
    """
    tokens = q.shape[1] // clip.frames
    if len(clip.counts) > 1:
        kv = torch.stack([k, v], 2).unflatten(1, (clip.frames, tokens))
        k, v = parallel.gather_frames(kv, group, clip.counts, clip.call).flatten(1, 2).unbind(2)
    mask = None
    if allowed is not None:
        allowed = allowed | ~allowed.any(1, keepdim=True)
        mask = allowed.repeat_interleave(tokens, 1, output_size=k.shape[1])[:, None, None]
    out = [
        softmax(
            q[:, first * tokens : last * tokens],
            k[:, : end * tokens],
            v[:, : end * tokens],
            mask=None if mask is None else mask[..., : end * tokens],
            scale=scale,
            attention=attention,
            backend=backend,
        )
        for first, last, end in clip.horizons()
    ]
    return out[0] if len(out) == 1 else torch.cat(out, 1)
