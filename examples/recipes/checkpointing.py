"""Recompute activations in the backward in place of keeping them: checkpointing.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import functional_amp as fa

WINDOWS, BLOCKS, WIDTH = 6, 8, 32


class Blocks(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.recompute else block(x))
        return x


def make_batches() -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(1)
    return iter(torch.randn(WINDOWS, 64, WIDTH, generator=random))


def main(recompute: bool = True) -> fa.TrainState:
    apply, params, _ = fa.from_module(Blocks(recompute))

    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return mse_loss(apply(params, x).float(), x.flip(1))

    optimizer = fa.adamw(1e-2)
    # torch.func can't differentiate through a checkpoint: the engine does. backend="auto" would find that out.
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, backend="autograd", donate=True)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**10))
    losses = []
    for number, x in enumerate(make_batches()):
        state, metrics = step(state, [x], seed=number)
        losses.append(metrics.loss)
    print(f"loss {losses[-1]:.3f}, applied {state.applied}")
    return state


if __name__ == "__main__":
    main()
