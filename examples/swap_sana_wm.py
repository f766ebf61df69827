"""Swap frame-wise GDN into SANA-WM: the same weights, the same output, less time and memory.

    python examples/swap_sana_wm.py --tiny                      # a small random model, offline
    python examples/swap_sana_wm.py --model FOLDER_OR_HUB_NAME  # a pipeline's folder or the transformer's own

Prints how far the swapped model's output is from the stock one's, what both took, and that unswap is exact.
"""

import argparse
import time

import torch
from diffusers import SanaWMTransformer3DModel

from frame_gdn import swap, unswap

TINY = {
    "in_channels": 4,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "linear_head_dim": 32,
    "caption_channels": 16,
    "chunk_plucker_channels": 8,
    "chunk_plucker_post_attn_blocks": 4,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tiny", action="store_true", help="a small model with random weights")
    source.add_argument("--model", help="a local folder or a name on the hub")
    parser.add_argument("--num_frames", type=int, default=21, help="latent frames")
    parser.add_argument("--height", type=int, help="of a latent frame; default 22, or 8 with --tiny")
    parser.add_argument("--width", type=int, help="of a latent frame; default 40, or 8 with --tiny")
    args = parser.parse_args()
    for name in ("num_frames", "height", "width"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(args, name)}")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    try:
        model = random_model() if args.tiny else load(args.model, dtype)
    except OSError as error:
        parser.error(f"--model {args.model} holds no SanaWMTransformer3DModel: {' '.join(str(error).split())}")
    model.to(device, dtype).eval()
    height, width = args.height or (8 if args.tiny else 22), args.width or (8 if args.tiny else 40)
    inputs = random_inputs(model, args.num_frames, height, width)

    plain, plain_seconds = run(model, inputs)
    swap(model)  # that is all there is to it
    ours, our_seconds = run(model, inputs)
    unswap(model)
    again, _ = run(model, inputs)

    error = float((ours - plain).norm() / plain.norm())
    print(f"{args.num_frames} x {height} x {width} latents on {device}, {dtype}")
    print(f"output of the swapped model against the stock one: relative error {error:.1e}")
    print(f"one forward pass: stock {plain_seconds:.3f} s, swapped {our_seconds:.3f} s")
    print(f"unswapped, equal to the bit: {torch.equal(again, plain)}")


def load(name: str, dtype: torch.dtype) -> SanaWMTransformer3DModel:
    """The transformer of a pipeline, or one that was saved by itself."""
    try:
        return SanaWMTransformer3DModel.from_pretrained(name, subfolder="transformer", torch_dtype=dtype)
    except OSError:
        return SanaWMTransformer3DModel.from_pretrained(name, torch_dtype=dtype)


def random_model() -> SanaWMTransformer3DModel:
    """Random where the host starts at zero, too: short convolutions and plücker embedding."""
    model = SanaWMTransformer3DModel(**TINY)
    for name, parameter in model.named_parameters():
        if "conv_k" in name or "plucker_embedder" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def random_inputs(model: SanaWMTransformer3DModel, frames: int, height: int, width: int) -> dict[str, torch.Tensor]:
    """Noise, a text of 32 tokens, and a camera that moves forward."""
    config, like = model.config, next(model.parameters())
    pose = torch.eye(4).repeat(1, frames, 1, 1)
    pose[..., 2, 3] = 0.05 * torch.arange(frames)
    lens = torch.tensor([width, height, width / 2, height / 2]).expand(1, frames, 4)
    inputs = {
        "hidden_states": torch.randn(1, config.in_channels, frames, height, width),
        "encoder_hidden_states": torch.randn(1, 1, 32, config.caption_channels),
        "camera_conditions": torch.cat([pose.flatten(2), lens], -1),
        "chunk_plucker": torch.randn(1, config.chunk_plucker_channels, frames, height, width),
    }
    moved = {name: tensor.to(like) for name, tensor in inputs.items()}
    moved["timestep"] = torch.full((1, 1, frames), 500.0, device=like.device)
    moved["encoder_attention_mask"] = torch.ones(1, 32, dtype=torch.long, device=like.device)
    return moved


@torch.no_grad()
def run(model: SanaWMTransformer3DModel, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
    """The output in float32 and the seconds of a second pass, kernels compiled and memory in place."""
    for _ in range(2):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        sample = model(**inputs).sample.float()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return sample, seconds


if __name__ == "__main__":
    main()
