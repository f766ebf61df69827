"""The scan of one process as `torch.library` operators, which is what `torch.compile(fullgraph=True)` sees of it.

Eager calls do not pass here: an operator of 17 arguments with a gradient costs the host 0.25 ms a call, an autograd
function 0.02. Both have one backward pass, `scan.gdn_scan_backward`. Only the inputs are kept for it here, so that it
runs the scan of states again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .chunks import ChunkEnds
from .kernels.backends import pick_backend
from .kernels.types import Edges, Inputs, accumulation_dtype
from .scan import GDNOptions, gdn_scan, gdn_scan_backward

#: How many leading arguments of the operators are tensors: the fields of Inputs, S0 and z0.
_TENSORS = len(Inputs._fields) + 2


def _options(
    x: Inputs, normalize: bool, eps: float, ends: Sequence[int] | None, reverse: bool, backend: str, precision: str
) -> GDNOptions:
    T = x.decay.shape[1]
    flags = [False] * T if ends is None else ChunkEnds(*ends).flags(T)
    steps = pick_backend(backend, x.q, precision)
    return GDNOptions(normalize, eps, reverse, flags, None, None, True, steps)


@torch.library.custom_op("frame_gdn::gdn_scan", mutates_args=())
def gdn_scan_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    q_rot: Tensor | None,
    k_rot: Tensor | None,
    mask: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    normalize: bool,
    eps: float,
    ends: Sequence[int] | None,
    reverse: bool,
    backend: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens to output, final S and final z (zeros without a denominator); `ends` as `ChunkEnds`."""
    x = Inputs(q, k, v, beta, decay, q_rot, k_rot, mask, cos, sin)
    out, S, z = gdn_scan(x, S0, z0, _options(x, normalize, eps, ends, reverse, backend, precision))
    assert S is not None
    return out.contiguous(), S.contiguous(), S.new_zeros(S.shape[:-1]) if z is None else z.contiguous()


@gdn_scan_op.register_fake
def _(q: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    B, _, H, D = q.shape
    wide = accumulation_dtype(q.dtype)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(B, H, D, D, dtype=wide),
        q.new_empty(B, H, D, dtype=wide),
    )


@torch.library.custom_op("frame_gdn::gdn_scan_backward", mutates_args=())
def gdn_scan_backward_op(
    dout: Tensor,
    dS: Tensor,
    dz: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    q_rot: Tensor | None,
    k_rot: Tensor | None,
    mask: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    S0: Tensor | None,
    z0: Tensor | None,
    normalize: bool,
    eps: float,
    ends: Sequence[int] | None,
    reverse: bool,
    backend: str,
    precision: str,
) -> list[Tensor]:
    """Gradients of S0, z0, q, k, v, beta, decay, q_rot, k_rot; empty where there is no such input."""
    x = Inputs(q, k, v, beta, decay, q_rot, k_rot, mask, cos, sin)
    options = _options(x, normalize, eps, ends, reverse, backend, precision)
    arriving = Edges(dS, dz if normalize else None, None, None)
    grads = gdn_scan_backward(dout, arriving, x, None, Edges(S0, z0, None, None), [], options)
    inputs = [S0, z0, q, k, v, beta, decay, q_rot, k_rot]
    return [q.new_empty(0) if given is None else _own(d, given) for given, d in zip(inputs, grads, strict=True)]


def _own(d: Tensor | None, given: Tensor) -> Tensor:
    """A gradient as the fake promises it: contiguous, in memory of its own, zeros where nothing flows."""
    if d is None:
        return torch.zeros_like(given, memory_format=torch.contiguous_format)
    return d.clone(memory_format=torch.contiguous_format) if d._is_view() else d.contiguous()


@gdn_scan_backward_op.register_fake
def _(dout: Tensor, dS: Tensor, dz: Tensor, *args: Any) -> list[Tensor]:
    inputs = (*args[_TENSORS - 2 : _TENSORS], *args[:7])
    return [
        dout.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_TENSORS])
    ctx.options = inputs[_TENSORS:]


def _backward(ctx: Any, dout: Tensor, dS: Tensor, dz: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors
    grads = gdn_scan_backward_op(dout.contiguous(), dS, dz, *tensors, *ctx.options)
    inputs = (*tensors[_TENSORS - 2 :], *tensors[:7])
    dS0, dz0, *found = [None if x is None else d for x, d in zip(inputs, grads, strict=True)]
    return (*found, None, None, None, dS0, dz0, *[None] * len(ctx.options))


gdn_scan_op.register_autograd(_backward, setup_context=_save)
