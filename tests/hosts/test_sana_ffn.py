"""SANA-WM's feed-forward swapped against diffusers' own, plain and fused, and under what wraps its layers."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frame_gdn import swap, unswap
from tests.helpers import assert_every_gradient_says_something, fill_randomly, relative_error

pytest.importorskip("diffusers", minversion="0.42")

from diffusers.models.transformers import transformer_sana_wm as host

from frame_gdn.hosts import adopt, feed_forward, sana_wm
from frame_gdn.hosts.sana_wm import feed_forward as sana_ffn
from tests.hosts.sana_wm import output_and_gradients, tiny_inputs, tiny_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C, HIDDEN, HW = 16, 20, (3, 2, 4)
BIASES = {"use_bias": (True, True, False)}


@pytest.fixture(autouse=True)
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's convolutions would round to TF32, its matrix products not."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def stock(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return fill_randomly(host.GLUMBConvTemp(C, HIDDEN, **{**BIASES, **options})).to(DEVICE)


def swapped(ffn: nn.Module, backend: str) -> nn.Module:
    layers = [(ffn.inverted_conv, sana_ffn.SanaWMConvLayer), (ffn.depth_conv, sana_ffn.SanaWMConvLayer)]
    layers += [(ffn.point_conv, sana_ffn.SanaWMConvLayer), (ffn, sana_ffn.GLUMBConvTemp)]
    adopt([*layers, *sana_ffn.convolutions(ffn)], backend=backend)
    return ffn


def tokens(batch: int = 2) -> Tensor:
    frames, height, width = HW
    return torch.randn(batch, frames * height * width, C, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def values(ffn: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Output and every gradient by name."""
    ffn.zero_grad()
    x = x.detach().requires_grad_()
    out = ffn(x, HW=HW)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)).sum().backward()
    assert_every_gradient_says_something(ffn)
    return {"out": out.detach(), "dx": x.grad, **{f"d{n}": p.grad.clone() for n, p in ffn.named_parameters()}}


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that the fused kernel is called with."""
    from frame_gdn.kernels.triton import operators

    calls, whole = [], operators.glu_conv

    def counted(x: Tensor, *args: Any) -> Tensor:
        calls.append(tuple(x.shape))
        return whole(x, *args)

    monkeypatch.setattr(operators, "glu_conv", counted)
    return calls


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    "options",
    [{}, {"use_bias": (False, False, True)}, {"act": (None, "silu", "silu")}, {"kernel_size": 5, "t_kernel_size": 1}],
    ids=str,
)
def test_equals_the_host_with_every_gradient(backend: str, options: dict[str, Any], fused: list[Any]) -> None:
    ffn, x = stock(**options), tokens()
    plain = values(ffn, x)
    keys = list(ffn.state_dict())
    exact = values(copy.deepcopy(ffn).double(), x.double())
    ours = values(swapped(ffn, backend), x)
    assert list(ffn.state_dict()) == keys
    assert fused == ([(2 * 3, 2, 4, 2 * HIDDEN)] if backend == "triton" else [])
    for name, value in exact.items():
        bound = max(2 * relative_error(plain[name], value), 1e-6)
        assert relative_error(ours[name], value) <= bound, name


def test_an_activation_that_the_kernel_has_not_runs_plainly(fused: list[Any]) -> None:
    for act in (("gelu", "silu", None), ("silu", "gelu", None)):
        ffn, x = stock(act=act), tokens()
        plain = values(ffn, x)
        ours = values(swapped(ffn, "triton"), x)
        assert all(relative_error(ours[name], value) <= 1e-5 for name, value in plain.items())
    assert not fused


def test_float64_runs_plainly_and_no_tokens_pass(fused: list[Any]) -> None:
    ffn = swapped(stock(), "auto")
    ffn.double()(tokens().double(), HW=HW)
    assert not fused
    for layer in ffn.modules():
        layer.backend = "triton"
    assert ffn.float()(tokens(0), HW=HW).shape == (0, 24, C)


@pytest.mark.parametrize("batch", [1, 2])
def test_the_output_and_all_gradients_within_lie_as_tokens_do(batch: int) -> None:
    """Nothing between the matrix products is copied for its layout, and a batch of one is convolved as others are."""
    ffn, x, seen = swapped(stock(), "triton"), tokens(batch).requires_grad_(), []

    def watch(_: nn.Module, args: Any, out: Tensor) -> None:
        seen.append(out)
        out.register_hook(seen.append)

    for layer in (ffn.inverted_conv, ffn.depth_conv, ffn.point_conv, ffn.t_conv):
        layer.register_forward_hook(watch)
    out = ffn(x, HW=HW)
    out.square().sum().backward()
    assert out.is_contiguous() and x.grad.is_contiguous()
    assert [t.permute(0, 2, 3, 1).is_contiguous() for t in seen] == 8 * [True]


def test_a_clip_too_large_for_one_convolution_is_split(monkeypatch: pytest.MonkeyPatch, fused: list[Any]) -> None:
    monkeypatch.setattr(sana_ffn, "INDEXABLE", 2 * (2 * HIDDEN) * 8)
    ffn, x = stock(), tokens()
    plain = values(ffn, x)
    sizes = []
    ffn.depth_conv.register_forward_hook(lambda _, args, out: sizes.append(len(out)))
    ours = [values(swapped(ffn, backend), x) for backend in ("torch", "triton")]
    assert sizes == [2, 2, 2, 6] and len(fused) == 1
    for found in ours:
        assert all(relative_error(found[name], value) <= 1e-5 for name, value in plain.items())


@pytest.mark.parametrize("target", ["inverted_conv", "depth_conv", "point_conv"])
@pytest.mark.parametrize("swap_first", [True, False])
def test_an_adapter_on_a_convolution_is_called(target: str, swap_first: bool, fused: list[Any]) -> None:
    """Around pointwise convolutions the kernel stays, around the depthwise one it makes way."""
    peft = pytest.importorskip("peft")
    depthwise = target == "depth_conv"
    rank = 2 * HIDDEN if depthwise else 2  # a multiple of the groups
    config = peft.LoraConfig(r=rank, target_modules=rf".*{target}\.conv", init_lora_weights=False)
    base, x = stock(), tokens()
    model = nn.ModuleDict({"ffn": copy.deepcopy(base)})
    if swap_first:
        swapped(model["ffn"], "triton")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's, that it cannot merge groups
        tuned = peft.get_peft_model(model, config)
    ffn = swapped(model["ffn"], "triton")
    ours = values_of_trainable(ffn, x)
    assert len(fused) == (0 if depthwise else 1) and sum(name.startswith("d") for name in ours) == 2
    assert relative_error(ours["out"], base(x, HW=HW)) > 1e-2
    plain = values_of_trainable(swapped(ffn, "torch"), x)
    assert all(relative_error(ours[name], value) <= 1e-5 for name, value in plain.items())
    if not depthwise:
        assert relative_error(tuned.merge_and_unload()["ffn"](x, HW=HW), ours["out"]) <= 1e-5


def values_of_trainable(ffn: nn.Module, x: Tensor) -> dict[str, Tensor]:
    out = ffn(x, HW=HW)
    trained = {n: p for n, p in ffn.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(out.square().sum(), list(trained.values()))
    assert all(d.isfinite().all() and d.abs().max() > 0 for d in grads)
    return {"out": out.detach(), **{f"d{n}": d for n, d in zip(trained, grads, strict=True)}}


# --- in the model -----------------------------------------------------------------------------------------------


def model_and_inputs(mask: Tensor | None = None) -> tuple[nn.Module, dict[str, Any]]:
    return tiny_model(num_layers=1).to(DEVICE), {n: t.to(DEVICE) for n, t in tiny_inputs(mask=mask).items()}


def on_backend(model: nn.Module, backend: str) -> nn.Module:
    """The feed-forwards on one backend, all else in torch: what is compared is theirs."""
    for name, module in model.named_modules():
        if hasattr(module, "backend"):
            module.backend = backend if ".mlp" in name else "torch"
    return model


@pytest.mark.parametrize(("chunk_frames", "checkpointing"), [(None, False), (2, True)])
def test_the_model_with_fused_feed_forwards_under_masks_and_chunks(
    chunk_frames: int | None, checkpointing: bool, fused: list[Any]
) -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 0]]).bool()
    model, inputs = model_and_inputs(mask)
    swap(model, chunk_frames=chunk_frames)
    plain, gradients = output_and_gradients(on_backend(model, "torch"), inputs)
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    ours, found = output_and_gradients(on_backend(model, "triton"), inputs)
    assert len(fused) == 1 + checkpointing
    assert relative_error(ours, plain) <= 1e-5
    assert all(relative_error(found[name], gradient) <= 1e-4 for name, gradient in gradients.items())


@pytest.mark.parametrize("swap_first", [True, False])
def test_layerwise_casting_reaches_the_weights_in_use(swap_first: bool, fused: list[Any]) -> None:
    """Swapped after the casting, the convolutions that it holds stay diffusers'."""
    model, inputs = model_and_inputs()
    plain = copy.deepcopy(model)
    plain.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    if swap_first:
        swap(model).enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    else:
        model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
        swap(model)
    assert model.blocks[0].mlp.depth_conv.conv.weight.dtype == torch.float8_e4m3fn
    with torch.no_grad():
        expected, ours = plain(**inputs).sample, on_backend(model, "triton")(**inputs).sample
    assert relative_error(ours, expected) <= 1e-5
    assert len(fused) == swap_first


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offload_reaches_the_weights_in_use(offload_type: str, fused: list[Any]) -> None:
    model, inputs = model_and_inputs()
    on_backend(swap(model), "triton")
    with torch.no_grad():
        expected = model(**inputs).sample
        blocks = 1 if offload_type == "block_level" else None
        model.enable_group_offload(torch.device(DEVICE), offload_type=offload_type, num_blocks_per_group=blocks)
        assert torch.equal(model(**inputs).sample, expected)
    assert len(fused) == 2


def test_unswap_gives_the_convolutions_back() -> None:
    model = tiny_model(num_layers=1)
    kinds = [type(m) for m in model.modules()]
    swap(model)
    mlp = model.blocks[0].mlp
    assert [type(m.conv) for m in (mlp.inverted_conv, mlp.depth_conv, mlp.point_conv)] == 3 * [feed_forward.Conv2d]
    assert type(mlp.t_conv) is nn.Conv2d and type(mlp.point_conv) is sana_wm.SanaWMConvLayer
    assert [type(m) for m in unswap(model).modules()] == kinds


def test_the_compiler_takes_the_feed_forward_whole() -> None:
    ffn, x = swapped(stock(), "triton"), tokens()
    expected = values(ffn, x)
    ffn.compile(fullgraph=True, backend="aot_eager")
    found = values(ffn, x)
    assert all(relative_error(found[name], value) <= 1e-5 for name, value in expected.items())
