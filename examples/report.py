"""What a run shows: a bar while it goes on, then figures and a picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import functional_amp as fa


class Row(NamedTuple):
    """The metrics of one update, on the host."""

    loss: float
    grad_norm: float
    scale: float
    finite: bool


class Report:
    """Collects the metrics of each update and shows them.

    They stay on the device until `read` fetches all that are waiting at once, so that no update
    waits for the host.
    """

    def __init__(self, title: str, dtype: str, steps: int, entropy: float):
        self.title = title
        self.dtype = dtype
        self.steps = steps
        self.entropy = entropy
        self.rows: list[Row] = []
        self.validation: list[tuple[int, float]] = []
        self._waiting: list[torch.Tensor] = []
        self._console = Console(highlight=False)
        self._live = self._console.is_terminal
        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=8),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            disable=not self._live,
        )
        self._task = self.bar.add_task("first update", total=steps)
        self._say(f"{title}; byte entropy of the held-out files {entropy:.3f} nats", "bold")

    @property
    def skipped(self) -> list[int]:
        """The numbers of the skipped updates, counted from 1."""
        return [update for update, row in enumerate(self.rows, 1) if not row.finite]

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return len(self.rows) == self.steps

    def add(self, metrics: fa.Metrics) -> None:
        """Takes the metrics of the next update, without reading them."""
        self._waiting.append(torch.stack([metrics.loss, metrics.grad_norm, metrics.scale, metrics.finite.float()]))

    def read(self) -> None:
        """Reads the metrics that wait, and moves the bar."""
        explained = bool(self.skipped)
        if self._waiting:
            self.rows += [Row(*row[:3], finite=row[3] == 1) for row in torch.stack(self._waiting).tolist()]
            self._waiting.clear()
        if self.skipped and not explained:
            self._explain(self.skipped[0])
        self.bar.update(self._task, completed=len(self.rows), description=self._figures())

    def validated(self, loss: float) -> None:
        """Takes the validation loss after the updates so far."""
        self.read()
        self.validation.append((len(self.rows), loss))
        self.bar.update(self._task, description=self._figures())
        if not self._live:
            self._say(f"update {len(self.rows):4}  {self._figures()}")

    def _figures(self) -> str:
        row = self.rows[-1]
        validation = f"{self.validation[-1][1]:.3f}" if self.validation else "..."
        return (
            f"loss {row.loss:.2f} val {validation} norm {row.grad_norm:.2f} "
            f"scale {_power(row.scale)} skipped {len(self.skipped)}"
        )

    def _explain(self, update: int) -> None:
        if self.dtype == "float16":
            scale = self.rows[update - 1].scale
            reason = f"scale {_power(scale)} is too high for float16: update skipped, scale halved, as intended"
        else:
            reason = f"gradients are inf or NaN: skipped; {self.dtype} should not come to that"
        self._say(f"update {update:4}  {reason}", "cyan")

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(line, style=style, soft_wrap=True)

    def summary(self, seconds: float, picture: Path) -> str:
        """The figures of the whole run."""
        recent = [row.loss for row in self.rows[-20:]]
        scales = [row.scale for row in self.rows]
        moved = f"{_power(min(scales))} to {_power(max(scales))}" if self.dtype == "float16" else "none"
        figures = {
            "validation loss": f"{self.validation[-1][1]:.4f} nats per byte (byte entropy: {self.entropy:.4f})",
            "training loss": f"{sum(recent) / len(recent):.4f}, the mean of the last {len(recent)} updates",
            "updates": f"{len(self.rows) - len(self.skipped)} applied, {len(self.skipped)} skipped",
            "loss scale": moved,
            "time": f"{seconds:.0f} s",
            "picture": str(picture),
        }
        stopped = "" if self.complete else f"stopped after update {len(self.rows)} of {self.steps}\n"
        return stopped + "\n".join(f"{name:16} {value}" for name, value in figures.items())


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


def draw(report: Report, path: Path, max_norm: float) -> None:
    """Writes the picture: loss, loss scale and gradient norm of each update, one above the other."""
    import matplotlib  # not needed before, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    updates, skipped = range(1, len(report.rows) + 1), report.skipped
    final = report.validation[-1][1]
    figure, panels = plt.subplots(3, sharex=True, figsize=(9, 9), layout="constrained", height_ratios=(3, 2, 2))
    figure.suptitle(report.title)
    top, middle, bottom = panels

    top.plot(updates, [row.loss for row in report.rows], color="tab:blue", alpha=0.4, label="training")
    top.plot(*zip(*report.validation), color="tab:blue", marker="o", label=f"validation, {final:.3f} at the end")
    top.axhline(report.entropy, color="black", linestyle="--", linewidth=1, label=f"byte entropy, {report.entropy:.3f}")
    top.set_ylabel("loss (nats per byte)")

    scales = [math.log2(row.scale) for row in report.rows]
    marks = [scales[update - 1] for update in skipped]
    middle.step(updates, scales, where="mid", color="tab:green", label="scale")
    middle.plot(skipped, marks, "x", color="tab:red", markeredgewidth=2, label=f"skipped updates ({len(skipped)})")
    middle.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    middle.set_ylabel("loss scale (log2)")

    norms = [row.grad_norm if row.finite else math.nan for row in report.rows]
    bottom.semilogy(updates, norms, color="tab:purple", linewidth=1, label="before clipping")
    bottom.axhline(max_norm, color="black", linestyle="--", linewidth=1, label=f"clipped to {max_norm:g}")
    bottom.set_ylabel("gradient norm")
    bottom.set_xlabel("update")

    for panel, place in zip(panels, ("upper right", "best", "upper right")):
        for update in skipped:
            panel.axvline(update, color="tab:red", alpha=0.2, linewidth=1)
        panel.grid(alpha=0.3)
        panel.legend(loc=place)
    figure.savefig(path, dpi=120)
    plt.close(figure)
