"""Where the results of a step lie: in new memory, or in that of the state before.

A storage has one method for each way in which a stage makes a result. `FRESH` writes to nothing it is given.
`IN_GRAPH` writes at the end of a compiled half, so that the compiler writes in place. A `Lease` (engine/lease.py)
writes at once, and keeps the books.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_amp.engine.operators import announced
from functional_amp.engine.sharded import local
from functional_amp.mode import in_graph
from functional_amp.torch_private import storage_key, storage_use_count
from functional_amp.tree import PyTree, flatten, map_tensors

T = TypeVar("T")


class Fresh:
    """Every result in memory of its own: the storage of a pure function."""

    writes = False
    """Whether results may lie in the memory of what they are made from."""
    streams = False
    """Whether the engine may add each gradient to the sum as it is made."""

    def add(self, old: Tensor | None, new: Tensor) -> Tensor:
        """`old + new`."""
        return new if old is None else old + new

    def put(self, old: PyTree, new: PyTree) -> PyTree:
        """The new tree, at the place of the old one."""
        return new

    def put_sum(self, old: PyTree | None, new: PyTree) -> PyTree:
        """The new sum of a window, at the place of the old one (None: the first, of which nobody is the owner yet)."""
        return new

    def working(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """What a kernel that writes in place is given for some leaves; contiguous, not negated lazily."""
        return [leaf.detach().clone(memory_format=torch.contiguous_format).resolve_neg() for leaf in leaves]

    def scratch(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Gradients that a kernel may overwrite."""
        return [grad.clone() for grad in grads]

    def summing(self, sums: Sequence[Tensor]) -> list[Tensor] | None:
        """The sums of a window, for a reduction over ranks to write to; None where it is to make new ones."""
        return None

    def settled(self, old: Tensor, work: Tensor) -> Tensor:
        """What a kernel left in `working`, with the strides of the old leaf: they must not change either."""
        return work if work.stride() == old.stride() else torch.empty_like(old).copy_(work)

    def begin(self, flag: Tensor) -> Tensor:
        """The flag by which all results of an update are selected; to be asked for before any of them is made."""
        return flag

    def writing_to(self, leaves: Sequence[Tensor]) -> None:
        """To be called before a kernel writes to leaves in place, with the `versioned` ones."""

    def recall(self, owner: Hashable, leaves: Sequence[Any], make: Callable[[bool], T], fits: Callable[[T], bool]) -> T:
        """What `make` gives, which is told whether it lasts.

        Made anew, or what was made for the same owner and the same first leaf, if it still fits.
        """
        return make(False)


class InGraph(Fresh):
    """The storage of a compiled half: results are copied over the old tensors where the graph ends."""

    writes = True

    def put(self, old: PyTree, new: PyTree) -> PyTree:
        return write_into(old, new)

    def put_sum(self, old: PyTree | None, new: PyTree) -> PyTree:
        # The first sum may hold views of the user's tensors; the compiler drops a needless copy.
        return cloned(new) if old is None else write_into(old, new)

    def working(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return [dense(leaf) for leaf in leaves]

    def scratch(self, grads: Sequence[Tensor]) -> list[Tensor]:
        return list(grads)

    def settled(self, old: Tensor, work: Tensor) -> Tensor:
        return old if work is old else old.copy_(work)

    def begin(self, flag: Tensor) -> Tensor:
        return announced(flag)


class Closing(Fresh):
    """The storage of the last micro-batch in the graph that closes its window: the sum is the update's alone."""

    def put_sum(self, old: PyTree | None, new: PyTree) -> PyTree:
        return realized(new)


FRESH = Fresh()
IN_GRAPH = InGraph()
CLOSING = Closing()


def write_into(old: PyTree, new: PyTree, writing: Callable[[], None] = lambda: None) -> PyTree:
    """The new tree, written into the storage of the old one; 0-dim leaves stay new.

    Args:
        writing: called before the first write.
    """
    old_flat, new_flat = flatten(old), flatten(new)
    if old_flat.spec != new_flat.spec:
        return new
    leaves = []
    for before, after in zip(old_flat.leaves, new_flat.leaves, strict=True):
        fits = isinstance(before, Tensor) and after is not before and before.dim() and before.dtype == after.dtype
        if fits:
            writing()
        leaves.append(before.copy_(after) if fits else after)
    return new_flat.unflatten(leaves)


def dense(leaf: Tensor) -> Tensor:
    """As a kernel takes it: contiguous, and not negated lazily."""
    leaf = leaf if leaf.is_contiguous() else leaf.contiguous()
    return leaf if in_graph() else leaf.resolve_neg()


def versioned(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Those of some leaves that have a version counter; a graph has no others."""
    return [leaf for leaf in leaves if in_graph() or not leaf.is_inference()]


def is_sole_owner(tensor: Tensor) -> bool:
    """Whether nobody else holds the storage of a tensor: a gradient may be a view of a user's own tensor."""
    return storage_use_count(tensor) == 1


def copied(leaf: Tensor) -> Tensor:
    """A dense copy without history."""
    # In a graph sizes may be symbols, which can't be sorted; a clone is dense there too.
    overlapping = not in_graph() and overlaps(leaf)
    return leaf.detach().clone(memory_format=torch.contiguous_format if overlapping else torch.preserve_format)


def cloned(tree: PyTree) -> PyTree:
    """A copy of each leaf; works in a graph, whatever is missing in the tree."""
    return map_tensors(torch.clone, tree)


def realized(tree: PyTree) -> PyTree:
    """A copy of each leaf that the compiler writes to memory once, for all operators that read it.

    Inductor makes arithmetic that two operators are given once for each of them, but for a view it looks for what
    is viewed. The copy itself it drops.
    """

    def written(leaf: Tensor) -> Tensor:
        copy = leaf.clone()  # of a broadcast leaf it has strides of its own
        return copy.as_strided(copy.shape, copy.stride())

    return map_tensors(written, tree)


def unshared(tree: PyTree, *others: PyTree) -> PyTree:
    """The tree with a storage for each leaf: a copy of each that shares one with another or with `others`."""
    if in_graph():
        return map_tensors(lambda leaf: copied(leaf) if isinstance(leaf, Tensor) else leaf, tree)
    seen = {storage_key(local(leaf)) for leaf in flatten(others).leaves if isinstance(leaf, Tensor)}

    def own(leaf: Tensor) -> Tensor:
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:  # the stages refuse it by its path
            return leaf
        storage = storage_key(local(leaf))
        if storage in seen or overlaps(leaf):
            return copied(leaf)
        seen.add(storage)
        return leaf.detach() if leaf.requires_grad else leaf

    return map_tensors(own, tree)


def is_disjoint(tree: PyTree) -> bool:
    """Whether all leaves are plain contiguous tensors without history, and no two of them lie on the same bytes."""
    leaves = [local(leaf) for leaf in flatten(tree).leaves if isinstance(leaf, Tensor)]
    if not all([type(leaf) is Tensor and leaf.is_contiguous() and not leaf.requires_grad for leaf in leaves]):
        return False
    places = sorted([(leaf.data_ptr(), leaf.nbytes) for leaf in leaves])
    return all([start + size <= after for (start, size), (after, _) in pairwise(places) if start])


def overlaps(leaf: Tensor) -> bool:
    """Whether elements of a leaf may lie on the same bytes (expanded, unfolded): such a leaf can not be written to."""
    reach = 0
    for stride, size in sorted([(abs(s), n) for n, s in zip(leaf.shape, leaf.stride(), strict=True) if n > 1]):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


Storage = Fresh
"""Anything with the methods of `Fresh`."""
