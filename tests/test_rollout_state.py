"""A state of a rollout: saved, loaded, branched, stacked, and refused where it does not fit."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame_gdn import RolloutState
from frame_gdn.chunks import ChunkGrid, KeyFrames, SoftmaxWindow
from models import VideoDiT

from .helpers import relative_error
from .models.helpers import frames_of, tiny_inputs, tiny_model

STREAMING = {"chunk_frames": 2, "first_chunk_frames": 3, "softmax_window": 2, "softmax_sink": True}
CUTS = [slice(0, 3), slice(3, 5), slice(5, 7), slice(7, 9), slice(9, 11)]


def model_and_inputs(frames=11, **config):
    return tiny_model(**{**STREAMING, **config}), tiny_inputs(frames)


@torch.no_grad()
def by_chunks(model, inputs, state=None, cuts=CUTS):
    """By chunk, the sample and the state after it."""
    outputs = []
    for cut in cuts:
        output = model(**frames_of(inputs, cut), state=state, output_state=True)
        outputs.append((output.sample, output.state))
        state = output.state
    return outputs


# --- the window -----------------------------------------------------------------------------------------------------

WINDOWS = [SoftmaxWindow(), *(SoftmaxWindow(n, sink) for n in (1, 2, 3) for sink in (False, True))]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("grid", [ChunkGrid(2), ChunkGrid(2, 3), ChunkGrid(3, 1)], ids=str)
def test_a_chunk_sees_itself_the_sink_and_the_last_chunks_of_the_window(grid, window):
    def seen_by(frame, total):
        own, n = grid.index(frame), window.chunks
        if n is None or own < n:
            kept = set(range(own))
        elif window.sink:
            kept = {0} | {own - back for back in range(1, n)}
        else:
            kept = {own - back for back in range(1, n + 1)}
        return [t for t in range(total) if grid.index(t) in kept | {own}]

    total = grid.bounds(6)[1]
    for first_chunk in range(5):  # what is before it is in a state, by the same rule
        start = grid.bounds(first_chunk)[0]
        before = KeyFrames(grid, window, start)
        chunks, kept, runs = before.after(start)
        assert chunks == first_chunk
        axis = [t for begin, end in runs for t in range(begin, end)]  # the frames that the state keeps
        keys = KeyFrames(grid.after("state", start), window, total - start, chunks, kept)
        assert keys.past == len(axis)
        axis += range(start, total)
        for shard in (slice(0, total - start), slice(1, 4)):
            found = {}
            for first, last, visible in keys.seen(shard.start, shard.stop):
                for t in range(first, last):
                    found[start + shard.start + t] = [axis[i] for begin, end in visible for i in range(begin, end)]
            assert found == {t: seen_by(t, total) for t in range(start + shard.start, start + shard.stop)}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_chunk_by_chunk_equals_one_pass_that_masks_by_the_window(window, dtype, tolerance):
    model = tiny_model(dtype, **{**STREAMING, **window.facts})
    inputs = tiny_inputs(11, dtype)
    with torch.no_grad():
        whole = model(**inputs, output_state=True)
    outputs = by_chunks(model, inputs)
    assert relative_error(torch.cat([sample for sample, _ in outputs], 2), whole.sample) <= tolerance
    last = outputs[-1][1]
    assert (last.frames, last.chunks, last.kept) == (whole.state.frames, whole.state.chunks, whole.state.kept)
    for name, tensor in whole.state.state_dict().items():
        assert relative_error(last.state_dict()[name], tensor) <= tolerance, name
    if window == SoftmaxWindow(2, True):
        assert [state.kept for _, state in outputs] == [(3,), (3, 2), (3, 2), (3, 2), (3, 2)]
        assert len({state.nbytes for _, state in outputs[1:]}) == 1


def test_a_windowed_softmax_block_sees_the_frames_of_its_window_and_no_others():
    model, inputs = model_and_inputs(num_layers=1, softmax_every_n=1)
    with torch.no_grad():
        model.blocks[0].ff.temporal.taps.weight.zero_()
    x = inputs["hidden_states"].requires_grad_()
    (grad,) = torch.autograd.grad(model(**{**inputs, "hidden_states": x}).sample[:, :, 7:9].square().sum(), x)
    reached = (grad.abs().amax(dim=(0, 1, 3, 4)) > 0).tolist()
    assert reached == [True] * 3 + [False] * 2 + [True] * 4 + [False] * 2


def test_a_window_needs_chunks_and_counts_from_one():
    for options, message in (
        (
            {"chunk_frames": None, "first_chunk_frames": None},
            "softmax_window 2 counts chunks, but chunk_frames is None",
        ),
        ({"softmax_window": 0}, "softmax_window must be None or an int from 1, got 0"),
        ({"softmax_window": -1}, "softmax_window must be None or an int from 1, got -1"),
        ({"softmax_window": 1.5}, "softmax_window must be None or an int from 1, got 1.5"),
        ({"softmax_sink": 1}, "softmax_sink must be True or False, got 1"),
    ):
        with pytest.raises(ValueError, match=message):
            VideoDiT(**{**STREAMING, "num_layers": 1, **options})


# --- saved, loaded, branched ----------------------------------------------------------------------------------------


def test_a_rollout_goes_on_from_a_saved_state_to_the_bit(tmp_path):
    built, inputs = model_and_inputs()
    built.save_pretrained(tmp_path / "model")
    model, other = (VideoDiT.from_pretrained(tmp_path / "model", torch_dtype=torch.float64) for _ in range(2))
    outputs = by_chunks(model, inputs)
    for number, (_, state) in enumerate(outputs[:-1]):
        state.save(tmp_path / "state.safetensors")
        loaded = RolloutState.load(tmp_path / "state.safetensors", other)
        assert (loaded.frames, loaded.chunks, loaded.kept) == (state.frames, state.chunks, state.kept)
        for (found, _), (wanted, _) in zip(
            by_chunks(other, inputs, loaded, CUTS[number + 1 :]), outputs[number + 1 :], strict=True
        ):
            assert torch.equal(found, wanted)
    assert not list(tmp_path.glob("*.part"))


def test_a_branch_costs_its_bytes_and_leaves_the_other_as_it_was():
    model, inputs = model_and_inputs()
    state = by_chunks(model, inputs, cuts=CUTS[:2])[-1][1]
    copy, before = state.clone(), {name: t.clone() for name, t in state.state_dict().items()}
    assert copy.nbytes == state.nbytes == sum(t.nbytes for t in before.values())
    assert not {t.data_ptr() for t in copy.state_dict().values()} & {t.data_ptr() for t in state.state_dict().values()}
    first = model(**frames_of(inputs, CUTS[2]), state=state, output_state=True)
    again = model(**frames_of(inputs, CUTS[2]), state=copy, output_state=True)
    assert torch.equal(first.sample, again.sample)
    assert all(torch.equal(t, before[name]) for name, t in state.state_dict().items())  # forward changed nothing
    for name, t in first.state.state_dict().items():  # nothing of a state is a view of more than itself
        assert t.untyped_storage().nbytes() == t.nbytes, name


def test_states_stack_into_a_batch_and_split_again():
    model, inputs = model_and_inputs()
    state = by_chunks(model, inputs, cuts=CUTS[:2])[-1][1]
    one, two = state.split()
    assert one.batch == two.batch == 1
    stacked = RolloutState.stack([one, two])
    assert all(torch.equal(t, state.state_dict()[name]) for name, t in stacked.state_dict().items())
    assert [part.batch for part in stacked.split([2])] == [2]
    earlier = by_chunks(model, inputs, cuts=CUTS[:1])[-1][1]
    for states, message in (([], "one or more"), ([one, earlier], r"states\[1\] stands after 3 frames, wanted 5")):
        with pytest.raises(ValueError, match=message):
            RolloutState.stack(states)
    with pytest.raises(ValueError, match="batches must add up to the state's 2 clips"):
        state.split([1])


# --- what does not fit ----------------------------------------------------------------------------------------------


def damaged(path, **about):
    """The same tensors with other facts about them."""
    from safetensors import safe_open

    with safe_open(str(path), "pt") as file:
        save_file(load_file(path), path, {**file.metadata(), **about})


def test_a_file_that_is_no_state_of_this_model_is_refused(tmp_path):
    model, inputs = model_and_inputs()
    path = tmp_path / "state.safetensors"
    state = by_chunks(model, inputs, cuts=CUTS[:2])[-1][1]

    def refused(message, model=model):
        with pytest.raises(ValueError, match=message):
            RolloutState.load(path, model)

    refused("cannot be read as a state")  # there is none
    state.save(path)
    whole = path.read_bytes()
    for size in (0, 4, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused("cannot be read as a state")
    path.write_bytes(whole)
    damaged(path, version="7")
    refused("of version 1, got frame_gdn.RolloutState of version 7")
    save_file({"x": torch.zeros(1)}, path)
    refused("must be a frame_gdn.RolloutState of version 1, got another file")
    path.write_bytes(whole)
    for config, message in (
        ({"num_layers": 2}, "a model with num_layers 3, this one has 2"),
        ({"chunk_frames": 1}, "a model with chunk_frames 2, this one has 1"),
        ({"softmax_window": 3}, "a model with softmax_window 2, this one has 3"),
        ({"softmax_sink": False}, "a model with softmax_sink True, this one has False"),
    ):
        refused(message, tiny_model(**{**STREAMING, **config}))
    refused("a model with dtype 'float64', this one has 'float32'", tiny_model(torch.float32, **STREAMING))
    refused("model must be one that a state can be of", torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="path must be a path, got 3"):
        RolloutState.load(3, model)
    with pytest.raises(ValueError, match="the state cannot be written to"):
        state.save(tmp_path / "no folder" / "state")


def test_a_state_that_does_not_fit_a_call_is_refused_before_anything_is_computed():
    model, inputs = model_and_inputs()
    state = by_chunks(model, inputs, cuts=CUTS[:2])[-1][1]
    rest = frames_of(inputs, CUTS[2])
    half = {name: t[:1] for name, t in rest.items()}
    narrow = {**rest, "hidden_states": rest["hidden_states"][..., :4]}
    blocks = [dict(block) for block in state.blocks]
    del blocks[0]["attn.S"]
    model.blocks.register_forward_pre_hook(lambda *_: pytest.fail("a block was called"))
    for arguments, message in (
        ({"state": "x"}, "state must be None or a RolloutState, got 'x'"),
        ({"state": state.to("meta")}, "on cpu to go with hidden_states"),
        ({**half, "state": state}, r"state.blocks\[0\]\['attn.S'\] must be a tensor \(1, 2, 14, 14\)"),
        ({**narrow, "state": state}, r"state is of latents \(4, 6\), hidden_states are \(2, 3, 2, 4, 4\)"),
        ({"state": state, "chunk_frames": 1}, "a model with chunk_frames 2, this one has 1"),
        ({"state": replace(state, frames=6)}, "inside the chunk of frames 5 to 6"),
        ({"state": replace(state, blocks=state.blocks[:2])}, "is of 2 blocks, the model has 3"),
        ({"state": replace(state, blocks=blocks)}, r"state.blocks\[0\] must be a mapping with the keys"),
        ({"state": replace(state, chunks=1)}, "keeps 2 chunks after 1, the model's window 1"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**{**rest, **arguments})
