"""Optimizer states from and to those of torch.optim, by the names of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias, cast

import optree
import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype
from functional_amp.optim import AdamState, SGDState, TorchState
from functional_amp.torch_dicts import TorchDict, check_applied, check_no_more, exported, imported
from functional_amp.tree import PyTree, flatten, paths

_Node: TypeAlias = SGDState | AdamState


def opt_state_from_torch(
    opt_state: PyTree, torch_state: Mapping[str, Any], names: Iterable[str] | None = None, *, applied: int | None = None
) -> PyTree:
    """Read the state of a `torch.optim.SGD`, `Adam` or `AdamW`, to go on with `sgd`, `adam` or `adamw`.

    With a `TorchState` as the template, read the state of that class of torch, to go on with `from_torch`.

    Parameter groups are the labels of `partition`, or all one optimizer. The hyperparameters are not
    carried: they are arguments of the optimizer here.

    Args:
        opt_state: the template: what `optimizer.init(params)` gives, of `partition` too.
        torch_state: what `torch_optimizer.state_dict()` gave.
        names: the name of each parameter in the order of torch's groups, as the paths in `params` read:
            `[name for name, _ in model.named_parameters()]`, if the optimizer was given `model.parameters()`.
            None where it was given `model.named_parameters()`, and the dict has the names.
        applied: updates so far, for SGD, whose dict has no count of them.

    Returns:
        A state like the template, in storage of its own.

    Raises:
        TypeError: for a state of another optimizer.
        ValueError: naming what cannot be carried: parameters of different step counts, amsgrad, maximize, a
            parameter that is missing or unknown, another shape or dtype.

    >>> import torch
    >>> from functional_amp import adamw
    >>> model = torch.nn.Linear(2, 1)
    >>> theirs = torch.optim.AdamW(model.named_parameters())
    >>> model(torch.ones(2)).backward()
    >>> theirs.step()
    >>> state = opt_state_from_torch(adamw().init(dict(model.named_parameters())), theirs.state_dict())
    >>> state.step, state.exp_avg["bias"]
    (tensor(1, dtype=torch.int32), tensor([0.1000]))
    """
    if isinstance(opt_state, TorchState):
        return imported(opt_state, TorchDict.of(torch_state, names), torch_state["param_groups"], applied)
    theirs = TorchDict.of(torch_state, names, plain=True)
    nodes, spec = _nodes(opt_state)
    ours = set().union(*(_slot_names(node) for node in nodes))
    strangers = [name for name, state in theirs.states.items() if name not in ours and _tensors(state)]
    if strangers:
        raise ValueError(
            f"torch_state: found a state for {strangers}, expected none: they are not in opt_state. Remedy: pass the "
            "names as the paths in params read, and an optimizer that does not freeze them."
        )
    unknown = [name for name in ours if name not in theirs.states]
    if unknown:
        raise ValueError(
            f"names: found no {sorted(unknown)}, expected each path in params. Remedy: pass the names in the order of "
            "torch's groups, [name for name, _ in model.named_parameters()]."
        )
    check_applied(applied)
    return cast(Any, optree.tree_unflatten(spec, [_node_from(node, theirs, applied) for node in nodes]))


def opt_state_to_torch(
    opt_state: PyTree, torch_optimizer: torch.optim.Optimizer, names: Iterable[str] | None = None
) -> dict[str, Any]:
    """Write the state that a `torch.optim.SGD`, `Adam` or `AdamW` goes on from, or any class that `from_torch` took.

    Args:
        opt_state: the state of `sgd`, `adam`, `adamw`, of a `partition` of these, or a `TorchState`.
        torch_optimizer: the one that is to load it; it is not changed, and its hyperparameters are kept.
        names: as for `opt_state_from_torch`.

    Returns:
        The dict for `torch_optimizer.load_state_dict`, in storage of its own.

    Raises:
        TypeError: for a state of another optimizer, or another `torch_optimizer`.
        ValueError: naming what cannot be carried: amsgrad, maximize, a parameter that one side alone has, another
            shape, a dtype that torch would round (torch keeps the averages of half-precision parameters in half).

    >>> import torch
    >>> from functional_amp import adamw
    >>> model = torch.nn.Linear(2, 1)
    >>> theirs = torch.optim.AdamW(model.named_parameters())
    >>> theirs.load_state_dict(opt_state_to_torch(adamw().init(dict(model.named_parameters())), theirs))
    """
    if isinstance(opt_state, TorchState) and isinstance(torch_optimizer, torch.optim.Optimizer):
        return exported(opt_state, torch_optimizer, names)
    if isinstance(opt_state, TorchState):
        raise TypeError(
            f"torch_optimizer: found {type(torch_optimizer).__name__}, expected the torch.optim optimizer that is to "
            "load the state. Remedy: pass the optimizer itself, and not its state_dict()."
        )
    if not isinstance(torch_optimizer, (torch.optim.SGD, torch.optim.Adam)):  # AdamW is an Adam
        raise TypeError(
            f"torch_optimizer: found {type(torch_optimizer).__name__}, expected torch.optim.SGD, Adam or AdamW. "
            "Remedy: carry the parameters alone, and let it start."
        )
    written = torch_optimizer.state_dict()
    theirs = TorchDict.of(written, names, plain=True)
    kind = SGDState if isinstance(torch_optimizer, torch.optim.SGD) else AdamState
    parameters = [parameter for group in torch_optimizer.param_groups for parameter in group["params"]]
    by_name = dict(zip(theirs.states, parameters, strict=True))
    states: dict[str, dict[str, Tensor]] = {}
    nodes = _nodes(opt_state)[0]
    for node in nodes:
        if not isinstance(node, kind):
            raise TypeError(
                f"opt_state: found {type(node).__name__}, expected {kind.__name__} for "
                f"{type(torch_optimizer).__name__}. Remedy: pass the torch optimizer of the same rule."
            )
        for name in _slot_names(node):
            if name not in by_name:
                raise ValueError(
                    f"names: found no {name!r}, expected each path in params. Remedy: pass the names in the order of "
                    "torch's groups, [name for name, _ in model.named_parameters()]."
                )
        states.update(_states_of(node, by_name))
    if all(map(_slots, nodes)):  # without momentum a state does not say whose it is
        check_no_more([name for node in nodes for name in _slot_names(node)], by_name)
    numbered = zip(theirs.indices, theirs.states, strict=True)
    return {**written, "state": {index: states[name] for index, name in numbered if name in states}}


def _nodes(opt_state: PyTree) -> tuple[list[_Node], Any]:
    """The states of the single optimizers, and the structure that they are in."""
    nodes, spec = optree.tree_flatten(opt_state, is_leaf=lambda node: isinstance(node, _Node))
    for node in nodes:
        if not isinstance(node, _Node):
            raise TypeError(
                f"opt_state: found {type(node).__name__}, expected the state of sgd, adam, adamw or a partition of "
                "them. Remedy: pass optimizer.init(params) of one of these. Of a chain or a partition with others, "
                "carry the part alone: opt_state[-1], or opt_state[label]."
            )
    return cast(Any, nodes), spec


def _slots(node: _Node) -> dict[str, PyTree]:
    """The trees of a state that has any leaves: without momentum there are none."""
    trees = dict(zip(node._fields[1:], node[1:], strict=True))
    return {key: tree for key, tree in trees.items() if flatten(tree).leaves}


def _slot_names(node: _Node) -> list[str]:
    trees = list(_slots(node).values())
    return [name for name, leaf in zip(paths(trees[0]), flatten(trees[0]).leaves) if leaf is not None] if trees else []


def _tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """What torch has for a parameter: a momentum buffer that has not begun is None there, or missing."""
    return {key: value for key, value in state.items() if value is not None}


def _node_from(node: _Node, theirs: TorchDict, applied: int | None) -> _Node:
    slots, names = _slots(node), _slot_names(node)
    states = {name: _tensors(theirs.states[name]) for name in names}
    for name, state in states.items():
        if set(state) - {"step"} not in (set(), set(slots)):
            raise TypeError(
                f"{name}: found {sorted(state)}, expected {sorted(slots)}, as {type(node).__name__} has. "
                "Remedy: pass the state of the same rule, or let the optimizer start."
            )
    count = _sgd_count(states, theirs, applied) if isinstance(node, SGDState) else _adam_count(node, states, applied)
    trees: dict[str, PyTree] = dict(zip(node._fields[1:], node[1:], strict=True))
    for key, tree in slots.items():
        flat = flatten(tree)
        leaves = [
            leaf if leaf is None or key not in states[name] else _carried(states[name][key], leaf, f"{key} of {name}")
            for name, leaf in zip(paths(tree), flat.leaves, strict=True)
        ]
        trees[key] = flat.unflatten([None if leaf is None else leaf.clone() for leaf in leaves])
    return type(node)(torch.full_like(node.step, count), **trees)


def _adam_count(node: _Node, states: Mapping[str, Mapping[str, Any]], applied: int | None) -> int:
    """The one count of updates; 0 where torch has no state, which it makes at the first update of a parameter."""
    counts = {name: int(state["step"]) if state else 0 for name, state in states.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"step: found {counts}, expected one count, which serves the whole tree here. Remedy: give parameters that "
            "missed updates an optimizer of their own, by partition."
        )
    count = next(iter(counts.values()), int(node.step) if applied is None else applied)
    if applied is not None and applied != count:
        raise ValueError(f"applied: found {applied}, expected {count} as torch_state says. Remedy: leave it out.")
    return count


def _sgd_count(states: Mapping[str, Mapping[str, Any]], theirs: TorchDict, applied: int | None) -> int:
    """The count that the caller gives: torch's SGD does not keep one."""
    begun = [name for name, state in states.items() if state]
    waiting = [name for name, state in states.items() if not state]
    if applied is None or (applied == 0 and begun):
        found = "none" if applied is None else f"0 with momentum buffers of {begun}"
        raise ValueError(
            f"applied: found {found}, expected the number of updates so far, which SGD's dict does not have. "
            "Remedy: pass applied=..., which schedules and dampening go by."
        )
    if applied and any(theirs.groups[name].get("dampening") for name in waiting):
        raise ValueError(
            f"momentum_buffer: found none for {waiting} after {applied} updates, expected one each: with dampening a "
            "buffer begins at the first update of the tree. Remedy: give them an optimizer of their own, by partition."
        )
    return applied


def _carried(value: Tensor, leaf: Tensor, what: str) -> Tensor:
    """Torch's tensor for a leaf of the template; half precision is widened, which is exact."""
    if value.shape == leaf.shape and leaf.dtype != accumulation_dtype(leaf.dtype):
        raise ValueError(
            f"{what}: found {value.dtype}, expected {leaf.dtype}, the state_dtype here, which would round it. Remedy: "
            "read it into the state of an optimizer without state_dtype, and go on with that."
        )
    if value.shape != leaf.shape or accumulation_dtype(value.dtype) != leaf.dtype:
        raise ValueError(
            f"{what}: found {value.dtype} of shape {tuple(value.shape)}, expected {leaf.dtype} of shape "
            f"{tuple(leaf.shape)}. Remedy: take both from the same model, and the names in torch's order."
        )
    return value.detach().to(leaf.device, leaf.dtype)


def _states_of(node: _Node, by_name: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What torch keeps for each parameter of a node: nothing before the first update."""
    count = int(node.step)
    if count == 0:
        return {}
    step = {"step": torch.tensor(float(count))} if isinstance(node, AdamState) else {}
    states: dict[str, dict[str, Tensor]] = {}
    for key, tree in _slots(node).items():
        for name, leaf in zip(paths(tree), flatten(tree).leaves, strict=True):
            if leaf is None:
                continue
            parameter = by_name[name]
            if leaf.shape != parameter.shape or leaf.dtype != parameter.dtype:
                raise ValueError(
                    f"{key} of {name}: found {leaf.dtype} of shape {tuple(leaf.shape)}, expected {parameter.dtype} of "
                    f"shape {tuple(parameter.shape)} as torch keeps it. Remedy: give the torch optimizer parameters of "
                    f"{leaf.dtype}; in {parameter.dtype} it would round the state."
                )
            states.setdefault(name, {each: value.clone() for each, value in step.items()})[key] = leaf.detach().clone()
    return states
