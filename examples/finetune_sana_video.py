"""Fine-tune SanaVideo with frame-wise GDN in place of its linear attention, through train.py.

    python examples/finetune_sana_video.py --tiny   # a small random model on the demo's clips, offline, in a minute
    python examples/finetune_sana_video.py --model FOLDER_OR_HUB_NAME --shards FOLDER [train.py's options ...]

FOLDER_OR_HUB_NAME is a pipeline's, of which the transformer is taken; the shards are what `python -m training.encode`
makes of videos with that pipeline's VAE and text encoder. The result is written to --output_dir:

    from frame_gdn.hosts.sana_video import SanaVideoTransformer3DModel
    SanaVideoTransformer3DModel.from_pretrained(output_dir, subfolder="transformer")

Over several GPUs it is `accelerate launch --num_processes 8 train.py --cp_size 4 ...` with the options printed here.
"""

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from diffusers import SanaVideoTransformer3DModel

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from frame_gdn.hosts import sana_video  # noqa: E402
from training.data import VideoLatents, write_shard  # noqa: E402

TEXT_WIDTH = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--tiny", action="store_true", help="a small model with random weights, and the demo's clips")
    source.add_argument("--model", help="a local folder or a name on the hub")
    parser.add_argument("--shards", help="a folder of safetensors shards, with --model")
    parser.add_argument("--output_dir", default="runs/sana_video")
    args, options = parser.parse_known_args()
    if args.model and not args.shards:
        parser.error("--model needs --shards, what it is trained on")

    with tempfile.TemporaryDirectory() as folder:
        if args.tiny:
            args.model, args.shards = make_tiny(Path(folder))
            options = ["--max_train_steps=20", "--learning_rate=1e-3", "--report_to=none", *options]
        command = [
            sys.executable,
            str(REPOSITORY / "train.py"),
            f"--pretrained_model_name_or_path={args.model}",
            f"--data.shards={args.shards}",
            f"--output_dir={args.output_dir}",
            *options,
        ]
        print(shlex.join(command), flush=True)
        if status := subprocess.run(command).returncode:
            sys.exit(status)  # train.py has said why

    output_dir = Path(args.output_dir)
    losses = [json.loads(line)["loss"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
    trained = sana_video.SanaVideoTransformer3DModel.from_pretrained(output_dir, subfolder="transformer")
    print(f"loss {losses[0]:.3f} at the first of {len(losses)} steps, {losses[-1]:.3f} at the last")
    print(f"{output_dir / 'transformer'}: {type(trained).__name__}, GDN in blocks {trained.config.gdn_blocks}")


def make_tiny(folder: Path) -> tuple[str, str]:
    """A model and shards: wavelet latents of real clips, with noise for a text."""
    torch.manual_seed(0)
    clips = VideoLatents("demo", num_frames=17, height=32, width=32, cache_dir=folder / "cache")
    model = SanaVideoTransformer3DModel(
        in_channels=clips.latent_shape[0],
        out_channels=clips.latent_shape[0],
        num_attention_heads=2,
        attention_head_dim=24,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=24,
        cross_attention_dim=48,
        caption_channels=TEXT_WIDTH,
    )
    model.save_pretrained(folder / "model" / "transformer")
    tensors = {}
    for clip in (clips[i] for i in range(len(clips))):
        tensors[f"{clip['clip']}.latents"] = clip["latents"]
        tensors[f"{clip['clip']}.prompt_embeds"] = torch.randn(8, TEXT_WIDTH)
    write_shard(folder / "shards" / "clips.safetensors", tensors, clips.codec)
    return str(folder / "model"), str(folder / "shards")


if __name__ == "__main__":
    main()
