"""swap and unswap at their door: what they know, what they refuse. What they compute: tests/hosts."""

from typing import Any

import pytest
import torch
from torch import nn

from frame_gdn import parallelize, swap, unswap
from frame_gdn.hosts import HOSTS, SwapOptions, Swapped, find

pytest.importorskip("diffusers", minversion="0.42")

from tests.hosts.sana_wm import tiny_model


@pytest.mark.parametrize("function", [swap, unswap])
def test_an_unknown_model_is_refused_with_the_known_ones(function: Any) -> None:
    class SanaWMTransformer3DModel(nn.Module):  # a name alone makes no host
        pass

    for model in (nn.Linear(2, 2), SanaWMTransformer3DModel()):
        with pytest.raises(ValueError) as raised:
            function(model)
        assert all(name in str(raised.value) for name in HOSTS)


def test_every_host_offers_what_swap_calls() -> None:
    import diffusers

    for name in HOSTS:
        model = getattr(diffusers, name).__new__(getattr(diffusers, name))
        host = find(model)
        assert host is not None and callable(host.replace) and callable(host.cover)


@pytest.mark.parametrize("option", ["block", "chunk_frame", "Backend", "start", "mesh"])
def test_a_misspelt_option_is_a_type_error(option: str) -> None:
    with pytest.raises(TypeError, match=option):
        swap(tiny_model(), **{option: None})  # type: ignore[arg-type]


def test_swapped_twice_unswapped_twice() -> None:
    model = tiny_model(num_layers=2)
    classes = {name: type(module) for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    assert swap(swap(model)) is model
    assert all(not isinstance(module, Swapped) or module.backend == "auto" for module in model.modules())
    swap(model, backend="torch", chunk_frames=2)
    assert all(not isinstance(module, Swapped) or module.backend == "torch" for module in model.modules())
    assert unswap(unswap(model)) is model
    assert {name: type(module) for name, module in model.named_modules()} == classes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


def test_after_enable_parallelism_is_refused() -> None:
    model = tiny_model(num_layers=1)
    model._parallel_config = object()
    with pytest.raises(ValueError, match="swap first"):
        swap(model)


def test_the_group_is_taken_off_again_and_kept_out_of_the_state_dict() -> None:
    model = tiny_model(num_layers=1)
    keys = list(model.state_dict())
    assert parallelize(swap(model), None) is model
    assert all(module.group is None for module in model.modules() if isinstance(module, Swapped))
    assert list(model.state_dict()) == keys
    with pytest.raises(ValueError, match="group"):
        swap(model, group="cp")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocks", "chosen"), [(None, [0, 1, 2]), ([2, 0, 2], [0, 2]), (range(2), [0, 1]), ((1,), [1])], ids=str
)
def test_chosen_blocks(blocks: Any, chosen: list[int]) -> None:
    assert SwapOptions(blocks=blocks).chosen(3) == chosen


@pytest.mark.parametrize("blocks", [[3], [-1], [1.0], [True], [], ["0"]], ids=str)
def test_blocks_that_are_not_there(blocks: Any) -> None:
    with pytest.raises(ValueError, match="blocks"):
        SwapOptions(blocks=blocks).chosen(3)


def test_swap_under_no_grad_and_inference_leaves_parameters_trainable() -> None:
    model = tiny_model(num_layers=1)
    with torch.inference_mode():
        swap(model)
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in model.parameters())
