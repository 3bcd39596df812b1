"""What a loss function has frozen, and whether the backward that calls it can see that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from functional_amp.mode import in_graph

_NAME = "_functional_amp_frozen"
"""An attribute, so that functools.wraps takes it along."""


class _Calls(threading.local):
    """What the backward of this thread leaves undifferentiated while it calls a loss function; None outside."""

    frozen: tuple[Any, ...] | None = None


_calls = _Calls()


def show(loss_fn: Any, predicates: tuple[Any, ...]) -> None:
    """Writes to a loss function by which predicates it has frozen parameters."""
    setattr(loss_fn, _NAME, predicates)


def frozen_by(loss_fn: Any) -> tuple[Any, ...]:
    """The predicates that a loss function shows."""
    return getattr(loss_fn, _NAME, ())


def call(loss_fn: Callable[..., Any], *args: Any) -> Any:
    """The loss, during a backward that leaves alone what `loss_fn` shows as frozen."""
    if in_graph():
        return loss_fn(*args)
    before, _calls.frozen = _calls.frozen, frozen_by(loss_fn)
    try:
        return loss_fn(*args)
    finally:
        _calls.frozen = before


def hidden(predicate: Any) -> bool:
    """Whether a backward is calling that has not seen this predicate. In a graph nobody looks."""
    return not in_graph() and _calls.frozen is not None and predicate not in _calls.frozen
