"""`parallelize`: a whole model over frame shards."""

from typing import TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from . import checks, hosts
from .parallel import FrameSharded, rank_and_size

Model = TypeVar("Model", bound=nn.Module)


def parallelize(model: Model, mesh_or_group: DeviceMesh | ProcessGroup | None) -> Model:
    """Make every site of a model that looks across frames right for frames sharded over a group; returns the model.

    From then on each rank calls the model with its own frames, in the order of the ranks. Gradients of the parameters
    are each rank's share, to be summed over the group. Call it on all ranks, before wrappers such as DDP or FSDP.

    Args:
        model: a module all of whose sites are `FrameSharded`, such as `models.VideoDiT` or a `BidirectionalGDN`; or a
            transformer of diffusers that `swap` knows, whose sites are then replaced.
        mesh_or_group: the context-parallel group, or a mesh of which it is the dimension "cp" (or the only one);
            None undoes it.

    Raises:
        ValueError: a model without such a site, a mesh without such a dimension, a group this process is not in.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a module, got {checks.shown(model)}")
    group = cp_group(mesh_or_group)
    host = hosts.find(model)
    if host is not None and group is not None:
        host.cover(model)
    sites = [module for module in model.modules() if isinstance(module, FrameSharded)]
    if not sites:
        raise ValueError(
            f"model: {type(model).__name__} has no module that looks across frames and knows of groups "
            "(FrameSharded): nothing to parallelize"
        )
    for site in sites:
        site.group = group
    return model


def cp_group(mesh_or_group: DeviceMesh | ProcessGroup | None) -> ProcessGroup | None:
    """The group over which frames are sharded, from a mesh or as it is; raises as `parallelize`."""
    group: ProcessGroup | None
    if isinstance(mesh_or_group, DeviceMesh):
        if mesh_or_group.ndim > 1 and "cp" not in (mesh_or_group.mesh_dim_names or ()):
            raise ValueError(f'the mesh needs a dimension named "cp" or a single one, got {mesh_or_group}')
        group = mesh_or_group.get_group("cp" if mesh_or_group.ndim > 1 else None)
    else:
        group = mesh_or_group
    rank_and_size(group)
    return group
