"""An ensemble under vmap: each member has its own scale, decision and skip."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa
from functional_amp.tree import flatten, paths
from tests.models import Problem, conv_net, mlp, overflowing, transformer

MEMBERS = 3
# A batched matrix product sums in another order than that of one member: a few float32 ulp.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}
OPTIMIZERS: dict[str, Callable[[], fa.Optimizer]] = {
    "sgd": lambda: fa.sgd(0.1),
    "momentum": lambda: fa.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: fa.adam(fa.linear(0.01, 0.0, 20), eps=1e-4),
    "adamw": lambda: fa.adamw(0.01, eps=1e-4),
}


def stack(trees: Sequence[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *trees)


def member(tree: Any, index: int) -> Any:
    return optree.tree_map(lambda leaf: leaf[index], tree)


def members_params(problem: Problem) -> list[dict[str, Tensor]]:
    """The parameters of each member: the model's, moved a little."""
    generator = torch.Generator().manual_seed(1)
    return [
        {name: p + 0.1 * torch.randn(p.shape, generator=generator) for name, p in problem.params.items()}
        for _ in range(MEMBERS)
    ]


def members_states(problem: Problem, optimizer: fa.Optimizer) -> list[fa.TrainState]:
    """The states of the members, each with a loss scale of its own."""
    return [
        fa.init_state(params, optimizer, fa.DynamicScale(2.0 ** (8 + index), growth_interval=2), problem.buffers)
        for index, params in enumerate(members_params(problem))
    ]


def micro_batch(problem: Problem, seed: int, overflows: Sequence[bool]) -> list[dict[str, Tensor]]:
    """A micro-batch for each member."""
    batches = [problem.batch(MEMBERS * seed + index) for index in range(MEMBERS)]
    return [overflowing(batch) if bad else batch for batch, bad in zip(batches, overflows, strict=True)]


def assert_equal(found: Any, expected: Any, **tolerance: Any) -> None:
    """Floating-point leaves to a tolerance, flags and counters exactly."""
    assert flatten(found).spec == flatten(expected).spec
    for path, ours, theirs in zip(paths(expected), flatten(found).leaves, flatten(expected).leaves, strict=True):
        torch.testing.assert_close(
            ours,
            theirs,
            equal_nan=True,
            msg=lambda text, path=path: f"{path}: {text}",
            **(tolerance if theirs is not None and theirs.is_floating_point() else EXACT),
        )


def check_ensemble(
    problem: Problem, optimizer: fa.Optimizer, windows: Sequence[Sequence[Sequence[bool]]], max_norm: float | None
) -> None:
    """An ensemble against its members' own runs; `windows[w][k][m]`: micro-batch k of member m overflows."""
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=max_norm)
    separate = members_states(problem, optimizer)
    ensemble, skips = stack(separate), [0] * MEMBERS
    for number, pattern in enumerate(windows):
        window = [micro_batch(problem, 10 * number + k, overflows) for k, overflows in enumerate(pattern)]
        before = ensemble
        ensemble, metrics = torch.func.vmap(step)(ensemble, [stack(batches) for batches in window])
        for index in range(MEMBERS):
            separate[index], expected = step(separate[index], [batches[index] for batches in window])
            ours = member(ensemble, index)
            assert_equal(ours, separate[index], **CLOSE)
            assert_equal(member(metrics, index)._replace(grad_norm=None), expected._replace(grad_norm=None), **CLOSE)
            torch.testing.assert_close(metrics.grad_norm[index], expected.grad_norm, equal_nan=True, rtol=1e-4, atol=0)

            skipped, was = any(overflows[index] for overflows in pattern), member(before, index)
            assert bool(metrics.finite[index]) is not skipped
            skips[index] += skipped
            assert (ours.skipped.item(), ours.applied.item()) == (skips[index], number + 1 - skips[index])
            kept = [torch.equal(ours.params[name], was.params[name]) for name in was.params]
            assert all(kept) if skipped else not all(kept)
            if skipped:
                assert_equal((ours.opt_state, ours.buffers), (was.opt_state, was.buffers), rtol=0, atol=0)
                assert ours.scaler.scale == was.scaler.scale / 2


GOOD = [False] * MEMBERS
ONE_BAD = [False, True, False]


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_only_the_member_that_overflows_skips(optimizer: str, max_norm: float | None):
    check_ensemble(mlp(), OPTIMIZERS[optimizer](), [[GOOD, GOOD], [GOOD, ONE_BAD], [GOOD, GOOD]], max_norm)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no batching rule for its attention
@pytest.mark.parametrize("make_problem", [conv_net, transformer])
def test_only_the_member_that_overflows_skips_its_buffers_as_well(make_problem: Callable[[], Problem]):
    check_ensemble(make_problem(), fa.sgd(0.1, momentum=0.9), [[GOOD, GOOD], [ONE_BAD, GOOD]], 1.0)


@settings(max_examples=10)  # one example runs an ensemble and its members
@given(st.lists(st.lists(st.tuples(*[st.booleans()] * MEMBERS), min_size=1, max_size=3), min_size=1, max_size=3))
def test_an_ensemble_is_its_members_whatever_overflows_where(windows: list[list[tuple[bool, ...]]]):
    check_ensemble(mlp(), fa.sgd(0.1, momentum=0.9), windows, 1.0)


def test_init_state_under_vmap_is_the_stack_of_the_members_states():
    problem, optimizer = mlp(), fa.adam(0.01)
    params = members_params(problem)
    ensemble = torch.func.vmap(lambda p: fa.init_state(p, optimizer, fa.DynamicScale(8.0)))(stack(params))
    expected = stack([fa.init_state(p, optimizer, fa.DynamicScale(8.0)) for p in params])
    assert_equal(ensemble, expected, rtol=0, atol=0)


def test_each_half_of_the_step_runs_under_vmap():
    problem, optimizer = mlp(), fa.adam(0.01, eps=1e-4)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0)
    ensemble = stack(members_states(problem, optimizer))
    batches = [stack(micro_batch(problem, seed, GOOD)) for seed in range(2)]
    opened = functools.reduce(torch.func.vmap(step.accumulate), batches, ensemble)
    assert opened.window is not None and opened.window.grads.weight.tolist() == [2.0] * MEMBERS
    assert_equal(torch.func.vmap(step.update)(opened), torch.func.vmap(step)(ensemble, batches), rtol=0, atol=0)


def test_each_stage_runs_under_vmap_with_one_flag_a_member():
    # The gradient of the mean square is 2 (p - x) / n, and the update -0.5 of it.
    scalers = stack([fa.DynamicScale(2.0**index, growth_interval=1) for index in range(MEMBERS)])
    params = torch.randn(MEMBERS, 4, generator=torch.Generator().manual_seed(0))
    x = torch.zeros(MEMBERS, 4)
    x[1, 2] = torch.inf

    def step(params: Tensor, scaler: fa.DynamicScale, x: Tensor) -> tuple[Tensor, fa.DynamicScale, Tensor, Tensor]:
        grads = fa.scale_backward(lambda p: ((p - x) ** 2).mean(), scaler, params).grads
        clipped, norm = fa.clip(fa.accumulate(fa.accumulate(None, grads), grads), 100.0)
        plain, finite = fa.unscale(clipped)
        stepped, _ = fa.maybe_step(lambda g, s, p: (-0.5 * g, s), params, (), plain, finite)
        return stepped, fa.update_scale(scaler, finite), norm, fa.all_finite(grads)

    stepped, scalers_after, norm, finite = torch.func.vmap(step)(params, scalers, x)
    gradient = 2 * params / 4
    assert finite.tolist() == [True, False, True]
    assert torch.equal(stepped[1], params[1])
    torch.testing.assert_close(stepped[[0, 2]], (params - 0.5 * gradient)[[0, 2]])
    torch.testing.assert_close(norm[[0, 2]], gradient.norm(dim=1)[[0, 2]])
    assert scalers_after.scale.tolist() == [2.0, 1.0, 8.0]


def test_a_learning_rate_a_member():
    problem, rates = mlp(), torch.tensor([0.01, 0.1, 1.0])
    states = members_states(problem, fa.sgd(0.0, momentum=0.9))
    window = [micro_batch(problem, seed, GOOD) for seed in range(2)]

    def run(rate: Any, state: fa.TrainState, batches: Any) -> Any:
        return fa.make_step(problem.loss_fn, fa.sgd(rate, momentum=0.9), max_norm=1.0)(state, batches)

    ensemble, _ = torch.func.vmap(run)(rates, stack(states), [stack(batches) for batches in window])
    for index, rate in enumerate(rates):
        expected, _ = run(float(rate), states[index], [batches[index] for batches in window])
        assert_equal(member(ensemble, index), expected, **CLOSE)


def test_members_share_what_is_not_stacked():
    problem, optimizer = mlp(), fa.adam(0.01, eps=1e-4)
    step, states = fa.make_step(problem.loss_fn, optimizer), members_states(problem, optimizer)
    window = [problem.batch(0), problem.batch(1)]
    ensemble, _ = torch.func.vmap(step, in_dims=(0, None))(stack(states), window)
    for index, state in enumerate(states):
        assert_equal(member(ensemble, index), step(state, window)[0], **CLOSE)


def test_dropout_of_an_ensemble_differs_by_member_and_replays_from_a_seed():
    problem, optimizer = mlp(dropout=0.5), fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(problem.loss_fn, optimizer)
    ensemble = stack([fa.init_state(problem.params, optimizer)] * MEMBERS)
    batches = [stack([problem.batch(0)] * MEMBERS)]

    def run(seed: int) -> Any:
        with fa.seeded(seed):
            return torch.func.vmap(step, randomness="different")(ensemble, batches)

    first, other = run(0), run(1)
    assert len(set(first[1].loss.tolist())) == MEMBERS
    assert_equal(run(0), first, rtol=0, atol=0)
    assert not torch.equal(first[1].loss, other[1].loss)


def test_the_ensemble_given_is_not_changed():
    problem, optimizer = conv_net(), fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(problem.loss_fn, optimizer)
    ensemble = stack(members_states(problem, optimizer))
    copy = optree.tree_map(torch.clone, ensemble)
    after, _ = torch.func.vmap(step)(ensemble, [stack(micro_batch(problem, 0, ONE_BAD))])
    assert_equal(ensemble, copy, rtol=0, atol=0)
    assert flatten(after).spec == flatten(ensemble).spec
