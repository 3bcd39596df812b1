"""Whole steps: forward, backward, accumulation and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from benchmarks.loops import Loop, make_loops
from benchmarks.measure import Call, interleaved
from benchmarks.setup import Row, Setup
from benchmarks.work import Batch, task

WINDOWS = {"mlp": (1,), "transformer": (1, 4, 16), "convnet": (1,)}


def measure(setup: Setup) -> list[Row]:
    rows = []
    for name, lengths in WINDOWS.items():
        torch._dynamo.reset()  # shapes that change between tasks would be compiled as dynamic ones
        work = task(name, setup.smoke)
        loops = make_loops(work, setup)
        for length in lengths:
            window = work.window(length, setup.seed + 1, setup.device)
            rows.append(Row("step", f"{name}, window of {length}", "ms", dict(medians(loops, window, setup))))
    return rows


def medians(loops: dict[str, Loop], window: Sequence[Batch], setup: Setup) -> dict[str, float]:
    """Milliseconds of a window in each loop."""

    def preparing(loop: Loop) -> Callable[[], Call]:
        return lambda: lambda: loop.run(window)

    calls = {name: preparing(loop) for name, loop in loops.items()}
    seconds = interleaved(calls, setup.device, setup.rounds, setup.warmup)
    return {name: 1e3 * value for name, value in seconds.items()}
