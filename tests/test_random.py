"""Seeds: a step can be replayed bit for bit, and the global generator never notices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa
from functional_amp.tree import flatten
from tests.models import PROBLEMS, Problem, mlp, transformer

BACKENDS = ["func", "autograd"]
SEEDS = st.integers(-(2**63), 2**64 - 1)


def dropped(problem: Problem, backend: Any) -> tuple[fa.Step, fa.TrainState]:
    optimizer = fa.adam(0.01)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    return step, fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**8))


def assert_identical(found: Any, expected: Any) -> None:
    assert flatten(found).spec == flatten(expected).spec
    for ours, theirs in zip(flatten(found).leaves, flatten(expected).leaves, strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)


@given(SEEDS)
def test_the_same_seed_gives_the_same_bits_which_are_those_of_manual_seed(seed: int):
    with fa.seeded(seed):
        first = torch.rand(4), torch.randn(3), torch.randint(9, (2,)), torch.randperm(5)
    with fa.seeded(seed):
        again = torch.rand(4), torch.randn(3), torch.randint(9, (2,)), torch.randperm(5)
    generator = torch.Generator().manual_seed(seed)
    expected = torch.rand(4, generator=generator), torch.randn(3, generator=generator)
    assert_identical(again, first)
    assert_identical(first[:2], expected)


@given(SEEDS, SEEDS)
def test_the_global_generator_is_left_as_it_was(outer: int, inner: int):
    before = torch.get_rng_state()
    with fa.seeded(outer):
        first = torch.rand(2)
        with fa.seeded(inner):
            torch.rand(5)
        second = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), before)
    generator = torch.Generator().manual_seed(outer)
    assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(2, generator=generator) for _ in range(2)]))


def test_the_global_generator_is_left_as_it_was_by_a_block_that_raises():
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), fa.seeded(0):
        torch.rand(3)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_raises_leaves_the_global_generator_as_it_was():
    step, state = dropped(mlp(dropout=0.5), "func")
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="empty window"):
        step(state, [], seed=0)
    with pytest.raises(RuntimeError):
        step(state, [mlp().batch(0), {**mlp().batch(1), "x": torch.ones(5, 7)}], seed=0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, torch.tensor(1), (1,)])
def test_a_seed_that_is_no_int_is_refused(seed: Any):
    before = torch.get_rng_state()
    with pytest.raises(TypeError, match=r"seed: found .*, expected an int"), fa.seeded(seed):
        pass
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_a_seed_too_large_for_a_generator_is_refused(seed: int):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match=r"seed: found .*, expected an int of 64 bits"), fa.seeded(seed):
        pass
    assert torch.equal(torch.get_rng_state(), before)


def test_a_seed_inside_a_compiled_graph_is_refused_with_the_remedy(fresh_dynamo: None):
    step, state = dropped(mlp(dropout=0.5), "func")
    window = [mlp().batch(0)]
    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with pytest.raises(RuntimeError, match=r"with seeded\(seed\): compiled_step\(state, micro_batches\)"):
        compiled(state, window, seed=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make_problem", [mlp, transformer])
def test_a_step_with_dropout_replays_bit_for_bit_from_its_seed(make_problem: Any, backend: str):
    problem = make_problem(dropout=0.5)
    step, state = dropped(problem, backend)
    window, before = [problem.batch(0), problem.batch(1)], torch.get_rng_state()
    first, other = step(state, window, seed=1), step(state, window, seed=2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(7)
    assert_identical(step(state, window, seed=1), first)
    assert first[1].loss != other[1].loss
    assert any(not torch.equal(first[0].params[name], other[0].params[name]) for name in state.params)


@pytest.mark.parametrize("make_problem", [mlp, transformer])
def test_both_backends_draw_the_same_numbers(make_problem: Any):
    problem = make_problem(dropout=0.5)
    window = [problem.batch(0), problem.batch(1)]
    (by_func, _), (by_autograd, _) = (
        step(state, window, seed=3) for step, state in (dropped(problem, backend) for backend in BACKENDS)
    )
    for name in problem.params:
        torch.testing.assert_close(by_func.params[name], by_autograd.params[name])


def test_the_seed_of_a_step_is_that_of_a_block_around_it():
    problem = mlp(dropout=0.5)
    step, state = dropped(problem, "func")
    window = [problem.batch(0), problem.batch(1)]
    with fa.seeded(5):
        expected = step(state, window)
    assert_identical(step(state, window, seed=5), expected)
    with fa.seeded(5):
        halves = state
        for batch in window:
            halves = step.accumulate(halves, batch)
        assert_identical(step.update(halves), expected)


def test_the_micro_batches_of_a_window_draw_different_numbers():
    problem = mlp(dropout=0.5)
    step, state = dropped(problem, "func")
    with fa.seeded(0):
        once = step.accumulate(state, problem.batch(0))
        twice = step.accumulate(once, problem.batch(0))
    assert once.window is not None and twice.window is not None
    assert once.window.loss != twice.window.loss - once.window.loss


def test_a_run_replays_from_the_seeds_of_its_steps():
    problem = mlp(dropout=0.5)
    step, start = dropped(problem, "func")

    def run() -> Any:
        state, losses = start, []
        for number in range(4):
            state, metrics = step(state, [problem.batch(number)], seed=number)
            losses.append(metrics.loss)
            torch.rand(number)
        return state, losses

    assert_identical(run(), run())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_library_draws_no_random_numbers_itself(name: str, backend: Any):
    before = torch.get_rng_state()
    problem, optimizer = PROBLEMS[name](), fa.adamw(fa.warmup_cosine(0.01, 2, 9))
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    state = fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**8), problem.buffers)
    for number in range(3):
        state, _ = step(state, [problem.batch(number), problem.batch(number + 1)])
    fa.to_module(problem.module, state.params, state.buffers)
    assert torch.equal(torch.get_rng_state(), before)


def test_from_module_draws_no_random_numbers():
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5))
    before = torch.get_rng_state()
    apply, params, buffers = fa.from_module(module)
    apply.eval().bind(buffers)(params, torch.ones(2, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_on_cuda_replays_and_leaves_both_generators_as_they_were(backend: str):
    problem = mlp(dropout=0.5, device="cuda")
    step, state = dropped(problem, backend)
    window = [problem.batch(0), problem.batch(1)]
    before = torch.get_rng_state(), torch.cuda.get_rng_state()
    first, other = step(state, window, seed=1), step(state, window, seed=2)
    assert_identical((torch.get_rng_state(), torch.cuda.get_rng_state()), before)

    def draw() -> Tensor:
        with fa.seeded(1):
            return torch.rand(3, device="cuda")

    assert torch.equal(draw(), draw())
    assert_identical(step(state, window, seed=1), first)
    assert first[1].loss != other[1].loss
