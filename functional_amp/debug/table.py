"""Plain-text tables, and numbers as they stand in them."""

from __future__ import annotations

import math
from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of columns: the first one aligned to the left, the others to the right.

    >>> print(table(["leaf", "nan"], [["blocks.0.weight", "3"], ["w", "12"]]))
    leaf             nan
    blocks.0.weight    3
    w                 12
    """
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = []
    for line in (header, *rows):
        cells = [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def power(scale: float) -> str:
    """A scale as a power of two.

    >>> power(65536.0), power(0.25), power(3.0)
    ('2^16', '2^-2', '3')
    """
    exponent = math.log2(scale)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{scale:g}"


def percent(share: float) -> str:
    """A share for a narrow column: a dot for none, and never 0 for a little or 100 for nearly all.

    >>> [percent(share) for share in (0.0, 0.001, 0.256, 0.999, 1.0)]
    ['·', '<1', '26', '99', '100']
    """
    if share == 0:
        return "·"
    if share < 0.01:
        return "<1"
    return "100" if share == 1 else str(min(99, round(100 * share)))
