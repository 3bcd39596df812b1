"""The picture of a run: bars of ratios to the imperative loop, and lines of growth."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.report import columns_of
from benchmarks.setup import VARIANTS, Row

COLORS = {name: f"C{index}" for index, name in enumerate((*VARIANTS, "peer"))}


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Writes the PNG; a variant has one colour everywhere."""
    bars: dict[str, list[Row]] = {}
    lines: dict[str, list[Row]] = {}
    for row in rows:
        if row.x is not None:
            lines.setdefault(row.x[0], []).append(row)
        elif row.compared and "imperative" in row.values:
            bars.setdefault(row.section, []).append(row)
    panels = len(bars) + len(lines)
    figure = Figure(figsize=(12, 1 + 3.4 * max(panels, 1)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="small")
    axes = iter(figure.subplots(max(panels, 1), 1, squeeze=False)[:, 0])
    for section, members in bars.items():
        _bars(next(axes), section, members)
    for name, members in lines.items():
        _lines(next(axes), name, members)
    figure.savefig(path, dpi=100)


def _bars(axis: Any, section: str, rows: Sequence[Row]) -> None:
    columns = [column for column in columns_of(rows) if column in COLORS]
    width = 0.8 / len(columns)
    for index, column in enumerate(columns):
        places, heights = [], []
        for place, row in enumerate(rows):
            value, base = row.values.get(column), row.values["imperative"]
            if isinstance(value, (int, float)) and isinstance(base, (int, float)) and base > 0:
                places.append(place + (index - len(columns) / 2 + 0.5) * width)
                heights.append(value / base)
        axis.bar(places, heights, width, label=column, color=COLORS[column])
    axis.axhline(1, color="black", linewidth=1)
    axis.set_xticks(range(len(rows)), [row.case for row in rows], fontsize="x-small", rotation=10)
    axis.set(title=section, ylabel="ratio to imperative")
    axis.legend(fontsize="x-small", ncols=3)


def _lines(axis: Any, name: str, rows: Sequence[Row]) -> None:
    for column in columns_of(rows):
        points = [(row.x[1], row.values.get(column)) for row in rows if row.x is not None]
        points = [(x, y) for x, y in points if isinstance(y, (int, float))]
        axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=column, color=COLORS[column])
    axis.set(title=f"time of a step against the number of {name}", xlabel=name, ylabel="ms", xscale="log", yscale="log")
    axis.grid(True, alpha=0.3)
    axis.legend(fontsize="x-small", ncols=3)
