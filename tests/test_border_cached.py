"""torch's cache of parametrized weights knows a layer, not the tensors that a call lays into it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import functional_amp as fa
from tests.test_cases_modules import drawn

ROWS = drawn(5, 3)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _parametrized() -> nn.Linear:
    layer = nn.Linear(3, 2)
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


class Caching(nn.Module):
    """Enters the cache in its forward: the remedy."""

    def __init__(self):
        super().__init__()
        self.l = _parametrized()

    def forward(self, x: Tensor) -> Tensor:
        with parametrize.cached():
            return self.l(x) + self.l(x)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_cache_around_two_calls_is_refused(compiled: bool, fresh_dynamo: None):
    apply, params, _ = fa.from_module(_parametrized())

    def both(params: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        with parametrize.cached():
            return apply(params, x), apply({name: p / 2 for name, p in params.items()}, x)

    call = torch.compile(both, backend="aot_eager") if compiled else both
    with pytest.raises(Exception, match=r"found parametrize.cached\(\) around the call.*Enter it in the forward"):
        call(params, ROWS)


def test_a_cache_in_the_forward_is_followed():
    student, teacher = Caching(), Caching()
    apply, params, _ = fa.from_module(student)
    for module, tensors in ((student, params), (teacher, fa.from_module(teacher).params)):
        assert torch.equal(apply(tensors, ROWS), module(ROWS))


def test_a_cache_around_a_module_without_parametrizations_is_none_of_its_business():
    module = nn.Linear(3, 2)
    apply, params, _ = fa.from_module(module)
    with parametrize.cached():
        assert torch.equal(apply(params, ROWS), module(ROWS))
