"""Ranks that make different calls: a named error where a handshake is due, NaN everywhere else, never a finite result.

Every case is a row of a table: how the last rank's call differs from the others'. A spawn runs a whole table.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from frame_gdn import (
    GDNState,
    bidirectional_gdn,
    parallel,
)
from tests.distributed.helpers import run_ranks

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
