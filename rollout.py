"""Continue a video with a model that train.py saved: chunk by chunk; each chunk sees all earlier ones.

python rollout.py --model runs/demo --first_frames clip.mp4 --num_chunks 8 --output film.mp4

The film is written as it is made, and can be watched meanwhile. SIGINT and SIGTERM finish it with what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from frame_gdn import checks
from frame_gdn.chunks import ChunkGrid
from frame_gdn.pipeline import FrameGDNRolloutPipeline
from models import VideoDiT
from training.cli import one_line, positive, run, whole
from training.latents import Codec, latent_shape, load_codec
from training.pretrained import load_safely
from training.video import VideoWriter, read_video, video_fps

TEXT_FIELDS = ("prompt_embeds", "prompt_attention_mask")


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="the output_dir of train.py")
    parser.add_argument("--first_frames", type=Path, required=True, help="a video whose beginning is continued")
    parser.add_argument("--num_chunks", type=whole(1), required=True, help="chunks to generate")
    parser.add_argument("--output", type=Path, required=True, help="the film: the first frames and what follows them")
    parser.add_argument(
        "--num_first_chunks", type=whole(1), default=1, help="chunks taken from the video (default: 1)"
    )
    parser.add_argument(
        "--num_inference_steps", type=whole(1), default=20, help="denoising steps a chunk (default: 20)"
    )
    parser.add_argument("--seed", type=whole(0, 2**63 - 1), default=0, help="of the noise (default: 0)")
    parser.add_argument("--height", type=whole(1), help="default: what the model was trained at")
    parser.add_argument("--width", type=whole(1), help="default: what the model was trained at")
    parser.add_argument(
        "--fps", type=positive, help="default: what the model was trained at, else the video's own rate"
    )
    parser.add_argument(
        "--prompt_embeds",
        type=Path,
        help="for a model that reads text: a safetensors file with prompt_embeds (L, E) and prompt_attention_mask (L)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(args: argparse.Namespace, interrupt: Interrupt) -> None:
    """Generate the film. Whatever is wrong with what was given is a ValueError, before anything is generated."""
    check_model(args.model)
    check_output(args.output, args.first_frames)
    device = usable_device(args.device)
    text = read_text(args.prompt_embeds, device)
    size, file_fps = clip_size(args), video_fps(args.first_frames)
    pipeline, codec = load_model(args.model, device)
    first = first_latents(args, codec, size, ChunkGrid.of(pipeline.transformer.config))
    chunks = pipeline.stream(
        first,
        num_chunks=args.num_chunks,
        num_inference_steps=args.num_inference_steps,
        generator=torch.Generator().manual_seed(args.seed),  # on the CPU: the same film on every device
        **text,
    )
    with VideoWriter(args.output, size["fps"] or file_fps) as film:
        try:
            for frames in codec.decode_stream(chunk[0] for chunk in chain([first], chunks)):
                with interrupt.held():
                    film.write(frames)
        except KeyboardInterrupt:
            pass
        interrupt.is_held = True  # until the film is finished
    made = f"{film.num_frames} frames, {float(film.num_frames / film.fps):.1f} s"
    if interrupt.signal:
        print(f"rollout.py: interrupted: {args.output} holds {made}", file=sys.stderr)
        sys.exit(128 + interrupt.signal)
    print(f"{args.output}: {made}")


class Interrupt:
    """SIGINT and SIGTERM as one KeyboardInterrupt, which does not come while a frame is written.

    Attributes:
        signal: the number of the one that was received, 0 before.
        is_held: whether it waits.
    """

    def __init__(self) -> None:
        self.signal, self.is_held = 0, False

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Where one that is received is raised at the end only."""
        self.is_held = True
        yield
        self.is_held = False
        if self.signal:
            raise KeyboardInterrupt

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.signal
        self.signal = self.signal or number
        if is_first and not self.is_held:
            raise KeyboardInterrupt


def check_model(folder: Path) -> None:
    """Raises ValueError for a folder without what train.py saves."""
    for name in ("model_index.json", "codec.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no {name} in {folder}: it is not what train.py saves of a chunk-causal model")


def check_output(output: Path, first_frames: Path) -> None:
    """Raises ValueError where no film can be written to `output`."""
    VideoWriter(output, fps=1)  # which looks at the suffix
    if output.is_dir():
        raise ValueError(f"--output {output} is a folder: give the name of a file")
    if output.exists() and first_frames.exists() and output.samefile(first_frames):
        raise ValueError(f"--output {output} is --first_frames, which it would overwrite: give another name")
    place = next(path for path in (output, *output.absolute().parents) if path.exists())
    if place != output and not place.is_dir():
        raise ValueError(f"--output {output} cannot be written: {place} is a file, no folder")
    if not os.access(place, os.W_OK):
        raise ValueError(f"--output {output} cannot be written: no permission for {place}")


def usable_device(name: str) -> torch.device:
    """Raises ValueError for what torch does not know, or does not find in this machine."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {name!r} cannot be used: {one_line(error)}") from error
    return device


def read_text(path: Path | None, device: torch.device) -> dict[str, Tensor]:
    """The pipeline's text, of a batch of one. Raises ValueError for a file that does not hold it."""
    if path is None:
        return {}
    try:
        text = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"--prompt_embeds {path}: not a safetensors file that can be read ({one_line(error)})"
        ) from error
    if "prompt_embeds" not in text or not text.keys() <= set(TEXT_FIELDS):
        raise ValueError(f"--prompt_embeds {path} must hold {' and '.join(TEXT_FIELDS)}, got {sorted(text)}")
    return {name: tensor[None].to(device) for name, tensor in text.items()}


def load_model(folder: Path, device: torch.device) -> tuple[FrameGDNRolloutPipeline, Codec]:
    """The pipeline and the codec that train.py saved. Raises ValueError where they cannot be loaded."""
    try:
        transformer = load_safely(VideoDiT, folder, "transformer")
        pipeline = FrameGDNRolloutPipeline.from_pretrained(folder, transformer=transformer)
    except Exception as error:  # diffusers' own are of many classes
        raise ValueError(f"{folder}: the model cannot be loaded ({one_line(error)})") from error
    description = read_json(folder / "codec.json")
    try:
        codec = load_codec(description, device)
    except Exception as error:  # as above, of a VAE
        raise ValueError(f"{folder / 'codec.json'}: the codec cannot be loaded ({one_line(error)})") from error
    if codec.channels != transformer.config.in_channels:
        raise ValueError(
            f"{folder}: the codec makes latents of {codec.channels} channels, the model takes "
            f"{transformer.config.in_channels}"
        )
    return pipeline.to(device), codec


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError for anything but a JSON object."""
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {checks.shown(value)}")
    return value


def clip_size(args: argparse.Namespace) -> dict[str, Any]:
    """Height, width and fps as asked for, else as in training. Raises ValueError where neither says how large."""
    trained = args.model / "config.yaml"
    size = dict.fromkeys(("height", "width", "fps"))
    if trained.is_file():
        try:
            config = yaml.safe_load(trained.read_text())
        except (yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{trained}: not YAML ({one_line(error)})") from error
        data = config.get("data") if isinstance(config, Mapping) else None
        if not isinstance(data, Mapping):
            raise ValueError(
                f"{trained} must hold the options of train.py, with a mapping `data`, got {config!r:.100}"
            )
        size |= {name: data.get(name) for name in size}
        checks.number(f"{trained}: data.fps", size["fps"], 0, above=True, optional=True)
        for name in ("height", "width"):
            checks.integer(f"{trained}: data.{name}", size[name], 1, optional=True)
    size |= {name: getattr(args, name) for name in size if getattr(args, name) is not None}
    missing = [f"--{name}" for name in ("height", "width") if size[name] is None]
    if missing:
        raise ValueError(f"{trained} does not say at what size the model was trained: give {' and '.join(missing)}")
    return size


def first_latents(args: argparse.Namespace, codec: Codec, size: dict[str, Any], grid: ChunkGrid) -> Tensor:
    """The latents (1, C, T, h, w) of the video's first chunks."""
    latent_frames = grid.bounds(args.num_first_chunks - 1)[1]
    num_frames = 1 + codec.frame_ratio * (latent_frames - 1)
    latent_shape(codec, num_frames, size["height"], size["width"])
    return codec.encode(read_video(args.first_frames, num_frames=num_frames, **size))[None]


def command_line(arguments: Sequence[str] | None = None) -> None:
    args = parse_args(arguments)
    with Interrupt() as interrupt:
        try:
            run("rollout.py", lambda: main(args, interrupt))
        except KeyboardInterrupt:
            print("rollout.py: interrupted before the first frame", file=sys.stderr)
            sys.exit(128 + interrupt.signal)


if __name__ == "__main__":
    command_line()
