"""State that hides from a graph, which is traced before the first call outside of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import functional_amp as fa
from tests.test_border_state import Holding
from tests.test_cases_modules import drawn

ROWS = drawn(5, 3)


def _count(kept: Any) -> Any:
    kept += 1
    return kept


def _count_in_an_array(kept: Any) -> Any:
    kept += 1
    return torch.from_numpy(kept).float()


def compiled(make: Callable[[], Any], tick: Any) -> tuple[Callable[[], Tensor], Holding]:
    """A function that calls a net in a graph, twice; and the net."""
    net = Holding(make(), tick)
    apply, params, _ = fa.from_module(net)
    call = torch.compile(lambda params, x: apply(params, x) + apply(params, 2 * x), backend="aot_eager", fullgraph=True)
    return lambda: call(params, ROWS), net


@pytest.mark.parametrize(
    ("make", "tick"), [(lambda: torch.zeros(1), _count), (lambda: np.zeros(1), _count_in_an_array)]
)
def test_a_counter_in_a_constant_is_found_while_a_graph_is_traced(make: Any, tick: Any, fresh_dynamo: None):
    with pytest.raises(Exception, match=r"found that the forward keeps something at .*kept.*expected state in buffers"):
        compiled(make, tick)[0]()


def _written_before() -> Tensor:
    base = torch.zeros(2, 4)
    base += 1
    return base.T[1:, 0]


@pytest.mark.parametrize(
    ("make", "tick"),
    [
        (_written_before, lambda kept: kept.sum()),
        (lambda: torch.ones(1), lambda kept: kept),
        (lambda: np.ones(1), lambda kept: torch.from_numpy(kept).float()),
    ],
)
def test_a_constant_that_is_read_is_followed_in_a_graph(make: Any, tick: Any, fresh_dynamo: None):
    call, net = compiled(make, tick)
    torch.testing.assert_close(call(), net(ROWS) + net(2 * ROWS))
    torch.testing.assert_close(call(), net(ROWS) + net(2 * ROWS))
