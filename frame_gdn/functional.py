"""What a block does around the scan: each operation once, a plain form, a fused one, and the choice between them.

The plain form is ordinary PyTorch and the definition. The fused form is one Triton kernel that reads and writes every
token once, forward and backward. It is taken where `fused` says so, which is the only place that decides. Its error
against float64 is at most twice that of the plain form in the same dtype.

Tokens are (B, N, C) or (B, N, H, D), N = T·S frame-major. Modulations are one row a frame, (B, T, C). A mask is (B, T)
bool, True for active frames; the content of the others is replaced by zeros, not multiplied, so that no NaN passes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import checks
from .chunks import ChunkEnds
from .kernels import flash4, plain
from .kernels.backends import Hardware, pick_backend
from .kernels.temporal_conv import temporal_conv as accumulated_conv
from .kernels.types import accumulation_dtype


def fused(x: Tensor, backend: str) -> bool:
    """Whether the fused form serves tokens like x (..., C), of any C. Raises ValueError as `pick_backend`."""
    return pick_backend(backend, x[..., :1]) is not plain


def _operators() -> Any:
    from .kernels.triton import operators  # here, since triton may be missing

    return operators


# --- gates ------------------------------------------------------------------------------------------------------


def decay(gate: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """g = exp(-exp(A_log) · softplus(gate + dt_bias)), the factor in (0, 1] by which a frame keeps the state.

    Args:
        gate: (B, T, H), the gate projection of the frames' mean tokens.
        A_log, dt_bias: (H).

    Returns:
        (B, T, H) in float32, float64 for such a gate.

    Source: SANA-WM (NVlabs/Sana), after Mamba-2 (arXiv 2405.21060).
    """
    wide = accumulation_dtype(gate.dtype)
    return torch.exp(-A_log.to(wide).exp() * F.softplus(gate.to(wide) + dt_bias.to(wide)))


def silu_gate(x: Tensor, gate: Tensor, dtype: torch.dtype, backend: str = "auto") -> Tensor:
    """x · SiLU(gate) in float32 (float64 for such a gate), cast to `dtype`: the output gate, x and gate of one shape.

    Source: SANA-WM (NVlabs/Sana).
    """
    if x.dtype == dtype and fused(x, backend):
        out: Tensor = _operators().silu_gate(x, gate)
        return out
    return (x * F.silu(gate.to(accumulation_dtype(gate.dtype)))).to(dtype)


# --- queries and keys -------------------------------------------------------------------------------------------


def short_conv(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None = None,
    future: Tensor | None = None,
    *,
    ends: ChunkEnds | None = None,
    backend: str = "auto",
) -> Tensor:
    """Depthwise convolution over frames, the same K taps to the past and to the future, the last tap the centre.

        k'_t = w[K-1] k_t + Σ_{j=1..K-1} w[K-1-j] (k_{t-j} + k_{t+j})

    Args:
        x: (B, T, ..., C).
        weight: (C, 1, K).
        past, future: (B, K-1, ..., C), the frames before x and after it; None for zeros.
        ends: the ends of chunks, past which taps see zeros, counted from x's first frame; None for no chunks.

    Returns:
        like x, in x's dtype.

    Source: SANA-WM's short convolution (NVlabs/Sana), a causal kernel run both ways, its centre counted once.
    """
    T, K = x.shape[1], weight.shape[-1]
    if fused(x, backend):
        S = math.prod(x.shape[2:-1])
        tokens = [
            None if t is None else t.to(x.dtype).reshape(*t.shape[:2], S, t.shape[-1]) for t in (x, past, future)
        ]
        fused_out: Tensor = _operators().short_conv(*tokens, weight, ends)
        return fused_out.view(x.shape)
    taps = weight[:, 0].to(x.dtype).unbind(-1)
    seen = _between(past, x, future, K - 1)
    in_chunk = None if ends is None else ends.frames_after(T, x.device)
    out = x * taps[-1]
    for j in range(1, K):
        before, after = seen[:, K - 1 - j : K - 1 - j + T], seen[:, K - 1 + j : K - 1 + j + T]
        if in_chunk is not None:
            after = torch.where((in_chunk >= j).view(T, *[1] * (x.dim() - 2)), after, 0.0)
        out = out + (before + after) * taps[K - 1 - j]
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) · weight of x (..., C) by weight (C), in what torch promotes the two to."""
    # Both in one dtype: torch warns of what is mixed, and takes a slow way.
    wide = torch.promote_types(x.dtype, weight.dtype)
    return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps)


def rms_norm_relu(x: Tensor, weight: Tensor, eps: float, scale: float = 1.0, backend: str = "auto") -> Tensor:
    """scale · relu(rms_norm(x) · weight): what queries and keys pass between projection and scan.

    Args:
        x: (..., C), normed over all channels; statistics in float32, float64 for such tokens.
        weight: (C).
        eps: inside the root.

    Returns:
        like x, in x's dtype.

    Source: SANA-WM (NVlabs/Sana).
    """
    if fused(x, backend):
        out: Tensor = _operators().norm_relu(x, weight, eps, scale)
        return out
    return F.relu(rms_norm(x, weight, eps)).to(x.dtype) * scale


def rotary(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False, backend: str = "auto") -> Tensor:
    """Interleaved pairs (2i, 2i+1) of x rotated by the angles of the tables, in float32 at least, cast back.

    Args:
        x: (B, N, H, D).
        cos, sin: (N, D/2), or (1 or B, N, D/2).
        inverse: rotate by the negative angles.

    Returns:
        like x, in x's dtype.
    """
    cos, sin = (table if table.dim() == 3 else table[None] for table in (cos, sin))
    if not (cos.requires_grad or sin.requires_grad) and fused(x, backend):
        out: Tensor = _operators().rotary(x, cos, sin, inverse)
        return out
    wide = accumulation_dtype(x.dtype)
    even, odd = x.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos.to(wide).unsqueeze(2), sin.to(wide).unsqueeze(2)
    if inverse:
        sin = -sin
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2).to(x.dtype)


# --- attention --------------------------------------------------------------------------------------------------

ATTENTIONS = ("auto", "sdpa", "flash4")


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    kernel: str = "auto",
    sdpa: Callable[..., Tensor] | None = None,
    hardware: Hardware | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ + mask) v.

    Args:
        q: (B, N, H, D).
        k, v: (B, M, H, D).
        mask: bool, True where a query sees a key, or a bias; goes with (B, H, N, M).
        scale: None for 1/√D.
        kernel: "sdpa", torch's own attention; "flash4", flash-attn-4; "auto", flash-attn-4 where it is installed and
            serves these tensors, else torch's own.
        sdpa: what computes "sdpa", called as (q, k, v, attn_mask=, scale=); None for torch's own.
        hardware: what the choice of a kernel takes the device for; None for what it is.

    Returns:
        like q.

    Raises:
        ValueError: another kernel, or "flash4" where it cannot serve, with the reason.
    """
    checks.choice("attention", kernel, ATTENTIONS)
    if kernel != "sdpa":
        reason = flash4.refusal(q, q.shape[-1], mask is not None, hardware)
        if reason is None and not q.dtype == k.dtype == v.dtype:
            reason = f"it takes q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}"
        if reason is None:
            return flash4.attend(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)[0]
        if kernel == "flash4":
            raise ValueError(f"attention 'flash4' cannot serve this call: {reason}")
    return (sdpa or _sdpa)(q, k, v, attn_mask=mask, scale=scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, scale: float | None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=scale).transpose(1, 2)


# --- around attention and feed-forward --------------------------------------------------------------------------


def select(x: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens x (B, N, C) with zeros in padded frames."""
    if mask is None:
        return x
    frames, N = mask.shape[1], x.shape[1]
    tokens = mask.repeat_interleave(N // frames if frames else 0, 1, output_size=N)
    return torch.where(tokens[..., None], x, 0.0)


def _by_frame(x: Tensor, frames: int) -> Tensor:
    """(B, N, C) -> (B, T, S, C), of a shard without frames too."""
    B, N, C = x.shape
    return x.reshape(B, frames, N // frames if frames else 0, C)


def modulate(x: Tensor, shift: Tensor, scale: Tensor, mask: Tensor | None = None) -> Tensor:
    """x · (1 + scale) + shift of tokens x (B, N, C) by their frames' shift and scale (B, T, C), 0 in padded frames."""
    by_frame = _by_frame(x, scale.shape[1]) * (1 + scale.unsqueeze(2)) + shift.unsqueeze(2)
    return select(by_frame.flatten(1, 2), mask)


def modulated_norm(
    x: Tensor, shift: Tensor, scale: Tensor, mask: Tensor | None = None, *, eps: float, backend: str = "auto"
) -> Tensor:
    """layer_norm(x) · (1 + scale) + shift, 0 in padded frames: x (B, N, C), shift and scale (B, T, C) -> like x, in
    what torch promotes the three to."""
    if fused(x, backend):
        out: Tensor = _operators().modulated_norm(x, shift, scale, mask, eps)[0]
        return out
    return modulate(F.layer_norm(x, x.shape[-1:], eps=eps), shift, scale, mask)


def gated_residual(
    x: Tensor,
    h: Tensor,
    gate: Tensor | None = None,
    extra: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    frames: int,
    backend: str = "auto",
) -> Tensor:
    """x + gate · h + extra, 0 in padded frames: x, h and extra (B, N, C), gate (B, T, C), `frames` T -> like x, in
    what torch promotes them to. No gate is 1, no extra 0."""
    if fused(x, backend):
        out: Tensor = _operators().residual(x, h, gate, extra, mask, frames)
        return out
    if gate is not None:
        h = (_by_frame(h, frames) * gate.unsqueeze(2)).flatten(1, 2)
    return select(x + h if extra is None else x + h + extra, mask)


# --- feed-forward -----------------------------------------------------------------------------------------------


def pointwise_conv(pixels: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A 1 x 1 convolution as a matrix product that adds the bias itself: pixels (images, height, width, C), weight
    (C', C, 1, 1), bias (C') -> (images, height, width, C')."""
    # In two dimensions: of more, torch would add the bias in a second pass where the pixels are not contiguous.
    out: Tensor = F.linear(pixels.flatten(0, 2), weight.flatten(1), bias)
    return out.view(*pixels.shape[:-1], len(weight))


def glu_conv(
    pixels: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = True, backend: str = "auto"
) -> Tensor:
    """value · SiLU(gate), where value and gate are the halves of depthwise(SiLU(x)) + bias, or of depthwise(x) + bias.

    Args:
        pixels: (images, height, width, 2 F).
        weight: (2 F, 1, K, K), K odd, zeros around an image.
        bias: (2 F) or None.
        silu: activate the pixels first.

    Returns:
        (images, height, width, F), in the pixels' dtype.

    Source: SANA's mixed feed-forward (arXiv 2410.10629).
    """
    if fused(pixels, backend):
        out: Tensor = _operators().glu_conv(pixels, weight, bias, silu)
        return out
    images = pixels.permute(0, 3, 1, 2)
    if silu:
        images = F.silu(images)
    value, gate = F.conv2d(images, weight, bias, padding=weight.shape[-1] // 2, groups=len(weight)).chunk(2, 1)
    return (value * F.silu(gate)).permute(0, 2, 3, 1)


def temporal_conv(
    x: Tensor,
    weight: Tensor,
    past: Tensor | None = None,
    future: Tensor | None = None,
    *,
    ends: ChunkEnds | None = None,
    backend: str = "auto",
) -> Tensor:
    """x_t + W₀ x_{t-1} + W₁ x_t + W₂ x_{t+1}, the last zero where a chunk ends.

    Args:
        x: (B, T, S, C).
        weight: (C, 3 C), [W₀, W₁, W₂] side by side.
        past, future: (B, 1, S, C), the frame before x and the one after it; None for zeros.
        ends: the ends of chunks, past which no frame sees, counted from x's first frame; None for no chunks.

    Returns:
        like x.

    Source: SANA-Video's feed-forward (arXiv 2509.24695).
    """
    if fused(x, backend):
        past, future = (None if t is None else t.to(x.dtype) for t in (past, future))
        out: Tensor = accumulated_conv(x, past, future, weight.to(x.dtype), ends)
        return out
    return x + F.linear(temporal_windows(x, past, future, ends), weight)


def _between(past: Tensor | None, x: Tensor, future: Tensor | None, reach: int) -> Tensor:
    """x (B, T, ..., C) between `reach` frames before it and as many after it, zeros for None."""
    beyond = x.new_zeros(x.shape[0], reach, *x.shape[2:])
    return torch.cat([beyond if past is None else past, x, beyond if future is None else future], 1)


def temporal_windows(x: Tensor, past: Tensor | None, future: Tensor | None, ends: ChunkEnds | None) -> Tensor:
    """[x_{t-1}, x_t, x_{t+1}] side by side, (B, T, S, 3 C), zeros past a chunk's end; arguments as in
    `temporal_conv`."""
    frames = _between(past, x, future, 1)
    before, after = frames[:, :-2], frames[:, 2:]
    if ends is not None:
        after = after.masked_fill((ends.frames_after(x.shape[1], x.device) == 0)[:, None, None], 0)
    return torch.cat([before, x, after], -1)
