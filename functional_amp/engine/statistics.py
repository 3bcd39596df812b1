"""Running statistics that a kernel writes to without a version counter that says so: those of normalizations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from functional_amp.torch_private import is_wrapper, levels, storage_key, unwrapped

_NORMS = {"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"}
_OBSERVERS = {"fused_moving_avg_obs_fake_quant", "_fused_moving_avg_obs_fq_helper"}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one history hold the same values, NaN included; a host read.

    Those whose values can't be compared count as equal: fake ones, and of a class that holds others.
    """
    a, b = unwrapped(a), unwrapped(b)
    if type(a) not in (Tensor, torch.nn.Parameter) or a.layout is not torch.strided or a.is_meta:
        return True
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def traced_statistics_writes(variables: Iterable[Any]) -> int:
    """How many nodes of the graph that is traced update tensors among these as running statistics."""
    nodes = [variable.proxy.node for variable in variables]
    watched = {key for node in nodes for key in _keys(node)}
    return sum(bool(watched & keys) for keys in _updated(nodes))


def traced_statistics(variables: Mapping[str, Any]) -> set[str]:
    """The names of those tensors that a node of the graph that is traced updates as running statistics."""
    nodes = {name: variable.proxy.node for name, variable in variables.items()}
    updated = set[int]().union(*_updated(list(nodes.values())))
    return {name for name, node in nodes.items() if not updated.isdisjoint(_keys(node))}


def _updated(nodes: list[Any]) -> list[set[int]]:
    """The storages that each node of a graph updates as running statistics."""
    every = nodes[0].graph.nodes if nodes else ()
    return [{key for arg in statistics for key in _keys(arg)} for node in every if (statistics := _statistics(node))]


def _statistics(node: Any) -> list[Any]:
    """What a node writes to as running statistics, or as a list."""
    name = getattr(node.target, "__name__", "").split(".")[0]
    if name.startswith("_foreach_") and name.endswith("_"):  # whose stand-ins have no counter that moves
        return list(node.args[0]) if node.args else []
    if name in _OBSERVERS:
        places, names = (3, 4, 5, 6), ("running_min", "running_max", "scale", "zero_point")
    elif name in _NORMS and _updates(name, node.args, node.kwargs):
        functional = getattr(node.target, "__module__", None) == torch.nn.functional.__name__
        places, names = (1, 2) if functional else (3, 4), ("running_mean", "running_var")
    else:
        return []
    return [node.args[place] for place in places if place < len(node.args)] + [node.kwargs.get(name) for name in names]


def _updates(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether statistics are updated and not used: the sixth argument of each of these functions."""
    default = named.get("training", named.get("use_input_stats", name == "instance_norm"))
    return (args[5] if len(args) > 5 else default) is not False


def _keys(node: Any) -> list[int]:
    value = getattr(node, "meta", {}).get("example_value")
    if not isinstance(value, Tensor) or is_wrapper(value):
        return []
    return [storage_key(list(levels(value))[-1])]
