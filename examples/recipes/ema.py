"""Keep a moving average of the parameters, in float32, that moves on applied windows only: ema.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

WINDOWS, DECAY = 30, 0.9


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        x = torch.randn(32, 4, generator=random)
        yield x, x.prod(dim=1, keepdim=True)


def main() -> tuple[fa.TrainState, dict[str, Tensor]]:
    """Gives the state and the average."""
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x).float(), y)

    optimizer = fa.chain(fa.ema(DECAY), fa.adamw(1e-2))
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**20))  # too high: the first windows are skipped
    for batch in make_batches():
        state, _ = step(state, [batch])

    average = state.opt_state[0].average  # at its place in the chain; a checkpoint of the state has it
    evaluate = apply.eval()
    x, y = next(make_batches())
    loss, smooth = (mse_loss(evaluate(p, x), y) for p in (state.params, average))
    print(f"loss {loss:.3f}, of the average {smooth:.3f}; applied {state.applied}, skipped {state.skipped}")
    return state, average


if __name__ == "__main__":
    main()
