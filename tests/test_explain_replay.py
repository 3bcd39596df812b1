"""The replay has the step's values, leaves no trace, and refuses what it can't follow."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.testing._internal.two_tensor import TwoTensor

import functional_amp as fa
from functional_amp.debug import explain
from functional_amp.debug.locate import Locator
from functional_amp.debug.provenance import Provenance
from functional_amp.tree import flatten
from tests.injections import as_function
from tests.models import PROBLEMS, Problem, mlp, transformer
from tests.plants import PLANTS

BACKENDS = ("autograd", "func")


def overflowing_dropout(scale: float) -> tuple[Any, fa.TrainState, list[Tensor]]:
    """A loss whose float16 gradient overflows for some dropout masks: those that keep few elements."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        kept = F.dropout(torch.ones(6), 0.5) * x
        hidden = (params["w"] * kept).half()
        return hidden.float().sum() / kept.sum().clamp(min=0.5)

    return loss_fn, fa.init_state({"w": torch.ones(6)}, fa.sgd(0.1), fa.StaticScale(scale)), [torch.ones(6)] * 2


def bits(tree: Any) -> list[Tensor]:
    return [leaf.clone() for leaf in flatten(tree).leaves if leaf is not None]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Bit for bit, NaN included."""
    return all(
        torch.equal(torch.nan_to_num(a, 7.0), torch.nan_to_num(b, 7.0)) and torch.equal(a.isnan(), b.isnan())
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [*PROBLEMS.values(), lambda: mlp(0.3), lambda: transformer(0.1)])
def test_instrumented_gradients_are_the_plain_ones_bit_for_bit(make: Any, backend: Any) -> None:
    problem: Problem = make()
    if backend == "func" and getattr(problem.module, "p", 0.0):
        pytest.skip("torch.func can't differentiate a CPU's attention with dropout under autocast")
    loss_fn = problem.loss_fn if problem.buffers else fa.autocast(problem.loss_fn, torch.bfloat16)
    batch = (problem.batch(1),) if problem.buffers is None else (problem.batch(1), problem.buffers)

    def grads_and_loss() -> list[Tensor]:
        with fa.seeded(3):
            out = fa.scale_backward(loss_fn, fa.StaticScale(2.0**10), problem.params, *batch, backend=backend)
        return bits((out.grads, out.loss, out.aux))

    plain = grads_and_loss()
    locator = Locator(grads_and_loss.__code__)
    with locator, Provenance(locator, []):
        instrumented = grads_and_loss()
    assert same_bits(instrumented, plain)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_instrumented_gradients_of_a_fault_are_the_plain_ones(plant: Any) -> None:
    torch.manual_seed(0)
    case = plant.build()
    batch = (case.window[0],) if case.buffers is None else (case.window[0], case.buffers)
    params = case.params if case.compute_dtype is None else fa.cast_floating(case.params, case.compute_dtype)

    def grads_and_loss() -> list[Tensor]:
        scaler = fa.StaticScale(case.scale)
        return bits(fa.scale_backward(case.loss_fn, scaler, params, *batch, backend=plant.backends[-1])[:2])

    plain = grads_and_loss()
    locator = Locator(grads_and_loss.__code__)
    with locator, Provenance(locator, []):
        instrumented = grads_and_loss()
    assert same_bits(instrumented, plain)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_seeds_whose_step_is_not_finite_are_the_ones_that_are_found(backend: Any) -> None:
    loss_fn, state, window = overflowing_dropout(2.0**18)
    step = fa.make_step(loss_fn, fa.sgd(0.1), backend=backend)
    finite = [bool(step(state, window, seed=seed)[1].finite) for seed in range(24)]
    assert 4 < sum(finite) < 20
    for seed, expected in enumerate(finite):
        why = explain(loss_fn, state, window, seed=seed, backend=backend)
        assert why.found is not expected
        if why.found:
            assert why.largest_good_scale is not None
            for scale, good in ((why.largest_good_scale, True), (2 * why.largest_good_scale, False)):
                tried = dataclasses.replace(state, scaler=fa.StaticScale(scale))
                assert bool(step(tried, window, seed=seed)[1].finite) is good


@pytest.mark.parametrize("donate", [False, True])
def test_the_state_that_came_back_from_a_skip_is_enough(donate: bool) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return F.dropout(x.half() @ params["w"].half(), 0.5).float().sum()

    params, window = {"w": torch.randn(4, 2)}, [torch.randn(8, 4) * 50 for _ in range(3)]
    step = fa.make_step(loss_fn, fa.adamw(0.1), donate=donate, backend="autograd")
    state = fa.init_state(params, fa.adamw(0.1), fa.DynamicScale(2.0**16))
    before = explain(loss_fn, state, window, seed=5)
    state, metrics = step(state, window, seed=5)
    assert not metrics.finite and state.scaler.scale == 2.0**15
    after = explain(loss_fn, state, window, scale=metrics.scale, seed=5)
    assert after == before and after.found and after.scale == 2.0**16


def test_an_open_window_is_left_alone() -> None:
    loss_fn, state, window = overflowing_dropout(2.0**16)
    step = fa.make_step(loss_fn, fa.sgd(0.1), backend="autograd")
    opened = step.accumulate(state, window[0])
    kept = bits(opened)
    assert explain(loss_fn, opened, window, scale=2.0**20, seed=0) == explain(
        loss_fn, state, window, scale=2.0**20, seed=0
    )
    assert same_bits(bits(opened), kept)


def everything(state: fa.TrainState, window: Any) -> tuple[list[Tensor], list[Any]]:
    """What explain must leave as it was: values and versions, generators, hooks and modes."""
    hooks = [len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks)]
    hooks += [len(torch_module._global_forward_hooks_always_called), torch_module._has_any_global_hook()]
    versions = [leaf._version for leaf in flatten((state, window)).leaves if isinstance(leaf, Tensor)]
    modes = [torch._C._len_torch_dispatch_stack(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")]
    return [*bits((state, window)), torch.get_rng_state()], [*hooks, *versions, *modes, random.getstate()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("raises", [False, True])
def test_nothing_is_written(raises: bool, seed: int | None, backend: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    apply, params, buffers = as_function(module)
    calls = 0

    class Failure(Exception):
        pass

    def fails(module: Any, args: Any) -> None:
        nonlocal calls
        calls += 1
        if raises and calls == 2:
            raise Failure

    module[3].register_forward_pre_hook(fails)

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply(params, buffers, x)
        return fa.Loss(out.float().square().sum() * 1e6, buffers=buffers)

    loss_fn = fa.autocast(loss_fn, torch.float16)
    state = fa.init_state(params, fa.sgd(0.1), fa.StaticScale(2.0**14), buffers)
    window = [torch.randn(5, 4) for _ in range(3)]
    values, others = everything(state, window)
    if raises:
        with pytest.raises(Failure):
            explain(loss_fn, state, window, seed=seed, backend=backend)
    else:
        assert explain(loss_fn, state, window, seed=seed, backend=backend).found
    values_after, others_after = everything(state, window)
    assert same_bits(values_after, values) and others_after == others


def test_two_explanations_are_equal() -> None:
    loss_fn, state, window = overflowing_dropout(2.0**18)
    assert explain(loss_fn, state, window, seed=1) == explain(loss_fn, state, window, seed=1)
    torch.manual_seed(4)
    assert explain(loss_fn, state, window) == explain(loss_fn, state, window)  # the generator stands where it stood


def test_a_generator_of_the_loss_function_stands_where_it_stood() -> None:
    generator = torch.Generator()

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        noise = (x / 0).nan_to_num(0, 0, 0) + torch.empty(3).normal_(generator=generator)
        return (params * noise).sum() / 0

    state, before = fa.init_state(torch.ones(3), fa.sgd(0.1), fa.StaticScale(1.0)), generator.get_state()
    explain(loss_fn, state, [torch.ones(3)])
    assert torch.equal(generator.get_state(), before)


def test_a_compiled_module_inside_the_loss_runs_eagerly(fresh_dynamo: Any) -> None:
    def overflow(x: Tensor) -> Tensor:
        return (x.half() * 1e4 * 1e-4).float()

    compiled = torch.compile(overflow, backend="inductor")  # never compiled: the replay is eager
    state = fa.init_state(torch.ones(3), fa.sgd(0.1), fa.StaticScale(1.0))
    why = explain(lambda p, x: compiled(p * x).sum(), state, [torch.full((3,), 100.0)])
    assert (why.stage, why.operator) == ("forward", "mul")


def test_operators_inside_a_tensor_subclass_are_followed() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        pair: Any = TwoTensor(params * x, params * x)
        return pair.exp().a.sum() + 0 * params.sum()  # the subclass alone would reach no parameter

    state = fa.init_state(torch.ones(3), fa.sgd(0.1), fa.StaticScale(1.0))
    why = explain(loss_fn, state, [torch.full((3,), 100.0)])
    assert (why.stage, why.operator) == ("forward", "exp")


def test_a_float8_cast_that_overflows() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        narrow = (params * x).to(torch.float8_e5m2)
        return narrow.clone().float().sum()

    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0))
    why = explain(loss_fn, state, [torch.tensor([1e6, 1.0])])
    assert (why.stage, why.operator) == ("forward", "_to_copy")
    assert why.output is not None and (why.output.dtype, why.output.inf) == (torch.float8_e5m2, 1)


def test_a_window_of_several_micro_batches_has_the_scale_of_its_worst() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params.half() * x.half()).float().sum()

    sizes = [4.0, 1024.0, 64.0]
    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(2.0**20))
    why = explain(loss_fn, state, [torch.full((2,), size) for size in sizes])
    assert why.micro_batch == 0  # the first that fails at this scale
    assert why.largest_good_scale == 2.0**5  # 1024 * 2**5 fits float16, 1024 * 2**6 is 65536


@pytest.mark.parametrize("scale", [3e4, 1.5, 2.0**127])
def test_a_scale_that_is_no_power_of_two(scale: float) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params.half() * x.half()).float().sum()

    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(scale))
    good = explain(loss_fn, state, [torch.full((2,), 6e4)]).largest_good_scale
    assert good == 1.0


def loss(params: Any, x: Tensor) -> Tensor:
    return (params * x).sum()


def good_arguments() -> dict[str, Any]:
    state = fa.init_state(torch.ones(2), fa.sgd(0.1))
    return {"loss_fn": loss, "state": state, "window": [torch.ones(2)]}


REFUSED = {
    "bare parameters": ({"state": torch.ones(2)}, TypeError, "init_state"),
    "a bare micro-batch": ({"window": torch.ones(2)}, TypeError, r"\[micro_batch\]"),
    "an empty window": ({"window": []}, ValueError, "no micro-batch"),
    "a scale of zero": ({"scale": 0.0}, ValueError, "scale"),
    "a scale with dimensions": ({"scale": torch.ones(2)}, ValueError, "0-dim"),
    "a number as a loss function": ({"loss_fn": 1.0}, TypeError, "loss_fn"),
    "an unknown backend": ({"backend": "numpy"}, ValueError, "backend"),
    "a seed that is none": ({"seed": 0.5}, TypeError, "seed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(name: str) -> None:
    changed, error, message = REFUSED[name]
    arguments = {**good_arguments(), **changed}
    with pytest.raises(error, match=message):
        explain(arguments.pop("loss_fn"), arguments.pop("state"), arguments.pop("window"), **arguments)


def test_the_remedies_work() -> None:
    arguments = good_arguments()
    state = fa.init_state(torch.ones(2), fa.sgd(0.1))
    assert not explain(loss, state, arguments["window"]).found
    assert not explain(loss, state, [torch.ones(2)], scale=torch.tensor(4.0)).found
