"""What the steps of the frame scan pass to one another, and the steps that a backend offers.

Shapes: tokens (B, N, H, D) with N = T·S frame-major, beta (B, N, H), decay (B, T, H), mask (B, T) bool.
Transitions and states (B, H, T, D, D) and (B, H, T, D); states that enter a shard lack the T.
Everything that is not a token is float32, or float64 where the tokens are.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """One shard's tokens and gates. q_rot and k_rot are what the numerator uses; None means the plain ones.

    cos, sin (N, D / 2): rotary tables for a backend that rotates inside its kernels; another is given q_rot, k_rot.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    q_rot: Tensor | None
    k_rot: Tensor | None
    mask: Tensor | None
    cos: Tensor | None = None
    sin: Tensor | None = None


class Transitions(NamedTuple):
    """W, U, W°, u° of every frame (a frame makes S W + U and W° z + u°); the last two None without a denominator."""

    W: Tensor
    U: Tensor
    W_z: Tensor | None
    u_z: Tensor | None


class Edges(NamedTuple):
    """States at the two edges of a shard: S, z on the side of frame 0, R, y on the side of frame T-1.

    The same four fields hold what enters a shard and what leaves it; None is zero.
    """

    S: Tensor | None
    z: Tensor | None
    R: Tensor | None
    y: Tensor | None


class States(NamedTuple):
    """What each frame's queries multiply: S, z after the frame (forward, inclusive); R, y of the frames after it
    (exclusive)."""

    S: Tensor
    z: Tensor | None
    R: Tensor | None
    y: Tensor | None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64, everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


#: What `transitions` leaves for the other steps of the same backend; nothing else looks into it.
BuiltTransitions = TypeVar("BuiltTransitions")


class Backend(Protocol[BuiltTransitions]):
    """The local steps of the frame scan on one shard, forward and backward.

    None of them communicates and none is differentiable by autograd: the backward of each step is a step of its own,
    and `scan.py` puts them together. `plain.py` says what each computes.
    """

    def transitions(self, x: Inputs, normalize: bool) -> BuiltTransitions: ...

    def transitions_backward(
        self, x: Inputs, tr: BuiltTransitions, entering: Edges, states: States, adjoint: States
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]: ...

    def shard_transitions(self, tr: BuiltTransitions) -> list[Tensor]: ...

    def scan_states(
        self, tr: BuiltTransitions, entering: Edges, ends: Sequence[bool], reverse: bool
    ) -> tuple[States, Edges]: ...

    def scan_states_adjoint(
        self,
        tr: BuiltTransitions,
        dX: Tensor,
        dx: Tensor | None,
        entering: Edges,
        ends: Sequence[bool],
        reverse: bool,
    ) -> tuple[States, Edges]: ...

    def leaving(self, tr: BuiltTransitions, entering: Edges, ends: Sequence[bool], reverse: bool) -> Edges: ...

    def leaving_adjoint(
        self, tr: BuiltTransitions, dX: Tensor, dx: Tensor | None, ends: Sequence[bool], reverse: bool
    ) -> Edges: ...

    def project(self, x: Inputs, states: States, eps: float) -> Tensor: ...

    def project_backward(
        self, dout: Tensor, x: Inputs, states: States, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]: ...

    def scans(self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]: ...

    def scans_adjoint(
        self, A: Sequence[Tensor], dX: Sequence[Tensor], entering: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]: ...

    def last_states(
        self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]
    ) -> list[Tensor]: ...

    def product(self, A: Tensor) -> Tensor: ...
