"""The recipe of reduce-on-plateau, against the imperative loop."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

PATH = Path(__file__).parent.parent / "examples" / "recipes" / "reduce_on_plateau.py"
SPEC: Any = importlib.util.spec_from_file_location("reduce_on_plateau", PATH)
recipe = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = recipe  # dynamo looks there
SPEC.loader.exec_module(recipe)


def test_the_rates_and_the_parameters_are_those_of_torchs_loop():
    state, rates = recipe.main()
    w = torch.full((4,), 3.0, requires_grad=True)
    optimizer = torch.optim.SGD([w], recipe.LR, momentum=0.9)
    plateau = ReduceLROnPlateau(optimizer, factor=recipe.FACTOR, patience=recipe.PATIENCE)
    expected = []
    for epoch in range(recipe.EPOCHS):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        recipe.loss_fn({"w": w}, recipe.make_batch(epoch)).backward()
        optimizer.step()
        plateau.step(recipe.loss_fn({"w": w.detach()}, recipe.make_batch(-1 - epoch)).item())
    assert rates == expected and len(set(rates)) > 2
    torch.testing.assert_close(state.params["w"], w.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_new_rate_recompiles_nothing():
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        _, rates = recipe.main(compile={"backend": "aot_eager"})
    assert rates == recipe.main()[1]
