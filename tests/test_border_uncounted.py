"""Writes to buffers of a module that move no version counter, or that of another tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, built, drawn, variants


class Kernel(Net):
    """Writes to two buffers of its own, by a function that does not say so."""

    mean: Tensor
    var: Tensor

    def __init__(self, write: Any):
        super().__init__()
        self.write = write
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor, write: bool = True) -> Tensor:
        x = self.l(x)
        return self.o(torch.tanh(self.write(self, x) if write else x))


def _functional(module: Any, x: Tensor) -> Tensor:
    return F.batch_norm(x, module.mean, module.var, training=module.training)


def _native(module: Any, x: Tensor) -> Tensor:
    return torch.native_batch_norm(x, None, None, module.mean, module.var, module.training, 0.1, 1e-5)[0]


def _foreach(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._foreach_mul_([module.mean, module.var], 0.9)
        torch._foreach_add_([module.mean, module.var], 1.0)
    return x + module.mean


def _out(module: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.add(module.mean, 1, out=module.mean)
        torch.mul(module.var, 0.9, out=module.var)
    return x * module.var


def _without_counter(write: Any = None) -> nn.Module:
    module: Any = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    module[1].num_batches_tracked = None
    return module


WRITES = [_functional, _native, _foreach, _out]


@variants
@pytest.mark.parametrize("write", WRITES)
def test_what_such_a_function_writes_is_kept_as_in_torch(write: Any, backend: Any, donate: bool):
    assert_trains_as_torch(lambda: Kernel(write), backend, donate)


@variants
@pytest.mark.parametrize("make", [*WRITES, None])
def test_a_loss_that_does_not_hand_it_out_is_refused(make: Any, backend: Any, donate: bool):
    module = built(lambda: Kernel(make) if make else _without_counter())
    apply, params, buffers = fa.from_module(module)

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        return fa.Loss(apply.with_buffers(params, buffers, x)[0].square().mean())

    step = fa.make_step(loss_fn, fa.sgd(0.1), backend=backend, donate=donate)
    state = fa.init_state(params, fa.sgd(0.1), fa.NoScale(), buffers)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"forward that moved \[.*mean.*buffers=new"):
            step(state, [drawn(5, 3)])


def test_statistics_that_are_read_alone_need_not_be_handed_out():
    apply, params, buffers = fa.from_module(built(lambda: Kernel(_functional)).eval())
    step = fa.make_step(lambda p, x, b: apply.with_buffers(p, b, x)[0].square().mean(), fa.sgd(0.1))
    state, _ = step(fa.init_state(params, fa.sgd(0.1), fa.NoScale(), buffers), [drawn(5, 3)])
    assert all(torch.equal(state.buffers[name], buffers[name]) for name in buffers)
    assert torch.equal(apply(params, drawn(5, 3)), built(lambda: Kernel(_functional)).eval()(drawn(5, 3)))


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("write", [_foreach, _out])
def test_a_branch_that_writes_later_is_refused_where_its_buffers_are_lost(write: Any, backend: Any):
    apply, params, _ = fa.from_module(built(lambda: Kernel(write)))
    apply(params, drawn(5, 3), False)
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \[.*mean"):
        fa.scale_backward(lambda p: apply(p, drawn(5, 3)).sum(), fa.NoScale(), params, backend=backend)


@pytest.mark.parametrize("write", [_functional, _native])
def test_a_graph_that_is_traced_first_refuses_statistics_that_are_lost(write: Any, fresh_dynamo: None):
    apply, params, _ = fa.from_module(built(lambda: Kernel(write)))
    compiled: Any = torch.compile(lambda params, x: apply(params, x), backend="aot_eager")
    with pytest.raises(Exception, match=r"wrote to its buffers \['mean', 'var'\]"):
        compiled(params, drawn(5, 3))


@pytest.mark.parametrize("train", [True, False])
def test_a_graph_that_is_traced_first_gives_the_statistics_of_torch(train: bool, fresh_dynamo: None):
    module = built(lambda: Kernel(_functional)).train(train)
    apply, params, buffers = fa.from_module(module)
    compiled: Any = torch.compile(lambda p, b, x: apply.with_buffers(p, b, x), backend="aot_eager")
    found, after = compiled(params, buffers, drawn(5, 3))
    torch.testing.assert_close(found, module(drawn(5, 3)))
    torch.testing.assert_close(after["mean"], module.mean)
    if not train:
        fixed: Any = torch.compile(lambda params, x: apply(params, x), backend="aot_eager")
        torch.testing.assert_close(fixed(params, drawn(5, 3)), module(drawn(5, 3)))
