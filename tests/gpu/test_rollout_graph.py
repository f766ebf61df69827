"""A rollout replayed from CUDA graphs: the numbers of an eager one to the bit, in memory that does not grow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from frame_gdn import FrameGDNRolloutPipeline, RolloutState

from ..helpers import NEEDS_GPU

pytest.importorskip("diffusers", minversion="0.42")

from ..test_rollout_graph import rollouts, same

pytestmark = NEEDS_GPU

CHUNKS = 20
FRAMES = 3 + 2 * (CHUNKS - 1)


def on_gpu(kind: str) -> tuple[FrameGDNRolloutPipeline, dict[str, Any]]:
    """A tiny pipeline, and what twenty chunks are given: a text that changes, a camera that moves, noise."""
    pipeline, given = rollouts(kind)
    pipeline.to("cuda")
    B, C, _, h, w = given["first_frames"].shape
    noise = torch.randn(B, C, FRAMES, h, w, generator=torch.Generator().manual_seed(0))
    given.pop("prompt_attention_mask", None)
    text = given["prompt_embeds"].cuda()
    given |= {"latents": noise.cuda(), "first_frames": given["first_frames"].cuda()}
    given["prompt_embeds"] = [text * (1 + 0.05 * i) for i in range(CHUNKS)]
    if "camera" in given:
        poses = torch.eye(4).repeat(B, 8 * FRAMES + 1, 1, 1)
        poses[..., 2, 3] = 0.1 * torch.arange(8 * FRAMES + 1)
        given["camera"] = poses, torch.tensor([60.0, 60.0, 64.0, 64.0])
    return pipeline, given


def without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name not in names}


@pytest.mark.parametrize("kind", ["video_dit", "sana_wm", "sana_video", "wan"])
def test_replayed_passes_equal_eager_ones_to_the_bit(kind: str) -> None:
    pipeline, given = on_gpu(kind)
    expected = pipeline(num_chunks=CHUNKS, **given)
    found = pipeline(num_chunks=CHUNKS, cuda_graph=True, **given)
    assert torch.equal(found.latents, expected.latents) and same(found.state, expected.state)
    assert expected.latents.isfinite().all()


@pytest.mark.parametrize("kind", ["video_dit", "sana_wm"])
def test_memory_does_not_grow_and_a_step_waits_for_nothing(kind: str) -> None:
    pipeline, given = on_gpu(kind)
    used = []

    def steps() -> Iterator[int]:
        for number, _ in enumerate(pipeline.stream(num_chunks=CHUNKS, cuda_graph=True, **given)):
            yield number

    try:
        for number in steps():
            used.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
            if number == 8:  # the graphs are there
                torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(used) == CHUNKS and used[8] == used[-1], used


@pytest.mark.parametrize("kind", ["video_dit", "sana_wm"])
def test_a_state_taken_while_graphs_run_is_saved_loaded_and_branched(kind: str, tmp_path: Path) -> None:
    pipeline, given = on_gpu(kind)
    expected = pipeline(num_chunks=CHUNKS, **given)
    stream = pipeline.stream(num_chunks=CHUNKS, cuda_graph=True, **given)
    chunks = [next(stream) for _ in range(8)]
    pipeline.state.save(tmp_path / "state.safetensors")
    branch = pipeline.state
    kept = branch.clone()
    chunks += list(stream)
    assert torch.equal(torch.cat(chunks, 2), expected.latents) and same(branch, kept)
    loaded = RolloutState.load(tmp_path / "state.safetensors", pipeline.transformer)
    assert same(loaded, kept)
    rest = {**without(given, "first_frames"), "latents": given["latents"][:, :, 17:]}
    rest["prompt_embeds"] = given["prompt_embeds"][8:]
    for state in (loaded, branch):
        again = pipeline(num_chunks=CHUNKS - 8, state=state, cuda_graph=True, **rest)
        assert torch.equal(again.latents, expected.latents[:, :, 17:]) and same(again.state, expected.state)


def test_a_model_that_is_offloaded_is_refused_by_name() -> None:
    pytest.importorskip("accelerate")
    pipeline, given = rollouts("video_dit")
    pipeline.enable_model_cpu_offload()
    with pytest.raises(ValueError, match="carries a hook"):
        pipeline.stream(**given, cuda_graph=True)
