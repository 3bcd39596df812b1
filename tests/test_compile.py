"""One graph for the step and its halves, no recompilation, and the values of eager mode."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import functional_amp as fa
from functional_amp.tree import flatten, paths
from tests.conftest import Halves
from tests.models import PROBLEMS, Problem, conv_net, mlp, overflowing, transformer

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

# aot_eager runs torch's own kernels on the traced graph: what may differ is the order of a few scalar operations.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}
BACKENDS = ["func", "autograd"]

compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")
"""Without graph breaks: fullgraph raises at the first."""


def traceable(backend: Any) -> contextlib.AbstractContextManager[Any]:
    """What `torch.autograd.grad` needs to be traced into a graph."""
    return torch._dynamo.config.patch(trace_autograd_ops=True) if backend == "autograd" else contextlib.nullcontext()


def no_recompilation_after(index: int) -> contextlib.AbstractContextManager[Any]:
    """Recompiling is an error from the second window on."""
    return torch._dynamo.config.patch(error_on_recompile=index > 0)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compiled_whole(step: fa.Step) -> Callable[..., Any]:
    return compiled(step)


def compiled_halves(step: fa.Step) -> Callable[..., Any]:
    accumulate, update = compiled(step.accumulate), compiled(step.update)
    return Halves(accumulate, update)


# The halves: an accumulate that opens a window, one that adds to it, and an update.
FORMS = {"whole": (compiled_whole, 1), "halves": (compiled_halves, 3)}


def start(problem: Problem, optimizer: fa.Optimizer, scaler: fa.Scaler | None = None) -> fa.TrainState:
    scaler = fa.DynamicScale(scale=2.0**10, growth_interval=2) if scaler is None else scaler
    return fa.init_state(problem.params, optimizer, scaler, problem.buffers)


def assert_close(found: Any, expected: Any, **tolerance: Any) -> None:
    """Same structure, dtypes and (to a tolerance) values, leaf by leaf."""
    assert flatten(found).spec == flatten(expected).spec
    for path, ours, theirs in zip(paths(expected), flatten(found).leaves, flatten(expected).leaves, strict=True):
        torch.testing.assert_close(
            ours, theirs, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}", **tolerance
        )


def assert_identical(found: Any, expected: Any) -> None:
    assert_close(found, expected, rtol=0.0, atol=0.0)


def check_twenty_windows(problem: Problem, form: str, backend: Any) -> None:
    """20 windows, one overflowing, against the same in eager mode, each from the compiled run's state."""
    optimizer = fa.adamw(fa.warmup_cosine(1e-2, 3, 30))
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    compile_form, expected_graphs = FORMS[form]
    run, state, scales = compile_form(step), start(problem, optimizer), set()
    for index in range(20):
        window = [problem.batch(2 * index), problem.batch(2 * index + 1)]
        if index == 7:
            window[1] = overflowing(window[1])
        with traceable(backend), no_recompilation_after(index):
            after, metrics = run(state, window)
        expected = step(state, window)
        assert_close((after, metrics), expected, **CLOSE)
        if index == 7:
            assert not metrics.finite
            assert_identical(
                (after.params, after.opt_state, after.buffers), (state.params, state.opt_state, state.buffers)
            )
        scales.add(metrics.scale.item())
        state = after
    assert graphs() == expected_graphs
    assert len(scales) > 5
    assert (state.applied.item(), state.skipped.item(), state.opt_state.step.item()) == (19, 1, 19)


@pytest.mark.parametrize(
    ("name", "form", "backend"),
    [
        ("mlp", "whole", "func"),
        pytest.param("mlp", "halves", "autograd", marks=pytest.mark.slow),
        pytest.param("conv_net", "halves", "func", marks=pytest.mark.slow),
        pytest.param("transformer", "whole", "func", marks=pytest.mark.slow),
        pytest.param("conv_net", "whole", "autograd", marks=pytest.mark.slow),
        pytest.param("transformer", "halves", "autograd", marks=pytest.mark.slow),
    ],
)
def test_one_graph_and_no_recompilation_over_twenty_windows(name: str, form: str, backend: Any):
    check_twenty_windows(PROBLEMS[name](), form, backend)


@pytest.mark.parametrize(
    ("form", "backend"),
    [pytest.param(*way, marks=pytest.mark.slow) for way in (("halves", "autograd"), ("whole", "func"))],
)
def test_a_compiled_step_with_dropout_replays_from_a_seed(form: str, backend: Any):
    problem, optimizer = transformer(dropout=0.3), fa.adam(1e-2)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    compile_form, expected_graphs = FORMS[form]
    run, state = compile_form(step), start(problem, optimizer)
    window = [problem.batch(0), problem.batch(1)]

    def seeded_run(seed: int) -> Any:
        with traceable(backend), fa.seeded(seed):
            return run(state, window)

    first, unrelated, other, again = seeded_run(1), torch.rand(3), seeded_run(2), seeded_run(1)
    assert_identical(again, first)
    assert other[1].loss != first[1].loss
    assert unrelated.numel() == 3
    assert graphs() == expected_graphs


PRECISIONS: dict[str, Callable[[Any], Any]] = {
    "autocast": lambda loss_fn: fa.autocast(loss_fn, torch.bfloat16),
    "policy": lambda loss_fn: fa.with_policy(loss_fn, "params=float32,compute=bfloat16,output=float32"),
}


@pytest.mark.parametrize(
    ("precision", "name", "form", "backend"),
    [
        pytest.param("policy", "mlp", "halves", "func", marks=pytest.mark.slow),
        pytest.param("autocast", "mlp", "whole", "autograd", marks=pytest.mark.slow),
        pytest.param("autocast", "conv_net", "halves", "autograd", marks=pytest.mark.slow),
        pytest.param("autocast", "transformer", "halves", "func", marks=pytest.mark.slow),
        pytest.param("policy", "transformer", "whole", "autograd", marks=pytest.mark.slow),
    ],
)
def test_precision_transforms_compile_to_the_values_of_eager_mode(precision: str, name: str, form: str, backend: Any):
    problem, optimizer = PROBLEMS[name](), fa.sgd(0.5)
    loss_fn = PRECISIONS[precision](problem.loss_fn)
    step = fa.make_step(loss_fn, optimizer, backend=backend)
    compile_form, expected_graphs = FORMS[form]
    run, state = compile_form(step), start(problem, optimizer)
    for index in range(3):
        window = [problem.batch(2 * index), problem.batch(2 * index + 1)]
        with traceable(backend), no_recompilation_after(index):
            after, metrics = run(state, window)
        assert_close((after, metrics), step(state, window), **CLOSE)
        assert metrics.loss.dtype == torch.float32
        state = after
    assert graphs() == expected_graphs


@pytest.mark.slow
def test_a_learning_rate_tensor_filled_in_place_moves_the_compiled_step():
    problem, rate = mlp(), torch.tensor(0.0)
    optimizer = fa.sgd(rate, momentum=0.9)
    step = fa.make_step(problem.loss_fn, optimizer)
    run, state = compiled_halves(step), start(problem, optimizer)
    for index in range(20):
        rate.fill_(0.01 * (index % 4))
        window = [problem.batch(index), problem.batch(index + 1)]
        with no_recompilation_after(index):
            after, _ = run(state, window)
        assert_close(after.params, step(state, window)[0].params, **CLOSE)
        moved = any(not torch.equal(after.params[name], state.params[name]) for name in state.params)
        assert moved == (index % 4 != 0)
        state = after
    assert graphs() == 3


@pytest.mark.slow
def test_windows_of_any_length_share_the_compiled_halves():
    problem, optimizer = mlp(), fa.adam(1e-2)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=0.5)
    run, state = compiled_halves(step), start(problem, optimizer)
    for index, length in enumerate([2, 1, 5, 3, 1, 4]):
        window = [problem.batch(10 * index + k) for k in range(length)]
        with no_recompilation_after(index):
            after, metrics = run(state, window)
        assert_close((after, metrics), step(state, window), **CLOSE)
        assert metrics.weight == length
        state = after
    assert graphs() == 3


def test_counters_scale_and_flags_are_inputs_of_the_graph_not_constants():
    problem, optimizer = mlp(), fa.sgd(0.1)
    step = fa.make_step(problem.loss_fn, optimizer)
    run, state = compiled(step), start(problem, optimizer, fa.DynamicScale.megatron(2.0**8, growth_interval=3))
    expected = [False, False, True, True, True, True, False, False, False, True]
    for index, clean in enumerate(expected):
        batch = problem.batch(index) if clean else overflowing(problem.batch(index))
        with no_recompilation_after(index):
            after, metrics = run(state, [batch])
        assert_identical(after.scaler, fa.update_scale(state.scaler, torch.tensor(clean)))
        assert bool(metrics.finite) is clean
        state = after
    assert (state.applied.item(), state.skipped.item(), state.skipped_in_a_row.item()) == (5, 5, 0)
    assert graphs() == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_the_compiled_step_leaves_its_inputs_alone(backend: Any):
    problem, optimizer = conv_net(), fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    run, state = compiled(step), start(problem, optimizer)
    for batch in (problem.batch(0), overflowing(problem.batch(0))):
        leaves = [leaf for leaf in flatten((state, batch)).leaves if leaf is not None]
        copies, versions = [leaf.clone() for leaf in leaves], [leaf._version for leaf in leaves]
        with traceable(backend):
            outputs = run(state, [batch])
        assert [leaf._version for leaf in leaves] == versions
        assert_identical(leaves, copies)
        storages = {leaf.untyped_storage().data_ptr(): leaf for leaf in leaves}
        for leaf in flatten(outputs).leaves:
            if leaf is not None:
                shared = storages.get(leaf.untyped_storage().data_ptr())
                assert shared is None or torch.equal(shared, leaf)  # an input handed back unchanged
                assert not leaf.requires_grad and leaf.grad_fn is None


def test_stages_composed_by_hand_compile_to_one_graph():
    problem, optimizer = mlp(), fa.adam(1e-2)

    def by_hand(params: Any, opt_state: Any, scaler: Any, batch: Any, dropped: Any) -> Any:
        total = fa.accumulate(None, fa.scale_backward(problem.loss_fn, scaler, params, batch).grads)
        more = fa.scale_backward(problem.loss_fn, scaler, params, dropped, weight=3.0).grads
        grads, norm = fa.clip(fa.accumulate(total, more, where=fa.all_finite(more)), 0.1)
        grads, finite = fa.unscale(grads)
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, finite)
        return params, opt_state, fa.update_scale(scaler, finite), norm, fa.global_norm(grads)

    inputs = (problem.params, optimizer.init(problem.params), fa.DynamicScale(8.0))
    batches = (problem.batch(0), overflowing(problem.batch(1)))
    outputs = compiled(by_hand)(*inputs, *batches)
    assert_close(outputs, by_hand(*inputs, *batches), **CLOSE)
    assert graphs() == 1


@pytest.mark.slow
def test_trees_without_tensors_compile():
    # A dict of None (frozen by split), an empty dict and a dict of numbers hold no tensor at all.
    params = {"body": {"w": torch.ones(3), "b": torch.zeros(3)}, "head": {"w": torch.ones(3)}, "unused": {}}
    trainable, frozen = fa.split(params, lambda path, leaf: path.startswith("head"))
    optimizer = fa.sgd(0.1)

    def loss_fn(trainable: Any, x: Any, buffers: Any) -> fa.Loss:
        merged = fa.merge(trainable, frozen)
        hidden = merged["body"]["w"] * x + merged["body"]["b"]
        return fa.Loss((hidden * merged["head"]["w"]).mean(), aux={"items": 3}, buffers=buffers)

    step = fa.make_step(loss_fn, optimizer, max_norm=1.0)
    run, state, x = compiled(step), fa.init_state(trainable, optimizer, buffers={}), torch.arange(3.0)
    after, metrics = run(state, [x, x])
    assert_close((after, metrics), step(state, [x, x]), **CLOSE)
    assert graphs() == 1


def test_split_and_merge_compile():
    tree = {"body": {"w": torch.ones(3)}, "head": {"w": torch.zeros(3)}}
    parts = compiled(lambda tree: fa.split(tree, lambda path, leaf: path == "head.w"))(tree)
    assert parts[0]["body"] == {"w": None} and parts[1]["head"] == {"w": None}
    assert_identical(compiled(fa.merge)(*parts), tree)


@pytest.mark.slow
def test_partitioned_optimizers_and_frozen_leaves_compile():
    problem = mlp()
    optimizer = fa.partition(
        {"decay": fa.adamw(1e-2), "plain": fa.sgd(0.1, momentum=0.9), "frozen": None},
        lambda path, leaf: "frozen" if path.startswith("hidden") else "decay" if leaf.ndim > 1 else "plain",
    )
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0)
    run, state = compiled_halves(step), start(problem, optimizer)
    for index in range(4):
        window = [problem.batch(2 * index), problem.batch(2 * index + 1)]
        with no_recompilation_after(index):
            after, metrics = run(state, window)
        assert_close((after, metrics), step(state, window), **CLOSE)
        state = after
    assert_identical(state.params["hidden.weight"], problem.params["hidden.weight"])
    assert graphs() == 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor_agrees_with_eager_mode_over_a_whole_run(backend: Any):
    # Inductor fuses and so contracts multiply-adds: a few float32 ulp a window.
    problem, optimizer = mlp(), fa.adamw(fa.warmup_cosine(1e-2, 2, 10))
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    run, state = torch.compile(step, fullgraph=True), start(problem, optimizer)
    for index in range(5):
        window = [problem.batch(2 * index), problem.batch(2 * index + 1)]
        if index == 3:
            window[0] = overflowing(window[0])
        with traceable(backend), no_recompilation_after(index):
            after, metrics = run(state, window)
        expected_state, expected_metrics = step(state, window)
        assert_close(after, expected_state, rtol=1e-4, atol=1e-5)
        assert bool(metrics.finite) is bool(expected_metrics.finite) is (index != 3)
        if index == 3:
            assert_identical((after.params, after.opt_state), (state.params, state.opt_state))
        else:
            assert_close(metrics, expected_metrics, rtol=1e-4, atol=1e-5)
        state = after
    assert graphs() == 1


@pytest.mark.slow
def test_inductor_replays_dropout_and_skips_bit_for_bit():
    problem, optimizer = mlp(dropout=0.5), fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(fa.autocast(problem.loss_fn, torch.bfloat16), optimizer, max_norm=1.0)
    halves = Halves(torch.compile(step.accumulate, fullgraph=True), torch.compile(step.update, fullgraph=True))
    state, window = start(problem, optimizer), [problem.batch(0), problem.batch(1)]
    with fa.seeded(3):
        first = halves(state, window)
    with fa.seeded(3):
        again = halves(state, window)
    with fa.seeded(4):
        other = halves(state, window)
    assert_identical(again, first)
    assert other[1].loss != first[1].loss
    skipped, metrics = halves(first[0], [window[0], overflowing(window[1])])
    assert not metrics.finite
    assert_identical((skipped.params, skipped.opt_state), (first[0].params, first[0].opt_state))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("backend", BACKENDS)
def test_inductor_on_cuda_agrees_with_eager_mode(backend: Any):
    problem, optimizer = mlp(device="cuda"), fa.adamw(1e-2)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    run, state = torch.compile(step, fullgraph=True), start(problem, optimizer)
    for index in range(3):
        window = [problem.batch(2 * index), problem.batch(2 * index + 1)]
        with traceable(backend), no_recompilation_after(index):
            after, metrics = run(state, window)
        assert_close((after, metrics), step(state, window), rtol=1e-4, atol=1e-5)
        state = after
    skipped, metrics = run(state, [overflowing(problem.batch(0)), problem.batch(1)])
    assert not metrics.finite
    assert_identical((skipped.params, skipped.opt_state), (state.params, state.opt_state))
