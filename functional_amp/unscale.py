"""Taking the units off: all_finite, unscale."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_amp.backward import ScaledGrads, check_plain, check_scaled, denominator
from functional_amp.sharded import is_sharded, of_each_part
from functional_amp.transform import stage, transformed
from functional_amp.tree import PyTree, divided, flatten_tensors, is_differentiable, like


class Unscaled(NamedTuple):
    """Gradients in true units, and whether all of them are finite."""

    grads: PyTree
    finite: Tensor


@stage
def all_finite(grads: ScaledGrads | PyTree) -> Tensor:
    """Tells whether no gradient element is inf or NaN, judged in true units.

    Args:
        grads: ScaledGrads or a pytree of tensors; None, integer and bool leaves do not count.

    Returns:
        0-dim bool tensor on the device of the scale, or of the first leaf; True for an empty tree.
        For ScaledGrads the value is that of `unscale`: a finite element that would leave float32
        when divided by the scale counts as overflow, and so does a scale * weight outside float32.

    Raises:
        TypeError: for a leaf that is no tensor.

    >>> import torch
    >>> all_finite({"w": torch.tensor([1.0, float("inf")])})
    tensor(False)
    """
    if not isinstance(grads, ScaledGrads):
        check_plain(grads, "grads")
        return torch.isfinite(largest(gradient_leaves(grads)))
    divisor = denominator(grads)
    return _finite(gradient_leaves(grads.tree), divisor)


@stage
def unscale(grads: ScaledGrads) -> Unscaled:
    """Divides the gradients by the scale and the weight that they carry.

    Args:
        grads: the sum of a window.

    Returns:
        grads: the gradient of the window, `tree / (scale * weight)`: float32 whatever the dtype
            of the tree (float64 and complex leaves keep theirs); zero where the weight is 0.
        finite: as `all_finite` gives it.

    Raises:
        TypeError: for gradients that carry no scale: they are unscaled already.

    >>> import torch
    >>> unscale(ScaledGrads({"w": torch.tensor([24.0])}, scale=8.0, weight=3.0))
    Unscaled(grads={'w': tensor([1.])}, finite=tensor(True))
    """
    check_scaled(grads, "unscale: grads")
    flat = flatten_tensors(grads.tree, "grads")
    divisor = denominator(grads)
    finite = _finite([leaf for leaf in flat.leaves if is_differentiable(leaf)], divisor)
    divisor = blocked(divisor, finite)
    leaves = [divided(blocked(leaf, finite), divisor) if is_differentiable(leaf) else leaf for leaf in flat.leaves]
    return Unscaled(flat.unflatten(leaves), finite)


def blocked(leaf: Tensor, finite: Tensor) -> Tensor:
    """The leaf; a constant to an outer derivative where the gradients are not finite, as 0 * NaN is NaN."""
    return torch.where(like(finite, leaf), leaf, leaf.detach()) if transformed() else leaf


def _finite(leaves: Sequence[Tensor], divisor: Tensor) -> Tensor:
    finite = usable(divisor)
    # Division is monotone: the quotients of a dtype are finite if and only if the largest one is.
    for wide in (False, True):
        group = [leaf for leaf in leaves if (norm_dtype([leaf]) == torch.float64) is wide]
        if group:
            finite = finite & torch.isfinite(like(largest(group), divisor) / divisor)
    return finite


def usable(divisor: Tensor) -> Tensor:
    """Whether gradients can be divided by it; a scale * weight outside float32 counts as overflow."""
    return (divisor > 0) & (divisor < torch.inf)


def gradient_leaves(grads: PyTree, what: str = "grads") -> list[Tensor]:
    """The float and complex leaves of a checked gradient tree."""
    leaves = [leaf for leaf in flatten_tensors(grads, what).leaves if leaf is not None]
    return [leaf for leaf in leaves if leaf.dtype.is_floating_point or leaf.dtype.is_complex]


def largest(leaves: Sequence[Tensor]) -> Tensor:
    """The largest absolute value (of real and imaginary parts), NaN if there is any.

    Returns:
        0-dim, in the dtype the norm is kept in, on the device of the first leaf; 0 without leaves.
    """
    leaves = [leaf.detach() for leaf in leaves if leaf.numel()]
    if not leaves:
        return torch.zeros((), dtype=torch.float32)
    dtype, device = norm_dtype(leaves), leaves[0].device
    if any([is_sharded(leaf) for leaf in leaves]):
        peaks = [of_each_part(_peak, leaf).to(device, dtype).amax() for leaf in leaves]
        return torch.stack(peaks).amax()
    bounds = [torch.aminmax(_ordered(leaf)) for leaf in leaves]
    low = torch.stack([bound.min.to(device, dtype) for bound in bounds]).amin()
    high = torch.stack([bound.max.to(device, dtype) for bound in bounds]).amax()
    return torch.maximum(high, -low)


def _peak(leaf: Tensor) -> Tensor:
    low, high = torch.aminmax(_ordered(leaf))
    return torch.maximum(high, -low)


def _ordered(leaf: Tensor) -> Tensor:
    """As aminmax takes it: complex numbers as pairs, float8 widened."""
    if leaf.is_complex():
        return torch.view_as_real(leaf.resolve_conj())
    return leaf.float() if leaf.dtype.itemsize == 1 else leaf


def norm_dtype(leaves: Sequence[Tensor]) -> torch.dtype:
    """float64 if any leaf is of 64-bit reals, else float32."""
    wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    return torch.float64 if wide else torch.float32
