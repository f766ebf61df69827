"""How fast SANA-WM is rolled out chunk by chunk with `frame_gdn`: `python -m benchmarks.rollout`.

Needs a GPU of 32 GiB or more and diffusers 0.42. The released size with random weights, camera on, batch 1, 22 x 40
latents, bfloat16; chunks of 4, 3, 3, ... frames, softmax attention over a window of 4 + 3 frames and the chunk's own,
four denoising passes and one that commits, CUDA graphs. A chunk of 3 latent frames is 24 video frames.

- long: 1,000 chunks, each with the device waited for, as one who shows it does; camera by chunk, from an iterator
- passes: the four steps of a chunk one by one, the scheduler's part with them
- eager: chunks without graphs; first_chunk: from the call to the first chunk, kernels compiled
- prefix: what a pass costs without a state: all of 121 + 3 frames at once, chunk-causal, softmax over all of the past
  ("recompute") or over the window ("windowed")
- state: the state S of the model's scan after 10,000 frames in float32 against float64
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.sana_wm import RELEASED, TINY, build, make_inputs
from frame_gdn import bidirectional_gdn, swap

GRID = {"chunk_frames": 3, "first_chunk_frames": 4}
WINDOW = {"softmax_window": 2, "softmax_sink": True}
SIGMAS = [1.0, 0.960, 0.889, 0.727]
#: Chunks before the window is full, and the graphs of what follows are captured.
BEFORE_FULL = 5
VIDEO_FRAMES = 24
#: A pass over 3 frames, derived in NOTES.md.
FLOOR_MS = 24.0
PREFIX_FRAMES = 124

Json = dict[str, Any]
Interval = Iterator[tuple[Tensor, Tensor]]


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(function: Callable[[], Any]) -> float:
    """Milliseconds from call to result, the device waited for before and after."""
    wait()
    start = perf_counter()
    function()
    wait()
    return 1e3 * (perf_counter() - start)


# --- the rollout --------------------------------------------------------------------------------------------------


class Rollout:
    """A pipeline and what it is given: an image, a text of 300 tokens, a camera that circles without end."""

    def __init__(self, model: nn.Module, height: int, width: int) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        from frame_gdn import FrameGDNRolloutPipeline

        self.pipeline = FrameGDNRolloutPipeline(model, FlowMatchEulerDiscreteScheduler(shift=1.0))
        self.device, config = next(model.parameters()).device, model.config
        self.text = torch.randn(1, 300, config.caption_channels, generator=torch.Generator().manual_seed(1))
        self.image = torch.randn(1, config.in_channels, 1, height, width, generator=torch.Generator().manual_seed(2))
        self.lens = torch.tensor([25.6 * width, 25.6 * width, 16.0 * width, 16.0 * height])

    def camera(self) -> Interval:
        """The poses of one chunk after another."""
        first, last = 0, 8 * (GRID["first_chunk_frames"] - 1) + 1
        while True:
            angle = 2e-3 * torch.arange(first, last)
            poses = torch.eye(4).repeat(last - first, 1, 1)
            poses[:, 0, 0] = poses[:, 2, 2] = angle.cos()
            poses[:, 0, 2], poses[:, 2, 0] = angle.sin(), -angle.sin()
            poses[:, 0, 3], poses[:, 2, 3] = 5 * (1 - angle.cos()), 5 * angle.sin()
            yield poses, self.lens
            first, last = last, last + VIDEO_FRAMES

    def stream(self, cuda_graph: bool, **options: Any) -> Iterator[Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)
        return self.pipeline.stream(
            self.image, generator=generator, prompt_embeds=self.text, camera=self.camera(), sigmas=SIGMAS,
            num_inference_steps=None, cuda_graph=cuda_graph, **options,
        )  # fmt: skip

    def cadence(self, chunks: int, cuda_graph: bool) -> Json:
        """Milliseconds of each chunk after those that fill the window, and the memory that they leave in use."""
        times, used, finite = [], [], True
        stream = self.stream(cuda_graph)
        for number in range(chunks + BEFORE_FULL):
            start = perf_counter()
            chunk = next(stream)
            wait()
            if number >= BEFORE_FULL:
                times.append(1e3 * (perf_counter() - start))
                used.append(_memory())
        finite = bool(chunk.isfinite().all())
        stream.close()
        return {"ms": times, "finite": finite, "memory_bytes": {"first": used[0], "last": used[-1], "most": max(used)}}

    def passes(self, chunks: int, cuda_graph: bool) -> list[float]:
        """Milliseconds of denoising passes once the window is full, each with its step of the scheduler."""
        times: list[float] = []
        seen = [0.0]

        def note(pipeline: Any, step: int, timestep: Tensor, tensors: Any) -> dict[str, Tensor]:
            wait()
            if step:
                times.append(1e3 * (perf_counter() - seen[0]))
            seen[0] = perf_counter()
            return {}

        stream = self.stream(cuda_graph, callback_on_step_end=note)
        for _ in range(BEFORE_FULL):
            next(stream)
        times.clear()
        for _ in range(chunks):
            next(stream)
        stream.close()
        return times

    def first_chunk(self, cuda_graph: bool) -> float:
        """Milliseconds from the call to its first chunk."""
        streams: list[Iterator[Tensor]] = []

        def begin() -> None:
            streams.append(self.stream(cuda_graph))
            next(streams[0])

        milliseconds = timed(begin)
        streams[0].close()
        return milliseconds


def _memory() -> int:
    """Bytes that the process holds of the GPU, whether in use or kept for later."""
    return torch.cuda.memory_reserved() if torch.cuda.is_available() else 0


# --- beside it ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def prefix(model: nn.Module, frames: int, size: tuple[int, int], repetitions: int) -> Json:
    """Milliseconds of a pass over all frames at once, by the window of softmax attention."""
    inputs = make_inputs(model, frames, *size)
    result = {}
    for name, window in (("windowed", WINDOW), ("recompute", {"softmax_window": None, "softmax_sink": False})):
        swap(model, **window)
        times = [timed(lambda: model(**inputs)) for _ in range(repetitions + 1)]
        result[name] = {"ms": times[1:]}
    swap(model, **WINDOW)
    return {"contestants": result}


@torch.no_grad()
def state_error(frames: int, heads: int, head_dim: int, tokens: int, device: torch.device) -> float:
    """Relative error of S in float32 against float64 after so many frames of SANA-WM's scan, three a call."""
    generator = torch.Generator(device).manual_seed(0)
    states: dict[torch.dtype, Any] = {torch.float32: None, torch.float64: None}

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    for _ in range(math.ceil(frames / 3)):
        q, k, v = (random(1, 3 * tokens, heads, head_dim) for _ in range(3))
        q, k = q.relu(), k.relu() * (head_dim * tokens) ** -0.5
        beta, decay = random(1, 3 * tokens, heads).sigmoid(), 1 - 0.05 * random(1, 3, heads).sigmoid()
        for dtype, state in states.items():
            wide = (t.to(dtype) for t in (q, k, v, beta, decay))
            _, states[dtype] = bidirectional_gdn(*wide, initial_state=state, output_final_state=True, chunk_frames=3)
    ours, exact = (states[dtype].S.double() for dtype in (torch.float32, torch.float64))
    return float((ours - exact).norm() / exact.norm())


# --- results ------------------------------------------------------------------------------------------------------


def summarize(raw: Json) -> dict[str, float]:
    """The figures that the bars are about, from the raw times of one results file."""

    def median(part: str, name: str) -> float:
        return statistics.median(raw[part]["contestants"][name]["ms"])

    chunks = raw["long"]["contestants"]["graph"]["ms"]
    memory = raw["long"]["contestants"]["graph"]["memory_bytes"]
    edge = min(100, len(chunks) // 2)
    chunk_ms, pass_ms = median("long", "graph"), median("passes", "graph")
    return {
        "pass_ms": pass_ms,
        "chunk_ms": chunk_ms,
        "frames_per_second": 1e3 * VIDEO_FRAMES / chunk_ms,
        "time_to_first_chunk_ms": median("first_chunk", "graph"),
        "graph_vs_eager": median("eager", "eager") / chunk_ms,
        "pass_vs_floor": pass_ms / FLOOR_MS,
        "last_over_first_time": sum(chunks[-edge:]) / sum(chunks[:edge]),
        "memory_growth_bytes": memory["most"] - memory["first"],
        "state_error_10000_frames": raw["state"]["error"],
        "pass_vs_prefix_recompute": median("prefix", "recompute") / pass_ms,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=20, help="chunks of eager and of single passes")
    parser.add_argument("--tiny", action="store_true", help="a small model, few chunks, on any device: does it run?")
    parser.add_argument("--commit", help="of the code that is measured, where git cannot tell")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/rollout.json"))
    options = parser.parse_args()
    if not (options.tiny or torch.cuda.is_available()):
        raise SystemExit("this benchmark needs a GPU")
    on_gpu = torch.cuda.is_available()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if on_gpu else "cpu")
    height, width = size = (4, 5) if options.tiny else (22, 40)
    chunks, frames, prefix_frames = (8, 30, 10) if options.tiny else (1000, 10_000, PREFIX_FRAMES)
    repetitions, few = options.repetitions, min(options.repetitions, 5)

    model = swap(build(TINY if options.tiny else RELEASED, device), **GRID, **WINDOW)
    if not on_gpu:
        model.float()  # the host's camera geometry has no bfloat16 there
    config: Any = model.config
    rollout = Rollout(model, height, width)
    raw: Json = {
        "benchmark": "rollout",
        "command": "python -m benchmarks.rollout",
        "commit": options.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            **{name: import_module(name).__version__ for name in ("torch", "triton", "diffusers")},
        },
        "shape": {
            "B": 1, "S": height * width, "parameters": sum(p.numel() for p in model.parameters()),
            **GRID, **WINDOW, "sigmas": SIGMAS, "prefix_frames": prefix_frames,
        },
    }  # fmt: skip

    def show(part: str) -> None:
        print(f"{part}: {perf_counter() - begun:.0f} s", flush=True)

    begun = perf_counter()
    raw["first_call_ms"] = rollout.first_chunk(on_gpu)
    show("first call, kernels compiled")
    raw["eager"] = {"contestants": {"eager": rollout.cadence(repetitions, False)}}
    show("eager")
    raw["passes"] = {"contestants": {"graph": {"ms": rollout.passes(repetitions, on_gpu)}}}
    firsts = [rollout.first_chunk(on_gpu) for _ in range(few)]
    raw["first_chunk"] = {"contestants": {"graph": {"ms": firsts}}}
    show("passes, first chunks")
    raw["long"] = {"contestants": {"graph": rollout.cadence(chunks, on_gpu)}}
    show("long")
    raw["prefix"] = prefix(model, prefix_frames, size, min(few, 3))
    show("prefix")
    del rollout
    heads, head_dim = config.num_attention_heads, config.linear_head_dim
    raw["state"] = {"frames": frames, "error": state_error(frames, heads, head_dim, height * width, device)}
    show("state")
    raw["summary"] = summarize(raw)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    print(json.dumps(raw["summary"], indent=1))


if __name__ == "__main__":
    main()
