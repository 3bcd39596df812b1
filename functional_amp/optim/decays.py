"""More schedules: exponential, polynomial, one cycle, cosine with restarts, a warm-up before any of them.

Sums are in double precision where the device has it: 0.9999 rounded to float32 is 0.3 % off after 100,000 powers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from functional_amp.checks import (
    check_finite_number,
    check_non_negative,
    check_number,
    check_positive,
    check_unit_interval,
)
from functional_amp.dtypes import scalar_dtype
from functional_amp.optim.schedules import Schedule, check_steps, half_cosine, join, linear


def exponential(start: float, decay: float, steps: int = 1) -> Schedule:
    """From `start`, times `decay` in every `steps` applied updates, smoothly.

        start * decay ** (count / steps)

    Args:
        start: at 0 applied updates.
        decay: > 0.
        steps: >= 1.

    >>> import torch
    >>> exponential(1.0, 0.5, 10)(torch.tensor(20))
    tensor(0.2500)
    """
    start, decay = check_finite_number(start, "start"), check_positive(decay, "decay")
    check_steps(steps)
    return lambda count: (start * torch.exp(math.log(decay) * _double(count) / steps)).to(torch.float32)


def polynomial(start: float, end: float, steps: int, power: float = 1.0) -> Schedule:
    """From `start` at 0 applied updates to `end` at `steps`, and `end` from there on.

        end + (start - end) * (1 - count / steps) ** power

    >>> import torch
    >>> polynomial(1.0, 0.0, 4, power=2.0)(torch.tensor(2))
    tensor(0.2500)
    """
    start, end = check_finite_number(start, "start"), check_finite_number(end, "end")
    power = check_non_negative(power, "power")
    check_steps(steps)

    def schedule(count: Tensor) -> Tensor:
        left = (1 - _double(count) / steps).clamp(0.0, 1.0)
        return (end + (start - end) * left**power).to(torch.float32)

    return schedule


def one_cycle(
    peak: float, steps: int, pct_start: float = 0.3, div_factor: float = 25.0, final_div_factor: float = 1e4
) -> Schedule:
    """Up to `peak` and down again along half cosines (Smith and Topin 2018, https://arxiv.org/abs/1708.07120).

        peak / div_factor                     at 0 applied updates
        peak                                  at pct_start * steps
        peak / div_factor / final_div_factor  at steps, and from there on

    It is `optax.cosine_onecycle_schedule`. `torch.optim.lr_scheduler.OneCycleLR` reaches its ends one update
    earlier: with `total_steps=n` it is `one_cycle(peak, n - 1, (pct_start * n - 1) / (n - 1))`.

    Args:
        peak: the highest rate.
        steps: updates of the whole cycle.
        pct_start: the part of them that goes up, in [0, 1].
        div_factor, final_div_factor: > 0.

    >>> import torch
    >>> one_cycle(1.0, 100)(torch.tensor(30))
    tensor(1.)
    """
    peak = check_finite_number(peak, "peak")
    check_steps(steps)
    rising = check_unit_interval(pct_start, "pct_start", closed=True) * steps
    div_factor = check_positive(div_factor, "div_factor")
    final_div_factor = check_positive(final_div_factor, "final_div_factor")
    low, last = peak / div_factor, peak / div_factor / final_div_factor

    def schedule(count: Tensor) -> Tensor:
        at = _double(count).clamp(max=steps)
        up = half_cosine(low, peak, at / max(rising, 1e-9))
        down = half_cosine(peak, last, (at - rising) / max(steps - rising, 1e-9))
        return torch.where(at < rising, up, down).to(torch.float32)

    return schedule


def cosine_restarts(start: float, steps: int, factor: int = 1, end: float = 0.0) -> Schedule:
    """Half cosines from `start` towards `end`, each beginning anew (Loshchilov and Hutter 2017).

    The first takes `steps` applied updates, each further one `factor` times as many as the one before. It is
    `torch.optim.lr_scheduler.CosineAnnealingWarmRestarts`. Source: https://arxiv.org/abs/1608.03983.

    Args:
        start: at the beginning of each half cosine.
        steps: of the first one.
        factor: an int >= 1.
        end: what each comes close to.

    >>> import torch
    >>> schedule = cosine_restarts(1.0, 4, factor=2)
    >>> [round(float(schedule(torch.tensor(count))), 2) for count in (0, 2, 4, 8, 12)]
    [1.0, 0.5, 1.0, 0.5, 1.0]
    """
    start, end = check_finite_number(start, "start"), check_finite_number(end, "end")
    check_steps(steps)
    if check_number(factor, "factor", "an int", integer=True) < 1:
        raise ValueError(f"factor: found {factor!r}, expected an int >= 1.")
    pieces = [(0, steps)]  # where each begins, and how long it is; counts are int32: 31 restarts at most
    while factor > 1 and sum(pieces[-1]) < 2**31:
        pieces.append((sum(pieces[-1]), min(pieces[-1][1] * factor, 2**31)))

    def schedule(count: Tensor) -> Tensor:
        at = _double(count)
        if factor == 1:
            return half_cosine(start, end, at.remainder(steps) / steps).to(torch.float32)
        begin, length = torch.zeros_like(at), torch.full_like(at, steps)
        for later, longer in pieces[1:]:
            begin, length = torch.where(at >= later, later, begin), torch.where(at >= later, longer, length)
        return half_cosine(start, end, (at - begin) / length).to(torch.float32)

    return schedule


def warmup(steps: int, schedule: Schedule, start: float = 0.0) -> Schedule:
    """A straight line from `start` to where `schedule` begins, then `schedule`, which counts from its own start.

    Args:
        steps: applied updates of the warm-up; 0 for none.
        schedule: what comes after it.
        start: the rate of the first update.

    >>> import torch
    >>> warmup(10, exponential(1.0, 0.5))(torch.tensor(5))
    tensor(0.5000)
    >>> warmup(10, exponential(1.0, 0.5))(torch.tensor(11))
    tensor(0.5000)
    """
    if not callable(schedule):
        raise TypeError(f"schedule: found {schedule!r}, expected a function of the count, such as constant(...).")
    if check_number(steps, "steps", "an int", integer=True) == 0:
        return schedule
    check_steps(steps)
    return join([linear(start, float(schedule(torch.zeros((), dtype=torch.int32))), steps), schedule], [steps])


def _double(count: Tensor) -> Tensor:
    return count.to(scalar_dtype(count.device))
