"""More schedules against torch.optim.lr_scheduler and optax, and schedulers of torch as functions of the count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_amp as fa
from functional_amp.optim.schedules import Schedule
from tests.test_schedules import at, torch_rates

LR: Any = torch.optim.lr_scheduler


def close(expected: float, peak: float = 1.0) -> Any:
    return pytest.approx(expected, rel=1e-6, abs=1e-6 * peak)


def assert_torch(schedule: Schedule, make: Callable[[Any], Any], lr: float, n: int) -> None:
    assert [at(schedule, count) for count in range(n)] == [close(rate, lr) for rate in torch_rates(make, lr, n)]


@given(lr=st.floats(1e-4, 1.0), decay=st.floats(0.5, 1.5))
def test_exponential_is_torchs_exponential_lr(lr, decay):
    assert_torch(fa.exponential(lr, decay), lambda optimizer: LR.ExponentialLR(optimizer, decay), lr, 20)


def test_exponential_does_not_drift_over_many_powers():
    assert at(fa.exponential(1.0, 0.9999), 100_000) == pytest.approx(0.9999**100_000, rel=1e-6)


@given(lr=st.floats(1e-4, 1.0), steps=st.integers(1, 20), power=st.floats(0.5, 3.0))
def test_polynomial_is_torchs_polynomial_lr(lr, steps, power):
    assert_torch(fa.polynomial(lr, 0.0, steps, power), lambda o: LR.PolynomialLR(o, steps, power), lr, 25)


@given(lr=st.floats(1e-3, 1.0), steps=st.integers(1, 9), factor=st.integers(1, 3), end=st.floats(0.0, 0.1))
def test_cosine_restarts_is_torchs_cosine_annealing_warm_restarts(lr, steps, factor, end):
    make = functools.partial(LR.CosineAnnealingWarmRestarts, T_0=steps, T_mult=factor, eta_min=end)
    assert_torch(fa.cosine_restarts(lr, steps, factor, end), make, lr, 60)


@given(peak=st.floats(1e-3, 1.0), steps=st.integers(10, 60), pct=st.floats(0.2, 0.8))
def test_one_cycle_is_torchs_one_cycle_lr_one_update_later(peak, steps, pct):
    schedule = fa.one_cycle(peak, steps - 1, (pct * steps - 1) / (steps - 1))
    make = functools.partial(LR.OneCycleLR, max_lr=peak, total_steps=steps, pct_start=pct)
    assert_torch(schedule, make, peak, steps)


def test_one_cycle_may_go_up_alone_or_down_alone():
    assert [at(fa.one_cycle(1.0, 10, 1.0), n) for n in (0, 10, 11)] == [close(1 / 25), close(1.0), close(1.0)]
    assert [at(fa.one_cycle(1.0, 10, 0.0), n) for n in (0, 10, 11)] == [close(1.0), close(4e-6), close(4e-6)]


@given(lr=st.floats(1e-3, 1.0), steps=st.integers(1, 10), decay=st.floats(0.5, 1.0))
def test_warmup_comes_before_any_schedule_as_in_torchs_sequential_lr(lr, steps, decay):
    def make(optimizer: Any) -> Any:
        line = LR.LinearLR(optimizer, 0.1, 1.0, total_iters=steps)
        return LR.SequentialLR(optimizer, [line, LR.ExponentialLR(optimizer, decay)], [steps])

    assert_torch(fa.warmup(steps, fa.exponential(lr, decay), start=0.1 * lr), make, lr, 25)


def test_a_warm_up_of_nothing_is_the_schedule():
    schedule = fa.constant(0.5)
    assert fa.warmup(0, schedule) is schedule


@pytest.mark.parametrize("peak", [0.5, 3e-4])
@pytest.mark.parametrize("n", [1, 7])
def test_warmup_cosine_has_either_part_alone(peak, n):
    assert [at(fa.warmup_cosine(peak, 0, n), c) for c in range(n + 2)] == [
        at(fa.cosine(peak, n), c) for c in range(n + 2)
    ]
    rising = [close(peak * min(c / n, 1.0), peak) for c in range(n + 2)]
    assert [at(fa.warmup_cosine(peak, n, n), c) for c in range(n + 2)] == rising


# optax


OPTAX: dict[str, tuple[Schedule, Callable[[Any], Any]]] = {
    "constant": (fa.constant(0.3), lambda o: o.constant_schedule(0.3)),
    "linear": (fa.linear(0.5, 0.1, 20), lambda o: o.linear_schedule(0.5, 0.1, 20)),
    "cosine": (fa.cosine(0.5, 20, 0.05), lambda o: o.cosine_decay_schedule(0.5, 20, alpha=0.1)),
    "polynomial": (fa.polynomial(0.5, 0.1, 20, 2.0), lambda o: o.polynomial_schedule(0.5, 0.1, 2.0, 20)),
    "exponential": (fa.exponential(0.5, 0.7, 5), lambda o: o.exponential_decay(0.5, 5, 0.7)),
    "one cycle": (fa.one_cycle(0.5, 30), lambda o: o.cosine_onecycle_schedule(30, 0.5)),
    "warm-up, cosine": (fa.warmup_cosine(0.5, 5, 25), lambda o: o.warmup_cosine_decay_schedule(0.0, 0.5, 5, 25)),
    "warm-up, exponential": (
        fa.warmup(5, fa.exponential(0.5, 0.9)),
        lambda o: o.warmup_exponential_decay_schedule(0.0, 0.5, 5, 1, 0.9),
    ),
    "restarts": (
        fa.cosine_restarts(0.5, 5, 2),
        lambda o: o.join_schedules([o.cosine_decay_schedule(0.5, n) for n in (5, 10, 20)], [5, 15]),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OPTAX)
def test_schedules_are_those_of_optax(name):
    optax = pytest.importorskip("optax")
    ours, theirs = OPTAX[name][0], OPTAX[name][1](optax)
    assert [at(ours, count) for count in range(35)] == [close(float(theirs(count))) for count in range(35)]


# Schedulers of torch


SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "StepLR": (LR.StepLR, {"step_size": 3, "gamma": 0.5}),
    "MultiStepLR": (LR.MultiStepLR, {"milestones": [2, 9]}),
    "ConstantLR": (LR.ConstantLR, {"total_iters": 4}),
    "LinearLR": (LR.LinearLR, {"total_iters": 4}),
    "ExponentialLR": (LR.ExponentialLR, {"gamma": 0.9}),
    "PolynomialLR": (LR.PolynomialLR, {"total_iters": 9, "power": 2.0}),
    "CosineAnnealingLR": (LR.CosineAnnealingLR, {"T_max": 6}),
    "CosineAnnealingWarmRestarts": (LR.CosineAnnealingWarmRestarts, {"T_0": 3, "T_mult": 2}),
    "OneCycleLR": (LR.OneCycleLR, {"max_lr": 1.0, "total_steps": 20, "cycle_momentum": False}),
    "CyclicLR": (LR.CyclicLR, {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 4, "cycle_momentum": False}),
    "LambdaLR": (LR.LambdaLR, {"lr_lambda": lambda n: 1 / (1 + n)}),
    "MultiplicativeLR": (LR.MultiplicativeLR, {"lr_lambda": lambda n: 0.9 if n % 2 else 1.0}),
    "ChainedScheduler": (lambda o: LR.ChainedScheduler([LR.ConstantLR(o, 0.1, 3), LR.ExponentialLR(o, 0.9)]), {}),
    "SequentialLR": (lambda o: LR.SequentialLR(o, [LR.LinearLR(o, 0.1), LR.ExponentialLR(o, 0.9)], [5]), {}),
    "SWALR": (lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=5), {}),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_of_torch_gives_its_own_rates(name):
    make, options = SCHEDULERS[name]
    schedule = fa.from_torch_schedule(make, lr=0.4, steps=20, **options)
    expected = torch_rates(lambda optimizer: make(optimizer, **options), 0.4, 20)
    assert [at(schedule, count) for count in range(20)] == [torch.tensor(rate).item() for rate in expected]
    assert at(schedule, 100) == at(schedule, 19)


def test_the_momentum_of_one_cycle_is_a_schedule_of_its_own():
    options = {"max_lr": 1.0, "total_steps": 10}
    with pytest.raises(ValueError, match=r"moves the momentum too.*cycle_momentum=False"):
        fa.from_torch_schedule(LR.OneCycleLR, lr=0.1, steps=10, **options)
    rate = fa.from_torch_schedule(LR.OneCycleLR, lr=0.1, steps=10, cycle_momentum=False, **options)
    momentum = fa.from_torch_schedule(LR.OneCycleLR, lr=0.1, steps=10, of="momentum", **options)
    optimizer: Any = fa.from_torch(torch.optim.SGD, lr=rate, momentum=momentum)
    params = {"w": torch.ones(2)}
    state, theirs = optimizer.init(params), params["w"].clone()
    loop = torch.optim.SGD([theirs], 0.1, momentum=0.9)
    scheduler = LR.OneCycleLR(loop, **options)
    for seed in range(9):
        theirs.grad = torch.full((2,), 1.0 + seed)
        params, state = optimizer.step({"w": theirs.grad.clone()}, state, params)
        loop.step()
        scheduler.step()
    torch.testing.assert_close(params["w"], theirs, rtol=1e-6, atol=0)


def test_what_is_no_schedule_is_refused():
    with pytest.raises(TypeError, match=r"found ReduceLROnPlateau.*examples/recipes/reduce_on_plateau.py"):
        fa.from_torch_schedule(LR.ReduceLROnPlateau, lr=0.1, steps=5)
    optimizer = torch.optim.SGD([torch.zeros(1)], 0.1)
    with pytest.raises(TypeError, match=r"found StepLR, expected a class.*pass its class"):
        fa.from_torch_schedule(LR.StepLR(optimizer, 1), lr=0.1, steps=5)
    with pytest.raises(TypeError, match="scheduler: found int, expected a scheduler"):
        fa.from_torch_schedule(lambda optimizer: 3, lr=0.1, steps=5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="of: found 'beta'"):
        fa.from_torch_schedule(LR.ConstantLR, lr=0.1, steps=5, of="beta")
    for make in (
        lambda: fa.exponential(1.0, 0.0),
        lambda: fa.polynomial(1.0, 0.0, 0),
        lambda: fa.one_cycle(1.0, 10, 1.5),
        lambda: fa.one_cycle(1.0, 10, div_factor=0.0),
        lambda: fa.cosine_restarts(1.0, 5, 0),
        lambda: fa.warmup(-1, fa.constant(1.0)),
    ):
        with pytest.raises(ValueError, match=r"found .*expected"):
            make()
    with pytest.raises(TypeError, match=r"schedule: found 0.1, expected a function"):
        fa.warmup(3, 0.1)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_each_compiles_and_runs_under_vmap():
    schedules = [
        fa.exponential(1.0, 0.9),
        fa.polynomial(1.0, 0.1, 9, 2.0),
        fa.one_cycle(1.0, 9),
        fa.cosine_restarts(1.0, 3, 2),
        fa.warmup(3, fa.constant(1.0)),
        fa.from_torch_schedule(LR.StepLR, lr=1.0, steps=9, step_size=2),
    ]
    counts = torch.arange(12, dtype=torch.int32)
    for schedule in schedules:
        expected = torch.stack([schedule(count) for count in counts])
        torch.testing.assert_close(torch.vmap(schedule)(counts), expected)
        torch._dynamo.reset()
        graph = torch.compile(schedule, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(torch.stack([graph(count) for count in counts]), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda number: fa.exponential(1.0, number, 10),
        lambda number: fa.one_cycle(1.0, 10, div_factor=number),
        lambda number: fa.one_cycle(1.0, 10, final_div_factor=number),
    ],
    ids=["decay", "div_factor", "final_div_factor"],
)
def test_an_int_of_any_size_is_the_float_that_it_is(make: Any):
    count = torch.tensor(7, dtype=torch.int32)
    assert torch.equal(make(10**30)(count), make(1e30)(count))
