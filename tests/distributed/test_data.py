"""Ranks that read one data set: while one of them encodes it, and where they find different clips."""

import time
from pathlib import Path

import pytest
import torch

import train
import training.data
from tests.distributed.helpers import run_ranks
from training.data import VideoLatents, write_shard
from training.ranks import Ranks
from training.video import write_video

TIMEOUT = 3  # seconds of a collective, and of whoever waits in one


def encode_slowly(rank: int, world_size: int, folder: Path) -> tuple[list[str], int, str]:
    """The clips that a rank finds, how many files it encoded itself, and the error where clips differ."""
    real, encoded = training.data._encode_video, []

    def slow(*arguments: object) -> None:
        encoded.append(arguments[0])
        time.sleep(TIMEOUT)
        real(*arguments)

    training.data._encode_video = slow
    with Ranks.joined(stall=600.0) as ranks:
        options = {"height": 16, "width": 16, "num_frames": 9, "cache_dir": folder / "cache"}
        data = ranks.main_first(lambda: VideoLatents(folder / "videos", **options))
        train.check_alike(ranks, data)
        try:
            train.check_alike(ranks, VideoLatents(shards=folder / f"shards{rank}"))
        except ValueError as error:
            return data.names, len(encoded), str(error)
    return data.names, len(encoded), "none"


@pytest.mark.slow
def test_ranks_wait_for_an_encoding_that_outlasts_the_timeout_and_agree_on_the_clips(tmp_path: Path) -> None:
    for index in range(3):
        levels = (torch.arange(9) + 20 * index).to(torch.uint8).view(-1, 1, 1, 1)
        write_video(tmp_path / "videos" / f"{index}.mp4", levels.expand(9, 16, 16, 3), fps=8)
    for rank in range(2):
        clips = {f"{name}.latents": torch.zeros(4, 3, 2, 2) for name in "abc"[: 2 + rank]}
        write_shard(tmp_path / f"shards{rank}" / "0.safetensors", clips, {"kind": "haar", "scale": 1.0})
    results = run_ranks(2, encode_slowly, tmp_path, timeout_s=TIMEOUT)
    names = [f"{index}.mp4/000000" for index in range(3)]
    message = "the ranks see other clips, 2, 3 of them by rank: all must read one folder, unchanged"
    assert results == [(names, 3, message), (names, 0, message)]
