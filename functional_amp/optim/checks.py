"""The domains of optimizer hyperparameters."""

from __future__ import annotations

import sys
from typing import Any


def check_non_negative(value: Any, name: str) -> float:
    """Raises unless the value is a finite number >= 0; gives it as a float."""
    _check_number(value, name)
    if not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name}: found {value!r}, expected a finite number >= 0.")
    return float(value)


def check_unit_interval(value: Any, name: str, *, closed: bool = False) -> None:
    """Raises unless the value is a number in [0, 1), or in [0, 1] where closed."""
    _check_number(value, name)
    if not (0 <= value < 1 or (closed and value == 1)):
        raise ValueError(f"{name}: found {value!r}, expected a number in [0, 1{']' if closed else ')'}.")


def _check_number(value: Any, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: found {type(value).__name__} {value!r}, expected a number.")
