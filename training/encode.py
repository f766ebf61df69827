"""Encode a folder of videos once, with a diffusers VAE and, for captions, a text encoder.

    python -m training.encode --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --videos clips/ \\
        --output_dir shards/ --height 480 --width 832 --num_frames 81 --fps 16 --captions

The model is a local folder or a hub name in diffusers' layout: `vae/`, and for captions `text_encoder/` and
`tokenizer/`. The caption of clips/a.mp4 is the text of clips/a.txt. The folder of shards is what `data: {shards:
shards/}` of a training configuration names; what was encoded before is not encoded again, so an interrupted run may
simply be repeated.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from training.cli import positive, run, whole
from training.data import encode_videos, list_videos
from training.latents import VaeCodec
from training.video import ClipSpec


class TextEncoder:
    """The last hidden states of a transformers text model (T5, UMT5, Gemma), padded on the right to `max_length`."""

    def __init__(
        self, pretrained_model_name_or_path: str, *, max_length: int, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        self.name, self.max_length = pretrained_model_name_or_path, max_length
        self.tokenizer = AutoTokenizer.from_pretrained(self.name, subfolder="tokenizer", padding_side="right")
        model = AutoModel.from_pretrained(self.name, subfolder="text_encoder", dtype=dtype).eval().to(device)
        self.model = model.get_encoder() if model.config.is_encoder_decoder else model

    @torch.no_grad()
    def __call__(self, prompt: str) -> dict[str, Tensor]:
        """prompt_embeds (max_length, E) and prompt_attention_mask (max_length,) bool."""
        tokens = self.tokenizer(
            prompt, padding="max_length", max_length=self.max_length, truncation=True, return_tensors="pt"
        ).to(self.model.device)
        hidden = self.model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state
        return {"prompt_embeds": hidden[0], "prompt_attention_mask": tokens.attention_mask[0].bool()}

    def describe(self) -> dict[str, Any]:
        return {"pretrained_model_name_or_path": self.name, "max_length": self.max_length}


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Encode what the command line says; returns the shards' paths."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--pretrained_model_name_or_path", required=True, help="folder or hub name, diffusers' layout")
    parser.add_argument("--videos", required=True, help="folder of video files")
    parser.add_argument("--output_dir", required=True, help="folder for the shards")
    parser.add_argument("--height", type=whole(1), default=480)
    parser.add_argument("--width", type=whole(1), default=832)
    parser.add_argument("--num_frames", type=whole(1), default=81, help="frames a clip: 1 + k times the VAE's ratio")
    parser.add_argument("--stride", type=whole(1), help="frames from one clip to the next (default: num_frames)")
    parser.add_argument("--fps", type=positive, help="frames a second of the clips (default: each file's own)")
    parser.add_argument("--captions", action="store_true", help="encode the text beside each video as its prompt")
    parser.add_argument("--max_sequence_length", type=whole(1), default=512, help="tokens of a prompt")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the models")
    parser.add_argument("--storage_dtype", choices=("float32", "bfloat16", "float16"), default="float16")
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    name = args.pretrained_model_name_or_path
    codec = VaeCodec(name, subfolder="vae", device=device, dtype=dtype)
    prompts = None
    if args.captions:
        prompts = TextEncoder(name, max_length=args.max_sequence_length, device=device, dtype=dtype)
    return encode_videos(
        list_videos(args.videos),
        args.output_dir,
        codec,
        ClipSpec(args.height, args.width, args.num_frames, args.stride, args.fps),
        prompts=prompts,
        dtype=getattr(torch, args.storage_dtype),
    )


if __name__ == "__main__":
    written = run("training.encode", main)
    print(f"{len(written)} shards")
