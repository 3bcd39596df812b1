"""Whether a stage runs plainly or under an outer `torch.func` transform."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import optree
import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def transformed() -> bool:
    """True inside `torch.func.grad`, `vmap` and the other functorch transforms."""
    return torch._C._are_functorch_transforms_active()


def stage(function: Callable[P, R], *, detach: bool = True) -> Callable[P, R]:
    """Keep the outputs of a pure function free of autograd history.

    `torch.func.grad` ignores a `no_grad` that surrounds it, so differentiation inside the
    stage is unaffected. Under an outer transform the stage stays differentiable.

    Args:
        detach: False where no input has a history that an output could be.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if transformed():
            return function(*args, **kwargs)
        with torch.no_grad():
            output = function(*args, **kwargs)
        return _detached(output) if detach else output

    return wrapped


def _detached(output: R) -> R:
    """The output without history: a tensor that is returned unchanged may have one of its own; others stay the same."""
    if torch.compiler.is_compiling():
        return output  # the graph that is traced under no_grad has no history to give
    leaves, spec = optree.tree_flatten(cast(Any, output), none_is_leaf=True)
    if not any([getattr(leaf, "requires_grad", False) for leaf in leaves]):
        return output
    return cast(
        R, optree.tree_unflatten(spec, [x.detach() if getattr(x, "requires_grad", False) else x for x in leaves])
    )


class _FiniteCotangent(torch.autograd.Function):
    """The identity, through which neither inf nor NaN flows back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (cotangent,) = grad_outputs
        return torch.where(torch.isfinite(cotangent), cotangent, 0)


class _FiniteTangent(_FiniteCotangent):
    """The same with a forward mode, which dynamo can not trace."""

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (tangent,) = grad_inputs
        return torch.where(torch.isfinite(tangent), tangent, 0)


def finite_cotangents(tree: R) -> R:
    """The tree, through whose float leaves neither inf nor NaN flows back under an outer derivative.

    The cotangent of the gradients of a skipped update is 0, but 0 times the NaN of their own derivative is NaN.
    """
    if not transformed():
        return tree
    barrier = _FiniteCotangent if torch.compiler.is_compiling() else _FiniteTangent

    def guarded(leaf: Any) -> Any:
        return barrier.apply(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return cast(R, optree.tree_map(guarded, cast(Any, tree)))
