"""The layer on Triton over real ranks: its convolution gets a halo from the neighbours, they a gradient from it."""

import pytest
import torch
import torch.distributed as dist

from frame_gdn import BidirectionalGDN
from tests.distributed.helpers import run_ranks, split
from tests.helpers import fill_randomly, relative_error

pytest.importorskip("triton")

FLOAT32 = 5e-6


def compare_layers(rank, size, sizes, chunk_frames):
    T, S, H, D = sum(sizes), 3, 2, 16
    generator = torch.Generator().manual_seed(5)
    x, direction = torch.randn(2, 1, T * S, H * D, generator=generator, dtype=torch.float64).unbind(0)
    whole = fill_randomly(BidirectionalGDN(H * D, H, backend="torch")).double()
    exact = x.clone().requires_grad_()
    expected, end = whole(exact, T, output_final_state=True, chunk_frames=chunk_frames)
    ((expected * direction).sum() + size * end.conv_tail.sin().sum()).backward()

    frames = split(T, sizes, rank)
    tokens = slice(frames.start * S, frames.stop * S)
    layer = fill_randomly(BidirectionalGDN(H * D, H, group=dist.group.WORLD, backend="triton"))
    ours = x[:, tokens].float().requires_grad_()
    out, final = layer(ours, sizes[rank], output_final_state=True, chunk_frames=chunk_frames, frames_per_rank=sizes)
    ((out.double() * direction[:, tokens]).sum() + final.conv_tail.sin().sum()).backward()
    errors = {
        "out": relative_error(out, expected[:, tokens]),
        "conv_tail": relative_error(final.conv_tail, end.conv_tail),
        "dx": relative_error(ours.grad, exact.grad[:, tokens]),
    }
    references = dict(whole.named_parameters())
    for name, parameter in layer.named_parameters():
        dist.all_reduce(parameter.grad)
        errors[f"d{name}"] = relative_error(parameter.grad, references[name].grad)
    bad = {name: error for name, error in errors.items() if not error <= FLOAT32}
    assert not bad, f"rank {rank} of {sizes}, chunks {chunk_frames}: {bad}"


@pytest.mark.parametrize(("sizes", "chunk_frames"), [([3, 2], None), ([1, 4], 2), ([4, 0], None)])
def test_shards_equal_the_whole_clip(sizes, chunk_frames):
    run_ranks(2, compare_layers, sizes, chunk_frames)
