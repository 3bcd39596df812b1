"""Which leaves of a window are not finite, as a tensor: for a history, without a host read."""

from __future__ import annotations

import torch
from torch import Tensor

from functional_amp.dtypes import is_differentiable, like
from functional_amp.engine.norm import max_abs
from functional_amp.engine.sharded import is_sharded
from functional_amp.torch_private import foreach_norm
from functional_amp.tree import flatten_tensors
from functional_amp.values.grads import ScaledGrads

SINGLE = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def nonfinite_leaves(grads: ScaledGrads) -> Tensor:
    """Tell for each gradient leaf whether it holds inf or NaN, without a host read.

    It reads the gradients once: about what their norm costs. Take it from the open window, before
    `step.update` closes it:

        state = step.accumulate(state, micro_batch)
        nonfinite = nonfinite_leaves(state.window.grads)
        state, metrics = step.update(state)
        history = record(history, metrics, nonfinite)

    Args:
        grads: the sum of a window, as it is stored: with its scale on it.

    Returns:
        Bool, [leaves]. False for leaves that are missing (None) or integers.

    Raises:
        TypeError: for anything but ScaledGrads.

    >>> nonfinite_leaves(ScaledGrads({"a": torch.ones(2), "b": torch.tensor([float("inf")])}, 8.0))
    tensor([False,  True])
    """
    if not isinstance(grads, ScaledGrads):
        raise TypeError(f"grads: found {type(grads).__name__}, expected the ScaledGrads of a window: window.grads.")
    leaves = [
        leaf.detach() if is_differentiable(leaf) else None for leaf in flatten_tensors(grads.tree, "grads").leaves
    ]
    zero = torch.zeros((), device=grads.scale.device)
    bounds = [(zero, zero) if pair is None else pair for pair in _bounds(leaves)]
    low, high = (torch.stack([like(bound, zero) for bound in side]) for side in zip(*bounds))
    return ~(torch.isfinite(low) & torch.isfinite(high))


def _bounds(leaves: list[Tensor | None]) -> list[tuple[Tensor, Tensor] | None]:
    """Two numbers of each leaf that are finite if and only if its elements are."""
    present = [leaf for leaf in leaves if leaf is not None]
    if present and _take_foreach(present):
        # A few kernels for all leaves. A double holds the sum of the squares of any float32 numbers.
        norms = iter(foreach_norm(present, torch.float64))
        return [None if leaf is None else (norm := next(norms), norm) for leaf in leaves]
    return [None if leaf is None else _bounds_of(leaf) for leaf in leaves]


def _take_foreach(leaves: list[Tensor]) -> bool:
    """A CPU adds doubles slowly; float64 leaves and DTensors have other ways."""
    return all([type(leaf) is Tensor and leaf.is_cuda and leaf.dtype in SINGLE for leaf in leaves])


def _bounds_of(leaf: Tensor) -> tuple[Tensor, Tensor]:
    simple = leaf.is_floating_point() and leaf.dtype.itemsize > 1 and leaf.numel() > 0 and not is_sharded(leaf)
    if not simple:
        peak = max_abs([leaf])
        return peak, peak
    low, high = torch.aminmax(leaf)
    return low, high
