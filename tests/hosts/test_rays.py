"""UCPE: the plain path against the host's own functions, the Triton kernels against the plain path in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers import NEEDS_GPU, relative_error

pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models.transformers.transformer_sana_wm import (
    _apply_ucpe_transform,
    _downscale_to_reference_rms,
)

from frame_gdn.hosts.sana_wm.rays import into_rays, out_of_rays

Rays = tuple[Tensor, Tensor, Tensor, Tensor | None]


def make(B: int, N: int, H: int, D: int, dtype: torch.dtype, table: str = "shared") -> tuple[list[Tensor], Rays]:
    """q, k, v as strided views of one projection; matrices large enough that some tokens are scaled back, some not."""
    qkv = torch.randn(B, N, 3, H, D, dtype=dtype)
    P = torch.randn(B, N, 4, 4) * torch.rand(B, N, 1, 1)
    angle = torch.randn(B if table == "a sample" else 1, 1, N, D // 4)
    rotary = None if table == "none" else torch.polar(torch.ones_like(angle), angle)
    return list(qkv.unbind(2)), (P, P.mT, torch.randn(B, N, 4, 4), rotary)


@pytest.mark.parametrize("table", ["shared", "a sample", "none"])
def test_rays_equal_the_host(table: str) -> None:
    (q, k, v), rays = make(2, 7, 3, 16, torch.float32, table)
    ours = into_rays((q, k, v), rays, "torch")
    for t, mine, matrix in zip((q, k, v), ours, (rays[1], rays[2], rays[2]), strict=False):
        heads = t.transpose(1, 2)
        turned = _apply_ucpe_transform(heads, matrix, rays[3])
        expected = _downscale_to_reference_rms(heads.mT, turned.mT).mT.transpose(1, 2)
        assert relative_error(mine, expected) <= 1e-6
    assert relative_error(ours[3], ours[1].square().sum(-1) / k.square().sum(-1)) <= 1e-6
    world = _apply_ucpe_transform(q.transpose(1, 2), rays[0], rays[3], inverse_rope=True).transpose(1, 2)
    assert relative_error(out_of_rays(q, rays, "torch"), world) <= 1e-6


def run(qkv: list[Tensor], rays: Rays, backend: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Every output, and the gradients of q, k and v where every output counts."""
    leaves = [t.detach().to(dtype).requires_grad_() for t in qkv]
    outputs: list[Any] = [*into_rays(leaves, rays, backend), out_of_rays(leaves[0], rays, backend)]
    g = torch.Generator().manual_seed(0)
    loss = sum((out * torch.randn(out.shape, generator=g).to(out)).sum() for out in outputs)
    return outputs, list(torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("D", [8, 24, 112])
@pytest.mark.parametrize("table", ["shared", "a sample", "none"])
def test_kernels_equal_the_plain_path_in_float64(D: int, table: str) -> None:
    qkv, rays = make(2, 19, 2, D, torch.float32, table)
    qkv[1][:, 3] = 0  # a key that ReLU left empty
    exact, exact_gradients = run(qkv, rays, "torch", torch.float64)
    ours, gradients = run(qkv, rays, "triton", torch.float32)
    for mine, expected in zip([*ours, *gradients], [*exact, *exact_gradients], strict=True):
        assert relative_error(mine, expected) <= 2e-6


@pytest.mark.parametrize("H", [10, 23])
def test_as_many_heads_as_there_are(H: int) -> None:
    qkv, rays = make(1, 3, H, 8, torch.float32)
    exact, exact_gradients = run(qkv, rays, "torch", torch.float64)
    ours, gradients = run(qkv, rays, "triton", torch.float32)
    for mine, expected in zip([*ours, *gradients], [*exact, *exact_gradients], strict=True):
        assert relative_error(mine, expected) <= 2e-6


def test_tokens_and_matrices_as_they_lie() -> None:
    (q, k, v), rays = make(2, 5, 3, 16, torch.float32)
    apart = [q.mT.contiguous().mT, k.transpose(1, 2).contiguous().transpose(1, 2), v.flip(1)[:, :1].expand(q.shape)]
    P, _, P_inv, table = rays
    lying = P.mT, P, P_inv.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2), table
    exact, exact_gradients = run([t.contiguous() for t in apart], lying, "torch", torch.float64)
    ours, gradients = run(apart, lying, "triton", torch.float32)
    for mine, expected in zip([*ours, *gradients], [*exact, *exact_gradients], strict=True):
        assert relative_error(mine, expected) <= 2e-6


def test_no_tokens() -> None:
    qkv, rays = make(2, 0, 3, 16, torch.float32)
    outputs, gradients = run(qkv, rays, "triton", torch.float32)
    assert [out.shape for out in outputs] == [q.shape for q in qkv] + [(2, 0, 3), qkv[0].shape]
    assert all(gradient.shape == t.shape for gradient, t in zip(gradients, qkv, strict=True))


def test_the_compiler_takes_them_whole() -> None:
    qkv, rays = make(1, 5, 2, 16, torch.float32)
    expected, expected_gradients = run(qkv, rays, "triton", torch.float32)
    compiled = torch.compile(
        lambda qkv: [*into_rays(qkv, rays, "triton"), out_of_rays(qkv[0], rays, "triton")],
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in qkv]
    outputs = compiled(leaves)
    g = torch.Generator().manual_seed(0)
    loss = sum((out * torch.randn(out.shape, generator=g)).sum() for out in outputs)
    assert isinstance(loss, Tensor)
    gradients = torch.autograd.grad(loss, leaves)
    for mine, other in zip([*outputs, *gradients], [*expected, *expected_gradients], strict=True):
        assert relative_error(mine, other) <= 1e-6


def test_the_operator_keeps_the_rules_of_operators() -> None:
    pytest.importorskip("triton")
    from frame_gdn.kernels.triton import ucpe

    (q, *_), (P, *_) = make(1, 5, 2, 8, torch.float32)
    for inverse in (False, True):
        torch.library.opcheck(
            ucpe.turn, (q.clone().requires_grad_(), P, torch.randn(1, 5, 2, 2), inverse),
            test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "device", "sizes"),
    [
        (torch.float16, "cpu", (1, 33, 2, 16)),
        # The interpreter cuts bfloat16 off where a GPU rounds.
        pytest.param(torch.bfloat16, "cuda", (1, 880 * 3, 20, 112), marks=NEEDS_GPU),
        pytest.param(torch.float16, "cuda", (2, 880, 20, 112), marks=NEEDS_GPU),
        pytest.param(torch.bfloat16, "cuda", (1, 77, 3, 24), marks=NEEDS_GPU),  # rows end within a word
    ],
)
def test_kernels_in_half_precision_are_as_close_as_the_plain_path(
    dtype: torch.dtype, device: str, sizes: tuple[int, int, int, int]
) -> None:
    qkv, rays = make(*sizes, dtype)
    qkv, rays = [t.to(device) for t in qkv], tuple(t.to(device) for t in rays)
    exact, exact_gradients = run(qkv, rays, "torch", torch.float64)
    plain, plain_gradients = run(qkv, rays, "torch", dtype)
    ours, gradients = run(qkv, rays, "triton", dtype)
    for mine, other, expected in zip(
        [*ours, *gradients], [*plain, *plain_gradients], [*exact, *exact_gradients], strict=True
    ):
        assert relative_error(mine, expected) <= max(2 * relative_error(other, expected), 1e-6)
