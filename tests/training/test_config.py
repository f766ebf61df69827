"""Options: the command line overrides the YAML, and nothing that is misspelt or of the wrong type passes."""

import math
import typing
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from diffusers.optimization import get_scheduler

from models import VideoDiT
from training.config import TrainConfig, parse_config
from training.data import VideoLatents

CONFIGS = Path(__file__).parents[2] / "configs"


class Model:
    def __init__(self, num_layers: int = 2, hidden_size: int = 32) -> None: ...


def parse(*argv: str) -> TrainConfig:
    return parse_config(argv, {"model": Model})


@pytest.fixture
def yaml_file(tmp_path: Path) -> str:
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 1e-3\nmixed_precision: no\nseed: 3\nuse_ema: true\nmodel: {num_layers: 4}\n")
    return str(path)


def test_command_line_overrides_yaml_and_yaml_overrides_defaults(yaml_file: str) -> None:
    config = parse("--config", yaml_file, "--seed", "5", "--model.hidden_size", "64", "--logit_mean=-0.4")
    assert (config.seed, config.learning_rate, config.logit_mean) == (5, 1e-3, -0.4)
    assert config.use_ema and config.mixed_precision == "no" and config.lr_scheduler == TrainConfig().lr_scheduler
    assert config.model == {"num_layers": 4, "hidden_size": 64}
    assert TrainConfig().model == {}


@pytest.mark.parametrize("argv, expected", [(["--use_ema"], True), (["--use_ema", "false"], False)])
def test_booleans_are_flags_that_may_carry_a_value(argv: list[str], expected: bool) -> None:
    assert parse(*argv).use_ema is expected


def test_null_unsets_an_optional_value() -> None:
    assert parse("--max_train_steps", "3").max_train_steps == 3
    assert parse("--max_train_steps", "null").max_train_steps is None


def test_saved_options_read_back_the_same(tmp_path: Path, yaml_file: str) -> None:
    config = parse("--config", yaml_file)
    config.save(tmp_path / "saved.yaml")
    assert parse("--config", str(tmp_path / "saved.yaml")) == config


@pytest.mark.parametrize(
    "argv, message",
    [
        (["--learning_rat", "1e-4"], "'learning_rat'.*'learning_rate'"),
        (["--model.hiden_size=3"], "'model.hiden_size'.*'model.hidden_size'"),
        (["--modl.num_layers", "3"], "'modl.num_layers'.*'model.num_layers'"),
        (["--num_layers", "3"], "'num_layers'.*'model.num_layers'"),
        (["stray"], "'stray'"),
        (["--seed", "x"], "seed must be of type int, got 'x'"),
        (["--seed", "1.5"], "seed must be of type int"),
        (["--use_ema", "maybe"], "use_ema must be of type bool"),
        (["--prediction_type", "clean"], "velocity, sample"),
        (["--cp_size", "0"], "cp_size must be at least 1"),
        (["--model.num_layers"], "needs a value"),
        (["--model.num_layers", "["], "is not a value of YAML"),
        (["--lr_scheduler", "piecewise_constant"], "lr_scheduler must be one of constant, .*polynomial"),
    ],
)
def test_mistakes_on_the_command_line_are_errors(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*argv)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"lerning_rate": 1}, "'lerning_rate'.*'learning_rate'"),
        ({"model": {"layers": 1}}, "'layers'.*'num_layers'"),
        ({"hidden_size": 1}, "'hidden_size'.*'model.hidden_size'"),
        ({"learning_rate": True}, "learning_rate must be of type float"),
        ({"seed": True}, "seed must be of type int"),
        ({"model": [1]}, "model must be a mapping"),
        ([1], "must hold a mapping"),
    ],
)
def test_mistakes_in_a_yaml_are_errors(tmp_path: Path, values: object, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=message):
        parse("--config", str(path))


def test_every_number_has_a_range_and_nothing_passes_beside_it() -> None:
    """From the command line and from Python alike: just outside each end, NaN and infinity."""
    for f in fields(TrainConfig):
        numbers, hint = f.metadata["numbers"], str(f.type)
        if not hint.startswith(("int", "float")):
            continue
        outside = [math.nan, math.inf, -math.inf] if hint.startswith("float") else []
        step = 1e-6 if hint.startswith("float") else 1
        outside += [end for end in (numbers.above, numbers.below) if end is not None]
        outside += [] if numbers.at_least is None else [numbers.at_least - step]
        outside += [] if numbers.at_most is None else [numbers.at_most + step]
        assert outside, f"{f.name}: any integer passes"
        for value in outside:
            with pytest.raises(ValueError, match=f"{f.name} must be (at |above|below|finite).*, got {value}"):
                TrainConfig(**{f.name: value})
            with pytest.raises(ValueError, match=f"{f.name} must be (at |above|below|finite).*, got {value}"):
                parse(f"--{f.name}={value}")
        for value in {numbers.at_least, numbers.at_most} - {None}:
            assert getattr(TrainConfig(**{f.name: type(step)(value)}), f.name) == value


@pytest.mark.parametrize("values", [{"learning_rate": "x"}, {"seed": None}, {"model": {1: 2}}, {"output_dir": ""}])
def test_values_given_in_python_are_checked_as_those_of_a_command_line(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        TrainConfig(**values)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"seed: 1\nseed: 2\n", "'seed' is given twice"),
        (b"model: {num_layers: 1, num_layers: 2}\n", "'num_layers' is given twice"),
        (b"seed: [1\n", "cannot be read"),
        (b"output_dir: \xff\n", "cannot be read"),
        (None, "cannot be read.*No such file"),
    ],
)
def test_a_file_that_is_no_yaml_is_named(tmp_path: Path, text: bytes | None, message: str) -> None:
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ValueError, match=f"run.yaml.*{message}"):
        parse("--config", str(path))


def test_every_learning_rate_scheduler_exists() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    for name in typing.get_args(typing.get_type_hints(TrainConfig)["lr_scheduler"]):
        get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=3)


def test_a_resumed_run_names_what_changed_and_what_must_not() -> None:
    saved = TrainConfig(data={"shards": "a"}, learning_rate=1e-3).described()
    now = TrainConfig(data={"shards": "b"}, prediction_type="sample", output_dir="elsewhere", model={"num_layers": 3})
    fixed, applied = now.changes(saved)
    assert fixed == ["prediction_type 'sample' instead of 'velocity'"]
    assert applied == ["learning_rate 0.0001 instead of 0.001", "data {'shards': 'b'} instead of {'shards': 'a'}"]
    assert now.changes(now.described()) == ([], [])


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_hold_options_that_exist(path: Path) -> None:
    config = parse_config(["--config", str(path)], {"model": VideoDiT, "data": VideoLatents})
    assert config.model["chunk_frames"] and config.cp_size == 2
