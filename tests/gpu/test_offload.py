"""Offloading as diffusers does it, around a swapped SANA-WM: the same frames as with all weights on the GPU."""

import pytest
import torch

from frame_gdn import swap

from ..helpers import NEEDS_GPU, relative_error

pytest.importorskip("diffusers", minversion="0.42")

from ..hosts.sana_wm import tiny_inputs, tiny_model, twin
from ..hosts.test_sana_wm import film, sample, tiny_pipeline

pytestmark = NEEDS_GPU

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 1, 1]]).bool()


def swapped_pipeline():
    return tiny_pipeline(swap(tiny_model(chunk_plucker_channels=48, softmax_every_n=3)))


@pytest.fixture(scope="module")
def frames():
    """What the pipeline films with everything on the GPU."""
    found = film(swapped_pipeline().to("cuda"))
    assert found.std() > 0.01
    return found


def test_the_pipeline_with_its_models_offloaded(frames):
    pytest.importorskip("accelerate")
    pipeline = swapped_pipeline()
    pipeline.enable_model_cpu_offload()
    for _ in range(2):
        assert relative_error(film(pipeline), frames) <= 1e-5
    pipeline.maybe_free_model_hooks()
    assert all(p.device.type == "cpu" for p in pipeline.transformer.parameters())


@pytest.mark.parametrize("use_stream", [False, True])
@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_the_pipeline_with_its_transformer_offloaded_by_groups(frames, offload_type, use_stream):
    pipeline = swapped_pipeline()
    pipeline.text_encoder.to("cuda")
    pipeline.vae.to("cuda")
    pipeline.transformer.enable_group_offload(
        torch.device("cuda"), torch.device("cpu"), offload_type, num_blocks_per_group=1, use_stream=use_stream
    )
    for _ in range(2):
        assert relative_error(film(pipeline), frames) <= 1e-5


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_masked_frames_with_groups_offloaded(offload_type):
    inputs = {name: t.cuda() for name, t in tiny_inputs(mask=MASK).items()}
    model = swap(tiny_model(softmax_every_n=3))
    expected = sample(twin(model).cuda(), inputs)
    model.enable_group_offload(torch.device("cuda"), torch.device("cpu"), offload_type, num_blocks_per_group=1)
    assert relative_error(sample(model, inputs), expected) <= 1e-5
