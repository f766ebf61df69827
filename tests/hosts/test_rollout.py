"""Swapped hosts in the pipeline: an image, a camera, a window, and a rollout that goes on from its own state."""

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from frame_gdn import FrameGDNRolloutPipeline, swap
from frame_gdn.camera import CameraStream
from tests.helpers import fill_randomly, relative_error
from tests.hosts import sana_wm, warm_start

GRID = {"chunk_frames": 2, "first_chunk_frames": 3}
WINDOW = {"softmax_window": 2, "softmax_sink": True}
SIGMAS = [1.0, 0.5]


def pipeline_of(host: str) -> tuple[Any, dict[str, Any]]:
    """A pipeline of a tiny swapped host, and what a rollout of 7 frames is given but for its noise."""
    if host == "sana_wm":
        model = swap(sana_wm.tiny_model(softmax_every_n=2, chunk_plucker_channels=48), **GRID, **WINDOW)
        inputs = sana_wm.tiny_inputs(7)
    else:
        window = WINDOW if host == "wan" else {}  # SanaVideo has no softmax attention over frames
        model = fill_randomly(swap(warm_start.tiny_model(host), **GRID, **window))
        inputs = warm_start.tiny_inputs(7)
    pipeline = FrameGDNRolloutPipeline(model, FlowMatchEulerDiscreteScheduler(shift=1.0))
    pipeline.set_progress_bar_config(disable=True)
    text = inputs["encoder_hidden_states"].float()
    given = {"prompt_embeds": text.squeeze(1) if text.dim() == 4 else text, "sigmas": SIGMAS}
    if host == "sana_wm":
        given["camera"] = cameras(len(text))
    return pipeline, {**given, "first_frames": inputs["hidden_states"][:, :, :1].float()}


def cameras(batch: int, frames: int = 49) -> tuple[torch.Tensor, torch.Tensor]:
    poses = torch.eye(4).repeat(batch, frames, 1, 1)
    poses[..., 2, 3] = 0.1 * torch.arange(frames)
    return poses, torch.tensor([60.0, 60.0, 64.0, 64.0])


def noise_of(given: dict[str, Any]) -> torch.Tensor:
    B, C, _, h, w = given["first_frames"].shape
    return torch.randn(B, C, 7, h, w, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("host", ["sana_wm", "sana_video", "wan"])
def test_a_host_rolls_out_from_an_image_and_goes_on_from_its_state(host: str) -> None:
    pipeline, given = pipeline_of(host)
    noise = noise_of(given)
    whole = pipeline(num_chunks=3, latents=noise, **given)
    assert torch.equal(whole.latents[:, :, :1], given["first_frames"]) and whole.latents.isfinite().all()
    assert whole.state.frames == 7 and whole.state.kept == ((3, 2, 2) if host == "sana_video" else (3, 2))
    head = pipeline(num_chunks=1, latents=noise[:, :, :3], **given)
    rest = {name: value for name, value in given.items() if name != "first_frames"}
    tail = pipeline(state=head.state, num_chunks=2, latents=noise[:, :, 3:], **rest)
    assert relative_error(torch.cat([head.latents, tail.latents], 2), whole.latents) <= 1e-6


@pytest.mark.parametrize("host", ["sana_wm", "sana_video", "wan"])
@torch.no_grad()
def test_a_hosts_first_step_is_its_own_pass_with_the_image_at_level_zero(host: str) -> None:
    pipeline, given = pipeline_of(host)
    x = noise_of(given)[:, :, :3].clone()
    found = pipeline(num_chunks=1, latents=x, **{**given, "sigmas": [1.0]}).latents
    x[:, :, :1] = given["first_frames"]
    times = torch.tensor([0.0, 1000.0, 1000.0]).expand(len(x), 3)
    text = given["prompt_embeds"]
    if host == "sana_wm":
        stream = CameraStream(4 * 32, 3 * 32)
        stream.add(*given["camera"])
        mask = torch.ones(text.shape[:2], dtype=torch.bool)
        arguments = {"timestep": times[:, None], "encoder_attention_mask": mask, **stream.take(3)._asdict()}
        text = text[:, None]
    else:
        tokens = x[0, 0, 0].numel() // pipeline.transformer.config.patch_size[1] ** 2
        arguments = {"timestep": times.repeat_interleave(tokens, 1)}
    expected = x - pipeline.transformer(x, encoder_hidden_states=text, **arguments).sample
    assert relative_error(found[:, :, 1:], expected[:, :, 1:]) <= 1e-6


def test_a_camera_may_be_given_chunk_by_chunk_and_must_reach_to_the_end() -> None:
    pipeline, given = pipeline_of("sana_wm")
    noise, (poses, lens) = noise_of(given), given["camera"]
    whole = pipeline(num_chunks=3, latents=noise, **given).latents
    asked: list[int] = []

    def steer() -> Any:
        for first, last in ((0, 17), (17, 33), (33, 49)):
            asked.append(last)
            yield poses[:, first:last], lens

    pieces = []
    for chunk in pipeline.stream(num_chunks=3, latents=noise, **{**given, "camera": steer()}):
        pieces.append(chunk)
        assert asked == [17, 33, 49][: len(pieces)]
    assert relative_error(torch.cat(pieces, 2), whole) <= 1e-6
    with pytest.raises(ValueError, match="a pose for each of the film's 49 video frames, got 48"):
        pipeline.stream(num_chunks=3, **{**given, "camera": (poses[:, :48], lens)})
    with pytest.raises(ValueError, match="camera stands at latent frame 0, the rollout at 3"):
        head = pipeline(num_chunks=1, latents=noise[:, :, :3], **given)
        rest = {name: value for name, value in given.items() if name != "first_frames"}
        pipeline.stream(state=head.state, **{**rest, "camera": CameraStream(128, 96)})


@pytest.mark.parametrize("host", ["sana_wm", "sana_video", "wan"])
def test_a_host_in_bfloat16_rolls_out_close_to_itself_in_float32(host: str) -> None:
    """The camera's poses stay in float32: torch inverts none in bfloat16."""
    pipeline, given = pipeline_of(host)
    noise = noise_of(given)
    expected = pipeline(num_chunks=3, latents=noise, **given).latents
    pipeline.transformer.to(torch.bfloat16)
    found = pipeline(num_chunks=3, latents=noise, **given)
    assert found.latents.dtype == torch.float32
    assert relative_error(found.latents, expected) <= 0.1
