"""The frame scan and its autograd: local steps of a backend, one exchange between ranks forward, one backward.

Two functions stand here, and share the exchange: `gdn_scan` from tokens to output (both directions, both states), and
`frame_scan` from given transitions to states (the primitive). Shapes are checked by their callers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import differentiable, parallel
from .agreement import Call
from .chunks import ChunkGrid
from .kernels import transforms
from .kernels.plain import states_before
from .kernels.products import exact_matmul, without_autocast
from .kernels.types import Backend, BuiltTransitions, Edges, Inputs, States, accumulation_dtype


def chunk_ends(
    grid: ChunkGrid, frames: int, rank: int, counts: Sequence[int] | None
) -> tuple[list[bool], list[bool] | None]:
    """Which local frames are the last of their chunk; and by rank, whether a shard holds no such frame."""
    if grid.chunk_frames is None:
        return [False] * frames, None
    if grid.is_causal or counts is None:
        return [True] * frames, None
    ends = [grid.ends(sum(counts[:r]), sum(counts)) for r in range(len(counts))]
    passes = [end is None or end.count(n) == 0 for end, n in zip(ends, counts, strict=True)]
    own = ends[rank]
    return [False] * frames if own is None else own.flags(frames), passes


@dataclass(frozen=True)
class GDNOptions:
    """How one call of `gdn_scan` runs. `ends`: by local frame, is it the last of its chunk; `passes`: by rank, holds
    no end; `call`: what the ranks of a group compare their messages by, None without a group."""

    normalize: bool
    eps: float
    reverse: bool
    ends: Sequence[bool]
    passes: Sequence[bool] | None
    group: ProcessGroup | None
    output_final_state: bool
    backend: Backend[Any]
    call: Call | None = None


class _GDNScan(torch.autograd.Function):
    """Saved: the inputs, both directions' states, and the transitions gathered from other ranks (so that the backward
    exchange sends states alone). W and U are built again in backward: they cost less to make than to keep."""

    @staticmethod
    def forward(
        ctx: Any, options: GDNOptions, S0: Tensor | None, z0: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        x, steps, group = Inputs(*tensors), options.backend, options.group  # type: ignore[arg-type]
        with without_autocast(x.q.device):
            tr = steps.transitions(x, options.normalize)
            rank, size = parallel.rank_and_size(group)
            entering = Edges(S0, z0, None, None) if rank == 0 else Edges(None, None, None, None)
            kept: list[Tensor] = []
            final: list[Tensor] = []
            if group is not None and size > 1:
                leaving = steps.leaving(tr, entering, options.ends, options.reverse)
                entering, final, kept = _exchange(tr, leaving, entering, options, steps)
            states, leaving = steps.scan_states(tr, entering, options.ends, options.reverse)
            if group is None or size == 1:
                final = _pair(leaving.S, leaving.z)
            out = steps.project(x, states, options.eps)
        ctx.options, ctx.kept = options, len(kept)
        ctx.save_for_backward(*x, *states, *entering, *kept)
        if not options.output_final_state:
            return out, None, None
        S = _filled(final[0] if final else None, x, matrix=True)
        return out, S, _filled(final[1] if len(final) > 1 else None, x, matrix=False) if options.normalize else None

    @staticmethod
    def backward(ctx: Any, dout: Tensor, dS: Tensor | None, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        options: GDNOptions = ctx.options
        saved = ctx.saved_tensors
        x, states, entering, kept = Inputs(*saved[:10]), States(*saved[10:14]), Edges(*saved[14:18]), list(saved[18:])
        if torch.is_grad_enabled():  # create_graph=True
            _refuse_ranks(options.group)
            found = differentiable.gdn_gradients(
                (entering.S, entering.z, *x), ctx.needs_input_grad[1:], (dout, dS, dz), options.ends,
                options.normalize, options.eps,
            )  # fmt: skip
            return (None, *found)
        dS0, dz0, *grads = gdn_scan_backward(dout, Edges(dS, dz, None, None), x, states, entering, kept, options)
        needs = ctx.needs_input_grad
        return (None, dS0 if needs[1] else None, dz0 if needs[2] else None, *grads, None, None, None)


def gdn_scan_backward(
    dout: Tensor,
    arriving: Edges,
    x: Inputs,
    states: States | None,
    entering: Edges,
    kept: list[Tensor],
    options: GDNOptions,
) -> tuple[Tensor | None, ...]:
    """Gradients of S0, z0, q, k, v, beta, decay, q_rot, k_rot: the one backward pass, of autograd and of `ops.py`.

    Args:
        dout, arriving: gradients of the output and, as S and z, of the final state.
        states: what the forward pass made; None has them made again (one process only).
        entering, kept: the states that entered this shard, and the transitions gathered from other ranks.
    """
    steps, group = options.backend, options.group
    with without_autocast(x.q.device):
        tr = steps.transitions(x, options.normalize)
        if states is None:
            states, _ = steps.scan_states(tr, entering, options.ends, options.reverse)
        dq, dq_rot, dX, dx = steps.project_backward(dout, x, states, options.eps)
        rank, size = parallel.rank_and_size(group)
        if group is not None and size > 1:
            leaving = steps.leaving_adjoint(tr, dX, dx, options.ends, options.reverse)
            arriving = _exchange_adjoint(tr, leaving, arriving, kept, options, steps)
        adjoint, leaving = steps.scan_states_adjoint(tr, dX, dx, arriving, options.ends, options.reverse)
        dk, dv, dbeta, ddecay, dk_rot = steps.transitions_backward(x, tr, entering, states, adjoint)
    assert leaving.S is not None
    dS0, dz0 = leaving.S, leaving.z
    if rank > 0:  # the initial state enters at the first rank
        dS0, dz0 = torch.zeros_like(dS0), None if dz0 is None else torch.zeros_like(dz0)
    return dS0, dz0, dq, dk, dv, dbeta, ddecay, dq_rot, dk_rot


def _pair(*states: Tensor | None) -> list[Tensor]:
    return [state for state in states if state is not None]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """a + b, where None is zero."""
    return b if a is None else a if b is None else a + b


def _filled(state: Tensor | None, x: Inputs, matrix: bool) -> Tensor:
    """A final state of its own memory (never a view of what is saved); zeros where no frame and no state made one."""
    if state is not None:
        return state.clone()
    B, _, H, D = x.q.shape
    return x.q.new_zeros((B, H, D, D) if matrix else (B, H, D), dtype=accumulation_dtype(x.q.dtype))


def _rows(states: Sequence[Tensor | None]) -> list[Tensor]:
    """States as chains of rows: S (.., D, D) as it is, z (.., D) as one row."""
    return [s if i == 0 else s.unsqueeze(-2) for i, s in enumerate(states) if s is not None]


def _edges(rightward: Sequence[Tensor], leftward: Sequence[Tensor]) -> list[Tensor | None]:
    """The way back: four entries S, z, R, y, None where there is no such chain."""
    found: list[Tensor | None] = []
    for chains in (rightward, leftward):
        found.append(chains[0] if chains else None)
        found.append(chains[1].squeeze(-2) if len(chains) > 1 else None)
    return found


def _exchange(
    tr: BuiltTransitions, leaving: Edges, entering: Edges, options: GDNOptions, steps: Backend[BuiltTransitions]
) -> tuple[Edges, list[Tensor], list[Tensor]]:
    """Forward: the states that enter this shard on both sides, the clip's final state, the transitions to keep."""
    assert options.group is not None
    transitions = steps.shard_transitions(tr)
    came = parallel.exchange(
        transitions,
        _rows((leaving.S, leaving.z)),
        _rows((leaving.R, leaving.y)) if options.reverse else [],
        options.group,
        leftward_open=options.passes,
        total=options.output_final_state,
        call=options.call,
    )
    # What arrives at the first rank is 0, or NaN where the ranks make different calls.
    S, z, R, y = _edges(came.rightward, came.leftward)
    S, z = _sum(entering.S, S), _sum(entering.z, z)
    return Edges(S, z, R, y), _pair(*_edges(came.total, [])[:2]), came.kept


def _exchange_adjoint(
    tr: BuiltTransitions,
    leaving: Edges,
    final: Edges,
    kept: list[Tensor],
    options: GDNOptions,
    steps: Backend[BuiltTransitions],
) -> Edges:
    """Backward: the adjoints of S, z come from later ranks, those of R, y from earlier ones; Wᵀ in place of W."""
    assert options.group is not None
    transitions = kept or steps.shard_transitions(tr)
    gave_final = options.output_final_state
    came = parallel.exchange(
        transitions,
        _rows((leaving.R, leaving.y)) if options.reverse else [],
        _rows((leaving.S, leaving.z)),
        options.group,
        kept=kept,
        rightward_open=options.passes,
        leftward_initial=_rows((final.S, final.z)) if gave_final else [],
        call=None if options.call is None else options.call.also(backward=True),
    )
    R, y, S, z = _edges(came.rightward, came.leftward)
    return Edges(S, z, R, y)


def _refuse_ranks(group: ProcessGroup | None) -> None:
    if group is not None and parallel.rank_and_size(group)[1] > 1:
        raise NotImplementedError(
            "over ranks the frame scan has first derivatives in reverse alone: no torch.func transform, forward-mode "
            "differentiation or create_graph=True"
        )


def gdn_scan(
    x: Inputs, S0: Tensor | None, z0: Tensor | None, options: GDNOptions
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens to output, differentiable in every input: (B, N, H, D), and the final S and z where they are asked
    for.

    Raises NotImplementedError over ranks within a transform of `torch.func` or forward-mode differentiation, and in a
    backward pass with create_graph=True: the exchange between ranks has no rule for them.
    """
    if transforms.are_active():
        _refuse_ranks(options.group)
        result, S, z = differentiable.gdn(x, S0, z0, options.ends, options.normalize, options.eps)
        return (result, S, z if options.normalize else None) if options.output_final_state else (result, None, None)
    out: tuple[Tensor, Tensor | None, Tensor | None] = _GDNScan.apply(options, S0, z0, *x)  # type: ignore[no-untyped-call]
    return out


# --- the primitive's scan ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScanOptions:
    """How one call of `frame_scan` runs. `terminal`: (rank, local position) of the frame whose state all ranks
    receive; `call`: what the ranks of a group compare their messages by."""

    reverse: bool
    group: ProcessGroup | None
    gather: str
    terminal: tuple[int, int] | None
    backend: Backend[Any]
    call: Call


class _OnceDifferentiable(torch.autograd.Function):
    """Gradients as they are, whose own derivatives are an error.

    torch's decorator of this name lets them pass silently where the gradients that came in have no graph.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            "cp_frame_gdn_scan is once_differentiable in reverse: higher derivatives are had within torch.func.grad"
        )


class _FrameScan(torch.autograd.Function):
    """X_t = X_{t-1} A_t + B_t for two chains at once. Saved: A and every X, from which dA = X_{t-1}ᵀ G and dB = G."""

    @staticmethod
    def forward(
        ctx: Any, options: ScanOptions, A0: Tensor, A1: Tensor, B0: Tensor, B1: Tensor, *initial: Tensor | None
    ) -> tuple[Tensor, ...]:
        A, B = (A0, A1), (B0, B1)
        steps, group = options.backend, options.group
        rank, size = parallel.rank_and_size(group)
        first = size - 1 if options.reverse else 0
        entering: list[Tensor | None] = list(initial) if rank == first else [None, None]
        kept: list[Tensor] = []
        with without_autocast(A0.device):
            if group is not None and size > 1:
                M = [steps.product(a) for a in A]
                h = steps.last_states(A, B, entering)
                came = parallel.exchange(
                    [m.mT.contiguous() for m in M] if options.reverse else M,
                    [] if options.reverse else h,
                    h if options.reverse else [],
                    group,
                    gather=options.gather,
                    call=options.call,
                )
                kept = came.kept
                # What arrives at the first rank is 0, or NaN where the ranks make different calls.
                arrived = came.leftward if options.reverse else came.rightward
                entering = [_sum(own, other) for own, other in zip(entering, arrived, strict=True)]
            X = steps.scans(A, B, entering)
            ends: list[Tensor] = []
            if options.terminal is not None:
                owner, position = options.terminal
                ends = [x[:, position].clone() if rank == owner else x.new_empty(x.shape[0], *x.shape[2:]) for x in X]
                if group is not None and size > 1:
                    ends = parallel.broadcast(ends, owner, group, options.call.also(terminal=True))
        ctx.options, ctx.kept = options, len(kept)
        ctx.save_for_backward(*A, *X, *entering, *kept)
        return (*X, *ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            found = _FrameScan._gradients(ctx, *grads)
        if not torch.is_grad_enabled():
            return found
        anchor = torch.zeros((), requires_grad=True)  # create_graph=True: whoever differentiates again is told
        given = [grad for grad in found if grad is not None]
        marked = iter(_OnceDifferentiable.apply(anchor, *given))  # type: ignore[no-untyped-call]
        return tuple(None if grad is None else next(marked) for grad in found)

    @staticmethod
    def _gradients(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        options: ScanOptions = ctx.options
        steps, group = options.backend, options.group
        saved = ctx.saved_tensors
        A, X, entering, kept = saved[0:2], saved[2:4], saved[4:6], list(saved[6:])
        rank, size = parallel.rank_and_size(group)
        dX, ends = list(grads[:2]), list(grads[2:])
        with without_autocast(A[0].device):
            if options.terminal is not None:
                owner, position = options.terminal
                if group is not None and size > 1:
                    ends = parallel.sum_over_ranks(ends, group, options.call.also(terminal=True, backward=True))
                if rank == owner:
                    dX = [d.clone() for d in dX]
                    for d, end in zip(dX, ends, strict=True):
                        d[:, position] += end
            arriving: list[Tensor | None] = [None, None]
            if group is not None and size > 1:
                h = steps.scans_adjoint(A, dX, [None, None])[1]
                M = kept or [steps.product(a) for a in A]
                if not kept and options.reverse:
                    M = [m.mT.contiguous() for m in M]
                came = parallel.exchange(
                    M,
                    h if options.reverse else [],
                    [] if options.reverse else h,
                    group,
                    gather=options.gather,
                    kept=kept,
                    call=options.call.also(backward=True),
                )
                arriving = list(came.rightward if options.reverse else came.leftward)
            G, leaving = steps.scans_adjoint(A, dX, arriving)
            dA = [exact_matmul(states_before(x, e, dim=1).mT, g) for x, e, g in zip(X, entering, G, strict=True)]
        first = size - 1 if options.reverse else 0
        dinitial = [
            None if not needed else d if rank == first else torch.zeros_like(d)
            for needed, d in zip(ctx.needs_input_grad[5:7], leaving, strict=True)
        ]
        return (None, *dA, *G, *dinitial)


def frame_scan(
    A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None], options: ScanOptions
) -> tuple[Tensor, ...]:
    """Two chains X_t = X_{t-1} A_t + B_t over the ranks: A (BH, T, D, D), B (BH, T, R, D), initial (BH, R, D) or None.

    Returns both chains' X (BH, T, R, D), then their terminal states (BH, R, D) where `options.terminal` names a frame.
    Raises as `gdn_scan`, and in a backward pass with create_graph=True on one process too.
    """
    if transforms.are_active():
        _refuse_ranks(options.group)
        X = tuple(differentiable.chain(a, b, state) for a, b, state in zip(A, B, initial, strict=True))
        return X if options.terminal is None else (*X, *(x[:, options.terminal[1]] for x in X))
    out: tuple[Tensor, ...] = _FrameScan.apply(options, *A, *B, *initial)  # type: ignore[no-untyped-call]
    return out
