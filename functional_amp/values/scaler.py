"""The loss scale: DynamicScale, StaticScale, NoScale, and the rule that moves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from functional_amp.checks import check_bool_tensor
from functional_amp.dtypes import FLOAT32_MAX, FLOAT32_TINY, counted
from functional_amp.mode import stage
from functional_amp.registry import register, with_fields
from functional_amp.values import rules
from functional_amp.values.grad_scaler import grad_scaler_state, scaler_arguments
from functional_amp.values.rules import check as _check
from functional_amp.values.scale import Scaler, check_scaler, scale_tensor

S = TypeVar("S", bound=Scaler)


@dataclass(frozen=True, eq=False, init=False)
class DynamicScale:
    """The dynamic loss scale: one rule with the knobs of all the known ones.

        good: tracker += 1
              if tracker >= growth_interval:
                  grown = min(scale * growth_factor, max_scale)
                  scale = grown if grown is finite, else scale
                  tracker = 0;  hysteresis_tracker = hysteresis
              if refill == "good": hysteresis_tracker = hysteresis
        bad:  hysteresis_tracker = max(hysteresis_tracker - 1, 0)
              if hysteresis_tracker == 0: scale = max(scale * backoff_factor, min_scale)
              tracker = -growth_delay

    The defaults are those of `torch.amp.GradScaler`, bit for bit, except where that breaks: the
    scale never becomes 0, inf or NaN, and an interval lowered below the tracker still grows. The
    product is rounded once, in float32: factors that are float32 numbers (2, 0.5, 1.5) give
    GradScaler's bits, others (1.1) come within one ulp of it.

    Args:
        scale: the number the loss is multiplied with; a finite positive number, or such a
            float32 tensor of no dimensions.
        growth_tracker: clean updates since the last growth or overflow; -growth_delay at first.
        hysteresis_tracker: the scale backs off when an overflow brings it to 0; hysteresis at first.
        growth_factor: > 1.
        backoff_factor: in (0, 1).
        growth_interval: clean updates after which the scale grows, >= 1.
        min_scale: where backing off ends, > 0. At the floor updates are still skipped.
        max_scale: where growing ends; inf refuses only a growth to inf.
        hysteresis: overflows until the scale backs off, >= 1.
        refill: "growth" restores the hysteresis when the scale grows, "good" at each clean update.
        growth_delay: extra clean updates demanded at the start and after an overflow, >= 0.

    Attributes:
        scale: float32, 0-dim. The other two trackers: int32, 0-dim. The rest is static.

    Raises:
        TypeError, ValueError: for an argument of the wrong type or outside its domain.

    >>> import torch
    >>> scaler = DynamicScale(scale=8.0, growth_interval=2)
    >>> scaler = update_scale(scaler, torch.tensor(True))
    >>> update_scale(scaler, torch.tensor(True)).scale
    tensor(16.)
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_tracker: Tensor
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    hysteresis: int
    refill: Literal["growth", "good"]
    growth_delay: int

    def __init__(
        self,
        scale: float | Tensor = 2.0**16,
        growth_tracker: int | Tensor | None = None,
        hysteresis_tracker: int | Tensor | None = None,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = FLOAT32_TINY,
        max_scale: float = math.inf,
        hysteresis: int = 1,
        refill: Literal["growth", "good"] = "growth",
        growth_delay: int = 0,
    ):
        _check(growth_factor, "growth_factor", float, lambda x: 1 < x <= FLOAT32_MAX, "greater than 1 and finite")
        _check(backoff_factor, "backoff_factor", float, lambda x: 0 < x < 1, "between 0 and 1")
        _check(growth_interval, "growth_interval", int, lambda x: x >= 1, "at least 1")
        _check(min_scale, "min_scale", float, lambda x: FLOAT32_TINY <= x <= FLOAT32_MAX, "a normal float32 above 0")
        ceiling = "from min_scale to float32's maximum, or inf"
        _check(max_scale, "max_scale", float, lambda x: min_scale <= x <= FLOAT32_MAX or x == math.inf, ceiling)
        _check(hysteresis, "hysteresis", int, lambda x: x >= 1, "at least 1")
        _check(growth_delay, "growth_delay", int, lambda x: x >= 0, "at least 0")
        if refill not in ("growth", "good"):
            raise ValueError(f"refill: found {refill!r}, expected 'growth' or 'good'.")
        tracker = -growth_delay if growth_tracker is None else growth_tracker
        left = hysteresis if hysteresis_tracker is None else hysteresis_tracker
        scale = scale_tensor(scale, "scale", min_scale, max_scale)
        fields = {
            "scale": scale,
            "growth_tracker": _counter(tracker, "growth_tracker", scale),
            "hysteresis_tracker": _counter(left, "hysteresis_tracker", scale),
            "growth_factor": float(growth_factor),
            "backoff_factor": float(backoff_factor),
            "growth_interval": int(growth_interval),
            "min_scale": float(min_scale),
            "max_scale": float(max_scale),
            "hysteresis": int(hysteresis),
            "refill": refill,
            "growth_delay": int(growth_delay),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def update(self, finite: Tensor) -> DynamicScale:
        """The rule of the class docstring; `update_scale` calls it."""
        tracker = counted(self.growth_tracker)
        grow = tracker >= self.growth_interval
        grown = (self.scale * self.growth_factor).clamp(max=self.max_scale)
        grown = torch.where(grow & (grown <= FLOAT32_MAX), grown, self.scale)
        tracker = tracker.masked_fill(grow, 0)
        refilled = self.hysteresis_tracker.masked_fill(finite if self.refill == "good" else grow, self.hysteresis)

        left = (self.hysteresis_tracker - 1).clamp(min=0)
        backed_off = (self.scale * self.backoff_factor).clamp(min=self.min_scale)
        backed_off = torch.where(left == 0, backed_off, self.scale)

        return with_fields(
            self,
            scale=torch.where(finite, grown, backed_off),
            growth_tracker=torch.where(finite, tracker, -self.growth_delay),
            hysteresis_tracker=torch.where(finite, refilled, left),
        )

    megatron = classmethod(rules.megatron)
    deepspeed = classmethod(rules.deepspeed)
    apex = classmethod(rules.apex)
    jmp = classmethod(rules.jmp)
    flax = classmethod(rules.flax)

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> DynamicScale:
        """Continue where a `torch.amp.GradScaler` stopped.

        An imperative loop over k micro-batches scales loss / k, the composed step scales the loss: GradScaler's
        scale S acts as S / k here. Pass `{**state, "scale": state["scale"] / k}`.

        Args:
            state: what `GradScaler.state_dict()` gave.

        Raises:
            TypeError, ValueError: for another dict, or a scale that is 0, infinite or NaN.

        >>> DynamicScale.from_state_dict(torch.amp.GradScaler("cpu", init_scale=256.0).state_dict()).scale
        tensor(256.)
        """
        return cls(**scaler_arguments(state))

    def state_dict(self) -> dict[str, Any]:
        """Write the dict that `torch.amp.GradScaler.load_state_dict` takes; multiply its scale by k, see above.

        Reads the scale and the tracker on the host.

        Raises:
            ValueError: for a hysteresis, a growth delay, a floor or a ceiling, which GradScaler does not have.

        >>> DynamicScale(scale=256.0).state_dict()["scale"]
        256.0
        """
        return grad_scaler_state(self)


@dataclass(frozen=True, eq=False, init=False)
class StaticScale:
    """A loss scale that never moves.

    Args:
        scale: a finite positive number, or such a float32 tensor of no dimensions.

    >>> StaticScale(1024.0).scale
    tensor(1024.)
    """

    scale: Tensor

    def __init__(self, scale: float | Tensor):
        object.__setattr__(self, "scale", scale_tensor(scale, "scale", FLOAT32_TINY, FLOAT32_MAX))

    def update(self, finite: Tensor) -> StaticScale:
        return self


@dataclass(frozen=True, eq=False, init=False)
class NoScale:
    """No loss scaling, for float32 and bfloat16: the scale is exactly 1 and never moves.

    Non-finite gradients are still seen and their update is still skipped.

    >>> NoScale().scale
    tensor(1.)
    """

    scale: Tensor

    def __init__(self, scale: float | Tensor = 1.0):
        if not isinstance(scale, Tensor) and scale != 1:
            raise ValueError(f"scale: found {scale!r}, expected 1: use StaticScale({scale!r}).")
        object.__setattr__(self, "scale", scale_tensor(scale, "scale", 1.0, 1.0))

    def update(self, finite: Tensor) -> NoScale:
        return self


_TRACKERS = ("scale", "growth_tracker", "hysteresis_tracker")
register(DynamicScale, _TRACKERS, tuple(name for name in DynamicScale.__dataclass_fields__ if name not in _TRACKERS))
register(StaticScale, ("scale",))
register(NoScale, ("scale",))


@stage
def update_scale(scaler: S, finite: Tensor) -> S:
    """Moves the scale after a window: growth after enough clean ones, back-off after an overflow.

    Args:
        scaler: the scaler whose scale the window was made with.
        finite: 0-dim bool tensor, from `unscale` or `all_finite`; flags of several gradient trees
            combine with `&`.

    Returns:
        The next scaler: same type, same hyperparameters, same dtypes.

    Raises:
        TypeError: if `finite` is not a bool tensor, or `scaler` is not a scaler.
        ValueError: if the shape of `finite` is not the scale's.

    The rule is in the docstring of `DynamicScale`; its source is `torch.amp.GradScaler`.

    >>> import torch
    >>> update_scale(DynamicScale(scale=8.0), torch.tensor(False)).scale
    tensor(4.)
    """
    check_scaler(scaler)
    check_bool_tensor(finite)
    if finite.shape != scaler.scale.shape:
        raise ValueError(
            f"finite: found shape {tuple(finite.shape)}, expected {tuple(scaler.scale.shape)} as the scale has. "
            "Combine the flags of several trees with & or torch.all."
        )
    return scaler.update(finite.to(scaler.scale.device))


def _counter(value: int | Tensor, name: str, scale: Tensor) -> Tensor:
    if isinstance(value, Tensor):
        if value.dtype != torch.int32:
            raise TypeError(f"{name}: found a {value.dtype} tensor, expected int32. Cast it with .int().")
        if value.shape != scale.shape:
            raise ValueError(f"{name}: found shape {tuple(value.shape)}, expected the scale's, {tuple(scale.shape)}.")
        return value
    _check(value, name, int, lambda x: True, "an int")
    return torch.full_like(scale, value, dtype=torch.int32)
