"""Which backend computes, and in which precision. No other file asks."""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from .. import checks
from . import plain
from .types import Backend

BACKENDS = ("torch", "triton", "auto")
PRECISIONS = ("default", "exact")
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def pick_backend(name: str, like: Tensor, precision: str = "default") -> Backend[Any]:
    """The local steps for tensors like `like`: the module `plain`, or the object that offers its functions on
    Triton. "auto" is triton on a GPU below float64, else torch. `precision`, "default" or "exact", is what Triton
    computes 16-bit tokens in; all else is exact as it is.

    Raises ValueError for an unknown name, and where triton is asked for but cannot serve.
    """
    checks.choice("backend", name, BACKENDS)
    checks.choice("precision", precision, PRECISIONS)
    if name == "torch" or (name == "auto" and not (_HAS_TRITON and _serves(like))):
        return plain
    if not _HAS_TRITON:
        raise ValueError("backend 'triton' was asked for, but triton is not installed")
    if name == "triton":
        _check_served(like)
    from .triton.steps import STEPS  # here, since triton may be missing

    return STEPS[precision]


def _serves(like: Tensor) -> bool:
    """Whether the kernels take tensors like this one on a GPU."""
    return like.is_cuda and like.dtype in (torch.float32, torch.bfloat16, torch.float16) and like.shape[-1] <= 256


def _check_served(like: Tensor) -> None:
    """Raises ValueError where tensors like this one are beyond the Triton backend."""
    from .triton.launch import INTERPRETED  # here, since triton may be missing

    if not (like.is_cuda or INTERPRETED):
        raise ValueError(f"backend 'triton' needs tensors on a GPU, got {like.device}")
    if like.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"backend 'triton' takes float32, bfloat16 or float16, got {like.dtype}")
    if like.shape[-1] > 256:
        raise ValueError(f"backend 'triton' takes head dimensions up to 256, got {like.shape[-1]}")
