"""What the tests of the recipes share: windows for the imperative loop, and a comparison."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.reference.loop import Record, train

RECIPES = Path(__file__).parent.parent / "examples" / "recipes"


def recipe(name: str) -> Any:
    """The script of a recipe as a module, by its file: other distributions install a package `examples`."""
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Weighted(NamedTuple):
    """A micro-batch as the imperative loop of `tests.reference` takes it."""

    data: Any
    weight: float = 1.0


def imperative(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    windows: Iterable[Sequence[Any]],
    scale: float = 2.0**16,
    weight_of: Callable[[Any], float] = lambda data: 1.0,
    **options: Any,
) -> list[Record]:
    """The imperative loop over windows of plain micro-batches."""
    weighted = [[Weighted(data, weight_of(data)) for data in window] for window in windows]
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return train(model, lambda m, b: loss_of(m, b.data), make_optimizer, weighted, scaler, **options)


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, atol: float) -> None:
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest difference of two trees of parameters."""
    return max((found[name] - expected[name]).abs().max().item() for name in expected)
