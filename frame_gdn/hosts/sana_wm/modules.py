"""SANA-WM's small modules: the short convolution of keys, the norms, the patch embedding.

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_sana_wm as host
from einops import rearrange
from torch import Tensor, nn

from ... import functional, parallel
from .. import Swapped
from ..clip import Span, locate


class SanaWMTemporalShortConvolution(Swapped, host.SanaWMTemporalShortConvolution):
    """The short convolution without its second pass over flipped frames (`functional.short_conv`)."""

    def forward(
        self,
        hidden_states: Tensor,
        num_frames: int,
        clip: Span | None = None,
        past: Tensor | None = None,
        within_chunks: bool = False,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C)

        Args:
            past: (B, K-1, S, C), the frames of an earlier call before these; None for zeros.
            within_chunks: zeros stand before each chunk, too.
        """
        clip = clip or locate(self, hidden_states, num_frames)
        x = rearrange(hidden_states, "b (t s) c -> b t s c", t=num_frames)
        reach = self.kernel_size - 1
        future = None
        if self.group is not None and len(clip.counts) > 1:
            past, future = parallel.halo(x, reach, reach, self.group, clip.counts, clip.call)
        if within_chunks:
            out = self._chunk_by_chunk(x, past, future, clip)
        else:
            out = functional.short_conv(x, self.weight, past, future, ends=clip.ends, backend=self.backend)
        if self.bias is not None:
            out = out + 2 * self.bias.to(out.dtype)  # as often as the host's two passes add it
        return rearrange(out, "b t s c -> b (t s) c")

    def _chunk_by_chunk(self, x: Tensor, past: Tensor | None, future: Tensor | None, clip: Span) -> Tensor:
        """The convolution of x (B, T_local, S, C) between the neighbouring shards' frames, each chunk by itself."""
        total = sum(clip.counts)
        begins = [begin for begin, _, _ in clip.grid.horizons(0, total, total)]
        out = []
        for first, last, _ in clip.horizons():
            before = None
            if first == 0 and past is not None:  # the chunk may begin in an earlier shard
                inside = clip.start - max(begin for begin in begins if begin <= clip.start)
                hidden = max(past.shape[1] - inside, 0)
                before = torch.cat([torch.zeros_like(past[:, :hidden]), past[:, hidden:]], 1)
            after = future if last == clip.frames else None
            ends = clip.grid.ends(clip.start + first, total)
            out.append(
                functional.short_conv(x[:, first:last], self.weight, before, after, ends=ends, backend=self.backend)
            )
        return torch.cat(out, 1)


class RMSNorm(Swapped, host.RMSNorm):
    """The norm as one kernel in half precision, with ReLU and key scale after it in any. In float32 by itself it is as
    the host has it, to the bit: the softmax blocks round to bfloat16 next, where another last bit now and then is
    another number."""

    def forward(self, hidden_states: Tensor, relu: bool = False, scale: float = 1.0) -> Tensor:
        """(..., C) -> (..., C); with relu through a ReLU and times `scale`."""
        weight: Tensor | None = self.weight
        half = hidden_states.dtype in (torch.bfloat16, torch.float16)
        if weight is not None and self.bias is None:
            alike = weight.dtype == hidden_states.dtype
            # Under autocast tokens are half and the weight is not: what follows takes them half, as the kernel makes.
            if relu and (alike or half) and functional.fused(hidden_states, self.backend):
                return functional.rms_norm_relu(hidden_states, weight, self.eps, scale, self.backend)
            if alike and half:
                out = F.rms_norm(hidden_states, self.dim, weight, self.eps)
                return F.relu(out) * scale if relu else out
        out = super().forward(hidden_states)
        return F.relu(out) * scale if relu else out


class LayerNorm(Swapped, nn.LayerNorm):
    """A block's norm with the modulation that follows it."""

    def forward(
        self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None, clip: Span | None = None
    ) -> Tensor:
        """x (B, N, C), shift and scale (B, T, C) -> layer_norm(x) · (1 + scale) + shift, 0 in padded frames. Without
        them the norm alone."""
        if shift is None or scale is None or clip is None:
            return super().forward(x)
        if self.weight is None:
            return functional.modulated_norm(x, shift, scale, clip.mask, eps=self.eps, backend=self.backend)
        return functional.modulate(super().forward(x), shift, scale, clip.mask)


class SanaWMPatchEmbed(Swapped, host.SanaWMPatchEmbed):
    """The embedding with a token's channels next to one another.

    The host's lie as its convolution leaves them, a channel's tokens next to one another, and the residual stream
    keeps them so: every linear layer then copies its input, every sum runs at a fraction of the bandwidth.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, T, h, w) -> (B, N, C) contiguous."""
        tokens: Tensor = super().forward(x)
        return tokens.contiguous()
