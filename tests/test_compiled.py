"""`make_step(compile=...)`: the pieces that are compiled, alone and with donated states."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.engine import graphs as compiling
from functional_amp.registry import with_fields
from functional_amp.tree import flatten, map_tensors
from tests.conftest import Halves
from tests.models import PROBLEMS, Problem, mlp, overflowing
from tests.test_compile import CLOSE, assert_close, assert_identical, graphs
from tests.test_donate import storages

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
AOT: dict[str, Any] = {"backend": "aot_eager"}


def start(problem: Problem, optimizer: fa.Optimizer) -> fa.TrainState:
    return fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**10, growth_interval=2), problem.buffers)


def stacked(window: list[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *window)


def windows(problem: Problem, lengths: tuple[int, ...], bad: int) -> list[list[Any]]:
    drawn = [[problem.batch(10 * i + j) for j in range(length)] for i, length in enumerate(lengths)]
    drawn[bad][-1] = overflowing(drawn[bad][-1])
    return drawn


@pytest.mark.parametrize(
    ("name", "backend", "donate"),
    [
        pytest.param("mlp", "autograd", True, marks=pytest.mark.slow),
        pytest.param("transformer", "func", True, marks=pytest.mark.slow),
        pytest.param("transformer", "autograd", False, marks=pytest.mark.slow),
        pytest.param("conv_net", "func", False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_has_four_graphs_for_windows_of_any_length_and_eager_values(name, backend, donate):
    problem = PROBLEMS[name]()
    # Not Adam: it makes as much of the noise of a gradient that is zero (a bias before BatchNorm) as of any.
    optimizer = fa.sgd(fa.warmup_cosine(1e-1, 3, 30), momentum=0.9)
    eager = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend, donate=donate, compile=AOT)
    state, expected = start(problem, optimizer), start(problem, optimizer)
    for window in windows(problem, (2, 2, 4, 1, 3), bad=2):
        with torch._dynamo.config.patch(error_on_recompile=True):
            state, metrics = step(state, window)
        expected, expected_metrics = eager(expected, window)
        assert_close((state, metrics), (expected, expected_metrics), **CLOSE)
    # One that opens a window, one that adds to it, one that adds and closes, one for a window of one.
    assert graphs() == 4
    assert (state.applied.item(), state.skipped.item()) == (4, 1)


@pytest.mark.parametrize(
    ("length", "expected"),
    [(1, 1), (2, 2), *(pytest.param(length, 3, marks=pytest.mark.slow) for length in (3, 5))],
)
@pytest.mark.parametrize("donate", [False, True])
def test_a_window_of_one_is_one_graph_of_two_two_and_of_more_three(length, expected, donate):
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, donate=donate, compile=AOT)
    state = fa.init_state(torch.ones(2), optimizer)
    for _ in range(3):
        with torch._dynamo.config.patch(error_on_recompile=True):
            state, _ = step(state, [torch.ones(2)] * length)
    assert graphs() == expected


@pytest.mark.slow
def test_a_donating_compiled_step_writes_into_the_storage_of_the_last_state():
    problem = PROBLEMS["conv_net"]()
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(problem.loss_fn, optimizer, donate=True, compile=AOT)
    state = start(problem, optimizer)
    for window in windows(problem, (2, 3, 1), bad=1):
        before = [storages(tree) for tree in (state.params, state.opt_state, state.buffers)]
        given = state
        state, _ = step(state, window)
        assert [storages(tree) for tree in (state.params, state.opt_state, state.buffers)] == before
        with pytest.raises(RuntimeError, match="donated"):
            _ = given.params
    opened = step.accumulate(state, problem.batch(0))
    assert opened.window is not None
    before = storages(opened.window.grads.tree)
    again = step.accumulate(opened, problem.batch(1))
    assert again.window is not None and storages(again.window.grads.tree) == before


@pytest.mark.slow
def test_a_skipped_window_is_a_transaction_in_a_donating_compiled_step():
    problem = PROBLEMS["conv_net"]()
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(problem.loss_fn, optimizer, donate=True, compile=AOT)
    state, _ = step(start(problem, optimizer), [problem.batch(0), problem.batch(1)])
    before = map_tensors(torch.clone, (state.params, state.opt_state, state.buffers))
    state, metrics = step(state, [problem.batch(0), overflowing(problem.batch(1))])
    assert not metrics.finite and state.skipped.item() == 1
    assert_identical((state.params, state.opt_state, state.buffers), before)


@pytest.mark.slow
@pytest.mark.parametrize("by_hand", [False, True])
@torch._dynamo.config.patch(recompile_limit=2)  # graphs for each code object
def test_many_steps_in_one_process_do_not_use_up_the_compilers_limit(by_hand):
    for index in range(4):
        optimizer = fa.sgd(0.1 + index)
        step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, compile=False if by_hand else AOT)
        if by_hand:
            compiled = functools.partial(torch.compile, fullgraph=True, **AOT)
            step = Halves(compiled(step.accumulate), compiled(step.update))
        state, _ = step(fa.init_state(torch.ones(2), optimizer, fa.NoScale()), [torch.ones(2)])
        torch.testing.assert_close(state.params, torch.ones(2) * (1 - 0.1 - index))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("params", "leaf"),
    [
        ([{"w": None}, {"w": torch.ones(1)}], lambda p: p[1]["w"]),
        ({"head": {"w": torch.ones(1)}, "body": {"w": None, "b": None}}, lambda p: p["head"]["w"]),
    ],
)
def test_missing_leaves_are_no_reason_for_a_break_in_a_donating_step(params, leaf):
    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (leaf(p) * x).sum()

    optimizer = fa.adamw(0.5)
    step = fa.make_step(loss_fn, optimizer, donate=True, compile=AOT)
    expected = fa.make_step(loss_fn, optimizer)
    window = [torch.tensor(2.0), torch.tensor(3.0)]
    found, _ = step(fa.init_state(params, optimizer), window)
    assert_close(found, expected(fa.init_state(params, optimizer), window)[0], **CLOSE)


def test_a_graph_that_can_not_be_made_leaves_the_donated_state_as_it_was():
    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        if x.dim() == 0:
            raise ValueError("a loss that raises")
        return (p * x).sum()

    optimizer = fa.sgd(0.1)
    step = fa.make_step(loss_fn, optimizer, donate=True, compile=AOT)
    state = fa.init_state(torch.ones(2), optimizer)
    opened = step.accumulate(state, torch.ones(2))
    with pytest.raises(Exception, match="a loss that raises"):
        step.accumulate(opened, torch.tensor(1.0))
    state, _ = step.update(opened)
    assert state.applied.item() == 1


def test_a_graph_that_raises_while_it_runs_loses_the_window_that_it_may_have_written():
    def broken(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            raise MemoryError

        return run

    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, donate=True)
    state = step.accumulate(fa.init_state(torch.ones(2), optimizer), torch.ones(2))
    failing = fa.make_step(lambda p, x: (p * x).sum(), optimizer, donate=True, compile={"backend": broken})
    with pytest.raises(MemoryError):
        failing.update(state)
    with pytest.raises(RuntimeError, match="open window, which is lost"):
        _ = state.window
    assert state.params.tolist() == [1.0, 1.0]  # no write to them had been announced


@torch.library.custom_op("functional_amp_tests::failing_update", mutates_args=())
def failing_update(grad: Tensor) -> Tensor:
    raise MemoryError


failing_update.register_fake(torch.empty_like)  # pyright: ignore[reportFunctionMemberAccess]


def test_a_graph_that_raises_after_it_has_announced_its_writes_loses_the_state():
    def update(grads: Tensor, opt_state: Any, params: Tensor) -> Any:
        return failing_update(grads), opt_state

    step = fa.make_step(lambda p, x: (p * x).sum(), fa.Optimizer(lambda params: (), update), donate=True, compile=AOT)
    state = fa.init_state(torch.ones(2), step.optimizer)
    with pytest.raises(MemoryError):
        step(state, [torch.ones(2)])
    with pytest.raises(RuntimeError, match=r"is lost.*begun to write"):
        _ = state.params


def test_nothing_of_the_callers_is_written_to_by_a_donating_compiled_step():
    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        return (p * x).sum()

    given = torch.tensor([1.0, 2.0])
    params = torch.ones(2)
    optimizer = fa.sgd(0.1)
    step = fa.make_step(loss_fn, optimizer, donate=True, compile=AOT)
    state = fa.init_state(params, optimizer, fa.NoScale())
    for _ in range(2):
        state, _ = step(state, [given, given])
    assert given.tolist() == [1.0, 2.0] and params.tolist() == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("donate", [False, True])
def test_a_learning_rate_reaches_the_compiled_kernels_as_the_double_that_it_is(donate, dtype):
    # 0.1 in float32 is 0.1 + 1.5e-9: other bits of a float64 parameter, and of some float32 ones under Adam.
    x = torch.linspace(-3, 3, 64, dtype=dtype)
    params = {"sgd": torch.linspace(1, 2, 64, dtype=dtype), "adamw": torch.linspace(1, 2, 64, dtype=dtype)}
    rules = {"sgd": fa.sgd(0.1, momentum=0.9), "adamw": fa.adamw(torch.tensor(0.1, dtype=torch.float64))}
    optimizer = fa.partition(rules, lambda path, leaf: path)
    theirs = map_tensors(lambda leaf: leaf.clone().requires_grad_(), params)
    torch_rules = (
        torch.optim.SGD([theirs["sgd"]], 0.1, momentum=0.9, fused=True),
        torch.optim.AdamW([theirs["adamw"]], 0.1, fused=True),
    )
    step = fa.make_step(
        lambda p, x: (p["sgd"] * x).sum() + (p["adamw"] * x).sum(), optimizer, donate=donate, compile=AOT
    )
    state = fa.init_state(params, optimizer, fa.NoScale())
    for _ in range(3):
        state, _ = step(state, [x])
        for each, rule in zip(theirs.values(), torch_rules, strict=True):
            each.grad = x.clone()
            rule.step()
    assert_identical(state.params, map_tensors(Tensor.detach, theirs))


@pytest.mark.slow
def test_a_new_learning_rate_or_scale_does_not_recompile():
    problem = mlp()
    step = fa.make_step(problem.loss_fn, fa.adamw(fa.linear(0.1, 0.0, 9)), compile=AOT, donate=True)
    state = start(problem, fa.adamw())
    state, _ = step(state, [problem.batch(0), problem.batch(1)])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for scale in (3.0, 2.0**-20, 1e30):
            scaler = with_fields(state.scaler, scale=torch.tensor(scale))
            state = with_fields(state, scaler=scaler)
            state, _ = step(state, [problem.batch(0), problem.batch(1)])


@pytest.mark.parametrize("donate", [False, True])
def test_scan_equals_the_loop_over_the_window_in_eager_mode(donate):
    problem = PROBLEMS["conv_net"]()
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, donate=donate)
    for window in windows(problem, (3, 1, 2), bad=2):
        expected = step(start(problem, optimizer), window)
        assert_identical(step.scan(start(problem, optimizer), stacked(window)), expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "donate"), [("mlp", True), ("transformer", False)])
def test_scan_compiles_to_one_graph_with_one_micro_step_in_it(name, donate):
    problem = PROBLEMS[name]()
    optimizer = fa.adamw(1e-2)
    eager = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0)
    counted = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        inner = [module for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
        counted.append(sum(len(module.graph.nodes) for module in inner))
        return graph

    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, donate=donate, compile={"backend": backend})
    for window in windows(problem, (3, 9), bad=0):
        torch._dynamo.reset()
        found = step.scan(start(problem, optimizer), stacked(window))
        assert_close(found, eager(start(problem, optimizer), window), **CLOSE)
    assert len(counted) == 2 and counted[0] == counted[1]


def test_scan_refuses_what_is_not_stacked():
    problem = mlp()
    optimizer = fa.sgd(0.1)
    step = fa.make_step(problem.loss_fn, optimizer)
    state = start(problem, optimizer)
    batch = stacked([problem.batch(0), problem.batch(1)])
    for bad, finding in (
        ({**batch, "x": batch["x"][:1]}, r"'x': 1.*Stack the micro-batches"),
        ({**batch, "gain": torch.tensor(1.0)}, r"'gain': None.*Stack the micro-batches"),
        (optree.tree_map(lambda leaf: leaf[:0], batch), "empty window"),
        ({}, "first size"),
    ):
        with pytest.raises(ValueError, match=finding):
            step.scan(state, bad)


@pytest.mark.parametrize("bad", ["inductor", 1, None, ["mode"]])
def test_compile_is_a_bool_or_the_options(bad):
    with pytest.raises(TypeError, match=r"compile: found .*options of\s+torch.compile as a dict"):
        fa.make_step(lambda p, x: (p * x).sum(), fa.sgd(0.1), compile=bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "lengths"),
    [("conv_net", True, (2, 2, 1)), ("mlp", {"mode": "reduce-overhead"}, (1, 1, 1))],
)
def test_a_donating_step_compiled_by_inductor_trains_as_the_eager_one(name, options, lengths):
    problem = PROBLEMS[name]()
    optimizer = fa.sgd(0.1, momentum=0.9)
    eager = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, donate=True, compile=options)
    state, expected = start(problem, optimizer), start(problem, optimizer)
    for index, window in enumerate(windows(problem, lengths, bad=2)):
        with torch._dynamo.config.patch(error_on_recompile=index > 0):
            state, metrics = step(state, window)
        expected, expected_metrics = eager(expected, window)
        assert_close((state, metrics), (expected, expected_metrics), rtol=1e-4, atol=1e-5)
    assert flatten(state).spec == flatten(expected).spec


_factor = 1.0


def _by_the_factor(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum() * _factor


def test_no_guard_on_the_librarys_own_code_is_looked_at_and_those_on_the_loss_are(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[str, bool]] = []
    left = compiling.guards_of_others

    def noted(guards: Sequence[Any]) -> list[bool]:
        kept = left(guards)
        seen.extend((guard.name, keep) for guard, keep in zip(guards, kept, strict=True))
        return kept

    monkeypatch.setattr(compiling, "guards_of_others", noted)
    optimizer = fa.sgd(1.0)
    step = fa.make_step(_by_the_factor, optimizer, compile={"backend": "aot_eager"})
    state = fa.init_state({"w": torch.zeros(2)}, optimizer, fa.NoScale())
    first, _ = step(state, [torch.ones(2)])
    left_out = {name for name, keep in seen if not keep}
    assert len(left_out) > 100 and all("functional_amp" in name for name in left_out)
    assert any("_factor" in name for name, keep in seen if keep)
    monkeypatch.setattr(sys.modules[__name__], "_factor", 3.0)
    second, _ = step(state, [torch.ones(2)])
    assert first.params["w"].tolist() == [-1.0, -1.0] and second.params["w"].tolist() == [-3.0, -3.0]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("length", [1, 2])
def test_a_gradient_that_is_broadcast_reaches_the_update_of_its_graph_in_full(length, donate):
    def loss_fn(params: Any, x: Tensor) -> Tensor:  # d/dw is x, repeated along the rows; d/dv that of a transposed one
        return (params["w"].sum(1) * x).sum() + (params["v"].t().sum(0) * x).sum() + params["b"] * x[0]

    params = {"w": torch.zeros(3, 4), "v": torch.zeros(3, 4).t().contiguous().t(), "b": torch.tensor(0.0)}
    step = fa.make_step(loss_fn, fa.sgd(1.0), donate=donate, compile=AOT)
    x = torch.tensor([1.0, 2.0, 4.0])
    state, _ = step(fa.init_state(params, fa.sgd(1.0), fa.StaticScale(8.0)), [x] * length)
    expected = -x[:, None].expand(3, 4)
    assert torch.equal(state.params["w"], expected) and torch.equal(state.params["v"], expected)
    assert state.params["b"].item() == -1.0
