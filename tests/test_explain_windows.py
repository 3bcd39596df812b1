"""explain follows a window as its step does: weights, sums, buffers, clipping, the backend, the contexts."""

from __future__ import annotations

import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any, cast

import numpy
import optree
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from functional_amp.debug import explain

# What a window is made of.


def test_a_micro_batch_without_weight_leaves_no_statistics_behind() -> None:
    """The step keeps the buffers of before, and so does the replay: the next micro-batch reads no NaN."""

    def loss_fn(params: Any, batch: Any, buffers: Any) -> fa.Loss:
        x, weight = batch
        return fa.Loss((params * x / buffers["scale"]).sum(), weight=weight, buffers={"scale": x.mean()})

    window = [(torch.full((2,), torch.nan), torch.tensor(0.0)), (torch.ones(2), torch.tensor(1.0))]
    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0), {"scale": torch.ones(())})
    step = fa.make_step(loss_fn, fa.sgd(0.1))
    assert step(state, window)[1].finite and not explain(step, state, window).found
    weighted = [(window[0][0], torch.tensor(1.0)), window[1]]
    assert not step(state, weighted)[1].finite
    why = explain(step, state, weighted)
    assert (why.stage, why.source, why.micro_batch) == ("input", "batch.0", 0)


@pytest.mark.parametrize("size", [1e38, 2e38, 3.3e38])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_window_of_sums_is_added_as_the_step_adds_it(reduction: Any, size: float) -> None:
    """The mean of two gradients fits where their sum does not."""

    def loss_fn(params: Any, x: Tensor) -> fa.Loss:
        return fa.Loss((params * x).sum(), reduction=reduction)

    step, window = fa.make_step(loss_fn, fa.sgd(0.1)), [torch.tensor([size, -size])] * 2
    for scale in (1.0, 2.0**-4):
        state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(scale))
        why = explain(step, state, window)
        assert why.found is not bool(step(state, window)[1].finite)
        if why.found:
            assert why.stage in ("accumulate", "unscale", "norm") and why.operator


def test_a_loss_that_writes_to_its_buffers_is_refused_as_by_the_step_and_nothing_is_written() -> None:
    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        buffers["count"].add_(1)
        return fa.Loss((params * x).sum() / 0, buffers=buffers)

    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0), {"count": torch.zeros(())})
    with pytest.raises(RuntimeError, match="found a write in place to"):
        explain(loss_fn, state, [torch.ones(2)])
    assert state.buffers["count"] == 0


@pytest.mark.parametrize("max_norm", [None, 1.0, float("inf"), 1e-30])
@pytest.mark.parametrize("norm_type", [2.0, 20.0, float("inf")])
def test_clipping_has_its_say(norm_type: float, max_norm: float | None) -> None:
    step = fa.make_step(lambda p, x: (p * x).sum(), fa.sgd(0.1), max_norm=max_norm, norm_type=norm_type)
    for scale, size in ((2.0**20, 1e10), (2.0**100, 1e10), (1.0, 3e38)):
        state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(scale))
        window = [torch.tensor([size, -size])]
        why = explain(step, state, window)
        assert why.found is not bool(step(state, window)[1].finite)
        if why.largest_good_scale is not None:
            good = dataclasses.replace(state, scaler=fa.StaticScale(why.largest_good_scale))
            twice = dataclasses.replace(state, scaler=fa.StaticScale(2 * why.largest_good_scale))
            assert step(good, window)[1].finite and not step(twice, window)[1].finite


# Who differentiates.


def checkpointed(params: Any, x: Tensor) -> Tensor:
    hidden: Any = checkpoint(lambda x: (params * x).exp(), x, use_reentrant=False)
    return hidden.sum()


@pytest.mark.filterwarnings("error")
def test_auto_is_settled_before_the_record_begins_and_without_a_warning() -> None:
    """A step that was never called knows no limit of its loss yet."""
    state, window = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0)), [torch.full((2,), 100.0)]
    why = explain(fa.make_step(checkpointed, fa.sgd(0.1)), state, window)
    assert (why.stage, why.operator) == ("forward", "exp")
    assert why == explain(checkpointed, state, window, backend="auto") == explain(checkpointed, state, window)
    finite = [torch.zeros(2)]
    assert explain(checkpointed, state, finite, backend="auto").harmless == 0


def test_a_step_whose_graph_may_be_left_is_replayed_by_the_engine() -> None:
    state, window = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0)), [torch.full((2,), 100.0)]
    step = fa.make_step(checkpointed, fa.sgd(0.1), compile={"fullgraph": False})
    assert explain(step, state, window) == explain(checkpointed, state, window, backend="autograd")


def test_a_step_inside_autocast_is_explained_inside_it() -> None:
    step = fa.make_step(lambda p, x: (x @ p).float().sum(), fa.sgd(0.1))
    state = fa.init_state(torch.full((3, 2), 100.0), fa.sgd(0.1), fa.StaticScale(1.0))
    window = [torch.full((4, 3), 3e4)]
    with torch.autocast("cpu", torch.float16):
        assert not step(state, window)[1].finite
        why = explain(step, state, window)
    assert (why.stage, why.operator) == ("forward", "mm")
    outside = explain(step, state, window)
    assert not outside.found and "inside torch.autocast, call explain inside it too" in outside.advice


def test_anomaly_mode_does_not_get_in_the_way() -> None:
    """Whoever looks for a NaN has it on: it would raise at the first one that the backward makes."""
    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is on
        with torch.autograd.set_detect_anomaly(True):
            why = explain(lambda p, x: (p * x * 0 / 0).sum(), state, [torch.ones(2)])
            assert torch.is_anomaly_enabled()
    assert (why.stage, why.operator) == ("forward", "div")


def test_a_stacked_window_is_taken_apart_as_the_message_says() -> None:
    step = fa.make_step(lambda p, b: (p.half() * b["x"].half()).float().sum(), fa.sgd(0.1))
    state, stacked = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(2.0**14)), {"x": torch.full((3, 2), 7.0)}
    _, metrics = step.scan(state, stacked)
    assert not metrics.finite
    with pytest.raises(TypeError, match=r"optree.tree_map\(lambda leaf: leaf\[i\], stacked\) for i in range\(n\)"):
        explain(step, state, stacked)
    apart: Any = [optree.tree_map(lambda leaf, i=i: leaf[i], cast(Any, stacked)) for i in range(3)]
    assert explain(step, state, apart).largest_good_scale == 2.0**13


def test_one_member_of_an_ensemble_is_explained() -> None:
    states: list[Any] = [
        fa.init_state(torch.full((2,), size), fa.sgd(0.1), fa.StaticScale(1.0)) for size in (1.0, 100.0)
    ]
    ensemble: Any = optree.tree_map(lambda *leaves: torch.stack(leaves), *states)
    with pytest.raises(ValueError, match="Explain one member of an ensemble"):
        explain(lambda p, x: (p * x).exp().sum(), ensemble, [torch.ones(2)])
    member: Any = optree.tree_map(lambda leaf: leaf[1], ensemble)
    assert explain(lambda p, x: (p * x).exp().sum(), member, [torch.ones(2)]).operator == "exp"


# What is drawn.


def layer_drop(params: Any, x: Tensor) -> Tensor:
    """Fails where Python's, numpy's or the loss function's own generator says so."""
    kept = random.random() < 0.5 or numpy.random.rand() < 0.5 or float(torch.rand((), generator=OWN)) < 0.5
    return (params.half() * x.half() * (1 if kept else 512)).float().sum()


OWN = torch.Generator()


def generators() -> list[Any]:
    numpys: Any = numpy.random.get_state()
    return [random.getstate(), numpys[1].tolist(), OWN.get_state().tolist(), torch.get_rng_state().tolist()]


def test_each_run_draws_the_same_numbers_of_every_generator_and_all_are_put_back() -> None:
    step = fa.make_step(layer_drop, fa.sgd(0.1))
    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(2.0**8))
    window, found = [torch.ones(2)] * 3, []
    for seed in range(16):
        random.seed(seed)
        numpy.random.seed(seed)
        OWN.manual_seed(seed)
        before = generators()
        why = explain(step, state, window)
        assert generators() == before
        assert why.found is not bool(step(state, window)[1].finite)
        assert why.largest_good_scale == (2.0**6 if why.found else None)
        found.append(why.found)
    assert 2 < sum(found) < 14


# What is said of a loss that is not finite.


def test_a_window_whose_loss_alone_is_not_finite_is_said_to_be_applied() -> None:
    """A detached term: no gradient sees it."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params * x).sum() + (x - x).log().sum()

    step, state = fa.make_step(loss_fn, fa.sgd(0.1)), fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0))
    _, metrics = step(state, [torch.ones(2)])
    assert metrics.applied and metrics.loss == -torch.inf
    why = explain(step, state, [torch.ones(2)])
    assert (why.found, why.stage, why.operator, why.leaves) == (True, "forward", "log", ())
    assert "the step applies it" in why.advice


@pytest.mark.parametrize("number", [float("inf"), float("nan"), -float("inf")])
def test_a_number_that_is_not_finite_is_named(number: float) -> None:
    state = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(1.0))
    why = explain(lambda p, batch: (p * batch["factor"]).sum(), state, [{"factor": number}])
    assert (why.stage, why.operator) == ("forward", "mul")
    assert f"mul was given the number {number:g}" in why.advice


# What is counted as harmless.


class Grows(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = self.cell(x) * 10
        return x.float().sum()


def test_the_first_call_of_a_module_is_not_counted() -> None:
    """It rehearses the module."""
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(Grows())
    state = fa.init_state(params, fa.sgd(0.1), fa.StaticScale(1.0))
    loss_fn = fa.autocast(lambda params, x: apply(params, x), torch.float16)
    first, second = (explain(loss_fn, state, [torch.ones(2, 4)]) for _ in range(2))
    assert str(first) == str(second) and first.stage == "forward"


def test_what_spoils_the_same_gradient_too_is_not_harmless() -> None:
    """The first bad operator is the root; the others end in the same leaf."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        hidden = params * x
        return (hidden / hidden.sum()).sum()  # 0 / 0, in the derivatives of both sides as well

    state = fa.init_state(torch.ones(3), fa.sgd(0.1), fa.StaticScale(1.0))
    why = explain(loss_fn, state, [torch.zeros(3)])
    assert (why.stage, why.operator, why.harmless) == ("forward", "div", 0)


# What is not followed.


def exploding(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).exp().sum()


def test_sharded_parameters_are_explained_as_full_tensors(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        params = {"w": distribute_tensor(torch.full((2,), 100.0), mesh, [Shard(0)])}
        state, window = fa.init_state(params, fa.sgd(0.1), fa.StaticScale(1.0)), [torch.ones(2)]
        with pytest.raises(TypeError, match=r"found DTensors at \['w'\].*leaf.full_tensor\(\) in place of each"):
            explain(exploding, state, window)
        full = {name: cast(Any, leaf).full_tensor() for name, leaf in state.params.items()}
        assert explain(exploding, dataclasses.replace(state, params=full), window).operator == "exp"
    finally:
        dist.destroy_process_group()


# Whose a bad element is.


@pytest.mark.parametrize("transposed", [False, True])
def test_each_part_of_one_memory_has_its_name(transposed: bool) -> None:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        return sum(((params * part).sum() for part in batch.values()), torch.zeros(()))

    state = fa.init_state(torch.ones(3, 2), fa.sgd(0.1), fa.StaticScale(1.0))
    memory = torch.ones(2, 3, 2)
    for index, name in enumerate(("a", "b")):
        spoiled = memory.clone()
        spoiled[index, 1, 1] = torch.nan
        # Columns of one memory lie between each other.
        parts = spoiled.permute(1, 2, 0).contiguous().unbind(-1) if transposed else spoiled.unbind()
        why = explain(loss_fn, state, [dict(zip(("a", "b"), parts, strict=True))])
        assert (why.stage, why.source) == ("input", f"batch.{name}")
        assert why.output is not None and (why.output.nan, why.output.low, why.output.high) == (1, 1.0, 1.0)
