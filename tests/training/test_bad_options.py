"""Every option of every command line, as a flag and as a key of a YAML file, refuses what it cannot use, by name."""

import dataclasses
import importlib.util
import math
import sys
import types
import typing
from pathlib import Path
from typing import Any

import pytest
import yaml

from frame_gdn.hosts import SwapOptions
from models import VideoDiT
from training import encode
from training.config import TrainConfig, parse_config
from training.data import VideoLatents

ROOT = Path(__file__).parents[2]
SECTIONS = {"model": VideoDiT, "swap": SwapOptions, "data": VideoLatents}
OPTIONS = [f.name for f in dataclasses.fields(TrainConfig)]

# By an option's type: what YAML makes of a file that is no such value.
NOT_INT = ["x", "", "1e", 1.5, -7, True, [1], {"a": 1}, math.nan, math.inf, 10**30]
NOT_FLOAT = ["x", "", "1e", True, [1.0], {"a": 1}, math.nan, math.inf, -math.inf, "nan", 10**400]
NOT_BOOL = ["maybe", "yes", "", 2, 0.0, [True], {}]
NOT_TEXT = ["", 3, 1.5, True, ["x"], {"a": 1}]
NOT_A_CHOICE = ["x", "", 3, 1.5, True, ["x"], {"a": 1}]
NOT_A_MAPPING = ["x", 3, True, [1], {1: 2}, {None: 1}]
WRONG = {int: NOT_INT, float: NOT_FLOAT, bool: NOT_BOOL, str: NOT_TEXT, dict: NOT_A_MAPPING}
WRONG_TEXTS = {
    int: ["x", "", "1.5", "-7", "nan", "True", "[1]", str(10**30)],
    float: ["x", "", "nan", "inf", "-inf", "[1]"],
    bool: ["maybe", "2", "[]"],
    str: [""],
    typing.Literal: ["x", "", "1"],
}


def kind_of(name: str) -> tuple[Any, bool]:
    """An option's type, and whether it may be null."""
    hint = typing.get_type_hints(TrainConfig)[name]
    optional = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if optional:
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
    return typing.get_origin(hint) or hint, optional


def wrong_values(name: str) -> list[Any]:
    kind, optional = kind_of(name)
    values = NOT_A_CHOICE if kind is typing.Literal else WRONG[kind]
    return values if optional or kind is dict else [*values, None]


def parse(*argv: str) -> TrainConfig:
    return parse_config(list(argv), SECTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_value_in_a_yaml_file_is_an_error_that_names_the_option(name: str, tmp_path: Path) -> None:
    for value in wrong_values(name):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({name: value}))
        with pytest.raises(ValueError) as error:
            parse("--config", str(tmp_path / "run.yaml"))
            pytest.fail(f"{name}: {value!r} was taken")
        message = str(error.value)
        assert name in message and (repr(value) in message or str(value) in message or value == ""), message


@pytest.mark.parametrize("name", [name for name in OPTIONS if kind_of(name)[0] is not dict])
def test_a_wrong_value_on_the_command_line_is_an_error_that_names_the_option(name: str) -> None:
    kind, _ = kind_of(name)
    texts = {
        int: ["x", "", "1.5", "-7", "nan", "True", "[1]", str(10**30)],
        float: ["x", "", "nan", "inf", "-inf", "[1]"],
    }
    texts |= {bool: ["maybe", "2", "[]"], str: [""], typing.Literal: ["x", "", "1"]}
    for text in texts[kind]:
        with pytest.raises(ValueError, match=name):
            parse(f"--{name}={text}")
            pytest.fail(f"--{name}={text} was taken")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_misspelt_option_is_an_error_that_names_the_right_one(name: str, tmp_path: Path) -> None:
    misspelt = name[:-1] + "q"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({misspelt: 1}))
    nearest = name if name != "adam_beta1" else "adam_beta2"
    with pytest.raises(ValueError, match=f"unknown option '{misspelt}'; did you mean '{nearest}'"):
        parse("--config", str(tmp_path / "run.yaml"))
    with pytest.raises(ValueError, match=misspelt):
        parse(f"--{misspelt}", "1")


FILES: dict[str, tuple[bytes | None, str]] = {
    "no such file": (None, "run.yaml cannot be read: .*No such file"),
    "empty": (b"", "run.yaml must hold a mapping of options, got NoneType"),
    "a comment": (b"# nothing", "run.yaml must hold a mapping of options, got NoneType"),
    "a list": (b"[1, 2]", "run.yaml must hold a mapping of options, got list"),
    "a text": (b"hello", "run.yaml must hold a mapping of options, got str"),
    "a number": (b"3", "run.yaml must hold a mapping of options, got int"),
    "two documents": (b"seed: 1\n---\nseed: 2\n", "run.yaml cannot be read: .*document"),
    "no YAML": (b"seed: [1", "run.yaml cannot be read"),
    "a tab": (b"model:\n\tnum_layers: 1", "run.yaml cannot be read"),
    "binary": (bytes(range(256)), "run.yaml cannot be read"),
    "UTF-16": ("seed: 1".encode("utf-16"), "run.yaml"),
    "Latin-1": ("output_dir: é".encode("latin-1"), "run.yaml cannot be read"),
    "a key twice": (b"seed: 1\nseed: 2", "run.yaml cannot be read: 'seed' is given twice"),
    "a nested key twice": (b"model: {num_layers: 1, num_layers: 2}", "'num_layers' is given twice"),
    "an object": (b"seed: !!python/object/apply:os.getcwd []", "run.yaml cannot be read"),
    "an unhashable key": (b"? [1]\n: 2", "run.yaml"),
    "a number as key": (b"1: 2", "unknown option 1"),
    "a misspelt key of a section": (
        b"model: {num_layer: 1}",
        "`model:` 'num_layer'; did you mean 'num_layers'",
    ),
    "a key of another section": (b"data: {num_layers: 1}", "unknown key of `data:` 'num_layers'"),
    "a key of no section": (b"swap: {window: 3}\npretrained_model_name_or_path: x", "unknown key of `swap:` 'window'"),
    "swap without a model": (b"swap: {chunk_frames: 3}", "swap is for the transformer"),
    "two that exclude each other": (b"lora_rank: 2\ntrain_gates_only: true", "exclude each other"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_wrong_yaml_file_is_an_error_that_names_it(kind: str, tmp_path: Path) -> None:
    content, message = FILES[kind]
    if content is not None:
        (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        parse("--config", str(tmp_path / "run.yaml"))


def test_a_folder_in_place_of_a_yaml_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{tmp_path} cannot be read: .*[Dd]irectory"):
        parse("--config", str(tmp_path))


# --- the other command lines ----------------------------------------------------------------------------------------

COUNTS = ["0", "-1", "1.5", "x", "", "nan", "True"]
ENCODE = {
    **dict.fromkeys(("height", "width", "num_frames", "stride", "max_sequence_length"), COUNTS),
    "fps": ["0", "-1", "nan", "inf", "x", ""],
    **dict.fromkeys(("dtype", "storage_dtype"), ["float64", "x", "", "3"]),
}


@pytest.mark.parametrize("flag", ENCODE)
def test_a_wrong_flag_of_encode_is_argparses_error(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ENCODE[flag]:
        with pytest.raises(SystemExit, match="2"):
            encode.main(["--pretrained_model_name_or_path=x", "--videos=x", "--output_dir=x", f"--{flag}={text}"])
        assert f"argument --{flag}: " in (error := capsys.readouterr().err) and repr(text) in error


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "the following arguments are required: --pretrained_model_name_or_path, --videos, --output_dir"),
        (["--heigth=3"], "unrecognized arguments: --heigth=3"),
        (["stray"], "unrecognized arguments: stray"),
        (["--height"], "argument --height: expected one argument"),
    ],
)
def test_a_misspelt_flag_of_encode_is_argparses_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    required = ["--pretrained_model_name_or_path=x", "--videos=x", "--output_dir=x"] if words else []
    with pytest.raises(SystemExit, match="2"):
        encode.main([*required, *words])
    assert message in capsys.readouterr().err


def example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name, words, message",
    [
        ("swap_sana_wm", [], "one of the arguments --tiny --model is required"),
        ("swap_sana_wm", ["--tiny", "--model", "x"], "not allowed with argument"),
        ("swap_sana_wm", ["--tiny", "--num_frames", "0"], "--num_frames must be at least 1, got 0"),
        ("swap_sana_wm", ["--tiny", "--height", "-1"], "--height must be at least 1, got -1"),
        ("swap_sana_wm", ["--tiny", "--width", "x"], "argument --width: invalid int value: 'x'"),
        ("swap_sana_wm", ["--model", "/nothing"], "--model /nothing holds no SanaWMTransformer3DModel"),
        ("finetune_sana_video", [], "one of the arguments --tiny --model is required"),
        ("finetune_sana_video", ["--model", "x"], "--model needs --shards"),
    ],
)
def test_a_wrong_flag_of_an_example_is_argparses_error(
    name: str, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "swap_sana_wm":
        pytest.importorskip("diffusers", minversion="0.42")
    monkeypatch.setattr(sys, "argv", [name, *words])
    with pytest.raises(SystemExit, match="2"):
        example(name).main()
    assert message in capsys.readouterr().err
