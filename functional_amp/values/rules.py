"""The rules of other systems, as constructors of `DynamicScale` in their own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from functional_amp.checks import check_bool, check_number
from functional_amp.dtypes import FLOAT32_MAX, FLOAT32_TINY

if TYPE_CHECKING:
    from functional_amp.values.scaler import DynamicScale


def megatron(
    cls: type[DynamicScale],
    scale: float | Tensor = 2.0**32,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    min_scale: float = 1.0,
) -> DynamicScale:
    """Megatron-LM's rule: hysteresis, refilled when the scale grows; a floor of 1."""
    return cls(
        scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        hysteresis=hysteresis,
        min_scale=min_scale,
    )


def deepspeed(
    cls: type[DynamicScale],
    scale: float | Tensor = 2.0**16,
    *,
    scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_scale: float = 1.0,
) -> DynamicScale:
    """DeepSpeed's rule: one more clean step after a start or an overflow; hysteresis.

    `consecutive_hysteresis` refills the hysteresis at each clean step, not only at a growth.
    """
    check(scale_window, "scale_window", int, lambda x: x >= 1, "at least 1")
    check_bool(consecutive_hysteresis, "consecutive_hysteresis")
    return cls(
        scale,
        growth_interval=scale_window,
        hysteresis=hysteresis,
        refill="good" if consecutive_hysteresis else "growth",
        min_scale=min_scale,
        growth_delay=1,
    )


def apex(
    cls: type[DynamicScale],
    scale: float | Tensor = 2.0**16,
    *,
    scale_window: int = 2000,
    hysteresis: int = 1,
    min_scale: float = FLOAT32_TINY,
    max_scale: float = 2.0**24,
) -> DynamicScale:
    """NVIDIA apex's rule: torch's with a ceiling of 2**24.

    `hysteresis` above 1 is its hysteresis kernel, which refills at each clean step.
    """
    check(scale_window, "scale_window", int, lambda x: x >= 1, "at least 1")
    return cls(
        scale,
        growth_interval=scale_window,
        hysteresis=hysteresis,
        refill="good",
        min_scale=min_scale,
        max_scale=max_scale,
    )


def jmp(
    cls: type[DynamicScale],
    scale: float | Tensor = 2.0**15,
    *,
    period: int = 2000,
    factor: float = 2.0,
    min_scale: float = 1.0,
) -> DynamicScale:
    """DeepMind jmp's rule: torch's with a floor of 1; `1 / factor` backs off."""
    check(factor, "factor", float, lambda x: 1 < x <= FLOAT32_MAX, "greater than 1 and finite")
    check(period, "period", int, lambda x: x >= 1, "at least 1")
    return cls(scale, growth_factor=factor, backoff_factor=1 / factor, growth_interval=period, min_scale=min_scale)


def flax(
    cls: type[DynamicScale],
    scale: float | Tensor = 2.0**16,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = FLOAT32_TINY,
) -> DynamicScale:
    """flax's rule: it grows on the clean step after the interval, and up to float32's maximum."""
    check(growth_interval, "growth_interval", int, lambda x: x >= 1, "at least 1")
    return cls(
        scale,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval + 1,
        min_scale=min_scale,
        max_scale=FLOAT32_MAX,
    )


def check(value: Any, name: str, kind: type, domain: Callable[[Any], bool], expected: str) -> None:
    """Raises TypeError for the wrong kind of number, ValueError for one outside its domain or int32."""
    value = check_number(value, name, kind.__name__, integer=kind is int)
    if not domain(value):
        raise ValueError(f"{name}: found {value!r}, expected {expected}.")
    if kind is int and not -(2**31) <= value < 2**31:
        raise ValueError(f"{name}: found {value!r}, expected an int below 2**31: the counters are int32.")
