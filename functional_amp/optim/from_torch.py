"""Optimizers of torch.optim as pairs of pure functions: from_torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import counted, is_differentiable, widened
from functional_amp.engine.storage import FRESH, Storage
from functional_amp.mode import stage
from functional_amp.optim.base import Optimizer, matched
from functional_amp.optim.imperative import Hyper, Imperative
from functional_amp.optim.in_place import Given, updated
from functional_amp.optim.leafwise import zero_count
from functional_amp.optim.rehearsal import rehearse
from functional_amp.optim.trial import columns_of, names_of
from functional_amp.tree import Flat, PyTree, check_structure, flatten, flatten_tensors, paths


class TorchState(NamedTuple):
    """What an optimizer of torch.optim keeps.

    Attributes:
        step: applied updates (int32, 0-dim).
        state: a tree like the parameters for each of the optimizer's own names; None where it keeps none.
        groups: the numbers that change in each parameter group.
        begun: which parameters have had a gradient, where the optimizer starts from the first one, else ().
    """

    step: Tensor
    state: dict[str, PyTree]
    groups: tuple[dict[str, Tensor], ...] = ()
    begun: PyTree = ()


def from_torch(
    cls: type[torch.optim.Optimizer], *, groups: Callable[[str, Tensor], Hyper] | None = None, **hyper: Any
) -> Optimizer:
    """Makes an `Optimizer` of an optimizer class of torch.optim, or of a subclass of others.

    The class itself does the update, on copies, or in place where a step donates: the same bits as in an imperative
    loop. A parameter without a gradient is left alone, as there. Half-precision parameters are updated as the class
    does it, in their own dtype.

    Args:
        cls: steps from dense gradients, without a closure.
        groups: `groups(path, leaf)` gives the hyperparameters of one parameter that differ from `hyper`;
            parameters with equal ones form a group.
        hyper: what the class takes. A function in place of a number, or in a tuple, is a schedule: it is given the
            number of applied updates.

    Returns:
        An `Optimizer` with a `TorchState`, complete from `init` on: the state that the class begins with. In a graph
        an update is one operator. `torch.func.grad` through it needs `differentiable=True`.

    Raises:
        TypeError: for something else than such a class; from `init`, where a trial step on copies, or a few updates
            beside the class's own, show that it keeps what can't be followed; from an update that changes such a thing.
        ValueError: for hyperparameters that the class refuses, or a schedule of one that it renames.

    On an accelerator, pass `capturable=True` where the class has it: otherwise it counts its steps on the host, and
    a skip is decided there, once a window.

    >>> import torch
    >>> optimizer = from_torch(torch.optim.NAdam, lr=0.1)
    >>> params = {"w": torch.tensor([1.0])}
    >>> optimizer.init(params).state["mu_product"]
    {'w': tensor(1.)}
    >>> params, state = optimizer.step({"w": torch.tensor([1.0])}, optimizer.init(params), params)
    >>> params
    {'w': tensor([0.8944])}
    """
    _check_class(cls)
    if groups is not None and not callable(groups):
        raise TypeError(f"groups: found {type(groups).__name__}, expected a function `groups(path, leaf)` to a dict.")
    imperative = Imperative(cls, hyper, groups)

    def places(params: PyTree) -> tuple[Flat, list[int], list[str]]:
        """The parameters flattened, and where the optimizer's are: float and complex leaves, and their paths."""
        flat = flatten_tensors(params, "params")
        taken = [index for index, leaf in enumerate(flat.leaves) if is_differentiable(leaf)]
        names = paths(params) if groups is not None else []
        return flat, taken, [names[index] for index in taken] if names else [""] * len(taken)

    @stage
    def init(params: PyTree) -> TorchState:
        flat, taken, names = places(params)
        count = zero_count(params)
        if not taken:
            return TorchState(count, {})
        leaves = [flat.leaves[index] for index in taken]
        layout, first = imperative.begin(leaves, names)
        rehearse(imperative, leaves, names)

        def tree(leaves: list[Any]) -> PyTree:
            by_place = dict(zip(taken, leaves, strict=True))
            return flat.unflatten([by_place.get(index) for index in range(len(flat.leaves))])

        columns = columns_of(first.params)
        waiting = iter(first.begun)
        begun = [next(waiting) if begins else None for begins in layout.begins]
        return TorchState(
            count,
            {name: tree([entry.get(name) for entry in first.params]) for name in columns},
            tuple(first.groups) if any(first.groups) else (),
            tree(begun) if first.begun else (),
        )

    def swept(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None, applied: Tensor | None, storage: Storage
    ) -> tuple[PyTree, TorchState]:
        """One update on copies, or on the leaves themselves where the storage says so."""
        if not isinstance(opt_state, TorchState):
            raise TypeError(
                f"opt_state: found {type(opt_state).__name__}, expected TorchState. "
                "Take it from the init of this optimizer, or from its last update."
            )
        grad_flat = matched(params, grads, "grads")[1]
        flat, taken, names = places(params)
        for name, tree in opt_state.state.items():
            check_structure(tree, flatten(tree), params, flat, f"opt_state.state[{name!r}]", "params")
        kept = flatten(opt_state[1:])
        held = [index for index, leaf in enumerate(kept.leaves) if leaf is not None]
        given = Given(
            [flat.leaves[index] for index in taken],
            [grad_flat.leaves[index] for index in taken],
            [kept.leaves[index] for index in held],
            opt_state.step,
            names,
            names_of(opt_state.state, opt_state.groups),
        )
        if taken and all([grad is None for grad in given.grads]):  # all frozen: a schedule begins when they do
            return params, opt_state
        work, kept_work = updated(imperative, given, divisor, applied, storage) if taken else ([], given.kept)
        for index, leaf in zip(taken, work, strict=True):
            flat.leaves[index] = leaf
        for index, leaf in zip(held, kept_work, strict=True):
            kept.leaves[index] = leaf
        count = counted(opt_state.step) if applied is None else counted(opt_state.step, applied)
        return flat.unflatten(flat.leaves), TorchState(count, *kept.unflatten(kept.leaves))

    @stage
    def step(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, TorchState]:
        return swept(grads, opt_state, params, None, None, FRESH)

    @stage
    def update(grads: PyTree, opt_state: Any, params: PyTree) -> tuple[PyTree, TorchState]:
        moved, opt_state = swept(grads, opt_state, params, None, None, FRESH)
        flat, news, given = flatten(params), flatten(moved), flatten(grads)
        updates = [
            widened(new) - widened(old) if grad is not None and is_differentiable(old) else None
            for old, new, grad in zip(flat.leaves, news.leaves, given.leaves, strict=True)
        ]
        return flat.unflatten(updates), opt_state

    @stage
    def transact(
        grads: PyTree, opt_state: Any, params: PyTree, divisor: Tensor | None, applied: Tensor, storage: Storage
    ) -> tuple[PyTree, TorchState]:
        return swept(grads, opt_state, params, divisor, applied, storage)

    return Optimizer(init, update, step, transact)


def _check_class(cls: Any) -> None:
    """Raises TypeError for anything but an optimizer class whose step needs no closure."""
    if not isinstance(cls, type) or not issubclass(cls, torch.optim.Optimizer):
        found = getattr(cls, "__name__", type(cls).__name__)
        raise TypeError(
            f"cls: found {found}, expected a subclass of torch.optim.Optimizer. Pass the class, and what it takes: "
            "from_torch(torch.optim.NAdam, lr=1e-3)."
        )
    step: Any = cls.step
    closure = inspect.signature(step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"cls: found {cls.__name__}, whose step calls a closure several times, expected one that steps from the "
            "gradients it is given. Call it in a loop of its own, or use functional_amp.adamw."
        )
