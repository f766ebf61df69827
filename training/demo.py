"""`make demo`: train the model of configs/demo.yaml on real clips with two CPU processes, then let it continue them.

What it leaves in the configuration's output_dir: `loss.png` and `metrics.jsonl` beside the checkpoints, `film.mp4` (a
row for each clip: the film on the left, the clip itself on the right) and `demo.json`, the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import torch
from diffusers.utils import logging
from torch import Tensor

from frame_gdn import FrameGDNRolloutPipeline
from frame_gdn.chunks import ChunkGrid
from models import VideoDiT
from training.checkpoints import read_metrics
from training.cli import run
from training.config import TrainConfig, parse_config
from training.data import VideoLatents
from training.evaluation import continuation_psnr, continue_clip
from training.latents import load_codec
from training.pretrained import load_safely
from training.video import write_video

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "configs" / "demo.yaml"
NUM_PROCESSES = 2
FPS = 24
ENLARGE = 4


def main() -> None:
    config = parse_config(["--config", str(CONFIG)], {"model": VideoDiT, "data": VideoLatents})
    output_dir = ROOT / config.output_dir
    started = time.perf_counter()
    train()
    results = plot_loss(output_dir) | roll_out(config, output_dir)
    results["seconds"] = round(time.perf_counter() - started)
    (output_dir / "demo.json").write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))
    for name, what in {
        "film.mp4": "a row for each clip: rolled out from its first frames on the left, the true clip on the right",
        "loss.png": "the falling loss",
        "demo.json": "these numbers",
        "transformer": "the trained model",
    }.items():
        print(f"{(output_dir / name).relative_to(ROOT)}: {what}")


def train() -> None:
    """Two processes, one context-parallel group; a run that was stopped goes on, one that is done returns at once."""
    launch = ["--multi_gpu", f"--num_processes={NUM_PROCESSES}", "--num_machines=1", "--mixed_precision=no"]
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch, "--dynamo_backend=no", "train.py"]
    command += ["--config", str(CONFIG.relative_to(ROOT)), "--resume_from_checkpoint", "latest"]
    on_cpu = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # whatever the machine has, two processes need no two GPUs
    if status := subprocess.run(command, cwd=ROOT, env=on_cpu).returncode:
        sys.exit(status)  # what went wrong is said by then


def plot_loss(output_dir: Path) -> dict[str, Any]:
    """loss.png, and the loss averaged over the first and last tenth of the steps."""
    loss = np.array([line["loss"] for line in read_metrics(output_dir / "metrics.jsonl")])
    tenth = max(1, len(loss) // 10)
    window = max(1, len(loss) // 50)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    axes.semilogy(np.arange(1, len(loss) + 1), loss, color="0.8", label="a step")
    smooth = np.convolve(loss, np.ones(window) / window, mode="valid")
    axes.semilogy(np.arange(len(smooth)) + (window + 1) / 2, smooth, label=f"mean of {window}")
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(output_dir / "loss.png", dpi=150)
    plt.close(figure)
    return {"steps": len(loss), "loss_first_tenth": loss[:tenth].mean(), "loss_last_tenth": loss[-tenth:].mean()}


def roll_out(config: TrainConfig, output_dir: Path) -> dict[str, Any]:
    """film.mp4 and its psnr: three chunks from the first chunk of the first clip of each video file."""
    data = VideoLatents(**config.data)
    codec = load_codec(data.codec)
    logging.disable_progress_bar()
    transformer = load_safely(VideoDiT, output_dir, "transformer")
    pipeline = FrameGDNRolloutPipeline.from_pretrained(output_dir, transformer=transformer)
    pipeline.set_progress_bar_config(disable=True)
    num_given = 1 + codec.frame_ratio * (ChunkGrid.of(pipeline.transformer.config).bounds(0)[1] - 1)
    starts = {name.split("/")[0]: index for index, name in reversed(list(enumerate(data.names)))}

    rows, scores = [], []
    for index in sorted(starts.values()):
        film = codec.decode(
            continue_clip(pipeline, data[index], num_inference_steps=config.validation_inference_steps)
        )
        truth = codec.decode(data[index]["latents"])
        rows.append(side_by_side(film, truth))
        film_psnr, repeat_last_psnr = continuation_psnr(film, truth, num_given)
        scores.append({"start": data.names[index], "psnr": film_psnr, "psnr_repeat_last": repeat_last_psnr})
    write_video(output_dir / "film.mp4", torch.cat(rows, dim=1), FPS)
    means = {key: sum(score[key] for score in scores) / len(scores) for key in ("psnr", "psnr_repeat_last")}
    return {**means, "starts": scores}


def side_by_side(film: Tensor, truth: Tensor) -> Tensor:
    """Two videos (T, H, W, 3) next to each other, enlarged."""
    both = torch.cat([film, truth], dim=2)
    return both.repeat_interleave(ENLARGE, dim=1).repeat_interleave(ENLARGE, dim=2)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()  # it takes no options
    run("training.demo", main)
