"""Wan (`WanTransformer3DModel`): chosen softmax blocks become GDN, which must then be trained.

Projections and norms of a chosen block are kept, its gates are new, and GDN is no approximation of softmax attention:
a swapped Wan makes noise until it is trained (or distilled from the model it was).

What looks across frames: `attn1` and the rotary positions. Softmax blocks gather keys and values over shards, and
under chunk_frames attend to their own and earlier chunks.
Source of the formulas: `transformer_wan.py` of diffusers.
"""

from .. import needs_diffusers as needs_diffusers  # isort: skip

from collections.abc import Mapping
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline that loads looks for it here
from diffusers.models.transformers import transformer_wan as host
from diffusers.utils import apply_lora_scale
from einops import rearrange
from torch import Tensor, nn

from .. import functional
from ..kernels import flash4
from ..rollout_state import RolloutState
from . import READINGS, WINDOW_ENTRIES, SwapOptions, Swapped, adopt
from .clip import Span, as_values, attend_to, call_block, diffusers_chose, pairs
from .configuration import present as present  # one of the host's three functions
from .configuration import swapping_init
from .gates import ENTRIES, GatedAttention, GatedModel, open_gates
from .rollout import Carried, end, output, seen_keys

START_SCALE = 1.0


def replace(model: nn.Module, options: SwapOptions) -> None:
    """Swap the chosen blocks; where none were named, all but every fourth, which stays softmax as in SANA-WM."""
    blocks: Any = model.blocks
    chosen = options.chosen(len(blocks))
    if options.blocks is None:
        chosen = [index for index in chosen if (index + 1) % 4]
    chosen += [index for index, block in enumerate(blocks) if hasattr(block.attn1, "A_log")]
    options.refuse(READINGS, model)
    adopt([(model, WanTransformer3DModel), *_sites(model)], **options.of_sites)
    open_gates(model, {index: blocks[index].attn1 for index in chosen}, options, START_SCALE, WINDOW_ENTRIES)


def cover(model: nn.Module) -> None:
    """Make every site right over shards; a swapped model is already."""
    if not isinstance(model, WanTransformer3DModel):
        adopt([(model, WanTransformer3DModel), *_sites(model)])


def _sites(model: Any) -> list[tuple[nn.Module, type[Swapped]]]:
    sites: list[tuple[nn.Module, type[Swapped]]] = []
    for block in model.blocks:
        sites += [(block, WanTransformerBlock), (block.attn1, WanAttention)]
    return sites


class WanAttention(GatedAttention, host.WanAttention):
    """GDN, or the host's softmax attention to all frames of the clip that may be seen."""

    processor_class = host.WanAttnProcessor

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
        *,
        clip: Span,
        carried: Carried | None = None,
    ) -> Tensor:
        """(B, N_local, C) -> (B, N_local, C); `carried`: what a rollout carries."""
        if self.has_gates:
            out = self.gdn(hidden_states, rotary_emb, clip, carried)
        elif clip.is_plain and carried is None and not self._takes_flash4(hidden_states):
            return super().forward(hidden_states, None, None, rotary_emb)
        else:
            self.check_processor(self.processor)
            q, k, v = as_values(*self.project(hidden_states))
            q, k = (functional.rotary(t, *pairs(rotary_emb), backend=self.backend) for t in (q, k))
            backend = self.processor._attention_backend
            k, v = seen_keys(k, v, clip, self.group, carried, "attn")
            out = attend_to(q, k, v, clip, attention=self.attention, backend=backend)
            out = rearrange(out, "b n h d -> b n (h d)")
        return self.to_out[1](self.to_out[0](out))

    def _takes_flash4(self, x: Tensor) -> bool:
        """Whether softmax attention is another one than the host's."""
        if self.attention == "auto":
            if type(self.processor) is not self.processor_class:
                return False
            head_dim = self.inner_dim // self.heads
            return not diffusers_chose(self.processor._attention_backend) and flash4.refusal(x, head_dim) is None
        return self.attention == "flash4"


class WanTransformerBlock(Swapped, host.WanTransformerBlock):
    """The host's block, which tells its attention where the frames are."""

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        temb: Tensor,
        rotary_emb: tuple[Tensor, Tensor],
        clip: Span,
        state: Mapping[str, Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """As in the host; and the block's part of the new state too where `clip` asks for one.

        Args:
            state: the block's part of the state that is continued.
        """
        carried = None if state is None and clip.active is None else Carried(state or {})
        table = self.scale_shift_table
        if temb.dim() == 4:  # (B, N, 6, C), a time a token, else (B, 6, C)
            modulation = (table.unsqueeze(0) + temb.float()).unbind(2)
        else:
            modulation = (table + temb.float()).chunk(6, 1)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = modulation

        x = hidden_states
        h = (self.norm1(x.float()) * (1 + scale) + shift).type_as(x)
        h = self.attn1(h, rotary_emb=rotary_emb, clip=clip, carried=carried)
        x = (x.float() + h * gate).type_as(x)

        h = self.norm2(x.float()).type_as(x)
        x = x + self.attn2(h, encoder_hidden_states, None, None)

        h = (self.norm3(x.float()) * (1 + ffn_scale) + ffn_shift).type_as(x)
        x = (x.float() + self.ffn(h).float() * ffn_gate).type_as(x)
        return x if carried is None or clip.active is None else (x, carried.new)


# As the host's block is: `enable_cache` looks a block up by its class.
TransformerBlockRegistry.register(WanTransformerBlock, TransformerBlockMetadata(return_hidden_states_index=0))


class WanTransformer3DModel(GatedModel, host.WanTransformer3DModel):
    """The model, swapped from the start where it is built or loaded under this name; A_log and dt_bias stay float32
    whatever the load's `torch_dtype`.

    Args:
        gdn_blocks: `blocks` of `swap`.
        start_scale, chunk_frames, first_chunk_frames, merge_tail, softmax_window, softmax_sink: as in `swap`.
        frame_gdn: the three as a mapping, as earlier versions saved them; the other arguments are the host's.
    """

    _keep_in_fp32_modules = [*host.WanTransformer3DModel._keep_in_fp32_modules, "A_log", "dt_bias"]

    __init__ = swapping_init(host.WanTransformer3DModel.__init__, replace, *ENTRIES, *WINDOW_ENTRIES)

    @apply_lora_scale("attention_kwargs")
    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
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
                inside a chunk, or a short tail that continues it alone with merge_tail.
        """
        others = {
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_hidden_states_image": encoder_hidden_states_image,
        }
        clip, (frames, height, width), rotary_emb = self.locate(hidden_states, timestep, others, state, output_state)
        x = rearrange(self.patch_embedding(hidden_states), "b c t h w -> b (t h w) c").contiguous()

        # Noise levels and text: a time a sample (B,), or one a token (B, N)
        embedded, modulation, text, image = self.condition_embedder(
            timestep.flatten(),
            encoder_hidden_states,
            encoder_hidden_states_image,
            timestep_seq_len=timestep.shape[1] if timestep.dim() == 2 else None,
        )
        modulation = modulation.unflatten(-1, (6, -1))
        if image is not None:
            text = torch.cat([image, text], 1)

        states = []
        for index, block in enumerate(self.blocks):
            block_state = None if state is None else state.blocks[index]
            x = call_block(self, block, x, text, modulation, rotary_emb, clip, block_state)
            if output_state:
                x, block_state = x
                states.append(block_state)

        table = self.scale_shift_table.to(embedded.device)  # (1, 2, C)
        shift, scale = (table + embedded.unsqueeze(-2)).to(x.device).chunk(2, -2)  # (B, 1, C) or (B, N, 1, C) each
        if embedded.dim() == 3:
            shift, scale = shift.squeeze(2), scale.squeeze(2)
        x = self.proj_out((self.norm_out(x.float()) * (1 + scale) + shift).type_as(x))
        p, q, r = self.config.patch_size
        sample = rearrange(
            x, "b (t h w) (p q r c) -> b c (t p) (h q) (w r)", t=frames, h=height, w=width, p=p, q=q, r=r
        )
        new_state = end(self, state, states, clip) if output_state else None
        return output(sample, new_state, return_dict)

    def state_shapes(self, batch: int, tokens: int, kept: int) -> list[dict[str, tuple[int, ...]]]:
        """By block, the shapes of what a rollout carries, for `kept` frames of keys and values."""
        return [block.attn1.state_shapes(batch, tokens, kept) for block in self.blocks]
