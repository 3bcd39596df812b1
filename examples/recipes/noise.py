"""Add noise to the gradients, less and less of it (Neelakantan et al. 2015): noise.py."""

from __future__ import annotations

from collections.abc import Iterator

import optree
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


def noisy(optimizer: fa.Optimizer, eta: float, gamma: float = 0.55) -> fa.Optimizer:
    """An optimizer that sees gradients with noise of variance `eta / (1 + t) ** gamma` after t applied updates."""

    def init(params: fa.PyTree) -> fa.PyTree:
        return {"t": torch.tensor(0), "inner": optimizer.init(params)}

    def update(grads: fa.PyTree, state: fa.PyTree, params: fa.PyTree) -> tuple[fa.PyTree, fa.PyTree]:
        std = (eta / (1 + state["t"]) ** gamma).sqrt()
        grads = optree.tree_map(lambda grad: grad + std * torch.randn_like(grad), grads)  # in true units
        updates, inner = optimizer.update(grads, state["inner"], params)
        return updates, {"t": state["t"] + 1, "inner": inner}

    return fa.Optimizer(init, update)


def main(eta: float = 0.01) -> fa.TrainState:
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x).float(), y)

    optimizer = noisy(fa.sgd(0.1, momentum=0.9), eta)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**19))  # too high: t counts what is applied
    losses = []
    for number, batch in enumerate(make_batches()):
        state, metrics = step(state, [batch], seed=number)  # the noise of a window depends on its seed alone
        losses.append(metrics.loss)
    print(f"loss {losses[-1]:.3f}, {state.opt_state['t']} updates, skipped {state.skipped}")
    return state


if __name__ == "__main__":
    main()
