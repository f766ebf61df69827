"""How kernels are launched: the device guard, the choice of a tile, what was compiled; operators for the compiler."""

import functools
from collections.abc import Callable, Sequence
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

#: Tiles of one kernel by precision, best first, as measured on an H200.
Tiles = dict[str, list[dict[str, int]]]

_compiled: dict[Any, Any] = {}


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _shared_memory(device: torch.device) -> int:
    return int(max_shared_mem(device.index))


class Launcher:
    """Launches kernels, and says what the device of a tensor offers. A test may hand in one of its own."""

    def multiprocessors(self, device: torch.device) -> int:
        """How many multiprocessors the device has; one in the interpreter, where nothing runs side by side."""
        return _multiprocessors(device) if device.type == "cuda" else 1

    def shared_memory(self, device: torch.device) -> int:
        """How many bytes a block of threads can have; an H200's in the interpreter."""
        return _shared_memory(device) if device.type == "cuda" else 232448

    def launch(
        self,
        kernel: Any,
        grid: Callable[[dict[str, int]], tuple[int, int, int]],
        tensors: Sequence[Tensor],
        numbers: tuple[int | float, ...],
        options: dict[str, Any],
        tiles: Tiles,
    ) -> None:
        """Launches with the first of the precision's tiles that fits the device; `grid` maps the tile to the grid.

        What was compiled is found again by the arguments' types, alignments and values, which costs a fraction of the
        binding that Triton does on every launch; for a short clip the launches are what takes the time.
        """
        if INTERPRETED:
            tile = tiles[options["PRECISION"]][0]
            kernel[grid(tile)](*tensors, *numbers, **options, **tile)
            return
        device = tensors[0].device
        if device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.launch(kernel, grid, tensors, numbers, options, tiles)
            return
        kinds = [(x.dtype, x.data_ptr() & 15) for x in tensors]
        key = (kernel.__name__, device.index, *options.values(), *numbers, *kinds)
        found = _compiled.get(key)
        if found is None:
            for tile in tiles[options["PRECISION"]]:
                try:
                    compiled = kernel[grid(tile)](*tensors, *numbers, **options, **tile)
                except OutOfResources as error:
                    failure = error
                    continue
                constants = {**options, **tile}
                _compiled[key] = compiled, tile, [constants[p.name] for p in kernel.params if p.is_constexpr]
                return
            raise failure
        compiled, tile, constants = found
        compiled[grid(tile)](*tensors, *numbers, *constants)


_LAUNCHER = Launcher()


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
    """`torch.library.custom_op`, run on its first tensor's device: Triton launches on the current one, another GPU
    where a model was moved to "cuda:1" or spread by a device map."""

    def register(function: Callable[..., Any]) -> Any:
        @functools.wraps(function)
        def run(first: Tensor, *others: Any) -> Any:
            with torch.cuda.device_of(first):
                return function(first, *others)

        return torch.library.custom_op(f"frame_gdn::{name}", run, mutates_args=())

    return register


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


def dense(x: Tensor) -> Tensor:
    """Channels next to one another; any other strides are taken as they come."""
    return x if x.stride(-1) == 1 else x.contiguous()


def promoted_dtype(*tensors: Tensor | None) -> torch.dtype:
    """What torch makes of a sum of these."""
    dtype = torch.bool
    for x in tensors:
        dtype = dtype if x is None else torch.promote_types(dtype, x.dtype)
    return dtype


def row_strides(x: Tensor | None) -> tuple[int, int]:
    """Strides of batch and tokens, or of batch and frames; zeros where there is no such tensor."""
    return (0, 0) if x is None else (x.stride(0), x.stride(1))


def mask_bytes(mask: Tensor | None) -> Tensor | None:
    """One byte a frame, in order."""
    return None if mask is None else mask.contiguous()
