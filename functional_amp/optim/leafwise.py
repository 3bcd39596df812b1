"""What turns a rule for one leaf into an optimizer for a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype, counted, divided, is_differentiable, like, widened
from functional_amp.engine.sharded import all_sharded_like, any_sharded, local_parts, placed_like
from functional_amp.engine.storage import Storage
from functional_amp.mode import stage
from functional_amp.optim.base import Optimizer, fitted, matched
from functional_amp.optim.fused import Plan, plan_of, run_group
from functional_amp.optim.kernels import Kernel
from functional_amp.tree import Flat, PyTree, flatten, flatten_again, flatten_tensors, paths


class LeafUpdate(NamedTuple):
    """What an update does to a leaf: `p * (1 - decay) + alpha * direction`."""

    decay: float | Tensor
    alpha: float | Tensor
    direction: Tensor


LeafRule: TypeAlias = Callable[..., tuple[LeafUpdate, tuple[Tensor, ...]]]
RuleAt: TypeAlias = Callable[[Tensor], LeafRule]
Finish: TypeAlias = Callable[[Tensor, Tensor, LeafUpdate], Tensor]
"""`finish(leaf, leaf widened, update)` gives what stands at the place of the leaf in the result."""


def slot_dtype(leaf: Tensor, state_dtype: torch.dtype | None) -> torch.dtype:
    """What the moments of a leaf are kept in: complex ones in their own dtype."""
    return accumulation_dtype(leaf.dtype) if state_dtype is None or leaf.is_complex() else state_dtype


def check_state_dtype(state_dtype: Any) -> None:
    """Raises TypeError for anything but None and the real float dtypes of 16 bits and more."""
    if state_dtype is not None and state_dtype not in _STATE_DTYPES:
        raise TypeError(
            f"state_dtype: found {state_dtype!r}, expected one of {', '.join(map(str, _STATE_DTYPES))}, or None for "
            "the dtype of the arithmetic."
        )


_STATE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def zeros(params: PyTree, state_dtype: torch.dtype | None = None) -> PyTree:
    """Zeros of the optimizer's dtype at each float or complex leaf, None elsewhere."""
    flat = flatten_tensors(params, "params")
    return flat.unflatten(
        [
            torch.zeros_like(leaf, dtype=slot_dtype(leaf, state_dtype), requires_grad=False)
            if is_differentiable(leaf)
            else None
            for leaf in flat.leaves
        ]
    )


def zero_count(params: PyTree) -> Tensor:
    """The counter of applied updates: int32, 0-dim, on the device of the parameters."""
    leaf = next((leaf for leaf in flatten_tensors(params, "params").leaves if leaf is not None), None)
    return torch.zeros((), dtype=torch.int32, device=None if leaf is None else leaf.device)


def nones(params: PyTree) -> PyTree:
    """A tree of None, for an optimizer that keeps no state of its leaves."""
    flat = flatten_tensors(params, "params")
    return flat.unflatten([None] * len(flat.leaves))


def leafwise(
    state_type: type[Any],
    state_dtypes: Sequence[torch.dtype | None],
    rule: RuleAt,
    kernel: Kernel | None = None,
) -> Optimizer:
    """An optimizer that treats each leaf by itself.

    Args:
        state_type: a NamedTuple of the count of applied updates and one tree for each slot.
        state_dtypes: what each of these trees is kept in, zeros at first; None for the dtype of the arithmetic.
        rule: `rule(count)` gives `leaf_rule(param, grad, *slots) -> (update, slots)`.
        kernel: the same rule for lists of leaves in place, up to the last bit or two; it takes no other dtypes.
    """
    kernel = None if any(state_dtypes) else kernel

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
        return state_type(zero_count(params), *(zeros(params, dtype) for dtype in state_dtypes))

    def swept(grads: PyTree, opt_state: Any, params: PyTree, finish: Finish, *, keep: bool) -> tuple[PyTree, Any]:
        """The one sweep: the rule at each leaf that has a gradient; the others stay (`keep`) or become None."""
        count = count_of(opt_state)
        leaf_rule = rule(count)
        flats, taken = _columns(grads, params, opt_state, state_dtypes)
        results: list[Tensor | None] = list(flats[0].leaves) if keep else [None] * len(flats[0].leaves)
        for index in taken:
            results[index], values = _ruled(leaf_rule, flats, index, finish)
            _put(flats, index, values)
        new_slots = (flat.unflatten(flat.leaves) for flat in flats[2:])
        count = counted(count) if taken or not _all_frozen(flats) else count
        return flats[0].unflatten(results), state_type(count, *new_slots)

    @stage
    def update(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, Any]:
        return swept(grads, opt_state, params, _difference, keep=False)

    @stage
    def step(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, Any]:
        return swept(grads, opt_state, params, _moved, keep=True)

    @stage
    def transact(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None, applied: Tensor, storage: Storage
    ) -> tuple[PyTree, Any]:
        param_flat = flatten(params)
        if any_sharded(param_flat.leaves):  # what treats each element by itself runs on the parts that are here
            placed = placed_like(grads, params)
            new_params, new_state = transact(
                local_parts(placed), local_parts(opt_state), local_parts(params), divisor, applied, storage
            )
            return all_sharded_like(new_params, params), all_sharded_like(new_state, opt_state)
        count = count_of(opt_state)
        trees = [grads, *opt_state[1 : 1 + len(state_dtypes)]]
        flats = [param_flat, *(flatten_again(tree, param_flat.spec) for tree in trees)]

        def make(lasting: bool) -> Plan:
            checked, taken = _columns(grads, params, opt_state, state_dtypes)
            return plan_of(checked, taken, kernel, lasting=lasting)

        plan = storage.recall(transact, flats[0].leaves, make, lambda plan: plan.fits(flats))
        leaf_rule = rule(count) if plan.rest else None
        for index in plan.rest:
            assert leaf_rule is not None
            olds = [flats[0].leaves[index], *(slot.leaves[index] for slot in flats[2:])]
            if divisor is not None:
                flats[1].leaves[index] = divided(flats[1].leaves[index], divisor)
            result, values = _ruled(leaf_rule, flats, index, _moved)
            news: list[Any] = [result, *values]
            news = [torch.where(like(applied, old), new, old) for new, old in zip(news, olds, strict=True)]
            news = storage.put(olds, news)
            flats[0].leaves[index] = news[0]
            _put(flats, index, news[1:])
        for group in plan.groups:
            assert kernel is not None
            run_group(kernel, flats, group, count, divisor, applied, storage)
        new_params, _, *new_slots = (flat.unflatten(flat.leaves) for flat in flats)
        moves = plan.rest or plan.groups or not _all_frozen(flats)
        return new_params, state_type(counted(count, applied) if moves else count, *new_slots)

    return Optimizer(init, update, step, transact)


def _all_frozen(flats: list[Flat]) -> bool:
    """Whether parameters have no gradient at all. Then no update is counted: bias correction begins with the first."""
    return any([is_differentiable(leaf) for leaf in flats[0].leaves]) and not any(
        [is_differentiable(leaf) for leaf in flats[1].leaves]
    )


class _Columns(NamedTuple):
    """The parameters, the gradients and the slots, flattened; the places that have a gradient."""

    flats: list[Flat]
    taken: list[int]


def _columns(grads: PyTree, params: PyTree, opt_state: Any, state_dtypes: Sequence[torch.dtype | None]) -> _Columns:
    n_slots = len(state_dtypes)
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
    for name, slot, state_dtype in zip(names, slot_flats, state_dtypes, strict=False):
        for index in taken:
            leaf, dtype = slot.leaves[index], slot_dtype(flat.leaves[index], state_dtype)
            if leaf is None or leaf.dtype != dtype:
                raise TypeError(
                    f"{name}: found {leaf if leaf is None else leaf.dtype} at {paths(params)[index]!r}, expected "
                    f"{dtype}. Take the state from the init of this very optimizer, and do not cast it."
                )
    return _Columns([flat, grad_flat, *slot_flats], taken)


def _ruled(leaf_rule: LeafRule, flats: list[Flat], index: int, finish: Finish) -> tuple[Tensor, Sequence[Tensor]]:
    """What `finish` makes of a parameter and its update, and the new slots."""
    leaf = flats[0].leaves[index]
    param = widened(leaf)
    slots = [slot.leaves[index] for slot in flats[2:]]
    wide = [slot.to(param.dtype) for slot in slots]
    update, values = leaf_rule(param, flats[1].leaves[index].to(param.dtype), *wide)
    return finish(leaf, param, update), [_stored(value, slot.dtype) for value, slot in zip(values, slots, strict=True)]


def _stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A moment as it is kept: what float16 has no number for, as its largest. An inf would stay for ever."""
    if dtype == torch.float16:
        value = value.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return value.to(dtype)


def _put(flats: list[Flat], index: int, values: Sequence[Tensor]) -> None:
    for slot, value in zip(flats[2:], values, strict=True):
        slot.leaves[index] = value


def _moved(leaf: Tensor, param: Tensor, update: LeafUpdate) -> Tensor:
    """The new parameter, rounded once."""
    if isinstance(update.decay, Tensor) or update.decay != 0:
        param = param * (1 - update.decay)
    if isinstance(update.alpha, Tensor):
        return (param + update.alpha * update.direction).to(leaf.dtype)
    return torch.add(param, update.direction, alpha=update.alpha).to(leaf.dtype)


def _difference(leaf: Tensor, param: Tensor, update: LeafUpdate) -> Tensor:
    """What is to be added to the parameter."""
    step = update.alpha * update.direction
    decays = isinstance(update.decay, Tensor) or update.decay != 0
    return step - update.decay * param if decays else step
