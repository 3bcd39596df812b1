"""Faults that people met in public with this job, each as a small input with the value that is right.

One test a case, named after its id and title; the docstring gives the thread the case comes from. The
groups are in five files:

    test_cases.py             S scaler, U unscale and finite check
    test_cases_clip.py        C clip
    test_cases_training.py    K accumulation, M step and optimizers, P checkpoints, D several devices
    test_cases_ranks.py       D that need two processes: D02, D04, D05
    test_cases_transforms.py  F functional transforms and compilation

C06 and F14 need a CUDA device and are marked so.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import itertools
import math
import pickle
from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

import functional_amp as fa
from functional_amp.dtypes import scalar_dtype

GOOD, BAD = torch.tensor(True), torch.tensor(False)
FLOAT32 = torch.finfo(torch.float32)


def linear_loss(params: Any, x: Tensor) -> Tensor:
    """Its gradient is x, rounded to the dtype of the parameter."""
    return (params["w"].float() * x).sum()


def scale_after(scaler: Any, flags: list[bool]) -> list[float]:
    scales = []
    for flag in flags:
        scaler = fa.update_scale(scaler, torch.tensor(flag))
        scales.append(scaler.scale.item())
    return scales


def torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "optree.tree_map": lambda node: optree.tree_map(lambda leaf: leaf, node, none_is_leaf=True),
    "optree flatten": lambda node: optree.tree_unflatten(optree.tree_structure(node), optree.tree_leaves(node)),
    "torch tree_map": lambda node: torch_pytree.tree_map(lambda leaf: leaf, node),
    "torch flatten": lambda node: torch_pytree.tree_unflatten(*torch_pytree.tree_flatten(node)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda node: pickle.loads(pickle.dumps(node)),
    "torch.save": torch_save,
}


def assert_same(found: Any, expected: Any) -> None:
    """Equal in every field, with types, dtypes and devices."""
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    elif dataclasses.is_dataclass(expected):
        for field in dataclasses.fields(expected):
            assert_same(getattr(found, field.name), getattr(expected, field.name))
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            assert_same(found[name], expected[name])
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    else:
        assert found == expected


# S: the scaler


@pytest.mark.parametrize(
    "scale, factor, max_scale, expected",
    [
        (2.0**127, 2.0, math.inf, 2.0**127),
        (1e38, 10.0, math.inf, 1e38),
        (FLOAT32.max, 1.5, math.inf, FLOAT32.max),
        (2.0**127, 2.0, 2.0**127, 2.0**127),
        (2.0**24, 2.0, 2.0**24, 2.0**24),
        (2.0**23, 4.0, 2.0**24, 2.0**24),
        (2.0**127, 2.0, FLOAT32.max, FLOAT32.max),
    ],
)
def test_S01_scale_grows_past_float32_max(scale, factor, max_scale, expected):
    """pytorch/pytorch#98828: a growth to inf is refused, a ceiling holds, and the tracker starts again."""
    scaler = fa.DynamicScale(scale, growth_factor=factor, growth_interval=1, max_scale=max_scale)
    after = fa.update_scale(scaler, GOOD)
    assert after.scale.item() == torch.tensor(expected).item()
    assert after.growth_tracker.item() == 0


@pytest.mark.parametrize("factor", [2.0, 10.0, 1e30])
def test_S02_functional_dynamic_scale_runs_away_to_inf_and_cannot_come_back__growth(factor):
    """google/flax#2547 (a): the scale is finite after every one of 70 growths, and can still come down."""
    scaler = fa.DynamicScale(65536.0, growth_factor=factor, growth_interval=1)
    for _ in range(70):
        scaler = fa.update_scale(scaler, GOOD)
        assert torch.isfinite(scaler.scale)
    assert fa.update_scale(scaler, BAD).scale == scaler.scale / 2


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 0.0, -0.0, -1.0, 1e-45])
@pytest.mark.parametrize(
    "build",
    [
        fa.DynamicScale,
        fa.StaticScale,
        fa.NoScale,
        fa.DynamicScale.megatron,
        fa.DynamicScale.flax,
        lambda scale: dataclasses.replace(fa.DynamicScale(), scale=scale),
        lambda scale: fa.ScaledGrads(torch.ones(1), scale=scale),
    ],
)
def test_S02_functional_dynamic_scale_runs_away_to_inf_and_cannot_come_back__construction(build, scale, as_tensor):
    """google/flax#2547 (b): a scale that no update could bring back is refused where it comes in."""
    with pytest.raises(ValueError, match="scale: found"):
        build(torch.tensor(scale) if as_tensor else scale)


@pytest.mark.parametrize("updates", [166, 1000])
@pytest.mark.parametrize(
    "scaler, floor",
    [
        (fa.DynamicScale(65536.0), FLOAT32.tiny),
        (fa.DynamicScale(65536.0, min_scale=2.0**-10), 2.0**-10),
        (fa.DynamicScale(65536.0, backoff_factor=1e-30), FLOAT32.tiny),
        (fa.DynamicScale(65536.0, hysteresis=3), FLOAT32.tiny),
        (fa.DynamicScale.jmp(65536.0), 1.0),
    ],
)
def test_S03_scale_decays_to_exactly_zero_under_persistent_nan(scaler, floor, updates):
    """NVIDIA/apex#318: the scale stops at its floor, a normal number, and grows again from there."""
    for _ in range(updates):
        scaler = fa.update_scale(scaler, BAD)
    assert scaler.scale.item() == floor
    assert torch.isfinite(1 / scaler.scale)
    growing = dataclasses.replace(scaler, growth_interval=1)
    assert fa.update_scale(growing, GOOD).scale.item() == 2 * floor


@pytest.mark.parametrize(
    "true, backoffs, scaled",
    [(1e5, 17, 49984.0), (7e4, 17, 35008.0), (1e6, 20, 62496.0)],
)
def test_S05_minimum_loss_scale_of_1_is_too_high(true, backoffs, scaled):
    """google-deepmind/jmp#18: with a floor below 1 an fp16 gradient above 65504 gets through."""
    params = {"w": torch.ones(1, dtype=torch.float16)}
    low, high = fa.DynamicScale(min_scale=2.0**-10), fa.DynamicScale(min_scale=1.0)
    for _ in range(backoffs):
        for scaler in (low, high):
            assert not fa.all_finite(fa.scale_backward(linear_loss, scaler, params, torch.tensor([true])).grads)
        low, high = fa.update_scale(low, BAD), fa.update_scale(high, BAD)

    grads = fa.scale_backward(linear_loss, low, params, torch.tensor([true])).grads
    assert low.scale.item() == 2.0 ** (16 - backoffs)
    torch.testing.assert_close(grads.tree, {"w": torch.tensor([scaled], dtype=torch.float16)}, rtol=0, atol=0)
    unscaled, finite = fa.unscale(grads)
    assert finite and unscaled["w"].item() == scaled / low.scale.item()
    assert high.scale.item() == 1.0
    assert not fa.all_finite(fa.scale_backward(linear_loss, high, params, torch.tensor([true])).grads)


@pytest.mark.parametrize(
    "hysteresis, scales, left",
    [
        (1, [32768.0, 16384.0, 8192.0], [0, 0, 0]),
        (2, [65536.0, 32768.0, 16384.0], [1, 0, 0]),
        (3, [65536.0, 65536.0, 32768.0], [2, 1, 0]),
    ],
)
def test_S06_hysteresis_makes_the_log_and_the_state_disagree(hysteresis, scales, left):
    """deepspeedai/DeepSpeed#1599: what hysteresis has left is a visible field of the state."""
    scaler = fa.DynamicScale(65536.0, hysteresis=hysteresis)
    for scale, remaining in zip(scales, left, strict=True):
        scaler = fa.update_scale(scaler, BAD)
        assert (scaler.scale.item(), scaler.hysteresis_tracker.item()) == (scale, remaining)


@pytest.mark.parametrize(
    "refill, scales",
    [
        ("growth", [8, 8, 4, 2, 2, 2, 4, 4, 2]),  # Megatron-LM
        ("good", [8, 8, 8, 4, 4, 4, 8, 8, 4]),  # apex, hysteresis kernel
    ],
)
def test_S06_hysteresis_makes_the_log_and_the_state_disagree__refill(refill, scales):
    """deepspeedai/DeepSpeed#1599: whether a clean step refills the hysteresis is an option."""
    overflows = [True, False, True, True, False, False, False, True, True]
    scaler = fa.DynamicScale(8.0, growth_interval=3, hysteresis=2, refill=refill, min_scale=1.0)
    assert scale_after(scaler, [not overflow for overflow in overflows]) == scales


@pytest.mark.parametrize("interrupted_after", range(5))
@pytest.mark.parametrize("name", ["pickle", "torch.save", "optree flatten", "torch flatten"])
def test_S08_growth_counter_lost_on_restart_makes_training_path_dependent(name, interrupted_after):
    """facebookresearch/metaseq#3: four clean updates give 16 wherever the run was interrupted."""
    scaler = fa.DynamicScale(8.0, growth_interval=4)
    for count in range(4):
        if count == interrupted_after:
            scaler = ROUND_TRIPS[name](scaler)
        assert scaler.scale.item() == 8.0
        scaler = fa.update_scale(scaler, GOOD)
    assert ROUND_TRIPS[name](scaler).scale.item() == 16.0


def every_field_set() -> dict[str, Any]:
    scaler = fa.DynamicScale(
        torch.tensor(3.0),
        growth_tracker=5,
        hysteresis_tracker=2,
        growth_factor=3.0,
        backoff_factor=0.25,
        growth_interval=7,
        min_scale=2.0,
        max_scale=99.0,
        hysteresis=4,
        refill="good",
        growth_delay=6,
    )
    optimizer = fa.adam(0.1)
    params = {"w": torch.ones(2), "half": torch.ones(1, dtype=torch.bfloat16), "n": torch.ones(1, dtype=torch.int64)}
    state = fa.init_state(params, optimizer, scaler, buffers={"mean": torch.zeros(1)})
    step = fa.make_step(lambda p, x, buffers: fa.Loss((p["w"] * x).sum(), 3.0, None, buffers), optimizer)
    return {
        "DynamicScale": scaler,
        "StaticScale": fa.StaticScale(3.0),
        "NoScale": fa.NoScale(),
        "ScaledGrads": fa.ScaledGrads({"w": torch.ones(2), "b": None}, scale=8.0, weight=3.0),
        "Loss": fa.Loss(torch.tensor(1.0), torch.tensor(2.0), {"a": torch.ones(1)}, {"b": torch.ones(1)}),
        "TrainState": state,
        "TrainState in a window": step.accumulate(state, torch.ones(2)),
    }


@pytest.mark.parametrize("name", ROUND_TRIPS)
@pytest.mark.parametrize("kind", every_field_set())
def test_S09_flatten_unflatten_drops_a_field_of_the_loss_scale_state(kind, name):
    """google-deepmind/jmp PR#44: every field of every value survives every way to take it apart."""
    node = every_field_set()[kind]
    assert_same(ROUND_TRIPS[name](node), node)


@pytest.mark.parametrize(
    "scaler, x, applied, scale",
    [
        (fa.DynamicScale(4.0, growth_interval=1), 1.0, True, 8.0),
        (fa.DynamicScale(4.0), 1.0, True, 4.0),
        (fa.DynamicScale(4.0, min_scale=4.0), math.inf, False, 4.0),
        (fa.DynamicScale(4.0, hysteresis=2), math.inf, False, 4.0),
        (fa.StaticScale(4.0), math.inf, False, 4.0),
        (fa.DynamicScale(4.0), math.inf, False, 2.0),
    ],
)
def test_S10_skipped_step_detected_by_comparing_scales_is_ambiguous(scaler, x, applied, scale):
    """ShiqiYu/OpenGait#147: the flag and the counters tell a skip, whatever the scale does."""
    optimizer = fa.sgd(0.1)
    step = fa.make_step(linear_loss, optimizer)
    state, metrics = step(fa.init_state({"w": torch.ones(1)}, optimizer, scaler), [torch.tensor([x])])
    assert metrics.finite.dtype == torch.bool and bool(metrics.finite) is applied
    assert (state.applied.item(), state.skipped.item()) == (int(applied), int(not applied))
    assert state.scaler.scale.item() == scale


@pytest.mark.parametrize(
    "micro",
    [
        [(1.0, 1024.0), (3.0, 2048.0)],
        [(3.0, 2048.0), (1.0, 1024.0)],
        [(1.0, 65536.0), (3.0, 1.0)],
        [(1.0, 3.0), (3.0, 7.0)],
        [(1.0, 8.0), (0.5, 16.0), (2.5, 4.0)],
    ],
)
def test_S12_scale_moves_in_the_middle_of_an_accumulation_window(micro):
    """Kai-46/minFM PR#2: gradients carry their scale, so a sum of several scales is the sum of the gradients."""
    total = None
    for gradient, scale in micro:
        total = fa.accumulate(total, fa.ScaledGrads(torch.tensor([gradient * scale]), scale))
    assert total is not None
    mean = fa.unscale(total).grads
    assert (mean * total.weight).item() == pytest.approx(4.0, abs=1e-6)
    assert mean.item() == pytest.approx(4.0 / len(micro), abs=1e-6)


def test_S12_scale_moves_in_the_middle_of_an_accumulation_window__step():
    """Kai-46/minFM PR#2: the same for the composed step, whose scaler is replaced inside a window."""
    optimizer = fa.sgd(1.0)
    step = fa.make_step(linear_loss, optimizer)
    state = fa.init_state({"w": torch.zeros(1)}, optimizer, fa.DynamicScale(1024.0))
    state = step.accumulate(state, torch.tensor([1.0]))
    state = dataclasses.replace(state, scaler=fa.DynamicScale(2048.0))
    state, _ = step.update(step.accumulate(state, torch.tensor([3.0])))
    assert state.params["w"].item() == -2.0


@pytest.mark.parametrize("growth_factor", [2.0, 1.5, 3.0])
def test_S14_loss_scaling_left_on_for_bfloat16__scale(growth_factor):
    """huggingface/transformers PR#21428 (a): without a single overflow the scale stays finite."""
    scaler = fa.DynamicScale(growth_interval=1, growth_factor=growth_factor)
    assert all(math.isfinite(scale) for scale in scale_after(scaler, [True] * 400))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_S14_loss_scaling_left_on_for_bfloat16__unscale(dtype):
    """huggingface/transformers PR#21428 (b): half-precision leaves unscale without an error, into float32."""
    grads, finite = fa.unscale(fa.ScaledGrads([torch.tensor([1.0, 2.0], dtype=dtype)], scale=2.0))
    torch.testing.assert_close(grads, [torch.tensor([0.5, 1.0])], rtol=0, atol=0)
    assert finite


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_S14_loss_scaling_left_on_for_bfloat16__disabled(dtype):
    """huggingface/transformers PR#21428 (c): NoScale is an exact identity that still reports overflow."""
    params, x = {"w": torch.tensor([0.1, -0.3], dtype=dtype)}, torch.tensor([0.7, 1e-30])
    grads, loss, _ = fa.scale_backward(linear_loss, fa.NoScale(), params, x)
    true, value = torch.func.grad_and_value(linear_loss)(params, x)
    torch.testing.assert_close((grads.tree, loss), (true, value), rtol=0, atol=0)
    assert fa.NoScale().scale.item() == 1.0
    for flag in (GOOD, BAD):
        assert_same(fa.update_scale(fa.NoScale(), flag), fa.NoScale())
    overflow = fa.scale_backward(linear_loss, fa.NoScale(), params, torch.tensor([1.0, math.nan])).grads
    assert not fa.all_finite(overflow)


@pytest.mark.parametrize("true, skips", [(2.0, 2), (0.5, 0), (1.0, 1), (10.0, 4), (1000.0, 10)])
def test_S15_first_steps_always_skipped_at_the_default_initial_scale(true, skips):
    """deepspeedai/DeepSpeed#931: an fp16 start costs as many skips as there are halvings, and they are counted."""
    optimizer = fa.sgd(2.0**-12)
    step = fa.make_step(linear_loss, optimizer)
    state = fa.init_state({"w": torch.zeros(1, dtype=torch.float16)}, optimizer)
    for count in range(1, skips + 1):
        state, metrics = step(state, [torch.tensor([true])])
        assert not metrics.finite and state.skipped_in_a_row.item() == count
        assert state.params["w"].item() == 0.0
    state, metrics = step(state, [torch.tensor([true])])
    assert state.params["w"].item() == -true * 2.0**-12
    assert metrics.grad_norm.item() == true
    assert state.scaler.scale.item() == 65536.0 / 2**skips
    assert (state.applied.item(), state.skipped.item(), state.skipped_in_a_row.item()) == (1, skips, 0)


@pytest.mark.parametrize("more", [1, 5, 40])
def test_S16_run_loops_for_ever_at_the_minimum_scale(more):
    """deepspeedai/DeepSpeed PR#1958: a counter tells it without a host read; the host check names the leaves."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return params["body"]["w"].sum() * x + params["head"].sum()

    optimizer = fa.sgd(0.1)
    params = {"body": {"w": torch.ones(2)}, "head": torch.ones(1)}
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0, min_scale=2.0))
    step, x = fa.make_step(loss, optimizer), torch.tensor(math.nan)
    for _ in range(more):
        state, _ = step(state, [x])
    assert isinstance(state.skipped_in_a_row, Tensor) and state.skipped_in_a_row.item() == more
    assert state.scaler.scale.item() == 2.0

    grads = fa.scale_backward(loss, state.scaler, state.params, x).grads
    assert fa.nonfinite_paths(grads) == ["body.w"]
    fa.check_progress(state, max_skipped=more, grads=grads)
    with pytest.raises(FloatingPointError, match=rf"{more} updates in a row.*scale is down to 2 .*\['body.w'\]"):
        fa.check_progress(state, max_skipped=more - 1, grads=grads)


def test_S17_consecutive_failure_counter_not_reset_after_giving_up():
    """google-deepmind/optax PR#1746: there is no giving up: the counter is the current streak, for any sequence."""
    optimizer = fa.sgd(1.0, momentum=0.5)
    step = fa.make_step(linear_loss, optimizer)
    for flags in itertools.product([True, False], repeat=5):
        state = fa.init_state({"w": torch.zeros(1)}, optimizer, fa.DynamicScale(8.0))
        streak = 0
        for flag in flags:
            before = state
            state, _ = step(state, [torch.tensor([1.0 if flag else math.nan])])
            streak = 0 if flag else streak + 1
            assert state.skipped_in_a_row.item() == streak
            assert flag or torch.equal(state.params["w"], before.params["w"])
        assert state.applied.item() == sum(flags) and state.skipped.item() == 5 - sum(flags)


def test_S19_scaler_rebuilt_every_step_or_epoch_or_never_enabled():
    """bytedance/Protenix PR#258: the scaler is in the state and nowhere else; a step does not make one."""
    optimizer = fa.sgd(0.1)
    step, x = fa.make_step(linear_loss, optimizer), [torch.tensor([math.inf])]
    first = fa.init_state({"w": torch.ones(1)}, optimizer)
    state = first
    for expected in (32768.0, 16384.0, 8192.0):
        state, _ = step(state, x)
        assert state.scaler.scale.item() == expected
    assert step(first, x)[0].scaler.scale.item() == 32768.0


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: fa.Policy.parse("params=float32,compute=fp61,output=float32"), ValueError, "fp61"),
        (lambda: fa.Policy.parse("params=float32,copmute=float16"), ValueError, "copmute"),
        (lambda: fa.with_policy(linear_loss, "flaot16"), ValueError, "flaot16"),
        (lambda: fa.with_policy(linear_loss, cast(Any, torch.float16)), TypeError, "dtype"),
        (lambda: fa.autocast(linear_loss, cast(Any, "float16")), TypeError, "float16"),
        (lambda: fa.autocast(linear_loss, torch.int32), TypeError, "int32"),
        (lambda: fa.make_step(linear_loss, fa.sgd(0.1), backend=cast(Any, "fucn")), ValueError, "fucn"),
        (lambda: fa.init_state(torch.ones(1), fa.sgd(0.1), cast(Any, "dynamic")), TypeError, "str"),
        (lambda: fa.init_state(torch.ones(1), fa.sgd(0.1), cast(Any, False)), TypeError, "bool"),
    ],
)
def test_S19_scaler_rebuilt_every_step_or_epoch_or_never_enabled__typos(call, error, match):
    """bytedance/Protenix PR#258: a misspelt dtype or setting raises instead of turning scaling off."""
    with pytest.raises(error, match=match):
        call()


# U: unscale and the finite check


@pytest.mark.parametrize("scale", [1.0, 1024.0, 65536.0, 2.0**-10, 3.0])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_U01_clipping_before_unscaling(scale, weight):
    """Lightning-AI/pytorch-lightning#9694: both orders clip in true units and report the true norm."""
    scaled = fa.ScaledGrads({"w": torch.tensor([3.0, 4.0]) * scale * weight}, scale, weight)
    clipped, norm_before = fa.clip(scaled, 1.0)
    early, _ = fa.unscale(clipped)
    late, norm_after = fa.clip(fa.unscale(scaled).grads, 1.0)
    optimizer, params = fa.sgd(1.0), {"w": torch.zeros(2)}
    for grads in (early, late, clipped):
        moved = fa.maybe_step(optimizer, params, optimizer.init(params), grads, GOOD).params
        torch.testing.assert_close(moved, {"w": torch.tensor([-0.6, -0.8])}, rtol=0, atol=2e-6)
    assert norm_before.item() == pytest.approx(5.0, rel=1e-6) and norm_after.item() == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_U02_unscale_on_every_micro_batch_of_an_accumulation_window(n):
    """huggingface/accelerate#641: what is unscaled carries no scale, so it can be neither unscaled nor added again."""
    micro = fa.ScaledGrads({"w": torch.tensor([8.0])}, scale=8.0)
    total = None
    for _ in range(n):
        total = fa.accumulate(total, micro)
    assert total is not None
    mean = fa.unscale(total).grads
    assert (mean["w"] * total.weight).item() == n and mean["w"].item() == 1.0
    for grads in (mean, mean["w"], [mean["w"]], fa.unscale(total)):
        with pytest.raises(TypeError, match="expected ScaledGrads"):
            fa.unscale(cast(Any, grads))
        with pytest.raises(TypeError, match="expected ScaledGrads"):
            fa.accumulate(total, cast(Any, grads))
        with pytest.raises(TypeError, match="expected ScaledGrads"):
            fa.accumulate(cast(Any, grads), micro)


@pytest.mark.parametrize("optimizer", [fa.sgd(0.1, momentum=0.9), fa.adam(0.1)])
@pytest.mark.parametrize("flag", [True, False])
def test_U03_skipping_a_step_by_hand_leaves_the_scaler_in_a_bad_stage(optimizer, flag):
    """Haian-Jin/LVSM PR#19: there is no stage: any call may be left out, or made twice with the same result."""
    params, scaler = {"w": torch.tensor([1.0, -2.0])}, fa.DynamicScale(1024.0)
    opt_state = optimizer.init(params)
    abandoned = fa.unscale(fa.scale_backward(linear_loss, scaler, params, torch.tensor([1e9, 1e9])).grads)
    assert abandoned.finite  # and no step, no update_scale
    scaled = fa.scale_backward(linear_loss, scaler, params, torch.tensor([0.5, 0.25])).grads
    assert_same(fa.unscale(scaled), fa.unscale(scaled))
    grads, finite = fa.unscale(scaled)
    first = fa.maybe_step(optimizer, params, opt_state, grads, finite & flag)
    assert_same(fa.maybe_step(optimizer, params, opt_state, grads, finite & flag), first)
    assert_same(fa.update_scale(scaler, finite), fa.update_scale(scaler, finite))
    assert torch.equal(first.params["w"], params["w"]) is not flag


def test_U03_skipping_a_step_by_hand_leaves_the_scaler_in_a_bad_stage__step():
    """Haian-Jin/LVSM PR#19: the composed step gives the same twice, and a window can be abandoned."""
    optimizer = fa.adam(0.1)
    step = fa.make_step(linear_loss, optimizer, max_norm=1.0)
    state = fa.init_state({"w": torch.ones(1)}, optimizer)
    opened = step.accumulate(state, torch.tensor([3.0]))
    assert_same(step.update(opened), step.update(opened))
    assert_same(step(state, [torch.tensor([2.0])]), step(state, [torch.tensor([2.0])]))


@pytest.mark.parametrize(
    "params, tree",
    [
        ({}, {}),
        ([], []),
        ((), ()),
        (None, None),
        ({"a": torch.ones(2)}, {"a": None}),
        ({"a": torch.ones(2), "b": [torch.ones(1)]}, {"a": None, "b": [None]}),
        ({"a": torch.ones(0)}, {"a": torch.ones(0)}),
        ({"a": torch.ones(0, 3), "b": torch.ones(1)}, {"a": torch.ones(0, 3), "b": None}),
    ],
)
@pytest.mark.parametrize("optimizer", [fa.sgd(0.1, momentum=0.9, weight_decay=0.1), fa.adamw(0.1)])
def test_U05_no_parameter_of_this_optimizer_got_a_gradient(params, tree, optimizer):
    """nerfstudio-project/nerfstudio PR#1919: nothing is finite: no overflow, and the parameters stay."""
    scaled = fa.accumulate(None, fa.ScaledGrads(tree, scale=8.0))
    grads, finite = fa.unscale(scaled)
    assert_same(grads, tree)
    assert finite.dtype == torch.bool and finite.shape == () and finite.device == scaled.scale.device
    assert finite and fa.all_finite(scaled) and fa.all_finite(tree)
    for given in (grads, scaled, fa.clip(grads, 1.0).grads, fa.clip(scaled, 1.0).grads):
        after, _ = fa.maybe_step(optimizer, params, optimizer.init(params), given, finite)
        assert_same(after, params)
    assert fa.update_scale(fa.DynamicScale(8.0, growth_interval=1), finite).scale.item() == 16.0


def test_U06_update_before_any_unscale():
    """huggingface/accelerate#357: the flag is a required argument, and only a flag will do."""
    scaler, params, optimizer = fa.DynamicScale(), {"w": torch.ones(1)}, fa.sgd(0.1)
    with pytest.raises(TypeError, match="finite"):
        cast(Any, fa.update_scale)(scaler)
    with pytest.raises(TypeError, match="finite"):
        cast(Any, fa.maybe_step)(optimizer, params, optimizer.init(params), params)
    for flag in (True, None, 0.0, torch.tensor(1.0), torch.tensor(0)):
        with pytest.raises(TypeError, match="finite: found"):
            fa.update_scale(scaler, cast(Any, flag))
        with pytest.raises(TypeError, match="finite: found"):
            fa.maybe_step(optimizer, params, optimizer.init(params), params, cast(Any, flag))
    assert fa.update_scale(scaler, BAD).scale.item() == 32768.0


@pytest.mark.parametrize("dtype, rel", [(torch.float16, 1e-3), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("scale", [65536.0, 2.0**20])
def test_U07_fp16_trainable_parameters(dtype, rel, scale):
    """huggingface/peft#1249: half-precision gradients are unscaled in float32, where 1e-8 is a number."""
    true = [1e-6, 1e-8]
    scaled = fa.ScaledGrads({"w": torch.tensor([g * scale for g in true], dtype=dtype)}, scale)
    for grads in (scaled, fa.accumulate(None, scaled)):
        unscaled, finite = fa.unscale(grads)
        assert finite and unscaled["w"].dtype == torch.float32
        assert unscaled["w"].tolist() == pytest.approx(true, rel=rel)


@pytest.mark.filterwarnings("ignore:Sparse :UserWarning")
@pytest.mark.parametrize("layout", ["coo", "coo half", "csr"])
def test_U08_sparse_gradients(layout):
    """pytorch/pytorch#35810: sparse leaves are refused by name with the remedy, and the remedy gives the value."""
    if layout == "coo half":  # finite duplicates whose sum is not
        leaf = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([4e4, 4e4]).half(), (3,))
    else:
        leaf = torch.sparse_coo_tensor(torch.tensor([[0, 0, 2]]), torch.tensor([8.0, 16.0, 24.0]), (3,))
    leaf = leaf.to_dense()[None].to_sparse_csr() if layout == "csr" else leaf
    tree, optimizer = {"embedding": [leaf]}, fa.sgd(1.0)
    params = {"embedding": [torch.zeros(leaf.shape)]}
    calls = [
        lambda: fa.ScaledGrads(tree, scale=8.0),
        lambda: fa.ScaledGrads(tree, scale=8.0, weight=torch.tensor(2.0)),
        lambda: fa.ScaledGrads(tree, scale=8.0, weight=0.0),
        lambda: fa.all_finite(tree),
        lambda: fa.global_norm(tree),
        lambda: fa.clip(tree, 1.0),
        lambda: fa.maybe_step(optimizer, params, optimizer.init(params), tree, GOOD),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"embedding\.0.*to_dense"):
            call()

    grads, finite = fa.unscale(fa.ScaledGrads({"embedding": [leaf.to_dense()]}, scale=8.0))
    if layout == "coo half":
        assert not finite
    else:
        assert finite and grads["embedding"][0].flatten().tolist() == [3.0, 0.0, 3.0]


@pytest.mark.filterwarnings("ignore:Sparse :UserWarning")
@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("weight", [1.0, 3.0, 0.0, torch.tensor(3.0)], ids=["1", "3", "0", "tensor"])
def test_U08_sparse_gradients__embedding(weight, backend):
    """pytorch/pytorch#35810: what Embedding(sparse=True) gives is refused in the first window, by name."""

    def loss(params: Any, index: Tensor) -> fa.Loss:
        return fa.Loss(torch.nn.functional.embedding(index, params["table"], sparse=True).mean(), weight)

    optimizer, params, index = fa.sgd(1.0), {"table": torch.ones(3, 1)}, torch.tensor([0, 0, 2])
    step = fa.make_step(loss, optimizer, backend=backend)
    with pytest.raises(TypeError, match=r"'table'.*sparse=False"):
        step(fa.init_state(params, optimizer), [index])
    for stage in (fa.unscale, fa.all_finite, fa.global_norm, lambda grads: fa.clip(grads, 1.0)):
        with pytest.raises(TypeError, match=r"'table'.*sparse=False"):
            stage(fa.scale_backward(loss, fa.DynamicScale(), params, index, backend=backend).grads)


class Operators(TorchDispatchMode):
    """Records the float64 tensors that operators give, and the reads of tensors on the host."""

    def __init__(self):
        super().__init__()
        self.float64: set[str] = set()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch_pytree.tree_leaves(result)
        if any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in leaves):
            self.float64.add(str(func))
        if str(func).split(".")[1] in ("_local_scalar_dense", "is_nonzero", "item", "equal"):
            self.reads.append(str(func))
        return result


def run_the_stages(optimizer: Any, params: Any, state: Any, x: Tensor, norm_type: float = 2.0) -> None:
    scaler = fa.DynamicScale(1024.0, growth_interval=1)
    scaled = fa.scale_backward(linear_loss, scaler, params, x, weight=torch.tensor(3.0)).grads
    scaled = fa.accumulate(fa.accumulate(None, scaled), scaled, where=fa.all_finite(scaled))
    fa.clip(scaled, 1.0, norm_type=norm_type)
    grads, finite = fa.unscale(scaled)
    grads, _ = fa.clip(grads, 1.0, norm_type=norm_type)
    fa.maybe_step(optimizer, params, state, grads, finite)
    fa.update_scale(scaler, finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: fa.sgd(0.1, momentum=0.9), lambda: fa.adamw(0.1), lambda: fa.adam(0.1)])
def test_U10_float64_intermediate_breaks_devices_without_float64(monkeypatch, make, dtype):
    """pytorch/pytorch#142397: no stage makes a float64 tensor where no leaf is one and the device has none."""
    assert scalar_dtype(torch.device("mps")) == torch.float32
    for name in ("optim.adam", "optim.kernels", "stages.clip", "engine.norm"):
        module = importlib.import_module(f"functional_amp.{name}")
        monkeypatch.setattr(module, "scalar_dtype", lambda device: torch.float32)
    params = {"w": torch.ones(2, dtype=dtype)}
    state = make().init(params)
    with Operators() as seen:
        run_the_stages(make(), params, state, torch.tensor([1.0, 1e9]))
        torch.zeros(1).double()
    assert seen.float64 == {"aten._to_copy.default"}  # the control, and nothing else


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
@pytest.mark.parametrize("leaves", [1, 500])
def test_U12_amp_kernels_missing_on_cpu(dtype, leaves):
    """pytorch/pytorch#111650: a CPU does all dtypes, and large trees."""
    tree = [torch.tensor([8.0, 16.0], dtype=dtype).repeat(500) for _ in range(leaves)]
    grads, finite = fa.unscale(fa.ScaledGrads(tree, scale=8.0))
    kept = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    expected = torch.tensor([1.0, 2.0], dtype=kept).repeat(500)
    assert finite
    for grad in grads:
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)
    tree[-1] = tree[-1].clone().fill_(math.nan)
    assert not fa.all_finite(fa.ScaledGrads(tree, scale=8.0))


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("true", [1e-8, 5e-9, 2e-8])
def test_U13_fp16_without_loss_scaling_loses_small_gradients(true, backend):
    """engichang1467/Open-Rig3R#35: the gradient that flushes to zero at scale 1 is there at 65536."""
    params = {"w": torch.ones(3, dtype=torch.float16)}

    def loss(params: Any) -> Tensor:
        return ((params["w"] * 1).float() * true).sum()

    lost = fa.scale_backward(loss, fa.NoScale(), params, backend=backend).grads
    kept = fa.scale_backward(loss, fa.DynamicScale(65536.0), params, backend=backend).grads
    assert fa.unscale(lost).grads["w"].tolist() == [0.0] * 3
    assert fa.unscale(kept).grads["w"].tolist() == pytest.approx([true] * 3, rel=1e-3)


@pytest.mark.parametrize("true, attempts, scale", [(10.0, 5, 4096.0), (0.5, 1, 65536.0), (2.0, 3, 16384.0)])
def test_U16_replay_the_same_batch_with_a_lower_scale(true, attempts, scale):
    """NVIDIA/apex#114: the state is a value, so a batch can be replayed, dropout included, until it fits."""

    def loss(params: Any, x: Tensor) -> Tensor:
        return linear_loss(params, torch.dropout(x, 0.5, True))  # what is kept is doubled

    optimizer = fa.sgd(2.0**-8)
    step = fa.make_step(loss, optimizer)
    state = fa.init_state({"w": torch.zeros(32, dtype=torch.float16)}, optimizer)
    batch, tried, seen = torch.full((32,), true / 2), 0, []
    while True:
        tried += 1
        after, metrics = step(state, [batch], seed=3)
        seen.append(after.params["w"])
        if metrics.finite:
            break
        state = dataclasses.replace(state, scaler=after.scaler)

    with torch.random.fork_rng():
        torch.manual_seed(3)
        gradient = torch.dropout(batch, 0.5, True)
    assert sorted(set(gradient.tolist())) == [0.0, true]
    assert (tried, metrics.scale.item()) == (attempts, scale)
    assert all(not params.any() for params in seen[:-1])
    assert torch.equal(after.params["w"], (-gradient * 2.0**-8).half())
    assert (after.applied.item(), after.skipped.item()) == (1, 0)
