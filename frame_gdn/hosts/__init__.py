"""The models of diffusers that `swap` knows, and how a module of theirs changes its class and gets it back.

A file or folder a host, named in `HOSTS`, imported when `swap` is given a model of that host (diffusers is no
requirement of this package). It offers three functions:

    present(model)            the options that it has already, of an earlier `swap` or from its configuration.
    replace(model, options)   put GDN in place of the host's attention in the chosen blocks; called by `swap`. Again on
                              a swapped model, it changes the options and whatever is not swapped yet.
    cover(model)              make every other site that looks across frames `FrameSharded`; called by `parallelize`,
                              which then sets the group on all of them.

and its replacements: subclasses `class X(Swapped, host.X)` under the host's own name, whose forward is ours. `unswap`
needs nothing from a host: every `Swapped` module knows what it was.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from .. import checks
from ..chunks import ChunkGrid, SoftmaxWindow
from ..functional import ATTENTIONS
from ..kernels.backends import BACKENDS
from ..parallel import FrameSharded

#: The class of the model in diffusers -> the module of this package that knows it.
HOSTS = {
    "SanaWMTransformer3DModel": "sana_wm",
    "SanaVideoTransformer3DModel": "sana_video",
    "WanTransformer3DModel": "wan",
}

#: The entries of a model's configuration, and the options of `swap`, that make its grid of chunks.
GRID_ENTRIES = ("chunk_frames", "first_chunk_frames", "merge_tail")

#: Those that make its window of softmax attention.
WINDOW_ENTRIES = ("softmax_window", "softmax_sink")

#: Those in which NVlabs' streaming code and diffusers read SANA-WM differently; their defaults are diffusers' reading.
READINGS = ("camera_conv_past", "camera_rescale", "softmax_scale")

#: Entry of a model's configuration -> the option of `swap` that it holds. (`frame_gdn.hosts.configuration` says more.)
CONFIG_ENTRIES = {
    "gdn_blocks": "blocks",
    "start_scale": "start_scale",
    **{name: name for name in (*GRID_ENTRIES, *WINDOW_ENTRIES, *READINGS)},
}

#: The entry in which earlier versions kept all options of SanaVideo and Wan; it is read, and replaced by the others.
EARLIER_ENTRY = "frame_gdn"


@dataclass(frozen=True)
class SwapOptions:
    """What `swap` was asked for; None is the host's own choice. Raises ValueError for an option out of its range."""

    blocks: Sequence[int] | None = None
    start_scale: float | None = None
    chunk_frames: int | None = None
    first_chunk_frames: int | None = None
    merge_tail: bool = False
    softmax_window: int | None = None
    softmax_sink: bool = False
    camera_conv_past: bool = True
    camera_rescale: bool = True
    softmax_scale: float | None = None
    backend: str = "auto"
    attention: str = "auto"

    def __post_init__(self) -> None:
        if self.blocks is not None:
            checks.integers("blocks", self.blocks, 0)
        checks.number("start_scale", self.start_scale, 0, above=True, optional=True)
        self.window.check(self.grid)
        checks.flag("camera_conv_past", self.camera_conv_past)
        checks.flag("camera_rescale", self.camera_rescale)
        checks.number("softmax_scale", self.softmax_scale, 0, above=True, optional=True)
        checks.choice("backend", self.backend, BACKENDS)
        checks.choice("attention", self.attention, ATTENTIONS)

    @property
    def grid(self) -> ChunkGrid:
        """The grid of chunks."""
        return ChunkGrid(self.chunk_frames, self.first_chunk_frames, self.merge_tail)

    @property
    def window(self) -> SoftmaxWindow:
        """The window of softmax attention."""
        return SoftmaxWindow(self.softmax_window, self.softmax_sink)

    @property
    def of_sites(self) -> dict[str, Any]:
        """What every replacement is told, as attributes of its own."""
        return {name: getattr(self, name) for name in ("backend", "attention", "grid", "window", *READINGS)}

    def refuse(self, names: Sequence[str], model: nn.Module) -> None:
        """ValueError for an option of these that is not at its default: the model has nothing that it would change."""
        for name in names:
            if getattr(self, name) != getattr(SwapOptions, name):
                raise ValueError(f"{name} {getattr(self, name)!r} changes nothing in a {type(model).__name__}")

    def chosen(self, total: int) -> list[int]:
        """The indices of the chosen blocks out of `total`, all where none were named; ValueError outside the range."""
        if self.blocks is None:
            return list(range(total))
        if not self.blocks or max(self.blocks) >= total:
            raise ValueError(f"blocks must be one or more indices from 0 to {total - 1}, got {list(self.blocks)}")
        return sorted(set(self.blocks))


class Swapped(FrameSharded):
    """A host's module whose class was changed to ours: `class X(Swapped, host.X)`.

    Parameters, children and their names stay where they are, so `state_dict()` keys do too, and a class can be had
    back. The replacement bears the name of the class that it replaces: `compile_repeated_blocks`, `_no_split_modules`
    and the `_class_name` that `save_pretrained` writes all go by name. It is a module-level class, so it pickles.

    Attributes:
        added: names of what a replacement adds to the instance (children, parameters, plain attributes): deleted when
            the host's class returns.
        backend, attention, camera_conv_past, camera_rescale, softmax_scale: as in `swap`.
        grid: the grid of chunks.
        window: the window of softmax attention.
    """

    added: ClassVar[tuple[str, ...]] = ()
    backend: str = "auto"
    attention: str = "auto"
    grid: ChunkGrid = ChunkGrid()
    window: SoftmaxWindow = SoftmaxWindow()
    camera_conv_past: bool = True
    camera_rescale: bool = True
    softmax_scale: float | None = None

    if TYPE_CHECKING:  # its children are the host's, whose types nobody stated

        def __getattr__(self, name: str) -> Any: ...

    @property
    def chunk_frames(self) -> int | None:
        """Frames of a chunk, as in `swap`."""
        return self.grid.chunk_frames

    @classmethod
    def host_class(cls) -> type[nn.Module]:
        """The class that this one replaces."""
        return next(base for base in cls.__mro__ if issubclass(base, nn.Module) and not issubclass(base, FrameSharded))

    @classmethod
    def check(cls, module: nn.Module) -> None:
        """ValueError where the module is neither this class nor exactly what it replaces, or carries a hook."""
        if type(module) is cls:
            return
        if type(module) is not cls.host_class():
            raise ValueError(
                f"expected a {cls.__name__} as diffusers makes it, found a {type(module).__module__}."
                f"{type(module).__qualname__}: swap before anything wraps or replaces its modules"
            )
        refuse_hooks(module, "swap")

    def release(self) -> list[str]:
        """Return to the host's class; the `state_dict` keys that this drops, relative to this module."""
        before = list(self.state_dict())
        for name in self.added:
            if hasattr(self, name):
                delattr(self, name)
        for name in ("group", "backend", "attention", "grid", "window", *READINGS):
            self.__dict__.pop(name, None)
        after = set(self.state_dict())
        self.__class__ = self.host_class()  # type: ignore[assignment]
        return [key for key in before if key not in after]


def adopt(replacements: Sequence[tuple[nn.Module, type[Swapped]]], **attributes: Any) -> None:
    """Change each module's class to its replacement and set the attributes; where it is that already, only the latter.

    Raises ValueError as `Swapped.check`, and then changes nothing.
    """
    for module, replacement in replacements:
        replacement.check(module)
    for module, replacement in replacements:
        module.__class__ = replacement
        for name, value in attributes.items():
            setattr(module, name, value)


def refuse_hooks(module: nn.Module, what: str) -> None:
    """A hook of diffusers or accelerate holds on to the forward it met: another class would change nothing.

    A hook that was removed leaves the class's own forward on the instance, which is taken off here.
    """
    if getattr(module.__dict__.get("forward"), "__func__", None) is type(module).forward:
        del module.forward
    if "forward" in module.__dict__:
        raise ValueError(
            f"cannot {what}: a {type(module).__name__} carries a hook (offloading, caching, enable_parallelism) that "
            f"holds on to its present forward. Remove the hooks, {what}, then enable them again"
        )


def find(model: nn.Module) -> ModuleType | None:
    """The file in this folder that knows the model's class; None where there is none."""
    for cls in type(model).__mro__:
        if cls.__name__ in HOSTS and cls.__module__.split(".")[0] == "diffusers":
            return importlib.import_module(f".{HOSTS[cls.__name__]}", __name__)
    return None
