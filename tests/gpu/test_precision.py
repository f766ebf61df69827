"""On a GPU, results are as exact as float32 whatever torch allows float32 products to be."""

import pytest
import torch

from frame_gdn import BidirectionalGDN, bidirectional_gdn, cp_frame_gdn_scan, parallel
from frame_gdn.kernels.products import exact_matmul

from ..helpers import NEEDS_GPU, fill_randomly, relative_error

pytestmark = NEEDS_GPU

#: SANA-WM's head dimension and most frames; few heads, so that the float64 reference takes seconds.
BH, T, D, S = 4, 121, 112, 64


def allow_nothing():
    torch.backends.cuda.matmul.allow_tf32 = False


def allow_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True


def allow_medium():
    torch.set_float32_matmul_precision("medium")


@pytest.fixture(params=[allow_nothing, allow_tf32, allow_medium])
def switch(request):
    before = torch.get_float32_matmul_precision()
    request.param()
    yield request.param
    torch.set_float32_matmul_precision(before)


def errors(function, inputs):
    """Relative errors of values and gradients in float32 against float64 on the plain backend."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        outs = function(leaves, "torch" if dtype == torch.float64 else None)
        directions = [torch.linspace(-1, 1, x.numel(), device="cuda", dtype=dtype).view(x.shape) for x in outs]
        found[dtype] = [*outs, *torch.autograd.grad(outs, leaves, directions)]
    return [relative_error(x, y) for x, y in zip(*found.values(), strict=True)]


def transitions():
    """W and W° near the identity, as 121 frames of a clip make them, and U, u°."""
    k = torch.randn(BH, T, S, D, device="cuda", dtype=torch.float64).relu() * (D * S) ** -0.5
    beta = torch.rand(BH, T, S, 1, device="cuda", dtype=torch.float64)
    W = (1 - 0.01 * torch.rand(BH, T, 1, 1, device="cuda", dtype=torch.float64)) * (
        torch.eye(D, device="cuda", dtype=torch.float64) - (k * beta).mT @ k
    )
    U = torch.randn_like(k).mT @ (k * beta)
    return [W, U, W, (k * beta).sum(-2)]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_primitive_is_float32(switch, backend):
    found = errors(lambda x, exact: cp_frame_gdn_scan(*x, backend=exact or backend), transitions())
    assert max(found) <= 5e-6, (switch.__name__, found)


def clip_inputs():
    q, k, v = torch.randn(3, 1, 21 * S, BH, D, device="cuda", dtype=torch.float64).unbind(0)
    beta, decay = (torch.rand(1, n, BH, device="cuda", dtype=torch.float64) for n in (21 * S, 21))
    return [q.relu(), k.relu() * (D * S) ** -0.5, v, beta, 0.9 + 0.1 * decay]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_scan_of_a_clip_is_float32(switch, backend):
    found = errors(lambda x, exact: [bidirectional_gdn(*x, eps=1e-6, backend=exact or backend)[0]], clip_inputs())
    assert max(found) <= 5e-6, (switch.__name__, found)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_the_layers_scan_is_float32(switch, backend, monkeypatch):
    """The layer's own Linears obey torch's switches, as those of any model; its scan does not."""
    layer = fill_randomly(BidirectionalGDN(BH * D, BH, backend=backend)).cuda()
    scans = []

    def kept(*tensors, **options):
        scans.append((tensors, options, whole(*tensors, **options)))
        return scans[-1][2]

    from frame_gdn import layer as module

    whole = module.bidirectional_gdn
    monkeypatch.setattr(module, "bidirectional_gdn", kept)
    layer(torch.randn(1, 5 * S, BH * D, device="cuda"), 5)
    ((tensors, options, (out, _)),) = scans
    exact, _ = whole(*(x.double() for x in tensors), **{**options, "backend": "torch"})
    assert relative_error(out, exact) <= 5e-6, switch.__name__


def test_states_are_composed_between_ranks_in_float32(switch):
    """The fold that every rank makes of the transitions and states gathered from eight."""
    W, U, _, _ = transitions()
    ends = {}
    for dtype in (torch.float32, torch.float64):
        M, h = [], []
        for w, u in zip(W.chunk(8, 1), U.chunk(8, 1), strict=True):
            m, state = torch.eye(D, device="cuda", dtype=torch.float64).expand(BH, D, D), torch.zeros_like(u[:, 0])
            for t in range(w.shape[1]):
                m, state = m @ w[:, t], state @ w[:, t] + u[:, t]
            M.append(m.to(dtype))
            h.append(state.to(dtype))
        ends[dtype] = parallel._fold(torch.stack(M), torch.stack(h))
    assert relative_error(ends[torch.float32], ends[torch.float64]) <= 2e-6, switch.__name__


def test_an_ordinary_product_is_not():
    """What the switches do without this: the tests above would see it."""
    a, b = torch.randn(2, 512, 512, device="cuda").unbind(0)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert relative_error(a @ b, a.double() @ b.double()) > 1e-4
        assert relative_error(exact_matmul(a, b), a.double() @ b.double()) <= 1e-7
    finally:
        torch.set_float32_matmul_precision(before)
