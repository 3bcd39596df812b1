"""How long a loan lasts: what a forward borrowed is given back when the backward that may recompute it is done."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_OPEN = threading.local()
"""`loans`: what the calls of this thread have to give back, while a `lending` function runs."""


def lending(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps what is borrowed in a call of the function until it returns. It holds a forward and its backward.

    Activation checkpointing runs parts of the forward again in the backward: they must find what the
    forward found. Each thread has loans of its own; of nested calls the outermost counts.

    >>> given_back = []
    >>> @lending
    ... def forward_and_backward():
    ...     assert kept(lambda: given_back.append("a template"))
    ...     return list(given_back)
    >>> forward_and_backward(), given_back
    ([], ['a template'])
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or hasattr(_OPEN, "loans"):
            return function(*args, **kwargs)
        _OPEN.loans = []
        try:
            return function(*args, **kwargs)
        finally:
            loans = _OPEN.loans
            del _OPEN.loans
            for give_back in loans:
                give_back()

    return wrapped


def kept(give_back: Callable[[], None]) -> bool:
    """Has `give_back` called when the outermost `lending` function returns; False where none runs."""
    if not hasattr(_OPEN, "loans"):
        return False
    _OPEN.loans.append(give_back)
    return True
