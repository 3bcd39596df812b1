"""Faults hunted in donation, the fused kernels and their plans, and the one-read norm."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.optim.fused import Plan
from functional_amp.testing import same_bits
from tests.test_donate import Handing
from tests.test_fuzz import ODD, says_so
from tests.test_hunts import OPTIMIZERS, donations, optimizers, run
from tests.test_hunts_numbers import float64_norm

GOOD = torch.tensor(True)


@donations
def test_a_backward_inside_the_loss_function_adds_nothing(donate):
    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        (3 * p).sum().backward()
        return (p * x).sum()

    optimizer = fa.sgd(1.0)
    step = fa.make_step(loss_fn, optimizer, backend="autograd", donate=donate)
    state, _ = step(fa.init_state(torch.zeros(2), optimizer, fa.StaticScale(8.0)), [torch.tensor([1.0, 2.0])] * 2)
    assert state.params.tolist() == [-1.0, -2.0]


def test_numbers_in_an_optimizer_state_that_never_change_may_stay_numbers():
    optimizer = fa.Optimizer(
        lambda p: {"lr": 0.5, "seen": torch.zeros(2)},
        lambda g, s, p: (-s["lr"] * g, {**s, "seen": s["seen"] + 1}),
    )
    for donate in (False, True):
        step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, donate=donate)
        state, _ = run(step, fa.init_state(torch.zeros(2), optimizer), [[torch.ones(2)]] * 2)
        assert state.params.tolist() == [-1.0, -1.0] and state.opt_state["seen"].tolist() == [2.0, 2.0]


def test_buffers_that_do_not_fit_cost_a_donated_state_nothing():
    optimizer = fa.adamw(1.0)
    step = fa.make_step(lambda p, x, b: fa.Loss((p * x).sum(), buffers={"m": torch.zeros(3)}), optimizer, donate=True)
    state = step.accumulate(fa.init_state(torch.zeros(2), optimizer, buffers={"m": torch.ones(2)}), torch.ones(2))
    with pytest.raises(ValueError, match="buffers"):
        step.update(state)
    assert state.params.tolist() == [0.0, 0.0] and state.buffers["m"].tolist() == [1.0, 1.0]


class Giving(Handing):
    """Its gradient is a tensor of the user's, the very one."""

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return ctx.given, None


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("length", [1, 2])
@optimizers
def test_a_gradient_that_is_a_users_tensor_is_not_written_to(optimizer, length, inference):
    rule, given = OPTIMIZERS[optimizer](0.1), torch.tensor([2.0, 4.0])
    step = fa.make_step(lambda p, x: Giving.apply(p, x), rule, max_norm=0.1, donate=True)
    state = fa.init_state(torch.ones(2), rule, fa.StaticScale(4.0))
    with torch.inference_mode(inference):
        step(state, [given] * length)
    assert given.tolist() == [2.0, 4.0]


def total(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.stack([leaf.sum() for leaf in p.values()]).sum() * x


@donations
@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"a": torch.zeros(3), "c": torch.zeros(3)}, ValueError),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, ValueError),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(3)}, ValueError),
        ({"a": torch.zeros(3).double(), "b": torch.zeros(3)}, TypeError),
    ],
)
def test_a_window_of_other_parameters_is_refused(params, error, donate):
    optimizer = fa.sgd(1.0)
    step = fa.make_step(total, optimizer, donate=donate)
    state = fa.init_state({"a": torch.zeros(3), "b": torch.zeros(3)}, optimizer, fa.NoScale())
    state = dataclasses.replace(step.accumulate(state, torch.tensor(1.0)), params=params)
    with pytest.raises(error):
        step.accumulate(state, torch.tensor(3.0))
    assert state.window is not None and state.window.grads.tree["b"].tolist() == [1.0, 1.0, 1.0]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of kinds of tensors that torch calls a prototype
@donations
@pytest.mark.parametrize("what", ODD)
def test_a_state_with_an_odd_field_works_or_is_refused(what, donate):
    optimizer = fa.adam(0.1)
    step = fa.make_step(lambda p, x, *buffers: fa.Loss(torch.zeros(()), weight=0), optimizer, donate=donate)
    for field in ("params", "opt_state", "scaler", "buffers", "window"):
        for call in (lambda s: step(s, [0, 1]), lambda s: step.scan(s, torch.zeros(2)), step.update):
            state = fa.init_state({"w": torch.ones(2, 3), "b": [torch.ones(3)]}, optimizer, fa.DynamicScale(8.0))
            state = dataclasses.replace(step.accumulate(state, 0), **{field: ODD[what]()})
            says_so(lambda s=state, c=call: c(s), field)
    for field in ("grads", "buffers", "params"):
        for call in (lambda s: step(s, [0, 1]), step.update):
            state = step.accumulate(fa.init_state({"w": torch.ones(2, 3)}, optimizer), 0)
            window: Any = state.window
            state = dataclasses.replace(state, window=dataclasses.replace(window, **{field: ODD[what]()}))
            says_so(lambda s=state, c=call: c(s), f"window.{field}")


# Kernels


@donations
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "dampening"])
def test_a_float64_gradient_is_unscaled_before_it_is_rounded_to_float32(optimizer, donate):
    rule = OPTIMIZERS[optimizer](1e-34)
    step = fa.make_step(lambda p, x: (p * x).sum(), rule, compute_dtype=torch.float64, donate=donate)
    state, metrics = step(
        fa.init_state(torch.zeros(2), rule, fa.StaticScale(2.0**16)), [torch.tensor([1e34, 2e33]).double()]
    )
    expected = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    expected.grad = torch.tensor([1e34, 2e33]).double()
    theirs = {"momentum": {"momentum": 0.9, "nesterov": True}, "dampening": {"momentum": 0.9, "dampening": 0.1}}
    torch.optim.SGD([expected], 1e-34, **theirs.get(optimizer, {})).step()
    assert metrics.finite
    torch.testing.assert_close(state.params.double(), expected.detach(), rtol=1e-6, atol=0)


@optimizers
@pytest.mark.parametrize("carried", [False, True])
@pytest.mark.parametrize("where", ["params", "grads", "opt_state"])
def test_lazily_negated_tensors_are_their_values(where, carried, optimizer):
    rule, plain = OPTIMIZERS[optimizer](0.1), torch.tensor([1.0, -2.0])
    negated = torch._neg_view(-plain)

    def update(params: Tensor, grads: Tensor, slot: Tensor) -> Any:
        opt_state = rule.init(params)
        opt_state = type(opt_state)(opt_state[0], *[slot if isinstance(old, Tensor) else old for old in opt_state[1:]])
        return fa.maybe_step(rule, params, opt_state, fa.ScaledGrads(grads, 4.0) if carried else grads, GOOD)

    given = {"params": plain, "grads": plain, "slot": plain.abs()}
    expected = update(*given.values())
    given |= {"slot": torch._neg_view(-plain.abs())} if where == "opt_state" else {where: negated}
    assert same_bits(update(*given.values()), expected)


@donations
@optimizers
def test_a_step_on_the_meta_device_gives_shapes(optimizer, donate):
    rule = OPTIMIZERS[optimizer](0.1)
    step = fa.make_step(lambda p, x: (p * x).sum(), rule, max_norm=1.0, donate=donate)
    x = torch.ones(2, device="meta")
    state, metrics = run(step, fa.init_state(x, rule), [[x, x], [x]])
    assert state.params.is_meta and state.params.shape == (2,) and metrics[-1].grad_norm.is_meta


def test_a_plan_that_another_thread_replaces_meanwhile_is_not_taken_for_ones_own(monkeypatch):
    optimizer = fa.adamw(0.1)
    params = {"a": torch.ones(2), "b": torch.ones(2)}
    opt_state, grads = optimizer.init(params), {"a": torch.ones(2), "b": torch.ones(2)}
    expected = fa.maybe_step(optimizer, params, opt_state, grads, GOOD)
    fits = Plan.fits

    def fits_and_yields(plan: Any, flats: Any) -> bool:
        found = fits(plan, flats)
        monkeypatch.setattr(Plan, "fits", fits)
        fa.maybe_step(optimizer, params, opt_state, {"a": torch.ones(2), "b": None}, GOOD)  # the other thread
        return found

    monkeypatch.setattr(Plan, "fits", fits_and_yields)
    assert same_bits(fa.maybe_step(optimizer, params, opt_state, grads, GOOD), expected)


# The norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["every other", "a part of each row", "transposed part"])
def test_the_norm_of_a_strided_leaf_is_as_exact_as_that_of_a_contiguous_one(layout, dtype):
    whole = (torch.rand(2048, 2048, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    leaf = {"every other": whole[:, ::2], "a part of each row": whole[:, :1000], "transposed part": whole[:, :1000].t()}
    found = fa.global_norm([leaf[layout]]).item()
    torch.testing.assert_close(found, float64_norm([leaf[layout]]), rtol=5e-5, atol=0)


def test_the_norm_of_an_expanded_leaf_does_not_stop_at_two_to_the_24():
    leaf = torch.ones(1).expand(2**25)
    torch.testing.assert_close(fa.global_norm([leaf]).item(), 2**12.5, rtol=1e-5, atol=0)
