"""What a tensor held: is it finite, and from where to where did it reach."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import functional_amp.debug.torch_private as torch_private


@dataclass(frozen=True)
class Range:
    """What a tensor held.

    Attributes:
        name: the leaf (`params.head.weight`), or the operator's name of the argument.
        low, high: of its finite elements; NaN without any.
        nan, inf: how many elements are.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    low: float
    high: float
    nan: int
    inf: int

    def __str__(self) -> str:
        counts = "".join(f", {count} {kind}" for count, kind in ((self.nan, "NaN"), (self.inf, "inf")) if count)
        dtype = str(self.dtype).removeprefix("torch.")
        span = "" if math.isnan(self.low) else f" in [{self.low:.4g}, {self.high:.4g}]"
        return f"{dtype}{list(self.shape)}{span}{counts}"


def range_of(tensor: Tensor, name: str) -> Range:
    """The range of a tensor; of complex numbers, of their parts."""
    values = readable(tensor.detach())
    finite = values[torch.isfinite(values)]
    low, high = (finite.min().item(), finite.max().item()) if finite.numel() else (torch.nan, torch.nan)
    nan, inf = int(torch.isnan(values).sum()), int(torch.isinf(values).sum())
    return Range(name, tensor.dtype, tuple(tensor.shape), low, high, nan, inf)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has neither inf nor NaN. Integers, and tensors without plain memory, count as finite."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    if not torch_private.has_memory(tensor) or type(tensor) not in (Tensor, torch.nn.Parameter):
        return True
    values = readable(tensor)
    # A finite sum proves it, and is the fastest to take. One that overflowed proves nothing.
    if math.isfinite(values.sum().item()):
        return True
    low, high = torch.aminmax(values)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def readable(tensor: Tensor) -> Tensor:
    """A tensor as every kernel takes it: complex numbers as pairs, float8 widened."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor.float() if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
