"""SanaVideo (`SanaVideoTransformer3DModel`): linear attention becomes GDN, which starts out next to it.

What looks across frames: `attn1` (the sums of linear attention run over all tokens), the feed-forward's temporal
convolution, and the rotary positions. All are replaced whatever blocks are chosen, and do what the host does where a
block is not chosen, frames are not sharded and no chunks were asked for.
Source of the formulas: `transformer_sana_video.py` of diffusers.
"""

from .. import needs_diffusers as needs_diffusers  # isort: skip

from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention as _Attention
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline that loads looks for it here
from diffusers.models.transformers import transformer_sana_video as host
from torch import Tensor, nn

from .. import functional, parallel
from ..kernels.types import accumulation_dtype
from . import SwapOptions, Swapped, adopt
from .clip import Clip, ClipRotary
from .configuration import present as present  # one of the host's three functions
from .configuration import swapping_init
from .feed_forward import Conv2d, Frames, free_convolutions
from .gates import ENTRIES, GatedAttention, GatedModel, open_gates, told

#: What the key scale is multiplied by unless `swap` is told otherwise: benchmarks/results/sana_video_start.json.
START_SCALE = 0.1


def replace(model: nn.Module, options: SwapOptions) -> None:
    """Swap the chosen blocks; ValueError for chunk_frames while some are not, whose linear attention sees all frames.

    `start_scale` None is `START_SCALE`.
    """
    blocks: Any = model.transformer_blocks
    chosen = {*options.chosen(len(blocks)), *(i for i, block in enumerate(blocks) if hasattr(block.attn1, "A_log"))}
    if options.chunk_frames is not None and len(chosen) < len(blocks):
        raise ValueError("chunk_frames needs all blocks swapped: linear attention sees the whole clip")
    adopt(
        [(model, SanaVideoTransformer3DModel), *_sites(model)],
        backend=options.backend,
        attention=options.attention,
        chunk_frames=options.chunk_frames,
    )
    open_gates(model, {index: blocks[index].attn1 for index in chosen}, options, START_SCALE)


def cover(model: nn.Module) -> None:
    """Make every site right over shards; a swapped model is already."""
    if not isinstance(model, SanaVideoTransformer3DModel):
        adopt([*told(model, SanaVideoTransformer3DModel), *_sites(model)])


def _sites(model: Any) -> list[tuple[nn.Module, type[Swapped]]]:
    sites: list[tuple[nn.Module, type[Swapped]]] = [(model.rope, WanRotaryPosEmbed)]
    for block in model.transformer_blocks:
        sites += [(block, SanaVideoTransformerBlock), (block.attn1, Attention), (block.ff, GLUMBTempConv)]
        if isinstance(block.ff, host.GLUMBTempConv):
            ff = block.ff
            sites += free_convolutions([ff.conv_inverted, ff.conv_depth, ff.conv_point, ff.conv_temp])
    return sites


class WanRotaryPosEmbed(ClipRotary, host.WanRotaryPosEmbed):
    """Positions from the shard's first frame on, and the clip."""


class Attention(GatedAttention, _Attention):
    """GDN, or the host's linear attention with its two sums taken over all ranks."""

    processor_class = host.SanaLinearAttnProcessor3_0

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        rotary_emb: Clip,
    ) -> Tensor:
        """(B, N_local, C) -> (B, N_local, C)"""
        clip = rotary_emb
        if self.has_gates:
            out = self.gdn(hidden_states, clip)
        elif clip.is_plain:
            return super().forward(hidden_states, rotary_emb=clip.tables(hidden_states.device))
        else:
            out = self._linear(hidden_states, clip)
        return self.to_out[1](self.to_out[0](out))

    def _linear(self, x: Tensor, clip: Clip) -> Tensor:
        q, k, v = self.project(x)
        q, k = F.relu(q), F.relu(k)
        rotary = clip.pairs(x.device)
        wide = accumulation_dtype(v.dtype)
        q_rot, k_rot = (functional.rotary(t, *rotary, backend=self.backend).to(wide) for t in (q, k))
        q, k = q.to(wide), k.to(wide)
        with torch.autocast(x.device.type, enabled=False):  # sums over the whole clip stay wide
            own = torch.einsum("bnhd,bnhe->bhde", v.to(wide), k_rot), k.sum(1).unsqueeze(2)
            own_sums, one_each = torch.cat(own, 2)[:, None], [1] * len(clip.counts)
            sums = parallel.gather_frames(own_sums, self.group, one_each, clip.call).sum(1)
            out = torch.einsum("bhde,bnhe->bnhd", sums[:, :, :-1], q_rot)
            out = out / (torch.einsum("bhe,bnhe->bnh", sums[:, :, -1], q) + 1e-15).unsqueeze(-1)
        return out.to(x.dtype).flatten(2)


class GLUMBTempConv(Swapped, host.GLUMBTempConv):
    """The feed-forward; its temporal convolution sees the neighbouring shards' frames and no frame past its chunk.

    On Triton, what lies between its matrix products is one kernel.

    Attributes:
        counts: every rank's number of frames, as the block said before the call.
    """

    added = ("counts",)
    counts: list[int]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T_local, h, w, C) -> the same shape"""
        fused = self._can_fuse(hidden_states)
        if self.chunk_frames is None and len(self.counts) == 1 and not fused:
            return super().forward(hidden_states)
        images = hidden_states.flatten(0, 1).permute(0, 3, 1, 2)
        if fused:
            product = self.conv_depth(self.conv_inverted(images), glu_of="silu")
        else:
            value, gate = self.conv_depth(self.nonlinearity(self.conv_inverted(images))).chunk(2, 1)
            product = value * self.nonlinearity(gate)
        x = self.conv_point(product).flatten(2).unflatten(0, hidden_states.shape[:2])  # (B, T_local, C, S)
        past = future = None
        if len(self.counts) > 1:
            past, future = parallel.halo(x.transpose(2, 3), 1, 1, self.group, self.counts)
        if type(self.conv_temp) is Conv2d:
            rank, _ = parallel.rank_and_size(self.group)
            frames = Frames(past, future, self.chunk_frames, sum(self.counts[:rank]))
            x = self.conv_temp(x.transpose(1, 2), frames=frames).transpose(1, 2)
        else:
            x = x + self._temporal(x, past, future)
        return x.transpose(2, 3).reshape(hidden_states.shape)

    def _can_fuse(self, x: Tensor) -> bool:
        """Whether the activation is that of the kernel, and nothing stands around the depthwise convolution."""
        is_free = type(self.conv_depth) is Conv2d
        return is_free and isinstance(self.nonlinearity, nn.SiLU) and functional.fused(x, self.backend)

    def _temporal(self, x: Tensor, past: Tensor | None, future: Tensor | None) -> Tensor:
        """`conv_temp`, width 3, where an adapter wraps it, over each chunk between the frames that it may see.

        x (B, T_local, C, S), past and future (B, 1, S, C) or None for zeros -> like x.
        """
        rank, _ = parallel.rank_and_size(self.group)
        start, frames = sum(self.counts[:rank]), x.shape[1]
        stop, total = start + frames, sum(self.counts)
        before, after = (x.new_zeros(x[:, :1].shape) if t is None else t.transpose(2, 3) for t in (past, future))
        around = torch.cat([before, x, after], 1).transpose(1, 2)  # (B, C, T_local + 2, S); frame t at t - start + 1
        size = self.chunk_frames or total
        ends = [end for end in range(start + 1, stop + 1) if end % size == 0 or end == stop]
        out, first = [], start
        for end in ends:
            sees_next = end == stop and end % size != 0
            window = around[:, :, first - start : end - start + 1 + sees_next]
            out.append(self.conv_temp(window)[:, :, 1 : end - first + 1])
            first = end
        return torch.cat(out, 2).transpose(1, 2)


class SanaVideoTransformerBlock(Swapped, host.SanaVideoTransformerBlock):
    """The host's block, which tells its feed-forward where the frames are."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        frames: int | None = None,
        height: int | None = None,
        width: int | None = None,
        rotary_emb: Clip | None = None,
    ) -> Tensor:
        """As in the host."""
        assert rotary_emb is not None
        self.ff.counts = rotary_emb.counts
        return super().forward(
            hidden_states,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            timestep,
            frames,
            height,
            width,
            rotary_emb,
        )


class SanaVideoTransformer3DModel(GatedModel, host.SanaVideoTransformer3DModel):
    """The model, swapped from the start where it is built or loaded under this name; A_log and dt_bias stay float32
    whatever the load's `torch_dtype`.

    Args:
        gdn_blocks: `blocks` of `swap`.
        start_scale, chunk_frames: as in `swap`.
        frame_gdn: the three as a mapping, as earlier versions saved them; the other arguments are the host's.
    """

    _keep_in_fp32_modules = ["A_log", "dt_bias"]
    _repeated_blocks = ["SanaVideoTransformerBlock"]

    __init__ = swapping_init(host.SanaVideoTransformer3DModel.__init__, replace, *ENTRIES)

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        timestep: Tensor,
        guidance: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        attention_kwargs: dict[str, Any] | None = None,
        controlnet_block_samples: tuple[Tensor] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """As in the host. Under a group, `hidden_states`, and `timestep` where it has frames, hold this rank's own."""
        others = {
            "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
            "guidance": guidance, "controlnet_block_samples": controlnet_block_samples,
        }  # fmt: skip
        self.tell_rope(hidden_states, timestep, others)
        return super().forward(
            hidden_states,
            encoder_hidden_states,
            timestep,
            guidance=guidance,
            encoder_attention_mask=encoder_attention_mask,
            attention_mask=attention_mask,
            attention_kwargs=attention_kwargs,
            controlnet_block_samples=controlnet_block_samples,
            return_dict=return_dict,
        )
