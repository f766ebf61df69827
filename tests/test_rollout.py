"""A rollout is what the model says of whole clips."""

from itertools import islice

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from frame_gdn.pipeline import FrameGDNRolloutPipeline
from tests.models.helpers import tiny_inputs, tiny_model

STEPS = 3


def tiny_pipeline(prediction_type: str = "velocity", dtype: torch.dtype = torch.float32, **config: object):
    model = tiny_model(dtype, **{"chunk_frames": 2, "out_channels": 3, **config})
    pipeline = FrameGDNRolloutPipeline(model, FlowMatchEulerDiscreteScheduler(shift=2.0), prediction_type)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def prompt(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    inputs = tiny_inputs(1, dtype)
    return {
        "prompt_embeds": inputs["encoder_hidden_states"],
        "prompt_attention_mask": inputs["encoder_attention_mask"],
    }


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def full_pass_rollout(pipeline: FrameGDNRolloutPipeline, clean: Tensor, num_chunks: int) -> Tensor:
    """The same rollout without any state: every step is a pass over [clean chunks, noisy chunk]."""
    noise_generator, inputs = generator(), tiny_inputs(1, torch.float32)
    text = {name: inputs[name] for name in ("encoder_hidden_states", "encoder_attention_mask")}
    for _ in range(num_chunks):
        noisy = torch.randn(2, 3, 2, 4, 6, generator=noise_generator)
        pipeline.scheduler.set_timesteps(STEPS)
        for t in pipeline.scheduler.timesteps:
            timestep = torch.cat([torch.zeros(2, clean.shape[2]), t.expand(2, 2)], dim=1)
            output = pipeline.transformer(torch.cat([clean, noisy], dim=2), timestep, **text).sample[:, :, -2:]
            velocity = output
            if pipeline.config.prediction_type == "sample":
                velocity = (noisy - output) / (t / 1000)
            noisy = pipeline.scheduler.step(velocity, t, noisy).prev_sample
        clean = torch.cat([clean, noisy], dim=2)
    return clean


@pytest.mark.parametrize("num_first", [2, 4])
@pytest.mark.parametrize("prediction_type", ["velocity", "sample"])
@torch.no_grad()
def test_three_chunks_equal_full_passes_over_clean_and_noisy_chunks(prediction_type, num_first):
    pipeline = tiny_pipeline(prediction_type)
    first = tiny_inputs(num_first, torch.float32)["hidden_states"]
    expected = full_pass_rollout(pipeline, first, num_chunks=3)
    chunks = list(pipeline.stream(first, 3, STEPS, generator(), **prompt()))
    assert len(chunks) == 3
    for chunk, wanted in zip(chunks, expected[:, :, num_first:].split(2, dim=2), strict=True):
        assert (chunk - wanted).abs().max() / wanted.abs().max() <= 1e-5


def test_a_long_rollout_begins_as_a_short_one_and_repeats_itself():
    pipeline, first = tiny_pipeline(), tiny_inputs(2, torch.float32)["hidden_states"]
    short = pipeline(first, 1, STEPS, generator(), **prompt()).latents
    long = pipeline(first, 3, STEPS, generator(), **prompt()).latents
    endless = list(islice(pipeline.stream(first, None, STEPS, generator(), **prompt()), 3))
    assert torch.equal(long[:, :, :2], short)
    assert torch.equal(torch.cat(endless, dim=2), long)
    assert not torch.equal(pipeline(first, 1, STEPS, generator(1), **prompt()).latents, short)


def test_a_saved_pipeline_rolls_out_the_same(tmp_path):
    pipeline, first = tiny_pipeline("sample"), tiny_inputs(2, torch.float32)["hidden_states"]
    pipeline.save_pretrained(tmp_path)
    loaded = FrameGDNRolloutPipeline.from_pretrained(tmp_path)
    assert loaded.config.prediction_type == "sample"
    assert loaded.scheduler.config.shift == 2.0
    expected = pipeline(first, 2, STEPS, generator(), **prompt()).latents
    assert torch.equal(loaded(first, 2, STEPS, generator(), **prompt()).latents, expected)


def test_a_bfloat16_model_denoises_in_float32():
    pipeline, first = tiny_pipeline(), tiny_inputs(2, torch.float32)["hidden_states"]
    pipeline.transformer.bfloat16()
    latents = pipeline(first.bfloat16(), 2, STEPS, generator(), **prompt(torch.bfloat16)).latents
    assert latents.dtype == torch.float32
    assert latents.isfinite().all()


def test_bad_input_is_a_value_error_before_any_chunk():
    with pytest.raises(ValueError, match="prediction_type must be one of .* got 'noise'"):
        tiny_pipeline("noise")
    with pytest.raises(ValueError, match=r"config\.chunk_frames is not set"):
        tiny_pipeline(chunk_frames=None)
    for first in (torch.zeros(2, 3, 3, 4, 6), torch.zeros(2, 3, 0, 4, 6), torch.zeros(3, 2, 4, 6)):
        with pytest.raises(ValueError, match="first_frames must be"):
            tiny_pipeline().stream(first)
