"""Dicts of torch.optim by the names of the parameters, and the states of `from_torch` from and to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.optim import TorchState
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


def imported(
    opt_state: TorchState, theirs: TorchDict, groups: Sequence[Mapping[str, Any]], applied: int | None
) -> TorchState:
    """A state like the template with the values of torch's dict, in storage of its own."""
    counts = {int(state["step"]) for state in theirs.states.values() if "step" in state}
    begun = [name for name, state in theirs.states.items() if _present(state)]
    if applied is None and begun and not counts:
        raise ValueError(
            "applied: found none, expected the number of updates so far, which this dict does not have. "
            "Remedy: pass applied=..., which schedules go by."
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

    known = {name for tree in opt_state.state.values() for name in _by_name(tree)}
    unknown = sorted(known - set(theirs.states))
    if unknown:
        raise ValueError(
            f"names: found no {unknown}, expected each path in params. Remedy: pass the names in the order of torch's "
            "groups, [name for name, _ in model.named_parameters()]."
        )
    state = {key: _mapped(lambda name, leaf, key=key: taken(key, name, leaf), t) for key, t in opt_state.state.items()}
    numbers = tuple(
        [
            {key: torch.as_tensor(group[key], dtype=leaf.dtype).clone() for key, leaf in kept.items()}
            for kept, group in zip(opt_state.groups, groups, strict=bool(opt_state.groups))
        ]
    )
    flags = _mapped(lambda name, leaf: None if leaf is None else torch.tensor(name in begun), opt_state.begun)
    count = max(counts, default=0) if applied is None else applied
    return TorchState(torch.full_like(opt_state.step, count), state, numbers, flags)


def exported(opt_state: TorchState, written: dict[str, Any], names: Iterable[str] | None) -> dict[str, Any]:
    """Torch's dict with the values of a state, in storage of its own."""
    theirs = TorchDict.of(written, names)
    begun = _by_name(opt_state.begun)
    states: dict[str, dict[str, Any]] = {}
    for key, tree in opt_state.state.items():
        for name, leaf in _by_name(tree).items():
            if name not in theirs.states:
                raise ValueError(
                    f"names: found no {name!r}, expected each path in params. Remedy: pass the names in the order of "
                    "torch's groups, [name for name, _ in model.named_parameters()]."
                )
            if "." in key:
                raise ValueError(f"{key} of {name}: found a low-bit state, which is not carried. Remedy: let it start.")
            if int(opt_state.step) and (name not in begun or begun[name]):
                states.setdefault(name, {})[key] = _as_torch_has_it(leaf)
    numbers = opt_state.groups or [{}] * len(written["param_groups"])
    groups = [
        {**group, **{key: _as_torch_has_it(leaf) for key, leaf in kept.items()}}
        for group, kept in zip(written["param_groups"], numbers, strict=True)
    ]
    numbered = zip(theirs.indices, theirs.states, strict=True)
    return {"state": {index: states[name] for index, name in numbered if name in states}, "param_groups": groups}


def _as_torch_has_it(leaf: Tensor) -> Any:
    """A Python number where `from_torch` kept one as a 0-dim tensor."""
    number = leaf.dim() == 0 and leaf.dtype in (torch.int64, torch.float64, torch.bool)
    return leaf.item() if number else leaf.detach().clone()


def _present(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if value is not None}


def _by_name(tree: PyTree) -> dict[str, Tensor]:
    named = zip(paths(tree), flatten(tree).leaves, strict=True)
    return {name: leaf for name, leaf in named if leaf is not None}


def _mapped(function: Any, tree: PyTree) -> PyTree:
    """The tree with `function(name, leaf)` at each leaf."""
    flat = flatten(tree)
    return flat.unflatten([function(name, leaf) for name, leaf in zip(paths(tree), flat.leaves, strict=True)])
