"""A host continued chunk by chunk from a state against one chunk-causal pass, and the states that a call refuses."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from frame_gdn import swap
from tests.helpers import fill_randomly, relative_error

pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models.transformers import transformer_sana_wm

from frame_gdn.hosts import sana_wm as sana_wm_host
from frame_gdn.rollout_state import RolloutState
from tests.hosts import sana_wm, warm_start
from tests.hosts.test_convergence import float64_throughout

HOSTS = ("sana_wm", "sana_video", "wan")
FRAMES, TOKENS = 10, 4 * 3
GRID = {"chunk_frames": 3, "first_chunk_frames": 4}
BORDERS = (0, 4, 7, 10)
DIMS = {"hidden_states": 2, "timestep": 2, "camera_conditions": 1, "chunk_plucker": 2, "frame_valid_mask": 1}


def rolling_model(host: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Both kinds of blocks, all weights random."""
    if host == "sana_wm":
        return swap(sana_wm.tiny_model(dtype, num_layers=2, softmax_every_n=2), **GRID, **options)
    model = warm_start.tiny_model(host, dtype, num_layers=2)
    blocks = [0] if host == "wan" else None
    return fill_randomly(swap(model, blocks=blocks, **GRID, **options), 1).to(dtype)


def clip_inputs(host: str, dtype: torch.dtype = torch.float32, frames: int = FRAMES, batch: int = 2) -> dict[str, Any]:
    if host != "sana_wm":
        return warm_start.tiny_inputs(frames, dtype, batch)
    inputs = sana_wm.tiny_inputs(frames, batch)
    return inputs if dtype == torch.float32 else sana_wm.with_rays(inputs, dtype)


def cut(host: str, inputs: dict[str, Any], first: int, last: int) -> dict[str, Any]:
    """The inputs of some of the frames; a time a frame in SANA-WM alone."""
    of_frames = {name: dim for name, dim in DIMS.items() if host == "sana_wm" or name != "timestep"}
    some = {k: t.narrow(of_frames[k], first, last - first) if k in of_frames else t for k, t in inputs.items()}
    if "cam_pos_embeds" in inputs:
        some["cam_pos_embeds"] = {
            name: t[:, :, first:last] if name == "absmap" else t[:, first * TOKENS : last * TOKENS]
            for name, t in inputs["cam_pos_embeds"].items()
        }
    return some


@torch.no_grad()
def rolled(host: str, model: Any, inputs: dict[str, Any], borders: tuple[int, ...] = BORDERS) -> tuple[Tensor, Any]:
    """The samples of calls that continue one another, and the last state."""
    samples, state = [], None
    for first, last in zip(borders, borders[1:], strict=False):
        out = model(**cut(host, inputs, first, last), state=state, output_state=True)
        samples.append(out.sample)
        state = out.state
    return torch.cat(samples, 2), state


@pytest.fixture(autouse=True)
def no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sana_wm_host, "HALF", torch.float32)


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def precision(request: pytest.FixtureRequest) -> Iterator[tuple[torch.dtype, float]]:
    if request.param == torch.float32:
        yield torch.float32, 1e-5
    else:
        with float64_throughout():
            yield torch.float64, 1e-10


@pytest.mark.parametrize("host", HOSTS)
def test_chunk_by_chunk_equals_one_chunk_causal_pass(host: str, precision: tuple[torch.dtype, float]) -> None:
    dtype, bound = precision
    model, inputs = rolling_model(host, dtype), clip_inputs(host, dtype)
    with torch.no_grad():
        whole = model(**inputs, output_state=True)
    sample, state = rolled(host, model, inputs)
    assert relative_error(sample, whole.sample) <= bound
    for found in (state, whole.state):
        assert (found.frames, found.chunks, found.kept) == (10, 3, (4, 3, 3))
    for ours, expected in zip(state.blocks, whole.state.blocks, strict=True):
        assert ours.keys() == expected.keys() and ours
        for name, tensor in expected.items():
            assert tensor.abs().max() > 0 and relative_error(ours[name], tensor) <= bound, name
    alone = model(**cut(host, inputs, 7, 10)).sample
    assert relative_error(alone, whole.sample[:, :, 7:]) > 1e-3, "the past changes nothing and the test says nothing"


@pytest.mark.parametrize("host", HOSTS)
def test_several_chunks_in_one_call_and_padding_at_its_end(host: str) -> None:
    model, inputs = rolling_model(host), clip_inputs(host)
    expected, state = rolled(host, model, inputs)
    assert relative_error(rolled(host, model, inputs, (0, 7, 10))[0], expected) <= 1e-5
    assert relative_error(rolled(host, model, inputs, (0, 4, 10))[0], expected) <= 1e-5
    if host != "sana_wm":
        return
    padded = {**inputs, "frame_valid_mask": torch.arange(FRAMES).expand(2, FRAMES) < 7}
    with torch.no_grad():
        after_seven = model(**padded, output_state=True).state
        assert after_seven.frames == 7 and after_seven.kept == (4, 3)
        last = model(**cut(host, inputs, 7, 10), state=after_seven).sample
        assert relative_error(last, expected[:, :, 7:]) <= 1e-5
        ragged = {**inputs, "frame_valid_mask": torch.arange(FRAMES) < torch.tensor([[7], [4]])}
        with pytest.raises(ValueError, match="the same first frames of every sample"):
            model(**ragged, output_state=True)


@pytest.mark.parametrize("host", HOSTS)
def test_forward_leaves_the_state_as_it_is_and_tails_are_copies(host: str, tmp_path: Path) -> None:
    model, inputs = rolling_model(host), clip_inputs(host)
    _, state = rolled(host, model, inputs, (0, 4))
    before = state.clone()
    rest = cut(host, inputs, 4, 7)
    with torch.no_grad():
        first, second = model(**rest, state=state).sample, model(**rest, state=state, output_state=True).sample
    assert torch.equal(first, second)
    for ours, expected in zip(state.blocks, before.blocks, strict=True):
        for name, tensor in expected.items():
            assert torch.equal(ours[name], tensor)
            assert ours[name].untyped_storage().nbytes() == tensor.untyped_storage().nbytes(), name
    assert state.nbytes == sum(t.untyped_storage().nbytes() for block in state.blocks for t in block.values())
    state.save(tmp_path / "state.safetensors")
    loaded = RolloutState.load(tmp_path / "state.safetensors", model)
    with torch.no_grad():
        assert torch.equal(model(**rest, state=loaded).sample, first)
    assert type(model(**rest, return_dict=False)) is tuple and len(model(**rest, return_dict=False)) == 1
    sample, new = model(**rest, return_dict=False, state=state, output_state=True)
    assert torch.equal(sample, first) and new.frames == 7


@pytest.mark.parametrize("host", HOSTS)
def test_a_state_is_differentiated_through(host: str) -> None:
    model, inputs = rolling_model(host).train(), clip_inputs(host, frames=7)
    model(**inputs).sample[:, :, 4:].square().sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.enable_gradient_checkpointing()
    state = model(**cut(host, inputs, 0, 4), output_state=True).state
    model(**cut(host, inputs, 4, 7), state=state).sample.square().sum().backward()
    for name, gradient in expected.items():
        assert relative_error(model.get_parameter(name).grad, gradient) <= 1e-3, name


@pytest.mark.parametrize("host", HOSTS)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_computed(host: str, tmp_path: Path) -> None:
    model, inputs = rolling_model(host), clip_inputs(host)
    _, state = rolled(host, model, inputs, (0, 4))
    rest = cut(host, inputs, 4, 7)
    model.blocks[0].register_forward_pre_hook(lambda *_: pytest.fail("computed")) if host != "sana_video" else None

    def refused(match: str, call: dict[str, Any] = rest, of: Any = model, **options: Any) -> None:
        with pytest.raises(ValueError, match=match):
            of(**call, **options)

    refused("RolloutState", state={"frames": 4})
    refused("batch|must be a tensor", cut(host, clip_inputs(host, batch=1), 4, 7), state=state)
    narrow = {k: t[..., : t.shape[-1] - 2] if k in ("hidden_states", "chunk_plucker") else t for k, t in rest.items()}
    refused("must be a tensor", narrow, state=state)
    refused("must be a tensor", state=state.to("meta"))
    refused("dtype", {k: t.double() if t.is_floating_point() else t for k, t in rest.items()},
            rolling_model(host, torch.float64), state=state)  # fmt: skip
    refused("chunk_frames", of=rolling_model(host), state=replace(state, facts={**state.facts, "chunk_frames": 2}))
    refused("inside the chunk", state=replace(state, frames=5))
    refused("window", state=replace(state, chunks=2))
    refused("blocks", state=replace(state, blocks=state.blocks[:1]))
    refused(
        "keys", state=replace(state, blocks=[{**block, "other": block["attn.S"]} for block in state.blocks[:1]] * 2)
    )
    refused("output_state", output_state=1)
    merging = rolling_model(host, merge_tail=True)
    _, merged = rolled(host, merging, inputs, (0, 7))
    refused("merge_tail", cut(host, inputs, 7, 9), merging, state=merged)
    path = tmp_path / "state.safetensors"
    state.save(path)
    with pytest.raises(ValueError, match="chunk_frames"):
        RolloutState.load(path, swap(rolling_model(host), chunk_frames=2))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="cannot be read"):
        RolloutState.load(path, model)


def test_a_state_with_a_camera_is_not_continued_without() -> None:
    model, inputs = rolling_model("sana_wm"), clip_inputs("sana_wm")
    _, state = rolled("sana_wm", model, inputs, (0, 4))
    rest = cut("sana_wm", inputs, 4, 7)
    with pytest.raises(ValueError, match="camera"):
        model(**{k: t for k, t in rest.items() if k not in ("camera_conditions", "chunk_plucker")}, state=state)


def test_blocks_that_are_not_swapped_have_no_state() -> None:
    model = swap(sana_wm.tiny_model(num_layers=2), blocks=[0])
    with pytest.raises(ValueError, match="all blocks swapped"):
        model(**clip_inputs("sana_wm"), output_state=True)
    model = swap(warm_start.tiny_model("sana_video"), blocks=[0])
    with pytest.raises(ValueError, match="all blocks swapped"):
        model(**clip_inputs("sana_video"), output_state=True)


@pytest.mark.long
def test_compiled_blocks_roll_out_with_a_graph_for_the_first_chunk_and_one_for_the_others() -> None:
    model, inputs = rolling_model("sana_video"), clip_inputs("sana_video", frames=13)
    expected, _ = rolled("sana_video", model, inputs, (*BORDERS, 13))
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    assert torch.equal(rolled("sana_video", model, inputs, (*BORDERS, 13))[0], expected)
    assert counter.frame_count == 2


# --- a window -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["sana_wm", "wan"])
@pytest.mark.parametrize("sink", [True, False])
def test_a_windowed_model_rolls_as_one_pass_masked_by_the_window(host: str, sink: bool, tmp_path: Path) -> None:
    model, inputs = rolling_model(host), clip_inputs(host, frames=13)
    with torch.no_grad():
        unbounded = model(**inputs).sample
        swap(model, softmax_window=2, softmax_sink=sink)
        whole = model(**inputs).sample
    assert relative_error(whole[:, :, :10], unbounded[:, :, :10]) <= 1e-6 < relative_error(whole, unbounded)
    sample, state = rolled(host, model, inputs, (*BORDERS, 13))
    assert relative_error(sample, whole) <= 1e-5
    assert state.kept == ((4, 3) if sink else (3, 3)) and (state.frames, state.chunks) == (13, 4)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.softmax_window == 2 and loaded.config.softmax_sink == sink
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, whole)


@pytest.mark.parametrize(
    "wrong",
    [
        {"softmax_window": 0},
        {"softmax_sink": 1},
        {"softmax_window": 2, "chunk_frames": None, "first_chunk_frames": None},
    ],
    ids=str,
)
def test_windows_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        swap(rolling_model("sana_wm"), **wrong)
    with pytest.raises(ValueError, match="softmax_window"):
        swap(rolling_model("sana_video"), softmax_window=2)


# --- what NVlabs' streaming code reads otherwise ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "bound"),
    [("camera_conv_past", False, 1e-3), ("camera_rescale", False, 1e-3), ("softmax_scale", 0.5, 1e-3)],
)
def test_every_reading_of_sana_wm_changes_the_output_is_kept_and_rolls(
    option: str, value: Any, bound: float, tmp_path: Path
) -> None:
    model, inputs = rolling_model("sana_wm"), clip_inputs("sana_wm")
    with torch.no_grad():
        plain = model(**inputs).sample
        swap(model, **{option: value})
        whole = model(**inputs).sample
    assert model.config[option] == value and relative_error(whole, plain) > bound
    assert relative_error(rolled("sana_wm", model, inputs)[0], whole) <= 1e-5
    model.save_pretrained(tmp_path)
    loaded = sana_wm_host.SanaWMTransformer3DModel.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).sample, whole)
    for host in ("sana_video", "wan"):
        with pytest.raises(ValueError, match=option):
            swap(warm_start.tiny_model(host), **{option: value})


def test_a_camera_that_is_not_rescaled_is_diffusers_without_its_rescaling(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = sana_wm.tiny_model(num_layers=1), clip_inputs("sana_wm", frames=2, batch=1)
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(transformer_sana_wm, "_downscale_to_reference_rms", lambda reference, x, eps=1e-6: x)
        expected = model(**inputs).sample
    swap(model, camera_rescale=False)
    for backend in ("torch", "triton"):
        with torch.no_grad():
            assert relative_error(swap(model, backend=backend)(**inputs).sample, expected) <= 1e-5


def test_a_camera_convolution_without_a_past_sees_zeros_where_the_tail_would_be() -> None:
    model, inputs = rolling_model("sana_wm"), clip_inputs("sana_wm", frames=7)
    _, state = rolled("sana_wm", model, inputs, (0, 4))
    blocks = [{k: torch.zeros_like(t) if k == "cam.conv_tail" else t for k, t in b.items()} for b in state.blocks]
    with torch.no_grad():
        expected = model(**cut("sana_wm", inputs, 4, 7), state=replace(state, blocks=blocks)).sample
        whole = swap(model, camera_conv_past=False)(**inputs).sample
    assert relative_error(whole[:, :, 4:], expected) <= 1e-5


def test_a_softmax_scale_is_that_of_both_branches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sana_wm_host, "HALF", torch.bfloat16)  # as diffusers rounds
    model, inputs = sana_wm.tiny_model(num_layers=2, softmax_every_n=2), clip_inputs("sana_wm")
    attention = torch.nn.functional.scaled_dot_product_attention

    def scaled(*args: Any, **options: Any) -> Tensor:
        own = args and args[0].shape[-2] == args[1].shape[-2] == FRAMES * TOKENS  # cross-attention names its arguments
        return attention(*args, **{**options, **({"scale": 0.5} if own else {})})

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", scaled)
        expected = model(**inputs).sample
    with torch.no_grad():
        assert relative_error(swap(model, softmax_scale=0.5)(**inputs).sample, expected) <= 1e-5


def test_readings_default_to_those_of_diffusers_and_are_not_written_to_disk(tmp_path: Path) -> None:
    model = rolling_model("sana_wm")
    assert model.config.camera_conv_past and model.config.camera_rescale and model.config.softmax_scale is None
    model.save_pretrained(tmp_path)
    assert "camera_" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("wrong", [{"camera_rescale": 1}, {"camera_conv_past": None}, {"softmax_scale": 0}], ids=str)
def test_readings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        swap(sana_wm.tiny_model(num_layers=1), **wrong)
