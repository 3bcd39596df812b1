"""Learn the learning rate by differentiating through the updates: learned_rate.py."""

from __future__ import annotations

import torch
from torch import Tensor

import functional_amp as fa

INNER, OUTER = 5, 20  # updates that are unrolled, and updates of the rate
CURVATURE = torch.tensor([1.0, 0.25])


def loss_fn(params: Tensor, scale: Tensor) -> Tensor:
    return 0.5 * (scale * CURVATURE * params.square()).sum()


def main() -> tuple[float, list[float]]:
    """Gives the rate in the end, and its derivative at each outer update."""
    start = torch.tensor([1.0, 2.0])

    def loss_after(log_rate: Tensor) -> Tensor:
        """The loss after some updates at this rate."""
        optimizer = fa.sgd(log_rate.exp())
        step = fa.make_step(loss_fn, optimizer)
        state = fa.init_state(start, optimizer, fa.DynamicScale())
        for window in range(INNER):
            # One window overflows and is skipped: through it flows a derivative of zero.
            state, _ = step(state, [torch.tensor(torch.inf if window == 2 else 1.0)])
        return loss_fn(state.params, torch.tensor(1.0))

    log_rate, derivatives = torch.tensor(0.1).log(), []
    for _ in range(OUTER):
        slope = torch.func.grad(loss_after)(log_rate)
        log_rate = log_rate - 0.5 * slope
        derivatives.append(slope.item())
    print(f"rate {log_rate.exp():.3f}, loss after {INNER} windows {loss_after(log_rate):.4f}")
    return log_rate.exp().item(), derivatives


if __name__ == "__main__":
    main()
