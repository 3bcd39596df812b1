"""How large gradients are, and whether they are finite: one read of memory where that is enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype, is_finite, like, norm_dtype, scalar_dtype
from functional_amp.engine.operators import implement
from functional_amp.engine.sharded import Parts, any_sharded, parts_of
from functional_amp.mode import in_graph, transformed
from functional_amp.torch_private import any_watching, below_modes, foreach_norm

_SINGLE = {torch.float32, torch.float16, torch.bfloat16}
_CHUNK = 2**18
"""Elements that are summed in float32 at once: of 12.6 million in one sum, 4 of 7 digits are right."""


class Norm(NamedTuple):
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

    def over(self, divisor: Tensor) -> Norm:
        """The norm of the same leaves, each divided by a 0-dim tensor."""
        divisor = like(divisor, self.mantissa)
        if self.one_read:
            return self._replace(mantissa=self.mantissa / divisor)
        unit = self.unit / divisor
        # 2**-90 / 2**60 is not a float32: there the norm itself stands in, as of stored gradients it is one.
        normal = torch.isfinite(unit) & (unit >= torch.finfo(torch.float32).tiny)
        return self._replace(
            mantissa=torch.where(normal, self.mantissa, self.value() / divisor), unit=torch.where(normal, unit, 1)
        )


def norm_of(leaves: Sequence[Tensor], norm_type: float) -> Norm:
    """The p-norm of all elements of float and complex leaves."""
    leaves = [leaf for leaf in leaves if leaf.numel()]
    single = norm_type == 2 and leaves and {leaf.dtype for leaf in leaves} <= _SINGLE and not transformed()
    known = all([leaf.is_cpu or leaf.is_cuda for leaf in leaves])
    if single and known and scalar_dtype(leaves[0].device) == torch.float64:
        return _of_parts(leaves) if any_sharded(leaves) else _in_one_read(leaves)
    return _in_units(leaves, norm_type)


def max_abs(leaves: Sequence[Tensor]) -> Tensor:
    """The largest absolute value (of real and imaginary parts), NaN if there is any.

    Returns:
        0-dim, in the dtype the norm is kept in, on the device of the first leaf; 0 without leaves.
    """
    leaves = [leaf.detach() for leaf in leaves if leaf.numel()]
    if not leaves:
        return torch.zeros((), dtype=torch.float32)
    dtype, device = norm_dtype(leaves), leaves[0].device
    if any_sharded(leaves):
        peaks = [parts.largest(_max_abs(parts.leaves, device, dtype)) for parts in parts_of(leaves)]
        return torch.stack(peaks).amax()
    return _max_abs(leaves, device, dtype)


def _max_abs(leaves: Sequence[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    if not leaves:
        return torch.zeros((), dtype=dtype, device=device)
    bounds = [torch.aminmax(_ordered(leaf)) for leaf in leaves]
    low = torch.stack([bound.min.to(device, dtype) for bound in bounds]).amin()
    high = torch.stack([bound.max.to(device, dtype) for bound in bounds]).amax()
    return torch.maximum(high, -low)


def _of_parts(leaves: list[Tensor]) -> Norm:
    """The 2-norm of leaves of which other ranks hold parts: each part is read once, and one number is summed."""
    squares = []
    for parts in parts_of(leaves):
        norm = _in_one_read(parts.leaves).mantissa if parts.leaves else torch.zeros((), dtype=torch.float64)
        squares.append(parts.summed(norm.to(leaves[0].device).square()))
    norm = torch.stack(squares).sum().sqrt()
    return Norm(norm, 1.0, is_finite(norm), one_read=True)


def _in_one_read(leaves: list[Tensor]) -> Norm:
    """The 2-norm of leaves of at most 32 bits, each read once.

    A double holds the square of every float32. A CPU adds doubles slowly unless the compiler
    vectorizes them: its operator adds float32 and looks whether that was enough.
    """
    on_cpu = not in_graph() and set(map(type, leaves)) == {Tensor} and all([leaf.is_cpu for leaf in leaves])
    if in_graph() or (on_cpu and any_watching()):
        norm = torch.ops.functional_amp.norm(leaves)
    else:  # the operator itself converts each leaf twice
        norm = _on_cpu(leaves) if on_cpu else _in_float64(leaves)
    return Norm(norm, 1.0, is_finite(norm), one_read=True)


def _in_float64(leaves: list[Tensor]) -> Tensor:
    norms = foreach_norm(leaves, torch.float64)
    return torch.linalg.vector_norm(torch.stack([like(norm, leaves[0]) for norm in norms]))


def _on_cpu(leaves: list[Tensor]) -> Tensor:
    # Of many elements, dot is the faster sum of squares, and loses fewer digits.
    # The others add strided elements one by one: 2**25 ones end at 2**24.
    large = [leaf for leaf in leaves if _goes_by_dot(leaf)]
    small = [leaf for leaf in leaves if not _goes_by_dot(leaf)] if large else leaves
    norms = [_by_dot(_in_memory_order(leaf).float()) for leaf in large]
    norms += foreach_norm(small, torch.float32) if small else []
    plain = torch.linalg.vector_norm(torch.stack(norms))
    with below_modes():  # a kernel, as torch's own are
        enough = 2.0**-45 < plain.item() < 2.0**60
    if enough:
        return plain.to(torch.float64)
    norm = _in_units(leaves, 2.0)
    return norm.mantissa.to(torch.float64) * norm.unit


def _goes_by_dot(leaf: Tensor) -> bool:
    return leaf.numel() >= 2**15 and (leaf.dtype == torch.float32 or not leaf.is_contiguous())


def _by_dot(vector: Tensor) -> Tensor:
    if vector.numel() <= _CHUNK:
        return torch.dot(vector, vector).sqrt()
    squares = [torch.dot(chunk, chunk) for chunk in vector.split(_CHUNK)]
    return torch.stack(squares).to(torch.float64).sum().sqrt().to(torch.float32)


def _in_memory_order(leaf: Tensor) -> Tensor:
    """All elements in one dimension; a copy only where they do not lie next to each other."""
    if leaf.is_contiguous():
        return leaf.view(-1)
    return leaf.permute(sorted(range(leaf.dim()), key=leaf.stride, reverse=True)).reshape(-1).contiguous()


implement("norm", _on_cpu, "CPU", lambda leaves: torch.empty((), dtype=torch.float64, device=leaves[0].device))
implement("norm", _in_float64, "CUDA")


def _in_units(leaves: Sequence[Tensor], norm_type: float) -> Norm:
    """Any norm in two reads: the largest element gives the unit of the sum."""
    peak = max_abs(leaves)
    finite = is_finite(peak)
    if not leaves:
        return Norm(peak, torch.ones_like(peak), finite)
    unit = _unit(torch.where(finite, peak, 1), norm_type)
    dtype = norm_dtype(leaves)
    norms = []
    for parts in parts_of(leaves) if any_sharded(leaves) else [Parts(list(leaves), ())]:
        own = []
        for leaf in parts.leaves:
            # In the dtype of the norm: beside a float64 leaf the square of a float32 1e20 must not overflow.
            wide = leaf.to(torch.promote_types(accumulation_dtype(leaf.dtype), dtype))
            wide = wide if norm_type == math.inf else wide / like(unit, wide).to(wide.real.dtype)
            own.append(torch.linalg.vector_norm(wide, norm_type).to(peak.device, dtype))
        norms += [_over_ranks(parts, own, norm_type, peak)] if parts.groups else own
    return Norm(torch.linalg.vector_norm(torch.stack(norms), norm_type), unit, finite)


def _over_ranks(parts: Parts, norms: list[Tensor], norm_type: float, peak: Tensor) -> Tensor:
    """The norm of parts, from the norms of this process's own."""
    own = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros_like(peak)
    if norm_type == math.inf:
        return parts.largest(own)
    return parts.summed(own**norm_type) ** (1 / norm_type)


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


def _ordered(leaf: Tensor) -> Tensor:
    """As aminmax takes it: complex numbers as pairs, float8 widened."""
    if leaf.is_complex():
        return torch.view_as_real(leaf.resolve_conj())
    return leaf.float() if leaf.dtype.itemsize == 1 else leaf
