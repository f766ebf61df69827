"""Whether torch is about to ask for more than first derivatives in reverse."""

import torch
from torch.autograd import forward_ad


def are_active() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, jvp, ...) or a level of forward-mode differentiation is open.

    Neither looks into an `autograd.Function` or a kernel: what runs within is ordinary differentiable PyTorch. Torch
    has no public name for the question; `autograd.Function.apply` asks it in the same way.
    """
    if torch.compiler.is_compiling():
        return False  # the compiler sees operators, and traces the transforms itself
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
