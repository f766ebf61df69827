"""What a user does to a model before a swap and after it works as on the stock model, or is refused by name."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, init_empty_weights
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from frame_gdn import swap, unswap
from tests.helpers import relative_error
from tests.hosts import warm_start

try:
    from tests.hosts import sana_wm
except ImportError:  # a diffusers that is older than it
    HOSTS: tuple[str, ...] = ("sana_video", "wan")
else:
    HOSTS = ("sana_wm", "sana_video", "wan")

FRAMES = 3
#: What sums in float32 may differ by where memory lies otherwise.
ROUNDING = 1e-6


def stock(host: str) -> Any:
    return sana_wm.tiny_model() if host == "sana_wm" else warm_start.tiny_model(host)


def inputs_of(host: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    if host == "sana_wm":
        inputs: dict[str, Any] = sana_wm.tiny_inputs(FRAMES)
        if dtype == torch.float64:
            return {n: t.double() if t.is_floating_point() and n != "timestep" else t for n, t in inputs.items()}
        return inputs if dtype == torch.float32 else sana_wm.with_rays(inputs, dtype)
    return warm_start.tiny_inputs(FRAMES, dtype)


def run(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    out: Tensor = model(**inputs, return_dict=False)[0]
    return out


@functools.cache
def expected(host: str) -> Tensor:
    """What the swapped model makes of the inputs where nobody does anything to it."""
    return run(swap(stock(host)), inputs_of(host)).detach()


# --- what is done to a model ----------------------------------------------------------------------------------------


def layers(model: nn.Module, *kinds: type[nn.Module]) -> list[Any]:
    """Layers whose weight is not 0, for which a norm of it stands."""
    return [m for m in model.modules() if isinstance(m, kinds) and m.weight.any()]


def each(model: nn.Module, kinds: tuple[type[nn.Module], ...], change: Callable[[Any], Any]) -> nn.Module:
    for layer in layers(model, *kinds):
        change(layer)
    return model


def through_bytes(model: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def emptied_and_loaded(model: nn.Module) -> nn.Module:
    """Onto the meta device, into fresh memory, and the weights from a state dict; buffers that it leaves out too."""
    state = {name: t.clone() for name, t in model.state_dict().items()}
    buffers = {name: t.clone() for name, t in model.named_buffers() if name not in state}
    model.to("meta").to_empty(device="cpu")
    for name, t in buffers.items():
        model.get_buffer(name).copy_(t)
    model.load_state_dict(state)
    return model


def with_hooks(model: nn.Module) -> nn.Module:
    for module in model.modules():
        module.register_forward_pre_hook(lambda module, args: None)
        module.register_forward_hook(lambda module, args, out: None)
        module.register_full_backward_hook(lambda module, grad_in, grad_out: None)
    return model


def with_lora(model: Any) -> Any:
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return model


def quantised(model: nn.Module) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(**({"version": 2} if torchao_has_versions() else {})))
    return model


def torchao_has_versions() -> bool:
    from torchao.quantization import Int8WeightOnlyConfig

    return "version" in Int8WeightOnlyConfig.__dataclass_fields__


def tied(model: nn.Module) -> nn.Module:
    first, second = [m for name, m in model.named_modules() if name.endswith("to_q")][:2]
    second.weight = first.weight
    return model


def with_processors(model: Any) -> Any:
    model.set_attn_processor({name: copy.copy(p) for name, p in model.attn_processors.items()})
    return model


class Other:
    """A processor of the user's own."""

    def __call__(self, attn: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros_like(hidden_states)


def with_other_processor(model: Any) -> Any:
    model.set_attn_processor(Other())
    return model


def after(*steps: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Some methods that return nothing, one after another, on the model itself."""

    def change(model: Any) -> Any:
        for step in steps:
            step(model)
        return model

    return change


#: Hosts with adapters and processors, which SANA-WM has not.
MIXED_IN = ("sana_video", "wan")

#: What is done: name -> (what, what the output may move by, on which hosts).
ACTIONS: dict[str, tuple[Callable[[Any], Any], float, tuple[str, ...]]] = {
    "half": (lambda m: m.half(), 3e-3, HOSTS),
    "bfloat16": (lambda m: m.bfloat16(), 3e-2, HOSTS),
    "to a dtype": (lambda m: m.to(dtype=torch.bfloat16, device="cpu"), 3e-2, HOSTS),
    "double": (lambda m: m.double(), 1e-6, HOSTS),
    "there and back": (lambda m: m.double().float(), 0.0, HOSTS),
    "emptied and loaded": (emptied_and_loaded, 0.0, HOSTS),
    "loaded by assignment": (after(lambda m: m.load_state_dict(m.state_dict(), assign=True)), 0.0, HOSTS),
    "deepcopy": (copy.deepcopy, 0.0, HOSTS),
    "pickle": (lambda m: pickle.loads(pickle.dumps(m)), 0.0, HOSTS),
    "saved whole": (through_bytes, 0.0, HOSTS),
    "shared memory": (lambda m: m.share_memory(), 0.0, HOSTS),
    "frozen": (lambda m: m.requires_grad_(False), 0.0, HOSTS),
    "training": (lambda m: m.train(), 0.0, HOSTS),
    "checkpointing": (after(lambda m: m.enable_gradient_checkpointing(), lambda m: m.train()), 0.0, HOSTS),
    "hooks": (with_hooks, 0.0, HOSTS),
    "channels last": (lambda m: m.to(memory_format=torch.channels_last_3d), 0.0, ("wan",)),
    "weight norm": (lambda m: each(m, (nn.Linear,), parametrizations.weight_norm), 1e-5, HOSTS),
    "weight norm of convolutions": (
        lambda m: each(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d), parametrizations.weight_norm), 1e-5, HOSTS,
    ),
    "pruning": (lambda m: each(m, (nn.Linear, nn.Conv2d), lambda x: prune.identity(x, "weight")), 0.0, HOSTS),
    "tied": (tied, 10.0, MIXED_IN),
    "adapters": (with_lora, 0.0, MIXED_IN),
    "processors": (with_processors, 0.0, MIXED_IN),
    "another processor": (with_other_processor, 10.0, MIXED_IN),
    "fused projections": (after(lambda m: m.fuse_qkv_projections()), 1e-6, MIXED_IN),
    "quantised": (quantised, 5e-2, HOSTS),
    "dynamically quantised": (
        lambda m: torch.ao.quantization.quantize_dynamic(m, {nn.Linear}, torch.qint8), 0.2, HOSTS[:-1],
    ),
    "layerwise casting": (
        after(lambda m: m.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)), 0.2, ("wan",),
    ),
    "group offloading": (
        after(lambda m: m.enable_group_offload(torch.device("cpu"), offload_type="leaf_level")), 0.0, HOSTS,
    ),
    "compiled in place": (after(lambda m: m.compile(backend="eager")), 0.0, HOSTS),
}  # fmt: skip

#: What is refused: name -> the message where it was done before the swap, and where it is done after it.
REFUSED = {
    "another processor": ("found Other: swap would silently undo it", "the processor Other would not be called"),
    "group offloading": ("carries a hook", None),
}

DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16, "to a dtype": torch.bfloat16, "double": torch.float64}


def facts(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    """What a swap must not change of a parameter or buffer, by its name."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    return {n: (t.dtype, t.shape, t.requires_grad, first.setdefault(id(t), n)) for n, t in named}


#: torch.compile takes a quarter of a minute a host.
TABLE = [
    pytest.param(name, host, marks=[pytest.mark.long] * name.startswith("compiled"))
    for name, (*_, hosts) in ACTIONS.items()
    for host in hosts
]


@pytest.mark.parametrize(("name", "host"), TABLE)
def test_an_action_before_and_after_a_swap_does_what_it_does_to_the_stock_model(name: str, host: str) -> None:
    act, bound, _ = ACTIONS[name]
    inputs = inputs_of(host, DTYPES.get(name, torch.float32))
    plain = act(stock(host))
    assert torch.isfinite(run(plain, inputs)).all()
    for message, make in zip(
        REFUSED.get(name, (None, None)), (lambda: swap(act(stock(host))), lambda: act(swap(stock(host)))), strict=True
    ):
        if message is not None:
            with pytest.raises(ValueError, match=message):
                make()
            continue
        model = make()
        out = run(model, inputs)
        assert relative_error(out.float(), expected(host).float()) <= bound + ROUNDING
        of_swapped = facts(model)
        assert {n: of_swapped.get(n) for n in facts(plain)} == facts(plain) or name in ("quantised",)
        assert [m.training for m in (model, plain)] == [plain.training] * 2
        if out.requires_grad:
            out.float().square().mean().backward()
            learned = {n for n, p in model.named_parameters() if p.grad is not None and torch.isfinite(p.grad).all()}
            assert learned >= {n for n, p in plain.named_parameters() if p.requires_grad and p.grad is not None}
        assert out.requires_grad == run(plain, inputs).requires_grad


@pytest.mark.parametrize("host", HOSTS)
def test_weights_go_into_a_swapped_model_that_was_made_without_memory(host: str) -> None:
    state = swap(stock(host)).state_dict()
    original = stock(host)
    with init_empty_weights():
        model = type(original)(**original.config)
    swap(model).load_state_dict(state, assign=True)
    assert not any(t.is_meta for t in model.state_dict().values())
    assert relative_error(run(model.eval(), inputs_of(host)), expected(host)) <= ROUNDING


@pytest.mark.parametrize("host", MIXED_IN)
def test_new_gates_learn_unless_their_whole_attention_is_frozen(host: str) -> None:
    def gates(model: nn.Module) -> set[bool]:
        return {p.requires_grad for n, p in model.named_parameters() if n.endswith(warm_start.GATES)}

    assert gates(swap(stock(host))) == {True}
    assert gates(swap(with_lora(stock(host)))) == {True}
    assert gates(swap(stock(host).requires_grad_(False))) == {False}


@pytest.mark.parametrize("host", HOSTS)
def test_wrappers_after_a_swap(host: str, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        for wrap in (
            nn.DataParallel,
            nn.parallel.DistributedDataParallel,
            Accelerator(cpu=True).prepare,
        ):
            model = wrap(swap(stock(host)))
            assert relative_error(run(model, inputs_of(host)), expected(host)) <= ROUNDING
            if model is not getattr(model, "module", model):
                with pytest.raises(ValueError, match="is not known"):
                    swap(model)
    finally:
        dist.destroy_process_group()


# --- modes ----------------------------------------------------------------------------------------------------------


def sampled(model: nn.Module, inputs: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """The model as a function of its latents."""
    return lambda x: run(model, {**inputs, "hidden_states": x})


def mode_meta(model: nn.Module, inputs: dict[str, Any]) -> None:
    out = run(model.to("meta"), {n: t.to("meta") for n, t in inputs.items()})
    assert out.is_meta
    out.sum().backward()


def mode_fake(model: nn.Module, inputs: dict[str, Any]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = run(model, {n: mode.from_tensor(t) for n, t in inputs.items()})
    assert out.shape == inputs["hidden_states"].shape


def mode_grad(model: nn.Module, inputs: dict[str, Any]) -> None:
    weights = {n: p.detach() for n, p in model.named_parameters()}
    found = grad(lambda p: functional_call(model, p, (), {**inputs, "return_dict": False})[0].square().mean())(weights)
    run(model, inputs).square().mean().backward()
    both = [(found[n].flatten(), p.grad.flatten()) for n, p in model.named_parameters() if p.grad is not None]
    assert relative_error(*(torch.cat(gradients) for gradients in zip(*both, strict=True))) <= 1e-5


def mode_vmap(model: nn.Module, inputs: dict[str, Any]) -> None:
    several = torch.stack([inputs["hidden_states"], inputs["hidden_states"].flip(0)])
    found = vmap(sampled(model, inputs))(several)
    assert relative_error(found[1], sampled(model, inputs)(several[1])) <= 1e-5


def mode_ensemble(model: nn.Module, inputs: dict[str, Any]) -> None:
    weights, buffers = stack_module_state([model, model])
    found = vmap(lambda *state: functional_call(model, state, (), {**inputs, "return_dict": False})[0])(
        weights, buffers
    )
    assert relative_error(found[1], run(model, inputs)) <= 1e-5


def mode_forward(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Forward mode and reverse mode are one another's transposes; and dual numbers carry what jvp does."""
    x, f = inputs["hidden_states"], sampled(model, inputs)
    direction, adjoint = torch.randn_like(x), torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):
        tangent = jvp(f, (x,), (direction,))[1]
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(f(forward_ad.make_dual(x, direction))).tangent
        assert relative_error(dual, tangent) <= 1e-5
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(leaf), leaf, adjoint)
    assert abs((tangent * adjoint).sum() - (gradient * direction).sum()) <= 1e-3 * tangent.norm() * adjoint.norm()


def mode_twice(model: nn.Module, inputs: dict[str, Any]) -> None:
    """Reverse over reverse is forward over reverse."""
    x, f = inputs["hidden_states"], sampled(model, inputs)
    direction = torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(f(leaf).square().mean(), leaf, create_graph=True)
        (once,) = torch.autograd.grad(f(leaf).square().mean(), leaf)
        assert relative_error(gradient, once) <= 1e-4
        (found,) = torch.autograd.grad((gradient * direction).sum(), leaf)
        other = jvp(grad(lambda t: f(t).square().mean()), (x,), (direction,))[1]
    assert relative_error(found, other) <= 1e-2


def mode_inference(model: nn.Module, inputs: dict[str, Any]) -> None:
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            before = run(model, inputs)
        out = run(model, inputs)
        out.square().mean().backward()
        assert not before.requires_grad and torch.equal(before, out)


def mode_checkpoint(model: nn.Module, inputs: dict[str, Any]) -> None:
    gradients = []
    for outer in (lambda f, x: f(x), lambda f, x: checkpoint(f, x, use_reentrant=False),
                  lambda f, x: checkpoint(f, x, use_reentrant=True)):  # fmt: skip
        x = inputs["hidden_states"].clone().requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            outer(sampled(model, inputs), x).square().mean().backward()
        gradients.append(x.grad)
    assert all(torch.equal(g, gradients[0]) for g in gradients)


def mode_batched(model: nn.Module, inputs: dict[str, Any]) -> None:
    x = inputs["hidden_states"].clone().requires_grad_()
    out = run(model, {**inputs, "hidden_states": x})
    directions = torch.randn(2, *out.shape)
    (found,) = torch.autograd.grad(out, x, directions, is_grads_batched=True, retain_graph=True)
    (alone,) = torch.autograd.grad(out, x, directions[1])
    assert relative_error(found[1], alone) <= 1e-5


MODES = {name.removeprefix("mode_"): mode for name, mode in list(globals().items()) if name.startswith("mode_")}


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("name", MODES)
def test_a_mode_works_where_it_works_on_the_stock_model(name: str, host: str) -> None:
    try:
        MODES[name](stock(host), inputs_of(host))
    except (RuntimeError, NotImplementedError):  # torch's or diffusers' own limit
        with pytest.raises((RuntimeError, NotImplementedError)):
            MODES[name](swap(stock(host)), inputs_of(host))
        return
    MODES[name](swap(stock(host)), inputs_of(host))


@pytest.mark.parametrize("host", HOSTS)
def test_after_all_of_it_the_stock_model_is_had_back(host: str) -> None:
    model = swap(pickle.loads(pickle.dumps(swap(stock(host).double().float().requires_grad_(False).train()))))
    with pytest.warns(UserWarning, match="dropped") if host != "sana_wm" else nullcontext():
        unswap(model)
    assert torch.equal(run(model, inputs_of(host)), run(stock(host).train(), inputs_of(host)))
    assert type(model) is type(stock(host)) and not any(p.requires_grad for p in model.parameters())
