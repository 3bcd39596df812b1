"""Gradient accumulation: the addition of ScaledGrads, the plain sum of two, and the windows of a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from functional_amp.checks import check_flag, check_number
from functional_amp.dtypes import is_differentiable, like, widened
from functional_amp.engine.storage import FRESH
from functional_amp.mode import in_graph, stage
from functional_amp.registry import with_fields
from functional_amp.stages.addition import added
from functional_amp.tree import check_leaf, check_structure, flatten, flatten_tensors, paths
from functional_amp.values.grads import ScaledGrads, check_scaled, denominator

T = TypeVar("T")


@stage
def accumulate(total: ScaledGrads | None, grads: ScaledGrads, *, where: Tensor | None = None) -> ScaledGrads:
    """Adds the gradients of one more micro-batch; the addition of the monoid of `ScaledGrads`.

        tree = total.tree + grads.tree * (total.scale / grads.scale);  weight = total.weight + grads.weight

    so that `unscale` gives the weighted mean, whatever the length of the window. Commutative and
    associative up to rounding; None is its identity. `add` gives the plain sum of two gradients.

    Args:
        total: the sum so far, or None at the start of a window (nothing is allocated for it).
        grads: what is added. A missing gradient (None) adds nothing to its leaf.
        where: 0-dim bool tensor; where False, the micro-batch is dropped with its weight. The
            default keeps it, so that a non-finite micro-batch makes the window non-finite.

    Returns:
        The new sum, its tree in float32 (float64 and complex leaves keep their dtype) and its
        scale that of `total`.

    Raises:
        TypeError: for anything else than ScaledGrads, leaves that are not tensors, a `where` that
            is not a bool tensor, leaves whose dtypes do not accumulate in the same one.
        ValueError: for trees of different structure, shapes or devices, a `where` that is not 0-dim.

    >>> import torch
    >>> first = ScaledGrads(torch.tensor([8.0]), scale=8.0, weight=1.0)
    >>> second = ScaledGrads(torch.tensor([48.0]), scale=16.0, weight=1.0)
    >>> accumulate(first, second)
    ScaledGrads(tree=tensor([32.]), scale=tensor(8.), weight=tensor(2.))
    """
    check_scaled(grads, "accumulate: grads")
    if where is not None:
        check_flag(where, "where")
    weight = grads.weight if where is None else torch.where(where, grads.weight, 0)
    if total is None:
        flat = flatten_tensors(grads.tree, "grads")
        leaves = [_where(where, widened(leaf), None) for leaf in flat.leaves]
        return with_fields(grads, tree=flat.unflatten(leaves), weight=weight)
    check_scaled(total, "accumulate: total")
    ratio = None if grads.scale is total.scale else total.scale / grads.scale
    return with_fields(_summed(total, grads, ratio, where), weight=total.weight + weight)


@stage
def add(total: ScaledGrads | None, grads: ScaledGrads) -> ScaledGrads:
    """Adds two gradients: of two losses of one step, or of parts of one sum.

        gradient(add(a, b)) = gradient(a) + gradient(b)

    where `accumulate` gives their weighted mean. Whatever their scales and weights.

    Args:
        total: a gradient, or None.
        grads: what is added. A missing gradient (None) adds nothing to its leaf.

    Returns:
        The sum, in the units of `total`; in those of `grads` where the weight of `total` is 0.

    Raises:
        TypeError, ValueError: as `accumulate` does.

    >>> import torch
    >>> first = ScaledGrads(torch.tensor([8.0]), scale=8.0, weight=1.0)
    >>> second = ScaledGrads(torch.tensor([96.0]), scale=16.0, weight=2.0)
    >>> add(first, second)  # 1 + 3
    ScaledGrads(tree=tensor([32.]), scale=tensor(8.), weight=tensor(1.))
    """
    check_scaled(grads, "add: grads")
    if total is None:
        return accumulate(None, grads)
    check_scaled(total, "add: total")
    empty = total.weight == 0
    units = with_fields(
        total,
        scale=torch.where(empty, grads.scale, total.scale),
        weight=torch.where(empty, grads.weight, total.weight),
    )
    return _summed(units, grads, denominator(units) / denominator(grads), None)


def _summed(total: ScaledGrads, grads: ScaledGrads, ratio: Tensor | None, where: Tensor | None) -> ScaledGrads:
    flat, sums = flatten_tensors(grads.tree, "grads"), flatten_tensors(total.tree, "total")
    check_structure(grads.tree, flat, total.tree, sums, "grads", "total")
    leaves = []
    for index, (leaf, old) in enumerate(zip(flat.leaves, map(widened, sums.leaves), strict=True)):
        if leaf is not None and old is not None:
            _check_addable(leaf, old, lambda index=index: paths(total.tree)[index])
        if leaf is None or not is_differentiable(leaf):
            leaves.append(old)
        else:
            leaves.append(_where(where, added(old, leaf, 1, ratio, FRESH), old))
    return with_fields(total, tree=flat.unflatten(leaves))


def _where(condition: Tensor | None, new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """`new` where the condition holds (None: always), else `old` (None: zero)."""
    if condition is None or not is_differentiable(new):
        return new
    return torch.where(like(condition, new), new, torch.zeros_like(new) if old is None else old)


def _check_addable(leaf: Tensor, old: Tensor, path: Callable[[], str]) -> None:
    check_leaf(widened(leaf) if leaf.dtype is not old.dtype else leaf, old, path, "grads", "total", dtype=True)
    if leaf.device != old.device:
        raise ValueError(
            f"grads: found device {leaf.device} at {path()!r}, expected {old.device} as in total. "
            "Move one of them with .to(device) first: accumulate moves nothing by itself."
        )


class Windows(Generic[T]):
    """The windows of a loader: an iterator, with a length where the loader has one."""

    def __init__(self, loader: Iterable[T], n: int):
        self._n, self._left = n, _length(loader)
        self._micro_batches = iter(loader)
        self._given, self._ended = 0, False

    def __iter__(self) -> Iterator[list[T]]:
        if self._ended and self._given:
            raise RuntimeError(
                f"windows: found an iterator that gave its {self._given} windows, expected one that has some left: a "
                "second epoch over it would be empty. Call windows(loader, n) anew for each epoch."
            )
        return self

    def __next__(self) -> list[T]:
        window = list(islice(self._micro_batches, self._n))
        if not window:
            self._ended = True
            raise StopIteration
        self._given += 1
        if self._left is not None:
            self._left = max(self._left - len(window), 0)
        return window

    def __len__(self) -> int:
        if self._left is None:
            raise TypeError("windows: the loader has no length, so its windows have none. Pass a list or a DataLoader.")
        return -(-self._left // self._n)

    def __length_hint__(self) -> int:
        return 0 if self._left is None else len(self)


def _length(loader: Iterable[Any]) -> int | None:
    """How many micro-batches a loader says it has; None for a DataLoader of a stream, whose `__len__` raises."""
    try:
        return len(loader) if isinstance(loader, Sized) else None
    except (TypeError, NotImplementedError):
        return None


def is_window(value: Any) -> bool:
    """Whether a value may be a window: an iterable that is not one batch (a tensor, an array, a dict, a NamedTuple)."""
    one = isinstance(value, (Tensor, Mapping, str, bytes)) or hasattr(value, "_fields") or hasattr(value, "__array__")
    return not one and isinstance(value, Iterable)


def alike(micro_batches: Iterable[T]) -> Iterable[T]:
    """The micro-batches of a window, after a look whether they are of one kind; shapes may differ.

    Raises:
        TypeError: while they are taken, for one of another structure or other dtypes than the first.
    """
    if in_graph():  # dynamo follows no generator
        return micro_batches
    return _alike(micro_batches)


def _alike(micro_batches: Iterable[T]) -> Iterator[T]:
    first: Any = None
    for index, micro_batch in enumerate(micro_batches):
        flat = flatten(micro_batch)
        first = flat if first is None else first
        pairs = [(leaf, old) for leaf, old in zip(flat.leaves, first.leaves, strict=False) if _differ(leaf, old)]
        if pairs or flat.spec != first.spec:
            found, expected = [leaf.dtype for leaf in pairs[0]] if pairs else (flat.spec, first.spec)
            raise TypeError(
                f"micro_batches: found {found} at {index}, expected {expected} as at 0. A batch is no window: for the "
                "[x, y] of a DataLoader write step(state, [[x, y]]). Where the micro-batches do differ, write "
                "step.accumulate(state, micro_batch) for each, then step.update(state)."
            )
        yield micro_batch


def _differ(leaf: Any, other: Any) -> bool:
    both = isinstance(leaf, Tensor) and isinstance(other, Tensor)
    return both and leaf.dtype != other.dtype and leaf.dim() + other.dim() > 0  # a 0-dim tensor is as good as a number


def windows(loader: Iterable[T], n: int) -> Windows[T]:
    """Groups a loader's micro-batches into windows for `step`.

    A window is the micro-batches of one optimizer step: `accumulation_steps` in the imperative loop.

    Args:
        loader: any iterable of micro-batches.
        n: micro-batches of a window, >= 1.

    Returns:
        An iterator of lists of n micro-batches; the last is shorter where the loader ends early. None
        is lost. `len` is the windows that are left, where the loader has a length. One is for one epoch: a loop over
        one that is at its end raises.

    Raises:
        TypeError, ValueError: at the call, for an n that is not an int or below 1, a loader that is not an
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
    return Windows(loader, int(n))
