"""Compiling the parts of a step."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from functional_amp.mode import settings
from functional_amp.torch_private import keeping_saved_tensor_hooks, tracing_autograd
from functional_amp.tree import PyTree, flatten

P = ParamSpec("P")
R = TypeVar("R")

Compile: TypeAlias = bool | Mapping[str, Any]
"""Whether to compile, or the options of `torch.compile`, and `unsafe_skip_guards`."""

SKIP_GUARDS = "unsafe_skip_guards"


def check_compile(options: Any) -> None:
    """Raises TypeError for anything but a bool or a mapping from the names of options."""
    if not isinstance(options, (bool, Mapping)):
        raise TypeError(
            f"compile: found {type(options).__name__} {options!r}, expected True, False or the options of "
            "torch.compile as a dict, such as {'mode': 'max-autotune'}."
        )


def skips_guards(options: Compile) -> bool:
    """Whether the opt-in that looks at no guard is chosen."""
    return isinstance(options, Mapping) and bool(options.get(SKIP_GUARDS, False))


def leaves_graphs(options: Compile) -> bool:
    """Whether a part of a loss may run outside the graph."""
    return isinstance(options, Mapping) and not options.get("fullgraph", True)


def with_own_code(function: Callable[P, R]) -> Callable[P, R]:
    """The same function with a code object of its own.

    The compiler keeps its graphs, of which it makes at most 8, with the code object: the wrappers
    that one `def` makes share them.
    """
    plain = cast(FunctionType, function)
    plain.__code__ = plain.__code__.replace()
    return function


def compiled(function: Callable[P, R], options: Compile) -> Callable[P, R]:
    """The function compiled to one graph, or as it is where `options` is False."""
    if options is False:
        return function

    @with_own_code
    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    given = {} if isinstance(options, bool) else {k: v for k, v in options.items() if k != SKIP_GUARDS}
    given = {"fullgraph": True, **given}
    if "mode" not in given:  # which torch.compile takes without options alone
        given["options"] = {"guard_filter_fn": guards_of_others, **(given.get("options") or {})}
    graph = torch.compile(entry, **given)

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        # Where a graph may be left, the backward stays outside, and the loss is compiled as it is without this library.
        with keeping_saved_tensor_hooks(), tracing_autograd() if given["fullgraph"] else nullcontext():
            return graph(*args, **kwargs)

    return wrapped


def guards_of_others(guards: Sequence[Any]) -> list[bool]:
    """Which guards are looked at in each call: all but those on this library's functions, classes and constants.

    They change only where somebody replaces the library's code in a running program. What it keeps in lists, dicts
    and sets may change, and stays guarded; so does all of torch that is reached through its modules: the loss may
    read the same.
    """
    return [not _is_own(guard.name) or isinstance(guard.value, (list, dict, set)) for guard in guards]


_PACKAGE = __name__.partition(".")[0]
_PLACE = re.compile(rf"\['__import_({_PACKAGE}_dot_\w+)'\]\.(\w+)")
"""A module of this package and an attribute of it, in the name of a guard."""
_CONSTANTS = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None), torch.dtype)


def _is_own(name: str) -> bool:
    """Whether a guard is on something that a module of this package has made, or on what belongs to that."""
    place = _PLACE.search(name)
    if place is None:
        return False
    value = getattr(sys.modules[place[1].replace("_dot_", ".")], place[2], None)
    if type(value) in _CONSTANTS:
        return True
    made = value if isinstance(value, (type, FunctionType)) else type(value)
    return made.__module__.partition(".")[0] == _PACKAGE


def signature(tree: PyTree) -> tuple[Any, ...]:
    """What a graph depends on where no guard is looked at: structure, kinds of leaves, torch's modes."""
    flat = flatten(tree)
    places: dict[int, int] = {}
    kinds = [
        (_kind(leaf), places.setdefault(id(leaf), index)) if isinstance(leaf, Tensor) else _named(leaf)
        for index, leaf in enumerate(flat.leaves)
    ]
    return flat.spec, kinds, settings()


def _kind(leaf: Tensor) -> tuple[Any, ...]:
    looks = leaf.shape, leaf.stride(), leaf.dtype, leaf.device, type(leaf)
    return *looks, leaf.requires_grad, leaf.is_inference(), leaf.is_conj(), leaf.is_neg()


def _named(leaf: Any) -> tuple[Any, ...]:
    return type(leaf), leaf if type(leaf) in _CONSTANTS else id(leaf)


def without_guards(skip: bool) -> AbstractContextManager[Any]:
    """A context in which graphs run without a look at their guards."""
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True) if skip else nullcontext()
