"""What an optimizer of torch would keep of its parameters: one step on stand-ins, which leaves it as it was."""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from functional_amp.engine.random import all_generators_kept

_OWN = ("state", "param_groups", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def is_kept(value: Any) -> bool:
    """Whether `from_torch` keeps a value of a state: a tensor or a number."""
    return isinstance(value, (Tensor, int, float))


def kept_by(optimizer: Any) -> list[Mapping[str, Any]]:
    """The state of each parameter after one step, by the optimizer's names, on one stand-in of each kind.

    Raises:
        TypeError: where the step raises.
    """
    kinds: dict[Any, Tensor] = {}
    stand_ins: list[Tensor] = []
    groups: list[dict[str, Any]] = []
    state: Any = defaultdict(dict)
    for number, group in enumerate(optimizer.param_groups):
        params = []
        for param in group["params"]:
            kind = (number, type(param), param.shape, param.dtype, param.device)
            if kind not in kinds:
                leaf = kinds[kind] = torch.zeros_like(param.detach(), requires_grad=not group.get("differentiable"))
                leaf.grad = torch.full_like(param.detach(), math.nan)
                state[leaf] = {key: _copied(value) for key, value in optimizer.state.get(param, {}).items()}
                params.append(leaf)
            stand_ins.append(kinds[kind])
        groups.append({**{key: _copied(value) for key, value in group.items()}, "params": params})
    held = vars(optimizer)
    own = {name: held[name] for name in _OWN if name in held}
    held.update({name: OrderedDict() for name in own}, state=state, param_groups=groups)
    try:
        with all_generators_kept():
            if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers step in this mode alone
                optimizer.train()
            type(optimizer).step(optimizer)
        return [state[leaf] for leaf in stand_ins]
    except Exception as error:
        raise TypeError(
            f"torch_optimizer: found {type(optimizer).__name__}, which raised {type(error).__name__} in a step on "
            f"stand-ins: {error}. Expected one that steps from dense gradients. Remedy: pass one of the class of "
            "opt_state."
        ) from error
    finally:
        held.update(own)


def fitted(
    name: str, ours: Mapping[str, Tensor], parameter: Tensor, kept: Mapping[str, Any], owner: str
) -> dict[str, Any]:
    """The state of one parameter as torch has it: Python numbers where it has those.

    Raises:
        TypeError: where the optimizer keeps other things.
        ValueError: for another shape or dtype, and for what `load_state_dict` would round.
    """
    expected = {key: value for key, value in kept.items() if is_kept(value)}
    if set(ours) != set(expected):
        raise TypeError(
            f"{name}: found {sorted(ours)}, expected {sorted(expected)} as {owner} keeps it. Remedy: pass a torch "
            "optimizer of the same class with the same hyperparameters."
        )
    values: dict[str, Any] = {}
    for key, like in expected.items():
        leaf = ours[key]
        if not isinstance(like, Tensor):
            values[key] = leaf.item()
            continue
        if leaf.shape != like.shape or leaf.dtype != like.dtype:
            raise ValueError(
                f"{key} of {name}: found {leaf.dtype} of shape {tuple(leaf.shape)}, expected {like.dtype} of shape "
                f"{tuple(like.shape)} as {owner} keeps it. Remedy: give the torch optimizer the parameters of this "
                "run, in their dtype."
            )
        rounds = key != "step" and parameter.is_floating_point() and leaf.is_floating_point()
        if rounds and torch.promote_types(leaf.dtype, parameter.dtype) != parameter.dtype:
            raise ValueError(
                f"{key} of {name}: found {leaf.dtype}, expected {parameter.dtype}, which load_state_dict rounds it to. "
                f"Remedy: give the torch optimizer parameters of {leaf.dtype}."
            )
        values[key] = leaf.detach().clone()
    return values


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
