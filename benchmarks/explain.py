"""What an explanation costs: a backward with instruments beside a plain one, and a whole `explain`."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.loops import LEARNING_RATE, make_functional
from benchmarks.measure import Call, seconds_of
from benchmarks.setup import Row, Setup
from benchmarks.work import SMALLEST, TASKS, Task, transformer
from functional_amp import StaticScale, scale_backward
from functional_amp.debug import explain
from functional_amp.debug.locate import Locator
from functional_amp.debug.provenance import Provenance


def measure(setup: Setup) -> list[Row]:
    """Ratios to the plain backward; of a finite window, as no fault is common to all models."""
    work: dict[str, Callable[[], Task]] = dict(SMALLEST if setup.smoke else TASKS)
    if not setup.smoke:
        work["transformer of 13 million"] = lambda: transformer(layers=4, width=512, batch=8, length=64)
    rows = []
    for name, make in work.items():
        one, whole = ratios(make(), setup)
        rows.append(Row("explain", f"{name}, a backward with instruments", "x", {"pure": one}, compared=False))
        rows.append(Row("explain", f"{name}, explain of a finite window", "x", {"pure": whole}, compared=False))
    return rows


def ratios(task: Task, setup: Setup) -> tuple[float, float]:
    """The median times of an instrumented backward and of a whole `explain`, over that of a plain backward."""
    model = task.seeded_model(setup.seed, setup.device)
    step, state, _ = make_functional(model, setup, LEARNING_RATE, backend="autograd")
    window = task.window(1, setup.seed + 1, setup.device)
    batch = (window[0],) if state.buffers is None else (window[0], state.buffers)

    def plain() -> Any:
        return scale_backward(step.loss_fn, StaticScale(1.0), state.params, *batch, backend="autograd")

    def instrumented() -> Any:
        locator = Locator(plain.__code__)
        with locator, Provenance(locator, []):
            return plain()

    def whole() -> Any:
        return explain(step, state, window, scale=1.0)

    calls: list[Call] = [plain, instrumented, whole]
    for call in calls * setup.warmup:
        call()
    times: list[list[float]] = [[] for _ in calls]
    for index in range(setup.rounds):
        for place in (0, 1, 2) if index % 2 else (2, 1, 0):
            times[place].append(seconds_of(calls[place], setup.device))
    first, *others = times
    one, all_of_it = (statistics.median(b / a for a, b in zip(first, other, strict=True)) for other in others)
    return one, all_of_it
