"""Findings about a run: each planted one is found, and a run that is well has none."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
from functional_amp.debug import Finding, check_health, init_history, record

OPTIMIZER = fa.sgd(0.0)


def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Its gradient is x, and overflows float16 where scale * x does."""
    return (params["w"].half() * x.half()).float().sum()


STEP = fa.make_step(loss_fn, OPTIMIZER)


def run(scaler: fa.Scaler, xs: list[float], step: Any = STEP) -> tuple[Any, Any, Any]:
    state = fa.init_state({"w": torch.ones(1)}, OPTIMIZER, scaler)
    history, metrics = init_history(state, 16), None
    for x in xs:
        state, metrics = step(state, [torch.tensor([x])])
        history = record(history, metrics)
    return state, history, metrics


def names(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.level) for finding in findings]


@pytest.mark.parametrize(
    "scaler",
    [
        lambda: fa.DynamicScale(growth_interval=3),
        lambda: fa.DynamicScale.megatron(2.0**20, growth_interval=3),
        lambda: fa.DynamicScale.deepspeed(scale_window=3),
        lambda: fa.DynamicScale.apex(scale_window=3),
        lambda: fa.DynamicScale(2.0**30),
        fa.NoScale,
        lambda: fa.StaticScale(8.0),
    ],
)
def test_a_scale_that_finds_its_range_is_no_finding(scaler: Any):
    """Skips at the start and after each growth are how a scale works."""
    state, history, metrics = run(scaler(), [1.0] * 40)
    assert int(state.skipped) or not isinstance(state.scaler, fa.DynamicScale)
    assert check_health(state) == check_health(state, history) == check_health(state, metrics) == []
    check_health(state, history, raise_=True)
    state, history, _ = run(scaler(), [1.0, math.inf])
    assert check_health(state, history) == []


def test_one_bad_batch_at_the_floor_or_at_1_is_no_finding():
    for scaler in (fa.DynamicScale.megatron(1.0, hysteresis=1), fa.DynamicScale(1.0)):
        state, history, _ = run(scaler, [1.0, math.inf])
        assert check_health(state, history) == []


@pytest.mark.parametrize("more", [3, 4])
def test_skips_in_a_row(more: int):
    state, _, _ = run(fa.DynamicScale(2.0**20), [math.nan] * more)
    found = check_health(state, max_skipped=3)
    assert names(found) == ([("skips in a row", "error")] if more > 3 else [])
    if found:
        assert found[0].sure == "certain" and "4 updates in a row" in found[0].found and "explain" in found[0].advice
        assert f"down to {2.0**16:g}" in found[0].found


def test_the_default_allows_thirty():
    assert check_health(run(fa.DynamicScale(2.0**60), [math.nan] * 30)[0]) == []
    assert names(check_health(run(fa.DynamicScale(2.0**60), [math.nan] * 31)[0])) == [("skips in a row", "error")]


def test_stuck_at_the_floor():
    state, _, _ = run(fa.DynamicScale.megatron(4.0, hysteresis=1), [math.nan] * 3)
    (finding,) = check_health(state)
    assert (finding.name, finding.level, finding.sure) == ("floor", "error", "certain") and "2^0" in finding.found
    recovered, _ = STEP(state, [torch.ones(1)])
    assert check_health(recovered) == []


def test_a_scale_below_one_with_skips():
    state, _, _ = run(fa.DynamicScale(1.0), [2.0**17] * 2)
    (finding,) = check_health(state)
    assert (finding.name, finding.level, finding.sure) == ("scale below 1", "error", "likely")
    assert "2^-2" in finding.found and "mean" in finding.advice
    assert check_health(STEP(state, [torch.ones(1)])[0]) == []


def test_stuck_at_the_ceiling():
    state, _, _ = run(fa.DynamicScale(8.0, growth_interval=1, max_scale=16.0), [1.0] * 3)
    (finding,) = check_health(state)
    assert (finding.name, finding.level) == ("ceiling", "warning") and "underflow_report" in finding.advice
    check_health(state, raise_=True)  # a warning


def test_a_scale_at_the_end_of_float32_comes_from_gradients_of_zero():
    step = fa.make_step(lambda p, x: (p["w"] * x).sum(), OPTIMIZER)
    state, _, _ = run(fa.DynamicScale(2.0**125, growth_interval=1), [0.0] * 4, step)
    (finding,) = check_health(state)
    assert (finding.name, finding.level, finding.sure) == ("ceiling", "error", "likely") and "zero" in finding.found


@pytest.mark.parametrize("part", ["params", "buffers", "opt_state"])
def test_a_state_that_is_not_finite(part: str):
    state = fa.init_state({"w": torch.ones(1)}, fa.sgd(0.1, momentum=0.9), buffers={"mean": torch.ones(1)})
    poisoned = dataclasses.replace(
        state, **{part: torch_pytree.tree_map(lambda leaf: leaf * math.nan, getattr(state, part))}
    )
    (finding,) = check_health(poisoned)
    assert (finding.name, finding.level, finding.sure) == ("state", "error", "certain")
    path = fa.nonfinite_paths(getattr(poisoned, part))[0]
    assert f"{part}.{path}" in finding.found and "nonfinite_report" in finding.advice


def test_a_loss_that_is_not_finite_though_its_gradients_are():
    step = fa.make_step(lambda p, x: (p["w"] * x).sum() + math.inf, OPTIMIZER)
    state, history, metrics = run(fa.DynamicScale(8.0), [1.0], step)
    for seen in (history, metrics):
        (finding,) = check_health(state, seen)
        assert (finding.name, finding.level, finding.sure) == ("loss", "warning", "certain") and "inf" in finding.found
    assert check_health(state) == []


def test_a_norm_that_leaves_float32_though_its_gradients_do_not():
    step = fa.make_step(lambda p, x: (p["w"] * x).sum(), OPTIMIZER, norm_type=1.0)
    state = fa.init_state({"w": torch.ones(2)}, OPTIMIZER, fa.NoScale())
    state, metrics = step(state, [torch.tensor([3e38, -3e38])])
    assert not metrics.applied and metrics.grad_norm == math.inf  # the step counts it as an overflow
    by_hand = metrics._replace(finite=torch.tensor(True))  # a loop that judges by all_finite alone
    (finding,) = check_health(state, by_hand)
    assert (finding.name, finding.sure) == ("norm", "certain") and "float32" in finding.found


@pytest.mark.parametrize("scaler", [fa.NoScale, lambda: fa.DynamicScale.megatron(1.0)])
def test_a_norm_that_is_nan_three_times_in_a_row_without_scaling(scaler: Any):
    assert ("norm", "error") not in names(check_health(*run(scaler(), [1.0, math.nan, math.nan])[:2]))
    state, history, metrics = run(scaler(), [1.0, math.nan, math.nan, math.nan])
    (finding,) = [finding for finding in check_health(state, history) if finding.name == "norm"]
    assert (finding.level, finding.sure) == ("error", "likely") and "2^0" in finding.found
    assert "norm" not in dict(names(check_health(state, metrics)))  # one window tells nothing


def test_nan_while_a_scale_comes_down_is_no_finding():
    state, history, _ = run(fa.DynamicScale(2.0**32), [1.0, *[math.nan] * 9])
    assert check_health(state, history) == []


def test_errors_come_first_and_are_raised_together():
    step = fa.make_step(lambda p, x: (p["w"] * x).sum() + math.inf, OPTIMIZER)
    state, history, _ = run(fa.DynamicScale(8.0), [1.0], step)
    state = dataclasses.replace(
        state, params={"w": torch.tensor([math.inf])}, skipped_in_a_row=torch.tensor(99, dtype=torch.int32)
    )
    found = check_health(state, history)
    assert names(found) == [("skips in a row", "error"), ("state", "error"), ("loss", "warning")]
    with pytest.raises(FloatingPointError) as raised:
        check_health(state, history, raise_=True)
    assert str(raised.value) == "\n".join(map(str, found[:2]))


def test_of_an_ensemble_the_member_that_skipped_most_is_judged():
    states = torch_pytree.tree_map(
        lambda leaf: torch.stack([leaf] * 3), fa.init_state(torch.ones(1), OPTIMIZER, fa.DynamicScale(8.0))
    )
    states = dataclasses.replace(states, skipped_in_a_row=torch.tensor([0, 40, 2], dtype=torch.int32))
    assert names(check_health(states)) == [("skips in a row", "error")]


def test_check_progress_is_the_finding_skips_in_a_row_as_an_error():
    state, _, _ = run(fa.DynamicScale(4.0, min_scale=1.0), [math.nan] * 101)
    fa.check_progress(state, max_skipped=101)
    with pytest.raises(FloatingPointError) as raised:
        fa.check_progress(state)
    (finding, *_) = check_health(state, max_skipped=100)
    assert str(raised.value) == f"{finding.found} {finding.advice}"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s: check_health(s.params), TypeError, "state: found dict, expected the TrainState"),
        (lambda s: check_health(s, cast(Any, s)), TypeError, "history: found TrainState, expected a History"),
        (lambda s: check_health(s, max_skipped=-1), ValueError, "max_skipped: found -1, expected at least 0"),
        (lambda s: check_health(s, max_skipped=cast(Any, 1.5)), TypeError, "max_skipped: found float 1.5"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call(run(fa.NoScale(), [])[0])
