"""What an optimizer of torch.optim keeps: found by one step on copies.

Each value is taken down when the optimizer first assigns it, before the update changes it. The gradient is NaN: what
is NaN then, or assigned once and not written to after that, is begun by the first step itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor

from functional_amp.dtypes import is_differentiable
from functional_amp.engine.random import all_generators_kept
from functional_amp.engine.sharded import is_sharded
from functional_amp.optim.slots import Slot, kept, slot_of
from functional_amp.optim.unchanged import Unchanged, attributes, frozen_attributes, frozen_entries, mentioned
from functional_amp.torch_private import is_wrapper, levels, storage_key, torch_pytree, unwrapped


class Kept(NamedTuple):
    """A state as lists: the tensors of each parameter and of each group by name, and which parameters have begun."""

    params: list[dict[str, Tensor]]
    groups: list[dict[str, Tensor]]
    begun: list[Tensor]

    def tensors(self) -> list[Tensor]:
        """All in one list: name by name, and of one name in the order of the parameters."""
        columns = [entry[name] for name in columns_of(self.params) for entry in self.params if name in entry]
        return columns + [entry[name] for entry in self.groups for name in sorted(entry)] + self.begun


class Layout(NamedTuple):
    """What an optimizer keeps of given parameters.

    Attributes:
        template: the optimizer, without parameters and state.
        members: the places of the parameters of each group.
        hypers: the hyperparameters that each group was given.
        params: the slots of each parameter.
        begins: whether the state of a parameter is begun by its first step.
        groups: the slots of each group: what a step assigns there.
        kinds: shape and dtype of each tensor of the state.
        names: what the state calls them.
        unchanged: what its updates must leave as it was.
        lock: of the template, which one update at a time may use.
    """

    template: torch.optim.Optimizer
    members: list[list[int]]
    hypers: list[Mapping[str, Any]]
    params: list[list[Slot]]
    begins: list[bool]
    groups: list[list[Slot]]
    kinds: list[Any]
    names: list[str]
    unchanged: Unchanged
    lock: Lock

    def taken_apart(self, tensors: Sequence[Tensor]) -> Kept:
        """The state that `Kept.tensors` made a list of.

        Raises:
            ValueError: where it is not the state of these parameters.
        """
        found = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if found != self.kinds:
            pairs = [pair for pair in zip(found, self.kinds) if pair[0] != pair[1]]
            different = pairs[0] if pairs else (f"{len(found)} tensors", len(self.kinds))
            raise ValueError(
                f"opt_state: found {different[0]}, expected {different[1]} as {type(self.template).__name__} keeps it. "
                "Take it from the init of this very optimizer, and do not cast it."
            )
        waiting = iter(tensors)
        names = [[name for slot in slots for name in slot.names] for slots in self.params]
        params: list[dict[str, Tensor]] = [{} for _ in names]
        for column in columns_of(names):
            for entry, of_one in zip(params, names, strict=True):
                if column in of_one:
                    entry[column] = next(waiting)
        groups = [{name: next(waiting) for name in sorted([n for slot in s for n in slot.names])} for s in self.groups]
        return Kept(params, groups, list(waiting))


def names_of(columns: Iterable[str], groups: Sequence[Iterable[str]]) -> list[str]:
    """The names of what is kept of parameters and of groups, in one order."""
    return [*sorted(columns), *[f"{place}.{name}" for place, group in enumerate(groups) for name in sorted(group)]]


def columns_of(entries: Iterable[Iterable[str]]) -> list[str]:
    """The names that any of the entries has."""
    return sorted({name for entry in entries for name in entry})


def trial(
    optimizer: torch.optim.Optimizer,
    leaves: Sequence[Tensor],
    members: list[list[int]],
    hypers: list[Mapping[str, Any]],
) -> tuple[Layout, Kept]:
    """Steps an optimizer once, and gives what it keeps and what that was at first.

    Args:
        optimizer: as it was made, on `leaves`; it is used up.
        leaves: copies of the parameters.
        members, hypers: the places among the leaves of each group, and its hyperparameters.

    Raises:
        TypeError: where the step raises, or where the optimizer keeps something that is no tensor and no number.
    """
    given: Any = optimizer
    states = [_Recorder(given.state.get(leaf, {})) for leaf in leaves]
    made = [bool(state) for state in states]
    groups = [_Recorder(group) for group in given.param_groups]
    given.state = defaultdict(dict, zip(leaves, states, strict=True))
    given.param_groups = list(groups)
    before, entries = frozen_attributes(given), list(map(frozen_entries, groups))
    for leaf in leaves:
        leaf.grad = torch.full_like(leaf, math.nan)
    try:
        with all_generators_kept():
            given.step()
            once = frozen_attributes(given)
            if _switched(before, once):  # what a first step turns over for good
                given.step()
    except Exception as error:
        raise TypeError(
            f"from_torch: {type(given).__name__} raised {type(error).__name__} in a trial step: {error}. Expected an "
            "optimizer that steps from dense gradients, without a closure. Use one that does."
        ) from error
    _refuse_changes(given, {**before, **_switched(before, once)}, entries)
    _refuse_strangers(given, leaves)
    params, begins = [_slots(given, state) for state in states], [any(map(s.begun_by_step, s)) for s in states]
    kept_of_groups = [_slots(given, group, assigned=True) for group in groups]
    if any([begun and early for begun, early in zip(begins, made, strict=True)]):
        refuse(given, "a state that begins twice: when the optimizer is made, and at the first gradient")
    first = Kept(
        [_encoded(state, slots) for state, slots in zip(states, params, strict=True)],
        [_encoded(group, slots) for group, slots in zip(groups, kept_of_groups, strict=True)],
        [torch.zeros((), dtype=torch.bool) for begun in begins if begun],
    )
    kinds = [(tensor.shape, tensor.dtype) for tensor in first.tensors()]
    given.state = defaultdict(dict)
    given.param_groups = [{**group, "params": []} for group in groups]
    names = names_of(columns_of(first.params), first.groups)
    return Layout(given, members, hypers, params, begins, kept_of_groups, kinds, names, Unchanged(given), Lock()), first


def refuse(optimizer: type[torch.optim.Optimizer] | torch.optim.Optimizer, found: str, remedy: str = "") -> NoReturn:
    """Raises TypeError: what is kept can't be followed."""
    name = optimizer.__name__ if isinstance(optimizer, type) else type(optimizer).__name__
    raise TypeError(
        f"from_torch: found {found} ({name}), expected tensors and numbers in the state of each "
        f"parameter, and numbers in groups. {remedy or 'Write an Optimizer(init, update) for it.'}"
    )


class _Recorder(dict[str, Any]):
    """A dict that takes down what each of its keys was first, and which were assigned."""

    def __init__(self, given: Mapping[str, Any]):
        super().__init__(given)
        self.first = {key: kept(value) for key, value in given.items() if key != "params"}
        self.assigned: set[str] = set()
        self._born: dict[str, tuple[Any, int]] = {}

    def begun_by_step(self, key: str) -> bool:
        """Whether the first value of a key came from the update itself, and not from before it."""
        value, version = self._born.get(key, (None, 0))
        if value is None:
            return False
        first = self.first[key]
        return _has_nan(first) or (self[key] is value and _version(value) == version and not _written(first, value))

    def __setitem__(self, key: str, value: Any) -> None:
        self.assigned.add(key)
        if key not in self.first:
            self.first[key], self._born[key] = kept(value), (value, _version(value))
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *given: Any, **more: Any) -> None:
        for key, value in dict(*given, **more).items():
            self[key] = value


def _slots(optimizer: torch.optim.Optimizer, record: _Recorder, *, assigned: bool = False) -> list[Slot]:
    """How each value is kept; with `assigned`, of those alone that the step assigned or wrote to."""
    slots = []
    for key, after in record.items():
        first = record.first.get(key)
        if key == "params" or (assigned and key not in record.assigned and not _written(first, after)):
            continue
        if assigned and first is None and not isinstance(after, Tensor):
            continue  # None is a choice that is left to the first step, which makes it for good
        slot = slot_of(key, first, after)
        if slot is None:
            refuse(optimizer, f"a {type(after).__name__} at {key!r}")
        slots.append(slot)
    return slots


def _written(first: Any, after: Any) -> bool:
    """Whether a tensor has other elements than at first; fused kernels move no version counter."""
    if not isinstance(after, Tensor) or is_wrapper(after):
        return False
    return not torch.equal(unwrapped(first), unwrapped(after))


def _encoded(record: _Recorder, slots: list[Slot]) -> dict[str, Tensor]:
    """The first values as tensors. One that began from a gradient is zero: it is not used."""
    tensors: dict[str, Tensor] = {}
    for slot in slots:
        value, after = record.first[slot.key], record[slot.key]
        if isinstance(after, Tensor) and not isinstance(value, Tensor):  # a number or None, which became a tensor
            value = torch.full_like(after, 0 if value is None else value)
        if record.begun_by_step(slot.key):
            value = torch.zeros_like(value) if isinstance(value, Tensor) else value and type(value)(0)
        tensors.update(slot.encoded(value))
    return tensors


def _version(value: Any) -> int:
    """How often a tensor was written to; one of an inference mode does not tell."""
    if not isinstance(value, Tensor) or value.is_inference():
        return 0
    return max([level._version for level in levels(value)])


def _has_nan(value: Any) -> bool:
    if not is_differentiable(value):
        return False
    plain = unwrapped(value)
    if is_sharded(plain):
        plain = cast(Any, plain).to_local()
    return not is_wrapper(plain) and bool(plain.isnan().any())


def _switched(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, bool]:
    return {k: v for k, v in after.items() if isinstance(v, bool) and v is not before.get(k)}


def _refuse_changes(optimizer: Any, before: Mapping[str, Any], entries: Sequence[Mapping[str, Any]]) -> None:
    """Raises for what a step changes where it is kept nowhere: attributes, and what is written into an entry."""
    after = frozen_attributes(optimizer)
    for name in {**before, **after}:
        if name not in before or name not in after or before[name] != after[name]:
            refuse(optimizer, f"an attribute {name!r} that a step changes")
    for group, given in zip(optimizer.param_groups, entries, strict=True):
        for key, value in frozen_entries(group).items():
            if key in given and value != given[key]:
                refuse(optimizer, f"a {type(group[key]).__name__} at {key!r} of a group that a step changes")


def _refuse_strangers(optimizer: Any, leaves: Sequence[Tensor]) -> None:
    """Raises for what an optimizer keeps outside the state of its parameters and groups, or at two places of it."""
    places = {id(leaf) for leaf in leaves}
    for key in optimizer.state:
        if id(key) not in places:
            refuse(optimizer, f"a state under {type(key).__name__} {key!r}, which is not a parameter")
    entries = {key: value for group in optimizer.param_groups for key, value in group.items() if key != "params"}
    for name, value in {**entries, **attributes(optimizer)}.items():
        if (
            name != "defaults"
            and name not in entries
            and any([isinstance(part, Tensor) for part in torch_pytree.tree_leaves(value)])
        ):
            refuse(optimizer, f"an attribute {name!r} that holds tensors")
        if mentioned(value, leaves, optimizer):
            refuse(optimizer, f"{name!r} that knows parameters as keys or by their id")
    kept_tensors = [value for state in optimizer.state.values() for value in state.values() if type(value) is Tensor]
    keys = [storage_key(unwrapped(tensor)) for tensor in (*kept_tensors, *leaves) if tensor.numel()]
    if len(set(keys)) < len(keys):
        refuse(optimizer, "one tensor at two places of its state")
