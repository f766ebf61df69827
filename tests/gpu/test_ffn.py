"""SANA-WM's feed-forward at its size on a GPU: the kernel in its middle, and the swapped module around it."""

import copy
from functools import partial

import pytest
import torch

from ..helpers import NEEDS_GPU, fill_randomly, relative_error
from ..kernels.test_glu_conv import gated_convolution, inputs_of
from ..kernels.test_layer_operators import check, random, values_and_gradients

pytestmark = NEEDS_GPU

C, HIDDEN, H, W = 2240, 6720, 22, 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("images", "K", "silu"), [(3, 3, True), (1, 5, False)])
def test_kernel_against_float64(dtype, images, K, silu):
    check(gated_convolution(silu), inputs_of(images, H, W, HIDDEN, K, dtype))


def test_a_clip_is_no_further_from_float64_than_the_plain_chain():
    run, inputs = gated_convolution(), inputs_of(41, H, W, HIDDEN, 3, torch.bfloat16)
    direction = random(41, H, W, HIDDEN, dtype=torch.bfloat16)
    exact = values_and_gradients(partial(run, "torch"), inputs, direction, torch.float64)
    plain, ours = (
        {name: relative_error(value, exact[name]) for name, value in found.items()}
        for found in (values_and_gradients(partial(run, name), inputs, direction) for name in ("torch", "triton"))
    )
    assert all(error <= plain[name] for name, error in ours.items()), f"{ours}, plain torch {plain}"


def test_large_and_small_gates_in_bfloat16():
    """Where the hardware's tanh is at its coarsest."""
    inputs = inputs_of(2, H, W, 64, 3, torch.bfloat16)
    for scale in (0.1, 4.0, 30.0):
        check(gated_convolution(), {**inputs, "x": inputs["x"] * scale})


def test_more_elements_than_an_int32_counts():
    images = 200
    x = torch.zeros(images, H, W, 2 * HIDDEN, device="cuda", dtype=torch.bfloat16)
    x[-1].normal_()
    inputs = inputs_of(1, H, W, HIDDEN, 3, torch.bfloat16)
    direction = torch.zeros(images, H, W, HIDDEN, device="cuda", dtype=torch.bfloat16)
    direction[-1].normal_()
    run = gated_convolution()
    whole = values_and_gradients(partial(run, "triton"), {**inputs, "x": x}, direction)
    alone = values_and_gradients(partial(run, "triton"), {**inputs, "x": x[-1:].clone()}, direction[-1:])
    assert torch.equal(whole["out"][-1:], alone["out"]) and torch.equal(whole["dx"][-1:], alone["dx"])
    assert relative_error(whole["dweight"], alone["dweight"]) <= 2**-8


def test_two_runs_are_equal_to_the_bit_and_wait_for_nothing():
    run, inputs = gated_convolution(), inputs_of(5, H, W, HIDDEN, 3, torch.bfloat16)
    direction = random(5, H, W, HIDDEN, dtype=torch.bfloat16)
    first = values_and_gradients(partial(run, "triton"), inputs, direction)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = values_and_gradients(partial(run, "triton"), inputs, direction)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_the_swapped_module_is_no_further_from_float64_than_the_host():
    host = pytest.importorskip("diffusers.models.transformers.transformer_sana_wm")
    from ..hosts.test_sana_ffn import swapped

    frames = 3
    plain = fill_randomly(host.GLUMBConvTemp(C, HIDDEN, use_bias=(True, True, False))).cuda().bfloat16()
    x = random(1, frames * H * W, C, dtype=torch.bfloat16)
    direction = random(1, frames * H * W, C, dtype=torch.bfloat16)
    found = []
    for ffn in (copy.deepcopy(plain).double(), plain, swapped(copy.deepcopy(plain), "auto")):
        given = x.detach().to(next(ffn.parameters()).dtype).requires_grad_()
        out = ffn(given, HW=(frames, H, W))
        assert out.is_contiguous()
        out.backward(direction.to(out.dtype))
        found.append({"out": out, "x": given.grad, **{n: p.grad for n, p in ffn.named_parameters()}})
    exact, theirs, ours = found
    for name, value in exact.items():
        error, bound = relative_error(ours[name], value), relative_error(theirs[name], value)
        assert error <= 1.1 * bound, f"{name}: {error}, the host {bound}"
