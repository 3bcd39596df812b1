"""Faults that people met in public: K accumulation, M step and optimizers, P checkpoints, D several devices.

See test_cases.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_amp as fa
from tests.test_cases import BAD, GOOD, assert_same, linear_loss, torch_save

OPTIMIZERS: dict[str, Callable[[], fa.Optimizer]] = {
    "sgd": lambda: fa.sgd(0.1),
    "momentum": lambda: fa.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": lambda: fa.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: fa.adam(0.1, weight_decay=0.1),
    "adamw": lambda: fa.adamw(0.1, weight_decay=0.1),
    "scheduled": lambda: fa.adamw(fa.warmup_cosine(0.1, 2, 9)),
    "partition": lambda: fa.partition({"all": fa.adamw(0.1)}, lambda path, leaf: "all"),
}


def micro(gradient: float | Tensor, weight: float = 1.0, scale: float = 8.0) -> fa.ScaledGrads:
    """What a micro-batch of that mean gradient and weight gives."""
    gradient = torch.as_tensor(gradient).reshape(-1)
    return fa.ScaledGrads({"w": gradient * scale * weight}, scale, weight)


def summed(window: list[fa.ScaledGrads]) -> fa.ScaledGrads:
    total = None
    for grads in window:
        total = fa.accumulate(total, grads)
    assert total is not None
    return total


def mean_of(window: list[fa.ScaledGrads]) -> Tensor:
    return fa.unscale(summed(window)).grads["w"]


def sgd_state(scaler: Any = None, start: float = 0.0) -> tuple[fa.Step, fa.TrainState]:
    """A step with the gradient x and a learning rate of 1."""
    optimizer = fa.sgd(1.0)
    return fa.make_step(linear_loss, optimizer), fa.init_state({"w": torch.full((1,), start)}, optimizer, scaler)


# K: accumulation


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_K01_mean_of_means_is_not_the_full_batch_mean(as_tensor, backend):
    """huggingface/trl#2175: micro-batches of 3 and 1 items give the gradient of all 4, not (2 + 10) / 2."""

    def loss(params: Any, x: Tensor) -> fa.Loss:
        return fa.Loss((params["w"] * x).mean(), torch.tensor(x.numel()) if as_tensor else x.numel())

    optimizer = fa.sgd(1.0)
    step = fa.make_step(loss, optimizer, backend=backend)
    state = fa.init_state({"w": torch.zeros(())}, optimizer)
    state, metrics = step(state, [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0])])
    assert state.params["w"].item() == pytest.approx(-4.0, abs=1e-6)
    assert metrics.weight.item() == 4.0 and metrics.grad_norm.item() == pytest.approx(4.0, abs=1e-6)


@given(st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=5), min_size=1, max_size=5))
def test_K01_mean_of_means_is_not_the_full_batch_mean__any_split(batches):
    """huggingface/trl#2175: however the items are split, the window gives loss and gradient of the full batch."""
    micro_batches = [torch.tensor(batch) for batch in batches]
    w = torch.tensor(0.5, requires_grad=True)
    full = torch.cos(w * torch.cat(micro_batches)).mean()
    (expected,) = torch.autograd.grad(full, w)

    optimizer = fa.sgd(1.0)
    step = fa.make_step(lambda p, x: fa.Loss(torch.cos(p * x).mean(), x.numel()), optimizer)
    state, metrics = step(fa.init_state(torch.tensor(0.5), optimizer), micro_batches)
    torch.testing.assert_close(0.5 - state.params, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(metrics.loss, full.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_K02_divided_by_the_number_of_micro_batches_twice_or_not_at_all(n):
    """huggingface/accelerate#3533: the mean is taken once; the sum is the mean times the weight, said openly."""
    step, state = sgd_state()
    state, metrics = step(state, [torch.tensor([1.0])] * n)
    assert state.params["w"].item() == -1.0 and metrics.grad_norm.item() == 1.0
    assert metrics.weight.item() == n

    total = summed([micro(1.0)] * n)
    assert fa.unscale(total).grads["w"].item() == 1.0
    assert (fa.unscale(total).grads["w"] * total.weight).item() == n


@pytest.mark.parametrize("n", [2, 4, 100])
@pytest.mark.parametrize("gradients, mean", [([1.0, 3.0], 2.0), ([5.0], 5.0)])
def test_K03_last_window_of_the_epoch_is_shorter(gradients, mean, n):
    """Lightning-AI/pytorch-lightning#19987: a short window is divided by what is in it."""
    step, state = sgd_state()
    (window,) = fa.windows([torch.tensor([g]) for g in gradients], n)
    state, metrics = step(state, window)
    assert state.params["w"].item() == -mean and metrics.weight.item() == len(gradients)


def test_K04_trailing_micro_batches_dropped_or_leaked_into_the_next_epoch():
    """tracel-ai/burn#5695: what is left over is visible in the state, and goes into no other window."""
    step, state = sgd_state()
    batches = [torch.tensor([float(i)]) for i in range(1, 8)]
    for batch in batches[:4]:
        state = step.accumulate(state, batch)
    state, _ = step.update(state)
    assert state.window is None and state.params["w"].item() == -2.5
    for batch in batches[4:]:
        state = step.accumulate(state, batch)
    assert state.window is not None and state.window.grads.weight.item() == 3.0

    flushed, metrics = step.update(state)
    assert metrics.weight.item() == 3.0 and flushed.params["w"].item() == -2.5 - 6.0
    dropped, metrics = step(dataclasses.replace(state, window=None), [torch.tensor([1.0])])
    assert metrics.weight.item() == 1.0 and dropped.params["w"].item() == -2.5 - 1.0


@pytest.mark.parametrize("n", range(1, 9))
def test_K04_trailing_micro_batches_dropped_or_leaked_into_the_next_epoch__windows(n):
    """tracel-ai/burn#5695: windows loses no micro-batch, keeps the order, and all but the last are full."""
    grouped = list(fa.windows(iter(range(7)), n))
    assert [batch for window in grouped for batch in window] == list(range(7))
    assert all(len(window) == n for window in grouped[:-1]) and 1 <= len(grouped[-1]) <= n


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_K05_one_non_finite_micro_batch_in_the_window(position, bad):
    """speechbrain/speechbrain#1936: the window is skipped; with where= the bad micro-batch goes with its weight."""
    gradients = [1.0, 3.0]
    gradients.insert(position, bad)
    optimizer = fa.sgd(0.1)
    step = fa.make_step(linear_loss, optimizer)
    state = fa.init_state({"w": torch.ones(1)}, optimizer, fa.DynamicScale(8.0))
    after, metrics = step(state, [torch.tensor([g]) for g in gradients])
    assert_same((after.params, after.opt_state), (state.params, state.opt_state))
    assert after.window is None and after.scaler.scale.item() == 4.0 and not metrics.finite

    total, flags = None, []
    for gradient in gradients:
        grads = fa.scale_backward(linear_loss, state.scaler, state.params, torch.tensor([gradient])).grads
        flags.append(fa.all_finite(grads))
        total = fa.accumulate(total, grads, where=flags[-1])
    assert total is not None and total.weight.item() == 2.0
    grads, finite = fa.unscale(total)
    assert finite and grads["w"].item() == 2.0
    params, _ = fa.maybe_step(optimizer, state.params, state.opt_state, grads, finite)
    assert params["w"].item() == pytest.approx(0.8)
    assert fa.update_scale(state.scaler, torch.stack(flags).all()).scale.item() == 4.0


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_K07_micro_batch_with_no_valid_target(backend, order, as_tensor):
    """NVIDIA-NeMo/Automodel#3796: a mean over no target is 0 / 0, and weighs nothing."""

    def loss(params: Any, labels: Tensor) -> fa.Loss:
        x = torch.arange(float(labels.numel()))[:, None]
        value = nn.functional.cross_entropy(x * params["w"], labels, ignore_index=-100)
        valid = (labels != -100).sum()
        return fa.Loss(value, valid if as_tensor else int(valid))

    params = {"w": torch.tensor([0.25, -0.5])}
    some, none = torch.tensor([0, 1, 1]), torch.tensor([-100, -100])
    leaf = params["w"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(cast(Tensor, loss({"w": leaf}, some).value), leaf)

    optimizer = fa.sgd(1.0)
    step = fa.make_step(loss, optimizer, backend=backend)
    state, metrics = step(fa.init_state(params, optimizer), [some, none][::order])
    torch.testing.assert_close(params["w"] - state.params["w"], expected, rtol=1e-6, atol=1e-7)
    assert metrics.weight.item() == 3.0
    assert metrics.loss.item() == pytest.approx(loss(params, some).value.item())


@pytest.mark.parametrize("window", [[(2.0, 3.0), (math.nan, 0.0)], [(math.nan, 0.0), (2.0, 3.0)]])
def test_K07_micro_batch_with_no_valid_target__monoid(window):
    """NVIDIA-NeMo/Automodel#3796: a sum of gradients of 6.0 from 3 items, and nothing from 0 items, is 2.0."""
    total = summed([micro(*pair) for pair in window])
    grads, finite = fa.unscale(total)
    assert finite and grads["w"].item() == 2.0 and total.weight.item() == 3.0


@pytest.mark.parametrize("weight", [0.0, torch.tensor(0)], ids=repr)
@pytest.mark.parametrize("value", [1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_K07_micro_batch_with_no_valid_target__weightless_window(name, value, weight):
    """NVIDIA-NeMo/Automodel#3796: a window without weight has a zero gradient and is not applied."""
    optimizer = OPTIMIZERS[name]()
    step = fa.make_step(lambda p, x: fa.Loss(linear_loss(p, x), weight), optimizer, max_norm=1.0)
    state = fa.init_state({"w": torch.ones(1)}, optimizer, fa.DynamicScale(8.0))
    after, metrics = step(state, [torch.tensor([value])] * 2)
    assert_same((after.params, after.opt_state), (state.params, state.opt_state))
    assert metrics.finite and metrics.weight.item() == 0.0
    assert metrics.loss.item() == 0.0 and metrics.grad_norm.item() == 0.0
    assert (after.applied.item(), after.skipped.item(), after.skipped_in_a_row.item()) == (0, 1, 1)
    assert after.scaler.scale.item() == 8.0


@pytest.mark.parametrize(
    "n, error",
    [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError), ("4", TypeError), (None, TypeError)],
)
def test_K08_fewer_micro_batches_than_the_window_or_a_window_of_0__size(n, error):
    """huggingface/transformers#24840: a window size that is none is refused when it is given."""
    with pytest.raises(error, match=r"^n: found"):
        fa.windows([1, 2], n)


def test_K08_fewer_micro_batches_than_the_window_or_a_window_of_0():
    """huggingface/transformers#24840: two micro-batches in a window of four are a mean of two; none are an error."""
    step, state = sgd_state()
    (window,) = fa.windows([torch.tensor([1.0]), torch.tensor([3.0])], 4)
    assert step(state, window)[0].params["w"].item() == -2.0
    assert list(fa.windows([], 4)) == []
    with pytest.raises(ValueError, match="empty window"):
        step(state, [])
    with pytest.raises(ValueError, match="no open window"):
        step.update(state)


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize(
    "dtype, first, small, count, expected",
    [
        (torch.bfloat16, 1.0, 2.0**-9, 512, 2.0),
        (torch.float16, 1.0, 2.0**-12, 4096, 2.0),
        (torch.float16, 60000.0, 60000.0, 1, 120000.0),  # the sum is above fp16's largest number
        (torch.float64, 1.0, 2.0**-40, 4, 1 + 2.0**-38),
    ],
)
def test_K09_accumulating_in_bfloat16_stalls(dtype, first, small, count, expected, scale):
    """deepspeedai/DeepSpeed#2768: sums are kept in float32 at least, from the first micro-batch on."""
    if first * scale > torch.finfo(dtype).max:
        first, small, expected = first / scale, small / scale, expected / scale
    total = fa.accumulate(None, fa.ScaledGrads([torch.tensor([first * scale], dtype=dtype)], scale))
    added = fa.ScaledGrads([torch.tensor([small * scale], dtype=dtype)], scale)
    for _ in range(count):
        total = fa.accumulate(total, added)
    assert total.tree[0].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert total.tree[0].item() == expected * scale
    assert fa.unscale(total).grads[0].item() * (count + 1) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("gradients, mean", [([2.0, 4.0, 6.0], 4.0), ([6.0, 4.0, 2.0], 4.0), ([1.0, 0.0], 0.5)])
def test_K11_dividing_by_micro_step_plus_1(gradients, mean):
    """karpathy/nanoGPT#605: every micro-batch counts the same, wherever it stands in the window."""
    assert mean_of([micro(g) for g in gradients]).item() == pytest.approx(mean, abs=1e-6)
    step, state = sgd_state()
    state, _ = step(state, [torch.tensor([g]) for g in gradients])
    assert state.params["w"].item() == pytest.approx(-mean, abs=1e-6)


def spec(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    return structure, [None if leaf is None else (leaf.dtype, leaf.shape, leaf.device) for leaf in leaves]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("weight", [1.0, torch.tensor(3.0, dtype=torch.float64)], ids=repr)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_K13_state_changes_dtype_or_structure_between_calls(name, weight, dtype):
    """google-deepmind/optax#377: structure, dtype, shape and device are the same after every kind of call."""

    def loss(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        value = (params["w"] * x).abs().sum() + params["scalar"].float() ** 2
        return fa.Loss(value, weight, None, {"mean": buffers["mean"] + value.detach().float()})

    optimizer = OPTIMIZERS[name]()
    step = fa.make_step(loss, optimizer, max_norm=1.0)
    params = {"w": torch.ones(2, dtype=dtype), "scalar": torch.tensor(1.0), "none": None, "n": torch.tensor([3])}
    state = fa.init_state(params, optimizer, fa.DynamicScale(8.0), buffers={"mean": torch.zeros(())})
    good, bad = torch.tensor(0.5), torch.tensor(math.inf)
    opened = step.accumulate(state, good)
    assert spec(step.accumulate(opened, bad)) == spec(opened)
    states = [step(state, [good])[0], step(state, [bad])[0], step(state, [good, bad, good])[0]]
    states.append(step(states[0], [good])[0])
    assert [s.applied.item() for s in states] == [1, 0, 0, 2]
    for after in states:
        assert spec(after) == spec(state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_K13_state_changes_dtype_or_structure_between_calls__scale_of_one_element(dtype):
    """google-deepmind/optax#377: a scale or weight of shape (1,) would change the shape of 0-dim leaves."""
    leaf, one = torch.ones((), dtype=dtype), torch.tensor([8.0])
    for call in (
        lambda: fa.ScaledGrads({"w": leaf}, scale=one),
        lambda: fa.ScaledGrads({"w": leaf}, scale=8.0, weight=one),
        lambda: fa.scale_backward(lambda p: p["w"].float() * 2, fa.StaticScale(one), {"w": leaf}),
        lambda: fa.scale_backward(lambda p: p["w"].float() * 2, fa.StaticScale(8.0), {"w": leaf}, weight=one),
    ):
        with pytest.raises(ValueError, match=r"found.*\(1,\)"):
            call()


def held_bytes(state: fa.TrainState) -> int:
    storages = {leaf.untyped_storage()._cdata: leaf.untyped_storage() for leaf in optree.tree_leaves(cast(Any, state))}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_K14_accumulator_memory(weight, dtype):
    """google-deepmind/optax#472: an open window holds one float32 copy of the parameters, a closed one nothing."""
    n, scalars = 1000, 64
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: fa.Loss(linear_loss(p, x), weight), optimizer)
    state = fa.init_state({"w": torch.ones(n, dtype=dtype)}, optimizer)
    at_rest, x = held_bytes(state), torch.full((n,), 0.5)
    for _ in range(4):
        state = step.accumulate(state, x)
        assert held_bytes(state) <= at_rest + 4 * n + scalars
    assert held_bytes(step.update(state)[0]) <= at_rest + scalars
    assert held_bytes(step(state, [x])[0]) <= at_rest + scalars


def test_K15_batchnorm_statistics_move_once_per_micro_batch():
    """pytorch/pytorch#46516: buffers are state: they move once a micro-batch, and not at all in a skipped window."""
    apply, params, buffers = fa.from_module(nn.BatchNorm1d(1))

    def loss(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(out.square().mean(), x.shape[0], None, buffers)

    optimizer = fa.sgd(0.1)
    step, x = fa.make_step(loss, optimizer), torch.tensor([[0.0], [2.0], [4.0], [6.0]])
    state = fa.init_state(params, optimizer, buffers=buffers)
    for window, mean, count in (([x], 0.3, 1), ([x[:2], x[2:]], 0.59, 2)):
        after, _ = step(state, window)
        assert after.buffers["running_mean"].item() == pytest.approx(mean, abs=1e-6)
        assert after.buffers["num_batches_tracked"].item() == count
    skipped, _ = step(state, [x[:2], x[2:] * math.inf])
    assert_same(skipped.buffers, buffers)
    assert buffers["running_mean"].item() == 0.0 and buffers["num_batches_tracked"].item() == 0


# M: the step and the optimizers


@pytest.mark.parametrize("make", [fa.sgd, lambda lr: fa.adam(lr, eps=0.0), lambda lr: fa.adamw(lr, weight_decay=0.0)])
@pytest.mark.parametrize("xs, values", [([math.inf, 1, 1], [2, 1, 0.5]), ([1, math.nan, 1], [1, 1, 0.5])])
def test_M01_scheduler_advances_although_the_step_was_skipped(make, xs, values):
    """Lightning-AI/pytorch-lightning#16228: the schedule counts applied updates: the rates are 1 and 0.5."""
    optimizer = make(lambda count: 0.5**count)
    step = fa.make_step(linear_loss, optimizer)
    state = fa.init_state({"w": torch.full((1,), 2.0)}, optimizer)
    for x, value in zip(xs, values, strict=True):
        state, metrics = step(state, [torch.tensor([float(x)])])
        assert bool(metrics.finite) is math.isfinite(x)
        assert state.params["w"].item() == pytest.approx(value, abs=1e-6)
    assert state.applied.item() == 2 and state.opt_state.step.item() == 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_M02_no_way_to_know_a_step_was_skipped(name):
    """pytorch/pytorch#152279: the flag is a value the caller has, and the state counts both kinds."""
    optimizer = OPTIMIZERS[name]()
    step = fa.make_step(linear_loss, optimizer)
    state = fa.init_state({"w": torch.ones(1)}, optimizer)
    counts = []
    for x in (math.inf, 1.0, 1.0, math.nan):
        state, metrics = step(state, [torch.tensor([x])])
        assert metrics.finite.dtype == torch.bool and bool(metrics.finite) is math.isfinite(x)
        counts.append((state.applied.item(), state.skipped.item(), state.skipped_in_a_row.item()))
    assert counts == [(0, 1, 1), (1, 1, 0), (2, 1, 0), (2, 2, 1)]


def hand_written() -> Any:
    """A pair (init, update) that counts its steps, by nobody who thought of skipping."""
    return (
        lambda params: {"step": torch.tensor(0)},
        lambda grads, state, params: ({"w": -0.1 * grads["w"].sign()}, {"step": state["step"] + 1}),
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: fa.adam(0.1),
        lambda: fa.adamw(0.1, weight_decay=0.0),
        lambda: fa.sgd(0.1),
        lambda: fa.sgd(0.1, momentum=0.9),
        lambda: fa.Optimizer(fa.adam(0.1).init, fa.adam(0.1).update),
        hand_written,
    ],
)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_M03_skip_detection_misses_fused_optimizers(make, bad):
    """huggingface/accelerate#4242: the skip is decided outside the optimizer, whichever it is."""
    optimizer, params = make(), {"w": torch.ones(1)}
    opt_state = (optimizer[0] if isinstance(optimizer, tuple) else optimizer.init)(params)

    def count(state: Any) -> int:
        return (state["step"] if isinstance(state, dict) else state.step).item()

    grads = {"w": torch.tensor([bad])}
    params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, fa.all_finite(grads))
    assert (params["w"].item(), count(opt_state)) == (1.0, 0)
    grads = {"w": torch.ones(1)}
    params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, fa.all_finite(grads))
    assert (params["w"].item(), count(opt_state)) == (pytest.approx(0.9, abs=1e-6), 1)


@pytest.mark.parametrize("scaled_to_the_end", [True, False])
@pytest.mark.parametrize("step", ["step", "update"])
def test_M04_fused_path_unscaled_twice_or_ignored_found_inf(step, scaled_to_the_end):
    """pytorch/pytorch PR#95847: a scaled 80 is a 10, clipped to 1, once, on every path into the optimizer."""
    optimizer, params = fa.sgd(0.1), {"w": torch.ones(1)}
    optimizer = optimizer if step == "step" else fa.Optimizer(optimizer.init, optimizer.update)

    def step_with(value: float) -> float:
        scaled = fa.ScaledGrads({"w": torch.tensor([value])}, scale=8.0)
        finite = fa.all_finite(scaled)
        grads = fa.clip(scaled if scaled_to_the_end else fa.unscale(scaled).grads, 1.0).grads
        return fa.maybe_step(optimizer, params, optimizer.init(params), grads, finite).params["w"].item()

    assert step_with(80.0) == pytest.approx(0.9, abs=2e-6)
    assert step_with(math.inf) == 1.0 and step_with(-math.inf) == 1.0 and step_with(math.nan) == 1.0


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_M06_skip_by_zeroing_the_gradient_still_moves_momentum_and_weight_decay(name, bad):
    """marin-community/levanter PR#973: after a skipped step all of the state is bit for bit what it was."""
    optimizer = OPTIMIZERS[name]()
    params = {"w": torch.ones(1)}
    params, opt_state = fa.maybe_step(optimizer, params, optimizer.init(params), {"w": torch.ones(1)}, GOOD)
    if name == "momentum":
        assert params["w"].item() == pytest.approx(0.89, abs=1e-6)
        assert opt_state.momentum_buffer["w"].item() == pytest.approx(1.1, abs=1e-6)
    skipped = fa.maybe_step(optimizer, params, opt_state, {"w": torch.tensor([bad])}, BAD)
    assert_same(skipped, fa.maybe_step(optimizer, params, opt_state, {"w": None}, BAD))
    assert_same((skipped.params, skipped.opt_state), (params, opt_state))


@pytest.mark.parametrize(
    "optimizer, zero",
    [
        (fa.sgd(1.0, weight_decay=0.1), 0.9),
        (fa.adamw(0.1, weight_decay=0.1), 0.99),
        (fa.sgd(1.0, momentum=0.9, weight_decay=0.1), 0.9),
    ],
)
def test_M10_none_gradient_versus_zero_gradient(optimizer, zero):
    """pytorch/pytorch#38581: a zero gradient decays, a missing one leaves its parameter and its moments alone."""
    params = {"w": torch.ones(1)}
    opt_state = optimizer.init(params)
    for grads, expected in (({"w": torch.zeros(1)}, zero), ({"w": None}, 1.0)):
        after, _ = fa.maybe_step(optimizer, params, opt_state, grads, GOOD)
        assert after["w"].item() == pytest.approx(expected, abs=1e-6)
    _, left = fa.maybe_step(optimizer, params, opt_state, {"w": None}, GOOD)
    assert_same(left._replace(step=opt_state.step), opt_state)


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_M10_none_gradient_versus_zero_gradient__pipeline(weight, backend):
    """pytorch/pytorch#38581: None survives every stage; an unused leaf has zeros and decays unless it is split off."""
    params = {"used": torch.ones(1), "unused": torch.ones(1), "none": None, "n": torch.tensor([3])}
    optimizer = fa.sgd(1.0, weight_decay=0.1)

    def run(params: Any, loss: Callable[[Any], Tensor]) -> Any:
        grads = fa.scale_backward(loss, fa.StaticScale(8.0), params, weight=weight, backend=backend).grads
        grads = fa.clip(fa.accumulate(fa.accumulate(None, grads), grads), 100.0).grads
        unscaled, finite = fa.unscale(grads)
        unscaled = fa.clip(unscaled, 100.0).grads
        assert unscaled["none"] is None and unscaled["n"] is None
        return unscaled, fa.maybe_step(optimizer, params, optimizer.init(params), unscaled, finite).params

    grads, after = run(params, lambda p: (p["used"] * 0.5).sum())
    assert grads["unused"].item() == 0.0 and after["unused"].item() == pytest.approx(0.9)
    assert after["none"] is None and after["n"] is params["n"]

    trainable, fixed = fa.split(params, lambda path, leaf: path == "used")
    grads, after = run(trainable, lambda p: (fa.merge(p, fixed)["used"] * 0.5).sum())
    assert grads["unused"] is None and fa.merge(after, fixed)["unused"] is params["unused"]
    assert after["used"].item() == pytest.approx(1 - 0.5 - 0.1)


def test_M11_bias_correction_for_a_parameter_whose_first_gradient_comes_late():
    """InfiniTensor/InfiniTrain#235: one counter for the tree: torch's values while every leaf has a gradient."""
    optimizer = fa.adam(0.01)
    params: Any = {"A": torch.ones(1), "B": torch.ones(1)}
    opt_state, half = optimizer.init(params), torch.full((1,), 0.5)
    params, opt_state = fa.maybe_step(optimizer, params, opt_state, {"A": half, "B": None}, GOOD)
    assert params["B"].item() == 1.0 and opt_state.step.item() == 1
    params, opt_state = fa.maybe_step(optimizer, params, opt_state, {"A": half, "B": half}, GOOD)
    assert 1 - params["B"].item() == pytest.approx(0.0074414, abs=1e-6)

    weight = nn.Parameter(torch.ones(1))
    reference = torch.optim.Adam([weight], lr=0.01, foreach=False)
    for _ in range(2):
        weight.grad = half.clone()
        reference.step()
    assert torch.equal(params["A"], weight.detach())


@pytest.mark.parametrize("make", [fa.sgd, fa.adam, lambda lr: fa.adamw(lr, weight_decay=0.0)])
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_M12_bf16_parameters_do_not_move(compute, make):
    """pytorch/ao PR#1124: the masters are float32, so updates below half an ulp of the compute dtype add up."""
    optimizer = make(6e-4)
    dtypes = []

    def loss(params: Any, x: Tensor) -> Tensor:
        dtypes.append(params["w"].dtype)
        return (params["w"] * x).sum()

    step = fa.make_step(fa.with_policy(loss, f"params=float32,compute={compute},output=float32"), optimizer)
    state = fa.init_state({"w": torch.ones(1)}, optimizer, fa.StaticScale(1024.0))
    for _ in range(100):
        state, _ = step(state, [torch.ones(1)])
    assert set(dtypes) == {getattr(torch, compute)}
    assert state.params["w"].dtype == torch.float32
    assert state.params["w"].item() == pytest.approx(0.94, abs=1e-5)
    if compute == "bfloat16":
        assert fa.Policy.parse("bfloat16").cast_to_compute(state.params)["w"].item() == 0.94140625


@pytest.mark.parametrize("overflow", ["G", "D", "both", "none"])
def test_M13_several_optimizers_sharing_one_scale(overflow):
    """OpenBMB/BMTrain#39: each tree is skipped by its own flag, and the scale moves once, by all of them."""
    scaler, optimizer, one = fa.DynamicScale(8.0), fa.sgd(0.1), {"w": torch.ones(1)}
    bad = {"G": overflow in ("G", "both"), "D": overflow in ("D", "both")}
    unscaled = {
        name: fa.unscale(fa.ScaledGrads({"w": torch.tensor([math.inf if bad[name] else 8.0])}, 8.0)) for name in bad
    }
    every = unscaled["G"].finite & unscaled["D"].finite

    def step(name: str, finite: Tensor) -> float:
        moved = fa.maybe_step(optimizer, one, optimizer.init(one), unscaled[name].grads, finite).params
        return moved["w"].item()

    for name in bad:
        expected = 1.0 if bad[name] else 0.9
        assert step(name, unscaled[name].finite) == pytest.approx(expected, abs=1e-6)
        assert step(name, every) == pytest.approx(0.9 if overflow == "none" else 1.0, abs=1e-6)
    assert fa.update_scale(scaler, every).scale.item() == (8.0 if overflow == "none" else 4.0)


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_M15_closure_optimizers_are_refused(backend):
    """pfnet/pytorch-pfn-extras#636: a closure may ask for the unscaled gradient as often as it likes."""
    scaler, weight = fa.DynamicScale(1024.0), torch.zeros(1, requires_grad=True)
    line_search = torch.optim.LBFGS([weight], lr=0.5, line_search_fn="strong_wolfe")
    calls = []

    def closure() -> Tensor:
        params = {"w": weight.detach()}
        grads, loss, _ = fa.scale_backward(lambda p: ((p["w"] - 3) ** 2).sum(), scaler, params, backend=backend)
        unscaled, finite = fa.unscale(grads)
        weight.grad = unscaled["w"]
        calls.append(bool(finite))
        return loss

    for _ in range(5):
        line_search.step(cast(Any, closure))
    assert weight.item() == pytest.approx(3.0, abs=1e-4)
    assert len(calls) > 1 and all(calls)
    assert_same(scaler, fa.DynamicScale(1024.0))


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0])
@pytest.mark.parametrize("w, expected", [(0.5, 5.5), (1.0, 38.0), (-0.5, -5.5)])
def test_M17_gradient_penalty_built_from_scaled_gradients(w, expected, scale, backend):
    """NVIDIA/apex#873: the inner gradient of a penalty carries no scale: 2w + 36w**3."""

    def loss(w: Tensor) -> Tensor:
        return w**2 + torch.func.grad(lambda v: v**3)(w) ** 2

    grads = fa.scale_backward(loss, fa.StaticScale(scale), torch.tensor(w), backend=backend).grads
    assert fa.unscale(grads).grads.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("honours", [True, False])
def test_M18_custom_backward_ignores_the_incoming_cotangent(honours, backend):
    """ashawkey/stable-dreamfusion#158: a backward must be linear in what comes in; two scales tell."""

    class Injected(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 5 * grad if honours else torch.full_like(grad, 5.0)

    def gradient(scale: float) -> float:
        def loss(x: Tensor) -> Tensor:
            return cast(Tensor, Injected.apply(x)) + x**2

        grads = fa.scale_backward(loss, fa.StaticScale(scale), torch.tensor(2.0), backend=backend).grads
        return fa.unscale(grads).grads.item()

    assert gradient(1024.0) == pytest.approx(9.0 if honours else 4 + 5 / 1024, abs=1e-6)
    assert (gradient(1024.0) == pytest.approx(gradient(2048.0), abs=1e-6)) is honours
    assert "linear in the incoming gradient" in (fa.scale_backward.__doc__ or "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("max_norm", [None, 1.0, math.inf])
@pytest.mark.parametrize("x, norm", [(3.0, 3.0), (math.inf, math.inf), (math.nan, math.nan)])
def test_M19_norm_undefined_on_the_overflow_path(x, norm, max_norm, dtype):
    """radixark/miles PR#611: every output is there on both paths, with the same dtype and shape."""
    optimizer = fa.sgd(0.1)
    step = fa.make_step(linear_loss, optimizer, max_norm=max_norm)
    state = fa.init_state({"w": torch.zeros(1, dtype=dtype)}, optimizer, fa.StaticScale(8.0))
    after, metrics = step(state, [torch.tensor([x])])
    assert metrics.grad_norm.item() == pytest.approx(norm, nan_ok=True)
    assert spec(metrics) == spec(step(state, [torch.ones(1)])[1])
    assert torch.equal(after.params["w"], state.params["w"]) is not math.isfinite(x)


# P: checkpoints


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("interrupted_after", [(1, 0), (3, 0), (5, 0), (5, 1), (9, 0)])
def test_P01_scaler_state_missing_from_the_checkpoint(name, interrupted_after):
    """facebookresearch/detectron2 PR#3686: a run goes on bit for bit from the saved state, inside a window too."""
    optimizer = OPTIMIZERS[name]()
    step = fa.make_step(linear_loss, optimizer, max_norm=1.0)

    def run(interrupted_after: tuple[int, int] | None) -> tuple[fa.TrainState, list[float]]:
        state = fa.init_state({"w": torch.ones(2)}, optimizer, fa.DynamicScale(16.0, growth_interval=3))
        scales = []
        for window in range(10):
            for position in range(2):
                if (window, position) == interrupted_after:
                    state = torch_save(state)
                x = math.inf if window == 2 else 0.1 * window + position
                state = step.accumulate(state, torch.tensor([x, 1.0]))
            state, _ = step.update(state)
            scales.append(state.scaler.scale.item())
        return state, scales

    whole, scales = run(None)
    assert scales == [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0, 16.0, 32.0, 32.0]
    resumed, resumed_scales = run(interrupted_after)
    assert resumed_scales == scales
    assert_same(resumed, whole)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_P02_lazily_created_scale_is_none_after_resume(device):
    """facebookresearch/fairseq2#1346: the whole state is there from the start, on the device of the parameters."""
    params, optimizer = {"w": torch.ones(2, device=device)}, fa.adam(0.1)
    state = fa.init_state(params, optimizer)
    assert all(leaf.device.type == device for leaf in optree.tree_leaves(cast(Any, state)))
    grads, finite = fa.unscale(fa.ScaledGrads(params, state.scaler.scale))
    after = fa.update_scale(state.scaler, finite)
    assert grads["w"].shape == (2,) and after.scale.device.type == device
    if device == "cpu":
        assert state.scaler.scale.item() == 65536.0 and after.scale.item() == 65536.0
        assert_same(torch_save(state), state)
        assert fa.update_scale(torch_save(state.scaler), BAD).scale.item() == 32768.0


# D: several devices or ranks, as far as one process can tell


def test_D03_skipping_a_step_skips_collective_work_too():
    """pytorch/pytorch#76282: averaging is the caller's own function of the parameters, run whatever the flag was."""
    optimizer = fa.sgd(1.0)
    step = fa.make_step(linear_loss, optimizer)
    replicas = [fa.init_state({"w": torch.zeros(1)}, optimizer) for _ in range(2)]
    xs = [[1.0, 3.0], [math.inf, 3.0], [1.0, 1.0], [math.nan, math.inf]]
    for iteration, pair in enumerate(xs, start=1):
        replicas = [step(state, [torch.tensor([x])])[0] for state, x in zip(replicas, pair, strict=True)]
        if iteration % 2 == 0:
            mean = {"w": torch.stack([state.params["w"] for state in replicas]).mean(0)}
            replicas = [dataclasses.replace(state, params=mean) for state in replicas]
    # -1 and -3; then -1 and -6, averaged to -3.5; then -4.5 and -4.5; then both skipped, and averaged.
    assert [state.params["w"].item() for state in replicas] == [-4.5, -4.5]
    assert [state.skipped.item() for state in replicas] == [2, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_D06_cpu_offload_replaces_instead_of_accumulates(dtype):
    """instructlab/training#414: a sum is never the gradient that came in, and nothing moves by itself."""
    first, second = (fa.ScaledGrads({"w": torch.tensor([g], dtype=dtype)}, 1.0) for g in (1.0, 3.0))
    total = fa.accumulate(fa.accumulate(None, first), second)
    assert (fa.unscale(total).grads["w"] * total.weight).item() == 4.0
    assert first.tree["w"].item() == 1.0 and second.tree["w"].item() == 3.0
    assert total.tree["w"].data_ptr() not in (first.tree["w"].data_ptr(), second.tree["w"].data_ptr())

    elsewhere = fa.ScaledGrads({"w": torch.ones(1, dtype=dtype, device="meta")}, 1.0)
    for one, other in ((first, elsewhere), (elsewhere, first)):
        with pytest.raises(ValueError, match=r"found device (cpu|meta) at 'w', expected (cpu|meta)"):
            fa.accumulate(fa.accumulate(None, one), other)
