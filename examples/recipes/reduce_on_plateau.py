"""Lower the learning rate when the loss stops falling, with the rate as a tensor in the state: reduce_on_plateau.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

import functional_amp as fa

EPOCHS, LR, FACTOR, PATIENCE = 30, 0.4, 0.5, 1


def with_rate_in_state(make: Callable[[Tensor], Any], lr: float) -> fa.Optimizer:
    """The optimizer `make(lr)`, whose learning rate is a leaf of its state."""

    def init(params: fa.PyTree) -> dict[str, Any]:
        rate = torch.tensor(lr)
        return {"lr": rate, "inner": make(rate).init(params)}

    def update(grads: fa.PyTree, state: dict[str, Any], params: fa.PyTree) -> tuple[fa.PyTree, dict[str, Any]]:
        updates, inner = make(state["lr"]).update(grads, state["inner"], params)
        return updates, {"lr": state["lr"], "inner": inner}

    def step(grads: fa.PyTree, state: dict[str, Any], params: fa.PyTree) -> tuple[fa.PyTree, dict[str, Any]]:
        params, inner = make(state["lr"]).step(grads, state["inner"], params)
        return params, {"lr": state["lr"], "inner": inner}

    return fa.Optimizer(init, update, step)


def with_rate(state: fa.TrainState, lr: float) -> fa.TrainState:
    """The state with another learning rate. The tensor is new: nothing recompiles."""
    rate = torch.full_like(state.opt_state["lr"], lr)
    return dataclasses.replace(state, opt_state={**state.opt_state, "lr": rate})


def loss_fn(params: dict[str, Tensor], batch: Tensor) -> Tensor:
    return ((params["w"].abs() - batch) ** 2).mean()


def make_batch(epoch: int) -> Tensor:
    return 1 + 0.1 * torch.randn(8, 4, generator=torch.Generator().manual_seed(epoch))


def main(compile: bool = False) -> tuple[fa.TrainState, list[float]]:
    """Gives the state in the end, and the learning rate of each epoch."""
    optimizer = with_rate_in_state(lambda lr: fa.sgd(lr, momentum=0.9), LR)
    step = fa.make_step(loss_fn, optimizer, compile=compile)
    state = fa.init_state({"w": torch.full((4,), 3.0)}, optimizer, fa.DynamicScale(2.0**10))

    # torch's own rule decides, on an optimizer that has nothing else to do.
    watched = torch.optim.SGD([torch.zeros(1)], LR)
    plateau = ReduceLROnPlateau(watched, factor=FACTOR, patience=PATIENCE)
    rates = []
    for epoch in range(EPOCHS):
        rates.append(watched.param_groups[0]["lr"])
        state, _ = step(state, [make_batch(epoch)])
        plateau.step(loss_fn(state.params, make_batch(-1 - epoch)).item())
        state = with_rate(state, watched.param_groups[0]["lr"])
    print(f"rate {rates[0]} -> {rates[-1]}, loss {loss_fn(state.params, make_batch(-1)):.4f}")
    return state, rates


if __name__ == "__main__":
    main()
