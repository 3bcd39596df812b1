"""REINFORCE with a baseline: a loss of several forward passes, one a step of the episode: policy_gradient.py."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import functional_amp as fa

Policy = Callable[[Tensor], Tensor]
WINDOWS, GAMES, STEPS, GOAL = 40, 64, 6, 3.0


def make_policy() -> nn.Module:
    """Of position and time, the logits of going down or up, and an estimate of the return."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))


def observed(position: Tensor, time: int) -> Tensor:
    return torch.stack([position, torch.full_like(position, time)], dim=1) / STEPS


@torch.no_grad()
def play(policy: Policy, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Actions of shape (steps, games), and what each game earned: it should end at the goal."""
    position, actions = torch.zeros(GAMES), []
    for time in range(STEPS):
        chance = policy(observed(position, time))[:, :2].softmax(dim=1)
        actions.append(torch.multinomial(chance, 1, generator=random)[:, 0])
        position = position + 2 * actions[-1] - 1
    return torch.stack(actions), -(position - GOAL).abs()


def loss_of(policy: Policy, episode: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The loss of the policy, and that of the baseline."""
    actions, earned = episode
    position, chosen, missed = torch.zeros(GAMES), [], []
    for time, action in enumerate(actions):
        *logits, baseline = policy(observed(position, time)).float().unbind(dim=1)
        chosen.append(torch.stack(logits, dim=1).log_softmax(dim=1).gather(1, action[:, None])[:, 0])
        missed.append(earned - baseline)
        position = position + 2 * action - 1
    advantage = torch.stack(missed)
    return -(torch.stack(chosen) * advantage.detach()).sum(dim=0).mean(), advantage.square().mean()


def main() -> tuple[fa.TrainState, list[float]]:
    """Gives the state, and the mean of what the games of each window earned."""
    policy = make_policy()
    apply, params, _ = fa.from_module(policy)

    def loss_fn(params: dict[str, Tensor], episode: tuple[Tensor, Tensor]) -> fa.Loss:
        chosen, missed = loss_of(functools.partial(apply, params), episode)
        return fa.Loss(chosen + 0.5 * missed, aux={"policy": chosen, "baseline": missed})

    optimizer, random, earnings = fa.adam(2e-2), torch.Generator().manual_seed(1), []
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)
    state = fa.init_state(params, optimizer)
    for _ in range(WINDOWS):
        episode = play(functools.partial(apply, state.params), random)
        state, _ = step(state, [episode])
        earnings.append(episode[1].mean().item())
    print(f"earned {earnings[0]:.2f} at first, {earnings[-1]:.2f} in the end; skipped {state.skipped}")
    return state, earnings


if __name__ == "__main__":
    main()
