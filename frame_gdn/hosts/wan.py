"""Wan (`WanTransformer3DModel`): chosen softmax blocks become GDN, which must then be trained.

Projections and norms of a chosen block are kept, its gates are new, and GDN is no approximation of softmax attention:
a swapped Wan makes noise until it is trained (or distilled from the model it was).

What looks across frames: `attn1` and the rotary positions. Softmax blocks gather keys and values over shards, and
under chunk_frames attend to their own and earlier chunks.
Source of the formulas: `transformer_wan.py` of diffusers.
"""

from .. import needs_diffusers as needs_diffusers  # isort: skip

from typing import Any

from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline that loads looks for it here
from diffusers.models.transformers import transformer_wan as host
from torch import Tensor, nn

from .. import functional
from ..kernels import flash4
from . import SwapOptions, Swapped, adopt
from .clip import Clip, ClipRotary, as_values, attend, diffusers_chose
from .configuration import present as present  # one of the host's three functions
from .configuration import swapping_init
from .gates import ENTRIES, GatedAttention, GatedModel, open_gates, told

START_SCALE = 1.0


def replace(model: nn.Module, options: SwapOptions) -> None:
    """Swap the chosen blocks; where none were named, all but every fourth, which stays softmax as in SANA-WM."""
    blocks: Any = model.blocks
    chosen = options.chosen(len(blocks))
    if options.blocks is None:
        chosen = [index for index in chosen if (index + 1) % 4]
    chosen += [index for index, block in enumerate(blocks) if hasattr(block.attn1, "A_log")]
    adopt(
        [(model, WanTransformer3DModel), *_sites(model)],
        backend=options.backend,
        attention=options.attention,
        chunk_frames=options.chunk_frames,
    )
    open_gates(model, {index: blocks[index].attn1 for index in chosen}, options, START_SCALE)


def cover(model: nn.Module) -> None:
    """Make every site right over shards; a swapped model is already."""
    if not isinstance(model, WanTransformer3DModel):
        adopt([*told(model, WanTransformer3DModel), *_sites(model)])


def _sites(model: Any) -> list[tuple[nn.Module, type[Swapped]]]:
    return [(model.rope, WanRotaryPosEmbed), *((block.attn1, WanAttention) for block in model.blocks)]


class WanRotaryPosEmbed(ClipRotary, host.WanRotaryPosEmbed):
    """Positions from the shard's first frame on, and the clip."""


class WanAttention(GatedAttention, host.WanAttention):
    """GDN, or the host's softmax attention to all frames of the clip that may be seen."""

    processor_class = host.WanAttnProcessor

    def forward(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """(B, N_local, C) -> (B, N_local, C)"""
        clip: Clip = rotary_emb
        if self.has_gates:
            out = self.gdn(hidden_states, clip)
        elif clip.is_plain and not self._takes_flash4(hidden_states):
            return super().forward(hidden_states, None, None, clip.tables(hidden_states.device))
        else:
            q, k, v = as_values(*self.project(hidden_states))
            rotary = clip.pairs(hidden_states.device)
            q, k = (functional.rotary(t, *rotary, backend=self.backend) for t in (q, k))
            backend = self.processor._attention_backend
            out = attend(q, k, v, clip, self.group, attention=self.attention, backend=backend).flatten(2)
        return self.to_out[1](self.to_out[0](out))

    def _takes_flash4(self, x: Tensor) -> bool:
        """Whether softmax attention is another one than the host's."""
        if self.attention == "auto":
            head_dim = self.inner_dim // self.heads
            return not diffusers_chose(self.processor._attention_backend) and flash4.refusal(x, head_dim) is None
        return self.attention == "flash4"


class WanTransformer3DModel(GatedModel, host.WanTransformer3DModel):
    """The model, swapped from the start where it is built or loaded under this name; A_log and dt_bias stay float32
    whatever the load's `torch_dtype`.

    Args:
        gdn_blocks: `blocks` of `swap`.
        start_scale, chunk_frames: as in `swap`.
        frame_gdn: the three as a mapping, as earlier versions saved them; the other arguments are the host's.
    """

    _keep_in_fp32_modules = [*host.WanTransformer3DModel._keep_in_fp32_modules, "A_log", "dt_bias"]

    __init__ = swapping_init(host.WanTransformer3DModel.__init__, replace, *ENTRIES)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_image: Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As in the host. Under a group, `hidden_states`, and `timestep` where it has frames, hold this rank's own."""
        others = {
            "encoder_hidden_states": encoder_hidden_states,
            "encoder_hidden_states_image": encoder_hidden_states_image,
        }
        self.tell_rope(hidden_states, timestep, others)
        return super().forward(
            hidden_states,
            timestep,
            encoder_hidden_states,
            encoder_hidden_states_image,
            return_dict=return_dict,
            attention_kwargs=attention_kwargs,
        )
