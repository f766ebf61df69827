"""Video files in and out, with PyAV alone: frames at the size and rate that a model wants, cut into shots and clips.

A video in memory is a uint8 tensor (T, H, W, 3), RGB. Whatever is wrong with a file is a `VideoError` that names it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import torch
from torch import Tensor

VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})


class VideoError(ValueError):
    """A video file that cannot be used; the message names the file and the reason."""


@dataclass(frozen=True)
class ClipSpec:
    """What a clip is: `num_frames` frames of `height` × `width` at `fps` (None: each file's own rate), a new one every
    `stride` frames of a shot (None: every `num_frames`, so that clips do not overlap)."""

    height: int
    width: int
    num_frames: int
    stride: int | None = None
    fps: float | None = None

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_frames", "stride", "fps"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")


class CutDetector:
    """Says of each frame whether it begins a new shot, from the frames before it alone.

    A cut changes both the picture and its colours, and does so at once: the mean pixel difference and the moved share
    of an 8×8×8 colour histogram both pass a threshold, and the picture moves at least twice as much as it did one
    frame earlier, which fast motion does not. Fades are not cuts and are not found.
    """

    size = (64, 36)  # width, height of the thumbnails compared

    def __init__(self, min_pixel_change: float = 0.1, min_colour_change: float = 0.2) -> None:
        self.min_pixel_change, self.min_colour_change = min_pixel_change, min_colour_change
        self._previous: np.ndarray | None = None
        self._last_change = 0.0

    def __call__(self, thumbnail: np.ndarray) -> bool:
        """thumbnail: uint8 (36, 64, 3). The first frame begins the first shot."""
        previous, self._previous = self._previous, thumbnail
        if previous is None:
            return True
        change = float(np.abs(thumbnail.astype(np.int16) - previous).mean() / 255)
        is_cut = (
            change > self.min_pixel_change
            and change > 2 * self._last_change
            and 0.5 * np.abs(self._histogram(thumbnail) - self._histogram(previous)).sum() > self.min_colour_change
        )
        # The change at a cut says nothing about how the new shot moves.
        self._last_change = 0.0 if is_cut else change
        return bool(is_cut)

    @staticmethod
    def _histogram(thumbnail: np.ndarray) -> np.ndarray:
        r, g, b = (thumbnail.reshape(-1, 3).astype(np.int64) // 32).T
        return np.bincount(64 * r + 8 * g + b, minlength=512) / r.size


def video_fps(path: str | os.PathLike[str]) -> Fraction:
    """The file's average frame rate, in frames a second."""
    try:
        with av.open(os.fspath(path)) as container:
            return _rate(_video_stream(container, path), path)
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"{path}: cannot be read as a video ({error.strerror})") from error


def read_video(
    path: str | os.PathLike[str], height: int, width: int, *, num_frames: int | None = None, fps: float | None = None
) -> Tensor:
    """The first `num_frames` frames of a file (None: all of them), whatever its shots.

    Frames are scaled to cover (height, width) and cropped at the centre; `fps` drops frames to that rate.

    Returns:
        uint8 (T, height, width, 3).

    Raises:
        VideoError: the file cannot be decoded, holds no video, has fewer frames than asked for, or is slower than
            `fps`.
    """
    frames = []
    for frame, _ in iter_frames(path, height, width, fps):
        frames.append(frame)
        if len(frames) == num_frames:
            break
    if not frames or (num_frames is not None and len(frames) < num_frames):
        raise VideoError(f"{path}: {len(frames)} frames, wanted {num_frames or 'at least 1'}")
    return torch.stack(frames)


def iter_clips(path: str | os.PathLike[str], spec: ClipSpec) -> Iterator[tuple[int, Tensor]]:
    """The clips of a file: (index of its first frame, uint8 (num_frames, height, width, 3)). None spans two shots.

    Frames are counted after `spec.fps` has dropped some. One clip is held in memory at a time.

    Raises:
        VideoError: as for `read_video`; a file too short for any clip yields none instead.
    """
    stride = spec.stride or spec.num_frames
    frames: list[Tensor] = []
    start = 0
    for index, (frame, begins_shot) in enumerate(iter_frames(path, spec.height, spec.width, spec.fps)):
        if begins_shot:
            frames, start = [], index
        if index >= start:  # with a stride longer than a clip, the frames between two clips are passed over
            frames.append(frame)
        if len(frames) == spec.num_frames:
            yield start, torch.stack(frames)
            frames, start = frames[stride:], start + stride


def find_shots(path: str | os.PathLike[str]) -> list[tuple[int, int]]:
    """The file's shots as (first frame, one past the last frame)."""
    begins = [begins_shot for _, begins_shot in iter_frames(path, *reversed(CutDetector.size))]
    starts = [index for index, begins_shot in enumerate(begins) if begins_shot]
    return list(zip(starts, [*starts[1:], len(begins)], strict=True))


def iter_frames(
    path: str | os.PathLike[str], height: int, width: int, fps: float | None = None
) -> Iterator[tuple[Tensor, bool]]:
    """Every frame of a file as (uint8 (height, width, 3), whether it begins a shot), decoded one at a time.

    Cuts are looked for at the file's own rate, before `fps` drops frames.

    Raises:
        VideoError: the file cannot be decoded, holds no video, or is slower than `fps`.
    """
    is_cut = CutDetector()
    try:
        with av.open(os.fspath(path)) as container:
            stream = _video_stream(container, path)
            rate = _rate(stream, path)
            # A hundredth of slack, so that 29.97 frames a second pass for 30.
            if fps is not None and rate < 0.99 * fps:
                raise VideoError(f"{path}: {float(rate):g} frames a second, slower than the {fps:g} asked for")
            pixel_aspect = float(stream.sample_aspect_ratio or 1)
            first_time, last_slot, begins_shot = None, -1, False
            for index, frame in enumerate(container.decode(stream)):
                if frame.is_corrupt:
                    raise VideoError(f"{path}: frame {index} is corrupt")
                begins_shot |= is_cut(_to_rgb(frame, *CutDetector.size))
                time = float(index / rate) if frame.time is None else frame.time
                first_time = time if first_time is None else first_time
                if fps is not None:
                    # Time is cut into slots of 1 / fps; the frame nearest to a slot's start is the one kept of it.
                    slot = int((time - first_time + 0.5 / float(rate)) * fps + 1e-6)
                    if slot <= last_slot:
                        continue
                    last_slot = slot
                yield torch.from_numpy(_cover(frame, height, width, pixel_aspect)), begins_shot
                begins_shot = False
    except (av.error.FFmpegError, OSError) as error:
        raise VideoError(f"{path}: cannot be read as a video ({error.strerror})") from error


def write_video(path: str | os.PathLike[str], video: Tensor, fps: float | Fraction, *, crf: int = 16) -> None:
    """Writes uint8 (T, H, W, 3) as H.264 in 4:2:0, which every player shows; the container is the file name's.

    `crf` is x264's constant rate factor: 0 is near lossless, 23 its default, larger is smaller.

    Raises:
        ValueError: another shape or dtype, no frame, an odd height or width (4:2:0 halves both), fps not positive.
    """
    if video.dtype != torch.uint8 or video.ndim != 4 or video.shape[-1] != 3 or len(video) == 0:
        raise ValueError(f"video must be uint8 (T, H, W, 3) with T >= 1, got {video.dtype} {tuple(video.shape)}")
    if video.shape[1] % 2 or video.shape[2] % 2:
        raise ValueError(f"height and width must be even, got {video.shape[1]} × {video.shape[2]}")
    if fps <= 0:
        raise ValueError(f"fps must be positive, got {fps}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with av.open(os.fspath(path), mode="w") as container:
        # Broadcast rates are multiples of 1/1001: 29.97 becomes 30000/1001 and whole numbers stay whole.
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = video.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": str(crf)}
        for frame in video.cpu().numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def _video_stream(container: av.container.InputContainer, path: str | os.PathLike[str]) -> av.video.stream.VideoStream:
    if not container.streams.video:
        raise VideoError(f"{path}: holds no video stream")
    return container.streams.video[0]


def _rate(stream: av.video.stream.VideoStream, path: str | os.PathLike[str]) -> Fraction:
    rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise VideoError(f"{path}: has no frame rate")
    return Fraction(rate)


def _cover(frame: av.VideoFrame, height: int, width: int, pixel_aspect: float) -> np.ndarray:
    """A frame upright and in square pixels, scaled to cover (height, width) and cropped at the centre."""
    turned = frame.rotation % 180 != 0  # a phone held upright writes its frames lying down
    if turned:
        height, width = width, height
    shown_width = frame.width * pixel_aspect
    scale = max(height / frame.height, width / shown_width)
    scaled_height, scaled_width = max(height, round(frame.height * scale)), max(width, round(shown_width * scale))
    top, left = (scaled_height - height) // 2, (scaled_width - width) // 2
    picture = _to_rgb(frame, scaled_width, scaled_height)[top : top + height, left : left + width]
    return np.ascontiguousarray(np.rot90(picture, k=frame.rotation // 90))


def _to_rgb(frame: av.VideoFrame, width: int, height: int) -> np.ndarray:
    return frame.reformat(width=width, height=height, format="rgb24", interpolation="AREA").to_ndarray()
