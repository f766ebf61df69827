import wave
from fractions import Fraction
from pathlib import Path

import av
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
    matrix = (
        data.index(b"tkhd") + 44
    )  # type 4, version and flags 4, times, ids and duration 20, reserved and volume 16
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
