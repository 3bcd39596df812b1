"""What a loss function has frozen, and whether the backward that calls it can see that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from functional_amp.innermost import Innermost
from functional_amp.mode import in_graph

_NAME = "_functional_amp_frozen"
"""An attribute, so that functools.wraps takes it along."""


class _Frozen(list[Any]):
    """What a backward leaves undifferentiated while it calls a loss function."""


_frozen = Innermost[_Frozen]()


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
    with _frozen.entered(_Frozen(frozen_by(loss_fn))):
        return loss_fn(*args)


def hidden(predicate: Any) -> bool:
    """Whether a backward is calling that has not seen this predicate. In a graph nobody looks."""
    shown = None if in_graph() else _frozen.now()
    return shown is not None and predicate not in shown
