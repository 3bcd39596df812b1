"""Random numbers that depend on a seed alone, and putting the generators back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

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
    with generators_kept():
        torch.default_generator.manual_seed(int(seed))
        for device in _cuda_devices():
            torch.cuda.default_generators[device].manual_seed(int(seed))
        yield


def generators_kept() -> AbstractContextManager[None]:
    """A context that leaves torch's generators as they were."""
    return torch.random.fork_rng(devices=_cuda_devices())


class OtherRandomState(NamedTuple):
    """The states of Python's generator and of numpy's; None where nobody has imported the latter."""

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None

    def restore(self) -> None:
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)

    def is_current(self) -> bool:
        """Whether nobody has drawn since."""
        now = other_random_state()
        return now.python == self.python and _plain(now.numpy) == _plain(self.numpy)


def other_random_state() -> OtherRandomState:
    """Where Python's and numpy's generators stand. Asking takes longer than asking torch's."""
    numpy = sys.modules.get("numpy.random")  # whoever draws from it has imported it
    return OtherRandomState(random.getstate(), numpy and numpy.get_state(legacy=False))


def _plain(state: dict[str, Any] | None) -> Any:
    """A state of numpy's that can be compared."""
    return state and {**state, "state": {name: bytes(value) for name, value in state["state"].items()}}


@contextmanager
def all_generators_kept() -> Iterator[None]:
    """Leaves torch's, Python's and numpy's random numbers as they were."""
    others = other_random_state()
    try:
        with generators_kept():
            yield
    finally:
        others.restore()


def _cuda_devices() -> range:
    return range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
