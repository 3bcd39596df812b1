"""The call of a template in a graph, and what its tracing shows of a forward that no rehearsal has seen."""

from __future__ import annotations

from typing import Any

import torch

from functional_amp.module.lender import Lender
from functional_amp.module.reach import CONTAINERS, walk
from functional_amp.module.rehearsal import refuse_changes, refuse_foreign, refuse_writes
from functional_amp.module.templates import Tensors
from functional_amp.torch_private import comptime, traced_effects, traced_locals, traced_version

_REHEARSE = " Or call apply once outside of the graph: that finds what is written before it is read."


def traced_call(lender: Lender, fixed: Tensors, copies: Tensors, method: str, args: Any, kwargs: Any) -> Any:
    """Runs the forward of the lender's master with the tensors in their places.

    Args:
        fixed: what the forward may read alone.
        copies: what it may write to as well.

    Returns:
        The output, and what the forward left in the places of the copies.
    """
    tensors, after = {**fixed, **copies}, {}
    if lender.places and not method:  # what dynamo knows, inside a loop of a graph too
        placed = {place: tensors[name] for place, name in lender.places.items()}
        _compare(lender, fixed, False)
        output = torch.func.functional_call(lender.master, placed, args, kwargs, tie_weights=False)
        _compare(lender, fixed, True)
        for place, name in lender.places.items():
            after.setdefault(name, placed[place])
    else:
        before = [container[key] for container, key, _ in lender.plan]
        for container, key, name in lender.plan:
            container[key] = tensors[name]
        _compare(lender, fixed, False)
        output = (getattr(lender.master, method) if method else lender.master)(*args, **kwargs)
        _compare(lender, fixed, True)
        for (container, key, name), meta in zip(lender.plan, before, strict=True):
            after.setdefault(name, container[key])
            container[key] = meta
    for layer, key, known, existed in lender.kept:
        if existed:
            setattr(layer, key, known)
        elif hasattr(layer, key):
            delattr(layer, key)
    return output, {name: after[name] for name in copies}


def _compare(lender: Lender, fixed: Tensors, done: bool) -> None:
    """While a graph is traced, refuses what the forward has changed; nothing is left of it in the graph."""
    comptime()(_look)


def _look(context: Any) -> None:
    local, effects = traced_locals(context), traced_effects(context)
    lender = local["lender"].value
    versions = [traced_version(variable) for variable in local["fixed"].items.values()]
    if not local["done"].as_python_constant():
        lender.traced_versions = versions
        return
    names = [key.vt.as_python_constant() for key in local["fixed"].items]
    refuse_writes(
        {n for n, old, new in zip(names, lender.traced_versions, versions, strict=True) if old != new}, _REHEARSE
    )
    for name, tensor in lender.alive().items():
        variable = effects.id_to_variable.get(id(tensor))
        if variable is not None and "_parameters[" in str(variable.source.name):
            refuse_foreign(name)
    placed = {id(container) for container, _, _ in lender.plan}
    changed: list[str] = []
    for path, obj in walk(lender.master):
        variable = effects.id_to_variable.get(id(obj))
        if variable is None or not effects.is_modified(variable):
            continue
        if isinstance(obj, CONTAINERS):
            changed += [path] * (id(obj) not in placed)
        else:
            changed += [f"{path}.{name}".removeprefix(".") for name in effects.store_attr_mutations.get(variable, {})]
    refuse_changes([name for name in changed if not lender.is_scratch(name)], _REHEARSE)
