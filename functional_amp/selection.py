"""Choosing between trees, and taking one apart: select, split, merge."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import check_flag
from functional_amp.dtypes import like
from functional_amp.mode import stage
from functional_amp.tree import PyTree, check_leaf, check_structure, described, flatten, flatten_tensors, paths


@stage
def select(condition: Tensor, new: PyTree, old: PyTree, what: str = "select") -> PyTree:
    """`new` where the condition holds, else `old`, for whole trees at once and without a host read.

    Args:
        condition: 0-dim bool tensor.
        new: a pytree of tensors or None.
        old: a pytree of the same structure, shapes and dtypes.
        what: the name of the tree in error messages.

    Returns:
        A tree of the same structure. A leaf that is the same object in both is returned as it is.
        Selection is by `torch.where`: NaN on the side that is not taken does not leak.

    Raises:
        ValueError, TypeError: if the trees differ in structure, shape or dtype; the path is named.
            Also for a condition that is not a 0-dim bool tensor.

    >>> import torch
    >>> select(torch.tensor(False), {"w": torch.tensor([float("nan")])}, {"w": torch.tensor([1.0])})
    {'w': tensor([1.])}
    """
    check_flag(condition, "condition")
    new_flat, old_flat = flatten(new), flatten(old)
    check_structure(new, new_flat, old, old_flat, what, "the tree before")
    selected = []
    for index, (after, before) in enumerate(zip(new_flat.leaves, old_flat.leaves, strict=True)):
        if after is before:
            selected.append(after)
            continue

        def path(index: int = index) -> str:
            return paths(old)[index]

        if not (isinstance(after, Tensor) and isinstance(before, Tensor)):
            raise TypeError(
                f"{what}: found {described(after)} at {path()!r} where {described(before)} was before. "
                "Only tensors can be selected without a host read: keep counters and flags as 0-dim tensors."
            )
        check_leaf(after, before, path, what, "the tree before", dtype=True)
        selected.append(torch.where(like(condition, before), after, before))
    return new_flat.unflatten(selected)


def split(tree: PyTree, predicate: Callable[[str, Any], bool]) -> tuple[PyTree, PyTree]:
    """Splits a tree in two of the same structure, each with None at the other's leaves.

    Use it to say which leaves are trainable: differentiate the first tree, and merge both in the loss.

    Args:
        tree: a pytree of tensors.
        predicate: called with the path (`blocks.0.weight`) and the leaf; not for None.

    Returns:
        The tree of the leaves where the predicate holds, and the tree of the others.

    Raises:
        TypeError: for a leaf that is not a tensor (the path is named), a predicate that is not a function.

    >>> import torch
    >>> params = {"head": torch.ones(1), "body": torch.zeros(1)}
    >>> trainable, frozen = split(params, lambda path, leaf: path == "head")
    >>> trainable, frozen
    ({'head': tensor([1.]), 'body': None}, {'head': None, 'body': tensor([0.])})
    """
    if not callable(predicate):
        raise TypeError(f"predicate: found {described(predicate)}, expected a function `predicate(path, leaf)`.")
    flat = flatten_tensors(tree, "tree")
    chosen = [
        leaf is not None and bool(predicate(path, leaf)) for path, leaf in zip(paths(tree), flat.leaves, strict=True)
    ]
    return (
        flat.unflatten([leaf if keep else None for leaf, keep in zip(flat.leaves, chosen, strict=True)]),
        flat.unflatten([None if keep else leaf for leaf, keep in zip(flat.leaves, chosen, strict=True)]),
    )


def merge(*trees: PyTree) -> PyTree:
    """Puts together what `split` took apart: at each leaf, the first that is not None.

    Raises:
        ValueError: if the structures differ (the paths are named), or if no tree is given.

    >>> import torch
    >>> merge({"a": torch.ones(1), "b": None}, {"a": None, "b": torch.zeros(1)})
    {'a': tensor([1.]), 'b': tensor([0.])}
    """
    if not trees:
        raise ValueError("merge: found no tree, expected at least one. Pass the trees that split gave.")
    flats = [flatten(tree) for tree in trees]
    for tree, flat in zip(trees[1:], flats[1:], strict=True):
        check_structure(tree, flat, trees[0], flats[0], "merge", "the first tree")
    return flats[0].unflatten(
        [
            next((leaf for leaf in leaves if leaf is not None), None)
            for leaves in zip(*(flat.leaves for flat in flats), strict=True)
        ]
    )
