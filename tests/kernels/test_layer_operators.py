"""The kernels around the scan against the plain path in float64, and the layer built from them."""

import statistics

import pytest
import torch
from torch import Tensor, nn

from frame_gdn import BidirectionalGDN, GDNState
from frame_gdn.chunks import ChunkGrid
from frame_gdn.functional import silu_gate
from frame_gdn.layer import ReLURMSNorm, TemporalShortConv

from ..helpers import assert_every_gradient_says_something, fill_randomly, relative_error
from .test_steps import DEVICE, poisoned_memory  # noqa: F401 (a fixture)

pytest.importorskip("triton")

from frame_gdn.kernels.triton import gate, norm, short_conv

#: What float32 sums in another order may differ by.
FLOAT32 = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: The interpreter cuts bfloat16 off where a GPU rounds, which doubles the error of what is rounded once.
CUT_OFF = {torch.bfloat16: 2.0} if DEVICE == "cpu" else {}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float64).to(dtype)


def slice_of_qkv(B: int, T: int, S: int, C: int, dtype: torch.dtype, part: int = 1) -> Tensor:
    """(B, T, S, C) as the layer hands it on: a part of a fused projection, its rows 3 C apart."""
    return random(B, T * S, 3 * C, dtype=dtype).chunk(3, -1)[part].unflatten(1, (T, S))


def values_and_gradients(run, inputs, direction, dtype=None) -> dict[str, Tensor]:
    """Of `run` at these inputs, cast to dtype if one is given (then contiguous, else as they lie)."""
    leaves = {
        name: (x.detach() if dtype is None else x.detach().to(dtype)).requires_grad_() for name, x in inputs.items()
    }
    out = run(**leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), direction.to(out.dtype))
    return {"out": out.detach(), **{f"d{name}": d for name, d in zip(leaves, grads, strict=True)}}


def check(run, inputs: dict[str, Tensor]) -> None:
    """Output and every gradient of run(backend, **inputs): on Triton at most twice as far from float64 as in torch."""
    dtype = next(iter(inputs.values())).dtype
    with torch.no_grad():
        direction = random(*run("torch", **inputs).shape, dtype=dtype)
    exact = values_and_gradients(lambda **x: run("torch", **x), inputs, direction, torch.float64)
    plain = values_and_gradients(lambda **x: run("torch", **x), inputs, direction)
    ours = values_and_gradients(lambda **x: run("triton", **x), inputs, direction)
    for name, x in exact.items():
        assert ours[name].dtype == plain[name].dtype, name
        found, bound = relative_error(ours[name], x), 2 * relative_error(plain[name], x)
        bound = max(bound, FLOAT32) if dtype == torch.float32 else bound * CUT_OFF.get(dtype, 1.0)
        assert found <= bound, f"{name} is {found} from float64, at most {bound} was allowed"


WHOLE = ChunkGrid()
#: Grids of chunks, the first of which cuts nothing.
GRIDS = [
    WHOLE,
    ChunkGrid(1),
    ChunkGrid(2),
    ChunkGrid(3),
    ChunkGrid(2, 4),
    ChunkGrid(1, 3),
    ChunkGrid(3, 1, True),
]


def convolution(grid=WHOLE, first_frame=0):
    def run(backend, x, weight, past=None, future=None):
        conv = TemporalShortConv(x.shape[-1], weight.shape[-1])
        del conv.weight
        conv.weight = weight
        return conv(x, past, future, grid.ends(first_frame, first_frame + x.shape[1] + 1), backend)

    return run


def scaled_norm(backend, x, weight):
    norm = ReLURMSNorm(x.shape[-1], eps=1e-5)
    del norm.weight
    norm.weight = weight
    return norm(x, 0.3, backend)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("halo", ["none", "past", "both"])
def test_convolution_with_chunks_and_halos(grid, halo):
    B, T, S, C, K = 2, 5, 5, 24, 4
    inputs = {"x": slice_of_qkv(B, T, S, C, torch.float32), "weight": random(C, 1, K)}
    if halo != "none":
        inputs["past"] = slice_of_qkv(B, K - 1, S, C, torch.float32)
    if halo == "both":
        inputs["future"] = slice_of_qkv(B, K - 1, S, C, torch.float32, 2)
    check(convolution(grid, first_frame=2), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("B", "T", "S", "C", "K"),
    [(1, 1, 5, 24, 4), (1, 3, 1, 336, 2), (2, 2, 5, 112, 4), (1, 7, 3, 8, 1), (1, 2, 2, 5, 6)],
)
def test_convolution_of_ugly_shapes(dtype, B, T, S, C, K):
    inputs = {"x": slice_of_qkv(B, T, S, C, dtype), "weight": random(C, 1, K, dtype=dtype)}
    if K > 1:
        inputs["past"], inputs["future"] = random(2, B, K - 1, S, C, dtype=dtype).unbind(0)
    check(convolution(), inputs)


def test_convolution_of_any_dimensions_and_of_nothing():
    conv = fill_randomly(TemporalShortConv(6, 3)).to(DEVICE)
    for shape in ((2, 4, 6), (1, 4, 2, 3, 6), (1, 0, 5, 6), (1, 4, 0, 6)):
        x = random(*shape).requires_grad_()
        out = conv(x, None, None, backend="triton")
        assert relative_error(out, conv(x, None, None, backend="torch")) <= FLOAT32
        out.sum().backward()
        assert x.grad.isfinite().all() and conv.weight.grad.isfinite().all()


def test_convolution_of_tokens_whose_channels_lie_apart():
    weight = random(24, 1, 4)
    check(convolution(), {"x": random(1, 3, 24, 5).transpose(2, 3), "weight": weight})
    check(convolution(), {"x": random(1, 1, 5, 24).expand(1, 3, 5, 24), "weight": weight})


def test_a_frame_that_no_tap_reaches_may_hold_anything():
    x = random(1, 5, 3, 8)
    x[:, 4] = float("nan")
    conv = fill_randomly(TemporalShortConv(8, 2)).to(DEVICE)
    out = conv(x, None, None, ChunkGrid(2).ends(0, 99), backend="triton")
    assert out[:, :4].isfinite().all() and out[:, 4].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("B", "N", "C"), [(1, 1, 24), (2, 5, 112), (1, 7, 336), (1, 3, 2240)])
def test_norm_with_relu_and_scale(dtype, B, N, C):
    check(scaled_norm, {"x": slice_of_qkv(B, 1, N, C, dtype).squeeze(1), "weight": 1 + 0.3 * random(C, dtype=dtype)})


@pytest.mark.parametrize("halo", [False, True])
def test_programs_that_sum_over_many_tokens(halo):
    """Several a program, one program with fewer: the sums of one token a program, which the tests above check."""
    x, dout = slice_of_qkv(2, 3, 5, 24, torch.float32), random(2, 3, 5, 24)
    past, future = random(2, 2, 2, 5, 24).unbind(0) if halo else (None, None)
    inputs = (dout, x, past, future, random(24, 1, 3), [1, 2, 9] if halo else None)
    sums = (torch.ops.frame_gdn.short_conv_backward(*inputs, programs=n) for n in (4, 99))
    for few, many in zip(*sums, strict=True):
        assert not many.numel() or relative_error(few, many) <= 1e-6
    inputs = (dout, x, random(24), 1e-5, 0.5)
    sums = (torch.ops.frame_gdn.norm_relu_backward(*inputs, programs=n) for n in (4, 99))
    for few, many in zip(*sums, strict=True):
        assert relative_error(few, many) <= 1e-6


def test_norm_keeps_zeros_finite_and_a_nan_visible():
    x = random(1, 3, 8)
    x[:, 0], x[0, 1, 2] = 0, float("nan")
    x.requires_grad_()
    norm = ReLURMSNorm(8, eps=1e-5).to(DEVICE)
    out = norm(x, backend="triton")
    out[:, [0, 2]].sum().backward()
    assert not out[:, 0].any() and out[:, 1].isnan().all() and out[:, 2].isfinite().all()
    assert x.grad[:, [0, 2]].isfinite().all()


def test_float32_weights_around_16_bit_tokens():
    """What autocast gives."""
    x = slice_of_qkv(1, 3, 5, 24, torch.float16)
    norm = fill_randomly(ReLURMSNorm(24, eps=1e-5)).to(DEVICE)
    conv = fill_randomly(TemporalShortConv(24, 4)).to(DEVICE)
    for run in (lambda backend: norm(x, 0.5, backend), lambda backend: conv(x, None, None, backend=backend)):
        assert run("triton").dtype == run("torch").dtype == torch.float16
        assert relative_error(run("triton"), run("torch")) <= 2**-9


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9, 24), (2, 37, 112)])
def test_output_gate(dtype, shape):
    check(
        lambda backend, x, gate: silu_gate(x, gate, x.dtype, backend),
        {"x": random(*shape, dtype=dtype), "gate": random(2, *shape, dtype=dtype)[1]},
    )


# --- the layer --------------------------------------------------------------------------------------------------

B, T, S, H, D = 2, 4, 5, 2, 24
C = H * D


def layer_values(layer: nn.Module, x: Tensor, backend: str, dtype: torch.dtype, **options) -> dict[str, Tensor]:
    layer.backend = backend
    layer.to(dtype).zero_grad()
    x = x.detach().to(dtype).requires_grad_()
    tables = options.pop("tables", None)
    rotary = None if tables is None else tuple(table.to(dtype) for table in tables)
    out, final = layer(x, T, rotary=rotary, **options)
    g = torch.Generator().manual_seed(0)

    def loss(t: Tensor) -> Tensor:
        return (t * torch.randn(t.shape, generator=g, dtype=torch.float64).to(t)).sum()

    total = loss(out)
    found = {"out": out.detach()}
    if final is not None:
        found |= {"S": final.S.detach(), "z": final.z.detach(), "conv_tail": final.conv_tail.detach()}
        total = total + loss(final.S) + loss(final.z) + loss(final.conv_tail)
    total.backward()
    assert_every_gradient_says_something(layer)
    return found | {"dx": x.grad} | {f"d{name}": p.grad.clone() for name, p in layer.named_parameters()}


@pytest.mark.parametrize("chunk_frames", [None, 2])
@pytest.mark.parametrize("rollout", [False, True])
def test_layer_equals_its_plain_path_with_every_gradient(chunk_frames, rollout):
    layer = fill_randomly(BidirectionalGDN(C, H)).to(DEVICE)
    x, angle = random(B, T * S, C), 6.28 * torch.rand(T * S, D // 2, device=DEVICE)
    options = {"tables": (angle.cos(), angle.sin()), "chunk_frames": chunk_frames}
    if rollout:
        mask = torch.tensor([[True, True, True, False], [False, True, True, True]], device=DEVICE)
        state = GDNState(0.1 * random(B, H, D, D), random(B, H, D).abs(), 3, random(B, 3, S, C))
        options |= {"mask": mask, "state": state, "output_final_state": True}
    exact = layer_values(layer, x, "torch", torch.float64, **options)
    ours = layer_values(layer, x, "triton", torch.float32, **options)
    errors = {name: relative_error(ours[name], value) for name, value in exact.items()}
    worst = {name: error for name, error in errors.items() if not error <= 5e-6}
    assert not worst, f"{worst} of {errors}"


@pytest.mark.slow
def test_layer_in_half_precision_is_as_close_as_its_plain_path():
    """By the median of three clips: a key that rounding carries across ReLU's kink decides over the error of one."""
    layer = fill_randomly(BidirectionalGDN(12 * 16, 12)).to(DEVICE).half()
    errors: dict[str, list[tuple[float, float]]] = {}
    for _ in range(3):
        x = random(B, T * S, 12 * 16, dtype=torch.float16)
        exact = layer_values(layer, x, "torch", torch.float64)
        plain, ours = (layer_values(layer, x, backend, torch.float16) for backend in ("torch", "triton"))
        for name, value in exact.items():
            found = relative_error(ours[name], value), relative_error(plain[name], value)
            errors.setdefault(name, []).append(found)
    for name, pairs in errors.items():
        found, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        assert found <= 2 * theirs, f"{name}: {found}, plain torch {theirs}"


def test_layer_names_its_weights_as_before():
    assert sorted(BidirectionalGDN(C, H).state_dict()) == sorted(
        ["A_log", "dt_bias", "qkv.weight", "q_norm.weight", "k_norm.weight", "conv_k.weight"]
        + [
            f"{name}.{kind}"
            for name in ("beta_proj", "gate_proj", "output_gate", "proj")
            for kind in ("weight", "bias")
        ]
    )


def test_two_calls_of_the_layer_are_equal_to_the_bit():
    layer = fill_randomly(BidirectionalGDN(C, H)).to(DEVICE)
    x = random(B, T * S, C)
    first, second = (layer_values(layer, x, "triton", torch.float32) for _ in range(2))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_compiler_takes_the_layer_whole():
    layer = fill_randomly(BidirectionalGDN(C, H, backend="triton")).to(DEVICE)
    x = random(B, T * S, C)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    outs = [f(x, T)[0] for f in (layer, compiled)]
    assert relative_error(outs[1], outs[0]) <= FLOAT32
    grads = [torch.autograd.grad(out.square().sum(), list(layer.parameters())) for out in outs]
    for (name, _), a, b in zip(layer.named_parameters(), *grads, strict=True):
        assert relative_error(b, a) <= 1e-5, name


def test_the_operators_keep_the_rules_of_operators():
    x, weight = slice_of_qkv(1, 3, 2, 8, torch.float32).requires_grad_(), random(8, 1, 2).requires_grad_()
    past = random(1, 1, 2, 8).requires_grad_()
    gamma = random(8).requires_grad_()
    for operator, arguments in (
        (short_conv.short_conv, (x, past, None, weight, [1, 2, 9])),
        (norm.norm_relu, (x, gamma, 1e-5, 0.5)),
        (gate.silu_gate, (x, random(1, 3, 2, 8).requires_grad_())),
    ):
        torch.library.opcheck(
            operator, arguments,
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
        )  # fmt: skip
