"""The dict of `torch.amp.GradScaler.state_dict()`: what DynamicScale reads from it and writes to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEYS = {
    "scale": "scale",
    "growth_tracker": "_growth_tracker",
    "growth_factor": "growth_factor",
    "backoff_factor": "backoff_factor",
    "growth_interval": "growth_interval",
}
"""DynamicScale's names and GradScaler's."""

_ABSENT = {"hysteresis": 1, "growth_delay": 0, "min_scale": torch.finfo(torch.float32).tiny, "max_scale": math.inf}
"""What GradScaler does not have, and the value that says so."""


def scaler_arguments(state: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of DynamicScale in a GradScaler's dict."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"state: found {type(state).__name__}, expected the dict of GradScaler.state_dict(). "
            "Remedy: pass scaler.state_dict()."
        )
    if not state:
        raise ValueError(
            "state: found an empty dict, which a disabled GradScaler gives, expected one with a scale. "
            "Remedy: use NoScale()."
        )
    if set(state) != set(_KEYS.values()):
        raise ValueError(
            f"state: found the keys {sorted(state)}, expected {sorted(_KEYS.values())}. Remedy: rename them."
        )
    return {ours: _number(state[theirs]) for ours, theirs in _KEYS.items()}


def grad_scaler_state(scaler: Any) -> dict[str, Any]:
    """A DynamicScale as a GradScaler's dict; raises for what GradScaler does not have."""
    if scaler.scale.dim() != 0:
        raise ValueError(
            f"scale: found shape {tuple(scaler.scale.shape)}, expected a 0-dim one. "
            "Remedy: write one dict for each scale."
        )
    for name, value in _ABSENT.items():
        if getattr(scaler, name) != value:
            raise ValueError(
                f"{name}: found {getattr(scaler, name)!r}, expected {value!r}, as GradScaler has no {name}. "
                f"Remedy: dataclasses.replace(scaler, {name}=...) first."
            )
    if scaler.hysteresis_tracker.item() > 1:
        raise ValueError(
            f"hysteresis_tracker: found {scaler.hysteresis_tracker.item()}, expected at most 1, as GradScaler backs "
            "off at each overflow. Remedy: dataclasses.replace(scaler, hysteresis_tracker=None)."
        )
    return {theirs: _number(getattr(scaler, ours)) for ours, theirs in _KEYS.items()}


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value
