"""Deliberately wrong steps: each is rejected by the right law, or by the machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor

import functional_amp as fa
import functional_amp.testing as kit
from functional_amp.registry import with_fields
from functional_amp.testing import mapped, references

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
    return after, fa.Metrics(torch.zeros(()), fa.global_norm(grads), finite, finite, state.scaler.scale, total.weight)


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


def poisons_in_place(loss_fn: Any, optimizer: Any) -> Any:
    """Gives the tensors of its state back, after writing what it skips into them."""

    def step(state: Any, micro_batches: Any) -> Any:
        after, metrics = fa.make_step(loss_fn, optimizer)(state, micro_batches)
        mapped(lambda p: p.mul_(torch.where(metrics.finite, 1.0, math.nan)), state.params)
        return (after if metrics.finite else with_fields(after, params=state.params)), metrics

    return step


WRONG_STEPS: dict[str, tuple[Callable[..., Any], str]] = {
    "unscales with the scale after its update": (
        unscaled_with_the_next_scale,
        "after (good|empty) good: state.params: at '[ab]'",
    ),
    "takes zeros for NaN": (zeros_for_nan, "after (good )?bad: a skip is a transaction: at '.*': found .*, expected"),
    "writes NaN into the parameters it was given": (
        poisons_in_place,
        r"after bad: a skip is a transaction: at 'params.a'\[0\]: found nan, expected 0.0",
    ),
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


def only(place: int) -> Update:
    """Looks at the gradients of one micro-batch alone: a window with NaN elsewhere is applied, or counts as clean."""

    def step(state: Any, micro_batches: Any) -> Any:
        return STEP(state, [micro_batches[place]] * len(micro_batches))

    return step


def left_over() -> Update:
    """The gradients of a skipped window stay: a `zero_grad` that only an applied update calls."""
    left: list[Any] = []

    def step(state: Any, micro_batches: Any) -> Any:
        after, metrics = STEP(state, [*left, *micro_batches])
        left[:] = [] if metrics.finite or left else [batch.nan_to_num(1.0) for batch in micro_batches]
        return after, metrics

    return step


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
    "looks at the last micro-batch alone": (
        lambda: only(-1),
        "one bad micro batch spoils its window.*found True where the first of two is bad",
    ),
    "looks at the first micro-batch alone": (
        lambda: only(0),
        "one bad micro batch spoils its window.*found True where the last of two is bad",
    ),
    "leaves the gradients of a skip over": (
        left_over,
        "one bad micro batch spoils its window and no other: the state after the window after the skipped one: at",
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
