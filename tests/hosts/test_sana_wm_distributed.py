"""SANA-WM over frame shards: each rank calls the model with its own frames and gets its part of what one process
computes; gradients summed over the ranks are those of one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from frame_gdn import parallelize, swap
from frame_gdn.chunks import ChunkGrid
from tests.distributed.helpers import run_ranks, split
from tests.helpers import relative_error

pytest.importorskip("diffusers", minversion="0.42")

from frame_gdn.hosts import sana_wm
from tests.hosts.sana_wm import output_and_gradients, tiny_inputs, tiny_model, weighted_sum

FRAMES_DIM = {"hidden_states": 2, "timestep": 2, "camera_conditions": 1, "chunk_plucker": 2, "frame_valid_mask": 1}
MASK = torch.tensor([[1, 1, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0, 0]]).bool()


def own(inputs: dict[str, Any], frames: slice) -> dict[str, Any]:
    return {
        name: t.movedim(FRAMES_DIM[name], 0)[frames].movedim(0, FRAMES_DIM[name]) if name in FRAMES_DIM else t
        for name, t in inputs.items()
    }


Case = tuple[list[int], dict[str, Any], dict[str, Any], bool, Tensor | None]
CASES: dict[str, Case] = {
    "camera": ([4, 3], {}, {}, True, None),
    "no camera, masked": ([3, 4], {}, {}, False, MASK),
    "softmax": ([4, 3], {"softmax_every_n": 2}, {}, True, None),
    "chunks across ranks": ([2, 5], {"softmax_every_n": 3}, {"grid": ChunkGrid(2, 3, True)}, True, None),
    "stock, through parallelize": ([3, 4], {"softmax_every_n": 3}, {"parallelize": True}, True, None),
    "some blocks swapped": ([3, 4], {"softmax_every_n": 3}, {"blocks": [0], "parallelize": True}, True, None),
    "softmax, masked": ([1, 2, 4], {"softmax_every_n": 3}, {}, True, MASK),
    "chunks, masked": ([3, 1, 3], {"softmax_every_n": 3}, {"grid": ChunkGrid(2)}, True, MASK),
    "shards shorter than the halo": ([1, 5, 1], {}, {}, True, MASK),
    "four ranks, checkpointing": ([2, 1, 1, 3], {}, {"checkpointing": True}, True, None),
}


def rank_of_cases(rank: int, size: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """This rank's output and its share of the gradients, for every case of so many ranks."""
    sana_wm.HALF = torch.float32  # the host's bfloat16 softmax has noise of its own, which would hide an error here
    results = []
    for shards, config, options, camera, mask in CASES.values():
        if len(shards) != size:
            continue
        model = tiny_model(**config)
        if options.get("parallelize"):
            if "blocks" in options:
                swap(model, blocks=options["blocks"])
            parallelize(model, dist.group.WORLD)
        else:
            swap(model, group=dist.group.WORLD, **options.get("grid", ChunkGrid()).facts)
        if options.get("checkpointing"):
            model.train().enable_gradient_checkpointing()
        frames = split(sum(shards), shards, rank)
        sample = model(**own(tiny_inputs(7, camera=camera, mask=mask), frames)).sample
        weighted_sum(sample, frames.start).backward()
        results.append((sample.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
def test_shards_equal_one_process(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sana_wm, "HALF", torch.float32)
    cases = {name: case for name, case in CASES.items() if len(case[0]) == size}
    ranks = run_ranks(size, rank_of_cases, timeout_s=200)
    for index, (name, (_, config, options, camera, mask)) in enumerate(cases.items()):
        alone = swap(tiny_model(**config), **options.get("grid", ChunkGrid()).facts)
        expected, gradients = output_and_gradients(alone, tiny_inputs(7, camera=camera, mask=mask))
        sample = torch.cat([results[index][0] for results in ranks], 2)
        assert relative_error(sample, expected) <= 1e-5, name
        for parameter, gradient in gradients.items():
            share = [results[index][1].get(parameter, torch.zeros_like(gradient)) for results in ranks]
            assert relative_error(torch.stack(share).sum(0), gradient) <= 1e-4, f"{name}: {parameter}"


def rank_of_mistakes(rank: int, size: int) -> list[str]:
    """A shard without frames, a mask that weighs on one rank only and other calls on one rank: an error on every rank,
    no hang."""
    messages = []
    inputs = tiny_inputs(4, camera=False)
    mine = own(inputs, split(4, [2, 2], rank))
    empty = own(inputs, split(4, [4, 0], rank))
    weighing = own({**inputs, "frame_valid_mask": torch.ones(2, 4)}, split(4, [2, 2], rank))
    if rank == 1:
        weighing["frame_valid_mask"] = weighing["frame_valid_mask"] / 2
    others = [
        {"encoder_hidden_states": inputs["encoder_hidden_states"][..., : 8 - rank]},
        {"encoder_hidden_states": inputs["encoder_hidden_states"][:, :, : 6 - rank]},
        {"hidden_states": mine["hidden_states"][..., : 3 - rank]},
        {"hidden_states": mine["hidden_states"][(0,) * rank]},
        {"pos_embeds": torch.zeros(1, 1, 24, 8, dtype=torch.complex64) if rank else None},
    ]
    for wrong in (weighing, empty, *({**mine, **other} for other in others)):
        model = swap(tiny_model(num_layers=1), group=dist.new_group())
        with pytest.raises(ValueError) as raised:
            model(**wrong)
        messages.append(str(raised.value))
    model = swap(tiny_model(num_layers=1), group=dist.new_group(), chunk_frames=2 + rank)
    with pytest.raises(ValueError) as raised:
        model(**mine)
    messages.append(str(raised.value))
    return messages


def test_mistakes_are_errors_on_every_rank() -> None:
    first, second = run_ranks(2, rank_of_mistakes)
    assert "rank 1 of the group refused" in first[0] and "0 and 1" in second[0]
    assert first[1] == second[1] == "every rank needs at least one frame, the ranks hold [4, 0]"
    for index, name in ((2, "encoder_hidden_states"), (3, "encoder_hidden_states"), (4, "hidden_states")):
        assert first[index] == second[index] and f"disagree on {name}: rank 0 has" in first[index]
    assert "rank 1 of the group refused its input, rank 0 stops with it" in first[5]
    assert first[6] == second[6] and "disagree on pos_embeds: rank 0 has None, rank 1 has" in first[6]
    assert first[7] == second[7] and "disagree on chunk_frames: rank 0 has 2, rank 1 has 3" in first[7]


def rank_under_diffusers_plan(rank: int, size: int) -> list[Tensor]:
    """Swapped first, then diffusers' own context parallelism, whose hook on the model splits the frames of its inputs.

    What `enable_parallelism` does, but for the mesh that it makes of accelerators only."""
    from diffusers import ContextParallelConfig
    from diffusers.hooks.context_parallel import apply_context_parallel
    from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput

    mesh = dist.device_mesh.init_device_mesh("cpu", (1, size), mesh_dim_names=("ring", "ulysses"))
    config = ContextParallelConfig(ulysses_degree=size)
    config.setup(rank, size, torch.device("cpu"), mesh)
    sana_wm.HALF = torch.float32
    model = swap(tiny_model(softmax_every_n=3), group=config._flattened_mesh.get_group())
    inputs = tiny_inputs(6, mask=MASK[:, :6])
    plan = {n: ContextParallelInput(d, inputs[n].dim()) for n, d in FRAMES_DIM.items() if n in inputs}
    apply_context_parallel(model, config, {"": plan})
    apply_context_parallel(model, config, {"": ContextParallelOutput(2, 5)})
    model._parallel_config = config
    with pytest.raises(ValueError, match="swap first"):
        swap(model)
    with torch.no_grad():
        return list(model(**inputs, return_dict=False))


def test_swapped_first_then_under_a_plan_of_diffusers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sana_wm, "HALF", torch.float32)
    with torch.no_grad():
        expected = swap(tiny_model(softmax_every_n=3))(**tiny_inputs(6, mask=MASK[:, :6])).sample
    for (sample,) in run_ranks(2, rank_under_diffusers_plan):
        assert relative_error(sample, expected) <= 1e-5
