"""An operator that was called: its arguments, what it writes to, and the way to run it again."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import functional_amp.debug.torch_private as torch_private
from functional_amp.engine.random import generators_kept


@dataclass(frozen=True)
class Traits:
    """What the schema of an operator says: its name, whether it gives a view, the arguments that it writes to."""

    name: str
    arguments: tuple[str, ...]
    view: bool
    writes: frozenset[str]
    random: bool


class Call:
    """An operator with its arguments, which can be run again with some tensors replaced.

    Attributes:
        given: the tensors among the arguments.
        values: what they held before the operator ran; copies of those that it writes to.
    """

    def __init__(self, func: Any, traits: Traits, args: Any, kwargs: Any, *, copies: bool = False):
        self._func, self.traits = func, traits
        self._flat, self._spec = torch_private.flatten((args, kwargs))
        self._slots = [index for index, leaf in enumerate(self._flat) if isinstance(leaf, Tensor)]
        self.given = [self._flat[index] for index in self._slots]
        self.labels, self._writes = [], []
        for label, value in _labelled(traits.arguments, args, kwargs):
            tensors = [leaf for leaf in torch_private.flatten(value)[0] if isinstance(leaf, Tensor)]
            several = len(tensors) > 1
            self.labels += [f"{label}.{place}" if several else label for place in range(len(tensors))]
            self._writes += [label in traits.writes] * len(tensors)
        self.values = [
            tensor.clone() if copies and writes else tensor
            for tensor, writes in zip(self.given, self._writes, strict=True)
        ]

    @property
    def number_that_is_not_finite(self) -> float | None:
        """The inf or NaN that the operator was given as a number, if any."""
        return next((leaf for leaf in self._flat if isinstance(leaf, float) and not math.isfinite(leaf)), None)

    def outputs(self, out: Any, given: list[Tensor]) -> list[Tensor]:
        """The tensors that the operator returned, and those of the given ones that it wrote to."""
        outputs = list(tensors_of(out))
        written = [tensor for tensor, writes in zip(given, self._writes, strict=True) if writes]
        return outputs + [tensor for tensor in written if not any(tensor is output for output in outputs)]

    def again(self, replaced: Mapping[int, Tensor]) -> list[Tensor] | None:
        """The outputs with some tensors replaced; None where the operator refuses them."""
        values = [replaced.get(slot, value) for slot, value in enumerate(self.values)]
        if self.traits.writes:
            values = [value.clone() if writes else value for value, writes in zip(values, self._writes, strict=True)]
        flat = list(self._flat)
        for index, value in zip(self._slots, values, strict=True):
            flat[index] = value
        args, kwargs = torch_private.unflatten(flat, self._spec)
        try:
            with self._random_state_kept():
                out = self._func(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError):
            return None  # it checks its input: what it says of this replacement is that it is no better
        return self.outputs(out, values)

    def _random_state_kept(self) -> AbstractContextManager[None]:
        return _random_state_kept(self._flat) if self.traits.random else nullcontext()


@contextmanager
def _random_state_kept(arguments: Iterable[Any]) -> Iterator[None]:
    """Leaves torch's generators, and those among the arguments, as they were."""
    states = [(one, one.get_state()) for one in arguments if isinstance(one, torch.Generator)]
    try:
        with generators_kept():
            yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def _labelled(names: tuple[str, ...], args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for place, value in enumerate(args):
        yield (names[place] if place < len(names) else str(place)), value
    yield from kwargs.items()


@functools.cache
def traits_of(func: Any) -> Traits:
    schema = torch_private.schema_of(func)
    if schema is None:  # a higher-order operator: its body runs below this mode
        return Traits(str(func), (), False, frozenset(), False)
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return Traits(
        schema.name.split("::")[1],
        tuple(argument.name for argument in schema.arguments),
        any(not alias.is_write for alias in aliases),
        frozenset(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.nondeterministic_seeded in func.tags,
    )


def tensors_of(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for one in out:
            yield from tensors_of(one)
