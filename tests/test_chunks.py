"""The grid of chunks: its borders, what they cut, and what a call that continues makes of them."""

import pytest
import torch

from frame_gdn import BidirectionalGDN, GDNState, bidirectional_gdn
from frame_gdn.chunks import ChunkGrid
from frame_gdn.kernels.naive import naive_bidirectional_gdn

from .helpers import fill_randomly, relative_error

#: A grid, a number of frames, and where its chunks begin and end, written out.
BORDERS = [
    (ChunkGrid(3, 4), 10, [0, 4, 7, 10]),
    (ChunkGrid(3, 4), 12, [0, 4, 7, 10, 12]),
    (ChunkGrid(3, 4, True), 12, [0, 4, 7, 12]),
    (ChunkGrid(3, 4, True), 10, [0, 4, 7, 10]),
    (ChunkGrid(3, 4, True), 5, [0, 5]),
    (ChunkGrid(3, 4), 3, [0, 3]),
    (ChunkGrid(3, 1), 8, [0, 1, 4, 7, 8]),
    (ChunkGrid(3), 8, [0, 3, 6, 8]),
    (ChunkGrid(3, merge_tail=True), 8, [0, 3, 8]),
    (ChunkGrid(1, 3), 5, [0, 3, 4, 5]),
    (ChunkGrid(), 5, [0, 5]),
]


@pytest.mark.parametrize(("grid", "total", "borders"), BORDERS, ids=str)
def test_chunks_begin_and_end_where_the_grid_says_whatever_part_of_the_clip_is_asked_for(grid, total, borders):
    chunks = list(zip(borders, borders[1:], strict=False))
    assert list(grid.horizons(0, total, total)) == [(first, stop, stop) for first, stop in chunks]
    for start in range(total):
        ends = grid.ends(start, total)
        expected = [frame + 1 in borders[:-1] for frame in range(start, total)]
        frames = total - start
        own = [False] * frames if ends is None else [*ends.flags(frames - 1), False]
        assert own == expected
        if ends is not None:
            assert [ends.count(n) for n in range(frames)] == [sum(expected[:n]) for n in range(frames)]
            after = ends.frames_after(frames, torch.device("cpu")).tolist()
            last = next(stop for first, stop in chunks if first <= start < stop)
            assert min(after[0], total - 1 - start) == last - 1 - start
    if not grid.merge_tail:
        assert [frame for frame in range(total) if grid.chunk_frames and grid.begins_at(frame)] == (
            borders[:-1] if grid.chunk_frames else []
        )


def clip(T, S=2, H=2, D=6, B=1):
    torch.manual_seed(T)
    x = {name: torch.randn(B, T * S, H, D, dtype=torch.float64) for name in ("q", "k", "v", "q_rot", "k_rot")}
    x = {name: t.abs() if name in "qk" else t for name, t in x.items()}
    x["k"], x["k_rot"] = x["k"] / 4, x["k_rot"] / 4
    return {**x, "beta": torch.rand(B, T * S, H).double(), "decay": torch.rand(B, T, H).double()}


def with_gradients(run, x):
    leaves = {name: t.detach().clone().requires_grad_() for name, t in x.items()}
    out = run(**leaves)[0]
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape)
    (out * weight).sum().backward()
    return {"out": out.detach(), **{name: t.grad for name, t in leaves.items()}}


@pytest.mark.parametrize(("grid", "total", "borders"), BORDERS, ids=str)
def test_values_and_gradients_are_the_loops(grid, total, borders):
    x = clip(total)
    found = with_gradients(lambda **t: bidirectional_gdn(**t, **grid.facts, eps=1e-6), x)
    expected = with_gradients(lambda **t: naive_bidirectional_gdn(**t, **grid.facts, eps=1e-6), x)
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 1e-12, name
    uniform = with_gradients(lambda **t: naive_bidirectional_gdn(**t, chunk_frames=grid.chunk_frames, eps=1e-6), x)
    if grid.facts != ChunkGrid(grid.chunk_frames).facts and len(borders) > 2:
        assert relative_error(found["out"], uniform["out"]) > 1e-3


def parts(x, cuts):
    first = 0
    T = x["decay"].shape[1]
    for frames in cuts:
        yield {n: t[:, first * t.shape[1] // T : (first + frames) * t.shape[1] // T] for n, t in x.items()}
        first += frames


def test_a_call_that_continues_counts_on_from_the_states_frames():
    x, grid = clip(12), ChunkGrid(3, 4)
    whole, end = bidirectional_gdn(**x, **grid.facts, output_final_state=True)
    state, outs = None, []
    for part in parts(x, (7, 5)):
        out, state = bidirectional_gdn(**part, **grid.facts, initial_state=state, output_final_state=True)
        outs.append(out)
    assert relative_error(torch.cat(outs, 1), whole) <= 1e-12 and relative_error(state.S, end.S) <= 1e-12
    fresh = GDNState(state.S.new_zeros(1, 2, 6, 6), state.z.new_zeros(1, 2, 6))  # nothing was before: the first chunk
    assert torch.equal(
        bidirectional_gdn(**x, **grid.facts, initial_state=fresh)[0], bidirectional_gdn(**x, **grid.facts)[0]
    )


@pytest.mark.parametrize("grid", [ChunkGrid(3, 4), ChunkGrid(2, 3, True)], ids=str)
def test_the_layer_chunk_by_chunk_equals_one_pass_of_it(grid):
    layer = fill_randomly(BidirectionalGDN(12, 2).double())
    T, S = grid.bounds(2)[1], 2
    x = torch.randn(1, T * S, 12, dtype=torch.float64)
    whole, _ = layer(x, T, **grid.facts)
    state, outs = None, []
    for first, last in (grid.bounds(index) for index in range(3)):
        out, state = layer(
            x[:, first * S : last * S], last - first, state=state, output_final_state=True, **grid.facts
        )
        outs.append(out)
    assert relative_error(torch.cat(outs, 1), whole) <= 1e-12


def test_a_short_tail_joins_within_one_call_only():
    x, grid = clip(8), ChunkGrid(3, merge_tail=True)
    whole = bidirectional_gdn(**x, **grid.facts)[0]
    first, rest = parts(x, (3, 5))
    _, state = bidirectional_gdn(**first, **grid.facts, output_final_state=True)
    out, _ = bidirectional_gdn(**rest, **grid.facts, initial_state=state)
    assert relative_error(out, whole[:, 6:]) <= 1e-12
    with pytest.raises(
        ValueError, match="merge_tail joins a short tail .* needs chunk_frames 3 frames or more, got 2"
    ):
        bidirectional_gdn(**next(parts(x, (2,))), **grid.facts, initial_state=state)
    alone = ChunkGrid(3)  # a chunk of its own
    bidirectional_gdn(**next(parts(x, (2,))), **alone.facts, initial_state=state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"first_chunk_frames": 2}, "first_chunk_frames 2 is for a clip in chunks, but chunk_frames is None"),
        ({"merge_tail": True}, "merge_tail is for a clip in chunks, but chunk_frames is None"),
        ({"chunk_frames": 2, "first_chunk_frames": 0}, "first_chunk_frames must be None or an int from 1, got 0"),
        ({"chunk_frames": 2, "first_chunk_frames": 1.5}, "first_chunk_frames must be None or an int from 1, got 1.5"),
        ({"chunk_frames": 2, "merge_tail": 1}, "merge_tail must be True or False, got 1"),
        ({"chunk_frames": [4, 3]}, r"chunk_frames must be None or an int from 1, got \[4, 3\]"),
    ],
    ids=str,
)
def test_a_grid_that_is_none_is_refused_by_name(arguments, message):
    with pytest.raises(ValueError, match=message):
        bidirectional_gdn(**clip(4), **arguments)
    with pytest.raises(ValueError, match=message):
        BidirectionalGDN(12, 2)(torch.randn(1, 8, 12), 4, **arguments)
