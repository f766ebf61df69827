"""How far a swapped SanaVideo is from the stock one before any training, by `start_scale`.

    python -m benchmarks.sana_video_start

A model with random weights on the CPU, 21 latent frames, float32: relative error of the whole model's output. The
default of `frame_gdn.hosts.sana_video` is the largest of these scales within 0.1 % for every seed: trained keys are
more alike than random ones, so that the delta rule erases more of them, and 2 % is what should not be passed then.
"""

import argparse
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from diffusers import SanaVideoTransformer3DModel

from frame_gdn import swap

RESULTS = Path(__file__).parent / "results" / "sana_video_start.json"
SCALES = (1.0, 0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
SEEDS = range(5)
FRAMES, HEIGHT, WIDTH, TEXT = 21, 16, 24, 6
MODEL = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 4,
    "attention_head_dim": 56,
    "num_layers": 6,
    "num_cross_attention_heads": 4,
    "cross_attention_head_dim": 56,
    "cross_attention_dim": 224,
    "caption_channels": 32,
    "mlp_ratio": 2.5,
    "rope_max_seq_len": 64,
}


def random_model(seed: int) -> SanaVideoTransformer3DModel:
    """No parameter at its starting value: matrices keep a signal's size, norms' weights lie around 1."""
    model = SanaVideoTransformer3DModel(**MODEL).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = parameter[0].numel() ** -0.5 if parameter.dim() > 1 else 0.2
            offset = 1.0 if "norm" in name and parameter.dim() == 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread + offset)
    return model


@torch.no_grad()
def errors(seed: int) -> list[float]:
    """‖swapped - stock‖ / ‖stock‖ at every scale."""
    model = random_model(seed)
    generator = torch.Generator().manual_seed(seed + 1000)
    latents = torch.randn(1, MODEL["in_channels"], FRAMES, HEIGHT, WIDTH, generator=generator)
    text = torch.randn(1, TEXT, MODEL["caption_channels"], generator=generator)
    inputs = {"hidden_states": latents, "encoder_hidden_states": text, "timestep": torch.tensor([500.0])}
    stock = model(**inputs).sample
    measured = []
    for scale in SCALES:
        swapped = swap(model, start_scale=scale)(**inputs).sample
        measured.append(float((swapped - stock).norm() / stock.norm()))
    return measured


def summarize(raw: dict[str, Any]) -> dict[str, float]:
    """The figures that the bars ask for, from the raw errors by seed and scale of one results file."""
    by_seed = raw["relative_errors_by_seed"]
    worst = {scale: max(run[i] for run in by_seed) for i, scale in enumerate(SCALES)}
    within = max(scale for scale in SCALES if worst[scale] <= 0.001)
    return {
        "default_start_scale": within,
        "error_at_default": worst[within],
        "error_at_1": worst[1.0],
        "smallest_error": min(worst.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS)
    output = parser.parse_args().output
    by_seed = [errors(seed) for seed in SEEDS]
    result: dict[str, Any] = {
        "benchmark": "sana_video_start",
        "command": "python -m benchmarks.sana_video_start",
        "device": f"CPU, {platform.machine()}",
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("torch", "diffusers")}},
        "model": MODEL,
        "latents": [FRAMES, HEIGHT, WIDTH],
        "scales": SCALES,
        "seeds": list(SEEDS),
        "relative_errors_by_seed": by_seed,
    }
    result["summary"] = summarize(result)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
