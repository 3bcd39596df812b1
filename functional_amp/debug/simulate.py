"""What a scaler would do on a given sequence of overflows."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from functional_amp.checks import check_number
from functional_amp.debug.table import power
from functional_amp.values.scaler import Scaler, check_scaler, update_scale


@dataclass(frozen=True)
class Trajectory:
    """The way of a scale.

    Attributes:
        name: what `plot_scale` calls it: the scaler with what differs from its defaults.
            `dataclasses.replace(trajectory, name="megatron")` gives it another.
        scales: the scale that each window used.
        overflows: whether it overflowed, and so was skipped.
        scaler: after the last window.
    """

    name: str
    scales: tuple[float, ...]
    overflows: tuple[bool, ...]
    scaler: Any

    @property
    def skipped(self) -> int:
        """How many windows were skipped."""
        return sum(self.overflows)

    def __str__(self) -> str:
        if not self.scales:
            return f"{self.name}: no window"
        return (
            f"{self.name}: {len(self.scales)} windows, {self.skipped} skipped ({self.skipped / len(self.scales):.1%}); "
            f"scale from {power(min(self.scales))} to {power(max(self.scales))}, then {power(float(self.scaler.scale))}"
        )


def simulate(
    scaler: Scaler, overflows: Sequence[bool] | Callable[[int, float], bool], steps: int | None = None
) -> Trajectory:
    """Follow a scaler through a sequence of overflows, by `update_scale` itself.

    Args:
        scaler: as it is before the first window.
        overflows: whether each window overflows; or a function `overflows(step, scale)` that tells,
            steps counted from 0: `lambda step, scale: scale > 2.0**14` stands for gradients that fit
            up to that scale.
        steps: how many windows; needed for a function, by default all of a sequence.

    Returns:
        A `Trajectory`.

    Raises:
        TypeError: for what is no scaler, overflows that are neither, steps that are no int.
        ValueError: for a function without steps, steps below 0, more steps than overflows.

    >>> from functional_amp import DynamicScale
    >>> simulate(DynamicScale(8.0, growth_interval=2), [False, False, True, False]).scales
    (8.0, 8.0, 16.0, 8.0)
    """
    check_scaler(scaler)
    count = _steps(overflows, steps)
    name, scales, flags = _name(scaler), [], []
    for step in range(count):
        scale = float(scaler.scale)
        overflow = bool(overflows(step, scale) if callable(overflows) else overflows[step])
        scales.append(scale)
        flags.append(overflow)
        scaler = update_scale(scaler, torch.tensor(not overflow))
    return Trajectory(name, tuple(scales), tuple(flags), scaler)


def _steps(overflows: Any, steps: int | None) -> int:
    if steps is not None:
        check_number(steps, "steps", "an int or None", integer=True)
        if steps < 0:
            raise ValueError(f"steps: found {steps}, expected at least 0.")
    if callable(overflows):
        if steps is None:
            raise ValueError("steps: found None, expected how often the function is to be asked. Remedy: steps=1000.")
        return steps
    if not isinstance(overflows, Sequence) or isinstance(overflows, (str, bytes)):
        raise TypeError(
            f"overflows: found {type(overflows).__name__}, expected a list of bools or a function (step, scale). "
            "Remedy: a tensor of flags has .tolist()."
        )
    if steps is not None and steps > len(overflows):
        raise ValueError(
            f"steps: found {steps}, expected at most the {len(overflows)} overflows given. "
            "Remedy: a function (step, scale), or a longer list."
        )
    return len(overflows) if steps is None else steps


def _name(scaler: Any) -> str:
    """The class, and the arguments of its constructor that are plain values other than their defaults."""
    defaults = {p.name: p.default for p in inspect.signature(type(scaler)).parameters.values()}
    fields = dataclasses.fields(scaler) if dataclasses.is_dataclass(scaler) else ()
    values = {field.name: getattr(scaler, field.name) for field in fields}
    changed = [
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
        if isinstance(value, (int, float, str)) and value != defaults.get(name)
    ]
    return f"{type(scaler).__name__}({', '.join(changed)})"
