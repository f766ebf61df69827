"""What several tests share."""

import pytest
import torch
from torch import Tensor, nn

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def relative_error(ours: Tensor, reference: Tensor) -> float:
    """||ours - reference|| / ||reference||; 0 for two empty or two zero tensors, infinite for a NaN."""
    assert ours.shape == reference.shape, f"{tuple(ours.shape)} is not {tuple(reference.shape)}"
    ours, reference = ours.detach(), reference.detach()
    difference = (ours.double() - reference.double()).norm()
    if difference == 0:
        return 0.0
    error = float(difference / reference.double().norm())
    return error if error == error else float("inf")


def fill_randomly(module: nn.Module, seed: int = 0, scale: float = 0.3) -> nn.Module:
    """Every parameter random: gates start at 0 and hide errors. Norm weights stay near 1, A_log and dt_bias
    moderate."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
            spread = scale if parameter.dim() < 2 or "conv_k" in name else fan_in**-0.5
            parameter.copy_(noise * spread + (1.0 if "norm" in name and parameter.dim() == 1 else 0.0))
    return module


def assert_every_gradient_says_something(module: nn.Module) -> None:
    """Each parameter has a gradient that is finite and not zero."""
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, f"{name} has no gradient"
        assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
        assert parameter.grad.abs().max() > 0, f"the gradient of {name} is zero"
