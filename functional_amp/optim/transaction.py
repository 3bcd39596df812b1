"""The optimizer step that is skipped on inf or NaN, as a transaction: maybe_step."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from functional_amp.checks import check_flag
from functional_amp.dtypes import divided, is_differentiable, like
from functional_amp.engine.operators import materialized
from functional_amp.engine.storage import FRESH, Storage
from functional_amp.mode import mode, one_unless, stage
from functional_amp.optim.base import Optimizer, matched, members, step_with
from functional_amp.selection import select
from functional_amp.tree import PyTree, map_tensors
from functional_amp.values.grads import ScaledGrads, check_not_stacked, is_valid_divisor


class Stepped(NamedTuple):
    """The parameters and the optimizer state after an update, or as they were."""

    params: PyTree
    opt_state: PyTree


@stage
def maybe_step(
    optimizer: Optimizer | Any,
    params: PyTree,
    opt_state: PyTree,
    grads: ScaledGrads | PyTree,
    finite: Tensor,
    *,
    storage: Storage = FRESH,
) -> Stepped:
    """Applies the optimizer where the gradients are finite; a transaction.

    Args:
        optimizer: an `Optimizer`, any pair of `(init, update)`, or an update function.
        params: a pytree of tensors.
        opt_state: what `optimizer.init(params)` gave, or the state since.
        grads: gradients in true units, or ScaledGrads, whose units are taken off in the same pass and
            which are not applied without weight. The parameter of a missing gradient (None) is left alone.
        finite: 0-dim bool tensor. Where False, parameters and optimizer state come back bit for
            bit: moments, step count and with it the schedule.
        storage: where the results lie. `FRESH` writes to nothing that was given; others are the step's own.

    Returns:
        The new parameters and optimizer state: same structure, shapes and dtypes.

    Raises:
        TypeError: if `finite` is not a bool tensor, the optimizer is not one, or a dtype would change.
        ValueError: if the gradients, or what the optimizer returns, do not have the structure and
            shapes of the parameters or of the state; the path is named.

    >>> import torch
    >>> from functional_amp import sgd
    >>> optimizer, params = sgd(lr=0.1), {"w": torch.tensor([1.0])}
    >>> opt_state, grads = optimizer.init(params), {"w": torch.tensor([float("nan")])}
    >>> maybe_step(optimizer, params, opt_state, grads, torch.tensor(False)).params
    {'w': tensor([1.])}
    """
    check_flag(finite)
    divisor = None
    if isinstance(grads, ScaledGrads):
        check_not_stacked(grads, "maybe_step: grads")
        divisor = grads.scale * grads.weight  # 0 without weight, and then not applied
        finite = like(finite, divisor) & is_valid_divisor(divisor)
        grads = grads.tree
    return Stepped(*transact(optimizer, grads, opt_state, params, divisor, finite, storage))


def transact(
    optimizer: Any,
    grads: PyTree,
    opt_state: PyTree,
    params: PyTree,
    divisor: Tensor | None,
    applied: Tensor,
    storage: Storage,
) -> tuple[PyTree, PyTree]:
    """The optimizer's own transaction where it has one, else its step between a division and a selection.

    Under an outer derivative it is the latter: kernels have no derivative, and the branch not taken must be finite too.
    """
    transform = mode() == "transform"
    own = members(optimizer)[3]
    if own is not None and not transform:
        return own(grads, opt_state, params, divisor, applied, storage)
    matched(params, grads, "grads")
    if transform:
        divisor = None if divisor is None else one_unless(applied, divisor)
        grads = map_tensors(lambda g: one_unless(applied, g) if is_differentiable(g) else g, grads)
    else:
        params = map_tensors(lambda p: p.detach() if p.requires_grad else p, params)
    if divisor is not None:
        scale = materialized(divisor)
        grads = map_tensors(lambda g: divided(g, scale), grads)
    applied = materialized(applied)
    new_params, new_state = step_with(optimizer, grads, opt_state, params)
    new_params = select(applied, new_params, params, "params")
    new_state = select(applied, new_state, opt_state, "opt_state")
    return storage.put(params, new_params), storage.put(opt_state, new_state)
