"""Checkpoints that are whole or absent, and a metrics file that agrees with them, whenever a run is killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

PROGRESS = "progress.json"
"""Written last into a checkpoint: the steps done, and what must stay the same for a resumed run to repeat this one."""


class Checkpoints:
    """The `checkpoint-{step}` folders of an output folder.

    A checkpoint is written under a hidden name and renamed when every rank has finished, so a folder of the final name
    is complete; old ones are renamed away before they are deleted. All methods are called on all ranks.

    Args:
        limit: how many to keep; None keeps all.
        layout: what a resumed run must have in common with the saved one (such as its seed and global batch).
    """

    def __init__(
        self, output_dir: Path, accelerator: Accelerator, *, limit: int | None, layout: dict[str, Any]
    ) -> None:
        self.output_dir = output_dir
        self.accelerator = accelerator
        self.limit = limit
        self.layout = layout

    def all(self) -> list[Path]:
        """The complete checkpoints, oldest first."""
        found = [path for path in self.output_dir.glob("checkpoint-*") if (path / PROGRESS).is_file()]
        return sorted(found, key=_step_of)

    def find(self, name: str | None) -> Path | None:
        """The checkpoint to resume from: "latest", a folder's name or path; None for a run that starts anew.

        Raises:
            ValueError: there is no such complete checkpoint, or a run that starts anew would mix with another's.
        """
        checkpoints = self.all()
        if name is None:
            if checkpoints:
                raise ValueError(
                    f"{self.output_dir} holds {checkpoints[-1].name} of another run: "
                    "give another --output_dir, or --resume_from_checkpoint latest"
                )
            return None
        if name == "latest":
            return checkpoints[-1] if checkpoints else None
        for path in (Path(name), self.output_dir / Path(name).name):
            if (path / PROGRESS).is_file():
                return path
        raise ValueError(f"no complete checkpoint {name!r}; there are {[path.name for path in checkpoints]}")

    def save(self, step: int) -> None:
        """Write `checkpoint-{step}`, then delete those beyond the limit."""
        final = self.output_dir / f"checkpoint-{step}"
        partial = self.output_dir / f".partial-{final.name}"
        if self.accelerator.is_main_process:
            self._clean()
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(partial))
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            (partial / PROGRESS).write_text(json.dumps({"step": step, **self.layout}))
            if final.exists():  # a run that was resumed from an older checkpoint
                self._delete(final)
            partial.rename(final)
            for old in self.all()[: -self.limit] if self.limit else []:
                self._delete(old)
        self.accelerator.wait_for_everyone()

    def load(self, path: Path) -> int:
        """Restore a checkpoint and return the number of steps done.

        Raises:
            ValueError: the run that wrote it had another seed or global batch.
        """
        progress = json.loads((path / PROGRESS).read_text())
        step = progress.pop("step")
        if progress != self.layout:
            raise ValueError(f"{path} was written by a run with {progress}, this one has {self.layout}")
        self.accelerator.load_state(str(path))
        self.accelerator.step = 0  # its micro-batches, which a run of another accumulation would count on from
        return int(step)

    def _clean(self) -> None:
        for leftover in [*self.output_dir.glob(".partial-*"), *self.output_dir.glob(".deleted-*")]:
            shutil.rmtree(leftover)

    def _delete(self, path: Path) -> None:
        doomed = path.with_name(f".deleted-{path.name}")
        path.rename(doomed)
        shutil.rmtree(doomed)


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
        partial.rename(path)

    def write(self, **values: Any) -> None:
        """Append one line."""
        with self.path.open("a") as file:
            file.write(json.dumps(values) + "\n")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a metrics.jsonl."""
    lines = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            lines.append(json.loads(line))
    return lines


def _step_of(path: Path) -> int:
    return int(path.name.rpartition("-")[2])
