"""Different optimizers for different leaves."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from functional_amp.mode import stage
from functional_amp.optim.base import Optimizer, matched, step_with
from functional_amp.optim.leafwise import nones
from functional_amp.optim.transaction import transact as transaction
from functional_amp.selection import merge
from functional_amp.tree import PyTree, flatten, paths, same_leaves

Given: TypeAlias = tuple[PyTree, Any, PyTree]
Run: TypeAlias = Callable[..., tuple[PyTree, PyTree]]


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
        TypeError: if `optimizers` is not a mapping to optimizers, or `label` not a function.
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

    def init(params: PyTree) -> dict[str, Any]:
        names = labels(params)
        return {
            name: None if optimizer is None else optimizer.init(_part(params, names, name))
            for name, optimizer in optimizers.items()
        }

    def swept(
        run: Run, frozen: Callable[[PyTree], PyTree], names: list[str | None], given: Given
    ) -> tuple[PyTree, dict[str, Any]]:
        """The one sweep: `run` for each optimizer on its leaves, `frozen` on the leaves without an optimizer."""
        grads, opt_state, params = given
        results, states = [], dict(opt_state)
        for name, optimizer in optimizers.items():
            mine = _part(params, names, name)
            if optimizer is None:
                results.append(frozen(mine))
            else:
                result, states[name] = run(optimizer, _part(grads, names, name), opt_state[name], mine)
                results.append(result)
        return merge(*results) if results else frozen(params), states

    def checked(grads: PyTree, opt_state: Any, params: PyTree) -> Given:
        matched(params, grads, "grads")
        if not isinstance(opt_state, Mapping) or set(opt_state) != set(optimizers):
            found = list(opt_state) if isinstance(opt_state, Mapping) else type(opt_state).__name__
            raise ValueError(
                f"opt_state: found {found}, expected a dict with the labels {list(optimizers)}. "
                "Take it from the init of this optimizer, or from its last update."
            )
        return grads, opt_state, params

    @stage
    def update(grads: PyTree, opt_state: dict[str, Any], params: PyTree) -> tuple[PyTree, dict[str, Any]]:
        given = checked(grads, opt_state, params)
        return swept(lambda optimizer, *mine: optimizer.update(*mine), nones, labels(params), given)

    @stage
    def step(grads: PyTree, opt_state: dict[str, Any], params: PyTree) -> tuple[PyTree, dict[str, Any]]:
        given = checked(grads, opt_state, params)
        return swept(step_with, lambda mine: mine, labels(params), given)

    @stage
    def transact(
        grads: PyTree, opt_state: dict[str, Any], params: PyTree, divisor: Tensor | None, applied: Tensor, storage: Any
    ) -> tuple[PyTree, dict[str, Any]]:
        def run(optimizer: Any, grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
            return transaction(optimizer, grads, opt_state, params, divisor, applied, storage)

        given = checked(grads, opt_state, params)
        leaves = flatten(params).leaves
        known = storage.recall(
            transact, leaves, lambda lasting: (leaves, labels(params)), lambda known: same_leaves(known[0], leaves)
        )
        return swept(run, lambda mine: mine, known[1], given)

    return Optimizer(init, update, step, transact)


def _part(tree: PyTree, names: list[str | None], wanted: str) -> PyTree:
    """The leaves of one label, with None at the others."""
    flat = flatten(tree)
    return flat.unflatten([leaf if name == wanted else None for leaf, name in zip(flat.leaves, names, strict=True)])
