"""(init, update) objects of others as they are: two arguments or three, TorchOpt's, and those that write in place."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits, mapped

GOOD, BAD = torch.tensor(True), torch.tensor(False)
PARAMS = {"w": torch.tensor([1.0, -2.0]), "b": torch.tensor([0.5])}
GRADS = {"w": torch.tensor([0.5, 1.0]), "b": torch.tensor([-1.0])}


def down(grads: Any, *rest: Any) -> Any:
    return mapped(lambda g: -0.1 * g, grads)


class Object:
    def init(self, params: Any) -> Any:
        return ()

    def update(self, updates: Any, state: Any, *, params: Any = None) -> Any:
        assert params is not None
        return down(updates), state


UPDATES: dict[str, Any] = {
    "two arguments": (lambda params: (), lambda grads, state: (down(grads), state)),
    "three arguments": (lambda params: (), lambda grads, state, params: (down(grads), state)),
    "any number": (lambda params: (), lambda *given: (down(given[0]), given[1 if len(given) == 3 else 99])),
    "params by name": Object(),
    "a default": (lambda params: (), lambda grads, state, params=None: (down(params and grads), state)),
    "an Optimizer of two": fa.Optimizer(lambda params: (), lambda grads, state: (down(grads), state)),  # pyright: ignore
}


@pytest.mark.parametrize("name", UPDATES)
def test_update_takes_what_it_takes(name: str):
    optimizer = UPDATES[name]
    init = optimizer[0] if isinstance(optimizer, tuple) else optimizer.init
    found = fa.maybe_step(optimizer, PARAMS, init(PARAMS), GRADS, GOOD)
    assert_same_bits(found.params, mapped(lambda p, g: p + -0.1 * g, PARAMS, GRADS))
    step = fa.make_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), optimizer)
    step(fa.init_state(PARAMS, optimizer), [torch.ones(2)])


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["two arguments", "params by name"])
def test_it_compiles(name: str):
    optimizer = UPDATES[name]
    step = fa.make_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), optimizer, compile={"backend": "aot_eager"})
    eager = fa.make_step(lambda p, x: (p["w"] * x).sum() + p["b"].sum(), optimizer)
    state = fa.init_state(PARAMS, optimizer)
    assert_same_bits(step(state, [torch.ones(2)])[0].params, eager(state, [torch.ones(2)])[0].params)


# TorchOpt


TORCHOPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "sgd": (lambda t: t.sgd(0.1, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9)),
    "adam": (lambda t: t.adam(0.1), lambda ps: torch.optim.Adam(ps, 0.1)),
    "adamw": (lambda t: t.adamw(0.1), lambda ps: torch.optim.AdamW(ps, 0.1)),
    "rmsprop": (lambda t: t.rmsprop(0.1), lambda ps: torch.optim.RMSprop(ps, 0.1)),
    "adadelta": (lambda t: t.adadelta(0.1), lambda ps: torch.optim.Adadelta(ps, 0.1)),
    "clipped": (
        lambda t: t.chain(t.clip_grad_norm(max_norm=1e9), t.adam(0.1)),
        lambda ps: torch.optim.Adam(ps, 0.1),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", TORCHOPT)
def test_torchopts_transformations_work_as_they_are(name: str, donate: bool):
    torchopt = pytest.importorskip("torchopt")
    ours, theirs = TORCHOPT[name]
    optimizer = ours(torchopt)
    step = fa.make_step(lambda p, x: (p["w"] * x).sum() + (p["b"] ** 2 * x[0]).sum(), optimizer, donate=donate)
    state = fa.init_state(PARAMS, optimizer, fa.DynamicScale(8.0))
    leaves = mapped(lambda leaf: leaf.clone().requires_grad_(), PARAMS)
    loop = theirs(list(leaves.values()))
    for number, factor in enumerate((1.0, math.inf, 2.0, 1.0)):
        x = factor * torch.tensor([1.0, -0.5])
        before = mapped(Tensor.clone, state.opt_state)
        state, metrics = step(state, [x])
        if number == 1:  # a skipped window is a transaction, whatever TorchOpt's default is
            assert not metrics.applied
            assert_same_bits(state.opt_state, before)
            continue
        loop.zero_grad()
        ((leaves["w"] * x).sum() + (leaves["b"] ** 2 * x[0]).sum()).backward()
        loop.step()
    mapped(lambda a, b: torch.testing.assert_close(a, b.detach(), rtol=1e-5, atol=1e-6), state.params, leaves)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_torchopts_transformations_are_members_of_a_chain():
    torchopt = pytest.importorskip("torchopt")
    optimizer = fa.chain(torchopt.clip_grad_norm(max_norm=0.5), fa.sgd(1.0))
    found = fa.maybe_step(optimizer, PARAMS, optimizer.init(PARAMS), GRADS, GOOD)
    moved = mapped(lambda new, old: new - old, found.params, PARAMS)
    assert fa.global_norm(moved).item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["radam", "adamax"])
def test_a_state_that_counts_in_python_numbers_is_refused_by_name(name: str):
    optimizer = getattr(pytest.importorskip("torchopt"), name)(0.1)
    with pytest.raises(TypeError, match=r"opt_state: found int 2 .* where int 1 was before.*0-dim tensors"):
        fa.maybe_step(optimizer, PARAMS, optimizer.init(PARAMS), GRADS, GOOD)


# Writes in place


def writer(what: str) -> Any:
    def update(grads: Any, state: Any, params: Any) -> Any:
        written = {"grads": grads, "opt_state": state, "params": params}[what]
        written["w"].mul_(0.5)
        return down(grads), state

    return (lambda params: mapped(torch.zeros_like, params), update)


@pytest.mark.parametrize("what", ["grads", "opt_state", "params"])
def test_a_write_in_place_is_refused_by_name(what: str):
    optimizer = writer(what)
    state = optimizer[0](PARAMS)
    given = mapped(Tensor.clone, PARAMS), mapped(Tensor.clone, GRADS)
    message = rf"optimizer: found a write in place to {what} at \['w'\], expected new tensors.*x.mul\(0.9\)"
    with pytest.raises(RuntimeError, match=message):
        fa.maybe_step(optimizer, given[0], state, given[1], GOOD)
    with pytest.raises(RuntimeError, match=message):
        fa.chain(optimizer, fa.sgd(0.1)).update(given[1], (state, fa.sgd(0.1).init(PARAMS)), given[0])


def test_the_remedy_works():
    new = (lambda params: (), lambda grads, state, params: (down(mapped(lambda g: g.mul(0.5), grads)), state))
    fa.maybe_step(new, PARAMS, (), GRADS, GOOD)
