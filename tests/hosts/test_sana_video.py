"""SanaVideo: a start next to its linear attention, its pipeline, and what else is its alone (see test_gates.py)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan, DPMSolverMultistepScheduler, SanaVideoPipeline
from diffusers.models.transformers import transformer_sana_video as host
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import Gemma2Config, Gemma2Model, PreTrainedTokenizerFast

from benchmarks import sana_video_start
from frame_gdn import swap
from frame_gdn.chunks import ChunkGrid
from frame_gdn.hosts import adopt, sana_video
from frame_gdn.hosts.clip import Span
from frame_gdn.hosts.feed_forward import free_convolutions
from tests.helpers import fill_randomly, relative_error
from tests.hosts.warm_start import TINY, tiny_inputs, tiny_model
from tests.kernels.test_steps import DEVICE


@torch.no_grad()
def error_at_start(seed: int, start_scale: float | None) -> float:
    model, inputs = tiny_model("sana_video", seed=seed), tiny_inputs(21)
    stock = model(**inputs).sample
    return relative_error(swap(model, start_scale=start_scale)(**inputs).sample, stock)


def test_the_start_is_close_to_the_stock_model_and_as_close_as_one_wants() -> None:
    for seed in range(5):
        assert error_at_start(seed, None) <= 0.02
        assert error_at_start(seed, 0.03) <= 0.001
    errors = [error_at_start(0, scale) for scale in (1.0, 0.5, 0.25)]
    assert all(3 < larger / smaller < 5 for larger, smaller in zip(errors, errors[1:], strict=False))  # its square


def test_the_default_is_what_was_measured() -> None:
    result = json.loads(sana_video_start.RESULTS.read_text())
    summary = sana_video_start.summarize(result)
    assert summary["default_start_scale"] == sana_video.START_SCALE
    assert summary["error_at_default"] <= 0.02 and summary["smallest_error"] <= 0.001
    assert len(result["seeds"]) == 5 and result["latents"][0] == 21


def test_linear_attention_left_in_place_cannot_be_cut_into_chunks() -> None:
    model = tiny_model("sana_video")
    with pytest.raises(ValueError, match="chunk_frames needs all blocks"):
        swap(model, blocks=[0, 1], chunk_frames=2)
    swap(swap(model, blocks=[0, 1]), blocks=[2], chunk_frames=2)


def test_keys_without_a_norm_are_refused_by_name() -> None:
    model = tiny_model("sana_video")
    model.transformer_blocks[1].attn1.norm_k = None
    with pytest.raises(ValueError, match="qk_norm None"):
        swap(model)


def test_a_time_a_token_as_in_image_to_video() -> None:
    """The host's own way to per-frame noise levels: frames of one level are as with one level a sample."""
    model = fill_randomly(swap(tiny_model("sana_video")), 1)
    inputs = tiny_inputs(5)
    per_token = {**inputs, "timestep": inputs["timestep"][:, None].expand(2, 5 * 6)}
    with torch.no_grad():
        assert relative_error(model(**per_token).sample, model(**inputs).sample) < 1e-5


# --- the pipeline -----------------------------------------------------------------------------------------------


def tiny_pipeline() -> SanaVideoPipeline:
    """All components random and tiny, down to a tokenizer of ten words."""
    torch.manual_seed(0)
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "a", "cat", "runs", "over", "the", "sea"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    text_encoder = Gemma2Config(
        vocab_size=len(words),
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )
    vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, latents_mean=[0.0] * 4,
                           latents_std=[1.0] * 4, temperal_downsample=[False, True, True])  # fmt: skip
    return SanaVideoPipeline(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special),
        text_encoder=Gemma2Model(text_encoder).eval(),
        vae=vae.eval(),
        transformer=tiny_model("sana_video", sample_size=8),
        scheduler=DPMSolverMultistepScheduler(
            algorithm_type="dpmsolver++", prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
    )


def film(pipeline: SanaVideoPipeline, **arguments: Any) -> Tensor:
    pipeline.set_progress_bar_config(disable=True)
    frames: Tensor = pipeline(
        "a cat runs over the sea",
        frames=9,
        height=32,
        width=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        max_sequence_length=16,
        complex_human_instruction=[],
        use_resolution_binning=False,
        output_type="pt",
        **arguments,
    ).frames
    return frames


def test_the_pipeline_makes_frames_and_is_saved_and_loaded_with_its_swapped_transformer(tmp_path: Path) -> None:
    pipeline = tiny_pipeline()
    stock = film(pipeline)
    pipeline.transformer = swap(pipeline.transformer)  # assigned, so that the pipeline takes note of the class
    frames = film(pipeline)
    assert frames.shape == (1, 9, 3, 32, 32) and frames.isfinite().all()
    assert 0 < relative_error(frames, stock) < 0.02

    pipeline.save_pretrained(tmp_path)
    again = SanaVideoPipeline.from_pretrained(tmp_path)
    assert type(again.transformer) is sana_video.SanaVideoTransformer3DModel
    assert torch.equal(film(again), frames)
    assert set(again.transformer.config) - set(TINY["sana_video"]) >= {"gdn_blocks"}


def test_the_pipeline_under_offloading_by_groups() -> None:
    pipeline = tiny_pipeline()
    swap(pipeline.transformer)
    frames = film(pipeline)
    pipeline.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    assert torch.equal(film(pipeline), frames)


C, CLIP = 16, (2, 5, 2, 4)


def feed_forward(backend: str | None, chunk_frames: int | None = None, dtype: torch.dtype = torch.float32) -> Any:
    """The host's own where backend is None, else swapped; the weights are the same."""
    torch.manual_seed(0)
    ff = fill_randomly(host.GLUMBTempConv(C, C, 1.5, residual_connection=False)).to(DEVICE, dtype)
    if backend is not None:
        free = free_convolutions([ff.conv_inverted, ff.conv_depth, ff.conv_point, ff.conv_temp])
        adopt([(ff, sana_video.GLUMBTempConv), *free], backend=backend, grid=ChunkGrid(chunk_frames))
    return ff


def of_feed_forward(ff: Any) -> dict[str, Tensor]:
    """Output and every gradient by name."""
    generator = torch.Generator().manual_seed(1)
    x, direction = (torch.randn(*CLIP, C, generator=generator).to(next(ff.parameters())) for _ in range(2))
    x.requires_grad_()
    swapped = isinstance(ff, sana_video.GLUMBTempConv)
    out = ff(x, Span([CLIP[1]], 0, CLIP[1], ff.grid)) if swapped else ff(x)
    (out * direction).sum().backward()
    return {"out": out.detach(), "x": x.grad, **{name: p.grad for name, p in ff.named_parameters()}}


@pytest.mark.parametrize("chunk_frames", [None, 2])
def test_the_fused_feed_forward_is_as_exact_as_the_plain_one(chunk_frames: int | None) -> None:
    exact = of_feed_forward(feed_forward("torch", chunk_frames, torch.float64))
    if chunk_frames is None:
        for name, value in of_feed_forward(feed_forward(None, dtype=torch.float64)).items():
            assert relative_error(exact[name], value) <= 1e-14, name
    plain, fused = (of_feed_forward(feed_forward(backend, chunk_frames)) for backend in ("torch", "triton"))
    for name, value in exact.items():
        bound = max(2 * relative_error(plain[name], value), 1e-6)
        assert relative_error(fused[name], value) <= bound, name


@pytest.mark.parametrize("wrapped", ["conv_inverted", "conv_depth", "conv_point", "conv_temp"])
def test_an_adapter_in_the_feed_forward_changes_nothing_before_it_is_trained(wrapped: str) -> None:
    """And is used: around what is fused the plain way is taken."""
    peft = pytest.importorskip("peft")
    ff = feed_forward("triton", 2)
    expected = of_feed_forward(ff)["out"]
    rank = 2 * int(1.5 * C) if wrapped == "conv_depth" else 2
    peft.inject_adapter_in_model(peft.LoraConfig(r=rank, target_modules=[wrapped]), ff)
    found = of_feed_forward(ff.to(DEVICE))["out"]
    assert relative_error(found, expected) <= 1e-5
    with torch.no_grad():
        for name, parameter in ff.named_parameters():
            if "lora" in name:
                parameter.normal_()
    assert relative_error(of_feed_forward(ff)["out"], expected) > 0.01
