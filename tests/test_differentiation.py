"""The scans in torch's other modes: transforms, forward mode, higher derivatives, no data, inference."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from frame_gdn import BidirectionalGDN, GDNState, bidirectional_gdn, cp_frame_gdn_scan
from tests.helpers import relative_error
from tests.models.helpers import tiny_inputs, tiny_model
from tests.test_gdn import clip

B, T, S, H, D = 1, 3, 2, 1, 4
OPTIONS = {
    "plain": {},
    "chunks": {"chunk_frames": 2},
    "causal": {"chunk_frames": 1},
    "numerator": {"normalize": False},
    "uneven chunks": {"chunk_frames": 2, "first_chunk_frames": 1},
}


def tokens(masked: bool = False, rotated: bool = True) -> tuple[dict[str, Tensor], Tensor | None]:
    tensors, mask = clip(B=B, T=T, S=S, H=H, D=D, masked=masked)
    return {n: t.detach() for n, t in tensors.items() if rotated or not n.endswith("_rot")}, mask


def scan(tensors: dict[str, Tensor], mask: Tensor | None = None, **options: object) -> tuple[Tensor, ...]:
    """Output, final S and z."""
    given = dict(tensors)
    state = GDNState(given.pop("S0"), given.pop("z0"))
    out, final = bidirectional_gdn(
        **given, mask=mask, initial_state=state, output_final_state=True, eps=1e-2, **options
    )  # type: ignore[arg-type]
    return out, final.S, final.z


def loss(tensors: dict[str, Tensor], mask: Tensor | None = None, **options: object) -> Tensor:
    results = scan(tensors, mask, **options)
    return sum((x * torch.linspace(0.5, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in results)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_functional_gradients_are_those_of_autograd(case, masked):
    tensors, mask = tokens(masked)
    found = grad(lambda x: loss(x, mask, **OPTIONS[case]))(tensors)
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    loss(leaves, mask, **OPTIONS[case]).backward()
    for name, x in leaves.items():
        expected = torch.zeros_like(x) if x.grad is None else x.grad
        assert relative_error(found[name], expected) <= 1e-12 or not expected.any(), name


@pytest.mark.parametrize("case", OPTIONS)
def test_first_and_second_derivatives_are_those_of_differences_in_both_modes(case):
    tensors, mask = tokens(masked=True)
    leaves = [x.clone().requires_grad_() for x in tensors.values()]

    def run(*values):
        return scan(dict(zip(tensors, values, strict=True)), mask, **OPTIONS[case])

    assert gradcheck(run, leaves, check_forward_ad=True, atol=1e-5, fast_mode=True)
    assert gradgradcheck(run, leaves, atol=1e-5, fast_mode=True)


def test_second_derivatives_where_one_input_is_made_of_another():
    tensors, _ = tokens(rotated=False)
    x = tensors.pop("q").requires_grad_()

    def run(x):
        return scan({**tensors, "q": x, "k": 0.1 * x.sin(), "v": x * x})[0]

    (once,), (twice,) = (torch.autograd.grad(run(x).sum(), x, create_graph=again) for again in (False, True))
    assert relative_error(twice, once) <= 1e-12
    assert gradgradcheck(run, [x], atol=1e-5)


def test_tables_take_part_in_second_derivatives():
    tensors, _ = tokens(rotated=False)
    angles = torch.linspace(0, 3, T * S * D // 2, dtype=torch.float64).view(T * S, D // 2)
    tables = angles.cos(), angles.sin()
    leaves = [x.clone().requires_grad_() for x in tensors.values()]

    def run(*values):
        return scan(dict(zip(tensors, values, strict=True)), rotary=tables)

    assert gradcheck(run, leaves, check_forward_ad=True, atol=1e-5, fast_mode=True)
    assert gradgradcheck(run, leaves, atol=1e-5, fast_mode=True)


def test_a_vmap_is_a_loop_over_calls():
    tensors, _ = tokens()
    several = {name: torch.stack([x, 0.5 * x]) for name, x in tensors.items()}
    found = vmap(lambda x: scan(x, chunk_frames=2))(several)
    for i in range(2):
        alone = scan({name: x[i] for name, x in several.items()}, chunk_frames=2)
        assert all(relative_error(a[i], b) <= 1e-12 for a, b in zip(found, alone, strict=True))


def test_jacobians_and_hessians_agree_in_both_modes():
    tensors, _ = tokens()

    def of_v(v):
        return scan({**tensors, "v": v})[0]

    def of_beta(beta):
        return of_v(tensors["v"]).sum() + loss({**tensors, "beta": beta})

    v = tensors["v"]
    backward, forward = jacrev(of_v)(v), torch.func.jacfwd(of_v)(v)
    assert relative_error(backward, forward) <= 1e-12
    second = hessian(of_beta)(tensors["beta"])
    assert second.abs().max() > 0
    assert relative_error(second, jacrev(grad(of_beta))(tensors["beta"])) <= 1e-10


def test_dual_numbers_carry_their_tangents():
    tensors, _ = tokens()
    direction = torch.randn(tensors["v"].shape, dtype=torch.float64)
    with forward_ad.dual_level():
        out = scan({**tensors, "v": forward_ad.make_dual(tensors["v"], direction)})[0]
        tangent = forward_ad.unpack_dual(out).tangent
    of_v = jvp(lambda v: scan({**tensors, "v": v})[0], (tensors["v"],), (direction,))[1]
    linear = scan({**tensors, "v": direction, "S0": torch.zeros_like(tensors["S0"])})[0]
    assert relative_error(tangent, of_v) <= 1e-12 and relative_error(tangent, linear) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transforms_keep_dtypes_and_their_accuracy(dtype):
    tensors, _ = tokens()
    narrow = {n: x.to(torch.float32 if n in ("S0", "z0") else dtype) for n, x in tensors.items()}
    expected = scan({n: x.double() for n, x in narrow.items()})
    found = vmap(lambda x: scan(x))({n: x[None] for n, x in narrow.items()})
    for ours, usual, exact in zip(found, scan(narrow), expected, strict=True):
        assert ours.dtype == usual.dtype
        assert relative_error(ours[0], exact) <= max(2 * relative_error(usual, exact), 1e-6)


def chains() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, T, D, D), (2, T, D, D), (2, T, D, D), (2, T, D), (2, D, D), (2, D))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / 2 for shape in shapes]


def states(*tensors: Tensor, **options: object) -> tuple[Tensor, ...]:
    found = cp_frame_gdn_scan(*tensors[:4], initial_state=tensors[4:], **options)  # type: ignore[arg-type]
    return tuple(found)


@pytest.mark.parametrize("truncate", [None, 2])
@pytest.mark.parametrize("reverse", [False, True])
def test_the_primitive_within_transforms(reverse, truncate):
    tensors = chains()

    def total(*x):
        return sum(out.sin().sum() for out in states(*x, reverse=reverse, truncate_to_active=truncate))

    found = grad(total, argnums=tuple(range(6)))(*tensors)
    leaves = [x.clone().requires_grad_() for x in tensors]
    total(*leaves).backward()
    assert all(relative_error(a, x.grad) <= 1e-12 for a, x in zip(found, leaves, strict=True))
    assert gradcheck(total, leaves, check_forward_ad=True, fast_mode=True, atol=1e-5)


def test_second_derivatives_of_the_primitive_are_refused_by_name_outside_of_transforms():
    leaves = [x.requires_grad_() for x in chains()]
    out = states(*leaves)[0].sum()
    (first,) = torch.autograd.grad(out, leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"once_differentiable .* within torch.func.grad"):
        first.sum().backward()
    second = hessian(lambda a: states(a, *(x.detach() for x in leaves[1:]))[0].sum())(leaves[0].detach())
    assert second.abs().max() > 0


# --- tensors without data, and modes --------------------------------------------------------------------------------


def test_shapes_are_inferred_without_data():
    tensors, mask = tokens(masked=False)
    expected = [x.shape for x in scan(tensors)]
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            blank = {name: torch.empty(x.shape, dtype=x.dtype, requires_grad=True) for name, x in tensors.items()}
            found = scan(blank, chunk_frames=2)
            sum(x.sum() for x in found).backward()
        assert [x.shape for x in found] == expected
        assert all(x.grad.shape == x.shape for name, x in blank.items() if name != "mask")
    layer = BidirectionalGDN(16, 2).to("meta")
    out, _ = layer(torch.empty(2, 6, 16, device="meta"), 3)
    assert out.is_meta and out.shape == (2, 6, 16)
    model = tiny_model(torch.float32).to("meta")
    sample = model(**{name: x.to("meta") for name, x in tiny_inputs(3, torch.float32).items()}).sample
    sample.sum().backward()
    assert sample.is_meta and all(p.grad is not None for p in model.parameters())


def test_inference_mode_leaves_nothing_behind():
    tensors, _ = tokens()
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    with torch.inference_mode():
        before = scan(leaves)
    found = scan(leaves)
    sum(x.sum() for x in found).backward()
    assert all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    with torch.inference_mode():
        made = {name: x.clone() for name, x in tensors.items()}
    assert torch.equal(scan(made)[0], before[0])


def test_a_batch_of_none():
    tensors, _ = tokens()
    empty = {name: x[:0].clone().requires_grad_() for name, x in tensors.items()}
    out, S, z = scan(empty, chunk_frames=2)
    assert (out.shape[0], S.shape, z.shape) == (0, (0, H, D, D), (0, H, D))
    (out.sum() + S.sum()).backward()
    assert all(x.grad.shape == x.shape for x in empty.values())
    out, _ = BidirectionalGDN(16, 2)(torch.empty(0, 6, 16), 3)
    assert out.shape == (0, 6, 16)
    with pytest.raises(ValueError, match="hidden_states' batch must be an int from 1, got 0"):
        tiny_model()(**{name: x[:0] for name, x in tiny_inputs(3).items()})


def test_a_model_within_transforms():
    model, inputs = tiny_model(), tiny_inputs(3)
    x = inputs.pop("hidden_states")
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def total(weights, x):
        return functional_call(model, weights, (x,), inputs).sample.square().mean()

    by_weight, by_sample = grad(total, argnums=(0, 1))(weights, x)
    x.requires_grad_()
    model(x, **inputs).sample.square().mean().backward()
    assert relative_error(by_sample, x.grad) <= 1e-12
    for name, p in model.named_parameters():
        assert relative_error(by_weight[name], p.grad) <= 1e-11, name
    each = vmap(lambda t: total(weights, t), randomness="error")(torch.stack([x.detach(), 2 * x.detach()]))
    assert relative_error(each[1], total(weights, 2 * x.detach())) <= 1e-12
