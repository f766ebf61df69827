"""Checkpoints that are whole or named as damaged, and metrics that agree with them, whenever a run is killed."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from training.config import TrainConfig
from training.ranks import Ranks
from training.state import flush, flush_tree, read_json, write_json

logger = logging.getLogger(__name__)

PROGRESS = "progress.json"
"""Written last into a checkpoint: the steps done, the options and layout of the run, size and digest of each file."""

NAME = re.compile(r"checkpoint-(0|[1-9]\d*)")
LEFTOVER = re.compile(r"\.(partial|deleted)-checkpoint-\d+")


class State(Protocol):
    """What a checkpoint holds, such as `training.state.RunState`. Both are called on all ranks."""

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...


class Checkpoints:
    """The `checkpoint-{step}` folders of an output folder.

    A checkpoint is written under a hidden name and renamed when every rank has finished and everything is on the disk;
    old ones are renamed away before they are deleted. Whatever else lies in the folder is left alone. All methods are
    called on all ranks, and an error is an error on all.

    Args:
        limit: how many to keep; None keeps all.
        config: of this run.
        layout: what else a resumed run must have in common with the saved one (such as its global batch), flat.
    """

    def __init__(
        self,
        output_dir: Path,
        ranks: Ranks,
        state: State,
        *,
        limit: int | None,
        config: TrainConfig,
        layout: dict[str, Any],
    ) -> None:
        self.output_dir, self.ranks, self.state = output_dir, ranks, state
        self.limit, self.config, self.layout = limit, config, json.loads(json.dumps(layout))
        self._damaged: set[str] = set()
        self._is_pruned = True

    def all(self) -> list[Path]:
        """The folders with a checkpoint's name, whole or not, in the order in which they were written."""
        folders = self.output_dir.iterdir() if self.output_dir.is_dir() else []
        return sorted((path for path in folders if NAME.fullmatch(path.name) and path.is_dir()), key=_age)

    def find(self, name: str | None) -> Path | None:
        """The checkpoint to resume from: "latest", a folder's name or path; None for a run that starts anew.

        "latest" is the newest whole one; those that are passed over are logged with what is wrong with them.

        Raises:
            ValueError: there is no such checkpoint, or it is damaged, or a run that starts anew would mix with
                another's.
        """
        found = self.ranks.on_main(lambda: self._find(name))
        self._damaged = set(found["damaged"])
        return None if found["path"] is None else Path(found["path"])

    def _find(self, name: str | None) -> dict[str, Any]:
        folders = self.all()
        if name is None:
            if folders:
                raise ValueError(
                    f"{self.output_dir} holds {folders[-1].name} of another run: "
                    "give another --output_dir, or --resume_from_checkpoint latest"
                )
            return {"path": None, "damaged": []}
        if name == "latest":
            return self._newest(folders)
        for path in (Path(name), self.output_dir / Path(name).name):
            if path.is_dir():
                if problem := damage(path):
                    raise ValueError(f"{path} cannot be resumed: {problem}")
                return {"path": str(path), "damaged": []}
        raise ValueError(
            f"--resume_from_checkpoint {name}: there is no such folder; {self.output_dir} holds "
            + (", ".join(path.name for path in folders) or "no checkpoint")
        )

    def _newest(self, folders: list[Path]) -> dict[str, Any]:
        damaged: dict[str, str] = {}
        for path in reversed(folders):
            problem = damage(path)
            if problem is None:
                for name, reason in damaged.items():
                    logger.warning("%s is passed over: %s", self.output_dir / name, reason)
                return {"path": str(path), "damaged": list(damaged)}
            damaged[path.name] = problem
        if damaged:
            listed = "; ".join(f"{name}: {problem}" for name, problem in damaged.items())
            raise ValueError(f"no checkpoint in {self.output_dir} can be resumed: {listed}")
        logger.warning("there is no checkpoint in %s: the run starts anew", self.output_dir)
        return {"path": None, "damaged": []}

    def save(self, step: int) -> None:
        """Write `checkpoint-{step}`. Older ones stay until `prune`.

        Raises:
            FloatingPointError: a weight is not finite.
            OSError: the disk is full, or the like. The checkpoints before this one are whole.
        """
        partial = self.output_dir / f".partial-checkpoint-{step}"
        self.ranks.on_main(lambda: self._clean(partial))
        self.ranks.everywhere(lambda: self.state.save(partial))
        self.ranks.on_main(lambda: self._finish(partial, step))
        self._is_pruned = False

    def prune(self) -> None:
        """Delete checkpoints beyond the limit, the oldest first.

        To be called when the newest is known to be good: that its weights gave a finite step, say.
        """
        if self._is_pruned or not self.ranks.is_main or self.limit is None:
            return
        self._is_pruned = True
        whole = [path for path in self.all() if path.name not in self._damaged and _age(path)[0] < math.inf]
        try:
            for old in whole[: -self.limit]:
                self._delete(old)
        except OSError as error:
            logger.warning("an old checkpoint could not be deleted: %s", error)

    def load(self, path: Path) -> int:
        """Restore a checkpoint and return the number of steps done. Options that changed since are logged.

        Raises:
            ValueError: the run that wrote it differs in what must stay as it was, or a file does not fit the model.
        """
        progress = self.ranks.everywhere(lambda: self._compared(path))
        self.ranks.everywhere(lambda: self.state.load(path))
        return int(progress["step"])

    def _compared(self, path: Path) -> dict[str, Any]:
        progress = read_json(path / PROGRESS)
        fixed, applied = self.config.changes(progress["options"])
        layout = progress["layout"]
        fixed += [
            f"{key} {self.layout.get(key)!r} instead of {layout.get(key)!r}"
            for key in sorted({*layout, *self.layout})
            if self.layout.get(key) != layout.get(key)
        ]
        if fixed:
            raise ValueError(f"{path} belongs to another run, since this one has {'; '.join(fixed)}")
        if applied and self.ranks.is_main:
            logger.warning("From step %d on the run has %s", progress["step"] + 1, "; ".join(applied))
        return progress

    def _clean(self, partial: Path) -> None:
        for leftover in list(self.output_dir.iterdir()) if self.output_dir.is_dir() else []:
            if LEFTOVER.fullmatch(leftover.name):
                _remove(leftover)
        partial.mkdir(parents=True)

    def _finish(self, partial: Path, step: int) -> None:
        final = self.output_dir / f"checkpoint-{step}"
        flush_tree(partial)  # the files of all ranks, and that they are in their folder
        progress = {
            "step": step,
            "written": time.time(),
            "options": self.config.described(),
            "layout": self.layout,
            "files": describe_files(partial),
        }
        write_json(partial / PROGRESS, {**progress, "digest": _digest_of(progress)})
        flush(partial)
        if final.is_dir():  # of a run that was resumed from an older checkpoint
            self._delete(final)
        elif os.path.lexists(final):  # somebody else's
            aside = final.with_name(f"{final.name}.{time.time_ns()}")
            final.rename(aside)
            logger.warning("%s is no checkpoint and was in the way of one: it is %s now", final, aside.name)
        partial.rename(final)
        flush(self.output_dir)
        self._damaged.discard(final.name)

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(f".deleted-{path.name}")
        path.rename(doomed)
        _remove(doomed)


def _remove(path: Path) -> None:
    """A folder with all that is in it; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None for one that is whole. Reads every byte of it."""
    try:
        progress = read_json(path / PROGRESS)
    except ValueError as error:
        return str(error) if (path / PROGRESS).exists() else f"its {PROGRESS} is missing"
    if "files" not in progress:
        return (
            "an earlier version of train.py wrote it, with other groups in the optimizer and in files that could run "
            "code; only its model.safetensors is of use"
        )
    digest = progress.pop("digest", None)
    if digest != _digest_of(progress):
        return f"the contents of {PROGRESS} have changed"
    try:
        files = describe_files(path)
        expected = {str(name): (int(size), str(digest)) for name, (size, digest) in progress["files"].items()}
    except OSError as error:
        return f"a file cannot be read: {error}"
    except (AttributeError, TypeError, ValueError):
        return f"{PROGRESS} is not what train.py writes"
    for name, (size, digest) in expected.items():
        if name not in files:
            return f"{name} is missing"
        if files[name][0] != size:
            return f"{name} has {files[name][0]} bytes instead of {size}"
        if files[name][1] != digest:
            return f"the contents of {name} have changed"
    return None


def describe_files(folder: Path) -> dict[str, list[Any]]:
    """Size and SHA-256 of all files below a folder but its own PROGRESS, by relative path."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / PROGRESS)
    with ThreadPoolExecutor(max_workers=8) as pool:  # hashing releases Python's lock
        digests = list(pool.map(_digest, paths))
    return {
        str(path.relative_to(folder)): [path.stat().st_size, digest]
        for path, digest in zip(paths, digests, strict=True)
    }


def _digest(path: Path) -> str:
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            sha.update(block)
    return sha.hexdigest()


def _digest_of(progress: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(progress, sort_keys=True).encode()).hexdigest()


def _age(path: Path) -> tuple[float, int]:
    """What sorts checkpoints: when they were written, the youngest last, and last of all where that is not known."""
    try:
        written = float(read_json(path / PROGRESS)["written"])
    except (KeyError, TypeError, ValueError):
        written = math.inf
    return written, int(path.name.rpartition("-")[2])


@contextmanager
def sole_run(output_dir: Path, ranks: Ranks) -> Iterator[None]:
    """Make the output folder, and hold it for this run alone until the block ends or the main process dies.

    Raises:
        ValueError: on all ranks, where another run has the folder, naming its process and host.
    """
    held: list[Any] = []

    def hold() -> None:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            file = (output_dir / ".lock").open("a+")
        except OSError as error:
            raise ValueError(f"output_dir {output_dir} cannot be written: {error}") from error
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not inherited by the data loader's workers
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read() or "an unknown process"
            file.close()
            raise ValueError(f"output_dir {output_dir} is that of a run which still goes on, {holder}") from None
        except OSError as error:
            logger.warning("%s cannot be locked (%s): see to it that no other run writes there", output_dir, error)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        held.append(file)

    ranks.on_main(hold)
    try:
        yield
    finally:
        for file in held:
            file.close()  # which unlocks it


class Metrics:
    """`metrics.jsonl`, a line a step: {"step": int, "loss": …, …}.

    Lines of steps that a resumed run repeats, and a line that a kill tore, are dropped when it is opened.

    Args:
        steps_done: steps of the checkpoint that the run starts from.
    """

    def __init__(self, path: Path, steps_done: int) -> None:
        self.path = path
        kept = [line for line in read_metrics(path) if line["step"] <= steps_done] if path.exists() else []
        partial = path.with_name(f".partial-{path.name}")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        flush(partial)
        partial.rename(path)

    def write(self, **values: Any) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def flush(self) -> None:
        """Wait until all lines are on the disk."""
        flush(self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl that are whole."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
    return lines
