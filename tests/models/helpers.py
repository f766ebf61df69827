"""A tiny VideoDiT with every parameter filled, and what all its tests compare."""

import torch
from torch import Tensor, nn

from models import VideoDiT

TINY = {
    "in_channels": 3,
    "out_channels": 5,
    "patch_size": 2,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 14,
    "softmax_every_n": 2,
    "conv_kernel_size": 3,
    "ffn_expand_ratio": 1.5,
    "cross_attention_dim": 6,
}


def tiny_model(dtype: torch.dtype = torch.float64, **overrides: object) -> VideoDiT:
    """Two GDN blocks around a softmax block, with text; no parameter at its starting value, many of which are zero."""
    return fill(VideoDiT(**{**TINY, **overrides}).to(dtype))


def fill(model: nn.Module) -> nn.Module:
    """Random values in every parameter: gates and convolutions that start at zero hide errors behind them."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            fan_in = parameter[0].numel() if parameter.dim() > 1 else 4
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / fan_in**0.5)
    return model


def tiny_inputs(num_frames: int, dtype: torch.dtype = torch.float64, *, batch: int = 2) -> dict[str, Tensor]:
    """Latents of `num_frames` frames of 2 × 3 patches, a timestep a frame, a text whose last token is padding."""
    generator = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(batch, 3, num_frames, 4, 6, generator=generator, dtype=torch.float64).to(dtype),
        "timestep": 1000 * torch.rand(batch, num_frames, generator=generator, dtype=torch.float64).to(dtype),
        "encoder_hidden_states": torch.randn(batch, 4, 6, generator=generator, dtype=torch.float64).to(dtype),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 0]] * batch),
    }


def frames_of(inputs: dict[str, Tensor], frames: slice) -> dict[str, Tensor]:
    """The same inputs, of these frames only."""
    own = {"hidden_states": inputs["hidden_states"][:, :, frames], "timestep": inputs["timestep"][:, frames]}
    if "frame_mask" in inputs:
        own["frame_mask"] = inputs["frame_mask"][:, frames]
    return {**inputs, **own}


def weighted_sum(sample: Tensor, first_frame: int = 0) -> Tensor:
    """A loss in which every output counts differently; over shards, the shards' losses add up to the clip's."""
    shape = (sample.shape[0], sample.shape[1], 64, *sample.shape[3:])
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (sample * weight[:, :, first_frame : first_frame + sample.shape[2]].to(sample.dtype)).sum()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter's gradient by name; none may be missing or zero."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    dead = [name for name, grad in found.items() if grad is None or not grad.abs().max() > 0]
    assert not dead, f"no gradient in {dead}"
    return {name: grad.clone() for name, grad in found.items()}


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Each to `tolerance`, relative to its own largest entry."""
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = (actual[name] - grad).abs().max() / grad.abs().max()
        assert error <= tolerance, f"{name}: relative error {error:.1e}"
