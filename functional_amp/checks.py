"""Checks of numbers that users give."""

from __future__ import annotations

import sys
from typing import Any

LARGEST = sys.float_info.max
"""Of a Python float; an int may be larger, and can not be converted then."""


def check_number(value: Any, name: str, expected: str = "a number", *, integer: bool = False) -> None:
    """Raises TypeError unless the value is a number (an int) and no bool."""
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)):
        raise TypeError(f"{name}: found {type(value).__name__} {value!r}, expected {expected}.")


def check_finite_number(value: Any, name: str) -> float:
    """Raises unless the value is a finite number; gives it as a float."""
    check_number(value, name)
    if not abs(value) <= LARGEST:
        raise ValueError(f"{name}: found {value!r}, expected a finite number.")
    return float(value)


def check_non_negative(value: Any, name: str) -> float:
    """Raises unless the value is a finite number >= 0; gives it as a float."""
    check_number(value, name)
    if not 0 <= value <= LARGEST:
        raise ValueError(f"{name}: found {value!r}, expected a finite number >= 0.")
    return float(value)


def check_unit_interval(value: Any, name: str, *, closed: bool = False) -> None:
    """Raises unless the value is a number in [0, 1), or in [0, 1] where closed."""
    check_number(value, name)
    if not (0 <= value < 1 or (closed and value == 1)):
        raise ValueError(f"{name}: found {value!r}, expected a number in [0, 1{']' if closed else ')'}.")
