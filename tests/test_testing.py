"""The test kit finds what is wrong: each deliberately wrong part is rejected by the right law."""

from __future__ import annotations

import builtins
import dataclasses
import importlib
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test
from optree.registry import __GLOBAL_NAMESPACE as _GLOBAL
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
import functional_amp.testing as kit
from functional_amp.testing import leaves_of, mapped, references
from functional_amp.testing.conformance.optimizer import donated_step_equals_pure_step
from functional_amp.tree import with_fields

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# Optimizers


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
    "writes its state in place": (lambda: fa.Optimizer(zeros, in_place), "inputs are not written.*opt_state.m.*found"),
    "writes its parameters in place": (
        lambda: (lambda p: (), lambda g, s, p: (mapped(lambda p, g: p.sub_(0.1 * g).mul(0), p, g), s)),
        "inputs are not written.*params",
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


# Scalers


@dataclass(frozen=True, eq=False)
class Scale:
    """A right scaler in the small, from which the wrong ones differ by a line."""

    scale: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(8.0))
    tracker: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(0, dtype=torch.int32))
    growth_interval: int = 3
    note: Any = "kept"

    def update(self, finite: Tensor) -> Any:
        tracker = torch.where(finite, self.tracker + 1, 0)
        grow = self.due(tracker)
        grown = torch.where(grow, (self.scale * 2).clamp(max=2.0**24), self.scale)
        scale = torch.where(finite, grown, (self.scale / 2).clamp(min=2.0**-14))
        return with_fields(self, scale=scale, tracker=torch.where(grow, 0, tracker))

    def due(self, tracker: Tensor) -> Tensor:
        return self.growth_interval <= tracker


fa.register(Scale, ("scale", "tracker"), ("growth_interval", "note"))


VARIANTS: list[Any] = []


def variant(
    update: Callable[[Any, Tensor], Any] | None = None, due: Callable[[Any, Tensor], Tensor] | None = None
) -> Any:
    """A scaler that differs in its update, or in when it grows."""
    members = {"update": update, "due": due}
    cls: Any = type("Variant", (Scale,), {name: member for name, member in members.items() if member is not None})
    globals()[f"Variant{len(VARIANTS)}"] = cls  # so that it can be pickled
    cls.__qualname__ = f"Variant{len(VARIANTS)}"
    VARIANTS.append(cls)
    return fa.register(cls, ("scale", "tracker"), ("growth_interval", "note"))()


def then(**fields: Callable[[Any], Any]) -> Any:
    """The right update, and then a change of some fields."""

    def update(self: Any, finite: Tensor) -> Any:
        after = Scale.update(self, finite)
        return with_fields(after, **{name: change(after) for name, change in fields.items()})

    return variant(update)


@dataclass(frozen=True, eq=False)
class Forgetful(Scale):
    """Its note is lost when it is flattened."""


optree.register_pytree_node(
    Forgetful,  # pyright: ignore[reportArgumentType]
    lambda node: ((node.scale, node.tracker), (node.growth_interval,)),  # pyright: ignore
    lambda static, leaves: Forgetful(*leaves, *static),  # pyright: ignore
    namespace=_GLOBAL,
)
torch_pytree.register_pytree_node(
    Forgetful,
    lambda node: ([node.scale, node.tracker], (node.growth_interval,)),
    lambda leaves, static: Forgetful(*leaves, *static),  # pyright: ignore
)


@dataclass(frozen=True)
class Unregistered:
    scale: Tensor

    def update(self, finite: Tensor) -> Unregistered:
        return Unregistered(torch.where(finite, self.scale, self.scale / 2))


def scale_in_place(self: Any, finite: Tensor) -> Any:
    self.scale.mul_(torch.where(finite, 1.0, 0.5))
    return self


def reads_the_host(self: Any, finite: Tensor) -> Any:
    return Scale.update(self, torch.tensor(bool(finite)))


def keeps_its_tracker(self: Any, finite: Tensor) -> Any:
    after = Scale.update(self, finite)
    return with_fields(after, tracker=torch.where(finite, after.tracker, self.tracker))


def breaks_the_graph(self: Any, finite: Tensor) -> Any:
    torch._dynamo.graph_break()
    return Scale.update(self, finite)


WRONG_SCALERS: dict[str, tuple[Callable[[], Any], str]] = {
    "no pytree": (lambda: Unregistered(torch.tensor(8.0)), "it is a pytree of tensors: optree found a leaf Unreg"),
    "in place": (
        lambda: variant(scale_in_place),
        "the update is pure: input: at '.*scale': found a tensor written to 1 times",
    ),
    "float64": (
        lambda: then(scale=lambda s: s.scale.double()),
        "every update keeps .*at 'scale': found float64 of shape .*, expected float32",
    ),
    "a shape": (
        lambda: then(tracker=lambda s: s.tracker[None]),
        r"every update keeps .*at 'tracker': found int32 of shape \(1,\)",
    ),
    "a Python counter": (
        lambda: then(growth_interval=lambda s: s.growth_interval + 1),
        "every update keeps .*at 'growth_interval': found 4, expected 3",
    ),
    "another type": (
        lambda: variant(lambda self, finite: Scale.update(Scale(self.scale, self.tracker), finite)),
        "every update keeps .*found Scale, expected Variant",
    ),
    "no floor": (
        lambda: variant(lambda self, finite: with_fields(self, scale=torch.where(finite, self.scale, self.scale / 2))),
        "the scale stays positive .*at 'scale': found 0.0 after .* overflows in a row",
    ),
    "no ceiling": (
        lambda: variant(lambda self, finite: with_fields(self, scale=torch.where(finite, self.scale * 2, self.scale))),
        "the scale stays positive .*at 'scale': found inf after .* clean windows in a row",
    ),
    "a static lost in flatten": (
        lambda: Forgetful(note="odd"),
        "every field survives a round trip: by optree: at 'note': found 'kept', expected 'odd'",
    ),
    "a static that can not be pickled": (
        lambda: dataclasses.replace(Scale(), note=lambda: None),
        "every field survives a round trip: raised",
    ),
    "a host read": (lambda: variant(reads_the_host), "no tensor is read on the host: raised DataDependent"),
    "a graph break": (lambda: variant(breaks_the_graph), "it compiles to one graph: raised"),
}


@pytest.mark.parametrize("name", WRONG_SCALERS)
def test_a_wrong_scaler_is_rejected_by_the_right_law(name: str):
    make, message = WRONG_SCALERS[name]
    with pytest.raises(AssertionError, match=f"(?s)^check_scaler: ({message})"):
        kit.check_scaler(make())


def test_the_scaler_that_they_are_made_from_is_right():
    kit.check_scaler(Scale())
    machine = kit.scaler_machine(Scale, lambda: references.Jmp(8.0, period=3, minimum=2.0**-14))
    run_state_machine_as_test(machine, settings=settings(max_examples=10))


WRONG_RULES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "< for <= in the growth interval": (
        lambda: variant(due=lambda self, tracker: self.growth_interval < tracker),
        lambda: references.Torch(8.0, interval=3),
        "after good good good: scale: found 8.0, expected 16.0 as Torch has it",
    ),
    "an overflow does not restart the interval": (
        lambda: variant(
            lambda self, finite: with_fields(
                Scale.update(self, finite),
                tracker=torch.where(finite, Scale.update(self, finite).tracker, self.tracker),
            )
        ),
        lambda: references.Torch(8.0, interval=2),
        "after good good: scale|after good bad good: scale|after good good",
    ),
    "no floor of 1": (
        lambda: fa.DynamicScale(2.0, growth_interval=3),
        lambda: references.Jmp(2.0, period=3),
        "after bad bad: scale: found 0.5, expected 1.0 as Jmp has it",
    ),
    "no hysteresis": (
        lambda: fa.DynamicScale(8.0, growth_interval=3),
        lambda: references.Megatron(8.0, interval=3),
        "after bad: scale: found 4.0, expected 8.0 as Megatron has it",
    ),
    "hysteresis refilled at each clean step": (
        lambda: fa.DynamicScale(8.0, growth_interval=9, hysteresis=2, refill="good"),
        lambda: references.Megatron(8.0, interval=9),
        "after bad good bad: scale: found 8.0, expected 4.0",
    ),
    "one clean step too early": (
        lambda: fa.DynamicScale(8.0, growth_interval=2),
        lambda: references.Flax(8.0, interval=2),
        "after good good: scale: found 16.0, expected 8.0 as Flax has it",
    ),
    "DeepSpeed without its extra step": (
        lambda: fa.DynamicScale(8.0, growth_interval=2, hysteresis=2),
        lambda: references.DeepSpeed(8.0, window=2),
        "after good good: scale: found 16.0, expected 8.0",
    ),
    "apex without its ceiling": (
        lambda: fa.DynamicScale(2.0**24, growth_interval=1),
        lambda: references.Apex(2.0**24, window=1),
        "after good: scale: found 33554432.0, expected 16777216.0",
    ),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_the_machine_shrinks_a_wrong_rule_to_the_shortest_history(name: str):
    make_scaler, make_reference, message = WRONG_RULES[name]
    with pytest.raises(AssertionError, match=f"^scaler_machine: {message}"):
        run_state_machine_as_test(kit.scaler_machine(make_scaler, make_reference))


def test_the_update_of_a_machine_can_be_replaced():
    def upside_down(scaler: Any, finite: Tensor) -> Any:
        return fa.update_scale(scaler, ~finite)

    machine = kit.scaler_machine(fa.DynamicScale, references.Torch, update=upside_down)
    with pytest.raises(AssertionError, match=r"after (good|bad): scale"):
        run_state_machine_as_test(machine)


# Steps

SHORT = settings(
    stateful_step_count=6, max_examples=30, phases=[Phase.generate, Phase.shrink], report_multiple_bugs=False
)
Update = Callable[[fa.TrainState, Any], tuple[fa.TrainState, fa.Metrics]]


def altered(change: Callable[[fa.TrainState, fa.TrainState, fa.Metrics], tuple[Any, Any]]) -> Callable[..., Any]:
    """The right step, and then `change(before, after, metrics)`."""

    def make(loss_fn: Any, optimizer: Any) -> Any:
        step = fa.make_step(loss_fn, optimizer)
        return lambda state, micro_batches: change(state, *step(state, micro_batches))

    return make


def unscaled_with_the_next_scale(loss_fn: Any, optimizer: Any) -> Any:
    def step(state: Any, micro_batches: Any) -> Any:
        total = None
        for micro_batch in micro_batches:
            total = fa.accumulate(total, fa.scale_backward(loss_fn, state.scaler, state.params, micro_batch).grads)
        assert total is not None
        scaler = fa.update_scale(state.scaler, fa.all_finite(total))
        grads, finite = fa.unscale(fa.ScaledGrads(total.tree, scaler.scale, total.weight))
        return closed(state, optimizer, scaler, grads, finite, total)

    return step


def closed(state: Any, optimizer: Any, scaler: Any, grads: Any, finite: Tensor, total: fa.ScaledGrads) -> Any:
    applied = finite & (total.weight > 0)
    params, opt_state = fa.maybe_step(optimizer, state.params, state.opt_state, grads, applied)
    after = dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        scaler=scaler,
        applied=state.applied + applied,
        skipped=state.skipped + ~applied,
        skipped_in_a_row=torch.where(applied, 0, state.skipped_in_a_row + 1),
    )
    return after, fa.Metrics(torch.zeros(()), fa.global_norm(grads), finite, state.scaler.scale, total.weight)


def last_flag_only(loss_fn: Any, optimizer: Any) -> Any:
    """Looks at the last micro-batch alone, and drops the others where they are bad."""

    def step(state: Any, micro_batches: Any) -> Any:
        total, finite = None, torch.tensor(True)
        for micro_batch in micro_batches:
            grads = fa.scale_backward(loss_fn, state.scaler, state.params, micro_batch).grads
            finite = fa.all_finite(grads)
            total = fa.accumulate(total, grads, where=finite)
        assert total is not None
        return closed(state, optimizer, fa.update_scale(state.scaler, finite), fa.unscale(total).grads, finite, total)

    return step


def without_weights(loss_fn: Any, optimizer: Any) -> Any:
    """The mean over micro-batches, whatever they weigh."""
    return fa.make_step(lambda params, batch: loss_fn(params, {**batch, "weight": batch["weight"] and 1.0}), optimizer)


def zeros_for_nan(loss_fn: Any, optimizer: Any) -> Any:
    """Multiplies with the flag and goes on: momentum moves on a skip."""

    def step(state: Any, micro_batches: Any) -> Any:
        after, metrics = fa.make_step(loss_fn, optimizer)(state, micro_batches)
        grads = mapped(torch.zeros_like, state.params)
        params, opt_state = fa.maybe_step(optimizer, state.params, state.opt_state, grads, ~metrics.finite)
        return (after, metrics) if metrics.finite else (with_fields(after, params=params, opt_state=opt_state), metrics)

    return step


WRONG_STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    "unscales with the scale after its update": (
        unscaled_with_the_next_scale,
        "after (good|empty) good: state.params: at '[ab]'",
    ),
    "takes zeros for NaN": (zeros_for_nan, "after (good )?bad: a skip is a transaction: at '.*': found .*, expected"),
    "looks at the last flag only": (
        last_flag_only,
        "after bad: (metrics.(finite|weight): found|a skip is a transaction: at)",
    ),
    "forgets the weights": (without_weights, "after good: (metrics.weight: found|state.params: at)"),
    "does not count a skip": (
        altered(lambda before, after, metrics: (with_fields(after, skipped=before.skipped), metrics)),
        "after (bad|empty): state.skipped: found 0, expected 1",
    ),
    "never resets the count in a row": (
        altered(
            lambda before, after, metrics: (
                with_fields(after, skipped_in_a_row=before.skipped_in_a_row + ~metrics.finite),
                metrics,
            )
        ),
        "after (bad good|empty): state.skipped_in_a_row",
    ),
    "tells the next scale": (
        altered(lambda before, after, metrics: (after, metrics._replace(scale=after.scaler.scale))),
        "after (bad|good good|empty empty|empty good|good empty): metrics.scale",
    ),
    "backs off twice": (
        altered(
            lambda before, after, metrics: (
                with_fields(after, scaler=fa.update_scale(after.scaler, metrics.finite)),
                metrics,
            )
        ),
        "after (good|bad|empty): scale: found .*, expected .* as Torch has it",
    ),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_the_machine_shrinks_a_wrong_step_to_the_shortest_history(name: str):
    make_step, message = WRONG_STEPS[name]
    machine = kit.step_machine(
        lambda: fa.DynamicScale(8.0, growth_interval=2), lambda: references.Torch(8.0, interval=2), make_step=make_step
    )
    with pytest.raises(AssertionError, match=f"^step_machine: {message}"):
        run_state_machine_as_test(machine, settings=SHORT)


def loss_with_buffers(params: Any, batch: Tensor, buffers: Any) -> fa.Loss:
    return fa.Loss(((params["w"] - batch) ** 2).mean(), buffers={"mean": 0.9 * buffers["mean"] + 0.1 * batch.mean()})


OPTIMIZER = fa.sgd(fa.linear(0.1, 0.0, 10), momentum=0.9)
STEP = fa.make_step(loss_with_buffers, OPTIMIZER, max_norm=1.0)


def start() -> fa.TrainState:
    scaler = fa.DynamicScale(8.0, growth_interval=2)
    return fa.init_state({"w": torch.ones(2, 2)}, OPTIMIZER, scaler, {"mean": torch.tensor(0.5)})


def written_in_place(state: Any, micro_batches: Any) -> Any:
    after, metrics = STEP(state, micro_batches)
    state.params["w"].copy_(after.params["w"])
    return after, metrics


def with_state(change: Callable[[Any, Any, Any], dict[str, Any]]) -> Update:
    def step(state: Any, micro_batches: Any) -> Any:
        after, metrics = STEP(state, micro_batches)
        return with_fields(after, **change(state, after, metrics)), metrics

    return step


def with_metrics(change: Callable[[Any], dict[str, Any]]) -> Update:
    def step(state: Any, micro_batches: Any) -> Any:
        after, metrics = STEP(state, micro_batches)
        return after, metrics._replace(**change(metrics))

    return step


def reads_the_flag(state: Any, micro_batches: Any) -> Any:
    after, metrics = STEP(state, micro_batches)
    return (after if metrics.finite else with_fields(after, params=state.params)), metrics


def hidden_calls() -> Update:
    calls = 0

    def step(state: Any, micro_batches: Any) -> Any:
        nonlocal calls
        calls += 1
        return STEP(state, [batch + 0.01 * calls for batch in micro_batches])

    return step


WRONG_TRAINING: dict[str, tuple[Callable[[], Any], str]] = {
    "writes the parameters in place": (
        lambda: written_in_place,
        r"it is pure or donates and says so: a state that can still be read: at 'state.params.w'\[0, 0\]: found",
    ),
    "returns a view": (
        lambda: with_state(lambda before, after, m: {"params": {"w": before.params["w"].T}}),
        "it is pure or donates .*: output: at '.*params.w': found a view of the input",
    ),
    "keeps the window open": (
        lambda: lambda state, micro_batches: (STEP.accumulate(state, micro_batches[0]), STEP(state, micro_batches)[1]),
        "the state keeps its structure",
    ),
    "drifts to float64": (
        lambda: with_state(lambda before, after, m: {"params": mapped(lambda p: p.double(), after.params)}),
        "the state keeps .*at 'params.w': found float64",
    ),
    "depends on earlier calls": (hidden_calls, "it replays bit for bit: the second of two runs: at"),
    "gives a Python flag": (
        lambda: with_metrics(lambda metrics: {"finite": bool(metrics.finite)}),
        "the metrics .*at 'finite': found True, expected a 0-dim bool tensor",
    ),
    "gives a vector for a norm": (
        lambda: with_metrics(lambda metrics: {"grad_norm": metrics.grad_norm[None]}),
        "the metrics .*at 'grad_norm'",
    ),
    "gives another scale": (
        lambda: with_metrics(lambda metrics: {"scale": metrics.scale * 2}),
        "the metrics .*metrics.scale.*found 16.0, expected 8.0",
    ),
    "moves the schedule on a skip": (
        lambda: with_state(
            lambda before, after, m: {"opt_state": after.opt_state._replace(step=before.opt_state.step + 1)}
        ),
        "a skip is a transaction: opt_state: at '0': found 1, expected 0",
    ),
    "keeps the buffers of a skipped window": (
        lambda: with_state(
            lambda before, after, m: {"buffers": mapped(lambda b: torch.where(m.finite, b, m.loss), after.buffers)}
        ),
        "a skip is a transaction: buffers: at 'mean': found nan, expected 0.5",
    ),
    "moves the parameters on a skip": (
        lambda: with_state(
            lambda before, after, m: {"params": mapped(lambda p: torch.where(m.finite, p, 0.9 * p), after.params)}
        ),
        r"a skip is a transaction: params: at 'w'\[0, 0\]: found 0.89.*, expected 1.0",
    ),
    "does not back off": (
        lambda: with_state(lambda before, after, m: {"scaler": fa.update_scale(before.scaler, ~m.finite | m.finite)}),
        "a skip is a transaction: scaler: at 'scale': found 8.0, expected 4.0",
    ),
    "counts a skip as applied": (
        lambda: with_state(lambda before, after, m: {"applied": before.applied + 1}),
        "a skip is a transaction: state.applied: .*found 1, expected 0",
    ),
    "reads the flag on the host": (lambda: reads_the_flag, "no tensor is read on the host: raised DataDependent"),
}


@pytest.mark.parametrize("name", WRONG_TRAINING)
def test_a_wrong_step_is_rejected_by_the_right_law(name: str):
    make, message = WRONG_TRAINING[name]
    with pytest.raises(AssertionError, match=f"(?s)^check_step: {message}"):
        kit.check_step(make(), start(), torch.full((2, 2), 3.0))


def test_the_step_that_they_are_made_from_is_right():
    kit.check_step(STEP, start(), torch.full((2, 2), 3.0))


class Donated(fa.TrainState):
    """What is left of a state that was given away."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("this state was donated")


fa.register(Donated, tuple(field.name for field in dataclasses.fields(fa.TrainState)))


def test_a_step_that_uses_its_state_up_passes_where_it_says_so():
    def step(state: Any, micro_batches: Any) -> Any:
        after, metrics = STEP(kit.mapped(torch.clone, state), micro_batches)
        state.params["w"].fill_(math.nan)  # a donating step writes where it likes
        object.__setattr__(state, "__class__", Donated)
        return after, metrics

    kit.check_step(step, start(), torch.full((2, 2), 3.0), host=False)


def test_a_batch_that_is_not_bad_is_said_to_be_none():
    with pytest.raises(AssertionError, match="a skip is a transaction: metrics: at 'finite': found True"):
        kit.check_step(STEP, start(), torch.ones(2, 2), bad_batch=torch.zeros(2, 2))


# Strategies


@given(grads=kit.gradients(nonfinite=True), plain=kit.gradients(scaled=False))
@settings(max_examples=20)
def test_gradients_are_finite_or_not_as_asked(grads: fa.ScaledGrads, plain: Any):
    assert not all(leaf is None or bool(leaf.isfinite().all()) for leaf in leaves_of(grads.tree))
    assert all(leaf is None or bool(leaf.isfinite().all()) for leaf in leaves_of(plain))


@pytest.mark.parametrize("name", kit.MAGNITUDES)
def test_each_magnitude_is_within_its_range(name: str):
    low, high = kit.MAGNITUDES[name]

    @settings(max_examples=5)
    @given(grads=kit.gradients(layout=kit.Leaf((3,), torch.float64), magnitudes=[name], scaled=False))
    def check(grads: Tensor) -> None:
        assert ((grads.abs() >= low * (1 - 1e-12)) & (grads.abs() <= high * (1 + 1e-12))).all()

    check()


@settings(max_examples=10)
@given(grads=kit.gradients((torch.float16,), magnitudes=["float16's subnormals"], scaled=False))
def test_subnormals_are_not_flushed_and_not_normal(grads: Any):
    for leaf in leaves_of(grads):
        if leaf is not None:
            assert ((leaf != 0) & (leaf.abs() <= torch.finfo(torch.float16).tiny)).all()


@given(data=st.data())
@settings(max_examples=10)
def test_the_poisoned_leaf_is_the_one_chosen(data: st.DataObject):
    tree = {"a": torch.ones(2), "b": [torch.ones(3), torch.tensor(1)]}
    assert fa.nonfinite_paths(data.draw(kit.poisoned(tree, leaf="b.0"))) == ["b.0"]
    with pytest.raises(ValueError, match=r"found no float element at 'b\.1'"):
        data.draw(kit.poisoned(tree, leaf="b.1"))


@settings(max_examples=30)
@given(scaler=kit.scalers(), window=kit.windows(st.just("x"), empty=False), lengths=kit.windows(max_size=2))
def test_scalers_and_windows_are_within_their_domains(scaler: Any, window: list[Any], lengths: list[float]):
    assert fa.update_scale(scaler, torch.tensor(False)).scale > 0
    assert sum(weight for _, weight in window) > 0
    assert 1 <= len(lengths) <= 2 and min(lengths) >= 0


# The import


def test_without_hypothesis_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError("No module named 'hypothesis'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"functional_amp\[testing\]"):
        importlib.reload(kit)


@pytest.mark.slow
def test_the_package_does_not_import_the_kit():

    code = (
        "import sys, functional_amp; sys.exit('functional_amp.testing' in sys.modules or 'hypothesis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
