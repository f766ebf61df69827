"""What `data:` names (videos, shards) and how: whatever cannot be used is an error that names it."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from training.data import VideoLatents
from training.latents import HaarCodec, load_codec

NOT_COUNTS = [0, -1, 1.5, True, "8", [8], math.nan]
DATA: dict[str, list[Any]] = {
    **dict.fromkeys(("height", "width", "num_frames"), [*NOT_COUNTS, None]),
    "stride": NOT_COUNTS,
    "fps": [0, -1.0, True, "8", [8], math.nan, math.inf],
    "latent_scale": [0, -1.0, True, "1", [1], None, math.nan, math.inf],
    "prompt_dropout": [-0.1, 1.1, True, "0.1", None, math.nan],
    "seed": [-1, 1.5, True, "0", None],
    "cache_dir": [3, None, True, ["x"], ""],
    "videos": [3, True, {}, [], [3], ""],
}


@pytest.mark.parametrize("name", DATA)
def test_a_wrong_argument_of_the_data_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    for value in DATA[name]:
        with pytest.raises(ValueError) as error:
            VideoLatents(**{"videos": "demo", "cache_dir": tmp_path / "cache", name: value})
            pytest.fail(f"{name}={value!r} was taken")
        assert name.removeprefix("latent_") in str(error.value), (value, str(error.value))


def shard(**tensors: torch.Tensor) -> Callable[[Path], Any]:
    metadata = {"codec": '{"kind": "haar", "scale": 0.43}'}
    return lambda path: save_file({f"a.{name}": tensor for name, tensor in tensors.items()}, path, metadata)


def bytes_of(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


SHARDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no file": (lambda path: None, "no clip in the 0"),
    "an empty file": (bytes_of(b""), "one.safetensors"),
    "a text": (bytes_of(b"hello"), "one.safetensors"),
    "binary": (bytes_of(bytes(range(256)) * 9), "one.safetensors"),
    "a folder": (lambda path: path.mkdir(), "one.safetensors"),
    "no codec": (lambda path: save_file({"a.latents": torch.zeros(1)}, path), "one.safetensors: no `codec`"),
    "a codec that is no JSON": (
        lambda path: save_file({"a.latents": torch.zeros(1)}, path, {"codec": "{"}),
        "one.safetensors",
    ),
    "no latents": (shard(prompt_embeds=torch.zeros(2, 3)), "clip 'a' has .* but no latents"),
    "latents of another rank": (shard(latents=torch.zeros(2, 3)), r"one.safetensors.*\(2, 3\)|latents"),
    "no tensors": (lambda path: save_file({}, path, {"codec": '{"kind": "haar", "scale": 1.0}'}), "no clip in"),
}


@pytest.mark.parametrize("kind", SHARDS)
def test_a_wrong_shard_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    make, message = SHARDS[kind]
    make(tmp_path / "one.safetensors")
    with pytest.raises(ValueError, match=message):
        VideoLatents(shards=tmp_path)


@pytest.mark.parametrize("shards", [3, True, "", [], "nothing", __file__])
def test_shards_that_are_no_folder_are_an_error_that_names_them(shards: Any) -> None:
    with pytest.raises(ValueError, match="shards"):
        VideoLatents(shards=shards)


@pytest.mark.parametrize("scale", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_a_wrong_scale_of_the_wavelets_is_an_error(scale: Any) -> None:
    with pytest.raises(ValueError, match="scale must be a finite number above 0"):
        HaarCodec(scale)


@pytest.mark.parametrize("description", [{}, {"kind": "dct"}, {"kind": "haar"}, {"kind": "vae"}, {"scale": 1.0}])
def test_a_codec_that_is_not_described_is_an_error(description: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a codec is of kind 'haar' or 'vae', got"):
        load_codec(description)
