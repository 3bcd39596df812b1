"""Clip the gradient of each example, add noise (DP-SGD, Abadi et al. 2016): dp_sgd.py."""

from __future__ import annotations

from collections.abc import Iterator

import optree
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

WINDOWS, BATCH, MAX_NORM = 10, 32, 0.5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        x = torch.randn(BATCH, 4, generator=random)
        yield x, x[:, :3].argmax(dim=1)


def main(noise_multiplier: float = 1.0, scaler: fa.Scaler | None = None) -> dict[str, Tensor]:
    apply, params, _ = fa.from_module(make_model())
    optimizer, scaler = fa.sgd(0.5), fa.DynamicScale() if scaler is None else scaler
    opt_state = optimizer.init(params)
    random = torch.Generator().manual_seed(2)

    def loss_fn(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:  # of one example
        return cross_entropy(apply(params, x[None]).float(), y[None])

    loss_fn = fa.autocast(loss_fn, torch.float16)

    def clipped_example(params: dict[str, Tensor], scaler: fa.Scaler, x: Tensor, y: Tensor) -> fa.Unscaled:
        grads = fa.scale_backward(loss_fn, scaler, params, x, y).grads
        return fa.unscale(fa.clip(grads, MAX_NORM).grads)  # inside the vmap: then they are plain and can be summed

    def privatized(grad: Tensor) -> Tensor:
        noise = torch.randn(grad.shape[1:], generator=random) * noise_multiplier * MAX_NORM
        return (grad.sum(dim=0) + noise) / BATCH

    for x, y in make_batches():
        grads, finite = torch.func.vmap(clipped_example, in_dims=(None, None, 0, 0))(params, scaler, x, y)
        finite = finite.all()
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, optree.tree_map(privatized, grads), finite)
        scaler = fa.update_scale(scaler, finite)

    x, y = next(make_batches())
    accuracy = (apply(params, x).argmax(dim=1) == y).float().mean()
    print(f"accuracy {accuracy:.2f}, {opt_state.step} updates, scale {scaler.scale:.0f}")
    return params


if __name__ == "__main__":
    main()
