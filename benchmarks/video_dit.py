"""How fast VideoDiT runs and trains, against the commit before the fused block: `python -m benchmarks.video_dit`.

Needs a GPU of 40 GiB or more and diffusers. The size of SANA-WM with random weights, 22 x 40 latents of 128 channels,
batch 1, bfloat16; without a text (1.57 B parameters) and, in the parts named so, with one of 300 tokens, half of them
padding. The code before is a git worktree of commit `BEFORE`, or the folder that `--before` names, which holds that
commit's `frame_gdn/` and `models/`. Each of the two has a process of its own, and the two are timed alternately.

- forward: T 41 and T 121 latent frames; T 41 with a text
- train: forward with gradient checkpointing and backward, T 41; no optimizer step
- errors: of each in bfloat16 against itself in float32, and between the two in float32, T 5
- kernels: GPU time of one forward by kind of kernel, T 41
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

#: The commit that the bars of this benchmark are about.
BEFORE = "0ec89e0"
GIB = 2**30
HERE = Path(__file__).resolve().parents[1]
FORWARD, TRAIN, PROFILE, ERROR_FRAMES = (41, 121), 41, 41, 5
RELEASED: dict[str, Any] = {"in_channels": 128}
TINY: dict[str, Any] = {"in_channels": 4, "num_layers": 4, "num_attention_heads": 2, "attention_head_dim": 24}
TEXT = 2304

#: Kernels by what is in their names, the first kind that fits; what fits none is elementwise too.
KINDS = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "matrix products": ("gemm", "nvjet", "xmma", "cutlass", "splitk", "cublas"),
    "scan": ("transitions", "scan", "chains", "compose", "project", "gradient"),
    "convolutions": ("glu_conv", "conv_depthwise", "conv2d", "convolve", "dgrad", "wgrad"),
}
ELEMENTWISE = "elementwise"

Json = dict[str, Any]


def kind_of(kernel: str) -> str:
    """What a kernel counts as: torch's own pointwise, reduction, norm and copy kernels, and ours, are elementwise,
    the short convolution on the keys among them."""
    name = kernel.lower()
    torchs_own = name.startswith(("void at::native", "memcpy", "memset"))
    if torchs_own and "flash" not in name and "conv_depthwise" not in name:
        return ELEMENTWISE
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), ELEMENTWISE)


# --- one contestant, in a process of its own ----------------------------------------------------------------------


def fill(model: nn.Module) -> None:
    """Random weights by name, so that both contestants have the same; gates and convolutions that start at zero would
    compute nothing."""
    for index, (name, parameter) in enumerate(sorted(model.named_parameters())):
        generator = torch.Generator(parameter.device).manual_seed(index)
        noise = torch.randn(parameter.shape, generator=generator, device=parameter.device)
        with torch.no_grad():
            if parameter.dim() > 1 and "table" not in name:
                parameter.copy_(noise / parameter[0].numel() ** 0.5)
            elif "norm" in name:
                parameter.copy_(1 + 0.1 * noise)
            else:
                parameter.add_(0.02 * noise)


class Contestant:
    """Builds the models and runs what it is asked for, one line of JSON a request."""

    def __init__(self, tiny: bool) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.config = TINY if tiny else RELEASED
        self.height, self.width = (3, 4) if tiny else (22, 40)
        self.text: bool | None = None
        self.model: Any = None

    def build(self, text: bool) -> None:
        """The model with or without a text, in place of the other one."""
        if self.text == text:
            return
        from models import VideoDiT

        self.model, self.text = None, text
        torch.manual_seed(0)
        with self.device:
            self.model = VideoDiT(**self.config, cross_attention_dim=TEXT if text else None)
        fill(self.model)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.bfloat16()  # as `.bfloat16()`, without diffusers' word on float32 modules
        self.model.eval()

    def inputs(self, frames: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(frames)
        dtype = next(self.model.parameters()).dtype
        latents = torch.randn(1, self.config["in_channels"], frames, self.height, self.width, generator=generator)
        inputs = {"hidden_states": latents.to(self.device, dtype), "timestep": torch.full((1,), 500.0).to(self.device)}
        if self.text:
            inputs["encoder_hidden_states"] = torch.randn(1, 300, TEXT, generator=generator).to(self.device, dtype)
            inputs["encoder_attention_mask"] = (torch.arange(300, device=self.device) < 150).long()[None]
        return inputs

    def forward(self, frames: int) -> Tensor:
        inputs = self.inputs(frames)
        with torch.no_grad():
            sample: Tensor = self.model(**inputs).sample
        return sample

    def train(self, frames: int) -> None:
        inputs = self.inputs(frames)
        self.model.train().enable_gradient_checkpointing()
        self.model(**inputs).sample.float().square().mean().backward()
        self.model.zero_grad(set_to_none=True)
        self.model.eval().disable_gradient_checkpointing()

    def timed(self, run: Callable[[int], Any], frames: int) -> Json:
        """Milliseconds of the GPU's stream, and the peak of allocated memory in GiB, weights included."""
        if self.device.type == "cpu":
            clock = import_module("time").perf_counter
            start = clock()
            run(frames)
            return {"ms": 1e3 * (clock() - start), "peak_gib": 0.0}
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(frames)
        end.record()
        end.synchronize()
        peak = torch.cuda.max_memory_allocated() / GIB
        torch.cuda.empty_cache()  # the other process needs the memory
        return {"ms": start.elapsed_time(end), "peak_gib": peak}

    def profile(self, frames: int) -> Json:
        """GPU milliseconds by kernel of one forward."""
        from torch.profiler import ProfilerActivity, profile

        self.forward(frames)
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            self.forward(frames)
            if on_gpu:
                torch.cuda.synchronize()
        spent: dict[str, list[float]] = defaultdict(list)
        for event in profiler.events():
            if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA:
                microseconds = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
                spent[event.name].append(microseconds / 1e3)
        return {name: {"ms": sum(times), "calls": len(times)} for name, times in spent.items()}

    def outputs(self, frames: int) -> dict[str, Tensor]:
        """The output in bfloat16, and with the same weights in float32."""
        found = {"bfloat16": self.forward(frames).float().cpu()}
        self.model.float()
        found["float32"] = self.forward(frames).cpu()
        self.text = self.model = None
        return found

    def serve(self) -> None:
        for line in sys.stdin:
            request = json.loads(line)
            self.build(request["text"])
            what, frames = request["what"], request["frames"]
            if what == "outputs":
                torch.save(self.outputs(frames), request["path"])
                answer: Json = {}
            elif what == "profile":
                answer = self.profile(frames)
            else:
                answer = self.timed(self.train if what == "train" else self.forward, frames)
            answer["parameters"] = 0 if self.model is None else sum(p.numel() for p in self.model.parameters())
            print("answer " + json.dumps(answer), flush=True)


# --- both, alternately ---------------------------------------------------------------------------------------------


class Process:
    """A contestant that imports its code from `folder`."""

    def __init__(self, folder: Path, tiny: bool) -> None:
        arguments = [sys.executable, str(HERE / "benchmarks" / "video_dit.py"), "--serve", str(folder)]
        self.pipes = subprocess.Popen(
            [*arguments, *(["--tiny"] if tiny else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, what: str, frames: int, *, text: bool = False, **more: Any) -> Json:
        assert self.pipes.stdin is not None and self.pipes.stdout is not None
        print(json.dumps({"what": what, "frames": frames, "text": text, **more}), file=self.pipes.stdin, flush=True)
        for line in self.pipes.stdout:
            if line.startswith("answer "):
                answer: Json = json.loads(line.removeprefix("answer "))
                return answer
        raise SystemExit(f"the process ended with exit code {self.pipes.wait()} on {what}, T {frames}")

    def close(self) -> None:
        assert self.pipes.stdin is not None
        self.pipes.stdin.close()
        self.pipes.wait()


@contextmanager
def code_before(folder: Path | None) -> Iterator[Path]:
    """The folder with the code before: the given one, or a git worktree of `BEFORE` for as long as it is needed."""
    if folder is not None:
        for name in ("frame_gdn", "models"):
            if not (folder / name).is_dir():
                raise SystemExit(f"--before {folder} has no folder {name}/: it takes a checkout of {BEFORE}")
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory() as parent:
        path = Path(parent) / "before"
        git = ["git", "-C", str(HERE), "worktree"]
        subprocess.run([*git, "add", "--detach", str(path), BEFORE], check=True, stdout=subprocess.DEVNULL)
        try:
            yield path
        finally:
            subprocess.run([*git, "remove", "--force", str(path)], check=True)


def flash4_serves() -> bool:
    from frame_gdn.kernels import flash4  # here, since a contestant imports its own frame_gdn

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return flash4.refusal(torch.empty(0, dtype=torch.bfloat16, device=device), 112) is None


def contest(processes: dict[str, Process], what: str, frames: int, repetitions: int, text: bool = False) -> Json:
    """Every repetition's milliseconds and the peak memory of each; the first round compiles and is not counted."""
    rounds = [{name: run(what, frames, text=text) for name, run in processes.items()} for _ in range(repetitions + 1)][
        1:
    ]
    return {
        "contestants": {
            name: {"ms": [r[name]["ms"] for r in rounds], "peak_gib": max(r[name]["peak_gib"] for r in rounds)}
            for name in processes
        }
    }


def kernels(process: Process, frames: int) -> Json:
    """GPU milliseconds of one forward by kind of kernel, and the kernels that take most."""
    spent = process("profile", frames)
    del spent["parameters"]
    by_kind: dict[str, float] = defaultdict(float)
    for name, kernel in spent.items():
        by_kind[kind_of(name)] += kernel["ms"]
    longest = sorted(spent, key=lambda name: -spent[name]["ms"])[:30]
    return {
        "kinds": dict(by_kind),
        "longest": [{"name": name[:120], "kind": kind_of(name), **spent[name]} for name in longest],
    }


def errors(processes: dict[str, Process]) -> Json:
    """Of each in bfloat16 against itself in float32; and of ours against before, both in float32."""
    found: dict[str, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, run in processes.items():
            path = Path(folder) / name
            run("outputs", ERROR_FRAMES, text=True, path=str(path))
            found[name] = torch.load(path)

    def relative(ours: Tensor, exact: Tensor) -> float:
        return float((ours - exact).norm() / exact.norm())

    return {
        **{name: relative(f["bfloat16"], found["before"]["float32"]) for name, f in found.items()},
        "between": relative(found["ours"]["float32"], found["before"]["float32"]),
    }


# --- results ------------------------------------------------------------------------------------------------------


def summarize(raw: Json) -> dict[str, float]:
    """The figures that the bars are about, from the raw medians of one results file."""

    def ratio(part: str) -> float:
        before, ours = (statistics.median(raw[part]["contestants"][name]["ms"]) for name in ("before", "ours"))
        return before / ours

    def share(name: str) -> float:
        kinds = raw["kernels"][name]["kinds"]
        return float(kinds[ELEMENTWISE] / sum(kinds.values()))

    timed = [part for part, value in raw.items() if isinstance(value, dict) and "contestants" in value]
    return {
        **{f"{part}_vs_before": ratio(part) for part in timed},
        "elementwise_share": share("ours"),
        "elementwise_share_before": share("before"),
        "error_vs_before": raw["errors"]["ours"] / raw["errors"]["before"],
    }


def table(raw: Json) -> str:
    """The README's table, as Markdown."""
    titles = {f"forward_t{T}": f"forward, T {T}" for T in FORWARD}
    titles |= {
        f"forward_t{FORWARD[0]}_text": f"forward with a text, T {FORWARD[0]}",
        f"train_t{TRAIN}": f"training step, checkpointing, T {TRAIN}",
    }
    lines = ["| VideoDiT | before | on the fused block | faster | peak memory |", "| --- | --- | --- | --- | --- |"]
    for part, title in titles.items():
        both = [raw[part]["contestants"][name] for name in ("before", "ours")]
        times = " | ".join(f"{statistics.median(one['ms']):,.0f} ms" for one in both)
        peaks = " → ".join(f"{one['peak_gib']:.1f}" for one in both)
        lines.append(f"| {title} | {times} | {raw['summary'][f'{part}_vs_before']:.2f}× | {peaks} GiB |")
    summary, versions = raw["summary"], ", ".join(f"{name} {version}" for name, version in raw["versions"].items())
    has_flash4 = "flash-attn-4" in raw["versions"]
    flash4 = "; now with flash-attn-4 in the softmax blocks, before without" if has_flash4 else ""
    lines += [
        "",
        f"{raw['shape']['parameters'] / 1e9:.2f} B random parameters in bfloat16, B {raw['shape']['B']}, S "
        f"{raw['shape']['S']}; before is commit {raw['before']}{flash4}; {raw['device']}, {versions}; "
        f"`{raw['command']}`: "
        "medians of interleaved repetitions. Elementwise kernels and copies: "
        f"{summary['elementwise_share_before']:.0%} of the GPU's time before, {summary['elementwise_share']:.0%} now "
        f"(forward, T {PROFILE}).",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help=f"a folder with the code of {BEFORE}; without it, git is asked")
    parser.add_argument("--repetitions", type=int, default=5, help="of the forward at T 41; the others take three")
    parser.add_argument("--tiny", action="store_true", help="a small model and frames, on any device: does it run?")
    parser.add_argument("--commit", help="of the code that is measured, where git cannot tell")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/video_dit.json"))
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.tiny or torch.cuda.is_available()):
        raise SystemExit("this benchmark needs a GPU")
    if options.serve:
        sys.path[0] = str(options.serve)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        Contestant(options.tiny).serve()
        return

    raw: Json = {
        "benchmark": "video_dit",
        "command": "python -m benchmarks.video_dit",
        "commit": options.commit or subprocess.check_output(["git", "rev-parse", "HEAD"], text=True).strip(),
        "before": BEFORE,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "versions": {
            "python": sys.version.split()[0],
            **{name: import_module(name).__version__ for name in ("torch", "triton", "diffusers")},
        },
    }
    if flash4_serves():  # then ours takes it
        raw["versions"]["flash-attn-4"] = version("flash-attn-4")
    lengths, short = ((3, 5), 3) if options.tiny else (FORWARD, TRAIN)
    few = min(options.repetitions, 3)
    with ExitStack() as stack:
        before = stack.enter_context(code_before(options.before))
        processes = {name: Process(folder, options.tiny) for name, folder in (("before", before), ("ours", HERE))}
        for process in processes.values():
            stack.callback(process.close)
        answer = processes["ours"]("forward", short)
        raw["shape"] = {"B": 1, "S": 12 if options.tiny else 880, "parameters": answer["parameters"]}
        for T, actual, repetitions in zip(FORWARD, lengths, (options.repetitions, few), strict=True):
            raw[f"forward_t{T}"] = contest(processes, "forward", actual, repetitions)
        raw[f"train_t{TRAIN}"] = contest(processes, "train", short, few)
        raw["kernels"] = {name: kernels(process, short) for name, process in processes.items()}
        raw[f"forward_t{FORWARD[0]}_text"] = contest(processes, "forward", short, few, text=True)
        raw["errors"] = errors(processes)
    raw["summary"] = summarize(raw)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(raw, indent=1) + "\n")
    print(json.dumps({**{name: k["kinds"] for name, k in raw["kernels"].items()}, **raw["summary"]}, indent=1))


if __name__ == "__main__":
    main()
