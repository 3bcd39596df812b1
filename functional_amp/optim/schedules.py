"""Learning-rate schedules: functions of the number of applied updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from functional_amp.checks import check_finite_number, check_number, is_number
from functional_amp.dtypes import FLOAT32_MAX

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""`schedule(count)`: from a 0-dim int32 tensor, the applied updates so far, to a 0-dim float32 one."""

LearningRate: TypeAlias = float | Tensor | Schedule


def constant(value: float) -> Schedule:
    """The same value at all times.

    >>> import torch
    >>> constant(0.5)(torch.tensor(3))
    tensor(0.5000)
    """
    value = check_finite_number(value, "value")
    return lambda count: torch.full_like(count, value, dtype=torch.float32)


def linear(start: float, end: float, steps: int) -> Schedule:
    """From `start` at 0 applied updates straight to `end` at `steps`, and `end` from there on.

    A warm-up is `linear(0.0, peak, steps)`. Its first update has the rate `start`.

    >>> import torch
    >>> linear(0.0, 1.0, 4)(torch.tensor(1))
    tensor(0.2500)
    """
    start, end = check_finite_number(start, "start"), check_finite_number(end, "end")
    check_steps(steps)

    def schedule(count: Tensor) -> Tensor:
        # Not start + (end - start) * progress: from 0.1 to 1e-9 that ends at 0.
        progress = _progress(count, steps)
        return start * (1 - progress) + end * progress

    return schedule


def cosine(start: float, steps: int, end: float = 0.0) -> Schedule:
    """From `start` at 0 applied updates to `end` at `steps` along half a cosine.

        end + (start - end) * (1 + cos(pi * count / steps)) / 2

    The formula is that of Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983.

    >>> import torch
    >>> cosine(1.0, 4)(torch.tensor(2))
    tensor(0.5000)
    """
    start, end = check_finite_number(start, "start"), check_finite_number(end, "end")
    check_steps(steps)
    return lambda count: half_cosine(start, end, _progress(count, steps))


def half_cosine(start: float, end: float, progress: Tensor) -> Tensor:
    """From `start` to `end` as the progress goes from 0 to 1, along half a cosine."""
    return end + (start - end) * (1 + torch.cos(math.pi * progress.clamp(0.0, 1.0))) / 2


def join(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other, each counting from its own start.

    Args:
        schedules: n schedules.
        boundaries: the n - 1 counts at which the next one takes over, ascending.

    Raises:
        TypeError, ValueError: for anything else.

    >>> import torch
    >>> warmup_then_hold = join([linear(0.0, 1.0, 2), constant(1.0)], [2])
    >>> warmup_then_hold(torch.tensor(1)), warmup_then_hold(torch.tensor(9))
    (tensor(0.5000), tensor(1.))
    """
    for values, name in ((schedules, "schedules"), (boundaries, "boundaries")):
        if not isinstance(values, (list, tuple)):
            raise TypeError(f"{name}: found {type(values).__name__}, expected a list.")
    schedules, boundaries = tuple(schedules), tuple(boundaries)
    for each in schedules:
        if not callable(each):
            raise TypeError(f"schedules: found {each!r}, expected functions of the count, such as constant(...).")
    for boundary in boundaries:
        check_steps(boundary, "boundaries")
    if not schedules or len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"boundaries: found {len(boundaries)} for {len(schedules)} schedules, expected one fewer than schedules."
        )
    if any(b <= a for a, b in zip((0, *boundaries), boundaries, strict=False)):
        raise ValueError(f"boundaries: found {list(boundaries)}, expected ascending counts above 0.")

    def schedule(count: Tensor) -> Tensor:
        value = schedules[0](count)
        for later, boundary in zip(schedules[1:], boundaries, strict=True):
            value = torch.where(count < boundary, value, later((count - boundary).clamp(min=0)))
        return value

    return schedule


def warmup_cosine(peak: float, warmup_steps: int, steps: int, end: float = 0.0) -> Schedule:
    """Linear warm-up from 0 to `peak`, then a cosine to `end` at `steps` applied updates.

    With no warm-up steps the cosine alone; with `warmup_steps=steps` the warm-up, and `peak` from there on.

    >>> import torch
    >>> warmup_cosine(1.0, 10, 100)(torch.tensor(10))
    tensor(1.)
    >>> warmup_cosine(1.0, 0, 100)(torch.tensor(0))
    tensor(1.)
    """
    peak, end = check_finite_number(peak, "peak"), check_finite_number(end, "end")
    if check_number(warmup_steps, "warmup_steps", "an int", integer=True) != 0:
        check_steps(warmup_steps, "warmup_steps")
    check_steps(steps)
    if steps < warmup_steps:
        raise ValueError(f"steps: found {steps!r}, expected an int of at least warmup_steps={warmup_steps}.")
    if warmup_steps == 0:
        return cosine(peak, steps, end)
    if warmup_steps == steps:
        return linear(0.0, peak, warmup_steps)
    return join([linear(0.0, peak, warmup_steps), cosine(peak, steps - warmup_steps, end)], [warmup_steps])


def check_learning_rate(lr: LearningRate) -> None:
    """Raises unless `lr` is a finite number >= 0, a 0-dim float tensor or a function of the count."""
    if isinstance(lr, Tensor):
        _check_rate(lr, "found")
    elif not callable(lr):
        if not is_number(lr):
            raise TypeError(
                f"lr: found {type(lr).__name__}, expected a number, a 0-dim tensor or a function of the number of "
                "applied updates. Of a scheduler of torch.optim, make one: from_torch_schedule(cls, lr=, steps=, ...)."
            )
        if not 0 <= check_finite_number(lr, "lr") <= FLOAT32_MAX:
            raise ValueError(f"lr: found {lr!r}, expected a number >= 0 within float32.")


def learning_rate(lr: LearningRate, count: Tensor) -> float | Tensor:
    """The rate of the next update, after `count` applied ones."""
    if isinstance(lr, Tensor):
        return lr
    if not callable(lr):
        return float(lr)
    rate = lr(count)
    if not isinstance(rate, Tensor):
        rate = check_finite_number(rate, "lr: the schedule's value")
        check_learning_rate(rate)
        return rate
    _check_rate(rate, "the schedule returned")
    return rate


def kernel_rate(lr: LearningRate, count: Tensor) -> float | Tensor:
    """The same as a fused kernel takes it: a number, or a tensor on the device of the count."""
    rate = learning_rate(lr, count)
    if not isinstance(rate, Tensor):
        return rate
    # On a CPU the kernel asks for the number; elsewhere it reads a float32 at the address.
    return rate.detach().to(count.device, rate.dtype if count.is_cpu else torch.float32)


def _check_rate(rate: Tensor, found: str) -> None:
    if not rate.is_floating_point():
        raise TypeError(f"lr: {found} a {rate.dtype} tensor, expected a floating-point one. Cast it with .float().")
    if rate.dim() != 0:
        raise ValueError(f"lr: {found} a tensor of shape {tuple(rate.shape)}, expected a 0-dim one.")


def _progress(count: Tensor, steps: int) -> Tensor:
    return (count.to(torch.float32) / steps).clamp(0.0, 1.0)


def check_steps(steps: int, name: str = "steps") -> None:
    """Raises unless the value is an int that a count can reach."""
    check_number(steps, name, "an int", integer=True)
    if not 1 <= steps < 2**31:
        raise ValueError(f"{name}: found {steps!r}, expected from 1 to 2**31 - 1: updates are counted in int32.")
