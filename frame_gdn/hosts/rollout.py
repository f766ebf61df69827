"""What the hosts share of a rollout: the state that a call continues from, and the one that it leaves."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from einops import rearrange
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import checks, parallel
from ..chunks import ChunkGrid, frames_at
from ..gdn import GDNState
from ..rollout_state import RolloutState
from ..rollout_state import facts_of as state_facts
from . import Swapped
from .clip import Span, gathered, key_frames


@dataclass
class RolloutOutput(Transformer2DModelOutput):
    """`sample` as in the host; `state` is None unless it was asked for."""

    state: RolloutState | None = None


@dataclass
class Carried:
    """One block's part of a rollout's state during one call.

    Attributes:
        past: the block's tensors of the state that is continued, by name; none in a clip's first call.
        new: those of the state after this call, which the block's modules write.
    """

    past: Mapping[str, Tensor] = field(default_factory=dict)
    new: dict[str, Tensor] = field(default_factory=dict)

    def gdn_state(self, branch: str) -> GDNState | None:
        """The scan's state of a branch, "attn" or "cam"; the latter has no denominator. Its count of frames is left at
        0: the span's grid says already that the clip goes on."""
        S = self.past.get(f"{branch}.S")
        return None if S is None else GDNState(S, self.past.get(f"{branch}.z", S.new_zeros(S.shape[:-1])))

    def keep_gdn_state(self, branch: str, state: GDNState | None) -> None:
        """Note the scan's state after this call."""
        assert state is not None
        self.new[f"{branch}.S"] = state.S
        if branch == "attn":
            self.new["attn.z"] = state.z

    def keep_tail(self, name: str, x: Tensor, reach: int, clip: Span, group: ProcessGroup | None) -> None:
        """Note the last `reach` active frames of x (B, T_local, S, C), a convolution's input, and of what was before
        it: zeros where there are none. It is a copy, so that the rest of x can be freed."""
        assert clip.active is not None
        first, past = clip.active - reach, self.past.get(name)
        if group is not None and len(clip.counts) > 1:
            wanted = [list(range(max(first, 0), clip.active))] * len(clip.counts)
            tail = parallel.fetch_frames(x, wanted, group, clip.counts, clip.call)
        else:
            tail = x[:, max(first, 0) : clip.active]
        if first < 0:
            if past is None:
                past = x.new_zeros(x.shape[0], reach, *x.shape[2:])
            tail = torch.cat([past.to(x.dtype)[:, first:], tail], 1)
        self.new[name] = tail.clone(memory_format=torch.contiguous_format)


def scan_options(carried: Carried | None, clip: Span, branch: str) -> dict[str, Any]:
    """What a branch's `bidirectional_gdn` is told of the state that it continues from, and of the one asked for."""
    if carried is None:
        return {}
    return {"initial_state": carried.gdn_state(branch), "output_final_state": clip.active is not None}


def seen_keys(
    k: Tensor, v: Tensor, clip: Span, group: ProcessGroup | None, carried: Carried | None, branch: str
) -> tuple[Tensor, Tensor]:
    """Keys and values (B, N_local, H, D) of the frames here -> those that the state keeps and of all ranks, (B, M, H,
    D), of which the new state keeps what its window holds."""
    k, v = gathered(k, v, clip, group)
    if carried is None:
        return k, v
    seen = []
    for name, t in ((f"{branch}.keys", k), (f"{branch}.values", v)):
        t = rearrange(t, "b (t s) h d -> b t s h d", t=sum(clip.counts))
        if name in carried.past:
            t = torch.cat([carried.past[name].to(t.dtype), t], 1)
        if clip.active is not None:
            carried.new[name] = frames_at(t, clip.visible.kept).clone(memory_format=torch.contiguous_format)
        seen.append(t.flatten(1, 2))
    return seen[0], seen[1]


def begin(
    model: Swapped,
    state: RolloutState | None,
    output_state: bool,
    hidden_states: Tensor,
    size: tuple[int, ...],
    **call: Any,
) -> ChunkGrid:
    """Check the state that a call of a model is given; the grid of chunks counted from the call's first frame.

    Args:
        size: T, h, w in patches.
        call: what else the model's `state_shapes` must know of the call.

    Raises:
        ValueError: a state of another model, call, batch, size, dtype or device, or one that stands inside a chunk; a
            state under a group, and for a model that cannot have one.
    """
    checks.flag("output_state", output_state)
    if state is not None and not isinstance(state, RolloutState):
        raise ValueError(f"state must be None or a RolloutState, got {checks.shown(state)}")
    grid: ChunkGrid = model.grid
    if state is None and not output_state:
        return grid
    kept = 0 if state is None else sum(state.kept)
    shapes = model.state_shapes(len(hidden_states), size[1] * size[2], kept, **call)
    if state is None:
        return grid
    ranks = parallel.rank_and_size(model.group)[1]
    if ranks > 1:
        raise ValueError(
            f"state continues a rollout in one process, but the model's frames are sharded over {ranks} ranks: "
            "parallelize(model, None) first; the state that the ranks made is the same on all of them"
        )
    state.check("state", state_facts(model, model.dtype), None, shapes, ("hidden_states", hidden_states))
    wanted = len(model.window.kept(state.chunks))
    if len(state.kept) != wanted:
        raise ValueError(f"state keeps {len(state.kept)} chunks after {state.chunks}, the model's window {wanted}")
    grid = grid.after("state", state.frames)
    if state.frames:
        grid.check_tail(size[0])
    return grid


def end(model: Swapped, state: RolloutState | None, blocks: list[dict[str, Tensor]], clip: Span) -> RolloutState:
    """The state after a call that continued `state`, from what its blocks leave."""
    assert clip.active is not None
    chunks, kept, _ = key_frames(model, clip.grid, sum(clip.counts), state).after(clip.active)
    frames = clip.active + (0 if state is None else state.frames)
    return RolloutState(blocks, frames, chunks, kept, state_facts(model, model.dtype))


def position(state: RolloutState | None) -> int | Tensor:
    """The number in the clip of a call's first frame, as `RolloutState.position`."""
    return 0 if state is None else state.position


def output(sample: Tensor, state: RolloutState | None, return_dict: bool) -> Any:
    """What a model returns: as the host does, and the state where there is one."""
    if return_dict:
        return RolloutOutput(sample=sample, state=state)
    return (sample,) if state is None else (sample, state)
