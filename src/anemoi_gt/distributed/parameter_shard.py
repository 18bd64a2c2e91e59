"""Sharding of parameters, gradients and optimiser states by PyTorch's `fully_shard`.

    unit        parameters are gathered before its forward and backward pass, freed after each
    gradients   reduce-scattered after backward:  sum over all ranks / number of replicas
    tables      keep the rows of this rank, as `shard_module` left them

This is the reduction of `gradients`: a sum over the ranks of a model, averaged over data. Gathered
in 16 bits, parameters would have gradients in 16 bits, and norms would be computed from rounded
weights; so they are gathered as they are.
"""

from collections import Counter

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from anemoi_gt.distributed.module_shard import LAYERS, ModuleShard
from anemoi_gt.distributed.process_group import AXES, check_mesh
from anemoi_gt.nn import BaseMapper

UNITS = (BaseMapper, *LAYERS)


def shard_parameters(module: nn.Module, shard: ModuleShard, mesh: DeviceMesh) -> None:
    """Divide the shared parameters of a sharded module among all ranks, in place. Collective.

    Call it after `torch.compile` of blocks and after copies such as `AveragedModel`, each of which
    is divided by a call of its own, and before the optimiser is created. Every rank must run
    forward and backward through the module itself, not through its layers.

    Parameters become DTensors, except for the tables. An optimiser needs a group for each, as
    operations on lists of tensors do not take both: `AdamW([{"params": group} for group in
    shard.parameters(module)])`. Mappers, blocks and convolutions are gathered one at a time;
    everything else, and whatever shares a parameter with another layer, during the whole pass.

    Parameters
    ----------
    module : torch.nn.Module
        The module that was sharded, or a copy of it, with the same weights on all ranks.
    shard : ModuleShard
        As `shard_module` or `shard_model` returned it.
    mesh : DeviceMesh
        The mesh of the shard, with axes (data, model).
    """
    check_mesh(mesh)
    ranks = _all_ranks(mesh)
    tables = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in shard.tables:
            tables.add(parameter)
    for layer in (*units(module), module):
        unit = fully_shard(layer, mesh=ranks, ignored_params=tables)
        unit.set_gradient_divide_factor(mesh["data"].size())
        # divided after the sum: gloo has no other reduction
        unit.set_force_sum_reduction_for_comms(True)


def _all_ranks(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh with one axis of all ranks of a mesh, without a new group where one exists."""
    for axis in AXES:
        if mesh[axis].size() == mesh.size():
            return mesh[axis]
    return DeviceMesh(mesh.device_type, mesh.mesh.flatten())


def units(module: nn.Module) -> list[nn.Module]:
    """Return the outermost layers inside a module that share no parameter with other layers."""
    total = _uses(module)
    units: list[nn.Module] = []
    inside: set[nn.Module] = {module}
    for layer in module.modules():  # a layer before the layers inside it
        if layer in inside or not isinstance(layer, UNITS):
            continue
        inside.update(layer.modules())
        uses = _uses(layer)
        if all(total[parameter] == times for parameter, times in uses.items()):
            units.append(layer)
    return units


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    """Return the number of names of each parameter."""
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
