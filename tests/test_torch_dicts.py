"""A run with any class of torch.optim moves here and back in its middle, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import functional_amp as fa
from functional_amp.testing import assert_same_bits, mapped
from tests.test_from_torch import OPTIM, Loop, Numbers, from_torch, gradients, params_of

NAMES = ["p0", "p1", "p2"]
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "NAdam": (OPTIM.NAdam, {}),
    "Adam, amsgrad": (OPTIM.Adam, {"amsgrad": True}),
    "SGD": (OPTIM.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "Adagrad": (OPTIM.Adagrad, {}),
    "Rprop": (OPTIM.Rprop, {}),
    "numbers": (Numbers, {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_moves_here_and_back(name: str):
    cls, hyper = RUNS[name]
    optimizer, loop, back = from_torch(cls, **hyper), Loop(cls, params_of(cls), hyper), Loop(cls, params_of(cls), hyper)
    for seed in range(2):
        grads: Any = gradients(params_of(cls), seed)
        loop.step({**grads, "p1": None})  # one that has not begun
    params = mapped(torch.clone, loop.params)
    state = fa.opt_state_from_torch(optimizer.init(params), loop.optimizer.state_dict(), NAMES, applied=2)
    for seed in range(2, 4):
        params, state = optimizer.step(gradients(params, seed), state, params)
        loop.step(gradients(params, seed))
        loop.assert_is(params, state)
    assert state.step == 4
    for key, leaf in back.params.items():
        leaf.copy_(params[key])
    back.optimizer.load_state_dict(fa.opt_state_to_torch(state, back.optimizer, NAMES))
    back.step(gradients(params, 4))
    loop.step(gradients(params, 4))
    assert_same_bits(back.params, loop.params)


def test_what_can_not_be_carried_is_refused():
    params = params_of(OPTIM.Adam)
    loop = Loop(OPTIM.SGD, params, {"lr": 0.1, "momentum": 0.9})
    loop.step(gradients(params, 0))
    template = from_torch(OPTIM.SGD, lr=0.1, momentum=0.9).init(params)
    with pytest.raises(ValueError, match=r"applied: found none.*Remedy: pass applied"):
        fa.opt_state_from_torch(template, loop.optimizer.state_dict(), NAMES)
    with pytest.raises(ValueError, match=r"p0: found \['momentum_buffer'\], expected 'exp_avg'.*same class"):
        fa.opt_state_from_torch(from_torch(OPTIM.Adam).init(params), loop.optimizer.state_dict(), NAMES, applied=1)
    with pytest.raises(ValueError, match=r"names: found no \['p0'\].*Remedy"):
        fa.opt_state_from_torch(template, loop.optimizer.state_dict(), ["x", "p1", "p2"], applied=1)
    with pytest.raises(ValueError, match=r"momentum_buffer of p0: found .* shape \(5,\), expected .* shape \(3, 4\)"):
        fa.opt_state_from_torch(template, loop.optimizer.state_dict(), ["p1", "p0", "p2"], applied=1)
    with pytest.raises(ValueError, match=r"names: found no 'p0'.*Remedy"):
        fa.opt_state_to_torch(template, loop.optimizer, ["x", "p1", "p2"])
