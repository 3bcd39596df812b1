"""What an imperative optimizer must leave as it was, since it is kept nowhere: attributes, entries of groups."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from types import BuiltinFunctionType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, ModuleType)
_NOT_OWN = ("state", "param_groups")


def attributes(optimizer: Any) -> dict[str, Any]:
    """The attributes of an optimizer, in slots too, but for its state and groups."""
    slots = [name for cls in type(optimizer).__mro__ for name in _names(vars(cls).get("__slots__", ()))]
    found = {name: getattr(optimizer, name) for name in slots if hasattr(optimizer, name)}
    return {name: value for name, value in {**vars(optimizer), **found}.items() if name not in _NOT_OWN}


def _of_classes(optimizer: Any) -> dict[str, Any]:
    """What the optimizer's classes hold, but for functions and what Python keeps there."""
    own = takewhile(lambda cls: cls is not torch.optim.Optimizer, type(optimizer).__mro__)
    held = {f"{cls.__name__}.{name}": value for cls in own for name, value in vars(cls).items() if name[:2] != "__"}
    return {name: value for name, value in held.items() if not callable(value) and not hasattr(value, "__get__")}


def frozen(value: Any, seen: tuple[int, ...] = ()) -> Any:
    """A value as numbers, texts and tuples of them, which differ once something has been written into it."""
    if isinstance(value, _CONSTANT):
        return value
    if id(value) in seen or len(seen) > 8:
        return id(value)
    seen = (*seen, id(value))
    if isinstance(value, Tensor):
        return ("tensor", id(value), 0 if value.is_inference() else value._version)
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, Mapping):
        return tuple([(frozen(key, seen), frozen(part, seen)) for key, part in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value), *[frozen(part, seen) for part in value])
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset([frozen(part, seen) for part in value]))
    if isinstance(value, MethodType):
        return (frozen(value.__func__, seen), frozen(value.__self__, seen))
    if isinstance(value, FunctionType):
        return (id(value), *[frozen(part, seen) for part in _inside(value)])
    if isinstance(value, partial):
        return frozen((value.func, value.args, value.keywords), seen)
    if isinstance(value, (BuiltinFunctionType, torch.nn.Module)):
        return id(value)
    return (id(value), *[frozen(part, seen) for part in _parts(value)])


def frozen_attributes(optimizer: Any) -> dict[str, Any]:
    """What the optimizer and its classes hold, frozen. Tensors among the defaults are those of the groups."""
    held = {**_of_classes(optimizer), **attributes(optimizer)}
    held["defaults"] = {key: value for key, value in optimizer.defaults.items() if not isinstance(value, Tensor)}
    return {name: frozen(value, (id(optimizer),)) for name, value in held.items()}


def mentioned(value: Any, tensors: Iterable[Tensor], optimizer: Any) -> bool:
    """Whether a value knows one of the tensors: as a key, by its id, or inside a function."""
    ids = {id(tensor) for tensor in tensors}
    return any([isinstance(part, int) and part in ids for part in _flat(frozen(value, (id(optimizer),)))])


class Unchanged:
    """What is compared after each update.

    Args:
        optimizer: as it is before its first update here.

    Attributes that can not be written into are compared by identity, all in a microsecond; others by what they hold.
    """

    def __init__(self, optimizer: Any):
        self._attributes, self._frozen = attributes(optimizer), frozen_attributes(optimizer)
        self._slotted = len(self._attributes) + len(_NOT_OWN) != len(vars(optimizer))
        self._deep = {name for name, value in self._attributes.items() if name != "defaults" and _is_deep(value)}
        self._defaults = dict(optimizer.defaults)
        self._entries = list(map(frozen_entries, optimizer.param_groups))

    def found(self, optimizer: Any, before: Sequence[Mapping[str, Any]], kept: Sequence[Sequence[str]]) -> str | None:
        """What an update has changed.

        Args:
            optimizer: after the update.
            before: the entries of its groups before the update.
            kept: the keys of each group that are kept elsewhere.
        """
        now = attributes(optimizer) if self._slotted else vars(optimizer)
        for name in now:
            if name not in self._attributes and name not in _NOT_OWN:
                return f"an attribute {name!r}"
        for name, old in self._attributes.items():
            if name in now and now[name] is old and name not in self._deep:
                continue
            if name not in now or frozen(now[name], (id(optimizer),)) != self._frozen[name]:
                return f"an attribute {name!r}"
        name = _other_entry(self._defaults, optimizer.defaults, ())
        if name is not None:
            return f"a default {name!r}"
        for old, group, own, deep in zip(before, optimizer.param_groups, kept, self._entries, strict=True):
            name = _other_entry(old, group, own)
            name = next((key for key, value in deep.items() if frozen(group[key]) != value), None) if deep else name
            if name is not None:
                return f"an entry {name!r} of a group"
        return None


def _other_entry(before: Mapping[str, Any], after: Mapping[str, Any], kept: Sequence[str]) -> str | None:
    """The key of an entry that is another one than before; `kept` are those that may be."""
    if len(before) != len(after):
        return next((key for key in {**before, **after} if key not in before or key not in after), None)
    for key, value in after.items():
        old = before.get(key)
        if value is old or key in kept:
            continue
        if isinstance(value, Tensor) or isinstance(old, Tensor) or value != old:
            return key
    return None


def _names(slots: Any) -> list[str]:
    return [slots] if isinstance(slots, str) else [name for name in slots if name not in ("__dict__", "__weakref__")]


def frozen_entries(group: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group that may be written into, frozen; tensors are kept elsewhere."""
    return {key: frozen(v) for key, v in group.items() if key != "params" and not isinstance(v, Tensor) and _is_deep(v)}


def _is_deep(value: Any) -> bool:
    """Whether something may be written into a value; torch's own hooks are empty dicts."""
    if isinstance(value, tuple):
        return any(map(_is_deep, value))
    return not isinstance(value, _CONSTANT) and not (isinstance(value, Mapping) and not value)


def _inside(function: FunctionType) -> Iterator[Any]:
    """What a function holds: variables of the function around it, attributes, defaults."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            yield None
    yield vars(function)
    yield function.__defaults__


def _parts(value: Any) -> Iterator[Any]:
    """What an object of an unknown class holds: what it is pickled as, else its attributes."""
    cls = type(value)
    if isinstance(value, GeneratorType):
        yield value.gi_frame and (value.gi_frame.f_lasti, value.gi_frame.f_locals)
        return
    if cls.__reduce__ is not object.__reduce__ or cls.__reduce_ex__ is not object.__reduce_ex__:
        try:
            yield value.__reduce_ex__(2)
            return
        except (TypeError, ValueError, AttributeError, NotImplementedError):  # a lock, a file
            pass
    yield getattr(value, "__dict__", None)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, frozenset)):
        for part in value:
            yield from _flat(part)
    else:
        yield value
