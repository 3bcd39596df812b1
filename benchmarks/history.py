"""What a history costs: one `record`, and a step with it beside one without."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch

from benchmarks.loops import LEARNING_RATE, make_functional, make_options
from benchmarks.measure import Call, seconds_of
from benchmarks.setup import Row, Setup
from benchmarks.work import task
from functional_amp.debug import init_history, nonfinite_leaves, record

TASKS = ("mlp", "transformer")


def measure(setup: Setup) -> list[Row]:
    variants = [name for name in setup.variants if not name.startswith("imperative") and not name.endswith("-flat")]
    rows = [Row("history", "one record, in eager mode", "µs", {"pure": 1e6 * of_record(setup)}, compared=False)]
    for name in TASKS:
        for leaves in (False, True):
            case = f"{name}, added by record{' and the flags of the leaves' if leaves else ''}"
            added = {variant: 100 * of_step(variant, name, leaves, setup) - 100 for variant in variants}
            rows.append(Row("history", case, "%", dict(added), compared=False))
    return rows


def of_record(setup: Setup, calls: int = 100) -> float:
    """Median seconds of one call."""
    step, state, _ = make_functional(task("mlp", True).seeded_model(0, setup.device), setup, LEARNING_RATE)
    _, metrics = step(state, task("mlp", True).window(1, 0, setup.device))
    history = init_history(state)

    def block() -> None:
        after = history
        for _ in range(calls):
            after = record(after, metrics)

    block()
    return statistics.median(seconds_of(block, setup.device) / calls for _ in range(setup.rounds))


def of_step(variant: str, name: str, leaves: bool, setup: Setup) -> float:
    """The median ratio of a window with a history to one without, in pairs that take turns at being first."""
    torch._dynamo.reset()
    calls = [window_call(variant, name, kind, setup) for kind in ("without", "leaves" if leaves else "record")]
    for _ in range(setup.warmup):
        for call in calls:
            call()
    ratios = []
    for index in range(setup.rounds):
        order = (0, 1) if index % 2 else (1, 0)
        seconds = {which: seconds_of(calls[which], setup.device) for which in order}
        ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def window_call(variant: str, name: str, kind: str, setup: Setup) -> Call:
    """A window of one micro-batch, with a state of its own."""
    work, options = task(name, setup.smoke), make_options(variant)
    step, state, _ = make_functional(work.seeded_model(setup.seed, setup.device), setup, LEARNING_RATE, **options)
    (batch,) = work.window(1, setup.seed + 1, setup.device)
    history = init_history(state)
    compiled: Callable[[Any], Any] = partial(torch.compile, fullgraph=True) if options["compile"] else lambda f: f
    flags, add = compiled(nonfinite_leaves), compiled(record)

    def window() -> None:
        nonlocal state, history
        state = step.accumulate(state, batch)
        nonfinite = flags(cast(Any, state.window).grads) if kind == "leaves" else None
        state, metrics = step.update(state)
        if kind != "without":
            history = add(history, metrics, nonfinite)

    return window
