"""train.py on transformers of diffusers: from a saved folder, through swap, to a folder that loads again."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import SanaVideoTransformer3DModel
from safetensors.torch import load_file
from torch import Tensor

pytest.importorskip("diffusers", minversion="0.42")  # which has SANA-WM

import train
from frame_gdn import swap
from frame_gdn.hosts import sana_video
from tests.distributed.helpers import run_ranks
from tests.distributed.test_train import losses_and_weights, run_training
from tests.helpers import relative_error
from tests.hosts import sana_wm
from tests.hosts.warm_start import keep_float64, tiny_inputs, tiny_model
from training.config import TrainConfig
from training.data import write_shard
from training.hosts import GATES

FRAMES, HEIGHT, WIDTH, TEXT = 5, 4, 6, 6
HOSTS = ("sana_video", "wan", "sana_wm")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clips with text and a camera, without, and a stock model of each host with all parameters random."""
    folder = tmp_path_factory.mktemp("inputs")
    generator = torch.Generator().manual_seed(0)
    clips: dict[str, Tensor] = {}
    camera = sana_wm.tiny_inputs(FRAMES)["camera_conditions"]
    for i in range(4):
        clips[f"clip{i}.latents"] = torch.randn(4, FRAMES, HEIGHT, WIDTH, generator=generator)
        clips[f"clip{i}.prompt_embeds"] = torch.randn(TEXT, 8, generator=generator)
        clips[f"clip{i}.prompt_attention_mask"] = (torch.arange(TEXT) < 4 + i % 2).to(torch.uint8)
        clips[f"clip{i}.camera_conditions"] = camera[i % 2].clone()
        clips[f"clip{i}.chunk_plucker"] = torch.randn(8, FRAMES, HEIGHT, WIDTH, generator=generator)
    write_shard(folder / "camera" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    for unwanted in ("camera_conditions", "chunk_plucker"):
        clips = {name: tensor for name, tensor in clips.items() if not name.endswith(unwanted)}
    write_shard(folder / "text" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    for host in HOSTS:
        model = sana_wm.tiny_model() if host == "sana_wm" else tiny_model(host)
        model.save_pretrained(folder / host / "transformer")
    return folder


def options(inputs: Path, output_dir: Path, host: str = "sana_video", **overrides: Any) -> TrainConfig:
    values = {
        "pretrained_model_name_or_path": str(inputs / host),
        "data": {"shards": str(inputs / ("camera" if host == "sana_wm" else "text"))},
        "output_dir": str(output_dir),
        "weight_dtype": "float64",
        "train_batch_size": 2,
        "max_train_steps": 3,
        "learning_rate": 1e-2,
        "checkpointing_steps": 100,
        "report_to": "none",
    }
    return TrainConfig(**{**values, **overrides})


def run_exactly(rank: int, world_size: int, configs: list[TrainConfig]) -> None:
    """SANA-WM first: its rays mix the float32 that the host casts to with float32 that it makes."""
    run_training(rank, world_size, [config for config in configs if "sana_wm" in config.output_dir])
    keep_float64()
    run_training(rank, world_size, [config for config in configs if "sana_wm" not in config.output_dir])


@pytest.mark.slow
def test_every_host_trains_the_same_over_frame_shards(inputs: Path, tmp_path: Path) -> None:
    runs: dict[str, dict[str, Any]] = {
        "sana_video": {},
        "sana_video-chunks": {"swap": {"chunk_frames": 2, "start_scale": 0.5}},
        "wan-chunks": {"swap": {"blocks": [0, 2], "chunk_frames": 2}, "gradient_checkpointing": True},
        "sana_wm": {},
        "sana_wm-nocam": {"data": {"shards": str(inputs / "text")}},
    }
    for world_size in (1, 2):
        configs = [
            options(inputs, tmp_path / f"{name}-{world_size}", name.split("-")[0], cp_size=world_size, **overrides)
            for name, overrides in runs.items()
        ]
        run_ranks(world_size, run_exactly, configs, timeout_s=200)
    for name in runs:
        (losses, weights), (expected_losses, expected) = (
            losses_and_weights(tmp_path / f"{name}-{world_size}") for world_size in (2, 1)
        )
        tolerance = 1e-5 if name.startswith("sana_wm") else 1e-9
        torch.testing.assert_close(losses, expected_losses, rtol=tolerance, atol=0)
        assert len(set(losses.tolist())) == 3
        start = load_file(inputs / name.split("-")[0] / "transformer" / "diffusion_pytorch_model.safetensors")
        for key, weight in weights.items():
            error = relative_error(weight, expected[key])
            assert error < tolerance, f"{name}: {key} differs by {error}"
            idle = (
                "raymap" in key
                or "recall_gate" in key
                or (name == "sana_wm-nocam" and ("_cam" in key or "plucker_" in key))
            )
            moved = key not in start or not torch.equal(weight, start[key].double())
            assert moved != idle, f"{name}: {key} moved: {moved}"


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.long)])
def test_every_host_trains_in_mixed_precision(inputs: Path, tmp_path: Path, world_size: int) -> None:
    """The losses are those of float32 but for the rounding, and the weights stay float32."""
    shared = {"weight_dtype": "float32", "learning_rate": 1e-3, "cp_size": world_size}
    configs = [
        options(inputs, tmp_path / f"{host}-{precision}", host, mixed_precision=precision, **shared)
        for host in HOSTS
        for precision in ("no", "bf16")
    ]
    run_ranks(world_size, run_training, configs, timeout_s=200)
    for host in HOSTS:
        exact, _ = losses_and_weights(tmp_path / f"{host}-no")
        losses, weights = losses_and_weights(tmp_path / f"{host}-bf16")
        assert not torch.equal(losses, exact)
        torch.testing.assert_close(losses, exact, rtol=0.02, atol=0)
        assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.slow
def test_the_folder_loads_and_a_resumed_run_is_the_uninterrupted_one(inputs: Path, tmp_path: Path) -> None:
    shared = {"weight_dtype": "float32", "swap": {"chunk_frames": 2}, "checkpointing_steps": 2}
    whole = options(inputs, tmp_path / "whole", **shared)
    first = options(inputs, tmp_path / "resumed", **{**shared, "max_train_steps": 2})
    then = options(inputs, tmp_path / "resumed", **shared, resume_from_checkpoint="latest")
    further = options(
        inputs, tmp_path / "further", **{**shared, "swap": {}}, pretrained_model_name_or_path=str(tmp_path / "whole")
    )
    run_ranks(1, run_training, [whole, first, then, further])

    (losses, weights), (expected_losses, expected) = (losses_and_weights(tmp_path / n) for n in ("resumed", "whole"))
    assert torch.equal(losses, expected_losses)
    assert all(torch.equal(weights[key], expected[key]) for key in expected | weights)

    model = sana_video.SanaVideoTransformer3DModel.from_pretrained(tmp_path / "whole", subfolder="transformer")
    trained = load_file(tmp_path / "whole" / "checkpoint-3" / "model.safetensors")
    assert model.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[key]) for key, tensor in model.state_dict().items())
    assert model.config.chunk_frames == 2
    again = sana_video.SanaVideoTransformer3DModel.from_pretrained(tmp_path / "further", subfolder="transformer")
    assert again.config.chunk_frames == 2  # `swap: {}` leaves what the folder says


@pytest.mark.slow
def test_gates_alone_or_beside_a_lora_are_trained_and_saved_as_a_plain_model(inputs: Path, tmp_path: Path) -> None:
    gates = options(inputs, tmp_path / "gates", weight_dtype="float32", train_gates_only=True, use_ema=True)
    lora = options(inputs, tmp_path / "lora", weight_dtype="float32", lora_rank=2)
    run_ranks(1, run_training, [gates, lora])

    stock = SanaVideoTransformer3DModel.from_pretrained(inputs / "sana_video", subfolder="transformer")
    start = swap(stock).state_dict()
    projections = ("attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0.weight")
    for name, trained in (("gates", GATES), ("lora", (*GATES, *projections))):
        model = sana_video.SanaVideoTransformer3DModel.from_pretrained(tmp_path / name, subfolder="transformer")
        weights = model.state_dict()
        assert weights.keys() == start.keys()
        moved = {key for key in start if not torch.equal(weights[key], start[key])}
        assert moved == {key for key in start if any(part in key for part in trained)}
        with torch.no_grad():
            assert model(**tiny_inputs()).sample.isfinite().all()


@pytest.mark.slow
def test_the_example_runs_offline(tmp_path: Path) -> None:
    script = Path(train.__file__).parent / "examples" / "finetune_sana_video.py"
    command = [sys.executable, str(script), "--tiny", "--output_dir=out", "--max_train_steps=2", "--lora_rank=2"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "at the first of 2 steps" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"model": {"num_layers": 2}}, "`model` must be empty"),
        ({"swap": {"blocks": [7]}}, "from 0 to 2"),
        ({"validation_steps": 1}, "needs a VideoDiT"),
        ({"data": {"shards": "bare"}}, "reads text of width 8, the data has no prompt_embeds"),
    ],
)
def test_mistakes_are_named_before_anything_runs(
    inputs: Path, tmp_path: Path, overrides: dict[str, Any], message: str
) -> None:
    clips = {"clip.latents": torch.zeros(4, FRAMES, HEIGHT, WIDTH)}
    write_shard(tmp_path / "bare" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    if "data" in overrides:
        overrides = {"data": {"shards": str(tmp_path / "bare")}}
    config = options(inputs, tmp_path / "out", **overrides)
    with pytest.raises(ValueError, match=message):
        model = train.build_model(config, 4, torch.float32)
        train.check_data(model, train.VideoLatents(**config.data).shapes)


def test_options_that_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        TrainConfig(pretrained_model_name_or_path="x", train_gates_only=True, lora_rank=2)
    with pytest.raises(ValueError, match="swap is for"):
        TrainConfig(swap={"chunk_frames": 2})


def test_a_stranger_is_refused_by_name(inputs: Path, tmp_path: Path) -> None:
    os.makedirs(tmp_path / "transformer")
    (tmp_path / "transformer" / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(ValueError, match="holds a FluxTransformer2DModel; known are VideoDiT, SanaWM"):
        train.build_model(options(inputs, tmp_path, pretrained_model_name_or_path=str(tmp_path)), 4, torch.float32)
