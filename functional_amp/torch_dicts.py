"""Dicts of torch.optim by the names of the parameters, and the states of `from_torch` from and to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.optim import TorchState
from functional_amp.torch_probe import fitted, is_kept, kept_by
from functional_amp.tree import PyTree, flatten, paths


class TorchDict(NamedTuple):
    """A dict of torch.optim by the names of the parameters: their states, their groups, their numbers."""

    states: dict[str, Mapping[str, Any]]
    groups: dict[str, Mapping[str, Any]]
    indices: list[int]

    @classmethod
    def of(cls, torch_state: Mapping[str, Any], names: Iterable[str] | None, *, plain: bool = False) -> TorchDict:
        if not isinstance(torch_state, Mapping) or not {"state", "param_groups"} <= set(torch_state):
            raise TypeError(
                f"torch_state: found {type(torch_state).__name__}, expected the dict of a torch.optim optimizer. "
                "Remedy: pass torch_optimizer.state_dict()."
            )
        groups = torch_state["param_groups"]
        if not all([isinstance(group, Mapping) and "params" in group for group in groups]):
            raise TypeError(
                "torch_state: found a group without 'params', expected the dict of a torch.optim optimizer. "
                "Remedy: pass torch_optimizer.state_dict()."
            )
        indices = [index for group in groups for index in group["params"]]
        names = [name for group in groups for name in group.get("param_names", ())] if names is None else list(names)
        if len(names) != len(indices) or len(set(names)) != len(names) or not all(isinstance(n, str) for n in names):
            raise ValueError(
                f"names: found {len(names)} ({names[:3]} ...), expected {len(indices)} different names, one for each "
                "parameter in the order of the groups. Remedy: [name for name, _ in model.named_parameters()]."
            )
        for group in groups if plain else ():
            for flag in ("amsgrad", "maximize"):
                if group.get(flag):
                    raise ValueError(
                        f"{flag}: found True, expected False, as sgd, adam and adamw have no {flag}. "
                        f"Remedy: carry the parameters alone, and let the optimizer start without {flag}."
                    )
        at = dict(zip(indices, names, strict=True))
        return cls(
            {name: torch_state["state"].get(index, {}) for index, name in at.items()},
            {at[index]: group for group in groups for index in group["params"]},
            indices,
        )


def check_applied(applied: Any) -> None:
    """Raises ValueError unless it is None or a count of updates."""
    if applied is not None and (isinstance(applied, bool) or not isinstance(applied, int) or applied < 0):
        raise ValueError(
            f"applied: found {applied!r}, expected an int >= 0. Remedy: count the updates, not the skipped."
        )


def imported(
    opt_state: TorchState, theirs: TorchDict, groups: Sequence[Mapping[str, Any]], applied: int | None
) -> TorchState:
    """A state like the template with the values of torch's dict, in storage of its own.

    Groups hold the same parameters on both sides: a state does not say which.
    """
    check_applied(applied)
    count = _count(opt_state, theirs, applied)
    begun = [name for name, state in theirs.states.items() if _present(state)]
    slots = _slots(opt_state)
    unknown = sorted(set(slots) - set(theirs.states))
    if unknown:
        raise ValueError(
            f"names: found no {unknown}, expected each path in params. Remedy: pass the names in the order of torch's "
            "groups, [name for name, _ in model.named_parameters()]."
        )
    strangers = [name for name in begun if name not in slots]
    if strangers:
        raise ValueError(
            f"torch_state: found a state for {strangers}, expected none: they are not in opt_state. Remedy: pass the "
            "names as the paths in params read, and an optimizer that does not freeze them."
        )

    def taken(key: str, name: str, leaf: Tensor | None) -> Tensor | None:
        state = _present(theirs.states.get(name, {}))
        if leaf is None or not state:
            return None if leaf is None else leaf.clone()
        if key not in state:
            raise ValueError(
                f"{name}: found {sorted(state)}, expected {key!r} among them. Remedy: pass the state of the same class "
                "with the same hyperparameters; a low-bit state is not carried."
            )
        value = torch.as_tensor(state[key], dtype=None if isinstance(state[key], Tensor) else leaf.dtype)
        if value.shape != leaf.shape or value.dtype != leaf.dtype:
            raise ValueError(
                f"{key} of {name}: found {value.dtype} of shape {tuple(value.shape)}, expected {leaf.dtype} of shape "
                f"{tuple(leaf.shape)}. Remedy: take both from the same model, and the names in torch's order."
            )
        return value.detach().to(leaf.device, copy=True)

    state = {key: _mapped(lambda name, leaf, key=key: taken(key, name, leaf), t) for key, t in opt_state.state.items()}
    for name in begun:
        more = sorted({key for key, value in theirs.states[name].items() if is_kept(value)} - slots[name])
        if more:
            raise ValueError(
                f"{name}: found {more}, expected {sorted(slots[name])} alone. Remedy: pass the state of the same class "
                "with the same hyperparameters."
            )
    numbers = tuple(
        [
            {key: _entry(group, key, leaf, begun=bool(begun)) for key, leaf in kept.items()}
            for kept, group in zip(opt_state.groups, _in_our_order(opt_state, groups, theirs), strict=False)
        ]
    )
    flags = _mapped(lambda name, leaf: None if leaf is None else torch.tensor(name in begun), opt_state.begun)
    return TorchState(torch.full_like(opt_state.step, count), state, numbers, flags)


def exported(opt_state: TorchState, torch_optimizer: torch.optim.Optimizer, names: Iterable[str] | None) -> Any:
    """Torch's dict with the values of a state, in storage of its own."""
    written: dict[str, Any] = torch_optimizer.state_dict()
    theirs = TorchDict.of(written, names)
    slots, begun = _slots(opt_state), _by_name(opt_state.begun)
    for name in slots:
        if name not in theirs.states:
            raise ValueError(
                f"names: found no {name!r}, expected each path in params. Remedy: pass the names in the order of "
                "torch's groups, [name for name, _ in model.named_parameters()]."
            )
    parameters = [parameter for group in torch_optimizer.param_groups for parameter in group["params"]]
    check_no_more(slots, dict(zip(theirs.states, parameters, strict=True)))
    ours: dict[str, dict[str, Tensor]] = {}
    for key, tree in opt_state.state.items():
        for name, leaf in _by_name(tree).items():
            if "." in key:
                raise ValueError(f"{key} of {name}: found a low-bit state, which is not carried. Remedy: let it start.")
            ours.setdefault(name, {})[key] = leaf
    owner = type(torch_optimizer).__name__
    states = {
        name: fitted(name, ours[name], parameter, kept, owner)
        for name, parameter, kept in zip(theirs.states, parameters, kept_by(torch_optimizer), strict=True)
        if name in ours and int(opt_state.step) and (name not in begun or begun[name])
    }
    groups = [dict(group) for group in written["param_groups"]]
    for kept, group in zip(opt_state.groups, _in_our_order(opt_state, groups, theirs), strict=False):
        group.update({key: _as_torch_has_it(leaf, group.get(key)) for key, leaf in kept.items()})
    numbered = zip(theirs.indices, theirs.states, strict=True)
    return {"state": {index: states[name] for index, name in numbered if name in states}, "param_groups": groups}


def check_no_more(known: Iterable[str], parameters: Mapping[str, Tensor]) -> None:
    """Raises ValueError where torch trains a parameter that a state does not have."""
    known = set(known)
    more = [name for name, parameter in parameters.items() if known and name not in known and parameter.requires_grad]
    if more:
        raise ValueError(
            f"torch_optimizer: found {more}, expected the parameters of opt_state alone. Remedy: give them an "
            "optimizer of their own, or requires_grad_(False)."
        )


def _count(opt_state: TorchState, theirs: TorchDict, applied: int | None) -> int:
    """Updates so far: as the states of the parameters say, or as the caller does."""
    counts = {int(state["step"]) for state in theirs.states.values() if state.get("step") is not None}
    if applied is None and not counts and (theirs.states and "step" not in opt_state.state):
        raise ValueError(
            "applied: found none, expected the number of updates so far, which this dict does not have. "
            "Remedy: pass applied=..., which schedules go by."
        )
    count = max(counts, default=0) if applied is None else applied
    if counts and (count < max(counts) or (len(counts) == 1 and count not in counts)):
        raise ValueError(f"applied: found {count}, expected {max(counts)} as torch_state says. Remedy: leave it out.")
    return count


def _slots(opt_state: TorchState) -> dict[str, set[str]]:
    """The names of what is kept of each parameter."""
    slots: dict[str, set[str]] = {}
    for key, tree in opt_state.state.items():
        for name in _by_name(tree):
            slots.setdefault(name, set()).add(key.partition(".")[0])
    return slots


def _in_our_order(opt_state: TorchState, groups: Sequence[Any], theirs: TorchDict) -> list[Any]:
    """Torch's groups in the order of ours, which is that of the first parameter of each."""
    if not opt_state.groups:
        return []
    if len(groups) != len(opt_state.groups):
        raise ValueError(
            f"param_groups: found {len(groups)}, expected {len(opt_state.groups)} as in opt_state. Remedy: give both "
            "optimizers the same groups; from_torch makes one of all parameters with the same hyperparameters."
        )
    if len(groups) == 1:
        return list(groups)
    order = paths(next(iter(opt_state.state.values()))) if opt_state.state else []
    at = dict(zip(theirs.indices, theirs.states, strict=True))
    places = [[order.index(at[i]) for i in group["params"] if at[i] in order] for group in groups]
    if not all(places):
        raise ValueError(
            f"param_groups: found {len(groups)} with numbers, expected one, or a state of each parameter, which says "
            "whose they are. Remedy: give all parameters one group, or let the optimizer start."
        )
    return [groups[number] for number in sorted(range(len(groups)), key=lambda number: min(places[number]))]


def _entry(group: Mapping[str, Any], key: str, leaf: Tensor, *, begun: bool) -> Tensor:
    """What a group has under a key, like a leaf; before the first update it may have nothing yet."""
    if key not in group and begun:
        raise ValueError(
            f"param_groups: found no {key!r}, expected it in each. Remedy: take the state of the same class."
        )
    return torch.as_tensor(group.get(key, leaf), dtype=leaf.dtype).clone()


def _as_torch_has_it(leaf: Tensor, like: Any) -> Any:
    """A Python number where torch has one."""
    return leaf.detach().clone() if isinstance(like, Tensor) else leaf.item()


def _present(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if value is not None}


def _by_name(tree: PyTree) -> dict[str, Tensor]:
    named = zip(paths(tree), flatten(tree).leaves, strict=True)
    return {name: leaf for name, leaf in named if leaf is not None}


def _mapped(function: Any, tree: PyTree) -> PyTree:
    """The tree with `function(name, leaf)` at each leaf."""
    flat = flatten(tree)
    return flat.unflatten([function(name, leaf) for name, leaf in zip(paths(tree), flat.leaves, strict=True)])
