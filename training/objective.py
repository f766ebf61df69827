"""Rectified flow with a noise level of its own for every chunk of a clip: what a step of training asks of the model.

A level sigma in [0, 1] mixes clip and noise, `x_sigma = (1 - sigma) * clip + sigma * noise`, and the velocity along
that line is `noise - clip`; diffusers' FlowMatchEulerDiscreteScheduler walks it from 1 to 0. Under diffusion forcing
each chunk draws its own level, and in half of the samples the first chunks stay clean, which is what a rollout asks
for: a new chunk from chunks that are finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor

from frame_gdn.chunks import ChunkGrid
from training.config import ObjectiveConfig

SMALLEST_LEVEL = 1e-3
"""A noised chunk is never at level 0, which is how clean chunks are told apart; the scheduler's last of 1000 steps."""

SMALLEST_SIGMA_OF_WEIGHT = 0.1
"""The velocity loss weighs an error of the predicted clip by 1 / sigma², from here on down by a constant."""


class Noise(NamedTuple):
    """Of whole clips: `noise` (B, C, T, h, w) and levels `sigmas` (B, T), 0 where a frame stays clean; float32."""

    noise: Tensor
    sigmas: Tensor


def split_frames(num_frames: int, num_ranks: int) -> list[int]:
    """Frames of each rank, in order, the first ranks taking one more where `num_ranks` does not divide them.

    Raises:
        ValueError: there are more ranks than frames.
    """
    if num_ranks > num_frames:
        raise ValueError(f"cp_size {num_ranks} is more than the {num_frames} latent frames of a clip")
    return [num_frames // num_ranks + (rank < num_frames % num_ranks) for rank in range(num_ranks)]


def sample_noise(
    config: ObjectiveConfig,
    shape: tuple[int, ...],
    sample_ids: list[int],
    seed: int,
    chunk_frames: int | None = None,
    first_chunk_frames: int | None = None,
    merge_tail: bool = False,
) -> Noise:
    """Noise and noise levels of whole clips, each drawn from (seed, the sample's number in the run) alone.

    So the same sample gets the same noise however a global batch is laid out over ranks and micro-batches, and in a
    resumed run.

    Args:
        shape: (C, T, h, w) of one clip.
        sample_ids: the number of each sample of the batch, counted from the start of the run.
        chunk_frames, first_chunk_frames, merge_tail: the grid of chunks in latent frames, as the model has it; a chunk
            has one level.
    """
    grid = ChunkGrid(chunk_frames, first_chunk_frames, merge_tail)
    lengths = [last - first for first, last, _ in grid.horizons(0, shape[1], shape[1])]
    draws = [
        _sample_one(config, shape, lengths, torch.Generator().manual_seed(_mix(seed, number))) for number in sample_ids
    ]
    return Noise(*(torch.stack(tensors) for tensors in zip(*draws, strict=True)))


def _sample_one(
    config: ObjectiveConfig, shape: tuple[int, ...], lengths: Sequence[int], generator: torch.Generator
) -> Noise:
    num_chunks = len(lengths)
    levels = compute_density_for_timestep_sampling(
        config.weighting_scheme,
        num_chunks,
        logit_mean=config.logit_mean,
        logit_std=config.logit_std,
        mode_scale=config.mode_scale,
        generator=generator,
    )
    levels = config.flow_shift * levels / (1 + (config.flow_shift - 1) * levels)
    levels = levels.clamp(min=SMALLEST_LEVEL)
    is_prefixed = torch.rand((), generator=generator) < config.clean_prefix_probability
    if num_chunks > 1:
        clean_chunks = torch.randint(1, num_chunks, (), generator=generator) * is_prefixed
        levels = levels * (torch.arange(num_chunks) >= clean_chunks)
    sigmas = levels.repeat_interleave(torch.tensor(lengths))
    return Noise(torch.randn(shape, generator=generator), sigmas)


def _mix(seed: int, number: int) -> int:
    return int(np.random.SeedSequence((seed, number)).generate_state(1, np.uint64)[0])


def add_noise(latents: Tensor, noise: Tensor, sigmas: Tensor) -> Tensor:
    """`(1 - sigma) * latents + sigma * noise` of (B, C, T, h, w) and sigmas (B, T); clean frames are untouched."""
    sigmas = sigmas[:, None, :, None, None]
    return (1 - sigmas) * latents + sigmas * noise


def flow_loss(
    prediction: Tensor,
    latents: Tensor,
    noise: Tensor,
    sigmas: Tensor,
    *,
    prediction_type: Literal["velocity", "sample"],
    noised_frames: Tensor,
) -> Tensor:
    """Mean squared velocity error of a batch's clips, each averaged over its noised frames; this rank's share of it.

    A clip's frames may be spread over ranks: every rank passes its own frames and the number of noised frames of the
    whole clip, and the ranks' results add up to the clip's mean. Samples weigh the same whatever they leave clean, so
    the loss of a global batch does not depend on how it is laid out over ranks and micro-batches.

    Args:
        prediction, latents, noise: (B, C, T_local, h, w); computed in float32 at least.
        sigmas: (B, T_local), 0 where a frame is clean and has no part in the loss.
        prediction_type: "velocity": the model predicts `noise - latents`; "sample": the clean latents, whose squared
            error over max(sigma, 0.1)² is that of the velocity they imply.
        noised_frames: (B,) int, noised frames of each whole clip.

    Returns:
        A scalar.
    """
    dtype = torch.promote_types(prediction.dtype, torch.float32)
    prediction, latents, noise = (x.to(dtype) for x in (prediction, latents, noise))
    if prediction_type == "sample":
        error = (prediction - latents) / sigmas.clamp(min=SMALLEST_SIGMA_OF_WEIGHT).to(dtype)[:, None, :, None, None]
    else:
        error = prediction - (noise - latents)
    error = error.square().mean(dim=(1, 3, 4))  # (B, T_local)
    error = torch.where(sigmas > 0, error, 0)
    return (error.sum(dim=1) / noised_frames).mean()
