"""The README's tables and plots from benchmarks/results/*.json: `python -m benchmarks.report`."""

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import layer, sana_wm, video_dit

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "scan.json"
PLOT = HERE / "results" / "scan.png"
LAYER = HERE / "results" / "layer.json"
VIDEO_DIT = HERE / "results" / "video_dit.json"
SANA_WM = HERE / "results" / "sana_wm.json"
SANA_WM_PLOT = HERE / "results" / "sana_wm.png"
README = HERE.parent / "README.md"
NAMES = {
    "ours": "frame_gdn, Triton",
    "ours_given": "the same, rotated q and k passed in",
    "sglang": "sglang's Triton kernels (inference only)",
    "torch": "frame_gdn, plain PyTorch",
    "diffusers": "diffusers, eager",
}
FRAMES = (11, 41, 121)


def median(raw: dict[str, Any], part: str, name: str) -> float | None:
    times = raw[part]["contestants"].get(name)
    return None if times is None else statistics.median(times["ms"])


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def table(raw: dict[str, Any]) -> str:
    """Times, error and memory of every contestant, as Markdown."""
    shape, versions, summary = raw["shape"], raw["versions"], raw["summary"]
    columns = [f"T {T}" for T in FRAMES]
    lines = [
        f"| forward, ms | {' | '.join(columns)} | relative error | extra peak, T 121 | forward + backward, T 41 |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, label in NAMES.items():
        found = raw["forward_t121"]["contestants"].get(name)
        if found is None:
            continue
        times = " | ".join(milliseconds(median(raw, f"forward_t{T}", name)) for T in FRAMES)
        train = raw["train_t41"]["contestants"].get(name)
        both = "–" if train is None else f"{milliseconds(statistics.median(train['ms']))} ms"
        lines.append(f"| {label} | {times} | {found['error']:.1e} | {found['extra_peak_gib']:.2f} GiB | {both} |")
    floors = " | ".join(milliseconds(raw[f"forward_t{T}"]["floor_ms"]) for T in FRAMES)
    lines.append(f"| lower bound: q, k, v and out once each at the speed of a copy | {floors} | | | |")
    lines += [
        "",
        f"B {shape['B']}, H {shape['H']}, D {shape['D']}, S {shape['S']}, {shape['dtype']}; {raw['device']}, "
        f"{', '.join(f'{k} {v}' for k, v in versions.items())}; `{raw['command']}`: medians of interleaved calls. "
        "Errors are against float64. "
        f"`cp_frame_gdn_scan` on one rank, T 41, is {summary['primitive_t41_vs_sana']:.0f} times as fast as the "
        "scheme of NVlabs/Sana in eager PyTorch; "
        f"T 484 takes {summary['time_t484_over_t121']:.2f} times as long as T 121.",
        "",
        f"![time against frames]({PLOT.relative_to(HERE.parent)})",
    ]
    return "\n".join(lines) + "\n"


def section(readme: str, name: str, content: str) -> str:
    """The README with the text between the marks of one section replaced."""
    begin, end = f"<!-- {name}: python -m benchmarks.report -->\n", f"<!-- {name} ends -->\n"
    before, rest = readme.split(begin)
    _, after = rest.split(end)
    return before + begin + content + end + after


def filled(readme: str) -> str:
    """The README with its tables written again."""
    readme = section(readme, "scan", table(json.loads(RESULTS.read_text())))
    if LAYER.exists():
        readme = section(readme, "layer", layer.table(json.loads(LAYER.read_text())))
    if VIDEO_DIT.exists():
        readme = section(readme, "video_dit", video_dit.table(json.loads(VIDEO_DIT.read_text())))
    shown = f"\n![where a forward pass spends its time]({SANA_WM_PLOT.relative_to(HERE.parent)})\n"
    return section(readme, "sana_wm", sana_wm.table(json.loads(SANA_WM.read_text())) + shown)


def plot(raw: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, label in NAMES.items():
        times = [median(raw, f"forward_t{T}", name) for T in FRAMES]
        if None not in times:
            axes.plot(FRAMES, times, marker="o", label=label)
    axes.plot(FRAMES, [raw[f"forward_t{T}"]["floor_ms"] for T in FRAMES], "k--", label="lower bound by memory traffic")
    axes.set(xscale="log", yscale="log", xlabel="latent frames T", ylabel="forward, ms", xticks=FRAMES)
    axes.set_xticklabels([str(T) for T in FRAMES])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1))
    figure.savefig(PLOT, dpi=120, bbox_inches="tight")


def main() -> None:
    README.write_text(filled(README.read_text()))
    plot(json.loads(RESULTS.read_text()))
    sana_wm.plot(json.loads(SANA_WM.read_text()), SANA_WM_PLOT)


if __name__ == "__main__":
    main()
