"""The shape of an optimizer, and what turns a rule for one leaf into one for a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeAlias

import torch
from torch import Tensor

from functional_amp.transform import stage
from functional_amp.tree import (
    Flat,
    PyTree,
    accumulation_dtype,
    check_leaf,
    check_structure,
    flatten,
    flatten_tensors,
    is_differentiable,
    paths,
)

Update: TypeAlias = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]


class Optimizer(NamedTuple):
    """An optax-shaped optimizer: pure functions over pytrees.

    Attributes:
        init: `init(params) -> opt_state`, complete: structure, shapes and dtypes never change.
        update: `update(grads, opt_state, params) -> (updates, opt_state)`; the new parameters are
            `apply_updates(params, updates)`. A missing gradient (None) gives a None update and
            leaves the state of its parameter alone.
        step: `step(grads, opt_state, params) -> (params, opt_state)`, the same update with the
            parameters rounded once, where there is one. `maybe_step` prefers it.
    """

    init: Callable[[PyTree], PyTree]
    update: Update
    step: Update | None = None


class Move(NamedTuple):
    """What an update does to a leaf: `p * (1 - decay) + alpha * direction`."""

    decay: float | Tensor
    alpha: float | Tensor
    direction: Tensor


LeafRule: TypeAlias = Callable[..., tuple[Move, tuple[Tensor | None, ...]]]
RuleAt: TypeAlias = Callable[[Tensor], LeafRule]


def step_with(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    """The new parameters and state, by whatever the optimizer offers.

    Accepts an `Optimizer`, any object or pair with `init` and `update`, and a plain update function.

    Raises:
        TypeError: for anything else, with the remedy.
    """
    init, update, step = _functions(optimizer)
    if step is not None:
        return _pair(step(grads, opt_state, params), "step", "(params, opt_state)")
    if update is None and init is None and callable(optimizer):
        update = optimizer
    if update is None:
        _refuse(optimizer)
    updates, opt_state = _pair(update(grads, opt_state, params), "update", "(updates, opt_state)")
    return apply_updates(params, updates), opt_state


def init_with(optimizer: Any, params: PyTree) -> PyTree:
    """The first state, by the optimizer's `init`."""
    init, _, _ = _functions(optimizer)
    if init is None:
        _refuse(optimizer)
    return init(params)


def check_optimizer(optimizer: Any) -> None:
    """Raises TypeError unless there is an update to call, by itself or with an `init`."""
    _, update, step = _functions(optimizer)
    if update is None and step is None and not callable(optimizer):
        _refuse(optimizer)


def _functions(optimizer: Any) -> tuple[Any, Any, Any]:
    """The init, update and step of an optimizer or a pair; None for each that there is not."""
    if isinstance(optimizer, (type, torch.optim.Optimizer)):
        _refuse(optimizer)
    if isinstance(optimizer, tuple) and len(optimizer) == 2 and all(map(callable, optimizer)):
        return *optimizer, None
    init = getattr(optimizer, "init", None)
    # Others have an update or a step that is not meant: dicts, GradScaler, torch's schedulers.
    if not callable(init):
        return None, None, None
    return init, getattr(optimizer, "update", None), getattr(optimizer, "step", None)


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
        "changes it in place: use functional_amp.sgd, adam or adamw, or write a pair of pure functions."
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


def widened(leaf: Tensor) -> Tensor:
    """The leaf in the dtype of its optimizer arithmetic."""
    return leaf.to(accumulation_dtype(leaf.dtype))


def zeros(params: PyTree) -> PyTree:
    """Zeros of the optimizer's dtype at each float or complex leaf, None elsewhere."""
    flat = flatten_tensors(params, "params")
    return flat.unflatten(
        [
            torch.zeros_like(leaf, dtype=accumulation_dtype(leaf.dtype), requires_grad=False)
            if is_differentiable(leaf)
            else None
            for leaf in flat.leaves
        ]
    )


def zero_count(params: PyTree) -> Tensor:
    """The counter of applied updates: int32, 0-dim, on the device of the parameters."""
    leaf = next((leaf for leaf in flatten_tensors(params, "params").leaves if leaf is not None), None)
    return torch.zeros((), dtype=torch.int32, device=None if leaf is None else leaf.device)


def nothing(params: PyTree) -> PyTree:
    """A tree of None: the state that a leaf does not need."""
    flat = flatten_tensors(params, "params")
    return flat.unflatten([None] * len(flat.leaves))


def per_leaf(state_type: type[Any], slots: Sequence[Callable[[PyTree], PyTree]], rule: RuleAt) -> Optimizer:
    """An optimizer that treats each leaf by itself.

    Args:
        state_type: a NamedTuple of the count of applied updates and one tree a slot.
        slots: what each of these trees is at first, from the parameters (`zeros`).
        rule: `rule(count)` gives `leaf_rule(param, grad, *slots) -> (move, slots)`.
    """

    def rule_at(opt_state: Any) -> LeafRule:
        if not isinstance(opt_state, state_type):
            raise TypeError(
                f"opt_state: found {type(opt_state).__name__}, expected {state_type.__name__}. "
                "Take it from the init of this optimizer, or from its last update."
            )
        count = opt_state[0]
        if not isinstance(count, Tensor) or count.dim() != 0:
            raise TypeError(f"opt_state.step: found {count!r}, expected a 0-dim int32 tensor. Write torch.tensor(...).")
        return rule(count)

    def init(params: PyTree) -> Any:
        return state_type(zero_count(params), *(slot(params) for slot in slots))

    @stage
    def update(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, Any]:
        flat, moves, new_slots = _moves(rule_at(opt_state), grads, params, opt_state, slots)
        updates = [None if m is None else _update(widened(p), m) for p, m in zip(flat.leaves, moves, strict=True)]
        return flat.unflatten(updates), state_type(opt_state[0] + 1, *new_slots)

    @stage
    def step(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, Any]:
        flat, moves, new_slots = _moves(rule_at(opt_state), grads, params, opt_state, slots)
        leaves = [
            p if m is None else _moved(widened(p), m).to(p.dtype) for p, m in zip(flat.leaves, moves, strict=True)
        ]
        return flat.unflatten(leaves), state_type(opt_state[0] + 1, *new_slots)

    return Optimizer(init, update, step)


def _moves(
    leaf_rule: LeafRule, grads: PyTree, params: PyTree, opt_state: Any, slots: Sequence[Callable[[PyTree], PyTree]]
) -> tuple[Flat, list[Move | None], list[PyTree]]:
    """What the update does to each leaf of the parameters, and the new slots."""
    flat, grad_flat = matched(params, grads, "grads")
    names = [f"opt_state.{name}" for name in opt_state._fields[1:]]
    kept, unused = opt_state[1 : 1 + len(slots)], opt_state[1 + len(slots) :]
    if flatten(unused).leaves:
        raise TypeError(
            f"{names[len(slots)]}: found a tree, expected (), as this optimizer keeps none. "
            "Take the state from the init of this very optimizer."
        )
    names = names[: len(slots)]
    slot_flats = [matched(params, tree, name)[1] for tree, name in zip(kept, names, strict=True)]
    moves: list[Move | None] = []
    new_slots: list[list[Tensor | None]] = [[] for _ in slots]
    for index, (param, grad, *state) in enumerate(
        zip(flat.leaves, grad_flat.leaves, *(slot.leaves for slot in slot_flats), strict=True)
    ):
        if grad is None or param is None or not is_differentiable(param):
            moves.append(None)
            new_state = state
        else:
            dtype = accumulation_dtype(param.dtype)
            for name, leaf in zip(names, state, strict=True):
                found = leaf if leaf is None else leaf.dtype
                if found != dtype:
                    raise TypeError(
                        f"{name}: found {found} at {paths(params)[index]!r}, expected {dtype}. "
                        "Take the state from the init of this very optimizer, and do not cast it."
                    )
            move, new_state = leaf_rule(widened(param), grad.to(dtype), *state)
            moves.append(move)
        for slot, value in zip(new_slots, new_state, strict=True):
            slot.append(value)
    return flat, moves, [slot.unflatten(values) for slot, values in zip(slot_flats, new_slots, strict=True)]


def _moved(param: Tensor, move: Move) -> Tensor:
    if isinstance(move.decay, Tensor) or move.decay != 0:
        param = param * (1 - move.decay)
    if isinstance(move.alpha, Tensor):
        return param + move.alpha * move.direction
    return torch.add(param, move.direction, alpha=move.alpha)


def _update(param: Tensor, move: Move) -> Tensor:
    update = move.alpha * move.direction
    return update - move.decay * param if isinstance(move.decay, Tensor) or move.decay != 0 else update


def matched(params: PyTree, tree: PyTree, what: str) -> tuple[Flat, Flat]:
    """Both trees flattened, after checking that the second fits the parameters."""
    flat, other = flatten_tensors(params, "params"), flatten_tensors(tree, what)
    check_structure(tree, other, params, flat, what, "params")
    for index, (leaf, param) in enumerate(zip(other.leaves, flat.leaves, strict=True)):
        if leaf is None:
            continue
        if param is None:
            raise ValueError(f"{what}: found a tensor at {paths(params)[index]!r}, expected None as in params.")
        check_leaf(leaf, param, lambda index=index: paths(params)[index], what, "params", dtype=False)
        if is_differentiable(param) != is_differentiable(leaf) or (leaf.is_complex() and not param.is_complex()):
            raise TypeError(
                f"{what}: found {leaf.dtype} at {paths(params)[index]!r} for a parameter of {param.dtype}. "
                "Cast it to the parameter's kind of number."
            )
    return flat, other
