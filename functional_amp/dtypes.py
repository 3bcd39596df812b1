"""Which dtype each kind of number is added, divided and measured in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor

FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_TINY = torch.finfo(torch.float32).tiny

_ACCUMULATION = {
    torch.float64: torch.float64,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


def is_differentiable(leaf: Any) -> TypeGuard[Tensor]:
    """A float or complex tensor. Integer and bool tensors ride along in a tree untouched."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every real type of 32 bits or fewer; float64 and complex keep theirs."""
    return _ACCUMULATION.get(dtype, torch.float32)


def widened(leaf: Any) -> Any:
    """A leaf in the dtype of sums and updates: 512 bf16 additions of 2**-9 to 1 would leave 1."""
    return leaf.to(accumulation_dtype(leaf.dtype)) if is_differentiable(leaf) else leaf


def divided(leaf: Any, divisor: Tensor) -> Any:
    """A float or complex leaf over a 0-dim divisor, widened first."""
    if not is_differentiable(leaf):
        return leaf
    wide = widened(leaf)
    return wide / like(divisor, wide).to(wide.real.dtype)  # a compiler would widen all elements to the divisor's dtype


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype for 0-dim arithmetic that Python would do in double: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def norm_dtype(leaves: Sequence[Tensor]) -> torch.dtype:
    """float64 if any leaf is of 64-bit reals, else float32."""
    wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    return torch.float64 if wide else torch.float32


def is_finite(scalar: Tensor) -> Tensor:
    """`torch.isfinite` of a number that is not below 0, in one operator."""
    return scalar < math.inf


def like(scalar: Tensor, leaf: Tensor) -> Tensor:
    """A 0-dim tensor on the device of a leaf (parameters may live on several)."""
    return scalar.to(leaf.device)


def counted(count: Tensor, flag: Tensor | int = 1) -> Tensor:
    """An int32 counter, one further where the flag holds; it stays at the end of int32, where a sum wraps around."""
    return torch.maximum(count, count + flag)
