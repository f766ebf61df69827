"""The Triton kernels at real shapes on a GPU, and in the company they keep there: graphs, compilers, streams."""

import pytest
import torch

from frame_gdn import BidirectionalGDN
from frame_gdn.functional import rotary as rotary_embedding
from frame_gdn.gdn import bidirectional_gdn
from frame_gdn.kernels.naive import naive_bidirectional_gdn
from frame_gdn.kernels.triton.scan import span_length
from frame_gdn.kernels.triton.steps import TritonSteps

from ..helpers import NEEDS_GPU, fill_randomly, relative_error
from ..kernels.test_steps import check_against_the_loop, check_the_primitive, tokens

pytestmark = NEEDS_GPU

SANA_WM = {"B": 1, "T": 5, "S": 880, "H": 20, "D": 112}
ODD = {"B": 2, "T": 3, "S": 257, "H": 3, "D": 64}
WIDE = {"B": 1, "T": 4, "S": 100, "H": 2, "D": 256}


def gradients(inputs, function, direction, dtype=None):
    leaves = {name: x.detach().to(dtype or x.dtype).requires_grad_() for name, x in inputs.items()}
    out = function(leaves)
    grads = torch.autograd.grad(out, list(leaves.values()), direction.to(out.dtype))
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


@pytest.mark.parametrize(
    ("shape", "dtype", "rotary"),
    [
        (SANA_WM, torch.bfloat16, "given"),
        (SANA_WM, torch.bfloat16, "tables"),
        (SANA_WM, torch.float16, "tables"),
        (SANA_WM, torch.float32, "tables"),
        (ODD, torch.bfloat16, "tables"),
        (ODD, torch.float32, "given"),
        (WIDE, torch.bfloat16, "given"),
        (WIDE, torch.float16, "tables"),
        (WIDE, torch.float32, "tables"),
        ({**WIDE, "D": 144}, torch.bfloat16, "tables"),
    ],
)
def test_no_error_is_beyond_twice_that_of_plain_torch(shape, dtype, rotary):
    """Every input in the dtype, decay and beta too, so that each gradient is rounded once by both."""
    inputs, tables = tokens(*(shape[x] for x in "BTSHD"), dtype)
    if rotary == "given":
        inputs |= {f"{name}_rot": rotary_embedding(inputs[name], *tables, backend="torch") for name in ("q", "k")}
    direction = torch.randn_like(inputs["v"].contiguous())

    def loop(leaves):
        rotated = {}
        if rotary == "tables":
            cos, sin = (table.double() for table in tables)
            rotated = {f"{name}_rot": rotary_embedding(leaves[name], cos, sin, backend="torch") for name in ("q", "k")}
        return naive_bidirectional_gdn(**leaves, **rotated, eps=1e-6)[0]

    def on(backend):
        given = tables if rotary == "tables" else None
        return lambda leaves: bidirectional_gdn(**leaves, rotary=given, eps=1e-6, backend=backend)[0]

    exact = gradients(inputs, loop, direction, torch.float64)
    plain = gradients(inputs, on("torch"), direction)
    ours = gradients(inputs, on("triton"), direction)
    errors = {name: (relative_error(ours[name], x), relative_error(plain[name], x)) for name, x in exact.items()}
    # Plain torch in float32 is at the level of the sums' order, where no factor of two is meant.
    slack = 1e-5 if dtype == torch.float32 else 0.0
    worst = {name: pair for name, pair in errors.items() if not pair[0] <= 2 * pair[1] + slack}
    assert not worst, f"(ours, plain torch): {worst} of {errors}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_masks_states_and_chunks_at_real_shapes(dtype):
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    check_against_the_loop(
        1, 7, 330, 4, 112, dtype, rotary="tables", masked=True, state=True, chunk_frames=3, bound=bound
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk_frames", [None, 5])
def test_spans_side_by_side_at_real_shapes(dtype, chunk_frames):
    bound = 2**-7 if dtype == torch.bfloat16 else 1e-5
    check_against_the_loop(
        1, 19, 330, 2, 112, dtype, rotary="tables", masked=True, state=True, chunk_frames=chunk_frames,
        backend=TritonSteps(spans=4), bound=bound,
    )  # fmt: skip


def test_few_heads_and_many_frames_are_scanned_in_spans():
    assert span_length(TritonSteps(), 484, 2, 64, 1, 2, 2, torch.device("cuda", 0)) < 100
    check_against_the_loop(1, 96, 16, 2, 64, rotary="tables", bound=1e-5)
    check_the_primitive(2, 96, 64, False, bound=1e-5)


def test_more_elements_than_an_int32_counts():
    T, S, H, D = 2050, 1024, 8, 128  # q, k, v as views of one tensor of 6.4e9 elements
    qkv = torch.zeros(1, T * S, 3, H, D, device="cuda", dtype=torch.bfloat16)
    last = qkv[:, -S:]
    last.normal_()
    last[:, :, 1] *= (D * S) ** -0.5
    beta, decay = (torch.rand(1, n, H, device="cuda", dtype=torch.bfloat16) for n in (T * S, T))
    out, _ = bidirectional_gdn(*qkv.unbind(2), beta, decay, chunk_frames=1, normalize=False)
    alone, _ = bidirectional_gdn(*last.unbind(2), beta[:, -S:], decay[:, -1:], chunk_frames=1, normalize=False)
    assert torch.equal(out[:, -S:], alone)


def test_a_cuda_graph_replays_it():
    inputs, tables = tokens(1, 3, 64, 4, 112, torch.bfloat16)

    def call():
        return bidirectional_gdn(**inputs, rotary=tables, backend="triton")[0]

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = call()
    inputs["q"].mul_(0.5)
    inputs["v"].neg_()
    graph.replay()
    assert torch.equal(out, call())


def test_the_compiler_takes_function_and_layer_whole():
    inputs, tables = tokens(1, 3, 64, 4, 112, torch.bfloat16)

    def call(*tensors):
        return bidirectional_gdn(*tensors, rotary=tables)[0]

    leaves = [x.detach().requires_grad_() for x in inputs.values()]
    eager, compiled = call(*leaves), torch.compile(call, fullgraph=True)(*leaves)
    assert torch.equal(eager, compiled)
    grads = [torch.autograd.grad(out.float().square().sum(), leaves) for out in (eager, compiled)]
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) <= 1e-6

    layer = fill_randomly(BidirectionalGDN(4 * 112, 4)).cuda().bfloat16()
    x = torch.randn(1, 3 * 64, 4 * 112, device="cuda", dtype=torch.bfloat16)
    eager, compiled = (f(x, 3, rotary=tables)[0] for f in (layer, torch.compile(layer, fullgraph=True)))
    assert relative_error(compiled, eager) <= 2**-6


def test_two_streams_do_not_meet():
    calls = [tokens(1, 3, 200, 4, 112, torch.bfloat16) for _ in range(2)]
    alone = [bidirectional_gdn(**inputs, rotary=tables, backend="triton")[0] for inputs, tables in calls]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    for _ in range(10):
        outs = []
        for stream, (inputs, tables) in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                outs.append(bidirectional_gdn(**inputs, rotary=tables, backend="triton")[0])
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(outs, alone, strict=True))


def test_nothing_waits_for_the_device():
    inputs, tables = tokens(1, 3, 64, 4, 112, torch.bfloat16)
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    bidirectional_gdn(**leaves, rotary=tables)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        bidirectional_gdn(**leaves, rotary=tables)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
