"""What forwards do beside giving an output: what torch's loop makes of it is reproduced, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, built, drawn, variants

# torch.func in the forward


class Forces(Net):
    """The derivative of an energy by its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda v: super(Forces, self).forward(v).sum()))(x)


class Curvature(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda v: super(Curvature, self).forward(v).sum()))(x).sum(1)


class Tangent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@variants
@pytest.mark.parametrize("make", [Forces, Curvature, Tangent])
def test_a_forward_that_differentiates_by_torch_func_trains_as_in_torch(make: Any, backend: Any, donate: bool):
    assert_trains_as_torch(make, backend, donate)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("make", [Forces, Curvature, Tangent])
def test_a_forward_that_differentiates_by_torch_func_is_evaluated_as_in_torch(make: Any):
    module = built(make)
    apply, params, _ = fa.from_module(module)
    assert torch.equal(apply(params, drawn(5, 3)), module(drawn(5, 3)))


def test_the_rehearsal_is_unseen_by_a_checkpoint_around_a_batched_call():
    apply, params, _ = fa.from_module(built(Net))
    leaves, x = [p.requires_grad_() for p in params.values()], drawn(5, 3)
    rows = torch.vmap(lambda row: apply(params, row))
    found = torch.autograd.grad(checkpoint(rows, x, use_reentrant=False).square().sum(), leaves)
    expected = torch.autograd.grad(rows(x).square().sum(), leaves)
    assert all(map(torch.equal, found, expected))
