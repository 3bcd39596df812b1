"""The values of the composed step: Window, TrainState, Metrics, init_state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_amp.backward import ScaledGrads
from functional_amp.inplace import apart, copied
from functional_amp.optim.base import Optimizer, init_with
from functional_amp.scaler import DynamicScale, Scaler, check_scaler
from functional_amp.transform import stage, transformed
from functional_amp.tree import PyTree, flatten, flatten_tensors, map_tensors, register


@dataclass(frozen=True, eq=False)
class Window:
    """The open window: what its micro-batches have given so far.

    Attributes:
        grads: the sum of their gradients, with its scale and weight.
        loss: float32, 0-dim; the weighted sum of their losses.
        buffers: the buffers after the last one; those of the state are kept until the window closes.
        params: the copies in the step's `compute_dtype` that the loss function is given, or None.
    """

    grads: ScaledGrads
    loss: Tensor
    buffers: PyTree
    params: PyTree = None


@dataclass(frozen=True, eq=False)
class TrainState:
    """All the state of a training run, as one value.

    Attributes:
        params, opt_state, scaler, buffers: as of the last applied update.
        window: the open window, None between windows.
        applied, skipped, skipped_in_a_row: int32, 0-dim; windows that moved the parameters, windows
            that did not, and how many of these came last.

    A state that was given to a step with donate=True has no fields any more: reading one raises
    RuntimeError.
    """

    params: PyTree
    opt_state: PyTree
    scaler: Any
    buffers: PyTree
    window: Window | None
    applied: Tensor
    skipped: Tensor
    skipped_in_a_row: Tensor

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is missing: the fields of a state that was given away."""
        gone = vars(self).get("_gone")
        if gone is None or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise RuntimeError(f"state.{name}: {gone}")


register(Window, ("grads", "loss", "buffers", "params"))
register(TrainState, ("params", "opt_state", "scaler", "buffers", "window", "applied", "skipped", "skipped_in_a_row"))


class Metrics(NamedTuple):
    """What a window was like: 0-dim tensors on the device, for nobody in the step to read.

    Attributes:
        loss: the weighted mean of the losses of its micro-batches, unscaled; 0 without weight.
        grad_norm: the global norm before clipping, in true units.
        finite: whether the gradients were.
        scale: the loss scale that this window used.
        weight: its total weight.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    scale: Tensor
    weight: Tensor


@stage
def init_state(
    params: PyTree, optimizer: Optimizer | Any, scaler: Scaler | None = None, buffers: PyTree = None
) -> TrainState:
    """The state before the first window, in storage of its own: a donating step writes to nothing of yours.

    Args:
        params: a pytree of tensors; they are copied, as the buffers are.
        optimizer: gives the optimizer state by its `init`.
        scaler: by default `DynamicScale()`. It moves to the device of the parameters.
        buffers: a pytree of tensors that the loss function takes and returns, or None.

    Raises:
        TypeError: for leaves that are no tensors, something that is no scaler or optimizer.

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
        opt_state = apart(init_with(optimizer, params), params)
    # One tensor each: torch.compile guards on two inputs being the same object, and they never are again.
    counters = [torch.zeros_like(scaler.scale, dtype=torch.int32) for _ in range(3)]
    return TrainState(params, opt_state, scaler, buffers, None, *counters)
