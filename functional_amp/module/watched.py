"""What a forward may change of what a module holds: containers, attributes, slots, and what only its bytes show."""

from __future__ import annotations

import copy
import pickle
import types
import weakref
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from functional_amp.module.reach import CONTAINERS, Slots, contents, is_object, pretty

_MISSING = object()
EVERY_CALL = 1 << 16
"""The most bytes of an array that are compared after every call; the first call compares them all."""


class Watched(NamedTuple):
    """A container that a forward may change, and what it held."""

    path: str
    container: Any
    namespace: bool
    """True for the attributes or the slots of an object, False for a list, a dict, a variable of a closure."""
    values: tuple[Any, ...]
    before: Any

    def changed(self) -> bool:
        values = contents(self.container)
        return len(values) != len(self.values) or not all(map(is_, values, self.values))

    def put_back(self) -> None:
        """Puts into the container what it held."""
        container, before = self.container, self.before
        if isinstance(container, types.CellType):
            container.cell_contents = before[0]
            return
        container.clear()
        container.update(before) if isinstance(container, (dict, set, Slots)) else container.extend(before)

    def changes(self) -> list[Change]:
        """Each place that holds something else now."""
        if not isinstance(self.before, dict):
            return [Change(self.path, False, self.before, contents(self.container))]
        found = []
        for key in {**self.before, **self.container}:
            before, now = self.before.get(key, _MISSING), self.container.get(key, _MISSING)
            if before is not now:
                name = f"{self.path}.{key}".removeprefix(".") if self.namespace else pretty(f".{self.path}[{key!r}]")
                found.append(Change(name, self.namespace, before, now))
        return found or [Change(self.path, False, self.before, self.container)]  # another order, or another key


class Change(NamedTuple):
    """What a forward left at a place: its name, what was there and what is there now."""

    name: str
    namespace: bool
    before: Any
    now: Any


class Bytes(NamedTuple):
    """An object that neither attributes nor slots describe, an array of numpy say, and the bytes that it had."""

    path: str
    obj: Any
    before: bytes

    def changed(self) -> bool:
        return fingerprint(self.obj) != self.before


def holders(path: str, obj: Any) -> list[Watched]:
    """What an object consists of that a forward may change."""
    if isinstance(obj, Tensor) or type(obj) in weakref.ProxyTypes:
        return []
    containers: list[tuple[Any, bool]] = [(obj, False)] if isinstance(obj, CONTAINERS) else []
    attributes = getattr(obj, "__dict__", None)
    if type(attributes) is dict:
        containers.append((attributes, True))
    if (slots := Slots(obj)).names:
        containers.append((slots, True))
    return [Watched(path, held, namespace, contents(held), _before(held)) for held, namespace in containers]


def hold(entries: Iterable[Watched], values: Mapping[str, Any]) -> None:
    """Puts values at the places of attributes, those that do not exist yet included."""
    places = {name.rpartition(".")[0] for name in values}
    for entry in entries:
        if not entry.namespace or entry.path not in places:
            continue
        for name, value in values.items():
            prefix, _, key = name.rpartition(".")
            if prefix != entry.path or (isinstance(entry.container, Slots) and key not in entry.container.names):
                continue
            if value is not _MISSING:
                entry.container[key] = value
            elif key in entry.container:
                del entry.container[key]


def opaque(path: str, obj: Any) -> Bytes | None:
    """The bytes of an object that has neither attributes nor slots, or is a buffer; None where there are none."""
    described = isinstance(obj, nn.Module) or not is_object(obj) or type(obj) in weakref.ProxyTypes
    if described or ((hasattr(obj, "__dict__") or Slots(obj).names) and not is_buffer(obj)):
        return None
    found = fingerprint(obj)
    return None if found is None else Bytes(path, obj, found)


def is_buffer(obj: Any) -> bool:
    """True for an array of numpy, a bytearray, an array.array, a value of ctypes."""
    try:
        with memoryview(obj):
            return True
    except Exception:  # not all that have a buffer can lend it: numpy's dates raise ValueError
        return False


def fingerprint(obj: Any) -> bytes | None:
    """The bytes of a buffer, else those that pickle gives, else None."""
    try:
        with memoryview(obj) as view:
            if "O" not in view.format:
                return view.tobytes()
    except Exception:
        pass  # no buffer, or one that can't be lent
    try:
        return pickle.dumps(obj)
    except Exception:  # a lock, a script function
        return None


def _before(container: Any) -> Any:
    if isinstance(container, Slots):
        return dict(container)
    return copy.copy(container) if isinstance(container, (dict, set)) else contents(container)
