"""The options of train.py: typed dataclasses, read from a YAML and overridden on the command line.

Names are those of diffusers' example scripts wherever they have one. Options are flat, so `--learning_rate 1e-4` and a
YAML's `learning_rate: 1e-4` are the same thing; `model:`, `swap:` and `data:` are mappings whose keys are the
arguments of what they are for (`--model.num_layers 8` on the command line). An unknown key is an error, and
so is a value outside its option's range; the range is written beside its default.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import inspect
import json
import math
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

import yaml


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes; an end that is None is open. NaN and infinity are in no range."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            -math.inf < value < math.inf
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        ends = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {end}" for word, end in ends.items() if end is not None) or "finite"


LARGEST_INT = 2**32
"""Above all whole numbers that an option takes."""

COUNT = Range(at_least=1)
NOT_NEGATIVE = Range(at_least=0)
SHARE = Range(at_least=0, at_most=1)


def option(default: Any, help: str, numbers: Range | None = None, *, fixed: bool = False) -> Any:
    """A dataclass field with a line of help; mutable defaults are copied for every instance.

    Args:
        numbers: the range of an option that is a number; without one, any finite number.
        fixed: a resumed run must have the value of the run it resumes. Other options take effect from there on.
    """
    metadata = {"help": help, "numbers": numbers or Range(), "fixed": fixed}
    if isinstance(default, dict):
        return field(default_factory=lambda: dict(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(kw_only=True)
class ObjectiveConfig:
    """What a step asks of the model: noise levels, prediction and loss (`training/objective.py`)."""

    prediction_type: Literal["velocity", "sample"] = option(
        "velocity", "the model predicts noise - clip, or the clip", fixed=True
    )
    weighting_scheme: Literal["logit_normal", "mode", "none"] = option("logit_normal", "how noise levels are drawn")
    logit_mean: float = option(0.0, "logit_normal: the level is sigmoid(logit_std * n + logit_mean) for a normal n")
    logit_std: float = option(1.0, "logit_normal: see logit_mean", NOT_NEGATIVE)
    # Beyond these ends levels leave [0, 1] (Esser et al. 2024, section 3.1).
    mode_scale: float = option(1.29, "mode: its scale, as in the SD3 paper", Range(at_least=-1, at_most=1.75))
    flow_shift: float = option(
        1.0, "moves noise levels towards 1, here and in the saved scheduler; 1: not at all", Range(above=0)
    )
    clean_prefix_probability: float = option(0.5, "share of samples whose first chunks stay at level 0", SHARE)


@dataclass(kw_only=True)
class OptimizationConfig:
    """How weights move."""

    train_batch_size: int = option(
        1, "clips a step on each data-parallel rank (a context-parallel group is one rank)", COUNT
    )
    gradient_accumulation_steps: int = option(1, "micro-batches summed before a step of the optimizer", COUNT)
    num_train_epochs: int = option(100, "passes over the data, where max_train_steps is not given", COUNT)
    max_train_steps: int | None = option(None, "steps of the optimizer; overrides num_train_epochs", COUNT)
    learning_rate: float = option(1e-4, "after warmup", NOT_NEGATIVE)
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = option("constant", "how the learning rate changes, as diffusers.optimization.get_scheduler has it")
    lr_warmup_steps: int = option(0, "steps over which the learning rate rises from 0", NOT_NEGATIVE)
    lr_num_cycles: int = option(1, "restarts of cosine_with_restarts", COUNT)
    lr_power: float = option(1.0, "power of the polynomial scheduler", Range(above=0))
    adam_beta1: float = option(0.9, "decay of AdamW's mean of gradients", Range(at_least=0, below=1))
    adam_beta2: float = option(0.999, "decay of its mean of squared gradients", Range(at_least=0, below=1))
    adam_weight_decay: float = option(
        1e-2, "of matrices and kernels; norms, biases, A_log and dt_bias have none", NOT_NEGATIVE
    )
    adam_epsilon: float = option(1e-8, "added to the root of the mean of squares", Range(above=0))
    max_grad_norm: float = option(1.0, "gradients are clipped to this norm; 0: not at all", NOT_NEGATIVE)
    use_ema: bool = option(
        False, "keep an exponential moving average of the weights, and save and validate with it", fixed=True
    )
    ema_decay: float = option(0.9999, "its largest decay", SHARE)
    train_gates_only: bool = option(False, "train nothing but GDN's gates", fixed=True)
    lora_rank: int | None = option(
        None, "train a LoRA of the self-attentions' projections, and GDN's gates", COUNT, fixed=True
    )


@dataclass(kw_only=True)
class RunConfig:
    """Where things go and how they are computed."""

    output_dir: str = option("runs/train", "checkpoints, metrics.jsonl, logs and the trained model")
    # numpy takes no larger seed.
    seed: int = option(
        0, "of weights, order of the data, augmentation and noise", Range(at_least=0, below=2**32), fixed=True
    )
    cp_size: int = option(1, "ranks that share the frames of one clip; the other ranks are data parallel", COUNT)
    mixed_precision: Literal["no", "fp16", "bf16"] | None = option(None, "null: what accelerate was launched with")
    weight_dtype: Literal["float32", "float64"] = option(
        "float32", "of weights and clips; float64: exactness tests", fixed=True
    )
    gradient_checkpointing: bool = option(False, "recompute blocks in the backward pass instead of storing them")
    compile: bool = option(False, "torch.compile of each block, one graph for all lengths; needs cp_size 1")
    allow_tf32: bool = option(False, "TF32 matrix products on GPUs that have them")
    dataloader_num_workers: int = option(
        0, "processes that load data beside each rank", Range(at_least=0, at_most=256)
    )
    report_to: str = option("tensorboard", "accelerate's name of a tracker, or none; metrics.jsonl is written anyway")
    logging_dir: str = option("logs", "of the tracker, below output_dir")
    checkpointing_steps: int = option(500, "a checkpoint every so many steps, and one at the end", COUNT)
    checkpoints_total_limit: int | None = option(None, "older checkpoints are deleted", COUNT)
    resume_from_checkpoint: str | None = option(None, "latest, or the name or path of a checkpoint-{step} folder")
    collective_timeout: int = option(
        600, "seconds after which a rank gives up waiting for another in a collective; the error names both", COUNT
    )
    validation_steps: int | None = option(None, "roll out a clip every so many steps and log its psnr", COUNT)
    validation_inference_steps: int = option(20, "denoising steps a chunk in validation", COUNT)


@dataclass(kw_only=True)
class TrainConfig(ObjectiveConfig, OptimizationConfig, RunConfig):
    """Every option of train.py.

    Raises:
        ValueError: a value of the wrong type or outside its option's range, or options that exclude each other.
    """

    pretrained_model_name_or_path: str | None = option(
        None,
        "a folder (or hub name) whose transformer is trained further: a VideoDiT, its configuration overridden by "
        "`model`, or a transformer of diffusers, into which GDN is swapped as `swap` says",
        fixed=True,
    )
    model: dict[str, Any] = option({}, "arguments of VideoDiT")
    swap: dict[str, Any] = option({}, "arguments of frame_gdn.swap", fixed=True)
    data: dict[str, Any] = option({}, "arguments of training.data.VideoLatents")

    def __post_init__(self) -> None:
        hints = _hints()
        for f in fields(self):
            value = _convert(f.name, getattr(self, f.name), hints[f.name])
            numbers = f.metadata["numbers"]
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value not in numbers:
                wanted = numbers if -math.inf < value < math.inf else Range()
                raise ValueError(f"{f.name} must be {wanted}, got {value}")
            if hints[f.name] in (int, int | None) and value is not None and value >= LARGEST_INT:
                raise ValueError(f"{f.name} must be below {LARGEST_INT}, got {value}")
            if value == "":
                raise ValueError(f"{f.name} must not be empty")
            setattr(self, f.name, value)
        if self.train_gates_only and self.lora_rank:
            raise ValueError("train_gates_only and lora_rank exclude each other: a LoRA is trained with the gates")
        if self.compile and self.cp_size > 1:
            raise ValueError(f"compile needs whole clips on a rank, cp_size 1, got cp_size {self.cp_size}")
        if self.swap and not self.pretrained_model_name_or_path:
            raise ValueError("swap is for the transformer of a pretrained_model_name_or_path, which is not given")

    def save(self, path: Path) -> None:
        path.write_text(yaml.safe_dump(asdict(self), sort_keys=False))

    def described(self) -> dict[str, Any]:
        """All options as JSON has them."""
        return {f.name: _as_json(getattr(self, f.name)) for f in fields(self)}

    def changes(self, saved: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """What differs from the options of a run that this one resumes, in words.

        `model` is left out: what counts of it is the model that it makes.

        Args:
            saved: that run's `described()`; an option that it lacks was at its default.

        Returns:
            The differences in options that must stay as they were, and those that take effect from here on.
        """
        ignored = ("model", "output_dir", "logging_dir", "resume_from_checkpoint")
        fixed, applied = [], []
        for f in fields(self):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            before, now = saved.get(f.name, default), _as_json(getattr(self, f.name))
            if f.name not in ignored and before != now:
                (fixed if f.metadata["fixed"] else applied).append(f"{f.name} {now!r} instead of {before!r}")
        return fixed, applied


def parse_config(
    argv: Sequence[str] | None = None, sections: Mapping[str, Callable[..., Any]] = types.MappingProxyType({})
) -> TrainConfig:
    """Read `--config FILE` and the options that override it.

    Args:
        argv: the command line without the program's name; None: that of this process.
        sections: for each mapping (`model`, `swap`, `data`) the class or function whose arguments its keys must be.

    Raises:
        ValueError: an option or key that does not exist (the nearest one is suggested), a value of the wrong type or
            outside its range, or a file that cannot be read as YAML.
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
    hints = _hints()
    nested = _nested_flags(rest, [*hints, *dotted])

    values = _read_yaml(given.pop("config")) if "config" in given else {}
    values.update(given)
    for section, overrides in nested.items():
        values[section] = {**_convert(section, values.get(section), hints[section]), **overrides}

    _check_names(values, hints, "option", [*hints, *dotted])
    config = TrainConfig(**values)
    for section, target in sections.items():
        _check_names(getattr(config, section), arguments_of(target), f"key of `{section}:`")
    return config


def arguments_of(target: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a class or function takes."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(target).parameters.values() if p.kind in named]


class _StrictLoader(yaml.SafeLoader):
    """YAML in which each key occurs once, as the standard requires; PyYAML would take the last one silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), _StrictLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {' '.join(str(error).split())}") from error
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
        try:
            nested.setdefault(section, {})[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"{flag} {value!r} is not a value of YAML") from error
    return nested


def _check_names(
    names: Iterable[str], known: Iterable[str], what: str, suggestions: Iterable[str] | None = None
) -> None:
    known = list(known)
    for name in names:
        if name not in known:
            (nearest,) = difflib.get_close_matches(str(name), suggestions or known, n=1, cutoff=0.0)
            raise ValueError(f"unknown {what} {name!r}; did you mean {nearest!r}?")


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


@functools.cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` (a command line's text or what YAML made of it) as the type `hint`, or a ValueError."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None or value in ("null", "None"):
            return None
        (hint,) = (h for h in typing.get_args(hint) if h is not type(None))
    if typing.get_origin(hint) is Literal:
        value = "no" if value is False else value  # YAML 1.1 reads a bare no as false
        if value not in typing.get_args(hint):
            raise ValueError(f"{name} must be one of {', '.join(typing.get_args(hint))}, got {value!r}")
        return value
    if typing.get_origin(hint) is dict:
        value = {} if value is None else value
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{name} must be a mapping from names, got {value!r}")
        return value
    if hint is bool and value in ("true", "false"):
        return value == "true"
    is_number = isinstance(value, (int, str)) and not isinstance(value, bool)
    if (hint is int and isinstance(value, str)) or (hint is float and is_number):
        try:
            return hint(value)  # YAML 1.1 leaves 1e-4 a string
        except (ValueError, OverflowError):
            pass
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ValueError(f"{name} must be of type {hint.__name__}, got {value!r}")
    return value
