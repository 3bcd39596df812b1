"""Learn a start from which one update fits a task (MAML, Finn et al. 2017): maml.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

Data = tuple[Tensor, Tensor]
WINDOWS, TASKS, INNER_RATE = 15, 4, 0.1


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 1))


def make_windows() -> Iterator[list[tuple[Data, Data]]]:
    """Tasks are sines of random phase; each has points to adapt to, and points to be judged by."""
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        tasks = []
        for _ in range(TASKS):
            phase, x = torch.rand(1, generator=random) * torch.pi, torch.randn(20, 1, generator=random)
            y = torch.sin(2 * x + phase)
            tasks.append(((x[:10], y[:10]), (x[10:], y[10:])))
        yield tasks


def main() -> fa.TrainState:
    apply, params, _ = fa.from_module(make_model())
    inner = fa.sgd(INNER_RATE)

    def loss_fn(params: dict[str, Tensor], data: Data) -> Tensor:
        x, y = data
        return mse_loss(apply(params, x).float(), y)

    loss_fn = fa.autocast(loss_fn, torch.bfloat16)

    def meta_loss(params: dict[str, Tensor], task: tuple[Data, Data]) -> Tensor:
        support, query = task
        adapting = fa.make_step(loss_fn, inner)  # an inner step: all stages can be differentiated
        adapted, _ = adapting(fa.init_state(params, inner, fa.NoScale()), [support])
        return loss_fn(adapted.params, query)

    outer = fa.adam(1e-2)
    step = fa.make_step(meta_loss, outer, backend="func")
    state = fa.init_state(params, outer, fa.NoScale())
    losses = []
    for tasks in make_windows():
        state, metrics = step(state, tasks)  # a window of tasks
        losses.append(metrics.loss)
    print(f"loss after one update on a new task: {losses[-1]:.3f}")
    return state


if __name__ == "__main__":
    main()
