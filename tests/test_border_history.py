"""Buffers with a history: a gradient flows through them in torch, and a state holds numbers alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa
from tests.test_cases_modules import WINDOWS, Net, assert_trains_as_torch, built, drawn, trained, variants


class Left(Net):
    """Keeps a sum over calls in a buffer, with or without its history, and reads it or not."""

    acc: Tensor

    def __init__(self, *, detached: bool, read: bool = True, through: bool = False):
        super().__init__()
        self.detached, self.read, self.through = detached, read, through
        self.register_buffer("acc", torch.zeros(4, 3))
        if through:
            self.register_buffer("second", torch.zeros(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        if self.through:
            self.second = self.acc.clone()
        new = self.acc + self.l.weight
        self.acc = new.detach() if self.detached else new
        out = super().forward(x)
        return out + (x @ (self.second if self.through else new).T).sum() if self.read else out


@pytest.mark.parametrize("through", [False, True])
@variants
def test_a_buffer_left_with_a_history_that_is_read_is_refused(backend: Any, donate: bool, through: bool):
    with pytest.raises(RuntimeError, match=r"leaves 'aux\.buffers\.acc|leaves '.*acc' with a history.*detach"):
        trained(built(lambda: Left(detached=False, through=through)), backend, donate)


@variants
def test_its_remedy_trains_as_torch(backend: Any, donate: bool):
    assert_trains_as_torch(lambda: Left(detached=True), backend, donate)


@variants
def test_a_history_that_no_output_reads_is_followed(backend: Any, donate: bool):
    assert_trains_as_torch(lambda: Left(detached=False, read=False), backend, donate)


@variants
def test_calls_of_one_loss_pass_gradients_on_and_the_loss_hands_out_numbers(backend: Any, donate: bool):
    apply, params, buffers = fa.from_module(built(lambda: Left(detached=False)))

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        first, buffers = apply.with_buffers(params, buffers, x)
        second, buffers = apply.with_buffers(params, buffers, x)
        total = (first + second).square().mean()
        return fa.Loss(total, buffers={name: b.detach() for name, b in buffers.items()})

    step = fa.make_step(loss_fn, fa.sgd(0.1), backend=backend, donate=donate)
    state = fa.init_state(params, fa.sgd(0.1), fa.NoScale(), buffers)
    module: Any = built(lambda: Left(detached=False))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x, _ in WINDOWS[:2]:
        state, _ = step(state, [x])
        optimizer.zero_grad()
        (module(x) + module(x)).square().mean().backward()
        optimizer.step()
        module.acc = module.acc.detach()
    for name, value in module.named_parameters():
        torch.testing.assert_close(state.params[name], value.detach())


def test_a_loop_of_ones_own_carries_the_history_as_torch():
    module: Any = built(lambda: Left(detached=False))
    apply, params, buffers = fa.from_module(module)
    params = {name: p.requires_grad_() for name, p in params.items()}
    for _ in range(3):
        module.zero_grad()
        x = drawn(2, 3)
        out, buffers = apply.with_buffers(params, buffers, x)
        found = torch.autograd.grad(out.sum(), params["l.weight"], retain_graph=True)
        module(x).sum().backward(retain_graph=True)
        torch.testing.assert_close(found[0], module.l.weight.grad)


def test_a_buffer_that_was_computed_from_a_parameter_is_refused_and_its_remedies_are_followed():
    def made(make: Any) -> nn.Module:
        module = built(Net)
        module.register_buffer("shift", make(module.l.weight))
        return module

    with pytest.raises(TypeError, match=r"history behind 'shift'.*detach"):
        fa.from_module(made(lambda weight: weight + 1))
    _, _, buffers = fa.from_module(made(lambda weight: (weight + 1).detach()))
    assert set(buffers) == {"shift"}
    fa.from_module(made(lambda weight: torch.zeros(2, requires_grad=True)))
