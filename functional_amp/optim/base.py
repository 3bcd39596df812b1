"""The shape of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch

from functional_amp.checks import own_third, parameters_of
from functional_amp.dtypes import is_differentiable, widened
from functional_amp.engine.unwritten import unwritten_by_optimizer
from functional_amp.mode import stage
from functional_amp.tree import Flat, PyTree, check_leaf, check_structure, flatten, flatten_tensors, paths

Update: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Transact: TypeAlias = Callable[..., tuple[PyTree, PyTree]]


class _Members(NamedTuple):
    init: Callable[[PyTree], PyTree]
    update: Update
    step: Update | None = None
    transact: Transact | None = None


class Optimizer(_Members):
    """An optax-shaped optimizer: pure functions over pytrees.

    Attributes:
        init: `init(params) -> opt_state`, complete: structure, shapes and dtypes never change.
        update: `update(grads, opt_state, params) -> (updates, opt_state)`; the new parameters are
            `apply_updates(params, updates)`. A missing gradient (None) gives a None update and
            leaves the state of its parameter alone.
        step: `step(grads, opt_state, params) -> (params, opt_state)`, the same update with the
            parameters rounded once; optional. `maybe_step` prefers it to `update`.
        transact: `transact(grads, opt_state, params, divisor, applied, storage) -> (params, opt_state)`,
            the whole transaction in one pass over memory; optional. Where the 0-dim bool `applied` holds it
            is the same update with `grads / divisor` (a divisor of None is 1); elsewhere parameters and state
            keep their bits. The storage says where results lie. `maybe_step` prefers it to the other two.

    `optimizer._replace(update=f)` is an optimizer of `f` alone: the old `step` and `transact` are dropped.

    >>> import torch
    >>> from functional_amp import sgd
    >>> sign = sgd(0.1)._replace(update=lambda grads, state, params: (-0.1 * grads.sign(), state))
    >>> sign.step is None and sign.transact is None
    True
    """

    __slots__ = ()

    def _replace(self, /, **members: Any) -> Optimizer:  # pyright: ignore[reportIncompatibleMethodOverride]
        if "update" in members:
            members = {"step": None, **members}
        if "step" in members:
            members = {"transact": None, **members}
        return type(self)(**{**self._asdict(), **members})

    __replace__ = _replace


def step_with(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """The new parameters and state, by the optimizer's `step`, else by its `update`.

    Accepts an `Optimizer`, any object or pair with `init` and `update`, and a plain update function.

    Raises:
        TypeError: for anything else, with the remedy.
    """
    step = members(optimizer)[2]
    if step is not None:
        with unwritten_by_optimizer(grads=grads, opt_state=opt_state, params=params) as own:
            return _pair(step(*own), "step", "(params, opt_state)")
    updates, opt_state = updates_with(optimizer, grads, opt_state, params)
    return apply_updates(params, updates), opt_state


def updates_with(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """The updates and the new state, by the optimizer's `update`, which may take `params` by name or not at all."""
    init, update, *_ = members(optimizer)
    if update is None and init is None and callable(optimizer):
        update = optimizer
    if update is None:
        _refuse(optimizer)
    with unwritten_by_optimizer(grads=grads, opt_state=opt_state, params=params) as own:
        given, named = _arguments(update, *own)
        return _pair(update(*given, **named), "update", "(updates, opt_state)")


def _arguments(update: Any, *given: PyTree) -> tuple[tuple[PyTree, ...], dict[str, Any]]:
    """What an update function takes of gradients, state and parameters: all in order, or the third by name, or two.

    A third argument with a default, as in `lambda grads, state, lr=lr:`, is the function's own.
    `inplace=False` for those that have such a choice, as TorchOpt's do, which write in place by default.
    """
    parameters = parameters_of(update)
    if parameters is None:
        return given, {}
    named = {"inplace": False} if "inplace" in parameters else {}
    kinds = [parameter.kind for name, parameter in parameters.items() if name != "inplace"]
    in_order = [kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for kind in kinds]
    takes_three = sum(in_order) >= 3 and own_third(parameters, "params") is None
    if any([kind is kind.VAR_POSITIONAL for kind in kinds]) or takes_three:
        return given, named
    if "params" in parameters and parameters["params"].kind is parameters["params"].KEYWORD_ONLY:
        named["params"] = given[2]
    return given[:2], named


def init_with(optimizer: Any, params: PyTree) -> PyTree:
    """The first state, by the optimizer's `init`."""
    init = members(optimizer)[0]
    if init is None:
        _refuse(optimizer)
    flat = flatten(params)
    return init(flat.unflatten(flat.leaves))


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError unless there is an update to call, by itself or with an `init`."""
    _, update, step, _ = members(optimizer)
    if update is None and step is None and not callable(optimizer):
        _refuse(optimizer)


def members(optimizer: Any) -> tuple[Any, Any, Any, Any]:
    """The init, update, step and transact of an optimizer or a pair; None for each that is missing."""
    if isinstance(optimizer, (type, torch.optim.Optimizer)):
        _refuse(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer.init, optimizer.update, optimizer.step, optimizer.transact
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and all(map(callable, optimizer)):
        return optimizer[0], optimizer[1], None, None
    init = getattr(optimizer, "init", None)
    # Dicts, GradScaler and torch's schedulers have an `update` or a `step` of another meaning.
    if not callable(init):
        return None, None, None, None
    update, step, transact = (getattr(optimizer, name, None) for name in ("update", "step", "transact"))
    return init, update, step, transact


def _pair(returned: Any, function: str, expected: str) -> tuple[PyTree, PyTree]:
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise TypeError(
            f"optimizer: {function} returned {type(returned).__name__}, expected the pair {expected}. "
            f"Write `return {expected[1:-1]}`, the state after the update included."
        )
    return returned


def _refuse(optimizer: Any) -> NoReturn:
    name = getattr(optimizer, "__name__", type(optimizer).__name__)
    raise TypeError(
        f"optimizer: found {name}, expected Optimizer(init, update) with "
        "update(grads, opt_state, params) -> (updates, opt_state). A torch.optim optimizer holds its state and "
        "changes it in place: use functional_amp.sgd, adam or adamw, or from_torch(torch.optim.NAdam, lr=1e-3)."
    )


@stage
def apply_updates(params: PyTree, updates: PyTree) -> PyTree:
    """Adds updates to parameters: in float32 for half-precision leaves, rounded once.

    Args:
        params: a pytree of tensors.
        updates: a pytree of the same structure; where it is None, the parameter is returned as it is.

    Returns:
        The new parameters, of the dtypes of `params`. Integer and bool leaves stay as they are.

    Raises:
        ValueError, TypeError: if the structures or shapes differ; the path is named.

    >>> import torch
    >>> apply_updates({"w": torch.tensor([1.0]), "b": torch.tensor([2.0])}, {"w": torch.tensor([0.5]), "b": None})
    {'w': tensor([1.5000]), 'b': tensor([2.])}
    """
    flat, update_flat = matched(params, updates, "updates")
    leaves = [
        leaf if update is None or not is_differentiable(leaf) else (widened(leaf) + update).to(leaf.dtype)
        for leaf, update in zip(flat.leaves, update_flat.leaves, strict=True)
    ]
    return flat.unflatten(leaves)


def matched(params: PyTree, tree: PyTree, what: str) -> tuple[Flat, Flat]:
    """Both trees flattened, after checking that the second fits the parameters."""
    flat = flatten_tensors(params, "params")
    return flat, fitted(params, flat, tree, what)


def fitted(params: PyTree, flat: Flat, tree: PyTree, what: str) -> Flat:
    """A tree flattened, after checking that it fits the parameters."""
    other = flatten_tensors(tree, what)
    check_structure(tree, other, params, flat, what, "params")
    for index, (leaf, param) in enumerate(zip(other.leaves, flat.leaves, strict=True)):
        if leaf is None or leaf is param:
            continue
        if param is None:
            raise ValueError(f"{what}: found a tensor at {paths(params)[index]!r}, expected None as in params.")
        if leaf.dtype is param.dtype and leaf.shape == param.shape:
            continue
        check_leaf(leaf, param, lambda index=index: paths(params)[index], what, "params", dtype=False)
        if is_differentiable(param) != is_differentiable(leaf) or (leaf.is_complex() and not param.is_complex()):
            raise TypeError(
                f"{what}: found {leaf.dtype} at {paths(params)[index]!r} for a parameter of {param.dtype}. "
                "Cast it to the parameter's kind of number."
            )
    return other
