"""Is the run well: findings from the state and its last windows, and what to look at next."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.debug.history import History
from functional_amp.debug.nonfinite import nonfinite_paths
from functional_amp.debug.table import power
from functional_amp.dtypes import FLOAT32_MAX
from functional_amp.values.state import Metrics, TrainState

EXPLAIN = "Run explain(loss_fn, state, window) on a window that was skipped"
NAN_WINDOWS = 3  # one bad batch is not a bad run


@dataclass(frozen=True)
class Finding:
    """Something about a run that is not as it should be.

    Attributes:
        name: which check found it: "skips in a row", "floor", "ceiling", "scale below 1", "state",
            "norm" or "loss".
        level: "error" where the run no longer trains as it should, "warning" where it may.
        sure: "certain" is a fact, "likely" has few other explanations, "possible" has some.
        found: what it is.
        advice: what to run next.
    """

    name: str
    level: Literal["error", "warning"]
    sure: Literal["certain", "likely", "possible"]
    found: str
    advice: str

    def __str__(self) -> str:
        return f"{self.level} ({self.sure}): {self.found} {self.advice}"


def check_health(
    state: TrainState, history: History | Metrics | None = None, *, max_skipped: int = 30, raise_: bool = False
) -> list[Finding]:
    """Look for what is wrong with a run; reads the state on the host.

    It reads all parameters, buffers and optimizer state once, and waits for the device: call it every
    n windows, not in each.

        skips in a row   more windows than `max_skipped` were skipped, one after the other
        floor            the scale is at its `min_scale` and windows are still skipped
        ceiling          the scale can't grow any more
        scale below 1    and windows are still skipped, though no more than `max_skipped`
        state            parameters, buffers or optimizer state are not finite
        norm             it is not finite though the gradients are, or NaN three times in a row at a scale <= 1
        loss             it is not finite though the gradients are

    Args:
        state: after an update.
        history: the `History` of the run or the `Metrics` of its last window; None leaves "norm" and
            "loss" out.
        max_skipped: how many skipped windows in a row are nothing to worry about. Thirty halvings
            bring 2**16 to 2**-14.
        raise_: raise if any finding is an error.

    Returns:
        The findings, errors first; [] for a run that is well.

    Raises:
        FloatingPointError: with raise_=True, naming the errors.
        TypeError, ValueError: for an argument of the wrong type, a max_skipped below 0.

    >>> import torch
    >>> from functional_amp import init_state, sgd
    >>> check_health(init_state(torch.ones(1), sgd(0.1)))
    []
    >>> state = init_state(torch.tensor([float("inf")]), sgd(0.1))
    >>> check_health(state)[0].found
    "the state is not finite at ['params']."
    """
    if not (history is None or isinstance(history, (History, Metrics))):
        raise TypeError(f"history: found {type(history).__name__}, expected a History, the Metrics of a step or None.")
    empty = _is_empty(history)
    findings = skips_in_a_row(state, max_skipped, empty=empty)
    findings += [*_of_scale(state, stuck=bool(findings), empty=empty), *_of_tensors(state), *_of_windows(history)]
    findings.sort(key=lambda finding: finding.level != "error")
    errors = [finding for finding in findings if finding.level == "error"]
    if raise_ and errors:
        raise FloatingPointError("\n".join(map(str, errors)))
    return findings


def skips_in_a_row(state: TrainState, max_skipped: int, *, empty: bool = False) -> list[Finding]:
    """The finding of that name, if there is one; it reads three numbers.

    Args:
        empty: whether the last window is known to have been skipped for want of weight.
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state: found {type(state).__name__}, expected the TrainState of init_state or of a step.")
    check_number(max_skipped, "max_skipped", "an int", integer=True)
    if max_skipped < 0:
        raise ValueError(f"max_skipped: found {max_skipped}, expected at least 0.")
    skipped, scale, moved = _of_worst(state)
    if skipped <= max_skipped:
        return []
    if empty:
        found = (
            f"{skipped} updates in a row were skipped; the gradients of the last window are finite, its weight is 0."
        )
        advice = "Look at Loss(..., weight=), and at what a mask leaves over; or leave such windows out."
        return [Finding("skips in a row", "error", "certain", found, advice)]
    found = f"{skipped} updates in a row were skipped; the loss scale is down to {scale:g} after {moved} applied ones."
    advice = (
        "A scale that low does not help: look for inf or NaN in the data, the parameters or the loss itself, or for "
        "windows without weight. "
        f"{EXPLAIN}."
    )
    return [Finding("skips in a row", "error", "certain", found, advice)]


def _of_scale(state: TrainState, stuck: bool, empty: bool) -> list[Finding]:
    skipped, scale, _ = _of_worst(state)
    floor = getattr(state.scaler, "min_scale", 0.0)
    # One bad batch, or a scale that has just been lowered and not tried yet; or windows without weight.
    if skipped < 2 or empty:
        return _ceiling(state.scaler)
    if scale <= floor:
        found = f"the scale is at its floor, {power(floor)}, and windows are still skipped ({skipped} in a row)."
        advice = f"{EXPLAIN}: it tells the largest scale that works, or that none does."
        return [Finding("floor", "error", "certain", found, advice)]
    if scale < 1 and not stuck:
        found = f"the scale is {power(scale)} and windows are still skipped: the gradients overflow without any scale."
        advice = f"{EXPLAIN}. A loss that is a sum where a mean was meant has such gradients."
        return [Finding("scale below 1", "error", "likely", found, advice)]
    return _ceiling(state.scaler)


def _of_worst(state: TrainState) -> tuple[int, float, int]:
    """The skips in a row, the scale and the applied updates; of an ensemble, of the member that skipped most."""
    skips = _numbers(state.skipped_in_a_row)
    member = skips.index(max(skips))
    return int(skips[member]), _numbers(state.scaler.scale)[member], int(_numbers(state.applied)[member])


def _ceiling(scaler: Any) -> list[Finding]:
    growth, ceiling = getattr(scaler, "growth_factor", None), getattr(scaler, "max_scale", math.inf)
    scale = max(_numbers(scaler.scale))
    if growth is None:
        return []
    advice = "Run underflow_report(loss_fn, params, batch, dtype=...): it tells what is lost at each scale."
    if ceiling < FLOAT32_MAX and scale >= ceiling:
        found = f"the scale is at its ceiling, max_scale={power(ceiling)}: larger gradients would still fit."
        return [Finding("ceiling", "warning", "possible", found, advice)]
    if scale * growth > FLOAT32_MAX:
        found = f"the scale has grown to {power(scale)}, the end of float32: the gradients are zero, or nearly so."
        return [Finding("ceiling", "error", "likely", found, advice)]
    return []


def _of_tensors(state: TrainState) -> list[Finding]:
    parts = {"params": state.params, "buffers": state.buffers, "opt_state": state.opt_state}
    bad = [f"{name}.{path}".removesuffix(".<root>") for name, tree in parts.items() for path in nonfinite_paths(tree)]
    if not bad:
        return []
    more = f" and {len(bad) - 5} more" if len(bad) > 5 else ""
    advice = "Run nonfinite_report(state), and go back to a checkpoint: a skipped update does not heal it."
    return [Finding("state", "error", "certain", f"the state is not finite at {bad[:5]}{more}.", advice)]


def _of_windows(history: History | Metrics | None) -> list[Finding]:
    windows = _windows(history)
    if not windows:
        return []
    findings = []
    last = windows[-1]
    finite, norm, loss = last["finite"], last["grad_norm"], last["loss"]
    if finite and not math.isfinite(norm):
        found = f"the norm of the last window is {norm:g} though its gradients are finite: it leaves float32."
        advice = (
            "Run nonfinite_report(window.grads) for their sizes; a scaler with a lower max_scale keeps them smaller."
        )
        findings.append(Finding("norm", "warning", "certain", found, advice))
    recent = windows[-NAN_WINDOWS:]
    nan = len(recent) == NAN_WINDOWS and all(math.isnan(window["grad_norm"]) for window in recent)
    if nan and last["scale"] <= 1:
        found = f"the norm was NaN in {NAN_WINDOWS} windows in a row, the last at a scale of {power(last['scale'])}."
        advice = f"{EXPLAIN}: without scaling, NaN comes from the data, the parameters or the loss."
        findings.append(Finding("norm", "error", "likely", found, advice))
    if finite and not math.isfinite(loss):
        found = f"the loss of the last window is {loss:g} though its gradients are finite: it was applied."
        advice = "Look at what the loss adds outside the graph (detached terms, masked items) and at the data."
        findings.append(Finding("loss", "warning", "certain", found, advice))
    return findings


def _is_empty(history: History | Metrics | None) -> bool:
    """Whether the last window had no weight: finite, and not applied."""
    last = _windows(history)[-1:]
    return bool(last) and bool(last[0]["finite"]) and not last[0]["applied"]


def _windows(history: History | Metrics | None) -> list[dict[str, Any]]:
    """The last windows, oldest first."""
    if isinstance(history, History):
        columns = history.to_dict()
        return [dict(zip(columns, values)) for values in zip(*columns.values())]
    if history is None:
        return []
    return [
        {
            "loss": float(history.loss),
            "grad_norm": float(history.grad_norm),
            "scale": float(history.scale),
            "finite": bool(history.finite),
            "applied": bool(history.applied),
        }
    ]


def _numbers(value: Tensor) -> list[float]:
    return value.detach().flatten().tolist()
