"""What turns a rule for one leaf into an optimizer for a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_amp.optim.base import Optimizer, fitted, matched, with_fused
from functional_amp.optim.fused import Plan, about_to_write, grouped, run_group
from functional_amp.optim.kernels import Kernel
from functional_amp.transform import stage
from functional_amp.tree import (
    Flat,
    PyTree,
    accumulation_dtype,
    divided,
    flatten,
    flatten_tensors,
    is_differentiable,
    like,
    paths,
    widened,
)


class Move(NamedTuple):
    """What an update does to a leaf: `p * (1 - decay) + alpha * direction`."""

    decay: float | Tensor
    alpha: float | Tensor
    direction: Tensor


LeafRule: TypeAlias = Callable[..., tuple[Move, tuple[Tensor | None, ...]]]
RuleAt: TypeAlias = Callable[[Tensor], LeafRule]


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


def per_leaf(
    state_type: type[Any], slots: Sequence[Callable[[PyTree], PyTree]], rule: RuleAt, kernel: Kernel | None = None
) -> Optimizer:
    """An optimizer that treats each leaf by itself.

    Args:
        state_type: a NamedTuple of the count of applied updates and one tree a slot.
        slots: what each of these trees is at first, from the parameters (`zeros`).
        rule: `rule(count)` gives `leaf_rule(param, grad, *slots) -> (move, slots)`.
        kernel: the same rule for lists of leaves in place, up to the last bit or two.
    """

    def count_of(opt_state: Any) -> Tensor:
        if not isinstance(opt_state, state_type):
            raise TypeError(
                f"opt_state: found {type(opt_state).__name__}, expected {state_type.__name__}. "
                "Take it from the init of this optimizer, or from its last update."
            )
        count = opt_state[0]
        if not isinstance(count, Tensor) or count.dim() != 0:
            raise TypeError(f"opt_state.step: found {count!r}, expected a 0-dim int32 tensor. Write torch.tensor(...).")
        return count

    def init(params: PyTree) -> Any:
        return state_type(zero_count(params), *(slot(params) for slot in slots))

    def columns(grads: PyTree, opt_state: Any, params: PyTree) -> _Columns:
        return _columns(grads, params, opt_state, len(slots))

    @stage
    def update(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, Any]:
        count = count_of(opt_state)
        leaf_rule = rule(count)
        flats, taken = columns(grads, opt_state, params)
        updates: list[Tensor | None] = [None] * len(flats[0].leaves)
        for index in taken:
            param, move, values = _ruled(leaf_rule, flats, index)
            updates[index] = _update(param, move)
            _put(flats, index, values)
        return flats[0].unflatten(updates), state_type(count + 1, *(f.unflatten(f.leaves) for f in flats[2:]))

    @stage
    def step(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, Any]:
        count = count_of(opt_state)
        leaf_rule = rule(count)
        flats, taken = columns(grads, opt_state, params)
        for index in taken:
            param, move, values = _ruled(leaf_rule, flats, index)
            flats[0].leaves[index] = _moved(param, move).to(flats[0].leaves[index].dtype)
            _put(flats, index, values)
        new_params, _, *new_slots = (flat.unflatten(flat.leaves) for flat in flats)
        return new_params, state_type(count + 1, *new_slots)

    plans: list[Plan] = []  # the last one: a donated state comes back with the same tensors

    def fused(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None, applied: Tensor, donate: bool
    ) -> tuple[PyTree, Any]:
        count = count_of(opt_state)
        if torch.compiler.is_compiling():
            flats, taken = columns(grads, opt_state, params)
            (groups, rest), plain = grouped(flats, taken) if kernel else ([], taken), False
        else:
            flats = [flatten(params), flatten(grads), *(flatten(slot) for slot in opt_state[1 : 1 + len(slots)])]
            plan = plans[0] if plans else None  # read once: another thread may put its own there
            if plan is None or not plan.fits(flats):
                flats, taken = columns(grads, opt_state, params)
                plan = Plan.of(flats, *(grouped(flats, taken) if kernel else ([], taken)))
                plans[:] = [plan]
            groups, rest, plain = plan.groups, plan.rest, plan.plain
        leaf_rule = rule(count) if rest else None
        for index in rest:
            assert leaf_rule is not None
            olds = [flats[0].leaves[index], *(slot.leaves[index] for slot in flats[2:])]
            if divisor is not None:
                flats[1].leaves[index] = divided(flats[1].leaves[index], divisor)
            param, move, values = _ruled(leaf_rule, flats, index)
            news = [_moved(param, move).to(olds[0].dtype), *values]
            news = [torch.where(like(applied, old), new, old) for new, old in zip(news, olds, strict=True)]
            if donate:
                about_to_write()
                news = [old.copy_(new) for new, old in zip(news, olds, strict=True)]
            flats[0].leaves[index] = news[0]
            _put(flats, index, news[1:])
        for indices in groups:
            assert kernel is not None
            run_group(kernel, flats, indices, plain, count, divisor, applied, donate)
        new_params, _, *new_slots = (flat.unflatten(flat.leaves) for flat in flats)
        return new_params, state_type(count + applied, *new_slots)

    return Optimizer(init, update, with_fused(step, fused))


class _Columns(NamedTuple):
    """The parameters, the gradients and the slots, flattened; the places that have a gradient."""

    flats: list[Flat]
    taken: list[int]


def _columns(grads: PyTree, params: PyTree, opt_state: Any, n_slots: int) -> _Columns:
    flat, grad_flat = matched(params, grads, "grads")
    names = [f"opt_state.{name}" for name in opt_state._fields[1:]]
    kept, unused = opt_state[1 : 1 + n_slots], opt_state[1 + n_slots :]
    if flatten(unused).leaves:
        raise TypeError(
            f"{names[n_slots]}: found a tree, expected (), as this optimizer keeps none. "
            "Take the state from the init of this very optimizer."
        )
    slot_flats = [fitted(params, flat, tree, name) for tree, name in zip(kept, names, strict=False)]
    taken = [
        index
        for index, (param, grad) in enumerate(zip(flat.leaves, grad_flat.leaves, strict=True))
        if grad is not None and is_differentiable(param)
    ]
    for name, slot in zip(names, slot_flats, strict=False):
        for index in taken:
            leaf, dtype = slot.leaves[index], accumulation_dtype(flat.leaves[index].dtype)
            if leaf is None or leaf.dtype != dtype:
                raise TypeError(
                    f"{name}: found {leaf if leaf is None else leaf.dtype} at {paths(params)[index]!r}, expected "
                    f"{dtype}. Take the state from the init of this very optimizer, and do not cast it."
                )
    return _Columns([flat, grad_flat, *slot_flats], taken)


def _ruled(leaf_rule: LeafRule, flats: list[Flat], index: int) -> tuple[Tensor, Move, Sequence[Tensor | None]]:
    """The widened parameter, what the rule does to it, and its new slots."""
    param = widened(flats[0].leaves[index])
    slots = [slot.leaves[index] for slot in flats[2:]]
    move, values = leaf_rule(param, flats[1].leaves[index].to(param.dtype), *slots)
    return param, move, values


def _put(flats: list[Flat], index: int, values: Sequence[Tensor | None]) -> None:
    for slot, value in zip(flats[2:], values, strict=True):
        slot.leaves[index] = value


def _moved(param: Tensor, move: Move) -> Tensor:
    if isinstance(move.decay, Tensor) or move.decay != 0:
        param = param * (1 - move.decay)
    if isinstance(move.alpha, Tensor):
        return param + move.alpha * move.direction
    return torch.add(param, move.direction, alpha=move.alpha)


def _update(param: Tensor, move: Move) -> Tensor:
    update = move.alpha * move.direction
    return update - move.decay * param if isinstance(move.decay, Tensor) or move.decay != 0 else update
