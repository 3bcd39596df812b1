"""Losses with their weights, gradients with their units, and the arithmetic of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.dtypes import FLOAT32_MAX, FLOAT32_TINY, accumulation_dtype, is_differentiable, like
from functional_amp.registry import register, with_fields
from functional_amp.torch_private import has_derivative
from functional_amp.tree import PyTree, flatten_tensors, path_name
from functional_amp.values.scaler import scale_tensor


@dataclass(frozen=True, eq=False)
class Loss:
    """What a loss function may return instead of a scalar.

    Attributes:
        value: 0-dim float tensor, the mean over the micro-batch.
        weight: how many items it is the mean of (tokens, say): a number >= 0 or a 0-dim tensor.
            The gradient of a window is `sum(weight * grad) / sum(weight)`. The number 0 also says that
            a loss which reaches no parameter is meant.
        aux: any pytree to hand out. A step gives its weighted mean over the window.
        buffers: the new buffers, for a step whose state has buffers.
        reduction: "mean", or "sum" for a value that is a sum already, or divided by the window's total:
            the gradient of a window is `sum(grad)` then, and the weight stays 1, or is 0.

    >>> import torch
    >>> Loss(torch.tensor(2.0), weight=4).weight
    4
    """

    value: Tensor
    weight: float | Tensor = 1.0
    aux: PyTree = None
    buffers: PyTree = None
    reduction: Literal["mean", "sum"] = "mean"


register(Loss, ("value", "weight", "aux", "buffers"), ("reduction",))


@dataclass(frozen=True, eq=False, init=False)
class ScaledGrads:
    """Gradients that carry their units: the gradient meant is `tree / (scale * weight)`.

    Sums of scaled gradients with their weights form a commutative monoid, whose addition is
    `accumulate`. A weight of 0 stands for no gradient at all: the tree becomes zero, NaN or not.

    Args:
        tree: a pytree of tensors, with None where a gradient is missing.
        scale: the loss scale; a number > 0 or a 0-dim float32 tensor.
        weight: the number of items; a number >= 0 or a 0-dim float32 tensor.

    Raises:
        TypeError, ValueError: for a scale or weight of the wrong type, shape or value, a leaf that is not a
            tensor, ScaledGrads inside the tree.

    >>> import torch
    >>> ScaledGrads({"w": torch.tensor([24.0])}, scale=8.0, weight=1.0)  # a gradient of 3
    ScaledGrads(tree={'w': tensor([24.])}, scale=tensor(8.), weight=tensor(1.))
    """

    tree: PyTree
    scale: Tensor
    weight: Tensor

    def __init__(self, tree: PyTree, scale: float | Tensor, weight: float | Tensor = 1.0):
        check_plain(tree, "tree")
        flat = flatten_tensors(tree, "tree")
        scale = scale_tensor(scale, "scale", FLOAT32_TINY, FLOAT32_MAX)
        if scale.dim() != 0:
            raise ValueError(f"scale: found shape {tuple(scale.shape)}, expected a number or a 0-dim tensor.")
        device = next((leaf.device for leaf in flat.leaves if leaf is not None), None)
        scale = scale if device is None else scale.to(device)
        carried = weight_tensor(weight, scale)
        # The stages rely on it that the tree of a weight of 0 is zero.
        if isinstance(weight, Tensor) or _vanishes(weight):
            zero = carried == 0
            tree = flat.unflatten(
                [torch.where(like(zero, leaf), 0, leaf) if is_differentiable(leaf) else leaf for leaf in flat.leaves]
            )
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "weight", carried)


register(ScaledGrads, ("tree", "scale", "weight"))


def check_loss_fn(loss_fn: Any) -> None:
    """Raises TypeError unless the loss function can be called."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: found {type(loss_fn).__name__}, expected a function `loss_fn(params, *batch)`. "
            "Pass the function itself, not the loss that it gives."
        )
    if callable(getattr(loss_fn, "accumulate", None)) and hasattr(loss_fn, "loss_fn"):
        raise TypeError(
            "loss_fn: found a step, expected a function `loss_fn(params, *batch)`. Pass the step's own: step.loss_fn."
        )


def as_loss(returned: Any, weight: float | Tensor = 1.0) -> Loss:
    """The loss function's result as a checked `Loss`."""
    loss = returned if isinstance(returned, Loss) else Loss(returned)
    value = loss.value
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss_fn: found {type(value).__name__}, expected a 0-dim tensor or Loss(value, weight, aux, buffers). "
            "Return what else you need as Loss(..., aux=...)."
        )
    if value.dim() != 0:
        raise ValueError(
            f"loss_fn: found a loss of shape {tuple(value.shape)}, expected a scalar of shape (). "
            "Reduce it with .mean() and give the number of items as Loss(..., weight=...)."
        )
    if not value.is_floating_point():
        raise TypeError(f"loss_fn: found a loss of {value.dtype}, expected a real floating-point one.")
    if isinstance(loss.weight, Tensor) and has_derivative(loss.weight):
        raise ValueError(
            "weight: found one computed from the parameters, expected a count, which is a constant to the gradient. "
            "Write weight.detach(), or multiply it into a sum: Loss(weight * value, reduction='sum')."
        )
    if not is_one(weight):
        if not is_one(loss.weight):
            raise ValueError(
                "weight: found one in the Loss and one as argument, expected one of them. "
                "Drop the argument, or leave the weight of the Loss at 1."
            )
        loss = with_fields(loss, weight=weight)
    check_weight(loss.weight)
    if loss.reduction not in ("mean", "sum"):
        raise ValueError(f"loss_fn: found reduction {loss.reduction!r} in the Loss, expected 'mean' or 'sum'.")
    if loss.reduction == "sum" and not (is_one(loss.weight) or is_zero(loss.weight)):
        raise ValueError(
            f"loss_fn: found weight {loss.weight!r} with reduction='sum', expected 1 (or the number 0 for one that is "
            "not to count): sums are added, not averaged. "
            "Leave the weight out, or return the mean with reduction='mean'."
        )
    return loss


def is_one(weight: Any) -> bool:
    """True for the number 1, for which no pass over the gradients is spent."""
    return type(weight) in (int, float) and weight == 1  # a number that changes in a graph is not looked at


def is_zero(weight: Any) -> bool:
    """True for a number that float32 rounds to 0: such a weight says that nothing is to be left behind."""
    return not isinstance(weight, Tensor) and _vanishes(weight)


def _vanishes(weight: float) -> bool:
    """True for a number that float32 rounds to 0: such a weight is one of 0 to every stage."""
    return weight <= 2.0**-150


def weighted(grad: Tensor, weight: float | Tensor) -> Tensor:
    """`weight * grad`, in float32; zero where the weight is, even if the gradient is NaN."""
    if is_one(weight):
        return grad
    wide = grad.to(accumulation_dtype(grad.dtype))
    if not isinstance(weight, Tensor):
        return torch.zeros_like(wide) if _vanishes(weight) else wide * float(weight)
    factor = like(weight, wide).to(torch.float32)
    return torch.where(factor == 0, 0, wide * factor)


def check_weight(weight: Any) -> None:
    """Raises unless a weight is a finite number >= 0 or a real 0-dim tensor (whose value is not read)."""
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            raise ValueError(f"weight: found shape {tuple(weight.shape)}, expected a number or a 0-dim tensor. Sum it.")
        if weight.is_complex() or weight.dtype == torch.bool:
            raise TypeError(f"weight: found a {weight.dtype} tensor, expected a count or a real number.")
        return
    weight = check_number(weight, "weight", "a number or a 0-dim tensor")
    if not 0 <= weight <= FLOAT32_MAX:
        raise ValueError(f"weight: found {weight!r}, expected a finite number >= 0 that float32 can hold.")


def weight_tensor(weight: float | Tensor, scale: Tensor) -> Tensor:
    """A weight as a float32 tensor on the device of the scale."""
    check_weight(weight)
    if isinstance(weight, Tensor):
        return weight.to(scale.device, torch.float32, copy=True)  # it may lie in a buffer, which an update writes to
    # Not full_like: a compiler makes a constant of the number there, and a graph for each.
    return torch.ones_like(scale, dtype=torch.float32) * float(weight)


def check_scaled(grads: Any, what: str) -> None:
    """Raises TypeError unless the gradients carry their scale, ValueError for a stack of them."""
    if not isinstance(grads, ScaledGrads):
        raise TypeError(
            f"{what}: found {type(grads).__name__}, expected ScaledGrads. Take it from scale_backward or accumulate, "
            "or write ScaledGrads(tree, scale, weight); gradients without a scale are unscaled already."
        )
    check_not_stacked(grads, what)


def check_not_stacked(grads: ScaledGrads, what: str) -> None:
    """Raises ValueError for ScaledGrads that vmap has stacked: each has its own units."""
    if grads.scale.dim() or grads.weight.dim():
        raise ValueError(
            f"{what}: found ScaledGrads stacked by vmap, with a scale of shape {tuple(grads.scale.shape)}, expected "
            "a 0-dim one: each in the stack has units of its own. Call unscale inside the vmap and sum what it gives, "
            "or call the stage itself inside the vmap."
        )


def check_plain(tree: Any, what: str) -> None:
    """Raises TypeError where ScaledGrads stand inside a tree: their scale would count as a gradient."""

    def is_scaled(node: Any) -> bool:
        return isinstance(node, ScaledGrads)

    nodes: list[Any] = []
    optree.tree_map(nodes.append, tree, is_leaf=is_scaled, none_is_leaf=True)
    for index, node in enumerate(nodes):
        if is_scaled(node):
            path = path_name(optree.tree_paths(tree, is_leaf=is_scaled, none_is_leaf=True)[index])
            raise TypeError(
                f"{what}: found ScaledGrads at {path!r}, expected a tensor or None. Their units differ from leaf to "
                "leaf: unscale each of them first, or put the parameters into one tree and differentiate that."
            )


def denominator(grads: ScaledGrads) -> Tensor:
    """What the tree is to be divided by: `scale * weight`, and 1 where the weight is 0."""
    return (grads.scale * grads.weight).masked_fill(grads.weight == 0, 1)


def is_valid_divisor(divisor: Tensor) -> Tensor:
    """Whether gradients can be divided by it; a scale * weight outside float32 counts as overflow."""
    divisor = divisor.to(torch.float32)
    return (divisor > 0) & (divisor < torch.inf)
