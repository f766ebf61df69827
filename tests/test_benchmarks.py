"""Benchmarks run where there is no GPU, on a small model, and write what is read from them."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers", minversion="0.42")

from benchmarks import rollout

FIGURES = {
    "pass_ms", "chunk_ms", "frames_per_second", "time_to_first_chunk_ms", "graph_vs_eager", "pass_vs_floor",
    "last_over_first_time", "memory_growth_bytes", "state_error_10000_frames", "pass_vs_prefix_recompute",
}  # fmt: skip


def test_the_benchmark_of_a_rollout_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results" / "rollout.json"
    arguments = ["rollout", "--tiny", "--repetitions", "1", "--commit", "none", "--output", str(path)]
    monkeypatch.setattr(sys, "argv", arguments)
    rollout.main()
    raw = json.loads(path.read_text())
    assert set(raw["summary"]) == FIGURES and all(value >= 0 for value in raw["summary"].values())
    assert raw["summary"] == pytest.approx(rollout.summarize(raw), rel=1e-12)
    assert raw["summary"]["state_error_10000_frames"] <= 1e-5
    assert raw["long"]["contestants"]["graph"]["finite"]
