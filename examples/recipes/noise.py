"""Add noise to the gradients, less and less of it (Neelakantan et al. 2015): noise.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

WINDOWS = 12


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        x = torch.randn(32, 4, generator=random)
        yield x, x.prod(dim=1, keepdim=True)


def main(eta: float = 0.01) -> fa.TrainState:
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x).float(), y)

    def std(applied: Tensor) -> Tensor:
        return (eta / (1 + applied) ** 0.55).sqrt()

    optimizer = fa.chain(fa.add_noise(std), fa.sgd(0.1, momentum=0.9))
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**19))  # too high: skips are not counted
    losses = []
    for number, batch in enumerate(make_batches()):
        state, metrics = step(state, [batch], seed=number)  # the noise of a window depends on its seed alone
        losses.append(metrics.loss)
    print(f"loss {losses[-1]:.3f}, {state.applied} updates, skipped {state.skipped}")
    return state


if __name__ == "__main__":
    main()
