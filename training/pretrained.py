"""Folders of pretrained models: where they are on this machine, and what tells one from another."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

WEIGHTS = frozenset({".bin", ".json", ".model", ".safetensors"})
"""Suffixes of what a model's results depend on."""

SAMPLED = 64 << 20
"""Bytes beyond which of a file only parts are read, evenly spread: other weights differ all over."""


def local_folder(name_or_path: str, *parts: str) -> Path:
    """The folder of a model given by its path, or by its hub name, of which the `parts` are downloaded.

    Args:
        parts: patterns of files in the folder.

    Raises:
        ValueError: there is neither.
    """
    if os.path.isdir(name_or_path):
        return Path(name_or_path)
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(parts)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{name_or_path} is no folder, and no model of the hub that can be had: {error}") from error


def weights_digest(folder: Path) -> str:
    """A digest of a model's weights and configuration, the same wherever the folder is and whatever saved it.

    Raises:
        ValueError: there are none.
    """
    digest, files = hashlib.sha256(), sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS)
    if not files:
        raise ValueError(f"{folder} holds no weights and no configuration")
    for path in files:
        digest.update(f"{path.name}\0{path.stat().st_size if path.name != 'config.json' else ''}\0".encode())
        if path.name == "config.json":
            digest.update(json.dumps(_configuration(path), sort_keys=True).encode())
            continue
        with open(path, "rb") as file:
            size, window = path.stat().st_size, 1 << 16
            step = window if size <= SAMPLED else size // (SAMPLED // window)
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(window))
    return digest.hexdigest()[:32]


def _configuration(path: Path) -> dict[str, Any]:
    """A configuration without what says where it was and what wrote it. Raises ValueError for no JSON object."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} must hold a JSON object, got a {type(config).__name__}")
    return {key: value for key, value in config.items() if key[:1] != "_" and key != "transformers_version"}


def load_safely(cls: Any, name_or_path: str | Path, subfolder: str | None, **options: Any) -> Any:
    """`cls.from_pretrained` of a model's folder or hub name, from safetensors alone: other formats may run code.

    Raises:
        ValueError: naming a file that is missing or cannot be read, or weights that are missing.
    """
    where = f"{name_or_path}/{subfolder}" if subfolder else f"{name_or_path}"
    try:
        model, found = cls.from_pretrained(
            str(name_or_path), subfolder=subfolder, use_safetensors=True, output_loading_info=True, **options
        )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # diffusers' own are of many classes
        raise ValueError(f"{where}: no {cls.__name__} can be read from its safetensors: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise ValueError(f"{where}: its safetensors lack {len(missing)} weights of a {cls.__name__}, as {missing[0]}")
    return model
