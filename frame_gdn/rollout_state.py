"""`RolloutState`: what a model carries from chunk to chunk, one typed object for `VideoDiT` and every host."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from . import checks

#: What a file of a state says of itself, and the version of its layout.
_FORMAT, _VERSION = "frame_gdn.RolloutState", 1


@dataclass(frozen=True)
class RolloutState:
    """What a model carries from one call to the next: after whole chunks, of a size that does not grow with a window.

    The tensors are the state's own: no call of a model changes them.

    Attributes:
        blocks: by block, its tensors by name. "attn.S" (B, H, D, D) and "attn.z" (B, H, D) of GDN, in float32 at
            least; "attn.conv_tail" (B, K-1, S, C), raw keys of the last frames; "attn.keys" and "attn.values"
            (B, T, S, H, D) of softmax attention, rotated, of the chunks that are kept; "ff.tail" (B, 1, S, C), the
            temporal convolution's input at the last frame. A camera branch has the same under "cam.".
        frames: frames of the clip that have been consumed.
        chunks: chunks of the clip that have been consumed.
        kept: frames of each chunk of which softmax blocks keep keys and values, in the order of the clip.
        facts: the configuration of the model and of the call that made it, which must be those that continue it.
        size: h, w of the latents; None where nobody said.
        rows: rows of the batch that one clip has: 2 with classifier-free guidance, the negative ones first.
    """

    blocks: list[dict[str, Tensor]]
    frames: int
    chunks: int
    kept: tuple[int, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)
    size: tuple[int, int] | None = None
    rows: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.numel() * t.element_size() for block in self.blocks for t in block.values())

    @property
    def position(self) -> int | Tensor:
        """The number in the clip of the next call's first frame: `frames`, or a tensor () int64 of the same value
        where a captured graph must read it anew at each replay."""
        return self.frames

    @property
    def batch(self) -> int:
        """Clips in the state; 0 without a tensor."""
        return next((t.shape[0] for block in self.blocks for t in block.values()), 0)

    def map(self, function: Callable[[Tensor], Tensor]) -> "RolloutState":
        """The state with a function of every tensor in its place."""
        return replace(self, blocks=[{name: function(t) for name, t in block.items()} for block in self.blocks])

    def to(self, device: torch.device | str) -> "RolloutState":
        """The state on another device; dtypes stay. Raises ValueError for what is no device."""
        device = checks.device("device", device)
        return self.map(lambda t: t.to(device))

    def detach(self) -> "RolloutState":
        """The state without its history: gradients stop here."""
        return self.map(Tensor.detach)

    def clone(self) -> "RolloutState":
        """A copy in memory of its own, `nbytes` of it: a branch."""
        return self.map(Tensor.clone)

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors by name, "blocks.0.attn.S" ..., contiguous."""
        return {
            f"blocks.{i}.{name}": t.contiguous() for i, block in enumerate(self.blocks) for name, t in block.items()
        }

    @staticmethod
    def stack(states: "Sequence[RolloutState]") -> "RolloutState":
        """States of one model after as many frames as one batch, in their order.

        Raises:
            ValueError: no state, or states of other models, frames, sizes, dtypes or devices.
        """
        if not states or not all(isinstance(state, RolloutState) for state in states):
            raise ValueError(f"states must be one or more of RolloutState, got {checks.shown(states)}")
        first = states[0]
        for index, state in enumerate(states):
            state.check(f"states[{index}]", first.facts, first.frames, [_shapes(block) for block in first.blocks])
            if state.size != first.size or state.kept != first.kept:
                raise ValueError(f"states[{index}] is of latents {state.size}, states[0] of {first.size}")
            if state.rows != 1:
                raise ValueError(f"states[{index}] has the rows of guidance, which do not stack")
        blocks = [
            {name: torch.cat([state.blocks[i][name] for state in states]) for name in block}
            for i, block in enumerate(first.blocks)
        ]
        return replace(first, blocks=blocks)

    def split(self, batches: int | Sequence[int] = 1) -> "list[RolloutState]":
        """The inverse of `stack`: states of so many clips each. The tensors are copies."""
        if isinstance(batches, int):
            checks.integer("batches", batches, 1)
            batches = [min(batches, self.batch - first) for first in range(0, self.batch, batches)]
        checks.integers("batches", batches, 0)
        if sum(batches) != self.batch:
            raise ValueError(f"batches must add up to the state's {self.batch} clips, got {list(batches)}")
        starts = [sum(batches[:i]) for i in range(len(batches))]
        return [
            self.map(lambda t, first=first, n=n: t[first : first + n].clone())  # type: ignore[misc]
            for first, n in zip(starts, batches, strict=True)
        ]

    def check(
        self,
        name: str,
        facts: Mapping[str, Any],
        frames: int | None,
        shapes: Sequence[Mapping[str, Sequence[int | str]]],
        beside: tuple[str, Tensor] | None = None,
    ) -> None:
        """ValueError, which names the argument, unless a model of these facts can continue from the state.

        Args:
            facts: what must be alike in `facts`.
            frames: what `frames` must be; None: any.
            shapes: by block, the shape of every tensor, a size or a name a dimension.
            beside: name and tensor of the argument on whose device the state must be.
        """
        checks.integer(f"{name}.frames", self.frames, 0)
        checks.integer(f"{name}.chunks", self.chunks, 0)
        checks.integers(f"{name}.kept", self.kept, 1)
        if frames is not None and self.frames != frames:
            raise ValueError(f"{name} stands after {self.frames} frames, wanted {frames}")
        self.check_facts(name, {**dict.fromkeys(self.facts), **facts})
        if len(self.blocks) != len(shapes):
            raise ValueError(f"{name} is of {len(self.blocks)} blocks, the model has {len(shapes)}")
        for index, (block, wanted) in enumerate(zip(self.blocks, shapes, strict=True)):
            checks.keys(f"{name}.blocks[{index}]", block, list(wanted))
            for key, shape in wanted.items():
                checks.tensor(f"{name}.blocks[{index}][{key!r}]", block[key], shape, beside=beside)

    def check_facts(self, name: str, facts: Mapping[str, Any]) -> None:
        """ValueError, which names the argument, unless the state has these facts."""
        for fact, wanted in facts.items():
            if self.facts.get(fact) != wanted:
                raise ValueError(f"{name} is of a model with {fact} {self.facts.get(fact)!r}, this one has {wanted!r}")

    def save(self, path: str | Path) -> None:
        """Write the state to a file in the format of safetensors, whole or not at all: a new file takes its place.

        Raises:
            ValueError: a path that cannot be written.
        """
        from safetensors import SafetensorError  # here, since safetensors may be missing
        from safetensors.torch import save_file

        path = _path(path)
        about = {
            "format": _FORMAT, "version": str(_VERSION), "frames": str(self.frames), "chunks": str(self.chunks),
            "kept": json.dumps(self.kept), "facts": json.dumps(self.facts), "blocks": str(len(self.blocks)),
            "size": json.dumps(self.size), "rows": str(self.rows),
        }  # fmt: skip
        draft = path.with_name(f"{path.name}.part")
        try:
            save_file({name: t.detach() for name, t in self.state_dict().items()}, str(draft), about)
            draft.replace(path)
        except (OSError, SafetensorError) as error:
            raise ValueError(f"path: the state cannot be written to {path}: {error}") from error

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> "RolloutState":
        """A state from a file, for a model of the configuration that it was made with, on that model's device.

        Raises:
            ValueError: a file that is missing, truncated, of something else or of another version; a state of a model
                with another class, configuration or dtype.
        """
        from safetensors import SafetensorError, safe_open  # here, since safetensors may be missing

        path = _path(path)
        config = getattr(model, "config", None)
        if not isinstance(model, nn.Module) or not isinstance(config, Mapping):
            raise ValueError(
                f"model must be one that a state can be of, with a configuration, got {checks.shown(model)}"
            )
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        try:
            with safe_open(str(path), "pt", device="cpu") as file:
                about = file.metadata() or {}
                if about.get("format") != _FORMAT or about.get("version") != str(_VERSION):
                    raise ValueError(
                        f"path: {path} must be a {_FORMAT} of version {_VERSION}, got "
                        f"{about.get('format', 'another file')} of version {about.get('version')}"
                    )
                tensors = {name: file.get_tensor(name).to(device) for name in file.keys()}  # noqa: SIM118
            blocks: list[dict[str, Tensor]] = [{} for _ in range(int(about["blocks"]))]
            for name, tensor in tensors.items():
                _, index, key = name.split(".", 2)
                blocks[int(index)][key] = tensor
            kept, size = tuple(json.loads(about["kept"])), json.loads(about["size"])
            state = cls(
                blocks, int(about["frames"]), int(about["chunks"]), kept, json.loads(about["facts"]),
                None if size is None else tuple(size), int(about["rows"]),
            )  # fmt: skip
        except (OSError, SafetensorError, KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"path: {path} cannot be read as a state: {error}") from error
        state.check_facts("path's state", facts_of(model, getattr(model, "dtype", None)))
        return state


def facts_of(model: Any, dtype: torch.dtype | None, **options: Any) -> dict[str, Any]:
    """What must be alike in the model that makes a state and the one that continues it, as JSON has it.

    Args:
        dtype: of the model's latents.
        options: what a call may set in place of the configuration's entries.
    """
    config = {name: value for name, value in model.config.items() if not name.startswith("_")}
    facts = {"class": type(model).__name__, **config, **options, "dtype": str(dtype).removeprefix("torch.")}
    loaded: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return loaded


def _shapes(block: Mapping[str, Tensor]) -> dict[str, tuple[int | str, ...]]:
    """The shapes of a block's tensors, of any batch."""
    return {name: ("B", *t.shape[1:]) for name, t in block.items()}


def _path(path: Any) -> Path:
    if not isinstance(path, (str, Path)):
        raise ValueError(f"path must be a path, got {checks.shown(path)}")
    return Path(path)
