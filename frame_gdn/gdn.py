"""`bidirectional_gdn`: queries, keys, values and gates of a clip (or one rank's frames of it) to the attention
output."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from . import checks, functional, parallel
from .agreement import Call
from .chunks import ChunkGrid
from .kernels import plain
from .kernels.backends import backend_name, pick_backend
from .kernels.types import Backend, Inputs, accumulation_dtype
from .ops import gdn_scan_op
from .scan import GDNOptions, chunk_ends, gdn_scan


@dataclass(frozen=True)
class GDNState:
    """What a rollout carries from one call to the next, after the last active frame; its size does not grow with time.

    S: (B, H, D, D) numerator state, value rows by key columns, float32 (float64 for float64 activations).
    z: (B, H, D) denominator state.
    frames: how many frames have been consumed.
    conv_tail: (B, K-1, S, C) raw keys, before the short convolution, of the last K-1 active frames, zeros where there
        are none; None for the functional form.

    Raises:
        ValueError: tensors whose shapes, dtypes or devices do not fit one another, or a negative count of frames.
    """

    S: Tensor
    z: Tensor
    frames: int = 0
    conv_tail: Tensor | None = None

    def __post_init__(self) -> None:
        checks.tensor("S", self.S, ("B", "H", "D", "D"))
        B, H, D, _ = self.S.shape
        checks.tensor("S", self.S, (B, H, D, D))
        checks.tensor("z", self.z, (B, H, D), beside=("S", self.S))
        checks.integer("frames", self.frames, 0)
        if self.conv_tail is not None:
            checks.tensor("conv_tail", self.conv_tail, (B, "K-1", "S", H * D), beside=("S", self.S))

    def _map(self, function: Any) -> "GDNState":
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "frames"}
        return replace(self, **{name: function(t) for name, t in tensors.items() if t is not None})

    def to(self, device: torch.device | str) -> "GDNState":
        """The state on another device; dtypes stay."""
        device = checks.device("device", device)
        return self._map(lambda t: t.to(device))

    def detach(self) -> "GDNState":
        """The state without its history: gradients stop here."""
        return self._map(torch.Tensor.detach)

    def clone(self) -> "GDNState":
        """A copy in memory of its own."""
        return self._map(torch.clone)

    def state_dict(self) -> dict[str, Tensor]:
        """A flat dictionary of tensors, ready for safetensors or torch.save."""
        saved = {"S": self.S, "z": self.z, "frames": torch.tensor(self.frames, dtype=torch.int64)}
        return saved if self.conv_tail is None else {**saved, "conv_tail": self.conv_tail}

    @classmethod
    def from_state_dict(cls, saved: dict[str, Tensor]) -> "GDNState":
        """The inverse of `state_dict`. Raises ValueError for other keys, and for tensors that make no state."""
        checks.keys("saved", saved, ("S", "z", "frames"), ("conv_tail",))
        checks.tensor("frames", saved["frames"], (), dtype=torch.int64)
        return cls(saved["S"], saved["z"], int(saved["frames"]), saved.get("conv_tail"))


def bidirectional_gdn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    q_rot: Tensor | None = None,
    k_rot: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    mask: Tensor | None = None,
    initial_state: GDNState | None = None,
    output_final_state: bool = False,
    chunk_frames: int | None = None,
    first_chunk_frames: int | None = None,
    merge_tail: bool = False,
    normalize: bool = True,
    eps: float = 1e-15,
    group: ProcessGroup | None = None,
    frames_per_rank: Sequence[int] | None = None,
    backend: str | Backend[Any] = "auto",
    precision: str = "default",
    check: bool = False,
) -> tuple[Tensor, GDNState | None]:
    """Frame-wise gated DeltaNet attention, forward inclusive and reverse exclusive over frames, projected once.

    For each frame, with K~ and Q~ the rotated keys and queries (D, S) and β the write gate a token:

        W = g (I - K~ diag(β) K~ᵀ)      U = V diag(β) K~ᵀ      W° = g (I - K diag(β) Kᵀ)      u° = K β
        S_t = S_{t-1} W_t + U_t         R_t = R_{t+1} W_t + U_t         (z, y likewise by W°, u°)
        out_t = (S_t + R_{t+1}) Q~_t / ((z_t + y_{t+1})ᵀ Q_t + eps)

    Source: the bidirectional frame-wise recurrence of SANA-WM (NVlabs/Sana), after gated DeltaNet (arXiv 2412.06464).

    Args:
        q, k, v: (B, N, H, D), N = T·S tokens frame-major, after norm, ReLU and key scale; strided views welcome. All
            of one floating dtype: none is cast, under autocast neither, and k or v of another dtype than q's is
            refused. Under a group: this rank's own frames, uneven and empty shards included.
        beta: (B, N, H) in (0, 1); it and decay may be of any floating dtype.
        decay: (B, T, H), the factor in (0, 1], never its logarithm.
        q_rot, k_rot: (B, N, H, D) in q's dtype, the numerator's q and k after rotary embedding; None: the plain ones.
        rotary: in place of q_rot and k_rot, (cos, sin), each (N, D/2): the numerator's q and k are the plain ones with
            interleaved pairs rotated by them, inside the kernels where the backend can. Tables get no gradient.
        mask: (B, T) bool, True = active. A padded frame has transition I and input 0; its output is 0, its gradients
            are 0, and its content, NaN included, reaches nothing. Where ranks ask for a state: on all or none.
        initial_state: enters the forward recurrence of the group's first rank. Its gradient is each rank's share.
        output_final_state: return the state after the last active frame, the same on all ranks.
        chunk_frames: None: reverse over the whole clip; c: reverse cut every c frames of the whole clip; 1: causal.
        first_chunk_frames: frames of the clip's first chunk; None: as the others. A call that continues, whose
            `initial_state.frames` is not 0, begins with a later chunk.
        merge_tail: a tail shorter than chunk_frames joins the chunk before it, within this call; False: it is a chunk
            of its own.
        normalize: False: numerator only (a camera branch); z of a final state is then 0.
        eps: added to the denominator.
        group: the context-parallel process group. One exchange of O(D²) a head forward, one backward.
        frames_per_rank: all shards' frame counts, if the caller knows them; else asked of the ranks, in one tiny
            exchange, only where a global position is needed (chunk_frames above 1, a final state).
        backend: "torch", "triton", or "auto": triton where `backend_of` says so. An object with the steps of
            `kernels.types.Backend` runs in place of these, but not under torch.compile: a test's.
        precision: of triton with bfloat16 or float16 tokens. "default": tensor cores in 16 bit, sums and states in
            float32, so that the error stays near that of rounding the output; "exact": float32 throughout.
        check: ranks compare their calls on this call too, not on the group's first alone, in one small message. What
            one rank refuses is then an error on all, and so is every difference, named.

    Returns:
        out (B, N, H, D) in q's dtype, and the final state, None unless asked for.

    Raises:
        ValueError: for shapes, dtypes, devices or options that do not fit, a group this process is not in, ranks that
            disagree (found by the handshake), samples with different counts of active frames where a state is asked
            for, and a short tail that continues a state alone, with merge_tail. Without a handshake, ranks whose calls
            differ return NaN, and so do the others where one refuses its mask or state. Where one refuses anything
            else, or sends a message of another size, they fail when the transport does, at the group's timeout at the
            latest; `check=True` finds out why.
    """
    positions = chunk_frames not in (None, 1) or first_chunk_frames not in (None, 1) or output_final_state
    counted = output_final_state and mask is not None  # then the ranks add up their active frames
    due = check or counted or (positions and frames_per_rank is None)
    with parallel.checked(group, due=due):
        rank, size = parallel.rank_and_size(group)
        B, T, H, D = _check(q, k, v, beta, decay, q_rot, k_rot, rotary)
        refused = parallel.refusal(partial(_check_own, mask, initial_state, q, T), group, due=due)
        if refused is not None:
            mask = initial_state = None
        asked = grid = ChunkGrid(chunk_frames, first_chunk_frames, merge_tail)
        continues = initial_state is not None and initial_state.frames > 0
        if continues:  # at the border of a chunk, of which only the caller's grid can tell
            grid = grid.continued
        checks.number("eps", eps, 0)
        for name, value in (("output_final_state", output_final_state), ("normalize", normalize), ("check", check)):
            checks.flag(name, value)
        parallel.check_frames_per_rank(frames_per_rank, T, group)
        kernels = pick_backend(backend, q, precision)
        rotated = ["None" if rotary is None and x is None else "given" for x in (q_rot, k_rot)]
        facts = {
            "B": B, "H": H, "D": D, "dtype": q.dtype, "q_rot": rotated[0], "k_rot": rotated[1],
            "normalize": normalize, "eps": float(eps), **asked.facts,
            "output_final_state": output_final_state, "backend": backend_name(backend), "precision": precision,
        }  # fmt: skip
        if first_chunk_frames is not None or merge_tail:  # a rank that is not the first must know which chunk is first
            facts["continues"] = continues
        if output_final_state:
            facts["mask"] = "None" if mask is None else "given"
        if refused is not None:
            facts["refused"] = str(refused)
        consumed: object = "None" if initial_state is None else initial_state.frames
        if initial_state is None and rank and not output_final_state:
            consumed = None  # only the first rank needs the state, so that this one cannot tell
        some = {"tokens a frame": q.shape[1] // T if T else None, "initial_state.frames": consumed}
        call = Call("bidirectional_gdn", facts, T, some)
        active = mask.sum(1).tolist() if counted and mask is not None else None
    counts, frames, call = parallel.agree(
        call, group, frames_per_rank, positions=positions, check=check, active=active
    )

    if continues and counts is not None:
        grid.check_tail(sum(counts))
    S0 = z0 = None
    if initial_state is not None:
        wide = accumulation_dtype(q.dtype)
        S0, z0 = initial_state.S.to(wide), initial_state.z.to(wide) if normalize else None
        frames = (frames or 0) + initial_state.frames
    cos = sin = None
    if rotary is not None and kernels is plain:
        q_rot, k_rot = (functional.rotary(x, *rotary, backend="torch") for x in (q, k))
    elif rotary is not None:
        cos, sin = (table.detach().to(torch.float32) for table in rotary)
    x = Inputs(q, k, v, beta, decay, q_rot, k_rot, mask, cos, sin)
    S: Tensor | None
    z: Tensor | None
    if torch.compiler.is_compiling() and size == 1 and isinstance(backend, str):
        out, S, z = gdn_scan_op(
            *x, S0, z0, normalize, eps, grid.ends(0, T), not grid.is_causal, backend, precision
        )  # fmt: skip
    else:
        ends, passes = chunk_ends(grid, T, rank, counts)
        options = GDNOptions(
            normalize, eps, not grid.is_causal, ends, passes, group, output_final_state, kernels, call
        )
        out, S, z = gdn_scan(x, S0, z0, options)
    if refused is not None:
        raise refused
    if S is None or not output_final_state:
        return out, None
    assert frames is not None
    return out, GDNState(S, S.new_zeros(B, H, D) if z is None else z, frames)


def check_rotary(rotary: tuple[Tensor, Tensor], tokens: int, head_dim: int, beside: tuple[str, Tensor]) -> None:
    """ValueError unless rotary is (cos, sin), each (tokens, head_dim / 2), where `beside` is, for heads of an even
    size."""
    checks.pair("rotary", rotary, "(cos, sin)")
    if head_dim % 2:
        raise ValueError(f"rotary turns pairs of channels: it needs an even head size D, got {head_dim}")
    for name, table in zip(("cos", "sin"), rotary, strict=True):
        checks.tensor(f"rotary's {name}", table, (tokens, head_dim // 2), beside=beside)


def check_state(name: str, state: GDNState, B: int, H: int, D: int, beside: tuple[str, Tensor]) -> None:
    """ValueError unless it is a `GDNState` of so many samples, heads and channels a head, where `beside` is."""
    if not isinstance(state, GDNState):
        raise ValueError(f"{name} must be None or a GDNState, got {checks.shown(state)}")
    checks.tensor(f"{name}.S", state.S, (B, H, D, D), beside=beside)
    checks.tensor(f"{name}.z", state.z, (B, H, D), beside=beside)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    q_rot: Tensor | None,
    k_rot: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
) -> tuple[int, int, int, int]:
    checks.tensor("q", q, ("B", "N", "H", "D"))
    B, N, H, D = q.shape
    checks.tensor("decay", decay, (B, "T", H), beside=("q", q))
    T = decay.shape[1]
    if N == 0 or N % T != 0 if T else N != 0:
        raise ValueError(f"q's N must be a multiple of decay's T, got q {(B, N, H, D)} and decay {(B, T, H)}")
    for name, tensor in {"k": k, "v": v, "q_rot": q_rot, "k_rot": k_rot}.items():
        if tensor is not None or name in ("k", "v"):
            checks.tensor(name, tensor, (B, N, H, D), dtype=q.dtype, beside=("q", q))
    checks.tensor("beta", beta, (B, N, H), beside=("q", q))
    if rotary is not None:
        check_rotary(rotary, N, D, ("q", q))
        if q_rot is not None or k_rot is not None:
            raise ValueError("rotary takes the place of q_rot and k_rot: give one of them")
    return B, T, H, D


def _check_own(mask: Tensor | None, initial_state: GDNState | None, q: Tensor, T: int) -> None:
    B, _, H, D = q.shape
    if mask is not None:
        checks.tensor("mask", mask, (B, T), dtype=torch.bool, beside=("q", q))
    if initial_state is not None:
        check_state("initial_state", initial_state, B, H, D, ("q", q))
