"""Random numbers that depend on a seed alone, and putting the generators back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.mode import in_graph


class RandomState(NamedTuple):
    """The states of torch's generators: the CPU's, and those of the CUDA devices in use."""

    cpu: Tensor
    cuda: list[Tensor]

    def restore(self) -> None:
        torch.default_generator.set_state(self.cpu)
        for device, state in enumerate(self.cuda):
            torch.cuda.default_generators[device].set_state(state)


def random_state() -> RandomState:
    """Where torch's generators stand."""
    return RandomState(
        torch.default_generator.get_state(),
        [torch.cuda.default_generators[device].get_state() for device in _cuda_devices()],
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws from a seed inside the block, and leaves torch's global generators as they were.

    Covers the CPU's generator and those of the CUDA devices in use; numpy's and Python's have seeds of
    their own. Put it around a step, compiled or not: the same state, micro-batches and seed give the
    same bits.

    Args:
        seed: any int of 64 bits.

    Raises:
        TypeError, ValueError: for a seed that is not an int, or too large for a generator.
        RuntimeError: inside a graph being compiled: seeds are set outside.

    >>> import torch
    >>> with seeded(0):
    ...     first = torch.rand(1)
    >>> with seeded(0):
    ...     second = torch.rand(1)
    >>> bool(first == second)
    True
    """
    if in_graph():
        raise RuntimeError(
            "seeded: a generator can not be seeded inside a compiled graph. "
            "Write `with seeded(seed): compiled_step(state, micro_batches)`, without seed=."
        )
    check_number(seed, "seed", "an int", integer=True)
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: found {seed}, expected an int of 64 bits. Take it modulo 2**64.")
    devices = _cuda_devices()
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(int(seed))
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(int(seed))
        yield


def _cuda_devices() -> range:
    return range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
