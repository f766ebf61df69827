"""Continue a video with a model that train.py saved: chunk after chunk, each in view of all that came before.

python rollout.py --model runs/demo --first_frames clip.mp4 --num_chunks 8 --output film.mp4
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from frame_gdn.pipeline import FrameGDNRolloutPipeline
from models import VideoDiT
from training.hosts import load_safely
from training.latents import Codec, load_codec
from training.video import read_video, video_fps, write_video


def parse_args(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="the output_dir of train.py")
    parser.add_argument("--first_frames", type=Path, required=True, help="a video whose beginning is continued")
    parser.add_argument("--num_chunks", type=int, required=True, help="chunks to generate")
    parser.add_argument("--output", type=Path, required=True, help="the film: the first frames and what follows them")
    parser.add_argument("--num_first_chunks", type=int, default=1, help="chunks taken from the video (default: 1)")
    parser.add_argument("--num_inference_steps", type=int, default=20, help="denoising steps a chunk (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (default: 0)")
    parser.add_argument("--height", type=int, help="default: what the model was trained at")
    parser.add_argument("--width", type=int, help="default: what the model was trained at")
    parser.add_argument("--fps", type=float, help="default: what the model was trained at, else the video's own rate")
    parser.add_argument(
        "--prompt_embeds",
        type=Path,
        help="for a model that reads text: a safetensors file with prompt_embeds (L, E) and prompt_attention_mask (L)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    for name in ("num_chunks", "num_first_chunks", "num_inference_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    return args


def main(args: argparse.Namespace) -> None:
    pipeline, codec = load_model(args.model, args.device)
    size = clip_size(args)
    latents = first_latents(args, codec, size, pipeline.transformer.config.chunk_frames)
    text = {} if args.prompt_embeds is None else load_file(args.prompt_embeds)
    film = pipeline(
        latents,
        num_chunks=args.num_chunks,
        num_inference_steps=args.num_inference_steps,
        generator=torch.Generator().manual_seed(args.seed),  # on the CPU: the same film on every device
        **{name: tensor[None].to(args.device) for name, tensor in text.items()},
    ).latents
    video = codec.decode(torch.cat([latents, film], dim=2)[0])
    fps = size["fps"] or video_fps(args.first_frames)
    write_video(args.output, video, fps)
    print(f"{args.output}: {len(video)} frames, {float(len(video) / fps):.1f} s")


def load_model(folder: Path, device: str) -> tuple[FrameGDNRolloutPipeline, Codec]:
    """The pipeline and the codec that train.py saved. Raises ValueError for a folder without them."""
    for name in ("model_index.json", "codec.json"):
        if not (folder / name).is_file():
            raise ValueError(f"no {name} in {folder}: it is not what train.py saves of a chunk-causal model")
    transformer = load_safely(VideoDiT, folder, "transformer")
    pipeline = FrameGDNRolloutPipeline.from_pretrained(folder, transformer=transformer)
    return pipeline.to(device), load_codec(json.loads((folder / "codec.json").read_text()), device)


def clip_size(args: argparse.Namespace) -> dict[str, Any]:
    """Height, width and fps as asked for, else as in training. Raises ValueError where neither says how large."""
    trained = args.model / "config.yaml"
    size = dict.fromkeys(("height", "width", "fps"))
    if trained.is_file():
        size |= {name: yaml.safe_load(trained.read_text())["data"].get(name) for name in size}
    size |= {name: getattr(args, name) for name in size if getattr(args, name) is not None}
    missing = [f"--{name}" for name in ("height", "width") if size[name] is None]
    if missing:
        raise ValueError(f"{trained} does not say at what size the model was trained: give {' and '.join(missing)}")
    return size


def first_latents(args: argparse.Namespace, codec: Codec, size: dict[str, Any], chunk_frames: int) -> Tensor:
    """The latents (1, C, T, h, w) of the video's first chunks."""
    latent_frames = args.num_first_chunks * chunk_frames
    num_frames = 1 + codec.frame_ratio * (latent_frames - 1)
    return codec.encode(read_video(args.first_frames, num_frames=num_frames, **size))[None]


if __name__ == "__main__":
    try:
        main(parse_args())
    except ValueError as error:
        raise SystemExit(f"rollout.py: {error}") from error
