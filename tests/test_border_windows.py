"""An open window whose parameters, or whose step, are replaced: the next micro-batch is given what there is now."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

import functional_amp as fa

BF16 = torch.bfloat16
RUNS = [{}, {"donate": True}, pytest.param({"compile": {"backend": "aot_eager"}}, marks=pytest.mark.slow)]


def quadratic(params, x):
    return (params["w"].float() * x).square().sum()


def opened(step, w=1.0):
    state = fa.init_state({"n": torch.zeros(1, dtype=torch.int32), "w": torch.full((1,), w)}, fa.sgd(0.1), fa.NoScale())
    return step.accumulate(state, torch.ones(1))


def with_w(state, w):
    return dataclasses.replace(state, params={**state.params, "w": torch.full((1,), w)})


@pytest.mark.parametrize("options", RUNS)
@pytest.mark.parametrize("compute_dtype", [None, BF16])
def test_parameters_replaced_in_an_open_window_are_those_of_its_next_micro_batch(compute_dtype, options):
    step = fa.make_step(quadratic, fa.sgd(0.1), compute_dtype=compute_dtype, **options)
    state, metrics = step.update(step.accumulate(with_w(opened(step), 3.0), torch.ones(1)))
    assert metrics.loss.item() == (1.0 + 9.0) / 2
    torch.testing.assert_close(state.params["w"], torch.full((1,), 3.0 - 0.1 * (2.0 + 6.0) / 2))
    state, metrics = step(with_w(opened(step), 3.0), [torch.ones(1), torch.ones(1)])
    torch.testing.assert_close(metrics.loss, torch.tensor((1.0 + 9.0 + 9.0) / 3))


def test_the_copies_of_a_window_are_made_once_and_those_of_a_copied_state_are_kept():
    step = fa.make_step(quadratic, fa.sgd(0.1), compute_dtype=BF16)
    state = opened(step)
    assert state.window is not None
    after = step.accumulate(state, torch.ones(1))
    assert after.window is not None
    assert after.window.params["w"] is state.window.params["w"]
    loaded = copy.deepcopy(state)
    after = step.accumulate(loaded, torch.ones(1))
    assert loaded.window is not None and after.window is not None
    assert after.window.params["w"] is loaded.window.params["w"]


@pytest.mark.parametrize("options", RUNS)
@pytest.mark.parametrize("dtypes", [(None, BF16), (BF16, None), (BF16, torch.float16)])
def test_a_compute_dtype_that_is_replaced_in_an_open_window_is_that_of_its_next_micro_batch(dtypes, options):
    w = 1.001  # 1 in bfloat16, another number in float16
    first, second = (fa.make_step(quadratic, fa.sgd(0.1), compute_dtype=dtype, **options) for dtype in dtypes)
    _, metrics = second.update(second.accumulate(opened(first, w), torch.ones(1)))
    seen = [torch.full((1,), w).to(dtype or torch.float32).float().square().sum() for dtype in dtypes]
    torch.testing.assert_close(metrics.loss, (seen[0] + seen[1]) / 2, rtol=1e-6, atol=0)
