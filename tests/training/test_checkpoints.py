"""A checkpoint is whole or named as damaged, and metrics.jsonl agrees with the one that a run resumes from."""

import json
import logging
import multiprocessing
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from training.checkpoints import PROGRESS, Checkpoints, Metrics, damage, read_metrics, sole_run
from training.config import TrainConfig
from training.ranks import Ranks


class FakeState:
    """A run's state that is one file; `dies` is when a save is killed half way."""

    def __init__(self, dies: bool = False) -> None:
        self.dies = dies
        self.loaded: Path | None = None

    def save(self, folder: Path) -> None:
        (folder / "model").write_text("half")
        if self.dies:
            raise KeyboardInterrupt
        (folder / "model").write_text("whole")

    def load(self, folder: Path) -> None:
        self.loaded = folder


def checkpoints(folder: Path, state: FakeState | None = None, limit: int | None = None, **options: Any) -> Checkpoints:
    layout = {"global_batch": options.pop("global_batch", 1), "model.num_layers": options.pop("num_layers", 2)}
    config = TrainConfig(output_dir=str(folder), **options)
    return Checkpoints(folder, Ranks(), state or FakeState(), limit=limit, config=config, layout=layout)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_save_that_is_killed_leaves_the_last_whole_checkpoint(tmp_path: Path) -> None:
    checkpoints(tmp_path).save(10)
    with pytest.raises(KeyboardInterrupt):
        checkpoints(tmp_path, FakeState(dies=True)).save(20)

    state = FakeState()
    resumed = checkpoints(tmp_path, state)
    assert resumed.load(resumed.find("latest")) == 10
    assert state.loaded == tmp_path / "checkpoint-10"
    resumed.save(20)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-20"]
    assert (tmp_path / "checkpoint-20" / "model").read_text() == "whole"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "model is missing": lambda folder: (folder / "model").unlink(),
    "model has 3 bytes instead of 5": lambda folder: (folder / "model").write_text("who"),
    "the contents of model have changed": lambda folder: flip(folder / "model"),
    f"its {PROGRESS} is missing": lambda folder: (folder / PROGRESS).unlink(),
    f"{PROGRESS} cannot be read as JSON": lambda folder: os.truncate(folder / PROGRESS, 20),
    f"the contents of {PROGRESS} have changed": lambda folder: (folder / PROGRESS).write_text(
        (folder / PROGRESS).read_text().replace('"step": 20', '"step": 21')
    ),
    f"{PROGRESS} must hold a JSON object": lambda folder: (folder / PROGRESS).write_text("[1]"),
    "an earlier version of train.py wrote it": lambda folder: (folder / PROGRESS).write_text('{"step": 20}'),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_latest_goes_on_from_the_newest_whole_checkpoint_and_names_the_damaged(
    tmp_path: Path, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoints(tmp_path)
    for step in (5, 10, 20):
        saved.save(step)
    DAMAGES[reason](tmp_path / "checkpoint-20")
    assert saved.find("latest") == tmp_path / "checkpoint-10"
    assert "checkpoint-20 is passed over" in caplog.text and reason in caplog.text
    with pytest.raises(ValueError, match=f"checkpoint-20 cannot be resumed: .*{reason}"):
        saved.find("checkpoint-20")
    with pytest.raises(ValueError, match="another run"):  # damaged or not, it is one
        saved.find(None)

    (tmp_path / "checkpoint-5" / "model").unlink()
    (tmp_path / "checkpoint-10" / "model").unlink()
    with pytest.raises(ValueError, match="no checkpoint in .* can be resumed: .*checkpoint-5: model is missing"):
        saved.find("latest")


def test_a_damaged_checkpoint_does_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path, limit=2)
    for step in (5, 10, 20):
        saved.save(step)
    DAMAGES["model is missing"](tmp_path / "checkpoint-20")
    resumed = checkpoints(tmp_path, limit=2)
    assert resumed.find("latest") == tmp_path / "checkpoint-10"
    resumed.save(15)
    resumed.prune()
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-15", "checkpoint-20"]
    resumed.save(20)
    resumed.prune()
    assert names(tmp_path) == ["checkpoint-15", "checkpoint-20"] and damage(tmp_path / "checkpoint-20") is None


def test_old_checkpoints_stay_until_the_newest_is_known_to_be_good_and_go_as_they_were_written(tmp_path: Path) -> None:
    saved = checkpoints(tmp_path, limit=2)
    for step in (8, 9, 10):
        saved.save(step)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-8", "checkpoint-9"]
    saved.prune()
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-9"]
    saved.save(5)  # by a run that was resumed from an older one elsewhere
    saved.prune()
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-5"]
    assert saved.find("latest") == tmp_path / "checkpoint-5"


def test_a_run_that_starts_anew_says_so_and_does_not_mix_with_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = checkpoints(tmp_path / "run")
    assert saved.find(None) is None and not caplog.text
    assert saved.find("latest") is None and "there is no checkpoint in" in caplog.text
    saved.save(10)
    with pytest.raises(ValueError, match="checkpoint-10 of another run.*--resume_from_checkpoint latest"):
        saved.find(None)
    folder = tmp_path / "run" / "checkpoint-10"
    assert saved.find("checkpoint-10") == saved.find(str(folder)) == folder
    with pytest.raises(ValueError, match="checkpoint-11: there is no such folder; .* holds checkpoint-10"):
        saved.find("checkpoint-11")


def test_neighbours_with_odd_names_hurt_nothing_and_are_not_hurt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "checkpoint-best").mkdir()
    (tmp_path / "checkpoint-best" / "model").write_text("mine")
    (tmp_path / "checkpoint-").mkdir()
    (tmp_path / "checkpoint-007").mkdir()
    (tmp_path / "checkpoint--1").mkdir()
    (tmp_path / ".partial-thesis").mkdir()
    for file in (".partial-x", ".partial-metrics.jsonl", ".deleted-x", "checkpoint-3", "checkpoint-8"):
        (tmp_path / file).write_text("mine")
    (tmp_path / ".partial-checkpoint-4").write_text("a leftover of ours in the shape of a file")
    (tmp_path / "checkpoint-9").symlink_to(tmp_path / "nowhere")
    before = set(names(tmp_path)) - {".partial-checkpoint-4"}

    saved = checkpoints(tmp_path, limit=1)
    assert saved.find(None) is None
    for step in (7, 8, 9):
        saved.save(step)
        saved.prune()
        assert saved.find("latest") == tmp_path / f"checkpoint-{step}"
    assert "checkpoint-8 is no checkpoint and was in the way of one" in caplog.text
    after = names(tmp_path)
    assert {name for name in after if name[:13] not in ("checkpoint-8.", "checkpoint-9.")} == before - {"checkpoint-8"}
    (aside,) = (name for name in after if name.startswith("checkpoint-8."))
    assert (tmp_path / aside).read_text() == "mine" and damage(tmp_path / "checkpoint-9") is None


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"seed": 1}, "seed 1 instead of 0"),
        ({"global_batch": 8}, "global_batch 8 instead of 4"),
        (
            {"num_layers": 3, "prediction_type": "sample"},
            "prediction_type 'sample' .*; model.num_layers 3 instead of 2",
        ),
        ({"lora_rank": 2}, "lora_rank 2 instead of None"),
    ],
)
def test_what_must_not_change_on_resume_is_refused_by_name(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    checkpoints(tmp_path, global_batch=4).save(10)
    state = FakeState()
    other = checkpoints(tmp_path, state, **{"global_batch": 4, **changed})
    with pytest.raises(ValueError, match=f"belongs to another run, since this one has {message}"):
        other.load(other.find("latest"))
    assert state.loaded is None


def test_what_may_change_on_resume_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints(tmp_path, learning_rate=0.1).save(10)
    other = checkpoints(tmp_path, learning_rate=0.2)
    caplog.set_level(logging.WARNING)
    assert other.load(other.find("latest")) == 10
    assert "From step 11 on the run has learning_rate 0.2 instead of 0.1" in caplog.text


def hold(folder: Path, holds: Any) -> None:
    with sole_run(folder, Ranks()):
        holds.set()
        signal.pause()


def test_a_folder_belongs_to_one_run_until_its_process_ends(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    holds = context.Event()
    holder = context.Process(target=hold, args=(tmp_path / "run", holds), daemon=True)
    holder.start()
    assert holds.wait(60)
    with pytest.raises(ValueError, match=f"run which still goes on, process {holder.pid} on {socket.gethostname()}"):
        with sole_run(tmp_path / "run", Ranks()):
            pass
    holder.kill()
    holder.join()
    with sole_run(tmp_path / "run", Ranks()):
        assert str(os.getpid()) in (tmp_path / "run" / ".lock").read_text()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="output_dir .*file cannot be written"):
        with sole_run(tmp_path / "file", Ranks()):
            pass


def test_metrics_drop_torn_and_garbled_lines_and_steps_that_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path, steps_done=0)
    for step in (1, 2, 3):
        metrics.write(step=step, loss=0.5)
    with path.open("ab") as file:
        file.write(b'\xff\n[1]\n{"loss": 1}\n{"step": 4, "lo')
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3]
    Metrics(path, steps_done=2).write(step=3, loss=0.25)
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 0.5), (2, 0.5), (3, 0.25)]
    assert all(json.loads(line) for line in path.read_text().splitlines())
