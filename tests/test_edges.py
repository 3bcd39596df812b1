"""Edges that a check of the suite by mutation found untested."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_amp as fa


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_loss_comes_back_as_float32(dtype: torch.dtype, backend: Any):
    out = fa.scale_backward(lambda p: (p * p).sum().to(dtype), fa.StaticScale(2.0**15), torch.ones(3), backend=backend)
    assert out.loss.dtype == torch.float32 and out.loss.item() == 3.0
    assert out.grads.tree.tolist() == [2.0**16] * 3


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("weight", [4096, torch.tensor(4096)])
def test_a_weight_is_multiplied_into_half_precision_gradients_in_float32(weight: Any, backend: Any):
    params = torch.ones(2, dtype=torch.float16)
    out = fa.scale_backward(lambda p: (p * 61).sum().float(), fa.NoScale(), params, weight=weight, backend=backend)
    assert out.grads.tree.dtype == torch.float32
    assert out.grads.tree.tolist() == [61.0 * 4096] * 2  # float16 ends at 65504


@pytest.mark.parametrize("donate", [False, True])
def test_a_scale_times_weight_beyond_float32_is_an_overflow(donate: bool):
    grads = fa.ScaledGrads(torch.ones(2), scale=2.0**120, weight=2.0**20)
    assert not fa.unscale(grads).finite and not fa.all_finite(grads)
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: fa.Loss((p * x).sum(), 2.0**20), optimizer, donate=donate)
    state, metrics = step(fa.init_state(torch.ones(2), optimizer, fa.StaticScale(2.0**120)), [torch.tensor(1e-30)])
    assert not metrics.finite and state.skipped.item() == 1 and state.params.tolist() == [1.0, 1.0]


def test_a_derivative_through_a_window_whose_units_vanish_is_that_of_the_updates_before():
    optimizer = fa.adam(0.1)
    step = fa.make_step(lambda p, batch: fa.Loss((p * batch[0]).sum(), batch[1]), optimizer)

    def end(x: torch.Tensor, *, vanishing: bool) -> torch.Tensor:
        state = fa.init_state(torch.ones(2), optimizer, fa.StaticScale(2.0**-100))
        state, _ = step(state, [(x, torch.tensor(1.0))])
        if vanishing:
            state, _ = step(state, [(x, torch.tensor(1e-30))])  # times the scale it is no float32
        return (state.params * state.opt_state.exp_avg_sq).sum()

    x = torch.tensor([1.0, -2.0])
    assert end(x, vanishing=True).item() == end(x, vanishing=False).item()
    found, expected = (torch.func.grad(lambda x, v=v: end(x, vanishing=v))(x) for v in (True, False))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert (expected != 0).all()
