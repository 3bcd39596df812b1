"""Of which parameters an open window holds the copies in the compute dtype."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from functional_amp.registry import with_fields
from functional_amp.tree import flatten
from functional_amp.values.state import TrainState

_sources: Any = WeakIdKeyDictionary()
"""By the first copy of a window, the parameters that its copies were made of."""


def remember_copied(state: TrainState) -> None:
    """Takes note of the parameters of a state whose window is open."""
    first = _first_copy(state)
    if first is not None:
        leaves = flatten(state.params).leaves
        _sources[first] = [None if leaf is None else weakref.ref(leaf) for leaf in leaves]


def with_current_copies(state: TrainState) -> TrainState:
    """The state, with copies of the parameters that it has now: they may have been replaced in mid-window.

    A window that nobody remembers, of a checkpoint, say, is taken at its word.
    """
    first = _first_copy(state)
    sources = None if first is None else _sources.get(first)
    if sources is None:
        return state
    window: Any = state.window
    flat, copies = flatten(state.params), flatten(window.params)
    now = [None if ref is None else ref() for ref in sources]
    if len(now) == len(flat.leaves) and all([old is leaf for old, leaf in zip(now, flat.leaves, strict=True)]):
        return state
    if flat.spec != copies.spec:  # the open window is refused by its structure
        return with_fields(state, window=with_fields(window, params=state.params))
    leaves = [
        leaf.to(copy.dtype) if isinstance(leaf, Tensor) and isinstance(copy, Tensor) else leaf
        for leaf, copy in zip(flat.leaves, copies.leaves, strict=True)
    ]
    return with_fields(state, window=with_fields(window, params=flat.unflatten(leaves)))


def _first_copy(state: TrainState) -> Tensor | None:
    copies = None if state.window is None else state.window.params
    return None if copies is None else next((leaf for leaf in flatten(copies).leaves if leaf is not None), None)
