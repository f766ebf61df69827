"""SANA-WM's feed-forward (`GLUMBConvTemp`): a gated depthwise convolution within frames, then one across them.

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

from typing import Any

import torch
from diffusers.models.transformers import transformer_sana_wm as host
from einops import rearrange
from torch import Tensor, nn

from ... import functional, parallel
from .. import Swapped
from ..clip import Span, locate
from ..feed_forward import Conv2d, free_convolutions
from ..rollout import Carried


class SanaWMConvLayer(Swapped, host.SanaWMConvLayer):
    """A convolution whose activation may be left to what follows, or which does that of what went before."""

    def forward(self, hidden_states: Tensor, activate: bool = True, glu_of: str | None = None) -> Tensor:
        """(images, C, height, width) -> the same of other channels; `glu_of` as in `Conv2d`."""
        x: Tensor = self.conv(hidden_states) if glu_of is None else self.conv(hidden_states, glu_of=glu_of)
        return self.act(x) if activate and self.act is not None else x


def convolutions(ffn: Any) -> list[tuple[nn.Module, type[Swapped]]]:
    """A feed-forward's convolutions within frames, as sites to swap, without those that an adapter wraps or a hook
    holds: they stay as they are."""
    return free_convolutions([layer.conv for layer in (ffn.inverted_conv, ffn.depth_conv, ffn.point_conv)])


class GLUMBConvTemp(Swapped, host.GLUMBConvTemp):
    """The feed-forward; its temporal convolution sees the neighbouring shards' frames and no frame past its chunk.

    On Triton, what lies between its matrix products is one kernel.
    """

    def forward(
        self,
        hidden_states: Tensor,
        HW: tuple[int, int, int],
        clip: Span | None = None,
        carried: Carried | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C); `carried`: what a rollout carries."""
        frames, height, width = HW
        clip = clip or locate(self, hidden_states, frames)
        images = rearrange(hidden_states, "b (t h w) c -> (b t) c h w", h=height, w=width)
        fused = self._can_fuse(images)
        parts = [self._spatial(some, fused) for some in images.split(self._images_at_once(images, fused))]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        # Not by einops: it makes the stride of a batch of one 1, from which the convolution infers another layout.
        x = x.flatten(2).unflatten(0, (-1, frames)).transpose(1, 2)  # (B, C, T, S)
        past = None if carried is None else carried.past.get("ff.tail")
        if carried is not None and clip.active is not None:
            carried.keep_tail("ff.tail", rearrange(x, "b c t s -> b t s c"), self.reach, clip, self.group)
        x = x + self._temporal(x, past, clip)
        return rearrange(x, "b c t s -> b (t s) c")

    def _can_fuse(self, images: Tensor) -> bool:
        """Whether the activations are those of the kernel, and nothing stands around the depthwise convolution."""
        inverted, depth = self.inverted_conv, self.depth_conv
        return (
            isinstance(inverted, SanaWMConvLayer)
            and isinstance(depth, SanaWMConvLayer)
            and isinstance(depth.conv, Conv2d)
            and (inverted.act is None or isinstance(inverted.act, nn.SiLU))
            and depth.act is None
            and isinstance(self.glu_act, nn.SiLU)
            and functional.fused(images, self.backend)
        )

    def _images_at_once(self, images: Tensor, fused: bool) -> int:
        if fused and isinstance(self.inverted_conv.conv, Conv2d) and isinstance(self.point_conv.conv, Conv2d):
            return max(1, len(images))
        return max(1, INDEXABLE // (self.inverted_conv.conv.weight.shape[0] * images.shape[2] * images.shape[3]))

    def _spatial(self, images: Tensor, fused: bool) -> Tensor:
        if fused:
            glu_of = "identity" if self.inverted_conv.act is None else "silu"
            product = self.depth_conv(self.inverted_conv(images, activate=False), glu_of=glu_of)
        else:
            value, gate = self.depth_conv(self.inverted_conv(images)).chunk(2, 1)
            product = value * self.glu_act(gate)
        out: Tensor = self.point_conv(product)
        return out

    @property
    def reach(self) -> int:
        """How many frames the temporal convolution sees on either side."""
        reach: int = self.t_conv.kernel_size[0] // 2
        return reach

    def state_shapes(self, batch: int, tokens: int, channels: int) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of what a rollout carries here."""
        return {"ff.tail": (batch, self.reach, tokens, channels)}

    def _temporal(self, x: Tensor, past: Tensor | None, clip: Span) -> Tensor:
        """`t_conv` of x (B, C, T, S), whose own padding is the zeros beyond the clip or the chunk; past (B, R, S, C)
        of an earlier call, or None."""
        reach = self.reach
        if clip.is_plain and past is None:
            out: Tensor = self.t_conv(x)
            return out
        left, right = parallel.halo(x.transpose(1, 2), reach, reach, self.group, clip.counts, clip.call)
        if past is not None:
            left = past.to(x.dtype).transpose(2, 3)
        left, right = left.transpose(1, 2), right.transpose(1, 2)
        around = torch.cat([left, x, right], 2)  # frame t at t + reach
        # A chunk with what it sees before it, and of the next shard, is one window. The windows of neighbours that are
        # alike lie in the batch; the zeros after a window are the convolution's own padding.
        alike: list[tuple[tuple[int, int], list[int]]] = []  # frames of a chunk and beyond it, first frames
        for first, last, end in clip.horizons():
            kind = last - first, min(end - clip.start - last, reach)
            if not alike or alike[-1][0] != kind:
                alike.append((kind, []))
            alike[-1][1].append(first)
        parts = []
        for (frames, beyond), firsts in alike:
            seen = around[:, :, firsts[0] : firsts[-1] + reach + frames + beyond]
            windows = seen.unfold(2, reach + frames + beyond, frames).permute(0, 2, 1, 4, 3)  # (B, n, C, T, S)
            out = self.t_conv(windows.flatten(0, 1))[:, :, reach : reach + frames]
            parts.append(rearrange(out, "(b n) c t s -> b c (n t) s", b=len(x)))
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


#: cuDNN and ATen index a convolution's tensor by 32 bits; the host splits the images at the same size.
INDEXABLE = host._INT32_SAFE_CONV_ELEMENTS
