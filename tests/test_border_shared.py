"""What copies of a module would share with it: methods of containers, queues, functions of its own."""

from __future__ import annotations

import contextvars
import copy
import functools
import hashlib
import math
import queue
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, built, drawn, variants

X = drawn(2, 3)


class Calling(Net):
    """Calls what it holds."""

    def __init__(self, held: Any, name: str, call: Any):
        super().__init__()
        self.held, self.call = held, call
        self.do = getattr(held, name)

    def forward(self, x: Tensor) -> Tensor:
        self.call(self)
        return super().forward(x) * (len(self.held) + 1)


WRITES = {
    "append": lambda: Calling([], "append", lambda module: module.do(1)),
    "pop": lambda: Calling([1, 2, 3], "pop", lambda module: module.do()),
    "update": lambda: Calling({}, "update", lambda module: module.do({len(module.held): 1})),
    "add": lambda: Calling(set(), "add", lambda module: module.do(len(module.held))),
    "setitem": lambda: Calling({}, "__setitem__", lambda module: module.do(len(module.held), 1)),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_method_of_a_container_that_writes_is_refused_and_the_module_is_left(write: str):
    module = built(WRITES[write])
    before = len(module.held)
    apply, params, _ = fa.from_module(module)
    with pytest.raises(RuntimeError, match=r"at .*'(held|do).*expected"):
        apply(params, X)
    assert len(module.held) == before


class Counted(Net):
    """The remedy: a buffer in place of a list."""

    n: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.n.add_(1)
        return super().forward(x) * (self.n + 1)


def test_a_buffer_in_place_of_the_container_counts_as_the_list_does():
    expected = built(WRITES["append"])
    apply, params, buffers = fa.from_module(built(Counted))
    for _ in range(3):
        found, buffers = apply.with_buffers(params, buffers, X)
        torch.testing.assert_close(found, expected(X))


class Reading(Net):
    """Looks something up by a method of what it holds."""

    def __init__(self, table: dict[str, Any], *more: Any):
        super().__init__()
        self.look_up, self.more = table.get, more

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.look_up("scale", 1)


@pytest.mark.parametrize("more", [(), (math.sin, torch.relu, dict.fromkeys, "-".join, len)])
def test_a_method_of_a_container_that_reads_is_followed(more: Any):
    expected = built(lambda: Reading({"scale": 3.0}))(X)
    apply, params, _ = fa.from_module(built(lambda: Reading({"scale": 3.0}, *more)))
    assert torch.equal(apply(params, X), expected) and torch.equal(apply.eval()(params, X), expected)


class Holding(Net):
    def __init__(self, held: Any, call: Any):
        super().__init__()
        self.held, self.call = held, call

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.call(self.held)


def _counted(held: Any) -> int:
    number = held.get()
    held.put(number + 1)
    return number


def _counted_context(held: contextvars.ContextVar[int]) -> int:
    number = held.get()
    held.set(number + 1)
    return number


def _full() -> Any:
    made: Any = queue.SimpleQueue()
    made.put(1)
    return made


def _through(held: Any) -> Any:
    return lambda: held


HIDDEN = {
    "a queue": (_full, _counted),
    "a context variable": (lambda: contextvars.ContextVar("n", default=1), _counted_context),
    "a queue in a closure": (lambda: _through(_full()), lambda held: _counted(held())),
    "a hash": (hashlib.sha1, lambda held: held.update(b"1") or held.digest()[0]),
    "a generator's method": (lambda: random.Random(0).random, lambda held: held()),
    "the global generator's method": (lambda: random.random, lambda held: held()),
}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_keeps_values_out_of_sight_is_refused(hidden: str):
    make, call = HIDDEN[hidden]
    with pytest.raises(TypeError, match=r"found .*held.*, expected"):
        fa.from_module(built(lambda: Holding(make(), call)))


def test_a_method_of_a_tensor_or_of_bytes_is_refused_and_a_partial_is_followed():
    module: Any = built(Net)
    for method in (module.l.bias.add_, torch.ones(1).add_, bytearray().extend):
        module.f = method
        with pytest.raises(TypeError, match=r"found .*'f.*partial"):
            fa.from_module(module)
    module.f = functools.partial(torch.add, torch.ones(1))
    fa.from_module(module)


INNER = fa.from_module(torch.nn.BatchNorm1d(4))


class Inner(Net):
    """Calls a function of another module with tensors of its own."""

    def __init__(self):
        super().__init__()
        self.w, self.b = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.zeros(4))
        self.norm = INNER.apply

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.norm.with_buffers({"weight": self.w, "bias": self.b}, INNER.buffers, self.l(x))
        return self.o(torch.tanh(out))


@variants
def test_a_function_of_another_module_trains_as_in_torch(backend: Any, donate: bool):
    assert_trains_as_torch(Inner, backend, donate)


@pytest.mark.parametrize("made", [copy.deepcopy, lambda apply: apply.train(), lambda apply: apply])
def test_a_function_of_another_module_is_shared_by_copies(made: Any):
    apply, params, _ = fa.from_module(built(Inner))
    assert made(apply).template.norm is INNER.apply
    assert torch.equal(made(apply)(params, X), built(Inner)(X))
