"""A run that is killed again and again, whenever that may be, is in the end the run that was not.

    python -m pytest -m long --record tests/distributed/test_kills.py

writes what it saw to tests/results/kills.json.
"""

import json
import multiprocessing
import os
import platform
import random
import socket
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import train
from models import VideoDiT
from tests.distributed.test_train import as_if_launched
from tests.helpers import fill_randomly
from training.checkpoints import NAME, damage, read_metrics
from training.config import TrainConfig
from training.data import write_shard

KILLS, RANKS, STEPS = 50, 2, 40
RESULT = Path(__file__).parents[1] / "results" / "kills.json"


def options(folder: Path, name: str) -> TrainConfig:
    return TrainConfig(
        pretrained_model_name_or_path=str(folder / "model"),
        data={"shards": str(folder / "data")},
        output_dir=str(folder / name),
        cp_size=RANKS,
        max_train_steps=STEPS,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler="cosine",
        checkpointing_steps=2,
        checkpoints_total_limit=2,
        use_ema=True,
        validation_steps=10,
        validation_inference_steps=1,
        dataloader_num_workers=1,
        report_to="none",
        resume_from_checkpoint="latest",
    )


def train_on_rank(rank: int, port: int, config: TrainConfig, log: Path) -> None:
    """One rank of train.py; what ends it early is in the log."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        torch.set_num_threads(1)
        multiprocessing.set_start_method("fork", force=True)  # the data loader's workers, as without a forkserver
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
        as_if_launched(rank, RANKS)
        train.main(config)
    except BaseException:
        traceback.print_exc()
        raise


@dataclass
class Run:
    """A run of train.py in an output folder, in as many lives as it takes.

    Its processes are forked from one that has imported train.py, so that a life takes a second and not ten.
    """

    config: TrainConfig
    log: Path
    dice: random.Random
    kills: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["train", __name__])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        arguments = [(rank, port, self.config, self.log) for rank in range(RANKS)]
        self.ranks = [context.Process(target=train_on_rank, args=one) for one in arguments]
        for rank in self.ranks:
            rank.start()

    @property
    def output_dir(self) -> Path:
        return Path(self.config.output_dir)

    def has_ended(self) -> bool:
        """Whether all ranks have; an error of one is raised."""
        codes = [rank.exitcode for rank in self.ranks]
        assert all(code in (None, 0) for code in codes), self.log.read_text()[-5000:]
        return all(code == 0 for code in codes)

    def live_and_be_killed(self) -> bool:
        """One life: whether it was ended by a kill, at a random moment of starting, stepping or saving."""
        steps = len(self.steps())
        self.start()
        moment = self.dice.choice(["starting", "stepping", "saving", "saving"])
        delay = self.dice.random()
        while not self.has_ended():
            if moment == "starting":
                time.sleep(2 * delay)
                break
            if moment == "stepping" and self.steps() and len(self.steps()) != steps:
                time.sleep(delay)
                break
            if moment == "saving" and list(self.output_dir.glob(".partial-checkpoint-*")):
                time.sleep(0.05 * delay)
                break
            time.sleep(0.001)
        if self.has_ended():
            return False
        for rank in self.dice.sample(self.ranks, RANKS):
            rank.kill()
        for rank in self.ranks:
            rank.join(30)
        self.kills[moment] = self.kills.get(moment, 0) + 1
        return True

    def steps(self) -> list[int]:
        path = self.output_dir / "metrics.jsonl"
        return [line["step"] for line in read_metrics(path)] if path.exists() else []

    def damaged(self) -> list[str]:
        found = self.output_dir.iterdir() if self.output_dir.exists() else []
        folders = [path for path in found if NAME.fullmatch(path.name)]
        return [f"{path.name}: {problem}" for path in folders if (problem := damage(path))]

    def outcome(self) -> dict[str, Any]:
        """All that must be the same in the end."""
        keys = ("step", "loss", "grad_norm", "lr", "psnr", "psnr_repeat_last")
        lines = [{key: line.get(key) for key in keys} for line in read_metrics(self.output_dir / "metrics.jsonl")]
        names = sorted(path.name for path in self.output_dir.glob("checkpoint-*"))
        files = [f"{name}/{part}.safetensors" for name in names for part in ("model", "optimizer", "average")]
        files.append("transformer/diffusion_pytorch_model.safetensors")
        return {"metrics": lines, **{file: load_file(self.output_dir / file) for file in files}}


def is_same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_run_survives_fifty_kills_to_the_bit(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    began = time.monotonic()
    clips = {f"clip{i}.latents": torch.randn(192, 6, 4, 4) for i in range(8)}
    write_shard(tmp_path / "data" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
    model = VideoDiT(
        192,
        patch_size=2,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=12,
        ffn_expand_ratio=1.0,
        chunk_frames=3,
    )
    fill_randomly(model).save_pretrained(tmp_path / "model" / "transformer")
    dice = random.Random(0)

    whole = Run(options(tmp_path, "whole"), tmp_path / "whole.log", dice)
    whole.start()
    while not whole.has_ended():
        time.sleep(0.1)
    expected = whole.outcome()
    assert [line["step"] for line in expected["metrics"]] == list(range(1, STEPS + 1))

    runs: list[Run] = []
    while sum(sum(run.kills.values()) for run in runs) < KILLS:
        run = Run(options(tmp_path, f"killed{len(runs)}"), tmp_path / f"killed{len(runs)}.log", dice)
        runs.append(run)
        is_alive = True
        while is_alive and sum(sum(run.kills.values()) for run in runs) < KILLS:
            is_alive = run.live_and_be_killed()
            assert run.damaged() == []
        if is_alive:
            run.start()
            while not run.has_ended():
                time.sleep(0.1)
        assert is_same(run.outcome(), expected), run.output_dir

    if request.config.getoption("--record"):
        RESULT.parent.mkdir(exist_ok=True)
        result = {
            "kills": {
                moment: sum(run.kills.get(moment, 0) for run in runs) for moment in ("starting", "stepping", "saving")
            },
            "ranks": RANKS,
            "runs": len(runs),
            "steps_of_a_run": STEPS,
            "lives_of_each_run": [sum(run.kills.values()) + 1 for run in runs],
            "damaged_checkpoints": 0,
            "runs_that_differ_from_the_uninterrupted_one": 0,
            "seconds": round(time.monotonic() - began),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "accelerate": accelerate.__version__,
            },
            "command": "python -m pytest -m long --record tests/distributed/test_kills.py",
        }
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
