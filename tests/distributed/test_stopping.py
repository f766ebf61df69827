"""Runs that are asked to end, whose launcher or whose other ranks are gone, or whose folder is taken."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

import train
from training.checkpoints import damage, read_metrics
from training.data import write_shard

# train.py, which also notes each rank's process and the code that it exits with.
NOTING = """
import os, pathlib, runpy, sys
notes = pathlib.Path(os.environ["NOTES"])
rank = os.environ.get("RANK", "0")
(notes / f"process{rank}").write_text(str(os.getpid()))
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as exit:
    (notes / f"code{rank}").write_text(repr(exit.code))
    raise
"""


class Launched:
    """A run of train.py that would go on for hours: `accelerate launch` and its ranks."""

    def __init__(self, folder: Path, ranks: int, *arguments: str) -> None:
        self.ranks, self.output_dir, self.notes = ranks, folder / "out", folder / "notes"
        self.notes.mkdir(exist_ok=True)
        (folder / "noting.py").write_text(NOTING.replace("sys.argv[0]", repr(train.__file__)))
        clips = {f"clip{i}.latents": torch.randn(192, 4, 4, 4) for i in range(4)}
        write_shard(folder / "data" / "clips.safetensors", clips, {"kind": "haar", "scale": 1.0})
        model = {"patch_size": 2, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12}
        options = {f"model.{key}": value for key, value in model.items()} | {
            "model.chunk_frames": 2,
            "data.shards": folder / "data",
            "output_dir": self.output_dir,
            "cp_size": ranks,
            "max_train_steps": 100_000,
            "checkpointing_steps": 100_000,
            "report_to": "none",
        }
        how = ["--multi_gpu"] if ranks > 1 else []
        how += [f"--num_processes={ranks}", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no"]
        command = [sys.executable, "-m", "accelerate.commands.launch", *how, "--main_process_port=0"]
        command += [str(folder / "noting.py"), *(f"--{key}={value}" for key, value in options.items()), *arguments]
        self.log = (folder / "log").open("w+")
        self.launcher = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "NOTES": str(self.notes), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def wait_for(self, condition: Callable[[], bool], seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)

    def train_a_little(self) -> None:
        metrics = self.output_dir / "metrics.jsonl"

        def has_steps() -> bool:
            assert self.launcher.poll() is None, self.output()
            return metrics.exists() and len(read_metrics(metrics)) >= 3

        self.wait_for(has_steps)

    def process(self, rank: int) -> psutil.Process:
        return psutil.Process(int((self.notes / f"process{rank}").read_text()))

    def codes(self) -> list[str]:
        """What each rank exited with, once all have."""
        files = [self.notes / f"code{rank}" for rank in range(self.ranks)]
        self.wait_for(lambda: all(file.exists() and file.read_text() for file in files))
        return [file.read_text() for file in files]

    def checkpoint(self) -> int:
        """The step of the one checkpoint, which is whole and as far as the metrics are."""
        (path,) = self.output_dir.glob("checkpoint-*")
        assert damage(path) is None
        step = int(path.name.removeprefix("checkpoint-"))
        assert [line["step"] for line in read_metrics(self.output_dir / "metrics.jsonl")][-1] == step
        return step

    def end(self) -> None:
        for file in self.notes.glob("process*"):
            try:
                tree = psutil.Process(int(file.read_text()))
                for process in [*tree.children(recursive=True), tree]:
                    process.kill()
            except psutil.NoSuchProcess:
                pass
        self.launcher.kill()
        self.launcher.wait(30)
        self.log.close()


ROOT = Path(train.__file__).parent


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    runs: list[Launched] = []

    def launch(ranks: int, *arguments: str) -> Launched:
        runs.append(Launched(tmp_path, ranks, *arguments))
        return runs[-1]

    yield launch
    for run in runs:
        run.end()


@pytest.mark.slow
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, "0"), (signal.SIGINT, "130")], ids=["SIGTERM", "SIGINT"])
def test_a_signal_to_the_launcher_ends_the_step_and_writes_a_checkpoint(
    launched: Callable[..., Launched], number: signal.Signals, code: str
) -> None:
    """Also with workers of the data loader, which the launcher signals too. And a second run is refused meanwhile."""
    run = launched(2, "--dataloader_num_workers=1")
    run.train_a_little()
    if number == signal.SIGTERM:
        arguments = [sys.executable, train.__file__, *run.process(0).cmdline()[3:], "--cp_size=1"]
        second = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert second.returncode == 1
        last = second.stdout.splitlines()[-1]
        assert re.search(f"train.py: output_dir .* still goes on, process {run.process(0).pid} on ", last), last
    run.launcher.send_signal(number)
    assert run.codes() == [code, code], run.output()
    run.launcher.wait(60)
    assert run.checkpoint() >= 3


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all(launched: Callable[..., Launched]) -> None:
    run = launched(2)
    run.train_a_little()
    run.process(1).send_signal(signal.SIGINT)
    assert run.codes() == ["130", "130"], run.output()
    assert run.checkpoint() >= 3


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_whose_launcher_was_killed_end_by_themselves(launched: Callable[..., Launched], ranks: int) -> None:
    run = launched(ranks)
    run.train_a_little()
    processes = [run.process(rank) for rank in range(ranks)]
    run.launcher.kill()
    assert run.codes() == ["0"] * ranks, run.output()
    assert psutil.wait_procs(processes, timeout=30)[1] == []
    assert run.checkpoint() >= 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "stalled"])
def test_a_rank_that_is_gone_is_named_with_the_last_collective_of_each(
    launched: Callable[..., Launched], number: signal.Signals
) -> None:
    run = launched(2, "--collective_timeout=5")
    run.train_a_little()
    victim = run.process(1)
    victim.send_signal(number)
    code = run.notes / "code0"
    run.wait_for(lambda: code.exists() and bool(code.read_text()))
    report = code.read_text()
    who = rf"rank 1 \(process {victim.pid} on {re.escape(os.uname().nodename)}\)"
    assert re.search(rf"{who} gives no sign of life; last seen in step \d+", report), report
    assert re.search(r"rank 0 \(process \d+ on .*\) is in step \d+, batch 0 for \d+ s, at .*, last collective", report)
    assert report.count("last collective") == 2, report
