"""The sum of a window over ranks: the addition of ScaledGrads, in few and large messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype, is_differentiable, like, widened
from functional_amp.engine.sharded import is_sharded, local, sharded_like, without_partial
from functional_amp.engine.storage import FRESH, Storage
from functional_amp.mode import host_readable
from functional_amp.ranks.mesh import Group, Inner
from functional_amp.torch_private import all_gathered, all_reduced, ranks_of_group
from functional_amp.tree import PyTree, flatten, paths

BUCKET = 25 * 2**20
"""Bytes of one message: more of them start earlier, fewer wait less for each other. It is DDP's number."""


def summed_over(
    tree: PyTree,
    groups: Sequence[Group],
    *,
    inner: Inner = frozenset(),
    ratio: Tensor | None = None,
    dtype: torch.dtype | None = None,
    storage: Storage = FRESH,
) -> PyTree:
    """The float and complex leaves of a tree, summed over the ranks.

    A DTensor is summed over the ranks that hold the same part: its own backward sums over the others.

    Args:
        groups: the dimensions of the mesh; all ranks of it call.
        inner: those over which the loss sums by itself.
        ratio: what this rank's leaves are multiplied by first; None for 1.
        dtype: what real leaves of at most 32 bits are sent as; None for their own.
        storage: where the sums lie.

    Raises:
        TypeError: for a leaf that is sharded over ranks of which the loss does not know.
    """
    flat = flatten(tree)
    leaves, wholes = list(flat.leaves), list(flat.leaves)
    kinds: dict[Any, list[int]] = {}
    for index, leaf in enumerate(leaves):
        if not is_differentiable(leaf):
            continue
        own: Inner = frozenset()
        if is_sharded(leaf):
            wholes[index] = leaf = without_partial(leaf)
            own = _sharded_over(leaf)
            if strange := own.intersection([group.ranks for group in groups]) - inner:
                _refuse(paths(tree)[index], strange)
        over = tuple([group for group in groups if group.ranks not in own])
        leaves[index] = local(leaf)
        kinds.setdefault((over, leaf.dtype, leaf.device), []).append(index)
    if ratio is not None and host_readable(ratio) and ratio == 1:
        ratio = None
    for (over, _, _), places in kinds.items():
        for bucket in _buckets(places, leaves):
            sums = _bucket_sum([leaves[index] for index in bucket], over, ratio, dtype, storage)
            for index, total in zip(bucket, sums, strict=True):
                leaves[index] = total
    return flat.unflatten([sharded_like(part, whole) for part, whole in zip(leaves, wholes, strict=True)])


def _sharded_over(leaf: Any) -> Inner:
    mesh = leaf.device_mesh
    return frozenset([ranks_of_group(mesh.get_group(dim).group_name) for dim in range(mesh.ndim)])


def _refuse(path: str, strange: Inner) -> None:
    raise TypeError(
        f"params: found {path!r} sharded over the ranks {sorted(strange)} that the step sums over, with a loss of each "
        "rank's own items; expected a loss of the items of all of them, as its backward sums over these ranks. "
        "Use make_step(sharded(loss_fn, mesh), ...), from functional_amp.ranks."
    )


def _buckets(places: list[int], leaves: list[Any]) -> Iterator[list[int]]:
    bucket: list[int] = []
    size = 0
    for index in places:
        if bucket and size + leaves[index].nbytes > BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(index)
        size += leaves[index].nbytes
    if bucket:
        yield bucket


def _bucket_sum(
    leaves: list[Tensor], groups: Sequence[Group], ratio: Tensor | None, dtype: torch.dtype | None, storage: Storage
) -> list[Tensor]:
    if not groups and ratio is None:
        return leaves
    kept = leaves[0].dtype
    sums = storage.summing(leaves)
    ours = sums is not None  # and may be written to
    sums = [leaf.contiguous() for leaf in leaves] if sums is None else sums
    if ratio is not None:
        factor = like(ratio, sums[0])
        sums = [leaf.mul_(factor) if ours else leaf * factor for leaf in sums]
    if dtype is not None and groups and not kept.is_complex and accumulation_dtype(kept) == torch.float32:
        sums = [leaf.to(dtype) for leaf in sums]
    sent = [torch.view_as_real(leaf) for leaf in sums] if kept.is_complex else sums
    for group in groups:
        sent = all_reduced(sent, group.name, in_place=ours)
    sums = [torch.view_as_complex(leaf) for leaf in sent] if kept.is_complex else sent
    return [leaf.to(kept) for leaf in sums]


def buffers_over(before: PyTree, after: PyTree, share: Tensor, groups: Sequence[Group]) -> PyTree:
    """The buffers that all ranks go on with.

        before + sum over ranks of share * (after - before)     of float and complex buffers
        the largest                                             of counters and flags

    That is the weighted mean, and what no rank has changed keeps its bits. Of running statistics with a fixed
    momentum it is what the weighted mean of the statistics of the batches would have given.

    Args:
        before: the buffers at the start of the window, the same on all ranks.
        after: this rank's. What is the same object as before is not sent.
        share: the weight of this rank over that of all, 0-dim.
    """
    flat, old = flatten(after), flatten(before)
    places = [index for index, (leaf, kept) in enumerate(zip(flat.leaves, old.leaves, strict=True)) if leaf is not kept]
    moved = [index for index in places if is_differentiable(flat.leaves[index])]
    counted = [index for index in places if index not in moved]
    leaves, changes = list(flat.leaves), []
    for index in moved:
        new, kept = widened(leaves[index]), widened(old.leaves[index])
        factor = like(share, new).to(new.real.dtype)
        changes.append(torch.where((new == kept) | (factor == 0), 0, (new - kept) * factor))  # inf - inf is not 0
    for index, change in zip(moved, summed_over(changes, groups), strict=True):
        kept = old.leaves[index]
        leaves[index] = torch.where(change == 0, kept, (widened(kept) + change).to(kept.dtype))
    for index in counted:
        count = leaves[index].to(torch.int64)
        for group in groups:
            count = all_gathered(count, group.size, group.name).amax(0)
        leaves[index] = count.to(leaves[index].dtype)
    return flat.unflatten(leaves)
