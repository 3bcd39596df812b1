"""Random faults in small models: module, direction, operator, micro-batch, leaves and remedy, all of them right."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_amp as fa
from tests.injections import TRIALS, as_function, check_injection
from tests.models import MLP, ConvNet, Transformer
from tests.plants import Case, Encoder, Gated, Repeated


class Recurrent(nn.Module):
    """torch's own GRU, whose output is a tuple; in float32, as a CPU has none of float16."""

    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0][:, -1])


MODELS: dict[str, tuple[Any, Any]] = {
    "mlp": (MLP, lambda: torch.randn(5, 6)),
    "conv_net": (ConvNet, lambda: torch.randn(4, 2, 6, 6)),
    "transformer": (Transformer, lambda: torch.randint(11, (2, 5))),
    "encoder": (Encoder, lambda: torch.randint(1, 10, (4, 5))),
    "gated": (Gated, lambda: torch.randn(3, 6, 4)),
    "repeated": (Repeated, lambda: torch.randn(4, 8)),
    "recurrent": (Recurrent, lambda: torch.randn(3, 5, 4)),
}


def clean(draw: random.Random) -> tuple[Case, nn.Module, list[str]]:
    """A window of one to three micro-batches of a random model, finite but for what is injected."""
    name = draw.choice(list(MODELS))
    make, data = MODELS[name]
    module = make()
    apply, params, buffers = as_function(module)

    def loss_fn(params: Any, x: Tensor, *given: Any) -> Any:
        out, after = apply(params, given[0] if given else {}, x)
        value = F.cross_entropy(out.float().flatten(0, -2), torch.zeros(out.shape[:-1].numel(), dtype=torch.long))
        return fa.Loss(value, buffers=after if given else None)

    window = [data() for _ in range(draw.choice([1, 2, 3]))]
    leaves = [name for name, layer in module.named_modules() if name and not list(layer.children())]
    loss = loss_fn if name == "recurrent" else fa.autocast(loss_fn, torch.float16)
    return Case(loss, params, window, 2.0**10, buffers or None), module, leaves


@pytest.mark.parametrize("trial", range(8))
def test_an_injected_fault_is_named(trial: int) -> None:
    check_injection(clean, trial)


@pytest.mark.slow
def test_every_injected_fault_is_named() -> None:
    reached = sum(check_injection(clean, trial) for trial in range(8, 8 + TRIALS))
    assert reached >= 0.7 * TRIALS
