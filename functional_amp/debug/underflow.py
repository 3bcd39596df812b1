"""Where gradients die in half precision: the share lost of each leaf at each scale, and the scale to choose."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.debug.forward import ForwardRanges, ModuleRange
from functional_amp.debug.plots import plot_underflow
from functional_amp.debug.table import percent, power, table
from functional_amp.dtypes import is_differentiable
from functional_amp.engine.random import seeded
from functional_amp.precision import autocast
from functional_amp.stages.backward import scale_backward
from functional_amp.stages.freeze import frozen_leaves
from functional_amp.tree import PyTree, flatten_tensors, paths
from functional_amp.values.grads import Loss
from functional_amp.values.scaler import StaticScale

HALF = (torch.float16, torch.bfloat16)
SCALES = tuple(2.0**exponent for exponent in range(-8, 33, 2))
HEADROOM = 4.0  # two bits below the largest scale that is finite: batches differ
SLACK = 0.001


@dataclass(frozen=True)
class LeafRange:
    """The gradient of one leaf, at each scale.

    Attributes:
        path: of the leaf.
        elements: how many of its gradient elements are not zero in float32.
        largest: the largest absolute value among them.
        lost: at each scale, the share of them that is lost: zero, or more than half off, at this scale
            and not at every finite one.
        never: the share of them that no finite scale brings back: rounding noise around a gradient
            that is zero by algebra, mostly.
        overflows: at each scale, how many elements of the leaf are inf or NaN.
        headroom: from `largest` at the recommended scale to the largest number of the dtype, in
            powers of two; inf for a gradient of zeros, NaN without a recommendation.
    """

    path: str
    elements: int
    largest: float
    lost: tuple[float, ...]
    never: float
    overflows: tuple[int, ...]
    headroom: float


@dataclass(frozen=True)
class UnderflowReport:
    """What `underflow_report` found.

    Attributes:
        dtype: the half precision.
        scales: that were tried, ascending.
        leaves: the gradients, in the order of the parameters.
        modules: the forward, which no loss scale changes.
        lost: at each scale, the share of all gradient elements that is lost.
        recommended: the scale to start with: the largest finite one minus two bits, never below the
            smallest that loses at most 0.1 % more than the best. None where no scale is finite.
    """

    dtype: torch.dtype
    scales: tuple[float, ...]
    leaves: tuple[LeafRange, ...]
    modules: tuple[ModuleRange, ...]
    lost: tuple[float, ...]
    recommended: float | None

    @property
    def finite(self) -> tuple[bool, ...]:
        """At each scale, whether all gradients are finite."""
        return tuple(not any(leaf.overflows[i] for leaf in self.leaves) for i in range(len(self.scales)))

    def plot(self, path: str | Path) -> None:
        """Draw leaf by scale: light to dark blue for what is lost, orange for overflow, the choice framed.

        Raises:
            ImportError: without matplotlib, which the extra `plot` installs.
        """
        plot_underflow(self, path)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        lines = [f"Gradients in {name}: % of the elements lost at each loss scale (∞: overflow)", _gradients(self), ""]
        if self.recommended is None:
            lines.append("No scale tried is finite: run explain(loss_fn, state, window).")
        else:
            lines.append(f"Recommended loss scale: {power(self.recommended)}")
            if all(self.finite):
                lines.append(f"Nothing overflowed up to {power(self.scales[-1])}: larger scales would do as well.")
        lines += ["", f"The forward in {name}: what no loss scale changes", _forward(self)]
        return "\n".join(lines)


def underflow_report(
    loss_fn: Callable[..., Tensor | Loss],
    params: PyTree,
    batch: Any,
    *,
    dtype: torch.dtype,
    scales: Sequence[float] | None = None,
) -> UnderflowReport:
    """Compare the gradients of `autocast(loss_fn, dtype)` at each scale with those of `loss_fn` in float32.

        lost  = (g == 0 or |g / scale - reference| > |reference| / 2), where reference != 0
        never = lost at every scale at which all gradients are finite
        share of a leaf at a scale = (lost and not never) / (reference != 0)

    It runs `loss_fn` once in float32 and once for each scale, with the same random numbers, and keeps
    a bool for each element and scale. Nothing is changed: neither params nor generators.

    Args:
        loss_fn: `loss_fn(params, batch)`, in float32: before `autocast` or `with_policy`. Bind further
            arguments, as buffers: `lambda params, batch: loss_fn(params, batch, buffers)`.
        params: a pytree of float32 tensors.
        batch: one micro-batch.
        dtype: float16 or bfloat16.
        scales: at least two positive numbers; by default 2**-8, 2**-6, ... 2**32.

    Returns:
        An `UnderflowReport`; printed, it is two tables.

    Raises:
        TypeError, ValueError: for another dtype, scales outside float32, half-precision parameters, a
            loss function that computes in half precision by itself, a batch without weight, a float32
            gradient that is not finite.

    >>> import torch
    >>> loss_fn = lambda params, x: 1e-7 * (x @ params).float().sum()
    >>> report = underflow_report(loss_fn, torch.ones(4, 1), torch.ones(2, 4), dtype=torch.float16)
    >>> report.scales[:5], report.lost[:5]  # 1e-7 / 4 is below 2**-25, which float16 rounds to 0
    ((0.00390625, 0.015625, 0.0625, 0.25, 1.0), (1.0, 1.0, 1.0, 1.0, 0.0))
    """
    scales = _check(params, dtype, scales)
    every = flatten_tensors(params, "params").leaves
    still = frozen_leaves(loss_fn, params, every)
    names = [p for p, leaf, kept in zip(paths(params), every, still) if is_differentiable(leaf) and not kept]
    reference = _reference(loss_fn, params, batch, names)
    nonzero = [leaf != 0 for leaf in reference]
    watch = ForwardRanges(dtype)

    @functools.wraps(loss_fn)
    def watched(params: PyTree, batch: Any) -> Any:
        with watch:
            return half(params, batch)

    half = autocast(loss_fn, dtype)
    lost: list[list[Tensor]] = []  # by scale and leaf
    overflows: list[list[int]] = []
    for index, scale in enumerate(scales):
        grads = _gradients_of(watched if index == 0 else half, scale, params, batch)
        bad = [~torch.isfinite(leaf) for leaf in grads]
        overflows.append([int(mask.sum()) for mask in bad])
        lost.append(
            [
                where & ~infinite & ((found == 0) | ((found - wanted).abs() > 0.5 * wanted.abs()))
                for where, infinite, found, wanted in zip(nonzero, bad, grads, reference)
            ]
        )
    finite = [not any(counts) for counts in overflows]
    never = [torch.zeros_like(where) for where in nonzero]
    if any(finite):
        never = [torch.stack(masks).all(0) for masks in zip(*(row for row, good in zip(lost, finite) if good))]
    counts = [[int((mask & ~gone).sum()) for mask, gone in zip(row, never)] for row in lost]
    elements = [int(where.sum()) for where in nonzero]
    shares = tuple(sum(row) / max(1, sum(elements)) for row in counts)
    recommended = _recommended(scales, finite, shares)
    leaves = tuple(
        LeafRange(
            path=name,
            elements=elements[i],
            largest=float(reference[i].abs().max()) if reference[i].numel() else 0.0,
            lost=tuple(row[i] / max(1, elements[i]) for row in counts),
            never=int(never[i].sum()) / max(1, elements[i]),
            overflows=tuple(row[i] for row in overflows),
            headroom=_headroom(reference[i], recommended, dtype),
        )
        for i, name in enumerate(names)
    )
    return UnderflowReport(dtype, scales, leaves, watch.ranges(), shares, recommended)


def _reference(loss_fn: Any, params: PyTree, batch: Any, names: list[str]) -> list[Tensor]:
    """The gradients of a loss function that computes in float32, and is finite there."""
    watch = ForwardRanges(*HALF)

    @functools.wraps(loss_fn)
    def watched(params: PyTree, batch: Any) -> Any:
        with watch:
            return loss_fn(params, batch)

    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        reference = _gradients_of(watched, 1.0, params, batch)
    if watch.ranges():
        raise ValueError(
            f"loss_fn: found half precision in {watch.ranges()[0].module}, expected a loss function that computes "
            "in float32. Remedy: pass it as it is before autocast or with_policy, which keep it as "
            "loss_fn.__wrapped__; the report casts by itself."
        )
    bad = [name for name, leaf in zip(names, reference) if not torch.isfinite(leaf).all()]
    if bad:
        raise ValueError(
            f"batch: found a float32 gradient with inf or NaN at {bad}, expected a finite one. "
            "Remedy: run explain(loss_fn, state, [batch]), or pass another batch."
        )
    return reference


def _gradients_of(loss_fn: Any, scale: float, params: PyTree, batch: Any) -> list[Tensor]:
    """In true units, as float64: what is told apart must not round again."""
    with seeded(0):
        grads = scale_backward(loss_fn, StaticScale(scale), params, batch, backend="autograd").grads
    if not grads.weight > 0:
        raise ValueError(
            f"batch: found a weight of {float(grads.weight):g}, expected one above 0: the others have no gradient. "
            "Remedy: pass a batch with items that count."
        )
    divisor = grads.scale.double() * grads.weight.double()
    leaves = [leaf for leaf in flatten_tensors(grads.tree, "grads").leaves if is_differentiable(leaf)]
    return [leaf.to(torch.promote_types(leaf.dtype, torch.float64)) / divisor.to(leaf.device) for leaf in leaves]


def _recommended(scales: tuple[float, ...], finite: list[bool], shares: tuple[float, ...]) -> float | None:
    """The rule of `UnderflowReport.recommended`, among the scales that were tried."""
    good = [(scale, share) for scale, ok, share in zip(scales, finite, shares) if ok]
    if not good:
        return None
    best = min(share for _, share in good)
    lowest = min(scale for scale, share in good if share <= best + SLACK)
    below = [scale for scale, _ in good if scale <= good[-1][0] / HEADROOM]
    return max([lowest, *below])


def _headroom(reference: Tensor, scale: float | None, dtype: torch.dtype) -> float:
    if scale is None:
        return math.nan
    peak = float(reference.abs().max()) if reference.numel() else 0.0
    return math.log2(torch.finfo(dtype).max / (peak * scale)) if peak else math.inf


def _check(params: PyTree, dtype: torch.dtype, scales: Sequence[float] | None) -> tuple[float, ...]:
    if dtype not in HALF:
        raise TypeError(f"dtype: found {dtype!r}, expected torch.float16 or torch.bfloat16.")
    for path, leaf in zip(paths(params), flatten_tensors(params, "params").leaves):
        if leaf is not None and leaf.dtype in HALF:
            raise TypeError(
                f"params: found {leaf.dtype} at {path!r}, expected float32, which the report compares with. "
                "Remedy: cast_floating(params, torch.float32)."
            )
    if scales is None:
        return SCALES
    if not isinstance(scales, Sequence):
        raise TypeError(f"scales: found {type(scales).__name__}, expected a list of numbers.")
    for scale in scales:
        check_number(scale, "scales")
    ordered = tuple(sorted({StaticScale(float(scale)).scale.item() for scale in scales}))
    if len(ordered) < 2:
        raise ValueError(
            f"scales: found {list(scales)}, expected at least two: what is lost at one scale alone may be lost at all. "
            "Remedy: [2.0**k for k in range(0, 25, 2)]."
        )
    return ordered


def _gradients(report: UnderflowReport) -> str:
    def narrow(cells: list[str]) -> str:
        return " ".join(cell.rjust(3) for cell in cells)

    marks = [power(s).removeprefix("2^") + ("*" if s == report.recommended else "") for s in report.scales]
    rows = [
        [
            leaf.path,
            f"{leaf.largest:.1e}",
            percent(leaf.never),
            f"{leaf.headroom:.0f}",
            narrow(["∞" if bad else percent(share) for share, bad in zip(leaf.lost, leaf.overflows)]),
        ]
        for leaf in report.leaves
    ]
    return table(["leaf \\ log2 of the scale", "largest", "never", "bits left", narrow(marks)], rows)


def _forward(report: UnderflowReport) -> str:
    if not report.modules:
        return "no operator computed in half precision"
    rows = [
        [m.module, m.kind, f"{m.largest:.3g}", f"{m.bits_left:.1f}", str(m.casts), percent(m.flushed)]
        for m in report.modules
    ]
    return table(["module", "class", "largest output", "bits left", "cast", "% flushed to 0"], rows)
