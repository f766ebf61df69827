"""SANA-WM at its released size with float32 weights under bfloat16 autocast: what `mixed_precision: bf16` trains."""

import pytest
import torch

from frame_gdn import swap, unswap

from ..helpers import NEEDS_GPU, relative_error

pytest.importorskip("diffusers", minversion="0.42")

from benchmarks.sana_wm import RELEASED, build, make_inputs

pytestmark = NEEDS_GPU

FRAMES, HEIGHT, WIDTH = 11, 22, 40


@pytest.fixture(scope="module")
def model():
    return build(RELEASED, torch.device("cuda")).float()


@torch.no_grad()
def sample(model, inputs, autocast):
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        return model(**inputs).sample.float()


def test_the_error_of_autocast_is_the_stock_models_own(model):
    inputs = make_inputs(model, FRAMES, HEIGHT, WIDTH)
    exact = sample(unswap(model), inputs, autocast=False)
    stock = relative_error(sample(model, inputs, autocast=True), exact)
    swap(model)
    assert relative_error(sample(model, inputs, autocast=False), exact) <= 1e-4
    assert relative_error(sample(model, inputs, autocast=True), exact) <= 1.1 * stock


def names_with_gradients(model, inputs):
    """What a stock model trains: not the decays of its softmax blocks, for one, which it does not use."""
    model.enable_gradient_checkpointing()
    with torch.autocast("cuda", torch.bfloat16):
        model(**inputs).sample.float().square().mean().backward()
    names = [name for name, p in model.named_parameters() if p.grad is not None]
    model.zero_grad()
    return names


def test_a_training_step_lowers_the_loss_on_its_batch(model):
    inputs = make_inputs(model, FRAMES, HEIGHT, WIDTH)
    target = torch.randn_like(inputs["hidden_states"])
    used = set(names_with_gradients(unswap(model).train(), inputs))
    swap(model).enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    losses = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            prediction = model(**inputs).sample
        loss = (prediction.float() - target).square().mean()
        losses.append(loss.item())
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        assert grads.keys() == used
        assert all(grad.isfinite().all() for grad in grads.values())
        optimizer.step()
        optimizer.zero_grad()
    assert losses[1] < losses[0]
