"""What scripts outside this repository import by this name; the tests are in `tests/kernels`."""

from collections.abc import Iterator
from typing import Any

import torch

from .kernels import test_shared_memory


def launches(
    D: int, dtype: torch.dtype, exact: bool, rotary: str
) -> Iterator[tuple[Any, list[Any], list[Any], dict[str, Any], Any]]:
    """As `tests.kernels.test_shared_memory.launches`, with tensors and numbers apart: (kernel, tensors, numbers,
    options, tiles)."""
    for kernel, arguments, options, tiles in test_shared_memory.launches(D, dtype, exact, rotary):
        flat = list(_flattened(arguments))
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        numbers = [x for x in flat if not isinstance(x, torch.Tensor)]
        yield kernel, tensors, numbers, options, tiles


def _flattened(arguments: Any) -> Iterator[Any]:
    for x in arguments:
        if isinstance(x, tuple):
            yield from _flattened(x)
        else:
            yield x
