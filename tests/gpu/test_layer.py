"""The kernels around the scan at SANA-WM's size on a GPU, and the layer in graphs and compilers."""

import pytest
import torch

from frame_gdn import BidirectionalGDN
from frame_gdn.chunks import ChunkGrid
from frame_gdn.functional import silu_gate
from frame_gdn.layer import ReLURMSNorm, TemporalShortConv

from ..helpers import NEEDS_GPU, fill_randomly, relative_error
from ..kernels.test_layer_operators import check, convolution, random, scaled_norm, slice_of_qkv

pytestmark = NEEDS_GPU

C, S = 2240, 880
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("grid", [ChunkGrid(), ChunkGrid(3), ChunkGrid(3, 10, True)], ids=str)
def test_convolution_between_two_halos(dtype, grid):
    inputs = {"x": slice_of_qkv(1, 5, S, C, dtype), "weight": random(C, 1, 4, dtype=dtype)}
    inputs["past"], inputs["future"] = random(2, 1, 3, S, C, dtype=dtype).unbind(0)
    check(convolution(grid, first_frame=7), inputs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_with_relu_and_scale(dtype):
    check(
        scaled_norm, {"x": slice_of_qkv(1, 5, S, C, dtype).flatten(1, 2), "weight": 1 + 0.3 * random(C, dtype=dtype)}
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_gate(dtype):
    inputs = {name: random(1, 5 * S, C, dtype=dtype) for name in ("x", "gate")}
    check(lambda backend, x, gate: silu_gate(x, gate, x.dtype, backend), inputs)


def test_more_elements_than_an_int32_counts():
    """A slice of a projection of 3 · 2240 channels and 440 frames: its last token is 2.6e9 elements in."""
    T = 440
    qkv = torch.zeros(1, T * S, 3 * C, device="cuda", dtype=torch.bfloat16)
    k = qkv[..., C : 2 * C].unflatten(1, (T, S))
    k[:, -8:].normal_()
    conv = fill_randomly(TemporalShortConv(C, 4)).cuda().bfloat16()
    norm = fill_randomly(ReLURMSNorm(C, eps=1e-5)).cuda().bfloat16()
    with torch.no_grad():
        out, alone = conv(k, None, None), conv(k[:, -8:].clone(), None, None)
        assert torch.equal(out[:, -5:], alone[:, -5:])
        assert torch.equal(norm(k.flatten(1, 2))[:, -S:], norm(k[:, -1].clone()))


@pytest.fixture
def layer():
    return fill_randomly(BidirectionalGDN(4 * 112, 4)).cuda().bfloat16()


def test_a_cuda_graph_replays_the_layer(layer):
    x = torch.randn(1, 3 * 64, 4 * 112, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x, 3)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, _ = layer(x, 3)
        x.mul_(0.5)
        graph.replay()
        assert torch.equal(out, layer(x, 3)[0])


def test_the_compiler_takes_the_layer_and_its_gradients_whole(layer):
    x = torch.randn(1, 3 * 64, 4 * 112, device="cuda", dtype=torch.bfloat16)
    outs = [f(x, 3)[0] for f in (layer, torch.compile(layer, fullgraph=True))]
    assert relative_error(outs[1], outs[0]) <= 2**-6
    weights = dict(layer.named_parameters())
    grads = [torch.autograd.grad(out.float().square().sum(), list(weights.values())) for out in outs]
    for name, a, b in zip(weights, *grads, strict=True):
        assert relative_error(b, a) <= 2**-5, name


def test_two_runs_are_equal_to_the_bit_and_wait_for_nothing(layer):
    x = torch.randn(1, 3 * 64, 4 * 112, device="cuda", dtype=torch.bfloat16)

    def run():
        layer.zero_grad()
        out, _ = layer(x, 3)
        out.float().square().sum().backward()
        return [out, *(p.grad.clone() for p in layer.parameters())]

    first = run()
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
