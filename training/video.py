"""Video files in and out, with PyAV alone: frames at the size and rate that a model wants, cut into shots and clips.

A video in memory is a uint8 tensor (T, H, W, 3), RGB. Whatever is wrong with a file is a `VideoError` that names it.

What a file says of itself is used: the time of each frame, its colour matrix and range, the shape of its pixels, how
the camera was held. What cannot be used as the file says it is a `VideoError` too.
"""

from __future__ import annotations

import errno
import math
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
import torch
from torch import Tensor

VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})

MP4_SUFFIXES = frozenset({".m4v", ".mov", ".mp4"})
FILM_SUFFIXES = MP4_SUFFIXES | {".avi", ".mkv"}
"""Containers that a film is written in: those that hold H.264."""

CONTAINERS = "mov,matroska,avi,mpeg,mpegts,mpegvideo,m4v,h264,hevc,flv,asf,ogg,nut,ivf,obu,wav"
"""FFmpeg's names of the containers that are opened. None of them points to other files, as a playlist does."""

LARGEST_GAP = 10.0
"""Seconds between two frames beyond which the timestamps of a file of variable rate are taken to be broken."""

LARGEST_CROP = 16
"""A picture is scaled to cover the size asked for and cropped. One of which less than a sixteenth would be left has a
shape, or a shape of its pixels, that is taken to be broken."""

# AVColorSpace to swscale's number for the same matrix; BT.470 BG, BT.601 and SMPTE 170M share one.
COLOUR_MATRICES = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9}
UNSPECIFIED_MATRIX, BT709, BT601 = 2, 1, 5
# SWS_AREA | SWS_ACCURATE_RND | SWS_FULL_CHR_H_INT: without the last two a colour is off by up to two levels.
AREA_AVERAGING = 0x20 | 0x40000 | 0x2000
LIMITED_RANGE, FULL_RANGE = 1, 2
# AVColorTransferCharacteristic of video that is brighter than a screen, which would have to be tone-mapped.
HDR_TRANSFERS = {16: "PQ", 18: "HLG"}

MOST_REORDERED = 32
"""Places by which the order of decoding and that of showing differ at most."""


class VideoError(ValueError):
    """A video file that cannot be used; the message names the file and the reason.

    `is_lasting` says whether the reason is the file's content, so that there is no use in trying again.
    """

    def __init__(self, message: str, *, is_lasting: bool = True) -> None:
        super().__init__(message)
        self.is_lasting = is_lasting


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
        for name in ("height", "width", "num_frames"):
            if getattr(self, name) is None:
                raise ValueError(f"{name} must be a whole number, got None")
        _check_options(**vars(self))


class CutDetector:
    """Says of each frame whether it begins a new shot, from the frames before it alone.

    A cut changes both the picture and its colours, and does so at once: the mean pixel difference and the moved share
    of an 8×8×8 colour histogram both pass a threshold, and the picture moves at least twice as much as it did one
    frame earlier, which fast motion does not. So a shot has at least two frames. Fades are not cuts and are not found.
    """

    size = (64, 36)  # width, height of the thumbnails compared

    def __init__(self, min_pixel_change: float = 0.1, min_colour_change: float = 0.2) -> None:
        self.min_pixel_change, self.min_colour_change = min_pixel_change, min_colour_change
        self._previous: np.ndarray | None = None
        self._last_change = math.inf

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
        # How a shot moves is not known at its first frame: the change at a cut does not say.
        self._last_change = math.inf if is_cut else change
        return bool(is_cut)

    @staticmethod
    def _histogram(thumbnail: np.ndarray) -> np.ndarray:
        r, g, b = (thumbnail.reshape(-1, 3).astype(np.int64) // 32).T
        return np.bincount(64 * r + 8 * g + b, minlength=512) / r.size


def video_fps(path: str | os.PathLike[str]) -> Fraction:
    """The file's average frame rate in frames a second: its header's, or its timestamps' where they say otherwise.

    Raises:
        VideoError: the file cannot be read, holds no video or says nothing of its rate.
    """
    return _read_timing(path).rate


def read_video(
    path: str | os.PathLike[str], height: int, width: int, *, num_frames: int | None = None, fps: float | None = None
) -> Tensor:
    """The first `num_frames` frames of a file (None: all of them), whatever its shots; see `iter_frames`.

    Returns:
        uint8 (T, height, width, 3).

    Raises:
        VideoError: as for `iter_frames`, or the file has fewer frames than asked for.
        ValueError: a size, count or rate that is not positive.
    """
    _check_options(num_frames=num_frames)
    frames = []
    for frame, _ in iter_frames(path, height, width, fps):
        frames.append(frame)
        if len(frames) == num_frames:
            break
    if not frames or (num_frames is not None and len(frames) < num_frames):
        raise VideoError(f"{printable(path)}: {len(frames)} frames, wanted {num_frames or 'at least 1'}")
    return torch.stack(frames)


def iter_clips(path: str | os.PathLike[str], spec: ClipSpec) -> Iterator[tuple[int, Tensor]]:
    """The clips of a file: (index of its first frame, uint8 (num_frames, height, width, 3)). None spans two shots.

    Frames are counted at `spec.fps`. One clip is held in memory at a time.

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

    A frame is upright, in square pixels, scaled to cover (height, width) and cropped at the centre.

    Real time is kept. With `fps`, each multiple of 1 / fps seconds takes the frame nearest to it: frames are dropped,
    and repeated where a file of variable rate is slow for a while. Without `fps`, a file of constant rate gives every
    frame, and one of variable rate is read at its average. Cuts are looked for in all frames of the file.

    Raises:
        VideoError: the file cannot be decoded, holds no video, is slower on average than `fps`, or says of itself what
            cannot be used: timestamps that go back or leap, colours that are not converted here (HDR, a matrix that
            swscale lacks), a picture at an odd angle, or one of which only a sliver would be left.
        ValueError: a size or rate that is not positive.
    """
    _check_options(height=height, width=width, fps=fps)
    timing = _read_timing(path)
    # A hundredth of slack, so that 29.97 frames a second pass for 30.
    if fps is not None and timing.rate < 0.99 * fps:
        raise VideoError(
            f"{printable(path)}: {float(timing.rate):g} frames a second, slower than the {fps:g} asked for"
        )
    frames = _decode(path, timing)
    if fps is not None or not timing.is_constant:
        frames = _at_rate(frames, float(fps or timing.rate), timing.last_duration)
    previous = picture = None
    for frame in frames:
        if frame.decoded is not previous:  # a repeated frame is scaled once
            previous, picture = frame.decoded, _cover(frame, height, width, path)
        yield picture, frame.begins_shot


class _Frame(NamedTuple):
    decoded: av.VideoFrame
    time: float  # seconds
    begins_shot: bool
    pixel_aspect: float  # width over height of a pixel


def _decode(path: str | os.PathLike[str], timing: _Timing) -> Iterator[_Frame]:
    is_cut = CutDetector()
    with _open(path) as container:
        stream = _video_stream(container, path)
        if stream.codec_context.color_trc in HDR_TRANSFERS:
            kind = HDR_TRANSFERS[stream.codec_context.color_trc]
            raise VideoError(f"{printable(path)}: HDR video ({kind}), which would have to be tone-mapped first")
        pixel_aspect = float(stream.sample_aspect_ratio or 1)
        for index, frame in enumerate(container.decode(stream)):
            if frame.is_corrupt:
                raise VideoError(f"{printable(path)}: frame {index} is corrupt")
            begins_shot = is_cut(_to_rgb(frame, *CutDetector.size, path))
            yield _Frame(frame, timing.time_of(index, frame), begins_shot, pixel_aspect)


def _at_rate(frames: Iterator[_Frame], fps: float, last_duration: float) -> Iterator[_Frame]:
    """The frame nearest to each multiple of 1 / fps seconds from the first frame on."""
    count, begins_shot = 0, False
    newest: _Frame | None = None  # how long it is the nearest is known when the next one is
    start = 0.0
    for frame in frames:
        if newest is None:
            start = frame.time
        else:  # up to the middle between two frames the earlier one is the nearer
            middle = (newest.time + frame.time) / 2 - start
            while count <= middle * fps + 1e-6:
                yield newest._replace(begins_shot=begins_shot)
                count, begins_shot = count + 1, False
        newest, begins_shot = frame, begins_shot or frame.begins_shot
    if newest is not None:
        end = newest.time + last_duration - start
        while count < math.floor(end * fps + 0.5 + 1e-6):
            yield newest._replace(begins_shot=begins_shot)
            count, begins_shot = count + 1, False


@dataclass(frozen=True)
class _Timing:
    """When a file's frames are shown: their rate in frames a second, and their timestamps in seconds, sorted."""

    rate: Fraction
    is_constant: bool
    times: np.ndarray
    last_duration: float
    is_stamped: bool  # a decoded frame has the time at which it is shown

    def time_of(self, index: int, frame: av.VideoFrame) -> float:
        """The time of the `index`th decoded frame."""
        if self.is_stamped and frame.time is not None:
            return float(frame.time)
        return float(self.times[index]) if index < len(self.times) else index / float(self.rate)


def _read_timing(path: str | os.PathLike[str]) -> _Timing:
    """The timestamps of a file's video, read without decoding it."""
    stamps = []
    with _open(path) as container:
        stream = _video_stream(container, path)
        header_rate = stream.average_rate or stream.guessed_rate
        # AVI stores frames in the order of decoding and only that order's times.
        is_stamped = container.format.name != "avi"
        for packet in container.demux(stream):
            stamp = packet.dts if packet.pts is None else packet.pts
            if packet.size and stamp is not None and not packet.is_discard:
                stamps.append(float(stamp * packet.time_base))

    order = np.argsort(stamps, kind="stable")
    times = np.array(stamps, dtype=np.float64)[order]
    span = float(times[-1] - times[0]) if len(times) else 0.0
    if span <= 0:
        if not header_rate:
            raise VideoError(f"{printable(path)}: has no frame rate")
        return _Timing(Fraction(header_rate), True, times, 1 / float(header_rate), False)
    # Decoding reorders frames a little; a stream whose clock starts anew reorders them by more.
    if np.abs(order - np.arange(len(order))).max() > MOST_REORDERED:
        raise VideoError(f"{printable(path)}: its timestamps go back")
    intervals = len(times) - 1
    rate = Fraction(intervals / span).limit_denominator(1_000_000)
    if header_rate and abs(float(header_rate) * span - intervals) <= max(0.25, 0.01 * intervals):
        rate = Fraction(header_rate)
    even = times[0] + span / intervals * np.arange(len(times))
    is_constant = bool(np.abs(times - even).max() < 0.5 * span / intervals)
    if not is_constant and np.diff(times).max() > LARGEST_GAP:
        raise VideoError(f"{printable(path)}: its timestamps leap by {np.diff(times).max():.0f} s")
    # A last frame is taken to last as long as the one before it: the duration that it is given is often a default.
    last_duration = min(float(times[-1] - times[-2]), LARGEST_GAP)
    return _Timing(rate, is_constant, times, last_duration, is_stamped)


class VideoWriter:
    """A film that is written frame by frame: H.264 in 4:2:0, which every player shows, in the container that the
    file's name says.

    Colours are BT.709 in limited range, and the file says so. The file begins with the first frame. Leaving the `with`
    finishes it, for whatever reason; up to half a second before the end, it is playable at any time, even if the
    process is killed.

    Args:
        fps: frames a second.
        crf: x264's constant rate factor: 0 is near lossless, 23 its default, larger is smaller.

    Attributes:
        num_frames: frames written so far.

    Raises:
        ValueError: a name that says no container of `FILM_SUFFIXES`, fps not positive; at the first frame, a file
            that cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], fps: float | Fraction, *, crf: int = 16) -> None:
        _check_options(fps=fps)
        self.path, self.crf, self.num_frames = Path(path), crf, 0
        if self.path.suffix.lower() not in FILM_SUFFIXES:
            raise ValueError(
                f"{printable(path)}: a film's name must end in {', '.join(sorted(FILM_SUFFIXES))}, "
                f"got {self.path.suffix!r}"
            )
        # Broadcast rates are multiples of 1/1001: 29.97 becomes 30000/1001 and whole numbers stay whole.
        self.fps = Fraction(fps).limit_denominator(1001)
        self._container: av.container.OutputContainer | None = None

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, video: Tensor) -> None:
        """The next frames, uint8 (T, H, W, 3).

        Raises:
            ValueError: another shape or dtype, a size that is odd (4:2:0 halves both) or not that of the first frames.
        """
        if video.dtype != torch.uint8 or video.ndim != 4 or video.shape[-1] != 3:
            raise ValueError(f"video must be uint8 (T, H, W, 3), got {video.dtype} {tuple(video.shape)}")
        height, width = video.shape[1:3]
        if height % 2 or width % 2:
            raise ValueError(f"height and width must be even, got {height} × {width}")
        if self._container is None and len(video):
            self._begin(height, width)
        for pixels in video.cpu().numpy():
            if pixels.shape[:2] != (self._stream.height, self._stream.width):
                raise ValueError(
                    f"all frames must be of the size of the first, {self._stream.height} × {self._stream.width}, "
                    f"got {height} × {width}"
                )
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(
                format="yuv420p",
                interpolation=AREA_AVERAGING,
                src_colorspace=BT709,
                dst_colorspace=BT709,
                src_color_range=FULL_RANGE,
                dst_color_range=LIMITED_RANGE,
            )
            self._mux(frame)
            self.num_frames += 1

    def close(self) -> None:
        """Finish the file. Nothing happens where no frame was written."""
        if self._container is not None:
            self._mux(None)
            self._container.close()
            self._container = None

    def _begin(self, height: int, width: int) -> None:
        options = {"flush_packets": "1", "cluster_time_limit": "500"}  # milliseconds, of Matroska
        if self.path.suffix.lower() in MP4_SUFFIXES:
            # Fragments while it is written, an ordinary file once it is finished.
            options |= {"movflags": "hybrid_fragmented", "frag_duration": "500000"}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._container = av.open(f"file:{self.path}", mode="w", container_options=options)
        except (av.error.FFmpegError, OSError) as error:
            raise VideoError(f"{printable(self.path)}: cannot be written ({error.strerror})") from error
        self._stream = self._container.add_stream("libx264", rate=self.fps)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, "yuv420p"
        # No frame waits in the encoder for later ones.
        self._stream.options = {"crf": str(self.crf), "tune": "zerolatency"}
        colours = self._stream.codec_context
        colours.colorspace = colours.color_primaries = colours.color_trc = BT709
        colours.color_range = LIMITED_RANGE

    def _mux(self, frame: av.VideoFrame | None) -> None:
        assert self._container is not None
        try:
            self._container.mux(self._stream.encode(frame))
        except (av.error.FFmpegError, OSError) as error:  # such as a full disk
            raise VideoError(f"{printable(self.path)}: cannot be written ({error.strerror})") from error


def write_video(path: str | os.PathLike[str], video: Tensor, fps: float | Fraction, *, crf: int = 16) -> None:
    """Writes a whole video, uint8 (T, H, W, 3), as `VideoWriter` does.

    Raises:
        ValueError: as `VideoWriter`, and for a video without a frame.
    """
    if video.ndim != 4 or len(video) == 0:
        raise ValueError(f"video must be uint8 (T, H, W, 3) with T >= 1, got {video.dtype} {tuple(video.shape)}")
    with VideoWriter(path, fps, crf=crf) as film:
        film.write(video)


def printable(path: str | os.PathLike[str]) -> str:
    """A path as text that can be logged and stored: bytes of a file name that are no UTF-8 are written as \\xNN."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _check_options(**options: float | None) -> None:
    """Raises ValueError for what is given and not positive, or, but for fps, no whole number."""
    for name, value in options.items():
        if value is None:
            continue
        is_number = isinstance(value, (int, float, Fraction)) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (name != "fps" and not isinstance(value, int)):
            raise ValueError(f"{name} must be a {'finite' if name == 'fps' else 'whole'} number, got {value!r}")
        if value <= 0:
            raise ValueError(f"{name} must be positive, got {value}")


@contextmanager
def _open(path: str | os.PathLike[str]) -> Iterator[av.container.InputContainer]:
    """A file's container. Whatever goes wrong while it is open is a VideoError."""
    try:
        with av.open(
            # The prefix keeps a name such as concat:a.mp4 a file name.
            f"file:{os.fspath(path)}",
            # A text such as the title may be in any encoding, and is not used.
            metadata_errors="replace",
            # Not `options`, which go to the streams too: PyAV below 17.1 crashes there on an MPEG programme stream.
            container_options={"format_whitelist": CONTAINERS, "protocol_whitelist": "file"},
        ) as container:
            yield container
    except VideoError:
        raise
    except (av.error.FFmpegError, OSError, ValueError, ArithmeticError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        number = getattr(error, "errno", None)
        if number == errno.EINVAL:
            reason += "; a container that is not opened here, such as a playlist, says this too"
        # FFmpeg's own numbers tell of the content; the system's, of a disk or a permission.
        is_lasting = number == errno.EINVAL or number not in errno.errorcode and not isinstance(error, MemoryError)
        raise VideoError(f"{printable(path)}: cannot be read as a video ({reason})", is_lasting=is_lasting) from error


def _video_stream(container: av.container.InputContainer, path: str | os.PathLike[str]) -> av.video.stream.VideoStream:
    """The stream that a player shows; a cover picture is none."""
    streams = [s for s in container.streams.video if not s.disposition & av.stream.Disposition.attached_pic]
    if not streams:
        raise VideoError(f"{printable(path)}: holds no video stream")
    best = container.streams.best("video")
    return best if best in streams else streams[0]


def _cover(frame: _Frame, height: int, width: int, path: str | os.PathLike[str]) -> Tensor:
    """A frame upright and in square pixels, scaled to cover (height, width) and cropped at the centre."""
    decoded = frame.decoded
    is_transposed, flipped_axes = _orientation(decoded, path)
    if is_transposed:  # a phone held upright writes its frames lying down
        height, width = width, height
    shown_width = decoded.width * frame.pixel_aspect
    scale = max(height / decoded.height, width / shown_width) if shown_width > 0 else math.inf
    if scale**2 * decoded.height * shown_width > LARGEST_CROP * height * width:
        raise VideoError(
            f"{printable(path)}: {decoded.width} × {decoded.height} pixels, each {frame.pixel_aspect:g} times as wide "
            f"as high; of that, {width} × {height} would show a sliver"
        )
    scaled_height, scaled_width = max(height, round(decoded.height * scale)), max(width, round(shown_width * scale))
    top, left = (scaled_height - height) // 2, (scaled_width - width) // 2
    picture = _to_rgb(decoded, scaled_width, scaled_height, path)[top : top + height, left : left + width]
    if is_transposed:
        picture = picture.swapaxes(0, 1)
    return torch.from_numpy(np.ascontiguousarray(np.flip(picture, flipped_axes)))


def _orientation(frame: av.VideoFrame, path: str | os.PathLike[str]) -> tuple[bool, tuple[int, ...]]:
    """How a stored picture becomes upright: whether rows and columns change places, and then which of them are
    mirrored.

    FFmpeg's display matrix, nine int32, takes a point (p right, q down) to (a·p + c·q, b·p + d·q).
    """
    matrix = frame.side_data.get("DISPLAYMATRIX")
    if matrix is None:
        return False, ()
    a, b, _, c, d = struct.unpack("=5i", bytes(matrix)[:20])
    straight, crossed = min(abs(a), abs(d)), min(abs(b), abs(c))
    # What is not a quarter turn or a mirror image has all four entries.
    if max(abs(b), abs(c)) < 0.01 * straight:
        return False, tuple(axis for axis, entry in ((0, d), (1, a)) if entry < 0)
    if max(abs(a), abs(d)) < 0.01 * crossed:
        return True, tuple(axis for axis, entry in ((0, b), (1, c)) if entry < 0)
    raise VideoError(f"{printable(path)}: its picture is to be turned by an odd angle, matrix {a, b, c, d}")


def _to_rgb(frame: av.VideoFrame, width: int, height: int, path: str | os.PathLike[str]) -> np.ndarray:
    """A frame as uint8 (height, width, 3), by the matrix and range that it says it has."""
    matrix, color_range = _colours(frame, path)
    # PyAV below 17 ignores both where source and destination name the same matrix; RGB, which has none, needs that.
    other = BT601 if matrix == BT709 else BT709
    rgb = frame.reformat(
        width=width,
        height=height,
        format="rgb24",
        interpolation=AREA_AVERAGING,
        src_colorspace=BT709 if matrix is None else matrix,
        dst_colorspace=BT709 if matrix is None else other,
        src_color_range=color_range,
        dst_color_range=FULL_RANGE,
    )
    return rgb.to_ndarray()


def _colours(frame: av.VideoFrame, path: str | os.PathLike[str]) -> tuple[int | None, int]:
    """swscale's number of the matrix by which a frame's colours are coded (None: RGB or grey), and their range."""
    name = frame.format.name
    if frame.format.is_rgb or name.startswith("gray"):
        return None, FULL_RANGE
    said = frame.color_range in (LIMITED_RANGE, FULL_RANGE)
    color_range = frame.color_range if said else FULL_RANGE if name.startswith("yuvj") else LIMITED_RANGE
    if frame.colorspace == UNSPECIFIED_MATRIX:  # by size, as players do
        return BT709 if frame.width >= 1280 or frame.height > 576 else BT601, color_range
    if frame.colorspace not in COLOUR_MATRICES:
        raise VideoError(f"{printable(path)}: colours coded by matrix {frame.colorspace} of ISO/IEC 23091-2")
    return COLOUR_MATRICES[frame.colorspace], color_range
