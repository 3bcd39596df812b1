"""The global norm and clipping by it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.checks import LARGEST, check_number
from functional_amp.dtypes import accumulation_dtype, is_differentiable, like, scalar_dtype, widened
from functional_amp.engine.norm import Norm, norm_of
from functional_amp.mode import mode, one_of_many, stage, stop_gradient_where
from functional_amp.registry import with_fields
from functional_amp.stages.unscale import all_finite, gradient_leaves
from functional_amp.tree import PyTree, flatten_tensors
from functional_amp.values.grads import ScaledGrads, check_not_stacked, check_plain, denominator


class Clipped(NamedTuple):
    """The clipped gradients, and their norm before clipping."""

    grads: Any
    norm: Tensor


@stage
def global_norm(grads: ScaledGrads | PyTree, norm_type: float = 2.0) -> Tensor:
    """The p-norm of all gradient elements together, in true units.

        (sum |g|**p) ** (1/p);  for p = inf: max |g|

    Args:
        grads: ScaledGrads or a pytree of tensors; None, integer and bool leaves do not count. A
            tensor that stands at two leaves counts twice.
        norm_type: p >= 1, or inf.

    Returns:
        0-dim float32, whatever the dtype of the leaves (float64 if any is float64 or complex128),
        on the device of the first leaf. 0 on the default device for a tree without gradients. inf
        or NaN where an element is.

    Raises:
        TypeError, ValueError: for a leaf that is not a tensor, a norm_type outside its domain.

    >>> import torch
    >>> global_norm({"a": torch.tensor([300.0], dtype=torch.float16), "b": torch.tensor([400.0])})
    tensor(500.)
    """
    _check_norm_type(norm_type)
    if isinstance(grads, ScaledGrads):
        return _scaled_norm(grads, denominator(grads), float(norm_type)).value()
    check_plain(grads, "grads")
    return norm_of(gradient_leaves(grads), float(norm_type)).value()


@stage
def clip(grads: ScaledGrads | PyTree, max_norm: float | None, *, norm_type: float = 2.0, eps: float = 0.0) -> Clipped:
    """Scales the gradients down so that their global norm is at most `max_norm`.

        grads = grads * max_norm / (norm + eps) if norm > max_norm else grads

    On ScaledGrads this changes the carried scale alone, and no gradient is touched (under torch.func
    transforms the gradients are multiplied): `clip(unscale(g))` and `unscale(clip(g))` agree up to rounding.

    Args:
        grads: ScaledGrads or a pytree of tensors (a bare tensor is one).
        max_norm: > 0, in true units. None turns clipping off and inf clips nothing; the norm is
            measured all the same.
        norm_type: p >= 1, or inf.
        eps: added to the norm that is divided by; 1e-6 is `torch.nn.utils.clip_grad_norm_`'s, which also makes
            norms smaller that are within eps below max_norm.

    Returns:
        grads: what was given, bit for bit where the norm is at most max_norm or is not finite
            because a gradient is not; each leaf in its dtype. The scale that ScaledGrads carry
            then is float64 where the norm is.
        norm: the norm before clipping, as `global_norm` gives it.

    Raises:
        TypeError: for a leaf that is not a tensor, a number that is not one.
        ValueError: for a max_norm that is zero, negative or NaN, a norm_type below 1, an eps below 0, and for
            ScaledGrads that vmap has stacked: clip inside the vmap.

    The formula is that of Pascanu et al. 2013, https://arxiv.org/abs/1211.5063.

    >>> import torch
    >>> clip(torch.tensor([3.0, 4.0]), max_norm=1.0)
    Clipped(grads=tensor([0.6000, 0.8000]), norm=tensor(5.))
    """
    check_clip(max_norm, norm_type, eps)
    # A Python int above 2**63 can not be an operand of a tensor.
    max_norm, norm_type, eps = None if max_norm is None else float(max_norm), float(norm_type), float(eps)
    if isinstance(grads, ScaledGrads):
        divisor = denominator(grads)
        norm = _scaled_norm(grads, divisor, norm_type)
        value = norm.value()
        return Clipped(_clipped(grads, divisor, norm, value, max_norm, eps), value)

    check_plain(grads, "grads")
    flat = flatten_tensors(grads, "grads")
    norm = norm_of([leaf for leaf in flat.leaves if is_differentiable(leaf)], norm_type)
    value = norm.value()
    if max_norm is None:
        return Clipped(grads, value)
    coefficient = _coefficient(norm, value, max_norm, eps)
    leaves = [_multiplied(leaf, coefficient) if is_differentiable(leaf) else leaf for leaf in flat.leaves]
    return Clipped(flat.unflatten(leaves), value)


def _clipped(
    grads: ScaledGrads, divisor: Tensor, norm: Norm, value: Tensor, max_norm: float | None, eps: float
) -> ScaledGrads:
    if max_norm is None:
        return grads
    coefficient = _coefficient(norm, value, max_norm, eps)
    if one_of_many():
        # Each example has its own coefficient: in the scale, it would be lost where somebody averages the trees.
        flat = flatten_tensors(grads.tree, "grads")
        leaves = [_multiplied(widened(leaf), coefficient) if is_differentiable(leaf) else leaf for leaf in flat.leaves]
        return with_fields(grads, tree=flat.unflatten(leaves))
    # The product of scale and weight is what counts: for weights of one or two bits it comes out rounded once.
    divisor = divisor.to(scalar_dtype(divisor.device))
    divisor = (divisor / like(coefficient, divisor)).to(value.dtype)
    scale = divisor / grads.weight.masked_fill(grads.weight == 0, 1)
    return with_fields(grads, scale=torch.where(like(coefficient, scale) == 1, grads.scale, scale))


def _scaled_norm(grads: ScaledGrads, divisor: Tensor, norm_type: float) -> Norm:
    check_not_stacked(grads, "grads")
    leaves = gradient_leaves(grads.tree)
    if mode() == "transform":
        bad = ~all_finite(grads)
        leaves, divisor = [stop_gradient_where(bad, leaf) for leaf in leaves], stop_gradient_where(bad, divisor)
    return norm_of(leaves, norm_type).over(divisor)


def _coefficient(norm: Norm, value: Tensor, max_norm: float, eps: float) -> Tensor:
    """What the gradients are multiplied by: exactly 1 where they are to stay as they are."""
    kept = ~(norm.finite & (value > max_norm))
    # The divisor of the branch not taken is 1: no 0 / 0 reaches an outer derivative.
    divisor = (norm.mantissa + eps / norm.unit if eps else norm.mantissa).masked_fill(kept, 1)
    return (max_norm / norm.unit / divisor).masked_fill(kept, 1)


def _multiplied(leaf: Tensor, coefficient: Tensor) -> Tensor:
    wide = leaf.to(accumulation_dtype(leaf.dtype))
    return (wide * like(coefficient, wide).to(wide.real.dtype)).to(leaf.dtype)


def _check_norm_type(norm_type: Any) -> None:
    norm_type = check_number(norm_type, "norm_type", "a number >= 1 or inf")
    if not (1 <= norm_type <= LARGEST or norm_type == math.inf):
        raise ValueError(f"norm_type: found {norm_type!r}, expected a number >= 1 or inf.")


def check_clip(max_norm: Any, norm_type: Any, eps: Any) -> None:
    """Raises for a max_norm, norm_type or eps outside its domain."""
    _check_norm_type(norm_type)
    if max_norm is not None:
        max_norm = check_number(max_norm, "max_norm", "a number > 0; None turns clipping off")
        if not (0 < max_norm <= LARGEST or max_norm == math.inf):
            raise ValueError(f"max_norm: found {max_norm!r}, expected a number > 0. Use None to turn clipping off.")
    eps = check_number(eps, "eps", "a number >= 0")
    if not 0 <= eps <= LARGEST:
        raise ValueError(f"eps: found {eps!r}, expected a finite number >= 0.")
