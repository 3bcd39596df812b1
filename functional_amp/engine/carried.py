"""Buffers that a forward leaves with a history, through which torch would let gradients of a later call flow."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from functional_amp.mode import in_graph

_carried = weakref.WeakValueDictionary[int, Tensor]()


def note_carried(buffers: Iterable[Tensor]) -> None:
    """Says that the next call would compute with these, history included."""
    _carried.update({id(buffer): buffer for buffer in buffers})


def refuse_carried(handed_out: list[Any], path: Callable[[int], str]) -> None:
    """Raises RuntimeError where a loss hands such a buffer out of the call that differentiates it."""
    if in_graph() or not _carried:
        return
    for index, leaf in enumerate(handed_out):
        if isinstance(leaf, Tensor) and _carried.get(id(leaf)) is leaf:
            raise RuntimeError(
                f"loss_fn: found that a forward leaves {path(index)!r} with a history, expected numbers alone: torch "
                "would let gradients of the next call flow through it, a state can not. Write self.name = "
                "(...).detach() in the forward; or hand out what is detached, "
                "Loss(value, buffers={name: b.detach() for name, b in new.items()})."
            )
