"""Whether a loss reaches what torch.func differentiates it by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

from torch import Tensor

from functional_amp.mode import in_graph
from functional_amp.torch_private import levels, reaches_this_level

_reaching: WeakSet[Any] = WeakSet()
"""The loss functions that were seen to reach a leaf: what requires grad in a later call does so by the leaves."""


def reaches_any(leaves: Sequence[Tensor], scaled: Tensor, loss: Tensor, loss_fn: Any) -> bool:
    """Whether a loss inside `torch.func.grad` depends on one of the leaves.

    The graph is walked in the first call of a loss function, and in each where the loss is a leaf itself.
    """
    if not reaches_this_level(scaled):
        return False
    if in_graph():
        return True
    try:
        if loss_fn in _reaching and not loss.is_leaf:
            return True
        reached = _leads_to(scaled, leaves)
        if reached:
            _reaching.add(loss_fn)
    except TypeError:  # a callable that can not be hashed
        return _leads_to(scaled, leaves)
    return reached


def _leads_to(loss: Tensor, leaves: Sequence[Tensor]) -> bool:
    """Whether the graph has one of the leaves: that of `torch.tensor(loss.item(), requires_grad=True)` has another."""
    known, seen = {id(leaf) for leaf in leaves}, set()
    waiting: list[Any] = [level.grad_fn for level in levels(loss)]
    while waiting:
        node = waiting.pop()
        for after, _ in () if node is None else node.next_functions:
            if id(getattr(after, "variable", None)) in known:
                return True
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    return False
