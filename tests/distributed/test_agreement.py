"""Ranks that make different calls: a named error where a handshake is due, NaN everywhere else, never a finite result.

Every case is a row of a table: how the last rank's call differs from the others'. A spawn runs a whole table.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from frame_gdn import BidirectionalGDN, GDNState, bidirectional_gdn, cp_frame_gdn_scan, parallel, parallelize
from tests.distributed.helpers import run_ranks
from tests.models.helpers import tiny_inputs, tiny_model

B, T, S, H, D = 2, 3, 4, 2, 8

Keywords = dict[str, Any]


def tokens(rank: int, **sizes: Any) -> Keywords:
    """q, k, v, beta, decay of one shard; other sizes and a dtype as asked."""
    b, s, h, d = (sizes.get(name, size) for name, size in (("B", B), ("S", S), ("H", H), ("D", D)))
    generator = torch.Generator().manual_seed(rank)
    dtype = sizes.get("dtype", torch.float32)

    def draw(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator).to(dtype)

    shape = (b, T * s, h, d)
    q, k, v = draw(*shape), draw(*shape) / (d * s) ** 0.5, draw(*shape)
    return {"q": q, "k": k, "v": v, "beta": draw(*shape[:3]), "decay": draw(b, T, h)}


def state(frames: int = 2, b: int = B) -> GDNState:
    return GDNState(torch.ones(b, H, D, D), torch.ones(b, H, D), frames)


def table(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(T * S, D // 2)
    return angle.cos(), angle.sin()


#: What the call of all ranks but the last and of the last are: (name in the error, others', last's).
Row = tuple[str, Callable[[int], Keywords], Callable[[int], Keywords]]


def same(**keywords: Any) -> Callable[[int], Keywords]:
    return lambda rank: keywords


#: Messages are of the same size on all ranks.
SAME_SIZE: list[Row] = [
    ("chunk_frames", same(chunk_frames=2), same(chunk_frames=3)),
    ("chunk_frames", same(chunk_frames=None), same(chunk_frames=4)),
    ("B", same(), lambda rank: tokens(rank, B=H * B, H=1)),
    ("q_rot", same(), lambda rank: {"q_rot": tokens(9)["q"]}),
    ("k_rot", lambda rank: {"k_rot": tokens(9)["k"]}, same()),
    ("q_rot", lambda rank: {"rotary": table(0)}, same()),
    ("eps", same(eps=1e-15), same(eps=1.0)),
    ("dtype", same(), lambda rank: tokens(rank, dtype=torch.bfloat16)),
    ("dtype", lambda rank: tokens(rank, dtype=torch.float16), lambda rank: tokens(rank, dtype=torch.bfloat16)),
    ("tokens a frame", same(), lambda rank: tokens(rank, S=2 * S)),
    ("initial_state.frames", same(), same(initial_state=state())),
    ("initial_state.frames", same(initial_state=state(2)), same(initial_state=state(3))),
    ("backend", same(backend="auto"), same(backend="torch")),
    ("precision", same(precision="exact"), same(precision="default")),
]

#: Messages are of the same size forward, but not backward.
SAME_SIZE_FORWARD: list[Row] = [("output_final_state", same(), same(output_final_state=True))]

#: Messages are of different sizes: on a later call the transport fails.
OTHER_SIZE: list[Row] = [
    ("D", same(), lambda rank: tokens(rank, D=6)),
    ("H", same(), lambda rank: tokens(rank, H=4)),
    ("B", same(), lambda rank: tokens(rank, B=1)),
    ("normalize", same(), same(normalize=False)),
    ("chunk_frames", same(chunk_frames=1), same(chunk_frames=None)),
    ("dtype", same(), lambda rank: tokens(rank, dtype=torch.float64)),
    ("mask", same(output_final_state=True), same(output_final_state=True, mask=torch.ones(B, T, dtype=torch.bool))),
]


def error_of(function: Callable[..., object], *arguments: Any, **keywords: Any) -> str:
    """The ValueError that the call raises."""
    with pytest.raises(ValueError) as raised:
        function(*arguments, **keywords)
    return str(raised.value)


def assert_all_nan(name: str, *results: Tensor | None) -> None:
    for result in results:
        if result is not None:
            assert result.isnan().all(), f"{name}: {int(result.isnan().sum())} of {result.numel()} are NaN"


def functional(rank: int, size: int, rounds: bool) -> None:
    parallel.MAX_GATHER_RANKS = 1 if rounds else 16
    group, counts, odd = dist.group.WORLD, [T] * size, rank == size - 1
    bidirectional_gdn(**tokens(rank), group=group)
    for name, others, last in [*SAME_SIZE, *([] if rounds else SAME_SIZE_FORWARD)]:
        keywords = {**tokens(rank), "frames_per_rank": counts, **(last if odd else others)(rank)}
        leaf = keywords["v"].requires_grad_()
        out, final = bidirectional_gdn(**keywords, group=group)
        assert_all_nan(name, out, *([final.S, final.z] if final else []))
        if name != "output_final_state":
            out.sum().backward()
            assert_all_nan(f"{name}: dv", leaf.grad)
    for name, others, last in [] if rounds else [*SAME_SIZE, *SAME_SIZE_FORWARD, *OTHER_SIZE]:
        keywords = {**tokens(rank), "frames_per_rank": counts, **(last if odd else others)(rank)}
        said = error_of(bidirectional_gdn, **keywords, group=group, check=True)
        assert f"disagree on {name}: rank" in said or f"; and on {name}: rank" in said, said
        assert f"rank {size - 1} has " in said, said

    # What one rank refuses of its own is NaN on the others, and they do not wait.
    wide = GDNState(torch.ones(B, H, D + 1, D + 1), torch.ones(B, H, D + 1))
    for name, wrong in {
        "initial_state.S must be": {"initial_state": wide},
        "initial_state must be": {"initial_state": {"S": 1}},
        "mask must be": {"mask": torch.ones(B, T + 1, dtype=torch.bool)},
    }.items():
        keywords = {**tokens(rank), "frames_per_rank": counts, "group": group, **(wrong if odd else {})}
        if odd:
            assert name in error_of(bidirectional_gdn, **keywords)
        else:
            assert_all_nan(name, bidirectional_gdn(**keywords)[0])

    # What is no disagreement is not taken for one.
    for keywords in (
        {"initial_state": state() if rank == 0 else None},
        {"mask": torch.ones(B, T, dtype=torch.bool) if odd else None},
        {"chunk_frames": 2, "output_final_state": True, "initial_state": state()},
        {"frames_per_rank": counts if odd else None},
    ):
        out, _ = bidirectional_gdn(**{**tokens(rank), "frames_per_rank": counts, "group": group, **keywords})
        assert out.isfinite().all(), keywords
    # Two ranks know the size of a frame, and one between them has none.
    if size == 3:
        empty = {name: t[:, :0] for name, t in tokens(rank).items()}
        for other, wanted in ((S, torch.isfinite), (2 * S, torch.isnan)):
            x = empty if rank == 1 else tokens(rank, S=other if odd else S)
            out, _ = bidirectional_gdn(**x, group=group)
            assert wanted(out).all()


@pytest.mark.parametrize(("size", "rounds"), [(2, False), (3, False), (3, True)])
def test_ranks_whose_calls_differ_get_nan_and_with_check_the_option_and_both_values(size: int, rounds: bool) -> None:
    run_ranks(size, functional, rounds)


# --- later calls of everything else ------------------------------------------------------------------------------


def transitions(rank: int, dtype: torch.dtype = torch.float32) -> Keywords:
    generator = torch.Generator().manual_seed(rank)
    names = {"W_kv": (H, T, D, D), "U_kv": (H, T, D, D), "W_z": (H, T, D, D), "U_z": (H, T, D)}
    return {name: torch.rand(shape, generator=generator).to(dtype) / D for name, shape in names.items()}


PRIMITIVE: list[Row] = [
    ("reverse", same(), same(reverse=True)),
    ("gather", same(gather="collective"), same(gather="list")),
    ("backend", same(), same(backend="torch")),
    ("dtype", lambda rank: transitions(rank, torch.float16), lambda rank: transitions(rank, torch.bfloat16)),
    ("initial_state", same(), same(initial_state=(torch.ones(H, D, D), torch.ones(H, D)))),
    ("truncate_to_active", same(truncate_to_active=2), same(truncate_to_active=3)),
]

#: The last's call of the layer, and attributes of the last's layer.
LAYER: list[tuple[str, Keywords, Keywords]] = [
    ("chunk_frames", {"chunk_frames": 2}, {}),
    ("state", {"state": GDNState(torch.ones(B, H, D, D), torch.ones(B, H, D), 0)}, {}),
    ("rotary", {"rotary": table(0)}, {}),
    ("eps", {}, {"eps": 1.0}),
    ("backend", {}, {"backend": "torch"}),
]


def primitive(rank: int, size: int) -> None:
    group, counts, odd = dist.group.WORLD, [T] * size, rank == size - 1
    cp_frame_gdn_scan(**transitions(rank), group=group)
    for name, others, last in PRIMITIVE:
        keywords = {**transitions(rank), "frames_per_rank": counts, **(last if odd else others)(rank)}
        leaf = keywords["W_kv"].requires_grad_()
        results = cp_frame_gdn_scan(**keywords, group=group)
        assert_all_nan(name, *results)
        sum(result.sum() for result in results).backward()
        if name != "truncate_to_active":  # whose padded frames have the gradient 0
            assert_all_nan(f"{name}: dW", leaf.grad)
    first_alone = (torch.ones(H, D, D), torch.ones(H, D)) if rank == 0 else None
    results = cp_frame_gdn_scan(**transitions(rank), group=group, initial_state=first_alone)
    assert all(result.isfinite().all() for result in results)
    keywords = {**transitions(rank), "group": group, "initial_state": torch.ones(H, D, D)}
    if odd:
        assert "initial_state must be" in error_of(cp_frame_gdn_scan, **keywords)
    else:
        keywords.pop("initial_state")
        assert_all_nan("a state refused", *cp_frame_gdn_scan(**keywords))


def layer(rank: int, size: int) -> None:
    counts, odd, x = [T] * size, rank == size - 1, torch.rand(B, T * S, H * D)
    module = BidirectionalGDN(H * D, H, group=dist.group.WORLD)
    module(x, T)
    for name, keywords, attributes in LAYER:
        if odd:
            for attribute, value in attributes.items():
                setattr(module, attribute, value)
        out, _ = module(x, T, frames_per_rank=counts, **(keywords if odd else {}))
        assert_all_nan(name, out)
        module.eps, module.backend = 1e-15, "auto"
    wrong = {"state": GDNState(torch.ones(B, H, D + 1, D + 1), torch.ones(B, H, D + 1))} if odd else {}
    for width in (0, 1, 4):  # without halo the states alone tell
        module = BidirectionalGDN(H * D, H, conv_kernel_size=width, group=dist.group.WORLD)
        module.q_norm.eps = 1e-3 if odd else 1e-5
        assert_all_nan("norm_eps", module(x, T, frames_per_rank=counts)[0])
        module.q_norm.eps = 1e-5
        if odd:
            assert "state.S must be" in error_of(module, x, T, frames_per_rank=counts, **wrong)
        else:
            assert_all_nan("a state refused", module(x, T, frames_per_rank=counts)[0])
    mask = torch.ones(B, T + odd, dtype=torch.bool)  # where active frames are counted, the ranks hear of it
    said = error_of(module, x, T, mask=mask, output_final_state=True, frames_per_rank=counts)
    assert f"rank {size - 1} of the group refused its input" in said and "mask must be" in said


def frames(rank: int, size: int) -> None:
    """Exchanged dimensions and another dtype of the same size; what lies beyond the clip is NaN too."""
    group, counts, odd = dist.group.WORLD, [T] * size, rank == size - 1
    parallel.halo(torch.rand(2, T, 4), 1, 1, group)
    for x in (
        torch.rand(4, T, 2) if odd else torch.rand(2, T, 4),
        torch.rand(2, T, 4).to([torch.half, torch.bfloat16][odd]),
    ):
        for function, widths in ((parallel.halo, (2, 1)), (parallel.gather_frames, ())):
            leaf = x.clone().requires_grad_()
            results = function(leaf, *widths, group, counts)
            results = results if isinstance(results, tuple) else (results,)
            assert_all_nan(function.__name__, *results)
            sum(result.sum() for result in results).backward()
            assert_all_nan(f"gradient of {function.__name__}", leaf.grad)
    mask = torch.rand(2, T) > 0.5
    whole = parallel.gather_frames(mask, group, counts)  # a dtype without NaN, of odd size
    assert whole[:, rank * T : (rank + 1) * T].equal(mask)
    for function, call in ((parallel.broadcast, "a"), (parallel.sum_over_ranks, "b")):
        for differ in (False, True):
            mine = parallel.Call(call, {"option": differ and odd}, T)
            arguments = (size - 1, group) if function is parallel.broadcast else (group,)
            (result,) = function([torch.ones(3)], *arguments, mine)
            seen = differ and not (odd and function is parallel.broadcast)  # a source receives nothing
            assert bool(result.isnan().all() if seen else result.isfinite().all())


def model(rank: int, size: int) -> None:
    counts, odd = [T] * size, rank == size - 1
    dit = parallelize(tiny_model(torch.float32), dist.group.WORLD)
    inputs = tiny_inputs(T, torch.float32)
    dit(**inputs)
    turned = {"hidden_states": inputs["hidden_states"].transpose(3, 4)}
    text = {name: inputs[name][:, :3] for name in ("encoder_hidden_states", "encoder_attention_mask")}
    for name, keywords in {"h and w": turned, "text": text, "chunk_frames": {"chunk_frames": 2}}.items():
        with torch.no_grad():
            sample = dit(**{**inputs, **(keywords if odd else {})}, frames_per_rank=counts).sample
        assert_all_nan(name, sample)


def everything_else(rank: int, size: int) -> None:
    for check in (primitive, layer, frames, model):
        check(rank, size)


@pytest.mark.parametrize("size", [2, 3])
def test_every_message_tells_that_it_belongs_to_another_call(size: int) -> None:
    run_ranks(size, everything_else)


# --- first calls --------------------------------------------------------------------------------------------------


def first_calls(rank: int, size: int) -> None:
    odd = rank == size - 1

    def told(
        said: str, function: Callable[..., object], *arguments: Any, own: str | None = None, **keywords: Any
    ) -> None:
        """The call is an error on every rank of a group that made none before, and says why."""
        group = dist.new_group(list(range(size)))
        if isinstance(function, torch.nn.Module):
            parallelize(function, group)
        else:
            keywords["group"] = group
        with pytest.raises(Exception) as raised:
            function(*arguments, **keywords)
        assert odd or raised.type is ValueError
        assert said in str(raised.value), f"rank {rank}: {raised.value}"
        assert odd or own is None or own in str(raised.value)

    refused = f"rank {size - 1} of the group refused its input"
    x = tokens(rank)
    wrong = {"initial_state": {"S": 1}} if odd else {}
    told("initial_state must be", bidirectional_gdn, **{**x, **wrong}, own=refused)
    told("frames", bidirectional_gdn, **x, frames_per_rank=[T] * (size - 1) + [T + odd], own=refused)
    told("gather must be", cp_frame_gdn_scan, **transitions(rank), gather="mpi" if odd else "list", own=refused)

    attention, seen = BidirectionalGDN(H * D, H, conv_kernel_size=3 if odd else 4), torch.rand(B, T * S, H * D)
    told("disagree on conv_kernel_size: ", attention, seen, T)
    attention = BidirectionalGDN(H * D, H)
    told("disagree on tokens a frame: ", attention, torch.rand(B, T * S * (1 + odd), H * D), T)
    bad = {"state": GDNState(torch.ones(B, H, D + 1, D + 1), torch.ones(B, H, D + 1))} if odd else {}
    told("state.S must be", attention, seen, T, **bad, frames_per_rank=[T] * size, own=refused)
    told("frames_per_rank", attention, seen, T, frames_per_rank=[T] * (size - 1) + [T + odd], own=refused)
    attention.backend = "cuda" if odd else "auto"
    told("backend must be", attention, seen, T, frames_per_rank=[T] * size, own=refused)

    inputs = tiny_inputs(T, torch.float32)
    latents, text = inputs["hidden_states"], inputs["encoder_hidden_states"]
    dit = tiny_model(torch.float32)
    told("disagree on hidden_states: ", dit, **{**inputs, "hidden_states": latents[..., : 4 if odd else 6]})
    told(
        "encoder_hidden_states must be", dit, **{**inputs, "encoder_hidden_states": text[..., : 6 - odd]}, own=refused
    )
    shorter = {name: inputs[name][:, : 4 - odd] for name in ("encoder_hidden_states", "encoder_attention_mask")}
    told("disagree on encoder_hidden_states: ", dit, **{**inputs, **shorter})
    told("disagree on conv_kernel_size: ", tiny_model(torch.float32, conv_kernel_size=3 + odd), **inputs)
    told("disagree on left: ", parallel.halo, torch.rand(2, T, 4), 1 + odd, 1)

    def fails(group: Any, error: Exception) -> None:
        with parallel.checked(group):
            if odd:
                raise error
        parallel.agree(parallel.Call("fails", {}, T), group, None, positions=False, check=False)

    for error in (KeyError("a head"), TypeError("a head"), RuntimeError("a head"), IndexError("a head")):
        told("a head", fails, error=error, own=f"{refused}, rank {rank} stops with it: {type(error).__name__}: ")


@pytest.mark.parametrize("size", [2, 3])
def test_whatever_one_rank_refuses_on_a_first_call_is_an_error_on_all_that_says_why(size: int) -> None:
    run_ranks(size, first_calls)
