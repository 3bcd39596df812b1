"""Freeze the body of a model for some windows, then train all of it: freeze.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

WINDOWS, FROZEN = 20, 8  # windows in all, and those at the start in which the body stands still


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        x = torch.randn(32, 4, generator=generator)
        yield x, x.prod(dim=1, keepdim=True)


def main() -> fa.TrainState:
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x), y)

    def part(path: str, leaf: Tensor) -> str:
        return "body" if path.startswith("0.") else "head"

    # An optimizer a part: the bias correction of the body begins when it does.
    optimizer = fa.partition({"body": fa.adamw(1e-2), "head": fa.adamw(1e-2)}, part)
    head_only = fa.freeze(loss_fn, lambda path, leaf: part(path, leaf) == "body")
    step = fa.make_step(head_only, optimizer, max_norm=1.0)
    state = fa.init_state(params, optimizer)

    losses = []
    for window, batch in enumerate(make_batches()):
        if window == FROZEN:
            step = dataclasses.replace(step, loss_fn=loss_fn)
        state, metrics = step(state, [batch])
        losses.append(metrics.loss)
    print(f"loss {losses[-1]:.3f}; updates of the body {state.opt_state['body'].step}, of the head {state.applied}")
    return state


if __name__ == "__main__":
    main()
