"""torch.compile takes the scan and the layer whole, and changes nothing."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from frame_gdn import BidirectionalGDN
from frame_gdn.chunks import ChunkGrid
from frame_gdn.gdn import GDNState, bidirectional_gdn
from frame_gdn.ops import gdn_scan_op

from .helpers import fill_randomly, relative_error

B, T, S, H, D = 1, 3, 4, 2, 16


def inputs(dtype=torch.float32):
    tokens = [torch.rand(B, T * S, H, D, dtype=dtype) for _ in range(3)]
    gates = [torch.rand(B, T * S, H, dtype=dtype), torch.rand(B, T, H, dtype=dtype)]
    return [x.requires_grad_() for x in (*tokens, *gates)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("rollout", [False, True])
def test_a_compiled_call_equals_an_eager_one(backend, rollout):
    tables = torch.rand(T * S, D // 2), torch.rand(T * S, D // 2)
    states = [torch.randn(B, H, D, D).requires_grad_(), torch.randn(B, H, D).requires_grad_()] if rollout else []

    def call(*tensors):
        state = GDNState(*tensors[5:]) if rollout else None
        out, final = bidirectional_gdn(
            *tensors[:5], rotary=tables, initial_state=state, output_final_state=rollout,
            chunk_frames=2 if rollout else None, backend=backend,
        )  # fmt: skip
        return (out, final.S, final.z) if final is not None else (out,)

    tensors = [*inputs(), *states]
    eager, compiled = call(*tensors), torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors)
    for a, b in zip(eager, compiled, strict=True):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(sum(x.square().sum() for x in found), tensors) for found in (eager, compiled)]
    for a, b in zip(*grads, strict=True):
        assert relative_error(a, b) <= 1e-6


def test_a_layer_compiles_whole():
    layer = fill_randomly(BidirectionalGDN(H * D, H))
    x, tables = torch.randn(B, T * S, H * D), (torch.rand(T * S, D // 2), torch.rand(T * S, D // 2))
    eager, _ = layer(x, T, rotary=tables)
    compiled, _ = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, T, rotary=tables)
    assert relative_error(compiled, eager) <= 1e-6


def test_the_operator_keeps_the_rules_of_operators():
    torch.library.opcheck(
        gdn_scan_op,
        (*inputs(torch.float64), *[None] * 7, True, 1e-6, [1, 2, 9], True, "torch", "default"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


@pytest.mark.parametrize("grid", [ChunkGrid(), ChunkGrid(2), ChunkGrid(2, 3), ChunkGrid(2, 3, True)], ids=str)
def test_one_graph_serves_every_length(grid):
    torch.compiler.reset()
    layer = fill_randomly(BidirectionalGDN(24, 3))
    graphs = CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=graphs)
    for T in range(3, 14):
        x = torch.randn(1, T * 5, 24)
        assert torch.equal(compiled(x, T, **grid.facts)[0], layer(x, T, **grid.facts)[0])
    assert graphs.frame_count == 1
