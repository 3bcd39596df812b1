"""Keep a moving average of the parameters, in float32, that moves on applied windows only: ema.py."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import optree
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


def ema(average: fa.PyTree, params: fa.PyTree, applied: Tensor, decay: float = DECAY) -> fa.PyTree:
    """The average after a window: `decay * average + (1 - decay) * params`, or as it was."""
    moved = optree.tree_map(lambda old, new: torch.lerp(old, new.float(), 1 - decay), average, params)
    return fa.select(applied, moved, average)


def main() -> tuple[fa.TrainState, dict[str, Tensor]]:
    """Gives the state and the average."""
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x).float(), y)

    optimizer = fa.adamw(1e-2)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**20))  # too high: the first windows are skipped
    average = fa.cast_floating(params, torch.float32)
    for batch in make_batches():
        state, metrics = step(state, [batch])
        average = ema(average, state.params, metrics.applied)

    path = Path(tempfile.mkdtemp()) / "run.ckpt"
    fa.save(path, fa.state_dict(state, **{f"ema.{name}": leaf for name, leaf in average.items()}))
    flat = fa.load(path)  # the run and its average, in one file
    average = {name: flat[f"extra/ema.{name}"] for name in average}
    x, y = next(make_batches())
    loss, smooth = (mse_loss(apply(p, x), y) for p in (state.params, average))
    print(f"loss {loss:.3f}, of the average {smooth:.3f}; applied {state.applied}, skipped {state.skipped}")
    return state, average


if __name__ == "__main__":
    main()
