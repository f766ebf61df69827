"""How fast, how exact and how large is the bidirectional frame scan, beside its peers: `python -m benchmarks.scan`.

Needs a GPU, and the peers that `python -m benchmarks.peers` fetched (`--peers none` leaves their figures null).
One run, one set of inputs at SANA-WM's size, contestants interleaved:

- ours: `bidirectional_gdn`, rotary from tables inside the kernels; ours_given: the same with q_rot and k_rot given
- torch: the plain PyTorch backend
- diffusers: the scan of its SANA-WM transformer, eager
- sglang: its Triton kernels in their default configuration; inference only

A repetition times each contestant in order and keeps the median of three calls. A timed call follows work that empties
the L2 cache and keeps the GPU busy while the call's kernels are being launched (`ms`); `call_ms` is one call seen from
Python, from an idle GPU to an idle GPU. No contestant of ours is timed whose error against float64 is beyond its bar.
"""

import argparse
import functools
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from frame_gdn import cp_frame_gdn_scan
from frame_gdn.functional import rotary as rotary_embedding
from frame_gdn.gdn import bidirectional_gdn
from frame_gdn.kernels.naive import naive_bidirectional_gdn

from .peers import SGLANG_FILE

B, H, D, S = 1, 20, 112, 880
EPS = 1e-8
FRAMES = (11, 41, 121)
GIB = 2**30
ERROR_BARS = {"bf16": 3e-3, "fp32": 1e-5}
VS_TORCH_BAR = 2.0
BACKENDS = {"ours": "triton", "torch": "torch"}

Json = dict[str, Any]
Run = Callable[[], Tensor]


# --- inputs and references --------------------------------------------------------------------------------------


def make_inputs(T: int, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Tokens as a fused qkv projection leaves them, after norm, ReLU and key scale; gates; rotary tables."""
    torch.manual_seed(T)
    N = T * S
    qkv = torch.randn(B, N, 3, H, D, device="cuda", dtype=dtype)
    qkv[:, :, :2].relu_()
    qkv[:, :, 1] *= (D * S) ** -0.5
    q, k, v = qkv.unbind(2)
    beta = torch.rand(B, N, H, device="cuda").to(dtype)
    decay = 0.8 + 0.2 * torch.rand(B, T, H, device="cuda")
    angle = 2 * torch.pi * torch.rand(N, D // 2, device="cuda")
    return {"q": q, "k": k, "v": v, "beta": beta, "decay": decay}, (angle.cos(), angle.sin())


def reference(inputs: dict[str, Tensor], tables: tuple[Tensor, Tensor] | None) -> Tensor:
    """The recurrence in float64, differentiable; rotated in float64 where tables are given."""
    wide = {name: x.double() for name, x in inputs.items()}
    if tables is not None:
        cos, sin = (table.double() for table in tables)
        wide |= {f"{name}_rot": rotary_embedding(wide[name], cos, sin, backend="torch") for name in ("q", "k")}
    return naive_bidirectional_gdn(**wide, eps=EPS)[0]


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return float((ours.detach().double() - exact).norm() / exact.norm())


# --- contestants ------------------------------------------------------------------------------------------------


def load_peers(folder: str) -> Json:
    """diffusers' module and sglang's file from where `benchmarks.peers` put them."""
    if folder == "none":
        return {}
    sys.path.insert(0, folder)
    from diffusers.models.transformers.transformer_sana_wm import SanaWMBidirectionalGDNAttention

    spec = importlib.util.spec_from_file_location("sglang_sana_wm", Path(folder) / SGLANG_FILE)
    assert spec is not None and spec.loader is not None
    sglang = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = sglang
    spec.loader.exec_module(sglang)
    return {"diffusers": SanaWMBidirectionalGDNAttention(eps=EPS), "sglang": sglang}


def ours(inputs: dict[str, Tensor], tables: tuple[Tensor, Tensor], **options: Any) -> Run:
    return lambda: bidirectional_gdn(**inputs, rotary=tables, eps=EPS, **options)[0]


def ours_given(inputs: dict[str, Tensor]) -> Run:
    return lambda: bidirectional_gdn(**inputs, eps=EPS, backend="triton")[0]


def without_key_scale(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    k = inputs["k"].detach()
    unscaled = (k.float() * (D * S) ** 0.5).to(k.dtype).requires_grad_(inputs["k"].requires_grad)
    return {**inputs, "k": unscaled}


def diffusers(module: Any, inputs: dict[str, Tensor], tables: tuple[Tensor, Tensor]) -> Run:
    """Takes keys without the key scale: the module multiplies it in."""
    T = inputs["decay"].shape[1]
    q, k, v, beta, decay = inputs.values()
    turns = torch.complex(*tables)
    recall = torch.zeros(1, device="cuda")

    def run() -> Tensor:
        by_frame = beta.unflatten(1, (T, S)).permute(0, 3, 1, 2)
        out: Tensor = module(q, k, v, by_frame, decay.transpose(1, 2), recall, T, rotary_emb=turns)
        return out.unflatten(-1, (H, D))

    return run


def sglang(module: Any, inputs: dict[str, Tensor], tables: tuple[Tensor, Tensor]) -> Run:
    """Norm weights and inverse roots of 1, so that it computes what the others do from the same tensors."""
    T = inputs["decay"].shape[1]
    q, k, v, beta, decay = inputs.values()
    qkv = torch.stack([q, k, v], 2)
    ones, weight = torch.ones(B, T * S, device="cuda"), torch.ones(H * D, device="cuda")
    cos = tables[0].repeat_interleave(2, -1).contiguous()
    sin = torch.stack([-tables[1], tables[1]], -1).flatten(-2).contiguous()
    beta = beta.unflatten(1, (T, S)).permute(0, 3, 1, 2).contiguous()
    decay = decay.transpose(1, 2).contiguous()
    return lambda: module.fused_bigdn_bidi_chunkwise(
        qkv, ones, ones, weight, weight, cos, sin, beta, decay, F=T, S=S, k_scale=1.0, eps=EPS
    )


def sana_scan(W: Tensor, U: Tensor, W_z: Tensor, U_z: Tensor) -> tuple[Tensor, Tensor]:
    """The context-parallel scan of NVlabs/Sana, written anew: a local scan from zero, the cumulative products of all
    frames stored, and the state that arrives added to every frame as a correction."""
    BH, T = W.shape[:2]
    S_t, z_t = torch.zeros_like(U[:, 0]), torch.zeros_like(U_z[:, 0])
    P_t = torch.eye(W.shape[-1], dtype=W.dtype, device=W.device).expand(BH, -1, -1)
    P_z_t = P_t
    states, zs, products, products_z = [], [], [], []
    for t in range(T):
        S_t = S_t @ W[:, t] + U[:, t]
        z_t = (W_z[:, t] @ z_t.unsqueeze(-1)).squeeze(-1) + U_z[:, t]
        P_t, P_z_t = P_t @ W[:, t], W_z[:, t] @ P_z_t
        for kept, x in zip((states, zs, products, products_z), (S_t, z_t, P_t, P_z_t), strict=True):
            kept.append(x)
    arrived, arrived_z = torch.zeros_like(U[:, :1]), torch.zeros_like(U_z[:, :1])
    S_all = torch.stack(states, 1) + arrived @ torch.stack(products, 1)
    z_all = torch.stack(zs, 1) + (torch.stack(products_z, 1) @ arrived_z.unsqueeze(-1)).squeeze(-1)
    return S_all, z_all


# --- measuring --------------------------------------------------------------------------------------------------


def timed(run: Callable[[], Any], busy: Tensor) -> float:
    """Milliseconds on the GPU, launched while it is busy emptying its cache."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    busy.zero_()
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def called(run: Callable[[], Any]) -> float:
    """Milliseconds of one call, from an idle GPU to an idle GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def interleaved(runs: dict[str, Callable[[], Any]], repetitions: int, busy: Tensor) -> dict[str, Json]:
    """Each repetition's median of three calls, contestant by contestant."""
    times: dict[str, Json] = {name: {"ms": [], "call_ms": []} for name in runs}
    for run in runs.values():
        run()
        run()
    for _ in range(repetitions):
        for name, run in runs.items():
            times[name]["ms"].append(statistics.median(timed(run, busy) for _ in range(3)))
            times[name]["call_ms"].append(statistics.median(called(run) for _ in range(3)))
    return times


def extra_peak(run: Callable[[], Any], kept_bytes: int) -> float:
    """GiB beyond what was there before the call and `kept_bytes` of results."""
    run()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before - kept_bytes) / GIB


def copy_rate(repetitions: int) -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    times = [timed(lambda: target.copy_(source), source) for _ in range(repetitions)]
    return 2 * source.numel() / (1e-3 * statistics.median(times))


def forward(T: int, peers: Json, repetitions: int, busy: Tensor, rate: float) -> Json:
    """Every contestant's times, error and peak at T frames; the floors from a copy's rate."""
    inputs, tables = make_inputs(T)
    given = inputs | {f"{name}_rot": rotary_embedding(inputs[name], *tables, backend="torch") for name in ("q", "k")}
    runs: dict[str, Run] = {
        "ours": ours(inputs, tables, backend="triton"),
        "ours_given": ours_given(given),
        "torch": ours(inputs, tables, backend="torch"),
    }
    if peers:
        runs["diffusers"] = diffusers(peers["diffusers"], without_key_scale(inputs), tables)
        runs["sglang"] = sglang(peers["sglang"], inputs, tables)
    errors = {"ours_given": relative_error(runs["ours_given"](), reference(given, None))}
    exact = reference(inputs, tables)
    errors |= {name: relative_error(run(), exact) for name, run in runs.items() if name not in errors}
    del exact
    for name in ("ours", "ours_given"):
        if not errors[name] <= min(ERROR_BARS["bf16"], VS_TORCH_BAR * errors["torch"]):
            raise SystemExit(f"{name} is wrong at T {T}, nothing is timed: {errors}")
    out_bytes = inputs["q"].numel() * inputs["q"].element_size()
    found = interleaved(runs, repetitions, busy)
    for name, run in runs.items():
        found[name] |= {"error": errors[name], "extra_peak_gib": extra_peak(run, out_bytes)}
    floor = 1e3 * 4 * out_bytes / rate
    return {"contestants": found, "floor_ms": floor, "floor_given_ms": 1.5 * floor}


def long_forward(T: int, repetitions: int, busy: Tensor) -> Json:
    inputs, tables = make_inputs(T)
    return {"contestants": interleaved({"ours": ours(inputs, tables, backend="triton")}, repetitions, busy)}


def float32_error(T: int) -> dict[str, float]:
    """Of float32 inputs; and of bfloat16 ones with precision="exact" before they are rounded to be compared."""
    inputs, tables = make_inputs(T, torch.float32)
    exact = reference(inputs, tables)
    found = {name: relative_error(ours(inputs, tables, backend=name)(), exact) for name in ("triton", "torch")}
    if not found["triton"] <= ERROR_BARS["fp32"]:
        raise SystemExit(f"float32 is wrong: {found}")
    return found


def gradient_errors(T: int) -> dict[str, dict[str, float]]:
    """Relative errors of every gradient, all inputs and the output's gradient bfloat16, ours and plain torch's."""
    inputs, tables = make_inputs(T)
    inputs = {name: x.bfloat16() for name, x in inputs.items()}
    direction = torch.randn_like(inputs["q"].contiguous())

    def gradients(function: Callable[[dict[str, Tensor]], Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
        leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
        out = function(leaves)
        grads = torch.autograd.grad(out, list(leaves.values()), direction.to(out.dtype))
        return dict(zip(leaves, grads, strict=True))

    exact = gradients(lambda leaves: reference(leaves, tables), torch.float64)
    found = {}
    for name, backend in BACKENDS.items():
        run = functools.partial(ours, tables=tables, backend=backend)
        grads = gradients(lambda leaves, run=run: run(leaves)(), torch.bfloat16)  # type: ignore[misc]
        found[name] = {x: relative_error(grads[x], exact[x]) for x in grads}
    return found


def training(T: int, peers: Json, repetitions: int, busy: Tensor) -> Json:
    """Forward and backward into q, k, v, beta and decay."""
    inputs, tables = make_inputs(T)
    leaves = {name: x.contiguous().requires_grad_() for name, x in inputs.items()}
    direction = torch.randn_like(leaves["q"])
    runs = {name: (ours(leaves, tables, backend=backend), leaves) for name, backend in BACKENDS.items()}
    if peers:
        unscaled = without_key_scale(leaves)
        runs["diffusers"] = diffusers(peers["diffusers"], unscaled, tables), unscaled

    def step(run: Run, leaves: dict[str, Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(run(), list(leaves.values()), direction)

    steps = {name: step(*contestant) for name, contestant in runs.items()}
    found = interleaved(steps, repetitions, busy)
    kept = sum(x.numel() * x.element_size() for x in leaves.values())
    for name, both in steps.items():
        found[name]["extra_peak_gib"] = extra_peak(both, kept)
    return {"contestants": found}


def primitive(T: int, repetitions: int, busy: Tensor) -> Json:
    """`cp_frame_gdn_scan` on one rank, float32, beside the scheme of NVlabs/Sana."""
    torch.manual_seed(0)
    k = torch.relu(torch.randn(B * H, T, S, D, device="cuda")) * (D * S) ** -0.5
    eye = torch.eye(D, device="cuda")
    W = 0.9 * (eye - k.mT @ k)
    U, U_z = torch.randn_like(k).mT @ k, k.sum(-2)
    inputs = (W.contiguous(), U.contiguous(), W.contiguous(), U_z.contiguous())
    del k
    exact = sana_scan(*(x.double() for x in inputs))  # type: ignore[misc]
    runs: dict[str, Callable[[], Any]] = {
        "ours": lambda: cp_frame_gdn_scan(*inputs, backend="triton"),
        "sana": lambda: sana_scan(*inputs),
    }
    errors = {name: max(relative_error(x, y) for x, y in zip(run(), exact, strict=True)) for name, run in runs.items()}
    if not errors["ours"] <= ERROR_BARS["fp32"]:
        raise SystemExit(f"the primitive is wrong, nothing is timed: {errors}")
    found = interleaved(runs, repetitions, busy)
    for name in runs:
        found[name]["error"] = errors[name]
    return {"contestants": found}


# --- results ----------------------------------------------------------------------------------------------------


def summarize(raw: Json) -> dict[str, float | None]:
    """The figures that the bars are about, from the raw medians of one results file."""

    def ms(part: str, name: str) -> float | None:
        times = raw[part]["contestants"].get(name)
        return None if times is None else statistics.median(times["ms"])

    def ratio(part: str, above: str, below: str = "ours") -> float | None:
        a, b = ms(part, above), ms(part, below)
        return None if a is None or b is None else a / b

    forward = [raw[f"forward_t{T}"] for T in FRAMES]
    times = {T: ms(f"forward_t{T}", "ours") for T in FRAMES}
    grads = raw["gradient_errors"]
    ours_121, ours_484 = ms("forward_t121", "ours"), ms("forward_t484", "ours")
    assert ours_121 is not None and ours_484 is not None
    return {
        **{f"forward_t{T}_vs_sglang": ratio(f"forward_t{T}", "sglang") for T in FRAMES},
        **{f"forward_t{T}_vs_diffusers": ratio(f"forward_t{T}", "diffusers") for T in FRAMES},
        **{f"forward_t{T}_vs_torch": ratio(f"forward_t{T}", "torch") for T in FRAMES},
        **{f"forward_t{T}_vs_floor": (times[T] or 0.0) / raw[f"forward_t{T}"]["floor_ms"] for T in FRAMES},
        "relative_error_bf16": max(run["contestants"]["ours"]["error"] for run in forward),
        "relative_error_bf16_vs_torch": max(
            run["contestants"]["ours"]["error"] / run["contestants"]["torch"]["error"] for run in forward
        ),
        "relative_error_fp32": raw["float32_error"]["triton"],
        "extra_peak_gib_t121": raw["forward_t121"]["contestants"]["ours"]["extra_peak_gib"],
        "train_t41_vs_diffusers": ratio("train_t41", "diffusers"),
        "train_t41_vs_torch": ratio("train_t41", "torch"),
        "train_extra_peak_gib_t41": raw["train_t41"]["contestants"]["ours"]["extra_peak_gib"],
        "gradient_error_bf16_vs_torch": max(grads["ours"][x] / grads["torch"][x] for x in grads["ours"]),
        "primitive_t41_vs_sana": ratio("primitive_t41", "sana"),
        "time_t484_over_t121": ours_484 / ours_121,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default=".peers", help="folder that benchmarks.peers filled, or none")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--commit", help="of the code that is measured, where git cannot tell")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/scan.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU")
    torch.backends.cuda.matmul.allow_tf32 = False
    peers = load_peers(options.peers)
    busy = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
    rate = copy_rate(options.repetitions)
    raw: Json = {
        "benchmark": "scan",
        "command": "python -m benchmarks.scan",
        "commit": options.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": sys.version.split()[0],
            "torch": torch.__version__,
            "triton": importlib.import_module("triton").__version__,
            **({"diffusers": importlib.import_module("diffusers").__version__, "sglang": "0.5.23"} if peers else {}),
        },
        "shape": {"B": B, "H": H, "D": D, "S": S, "dtype": "bfloat16"},
        "copy_bytes_per_second": rate,
    }
    with torch.no_grad():
        for T in FRAMES:
            raw[f"forward_t{T}"] = forward(T, peers, options.repetitions, busy, rate)
        raw["forward_t484"] = long_forward(484, options.repetitions, busy)
        raw["float32_error"] = float32_error(11)
        raw["primitive_t41"] = primitive(41, options.repetitions, busy)
    raw["gradient_errors"] = gradient_errors(11)
    raw["train_t41"] = training(41, peers, options.repetitions, busy)
    raw["summary"] = summarize(raw)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    print(json.dumps(raw["summary"], indent=1))


if __name__ == "__main__":
    main()
