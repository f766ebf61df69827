"""The temporal convolution as products that add up, against the one product over frames side by side."""

import pytest
import torch

from frame_gdn import functional
from frame_gdn.chunks import ChunkGrid
from frame_gdn.kernels.temporal_conv import temporal_conv

from ..helpers import relative_error
from .test_layer_operators import DTYPES, GRIDS, check, random, values_and_gradients


def convolution(ends=None):
    def run(backend, x, weight, past=None, future=None):
        return functional.temporal_conv(x, weight, past, future, ends=ends, backend=backend)

    return run


def inputs_of(B, T, S, C, halo="both", dtype=torch.float32):
    inputs = {"x": random(B, T, S, C, dtype=dtype), "weight": random(C, 3 * C, dtype=dtype)}
    for name in {"none": (), "past": ("past",), "both": ("past", "future")}[halo]:
        inputs[name] = random(B, 1, S, C, dtype=dtype)
    return inputs


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("halo", ["none", "past", "both"])
@pytest.mark.parametrize(("B", "T"), [(1, 1), (1, 7), (2, 5)])
def test_it_equals_one_product_over_frames_side_by_side(B, T, halo, grid):
    inputs = {name: t.double() for name, t in inputs_of(B, T, 3, 8, halo).items()}
    direction = random(B, T, 3, 8).double()
    ends = grid.ends(2, T + 3)
    expected = values_and_gradients(lambda **x: convolution(ends)("torch", **x), inputs, direction)

    def by_products(x, weight, past=None, future=None):
        return temporal_conv(x, past, future, weight, ends)

    for name, value in values_and_gradients(by_products, inputs, direction).items():
        assert relative_error(value, expected[name]) <= 1e-14, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_exact_as_the_plain_form(dtype):
    check(convolution(ChunkGrid(3).ends(2, 99)), inputs_of(1, 6, 5, 48, dtype=dtype))


def test_a_shard_without_frames_has_no_output_and_gradients_of_zero():
    inputs = {name: t.requires_grad_() for name, t in inputs_of(2, 0, 3, 8).items()}
    out = convolution()("triton", **inputs)
    out.sum().backward()
    assert out.shape == (2, 0, 3, 8)
    assert not any(t.grad.any() for t in inputs.values())


def test_the_operator_keeps_the_rules_of_operators():
    inputs = {name: t.requires_grad_() for name, t in inputs_of(2, 5, 3, 8).items()}
    torch.library.opcheck(
        temporal_conv, (inputs["x"], inputs["past"], None, inputs["weight"], [1, 2, 9]),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )  # fmt: skip
