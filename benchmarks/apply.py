"""What a call through `apply` costs beside a call of the module: python -m benchmarks.apply"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import functional_amp as fa


class Encoder(nn.Module):
    """A small transformer: 53 leaves with 4 layers, 305 with 25."""

    def __init__(self, layers: int):
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        made = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(layers)]
        self.layers, self.norm, self.head = nn.ModuleList(made), nn.LayerNorm(16), nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))


class Empty(nn.Module):
    """The same leaves in a forward that does nothing: what is left is the overhead."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self) -> None:
        return None


def microseconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The median time of each call, taken in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 5):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if repeat >= 5:
                times[name].append(time.perf_counter() - start)
    return {name: 1e6 * statistics.median(taken) for name, taken in times.items()}


def measured(layers: int, repeats: int = 200) -> dict[str, float]:
    """Leaves, and the times of a module, of torch's functional_call and of apply; then those of an empty forward."""
    module, x = Encoder(layers), torch.randint(32, (2, 8))
    apply, params, _ = fa.from_module(module)
    empty = Empty(module)
    apply_empty, params_empty, _ = fa.from_module(empty)
    with torch.no_grad():
        times = microseconds(
            {
                "module": lambda: module(x),
                "functional_call": lambda: torch.func.functional_call(module, params, (x,)),
                "apply": lambda: apply(params, x),
                "empty functional_call": lambda: torch.func.functional_call(empty, params_empty, ()),
                "empty apply": lambda: apply_empty(params_empty),
            },
            repeats,
        )
    return {"leaves": len(params), **times, "apply / module": times["apply"] / times["module"]}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for layers in (4, 25):
        print(", ".join(f"{name} {value:.3g}" for name, value in measured(layers).items()))
