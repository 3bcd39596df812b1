"""How long a loan lasts: what a forward borrowed is given back when the backward that may recompute it is done."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from functional_amp.innermost import Innermost
from functional_amp.mode import in_graph

P = ParamSpec("P")
R = TypeVar("R")


class _Loans(list[Callable[[], None]]):
    """What the calls of a thread have to give back, while a `lending` function runs."""


_open = Innermost[_Loans]()


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
        if in_graph() or _open.now() is not None:
            return function(*args, **kwargs)
        with _open.entered(_Loans()) as loans:
            result = function(*args, **kwargs)
        # What a call that raises has borrowed is dropped, and made anew: its error is the one to be seen.
        for give_back in loans:
            give_back()
        return result

    return wrapped


def kept(give_back: Callable[[], None]) -> bool:
    """Has `give_back` called when the outermost `lending` function returns; False where none runs."""
    loans = _open.now()
    if loans is None:
        return False
    loans.append(give_back)
    return True
