"""Parameters in one tensor: the same values, gradients and runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given

import functional_amp as fa
import functional_amp.testing as own
from functional_amp.testing import same_bits
from tests.models import mlp, transformer


@given(tree=own.trees(rest=(torch.int64, torch.bool)))
def test_unravel_undoes_ravel_bit_for_bit(tree: Any):
    flat, unravel = fa.ravel(tree)
    assert same_bits(unravel(flat), tree)
    assert all(leaf.dim() == 1 for name, leaf in flat.items() if name != "rest")


@pytest.mark.parametrize("make", [mlp, transformer])
@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("donate", [False, True])
def test_a_raveled_run_equals_the_run_on_the_tree(make, backend, donate):
    problem, optimizer = make(), fa.sgd(0.1, momentum=0.9)
    flat, unravel = fa.ravel(problem.params)
    options: dict[str, Any] = {"max_norm": 0.5, "backend": backend, "donate": donate}
    a = fa.init_state(problem.params, optimizer)
    b = fa.init_state(flat, optimizer)
    for seed in range(3):
        window = [problem.batch(2 * seed), problem.batch(2 * seed + 1)]
        a, measured = fa.make_step(problem.loss_fn, optimizer, **options)(a, window)
        b, too = fa.make_step(lambda f, x: problem.loss_fn(unravel(f), x), optimizer, **options)(b, window)
        torch.testing.assert_close(unravel(b.params), a.params, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(tuple(too), tuple(measured), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_raveled_step_compiles_to_one_graph_a_half():
    problem, optimizer = transformer(), fa.sgd(0.1, momentum=0.9)
    flat, unravel = fa.ravel(problem.params)
    compiled = fa.make_step(
        lambda f, x: problem.loss_fn(unravel(f), x), optimizer, compile={"backend": "aot_eager"}, donate=True
    )
    state, expected = fa.init_state(flat, optimizer), fa.init_state(problem.params, optimizer)
    for seed in range(2):
        state, _ = compiled(state, [problem.batch(seed)])
        expected, _ = fa.make_step(problem.loss_fn, optimizer)(expected, [problem.batch(seed)])
    torch.testing.assert_close(unravel(state.params), expected.params, rtol=1e-5, atol=1e-6)


def test_ravel_copies_and_names_a_leaf_that_is_no_tensor():
    params = {"w": torch.ones(2)}
    flat, _ = fa.ravel(params)
    flat["float32 cpu"].zero_()
    assert params["w"].tolist() == [1.0, 1.0]
    with pytest.raises(TypeError, match=r"'w\.0'"):
        fa.ravel({"w": [3.0]})
