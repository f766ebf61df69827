"""What Wan and SanaVideo share: GDN on the projections and norms of a host that has no gates."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from diffusers.models.modeling_utils import get_parameter_dtype
from einops import rearrange, reduce
from torch import Tensor, nn
from torch.nn.utils import skip_init

from .. import checks, functional, parallel
from ..gdn import bidirectional_gdn
from ..kernels.types import accumulation_dtype
from ..rollout_state import RolloutState
from . import GRID_ENTRIES, SwapOptions, Swapped, refuse_hooks
from .clip import Span, as_values, facts_of, locate, pairs, rotary_tables
from .configuration import ConfiguredModel, write
from .rollout import Carried, begin, position, scan_options

#: What a frame forgets of the state at the start, 1 - g: so little that a clip's first and last frame weigh the same.
START_FORGETTING = 1e-4

#: The entries of a model's configuration by which its gates are made again.
ENTRIES = ("gdn_blocks", "start_scale", *GRID_ENTRIES)


class GatedAttention(Swapped):
    """A host's `attn1`: GDN where it has gates, the host's own attention where it has none.

    The host's `to_q`, `to_k`, `to_v`, `norm_q`, `norm_k` and `to_out` are kept and called. Gates (SANA-WM's names):
    `beta_proj` and `gate_proj` (H, C), `A_log` and `dt_bias` (H), float32.

    With q, k after norm and ReLU and the gates as they start (β the same for all tokens, g next to 1), numerator and
    denominator both scale with β and the key scale, which cancel, and what the delta rule erases goes with its square:
    as `start_scale` shrinks, GDN tends to linear attention (Σ v k~ᵀ) q~ / (Σ k)ᵀ q.

    Attributes:
        start_scale: multiplies the key scale 1/√(D·S). It stays where it is in training, in which `norm_k.weight` and
            β set the strength of the delta rule.
    """

    added = ("beta_proj", "gate_proj", "A_log", "dt_bias", "start_scale")
    processor_class: ClassVar[type]

    @classmethod
    def check(cls, module: nn.Module) -> None:
        super().check(module)
        if type(module.processor) is not cls.processor_class:
            raise ValueError(
                f"expected attention by {cls.processor_class.__name__}, found {type(module.processor).__name__}: "
                "swap would silently undo it"
            )
        if module.norm_q is None or module.norm_k is None:
            raise ValueError("qk_norm None: without a norm on the keys the recurrence has no bound")

    @property
    def has_gates(self) -> bool:
        return "A_log" in self._parameters

    def add_gates(self, start_scale: float) -> None:
        """Gates as they start, unless there are some already; new ones are in memory even while a model is built on
        the meta device, so that a load that does not know them leaves them at their start. They are frozen where the
        whole attention is."""
        self.start_scale = start_scale
        if self.has_gates:
            return
        refuse_hooks(self, "swap")
        norm: Tensor = self.norm_k.weight
        device = torch.device("cpu") if norm.is_meta else norm.device
        dtype = norm.dtype
        if next(self.to_v.parameters(), None) is not None:  # packed weights are no parameters
            stored = get_parameter_dtype(self.to_v)
            # As the projections compute, which norms in float32 say nothing about; unless they only store this.
            dtype = stored if stored.is_floating_point and stored.itemsize >= 2 else dtype
        trained = any(parameter.requires_grad for parameter in self.parameters())
        for name in ("beta_proj", "gate_proj"):
            linear = skip_init(nn.Linear, self.to_q.in_features, self.heads, device=device, dtype=dtype)
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)
            setattr(self, name, linear.requires_grad_(trained))
        wide = accumulation_dtype(dtype)
        dt_bias = math.log(math.expm1(-math.log1p(-START_FORGETTING)))  # g = exp(-softplus(dt_bias))
        for name, value in (("A_log", 0.0), ("dt_bias", dt_bias)):
            tensor = torch.full((self.heads,), value, device=device, dtype=wide)
            self._parameters[name] = nn.Parameter(tensor, requires_grad=trained)

    def set_processor(self, processor: Any) -> None:
        """As the host's. Raises ValueError where GDN is computed, which would not call another processor."""
        if self.has_gates:
            self.check_processor(processor)
        super().set_processor(processor)  # type: ignore[misc]  # the class after this one is the host's

    def check_processor(self, processor: Any) -> None:
        """ValueError for a processor that is not the host's own, where this class computes what that one does."""
        if type(processor) is not self.processor_class:
            raise ValueError(
                f"the processor {type(processor).__name__} would not be called here: frame_gdn computes in the place "
                f"of {self.processor_class.__name__}"
            )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k after norm, and v, each (B, N, H, D), as their modules leave them."""
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(x)), self.to_v(x)
        q, k, v = (rearrange(t, "b n (h d) -> b n h d", h=self.heads) for t in (q, k, v))
        return q, k, v

    def state_shapes(self, batch: int, tokens: int, kept: int) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of what a rollout carries here, for `kept` frames of keys and values."""
        D = self.to_q.out_features // self.heads
        if self.has_gates:
            return {"attn.S": (batch, self.heads, D, D), "attn.z": (batch, self.heads, D)}
        return dict.fromkeys(("attn.keys", "attn.values"), (batch, kept, tokens, self.heads, D))

    def gdn(self, x: Tensor, rotary_emb: tuple[Tensor, Tensor], clip: Span, carried: Carried | None = None) -> Tensor:
        """(B, N_local, C) after the host's modulation -> (B, N_local, C) before `to_out`."""
        q, k, v = self.project(x)
        key_scale = self.start_scale * (k.shape[-1] * (x.shape[1] // clip.frames)) ** -0.5
        q, k, v = as_values(F.relu(q), F.relu(k) * key_scale, v)
        gate = self.gate_proj(reduce(x, "b (t s) c -> b t c", "mean", t=clip.frames))
        decay = functional.decay(gate, self.A_log, self.dt_bias)
        out, state = bidirectional_gdn(
            q, k, v, self.beta_proj(x).sigmoid(), decay,
            rotary=pairs(rotary_emb), **clip.grid.facts, **scan_options(carried, clip, "attn"),
            group=self.group, frames_per_rank=clip.counts, backend=self.backend,
        )  # fmt: skip
        if carried is not None and clip.active is not None:
            carried.keep_gdn_state("attn", state)
        return rearrange(out, "b n h d -> b n (h d)")


class GatedModel(ConfiguredModel):
    """A swapped model with gates of its own, which diffusers' own class would drop on loading, with a warning only."""

    def enable_parallelism(self, **kwargs: Any) -> None:
        raise ValueError("a swapped model is sharded by frames: frame_gdn.parallelize(model, group)")

    def locate(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        arguments: Mapping[str, object],
        state: RolloutState | None,
        output_state: bool,
    ) -> tuple[Span, tuple[int, ...], tuple[Tensor, Tensor]]:
        """Where the call's frames are in the clip, its size (T_local, h, w) in patches, and `rotary_emb` of it.

        One tiny exchange under a group. Of `timestep`, which may have a rank's own frames or tokens, ranks must have
        the number of dimensions alike. Raises ValueError, on all ranks alike, for ranks that disagree or have no
        frame, for a T that is no multiple of the patches' length, and for a state that does not fit.
        """
        with parallel.checked(self.group, due=True):
            checks.tensor("hidden_states", hidden_states, ("B", "C", "T", "h", "w"))
            patch = self.config.patch_size
            if hidden_states.shape[2] % patch[0]:
                raise ValueError(
                    f"the latents' {hidden_states.shape[2]} frames are no multiple of the patch size {patch[0]}"
                )
            size = tuple(n // p for n, p in zip(hidden_states.shape[2:], patch, strict=True))
            said = {"hidden_states": hidden_states, **arguments, "timestep dimensions": timestep.dim()}
            facts = facts_of(self, {"hidden_states": 2}, said)
            grid = begin(self, state, output_state, hidden_states, size)
        clip = locate(self, hidden_states, size[0], facts, grid=grid, state=state, output_state=output_state)
        head_dim = self.config.attention_head_dim
        return clip, size, rotary_tables(head_dim, position(state) + clip.start, size, hidden_states.device)


def open_gates(
    model: nn.Module,
    attentions: Mapping[int, nn.Module],
    options: SwapOptions,
    start_scale: float,
    others: Sequence[str] = (),
) -> None:
    """Give gates to the attentions (by number of their block), and note it in the model's configuration.

    Args:
        start_scale: what stands for None in the options.
        others: names of options that the configuration holds beside `ENTRIES`.
    """
    start_scale = start_scale if options.start_scale is None else options.start_scale
    for attention in attentions.values():
        assert isinstance(attention, GatedAttention)
        attention.add_gates(start_scale)
    entries = {"gdn_blocks": sorted(attentions), "start_scale": start_scale, **options.grid.facts}
    write(model, {**entries, **{name: getattr(options, name) for name in others}})
