"""SANA-WM's feed-forward (`GLUMBConvTemp`): a gated depthwise convolution within frames, then one across them.

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_sana_wm as host
from torch import Tensor

from .. import parallel
from . import Swapped
from .sana_clip import Clip, clip_of


class GLUMBConvTemp(Swapped, host.GLUMBConvTemp):
    """The feed-forward; its temporal convolution sees the neighbouring shards' frames and no frame past its chunk."""

    def forward(self, hidden_states: Tensor, HW: tuple[int, int, int], clip: Clip | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C)"""
        frames, height, width = HW
        clip = clip or clip_of(self, hidden_states, frames, None)
        images = hidden_states.reshape(-1, height, width, hidden_states.shape[-1]).permute(0, 3, 1, 2)
        rows = max(1, INDEXABLE // (self.inverted_conv.conv.out_channels * height * width))
        parts = [self._spatial(some) for some in images.split(rows)]
        x = parts[0] if len(parts) == 1 else torch.cat(parts)
        x = x.flatten(2).unflatten(0, (-1, frames)).transpose(1, 2)  # (B, C, T, S)
        x = x + self._temporal(x, clip)
        return x.permute(0, 2, 3, 1).reshape(hidden_states.shape)

    def _spatial(self, images: Tensor) -> Tensor:
        value, gate = self.depth_conv(self.inverted_conv(images)).chunk(2, 1)
        out: Tensor = self.point_conv(value * self.glu_act(gate))
        return out

    def _temporal(self, x: Tensor, clip: Clip) -> Tensor:
        """`t_conv` of x (B, C, T, S), whose own padding is the zeros beyond the clip or the chunk."""
        reach = self.t_conv.kernel_size[0] // 2
        if clip.is_plain:
            out: Tensor = self.t_conv(x)
            return out
        left, right = parallel.halo(x.transpose(1, 2), reach, reach, self.group, clip.counts)
        left, right = left.transpose(1, 2), right.transpose(1, 2)
        if clip.chunk_frames is None:
            out = self.t_conv(torch.cat([left, x, right], 2))
            return out[:, :, reach : reach + clip.frames]
        # A chunk with the past that it sees is one window; windows lie in the batch, and the future is their padding.
        size = clip.chunk_frames
        before, after = clip.start % size, -(clip.start + clip.frames) % size
        whole = [F.pad(left, (0, 0, before, 0)), x]
        if after:
            whole.append(F.pad(right[:, :, :after], (0, 0, 0, max(after - reach, 0))))
        windows = torch.cat(whole, 2).unfold(2, size + reach, size).permute(0, 2, 1, 4, 3)
        out = self.t_conv(windows.flatten(0, 1))[:, :, reach:]
        out = out.unflatten(0, windows.shape[:2]).permute(0, 2, 1, 3, 4).flatten(2, 3)
        return out[:, :, before : before + clip.frames]


#: cuDNN and ATen index a convolution's tensor by 32 bits; the host splits the images at the same size.
INDEXABLE = host._INT32_SAFE_CONV_ELEMENTS
