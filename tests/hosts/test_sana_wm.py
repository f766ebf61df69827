"""SANA-WM swapped against itself as diffusers has it: outputs, gradients, masks, chunks, what people use with it."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frame_gdn import swap, unswap
from tests.helpers import assert_every_gradient_says_something, relative_error

pytest.importorskip("diffusers", minversion="0.42")

from diffusers import SanaWMTransformer3DModel as Stock
from diffusers.models.transformers import transformer_sana_wm as host

from frame_gdn.chunks import ChunkGrid
from frame_gdn.hosts import Swapped, sana_wm
from tests.hosts.sana_wm import half, output_and_gradients, tiny_inputs, tiny_model, twin

PADDED_END = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()
PADDED_MIDDLE = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()

#: What a softmax block leaves unused in the host.
UNUSED = ("beta_proj", "gate_proj", "A_log", "dt_bias")


@torch.no_grad()
def sample(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    return model(**inputs).sample


def assert_parity(model: nn.Module, inputs: dict[str, Any], gradient_bound: float = 1e-4, **options: Any) -> None:
    """Output to 1e-5, every gradient by name, and after unswap the same bits."""
    plain, plain_gradients = output_and_gradients(model, inputs)
    keys = list(model.state_dict())
    assert swap(model, **options) is model
    assert list(model.state_dict()) == keys
    ours, gradients = output_and_gradients(model, inputs)
    assert relative_error(ours, plain) <= 1e-5
    assert gradients.keys() == plain_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert gradient.abs().max() > 0, f"the gradient of {name} is zero and says nothing"
        assert relative_error(gradients[name], gradient) <= gradient_bound, name
    unswap(model)
    assert not any(isinstance(module, Swapped) for module in model.modules())
    again, gradients = output_and_gradients(model, inputs)
    assert torch.equal(again, plain)
    assert all(torch.equal(gradients[name], plain_gradients[name]) for name in gradients)


# --- the same numbers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("camera", [True, False])
@pytest.mark.parametrize("mask", [None, PADDED_END, PADDED_MIDDLE], ids=["all frames", "end", "middle"])
def test_all_gdn_equals_the_host(camera: bool, mask: Tensor | None) -> None:
    model, inputs = tiny_model(), tiny_inputs(camera=camera, mask=mask)
    if camera:
        output_and_gradients(model, inputs)
        assert_every_gradient_says_something(nn.ModuleDict({"blocks": model.blocks}))
    assert_parity(model, inputs)


@pytest.mark.parametrize("mask", [None, PADDED_MIDDLE], ids=["all frames", "middle"])
def test_softmax_blocks_equal_the_host(mask: Tensor | None) -> None:
    assert_parity(tiny_model(softmax_every_n=2), tiny_inputs(mask=mask), 1e-3)


@pytest.mark.parametrize(
    "config",
    [
        {"qk_norm": False},
        {"conv_kernel_size": 0},
        {"k_conv_only": False, "conv_kernel_size": 3},
        {"use_pe": False},
        {"ffn_type": "mlp"},
        {"patch_size": (1, 2, 2), "t_kernel_size": 5, "use_chunk_plucker_post_attn": False},
    ],
    ids=lambda config: ",".join(config),
)
def test_options_of_the_host_are_taken_over(config: dict[str, Any]) -> None:
    inputs = tiny_inputs(width=4)
    if config.get("use_chunk_plucker_post_attn") is False:
        del inputs["chunk_plucker"]
    assert_parity(tiny_model(num_layers=2, **config), inputs)


@pytest.mark.parametrize("attribute", ["output_gate", "attn.eps"])
def test_what_a_host_sets_is_read_from_its_modules(attribute: str) -> None:
    model = tiny_model(num_layers=1)
    attn = model.blocks[0].attn
    if attribute == "output_gate":
        attn.use_output_gate, attn.output_gate = False, None
    else:
        attn.attn.eps = 0.5  # large enough to be seen
    assert_parity(model, tiny_inputs())


def test_chosen_blocks_are_swapped_and_then_the_rest() -> None:
    model, inputs = tiny_model(softmax_every_n=3), tiny_inputs(mask=PADDED_END)
    plain = sample(model, inputs)
    swap(model, blocks=[1])
    assert [isinstance(block.attn, Swapped) for block in model.blocks] == [False, True, False]
    assert relative_error(sample(swap(model), inputs), plain) <= 1e-5
    assert [isinstance(block.attn, Swapped) for block in model.blocks] == [False, True, False]
    swap(model, blocks=None)
    assert all(isinstance(block.attn, Swapped) for block in model.blocks)
    once = sample(model, inputs)
    assert torch.equal(sample(swap(model), inputs), once)
    assert relative_error(once, plain) <= 1e-5
    assert torch.equal(sample(unswap(model), inputs), plain)


def test_tables_and_rays_given_by_the_caller() -> None:
    model, inputs = tiny_model(softmax_every_n=3), tiny_inputs()
    size = tuple(inputs["hidden_states"].shape[2:])
    table = model.rope(size)
    rays = host._prepare_ucpe_ray_transforms(16, inputs["camera_conditions"], size, (1, 1, 1), table)
    given = {
        "pos_embeds": torch.cat([table, table.conj()]),  # a table a sample
        "cam_pos_embeds": {
            "absmap": torch.zeros(2, 3, *size),
            "P": rays[0],
            "P_inv": rays[2],
            "pos_embeds_cam": rays[3][0],
        },
    }
    plain = sample(model, {**inputs, **given})
    assert relative_error(sample(swap(model), {**inputs, **given}), plain) <= 1e-5


def test_the_short_convolution_adds_its_bias_as_often_as_the_host() -> None:
    conv = host.SanaWMTemporalShortConvolution(6, 3, bias=True)
    nn.init.normal_(conv.weight)
    nn.init.normal_(conv.bias)
    x = torch.randn(2, 4 * 5, 6)
    plain = conv(x, 4)
    conv.__class__ = sana_wm.SanaWMTemporalShortConvolution
    assert relative_error(conv(x, 4), plain) <= 1e-6


@pytest.mark.parametrize("mask", [None, PADDED_END], ids=["all frames", "end"])
def test_every_part_of_a_block_sees_tokens_and_gradients_with_their_channels_together(mask: Tensor | None) -> None:
    """One tensor in another order is enough: sums keep their first operand's, linear layers copy it."""
    model, inputs = swap(tiny_model(softmax_every_n=2)), tiny_inputs(mask=mask)
    seen, apart = set(), []

    def watch(name: str, *tensors: Tensor | None) -> None:
        seen.add(name)
        apart.extend(name for t in tensors if t is not None and not t.is_contiguous())

    for index, block in enumerate(model.blocks):
        for name, part in [("block", block), *block.named_children()]:

            def forward(_: nn.Module, args: tuple[Any, ...], name: str = f"{name} {index}") -> None:
                watch(name, args[0])

            def backward(_: nn.Module, into: Any, out: Any, name: str = f"{name} {index} backward") -> None:
                watch(name, into[0], out[0])

            part.register_forward_pre_hook(forward)
            part.register_full_backward_hook(backward)
    output_and_gradients(model, inputs)
    assert len(seen) == 3 * 7 * 2
    assert not apart


# --- padding ----------------------------------------------------------------------------------------------------


def test_nan_in_padded_frames_reaches_nothing() -> None:
    mask = PADDED_MIDDLE
    model, inputs = swap(tiny_model(softmax_every_n=3)), tiny_inputs(mask=mask)
    expected, expected_gradients = output_and_gradients(model, inputs)
    for name, dim in (("hidden_states", 2), ("timestep", 2), ("camera_conditions", 1), ("chunk_plucker", 2)):
        inputs[name].movedim(dim, 1)[~mask] = float("nan")
    model.zero_grad()
    out = model(**inputs).sample
    active = mask[:, None, :, None, None]
    assert torch.equal(out.masked_fill(~active, 0), expected.masked_fill(~active, 0))
    out.masked_fill(~active, 0).square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert expected_gradients


@pytest.mark.parametrize("shape", [(2, 5), (2, 1, 5), (2, 1, 5, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_masks_of_every_shape_and_dtype(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    model = swap(tiny_model(num_layers=1))
    expected = sample(model, tiny_inputs(mask=PADDED_END))
    assert torch.equal(sample(model, tiny_inputs(mask=PADDED_END.view(shape).to(dtype))), expected)


@pytest.mark.parametrize(
    ("mask", "message"),
    [(torch.full((2, 5), 0.5), "0 and 1"), (torch.ones(2, 4), "T 5"), (torch.ones(2, 2, 5), "frame_valid_mask")],
)
def test_masks_that_weigh_or_do_not_fit_are_refused(mask: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swap(tiny_model(num_layers=1))(**tiny_inputs(mask=mask))


# --- chunks -----------------------------------------------------------------------------------------------------


def first_frames(inputs: dict[str, Any], frames: int) -> dict[str, Any]:
    dims = {"hidden_states": 2, "timestep": 2, "camera_conditions": 1, "chunk_plucker": 2, "frame_valid_mask": 1}
    return {name: t.narrow(dims[name], 0, frames) if name in dims else t for name, t in inputs.items()}


GRIDS = [ChunkGrid(1), ChunkGrid(2), ChunkGrid(3), ChunkGrid(2, 3), ChunkGrid(3, 1)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_no_site_sees_past_the_end_of_its_chunk(grid: ChunkGrid) -> None:
    """Where a chunk ends, cutting the clip there changes nothing before; where none ends, it does."""
    model = swap(tiny_model(softmax_every_n=3), **grid.facts)
    inputs = tiny_inputs(7, mask=torch.tensor([[1, 1, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1, 1]]).bool())
    whole = sample(model, inputs)
    for frames in range(1, 7):
        error = relative_error(sample(model, first_frames(inputs, frames)), whole[:, :, :frames])
        assert error <= 1e-5 if grid.begins_at(frames) else error > 1e-3, frames


def test_one_chunk_is_the_whole_clip() -> None:
    model, inputs = tiny_model(softmax_every_n=3), tiny_inputs()
    plain = sample(model, inputs)
    assert relative_error(sample(swap(model, chunk_frames=5), inputs), plain) <= 1e-5
    assert relative_error(sample(swap(model, chunk_frames=2), inputs), plain) > 1e-2
    assert relative_error(sample(swap(model, chunk_frames=None), inputs), plain) <= 1e-5


# --- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"start_scale": 0.1},
        {"blocks": [0], "chunk_frames": 2},
        {"blocks": [3]},
        {"blocks": []},
        {"blocks": [True]},
        {"backend": "cuda"},
        {"chunk_frames": 0},
        {"chunk_frames": 1.5},
    ],
    ids=str,
)
def test_options_that_do_not_fit_change_nothing(options: dict[str, Any]) -> None:
    model = tiny_model()
    with pytest.raises(ValueError, match=next(reversed(options))):
        swap(model, **options)
    assert not any(isinstance(module, Swapped) for module in model.modules())


def test_a_replaced_attention_or_a_hook_is_refused_by_name() -> None:
    class Custom(host.SanaVideoMSCamCtrlBlock):
        pass

    model = tiny_model()
    model.blocks[1].__class__ = Custom
    with pytest.raises(ValueError, match="Custom"):
        swap(model)
    model = tiny_model()
    model.enable_group_offload(torch.device("cpu"), offload_type="block_level", num_blocks_per_group=1)
    with pytest.raises(ValueError, match="hook"):
        swap(model)
    assert not any(isinstance(module, Swapped) for module in model.modules())


# --- what people use --------------------------------------------------------------------------------------------


def test_gradient_checkpointing_gives_the_same_gradients() -> None:
    model, inputs = swap(tiny_model(softmax_every_n=3)), tiny_inputs(mask=PADDED_END)
    expected = output_and_gradients(model, inputs)
    model.train().enable_gradient_checkpointing()
    ours = output_and_gradients(model, inputs)
    assert torch.equal(ours[0], expected[0])
    assert all(torch.equal(ours[1][name], gradient) for name, gradient in expected[1].items())


def test_deepcopy_and_pickle() -> None:
    model, inputs = swap(tiny_model(num_layers=2), chunk_frames=2), tiny_inputs()
    expected = sample(model, inputs)
    for copy in (twin(model), pickle.loads(pickle.dumps(model))):
        assert type(copy) is type(model) and copy.blocks[0].attn.chunk_frames == 2
        assert torch.equal(sample(copy, inputs), expected)
        next(copy.parameters()).data.zero_()
    assert torch.equal(sample(model, inputs), expected)


def test_saved_and_loaded(tmp_path: Path) -> None:
    model, inputs = swap(tiny_model(softmax_every_n=3)), tiny_inputs()
    expected = sample(model, inputs)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    stock = Stock.from_pretrained(tmp_path)
    assert type(stock) is Stock
    assert torch.equal(sample(unswap(twin(model)), inputs), sample(stock, inputs))
    assert torch.equal(sample(swap(stock), inputs), expected)
    loaded = sana_wm.SanaWMTransformer3DModel.from_pretrained(tmp_path)
    assert isinstance(loaded.blocks[0].attn, Swapped)
    assert torch.equal(sample(loaded, inputs), expected)


def test_loaded_in_bfloat16_the_gates_stay_float32(tmp_path: Path) -> None:
    model = swap(tiny_model(softmax_every_n=3))
    model.save_pretrained(tmp_path)
    loaded = sana_wm.SanaWMTransformer3DModel.from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    for name, parameter in loaded.named_parameters():
        kept = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if kept else torch.bfloat16), name
        assert not parameter.is_meta
        if kept:
            assert torch.equal(parameter, model.get_parameter(name))
    inputs = tiny_inputs()
    assert loaded.dtype == torch.bfloat16
    assert relative_error(sample(loaded, half(inputs)), sample(model, inputs)) <= 0.05


def test_bfloat16_is_no_further_from_float32_than_the_host() -> None:
    model, inputs = tiny_model(softmax_every_n=3), tiny_inputs()
    exact = sample(model, inputs)
    rounded, half_inputs = twin(model).to(torch.bfloat16), half(inputs)
    plain = relative_error(sample(rounded, half_inputs), exact)
    assert relative_error(sample(swap(rounded), half_inputs), exact) <= 1.1 * plain


def test_compile_repeated_blocks_with_one_graph_a_block() -> None:
    model, inputs = swap(tiny_model(softmax_every_n=2, num_layers=2)), tiny_inputs(mask=PADDED_END)
    expected, gradients = output_and_gradients(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    ours, compiled = output_and_gradients(model, inputs)
    assert relative_error(ours, expected) <= 1e-6
    assert all(relative_error(compiled[name], gradient) <= 1e-3 for name, gradient in gradients.items())


def test_compile_of_the_whole_model() -> None:
    model, inputs = swap(tiny_model(num_layers=1)), tiny_inputs()
    expected, gradients = output_and_gradients(model, inputs)
    model.compile(backend="aot_eager")
    ours, compiled = output_and_gradients(model, inputs)
    assert relative_error(ours, expected) <= 1e-6
    assert all(relative_error(compiled[name], gradient) <= 1e-4 for name, gradient in gradients.items())


def test_lora_trained_saved_loaded_and_merged(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=r".*\.attn\.(qkv|proj|q_proj_cam)", init_lora_weights=False)
    base, inputs = tiny_model(), tiny_inputs()
    torch.manual_seed(0)
    tuned = peft.get_peft_model(swap(twin(base)), config)
    before = sample(tuned, inputs)
    optimizer = torch.optim.AdamW((p for p in tuned.parameters() if p.requires_grad), lr=1e-2)
    tuned(**inputs).sample.square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in tuned.parameters() if p.requires_grad)
    optimizer.step()
    after = sample(tuned, inputs)
    assert relative_error(after, before) > 1e-4

    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(swap(twin(base)), tmp_path)
    assert torch.equal(sample(loaded, inputs), after)
    stock = peft.PeftModel.from_pretrained(twin(base), tmp_path)
    assert relative_error(after, sample(stock, inputs)) <= 1e-5
    merged = loaded.merge_and_unload()
    assert relative_error(sample(merged, inputs), after) <= 1e-5
    assert relative_error(sample(unswap(merged), inputs), after) <= 1e-5


def test_layerwise_casting() -> None:
    model, inputs = tiny_model(), tiny_inputs()
    plain = twin(model)
    plain.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    swap(model).enable_layerwise_casting(torch.float8_e4m3fn, torch.float32)
    assert model.blocks[0].attn.qkv.weight.dtype == torch.float8_e4m3fn
    assert relative_error(sample(model, inputs), sample(plain, inputs)) <= 1e-5


@pytest.mark.parametrize("offload_type", ["block_level", "leaf_level"])
def test_group_offload(offload_type: str) -> None:
    model, inputs = swap(tiny_model(softmax_every_n=3)), tiny_inputs(mask=PADDED_END)
    expected = sample(model, inputs)
    blocks = 1 if offload_type == "block_level" else None
    model.enable_group_offload(torch.device("cpu"), offload_type=offload_type, num_blocks_per_group=blocks)
    assert torch.equal(sample(model, inputs), expected)
    if offload_type == "block_level":
        with pytest.raises(ValueError, match="hook"):
            unswap(model)


def test_set_attention_backend_reaches_the_softmax_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

    model, inputs = tiny_model(softmax_every_n=3), tiny_inputs()
    plain = sample(model, inputs)
    swap(model)
    called = []
    native = _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_MATH]

    def counted(**kwargs: Any) -> Tensor:
        called.append(kwargs["query"].shape)
        return native(**kwargs)

    monkeypatch.setitem(_AttentionBackendRegistry._backends, AttentionBackendName._NATIVE_MATH, counted)
    before = _AttentionBackendRegistry._active_backend
    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", before)
    model.set_attention_backend("_native_math")
    assert relative_error(sample(model, inputs), plain) <= 1e-4
    assert len(called) == 3 + 2  # cross-attentions, and the softmax block's two branches
    called.clear()
    with attention_backend("native"):
        sample(model, inputs)
    assert len(called) == 3


def test_a_quantised_linear_is_left_in_place() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model, inputs = tiny_model(), tiny_inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchao.quantize_(model.blocks, torchao.Int8WeightOnlyConfig())
    kind = type(model.blocks[0].attn.qkv.weight)
    assert kind is not nn.Parameter
    plain = sample(model, inputs)
    swap(model)
    assert type(model.blocks[0].attn.qkv.weight) is kind
    assert relative_error(sample(model, inputs), plain) <= 1e-5


def test_model_offload_and_its_hook_on_the_root() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, inputs = swap(tiny_model()), tiny_inputs()
    expected = sample(model, inputs)
    _, hook = accelerate.cpu_offload_with_hook(model, "cpu")
    assert torch.equal(sample(model, inputs), expected)
    with pytest.raises(ValueError, match="hook"):
        unswap(model)
    hook.remove()
    assert type(unswap(model)) is Stock
    assert relative_error(sample(model, inputs), expected) <= 1e-5


def tiny_pipeline(transformer: nn.Module) -> Any:
    from diffusers import AutoencoderKLLTX2Video, FlowMatchEulerDiscreteScheduler, SanaWMPipeline
    from transformers import Gemma2Config, Gemma2ForCausalLM, GemmaTokenizer

    torch.manual_seed(0)
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *"▁abcdefghijklmnopqrstuvwxyz"]
    text = Gemma2Config(
        vocab_size=len(pieces),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    vae = AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(4, 8, 16, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    pipeline = SanaWMPipeline(
        tokenizer=GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]),
        text_encoder=Gemma2ForCausalLM(text),
        vae=vae,
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def film(pipeline: Any) -> Tensor:
    from PIL import Image

    frames = pipeline(
        image=Image.new("RGB", (80, 64), (120, 100, 80)),
        prompt="a car",
        action="w-16",
        intrinsics=[60.0, 60.0, 40.0, 32.0],
        height=64,
        width=64,
        num_frames=17,
        num_inference_steps=2,
        max_sequence_length=8,
        chi_prompt=["enhance "],
        generator=torch.Generator().manual_seed(0),
    ).frames
    assert frames.shape == (17, 64, 64, 3)
    return torch.from_numpy(frames)


def test_the_pipeline_from_end_to_end_and_saved(tmp_path: Path) -> None:
    pipeline = tiny_pipeline(tiny_model(chunk_plucker_channels=48))
    plain = film(pipeline)
    assert plain.std() > 0.01
    swap(pipeline.transformer)
    assert relative_error(film(pipeline), plain) <= 1e-5
    pipeline.save_pretrained(tmp_path)
    loaded = type(pipeline).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded.transformer) is Stock
    assert torch.equal(film(loaded), plain)
    pipeline.transformer = swap(pipeline.transformer, chunk_frames=2)  # assigned, so that its class is noted
    pipeline.save_pretrained(tmp_path)
    loaded = type(pipeline).from_pretrained(tmp_path)
    assert type(loaded.transformer) is sana_wm.SanaWMTransformer3DModel
    assert loaded.transformer.config.chunk_frames == loaded.transformer.blocks[0].attn.chunk_frames == 2


@pytest.mark.parametrize("softmax_every_n", [0, 1], ids=["gdn", "softmax"])
@pytest.mark.parametrize("mask", [None, [[1, 1], [1, 0]]], ids=["all frames", "end"])
def test_the_triton_backend_equals_torch_through_a_whole_model(
    softmax_every_n: int, mask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sana_wm, "HALF", torch.float32)  # or the softmax block's rounding would hide an error
    model = tiny_model(num_layers=1, softmax_every_n=softmax_every_n)
    inputs = tiny_inputs(2, mask=None if mask is None else torch.tensor(mask).bool())
    expected, gradients = output_and_gradients(swap(model, backend="torch"), inputs)
    ours, triton = output_and_gradients(swap(model, backend="triton"), inputs)
    assert relative_error(ours, expected) <= 1e-5
    assert triton.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert relative_error(triton[name], gradient) <= 1e-4, name


def test_what_is_fused_away_is_called_all_the_same() -> None:
    """Hooks of a block's norms fire, and a norm or a feature map that somebody changed is the one that computes."""
    model, inputs = swap(tiny_model(num_layers=1), backend="triton"), tiny_inputs(1, batch=1)
    block, called = model.blocks[0], []
    norms = [n for n, m in block.named_modules() if "norm" in n and not isinstance(m, nn.Identity)]
    for name in norms:
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: called.append(name))
    fused = sample(model, inputs)
    assert {"norm1", "norm2", "attn.q_norm", "attn.k_norm", "attn.q_norm_cam", "attn.k_norm_cam"} <= set(norms)
    assert sorted(called) == sorted(norms)
    norm = nn.RMSNorm(32, eps=block.attn.k_norm.eps)
    norm.weight = block.attn.k_norm.weight
    block.norm1, block.attn.k_norm = nn.LayerNorm(32, elementwise_affine=False, eps=1e-6), norm
    assert relative_error(sample(model, inputs), fused) <= 1e-5
    block.attn.kernel_func = nn.Softplus()
    assert relative_error(sample(model, inputs), fused) > 1e-3


def test_loaded_onto_a_device_by_a_map(tmp_path: Path) -> None:
    model, inputs = swap(tiny_model(num_layers=1)), tiny_inputs()
    model.save_pretrained(tmp_path)
    for kind in (Stock, sana_wm.SanaWMTransformer3DModel):
        loaded = swap(kind.from_pretrained(tmp_path, device_map={"": "cpu"}))
        assert torch.equal(sample(loaded, inputs), sample(model, inputs))


def test_modules_that_a_device_map_hooked_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(tiny_model(num_layers=1), "cpu")  # as a map over several devices does
    with pytest.raises(ValueError, match="hook"):
        swap(model)
