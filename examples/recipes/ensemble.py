"""Train an ensemble in one call: each member has its own data, loss scale and skip: ensemble.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

MEMBERS, WINDOWS = 3, 8


def make_models() -> list[nn.Module]:
    models = []
    for seed in range(MEMBERS):
        torch.manual_seed(seed)
        models.append(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)))
    return models


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Of shape (members, batch, features). In the third window member 1 meets numbers that overflow float16."""
    random = torch.Generator().manual_seed(1)
    for window in range(WINDOWS):
        x = torch.randn(MEMBERS, 16, 4, generator=random)
        y = x.prod(dim=2, keepdim=True)
        if window == 2:
            x[1] *= 1e6
        yield x, y


models = make_models()
apply = fa.from_module(models[0]).apply  # the members share the code; each has parameters of its own
optimizer = fa.adamw(1e-2)


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return mse_loss(apply(params, x).float(), y)


step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)


def init(params: dict[str, Tensor]) -> fa.TrainState:
    return fa.init_state(params, optimizer, fa.DynamicScale(2.0**10))


def main() -> fa.TrainState:
    """Gives the states of the members, stacked."""
    members = [fa.from_module(model).params for model in models]
    params = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    ensemble, all_members = torch.func.vmap(init)(params), torch.func.vmap(step)
    for batch in make_batches():
        ensemble, metrics = all_members(ensemble, [batch])
        print(f"losses {metrics.loss.tolist()}, applied {metrics.applied.tolist()}")
    return ensemble


if __name__ == "__main__":
    main()
