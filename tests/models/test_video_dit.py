import copy
import pickle

import pytest
import torch

from frame_gdn import RolloutState
from frame_gdn.chunks import ChunkGrid
from models import VideoDiT
from models.video_dit import rotary_table, timestep_features
from tests.models.helpers import (
    assert_same_gradients,
    frames_of,
    gradients,
    tiny_inputs,
    tiny_model,
    weighted_sum,
)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize("patch_size, num_frames", [(1, 3), (2, 1), (2, 4)])
def test_output_has_the_shape_of_the_input_with_out_channels(patch_size, num_frames):
    model = tiny_model(torch.float32, patch_size=patch_size)
    sample = model(**tiny_inputs(num_frames, torch.float32)).sample
    assert sample.shape == (2, 5, num_frames, 4, 6)


def test_every_nth_block_is_softmax_and_none_where_n_is_zero():
    kinds = [type(block.attn).__name__ for block in tiny_model(num_layers=5).blocks]
    assert kinds == ["BidirectionalGDN", "SoftmaxAttention"] * 2 + ["BidirectionalGDN"]
    assert not any("softmax" in type(block.attn).__name__.lower() for block in tiny_model(softmax_every_n=0).blocks)


def test_no_module_is_named_as_accelerate_hooks_are():
    assert not any(name.endswith("self_attn") for name, _ in tiny_model().named_modules())


def test_a_patch_comes_back_to_its_own_place():
    model = tiny_model(num_layers=0, out_channels=3, cross_attention_dim=None)
    inputs = {name: tensor for name, tensor in tiny_inputs(2).items() if not name.startswith("encoder")}
    before = model(**inputs).sample
    inputs["hidden_states"][0, :, 1, 2:4, 4:6] += 1
    changed = (model(**inputs).sample - before).abs() > 0
    assert changed[0, :, 1, 2:4, 4:6].all()
    assert changed.sum() == 3 * 4


def test_one_timestep_a_sample_is_that_timestep_at_every_frame():
    model, inputs = tiny_model(), tiny_inputs(3)
    inputs["timestep"] = inputs["timestep"][:, 0]
    expected = model(**{**inputs, "timestep": inputs["timestep"][:, None].expand(2, 3)}).sample
    assert torch.equal(model(**inputs).sample, expected)


def test_timestep_features_are_those_of_diffusers():
    from diffusers.models.embeddings import Timesteps

    timestep = torch.tensor([0.0, 1.0, 500.5, 1000.0])
    expected = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)(timestep)
    torch.testing.assert_close(timestep_features(timestep, 256, torch.float32), expected, rtol=0, atol=1e-4)


def test_rotary_table_is_that_of_diffusers_sana_wm():
    sana_wm = pytest.importorskip("diffusers.models.transformers.transformer_sana_wm")

    table = sana_wm.SanaWMRotaryPosEmbed(attention_head_dim=112, patch_size=(1, 1, 1), max_seq_len=64)((7, 3, 5))
    table = table.reshape(7 * 3 * 5, 56)[2 * 15 :]
    cos, sin = rotary_table(112, 2, 5, 3, 5, like=torch.empty(0, dtype=torch.float64))
    torch.testing.assert_close(cos, table.real.double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin, table.imag.double(), rtol=0, atol=1e-6)


def test_text_padding_is_not_seen():
    model, inputs = tiny_model(), tiny_inputs(2)
    before = model(**inputs).sample
    inputs["encoder_hidden_states"][:, 3] += 1
    assert torch.equal(model(**inputs).sample, before)
    inputs["encoder_hidden_states"][:, 2] += 1
    assert not torch.equal(model(**inputs).sample, before)


@pytest.mark.parametrize("chunk_frames", [None, 2])
def test_every_parameter_has_a_gradient_and_checkpointing_leaves_it_as_it_is(chunk_frames):
    model, inputs = tiny_model(chunk_frames=chunk_frames), tiny_inputs(4)
    plain = model(**inputs).sample
    weighted_sum(plain).backward()
    expected = gradients(model)
    model.zero_grad()
    model.enable_gradient_checkpointing()
    model.train()
    checkpointed = model(**inputs).sample
    assert torch.equal(checkpointed, plain)
    weighted_sum(checkpointed).backward()
    assert_same_gradients(gradients(model), expected, tolerance=0)


def test_save_and_load_give_the_same_model(tmp_path):
    model, inputs = tiny_model(torch.float32, chunk_frames=2), tiny_inputs(4, torch.float32)
    model.save_pretrained(tmp_path)
    loaded = VideoDiT.from_pretrained(tmp_path)
    assert loaded.config.chunk_frames == 2
    assert torch.equal(loaded(**inputs).sample, model(**inputs).sample)


def test_decay_parameters_stay_float32_in_a_bfloat16_model(tmp_path):
    tiny_model(torch.float32).save_pretrained(tmp_path)
    model = VideoDiT.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        f"blocks.{index}.attn.{name}" for index in (0, 2) for name in ("A_log", "dt_bias")
    }
    sample = model(**tiny_inputs(3, torch.bfloat16)).sample
    assert sample.dtype == torch.bfloat16
    assert sample.isfinite().all()


@pytest.mark.filterwarnings("error")
def test_autocast_and_bfloat16_weights_are_near_float32():
    model, inputs = tiny_model(torch.float32), tiny_inputs(3, torch.float32)
    expected = model(**inputs).sample
    with torch.autocast("cpu", torch.bfloat16):
        assert relative(model(**inputs).sample, expected) < 0.05
    halved = {name: t.bfloat16() if t.is_floating_point() else t for name, t in inputs.items()}
    halved["timestep"] = inputs["timestep"]  # three digits do not hold a timestep
    assert relative(model.bfloat16()(**halved).sample.float(), expected) < 0.05


def test_pickle_and_deepcopy_work():
    model, inputs = tiny_model(), tiny_inputs(2)
    expected = model(**inputs).sample
    assert torch.equal(copy.deepcopy(model)(**inputs).sample, expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**inputs).sample, expected)


@pytest.mark.parametrize(
    ("num_frames", "grid"),
    [(6, ChunkGrid(2)), (7, ChunkGrid(3)), (4, ChunkGrid(1)), (6, ChunkGrid(2, 3)), (6, ChunkGrid(2, 1, True))],
    ids=str,
)
def test_chunk_causal_sees_its_own_chunk_and_the_past_and_nothing_after(num_frames, grid):
    model, inputs = tiny_model(**grid.facts), tiny_inputs(num_frames)
    for frame in range(num_frames):
        x = inputs["hidden_states"].clone().requires_grad_()
        sample = model(**{**inputs, "hidden_states": x}).sample
        (grad,) = torch.autograd.grad(weighted_sum(sample[:, :, frame : frame + 1]), x)
        horizon = grid.end(frame, num_frames)
        reached = grad.abs().amax(dim=(0, 1, 3, 4)) > 0
        assert reached.tolist() == [t < horizon for t in range(num_frames)]


def test_without_chunks_every_frame_sees_every_frame():
    model, inputs = tiny_model(), tiny_inputs(4)
    x = inputs["hidden_states"].requires_grad_()
    (grad,) = torch.autograd.grad(weighted_sum(model(**inputs).sample[:, :, :1]), x)
    assert (grad.abs().amax(dim=(0, 1, 3, 4)) > 0).all()


def test_a_call_may_set_its_own_chunks():
    inputs, grid = tiny_inputs(6), ChunkGrid(2, 3, True)
    assert torch.equal(tiny_model()(**inputs, **grid.facts).sample, tiny_model(**grid.facts)(**inputs).sample)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize(
    ("grid", "cuts"),
    [
        (ChunkGrid(2), [2, 2, 2]), (ChunkGrid(2), [4, 2]), (ChunkGrid(2), [2, 4, 1]), (ChunkGrid(2, 3), [3, 2, 2]),
        (ChunkGrid(3, 4), [4, 3, 1]), (ChunkGrid(3, 1), [1, 6]), (ChunkGrid(2, 3, True), [3, 3]),
    ],
    ids=str,
)  # fmt: skip
def test_chunk_by_chunk_from_a_state_equals_one_pass(grid, cuts, dtype, tolerance):
    model, inputs = tiny_model(dtype, **grid.facts), tiny_inputs(sum(cuts), dtype)
    expected = model(**inputs).sample
    state, first, parts = None, 0, []
    for length in cuts:
        output = model(**frames_of(inputs, slice(first, first + length)), state=state, output_state=True)
        state, first = output.state, first + length
        parts.append(output.sample)
    assert state.frames == sum(cuts)
    assert relative(torch.cat(parts, dim=2), expected) <= tolerance


def test_a_call_that_continues_begins_with_a_chunk_and_brings_no_short_tail_to_be_joined():
    model, inputs = tiny_model(chunk_frames=2, first_chunk_frames=3, merge_tail=True), tiny_inputs(6)
    state = model(**frames_of(inputs, slice(0, 5)), output_state=True).state
    with pytest.raises(ValueError, match="chunk_frames 2 frames or more, got 1"):
        model(**frames_of(inputs, slice(5, 6)), state=state)
    joined = model(**inputs, output_state=True).state  # chunks of 3 and 3
    with pytest.raises(ValueError, match="after 6 frames, inside the chunk of frames 5 to 6"):
        model(**frames_of(inputs, slice(0, 2)), state=joined)


def test_gradients_flow_through_the_state():
    model, inputs = tiny_model(chunk_frames=2), tiny_inputs(4)
    weighted_sum(model(**inputs).sample).backward()
    expected = gradients(model)
    model.zero_grad()
    first = model(**frames_of(inputs, slice(0, 2)), output_state=True)
    second = model(**frames_of(inputs, slice(2, 4)), state=first.state)
    (weighted_sum(first.sample) + weighted_sum(second.sample, first_frame=2)).backward()
    assert_same_gradients(gradients(model), expected, tolerance=1e-10)


def test_a_state_can_be_saved_moved_cloned_and_detached(tmp_path):
    model, inputs = tiny_model(chunk_frames=2), tiny_inputs(4)
    state = model(**frames_of(inputs, slice(0, 2)), output_state=True).state
    state.save(tmp_path / "state")
    restored = RolloutState.load(tmp_path / "state", model)
    rest = frames_of(inputs, slice(2, 4))
    expected = model(**rest, state=state).sample
    for other in (restored, state.clone(), state.detach(), state.to("cpu")):
        assert other.frames == 2
        assert torch.equal(model(**rest, state=other).sample, expected)
    assert not any(tensor.requires_grad for tensor in state.detach().state_dict().values())


@pytest.mark.parametrize("chunk_frames", [None, 2])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_in_a_padded_frame_reaches_nothing(poison, chunk_frames):
    model, inputs = tiny_model(chunk_frames=chunk_frames), tiny_inputs(6)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 4:], mask[1, 2] = False, False
    inputs["frame_mask"] = mask
    x = inputs["hidden_states"]
    expected = model(**inputs).sample.transpose(1, 2)[mask]
    poisoned = x.masked_fill(~mask[:, None, :, None, None], poison).requires_grad_()
    inputs["timestep"] = inputs["timestep"].masked_fill(~mask, poison)
    active = model(**{**inputs, "hidden_states": poisoned}).sample.transpose(1, 2)[mask]
    assert torch.equal(active, expected)
    active.square().sum().backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())
    assert poisoned.grad.isfinite().all()
    assert (poisoned.grad.transpose(1, 2)[~mask] == 0).all()


@pytest.mark.parametrize("chunk_frames", [None, 2])
def test_padding_at_the_end_is_as_if_it_were_not_there(chunk_frames):
    model, inputs = tiny_model(chunk_frames=chunk_frames), tiny_inputs(6)
    padded = {**inputs, "frame_mask": (torch.arange(6) < 4).expand(2, 6)}
    expected, actual = model(**frames_of(inputs, slice(0, 4)), output_state=True), model(**padded, output_state=True)
    assert relative(actual.sample[:, :, :4], expected.sample) <= 1e-12
    assert actual.state.frames == 4
    for name, tensor in expected.state.state_dict().items():
        torch.testing.assert_close(actual.state.state_dict()[name], tensor, rtol=1e-12, atol=1e-12)


def test_a_sample_that_is_all_padding_is_finite_everywhere():
    model, inputs = tiny_model(), tiny_inputs(3)
    inputs["frame_mask"] = torch.tensor([[True] * 3, [False] * 3])
    model(**inputs).sample.square().sum().backward()
    assert all(grad.isfinite().all() for grad in gradients(model).values())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_states": torch.zeros(2, 4, 3, 4, 6)}, r"hidden_states must be .* \(B, 3, T, h, w\)"),
        ({"hidden_states": torch.zeros(2, 3, 3, 4, 5)}, "multiples of patch_size 2, got 4x5"),
        ({"timestep": torch.zeros(2, 4)}, r"timestep must be .* got a tensor \(2, 4\)"),
        ({"timestep": torch.zeros(())}, r"timestep must be .* got a tensor \(\)"),
        ({"frame_mask": torch.ones(2, 3)}, "frame_mask must be .* of bool"),
        ({"frame_mask": torch.ones(2, 4, dtype=torch.bool)}, r"got a tensor \(2, 4\) of bool"),
        ({"encoder_hidden_states": None}, "encoder_hidden_states is None"),
        ({"chunk_frames": 0}, "chunk_frames"),
        ({"state": RolloutState([], 0, 0)}, "state is of a model with class None, this one has 'VideoDiT'"),
        ({"frames_per_rank": [2]}, "frames_per_rank"),
        ({"frame_mask": torch.tensor([[True, False, True]] * 2), "output_state": True}, "a state was asked for"),
        (
            {"frame_mask": torch.tensor([[True] * 3, [True, True, False]]), "output_state": True},
            "a state was asked for",
        ),
    ],
)
def test_bad_input_is_a_value_error_that_names_it(change, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(torch.float32)(**{**tiny_inputs(3, torch.float32), **change})
