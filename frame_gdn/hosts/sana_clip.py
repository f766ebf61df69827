"""SANA-WM: where one call's frames lie in the clip and which of them are padding, as every site of a model sees it."""

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import replace as changed

import torch
from torch import Tensor

from .. import functional, parallel
from ..agreement import described
from . import Swapped
from .clip import Span, locate


@dataclass(frozen=True)
class Clip(Span):
    """One call's clip as every site sees it; it rides where the host passes `frame_valid_mask`.

    Attributes:
        mask: (B, T_local) bool, the frames here that are not padding; `clip_mask` (B, T) those of all ranks. None: all
            are.
    """

    mask: Tensor | None
    clip_mask: Tensor | None

    def to(self, device: torch.device) -> "Clip":
        """The clip for a block that lives on this device."""
        if self.mask is None or self.clip_mask is None:
            return self
        return changed(self, mask=self.mask.to(device), clip_mask=self.clip_mask.to(device))

    def select(self, x: Tensor) -> Tensor:
        """Tokens x (B, N, C) with zeros in padded frames: selected, not multiplied, so that no NaN passes."""
        return functional.select(x, self.mask)


def clip_of(
    site: Swapped,
    x: Tensor,
    frames: int,
    frame_valid_mask: "Tensor | Clip | None",
    facts: Mapping[str, object] | None = None,
) -> Clip:
    """The clip of a call of `site`, unless the model has made it already; x's first dimension is the batch.

    `facts` are what all ranks must have alike beside what is seen here. One tiny exchange under a group. Raises
    ValueError for a mask that is not one of 0/1 a frame, on all ranks alike.
    """
    if isinstance(frame_valid_mask, Clip):
        return frame_valid_mask.to(x.device)
    with parallel.checked(site.group, due=True):
        mask = None if frame_valid_mask is None else as_bool(frame_valid_mask, x.shape[0], frames).to(x.device)
    seen = {"B": x.shape[0], "dtype": x.dtype, "frame_valid_mask": described(mask, 1)}
    span = locate(site, frames, {**seen, **(facts or {})})
    clip_mask = None if mask is None else parallel.gather_frames(mask, site.group, span.counts, span.call)
    return Clip(span.counts, span.start, span.frames, span.chunk_frames, mask, clip_mask, call=span.call)


def as_bool(mask: Tensor, batch: int, frames: int) -> Tensor:
    """A mask of frames in one of the host's shapes, (B, 1, T, 1, 1), (B, 1, T) or (B, T), as bool (B, T).

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
