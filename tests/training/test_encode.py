import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, T5Config, T5Model

from tests.training.test_latents import tiny_wan_vae
from training.data import VideoLatents, demo_clips
from training.encode import main
from training.latents import VaeCodec, load_codec
from training.video import read_video, write_video

WORDS = ("<pad>", "</s>", "<unk>", "a", "rabbit", "on", "grass")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A video VAE, a text encoder and a tokenizer of diffusers' layout, tiny and random."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    tiny_wan_vae().save_pretrained(folder / "vae")
    config = T5Config(vocab_size=len(WORDS), d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    T5Model(config).save_pretrained(folder / "text_encoder")
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>").save_pretrained(
        folder / "tokenizer"
    )
    return folder


@pytest.fixture
def arguments(checkpoint, tmp_path):
    videos = tmp_path / "videos"
    for name in ("a.mp4", "b.mp4"):
        write_video(videos / name, read_video(demo_clips()[0], 32, 32, num_frames=20), fps=8)
    (videos / "a.txt").write_text("a rabbit on grass\n")
    options = {"height": 32, "width": 32, "num_frames": 9, "storage_dtype": "float32", "max_sequence_length": 6}
    options |= {"pretrained_model_name_or_path": checkpoint, "videos": videos, "output_dir": tmp_path / "shards"}
    return [f"--{name}={value}" for name, value in options.items()]


def test_a_folder_of_videos_becomes_shards_that_training_reads(checkpoint, arguments, tmp_path):
    assert len(main(arguments)) == 2
    data = VideoLatents(shards=tmp_path / "shards")
    assert data.names == ["a.mp4/000000", "a.mp4/000009", "b.mp4/000000", "b.mp4/000009"]
    assert data.latent_shape == (16, 3, 4, 4) and set(data.shapes) == {"latents"}
    video = read_video(tmp_path / "videos" / "a.mp4", 32, 32)[9:18]
    torch.testing.assert_close(data[1]["latents"], VaeCodec(str(checkpoint), subfolder="vae").encode(video))
    assert load_codec(data.codec).decode(data[1]["latents"]).shape == video.shape


def test_captions_become_prompts_and_a_video_without_one_is_skipped(checkpoint, arguments, tmp_path, caplog):
    assert len(main([*arguments, "--captions"])) == 1
    assert "b.mp4: its caption cannot be read" in caplog.text
    data = VideoLatents(shards=tmp_path / "shards", prompt_dropout=1.0)
    assert data.shapes["prompt_embeds"] == (6, 8)
    assert not data[0]["prompt_attention_mask"].any()  # the empty prompt of this tokenizer is padding alone
    data.prompt_dropout = 0.0
    assert data[0]["prompt_attention_mask"].tolist() == [True] * 4 + [False] * 2

    tokenizer = AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    encoder = T5Model.from_pretrained(checkpoint / "text_encoder").get_encoder().eval()
    with torch.no_grad():
        expected = encoder(**tokenizer("a rabbit on grass", return_tensors="pt", return_token_type_ids=False))
    torch.testing.assert_close(data[0]["prompt_embeds"][:4], expected.last_hidden_state[0])
