"""Sharded leaves (DTensor): their numbers as plain tensors, the same on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def is_sharded(leaf: Any) -> bool:
    """Whether a leaf is a DTensor, of which this process may hold a part."""
    if type(leaf) in (Tensor, nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor  # half a second of import, for those who shard

    return isinstance(leaf, DTensor)


def whole(value: Any) -> Tensor:
    """A result that may be a DTensor, as a plain tensor. All ranks must ask."""
    return value.full_tensor() if is_sharded(value) else value


def of_each_part(function: Callable[[Tensor], Tensor], leaf: Tensor) -> Tensor:
    """A 0-dim function of each rank's part of a leaf, gathered; of a plain leaf, of the leaf.

    DTensor reduces a maximum over the ranks with the MAX of the collective library, which may drop a NaN: what
    is gathered drops nothing.
    """
    if not is_sharded(leaf):
        return function(leaf)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sharded: Any = leaf
    mesh, placements = sharded.device_mesh, sharded.placements
    if any(placement.is_partial() for placement in placements):
        placements = [Replicate() if placement.is_partial() else placement for placement in placements]
        sharded = sharded.redistribute(placements=placements)
    part = sharded.to_local()
    value = function(part) if part.numel() else function(part.new_zeros(1))  # a rank may hold nothing
    value = value.reshape([1] * mesh.ndim)
    return DTensor.from_local(value, mesh, [Shard(dim) for dim in range(mesh.ndim)], run_check=False).full_tensor()
