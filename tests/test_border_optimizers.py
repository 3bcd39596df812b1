"""What an optimizer does to what it is given: a skipped window is none, whatever it assigns, or it is refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import functional_amp as fa
from functional_amp.tree import flatten

NAN, ONES = torch.full((3,), float("nan")), torch.ones(3)


@dataclass
class Moments:
    m: Any


fa.register(Moments, ("m",))


def zeros(params):
    return {name: torch.zeros_like(leaf) for name, leaf in params.items()}


def in_dict(grads, state, params):
    for name in state:
        state[name] = 0.9 * state[name] + grads[name]
    return {name: -0.1 * m for name, m in state.items()}, state


def heavy_ball(grads, state, params):
    in_dict(grads, state, params)
    return dict(state), state


def in_list(grads, state, params):
    state[0] = 0.9 * state[0] + grads["w"]
    return {"w": -0.1 * state[0]}, state


def in_object(grads, state, params):
    state.m = {"w": 0.9 * state.m["w"] + grads["w"]}
    return {"w": -0.1 * state.m["w"]}, state


def in_params(grads, state, params):
    params["w"] = params["w"] * 0.0
    grads["w"] = grads["w"] * 0.1
    return {"w": -grads["w"]}, state


def in_step(grads, state, params):
    state["w"] = 0.9 * state["w"] + grads["w"]
    params["w"] = params["w"] - 0.1 * state["w"]
    return params, state


ASSIGNING = {
    "dict": (zeros, in_dict),
    "list": (lambda params: [torch.zeros_like(params["w"])], in_list),
    "object": (lambda params: Moments(zeros(params)), in_object),
    "step": fa.Optimizer(zeros, in_dict, in_step),
    "chain": fa.chain(fa.Transform(zeros, heavy_ball), fa.sgd(0.1)),
    "a pair in a chain": fa.chain(fa.clip_by_value(10.0), (zeros, in_dict)),
    "partition": fa.partition({"all": fa.Optimizer(zeros, in_dict)}, lambda path, leaf: "all"),
}


def quadratic(params, x):
    return (params["w"] * x).square().sum()


def moment(opt_state):
    return next(leaf for leaf in flatten(opt_state).leaves if leaf is not None and leaf.dim())


COMPILED = [
    pytest.param(ASSIGNING[name], {"compile": {"backend": "aot_eager"}}, marks=pytest.mark.slow)
    for name in ("dict", "step")
]


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(optimizer, options) for optimizer in ASSIGNING.values() for options in ({}, {"donate": True})] + COMPILED,
)
def test_an_optimizer_may_assign_to_its_containers_and_a_skip_still_keeps_all(optimizer, options):
    step = fa.make_step(quadratic, optimizer, **options)
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.DynamicScale(8.0))
    given = state.opt_state if not options.get("donate") else None
    w, m = torch.ones(3), torch.zeros(3)
    for x in (ONES, NAN, ONES):
        state, metrics = step(state, [x])
        if bool(metrics.applied):
            m = 0.9 * m + 2 * w
            w = w - 0.1 * m
        torch.testing.assert_close(state.params["w"], w)
        torch.testing.assert_close(moment(state.opt_state), m)
    if given is not None:
        assert torch.equal(moment(given), torch.zeros(3))


def test_an_update_or_an_init_that_assigns_to_the_parameters_changes_none_of_the_caller():
    def init(params):
        params["w"] = params["w"] * 5
        return ()

    state = fa.init_state({"w": torch.ones(3)}, (init, in_params))
    assert torch.equal(state.params["w"], ONES)
    after, _ = fa.make_step(quadratic, (init, in_params))(state, [ONES])
    assert torch.equal(state.params["w"], ONES)
    torch.testing.assert_close(after.params["w"], torch.full((3,), 0.8))


def momentum(grads, state, params):
    state["w"].mul_(0.9).add_(grads["w"])
    return dict(state), state


def decay(grads, state, params):
    params["w"].mul_(0.9)
    return grads, state


def clip(grads, state, params):
    grads["w"].clamp_(-1, 1)
    return grads, state


def average(params, state):
    state["w"].lerp_(params["w"], 0.5)
    return state


def pull(params, state):
    params["w"].mul_(0.5)
    return state


WRITING = [
    (fa.Transform(zeros, momentum), "opt_state"),
    (fa.Transform(zeros, decay), "params"),
    (fa.Transform(zeros, clip), "grads"),
    (fa.Transform(zeros, None, average), "opt_state"),
    (fa.Transform(zeros, None, pull), "params"),
    ((zeros, momentum), "opt_state"),
]


@pytest.mark.parametrize(("transform", "what"), WRITING)
def test_a_transform_that_writes_in_place_is_refused_by_name(transform, what):
    optimizer = fa.chain(transform, fa.sgd(0.1))
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.DynamicScale(8.0))
    for run in (fa.make_step(quadratic, optimizer), fa.make_step(quadratic, optimizer, donate=True)):
        with pytest.raises(RuntimeError, match=rf"optimizer: found a write in place to {what} at \['w'\]"):
            run(copy.deepcopy(state), [ONES])
