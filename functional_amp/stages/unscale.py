"""Taking the units off: all_finite, unscale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import divided, is_differentiable, is_finite, like, norm_dtype
from functional_amp.engine.norm import max_abs
from functional_amp.mode import stage, stop_gradient_where
from functional_amp.tree import PyTree, flatten_tensors
from functional_amp.values.grads import (
    ScaledGrads,
    check_not_stacked,
    check_plain,
    check_scaled,
    denominator,
    is_valid_divisor,
)


class Unscaled(NamedTuple):
    """Gradients in true units, and whether all of them are finite."""

    grads: PyTree
    finite: Tensor


@stage
def all_finite(grads: ScaledGrads | PyTree, *, norm: Tensor | None = None) -> Tensor:
    """Tells whether no gradient element is inf or NaN, judged in true units.

    Args:
        grads: ScaledGrads or a pytree of tensors; None, integer and bool leaves do not count.
        norm: what `clip` or `global_norm` has measured of these gradients, which tells: a norm is
            finite if all elements are. With it no gradient is read; a norm outside float32, of
            finite elements, counts as overflow.

    Returns:
        0-dim bool tensor on the device of the scale, or of the first leaf; True for an empty tree.
        For ScaledGrads the value is that of `unscale`: a finite element that would leave float32
        when divided by the scale counts as overflow, and so does a scale * weight outside float32.

    Raises:
        TypeError: for a leaf that is not a tensor.
        ValueError: for ScaledGrads that vmap has stacked.

    >>> import torch
    >>> all_finite({"w": torch.tensor([1.0, float("inf")])})
    tensor(False)
    """
    if not isinstance(grads, ScaledGrads):
        check_plain(grads, "grads")
        return is_finite(max_abs(gradient_leaves(grads)) if norm is None else norm)
    check_not_stacked(grads, "all_finite: grads")
    divisor = denominator(grads)
    if norm is not None and norm.dtype != torch.float64:  # a float64 norm can hide a float32 leaf that overflows
        return like(is_finite(norm), divisor) & is_valid_divisor(divisor)
    return _finite(gradient_leaves(grads.tree), divisor)


@stage
def unscale(grads: ScaledGrads) -> Unscaled:
    """Divides the gradients by the scale and the weight that they carry.

    Args:
        grads: the sum of a window.

    Returns:
        grads: the gradient of the window, `tree / (scale * weight)`: float32 whatever the dtype
            of the tree (float64 and complex leaves keep theirs); zero where the weight is 0. Plain
            gradients do not know their weight: where a window may have none, give `maybe_step` the
            ScaledGrads, which does not apply them.
        finite: as `all_finite` gives it.

    Raises:
        TypeError: for gradients that carry no scale: they are unscaled already.
        ValueError: for ScaledGrads that vmap has stacked: call unscale inside the vmap.

    >>> import torch
    >>> unscale(ScaledGrads({"w": torch.tensor([24.0])}, scale=8.0, weight=3.0))
    Unscaled(grads={'w': tensor([1.])}, finite=tensor(True))
    """
    check_scaled(grads, "unscale: grads")
    flat = flatten_tensors(grads.tree, "grads")
    divisor = denominator(grads)
    finite = _finite([leaf for leaf in flat.leaves if is_differentiable(leaf)], divisor)
    divisor = stop_gradient_where(~finite, divisor)
    leaves = [
        divided(stop_gradient_where(~finite, leaf), divisor) if is_differentiable(leaf) else leaf
        for leaf in flat.leaves
    ]
    return Unscaled(flat.unflatten(leaves), finite)


def _finite(leaves: Sequence[Tensor], divisor: Tensor) -> Tensor:
    finite = is_valid_divisor(divisor)
    # Division is monotone: the quotients of a dtype are finite if and only if the largest one is.
    for wide in (False, True):
        group = [leaf for leaf in leaves if (norm_dtype([leaf]) == torch.float64) is wide]
        if group:
            finite = finite & is_finite(like(max_abs(group), divisor) / divisor)
    return finite


def gradient_leaves(grads: PyTree, what: str = "grads") -> list[Tensor]:
    """The float and complex leaves of a checked gradient tree."""
    leaves = flatten_tensors(grads, what).leaves
    return [leaf for leaf in leaves if leaf is not None and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)]
