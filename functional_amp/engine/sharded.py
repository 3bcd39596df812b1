"""Sharded leaves (DTensor): the parts that this process holds, and numbers over the parts of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_amp.torch_private import all_gathered, all_reduced, part_of_dtensor
from functional_amp.tree import PyTree, flatten, map_tensors

_PLAIN = {Tensor, nn.Parameter, type(None)}


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a DTensor, of which this process may hold a part."""
    if type(leaf) in (Tensor, nn.Parameter) or not isinstance(leaf, Tensor):
        return False
    from torch.distributed.tensor import DTensor  # half a second of import, for those who shard

    return isinstance(leaf, DTensor)


def any_sharded(leaves: Sequence[Any]) -> bool:
    """Whether a leaf is a DTensor."""
    return not set(map(type, leaves)) <= _PLAIN and any([is_sharded(leaf) for leaf in leaves])


def whole(value: Any) -> Tensor:
    """A result that may be a DTensor, as a plain tensor. All ranks must ask."""
    return value.full_tensor() if is_sharded(value) else value


def local(leaf: Any) -> Any:
    """The part of a leaf that this process holds, in the leaf's own memory; a plain leaf as it is."""
    if not is_sharded(leaf):
        return leaf
    if not torch.is_grad_enabled():
        return leaf.to_local()
    with torch.no_grad():  # the very tensor then, and no view of it
        return leaf.to_local()


def locals_of(leaves: list[Any]) -> list[Any]:
    """The part of each leaf that this process holds: of plain leaves the same list, at the cost of one look."""
    return leaves if set(map(type, leaves)) <= _PLAIN else [local(leaf) for leaf in leaves]


def local_parts(tree: PyTree) -> PyTree:
    """A tree of the parts that this process holds."""
    return map_tensors(local, tree)


def sharded_like(part: Any, leaf: Any) -> Any:
    """A part as the DTensor that a leaf is; the leaf itself where it is the leaf's own part."""
    if not is_sharded(leaf) or part is None:
        return part
    if part is local(leaf):
        return leaf
    return part_of_dtensor(part, leaf)


def all_sharded_like(parts: PyTree, tree: PyTree) -> PyTree:
    """A tree of parts with the DTensors that another tree of the same structure has."""
    flat, likes = flatten(parts), flatten(tree)
    return flat.unflatten([sharded_like(part, leaf) for part, leaf in zip(flat.leaves, likes.leaves, strict=True)])


def placed_like(tree: PyTree, like: PyTree) -> PyTree:
    """A tree whose DTensors are distributed as those of another tree of the same structure are."""
    flat, likes = flatten(tree), flatten(like)
    if flat.spec != likes.spec:  # is refused by who compares them
        return tree
    return flat.unflatten(
        [
            leaf.redistribute(placements=other.placements)
            if is_sharded(leaf) and is_sharded(other) and leaf.placements != other.placements
            else leaf
            for leaf, other in zip(flat.leaves, likes.leaves, strict=True)
        ]
    )


def distributed_as(leaf: Any, like: Any) -> Any:
    """A leaf that all ranks have whole, or in parts, distributed as another one is."""
    if not is_sharded(like):
        return whole(leaf)
    if is_sharded(leaf):
        return leaf if leaf.placements == like.placements else leaf.redistribute(placements=like.placements)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(leaf, like.device_mesh, like.placements, src_data_rank=None)


class Parts(NamedTuple):
    """Leaves that are sharded over the same ranks: the parts of this process, and the groups that hold the others.

    Attributes:
        leaves: without those of which this process holds nothing.
        groups: the name and the size of the process group of each mesh dimension that they are sharded on.
    """

    leaves: list[Tensor]
    groups: tuple[tuple[str, int], ...]

    def summed(self, value: Tensor) -> Tensor:
        """The sum of a 0-dim value over the ranks that hold other parts."""
        for name, _ in self.groups:
            (value,) = all_reduced([value], name)
        return value

    def largest(self, value: Tensor) -> Tensor:
        """The largest of a 0-dim value, NaN if there is any: the MAX of a collective library may drop one."""
        for name, size in self.groups:
            value = all_gathered(value, size, name).amax()
        return value


def parts_of(leaves: Sequence[Tensor]) -> list[Parts]:
    """Leaves by the ranks that they are sharded over; plain ones by themselves. All ranks give the same groups."""
    found: dict[Any, list[Tensor]] = {}
    for leaf in leaves:
        groups: Any = ()
        if is_sharded(leaf):
            leaf = without_partial(leaf)
            sharded: Any = leaf
            mesh = sharded.device_mesh
            over = [dim for dim, placement in enumerate(sharded.placements) if not placement.is_replicate()]
            groups = tuple([(mesh.get_group(dim).group_name, mesh.size(dim)) for dim in over])
        parts = found.setdefault(groups, [])
        part = local(leaf)
        if part.numel():
            parts.append(part)
    return [Parts(parts, groups) for groups, parts in found.items()]


def without_partial(leaf: Any) -> Any:
    """A DTensor whose ranks hold summands, as one whose ranks hold the sum."""
    if not any([placement.is_partial() for placement in leaf.placements]):
        return leaf
    from torch.distributed.tensor import Replicate

    return leaf.redistribute(placements=[Replicate() if p.is_partial() else p for p in leaf.placements])
