"""Compiling the halves of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, ParamSpec, TypeAlias, TypeVar, cast

import torch

from functional_amp.backward import Backend

P = ParamSpec("P")
R = TypeVar("R")

Compile: TypeAlias = bool | Mapping[str, Any]
"""Whether to compile, or the options of `torch.compile`."""


def with_own_code(function: Callable[P, R]) -> Callable[P, R]:
    """The same function with a code object of its own.

    The compiler keeps its graphs, of which it makes at most 8, with the code object: the wrappers
    that one `def` makes share them.
    """
    plain = cast(FunctionType, function)
    plain.__code__ = plain.__code__.replace()
    return function


def compiled(function: Callable[P, R], options: Compile, backend: Backend) -> Callable[P, R]:
    """The function compiled to one graph, or as it is where `options` is False.

    Raises:
        TypeError: for anything but a bool or a mapping from the names of options.
    """
    if not isinstance(options, (bool, Mapping)):
        raise TypeError(
            f"compile: found {type(options).__name__} {options!r}, expected True, False or the options of "
            "torch.compile as a dict, such as {'mode': 'max-autotune'}."
        )
    if options is False:
        return function

    @with_own_code
    @functools.wraps(function)
    def entry(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    graph = torch.compile(entry, **{"fullgraph": True, **({} if options is True else options)})
    if backend != "autograd":
        return graph

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return graph(*args, **kwargs)

    return wrapped
