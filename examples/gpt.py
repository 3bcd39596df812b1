"""A small GPT over bytes. An ordinary module: nothing in it knows of mixed precision."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """How large the model is; `context` is the number of bytes it looks back on."""

    layers: int
    heads: int
    width: int
    context: int
    dropout: float = 0.0


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention, then a perceptron; each reads the normalized stream and adds to it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.expand = nn.Linear(shape.width, 4 * shape.width)
        self.contract = nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.contract(F.gelu(self.expand(self.norm2(x)))))


class GPT(nn.Module):
    """From bytes of shape (batch, time) to the logits of each next byte, (batch, time, 256)."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.position = nn.Parameter(0.02 * torch.randn(shape.context, shape.width))
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialize)
        # The head shares it: the logit of repeating a byte starts at width * std, whatever the width.
        nn.init.normal_(self.embedding.weight, std=7 / shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def _initialize(module: nn.Module) -> None:
    """Linear maps keep the variance, and blocks start as the identity."""
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features**-0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, Block):
        nn.init.zeros_(module.attention.out.weight)
        nn.init.zeros_(module.contract.weight)
