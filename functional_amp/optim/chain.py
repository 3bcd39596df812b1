"""Transformations of gradients before an optimizer: chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from functional_amp.dtypes import divided
from functional_amp.engine.operators import materialized
from functional_amp.engine.storage import unshared
from functional_amp.engine.unwritten import unwritten_by_optimizer
from functional_amp.mode import stage
from functional_amp.optim.base import (
    Optimizer,
    apply_updates,
    check_optimizer,
    init_with,
    matched,
    members,
    step_with,
    updates_with,
)
from functional_amp.optim.transaction import transact as transaction
from functional_amp.selection import select
from functional_amp.tree import PyTree, flatten, map_tensors


class Transform(NamedTuple):
    """A member of `chain` that stands before the optimizer.

    Attributes:
        init: `init(params) -> state`.
        update: `update(grads, state, params) -> (grads, state)`; None where gradients pass as they are.
        after: `after(params, state) -> state`, called with the new parameters; None where nothing is to be done.
    """

    init: Callable[[PyTree], PyTree]
    update: Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]] | None = None
    after: Callable[[PyTree, PyTree], PyTree] | None = None


def chain(*transforms_and_optimizer: Any) -> Optimizer:
    """Changes gradients before an optimizer sees them, one transformation after the other.

    Args:
        transforms_and_optimizer: `Transform`s, or other pairs of `(init, update)`, and an optimizer last. Gradients
            come to them in true units.

    Returns:
        An `Optimizer`, whose state is the tuple of the states. A skipped window moves none of them. The optimizer
        takes the path it takes alone, in place where a step donates; where no transformation changes gradients,
        their units are still taken off in its one pass.

    Raises:
        TypeError: for a member that is not one.

    >>> import torch
    >>> from functional_amp import clip_by_value, sgd
    >>> optimizer = chain(clip_by_value(0.5), sgd(lr=1.0))
    >>> params = {"w": torch.tensor([1.0, 1.0])}
    >>> optimizer.step({"w": torch.tensor([3.0, 0.25])}, optimizer.init(params), params)[0]
    {'w': tensor([0.5000, 0.7500])}
    """
    if not transforms_and_optimizer:
        raise TypeError("chain: found no optimizer, expected one as the last member. Add one, such as sgd(0.1).")
    *given, optimizer = transforms_and_optimizer
    if isinstance(optimizer, Transform):
        raise TypeError("chain: found a Transform as the last member, expected an optimizer. Put one after it.")
    check_optimizer(optimizer)
    transforms = [_transform(member, place) for place, member in enumerate(given)]
    changes = any([transform.update is not None for transform in transforms])

    def checked(opt_state: Any) -> tuple[Any, ...]:
        if not isinstance(opt_state, (tuple, list)) or len(opt_state) != len(transforms) + 1:
            raise TypeError(
                f"opt_state: found {type(opt_state).__name__}, expected the tuple of {len(transforms) + 1} states. "
                "Take it from the init of this optimizer, or from its last update."
            )
        return tuple(opt_state)

    def init(params: PyTree) -> tuple[PyTree, ...]:
        return (*(transform.init(params) for transform in transforms), init_with(optimizer, params))

    def before(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None = None
    ) -> tuple[PyTree, list[Any], tuple[Any, ...]]:
        """The gradients for the optimizer, in true units; the new states of the transforms, and all old ones."""
        matched(params, grads, "grads")
        states, news = checked(opt_state), []
        if divisor is not None:
            scale = materialized(divisor)
            grads = map_tensors(lambda grad: divided(grad, scale), grads)
        for transform, state in zip(transforms, states[:-1], strict=True):
            if transform.update is not None:
                grads, state = updates_with(transform, grads, state, params)
            news.append(state)
        return grads, news, states

    def after(params: PyTree, states: list[Any]) -> tuple[Any, ...]:
        return tuple([_after(t, params, state) for t, state in zip(transforms, states, strict=True)])

    @stage
    def update(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        grads, news, states = before(grads, opt_state, params)
        updates, last = updates_with(optimizer, grads, states[-1], params)
        return updates, (*after(apply_updates(params, updates), news), last)

    @stage
    def step(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, tuple[PyTree, ...]]:
        grads, news, states = before(grads, opt_state, params)
        params, last = step_with(optimizer, grads, states[-1], params)
        return params, (*after(params, news), last)

    @stage
    def transact(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None, applied: Tensor, storage: Any
    ) -> tuple[PyTree, tuple[PyTree, ...]]:
        grads, news, states = before(grads, opt_state, params, divisor if changes else None)
        divisor = None if changes else divisor
        if storage.writes:  # to what a member was given, which it may have kept
            pairs = zip(transforms, news, strict=True)
            news = [unshared(s, params, grads) if t.update and flatten(s).leaves else s for t, s in pairs]
        params, last = transaction(optimizer, grads, states[-1], params, divisor, applied, storage)
        olds = states[:-1]
        news = select(materialized(applied), after(params, news), olds, "opt_state")
        return params, (*storage.put(olds, news), last)

    return Optimizer(init, update, step, transact)


def _transform(member: Any, place: int) -> Transform:
    if isinstance(member, Transform):
        return member
    init, update, *_ = members(member)
    if init is None or update is None:
        found = getattr(member, "__name__", type(member).__name__)
        raise TypeError(
            f"chain: found {found} at place {place}, expected a Transform or a pair of (init, update). "
            "Write clip_by_value(1.0), or Transform(init, update)."
        )
    return Transform(init, update)


def _after(transform: Transform, params: PyTree, state: PyTree) -> PyTree:
    if transform.after is None:
        return state
    with unwritten_by_optimizer(params=params, opt_state=state) as own:
        return transform.after(*own)
