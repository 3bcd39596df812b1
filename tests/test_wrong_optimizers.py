"""Deliberately wrong optimizers: each is rejected by the right law."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_amp as fa
import functional_amp.testing as kit
from functional_amp.testing import leaves_of, mapped
from functional_amp.testing.conformance.optimizer import donated_step_equals_pure_step

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def zeros(params: Any) -> Any:
    return {"m": mapped(lambda p: torch.zeros_like(p, dtype=torch.float32), params)}


def momentum(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    """The right rule, from which the wrong ones differ by a line."""
    m = optree.tree_map(lambda m, g: m if g is None else 0.5 * m + g, opt_state["m"], grads, none_is_leaf=True)
    updates = optree.tree_map(lambda m, g: None if g is None else -0.1 * m, m, grads, none_is_leaf=True)
    return updates, {"m": m}


def changed(change: Callable[[Any], Any]) -> Callable[..., Any]:
    """The right rule, and a change of each leaf of its new state."""

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        updates, after = momentum(grads, opt_state, params)
        return updates, {"m": mapped(change, after["m"])}

    return update


def in_place(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    mapped(lambda m, g: g if g is None else m.mul_(0.5).add_(g), opt_state["m"], grads)
    return mapped(lambda m: -0.1 * m, opt_state["m"]), opt_state


def hidden_count() -> fa.Optimizer:
    calls = 0

    def update(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
        nonlocal calls
        calls += 1
        return mapped(lambda g: -0.1 / calls * g, grads), opt_state

    return fa.Optimizer(lambda params: (), update)


def hosted(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    updates, after = momentum(grads, opt_state, params)
    return (updates if sum(m.sum().item() for m in leaves_of(after)) < 1e9 else opt_state["m"]), after


def breaking(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    torch._dynamo.graph_break()
    return momentum(grads, opt_state, params)


def missing_as_zero(grads: Any, opt_state: Any, params: Any) -> tuple[Any, Any]:
    def decayed(p: Tensor, g: Tensor | None) -> Tensor:
        return -0.1 * (0.5 * p.float() + (0 if g is None else g))

    return optree.tree_map(decayed, params, grads, none_is_leaf=True), opt_state


WRONG_OPTIMIZERS: dict[str, tuple[Callable[[], Any], str]] = {
    "writes its state in place": (
        lambda: fa.Optimizer(zeros, in_place),
        "inputs are not written.*found a write in place to opt_state at .*'m",
    ),
    "writes its parameters in place": (
        lambda: (lambda p: (), lambda g, s, p: (mapped(lambda p, g: p.sub_(0.1 * g).mul(0), p, g), s)),
        "inputs are not written.*found a write in place to params",
    ),
    "returns views of its inputs": (
        lambda: (lambda p: (), lambda g, s, p: (mapped(lambda g: -0.1 * g, g), mapped(lambda g: g[None], g))),
        "inputs are not written and outputs are no views of them: output: at 'opt_state.*a view of the input.*grads",
    ),
    "drifts to float64": (
        lambda: fa.Optimizer(zeros, changed(lambda m: m.double())),
        r"state keeps .*opt_state: at 'm.*': found float64 .*, expected float32",
    ),
    "grows its state": (
        lambda: fa.Optimizer(zeros, lambda g, s, p: (momentum(g, s, p)[0], {**s, "new": torch.ones(())})),
        r"state keeps .*structure differs: .*extra \['new'\]",
    ),
    "counts outside its state, on skips too": (hidden_count, "a skipped update is a transaction: .*found.*expected"),
    "counts in a Python int": (
        lambda: fa.Optimizer(lambda p: {"n": 0}, lambda g, s, p: (mapped(lambda g: -0.1 * g, g), {"n": s["n"] + 1})),
        "a skipped update is a transaction: raised TypeError: .*only tensors can be selected".replace("only", "Only"),
    ),
    "starts at random": (
        lambda: fa.Optimizer(lambda p: {"m": mapped(lambda p: torch.rand(p.shape), p)}, momentum),
        "the same inputs give the same bits: init: at 'm.*found .*, expected",
    ),
    "takes a missing gradient for zero": (
        lambda: fa.Optimizer(lambda p: (), missing_as_zero),
        "a missing gradient leaves its parameter alone: params: at .*found .*, expected",
    ),
    "keeps a half-precision state": (
        lambda: fa.Optimizer(lambda p: {"m": mapped(torch.zeros_like, p)}, changed(lambda m: m)),
        "half precision parameters are rounded once: .*found bfloat16 .*expected float32",
    ),
    "rounds half-precision parameters twice": (
        lambda: fa.Optimizer(
            lambda p: (), lambda g, s, p: (mapped(lambda g, p: (-0.1 * g).to(p.dtype) * 1.0, g, p), s)
        ),
        "half precision parameters are rounded once: torch.bfloat16 parameters: at .*found .*, expected",
    ),
    "reads the host": (lambda: fa.Optimizer(zeros, hosted), "an ensemble under vmap is its members: raised"),
    "breaks the graph": (lambda: fa.Optimizer(zeros, breaking), "it compiles to one graph: raised"),
}


@pytest.mark.parametrize("name", WRONG_OPTIMIZERS)
def test_a_wrong_optimizer_is_rejected_by_the_right_law(name: str):
    make, message = WRONG_OPTIMIZERS[name]
    with pytest.raises(AssertionError, match=f"(?s)^check_optimizer: {message}"):
        kit.check_optimizer(make())


def test_the_rule_that_they_are_made_from_is_right():
    kit.check_optimizer(fa.Optimizer(zeros, momentum), compiled=False)


def test_the_law_of_donation_finds_a_state_that_can_still_be_read(monkeypatch: pytest.MonkeyPatch):
    make = fa.make_step
    module = sys.modules[donated_step_equals_pure_step.__module__]
    monkeypatch.setattr(module, "make_step", lambda loss_fn, optimizer, donate=False: make(loss_fn, optimizer))
    with pytest.raises(AssertionError, match="can be read after it was donated"):
        donated_step_equals_pure_step(fa.sgd(0.1), {"w": torch.ones(2)})
