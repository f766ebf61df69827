"""How kernels are launched: the device guard, the choice of a tile, what was compiled; operators for the compiler."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem
from triton.runtime.errors import OutOfResources

#: Whether kernels run in Triton's interpreter, on the CPU; a constant of kernels.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

#: What a kernel may be launched with, best first: the sizes of its tile, and compiler's options such as num_warps.
Tiles = Sequence[dict[str, int]]

#: How many blocks a grid may have.
_LARGEST_GRID = 2**31 - 1

#: How many launches are remembered.
_MOST_LAUNCHES = 4096


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return int(max_shared_mem(device.index))


class Launcher:
    """Launches kernels, and says what the device of a tensor offers. A test may pass one of its own."""

    interpreted = bool(INTERPRETED)

    def __init__(self) -> None:
        self._compiled: dict[Any, Any] = {}

    def multiprocessors(self, device: torch.device) -> int:
        """How many multiprocessors the device has; one in the interpreter, where nothing runs side by side."""
        return _multiprocessors(device) if device.type == "cuda" else 1

    def shared_memory(self, device: torch.device) -> int:
        """How many bytes a block of threads can have; an H200's in the interpreter."""
        return _shared_memory(device) if device.type == "cuda" else 232448

    def device_of(self, arguments: tuple[Any, ...]) -> torch.device:
        """The device of the first tensor among a launch's arguments."""
        first = arguments[0]
        return first.device if isinstance(first, Tensor) else self.device_of(first)

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def on(self, device: torch.device) -> AbstractContextManager[Any]:
        """A context in which `device` is the current one, where Triton launches."""
        return torch.cuda.device(device)

    def launch(
        self,
        kernel: Any,
        grid: Callable[[dict[str, int]], int],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        tiles: Tiles,
    ) -> None:
        """Launches `kernel` on the device of its first tensor, with the first of the tiles that fits the device.

        Args:
            grid: maps a tile to the number of programs, all in the grid's first dimension: the others end at 65,535.
            arguments: tensors, numbers, None, and tuples of them, in the kernel's order.
            options: the kernel's constants, by name, but for the tile's.

        What was compiled is looked up by the arguments' types, alignments and values, which costs a fraction of the
        binding that Triton does on every launch; for a short clip the launches are what takes the time.

        Raises:
            ValueError: for more programs than a grid holds.
        """
        if self.interpreted:
            kernel[(_checked(grid(tiles[0])),)](*arguments, **options, **tiles[0])
            return
        device = self.device_of(arguments)
        if device.index != self.current_device():
            with self.on(device):
                self._launch(device, kernel, grid, arguments, options, tiles)
        else:
            self._launch(device, kernel, grid, arguments, options, tiles)

    def _launch(
        self,
        device: torch.device,
        kernel: Any,
        grid: Callable[[dict[str, int]], int],
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        tiles: Tiles,
    ) -> None:
        key = (kernel.__name__, device.index, *options.values(), *_kinds(arguments))
        known = self._compiled.get(key)
        if known is not None:
            compiled, tile, constants = known
            compiled[_checked(grid(tile)), 1, 1](*arguments, *constants)
            return
        for tile in tiles:
            try:
                compiled = kernel[(_checked(grid(tile)),)](*arguments, **options, **tile)
            except OutOfResources as error:
                failure = error
                continue
            if len(self._compiled) >= _MOST_LAUNCHES:
                self._compiled.clear()
            constants = {**options, **tile}
            self._compiled[key] = compiled, tile, [constants[p.name] for p in kernel.params if p.is_constexpr]
            return
        raise failure


def _checked(programs: int) -> int:
    if programs > _LARGEST_GRID:
        raise ValueError(f"a launch of {programs} programs is beyond the {_LARGEST_GRID} of a grid: split the batch")
    return programs


def _kinds(arguments: tuple[Any, ...]) -> list[Any]:
    """What Triton compiles differently for: tensors' dtypes and alignments, and the numbers themselves."""
    kinds: list[Any] = []
    for x in arguments:
        if type(x) is int:  # most of them
            kinds.append(x)
        elif type(x) is tuple:
            kinds += _kinds(x)
        elif isinstance(x, Tensor):
            kinds += (x.dtype, x.data_ptr() & 15)
        else:
            kinds.append(x)
    return kinds


_LAUNCHER = Launcher()


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], *, num_warps: int = 4, **options: Any) -> None:
    """Launches a kernel that has one tile, its constants all in `options`; see `Launcher.launch`."""
    _LAUNCHER.launch(kernel, lambda _: programs, arguments, options, ({"num_warps": num_warps},))


@dataclass(frozen=True)
class Settings:
    """What a call of the scan's kernels is told apart from its tensors.

    exact: float32's accuracy whatever the tokens' dtype.
    spans: into how many spans of frames, side by side, a scan is cut; None leaves it to the device.
    """

    exact: bool = False
    spans: int | None = None
    launcher: Launcher = _LAUNCHER

    def token_precision(self, dtype: torch.dtype) -> str:
        """How tokens are multiplied: "tf32" stands for one product of 16-bit operands, "tf32x3" for three of TF32."""
        return "tf32x3" if self.exact or dtype == torch.float32 else "tf32"

    def state_precision(self, dtype: torch.dtype) -> str:
        """How states are multiplied: float16 tokens have as many bits as a product in TF32, and ask for more."""
        return "tf32" if dtype == torch.bfloat16 and not self.exact else "tf32x3"

    def gradient_blocks(self, like: Tensor) -> tuple[int, int]:
        """As `channel_blocks`, for the gradients of tokens: narrower blocks where the three whole matrices that the
        keys' kernel holds, and 16 KiB of tokens, are beyond the device's shared memory."""
        BD, NB = channel_blocks(like.shape[-1])
        # Bytes of an element; three TF32 products take two copies.
        size = 8 if self.token_precision(like.dtype) == "tf32x3" else 2
        if NB == 1 and 3 * BD * BD * size + 2**14 <= self.launcher.shared_memory(like.device):
            return BD, 1
        return (64, cdiv(like.shape[-1], 64)) if BD > 64 else (BD // 2, 2)


def operator(name: str) -> Callable[[Callable[..., Any]], Any]:
    """`torch.library.custom_op` in this package's namespace: what torch.compile(fullgraph=True) sees of a kernel."""
    return torch.library.custom_op(f"frame_gdn::{name}", mutates_args=())


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def channel_blocks(D: int) -> tuple[int, int]:
    """The width of a block of a head's channels and their number: one up to D 128, then two of 128."""
    return (max(16, 1 << (D - 1).bit_length()), 1) if D <= 128 else (128, 2)


def channel_tile(C: int, most: int, blocks: int) -> dict[str, int]:
    """The width of a block of all channels and their number: `most` or the power of two above C, wider where that
    takes more than `blocks`."""
    BC = max(min(most, triton.next_power_of_2(C)), triton.next_power_of_2(triton.cdiv(C, blocks)))
    return {"BC": BC, "BLOCKS": triton.cdiv(C, BC)}


def strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor as `tiles.locate` takes it, with the strides of its first three dimensions."""
    b, n, h = x.stride()[:3]
    return x, b, n, h


def needs_int64(S: int, *tokens: Tensor) -> bool:
    """Whether an offset within a frame of S tokens, of any of these (B, N, H, D) or (B, N, H), is beyond 32 bits.

    Kernels reach a frame's first token by a 64-bit address. The offsets from there on are most of what a program
    computes beside its products: in 64 bits, the loops over tokens would have a sixth more instructions.
    """
    return S * max(max(x.stride(1), x.shape[-1]) for x in tokens) >= 2**31


def dense(x: Tensor) -> Tensor:
    """Channels next to one another; any other strides are taken as they come."""
    return x if x.stride(-1) == 1 else x.contiguous()


def promoted_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What torch makes of a sum of these."""
    dtype = torch.bool
    for x in tensors:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    return dtype


def rows_strided(x: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A tensor with the strides of batch and tokens, or of batch and frames; zeros where there is none."""
    return (x, 0, 0) if x is None else (x, x.stride(0), x.stride(1))


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    """One byte a frame, in order."""
    return None if mask is None else mask.contiguous()
