"""The mean of what a loss function hands out, over a window."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import is_number
from functional_amp.dtypes import accumulation_dtype, like
from functional_amp.tree import PyTree, check_leaf, check_structure, described, flatten, paths


def aux_sum(total: PyTree, aux: PyTree, weight: Tensor, *, first: bool) -> PyTree:
    """`total + weight * aux`, leaf by leaf; a weight of 0 leaves nothing behind, NaN or not.

    Args:
        total: the sum so far; unused for the first micro-batch of a window.
        aux: numbers and tensors of any kind of number, averaged in float32 (64-bit and complex leaves keep
            theirs), None among them.
        weight: 0-dim float32 tensor.

    Raises:
        TypeError: for a leaf that is neither; the path is named.
        ValueError: where micro-batches hand out different structures or shapes.
    """
    flat = flatten(aux)
    leaves = [None if leaf is None else _weighted(leaf, weight, aux, i) for i, leaf in enumerate(flat.leaves)]
    if first:
        return flat.unflatten(leaves)
    before = flatten(total)
    check_structure(aux, flat, total, before, "aux", "the aux of the window's first micro-batch")
    for index, (leaf, old) in enumerate(zip(leaves, before.leaves, strict=True)):
        if leaf is not None:
            check_leaf(leaf, old, lambda i=index: paths(aux)[i], "aux", "the window's first micro-batch", dtype=True)
            leaves[index] = old + leaf
    return flat.unflatten(leaves)


def aux_mean(total: PyTree, weight: Tensor) -> PyTree:
    """`total / weight`, leaf by leaf; () where nothing was handed out: `torch.vmap` refuses None."""
    if total is None:
        return ()
    flat = flatten(total)
    return flat.unflatten([None if leaf is None else leaf / like(weight, leaf) for leaf in flat.leaves])


def _weighted(leaf: Any, weight: Tensor, aux: PyTree, index: int) -> Tensor:
    if is_number(leaf) or isinstance(leaf, bool):
        leaf = torch.full_like(weight, leaf)
    if not isinstance(leaf, Tensor):
        raise TypeError(
            f"aux: found {described(leaf)} at {paths(aux)[index]!r}, expected tensors and numbers, of which a step "
            "gives the mean over the window. Return it from scale_backward in a loop of your own, or leave it out."
        )
    wide = leaf.to(accumulation_dtype(leaf.dtype))
    factor = like(weight, wide)
    return torch.where(factor == 0, 0, wide * factor)
