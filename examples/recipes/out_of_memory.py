"""Try a batch that ran out of memory again in smaller pieces: out_of_memory.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

Batch = tuple[Tensor, Tensor]
MEMORY = 20  # rows that fit: this machine's memory is larger, so the loss function pretends


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def make_batches() -> Iterator[Batch]:
    random = torch.Generator().manual_seed(1)
    for rows in (16, 64, 50, 20):
        x = torch.randn(rows, 4, generator=random)
        yield x, x.prod(dim=1, keepdim=True)


def in_pieces(batch: Batch, rows: int) -> list[Batch]:
    x, y = batch
    return list(zip(x.split(rows), y.split(rows), strict=True))


def fitted(step: fa.Step, state: fa.TrainState, batch: Batch, rows: int) -> tuple[fa.TrainState, fa.Metrics, int]:
    """The step in pieces of as many rows as fit. An exception leaves the state as it was, donated or not."""
    while True:
        try:
            return *step(state, in_pieces(batch, rows)), rows
        except torch.OutOfMemoryError:
            if rows == 1:
                raise
        rows = (rows + 1) // 2  # out here: the exception, which holds the tensors of the try, is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(donate: bool = True) -> tuple[fa.TrainState, list[int]]:
    """Gives the state, and the rows of a piece at each batch."""
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> fa.Loss:
        x, y = batch
        if len(x) > MEMORY:
            raise torch.OutOfMemoryError(f"{len(x)} rows do not fit")
        return fa.Loss(mse_loss(apply(params, x), y), weight=len(x))  # pieces count by their rows: the last is short

    optimizer = fa.adamw(1e-2)
    step = fa.make_step(loss_fn, optimizer, max_norm=1.0, donate=donate)
    state, rows, taken = fa.init_state(params, optimizer), 64, []
    for batch in make_batches():
        state, _, rows = fitted(step, state, batch, rows)
        taken.append(rows)
    print(f"{state.applied} updates, in pieces of {taken} rows")
    return state, taken


if __name__ == "__main__":
    main()
