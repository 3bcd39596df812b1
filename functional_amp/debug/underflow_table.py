"""The two tables that an underflow report prints: gradients by leaf and scale, and the forward by module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from functional_amp.debug.forward import ModuleRange
from functional_amp.debug.table import percent, power, table


def gradient_table(scales: Sequence[float], recommended: float | None, leaves: Sequence[Any]) -> str:
    """The percentage lost of each leaf, a column for each scale; a star marks the recommended one."""

    def narrow(cells: list[str]) -> str:
        return " ".join(cell.rjust(3) for cell in cells)

    marks = [power(scale).removeprefix("2^") + ("*" if scale == recommended else "") for scale in scales]
    rows = [
        [
            leaf.path,
            f"{leaf.largest:.1e}",
            percent(leaf.never),
            f"{leaf.headroom:.0f}",
            narrow(["∞" if bad else percent(share) for share, bad in zip(leaf.lost, leaf.overflows)]),
        ]
        for leaf in leaves
    ]
    return table(["leaf \\ log2 of the scale", "largest", "never", "bits left", narrow(marks)], rows)


def forward_table(modules: Sequence[ModuleRange]) -> str:
    """What no loss scale changes: how near the outputs of each module are to the largest number."""
    if not modules:
        return "no operator computed in half precision"
    rows = [
        [m.module, m.kind, f"{m.largest:.3g}", f"{m.bits_left:.1f}", str(m.casts), percent(m.flushed)] for m in modules
    ]
    return table(["module", "class", "largest output", "bits left", "cast", "% flushed to 0"], rows)
