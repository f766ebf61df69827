"""SANA-WM's streaming checkpoint to a folder that diffusers reads, and back.

    python -m frame_gdn.convert sana_wm_streaming sana_dit/model.pt OUT
    python -m frame_gdn.convert to_sana_wm_streaming OUT model.pt

The first writes `OUT/transformer` for `frame_gdn.hosts.sana_wm.SanaWMTransformer3DModel.from_pretrained` and `OUT` for
`frame_gdn.FrameGDNRolloutPipeline.from_pretrained`; call that with `sigmas=SIGMAS` and guidance off. The second writes
what NVlabs' code loads, of a model that was fine-tuned here. Weights keep their dtype unless `--dtype` names another.
"""

from . import needs_diffusers as needs_diffusers  # isort: skip

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from .hosts.sana_wm import SanaWMTransformer3DModel
from .hosts.sana_wm.attention import padded_head_dim
from .pipeline import FrameGDNRolloutPipeline

#: What the release computes and no weight tells: its grid of chunks, its window, and NVlabs' readings.
STREAMING: dict[str, Any] = {
    "chunk_frames": 3,
    "first_chunk_frames": 4,
    "softmax_window": 2,
    "softmax_sink": True,
    "camera_conv_past": True,
    "camera_rescale": False,
}

#: The noise levels that the release was distilled for, as the pipeline's `sigmas`; the last step ends at 0.
SIGMAS = (1.0, 0.96, 0.889, 0.727)

#: In NVlabs' names: the model within its training wrapper, and the two layers of the time embedding.
PREFIX = "model."
RENAMED = {"t_embedder.mlp.0.": "t_embedder.linear_1.", "t_embedder.mlp.2.": "t_embedder.linear_2."}

#: Entries of the checkpoint that diffusers' model has no use for: a table that rotary positions replace, and the
#: embedding of the empty caption, which guidance in training needs.
DROPPED = ("pos_embed", "y_embedder.y_embedding")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def to_diffusers(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> SanaWMTransformer3DModel:
    """Write the generator of a streaming checkpoint as a diffusers folder; returns the transformer.

    Args:
        checkpoint: NVlabs' `sana_dit/model.pt`, a file of torch.save with an entry "generator". It is mapped, not
            read into memory, and nothing in it but tensors and plain containers is unpickled.
        folder: is made; it must be empty or absent.
        config: the transformer's configuration where it is not the released one; it overrides `STREAMING`.
        dtype: of the weights that are written, but for A_log and dt_bias, which stay float32. None keeps the file's.

    Raises:
        ValueError: a file that is no such checkpoint, weights that do not fit the configuration (all names that are
            missing, unexpected or of another shape are listed), a folder that is not empty.
    """
    folder = empty_folder(folder)
    weights = {renamed(name): tensor for name, tensor in read_generator(checkpoint).items()}
    with torch.device("meta"):
        head_dim = dict(config or {}).get("linear_head_dim", 112)
        options = {"softmax_scale": padded_head_dim(head_dim) ** -0.5, **STREAMING, **(config or {})}
        transformer: SanaWMTransformer3DModel = SanaWMTransformer3DModel.from_config(options)
    weights = fitted(weights, transformer.state_dict())
    if dtype is not None:
        keep = SanaWMTransformer3DModel._keep_in_fp32_modules
        weights = {n: t if n.rsplit(".", 1)[-1] in keep else t.to(dtype) for n, t in weights.items()}
    transformer.load_state_dict(weights, assign=True)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    FrameGDNRolloutPipeline(transformer, scheduler).save_pretrained(folder)
    return transformer


def from_diffusers(
    folder: str | os.PathLike[str],
    checkpoint: str | os.PathLike[str],
    *,
    original: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Write a streaming model of a folder as NVlabs' checkpoint; returns its entries that are lacking.

    Args:
        folder: what `to_diffusers` or a fine-tuning wrote: a pipeline's folder, or the transformer's own.
        checkpoint: the file to write, {"generator": weights}. It must not exist.
        original: the release's own model.pt, from which the entries `DROPPED` are taken.

    Raises:
        ValueError: a folder without a SANA-WM transformer, an existing file, an `original` that is no checkpoint.
    """
    folder, checkpoint = Path(folder), Path(checkpoint)
    if checkpoint.exists():
        raise ValueError(f"{checkpoint} exists: name a file that does not")
    source = folder / "transformer" if (folder / "transformer").is_dir() else folder
    if not (source / "config.json").is_file():
        raise ValueError(f"{folder} holds no transformer: there is no {source / 'config.json'}")
    name = json.loads((source / "config.json").read_text()).get("_class_name")
    if name != SanaWMTransformer3DModel.__name__:
        raise ValueError(f"{source} must hold a {SanaWMTransformer3DModel.__name__}, its config.json says {name}")
    weights = SanaWMTransformer3DModel.from_pretrained(source, torch_dtype="auto").state_dict()
    if original is not None:
        kept = read_generator(original)
        weights.update({name: kept[name] for name in DROPPED if name in kept})
    back = {theirs: ours for ours, theirs in RENAMED.items()}
    generator = {PREFIX + renamed(name, back): tensor.contiguous() for name, tensor in weights.items()}
    partial = checkpoint.with_name(f".{checkpoint.name}.partial")
    torch.save({"generator": generator}, partial)
    os.replace(partial, checkpoint)
    return [name for name in DROPPED if PREFIX + name not in generator]


def read_generator(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights of the entry "generator", by their names without the prefix "model."."""
    path = Path(checkpoint)
    if not path.is_file():
        raise ValueError(f"checkpoint must be a file, there is none at {path}")
    try:
        saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{path} is no checkpoint of weights alone: {' '.join(str(error).split())[:200]}") from error
    generator = saved.get("generator") if isinstance(saved, dict) else None
    if not isinstance(generator, Mapping) or not generator:
        entries = list(saved) if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"{path} must hold weights in an entry 'generator', it holds {entries}")
    other = [name for name, value in generator.items() if not isinstance(value, Tensor)]
    if other:
        raise ValueError(f"{path}: the entry 'generator' must hold tensors alone, these are none: {other}")
    weights = {name.removeprefix(PREFIX): tensor for name, tensor in generator.items()}
    if len(weights) < len(generator):
        raise ValueError(f"{path}: some names are there both with and without the prefix {PREFIX!r}")
    return weights


def renamed(name: str, names: Mapping[str, str] = RENAMED) -> str:
    """A weight's name in the other library."""
    for theirs, ours in names.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def fitted(weights: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights without `DROPPED`, each in the shape that the model asks for (a 1×1 convolution may be a matrix).

    Raises ValueError that lists all names which are missing, unexpected or of another shape.
    """
    weights = {name: tensor for name, tensor in weights.items() if name not in DROPPED}
    missing = sorted(wanted.keys() - weights.keys())
    unexpected = sorted(weights.keys() - wanted.keys())
    mismatched = [
        f"{name} {tuple(weights[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in wanted.items()
        if name in weights and without_ones(weights[name]) != without_ones(tensor)
    ]
    if missing or unexpected or mismatched:
        raise ValueError(
            "the checkpoint does not fit the model's configuration: "
            f"missing {missing}, unexpected {unexpected}, of another shape {mismatched}"
        )
    return {name: tensor.reshape(wanted[name].shape) for name, tensor in weights.items()}


def without_ones(tensor: Tensor) -> tuple[int, ...]:
    """The shape without its last dimensions of size 1."""
    shape = list(tensor.shape)
    while shape and shape[-1] == 1:
        shape.pop()
    return tuple(shape)


def empty_folder(folder: str | os.PathLike[str]) -> Path:
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"the output {folder} must be an empty folder or not exist")
    return folder


def main(arguments: list[str] | None = None) -> None:
    """The command line. Whatever is wrong with its arguments is one line on stderr, and exit code 2."""
    about = "SANA-WM's streaming checkpoint to a folder that diffusers reads, and back"
    parser = argparse.ArgumentParser(prog="python -m frame_gdn.convert", description=about)
    commands = parser.add_subparsers(dest="command", required=True)
    there = commands.add_parser("sana_wm_streaming", help="NVlabs' sana_dit/model.pt to a diffusers folder")
    there.add_argument("checkpoint", type=Path)
    there.add_argument("folder", type=Path)
    there.add_argument("--config", type=Path, help="the transformer's config.json where it is not the released one")
    there.add_argument("--dtype", choices=DTYPES, help="of the weights that are written; default: as in the file")
    back = commands.add_parser("to_sana_wm_streaming", help="a diffusers folder to NVlabs' model.pt")
    back.add_argument("folder", type=Path)
    back.add_argument("checkpoint", type=Path)
    back.add_argument("--original", type=Path, help="the release's model.pt, for the entries that diffusers drops")
    args = parser.parse_args(arguments)
    try:
        if args.command == "sana_wm_streaming":
            config = None if args.config is None else read_config(args.config)
            dtype = None if args.dtype is None else DTYPES[args.dtype]
            to_diffusers(args.checkpoint, args.folder, config=config, dtype=dtype)
            print(f"{args.folder}: written")
        else:
            lacking = from_diffusers(args.folder, args.checkpoint, original=args.original)
            print(f"{args.checkpoint}: written" + (f", without {', '.join(lacking)}" if lacking else ""))
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def read_config(path: Path) -> dict[str, Any]:
    """A configuration as diffusers writes it; ValueError for a file that holds none."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"--config {path} must hold a mapping, it holds {type(config).__name__}")
    return config


if __name__ == "__main__":
    main()
