"""Two losses of one model, logged apart: their sum with one loss scale, or a loss scale each: several_losses.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import functional_amp as fa

Params = dict[str, Tensor]
WINDOWS = 16


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.copy = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.classes(hidden), self.copy(hidden)


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        x = torch.randn(32, 4, generator=random)
        yield x, x[:, :3].argmax(dim=1)


apply, start, _ = fa.from_module(TwoHeads())
optimizer = fa.adamw(1e-2)


def class_loss(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(apply(params, batch[0])[0].float(), batch[1])


def copy_loss(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
    return 100 * mse_loss(apply(params, batch[0])[1].float(), batch[0])  # large: it overflows long before the other


def their_sum() -> tuple[Params, list[dict[str, float]]]:
    """One forward for both; `metrics.aux` has the mean of each over the window."""

    def loss_fn(params: Params, batch: tuple[Tensor, Tensor]) -> fa.Loss:
        x, y = batch
        logits, copy = apply(params, x)
        losses = {"class": cross_entropy(logits.float(), y), "copy": mse_loss(copy.float(), x)}
        return fa.Loss(losses["class"] + 0.5 * losses["copy"], aux=losses)

    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer)
    state, log = fa.init_state(start, optimizer), []
    for window in fa.windows(make_batches(), 2):
        state, metrics = step(state, window)
        log.append({name: float(value) for name, value in metrics.aux.items()})  # a host read, outside the step
    return state.params, log


def a_scale_each() -> tuple[Params, tuple[float, float], int]:
    """Two backwards, added in true units. The window is one: it is applied if both gradients are finite."""
    params, opt_state = start, optimizer.init(start)
    class_scale, copy_scale = fa.DynamicScale(), fa.DynamicScale()
    for batch in make_batches():
        class_grads = fa.scale_backward(fa.autocast(class_loss, torch.float16), class_scale, params, batch).grads
        copy_grads = fa.scale_backward(fa.autocast(copy_loss, torch.float16), copy_scale, params, batch).grads
        grads, norm = fa.clip(fa.add(class_grads, copy_grads), max_norm=1.0)
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, fa.all_finite(grads, norm=norm))
        class_scale = fa.update_scale(class_scale, fa.all_finite(class_grads))
        copy_scale = fa.update_scale(copy_scale, fa.all_finite(copy_grads))
    return params, (float(class_scale.scale), float(copy_scale.scale)), int(opt_state.step)


def main() -> None:
    _, log = their_sum()
    print(f"their sum: at first {log[0]}, in the end {log[-1]}")
    _, scales, applied = a_scale_each()
    print(f"a scale each: {scales}, applied {applied} of {WINDOWS} windows")


if __name__ == "__main__":
    main()
