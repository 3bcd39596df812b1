"""The loss scalers of other systems in plain Python: no tensors, nothing from the package.

Each class docstring is the rule as pseudo-code, and `update` is that text in Python. A product is
taken in double precision and rounded once to float32, where the system keeps its scale in float32.

>>> scales(Torch(8.0, interval=2), [False, False, True])
[8.0, 16.0, 8.0]
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126


def float32(x: float) -> float:
    """The nearest float32 number, inf where the magnitude is too large."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


class Reference(Protocol):
    """A loss scaler that is moved in place."""

    scale: float

    def update(self, overflow: bool) -> None: ...


def scales(reference: Reference, overflows: Iterable[bool]) -> list[float]:
    """The scale after each step."""
    after = []
    for overflow in overflows:
        reference.update(overflow)
        after.append(reference.scale)
    return after


@dataclass
class Torch:
    """`torch.amp.GradScaler`, which has neither floor nor ceiling.

    bad:  S = S * backoff; tracker = 0
    good: tracker += 1
          if tracker == interval: S = S * growth if that is finite, else S; tracker = 0
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    tracker: int = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = float32(self.scale * self.backoff)
            self.tracker = 0
            return
        self.tracker += 1
        if self.tracker == self.interval:
            grown = float32(self.scale * self.growth)
            self.scale = grown if math.isfinite(grown) else self.scale
            self.tracker = 0


@dataclass
class Megatron:
    """Megatron-LM's dynamic grad scaler.

    bad:  growth_tracker = 0; hysteresis_tracker -= 1
          if hysteresis_tracker <= 0: S = max(S * backoff, minimum)
    good: growth_tracker += 1
          if growth_tracker == interval: growth_tracker = 0; hysteresis_tracker = hysteresis; S = S * growth
    """

    scale: float = 2.0**32
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 1000
    hysteresis: int = 2
    minimum: float = 1.0
    growth_tracker: int = 0
    hysteresis_tracker: int | None = None

    def __post_init__(self) -> None:
        if self.hysteresis_tracker is None:
            self.hysteresis_tracker = self.hysteresis

    def update(self, overflow: bool) -> None:
        assert self.hysteresis_tracker is not None
        if overflow:
            self.growth_tracker = 0
            self.hysteresis_tracker -= 1
            if self.hysteresis_tracker <= 0:
                self.scale = max(float32(self.scale * self.backoff), self.minimum)
            return
        self.growth_tracker += 1
        if self.growth_tracker == self.interval:
            self.growth_tracker = 0
            self.hysteresis_tracker = self.hysteresis
            self.scale = float32(self.scale * self.growth)


@dataclass
class DeepSpeed:
    """DeepSpeed's dynamic loss scaler, with either kind of hysteresis.

    bad:  if H == 1 or left == 1: S = max(S / 2, minimum)
          else: left -= 1
          last = current
    good: if consecutive: left = H
          stable = current - last - 1
          if stable > 0 and stable % window == 0:
              if not consecutive: left = H
              S = S * 2
    both: current += 1
    """

    scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    consecutive: bool = False
    minimum: float = 1.0
    current: int = 0
    last: int = -1
    left: int | None = None

    def __post_init__(self) -> None:
        if self.left is None:
            self.left = self.hysteresis

    def update(self, overflow: bool) -> None:
        assert self.left is not None
        if overflow:
            if self.hysteresis == 1 or self.left == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.left -= 1
            self.last = self.current
        else:
            if self.consecutive:
                self.left = self.hysteresis
            stable = self.current - self.last - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.left = self.hysteresis
                self.scale = self.scale * 2
        self.current += 1


@dataclass
class Apex:
    """NVIDIA apex's loss scaler: torch's rule between a floor and a ceiling.

    bad:  S = max(S / 2, minimum); unskipped = 0
    good: unskipped += 1
          if unskipped == window: S = min(S * 2, maximum); unskipped = 0
    """

    scale: float = 2.0**16
    window: int = 2000
    minimum: float = 0.0
    maximum: float = 2.0**24
    unskipped: int = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.scale / 2, self.minimum)
            self.unskipped = 0
            return
        self.unskipped += 1
        if self.unskipped == self.window:
            self.scale = min(self.scale * 2, self.maximum)
            self.unskipped = 0


@dataclass
class ApexHysteresis:
    """NVIDIA apex's hysteresis kernel.

    bad:  left -= 1
          if left > 0: tracker = 0, and nothing else
          else: torch's rule
    good: left = H; torch's rule
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    hysteresis: int = 2
    tracker: int = 0
    left: int | None = None

    def __post_init__(self) -> None:
        if self.left is None:
            self.left = self.hysteresis

    def update(self, overflow: bool) -> None:
        assert self.left is not None
        if overflow:
            self.left -= 1
            if self.left > 0:
                self.tracker = 0
                return
        else:
            self.left = self.hysteresis
        rule = Torch(self.scale, self.growth, self.backoff, self.interval, self.tracker)
        rule.update(overflow)
        self.scale, self.tracker = rule.scale, rule.tracker


@dataclass
class Jmp:
    """DeepMind jmp's dynamic loss scale.

    good: if counter == period - 1: S = S * factor if that is finite, else S
          counter = (counter + 1) % period
    bad:  S = max(minimum, S / factor); counter = 0
    """

    scale: float = 2.0**15
    period: int = 2000
    factor: float = 2.0
    minimum: float = 1.0
    counter: int = 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale = max(self.minimum, float32(self.scale / self.factor))
            self.counter = 0
            return
        if self.counter == self.period - 1:
            grown = float32(self.scale * self.factor)
            self.scale = grown if math.isfinite(grown) else self.scale
        self.counter = (self.counter + 1) % self.period


@dataclass
class Flax:
    """flax's DynamicScale.

    grow = fin_steps == interval
    good: S = min(S * growth, float32's maximum) if grow else S
    bad:  S = max(S * backoff, minimum)
    fin_steps = 0 if grow or bad, else fin_steps + 1
    """

    scale: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = FLOAT32_TINY
    fin_steps: int = 0

    def update(self, overflow: bool) -> None:
        grow = self.fin_steps == self.interval
        if overflow:
            self.scale = max(float32(self.scale * self.backoff), self.minimum)
        elif grow:
            self.scale = min(float32(self.scale * self.growth), FLOAT32_MAX)
        self.fin_steps = 0 if grow or overflow else self.fin_steps + 1


@dataclass
class Static:
    """A loss scale that never moves; with 1, no loss scaling."""

    scale: float = 1.0

    def update(self, overflow: bool) -> None:
        pass
