"""bidirectional_gdn and BidirectionalGDN over real ranks: against the naive loop, the primitive, and one process."""

import copy
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from frame_gdn import BidirectionalGDN, GDNState, bidirectional_gdn, cp_frame_gdn_scan, parallel
from frame_gdn.agreement import PARTIAL, WORDS
from frame_gdn.chunks import ChunkGrid
from frame_gdn.kernels.naive import naive_bidirectional_gdn
from tests.distributed.helpers import run_ranks, split
from tests.helpers import assert_every_gradient_says_something, fill_randomly, relative_error
from tests.test_gdn import clip

GRIDS = [ChunkGrid(), ChunkGrid(1), ChunkGrid(2), ChunkGrid(3), ChunkGrid(2, 3), ChunkGrid(2, 1, True)]
SHARDS = {1: [[4]], 2: [[3, 3], [5, 1], [0, 4]], 3: [[2, 2, 2], [1, 0, 4]], 4: [[2, 1, 3, 1], [0, 3, 0, 2]]}


def compare(rank, size, sizes, D, grid, masked, rotary, normalize, rounds, known):
    parallel.MAX_GATHER_RANKS = 1 if rounds else 16
    consumed = 2 if grid.first_chunk_frames is None else 0
    T, S, eps = sum(sizes), 3, 1e-3
    tensors, mask = clip(T=T, S=S, D=D, masked=masked)
    if not rotary:
        tensors["q_rot"] = tensors["k_rot"] = None
    frames = split(T, sizes, rank)
    tokens = slice(frames.start * S, frames.stop * S)
    local = {}
    for name, t in tensors.items():
        if t is not None:
            part = t if name in ("S0", "z0") else t[:, frames] if name == "decay" else t[:, tokens]
            local[name] = part.detach().clone().requires_grad_()
    local_mask = None if mask is None else mask[:, frames]

    def call(*args):
        x = dict(zip(local, args, strict=True))
        out, final = bidirectional_gdn(
            *(x[name] for name in ("q", "k", "v", "beta", "decay")),
            q_rot=x.get("q_rot"), k_rot=x.get("k_rot"), mask=local_mask,
            initial_state=GDNState(x["S0"], x["z0"], consumed), output_final_state=True,
            **grid.facts, normalize=normalize, eps=eps,
            group=dist.group.WORLD, frames_per_rank=sizes if known else None,
        )  # fmt: skip
        assert final.frames == consumed + (T if mask is None else int(mask[0].sum()))
        return out, final.S, final.z

    out, S_end, z_end = checkpoint(call, *local.values(), use_reentrant=False) if known else call(*local.values())
    expected, (S_ref, z_ref) = naive_bidirectional_gdn(
        *(tensors[name] for name in ("q", "k", "v", "beta", "decay")),
        q_rot=tensors["q_rot"], k_rot=tensors["k_rot"], mask=mask, initial_state=(tensors["S0"], tensors["z0"]),
        **grid.facts, normalize=normalize, eps=eps,
    )  # fmt: skip
    errors = {"out": relative_error(out, expected[:, tokens]), "S": relative_error(S_end, S_ref)}
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    loss, expected_loss = (out * weights[:, tokens]).sum(), (expected * weights).sum()
    loss = loss + (rank + 1) * S_end.sin().sum()  # every rank uses the final state, each in its own way
    expected_loss = expected_loss + sum(range(1, size + 1)) * S_ref.sin().sum()
    if normalize:
        errors["z"] = relative_error(z_end, z_ref)
        loss = loss + (rank + 1) * z_end.square().sum()
        expected_loss = expected_loss + sum(range(1, size + 1)) * z_ref.square().sum()
    loss.backward()
    expected_loss.backward()
    for name, t in local.items():
        grad, reference = t.grad, tensors[name].grad
        if reference is None:  # without a denominator the plain q and k, and z, reach nothing
            assert not normalize and name in ("q", "k", "z0") and (grad is None or not grad.any())
            continue
        if name in ("S0", "z0"):
            dist.all_reduce(grad)
        else:
            assert reference.abs().max() > 0, f"the gradient of {name} says nothing"
            reference = reference[:, frames] if name == "decay" else reference[:, tokens]
        errors[f"d{name}"] = relative_error(grad, reference)
    bad = {name: error for name, error in errors.items() if not error <= 1e-12}
    assert not bad, f"rank {rank} {sizes} D {D} {grid} masked {masked} rounds {rounds}: {bad}"


def compare_all(rank, size, cases):
    for case in cases:
        compare(rank, size, *case)


@pytest.mark.parametrize("size", SHARDS)
def test_values_and_gradients_equal_the_loop_over_all_ranks_frames(size):
    cases = [
        (sizes, 6, grid, masked, True, True, rounds, rounds)
        for sizes in SHARDS[size]
        for grid in GRIDS
        for masked in (False, True)
        for rounds in (False, True)
        if not (rounds and size == 1)
    ]
    cases += [
        (sizes, 5, GRIDS[0], True, rotary, not rotary, False, False)
        for sizes in SHARDS[size]
        for rotary in (False, True)
    ]
    cases += [(SHARDS[size][-1], 112, GRIDS[2], True, True, normalize, False, False) for normalize in (False, True)]
    run_ranks(size, compare_all, cases, timeout_s=180)


def two_calls_of_the_primitive(rank, size):
    sizes, S, D, eps = [2, 0, 3], 4, 6, 1e-3
    tensors, _ = clip(B=1, T=5, S=S, D=D, masked=False)
    frames = split(5, sizes, rank)
    tokens = slice(frames.start * S, frames.stop * S)
    T = sizes[rank]
    H = tensors["q"].shape[2]

    def by_head(x):  # (1, N, H, ...) -> (H, T, S, D)
        return x.detach()[0, tokens].transpose(0, 1).reshape(H, T, S, x[0, 0, 0].numel())

    q, k, v, q_rot, k_rot, beta = (by_head(tensors[n]) for n in ("q", "k", "v", "q_rot", "k_rot", "beta"))
    g = tensors["decay"].detach()[0, frames].T[..., None, None]
    eye = torch.eye(D, dtype=q.dtype)
    W, U = g * (eye - (k_rot * beta).mT @ k_rot), v.mT @ (k_rot * beta)
    W_z, u_z = g * (eye - (k * beta).mT @ k), (k * beta).sum(-2)
    group = dist.group.WORLD
    S_f, z_f = cp_frame_gdn_scan(W, U, W_z, u_z, group)
    flipped = (t.flip(1) for t in (W, U, W_z, u_z))
    S_r, z_r = (t.flip(1) for t in cp_frame_gdn_scan(*flipped, group, reverse=True))
    # the exclusive reverse state is the next frame's inclusive one, at a shard's end the next rank's
    after = [parallel.halo(t, 0, 1, group, sizes)[1] for t in (S_r, z_r)]
    if T:
        S_f, z_f = (a + torch.cat([r[:, 1:], n], 1) for a, r, n in zip((S_f, z_f), (S_r, z_r), after, strict=True))
    num, den = q_rot @ S_f.mT, q @ z_f.unsqueeze(-1)
    expected = (num / (den + eps)).flatten(1, 2).permute(1, 0, 2).unsqueeze(0)
    local = [tensors[n].detach()[:, tokens] for n in ("q", "k", "v", "beta")]
    out, _ = bidirectional_gdn(
        *local, tensors["decay"].detach()[:, frames], eps=eps, group=group,
        q_rot=tensors["q_rot"].detach()[:, tokens], k_rot=tensors["k_rot"].detach()[:, tokens],
    )  # fmt: skip
    assert relative_error(out, expected) <= 1e-12


def test_equals_two_calls_of_the_primitive_projected_and_added():
    run_ranks(3, two_calls_of_the_primitive)


# --- the layer --------------------------------------------------------------------------------------------------


def layer_over_ranks(rank, size, sizes, chunk_frames, masked, K):
    B, H, D, S, T = 2, 2, 6, 3, sum(sizes)
    layer = fill_randomly(BidirectionalGDN(H * D, H, conv_kernel_size=K, eps=1e-3).double())
    single = copy.deepcopy(layer)
    layer.group = dist.group.WORLD
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T * S, H * D, generator=generator, dtype=torch.float64)
    angle = torch.rand(T * S, D // 2, generator=generator, dtype=torch.float64)
    mask = None
    if masked:
        mask = torch.ones(B, T, dtype=torch.bool)
        mask[:, -2:] = False
    state = single(x[:, : 2 * S], 2, output_final_state=True)[1].detach() if chunk_frames else None
    frames = split(T, sizes, rank)
    tokens = slice(frames.start * S, frames.stop * S)
    xs = [x.clone().requires_grad_(), x[:, tokens].clone().requires_grad_()]
    keywords = {"state": state, "output_final_state": True, "chunk_frames": chunk_frames}
    expected, final_ref = single(xs[0], T, rotary=(angle.cos(), angle.sin()), mask=mask, **keywords)
    rotary = (angle[tokens].cos(), angle[tokens].sin())
    out, final = layer(
        xs[1],
        sizes[rank],
        rotary=rotary,
        mask=None if mask is None else mask[:, frames],
        frames_per_rank=sizes,
        **keywords,
    )
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    tail_loss = [0.0 if f.conv_tail is None else f.conv_tail.sin().sum() for f in (final, final_ref)]
    ((out * weights[:, tokens]).sum() + final.S.sin().sum() + final.z.sum() + tail_loss[0]).backward()
    ((expected * weights).sum() + size * (final_ref.S.sin().sum() + final_ref.z.sum() + tail_loss[1])).backward()
    errors = {"out": relative_error(out, expected[:, tokens]), "dx": relative_error(xs[1].grad, xs[0].grad[:, tokens])}
    for name in ("S", "z", "conv_tail"):
        if getattr(final_ref, name) is not None:
            errors[name] = relative_error(getattr(final, name), getattr(final_ref, name))
    assert final.frames == final_ref.frames
    assert_every_gradient_says_something(single)
    for (name, p), reference in zip(layer.named_parameters(), single.parameters(), strict=True):
        dist.all_reduce(p.grad)  # each rank held its own frames: gradients are summed
        errors[f"d{name}"] = relative_error(p.grad, reference.grad)
    bad = {name: error for name, error in errors.items() if not error <= 1e-11}
    assert not bad, f"rank {rank} {sizes} chunk {chunk_frames} masked {masked} K {K}: {bad}"


def layers_over_ranks(rank, size, cases):
    for case in cases:
        layer_over_ranks(rank, size, *case)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_sharded_layer_equals_one_process_with_halos_from_as_many_neighbours_as_hold_them(size):
    cases = [
        (sizes, chunk_frames, masked, K)
        for sizes in SHARDS[size]
        for chunk_frames, masked, K in (
            (None, False, 4),
            (3, False, 4),
            (None, True, 4),
            (2, True, 3),
            (None, False, 0),
        )
    ]
    run_ranks(size, layers_over_ranks, cases)


COLLECTIVES = (
    *("all_gather_into_tensor", "all_gather", "all_gather_object", "all_reduce", "reduce_scatter_tensor", "broadcast"),
    *("all_to_all_single", "all_to_all", "batch_isend_irecv", "send", "recv", "isend", "irecv", "barrier"),
)


def count_collectives(rank, size):
    counted = Counter()
    for name in COLLECTIVES:
        original = getattr(dist, name)

        def counting(*args, _name=name, _original=original, **kwargs):
            counted[_name] += 1
            return _original(*args, **kwargs)

        setattr(dist, name, counting)
    layer = fill_randomly(BidirectionalGDN(12, 2, group=dist.group.WORLD))
    x = torch.randn(1, 6, 12, requires_grad=True)
    layer(x, 2, frames_per_rank=[2] * size)[0].sum().backward()  # the first call shakes hands
    counted.clear()
    out, _ = layer(x, 2, frames_per_rank=[2] * size, chunk_frames=2)
    assert dict(counted) == {"all_gather_into_tensor": 1, "all_to_all_single": 1}, dict(counted)
    counted.clear()
    out.sum().backward()
    assert dict(counted) == {"all_gather_into_tensor": 1, "all_to_all_single": 1}, dict(counted)
    counted.clear()
    layer(x, 2, frames_per_rank=[2] * size, output_final_state=True)
    assert dict(counted) == {"all_gather_into_tensor": 1, "all_to_all_single": 1}, dict(counted)
    counted.clear()
    layer.group = None
    layer(x, 2)[0].sum().backward()
    assert not counted


def test_one_exchange_and_one_halo_each_way_and_none_without_a_group():
    run_ranks(2, count_collectives)


def message_sizes(rank, size):
    sent = []
    original = dist.all_gather_into_tensor
    dist.all_gather_into_tensor = lambda out, t, group: (sent.append(t.numel()), original(out, t, group=group))[1]
    tensors, _ = clip(B=1, T=4, S=3, D=6, masked=False)
    BH, D = tensors["S0"].shape[1], 6
    local = [
        tensors[n].detach()[:, : 6 if n != "decay" else 2].requires_grad_() for n in ("q", "k", "v", "beta", "decay")
    ]
    bidirectional_gdn(*local, group=dist.group.WORLD)
    sent.clear()
    out, _ = bidirectional_gdn(*local, group=dist.group.WORLD)
    out.sum().backward()
    header = 2 * (WORDS + PARTIAL)  # 48 bytes, by which the ranks see that they make the same call
    assert sent == [header + BH * (4 * D * D + 2 * D), header + BH * (2 * D * D + 2 * D)], sent


def test_messages_hold_states_and_transitions_alone():
    run_ranks(2, message_sizes)


def disagreements(rank, size):
    def refused(match, check=True, group=None, **changes):
        tensors, _ = clip(B=1, T=2, S=3, D=6, masked=False)
        x = {n: tensors[n].detach() for n in ("q", "k", "v", "beta", "decay")}
        keywords = {k: changes.pop(k) for k in list(changes) if k not in x}
        x.update(changes)
        group = dist.new_group(list(range(size))) if group is None else group
        try:
            bidirectional_gdn(*x.values(), group=group, check=check, **keywords)
        except ValueError as error:
            assert match in str(error), str(error)
        else:
            raise AssertionError(f"nothing was raised for {match}")

    padded = torch.tensor([[True, False]])
    refused(
        "disagree on mask: rank 0 has None, rank 1 has given", output_final_state=True, mask=padded if rank else None
    )
    layer = BidirectionalGDN(12, 2, group=dist.new_group(list(range(size))))
    with pytest.raises(ValueError, match="disagree on mask: rank 0 has None, rank 1 has given"):
        layer(torch.randn(1, 6, 12), 2, mask=padded if rank else None, output_final_state=True)
    layer.group = dist.new_group(list(range(size)))
    layer(torch.randn(1, 6, 12), 2, mask=padded if rank else None)  # without a state nothing is counted
    wrong = {"beta": torch.zeros(1, 5, 2, dtype=torch.float64)} if rank else {}
    refused("beta must be" if rank else "rank 1 of the group refused", **wrong)
    group = dist.new_group(list(range(size)))
    tensors, _ = clip(B=1, T=2, S=3, D=6, masked=False)
    x = [tensors[n].detach() for n in ("q", "k", "v", "beta", "decay")]
    bidirectional_gdn(*x, group=group)  # later calls pay nothing, unless asked to check
    refused("beta must be" if rank else "rank 1 of the group refused", group=group, **wrong)
    one_sided = "beta must be" if rank else "rank 1 of the group refused"
    for needs_positions in ({"chunk_frames": 2}, {"output_final_state": True}):  # a handshake is due without check
        refused(one_sided, check=False, group=group, **wrong, **needs_positions)
    layer(torch.randn(1, 6, 12), 2)
    with pytest.raises(ValueError, match="x must be" if rank else "rank 1 of the group refused"):
        layer(torch.randn(1, 6, 12 + rank), 2)
    mask = torch.tensor([[True, False], [True, bool(rank)]])
    two = [torch.cat([t, t]) for t in x]
    with pytest.raises(ValueError, match=r"different counts of active frames: \[2, 3\]"):
        bidirectional_gdn(*two, group=group, mask=mask, output_final_state=True)
    dist.destroy_process_group(group)


def test_disagreement_is_a_value_error_on_every_rank():
    run_ranks(2, disagreements)


def ask_for_more_than_first_derivatives(rank, size):
    tensors, _ = clip(T=size, S=2, D=4)
    given = {name: t.detach() for name, t in tensors.items() if name not in ("S0", "z0")}
    own = {name: t.unflatten(1, (size, -1))[:, rank].clone() for name, t in given.items()}
    own["v"].requires_grad_()

    def scan(v):
        out, _ = bidirectional_gdn(**{**own, "v": v}, group=dist.group.WORLD, frames_per_rank=[1] * size)
        return out

    with pytest.raises(NotImplementedError, match="over ranks the frame scan has first derivatives"):
        torch.func.vmap(scan)(own["v"].detach()[None])
    (gradient,) = torch.autograd.grad(scan(own["v"]).sum(), own["v"])
    assert torch.isfinite(gradient).all()
    with pytest.raises(NotImplementedError, match="no torch.func transform, .* or create_graph=True"):
        torch.autograd.grad(scan(own["v"]).sum(), own["v"], create_graph=True)


def test_more_than_first_derivatives_over_ranks_are_refused_by_name():
    run_ranks(2, ask_for_more_than_first_derivatives)
