"""The whole model over frame shards equals the whole model in one process: values, every gradient, states, errors."""

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from frame_gdn import RolloutState, parallelize
from frame_gdn.chunks import ChunkGrid
from frame_gdn.parallel import FrameSharded
from models import VideoDiT
from tests.distributed.helpers import run_ranks, split
from tests.models.helpers import (
    assert_same_gradients,
    frames_of,
    gradients,
    tiny_inputs,
    tiny_model,
    weighted_sum,
)

TOLERANCE = 1e-11

#: By number of ranks: uneven, empty, shorter than the halo of the short convolution, cut within a chunk.
SHARDS = {1: [[7]], 2: [[3, 4], [6, 1]], 3: [[1, 4, 2], [4, 0, 3]], 4: [[2, 2, 2, 1], [0, 1, 0, 6]]}
#: (grid of chunks, padded at the end, under checkpointing). A state after 6 frames stands at the border of chunks of 2
#: and of 3, as a call that continues must; the clip of 7 frames is continued where it has no chunks.
CASES = [
    (ChunkGrid(), True, False),
    (ChunkGrid(2), True, True),
    (ChunkGrid(3), True, False),
    (ChunkGrid(2, 3, True), False, False),
]


class Expected(NamedTuple):
    """What one process says: of a clip, of the same clip continuing the state after it, and of the loss of both."""

    sample: Tensor
    state: RolloutState
    continued: Tensor | None
    gradients: dict[str, Tensor]


def case(grid: ChunkGrid, padded: bool) -> tuple[VideoDiT, dict[str, Tensor], Tensor]:
    """A model, its inputs of the whole clip, and the frames that are no padding."""
    mask = (torch.arange(7) < 6).expand(2, 7) if padded else torch.ones(2, 7, dtype=torch.bool)
    inputs = {**tiny_inputs(7), **({"frame_mask": mask} if padded else {})}
    return tiny_model(**grid.facts), inputs, mask


def in_one_process(grid: ChunkGrid, padded: bool) -> Expected:
    model, inputs, mask = case(grid, padded)
    output = model(**inputs, output_state=True)
    loss, continued = weighted_sum(select(output.sample, mask)), None
    if continues(grid, padded):
        continued = model(**inputs, state=output.state.detach()).sample
        loss = loss + weighted_sum(select(continued, mask))
        continued = continued.detach()
    loss.backward()
    state = output.state.detach()
    return Expected(output.sample.detach(), state, continued, gradients(model))


def continues(grid: ChunkGrid, padded: bool) -> bool:
    return padded or grid.chunk_frames is None


def compare(
    rank: int, sizes: list[int], grid: ChunkGrid, padded: bool, checkpointing: bool, expected: Expected
) -> None:
    own = split(7, sizes, rank)
    model, inputs, mask = case(grid, padded)
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    parallelize(model, dist.group.WORLD)
    inputs, mask = frames_of(inputs, own), mask[:, own]
    output = model(**inputs, output_state=True, frames_per_rank=sizes)
    loss = weighted_sum(select(output.sample, mask), own.start)
    close(output.sample, expected.sample[:, :, own])
    if expected.continued is not None:
        continued = model(**inputs, state=expected.state).sample
        close(continued, expected.continued[:, :, own])
        loss = loss + weighted_sum(select(continued, mask), own.start)
    state, wanted = output.state.state_dict(), expected.state.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        close(state[name], tensor)
    for name in ("frames", "chunks", "kept", "facts"):
        assert getattr(output.state, name) == getattr(expected.state, name), name

    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    assert_same_gradients(gradients(model), expected.gradients, TOLERANCE)


def select(sample: Tensor, mask: Tensor) -> Tensor:
    return sample.masked_fill(~mask[:, None, :, None, None], 0)


def close(actual: Tensor, expected: Tensor) -> None:
    scale = expected.abs().max().item() if expected.numel() else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE * scale)


def all_cases(rank: int, size: int, expected: list[Expected]) -> None:
    for sizes in SHARDS[size]:
        for options, one in zip(CASES, expected, strict=True):
            compare(rank, sizes, *options, one)


@pytest.fixture(scope="module")
def expected() -> list[Expected]:
    return [in_one_process(grid, padded) for grid, padded, _ in CASES]


@pytest.mark.parametrize("size", SHARDS)
def test_sharded_equals_unsharded_in_values_gradients_and_states(size, expected):
    run_ranks(size, all_cases, expected)


def count_collectives(rank: int, size: int) -> dict[str, dict[str, int]]:
    """What one forward and backward of the steady state issue, by kind."""
    model, inputs, _ = case(ChunkGrid(2), padded=False)
    parallelize(model, dist.group.WORLD)
    mine = frames_of(inputs, split(7, [4, 3], rank))
    model(**mine, frames_per_rank=[4, 3])  # the handshake
    counted: dict[str, int] = {}
    for name in ("all_gather_into_tensor", "all_to_all_single", "broadcast", "all_reduce", "all_gather"):
        setattr(dist, name, counting(getattr(dist, name), name, counted))
    sample = model(**mine, frames_per_rank=[4, 3]).sample
    forward = dict(counted)
    counted.clear()
    sample.sum().backward()
    return {"forward": forward, "backward": counted}


def counting(function: Any, name: str, counted: dict[str, int]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counted[name] = counted.get(name, 0) + 1
        return function(*args, **kwargs)

    return call


def test_a_pass_costs_one_exchange_a_gdn_block_and_one_fetch_a_site():
    # Two GDN blocks: a state exchange and a convolution's halo each; a softmax block: a gather; three temporal halos.
    expected = {"all_gather_into_tensor": 2, "all_to_all_single": 2 + 1 + 3}
    for counts in run_ranks(2, count_collectives):
        assert counts == {"forward": expected, "backward": expected}


def parallelize_in_every_way(rank: int, size: int) -> None:
    model = tiny_model()
    sites = [module for module in model.modules() if isinstance(module, FrameSharded)]
    assert len(sites) == 1 + 3 + 3  # the model, three attentions, three temporal convolutions
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "cp"))
    for given, group in (
        (mesh, mesh.get_group("cp")),
        (mesh["cp"], mesh.get_group("cp")),
        (dist.group.WORLD, dist.group.WORLD),
        (None, None),
    ):
        assert parallelize(model, given) is model
        assert all(site.group is group for site in sites)
    assert "group" not in model.config

    strangers = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="member"):
            parallelize(model, strangers)
    with pytest.raises(ValueError, match='dimension named "cp"'):
        parallelize(model, init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "frames")))
    with pytest.raises(ValueError, match="Linear has no module that looks across frames"):
        parallelize(torch.nn.Linear(2, 2), dist.group.WORLD)


def test_parallelize_takes_a_mesh_or_a_group_and_refuses_the_rest():
    run_ranks(2, parallelize_in_every_way)


def disagree(rank: int, size: int) -> str:
    model, inputs, _ = case(ChunkGrid(2), padded=False)
    parallelize(model, dist.group.WORLD)
    mine = frames_of(inputs, split(7, [4, 3], rank))
    if rank == 1:
        mine["timestep"] = mine["timestep"][:1]
    with pytest.raises(ValueError) as refused:
        model(**mine)
    mine = frames_of(inputs, split(7, [4, 3], rank))
    with pytest.raises(ValueError, match="disagree on chunk_frames: rank 0 has 2, rank 1 has 3"):
        model(**mine, chunk_frames=2 + rank)
    model(**mine)
    if rank == 1:
        mine["timestep"] = mine["timestep"][:1]
    with pytest.raises(ValueError, match="timestep must be" if rank else "rank 1 of the group refused"):
        model(**mine)
    return str(refused.value)


def test_bad_input_on_one_rank_is_an_error_on_all():
    first, second = run_ranks(2, disagree)
    assert "rank 1 of the group refused" in first
    assert "timestep must be" in second
