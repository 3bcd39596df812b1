"""Running torch's fused kernels on the leaves of trees that they take."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.inplace import owned, wrote
from functional_amp.optim.kernels import Kernel
from functional_amp.tree import Flat, divided

_KERNEL_DTYPES = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)


class Plan(NamedTuple):
    """What was found out about some trees, for as long as the parameters and the slots are the same tensors.

    Attributes:
        specs: of the parameters, the gradients and the slots.
        grads: the kind of each gradient; None for a missing one.
        others: the parameters and the slots; where: their addresses, as `.data = ...` keeps the tensor.
        groups: the places for the kernel; rest: the places for the rule.
        plain: whether all tensors are as the kernel takes them.
    """

    specs: list[Any]
    grads: list[Any]
    others: list[Any]
    where: list[int]
    groups: list[list[int]]
    rest: list[int]
    plain: bool

    @classmethod
    def of(cls, flats: list[Flat], groups: list[list[int]], rest: list[int]) -> Plan:
        taken = [flat.leaves[index] for group in groups for index in group for flat in flats]
        dtypes = [flats[0].leaves[index].dtype for group in groups for index in group for _ in flats]
        plain = not rest and all(
            leaf.is_contiguous() and not leaf.is_neg() and leaf.dtype == dtype
            for leaf, dtype in zip(taken, dtypes, strict=True)
        )
        others = _others(flats) if plain else []
        specs, references = [flat.spec for flat in flats], [_reference(leaf) for leaf in others]
        return cls(specs, _kinds(flats[1]), references, _where(others), groups, rest, plain)

    def fits(self, flats: list[Flat]) -> bool:
        others = _others(flats)
        return (
            self.plain
            and len(others) == len(self.others)
            and all([known() is leaf for known, leaf in zip(self.others, others, strict=True)])
            and _where(others) == self.where
            and self.specs == [flat.spec for flat in flats]
            and _kinds(flats[1]) == self.grads
        )


def _others(flats: list[Flat]) -> list[Tensor | None]:
    return [leaf for flat in (flats[0], *flats[2:]) for leaf in flat.leaves]


def _where(leaves: list[Tensor | None]) -> list[int]:
    return [0 if leaf is None else leaf.data_ptr() if leaf.is_contiguous() else -1 for leaf in leaves]


def _kinds(grads: Flat) -> list[Any]:
    return [
        None
        if g is None
        else (type(g), g.shape, g.stride(), g.dtype, g.device, g.is_neg())
        if isinstance(g, Tensor)
        else g
        for g in grads.leaves
    ]


def _reference(leaf: Tensor | None) -> Callable[[], Tensor | None]:
    return weakref.ref(leaf) if leaf is not None else type(None)


def grouped(flats: list[Flat], taken: list[int]) -> tuple[list[list[int]], list[int]]:
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
    plain: bool,
    count: Tensor,
    divisor: Tensor | None,
    applied: Tensor,
    donate: bool,
) -> None:
    """Runs a kernel on some leaves of the parameters and the slots, and puts the new ones in their places."""
    olds = [[flat.leaves[index] for index in indices] for flat in (flats[0], *flats[2:])]
    grads = [flats[1].leaves[index] for index in indices]
    device, dtype = olds[0][0].device, olds[0][0].dtype
    scale = None if divisor is None else divisor.to(device)
    # The kernel takes a float32 scale, and a scaled float64 gradient need not be a float32.
    if scale is not None and (dtype == torch.float64 or any([grad.dtype == torch.float64 for grad in grads])):
        grads, scale = [divided(grad, scale) for grad in grads], None
    if not plain:
        grads = [_dense(grad if grad.dtype == dtype else grad.to(dtype)) for grad in grads]
    if scale is not None:
        # The kernel writes to the gradients too, and those may be someone else's.
        scale = scale.to(torch.float32)
        grads = [grad if donate and (torch.compiler.is_compiling() or owned(grad)) else grad.clone() for grad in grads]
    if donate:
        works = olds if plain else [[_dense(leaf) for leaf in leaves] for leaves in olds]
    else:
        works = [[leaf.detach().clone(memory_format=torch.contiguous_format) for leaf in leaves] for leaves in olds]
    about_to_write(*works)
    kernel(works[0], grads, works[1:], count.to(device), scale, (~applied).to(device, torch.float32))
    if works is olds:
        return
    for flat, leaves, news in zip((flats[0], *flats[2:]), olds, works, strict=True):
        for index, old, new in zip(indices, leaves, news, strict=True):
            if donate:
                if new is not old:
                    old.copy_(new)
            else:  # strides must not change from step to step either
                flat.leaves[index] = new if new.stride() == old.stride() else torch.empty_like(old).copy_(new)


def _dense(leaf: Tensor) -> Tensor:
    """As the kernels take it: contiguous, and not negated lazily."""
    leaf = leaf if leaf.is_contiguous() else leaf.contiguous()
    return leaf if torch.compiler.is_compiling() else leaf.resolve_neg()


def about_to_write(*leaves: list[Tensor]) -> None:
    """To be called before a write into lists of leaves; in a graph the compiler keeps the books."""
    if not torch.compiler.is_compiling():
        wrote()
        torch.autograd.graph.increment_version(itertools.chain(*leaves))  # the kernels themselves do not
