"""Stages must know whether they run plainly or under an outer transform, inside a graph as well."""

from __future__ import annotations

import pytest
import torch

from functional_amp.mode import stage, transformed

MODES = {"eager": lambda f: f, "compiled": lambda f: torch.compile(f, backend="aot_eager", fullgraph=True)}


@pytest.mark.parametrize("mode", MODES)
def test_a_transform_is_told_from_a_plain_call(mode: str, fresh_dynamo: None) -> None:
    def tens(x: torch.Tensor) -> torch.Tensor:
        return x * (10.0 if transformed() else 1.0)

    one = torch.ones(1)
    assert MODES[mode](tens)(one) == 1
    assert MODES[mode](lambda x: torch.func.grad(lambda y: tens(y).sum())(x))(one) == 10
    assert MODES[mode](lambda x: torch.func.vmap(tens)(x))(one) == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_stage_gives_no_history_to_a_parameter_and_keeps_it_under_a_transform(mode: str, fresh_dynamo: None) -> None:
    double = stage(lambda x: x * 2)
    parameter = torch.nn.Parameter(torch.ones(1))
    assert not MODES[mode](double)(parameter).requires_grad
    assert MODES[mode](lambda x: torch.func.grad(lambda y: double(y).sum())(x))(torch.ones(1)) == 2
