"""Scalars that a compiled graph computes once, not at each element."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from functional_amp.transform import transformed

T = TypeVar("T")

_LIBRARY = torch.library.Library("functional_amp", "FRAGMENT")
_LIBRARY.define("materialize(Tensor scalar) -> Tensor")
_LIBRARY.impl("materialize", torch.clone, "CompositeExplicitAutograd")
_LIBRARY.impl("materialize", torch.empty_like, "Meta")


def materialized(scalar: T) -> T:
    """The same 0-dim tensor, behind an operator that the compiler can not look into.

    Inductor repeats the arithmetic of a scalar in the loop over each tensor that it is used with,
    and a C++ compiler does not move a `pow` out of a loop that writes.
    """
    if not isinstance(scalar, Tensor) or not torch.compiler.is_compiling() or transformed():
        return scalar
    return torch.ops.functional_amp.materialize(scalar)
