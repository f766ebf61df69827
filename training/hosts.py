"""The transformers that train.py trains: which class a folder holds, what of it is trained, and how it is called.

They are `VideoDiT` and those of diffusers that `frame_gdn.swap` knows, with GDN swapped in.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.utils import recurse_remove_peft_layers
from torch import Tensor, nn

from frame_gdn import hosts, swap
from frame_gdn.chunks import ChunkGrid
from models import VideoDiT
from training.pretrained import load_safely

GATES = ("beta_proj", "gate_proj", "A_log", "dt_bias", "output_gate")
"""Names of what `train_gates_only` trains: all that a warm start adds, and SANA-WM's own."""

ATTENTION_PROJECTIONS = r"(.*\.)?attn1?\.(qkv|proj|to_[qkv]|to_out(\.0)?|[qkv]_proj_cam|out_proj_cam)"
"""The linear layers of the self-attentions, which LoRA adapts."""


def load_transformer(name_or_path: str, dtype: torch.dtype, model: dict[str, Any], swapping: dict[str, Any]) -> Any:
    """The transformer of a folder or hub name (its `transformer/`, if it is a pipeline's), in float32 or float64.

    Args:
        model: overrides a VideoDiT's configuration.
        swapping: arguments of `swap` for a transformer of diffusers; what is not given stays as the folder has it.

    Raises:
        ValueError: a class that cannot be trained, options of the other kind of model, or a file that is missing or
            cannot be read.
    """
    subfolder = None if (Path(name_or_path) / "config.json").is_file() else "transformer"
    try:
        config = VideoDiT.load_config(name_or_path, subfolder=subfolder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name_or_path} does not hold a transformer: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{name_or_path} does not hold a transformer: its config.json is no JSON object")
    name = config.get("_class_name")
    if name == "VideoDiT":
        if swapping:
            raise ValueError(f"{name_or_path} holds a VideoDiT, which is not swapped: `swap` must be empty")
        return load_safely(VideoDiT, name_or_path, subfolder, torch_dtype=dtype, **model)
    if name not in hosts.HOSTS:
        raise ValueError(f"{name_or_path} holds a {name}; known are VideoDiT, {', '.join(hosts.HOSTS)}")
    if model:
        raise ValueError(f"{name_or_path} holds a {name}, whose configuration is its own: `model` must be empty")
    swapped = not {*hosts.CONFIG_ENTRIES, hosts.EARLIER_ENTRY}.isdisjoint(config)
    home = importlib.import_module(f"frame_gdn.hosts.{hosts.HOSTS[name]}") if swapped else diffusers
    loaded = load_safely(getattr(home, name), name_or_path, subfolder, torch_dtype=dtype)
    return swap(loaded, **swapping)


def grid_of(model: Any) -> ChunkGrid:
    """The grid of chunks that a model's configuration holds, in latent frames."""
    return ChunkGrid.of(model.config)


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What a model is, flat and for JSON: its class and the options in its configuration."""
    name = next(name for name in class_names(model) if name in CALLS)
    options = {f"model.{key}": value for key, value in model.config.items() if not key.startswith("_")}
    described: dict[str, Any] = json.loads(json.dumps({"model": name, **options}, default=str))
    return described


def check_data(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], prompts: Mapping[str, Any] | None = None
) -> None:
    """Compare a model with the data's fields and their shapes, and with what made its prompts.

    Args:
        prompts: what the shards say of it, as `VideoLatents.prompts`; None: they come from elsewhere and do not say.

    Raises:
        ValueError: latents of another number of channels, no text where the model reads it, another encoder's, or one
            that is not as the model's pipeline gives it.
    """
    channels, wanted = shapes["latents"][0], model.config.in_channels
    if channels != wanted:
        raise ValueError(f"the model takes {wanted} latent channels, the data has {channels}")
    widths = [model.config.get(key) for key in ("caption_channels", "text_dim", "cross_attention_dim")]
    width = next((width for width in widths if width is not None), None)
    text = shapes.get("prompt_embeds")
    if (width is None) != (text is None) or (text is not None and text[-1] != width):
        has = "no prompt_embeds" if text is None else f"prompt_embeds of width {text[-1]}"
        reads = "no text" if width is None else f"text of width {width}"
        raise ValueError(f"the model reads {reads}, the data has {has}")
    name = next((name for name in class_names(model) if name in PROMPTS_OF), None)
    made_by = None if prompts is None else prompts.get("pipeline")
    if name is not None and made_by is not None and made_by not in PROMPTS_OF[name]:
        raise ValueError(
            f"a {name} reads prompts as {PROMPTS_OF[name][0]} gives them; those of the data were made by {made_by}: "
            "run training.encode again with the model's pipeline"
        )
    if model.config.get("guidance_embeds"):
        raise ValueError("a model distilled from guidance (guidance_embeds) is not trained here")


def choose_parameters(
    model: nn.Module, shapes: Mapping[str, tuple[int, ...]], *, gates_only: bool, lora_rank: int | None
) -> None:
    """Freeze what is not trained: by default only what this data never reaches.

    Args:
        shapes: the data's fields.
        gates_only: train the gates alone.
        lora_rank: train a LoRA of this rank on the self-attentions' projections, and the gates.
    """
    if gates_only or lora_rank:
        model.requires_grad_(False)
        if lora_rank:
            add_lora(model, lora_rank)
        for name, parameter in model.named_parameters():
            if any(part in GATES for part in name.split(".")):
                parameter.requires_grad_(True)
    for name, parameter in model.named_parameters():  # DDP waits for the gradient of whatever asks for one
        if unreached(model, name, shapes):
            parameter.requires_grad_(False)


def unreached(model: nn.Module, name: str, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether a parameter of SANA-WM has no part in the output for want of a camera (or, one of them, at all)."""
    if "SanaWMTransformer3DModel" not in class_names(model):
        return False
    needs = {"_cam.": "camera_conditions", "plucker_": "chunk_plucker"}
    return "raymap_embedder." in name or any(part in name and field not in shapes for part, field in needs.items())


def add_lora(model: nn.Module, rank: int) -> None:
    """Put a LoRA around every projection of a self-attention; its parameters alone require gradients then.

    Raises:
        ValueError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora_rank needs peft: pip install peft") from error
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [name for name in linears if re.fullmatch(ATTENTION_PROJECTIONS, name)]
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), model)


def plain_copy(model: nn.Module, weights: dict[str, Tensor], lora_rank: int | None) -> Any:
    """A model of the same class and configuration with these weights, a LoRA merged into those that it adapts."""
    cls = next(cls for cls in type(model).__mro__ if cls.__name__ in CALLS)  # without what FSDP makes of it
    copy = cls.from_config(model.config)
    if lora_rank is None:
        copy.load_state_dict(weights, assign=True)
        return copy.eval()
    add_lora(copy, lora_rank)
    copy.load_state_dict(weights, assign=True)
    for module in list(copy.modules()):
        if hasattr(module, "base_layer"):
            module.merge()
    recurse_remove_peft_layers(copy)
    return copy.requires_grad_(True).eval()


# --- how each is called -------------------------------------------------------------------------------------------


def model_inputs(
    model: nn.Module, latents: Tensor, timestep: Tensor, batch: Mapping[str, Tensor], frames: slice, counts: list[int]
) -> dict[str, Any]:
    """The arguments of the model's forward.

    Args:
        latents: (B, C, T_local, h, w) noised, this rank's frames of the clip.
        timestep: (B, T_local), in the scheduler's unit.
        batch: the data's fields, of whole clips.
        frames: which frames of the clip these are.
        counts: every rank's number of frames.
    """
    make = next(CALLS[name] for name in class_names(model) if name in CALLS)
    text = batch.get("prompt_embeds")
    return make(model, latents, timestep, None if text is None else text.to(latents), batch, frames, counts)


def class_names(model: nn.Module) -> list[str]:
    return [cls.__name__ for cls in type(model).__mro__]


def _video_dit(model, latents, timestep, text, batch, frames, counts) -> dict[str, Any]:
    return {
        "hidden_states": latents,
        "timestep": timestep,
        "encoder_hidden_states": text,
        "encoder_attention_mask": batch.get("prompt_attention_mask"),
        "frames_per_rank": counts,
    }


def _sana_wm(model, latents, timestep, text, batch, frames, counts) -> dict[str, Any]:
    mask = batch.get("prompt_attention_mask")
    camera = batch.get("camera_conditions")
    plucker = batch.get("chunk_plucker")
    return {
        "hidden_states": latents,
        "timestep": timestep[:, None],
        "encoder_hidden_states": text[:, None],
        "encoder_attention_mask": torch.ones_like(text[..., 0], dtype=torch.bool) if mask is None else mask,
        "camera_conditions": None if camera is None else camera[:, frames].to(latents),
        "chunk_plucker": None if plucker is None else plucker[:, :, frames].to(latents),
    }


def _sana_video(model, latents, timestep, text, batch, frames, counts) -> dict[str, Any]:
    return {
        "hidden_states": latents,
        "timestep": time_of_tokens(model, latents, timestep),
        "encoder_hidden_states": text,
        "encoder_attention_mask": batch.get("prompt_attention_mask"),
    }


def _wan(model, latents, timestep, text, batch, frames, counts) -> dict[str, Any]:
    mask = batch.get("prompt_attention_mask")
    if mask is not None:  # Wan takes no mask: its pipeline zeroes what is behind the prompt's end
        text = torch.where(mask.bool()[..., None], text, 0)
    return {
        "hidden_states": latents,
        "timestep": time_of_tokens(model, latents, timestep),
        "encoder_hidden_states": text,
    }


def time_of_tokens(model: Any, latents: Tensor, timestep: Tensor) -> Tensor:
    """(B, T) as SanaVideo and Wan take it: (B,) where all frames share a level, which they do without chunks, else
    (B, N)."""
    if grid_of(model).chunk_frames is None:
        return timestep[:, 0]
    length, height, width = model.config.patch_size
    tokens = (latents.shape[3] // height) * (latents.shape[4] // width)
    return timestep[:, ::length].repeat_interleave(tokens, 1)


PROMPTS_OF = {
    "SanaVideoTransformer3DModel": ("SanaVideoPipeline", "SanaImageToVideoPipeline"),
    "SanaWMTransformer3DModel": ("SanaWMPipeline",),
    "WanTransformer3DModel": (
        "WanPipeline",
        "WanImageToVideoPipeline",
        "WanVideoToVideoPipeline",
        "WanVACEPipeline",
    ),
}
"""The pipelines that give a transformer of diffusers its prompts, those of a transformer all in the same way."""

CALLS: dict[str, Callable[..., dict[str, Any]]] = {
    "VideoDiT": _video_dit,
    "SanaVideoTransformer3DModel": _sana_video,
    "SanaWMTransformer3DModel": _sana_wm,
    "WanTransformer3DModel": _wan,
}
