"""What to do about a fault that `explain` found."""

from __future__ import annotations

import torch

from functional_amp.debug.blame import Origin, Outside
from functional_amp.debug.explain_range import Range
from functional_amp.debug.explain_table import scale_text
from functional_amp.registry import with_fields
from functional_amp.values.scale import Scaler
from functional_amp.values.scaler import update_scale

MOST_SKIPS = 1000
"""By then a scaler that moves at all is at its floor."""

PRECISION = (
    "The eager replay is finite. Check that scale= is the skipped window's (metrics.scale: the state returned has "
    "backed off already), and pass the seed that its dropout was drawn from. If the step ran inside torch.autocast, "
    "call explain inside it too. If the step is compiled: compilers keep float16 intermediates in float32. "
    "make_step(..., compile={'options': {'emulate_precision_casts': True}}) makes both agree; "
    "torch._inductor.config has the same option."
)

WEIGHT = (
    "The gradients are finite, and the weights of the window sum to {weight:g}: it is applied where they sum to more "
    "than 0. Look at Loss(..., weight=) and at what a mask leaves over, or leave such a window out."
)

OTHER_RANKS = (
    "This rank's micro-batches are finite. Call explain on every rank, with its own window: where one of them is bad, "
    "its rank names it. Where none is, the sum over the ranks left float32: use a smaller loss scale. "
)

APPLIED = "The gradients of the window are finite all the same, and the step applies it."

_SINGULAR = {
    "log": "log of 0 is -inf and of a negative number NaN: add an eps, or clamp the input from below.",
    "log2": "log2 of 0 is -inf and of a negative number NaN: add an eps, or clamp the input from below.",
    "log1p": "log1p of -1 is -inf: clamp the input from below.",
    "exp": "exp overflows: subtract the largest element first, or use softmax, log_softmax or logsumexp.",
    "expm1": "expm1 overflows: clamp the input from above.",
    "div": "a division by 0: give the divisor an eps, or leave the empty rows out (Loss(..., weight=0)).",
    "reciprocal": "a division by 0: give the divisor an eps.",
    "rsqrt": "rsqrt of 0 is inf: add an eps inside the root.",
    "sqrt": "sqrt of a negative number is NaN: clamp the input at 0, with an eps for the derivative.",
    "pow": "the power leaves the dtype: take it in float32.",
    "_softmax": "a row of nothing but -inf: let each row see one position, or use a large finite number in the mask.",
    "_log_softmax": "a row of nothing but -inf: let each row see one class.",
}
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "mul", "dot", "mv", "addmv", "_scaled_dot_product")


def advise(root: Origin | None, stage: str, scale: float, good: float | None, scaler: Scaler) -> str:
    """The advice for the root of a fault; the scaler is that of the state that was given."""
    if good is not None:
        return _about_scale(stage, scale, good, scaler)
    if isinstance(root, Outside):
        return _about_input(root)
    if stage == "norm" and root is None:
        return "Gradients and norm are finite; clipping to this max_norm leaves float32. Choose a larger one."
    if stage in ("unscale", "norm", "accumulate"):
        return (
            "The sum or the norm of the gradients leaves float32 in true units: the loss is too large by itself. "
            "Divide it, or look at its largest term."
        )
    if root is None or root.output is None:
        return "The loss or its gradient is not finite at any scale: look at the data and the loss itself."
    if root.number is not None:
        return (
            f"No scale helps: {root.operator} was given the number {root.number:g}, which the program computed or read "
            "as a Python float. Look at where it comes from."
        )
    name = root.operator.rstrip("_") if not root.operator.startswith("_") else root.operator
    if stage == "backward":
        return (
            f"The derivative itself is not finite here ({name}), at any scale: a root, a logarithm or a division at 0, "
            "perhaps in the branch of a where that is not taken. Make the input safe before the operator "
            "(torch.where twice, clamp or an eps), not its result after it."
        )
    if root.operator in ("_to_copy", "copy_") and root.inputs:
        return (
            f"{_magnitude(root.inputs[0])} does not fit {_dtype(root.output.dtype)} (at most "
            f"{torch.finfo(root.output.dtype).max:.5g}): keep it in float32, use bfloat16, or make it smaller."
        )
    if name in _SINGULAR:
        return "No scale helps: " + _SINGULAR[name]
    if name.startswith(_PRODUCTS) and root.output.dtype == torch.float16 and not root.output.nan:
        return (
            "No scale helps: the forward's own values leave float16 (at most 65504). Run this module in float32 "
            "or bfloat16, or look at why its input or weight has become so large."
        )
    return "No scale helps: the forward itself gives it. Look at the inputs' ranges above."


def _about_scale(stage: str, scale: float, good: float, scaler: Scaler) -> str:
    skips, name = _skips_until(good, scale, scaler), type(scaler).__name__
    text = f"The scale is too large for this window: {scale_text(good)} works and {scale_text(2 * good)} does not. "
    if skips is None:
        number = f"{good:g}" if float(f"{good:g}") == good else repr(good)  # six digits of 2**20 are more than it
        text += f"This {name} does not get there by itself: dataclasses.replace(state, scaler=DynamicScale({number}))."
    else:
        text += f"This {name} gets there in at most {skips} skipped window{'s' if skips > 1 else ''}."
    if good < 1:
        text += (
            " A scale below 1 costs small gradients: better run this module in float32 or bfloat16, "
            "or make its gradient smaller."
        )
    elif stage == "backward" and good < 2.0**8:
        text += " If it has to stay this low, look at underflow_report, and at why this gradient is so much larger."
    return text


def _skips_until(good: float, scale: float, scaler: Scaler) -> int | None:
    """How many windows a scaler skips on its way down to a scale, the one that was explained included."""
    backed_off = float(scaler.scale) < scale  # the state came back from that window
    scaler = scaler if backed_off else with_fields(scaler, scale=torch.full_like(scaler.scale, scale))
    for skips in range(backed_off, MOST_SKIPS + 1):
        if float(scaler.scale) <= good:
            return skips
        scaler = update_scale(scaler, torch.zeros_like(scaler.scale, dtype=torch.bool))
    return None


def _about_input(root: Outside) -> str:
    kind = "NaN" if root.range.nan else "inf"
    where = {
        "params": "It was there before this window: an update wrote it, or it was loaded. Go back to a checkpoint.",
        "batch": "No scale helps: clean the data, or leave the sample out.",
        "buffers": "A statistic was not finite before this window: reset it, or go back to a checkpoint.",
    }
    what = where.get(root.name.split(".")[0], "It belongs to the loss function, or was made outside torch.")
    return f"{root.name} holds {kind}. {what}"


def _magnitude(given: Range) -> str:
    return f"A value of {max(abs(given.low), abs(given.high)):.4g} in {given.name}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
