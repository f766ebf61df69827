"""A tiny SANA-WM with every weight filled, and inputs for it (after the configuration of diffusers' own tests)."""

import copy
from typing import Any

import torch
from diffusers import SanaWMTransformer3DModel
from diffusers.models.transformers.transformer_sana_wm import SanaWMRotaryPosEmbed, _prepare_ucpe_ray_transforms
from torch import Tensor, nn

from tests.helpers import fill_randomly

TINY: dict[str, Any] = {
    "in_channels": 4,
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "patch_size": (1, 1, 1),
    "softmax_every_n": 0,
    "linear_head_dim": 16,
    "caption_channels": 8,
    "mlp_ratio": 2.0,
    "chunk_plucker_channels": 8,
    "chunk_plucker_post_attn_blocks": 3,
}


def tiny_model(dtype: torch.dtype = torch.float32, **overrides: Any) -> SanaWMTransformer3DModel:
    """Convolutions and the plücker embedding start at zero in the host and hide errors: all parameters are filled."""
    torch.manual_seed(0)
    return fill_randomly(SanaWMTransformer3DModel(**{**TINY, **overrides})).to(dtype).eval()


def tiny_inputs(
    frames: int = 5, batch: int = 2, camera: bool = True, mask: Tensor | None = None, width: int = 3
) -> dict[str, Any]:
    """Latents of 4 x `width` pixels a frame, a time a frame, text with padding, a camera that moves and turns."""
    g = torch.Generator().manual_seed(1)
    height = 4
    inputs: dict[str, Any] = {
        "hidden_states": torch.randn(batch, 4, frames, height, width, generator=g),
        "timestep": torch.randint(0, 1000, (batch, 1, frames), generator=g).float(),
        "encoder_hidden_states": torch.randn(batch, 1, 6, 8, generator=g),
        "encoder_attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]] * batch),
    }
    if camera:
        steps = torch.arange(frames).float() + torch.rand(batch, 1, generator=g)
        pose = torch.eye(4).repeat(batch, frames, 1, 1)
        pose[..., 0, 0] = pose[..., 2, 2] = (0.2 * steps).cos()
        pose[..., 0, 2], pose[..., 2, 0] = (0.2 * steps).sin(), -(0.2 * steps).sin()
        pose[..., 2, 3] = 0.1 * steps
        lens = torch.tensor([3.0, 4.0, 1.5, 2.0]).expand(batch, frames, 4)
        inputs["camera_conditions"] = torch.cat([pose.flatten(2), lens], -1)
        inputs["chunk_plucker"] = torch.randn(batch, 8, frames, height, width, generator=g)
    if mask is not None:
        inputs["frame_valid_mask"] = mask
    return inputs


def half(inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs in bfloat16: the host's camera geometry refuses that on the CPU and its attention refuses anything
    else, so both models are given the rays."""
    return with_rays(inputs, torch.bfloat16)


def with_rays(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs in another dtype but for times and camera, and with the rays that the host makes of that camera in
    float32."""
    apart = ("timestep", "camera_conditions")
    cast = {n: t.to(dtype) if t.is_floating_point() and n not in apart else t for n, t in inputs.items()}
    size = tuple(inputs["hidden_states"].shape[2:])
    table = SanaWMRotaryPosEmbed(16, (1, 1, 1), 64)(size)
    P, _, P_inv, _ = _prepare_ucpe_ray_transforms(16, inputs["camera_conditions"], size, (1, 1, 1), table)
    rays = {"absmap": torch.zeros(len(P), 3, *size), "P": P.to(dtype), "P_inv": P_inv.to(dtype)}
    return {**cast, "cam_pos_embeds": rays}


def weighted_sum(sample: Tensor, first_frame: int = 0) -> Tensor:
    """A loss in which every output counts differently; the losses of shards add up to the clip's."""
    weight = torch.randn(sample.shape[0], 4, 32, *sample.shape[3:], generator=torch.Generator().manual_seed(3))
    return (sample * weight[:, :, first_frame : first_frame + sample.shape[2]].to(sample)).sum()


def output_and_gradients(model: nn.Module, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The sample, and every parameter's gradient by name where it has one."""
    model.zero_grad()
    sample = model(**inputs).sample
    weighted_sum(sample).backward()
    return sample.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def twin(model: nn.Module) -> nn.Module:
    """A copy with parameters of its own."""
    return copy.deepcopy(model)
