"""Compiling the parts of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch

from functional_amp.torch_private import keeping_saved_tensor_hooks, tracing_autograd

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

    They are a third of the guards of a small model, and change only where somebody replaces the library's code in a
    running program. What it keeps in lists, dicts and sets may change, and stays guarded.
    """
    return [_OWN not in guard.name or isinstance(guard.value, (list, dict, set)) for guard in guards]


_OWN = f"['__import_{__name__.partition('.')[0]}_dot_"
"""How the name of a guard begins that is reached through a module of this package."""


def without_guards(skip: bool) -> AbstractContextManager[Any]:
    """A context in which graphs run without a look at their guards."""
    return torch.compiler.set_stance("default", skip_guard_eval_unsafe=True) if skip else nullcontext()
