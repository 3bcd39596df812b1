"""Templates: copies of a module into which tensors are laid for one call, and which are looked at after it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from itertools import repeat
from operator import is_
from typing import Any

from torch import Tensor, nn

from functional_amp.module.copies import detach_recurrent
from functional_amp.module.reach import KEPT, Absent, Unread, absent, attributes, walk
from functional_amp.module.watched import EVERY_CALL, Change, hold, holders, is_buffer, opaque
from functional_amp.torch_private import hooks_made

Tensors = dict[str, Tensor]

_MACHINERY = {name for name in vars(nn.Module()) if name != "training"}
_HOOKS = {name for name in _MACHINERY if "hook" in name}
_MISSING = object()
_MARKING = threading.RLock()
"""Other threads may lay the same tensors in; a template may be collected meanwhile."""


class Template:
    """One copy of the module.

    Attributes:
        slots: the plan: which tensor goes where, as (container, key, name).
    """

    def __init__(
        self,
        master: nn.Module,
        memo: Mapping[int, Any],
        names: Mapping[int, str],
        marks: Mapping[str, Mapping[str, Any]],
    ):
        self.module: nn.Module = copy.deepcopy(master, dict(memo))
        detach_recurrent(self.module)
        self.slots = slots(self.module, names)
        # Of tied places the first is the last here, so that what lies in it counts.
        self._placeholders = [(container, key, name, container[key]) for container, key, name in reversed(self.slots)]
        first = {name: (container, key) for container, key, name in reversed(self.slots)}
        places = [(container, key, *first[name], name) for container, key, name in self.slots]
        self._ties = [(c, key, held, at, name) for c, key, held, at, name in places if c is not held or key != at]
        self._untied: list[str] = []
        self._parameters = {name for _, _, name, held in self._placeholders if isinstance(held, nn.Parameter)}
        self._marks, self._marked, self._marked_more = marks, [], []
        objects = list(walk(self.module))
        for entry in [entry for path, obj in objects for entry in holders(path, obj)]:
            for key, value in list(entry.container.items()) if entry.namespace else ():
                if type(value) is Unread:
                    entry.container[key] = unread(value.place)
        self._watched = [entry for path, obj in objects for entry in holders(path, obj)]
        self._bytes = [entry for path, obj in objects if (entry := opaque(path, obj))]
        self._small = [entry for entry in self._bytes if len(entry.before) <= EVERY_CALL and is_buffer(entry.obj)]
        # What is compared after every call: what torch's own machinery and the slots hold is left out.
        placed = {(id(container), key) for container, key, _ in self.slots}
        hooks = [entry for entry in self._watched if entry.path.rpartition(".")[2] in _HOOKS]
        self._hooks, self._hooked, self._hooks_made = [e.container for e in hooks], [len(e.container) for e in hooks], 0
        unhooked = {id(entry.container) for entry in hooks if not entry.container}
        entries = [entry for entry in self._watched if id(entry.container) not in unhooked]
        named = [
            e for e in entries if type(e.container) is dict and (e.namespace or e.path.rpartition(".")[2] in _MACHINERY)
        ]
        dicts = {id(entry.container) for entry in named}
        self._dicts = [entry.container for entry in named]
        self._others = [entry for entry in entries if id(entry.container) not in dicts]  # whose order counts too
        self._sizes = list(map(len, self._dicts))
        compared = [
            (entry.container, key, value)
            for entry in named
            for key, value in entry.container.items()
            if (id(entry.container), key) not in placed and not (entry.namespace and key in _MACHINERY)
        ]
        self._owners, self._keys, self._values = map(list, zip(*compared))

    def place(self, tensors: Tensors) -> None:
        """Lays the tensors in; to `isinstance`, those of parameters are `nn.Parameter` as long as they lie here."""
        for container, key, name in self.slots:
            container[key] = tensors[name]
        with _MARKING:
            for name in self._parameters:
                own: Any = tensors[name].__dict__
                count = own.get("_is_param", 0)
                if count is not True:  # a parameter of torch's own that holds other tensors
                    own["_is_param"] = count + 1
                    self._marked.append(own)
            for name, marks in self._marks.items():
                own = tensors[name].__dict__
                if own.keys().isdisjoint(marks):
                    own.update(marks)
                self._marked_more.append((own, marks))
        self._hooks_made = hooks_made()

    def take_out(self) -> dict[str, Any]:
        """Puts the placeholders back. Gives what lay there (None if it was deleted); of tied places, in the first."""
        after: dict[str, Any] = {}
        self._untied = [name for c, key, first, at, name in self._ties if _held(c, key) is not _held(first, at)]
        for container, key, name, placeholder in self._placeholders:
            if isinstance(container, list):
                after[name] = _held(container, key)
                container[key : key + 1] = [placeholder]  # it may be shorter now
            else:
                after[name] = container.get(key)
                container[key] = placeholder
        self._unmark()
        return after

    def _unmark(self) -> None:
        with _MARKING:
            for own in self._marked:
                if count := own.pop("_is_param", 1) - 1:
                    own["_is_param"] = count
            for own, marks in self._marked_more:
                for key in marks if "_is_param" not in own else ():
                    if own.get(key) is marks[key]:  # what the forward has set stays, and is found
                        del own[key]
        self._marked_more.clear()
        self._marked.clear()

    def __del__(self) -> None:
        self._unmark()  # of a call that raised

    def unchanged(self) -> bool:
        """True if the containers hold what they held, once the tensors have been taken out."""
        return (
            not self._untied
            and (hooks_made() == self._hooks_made or list(map(len, self._hooks)) == self._hooked)
            and list(map(len, self._dicts)) == self._sizes
            and all(map(is_, map(dict.get, self._owners, self._keys, repeat(_MISSING)), self._values))
            and not any(entry.changed() for entry in self._others)
            and not any(entry.changed() for entry in self._small)
        )

    def changes(self) -> list[Change]:
        """What the containers hold that they did not, once the tensors have been taken out.

        Raises:
            RuntimeError: where bytes were written, which nothing puts back, or one of several tied places.
        """
        if self._untied:
            self.put_back()
            refuse_untied(self._untied)
        written = [(type(entry.obj).__name__, entry.path) for entry in self._bytes if entry.changed()]
        if written:
            self.put_back()
            raise RuntimeError(
                f"apply: found that the forward writes to the {written[0][0]} at {written[0][1]!r}, expected state in "
                "buffers: the next call would not find it. Register a buffer in __init__ and use apply.with_buffers."
            )
        return [change for entry in self._watched if entry.changed() for change in entry.changes()]

    def put_back(self) -> None:
        """Puts into the containers what they held."""
        for entry in self._watched:
            if entry.changed():
                entry.put_back()

    def hold(self, values: Mapping[str, Any]) -> None:
        """Puts other values at the places of attributes, until they are put back."""
        hold(self._watched, values)

    def run(self, method: str, args: Any, kwargs: Any) -> Any:
        """Calls the module, or one of its methods."""
        try:
            return (getattr(self.module, method) if method else self.module)(*args, **kwargs)
        except RuntimeError as error:
            if "inside functorch transform" in str(error):  # assigning to x.data
                raise RuntimeError(f"apply: {error} Use backend='autograd'.") from error
            raise


def unread(place: str) -> Absent:
    """Stands for what an attribute holds that no call may read."""
    return absent(place, KEPT)


def refuse_untied(names: list[str]) -> None:
    if names:
        raise RuntimeError(
            f"apply: found that the forward assigns one of several places of {sorted({*names})} anew, expected one "
            "tensor at all of them: the next call lays one in. Write in place, self.n.add_(1); and keep the order of a "
            "list in a buffer."
        )


def _held(container: Any, key: Any) -> Any:
    """What lies in a slot; None if it is gone."""
    if isinstance(container, list):
        return container[key] if key < len(container) else None
    return container.get(key)


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
