"""How fast, how exact and how large is a whole attention layer, beside its peers: `python -m benchmarks.layer`.

Needs a GPU, and diffusers 0.42 (`--peers DIR` imports it from the folder that `python -m benchmarks.peers` filled,
`none` leaves its figures null). SANA-WM's size, one set of weights and inputs, bfloat16, contestants interleaved:

- ours: `BidirectionalGDN` on Triton; torch: the same layer on the plain PyTorch backend
- diffusers: the main branch of its SANA-WM attention, no camera, eager

and by part, ours and plain PyTorch: the short convolution, RMSNorm with ReLU and scale, the output gate, forward and
backward, each against its floor: what it must read and write at the speed of a copy measured in the same run.

A repetition times every contestant once, launched behind work that empties the L2 cache and keeps the GPU busy
meanwhile. Nothing is timed where ours is more than twice as far from float64 as plain PyTorch.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from frame_gdn import BidirectionalGDN
from frame_gdn.functional import silu_gate

from .sana_wm import CLOCK
from .scan import GIB, extra_peak, relative_error

FRAMES, TRAIN_FRAMES, PARTS_FRAMES, ERROR_FRAMES = (11, 41, 121), 41, 41, 11
VS_TORCH_BAR = 2.0
SANA_WM = {"H": 20, "D": 112, "height": 22, "width": 40}
TINY = {"H": 2, "D": 16, "height": 2, "width": 3}
NAMES = {"ours": "frame_gdn, Triton", "torch": "frame_gdn, plain PyTorch", "diffusers": "diffusers, eager"}
PART_NAMES = {"conv": "short convolution", "norm": "norm with ReLU", "gate": "output gate"}
#: Tokens' worth of traffic: what a part reads and writes, in units of (N, C) bfloat16.
TRAFFIC = {"conv": 2, "norm": 2, "gate": 3, "conv_backward": 3, "norm_backward": 3, "gate_backward": 5}

Json = dict[str, Any]
Run = Callable[[], Any]
Forward = Callable[[Tensor], Tensor]


# --- contestants ------------------------------------------------------------------------------------------------


def make_layer(size: Json, device: torch.device) -> BidirectionalGDN:
    """Random weights; what starts at zero or at the identity is filled."""
    torch.manual_seed(0)
    C = size["H"] * size["D"]
    layer = BidirectionalGDN(C, size["H"])
    with torch.no_grad():
        for linear in (layer.beta_proj, layer.gate_proj, layer.output_gate):
            linear.weight.normal_(std=C**-0.5)
        for norm in (layer.q_norm, layer.k_norm):
            norm.weight.add_(0.1 * torch.randn(C))
        assert layer.conv_k is not None
        layer.conv_k.weight.add_(0.2 * torch.randn_like(layer.conv_k.weight))
    return layer.to(device)


def make_inputs(T: int, size: Json, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Tokens (1, N, C) and the rotary angles (N, D/2)."""
    generator = torch.Generator().manual_seed(T)
    N = T * size["height"] * size["width"]
    x = torch.randn(1, N, size["H"] * size["D"], generator=generator)
    return x.to(device, dtype), 6.28 * torch.rand(N, size["D"] // 2, generator=generator).to(device)


def make_host(layer: BidirectionalGDN, size: Json) -> nn.Module:
    """diffusers' attention with the layer's weights."""
    from diffusers.models.transformers.transformer_sana_wm import BidirectionalGDNUCPESinglePathLiteLA

    C, H = layer.hidden_size, layer.num_heads
    host = BidirectionalGDNUCPESinglePathLiteLA(C, C, cam_dim=C, cam_heads=H, heads=H, qk_norm=True)
    missing, unexpected = host.load_state_dict(layer.state_dict(), strict=False)
    assert not unexpected and all("_cam" in name or name == "recall_gate" for name in missing)
    return host.to(next(layer.parameters()).device).bfloat16()


def on_backend(layer: BidirectionalGDN, backend: str, T: int, angle: Tensor) -> Forward:
    tables = angle.cos(), angle.sin()

    def run(x: Tensor) -> Tensor:
        layer.backend = backend
        return layer(x, T, rotary=tables)[0]

    return run


def on_host(host: nn.Module, T: int, size: Json, angle: Tensor) -> Forward:
    turns = torch.polar(torch.ones_like(angle), angle)
    return lambda x: host(x, HW=(T, size["height"], size["width"]), rotary_emb=turns)


def contestants(layer: BidirectionalGDN, host: nn.Module | None, T: int, size: Json, angle: Tensor) -> Json:
    """By name, a forward pass and the parameters that it uses."""
    weights = [p for _, p in sorted(layer.named_parameters())]
    found: Json = {
        "ours": (on_backend(layer, "triton", T, angle), weights),
        "torch": (on_backend(layer, "torch", T, angle), weights),
    }
    if host is not None:
        own = dict(host.named_parameters())
        found["diffusers"] = on_host(host, T, size, angle), [own[n] for n, _ in sorted(layer.named_parameters())]
    return found


# --- measuring --------------------------------------------------------------------------------------------------


def timed(run: Run, busy: Tensor) -> float:
    """Milliseconds, launched while the GPU is busy emptying its cache."""
    for _ in range(4):  # two milliseconds, in which a layer's kernels can be launched
        busy.zero_()
    start = CLOCK.now()
    run()
    return CLOCK.between(start, CLOCK.now())


def interleaved(runs: dict[str, Run], repetitions: int, busy: Tensor) -> dict[str, Json]:
    times: dict[str, Json] = {name: {"ms": []} for name in runs}
    for run in runs.values():  # compiles
        run()
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            times[name]["ms"].append(timed(run, busy))
    return times


def copy_rate(repetitions: int, busy: Tensor) -> float:
    """Bytes read and written a second by a large copy."""
    target = torch.empty_like(busy)
    target.copy_(busy)
    times = [timed(lambda: target.copy_(busy), busy) for _ in range(repetitions)]
    return 2 * busy.numel() / (1e-3 * statistics.median(times))


def peak(run: Run, kept: int) -> float:
    return extra_peak(run, kept) if CLOCK.on_gpu else 0.0


def nbytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def exactly(layer: BidirectionalGDN, T: int, angle: Tensor, run: Callable[[Forward], Any]) -> Any:
    """`run` of the plain path in float64, the weights those that bfloat16 holds."""
    layer.double()
    result = run(on_backend(layer, "torch", T, angle.double()))
    layer.bfloat16()
    return result


def forward(layer: BidirectionalGDN, host: nn.Module | None, T: int, size: Json, options: Json) -> Json:
    x, angle = make_inputs(T, size, options["device"], torch.bfloat16)
    runs = {name: run for name, (run, _) in contestants(layer, host, T, size, angle).items()}
    exact = exactly(layer, T, angle, lambda run: run(x.double()))
    errors = {name: relative_error(run(x), exact) for name, run in runs.items()}
    del exact
    # Triton's interpreter cuts bfloat16 off where a GPU rounds.
    if CLOCK.on_gpu and not errors["ours"] <= VS_TORCH_BAR * errors["torch"]:
        raise SystemExit(f"ours is wrong at T {T}, nothing is timed: {errors}")
    calls: dict[str, Run] = {name: lambda run=run: run(x) for name, run in runs.items()}  # type: ignore[misc]
    found = interleaved(calls, options["repetitions"], options["busy"])
    for name, call in calls.items():
        found[name] |= {"error": errors[name], "extra_peak_gib": peak(call, nbytes(x))}
    return {"contestants": found}


def gradient_errors(layer: BidirectionalGDN, T: int, size: Json, options: Json) -> dict[str, dict[str, float]]:
    """Of x and of every parameter, by name."""
    x, angle = make_inputs(T, size, options["device"], torch.bfloat16)
    direction = torch.randn_like(x)

    def gradients(run: Forward, x: Tensor = x) -> dict[str, Tensor]:
        weights = dict(layer.named_parameters())
        x = x.detach().requires_grad_()
        grads = torch.autograd.grad(run(x), [x, *weights.values()], direction.to(x.dtype))
        return dict(zip(["x", *weights], grads, strict=True))

    exact = exactly(layer, T, angle, lambda run: gradients(run, x.double()))
    found = {}
    for name, (run, _) in contestants(layer, None, T, size, angle).items():
        found[name] = {n: relative_error(d, exact[n]) for n, d in gradients(run).items()}
    return found


def training(layer: BidirectionalGDN, host: nn.Module | None, T: int, size: Json, options: Json) -> Json:
    """Forward and backward into x and every parameter."""
    x, angle = make_inputs(T, size, options["device"], torch.bfloat16)
    direction = torch.randn_like(x)
    x.requires_grad_()

    def step(run: Forward, weights: list[Tensor]) -> Run:
        return lambda: torch.autograd.grad(run(x), [x, *weights], direction)

    steps = {name: step(*pair) for name, pair in contestants(layer, host, T, size, angle).items()}
    found = interleaved(steps, options["repetitions"], options["busy"])
    for name, both in steps.items():
        found[name]["extra_peak_gib"] = peak(both, nbytes(x, *layer.parameters()))
    return {"contestants": found}


def parts(layer: BidirectionalGDN, T: int, size: Json, options: Json) -> Json:
    """What surrounds the scan, forward and backward, as the layer calls it: keys are a slice of the projection, the
    scan's output is contiguous."""
    x, _ = make_inputs(T, size, options["device"], torch.bfloat16)
    S = size["height"] * size["width"]
    k = layer.qkv(x).chunk(3, -1)[1].detach().requires_grad_()
    scanned, gate = (torch.randn_like(x).requires_grad_() for _ in range(2))
    direction = torch.randn_like(x)
    assert layer.conv_k is not None
    conv, norm = layer.conv_k, layer.k_norm

    def functions(backend: str) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
        return {
            "conv": (
                lambda: conv(k.unflatten(1, (T, S)), None, None, backend=backend).flatten(1, 2),
                [k, conv.weight],
            ),
            "norm": (lambda: norm(k, 0.1, backend), [k, norm.weight]),
            "gate": (lambda: silu_gate(scanned, gate, x.dtype, backend), [scanned, gate]),
        }

    def without_grad(run: Run) -> Run:
        def call() -> None:
            with torch.no_grad():
                run()

        return call

    def backward(out: Tensor, leaves: list[Tensor]) -> Run:
        return lambda: torch.autograd.grad(out, leaves, direction, retain_graph=True)

    runs: dict[str, Run] = {}
    for backend, suffix in (("triton", ""), ("torch", "_torch")):
        for name, (run, leaves) in functions(backend).items():
            runs[f"{name}{suffix}"] = without_grad(run)
            runs[f"{name}_backward{suffix}"] = backward(run(), leaves)
    found = interleaved(runs, options["repetitions"], options["busy"])
    floors = {name: 1e3 * count * nbytes(x) / options["rate"] for name, count in TRAFFIC.items()}
    return {"contestants": found, "floor_ms": floors}


# --- results ----------------------------------------------------------------------------------------------------


def summarize(raw: Json) -> dict[str, float | None]:
    """The figures that the bars are about, from the raw medians of one results file."""

    def ms(part: str, name: str) -> float | None:
        times = raw[part]["contestants"].get(name)
        return None if times is None else statistics.median(times["ms"])

    def ratio(part: str, above: str, below: str = "ours") -> float | None:
        a, b = ms(part, above), ms(part, below)
        return None if a is None or b is None else a / b

    forwards = {T: raw[f"forward_t{T}"]["contestants"] for T in FRAMES}
    grads, train = raw["gradient_errors"], f"train_t{TRAIN_FRAMES}"
    surroundings = f"parts_t{PARTS_FRAMES}"
    floors = raw[surroundings]["floor_ms"]
    return {
        **{f"forward_t{T}_vs_{name}": ratio(f"forward_t{T}", name) for T in FRAMES for name in ("torch", "diffusers")},
        **{f"{train}_vs_{name}": ratio(train, name) for name in ("torch", "diffusers")},
        "relative_error": max(found["ours"]["error"] for found in forwards.values()),
        "relative_error_vs_torch": max(
            found["ours"]["error"] / found["torch"]["error"] for found in forwards.values()
        ),
        "gradient_error_vs_torch": max(grads["ours"][name] / grads["torch"][name] for name in grads["ours"]),
        "extra_peak_gib_t121": forwards[121]["ours"]["extra_peak_gib"],
        "train_extra_peak_gib": raw[train]["contestants"]["ours"]["extra_peak_gib"],
        **{f"{name}_vs_floor": (ms(surroundings, name) or 0.0) / floors[name] for name in TRAFFIC},
        **{f"{name}_vs_torch": ratio(surroundings, f"{name}_torch", name) for name in TRAFFIC},
    }


def table(raw: Json) -> str:
    """The README's table, as Markdown: beside each time, how many of ours it is."""
    train, summary = raw[f"train_t{TRAIN_FRAMES}"]["contestants"], raw["summary"]
    forwards = {T: raw[f"forward_t{T}"]["contestants"] for T in FRAMES}
    lines = [
        f"| a layer, forward, ms | {' | '.join(f'T {T}' for T in FRAMES)} | relative error "
        f"| extra peak, T {FRAMES[-1]} | forward + backward, T {TRAIN_FRAMES} | its extra peak |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, label in NAMES.items():
        if name not in train:
            continue

        def cell(contestants: Json, name: str = name) -> str:
            ms, ours = (statistics.median(contestants[who]["ms"]) for who in (name, "ours"))
            return f"{ms:.3g}" if name == "ours" else f"{ms:.3g} ({ms / ours:.1f}×)"

        largest = forwards[FRAMES[-1]][name]
        times = " | ".join(cell(forwards[T]) for T in FRAMES)
        memory = f"{largest['error']:.1e} | {largest['extra_peak_gib']:.1f} GiB"
        lines.append(f"| {label} | {times} | {memory} | {cell(train)} | {train[name]['extra_peak_gib']:.1f} GiB |")
    parts = ", ".join(
        f"{label} {summary[f'{name}_vs_floor']:.2f} ({summary[f'{name}_backward_vs_floor']:.2f})"
        for name, label in PART_NAMES.items()
    )
    shape = raw["shape"]
    versions = ", ".join(f"{name} {version}" for name, version in raw["versions"].items())
    lines += [
        "",
        f"B {shape['B']}, H {shape['H']}, D {shape['D']}, S {shape['S']}, {shape['dtype']}; {raw['device']}, "
        f"{versions}; `{raw['command']}`: medians of interleaved calls, errors against float64. What surrounds the "
        f"scan, forward (backward), T {PARTS_FRAMES}, in multiples of what reading and writing it takes at a copy's "
        f"speed: {parts}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=".peers", help="folder that benchmarks.peers filled, or none")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--tiny", action="store_true", help="a small layer on any device: does it run?")
    parser.add_argument("--commit", help="of the code that is measured, where git cannot tell")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/layer.json"))
    arguments = parser.parse_args()
    if not (arguments.tiny or CLOCK.on_gpu):
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    if arguments.peers != "none":
        sys.path.insert(0, str(Path(arguments.peers).resolve()))
    size = TINY if arguments.tiny else SANA_WM
    device = torch.device("cuda" if CLOCK.on_gpu else "cpu")
    busy = torch.empty(2**20 if arguments.tiny else 2 * GIB, dtype=torch.uint8, device=device)
    rate = copy_rate(arguments.repetitions, busy)
    options: Json = {"device": device, "busy": busy, "rate": rate, "repetitions": arguments.repetitions}
    layer = make_layer(size, device).bfloat16()
    host = None if arguments.peers == "none" else make_host(layer, size)
    modules = ("torch", "triton") if host is None else ("torch", "triton", "diffusers")
    raw: Json = {
        "benchmark": "layer",
        "command": "python -m benchmarks.layer",
        "commit": arguments.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "device": torch.cuda.get_device_name() if CLOCK.on_gpu else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            **{name: import_module(name).__version__ for name in modules},
        },
        "shape": {"B": 1, "S": size["height"] * size["width"], "H": size["H"], "D": size["D"], "dtype": "bfloat16"},
        "copy_bytes_per_second": rate,
    }
    with torch.no_grad():
        for T in FRAMES:
            raw[f"forward_t{T}"] = forward(layer, host, T, size, options)
    raw["gradient_errors"] = gradient_errors(layer, ERROR_FRAMES, size, options)
    raw[f"train_t{TRAIN_FRAMES}"] = training(layer, host, TRAIN_FRAMES, size, options)
    raw[f"parts_t{PARTS_FRAMES}"] = parts(layer, PARTS_FRAMES, size, options)
    raw["summary"] = summarize(raw)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(raw, indent=1) + "\n")
    print(json.dumps(raw["summary"], indent=1))


if __name__ == "__main__":
    main()
