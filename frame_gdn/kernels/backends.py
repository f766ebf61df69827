"""Which backend computes, and in which precision. No other file asks.

The choice is a function of a tensor's dtype, its head size and a description of its device, `Hardware`, so that it can
be asked about devices that are not there.
"""

import functools
import importlib
import importlib.metadata
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from . import plain, transforms
from .types import Backend

BACKENDS = ("torch", "triton", "auto")
PRECISIONS = ("default", "exact")

#: What the Triton kernels take: dtypes, the largest head, and the least compute capability of an NVIDIA GPU. Tensor
#: cores that multiply bfloat16 and TF32, and copies that do not wait, came with 8.0 (Ampere).
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
LEAST_CAPABILITY = (8, 0)

#: What the driver calls a GPU that is not NVIDIA's, where a layer beneath torch presents it as one.
_AMD_NAMES = ("amd", "radeon", "zluda")


class Hardware(NamedTuple):
    """What the choice of a backend depends on in a device and its software.

    device: as torch names it, such as "cuda:0". type: its kind, such as "cuda". name: what the driver calls it.
    capability: of an NVIDIA GPU, major and minor; None elsewhere.
    rocm: whether torch was built for ROCm, which calls its devices "cuda" too.
    triton_failure: why triton cannot be imported; None where it can, and where nobody asked.
    interpreted: whether kernels run in Triton's interpreter, which takes tensors on a CPU.
    flash4: whether flash-attn-4 is installed.
    """

    device: str
    type: str
    name: str = ""
    capability: tuple[int, int] | None = None
    rocm: bool = False
    triton_failure: str | None = None
    interpreted: bool = False
    flash4: bool = False


class BackendChoice(NamedTuple):
    """The backend that a tensor gets, "torch" or "triton", and why, in words."""

    name: str
    reason: str


def backend_of(tensor: Tensor, backend: str = "auto") -> BackendChoice:
    """Which backend computes for a tensor like this one, and why.

    Args:
        tensor: as q of `bidirectional_gdn` (B, N, H, D): its device, its dtype and its last dimension, the size of a
            head, are what counts.
        backend: "torch", "triton" or "auto", as the functions and `swap` take it.

    Raises:
        ValueError: for something else than a tensor, an unknown backend, and "triton" where it cannot serve.
    """
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        raise ValueError(f"tensor must be a tensor (..., D), got {checks.shown(tensor)}")
    return choose(backend, tensor.dtype, tensor.shape[-1], hardware_of(tensor.device, backend == "triton"))


def choose(name: str, dtype: torch.dtype, head_dim: int, hardware: Hardware) -> BackendChoice:
    """The backend for tokens of a dtype, in heads of so many channels, on a device. Raises as `backend_of`."""
    checks.choice("backend", name, BACKENDS)
    if name == "torch":
        return BackendChoice("torch", "backend 'torch' was asked for")
    reason = hardware_refusal(hardware, asked=name == "triton") or _refusal(dtype, head_dim)
    if reason is None:
        what = hardware.name or hardware.device
        return BackendChoice("triton", f"the kernels take {_named(dtype)} in heads of {head_dim} channels on {what}")
    if name == "triton":
        raise ValueError(f"backend 'triton' {reason}")
    return BackendChoice("torch", f"backend 'triton' {reason}")


def hardware_refusal(hardware: Hardware, asked: bool = False) -> str | None:
    """Why the kernels do not run on a device, to follow "backend 'triton'"; None where they do.

    In the interpreter they run on a CPU too, but only where they were `asked` for by name.
    """
    if hardware.triton_failure is not None:
        return f"needs triton, which cannot be imported: {hardware.triton_failure}"
    if hardware.type != "cuda":
        return None if asked and hardware.interpreted else f"needs tensors on a GPU, got {hardware.device}"
    shown = f"{hardware.device} ({hardware.name})" if hardware.name else hardware.device
    if is_amd(hardware):
        return f"needs an NVIDIA GPU, got {shown}, an AMD GPU"
    if hardware.capability is not None and hardware.capability < LEAST_CAPABILITY:
        least, given = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, hardware.capability))
        return f"needs an NVIDIA GPU of compute capability {least} or more, got {shown} with {given}"
    return None


def is_amd(hardware: Hardware) -> bool:
    """Whether it is a GPU of AMD, by the build of torch or by its name."""
    return hardware.rocm or any(word in hardware.name.lower() for word in _AMD_NAMES)


def _refusal(dtype: torch.dtype, head_dim: int) -> str | None:
    if dtype not in DTYPES:
        return f"takes {', '.join(map(_named, DTYPES[:-1]))} or {_named(DTYPES[-1])}, got {_named(dtype)}"
    if head_dim > LARGEST_HEAD:
        return f"takes head dimensions up to {LARGEST_HEAD}, got {head_dim}"
    return None


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def hardware_of(device: torch.device, asked: bool = False) -> Hardware:
    """The description of a device. It is made once: later calls look it up.

    Triton is imported where it may run: on a GPU, and where it is `asked` for by name.
    """
    name, capability = "", None
    if device.type == "cuda" and torch.cuda.is_available():  # a fake tensor's GPU need not be there
        name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    failure, interpreted = _triton() if device.type == "cuda" or asked else (None, False)
    rocm = device.type == "cuda" and torch.version.hip is not None
    return Hardware(
        str(device), device.type, name, capability, rocm, failure, interpreted, _is_installed("flash-attn-4")
    )


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def _triton() -> tuple[str | None, bool]:
    """Why triton cannot be imported, None where it can; and whether it interprets."""
    try:
        importlib.import_module("triton")
    except (ImportError, OSError, RuntimeError) as error:  # a wheel for another system fails in its own ways
        return " ".join(f"{type(error).__name__}: {error}".split()), False
    from .triton.launch import INTERPRETED  # here, since triton may be missing

    return None, bool(INTERPRETED)


@functools.cache
def announce(reason: str) -> None:
    """Says once a process and reason that a GPU computes by the plain path."""
    warnings.warn(f"backend 'auto' takes the plain PyTorch path: backend 'triton' {reason}", stacklevel=2)


def backend_name(backend: "str | Backend[Any]") -> str:
    """What ranks compare a backend by."""
    return backend if isinstance(backend, str) else type(backend).__name__


def pick_backend(backend: "str | Backend[Any]", like: Tensor, precision: str = "default") -> Backend[Any]:
    """The local steps for tensors like `like`: the module `plain`, or the object that offers its functions on Triton.

    Args:
        backend: "auto" is triton where the kernels run and take the dtype and the head, else torch, and torch within a
            transform of `torch.func` or forward-mode differentiation. An object that
            offers the steps stands for itself: a test gives one with settings of its own.
        precision: "default" or "exact", what Triton computes 16-bit tokens in; all else is exact as it is.

    Raises:
        ValueError: for an unknown name, and where triton is asked for but cannot serve.
    """
    if not isinstance(backend, str) and hasattr(backend, "transitions"):
        return backend
    checks.choice("backend", backend, BACKENDS)
    checks.choice("precision", precision, PRECISIONS)
    if backend == "torch" or (backend == "auto" and transforms.are_active()):
        return plain
    reason = _device_refusal(like.device, backend == "triton") or _refusal(like.dtype, like.shape[-1])
    if reason is not None and backend == "triton":
        raise ValueError(f"backend 'triton' {reason}")
    if reason is not None:
        return plain
    from .triton.steps import STEPS  # here, since triton may be missing

    return STEPS[precision]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_refusal(device: torch.device, asked: bool) -> str | None:
    """As `hardware_refusal`; says so, where one would expect that the kernels run and has not asked for them."""
    reason = hardware_refusal(hardware_of(device, asked), asked)
    if reason is not None and not asked and device.type not in ("cpu", "meta"):
        announce(reason)
    return reason
