"""examples/recipes: what a loss can be, each against torch's imperative loop, all tokens at once or algebra."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, softplus

from tests.recipes import assert_close, imperative, recipe

gan, gradient_penalty, packed = recipe("gan"), recipe("gradient_penalty"), recipe("packed")
policy_gradient, several_losses, sum_loss = recipe("policy_gradient"), recipe("several_losses"), recipe("sum_loss")
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # float16 rounds in another order


@pytest.fixture(autouse=True)
def own_randomness() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def adamw(lr: float, **options: Any) -> Any:
    return lambda params: torch.optim.AdamW(params, lr=lr, fused=True, **options)


def imperative_gan(each: bool) -> tuple[dict[str, Tensor], dict[str, Tensor], list[tuple[float, float]]]:
    """torch's loop: `scaler.update()` once an iteration for one scaler, once an optimizer for one each."""
    generator, discriminator = gan.make_models()
    d_optimizer, g_optimizer = (
        torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999), fused=True)
        for model in (discriminator, generator)
    )
    d_scaler = torch.amp.GradScaler("cpu", init_scale=gan.SCALE)
    g_scaler = torch.amp.GradScaler("cpu", init_scale=gan.SCALE) if each else d_scaler
    scales = []
    for real, noise in gan.make_batches():
        before = d_scaler.get_scale()
        with torch.autocast("cpu", torch.float16):
            logits = discriminator(torch.cat([real, generator(noise).detach()])).float()
        loss = softplus(-logits[: len(real)]).mean() + softplus(logits[len(real) :]).mean()
        d_optimizer.zero_grad()
        d_scaler.scale(loss).backward()
        d_scaler.step(d_optimizer)
        if each:
            d_scaler.update()
        scales.append((before, g_scaler.get_scale()))
        with torch.autocast("cpu", torch.float16):
            logits = discriminator(generator(noise)).float()
        g_optimizer.zero_grad()
        g_scaler.scale(softplus(-logits).mean()).backward()
        g_scaler.step(g_optimizer)
        g_scaler.update()
    return dict(discriminator.named_parameters()), dict(generator.named_parameters()), scales


@pytest.mark.parametrize("each", [True, False])
def test_gan_is_the_imperative_loop_with_a_scaler_each_and_with_one(each: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gan, "WINDOWS", 20)
    d, g, scales = gan.a_scale_each() if each else gan.one_scale()
    d_expected, g_expected, expected_scales = imperative_gan(each)
    assert scales == expected_scales
    assert scales[-1][0] < gan.SCALE  # it was too high
    assert_close(d, d_expected, **CLOSE)
    assert_close(g, g_expected, **CLOSE)


def test_gradient_penalty_is_the_loop_of_torchs_amp_examples():
    """https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty"""
    state, _ = gradient_penalty.main()
    critic = gradient_penalty.make_critic()
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    for real, fake, mix in gradient_penalty.make_batches():
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        with torch.autocast("cpu", torch.float16):
            output = critic(between).float().sum()
        (scaled,) = torch.autograd.grad(scaler.scale(output), between, create_graph=True)
        slope = scaled / scaler.get_scale()
        with torch.autocast("cpu", torch.float16):
            score = critic(torch.cat([fake, real])).float()
        loss = score[: len(fake)].mean() - score[len(fake) :].mean()
        loss = loss + gradient_penalty.PENALTY * (slope.norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    # The slope here is not scaled, so float16 rounds it elsewhere; Adam's update is 1e-3 at each of 40 windows.
    assert_close(state.params, dict(critic.named_parameters()), rtol=0, atol=4e-3)


def test_the_penalty_of_a_linear_critic_has_its_closed_form(monkeypatch: pytest.MonkeyPatch):
    """Of x @ w + b the slope is |w|, and the gradient mean(fake) - mean(real) + 20 (|w| - 1) w / |w|."""
    monkeypatch.setattr(gradient_penalty, "make_critic", lambda: critic)
    monkeypatch.setattr(gradient_penalty, "WINDOWS", 1)
    torch.manual_seed(3)
    critic = nn.Linear(2, 1)
    state, slope = gradient_penalty.main()
    (start,), (w,), ((real, fake, _),) = critic.weight.detach(), state.params["weight"], gradient_penalty.make_batches()
    expected = fake.mean(dim=0) - real.mean(dim=0) + 20 * (start.norm() - 1) * start / start.norm()
    torch.testing.assert_close(state.opt_state.exp_avg["weight"][0], 0.1 * expected, rtol=0, atol=2e-4)
    assert slope == pytest.approx(w.norm().item(), rel=1e-3)


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    logits, copy = model(batch[0])
    return cross_entropy(logits.float(), batch[1]), mse_loss(copy.float(), batch[0])


def test_the_sum_of_losses_is_logged_apart():
    params, log = several_losses.their_sum()
    batches = list(several_losses.make_batches())
    windows = [batches[i : i + 2] for i in range(0, len(batches), 2)]
    seen: list[list[float]] = []

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = losses_of(model, batch)
        seen.append([loss.item() for loss in losses])
        return losses[0] + 0.5 * losses[1]

    records = imperative(several_losses.TwoHeads(), loss_of, adamw(1e-2), windows, autocast=torch.float16)
    assert_close(params, records[-1].params, **CLOSE)
    means = torch.tensor(seen).unflatten(0, (-1, 2)).mean(dim=1)
    found = torch.tensor([[entry["class"], entry["copy"]] for entry in log])
    torch.testing.assert_close(found, means, rtol=1e-3, atol=1e-4)


def test_a_scale_each_is_the_sum_of_true_gradients_and_only_the_one_that_overflows_backs_off():
    params, (class_scale, copy_scale), applied = several_losses.a_scale_each()
    model, scales = several_losses.TwoHeads(), [2.0**16, 2.0**16]
    optimizer, steps = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), 0
    for batch in several_losses.make_batches():
        total, clean = [torch.zeros_like(p) for p in model.parameters()], [True, True]
        for which, factor in enumerate((1.0, 100.0)):  # by hand: scale, differentiate, divide, add
            with torch.autocast("cpu", torch.float16):
                losses = losses_of(model, batch)
            scaled = torch.autograd.grad(
                losses[which] * factor * scales[which], list(model.parameters()), allow_unused=True
            )
            clean[which] = all(bool(grad.isfinite().all()) for grad in scaled if grad is not None)
            total = [t if g is None else t + g / scales[which] for t, g in zip(total, scaled, strict=True)]
            scales[which] *= 1.0 if clean[which] else 0.5
        if all(clean):
            for parameter, grad in zip(model.parameters(), total, strict=True):
                parameter.grad = grad
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            steps += 1
    assert (class_scale, copy_scale, applied) == (*scales, steps)
    assert class_scale == 2.0**16 > copy_scale
    assert_close(params, dict(model.named_parameters()), **CLOSE)


def joined(window: list[Any]) -> Any:
    return tuple(torch.cat(parts) for parts in zip(*window, strict=True))


def test_a_sum_divided_by_the_items_of_the_window_is_the_loss_of_all_of_them_at_once():
    state, losses = sum_loss.main()
    whole = [[joined(window)] for window in sum_loss.make_windows()]

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model(batch[0]).float().flatten(0, 1), batch[1].flatten())

    def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1.0)

    records = imperative(sum_loss.make_model(), loss_of, sgd, whole, 2.0**12, max_norm=1.0, autocast=torch.float16)
    assert not any(record.skipped for record in records)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor([r.loss for r in records]), rtol=1e-3, atol=0)
    assert_close(state.params, records[-1].params, rtol=1e-3, atol=1e-3)


def test_tokens_weigh_the_same_whatever_they_are_packed_with():
    """Against each document in a forward of its own, and one mean over all tokens of the window."""
    state, log = packed.main()
    windows = list(packed.make_documents())

    def loss_of(model: nn.Module, documents: list[Tensor]) -> Tensor:
        logits = [model(d[None], torch.zeros_like(d)[None])[0, :-1].float() for d in documents]
        return cross_entropy(torch.cat(logits), torch.cat([document[1:] for document in documents]))

    whole = [[documents] for documents in windows]
    records = imperative(packed.Attention(), loss_of, adamw(1e-2), whole, max_norm=1.0, autocast=torch.float16)
    assert [int(metrics.weight) for metrics in log] == [sum(len(d) - 1 for d in documents) for documents in windows]
    found = [float(metrics.loss) for metrics in log]
    torch.testing.assert_close(torch.tensor(found), torch.tensor([r.loss for r in records]), rtol=2e-3, atol=1e-3)
    # A gradient near zero may have either sign in float16, and Adam's first updates are of size lr.
    unlike = sum(int(((state.params[n] - p).abs() > 5e-3).sum()) for n, p in records[-1].params.items())
    assert unlike <= 0.01 * sum(p.numel() for p in state.params.values())


def test_a_policy_gradient_is_the_imperative_loop():
    state, earnings = policy_gradient.main()
    policy, random = policy_gradient.make_policy(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2, fused=True)
    scaler, expected = torch.amp.GradScaler("cpu"), []
    for _ in range(policy_gradient.WINDOWS):
        episode = policy_gradient.play(policy, random)
        expected.append(episode[1].mean().item())
        with torch.autocast("cpu", torch.float16):
            chosen, missed = policy_gradient.loss_of(policy, episode)
        optimizer.zero_grad()
        scaler.scale(chosen + 0.5 * missed).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert int(state.skipped) > 0 and state.scaler.scale == scaler.get_scale()
    assert earnings[:10] == pytest.approx(expected[:10], abs=0.05)  # a rounding may turn a single action
    assert earnings[-1] > -1.2 > -2.5 > earnings[0]


def test_the_policy_gradient_of_one_step_is_its_expectation():
    """sum_a p(a) (r(a) - b) grad log p(a) = grad sum_a p(a) r(a) for every baseline b (Williams 1992)."""
    policy = policy_gradient.make_policy().double()
    x = policy_gradient.observed(torch.zeros(1).double(), 0)
    earned = torch.tensor([-4.0, -2.0]).double()
    chance = policy(x)[:, :2].softmax(dim=1)
    expected = torch.autograd.grad(-(chance[0] * earned).sum(), list(policy.parameters())[:2])
    total = [torch.zeros_like(grad) for grad in expected]
    for action in range(2):
        episode = (torch.full((1, policy_gradient.GAMES), action), earned[action].expand(policy_gradient.GAMES))
        loss, _ = policy_gradient.loss_of(lambda x: policy(x.double()), episode)
        grads = torch.autograd.grad(loss, list(policy.parameters())[:2])
        total = [t + chance[0, action].detach() * grad for t, grad in zip(total, grads, strict=True)]
    for found, wanted in zip(total, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
