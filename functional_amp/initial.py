"""The state before the first window: init_state."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from functional_amp.engine.storage import copied, unshared
from functional_amp.mode import stage, transformed
from functional_amp.optim.base import Optimizer, init_with
from functional_amp.tree import PyTree, flatten, flatten_tensors, map_tensors
from functional_amp.values.scaler import DynamicScale, Scaler, check_scaler
from functional_amp.values.state import TrainState


@stage
def init_state(
    params: PyTree, optimizer: Optimizer | Any, scaler: Scaler | None = None, buffers: PyTree = None
) -> TrainState:
    """Makes the state before the first window. It shares no memory with what is given, so a step may donate it.

    Args:
        params: a pytree of tensors; they are copied, as the buffers are.
        optimizer: gives the optimizer state by its `init`.
        scaler: by default `DynamicScale()`. It moves to the device of the parameters.
        buffers: a pytree of tensors that the loss function takes and returns, or None.

    Raises:
        TypeError: for leaves that are not tensors, a scaler or an optimizer that is not one.

    >>> import torch
    >>> from functional_amp import sgd
    >>> init_state({"w": torch.ones(2)}, sgd(lr=0.1)).scaler.scale
    tensor(65536.)
    """
    scaler = DynamicScale() if scaler is None else scaler
    check_scaler(scaler)
    leaves = [leaf for leaf in flatten_tensors(params, "params").leaves if leaf is not None]
    flatten_tensors(buffers, "buffers")
    if any([not isinstance(leaf, Tensor) for leaf in flatten(scaler).leaves if leaf is not None]):
        raise TypeError(
            f"scaler: found {type(scaler).__name__}, expected a registered pytree node with tensors at its leaves. "
            "Register the class with functional_amp.register(cls, children, static), numbers among its static fields."
        )
    if leaves:
        scaler = cast(Scaler, map_tensors(lambda leaf: leaf.to(leaves[0].device), scaler))
    if transformed():
        opt_state = init_with(optimizer, params)
    else:
        params, buffers = map_tensors(copied, params), map_tensors(copied, buffers)
        scaler = cast(Scaler, map_tensors(copied, scaler))
        opt_state = unshared(init_with(optimizer, params), params)
    # One tensor each: torch.compile would guard on three inputs being one object, which later states never are.
    counters = [torch.zeros_like(scaler.scale, dtype=torch.int32) for _ in range(3)]
    return TrainState(params, opt_state, scaler, buffers, None, *counters)
