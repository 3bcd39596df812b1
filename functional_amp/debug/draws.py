"""The random numbers of a window that is run several times: the same ones each time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

import functional_amp.debug.torch_private as torch_private
from functional_amp.engine.random import all_generators_kept, seeded


class Draws:
    """What each run of a window draws: torch's numbers of the seed, or of now; all others as of now.

    The generators of torch, Python and numpy stand afterwards where they stood, and so do those of the loss
    function's own that a `watched` run has met.

    Args:
        seed: of the step, or None.
    """

    def __init__(self, seed: int | None):
        self._seed = seed
        self._own: dict[torch.Generator, torch.Tensor] = {}

    @contextmanager
    def again(self) -> Iterator[None]:
        """One run, in eager mode: a module of the user's may be compiled. Anomaly mode would raise at the first NaN."""
        eager = torch.compiler.set_stance("force_eager") if torch_private.compiler_is_loaded() else nullcontext()
        plain = torch.autograd.set_detect_anomaly(False)
        with eager, plain, all_generators_kept(), nullcontext() if self._seed is None else seeded(self._seed):
            try:
                yield
            finally:
                for generator, state in self._own.items():
                    generator.set_state(state)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The first run, which looks for generators of the loss function's own."""
        with self.again(), _Watch(self._own):
            yield


class _Watch(torch_private.DispatchMode):
    """Remembers the state of each generator before an operator draws from it for the first time."""

    supports_higher_order_operators = True

    def __init__(self, states: dict[torch.Generator, torch.Tensor]):
        super().__init__()
        self._states = states

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, torch.Generator) and argument not in self._states:
                self._states[argument] = argument.get_state()
        return func(*args, **kwargs)
