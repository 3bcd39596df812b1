"""Recurrent layers whose weights are computed: torch keeps a list of their own of them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.test_cases_modules import assert_trains_as_torch, built, imperative, trained, variants


class First(nn.Module):
    """The sequence that a recurrent layer gives."""

    def __init__(self, change: Callable[[Any], Any], kind: Any = nn.LSTM, **options: Any):
        super().__init__()
        self.r = kind(3, 4, **options)
        change(self.r)

    def forward(self, x: Tensor) -> Tensor:
        return self.r(x)[0]


class WeightDrop(nn.Module):
    """Drops weights of the recurrence."""

    r: Any

    def __init__(self, drop: float):
        super().__init__()
        self.drop, self.r = drop, nn.LSTM(3, 4)
        weight = self.r.weight_hh_l0
        del self.r._parameters["weight_hh_l0"]
        self.raw = nn.Parameter(weight.detach())
        self.r.weight_hh_l0 = weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        self.r.weight_hh_l0 = F.dropout(self.raw, self.drop) if self.drop else 1 * self.raw
        return self.r(x)[0]


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _old_weight_norm(layer: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer, "weight_hh_l0")


def _parametrized(layer: Any, name: str = "weight_hh_l0") -> None:
    parametrize.register_parametrization(layer, name, Doubled())


def _all(layer: Any) -> None:
    for name in list(layer._flat_weights_names):
        _parametrized(layer, name)


MAKERS = {
    "old weight norm": lambda: First(_old_weight_norm),
    "prune": lambda: First(lambda layer: prune.l1_unstructured(layer, "weight_hh_l0", 0.5)),
    "weight drop": lambda: WeightDrop(0.0),
    "weight norm": lambda: First(lambda layer: parametrizations.weight_norm(layer, "weight_hh_l0")),
    "orthogonal": lambda: First(lambda layer: parametrizations.orthogonal(layer, "weight_hh_l0"), nn.GRU),
    "parametrization": lambda: First(_parametrized, nn.RNN, num_layers=2),
    "all weights": lambda: First(_all),
    "the layer alone": lambda: nn.Sequential(First(_parametrized), nn.Linear(4, 1)),
}


@variants
@pytest.mark.parametrize("name", MAKERS)
def test_a_recurrent_layer_with_a_computed_weight_trains_as_in_torch(name: str, backend: Any, donate: bool):
    if name == "orthogonal":  # with complex numbers in between, in another order
        state, loop = trained(built(MAKERS[name]), backend, donate), imperative(built(MAKERS[name]))
        for key, value in loop.items():
            torch.testing.assert_close(state.params[key], value, rtol=1e-4, atol=1e-5)
        return
    assert_trains_as_torch(MAKERS[name], backend, donate)


def test_dropped_weights_are_drawn_as_in_torch():
    make = functools.partial(WeightDrop, 0.5)
    module, expected = built(make), built(make)
    torch.manual_seed(7)
    state = trained(module, "autograd")
    torch.manual_seed(7)
    for key, value in imperative(expected).items():
        assert torch.equal(state.params[key], value), key
