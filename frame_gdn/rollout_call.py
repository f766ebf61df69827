"""What a rollout hands to its transformer in each call: the arguments of every model that can be rolled out, and what
may change from chunk to chunk."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import checks
from .camera import CameraConditions, CameraStream

Text = tuple[Tensor, Tensor | None]


class EachChunk:
    """What is given once for all chunks, as a sequence by chunk, or by an iterator that is asked when a chunk begins.

    Args:
        name: of the argument.
        given: a tensor for all chunks, a list or tuple of one value a chunk, or an iterator of them.
        check: makes a value what the model takes, or raises ValueError.
        num_chunks: how many will be asked for; None: no end.

    Raises:
        ValueError: a value that does not fit, and fewer of them than chunks.
    """

    def __init__(self, name: str, given: Any, check: Callable[[Any], Any], num_chunks: int | None) -> None:
        self.name, self.check, self.num_chunks = name, check, num_chunks
        self._always = self._values = None
        if isinstance(given, Tensor):
            self._always = check(given)
        elif isinstance(given, (list, tuple)) and all(isinstance(value, (Tensor, list, tuple)) for value in given):
            if num_chunks is not None and len(given) < num_chunks:
                raise ValueError(f"{name} is given for {len(given)} chunks, num_chunks is {num_chunks}")
            self._values = iter([check(value) for value in given])
        elif isinstance(given, Iterator):
            self._values = (check(value) for value in given)
        else:
            raise ValueError(
                f"{name} must be a tensor, a list of one a chunk or an iterator, got {checks.shown(given)}"
            )

    def take(self) -> Any:
        """The next chunk's value. Raises StopIteration at the end of a rollout that has no number of chunks, else
        ValueError."""
        if self._values is None:
            return self._always
        try:
            return next(self._values)
        except StopIteration:
            if self.num_chunks is None:
                raise
            raise ValueError(f"{self.name} ended before the {self.num_chunks} chunks did") from None


class CameraChunks:
    """The camera's conditions chunk by chunk.

    Args:
        given: (poses, intrinsics) from the film's first frame on; a sequence or an iterator of such pairs, each of
            what one chunk needs; or a `CameraStream`.
        size: h, w of the latents.
        consumed: latent frames before the first that is asked for.
        end: the latent frame before which the rollout ends; None: no end.

    Raises:
        ValueError: poses that do not reach to the end, a stream that stands elsewhere, and as `CameraStream`.
    """

    def __init__(self, given: Any, size: Sequence[int], consumed: int, end: int | None) -> None:
        self._values: Iterator[Any] | None = None
        if isinstance(given, CameraStream):
            self.stream = given
            if given.frames != consumed:
                raise ValueError(f"camera stands at latent frame {given.frames}, the rollout at {consumed}")
            return
        self.stream = CameraStream(size[0] * 32, size[1] * 32)
        if isinstance(given, (list, tuple)) and len(given) == 2 and _is_poses(given[0]):
            self.stream.add(*given)
            if end is not None and self.stream.video_frames_for(end):
                raise ValueError(
                    f"camera needs a pose for each of the film's {8 * (end - 1) + 1} video frames, got "
                    f"{self.stream.video_frames}"
                )
            if consumed:
                self.stream.take(consumed)
        elif isinstance(given, Iterator) or (isinstance(given, (list, tuple)) and given):
            if consumed:
                raise ValueError("camera by chunk goes on from a state as the CameraStream that was used before")
            self._values = iter(given)
        else:
            raise ValueError(
                f"camera must be (poses, intrinsics), by chunk or a CameraStream, got {checks.shown(given)}"
            )

    def take(self, frames: int) -> CameraConditions:
        """Those of the next latent frames; where a chunk's poses are missing, the iterator is asked."""
        while self._values is not None and self.stream.video_frames_for(frames):
            try:
                poses, intrinsics = next(self._values)
            except StopIteration:
                raise ValueError("camera ended before the rollout did") from None
            self.stream.add(poses, intrinsics)
        return self.stream.take(frames)


def _is_poses(value: Any) -> bool:
    shape = getattr(value, "shape", None)
    return shape is not None and len(shape) in (3, 4) and tuple(shape[-2:]) == (4, 4)


# --- the arguments of each model --------------------------------------------------------------------------------


def takes_camera(model: nn.Module) -> bool:
    """Whether a model reads camera conditions."""
    return type(model).__name__ == "SanaWMTransformer3DModel"


def camera_of(model: Any, conditions: CameraConditions, device: torch.device) -> dict[str, Any]:
    """A model's arguments that a chunk's camera makes, on its device: once for all of the chunk's passes."""
    # Poses stay in float32 at least: their inverses need its digits, and torch makes none in bfloat16.
    poses = moved(conditions.camera_conditions, device, torch.promote_types(model.dtype, torch.float32))
    plucker = moved(conditions.chunk_plucker, device, model.dtype)
    tables = model.camera_tables(poses, plucker.shape[2:]) if hasattr(model, "camera_tables") else {}
    return {"camera_conditions": poses, "chunk_plucker": plucker, **({"cam_pos_embeds": tables} if tables else {})}


def moved(t: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor on another device; from pinned memory to a GPU, so that nothing waits for what that still computes."""
    if t.device.type == "cpu" and device.type == "cuda":
        t = t.to(dtype).pin_memory()
    return t.to(device, dtype, non_blocking=True)


def arguments_of(
    model: Any, x: Tensor, timestep: Tensor, text: Text | None, camera: dict[str, Any] | None
) -> dict[str, Any]:
    """A model's arguments by name: x (B, C, T, h, w), timestep (B, T), the text (B, L, E) with its mask (B, L), the
    camera's as `camera_of` makes them."""
    embeds, mask = (None, None) if text is None else text
    name = type(model).__name__
    arguments: dict[str, Any] = {"hidden_states": x, "timestep": timestep, "encoder_hidden_states": embeds}
    if name == "SanaWMTransformer3DModel" and embeds is not None:
        arguments["timestep"] = timestep[:, None]
        arguments["encoder_hidden_states"] = embeds[:, None]
        arguments["encoder_attention_mask"] = (
            torch.ones_like(embeds[..., 0], dtype=torch.bool) if mask is None else mask
        )
        if camera is not None:
            tables = camera.get("cam_pos_embeds", {})
            arguments |= {name: _rows(t, x) for name, t in camera.items() if t is not tables}
            if tables:
                arguments["cam_pos_embeds"] = {name: _rows(t, x) for name, t in tables.items()}
    elif name in ("SanaVideoTransformer3DModel", "WanTransformer3DModel"):
        length, height, width = model.config.patch_size
        tokens = (x.shape[3] // height) * (x.shape[4] // width)
        arguments["timestep"] = timestep[:, ::length].repeat_interleave(tokens, 1)
        if name == "SanaVideoTransformer3DModel":
            arguments["encoder_attention_mask"] = mask
        elif mask is not None and embeds is not None:  # Wan takes no mask: what is behind a prompt's end is 0
            arguments["encoder_hidden_states"] = torch.where(mask.bool()[..., None], embeds, 0)
    else:
        arguments["encoder_attention_mask"] = mask
    return arguments


def _rows(t: Tensor, x: Tensor) -> Tensor:
    """Camera conditions for every row of x."""
    return t if len(t) == len(x) else t.repeat(len(x) // len(t), *[1] * (t.dim() - 1))
