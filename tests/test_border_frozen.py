"""Frozen layers of a module in a loss whose parameters are cast: named, with remedies that are torch's own numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import functional_amp as fa

BF16 = torch.bfloat16


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))


def loss_of(apply):
    return lambda params, x: apply(params, x.to(BF16)).float().square().mean()


def imperative():
    """One update of the second layer in float32, from gradients in bfloat16."""
    master = model()
    half = copy.deepcopy(master).to(BF16)
    half(torch.ones(2, 3, dtype=BF16)).float().square().mean().backward()
    with torch.no_grad():
        for leaf, cast in zip(master[1].parameters(), half[1].parameters(), strict=True):
            assert cast.grad is not None
            leaf -= 0.1 * cast.grad.float()
    return {f"1.{name}": leaf.detach() for name, leaf in master[1].named_parameters()}


@pytest.mark.parametrize("backend", ["auto", "autograd"])
def test_frozen_float32_layers_under_a_compute_dtype_are_named(backend):
    module = model()
    module[0].requires_grad_(False)
    apply, params, _ = fa.from_module(module)
    step = fa.make_step(loss_of(apply), fa.sgd(0.1), compute_dtype=BF16, backend=backend)
    with pytest.raises(RuntimeError, match=r"nor the frozen parameters that from_module.*layer.to\(torch.bfloat16\)"):
        step(fa.init_state(params, fa.sgd(0.1), fa.NoScale()), [torch.ones(2, 3)])


def test_frozen_float32_layers_under_a_policy_are_named():
    module = model()
    module[0].requires_grad_(False)
    apply, params, _ = fa.from_module(module)
    loss_fn = fa.with_policy(lambda params, x: apply(params, x).square().mean(), "p=f32,c=bf16,o=f32")
    with pytest.raises(RuntimeError, match="nor the frozen parameters that from_module"):
        fa.scale_backward(loss_fn, fa.NoScale(), params, torch.ones(2, 3))


def test_frozen_layers_that_are_cast_before_give_torchs_update():
    module = model()
    module[0].requires_grad_(False).to(BF16)
    apply, params, _ = fa.from_module(module)
    step = fa.make_step(loss_of(apply), fa.sgd(0.1), compute_dtype=BF16)
    state, _ = step(fa.init_state(params, fa.sgd(0.1), fa.NoScale()), [torch.ones(2, 3)])
    assert all(torch.equal(state.params[name], leaf) for name, leaf in imperative().items())


def test_layers_that_freeze_leaves_alone_give_torchs_update():
    apply, params, _ = fa.from_module(model())
    frozen = fa.freeze(loss_of(apply), lambda path, leaf: path.startswith("0."))
    step = fa.make_step(frozen, fa.sgd(0.1), compute_dtype=BF16)
    state, _ = step(fa.init_state(params, fa.sgd(0.1), fa.NoScale()), [torch.ones(2, 3)])
    assert all(torch.equal(state.params[name], leaf) for name, leaf in imperative().items())
    assert all(torch.equal(state.params[name], leaf) for name, leaf in params.items() if name.startswith("0."))
