"""Small models, each with a loss function and a maker of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_amp as fa

Batch = dict[str, Tensor]


class MLP(nn.Module):
    """Two linear layers with dropout between them."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.hidden = nn.Linear(6, 8)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.gelu(self.hidden(x))))


class ConvNet(nn.Module):
    """Two convolutions, each with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


class Transformer(nn.Module):
    """One pre-norm block with causal attention; the embedding is the output layer's weight."""

    def __init__(self, dropout: float = 0.0, vocabulary: int = 11, width: int = 8, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.p = dropout
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.dropout(self.embedding(tokens))
        split = [
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm_attention(x)).chunk(3, -1)
        ]
        p = self.p if self.training else 0.0
        attended = F.scaled_dot_product_attention(*split, dropout_p=p, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.projection(attended))
        return self.head(x + self.dropout(self.mlp(self.norm_mlp(x))))


class Problem(NamedTuple):
    """A model to train, in both its forms.

    Attributes:
        module: the module, for torch's own loop.
        apply, params, buffers: what `from_module` makes of it; buffers are None where it has none.
        loss_fn: `loss_fn(params, batch)`, with `buffers` as third argument where there are some.
        batch: `batch(seed)` gives a micro-batch; multiplying its `gain` with inf makes it overflow.
    """

    module: Any
    apply: fa.Apply
    params: dict[str, Tensor]
    buffers: Any
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Batch]


def criterion(logits: Tensor, batch: Batch) -> Tensor:
    """The mean cross-entropy in float32, times the batch's `gain`."""
    return F.cross_entropy(logits.float().flatten(0, -2), batch["y"].flatten()) * batch["gain"]


def overflowing(batch: Batch) -> Batch:
    """The micro-batch with gradients that are not finite."""
    return {**batch, "gain": batch["gain"] * torch.inf}


def mlp(dropout: float = 0.0, device: str = "cpu") -> Problem:
    return _problem(lambda: MLP(dropout), lambda g: (torch.randn(5, 6, generator=g), _labels(g, 3, 5)), device)


def conv_net(device: str = "cpu") -> Problem:
    return _problem(ConvNet, lambda g: (torch.randn(4, 2, 6, 6, generator=g), _labels(g, 3, 4)), device)


def transformer(dropout: float = 0.0, device: str = "cpu") -> Problem:
    return _problem(lambda: Transformer(dropout), lambda g: (_labels(g, 11, 2, 5), _labels(g, 11, 2, 5)), device)


PROBLEMS: dict[str, Callable[[], Problem]] = {"mlp": mlp, "conv_net": conv_net, "transformer": transformer}


def _labels(generator: torch.Generator, classes: int, *shape: int) -> Tensor:
    return torch.randint(classes, shape, generator=generator)


def _problem(
    build: Callable[[], nn.Module], draw: Callable[[torch.Generator], tuple[Tensor, Tensor]], device: str
) -> Problem:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = build().to(device)
    apply, params, buffers = fa.from_module(module)

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        return criterion(apply(params, batch["x"]), batch)

    def loss_with_buffers(params: dict[str, Tensor], batch: Batch, buffers: dict[str, Tensor]) -> fa.Loss:
        logits, buffers = apply.with_buffers(params, buffers, batch["x"])
        return fa.Loss(criterion(logits, batch), buffers=buffers)

    def batch(seed: int) -> Batch:
        x, y = draw(torch.Generator().manual_seed(seed))
        return {"x": x.to(device), "y": y.to(device), "gain": torch.ones((), device=device)}

    return Problem(module, apply, params, buffers or None, loss_with_buffers if buffers else loss_fn, batch)
