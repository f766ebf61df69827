import os
import struct
import wave
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from training.data import demo_clips
from training.video import ClipSpec, VideoError, find_shots, iter_clips, read_video, video_fps, write_video

BUNNY, BIKES, CARPHONE = demo_clips()


def striped(num_frames: int, height: int, width: int) -> torch.Tensor:
    """A video whose left half is red and whose right half is blue; brightness tells the frame."""
    video = torch.zeros(num_frames, height, width, 3, dtype=torch.uint8)
    level = torch.linspace(60, 250, num_frames).to(torch.uint8).view(-1, 1, 1)
    video[:, :, : width // 2, 0] = level
    video[:, :, width // 2 :, 2] = level
    return video


def encode(
    path: Path,
    frames: Sequence[av.VideoFrame],
    times: Sequence[float] | None = None,
    *,
    codec: str = "libx264",
    rate: int = 30,
    options: dict[str, str] | None = None,
    title: str | None = None,
    **colours_and_aspect: object,
) -> Path:
    """A file of these frames, shown at these times (seconds; None: evenly at `rate`)."""
    unit = Fraction(1, 600)
    with av.open(str(path), "w") as container:
        if title:
            container.metadata["title"] = title
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = frames[0].width, frames[0].height, frames[0].format.name
        stream.options = {"crf": "0"} if options is None else options
        for name, value in colours_and_aspect.items():
            setattr(stream.codec_context, name, value)
        if times is not None:
            stream.codec_context.time_base = unit
        for index, frame in enumerate(frames):
            if times is not None:
                frame.pts, frame.time_base = round(times[index] / unit), unit
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


def grey(levels: Sequence[int], height: int = 64, width: int = 64) -> list[av.VideoFrame]:
    return [
        av.VideoFrame.from_ndarray(np.full((height, width, 3), level, np.uint8)).reformat(format="yuv420p")
        for level in levels
    ]


def psnr(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(-10 * torch.log10(((a.float() - b.float()) / 255).pow(2).mean()))


def test_every_cut_of_a_montage_is_found():
    assert [start for start, _ in find_shots(BIKES)] == [0, 30, 76, 137, 187, 242]


@pytest.mark.parametrize(("path", "frames"), [(BUNNY, 132), (CARPHONE, 120)])
def test_a_single_shot_has_no_cut(path, frames):
    assert find_shots(path) == [(0, frames)]


@pytest.mark.parametrize("stride", [None, 4, 20, 50])
def test_clips_stay_within_a_shot(stride):
    starts = [start for start, _ in iter_clips(BIKES, ClipSpec(16, 16, 29, stride))]
    expected = [
        start for begin, end in find_shots(BIKES) for start in range(begin, end, stride or 29) if start + 29 <= end
    ]
    assert starts == expected


def test_a_clip_is_the_frames_that_it_says():
    video = read_video(BIKES, 32, 48)
    for start, clip in iter_clips(BIKES, ClipSpec(32, 48, 21, 7)):
        assert clip.dtype == torch.uint8 and clip.shape == (21, 32, 48, 3)
        torch.testing.assert_close(clip, video[start : start + 21], rtol=0, atol=0)


def test_cuts_are_found_when_frames_are_dropped():
    # 25 to 12.5 frames a second: the shots begin at the first frame kept of each.
    starts = [start for start, _ in iter_clips(BIKES, ClipSpec(16, 16, 15, 100, fps=12.5))]
    assert starts == [0, 15, 38, 69, 94]


def test_fps_keeps_evenly_spread_frames():
    video = read_video(BUNNY, 36, 64)
    torch.testing.assert_close(read_video(BUNNY, 36, 64, fps=12.5), video[::2], rtol=0, atol=0)
    assert len(read_video(BIKES, 16, 16, fps=16)) == 160
    # 29.97 frames a second count as 30.
    assert len(read_video(CARPHONE, 16, 16, fps=30)) == 120


def test_frames_cover_the_size_and_are_cropped_at_the_centre(tmp_path):
    write_video(tmp_path / "wide.mp4", striped(3, 64, 256), fps=8)
    frames = read_video(tmp_path / "wide.mp4", 32, 32)
    assert frames.shape == (3, 32, 32, 3)
    # What is left of 256 columns are the middle 64: half red, half blue.
    assert (frames[:, :, :14, 0] > 40).all() and (frames[:, :, :14, 2] < 20).all()
    assert (frames[:, :, 18:, 2] > 40).all() and (frames[:, :, 18:, 0] < 20).all()


def test_pixels_that_are_not_square_are_shown_square():
    with av.open(str(CARPHONE)) as container:  # 176 × 144 pixels, 128:117 wide each: shown at 4:3
        assert container.streams.video[0].sample_aspect_ratio == Fraction(128, 117)
    whole = read_video(CARPHONE, 72, 96, num_frames=1)
    square_crop = read_video(CARPHONE, 72, 72, num_frames=1)
    assert psnr(whole[:, :, 12:84], square_crop) > 30


def test_a_phone_held_upright_is_turned(tmp_path):
    path = tmp_path / "phone.mp4"
    write_video(path, striped(2, 32, 64), fps=8)
    data = bytearray(path.read_bytes())
    # Type 4, version and flags 4, times, ids and duration 20, reserved and volume 16. The last header is the one read.
    matrix = data.rindex(b"tkhd") + 44
    one, minus_one = (1 << 16).to_bytes(4, "big"), (-(1 << 16)).to_bytes(4, "big", signed=True)
    assert data[matrix : matrix + 4] == one
    data[matrix : matrix + 20] = bytes(4) + one + bytes(4) + minus_one + bytes(4)  # a quarter turn clockwise
    path.write_bytes(data)

    frames = read_video(path, 64, 32)
    # Red was on the left and is now at the top.
    assert (frames[:, :28, :, 0] > 40).all() and (frames[:, :28, :, 2] < 20).all()
    assert (frames[:, 36:, :, 2] > 40).all() and (frames[:, 36:, :, 0] < 20).all()


@pytest.mark.parametrize("fps", [8, 23.976, Fraction(30000, 1001), 60])
def test_what_is_written_is_what_is_read(tmp_path, fps):
    video = read_video(BUNNY, 64, 96, num_frames=17)
    write_video(tmp_path / "new" / "film.mp4", video, fps)
    again = read_video(tmp_path / "new" / "film.mp4", 64, 96)
    assert again.shape == video.shape
    # In brightness: 4:2:0 halves the resolution of colours.
    brightness = torch.tensor([0.299, 0.587, 0.114])
    assert psnr(again.float() @ brightness, video.float() @ brightness) > 36
    assert float(video_fps(tmp_path / "new" / "film.mp4")) == pytest.approx(float(fps), rel=1e-5)


@pytest.mark.parametrize("content", [b"", b"not a video", None])
def test_a_file_that_is_no_video_is_named(tmp_path, content):
    path = tmp_path / "broken.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(VideoError, match=r"broken\.mp4"):
        read_video(path, 16, 16)
    with pytest.raises(VideoError, match=r"broken\.mp4"):
        video_fps(path)


def test_a_truncated_file_is_named(tmp_path):
    path = tmp_path / "cut_off.mp4"
    path.write_bytes(Path(BUNNY).read_bytes()[:300_000])
    with pytest.raises(VideoError, match=r"cut_off\.mp4"):
        read_video(path, 16, 16)


def test_a_file_damaged_in_the_middle_is_named(tmp_path):
    data = bytearray(Path(BUNNY).read_bytes())
    for position in range(400_000, 700_000, 997):
        data[position] ^= 0xFF
    (tmp_path / "damaged.mp4").write_bytes(data)
    with pytest.raises(VideoError, match=r"damaged\.mp4: frame \d+ is corrupt"):
        read_video(tmp_path / "damaged.mp4", 16, 16)


def test_sound_alone_is_no_video(tmp_path):
    with wave.open(str(tmp_path / "sound.mp4"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(8000))
    with pytest.raises(VideoError, match=r"sound\.mp4: holds no video"):
        read_video(tmp_path / "sound.mp4", 16, 16)


def test_too_few_frames_and_too_slow_a_file_are_errors():
    with pytest.raises(VideoError, match="120 frames, wanted 121"):
        read_video(CARPHONE, 16, 16, num_frames=121)
    with pytest.raises(VideoError, match="25 frames a second, slower than the 30"):
        read_video(BUNNY, 16, 16, fps=30)


@pytest.mark.parametrize(
    ("video", "fps", "message"),
    [
        (torch.zeros(2, 16, 16, 3), 8, "uint8"),
        (torch.zeros(0, 16, 16, 3, dtype=torch.uint8), 8, "T >= 1"),
        (torch.zeros(2, 15, 16, 3, dtype=torch.uint8), 8, "even"),
        (torch.zeros(2, 16, 16, 3, dtype=torch.uint8), 0, "fps"),
    ],
)
def test_what_cannot_be_written_is_an_error(tmp_path, video, fps, message):
    with pytest.raises(ValueError, match=message):
        write_video(tmp_path / "film.mp4", video, fps)


def test_a_clip_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="num_frames must be positive, got 0"):
        ClipSpec(16, 16, 0)
    with pytest.raises(ValueError, match="stride must be positive, got 0"):
        ClipSpec(16, 16, 5, stride=0)


# --- what a file says of itself is used -----------------------------------------------------------------------------


def test_a_file_of_variable_rate_keeps_real_time(tmp_path):
    times = [i / 60 for i in range(120)] + [2 + i / 10 for i in range(20)]
    path = encode(tmp_path / "phone.mp4", grey([20 + int(50 * t) for t in times]), times, rate=60)
    assert float(video_fps(path)) == pytest.approx(35, rel=0.03)
    for fps in (30, None):
        video = read_video(path, 16, 16, fps=fps)
        rate = fps or float(video_fps(path))
        assert len(video) == pytest.approx(4 * rate, abs=1)
        seen = (video[:, 0, 0, 0].double() - 20) / 50  # the time that each frame shows
        late = seen - torch.arange(len(video)) / rate
        assert late.abs().max() < 0.05 + 2 / 50  # half of the longest gap, and two levels of grey


def test_a_frame_is_the_nearest_in_time_to_its_place(tmp_path):
    times = [0, 0.1, 0.14, 0.3, 0.35, 0.5]
    path = encode(tmp_path / "uneven.mkv", grey([20, 40, 60, 80, 100, 120]), times)
    video = read_video(path, 16, 16, fps=10)
    levels = [round(int(level), -1) for level in video[:, 0, 0, 0]]
    assert levels == [20, 40, 60, 80, 100, 120, 120]  # a last frame lasts as long as the one before it


def test_a_header_that_tells_another_rate_is_not_believed(tmp_path):
    times = [i / 24 for i in range(48)]
    path = encode(tmp_path / "says_sixty.mkv", grey(range(20, 212, 4)), times, rate=60)
    with av.open(str(path)) as container:
        assert container.streams.video[0].average_rate == 60
    assert float(video_fps(path)) == pytest.approx(24, rel=1e-3)
    assert len(read_video(path, 16, 16)) == 48 and len(read_video(path, 16, 16, fps=12)) == 24
    with pytest.raises(VideoError, match=r"says_sixty\.mkv: 24.* frames a second, slower than the 30"):
        read_video(path, 16, 16, fps=30)


def test_frames_that_avi_stores_out_of_order_are_shown_in_order(tmp_path):
    path = encode(tmp_path / "b_frames.avi", grey(range(20, 220, 5)), rate=25, options={"crf": "0", "bf": "2"})
    levels = read_video(path, 16, 16, fps=25)[:, 0, 0, 0]
    assert len(levels) == 40 and (levels.diff() > 0).all()


@pytest.mark.parametrize(
    ("times", "message"),
    [
        ([i / 30 for i in range(20)] + [100 + i / 30 for i in range(20)], "its timestamps leap by 99 s"),
        (None, "its timestamps go back"),
    ],
)
def test_broken_timestamps_are_named(tmp_path, times, message):
    if times:
        path = encode(tmp_path / "clock.mkv", grey(range(20, 100, 2)), times)
    else:  # two programmes joined: the clock starts anew
        path = encode(tmp_path / "clock.mpg", grey([90, 100] * 60), codec="mpeg2video", rate=25, options={})
        path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(VideoError, match=rf"clock\.\w+: {message}"):
        read_video(path, 16, 16)


def coded(rgb: tuple[int, int, int], kr: float, kb: float, full_range: bool, size: tuple[int, int]) -> av.VideoFrame:
    """A frame of one colour, coded as ITU-R BT.709 and its relatives say: Y' = kr R' + (1 - kr - kb) G' + kb B'."""
    r, g, b = (level / 255 for level in rgb)
    y = kr * r + (1 - kr - kb) * g + kb * b
    u, v = (b - y) / (2 * (1 - kb)), (r - y) / (2 * (1 - kr))
    values = (255 * y, 255 * u + 128, 255 * v + 128) if full_range else (219 * y + 16, 224 * u + 128, 224 * v + 128)
    frame = av.VideoFrame(*size, "yuv420p")
    for plane, value in zip(frame.planes, values, strict=True):
        plane.update(bytes([round(value)]) * plane.buffer_size)
    return frame


BT601, BT709, BT2020 = (0.299, 0.114), (0.2126, 0.0722), (0.2627, 0.0593)


@pytest.mark.parametrize("color_range", [0, 1, 2])
@pytest.mark.parametrize(
    ("colorspace", "constants", "size"),
    [
        (1, BT709, (64, 64)),
        (5, BT601, (64, 64)),
        (6, BT601, (64, 64)),
        (9, BT2020, (64, 64)),
        (7, (0.212, 0.087), (64, 64)),
        (2, BT601, (64, 64)),  # unspecified: by size
        (2, BT709, (1280, 64)),
    ],
)
def test_colours_are_read_by_the_matrix_and_range_that_the_stream_says(
    tmp_path, colorspace, constants, size, color_range
):
    colour = (40, 200, 90)
    frames = [coded(colour, *constants, color_range == 2, size) for _ in range(2)]
    path = encode(tmp_path / "colour.mp4", frames, colorspace=colorspace, color_range=color_range)
    for width in (size[0], size[0] // 2):
        pixels = read_video(path, 64, width)[0].int()
        assert (pixels - torch.tensor(colour)).abs().max() <= 2


def test_full_range_is_a_matter_of_the_flag_not_of_the_pixel_format(tmp_path):
    frames = [coded((250, 10, 128), *BT709, True, (64, 64)) for _ in range(2)]
    for frame in frames:
        frame.colorspace, frame.color_range = 1, 2
    path = encode(tmp_path / "vp9.webm", frames, codec="libvpx-vp9", options={}, colorspace=1, color_range=2)
    assert (read_video(path, 32, 32)[0].int() - torch.tensor((250, 10, 128))).abs().max() <= 3


def test_colours_without_a_matrix_are_read_as_they_are(tmp_path):
    picture = np.tile(np.array([40, 200, 90], np.uint8), (64, 64, 1))
    frames = [av.VideoFrame.from_ndarray(picture, format="rgb24") for _ in range(2)]
    path = encode(tmp_path / "rgb.mkv", frames, codec="libx264rgb")
    assert (read_video(path, 32, 32)[0].int() - torch.tensor((40, 200, 90))).abs().max() <= 1


@pytest.mark.parametrize(
    ("colours", "message"),
    [
        ({"color_trc": 16, "color_primaries": 9, "colorspace": 9}, r"HDR video \(PQ\)"),
        ({"color_trc": 18, "color_primaries": 9, "colorspace": 9}, r"HDR video \(HLG\)"),
        ({"colorspace": 8}, "colours coded by matrix 8"),
    ],
)
def test_colours_that_are_not_converted_are_named(tmp_path, colours, message):
    path = encode(tmp_path / "colour.mp4", grey([90, 100]), **colours)
    with pytest.raises(VideoError, match=rf"colour\.mp4: {message}"):
        read_video(path, 16, 16)


@pytest.mark.parametrize("size", [(64, 64), (720, 1280)])
def test_written_colours_are_read_again(tmp_path, size):
    video = torch.tensor([200, 30, 60], dtype=torch.uint8).expand(2, *size, 3)
    write_video(tmp_path / "red.mp4", video, 8)
    assert (read_video(tmp_path / "red.mp4", *size).int() - video).abs().max() <= 2
    with av.open(str(tmp_path / "red.mp4")) as container:
        assert next(container.decode(video=0)).colorspace == 1


def with_matrix(path: Path, a: float, b: float, c: float, d: float) -> None:
    """Puts a display matrix into an mp4."""
    data = bytearray(path.read_bytes())
    # type 4, version and flags 4, times, ids and duration 20, reserved and volume 16
    start = data.rindex(b"tkhd") + 44
    entries = [round(entry * (1 << 16)) for entry in (a, b, 0, c, d)]
    data[start : start + 20] = struct.pack(">5i", *entries)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("matrix", "expected"),
    [
        ((1, 0, 0, 1), lambda video: video),
        ((0, 1, -1, 0), lambda video: video.rot90(-1, (1, 2))),
        ((0, -1, 1, 0), lambda video: video.rot90(1, (1, 2))),
        ((-1, 0, 0, -1), lambda video: video.rot90(2, (1, 2))),
        ((-1, 0, 0, 1), lambda video: video.flip(2)),  # a front camera's mirror
        ((1, 0, 0, -1), lambda video: video.flip(1)),
        ((0, 1, 1, 0), lambda video: video.transpose(1, 2)),
    ],
)
def test_a_picture_is_turned_and_mirrored_as_its_file_says(tmp_path, matrix, expected):
    stored = torch.zeros(2, 32, 64, 3, dtype=torch.uint8)
    stored[:, :16, :32], stored[:, 16:, :32], stored[:, :16, 32:] = 60, 120, 240  # four quarters, all different
    write_video(tmp_path / "phone.mp4", stored, fps=8)
    with_matrix(tmp_path / "phone.mp4", *matrix)
    upright = expected(stored)
    assert psnr(read_video(tmp_path / "phone.mp4", *upright.shape[1:3]), upright) > 30


def test_a_picture_at_an_odd_angle_is_named(tmp_path):
    write_video(tmp_path / "tilted.mp4", striped(2, 32, 64), fps=8)
    with_matrix(tmp_path / "tilted.mp4", 0.7, 0.7, -0.7, 0.7)
    with pytest.raises(VideoError, match=r"tilted\.mp4: its picture is to be turned by an odd angle"):
        read_video(tmp_path / "tilted.mp4", 16, 16)


@pytest.mark.parametrize("aspect", [Fraction(1, 60), Fraction(60, 1)])
def test_an_absurd_shape_of_pixels_is_named(tmp_path, aspect):
    path = encode(tmp_path / "sliver.mp4", grey([90, 100]), sample_aspect_ratio=aspect)
    with pytest.raises(VideoError, match=r"sliver\.mp4: 64 × 64 pixels, each .* would show a sliver"):
        read_video(path, 16, 16)


def test_a_title_in_another_encoding_does_not_matter(tmp_path):
    path = encode(tmp_path / "film.avi", grey([50, 90]), codec="mpeg4", options={}, title="cafX noir")
    path.write_bytes(path.read_bytes().replace(b"cafX", b"caf\xe9"))
    assert len(read_video(path, 16, 16)) == 2


def test_a_cover_picture_is_no_video(tmp_path):
    with av.open(str(tmp_path / "song.mp4"), "w") as container:
        cover = container.add_stream("mjpeg", rate=1)
        cover.width, cover.height, cover.pix_fmt = 64, 64, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic.value
        frame = grey([90])[0].reformat(format="yuvj420p")
        frame.pts = 0
        container.mux(cover.encode(frame))
        container.mux(cover.encode(None))
    with pytest.raises(VideoError, match=r"song\.mp4: holds no video stream"):
        read_video(tmp_path / "song.mp4", 16, 16)


@pytest.mark.parametrize(
    "text",
    [
        "ffconcat version 1.0\nfile secret.mkv\n",
        "#EXTM3U\n#EXT-X-VERSION:4\n#EXT-X-TARGETDURATION:9\n#EXTINF:1,\nsecret.mkv\n#EXT-X-ENDLIST\n",
        "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
    ],
    ids=["concat", "hls", "sdp"],
)
@pytest.mark.parametrize("suffix", ["mp4", "mkv", "avi"])
def test_a_file_that_points_to_other_files_is_not_followed(tmp_path, text, suffix):
    encode(tmp_path / "secret.mkv", grey([50, 90]))
    path = tmp_path / f"list.{suffix}"
    path.write_text(text)
    with pytest.raises(VideoError, match=rf"list\.{suffix}: cannot be read as a video"):
        read_video(path, 16, 16)


@pytest.mark.parametrize("name", ["concat:a.mp4", "http:b.mp4", "-.mp4", os.fsdecode(b"caf\xe9.mp4")])
def test_a_file_name_is_nothing_but_a_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    encode(tmp_path / "plain.mp4", grey([50, 90])).rename(name)
    assert len(read_video(name, 16, 16)) == 2
    Path(name).write_bytes(b"no longer")
    with pytest.raises(VideoError, match="cannot be read") as caught:
        read_video(name, 16, 16)
    str(caught.value).encode()  # can be logged


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("height", "32", "height must be a whole number, got '32'"),
        ("width", 32.0, "width must be a whole number, got 32.0"),
        ("num_frames", True, "num_frames must be a whole number, got True"),
        ("fps", float("nan"), "fps must be a finite number, got nan"),
        ("fps", -1, "fps must be positive, got -1"),
    ],
)
def test_an_option_of_another_kind_is_an_error(option, value, message):
    options = {"height": 16, "width": 16, "num_frames": 5, option: value}
    with pytest.raises(ValueError, match=message):
        ClipSpec(**options)
    with pytest.raises(ValueError, match=message):
        read_video(BUNNY, **options)
