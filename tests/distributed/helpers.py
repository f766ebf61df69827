"""Real processes for the distributed tests: gloo on the CPU, a file as the meeting point, one thread a rank."""

import datetime
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_s: int = 60, backend: str = "gloo"
) -> list[Any]:
    """function(rank, world_size, *args) in `world_size` processes; what they return, by rank. With NCCL for a backend
    each rank has the GPU of its number.

    `function` must be importable (a module-level function) and return something that torch.save can write. An
    exception in a rank is raised here with that rank's traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = processes_that_have_imported()
        # As bytes: torch would send every tensor as an open file, and a fork server takes only so many.
        task = pickle.dumps((function, args))
        processes = [
            context.Process(target=_main, args=(rank, world_size, folder, timeout_s, backend, task), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout_s + 60)
        failures = []
        results: list[Any] = []
        for rank, process in enumerate(processes):
            path = os.path.join(folder, f"result{rank}")
            if process.is_alive():
                process.kill()
                failures.append(f"rank {rank} hung")
            elif not os.path.exists(path):
                failures.append(f"rank {rank} died with exit code {process.exitcode}")
            else:
                ok, value = torch.load(path, weights_only=False)
                results.append(value)
                if not ok:
                    failures.append(f"rank {rank}:\n{value}")
        if failures:
            raise AssertionError("\n".join(failures))
        return results


def processes_that_have_imported() -> Any:
    """The multiprocessing context for ranks: forked from a server that has imported the packages, which takes seconds.

    Where there is a GPU they are spawned, since a process that uses CUDA cannot be forked.
    """
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["train"])
    return context


def _main(rank: int, world_size: int, folder: str, timeout_s: int, backend: str, task: bytes) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    function, args = pickle.loads(task)
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        outcome = (True, function(rank, world_size, *args))
    except Exception:
        outcome = (False, traceback.format_exc())
    torch.save(outcome, f"{folder}/result{rank}.partial")
    os.replace(f"{folder}/result{rank}.partial", f"{folder}/result{rank}")
    if outcome[0]:
        dist.destroy_process_group()


def split(total: int, sizes: list[int], rank: int) -> slice:
    """The slice of dimension `total` that `rank` holds."""
    assert sum(sizes) == total
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
