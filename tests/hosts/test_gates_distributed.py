"""SanaVideo and Wan over frame shards equal the whole model in one process: values, every gradient, errors."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from frame_gdn import parallelize, swap
from frame_gdn.chunks import ChunkGrid
from tests.distributed.helpers import run_ranks, split
from tests.helpers import fill_randomly
from tests.hosts.warm_start import SWAPPED, blocks_of, frames_of, keep_float64, tiny_inputs, tiny_model
from tests.models.helpers import assert_same_gradients, gradients

TOLERANCE = 1e-11

#: By number of ranks: even and uneven, cut within a chunk.
SHARDS = {1: [[7]], 2: [[3, 4], [6, 1]], 3: [[1, 4, 2]], 4: [[2, 1, 3, 1]]}
#: (blocks, grid of chunks, under checkpointing); no blocks: the stock model, parallelized alone.
WHOLE = ChunkGrid()
CASES = {
    "sana_video": [
        ([0, 1, 2], WHOLE, False),
        ([0, 1, 2], ChunkGrid(2, 3, True), True),
        ([1], WHOLE, True),
        (None, WHOLE, False),
    ],
    "wan": [([0, 2], WHOLE, False), ([0, 2], ChunkGrid(3, 1), True), (None, WHOLE, False)],
}


def build(host: str, blocks: list[int] | None, grid: ChunkGrid, checkpointing: bool = False) -> Any:
    model = tiny_model(host, torch.float64)
    if blocks is not None:
        fill_randomly(swap(model, blocks=blocks, start_scale=0.7, **grid.facts), 1)
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    return model


def loss_of(sample: Tensor, first_frame: int = 0) -> Tensor:
    """Every output counts differently; over shards, the shards' losses add up to the clip's."""
    weight = torch.randn(2, 4, 64, 4, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return (sample * weight[:, :, first_frame : first_frame + sample.shape[2]]).sum()


def all_cases(rank: int, size: int) -> None:
    keep_float64()
    for host, options in [(host, options) for host, cases in CASES.items() for options in cases]:
        blocks, grid, _ = options
        model = build(host, blocks, grid)
        sample = model(**tiny_inputs(7, torch.float64)).sample
        loss_of(sample).backward()
        expected = gradients(model)
        for sizes in SHARDS[size]:
            own = split(7, sizes, rank)
            model = parallelize(build(host, *options), dist.group.WORLD)
            mine = model(**frames_of(tiny_inputs(7, torch.float64), own)).sample
            scale = sample.abs().max().item()
            torch.testing.assert_close(mine, sample[:, :, own], rtol=0, atol=TOLERANCE * scale)
            loss_of(mine, own.start).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            assert_same_gradients(gradients(model), expected, TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("size", SHARDS)
def test_sharded_equals_unsharded_in_values_and_gradients(size: int) -> None:
    run_ranks(size, all_cases)


def refused(rank: int, size: int) -> list[list[str]]:
    return [refused_by(host, rank) for host in SWAPPED]


def refused_by(host: str, rank: int) -> list[str]:
    messages = []
    for model in (swap(tiny_model(host), group=dist.group.WORLD), parallelize(tiny_model(host), dist.group.WORLD)):
        inputs = frames_of(tiny_inputs(4), slice(2 * rank, 2 * rank + 2))
        text = inputs["encoder_hidden_states"]
        for other in (text[..., : 8 - rank], text[:, : 5 - rank]):
            with pytest.raises(ValueError, match="disagree on encoder_hidden_states: rank 0 has"):
                model(**{**inputs, "encoder_hidden_states": other})
        with pytest.raises(ValueError, match="disagree on hidden_states: rank 0 has"):
            model(**{**inputs, "hidden_states": inputs["hidden_states"][..., : 6 - 2 * rank]})
        with pytest.raises(ValueError, match="hidden_states must be"):
            model(**{**inputs, "hidden_states": inputs["hidden_states"][(0,) * rank]})
    model = swap(tiny_model(host), group=dist.group.WORLD)
    assert blocks_of(model, host)[0].attn1.group is dist.group.WORLD
    for frames in (slice(0, 2 - 2 * rank), slice(0, 2)):
        inputs = frames_of(tiny_inputs(2, batch=2 - (rank if frames.stop == 2 else 0)), frames)
        with pytest.raises(ValueError) as error:
            model(**inputs)
        messages.append(str(error.value))
    return messages


@pytest.mark.slow
def test_bad_input_on_one_rank_is_an_error_on_all() -> None:
    for hosts in run_ranks(2, refused):
        for empty, disagreement in hosts:
            assert "every rank needs at least one frame, the ranks hold [2, 0]" in empty
            assert "disagree on hidden_states: rank 0 has (2, " in disagreement
