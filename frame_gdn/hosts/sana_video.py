"""SanaVideo (`SanaVideoTransformer3DModel`): linear attention becomes GDN, which starts out next to it.

What looks across frames: `attn1` (the sums of linear attention run over all tokens), the feed-forward's temporal
convolution, and the rotary positions. All are replaced whatever blocks are chosen, and do what the host does where a
block is not chosen, frames are not sharded and no chunks were asked for.
Source of the formulas: `transformer_sana_video.py` of diffusers.
"""

from .. import needs_diffusers as needs_diffusers  # isort: skip

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention as _Attention
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline that loads looks for it here
from diffusers.models.transformers import transformer_sana_video as host
from diffusers.utils import apply_lora_scale
from einops import einsum, rearrange
from torch import Tensor, nn

from .. import functional, parallel
from ..kernels.products import without_autocast
from ..kernels.types import accumulation_dtype
from ..rollout_state import RolloutState
from . import READINGS, WINDOW_ENTRIES, SwapOptions, Swapped, adopt
from .clip import Span, call_block, pairs
from .configuration import present as present  # one of the host's three functions
from .configuration import swapping_init
from .feed_forward import Conv2d, Frames, free_convolutions
from .gates import ENTRIES, GatedAttention, GatedModel, open_gates
from .rollout import Carried, end, output

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
    options.refuse((*WINDOW_ENTRIES, *READINGS), model)
    adopt([(model, SanaVideoTransformer3DModel), *_sites(model)], **options.of_sites)
    open_gates(model, {index: blocks[index].attn1 for index in chosen}, options, START_SCALE)


def cover(model: nn.Module) -> None:
    """Make every site right over shards; a swapped model is already."""
    if not isinstance(model, SanaVideoTransformer3DModel):
        adopt([(model, SanaVideoTransformer3DModel), *_sites(model)])


def _sites(model: Any) -> list[tuple[nn.Module, type[Swapped]]]:
    sites: list[tuple[nn.Module, type[Swapped]]] = []
    for block in model.transformer_blocks:
        sites += [(block, SanaVideoTransformerBlock), (block.attn1, Attention), (block.ff, GLUMBTempConv)]
        if isinstance(block.ff, host.GLUMBTempConv):
            ff = block.ff
            sites += free_convolutions([ff.conv_inverted, ff.conv_depth, ff.conv_point, ff.conv_temp])
    return sites


class Attention(GatedAttention, _Attention):
    """GDN, or the host's linear attention with its two sums taken over all ranks."""

    processor_class = host.SanaLinearAttnProcessor3_0

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        *,
        rotary_emb: tuple[Tensor, Tensor],
        clip: Span,
        carried: Carried | None = None,
    ) -> Tensor:
        """(B, N_local, C) -> (B, N_local, C); `carried`: what a rollout carries."""
        if self.has_gates:
            out = self.gdn(hidden_states, rotary_emb, clip, carried)
        elif clip.is_plain:
            return super().forward(hidden_states, rotary_emb=rotary_emb)
        else:
            self.check_processor(self.processor)
            out = self._linear(hidden_states, rotary_emb, clip)
        return self.to_out[1](self.to_out[0](out))

    def _linear(self, x: Tensor, rotary_emb: tuple[Tensor, Tensor], clip: Span) -> Tensor:
        q, k, v = self.project(x)
        q, k = F.relu(q), F.relu(k)
        wide = accumulation_dtype(v.dtype)
        q_rot, k_rot = (functional.rotary(t, *pairs(rotary_emb), backend=self.backend).to(wide) for t in (q, k))
        q, k = q.to(wide), k.to(wide)
        with without_autocast(x.device):  # sums over the whole clip stay wide
            own = einsum(v.to(wide), k_rot, "b n h d, b n h e -> b h d e"), k.sum(1).unsqueeze(2)
            own_sums, one_each = torch.cat(own, 2)[:, None], [1] * len(clip.counts)
            sums = parallel.gather_frames(own_sums, self.group, one_each, clip.call).sum(1)
            out = einsum(sums[:, :, :-1], q_rot, "b h d e, b n h e -> b n h d")
            denominator = einsum(sums[:, :, -1], q, "b h e, b n h e -> b n h")
            out = out / (denominator + 1e-15).unsqueeze(-1)
        return rearrange(out.to(x.dtype), "b n h d -> b n (h d)")


class GLUMBTempConv(Swapped, host.GLUMBTempConv):
    """The feed-forward; its temporal convolution sees the neighbouring shards' frames and no frame past its chunk.

    On Triton, what lies between its matrix products is one kernel.
    """

    def forward(self, hidden_states: Tensor, clip: Span, carried: Carried | None = None) -> Tensor:
        """(B, T_local, h, w, C) -> the same shape; `carried`: what a rollout carries."""
        fused = self._can_fuse(hidden_states)
        if clip.is_plain and carried is None and not fused:
            return super().forward(hidden_states)
        images = rearrange(hidden_states, "b t h w c -> (b t) c h w")
        if fused:
            product = self.conv_depth(self.conv_inverted(images), glu_of="silu")
        else:
            value, gate = self.conv_depth(self.nonlinearity(self.conv_inverted(images))).chunk(2, 1)
            product = value * self.nonlinearity(gate)
        x = rearrange(self.conv_point(product), "(b t) c h w -> b t (h w) c", t=clip.frames)
        past = future = None
        if carried is not None:
            past = carried.past.get("ff.tail")
            past = None if past is None else past.to(x.dtype)
            if clip.active is not None:
                carried.keep_tail("ff.tail", x, 1, clip, self.group)
        if len(clip.counts) > 1:
            past, future = parallel.halo(x, 1, 1, self.group, clip.counts, clip.call)
        if type(self.conv_temp) is Conv2d:
            frames = Frames(past, future, clip.ends)
            x = self.conv_temp(rearrange(x, "b t s c -> b c t s"), frames=frames)
            x = rearrange(x, "b c t s -> b t s c")
        else:
            x = x + self._temporal(x, past, future, clip)
        return x.reshape(hidden_states.shape)

    def _can_fuse(self, x: Tensor) -> bool:
        """Whether the activation is that of the kernel, and nothing stands around the depthwise convolution."""
        is_free = type(self.conv_depth) is Conv2d
        return is_free and isinstance(self.nonlinearity, nn.SiLU) and functional.fused(x, self.backend)

    def _temporal(self, x: Tensor, past: Tensor | None, future: Tensor | None, clip: Span) -> Tensor:
        """`conv_temp`, width 3, where an adapter wraps it, over each chunk between the frames that it may see.

        x (B, T_local, S, C), past and future (B, 1, S, C) or None for zeros -> like x.
        """
        before, after = (x.new_zeros(x[:, :1].shape) if t is None else t for t in (past, future))
        around = rearrange(torch.cat([before, x, after], 1), "b t s c -> b c t s")  # frame t is at t - start + 1
        out = []
        for first, last, stop in clip.horizons():
            sees_next = stop > clip.start + last  # the chunk goes on in the next shard
            out.append(self.conv_temp(around[:, :, first : last + 1 + sees_next])[:, :, 1 : last - first + 1])
        return rearrange(torch.cat(out, 2), "b c t s -> b t s c")


class SanaVideoTransformerBlock(Swapped, host.SanaVideoTransformerBlock):
    """The host's block, which tells its attention and its feed-forward where the frames are."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None,
        timestep: Tensor,
        frames: int,
        height: int,
        width: int,
        rotary_emb: tuple[Tensor, Tensor],
        clip: Span,
        state: Mapping[str, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """As in the host; and the block's part of the new state too where `clip` asks for one.

        Args:
            state: the block's part of the state that is continued.
        """
        carried = None if state is None and clip.active is None else Carried(state or {})
        modulation = self.scale_shift_table[None, None] + timestep.unflatten(-1, (6, -1))
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.unbind(2)

        x = hidden_states
        h = (self.norm1(x) * (1 + scale) + shift).to(x.dtype)
        x = x + gate * self.attn1(h, rotary_emb=rotary_emb, clip=clip, carried=carried)
        if self.attn2 is not None:
            x = self.attn2(x, encoder_hidden_states=encoder_hidden_states, attention_mask=encoder_attention_mask) + x
        h = self.norm2(x) * (1 + ff_scale) + ff_shift
        h = self.ff(h.unflatten(1, (frames, height, width)), clip=clip, carried=carried)
        x = x + ff_gate * h.flatten(1, 3)
        return x if carried is None or clip.active is None else (x, carried.new)


class SanaVideoTransformer3DModel(GatedModel, host.SanaVideoTransformer3DModel):
    """The model, swapped from the start where it is built or loaded under this name; A_log and dt_bias stay float32
    whatever the load's `torch_dtype`.

    Args:
        gdn_blocks: `blocks` of `swap`.
        start_scale, chunk_frames, first_chunk_frames, merge_tail: as in `swap`.
        frame_gdn: options as a mapping, as earlier versions saved them; the other arguments are the host's.
    """

    _keep_in_fp32_modules = ["A_log", "dt_bias"]
    _repeated_blocks = ["SanaVideoTransformerBlock"]

    __init__ = swapping_init(host.SanaVideoTransformer3DModel.__init__, replace, *ENTRIES)

    @apply_lora_scale("attention_kwargs")
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
        state: RolloutState | None = None,
        output_state: bool = False,
    ) -> Any:
        """As in the host. Under a group, `hidden_states`, and `timestep` where it has frames, hold this rank's own.

        Args:
            state: continue from here. The call's first frame is then the first of a chunk; the state is left as it is.
            output_state: return the state after the last frame too, the same on all ranks, as `.state` or as the
                second of a tuple.

        Raises:
            ValueError: a state that does not fit the model and the call, one given under a group, one that stands
                inside a chunk, or a short tail that continues it alone with merge_tail; a state asked for where blocks
                are not swapped.
        """
        others = {
            "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
            "guidance": guidance, "controlnet_block_samples": controlnet_block_samples,
        }  # fmt: skip
        clip, size, rotary_emb = self.locate(hidden_states, timestep, others, state, output_state)
        attention_mask, encoder_attention_mask = (
            (1 - mask.to(hidden_states.dtype))[:, None] * -10000.0 if mask is not None and mask.dim() == 2 else mask
            for mask in (attention_mask, encoder_attention_mask)
        )  # 1 or 0 a token as a bias
        batch = len(hidden_states)
        # Contiguous, as every block leaves it: the first one is then no other graph to torch.compile.
        x = rearrange(self.patch_embedding(hidden_states), "b c t h w -> b (t h w) c").contiguous()

        levels = {"batch_size": batch} if guidance is None else {"guidance": guidance}
        modulation, embedded = self.time_embed(timestep.flatten(), **levels, hidden_dtype=x.dtype)
        modulation, embedded = (rearrange(t, "(b n) c -> b n c", b=batch) for t in (modulation, embedded))
        text = self.caption_projection(encoder_hidden_states)
        text = self.caption_norm(text.view(batch, -1, x.shape[-1]))

        residuals = () if controlnet_block_samples is None else controlnet_block_samples
        states = []
        for index, block in enumerate(self.transformer_blocks):
            block_state = None if state is None else state.blocks[index]
            x = call_block(
                self, block, x, attention_mask, text, encoder_attention_mask, modulation, *size, rotary_emb, clip,
                block_state,
            )  # fmt: skip
            if output_state:
                x, block_state = x
                states.append(block_state)
            if 0 < index <= len(residuals):
                x = x + residuals[index - 1]

        x = self.proj_out(self.norm_out(x, embedded, self.scale_shift_table))
        (frames, height, width), (p, q, r) = size, self.config.patch_size
        sample = rearrange(
            x, "b (t h w) (p q r c) -> b c (t p) (h q) (w r)", t=frames, h=height, w=width, p=p, q=q, r=r
        )
        new_state = end(self, state, states, clip) if output_state else None
        return output(sample, new_state, return_dict)

    def state_shapes(self, batch: int, tokens: int, kept: int) -> list[dict[str, tuple[int, ...]]]:
        """By block, the shapes of what a rollout carries; ValueError where blocks are not swapped, whose linear
        attention sums over all tokens."""
        blocks: Any = self.transformer_blocks
        stock = [index for index, block in enumerate(blocks) if not block.attn1.has_gates]
        if stock:
            raise ValueError(f"a state needs all blocks swapped (blocks=None): blocks {stock} are diffusers' own")
        tail = {"ff.tail": (batch, 1, tokens, self.config.num_attention_heads * self.config.attention_head_dim)}
        return [{**block.attn1.state_shapes(batch, tokens, kept), **tail} for block in blocks]
