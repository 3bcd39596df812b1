"""What a module reaches: a walk over its objects, and the placeholder that stands where a tensor was taken out."""

from __future__ import annotations

import collections
import functools
import pathlib
import re
import types
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from functional_amp.torch_private import below_dispatch_modes, below_subclasses

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, type, slice, property, type(Ellipsis)),
    *(types.ModuleType, types.CodeType, types.GenericAlias, pathlib.PurePath),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
CONTAINERS = (dict, list, set, collections.deque, types.CellType)
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinMethodType, functools.partial)
_FOLLOWED = (*CONTAINERS, tuple, frozenset, *_FUNCTIONS, weakref.ref)
# What a tensor without numbers answers truly. Its device is not among it: it has none.
KNOWN = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "layout")}
KNOWN |= {Tensor.dim, Tensor.size, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__hash__}
KNOWN |= {Tensor.__repr__, Tensor.__len__}
_OF_ALL = {Tensor.__hash__, Tensor.__repr__}

KEPT = (
    "before it is written, expected the forward to write it first: it holds something of an earlier call, in another "
    "mode, method or branch. Register a buffer in __init__ and use apply.with_buffers, or pass it as an argument."
)


class Closed:
    """What is the same in all copies, and is not entered: a function that keeps nothing between calls."""


class Absent(Tensor):
    """Stands where a tensor was taken out. Reading its numbers raises an error that names the place."""

    place: str
    why: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_OF_ALL if any(isinstance(a, Absent) and a.why == KEPT for a in args) else KNOWN):
            with below_subclasses():
                return func(*args, **(kwargs or {}))
        for _, found in walk((args, kwargs)):
            if isinstance(found, Absent):
                raise RuntimeError(f"apply: found a use of {found.place!r} ({_name(func)}) {found.why}")
        raise AssertionError("unreachable: an Absent is among the arguments")

    def __deepcopy__(self, memo: Any) -> Absent:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        with below_subclasses():
            shape, dtype = torch.Size(self.shape), self.dtype
        return absent, (self.place, self.why, shape, dtype, isinstance(self, nn.Parameter))


def absent(place: str, why: str, shape: Any = (), dtype: Any = torch.float32, parameter: bool = False) -> Absent:
    """A placeholder for the tensor of a place; `why` ends the sentence of its error."""
    with below_dispatch_modes():  # under fake tensors too it is a real placeholder
        made = Tensor._make_subclass(Absent, torch.empty(shape, dtype=dtype, device="meta"), False)
    made.place, made.why = place, why
    if parameter:
        made._is_param = True  # what isinstance(x, nn.Parameter) asks for
    return made


class Unread:
    """Stands in the module that graphs are traced with, where a forward keeps what no later call may read."""

    def __init__(self, place: str):
        self.place = place

    def __bool__(self) -> bool:
        raise RuntimeError(f"apply: found a use of {self.place!r} {KEPT}")

    def __eq__(self, other: object) -> bool:
        return bool(self)

    def __hash__(self) -> int:
        return hash(bool(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python and the compiler ask of every object
            raise AttributeError(name)
        return bool(self)

    def __deepcopy__(self, memo: Any) -> Unread:
        return self


def walk(root: Any, stop: Callable[[Any], bool] = lambda obj: False) -> Iterator[tuple[str, Any]]:
    """Every object below the root once, with the shortest path to it. What holds `stop` is not entered.

    Classes, globals and code are not entered; closures, defaults and weak references are.
    """
    seen, todo = {id(root): root}, collections.deque([("", root)])
    while todo:
        path, obj = todo.popleft()
        yield pretty(path), obj
        if obj is not root and stop(obj):
            continue
        for step, child in children(obj):
            if not is_atom(child) and id(child) not in seen and not _is_torchs(child):
                seen[id(child)] = child
                todo.append((path + step, child))


def _is_torchs(obj: Any) -> bool:
    """A mesh or a group of torch.distributed, or the compiler: they keep for themselves what they have found out."""
    machinery = type(obj).__module__.startswith(("torch.distributed.", "torch._dynamo."))
    return machinery and not isinstance(obj, (nn.Module, Tensor))


def children(obj: Any) -> list[tuple[str, Any]]:
    """What an object holds, each with the step of the path that leads there."""
    found: list[tuple[str, Any]] = []
    if isinstance(obj, Closed):
        return []
    if isinstance(obj, types.MethodType):
        return [(".__self__", obj.__self__), (".__func__", obj.__func__)]
    if isinstance(obj, types.BuiltinMethodType):
        return [(".__self__", obj.__self__)]
    if isinstance(obj, types.CellType):
        return [("", value) for value in contents(obj)]
    if isinstance(obj, weakref.ref):
        return [(" (a weak reference)", obj())]
    if isinstance(obj, dict):
        found = [(f"[{key!r}]", value) for key, value in obj.items()] + [(".keys()", key) for key in obj]
    elif isinstance(obj, (list, tuple, set, frozenset, collections.deque)):
        found = [(f"[{index}]", value) for index, value in enumerate(obj)]
    found += [(f".{key}", value) for key, value in attributes(obj).items()]
    if isinstance(obj, types.FunctionType):
        cells = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
        found += [(f" (closure over {name})", cell) for name, cell in cells]
        found += [(" (default argument)", value) for value in (obj.__defaults__, obj.__kwdefaults__)]
    elif isinstance(obj, functools.partial):
        found += [(".func", obj.func), (".args", obj.args), (".keywords", obj.keywords)]
    elif not isinstance(obj, (nn.Module, Tensor)):
        found += [(f".{name}", value) for name, value in Slots(obj).items()]
    return found


class Slots(MutableMapping[str, Any]):
    """The `__slots__` of an object that hold something, as a mapping that writes to them, frozen ones included."""

    def __init__(self, obj: Any):
        kinds = [vars(kind) for kind in type(obj).__mro__ if "__slots__" in vars(kind)]
        self._obj = obj
        self.names = [key for kind in kinds for key, value in kind.items() if type(value) is types.MemberDescriptorType]

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._obj, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._obj, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._obj, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def attributes(obj: Any) -> dict[str, Any]:
    """The `__dict__` of an object; empty for one that has none, and for tensors and proxies."""
    if isinstance(obj, Tensor) or type(obj) in weakref.ProxyTypes:
        return {}
    found = getattr(obj, "__dict__", None)
    return found if type(found) is dict else {}


def contents(container: Any) -> tuple[Any, ...]:
    """The keys and the values in a container, in its order."""
    if isinstance(container, (dict, Slots)):
        return (*container.keys(), *container.values())
    if isinstance(container, types.CellType):
        try:
            return (container.cell_contents,)
        except ValueError:  # an empty cell
            return ()
    return tuple(container)


def is_atom(obj: Any) -> bool:
    """True for what never changes and leads nowhere: a number, a string, a class, a function of compiled code."""
    return isinstance(obj, _ATOMS) or (isinstance(obj, types.BuiltinMethodType) and isinstance(obj.__self__, _ATOMS))


def is_object(obj: Any) -> bool:
    """True for what is neither a container nor a function nor a tensor: an object with attributes."""
    return not isinstance(obj, (*_FOLLOWED, Tensor))


def pretty(path: str) -> str:
    """A path as one would write it: `l.weight`, not `._modules['l']._parameters['weight']`."""
    return re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", path).removeprefix(".")


def _name(func: Any) -> str:
    return getattr(func, "__name__", str(func))
