"""Time of a whole step against the number of leaves and of parameters."""

from __future__ import annotations

import dataclasses
import math

import torch

from benchmarks import steps
from benchmarks.loops import make_loops
from benchmarks.setup import Row, Setup
from benchmarks.work import Task, mlp, residual_mlp

LEAVES = (10, 30, 100, 300, 1000, 2000)
PARAMETERS = (1e5, 1e6, 1e7, 3e7)
LAYERS = 6
SMOKE_LEAVES, SMOKE_PARAMETERS = (4, 10), (1e3, 1e4)


def measure(setup: Setup) -> list[Row]:
    leaves = SMOKE_LEAVES if setup.smoke else LEAVES
    parameters = SMOKE_PARAMETERS if setup.smoke else PARAMETERS
    rows = [_row("leaves", count, residual_mlp(count), setup) for count in leaves]
    for count in parameters:
        width = round(math.sqrt(count / LAYERS))
        task = mlp(width, LAYERS, batch=8)
        with torch.device("meta"):
            exact = sum(parameter.numel() for parameter in task.model().parameters())
        rows.append(_row("parameters", exact, task, setup))
    return rows


def _row(axis: str, count: int, task: Task, setup: Setup) -> Row:
    torch._dynamo.reset()
    # The compiler takes about a second for every few leaves, and every size is compiled anew.
    capped = axis == "leaves" and count > setup.compiled_leaves
    left_out = [variant for variant in setup.variants if capped and variant.endswith("-compiled")]
    kept = tuple(variant for variant in setup.variants if variant not in left_out)
    small = dataclasses.replace(setup, variants=kept)
    window = task.window(1, setup.seed + 1, setup.device)
    times = steps.medians(make_loops(task, small), window, small)
    texts = dict.fromkeys(left_out, f"left out above {setup.compiled_leaves}")
    return Row("growth", f"{count:,} {axis}", "ms", {**times, **texts}, x=(axis, count))
