"""Softmax attention by flash-attn-4 (CuTe DSL kernels for Hopper and Blackwell), as `torch.library` operators.

Only this file imports `flash_attn`, and only when it computes. Its kernels want heads of 64 or 128 channels: forward
and backward are tuned for these, and the backward refuses others. Narrower heads are padded with zeros, which changes
no product of queries and keys; the scale stays that of the true head.

Written against flash-attn-4 4.0.0b36, whose backward has no public name.
"""

from typing import Any

import torch
from torch import Tensor

from .backends import Hardware, hardware_of, is_amd

#: Channels of the heads that the kernels take.
WIDTHS = (64, 128)


def hardware_refusal(hardware: Hardware) -> str | None:
    """Why flash-attn-4 does not run on a device; None where it does."""
    if not hardware.flash4:
        return "flash-attn-4 is not installed (pip install 'frame-gdn[flash4]')"
    if hardware.type != "cuda" or is_amd(hardware):
        return f"it needs an NVIDIA GPU, the tensors are on {hardware.device}"
    major, minor = hardware.capability or (0, 0)
    if major not in (9, 10):
        return (
            f"it needs a GPU of compute capability 9 or 10 (Hopper, Blackwell), {hardware.device} has {major}.{minor}"
        )
    return None


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _device_refusal(device: torch.device) -> str | None:
    return hardware_refusal(hardware_of(device))


def refusal(like: Tensor, head_dim: int, masked: bool = False, hardware: Hardware | None = None) -> str | None:
    """Why flash-attn-4 cannot serve heads of so many channels in the dtype and on the device of `like`, or on the one
    that `hardware` describes; None where it can."""
    reason: str | None = _device_refusal(like.device) if hardware is None else hardware_refusal(hardware)
    if reason is not None:
        return reason
    if like.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bfloat16 or float16, got {like.dtype}"
    if head_dim > WIDTHS[-1]:
        return f"it takes heads of up to {WIDTHS[-1]} channels, got {head_dim}"
    return "it takes no mask" if masked else None


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """softmax(scale · q kᵀ) v of q (B, N, H, D), k and v (B, M, H, D) -> (B, N, H, D), and the log-sum-exp of every
    row (B, H, N) in float32, by which parts of the keys can be joined. Both are differentiable."""
    D = q.shape[-1]
    width = next(width for width in WIDTHS if width >= D)
    if width != D:
        q, k, v = (pad_heads(x, width) for x in (q, k, v))
    out, lse = flash4(q, k, v, scale)
    return out[..., :D], lse


# --- padding ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("frame_gdn::pad_heads", mutates_args=())
def pad_heads(x: Tensor, width: int) -> Tensor:
    """(..., D) -> (..., width), zeros behind: every channel is written once, where `torch.nn.functional.pad` fills all
    of them before it copies."""
    D = x.shape[-1]
    out = x.new_empty(*x.shape[:-1], width)
    out[..., :D] = x
    out[..., D:] = 0
    return out


@pad_heads.register_fake
def _(x: Tensor, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], width)


def _save_pad(ctx: Any, inputs: tuple[Tensor, int], output: Tensor) -> None:
    ctx.head_dim = inputs[0].shape[-1]


def _pad_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
    return dout[..., : ctx.head_dim], None


pad_heads.register_autograd(_pad_backward, setup_context=_save_pad)


# --- attention --------------------------------------------------------------------------------------------------


@torch.library.custom_op("frame_gdn::flash4", mutates_args=())
def flash4(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """As `attend`, of heads of one of `WIDTHS`."""
    from flash_attn.cute import flash_attn_func

    with torch.cuda.device_of(q), torch.no_grad():
        out, lse = flash_attn_func(q, k, v, softmax_scale=scale, return_lse=True)
    return out, lse


@torch.library.custom_op("frame_gdn::flash4_backward", mutates_args=())
def flash4_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; the same on every run where torch was asked for deterministic algorithms."""
    from flash_attn.cute.interface import _flash_attn_bwd

    deterministic = torch.are_deterministic_algorithms_enabled()
    q, k, v, dout = (x.contiguous() for x in (q, k, v, dout))
    with torch.cuda.device_of(q):
        dq, dk, dv = _flash_attn_bwd(q, k, v, out, dout, lse, scale, deterministic=deterministic, dlse=dlse)
    return dq, dk, dv


@flash4.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    B, N, H, D = q.shape
    return q.new_empty(B, N, H, D), q.new_empty(B, H, N, dtype=torch.float32)


@flash4_backward.register_fake
def _(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.scale = inputs[3]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return None, None, None, None
        dout = torch.zeros_like(out)
    return (*flash4_backward(dout, dlse, q, k, v, out, lse, ctx.scale), None)


flash4.register_autograd(_backward, setup_context=_save)
