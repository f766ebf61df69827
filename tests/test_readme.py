"""Every block of Python in the README runs as it stands, in the order of the page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

ROOT = Path(__file__).parents[1]


def test_the_readmes_blocks_run_each_in_a_namespace_of_its_own():
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) >= 5
    code = f"for block in {blocks!r}:\n    exec(block, {{}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
