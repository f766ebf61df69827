"""A camera for SANA-WM, of a whole film or as the film runs: poses and lens to what the model reads, keys to poses.

Poses are camera to world in OpenCV's axes (x right, y down, z forward): (F, 4, 4), one for each video frame.
Intrinsics are [fx, fy, cx, cy] in pixels of the video. The first latent frame is one video frame, each later one 8
(`frame_ratio`). What the model reads of latent frame t:

- `camera_conditions` (B, T, 20): the pose of video frame 8t relative to the film's first one, 16 numbers, and the
  intrinsics in pixels of the latents, 4 numbers;
- `chunk_plucker` (B, 48, T, h, w): of each of the video frames 8t - 7 ... 8t (0 ... 7 for t = 0) the six Plücker
  coordinates (d, o × d) of every latent pixel's ray, with its unit direction d and the camera's position o.

A chunk therefore needs no pose after video frame 8t of its last latent frame t (frame 7, if that is the first), and
what was computed never changes: a camera can be steered while the film runs.

Source: `pipelines/sana_wm/cam_utils.py` of diffusers 0.42, after NVlabs/Sana.
"""

import json
import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks

RIGID_TOLERANCE = 1e-2  # passes rotations written with two or three digits, stops scaled and mirrored ones

KEYS = "wsadikjl"


class CameraConditions(NamedTuple):
    """Of T latent frames, in float32, under the names that SANA-WM's transformer gives them."""

    camera_conditions: Tensor
    """(B, T, 20)"""
    chunk_plucker: Tensor
    """(B, 6 · frame_ratio, T, h, w)"""


def camera_conditions(
    poses: Tensor,
    intrinsics: Tensor,
    height: int,
    width: int,
    *,
    frames: int | None = None,
    frame_ratio: int = 8,
    size_ratio: int = 32,
) -> CameraConditions:
    """The conditions of a whole film, those of diffusers' SanaWMPipeline.

    Args:
        poses: (F, 4, 4) or (B, F, 4, 4), rigid. Tensors, or arrays and lists of numbers, as are intrinsics.
        intrinsics: of the video: (4,) or a matrix (3, 3) for all frames, (F, 4) or (F, 3, 3); or with B in front.
        height, width: of the video in pixels.
        frames: latent frames T; None for 1 + (F - 1) // frame_ratio, all that the poses reach.
        frame_ratio, size_ratio: video frames, and pixels along each side, of one latent frame and pixel.

    Raises:
        ValueError: other shapes; fewer poses than T latent frames need; fewer intrinsics than poses; numbers that are
            not finite; poses that are not rigid; focal lengths that are not positive; a size that is no multiple of
            size_ratio.
    """
    stream = CameraStream(height, width, frame_ratio=frame_ratio, size_ratio=size_ratio)
    stream.add(poses, intrinsics)
    return stream.take(1 + (stream.video_frames - 1) // frame_ratio if frames is None else frames, film_ends=True)


class CameraStream:
    """The conditions of a film chunk by chunk: `add` poses as they become known, `take` the next latent frames.

    It keeps the film's first pose and the poses that no latent frame has read yet. `copy.deepcopy` gives a branch,
    `state_dict` and `load_state_dict` carry it through a file.

    Args:
        height, width: of the video in pixels.
        frame_ratio, size_ratio: as in `camera_conditions`.

    Attributes:
        frames: latent frames taken so far.
        video_frames: poses added so far.
    """

    def __init__(self, height: int, width: int, *, frame_ratio: int = 8, size_ratio: int = 32) -> None:
        for name, value in (
            ("height", height),
            ("width", width),
            ("frame_ratio", frame_ratio),
            ("size_ratio", size_ratio),
        ):
            checks.integer(name, value, 1)
        if height % size_ratio or width % size_ratio:
            raise ValueError(f"height and width must be multiples of {size_ratio}, got {height} and {width}")
        self.height, self.width, self.frame_ratio, self.size_ratio = height, width, frame_ratio, size_ratio
        self.frames = self.video_frames = 0
        # The inverse of the film's first pose (B, 4, 4). Of the last frames: poses relative to it (B, F, 4, 4) and
        # intrinsics in pixels of the latents (B, F, 4).
        self._origin = torch.empty(0, 4, 4)
        self._poses, self._intrinsics = torch.empty(0, 0, 4, 4), torch.empty(0, 0, 4)

    def add(self, poses: Tensor, intrinsics: Tensor) -> None:
        """Append the next video frames: their poses (F, 4, 4) or (B, F, 4, 4) and intrinsics, as in
        `camera_conditions`.

        Raises:
            ValueError: as `camera_conditions`, and for another batch or device than before. Nothing is appended then.
        """
        poses = check_poses(poses).float()
        intrinsics = check_intrinsics(intrinsics, poses).float()
        intrinsics = intrinsics / self.size_ratio
        if self.video_frames == 0:
            origin = _inverse(poses[:, 0])
            first = torch.eye(4, device=poses.device).expand(len(poses), 1, 4, 4)  # not R Rᵀ, which is rounded
            poses = torch.cat([first, origin[:, None] @ poses[:, 1:]], dim=1)
        else:
            origin = self._origin
            if len(poses) != len(origin) or poses.device != origin.device:
                raise ValueError(
                    f"the film has {len(origin)} cameras on {origin.device}, got {len(poses)} on {poses.device}"
                )
            poses = torch.cat([self._poses, origin[:, None] @ poses], dim=1)
            intrinsics = torch.cat([self._intrinsics, intrinsics], dim=1)
        self.video_frames += poses.shape[1] - self._poses.shape[1]
        self._origin, self._poses, self._intrinsics = origin, poses, intrinsics

    def video_frames_for(self, frames: int) -> int:
        """How many more poses `take(frames)` needs."""
        last = self.frame_ratio * (self.frames + frames - 1)
        return max(0, max(last, self.frame_ratio - 1) + 1 - self.video_frames)

    def take(self, frames: int, *, film_ends: bool = False) -> CameraConditions:
        """The conditions of the next latent frames.

        Args:
            frames: how many, at least 1.
            film_ends: a film of one latent frame may have fewer than frame_ratio poses; the last one is repeated.

        Raises:
            ValueError: no frames, or more than the poses reach.
        """
        checks.integer("frames", frames, 1)
        missing = self.video_frames_for(frames)
        if film_ends and self.frames == 0 and frames == 1 and self.video_frames:
            missing = 0
        if missing:
            raise ValueError(
                f"latent frames {self.frames} ... {self.frames + frames - 1} need a pose for each of the first "
                f"{self.video_frames + missing} video frames, got {self.video_frames}"
            )
        ratio, poses, intrinsics = self.frame_ratio, self._poses, self._intrinsics
        first = self.video_frames - poses.shape[1]  # the video frame of poses[:, 0]
        latent = torch.arange(self.frames, self.frames + frames, device=poses.device)
        at = ratio * latent - first
        conditions = torch.cat([poses[:, at].flatten(-2), intrinsics[:, at]], dim=-1)
        video = (ratio * latent - (ratio - 1)).clamp(min=0)[:, None] + torch.arange(ratio, device=poses.device)
        at = (video.flatten() - first).clamp(max=poses.shape[1] - 1)
        rays = _plucker(poses[:, at], intrinsics[:, at], self.height // self.size_ratio, self.width // self.size_ratio)
        rays = rays.unflatten(1, (frames, ratio)).permute(0, 2, 5, 1, 3, 4).flatten(1, 2)
        self.frames += frames
        # The next latent frame reads from the video frame after this one's last; latent frame 0 ends at frame 0.
        used = max(0, ratio * (self.frames - 1) + 1 - first)
        self._poses, self._intrinsics = poses[:, used:].clone(), intrinsics[:, used:].clone()
        return CameraConditions(conditions, rays)

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors that `load_state_dict` of a stream of the same size and ratios goes on from."""
        counts = torch.tensor([self.frames, self.video_frames])
        return {"counts": counts, "origin": self._origin, "poses": self._poses, "intrinsics": self._intrinsics}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on where another stream was. Raises ValueError for tensors that `state_dict` does not make."""
        if set(state) != set(self.state_dict()):
            raise ValueError(f"the state must hold {sorted(self.state_dict())}, got {sorted(state)}")
        self.frames, self.video_frames = state["counts"].tolist()
        self._origin, self._poses, self._intrinsics = (state[name] for name in ("origin", "poses", "intrinsics"))


def _plucker(poses: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """(B, F, 4, 4), (B, F, 4) to (B, F, h, w, 6): the ray of pixel (x, y) has the direction R ((x - cx) / fx,
    (y - cy) / fy, 1)ᵀ, normalised, and starts at the pose's translation."""
    fx, fy, cx, cy = intrinsics[..., None, None].unbind(-3)
    y, x = (torch.arange(size, device=poses.device, dtype=poses.dtype) for size in (height, width))
    x, y = torch.broadcast_tensors((x - cx) / fx, (y[:, None] - cy) / fy)
    local = torch.stack([x, y, torch.ones_like(x)], dim=-1)
    direction = torch.einsum("bfij,bfhwj->bfhwi", poses[..., :3, :3], local)
    direction = direction / torch.linalg.vector_norm(direction, dim=-1, keepdim=True)
    position = poses[..., None, None, :3, 3].expand_as(direction)
    return torch.cat([direction, torch.linalg.cross(position, direction)], dim=-1)


def _inverse(poses: Tensor) -> Tensor:
    """Of rigid transforms (..., 4, 4): [Rᵀ, -Rᵀ t]."""
    R, t = poses[..., :3, :3].mT, poses[..., :3, 3:]
    inverse = torch.zeros_like(poses)
    inverse[..., :3, :3], inverse[..., :3, 3:], inverse[..., 3, 3] = R, -R @ t, 1.0
    return inverse


def check_poses(poses: Tensor) -> Tensor:
    """Poses (F, 4, 4) or (B, F, 4, 4) as (B, F, 4, 4).

    Raises:
        ValueError: another shape or dtype; no frame; a pose that is not finite or not rigid, with its frame.
    """
    poses = _tensor("poses", poses)
    if poses.dim() not in (3, 4) or poses.shape[-2:] != (4, 4) or 0 in poses.shape or poses.dtype not in checks.FLOATS:
        raise ValueError(f"poses must be floating-point, (F, 4, 4) or (B, F, 4, 4), got {checks.shown(poses)}")
    poses = poses if poses.dim() == 4 else poses[None]
    _name_first(~poses.isfinite().all(-1).all(-1), poses, "poses must be finite")
    exact = poses.double()
    R, last_row = exact[..., :3, :3], exact[..., 3, :]
    off = (R @ R.mT - torch.eye(3, device=R.device, dtype=R.dtype)).abs().amax((-2, -1))
    off = torch.maximum(off, (last_row - last_row.new_tensor([0, 0, 0, 1])).abs().amax(-1))
    _name_first(
        (off > RIGID_TOLERANCE) | (torch.linalg.det(R) < 0),
        poses,
        "poses must be rigid, a rotation and a translation over a last row of 0, 0, 0, 1",
    )
    return poses


def check_intrinsics(intrinsics: Tensor, poses: Tensor) -> Tensor:
    """Intrinsics (4,), (3, 3), (F, 4), (F, 3, 3), or with B in front, as (B, F, 4) for poses (B, F, 4, 4), on their
    device. Intrinsics of more frames than poses are cut.

    Raises:
        ValueError: another shape; fewer frames than poses; numbers that are not finite; focal lengths not above 0.
    """
    batch, frames = poses.shape[:2]
    values = intrinsics = _tensor("intrinsics", intrinsics).to(poses.device)
    if values.dim() >= 2 and values.shape[-2:] == (3, 3):
        values = torch.stack([values[..., 0, 0], values[..., 1, 1], values[..., 0, 2], values[..., 1, 2]], dim=-1)
    if values.dim() == 1:
        values = values[None].expand(frames, -1)
    if values.dim() == 2:
        values = values[None].expand(batch, -1, -1)
    if values.dim() != 3 or values.shape[0] != batch or values.shape[1] < frames or values.shape[2] != 4:
        raise ValueError(
            f"intrinsics must be (4,), (3, 3), (F, 4) or (F, 3, 3), or with B in front, for {batch} × {frames} poses, "
            f"got {checks.shown(intrinsics)}"
        )
    values = values[:, :frames]
    good = values.isfinite().all(-1) & (values[..., :2] > 0).all(-1)
    _name_first(~good, values, "intrinsics [fx, fy, cx, cy] must be finite with fx and fy above 0")
    return values


def _name_first(bad: Tensor, values: Tensor, rule: str) -> None:
    """ValueError for the first true entry of bad (B, F)."""
    if bad.any():
        row, frame = bad.nonzero()[0].tolist()
        raise ValueError(f"{rule}, got {values[row, frame].tolist()} at frame {frame}")


def crop_intrinsics(intrinsics: Tensor, image: tuple[int, int], video: tuple[int, int]) -> Tensor:
    """Intrinsics (..., 4) of an image for the video that begins with it, both (height, width).

    The image is resized to cover the video and cut at its centre, as SanaWMPipeline does with its first frame.
    """
    (height, width), (video_height, video_width) = image, video
    for name, size in (("image", image), ("video", video)):
        checks.pair(name, size, "(height, width)")
        checks.integers(name, size, 1)
    if intrinsics.shape[-1:] != (4,):
        raise ValueError(f"intrinsics must be (..., 4), got {checks.shown(intrinsics)}")
    scale = max(video_height / height, video_width / width)
    resized = max(video_height, round(height * scale)), max(video_width, round(width * scale))
    top, left = (resized[0] - video_height) // 2, (resized[1] - video_width) // 2
    sx, sy = resized[1] / width, resized[0] / height
    return intrinsics * intrinsics.new_tensor([sx, sy, sx, sy]) - intrinsics.new_tensor([0, 0, left, top])


def lens(height: int, width: int, field_of_view: float = 60.0) -> Tensor:
    """Intrinsics (4,) of a pinhole camera with square pixels and its axis through the centre, for a video of unknown
    lens: field_of_view is that of the width, in degrees. Raises ValueError outside of 0 ... 180."""
    checks.integer("height", height, 1)
    checks.integer("width", width, 1)
    checks.number("field_of_view", field_of_view, 0, above=True)
    if field_of_view >= 180:
        raise ValueError(f"field_of_view must lie between 0 and 180 degrees, got {field_of_view}")
    focal = width / 2 / math.tan(math.radians(field_of_view) / 2)
    return torch.tensor([focal, focal, width / 2, height / 2])


def read_camera(path: str | os.PathLike[str], frames: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Poses (F, 4, 4) and intrinsics (F, 4), or None where the file has none, from JSON.

    The file is {"poses": F matrices of 4 × 4, "intrinsics": [fx, fy, cx, cy], a 3 × 3 matrix, or F of either}, or the
    list of matrices alone.

    Args:
        path: the file.
        frames: video frames that poses are needed for; None for any number.

    Raises:
        ValueError: a file that is no such JSON, has fewer poses than frames or fewer intrinsics than poses, or numbers
            that `check_poses` and `check_intrinsics` refuse. It names the file.
    """
    checks.integer("frames", frames, 1, optional=True)
    name = os.fspath(path)
    with open(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from error
    fields = content if isinstance(content, dict) else {"poses": content}
    unknown = sorted(set(fields) - {"poses", "intrinsics"})
    if "poses" not in fields or unknown:
        raise ValueError(f'{name} must hold "poses" and may hold "intrinsics", got {sorted(fields)}')
    try:
        poses = check_poses(_tensor("poses", fields["poses"]))
        if len(poses) != 1:
            raise ValueError(f"poses must be one film's, (F, 4, 4), got {tuple(poses.shape)}")
        if frames is not None and poses.shape[1] < frames:
            raise ValueError(f"{frames} video frames need as many poses, got {poses.shape[1]}")
        intrinsics = None
        if fields.get("intrinsics") is not None:
            intrinsics = check_intrinsics(_tensor("intrinsics", fields["intrinsics"]), poses)[0]
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    return poses[0], intrinsics


def _tensor(name: str, values: Any) -> Tensor:
    """A tensor as it is; an array or nested lists in float64, as JSON's numbers are. ValueError for anything else."""
    if isinstance(values, Tensor):
        return values
    try:
        return torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of numbers: {error}") from error


def parse_actions(actions: str) -> list[frozenset[str]]:
    """The keys held in each video frame: "w-24,wd-8,none-4" is 24 frames of w, 8 of w and d, 4 without a key.

    Capitals and spaces do not matter.

    Raises:
        ValueError: an action that is not keys-frames, a key that does not exist, no frames.
    """
    if not isinstance(actions, str):
        raise ValueError(f"actions must be text, got {checks.shown(actions)}")
    held: list[frozenset[str]] = []
    for action in "".join(actions.lower().split()).split(","):
        keys, _, count = action.rpartition("-")
        if not keys or not count.isdecimal() or int(count) < 1:
            raise ValueError(f'actions are keys-frames joined by commas, such as "w-24,wd-8,none-4", got {action!r}')
        pressed = frozenset() if keys == "none" else frozenset(keys)
        if not pressed <= set(KEYS):
            raise ValueError(f'keys are {", ".join(KEYS)} or "none", got {"".join(sorted(pressed - set(KEYS)))!r}')
        held += [pressed] * int(count)
    return held


@dataclass(frozen=True)
class Motion:
    """How far a held key moves the camera in one video frame, as NVlabs/Sana moves it.

    Attributes:
        speed: of w, s, j and l, in units of the poses.
        turn: of a, d, i and k, in degrees.
        pitch_limit: in degrees; the camera tilts no further up or down.
        smooth: a motion whose key is released dies away, with 1 s as its time constant, and one that is slowed by a
            second key adapts with 0.45 s; a key that is newly pressed acts at once on all motions. False: a motion
            lasts as long as its key.
        frames_per_second: of the video, for these constants.
    """

    speed: float = 0.025
    turn: float = 0.6
    pitch_limit: float = 60.0
    smooth: bool = True
    frames_per_second: float = 16.0

    def __post_init__(self) -> None:
        for name in ("speed", "turn", "pitch_limit"):
            checks.number(name, getattr(self, name), 0)
        checks.number("frames_per_second", self.frames_per_second, 0, above=True)
        checks.flag("smooth", self.smooth)
        if self.pitch_limit >= 90:
            raise ValueError(f"pitch_limit must be less than 90 degrees, got {self.pitch_limit}")


class Steering:
    """Poses from keys, as the film runs: each `move` goes on where the last one ended.

    w and s move forward and back, j and l left and right, both level with the ground (y = 0) whatever the tilt; a and
    d turn left and right; i and k tilt up and down. These are the keys of NVlabs/Sana and of what is built on it.
    diffusers' SanaWMPipeline still has the older ones, in which a and d move sideways and j and l turn: swap these
    pairs in a text made for it.

    `copy.deepcopy` gives a branch.

    Args:
        motion: how far a key moves the camera.
        start: (4, 4), the pose before the first move; None for the identity.

    Attributes:
        pose: (4, 4) float64, the latest one.
    """

    def __init__(self, motion: Motion | None = None, start: Tensor | None = None) -> None:
        self.motion = motion or Motion()
        if start is None:
            start = torch.eye(4, dtype=torch.float64)
        elif start.shape != (4, 4):
            raise ValueError(f"start must be one pose (4, 4), got {checks.shown(start)}")
        self.pose = check_poses(start[None])[0, 0].double()
        self._rotation = self.pose[:3, :3]
        # Turned and tilted since the start, and how far up the start looks, in radians.
        self._turned = self._tilted = 0.0
        self._elevation = math.asin(max(-1.0, min(1.0, -float(self._rotation[1, 2]))))
        self._velocity = [0.0, 0.0, 0.0, 0.0]  # forward, right, turn right, tilt up
        self._held: frozenset[str] = frozenset()

    def move(self, actions: str) -> Tensor:
        """The poses (F, 4, 4), float64, of the next F video frames. Actions and errors as in `parse_actions`."""
        steps = [self._step(held) for held in parse_actions(actions)]
        forward, right, turned, tilted = torch.tensor(steps, dtype=torch.float64).unbind(-1)
        R = _about(turned, 2, 0) @ self._rotation @ _about(tilted, 1, 2)
        level = R[..., [2, 0]] * R.new_tensor([1.0, 0.0, 1.0])[:, None]  # the camera's forward and right on the ground
        level = torch.nn.functional.normalize(level, dim=-2)
        poses = self.pose.repeat(len(R), 1, 1)
        poses[:, :3, :3] = R
        poses[:, :3, 3] += (level @ torch.stack([forward, right], dim=-1)[..., None])[..., 0].cumsum(0)
        self.pose = poses[-1].clone()
        return poses

    def _step(self, held: frozenset[str]) -> tuple[float, float, float, float]:
        """One frame's way forward and to the right, and its turn and tilt since the start."""
        motion, turn = self.motion, math.radians(self.motion.turn)
        scales = (motion.speed, "w", "s"), (motion.speed, "l", "j"), (turn, "d", "a"), (turn, "i", "k")
        target = [scale * ((plus in held) - (minus in held)) for scale, plus, minus in scales]
        if motion.smooth and held <= self._held:
            target = [
                now + (goal - now) * -math.expm1(-1 / motion.frames_per_second / (0.45 if goal else 1.0))
                for now, goal in zip(self._velocity, target, strict=True)
            ]
        self._velocity, self._held = target, held
        forward, right, turn, tilt = target
        limit = math.radians(motion.pitch_limit)
        low, high = min(-limit, self._elevation), max(limit, self._elevation)
        self._tilted = max(low, min(high, self._elevation + self._tilted + tilt)) - self._elevation
        self._turned += turn
        return forward, right, self._turned, self._tilted


def actions_to_poses(actions: str, motion: Motion | None = None) -> Tensor:
    """Poses (1 + F, 4, 4), float64, of a film that begins at the identity and has F frames of actions.

    See `Steering` for the keys, `parse_actions` for the text and its errors.
    """
    steering = Steering(motion)
    return torch.cat([steering.pose[None], steering.move(actions)])


def _about(angle: Tensor, i: int, j: int) -> Tensor:
    """(F,) radians to rotations (F, 3, 3) of axis i towards axis j."""
    R = torch.eye(3, dtype=angle.dtype).repeat(len(angle), 1, 1)
    R[:, i, i] = R[:, j, j] = angle.cos()
    R[:, j, i], R[:, i, j] = angle.sin(), -angle.sin()
    return R
