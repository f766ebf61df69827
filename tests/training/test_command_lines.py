"""Whatever goes wrong with what a command line is given is one line on stderr and a non-zero exit, no traceback."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import train
from models import VideoDiT
from tests.distributed.helpers import run_ranks
from tests.distributed.test_train import as_if_launched
from training import cli, demo
from training.data import write_shard
from training.ranks import RankError

ROOT = Path(__file__).parents[2]
CONFIG, WEIGHTS = "m/transformer/config.json", "m/transformer/diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
MODEL = {
    "in_channels": 8, "patch_size": 2, "num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12,
    "ffn_expand_ratio": 1.0, "chunk_frames": 3,
}  # fmt: skip

Damage = Callable[[Path], Any]


def nothing(folder: Path) -> None:
    pass


def remove(name: str) -> Damage:
    def damage(folder: Path) -> None:
        shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()

    return damage


def write(name: str, content: bytes = b"x", *, without: str | None = None) -> Damage:
    def damage(folder: Path) -> None:
        if without is not None:
            (folder / without).unlink()
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    return damage


def make_folder(name: str) -> Damage:
    return lambda folder: (folder / name).mkdir(parents=True)


def change_config(**entries: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / CONFIG
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return damage


def change_weights(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Damage:
    def damage(folder: Path) -> None:
        changed = {name: change(name, weight) for name, weight in load_file(folder / WEIGHTS).items()}
        kept = {name: weight for name, weight in changed.items() if weight is not None}
        save_file(kept, folder / WEIGHTS, {"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-100])


#: What is damaged, options, and what the line says. "@" is the case's folder.
TRAIN: dict[str, tuple[Damage, list[str], str]] = {
    "no configuration": (nothing, ["--config=@none.yaml"], "none.yaml cannot be read: .*No such file"),
    "a configuration that is no YAML": (write("r.yaml", b"a: [1"), ["--config=@r.yaml"], "r.yaml cannot be read"),
    "a misspelt option": (nothing, ["--learning_rte=1"], "did you mean 'learning_rate'"),
    "no shards": (nothing, ["--data.shards=@none"], "no clip in the 0"),
    "a damaged shard": (write("s/b.safetensors"), [], "b.safetensors"),
    "no videos": (nothing, ["--data.shards=null", "--data.videos=@none"], "no video file"),
    "no model": (remove("m"), [], "m does not hold a transformer"),
    "no model of the hub": (nothing, ["--pretrained_model_name_or_path=a/b"], "a/b does not hold a transformer"),
    "a model's configuration is gone": (remove(CONFIG), [], "m does not hold a transformer"),
    "a model's configuration is a list": (write(CONFIG, b"[]"), [], "m does not hold a transformer"),
    "a model's configuration is binary": (write(CONFIG, b"\xff\0"), [], "m does not hold a transformer"),
    "a model of no class": (change_config(_class_name=None), [], "m holds a None; known are VideoDiT"),
    "a model's option is wrong": (change_config(num_layers=[1]), [], "m/transformer: .*num_layers must be an int"),
    "weights are gone": (remove(WEIGHTS), [], "m/transformer: no VideoDiT can be read"),
    "weights are cut": (cut, [], "m/transformer: no VideoDiT can be read"),
    "weights are a text": (write(WEIGHTS), [], "m/transformer: no VideoDiT can be read"),
    "weights are incomplete": (
        change_weights(lambda name, weight: None if "proj_out" in name else weight),
        [],
        "m/transformer: its safetensors lack 2 weights of a VideoDiT, as proj_out.bias",
    ),
    "weights are of another size": (
        change_weights(lambda name, weight: weight[:1].clone()),
        [],
        "m/transformer: no VideoDiT can be read",
    ),
    "weights do not suffice": (nothing, ["--model.num_layers=2"], "lack .* weights of a VideoDiT, as blocks.1"),
    "an index of nothing": (
        write(INDEX, b'{"metadata": {}, "weight_map": {"a": "a.safetensors"}}', without=WEIGHTS), [], "a.safetensors",
    ),
    "an index that is no JSON": (write(INDEX, b"{", without=WEIGHTS), [], "m/transformer: no VideoDiT can be read"),
    "output_dir is a file": (write("out"), [], "output_dir .*out cannot be written"),
    "output_dir is in a file": (write("f"), ["--output_dir=@f/out"], "output_dir .*f/out cannot be written"),
    "metrics.jsonl is a folder": (make_folder("out/metrics.jsonl"), [], "Is a directory: .*metrics.jsonl"),
    "no such checkpoint": (nothing, ["--resume_from_checkpoint=checkpoint-7"], "checkpoint-7: there is no such"),
    "a checkpoint is empty": (
        make_folder("out/checkpoint-1"), ["--resume_from_checkpoint=checkpoint-1"], "its progress.json is missing",
    ),
    "too few clips": (nothing, ["--train_batch_size=9"], "4 clips are too few"),
    "too many ranks": (nothing, ["--cp_size=2"], "cp_size 2 does not divide the 1 processes"),
    "it diverges": (nothing, ["--learning_rate=1e30", "--max_train_steps=4"], "step [234]: the loss is"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model and its data."""
    shard = {f"{name}.latents": torch.randn(8, 6, 4, 4) for name in "abcd"}
    write_shard(tmp_path / "good" / "s" / "a.safetensors", shard, {"kind": "haar", "scale": 1.0})
    VideoDiT(**MODEL).save_pretrained(tmp_path / "good" / "m" / "transformer")
    return tmp_path / "good"


def ends(main: Callable[[], object], name: str) -> str:
    """The line with which a command line ends; anything but one line is an error."""
    with pytest.raises(SystemExit) as end:
        cli.run(name, main)
    assert isinstance(end.value.code, str) and "\n" not in end.value.code, end.value.code
    assert end.value.code.startswith(f"{name}: ")
    return end.value.code


def train_with_mistakes(rank: int, world_size: int, good: Path) -> list[str]:
    """The cases whose line is not as it should be."""
    as_if_launched(rank, world_size)
    wrong = []
    for number, (case, (damage, options, message)) in enumerate(TRAIN.items()):
        folder = shutil.copytree(good, good.parent / str(number))
        damage(folder)
        given = [f"--data.shards={folder}/s", f"--pretrained_model_name_or_path={folder}/m", "--report_to=none"]
        given += [f"--output_dir={folder}/out", "--max_train_steps=1", "--adam_weight_decay=0", "--max_grad_norm=0"]
        given += [option.replace("@", f"{folder}/") for option in options]
        try:
            line = ends(lambda given=given: train.command_line(given), "train.py")
            if not re.search(message, line):
                wrong.append(f"{case}: {line}")
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{case}: {type(error).__name__}: {error}")
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return wrong


def test_mistakes_of_train_are_one_line(folder: Path) -> None:
    assert run_ranks(1, train_with_mistakes, folder) == [[]]


@pytest.mark.parametrize(
    "error", [ValueError, OSError, FloatingPointError, SafetensorError, RankError, json.JSONDecodeError, UnicodeError]
)
def test_what_is_no_fault_of_the_program_is_one_line(error: type[Exception]) -> None:
    def fail() -> None:
        arguments = ("two\n  lines", "", 0) if error is json.JSONDecodeError else ("two\n  lines",)
        raise error(*arguments)

    assert ends(fail, "x").startswith("x: two lines")


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    for error in (KeyError, TypeError, AssertionError):
        with pytest.raises(error):
            cli.run("x", lambda error=error: (_ for _ in ()).throw(error("x")))


def test_mistakes_of_the_demo_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for content, message in ((None, "cannot be read"), ("a: [1", "cannot be read"), ("sed: 1", "did you mean 'seed'")):
        if content is not None:
            (tmp_path / "demo.yaml").write_text(content)
        monkeypatch.setattr(demo, "CONFIG", tmp_path / "demo.yaml")
        assert message in ends(demo.main, "training.demo")


def test_processes_end_with_one_line_too(tmp_path: Path) -> None:
    given = f"--pretrained_model_name_or_path={tmp_path}/m --videos={tmp_path} --output_dir={tmp_path}/s".split()
    commands = {
        "train.py": ["train.py", f"--config={tmp_path}/none.yaml"],
        "training.encode": ["-m", "training.encode", *given],
    }
    processes = {
        name: subprocess.Popen([sys.executable, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    for name, process in processes.items():
        said = process.communicate(timeout=100)[1]
        assert process.returncode == 1
        assert "Traceback" not in said and said.splitlines()[-1].startswith(f"{name}: "), said
