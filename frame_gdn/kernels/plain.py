"""The plain PyTorch backend: the local steps of the frame scan on one shard, forward and backward.

This module is a `types.Backend`, whose docstring says what its functions have in common; shapes as in `types.py`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .products import exact_matmul
from .types import Edges, Inputs, States, Transitions, accumulation_dtype

# --- tokens and transitions -------------------------------------------------------------------------------------


def _frames(x: Tensor, decay: Tensor, mask: Tensor | None) -> Tensor:
    """(B, N, H, D) -> (B, H, T, S, D) in the accumulation dtype; padded frames are selected away, not multiplied."""
    B, N, H, D = x.shape
    T = decay.shape[1]
    x = x.reshape(B, T, N // max(T, 1), H, D).permute(0, 3, 1, 2, 4).to(accumulation_dtype(x.dtype))
    return x if mask is None else torch.where(mask[:, None, :, None, None], x, 0.0)


def _tokens(x: Tensor, like: Tensor) -> Tensor:
    """(B, H, T, S, D) -> (B, N, H, D) in the dtype of `like`."""
    return x.permute(0, 2, 3, 1, 4).reshape(like.shape).to(like.dtype)


def _gates(x: Inputs) -> tuple[Tensor, Tensor]:
    """beta (B, H, T, S, 1) and decay (B, H, T, 1, 1); a padded frame writes nothing and decays nothing."""
    beta = _frames(x.beta.unsqueeze(-1), x.decay, x.mask).to(accumulation_dtype(x.q.dtype))
    decay = x.decay.to(beta.dtype)
    if x.mask is not None:
        decay = torch.where(x.mask[..., None], decay, 1.0)
    return beta, decay.permute(0, 2, 1)[..., None, None]


def transitions(x: Inputs, normalize: bool) -> Transitions:
    """W = g (I - K~ diag(beta) K~ᵀ), U = V diag(beta) K~ᵀ, and the same of the plain keys for the denominator."""
    beta, decay = _gates(x)
    k, v = _frames(x.k, x.decay, x.mask), _frames(x.v, x.decay, x.mask)
    k_rot = k if x.k_rot is None else _frames(x.k_rot, x.decay, x.mask)
    eye = torch.eye(k.shape[-1], dtype=k.dtype, device=k.device)
    written = k_rot * beta
    W = decay * (eye - exact_matmul(written.mT, k_rot))
    U = exact_matmul(v.mT, written)
    if not normalize:
        return Transitions(W, U, None, None)
    if x.k_rot is None:
        return Transitions(W, U, W, written.sum(-2))
    written = k * beta
    return Transitions(W, U, decay * (eye - exact_matmul(written.mT, k)), written.sum(-2))


def transitions_backward(
    x: Inputs, tr: Transitions | None, entering: Edges, states: States, adjoint: States
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of k, v, beta, decay, k_rot from the adjoint states; `tr` is not needed here.

    With G the adjoint of S_t and F that of R_t, dU = G + F and dW = S_{t-1}ᵀ G + R_{t+1}ᵀ F; the denominator's
    dW° has rank two and is never built.
    """
    beta, decay = _gates(x)
    k, v = _frames(x.k, x.decay, x.mask), _frames(x.v, x.decay, x.mask)
    k_rot = k if x.k_rot is None else _frames(x.k_rot, x.decay, x.mask)

    G, F = adjoint.S, adjoint.R
    dW = exact_matmul(states_before(states.S, entering.S).mT, G)
    dU = G
    if F is not None and states.R is not None:
        dW = dW + exact_matmul(states.R.mT, F)
        dU = dU + F
    k_dW = exact_matmul(k_rot, dW + dW.mT)  # each token's row: (dW + dWᵀ) k~
    k_dU = exact_matmul(k_rot, dU.mT)  # each token's row: dU k~
    quadratic = (k_dW * k_rot).sum(-1, keepdim=True) / 2  # k~ᵀ dW k~
    dv = k_dU * beta
    dk_rot = (exact_matmul(v, dU) - decay * k_dW) * beta
    dbeta = (v * k_dU).sum(-1, keepdim=True) - decay * quadratic
    ddecay = dW.diagonal(dim1=-2, dim2=-1).sum(-1) - (beta * quadratic).sum((-2, -1))

    dk = torch.zeros_like(k)
    z_before = None if states.z is None else states_before(states.z, entering.z)
    for state, adj in ((z_before, adjoint.z), (states.y, adjoint.y)):
        if state is None or adj is None:
            continue
        state, adj = state.unsqueeze(-2), adj.unsqueeze(-2)  # (B, H, T, 1, D)
        k_state, k_adj = exact_matmul(k, state.mT), exact_matmul(k, adj.mT)
        dk = dk + beta * (adj - decay * (adj * k_state + state * k_adj))
        dbeta = dbeta + k_adj - decay * k_state * k_adj
        ddecay = ddecay + ((state * adj).sum((-2, -1)) - (beta * k_state * k_adj).sum((-2, -1)))

    if x.mask is not None:
        active = x.mask[:, None, :, None, None]
        dk, dv, dk_rot, dbeta = (torch.where(active, d, 0.0) for d in (dk, dv, dk_rot, dbeta))
        ddecay = torch.where(x.mask[:, None], ddecay, 0.0)
    if x.k_rot is None:
        dk = dk + dk_rot
    return (
        _tokens(dk, x.k),
        _tokens(dv, x.v),
        _tokens(dbeta, x.beta.unsqueeze(-1)).squeeze(-1),
        ddecay.permute(0, 2, 1).to(x.decay.dtype).contiguous(),  # a compiled softplus backward trips over strides
        None if x.k_rot is None else _tokens(dk_rot, x.k_rot),
    )


# --- scans ------------------------------------------------------------------------------------------------------


def states_before(states: Tensor, entering: Tensor | None, dim: int = 2) -> Tensor:
    """The state before each frame of a forward scan: the one that entered, then all but the last."""
    T = states.shape[dim]
    first = torch.zeros_like(states.narrow(dim, 0, min(T, 1))) if entering is None else entering.unsqueeze(dim)
    return torch.cat([first, states.narrow(dim, 0, T - 1)], dim) if T else states


def scan(A: Tensor, B: Tensor, initial: Tensor | None) -> Tensor:
    """X_t = X_{t-1} A_t + B_t: A (..., T, D, D), B (..., T, R, D), initial (..., R, D) -> every X (..., T, R, D)."""
    out, state = torch.empty_like(B), initial
    for t in range(A.shape[-3]):
        state = B[..., t, :, :] if state is None else B[..., t, :, :] + exact_matmul(state, A[..., t, :, :])
        out[..., t, :, :] = state
    return out


def scan_adjoint(A: Tensor, dX: Tensor, entering: Tensor | None) -> tuple[Tensor, Tensor]:
    """G_t = dX_t + G_{t+1} A_{t+1}ᵀ, from the last frame to the first; `entering` is what later frames add to the
    last.

    Returns every G (..., T, R, D) and what leaves before frame 0, G_0 A_0ᵀ (..., R, D).
    """
    out = torch.empty_like(dX)
    carry = torch.zeros_like(dX[..., :1, :, :].sum(-3)) if entering is None else entering
    for t in reversed(range(A.shape[-3])):
        state = dX[..., t, :, :] + carry
        out[..., t, :, :] = state
        carry = exact_matmul(state, A[..., t, :, :].mT)
    return out, carry


def _reverse(A: Tensor, B: Tensor, entering: Tensor | None, ends: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """R_t = R_{t+1} A_t + B_t, with R_{t+1} replaced by 0 at a chunk's end: every R_{t+1}, and R_0 that leaves."""
    out = torch.empty_like(B)
    state = torch.zeros_like(B[..., :1, :, :].sum(-3)) if entering is None else entering
    for t in reversed(range(A.shape[-3])):
        if ends[t]:
            state = torch.zeros_like(state)
        out[..., t, :, :] = state
        state = exact_matmul(state, A[..., t, :, :]) + B[..., t, :, :]
    return out, state


def _reverse_adjoint(A: Tensor, dX: Tensor, entering: Tensor | None, ends: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """F_{t+1} = F_t A_tᵀ + dX_t, 0 after a chunk's end (A symmetric here): every F_t, and F_T that leaves."""
    out = torch.empty_like(dX)
    state = torch.zeros_like(dX[..., :1, :, :].sum(-3)) if entering is None else entering
    for t in range(A.shape[-3]):
        out[..., t, :, :] = state
        state = torch.zeros_like(state) if ends[t] else exact_matmul(state, A[..., t, :, :]) + dX[..., t, :, :]
    return out, state


def _row(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.unsqueeze(-2)


def scan_states(tr: Transitions, entering: Edges, ends: Sequence[bool], reverse: bool) -> tuple[States, Edges]:
    """Both directions of both states. `ends` marks the frames that are the last of their chunk.

    Returns the states that every frame reads, and what leaves the shard (S, z after frame T-1; R, y before frame 0).
    """
    S = scan(tr.W, tr.U, entering.S)
    z = R = y = R_out = y_out = None
    if tr.W_z is not None and tr.u_z is not None:
        z = scan(tr.W_z, tr.u_z.unsqueeze(-2), _row(entering.z)).squeeze(-2)
    if reverse:
        R, R_out = _reverse(tr.W, tr.U, entering.R, ends)
        if tr.W_z is not None and tr.u_z is not None:
            y, y_out = (s.squeeze(-2) for s in _reverse(tr.W_z, tr.u_z.unsqueeze(-2), _row(entering.y), ends))
    T = tr.W.shape[2]
    S_out = S[:, :, -1] if T else S.sum(2) if entering.S is None else entering.S
    z_out = None if z is None else z[:, :, -1] if T else z.sum(2) if entering.z is None else entering.z
    return States(S, z, R, y), Edges(S_out, z_out, R_out, y_out)


def scan_states_adjoint(
    tr: Transitions, dX: Tensor, dx: Tensor | None, entering: Edges, ends: Sequence[bool], reverse: bool
) -> tuple[States, Edges]:
    """The adjoints G, gamma of S, z and F, phi of R, y, from the gradients dX, dx of the states that the queries read.

    Gradients obey the same recurrences backwards: `entering.S`, `entering.z` arrive at frame T-1, `entering.R`,
    `entering.y` at frame 0, and what leaves does so at the other edge.
    """
    G, G_out = scan_adjoint(tr.W, dX, entering.S)
    gamma = F = phi = gamma_out = F_out = phi_out = None
    if tr.W_z is not None and dx is not None:
        gamma, gamma_out = (s.squeeze(-2) for s in scan_adjoint(tr.W_z, dx.unsqueeze(-2), _row(entering.z)))
    if reverse:
        F, F_out = _reverse_adjoint(tr.W, dX, entering.R, ends)
        if tr.W_z is not None and dx is not None:
            phi, phi_out = (s.squeeze(-2) for s in _reverse_adjoint(tr.W_z, dx.unsqueeze(-2), _row(entering.y), ends))
    return States(G, gamma, F, phi), Edges(G_out, gamma_out, F_out, phi_out)


def leaving(tr: Transitions, entering: Edges, ends: Sequence[bool], reverse: bool) -> Edges:
    """What leaves the shard on both sides, without the states in between."""
    return scan_states(tr, entering, ends, reverse)[1]


def leaving_adjoint(tr: Transitions, dX: Tensor, dx: Tensor | None, ends: Sequence[bool], reverse: bool) -> Edges:
    """The adjoints that leave the shard on both sides when none enters."""
    return scan_states_adjoint(tr, dX, dx, Edges(None, None, None, None), ends, reverse)[1]


def last_state(A: Tensor, B: Tensor, initial: Tensor | None) -> Tensor:
    """The end of `scan` alone: (..., R, D); `initial`, or zeros, where T is 0."""
    if A.shape[-3]:
        return scan(A, B, initial)[..., -1, :, :]
    return B.sum(-3) if initial is None else initial


def scans(A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]:
    """`scan` of several chains."""
    return [scan(a, b, X) for a, b, X in zip(A, B, initial, strict=True)]


def scans_adjoint(
    A: Sequence[Tensor], dX: Sequence[Tensor], entering: Sequence[Tensor | None]
) -> tuple[list[Tensor], list[Tensor]]:
    """`scan_adjoint` of several chains: every chain's G, and what leaves every chain."""
    found = [scan_adjoint(a, d, g) for a, d, g in zip(A, dX, entering, strict=True)]
    return [G for G, _ in found], [leaving for _, leaving in found]


def last_states(A: Sequence[Tensor], B: Sequence[Tensor], initial: Sequence[Tensor | None]) -> list[Tensor]:
    """`last_state` of several chains."""
    return [last_state(a, b, X) for a, b, X in zip(A, B, initial, strict=True)]


def product(A: Tensor) -> Tensor:
    """A_0 A_1 ... A_{T-1} over dimension -3, as a tree: (..., T, D, D) -> (..., D, D); the identity where T is 0."""
    if A.shape[-3] == 0:
        eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
        return eye.expand(*A.shape[:-3], *eye.shape).contiguous()
    while A.shape[-3] > 1:
        even = A.shape[-3] // 2 * 2
        pairs = exact_matmul(A[..., 0:even:2, :, :], A[..., 1:even:2, :, :])
        A = torch.cat([pairs, A[..., even:, :, :]], -3)
    return A.squeeze(-3)


def shard_transitions(tr: Transitions) -> list[Tensor]:
    """The transition of the whole shard, of the numerator and, with a denominator, of it: (B, H, D, D) each."""
    return [product(W) for W in (tr.W, tr.W_z) if W is not None]


# --- projection -------------------------------------------------------------------------------------------------


def _both_directions(states: States) -> tuple[Tensor, Tensor | None]:
    """The projection is linear in the state: add the two directions, project once."""
    X = states.S if states.R is None else states.S + states.R
    return X, states.z if states.y is None or states.z is None else states.z + states.y


def project(x: Inputs, states: States, eps: float) -> Tensor:
    """num / (den + eps) with num = X Q~ and den = xᵀ Q, or num alone: (B, N, H, D)."""
    X, den_state = _both_directions(states)
    q = _frames(x.q, x.decay, x.mask)
    out = exact_matmul(q if x.q_rot is None else _frames(x.q_rot, x.decay, x.mask), X.mT)
    if den_state is not None:
        out = out / (exact_matmul(q, den_state.unsqueeze(-1)) + eps)
    if x.mask is not None:
        out = torch.where(x.mask[:, None, :, None, None], out, 0.0)
    return _tokens(out, x.q)


def project_backward(
    dout: Tensor, x: Inputs, states: States, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    """Gradients of q, q_rot and of the summed states X (B, H, T, D, D), x (B, H, T, D); the output is made again."""
    X, den_state = _both_directions(states)
    dnum = _frames(dout, x.decay, x.mask)
    q = _frames(x.q, x.decay, x.mask)
    q_rot = q if x.q_rot is None else _frames(x.q_rot, x.decay, x.mask)
    dx = dq = None
    if den_state is not None:
        den = exact_matmul(q, den_state.unsqueeze(-1)) + eps
        dnum = dnum / den
        if x.mask is not None:
            dnum = torch.where(x.mask[:, None, :, None, None], dnum, 0.0)
        dden = -(dnum * exact_matmul(q_rot, X.mT)).sum(-1, keepdim=True) / den
        dx = (q * dden).sum(-2)
        dq = dden * den_state.unsqueeze(-2)
    dX = exact_matmul(dnum.mT, q_rot)
    dq_rot = exact_matmul(dnum, X)
    if x.q_rot is None:
        return _tokens(dq_rot if dq is None else dq + dq_rot, x.q), None, dX, dx
    return _tokens(torch.zeros_like(q) if dq is None else dq, x.q), _tokens(dq_rot, x.q_rot), dX, dx
