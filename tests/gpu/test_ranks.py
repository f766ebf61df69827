"""Two GPUs over NCCL: results of one process, NaN where the ranks' calls differ, and no wait for the device."""

import pytest
import torch
import torch.distributed as dist

from frame_gdn import bidirectional_gdn, parallel

from ..distributed.helpers import run_ranks
from ..helpers import NEEDS_GPU, relative_error

pytestmark = [*NEEDS_GPU, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]

B, T, S, H, D = 1, 4, 64, 4, 112


def tokens(frames: slice) -> list[torch.Tensor]:
    """q, k, v, beta, decay of these frames of a clip of 2 T."""
    generator = torch.Generator().manual_seed(0)
    N = 2 * T * S
    q, k, v = torch.rand(3, B, N, H, D, generator=generator).unbind(0)
    whole = [q, k * (D * S) ** -0.5, v, torch.rand(B, N, H, generator=generator)]
    decay = 0.9 + 0.1 * torch.rand(B, 2 * T, H, generator=generator)
    here = slice(frames.start * S, frames.stop * S)
    return [t[:, here].cuda().requires_grad_() for t in whole] + [decay[:, frames].cuda().requires_grad_()]


def agreeing_and_not(rank: int, size: int) -> None:
    group, counts = dist.group.WORLD, [T, T]
    mine = slice(rank * T, rank * T + T)
    for chunk_frames in (None, 3):
        x, whole = tokens(mine), tokens(slice(0, 2 * T))
        out, _ = bidirectional_gdn(*x, chunk_frames=chunk_frames, group=group, frames_per_rank=counts)
        expected, _ = bidirectional_gdn(*whole, chunk_frames=chunk_frames)
        (out.sin().sum()).backward()
        expected.sin().sum().backward()
        assert relative_error(out, expected[:, rank * T * S : (rank + 1) * T * S]) <= 1e-5
        assert relative_error(x[1].grad, whole[1].grad[:, rank * T * S : (rank + 1) * T * S]) <= 1e-4
    x = tokens(mine)
    for differ in ({"chunk_frames": 2 + rank}, {"eps": 1e-15 + rank}, {"precision": ["default", "exact"][rank]}):
        out, _ = bidirectional_gdn(*x, group=group, frames_per_rank=counts, **differ)
        assert out.isnan().all(), differ
        with pytest.raises(ValueError, match=f"disagree on {next(iter(differ))}: rank 0 has"):
            bidirectional_gdn(*x, group=group, frames_per_rank=counts, check=True, **differ)


def without_waiting(rank: int, size: int) -> None:
    """Every kind of message of two calls, one that the ranks agree on and one that they do not."""
    group = dist.group.WORLD
    M, h = torch.rand(2, B, H, D, D, device="cuda").unbind(0)
    frames = torch.rand(B, T, S, device="cuda", requires_grad=True)
    parallel.agree(parallel.Call("the first", {}, T), group, None, positions=False, check=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = []
        for option in (0, rank):
            call = parallel.Call("a call", {"option": option}, T)
            came = parallel.exchange([M], [h], [h], group, call=call, total=True)
            fetched = parallel.halo(frames, 1, 1, group, [T, T], call)
            gathered = parallel.gather_frames(frames, group, [T, T], call)
            (gradient,) = torch.autograd.grad(gathered.sum() + fetched[0].sum(), frames)
            (summed,) = parallel.sum_over_ranks([h], group, call)
            results.append([*came.rightward, *came.leftward, *came.total, *fetched, gathered, gradient, summed])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(result.isfinite().all() for result in results[0])
    assert all(result.isnan().all() for result in results[1])


def test_two_gpus_equal_one_and_a_disagreement_is_nan() -> None:
    run_ranks(2, agreeing_and_not, backend="nccl", timeout_s=120)


def test_no_message_waits_for_the_device() -> None:
    run_ranks(2, without_waiting, backend="nccl", timeout_s=120)
