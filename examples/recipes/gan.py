"""Train a GAN on a ring of points: two optimizers, with a loss scale each, or with one for both: gan.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import functional_amp as fa

Params = dict[str, Tensor]
WINDOWS, SCALE = 60, 2.0**24  # the scale is too high on purpose: the first updates are skipped


def make_models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    discriminator = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1))
    return generator, discriminator


def make_batches() -> Iterator[tuple[Tensor, Tensor]]:
    """Points on a circle, and noise."""
    random = torch.Generator().manual_seed(1)
    for _ in range(WINDOWS):
        angle = torch.rand(64, generator=random) * 2 * torch.pi
        yield torch.stack([angle.cos(), angle.sin()], dim=1), torch.randn(64, 2, generator=random)


(generate, g_start, _), (discriminate, d_start, _) = map(fa.from_module, make_models())


def d_loss(d: Params, batch: tuple[Tensor, Tensor, Params]) -> Tensor:
    real, noise, g = batch  # the other player's parameters come with the batch: they are constants here
    logits = discriminate(d, torch.cat([real, generate(g, noise)])).float()
    return softplus(-logits[: len(real)]).mean() + softplus(logits[len(real) :]).mean()


def g_loss(g: Params, batch: tuple[Tensor, Params]) -> Tensor:
    noise, d = batch
    return softplus(-discriminate(d, generate(g, noise)).float()).mean()


d_loss, g_loss = fa.autocast(d_loss, torch.float16), fa.autocast(g_loss, torch.float16)
optimizer = fa.adam(1e-3, betas=(0.5, 0.999))


def a_scale_each() -> tuple[Params, Params, list[tuple[float, float]]]:
    """Two steps, two states. Each overflow lowers the scale of its own player."""
    d_step, g_step = fa.make_step(d_loss, optimizer), fa.make_step(g_loss, optimizer)
    d_state = fa.init_state(d_start, optimizer, fa.DynamicScale(SCALE))
    g_state = fa.init_state(g_start, optimizer, fa.DynamicScale(SCALE))
    scales = []
    for real, noise in make_batches():
        d_state, d_metrics = d_step(d_state, [(real, noise, g_state.params)])
        g_state, g_metrics = g_step(g_state, [(noise, d_state.params)])
        scales.append((float(d_metrics.scale), float(g_metrics.scale)))
    return d_state.params, g_state.params, scales


def one_scale() -> tuple[Params, Params, list[tuple[float, float]]]:
    """One scale moves once a window. A player skips its own overflow alone, and either overflow lowers the scale."""
    d, g, scaler, scales = d_start, g_start, fa.DynamicScale(SCALE), []
    d_opt, g_opt = optimizer.init(d), optimizer.init(g)
    for real, noise in make_batches():
        scales.append((float(scaler.scale),) * 2)
        d_grads = fa.scale_backward(d_loss, scaler, d, (real, noise, g)).grads
        d_finite = fa.all_finite(d_grads)
        d, d_opt = fa.maybe_step(optimizer, d, d_opt, d_grads, d_finite)

        g_grads = fa.scale_backward(g_loss, scaler, g, (noise, d)).grads
        g_finite = fa.all_finite(g_grads)
        g, g_opt = fa.maybe_step(optimizer, g, g_opt, g_grads, g_finite)

        scaler = fa.update_scale(scaler, d_finite & g_finite)
    return d, g, scales


def main() -> None:
    for train in (a_scale_each, one_scale):
        _, g, scales = train()
        radius = generate(g, torch.randn(256, 2)).norm(dim=1)
        print(f"{train.__name__}: radius {radius.mean():.2f} +- {radius.std():.2f}, last scales {scales[-1]}")


if __name__ == "__main__":
    main()
