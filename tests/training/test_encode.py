import gc
import json
import shutil
import string
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKLWan,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanPipeline,
)
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma2Model,
    PreTrainedTokenizerFast,
    UMT5Config,
    UMT5EncoderModel,
)

pytest.importorskip("diffusers", minversion="0.42")  # which has SANA-WM

from frame_gdn import swap
from tests.hosts import sana_wm, warm_start
from training.data import VideoLatents, write_shard
from training.encode import TextEncoder, main
from training.hosts import check_data, model_inputs
from training.latents import VaeCodec, load_codec
from training.video import read_video, write_video

HOSTS = ("wan", "sana_video", "sana_wm")
PROMPTS = [
    "a rabbit on grass",
    "  A Rabbit&amp;its\n\n  shadow, on “grass” ",
    "rabbit " * 700,  # longer than any pipeline takes
]


def tiny_wan_vae(**options: Any) -> AutoencoderKLWan:
    sizes = {"base_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return AutoencoderKLWan(**sizes, temperal_downsample=[False, True, True], **options)


def tiny_gemma_config(vocabulary: int) -> Gemma2Config:
    return Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
    )


def tiny_wan() -> DiffusionPipeline:
    words = ["<pad>", "</s>", "<unk>", "a", "A", "rabbit", "Rabbit", "on", "grass", "&", "its", ",", "“", "”"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    config = UMT5Config(vocab_size=len(words), d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    return WanPipeline(
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"),
        text_encoder=UMT5EncoderModel(config),
        vae=tiny_wan_vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=warm_start.tiny_model("wan"),
        scheduler=UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )


def tiny_gemma_tokenizer() -> Any:
    from transformers import GemmaTokenizer

    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *string.printable.strip(), "\n"]
    return GemmaTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])


def tiny_sana_video() -> DiffusionPipeline:
    from diffusers import SanaVideoPipeline

    tokenizer = tiny_gemma_tokenizer()
    return SanaVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2Model(tiny_gemma_config(len(tokenizer))),
        vae=tiny_wan_vae(z_dim=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=warm_start.tiny_model("sana_video", sample_size=30),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
    )


def tiny_sana_wm() -> DiffusionPipeline:
    from diffusers import AutoencoderKLLTX2Video, SanaWMPipeline

    tokenizer = tiny_gemma_tokenizer()
    vae = AutoencoderKLLTX2Video(
        latent_channels=4,
        block_out_channels=(4, 8, 16, 32),
        decoder_block_out_channels=(8, 16, 32),
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 4,
        spatial_compression_ratio=32,
        temporal_compression_ratio=8,
    )
    return SanaWMPipeline(
        tokenizer=tokenizer,
        text_encoder=Gemma2ForCausalLM(tiny_gemma_config(len(tokenizer))),
        vae=vae,
        transformer=sana_wm.tiny_model(chunk_plucker_channels=48),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline of each host, tiny and random."""
    folder = tmp_path_factory.mktemp("pipelines")
    for host in HOSTS:
        torch.manual_seed(0)
        globals()[f"tiny_{host}"]().save_pretrained(folder / host)
    return folder


@pytest.fixture
def videos(tmp_path: Path) -> Path:
    """A video and its caption for each prompt."""
    for number, prompt in enumerate(PROMPTS):
        levels = (torch.arange(20) + 20 * number).to(torch.uint8).view(-1, 1, 1, 1)
        write_video(tmp_path / "videos" / f"{number}.mp4", levels.expand(20, 64, 64, 3), fps=8)
        (tmp_path / "videos" / f"{number}.txt").write_text(prompt, encoding="utf-8")
    return tmp_path / "videos"


def encode(model: Path, videos: Path, shards: Path, *options: str) -> list[Path]:
    named = {"pretrained_model_name_or_path": model, "videos": videos, "output_dir": shards}
    named |= {"height": 64, "width": 64, "num_frames": 9}
    return main([*(f"--{name}={value}" for name, value in named.items()), *options])


class Asked(Exception):
    """A transformer was called."""


def given_by_the_pipeline(folder: Path, prompt: str) -> dict[str, dict[str, Tensor]]:
    """What a plain call of a pipeline gives its transformer as text: for the prompt, and for the negative one."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    calls: list[dict[str, Tensor]] = []

    def forward(latents: Tensor | None = None, timestep: Any = None, text: Any = None, **arguments: Any) -> Any:
        embeds = arguments["encoder_hidden_states"] if text is None else text
        mask = arguments.get("encoder_attention_mask", arguments.get("mask"))
        calls.append({"encoder_hidden_states": embeds, "encoder_attention_mask": mask})
        if mask is not None or len(calls) == 2:  # Wan is called for the prompt, then for the negative one
            raise Asked
        return (torch.zeros_like(arguments["hidden_states"]),)

    pipeline.transformer.forward = forward
    arguments: dict[str, Any] = {"num_inference_steps": 2}
    if folder.name == "sana_wm":
        from PIL import Image

        picture, lens = Image.new("RGB", (64, 64)), [60.0, 60.0, 32.0, 32.0]
        arguments |= {"image": picture, "action": "w-16", "intrinsics": lens, "height": 64, "width": 64}
        arguments["num_frames"] = 9
    elif folder.name == "wan":
        arguments |= {"height": 64, "width": 64, "num_frames": 9}
    else:
        arguments["frames"] = 5
    with pytest.raises(Asked):
        pipeline(prompt=prompt, **arguments)
    if len(calls) == 2:
        return {"prompt": calls[0], "negative": calls[1]}
    halves = [{name: tensor[i : i + 1] for name, tensor in calls[0].items()} for i in range(2)]
    return {"negative": halves[0], "prompt": halves[1]}


def given_in_training(host: str, pipelines: Path, item: dict[str, Any]) -> dict[str, Tensor]:
    """What a step of training gives the same transformer."""
    model: nn.Module = DiffusionPipeline.from_pretrained(pipelines / host).transformer
    batch = {name: value[None] for name, value in item.items() if isinstance(value, Tensor)}
    latents = batch["latents"]
    frames = latents.shape[2]
    return model_inputs(model, latents, torch.zeros(1, frames), batch, slice(0, frames), [frames])


@pytest.mark.parametrize("host", HOSTS)
def test_prompts_are_those_that_the_hosts_pipeline_gives_its_transformer(
    host: str, pipelines: Path, videos: Path, tmp_path: Path
) -> None:
    assert len(encode(pipelines / host, videos, tmp_path / "shards", "--captions")) == len(PROMPTS)
    data = VideoLatents(shards=tmp_path / "shards")
    for number, prompt in enumerate(PROMPTS):
        expected = given_by_the_pipeline(pipelines / host, prompt.strip())  # as a caption is read
        for dropout, part in ((0.0, "prompt"), (1.0, "negative")):
            data.prompt_dropout = dropout
            item = data[data.names.index(f"{number}.mp4/000000")]
            inputs = given_in_training(host, pipelines, item)
            assert torch.equal(inputs["encoder_hidden_states"], expected[part]["encoder_hidden_states"])
            assert item["prompt_embeds"].any(dim=-1)[item["prompt_attention_mask"]].all()
            if expected[part]["encoder_attention_mask"] is not None:
                assert torch.equal(inputs["encoder_attention_mask"], expected[part]["encoder_attention_mask"].bool())


def test_an_instruction_stands_before_the_prompts_of_both_sanas(pipelines: Path) -> None:
    """The comparison above would hold between two pipelines that both lack it."""
    for host, word in (("sana_video", "suitable for video"), ("sana_wm", "suitable for image")):
        encoder = TextEncoder(str(pipelines / host))
        instruction = encoder.options.get("complex_human_instruction") or encoder.options["chi_prompt"]
        assert word in instruction[0] and encoder.options["max_sequence_length"] == 300
        bare = TextEncoder(str(pipelines / host))
        bare.options |= {name: None for name in ("complex_human_instruction", "chi_prompt") if name in bare.options}
        assert not torch.equal(encoder("a rabbit")["prompt_embeds"], bare("a rabbit")["prompt_embeds"])


def test_what_is_behind_a_prompts_end_is_zero_for_wan_wherever_the_shard_came_from(pipelines: Path) -> None:
    model = warm_start.tiny_model("wan")
    embeds, mask = torch.randn(1, 6, 8), torch.tensor([[True, True, False, False, False, False]])
    latents, times = torch.randn(1, 4, 3, 4, 4), torch.zeros(1, 3)
    for stored in (mask, mask.long()):
        batch = {"prompt_embeds": embeds, "prompt_attention_mask": stored}
        text = model_inputs(model, latents, times, batch, slice(0, 3), [3])["encoder_hidden_states"]
        assert torch.equal(text[:, :2], embeds[:, :2]) and not text[:, 2:].any()
    poisoned = embeds.masked_fill(~mask[..., None], float("nan"))
    batch = {"prompt_embeds": poisoned, "prompt_attention_mask": mask}
    assert model_inputs(model, latents, times, batch, slice(0, 3), [3])["encoder_hidden_states"].isfinite().all()


def test_an_empty_caption_is_the_empty_prompt(pipelines: Path, videos: Path, tmp_path: Path) -> None:
    (videos / "0.txt").write_text(" \n")
    encode(pipelines / "sana_wm", videos, tmp_path / "shards", "--captions")
    data = VideoLatents(shards=tmp_path / "shards")
    plain = data[0]["prompt_embeds"]
    data.prompt_dropout = 1.0
    assert torch.equal(data[0]["prompt_embeds"], plain)


@pytest.mark.parametrize("host", HOSTS)
def test_prompts_of_another_pipeline_or_of_an_earlier_encoding_are_refused(
    host: str, pipelines: Path, videos: Path, tmp_path: Path
) -> None:
    other = HOSTS[(HOSTS.index(host) + 1) % 3]
    model = swap(DiffusionPipeline.from_pretrained(pipelines / host).transformer)
    encode(pipelines / host, videos, tmp_path / "own", "--captions")
    encode(pipelines / other, videos, tmp_path / "other", "--captions")
    data = VideoLatents(shards=tmp_path / "own")
    check_data(model, data.shapes, data.prompts)
    others = VideoLatents(shards=tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"reads prompts as \w+ gives them; those of the data were made by \w+Pipeline"
    ):
        check_data(model, others.shapes, others.prompts)

    fields = {name: torch.zeros(shape) for name, shape in data.shapes.items()}
    earlier = tmp_path / "earlier" / "a-0123456789abcdef.safetensors"
    write_shard(earlier, {f"a.mp4/000000.{name}": tensor for name, tensor in fields.items()}, data.codec)
    strip_format(earlier)
    old = VideoLatents(shards=tmp_path / "earlier")
    with pytest.raises(ValueError, match=r"were made by an earlier training\.encode: run training\.encode again"):
        check_data(model, old.shapes, old.prompts)
    earlier.rename(tmp_path / "earlier" / "elsewhere.safetensors")
    elsewhere = VideoLatents(shards=tmp_path / "earlier")
    check_data(model, elsewhere.shapes, elsewhere.prompts)


def strip_format(shard: Path) -> None:
    """Make a shard look as the first version wrote it."""
    from safetensors.torch import load_file, save_file

    with safe_open(shard, "pt") as file:
        codec = file.metadata()["codec"]
    save_file(load_file(shard), shard, {"codec": codec})


def test_a_folder_of_videos_becomes_shards_that_training_reads(pipelines: Path, videos: Path, tmp_path: Path) -> None:
    assert len(encode(pipelines / "wan", videos, tmp_path / "shards", "--storage_dtype=float32")) == 3
    data = VideoLatents(shards=tmp_path / "shards")
    assert data.names == [f"{number}.mp4/{start:06d}" for number in range(3) for start in (0, 9)]
    assert data.latent_shape == (4, 3, 8, 8) and set(data.shapes) == {"latents"} and data.prompts is None
    video = read_video(videos / "0.mp4", 64, 64)[9:18]
    codec = VaeCodec(str(pipelines / "wan"), subfolder="vae")
    torch.testing.assert_close(data[1]["latents"], codec.encode(video))
    assert load_codec(data.codec).decode(data[1]["latents"]).shape == video.shape


def test_the_text_encoder_alone_is_loaded_and_gone_before_the_vae(
    pipelines: Path, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoders: list[weakref.ref[nn.Module]] = []
    real_call, real_init = TextEncoder.__call__, VaeCodec.__init__

    def call(self: TextEncoder, prompt: str) -> dict[str, Tensor]:
        result = real_call(self, prompt)
        encoders.append(weakref.ref(self.pipeline.text_encoder))
        assert type(self.pipeline.text_encoder) is UMT5EncoderModel
        assert self.pipeline.vae is None and self.pipeline.transformer is None
        return result

    def init(self: VaeCodec, *arguments: Any, **options: Any) -> None:
        gc.collect()
        assert encoders and all(encoder() is None for encoder in encoders)
        real_init(self, *arguments, **options)

    monkeypatch.setattr(TextEncoder, "__call__", call)
    monkeypatch.setattr(VaeCodec, "__init__", init)
    encode(pipelines / "wan", videos, tmp_path / "shards", "--captions")
    assert len(encoders) == len(PROMPTS) + 1  # and the empty one
    assert not (tmp_path / "shards" / ".prompts").exists()
    # A second run, also one over a renamed folder of videos, loads nothing.
    videos.rename(tmp_path / "renamed")
    monkeypatch.setattr(TextEncoder, "__call__", None)
    monkeypatch.setattr(VaeCodec, "__init__", None)
    assert len(encode(pipelines / "wan", tmp_path / "renamed", tmp_path / "shards", "--captions")) == 3


def test_a_model_is_known_by_its_weights_not_by_its_folder(
    pipelines: Path, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(pipelines / "wan", tmp_path / "model")
    first = encode(tmp_path / "model", videos, tmp_path / "shards", "--captions")
    (tmp_path / "model").rename(tmp_path / "moved")
    assert encode(tmp_path / "moved", videos, tmp_path / "shards", "--captions") == first
    for part in ("vae", "text_encoder"):
        torch.manual_seed(1)
        getattr(tiny_wan(), part).save_pretrained(tmp_path / "moved" / part)
        again = encode(tmp_path / "moved", videos, tmp_path / "shards", "--captions")
        assert not set(again) & set(first)
        first = again
    assert len(VideoLatents(shards=tmp_path / "shards")) == 6


def test_an_interrupted_encoding_of_prompts_goes_on(
    pipelines: Path, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = TextEncoder.__call__, []

    def call(self: TextEncoder, prompt: str) -> dict[str, Tensor]:
        calls.append(prompt)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, prompt)

    monkeypatch.setattr(TextEncoder, "__call__", call)
    with pytest.raises(KeyboardInterrupt):
        encode(pipelines / "wan", videos, tmp_path / "shards", "--captions")
    with pytest.raises(ValueError, match="no clip in the 0"):
        VideoLatents(shards=tmp_path / "shards")
    assert len(encode(pipelines / "wan", videos, tmp_path / "shards", "--captions")) == 3
    assert len(calls) == 2 + len(PROMPTS)  # the first one was kept


def test_a_clip_size_that_does_not_fit_is_refused_before_a_model_is_loaded(
    pipelines: Path, videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TextEncoder, "__init__", None)
    monkeypatch.setattr(VaeCodec, "__init__", None)
    with pytest.raises(ValueError, match=r"num_frames must be 1 \+ 4·k, got 10"):
        encode(pipelines / "wan", videos, tmp_path / "shards", "--captions", "--num_frames=10")
    with pytest.raises(ValueError, match="multiples of 32, got 48"):
        encode(pipelines / "sana_wm", videos, tmp_path / "shards", "--captions", "--height=48")


@pytest.fixture
def broken(pipelines: Path, tmp_path: Path) -> Path:
    return shutil.copytree(pipelines / "wan", tmp_path / "broken")


def change_index(folder: Path, **entries: Any) -> None:
    path = folder / "model_index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def another_pipeline(folder: Path) -> None:
    change_index(folder, _class_name="StableDiffusionPipeline")


def code_in_the_folder(folder: Path) -> None:
    change_index(folder, text_encoder=["my_encoder", "MyEncoder"])
    (folder / "text_encoder" / "my_encoder.py").write_text("raise SystemExit('code was run')")


def an_unknown_class(folder: Path) -> None:
    change_index(folder, text_encoder=["transformers", "NoSuchModel"])


def no_json(folder: Path) -> None:
    (folder / "model_index.json").write_text("{")


def weights_missing(folder: Path) -> None:
    (folder / "text_encoder" / "model.safetensors").unlink()


def weights_cut_short(folder: Path) -> None:
    path = folder / "text_encoder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def weights_incomplete(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    save_file({name: tensor for name, tensor in weights.items() if "block.1" not in name}, path, {"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    shutil.rmtree(folder / "tokenizer")
    (folder / "tokenizer").mkdir()


def a_list(folder: Path) -> None:
    (folder / "text_encoder" / "config.json").write_text("[]")


def change_json(path: str, **entries: Any) -> Any:
    def damage(folder: Path) -> None:
        config = json.loads((folder / path).read_text())
        (folder / path).write_text(json.dumps({**config, **entries}))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (a_list, "text_encoder/config.json must hold a JSON object, got a list"),
        (change_json("text_encoder/config.json", d_model="x"), "text_encoder cannot be loaded"),
        (change_json("text_encoder/config.json", d_model=16), "text_encoder cannot be loaded"),
        (another_pipeline, "is of a StableDiffusionPipeline, whose prompts are not made here"),
        (code_in_the_folder, "text_encoder cannot be loaded: it is of my_encoder, not of transformers"),
        (an_unknown_class, "text_encoder cannot be loaded: .*NoSuchModel"),
        (no_json, "does not say what encodes its prompts"),
        (weights_missing, "text_encoder cannot be loaded"),
        (weights_cut_short, "text_encoder cannot be loaded"),
        (weights_incomplete, "its text encoder lacks weights, such as encoder.block.1"),
        (no_tokenizer, "tokenizer.* holds no weights|tokenizer cannot be loaded"),
    ],
)
def test_a_model_whose_prompts_cannot_be_made_is_named(
    damage: Any, message: str, broken: Path, videos: Path, tmp_path: Path
) -> None:
    damage(broken)
    with pytest.raises(ValueError, match=message):
        encode(broken, videos, tmp_path / "shards", "--captions")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "NoSuchVae"}, "vae holds no VAE that can be built: .*NoSuchVae"),
        ({"_class_name": None}, "vae holds no VAE that can be built"),
        ({"z_dim": "x"}, "vae holds no VAE that can be built"),
        ({"z_dim": 8}, "vae: no AutoencoderKLWan can be read from its safetensors"),
    ],
)
def test_a_vae_that_cannot_be_used_is_named(
    config: dict[str, Any], message: str, broken: Path, videos: Path, tmp_path: Path
) -> None:
    change_json("vae/config.json", **config)(broken)
    with pytest.raises(ValueError, match=message):
        encode(broken, videos, tmp_path / "shards")


def test_a_folder_without_an_index_is_wans_where_its_text_encoder_is(broken: Path, pipelines: Path) -> None:
    (broken / "model_index.json").unlink()
    ours, wans = (TextEncoder(str(folder), max_length=16)("a rabbit") for folder in (broken, pipelines / "wan"))
    assert torch.equal(ours["prompt_embeds"], wans["prompt_embeds"]) and ours["prompt_embeds"].shape == (16, 8)
    shutil.rmtree(broken / "text_encoder")
    Gemma2Model(tiny_gemma_config(8)).save_pretrained(broken / "text_encoder")
    with pytest.raises(ValueError, match=r"a Gemma2Model without the pipeline's model_index\.json"):
        TextEncoder(str(broken))


def test_what_is_neither_a_folder_nor_a_model_of_the_hub_is_named(videos: Path, tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", "nobody/has-this-model"):
        with pytest.raises(ValueError, match=f"{name} is no folder, and no model of the hub"):
            encode(name, videos, tmp_path / "shards")
    with pytest.raises(ValueError, match="holds no VAE"):
        encode(tmp_path, videos, tmp_path / "shards")
