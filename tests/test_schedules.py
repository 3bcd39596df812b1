"""Schedules against torch.optim.lr_scheduler and the published formulas, in Python's double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.optim.schedules import Schedule

EPS = torch.finfo(torch.float32).eps
rates = st.floats(0.0, 10.0)
steps_of = st.integers(1, 5000)


def at(schedule: Schedule, count: int) -> float:
    value = schedule(torch.tensor(count, dtype=torch.int32))
    assert value.dtype == torch.float32 and value.shape == ()
    return value.item()


def torch_rates(make: Callable[[torch.optim.Optimizer], Any], lr: float, n: int) -> list[float]:
    """The rates of the first n updates of torch.optim.SGD under a scheduler of torch."""
    parameter = nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([parameter], lr, foreach=False)
    scheduler = make(optimizer)
    found = []
    for _ in range(n):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def close(expected: float, peak: float) -> Any:
    """Within a few roundings of numbers as large as the peak: a cosine near its end is a difference of such."""
    return pytest.approx(expected, rel=4 * EPS, abs=8 * EPS * max(peak, 1e-30))


# The published formulas


def linear_formula(start: float, end: float, steps: int, count: int) -> float:
    return start + (end - start) * min(count / steps, 1.0)


def cosine_formula(start: float, end: float, steps: int, count: int) -> float:
    return end + (start - end) * (1 + math.cos(math.pi * min(count / steps, 1.0))) / 2


@given(value=st.floats(-10.0, 10.0), count=st.integers(0, 2**31 - 1))
def test_constant_is_its_value_at_any_count(value, count):
    assert at(fa.constant(value), count) == torch.tensor(value).item()


@given(start=rates, end=rates, steps=steps_of, count=st.integers(0, 10_000))
def test_linear_is_the_straight_line_and_then_its_end(start, end, steps, count):
    assert at(fa.linear(start, end, steps), count) == close(linear_formula(start, end, steps, count), max(start, end))


@given(start=rates, end=rates, steps=steps_of, count=st.integers(0, 10_000))
def test_cosine_is_the_formula_of_sgdr_and_then_its_end(start, end, steps, count):
    found = at(fa.cosine(start, steps, end), count)
    assert found == close(cosine_formula(start, end, steps, count), max(start, end))


@given(peak=rates, end=rates, warmup=steps_of, rest=steps_of, count=st.integers(0, 15_000))
def test_warmup_cosine_is_a_line_from_zero_and_then_a_cosine(peak, end, warmup, rest, count):
    found = at(fa.warmup_cosine(peak, warmup, warmup + rest, end), count)
    if count < warmup:
        expected = linear_formula(0.0, peak, warmup, count)
    else:
        expected = cosine_formula(peak, end, rest, count - warmup)
    assert found == close(expected, max(peak, end))


@given(
    values=st.lists(rates, min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 50), min_size=4, max_size=4),
    count=st.integers(0, 300),
)
def test_join_gives_each_schedule_its_own_count(values, lengths, count):
    # Each piece is the line through its own count: the value tells which piece, and where it began.
    boundaries = [sum(lengths[: k + 1]) for k in range(len(values) - 1)]
    schedule = fa.join([fa.linear(value, value + 1000, 1000) for value in values], boundaries)
    piece = sum(boundary <= count for boundary in boundaries)
    began = ([0, *boundaries])[piece]
    assert at(schedule, count) == pytest.approx(values[piece] + count - began, rel=4 * EPS, abs=1e-4)


# torch.optim.lr_scheduler


@given(lr=st.floats(1e-4, 1.0), first=st.floats(0.01, 1.0), last=st.floats(0.0, 1.0), steps=st.integers(1, 40))
def test_linear_equals_torchs_linear_lr(lr, first, last, steps):
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, first, last, total_iters=steps), lr, steps + 5
    )
    schedule = fa.linear(lr * first, lr * last, steps)
    assert [at(schedule, count) for count in range(steps + 5)] == [close(rate, lr) for rate in expected]


@given(lr=st.floats(1e-4, 1.0), end=st.floats(0.0, 1.0), steps=st.integers(1, 40))
def test_cosine_equals_torchs_cosine_annealing_lr_up_to_its_end(lr, end, steps):
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps, eta_min=end), lr, steps + 1
    )
    schedule = fa.cosine(lr, steps, end)
    assert [at(schedule, count) for count in range(steps + 1)] == [close(rate, max(lr, end)) for rate in expected]
    # torch's cosine climbs again after T_max; here the rate stays.
    assert at(schedule, steps) == at(schedule, 2 * steps) == at(schedule, 2**31 - 1)


@given(lr=st.floats(1e-4, 1.0), warmup=st.integers(1, 20), rest=st.integers(1, 20))
def test_warmup_cosine_equals_torchs_lambda_lr(lr, warmup, rest):
    def factor(n: int) -> float:
        return n / warmup if n < warmup else (1 + math.cos(math.pi * min((n - warmup) / rest, 1.0))) / 2

    n = warmup + rest + 3
    expected = torch_rates(lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor), lr, n)
    schedule = fa.warmup_cosine(lr, warmup, warmup + rest)
    assert [at(schedule, count) for count in range(n)] == [close(rate, lr) for rate in expected]


@given(lr=st.floats(1e-4, 1.0), milestones=st.lists(st.integers(1, 30), min_size=1, max_size=4, unique=True))
def test_join_of_constants_equals_torchs_multi_step_lr(lr, milestones):
    milestones = sorted(milestones)
    expected = torch_rates(
        lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, gamma=0.5), lr, 35
    )
    schedule = fa.join([fa.constant(lr * 0.5**k) for k in range(len(milestones) + 1)], milestones)
    assert [at(schedule, count) for count in range(35)] == [close(rate, lr) for rate in expected]


# Boundaries


@given(start=rates, end=rates, steps=steps_of)
def test_the_first_and_the_last_rate_are_those_asked_for(start, end, steps):
    for schedule in (fa.linear(start, end, steps), fa.cosine(start, steps, end)):
        peak = max(start, end)
        assert at(schedule, 0) == close(start, peak)
        assert at(schedule, steps) == at(schedule, steps + 1) == at(schedule, 2**31 - 1) == close(end, peak)


@given(peak=rates, end=rates, warmup=steps_of, rest=steps_of)
def test_warmup_starts_at_zero_and_peaks_exactly_at_its_end(peak, end, warmup, rest):
    schedule = fa.warmup_cosine(peak, warmup, warmup + rest, end)
    assert at(schedule, 0) == 0
    assert at(schedule, warmup) == close(peak, max(peak, end))
    assert at(schedule, warmup - 1) == close(peak * (warmup - 1) / warmup, peak)
    assert at(schedule, warmup + rest) == at(schedule, 2**31 - 1) == close(end, max(peak, end))


@given(start=st.floats(0.5, 1.0), end=st.floats(0.0, 0.4), steps=st.integers(1, 200))
def test_a_decay_never_rises_nor_leaves_its_range(start, end, steps):
    for schedule in (fa.linear(start, end, steps), fa.cosine(start, steps, end)):
        values = [at(schedule, count) for count in range(0, steps + 2, max(1, steps // 40))]
        assert all(later <= earlier + EPS for earlier, later in pairwise(values))
        assert all(end - EPS <= value <= start + EPS for value in values)


def test_one_step_is_enough_for_each_part():
    assert [at(fa.linear(1.0, 2.0, 1), count) for count in (0, 1, 2)] == [1.0, 2.0, 2.0]
    assert [at(fa.cosine(1.0, 1), count) for count in (0, 1, 2)] == [1.0, 0.0, 0.0]
    assert [at(fa.warmup_cosine(1.0, 1, 2), count) for count in (0, 1, 2, 3)] == [0.0, 1.0, 0.0, 0.0]


def test_a_joined_schedule_hands_over_at_the_boundary_itself():
    schedule = fa.join([fa.constant(1.0), fa.linear(2.0, 4.0, 2), fa.constant(5.0)], [2, 5])
    assert [at(schedule, count) for count in range(7)] == [1.0, 1.0, 2.0, 3.0, 4.0, 5.0, 5.0]
    assert at(fa.join([fa.constant(3.0)], []), 7) == 3.0


def test_no_part_of_a_joined_schedule_is_asked_for_a_negative_count():
    asked: list[int] = []

    def part(count: Tensor) -> Tensor:
        asked.append(int(count))
        return count.float()

    schedule = fa.join([fa.constant(1.0), part], [3])
    assert [at(schedule, count) for count in (0, 2, 3, 6)] == [1.0, 1.0, 0.0, 3.0]
    assert min(asked) >= 0


@given(count=st.integers(0, 60))
def test_joined_schedules_join(count):
    inner = fa.join([fa.linear(0.0, 1.0, 10), fa.constant(1.0)], [10])
    outer = fa.join([inner, fa.cosine(1.0, 20)], [30])
    flat = fa.join([fa.linear(0.0, 1.0, 10), fa.constant(1.0), fa.cosine(1.0, 20)], [10, 30])
    assert at(outer, count) == at(flat, count)


# In the training step


@given(good=st.lists(st.booleans(), min_size=1, max_size=25))
def test_only_applied_updates_are_counted(good):
    # The loss is the parameter: each applied update lowers it by the rate, whatever its size elsewhere.
    schedule = fa.join([fa.linear(0.0, 8.0, 4), fa.linear(8.0, 0.0, 16)], [4])
    optimizer = fa.sgd(schedule)
    step = fa.make_step(lambda p, factor: p * factor, optimizer)
    state = fa.init_state(torch.tensor(0.0), optimizer, fa.DynamicScale(8.0))
    expected, applied = 0.0, 0
    for flag in good:
        state, _ = step(state, [torch.tensor(1.0 if flag else math.inf)])
        if flag:
            expected -= 2.0 * applied if applied < 4 else 8.0 - 0.5 * min(applied - 4, 16)
            applied += 1
        assert state.params.item() == expected
        assert state.applied.item() == state.opt_state.step.item() == applied


def test_a_window_is_one_count_however_many_micro_batches_it_has():
    optimizer = fa.sgd(fa.linear(1.0, 4.0, 3))
    step = fa.make_step(lambda p, x: p * x, optimizer)
    state = fa.init_state(torch.tensor(0.0), optimizer)
    for window, expected in (([1.0] * 3, -1.0), ([1.0], -3.0), ([1.0] * 5, -6.0)):
        state, _ = step(state, [torch.tensor(x) for x in window])
        assert state.params.item() == expected


def test_schedules_run_with_many_counts_at_once_under_vmap():
    counts = torch.arange(12, dtype=torch.int32)
    for schedule in (
        fa.constant(0.5),
        fa.linear(0.0, 1.0, 5),
        fa.cosine(1.0, 8, 0.1),
        fa.warmup_cosine(1.0, 3, 9),
        fa.join([fa.constant(1.0), fa.linear(1.0, 0.0, 4)], [2]),
    ):
        assert torch.vmap(schedule)(counts).tolist() == [at(schedule, int(count)) for count in counts]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fa.constant(math.nan), ValueError, "value: found nan"),
        (lambda: fa.constant(math.inf), ValueError, "value: found inf"),
        (lambda: fa.constant(cast(Any, "1")), TypeError, "value: found str"),
        (lambda: fa.constant(True), TypeError, "value: found bool"),
        (lambda: fa.constant(cast(Any, torch.tensor(1.0))), TypeError, "value: found Tensor"),
        (lambda: fa.linear(math.nan, 1.0, 3), ValueError, "start: found nan"),
        (lambda: fa.linear(0.0, cast(Any, None), 3), TypeError, "end: found NoneType"),
        (lambda: fa.linear(0.0, 1.0, 0), ValueError, "steps: found 0"),
        (lambda: fa.linear(0.0, 1.0, -1), ValueError, "steps: found -1"),
        (lambda: fa.linear(0.0, 1.0, cast(Any, 2.0)), TypeError, "steps: found float"),
        (lambda: fa.linear(0.0, 1.0, True), TypeError, "steps: found bool"),
        (lambda: fa.linear(0.0, 1.0, 2**31), ValueError, "steps: found 2147483648"),
        (lambda: fa.cosine(math.inf, 3), ValueError, "start: found inf"),
        (lambda: fa.cosine(1.0, 3, -math.inf), ValueError, "end: found -inf"),
        (lambda: fa.cosine(1.0, 0), ValueError, "steps: found 0"),
        (lambda: fa.warmup_cosine(1.0, -1, 3), ValueError, "warmup_steps: found -1"),
        (lambda: fa.warmup_cosine(1.0, 4, 3), ValueError, "steps: found 3,"),
        (lambda: fa.warmup_cosine(1.0, 3, cast(Any, 9.0)), TypeError, "steps: found float"),
        (lambda: fa.warmup_cosine(1.0, cast(Any, "3"), 9), TypeError, "warmup_steps: found str"),
        (lambda: fa.warmup_cosine(math.nan, 3, 9), ValueError, "peak: found nan"),
        (lambda: fa.join([], []), ValueError, "boundaries: found 0 for 0 schedules"),
        (lambda: fa.join([fa.constant(1.0)], [1]), ValueError, "boundaries: found 1 for 1 schedules"),
        (lambda: fa.join([fa.constant(1.0)] * 3, [2, 2]), ValueError, r"boundaries: found \[2, 2\]"),
        (lambda: fa.join([fa.constant(1.0)] * 3, [3, 2]), ValueError, r"boundaries: found \[3, 2\]"),
        (lambda: fa.join([fa.constant(1.0)] * 2, [0]), ValueError, "boundaries: found"),
        (lambda: fa.join([fa.constant(1.0)] * 2, [cast(Any, 1.5)]), TypeError, "boundaries: found float"),
        (lambda: fa.join([fa.constant(1.0), cast(Any, 0.5)], [1]), TypeError, r"schedules: found 0\.5"),
        (lambda: fa.join(cast(Any, fa.constant(1.0)), []), TypeError, "schedules: found function"),
    ],
)
def test_a_bad_schedule_is_refused_at_once_and_named(make, error, message):
    with pytest.raises(error, match=f"^{message}.*expected"):
        make()


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (torch.ones(2), ValueError, r"lr: .*shape \(2,\)"),
        (torch.tensor(1), TypeError, r"lr: .*torch\.int64"),
        ("0.1", TypeError, "lr: .*str"),
        (None, TypeError, "lr: .*NoneType"),
        (math.nan, ValueError, "lr: .*nan"),
    ],
)
@pytest.mark.parametrize("make", [fa.sgd, fa.adam, fa.adamw])
def test_what_a_schedule_returns_is_checked(make, returned, error, message):
    optimizer = make(lambda count: returned)
    params = torch.ones(1)
    opt_state = optimizer.init(params)
    with pytest.raises(error, match=message + ".*expected"):
        optimizer.step(params, opt_state, params)


@pytest.mark.parametrize("make", [fa.sgd, fa.adam, fa.adamw])
def test_a_scheduler_of_torch_is_refused_with_the_remedy(make):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer)
    with pytest.raises(TypeError, match=r"^lr: found LinearLR, .*from_torch_schedule\(cls, lr=, steps="):
        make(scheduler)
    make(fa.from_torch_schedule(torch.optim.lr_scheduler.LinearLR, lr=0.1, steps=5))
