"""What `swap` was asked for, in the configuration of the model: saved with it, loaded with it, gone with `unswap`."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import wraps
from typing import Any

from diffusers.configuration_utils import FrozenDict
from torch import nn

from . import CONFIG_ENTRIES, EARLIER_ENTRY, SwapOptions, Swapped


class ConfiguredModel(Swapped):
    """A swapped model whose configuration holds the options of `swap` that change what it computes, by their names but
    for `gdn_blocks`, which are the `blocks`: diffusers returns an entry for the attribute of its name, which `blocks`
    is of the modules.

    `save_pretrained` and `from_pretrained` of this class keep them. diffusers' own class says that it ignores them,
    and keeps them in its configuration, where a `swap` finds them again. A pipeline notes a component's class when it
    is assigned: say `pipe.transformer = swap(pipe.transformer)`, and its `from_pretrained` finds this class.
    """

    _internal_dict: FrozenDict

    def to_json_string(self) -> str:
        """The configuration as it is saved: without options at their default, of which a stock class would warn."""
        saved = json.loads(super().to_json_string())  # type: ignore[misc]
        default = {entry: getattr(SwapOptions, option) for entry, option in CONFIG_ENTRIES.items()}
        kept = {key: value for key, value in saved.items() if key not in default or value != default[key]}
        return json.dumps(kept, indent=2, sort_keys=True) + "\n"

    def release(self) -> list[str]:
        dropped = super().release()
        write(self, {})
        return dropped


def present(model: Any) -> SwapOptions:
    """The options of a model, swapped or not; ValueError where its configuration holds what `swap` does not take."""
    means = {name: getattr(model, name) for name in ("backend", "attention")} if isinstance(model, Swapped) else {}
    return read(model.config, **means)


def read(config: Mapping[str, Any], **means: Any) -> SwapOptions:
    """The options that a configuration holds, beside those of how to compute it, which are in none; ValueError for
    what `swap` does not take."""
    entries = {entry: config.get(entry) for entry in CONFIG_ENTRIES}
    options = {CONFIG_ENTRIES[entry]: value for entry, value in entries.items() if value is not None}
    earlier = config.get(EARLIER_ENTRY)
    if earlier is not None:
        known = [field.name for field in fields(SwapOptions)]
        if not isinstance(earlier, Mapping) or not set(earlier) <= set(known):
            raise ValueError(f"config.{EARLIER_ENTRY} must be a mapping of {', '.join(known)}, got {earlier!r}")
        options = {**options, **{name: value for name, value in earlier.items() if name in CONFIG_ENTRIES.values()}}
    return SwapOptions(**options, **means)


def write(model: Any, entries: Mapping[str, Any]) -> None:
    """Put the entries of `CONFIG_ENTRIES` that a host has into the model's configuration, in place of all it held."""
    others = {key: v for key, v in model._internal_dict.items() if key not in (*CONFIG_ENTRIES, EARLIER_ENTRY)}
    model._internal_dict = FrozenDict({**others, **entries})


def swapping_init(
    host_init: Callable[..., None], replace: Callable[[nn.Module, SwapOptions], None], *entries: str
) -> Callable[..., None]:
    """The `__init__` of a thin subclass of a host: the host's own, then `replace` by the entries of its configuration.

    diffusers reads the signature to tell what of a configuration belongs to a class: it is the host's and the entries.
    """
    names = (*entries, EARLIER_ENTRY)

    @wraps(host_init)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        options = read({name: kwargs.pop(name) for name in names if name in kwargs})
        host_init(self, *args, **kwargs)
        replace(self, options)

    signature = inspect.signature(host_init)
    mine = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
    init.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *mine]
    )
    return init
