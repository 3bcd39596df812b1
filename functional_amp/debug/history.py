"""The last windows of a run as a value beside the state: what each was like, and which leaves overflowed."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.debug.plots import plot_history
from functional_amp.debug.table import power
from functional_amp.dtypes import like
from functional_amp.registry import register
from functional_amp.tree import paths
from functional_amp.values.state import Metrics, TrainState

COLUMNS = ("loss", "grad_norm", "scale", "finite", "applied")


@dataclass(frozen=True, eq=False)
class History:
    """The metrics of the last n windows, on the device; a pytree, never part of the `TrainState`.

    Attributes:
        rows: float32, [n, 5], the newest window last: loss, grad_norm, scale, finite, applied. NaN
            where nothing has been recorded yet.
        overflows: int32, [leaves]: in how many windows the gradient of each leaf of the parameters
            held inf or NaN; 0 for a leaf that has none (None, integers).
        count: int64, 0-dim: the windows recorded so far.
        paths: the path of each leaf; static.

    `record` writes it without a host read. `to_dict`, `to_csv`, `to_tensorboard`, `plot` and
    `overflowing_leaves` read it on the host: call them every n windows, not in each.
    """

    rows: Tensor
    overflows: Tensor
    count: Tensor
    paths: tuple[str, ...]

    def to_dict(self) -> dict[str, list[Any]]:
        """Read the windows that are kept, oldest first, as columns; `pandas.DataFrame` takes them.

        Returns:
            `window` (int, the first one recorded is 1), `loss`, `grad_norm`, `scale` (float),
            `finite`, `applied` (bool).

        >>> from functional_amp import init_state, sgd
        >>> init_history(init_state(torch.ones(1), sgd(0.1))).to_dict()["window"]
        []
        """
        self._check_one()
        count = int(self.count)
        rows = self.rows[-min(count, self.rows.shape[0]) :].tolist() if count else []
        columns: dict[str, list[Any]] = {"window": list(range(count - len(rows) + 1, count + 1))}
        for index, name in enumerate(COLUMNS):
            values = [row[index] for row in rows]
            columns[name] = [value == 1 for value in values] if name in ("finite", "applied") else values
        return columns

    def overflowing_leaves(self) -> dict[str, int]:
        """Read in how many windows each leaf was not finite: those that ever were, the most frequent first."""
        self._check_one()
        counts = sorted(zip(self.paths, self.overflows.tolist()), key=lambda pair: -pair[1])
        return {path: number for path, number in counts if number}

    def _check_one(self) -> None:
        if self.count.dim():
            raise ValueError(
                f"history: found {len(self.count)} histories that vmap has stacked, expected one. Read one member: "
                "optree.tree_map(lambda leaf: leaf[0], history)."
            )

    def to_csv(self, path: str | Path) -> None:
        """Write the columns of `to_dict` as a file of comma-separated values, with a header."""
        columns = self.to_dict()
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values()))

    def to_tensorboard(self, directory: str | Path | Any) -> None:
        """Write each kept window as scalars `train/loss`, `train/grad_norm`, ... for TensorBoard.

        Called each time that n new windows have been recorded, it writes every window once.

        Args:
            directory: of the event files, of which each call makes one; or an open `SummaryWriter`, which is left
                open: TensorBoard may drop values from two files that were begun in the same second.

        Raises:
            ImportError: without tensorboard, which the extra `tensorboard` installs.
        """
        if callable(getattr(directory, "add_scalar", None)):
            return self._write(directory)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "to_tensorboard: found no tensorboard, expected it to be installed. Remedy: pip install tensorboard."
            ) from error
        with SummaryWriter(str(directory)) as writer:
            self._write(writer)

    def _write(self, writer: Any) -> None:
        columns = self.to_dict()
        for name in COLUMNS:
            for window, value in zip(columns["window"], columns[name]):
                writer.add_scalar(f"train/{name}", float(value), window)

    def plot(self, path: str | Path) -> None:
        """Draw loss, loss scale and gradient norm of the kept windows, the skipped ones marked.

        Raises:
            ImportError: without matplotlib, which the extra `plot` installs.
            ValueError: before the first window.
        """
        if not int(self.count):
            raise ValueError("history: found no window, expected at least one. Remedy: record(history, metrics).")
        plot_history(self.to_dict(), path)

    def __str__(self) -> str:
        columns = self.to_dict()
        skipped = columns["applied"].count(False)
        kept = len(columns["window"])
        if not kept:
            return "no window recorded"
        lines = [
            f"{int(self.count)} windows recorded, the last {kept} kept; {kept - skipped} applied, {skipped} skipped",
            f"loss {_span(columns['loss'])}; norm {_span(columns['grad_norm'])}; "
            f"scale {power(min(columns['scale']))} to {power(max(columns['scale']))}",
        ]
        leaves = self.overflowing_leaves()
        if leaves:
            lines.append("not finite: " + ", ".join(f"{path} in {number}" for path, number in leaves.items()))
        return "\n".join(lines)


register(History, ("rows", "overflows", "count"), ("paths",))
torch.serialization.add_safe_globals([History])


def init_history(state: TrainState, n: int = 1024) -> History:
    """Make the empty history of a run, for its last `n` windows.

    Args:
        state: gives the device, and the leaves that overflows are counted for.
        n: windows that are kept, at least 1: 20 bytes each, and four for each leaf.

    Raises:
        TypeError, ValueError: for a state that is no TrainState, an n that is no int >= 1.

    >>> from functional_amp import init_state, sgd
    >>> history = init_history(init_state({"w": torch.ones(2)}, sgd(0.1)), n=8)
    >>> history.rows.shape, history.paths
    (torch.Size([8, 5]), ('w',))
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state: found {type(state).__name__}, expected the TrainState of init_state or of a step.")
    check_number(n, "n", "an int", integer=True)
    if n < 1:
        raise ValueError(f"n: found {n}, expected at least 1.")
    names, scale = tuple(paths(state.params)), state.scaler.scale
    return History(
        rows=scale.new_full((n, len(COLUMNS)), math.nan),
        overflows=torch.zeros(len(names), dtype=torch.int32, device=scale.device),
        count=torch.zeros((), dtype=torch.int64, device=scale.device),
        paths=names,
    )


def record(history: History, metrics: Metrics, nonfinite: Tensor | None = None) -> History:
    """Append a window: pure, without a host read, in eager mode or in a graph.

        rows = rows[1:] + [window]; overflows += nonfinite; count += 1

    Args:
        history: it is not changed.
        metrics: of the window that a step has just closed.
        nonfinite: bool, [leaves], from `nonfinite_leaves`; None counts no leaves.

    Returns:
        The next history: same structure, shapes and dtypes.

    Raises:
        TypeError: for what is no History, no Metrics, or no bool tensor.
        ValueError: for flags of another number of leaves.

    >>> from functional_amp import init_state, make_step, sgd
    >>> step = make_step(lambda p, x: (p * x).sum(), sgd(0.1))
    >>> state = init_state(torch.tensor([2.5]), sgd(0.1))
    >>> history = init_history(state)
    >>> state, metrics = step(state, [torch.ones(1)])
    >>> record(history, metrics).to_dict()["loss"]
    [2.5]
    """
    if not isinstance(history, History):
        raise TypeError(f"history: found {type(history).__name__}, expected the History of init_history or record.")
    if not isinstance(metrics, Metrics):
        raise TypeError(f"metrics: found {type(metrics).__name__}, expected the Metrics that step.update returns.")
    if metrics.loss.dim():
        raise ValueError(
            f"metrics: found those of {len(metrics.loss)} windows that vmap has stacked, expected those of one. "
            "Call record inside the vmap, with a history for each member."
        )
    counts = history.overflows if nonfinite is None else history.overflows + _checked(nonfinite, history.overflows)
    # The fewest kernels: each takes some 2 µs. `float` is the fastest cast, and one that changes nothing is not free.
    flags = metrics.finite.float(), metrics.applied.float()
    row = torch.stack((metrics.loss, metrics.grad_norm, metrics.scale, *flags))
    row = row.detach() if row.requires_grad else row
    row = row if row.dtype == torch.float32 and row.device == history.rows.device else like(row, history.rows).float()
    return History(torch.cat((history.rows[1:], row[None])), counts, history.count + 1, history.paths)


def _checked(nonfinite: Any, overflows: Tensor) -> Tensor:
    if not isinstance(nonfinite, Tensor) or nonfinite.dtype != torch.bool:
        found = str(nonfinite.dtype) if isinstance(nonfinite, Tensor) else type(nonfinite).__name__
        raise TypeError(f"nonfinite: found {found}, expected a bool tensor. Remedy: nonfinite_leaves(window.grads).")
    if nonfinite.shape != overflows.shape:
        raise ValueError(
            f"nonfinite: found shape {tuple(nonfinite.shape)}, expected {tuple(overflows.shape)}: one flag a leaf. "
            "Remedy: init_history(state) and nonfinite_leaves(window.grads) of the same run."
        )
    return like(nonfinite, overflows)


def _span(values: list[float]) -> str:
    finite = [value for value in values if math.isfinite(value)]
    return f"{min(finite):.4g} to {max(finite):.4g}" if finite else "never finite"
