"""Losses that torch.func can not differentiate, met by graphs: known ones, and known ones that are gone."""

from __future__ import annotations

import gc
import importlib
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from functional_amp.stages import differentiate
from functional_amp.stages.differentiate import known_limit

OPTIMIZER = fa.sgd(lr=0.1)


def state() -> fa.TrainState:
    return fa.init_state({"w": torch.ones(3)}, OPTIMIZER, fa.NoScale())


def checkpointed() -> Any:
    """A loss function of its own for the engine alone; only the collector frees it."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return (checkpoint(torch.sin, params["w"], use_reentrant=False) * x).sum()

    vars(loss)["me"] = loss
    return loss


def known() -> Any:
    """A loss function that "auto" has given to the engine."""
    loss = checkpointed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        fa.make_step(loss, OPTIMIZER)(state(), [torch.ones(3)])
    assert known_limit(loss)
    return loss


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


@pytest.fixture
def by_hand():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.usefixtures("fresh_dynamo", "by_hand")
def test_a_known_loss_may_be_collected_while_another_is_compiled(count: int, monkeypatch: pytest.MonkeyPatch):
    manager = importlib.import_module("torch._dynamo.guards").CheckFunctionManager
    make = manager.__init__

    def collected(*args: Any, **kwargs: Any) -> None:  # after the trace, before there are guards
        gc.collect()
        make(*args, **kwargs)

    monkeypatch.setattr(manager, "__init__", collected)
    for _ in range(count):
        known()
    step = fa.make_step(loss_fn, OPTIMIZER, compile={"backend": "eager"})
    expected, _ = fa.make_step(loss_fn, OPTIMIZER)(state(), [torch.ones(3)])
    found, _ = step(state(), [torch.ones(3)])
    assert torch.equal(found.params["w"], expected.params["w"])
    kept = known()  # the graphs are made again, beside those that are gone
    found, _ = step(state(), [torch.ones(3)])
    assert torch.equal(found.params["w"], expected.params["w"]) and known_limit(kept)


class Sine(torch.autograd.Function):
    """Without `setup_context`, which torch.func needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0] * ctx.saved_tensors[0].cos()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the compiler does
@pytest.mark.usefixtures("fresh_dynamo", "by_hand")
def test_a_loss_is_given_to_the_engine_in_a_graph_once_it_is_known(monkeypatch: pytest.MonkeyPatch):
    def loss(params: Any, x: Tensor) -> Tensor:
        return (Sine.apply(params["w"]) * x).sum()

    window = [torch.arange(3.0)]
    step = fa.make_step(loss, OPTIMIZER, compile={"backend": "aot_eager"})
    before, _ = step(state(), window)
    known()
    gc.collect()  # one that is gone, beside one that stays
    kept = known()
    with pytest.warns(UserWarning, match="the autograd engine does it"):
        expected, _ = fa.make_step(loss, OPTIMIZER)(state(), window)

    def refused(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(differentiate, "_by_func", refused)
    after, _ = step(state(), window)
    for found in (before, after):
        torch.testing.assert_close(found.params["w"], expected.params["w"])
    assert known_limit(kept)


@pytest.mark.usefixtures("by_hand")
def test_nobody_keeps_a_known_loss():
    gone = weakref.ref(known())
    gc.collect()
    assert gone() is None
