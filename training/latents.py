"""Between video and latents: Haar wavelets that need no weights, or a diffusers VAE.

Latents here are always normalised, as the model sees them: `encode` and `decode` hold the scaling. A codec is
described by a JSON-able dict, kept with the latents it made and beside the model trained on them; `load_codec` builds
it again.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import init_empty_weights
from diffusers import AutoModel
from diffusers.models.autoencoders.autoencoder_kl_cosmos import CosmosPatchEmbed3d, CosmosUnpatcher3d
from torch import Tensor, nn

from frame_gdn import checks
from frame_gdn.decoding import denormalize_latents, latent_statistics, normalize_latents, stream_decoder
from training.pretrained import load_safely, local_folder, weights_digest


class Codec(Protocol):
    """Video to latents and back: the first latent frame is one video frame, each later one `frame_ratio` of them."""

    channels: int
    frame_ratio: int
    size_ratio: int

    def encode(self, video: Tensor) -> Tensor:
        """uint8 (..., T, H, W, 3) to float32 (..., C, t, h, w) with t = 1 + (T - 1) / frame_ratio."""

    def decode(self, latents: Tensor) -> Tensor:
        """(..., C, t, h, w) of any float dtype to uint8 (..., T, H, W, 3)."""

    def decode_stream(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """A film that is decoded as it is made: its latents (C, t, h, w) chunk by chunk to uint8 (T, H, W, 3) of each.

        Together they are what `decode` makes of all chunks at once.
        """

    def describe(self) -> dict[str, Any]:
        """What `load_codec` needs to build this codec again."""


def load_codec(description: Mapping[str, Any], device: torch.device | str = "cpu") -> Codec:
    """The codec that `describe` described. Raises ValueError for a kind that does not exist."""
    match description:
        case {"kind": "haar", "scale": scale}:
            return HaarCodec(scale, device=device)
        case {"kind": "vae", "pretrained_model_name_or_path": name, "subfolder": subfolder}:
            return VaeCodec(name, subfolder=subfolder, device=device)
    raise ValueError(f"a codec is of kind 'haar' or 'vae', got {dict(description)}")


def latent_shape(codec: Codec, num_frames: int, height: int, width: int) -> tuple[int, int, int, int]:
    """(C, t, h, w) of a clip's latents. Raises ValueError where the codec cannot take the clip whole."""
    check_clip(codec.frame_ratio, codec.size_ratio, num_frames, height, width)
    frames = 1 + (num_frames - 1) // codec.frame_ratio
    return codec.channels, frames, height // codec.size_ratio, width // codec.size_ratio


def check_clip(frame_ratio: int, size_ratio: int, num_frames: int, height: int, width: int) -> None:
    """Raises ValueError for a clip of which a codec with these ratios would leave something out."""
    if num_frames < 1 or (num_frames - 1) % frame_ratio:
        raise ValueError(f"num_frames must be 1 + {frame_ratio}·k, got {num_frames}")
    if height % size_ratio or width % size_ratio:
        raise ValueError(f"height and width must be multiples of {size_ratio}, got {height} × {width}")


class HaarCodec:
    """Three-dimensional Haar wavelets (diffusers' Cosmos patcher, 4×4×4): exact to the byte, no weights.

    Coefficients are averages and averaged differences of pixels in −1…1. One scale for all 192 channels keeps their
    proportions: normalised one by one, the loss would sit in channels that carry no picture.

    Args:
        scale: coefficients are divided by it; 0.43 is about the standard deviation of pixels, so that the three
            channels of averages are near one.

    Raises:
        ValueError: a scale that is not a finite number above 0.
    """

    channels, frame_ratio, size_ratio = 192, 4, 4

    def __init__(self, scale: float = 0.43, *, device: torch.device | str = "cpu") -> None:
        checks.number("scale", scale, 0, above=True)
        self.scale = scale
        self.patch = CosmosPatchEmbed3d(4, "haar").to(device)
        self.unpatch = CosmosUnpatcher3d(4, "haar").to(device)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        pixels = _to_pixels(video, self, self.patch.wavelets.device)
        return _unflatten(self.patch(pixels) / self.scale, video.shape[:-4])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        coefficients = latents.to(self.patch.wavelets).reshape(-1, *latents.shape[-4:]) * self.scale
        return _to_video(self.unpatch(coefficients), latents.shape[:-4])

    def decode_stream(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        for number, chunk in enumerate(chunks):
            # The first latent frame of a call is one video frame only: put another one before it.
            yield self.decode(chunk) if number == 0 else self.decode(torch.cat([chunk[:, :1], chunk], 1))[1:]

    def describe(self) -> dict[str, Any]:
        return {"kind": "haar", "scale": self.scale}


class VaeCodec:
    """A video VAE of diffusers, given by local path or hub name; its class is read from its config.

    The mean of its posterior is taken, not a sample, so that a clip has one encoding. Means and deviations are
    applied in float32 whatever `dtype` the VAE runs in.

    Raises:
        ValueError: no VAE there, or one whose config does not say how its latents are normalised, or how much it
            compresses.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        *,
        subfolder: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.source = self.identify(pretrained_model_name_or_path, subfolder=subfolder, dtype=dtype)
        folder = _vae_folder(pretrained_model_name_or_path, subfolder)
        vae = load_safely(type(_without_weights(folder)), folder, None, torch_dtype=dtype)
        self.vae = vae.eval().requires_grad_(False).to(device)
        self.mean, self.std = (x.tolist() for x in latent_statistics(self.vae))
        self.channels = len(self.mean)
        self.frame_ratio, self.size_ratio = _ratios(self.vae)

    @staticmethod
    def identify(
        pretrained_model_name_or_path: str, *, subfolder: str | None = None, dtype: torch.dtype = torch.float32
    ) -> dict[str, Any]:
        """What `describe` says of a VAE that is not loaded: all but how its latents are normalised."""
        return {
            "kind": "vae",
            "pretrained_model_name_or_path": pretrained_model_name_or_path,
            "subfolder": subfolder,
            "weights": weights_digest(_vae_folder(pretrained_model_name_or_path, subfolder)),
            "dtype": str(dtype),
        }

    @staticmethod
    def check_clip(
        pretrained_model_name_or_path: str, num_frames: int, height: int, width: int, *, subfolder: str | None = None
    ) -> None:
        """Raises ValueError for a clip of which the VAE would leave something out; its weights are not loaded."""
        folder = _vae_folder(pretrained_model_name_or_path, subfolder)
        check_clip(*_ratios(_without_weights(folder)), num_frames, height, width)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        encoded = self.vae.encode(_to_pixels(video, self, self.vae.device).to(self.vae.dtype))
        latents = encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latent
        return _unflatten(normalize_latents(self.vae, latents), video.shape[:-4])

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        flat = latents.to(self.vae.device, torch.float32).reshape(-1, *latents.shape[-4:])
        pixels = self.vae.decode(denormalize_latents(self.vae, flat).to(self.vae.dtype)).sample
        return _to_video(pixels.float(), latents.shape[:-4])

    @torch.no_grad()
    def decode_stream(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Exact for a causal VAE, else as `frame_gdn.decoding.stream_decoder` says."""
        decoder = stream_decoder(self.vae)
        for chunk in chunks:
            latents = denormalize_latents(self.vae, chunk[None].to(self.vae.device, torch.float32))
            pixels = decoder.decode(latents.to(self.vae.dtype))
            yield _to_video(pixels.float(), torch.Size())

    def describe(self) -> dict[str, Any]:
        return {**self.source, "mean": self.mean, "std": self.std}


def _vae_folder(name_or_path: str, subfolder: str | None) -> Path:
    folder = local_folder(name_or_path, f"{subfolder}/*" if subfolder else "*") / (subfolder or "")
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no VAE: there is no config.json")
    return folder


def _without_weights(folder: Path) -> nn.Module:
    """The VAE of a folder, of whose weights nothing but the shapes are known."""
    try:
        with init_empty_weights():
            vae: nn.Module = AutoModel.from_config(str(folder))
    except Exception as error:  # diffusers' own are of many classes
        raise ValueError(f"{folder} holds no VAE that can be built: {error}") from error
    return vae


def _ratios(vae: nn.Module) -> tuple[int, int]:
    """By how much a VAE compresses time and space."""

    def ratio(*names: str) -> int:
        value = _first(*map(vae.config.get, names), *map(vars(vae).get, names))
        if value is None:
            raise ValueError(f"{type(vae).__name__} does not say its {' or '.join(names)}")
        return int(value)

    return (
        ratio("temporal_compression_ratio", "scale_factor_temporal"),
        ratio("spatial_compression_ratio", "scale_factor_spatial"),
    )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _to_pixels(video: Tensor, codec: Codec, device: torch.device) -> Tensor:
    """uint8 (..., T, H, W, 3) to float32 (B, 3, T, H, W) in −1…1."""
    if video.dtype != torch.uint8 or video.ndim < 4 or video.shape[-1] != 3:
        raise ValueError(f"video must be uint8 (..., T, H, W, 3), got {video.dtype} {tuple(video.shape)}")
    latent_shape(codec, *video.shape[-4:-1])
    return video.to(device).reshape(-1, *video.shape[-4:]).permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def _to_video(pixels: Tensor, batch: torch.Size) -> Tensor:
    """(B, 3, T, H, W) in −1…1 to uint8 (*batch, T, H, W, 3)."""
    levels = ((pixels + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return _unflatten(levels.permute(0, 2, 3, 4, 1).contiguous(), batch)


def _unflatten(x: Tensor, batch: torch.Size) -> Tensor:
    return x.reshape(*batch, *x.shape[1:])
