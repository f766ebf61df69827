"""Options of `swap` that change what a model computes: in its configuration, saved, loaded, kept by a second swap."""

import copy
import inspect
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frame_gdn import swap, unswap
from tests.helpers import fill_randomly, relative_error

pytest.importorskip("diffusers", minversion="0.42")

import diffusers

from frame_gdn.chunks import ChunkGrid
from frame_gdn.hosts import Swapped
from frame_gdn.hosts import sana_wm as sana_wm_host
from tests.hosts import sana_wm, warm_start

HOSTS = ("sana_wm", "sana_video", "wan")
SWAPPED = {**warm_start.SWAPPED, "sana_wm": sana_wm_host.SanaWMTransformer3DModel}
STOCK = {host: getattr(diffusers, cls.__name__) for host, cls in SWAPPED.items()}

#: By host, all options as their entries in the configuration, none of them a default.
ENTRIES: dict[str, dict[str, Any]] = {
    "sana_wm": {"chunk_frames": 2},
    "sana_video": {"gdn_blocks": [0, 1, 2], "start_scale": 0.7, "chunk_frames": 2},
    "wan": {"gdn_blocks": [1, 2], "start_scale": 0.7, "chunk_frames": 2},
}


def stock_model(host: str) -> Any:
    return sana_wm.tiny_model() if host == "sana_wm" else warm_start.tiny_model(host)


def options_of(host: str) -> dict[str, Any]:
    return {("blocks" if entry == "gdn_blocks" else entry): value for entry, value in ENTRIES[host].items()}


def swapped_model(host: str, **options: Any) -> Any:
    return fill_randomly(swap(stock_model(host), **{**options_of(host), **options}))


def noted(model: Any) -> dict[str, Any]:
    entries = ("gdn_blocks", "start_scale", "chunk_frames", "frame_gdn")
    return {entry: model.config[entry] for entry in entries if entry in model.config}


@torch.no_grad()
def sample(model: nn.Module) -> Tensor:
    host_inputs = sana_wm.tiny_inputs() if "SanaWM" in type(model).__name__ else warm_start.tiny_inputs()
    return model(**host_inputs).sample


def set_of(model: nn.Module, attribute: str) -> set[Any]:
    return {getattr(module, attribute) for module in model.modules() if isinstance(module, Swapped)}


# --- saved and loaded -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_every_option_is_saved_under_its_name_and_loaded(host: str, tmp_path: Path) -> None:
    model = swapped_model(host)
    assert noted(model) == ENTRIES[host] and model.config.chunk_frames == 2
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert ENTRIES[host].items() <= saved.items()
    loaded = SWAPPED[host].from_pretrained(tmp_path)
    assert noted(loaded) == ENTRIES[host] and set_of(loaded, "chunk_frames") == {2}
    assert torch.equal(sample(loaded), sample(model))
    other = SWAPPED[host].from_pretrained(tmp_path, chunk_frames=3)
    assert noted(other) == {**ENTRIES[host], "chunk_frames": 3} and set_of(other, "chunk_frames") == {3}
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), SWAPPED[host].from_config(model.config)):
        assert noted(twin) == ENTRIES[host] and set_of(twin, "chunk_frames") == {2}


@pytest.mark.parametrize("host", HOSTS)
def test_diffusers_own_class_says_that_it_ignores_them_and_swap_finds_them_again(
    host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = swapped_model(host)
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(logging.getLogger("diffusers"), "propagate", True)
    loaded = STOCK[host].from_pretrained(tmp_path)
    assert any("chunk_frames" in message and "ignored" in message for message in caplog.messages)
    assert type(loaded) is STOCK[host]
    assert noted(swap(loaded)) == ENTRIES[host] and set_of(loaded, "chunk_frames") == {2}
    if host == "sana_wm":  # the others' gates start anew
        assert torch.equal(sample(loaded), sample(model))
    assert noted(swap(STOCK[host].from_pretrained(tmp_path), chunk_frames=None))["chunk_frames"] is None


@pytest.mark.parametrize("host", HOSTS)
def test_the_grid_of_chunks_is_saved_and_loaded_and_kept_by_a_second_swap(host: str, tmp_path: Path) -> None:
    model = swapped_model(host, first_chunk_frames=3, merge_tail=True)
    model.save_pretrained(tmp_path)
    loaded = SWAPPED[host].from_pretrained(tmp_path)
    assert torch.equal(sample(loaded), sample(model)) and set_of(loaded, "grid") == {ChunkGrid(2, 3, True)}
    assert set_of(swap(loaded, chunk_frames=1), "grid") == {ChunkGrid(1, 3, True)}
    with pytest.raises(ValueError, match="first_chunk_frames 3 is for a clip in chunks"):
        swap(loaded, chunk_frames=None)
    assert set_of(loaded, "grid") == {ChunkGrid(1, 3, True)}
    uniform = swap(loaded, chunk_frames=2, first_chunk_frames=None, merge_tail=False)
    assert noted(uniform) == ENTRIES[host] and not torch.equal(sample(uniform), sample(model))


@pytest.mark.parametrize("host", HOSTS)
def test_an_option_that_is_none_is_not_saved(host: str, tmp_path: Path) -> None:
    model = swap(stock_model(host))
    assert model.config.chunk_frames is None
    model.save_pretrained(tmp_path)
    assert "chunk_frames" not in json.loads((tmp_path / "config.json").read_text())
    assert SWAPPED[host].from_pretrained(tmp_path).config.chunk_frames is None


@pytest.mark.parametrize("host", ["sana_video", "wan"])
def test_what_an_earlier_version_saved_is_loaded(host: str, tmp_path: Path) -> None:
    model = swapped_model(host)
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    earlier = {"blocks": saved.pop("gdn_blocks"), **{key: saved.pop(key) for key in ("start_scale", "chunk_frames")}}
    file.write_text(json.dumps({**saved, "frame_gdn": earlier}))
    loaded = SWAPPED[host].from_pretrained(tmp_path)
    assert noted(loaded) == ENTRIES[host]
    assert torch.equal(sample(loaded), sample(model))
    assert noted(swap(STOCK[host].from_pretrained(tmp_path))) == ENTRIES[host]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"chunk_frames": 0}, "chunk_frames must be"),
        ({"chunk_frames": "2"}, "chunk_frames must be"),
        ({"gdn_blocks": [3]}, "from 0 to 2"),
        ({"gdn_blocks": "all"}, "blocks must be"),
        ({"start_scale": float("nan")}, "start_scale must be"),
        ({"frame_gdn": {"block": [0]}}, r"config\.frame_gdn must be a mapping of blocks"),
        ({"frame_gdn": [1]}, r"config\.frame_gdn must be a mapping of blocks"),
    ],
    ids=str,
)
def test_a_configuration_that_holds_what_swap_does_not_take_is_refused(
    entries: dict[str, Any], message: str, tmp_path: Path
) -> None:
    swapped_model("wan").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))
    with pytest.raises(ValueError, match=message):
        SWAPPED["wan"].from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        swap(STOCK["wan"].from_pretrained(tmp_path))


# --- a second swap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_a_second_swap_changes_what_is_named_and_keeps_the_rest(host: str) -> None:
    model = swapped_model(host, backend="torch", attention="sdpa")
    before = sample(model)
    assert torch.equal(sample(swap(model)), before) and noted(model) == ENTRIES[host]
    assert set_of(model, "backend") == {"torch"} and set_of(model, "attention") == {"sdpa"}
    assert torch.equal(sample(swap(model, backend="auto")), before) and noted(model) == ENTRIES[host]
    assert set_of(model, "backend") == {"auto"} and set_of(model, "attention") == {"sdpa"}
    changes: list[dict[str, Any]] = [{"chunk_frames": 3}, {"chunk_frames": None}]
    if host != "sana_wm":
        changes += [{"start_scale": 0.3}]
    if host == "wan":
        changes += [{"blocks": [0]}]
    expected = dict(ENTRIES[host])
    for change in changes:
        swap(model, **change)
        expected.update({"gdn_blocks": [0, 1, 2]} if "blocks" in change else change)
        assert noted(model) == expected and set_of(model, "chunk_frames") == {expected["chunk_frames"]}
        assert set_of(model, "backend") == {"auto"}
        fresh = swap(stock_model(host), **{("blocks" if k == "gdn_blocks" else k): v for k, v in expected.items()})
        fresh.load_state_dict(model.state_dict())
        assert torch.equal(sample(model), sample(fresh)), change


@pytest.mark.parametrize("host", HOSTS)
def test_a_second_swap_that_is_refused_changes_nothing(host: str) -> None:
    model = swapped_model(host)
    before = sample(model)
    for options in ({"chunk_frames": 0}, {"blocks": [7]}, {"backend": "cuda"}, {"start_scale": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            swap(model, **options)
        assert noted(model) == ENTRIES[host] and torch.equal(sample(model), before)


@pytest.mark.parametrize("host", ["sana_wm", "sana_video"])
def test_chunks_need_all_blocks_of_a_host_whose_own_attention_sees_the_whole_clip(host: str) -> None:
    model = swap(stock_model(host), blocks=[1])
    with pytest.raises(ValueError, match=r"chunk_frames needs all blocks swapped"):
        swap(model, chunk_frames=2)
    assert set_of(model, "chunk_frames") == {None}
    assert swap(model, blocks=None, chunk_frames=2).config.chunk_frames == 2
    assert swap(model, blocks=[0]).config.chunk_frames == 2  # a block that is swapped stays so


# --- and back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", HOSTS)
def test_unswap_gives_back_the_stock_configuration(host: str, tmp_path: Path) -> None:
    model = stock_model(host)
    model.save_pretrained(tmp_path / "before")
    config, plain = dict(model.config), sample(model)
    swap(model, **options_of(host))
    swap(model, chunk_frames=3)
    if host == "sana_wm":
        unswap(model)
    else:
        with pytest.warns(UserWarning, match="unswap dropped"):
            unswap(model)
    assert dict(model.config) == config and torch.equal(sample(model), plain)
    model.save_pretrained(tmp_path / "after")
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("before", "after"))
    assert before == after
    assert swap(model).config.chunk_frames is None  # nothing of the former swap is left
    assert relative_error(sample(swap(stock_model(host))), sample(model)) == 0


def test_the_default_of_an_option_reads_as_what_it_does() -> None:
    signature = str(inspect.signature(swap))
    assert "chunk_frames: int | None | frame_gdn.swap.Keep = KEEP" in signature
