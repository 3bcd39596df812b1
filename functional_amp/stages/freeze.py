"""Freezing parameters as a transformation of the loss function: freeze."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from torch import Tensor

from functional_amp.engine.frozen import frozen_by, hidden, show
from functional_amp.tree import PyTree, described, paths
from functional_amp.values.grads import Loss, check_loss_fn

F = TypeVar("F", bound=Callable[..., Tensor | Loss])


def freeze(loss_fn: F, frozen: Callable[[str, Tensor], bool]) -> F:
    """Leaves some parameters alone: `requires_grad_(False)` for a loss function.

    `scale_backward` and a step do not differentiate them. Their gradient is None, which is not in the norm, and
    their parameters and optimizer state keep their bits, without weight decay. To unfreeze them, go on with the
    loss function that was given: the state has the same structure all the time.

        step = dataclasses.replace(step, loss_fn=freeze(loss_fn, lambda path, leaf: path.startswith("body")))
        step = dataclasses.replace(step, loss_fn=loss_fn)

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar or a `Loss`.
        frozen: `frozen(path, leaf)` says whether a leaf is frozen; the path reads `blocks.0.weight`. It must depend
            on what never changes: the path, the shape, the dtype.

    Returns:
        A loss function of the same values. `autocast` and `with_policy` may stand inside or around it; of a
        function of your own around it use `functools.wraps`, or freeze that one.

    Raises:
        TypeError: for a loss function or a predicate that is not a function.
        RuntimeError: at its call, inside another loss function that does not show what it has frozen.

    >>> import torch
    >>> from functional_amp import NoScale, scale_backward
    >>> loss_fn = lambda params, x: (params["body"] * params["head"] * x).sum()
    >>> params = {"body": torch.ones(1), "head": torch.ones(1)}
    >>> scale_backward(freeze(loss_fn, lambda path, leaf: path == "body"), NoScale(), params, torch.ones(1)).grads.tree
    {'body': None, 'head': tensor([1.])}
    """
    check_loss_fn(loss_fn)
    if not callable(frozen):
        raise TypeError(f"frozen: found {described(frozen)}, expected a function `frozen(path, leaf)`.")

    @functools.wraps(loss_fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if hidden(frozen):
            raise RuntimeError(
                "freeze: found the frozen loss function inside another one that hides what is frozen, expected it to "
                "be seen. Freeze the outer function, or write it with @functools.wraps(frozen_loss_fn)."
            )
        return loss_fn(*args, **kwargs)

    show(wrapped, (*frozen_by(loss_fn), frozen))
    return cast(F, wrapped)


def frozen_leaves(loss_fn: Any, params: PyTree, leaves: Sequence[Any]) -> list[bool]:
    """Which leaves of the parameters a loss function has frozen."""
    predicates = frozen_by(loss_fn)
    if not predicates:
        return [False] * len(leaves)
    return [
        leaf is not None and any([frozen(path, leaf) for frozen in predicates])
        for path, leaf in zip(paths(params), leaves, strict=True)
    ]
