"""Numbers that are shown are the numbers that were measured."""

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import report

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
MEASURED = sorted(RESULTS.glob("*.json"))
#: What takes milliseconds is repeated twenty times; a whole model as often as its benchmark can afford.
OFTEN = ("scan", "layer")


@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
def test_a_summary_follows_from_its_raw_medians(path):
    raw = json.loads(path.read_text())
    summarize = importlib.import_module(f"benchmarks.{raw['benchmark']}").summarize
    assert summarize(raw) == pytest.approx(raw["summary"], rel=1e-12)


@pytest.mark.parametrize("path", [path for path in MEASURED if path.stem in OFTEN], ids=lambda path: path.stem)
def test_enough_repetitions_of_every_contestant(path):
    raw = json.loads(path.read_text())
    parts = [part["contestants"] for part in raw.values() if isinstance(part, dict) and "contestants" in part]
    assert parts
    for contestants in parts:
        assert all(len(times["ms"]) >= 20 for times in contestants.values())


def test_the_readme_shows_the_results_files():
    readme = (RESULTS.parents[1] / "README.md").read_text()
    assert report.filled(readme) == readme, "run python -m benchmarks.report"
