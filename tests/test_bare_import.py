"""The package without its extras: torch and what that needs, no diffusers, no numpy."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
TORCH_AND_ITS_NEEDS = "torch einops torchgen functorch triton sympy mpmath networkx jinja2 markupsafe filelock fsspec"

SCRIPT = """
import importlib, json
import frame_gdn, torch
found = {"dir": dir(frame_gdn), "version": frame_gdn.__version__}
names = {}
exec("from frame_gdn import *", names)
found["star"] = sorted(name for name in names if not name.startswith("__"))
def error_of(call):
    try:
        call()
    except ImportError as error:
        return str(error)
found["errors"] = {
    name: error_of(lambda: importlib.import_module("frame_gdn." + name))
    for name in ("pipeline", "decoding", "hosts.sana_wm", "hosts.sana_video", "hosts.wan")
}
found["errors"]["name"] = error_of(lambda: frame_gdn.FrameGDNRolloutPipeline)
out, _ = frame_gdn.BidirectionalGDN(8, 2)(torch.rand(1, 6, 8), 3)
found["shape"] = list(out.shape)
try:
    frame_gdn.swap(torch.nn.Linear(2, 2))
except ValueError as error:
    found["swap"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a Python finds that can import torch and this package and nothing else that is installed."""
    folder = tmp_path_factory.mktemp("bare")
    for name in (*TORCH_AND_ITS_NEEDS.split(), "typing_extensions"):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            source = Path(spec.origin)
            source = source.parent if source.name == "__init__.py" else source
            (folder / source.name).symlink_to(source)
    (folder / "frame_gdn").symlink_to(ROOT / "frame_gdn")
    command = [sys.executable, "-S", "-W", "ignore", "-c", SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(folder)}, cwd=folder)
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_layer_runs(bare: dict[str, Any]) -> None:
    assert bare["shape"] == [1, 6, 8]
    assert "known are: SanaWM" in bare["swap"]


def test_what_needs_diffusers_says_which_extra_brings_it(bare: dict[str, Any]) -> None:
    for name, error in bare["errors"].items():
        assert error is not None and "pip install 'frame-gdn[diffusers]'" in error, (name, error)


def test_all_that_can_be_had_is_listed(bare: dict[str, Any]) -> None:
    assert "FrameGDNRolloutPipeline" not in bare["star"] and {"swap", "BidirectionalGDN"} <= set(bare["star"])
    assert {"swap", "BidirectionalGDN"} <= set(bare["dir"])
    import frame_gdn

    assert "FrameGDNRolloutPipeline" in dir(frame_gdn) and "FrameGDNRolloutPipeline" in frame_gdn.__all__
    assert frame_gdn.__version__ == bare["version"]
