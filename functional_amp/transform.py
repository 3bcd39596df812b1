"""Whether a stage runs plainly or under an outer `torch.func` transform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]

P = ParamSpec("P")
R = TypeVar("R")


def transformed() -> bool:
    """True inside `torch.func.grad`, `vmap` and the other functorch transforms."""
    return _functorch.peek_interpreter_stack() is not None


def stage(function: Callable[P, R]) -> Callable[P, R]:
    """Keep the outputs of a pure function free of autograd history.

    `torch.func.grad` ignores a `no_grad` that surrounds it, so differentiation inside the
    stage is unaffected. Under an outer transform the stage stays differentiable.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if transformed():
            return function(*args, **kwargs)
        with torch.no_grad():
            return function(*args, **kwargs)

    return wrapped
