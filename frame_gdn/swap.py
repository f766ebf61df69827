"""`swap` and `unswap`: frame-wise GDN into a diffusers transformer, and out of it again."""

import enum
import warnings
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import Final, TypeVar

from torch import nn
from torch.distributed import ProcessGroup

from . import hosts
from .parallelize import cp_group, parallelize

Model = TypeVar("Model", bound=nn.Module)


class Keep(enum.Enum):
    """The type of `KEEP`, the default of every option of `swap`: what the model has already."""

    KEEP = "keep"

    def __repr__(self) -> str:
        return self.name


KEEP: Final = Keep.KEEP


def swap(
    model: Model,
    *,
    blocks: Sequence[int] | None | Keep = KEEP,
    start_scale: float | None | Keep = KEEP,
    chunk_frames: int | None | Keep = KEEP,
    first_chunk_frames: int | None | Keep = KEEP,
    merge_tail: bool | Keep = KEEP,
    softmax_window: int | None | Keep = KEEP,
    softmax_sink: bool | Keep = KEEP,
    camera_conv_past: bool | Keep = KEEP,
    camera_rescale: bool | Keep = KEEP,
    softmax_scale: float | None | Keep = KEEP,
    group: ProcessGroup | None | Keep = KEEP,
    backend: str | Keep = KEEP,
    attention: str | Keep = KEEP,
) -> Model:
    """Put frame-wise GDN in place of the attention of a diffusers transformer, in place; returns the model.

    No `state_dict` key is renamed or dropped; keys are added only for gates that the host lacks. Called again, it
    changes the options that are named and keeps the rest; a block that is swapped stays so. Swap first, then compile,
    offload or wrap.

    What changes what the model computes is in its configuration, saved and loaded with it: `blocks` as `gdn_blocks`,
    the others by their names. An option that is not named is that of the configuration, else its default. `group`,
    `backend` and `attention` are in none: a swapped model keeps them, a stock one begins with no group and "auto".

    Args:
        model: a `SanaWMTransformer3DModel` (same weights, same outputs), a `SanaVideoTransformer3DModel` (linear
            attention to GDN, warm start) or a `WanTransformer3DModel` (chosen softmax blocks to GDN).
        blocks: indices of the blocks to swap; None leaves the choice to the host: all, of Wan all but every fourth.
        start_scale: where the gates are new, what the key scale is multiplied by at the start; the smaller, the closer
            to the stock model. None: the host's default.
        chunk_frames: None: every frame sees the whole clip; c: no frame sees past the end of its chunk of c frames.
        first_chunk_frames: frames of the clip's first chunk (SANA-WM's streaming model: 4, then 3, 3, ...); None: as
            the others. It needs chunk_frames.
        merge_tail: a tail shorter than chunk_frames joins the chunk before it, as in SANA-WM's training; False: it is
            a chunk of its own. A clip that is continued from a state must not end in such a tail alone.
        softmax_window: how many earlier chunks a softmax block sees, the sink counted; None: all. It needs
            chunk_frames.
        softmax_sink: the clip's first chunk is one of them.
        camera_conv_past, camera_rescale, softmax_scale: of SANA-WM, what NVlabs' streaming code reads otherwise than
            diffusers, whose reading is the default. camera_conv_past False: the short convolution of the camera branch
            sees zeros before each chunk, not the chunk before it. camera_rescale False: the camera branch's queries,
            keys and values are not scaled back to the rms that they had before their rays. softmax_scale: the scale of
            both softmax branches; None: 1/√D in the main one, 1/√128 for D 112 in the camera's, as diffusers pads it.
        group: the context-parallel group over which frames are sharded; as calling `parallelize(model, group)`.
        backend: "torch", "triton" or "auto".
        attention: what softmax blocks compute with: "sdpa", diffusers' dispatcher; "flash4", flash-attn-4 (the extra
            `flash4`), which is a ValueError in the call that it cannot serve; "auto", flash-attn-4 where it is
            installed and serves, else the dispatcher.

    Raises:
        ValueError: a model that is not known, one that `enable_parallelism` or an offloading hook is already on, or an
            option that this host cannot take over; nothing is changed then.
    """
    host = _host(model)
    if getattr(model, "_parallel_config", None) is not None:
        raise ValueError("enable_parallelism was called on this model: swap first, enable after")
    if group is not KEEP:
        cp_group(group)
    options = {
        "blocks": blocks,
        "start_scale": start_scale,
        "chunk_frames": chunk_frames,
        "first_chunk_frames": first_chunk_frames,
        "merge_tail": merge_tail,
        "softmax_window": softmax_window,
        "softmax_sink": softmax_sink,
        "camera_conv_past": camera_conv_past,
        "camera_rescale": camera_rescale,
        "softmax_scale": softmax_scale,
        "backend": backend,
        "attention": attention,
    }
    named = {name: value for name, value in options.items() if value is not KEEP}
    host.replace(model, replace(host.present(model), **named))
    return model if group is KEEP else parallelize(model, group)


def unswap(model: Model) -> Model:
    """Give back the original classes around the present, shared parameters, in place; returns the model.

    An untrained model's output is then equal to the bit to what it was before `swap`. Gates that swap added are
    dropped, with a warning. A model that is not swapped is returned as it is.

    Raises:
        ValueError: a model that is not known, or one with offloading hooks put on after the swap.
    """
    _host(model)
    swapped = [(name, module) for name, module in model.named_modules() if isinstance(module, hosts.Swapped)]
    for _, module in swapped:
        hosts.refuse_hooks(module, "unswap")
    dropped = [f"{name}.{key}" if name else key for name, module in swapped for key in module.release()]
    if dropped:
        warnings.warn(f"unswap dropped what swap had added: {', '.join(dropped)}", stacklevel=2)
    return model


def _host(model: nn.Module) -> ModuleType:
    host = hosts.find(model)
    if host is None:
        raise ValueError(f"model: a {type(model).__name__} is not known; known are: {', '.join(hosts.HOSTS)}")
    return host
