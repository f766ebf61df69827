"""A checkpoint is whole or absent, and metrics.jsonl agrees with the one that a run resumes from."""

from pathlib import Path

import pytest

from training.checkpoints import Checkpoints, Metrics, read_metrics


class FakeAccelerator:
    """One process whose state is a file; `dies` is when a save is killed half way."""

    is_main_process = True
    step = 3

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        self.loaded: str | None = None

    def wait_for_everyone(self) -> None: ...

    def save_state(self, folder: str) -> None:
        Path(folder).mkdir()
        (Path(folder) / "model").write_text("half")
        if self.dies:
            raise KeyboardInterrupt
        (Path(folder) / "model").write_text("whole")

    def load_state(self, folder: str) -> None:
        self.loaded = folder


def checkpoints(folder: Path, accelerator: FakeAccelerator, limit: int | None = None, **layout: int) -> Checkpoints:
    return Checkpoints(folder, accelerator, limit=limit, layout={"seed": 0, **layout})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_that_is_killed_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path, FakeAccelerator()).save(10)
    with pytest.raises(KeyboardInterrupt):
        checkpoints(tmp_path, FakeAccelerator(dies=True)).save(20)

    accelerator = FakeAccelerator()
    resumed = checkpoints(tmp_path, accelerator)
    assert resumed.load(resumed.find("latest")) == 10
    assert accelerator.loaded == str(tmp_path / "checkpoint-10")
    resumed.save(20)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20"]
    assert (tmp_path / "checkpoint-20" / "model").read_text() == "whole"


def test_a_folder_that_lacks_its_last_file_is_not_a_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path, FakeAccelerator()).save(10)
    (tmp_path / "checkpoint-20").mkdir()
    assert checkpoints(tmp_path, FakeAccelerator()).find("latest").name == "checkpoint-10"


def test_older_checkpoints_beyond_the_limit_go_by_their_step(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path, FakeAccelerator(), limit=2)
    for step in (8, 9, 10, 9):  # resumed from 8, say, and so at 9 again
        saved.save(step)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]


def test_a_run_that_starts_anew_does_not_mix_with_another(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path, FakeAccelerator())
    assert saved.find(None) is None and saved.find("latest") is None
    saved.save(10)
    with pytest.raises(ValueError, match="checkpoint-10 of another run.*--resume_from_checkpoint latest"):
        saved.find(None)
    assert saved.find("checkpoint-10") == saved.find(str(tmp_path / "checkpoint-10")) == tmp_path / "checkpoint-10"
    with pytest.raises(ValueError, match="no complete checkpoint 'checkpoint-11'.*checkpoint-10"):
        saved.find("checkpoint-11")


def test_a_run_of_another_seed_or_batch_cannot_resume(tmp_path: Path) -> None:
    checkpoints(tmp_path, FakeAccelerator(), global_batch=4).save(10)
    other = checkpoints(tmp_path, FakeAccelerator(), global_batch=8)
    with pytest.raises(ValueError, match="'global_batch': 4.*'global_batch': 8"):
        other.load(other.find("latest"))


def test_metrics_drop_torn_lines_and_steps_that_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, steps_done=0)
    for step in (1, 2, 3):
        metrics.write(step=step, loss=0.5)
    with path.open("a") as file:
        file.write('{"step": 4, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    Metrics(path, steps_done=2).write(step=3, loss=0.25)
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 0.5), (2, 0.5), (3, 0.25)]
