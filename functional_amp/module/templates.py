"""Templates: copies of a module into which tensors are laid for one call, and which are looked at after it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn

from functional_amp.module.reach import CONTAINERS, absent, attributes, contents, is_object, pretty, walk

Tensors = dict[str, Tensor]

_MACHINERY = {name for name in vars(nn.Module()) if name != "training"}
_HOOKS = {name for name in _MACHINERY if "hook" in name}
_MISSING = object()


class Watched(NamedTuple):
    """A container that a forward may change, and what it held."""

    path: str
    container: Any
    namespace: bool
    """True for the attributes of an object, False for a list, a dict, a variable of a closure."""
    values: tuple[Any, ...]
    before: Any

    def changed(self) -> bool:
        values = contents(self.container)
        return len(values) != len(self.values) or not all(map(is_, values, self.values))


class Change(NamedTuple):
    """What a forward left at a place: its name, what was there and what is there now."""

    name: str
    namespace: bool
    before: Any
    now: Any


class Template:
    """One copy of the module.

    Attributes:
        slots: the plan: which tensor goes where, as (container, key, name).
    """

    def __init__(self, master: nn.Module, memo: Mapping[int, Any], names: Mapping[int, str], shared: set[int]):
        self.module: nn.Module = copy.deepcopy(master, dict(memo))
        for layer in self.module.modules():
            if isinstance(layer, nn.RNNBase):  # its own list of weights is among the slots
                layer._flat_weight_refs = [None] * len(layer._flat_weights)
        self.slots = slots(self.module, names)
        # Of tied places the first is the last here, so that what lies in it counts.
        self._placeholders = [(container, key, name, container[key]) for container, key, name in reversed(self.slots)]
        self._parameters = {name for _, _, name, held in self._placeholders if isinstance(held, nn.Parameter)}
        self._marked: list[dict[str, Any]] = []
        self._watched: list[Watched] = []
        for path, obj in walk(self.module, lambda obj: id(obj) in shared and is_object(obj)):
            container = obj if isinstance(obj, CONTAINERS) else attributes(obj)
            if (container is obj or container) and not (id(obj) in shared and is_object(obj)):
                before = copy.copy(container) if isinstance(container, (dict, set)) else contents(container)
                entry = Watched(path, container, container is not obj, contents(container), before)
                self._watched.append(entry)
        # What is compared after every call: what torch's own machinery and the slots hold is left out.
        placed = {(id(container), key) for container, key, _ in self.slots}
        entries = [entry for entry in self._watched if entry.path.rpartition(".")[2] not in _HOOKS]
        self._dicts = [entry.container for entry in entries if isinstance(entry.container, dict)]
        self._others = [entry for entry in entries if not isinstance(entry.container, dict)]
        self._sizes = list(map(len, self._dicts))
        compared = [
            (entry.container, key, value)
            for entry in entries
            if isinstance(entry.container, dict)
            for key, value in entry.container.items()
            if (id(entry.container), key) not in placed and not (entry.namespace and key in _MACHINERY)
        ]
        self._owners, self._keys, self._values = map(list, zip(*compared))

    def place(self, tensors: Tensors) -> None:
        """Lays the tensors in; to `isinstance`, those of parameters are `nn.Parameter` as long as they lie here."""
        for container, key, name in self.slots:
            container[key] = tensors[name]
        for name in self._parameters:
            marks: Any = tensors[name].__dict__
            if "_is_param" not in marks:
                marks["_is_param"] = True
                self._marked.append(marks)

    def take_out(self) -> dict[str, Any]:
        """Puts the placeholders back. Gives what lay there (None if it was deleted); of tied places, in the first."""
        after: dict[str, Any] = {}
        for container, key, name, placeholder in self._placeholders:
            after[name] = container[key] if isinstance(container, list) or key in container else None
            container[key] = placeholder
        self._unmark()
        return after

    def _unmark(self) -> None:
        for marks in self._marked:
            marks.pop("_is_param", None)
        self._marked.clear()

    def __del__(self) -> None:
        self._unmark()  # of a call that raised

    def unchanged(self) -> bool:
        """True if the containers hold what they held, once the tensors have been taken out. Hooks are not compared."""
        return (
            list(map(len, self._dicts)) == self._sizes
            and all(map(is_, map(dict.get, self._owners, self._keys), self._values))
            and not any(entry.changed() for entry in self._others)
        )

    def changes(self) -> list[Change]:
        """What the containers hold that they did not, once the tensors have been taken out."""
        return [change for entry in self._watched if entry.changed() for change in _changes(entry)]

    def put_back(self) -> None:
        """Puts into the containers what they held."""
        for entry in self._watched:
            if entry.changed():
                _fill(entry.container, entry.before)

    def seal(self, names: Iterable[str]) -> None:
        """Makes attributes unreadable, those that do not exist yet included."""
        for name in names:
            path, _, key = name.rpartition(".")
            for entry in self._watched:
                if entry.namespace and entry.path == path:
                    entry.container[key] = absent(name, "before it is written.")

    def run(self, method: str, args: Any, kwargs: Any) -> Any:
        """Calls the module, or one of its methods."""
        try:
            return (getattr(self.module, method) if method else self.module)(*args, **kwargs)
        except RuntimeError as error:
            if "inside functorch transform" in str(error):  # assigning to x.data
                raise RuntimeError(f"apply: {error} Use backend='autograd'.") from error
            raise


def registered(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer attribute once, submodules that stand at two names under the first."""
    return [
        (f"{prefix}.{name}" if prefix else name, tensor)
        for prefix, submodule in module.named_modules()
        for tensors in (submodule._parameters, submodule._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def slots(module: nn.Module, names: Mapping[int, str]) -> list[tuple[Any, Any, str]]:
    """Where tensors stand that have names: in attributes, and in every list and dict that the module reaches."""
    found: list[tuple[Any, Any, str]] = []
    for _, obj in walk(module):
        container = obj if isinstance(obj, (dict, list)) else attributes(obj)
        items = container.items() if isinstance(container, dict) else enumerate(container)
        found += [(container, key, names[id(value)]) for key, value in items if id(value) in names]
    return found


def _changes(entry: Watched) -> list[Change]:
    if not isinstance(entry.before, dict):
        return [Change(entry.path, False, entry.before, contents(entry.container))]
    found = []
    for key in {**entry.before, **entry.container}:
        before, now = entry.before.get(key, _MISSING), entry.container.get(key, _MISSING)
        if before is not now:
            name = f"{entry.path}.{key}".removeprefix(".") if entry.namespace else pretty(f".{entry.path}[{key!r}]")
            found.append(Change(name, entry.namespace, before, now))
    return found


def _fill(container: Any, values: Any) -> None:
    if hasattr(container, "cell_contents") or not hasattr(container, "clear"):
        container.cell_contents = values[0]
        return
    container.clear()
    container.update(values) if isinstance(container, (dict, set)) else container.extend(values)
