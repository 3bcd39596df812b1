"""Train a convolutional net with BatchNorm on scikit-learn's handwritten digits: digits.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

Batch = tuple[Tensor, Tensor]
EPOCHS, BATCH, TRAINING = 3, 64, 1400


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)),
    )


def make_data() -> tuple[Batch, Batch]:
    """1,400 pictures of 8 x 8 to train on, and 397 to judge by."""
    digits: Any = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
    return (images[:TRAINING], labels[:TRAINING]), (images[TRAINING:], labels[TRAINING:])


def make_batches(data: Batch) -> Iterator[Batch]:
    random = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(TRAINING, generator=random).split(BATCH):
            yield data[0][rows], data[1][rows]


def main() -> tuple[fa.TrainState, float]:
    """Gives the state, and the accuracy on the pictures held out."""
    apply, params, buffers = fa.from_module(make_model())  # buffers: the running statistics

    def loss_fn(params: dict[str, Tensor], batch: Batch, buffers: dict[str, Tensor]) -> fa.Loss:
        images, labels = batch
        logits, buffers = apply.with_buffers(params, buffers, images)
        return fa.Loss(cross_entropy(logits.float(), labels), buffers=buffers)

    optimizer = fa.adamw(1e-2)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**12), buffers)
    losses = []
    training, (images, labels) = make_data()
    for batch in make_batches(training):
        state, metrics = step(state, [batch])
        losses.append(metrics.loss)  # a tensor: not read here

    evaluate = apply.eval().bind(state.buffers)  # the statistics of the state, not those of the start
    accuracy = (evaluate(state.params, images).argmax(dim=1) == labels).float().mean().item()
    print(f"loss {losses[-1]:.3f}, accuracy {accuracy:.3f}, skipped {state.skipped}")
    return state, accuracy


if __name__ == "__main__":
    main()
