"""What Wan and SanaVideo share: a rotary embedding that tells every block where a call's frames lie in the clip, and
softmax attention over a clip whose frames are sharded or chunked.

Both hosts hand what `rope` returns to every `attn1` and look at it nowhere else, so that is what the clip rides on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import parallel
from . import Swapped


@dataclass(frozen=True)
class Clip:
    """One call's clip as every site sees it; a dataclass, so that no wrapper casts or moves what is in it.

    Attributes:
        counts: every rank's number of frames; `start` ... `start + frames - 1` of them are here.
        chunk_frames: no frame sees past the end of its chunk; None means one chunk.
        cos, sin: the host's tables of the frames here, each (1, N_local, 1, D), every pair's value twice.
    """

    counts: list[int]
    start: int
    frames: int
    chunk_frames: int | None
    cos: Tensor
    sin: Tensor

    @property
    def is_plain(self) -> bool:
        """All frames are here and see one another: what the host does by itself is right."""
        return self.chunk_frames is None and len(self.counts) == 1

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin as the host's own attention takes them."""
        return self.cos.to(device), self.sin.to(device)

    def pairs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """cos and sin (N_local, D/2), each pair's value once, for `layer.apply_rotary`."""
        cos, sin = self.tables(device)
        return cos[0, :, 0, 0::2], sin[0, :, 0, 1::2]

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


class ClipRotary(Swapped):
    """The host's rotary embedding from the shard's first frame on, with what else the blocks must know of the clip."""

    def forward(self, hidden_states: Tensor) -> Clip:
        """(B, C, T_local, h, w) latents, whose shape alone is looked at. One tiny exchange under a group.

        Raises ValueError, on all ranks alike, for ranks that disagree or have no frame, and for a T that is no
        multiple of the patches' length.
        """
        batch, _, length, height, width = hidden_states.shape
        patch = self.patch_size[0]
        with parallel.checked(self.group):
            if length % patch:
                raise ValueError(f"the latents' {length} frames are no multiple of the patch size {patch}")
        rank, _ = parallel.rank_and_size(self.group)
        counts = parallel.agree(
            parallel.Call("other", batch, 0, 0, hidden_states.dtype, 0, length // patch, self.chunk_frames or 0),
            self.group,
            None,
            positions=True,
            check=False,
        )
        assert counts is not None
        if 0 in counts:
            raise ValueError(f"every rank needs at least one frame, the ranks hold {counts}")
        start, frames = sum(counts[:rank]), counts[rank]
        tables = super().forward(hidden_states.new_empty(0, 0, (start + frames) * patch, height, width))
        tokens = tables[0].shape[1] // (start + frames)
        cos, sin = (table[:, start * tokens :] for table in tables)
        return Clip(counts, start, frames, self.chunk_frames, cos, sin)


def attend(q: Tensor, k: Tensor, v: Tensor, clip: Clip, group: ProcessGroup | None, backend: Any = None) -> Tensor:
    """Softmax attention of the frames here, q, k, v (B, N_local, H, D), to those of the clip that they may see."""
    tokens = q.shape[1] // clip.frames
    kv = torch.stack([k, v], 2).unflatten(1, (clip.frames, tokens))
    k, v = parallel.gather_frames(kv, group, clip.counts).flatten(1, 2).unbind(2)
    out = [
        dispatch_attention_fn(
            q[:, first * tokens : last * tokens], k[:, : end * tokens], v[:, : end * tokens], backend=backend
        )
        for first, last, end in clip.horizons()
    ]
    return torch.cat(out, 1)
