"""`BidirectionalGDN`: the attention layer of a video DiT block, tokens in, tokens out."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from . import checks, functional, parallel
from .agreement import Call
from .chunks import ChunkEnds, ChunkGrid
from .gdn import GDNState, bidirectional_gdn, check_rotary, check_state
from .kernels.backends import BACKENDS, pick_backend
from .parallel import FrameSharded

#: Where SiLU is 1: an output gate with this bias and no weight lets everything through.
SILU_ONE = 1.278464542761074


class ReLURMSNorm(nn.RMSNorm):
    """What queries and keys pass between projection and scan: RMSNorm over all channels, ReLU, a factor.

    Weight (C); statistics in float32 (float64 for such tokens). Source: SANA-WM (NVlabs/Sana).
    """

    def forward(self, x: Tensor, scale: float = 1.0, backend: str = "auto") -> Tensor:
        """(..., C) -> scale · relu(rms_norm(x)), in x's dtype."""
        assert self.eps is not None
        return functional.rms_norm_relu(x, self.weight, self.eps, scale, backend)


class TemporalShortConv(nn.Module):
    """Depthwise convolution over frames, the same K taps to the past and to the future, the last tap the centre.

        k'_t = w[K-1] k_t + Σ_{j=1..K-1} w[K-1-j] (k_{t-j} + k_{t+j})

    Weight (C, 1, K), no bias. Source: SANA-WM's short convolution, a causal kernel run both ways, its centre counted
    once.
    """

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, 1, kernel_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The identity tap (0, ..., 0, 1)."""
        with torch.no_grad():
            self.weight.zero_()
            self.weight[:, :, -1] = 1.0

    def forward(
        self,
        x: Tensor,
        past: Tensor | None,
        future: Tensor | None,
        ends: ChunkEnds | None = None,
        backend: str = "auto",
    ) -> Tensor:
        """x (B, T, ..., C) between the K-1 frames before it and the K-1 after it, each (B, K-1, ..., C) or None for
        zeros -> like x.

        Taps past the end of a frame's chunk see zeros; `ends` are counted from x's first frame.
        """
        return functional.short_conv(x, self.weight, past, future, ends=ends, backend=backend)


class BidirectionalGDN(FrameSharded):
    """Bidirectional frame-wise gated DeltaNet attention with SANA-WM's parameter names, so that its weights load by
    name.

    qkv -> short temporal convolution on k -> RMSNorm over all channels on q, k -> ReLU -> key scale 1/√(D·S) ->
    rotary on copies of q, k -> bidirectional scan over frames -> × SiLU(output_gate(x)) -> proj, with
    β = sigmoid(beta_proj(x)) a token and head and g = exp(-exp(A_log) softplus(gate_proj(mean x) + dt_bias)) a frame
    and head.
    Source: SANA-WM's main branch (NVlabs/Sana). The gates start near plain linear attention.

    Args:
        hidden_size: C, channels of the tokens.
        num_heads: H; D = C / H.
        conv_kernel_size: K of the short convolution on keys; 0 for none.
        norm_eps: inside the root of the RMSNorms.
        eps: added to the denominator.
        group: context-parallel group of the frames; may be set later, e.g. by `parallelize`.
        backend: "torch", "triton" or "auto".

    Raises:
        ValueError: where num_heads does not divide hidden_size, or for an argument out of its range.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        conv_kernel_size: int = 4,
        norm_eps: float = 1e-5,
        eps: float = 1e-15,
        group: ProcessGroup | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        checks.integer("hidden_size", hidden_size, 1)
        checks.integer("num_heads", num_heads, 1)
        if hidden_size % num_heads:
            raise ValueError(f"hidden_size must be a multiple of num_heads, got {hidden_size} and {num_heads}")
        checks.integer("conv_kernel_size", conv_kernel_size, 0)
        checks.number("norm_eps", norm_eps, 0)
        checks.number("eps", eps, 0)
        checks.choice("backend", backend, BACKENDS)
        parallel.rank_and_size(group)
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, hidden_size // num_heads
        self.conv_kernel_size, self.eps, self.group, self.backend = conv_kernel_size, eps, group, backend
        self.qkv = nn.Linear(hidden_size, 3 * hidden_size, bias=False)
        self.q_norm = ReLURMSNorm(hidden_size, eps=norm_eps)
        self.k_norm = ReLURMSNorm(hidden_size, eps=norm_eps)
        self.beta_proj = nn.Linear(hidden_size, num_heads)
        self.gate_proj = nn.Linear(hidden_size, num_heads)
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))
        self.conv_k = TemporalShortConv(hidden_size, conv_kernel_size) if conv_kernel_size else None
        self.output_gate = nn.Linear(hidden_size, hidden_size)
        self.proj = nn.Linear(hidden_size, hidden_size)
        self.reset_gates()

    def reset_gates(self) -> None:
        """Gates near plain linear attention: β = sigmoid(5), g = exp(-softplus(-5)), output gate 1, identity
        convolution."""
        with torch.no_grad():
            for linear, bias in ((self.beta_proj, 5.0), (self.gate_proj, 0.0), (self.output_gate, SILU_ONE)):
                linear.weight.zero_()
                linear.bias.fill_(bias)
            self.A_log.zero_()
            self.dt_bias.fill_(-5.0)
        if self.conv_k is not None:
            self.conv_k.reset_parameters()

    def forward(
        self,
        x: Tensor,
        num_frames: int,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        state: GDNState | None = None,
        output_final_state: bool = False,
        chunk_frames: int | None = None,
        first_chunk_frames: int | None = None,
        merge_tail: bool = False,
        frames_per_rank: Sequence[int] | None = None,
    ) -> tuple[Tensor, GDNState | None]:
        """(B, N_local, C) -> (B, N_local, C), and the state after the last active frame where it is asked for.

        Args:
            x: (B, N_local, C), N_local = num_frames · S tokens frame-major, after the host's modulation.
            num_frames: frames in x: this rank's own, where a group is set.
            rotary: (cos, sin), each (N_local, D/2), of this shard's own tokens; None for no rotary embedding.
            mask: (B, num_frames) bool, True = active. A padded frame reaches nothing; the layer returns `proj.bias`
                there. Over ranks that ask for a state: on all or none.
            state: continues from it; the same on every rank of a group.
            output_final_state: also return the `GDNState` to continue from, the same on every rank.
            chunk_frames: None: the whole clip is seen; c: no frame sees past the end of its chunk of c frames.
            first_chunk_frames: frames of the clip's first chunk; None: as the others. A call that continues begins
                with a later chunk.
            merge_tail: a tail shorter than chunk_frames joins the chunk before it, within this call; False: it is a
                chunk of its own.
            frames_per_rank: every rank's num_frames, if known; else asked in one tiny exchange.

        Raises:
            ValueError: for shapes that do not fit, and as `bidirectional_gdn`; as with `check=True` there, unless
                `frames_per_rank` is given.
        """
        due = frames_per_rank is None
        with parallel.checked(self.group, due=due):
            asked = grid = ChunkGrid(chunk_frames, first_chunk_frames, merge_tail)
            checks.flag("output_final_state", output_final_state)
            S = self._check(x, num_frames, rotary)
            refused = parallel.refusal(partial(self._check_own, x, num_frames, mask, state), self.group, due=due)
            if refused is not None:  # a mask decides which messages follow
                state, mask = None, x.new_ones(len(x), num_frames, dtype=torch.bool) if mask is not None else None
            if state is not None and state.frames:  # at the border of a chunk, of which only the caller can tell
                grid = grid.continued
            rank, size = parallel.rank_and_size(self.group)
            parallel.check_frames_per_rank(frames_per_rank, num_frames, self.group)
            pick_backend(self.backend, x[..., :1])
            B, N, C = x.shape
            H, D = self.num_heads, self.head_dim
            facts = {
                "B": B, "H": H, "D": D, "dtype": x.dtype, "conv_kernel_size": self.conv_kernel_size,
                "norm_eps": self.q_norm.eps, "eps": float(self.eps), "rotary": "None" if rotary is None else "given",
                "state.frames": None if state is None else state.frames,
                "output_final_state": output_final_state, **asked.facts, "backend": self.backend,
            }  # fmt: skip
            if refused is not None:
                facts["refused"] = str(refused)
            if output_final_state:
                facts["mask"] = "None" if mask is None else "given"
            call = Call("BidirectionalGDN", facts, num_frames, {"tokens a frame": S if num_frames else None})
        counts, _, call = parallel.agree(call, self.group, frames_per_rank, positions=True, check=False)
        assert counts is not None
        if state is not None and state.frames:
            grid.check_tail(sum(counts))
        # An empty shard cannot tell the size of a frame: a state's tail needs it, rank 0's past too.
        if size > 1 and 0 in counts and (output_final_state or counts[0] == 0):
            assert self.group is not None
            S = max(row[0] for row in parallel.gather_ints([S if num_frames else 0], self.group, call))

        if mask is not None:
            x = torch.where(mask.repeat_interleave(S, 1, output_size=N).unsqueeze(-1), x, 0.0)
        q, k, v = self.qkv(x).chunk(3, -1)
        conv_tail = None
        if self.conv_k is not None:
            k, conv_tail = self._convolve(
                k.reshape(B, num_frames, S, C), mask, state, output_final_state, grid, counts, call
            )
            k = k.flatten(1, 2)
        q, k = self.q_norm(q, backend=self.backend), self.k_norm(k, (D * max(S, 1)) ** -0.5, self.backend)
        q, k, v = (t.unflatten(-1, (H, D)) for t in (q, k, v))

        beta = self.beta_proj(x).sigmoid()
        frame_mean = x.reshape(B, num_frames, S, C).mean(2)
        decay = functional.decay(self.gate_proj(frame_mean), self.A_log, self.dt_bias)

        out, final = bidirectional_gdn(
            q, k, v, beta, decay,
            rotary=rotary, mask=mask,
            initial_state=state, output_final_state=output_final_state,
            chunk_frames=chunk_frames, first_chunk_frames=first_chunk_frames, merge_tail=merge_tail,
            eps=self.eps, group=self.group, frames_per_rank=counts, backend=self.backend,
        )  # fmt: skip
        if refused is not None:
            raise refused
        dtype = v.dtype
        del q, k, v  # with the projection that they are views of, five of the eight (B, N, C) that would be held here
        out = self.proj(functional.silu_gate(out.flatten(2), self.output_gate(x), dtype, self.backend))
        if final is not None:
            final = GDNState(final.S, final.z, final.frames, conv_tail)
        return out, final

    def _convolve(
        self,
        k: Tensor,
        mask: Tensor | None,
        state: GDNState | None,
        output_tail: bool,
        grid: ChunkGrid,
        counts: Sequence[int],
        call: Call,
    ) -> tuple[Tensor, Tensor | None]:
        """The short convolution of keys (B, T, S, C) with its halo, and the tail of raw keys that a state carries on.

        The frames before the clip, zeros or a state's tail, count as K-1 more frames at the head of the first rank, so
        that halo and tail are one fetch, wherever the frames lie. A process alone copies no keys for that.
        """
        assert self.conv_k is not None
        rank, size = parallel.rank_and_size(self.group)
        B, T, width = k.shape[0], k.shape[1], self.conv_kernel_size - 1
        total = sum(counts)
        ends = [total] * B
        if output_tail and mask is not None:
            ends = _last_active(mask, self.group, counts, call)
        came = None if state is None or state.conv_tail is None else state.conv_tail.to(k.dtype)
        if self.group is None or size == 1:
            out = self.conv_k(k, came, None, grid.ends(0, total), self.backend)
            if not output_tail:
                return out, None
            head = k.new_zeros(B, width, *k.shape[2:]) if came is None else came
            tails = [
                torch.cat([head[b : b + 1, end:], k[b : b + 1, max(end - width, 0) : end]], 1)
                for b, end in enumerate(ends)
            ]
            return out, torch.cat(tails)

        held = k
        if rank == 0:
            held = torch.cat([k.new_zeros(B, width, *k.shape[2:]) if came is None else came, k], 1)
        tails_at = sorted({frame for end in ends for frame in range(end, end + width)}) if output_tail else []
        start = sum(counts[:rank])  # frame t of the clip is frame t + width of `held`
        wanted, first = [], 0
        for count in counts:
            stop = first + count
            near = {*range(first, first + width), *range(stop + width, min(stop + width, total) + width)}
            wanted.append(sorted((near if count else set()) | set(tails_at)))
            first += count
        held_counts = [count + width * (r == 0) for r, count in enumerate(counts)]
        fetched = parallel.fetch_frames(held, wanted, self.group, held_counts, call)
        mine = wanted[rank]

        def frames(first: int, stop: int) -> Tensor:  # they follow one another in what was fetched
            return fetched.narrow(1, mine.index(first) if stop > first else 0, max(stop - first, 0))

        # An empty shard needs nothing of it, but takes part in its backward: keep it in the graph.
        past = frames(start, start + width) if T else fetched[:, :0]
        after = frames(start + width + T, min(start + T + width, total) + width) if T else past
        future = torch.cat([after, k.new_zeros(B, width - after.shape[1], *k.shape[2:])], 1)
        out = self.conv_k(k, past, future, grid.ends(start, total), self.backend)
        if not output_tail:
            return out, None
        if len(set(ends)) == 1:
            return out, frames(ends[0], ends[0] + width).clone()  # not a view of all that was fetched
        return out, torch.cat([frames(end, end + width)[b : b + 1] for b, end in enumerate(ends)])

    def _check(
        self,
        x: Tensor,
        num_frames: int,
        rotary: tuple[Tensor, Tensor] | None,
    ) -> int:
        checks.tensor("x", x, ("B", "N", self.hidden_size))
        checks.suits("x", x, self.qkv)
        checks.integer("num_frames", num_frames, 0)
        B, N, C = x.shape
        if N == 0 or N % num_frames != 0 if num_frames else N != 0:
            raise ValueError(f"x's N must be a multiple of num_frames, got x {(B, N, C)} and num_frames {num_frames}")
        S = N // num_frames if num_frames else 1
        if rotary is not None:
            check_rotary(rotary, N, self.head_dim, ("x", x))
        return S

    def _check_own(self, x: Tensor, num_frames: int, mask: Tensor | None, state: GDNState | None) -> None:
        B, N, C = x.shape
        S = N // num_frames if num_frames else 1
        if mask is not None:
            checks.tensor("mask", mask, (B, num_frames), dtype=torch.bool, beside=("x", x))
        if state is not None:
            check_state("state", state, B, self.num_heads, self.head_dim, ("x", x))
            if state.conv_tail is not None and num_frames:
                tail = (B, max(self.conv_kernel_size - 1, 0), S, C)
                checks.tensor("state.conv_tail", state.conv_tail, tail, beside=("x", x))
            if state.conv_tail is None and state.frames and self.conv_kernel_size > 1:
                raise ValueError(
                    f"state has consumed {state.frames} frames but has no conv_tail, which the short convolution of "
                    f"width {self.conv_kernel_size} continues from: give what this layer returned"
                )


def _last_active(mask: Tensor, group: ProcessGroup | None, counts: Sequence[int], call: Call) -> list[int]:
    """By sample, how many frames of the clip there are up to its last active one."""
    rank, size = parallel.rank_and_size(group)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    local = [int(n) for n in (mask * positions).amax(1).tolist()] if mask.shape[1] else [0] * mask.shape[0]
    start = sum(counts[:rank])
    ends = [start + n if n else 0 for n in local]
    if group is not None and size > 1:
        ends = [max(ranks) for ranks in zip(*parallel.gather_ints(ends, group, call), strict=True)]
    return ends


def main_branch_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A SANA-WM attention block's weights without what `BidirectionalGDN` has no place for.

    Dropped are the unused buffer `recall_gate` and the camera branch (`*_cam.*`); a bare strict load refuses them.
    Raises ValueError for anything but a mapping from names.
    """
    if not isinstance(state_dict, Mapping) or not all(isinstance(name, str) for name in state_dict):
        raise ValueError(f"state_dict must be a mapping from names to tensors, got {checks.shown(state_dict)}")
    return {
        name: tensor
        for name, tensor in state_dict.items()
        if name != "recall_gate" and not name.split(".")[0].endswith("_cam")
    }
