"""What turns a rule for one leaf into an optimizer for a tree."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_amp.inplace import owned, wrote
from functional_amp.optim.base import Optimizer, fitted, matched, with_fused
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

_KERNEL_DTYPES = (torch.float32, torch.float64)
_PLAIN = (Tensor, torch.nn.Parameter)


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

    plans: list[_Plan] = []  # the last one: a donated state comes back with the same tensors

    def fused(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None, applied: Tensor, donate: bool
    ) -> tuple[PyTree, Any]:
        count = count_of(opt_state)
        if torch.compiler.is_compiling():
            flats, taken = columns(grads, opt_state, params)
            (groups, rest), plain = _grouped(flats, taken) if kernel else ([], taken), False
        else:
            flats = [flatten(params), flatten(grads), *(flatten(slot) for slot in opt_state[1 : 1 + len(slots)])]
            plan = plans[0] if plans else None  # read once: another thread may put its own there
            if plan is None or not plan.fits(flats):
                flats, taken = columns(grads, opt_state, params)
                plan = _Plan.of(flats, *(_grouped(flats, taken) if kernel else ([], taken)))
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
                _about_to_write()
                news = [old.copy_(new) for new, old in zip(news, olds, strict=True)]
            flats[0].leaves[index] = news[0]
            _put(flats, index, news[1:])
        for indices in groups:
            assert kernel is not None
            _run(kernel, flats, indices, plain, count, divisor, applied, donate)
        new_params, _, *new_slots = (flat.unflatten(flat.leaves) for flat in flats)
        return new_params, state_type(count + applied, *new_slots)

    return Optimizer(init, update, with_fused(step, fused))


class _Plan(NamedTuple):
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
    def of(cls, flats: list[Flat], groups: list[list[int]], rest: list[int]) -> _Plan:
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


def _run(
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
    _about_to_write(*works)
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


def _about_to_write(*leaves: list[Tensor]) -> None:
    if not torch.compiler.is_compiling():
        wrote()
        torch.autograd.graph.increment_version(itertools.chain(*leaves))  # the kernels themselves do not


def _moved(param: Tensor, move: Move) -> Tensor:
    if isinstance(move.decay, Tensor) or move.decay != 0:
        param = param * (1 - move.decay)
    if isinstance(move.alpha, Tensor):
        return param + move.alpha * move.direction
    return torch.add(param, move.direction, alpha=move.alpha)


def _update(param: Tensor, move: Move) -> Tensor:
    update = move.alpha * move.direction
    return update - move.decay * param if isinstance(move.decay, Tensor) or move.decay != 0 else update
