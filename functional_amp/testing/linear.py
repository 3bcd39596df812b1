"""A loss whose gradient is its batch, so that any leaf can be given any gradient; and random gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from functional_amp import Loss
from functional_amp.dtypes import accumulation_dtype, is_differentiable
from functional_amp.testing.compare import leaves_of, mapped


def linear_loss(params: Any, batch: dict[str, Any]) -> Loss:
    """The scalar product of parameters and batch, whose gradient is the batch.

    Args:
        params: a pytree of tensors.
        batch: `{"grads": tree, "weight": number}`, the tree having the structure of `params`; a None
            adds nothing. The weight may be missing, and is 1 then.

    >>> import torch
    >>> import functional_amp as fa
    >>> batch = {"grads": {"w": torch.tensor([3.0])}, "weight": 2.0}
    >>> grads, loss, _ = fa.scale_backward(linear_loss, fa.NoScale(), {"w": torch.ones(1)}, batch)
    >>> fa.unscale(grads).grads, loss
    ({'w': tensor([3.])}, tensor(3.))
    """
    value = torch.zeros(())
    for leaf, grad in zip(leaves_of(params), leaves_of(batch["grads"]), strict=True):
        if is_differentiable(leaf) and isinstance(grad, Tensor):
            value = value + (leaf * grad.conj()).real.sum().float()
    return Loss(value, batch.get("weight", 1.0))


def grads_for(params: Any, seed: int) -> Any:
    """Random gradients of a parameter tree, as `unscale` gives them; None at integer and bool leaves."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Tensor) -> Tensor | None:
        if not is_differentiable(leaf):
            return None
        return torch.randn(leaf.shape, generator=generator, dtype=accumulation_dtype(leaf.dtype)).to(leaf.device)

    return mapped(draw, params)
