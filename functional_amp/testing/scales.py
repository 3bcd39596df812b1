"""Strategies for scalers: every rule, with hyperparameters within its domain."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from functional_amp.dtypes import FLOAT32_TINY
from functional_amp.testing.tensors import float32s
from functional_amp.values.scaler import DynamicScale, NoScale, StaticScale


def growth_factors(exact: bool = True) -> st.SearchStrategy[float]:
    """Growth factors; exact ones are float32 numbers.

    >>> from hypothesis import find
    >>> find(growth_factors(), lambda factor: factor != 2)
    4.0
    """
    known = st.sampled_from([2.0, 4.0, 1.5, 1.25])
    drawn = float32s(1.0, 10.0, exclude_min=True) if exact else st.floats(1.0, 10.0, exclude_min=True)
    return st.one_of(known, drawn)


def backoff_factors(exact: bool = True) -> st.SearchStrategy[float]:
    """Backoff factors; exact ones are float32 numbers.

    >>> from hypothesis import find
    >>> find(backoff_factors(), lambda factor: True)
    0.5
    """
    known = st.sampled_from([0.5, 0.25, 0.75])
    bounds: dict[str, Any] = {"exclude_min": True, "exclude_max": True}
    drawn = float32s(0.0, 1.0, **bounds) if exact else st.floats(0.0, 1.0, **bounds)
    return st.one_of(known, drawn)


def loss_scales(low: float = 2.0**-126, high: float = 2.0**127) -> st.SearchStrategy[float]:
    """Loss scales: float32 numbers, powers of two more often than not.

    >>> from hypothesis import find
    >>> find(loss_scales(low=1.0), lambda scale: scale > 5)
    8.0
    """
    exponents = st.integers(round(math.log2(low)), round(math.log2(high))).map(lambda exponent: 2.0**exponent)
    return st.one_of(exponents, float32s(low, high))


@st.composite
def hyperparameters(draw: st.DrawFn, *, exact: bool = True) -> dict[str, Any]:
    """Keyword arguments of `DynamicScale` within its domain, the scale among them.

    Args:
        exact: whether the factors are float32 numbers.
    """
    floor = draw(st.one_of(st.just(FLOAT32_TINY), loss_scales(high=2.0**20)), label="floor")
    ceiling = draw(st.one_of(st.just(math.inf), loss_scales(low=2.0**20)), label="ceiling")
    return {
        "scale": draw(loss_scales().map(lambda scale: min(max(scale, floor), ceiling)), label="scale"),
        "growth_factor": draw(growth_factors(exact)),
        "backoff_factor": draw(backoff_factors(exact)),
        "growth_interval": draw(st.integers(1, 6)),
        "min_scale": floor,
        "max_scale": ceiling,
        "hysteresis": draw(st.integers(1, 4)),
        "refill": draw(st.sampled_from(["growth", "good"])),
        "growth_delay": draw(st.integers(0, 3)),
    }


def dynamic_scales() -> st.SearchStrategy[DynamicScale]:
    """Any `DynamicScale` within its domain, the defaults (torch's rule) among them.

    >>> from hypothesis import find
    >>> find(dynamic_scales(), lambda scaler: True).growth_interval
    2000
    """
    return st.one_of(st.builds(DynamicScale), hyperparameters().map(lambda arguments: DynamicScale(**arguments)))


def megatron_scales() -> st.SearchStrategy[DynamicScale]:
    """`DynamicScale.megatron` with its own arguments."""
    return st.builds(
        DynamicScale.megatron,
        loss_scales(low=1.0),
        growth_factor=growth_factors(),
        backoff_factor=backoff_factors(),
        growth_interval=st.integers(1, 6),
        hysteresis=st.integers(1, 4),
        min_scale=st.sampled_from([1.0, 0.5, FLOAT32_TINY]),
    )


def deepspeed_scales() -> st.SearchStrategy[DynamicScale]:
    """`DynamicScale.deepspeed` with its own arguments."""
    return st.builds(
        DynamicScale.deepspeed,
        loss_scales(low=1.0),
        scale_window=st.integers(1, 6),
        hysteresis=st.integers(1, 4),
        consecutive_hysteresis=st.booleans(),
        min_scale=st.sampled_from([1.0, 0.5, FLOAT32_TINY]),
    )


def apex_scales() -> st.SearchStrategy[DynamicScale]:
    """`DynamicScale.apex` with its own arguments, the hysteresis kernel among them."""
    return st.builds(
        DynamicScale.apex,
        loss_scales(high=2.0**24),
        scale_window=st.integers(1, 6),
        hysteresis=st.integers(1, 4),
        max_scale=st.sampled_from([2.0**24, 2.0**100, math.inf]),
    )


def jmp_scales() -> st.SearchStrategy[DynamicScale]:
    """`DynamicScale.jmp` with its own arguments."""
    return st.builds(
        DynamicScale.jmp,
        loss_scales(low=1.0),
        period=st.integers(1, 6),
        factor=growth_factors(),
        min_scale=st.sampled_from([1.0, 0.5, FLOAT32_TINY]),
    )


def flax_scales() -> st.SearchStrategy[DynamicScale]:
    """`DynamicScale.flax` with its own arguments."""
    return st.builds(
        DynamicScale.flax,
        loss_scales(),
        growth_factor=growth_factors(),
        backoff_factor=backoff_factors(),
        growth_interval=st.integers(1, 6),
    )


def scalers() -> st.SearchStrategy[DynamicScale | StaticScale | NoScale]:
    """Scalers of all rules: torch's, the five other systems', static ones and `NoScale`.

    >>> from hypothesis import find
    >>> find(scalers(), lambda scaler: isinstance(scaler, StaticScale)).scale
    tensor(1.)
    """
    return st.one_of(
        dynamic_scales(),
        megatron_scales(),
        deepspeed_scales(),
        apex_scales(),
        jmp_scales(),
        flax_scales(),
        loss_scales().map(StaticScale),
        st.builds(NoScale),
    )
