"""The backward of one micro-batch, added to the sum of its window."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_amp.checks import own_third, parameters_of
from functional_amp.dtypes import accumulation_dtype, is_differentiable, widened
from functional_amp.engine.lease import Lease
from functional_amp.engine.loans import lending
from functional_amp.engine.moved import moves, refuse_moves
from functional_amp.engine.storage import Storage
from functional_amp.engine.unwritten import unwritten
from functional_amp.mode import mode, stage
from functional_amp.registry import new, with_fields
from functional_amp.stages.accumulate import accumulate, add
from functional_amp.stages.addition import added
from functional_amp.stages.backward import ScaledLoss, scale_backward
from functional_amp.stages.differentiate import Backend, check_reached, record_loss, recording, without_history
from functional_amp.tree import PyTree, check_leaf, check_structure, flatten, paths, same_leaves
from functional_amp.values.grads import Loss, ScaledGrads, as_loss, is_one, weight_tensor
from functional_amp.values.scaler import Scaler


class HandedOut(NamedTuple):
    """The aux of a `windowed` loss."""

    aux: PyTree
    buffers: PyTree
    reduction: str
    may_vanish: bool
    """Whether the weight of the micro-batch may be 0."""


def windowed(loss_fn: Callable[..., Tensor | Loss]) -> Callable[[PyTree, Any, PyTree], Loss]:
    """The loss of a step, which hands out what a window keeps.

    Calls `loss_fn(params, micro_batch)`, or with the buffers as third argument where the state has some.
    """

    unseen = [None]
    third = own_third(parameters_of(loss_fn) or {}, "buffers")

    @functools.wraps(loss_fn)
    def loss_of(params: PyTree, micro_batch: Any, buffers: PyTree) -> Loss:
        if third is not None and buffers is not None:
            raise TypeError(
                f"loss_fn: found a third argument {third!r} with a default of its own, expected `buffers`, as the "
                f"state has some. Write loss_fn(params, micro_batch, buffers, {third}=...)."
            )
        before = [] if buffers is None else flatten(buffers).leaves
        with unwritten((params, buffers), unseen) as handed, moves() as moved:
            params, given = handed.tree
            returned = loss_fn(params, micro_batch) if buffers is None else loss_fn(params, micro_batch, given)
        loss = as_loss(returned)
        kept = handed.back(given if loss.buffers is None else loss.buffers)
        if buffers is not None and loss.buffers is None and same_leaves(flatten(kept).leaves, before):
            refuse_moves(moved)
        if buffers is None and loss.buffers is not None:
            raise ValueError(
                "loss_fn: found buffers in the Loss, but the state has none. Pass init_state(..., buffers=buffers)."
            )
        out = HandedOut(loss.aux, kept, loss.reduction, not is_one(loss.weight))
        return with_fields(loss, aux=out, buffers=None)

    cast(Any, loss_of).given = loss_fn
    return loss_of


class Accumulated(NamedTuple):
    """The sum so far; the weight, the loss and the aux of the last micro-batch."""

    grads: ScaledGrads
    weight: Tensor
    loss: Tensor
    aux: PyTree


def accumulate_backward(
    total: ScaledGrads | None,
    loss_fn: Callable[..., Tensor | Loss],
    scaler: Scaler,
    params: PyTree,
    *batch: Any,
    backend: Backend,
    storage: Storage,
) -> Accumulated:
    """`scale_backward` of a `windowed` loss, then `accumulate` (`add` for a sum).

    A lease lets the autograd engine add each gradient as it is made, so that one set of them exists and not two:
    the values are those of the two stages with backend="autograd".
    """
    if isinstance(storage, Lease) and storage.streams and mode() == "eager":
        return _streamed(total, loss_fn, scaler, params, batch, storage)
    grads, loss, aux = scale_backward(loss_fn, scaler, params, *batch, backend=backend)
    summed = (add if aux.reduction == "sum" else accumulate)(total, grads)
    tree = storage.put_sum(None if total is None else total.tree, summed.tree)
    return Accumulated(with_fields(summed, tree=tree), grads.weight, loss, aux)


@stage
@lending
def _streamed(
    total: ScaledGrads | None,
    loss_fn: Callable[..., Tensor | Loss],
    scaler: Scaler,
    params: PyTree,
    batch: tuple[Any, ...],
    lease: Lease,
) -> Accumulated:
    scaled_loss = ScaledLoss(loss_fn, scaler, params, batch)
    if total is not None:
        _check_window(params, total)
    leaves = lease.recording(scaled_loss.leaves, recording)
    scaled, (value, tensors) = record_loss(scaled_loss, leaves)
    scaled_loss.check_unwritten()
    loss_weight, aux = scaled_loss.weight_and_aux(without_history(tensors))
    sums: list[Tensor | None] = (
        [None] * len(leaves) if total is None else scaled_loss.select(flatten(total.tree).leaves)
    )
    ratio = None if total is None or total.scale is scaler.scale else total.scale / scaler.scale
    ours = lease.owns(sums)
    reached = [False] * len(leaves)

    def take(index: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        scaled_loss.check_strided(leaf.grad, index)
        grad, leaf.grad, reached[index] = leaf.grad, None, True
        sums[index] = added(sums[index], grad, loss_weight, ratio, lease)

    as_they_are = is_one(loss_weight) and ratio is None
    by_engine = [
        as_they_are and leaf.dtype == accumulation_dtype(leaf.dtype) and (old is None or ours or lease.may_write(old))
        for leaf, old in zip(leaves, sums, strict=True)
    ]
    versions = [old._version if engine and old is not None else 0 for engine, old in zip(by_engine, sums, strict=True)]
    hooks = []
    try:
        for index, leaf in enumerate(leaves):
            leaf.grad = sums[index] if by_engine[index] else None  # the loss may have called a backward of its own
            if not by_engine[index]:
                hooks.append(leaf.register_post_accumulate_grad_hook(functools.partial(take, index)))
        if scaled.requires_grad:
            if total is not None:
                lease.writing("window")
            torch.autograd.backward(scaled, inputs=leaves)
        for index, grad in enumerate([leaf.grad for leaf in leaves]):
            if by_engine[index] and grad is not None:
                scaled_loss.check_strided(grad, index)
                reached[index] = grad is not sums[index] or grad._version != versions[index]
                sums[index] = grad
    finally:
        for hook in hooks:
            hook.remove()
        for leaf in leaves:
            leaf.grad = None
            leaf._backward_hooks = None  # those that the loss registered: the next one brings its own
    check_reached(scaled_loss, any(reached))
    if total is not None and all([engine or got for engine, got in zip(by_engine, reached, strict=True)]):
        lease.own(sums)
    for index, leaf in enumerate(leaves):
        if sums[index] is None:
            sums[index] = widened(torch.zeros_like(leaf, requires_grad=False))
    weight = weight_tensor(loss_weight, scaler.scale)
    grads = new(
        ScaledGrads,
        tree=scaled_loss.tree(sums, None if total is None else flatten(total.tree).leaves),
        scale=scaler.scale if total is None else total.scale,
        weight=weight if total is None else _weight_of(total.weight, weight, aux.reduction),
    )
    return Accumulated(grads, weight, value.detach(), aux)


def _weight_of(total: Tensor, weight: Tensor, reduction: str) -> Tensor:
    """Of a sum the weight is 1, or 0 where none of its parts counts."""
    return torch.maximum(total, weight) if reduction == "sum" else total + weight


def _check_window(params: PyTree, total: ScaledGrads) -> None:
    """Raises unless an open window is one of these parameters, before anything is written to it."""
    flat, sums = flatten(params), flatten(total.tree)
    check_structure(params, flat, total.tree, sums, "params", "the open window")
    for index, (leaf, old) in enumerate(zip(flat.leaves, sums.leaves, strict=True)):
        if is_differentiable(leaf) and old is not None:
            wide = leaf if leaf.dtype is old.dtype else widened(leaf)
            check_leaf(wide, old, lambda index=index: paths(params)[index], "params", "the open window", dtype=True)
