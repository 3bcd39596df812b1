"""Draws the pictures of the docs: python docs/pictures/make.py"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa
from functional_amp import debug

HERE = Path(__file__).parent


class Attention(nn.Module):
    """One head; the softmax ignores the bias of the keys, whose gradient is zero by algebra."""

    def __init__(self, width: int):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x))


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def underflow() -> None:
    """A small transformer whose loss enters with a small weight, as one term beside others does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), Block(32), Block(32), nn.Linear(32, 10))
    apply, params, _ = fa.from_module(model)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return 1e-3 * cross_entropy(apply(params, x).flatten(0, 1).float(), y.flatten())

    batch = torch.randn(8, 12, 16), torch.randint(10, (8, 12))
    report = debug.underflow_report(loss_fn, params, batch, dtype=torch.float16)
    print(report)
    report.plot(HERE / "underflow.png")


def scales() -> None:
    """Four rules beside gradients that fit up to a scale that rises and falls."""
    torch.manual_seed(0)
    windows = 600
    limits = (17 + 3 * torch.sin(torch.arange(windows) / 90) + 0.7 * torch.randn(windows)).exp2().tolist()
    rules = [
        fa.DynamicScale(growth_interval=50),
        fa.DynamicScale(growth_interval=50, hysteresis=2),
        fa.DynamicScale(growth_interval=50, growth_factor=2.0**0.25),
    ]
    trajectories = [debug.simulate(rule, lambda i, scale: scale > limits[i], windows) for rule in rules]
    for trajectory in trajectories:
        print(trajectory)
    debug.plot_scale(*trajectories, path=HERE / "scales.png")


if __name__ == "__main__":
    underflow()
    scales()
