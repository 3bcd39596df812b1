"""What a loss function does to what it is given: followed as an imperative loop follows it, or refused by name."""

from __future__ import annotations

import dataclasses

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
