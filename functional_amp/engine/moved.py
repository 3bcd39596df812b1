"""Which buffers the forwards of a loss have moved: a loss that does not hand them out would leave them as they were."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from functional_amp.innermost import Innermost
from functional_amp.mode import in_graph
from functional_amp.torch_private import comptime


class _Names(set[str]):
    """What the forwards of one loss have moved."""


_names = Innermost[_Names]()
_traced: set[str] = set()
"""Those of the loss that the compiler traces: it traces one at a time."""


@contextmanager
def moves() -> Iterator[set[str]]:
    """Collects the names of buffers that forwards on this thread move meanwhile."""
    if in_graph():
        comptime()(_begin_trace)
        yield set()
        return
    with _names.entered(_Names()) as names:
        yield names


def note_moves(names: Iterable[str]) -> None:
    """Says that a forward has moved buffers, and given its caller the new ones."""
    noted = _names.now()
    if noted is not None:
        noted.update(names)


def note_traced_moves(names: Iterable[str]) -> None:
    """The same of a forward that is traced."""
    _traced.update(names)


def refuse_moves(moved: set[str]) -> None:
    """Raises RuntimeError where a loss that hands out no buffers has moved some."""
    if in_graph():
        comptime()(_refuse_traced)
    elif moved:
        raise RuntimeError(_message(moved))


def _begin_trace(context: Any) -> None:
    _traced.clear()


def _refuse_traced(context: Any) -> None:
    if _traced:
        raise RuntimeError(_message(_traced))


def _message(moved: set[str]) -> str:
    return (
        f"loss_fn: found a forward that moved {sorted(moved)}, and a Loss without buffers, expected the new ones: the "
        "state would keep the old. Return Loss(value, buffers=new) with what apply.with_buffers gave, or "
        "Loss(value, buffers=buffers) where the old ones are to stay."
    )
