"""A rollout is what the model says of whole clips."""

import dataclasses
import re
from itertools import islice

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from frame_gdn import RolloutState
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


# --- as diffusers' pipelines are called -----------------------------------------------------------------------------

STREAMING = {"chunk_frames": 2, "first_chunk_frames": 3, "softmax_window": 2, "softmax_sink": True}


def image() -> Tensor:
    return tiny_inputs(1, torch.float32)["hidden_states"]


def by_hand(pipeline, noise: Tensor, given: Tensor, sigmas: list[float], scale: float = 1.0, **text: Tensor) -> Tensor:
    """A rollout whose every step is a pass over the whole clip, by Euler's rule; no state, no scheduler."""
    film = noise[:, :, :0]
    for first, last in ((0, 3), (3, 5), (5, 7)):
        x = noise[:, :, first:last].clone()
        for level, after in zip(sigmas, [*sigmas[1:], 0.0], strict=True):
            times = torch.full((2, last), 0.0)
            times[:, first:] = 1000 * level
            if first == 0:
                x[:, :, :1], times[:, :1] = given, 0.0
            clip = torch.cat([film, x], 2)

            def velocity(embeds: str, clip: Tensor = clip, times: Tensor = times, first: int = first) -> Tensor:
                masks = {"prompt_embeds": "prompt_attention_mask"}
                mask = text[masks.get(embeds, "negative_prompt_attention_mask")]
                found = pipeline.transformer(clip, times, text[embeds], mask)
                return found.sample[:, :, first:]

            v = velocity("prompt_embeds")
            if scale != 1.0:
                away = velocity("negative_prompt_embeds")
                v = away + scale * (v - away)
            x = x - (level - after) * v
        if first == 0:
            x[:, :, :1] = given
        film = torch.cat([film, x], 2)
    return film


def guided_prompt() -> dict[str, Tensor]:
    positive, flipped = prompt(), {name: t.flip(1) for name, t in prompt().items()}
    return {**positive, **{f"negative_{name}": t for name, t in flipped.items()}}


@pytest.mark.parametrize("scale", [1.0, 3.0])
@torch.no_grad()
def test_an_image_given_sigmas_noise_and_guidance_make_what_full_passes_make(scale):
    pipeline, sigmas = tiny_pipeline(**STREAMING), [1.0, 0.96, 0.889, 0.727]
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    noise = torch.randn(2, 3, 7, 4, 6, generator=generator(5))
    text = guided_prompt() if scale != 1.0 else prompt()
    output = pipeline(image(), 3, sigmas=sigmas, latents=noise, guidance_scale=scale, **text)
    expected = by_hand(pipeline, noise, image(), sigmas, scale, **text)
    assert (output.latents - expected).abs().max() / expected.abs().max() <= 1e-5
    assert torch.equal(output.latents[:, :, :1], image())
    assert pipeline.num_timesteps == 4 and pipeline.guidance_scale == scale
    state = output.state
    assert (state.frames, state.chunks, state.batch, state.rows) == (
        7,
        3,
        2 if scale == 1.0 else 4,
        1 + (scale != 1.0),
    )
    other = {"guidance_scale": 1.0, **prompt()} if scale != 1.0 else {"guidance_scale": 3.0, **guided_prompt()}
    with pytest.raises(ValueError, match="state was made with"):
        pipeline(state=state, **other)


def test_a_rollout_goes_on_from_its_output_from_a_file_and_from_a_branch(tmp_path):
    pipeline, draw = tiny_pipeline(**STREAMING), generator()
    whole = pipeline(image(), 4, STEPS, generator(), **prompt())
    head = pipeline(image(), 2, STEPS, draw, **prompt())
    drawn = draw.get_state()
    head.state.save(tmp_path / "state")
    before = {name: t.clone() for name, t in head.state.state_dict().items()}
    for state in (head.state, RolloutState.load(tmp_path / "state", pipeline.transformer), head.state.clone()):
        draw.set_state(drawn)
        tail = pipeline(state=state, num_chunks=2, num_inference_steps=STEPS, generator=draw, **prompt())
        assert torch.equal(torch.cat([head.latents, tail.latents], 2), whole.latents)
        assert tail.state.frames == whole.state.frames == 9
        for name, t in whole.state.state_dict().items():
            assert torch.equal(tail.state.state_dict()[name], t), name
    assert all(torch.equal(t, before[name]) for name, t in head.state.state_dict().items())
    latents, state = pipeline(image(), 1, STEPS, generator(), **prompt(), return_dict=False)
    assert torch.equal(latents, whole.latents[:, :, :3]) and state.frames == 3


def test_text_may_change_with_each_chunk_and_an_iterator_is_asked_when_the_chunk_begins():
    pipeline, text = tiny_pipeline(**STREAMING), prompt()["prompt_embeds"]
    texts = [text, text.flip(0), text.flip(1)]
    whole = pipeline(image(), 3, STEPS, generator(), texts).latents
    asked: list[int] = []

    def steer():
        for number, embeds in enumerate(texts):
            asked.append(number)
            yield embeds, None

    seen = []
    for chunk in pipeline.stream(image(), None, STEPS, generator(), steer()):
        seen.append(chunk)
        assert asked == list(range(len(seen)))
    assert torch.equal(torch.cat(seen, 2), whole)  # the rollout ends with the iterator
    same = pipeline(image(), 3, STEPS, generator(), text).latents
    assert torch.equal(same[:, :, :3], whole[:, :, :3]) and not torch.equal(same, whole)
    with pytest.raises(ValueError, match="prompt_embeds is given for 3 chunks, num_chunks is 4"):
        pipeline.stream(image(), 4, STEPS, generator(), texts)
    with pytest.raises(ValueError, match="prompt_embeds ended before the 2 chunks did"):
        pipeline(image(), 2, STEPS, generator(), iter([text]))
    assert pipeline.state.frames == 3  # of the chunk that was finished


def test_after_an_error_inside_a_chunk_the_last_committed_state_is_on_the_pipeline():
    pipeline = tiny_pipeline(**STREAMING)
    calls: list[int] = []

    def fails(pipe, step, t, tensors):
        calls.append(step)
        assert pipe is pipeline and tensors["latents"].shape[2] in (2, 3)
        if len(calls) == 2 * STEPS + 2:
            raise RuntimeError("out of memory")
        return {}

    with pytest.raises(RuntimeError, match="out of memory"):
        pipeline(image(), 3, STEPS, generator(), **prompt(), callback_on_step_end=fails)
    assert pipeline.state.frames == 5 and calls[:STEPS] == list(range(STEPS))
    assert pipeline(state=pipeline.state, num_inference_steps=STEPS, **prompt()).latents.shape[2] == 2


def test_an_interrupt_ends_the_call_after_the_step_and_leaves_whole_chunks():
    pipeline = tiny_pipeline(**STREAMING)
    steps: list[int] = []

    def stop(pipe, step, t, tensors):
        steps.append(step)
        pipe.interrupt = len(steps) == STEPS + 2
        return {"latents": tensors["latents"]}

    output = pipeline(image(), 4, STEPS, generator(), **prompt(), callback_on_step_end=stop)
    assert output.latents.shape[2] == output.state.frames == 3 and len(steps) == STEPS + 2
    again = pipeline(image(), 2, STEPS, generator(), **prompt())  # the next call begins anew
    assert torch.equal(again.latents[:, :, :3], output.latents)


def test_what_a_callback_returns_takes_the_latents_place():
    pipeline = tiny_pipeline(**STREAMING)
    zeros = lambda pipe, step, t, tensors: {"latents": torch.zeros_like(tensors["latents"])}  # noqa: E731
    latents = pipeline(image(), 1, STEPS, generator(), **prompt(), callback_on_step_end=zeros).latents
    assert torch.equal(latents[:, :, :1], image()) and not latents[:, :, 1:].any()


WRONG = {
    "num_chunks must be an int from 1, got 0": {"num_chunks": 0},
    "num_chunks must be an int from 1, got None": {"num_chunks": None},
    "num_inference_steps must be": {"num_inference_steps": 0},
    "sigmas must fall": {"sigmas": [0.5, 0.5]},
    "sigmas must fall, from 1": {"sigmas": [1.5, 0.5]},
    "sigmas' each must be a finite number above 0": {"sigmas": [1.0, 0.0]},
    "sigmas must be a list of numbers": {"sigmas": []},
    "guidance_scale must be": {"guidance_scale": -1.0},
    "guidance_scale other than 1.0 needs negative_prompt_embeds": {"guidance_scale": 2.0},
    "latents must be a tensor": {"latents": torch.zeros(2, 3, 4, 4, 6)},
    "output_type must be one of latent, got 'pil'": {"output_type": "pil"},
    "camera is for SANA-WM": {"camera": (torch.eye(4).expand(9, 4, 4), torch.ones(4))},
    "state must be None or a RolloutState": {"state": 3, "first_frames": None},
    "first_frames must be (B, 3, T, h, w) where": {"first_frames": None},
    "callback_on_step_end must be callable": {"callback_on_step_end": 3},
    "callback_on_step_end_tensor_inputs must be of": {"callback_on_step_end_tensor_inputs": ["noise"]},
    "return_dict must be True or False": {"return_dict": 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_call_is_an_error_before_the_first_chunk(message):
    pipeline = tiny_pipeline(**STREAMING)
    pipeline.transformer.register_forward_pre_hook(lambda *_: pytest.fail("the model was called"))
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline(**{"first_frames": image(), "num_chunks": 1, **prompt(), **WRONG[message]})


def test_a_state_that_does_not_fit_is_refused_and_left_as_it_was():
    pipeline = tiny_pipeline(**STREAMING)
    state = pipeline(image(), 1, STEPS, generator(), **prompt()).state
    for other, message in (
        (tiny_pipeline(**{**STREAMING, "softmax_window": 3}), "softmax_window 2, this one has 3"),
        (tiny_pipeline(dtype=torch.float64, **STREAMING), "dtype 'float32', this one has 'float64'"),
    ):
        with pytest.raises(ValueError, match=message):
            other.stream(state=state, **prompt())
    for wrong, message in (
        (dataclasses.replace(state, frames=4), "inside the chunk of frames 3 to 4"),
        (state.to("meta"), "state must be on cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            pipeline.stream(state=wrong, **prompt())
    three = torch.zeros(2, 3, 3, 4, 6)
    for first, message in ((three, "a multiple of chunk_frames"), (three[..., :4], "a multiple of chunk_frames")):
        with pytest.raises(ValueError, match=message):
            pipeline.stream(first, state=state, **prompt())
    with pytest.raises(ValueError, match="first_frames must be of the state's 2 clips"):
        pipeline.stream(torch.zeros(2, 3, 2, 4, 4), state=state, **prompt())
