"""The global norm and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.backward import ScaledGrads, check_plain, denominator
from functional_amp.checks import LARGEST, check_number
from functional_amp.sharded import is_sharded, of_each_part, whole
from functional_amp.transform import stage, transformed
from functional_amp.tree import (
    PyTree,
    accumulation_dtype,
    flatten_tensors,
    is_differentiable,
    like,
    map_tensors,
    scalar_dtype,
    with_fields,
)
from functional_amp.unscale import all_finite, blocked, gradient_leaves, largest, norm_dtype, usable

_SINGLE = {torch.float32, torch.float16, torch.bfloat16}


class Clipped(NamedTuple):
    """The clipped gradients, and their norm before clipping."""

    grads: Any
    norm: Tensor


class _Norm(NamedTuple):
    """A norm as `mantissa * unit`, so that the square of neither end of float32 is ever taken.

    Attributes:
        finite: whether all elements are, as they are stored.
        one_read: whether the norm was taken in float64, and is finite if and only if all elements are.
    """

    mantissa: Tensor
    unit: Tensor | float
    finite: Tensor
    one_read: bool = False

    def value(self) -> Tensor:
        return self.mantissa.to(torch.float32) if self.one_read else self.mantissa * self.unit


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
        TypeError, ValueError: for a leaf that is no tensor, a norm_type outside its domain.

    >>> import torch
    >>> global_norm({"a": torch.tensor([300.0], dtype=torch.float16), "b": torch.tensor([400.0])})
    tensor(500.)
    """
    _check_norm_type(norm_type)
    if isinstance(grads, ScaledGrads):
        return _scaled_norm(grads, float(norm_type)).value()
    check_plain(grads, "grads")
    return _norm(gradient_leaves(grads), float(norm_type)).value()


@stage
def clip(grads: ScaledGrads | PyTree, max_norm: float | None, *, norm_type: float = 2.0, eps: float = 0.0) -> Clipped:
    """Scales the gradients down so that their global norm is at most `max_norm`.

        grads = grads * max_norm / (norm + eps) if norm > max_norm else grads

    On ScaledGrads this changes the carried scale alone, and no gradient is touched:
    `clip(unscale(g))` and `unscale(clip(g))` agree up to rounding.

    Args:
        grads: ScaledGrads or a pytree of tensors (a bare tensor is one).
        max_norm: > 0, in true units. None turns clipping off and inf clips nothing; the norm is
            measured all the same.
        norm_type: p >= 1, or inf.
        eps: added to the norm that is divided by; 1e-6 is `torch.nn.utils.clip_grad_norm_`'s.

    Returns:
        grads: what was given, bit for bit where the norm is at most max_norm or is not finite
            because a gradient is not; each leaf in its dtype.
        norm: the norm before clipping, as `global_norm` gives it.

    Raises:
        TypeError: for a leaf that is no tensor, a number that is none.
        ValueError: for a max_norm that is zero, negative or NaN, a norm_type below 1, an eps below 0.

    The formula is that of Pascanu et al. 2013, https://arxiv.org/abs/1211.5063.

    >>> import torch
    >>> clip(torch.tensor([3.0, 4.0]), max_norm=1.0)
    Clipped(grads=tensor([0.6000, 0.8000]), norm=tensor(5.))
    """
    check_clip(max_norm, norm_type, eps)
    # Python ints above 2**63 are no tensor operands.
    max_norm, norm_type, eps = None if max_norm is None else float(max_norm), float(norm_type), float(eps)
    if isinstance(grads, ScaledGrads):
        norm = _scaled_norm(grads, norm_type)
        return Clipped(_clipped(grads, norm, max_norm, eps), norm.value())

    check_plain(grads, "grads")
    flat = flatten_tensors(grads, "grads")
    norm = _norm([leaf for leaf in flat.leaves if is_differentiable(leaf)], norm_type)
    if max_norm is None:
        return Clipped(grads, norm.value())
    coefficient = _coefficient(norm, norm.value(), max_norm, eps)
    leaves = [_multiplied(leaf, coefficient) if is_differentiable(leaf) else leaf for leaf in flat.leaves]
    return Clipped(flat.unflatten(leaves), norm.value())


class Measured(NamedTuple):
    """What gradients are to be divided by, clipping included; their norm before it; whether they may be applied."""

    divisor: Tensor
    norm: Tensor
    finite: Tensor


def measured(grads: ScaledGrads, max_norm: float | None, *, norm_type: float = 2.0, eps: float = 0.0) -> Measured:
    """`all_finite`, `unscale` and `clip` as numbers: one read of float32 gradients tells all three."""
    if transformed():
        may_flow = all_finite(grads)
        grads = map_tensors(lambda leaf: blocked(leaf, may_flow) if is_differentiable(leaf) else leaf, grads)
    norm = _scaled_norm(grads, float(norm_type))
    value, divisor = norm.value(), denominator(grads)
    finite = (value.abs() < math.inf) if norm.one_read else norm.finite & like(all_finite(grads), norm.finite)
    if max_norm is not None:
        divisor = divisor.to(scalar_dtype(divisor.device))
        divisor = divisor / like(_coefficient(norm, value, float(max_norm), float(eps)), divisor)
    finite = like(finite, divisor) & usable(divisor.to(torch.float32))
    return Measured(divisor, value, finite)


def _clipped(grads: ScaledGrads, norm: _Norm, max_norm: float | None, eps: float) -> ScaledGrads:
    if max_norm is None:
        return grads
    scale = grads.scale / like(_coefficient(norm, norm.value(), max_norm, eps), grads.scale).to(torch.float32)
    return with_fields(grads, scale=scale)


def _scaled_norm(grads: ScaledGrads, norm_type: float) -> _Norm:
    norm = _norm(gradient_leaves(grads.tree), norm_type)
    divisor = like(denominator(grads), norm.mantissa)
    if norm.one_read:
        return norm._replace(mantissa=norm.mantissa / divisor)
    unit = norm.unit / divisor
    # 2**-90 / 2**60 is no float32: there the norm itself stands in, as of stored gradients it is one.
    normal = torch.isfinite(unit) & (unit >= torch.finfo(torch.float32).tiny)
    return norm._replace(
        mantissa=torch.where(normal, norm.mantissa, norm.value() / divisor), unit=torch.where(normal, unit, 1)
    )


def _norm(leaves: Sequence[Tensor], norm_type: float) -> _Norm:
    leaves = [leaf for leaf in leaves if leaf.numel()]
    single = norm_type == 2 and leaves and {leaf.dtype for leaf in leaves} <= _SINGLE and not transformed()
    on_known = all([(leaf.is_cpu or leaf.is_cuda) and not is_sharded(leaf) for leaf in leaves])
    if single and on_known and scalar_dtype(leaves[0].device) == torch.float64:
        return _norm_in_one_read(leaves)
    return _norm_in_units(leaves, norm_type)


def _norm_in_one_read(leaves: list[Tensor]) -> _Norm:
    """The 2-norm of leaves of at most 32 bits, each read once.

    A double holds the square of every float32. A CPU adds doubles slowly unless the compiler
    vectorizes them: its operator adds float32 and looks whether that was enough.
    """
    if torch.compiler.is_compiling() or all([type(leaf) is Tensor and leaf.is_cpu for leaf in leaves]):
        norm = torch.ops.functional_amp.norm(leaves)
    else:
        norm = _norm_in_float64(leaves)
    return _Norm(norm, 1.0, norm.abs() < math.inf, one_read=True)


def _norm_in_float64(leaves: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(leaves, 2, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([like(norm, leaves[0]) for norm in norms]))


def _norm_on_cpu(leaves: list[Tensor]) -> Tensor:
    # Of many elements, dot is the faster sum of squares, and loses fewer digits.
    # The others add strided elements one by one: 2**25 ones end at 2**24.
    large = [leaf.numel() >= 2**15 and (leaf.dtype == torch.float32 or not leaf.is_contiguous()) for leaf in leaves]
    vectors = [_in_memory_order(leaf).float() for leaf, chosen in zip(leaves, large, strict=True) if chosen]
    small = [leaf for leaf, chosen in zip(leaves, large, strict=True) if not chosen]
    norms = [torch.dot(vector, vector).sqrt() for vector in vectors]
    norms += torch._foreach_norm(small, 2, dtype=torch.float32) if small else ()
    plain = torch.linalg.vector_norm(torch.stack(norms))
    with torch._C.DisableTorchFunction():  # a kernel, below the modes that watch calls, as torch's own are
        enough = 2.0**-45 < plain.item() < 2.0**60
    if enough:
        return plain.to(torch.float64)
    norm = _norm_in_units(leaves, 2.0)
    return norm.mantissa.to(torch.float64) * norm.unit


def _in_memory_order(leaf: Tensor) -> Tensor:
    """All elements in one dimension; a copy only where they do not lie next to each other."""
    return leaf.permute(sorted(range(leaf.dim()), key=leaf.stride, reverse=True)).reshape(-1).contiguous()


_LIBRARY = torch.library.Library("functional_amp", "FRAGMENT")
_LIBRARY.define("norm(Tensor[] leaves) -> Tensor")
_LIBRARY.impl("norm", _norm_on_cpu, "CPU")
_LIBRARY.impl("norm", _norm_in_float64, "CUDA")
_LIBRARY.impl("norm", lambda leaves: torch.empty((), dtype=torch.float64, device=leaves[0].device), "Meta")


def _norm_in_units(leaves: Sequence[Tensor], norm_type: float) -> _Norm:
    """Any norm in two reads: the largest element gives the unit of the sum."""
    peak = largest(leaves)
    finite = torch.isfinite(peak)
    if not leaves:
        return _Norm(peak, torch.ones_like(peak), finite)
    unit = _unit(torch.where(finite, peak, 1), norm_type)
    dtype = norm_dtype(leaves)
    norms = []
    for leaf in leaves:
        # In the dtype of the norm: beside a float64 leaf the square of a float32 1e20 must not overflow.
        wide = leaf.to(torch.promote_types(accumulation_dtype(leaf.dtype), dtype))
        if norm_type != math.inf:
            wide = wide / like(unit, wide).to(wide.real.dtype)
        if norm_type == math.inf:
            norm = of_each_part(lambda part: torch.linalg.vector_norm(part, math.inf), wide).amax()
        else:
            norm = whole(torch.linalg.vector_norm(wide, norm_type))
        norms.append(norm.to(peak.device, dtype))
    return _Norm(torch.linalg.vector_norm(torch.stack(norms), norm_type), unit, finite)


def _unit(peak: Tensor, norm_type: float) -> Tensor:
    """What elements are divided by before their powers are summed.

    A power of two and mostly 1 for p up to 2, so that the result is the plain norm's, bit for
    bit; elsewhere the largest element, as 100.0 ** 20 is not a float32.
    """
    one = torch.ones_like(peak)
    if norm_type == math.inf:
        return one
    if norm_type not in (1, 2):
        return torch.where(peak > 0, peak, one)
    small, large = (2.0**-400, 2.0**400) if peak.dtype == torch.float64 else (2.0**-45, 2.0**40)
    down, up = (2.0**-600, 2.0**600) if peak.dtype == torch.float64 else (2.0**-90, 2.0**100)
    unit = torch.where(peak > large, up, one)
    return torch.where((peak < small) & (peak > 0), down, unit)


def _coefficient(norm: _Norm, value: Tensor, max_norm: float, eps: float) -> Tensor:
    """What the gradients are multiplied by: exactly 1 where they are to stay as they are."""
    over = norm.finite & (value > max_norm)
    # The divisor of the branch not taken is 1: no 0 / 0 reaches an outer derivative.
    divisor = torch.where(over, norm.mantissa + eps / norm.unit, 1)
    return torch.where(over, max_norm / norm.unit / divisor, 1)


def _multiplied(leaf: Tensor, coefficient: Tensor) -> Tensor:
    wide = leaf.to(accumulation_dtype(leaf.dtype))
    return (wide * like(coefficient, wide).to(wide.real.dtype)).to(leaf.dtype)


def _check_norm_type(norm_type: Any) -> None:
    check_number(norm_type, "norm_type", "a number >= 1 or inf")
    if not (1 <= norm_type <= LARGEST or norm_type == math.inf):
        raise ValueError(f"norm_type: found {norm_type!r}, expected a number >= 1 or inf.")


def check_clip(max_norm: Any, norm_type: Any, eps: Any) -> None:
    """Raises for a max_norm, norm_type or eps outside its domain."""
    _check_norm_type(norm_type)
    if max_norm is not None:
        check_number(max_norm, "max_norm", "a number > 0; None turns clipping off")
        if not (0 < max_norm <= LARGEST or max_norm == math.inf):
            raise ValueError(f"max_norm: found {max_norm!r}, expected a number > 0. Use None to turn clipping off.")
    check_number(eps, "eps", "a number >= 0")
    if not 0 <= eps <= LARGEST:
        raise ValueError(f"eps: found {eps!r}, expected a finite number >= 0.")
