"""What a checkpoint holds of a run, as safetensors and JSON: reading a file can never run code.

| file | of |
| --- | --- |
| `model.safetensors`, `optimizer.safetensors`, `average.safetensors` | the whole model, where each rank has it |
| `sharded/*.safetensors` | the model and optimizer under FSDP, each rank's part, by torch's distributed checkpoint |
| `random_states_{rank}.json` | each rank's generators of random numbers |
| `state.json` | all numbers that are no tensor |

accelerate's own `save_state` writes pickles, and its `load_state` runs what they contain.
"""

from __future__ import annotations

import base64
import json
import os
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from accelerate import Accelerator
from accelerate.utils import DistributedType
from diffusers.training_utils import EMAModel
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer


class RunState:
    """Weights, optimizer, average, loss scale and random numbers of a run. `save` and `load` are called on all ranks.

    Args:
        model: bare, without what accelerate wraps it in.
        optimizer: bare too. Its options are the run's own, and are neither saved nor loaded.
        average: of the weights, of all parameters in the model's order.

    Attributes:
        steps_of_schedule: steps that the learning rate's schedule has taken, which the training loop counts.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, average: EMAModel | None
    ) -> None:
        self.accelerator, self.model, self.optimizer, self.average = accelerator, model, optimizer, average
        self.steps_of_schedule = 0
        self.is_sharded = accelerator.distributed_type == DistributedType.FSDP

    def save(self, folder: Path) -> None:
        """Write this rank's files into a folder that exists, and flush them to the disk.

        Raises:
            FloatingPointError: a weight that is not finite, before anything is written.
            OSError: the disk is full, or the like.
        """
        self._refuse_broken_weights()
        try:
            self._write(folder)
        except SafetensorError as error:
            raise OSError(f"{folder} cannot be written: {error}") from error

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            ValueError: naming the file that is missing, cannot be read or belongs to another model or optimizer.
        """
        state = read_json(folder / "state.json")
        self._compare_groups(state.get("parameters"), folder)
        if self.is_sharded:
            self._load_sharded(folder / "sharded")
        else:
            path = folder / "model.safetensors"
            try:
                load_model(self.model, str(path))
            except (OSError, RuntimeError, SafetensorError) as error:
                raise ValueError(f"{path} does not hold this model's weights: {error}") from error
            self._load_optimizer(folder / "optimizer.safetensors")
        try:
            self.steps_of_schedule = int(state["steps_of_schedule"])
            if self.average is not None:
                self.average.optimization_step = int(state["steps_of_average"])
            if self.accelerator.scaler is not None and "loss_scale" in state:
                self.accelerator.scaler.load_state_dict(state["loss_scale"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / 'state.json'} lacks or garbles {error}") from error
        if self.average is not None:
            shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
            averages = read_tensors(folder / "average.safetensors", shapes)
            for shadow, name in zip(self.average.shadow_params, shapes, strict=True):
                shadow.copy_(averages[name])
        path = folder / f"random_states_{self.accelerator.process_index}.json"
        try:
            set_random_states(read_json(path))
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} does not hold the states of random generators: {error}") from error

    def _write(self, folder: Path) -> None:
        rank = self.accelerator.process_index
        write_json(folder / f"random_states_{rank}.json", random_states())
        if self.is_sharded:
            # In safetensors each file describes itself, so there is no index, which torch would pickle.
            writer = dcp.HuggingFaceStorageWriter(str(folder / "sharded"), save_distributed=True)
            dcp.save(self._sharded_tensors(), storage_writer=writer)
        if not self.accelerator.is_main_process:
            return
        if not self.is_sharded:
            save_model(self.model, str(folder / "model.safetensors"))
            flush(folder / "model.safetensors")
            write_tensors(folder / "optimizer.safetensors", self._optimizer_tensors())
        state: dict[str, Any] = {"steps_of_schedule": self.steps_of_schedule, "parameters": self._names_by_group()}
        if self.average is not None:
            names = (name for name, _ in self.model.named_parameters())
            write_tensors(folder / "average.safetensors", dict(zip(names, self.average.shadow_params, strict=True)))
            state["steps_of_average"] = self.average.optimization_step
        if self.accelerator.scaler is not None:
            state["loss_scale"] = self.accelerator.scaler.state_dict()
        write_json(folder / "state.json", state)

    # --- tensors by name --------------------------------------------------------------------------------------------

    def _refuse_broken_weights(self) -> None:
        local = {name: _local(parameter) for name, parameter in self.model.named_parameters()}
        is_finite = torch.stack([tensor.isfinite().all() for tensor in local.values()]).tolist()
        broken = [name for name, finite in zip(local, is_finite, strict=True) if not finite]
        if broken:
            raise FloatingPointError(f"{len(broken)} weights are not finite and not saved, {broken[0]} the first")

    def _names_by_group(self) -> list[list[str]]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return [[names[parameter] for parameter in group["params"]] for group in self.optimizer.param_groups]

    def _compare_groups(self, saved: Any, folder: Path) -> None:
        current = self._names_by_group()
        if saved == current:
            return
        before, now = ({name for group in groups or [] for name in group} for groups in (saved, current))
        changed = sorted(before ^ now) or ["the groups in which weights decay"]
        raise ValueError(
            f"{folder}: its optimizer moves other parameters than this run's, or in other groups: {changed[0]}"
            + (f" and {len(changed) - 1} more" if len(changed) > 1 else "")
        )

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            f"{names[parameter]}.{key}": value
            for parameter, values in self.optimizer.state.items()
            for key, value in values.items()
        }

    def _load_optimizer(self, path: Path) -> None:
        tensors = read_tensors(path)
        groups = self.optimizer.state_dict()["param_groups"]
        index_of = {
            name: index
            for names, group in zip(self._names_by_group(), groups, strict=True)
            for name, index in zip(names, group["params"], strict=True)
        }
        shapes = {name: parameter.shape for name, parameter in self.model.named_parameters()}
        state: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            name, _, field = key.rpartition(".")
            if name not in index_of or tensor.shape not in (shapes[name], ()):
                raise ValueError(
                    f"{path}: {key} of shape {tuple(tensor.shape)} belongs to no parameter that is trained"
                )
            state.setdefault(index_of[name], {})[field] = tensor
        if len({frozenset(fields) for fields in state.values()}) > 1:
            raise ValueError(f"{path} holds more of some parameters than of others")
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _sharded_tensors(self) -> dict[str, Tensor]:
        """Of model and optimizer, by name; what of them this rank holds."""
        model: dict[str, Tensor] = get_model_state_dict(self.model)
        optimizer: dict[str, Any] = get_optimizer_state_dict(self.model, self.optimizer)["state"]
        moments = {f"optimizer.{name}.{key}": x for name, values in optimizer.items() for key, x in values.items()}
        return {**{f"model.{name}": tensor for name, tensor in model.items()}, **moments}

    def _load_sharded(self, folder: Path) -> None:
        tensors = self._sharded_tensors()
        try:
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
        except (OSError, RuntimeError, SafetensorError, KeyError, dcp.CheckpointException) as error:
            raise ValueError(f"{folder} does not hold this run's weights and optimizer: {error}") from error
        model, state = {}, {}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            if kind == "model":
                model[name] = tensor
            else:
                name, _, field = name.rpartition(".")
                state.setdefault(name, {})[field] = tensor
        set_model_state_dict(self.model, model)
        groups = get_optimizer_state_dict(self.model, self.optimizer)["param_groups"]
        set_optimizer_state_dict(self.model, self.optimizer, {"state": state, "param_groups": groups})


def random_states() -> dict[str, Any]:
    """The states of all generators of random numbers that this process has, for JSON."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [np.asarray(keys).tolist(), position, has_gauss, gauss],
        "torch": _as_text(torch.get_rng_state()),
        "cuda": [_as_text(state) for state in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def set_random_states(states: dict[str, Any]) -> None:
    version, keys, gauss = states["python"]
    random.setstate((version, tuple(keys), gauss))
    keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(_as_tensor(states["torch"]))
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_as_tensor(state) for state in states["cuda"]])


def _as_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _as_tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- files ----------------------------------------------------------------------------------------------------------


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))
    flush(path)


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError naming a file that is missing or holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    flush(path)


def read_tensors(path: Path, shapes: dict[str, torch.Size] | None = None) -> dict[str, Tensor]:
    """Raises ValueError naming a file that is missing, is no safetensors or, where `shapes` are given, lacks one."""
    try:
        tensors = load_file(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    for name, shape in (shapes or {}).items():
        if name not in tensors or tensors[name].shape != shape:
            raise ValueError(f"{path} lacks {name} of shape {tuple(shape)}")
    return tensors


def flush(*paths: Path) -> None:
    """Wait until files or folders are on the disk, so that they outlive a loss of power."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """`flush` of all files and folders below `folder`, and itself."""
    flush(*_tree(folder))


def _tree(folder: Path) -> Iterable[Path]:
    yield from folder.rglob("*")
    yield folder
