"""The README's blocks of Python run as they stand, and its commands name options that exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

import rollout
from frame_gdn.hosts import SwapOptions
from models import VideoDiT
from training.config import parse_config
from training.data import VideoLatents

ROOT = Path(__file__).parents[1]


def test_the_readmes_blocks_run_each_in_a_namespace_of_its_own():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 5
    code = f"for block in {blocks!r}:\n    exec(block, {{}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_train_py_and_rollout_py_take_the_options_of_the_readme(monkeypatch):
    monkeypatch.chdir(ROOT)
    pieces = (ROOT / "README.md").read_text().replace("\\\n", " ").split("```")[1::2]
    lines = [line for piece in pieces if piece.startswith("\n") for line in piece.splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines]
    training = [words for words in commands if "train.py" in words]
    rollouts = [words for words in commands if words[1:2] == ["rollout.py"]]
    assert training and rollouts
    for words in training:
        options = words[words.index("train.py") + 1 :]
        config = parse_config(options, {"model": VideoDiT, "swap": SwapOptions, "data": VideoLatents})
        assert int(words[words.index("--num_processes") + 1]) % config.cp_size == 0
    for words in rollouts:
        rollout.parse_args(words[2:])
