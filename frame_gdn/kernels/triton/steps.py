"""The Triton backend: the local steps of the frame scan as fused kernels, forward and backward.

Offers the steps of `types.Backend` for bfloat16, float16 and float32 tokens of D <= 256 on a GPU (or in Triton's
interpreter). A step is one launch, and no step waits for the device:

- `transitions` reads k and v once and writes each frame's A, U and A°, u°;
- `scan_states` runs both directions of both states at once;
- `project` adds the two directions and multiplies each frame's queries once;
- the backward is the same three with time reversed; what the forward built is built again.

No shape falls back to plain PyTorch; with 99 KiB of shared memory a block every launch has a tile that fits.

Layouts, ROWS = D + 1 rows of which the last is the denominator's (ROWS = D without one):
    A     (1 or 2, B, H, T, D, D)   W = g (I - A); the second for the denominator, absent where its keys are the same
    g     (B, H, T)                 the decay, or 1 in a padded frame
    U, states, adjoints (B, H, T, ROWS, D)
W, S and every sum are float32.

Precision. bfloat16 tokens: products of tokens in bfloat16; where a state takes part, in float16 scaled by powers of
two, which holds as many bits as TF32 in half the bytes, and so A is stored in float16. float16 tokens: the same, but A
in float32 and states multiplied as three TF32 products. float32 tokens, and every dtype with precision="exact":
float32's accuracy throughout, as three TF32 products. The primitive's are too, but for its transitions' diagonals,
which are multiplied apart in float32: see `scan._times_square`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..plain import product
from ..types import Edges, Inputs, States
from . import chains, projection, scan, transitions
from .launch import Settings
from .scan import FactoredTransitions


@dataclass(frozen=True)
class TritonSteps(Settings):
    """The steps of `types.Backend`, each by the file of its name."""

    def transitions(self, x: Inputs, normalize: bool) -> FactoredTransitions:
        return transitions.transitions(self, x, normalize)

    def transitions_backward(
        self, x: Inputs, tr: FactoredTransitions, entering: Edges, states: States, adjoint: States
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return transitions.transitions_backward(self, x, tr, entering, states, adjoint)

    def shard_transitions(self, tr: FactoredTransitions) -> list[Tensor]:
        return scan.shard_transitions(self, tr)

    def scan_states(
        self, tr: FactoredTransitions, entering: Edges, ends: Sequence[bool], reverse: bool
    ) -> tuple[States, Edges]:
        return scan.scan_states(self, tr, entering, ends, reverse)

    def scan_states_adjoint(
        self, tr: FactoredTransitions, dX: Tensor, dx: Tensor | None, entering: Edges, ends: Sequence[bool],
        reverse: bool,
    ) -> tuple[States, Edges]:  # fmt: skip
        return scan.scan_states_adjoint(self, tr, dX, dx, entering, ends, reverse)

    def leaving(self, tr: FactoredTransitions, entering: Edges, ends: Sequence[bool], reverse: bool) -> Edges:
        return scan.leaving(self, tr, entering, ends, reverse)

    def leaving_adjoint(
        self, tr: FactoredTransitions, dX: Tensor, dx: Tensor | None, ends: Sequence[bool], reverse: bool
    ) -> Edges:
        return scan.leaving_adjoint(self, tr, dX, dx, ends, reverse)

    def project(self, x: Inputs, states: States, eps: float) -> Tensor:
        return projection.project(self, x, states, eps)

    def project_backward(
        self, dout: Tensor, x: Inputs, states: States, eps: float
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
        return projection.project_backward(self, dout, x, states, eps)

    def scans(self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]:
        return chains.scans(self, A, B, initial)

    def scans_adjoint(
        self, A: Sequence[Tensor], dX: Sequence[Tensor], entering: Sequence[Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor]]:
        return chains.scans_adjoint(self, A, dX, entering)

    def last_states(self, A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]:
        return chains.last_states(self, A, B, initial)

    def product(self, A: Tensor) -> Tensor:
        return product(A)


#: By precision; made once, since torch.compile does not trace how they are made.
STEPS = {"default": TritonSteps(), "exact": TritonSteps(exact=True)}
