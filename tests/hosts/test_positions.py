"""Rotary positions of the hosts: a formula that is diffusers' table where there is one, and goes on after its end."""

from typing import Any

import pytest
import torch
from torch import Tensor

from frame_gdn import swap
from tests.helpers import relative_error

pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models.transformers.transformer_sana_video import WanRotaryPosEmbed as SanaVideoRotary
from diffusers.models.transformers.transformer_sana_wm import SanaWMRotaryPosEmbed
from diffusers.models.transformers.transformer_wan import WanRotaryPosEmbed

from frame_gdn.hosts.clip import rotary_angles, rotary_tables
from tests.hosts import sana_wm, warm_start

CPU = torch.device("cpu")


def complex_table(first_frame: int, frames: int) -> Tensor:
    angles = rotary_angles(16, first_frame, (frames, 3, 4), CPU, 1024)
    return torch.polar(torch.ones_like(angles), angles)


@pytest.mark.parametrize("rope", [SanaVideoRotary, WanRotaryPosEmbed])
def test_positions_of_wan_and_sana_video_are_those_of_their_table(rope: Any) -> None:
    table = rope(16, (1, 1, 1), 1024)(torch.empty(1, 4, 1024, 3, 4))
    for expected, ours, later in zip(
        table, rotary_tables(16, 0, (1024, 3, 4), CPU), rotary_tables(16, 1000, (24, 3, 4), CPU), strict=True
    ):
        assert torch.equal(ours, expected)
        assert torch.equal(later, expected[:, 1000 * 12 :])


def test_positions_of_sana_wm_are_those_of_its_table() -> None:
    table = SanaWMRotaryPosEmbed(16, (1, 1, 1), 1024)((1024, 3, 4))[0, 0]
    assert torch.equal(complex_table(0, 1024), table)
    assert torch.equal(complex_table(1000, 24), table[1000 * 12 :])


def test_positions_of_sana_wm_after_its_table_are_as_exact_as_float32_holds() -> None:
    """A float32 product of a million would be off by 0.03."""
    exact = rotary_angles(16, 1_000_000, (5, 3, 4), CPU)
    expected = torch.polar(torch.ones_like(exact), exact)
    assert relative_error(complex_table(1_000_000, 5).to(torch.complex128), expected) < 1e-6
    across = complex_table(1022, 4)
    assert torch.equal(across[: 2 * 12], complex_table(1022, 2)) and torch.equal(
        across[2 * 12 :], complex_table(1024, 2)
    )


@pytest.mark.parametrize("host", ["sana_wm", "sana_video", "wan"])
def test_a_clip_goes_on_after_the_end_of_the_hosts_table(host: str) -> None:
    if host == "sana_wm":
        model, inputs = sana_wm.tiny_model(num_layers=1), sana_wm.tiny_inputs(2, batch=1, camera=False)
        inputs["hidden_states"] = torch.randn(1, 4, 1026, 1, 2)
        inputs["timestep"] = torch.full((1, 1, 1026), 500.0)
    else:
        model, inputs = warm_start.tiny_model(host), warm_start.tiny_inputs(34)  # its table has 32 positions
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            model(**inputs)
        assert swap(model)(**inputs).sample.isfinite().all()
