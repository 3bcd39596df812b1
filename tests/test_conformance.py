"""The project's own optimizers, scalers and steps through the suites that users are given."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

import functional_amp as fa
from functional_amp.testing import (
    backoff_factors,
    check_optimizer,
    check_scaler,
    check_step,
    growth_factors,
    loss_scales,
    references,
    scaler_machine,
    step_machine,
)
from tests.models import Problem, conv_net, mlp, transformer
from tests.test_scaler import ODD

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
TINY = torch.finfo(torch.float32).tiny

# Optimizers


def mixed_params() -> Any:
    """A nested tree of many dtypes, with None and integer leaves and an empty one."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    return {
        "block": [{"w": tensor(2, 3), "b": tensor(3, dtype=torch.float64)}, (tensor(), tensor(2).half(), tensor(0))],
        "z": tensor(2, dtype=torch.complex64),
        "count": torch.tensor(7),
        "gone": None,
    }


def by_shape(path: str, leaf: torch.Tensor) -> str:
    return "frozen" if leaf.ndim == 0 else "decay" if leaf.ndim > 1 else "plain"


OPTIMIZERS: dict[str, Callable[[], fa.Optimizer]] = {
    "sgd": lambda: fa.sgd(0.1),
    "sgd, decay": lambda: fa.sgd(0.1, weight_decay=0.1),
    "momentum, dampening, decay": lambda: fa.sgd(0.1, momentum=0.9, dampening=0.3, weight_decay=0.05),
    "nesterov": lambda: fa.sgd(torch.tensor(0.1), momentum=0.9, nesterov=True),
    "adam, decay": lambda: fa.adam(0.01, weight_decay=0.1),
    "adamw": lambda: fa.adamw(torch.tensor(0.01)),
    "sgd, schedule": lambda: fa.sgd(fa.warmup_cosine(0.1, 2, 9), momentum=0.9),
    "adam, schedule": lambda: fa.adam(fa.linear(0.1, 0.01, 5)),
    "adamw, schedule": lambda: fa.adamw(fa.join([fa.constant(0.1), fa.cosine(0.1, 4)], [2])),
    "partition": lambda: fa.partition(
        {"decay": fa.adamw(0.01), "plain": fa.sgd(0.1, momentum=0.9), "frozen": None}, by_shape
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_keeps_the_laws_on_a_mixed_tree(name: str):
    check_optimizer(OPTIMIZERS[name](), mixed_params(), compiled=False)


SLOW = ("sgd", "sgd, decay", "sgd, schedule", "nesterov", "adam, decay", "adamw", "adam, schedule", "partition")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in OPTIMIZERS])
def test_each_optimizer_keeps_all_the_laws(name: str):
    check_optimizer(OPTIMIZERS[name]())


# Scalers


SCALERS: dict[str, Callable[[], Any]] = {
    "torch": fa.DynamicScale,
    "every field odd": lambda: fa.DynamicScale(24.0, 5, 2, **ODD),
    "megatron": fa.DynamicScale.megatron,
    "deepspeed": fa.DynamicScale.deepspeed,
    "deepspeed, consecutive": lambda: fa.DynamicScale.deepspeed(consecutive_hysteresis=True),
    "apex": fa.DynamicScale.apex,
    "apex, hysteresis": lambda: fa.DynamicScale.apex(hysteresis=2),
    "jmp": fa.DynamicScale.jmp,
    "flax": fa.DynamicScale.flax,
    "static": lambda: fa.StaticScale(24.0),
    "none": fa.NoScale,
}


@pytest.mark.parametrize("name", SCALERS)
def test_each_scaler_keeps_the_laws(name: str):
    check_scaler(SCALERS[name]())


class Rule(NamedTuple):
    """A rule of the package, its reference, and hyperparameters that both take by position."""

    ours: Callable[..., Any]
    theirs: Callable[..., references.Reference]
    arguments: st.SearchStrategy[Any]


interval, hysteresis = st.integers(1, 5), st.integers(1, 4)
RULES: dict[str, Rule] = {
    "torch": Rule(
        lambda a: fa.DynamicScale(a[0], growth_factor=a[1], backoff_factor=a[2], growth_interval=a[3]),
        lambda a: references.Torch(*a),
        # torch's has no floor: no run of 40 overflows may reach it.
        st.tuples(loss_scales(low=1.0), growth_factors(), st.sampled_from([0.5, 0.75, 0.625]), interval),
    ),
    "megatron": Rule(
        lambda a: fa.DynamicScale.megatron(
            a[0], growth_factor=a[1], backoff_factor=a[2], growth_interval=a[3], hysteresis=a[4]
        ),
        lambda a: references.Megatron(*a),
        st.tuples(
            loss_scales(1.0, 2.0**30), st.sampled_from([2.0, 4.0, 1.5, 3.0]), backoff_factors(), interval, hysteresis
        ),
    ),
    "deepspeed": Rule(
        lambda a: fa.DynamicScale.deepspeed(
            a[0], scale_window=a[1], hysteresis=a[2], consecutive_hysteresis=a[3], min_scale=a[4]
        ),
        lambda a: references.DeepSpeed(*a),
        st.tuples(loss_scales(1.0, 2.0**60), interval, hysteresis, st.booleans(), st.sampled_from([1.0, 0.25])),
    ),
    "apex": Rule(
        lambda a: fa.DynamicScale.apex(a[0], scale_window=a[1], min_scale=a[2]),
        lambda a: references.Apex(*a),
        st.tuples(loss_scales(2.0**-40, 2.0**24), interval, st.sampled_from([TINY, 2.0**-50, 2.0**-41])),
    ),
    "apex, hysteresis kernel": Rule(
        lambda a: fa.DynamicScale.apex(a[0], scale_window=a[1], hysteresis=a[2], max_scale=math.inf),
        lambda a: references.ApexHysteresis(a[0], interval=a[1], hysteresis=a[2]),
        st.tuples(loss_scales(2.0**-40, 2.0**60), interval, st.integers(2, 4)),
    ),
    "jmp": Rule(
        lambda a: fa.DynamicScale.jmp(a[0], period=a[1], factor=a[2]),
        lambda a: references.Jmp(*a),
        st.tuples(loss_scales(low=1.0), interval, st.sampled_from([2.0, 4.0, 8.0])),
    ),
    "flax": Rule(
        lambda a: fa.DynamicScale.flax(a[0], growth_factor=a[1], backoff_factor=a[2], growth_interval=a[3]),
        lambda a: references.Flax(*a),
        st.tuples(loss_scales(), growth_factors(), backoff_factors(), interval),
    ),
    "static": Rule(fa.StaticScale, references.Static, loss_scales()),
    "none": Rule(lambda a: fa.NoScale(), lambda a: references.Static(), st.none()),
}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_follows_its_reference(name: str):
    rule = RULES[name]
    machine = scaler_machine(rule.ours, rule.theirs, arguments=rule.arguments)
    # At least the profile's examples of lists of overflows; 30 windows reach each interval several times.
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))


def test_the_default_interval_is_reached_from_its_tracker():
    machine = scaler_machine(
        lambda tracker: dataclasses.replace(fa.DynamicScale(), growth_tracker=tracker),
        lambda tracker: references.Torch(tracker=tracker),
        arguments=st.integers(1985, 1999),
    )
    run_state_machine_as_test(machine, settings=settings(max_examples=10))


START: dict[str, tuple[Callable[[], Any], Callable[[], references.Reference]]] = {
    "torch": (lambda: fa.DynamicScale(8.0, growth_interval=2), lambda: references.Torch(8.0, interval=2)),
    "megatron": (
        lambda: fa.DynamicScale.megatron(8.0, growth_interval=2),
        lambda: references.Megatron(8.0, interval=2),
    ),
    "deepspeed": (lambda: fa.DynamicScale.deepspeed(8.0, scale_window=2), lambda: references.DeepSpeed(8.0, window=2)),
    "apex": (lambda: fa.DynamicScale.apex(8.0, scale_window=2), lambda: references.Apex(8.0, window=2)),
    "apex, hysteresis kernel": (
        lambda: fa.DynamicScale.apex(8.0, scale_window=2, hysteresis=2),
        lambda: references.ApexHysteresis(8.0, interval=2),
    ),
    "jmp": (lambda: fa.DynamicScale.jmp(8.0, period=2), lambda: references.Jmp(8.0, period=2)),
    "flax": (lambda: fa.DynamicScale.flax(8.0, growth_interval=2), lambda: references.Flax(8.0, interval=2)),
    "static": (lambda: fa.StaticScale(8.0), lambda: references.Static(8.0)),
    "none": (fa.NoScale, references.Static),
}


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("name", START)
def test_the_step_with_each_rule_follows_its_reference(name: str, backend: Any):
    def make_step(loss_fn: Any, optimizer: Any) -> fa.Step:
        return fa.make_step(loss_fn, optimizer, backend=backend)

    machine = step_machine(*START[name], make_step=make_step)
    run_state_machine_as_test(machine, settings=settings(max_examples=8, stateful_step_count=15))


# Steps


def tokens_only() -> Problem:
    """The transformer on batches without a float leaf."""
    problem = transformer()
    return problem._replace(
        loss_fn=lambda params, batch: problem.loss_fn(params, {**batch, "gain": torch.ones(())}),
        batch=lambda seed: {name: leaf for name, leaf in problem.batch(seed).items() if name != "gain"},
    )


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "mlp": mlp,
    "mlp with dropout": lambda: mlp(dropout=0.5),
    "BatchNorm": conv_net,
    "tokens only": tokens_only,
}


def state_of(problem: Problem, optimizer: fa.Optimizer) -> fa.TrainState:
    scaler = fa.DynamicScale(2.0**10, growth_interval=2, hysteresis=2)
    return fa.init_state(problem.params, optimizer, scaler, problem.buffers)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_each_step_keeps_the_laws(name: str, backend: Any, donate: bool):
    problem, optimizer = PROBLEMS[name](), fa.adamw(fa.warmup_cosine(1e-2, 2, 10))
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend, donate=donate)
    check_step(step, state_of(problem, optimizer), problem.batch(0))


@pytest.mark.parametrize("policy", ["autocast", "policy"])
def test_a_step_in_half_precision_keeps_the_laws(policy: str):
    problem, optimizer = mlp(), fa.sgd(0.1, momentum=0.9)
    if policy == "autocast":
        loss_fn = fa.autocast(problem.loss_fn, torch.bfloat16)
    else:
        loss_fn = fa.with_policy(problem.loss_fn, "p=f32,c=f16,o=f32")
    check_step(fa.make_step(loss_fn, optimizer), state_of(problem, optimizer), problem.batch(0))


@pytest.mark.slow
def test_a_compiled_step_keeps_the_laws():
    problem, optimizer = conv_net(), fa.adam(1e-2)
    step = torch.compile(fa.make_step(problem.loss_fn, optimizer), backend="aot_eager", fullgraph=True)
    check_step(step, state_of(problem, optimizer), problem.batch(0), host=False)
