"""The output gate on Triton, x · SiLU(gate), forward and backward. Everything is float32 between load and store."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch, operator

_ELEMENTS = 1024


@triton.jit
def _gate_kernel(x_ptr, gate_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """x · SiLU(gate)"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    x = tl.load(x_ptr + i, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=live, other=0.0).to(tl.float32)
    out = x * gate * tl.sigmoid(gate)
    tl.store(out_ptr + i, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _gate_backward_kernel(x_ptr, gate_ptr, dout_ptr, dx_ptr, dgate_ptr, n, BLOCK: tl.constexpr):
    """d SiLU(g) = σ(g) (1 + g (1 - σ(g)))"""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < n
    x = tl.load(x_ptr + i, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i, mask=live, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + i, mask=live, other=0.0).to(tl.float32)
    open_ = tl.sigmoid(gate)
    dx = dout * gate * open_
    dgate = dout * x * open_ * (1.0 + gate * (1.0 - open_))
    tl.store(dx_ptr + i, dx.to(dx_ptr.dtype.element_ty), mask=live)
    tl.store(dgate_ptr + i, dgate.to(dgate_ptr.dtype.element_ty), mask=live)


@operator("silu_gate")
def silu_gate(x: Tensor, gate: Tensor) -> Tensor:
    """x · SiLU(gate), both of one shape -> like x, contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n := out.numel():
        launch(_gate_kernel, triton.cdiv(n, _ELEMENTS), (x.contiguous(), gate.contiguous(), out, n), BLOCK=_ELEMENTS)
    return out


@operator("silu_gate_backward")
def silu_gate_backward(dout: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and gate."""
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    if n := dx.numel():
        launch(
            _gate_backward_kernel, triton.cdiv(n, _ELEMENTS),
            (x.contiguous(), gate.contiguous(), dout.contiguous(), dx, dgate, n), BLOCK=_ELEMENTS,
        )  # fmt: skip
    return dx, dgate


@silu_gate.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@silu_gate_backward.register_fake
def _(dout: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(gate, memory_format=torch.contiguous_format),
    )


def _save_gate(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gate_backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
    dx, dgate = silu_gate_backward(dout, *ctx.saved_tensors)
    return dx, dgate


silu_gate.register_autograd(_gate_backward, setup_context=_save_gate)
