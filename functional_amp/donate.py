"""The in-place twin of the step: a state is given away, and its storage holds the next one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from functional_amp.backward import Loss, Problem, ScaledGrads, is_one, recorded, weight_tensor, weighted
from functional_amp.inplace import apart, disjoint, owned, writes, wrote
from functional_amp.loans import lending
from functional_amp.scaler import Scaler
from functional_amp.state import TrainState
from functional_amp.transform import stage, transformed
from functional_amp.tree import (
    PyTree,
    accumulation_dtype,
    check_leaf,
    check_structure,
    flatten,
    is_differentiable,
    like,
    new,
    paths,
    widened,
    with_fields,
)

R = TypeVar("R")

_GIVEN = (
    "this TrainState was donated to a step, and its storage holds the next state. "
    "Go on with the state that the step returned, or use make_step(..., donate=False)."
)
_LOST = (
    "this TrainState is lost: a donating step raised after it had begun to write into it. "
    "Go on from a checkpoint, or use make_step(..., donate=False), which never writes."
)
_LOST_WINDOW = (
    "a donating step raised after it had begun to add to the open window, which is lost; params, opt_state, scaler "
    "and buffers are as they were. Go on with dataclasses.replace(state, window=None), and repeat the window."
)


class Added(NamedTuple):
    """The sum so far; the weight, the loss and the aux of the last micro-batch."""

    grads: ScaledGrads
    weight: Tensor
    loss: Tensor
    aux: PyTree


@stage
@lending
def accumulate_in_place(
    loss_fn: Callable[..., Tensor | Loss],
    scaler: Scaler,
    params: PyTree,
    total: ScaledGrads | None,
    *batch: Any,
) -> Added:
    """`scale_backward` and `accumulate` in one: each gradient is added as the engine makes it.

    The values are those of the two stages with backend="autograd", and there is never more than one
    set of gradients. Where nothing is to be weighted or widened the engine adds by itself.
    """
    problem = Problem(loss_fn, scaler, params, batch)
    if total is not None:
        _check_window(params, total)
    leaves, scaled, (value, tensors) = recorded(problem.scaled_loss, problem.leaves)
    loss_weight, aux = problem.handed_out([tensor.detach() for tensor in tensors])
    sums: list[Tensor | None] = [None] * len(leaves) if total is None else problem.of(flatten(total.tree).leaves)
    ratio = None if total is None or total.scale is scaler.scale else total.scale / scaler.scale
    added = [False] * len(leaves)

    def add(index: int, leaf: Tensor) -> None:
        assert leaf.grad is not None
        problem.check_strided(leaf.grad, index)
        grad, leaf.grad, added[index] = widened(weighted(leaf.grad, loss_weight)), None, True
        grad = grad if ratio is None else grad * like(ratio, grad)
        old, sums[index] = sums[index], None
        if old is None:
            sums[index] = grad
        elif owned(old):
            wrote()
            sums[index] = old.add_(grad)
        else:  # the first gradient may be a view of a user's tensor
            sums[index] = old + grad

    as_they_are = is_one(loss_weight) and ratio is None
    by_engine = [
        as_they_are and leaf.dtype == accumulation_dtype(leaf.dtype) and (old is None or owned(old))
        for leaf, old in zip(leaves, sums, strict=True)
    ]
    for index, (leaf, old) in enumerate(zip(leaves, sums, strict=True)):
        leaf.grad = None  # a loss function may have called a backward of its own
        if not by_engine[index]:
            leaf.register_post_accumulate_grad_hook(functools.partial(add, index))
        elif old is not None:
            wrote()
            leaf.grad = old
    if scaled.requires_grad:
        torch.autograd.backward(scaled, inputs=leaves)
    for index, leaf in enumerate(leaves):
        if by_engine[index] and leaf.grad is not None:
            problem.check_strided(leaf.grad, index)
            sums[index], leaf.grad = leaf.grad, None
        if not added[index] and sums[index] is None:
            sums[index] = widened(torch.zeros_like(leaf, requires_grad=False))
    weight = weight_tensor(loss_weight, scaler.scale)
    grads = new(
        ScaledGrads,
        tree=problem.tree(sums),
        scale=scaler.scale if total is None else total.scale,
        weight=weight if total is None else total.weight + weight,
    )
    return Added(grads, weight, value.detach(), aux)


def _check_window(params: PyTree, total: ScaledGrads) -> None:
    """Raises unless an open window is one of these parameters, before anything is written to it."""
    flat, sums = flatten(params), flatten(total.tree)
    check_structure(params, flat, total.tree, sums, "params", "the open window")
    for index, (leaf, old) in enumerate(zip(flat.leaves, sums.leaves, strict=True)):
        if is_differentiable(leaf) and old is not None:
            wide = leaf if leaf.dtype is old.dtype else widened(leaf)
            check_leaf(wide, old, lambda index=index: paths(params)[index], "params", "the open window", dtype=True)


Lineage = list["weakref.ref[TrainState]"]
"""The last state that a step returned, whose tensors are known to be its own."""


def donated(function: Callable[..., R], lineage: Lineage, *, closes: bool, in_graph: bool) -> Callable[..., R]:
    """A function of a state that takes the state away from the caller.

    Where it raises before anything was written, the caller keeps the state as it was. Where it
    raises later, the state is lost if the function `closes` the window, else the open window alone;
    reading what is lost raises. `in_graph` says that the function is a compiled one. Under an outer
    transform and inside a graph nothing is taken away.
    """

    @functools.wraps(function)
    def wrapped(state: TrainState, *args: Any) -> R:
        if torch.compiler.is_compiling() or transformed():
            return function(state, *args)
        fields = dict(vars(state))
        taken = new(TrainState, **fields)
        if not lineage or lineage[0]() is not state:  # a state by other hands
            taken = _own(taken)
        _replace(state, {"_gone": _GIVEN})
        before = writes()
        try:
            result = function(taken, *args)
        except BaseException as error:
            # What a graph had written when it raised nobody knows; one that was never made wrote nothing.
            unwritten = _is_of_compiler(error) if in_graph else writes() == before
            if unwritten:
                _replace(state, fields)
            elif closes:
                _replace(state, {"_gone": _LOST})
            else:
                del fields["window"]
                _replace(state, {**fields, "_gone": _LOST_WINDOW})
            raise
        lineage[:] = [weakref.ref(result if isinstance(result, TrainState) else cast(Any, result)[0])]
        return result

    return wrapped


def _is_of_compiler(error: BaseException) -> bool:
    from torch._dynamo.exc import TorchDynamoException  # a second of import, for those who compile

    return isinstance(error, TorchDynamoException)


def _own(state: TrainState) -> TrainState:
    """The state, of which no two tensors that will be written to lie on the same bytes."""
    window = state.window
    written = (state.params, state.opt_state, state.buffers, None if window is None else window.grads.tree)
    if disjoint(written):
        return state
    params, opt_state, buffers, tree = apart(written)
    if window is not None:
        window = with_fields(window, grads=with_fields(window.grads, tree=tree))
    return with_fields(state, params=params, opt_state=opt_state, buffers=buffers, window=window)


def _replace(state: TrainState, fields: dict[str, Any]) -> None:
    vars(state).clear()
    vars(state).update(fields)
