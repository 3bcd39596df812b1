"""Try a window that overflows again at a lower scale, in place of dropping it: retry.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

Batch = tuple[Tensor, Tensor]
WINDOWS, ATTEMPTS = 8, 30


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))


def make_windows() -> Iterator[list[Batch]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        xs = torch.randn(2, 16, 4, generator=random)
        yield [(x, 10 * x.prod(dim=1, keepdim=True)) for x in xs]


def insist(step: fa.Step, state: fa.TrainState, window: Sequence[Batch], seed: int) -> fa.TrainState:
    """The state after the window was applied. A skip changes the scale alone, so the next try is the same window.

    Raises:
        RuntimeError: for a window that overflows at every scale: its data or its loss is not finite.
    """
    for _ in range(ATTEMPTS):
        state, metrics = step(state, window, seed=seed)  # the seed repeats the dropout
        if metrics.applied:  # a host read, outside the step
            return state
    raise RuntimeError(f"found a window that overflowed {ATTEMPTS} times, down to a scale of {state.scaler.scale}")


def main(scaler: fa.Scaler | None = None) -> fa.TrainState:
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x).float(), y)

    optimizer = fa.adamw(1e-2)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**24) if scaler is None else scaler)
    for number, window in enumerate(make_windows()):
        state = insist(step, state, window, seed=number)
    print(f"applied {state.applied} of {WINDOWS} windows, after {state.skipped} tries more; scale {state.scaler.scale}")
    return state


if __name__ == "__main__":
    main()
