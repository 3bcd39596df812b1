"""What the donating step writes to, and what it must not."""

from __future__ import annotations

import itertools
from itertools import pairwise

import torch
from torch import Tensor

from functional_amp.tree import PyTree, flatten, map_tensors

_writes = itertools.count()
_written = 0


def wrote() -> None:
    """To be called before a write into a tensor of a state."""
    global _written
    _written = next(_writes) + 1


def writes() -> int:
    """How many there have been, in all threads: equal before and after means that nothing was written."""
    return _written


def owned(tensor: Tensor) -> bool:
    """Whether nobody else holds the storage of a tensor: a gradient may be a view of a user's own tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) == 2  # the tensor's, and this question's


def into(old: PyTree, new: PyTree) -> PyTree:
    """The new tree, written into the storage of the old one; 0-dim leaves stay new.

    In a compiled graph this is what makes the compiler write in place.
    """
    old_flat, new_flat = flatten(old), flatten(new)
    if old_flat.spec != new_flat.spec:
        return new
    leaves = []
    for before, after in zip(old_flat.leaves, new_flat.leaves, strict=True):
        fits = isinstance(before, Tensor) and after is not before and before.dim() and before.dtype == after.dtype
        if fits and not torch.compiler.is_compiling():
            wrote()
        leaves.append(before.copy_(after) if fits else after)
    return new_flat.unflatten(leaves)


def copied(leaf: Tensor) -> Tensor:
    """A dense copy without history."""
    return leaf.detach().clone(memory_format=torch.contiguous_format if _overlaps(leaf) else torch.preserve_format)


def cloned(tree: PyTree) -> PyTree:
    """A copy of each leaf; works in a graph, whatever is missing in the tree."""
    flat = flatten(tree)
    return flat.unflatten([None if leaf is None else leaf.clone() for leaf in flat.leaves])


def apart(tree: PyTree, *others: PyTree) -> PyTree:
    """The tree with a storage for each leaf: a copy of each that shares one with another or with `others`."""
    if torch.compiler.is_compiling():
        return map_tensors(copied, tree)
    seen = {leaf.untyped_storage()._cdata for leaf in flatten(others).leaves if isinstance(leaf, Tensor)}

    def own(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # the stages refuse it by its path
            return leaf
        storage = leaf.untyped_storage()._cdata
        if storage in seen or _overlaps(leaf):
            return copied(leaf)
        seen.add(storage)
        return leaf.detach() if leaf.requires_grad else leaf

    return map_tensors(own, tree)


def disjoint(tree: PyTree) -> bool:
    """Whether all leaves are plain contiguous tensors without history, and no two of them lie on the same bytes."""
    leaves = [leaf for leaf in flatten(tree).leaves if isinstance(leaf, Tensor)]
    if not all([type(leaf) is Tensor and leaf.is_contiguous() and not leaf.requires_grad for leaf in leaves]):
        return False
    places = sorted([(leaf.data_ptr(), leaf.nbytes) for leaf in leaves])
    return all([start + size <= after for (start, size), (after, _) in pairwise(places) if start])


def _overlaps(leaf: Tensor) -> bool:
    """Whether elements of a leaf may lie on the same bytes (expanded, unfolded): such a leaf can not be written to."""
    reach = 0
    for stride, size in sorted([(abs(s), n) for n, s in zip(leaf.shape, leaf.stride(), strict=True) if n > 1]):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
