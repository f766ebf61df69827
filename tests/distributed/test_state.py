"""A checkpoint of weights and optimizer that FSDP shards: restored to the bit, without a pickle in any file."""

import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.distributed.helpers import run_ranks
from training.checkpoints import PROGRESS, Checkpoints, _digest_of, describe_files
from training.config import TrainConfig
from training.optimization import parameter_groups
from training.ranks import Ranks
from training.state import RunState


class Planted:
    """What a pickle runs when it is read: it makes a folder."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def sharded_run(rank: int, world_size: int) -> tuple[RunState, Callable[[], float]]:
    """A tiny model and AdamW, sharded as accelerate's FSDP2 shards them, and a step of training."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(parameter_groups(model, 0.1), lr=0.1)
    accelerator = SimpleNamespace(
        distributed_type=DistributedType.FSDP, process_index=rank, is_main_process=rank == 0, scaler=None
    )

    def step() -> float:
        loss = model(torch.randn(4, 5)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return RunState(accelerator, model, optimizer, None), step


def save_and_resume(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Losses after a save, those after its resumption, and what is said of two checkpoints with pickles in them."""
    found: list[Any] = []
    with Ranks.joined(stall=60) as ranks:

        def restored() -> Callable[[], float]:
            state, step = sharded_run(rank, world_size)
            saved = Checkpoints(folder, ranks, state, limit=None, config=TrainConfig(), layout={})
            assert saved.load(saved.find("latest")) == state.steps_of_schedule == 2
            return step

        state, step = sharded_run(rank, world_size)
        step()
        step()
        state.steps_of_schedule = 2
        Checkpoints(folder, ranks, state, limit=None, config=TrainConfig(), layout={}).save(2)
        found.append([step(), step()])
        step = restored()
        found.append([step(), step()])
        for kind in ("pickle", "torch"):
            ranks.on_main(lambda kind=kind: plant(folder / "checkpoint-2", kind, folder / "marker"))
            try:
                restored()
            except ValueError as error:
                found.append(str(error))
    return found


def plant(checkpoint: Path, kind: str, marker: Path) -> None:
    """Pickles in place of a shard and where torch's own format has one, with digests that fit."""
    buffer = io.BytesIO()
    torch.save(Planted(marker), buffer)
    content = pickle.dumps(Planted(marker)) if kind == "pickle" else buffer.getvalue()
    sorted((checkpoint / "sharded").iterdir())[-1].write_bytes(content)
    (checkpoint / "sharded" / ".metadata").write_bytes(content)
    progress = json.loads((checkpoint / PROGRESS).read_text())
    progress.pop("digest")
    progress["files"] = describe_files(checkpoint)
    (checkpoint / PROGRESS).write_text(json.dumps({**progress, "digest": _digest_of(progress)}))


def test_sharded_weights_and_optimizer_are_restored_to_the_bit_and_never_unpickled(tmp_path: Path) -> None:
    (losses, restored, *messages), other = run_ranks(2, save_and_resume, tmp_path)
    assert other == [losses, restored, *messages]
    assert restored == losses and len(set(losses)) == 2
    assert len(messages) == 2 and not (tmp_path / "marker").exists()
    for message in messages:
        assert f"{tmp_path / 'checkpoint-2' / 'sharded'} does not hold this run's weights and optimizer" in message
    files = [path for path in (tmp_path / "checkpoint-2").rglob("*") if path.is_file()]
    assert {path.suffix for path in files if path.name != ".metadata"} == {".json", ".safetensors"}


def disagree(rank: int, world_size: int) -> list[Any]:
    """Values of all ranks, of the main one, and errors of one of them."""
    with Ranks.joined(stall=60) as ranks:
        found: list[Any] = [ranks.gather(rank), ranks.on_main(lambda: f"from {rank}")]

        def fail(where: int, kind: type[Exception]) -> None:
            if rank == where:
                raise kind(f"rank {rank} says no")

        for call in (
            lambda: ranks.everywhere(lambda: fail(1, ValueError)),
            lambda: ranks.on_main(lambda: fail(0, OSError)),
            lambda: ranks.main_first(lambda: fail(1, FloatingPointError)),
        ):
            try:
                call()
            except (ValueError, OSError, FloatingPointError) as error:
                found.append(f"{type(error).__name__}: {error}")
        found.append(ranks.gather(None))
    dist.barrier()
    return found


def test_what_one_rank_says_or_refuses_is_known_to_all() -> None:
    expected = [
        [0, 1],
        "from 0",
        "ValueError: rank 1 says no",
        "OSError: rank 0 says no",
        "FloatingPointError: rank 1 says no",
        [None, None],
    ]
    assert run_ranks(2, disagree) == [expected] * 2
