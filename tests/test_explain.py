"""explain names the culprit of a window that was not finite, and the scale that works."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

import functional_amp as fa
from functional_amp.debug import Explanation, Range, explain
from tests.explained import check_answers, explained
from tests.plants import PLANTS, Case, Plant

BACKENDS = ("autograd", "func")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_every_planted_fault_is_named(plant: Plant, backend: Any) -> None:
    if backend not in plant.backends:
        pytest.skip("torch.func can not differentiate it")
    torch.manual_seed(0)
    case = plant.build()
    check_answers(plant, case, explained(case, backend), backend)


def state_of(params: Any, scale: float) -> fa.TrainState:
    return fa.init_state(params, fa.sgd(0.1), fa.StaticScale(scale))


def overflowing(params: Any, x: Tensor) -> Tensor:
    return (params["w"].half() * x.half()).float().sum()


def test_every_field_of_an_overflow_in_the_backward() -> None:
    window = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -7.0])]
    why = explain(overflowing, state_of({"w": torch.ones(2)}, 2.0**14), window)
    assert why == Explanation(
        found=True,
        stage="backward",
        scale=2.0**14,
        loss=-4.0,
        advice=why.advice,
        micro_batch=1,
        operator="mul",
        node="MulBackward0",
        file=__file__,
        line=overflowing.__code__.co_firstlineno + 1,
        inputs=(
            Range("self", torch.float16, (2,), 2.0**14, 2.0**14, 0, 0),
            Range("other", torch.float16, (2,), -7.0, 3.0, 0, 0),
        ),
        output=Range("output", torch.float16, (2,), 3 * 2.0**14, 3 * 2.0**14, 0, 1),
        leaves=("w",),
        largest_good_scale=2.0**13,  # 7 * 2**13 = 57344 fits float16
    )
    assert "2**13 works and 2**14 does not" in why.advice


SCALERS: dict[str, fa.DynamicScale | fa.StaticScale | fa.NoScale] = {
    "torch": fa.DynamicScale(2.0**19),
    "slow": fa.DynamicScale(2.0**19, backoff_factor=0.9),
    "fast": fa.DynamicScale(2.0**19, backoff_factor=2.0**-4),
    "patient": fa.DynamicScale(2.0**19, hysteresis=3),
    "megatron": fa.DynamicScale.megatron(2.0**19),
    "deepspeed": fa.DynamicScale.deepspeed(2.0**19),
    "apex": fa.DynamicScale.apex(2.0**19),
    "jmp": fa.DynamicScale.jmp(2.0**19),
    "flax": fa.DynamicScale.flax(2.0**19),
    "a floor above it": fa.DynamicScale(2.0**19, min_scale=2.0**14),
    "static": fa.StaticScale(2.0**19),
}


@pytest.mark.parametrize("name", SCALERS)
def test_the_windows_that_a_scaler_skips_on_its_way_are_those_of_the_step(name: str) -> None:
    scaler, window = SCALERS[name], [torch.tensor([3.0, -7.0])]
    step = fa.make_step(overflowing, fa.sgd(0.0), backend="autograd")
    before = fa.init_state({"w": torch.ones(2)}, fa.sgd(0.0), scaler)
    state, metrics = step(before, window)
    advice = [explain(step, before, window).advice]
    if state.scaler.scale < metrics.scale:  # with hysteresis it may not have moved yet
        advice.append(explain(step, state, window, scale=metrics.scale).advice)
    for _ in range(100):
        if metrics.finite:
            break
        state, metrics = step(state, window)
    if metrics.finite:
        counts = [re.search(r"This DynamicScale gets there in at most (\d+) skipped window", text) for text in advice]
        found = {int(count[1]) for count in counts if count is not None}
        skipped = int(state.skipped)  # between the powers of two a scale may work a window earlier
        assert len(counts) == len(advice) and found == ({skipped + 1} if name == "slow" else {skipped})
        return
    remedy = "dataclasses.replace(state, scaler=DynamicScale(8192))"
    assert all(f"This {type(scaler).__name__} does not get there by itself: {remedy}." in text for text in advice)
    remedied = dataclasses.replace(state, scaler=fa.DynamicScale(8192))
    assert step(remedied, window)[1].finite


def test_every_field_of_a_fault_in_the_forward() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params * x).log().mean()

    why = explain(loss_fn, state_of(torch.ones(2, 2), 8.0), [torch.tensor([[1.0, 0.0], [2.0, 4.0]])])
    assert why == Explanation(
        found=True,
        stage="forward",
        scale=8.0,
        loss=-float("inf"),
        advice=why.advice,
        micro_batch=0,
        operator="log",
        file=__file__,
        line=loss_fn.__code__.co_firstlineno + 1,
        inputs=(Range("self", torch.float32, (2, 2), 0.0, 4.0, 0, 0),),
        output=Range("output", torch.float32, (2, 2), 0.0, torch.tensor(4.0).log().item(), 0, 1),
        leaves=("<root>",),  # 0 * inf through the product
        largest_good_scale=None,
    )
    assert "log of 0 is -inf" in why.advice


def test_it_prints_as_a_table_and_as_a_line() -> None:
    why = explain(overflowing, state_of({"w": torch.ones(2)}, 2.0**14), [torch.tensor([3.0, -7.0])])
    rows = dict(line.split(maxsplit=1) for line in str(why).splitlines())
    assert why.summary == "backward, micro-batch 0: mul; a scale of 2**13 works"
    assert rows["window"] == why.summary and rows["scale"] == "2**14"
    assert rows["line"].endswith(f"test_explain.py:{why.line}") and rows["operator"] == "mul"
    assert rows["gradients"] == "1 not finite: w" and rows["advice"] == why.advice
    assert "module" not in rows  # it ran in none
    assert max(map(len, str(why).splitlines())) < 400


def test_a_finite_window_is_not_reproduced_and_the_advice_exists() -> None:
    why = explain(overflowing, state_of({"w": torch.ones(2)}, 1.0), [torch.ones(2)])
    assert (why.found, why.stage, why.largest_good_scale) == (False, "not reproduced in eager", None)
    assert "emulate_precision_casts" in str(why)
    assert inductor_config.emulate_precision_casts is False


@pytest.mark.slow
def test_a_difference_that_only_the_compiler_makes_goes_with_the_option_that_is_named(fresh_dynamo: None) -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        narrow = (params * x).half()
        slightly_less = (narrow * 0.9999 - narrow).float()  # 0 in float16, -1e-4 where the product stays in float32
        return (slightly_less + 5e-5).sqrt().mean()

    state, window = state_of(torch.ones(4), 8.0), [torch.ones(4)]
    step = fa.make_step(loss_fn, fa.sgd(0.1), compile=True)
    _, metrics = step(state, window)
    assert not metrics.finite
    why = explain(step, state, window, scale=metrics.scale)
    assert (why.found, why.stage) == (False, "not reproduced in eager")
    remedy = {"options": {"emulate_precision_casts": True}}
    assert f"compile={remedy}" in why.advice
    _, metrics = dataclasses.replace(step, compile=remedy)(state, window)
    _, expected = dataclasses.replace(step, compile=False)(state, window)
    assert metrics.finite and torch.equal(metrics.loss, expected.loss)


def test_a_step_is_explained_with_its_own_options() -> None:
    state, window = state_of({"w": torch.ones(2)}, 2.0**14), [torch.full((2,), 7.0)]
    step = fa.make_step(overflowing, fa.sgd(0.1), compute_dtype=torch.float16, backend="autograd")
    assert explain(step, state, window) == explain(overflowing, state, window, compute_dtype=torch.float16)
    with pytest.raises(ValueError, match="leave them out"):
        explain(step, state, window, backend="func")


def test_a_scan_is_looked_at_from_outside() -> None:
    from torch._higher_order_ops import scan

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        last, _ = scan(lambda carry, y: (carry * y, carry * y), params, x)
        return last.exp().sum()

    why = explain(loss_fn, state_of(torch.full((2,), 10.0), 1.0), [torch.full((3, 2), 10.0)])
    assert (why.stage, why.operator) == ("forward", "exp")


def test_the_double_backward_of_a_gradient_penalty() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: (x * params).sqrt().sum())(x)
        return (slope.norm() - 1) ** 2

    for backend in BACKENDS:
        why = explain(loss_fn, state_of(torch.ones(3), 1.0), [torch.tensor([0.0, 1.0, 2.0])], backend=backend)
        assert (why.stage, why.operator, why.node) == ("forward", "div", "SqrtBackward0")


@pytest.mark.slow
def test_the_page_says_what_detect_anomaly_finds() -> None:
    raised = named = total = 0
    for plant in PLANTS:
        torch.manual_seed(0)
        case = plant.build()
        why = explained(case, plant.backends[0])
        if why.stage not in ("input", "forward", "backward"):
            continue
        message, trace = anomaly(case)
        total += 1
        raised += "nan values" in message
        named += "nan values" in message and f'{Path(why.file).name}", line {why.line}' in trace
    page = (Path(__file__).parent.parent / "docs" / "falling.md").read_text()
    assert f"raises for {raised} of {total} and" in " ".join(page.split())
    assert f"line at fault for {named};" in " ".join(page.split())


def anomaly(case: Case) -> tuple[str, str]:
    """What torch's anomaly mode raises for a window, and the stack of the forward that it prints."""
    params, buffers = case.params, case.buffers
    params = params if case.compute_dtype is None else fa.cast_floating(params, case.compute_dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.autograd.detect_anomaly():
                for batch in case.window:
                    given = (batch,) if buffers is None else (batch, buffers)
                    scaler = fa.StaticScale(case.scale)
                    out = fa.scale_backward(case.loss_fn, scaler, params, *given, backend="autograd")
                    buffers = None if buffers is None else out.aux[1]
        except RuntimeError as error:
            return str(error), "".join(str(warning.message) for warning in caught)
    return "", ""


@torch.library.custom_op("functional_amp_tests::divide_into", mutates_args={"out"})
def divide_into(out: Tensor, x: Tensor) -> None:
    out.copy_(x / 0)


def filled_by_a_custom_operator(params: Tensor, x: Tensor) -> Tensor:
    out = torch.empty(2)
    divide_into(out, x)
    return (params * out).sum()


def given_an_output(params: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        out = torch.empty(2)
        torch.log(x - x, out=out)
    return (params * out).sum()


def slope_in_forward_mode(params: Tensor, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda y: (y * params).sqrt().sum(), (x - x,), (torch.ones(2),))[1]


def slopes_of_each_sample(params: Tensor, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(lambda y: (y * params).sqrt().sum()))(torch.stack([x, x - x])).sum()


def multiplied_by_an_infinite_number(params: Tensor, x: Tensor) -> Tensor:
    return (params * x * torch.inf).sum()


def mask_that_is_multiplied(params: Tensor, x: Tensor) -> Tensor:
    mask = torch.full((2,), -torch.inf)
    return (x * params + mask) @ x


def parts_of_one_memory(params: Tensor, x: Tensor) -> Tensor:
    out = torch.zeros(2)
    out[0] = (params * 100 * x).exp()[0]
    out[1] = (params * x / 0)[1].detach()
    return out[0]


def many_steps(params: Tensor, x: Tensor) -> Tensor:
    hidden = params * x
    for _ in range(300):
        hidden = hidden * 1.5
    return hidden.sum()


CULPRITS = {
    filled_by_a_custom_operator: "divide_into",
    given_an_output: "log",
    slope_in_forward_mode: "div",
    slopes_of_each_sample: "div",
    multiplied_by_an_infinite_number: "mul",
    mask_that_is_multiplied: "full",
    parts_of_one_memory: "exp",
    many_steps: "mul",
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's, in forward mode
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss_fn", CULPRITS, ids=lambda loss_fn: loss_fn.__name__)
def test_the_culprit_of_an_unusual_loss(loss_fn: Any, backend: Any) -> None:
    why = explain(loss_fn, state_of(torch.ones(2), 1.0), [torch.ones(2)], backend=backend)
    assert (why.stage, why.operator) == ("forward", CULPRITS[loss_fn])
    first = loss_fn.__code__.co_firstlineno
    assert why.line is not None and first < why.line <= first + 5
