"""Which buffers the forwards of a loss have moved: a loss that does not hand them out would leave them as they were."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from functional_amp.mode import in_graph


class _Names(set[str]):
    """What the forwards of one loss have moved."""


class _Noting(threading.local):
    """The names of the innermost loss of this thread, held weakly: an interrupt anywhere ends them with the loss."""

    names: Callable[[], _Names | None] = staticmethod(lambda: None)


_noting = _Noting()


@contextmanager
def moves() -> Iterator[set[str]]:
    """Collects the names of buffers that forwards on this thread move meanwhile. A graph collects none."""
    if in_graph():
        yield set()
        return
    outer, names = _noting.names, _Names()
    _noting.names = weakref.ref(names)
    try:
        yield names
    finally:
        _noting.names = outer


def note_moves(names: Iterable[str]) -> None:
    """Says that a forward has moved buffers, and given its caller the new ones."""
    noted = _noting.names()
    if noted is not None:
        noted.update(names)
