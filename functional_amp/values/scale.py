"""What every scaler has: a scale and a successor; the checks of both."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from functional_amp.dtypes import FLOAT32_MAX
from functional_amp.mode import host_readable
from functional_amp.values.rules import check as _check


class Scaler(Protocol):
    """What the stages need: the scale of the next window, and the successor after it.

    A scaler of your own is a registered pytree node (see `functional_amp.register`) with
    these two members; `update` must return the same type, structure and dtypes.
    """

    @property
    def scale(self) -> Tensor: ...

    def update(self, finite: Tensor) -> Any: ...


def check_scaler(scaler: Any) -> None:
    """Raises TypeError unless the object has a scale tensor and an update."""
    if not isinstance(getattr(scaler, "scale", None), Tensor) or not callable(getattr(scaler, "update", None)):
        found = f"the class {scaler.__name__}" if isinstance(scaler, type) else type(scaler).__name__
        raise TypeError(
            f"scaler: found {found}, expected DynamicScale(), StaticScale(...), NoScale() or an object "
            "with a `scale` tensor and an `update(finite)`. torch.amp.GradScaler is stateful and does not fit: "
            "use DynamicScale(), which follows the same rule."
        )
    if scaler.scale.dtype != torch.float32:
        raise TypeError(
            f"scaler: found a scale of {scaler.scale.dtype}, expected float32. Cast it with .float(): "
            "gradients carry it, and dtypes must not change from step to step."
        )


def scale_tensor(value: float | Tensor, name: str, low: float, high: float) -> Tensor:
    """A loss scale as a float32 tensor, checked to be finite and within [low, high].

    A tensor's value is only looked at where that is free: on a CPU and outside any transform.
    """
    if isinstance(value, Tensor):
        if value.dtype != torch.float32:
            raise TypeError(f"{name}: found a {value.dtype} tensor, expected float32. Cast it with .float().")
        if not host_readable(value):
            return value
        for number in value.detach().flatten().tolist():
            _check(number, name, float, lambda x: low <= x <= min(high, FLOAT32_MAX), f"finite, from {low} to {high}")
        return value
    _check(value, name, float, lambda x: low <= x <= min(high, FLOAT32_MAX), f"finite, from {low} to {high}")
    return torch.tensor(float(value), dtype=torch.float32)
