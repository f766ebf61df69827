"""rollout.py: from a folder as train.py saves it to a film; whatever is wrong with what it is given is one line."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import rollout
from tests.test_rollout import tiny_pipeline
from training.latents import HaarCodec
from training.video import VideoWriter, read_video, write_video

ROOT = Path(__file__).parents[1]
CHUNK = 4 * 2  # video frames a chunk of two latent frames


def save_as_train_does(folder: Path, **config: Any) -> None:
    sizes = {"in_channels": 192, "out_channels": 192, "cross_attention_dim": None}
    tiny_pipeline("sample", **{**sizes, **config}).save_pretrained(folder)
    (folder / "codec.json").write_text(json.dumps(HaarCodec().describe()))
    (folder / "config.yaml").write_text("data: {videos: demo, height: 16, width: 24, fps: null}\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What train.py saved as `model`, and clip.mp4 of nine frames."""
    save_as_train_does(tmp_path / "model")
    clip = torch.randint(0, 256, (1, 4, 6, 1), dtype=torch.uint8).repeat_interleave(8, 1).repeat_interleave(8, 2)
    write_video(tmp_path / "clip.mp4", clip.expand(9, -1, -1, 3), fps=12)  # grey: H.264 halves colours' resolution
    return tmp_path


def arguments(folder: Path, **options: Any) -> list[str]:
    paths = {"model": folder / "model", "first_frames": folder / "clip.mp4", "output": folder / "film.mp4"}
    options = {**paths, "num_chunks": 3, "num_inference_steps": 1, **options}
    return [part for name, value in options.items() for part in (f"--{name}", str(value))]


def test_it_continues_a_video_into_a_film(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rollout.command_line(arguments(folder))
    assert "film.mp4: 29 frames, 2.4 s" in capsys.readouterr().out
    film = read_video(folder / "film.mp4", 16, 24)
    assert len(film) == 5 + 3 * CHUNK
    given = read_video(folder / "clip.mp4", 16, 24, num_frames=5)
    assert (film[:5].float() - given.float()).abs().mean() < 8  # written and read through H.264


def test_the_film_is_what_decoding_all_latents_at_once_gives(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[torch.Tensor] = []
    monkeypatch.setattr(VideoWriter, "write", lambda self, video: written.append(video))
    rollout.command_line(arguments(folder))
    pipeline, codec = rollout.load_model(folder / "model", torch.device("cpu"))
    first = codec.encode(read_video(folder / "clip.mp4", 16, 24, num_frames=5))[None]
    latents = pipeline(first, 3, 1, torch.Generator().manual_seed(0)).latents
    assert [len(video) for video in written] == [5, CHUNK, CHUNK, CHUNK]
    assert torch.equal(torch.cat(written), codec.decode(torch.cat([first, latents], 2)[0]))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("while_writing", [False, True])
def test_an_interrupted_rollout_leaves_a_playable_film_of_what_it_has(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
    while_writing: bool,
) -> None:
    write, frames = VideoWriter.write, []

    def interrupted(self: VideoWriter, video: torch.Tensor) -> None:
        frames.append(len(video))
        if len(frames) == 2 and while_writing:
            signal.raise_signal(number)
        write(self, video)

    def decode_stream(self: HaarCodec, chunks: Any) -> Any:
        for count, _ in enumerate(chunks):
            if count == 2 and not while_writing:
                signal.raise_signal(number)
            yield torch.zeros(5 if count == 0 else CHUNK, 16, 24, 3, dtype=torch.uint8)

    monkeypatch.setattr(VideoWriter, "write", interrupted)
    monkeypatch.setattr(HaarCodec, "decode_stream", decode_stream)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as end:
        rollout.command_line(arguments(folder))
    assert end.value.code == code
    assert f"interrupted: {folder / 'film.mp4'} holds {5 + CHUNK} frames" in capsys.readouterr().err
    assert len(read_video(folder / "film.mp4", 16, 24)) == 5 + CHUNK
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_a_process_that_is_terminated_leaves_a_playable_film_and_no_traceback(folder: Path) -> None:
    command = [sys.executable, "rollout.py", *arguments(folder, num_chunks=100000)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    film, size = folder / "film.mp4", 0
    while process.poll() is None and size < 20_000:
        size = film.stat().st_size if film.exists() else 0
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors and "interrupted" in errors
    assert len(read_video(film, 16, 24)) > 5


@pytest.mark.parametrize("suffix", ["mp4", "mov", "mkv", "avi"])
def test_a_film_whose_writer_is_killed_is_playable(tmp_path: Path, suffix: str) -> None:
    film = tmp_path / f"film.{suffix}"
    video = torch.randint(0, 256, (40, 64, 64, 3), dtype=torch.uint8)
    child = os.fork()
    if child == 0:
        writer = VideoWriter(film, fps=20)
        writer.write(video)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert 40 - 10 - 1 <= len(read_video(film, 64, 64)) <= 40  # half a second may be lost


# --- what it refuses: options, what is done to the folder first, words of the error ---------------------------------

Change = Callable[[Path], Any]


def nothing(folder: Path) -> None:
    pass


def write(name: str, content: str | bytes) -> Change:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data)


def truncate(name: str) -> Change:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def text_file(**tensors: torch.Tensor) -> Change:
    return lambda folder: save_file(tensors, folder / "text.safetensors")


def text_model(folder: Path) -> None:
    save_as_train_does(folder / "model", cross_attention_dim=6)
    save_file({"prompt_embeds": torch.zeros(4, 5)}, folder / "text.safetensors")


WEIGHTS = "model/transformer/diffusion_pytorch_model.safetensors"
TEXT = {"prompt_embeds": "text.safetensors"}

BAD_FILES: dict[str, tuple[dict[str, Any], Change, str]] = {
    "no such model": ({"model": "nothing"}, nothing, "no model_index.json in .*nothing"),
    "the model is a file": ({"model": "clip.mp4"}, nothing, "no model_index.json in .*clip.mp4"),
    "no codec": ({}, lambda folder: (folder / "model/codec.json").unlink(), "no codec.json in .*model"),
    "no transformer": ({}, lambda folder: (folder / WEIGHTS).unlink(), "model: the model cannot be loaded"),
    "weights cut off": ({}, truncate(WEIGHTS), "model: the model cannot be loaded"),
    "weights empty": ({}, write(WEIGHTS, ""), "model: the model cannot be loaded"),
    "weights binary": ({}, write(WEIGHTS, bytes(range(256))), "model: the model cannot be loaded"),
    "index no JSON": ({}, write("model/model_index.json", "{"), "model: the model cannot be loaded"),
    "index empty": ({}, write("model/model_index.json", ""), "model: the model cannot be loaded"),
    "index a list": ({}, write("model/model_index.json", "[]"), "model: the model cannot be loaded"),
    "config no JSON": ({}, write("model/transformer/config.json", "no"), "model: the model cannot be loaded"),
    "config empty": ({}, write("model/transformer/config.json", "{}"), "model: the model cannot be loaded"),
    "codec no JSON": ({}, write("model/codec.json", "{"), "codec.json: not JSON"),
    "codec a list": ({}, write("model/codec.json", "[1]"), r"codec.json must hold a JSON object, got \[1\]"),
    "codec binary": ({}, write("model/codec.json", b"\xff\xfe\x00"), "codec.json: not JSON"),
    "codec unknown": ({}, write("model/codec.json", '{"kind": "dct"}'), "kind 'haar' or 'vae', got .*dct"),
    "codec NaN": ({}, write("model/codec.json", '{"kind": "haar", "scale": NaN}'), "scale .*nan"),
    "codec's scale a text": ({}, write("model/codec.json", '{"kind": "haar", "scale": "1"}'), "scale .*'1'"),
    "other codec": ({}, lambda folder: save_as_train_does(folder / "model", in_channels=16), "192 .* takes 16"),
    "options no YAML": ({}, write("model/config.yaml", "a: [1"), "config.yaml: not YAML"),
    "options binary": ({}, write("model/config.yaml", b"\xff\xfe\x00\x80"), "config.yaml: not YAML"),
    "options a list": ({}, write("model/config.yaml", "[1]"), r"config.yaml must hold .* got \[1\]"),
    "options empty": ({}, write("model/config.yaml", ""), "config.yaml must hold .* got None"),
    "options without data": ({}, write("model/config.yaml", "seed: 1"), "config.yaml must hold .* got {'seed': 1}"),
    "options without size": ({}, write("model/config.yaml", "data: {}"), "give --height and --width"),
    "a size of text": ({}, write("model/config.yaml", "data: {height: tall, width: 24}"), "height .*'tall'"),
    "no size": ({}, lambda folder: (folder / "model/config.yaml").unlink(), "give --height and --width"),
    "no such video": ({"first_frames": "none.mp4"}, nothing, "none.mp4: cannot be read .*No such file"),
    "the video is a folder": ({"first_frames": "model"}, nothing, "model: cannot be read"),
    "the video is empty": ({}, write("clip.mp4", ""), "clip.mp4: cannot be read"),
    "the video is a text": ({}, write("clip.mp4", "hello"), "clip.mp4: cannot be read"),
    "the video is cut off": ({}, truncate("clip.mp4"), "clip.mp4: "),
    "the video is too short": ({"num_first_chunks": 9}, nothing, "clip.mp4: 9 frames, wanted 69"),
    "the video is slow": ({"fps": 100}, nothing, "clip.mp4: 12 frames a second, slower than the 100"),
    "height of no codec": ({"height": 18}, nothing, "multiples of 4, got 18 × 24"),
    "height of no patch": ({"height": 20, "width": 20}, nothing, "multiples of patch_size 2"),
    "no such text": (TEXT, nothing, "--prompt_embeds .*text.safetensors.*No such file"),
    "the text is a folder": ({"prompt_embeds": "model"}, nothing, "--prompt_embeds .*model"),
    "the text is empty": (TEXT, write("text.safetensors", ""), "--prompt_embeds .*text.safetensors"),
    "the text is a text": (TEXT, write("text.safetensors", "a dog" * 9), "--prompt_embeds .*text.safetensors"),
    "the text has other names": (TEXT, text_file(embeds=torch.zeros(4, 6)), r"must hold .* got \['embeds'\]"),
    "the text has no embeds": (TEXT, text_file(prompt_attention_mask=torch.ones(4)), "must hold .* got"),
    "the model reads no text": (TEXT, text_file(prompt_embeds=torch.zeros(4, 6)), "cross_attention_dim is None"),
    "the model reads a text": ({}, text_model, "prompt_embeds is None"),
    "a text of another width": (TEXT, text_model, r"\(1, L, 6\) .* got a tensor \(1, 4, 5\)"),
    "the film has no suffix": ({"output": "film"}, nothing, "film's name must end in .*mp4.* got ''"),
    "the film is a picture": ({"output": "film.png"}, nothing, "film's name must end in .* got '.png'"),
    "the film cannot hold H.264": ({"output": "film.webm"}, nothing, "film's name must end in .* got '.webm'"),
    "the film is a folder": ({"output": "x.mp4"}, lambda folder: (folder / "x.mp4").mkdir(), "x.mp4 is a folder"),
    "the film is the input": ({"output": "clip.mp4"}, nothing, "clip.mp4 is --first_frames"),
    "the film is a link to the input": (
        {"output": "link.mp4"},
        lambda folder: (folder / "link.mp4").symlink_to("clip.mp4"),
        "link.mp4 is --first_frames",
    ),
    "the film is in a file": ({"output": "clip.mp4/film.mp4"}, nothing, "clip.mp4 is a file, no folder"),
    "no such device": ({"device": "cudaa"}, nothing, "--device 'cudaa' cannot be used"),
    "a device that is not there": ({"device": "cuda:77"}, nothing, "--device 'cuda:77' cannot be used"),
    "a device without data": ({"device": "meta"}, nothing, "--device 'meta' cannot be used"),
    "more steps than levels": ({"num_inference_steps": 1001}, nothing, "an int from 1 to 1000, got 1001"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_wrong_file_is_one_line_that_names_it_before_anything_is_generated(
    folder: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, change, message = BAD_FILES[case]
    change(folder)
    paths = ("model", "first_frames", "prompt_embeds", "output")
    options = {name: folder / value if name in paths else value for name, value in options.items()}
    monkeypatch.setattr(rollout.FrameGDNRolloutPipeline, "_denoise", lambda *_: pytest.fail("it generates"))
    with pytest.raises(SystemExit) as end:
        rollout.command_line(arguments(folder, **options))
    assert isinstance(end.value.code, str) and "\n" not in end.value.code
    assert end.value.code.startswith("rollout.py: ")
    assert re.search(message, end.value.code), end.value.code
    assert not (folder / "film.mp4").exists()


NOT_COUNTS = ["0", "-1", "1.5", "x", "", "nan", "True", "2147483648", "99999999999999999999"]
BAD_FLAGS = {
    **dict.fromkeys(("num_chunks", "num_first_chunks", "num_inference_steps", "height", "width"), NOT_COUNTS),
    "seed": ["-1", "1.5", "x", "", "9223372036854775808"],
    "fps": ["0", "-1", "nan", "inf", "x", "", "1e400"],
}


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_a_wrong_flag_is_argparses_error_that_names_it(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in BAD_FLAGS[flag]:
        with pytest.raises(SystemExit) as end:
            rollout.command_line([*arguments(Path("x")), f"--{flag}={value}"])
        assert end.value.code == 2
        assert f"argument --{flag}: must be" in (error := capsys.readouterr().err) and repr(value) in error


@pytest.mark.parametrize(
    "words, message",
    [
        (["--num_chunk", "3"], "unrecognized arguments: --num_chunk"),
        (["--seed"], "argument --seed: expected one argument"),
        (["film.mp4"], "unrecognized arguments: film.mp4"),
    ],
)
def test_a_misspelt_flag_is_argparses_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        rollout.command_line([*arguments(Path("x")), *words])
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        rollout.command_line(["--model", "x"])
    assert "the following arguments are required: --first_frames, --num_chunks, --output" in capsys.readouterr().err
