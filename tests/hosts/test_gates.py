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

from frame_gdn import swap, unswap
from frame_gdn.chunks import ChunkGrid
from frame_gdn.hosts.clip import Span, rotary_tables
from frame_gdn.hosts.gates import ENTRIES, START_FORGETTING
from frame_gdn.kernels.naive import naive_bidirectional_gdn
from tests.helpers import assert_every_gradient_says_something, fill_randomly, relative_error
from tests.hosts.warm_start import GATES, SWAPPED, blocks_of, frames_of, tiny_inputs, tiny_model

pytestmark = pytest.mark.parametrize("host", SWAPPED)


def swapped_model(host: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Swapped, with gates that are not where they start."""
    return fill_randomly(swap(tiny_model(host, dtype), **options), 1).to(dtype)


@torch.no_grad()
def sample(model: Any, inputs: dict[str, Tensor] | None = None) -> Tensor:
    return model(**(inputs or tiny_inputs())).sample


def noted(model: Any) -> dict[str, Any]:
    return {entry: model.config[entry] for entry in ENTRIES}


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
    clip = Span([frames], 0, frames, ChunkGrid(chunk_frames))
    rotary_emb = rotary_tables(12, 0, (frames, 2, 3), x.device)
    with torch.no_grad():
        q, k, v = attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(x)), attn.to_v(x)
        q, k, v = (t.unflatten(-1, (2, 12)) for t in (F.relu(q), F.relu(k) * 0.7 / (12 * 6) ** 0.5, v))
        beta = torch.sigmoid(x @ attn.beta_proj.weight.T + attn.beta_proj.bias)
        gate = x.view(2, frames, 6, 24).mean(2) @ attn.gate_proj.weight.T + attn.gate_proj.bias
        decay = torch.exp(-attn.A_log.exp() * F.softplus(gate + attn.dt_bias))
        tables = [table.double() for table in rotary_emb]
        out, _ = naive_bidirectional_gdn(
            q, k, v, beta, decay, q_rot=rotated(q, *tables), k_rot=rotated(k, *tables), chunk_frames=chunk_frames
        )
        expected = attn.to_out[0](out.flatten(2))
        assert relative_error(attn(x, rotary_emb=rotary_emb, clip=clip), expected) < 1e-12


def test_the_kernels_agree_with_the_torch_path(host: str) -> None:
    pytest.importorskip("triton")
    found = {}
    for backend in ("torch", "triton"):
        model = swapped_model(host, blocks=[0, 1], start_scale=0.7, backend=backend)
        out = model(**tiny_inputs(3)).sample
        out.square().sum().backward()
        found[backend] = out, {name: p.grad for name, p in model.named_parameters()}
    (out, grads), (expected, expected_grads) = found["triton"], found["torch"]
    assert relative_error(out, expected) < 1e-5
    for name, grad in expected_grads.items():
        assert relative_error(grads[name], grad) < 1e-4, name


def test_gates_start_where_they_do_next_to_nothing(host: str) -> None:
    attn = blocks_of(swap(tiny_model(host), blocks=[1]), host)[1].attn1
    decay = torch.exp(-attn.A_log.double().exp() * F.softplus(attn.dt_bias.double()))
    assert ((1 - decay) <= START_FORGETTING * (1 + 1e-6)).all() and START_FORGETTING <= 1e-4
    assert (1 - decay > 0).all()
    for linear in (attn.beta_proj, attn.gate_proj):
        assert type(linear) is nn.Linear and not linear.weight.any()
    attn = blocks_of(swap(tiny_model(host, torch.bfloat16), blocks=[1]), host)[1].attn1
    assert attn.beta_proj.weight.dtype == torch.bfloat16 and attn.A_log.dtype == attn.dt_bias.dtype == torch.float32


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
    seen = []
    blocks_of(model, host)[0].register_forward_hook(lambda module, args, out: seen.append(out))
    sample(model)
    sample(swap(model, blocks=[1]))
    assert torch.equal(*seen)
    assert not blocks_of(model, host)[0].attn1.has_gates


def test_swapping_again_keeps_trained_gates_and_changes_the_rest(host: str) -> None:
    model = swapped_model(host, blocks=[1], start_scale=0.5)
    trained = copy.deepcopy(model.state_dict())
    out = sample(model)
    assert torch.equal(sample(swap(model)), out)
    assert torch.equal(sample(swap(model, blocks=[1])), out)
    swap(model, blocks=[0, 2], chunk_frames=2)
    assert set(model.state_dict()) - set(trained) == added_keys(host, [0, 2])
    assert all(torch.equal(model.state_dict()[key], trained[key]) for key in trained)
    assert noted(model) == {"gdn_blocks": [0, 1, 2], "start_scale": 0.5, **ChunkGrid(2).facts}
    assert {block.attn1.start_scale for block in blocks_of(model, host)} == {0.5}
    swap(model, blocks=[0], start_scale=0.25)
    assert {block.attn1.start_scale for block in blocks_of(model, host)} == {0.25}
    assert noted(model) == {"gdn_blocks": [0, 1, 2], "start_scale": 0.25, **ChunkGrid(2).facts}
    swap(model, start_scale=None, chunk_frames=None)
    assert noted(model)["chunk_frames"] is None and noted(model)["start_scale"] in (0.1, 1.0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"blocks": [3]}, "from 0 to 2, got .3."),
        ({"blocks": []}, "one or more"),
        ({"start_scale": 0.0}, "start_scale"),
        ({"chunk_frames": 1.5}, "chunk_frames"),
    ],
)
def test_a_refused_swap_changes_nothing(host: str, options: dict[str, Any], message: str) -> None:
    model = tiny_model(host)
    with pytest.raises(ValueError, match=message):
        swap(model, **options)
    assert type(model).__module__.startswith("diffusers")
    blocks_of(model, host)[2].attn1.processor = object()
    with pytest.raises(ValueError, match="found object"):
        swap(model)
    assert not any(type(module).__module__.startswith("frame_gdn") for module in model.modules())


def test_a_swapped_model_refuses_to_be_cut_into_tokens(host: str) -> None:
    with pytest.raises(ValueError, match="frame_gdn.parallelize"):
        swap(tiny_model(host)).enable_parallelism(config=None)


def test_copies_and_pickles(host: str) -> None:
    model = swapped_model(host, blocks=[0, 1, 2], chunk_frames=2)
    expected = sample(model)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(sample(clone), expected)


# --- saved and loaded -------------------------------------------------------------------------------------------


def test_gates_and_options_survive_a_save_and_a_load(host: str, tmp_path: Path) -> None:
    blocks = None if host == "sana_video" else [0, 2]
    model = swapped_model(host, blocks=blocks, start_scale=0.5, chunk_frames=2)
    for folder, arguments in (("whole", {}), ("sharded", {"max_shard_size": "20KB"})):
        model.save_pretrained(tmp_path / folder, **arguments)
        again = SWAPPED[host].from_pretrained(tmp_path / folder)
        assert torch.equal(sample(again), sample(model))
        assert noted(again) == noted(model)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["_class_name"] == type(tiny_model(host)).__name__


def test_a_stock_folder_loads_swapped_with_gates_at_their_start(host: str, tmp_path: Path) -> None:
    model = tiny_model(host)
    model.save_pretrained(tmp_path)
    loaded = SWAPPED[host].from_pretrained(tmp_path)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())
    assert torch.equal(sample(loaded), sample(swap(model)))


def test_gates_added_while_a_model_has_no_memory_have_theirs(host: str) -> None:
    stock = tiny_model(host)
    for context in (init_empty_weights(), torch.device("meta")):
        with context:
            empty = SWAPPED[host].from_config(stock.config)
        empty.load_state_dict(stock.state_dict(), strict=False, assign=True)
        assert not any(tensor.is_meta for tensor in empty.state_dict().values())


def test_bfloat16_weights_keep_the_decay_in_float32(host: str, tmp_path: Path) -> None:
    swapped_model(host).save_pretrained(tmp_path)
    model = SWAPPED[host].from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        if ".attn1." in name:
            assert tensor.dtype == (torch.float32 if name.endswith(("A_log", "dt_bias")) else torch.bfloat16), name
    expected = sample(SWAPPED[host].from_pretrained(tmp_path))
    assert relative_error(sample(model, {k: bf16(v) for k, v in tiny_inputs().items()}), expected) < 0.05


def bf16(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.dim() > 1 else tensor


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_device_map(host: str, device_map: str, tmp_path: Path) -> None:
    model = swapped_model(host)
    model.save_pretrained(tmp_path / "swapped")
    loaded = SWAPPED[host].from_pretrained(tmp_path / "swapped", device_map=device_map)
    assert torch.equal(sample(loaded), sample(model))
    unswap_silently(model).save_pretrained(tmp_path / "stock")
    loaded = SWAPPED[host].from_pretrained(tmp_path / "stock", device_map=device_map)
    assert torch.equal(sample(loaded), sample(swap(model)))


def unswap_silently(model: Any) -> Any:
    with pytest.warns(UserWarning, match="unswap dropped"):
        return unswap(model)


# --- works with what people use ---------------------------------------------------------------------------------


def test_the_blocks_compile_into_one_graph_each(host: str) -> None:
    model = swapped_model(host, blocks=[0, 1, 2])
    expected = sample(model)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    assert relative_error(sample(model), expected) < 1e-6
    model.train()(**tiny_inputs()).sample.square().sum().backward()
    assert_every_gradient_says_something(model)


def test_the_whole_model_compiles(host: str) -> None:
    model = swapped_model(host, blocks=[0, 1, 2])
    compiled = torch.compile(model, backend="aot_eager")
    for frames in (5, 7):
        inputs = tiny_inputs(frames)
        assert relative_error(sample(compiled, inputs), sample(model, inputs)) < 1e-6


def test_lora_is_trained_saved_loaded_and_merged(host: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = swapped_model(host, blocks=[0, 1, 2])
    base = sample(model)
    fresh = copy.deepcopy(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    assert torch.equal(sample(model), base)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model.train()(**tiny_inputs()).sample.square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.any() for p in trained)
    assert all(block.attn1.has_gates for block in blocks_of(model, host))
    adapted = sample(model.eval())
    assert relative_error(adapted, base) > 1e-2

    name = "pytorch_lora_weights.safetensors"
    model.save_lora_adapter(tmp_path, weight_name=name)
    fresh.load_lora_adapter(tmp_path, prefix=None, weight_name=name)
    assert torch.equal(sample(fresh), adapted)
    fresh.fuse_lora()
    fresh.unload_lora()
    assert relative_error(sample(fresh), adapted) < 1e-5
    assert fresh.state_dict().keys() == swapped_model(host, blocks=[0, 1, 2]).state_dict().keys()


def test_layerwise_casting_stores_projections_in_float8_and_computes_as_before(host: str) -> None:
    model = swapped_model(host, blocks=[0, 1, 2])
    expected = sample(model)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    attn = blocks_of(model, host)[0].attn1
    assert attn.to_q.weight.dtype == attn.beta_proj.weight.dtype == torch.float8_e4m3fn
    assert attn.A_log.dtype == attn.norm_k.weight.dtype == torch.float32
    assert relative_error(sample(model), expected) < 0.2


@pytest.mark.parametrize("offload_type", ["leaf_level", "block_level"])
def test_group_offloading(host: str, offload_type: str) -> None:
    model = swapped_model(host, blocks=[0, 1, 2])
    expected = sample(model)
    device = torch.device("cpu")
    apply_group_offloading(model, device, offload_device=device, offload_type=offload_type, num_blocks_per_group=1)
    assert torch.equal(sample(model), expected)
    if offload_type == "block_level":
        with pytest.raises(ValueError, match="carries a hook"):
            unswap(model)


def test_sequential_offloading_moves_gates_with_their_attention(host: str) -> None:
    """accelerate's hooks on every module: weights are on the meta device in between."""
    model = swapped_model(host, blocks=[0, 1, 2])
    expected = sample(model)
    cpu_offload(model, torch.device("cpu"), offload_buffers=True)
    assert blocks_of(model, host)[0].attn1.A_log.is_meta
    assert torch.equal(sample(model), expected)
    with pytest.raises(ValueError, match="carries a hook"):
        unswap(model)


def test_attention_backends_can_be_chosen(host: str) -> None:
    model = swapped_model(host, blocks=[1])
    expected = sample(model)
    model.set_attention_backend("_native_math")
    assert relative_error(sample(model), expected) < 1e-5


def test_quantised_projections_stay_in_place(host: str) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny_model(host)
    projections = ("attn1.to_q", "attn1.to_k", "attn1.to_v")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), lambda module, name: name.endswith(projections))
    weights = [blocks_of(model, host)[i].attn1.to_k.weight for i in range(3)]
    swap(model, blocks=[0, 1, 2])
    fill_gates(model)
    for block, weight in zip(blocks_of(model, host), weights, strict=True):
        assert block.attn1.to_k.weight is weight and type(weight) is not nn.Parameter
        assert type(block.attn1.beta_proj.weight) is nn.Parameter
    plain = swap(tiny_model(host), blocks=[0, 1, 2])
    fill_gates(plain)
    assert 0 < relative_error(sample(model), sample(plain)) < 0.05


def fill_gates(model: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(GATES):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
