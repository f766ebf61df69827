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


def check(function, inputs, *places):
    """Inputs far apart along dimensions, as each of `places` says by name, give the same to the bit."""
    expected = values_and_gradients(function, inputs)
    for place in places:
        moved = {name: far_apart(inputs[name], dim) for name, dim in place.items()}
        for x in moved.values():
            assert any((n - 1) * stride >= 2**31 > stride for n, stride in zip(x.shape, x.stride(), strict=True))
        found = values_and_gradients(function, inputs | moved)
        for x, y in zip(found, expected, strict=True):
            assert x is None if y is None else torch.equal(x, y), place


def tokens(*shape, dtype=torch.float16):
    return torch.randn(*shape, device=DEVICE).to(dtype)


#: B, T, S, H with 3 along one of them, the dimension of tokens that has these 3, and of decay (B, T, H).
SHAPES = [((3, 1, 1, 1), 0, 0), ((1, 3, 1, 1), 1, 1), ((1, 1, 3, 1), 1, None), ((1, 1, 1, 3), 2, 2)]
SCANS = [(*shape, 16, torch.float16, rotary) for shape in SHAPES for rotary in ("given", "tables", "none")]
#: The wide kernels locate frames as the others do; they have loops of their own over tokens.
SCANS += [(*SHAPES[2], 136, torch.float32, "given")]


@pytest.mark.parametrize(("shape", "dim", "gate_dim", "D", "dtype", "rotary_source"), SCANS)
def test_the_scan_reads_batches_frames_tokens_and_heads_anywhere(shape, dim, gate_dim, D, dtype, rotary_source):
    B, T, S, H = shape
    inputs = {name: tokens(B, T * S, H, D, dtype=dtype) for name in ("q", "k", "v")}
    inputs |= {"beta": tokens(B, T * S, H, dtype=dtype).sigmoid(), "decay": tokens(B, T, H, dtype=dtype).sigmoid()}
    place = dict.fromkeys(("q", "k", "v", "beta"), dim) | ({} if gate_dim is None else {"decay": gate_dim})
    if rotary_source == "given":
        inputs |= {name: tokens(B, T * S, H, D, dtype=dtype) for name in ("q_rot", "k_rot")}
        place |= {"q_rot": dim, "k_rot": dim}
    angle = torch.rand(T * S, D // 2, device=DEVICE)
    tables = (angle.cos(), angle.sin()) if rotary_source == "tables" else None
    check(lambda **x: bidirectional_gdn(**x, rotary=tables, eps=1.0, backend="triton")[0], inputs, place)


def test_the_scan_reads_the_outputs_gradient_anywhere():
    q, k, v = (tokens(1, 3, 3, 16).requires_grad_() for _ in range(3))
    out, _ = bidirectional_gdn(
        q, k, v, tokens(1, 3, 3).sigmoid(), tokens(1, 1, 3).sigmoid(), eps=1.0, backend="triton"
    )
    direction = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), direction, retain_graph=True)
    for dim in (1, 2):
        found = torch.autograd.grad(out, (q, k, v), far_apart(direction, dim), retain_graph=True)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_the_primitive_reads_transitions_anywhere(dim):
    """Both chains, forward and backward, in one span and in three."""
    BH, T = (3, 1) if dim == 0 else (1, 3)
    A = [torch.randn(BH, T, 16, 16, device=DEVICE) for _ in range(2)]
    B = [torch.randn(BH, T, 16, 16, device=DEVICE), torch.randn(BH, T, 1, 16, device=DEVICE)]
    moved = [far_apart(a, dim) for a in A]
    for spans in (1, 3):
        steps = TritonSteps(spans=spans)
        for x, y in zip(steps.scans(moved, B, [None] * 2), steps.scans(A, B, [None] * 2), strict=True):
            assert torch.equal(x, y)
        pairs = zip(steps.scans_adjoint(moved, B, [None] * 2), steps.scans_adjoint(A, B, [None] * 2), strict=True)
        for found, expected in pairs:
            assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_the_short_convolution_reads_frames_and_tokens_anywhere(dim):
    shape = [3 if i in (1, dim) else 1 for i in range(3)]  # the halo has three frames
    inputs = {name: tokens(*shape, 16) for name in ("x", "past", "future")} | {"weight": tokens(16, 1, 4)}
    place = dict.fromkeys(("x", "past", "future"), dim) | {"weight": 0}
    check(lambda x, past, future, weight: short_conv(x, past, future, weight, [1, 2, 9]), inputs, place)


def test_norm_and_gate_read_tokens_anywhere():
    inputs = {"x": tokens(3, 3, 16), "weight": tokens(16)}
    check(lambda x, weight: norm_relu(x, weight, 1e-5, 0.5), inputs, {"x": 0, "weight": 0}, {"x": 1})
    inputs = {"x": tokens(3, 3, 16), "gate": tokens(3, 3, 16)}
    check(silu_gate, inputs, {"x": 0, "gate": 1}, {"x": 2, "gate": 2})


@pytest.mark.parametrize("dim", [0, 1])
def test_modulation_and_residual_read_tokens_and_frames_anywhere(dim):
    B, T, S, C = (3, 1, 3, 16) if dim == 0 else (1, 3, 3, 16)
    mask = torch.ones(B, T, dtype=torch.bool, device=DEVICE)
    mask[-1, -1] = False
    inputs = {"x": tokens(B, T * S, C), "shift": tokens(B, T, C), "scale": tokens(B, T, C)}
    place = dict.fromkeys(inputs, dim)
    check(lambda x, shift, scale: modulated_norm(x, shift, scale, mask, 1e-6)[0], inputs, place)
    inputs = {name: tokens(B, T * S, C) for name in ("x", "h", "extra")} | {"gate": tokens(B, T, C)}
    place = dict.fromkeys(inputs, dim)
    check(lambda x, h, gate, extra: residual(x, h, gate, extra, mask, T), inputs, place)


def test_rotary_and_ucpe_read_heads_and_matrices_anywhere():
    B, N, H, D = 3, 3, 3, 16
    angle, places = torch.rand(B, N, D // 2, device=DEVICE), [{"x": dim} for dim in range(3)]
    cos, sin = angle.cos(), angle.sin()
    check(lambda x: rotary(x, cos, sin, False), {"x": tokens(B, N, H, D)}, *places)
    table = torch.randn(1, N, D // 4, 2, device=DEVICE)
    matrix = torch.randn(B, N, 4, 4, device=DEVICE)
    check(lambda x: turn(x, matrix, table, False), {"x": tokens(B, N, H, D)}, *places)
    x = tokens(B, N, H, D)
    expected = turn(x, matrix, table, False)
    for dim in range(4):
        found = turn(x, far_apart(matrix, dim), table, False)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_feed_forwards_convolution_reads_pixels_anywhere():
    inputs = {"x": tokens(3, 3, 3, 8), "weight": tokens(8, 1, 3, 3), "bias": tokens(8)}
    places = {"x": 0, "weight": 0}, {"x": 1}
    check(lambda x, weight, bias: glu_conv(x, weight, bias, True), inputs, *places)


@pytest.mark.parametrize("expanded", ["q", "k", "v"])
def test_heads_may_share_their_tokens(expanded):
    """A stride of zero is a stride as any other."""
    inputs = {name: tokens(1, 4, 1 if name == expanded else 2, 16) for name in ("q", "k", "v")}
    inputs[expanded] = inputs[expanded].expand(-1, -1, 2, -1)
    beta, decay = tokens(1, 4, 2).sigmoid(), tokens(1, 2, 2).sigmoid()
    out, _ = bidirectional_gdn(**inputs, beta=beta, decay=decay, eps=1.0, backend="triton")
    inputs[expanded] = inputs[expanded].contiguous()
    expected, _ = bidirectional_gdn(**inputs, beta=beta, decay=decay, eps=1.0, backend="triton")
    assert torch.equal(out, expected)


def test_more_programs_than_a_grid_holds_are_refused():
    with pytest.raises(ValueError, match="2147483648 programs"):
        Launcher().launch(None, lambda tile: 2**31, (torch.empty(1),), {}, ({"num_warps": 4},))
