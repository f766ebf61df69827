"""How fast SANA-WM runs and trains with `frame_gdn.swap`, and where the time goes: `python -m benchmarks.sana_wm`.

Needs a GPU of 64 GiB or more and diffusers 0.42 (`--peers DIR` imports it from the folder that `python -m
benchmarks.peers` filled). The released size with random weights, the zero-initialised convolutions and plücker
embedding filled, camera on, batch 1, 22 x 40 latents, bfloat16. One model: `swap` and `unswap` turn it from one
contestant into the other around the same parameters, and the two are timed alternately.

- forward: T 21, 41, 121 latent frames (161, 321, 961 video frames)
- train: forward with gradient checkpointing and backward, T 21, 41; no optimizer step
- error: of each in bfloat16 against the plain model in float32 on the same inputs, T 21
- parts: a profile of one forward by what the time goes to, T 41 and T 121

"ours" computes softmax with torch's own attention. Where flash-attn-4 is installed and serves, "flash4" is ours with
that, a third contestant of the forward at T 41 and T 121, of the training step at T 41 and of the errors.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frame_gdn import swap, unswap
from frame_gdn.kernels import flash4

GIB = 2**30
CONTESTANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "diffusers": unswap,
    "ours": partial(swap, attention="sdpa"),
}
FLASH4 = {"flash4": partial(swap, attention="flash4")}
#: What flash4 takes part in.
WITH_FLASH4 = ("forward_t41", "forward_t121", "train_t41")
FORWARD, TRAIN, PARTS, ERROR_FRAMES = (21, 41, 121), (21, 41), (41, 121), 21
RELEASED: dict[str, Any] = {}
TINY = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 2, "linear_head_dim": 32, "caption_channels": 32}

Json = dict[str, Any]
Inputs = dict[str, Tensor]


# --- model and inputs -------------------------------------------------------------------------------------------


def build(config: Json, device: torch.device) -> nn.Module:
    """Random weights in bfloat16; what the host starts at zero is filled, or whole branches would compute nothing."""
    from diffusers import SanaWMTransformer3DModel

    torch.manual_seed(0)
    with device:
        model = SanaWMTransformer3DModel(**config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("conv_k.weight", "conv_k_cam.weight")):
                parameter.normal_(std=0.2)
                parameter[..., -1] += 1.0
            elif name.startswith("plucker_embedder"):
                parameter.normal_(std=0.02)
    return model.bfloat16().eval()


def make_inputs(model: nn.Module, frames: int, height: int, width: int) -> Inputs:
    """Noise and text of 300 tokens, half of them padding; a camera that moves forward and turns. All in the model's
    dtype, as diffusers' pipeline passes it."""
    like, config = next(model.parameters()), model.config
    generator = torch.Generator().manual_seed(frames)
    angle = 0.02 * torch.arange(frames)
    pose = torch.eye(4).repeat(1, frames, 1, 1)
    pose[..., 0, 0] = pose[..., 2, 2] = angle.cos()
    pose[..., 0, 2], pose[..., 2, 0] = angle.sin(), -angle.sin()
    pose[..., 2, 3] = 0.05 * torch.arange(frames)
    lens = torch.tensor([0.8 * width, 0.8 * width, width / 2, height / 2]).expand(1, frames, 4)
    inputs = {
        "hidden_states": torch.randn(1, config.in_channels, frames, height, width, generator=generator),
        "encoder_hidden_states": torch.randn(1, 1, 300, config.caption_channels, generator=generator),
        "camera_conditions": torch.cat([pose.flatten(2), lens], -1),
        "chunk_plucker": torch.randn(1, config.chunk_plucker_channels, frames, height, width, generator=generator),
    }
    moved = {name: tensor.to(like) for name, tensor in inputs.items()}
    moved["timestep"] = torch.full((1, 1, frames), 500.0, device=like.device)
    moved["encoder_attention_mask"] = (torch.arange(300, device=like.device) < 150).long()[None]
    return moved


# --- measuring --------------------------------------------------------------------------------------------------


class Clock:
    """Milliseconds between two moments of the GPU's stream, or of the CPU where there is none (`--tiny`)."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()

    def now(self) -> Any:
        if not self.on_gpu:
            return import_module("time").perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, end: Any) -> float:
        if not self.on_gpu:
            return 1e3 * (end - start)
        end.synchronize()
        return float(start.elapsed_time(end))


CLOCK = Clock()


def forward(model: nn.Module, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return model(**inputs).sample


def train(model: nn.Module, inputs: Inputs) -> None:
    model.train().enable_gradient_checkpointing()
    model(**inputs).sample.float().square().mean().backward()
    model.zero_grad(set_to_none=True)
    model.eval().disable_gradient_checkpointing()


def contest(
    model: nn.Module,
    inputs: Inputs,
    run: Callable[[nn.Module, Inputs], Any],
    repetitions: int,
    contestants: dict[str, Callable[[nn.Module], nn.Module]],
) -> Json:
    """Interleaved contestants: milliseconds of every repetition, and the peak of allocated memory, weights included;
    the first round compiles kernels and is not counted."""
    times: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, float] = {}
    for repetition in range(repetitions + 1):
        for name, become in contestants.items():
            become(model)
            if CLOCK.on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = CLOCK.now()
            run(model, inputs)
            milliseconds = CLOCK.between(start, CLOCK.now())
            if repetition:
                times[name].append(milliseconds)
            peaks[name] = torch.cuda.max_memory_allocated() / GIB if CLOCK.on_gpu else 0.0
    return {"contestants": {name: {"ms": times[name], "peak_gib": peaks[name]} for name in contestants}}


def errors(model: nn.Module, inputs: Inputs, contestants: dict[str, Callable[[nn.Module], nn.Module]]) -> Json:
    """Of each contestant in bfloat16 against the plain model in float32 (TF32 off)."""
    in_bf16 = {name: forward(become(model), inputs).float() for name, become in contestants.items()}
    unswap(model).float()
    wide = {n: t.float() if t.is_floating_point() else t for n, t in inputs.items()}
    exact = forward(model, wide)
    model.bfloat16()
    return {name: float((out - exact).norm() / exact.norm()) for name, out in in_bf16.items()}


# --- where the time goes ----------------------------------------------------------------------------------------


@contextmanager
def stopwatches(model: nn.Module) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """Times every call of a part: what stands for the host's `attn.attn` and `attn.cam_attn`, the short convolutions,
    the feed-forward, the cross-attention."""
    laps: dict[str, list[tuple[Any, Any]]] = defaultdict(list)

    def watched(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = CLOCK.now()
            out = function(*args, **kwargs)
            laps[part].append((start, CLOCK.now()))
            return out

        return call

    patched: list[tuple[Any, str]] = []

    def watch(owner: Any, method: str, part: str) -> None:
        setattr(owner, method, watched(getattr(owner, method), part))
        patched.append((owner, method))

    for block in model.blocks:
        attn = block.attn
        softmax = "Softmax" in type(attn).__name__
        if hasattr(attn, "_main"):
            watch(attn, "_main", "softmax attention" if softmax else "main scan")
            watch(attn, "_camera", "softmax attention" if softmax else "camera scan")
        else:
            watch(attn.attn, "forward", "softmax attention" if softmax else "main scan")
            watch(attn.cam_attn, "forward", "softmax attention" if softmax else "camera scan")
        for name, child in attn.named_children():
            if name.startswith("conv_"):
                watch(child, "forward", "short convolutions")
        watch(block.mlp, "forward", "feed-forward")
        watch(block.cross_attn, "forward", "cross-attention")
    try:
        yield laps
    finally:
        for owner, method in patched:
            delattr(owner, method)


def parts(model: nn.Module, inputs: Inputs) -> Json:
    """Milliseconds by part of one forward, by contestant; the rest is projections, norms, gates and embeddings."""
    result = {}
    for name, become in CONTESTANTS.items():
        become(model)
        with stopwatches(model) as laps:
            start = CLOCK.now()
            forward(model, inputs)
            total = CLOCK.between(start, CLOCK.now())
        spent = {part: sum(CLOCK.between(*lap) for lap in times) for part, times in laps.items()}
        result[name] = {**spent, "rest": total - sum(spent.values())}
    unswap(model)
    return result


# --- results ----------------------------------------------------------------------------------------------------


def summarize(raw: Json) -> dict[str, float]:
    """The figures that the bars are about, from the raw medians of one results file."""

    def ratio(part: str, name: str = "ours") -> float:
        theirs, ours = (statistics.median(raw[part]["contestants"][who]["ms"]) for who in ("diffusers", name))
        return theirs / ours

    def peak(part: str) -> float:
        contestants = raw[part]["contestants"]
        return contestants["ours"]["peak_gib"] / contestants["diffusers"]["peak_gib"]

    return {
        **{f"forward_t{T}_vs_diffusers": ratio(f"forward_t{T}") for T in FORWARD},
        **{f"train_t{T}_vs_diffusers": ratio(f"train_t{T}") for T in TRAIN},
        "error_vs_plain_bf16": raw["errors"]["ours"] / raw["errors"]["diffusers"],
        **{f"forward_t{T}_peak_vs_diffusers": peak(f"forward_t{T}") for T in FORWARD},
        **{f"train_t{T}_peak_vs_diffusers": peak(f"train_t{T}") for T in TRAIN},
        **{
            f"{part}_flash4_vs_diffusers": ratio(part, "flash4")
            for part in WITH_FLASH4
            if "flash4" in raw[part]["contestants"]
        },
    }


def table(raw: Json) -> str:
    """The README's table, as Markdown."""
    titles = {f"forward_t{T}": f"forward, T {T}" for T in FORWARD}
    titles |= {f"train_t{T}": f"training step, checkpointing, T {T}" for T in TRAIN}
    lines = [
        "| SANA-WM, whole transformer | diffusers | swapped | faster | peak memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for part, title in titles.items():
        contestants = raw[part]["contestants"]
        times = " | ".join(f"{statistics.median(contestants[name]['ms']):,.0f} ms" for name in CONTESTANTS)
        peaks = " → ".join(f"{contestants[name]['peak_gib']:.1f}" for name in CONTESTANTS)
        lines.append(f"| {title} | {times} | {raw['summary'][f'{part}_vs_diffusers']:.2f}× | {peaks} GiB |")
    plain, ours = (raw["errors"][name] for name in ("diffusers", "ours"))
    versions = ", ".join(f"{name} {version}" for name, version in raw["versions"].items())
    with_flash4 = [
        f"{titles[part]} {raw['summary'][f'{part}_flash4_vs_diffusers']:.2f}×"
        for part in WITH_FLASH4
        if f"{part}_flash4_vs_diffusers" in raw["summary"]
    ]
    if with_flash4:
        lines += ["", f"With softmax attention by flash-attn-4: {'; '.join(with_flash4)}."]
    lines += [
        "",
        f"{raw['shape']['parameters'] / 1e9:.2f} B random parameters in bfloat16, camera on, B {raw['shape']['B']}, S "
        f"{raw['shape']['S']}; {raw['device']}, {versions}; `{raw['command']}`: medians of interleaved repetitions. "
        f"Error against the stock model in float32: stock {plain:.2e}, swapped {ours:.2e}.",
    ]
    return "\n".join(lines) + "\n"


def plot(raw: Json, path: Path) -> None:
    """Where a forward pass spends its time, before and after, as stacked bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(PARTS), figsize=(8, 4), layout="constrained")
    for axes, T in zip(panels, PARTS, strict=True):
        spent = raw["parts"][f"t{T}"]
        bottoms = [0.0] * len(CONTESTANTS)
        for part in spent["diffusers"]:
            heights = [spent[name].get(part, 0.0) for name in CONTESTANTS]
            axes.bar(list(CONTESTANTS), heights, bottom=bottoms, label=part)
            bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        axes.set(title=f"forward, T {T}", ylabel="ms")
    panels[-1].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", help="import diffusers from this folder, which benchmarks.peers filled")
    parser.add_argument("--repetitions", type=int, default=5, help="of T 21 and 41; T 121 takes three")
    parser.add_argument("--tiny", action="store_true", help="a small model and frames, on any device: does it run?")
    parser.add_argument("--commit", help="of the code that is measured, where git cannot tell")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/sana_wm.json"))
    options = parser.parse_args()
    if options.peers:
        sys.path.insert(0, str(Path(options.peers).resolve()))
    if not (options.tiny or torch.cuda.is_available()):
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    height, width = (4, 5) if options.tiny else (22, 40)

    model = build(TINY if options.tiny else RELEASED, device)
    with_flash4 = CONTESTANTS
    if flash4.refusal(next(model.parameters()), 112) is None:
        with_flash4 = CONTESTANTS | FLASH4

    def those_of(part: str) -> dict[str, Callable[[nn.Module], nn.Module]]:
        return with_flash4 if part in WITH_FLASH4 else CONTESTANTS

    if device.type == "cpu":
        model.float()  # the host's camera geometry has no bfloat16 there
    raw: Json = {
        "benchmark": "sana_wm",
        "command": "python -m benchmarks.sana_wm",
        "commit": options.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            **{name: import_module(name).__version__ for name in ("torch", "triton", "diffusers")},
        },
        "shape": {"B": 1, "S": height * width, "parameters": sum(p.numel() for p in model.parameters())},
    }
    if with_flash4 is not CONTESTANTS:
        raw["versions"]["flash-attn-4"] = version("flash-attn-4")
    for T in FORWARD:
        repetitions = min(options.repetitions, 3) if T == 121 else options.repetitions
        part, inputs = f"forward_t{T}", make_inputs(model, T, height, width)
        raw[part] = contest(model, inputs, forward, repetitions, those_of(part))
    for T in TRAIN:
        part, inputs = f"train_t{T}", make_inputs(model, T, height, width)
        raw[part] = contest(model, inputs, train, min(options.repetitions, 3), those_of(part))
    raw["parts"] = {f"t{T}": parts(model, make_inputs(model, T, height, width)) for T in PARTS}
    if device.type == "cuda":
        raw["errors"] = errors(model, make_inputs(model, ERROR_FRAMES, height, width), with_flash4)
        raw["summary"] = summarize(raw)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    print(json.dumps({name: raw.get(name) for name in ("parts", "errors", "summary")}, indent=1))


if __name__ == "__main__":
    main()
