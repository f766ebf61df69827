"""The passes of a rollout through its model, called one by one or replayed from CUDA graphs.

An eager pass of twenty blocks is some two thousand launches: Python takes longer than the GPU. A captured pass is one
launch. It reads and writes tensors of fixed addresses: copies of the arguments, and the state that a rollout owns.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import ChunkGrid, KeyFrames, SoftmaxWindow
from .rollout_state import RolloutState

Arguments = Mapping[str, Any]

#: Captures what a function launches: its result, whose tensors every replay writes again, and the replay. As a CUDA
#: graph's capture does, it leaves all memory as it was.
Capture = Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]

#: Shapes of a pass for which graphs are kept at a time: a text of another length makes new ones.
MOST_GRAPHS = 3


class CudaGraphs:
    """`Capture` on the current GPU; the graphs share one pool of memory, since one replay follows the other."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, function: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        # Another thread, which writes the film say, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = function()
        self._pool = graph.pool()
        return result, graph.replay


def check_capturable(model: Any, device: torch.device) -> None:
    """ValueError where the passes of a model cannot be replayed: not on a GPU, weights that hooks move, softmax blocks
    that keep ever more keys."""
    if device.type != "cuda":
        raise ValueError(f"cuda_graph=True captures what a GPU is asked to do, the transformer is on {device}")
    for name, module in model.named_modules():
        hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", None)
        if hooks or hasattr(module, "_hf_hook"):
            raise ValueError(
                f"cuda_graph=True needs weights that stay where they are, but the transformer's "
                f"{name or type(module).__name__} carries a hook (offloading, caching)"
            )
    check_bounded(model)


def check_bounded(model: Any) -> None:
    """ValueError where a model keeps the keys of all of the past, so that no pass has the shapes of an earlier one."""
    shapes = model.state_shapes(1, 1, 1) if hasattr(model, "state_shapes") else []
    if SoftmaxWindow.of(model.config).chunks is None and any("attn.keys" in block for block in shapes):
        raise ValueError(
            "cuda_graph=True needs passes of equal shapes, but without softmax_window the transformer's softmax "
            "blocks keep ever more keys"
        )


class Passes:
    """A model and the state of one rollout.

    Args:
        model: called as `model(**arguments, state=..., output_state=...)`.
        state: to go on from; it is left as it is.
    """

    def __init__(self, model: nn.Module, state: RolloutState | None) -> None:
        self.model = model
        self._state = state

    @property
    def frames(self) -> int:
        """Frames of the clip that have been committed."""
        return 0 if self._state is None else self._state.frames

    @property
    def state(self) -> RolloutState | None:
        """The state after the last commit, which no later pass changes."""
        return self._state

    def predict(self, arguments: Arguments) -> Tensor:
        """The model's sample of a noisy chunk."""
        sample: Tensor = self.model(**arguments, state=self._state).sample
        return sample

    def commit(self, arguments: Arguments, **about: Any) -> None:
        """Take clean frames into the state, of which `about` says size and rows."""
        self._state = self._after(arguments, about)

    def release(self) -> None:
        """No pass will follow."""

    def _after(self, arguments: Arguments, about: Mapping[str, Any]) -> RolloutState:
        made: RolloutState = self.model(**arguments, state=self._state, output_state=True).state
        return replace(made, **about)


class CapturedPasses(Passes):
    """Passes that are replayed from graphs once an earlier chunk had their shapes; the others are eager: those of the
    first chunk, and those before the window of softmax attention is full.

    The first capture copies the state into memory of its own, which every commit from then on writes in place.

    Args:
        capture: makes a graph.
    """

    def __init__(self, model: nn.Module, state: RolloutState | None, capture: Capture) -> None:
        super().__init__(model, state)
        self._capture = capture
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graphs] = {}

    @property
    def state(self) -> RolloutState | None:
        state = self._state
        return state.snapshot() if isinstance(state, _OwnedState) else state

    def predict(self, arguments: Arguments) -> Tensor:
        graphs = self._of(arguments)
        return super().predict(arguments) if graphs is None else graphs.predict(arguments)

    def commit(self, arguments: Arguments, **about: Any) -> None:
        state, kind = self._state, self._kind(arguments)
        graphs = self._of(arguments)
        if graphs is not None and isinstance(state, _OwnedState):
            graphs.commit(arguments)
            frames = arguments["hidden_states"].shape[2]
            self._state = self._advanced(state, frames)
        else:
            made = self._after(arguments, about)
            if isinstance(state, _OwnedState) and _shapes(made) == _shapes(state):
                state.take(made)
                made = replace(state, frames=made.frames, chunks=made.chunks, kept=made.kept)
            else:
                self._graphs.clear()  # which write a state of other shapes
            self._state = made
        self._seen.add(kind)

    def release(self) -> None:
        """Free the graphs; the state is then nobody's but its holder's."""
        self._graphs.clear()
        if isinstance(self._state, _OwnedState):
            self._state = self._state.plain()

    def _of(self, arguments: Arguments) -> "_Graphs | None":
        """The graphs of passes of these shapes; None where they are new."""
        kind = self._kind(arguments)
        if kind is None or kind not in self._seen or self._state is None:
            return None
        if not isinstance(self._state, _OwnedState):
            self._state = _OwnedState.of(self._state)
        if kind not in self._graphs:
            while len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]  # the one that has not been used for longest
            self._graphs[kind] = _Graphs(self.model, self._state, arguments, self._capture)
        graphs = self._graphs[kind] = self._graphs.pop(kind)
        return graphs

    def _kind(self, arguments: Arguments) -> Hashable:
        """What passes that one graph can replay have alike; None where there is none: without a state, and under
        autocast, which frees its copies of the weights."""
        state = self._state
        if state is None or torch.is_autocast_enabled(arguments["hidden_states"].device.type):
            return None
        kept = None if SoftmaxWindow.of(self.model.config).chunks is None else state.kept  # type: ignore[arg-type]
        return kept, _shapes(state), tuple(_described(arguments))

    def _advanced(self, state: "_OwnedState", frames: int) -> "_OwnedState":
        """The same memory after so many more frames."""
        config: Any = self.model.config
        grid = ChunkGrid.of(config).continued
        keys = KeyFrames(grid, SoftmaxWindow.of(config), frames, state.chunks, state.kept)
        chunks, kept, _ = keys.after(frames)
        return replace(state, frames=state.frames + frames, chunks=chunks, kept=kept)


@dataclass(frozen=True)
class _OwnedState(RolloutState):
    """A state in memory that graphs read and write.

    Attributes:
        counter: `frames` as a tensor () int64.
    """

    counter: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64), kw_only=True)

    @classmethod
    def of(cls, state: RolloutState) -> "_OwnedState":
        """A copy."""
        device = next(t.device for block in state.blocks for t in block.values())
        counter = torch.full((), state.frames, dtype=torch.int64, device=device)
        return cls(**vars(state.clone()), counter=counter)

    @property
    def position(self) -> Tensor:
        return self.counter

    def take(self, other: RolloutState) -> None:
        """Write the tensors of a state of the same shapes, and move the counter as far as that one went."""
        for own, new in zip(self.blocks, other.blocks, strict=True):
            for name, tensor in own.items():
                tensor.copy_(new[name])
        self.counter.add_(other.frames - self.frames)

    def plain(self) -> RolloutState:
        """The state without the counter, of the same tensors."""
        return RolloutState(**{name: value for name, value in vars(self).items() if name != "counter"})

    def snapshot(self) -> RolloutState:
        """A copy that later commits leave as it is."""
        return self.plain().clone()


class _Graphs:
    """A denoising pass and a commit pass of one kind, each captured when it is first needed."""

    def __init__(self, model: nn.Module, state: _OwnedState, arguments: Arguments, capture: Capture) -> None:
        self._model, self._state, self._capture = model, state, capture
        self._arguments = _mapped(arguments, torch.clone)
        self._predict: tuple[Tensor, Callable[[], None]] | None = None
        self._commit: Callable[[], None] | None = None

    def predict(self, arguments: Arguments) -> Tensor:
        _copy(arguments, self._arguments)
        if self._predict is None:
            self._pass(False)  # what is compiled or loaded at the first call, capture cannot do
            self._predict = self._capture(lambda: self._pass(False).sample)
        sample, replay = self._predict
        replay()
        return sample.clone()

    def commit(self, arguments: Arguments) -> None:
        """Write the state in place."""
        _copy(arguments, self._arguments)
        if self._commit is None:
            self._pass(True)
            _, self._commit = self._capture(lambda: self._state.take(self._pass(True).state))
        self._commit()

    def _pass(self, output_state: bool) -> Any:
        return self._model(**self._arguments, state=self._state, output_state=output_state)


def _shapes(state: RolloutState) -> tuple[Hashable, ...]:
    return tuple((name, t.shape, t.dtype) for block in state.blocks for name, t in block.items())


def _described(arguments: Arguments) -> Any:
    """By name: shape, dtype and device of a tensor, of tensors by name within; any other value itself."""
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            yield name, tuple(_described(value))
        elif isinstance(value, Tensor):
            yield name, value.shape, value.dtype, value.device
        else:
            yield name, value


def _mapped(arguments: Arguments, function: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {
        name: _mapped(value, function) if isinstance(value, Mapping)
        else function(value) if isinstance(value, Tensor)
        else value
        for name, value in arguments.items()
    }  # fmt: skip


def _copy(source: Arguments, target: Arguments) -> None:
    for name, value in target.items():
        if isinstance(value, Mapping):
            _copy(source[name], value)
        elif isinstance(value, Tensor):
            value.copy_(source[name])


def passes_of(model: nn.Module, state: RolloutState | None, capture: Capture | None) -> Passes:
    """Eager passes, or captured ones."""
    return Passes(model, state) if capture is None else CapturedPasses(model, state, capture)
