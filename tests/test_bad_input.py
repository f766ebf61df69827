"""Every public name refuses what it cannot use: a table of wrong arguments, each a ValueError that names the argument,
what came and what was wanted.

A door is a public call with arguments that work. For each argument the table says what is wanted of it; a kind of
argument brings its own wrong values, so a row is an argument, not a value.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn

from frame_gdn import (
    BidirectionalGDN,
    FrameGDNRolloutPipeline,
    GDNState,
    RolloutState,
    bidirectional_gdn,
    checks,
    cp_frame_gdn_scan,
    parallelize,
    swap,
    unswap,
)
from frame_gdn.layer import main_branch_state_dict
from models import VideoDiT
from tests.hosts import warm_start
from tests.models.helpers import TINY, tiny_inputs, tiny_model

B, T, S, H, D = 2, 3, 2, 2, 4
N, C = T * S, H * D

# --- kinds of arguments: the values that each refuses ---------------------------------------------------------------

NOT_A_TENSOR = ["text", 3, [1.0], np.zeros(2), object()]
NOT_AN_INT = [2.0, True, "2", [2], math.nan, torch.tensor(2), 1j]
NOT_A_NUMBER = ["1e-5", [1.0], True, 1j, math.nan, math.inf, -math.inf]


@dataclass(frozen=True)
class Kind:
    """What is `wanted` of an argument, in words of the message (or "these|or those"); `values` that are not that, and
    `changes` that make such a value of one that works."""

    wanted: str
    values: list[Any]
    changes: list[Callable[[Any], Any]]

    def __or__(self, values: list[Any]) -> "Kind":
        return Kind(self.wanted, [*self.values, *values], self.changes)


def of(wanted: str, *values: Any) -> Kind:
    return Kind(wanted, list(values), [])


def made(kind: Kind, *changes: Callable[[Any], Any]) -> Kind:
    return Kind(kind.wanted, kind.values, [*kind.changes, *changes])


def required(kind: Kind) -> Kind:
    return kind | [None]


def tensor(wanted: str, *, sizes: tuple[int, ...] = (), dtypes: tuple[torch.dtype, ...] = ()) -> Kind:
    """A tensor; `sizes` are the dimensions of which no other size will do."""
    changes: list[Callable[[Tensor], Tensor]] = [lambda t: t[None], torch.flatten, Tensor.to_sparse]
    changes.append(lambda t: t.to("meta"))
    for dtype in dtypes or (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        changes.append(lambda t, dtype=dtype: t.to(dtype))
    for dim in sizes:
        changes.append(lambda t, dim=dim: t.narrow(dim, 0, t.shape[dim] - 1))
        changes.append(lambda t, dim=dim: torch.cat([t, t], dim))
    return Kind(wanted, NOT_A_TENSOR, changes)


def count(least: int = 1, also: str = "") -> Kind:
    return of(f"an int from {least}{also}", least - 1, -7, *NOT_AN_INT)


def number(*also: float) -> Kind:
    return of("a finite number", -1.0, *also, *NOT_A_NUMBER)


FLAG = of("True or False", "yes", 1, 0, None, [], torch.tensor(True))
MASK = {"dtypes": (torch.complex64,)}
BACKEND = of("torch, triton, auto", "tritn", "", None, 3, True, ["torch"])
GROUP = of("a process group", "cp", 0, object(), [0])
COUNTS = of("frames_per_rank", "3", 3, [3.0], [True], ["3"], [None], {0: 3}, torch.tensor([3]), [], [1, 2], [-3])
STATE = of(
    "a GDNState|(2, 2, 4, 4)|(2, 3, 2, 8)|no conv_tail",
    "state",
    3,
    {},
    {"S": 1},
    (torch.zeros(B, H, D, D), torch.zeros(B, H, D)),
)
ROTARY = of("rotary", 3, "x", torch.zeros(N, D), (torch.zeros(N, 2),), (torch.zeros(N, 2),) * 4) | [
    (None, None),
    [1, 2],
    (torch.zeros(N, D), torch.zeros(N, D)),
    (torch.zeros(N, 2), torch.zeros(N, 2, dtype=torch.int64)),
    (torch.zeros(N, 2), torch.zeros(N, 2, device="meta")),
]

# --- doors: a call, arguments that work, and what is wanted of each -----------------------------------------------


@dataclass(frozen=True)
class Door:
    call: Callable[..., Any]
    good: Callable[[], dict[str, Any]]
    arguments: dict[str, Kind]


def gdn_tensors() -> dict[str, Any]:
    tokens, gates = torch.rand(3, B, N, H, D), torch.rand(B, N, H)
    return {**dict(zip("qkv", tokens, strict=True)), "beta": gates, "decay": torch.rand(B, T, H)}


def gdn_arguments() -> dict[str, Any]:
    tokens = torch.rand(B, N, H, D)
    return {**gdn_tensors(), "q_rot": tokens, "k_rot": tokens, "mask": torch.ones(B, T, dtype=torch.bool)}


def scan_arguments() -> dict[str, Any]:
    matrices = torch.rand(3, 4, T, D, D)
    return {**dict(zip(("W_kv", "U_kv", "W_z"), matrices, strict=True)), "U_z": torch.rand(4, T, D)}


def state(frames: int = 0, width: int = D, tail: Tensor | None = None, device: str = "cpu") -> GDNState:
    return GDNState(torch.rand(B, H, width, width), torch.rand(B, H, width), frames, tail).to(device)


@functools.cache
def stock(host: str) -> nn.Module:
    """A transformer of diffusers; a refusal leaves it as it is."""
    return warm_start.tiny_model(host)


@functools.cache
def layer() -> BidirectionalGDN:
    return BidirectionalGDN(C, H)


@functools.cache
def dit(**overrides: Any) -> VideoDiT:
    return tiny_model(torch.float32, **{"chunk_frames": 2, "out_channels": 3, **overrides})


def dit_inputs(frames: int = 2) -> dict[str, Any]:
    inputs = tiny_inputs(frames, torch.float32)
    return {**inputs, "frame_mask": torch.ones(2, frames, dtype=torch.bool)}


@torch.no_grad()
def dit_state(frames: int = 2, width: int = 6, **overrides: Any) -> RolloutState:
    inputs = tiny_inputs(frames, torch.float32)
    inputs["hidden_states"] = inputs["hidden_states"][..., :width]
    return dit(**overrides)(**inputs, output_state=True).state


@functools.cache
def pipeline() -> FrameGDNRolloutPipeline:
    pipe = FrameGDNRolloutPipeline(dit(), FlowMatchEulerDiscreteScheduler())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def pipeline_arguments() -> dict[str, Any]:
    inputs = tiny_inputs(2, torch.float32)
    text = {"prompt_embeds": "encoder_hidden_states", "prompt_attention_mask": "encoder_attention_mask"}
    return {
        "first_frames": inputs["hidden_states"],
        "num_chunks": 1,
        "num_inference_steps": 1,
        **{name: inputs[theirs] for name, theirs in text.items()},
    }


PIPELINE = {
    "first_frames": required(
        tensor("(B, 3, T, h, w)|a multiple of chunk_frames|multiples of patch_size|(1, L, 6)|with data", sizes=(1,))
        | [torch.zeros(2, 3, 3, 4, 6)]
    )
    | [torch.zeros(2, 3, 0, 4, 6), torch.zeros(2, 3, 2, 5, 6), torch.zeros(2, 3, 2, 4, 7)],
    "num_chunks": count(),
    "num_inference_steps": required(count() | [1001]),
    "generator": of("torch.Generator", 0, "x", [1, 2], [torch.Generator()], torch.Generator, np.random.default_rng(0)),
    "prompt_embeds": required(tensor("prompt_embeds", sizes=(0, 1, 2))),
    "prompt_attention_mask": tensor("(2, 4)", sizes=(0, 1), **MASK),
}
SIZES = ("in_channels", "patch_size", "num_attention_heads", "attention_head_dim")
OPTIONAL_SIZES = ("out_channels", "cross_attention_dim", "chunk_frames")

DOORS = {
    "bidirectional_gdn": Door(
        bidirectional_gdn,
        gdn_arguments,
        {
            "q": required(tensor("(|multiple", sizes=(0, 1, 2, 3), dtypes=(torch.int64, torch.bool, torch.float64))),
            **{name: required(tensor("(2, 6, 2, 4)", sizes=(0, 1, 2, 3))) for name in ("k", "v")},
            **{name: tensor("(2, 6, 2, 4)", sizes=(0, 1, 2, 3)) for name in ("q_rot", "k_rot")},
            "beta": required(tensor("(2, 6, 2)", sizes=(0, 1, 2))),
            "decay": required(tensor("", sizes=(0, 2)) | [torch.ones(B, 4, H), torch.ones(B, 0, H)]),
            "mask": tensor("(2, 3) of bool", sizes=(0, 1), dtypes=(torch.float32, torch.int64, torch.complex64)),
            "chunk_frames": count(),
            "initial_state": STATE | [state(width=D + 1), state(device="meta")],
            **dict.fromkeys(("output_final_state", "normalize", "check"), FLAG),
            "eps": required(number()),
            "group": GROUP,
            "frames_per_rank": COUNTS,
            "backend": BACKEND,
            "precision": of("default, exact", "fast", None, 3),
        },
    ),
    "bidirectional_gdn, rotary": Door(bidirectional_gdn, gdn_tensors, {"rotary": ROTARY}),
    "cp_frame_gdn_scan": Door(
        cp_frame_gdn_scan,
        scan_arguments,
        {
            "W_kv": required(tensor("(", sizes=(0, 1, 2, 3))),
            **{name: required(tensor("(4, 3, 4, 4)", sizes=(0, 1, 2, 3))) for name in ("U_kv", "W_z")},
            "U_z": required(tensor("(4, 3, 4)", sizes=(0, 1, 2))),
            "group": GROUP,
            "reverse": FLAG,
            "truncate_to_active": of("truncate_to_active must be", *NOT_AN_INT, 0, -1, T + 1),
            "initial_state": of("initial_state", "state", 3, {}, {"S": 1}, torch.rand(4, D, D), (None, None), state())
            | [(torch.rand(4, D, D),), (torch.rand(4, D, D),) * 2, (torch.rand(4, D, D).long(), torch.rand(4, D))],
            "frames_per_rank": COUNTS,
            "gather": of("collective, list, p2p", "p2", None, 3, ["list"], torch.tensor(1)),
            "backend": BACKEND,
        },
    ),
    "BidirectionalGDN": Door(
        BidirectionalGDN,
        lambda: {"hidden_size": C, "num_heads": H},
        {
            "hidden_size": required(count(also="|a multiple of num_heads") | [9]),
            "num_heads": required(count(also="|a multiple of num_heads") | [3, 16]),
            "conv_kernel_size": required(count(0)),
            "norm_eps": required(number()),
            "eps": required(number()),
            "group": GROUP,
            "backend": BACKEND,
        },
    ),
    "BidirectionalGDN.forward": Door(
        lambda **arguments: layer()(**arguments),
        lambda: {"x": torch.rand(B, N, C), "num_frames": T, "mask": torch.ones(B, T, dtype=torch.bool)},
        {
            "x": required(tensor("", sizes=(0, 2)) | [torch.rand(B, 7, C), torch.rand(B, N, C).double()]),
            "num_frames": required(count(0, also="|a multiple of num_frames") | [0, 4]),
            "rotary": ROTARY,
            "mask": tensor("(2, 3) of bool", sizes=(0, 1), dtypes=(torch.float32, torch.int64)),
            "state": STATE
            | [state(width=D + 1), state(device="meta"), state(frames=3)]
            | [state(tail=torch.rand(B, 2, S, C)), state(tail=torch.rand(B, 3, S + 1, C))],
            "output_final_state": FLAG,
            "chunk_frames": count(),
            "frames_per_rank": COUNTS,
        },
    ),
    "GDNState": Door(
        GDNState,
        lambda: {"S": torch.rand(B, H, D, D), "z": torch.rand(B, H, D), "conv_tail": torch.rand(B, 3, S, C)},
        {
            "S": required(tensor("(", sizes=(0, 1, 2, 3))),
            "z": required(tensor("(2, 2, 4)", sizes=(0, 1, 2))),
            "frames": required(count(0)),
            "conv_tail": tensor("(2, K-1, S, 8)", sizes=(0, 3)),
        },
    ),
    "GDNState.to": Door(
        lambda device: state().to(device),
        lambda: {"device": "cpu"},
        {"device": of("a device such as", "cudaa", None, 3.5, torch.float32, [])},
    ),
    "GDNState.from_state_dict": Door(
        GDNState.from_state_dict,
        lambda: {"saved": state(3).state_dict()},
        {
            "saved": of("S, z, frames", None, 3, "x", [], {}, {"S": torch.rand(B, H, D, D)})
            | [{**state().state_dict(), "conv_tial": torch.rand(B, 3, S, C)}]
        },
    ),
    "main_branch_state_dict": Door(
        main_branch_state_dict,
        lambda: {"state_dict": {}},
        {"state_dict": of("a mapping from names", None, 3, "x", [1], {1: torch.zeros(1)})},
    ),
    **{
        f"swap of {host}": Door(
            swap,
            lambda host=host: {"model": stock(host)},
            {
                "blocks": of("blocks must be", "0", 1, [], [99], [-1], [True], [1.0], ["0"], [None], {0: 1})
                | [torch.tensor([0]), np.array([0])],
                "start_scale": number(0.0),
                "chunk_frames": count(),
                "group": GROUP,
                "backend": BACKEND,
            },
        )
        for host in ("wan", "sana_video")
    },
    "swap": Door(
        swap, lambda: {"model": stock("wan")}, {"model": of("known are: SanaWM", None, "wan", 3, nn.Linear(2, 2), {})}
    ),
    "unswap": Door(
        unswap, lambda: {"model": stock("wan")}, {"model": of("known are: SanaWM", None, "wan", 3, nn.Linear(2, 2))}
    ),
    "parallelize": Door(
        parallelize,
        lambda: {"model": layer(), "mesh_or_group": None},
        {"model": of("", None, "wan", 3, nn.Linear(2, 2)), "mesh_or_group": GROUP},
    ),
    "FrameGDNRolloutPipeline": Door(
        FrameGDNRolloutPipeline,
        lambda: {"transformer": dit(), "scheduler": FlowMatchEulerDiscreteScheduler()},
        {
            "transformer": made(
                of("transformer", None, "x", 3, nn.Linear(2, 2)),
                lambda _: dit(chunk_frames=None),
                lambda _: stock("wan"),
            ),
            "scheduler": of("flow-matching", None, "x", 3, DDIMScheduler(), FlowMatchEulerDiscreteScheduler),
            "prediction_type": of("velocity, sample", "noise", None, 3, ["sample"]),
        },
    ),
    "pipeline()": Door(
        lambda **arguments: pipeline()(**arguments),
        pipeline_arguments,
        {**PIPELINE, "num_chunks": required(PIPELINE["num_chunks"])},
    ),
    "pipeline.stream": Door(lambda **arguments: next(pipeline().stream(**arguments)), pipeline_arguments, PIPELINE),
    "VideoDiT": Door(
        VideoDiT,
        lambda: dict(TINY),
        {
            **{name: required(count()) for name in SIZES},
            "attention_head_dim": required(count(also="|must be even") | [15]),
            **{name: count() for name in OPTIONAL_SIZES},
            **{name: required(count(0)) for name in ("num_layers", "softmax_every_n", "conv_kernel_size")},
            "ffn_expand_ratio": required(number(0.0, 1e-9)),
        },
    ),
    "VideoDiT.forward": Door(
        lambda **arguments: dit()(**arguments),
        dit_inputs,
        {
            "hidden_states": required(tensor("", sizes=(0, 1, 2)) | [torch.zeros(2, 3, 2, 5, 6)])
            | [torch.zeros(2, 3, 2, 4, 6, dtype=torch.float64)],
            "timestep": required(tensor("", sizes=(0, 1), dtypes=(torch.bool, torch.complex64)) | [torch.tensor(1.0)]),
            "encoder_hidden_states": required(tensor("encoder_hidden_states", sizes=(0, 1, 2))),
            "encoder_attention_mask": tensor("(2, 4)", sizes=(0, 1), **MASK),
            "frame_mask": tensor("(2, 2) of bool", sizes=(0, 1), dtypes=(torch.float32, torch.int64)),
            "chunk_frames": count(),
            "state": made(
                of("state", "x", 3, {}, state()),
                lambda _: dit_state().to("meta"),
                lambda _: dit_state(num_layers=2),
                lambda _: dit_state(softmax_every_n=0),
                lambda _: dit_state(frames=1),
                lambda _: dit_state(width=4),
                lambda _: dataclasses.replace(dit_state(), frames=-2),
            ),
            **dict.fromkeys(("output_state", "return_dict"), FLAG),
            "frames_per_rank": of("frames_per_rank", "2", 2, [2.0], [True], [3], [], {0: 2}),
        },
    ),
}

# --- the claims -----------------------------------------------------------------------------------------------------


def cases(door: Door, argument: str) -> Iterator[tuple[dict[str, Any], Any]]:
    """Arguments with one wrong value each, and that value."""
    kind = door.arguments[argument]
    for value in kind.values:
        yield {**door.good(), argument: value}, value
    for change in kind.changes:
        good = door.good()
        value = change(good.get(argument))
        yield {**good, argument: value}, value


def says(message: str, value: Any) -> bool:
    """Whether a message shows a value: a tensor's shape, its dtype and device where they are unusual; one of the parts
    of what has parts."""
    if isinstance(value, Tensor):
        unusual = {str(value.dtype).removeprefix("torch."), str(value.device)} - {"float32", "cpu"}
        return all(part in message for part in (str(tuple(value.shape)), *unusual))
    if checks.shown(value) in message or type(value).__name__ in message:
        return True
    if isinstance(value, dict):
        return str(sorted(map(str, value))) in message or any(f"{name!r}" in message for name in value)
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return isinstance(value, (list, tuple)) and any(says(message, item) for item in value)


@pytest.mark.parametrize("name", DOORS)
def test_the_arguments_of_the_table_work(name: str) -> None:
    DOORS[name].call(**DOORS[name].good())
    stock.cache_clear()  # those that were swapped


@pytest.mark.parametrize(
    "name, argument", [(name, argument) for name, door in DOORS.items() for argument in door.arguments]
)
def test_a_wrong_argument_is_a_value_error_that_names_it(name: str, argument: str) -> None:
    door = DOORS[name]
    for arguments, value in cases(door, argument):
        with pytest.raises(ValueError) as caught:
            door.call(**arguments)
            pytest.fail(f"{checks.shown(value)} was taken")
        message = str(caught.value)
        assert argument.removeprefix("mesh_or_") in message, f"{message} (of {argument})"
        wanted = door.arguments[argument].wanted
        assert any(words in message for words in wanted.split("|")), f"{message} (wanted {wanted})"
        assert says(message, value), f"{message} (got {checks.shown(value)})"


def test_the_table_is_long() -> None:
    rows = [kind for door in DOORS.values() for kind in door.arguments.values()]
    assert sum(len(kind.values) + len(kind.changes) for kind in rows) >= 800
