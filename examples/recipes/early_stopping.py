"""Evaluate, keep the best state, stop early, and log to TensorBoard: early_stopping.py."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.tensorboard import SummaryWriter

import functional_amp as fa
from functional_amp import debug

Data = tuple[Tensor, Tensor]
EPOCHS, PATIENCE = 60, 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 1))


def make_data() -> tuple[list[Data], Data]:
    """Few and noisy examples, so that the model begins to learn them by heart; and others to judge by."""
    random = torch.Generator().manual_seed(1)
    x = torch.randn(256, 4, generator=random)
    y = x[:, :2].sin().sum(dim=1, keepdim=True) + 0.5 * torch.randn(256, 1, generator=random)
    return list(zip(x[:64].split(16), y[:64].split(16), strict=True)), (x[64:], y[64:])


def main(directory: Path | None = None) -> tuple[fa.TrainState, list[float]]:
    """Gives the best state, and the validation loss of each epoch."""
    directory = Path(tempfile.mkdtemp()) if directory is None else directory
    training, (x, y) = make_data()
    apply, params, _ = fa.from_module(make_model())
    evaluate = apply.eval()  # the same function without dropout; it needs no no_grad

    def loss_fn(params: dict[str, Tensor], batch: Data) -> Tensor:
        return mse_loss(apply(params, batch[0]).float(), batch[1])

    optimizer = fa.adamw(1e-2)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer)
    state = fa.init_state(params, optimizer)
    best, losses, history = state, [], debug.init_history(state, n=len(training))
    with SummaryWriter(str(directory)) as writer:
        for epoch in range(EPOCHS):
            for number, batch in enumerate(training):
                state, metrics = step(state, [batch], seed=epoch * len(training) + number)
                history = debug.record(history, metrics)
            history.to_tensorboard(writer)  # the windows of this epoch: the host reads once an epoch

            losses.append(mse_loss(evaluate(state.params, x), y).item())
            writer.add_scalar("validation/loss", losses[-1], epoch)
            if losses[-1] == min(losses):
                best = state  # a state is a value: no copy is needed (with donate=True keep fa.state_dict(state))
            elif len(losses) - losses.index(min(losses)) > PATIENCE:
                break

    print(f"stopped after {len(losses)} epochs; best loss {min(losses):.3f} in epoch {losses.index(min(losses))}")
    return best, losses


if __name__ == "__main__":
    main()
