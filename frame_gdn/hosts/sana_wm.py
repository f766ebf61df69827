"""SANA-WM (`SanaWMTransformer3DModel`): the same weights and outputs, other arithmetic around them.

What looks across frames: the short convolutions, the two scans of a GDN block, the two softmax attentions of every
n-th block, the feed-forward's temporal convolution, and the rotary positions. Each of them is replaced here, and with
them what they are called by, so that one `Clip` made at the model's door reaches all of them.
Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

from .. import checks, needs_diffusers as needs_diffusers  # isort: skip

from collections.abc import Sequence
from dataclasses import replace as changed
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models.modeling_utils import ModelMixin as ModelMixin  # a pipeline that loads looks for it here
from diffusers.models.transformers import transformer_sana_wm as host
from torch import Tensor, nn

from .. import functional, parallel
from ..gdn import bidirectional_gdn
from . import SwapOptions, Swapped, adopt, configuration
from .clip import as_values, attend, check_positions, facts_of
from .configuration import ConfiguredModel, swapping_init
from .rays import into_rays, out_of_rays
from .sana_clip import Clip, clip_of
from .sana_ffn import GLUMBConvTemp, SanaWMConvLayer, convolutions

# --- the host's three functions ---------------------------------------------------------------------------------


def present(model: nn.Module) -> SwapOptions:
    """Chunks as in the configuration. The blocks of a swapped model are those that are: in no configuration, for a
    block computes the same either way."""
    options = configuration.present(model)
    if not isinstance(model, SanaWMTransformer3DModel):
        return options
    return changed(options, blocks=_swapped(model))


def _swapped(model: Any) -> list[int]:
    return [index for index, block in enumerate(model.blocks) if isinstance(block.attn, Swapped)]


def replace(model: nn.Module, options: SwapOptions) -> None:
    """Swap the chosen blocks; ValueError for start_scale, and for chunk_frames on some of the blocks only."""
    if options.start_scale is not None:
        raise ValueError(
            "start_scale is for hosts whose gates are new: SanaWMTransformer3DModel keeps its own weights"
        )
    blocks: Any = model.blocks
    chosen = sorted({*options.chosen(len(blocks)), *_swapped(model)})
    if options.chunk_frames is not None and len(chosen) < len(blocks):
        raise ValueError(
            f"chunk_frames needs all blocks swapped, not {chosen} alone: diffusers' own attention looks past the end "
            "of a chunk (blocks=None swaps all)"
        )
    sites: list[tuple[nn.Module, type[Swapped]]] = [(model, SanaWMTransformer3DModel)]
    sites += [(m, SanaWMPatchEmbed) for m in model.children() if isinstance(m, host.SanaWMPatchEmbed)]
    sites += [(block, SanaVideoMSCamCtrlBlock) for block in blocks]
    for index in chosen:
        sites += [(m, REPLACEMENTS[type(m).__name__]) for m in blocks[index].modules() if _has_replacement(m)]
        if isinstance(blocks[index].mlp, host.GLUMBConvTemp):
            sites += convolutions(blocks[index].mlp)
    adopt(sites, backend=options.backend, attention=options.attention, chunk_frames=options.chunk_frames)
    configuration.write(model, {"chunk_frames": options.chunk_frames})


def cover(model: nn.Module) -> None:
    """Swap every block that is not: none of diffusers' sites is right over shards."""
    replace(model, changed(present(model), blocks=None))


def _has_replacement(module: nn.Module) -> bool:
    found = REPLACEMENTS.get(type(module).__name__)
    return found is not None and isinstance(module, found.host_class())


# --- what looks across frames -----------------------------------------------------------------------------------


class SanaWMTemporalShortConvolution(Swapped, host.SanaWMTemporalShortConvolution):
    """The short convolution without its second pass over flipped frames (`functional.short_conv`)."""

    def forward(self, hidden_states: Tensor, num_frames: int, clip: Clip | None = None) -> Tensor:
        """(B, N, C) -> (B, N, C)"""
        clip = clip or clip_of(self, hidden_states, num_frames, None)
        x = hidden_states.unflatten(1, (num_frames, -1))
        reach = self.kernel_size - 1
        past = future = None
        if self.group is not None:
            past, future = parallel.halo(x, reach, reach, self.group, clip.counts, clip.call)
        out = functional.short_conv(
            x, self.weight, past, future, chunk_frames=clip.chunk_frames, first_frame=clip.start, backend=self.backend
        )
        if self.bias is not None:
            out = out + 2 * self.bias.to(out.dtype)  # as often as the host's two passes add it
        return out.flatten(1, 2)


# --- norms ------------------------------------------------------------------------------------------------------


class RMSNorm(Swapped, host.RMSNorm):
    """The norm as one kernel in half precision, with ReLU and key scale after it in any. In float32 by itself it is as
    the host has it, to the bit: the softmax blocks round to bfloat16 next, where another last bit now and then is
    another number."""

    def forward(self, hidden_states: Tensor, relu: bool = False, scale: float = 1.0) -> Tensor:
        """(..., C) -> (..., C); with relu through a ReLU and times `scale`."""
        weight: Tensor | None = self.weight
        half = hidden_states.dtype in (torch.bfloat16, torch.float16)
        if weight is not None and self.bias is None:
            alike = weight.dtype == hidden_states.dtype
            # Under autocast tokens are half and the weight is not: what follows takes them half, as the kernel makes.
            if relu and (alike or half) and functional.fused(hidden_states, self.backend):
                return functional.rms_norm_relu(hidden_states, weight, self.eps, scale, self.backend)
            if alike and half:
                out = F.rms_norm(hidden_states, self.dim, weight, self.eps)
                return F.relu(out) * scale if relu else out
        out = super().forward(hidden_states)
        return F.relu(out) * scale if relu else out


class LayerNorm(Swapped, nn.LayerNorm):
    """A block's norm with the modulation that follows it."""

    def forward(
        self, x: Tensor, shift: Tensor | None = None, scale: Tensor | None = None, clip: Clip | None = None
    ) -> Tensor:
        """x (B, N, C), shift and scale (B, T, C) -> layer_norm(x) · (1 + scale) + shift, 0 in padded frames. Without
        them the norm alone."""
        if shift is None or scale is None or clip is None:
            return super().forward(x)
        if self.weight is None:
            return functional.modulated_norm(x, shift, scale, clip.mask, eps=self.eps, backend=self.backend)
        return functional.modulate(super().forward(x), shift, scale, clip.mask)


# --- attention --------------------------------------------------------------------------------------------------


class _Attention(Swapped):
    """What the two attentions of the host share: projections, main and camera branch, output gate."""

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        HW: tuple[int, int, int] | None = None,
        rotary_emb: Tensor | None = None,
        block_mask: Tensor | None = None,
        camera_conditions: Tensor | None = None,
        chunk_size: int | None = None,
        *,
        frame_valid_mask: Tensor | Clip | None = None,
        ucpe_ray_transforms: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C); arguments as in the host."""
        if HW is None:
            raise ValueError("HW (T, H, W) must be provided")
        clip = clip_of(self, x, HW[0], frame_valid_mask)
        seen = clip.select(x)
        gates = self._gates(x, clip)
        out = self._main(self._qkv(self.qkv(seen).chunk(3, -1), "", clip), gates, rotary_emb, clip)
        if camera_conditions is not None:
            rays = ucpe_ray_transforms
            if rays is None:
                rays = host._prepare_ucpe_ray_transforms(
                    self.cam_head_dim, camera_conditions, HW, self.patch_size, rotary_emb
                )
            projected = self.q_proj_cam(seen), self.k_proj_cam(seen), self.v_proj_cam(seen)
            cam = self._camera(self._qkv(projected, "_cam", clip), gates, rays, clip)
            out = out + self.out_proj_cam(cam.flatten(2)).view(out.shape)
        out = out.flatten(2)
        if self.output_gate is not None:
            out = functional.silu_gate(out, self.output_gate(x), x.dtype, self.backend)
        projection: Tensor = self.proj(out.to(x.dtype))
        return projection

    def _qkv(self, projected: Sequence[Tensor], branch: str, clip: Clip) -> list[Tensor]:
        """Queries, keys and values (B, N, H, D) of a branch, "" or "_cam": convolution, norm, feature map."""
        result = []
        for name, t in zip("qkv", projected, strict=True):
            t = clip.select(t)
            convolution = getattr(self, f"conv_{name}{branch}", None)
            if convolution is not None:
                t = convolution(t, clip.frames, clip)
            if name != "v":
                scale = (t.shape[-1] // self.heads * (t.shape[1] // clip.frames)) ** -0.5 if name == "k" else 1.0
                t = self._features(t, getattr(self, f"{name}_norm{branch}"), scale)
            result.append(t.unflatten(-1, (self.heads, -1)))
        return result

    def _gates(self, x: Tensor, clip: Clip) -> Any:
        return None

    def _features(self, x: Tensor, norm: nn.Module, scale: float) -> Tensor:
        """Normed queries or keys (B, N, C); a feature map takes the scale of keys, 1/√(D·S), with it."""
        out: Tensor = norm(x)
        return out

    def _main(self, qkv: Sequence[Tensor], gates: Any, rotary_emb: Tensor | None, clip: Clip) -> Tensor:
        raise NotImplementedError

    def _camera(self, qkv: Sequence[Tensor], gates: Any, rays: Sequence[Any], clip: Clip) -> Tensor:
        raise NotImplementedError


class BidirectionalGDNUCPESinglePathLiteLA(_Attention, host.BidirectionalGDNUCPESinglePathLiteLA):
    """GDN of the main branch and, numerator only, of the camera branch, each as one `bidirectional_gdn`."""

    def _gates(self, x: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
        """beta (B, N, H) and decay (B, T, H)"""
        gate = self.gate_proj(x.unflatten(1, (clip.frames, -1)).mean(2))
        return self.beta_proj(x).sigmoid(), functional.decay(gate, self.A_log, self.dt_bias)

    def _features(self, x: Tensor, norm: nn.Module, scale: float) -> Tensor:
        out: Tensor
        if isinstance(norm, RMSNorm) and type(self.kernel_func) is nn.ReLU:
            out = norm(x, relu=True, scale=scale)
        else:
            out = self.kernel_func(norm(x)) * scale
        return out

    def _main(self, qkv: Sequence[Tensor], gates: Any, rotary_emb: Tensor | None, clip: Clip) -> Tensor:
        q, k, v = as_values(*qkv)
        rotation: dict[str, Any] = {}
        if rotary_emb is not None and rotary_emb.numel() == rotary_emb.shape[-1] * q.shape[1]:
            table = rotary_emb.reshape(q.shape[1], -1)
            rotation = {"rotary": (table.real.contiguous(), table.imag.contiguous())}
        elif rotary_emb is not None:  # the caller's own tables, one a sample
            rotation = {name: rotate(t, rotary_emb, self.backend) for name, t in (("q_rot", q), ("k_rot", k))}
        out, _ = bidirectional_gdn(
            q, k, v, *gates, **rotation,
            mask=clip.mask, chunk_frames=clip.chunk_frames, eps=self.attn.eps,
            group=self.group, frames_per_rank=clip.counts, backend=self.backend,
        )  # fmt: skip
        return out

    def _camera(self, qkv: Sequence[Tensor], gates: Any, rays: Sequence[Any], clip: Clip) -> Tensor:
        beta, decay = gates
        q_ray, k_ray, v_ray, inflation = into_rays(as_values(*qkv), rays, self.backend)
        inflation = inflation.unflatten(1, (clip.frames, -1)).mean(2, keepdim=True)
        beta = (beta.unflatten(1, (clip.frames, -1)) / inflation.clamp_min(1.0)).flatten(1, 2)
        out, _ = bidirectional_gdn(
            q_ray, k_ray, v_ray, beta, decay,
            mask=clip.mask, chunk_frames=clip.chunk_frames, normalize=False,
            group=self.group, frames_per_rank=clip.counts, backend=self.backend,
        )  # fmt: skip
        return out_of_rays(out, rays, self.backend)


#: What the host casts to where its softmax would meet float32.
HALF = torch.bfloat16


class _SoftmaxUCPESinglePathLiteLA(_Attention, host._SoftmaxUCPESinglePathLiteLA):
    """The softmax block's two attentions through diffusers' dispatcher, so that `set_attention_backend` reaches them.

    The arithmetic is the host's: bfloat16 where it casts; padded keys of the main branch count as zeros, those of the
    camera branch do not count; the camera's scale is that of the head dimension it pads to.
    """

    def _main(self, qkv: Sequence[Tensor], gates: Any, rotary_emb: Tensor | None, clip: Clip) -> Tensor:
        q, k, v = qkv
        if rotary_emb is not None:
            q, k = (rotate(t, rotary_emb, self.backend) for t in (q, k))
        dtype = HALF if q.dtype == torch.float32 else v.dtype
        q, k, v = (clip.select(t.flatten(2)).view(t.shape).to(dtype) for t in (q, k, v))
        return attend(q, k, v, clip, self.group, attention=self.attention).to(qkv[2].dtype)

    def _camera(self, qkv: Sequence[Tensor], gates: Any, rays: Sequence[Any], clip: Clip) -> Tensor:
        turned = into_rays(qkv, rays, self.backend)[:3]
        q, k, v = (clip.select(t.flatten(2)).view(t.shape).to(HALF) for t in turned)
        D = q.shape[-1]
        padded = D if D in (32, 64, 128, 256) or D > 256 else 128 if D <= 128 else 256
        out = attend(q, k, v, clip, self.group, allowed=clip.clip_mask, scale=padded**-0.5, attention=self.attention)
        if clip.mask is not None:
            out = clip.select(out.flatten(2)).view(out.shape)
        return out_of_rays(out.to(qkv[2].dtype), rays, self.backend)


def rotate(x: Tensor, table: Tensor, backend: str) -> Tensor:
    """Interleaved pairs of x (B, N, H, D) times the complex table (..., N, D/2), in float32 at least, cast back."""
    table = table.reshape(-1, x.shape[1], table.shape[-1])
    return functional.rotary(x, table.real, table.imag, backend=backend)


# --- block and model --------------------------------------------------------------------------------------------


class SanaVideoMSCamCtrlBlock(Swapped, host.SanaVideoMSCamCtrlBlock):
    """A block as in the host, its masks selecting; its attention and feed-forward may be swapped or the host's."""

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        t: Tensor,
        mask: Tensor | None = None,
        THW: tuple[int, int, int] | None = None,
        rotary_emb: Tensor | None = None,
        block_mask: Tensor | None = None,
        camera_conditions: Tensor | None = None,
        ucpe_ray_transforms: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
        plucker_emb: Tensor | None = None,
        frame_valid_mask: Tensor | Clip | None = None,
        chunk_size: int | None = None,
    ) -> Tensor:
        """x (B, N, C), y (B, 1, L, C), t (B, 1, T, 6 C) -> (B, N, C); arguments as in the host."""
        clip = clip_of(self, x, t.shape[2], frame_valid_mask)
        modulation = self.scale_shift_table + t.reshape(x.shape[0], clip.frames, 6, -1)
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation.unbind(2)  # (B, T, C) each

        x = clip.select(x)
        h = self._modulated(self.norm1, x, shift1, scale1, clip)
        h = self.attn(
            h,
            HW=THW,
            rotary_emb=rotary_emb,
            camera_conditions=camera_conditions,
            frame_valid_mask=clip if isinstance(self.attn, Swapped) else clip.mask,
            ucpe_ray_transforms=ucpe_ray_transforms,
        )
        given = plucker_emb is not None and hasattr(self, "plucker_proj")
        x = self._add(x, h, clip, gate1, self.plucker_proj(plucker_emb) if given else None)
        x = self._add(x, self.cross_attn(x, y, mask=mask), clip)
        h = self._modulated(self.norm2, x, shift2, scale2, clip)
        h = self.mlp(h, HW=THW, clip=clip) if isinstance(self.mlp, Swapped) else self.mlp(h, HW=THW)
        return self._add(x, h, clip, gate2)

    def _modulated(self, norm: nn.Module, x: Tensor, shift: Tensor, scale: Tensor, clip: Clip) -> Tensor:
        if isinstance(norm, LayerNorm):
            out: Tensor = norm(x, shift, scale, clip)
            return out
        return functional.modulate(norm(x), shift, scale, clip.mask)

    def _add(
        self, x: Tensor, h: Tensor, clip: Clip, gate: Tensor | None = None, extra: Tensor | None = None
    ) -> Tensor:
        """x + gate · h + extra: tokens (B, N, C) but for the gate (B, T, C); 0 in padded frames."""
        return functional.gated_residual(x, h, gate, extra, clip.mask, frames=clip.frames, backend=self.backend)


class SanaWMPatchEmbed(Swapped, host.SanaWMPatchEmbed):
    """The embedding with a token's channels next to one another.

    The host's lie as its convolution leaves them, a channel's tokens next to one another, and the residual stream
    keeps them so: every linear layer then copies its input, every sum runs at a fraction of the bandwidth.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(B, C_in, T, h, w) -> (B, N, C) contiguous."""
        tokens: Tensor = super().forward(x)
        return tokens.contiguous()


class SanaWMTransformer3DModel(ConfiguredModel, host.SanaWMTransformer3DModel):
    """The model: finds out where its frames lie in the clip, once a call, and tells every block.

    Built or loaded under this name, it is swapped from the start, and A_log and dt_bias stay float32 whatever the
    load's `torch_dtype`.

    Args:
        chunk_frames: as in `swap`.
        frame_gdn: options as a mapping, as earlier versions saved those of other hosts; the other arguments are the
            host's.
    """

    _keep_in_fp32_modules = ["A_log", "dt_bias"]

    __init__ = swapping_init(host.SanaWMTransformer3DModel.__init__, replace, "chunk_frames")

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        mask: Tensor | None = None,
        return_dict: bool = True,
        data_info: dict[str, Any] | None = None,
        camera_conditions: Tensor | None = None,
        chunk_plucker: Tensor | None = None,
        cam_pos_embeds: dict[str, Tensor] | None = None,
        pos_embeds: Tensor | None = None,
        raymats: Tensor | None = None,
        frame_valid_mask: Tensor | None = None,
        chunk_size: int | None = None,
    ) -> Any:
        """As in the host. Under a group, `hidden_states`, `timestep`, `camera_conditions`, `chunk_plucker`, the mask
        and whatever else has frames hold this rank's own, and so does the output."""
        with parallel.checked(self.group, due=True):
            checks.tensor("hidden_states", hidden_states, ("B", "C", "T", "h", "w"))
            frames, height, width = (n // p for n, p in zip(hidden_states.shape[2:], self.patch_size, strict=True))
            arguments = {
                "hidden_states": hidden_states, "timestep": timestep,
                "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
                "mask": mask, "data_info": data_info, "camera_conditions": camera_conditions,
                "chunk_plucker": chunk_plucker, "cam_pos_embeds": cam_pos_embeds, "pos_embeds": pos_embeds,
                "raymats": raymats,
            }  # fmt: skip
            facts = facts_of(self, FRAMES_DIMS, arguments)
        clip = clip_of(self, hidden_states, frames, frame_valid_mask, facts)
        if self.use_pe and pos_embeds is None:
            check_positions(clip, self.rope.max_seq_len)
        if clip.start and self.use_pe and pos_embeds is None:
            table = self.rope((clip.start + frames, height, width), device=hidden_states.device)
            pos_embeds = table[:, :, clip.start * height * width :]
        if clip.mask is not None:
            hidden_states, timestep = finite(hidden_states, clip.mask, 2), finite(timestep, clip.mask, 2)
            if camera_conditions is not None:
                camera_conditions = finite(camera_conditions, clip.mask, 1, LENS)
            if chunk_plucker is not None:
                chunk_plucker = finite(chunk_plucker, clip.mask, 2)
        return super().forward(
            hidden_states,
            timestep,
            encoder_hidden_states,
            encoder_attention_mask=encoder_attention_mask,
            mask=mask,
            return_dict=return_dict,
            data_info=data_info,
            camera_conditions=camera_conditions,
            chunk_plucker=chunk_plucker,
            cam_pos_embeds=cam_pos_embeds,
            pos_embeds=pos_embeds,
            raymats=raymats,
            frame_valid_mask=clip,
            chunk_size=chunk_size,
        )


#: By argument of the model, the dimension of the frames, or of their tokens: a rank has its own.
FRAMES_DIMS = {
    "hidden_states": 2,
    "timestep": 2,
    "camera_conditions": 1,
    "chunk_plucker": 2,
    "pos_embeds": 2,
    "raymats": 1,
}

#: A camera at the origin that is safe to divide by: what stands in for one that is not finite in a padded frame.
LENS = (1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 1.0, 1.0, 1.0, 0, 0)


def finite(x: Tensor, mask: Tensor, dim: int, otherwise: Sequence[float] = (0.0,)) -> Tensor:
    """x with `otherwise` (along its last dimension) for what is not finite in padded frames; dimension `dim` is T."""
    shape = [1] * x.dim()
    shape[0], shape[dim] = mask.shape
    fill = torch.tensor(otherwise, dtype=x.dtype, device=x.device)
    sound = x.isfinite() if len(otherwise) == 1 else x.isfinite().all(-1, keepdim=True)
    return torch.where(mask.view(shape) | sound, x, fill)


#: By the name that a replacement shares with what it replaces: the sites of a block.
REPLACEMENTS: dict[str, type[Swapped]] = {
    cls.__name__: cls
    for cls in (
        SanaWMTemporalShortConvolution,
        RMSNorm,
        LayerNorm,
        GLUMBConvTemp,
        SanaWMConvLayer,
        BidirectionalGDNUCPESinglePathLiteLA,
        _SoftmaxUCPESinglePathLiteLA,
    )
}
