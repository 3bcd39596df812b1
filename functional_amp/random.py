"""Random numbers that depend on a seed alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from functional_amp.checks import check_number


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws from a seed inside the block, and leaves the global generators as they were.

    Covers the CPU's generator and those of the CUDA devices in use. Put it around a step, compiled
    or not: the same state, micro-batches and seed give the same bits.

    Args:
        seed: any int of 64 bits.

    Raises:
        TypeError, ValueError: for a seed that is no int, or too large for a generator.
        RuntimeError: inside a graph being compiled: seeds are set outside.

    >>> import torch
    >>> with seeded(0):
    ...     first = torch.rand(1)
    >>> with seeded(0):
    ...     second = torch.rand(1)
    >>> bool(first == second)
    True
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "seeded: a generator can not be seeded inside a compiled graph. "
            "Write `with seeded(seed): compiled_step(state, micro_batches)`, without seed=."
        )
    check_number(seed, "seed", "an int", integer=True)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: found {seed}, expected an int of 64 bits. Take it modulo 2**64.")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
