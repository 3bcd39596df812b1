"""Compiling the halves of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from functional_amp.backward import Backend

P = ParamSpec("P")
R = TypeVar("R")

Compile: TypeAlias = bool | Mapping[str, Any]
"""Whether to compile, or the options of `torch.compile`."""


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
    graph = torch.compile(function, **{"fullgraph": True, **({} if options is True else options)})
    if backend != "autograd":
        return graph

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return graph(*args, **kwargs)

    return wrapped
