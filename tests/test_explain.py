"""explain names the culprit of a window that was not finite, and the scale that works."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.explained import check_answers, explained
from tests.plants import PLANTS, Plant

BACKENDS = ("autograd", "func")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_every_planted_fault_is_named(plant: Plant, backend: Any) -> None:
    if backend not in plant.backends:
        pytest.skip("torch.func can not differentiate it")
    torch.manual_seed(0)
    case = plant.build()
    check_answers(plant, case, explained(case, backend), backend)
