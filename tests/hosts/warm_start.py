"""Tiny SanaVideo and Wan models with every weight filled, and inputs for them."""

from typing import Any

import torch
from diffusers import SanaVideoTransformer3DModel, WanTransformer3DModel
from torch import Tensor

from frame_gdn.hosts import sana_video, wan
from tests.helpers import fill_randomly

#: The swapped class by host.
SWAPPED = {"sana_video": sana_video.SanaVideoTransformer3DModel, "wan": wan.WanTransformer3DModel}
BLOCKS = {"sana_video": "transformer_blocks", "wan": "blocks"}
GATES = ("beta_proj.weight", "beta_proj.bias", "gate_proj.weight", "gate_proj.bias", "A_log", "dt_bias")

TINY: dict[str, dict[str, Any]] = {
    "sana_video": {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_layers": 3,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 12,
        "cross_attention_dim": 24,
        "caption_channels": 8,
        "mlp_ratio": 2.0,
        "rope_max_seq_len": 32,
    },
    "wan": {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 8,
        "freq_dim": 16,
        "ffn_dim": 32,
        "num_layers": 3,
        "rope_max_seq_len": 32,
    },
}


def tiny_model(host: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any) -> Any:
    """The stock model of diffusers, all parameters random."""
    stock = {"sana_video": SanaVideoTransformer3DModel, "wan": WanTransformer3DModel}[host]
    return fill_randomly(stock(**{**TINY[host], **overrides}), seed).to(dtype).eval()


def tiny_inputs(frames: int = 5, dtype: torch.dtype = torch.float32, batch: int = 2) -> dict[str, Tensor]:
    """Noisy latents of 2 x 3 tokens a frame, a time a sample, text."""
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, frames, 4, 6, generator=generator, dtype=torch.float64).to(dtype),
        "timestep": torch.tensor([300.0, 700.0])[:batch],
        "encoder_hidden_states": torch.randn(batch, 5, 8, generator=generator, dtype=torch.float64).to(dtype),
    }


def frames_of(inputs: dict[str, Tensor], frames: slice) -> dict[str, Tensor]:
    """The same inputs, of these frames only."""
    return {**inputs, "hidden_states": inputs["hidden_states"][:, :, frames]}


def blocks_of(model: Any, host: str) -> Any:
    return getattr(model, BLOCKS[host])


def keep_float64() -> None:
    """The hosts cast to float32 here and there; of a float64 model we want to see all digits."""
    to = Tensor.to

    def cast(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        narrows = self.dtype == torch.float64 and torch.float32 in args
        return self if narrows else to(self, *args, **kwargs)

    Tensor.to, Tensor.float = cast, lambda self: cast(self, torch.float32)  # type: ignore[method-assign]
