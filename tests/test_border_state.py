"""State that hides: whatever a forward keeps for its next call is found, wherever it lies."""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import functools
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, drawn

ROWS = drawn(5, 3)


class Holding(Net):
    """A net that holds an object, and multiplies its output by what a function of the object gives."""

    def __init__(self, kept: Any, tick: Callable[[Any], float]):
        super().__init__()
        self.kept, self.tick = kept, tick

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.tick(self.kept)


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int = 0


class Private:
    __slots__ = ("__n",)

    def count(self) -> int:
        self.__n = getattr(self, "_Private__n", 0) + 1
        return self.__n


class Empty:
    pass


class Dict(dict[str, int]):
    n = 0


def _add_to_first(kept: Any) -> float:
    kept[0] += 1
    return float(kept[0])


def _add_to_n(kept: Any) -> float:
    kept.n = getattr(kept, "n", 0) + 1
    return kept.n


def _add_to_value(kept: Any) -> float:
    kept.value += 1
    return kept.value


def _change_the_key(kept: Any) -> float:
    ((key, value),) = kept.items()
    del kept[key]
    kept[key + 1] = value
    return key + 1


def _turn(kept: Any) -> float:
    key = next(iter(kept))
    kept[key] = kept.pop(key)
    return key


def _function(x: float = 0.0) -> float:
    return x


HIDDEN = {
    "array of numpy": (lambda: np.zeros(1), _add_to_first),
    "transposed array": (lambda: np.zeros((2, 3)).T, lambda kept: _add_to_first(kept[0])),
    "array of objects": (lambda: np.array([0], dtype=object), _add_to_first),
    "array.array": (lambda: array.array("i", [0]), _add_to_first),
    "bytearray": (lambda: bytearray(1), _add_to_first),
    "ctypes": (lambda: ctypes.c_int(0), _add_to_value),
    "slots": (Slotted, _add_to_n),
    "private slot": (Private, Private.count),
    "object without attributes": (Empty, _add_to_n),
    "attribute of a dict": (Dict, _add_to_n),
    "attribute of a function": (lambda: functools.partial(_function), _add_to_n),
    "key of a dict": (lambda: {0: None}, _change_the_key),
    "order of a dict": (lambda: {1: "a", 2: "b"}, _turn),
    "order of an ordered dict": (lambda: collections.OrderedDict({1: "a", 2: "b"}), _turn),
    "tensor in an object": (lambda: _with_a_tensor(), lambda kept: _add_to_first(kept.t)),
}


def _with_a_tensor() -> Any:
    kept = Empty()
    kept.t = torch.zeros(1)  # pyright: ignore[reportAttributeAccessIssue]
    return kept


@pytest.mark.parametrize("name", HIDDEN)
def test_a_counter_is_found_wherever_it_lies(name: str):
    make, tick = HIDDEN[name]
    apply, params, _ = fa.from_module(Holding(make(), tick))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"apply: found that the forward (keeps|writes).*kept.*expected"):
            apply(params, ROWS)


@pytest.mark.parametrize("name", HIDDEN)
def test_what_is_written_in_a_later_call_alone_is_found_too(name: str):
    make, tick = HIDDEN[name]

    class Later(Holding):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) == 2 else Net.forward(self, x)

    apply, params, _ = fa.from_module(Later(make(), tick))
    expected = apply(params, ROWS)
    with pytest.raises(RuntimeError, match=r"apply: found that the forward (keeps|writes).*kept.*expected"):
        apply(params, ROWS[:2])
    if name != "tensor in an object":  # whose number is lost: all later calls are refused
        assert torch.equal(apply(params, ROWS), expected)


@pytest.mark.parametrize(
    "make",
    [random.Random, lambda: np.random.default_rng(0), np.random.RandomState, np.random.PCG64],
)
def test_a_generator_of_random_numbers_is_refused(make: Any):
    with pytest.raises(TypeError, match=r"at 'kept', expected nothing that each use moves on.*draw from torch's own"):
        fa.from_module(Holding(make(), lambda kept: 1.0))


def test_torchs_own_generator_is_the_remedy():
    net = Holding(None, lambda kept: float(torch.rand(())))
    apply, params, _ = fa.from_module(net)
    for _ in range(2):
        with fa.seeded(3):
            found = apply(params, ROWS)
        with fa.seeded(3):
            assert torch.equal(found, net(ROWS))


@pytest.mark.parametrize(
    ("kept", "tick"),
    [
        (np.arange(3.0), lambda kept: float(torch.from_numpy(kept).sum())),
        (Slotted(2), lambda kept: kept.n),
        (pathlib.Path("a/b"), lambda kept: len(str(kept))),
        (collections.OrderedDict({1: 2}), lambda kept: kept[1]),
    ],
)
def test_what_is_only_read_is_followed(kept: Any, tick: Any):
    for backend in ("func", "autograd"):
        assert_trains_as_torch(lambda: Holding(kept, tick), backend, False)


def test_a_slot_that_is_written_before_it_is_read_is_followed():
    def tick(kept: Any) -> float:
        kept.n = 3
        return kept.n

    assert_trains_as_torch(lambda: Holding(Slotted(), tick), "func", False)
