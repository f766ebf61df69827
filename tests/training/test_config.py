"""Options: the command line overrides the YAML, and nothing that is misspelt or of the wrong type passes."""

from pathlib import Path

import pytest
import yaml

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
        ({"model": [1]}, "model must be of type mapping"),
        ([1], "must hold a mapping"),
    ],
)
def test_mistakes_in_a_yaml_are_errors(tmp_path: Path, values: object, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match=message):
        parse("--config", str(path))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_configurations_hold_options_that_exist(path: Path) -> None:
    config = parse_config(["--config", str(path)], {"model": VideoDiT, "data": VideoLatents})
    assert config.model["chunk_frames"] and config.cp_size == 2
