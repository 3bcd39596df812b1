"""Running torch's fused kernels on the leaves that they accept."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import divided
from functional_amp.engine.storage import Storage, dense
from functional_amp.optim.kernels import Kernel
from functional_amp.tree import Flat, same_leaves

_KERNEL_DTYPES = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)


class Plan(NamedTuple):
    """Which leaves a kernel takes. A lasting plan, for leaves that stay the same, also holds the kernel's arguments.

    Attributes:
        groups: the places for the kernel, by device and dtype; rest: the places for the rule.
        works: for each group, the lists of parameters and slots that are given to the kernel; None where the
            plan does not last, or a leaf has to be copied first.
        columns: the leaves of the parameters and of the slots that a lasting plan was made for.
        kinds: of the gradients; None for a missing one.
    """

    groups: list[list[int]]
    rest: list[int]
    works: Sequence[list[list[Tensor]] | None]
    columns: list[list[Any]]
    kinds: list[Any]

    def fits(self, flats: list[Flat]) -> bool:
        """Whether these are the trees that the plan was made for; the lease compares their addresses."""
        columns = [flats[0].leaves, *(flat.leaves for flat in flats[2:])]
        same = len(columns) == len(self.columns) and all(map(same_leaves, self.columns, columns))
        return same and kinds_of(flats[1]) == self.kinds


def plan_of(flats: list[Flat], taken: list[int], kernel: Kernel | None, *, lasting: bool) -> Plan:
    """The plan for the parameters, the gradients and the slots; `taken` are the places that have a gradient."""
    groups, rest = _grouped(flats, taken) if kernel else ([], taken)
    if not lasting:
        return Plan(groups, rest, [None] * len(groups), [], [])
    columns = [list(flats[0].leaves), *(list(flat.leaves) for flat in flats[2:])]
    works: list[Any] = []
    for indices in groups:
        lists = [[column[index] for index in indices] for column in columns]
        dtype = lists[0][0].dtype
        plain = all([x.is_contiguous() and not x.is_neg() and x.dtype == dtype for leaves in lists for x in leaves])
        works.append(lists if plain else None)
    return Plan(groups, rest, works, columns, kinds_of(flats[1]))


def kinds_of(grads: Flat) -> list[Any]:
    """What decides whether a kernel takes a gradient as it is: type, dtype, layout, shape, device."""
    return [
        (type(g), g.dtype, g.is_contiguous(), g.is_neg(), g.shape, g.device) if isinstance(g, Tensor) else None
        for g in grads.leaves
    ]


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
    indices: list[int],
    works: list[list[Tensor]] | None,
    count: Tensor,
    divisor: Tensor | None,
    applied: Tensor,
    storage: Storage,
) -> None:
    """Runs a kernel on some leaves of the parameters and the slots, and puts the new ones in their places."""
    columns = [flats[0].leaves, *(flat.leaves for flat in flats[2:])]
    olds = works or [[column[index] for index in indices] for column in columns]
    grads = [flats[1].leaves[index] for index in indices]
    device, dtype = olds[0][0].device, olds[0][0].dtype
    scale = None if divisor is None else divisor.to(device)
    # The kernel takes a float32 scale only, too coarse for float64 leaves: those are divided here.
    if scale is not None and (dtype == torch.float64 or any([grad.dtype == torch.float64 for grad in grads])):
        grads, scale = [divided(grad, scale) for grad in grads], None
    if works is None or any([g.dtype != dtype or not g.is_contiguous() or g.is_neg() for g in grads]):
        grads = [dense(grad if grad.dtype == dtype else grad.to(dtype)) for grad in grads]
    if scale is not None:  # the kernel also writes to the gradients, which the caller may still hold
        scale, grads = scale.to(torch.float32), storage.scratch(grads)
    if works is None:
        new = [storage.working(leaves) for leaves in olds]
    else:
        new = works
        storage.writing_to(itertools.chain(*works))
    kernel(new[0], grads, new[1:], count.to(device), scale, (~applied).to(device, torch.float32))
    if works is not None:
        return
    for column, leaves, news in zip(columns, olds, new, strict=True):
        for index, old, work in zip(indices, leaves, news, strict=True):
            column[index] = storage.settled(old, work)
