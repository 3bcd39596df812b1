"""The values of the composed step: Window, TrainState, Metrics."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from torch import Tensor

from functional_amp.registry import register
from functional_amp.tree import PyTree
from functional_amp.values.grads import ScaledGrads

GIVEN = (
    "this TrainState was donated to a step, and its storage holds the next state. "
    "Go on with the state that the step returned, or use make_step(..., donate=False)."
)
LOST = (
    "this TrainState is lost: a donating step raised after it had begun to write into it. "
    "Go on from a checkpoint, or use make_step(..., donate=False), which never writes."
)
LOST_WINDOW = (
    "a donating step raised after it had begun to add to the open window, which is lost; params, opt_state, scaler "
    "and buffers are as they were. Go on with dataclasses.replace(state, window=None), and repeat the window."
)


class GivenAwayError(RuntimeError, AttributeError):
    """A field was asked for of a state that was donated; hasattr says False."""


@dataclass(frozen=True, eq=False)
class Window:
    """The open window: what its micro-batches have given so far.

    A window is the micro-batches of one optimizer step: `accumulation_steps` in the imperative loop.

    Attributes:
        grads: the sum of their gradients, with its scale and weight.
        loss: float32, 0-dim; the weighted sum of their losses.
        buffers: the buffers after the last one; those of the state are kept until the window closes.
        params: the copies in the step's `compute_dtype` that the loss function is given, or None.
        aux: the weighted sum of what the loss function handed out, in float32.
        reduction: the `Loss.reduction` of its micro-batches.
    """

    grads: ScaledGrads
    loss: Tensor
    buffers: PyTree
    params: PyTree = None
    aux: PyTree = None
    reduction: str = "mean"


@dataclass(frozen=True, eq=False, repr=False)
class TrainState:
    """All the state of a training run, as one value.

    Attributes:
        params, opt_state, scaler, buffers: as of the last applied update.
        window: the open window, None between windows.
        applied, skipped, skipped_in_a_row: int32, 0-dim; windows that moved the parameters, windows
            that did not, and how many of these came last. They stay at the end of int32.

    A state that was given to a step with donate=True has no fields any more: reading one, copying it or
    saving it raises RuntimeError.
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
        raise GivenAwayError(f"state.{name}: {gone}")

    def __getstate__(self) -> dict[str, Any]:
        """What copy, pickle and torch.save take: all fields, or none."""
        gone = vars(self).get("_gone")
        if gone is not None:
            raise GivenAwayError(f"state: {gone}")
        return dict(vars(self))

    def __repr__(self) -> str:
        held = vars(self)
        if "_gone" in held and "params" not in held:
            return f"TrainState(given away: {held['_gone']})"
        names = [field.name for field in fields(self)]
        shown = [f"{name}={held[name]!r}" if name in held else f"{name}=<lost>" for name in names]
        return f"TrainState({', '.join(shown)})"


register(Window, ("grads", "loss", "buffers", "params", "aux"), ("reduction",))
register(TrainState, ("params", "opt_state", "scaler", "buffers", "window", "applied", "skipped", "skipped_in_a_row"))


class Metrics(NamedTuple):
    """What a window was like: 0-dim tensors on the device, for nobody in the step to read.

    Attributes:
        loss: the weighted mean of the losses of its micro-batches, unscaled; 0 without weight. Their sum
            where the loss function says `reduction="sum"`.
        grad_norm: the global norm before clipping, in true units.
        finite: whether the gradients were.
        applied: whether the update was: finite, and with a weight above 0.
        scale: the loss scale that this window used.
        weight: its total weight.
        aux: the weighted mean (or sum, as of the loss) of the aux tree of the loss function, in float32; ()
            where there is none.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    applied: Tensor
    scale: Tensor
    weight: Tensor
    aux: PyTree = ()
    stop: Tensor | tuple[()] = ()
