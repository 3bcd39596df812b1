"""Checks of numbers and flags that users give: one found, expected and remedy each."""

from __future__ import annotations

import inspect
import math
import numbers
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

LARGEST = sys.float_info.max
"""Of a Python float; an int may be larger, and can not be converted then."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat)
"""What a number that changes from call to call is in a graph."""


def is_number(value: Any, *, integer: bool = False) -> bool:
    """Whether the value is a real number (an integer) and no bool; numpy's scalars are the numbers they are."""
    kinds = (numbers.Integral, torch.SymInt) if integer else (numbers.Real, *_SYMBOLIC)
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_number(value: Any, name: str, expected: str = "a number", *, integer: bool = False) -> Any:
    """Raises TypeError unless the value is a number (an integer) and no bool; gives it as a Python number."""
    if not is_number(value, integer=integer):
        raise TypeError(f"{name}: found {type(value).__name__} {value!r}, expected {expected}.")
    if isinstance(value, (int, float, *_SYMBOLIC)):
        return value
    try:
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    except OverflowError:  # a fraction beyond the largest double
        return math.copysign(math.inf, value)


def check_finite_number(value: Any, name: str) -> float:
    """Raises unless the value is a finite number; gives it as a float."""
    value = check_number(value, name)
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name}: found {value!r}, expected a finite number.")
    return float(value)


def check_non_negative(value: Any, name: str) -> float:
    """Raises unless the value is a finite number >= 0; gives it as a float."""
    value = check_number(value, name)
    if not 0 <= value <= LARGEST:
        raise ValueError(f"{name}: found {value!r}, expected a finite number >= 0.")
    return float(value)


def check_positive(value: Any, name: str) -> float:
    """Raises unless the value is a finite number > 0; gives it as a float."""
    number = check_finite_number(value, name)
    if number <= 0:
        raise ValueError(f"{name}: found {value!r}, expected a number > 0.")
    return number


def check_unit_interval(value: Any, name: str, *, closed: bool = False) -> float:
    """Raises unless the value is a number in [0, 1), or in [0, 1] where closed; gives it as a float."""
    value = check_number(value, name)
    if not (0 <= value < 1 or (closed and value == 1)):
        raise ValueError(f"{name}: found {value!r}, expected a number in [0, 1{']' if closed else ')'}.")
    return float(value)


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """The parameters of a function by name; None for one without a signature, a builtin."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def own_third(parameters: Mapping[str, inspect.Parameter], expected: str) -> str | None:
    """The name of a third argument that is the function's own: one with a default, as `lambda g, s, lr=lr:` has.

    None where it is the one that is expected, by its name or by a default of None or an empty container.
    """
    in_order = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    for parameter in in_order[2:3]:
        default = parameter.default
        neutral = default is parameter.empty or default is None or (isinstance(default, (dict, tuple)) and not default)
        return None if neutral or parameter.name == expected else parameter.name
    return None


def check_bool(value: Any, name: str) -> None:
    """Raises TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: found {type(value).__name__} {value!r}, expected True or False.")


def check_bool_tensor(flag: Any, name: str = "finite") -> None:
    """Raises TypeError unless the flag is a bool tensor."""
    if not isinstance(flag, Tensor) or flag.dtype != torch.bool:
        found = str(flag.dtype) if isinstance(flag, Tensor) else f"{type(flag).__name__} {flag!r}"
        raise TypeError(
            f"{name}: found {found}, expected a bool tensor. Take it from unscale or all_finite, "
            "or write torch.tensor(True): a Python bool would be read on the host."
        )


def check_flag(flag: Any, name: str = "finite") -> None:
    """Raises unless the flag is a 0-dim bool tensor."""
    check_bool_tensor(flag, name)
    if flag.dim() != 0:
        raise ValueError(
            f"{name}: found shape {tuple(flag.shape)}, expected a 0-dim flag: one for all leaves. "
            "Reduce it with torch.all."
        )
