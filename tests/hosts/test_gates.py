"""What holds for every host that gets new gates: what they are on, how they are kept, and what they work with."""

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import cpu_offload, init_empty_weights
from diffusers.hooks import apply_group_offloading
from torch import Tensor, nn

from frame_gdn import parallelize, swap, unswap
from frame_gdn.hosts.gates import START_FORGETTING
from frame_gdn.naive import naive_bidirectional_gdn
from tests.helpers import assert_every_gradient_says_something, fill_randomly, relative_error
from tests.hosts.warm_start import GATES, SWAPPED, blocks_of, frames_of, tiny_inputs, tiny_model

pytestmark = pytest.mark.parametrize("host", SWAPPED)


def swapped_model(host: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Swapped, with gates that are not where they start."""
    return fill_randomly(swap(tiny_model(host, dtype), **options), 1).to(dtype)


@torch.no_grad()
def sample(model: Any, inputs: dict[str, Tensor] | None = None) -> Tensor:
    return model(**(inputs or tiny_inputs())).sample


def added_keys(host: str, blocks: list[int]) -> set[str]:
    prefix = {"sana_video": "transformer_blocks", "wan": "blocks"}[host]
    return {f"{prefix}.{index}.attn1.{gate}" for index in blocks for gate in GATES}


# --- what it computes -------------------------------------------------------------------------------------------


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2)))
    table = torch.complex(cos[..., 0::2], sin[..., 1::2]).to(pairs.dtype)
    return torch.view_as_real(pairs * table).flatten(-2)


@pytest.mark.parametrize("chunk_frames", [None, 2])
def test_attention_is_naive_gdn_on_the_hosts_projections(host: str, chunk_frames: int | None) -> None:
    model = swapped_model(host, torch.float64, blocks=[0, 1, 2], start_scale=0.7, chunk_frames=chunk_frames)
    attn, x, frames = blocks_of(model, host)[1].attn1, torch.randn(2, 5 * 6, 24, dtype=torch.float64), 5
    clip = model.rope(torch.empty(2, 4, frames, 4, 6))
    with torch.no_grad():
        q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x)
        q, k, v = (t.unflatten(-1, (2, 12)) for t in (F.relu(q), F.relu(k) * 0.7 / (12 * 6) ** 0.5, v))
        beta = torch.sigmoid(x @ attn.beta_proj.weight.T + attn.beta_proj.bias)
        gate = x.view(2, frames, 6, 24).mean(2) @ attn.gate_proj.weight.T + attn.gate_proj.bias
        decay = torch.exp(-attn.A_log.exp() * F.softplus(gate + attn.dt_bias))
        tables = (clip.cos.double(), clip.sin.double())
        out, _ = naive_bidirectional_gdn(
            q, k, v, beta, decay, q_rot=rotated(q, *tables), k_rot=rotated(k, *tables), chunk_frames=chunk_frames
        )
        expected = attn.to_out[0](out.flatten(2))
        assert relative_error(attn(x, rotary_emb=clip), expected) < 1e-12


def test_gates_start_where_they_do_next_to_nothing(host: str) -> None:
    attn = blocks_of(swap(tiny_model(host), blocks=[1]), host)[1].attn1
    decay = torch.exp(-attn.A_log.double().exp() * F.softplus(attn.dt_bias.double()))
    assert ((1 - decay) <= START_FORGETTING * (1 + 1e-6)).all() and START_FORGETTING <= 1e-4
    assert (1 - decay > 0).all()
    for linear in (attn.beta_proj, attn.gate_proj):
        assert type(linear) is nn.Linear and not linear.weight.any()


@pytest.mark.parametrize("chunk_frames", [None, 2])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_learns(host: str, chunk_frames: int | None, checkpointing: bool) -> None:
    model = swapped_model(host, blocks=[0, 1, 2], chunk_frames=chunk_frames).train()
    if checkpointing:
        model.enable_gradient_checkpointing()
    loss = model(**tiny_inputs()).sample.square().sum()
    loss.backward()
    assert_every_gradient_says_something(model)
    if checkpointing:
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        model.disable_gradient_checkpointing()
        model(**tiny_inputs()).sample.square().sum().backward()
        assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())


def test_no_frame_sees_past_the_end_of_its_chunk(host: str) -> None:
    """To the bit; while the past crosses chunks' borders, and inside a chunk everything is seen."""
    blocks = None if host == "sana_video" else [0, 2]
    model = swapped_model(host, torch.float64, blocks=blocks, chunk_frames=3)
    inputs = tiny_inputs(8, torch.float64)
    whole = sample(model, inputs)
    for changed in range(8):
        other = copy.deepcopy(inputs)
        other["hidden_states"][:, :, changed] += 1
        differs = [not torch.equal(a, b) for a, b in zip(whole.unbind(2), sample(model, other).unbind(2), strict=True)]
        assert differs == [frame >= changed // 3 * 3 for frame in range(8)]
    assert relative_error(sample(model, frames_of(inputs, slice(0, 3))), whole[:, :, :3]) < 1e-12
    assert relative_error(sample(model, frames_of(inputs, slice(0, 6))), whole[:, :, :6]) < 1e-12


# --- swap and back ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [[1], [0, 2], [0, 1, 2]])
def test_swap_adds_gates_alone_and_unswap_gives_back_the_stock_model_to_the_bit(host: str, blocks: list[int]) -> None:
    model = tiny_model(host)
    stock, before, config = sample(model), model.state_dict(), dict(model.config)
    assert swap(model, blocks=blocks) is model
    assert type(model) is SWAPPED[host]
    after = model.state_dict()
    assert set(after) - set(before) == added_keys(host, blocks)
    assert all(after[key] is before[key] or torch.equal(after[key], before[key]) for key in before)
    assert not torch.equal(sample(model), stock)

    with pytest.warns(UserWarning, match="unswap dropped.*attn1.dt_bias"):
        assert unswap(model) is model
    assert all(type(module).__module__.startswith(("diffusers", "torch")) for module in model.modules())
    assert dict(model.config) == config
    assert model.state_dict().keys() == before.keys()
    assert torch.equal(sample(model), stock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unswap(model)


def test_blocks_that_were_not_chosen_stay_the_hosts_to_the_bit(host: str) -> None:
    model = tiny_model(host)
    stock = sample(model)
    parallelize(model, None) if False else swap(model, blocks=[1])
    with pytest.warns(UserWarning):
        for name in blocks_of(model, host)[1].attn1.release():
            warnings.warn(name, stacklevel=1)
    SWAPPED[host]  # the other two attentions, the rotary embedding and the model are still ours
    attn = blocks_of(model, host)[1].attn1
    attn.__class__ = type(blocks_of(model, host)[0].attn1)
    assert torch.equal(sample(model), stock)
