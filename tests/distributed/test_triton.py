"""The Triton backend over real ranks: shards, chunks across their borders, masks and states, against the loop."""

import pytest
import torch
import torch.distributed as dist

from frame_gdn import GDNState, bidirectional_gdn, cp_frame_gdn_scan
from frame_gdn.kernels.naive import naive_bidirectional_gdn, naive_frame_scan
from tests.distributed.helpers import run_ranks, split
from tests.helpers import relative_error
from tests.test_gdn import clip

steps = pytest.importorskip("frame_gdn.kernels.triton.steps", exc_type=ImportError)

FLOAT32 = 5e-6


def compare_scans(rank, size, sizes, chunk_frames, rotary, spans=None):
    T, S, eps = sum(sizes), 3, 1e-3
    tensors, mask = clip(T=T, S=S, D=16, masked=True)
    tensors = {name: None if t is None else t.detach() for name, t in tensors.items()}
    if not rotary:
        tensors["q_rot"] = tensors["k_rot"] = None
    frames = split(T, sizes, rank)
    tokens = slice(frames.start * S, frames.stop * S)
    part = {"S0": slice(None), "z0": slice(None), "decay": frames}
    exact = {name: t.double().requires_grad_() for name, t in tensors.items() if t is not None}
    local = {
        name: (t if name in ("S0", "z0") else t[:, part.get(name, tokens)]).detach().float().requires_grad_()
        for name, t in tensors.items()
        if t is not None
    }

    given = dict(exact)
    initial = given.pop("S0"), given.pop("z0")
    expected, (S_ref, _) = naive_bidirectional_gdn(
        **given, mask=mask, initial_state=initial, chunk_frames=chunk_frames, eps=eps
    )
    given = dict(local)
    initial = GDNState(given.pop("S0"), given.pop("z0"))
    out, final = bidirectional_gdn(
        **given, mask=mask[:, frames], initial_state=initial, output_final_state=True, chunk_frames=chunk_frames,
        eps=eps, group=dist.group.WORLD, frames_per_rank=sizes, backend=steps.TritonSteps(spans=spans),
    )  # fmt: skip
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    ((expected * direction).sum() + size * S_ref.sin().sum()).backward()
    ((out.double() * direction[:, tokens]).sum() + final.S.sin().sum()).backward()
    errors = {"out": relative_error(out, expected[:, tokens]), "S": relative_error(final.S, S_ref)}
    for name, x in local.items():
        grad, reference = x.grad, exact[name].grad
        if name in ("S0", "z0"):
            dist.all_reduce(grad)
        else:
            reference = reference[:, part.get(name, tokens)]
        errors[f"d{name}"] = relative_error(grad, reference)
    bad = {name: error for name, error in errors.items() if not error <= FLOAT32}
    assert not bad, f"rank {rank} of {sizes}, chunks {chunk_frames}: {bad}"


def compare_primitives(rank, size, sizes, reverse, spans=None):
    T, D = sum(sizes), 16
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, T, D, D), (2, T, D, D), (2, T, D, D), (2, T, D))
    exact = [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes]
    frames = split(T, sizes, rank)
    ours = [x[:, frames].float() for x in exact]
    if reverse:
        exact, ours = [x.flip(1) for x in exact], [x.flip(1) for x in ours]
    expected = naive_frame_scan(*exact)
    found = cp_frame_gdn_scan(
        *ours, group=dist.group.WORLD, reverse=reverse, frames_per_rank=sizes, backend=steps.TritonSteps(spans=spans)
    )
    for x, y in zip(found, expected, strict=True):
        y = y.flip(1)[:, frames].flip(1) if reverse else y[:, frames]
        assert relative_error(x, y) <= FLOAT32


@pytest.mark.parametrize(("sizes", "chunk_frames", "rotary"), [([3, 2], None, True), ([1, 4], 2, False)])
def test_shards_equal_the_whole_clip(sizes, chunk_frames, rotary):
    run_ranks(2, compare_scans, sizes, chunk_frames, rotary)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_primitive_over_shards(reverse):
    run_ranks(2, compare_primitives, [2, 3], reverse)


def test_shards_and_their_spans_equal_the_whole_clip():
    run_ranks(2, compare_scans, [5, 3], 3, False, 2)


def test_the_primitive_over_shards_in_spans():
    run_ranks(2, compare_primitives, [4, 3], True, 2)
