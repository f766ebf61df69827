"""The scans as ordinary operations of torch, frame by frame: slower, but every rule of differentiation holds for them.

`scan.py` comes here where its autograd functions cannot serve: within a transform of `torch.func` (grad, vmap, jvp),
in forward-mode differentiation, and in a backward pass that is to be differentiated again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import functional
from .kernels.naive import naive_gdn
from .kernels.products import exact_matmul, may_be_lowered, without_autocast
from .kernels.types import Inputs, accumulation_dtype


def gdn(
    x: Inputs, S0: Tensor | None, z0: Tensor | None, ends: Sequence[bool], normalize: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens to output of one process: (B, N, H, D) in q's dtype, and the final S and z as they are accumulated.

    `ends`: by frame, is it the last of its chunk.
    """
    q_rot, k_rot = x.q_rot, x.k_rot
    if x.cos is not None and x.sin is not None:
        q_rot, k_rot = (functional.rotary(t, x.cos, x.sin, backend="torch") for t in (x.q, x.k))
    kept = accumulation_dtype(x.q.dtype)
    wide = torch.float64 if may_be_lowered(x.q.device) else kept
    q, k, v, beta, decay = (t.to(wide) for t in (x.q, x.k, x.v, x.beta, x.decay))
    q_rot, k_rot = (None if t is None else t.to(wide) for t in (q_rot, k_rot))
    B, _, H, D = q.shape
    S = q.new_zeros(B, H, D, D) if S0 is None else S0.to(wide)
    z = q.new_zeros(B, H, D) if z0 is None else z0.to(wide)
    out = torch.zeros_like(q)
    if decay.shape[1]:
        options: dict[str, Any] = {"initial_state": (S, z), "ends": ends, "normalize": normalize, "eps": eps}
        with without_autocast(q.device):
            out, (S, z) = naive_gdn(q, k, v, beta, decay, q_rot=q_rot, k_rot=k_rot, mask=x.mask, **options)
    return out.to(x.q.dtype), S.to(kept), z.to(kept)


def gdn_gradients(
    tensors: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
    ends: Sequence[bool],
    normalize: bool,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """The gradients of `tensors` (S0, z0, then the fields of `Inputs`) where they are needed, with their own graph.

    `grads` are those of what `gdn` returns. The inputs are taken as views, since one of them may be made of another,
    whose gradient is not asked for here.
    """
    wanted = [t is not None and need for t, need in zip(tensors, needed, strict=True)]
    views = [t.view_as(t) if t is not None and want else t for t, want in zip(tensors, wanted, strict=True)]
    S0, z0, *inputs = views
    results = gdn(Inputs(*inputs), S0, z0, ends, normalize, eps)  # type: ignore[arg-type]
    pairs = [(out, d) for out, d in zip(results, grads, strict=True) if d is not None and out.requires_grad]
    asked = [t for t, want in zip(views, wanted, strict=True) if want and t is not None]
    outs, directions = [out for out, _ in pairs], [d for _, d in pairs]
    found = iter(torch.autograd.grad(outs, asked, directions, create_graph=True, allow_unused=True))
    return tuple(next(found) if want else None for want in wanted)


def chain(A: Tensor, B: Tensor, initial: Tensor | None) -> Tensor:
    """X_t = X_{t-1} A_t + B_t: A (BH, T, D, D), B (BH, T, R, D), initial (BH, R, D) or None -> like B."""
    found = []
    X = initial
    with without_autocast(A.device):
        for a, b in zip(A.unbind(1), B.unbind(1), strict=True):
            X = b if X is None else exact_matmul(X, a) + b
            found.append(X)
    return torch.stack(found, 1) if found else B
