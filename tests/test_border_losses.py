"""What a loss function does to what it is given: followed as an imperative loop follows it, or refused by name."""

from __future__ import annotations

import dataclasses
import random
from collections import UserDict

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import functional_amp as fa

BACKENDS = [{}, {"backend": "func"}, {"backend": "autograd"}, {"donate": True}]
COMPILED = {"compile": {"backend": "aot_eager"}}


def clamped(params, x):
    with torch.no_grad():
        params["w"].clamp_(-0.5, 0.5)
    return (params["w"] * x).square().sum()


def renormed(params, x):
    return F.embedding(x.long(), params["w"], max_norm=1.0).sum()


@pytest.mark.parametrize("options", [*BACKENDS, COMPILED])
def test_a_loss_that_writes_in_place_to_a_parameter_is_refused_by_its_name(options):
    step = fa.make_step(clamped, fa.sgd(0.1), **options)
    state = fa.init_state({"b": torch.ones(1), "w": torch.ones(3)}, fa.sgd(0.1))
    with pytest.raises(Exception, match="loss_fn: found a write in place to the parameters"):
        step(state, [torch.ones(3)])


@pytest.mark.parametrize("options", BACKENDS)
def test_an_embedding_that_renorms_its_table_in_place_is_refused(options):
    step = fa.make_step(renormed, fa.sgd(0.1), **options)
    state = fa.init_state({"w": torch.full((2, 3), 4.0)}, fa.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"write in place to the parameters at \['w'\]"):
        step(state, [torch.ones(1)])


@pytest.mark.parametrize("backend", ["auto", "func", "autograd"])
def test_scale_backward_refuses_a_write_to_a_parameter_frozen_or_not(backend):
    def loss_fn(params, x):
        return clamped(params, x) + params["b"].sum()

    params = {"b": torch.ones(1), "w": torch.ones(3)}
    frozen = fa.freeze(loss_fn, lambda path, leaf: path == "w")
    for function in (loss_fn, frozen) if backend == "autograd" else (loss_fn,):
        with pytest.raises(RuntimeError, match=r"write in place to the parameters at \['w'\]"):
            fa.scale_backward(function, fa.NoScale(), params, torch.ones(3), backend=backend)


@pytest.mark.parametrize("options", BACKENDS)
def test_parameters_that_are_clamped_between_updates_follow_the_imperative_loop(options):
    def loss_fn(params, x):
        return (params["w"] * x).square().sum()

    step = fa.make_step(loss_fn, fa.sgd(0.1), **options)
    state = fa.init_state({"w": torch.tensor([1.0, -2.0])}, fa.sgd(0.1))
    w = torch.tensor([1.0, -2.0], requires_grad=True)
    sgd = torch.optim.SGD([w], 0.1)
    for _ in range(3):
        state, _ = step(state, [torch.ones(2)])
        state = dataclasses.replace(state, params={"w": state.params["w"].clamp(-0.5, 0.5)})
        sgd.zero_grad()
        w.square().sum().backward()
        sgd.step()
        with torch.no_grad():
            w.clamp_(-0.5, 0.5)
    assert torch.equal(state.params["w"], w.detach())


class OldStyle(torch.autograd.Function):
    """The identity, which torch.func can't differentiate: it has no `setup_context`."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


def halves(params, batch):
    batch["x"] = batch["x"] / 2
    return (OldStyle.apply(params["w"]) * batch["x"]).square().sum()


def pops(params, batch):
    labels = batch.pop("y")
    return (OldStyle.apply(params["w"]) * batch["x"] - labels).square().sum()


def draws(params, batch):
    factor = random.random() + np.random.rand()
    return (OldStyle.apply(params["w"]) * batch["x"] * factor).square().sum()


def appends(params, batch):
    batch["steps"].append(batch["x"])
    return (OldStyle.apply(params["w"]) * sum(batch["steps"])).square().sum()


@pytest.mark.filterwarnings("ignore:backend='auto'")
@pytest.mark.parametrize("container", [dict, UserDict])
@pytest.mark.parametrize("loss_fn", [halves, pops, draws, appends])
@pytest.mark.parametrize("options", [{}, {"backend": "autograd"}, {"donate": True}])
def test_a_loss_that_changes_its_batch_or_draws_is_as_in_the_imperative_loop_whoever_differentiates(
    options, loss_fn, container
):
    if loss_fn is appends and container is UserDict:
        pytest.skip("what is inside a container of another kind is its own")

    def batch():
        return container({"x": torch.arange(3.0), "y": torch.ones(3), "steps": [torch.ones(3)]})

    def seed():
        random.seed(0)
        np.random.seed(0)

    seed()
    w = torch.ones(3, requires_grad=True)
    loss_fn({"w": w}, batch()).backward()
    assert w.grad is not None
    drawn = random.random(), np.random.rand()
    seed()
    step = fa.make_step(lambda params, batch: loss_fn(params, batch), fa.sgd(0.5), **options)
    given = batch()
    state, _ = step(fa.init_state({"w": torch.ones(3)}, fa.sgd(0.5), fa.NoScale()), [given])
    assert torch.equal(state.params["w"], 1 - 0.5 * w.grad)
    assert drawn == (random.random(), np.random.rand())
    assert set(given) == {"x", "y", "steps"} and len(given["steps"]) == 1
    assert torch.equal(given["x"], torch.arange(3.0))


@pytest.mark.filterwarnings("ignore:backend='auto'")
def test_a_loss_that_draws_in_each_call_is_followed_where_its_limit_shows_late():
    def loss_fn(params, x):
        w = OldStyle.apply(params["w"]) if x.sum() > 3 else params["w"]
        return (w * x * random.random()).square().sum()

    random.seed(0)
    factors = [random.random() for _ in range(3)]
    random.seed(0)
    step = fa.make_step(loss_fn, fa.sgd(0.1), backend="auto")
    state, w = fa.init_state({"w": torch.ones(3)}, fa.sgd(0.1), fa.NoScale()), torch.ones(3)
    for x, factor in zip((torch.ones(3), torch.ones(3), torch.full((3,), 2.0)), factors, strict=True):
        state, _ = step(state, [x])
        w = w - 0.1 * 2 * w * (x * factor).square()
    torch.testing.assert_close(state.params["w"], w)


def counts(params, x, buffers):
    buffers["n"] = buffers["n"] + x.mean()
    return fa.Loss((params["w"] * x).square().sum(), buffers=buffers)


def counts_silently(params, x, buffers):
    buffers["n"] = buffers["n"] + x.mean()
    return (params["w"] * x).square().sum()


@pytest.mark.parametrize("loss_fn", [counts, counts_silently])
@pytest.mark.parametrize(
    "options",
    [
        *BACKENDS,
        pytest.param(COMPILED, marks=pytest.mark.slow),
        pytest.param({**COMPILED, "backend": "autograd"}, marks=pytest.mark.slow),
    ],
)
def test_a_loss_may_assign_to_the_buffers_that_it_is_given_and_a_skip_keeps_them(options, loss_fn):
    step = fa.make_step(loss_fn, fa.sgd(0.1), **options)
    buffers = {"n": torch.tensor(0.0), "m": torch.ones(2)}
    state = fa.init_state({"w": torch.ones(3)}, fa.sgd(0.1), fa.DynamicScale(8.0), buffers)
    for x, n in ((1.0, 1.0), (float("nan"), 1.0), (2.0, 3.0)):
        before = {} if options.get("donate") else state.buffers
        held = dict(before)
        state, _ = step(state, [torch.full((3,), x)])
        assert state.buffers["n"].item() == n
        assert all(before[name] is leaf for name, leaf in held.items())
    assert torch.equal(state.buffers["m"], torch.ones(2))


def test_scale_backward_leaves_the_containers_of_the_caller_alone():
    buffers = {"n": torch.tensor(0.0)}
    _, _, (_, new) = fa.scale_backward(counts, fa.NoScale(), {"w": torch.ones(3)}, torch.ones(3), buffers)
    assert buffers["n"].item() == 0.0
    assert new["n"].item() == 1.0
