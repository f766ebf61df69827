"""Wan: which blocks become GDN, and what its softmax blocks do beside them (see test_gates.py for the rest)."""

import pytest
import torch
from diffusers import FirstBlockCacheConfig

from frame_gdn import swap
from frame_gdn.hosts import wan
from tests.helpers import fill_randomly, relative_error
from tests.hosts.warm_start import tiny_inputs, tiny_model


@pytest.mark.parametrize("blocks, swapped", [(None, [0, 1, 2, 4]), ([3], [3])])
def test_every_fourth_block_stays_softmax_unless_others_were_chosen(blocks, swapped) -> None:
    model = swap(tiny_model("wan", num_layers=5), blocks=blocks)
    assert [i for i, block in enumerate(model.blocks) if block.attn1.has_gates] == swapped
    assert model.config.gdn_blocks == swapped


def test_a_new_block_is_no_approximation_of_softmax_and_says_so() -> None:
    model, inputs = tiny_model("wan"), tiny_inputs(9)
    with torch.no_grad():
        stock = model(**inputs).sample
        assert relative_error(swap(model, blocks=[0])(**inputs).sample, stock) > 0.01
    assert "must then be trained" in (wan.__doc__ or "")


def test_one_chunk_of_the_whole_clip_is_no_chunk() -> None:
    model = fill_randomly(swap(tiny_model("wan", torch.float64), blocks=[0, 2]), 1)
    with torch.no_grad():
        whole = model(**tiny_inputs(5, torch.float64)).sample
        chunked = swap(model, blocks=[0, 2], chunk_frames=5)(**tiny_inputs(5, torch.float64)).sample
    assert relative_error(chunked, whole) < 1e-6  # the softmax blocks' host casts to float32


def test_a_time_a_token_as_in_wan_2_2() -> None:
    model = fill_randomly(swap(tiny_model("wan"), blocks=[0, 2]), 1)
    inputs = tiny_inputs(5)
    per_token = {**inputs, "timestep": inputs["timestep"][:, None].expand(2, 5 * 6)}
    with torch.no_grad():
        assert relative_error(model(**per_token).sample, model(**inputs).sample) < 1e-5


def test_a_cache_of_blocks_knows_the_swapped_block() -> None:
    model, inputs = fill_randomly(swap(tiny_model("wan"), blocks=[0, 2]), 1), tiny_inputs()
    with torch.no_grad():
        expected, calls = model(**inputs).sample, []
        model.enable_cache(FirstBlockCacheConfig(threshold=0.05))
        model.blocks[1].ffn.register_forward_hook(lambda *_: calls.append(1))
        with model.cache_context("cond"):
            for _ in range(2):
                assert relative_error(model(**inputs).sample, expected) < 1e-5
        assert len(calls) == 1


def test_fused_projections_of_softmax_blocks_keep_working() -> None:
    model = fill_randomly(swap(tiny_model("wan"), blocks=[0]), 1)
    with torch.no_grad():
        expected = model(**tiny_inputs()).sample
        model.fuse_qkv_projections()
        assert relative_error(model(**tiny_inputs()).sample, expected) < 1e-5
