"""The pictures: gradients by leaf and scale, the ways of scales, a history. 800 pixels wide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from functional_amp.debug.table import power

if TYPE_CHECKING:
    from functional_amp.debug.simulate import Trajectory
    from functional_amp.debug.underflow import UnderflowReport

STEPS = (0.0, 0.1, 1.0, 5.0, 25.0, 50.0)  # %: where each blue begins
OVERFLOW = 101.0
BLUES = ("#f4f7fb", "#d6e6f4", "#abcfe6", "#6aaed6", "#2070b4", "#08306b")
ORANGE = "#f28e2b"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00")  # Okabe and Ito: told apart by all eyes
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
DPI = 100
WIDTH = 8.0
LONGEST_LABEL = 34


def plot_underflow(report: UnderflowReport, path: str | Path) -> None:
    """Draw leaf by scale; see `UnderflowReport.plot`."""
    figure = _figure(2.2 + 0.2 * max(1, len(report.leaves)))
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch, Rectangle

    leaves, columns = report.leaves, len(report.scales)
    axes = figure.subplots()
    colours = ListedColormap([*BLUES, ORANGE])
    norm = BoundaryNorm([*STEPS, OVERFLOW - 0.5, OVERFLOW + 0.5], colours.N)
    values = [[OVERFLOW if bad else 100 * share for share, bad in zip(leaf.lost, leaf.overflows)] for leaf in leaves]
    if leaves:
        axes.pcolormesh(range(columns), range(len(leaves)), values, cmap=colours, norm=norm, edgecolors="w", lw=0.6)
    axes.set_ylim(len(leaves) - 0.5, -0.5)  # the first leaf on top
    axes.set_yticks(range(len(leaves)), labels_of([leaf.path for leaf in leaves]), fontsize=9)
    every = math.ceil(columns / 16)
    axes.set_xticks(range(0, columns, every), [_exponent(s) for s in report.scales[::every]], fontsize=9)
    axes.set_xlabel("log2 of the loss scale")
    if report.recommended is not None:
        column = report.scales.index(report.recommended)
        frame = Rectangle((column - 0.5, -0.5), 1, len(leaves), fill=False, ec="black", lw=2, clip_on=False, zorder=5)
        axes.add_patch(frame)
        align = "left" if column < columns / 4 else "right" if column > 3 * columns / 4 else "center"
        axes.annotate(
            f"recommended {power(report.recommended)}",
            (column + 0.5 * (align == "right") - 0.5 * (align == "left"), 1),
            (0, 4),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            ha=align,
            fontsize=9,
        )
    name = str(report.dtype).removeprefix("torch.")
    figure.suptitle(f"Gradient elements lost in {name}", x=0.01, ha="left", fontsize=12)
    labels = ["< 0.1 %", *(f"≥ {step:g} %" for step in STEPS[1:]), "overflow"]
    handles = [Patch(fc=colour, ec="0.6", label=label) for colour, label in zip([*BLUES, ORANGE], labels)]
    hatched = {"fc": "0.92", "ec": "0.6", "hatch": "////", "lw": 0}
    never = [row for row, leaf in enumerate(leaves) if leaf.never > 0.5]
    for row in never:
        for column in (column for column, bad in enumerate(leaves[row].overflows) if not bad):
            axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, **hatched))
    if never:
        handles.append(Patch(label="never there", **hatched))
    compact: dict[str, Any] = {"frameon": False, "fontsize": 9, "handlelength": 1.2, "columnspacing": 1.2}
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), **compact)
    figure.savefig(path)


def plot_scale(*trajectories: Trajectory, path: str | Path) -> None:
    """Draw the scale of each window for each trajectory, and below it the windows that were skipped.

    Args:
        trajectories: what `simulate` gave; their names are the legend.
        path: of the picture.

    Raises:
        ImportError: without matplotlib, which the extra `plot` installs.
        ValueError: without a trajectory.
    """
    if not trajectories:
        raise ValueError("plot_scale: found no trajectory, expected at least one. Remedy: plot_scale(simulate(...)).")
    count = len(trajectories)
    figure = _figure(4.6 + 0.2 * count)
    top, bottom = figure.subplots(2, sharex=True, height_ratios=(4, 0.5 + 0.3 * count))
    for index, trajectory in enumerate(trajectories):
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)]}
        windows = range(1, len(trajectory.scales) + 1)
        label = f"{trajectory.name}: {trajectory.skipped} of {len(trajectory.scales)} skipped"
        line = LINES[index % len(LINES)]
        top.step(windows, [math.log2(s) for s in trajectory.scales], where="mid", ls=line, lw=1.6, label=label, **style)
        skipped = [window for window, overflow in zip(windows, trajectory.overflows) if overflow]
        bottom.plot(skipped, [index] * len(skipped), "|", ms=9, mew=1.2, **style)
    _integers(top)
    top.set_ylabel("loss scale (log2)")
    bottom.set_ylabel("skipped", fontsize=9)
    bottom.set_yticks([])
    bottom.set_ylim(count - 0.5, -0.5)
    bottom.set_xlabel("window")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
    figure.legend(loc="outside upper left", frameon=False, fontsize=9, handlelength=3)
    figure.savefig(path)


def plot_history(columns: dict[str, list[Any]], path: str | Path) -> None:
    """Draw the columns of `History.to_dict`; see `History.plot`."""
    figure = _figure(7)
    windows = columns["window"]
    skipped = [window for window, applied in zip(windows, columns["applied"]) if not applied]
    panels = figure.subplots(3, sharex=True, height_ratios=(3, 2, 2))
    top, middle, bottom = panels
    line: dict[str, Any] = {"lw": 1.2, "marker": ".", "ms": 3}  # a line alone would hide what lies between two gaps
    top.plot(windows, _finite(columns["loss"]), color=COLOURS[0], **line)
    top.set_ylabel("loss")

    scales = [math.log2(scale) for scale in columns["scale"]]
    middle.step(windows, scales, where="mid", color=COLOURS[2], lw=1.6)
    at = dict(zip(windows, scales))
    marks = [at[window] for window in skipped]
    middle.plot(skipped, marks, "x", color=COLOURS[1], mew=1.8, label=f"skipped: {len(skipped)} of {len(windows)}")
    middle.legend(loc="best", fontsize=9)
    middle.set_ylabel("loss scale (log2)")
    _integers(middle)

    norms = [norm if norm > 0 else math.nan for norm in _finite(columns["grad_norm"])]
    bottom.plot(windows, norms, color=COLOURS[3], **line)
    if any(norm > 0 for norm in norms):
        bottom.set_yscale("log")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("window")
    for axes in panels:
        for window in skipped:
            axes.axvline(window, color=COLOURS[1], alpha=0.2, lw=1)
        axes.grid(alpha=0.3)
    figure.savefig(path)


def _figure(height: float) -> Any:
    """A figure of its own: pyplot would keep it, and might open a window."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "plot: found no matplotlib, expected it to be installed. Remedy: pip install matplotlib."
        ) from error
    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


def _integers(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _finite(values: Sequence[float]) -> list[float]:
    return [value if math.isfinite(value) else math.nan for value in values]


def _exponent(scale: float) -> str:
    exponent = math.log2(scale)
    return f"{exponent:.0f}" if exponent.is_integer() else f"{exponent:.1f}"


def labels_of(paths: Sequence[str]) -> list[str]:
    """Paths without what all begin with, and the long ones without their middle: the ends tell layers apart.

    >>> labels_of(["model.blocks.0.weight", "model.blocks.1.self_attention.output_projection.weight"])
    ['0.weight', '1.self_attention.…projection.weight']
    """
    split = [path.split(".") for path in paths]
    shared = 0
    most = min(map(len, split)) - 1 if len(split) > 1 else 0  # the last part always stays
    while shared < most and len({tuple(parts[: shared + 1]) for parts in split}) == 1:
        shared += 1
    half = LONGEST_LABEL // 2
    labels = [".".join(parts[shared:]) for parts in split]
    return [label if len(label) <= LONGEST_LABEL else f"{label[:half]}…{label[-half:]}" for label in labels]
