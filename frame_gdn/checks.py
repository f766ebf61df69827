"""Checks of what a caller gives. Each raises a ValueError that names the argument, what was wanted and what it got.

They look at types, shapes, dtypes and devices, never at a tensor's values: no check waits for a device.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: Sizes and counts are int32 in kernels and in messages between ranks.
LARGEST = 2**31 - 1


def shown(value: Any) -> str:
    """A value in an error message: dtype, shape and device of a tensor, else its beginning in one line."""
    if isinstance(value, Tensor):
        layout = "" if value.layout == torch.strided else f" in {value.layout}"
        return f"a tensor {tuple(value.shape)} of {value.dtype}{layout} on {value.device}".replace("torch.", "")
    text = " ".join(repr(value).split())
    return text if len(text) <= 100 else f"{text[:97]}..."


def is_integer(value: Any) -> bool:
    """An int, also one that torch.compile traces, but not a bool."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def integer(name: str, value: Any, least: int, most: int = LARGEST, *, optional: bool = False) -> None:
    """An int from `least` to `most`; None too where it is optional."""
    if optional and value is None:
        return
    if not is_integer(value) or not least <= value <= most:
        wanted = f"an int from {least}" + (f" to {most}" if most != LARGEST else "")
        raise ValueError(f"{name} must be {'None or ' if optional else ''}{wanted}, got {shown(value)}")


def number(name: str, value: Any, least: float, *, above: bool = False, optional: bool = False) -> None:
    """A finite int or float of at least `least`, or greater than it where it must be `above`."""
    if optional and value is None:
        return
    is_number = isinstance(value, float) or is_integer(value)
    # Compared, not asked whether it is finite: torch.compile may trace the number.
    if not is_number or not -math.inf < value < math.inf or value < least or (above and value == least):
        wanted = f"a finite number {'above' if above else 'of at least'} {least:g}"
        raise ValueError(f"{name} must be {'None or ' if optional else ''}{wanted}, got {shown(value)}")


def flag(name: str, value: Any) -> None:
    """True or False itself, not what merely counts as it."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


def choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """One of some names."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")


def integers(name: str, value: Any, least: int) -> None:
    """A list, tuple or range of ints of at least `least`."""
    if not isinstance(value, (list, tuple, range)) or not all(is_integer(item) and item >= least for item in value):
        raise ValueError(f"{name} must be a list of ints from {least}, got {shown(value)}")


def pair(name: str, value: Any, parts: str) -> None:
    """A tuple or list of two."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(f"{name} must be a tuple {parts}, got {shown(value)}")


def keys(name: str, value: Any, needed: Sequence[str], optional: Sequence[str] = ()) -> None:
    """A mapping with the needed keys, and no others than those and the optional ones."""
    if not isinstance(value, Mapping) or not set(needed) <= set(value) <= {*needed, *optional}:
        wanted = ", ".join(needed) + (f" and perhaps {', '.join(optional)}" if optional else "")
        came = sorted(map(str, value)) if isinstance(value, Mapping) else shown(value)
        raise ValueError(f"{name} must be a mapping with the keys {wanted}, got {came}")


def device(name: str, value: Any) -> torch.device:
    """What torch takes for a device."""
    try:
        return torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{name} must be a device such as 'cpu' or 'cuda:0', got {shown(value)}") from error


def tensor(
    name: str,
    value: Any,
    shape: Sequence[int | str],
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    beside: tuple[str, Tensor] | None = None,
) -> None:
    """A dense tensor.

    Args:
        shape: a size a dimension; a name in place of a size admits any size.
        dtype: the one that is wanted; None: any of `FLOATS`.
        device: the one that is wanted; None: any.
        beside: name and tensor of the argument that says which; its device is wanted.
    """
    if beside is not None:
        device = beside[1].device
    if (
        not isinstance(value, Tensor)
        or value.layout != torch.strided
        or value.dim() != len(shape)
        or any(not isinstance(size, str) and size != actual for size, actual in zip(shape, value.shape, strict=True))
        or value.dtype not in (FLOATS if dtype is None else (dtype,))
        or (device is not None and value.device != device)
    ):
        wanted = f"a tensor ({', '.join(str(size) for size in shape)}{',' if len(shape) == 1 else ''}) of "
        wanted += "floating point" if dtype is None else str(dtype).removeprefix("torch.")
        wanted += "" if device is None else f" on {device}"
        wanted += "" if beside is None else f" to go with {beside[0]} {tuple(beside[1].shape)}"
        raise ValueError(f"{name} must be {wanted}, got {shown(value)}")


def mask(name: str, value: Any, shape: Sequence[int | str], beside: tuple[str, Tensor] | None = None) -> None:
    """A tensor of bool, of integers or floating point, as tokenizers and pipelines give a mask of 1 and 0."""
    dtype = value.dtype if isinstance(value, Tensor) and not value.dtype.is_complex else torch.bool
    tensor(name, value, shape, dtype=dtype, beside=beside)


def movable(name: str, value: Tensor, device: torch.device) -> None:
    """A tensor that can be copied to a device: one on the meta device holds no data."""
    if value.is_meta and device.type != "meta":
        raise ValueError(f"{name} must be a tensor with data, to be used on {device}, got {shown(value)}")


def suits(name: str, value: Tensor, module: nn.Module) -> None:
    """A tensor of the dtype and on the device that a Linear or convolution takes, so far as its weight tells.

    Nothing is known of a module whose call is not its class's own (offloading and casting hooks, adapters, quantised
    weights); autocast brings the dtype itself.
    """
    if torch.compiler.is_compiling() or not isinstance(module, (nn.Linear, nn.Conv3d)) or "forward" in vars(module):
        return
    weight = module.weight
    if type(weight) is not nn.Parameter or type(weight.data) is not Tensor or module._forward_pre_hooks:
        return
    if value.device == weight.device:
        if value.dtype == weight.dtype or weight.dtype not in FLOATS:
            return
        if value.device.type != "meta" and torch.is_autocast_enabled(value.device.type):
            return
    weights = f"{str(weight.dtype).removeprefix('torch.')} on {weight.device}"
    raise ValueError(f"{name} must be of the weights' dtype and device, {weights}, got {shown(value)}")
