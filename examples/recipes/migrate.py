"""Take over a run of GradScaler and torch.optim in mid-training, and give it back, bit for bit: migrate.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa

Batch = tuple[Tensor, Tensor]
WINDOWS, K = 18, 2  # windows in all, and micro-batches of a window (accumulation steps)


def make_windows() -> list[list[Batch]]:
    xs = torch.randn(WINDOWS, K, 16, 4, generator=torch.Generator().manual_seed(1))
    return [[(x, x.prod(dim=1, keepdim=True)) for x in window] for window in xs]


def imperative(model: nn.Module, adamw: torch.optim.Optimizer, scaler: torch.amp.GradScaler, windows: list) -> None:
    """The loop that a project has today."""
    for window in windows:
        for x, y in window:
            with torch.autocast("cpu", torch.float16):
                loss = mse_loss(model(x).float(), y) / K
            scaler.scale(loss).backward()
        scaler.step(adamw)
        scaler.update()
        adamw.zero_grad()


def functional(
    model: nn.Module, adamw: torch.optim.Optimizer, scaler: torch.amp.GradScaler, windows: Sequence[list[Batch]]
) -> None:
    """The same windows here: everything is taken over, and put back in the end."""
    apply, params, _ = fa.from_module(model)
    names, optimizer, theirs = [name for name, _ in model.named_parameters()], fa.adamw(1e-2), scaler.state_dict()

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return mse_loss(apply(params, x).float(), y)  # no division: a window is divided by its weight

    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, backend="autograd")
    # That loop scales loss / K, this one the loss: its scale S is S / K here.
    scale = fa.DynamicScale.from_state_dict({**theirs, "scale": theirs["scale"] / K})
    state = fa.init_state(params, optimizer, scale)
    taken_over = fa.opt_state_from_torch(state.opt_state, adamw.state_dict(), names)
    state = dataclasses.replace(state, opt_state=taken_over)
    for window in windows:
        state, _ = step(state, window)

    fa.to_module(model, state.params, state.buffers)
    adamw.load_state_dict(fa.opt_state_to_torch(state.opt_state, adamw, names))
    ours = state.scaler.state_dict()
    scaler.load_state_dict({**ours, "scale": ours["scale"] * K})


def main(halves: Sequence[str] = ("imperative", "functional", "imperative")) -> tuple[nn.Module, float]:
    """Gives the model after all windows, a third of them by each loop, and the scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler, windows = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=4), make_windows()
    for number, name in enumerate(halves):
        part = windows[number * WINDOWS // len(halves) : (number + 1) * WINDOWS // len(halves)]
        {"imperative": imperative, "functional": functional}[name](model, adamw, scaler, part)
    print(f"scale {scaler.get_scale():.0f}, first bias {model.get_parameter('0.bias')[0]:.6f}")
    return model, scaler.get_scale()


if __name__ == "__main__":
    main()
