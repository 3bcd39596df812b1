"""from_torch with fused kernels, which go through memory: leaves of other strides get the elements of torch's loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits, mapped
from tests.test_from_torch import OPTIM, Loop, from_torch, gradients

CLASSES = ["AdamW", "Adam", "SGD", "Adagrad"]
HYPER: dict[str, Any] = {"lr": 0.1, "fused": True}


def params() -> dict[str, Tensor]:
    """One as rows, one as columns, one of permuted dimensions."""
    numbers = torch.arange(12.0) / 10
    return {
        "rows": numbers.view(4, 3),
        "columns": numbers.view(3, 4).t(),
        "permuted": (numbers - 0.5).view(2, 3, 2).permute(1, 2, 0),
    }


def turned(leaf: Tensor) -> Tensor:
    """The same elements, in memory the other way round."""
    way = tuple(reversed(range(leaf.ndim)))
    return leaf.permute(way).contiguous().permute(way)


def loss_fn(params: Any, x: Tensor) -> Tensor:
    picked = torch.nn.functional.embedding(torch.tensor([0, 0, 2]), params["columns"])
    return (picked**2).sum() + (params["rows"].T * x).sum() + (params["permuted"] ** 3 * x[0, 0]).sum()


def stepped(loop: Any, given: Any, seed: int) -> Any:
    """Gradients by which the loop has made its update; there they lie as its parameters do."""
    grads = gradients(given, seed)
    loop.step({key: torch.empty_like(loop.params[key]).copy_(grad) for key, grad in grads.items()})
    return grads


@pytest.mark.parametrize("name", CLASSES)
def test_a_fused_update_has_the_elements_of_the_loop_whatever_the_strides_of_the_gradient(name: str):
    cls = getattr(OPTIM, name)
    optimizer, loop, given = from_torch(cls, **HYPER), Loop(cls, params(), HYPER), params()
    state = optimizer.init(given)
    for seed in range(3):
        grads = stepped(loop, given, seed)
        way = mapped(turned, grads) if seed % 2 else grads
        if seed < 2:
            given, state = optimizer.step(way, state, given)
        else:
            given, state = fa.maybe_step(
                optimizer, given, state, fa.ScaledGrads(mapped(lambda g: 4 * g, way), 4.0), torch.tensor(True)
            )
        loop.assert_is(given, state)


@pytest.mark.parametrize("name", CLASSES)
def test_a_state_that_comes_back_with_other_strides_belongs_to_the_same_elements(name: str):
    cls = getattr(OPTIM, name)
    optimizer, loop, given = from_torch(cls, **HYPER), Loop(cls, params(), HYPER), params()
    state = optimizer.init(given)
    for seed in range(3):
        grads = stepped(loop, given, seed)
        given, state = optimizer.step(grads, mapped(turned, state), given)
        loop.assert_is(given, state)


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_a_step_with_a_fused_optimizer_has_the_elements_of_the_loop(donate: bool, backend: Any):
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params().items()}
    loop = OPTIM.AdamW(leaves.values(), **HYPER)
    step = fa.make_step(loss_fn, from_torch(OPTIM.AdamW, **HYPER), donate=donate, backend=backend)
    state = fa.init_state(params(), step.optimizer, fa.StaticScale(8.0))
    for number in range(2):
        x = torch.arange(12.0).view(3, 4) + number
        loop.zero_grad()
        loss_fn(leaves, x).backward()
        loop.step()
        state, _ = step(state, [x])
        assert_same_bits(state.params, mapped(Tensor.detach, leaves))


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("donate", [False, True])
def test_a_compiled_step_with_a_fused_optimizer_has_the_elements_of_the_eager_one(donate: bool):
    optimizer = from_torch(OPTIM.AdamW, **HYPER)
    eager = fa.make_step(loss_fn, optimizer)
    compiled = fa.make_step(loss_fn, optimizer, donate=donate, compile={"backend": "aot_eager"})
    expected, state = (fa.init_state(params(), optimizer, fa.StaticScale(8.0)) for _ in range(2))
    for number in range(2):
        x = torch.arange(12.0).view(3, 4) + number
        expected, _ = eager(expected, [x])
        state, _ = compiled(state, [x])
        assert_same_bits(state, expected)
