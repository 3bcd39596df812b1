"""Running torch's fused kernels on the leaves that they accept."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import divided
from functional_amp.engine.storage import Storage, dense, versioned
from functional_amp.optim.kernels import Kernel
from functional_amp.tree import Flat, same_leaves

_KERNEL_DTYPES = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)
_LOOKS = (attrgetter("dtype", "device"), Tensor.size, Tensor.is_contiguous, Tensor.is_neg)


class Group(NamedTuple):
    """Leaves of one device and dtype, which a kernel takes.

    Attributes:
        indices: their places.
        ready: whether it is known that the kernel takes their gradients as they are.
        wide: whether gradients are divided before: the kernel's divisor is a float32, too coarse for float64.
        works: in a plan that lasts, the lists of parameters and slots that are given to the kernel; else, or where
            a leaf has to be copied first, None.
        written: those of `works` whose writes are counted.
    """

    indices: list[int]
    ready: bool
    wide: bool
    works: list[list[Tensor]] | None = None
    written: Sequence[Tensor] = ()


class Plan(NamedTuple):
    """Which leaves a kernel takes. A lasting plan, for leaves that stay the same, also holds the kernel's arguments.

    Attributes:
        groups: the leaves for the kernel; rest: the places for the rule.
        columns: the leaves of the parameters and of the slots that a lasting plan was made for.
        kinds: of the gradients.
    """

    groups: list[Group]
    rest: list[int]
    columns: list[list[Any]]
    kinds: list[Any]

    def fits(self, flats: list[Flat]) -> bool:
        """Whether these are the trees that the plan was made for; the lease compares their addresses."""
        columns = [flats[0].leaves, *(flat.leaves for flat in flats[2:])]
        same = len(columns) == len(self.columns) and all(map(same_leaves, self.columns, columns))
        return same and kinds_of(flats[1]) == self.kinds


def plan_of(flats: list[Flat], taken: list[int], kernel: Kernel | None, *, lasting: bool) -> Plan:
    """The plan for the parameters, the gradients and the slots; `taken` are the places that have a gradient."""
    places, rest = _grouped(flats, taken) if kernel else ([], taken)
    columns = [list(flats[0].leaves), *(list(flat.leaves) for flat in flats[2:])]
    groups = [_group(indices, columns, flats[1].leaves, lasting) for indices in places]
    return Plan(groups, rest, columns, kinds_of(flats[1])) if lasting else Plan(groups, rest, [], [])


def _group(indices: list[int], columns: list[list[Any]], gradients: list[Any], lasting: bool) -> Group:
    grads = [gradients[index] for index in indices]
    dtype = columns[0][indices[0]].dtype
    wide = torch.float64 in {dtype, *[grad.dtype for grad in grads]}
    if not lasting:
        return Group(indices, ready=False, wide=wide)
    group = Group(indices, all([_is_plain(grad, dtype) for grad in grads]), wide)
    lists = [[column[index] for index in indices] for column in columns]
    if not all([_is_plain(leaf, dtype) for leaves in lists for leaf in leaves]):
        return group
    return group._replace(works=lists, written=versioned(leaf for leaves in lists for leaf in leaves))


def _is_plain(leaf: Tensor, dtype: torch.dtype) -> bool:
    return leaf.dtype == dtype and leaf.is_contiguous() and not leaf.is_neg()


def kinds_of(grads: Flat) -> list[Any]:
    """What decides whether a kernel takes a gradient as it is: type, dtype, layout, shape, device."""
    leaves = [leaf for leaf in grads.leaves if isinstance(leaf, Tensor)]
    return [list(map(type, grads.leaves)), *(list(map(look, leaves)) for look in _LOOKS)]


def _grouped(flats: list[Flat], taken: list[int]) -> tuple[list[list[int]], list[int]]:
    """The places that torch's fused kernels take, by device and dtype, and the others."""
    groups: dict[Any, list[int]] = {}
    rest = []
    columns = [flat.leaves for flat in flats]
    for index in taken:
        param = columns[0][index]
        dtype, device = param.dtype, param.device
        leaves = [column[index] for column in columns]
        fits = (
            dtype in _KERNEL_DTYPES
            and not param.is_meta
            and all(type(leaf) in _PLAIN and leaf.device == device for leaf in leaves)
        )
        (groups.setdefault((device, dtype), []) if fits else rest).append(index)
    return list(groups.values()), rest


def run_group(
    kernel: Kernel,
    flats: list[Flat],
    group: Group,
    count: Tensor,
    divisor: Tensor | None,
    applied: Tensor,
    storage: Storage,
) -> None:
    """Runs a kernel on some leaves of the parameters and the slots, and puts the new ones in their places."""
    columns = [flats[0].leaves, *(flat.leaves for flat in flats[2:])]
    olds = group.works or [[column[index] for index in group.indices] for column in columns]
    grads = [flats[1].leaves[index] for index in group.indices]
    device, dtype = olds[0][0].device, olds[0][0].dtype
    scale = None if divisor is None else divisor.to(device)
    if scale is not None and group.wide:
        grads, scale = [divided(grad, scale) for grad in grads], None
    if group.wide or not group.ready:
        grads = [dense(grad.to(dtype)) for grad in grads]
    if scale is not None:  # the kernel also writes to the gradients, which the caller may still hold
        scale, grads = scale.to(torch.float32), storage.scratch(grads)
    run = kernel(count.to(device))
    new, written = group.works, group.written
    if new is None:
        new = [storage.working(leaves) for leaves in olds]
        written = versioned(leaf for leaves in new for leaf in leaves)
    skip = (~applied).to(device, torch.float32)
    storage.writing_to(written)
    run(new[0], grads, new[1:], scale, skip)
    if group.works is not None:
        return
    for column, leaves, news in zip(columns, olds, new, strict=True):
        for index, old, work in zip(group.indices, leaves, news, strict=True):
            column[index] = storage.settled(old, work)
