"""bidirectional_gdn in one process: values and every gradient, by name, against the naive loop in float64."""

import pickle

import pytest
import torch

from frame_gdn import GDNState, bidirectional_gdn
from frame_gdn.kernels.naive import naive_bidirectional_gdn
from frame_gdn.kernels.plain import product, transitions
from frame_gdn.kernels.types import Inputs
from tests.helpers import relative_error


def clip(B=2, T=5, S=7, H=2, D=12, masked=False, seed=0, dtype=torch.float64):
    """A clip's inputs by name, requiring gradients, and a mask that leaves every sample the same count of active
    frames."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    N, scale = T * S, (D * S) ** -0.5
    tensors = {
        "q": draw(B, N, H, D).relu(),
        "k": draw(B, N, H, D).relu() * scale,
        "v": draw(B, N, H, D),
        "beta": draw(B, N, H).sigmoid(),
        "decay": (1 + draw(B, T, H)).sigmoid(),
        "q_rot": draw(B, N, H, D),
        "k_rot": draw(B, N, H, D) * scale,
        "S0": draw(B, H, D, D),
        "z0": draw(B, H, D).abs(),
    }
    mask = None
    if masked:
        mask = torch.ones(B, T, dtype=torch.bool)
        for b in range(B):
            mask[b, [(2 * b) % T, (2 * b + 2) % T]] = False
    return {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}, mask


def objective(outputs):
    """A scalar that gives every element of every output a weight of its own."""
    total = 0
    for i, out in enumerate(outputs):
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        total = total + (out * weights).sum()
    return total


@pytest.mark.parametrize("chunk_frames", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(2, 5, 7, 2, 12), (1, 1, 1, 1, 1), (1, 4, 5, 2, 112)])
def test_values_and_gradients_equal_the_loop(chunk_frames, rotary, masked, normalize, shape):
    B, T, S, H, D = shape
    masked = masked and T > 1
    x, mask = clip(B, T, S, H, D, masked)
    if not rotary:
        del x["q_rot"], x["k_rot"]
    if not normalize:
        del x["z0"]
    tokens = [x[n] for n in ("q", "k", "v", "beta", "decay")]
    keywords = {"q_rot": x.get("q_rot"), "k_rot": x.get("k_rot"), "mask": mask, "chunk_frames": chunk_frames,
                "normalize": normalize, "eps": 1e-3}  # fmt: skip
    z0 = x.get("z0", torch.zeros(B, H, D, dtype=torch.float64))
    expected, (S_end, z_end) = naive_bidirectional_gdn(*tokens, initial_state=(x["S0"], z0), **keywords)
    out, final = bidirectional_gdn(*tokens, initial_state=GDNState(x["S0"], z0), output_final_state=True, **keywords)
    ours, theirs = [out, final.S], [expected, S_end]
    if normalize:
        ours, theirs = [*ours, final.z], [*theirs, z_end]
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b) <= 1e-12
    grads = torch.autograd.grad(objective(ours), list(x.values()), allow_unused=not normalize)
    references = torch.autograd.grad(objective(theirs), list(x.values()), allow_unused=not normalize)
    for name, grad, reference in zip(x, grads, references, strict=True):
        if reference is None:  # without a denominator and with rotary, the plain q and k reach nothing
            assert not normalize and rotary and name in ("q", "k") and not grad.any()
            continue
        assert reference.any() or shape == (1, 1, 1, 1, 1), f"the gradient of {name} says nothing"
        assert relative_error(grad, reference) <= 1e-12, name


def test_transitions_are_symmetric_and_a_shards_reverse_transition_is_the_transpose_of_its_forward_one():
    x, _ = clip()
    tr = transitions(Inputs(*(x[n].detach() for n in ("q", "k", "v", "beta", "decay", "q_rot", "k_rot")), None), True)
    for W in (tr.W, tr.W_z):
        torch.testing.assert_close(W, W.mT)
        torch.testing.assert_close(product(W.flip(2)), product(W).mT)


def test_rows_of_the_state_evolve_independently():
    x, _ = clip()
    tokens = [x[n].detach() for n in ("q", "k", "v", "beta", "decay")]
    _, whole = bidirectional_gdn(*tokens, output_final_state=True)
    tokens[2] = tokens[2].clone()
    tokens[2][..., 3] += 1.0
    _, changed = bidirectional_gdn(*tokens, output_final_state=True)
    differs = (whole.S != changed.S).any(-1).any(0).any(0)
    assert differs.nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk_frames", [None, 2])
def test_what_stands_in_a_padded_frame_reaches_nothing(poison, chunk_frames):
    x, mask = clip(masked=True)
    results = []
    for value in (0.0, poison):
        y = {name: t.detach().clone() for name, t in x.items()}
        for name in ("q", "k", "v", "beta", "q_rot", "k_rot"):
            y[name].unflatten(1, (5, 7))[~mask] = value
        y["decay"][~mask] = value
        y = {name: t.requires_grad_() for name, t in y.items()}
        out, final = bidirectional_gdn(
            *(y[n] for n in ("q", "k", "v", "beta", "decay")), q_rot=y["q_rot"], k_rot=y["k_rot"], mask=mask,
            initial_state=GDNState(y["S0"], y["z0"]), output_final_state=True, chunk_frames=chunk_frames,
        )  # fmt: skip
        assert not out.unflatten(1, (5, 7))[~mask].any()
        weights = torch.ones_like(out)
        weights.unflatten(1, (5, 7))[~mask] = value  # nor does a gradient that arrives there
        out.backward(weights, inputs=list(y.values()), retain_graph=True)
        final.S.sum().backward(inputs=list(y.values()))
        for name in ("q", "k", "v", "beta", "q_rot", "k_rot"):
            assert not y[name].grad.unflatten(1, (5, 7))[~mask].any(), name
        assert not y["decay"].grad[~mask].any()
        results.append([out, final.S, final.z, *(t.grad for t in y.values())])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


def test_a_clip_in_pieces_from_a_carried_state_equals_one_pass():
    x, _ = clip(T=6)
    tokens = [x[n].detach() for n in ("q", "k", "v", "beta", "decay", "q_rot", "k_rot")]
    whole, end = bidirectional_gdn(
        *tokens[:5], q_rot=tokens[5], k_rot=tokens[6], chunk_frames=2, output_final_state=True
    )
    state, outs = None, []
    for first in (0, 2, 4):
        part = [t[:, first : first + 2] if i == 4 else t[:, first * 7 : (first + 2) * 7] for i, t in enumerate(tokens)]
        out, state = bidirectional_gdn(
            *part[:5], q_rot=part[5], k_rot=part[6], chunk_frames=2, initial_state=state, output_final_state=True
        )
        outs.append(out)
    assert relative_error(torch.cat(outs, 1), whole) <= 1e-12
    assert relative_error(state.S, end.S) <= 1e-12 and relative_error(state.z, end.z) <= 1e-12
    assert state.frames == end.frames == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rotary", [False, True])
def test_autograd_keeps_at_most_twice_the_inputs(dtype, rotary):
    x, mask = clip(B=1, T=6, S=4 * 16, H=2, D=16, dtype=dtype, masked=True)
    names = ["q", "k", "v", "beta", "decay"] + ["q_rot", "k_rot"] * rotary
    x = {name: x[name] for name in names}
    kept = {}

    def pack(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out, _ = bidirectional_gdn(*list(x.values())[:5], q_rot=x.get("q_rot"), k_rot=x.get("k_rot"), mask=mask)
    assert out.requires_grad and kept
    assert sum(kept.values()) <= 2 * sum(t.nbytes for t in x.values())


def test_autocast_leaves_the_states_in_float32():
    x, _ = clip(dtype=torch.float32)
    tokens = [x[n].detach() for n in ("q", "k", "v", "beta", "decay")]
    plain, _ = bidirectional_gdn(*tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under, final = bidirectional_gdn(*tokens, output_final_state=True)
    assert torch.equal(plain, under) and final.S.dtype == torch.float32


def test_low_precision_stays_near_float64():
    x, _ = clip(dtype=torch.bfloat16)
    tokens = [x[n].detach() for n in ("q", "k", "v", "beta", "decay")]
    out, final = bidirectional_gdn(*tokens, output_final_state=True)
    reference, _ = naive_bidirectional_gdn(*(t.double() for t in tokens))
    assert out.dtype == torch.bfloat16 and final.S.dtype == torch.float32
    assert relative_error(out, reference) < 2.0**-8  # rounding the output to bfloat16


def test_state_is_moved_detached_cloned_saved_and_restored(tmp_path):
    x, _ = clip()
    _, state = bidirectional_gdn(*(x[n] for n in ("q", "k", "v", "beta", "decay")), output_final_state=True)
    assert state.S.requires_grad and not state.detach().S.requires_grad
    copied = state.detach().clone()
    assert copied.S.data_ptr() != state.S.data_ptr() and torch.equal(copied.S, state.S)
    assert state.to("meta").S.device.type == "meta"
    torch.save(copied.state_dict(), tmp_path / "state.pt")
    restored = GDNState.from_state_dict(torch.load(tmp_path / "state.pt"))
    assert torch.equal(restored.S, state.S) and restored.frames == 5 and restored.conv_tail is None
    assert pickle.loads(pickle.dumps(copied)).frames == 5


def test_an_empty_clip_passes_its_state_through():
    x, _ = clip()
    state = GDNState(x["S0"], x["z0"], 3)
    nothing = [x[n].detach()[:, :0] for n in ("q", "k", "v", "beta", "decay")]
    out, final = bidirectional_gdn(*nothing, initial_state=state, output_final_state=True)
    assert out.shape == (2, 0, 2, 12) and torch.equal(final.S, x["S0"]) and final.frames == 3
    final.S.sum().backward()
    assert torch.equal(x["S0"].grad, torch.ones_like(x["S0"]))
    _, fresh = bidirectional_gdn(*nothing, output_final_state=True)
    assert not fresh.S.any() and fresh.S.shape == (2, 2, 12, 12)


BAD = {
    "q must be": {"q": lambda t: t[0]},
    "k must be": {"k": lambda t: t[:, :-1]},
    "v must be": {"v": lambda t: t[..., :-1]},
    "beta must be": {"beta": lambda t: t[..., None]},
    "decay must be": {"decay": lambda t: t[..., None]},
    "N must be a multiple": {"decay": lambda t: t[:, :4]},
    "k must be .* of float64 .* got .* of float32": {"k": lambda t: t.float()},
    "v must be .* on cpu .* got .* on meta": {"v": lambda t: t.to("meta")},
    "mask must be .* of bool": {"mask": lambda _: torch.ones(2, 5)},
    r"mask must be a tensor \(2, 5\)": {"mask": lambda _: torch.ones(2, 4, dtype=torch.bool)},
    "chunk_frames must be": {"chunk_frames": lambda _: 0},
    "backend must be one of": {"backend": lambda _: "cuda"},
    "initial_state.S must be": {"initial_state": lambda _: GDNState(torch.zeros(2, 2, 1, 1), torch.zeros(2, 2, 1))},
    "eps": {"eps": lambda _: -1.0},
    "frames_per_rank": {"frames_per_rank": lambda _: [2, 3]},
    "different counts": {"mask": lambda _: torch.tensor([[True] * 5, [True] * 4 + [False]])},
}


@pytest.mark.parametrize("match", BAD)
def test_bad_input_names_what_came_and_what_was_wanted(match):
    x, _ = clip()
    arguments = {n: x[n].detach() for n in ("q", "k", "v", "beta", "decay")}
    for name, change in BAD[match].items():
        arguments[name] = change(arguments.get(name))
    with pytest.raises(ValueError, match=match):
        bidirectional_gdn(**arguments, output_final_state=True)
