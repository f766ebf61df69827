"""A video diffusion transformer on frame-wise gated DeltaNet.

Read it from the top: what a rollout carries, positions, the modules that look across frames (softmax attention,
temporal convolution), feed-forward, block, model. Tokens are frame-major, (B, T, S, C) with S = h·w patches a frame.
Frames may be sharded over a process group (`frame_gdn.parallelize`): the modules that look across frames are
`FrameSharded` and hold that group, all others see one frame at a time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.embeddings import PixArtAlphaTextProjection, TimestepEmbedding
from diffusers.models.modeling_utils import ModelMixin
from diffusers.utils import BaseOutput
from torch import Tensor, nn

from frame_gdn import BidirectionalGDN, GDNState, RolloutState, checks, functional
from frame_gdn.agreement import Call, described
from frame_gdn.chunks import ChunkEnds, ChunkGrid, KeyFrames, SoftmaxWindow, frames_at
from frame_gdn.hosts.clip import Keys, count_active, softmax
from frame_gdn.kernels.backends import BACKENDS
from frame_gdn.parallel import (
    FrameSharded,
    agree,
    check_frames_per_rank,
    checked,
    fetch_frames,
    gather_frames,
    halo,
    rank_and_size,
)
from frame_gdn.rollout_state import facts_of

#: The part of a `RolloutState` that one block carries, by name.
BlockState = dict[str, Tensor]


def gdn_state(block: BlockState) -> GDNState:
    """A block's attention state. Its count of frames is left at 0: the call's grid says already that the clip goes
    on, and a block compiled for one chunk then serves the next."""
    return GDNState(block["attn.S"], block["attn.z"], conv_tail=block.get("attn.conv_tail"))


def block_state(state: GDNState) -> BlockState:
    """The inverse of `gdn_state`."""
    tail = {} if state.conv_tail is None else {"attn.conv_tail": state.conv_tail}
    return {"attn.S": state.S, "attn.z": state.z, **tail}


@dataclass
class VideoDiTOutput(BaseOutput):
    """`sample` (B, out_channels, T, h, w); `state` is None unless it was asked for."""

    sample: Tensor
    state: RolloutState | None = None


# --- positions in noise and in the clip ---------------------------------------------------------------------------


def timestep_features(timestep: Tensor, channels: int, dtype: torch.dtype) -> Tensor:
    """Sinusoids (..., channels) of timesteps in the scheduler's unit (0...1000), cosines first.

    diffusers' `Timesteps` with flip_sin_to_cos, in the given dtype: that one computes in float32 whatever the model.
    """
    half = channels // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=dtype, device=timestep.device) / half)
    angles = timestep.to(dtype)[..., None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def rotary_table(
    head_dim: int,
    first_frame: int | Tensor,
    frames: int,
    height: int,
    width: int,
    *,
    theta: float = 10000.0,
    like: Tensor,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each (T·h·w, head_dim/2), of 3-D rotary positions: ⌊D/6⌋ pairs for h, for w too, the rest t.

    `first_frame` is the clip's number of the first of these frames: a shard's and a rollout's do not start at 0. It is
    a tensor () where a captured graph reads it. The tables are on the device of `like`, in its dtype or float32,
    whichever is wider.
    """
    pairs_s = head_dim // 6
    pairs_t = head_dim // 2 - 2 * pairs_s
    # As in diffusers: the angles of far frames need more digits than float32 has.
    wide = torch.float32 if like.device.type == "mps" else torch.float64

    def angles(first: int | Tensor, count: int, pairs: int) -> Tensor:
        frequencies = theta ** (-torch.arange(pairs, dtype=wide, device=like.device) / pairs)
        return torch.outer(first + torch.arange(count, dtype=wide, device=like.device), frequencies)

    t, y, x = angles(first_frame, frames, pairs_t), angles(0, height, pairs_s), angles(0, width, pairs_s)

    def table(function: Callable[[Tensor], Tensor]) -> Tensor:
        axes = function(t)[:, None, None], function(y)[None, :, None], function(x)[None, None, :]
        on_grid = [axis.to(at_least_float32(like.dtype)).expand(frames, height, width, -1) for axis in axes]
        return torch.cat(on_grid, dim=-1).flatten(0, 2)

    return table(torch.cos), table(torch.sin)


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


# --- what looks across frames -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Clip:
    """One call's clip as every block sees it; a dataclass, so that no wrapper casts or moves what is in it.

    Attributes:
        counts: every rank's number of frames; `start` ... `stop` - 1 of `total` are here.
        height, width: patches of a frame.
        grid: the grid of chunks, past whose ends no frame sees; `keys` those that softmax attention sees.
        rotary: cosines and sines, each (N_local, D/2), of the frames here.
        mask: (B, T_local), the frames here that are not padding; `clip_mask` (B, T) those of all ranks. None: all are.
        active: the frames after which a state is asked for; None where none is.
        call: what the ranks of a group compare the messages of this call by.
    """

    counts: list[int]
    start: int
    stop: int
    total: int
    height: int
    width: int
    grid: ChunkGrid
    keys: Keys
    rotary: tuple[Tensor, Tensor]
    mask: Tensor | None
    clip_mask: Tensor | None
    active: int | None
    call: Call

    @property
    def ends(self) -> ChunkEnds | None:
        """The ends of chunks, counted from the first frame here."""
        return self.grid.ends(self.start, self.total)


def key_frames(config: Any, grid: ChunkGrid, total: int, state: RolloutState | None) -> KeyFrames:
    """Where the keys of softmax attention lie in a call of `total` frames that continues a state."""
    chunks, kept = (0, ()) if state is None else (state.chunks, state.kept)
    return KeyFrames(grid, SoftmaxWindow.of(config), total, chunks, kept)


def select_active(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, T, ...) with zeros in padded frames: selected, not multiplied, so that no NaN passes."""
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *[1] * (x.dim() - 2)), 0)


class RMSNorm(nn.RMSNorm):
    """torch's norm, not diffusers': that one takes its statistics in float32 even in a float64 model."""

    eps: float

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) → the same shape."""
        return functional.rms_norm(x, self.weight, self.eps)


class SoftmaxAttention(FrameSharded):
    """Softmax attention over a clip; in chunks a frame attends to its own chunk and to the earlier ones.

    Over a group the keys and values of all frames are gathered, and the queries stay where they are.

    Attributes:
        backend: of the rotary embedding, "torch", "triton" or "auto".
        attention: "sdpa", "flash4" or "auto", as in `functional.attention`.
    """

    backend = "auto"
    attention = "auto"

    def __init__(self, hidden_size: int, num_heads: int, *, norm_eps: float = 1e-5) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.to_q = nn.Linear(hidden_size, hidden_size)
        self.to_k = nn.Linear(hidden_size, hidden_size)
        self.to_v = nn.Linear(hidden_size, hidden_size)
        self.norm_q = RMSNorm(hidden_size, eps=norm_eps)
        self.norm_k = RMSNorm(hidden_size, eps=norm_eps)
        self.to_out = nn.Linear(hidden_size, hidden_size)

    def forward(self, x: Tensor, clip: Clip, state: BlockState | None = None) -> tuple[Tensor, BlockState]:
        """x (B, T_local, S, C) → the same shape, and its part of the state after `clip.active` frames."""
        frames, tokens = x.shape[1:3]
        x = x.flatten(1, 2)
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(x)), self.to_v(x)
        q, k, v = (t.to(v.dtype).unflatten(-1, (self.num_heads, -1)) for t in (q, k, v))
        q, k = (functional.rotary(t, *clip.rotary, backend=self.backend) for t in (q, k))
        q, k, v = (t.unflatten(1, (frames, tokens)) for t in (q, k, v))
        keys, values, final_state = self._of_all_frames(k, v, clip, state)
        active = None if clip.clip_mask is None else nn.functional.pad(clip.clip_mask, (clip.keys.past, 0), value=True)

        out = []
        for first, last, runs in clip.keys.seen:
            allowed = None if active is None else allowed_keys(frames_at(active, runs), tokens)
            to_see = (frames_at(t, runs).flatten(1, 2) for t in (keys, values))
            out.append(softmax(q[:, first:last].flatten(1, 2), *to_see, mask=allowed, attention=self.attention))
        attended = functional.select((out[0] if len(out) == 1 else torch.cat(out, 1)).flatten(2), clip.mask)
        return self.to_out(attended).unflatten(1, (frames, tokens)), final_state

    def _of_all_frames(
        self, k: Tensor, v: Tensor, clip: Clip, state: BlockState | None
    ) -> tuple[Tensor, Tensor, BlockState]:
        """Keys and values (B, T_local, S, H, D) → those that the state keeps and of all ranks' frames, and its next
        part."""
        k, v = select_active(k, clip.mask), select_active(v, clip.mask)
        if len(clip.counts) > 1:
            k, v = gather_frames(torch.stack([k, v], dim=3), self.group, clip.counts, clip.call).unbind(3)
        if state is not None:
            k, v = (torch.cat([state[f"attn.{n}"].to(t.dtype), t], 1) for n, t in (("keys", k), ("values", v)))
        if clip.active is None:
            return k, v, {}
        return k, v, {f"attn.{name}": frames_at(t, clip.keys.kept).clone() for name, t in (("keys", k), ("values", v))}


def allowed_keys(seen: Tensor, tokens: int) -> Tensor:
    """Frames (B, T) that hold keys, of so many tokens each → an attention mask (B, 1, 1, T·tokens)."""
    # Without one active key a sample may attend to all: its rows are padding, and their softmax must be finite.
    seen = seen | ~seen.any(dim=1, keepdim=True)
    return seen.repeat_interleave(tokens, dim=1)[:, None, None]


class Taps(nn.Linear):
    """The three taps of a `TemporalConv`, [W₀, W₁, W₂] side by side.

    What is fused happens within this call, where casting, offloading and adapters expect the weights to be used.
    """

    def forward(
        self,
        input: Tensor,
        past: Tensor | None = None,
        future: Tensor | None = None,
        clip: Clip | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """(..., 3 C) → (..., C); with a clip, `functional.temporal_conv` of input (B, T_local, S, C)."""
        if clip is None:
            return super().forward(input)
        return functional.temporal_conv(
            input,
            self.weight,
            past,
            future,
            ends=clip.ends,
            backend=backend,
        )


class TemporalConv(FrameSharded):
    """x plus a convolution of width 3 over frames that starts at zero and sees no frame past the end of its chunk.

    Attributes:
        backend: "torch", "triton" or "auto".
    """

    backend = "auto"

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.taps = Taps(3 * hidden_size, hidden_size, bias=False)
        nn.init.zeros_(self.taps.weight)

    def forward(self, x: Tensor, clip: Clip, tail: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """x (B, T_local, S, C) → the same shape, and the tail (B, 1, S, C): x at the frame `clip.active` - 1."""
        x = select_active(x, clip.mask)
        past = future = None
        if len(clip.counts) > 1:
            past, future = halo(x, 1, 1, self.group, clip.counts, clip.call)
        if tail is not None and clip.start == 0:
            past = tail
        if type(self.taps) is Taps:
            out = self.taps(x, past, future, clip, self.backend)
        else:  # an adapter's or a quantised layer, which takes what the product takes
            out = x + self.taps(functional.temporal_windows(x, past, future, clip.ends))
        return out, self._final_tail(x, clip, tail)

    def _final_tail(self, x: Tensor, clip: Clip, tail: Tensor | None) -> Tensor | None:
        if clip.active is None:
            return None
        if clip.active == 0:
            return x.new_zeros(x.shape[0], 1, *x.shape[2:]) if tail is None else tail.clone()
        last = clip.active - 1
        if len(clip.counts) == 1:
            return x[:, last : last + 1].clone()
        return fetch_frames(x, [[last]] * len(clip.counts), self.group, clip.counts, clip.call)


# --- the transformer ----------------------------------------------------------------------------------------------


class PatchEmbedding(nn.Conv3d):
    """A convolution of patches that do not overlap, as a matrix product over pixels in channels-last memory."""

    def forward(self, input: Tensor) -> Tensor:
        """(B, C_in, T, h, w) → (B, C, T, h/p, w/p), a token's channels next to one another."""
        _, p, _ = self.kernel_size
        patches = input.unflatten(4, (-1, p)).unflatten(3, (-1, p)).permute(0, 2, 3, 5, 1, 4, 6)
        return nn.functional.linear(patches.flatten(4), self.weight.flatten(1), self.bias).permute(0, 4, 1, 2, 3)


class Conv2d(nn.Conv2d):
    """A convolution of images in channels-last memory: pointwise as a matrix product, or with the gate that follows.

    What is fused happens within this call, where casting, offloading and adapters expect the weights to be used.
    """

    def forward(self, input: Tensor, glu: bool = False, backend: str = "auto") -> Tensor:
        """(images, C, height, width) → the same of other channels; with `glu`, `functional.glu_conv`."""
        pixels = input.permute(0, 2, 3, 1)
        if glu:
            return functional.glu_conv(pixels, self.weight, self.bias, backend=backend).permute(0, 3, 1, 2)
        if self.kernel_size == (1, 1) and self.groups == 1:
            return functional.pointwise_conv(pixels, self.weight, self.bias).permute(0, 3, 1, 2)
        return super().forward(input)


class GLUMBConv(nn.Module):
    """SANA's gated convolutional feed-forward, with the parameter names of diffusers' module of this name.

    Attributes:
        backend: "torch", "triton" or "auto".
    """

    backend = "auto"

    def __init__(self, hidden_size: int, expand_ratio: float) -> None:
        super().__init__()
        width = int(expand_ratio * hidden_size)
        self.conv_inverted = Conv2d(hidden_size, 2 * width, 1)
        self.conv_depth = Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width)
        self.conv_point = Conv2d(width, hidden_size, 1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        """(images, C, height, width) → the same shape."""
        h = self.conv_inverted(images)
        if type(self.conv_depth) is Conv2d:
            h = self.conv_depth(h, glu=True, backend=self.backend)
        else:  # an adapter's layer
            value, gate = self.conv_depth(nn.functional.silu(h)).chunk(2, 1)
            h = value * nn.functional.silu(gate)
        return self.conv_point(h)


class FeedForward(nn.Module):
    """The gated convolutional feed-forward on each frame, then a temporal convolution."""

    def __init__(self, hidden_size: int, expand_ratio: float) -> None:
        super().__init__()
        self.spatial = GLUMBConv(hidden_size, expand_ratio)
        self.temporal = TemporalConv(hidden_size)

    def forward(self, x: Tensor, clip: Clip, tail: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x (B, T_local, S, C) → the same shape, and the temporal convolution's tail."""
        images = x.flatten(0, 1).unflatten(1, (clip.height, clip.width)).permute(0, 3, 1, 2)
        out = self.spatial(images).permute(0, 2, 3, 1).reshape(x.shape)
        return self.temporal(out, clip, tail)


class ModulatedNorm(nn.LayerNorm):
    """A norm without parameters of its own, and the modulation that follows it.

    Attributes:
        backend: "torch", "triton" or "auto".
    """

    backend = "auto"

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, eps=1e-6, elementwise_affine=False)

    def forward(self, input: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """input (B, T, S, C), shift and scale (B, T, C) → layer_norm(input) · (1 + scale) + shift, in its dtype."""
        out = functional.modulated_norm(input.flatten(1, 2), shift, scale, eps=self.eps, backend=self.backend)
        return out.to(input.dtype).view(input.shape)


class VideoDiTBlock(nn.Module):
    """Attention over the clip, cross-attention to a text if there is one, feed-forward; modulated frame by frame.

    Attributes:
        backend: of the residual sums, "torch", "triton" or "auto".
    """

    backend = "auto"

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        softmax: bool,
        conv_kernel_size: int,
        ffn_expand_ratio: float,
        cross_attention: bool,
    ) -> None:
        super().__init__()
        self.norm1 = ModulatedNorm(hidden_size)
        self.attn: SoftmaxAttention | BidirectionalGDN
        if softmax:
            self.attn = SoftmaxAttention(hidden_size, num_heads)
        else:
            self.attn = BidirectionalGDN(hidden_size, num_heads, conv_kernel_size=conv_kernel_size)
        self.cross_attn = None
        if cross_attention:
            # No bias: one on the keys would move all logits of a query alike, and never learn.
            self.cross_attn = Attention(hidden_size, heads=num_heads, dim_head=hidden_size // num_heads)
        self.norm2 = ModulatedNorm(hidden_size)
        self.ff = FeedForward(hidden_size, ffn_expand_ratio)
        # Rows: shift, scale, gate of the attention; shift, scale, gate of the feed-forward. Residual gates that start
        # at 0.5 let a small model learn in minutes, where gates that start at zero do not.
        self.scale_shift_table = nn.Parameter(torch.tensor([0, 0, 0.5, 0, 0, 0.5])[:, None].repeat(1, hidden_size))

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        clip: Clip,
        text: Tensor | None = None,
        text_bias: Tensor | None = None,
        state: BlockState | None = None,
    ) -> tuple[Tensor, BlockState | None]:
        """x (B, T_local, S, C), modulation (B, T_local, 6, C) → like x, and the state after `clip.active` frames."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (self.scale_shift_table + modulation).unbind(2)

        h = self.norm1(x, shift1, scale1)
        if isinstance(self.attn, BidirectionalGDN):
            h, final = self.attn(
                h.flatten(1, 2),
                h.shape[1],
                rotary=clip.rotary,
                mask=clip.mask,
                state=None if state is None else gdn_state(state),
                output_final_state=clip.active is not None,
                frames_per_rank=clip.counts,
                **clip.grid.facts,
            )
            new_state = {} if final is None else block_state(final)
        else:
            h, new_state = self.attn(h, clip, state)
        x = self._add(x, h, gate1)  # under autocast the residual stream is float32

        if self.cross_attn is not None:
            x = self._add(x, self.cross_attn(x.flatten(1, 2), text, text_bias))

        h = self.norm2(x, shift2, scale2)
        h, tail = self.ff(h, clip, None if state is None else state["ff.tail"])
        x = self._add(x, h, gate2)
        return x, None if tail is None else {**new_state, "ff.tail": tail}

    def _add(self, x: Tensor, h: Tensor, gate: Tensor | None = None) -> Tensor:
        """x + gate · h of x (B, T, S, C), h of as many tokens, gate (B, T, C)."""
        tokens = x.flatten(1, 2)
        out = functional.gated_residual(tokens, h.view_as(tokens), gate, frames=x.shape[1], backend=self.backend)
        return out.view_as(x)


class VideoDiT(FrameSharded, ModelMixin, ConfigMixin):
    """A video diffusion transformer whose blocks mix frames by gated DeltaNet, every n-th by softmax attention.

    Args:
        in_channels, out_channels: latent channels; out_channels None means in_channels.
        patch_size: a patch is (1, patch_size, patch_size).
        num_layers: blocks; block i is softmax where (i + 1) % softmax_every_n == 0, none where softmax_every_n is 0.
        num_attention_heads, attention_head_dim: the width is their product.
        conv_kernel_size: width of the short convolution on the keys of the gated DeltaNet blocks.
        ffn_expand_ratio: hidden width of the feed-forward, in widths of the model.
        cross_attention_dim: width of the text embeddings; None builds no cross-attention.
        chunk_frames: no frame sees past the end of its chunk of so many frames; None is bidirectional over the clip.
        first_chunk_frames: frames of a clip's first chunk; None: as the others.
        merge_tail: a tail shorter than chunk_frames joins the chunk before it, within one call; False: it is a chunk
            of its own.
        softmax_window: chunks that a chunk sees in the softmax blocks beside itself, the sink counted; None: all of
            the past. It needs chunk_frames.
        softmax_sink: the clip's first chunk is one of them, and so always seen.

    Raises:
        ValueError: an argument out of its range.
    """

    _supports_gradient_checkpointing = True
    _no_split_modules = ["VideoDiTBlock"]
    _repeated_blocks = ["VideoDiTBlock"]
    _keep_in_fp32_modules = ["A_log", "dt_bias"]
    _skip_layerwise_casting_patterns = ["patch_embedding", "norm"]

    @register_to_config
    def __init__(
        self,
        in_channels: int = 16,
        out_channels: int | None = None,
        patch_size: int = 1,
        num_layers: int = 20,
        num_attention_heads: int = 20,
        attention_head_dim: int = 112,
        softmax_every_n: int = 4,
        conv_kernel_size: int = 4,
        ffn_expand_ratio: float = 2.5,
        cross_attention_dim: int | None = None,
        chunk_frames: int | None = None,
        first_chunk_frames: int | None = None,
        merge_tail: bool = False,
        softmax_window: int | None = None,
        softmax_sink: bool = False,
    ) -> None:
        super().__init__()
        sizes = {
            "in_channels": in_channels,
            "patch_size": patch_size,
            "num_attention_heads": num_attention_heads,
            "attention_head_dim": attention_head_dim,
        }
        for name, size in sizes.items():
            checks.integer(name, size, 1)
        for name, size in {"out_channels": out_channels, "cross_attention_dim": cross_attention_dim}.items():
            checks.integer(name, size, 1, optional=True)
        SoftmaxWindow(softmax_window, softmax_sink).check(ChunkGrid(chunk_frames, first_chunk_frames, merge_tail))
        checks.integer("num_layers", num_layers, 0)
        checks.integer("softmax_every_n", softmax_every_n, 0)
        checks.integer("conv_kernel_size", conv_kernel_size, 0)
        hidden_size = num_attention_heads * attention_head_dim
        checks.number("ffn_expand_ratio", ffn_expand_ratio, 1 / hidden_size)  # one channel at least
        if attention_head_dim % 2:
            raise ValueError(f"attention_head_dim must be even for the rotary positions, got {attention_head_dim}")
        patch = (1, patch_size, patch_size)
        self.patch_embedding = PatchEmbedding(in_channels, hidden_size, kernel_size=patch, stride=patch)
        self.time_embedding = TimestepEmbedding(256, hidden_size)
        self.time_modulation = nn.Linear(hidden_size, 6 * hidden_size)
        nn.init.zeros_(self.time_modulation.weight)
        nn.init.zeros_(self.time_modulation.bias)
        self.caption_projection = None
        if cross_attention_dim is not None:
            self.caption_projection = PixArtAlphaTextProjection(cross_attention_dim, hidden_size)
        self.blocks = nn.ModuleList(
            VideoDiTBlock(
                hidden_size,
                num_attention_heads,
                softmax=softmax_every_n > 0 and (index + 1) % softmax_every_n == 0,
                conv_kernel_size=conv_kernel_size,
                ffn_expand_ratio=ffn_expand_ratio,
                cross_attention=cross_attention_dim is not None,
            )
            for index in range(num_layers)
        )
        self.norm_out = ModulatedNorm(hidden_size)
        self.scale_shift_table = nn.Parameter(torch.zeros(2, hidden_size))
        self.proj_out = nn.Linear(hidden_size, patch_size**2 * (out_channels or in_channels))
        self.gradient_checkpointing = False

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        frame_mask: Tensor | None = None,
        chunk_frames: int | None = None,
        first_chunk_frames: int | None = None,
        merge_tail: bool | None = None,
        state: RolloutState | None = None,
        output_state: bool = False,
        frames_per_rank: list[int] | None = None,
        return_dict: bool = True,
    ) -> VideoDiTOutput | tuple[Tensor, RolloutState | None]:
        """Predict what the training objective asks for, of noisy latents.

        Args:
            hidden_states: (B, in_channels, T, h, w) latents, under a group this rank's frames of them.
            timestep: (B,) or (B, T), in the scheduler's unit (0 is clean, 1000 is noise).
            encoder_hidden_states: (B, L, cross_attention_dim) text, the same on all ranks.
            encoder_attention_mask: (B, L), 1 or True where the text is no padding; None: no token is.
            frame_mask: (B, T) bool, False in frames that are padding: they reach no other frame, and their own output
                is finite and means nothing. On all ranks or on none.
            chunk_frames, first_chunk_frames, merge_tail: the grid of chunks; None takes the configuration's.
            state: continue from here. The call's first frame is then the first of a chunk, and the same state is given
                on all ranks.
            output_state: return the state after the last active frame, the same on all ranks.
            frames_per_rank: every rank's T; None: asked of them, in one tiny exchange. Nothing without a group.
            return_dict: False returns (sample, state).

        Raises:
            ValueError: shapes that do not fit the configuration or one another; a text without cross-attention or the
                reverse; a state asked for where frame_mask's active frames are not one prefix, equal in the batch.
        """
        with checked(self.group, due=frames_per_rank is None):
            self._check(hidden_states, timestep, encoder_hidden_states, encoder_attention_mask, frame_mask)
            check_frames_per_rank(frames_per_rank, hidden_states.shape[2], self.group)
            asked = grid = self._grid(chunk_frames, first_chunk_frames, merge_tail)
            checks.flag("output_state", output_state)
            checks.flag("return_dict", return_dict)
            window = SoftmaxWindow.of(self.config)
            window.check(asked)
            state_facts = {}
            if state is not None or output_state:
                state_facts = facts_of(self, hidden_states.dtype, **asked.facts)
            if state is not None:
                self._check_state(state, state_facts, window, hidden_states)
                grid = grid.after("state", state.frames)
            batch, _, num_frames, height, width = hidden_states.shape
            patch_size = self.config.patch_size
            height, width = height // patch_size, width // patch_size
            if frame_mask is not None:  # nothing of a padded frame enters, so that no NaN is anywhere
                hidden_states = select_active(hidden_states.transpose(1, 2), frame_mask).transpose(1, 2)
            if timestep.dim() == 1:
                timestep = timestep[:, None].expand(batch, num_frames)
            timestep = select_active(timestep, frame_mask)

            # 1. Patches to tokens, (B, T, S, C). A shard without frames passes too.
            x = self.patch_embedding(hidden_states).permute(0, 2, 3, 4, 1).flatten(2, 3)
            facts: dict[str, object] = {}
            if rank_and_size(self.group)[1] > 1:  # a process alone, compiled perhaps, has nobody to agree with
                facts = {
                    **{name: value for name, value in self.config.items() if not name.startswith("_")}, **asked.facts,
                    "hidden_states": described(hidden_states, 2), "dtype": x.dtype,
                    "encoder_hidden_states": described(encoder_hidden_states),
                    "encoder_attention_mask": described(encoder_attention_mask),
                    "frame_mask": described(frame_mask, 1), "output_state": output_state,
                    "state.frames": None if state is None else state.frames,
                    "gradient_checkpointing": torch.is_grad_enabled() and self.gradient_checkpointing,
                }  # fmt: skip

        # 2. Where these frames are in the clip
        call = Call("VideoDiT", facts, num_frames)
        clip = self._locate(call, x, height, width, frame_mask, grid, state, output_state, frames_per_rank)

        # 3. Noise levels and text
        features = timestep_features(timestep, 256, at_least_float32(x.dtype)).to(x.dtype)
        embedded = self.time_embedding(features)
        modulation = self.time_modulation(nn.functional.silu(embedded)).unflatten(-1, (6, -1))
        text = text_bias = None
        if encoder_hidden_states is not None:
            text = self.caption_projection(encoder_hidden_states.to(x.dtype))
            if encoder_attention_mask is not None:
                text_bias = (1 - encoder_attention_mask.to(x.dtype))[:, None] * -10000.0

        # 4. Blocks
        states = []
        for index, block in enumerate(self.blocks):
            block_state = None if state is None else state.blocks[index]
            arguments = (x, modulation, clip, text, text_bias, block_state)
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                x, block_state = self._gradient_checkpointing_func(block, *arguments)
            else:
                x, block_state = block(*arguments)
            states.append(block_state)

        # 5. Back to latents
        shift, scale = (self.scale_shift_table + embedded[:, :, None]).unbind(2)
        x = self.proj_out(self.norm_out(x, shift, scale))
        out_channels = self.config.out_channels or self.config.in_channels
        x = x.reshape(batch, num_frames, height, width, patch_size, patch_size, out_channels)
        sample = x.permute(0, 6, 1, 2, 4, 3, 5).flatten(5, 6).flatten(3, 4)

        new_state = None
        if clip.active is not None:
            chunks, kept, _ = key_frames(self.config, clip.grid, clip.total, state).after(clip.active)
            size, rows = tuple(hidden_states.shape[3:]), 1 if state is None else state.rows
            frames = clip.active + (0 if state is None else state.frames)
            new_state = RolloutState(states, frames, chunks, kept, state_facts, size, rows)
        return VideoDiTOutput(sample, new_state) if return_dict else (sample, new_state)

    def set_backend(self, backend: str) -> None:
        """What all modules compute on: "torch", "triton" or "auto", which it is anyway. Kept in no configuration.

        Raises:
            ValueError: another name.
        """
        checks.choice("backend", backend, BACKENDS)
        for module in self.modules():
            if hasattr(module, "backend"):
                module.backend = backend

    def set_attention(self, attention: str) -> None:
        """What the softmax blocks compute with, as in `functional.attention`. Kept in no configuration.

        Raises:
            ValueError: another name.
        """
        checks.choice("attention", attention, functional.ATTENTIONS)
        for module in self.modules():
            if isinstance(module, SoftmaxAttention):
                module.attention = attention

    def _locate(
        self,
        call: Call,
        x: Tensor,
        height: int,
        width: int,
        mask: Tensor | None,
        grid: ChunkGrid,
        state: RolloutState | None,
        output_state: bool,
        frames_per_rank: list[int] | None,
    ) -> Clip:
        rank, _ = rank_and_size(self.group)
        num_frames, head_dim = call.frames, self.config.attention_head_dim
        counts, _, call = agree(call, self.group, frames_per_rank, positions=True, check=False)
        start, total = sum(counts[:rank]), sum(counts)
        if state is not None and state.frames:
            grid.check_tail(total)
        clip_mask = None if mask is None else gather_frames(mask, self.group, counts, call)
        active = None
        if output_state:
            active = total if clip_mask is None else count_active("frame_mask", clip_mask)
        stop, where = start + num_frames, key_frames(self.config, grid, total, state)
        keys = Keys(where.past, list(where.seen(start, stop)), [] if active is None else where.after(active)[2])
        first = start + (0 if state is None else state.position)
        return Clip(
            counts=counts,
            start=start,
            stop=stop,
            total=total,
            height=height,
            width=width,
            grid=grid,
            keys=keys,
            rotary=rotary_table(head_dim, first, num_frames, height, width, like=x),
            mask=mask,
            clip_mask=clip_mask,
            active=active,
            call=call.brief() if len(counts) > 1 else call,  # a process alone, exported perhaps, compares nothing
        )

    def _grid(self, chunk_frames: int | None, first_chunk_frames: int | None, merge_tail: bool | None) -> ChunkGrid:
        """The grid of chunks of a call: what is None is the configuration's."""
        named = {"chunk_frames": chunk_frames, "first_chunk_frames": first_chunk_frames, "merge_tail": merge_tail}
        given = {name: value for name, value in named.items() if value is not None}
        return ChunkGrid(**{**ChunkGrid.of(self.config).facts, **given})

    def _check(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        text: Tensor | None,
        text_mask: Tensor | None,
        frame_mask: Tensor | None,
    ) -> None:
        config = self.config
        checks.tensor("hidden_states", hidden_states, ("B", config.in_channels, "T", "h", "w"))
        checks.suits("hidden_states", hidden_states, self.patch_embedding)
        batch, _, num_frames, height, width = hidden_states.shape
        checks.integer("hidden_states' batch", batch, 1)
        beside = "hidden_states", hidden_states
        if height % config.patch_size or width % config.patch_size:
            raise ValueError(
                f"hidden_states' h and w must be multiples of patch_size {config.patch_size}, got {height}x{width} in "
                f"{checks.shown(hidden_states)}"
            )
        if not isinstance(timestep, Tensor) or tuple(timestep.shape) not in ((batch,), (batch, num_frames)):
            raise ValueError(
                f"timestep must be a tensor (B,) or (B, T) with B {batch}, T {num_frames}, "
                f"got {checks.shown(timestep)} beside hidden_states {tuple(hidden_states.shape)}"
            )
        dtype = timestep.dtype if timestep.dtype in (torch.int32, torch.int64) else None
        checks.tensor("timestep", timestep, timestep.shape, dtype=dtype, beside=beside)
        if (text is None) != (config.cross_attention_dim is None):
            raise ValueError(
                f"encoder_hidden_states is {None if text is None else checks.shown(text)}, but the model's "
                f"cross_attention_dim is {config.cross_attention_dim}: both or neither"
            )
        if text is not None:
            checks.tensor("encoder_hidden_states", text, (batch, "L", config.cross_attention_dim), beside=beside)
        if text_mask is not None:
            if text is None:
                raise ValueError("encoder_attention_mask is for encoder_hidden_states, which are not given")
            checks.mask("encoder_attention_mask", text_mask, text.shape[:2], ("encoder_hidden_states", text))
        if frame_mask is not None:
            checks.tensor("frame_mask", frame_mask, (batch, num_frames), dtype=torch.bool, beside=beside)

    def state_shapes(self, batch: int, tokens: int, kept: int) -> list[dict[str, tuple[int, ...]]]:
        """By block, the shapes of what a rollout carries, for `kept` frames of keys and values."""
        B, S = batch, tokens
        H, D, K = self.config.num_attention_heads, self.config.attention_head_dim, self.config.conv_kernel_size
        softmax = dict.fromkeys(("attn.keys", "attn.values"), (B, kept, S, H, D))
        gdn: dict[str, tuple[int, ...]] = {"attn.S": (B, H, D, D), "attn.z": (B, H, D)}
        if K:
            gdn["attn.conv_tail"] = (B, K - 1, S, H * D)
        return [
            {**(softmax if isinstance(block.attn, SoftmaxAttention) else gdn), "ff.tail": (B, 1, S, H * D)}
            for block in self.blocks
        ]

    def _check_state(
        self, state: RolloutState, facts: dict[str, Any], window: SoftmaxWindow, hidden_states: Tensor
    ) -> None:
        if not isinstance(state, RolloutState):
            raise ValueError(f"state must be None or a RolloutState, got {checks.shown(state)}")
        batch, _, _, height, width = hidden_states.shape
        tokens = (height // self.config.patch_size) * (width // self.config.patch_size)
        shapes = self.state_shapes(batch, tokens, sum(state.kept))
        if state.size not in (None, tuple(hidden_states.shape[3:])):
            raise ValueError(f"state is of latents {state.size}, hidden_states are {tuple(hidden_states.shape)}")
        state.check("state", facts, None, shapes, ("hidden_states", hidden_states))
        if len(state.kept) != len(window.kept(state.chunks)):
            raise ValueError(
                f"state keeps {len(state.kept)} chunks after {state.chunks}, the model's window "
                f"{len(window.kept(state.chunks))}"
            )
