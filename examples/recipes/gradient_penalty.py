"""Train a critic whose slope is held at 1, as in WGAN-GP: gradient_penalty.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

import functional_amp as fa

WINDOWS, PENALTY = 40, 10.0


def make_critic() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Softplus(), nn.Linear(32, 1))


def make_batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Real points, fake points, and where between them the slope is measured."""
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        points = torch.randn(2, 64, 2, generator=random)
        yield points[0] + 2, points[1], torch.rand(64, 1, generator=random)


def main() -> tuple[fa.TrainState, float]:
    """Gives the state, and the mean slope of the critic on the first batch."""
    critic, params, _ = fa.from_module(make_critic())

    def slopes(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: critic(params, x).float().sum())(x).norm(dim=1)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        real, fake, mix = batch
        score = critic(params, torch.cat([fake, real])).float()
        penalty = (slopes(params, mix * real + (1 - mix) * fake) - 1).square().mean()
        return score[: len(fake)].mean() - score[len(fake) :].mean() + PENALTY * penalty

    optimizer = fa.adam(1e-3)
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer)
    state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**12))
    for batch in make_batches():
        state, _ = step(state, [batch])
    real, _, _ = next(make_batches())
    slope = slopes(state.params, real).mean().item()
    print(f"slope {slope:.3f}, skipped {state.skipped}")
    return state, slope


if __name__ == "__main__":
    main()
