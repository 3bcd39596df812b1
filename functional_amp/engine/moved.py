"""Which buffers the forwards of a loss have moved: a loss that does not hand them out would leave them as they were."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from functional_amp.mode import in_graph


class _Noting(threading.local):
    """Where this thread notes names: in the innermost loss that runs."""

    names: set[str] | None = None


_noting = _Noting()


@contextmanager
def moves() -> Iterator[set[str]]:
    """Collects the names of buffers that forwards on this thread move meanwhile. A graph collects none."""
    if in_graph():
        yield set()
        return
    outer, _noting.names = _noting.names, set()
    try:
        yield _noting.names
    finally:
        _noting.names = outer


def note_moves(names: Iterable[str]) -> None:
    """Says that a forward has moved buffers, and given its caller the new ones."""
    if _noting.names is not None:
        _noting.names.update(names)
