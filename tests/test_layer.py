"""BidirectionalGDN in one process: SANA-WM's numbers, its state, its padding, what it refuses."""

import copy
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from frame_gdn import BidirectionalGDN, GDNState
from frame_gdn.chunks import ChunkGrid
from frame_gdn.layer import SILU_ONE, TemporalShortConv, main_branch_state_dict
from tests.helpers import assert_every_gradient_says_something, fill_randomly, relative_error

B, T, H, D, HEIGHT, WIDTH = 2, 5, 3, 16, 2, 3
S, C = HEIGHT * WIDTH, H * D


def tokens(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(B, T * S, C, generator=generator, dtype=torch.float64).to(dtype)
    angle = 3 * torch.rand(T * S, D // 2, generator=generator, dtype=torch.float64)
    return x, angle


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_diffusers_sana_wm_main_branch_with_its_weights_loaded_by_name(rotary, masked):
    sana_wm = pytest.importorskip("diffusers.models.transformers.transformer_sana_wm")
    attention = sana_wm.BidirectionalGDNUCPESinglePathLiteLA
    host = fill_randomly(attention(C, C, cam_dim=C, cam_heads=H, heads=H, qk_norm=True))
    layer = BidirectionalGDN(C, H)
    layer.load_state_dict(main_branch_state_dict(host.state_dict()))
    with pytest.raises(RuntimeError, match="recall_gate"):
        layer.load_state_dict(host.state_dict())
    x, angle = tokens()
    mask = torch.tensor([[True] * 4 + [False], [True, True, False, True, False]]) if masked else None
    table = torch.polar(torch.ones_like(angle), angle).to(torch.complex64)
    xs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    expected = host(xs[0], HW=(T, HEIGHT, WIDTH), rotary_emb=table if rotary else None, frame_valid_mask=mask)
    out, _ = layer(xs[1], T, rotary=(angle.cos(), angle.sin()) if rotary else None, mask=mask)
    assert relative_error(out, expected) <= 1e-5
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_every_gradient_says_something(layer)
    references = dict(host.named_parameters())
    for name, parameter in layer.named_parameters():
        assert relative_error(parameter.grad, references[name].grad) <= 1e-4, name
    if mask is None:
        assert relative_error(xs[1].grad, xs[0].grad) <= 1e-4


def test_gates_start_near_plain_linear_attention():
    layer = BidirectionalGDN(C, H)
    x, _ = tokens()
    assert torch.allclose(torch.nn.functional.silu(layer.output_gate(x)), torch.ones(()), atol=1e-6)
    assert SILU_ONE / (1 + torch.tensor(-SILU_ONE).exp()) == pytest.approx(1.0)
    assert layer.conv_k.weight[:, 0].tolist() == [[0.0, 0.0, 0.0, 1.0]] * C
    assert (layer.beta_proj(x).sigmoid() > 0.99).all()


def test_short_convolution_weighs_past_and_future_alike_and_counts_its_centre_once():
    conv = TemporalShortConv(1, 3)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([[[100.0, 10.0, 1.0]]]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]).view(1, 4, 1, 1)
    zeros = torch.zeros(1, 2, 1, 1)
    assert conv(x, zeros, zeros).flatten().tolist() == [1 + 20 + 300, 2 + 40 + 400, 3 + 60 + 100, 4 + 30 + 200]
    chunked = conv(x, zeros, zeros, ChunkGrid(2).ends(0, T))
    assert chunked.flatten().tolist() == [1 + 20, 2 + 10, 3 + 60 + 100, 4 + 30 + 200]


@pytest.mark.parametrize("chunk_frames", [1, 2, 3])
def test_chunk_by_chunk_from_a_carried_state_equals_one_pass(chunk_frames):
    layer = fill_randomly(BidirectionalGDN(C, H).double())
    x, angle = tokens(torch.float64)
    keywords = {"chunk_frames": chunk_frames, "output_final_state": True}
    whole, end = layer(x, T, rotary=(angle.cos(), angle.sin()), **keywords)
    outs, state = [], None
    for first in range(0, T, chunk_frames):
        frames = min(chunk_frames, T - first)
        part = slice(first * S, (first + frames) * S)
        rotary = (angle[part].cos(), angle[part].sin())
        out, state = layer(x[:, part], frames, rotary=rotary, state=state, **keywords)
        state = GDNState.from_state_dict(state.clone().state_dict())
        outs.append(out)
    assert relative_error(torch.cat(outs, 1), whole) <= 1e-12
    for name in ("S", "z", "conv_tail"):
        assert relative_error(getattr(state, name), getattr(end, name)) <= 1e-12
    assert state.frames == end.frames == T
    assert end.conv_tail.shape == (B, 3, S, C)


def test_chunk_causal_sees_nothing_past_its_chunk():
    layer = fill_randomly(BidirectionalGDN(C, H).double())
    x, _ = tokens(torch.float64)
    x.requires_grad_()
    out, _ = layer(x, T, chunk_frames=2)
    for t in range(T):
        (grad,) = torch.autograd.grad(out.unflatten(1, (T, S))[:, t].sum(), x, retain_graph=True)
        reached = grad.unflatten(1, (T, S)).abs().amax((0, 2, 3)) > 0
        assert reached.tolist() == [frame < (t // 2 + 1) * 2 for frame in range(T)]


def test_a_state_after_padding_is_the_state_after_the_last_active_frame():
    layer = fill_randomly(BidirectionalGDN(C, H).double())
    x, _ = tokens(torch.float64)
    mask = torch.tensor([[True, True, True, False, False]] * B)
    _, padded = layer(x, T, mask=mask, output_final_state=True)
    _, short = layer(x[:, : 3 * S], 3, output_final_state=True)
    assert padded.frames == 3
    for name in ("S", "z", "conv_tail"):
        assert relative_error(getattr(padded, name), getattr(short, name)) <= 1e-12


def test_nan_in_a_padded_frame_reaches_nothing_and_the_layer_returns_its_bias_there():
    layer = fill_randomly(BidirectionalGDN(C, H))
    x, angle = tokens()
    mask = torch.tensor([[True, False, True, True, False]] * B)
    results = []
    for poison in (0.0, float("nan")):
        layer.zero_grad()
        y = x.clone()
        y.unflatten(1, (T, S))[~mask] = poison
        y.requires_grad_()
        out, state = layer(y, T, rotary=(angle.cos(), angle.sin()), mask=mask, output_final_state=True)
        assert torch.equal(out.unflatten(1, (T, S))[~mask], layer.proj.bias.expand(B * 2, S, C))
        (out.square().sum() + state.S.sum() + state.conv_tail.sum()).backward()
        assert not y.grad.unflatten(1, (T, S))[~mask].any()
        results.append([out, state.S, y.grad, *(p.grad.clone() for p in layer.parameters())])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


def test_checkpointing_changes_nothing():
    layer = fill_randomly(BidirectionalGDN(C, H).double())
    x, _ = tokens(torch.float64)
    layer(x, T)[0].square().sum().backward()
    plain = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    checkpoint(lambda y: layer(y, T)[0], x, use_reentrant=False).square().sum().backward()
    for (name, p), reference in zip(layer.named_parameters(), plain, strict=True):
        assert torch.equal(p.grad, reference), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_layers_run_and_train(dtype):
    layer = fill_randomly(BidirectionalGDN(C, H))
    x, angle = tokens()
    expected, _ = layer(x, T, rotary=(angle.cos(), angle.sin()))
    low = copy.deepcopy(layer).to(dtype)
    out, _ = low(x.to(dtype), T, rotary=(angle.cos(), angle.sin()))
    assert out.dtype == dtype and relative_error(out, expected) < 0.05
    out.float().square().sum().backward()
    assert_every_gradient_says_something(low)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, _ = layer(x, T, rotary=(angle.cos(), angle.sin()))
    assert relative_error(under, expected) < 0.05


def test_the_group_is_dropped_by_pickle_and_kept_by_reference_in_deepcopy():
    layer = BidirectionalGDN(C, H)
    layer.group = marker = object()
    assert copy.deepcopy(layer).group is marker
    assert pickle.loads(pickle.dumps(layer)).group is None
    assert layer.group is marker and "group" not in layer.state_dict()


def state(conv_tail: torch.Tensor) -> GDNState:
    return GDNState(torch.zeros(B, H, D, D), torch.zeros(B, H, D), 0, conv_tail)


BAD = {
    "x must be": lambda layer, x: layer(x[0], T),
    r"x must be a tensor \(B, N, 48\)": lambda layer, x: layer(x[..., :-1], T),
    "multiple of num_frames": lambda layer, x: layer(x, 4),
    "rotary's cos must be": lambda layer, x: layer(x, T, rotary=(x[0, :, :3], x[0, :, :3])),
    r"mask must be a tensor \(2, 5\) of bool": lambda layer, x: layer(x, T, mask=torch.ones(B, T)),
    "conv_tail must be": lambda layer, x: layer(x, T, state=state(x[:, None])),
    "chunk_frames must be": lambda layer, x: layer(x, T, chunk_frames=-1),
    "None or an int from 1, got 0": lambda layer, x: layer(x, T, chunk_frames=0),
    "hidden_size must be": lambda layer, x: BidirectionalGDN(10, 3),
    "conv_kernel_size": lambda layer, x: BidirectionalGDN(C, H, conv_kernel_size=-1),
}


@pytest.mark.parametrize("match", BAD)
def test_bad_input_is_a_value_error(match):
    with pytest.raises(ValueError, match=match):
        BAD[match](BidirectionalGDN(C, H), tokens()[0])
