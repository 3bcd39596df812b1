"""The call of a template in a graph, and what its tracing shows of a forward that no rehearsal has seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from functional_amp.engine.moved import note_traced_moves
from functional_amp.engine.statistics import traced_statistics
from functional_amp.module.lender import Lender
from functional_amp.module.reach import CONTAINERS, attributes, walk
from functional_amp.module.rehearsal import (
    Originals,
    refuse_averages,
    refuse_changes,
    refuse_gone,
    refuse_lost,
    refuse_public,
    refuse_set,
    refuse_statistics,
    refuse_writes,
)
from functional_amp.module.templates import Tensors, refuse_untied
from functional_amp.torch_private import (
    comptime,
    traced_class,
    traced_effects,
    traced_fully,
    traced_graph,
    traced_input_writes,
    traced_inputs,
    traced_items,
    traced_locals,
    traced_value,
    traced_versions,
)

_REHEARSE = " Or call apply once outside of the graph: that finds what is written before it is read."


def traced_call(
    lender: Lender, fixed: Tensors, copies: Tensors, method: str, args: Any, kwargs: Any, *, returned: bool
) -> Any:
    """Runs the forward of the lender's master with the tensors in their places.

    Args:
        fixed: what the forward may read alone.
        copies: what it may write to as well.
        returned: whether the caller gets what was written; refused otherwise.

    Returns:
        The output, and what the forward left in the places of the copies.
    """
    tensors, given = {**fixed, **copies}, (args, kwargs)
    if lender.places and not method:  # what dynamo knows, inside a loop of a graph too
        placed = {place: tensors[name] for place, name in lender.places.items()}
        _compare(lender, fixed, copies, given, returned, [])
        output = torch.func.functional_call(lender.master, placed, args, kwargs, tie_weights=False)
        after = [(name, placed[place]) for place, name in lender.places.items()]
        _compare(lender, fixed, copies, given, returned, after)
    else:
        before = [container[key] for container, key, _ in lender.plan]
        try:
            for container, key, name in lender.plan:
                container[key] = tensors[name]
            _compare(lender, fixed, copies, given, returned, [])
            output = (getattr(lender.master, method) if method else lender.master)(*args, **kwargs)
            after = [(name, container[key]) for container, key, name in lender.plan]
            _compare(lender, fixed, copies, given, returned, after)
        finally:
            for (container, key, _), meta in zip(lender.plan, before, strict=True):
                container[key] = meta
    for layer, key, known, existed in lender.scratch:
        if existed:
            setattr(layer, key, known)
        elif hasattr(layer, key):
            delattr(layer, key)
    left = dict(reversed(after))  # of tied places, what lies in the first
    return output, {name: left[name] for name in copies}


def _compare(lender: Lender, fixed: Tensors, copies: Tensors, given: Any, returned: bool, after: list[Any]) -> Any:
    """While a graph is traced, refuses what the forward has changed; nothing is left of it in the graph.

    Args:
        after: the name of each slot and what lies there; empty before the forward.
    """
    comptime()(_look)
    return lender, fixed, copies, given, returned, after  # dynamo drops the locals that nothing reads any more


def _look(context: Any) -> None:
    local, effects = traced_locals(context), traced_effects(context)
    lender, returned = local["lender"].value, local["returned"].as_python_constant()
    fixed, copies = (traced_items(local[name]) for name in ("fixed", "copies"))
    places = [(slot.items[0].as_python_constant(), traced_value(slot.items[1])) for slot in local["after"].items]
    after = dict(reversed(places))
    tensors = {**fixed, **copies}
    versions, inputs = dict(zip(tensors, traced_versions(tensors.values()), strict=True)), traced_inputs(context)
    traced_class([v for name, v in tensors.items() if name in lender.parameters], Tensor if after else nn.Parameter)
    if not after:
        if traced_fully(context):
            refuse_averages(lender.master)
        refuse_public(lender.known.marks)
        known = {source: version for source, _, version in inputs}
        lender.traced = traced_graph(context), versions, known, _set_on_tensors(effects)
        return
    graph, before, seen, were_set = lender.traced
    if graph != traced_graph(context):  # the forward has left the graph: the stand-ins are others, and nothing is known
        before, seen = versions, {source: version for source, _, version in inputs}
    written = {name for name, version in versions.items() if version != before[name]}
    refuse_writes(written.intersection(fixed), _REHEARSE)
    written |= {name for name in copies if after[name] is not traced_value(copies[name])}
    refuse_gone(written, after)
    refuse_untied([name for name, value in places if value is not after[name]])
    names = {id(traced_value(variable)): name for name, variable in tensors.items()}
    for value, attribute in _set_on_tensors(effects) - were_set:
        if value in names:
            refuse_set(names[value], [attribute])
    if lender.writes_statistics:  # which move no version counter in a graph
        written |= lender.statistics.intersection(copies)
    written |= traced_statistics(copies)
    if returned:
        note_traced_moves(written)
    else:
        refuse_lost(name for name in copies if name in written)
    if moved := written - lender.known.moved:
        if id(lender.known.moved) in effects.id_to_variable:  # another call in this graph has asked, and was told none
            refuse_statistics(sorted(moved))
        lender.known.moved.update(moved)
    originals = Originals(lender.alive())
    for source, tensor, _ in inputs:
        if source not in seen or "_parameters[" in source:
            originals.refuse(tensor)
    constants = {id(constant): path for path, constant in lender.constants.items()}
    arrays = {source for source, _, _ in inputs if source not in seen and source.startswith("___from_numpy")}
    changed: list[str] = []
    if constants or arrays:
        writes = traced_input_writes(context)
        changed += [
            constants.get(id(tensor), source)
            for source, tensor in writes
            if id(tensor) in constants or source in arrays
        ]
    placed = {id(container) for container, _, _ in lender.plan}
    for path, obj in walk(lender.master):
        variable = effects.id_to_variable.get(id(obj))
        if variable is None or not effects.is_modified(variable):
            continue
        if isinstance(obj, CONTAINERS):
            changed += [path] * (id(obj) not in placed)
        else:
            found, before = effects.store_attr_mutations.get(variable, {}), attributes(obj)
            names = [name for name, now in found.items() if name not in before or not _is_constant(now, before[name])]
            changed += [f"{path}.{name}".removeprefix(".") for name in names]
    refuse_changes([name for name in changed if not lender.is_scratch(name)], _REHEARSE)


def _is_constant(variable: Any, value: Any) -> bool:
    """Whether a traced value is a constant of Python that equals another value."""
    known = variable.as_python_constant() if variable.is_python_constant() else object()
    return type(known) is type(value) and known == value


def _set_on_tensors(effects: Any) -> set[tuple[int, str]]:
    """The ids of the stand-ins of tensors that have attributes of one's own or hooks, and what these are."""
    found = {(id(traced_value(v)), name) for v, names in effects.store_attr_mutations.items() for name in names}
    return found | {(id(traced_value(v)), f"hook {key}") for key, (v, *_) in effects.tensor_hooks.items()}
