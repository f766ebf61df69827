"""How well a model continues a clip: a rollout from its first chunk, held against what really follows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from frame_gdn import FrameGDNRolloutPipeline
from frame_gdn.chunks import ChunkGrid


def check_continuation(num_frames: int, grid: ChunkGrid) -> None:
    """Raises ValueError where a clip of so many latent frames has no whole chunk after its first one."""
    if num_frames < grid.bounds(1)[1]:
        raise ValueError(
            f"a rollout continues a clip's first chunk, but a clip of {num_frames} latent frames has no second one of "
            f"{grid.chunk_frames}: validate with longer clips, or without validation_steps"
        )


def continue_clip(
    pipeline: FrameGDNRolloutPipeline, clip: Mapping[str, Tensor], *, num_inference_steps: int, seed: int = 0
) -> Tensor:
    """A clip's first chunk and the chunks that the model rolls out from it, as many as the clip is long.

    Args:
        clip: an item of `VideoLatents`: "latents" (C, T, h, w) and, for a model that reads text, its "prompt_embeds"
            and "prompt_attention_mask".

    Returns:
        (C, T', h, w) on the CPU; T' is T without the rest that is no whole chunk.

    Raises:
        ValueError: a clip without a second chunk.
    """
    latents = clip["latents"]
    grid = ChunkGrid.of(pipeline.transformer.config)
    check_continuation(latents.shape[1], grid)
    text_fields = [name for name in ("prompt_embeds", "prompt_attention_mask") if name in clip]
    given = latents[None, :, : grid.bounds(0)[1]]
    output = pipeline(
        given,
        num_chunks=grid.index(latents.shape[1]) - 1,  # that begin and end in the clip, but for the first
        num_inference_steps=num_inference_steps,
        generator=torch.Generator().manual_seed(seed),
        **{name: clip[name][None].to(pipeline.device) for name in text_fields},
    )
    return torch.cat([given, output.latents.cpu().to(given)], dim=2)[0]


def continuation_psnr(film: Tensor, truth: Tensor, num_given: int) -> tuple[float, float]:
    """PSNR in dB of what follows a film's given frames, and that of repeating the last of them.

    Args:
        film, truth: uint8 (T, H, W, 3); a film may be shorter than the truth.
        num_given: frames at the start that were given to the model.
    """
    truth = truth[num_given : len(film)]
    return psnr(film[num_given:], truth), psnr(film[num_given - 1 : num_given], truth)


def psnr(video: Tensor, truth: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of uint8 videos whose shapes broadcast, over all their pixels."""
    error = (video.double() - truth.double()).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf
