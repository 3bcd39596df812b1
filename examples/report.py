"""What a run shows: a bar while it goes on, then figures and a picture."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from functional_amp import Step, TrainState
from functional_amp.debug import Explanation, History, explain

Explain = Callable[[int, float], Explanation]


class Recent:
    """The updates since the history was last read, and the state before them: any of them can be run again, exactly.

    Args:
        step, state: what the next update is made with.
        first: its number.
    """

    def __init__(self, step: Step, state: TrainState, first: int):
        self._step, self._state, self._first = step, state, first
        self._updates: list[tuple[Any, int]] = []

    def add(self, window: Any, seed: int) -> None:
        """Keeps the micro-batches and the seed of the next update."""
        self._updates.append((window, seed))

    def explain(self, update: int, scale: float) -> Explanation:
        """Says why an update was skipped at a scale: repeats those before it, then runs it with instruments."""
        *before, (window, seed) = self._updates[: update - self._first + 1]
        state = self._state
        for earlier, earlier_seed in before:
            state, _ = self._step(state, earlier, seed=earlier_seed)
        return explain(self._step, state, window, scale=scale, seed=seed)


class Report:
    """Shows the history of a run. It stays on the device until `read` fetches it: no update waits for the host.

    Attributes:
        columns: what `History.to_dict` gave when it was last read: a list for each metric, an item for each update.
        validation: updates and the validation losses after them.
        long: whether the first overflow is explained in full, not in one line.
    """

    def __init__(self, title: str, dtype: str, steps: int, entropy: float, long: bool = False):
        self.title = title
        self.dtype = dtype
        self.steps = steps
        self.entropy = entropy
        self.long = long
        self.columns: dict[str, list[Any]] = {}
        self.validation: list[tuple[int, float]] = []
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
    def updates(self) -> int:
        """How many have been read."""
        return len(self.columns.get("window", []))

    @property
    def skipped(self) -> list[int]:
        """The numbers of the skipped updates, counted from 1."""
        columns = self.columns or {"window": [], "applied": []}
        return [update for update, applied in zip(columns["window"], columns["applied"]) if not applied]

    @property
    def complete(self) -> bool:
        """Whether the run came to its end."""
        return self.updates == self.steps

    def read(self, history: History, explain: Explain | None) -> None:
        """Reads the history of all updates so far, and moves the bar. The first skipped update is explained.

        Args:
            explain: None on several processes: one of them alone can't run the update again.
        """
        explained = bool(self.skipped)
        self.columns = history.to_dict()
        if self.skipped and not explained:
            update = self.skipped[0]
            scale = self.columns["scale"][update - 1]
            reason = f" inf or NaN at scale {_power(scale)}"
            if explain is not None:
                why = explain(update, scale)
                reason = f"\n{why}" if self.long else f" {why.summary}"
            self._say(f"update {update:4}  skipped:{reason}", "cyan")
        self.bar.update(self._task, completed=self.updates, description=self._figures())

    def validated(self, loss: float) -> None:
        """Takes the validation loss after the updates that have been read."""
        self.validation.append((self.updates, loss))
        self.bar.update(self._task, description=self._figures())
        if not self._live:
            self._say(f"update {self.updates:4}  {self._figures()}")

    def _figures(self) -> str:
        loss, norm, scale = (self.columns[name][-1] for name in ("loss", "grad_norm", "scale"))
        validation = f"{self.validation[-1][1]:.3f}" if self.validation else "..."
        return f"loss {loss:.2f} val {validation} norm {norm:.2f} scale {_power(scale)} skipped {len(self.skipped)}"

    def _say(self, line: str, style: str = "") -> None:
        self._console.print(line, style=style, soft_wrap=True)

    def summary(self, seconds: float, picture: Path) -> str:
        """The figures of the whole run."""
        recent, scales = self.columns["loss"][-20:], self.columns["scale"]
        moved = f"{_power(min(scales))} to {_power(max(scales))}" if self.dtype == "float16" else "none"
        figures = {
            "validation loss": f"{self.validation[-1][1]:.4f} nats per byte (byte entropy: {self.entropy:.4f})",
            "training loss": f"{sum(recent) / len(recent):.4f}, the mean of the last {len(recent)} updates",
            "updates": f"{self.updates - len(self.skipped)} applied, {len(self.skipped)} skipped",
            "loss scale": moved,
            "time": f"{seconds:.0f} s",
            "picture": str(picture),
        }
        stopped = "" if self.complete else f"stopped after update {self.updates} of {self.steps}\n"
        return stopped + "\n".join(f"{name:16} {value}" for name, value in figures.items())


def _power(scale: float) -> str:
    return f"2^{math.log2(scale):g}"


def draw(report: Report, path: Path, max_norm: float) -> None:
    """Writes the picture: loss, loss scale and gradient norm of each update, one above the other."""
    import matplotlib  # not needed before, and slow to import

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    columns, updates, skipped = report.columns, report.columns["window"], report.skipped
    final = report.validation[-1][1]
    figure, panels = plt.subplots(3, sharex=True, figsize=(9, 9), layout="constrained", height_ratios=(3, 2, 2))
    figure.suptitle(report.title)
    top, middle, bottom = panels

    top.plot(updates, columns["loss"], color="tab:blue", alpha=0.4, label="training")
    top.plot(*zip(*report.validation), color="tab:blue", marker="o", label=f"validation, {final:.3f} at the end")
    top.axhline(report.entropy, color="black", linestyle="--", linewidth=1, label=f"byte entropy, {report.entropy:.3f}")
    top.set_ylabel("loss (nats per byte)")

    scales = [math.log2(scale) for scale in columns["scale"]]
    marks = [scales[update - 1] for update in skipped]
    middle.step(updates, scales, where="mid", color="tab:green", label="scale")
    middle.plot(skipped, marks, "x", color="tab:red", markeredgewidth=2, label=f"skipped updates ({len(skipped)})")
    middle.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    middle.set_ylabel("loss scale (log2)")

    norms = [norm if math.isfinite(norm) else math.nan for norm in columns["grad_norm"]]
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
