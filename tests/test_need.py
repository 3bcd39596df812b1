"""Why the loss is scaled: training in float16 that ends where float32 does, and what is left of it without a scale."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import functional_amp as fa

ITEMS, WEIGHT, UPDATES = 4096, 2e-5, 200

# The loss is a mean over 4096 items that enters the objective with a weight of 2e-5, as a small term beside
# others does. The derivative by the output of one item is 2 * WEIGHT / ITEMS * error = 1e-8 * error, and float16
# rounds what is below 2**-25 = 3e-8 to zero: an item is not learnt from unless its error is above 3 (the targets
# have a standard deviation of 1). Adam, which divides the gradients by their size, does not mind the weight.
FLUSHED = 2.0**-25

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


def predict(params: Params, x: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(x, params["w1"], params["b1"])), params["w2"], params["b2"])


def loss_fn(params: Params, batch: Batch) -> Tensor:
    x, y = batch
    return WEIGHT * F.mse_loss(predict(params, x).float(), y)


def problem(seed: int) -> tuple[Params, Batch]:
    """A noisy regression: a sum of four tanh, to be learnt by eight."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = normal(ITEMS, 4)
    signal = torch.tanh(x @ normal(4, 4)).mean(1, keepdim=True)
    y = signal / signal.std() + 0.3 * normal(ITEMS, 1)
    params = {"w1": normal(8, 4) / 2, "b1": torch.zeros(8), "w2": normal(1, 8) / 8**0.5, "b2": torch.zeros(1)}
    return params, (x, y)


def trained(seed: int, scaler: fa.Scaler, dtype: torch.dtype | None) -> tuple[float, fa.TrainState]:
    """The loss after training, measured in float32 on the float32 parameters."""
    params, batch = problem(seed)
    optimizer = fa.adam(fa.warmup_cosine(5e-2, 10, UPDATES), eps=1e-15)
    step = fa.make_step(loss_fn if dtype is None else fa.autocast(loss_fn, dtype), optimizer, donate=True)
    state = fa.init_state(params, optimizer, scaler)
    for _ in range(UPDATES):
        state, _ = step(state, [batch])
    return loss_fn(state.params, batch).item(), state


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_float16_with_loss_scaling_ends_where_float32_does_and_without_it_does_not(seed):
    start = loss_fn(*problem(seed)).item()
    full, _ = trained(seed, fa.NoScale(), None)
    scaled, state = trained(seed, fa.DynamicScale(growth_interval=5), torch.float16)
    unscaled, _ = trained(seed, fa.NoScale(), torch.float16)
    assert full < start / 5  # there is something to learn
    assert abs(scaled / full - 1) < 0.01
    assert unscaled > 4 * full
    assert state.skipped.item() > 0  # the scale went up until float16 overflowed, and came back


@pytest.mark.parametrize("seed", range(5))
def test_without_loss_scaling_float16_loses_nearly_all_derivatives_by_the_outputs(seed):
    params, (x, y) = problem(seed)
    outputs = predict(params, x)
    derivative = torch.func.grad(lambda outputs: WEIGHT * F.mse_loss(outputs, y))(outputs)
    lost = derivative.abs() <= FLUSHED
    assert torch.equal(lost, derivative.half() == 0)
    assert lost.float().mean() > 0.9
    kept = (derivative * 2.0**16).half()  # the first scale of DynamicScale is enough
    assert (kept == 0).float().mean() < 0.01
