"""The options of train.py: typed dataclasses, read from a YAML and overridden on the command line.

Names are those of diffusers' example scripts wherever they have one. Options are flat, so `--learning_rate 1e-4` and a
YAML's `learning_rate: 1e-4` are the same thing; `model:`, `swap:` and `data:` are mappings whose keys are the
arguments of what they are handed to (`--model.num_layers 8` on the command line). A key that nobody knows is an error.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml


def option(default: Any, help: str) -> Any:
    """A dataclass field with a line of help; mutable defaults are copied for every instance."""
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(kw_only=True)
class ObjectiveConfig:
    """What a step asks of the model: noise levels, prediction and loss (`training/objective.py`)."""

    prediction_type: Literal["velocity", "sample"] = option("velocity", "the model predicts noise - clip, or the clip")
    weighting_scheme: Literal["logit_normal", "mode", "none"] = option("logit_normal", "how noise levels are drawn")
    logit_mean: float = option(0.0, "logit_normal: the level is sigmoid(logit_std * n + logit_mean) for a normal n")
    logit_std: float = option(1.0, "logit_normal: see logit_mean")
    mode_scale: float = option(1.29, "mode: its scale, as in the SD3 paper")
    flow_shift: float = option(1.0, "moves noise levels towards 1, here and in the saved scheduler; 1: not at all")
    clean_prefix_probability: float = option(0.5, "share of samples whose first chunks stay at level 0")


@dataclass(kw_only=True)
class OptimizationConfig:
    """How weights move."""

    train_batch_size: int = option(1, "clips a step on each data-parallel rank (a context-parallel group is one rank)")
    gradient_accumulation_steps: int = option(1, "micro-batches summed before a step of the optimizer")
    num_train_epochs: int = option(100, "passes over the data, where max_train_steps is not given")
    max_train_steps: int | None = option(None, "steps of the optimizer; overrides num_train_epochs")
    learning_rate: float = option(1e-4, "after warmup")
    lr_scheduler: str = option("constant", "a name that diffusers.optimization.get_scheduler knows")
    lr_warmup_steps: int = option(0, "steps over which the learning rate rises from 0")
    lr_num_cycles: int = option(1, "restarts of cosine_with_restarts")
    lr_power: float = option(1.0, "power of the polynomial scheduler")
    adam_beta1: float = option(0.9, "")
    adam_beta2: float = option(0.999, "")
    adam_weight_decay: float = option(1e-2, "")
    adam_epsilon: float = option(1e-8, "")
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: not at all")
    use_ema: bool = option(False, "keep an exponential moving average of the weights, and save and validate with it")
    ema_decay: float = option(0.9999, "its largest decay")
    train_gates_only: bool = option(False, "train nothing but GDN's gates")
    lora_rank: int | None = option(None, "train a LoRA of the self-attentions' projections, and GDN's gates")


@dataclass(kw_only=True)
class RunConfig:
    """Where things go and how they are computed."""

    output_dir: str = option("runs/train", "checkpoints, metrics.jsonl, logs and the trained model")
    seed: int = option(0, "of weights, order of the data, augmentation and noise")
    cp_size: int = option(1, "ranks that share the frames of one clip; the other ranks are data parallel")
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(None, "null: what accelerate was launched with")
    weight_dtype: Literal["float32", "float64"] = option("float32", "of weights and clips; float64: exactness tests")
    gradient_checkpointing: bool = option(False, "recompute blocks in the backward pass instead of storing them")
    allow_tf32: bool = option(False, "TF32 matrix products on GPUs that have them")
    dataloader_num_workers: int = option(0, "processes that load data beside each rank")
    report_to: str = option("tensorboard", "accelerate's name of a tracker, or none; metrics.jsonl is written anyway")
    logging_dir: str = option("logs", "of the tracker, below output_dir")
    checkpointing_steps: int = option(500, "a checkpoint every so many steps, and one at the end")
    checkpoints_total_limit: int | None = option(None, "older checkpoints are deleted")
    resume_from_checkpoint: str | None = option(None, "latest, or the name or path of a checkpoint-{step} folder")
    validation_steps: int | None = option(None, "roll out a clip every so many steps and log its psnr")
    validation_inference_steps: int = option(20, "denoising steps a chunk in validation")


@dataclass(kw_only=True)
class TrainConfig(ObjectiveConfig, OptimizationConfig, RunConfig):
    """Every option of train.py."""

    pretrained_model_name_or_path: str | None = option(
        None,
        "a folder (or hub name) whose transformer is trained further: a VideoDiT, its configuration overridden by "
        "`model`, or a transformer of diffusers, into which GDN is swapped as `swap` says",
    )
    model: dict[str, Any] = option({}, "arguments of VideoDiT")
    swap: dict[str, Any] = option({}, "arguments of frame_gdn.swap")
    data: dict[str, Any] = option({}, "arguments of training.data.VideoLatents")

    def __post_init__(self) -> None:
        counts = "train_batch_size gradient_accumulation_steps cp_size checkpointing_steps num_train_epochs"
        optional_counts = "max_train_steps validation_steps checkpoints_total_limit lora_rank"
        for name in f"{counts} {optional_counts}".split():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.train_gates_only and self.lora_rank:
            raise ValueError("train_gates_only and lora_rank exclude each other: a LoRA is trained with the gates")
        if self.swap and not self.pretrained_model_name_or_path:
            raise ValueError("swap is for the transformer of a pretrained_model_name_or_path, which is not given")

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))


def parse_config(
    argv: Sequence[str] | None = None, sections: Mapping[str, Callable[..., Any]] = types.MappingProxyType({})
) -> TrainConfig:
    """Read `--config FILE` and the options that override it.

    Args:
        argv: the command line without the program's name; None: that of this process.
        sections: for each mapping (`model`, `swap`, `data`) the class or function whose arguments its keys must be.

    Raises:
        ValueError: an option or key that does not exist (the nearest one is suggested), or a value of the wrong type.
    """
    parser = argparse.ArgumentParser(
        description="Train a video diffusion transformer.", allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--config", help="YAML file of these options")
    for f in fields(TrainConfig):
        if f.type != "dict[str, Any]":
            flag = {"nargs": "?", "const": "true"} if f.type == "bool" else {}
            parser.add_argument(f"--{f.name}", help=f"{f.metadata['help']} (default: {f.default})".strip(), **flag)
    flags, rest = parser.parse_known_args(argv)
    given = vars(flags)
    dotted = [f"{section}.{key}" for section, target in sections.items() for key in arguments_of(target)]
    hints = typing.get_type_hints(TrainConfig)
    nested = _nested_flags(rest, [*hints, *dotted])

    values = _read_yaml(given.pop("config")) if "config" in given else {}
    values.update(given)
    for section, overrides in nested.items():
        values[section] = {**(values.get(section) or {}), **overrides}

    _check_names(values, hints, "option", [*hints, *dotted])
    config = TrainConfig(**{name: _convert(name, value, hints[name]) for name, value in values.items()})
    for section, target in sections.items():
        _check_names(getattr(config, section), arguments_of(target), f"key of `{section}:`")
    return config


def arguments_of(target: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a class or function takes."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(target).parameters.values() if p.kind in named]


def _read_yaml(path: str) -> dict[str, Any]:
    values = yaml.safe_load(Path(path).read_text())
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a mapping of options, got {type(values).__name__}")
    return values


def _nested_flags(rest: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`--model.num_layers 8` or `--model.num_layers=8` to {"model": {"num_layers": 8}}; `names` are all there are."""
    nested: dict[str, dict[str, Any]] = {}
    words = list(rest)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--"):
            raise ValueError(f"unexpected {flag!r} on the command line: options start with --")
        name = flag.removeprefix("--")
        _check_names([name], [name for name in names if "." in name], "option", names)
        section, _, key = name.partition(".")
        if not equals:
            if not words:
                raise ValueError(f"{flag} needs a value")
            value = words.pop(0)
        nested.setdefault(section, {})[key] = yaml.safe_load(value)
    return nested


def _check_names(
    names: Iterable[str], known: Iterable[str], what: str, suggestions: Iterable[str] | None = None
) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            (nearest,) = difflib.get_close_matches(str(name), suggestions or known, n=1, cutoff=0.0)
            raise ValueError(f"unknown {what} {name!r}; did you mean {nearest!r}?")


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` (a command line's text or what YAML made of it) as the type `hint`, or a ValueError."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None or value in ("null", "None"):
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
    wanted = getattr(hint, "__name__", str(hint))
    if typing.get_origin(hint) is Literal:
        value = "no" if value is False else value  # YAML 1.1 reads a bare no as false
        if value not in typing.get_args(hint):
            raise ValueError(f"{name} must be one of {', '.join(typing.get_args(hint))}, got {value!r}")
        return value
    if typing.get_origin(hint) is dict:
        hint, wanted = dict, "mapping"
        value = {} if value is None else value
    if hint is bool and value in ("true", "false"):
        return value == "true"
    if hint is int and isinstance(value, str) or hint is float and isinstance(value, (str, int)) and value is not True:
        try:
            return hint(value)  # YAML 1.1 leaves 1e-4 a string
        except ValueError:
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be of type {wanted}, got {value!r}")
    return value
