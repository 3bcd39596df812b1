"""Copies of a module: what they share with it, and what would make one of them another module."""

from __future__ import annotations

import collections.abc
import contextvars
import copy
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from functional_amp.module.reach import Closed, attributes, children, is_atom, is_object, pretty, walk

_TORCHS_OWN = {
    nn.Module: {"_compiled_call_impl"},
    nn.RNNBase: {"_flat_weight_refs", "flatten_parameters"},
    torch.fx.GraphModule: {"_graph", "_code", "_lineno_map", "_prologue_start", "_tracer_cls", "_codegen"},
}
"""What classes of torch make anew in a copy, by class."""
_COPYING = {"__deepcopy__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__"}
_HIDDEN = (torch.Generator, random.Random, queue.SimpleQueue, contextvars.ContextVar)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_NUMPYS = {"Generator", "RandomState", "BitGenerator"}


def shared(module: nn.Module) -> dict[int, Any]:
    """What all copies share, by id, as the memo of deepcopy.

    These are locks and script functions, which deepcopy refuses and which have no attributes of their own; functions
    that `from_module` has given; and what functions, methods of compiled code and weak references lead to, which
    deepcopy does not enter: what a module shares with a hook of its own stays one object. What else of Python's own
    has no attributes is refused by deepcopy: a queue or a context variable would count in each copy.
    """
    found: dict[int, Any] = {}
    leading: list[Any] = []
    for _, obj in walk(module):
        if isinstance(obj, (types.FunctionType, types.BuiltinMethodType, weakref.ref)):
            leading.append(obj)
        elif isinstance(obj, (torch.jit.ScriptFunction, Closed, *_LOCKS)) or (
            is_object(obj)
            and not isinstance(obj, nn.Module)
            and type(obj).__module__ not in sys.stdlib_module_names
            and not attributes(obj)
            and not can_be_copied(obj, {})
        ):
            found[id(obj)] = obj
    reached = [obj for _, obj in walk(leading, lambda obj: isinstance(obj, nn.Module)) if obj is not leading]
    return found | {id(obj): obj for obj in reached if not isinstance(obj, (Tensor, nn.Module))}


def can_be_copied(obj: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(obj, memo)
    except Exception:
        return False
    return True


def memory(obj: Any) -> tuple[int, int] | None:
    """The first and the last byte of a plain tensor, a storage or an array; None for what has none to compare."""
    if isinstance(obj, memoryview):
        return memory(obj.obj)
    if isinstance(obj, torch.UntypedStorage):
        return None if obj.device.type == "meta" else (obj.data_ptr(), obj.data_ptr() + obj.nbytes())
    if type(obj) in (Tensor, nn.Parameter) and obj.layout is torch.strided and not obj.is_meta:
        start, shape, size = obj.data_ptr(), obj.shape, obj.element_size()
        strides = [stride * size for stride in obj.stride()]
    elif hasattr(type(obj), "__array_interface__"):
        start, shape, strides, size = obj.__array_interface__["data"][0], obj.shape, obj.strides, obj.itemsize
    else:
        return None
    if 0 in shape:
        return None
    steps = [(length - 1) * stride for length, stride in zip(shape, strides, strict=True)]
    return start + sum(min(step, 0) for step in steps), start + sum(max(step, 0) for step in steps) + size


def detach_recurrent(module: nn.Module) -> None:
    """Lets recurrent layers forget which tensors they read: their list of weights is laid in as any list is.

    Where a weight is computed, torch makes the list anew in each call, and would move the weights in memory.
    """
    for layer in module.modules():
        if isinstance(layer, nn.RNNBase):
            computed = {*getattr(layer, "parametrizations", ())}
            refs: Any = [_gone if name in computed else None for name in layer._flat_weights_names]
            layer._flat_weight_refs = refs
            if computed:
                layer.flatten_parameters = _gone


def lists_of_weights(module: nn.Module) -> set[str]:
    """The lists of recurrent layers that a forward makes anew or fills, before it reads them."""
    return {
        f"{place}.{name}".removeprefix(".")
        for place, layer in module.named_modules()
        if isinstance(layer, nn.RNNBase) and not set(layer._flat_weights_names) <= layer._parameters.keys()
        for name in ("_flat_weights", "_flat_weight_refs")
    }


def _gone() -> None:
    """Answers as a weak reference to what is gone; and does nothing."""


def refuse_moving(module: nn.Module, copied: nn.Module) -> None:
    """Raises for what each use moves on, where the copies share nothing of it."""
    theirs = {id(obj) for _, obj in walk(module)}
    for path, obj in walk(copied, lambda obj: id(obj) in theirs and is_object(obj)):
        if _moves_on(obj):
            raise TypeError(
                f"module: found a {type(obj).__name__} at {path!r}, expected nothing that each use moves on: two calls "
                "would differ. Keep a list and a buffer that counts; draw from torch's own generator, which seed= sets."
            )


def refuse_tables(module: nn.Module, places: Mapping[int, str], copies: Mapping[int, Any]) -> None:
    """Raises for tables that a parameter or an `id()` is the key of: in a copy they are others.

    Args:
        places: where the parameters and buffers are, by id.
        copies: the copy of each object, by id.
    """
    ids = {key for key, value in copies.items() if id(value) != key}
    ids |= {span[0] for _, obj in walk(module) if isinstance(obj, Tensor) and (span := memory(obj))}
    for path, obj in walk(module):
        for key in obj if isinstance(obj, (dict, set, frozenset)) else ():
            if isinstance(key, Tensor) and id(key) in places:
                raise TypeError(
                    f"module: found {places[id(key)]!r} as a key of {path!r}, expected names: each call lays other "
                    "tensors in, which are other keys. Use the names of the parameters as keys, or a list."
                )
        for step, child in children(obj):
            if type(child) is int and child in ids:
                raise TypeError(
                    f"module: found the id or the address of a part of the module at {path + step!r}, expected names "
                    "or the parts themselves: those of a copy are others. Use the layer itself as the key, or its name."
                )


def refuse_loss(module: nn.Module, copies: Mapping[int, Any]) -> None:
    """Raises where a class says itself how it is copied, and its copy holds something else.

    Args:
        copies: the copy of each object, by id.
    """
    objects = list(walk(module))
    own = sorted({type(obj).__name__ for _, obj in objects if _copies_itself(type(obj))})
    if not own:
        return
    for path, obj in objects:
        copied = copies.get(id(obj), obj)
        trusted = is_object(obj) and not isinstance(obj, nn.Module) and not _copies_itself(type(obj))
        if copied is obj or trusted or isinstance(obj, (Tensor, set, frozenset)):
            continue
        ours, theirs = dict(_kept(obj)), dict(_kept(copied))
        for step in {**ours, **theirs}:
            if step not in ours or step not in theirs or not _is_copy(ours[step], theirs[step], copies):
                place = pretty((f".{path}" if path else "") + step)
                raise TypeError(
                    f"module: found that copy.deepcopy gives something else at {place!r}, expected "
                    f"what the module holds. Remove __deepcopy__, __getstate__ and __reduce__ from {', '.join(own)}, "
                    "or let them copy every attribute with the memo."
                )


def _copies_itself(kind: type) -> bool:
    """True if neither Python nor torch says how objects of a class are copied."""
    makers = [base for base in kind.__mro__ if not _COPYING.isdisjoint(vars(base))]
    return any(base.__module__.split(".")[0] not in {"torch", *sys.stdlib_module_names} for base in makers)


def _kept(obj: Any) -> Iterator[tuple[str, Any]]:
    made = {f".{name}" for kind, names in _TORCHS_OWN.items() if isinstance(obj, kind) for name in names}
    return ((step, child) for step, child in _numbered(obj) if step not in made)


def _numbered(obj: Any) -> list[tuple[str, Any]]:
    """The children of an object; the keys of a dict, which share one step, are told apart."""
    found = children(obj)
    return [(f"{step}[{i}]" if step == ".keys()" else step, child) for i, (step, child) in enumerate(found)]


def _is_copy(ours: Any, theirs: Any, copies: Mapping[int, Any]) -> bool:
    if copies.get(id(ours), ours) is theirs:
        return True
    return is_atom(ours) and type(ours) is type(theirs) and bool(ours == theirs)


def _moves_on(obj: Any) -> bool:
    """True for iterators, generators, those of random numbers included, and what keeps values out of sight."""
    of_numpy = [kind.__name__ for kind in type(obj).__mro__ if kind.__module__.startswith("numpy.random")]
    hidden = isinstance(obj, _HIDDEN) or not _NUMPYS.isdisjoint(of_numpy)
    return hidden or (isinstance(obj, collections.abc.Iterator) and not isinstance(obj, nn.Module))
