"""SANA-WM's two attentions, frame-wise GDN and softmax, each a main branch and a camera branch.

Source of the formulas: `transformer_sana_wm.py` of diffusers 0.42, after NVlabs/Sana.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.transformers import transformer_sana_wm as host
from einops import rearrange, reduce
from torch import Tensor, nn

from ... import functional
from ...gdn import bidirectional_gdn
from .. import Swapped, sana_wm
from ..clip import Span, as_values, attend_to, locate
from ..rollout import Carried, scan_options, seen_keys
from .modules import RMSNorm
from .rays import into_rays, out_of_rays


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
        frame_valid_mask: Tensor | None = None,
        ucpe_ray_transforms: tuple[Tensor, Tensor, Tensor, Tensor | None] | None = None,
        clip: Span | None = None,
        carried: Carried | None = None,
    ) -> Tensor:
        """(B, N, C) -> (B, N, C); arguments as in the host, and `clip`, which tells what `frame_valid_mask` does, and
        `carried`, what a rollout carries."""
        if HW is None:
            raise ValueError("HW (T, H, W) must be provided")
        if clip is None:
            clip = locate(self, x, HW[0], frame_valid_mask=frame_valid_mask)
        seen = clip.select(x)
        gates = self._gates(x, clip)
        qkv = self._qkv(self.qkv(seen).chunk(3, -1), "", clip, carried)
        out = self._main(qkv, gates, rotary_emb, clip, carried)
        if camera_conditions is not None:
            rays = ucpe_ray_transforms
            if rays is None:
                rays = host._prepare_ucpe_ray_transforms(
                    self.cam_head_dim, camera_conditions, HW, self.patch_size, rotary_emb
                )
            projected = self.q_proj_cam(seen), self.k_proj_cam(seen), self.v_proj_cam(seen)
            cam = self._camera(self._qkv(projected, "_cam", clip, carried), gates, rays, clip, carried)
            cam = self.out_proj_cam(rearrange(cam, "b n h d -> b n (h d)"))
            out = out + rearrange(cam, "b n (h d) -> b n h d", h=self.heads)
        out = rearrange(out, "b n h d -> b n (h d)")
        if self.output_gate is not None:
            out = functional.silu_gate(out, self.output_gate(x), x.dtype, self.backend)
        projection: Tensor = self.proj(out.to(x.dtype))
        return projection

    def _qkv(self, projected: Sequence[Tensor], branch: str, clip: Span, carried: Carried | None) -> list[Tensor]:
        """Queries, keys and values (B, N, H, D) of a branch, "" or "_cam": convolution, norm, feature map."""
        result = []
        for name, t in zip("qkv", projected, strict=True):
            t = clip.select(t)
            convolution = getattr(self, f"conv_{name}{branch}", None)
            if convolution is not None:
                t = self._convolved(convolution, t, tail_name(name, branch), clip, carried)
            if name != "v":
                scale = (t.shape[-1] // self.heads * (t.shape[1] // clip.frames)) ** -0.5 if name == "k" else 1.0
                t = self._features(t, getattr(self, f"{name}_norm{branch}"), scale)
            result.append(rearrange(t, "b n (h d) -> b n h d", h=self.heads))
        return result

    def _convolved(self, convolution: Any, x: Tensor, tail: str, clip: Span, carried: Carried | None) -> Tensor:
        """The short convolution of x (B, N, C), whose past is the state's `tail`."""
        if tail.startswith("cam.") and not self.camera_conv_past:
            out: Tensor = convolution(x, clip.frames, clip, within_chunks=True)
            return out
        if carried is None:
            out = convolution(x, clip.frames, clip)
            return out
        if clip.active is not None:
            frames = rearrange(x, "b (t s) c -> b t s c", t=clip.frames)
            carried.keep_tail(tail, frames, convolution.kernel_size - 1, clip, self.group)
        out = convolution(x, clip.frames, clip, past=carried.past.get(tail))
        return out

    def state_shapes(self, batch: int, tokens: int, kept: int, camera: bool) -> dict[str, tuple[int, ...]]:
        """By name, the shapes of what a rollout carries here, for `kept` frames of keys and values."""
        shapes: dict[str, tuple[int, ...]] = {}
        for branch in ("", "_cam") if camera and self.camera_conv_past else ("",):
            for name in "qkv":
                convolution = getattr(self, f"conv_{name}{branch}", None)
                if convolution is not None:
                    channels = convolution.weight.shape[0]
                    shapes[tail_name(name, branch)] = batch, convolution.kernel_size - 1, tokens, channels
        return shapes

    def _gates(self, x: Tensor, clip: Span) -> Any:
        return None

    def _features(self, x: Tensor, norm: nn.Module, scale: float) -> Tensor:
        """Normed queries or keys (B, N, C); a feature map takes the scale of keys, 1/√(D·S), with it."""
        out: Tensor = norm(x)
        return out

    def _main(
        self, qkv: Sequence[Tensor], gates: Any, rotary_emb: Tensor | None, clip: Span, carried: Carried | None
    ) -> Tensor:
        raise NotImplementedError

    def _camera(
        self, qkv: Sequence[Tensor], gates: Any, rays: Sequence[Any], clip: Span, carried: Carried | None
    ) -> Tensor:
        raise NotImplementedError


class BidirectionalGDNUCPESinglePathLiteLA(_Attention, host.BidirectionalGDNUCPESinglePathLiteLA):
    """GDN of the main branch and, numerator only, of the camera branch, each as one `bidirectional_gdn`."""

    def state_shapes(self, batch: int, tokens: int, kept: int, camera: bool) -> dict[str, tuple[int, ...]]:
        D = self.qkv.in_features // self.heads
        state, cam = (batch, self.heads, D, D), (batch, self.cam_heads, self.cam_head_dim, self.cam_head_dim)
        shapes = {"attn.S": state, "attn.z": state[:3], **super().state_shapes(batch, tokens, kept, camera)}
        return {**shapes, "cam.S": cam} if camera else shapes

    def _gates(self, x: Tensor, clip: Span) -> tuple[Tensor, Tensor]:
        """beta (B, N, H) and decay (B, T, H)"""
        gate = self.gate_proj(reduce(x, "b (t s) c -> b t c", "mean", t=clip.frames))
        return self.beta_proj(x).sigmoid(), functional.decay(gate, self.A_log, self.dt_bias)

    def _features(self, x: Tensor, norm: nn.Module, scale: float) -> Tensor:
        out: Tensor
        if isinstance(norm, RMSNorm) and type(self.kernel_func) is nn.ReLU:
            out = norm(x, relu=True, scale=scale)
        else:
            out = self.kernel_func(norm(x)) * scale
        return out

    def _main(
        self, qkv: Sequence[Tensor], gates: Any, rotary_emb: Tensor | None, clip: Span, carried: Carried | None
    ) -> Tensor:
        q, k, v = as_values(*qkv)
        options: dict[str, Any] = {**clip.grid.facts, **scan_options(carried, clip, "attn")}
        if rotary_emb is not None and rotary_emb.numel() == rotary_emb.shape[-1] * q.shape[1]:
            table = rotary_emb.reshape(q.shape[1], -1)
            options["rotary"] = (table.real.contiguous(), table.imag.contiguous())
        elif rotary_emb is not None:  # the caller's own tables, one a sample
            options |= {name: rotate(t, rotary_emb, self.backend) for name, t in (("q_rot", q), ("k_rot", k))}
        out, state = bidirectional_gdn(
            q, k, v, *gates, **options,
            mask=clip.mask, eps=self.attn.eps,
            group=self.group, frames_per_rank=clip.counts, backend=self.backend,
        )  # fmt: skip
        if carried is not None and clip.active is not None:
            carried.keep_gdn_state("attn", state)
        return out

    def _camera(
        self, qkv: Sequence[Tensor], gates: Any, rays: Sequence[Any], clip: Span, carried: Carried | None
    ) -> Tensor:
        beta, decay = gates
        q_ray, k_ray, v_ray, inflation = into_rays(as_values(*qkv), rays, self.backend, self.camera_rescale)
        inflation = reduce(inflation, "b (t s) h -> b t 1 h", "mean", t=clip.frames)
        beta = rearrange(beta, "b (t s) h -> b t s h", t=clip.frames) / inflation.clamp_min(1.0)
        beta = rearrange(beta, "b t s h -> b (t s) h")
        out, state = bidirectional_gdn(
            q_ray, k_ray, v_ray, beta, decay, **scan_options(carried, clip, "cam"),
            mask=clip.mask, **clip.grid.facts, normalize=False,
            group=self.group, frames_per_rank=clip.counts, backend=self.backend,
        )  # fmt: skip
        if carried is not None and clip.active is not None:
            carried.keep_gdn_state("cam", state)
        return out_of_rays(out, rays, self.backend)


class _SoftmaxUCPESinglePathLiteLA(_Attention, host._SoftmaxUCPESinglePathLiteLA):
    """The softmax block's two attentions through diffusers' dispatcher, so that `set_attention_backend` reaches them.

    The arithmetic is the host's: bfloat16 where it casts; padded keys of the main branch count as zeros, those of the
    camera branch do not count; the camera's scale is that of the head dimension it pads to.
    """

    def state_shapes(self, batch: int, tokens: int, kept: int, camera: bool) -> dict[str, tuple[int, ...]]:
        main = batch, kept, tokens, self.heads, self.qkv.in_features // self.heads
        cam = batch, kept, tokens, self.cam_heads, self.cam_head_dim
        branches = {"attn": main, "cam": cam} if camera else {"attn": main}
        return {f"{prefix}.{name}": shape for prefix, shape in branches.items() for name in ("keys", "values")}

    def _main(
        self, qkv: Sequence[Tensor], gates: Any, rotary_emb: Tensor | None, clip: Span, carried: Carried | None
    ) -> Tensor:
        q, k, v = qkv
        if rotary_emb is not None:
            q, k = (rotate(t, rotary_emb, self.backend) for t in (q, k))
        dtype = sana_wm.HALF if q.dtype == torch.float32 else v.dtype
        q, k, v = (clip.select(t.flatten(2)).view(t.shape).to(dtype) for t in (q, k, v))
        k, v = seen_keys(k, v, clip, self.group, carried, "attn")
        out = attend_to(q, k, v, clip, scale=self.softmax_scale, attention=self.attention)
        return out.to(qkv[2].dtype)

    def _camera(
        self, qkv: Sequence[Tensor], gates: Any, rays: Sequence[Any], clip: Span, carried: Carried | None
    ) -> Tensor:
        turned = into_rays(qkv, rays, self.backend, self.camera_rescale)[:3]
        q, k, v = (clip.select(t.flatten(2)).view(t.shape).to(sana_wm.HALF) for t in turned)
        scale = padded_head_dim(q.shape[-1]) ** -0.5 if self.softmax_scale is None else self.softmax_scale
        k, v = seen_keys(k, v, clip, self.group, carried, "cam")
        out = attend_to(q, k, v, clip, allowed=clip.clip_mask, scale=scale, attention=self.attention)
        if clip.mask is not None:
            out = clip.select(out.flatten(2)).view(out.shape)
        return out_of_rays(out.to(qkv[2].dtype), rays, self.backend)


def tail_name(name: str, branch: str) -> str:
    """In a state, the name of the tail of the short convolution of queries, keys or values, "q", "k" or "v"."""
    return ("cam." if branch else "attn.") + ("conv_tail" if name == "k" else f"{name}_conv_tail")


def padded_head_dim(head_dim: int) -> int:
    """The head dimension to which the host pads the heads of its camera branch, and NVlabs' code those of both."""
    if head_dim in (32, 64, 128, 256) or head_dim > 256:
        return head_dim
    return 128 if head_dim <= 128 else 256


def rotate(x: Tensor, table: Tensor, backend: str) -> Tensor:
    """Interleaved pairs of x (B, N, H, D) times the complex table (..., N, D/2), in float32 at least, cast back."""
    table = table.reshape(-1, x.shape[1], table.shape[-1])
    return functional.rotary(x, table.real, table.imag, backend=backend)
