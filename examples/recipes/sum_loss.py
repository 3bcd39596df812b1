"""A loss that is divided by the items of the whole window (num_items_in_batch): a sum, not a mean: sum_loss.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

Batch = tuple[Tensor, Tensor]
WINDOWS, IGNORED = 8, -100


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 20))


def make_windows() -> Iterator[list[Batch]]:
    """Windows of three micro-batches of tokens and targets; many targets are padding, a different number in each."""
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        window = []
        for kept in (3, 10, 7):
            tokens = torch.randint(20, (4, 12), generator=random)
            targets = (tokens * 7 + 1) % 20
            targets[:, kept:] = IGNORED
            window.append((tokens, targets))
        yield window


def items(window: Sequence[Batch]) -> Tensor:
    return torch.stack([(targets != IGNORED).sum() for _, targets in window]).sum()


def main() -> tuple[fa.TrainState, list[float]]:
    """Gives the state, and the loss of each window."""
    apply, params, _ = fa.from_module(make_model())

    def loss_fn(params: dict[str, Tensor], micro_batch: tuple[Batch, Tensor]) -> fa.Loss:
        (tokens, targets), num_items = micro_batch
        logits = apply(params, tokens).float()
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return fa.Loss(total / num_items, reduction="sum")

    optimizer = fa.sgd(1.0)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)
    state, losses = fa.init_state(params, optimizer, fa.DynamicScale(2.0**12)), []
    for window in make_windows():
        num_items = items(window)
        state, metrics = step(state, [(batch, num_items) for batch in window])
        losses.append(float(metrics.loss))  # the sum of the losses: the mean over the items of the window
    print(f"loss {losses[0]:.3f} at first, {losses[-1]:.3f} in the end")
    return state, losses


if __name__ == "__main__":
    main()
