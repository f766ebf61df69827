"""What SANA-WM reads of a camera is what diffusers' pipeline gives it, as a whole and as the film runs; and keys and
files become poses or a ValueError."""

import copy
import json
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from frame_gdn.camera import (
    CameraStream,
    Motion,
    Steering,
    actions_to_poses,
    camera_conditions,
    check_poses,
    crop_intrinsics,
    lens,
    parse_actions,
    read_camera,
)

HEIGHT, WIDTH = 96, 160


def cam_utils() -> Any:
    """diffusers' tools, which it has from 0.42 on."""
    return pytest.importorskip("diffusers.pipelines.sana_wm.cam_utils")


def random_poses(frames: int, seed: int = 0) -> Tensor:
    """A wild film that does not begin at the identity."""
    generator = torch.Generator().manual_seed(seed)
    poses = torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)
    Q, _ = torch.linalg.qr(torch.randn(frames, 3, 3, generator=generator, dtype=torch.float64))
    poses[:, :3, :3] = Q * torch.linalg.det(Q)[:, None, None].sign()
    poses[:, :3, 3] = torch.randn(frames, 3, generator=generator, dtype=torch.float64)
    return poses


def random_intrinsics(frames: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.tensor([150.0, 160.0, 80.0, 48.0]) + 20 * torch.rand(frames, 4, generator=generator)


def of_diffusers(poses: Tensor, intrinsics: Tensor, ratio: tuple[int, int] = (8, 32)) -> tuple[Tensor, Tensor]:
    ours = cam_utils().prepare_camera(
        poses.float().numpy(),
        intrinsics.float().numpy(),
        target_size=(HEIGHT, WIDTH),
        vae_stride=(ratio[0], ratio[1], ratio[1]),
    )
    return ours["raymap"][None], ours["chunk_plucker"][None]


def assert_equal(ours: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for x, y in zip(ours, expected, strict=True):
        assert x.shape == y.shape and x.dtype == torch.float32
        assert torch.equal(x, y)


@pytest.mark.parametrize("frames", [1, 5, 8, 9, 12, 49])
def test_a_whole_film_equals_diffusers(frames):
    poses, intrinsics = random_poses(frames), random_intrinsics(frames)
    ours = camera_conditions(poses, intrinsics, HEIGHT, WIDTH)
    latent = (frames - 1) // 8 + 1
    assert ours.camera_conditions.shape == (1, latent, 20) and ours.chunk_plucker.shape == (1, 48, latent, 3, 5)
    assert_equal(ours, of_diffusers(poses, intrinsics))


def test_other_ratios_equal_diffusers():
    poses, intrinsics = random_poses(13), random_intrinsics(13)
    ours = camera_conditions(poses, intrinsics, HEIGHT, WIDTH, frame_ratio=4, size_ratio=16)
    assert_equal(ours, of_diffusers(poses, intrinsics, (4, 16)))


@pytest.mark.parametrize("chunks", [[4, 3, 3], [1, 1, 1, 1, 1], [2, 5], [7]], ids=str)
def test_chunks_as_the_film_runs_equal_the_whole(chunks):
    frames = 8 * (sum(chunks) - 1) + 1
    poses, intrinsics = random_poses(frames), random_intrinsics(frames)
    whole = camera_conditions(poses, intrinsics, HEIGHT, WIDTH)
    assert_equal(whole, of_diffusers(poses, intrinsics))
    stream, parts, kept = CameraStream(HEIGHT, WIDTH), [], []
    for chunk in chunks:
        needed, known = stream.video_frames_for(chunk), stream.video_frames
        assert known + needed == max(8, 8 * (stream.frames + chunk - 1) + 1)  # and not one more
        if needed:
            with pytest.raises(ValueError, match="need a pose for each"):
                stream.take(chunk)
            stream.add(poses[known : known + needed], intrinsics[known : known + needed])
        parts.append(stream.take(chunk))
        kept.append(stream._poses.shape[1])
    assert max(kept) <= 7
    for name, expected in whole._asdict().items():
        joined = torch.cat([getattr(part, name) for part in parts], dim=1 if name == "camera_conditions" else 2)
        assert torch.equal(joined, expected)


def test_poses_may_come_one_by_one_and_in_batches():
    poses, intrinsics = torch.stack([random_poses(25, seed) for seed in (1, 2)]), random_intrinsics(25)
    stream = CameraStream(HEIGHT, WIDTH)
    for t in range(25):
        stream.add(poses[:, t : t + 1], intrinsics[t : t + 1])
    ours = stream.take(4)
    for b in range(2):
        assert_equal(tuple(x[b : b + 1] for x in ours), of_diffusers(poses[b], intrinsics))


def test_a_branch_and_a_saved_stream_go_on(tmp_path):
    poses, intrinsics = random_poses(49), random_intrinsics(49)
    whole = camera_conditions(poses, intrinsics, HEIGHT, WIDTH)
    stream = CameraStream(HEIGHT, WIDTH)
    stream.add(poses[:30], intrinsics[:30])
    stream.take(3)
    torch.save(stream.state_dict(), tmp_path / "camera.pt")
    branch, resumed = copy.deepcopy(stream), CameraStream(HEIGHT, WIDTH)
    branch.add(random_poses(7, seed=3), intrinsics[:7])
    branch.take(1)
    resumed.load_state_dict(torch.load(tmp_path / "camera.pt", weights_only=True))
    for other in (stream, resumed):
        other.add(poses[30:], intrinsics[30:])
        assert torch.equal(other.take(4).chunk_plucker, whole.chunk_plucker[:, :, 3:])
    with pytest.raises(ValueError, match="the state must hold"):
        stream.load_state_dict({"poses": poses})


@pytest.mark.parametrize("shape", ["(4,)", "(3, 3)", "(F, 3, 3)", "longer"])
def test_one_lens_or_one_a_frame_as_numbers_or_matrices(shape):
    lenses = random_intrinsics(1).expand(9, 4)
    K = torch.eye(3).repeat(9, 1, 1)
    K[:, 0, 0], K[:, 1, 1], K[:, 0, 2], K[:, 1, 2] = lenses.unbind(-1)
    given = {"(4,)": lenses[0], "(3, 3)": K[0], "(F, 3, 3)": K, "longer": lenses[:1].expand(30, 4)}[shape]
    poses = random_poses(9)
    assert_equal(camera_conditions(poses, given, HEIGHT, WIDTH), of_diffusers(poses, lenses))


def test_arrays_and_lists_are_taken_as_tensors_are():
    poses, lenses = random_poses(9), random_intrinsics(9)
    expected = camera_conditions(poses, lenses[0].double(), HEIGHT, WIDTH).chunk_plucker
    assert torch.equal(camera_conditions(poses.numpy(), lenses[0].tolist(), HEIGHT, WIDTH).chunk_plucker, expected)
    with pytest.raises(ValueError, match="poses must be an array of numbers"):
        camera_conditions("w-24", lenses, HEIGHT, WIDTH)


@pytest.mark.parametrize("size", [(48, 64), (200, 97), (704, 1280), (1080, 1920)])
def test_a_cropped_image_keeps_its_lens_as_in_diffusers(size):
    lenses = random_intrinsics(2)
    image = Image.new("RGB", (size[1], size[0]))
    _, *crop = cam_utils().resize_and_center_crop(image, 704, 1280)
    expected = cam_utils().transform_intrinsics_for_crop(lenses.numpy(), *crop)
    torch.testing.assert_close(crop_intrinsics(lenses, size, (704, 1280)), torch.from_numpy(expected))


def test_a_lens_from_its_field_of_view():
    fx, fy, cx, cy = lens(704, 1280, 90.0).tolist()
    assert (fx, fy, cx, cy) == pytest.approx((640, 640, 640, 352))
    with pytest.raises(ValueError, match="between 0 and 180"):
        lens(704, 1280, 180.0)


def spoil(frame: int, change: str) -> Tensor:
    poses = random_poses(9)
    match change:
        case "nan":
            poses[frame, 1, 3] = math.nan
        case "infinite":
            poses[frame, 0, 0] = math.inf
        case "scaled":
            poses[frame, :3, :3] *= 1.02
        case "mirrored":
            poses[frame, :3, 0] *= -1
        case "zero":
            poses[frame] = 0
        case "transposed":
            poses[frame] = poses[frame].T.clone()
    return poses


@pytest.mark.parametrize("change", ["nan", "infinite", "scaled", "mirrored", "zero", "transposed"])
def test_poses_that_are_no_camera_are_named_by_frame(change):
    with pytest.raises(ValueError, match=r"poses must be (finite|rigid).* at frame 6"):
        camera_conditions(spoil(6, change), random_intrinsics(9), HEIGHT, WIDTH)


def test_rounded_poses_pass():
    check_poses((random_poses(50) * 1000).round() / 1000)


def test_bad_shapes_and_sizes_are_named_and_nothing_is_added():
    poses, lenses = random_poses(9), random_intrinsics(9)
    for bad in (poses[:, :3], poses[0], poses[:0], torch.ones(9, 4, 4, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"poses must be floating-point, \(F, 4, 4\)"):
            camera_conditions(bad, lenses, HEIGHT, WIDTH)
    for bad in (lenses[:8], lenses[:, :3], lenses[None, None]):
        with pytest.raises(ValueError, match="intrinsics must be"):
            camera_conditions(poses, bad, HEIGHT, WIDTH)
    for column, value in ((0, 0.0), (1, -3.0), (2, math.nan)):
        bad = lenses.clone()
        bad[4, column] = value
        with pytest.raises(ValueError, match="intrinsics .* at frame 4"):
            camera_conditions(poses, bad, HEIGHT, WIDTH)
    with pytest.raises(ValueError, match=r"latent frames 0 ... 2 need .* first 17 video frames, got 9"):
        camera_conditions(poses, lenses, HEIGHT, WIDTH, frames=3)
    with pytest.raises(ValueError, match="frames must be an int from 1, got 0"):
        camera_conditions(poses, lenses, HEIGHT, WIDTH, frames=0)
    with pytest.raises(ValueError, match="multiples of 32, got 100 and 160"):
        camera_conditions(poses, lenses, 100, WIDTH)
    stream = CameraStream(HEIGHT, WIDTH)
    stream.add(poses, lenses)
    with pytest.raises(ValueError, match="1 cameras .*, got 2"):
        stream.add(poses[None].expand(2, -1, -1, -1), lenses)
    with pytest.raises(ValueError, match="rigid"):
        stream.add(spoil(6, "scaled"), lenses)
    assert stream.video_frames == 9
    assert torch.equal(stream.take(2).chunk_plucker, camera_conditions(poses, lenses, HEIGHT, WIDTH).chunk_plucker)


def test_the_first_frames_of_a_longer_film_are_asked_for_alone():
    poses, lenses = random_poses(25), random_intrinsics(25)
    whole = camera_conditions(poses, lenses, HEIGHT, WIDTH)
    assert torch.equal(
        camera_conditions(poses, lenses, HEIGHT, WIDTH, frames=1).chunk_plucker, whole.chunk_plucker[:, :, :1]
    )


def test_actions_are_held_keys_frame_by_frame():
    assert parse_actions("w-2, WD-1,none-1") == [{"w"}, {"w"}, {"w", "d"}, set()]
    for bad in ("", "w", "w-", "-3", "w-0", "w-1.5", "w-2,,d-2", "w-2,", "w-²"):
        with pytest.raises(ValueError, match="keys-frames joined by commas"):
            parse_actions(bad)
    with pytest.raises(ValueError, match="or \"none\", got 'qx'"):
        parse_actions("wxq-3")
    with pytest.raises(ValueError, match="got '-'"):
        parse_actions("w--1")


def test_each_key_moves_the_camera_its_way():
    """x is right, y down, z forward."""
    plain = Motion(speed=0.5, turn=10, smooth=False)
    last = {key: actions_to_poses(f"{key}-3", plain)[-1] for key in "wsadikjl"}
    for key, place in {"w": (0, 0, 1.5), "s": (0, 0, -1.5), "l": (1.5, 0, 0), "j": (-1.5, 0, 0)}.items():
        assert last[key][:3, 3].tolist() == pytest.approx(place)
        assert torch.equal(last[key][:3, :3], torch.eye(3, dtype=torch.float64))
    sine, cosine = math.sin(math.radians(30)), math.cos(math.radians(30))
    for key, forward in {
        "d": (sine, 0, cosine),
        "a": (-sine, 0, cosine),
        "i": (0, -sine, cosine),
        "k": (0, sine, cosine),
    }.items():
        assert last[key][:3, 2].tolist() == pytest.approx(forward)
        assert last[key][:3, 3].tolist() == [0, 0, 0]


def test_without_smoothing_and_with_keys_swapped_it_is_diffusers_rollout():
    """diffusers has the older keys: a and d move sideways, j and l turn."""
    actions = "w-3,wd-4,ik-2,il-9,sj-5,none-2,kwl-30,wa-7"
    older = actions.translate(str.maketrans("adjl", "jlad"))
    theirs = cam_utils().action_string_to_c2w(older, translation_speed=0.3, rotation_speed_deg=2.0, pitch_limit_deg=80)
    ours = actions_to_poses(actions, Motion(speed=0.3, turn=2.0, pitch_limit=80, smooth=False))
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-6)


def test_motions_ease_off_after_a_key_and_start_at_once():
    poses = actions_to_poses("w-2,none-16,w-1")
    steps = poses[1:, 2, 3] - poses[:-1, 2, 3]
    assert steps[:2].tolist() == pytest.approx([0.025] * 2)
    assert steps[2:18].tolist() == pytest.approx([0.025 * math.exp(-n / 16) for n in range(1, 17)])
    assert steps[18].item() == pytest.approx(0.025)


def test_the_tilt_ends_at_its_limit():
    forward = actions_to_poses("i-200", Motion(smooth=False))[:, :3, 2]
    assert forward[-1].tolist() == pytest.approx([0, -math.sin(math.radians(60)), math.cos(math.radians(60))])
    assert (-forward[:, 1]).max() <= math.sin(math.radians(60)) + 1e-12


def test_steering_goes_on_chunk_by_chunk_and_branches():
    whole = actions_to_poses("wd-10,none-3,wi-11")
    steering = Steering()
    parts = [steering.pose[None], steering.move("wd-10,none-1"), steering.move("none-2,wi-4")]
    branch = copy.deepcopy(steering)
    branch.move("sa-5")
    parts.append(steering.move("wi-7"))
    torch.testing.assert_close(torch.cat(parts), whole, rtol=0, atol=1e-12)
    assert torch.equal(steering.pose, parts[-1][-1])


def test_steering_starts_at_a_given_pose():
    start = actions_to_poses("wd-30,i-20", Motion(smooth=False))[-1]
    on = Steering(Motion(smooth=False), start=start).move("wi-90,d-5")
    expected = actions_to_poses("wd-30,i-20,wi-90,d-5", Motion(smooth=False))[-95:]
    torch.testing.assert_close(on, expected, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="rigid"):
        Steering(start=torch.zeros(4, 4))
    with pytest.raises(ValueError, match="one pose"):
        Steering(start=torch.eye(3))
    with pytest.raises(ValueError, match="less than 90 degrees"):
        Motion(pitch_limit=90)
    with pytest.raises(ValueError, match="frames_per_second must be a finite number above 0"):
        Motion(frames_per_second=0)


def test_a_long_session_stays_rigid():
    steering = Steering(Motion(smooth=False))
    for _ in range(300):
        pose = steering.move("wdi-40,ak-40")[-1]
    R = pose[:3, :3]
    assert (R @ R.T - torch.eye(3, dtype=torch.float64)).abs().max() < 1e-12


def write(path, content) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_camera_file_gives_poses_and_a_lens_a_frame(tmp_path):
    poses = random_poses(9)
    path = write(tmp_path / "poses.json", {"poses": poses.tolist(), "intrinsics": [150, 150, 80, 48]})
    read, intrinsics = read_camera(path, frames=9)
    assert torch.equal(read, poses) and intrinsics.tolist() == [[150, 150, 80, 48]] * 9
    assert camera_conditions(read, intrinsics, HEIGHT, WIDTH).chunk_plucker.shape == (1, 48, 2, 3, 5)
    read, intrinsics = read_camera(write(tmp_path / "list.json", poses.tolist()))
    assert torch.equal(read, poses) and intrinsics is None


GOOD = random_poses(3).tolist()
BAD_FILES = {
    "no JSON": ('{"poses": [', "is not JSON"),
    "a number": (7, "poses must be floating-point"),
    "no poses": ({"intrinsics": [1, 1, 0, 0]}, 'must hold "poses"'),
    "a misspelt field": ({"poses": GOOD, "intrinsic": [1, 1, 0, 0]}, "got .'intrinsic', 'poses'."),
    "words": ({"poses": "identity"}, "poses must be an array of numbers"),
    "ragged": ({"poses": [GOOD[0], GOOD[1][:3]]}, "poses must be an array of numbers"),
    "nothing": ({"poses": None}, "poses must be"),
    "null inside": ({"poses": [[[None] * 4] * 4]}, "poses must be an array of numbers"),
    "3 × 4": ({"poses": [pose[:3] for pose in GOOD]}, "poses must be floating-point"),
    "two films": ({"poses": [GOOD, GOOD]}, "one film's"),
    "too few": ({"poses": GOOD[:2]}, "3 video frames need as many poses, got 2"),
    "not a number": ('{"poses": [[[NaN, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]]}', "must be finite"),
    "not rigid": ({"poses": [[[2.0 * (i == j) for j in range(4)] for i in range(4)]] * 3}, "must be rigid"),
    "few lenses": ({"poses": GOOD, "intrinsics": [[1, 1, 0, 0]] * 2}, "intrinsics must be"),
    "a broken lens": ({"poses": GOOD, "intrinsics": [0, 1, 0, 0]}, "above 0"),
    "a lens of words": ({"poses": GOOD, "intrinsics": ["a", 1, 0, 0]}, "intrinsics must be an array"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_camera_file_is_a_value_error_that_names_it(tmp_path, kind):
    content, message = BAD_FILES[kind]
    path = write(tmp_path / "poses.json", content)
    with pytest.raises(ValueError, match=f"poses.json.*{message}"):
        read_camera(path, frames=3)


def test_the_camera_needs_torch_alone():
    code = "import sys, frame_gdn.camera; sys.exit(any(m in sys.modules for m in ('diffusers', 'PIL', 'accelerate')))"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
