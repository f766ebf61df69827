"""cp_frame_gdn_scan over real ranks against a float64 loop over the whole sequence."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from frame_gdn import CpFrameGdnScanResult, cp_frame_gdn_scan, parallel
from frame_gdn.kernels.naive import naive_frame_scan
from tests.distributed.helpers import run_ranks, split
from tests.helpers import relative_error

SHARDS = {
    1: [[5]],
    2: [[3, 3], [5, 1], [0, 4]],
    3: [[2, 2, 2], [1, 0, 4]],
    4: [[2, 1, 3, 1], [0, 3, 0, 2]],
}
NAMES = ("W_kv", "U_kv", "W_z", "U_z", "S0", "z0")


def whole_sequence(T, BH=2, D=5, seed=0):
    """Non-symmetric transitions of a whole sequence, and an initial state, float64."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    W_kv, W_z = (0.5 * torch.eye(D, dtype=torch.float64) + 0.2 * draw(BH, T, D, D) for _ in range(2))
    tensors = (W_kv, draw(BH, T, D, D), W_z, draw(BH, T, D), draw(BH, D, D), draw(BH, D))
    return [t.requires_grad_() for t in tensors]


def oracle(tensors, reverse, k):
    """The loop, in chain order, with frames >= k replaced by padding; results back in time order."""
    W_kv, U_kv, W_z, U_z, S0, z0 = tensors
    T, D = U_z.shape[1:]
    if k is not None:
        padded = torch.arange(T) >= k
        W_kv, W_z = (torch.where(padded.view(1, T, 1, 1), torch.eye(D, dtype=W_kv.dtype), W) for W in (W_kv, W_z))
        U_kv = torch.where(padded.view(1, T, 1, 1), 0.0, U_kv)
        U_z = torch.where(padded.view(1, T, 1), 0.0, U_z)
    chain = [t.flip(1) if reverse else t for t in (W_kv, U_kv, W_z, U_z)]
    S, z = naive_frame_scan(*chain, initial_state=(S0, z0))
    return (S.flip(1), z.flip(1)) if reverse else (S, z)


def compare(rank, size, sizes, reverse, k, gather, checkpointed, rounds):
    if rounds:
        parallel.MAX_GATHER_RANKS = 1
    T = sum(sizes)
    tensors = whole_sequence(T)
    mine = split(T, sizes, rank)
    local = [t.detach()[:, mine].clone().requires_grad_() for t in tensors[:4]]
    initial = [t.detach().clone().requires_grad_() for t in tensors[4:]]
    weights = torch.randn(T, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

    def call(*args):
        flipped = [t.flip(1) if reverse else t for t in args[:4]]
        out = cp_frame_gdn_scan(
            *flipped, dist.group.WORLD, reverse, k, initial_state=(args[4], args[5]), gather=gather
        )
        assert isinstance(out, CpFrameGdnScanResult) == (k is not None)
        S, z = out[0], out[1]
        return (S.flip(1), z.flip(1), *out[2:]) if reverse else (S, z, *out[2:])

    S, z, *ends = checkpoint(call, *local, *initial, use_reentrant=False) if checkpointed else call(*local, *initial)
    expected_S, expected_z = oracle(tensors, reverse, k)
    errors = {"S": relative_error(S, expected_S[:, mine]), "z": relative_error(z, expected_z[:, mine])}

    w = weights[mine]
    loss = (S.sin() * w.view(1, -1, 1, 1)).sum() + (z.cos() * w.view(1, -1, 1)).sum()
    expected_loss = (expected_S.sin() * weights.view(1, -1, 1, 1)).sum()
    expected_loss = expected_loss + (expected_z.cos() * weights.view(1, -1, 1)).sum()
    if k is not None:
        errors["terminal S"] = relative_error(ends[0], expected_S[:, k - 1])
        errors["terminal z"] = relative_error(ends[1], expected_z[:, k - 1])
        if rank != 1:  # a rank may leave the terminal state unused
            loss = loss + (rank + 1) * (ends[0].square().sum() + ends[1].square().sum())
        share = sum(r + 1 for r in range(size) if r != 1)
        end = expected_S[:, k - 1].square().sum() + expected_z[:, k - 1].square().sum()
        expected_loss = expected_loss + share * end
    loss.backward()
    expected_loss.backward()
    for t in initial:
        dist.all_reduce(t.grad)
    for name, ours, theirs in zip(NAMES, (*local, *initial), tensors, strict=True):
        expected = theirs.grad[:, mine] if name not in ("S0", "z0") else theirs.grad
        errors[f"d{name}"] = relative_error(ours.grad, expected)
        assert theirs.grad.abs().max() > 0, f"the gradient of {name} says nothing"
    bad = {name: error for name, error in errors.items() if not error <= 1e-12}
    assert not bad, f"rank {rank} {sizes} reverse {reverse} k {k} {gather}: {bad}"


def compare_all(rank, size, cases):
    for case in cases:
        compare(rank, size, *case)


@pytest.mark.parametrize("size", SHARDS)
def test_states_and_gradients_equal_the_loop_over_all_ranks_frames(size):
    cases = [
        (sizes, reverse, k, "collective", False, False)
        for sizes in SHARDS[size]
        for reverse in (False, True)
        for k in (None, 1, sum(sizes) - 1, sum(sizes))
    ]
    cases.append((SHARDS[size][-1], True, 2, "p2p", True, False))
    run_ranks(size, compare_all, cases)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_scan_in_rounds_equals_the_loop(size):
    cases = [
        (sizes, r, k, "collective", False, True) for sizes in SHARDS[size] for r in (False, True) for k in (None, 2)
    ]
    run_ranks(size, compare_all, cases)


def all_gathers(rank, size):
    T, sizes = 7, [3, 0, 4]
    mine = split(T, sizes, rank)
    for reverse in (False, True):
        results = []
        for gather in parallel.GATHERS:
            local = [t.detach()[:, mine].float().requires_grad_() for t in whole_sequence(T)[:4]]
            S, z, *ends = cp_frame_gdn_scan(*local, dist.group.WORLD, reverse, 5, gather=gather)
            (S.square().sum() + z.sum() + ends[0].sin().sum() + ends[1].sum()).backward()
            results.append([S, z, *ends, *(t.grad for t in local)])
        for other in results[1:]:
            for a, b in zip(results[0], other, strict=True):
                assert torch.equal(a, b)


def test_the_three_gathers_agree_to_the_bit():
    run_ranks(3, all_gathers)


def test_a_group_of_none_needs_no_process_group():
    tensors = whole_sequence(4)
    S, z = cp_frame_gdn_scan(*tensors[:4])
    expected_S, expected_z = naive_frame_scan(*tensors[:4])
    assert relative_error(S, expected_S) < 1e-12 and relative_error(z, expected_z) < 1e-12


def test_the_same_inputs_may_enter_two_scans():
    W_kv, U_kv, W_z, U_z = whole_sequence(4)[:4]
    first = cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z)[0]
    second = cp_frame_gdn_scan(W_kv, U_kv, W_z, U_z, reverse=True)[0]
    (first.sum() + second.sum()).backward()
    together = W_kv.grad.clone()
    W_kv.grad = None
    naive_frame_scan(W_kv, U_kv, W_z, U_z)[0].sum().mul(2).backward()
    assert relative_error(together, W_kv.grad) < 1e-12


def test_second_derivatives_are_a_clear_error():
    tensors = whole_sequence(3)[:4]
    S, _ = cp_frame_gdn_scan(*tensors)
    (dW,) = torch.autograd.grad(S.square().sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dW.sum().backward()


def test_low_precision_inputs_are_computed_in_float32():
    tensors = [t.detach().bfloat16() for t in whole_sequence(6)[:4]]
    out = cp_frame_gdn_scan(*tensors, truncate_to_active=6)
    assert out.S_kv_all.dtype == torch.bfloat16 and out.terminal_state_kv.dtype == torch.float32
    expected, _ = naive_frame_scan(*(t.double() for t in tensors))
    assert relative_error(out.terminal_state_kv.double(), expected[:, -1]) < 1e-5


def bad_input(rank, size):
    def refused(match, group=None, **changes):
        group = group or dist.new_group(list(range(size)))  # a new group: its first call shakes hands
        T = 3
        tensors = dict(zip(NAMES[:4], (t.detach() for t in whole_sequence(T)), strict=False))
        keywords = {
            key: changes.pop(key) for key in ("truncate_to_active", "gather", "frames_per_rank") if key in changes
        }
        tensors.update({name: change(tensors[name]) for name, change in changes.items()})
        try:
            cp_frame_gdn_scan(*tensors.values(), group, **keywords)
        except ValueError as error:
            assert match in str(error), str(error)
        else:
            raise AssertionError(f"nothing was raised for {match}")

    refused("truncate_to_active must be between 1 and the total of 6 frames, got 7", truncate_to_active=7)
    refused("between 1 and the total of 6 frames, got 0", truncate_to_active=0)
    refused("gather must be one of", gather="mpi")
    refused("disagree on truncate_to_active: rank 0 has 1, rank 1 has 2", truncate_to_active=rank + 1)
    refused("disagree on D", **{n: (lambda t: _narrow(t, rank)) for n in NAMES[:4]})
    refused("disagree on dtype", **{n: (lambda t: t.to([torch.float32, torch.float64][rank])) for n in NAMES[:4]})
    one_sided = {"U_z": (lambda t: t[..., :2])} if rank == 1 else {}
    refused("U_z must be" if rank == 1 else "rank 1 of the group refused", **one_sided)
    refused("frames_per_rank" if rank == 1 else "rank 1 of the group refused", frames_per_rank=[3, 4])
    group = dist.new_group(list(range(size)))
    cp_frame_gdn_scan(*(t.detach() for t in whole_sequence(3)[:4]), group)
    # later calls ask for frame counts where they truncate, and learn of a refusal by the way
    refused("U_z must be" if rank == 1 else "rank 1 of the group refused", group, truncate_to_active=2, **one_sided)


def _narrow(t, rank):
    D = 5 - rank
    return t[..., :D, :D].contiguous() if t.dim() == 4 else t[..., :D].contiguous()


def test_bad_input_is_a_value_error_on_every_rank():
    run_ranks(2, bad_input)


def outside_a_group(rank, size):
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match="member"):
            cp_frame_gdn_scan(*(t.detach() for t in whole_sequence(2)[:4]), group)


def test_a_group_this_process_is_not_in_is_refused():
    run_ranks(2, outside_a_group)
