"""The work that is measured: models, and how their micro-batches are made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Logits of the next token at every place, places flattened."""

    def __init__(self, layers: int, width: int, tokens: int = 256, length: int = 64, heads: int = 4):
        super().__init__()
        self.embed, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, tokens)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x))).flatten(0, 1)


@dataclass(frozen=True)
class Task:
    """A model for the cross entropy, and what makes a micro-batch of it."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]

    def seeded_model(self, seed: int, device: torch.device) -> nn.Module:
        """A new model, equal to every other of this seed: each variant has parameters of its own."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.model().to(device)

    def window(self, length: int, seed: int, device: torch.device) -> list[Batch]:
        """Micro-batches, equal to all others of this seed."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return [(x.to(device), y.to(device)) for x, y in (self.batch() for _ in range(length))]


def mlp(width: int = 512, layers: int = 6, batch: int = 64) -> Task:
    """Linear layers of one width, two leaves each, and a head for 10 classes."""

    def model() -> nn.Module:
        hidden = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    return Task("mlp", model, lambda: (torch.randn(batch, width), torch.randint(10, (batch,))))


class Residual(nn.Module):
    """A small change to its input: hundreds of these in a row neither vanish nor overflow."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * F.gelu(self.linear(x))


def residual_mlp(leaves: int, width: int = 32, batch: int = 8) -> Task:
    """A model with so many parameter tensors, an even number."""

    def model() -> nn.Module:
        return nn.Sequential(*(Residual(width) for _ in range(leaves // 2 - 1)), nn.Linear(width, 10))

    return Task("residual mlp", model, lambda: (torch.randn(batch, width), torch.randint(10, (batch,))))


def transformer(layers: int = 4, width: int = 128, batch: int = 4, length: int = 64) -> Task:
    def make_batch() -> Batch:
        tokens = torch.randint(256, (batch, length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].flatten()

    return Task("transformer", lambda: Transformer(layers, width, length=length), make_batch)


def convnet(width: int = 32, layers: int = 4, batch: int = 16, size: int = 16) -> Task:
    """Convolutions with BatchNorm in train mode: its running statistics are buffers."""

    def model() -> nn.Module:
        stack: list[nn.Module] = []
        for index in range(layers):
            stack += [nn.Conv2d(width if index else 3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        return nn.Sequential(*stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))

    return Task("convnet", model, lambda: (torch.randn(batch, 3, size, size), torch.randint(10, (batch,))))


SMALLEST = {
    "mlp": lambda: mlp(width=16, layers=2, batch=4),
    "transformer": lambda: transformer(layers=1, width=16, batch=2, length=8),
    "convnet": lambda: convnet(width=4, layers=1, batch=4, size=8),
}
"""For `--smoke`."""
TASKS = {"mlp": mlp, "transformer": transformer, "convnet": convnet}


def task(name: str, smoke: bool) -> Task:
    return (SMALLEST if smoke else TASKS)[name]()
