"""A film is held against what really follows, its given frames apart."""

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from frame_gdn import FrameGDNRolloutPipeline
from models import VideoDiT
from training.evaluation import continuation_psnr, continue_clip, psnr


def test_psnr_of_an_error_of_one_level_is_that_of_the_definition() -> None:
    video = torch.full((2, 4, 4, 3), 100, dtype=torch.uint8)
    assert psnr(video, video + 1) == pytest.approx(20 * math.log10(255))
    assert psnr(video, video) == math.inf


def test_given_frames_count_for_nothing_and_repeating_the_last_is_the_baseline() -> None:
    truth = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 2, 2, 3)
    film = truth.clone()
    film[3:] += 2
    film[0] = 255
    film_psnr, repeat_last_psnr = continuation_psnr(film[:5], truth, num_given=3)
    assert film_psnr == pytest.approx(20 * math.log10(255 / 2))
    assert repeat_last_psnr == pytest.approx(10 * math.log10(255**2 / 2.5))  # errors of 1 and 2


def test_a_clip_is_continued_by_whole_chunks_from_its_first() -> None:
    model = VideoDiT(4, num_layers=2, num_attention_heads=2, attention_head_dim=12, chunk_frames=3, softmax_every_n=2)
    pipeline = FrameGDNRolloutPipeline(model, FlowMatchEulerDiscreteScheduler())
    pipeline.set_progress_bar_config(disable=True)
    clip = {"latents": torch.randn(4, 11, 2, 2), "clip": "a/000000"}
    film = continue_clip(pipeline, clip, num_inference_steps=2, seed=1)
    assert film.shape == (4, 9, 2, 2)
    assert torch.equal(film[:, :3], clip["latents"][:, :3])
    assert torch.equal(film, continue_clip(pipeline, clip, num_inference_steps=2, seed=1))
