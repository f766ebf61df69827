"""The recurrences as the mathematics writes them, frame by frame, in plain differentiable PyTorch.

Nothing here is fast and nothing here is clever: this is the oracle that every other path is compared with.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["naive_bidirectional_gdn", "naive_frame_scan", "naive_gdn"]


def naive_frame_scan(
    W_kv: Tensor, U_kv: Tensor, W_z: Tensor, U_z: Tensor, initial_state: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} W_t + U_t and z_t = W°_t z_{t-1} + u°_t over the whole sequence, in the order given.

    W_kv, U_kv, W_z (BH, T, D, D), U_z (BH, T, D) -> S (BH, T, D, D), z (BH, T, D).
    """
    BH, T, D = U_z.shape
    S, z = initial_state if initial_state is not None else (U_kv.new_zeros(BH, D, D), U_z.new_zeros(BH, D))
    all_S, all_z = [], []
    for t in range(T):
        S = S @ W_kv[:, t] + U_kv[:, t]
        z = (W_z[:, t] @ z.unsqueeze(-1)).squeeze(-1) + U_z[:, t]
        all_S.append(S)
        all_z.append(z)
    return torch.stack(all_S, 1), torch.stack(all_z, 1)


def _borders(T: int, chunk_frames: int | None, first_chunk_frames: int | None, merge_tail: bool) -> list[int]:
    """The frames, but for frame 0, at which a chunk begins."""
    if chunk_frames is None:
        return []
    borders, border = [], first_chunk_frames or chunk_frames
    while border < T:
        borders.append(border)
        border += chunk_frames
    if merge_tail and borders and T - borders[-1] < chunk_frames:
        borders.pop()
    return borders


def naive_bidirectional_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    q_rot: Tensor | None = None,
    k_rot: Tensor | None = None,
    mask: Tensor | None = None,
    initial_state: tuple[Tensor, Tensor] | None = None,
    chunk_frames: int | None = None,
    first_chunk_frames: int | None = None,
    merge_tail: bool = False,
    normalize: bool = True,
    eps: float = 1e-15,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Bidirectional frame-wise GDN of one whole clip; shapes as `frame_gdn.bidirectional_gdn`.

    Forward is inclusive (frames 0..t), reverse exclusive (frames t+1..), cut at each chunk's end; a masked frame has
    transition I, input 0 and output 0. Returns the output (B, N, H, D) and the state (S, z) after the last frame.
    """
    borders = _borders(decay.shape[1], chunk_frames, first_chunk_frames, merge_tail)
    ends = [t + 1 in borders for t in range(decay.shape[1])]
    return naive_gdn(
        q, k, v, beta, decay, q_rot=q_rot, k_rot=k_rot, mask=mask, initial_state=initial_state, ends=ends,
        normalize=normalize, eps=eps,
    )  # fmt: skip


def naive_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    q_rot: Tensor | None,
    k_rot: Tensor | None,
    mask: Tensor | None,
    initial_state: tuple[Tensor, Tensor] | None,
    ends: Sequence[bool],
    normalize: bool,
    eps: float,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """As `naive_bidirectional_gdn`, chunks given by their ends: by frame, is it the last of its chunk."""
    B, N, H, D = q.shape
    T = decay.shape[1]
    q_rot, k_rot = q if q_rot is None else q_rot, k if k_rot is None else k_rot
    active = torch.ones(B, T, dtype=torch.bool, device=q.device) if mask is None else mask

    def frames(x: Tensor) -> Tensor:  # (B, N, H, D) -> (B, H, T, D, S), padded frames selected away
        x = x.reshape(B, T, N // T, H, -1).permute(0, 3, 1, 4, 2)
        return torch.where(active[:, None, :, None, None], x, torch.zeros_like(x))

    Q, K, V, Qr, Kr, b = (frames(x) for x in (q, k, v, q_rot, k_rot, beta.unsqueeze(-1)))
    g = torch.where(active[..., None], decay, torch.ones_like(decay)).permute(0, 2, 1)[..., None, None]
    eye = torch.eye(D, dtype=q.dtype, device=q.device)
    W = g * (eye - (Kr * b) @ Kr.mT)
    U = (V * b) @ Kr.mT
    W_z = g * (eye - (K * b) @ K.mT)
    u_z = (K * b).sum(-1, keepdim=True)

    S, z = (x for x in initial_state) if initial_state is not None else (q.new_zeros(B, H, D, D), q.new_zeros(B, H, D))
    z = z.unsqueeze(-1)
    forward = []
    for t in range(T):
        S = S @ W[:, :, t] + U[:, :, t]
        z = W_z[:, :, t] @ z + u_z[:, :, t]
        forward.append((S, z))

    R, y = torch.zeros_like(S), torch.zeros_like(z)
    reverse = [(R, y)] * T
    for t in reversed(range(T)):
        if ends[t]:
            R, y = torch.zeros_like(R), torch.zeros_like(y)
        reverse[t] = (R, y)
        R = R @ W[:, :, t] + U[:, :, t]
        y = W_z[:, :, t] @ y + u_z[:, :, t]

    outputs = []
    for t in range(T):
        out = (forward[t][0] + reverse[t][0]) @ Qr[:, :, t]
        if normalize:
            out = out / ((forward[t][1] + reverse[t][1]).mT @ Q[:, :, t] + eps)
        outputs.append(torch.where(active[:, None, t, None, None], out, torch.zeros_like(out)))
    out = torch.stack(outputs, 2).permute(0, 2, 4, 1, 3).reshape(B, N, H, D)
    return out, (S, z.squeeze(-1))
