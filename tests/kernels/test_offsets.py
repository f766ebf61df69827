"""No stride is too large: indices times strides are 64-bit in every kernel, also where each alone fits 32 bits.

The tensors are views of virtual memory that is never touched in between.
"""

import pytest
import torch

pytest.importorskip("triton")

from frame_gdn import bidirectional_gdn
from frame_gdn.kernels.triton.launch import Launcher
from frame_gdn.kernels.triton.operators import (
    glu_conv,
    modulated_norm,
    norm_relu,
    residual,
    rotary,
    short_conv,
    silu_gate,
    turn,
)
from frame_gdn.kernels.triton.steps import TritonSteps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

#: Twice this is beyond 32 bits, and this is not.
FAR = 2**30 + 16


def far_apart(x, dim):
    """x, as a view whose largest offset along `dim` is beyond 32 bits while its stride is not."""
    moved = x.detach().transpose(0, dim)
    count, inner = len(moved), moved[0].numel()
    stride = max(-(-FAR * 2 // (count - 1)) // 16 * 16 + 16, inner)
    storage = torch.empty((count - 1) * stride + inner, dtype=x.dtype, device=x.device)
    view = storage.as_strided(moved.shape, (stride, *moved[0].contiguous().stride()))
    return view.copy_(moved).transpose(0, dim)


def values_and_gradients(function, inputs):
    leaves = {name: x if x is None else x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    for name, x in inputs.items():  # detach keeps the strides
        assert x is None or leaves[name].stride() == x.stride()
    outs = function(**leaves)
    outs = [x for x in (outs if isinstance(outs, (tuple, list)) else [outs]) if x.requires_grad and x.numel()]
    directions = [torch.linspace(-1, 1, x.numel(), device=DEVICE).view(x.shape).to(x.dtype) for x in outs]
    wanted = [x for x in leaves.values() if x is not None and x.requires_grad]
    return [*outs, *torch.autograd.grad(outs, wanted, directions, allow_unused=True)]


def check(function, inputs, places):
    """Every named input far apart along each of its dimensions, one at a time, gives the same to the bit."""
    expected = values_and_gradients(function, inputs)
    for name, dims in places.items():
        for dim in dims:
            moved = far_apart(inputs[name], dim)
            assert any((n - 1) * s >= 2**31 for n, s in zip(moved.shape, moved.stride(), strict=True))
            found = values_and_gradients(function, inputs | {name: moved})
            for x, y in zip(found, expected, strict=True):
                assert x is None if y is None else torch.equal(x, y), (name, dim)


def tokens(*shape):
    return torch.randn(*shape, device=DEVICE).half()


@pytest.mark.long
@pytest.mark.parametrize("rotary_source", ["given", "tables", "none"])
@pytest.mark.parametrize("D", [16, pytest.param(136, marks=pytest.mark.slow)])
def test_the_scan_reads_heads_tokens_and_batches_anywhere(rotary_source, D):
    B, T, S, H = 3, 3, 3, 3
    inputs = {name: tokens(B, T * S, H, D) for name in ("q", "k", "v")} | {"beta": tokens(B, T * S, H).sigmoid()}
    inputs |= {"decay": tokens(B, T, H).sigmoid(), "q_rot": None, "k_rot": None}
    angle = torch.rand(T * S, D // 2, device=DEVICE)
    tables = (angle.cos(), angle.sin()) if rotary_source == "tables" else None
    places = dict.fromkeys(("q", "k", "v", "beta", "decay"), (0, 1, 2))
    if rotary_source == "given":
        inputs |= {"q_rot": tokens(B, T * S, H, D), "k_rot": tokens(B, T * S, H, D)}
        places = {"q_rot": (0, 1, 2), "k_rot": (0, 1, 2)}
    if rotary_source == "none":
        places = {"q": (1,), "k": (1,), "v": (1,)}
    if D > 128:
        B = 1
        inputs = {name: x if x is None else x[:1] for name, x in inputs.items()}
        places = {name: dims[1:2] for name, dims in places.items()}
    check(
        lambda **x: bidirectional_gdn(**x, rotary=tables, eps=1.0, normalize=True, backend="triton")[0], inputs, places
    )


@pytest.mark.long
def test_the_scan_reads_the_outputs_gradient_anywhere():
    q, k, v = (tokens(1, 3 * 3, 3, 16).requires_grad_() for _ in range(3))
    out, _ = bidirectional_gdn(q, k, v, tokens(1, 9, 3), tokens(1, 3, 3).sigmoid(), eps=1.0, backend="triton")
    direction = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), direction, retain_graph=True)
    for dim in (1, 2):
        found = torch.autograd.grad(out, (q, k, v), far_apart(direction, dim), retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.long
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("spans", [1, 3])
def test_the_primitive_reads_transitions_anywhere(dim, spans):
    """Each of two chains, forward and backward."""
    A = [torch.randn(3, 3, 16, 16, device=DEVICE) for _ in range(2)]
    B = [torch.randn(3, 3, 16, 16, device=DEVICE), torch.randn(3, 3, 1, 16, device=DEVICE)]
    steps = TritonSteps(spans=spans)
    for chain in range(2):
        moved = list(A)
        moved[chain] = far_apart(A[chain], dim)
        for x, y in zip(steps.scans(moved, B, [None] * 2), steps.scans(A, B, [None] * 2), strict=True):
            assert torch.equal(x, y)
        pairs = zip(steps.scans_adjoint(moved, B, [None] * 2), steps.scans_adjoint(A, B, [None] * 2), strict=True)
        for found, expected in pairs:
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.long
def test_the_short_convolution_reads_frames_and_tokens_anywhere():
    inputs = {"x": tokens(3, 3, 3, 16), "past": tokens(3, 3, 3, 16), "future": tokens(3, 3, 3, 16)}
    inputs["weight"] = tokens(16, 1, 4)
    check(
        lambda x, past, future, weight: short_conv(x, past, future, weight, 2, 1),
        inputs, dict.fromkeys(("x", "past", "future"), (0, 1, 2)) | {"weight": (0,)},
    )  # fmt: skip


@pytest.mark.long
def test_norm_and_gate_read_tokens_anywhere():
    inputs = {"x": tokens(3, 3, 16), "weight": tokens(16)}
    check(lambda x, weight: norm_relu(x, weight, 1e-5, 0.5), inputs, {"x": (0, 1), "weight": (0,)})
    inputs = {"x": tokens(3, 3, 16), "gate": tokens(3, 3, 16)}
    check(silu_gate, inputs, {"x": (0, 1, 2), "gate": (0, 1, 2)})


@pytest.mark.long
def test_modulation_and_residual_read_tokens_and_frames_anywhere():
    B, T, S, C = 3, 3, 3, 16
    mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    mask[1, 2] = False
    inputs = {"x": tokens(B, T * S, C), "shift": tokens(B, T, C), "scale": tokens(B, T, C)}
    check(
        lambda x, shift, scale: modulated_norm(x, shift, scale, mask, 1e-6)[0],
        inputs, {"x": (0, 1), "shift": (0, 1), "scale": (0, 1)},
    )  # fmt: skip
    inputs = {
        "x": tokens(B, T * S, C),
        "h": tokens(B, T * S, C),
        "gate": tokens(B, T, C),
        "extra": tokens(B, T * S, C),
    }
    check(
        lambda x, h, gate, extra: residual(x, h, gate, extra, mask, T),
        inputs, {"x": (0, 1), "h": (0, 1), "gate": (0, 1), "extra": (0, 1)},
    )  # fmt: skip


@pytest.mark.long
def test_rotary_and_ucpe_read_heads_and_matrices_anywhere():
    B, N, H, D = 3, 3, 3, 16
    angle = torch.rand(B, N, D // 2, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()
    check(lambda x: rotary(x, cos, sin, False), {"x": tokens(B, N, H, D)}, {"x": (0, 1, 2)})
    table = torch.randn(1, N, D // 4, 2, device=DEVICE)
    matrix = torch.randn(B, N, 4, 4, device=DEVICE)
    for inverse in (False, True):
        check(lambda x: turn(x, matrix, table, inverse), {"x": tokens(B, N, H, D)}, {"x": (0, 1, 2)})  # noqa: B023
    expected = turn(tokens(B, N, H, D).zero_() + 1, matrix, table, False)
    for dim in range(4):
        found = turn(tokens(B, N, H, D).zero_() + 1, far_apart(matrix, dim), table, False)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.long
def test_the_feed_forwards_convolution_reads_pixels_anywhere():
    inputs = {"x": tokens(3, 3, 3, 16), "weight": tokens(16, 1, 3, 3), "bias": tokens(16)}
    check(lambda x, weight, bias: glu_conv(x, weight, bias, True), inputs, {"x": (0, 1, 2, 3), "weight": (0, 3)})


@pytest.mark.parametrize("expanded", ["q", "k", "v"])
def test_heads_may_share_their_tokens(expanded):
    """A stride of zero is a stride as any other."""
    inputs = {name: tokens(2, 6, 1 if name == expanded else 3, 16) for name in ("q", "k", "v")}
    inputs[expanded] = inputs[expanded].expand(-1, -1, 3, -1)
    beta, decay = tokens(2, 6, 3).sigmoid(), tokens(2, 2, 3).sigmoid()
    out, _ = bidirectional_gdn(**inputs, beta=beta, decay=decay, eps=1.0, backend="triton")
    inputs[expanded] = inputs[expanded].contiguous()
    expected, _ = bidirectional_gdn(**inputs, beta=beta, decay=decay, eps=1.0, backend="triton")
    assert torch.equal(out, expected)


def test_more_programs_than_a_grid_holds_are_refused():
    with pytest.raises(ValueError, match="2147483648 programs"):
        Launcher().launch(None, lambda tile: 2**31, (torch.empty(1),), {}, ({"num_warps": 4},))
