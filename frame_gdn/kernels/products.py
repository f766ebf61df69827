"""Matrix products to the accuracy of their dtype, whatever precision torch's process-wide switches allow float32."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, of float32 matrices to float32's accuracy even where torch may multiply them in TF32 or bfloat16.

    Those switches (`torch.backends.*.fp32_precision`, `allow_tf32`, `torch.set_float32_matmul_precision`) belong to
    the user's program and are only read. None of them reaches a product in float64.
    """
    if a.dtype == torch.float32 and may_be_lowered(a.device):
        return (a.double() @ b.double()).float()
    return a @ b


def may_be_lowered(device: torch.device) -> bool:
    """Whether a product in float32 may be less than that on the device."""
    backend = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    return backend.matmul.fp32_precision not in ("none", "ieee")


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which autocast casts nothing on the device; it knows of none on the meta device."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
