"""One update by an optimizer of torch.optim, in place, on tensors that it is lent."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from functional_amp.checks import check_finite_number
from functional_amp.engine.operators import can_write_in_place
from functional_amp.engine.sharded import local
from functional_amp.engine.storage import copied
from functional_amp.mode import host_readable
from functional_amp.optim.slots import Slot
from functional_amp.optim.trial import Kept, Layout, refuse, trial
from functional_amp.torch_private import levels

Hyper: TypeAlias = Mapping[str, Any]
"""Hyperparameters by name: numbers, tensors, functions of the count of applied updates, tuples of these."""


known: list[weakref.ref[Imperative]] = []
"""By number, as a graph names them."""


class Imperative:
    """An optimizer class of torch.optim with its hyperparameters.

    Args:
        cls: the class.
        hyper: its hyperparameters.
        groups: `groups(path, leaf)` gives those of one parameter that differ; None where none do.
    """

    def __init__(self, cls: type[torch.optim.Optimizer], hyper: Hyper, groups: Callable[[str, Tensor], Hyper] | None):
        self.cls, self.hyper, self.groups = cls, dict(hyper), groups
        self._layouts: dict[Any, Layout] = {}
        self.built([torch.zeros(1, 1)], [[0]], [self.hyper])  # checks the hyperparameters
        self.number = len(known)
        known.append(weakref.ref(self))

    def layout(self, params: Sequence[Tensor], paths: Sequence[str]) -> Layout:
        """What is kept of these parameters: known from `begin`, or found by it."""
        key = _signature(params, paths)
        return self._layouts[key] if key in self._layouts else self.begin(params, paths)[0]

    def begin(self, params: Sequence[Tensor], paths: Sequence[str]) -> tuple[Layout, Kept]:
        """What is kept of these parameters, and what it is at first."""
        members, hypers = self.grouped(params, paths)
        leaves = self.as_parameters([copied(param) for param in params])
        layout, first = trial(self.built(leaves, members, hypers), leaves, members, hypers)
        for hyper, slots in zip(hypers, layout.groups, strict=True):
            for slot in slots:
                if _moves(hyper.get(slot.key)):
                    refuse(
                        self.cls, f"a schedule of {slot.key!r}, which each step of the class assigns", "Pass a number."
                    )
        self._layouts[_signature(params, paths)] = layout
        return layout, first

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor],
        count: Tensor,
        paths: Sequence[str],
        names: Sequence[str],
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """One update in place, of the parameters and of the tensors that are kept.

        Args:
            params: the optimizer's own: their `grad` is set.
            grads: in true units; they may be overwritten. A parameter whose gradient is None stays.
            tensors: `Kept.tensors` of the state.
            count: updates before this one.
            names: what the state calls its tensors, by `names_of`.
            writing: called before the first write.

        Raises:
            ValueError: for the state of another class, whose tensors may have the same shapes.
        """
        layout = self.layout(params, paths)
        if names != layout.names:
            raise ValueError(
                f"opt_state: found {names}, expected {layout.names} as {self.cls.__name__} keeps it. Take it from the "
                "init of this very optimizer."
            )
        self.apply(layout, params, grads, tensors, count, writing)

    def apply(
        self,
        layout: Layout,
        params: Sequence[Tensor],
        grads: Sequence[Tensor | None],
        tensors: Sequence[Tensor],
        count: Tensor,
        writing: Callable[[], None] = lambda: None,
    ) -> None:
        """One update in place of parameters of a known layout. The optimizer is lent to them, by one thread at a time.

        It is the one that was made for the layout: what it was given to call may be bound to it.
        """
        state = layout.taken_apart(tensors)
        recorded = torch.is_grad_enabled() and not can_write_in_place()
        lent = list(params) if recorded else self.as_parameters([param.detach() for param in params])
        waiting = iter(state.begun)
        begun = [next(waiting) if begins else None for begins in layout.begins]
        optimizer: Any = layout.template
        with layout.lock, nullcontext() if recorded else torch.no_grad():
            bare = optimizer.param_groups
            try:
                groups = optimizer.param_groups = [
                    {**template, "params": [lent[place] for place in places]}
                    for places, template in zip(layout.members, bare, strict=True)
                ]
                set_schedules(groups, layout.hypers, count)
                for group, slots, given in zip(groups, layout.groups, state.groups, strict=True):
                    group.update({slot.key: slot.decoded(given) for slot in slots})
                before = [dict(group) for group in groups]
                for param, grad, slots, given, flag in zip(
                    lent, grads, layout.params, state.params, begun, strict=True
                ):
                    param.grad = grad
                    if slots and (flag is None or flag):
                        optimizer.state[param] = {slot.key: laid_out(slot.decoded(given), param) for slot in slots}
                writing()
                optimizer.step()
                self._check_unchanged(layout, before)
                for param, own in zip(params, lent, strict=True):
                    self._follow(param, own)
                for param, grad, slots, given, flag in zip(
                    lent, grads, layout.params, state.params, begun, strict=True
                ):
                    if grad is not None:
                        self._written(
                            optimizer.state.get(param, {}), slots, given, f"the state of {tuple(param.shape)}"
                        )
                        if flag is not None:
                            flag.fill_(True)
                for group, slots, given in zip(groups, layout.groups, state.groups, strict=True):
                    self._written({slot.key: group[slot.key] for slot in slots}, slots, given, "a group")
            finally:
                optimizer.state, optimizer.param_groups = defaultdict(dict), bare

    def as_parameters(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Leaves as the class knows them, which may ask whether they require a gradient.

        With `differentiable=True` torch's classes record their writes, which a leaf that does forbids.
        """
        if self.hyper.get("differentiable") or not can_write_in_place():
            return list(leaves)
        return [leaf if leaf.is_inference() else leaf.requires_grad_() for leaf in leaves]

    def _check_unchanged(self, layout: Layout, before: Sequence[Mapping[str, Any]]) -> None:
        """Raises TypeError where an update has changed what is kept nowhere."""
        kept = [[slot.key for slot in slots] for slots in layout.groups]
        name = layout.unchanged.found(layout.template, before, kept)
        if name is not None:
            remedy = "Let its step assign the entry in each update." if "group" in name else ""
            refuse(self.cls, f"{name} that an update changes, and not the first one", remedy)

    def _follow(self, param: Tensor, own: Tensor) -> None:
        """Writes to a parameter where the class has given its own another memory, as `p.data = ...` does."""
        if own is param or type(param) not in (Tensor, Parameter) or own.data_ptr() == param.data_ptr():
            return
        if own.shape != param.shape or own.dtype != param.dtype:
            refuse(self.cls, f"{own.dtype} of shape {tuple(own.shape)} in place of a parameter of {param.dtype}")
        param.copy_(own)

    def _written(self, found: Mapping[str, Any], slots: list[Slot], tensors: Mapping[str, Tensor], what: str) -> None:
        keys = [slot.key for slot in slots]
        if set(found) != set(keys):
            refuse(self.cls, f"{sorted(found)} in {what} after an update, and {sorted(keys)} before")
        for slot in slots:
            if not slot.write(found[slot.key], tensors):
                refuse(self.cls, f"a value of another kind than before at {slot.key!r} in {what}")

    def built(self, leaves: Sequence[Tensor], members: list[list[int]], hypers: list[Hyper]) -> torch.optim.Optimizer:
        """The imperative optimizer before its first step."""
        start = torch.zeros((), dtype=torch.int32)
        groups = []
        for places, hyper in zip(members, hypers, strict=True):
            own = {name: value for name, value in hyper.items() if value is not self.hyper.get(name)}
            groups.append({"params": [leaves[place] for place in places], **_first(own, start)})
        one = len(groups) == 1 and len(groups[0]) == 1
        make: Any = self.cls
        optimizer = make(groups[0]["params"] if one else groups, **_first(self.hyper, start))
        for name in [name for hyper in hypers for name, value in hyper.items() if _moves(value)]:
            if any([name not in group for group in optimizer.param_groups]):
                raise ValueError(
                    f"{name}: found a schedule, which {self.cls.__name__} keeps under another name, expected one for "
                    f"any of {sorted(optimizer.defaults)}. Pass a number."
                )
        if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers step in this mode alone
            optimizer.train()
        return optimizer

    def grouped(self, params: Sequence[Tensor], paths: Sequence[str]) -> tuple[list[list[int]], list[Hyper]]:
        """The places of each group and its hyperparameters, in the order of the first parameters."""
        if self.groups is None:
            return [list(range(len(params)))], [self.hyper]
        members: list[list[int]] = []
        own: list[Hyper] = []
        for index, (path, param) in enumerate(zip(paths, params, strict=True)):
            hyper = self.groups(path, param)
            if not isinstance(hyper, Mapping):
                raise TypeError(
                    f"groups: found {type(hyper).__name__} for {path!r}, expected a dict of hyperparameters. "
                    "Return {} for a parameter that has no others than all have."
                )
            place = next((i for i, other in enumerate(own) if _same(other, hyper)), len(own))
            if place == len(own):
                own.append(dict(hyper))
                members.append([])
            members[place].append(index)
        return members, [{**self.hyper, **hyper} for hyper in own]


def set_schedules(groups: Sequence[dict[str, Any]], hypers: Sequence[Hyper], count: Tensor) -> None:
    """Gives each group the values that its schedules have after a number of updates."""
    for group, hyper in zip(groups, hypers, strict=True):
        for name, value in hyper.items():
            if _moves(value):
                now: Any = _resolved(value, count, group)
                kept = isinstance(group[name], Tensor) and not isinstance(now, Tensor)
                group[name] = torch.full_like(group[name], float(now)) if kept else now


def laid_out(value: Any, param: Tensor) -> Any:
    """A value; where it is a tensor of the parameter's shape, in the memory layout of the parameter.

    A fused kernel goes through its tensors as they lie in memory, whatever their strides.
    """
    if type(value) is Tensor and value.is_contiguous() and type(param) is Tensor and param.is_contiguous():
        return value
    if not isinstance(value, Tensor) or value.shape != param.shape or local(value).stride() == local(param).stride():
        return value
    return torch.empty_like(param, dtype=value.dtype).copy_(value)


def _signature(params: Sequence[Tensor], paths: Sequence[str]) -> Any:
    return tuple(paths), tuple([(type(param), param.shape, param.dtype, param.device) for param in params])


def _same(some: Hyper, others: Hyper) -> bool:
    return set(some) == set(others) and all(
        [value is others[name] or (_is_plain(value) and value == others[name]) for name, value in some.items()]
    )


def _is_plain(value: Any) -> bool:
    return not any([isinstance(part, Tensor) for part in (value if isinstance(value, (tuple, list)) else [value])])


def _moves(value: Any) -> bool:
    """Whether a hyperparameter is a function of the count, or a tuple with one."""
    return any(map(callable, value)) if isinstance(value, (tuple, list)) else callable(value)


def _first(hyper: Hyper, start: Tensor) -> dict[str, Any]:
    return {name: _resolved(value, start, {}) if _moves(value) else value for name, value in hyper.items()}


def _resolved(value: Any, count: Tensor, group: Mapping[str, Any]) -> Any:
    """A hyperparameter at a count: a number, or a tensor where the optimizer takes it to the device."""
    if isinstance(value, (tuple, list)):
        return tuple([_resolved(part, count, group) for part in value])
    if not callable(value):
        return value
    now: Any = value(count)
    if not isinstance(now, Tensor):
        return check_finite_number(now, "the schedule's value")
    on_device = group.get("capturable") or group.get("fused") or len([*levels(now)]) > 1
    return now if on_device and not host_readable(now) else now.item()
