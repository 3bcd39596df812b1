"""The ranks that share a run, and how they speak to each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_amp.checks import check_flag
from functional_amp.torch_private import ranks_of_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """The process group of one dimension of a mesh, by its name: what a compiled graph can hold.

    Attributes:
        ranks: by these, groups are told apart: torch takes two meshes of the same ranks for one, and may give a
            DTensor the groups of either.
    """

    name: str
    size: int
    ranks: tuple[int, ...]


Inner: TypeAlias = frozenset[tuple[int, ...]]
"""The ranks of the groups over which a loss sums by itself."""


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that a step sums its windows over; what `make_step(..., mesh=mesh)` makes of a mesh.

    Args:
        mesh: the `DeviceMesh` of the ranks that see different data: its data-parallel dimensions, and those that
            the parameters are sharded on.
        reduce_dtype: what gradients are sent as, `torch.bfloat16` say; None for float32, as they are summed.
            Only sums over whole gradients: what a sharded loss scatters, `from_module(..., gather=)` decides.
        stop: a 0-dim bool tensor on the CPU that this rank may set, such as `stop_on` gives. `Metrics.stop` is
            True on all ranks in the window in which the first of them has set it.

    Raises:
        TypeError: for what is not one of these.
    """

    mesh: DeviceMesh
    reduce_dtype: torch.dtype | None = None
    stop: Tensor | None = None
    groups: tuple[Group, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        dtype = self.reduce_dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(
                f"reduce_dtype: found {dtype!r}, expected a floating-point dtype such as torch.bfloat16, or None."
            )
        if dtype == torch.float16:
            raise TypeError(
                "reduce_dtype: found torch.float16, expected one with the range of float32: sums of scaled gradients "
                "overflow in float16. Use torch.bfloat16."
            )
        if self.stop is not None:
            check_flag(self.stop, "stop")
        object.__setattr__(self, "groups", groups_of(self.mesh))


def groups_of(mesh: Any) -> tuple[Group, ...]:
    """The groups of the dimensions of a mesh."""
    if not (hasattr(mesh, "get_group") and hasattr(mesh, "ndim")):
        raise TypeError(
            f"mesh: found {type(mesh).__name__}, expected a DeviceMesh. "
            'Write init_device_mesh("cpu", (world_size,)), after init_process_group.'
        )
    names = [mesh.get_group(dim).group_name for dim in range(mesh.ndim)]
    return tuple([Group(name, mesh.size(dim), ranks_of_group(name)) for dim, name in enumerate(names)])


def as_ranks(mesh: Any) -> Ranks | None:
    """The argument of `make_step`: None, a mesh, or the ranks with their options."""
    return mesh if mesh is None or isinstance(mesh, Ranks) else Ranks(mesh)


def inner_groups(loss_fn: Any, ranks: Ranks) -> Inner:
    """The groups over which the loss sums by itself: those of the mesh that `sharded` was given.

    Raises:
        ValueError: for a `sharded` loss over ranks that the step does not know.
    """
    inner = frozenset([group.ranks for group in loss_groups(loss_fn)])
    if not inner <= {group.ranks for group in ranks.groups}:
        raise ValueError(
            "mesh: found a mesh without the dimensions that sharded(loss_fn, mesh) was given, expected all of them. "
            "Pass make_step the whole mesh, and sharded the dimensions that the parameters are sharded on."
        )
    return inner


def loss_groups(loss_fn: Callable[..., Any]) -> tuple[Group, ...]:
    """The groups of the mesh that `sharded` was given; () for another loss."""
    return getattr(loss_fn, "sharded_over", ())
