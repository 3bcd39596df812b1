"""Medians of calls that take turns in one process, the bandwidth of memory, and its peak."""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Call = Callable[[], Any]
MIB = 2**20


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(call: Call, device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def interleaved(
    variants: Mapping[str, Callable[[], Call]], device: torch.device, rounds: int, warmup: int
) -> dict[str, float]:
    """Median seconds of each variant.

    Args:
        variants: each prepares one call, untimed, and returns it to be timed.
        rounds: timed calls of each.
        warmup: calls of each before, not counted: compilation, optimizer state, first allocations.
    """
    names = list(variants)
    times: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()  # a collection would be charged to the variant it happens in
    try:
        for index in range(warmup + rounds):
            for name in turn(names, index):
                seconds = seconds_of(variants[name](), device)
                if index >= warmup:
                    times[name].append(seconds)
            gc.collect()
    finally:
        gc.enable()
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def turn(names: Sequence[str], index: int) -> list[str]:
    """The order of a round: over 2n rounds each takes every place twice, once before and once after its neighbours.

    Who comes second of two that run the same code finds it in the caches of the processor.
    """
    shift = index // 2 % max(len(names), 1)
    rotated = [*names[shift:], *names[:shift]]
    return rotated[::-1] if index % 2 else rotated


def bandwidths(device: torch.device, megabytes: int = 256, rounds: int = 15) -> dict[str, float]:
    """Bytes per second that two kernels move at their best, reads and writes counted.

    `copy` reads one tensor and writes another, whose old values many processors read as well, uncounted. `in place`
    reads two and writes one of them, as an optimizer does.
    """
    source = torch.ones(megabytes * MIB // 4, device=device)
    target = torch.zeros_like(source)
    kernels: dict[str, tuple[Call, int]] = {
        "copy": (lambda: target.copy_(source), 2 * source.nbytes),
        "in place": (lambda: target.add_(source), 3 * source.nbytes),
    }
    best = {}
    for name, (kernel, moved) in kernels.items():
        best[name] = moved / min(seconds_of(kernel, device) for _ in range(rounds))
    return best


class PeakMemory:
    """The peak in MiB since the last `reset`: allocated on CUDA, resident in this process on a CPU (Linux)."""

    def __init__(self, device: torch.device):
        if device.type == "cpu" and not Path("/proc/self/clear_refs").exists():
            raise RuntimeError(f"memory: found {sys.platform}, expected Linux's /proc. Leave this section out.")
        self.device = device

    def reset(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to what is resident now

    def peak(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / MIB
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))
