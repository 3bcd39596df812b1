"""Faults hunted with numbers at the ends of their dtypes: weights, scales, norms, rates, losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import same_bits
from tests.test_hunts import OPTIMIZERS, backends, donations, drawn, optimizers, run

GOOD = torch.tensor(True)
TINY = (1e-50, 5e-324, 2.0**-150)


# Weights


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("weight", TINY)
@pytest.mark.parametrize("value", [24.0, math.nan])
def test_a_weight_that_float32_rounds_to_zero_stands_for_no_gradient(value, weight, as_tensor):
    given_weight = torch.tensor(weight, dtype=torch.float64) if as_tensor else weight
    grads = fa.ScaledGrads(torch.tensor([value]), 8.0, given_weight)
    assert grads.weight.item() == 0 and grads.tree.tolist() == [0.0]
    total = fa.accumulate(fa.ScaledGrads(torch.tensor([6.0]), 2.0, 3.0), grads)
    assert fa.unscale(total).grads.tolist() == [1.0]


@donations
@pytest.mark.parametrize("weight", [*TINY, torch.tensor(1e-50, dtype=torch.float64)])
def test_a_micro_batch_of_such_a_weight_counts_for_nothing(weight, donate):
    optimizer = fa.sgd(1.0)
    step = fa.make_step(lambda p, x: fa.Loss((p * x[0]).sum(), weight=x[1]), optimizer, donate=donate)
    window = [(torch.tensor([1.0, 2.0]), 1), (torch.tensor([5.0, math.nan]), weight)]
    for order in (1, -1):
        state, metrics = step(fa.init_state(torch.zeros(2), optimizer), window[::order])
        assert state.params.tolist() == [-1.0, -2.0] and metrics.loss.item() == 0


@donations
@pytest.mark.parametrize(
    "weight",
    [1e-30, 1e30, 1e-40, torch.tensor(3, dtype=torch.uint8), torch.tensor(2**40), torch.tensor(2.0**-14).half()],
)
def test_one_weight_for_all_micro_batches_is_no_weight(weight, donate):
    optimizer = fa.sgd(1.0)
    step = fa.make_step(lambda p, x: fa.Loss((p * x).sum(), weight=weight), optimizer, donate=donate)
    xs = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])]
    state, metrics = step(fa.init_state(torch.zeros(2), optimizer, fa.NoScale()), xs)
    bound = 1e-4 if weight == 1e-40 else 1e-6  # subnormal: 2**-149 is 1.4e-5 of it
    torch.testing.assert_close(state.params, -torch.stack(xs).mean(0), rtol=bound, atol=0)
    torch.testing.assert_close(metrics.grad_norm, torch.stack(xs).mean(0).norm(), rtol=bound, atol=0)


# Overflow of one thing and not of another


def imperative(loss_fn: Callable[..., Tensor], start: Tensor, xs: list[Any]) -> Tensor:
    param = start.clone().requires_grad_()
    optimizer = torch.optim.SGD([param], 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for x in xs:
        scaler.scale(loss_fn(param, x) / len(xs)).backward()
    scaler.step(optimizer)
    return param.detach()


def of_finite_value(p: Tensor, x: Tensor) -> Tensor:
    return (p.sqrt() * x).sum()


def of_infinite_value(p: Tensor, x: Tensor) -> Tensor:
    return (p * x).sum() + math.inf


@donations
@backends
@pytest.mark.parametrize(
    ("loss_fn", "start", "loss", "applied"),
    [(of_finite_value, 0.0, 0.0, 0), (of_infinite_value, 1.0, math.inf, 1)],
)
def test_the_gradients_decide_whatever_the_loss(loss_fn, start, loss, applied, backend, donate):
    first, xs = torch.full((2,), start), [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])]
    optimizer = fa.sgd(0.5)
    step = fa.make_step(loss_fn, optimizer, backend=backend, donate=donate)
    state, metrics = step(fa.init_state(first, optimizer, fa.DynamicScale(8.0)), xs)
    assert torch.equal(state.params, imperative(loss_fn, first, xs))
    assert metrics.loss.item() == loss and state.applied.item() == applied


@donations
@backends
def test_micro_batches_that_overflow_in_their_sum_alone_are_skipped(backend, donate):
    optimizer = fa.adamw(0.1)
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, max_norm=1.0, backend=backend, donate=donate)
    state, big = fa.init_state(torch.ones(2), optimizer, fa.DynamicScale(1.0)), torch.tensor([3e38, 1.0])
    before = copy.deepcopy((state.params, state.opt_state))
    state, metrics = step(state, [big, big])
    assert same_bits((state.params, state.opt_state), before)
    assert not metrics.finite and state.scaler.scale.item() == 0.5 and state.skipped.item() == 1
    state, metrics = step(state, [big])
    assert metrics.finite and state.applied.item() == 1


@donations
@optimizers
def test_a_skipped_update_keeps_numbers_that_arithmetic_would_change(optimizer, donate):
    rule = OPTIMIZERS[optimizer](0.1)
    params = {
        "odd": torch.tensor([-0.0, math.inf, math.nan, 1e-44, 3.4e38]),
        "0-dim": torch.tensor(-0.0),
        "empty": torch.ones(0, 3),
        "half": torch.tensor([6e-8, 65504.0]).half(),
        "complex": torch.tensor([complex(-0.0, math.nan)]),
        "double": torch.tensor([5e-324], dtype=torch.float64),
    }

    def loss_fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.stack([leaf.abs().double().sum() * x for leaf in p.values()]).sum()

    step = fa.make_step(loss_fn, rule, max_norm=1.0, donate=donate)
    state = fa.init_state(params, rule, fa.StaticScale(8.0))
    before = copy.deepcopy((state.params, state.opt_state))
    state, metrics = step(state, [torch.tensor(math.nan), torch.tensor(1.0)])
    assert same_bits((state.params, state.opt_state), before) and not metrics.finite


# Scales and rates in the kernels


@pytest.mark.parametrize("scale", [2.0**-100, 1e-30, 3.0, 1.1, 65536.0, 1e30, 2.0**120])
@pytest.mark.parametrize(
    ("rule", "theirs"),
    [
        (fa.sgd(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
        (fa.adamw(0.1), lambda p: torch.optim.AdamW(p, 0.1)),
        (fa.adam(0.1, weight_decay=0.1), lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1)),
    ],
)
def test_any_scale_of_the_gradients_gives_torchs_update(rule, theirs, scale):
    grads, start = torch.tensor([0.25, -0.125, 1e-3]), torch.tensor([1.0, -2.0, 3.0])
    carried = fa.ScaledGrads((grads.double() * scale).float(), scale)
    params, opt_state = start, rule.init(start)
    param = start.clone().requires_grad_()
    optimizer = theirs([param])
    for _ in range(3):
        params, opt_state = fa.maybe_step(rule, params, opt_state, carried, GOOD)
        param.grad = grads.clone()
        optimizer.step()
    torch.testing.assert_close(params, param.detach(), rtol=1e-6, atol=0)


@optimizers
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_rate_of_any_float_dtype_is_its_number_for_leaves_of_any_dtype(optimizer, dtype, scheduled):
    rate = torch.tensor(0.1, dtype=dtype)
    params = {
        "a": drawn(3),
        "0-dim": torch.tensor(2.0),
        "half": drawn(2).half(),
        "complex": torch.complex(drawn(2), drawn(2, seed=1)),
        "double": drawn(2).double(),
    }
    grads = {name: torch.full_like(leaf, 0.5) for name, leaf in params.items()}
    ours, number = (
        OPTIMIZERS[optimizer]((lambda count: rate) if scheduled else rate),
        OPTIMIZERS[optimizer](rate.item()),
    )
    found = fa.maybe_step(ours, params, ours.init(params), grads, GOOD)
    expected = fa.maybe_step(number, params, number.init(params), grads, GOOD)
    for name, leaf in params.items():
        assert found.params[name].dtype == leaf.dtype
        torch.testing.assert_close(found.params[name], expected.params[name], rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("start", "end"), [(0.1, 1e-9), (1.0, 1e-8), (1e-9, 0.1), (0.0, 1e-3), (1e20, 1.0), (3.0, 3.0)]
)
def test_a_linear_schedule_starts_and_ends_at_its_ends(start, end):
    schedule = fa.linear(start, end, 10)
    assert schedule(torch.tensor(0)).item() == np.float32(start)
    for count in (10, 11, 2**31 - 1):
        assert schedule(torch.tensor(count)).item() == np.float32(end)
    torch.testing.assert_close(schedule(torch.tensor(5)).item(), (start + end) / 2, rtol=1e-6, atol=0)


def test_a_schedule_or_partition_does_not_change_with_the_list_it_was_made_from():
    parts, boundaries = [fa.constant(1.0), fa.constant(2.0)], [3]
    schedule = fa.join(parts, boundaries)
    rules: dict[str, Any] = {"a": fa.sgd(1.0)}
    optimizer = fa.partition(rules, lambda path, leaf: "a")
    params = torch.ones(1)
    state = optimizer.init(params)
    for given_list in (parts, boundaries, rules):
        given_list.clear()
    assert [schedule(torch.tensor(count)).item() for count in (0, 2, 3)] == [1.0, 1.0, 2.0]
    assert fa.maybe_step(optimizer, params, state, torch.ones(1), GOOD).params.tolist() == [0.0]


# The norm


def float64_norm(leaves: list[Tensor]) -> float:
    values = np.concatenate([leaf.double().numpy().ravel() for leaf in leaves])
    peak = np.abs(values).max(initial=0)
    return float(peak * np.sqrt(np.sum((values / peak) ** 2))) if peak else 0.0


@given(st.data())
def test_the_norm_is_float64s_for_any_mixture_of_magnitudes(data: st.DataObject):
    leaves = []
    for _ in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
        low, high = {torch.float16: (-8, 4)}.get(dtype, (-45, 38))
        decades = data.draw(st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted))
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        size = data.draw(st.sampled_from([0, 1, 3, 65, 1000]))
        values = np.sign(rng.normal(size=size)) * 10 ** rng.uniform(*decades, size=size)
        leaves.append(torch.tensor(np.clip(values, -3e38, 3e38)).float().to(dtype))
    leaves = [leaf if torch.isfinite(leaf).all() else torch.zeros(0) for leaf in leaves]
    expected = float64_norm(leaves)
    for found in (fa.global_norm(leaves), fa.global_norm(fa.ScaledGrads(leaves, 1.0)), fa.clip(leaves, None).norm):
        if expected > torch.finfo(torch.float32).max:
            assert found.item() == math.inf
        else:
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.item(), expected, rtol=2e-6, atol=1.5e-45)


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-14, 1.0, 1e17, 1e30])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "half"])
def test_the_norm_of_a_million_elements_is_float64s(layout, size):
    leaf = (torch.rand(1000, 1000, generator=torch.Generator().manual_seed(0)) + 0.5) * size
    if layout == "half":
        leaf = leaf.to(torch.bfloat16)
    leaf = leaf.t() if layout == "transposed" else leaf
    torch.testing.assert_close(fa.global_norm([leaf]).item(), float64_norm([leaf]), rtol=1e-4, atol=0)


# Precision of the copies


@donations
@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_compute_dtype_casts_real_floats_alone(dtype, backend, donate):
    params = {
        "a": drawn(2), "n": torch.tensor([3]), "none": None, "bool": torch.tensor([True]),
        "complex": torch.tensor([1 + 1j]), "half": torch.ones(1).half(),
    }  # fmt: skip
    seen: list[Any] = []

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        seen.append({name: None if leaf is None else leaf.dtype for name, leaf in p.items()})
        return (p["a"] * p["n"].to(p["a"].dtype) * x).float().sum() + p["complex"].abs().sum() + p["half"].float().sum()

    optimizer = fa.adamw(0.1)
    step = fa.make_step(loss_fn, optimizer, compute_dtype=dtype, backend=backend, donate=donate)
    kinds = {name: None if leaf is None else leaf.dtype for name, leaf in params.items()}
    state, _ = run(step, fa.init_state(params, optimizer), [[torch.tensor(2.0)] * 2] * 2)
    assert all(each == {**kinds, "a": dtype, "half": dtype} for each in seen)
    assert {name: None if leaf is None else leaf.dtype for name, leaf in state.params.items()} == kinds
    assert state.applied.item() == 2
    assert all(same_bits(state.params[name], params[name]) for name in ("n", "none", "bool"))


def test_a_scaler_that_is_no_pytree_is_refused_with_the_remedy():
    class Mine:
        scale = torch.tensor(2.0)

        def update(self, finite: Tensor) -> Any:
            return self

    with pytest.raises(TypeError, match=r"scaler: found Mine.*Register"):
        fa.init_state(torch.zeros(2), fa.sgd(0.1), Mine())
