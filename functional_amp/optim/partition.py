"""Different optimizers for different leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any

from torch import Tensor

from functional_amp.optim.base import Optimizer, matched, step_with, transact, with_fused
from functional_amp.optim.per_leaf import nothing
from functional_amp.transform import stage
from functional_amp.tree import PyTree, flatten, merge, paths


def partition(optimizers: Mapping[str, Optimizer | None], label: Callable[[str, Tensor], str]) -> Optimizer:
    """Gives each leaf of the parameters to the optimizer of its label.

    Args:
        optimizers: an optimizer for each label, or None to freeze the leaves of that label. Frozen
            leaves are still differentiated and in the global norm: `split` leaves them out.
        label: `label(path, leaf)` names a label; the path reads `blocks.0.weight`. It must depend
            on what never changes: the path, the shape, the dtype.

    Returns:
        An `Optimizer` whose state is a dict from each label to the state of its optimizer, over the
        tree of its leaves with None elsewhere.

    Raises:
        TypeError: if `optimizers` is no mapping to optimizers, or `label` no function.
        ValueError: for a label without an optimizer; the path is named.

    >>> import torch
    >>> from functional_amp import sgd
    >>> optimizer = partition(
    ...     {"decay": sgd(0.1, weight_decay=1.0), "plain": sgd(0.1)},
    ...     lambda path, leaf: "decay" if leaf.ndim > 1 else "plain",
    ... )
    >>> params = {"bias": torch.ones(1), "weight": torch.ones(1, 1)}
    >>> grads = {"bias": torch.zeros(1), "weight": torch.zeros(1, 1)}
    >>> optimizer.step(grads, optimizer.init(params), params)[0]
    {'bias': tensor([1.]), 'weight': tensor([[0.9000]])}
    """
    if not isinstance(optimizers, Mapping):
        raise TypeError(f"optimizers: found {type(optimizers).__name__}, expected a dict from labels to optimizers.")
    for name, optimizer in optimizers.items():
        functions = [getattr(optimizer, part, None) for part in ("init", "update")]
        if optimizer is not None and not all(map(callable, functions)):
            raise TypeError(
                f"optimizers[{name!r}]: found {getattr(optimizer, '__name__', type(optimizer).__name__)}, expected "
                "Optimizer(init, update), such as sgd(...), or None to freeze the leaves of this label."
            )
    optimizers = dict(optimizers)
    if not callable(label):
        raise TypeError(f"label: found {type(label).__name__}, expected a function `label(path, leaf)`.")

    def labels(params: PyTree) -> list[str | None]:
        found = [
            None if leaf is None else label(path, leaf)
            for path, leaf in zip(paths(params), flatten(params).leaves, strict=True)
        ]
        for path, leaf, name in zip(paths(params), flatten(params).leaves, found, strict=True):
            if leaf is not None and (not isinstance(name, Hashable) or name not in optimizers):
                raise ValueError(
                    f"label: found {name!r} at {path!r}, expected one of {list(optimizers)}. "
                    "Add an optimizer for it, or None to freeze its leaves."
                )
        return found

    def part(tree: PyTree, names: list[str | None], wanted: str) -> PyTree:
        flat = flatten(tree)
        return flat.unflatten([leaf if name == wanted else None for leaf, name in zip(flat.leaves, names, strict=True)])

    def check_state(opt_state: Any) -> None:
        if not isinstance(opt_state, Mapping) or set(opt_state) != set(optimizers):
            found = list(opt_state) if isinstance(opt_state, Mapping) else type(opt_state).__name__
            raise ValueError(
                f"opt_state: found {found}, expected a dict with the labels {list(optimizers)}. "
                "Take it from the init of this optimizer, or from its last update."
            )

    def init(params: PyTree) -> dict[str, Any]:
        names = labels(params)
        return {
            name: None if optimizer is None else optimizer.init(part(params, names, name))
            for name, optimizer in optimizers.items()
        }

    @stage
    def update(grads: PyTree, opt_state: dict[str, Any], params: PyTree) -> tuple[PyTree, dict[str, Any]]:
        matched(params, grads, "grads")
        check_state(opt_state)
        names = labels(params)
        updates, states = [nothing(params)], {}
        for name, optimizer in optimizers.items():
            states[name] = opt_state[name]
            if optimizer is not None:
                mine = part(params, names, name)
                moved, states[name] = optimizer.update(part(grads, names, name), opt_state[name], mine)
                updates.append(moved)
        return merge(*updates), states

    @stage
    def step(grads: PyTree, opt_state: dict[str, Any], params: PyTree) -> tuple[PyTree, dict[str, Any]]:
        matched(params, grads, "grads")
        check_state(opt_state)
        names = labels(params)
        stepped, states = [], {}
        for name, optimizer in optimizers.items():
            mine = part(params, names, name)
            if optimizer is None:
                states[name] = opt_state[name]
            else:
                mine, states[name] = step_with(optimizer, part(grads, names, name), opt_state[name], mine)
            stepped.append(mine)
        return merge(*stepped), states

    @stage
    def fused(
        grads: PyTree, opt_state: dict[str, Any], params: PyTree, divisor: Tensor | None, applied: Tensor, donate: bool
    ) -> tuple[PyTree, dict[str, Any]]:
        matched(params, grads, "grads")
        check_state(opt_state)
        names = labels(params)
        stepped, states = [], {}
        for name, optimizer in optimizers.items():
            mine, states[name] = part(params, names, name), opt_state[name]
            if optimizer is not None:
                given = part(grads, names, name), opt_state[name], mine
                mine, states[name] = transact(optimizer, *given, divisor, applied, donate=donate)
            stepped.append(mine)
        return merge(*stepped), states

    return Optimizer(init, update, with_fused(step, fused))
