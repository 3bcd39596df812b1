"""Sharpness-aware minimization (Foret et al. 2021): two gradients an update: sam.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

Batch = tuple[Tensor, Tensor]
WINDOWS, RHO = 12, 0.05


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 3))


def make_windows() -> Iterator[list[Batch]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        xs = torch.randn(2, 16, 4, generator=random)
        yield [(x, x[:, :3].argmax(dim=1)) for x in xs]


def highest(params: dict[str, Tensor], uphill: dict[str, Tensor]) -> dict[str, Tensor]:
    """Where the loss is highest within a distance of RHO, to first order."""
    norm = fa.global_norm(uphill)
    return {name: p + RHO * uphill[name] / (norm + 1e-12) for name, p in params.items()}


def main() -> tuple[dict[str, Tensor], list[float]]:
    """Gives the parameters, and the scale after each window."""
    apply, params, _ = fa.from_module(make_model())
    optimizer, scaler, scales = fa.sgd(0.1, momentum=0.9), fa.DynamicScale(2.0**20), []
    opt_state = optimizer.init(params)

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return cross_entropy(apply(params, x).float(), y)

    loss_fn = fa.autocast(loss_fn, torch.float16)

    def gradient(params: dict[str, Tensor], window: Sequence[Batch]) -> fa.ScaledGrads:
        total = None
        for batch in window:
            total = fa.accumulate(total, fa.scale_backward(loss_fn, scaler, params, batch).grads)
        assert total is not None
        return total

    for window in make_windows():
        uphill, finite = fa.unscale(gradient(params, window))
        grads = gradient(highest(params, uphill), window)  # its units are its own: there is nothing to unscale twice
        finite = finite & fa.all_finite(grads)
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, finite)
        scaler = fa.update_scale(scaler, finite)
        scales.append(float(scaler.scale))

    print(f"{opt_state.step} updates, scale {scaler.scale:.0f}")
    return params, scales


if __name__ == "__main__":
    main()
