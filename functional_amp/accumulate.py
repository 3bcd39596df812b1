"""Gradient accumulation: the addition of ScaledGrads, and the windows of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from functional_amp.backward import ScaledGrads, check_scaled
from functional_amp.checks import check_number
from functional_amp.scaler import check_finite
from functional_amp.transform import stage
from functional_amp.tree import (
    check_leaf,
    check_structure,
    flatten_tensors,
    is_differentiable,
    like,
    paths,
    widened,
    with_fields,
)

T = TypeVar("T")


@stage
def accumulate(total: ScaledGrads | None, grads: ScaledGrads, *, where: Tensor | None = None) -> ScaledGrads:
    """Adds the gradients of one more micro-batch; the addition of the monoid of `ScaledGrads`.

        tree = total.tree + grads.tree * (total.scale / grads.scale);  weight = total.weight + grads.weight

    so that `unscale` gives the weighted mean, whatever the length of the window. Commutative and
    associative up to rounding; None is its identity.

    Args:
        total: the sum so far, or None at the start of a window (nothing is allocated for it).
        grads: what is added. A missing gradient (None) adds nothing to its leaf.
        where: 0-dim bool tensor; where False, the micro-batch is dropped with its weight. The
            default keeps it, so that a non-finite micro-batch makes the window non-finite.

    Returns:
        The new sum, its tree in float32 (float64 and complex leaves keep their dtype) and its
        scale that of `total`.

    Raises:
        TypeError: for anything else than ScaledGrads, leaves that are no tensors, a `where` that
            is no bool tensor, leaves whose dtypes do not accumulate in the same one.
        ValueError: for trees of different structure, shapes or devices, a `where` that is not 0-dim.

    >>> import torch
    >>> first = ScaledGrads(torch.tensor([8.0]), scale=8.0, weight=1.0)
    >>> second = ScaledGrads(torch.tensor([48.0]), scale=16.0, weight=1.0)
    >>> accumulate(first, second)
    ScaledGrads(tree=tensor([32.]), scale=tensor(8.), weight=tensor(2.))
    """
    check_scaled(grads, "accumulate: grads")
    if where is not None:
        check_finite(where, "where")
        if where.dim() != 0:
            raise ValueError(
                f"where: found shape {tuple(where.shape)}, expected a 0-dim flag: one for the micro-batch. "
                "Reduce it with torch.all."
            )
    flat = flatten_tensors(grads.tree, "grads")
    added_leaves = [widened(leaf) for leaf in flat.leaves]
    added_weight = grads.weight if where is None else torch.where(where, grads.weight, 0)
    if total is None:
        leaves = [_where(where, leaf, None) for leaf in added_leaves]
        return with_fields(grads, tree=flat.unflatten(leaves), weight=added_weight)

    check_scaled(total, "accumulate: total")
    total_flat = flatten_tensors(total.tree, "total")
    check_structure(grads.tree, flat, total.tree, total_flat, "grads", "total")
    ratio = None if grads.scale is total.scale else total.scale / grads.scale
    leaves = []
    for index, (leaf, old) in enumerate(zip(added_leaves, map(widened, total_flat.leaves), strict=True)):
        if leaf is not None and old is not None:
            _check_addable(leaf, old, lambda index=index: paths(total.tree)[index])
        if leaf is None or not is_differentiable(leaf):
            leaves.append(old)
            continue
        leaf = leaf if ratio is None else leaf * like(ratio, leaf)
        leaves.append(_where(where, leaf if old is None else old + leaf, old))
    return with_fields(total, tree=flat.unflatten(leaves), weight=total.weight + added_weight)


def _where(condition: Tensor | None, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """`new` where the condition holds (None: always), else `old` (None: zero)."""
    if condition is None or not is_differentiable(new):
        return new
    return torch.where(like(condition, new), new, torch.zeros_like(new) if old is None else old)


def _check_addable(leaf: Tensor, old: Tensor, path: Callable[[], str]) -> None:
    check_leaf(leaf, old, path, "grads", "total", dtype=True)
    if leaf.device != old.device:
        raise ValueError(
            f"grads: found device {leaf.device} at {path()!r}, expected {old.device} as in total. "
            "Move one of them with .to(device) first: accumulate moves nothing by itself."
        )


def windows(loader: Iterable[T], n: int) -> Iterator[list[T]]:
    """Groups a loader's micro-batches into windows for `step`.

    Args:
        loader: any iterable of micro-batches.
        n: micro-batches of a window, >= 1.

    Yields:
        Lists of n micro-batches; the last is shorter where the loader ends early. None is lost.

    Raises:
        TypeError, ValueError: at the call, for an n that is no int or below 1, a loader that is no
            iterable of micro-batches.

    >>> list(windows([1, 2, 3], 2))
    [[1, 2], [3]]
    """
    check_number(n, "n", "an int: the micro-batches of a window", integer=True)
    if n < 1:
        raise ValueError(f"n: found {n}, expected at least 1: a window without micro-batches has no gradient.")
    if isinstance(loader, (Mapping, str)) or not isinstance(loader, Iterable):
        raise TypeError(
            f"loader: found {type(loader).__name__}, expected an iterable of micro-batches. "
            "Pass a DataLoader or a list of micro-batches."
        )
    micro_batches = iter(loader)
    return iter(lambda: list(islice(micro_batches, n)), [])
