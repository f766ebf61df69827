"""A checkpoint restores a run to the bit, and no file of a checkpoint or a model can run code."""

import contextlib
import io
import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file

from models import VideoDiT
from tests.helpers import fill_randomly
from training.checkpoints import PROGRESS, Checkpoints, _digest_of, describe_files
from training.config import TrainConfig
from training.hosts import load_transformer
from training.optimization import parameter_groups
from training.ranks import Ranks
from training.state import RunState, random_states, set_random_states


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Run:
    """A tiny model with its optimizer and average, as train.py has them."""

    def __init__(self, accelerator: Accelerator, *, use_ema: bool = True, split: bool = True) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
        groups = parameter_groups(self.model, 0.1) if split else [{"params": list(self.model.parameters())}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.average = EMAModel(self.model.parameters(), decay=0.9) if use_ema else None
        self.state = RunState(accelerator, self.model, self.optimizer, self.average)

    def step(self) -> float:
        x = torch.randn(5, 3) + random.random() + np.random.rand()
        loss = self.model(x).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.average is not None:
            self.average.step(self.model.parameters())
        self.state.steps_of_schedule += 1
        return loss.item()


def checkpoints(folder: Path, run: Run) -> Checkpoints:
    return Checkpoints(folder, Ranks(), run.state, limit=None, config=TrainConfig(), layout={})


def test_a_restored_run_goes_on_to_the_bit(accelerator: Accelerator, tmp_path: Path) -> None:
    first = Run(accelerator)
    for _ in range(3):
        first.step()
    checkpoints(tmp_path, first).save(3)
    losses = [first.step() for _ in range(3)]

    second = Run(accelerator)
    second.optimizer.param_groups[0].update(lr=0.1, weight_decay=0.1)
    saved = checkpoints(tmp_path, second)
    assert saved.load(saved.find("latest")) == 3 and second.state.steps_of_schedule == 3
    assert [second.step() for _ in range(3)] == losses
    for a, b in zip(first.average.shadow_params, second.average.shadow_params, strict=True):
        assert torch.equal(a, b)


def test_options_of_the_optimizer_are_the_resuming_run_s(accelerator: Accelerator, tmp_path: Path) -> None:
    first = Run(accelerator)
    first.step()
    checkpoints(tmp_path, first).save(1)
    second = Run(accelerator)
    second.optimizer.param_groups[0].update(lr=0.5, weight_decay=0.3, betas=(0.5, 0.6), eps=1e-3)
    saved = checkpoints(tmp_path, second)
    saved.load(saved.find("latest"))
    group = second.optimizer.param_groups[0]
    assert (group["lr"], group["weight_decay"], group["betas"], group["eps"]) == (0.5, 0.3, (0.5, 0.6), 1e-3)


def test_an_optimizer_with_other_groups_is_refused(accelerator: Accelerator, tmp_path: Path) -> None:
    run = Run(accelerator, split=False)
    run.step()
    checkpoints(tmp_path, run).save(1)
    saved = checkpoints(tmp_path, Run(accelerator))
    with pytest.raises(ValueError, match="in other groups: the groups in which weights decay"):
        saved.load(saved.find("latest"))
    smaller = Run(accelerator)
    smaller.model[0].requires_grad_(False)
    smaller.optimizer = torch.optim.AdamW(parameter_groups(smaller.model, 0.1))
    smaller.state.optimizer = smaller.optimizer
    saved = checkpoints(tmp_path, smaller)
    with pytest.raises(ValueError, match="moves other parameters than this run's.*: 0.bias and 1 more"):
        saved.load(saved.find("latest"))


def test_weights_that_are_not_finite_are_not_saved(accelerator: Accelerator, tmp_path: Path) -> None:
    run = Run(accelerator)
    checkpoints(tmp_path, run).save(1)
    with torch.no_grad():
        run.model[2].weight[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match="1 weights are not finite and not saved, 2.weight the first"):
        checkpoints(tmp_path, run).save(2)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]


def test_random_states_survive_json() -> None:
    states = json.loads(json.dumps(random_states()))
    draws = [(random.random(), np.random.randn(), torch.rand(3).tolist()) for _ in range(2)]
    set_random_states(states)
    assert [(random.random(), np.random.randn(), torch.rand(3).tolist()) for _ in range(2)] == draws


# --- a pickle in every file -----------------------------------------------------------------------------------------


class Planted:
    """What a pickle runs when it is read: it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def as_torch(marker: Path, **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save({"state": Planted(marker)}, buffer, **how)
    return buffer.getvalue()


PLANTS: dict[str, Callable[[Path], bytes]] = {
    "pickle": lambda marker: pickle.dumps(Planted(marker)),
    "torch": as_torch,
    "old torch": lambda marker: as_torch(marker, _use_new_zipfile_serialization=False),
}

ACCELERATE_FILES = (
    "custom_checkpoint_0.pkl",
    "optimizer.bin",
    "scheduler.bin",
    "pytorch_model.bin",
    "random_states_0.pkl",
    "scaler.pt",
    "sampler.bin",
    ".metadata",
)


def seal(folder: Path) -> None:
    """Make a checkpoint's digests fit its files, as somebody who plants one would."""
    progress = json.loads((folder / PROGRESS).read_text())
    progress.pop("digest")
    progress["files"] = describe_files(folder)
    (folder / PROGRESS).write_text(json.dumps({**progress, "digest": _digest_of(progress)}))


@pytest.mark.parametrize("plant", PLANTS)
def test_a_plant_runs_where_it_is_unpickled(tmp_path: Path, plant: str) -> None:
    (tmp_path / "file").write_bytes(PLANTS[plant](tmp_path / "marker"))
    with contextlib.suppress(RuntimeError):  # a bare pickle is no file of torch's, but it has run by then
        torch.load(tmp_path / "file", weights_only=False)
    assert (tmp_path / "marker").is_dir()


def test_no_file_of_a_checkpoint_runs_code(accelerator: Accelerator, tmp_path: Path) -> None:
    """A pickle in each of its files, with digests that fit or not, is an error that names the file."""
    run = Run(accelerator)
    run.step()
    checkpoints(tmp_path / "good", run).save(1)
    files = sorted(path.name for path in (tmp_path / "good" / "checkpoint-1").iterdir())
    assert len(files) == 6 and not set(files) & set(ACCELERATE_FILES)
    folder, marker = tmp_path / "planted" / "checkpoint-1", tmp_path / "marker"
    for name in files:
        for plant in PLANTS.values():
            for is_sealed in (False, True) if name != PROGRESS else (False,):
                shutil.rmtree(tmp_path / "planted", ignore_errors=True)
                shutil.copytree(tmp_path / "good", tmp_path / "planted")
                (folder / name).write_bytes(plant(marker))
                if is_sealed:
                    seal(folder)
                saved = checkpoints(tmp_path / "planted", Run(accelerator))
                with pytest.raises(ValueError, match=name):
                    saved.load(saved.find("latest"))
                assert not marker.exists(), name


def test_files_that_accelerate_would_unpickle_are_not_read(accelerator: Accelerator, tmp_path: Path) -> None:
    run = Run(accelerator)
    run.step()
    checkpoints(tmp_path, run).save(1)
    for name in ACCELERATE_FILES:
        for plant in PLANTS.values():
            (tmp_path / "checkpoint-1" / name).write_bytes(plant(tmp_path / "marker"))
            saved = checkpoints(tmp_path, Run(accelerator))
            assert saved.load(saved.find("latest")) == 1
            assert not (tmp_path / "marker").exists(), name
    os.remove(tmp_path / "checkpoint-1" / "model.safetensors")
    seal(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="model.safetensors"):  # and pytorch_model.bin is no replacement
        saved.load(saved.find("latest"))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name, change",
    [
        ("state.json", lambda state: state.pop("steps_of_schedule")),
        ("state.json", lambda state: state.update(steps_of_average="x")),
        ("random_states_0.json", lambda state: state.update(numpy=[[1], 2, 3, 4])),
        ("random_states_0.json", lambda state: state.update(torch="AAAA")),
        ("optimizer.safetensors", lambda state: state.update({"0.weight.exp_avg": torch.zeros(2)})),
        ("optimizer.safetensors", lambda state: state.pop("0.weight.exp_avg")),
        ("optimizer.safetensors", lambda state: state.update({"9.weight.step": torch.zeros(())})),
        ("average.safetensors", lambda state: state.pop("0.weight")),
        ("model.safetensors", lambda state: state.pop("0.weight")),
        ("model.safetensors", lambda state: state.update({"0.weight": torch.zeros(4, 4)})),
    ],
)
def test_a_file_that_belongs_to_another_run_is_named(
    accelerator: Accelerator, tmp_path: Path, name: str, change: Callable[[dict[str, Any]], None]
) -> None:
    run = Run(accelerator)
    run.step()
    checkpoints(tmp_path, run).save(1)
    path = tmp_path / "checkpoint-1" / name
    content: dict[str, Any] = json.loads(path.read_text()) if path.suffix == ".json" else load_file(path)
    change(content)
    if path.suffix == ".json":
        path.write_text(json.dumps(content))
    else:
        save_file(content, path)
    seal(path.parent)
    saved = checkpoints(tmp_path, Run(accelerator))
    with pytest.raises(ValueError, match=name):
        saved.load(saved.find("latest"))


def test_no_file_of_a_model_runs_code(tmp_path: Path) -> None:
    """Nor does a model that is a pickle alone: it is refused by its folder."""
    model = fill_randomly(VideoDiT(4, num_layers=1, num_attention_heads=2, attention_head_dim=12))
    model.save_pretrained(tmp_path / "good" / "transformer")
    folder, marker = tmp_path / "planted" / "transformer", tmp_path / "marker"
    files = sorted(path.name for path in (tmp_path / "good" / "transformer").iterdir())
    assert files == ["config.json", "diffusion_pytorch_model.safetensors"]

    def load() -> torch.nn.Module:
        return load_transformer(str(tmp_path / "planted"), torch.float32, {}, {})

    for plant in PLANTS.values():
        for name in files:
            shutil.rmtree(tmp_path / "planted", ignore_errors=True)
            shutil.copytree(tmp_path / "good", tmp_path / "planted")
            (folder / name).write_bytes(plant(marker))
            with pytest.raises(ValueError, match=f"{tmp_path / 'planted'}.*(config.json|safetensors)"):
                load()
        shutil.copytree(tmp_path / "good", tmp_path / "planted", dirs_exist_ok=True)
        (folder / "diffusion_pytorch_model.bin").write_bytes(plant(marker))
        assert all(torch.equal(tensor, model.state_dict()[key]) for key, tensor in load().state_dict().items())
        os.remove(folder / "diffusion_pytorch_model.safetensors")
        with pytest.raises(ValueError, match="no VideoDiT can be read from its safetensors"):
            load()
    assert not marker.exists()
