"""Encode a folder of videos once, with a diffusers VAE and, for captions, a text encoder.

    python -m training.encode --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers --videos clips/ \\
        --output_dir shards/ --height 480 --width 832 --num_frames 81 --fps 16 --captions

The model is a local folder or a hub name in diffusers' layout: `vae/`, and for captions `model_index.json`,
`text_encoder/` and `tokenizer/`. The caption of clips/a.mp4 is the text of clips/a.txt, in UTF-8; an empty one is the
empty prompt by which guidance replaces a prompt. Captions become what the model's own pipeline gives its transformer:
Wan's cleaning and zeroed padding, the instruction before a prompt of SanaVideo and SANA-WM. What a user adds to a
prompt, such as SanaVideo's " motion score: 30.", belongs in the caption.

The folder of shards is what `data: {shards: shards/}` of a training configuration names. What was encoded before is
not encoded again, so an interrupted run may simply be repeated, and several processes may encode one folder; what a
new run makes of a video replaces what an earlier one made. The text encoder is loaded first and freed before the VAE.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers.utils import is_ftfy_available
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from training.cli import positive, run, whole
from training.data import MASK, Encoding, VideoLatents, list_videos
from training.hosts import PROMPTS_OF
from training.latents import VaeCodec
from training.manifest import LOCKS, digest_of, lock, replacing
from training.pretrained import local_folder, weights_digest
from training.video import ClipSpec, VideoError

logger = logging.getLogger(__name__)

PIPELINES = tuple(pipeline for pipelines in PROMPTS_OF.values() for pipeline in pipelines)
"""Those whose `encode_prompt` gives what their transformer takes."""

TEXT_OPTIONS = ("max_sequence_length", "clean_caption", "complex_human_instruction", "chi_prompt")
"""Arguments of a pipeline's call that it passes on to `encode_prompt`."""


class TextEncoder:
    """Prompts as a pipeline of diffusers gives them to its transformer: by its own `encode_prompt`, with the arguments
    that a plain call of the pipeline gives that.

    The pipeline, its text encoder and its tokenizer are of the classes that `model_index.json` names; nothing else of
    it is loaded, and that only when the first prompt comes. A folder without `model_index.json` whose text encoder is
    Wan's is taken for Wan's.

    Args:
        max_length: tokens of a prompt; None: as many as the pipeline takes by default.

    Raises:
        ValueError: no such model, or one of another pipeline.
    """

    def __init__(
        self,
        pretrained_model_name_or_path: str,
        *,
        max_length: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.name, self.device, self.dtype = pretrained_model_name_or_path, torch.device(device), dtype
        self.folder = local_folder(self.name, "model_index.json", "text_encoder/*", "tokenizer/*")
        self.components = _components(self.folder)
        self.pipeline_class = getattr(diffusers, self.components["_class_name"])
        self.options = _text_options(self.pipeline_class)
        if max_length is not None:
            self.options["max_sequence_length"] = max_length
        if self.components["_class_name"] in PROMPTS_OF["WanTransformer3DModel"] and not is_ftfy_available():
            logger.warning("WanPipeline cleans prompts with ftfy where that is installed, which it is not here")

    @cached_property
    def pipeline(self) -> Any:
        """The pipeline with its tokenizer and text encoder alone."""
        arguments = inspect.signature(self.pipeline_class.__init__).parameters.values()
        parts: dict[str, Any] = {p.name: None for p in arguments if p.default is p.empty and p.name != "self"}
        parts["tokenizer"] = self._load("tokenizer")
        text_encoder, info = self._load(
            "text_encoder", dtype=self.dtype, use_safetensors=True, output_loading_info=True
        )
        if info["missing_keys"]:
            raise ValueError(f"{self.name}: its text encoder lacks weights, such as {sorted(info['missing_keys'])[0]}")
        parts["text_encoder"] = text_encoder.eval().requires_grad_(False).to(self.device)
        return self.pipeline_class(**parts)

    def _load(self, part: str, **options: Any) -> Any:
        try:
            library, name = self.components[part]
            if library != "transformers":
                raise ValueError(f"it is of {library}, not of transformers")
            return getattr(transformers, name).from_pretrained(self.folder / part, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # those of transformers are of many classes
            raise ValueError(f"{self.name}: its {part} cannot be loaded: {error}") from error

    @property
    def tokenizer(self) -> Any:
        return self.pipeline.tokenizer

    @cached_property
    def _unconditional(self) -> tuple[Tensor, Tensor | None]:
        """What the pipeline takes for the negative prompt that it is not given."""
        return self._encode("", negative_prompt="")[1]

    @torch.no_grad()
    def __call__(self, prompt: str) -> dict[str, Tensor]:
        """prompt_embeds (L, E) and prompt_attention_mask (L,) bool, on the CPU; the empty prompt's are those that
        guidance leads away from."""
        if prompt:
            embeds, mask = self._unconditional
            masks = {} if mask is None else {"negative_prompt_attention_mask": mask}
            embeds, mask = self._encode(prompt, negative_prompt_embeds=embeds, **masks)[0]
        else:
            embeds, mask = self._unconditional
        embeds = embeds.reshape(-1, *embeds.shape[-2:])[0]  # of a batch of one, to which SANA-WM adds a dimension
        # Wan's pipeline gives no mask but zeroes what is behind the prompt's end.
        mask = embeds.any(dim=-1) if mask is None else mask[0].bool()
        return {"prompt_embeds": embeds.cpu(), MASK: mask.cpu()}

    @torch.no_grad()
    def _encode(self, prompt: str, **negative: Any) -> list[tuple[Tensor, Tensor | None]]:
        """The pipeline's embeddings and mask of a prompt, and of the negative one."""
        result = self.pipeline.encode_prompt(prompt, device=self.device, **self.options, **negative)
        if len(result) == 2:
            return [(embeds, None) for embeds in result]
        embeds, mask, negative_embeds, negative_mask = result
        return [(embeds, mask), (negative_embeds, negative_mask)]

    def describe(self) -> dict[str, Any]:
        return {
            "pipeline": self.components["_class_name"],
            "pretrained_model_name_or_path": self.name,
            "weights": digest_of([weights_digest(self.folder / part) for part in ("text_encoder", "tokenizer")]),
            "dtype": str(self.dtype),
            "max_sequence_length": self.options["max_sequence_length"],
            "options": digest_of(self.options),
            "ftfy": is_ftfy_available(),
        }


def _components(folder: Path) -> dict[str, Any]:
    """What model_index.json says: the pipeline's class, and the library and class of each of its components."""
    index, text_encoder = folder / "model_index.json", folder / "text_encoder" / "config.json"
    try:
        if index.is_file():
            components = json.loads(index.read_text(encoding="utf-8"))
        else:
            (architecture,) = json.loads(text_encoder.read_text(encoding="utf-8"))["architectures"]
            if architecture != "UMT5EncoderModel":
                raise ValueError(f"a {architecture} without the pipeline's model_index.json")
            classes = {"text_encoder": architecture, "tokenizer": "AutoTokenizer"}
            components = {part: ["transformers", name] for part, name in classes.items()}
            components["_class_name"] = "WanPipeline"
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder} does not say what encodes its prompts: {error}") from error
    name = components.get("_class_name") if isinstance(components, dict) else None
    if name not in PIPELINES:
        raise ValueError(
            f"{folder} is of a {name}, whose prompts are not made here; known are {', '.join(PIPELINES)}. "
            "Encode without --captions, or add prompt_embeds to the shards yourself"
        )
    if not hasattr(diffusers, name):
        raise ValueError(f"{folder} is of a {name}, which diffusers {diffusers.__version__} does not have")
    return components


def _text_options(pipeline: type[DiffusionPipeline]) -> dict[str, Any]:
    """The arguments of `encode_prompt` that a call of the pipeline without options gives it."""
    call, encode = (inspect.signature(f).parameters for f in (pipeline.__call__, pipeline.encode_prompt))
    options = {name: call[name].default for name in TEXT_OPTIONS if name in call and name in encode}
    if "chi_prompt" in options:
        from diffusers.pipelines.sana_wm.pipeline_sana_wm import DEFAULT_CHI_PROMPT  # not in diffusers 0.41

        options["chi_prompt"] = options["chi_prompt"] or DEFAULT_CHI_PROMPT
    return options


class StoredPrompts:
    """Prompts that were encoded before and are kept in a folder, so that the text encoder can go.

    Args:
        folder: of the shards.
        description: of the encoder.
    """

    def __init__(self, folder: Path, description: Mapping[str, Any]) -> None:
        self.folder, self.description = folder / ".prompts", dict(description)

    def add(self, prompts: Iterable[str], encoder: TextEncoder) -> None:
        """Encode what is not there; processes that do so at the same time share the work."""
        missing = [prompt for prompt in dict.fromkeys(prompts) if not self._file(prompt).is_file()]
        for wait in (False, True):
            for prompt in [prompt for prompt in missing if not self._file(prompt).is_file()]:
                with lock(self.folder / LOCKS / self._file(prompt).stem, wait=wait) as is_held:
                    if is_held and not self._file(prompt).is_file():
                        fields = {name: value.contiguous() for name, value in encoder(prompt).items()}
                        with replacing(self._file(prompt)) as unfinished:
                            save_file(fields, unfinished)

    def __call__(self, prompt: str) -> dict[str, Tensor]:
        try:
            return load_file(self._file(prompt))
        except (OSError, SafetensorError) as error:
            raise VideoError("its caption was changed while videos were encoded", is_lasting=False) from error

    def describe(self) -> dict[str, Any]:
        return self.description

    def _file(self, prompt: str) -> Path:
        return self.folder / f"{digest_of([self.description, prompt])}.safetensors"


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
    parser.add_argument(
        "--max_sequence_length", type=whole(1, 8192), help="tokens of a prompt (default: the pipeline's)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="of the models")
    parser.add_argument(
        "--storage_dtype",
        choices=("float32", "bfloat16", "float16"),
        default="float16",
        help="of the latents; prompts are stored as they are encoded (default: float16)",
    )
    args = parser.parse_args(argv)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)

    name, output_dir = args.pretrained_model_name_or_path, Path(args.output_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype or ("bfloat16" if device == "cuda" else "float32"))
    storage_dtype = getattr(torch, args.storage_dtype)
    videos = list_videos(args.videos)
    clip = ClipSpec(args.height, args.width, args.num_frames, args.stride, args.fps)
    VaeCodec.check_clip(name, clip.num_frames, clip.height, clip.width, subfolder="vae")
    text, prompts = None, None
    if args.captions:
        text = TextEncoder(name, max_length=args.max_sequence_length, device=device, dtype=dtype)
        prompts = StoredPrompts(output_dir, text.describe())

    identity = VaeCodec.identify(name, subfolder="vae", dtype=dtype)
    encoding = Encoding(videos, output_dir, identity, clip, prompts and prompts.describe(), storage_dtype)
    encoding.begin(read_content=True)
    with lock(output_dir / LOCKS / "prompts", shared=True):
        codec = None
        if encoding.unsettled():
            if text is not None and prompts is not None:
                prompts.add([*encoding.captions(), ""], text)
            del text  # before the VAE comes
            gc.collect()
            torch.cuda.empty_cache()
            codec = VaeCodec(name, subfolder="vae", device=device, dtype=dtype)
        shards = encoding.encode(codec, prompts)
    with lock(output_dir / LOCKS / "prompts", wait=False) as is_last:
        if is_last and prompts is not None:
            shutil.rmtree(prompts.folder, ignore_errors=True)
    VideoLatents(shards=output_dir)  # says if what is there cannot be trained together
    return shards


if __name__ == "__main__":
    written = run("training.encode", main)
    print(f"{len(written)} shards")
