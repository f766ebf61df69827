"""A rollout is what the model says of whole clips; and rollout.py, from a folder as train.py saves it to a film."""

import json
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from frame_gdn.pipeline import FrameGDNRolloutPipeline
from tests.models.helpers import tiny_inputs, tiny_model
from training.latents import HaarCodec
from training.video import read_video, write_video

ROOT = Path(__file__).parents[1]
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


# --- rollout.py ---------------------------------------------------------------------------------------------------


def save_as_train_does(folder: Path) -> None:
    tiny_pipeline("sample", in_channels=192, out_channels=192, cross_attention_dim=None).save_pretrained(folder)
    (folder / "codec.json").write_text(json.dumps(HaarCodec().describe()))
    (folder / "config.yaml").write_text("data: {videos: demo, height: 16, width: 24, fps: null}\n")


def rollout(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "rollout.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={"OMP_NUM_THREADS": "1"}, cwd=ROOT)


def test_rollout_continues_a_video_into_a_film(tmp_path):
    save_as_train_does(tmp_path / "model")
    clip = torch.randint(0, 256, (1, 4, 6, 1), dtype=torch.uint8).repeat_interleave(8, 1).repeat_interleave(8, 2)
    write_video(tmp_path / "clip.mp4", clip.expand(9, -1, -1, 3), fps=12)  # grey: H.264 halves colours' resolution
    options = {"model": tmp_path / "model", "first_frames": tmp_path / "clip.mp4", "output": tmp_path / "film.mp4"}
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    result = rollout(*arguments, "--num_chunks", 3, "--num_inference_steps", 2)
    assert result.returncode == 0, result.stderr
    film = read_video(tmp_path / "film.mp4", 16, 24)
    assert len(film) == 1 + 4 * (4 * 2 - 1)  # four chunks of two latent frames
    given = read_video(tmp_path / "clip.mp4", 16, 24, num_frames=5)
    assert (film[:5].float() - given.float()).abs().mean() < 8  # written and read through H.264

    result = rollout(*arguments, "--num_chunks", 3, "--num_first_chunks", 9)
    assert result.returncode == 1
    assert "clip.mp4: 9 frames, wanted 69" in result.stderr
    (tmp_path / "model/config.yaml").unlink()
    result = rollout(*arguments, "--num_chunks", 3)
    assert result.returncode == 1
    assert "give --height and --width" in result.stderr


def test_rollout_wants_a_folder_that_train_saved(tmp_path):
    result = rollout("--model", tmp_path, "--first_frames", "x", "--num_chunks", 1, "--output", "y")
    assert result.returncode == 1
    assert f"no model_index.json in {tmp_path}" in result.stderr
