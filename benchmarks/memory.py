"""The peak of memory over whole steps, each variant in a process of its own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.loops import Loop, make_loop
from benchmarks.measure import MIB, PeakMemory
from benchmarks.setup import Row, Setup
from benchmarks.work import Batch, Task, mlp, transformer

WINDOWS = (1, 8)
HELD = 16
"""Bytes per float32 parameter that no variant can do without: parameter, gradient and two moments."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""glibc then gives freed memory back at once: what is resident is what is in use."""


def big_task(smoke: bool) -> Task:
    """Parameters that outweigh its activations: 13 million."""
    return mlp(64, 2, 4) if smoke else transformer(layers=4, width=512, batch=2, length=32)


def measure(setup: Setup) -> list[Row]:
    with torch.device("meta"):
        held = HELD * sum(parameter.numel() for parameter in big_task(setup.smoke).model().parameters()) / MIB
    rows = []
    for length in WINDOWS:
        found = {variant: in_own_process(variant, length, setup) for variant in setup.of_own_graphs}
        peaks: dict[str, float | str] = {variant: value["peak"] for variant, value in found.items()}
        above: dict[str, float | str] = {variant: value["above"] for variant, value in found.items()}
        rows.append(Row("memory", f"window of {length}: peak", "MiB", {**peaks, "limit": held}))
        rows.append(Row("memory", f"window of {length}: peak above what stays between windows", "MiB", above))
    return rows


def in_own_process(variant: str, length: int, setup: Setup) -> dict[str, float]:
    given = [variant, length, setup.device, str(setup.dtype).removeprefix("torch."), setup.seed, int(setup.smoke)]
    command = [sys.executable, "-m", "benchmarks.memory", *map(str, given)]
    result = subprocess.run(
        command, cwd=Path(__file__).parent.parent, env={**os.environ, **ALLOCATOR}, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(f"memory of {variant}: the process ended with {result.returncode}.\n{result.stderr}")
    return json.loads(result.stdout.splitlines()[-1])


def peak(variant: str, length: int, setup: Setup) -> dict[str, float]:
    """MiB at the peak of three windows, above what was held before the model was made, and above what stays held."""
    memory = PeakMemory(setup.device)
    _trained(variant, mlp(8, 1, 2), 2, setup, windows=1)  # imports the compiler, starts the thread pools
    torch._dynamo.reset()
    memory.reset()
    before = 0.0 if setup.device.type == "cuda" else memory.peak()
    loop, window = _trained(variant, big_task(setup.smoke), length, setup, windows=2)
    memory.reset()  # the steady state: compiled, with the optimizer's state
    between = memory.peak()
    for _ in range(3):
        loop.run(window)
    return {"peak": memory.peak() - before, "above": memory.peak() - between}


def _trained(variant: str, task: Task, length: int, setup: Setup, windows: int) -> tuple[Loop, list[Batch]]:
    loop, window = make_loop(variant, task, setup), task.window(length, setup.seed + 1, setup.device)
    for _ in range(windows):
        loop.run(window)
    gc.collect()
    return loop, window


if __name__ == "__main__":
    name, micro_batches, device, dtype, seed, small = sys.argv[1:]
    chosen = Setup(torch.device(device), getattr(torch, dtype), seed=int(seed), smoke=bool(int(small)))
    print(json.dumps(peak(name, int(micro_batches), chosen)))
