"""From latents to video as a rollout makes them: a diffusers VAE that decodes chunk after chunk, equal to one call.

    decoder = stream_decoder(vae)
    for latents in pipeline.stream(...):
        frames = decoder.decode(denormalize_latents(vae, latents))

A causal decoder needs of the past only the last frames that each of its convolutions read. They are kept in an
explicit `DecoderState`, not in the VAE: two films can share one VAE, and a branch of a film starts from a kept state.
Needs diffusers.
"""

from . import needs_diffusers as needs_diffusers  # isort: skip

import copy
import dataclasses
import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import AutoencoderDC, AutoencoderKLLTX2Video, AutoencoderKLWan, ModelMixin
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import (
    LTX2VideoCausalConv3d,
    LTX2VideoResnetBlock3d,
    LTX2VideoUpsampler3d,
)
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample, unpatchify
from diffusers.utils.accelerate_utils import apply_forward_hook
from diffusers.utils.torch_utils import is_compiled_module
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from . import checks

FORMAT, VERSION = "frame_gdn.DecoderState", "1"

Memory = tuple[Tensor, ...]
Tile = tuple[int, int, int, int]


@dataclass(frozen=True, eq=False)
class DecoderState:
    """All that a stream decoder remembers between two chunks. Its size does not grow with the film.

    A decoder never changes a state: each chunk makes a new one. To branch, keep `decoder.state` and give it to a
    decoder of the same VAE later.

    Attributes:
        model: class and configuration of the VAE that made it.
        frames: latent frames decoded so far; 0 before the first chunk.
        shape: (B, C, h, w) of the latents.
        dtype: that the VAE ran in.
        memory: tensors, batch first, in the order in which the decoder reads them; where it decodes in spatial tiles,
            all tensors of one tile, then all of the next.
        tiles: (top, bottom, left, right) of each tile in the latents; empty where a frame is decoded as a whole.
        seed: of the noise that an LTX-2 decoder with `inject_noise` adds, which is the same for all frames of a film.
    """

    model: str
    frames: int = 0
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = None
    memory: Memory = ()
    tiles: tuple[Tile, ...] = ()
    seed: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.memory)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "DecoderState":
        """The same state on another device or in another dtype, for a VAE that was moved or cast."""
        memory = tuple(x.to(device=device, dtype=dtype) for x in self.memory)
        return replace(self, memory=memory, dtype=dtype if dtype and self.frames else self.dtype)

    def clone(self) -> "DecoderState":
        """A copy that shares no memory with this state."""
        return replace(self, memory=tuple(x.clone() for x in self.memory))

    def split(self) -> list["DecoderState"]:
        """One state for each video of the batch. Their tensors are views of this state's."""
        rows = range(self.shape[0] if self.shape else 0)
        return [
            replace(self, shape=(1, *self.shape[1:]), memory=tuple(x[row : row + 1] for x in self.memory))
            for row in rows
        ]

    @staticmethod
    def stack(states: Sequence["DecoderState"]) -> "DecoderState":
        """One state of all videos. Raises ValueError for states that differ in anything but the batch."""
        kinds = {(s.model, s.frames, s.shape[1:], s.dtype, s.tiles, s.seed) for s in states}
        if len(kinds) != 1 or not states[0].shape:
            raise ValueError(f"states of one model, frame count, size and dtype can be stacked, got {sorted(kinds)}")
        shape = (sum(s.shape[0] for s in states), *states[0].shape[1:])
        memory = tuple(torch.cat(parts) for parts in zip(*(s.memory for s in states), strict=True))
        return replace(states[0], shape=shape, memory=memory)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state as one safetensors file."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "memory"}
        fields["dtype"] = self.dtype and str(self.dtype).removeprefix("torch.")
        metadata = {"format": FORMAT, "version": VERSION, "state": json.dumps(fields)}
        save_file({str(i): x.contiguous() for i, x in enumerate(self.memory)}, path, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> "DecoderState":
        """Read what `save` wrote. The decoder that takes the state checks that it is of its VAE.

        Raises:
            ValueError: a file that is damaged, of another format or of another version.
        """
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                metadata = file.metadata() or {}
                memory = tuple(file.get_tensor(str(i)) for i in range(len(file.keys())))
        except SafetensorError as error:
            raise ValueError(f"{os.fspath(path)} is not a state, or not the whole of one: {error}") from error
        written = metadata.get("format"), metadata.get("version")
        if written != (FORMAT, VERSION):
            raise ValueError(f"{os.fspath(path)} must be a {FORMAT} of version {VERSION}, got {written}")
        fields = json.loads(metadata["state"])
        fields["dtype"] = fields["dtype"] and getattr(torch, fields["dtype"])
        fields["shape"], fields["tiles"] = tuple(fields["shape"]), tuple(map(tuple, fields["tiles"]))
        return cls(**fields, memory=memory)


def stream_decoder(vae: ModelMixin) -> "StreamDecoder":
    """A decoder of a film's latents chunk by chunk, before its first chunk.

    Equal to `vae.decode` of all latents at once: `AutoencoderKLWan`, by the feature cache that it has;
    `AutoencoderKLLTX2Video` with `decoder_causal`, by the last k - 1 input frames of each causal convolution over k
    frames; `AutoencoderDC`, which knows images only, frame by frame.
    Any other video VAE looks at later frames too. Its chunks are decoded with the last latent frame of the chunk
    before, and the frames at a seam are approximate. A warning says so here, not at each chunk.

    Raises:
        ValueError: what is no VAE of diffusers.
    """
    return StreamDecoder(vae)


class StreamDecoder:
    """See `stream_decoder`.

    The VAE is never changed, and used as it is at each call: dtype, autocast, spatial tiling, slicing, and offloading
    act as they do in `vae.decode`. Temporal tiling (`use_framewise_decoding`) does not: a chunk is that already.

    Attributes:
        vae: the VAE.
        frame_ratio: video frames that each latent frame but the first gives; None where the VAE does not say.
    """

    def __init__(self, vae: ModelMixin) -> None:
        if not isinstance(vae, nn.Module) or not callable(getattr(vae, "decode", None)):
            raise ValueError(f"a stream decoder takes a VAE of diffusers, got {type(vae).__name__}")
        self.vae: Any = vae
        self.frame_ratio = _frame_ratio(vae)
        self._decode = _pick(vae)
        self._blank = DecoderState(_identity(vae))
        self._state = self._blank
        if self._decode is _decode_overlapping:
            warnings.warn(
                f"{type(vae).__name__} looks at later frames: each chunk is decoded with the last latent frame of the "
                "chunk before, and the frames at a seam are not those of one call",
                stacklevel=3,
            )

    @property
    def state(self) -> DecoderState:
        """What the next chunk continues from. Setting it raises ValueError for a state of another VAE."""
        return self._state

    @state.setter
    def state(self, state: DecoderState) -> None:
        if not isinstance(state, DecoderState):
            raise ValueError(f"the state must be a DecoderState, got {checks.shown(state)}")
        if state.model != self._blank.model:
            raise ValueError(f"the decoder's VAE is {self._blank.model}, got a state of {state.model}")
        self._state = state

    def reset(self) -> None:
        """Make the next chunk the first of a film."""
        self._state = self._blank

    @torch.no_grad()
    def decode(self, latents: Tensor, temb: Tensor | None = None) -> Tensor:
        """The video frames of a film's next latent frames.

        Args:
            latents: (B, C, T, h, w) as `vae.decode` takes them (see `denormalize_latents`), T at least 1, on the
                device where the VAE runs. They are cast to the VAE's dtype.
            temb: (B,) timesteps, for a VAE with `timestep_conditioning`.

        Returns:
            (B, 3, F, H, W), pixels in −1…1. F is T · frame_ratio, and 1 + (T - 1) · frame_ratio in the first chunk.

        Raises:
            ValueError: latents of another rank, size, dtype or device than the VAE or the chunks before; timesteps
                missing or not asked for; a VAE whose frame count does not follow the rule above. The state is then
                what it was.
        """
        self._check(latents, temb)
        latents = latents.to(self.vae.dtype)
        tiles = _tiles(self.vae, *latents.shape[-2:]) if self._decode in (_decode_wan, _decode_ltx2) else ()
        state = self._state
        if state.frames == 0:
            shape = (*latents.shape[:2], *latents.shape[3:])
            seed = int(torch.randint(2**62, ())) if _adds_noise(self.vae) else 0
            state = replace(state, shape=shape, dtype=self.vae.dtype, tiles=tiles, seed=seed)
        elif tiles != state.tiles:
            raise ValueError(f"the VAE's tiling changed within a film, from tiles {state.tiles} to {tiles}")
        # As in vae.decode: a VAE under model CPU offload is moved to its device now.
        frames: Tensor
        frames, memory = apply_forward_hook(self._decode)(self.vae, latents, temb, state)
        self._state = replace(state, frames=state.frames + latents.shape[2], memory=memory)
        return frames

    def _check(self, latents: Tensor, temb: Tensor | None) -> None:
        config, state = self.vae.config, self._state
        channels = config.get("latent_channels", config.get("z_dim"))
        checks.tensor("latents", latents, ("B", channels or "C", "T", "h", "w"))
        if 0 in latents.shape:
            raise ValueError(f"latents must be at least one frame, got {checks.shown(latents)}")
        if temb is None and config.get("timestep_conditioning", False):
            raise ValueError(f"this {type(self.vae).__name__} needs temb, (B,) timesteps, got None")
        if temb is not None:
            if not config.get("timestep_conditioning", False):
                raise ValueError(f"this {type(self.vae).__name__} takes no temb, got {checks.shown(temb)}")
            checks.tensor("temb", temb, (latents.shape[0],), device=latents.device)
        if state.frames == 0:
            return
        shape = (*latents.shape[:2], *latents.shape[3:])
        if shape != state.shape:
            raise ValueError(f"the film's latents are (B, C, h, w) = {state.shape}, got {shape}")
        if state.dtype != self.vae.dtype:
            raise ValueError(f"the film was decoded in {state.dtype} so far, the VAE is in {self.vae.dtype}")
        devices = {str(x.device) for x in state.memory} | {str(latents.device)}
        if len(devices) != 1:
            raise ValueError(f"latents and state must be on one device, got {sorted(devices)}")


def normalize_latents(vae: ModelMixin, latents: Tensor) -> Tensor:
    """(z - mean) · scaling_factor / std: latents (B, C, T, h, w) as the VAE encodes them, as a model is trained on.

    In float32 or wider, whatever comes in. Raises ValueError for a VAE that does not say how, or has other channels.
    """
    latents = latents.to(torch.promote_types(latents.dtype, torch.float32))
    mean, std = _statistics(vae, latents)
    return (latents - mean) / std


def denormalize_latents(vae: ModelMixin, latents: Tensor) -> Tensor:
    """z · std / scaling_factor + mean: the inverse of `normalize_latents`, for `StreamDecoder.decode`."""
    latents = latents.to(torch.promote_types(latents.dtype, torch.float32))
    mean, std = _statistics(vae, latents)
    return latents * std + mean


def latent_statistics(vae: ModelMixin) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel of a VAE's latents, float64 (C,), read as diffusers' pipelines read them:
    `latents_mean` and `latents_std` from the buffers (LTX) or the config (Wan), `scaling_factor` and `shift_factor`
    from the config. Raises ValueError for a VAE with neither, and for values that are not one finite number a channel,
    with deviations and a factor above 0."""
    values: dict[str, Any] = dict(vae.config)
    buffers = dict(vae.named_buffers(recurse=False))
    mean, std = (buffers.get(name, values.get(name)) for name in ("latents_mean", "latents_std"))
    factor = values.get("scaling_factor")
    if std is None and factor is None:
        raise ValueError(f"{type(vae).__name__} has neither latents_mean and latents_std nor a scaling_factor")
    channels = values.get("latent_channels") or values.get("z_dim")
    if channels is None:
        raise ValueError(f"{type(vae).__name__}: neither latent_channels nor z_dim is in its configuration")
    if mean is None or std is None:
        mean, std = [values.get("shift_factor") or 0.0] * channels, [1.0] * channels
    mean, std = (_numbers(vae, name, x, channels) for name, x in (("latents_mean", mean), ("latents_std", std)))
    scale = _numbers(vae, "scaling_factor", [1.0 if factor is None else factor], 1)
    if (std <= 0).any() or scale <= 0:
        raise ValueError(
            f"{type(vae).__name__}: latents_std and scaling_factor must be above 0, got {checks.shown(std.tolist())} "
            f"and {checks.shown(factor)}"
        )
    return mean, std / scale


def _numbers(vae: ModelMixin, name: str, numbers: Any, count: int) -> Tensor:
    """Numbers of a VAE's configuration, float64; ValueError unless they are so many, and finite."""
    try:
        found = torch.as_tensor(numbers, dtype=torch.float64).flatten()
    except (TypeError, ValueError, RuntimeError):
        found = torch.tensor([math.nan])
    if len(found) != count or not found.isfinite().all():
        shown = checks.shown(numbers.tolist() if isinstance(numbers, Tensor) else numbers)
        raise ValueError(f"{type(vae).__name__}: {name} must be {count} finite numbers, one a channel, got {shown}")
    return found


def _statistics(vae: ModelMixin, latents: Tensor) -> tuple[Tensor, Tensor]:
    """`latent_statistics` as (C, 1, 1, 1) beside latents; ValueError for latents that the VAE does not make."""
    mean, std = latent_statistics(vae)
    if latents.dim() != 5 or len(mean) != latents.shape[1]:
        raise ValueError(f"latents must be (B, {len(mean)}, T, h, w), got {tuple(latents.shape)}")
    return mean.to(latents).view(-1, 1, 1, 1), std.to(latents).view(-1, 1, 1, 1)


Decode = Callable[[Any, Tensor, Tensor | None, DecoderState], tuple[Tensor, Memory]]
"""(vae, latents, temb, state) to frames and the next state's memory."""


def _pick(vae: ModelMixin) -> Decode:
    if isinstance(vae, AutoencoderKLWan):
        return _decode_wan
    if isinstance(vae, AutoencoderKLLTX2Video) and vae.config.decoder_causal:
        return _decode_ltx2
    if isinstance(vae, AutoencoderDC):
        return _decode_images
    return _decode_overlapping


def _identity(vae: ModelMixin) -> str:
    """Class and configuration of a VAE, the same before and after it is saved."""
    config = {name: value for name, value in dict(vae.config).items() if not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()
    return f"{type(vae).__name__}:{digest[:16]}"


def _frame_ratio(vae: ModelMixin) -> int | None:
    """From the layers where they are known, since a config may leave out or misstate what follows from them."""
    if isinstance(vae, AutoencoderKLWan):
        return int(2 ** sum(isinstance(m, WanResample) and m.mode == "upsample3d" for m in vae.decoder.modules()))
    if isinstance(vae, AutoencoderKLLTX2Video):
        return int(math.prod(m.stride[0] for m in vae.decoder.modules() if isinstance(m, LTX2VideoUpsampler3d)))
    for values in (vars(vae), vae.config):
        for name in ("temporal_compression_ratio", "scale_factor_temporal"):
            if values.get(name) is not None:
                return int(values[name])
    return None


def _decode_images(vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState) -> tuple[Tensor, Memory]:
    """Each latent frame by itself, through an autoencoder of images."""
    images = vae.decode(latents.transpose(1, 2).flatten(0, 1), return_dict=False)[0]
    return images.unflatten(0, (latents.shape[0], -1)).transpose(1, 2), ()


def _decode_overlapping(vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState) -> tuple[Tensor, Memory]:
    """With the last latent frame of the chunk before, whose one video frame is dropped."""
    latents = torch.cat([*state.memory, latents], dim=2)
    arguments = (latents,) if temb is None else (latents, temb)
    frames = vae.decode(*arguments, return_dict=False)[0]
    later, ratio = latents.shape[2] - 1, _frame_ratio(vae)
    if ratio is None:
        ratio = (frames.shape[2] - 1) // max(later, 1)
    if frames.shape[2] != 1 + later * ratio:
        raise ValueError(
            f"a film is decoded in chunks by a VAE that gives 1 + (T - 1) · {ratio} frames for T latent frames, "
            f"{type(vae).__name__} gave {frames.shape[2]} for {1 + later}"
        )
    return frames[:, :, len(state.memory) :], (latents[:, :, -1:].clone(),)


def _decode_wan(vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState) -> tuple[Tensor, Memory]:
    frames, memory = _in_slices(_wan_frames, vae, latents, temb, state)
    if vae.config.patch_size is not None:
        frames = unpatchify(frames, patch_size=vae.config.patch_size)
    return frames.clamp(-1.0, 1.0), memory


def _wan_frames(vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState) -> tuple[Tensor, Memory]:
    """One latent frame at a time through Wan's feature cache, as in its own `_decode`.

    The cache is a list with a place for each causal convolution. After the first frame the temporal upsamplers have
    "Rep" there, no frame yet: an empty tensor in the memory.
    """
    cache: list[Any] = [None] * sum(isinstance(m, WanCausalConv3d) for m in vae.decoder.modules())
    cache[: len(state.memory)] = ["Rep" if x.numel() == 0 else x for x in state.memory]
    frames = []
    checks.suits("latents", latents, vae.post_quant_conv)
    for t, x in enumerate(vae.post_quant_conv(latents).split(1, dim=2)):
        place = [0]
        frames.append(vae.decoder(x, feat_cache=cache, feat_idx=place, first_chunk=state.frames + t == 0))
    nothing = latents.new_empty(latents.shape[0], 0, 0, 0, 0)
    memory = tuple(nothing if isinstance(x, str) else x for x in cache[: place[0]])
    return torch.cat(frames, dim=2), memory


def _decode_ltx2(vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState) -> tuple[Tensor, Memory]:
    return _in_slices(_ltx2_frames, vae, latents, temb, state)


def _ltx2_frames(vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState) -> tuple[Tensor, Memory]:
    """diffusers' own decoder, with convolutions and upsamplers that know the past. Everything else in it (norms over
    channels, convolutions of one frame, timestep conditioning, the patches) looks at each frame by itself."""
    past = _Past(state, latents.device if _adds_noise(vae) else None)
    decoder = vae.decoder._orig_mod if is_compiled_module(vae.decoder) else vae.decoder
    checks.suits("latents", latents, decoder.conv_in.conv)
    frames = _in_view_of(decoder, past)(latents, temb)
    return frames, tuple(past.next)


class _Past:
    """The frames before a chunk, in the order in which the convolutions of one pass ask for them."""

    def __init__(self, state: DecoderState, noise_device: torch.device | None) -> None:
        self.is_empty = state.frames == 0
        self.next: list[Tensor] = []
        self.generator = noise_device and torch.Generator(noise_device).manual_seed(state.seed)
        self._tails: Iterator[Tensor] = iter(state.memory)

    def prepend(self, x: Tensor, count: int) -> Tensor:
        """(B, C, T, h, w) to (B, C, count + T, h, w): the frames before x, at a film's beginning its first frame."""
        if count == 0:
            return x
        tail = x[:, :, :1].expand(-1, -1, count, -1, -1) if self.is_empty else next(self._tails)
        x = torch.cat([tail, x], dim=2)
        self.next.append(x[:, :, -count:].clone())  # a view would keep all of x
        return x


class _Convolution(LTX2VideoCausalConv3d):  # type: ignore[misc]
    past: _Past

    def forward(self, hidden_states: Tensor, causal: bool = True) -> Tensor:
        y: Tensor = self.conv(self.past.prepend(hidden_states, self.kernel_size[0] - 1))
        return y


class _Upsampler(LTX2VideoUpsampler3d):  # type: ignore[misc]
    past: _Past

    def forward(self, hidden_states: Tensor, causal: bool = True) -> Tensor:
        """The film's first frame becomes one frame, any other `stride[0]`; diffusers' forward takes the first frame
        of each call for the film's."""
        skipped = self.stride[0] - 1 if self.past.is_empty else 0
        upsampled = self._spread(self.conv(hidden_states))[:, :, skipped:]
        if self.residual:
            copies = math.prod(self.stride) // self.upscale_factor
            upsampled = upsampled + self._spread(hidden_states).repeat(1, copies, 1, 1, 1)[:, :, skipped:]
        return upsampled

    def _spread(self, x: Tensor) -> Tensor:
        """(B, C·s·s'·s'', T, h, w) to (B, C, T·s, h·s', w·s'')."""
        x = x.unflatten(1, (-1, *self.stride)).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


class _ResnetBlock(LTX2VideoResnetBlock3d):  # type: ignore[misc]
    past: _Past

    def forward(
        self, inputs: Tensor, temb: Tensor | None = None, generator: Any = None, causal: bool = True
    ) -> Tensor:
        """With `inject_noise`, all frames of a call get one picture of noise; here, all frames of the film."""
        y: Tensor = super().forward(inputs, temb, self.past.generator, causal)
        return y


KNOW_THE_PAST: dict[type[nn.Module], Any] = {
    LTX2VideoCausalConv3d: _Convolution,
    LTX2VideoUpsampler3d: _Upsampler,
    LTX2VideoResnetBlock3d: _ResnetBlock,
}


def _in_view_of(module: nn.Module, past: _Past) -> nn.Module:
    """The same tree of modules, for one pass, in which the three kinds above know the past.

    The modules that hold them are copied without their weights, and all others are the VAE's own: weights, adapters,
    quantised layers and hooks on layers stay where they are, and the VAE is not touched. A replaced `forward` of a
    copied module (an offloading hook, a compiled block) is the original's and is left out.
    """
    children = {name: child and _in_view_of(child, past) for name, child in module._modules.items()}
    kind = next((ours for theirs, ours in KNOW_THE_PAST.items() if isinstance(module, theirs)), None)
    if kind is None and all(children[name] is child for name, child in module._modules.items()):
        return module
    twin = copy.copy(module)
    twin.__dict__.pop("forward", None)
    twin.__dict__["_modules"] = children
    if kind is not None:
        twin.__class__ = kind
        twin.__dict__["past"] = past
    return twin


def _adds_noise(vae: ModelMixin) -> bool:
    return isinstance(vae, AutoencoderKLLTX2Video) and any(
        isinstance(m, LTX2VideoResnetBlock3d) and m.per_channel_scale1 is not None for m in vae.decoder.modules()
    )


def _in_slices(
    decode: Decode, vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState
) -> tuple[Tensor, Memory]:
    """Under `enable_slicing` one video of the batch after the other."""
    rows = latents.shape[0]
    if not vae.use_slicing or rows == 1:
        return _in_tiles(decode, vae, latents, temb, state)
    timesteps = [None] * rows if temb is None else temb.split(1)
    parts = zip(latents.split(1), timesteps, state.split(), strict=True)
    frames, memories = zip(*(_in_tiles(decode, vae, *part) for part in parts), strict=True)
    return torch.cat(frames), tuple(map(torch.cat, zip(*memories, strict=True)))


def _tiles(vae: Any, height: int, width: int) -> tuple[Tile, ...]:
    """The tiles of `vae.tiled_decode` in latents of a size, row by row; none where it would not be called."""
    ratio = vae.spatial_compression_ratio
    tall, wide = vae.tile_sample_min_height // ratio, vae.tile_sample_min_width // ratio
    if not vae.use_tiling or (height <= tall and width <= wide):
        return ()
    tops = range(0, height, vae.tile_sample_stride_height // ratio)
    lefts = range(0, width, vae.tile_sample_stride_width // ratio)
    return tuple((y, min(y + tall, height), x, min(x + wide, width)) for y in tops for x in lefts)


def _in_tiles(
    decode: Decode, vae: Any, latents: Tensor, temb: Tensor | None, state: DecoderState
) -> tuple[Tensor, Memory]:
    """Under `enable_tiling` tile by tile, each with a memory of its own, blended as in `vae.tiled_decode`."""
    if not state.tiles:
        return decode(vae, latents, temb, state)
    tiles, memories = [], []
    each = len(state.memory) // len(state.tiles)
    for index, (top, bottom, left, right) in enumerate(state.tiles):
        memory = state.memory[index * each : (index + 1) * each]
        tile, memory = decode(vae, latents[..., top:bottom, left:right], temb, replace(state, memory=memory))
        tiles.append(tile)
        memories.append(memory)
    columns = len({left for _, _, left, _ in state.tiles})
    grid = [tiles[first : first + columns] for first in range(0, len(tiles), columns)]
    top, bottom, left, right = state.tiles[0]
    scale = tiles[0].shape[-1] // (right - left)
    return _blend(vae, grid, latents.shape[-2] * scale, latents.shape[-1] * scale, scale), sum(memories, ())


def _blend(vae: Any, grid: list[list[Tensor]], height: int, width: int, scale: int) -> Tensor:
    """Overlapping tiles to frames (B, C, F, height, width), which the decoder gives at `scale` times the latents."""
    patch = vae.spatial_compression_ratio // scale  # Wan's pixels may still be in patches here
    high, wide = vae.tile_sample_stride_height // patch, vae.tile_sample_stride_width // patch
    rows = []
    for i, row in enumerate(grid):
        for j, tile in enumerate(row):  # both blends write into the tile, and the next one blends with that
            if i > 0:
                vae.blend_v(grid[i - 1][j], tile, vae.tile_sample_min_height // patch - high)
            if j > 0:
                vae.blend_h(row[j - 1], tile, vae.tile_sample_min_width // patch - wide)
        rows.append(torch.cat([tile[..., :high, :wide] for tile in row], dim=-1))
    return torch.cat(rows, dim=-2)[..., :height, :width]
