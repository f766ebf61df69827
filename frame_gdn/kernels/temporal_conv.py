"""x plus a convolution of width 3 over frames, as three matrix products that add to one result.

Side by side, [past, present, future] would be one product, but putting them there copies every token six times over.
Each product reads the tokens where they are and adds to what is there already, in the product's own epilogue: one copy
of x is all that is moved besides.

A `torch.library` operator of ordinary PyTorch, for any device; only inputs are kept for the backward pass.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .products import without_autocast


def _is_end(frame: int, ends: Sequence[int] | None) -> bool:
    """Whether a frame is the last of its chunk, `ends` as `chunks.ChunkEnds`: it does not see the frame after it."""
    if ends is None:
        return False
    first, period, stop = ends
    return first <= frame < stop and (frame - first) % period == 0


def _runs(frames: int, ends: Sequence[int] | None) -> Iterator[slice]:
    """The frames here that see the next one, which is here too, in runs of neighbours."""
    begin = 0
    for t in range(frames):
        if t == frames - 1 or _is_end(t, ends):
            if begin < t:
                yield slice(begin, t)
            begin = t + 1


def _add_product(out: Tensor, frames: slice, x: Tensor, weight: Tensor) -> None:
    """out[:, frames] += x · weight, out (B, T, S, C), x (B, frames, S, C), weight (C, C)."""
    rows, x = out[:, frames].flatten(1, 2), x.flatten(1, 2)
    with without_autocast(x.device):
        if len(rows) == 1:
            rows[0].addmm_(x[0], weight)
        elif len(rows):
            rows.baddbmm_(x, weight.expand(len(rows), *weight.shape))


def _after(frames: slice) -> slice:
    return slice(frames.start + 1, frames.stop + 1)


@torch.library.custom_op("frame_gdn::temporal_conv", mutates_args=())
def temporal_conv(
    x: Tensor,
    past: Tensor | None,
    future: Tensor | None,
    weight: Tensor,
    ends: Sequence[int] | None,
) -> Tensor:
    """x_t + W₀ x_{t-1} + W₁ x_t + W₂ x_{t+1}, the last zero where a chunk ends (`ends` as `chunks.ChunkEnds`).

    x (B, T, S, C) contiguous, past and future (B, 1, S, C) or None for zeros, weight (C, 3 C) = [W₀, W₁, W₂], all of
    one dtype -> like x.
    """
    x, T = x.contiguous(), x.shape[1]
    out = x.clone()
    before, here, after = (w.t() for w in weight.chunk(3, 1))
    _add_product(out, slice(0, T), x, here)
    _add_product(out, slice(1, T), x[:, :-1], before)
    for run in _runs(T, ends):
        _add_product(out, run, x[:, _after(run)], after)
    if past is not None and T:
        _add_product(out, slice(0, 1), past, before)
    if future is not None and T and not _is_end(T - 1, ends):
        _add_product(out, slice(T - 1, T), future, after)
    return out


@torch.library.custom_op("frame_gdn::temporal_conv_backward", mutates_args=())
def temporal_conv_backward(
    dout: Tensor,
    x: Tensor,
    past: Tensor | None,
    future: Tensor | None,
    weight: Tensor,
    ends: Sequence[int] | None,
) -> list[Tensor]:
    """Gradients of x, past, future and weight; empty where there is no such halo."""
    dout, x, T = dout.contiguous(), x.contiguous(), x.shape[1]
    dx = dout.clone()
    dpast, dfuture = (x.new_empty(0) if t is None else torch.zeros_like(t, memory_format=torch.contiguous_format)
                      for t in (past, future))  # fmt: skip
    before, here, after = weight.chunk(3, 1)
    _add_product(dx, slice(0, T), dout, here)
    _add_product(dx, slice(0, T - 1), dout[:, 1:], before)
    to_next = dout  # what flows to the next frame
    if ends is not None:
        t = torch.arange(T, device=x.device)
        last = (t >= ends[0]) & (t < ends[2]) & ((t - ends[0]) % ends[1] == 0)
        to_next = dout.masked_fill(last[:, None, None], 0)
    _add_product(dx, slice(1, T), to_next[:, :-1], after)
    dweight = torch.stack(
        [_outer(dout[:, 1:], x[:, :-1]), _outer(dout, x), _outer(to_next[:, :-1], x[:, 1:])], 1
    )  # fmt: skip
    if past is not None and T:
        _add_product(dpast, slice(0, 1), dout[:, :1], before)
        dweight[:, 0] += _outer(dout[:, :1], past)
    if future is not None and T:
        _add_product(dfuture, slice(0, 1), to_next[:, -1:], after)
        dweight[:, 2] += _outer(to_next[:, -1:], future)
    return [dx, dpast, dfuture, dweight.flatten(1)]


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Σ a bᵀ over all tokens: (..., C) twice -> (C, C)."""
    with without_autocast(a.device):
        return a.flatten(0, 2).t() @ b.flatten(0, 2)


@temporal_conv.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@temporal_conv_backward.register_fake
def _(dout: Tensor, *inputs: Any) -> list[Tensor]:
    return [
        dout.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in inputs[:4]
    ]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    inputs = ctx.saved_tensors
    grads = temporal_conv_backward(dout, *inputs, *ctx.options)
    return (*(None if x is None else d for x, d in zip(inputs, grads, strict=True)), None)


temporal_conv.register_autograd(_backward, setup_context=_save)
