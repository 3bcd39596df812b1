"""Schedules of torch.optim.lr_scheduler as functions of applied updates: from_torch_schedule."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import check_non_negative
from functional_amp.optim.schedules import Schedule, check_steps


def from_torch_schedule(
    scheduler: Callable[..., torch.optim.lr_scheduler.LRScheduler],
    *,
    lr: float,
    steps: int,
    of: str = "lr",
    **options: Any,
) -> Schedule:
    """Makes a schedule of a scheduler of torch, stepped once after each applied update.

    The scheduler is run once, on an optimizer without gradients; the rates are kept in a table. From `steps` on the
    last one stays.

    Args:
        scheduler: a class of torch.optim.lr_scheduler, or a function of an optimizer that makes one:
            `lambda optimizer: SequentialLR(optimizer, [...], milestones=[...])`.
        lr: the optimizer's learning rate, which schedulers start from.
        steps: how many rates to keep.
        of: "lr", or "momentum" for what OneCycleLR and CyclicLR do to it.
        options: what the class takes beside the optimizer.

    Returns:
        A schedule in float32: torch's rates, each rounded once. A scheduler that is stepped once an epoch of n updates
        is `lambda count: schedule(count // n)`.

    Raises:
        TypeError: for something else than a scheduler; ReduceLROnPlateau looks at a loss, so that its rate is no
            function of the count.
        ValueError: where the scheduler moves the momentum too, and only its rate would be taken.

    >>> import torch
    >>> schedule = from_torch_schedule(torch.optim.lr_scheduler.StepLR, lr=1.0, steps=10, step_size=2, gamma=0.5)
    >>> [float(schedule(torch.tensor(count))) for count in (0, 1, 2, 4, 100)]
    [1.0, 1.0, 0.5, 0.25, 0.0625]
    """
    lr = check_non_negative(lr, "lr")
    check_steps(steps)
    if of not in ("lr", "momentum"):
        raise ValueError(f"of: found {of!r}, expected 'lr' or 'momentum'.")
    if not callable(scheduler):
        raise TypeError(
            f"scheduler: found {type(scheduler).__name__}, expected a class of torch.optim.lr_scheduler or a function "
            "of an optimizer. A scheduler that is made already has moved its optimizer: pass its class."
        )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr, momentum=0.9)
    made: Any = scheduler(optimizer, **options)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "scheduler: found ReduceLROnPlateau, expected a function of the number of updates. It looks at a loss: "
            "keep the learning rate as a tensor in the state, as examples/recipes/reduce_on_plateau.py does."
        )
    if not isinstance(made, torch.optim.lr_scheduler.LRScheduler):
        raise TypeError(f"scheduler: found {type(made).__name__}, expected a scheduler of torch. Return it.")
    rates: dict[str, list[float]] = {"lr": [], "momentum": []}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some schedulers warn where they are stepped past their end
        for count in range(steps):
            if count:
                optimizer.step()
                made.step()
            for name, values in rates.items():
                values.append(float(optimizer.param_groups[0][name]))
    if of == "lr" and len(set(rates["momentum"])) > 1:
        raise ValueError(
            f"scheduler: found {type(made).__name__}, which moves the momentum too, expected the learning rate alone. "
            "Pass cycle_momentum=False, or take a second schedule with of='momentum', and this one without."
        )
    table = torch.tensor(rates[of], dtype=torch.float64).to(torch.float32)

    def schedule(count: Tensor) -> Tensor:
        place = count.clamp(0, steps - 1).reshape(1)
        return table.to(count.device).index_select(0, place).reshape(())

    return schedule
