"""Float32 stays float32 where torch allows less: on hardware whose float32 products are then TF32, emulated."""

import pytest
import torch
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

from frame_gdn import bidirectional_gdn, cp_frame_gdn_scan, parallel
from frame_gdn.kernels.products import exact_matmul

from ..helpers import relative_error


class Tf32Products(TorchDispatchMode):
    """Hardware that cuts the operands of float32 products to TF32's ten bits where torch allows it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        packet = getattr(function, "overloadpacket", function)
        if packet in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm):
            args = tuple(cut(x) if isinstance(x, torch.Tensor) and x.dtype == torch.float32 else x for x in args)
        return function(*args, **(kwargs or {}))


def cut(x):
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.fixture(params=["high", "medium"])
def lowered(request):
    """torch allows less than float32, for as long as the test runs."""
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision("highest")


def values_and_gradients(function, inputs, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    outs = function(*leaves)
    directions = [torch.linspace(-1, 1, x.numel(), dtype=dtype).view(x.shape) for x in outs]
    return [*outs, *torch.autograd.grad(outs, leaves, directions)]


def primitive(*tensors):
    return cp_frame_gdn_scan(*tensors[:4], initial_state=tensors[4:], backend="torch")


def clip(*tensors):
    return [bidirectional_gdn(*tensors, eps=1e-6, backend="torch")[0]]


def inputs_of(function):
    BH, T, D, S = 2, 6, 24, 9
    if function is primitive:
        shapes = [(BH, T, D, D), (BH, T, D, D), (BH, T, D, D), (BH, T, D), (BH, D, D), (BH, D)]
        return [torch.randn(shape, dtype=torch.float64) / (D**0.5 if len(shape) == 4 else 1) for shape in shapes]
    q, k, v = torch.randn(3, 1, T * S, BH, D, dtype=torch.float64).unbind(0)
    beta, decay = torch.rand(1, T * S, BH, dtype=torch.float64), torch.rand(1, T, BH, dtype=torch.float64)
    return [q.relu(), k.relu() * (D * S) ** -0.5, v, beta, decay]


@pytest.mark.parametrize("function", [primitive, clip])
def test_the_plain_backend_is_float32_whatever_torch_allows(function, lowered):
    inputs = inputs_of(function)
    exact = values_and_gradients(function, inputs, torch.float64)
    with Tf32Products():
        found = values_and_gradients(function, inputs, torch.float32)
    errors = [relative_error(x, y) for x, y in zip(found, exact, strict=True)]
    assert max(errors) <= 3e-6, errors


def test_the_scans_within_transforms_are_float32_whatever_torch_allows(lowered):
    for function in (primitive, clip):
        inputs = inputs_of(function)
        exact = function(*inputs)[0]
        with Tf32Products():
            found = vmap(lambda *x, function=function: function(*x)[0])(*(x.float()[None] for x in inputs))[0]
        assert relative_error(found, exact) <= 3e-6


def test_what_ranks_compose_is_float32_whatever_torch_allows(lowered):
    M, h = torch.randn(2, 7, 2, 24, 24, dtype=torch.float64).div(24**0.5).unbind(0)
    exact = h[0]
    for i in range(1, 7):
        exact = exact @ M[i] + h[i]
    M, h = M.float(), h.float()
    with Tf32Products():
        assert relative_error(parallel._fold(M, h), exact) <= 3e-7
        joined = [(M[0], h[0])]
        for i in range(1, 7):
            joined = parallel._join(joined, [(M[i], h[i])])
        assert relative_error(joined[0][1], exact) <= 1e-6


def test_the_emulation_lowers_an_ordinary_product(lowered):
    a, b = torch.randn(2, 40, 40).unbind(0)
    with Tf32Products():
        assert relative_error(a @ b, a.double() @ b.double()) > 1e-4
        assert relative_error(exact_matmul(a, b), a.double() @ b.double()) < 1e-7


def test_without_a_switch_the_product_is_torchs_own():
    a, b = torch.randn(2, 40, 40).unbind(0)
    assert torch.equal(exact_matmul(a, b), a @ b)
    assert exact_matmul(a.double(), b.double()).dtype == torch.float64
