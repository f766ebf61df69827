"""The rays of SANA-WM's camera: from poses and lens to the matrix of every token's ray.

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana. There a masked write waits for
the device, so that no CUDA graph could be captured; here the mask selects.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from diffusers.models.transformers import transformer_sana_wm as host
from torch import Tensor


def ray_matrices(camera_conditions: Tensor, size: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """The transforms from the world to the ray of every token, (B, T, h, w, 4, 4) in the dtype of the conditions.

    A ray's axes are z along it, x across the camera's y axis, y the rest. Without a direction (NaN): the identity.

    Args:
        camera_conditions: (B, T, 20), poses from camera to world and fx, fy, cx, cy in latent pixels.
        size: T, h, w in patches.
    """
    with torch.autocast(camera_conditions.device.type, enabled=False):  # `cross` has no rule under autocast
        poses, directions = _poses(camera_conditions), _directions(camera_conditions, size, patch_size)
        rotation, position = poses[..., :3, :3], poses[..., :3, 3]
        seen = torch.einsum("btij,bthwj->bthwi", rotation, directions)
        camera_y = rotation[..., 1][:, :, None, None].expand_as(seen)
        z = F.normalize(seen, dim=-1, eps=1e-6)
        x = F.normalize(torch.linalg.cross(camera_y, z), dim=-1, eps=1e-6)
        y = F.normalize(torch.linalg.cross(z, x), dim=-1, eps=1e-6)
        to_ray = torch.stack([x, y, z], -2)
        moved = -torch.einsum("bthwij,bthwj->bthwi", to_ray, position[:, :, None, None].expand_as(seen))
        matrices = F.pad(torch.cat([to_ray, moved[..., None]], -1), (0, 0, 0, 1))
        matrices[..., 3, 3] = 1.0
        nowhere = seen.isnan().any(-1)[..., None, None]
        return torch.where(nowhere, torch.eye(4, dtype=seen.dtype, device=seen.device), matrices)


def up_and_latitude(camera_conditions: Tensor, size: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """The host's map of every token's projected up direction and latitude, (B, 3, T, h, w), for models that embed it;
    arguments as in `ray_matrices`."""
    _, height, width = size
    _, _, cx, cy = camera_conditions[..., 16:].unbind(-1)
    with torch.autocast(camera_conditions.device.type, enabled=False):
        x_fov, y_fov, xi = _lens(camera_conditions, size, patch_size)
        up, latitude = host.compute_up_lat_map(
            R=_poses(camera_conditions)[..., :3, :3], x_fov=x_fov, y_fov=y_fov, xi=xi,
            height=height * patch_size[1], width=width * patch_size[2], cx=cx, cy=cy,
            device=camera_conditions.device,
        )  # fmt: skip
    return torch.cat([up, latitude], -1).permute(0, 4, 1, 2, 3)


def _poses(camera_conditions: Tensor) -> Tensor:
    return camera_conditions[..., :16].unflatten(-1, (4, 4))


def _lens(
    camera_conditions: Tensor, size: Sequence[int], patch_size: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Fields of view along x and y in degrees and the host's xi, which is 0 for a pinhole: (B, T) each."""
    fx, fy, _, _ = camera_conditions[..., 16:].unbind(-1)
    xi = torch.zeros_like(fx)
    like = {"device": fx.device, "dtype": fx.dtype}
    x_fov = host.compute_fov_from_fx_xi(fx, xi, size[2] * patch_size[2], **like).view(fx.shape)
    y_fov = host.compute_fov_from_fx_xi(fy, xi, size[1] * patch_size[1], **like).view(fx.shape)
    return x_fov, y_fov, xi


def _directions(camera_conditions: Tensor, size: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """Of every token's ray, in the camera's axes: (B, T, h, w, 3)."""
    _, _, cx, cy = camera_conditions[..., 16:].unbind(-1)
    fields = _lens(camera_conditions, size, patch_size)
    rays: Tensor = host.ucm_unproject_grid_fov(
        *fields, size[1], size[2], cx / patch_size[2], cy / patch_size[1],
        device=cx.device, dtype=cx.dtype,
    )  # fmt: skip
    return rays.view(*cx.shape, size[1], size[2], 3)
