"""What every section is given, and what it gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

EAGER = ("imperative", "pure", "donated", "donated-flat")
UNGUARDED = "donated-unguarded-compiled"
"""Its graphs are those of `donated-compiled`: they are counted and weighed there."""
VARIANTS = (
    "imperative",
    "imperative-compiled",
    "pure",
    "donated",
    "donated-flat",
    "pure-compiled",
    "donated-compiled",
    UNGUARDED,
)
"""The imperative loop, with a compiled model too; the functional step with `donate=` and `compile=`, with all
parameters in one tensor, and with `unsafe_skip_guards`."""


@dataclass(frozen=True)
class Setup:
    """The run: where, how often, and which variants.

    Attributes:
        rounds: timed calls of each variant.
        warmup: calls before them that are not counted.
        compiled_leaves: above it, `growth` leaves the compiled variants out.
        smoke: the smallest sizes, to see that everything runs.
    """

    device: torch.device
    dtype: torch.dtype
    rounds: int = 24
    warmup: int = 3
    seed: int = 0
    variants: tuple[str, ...] = VARIANTS
    compiled_leaves: int = 100
    smoke: bool = False

    @property
    def of_own_graphs(self) -> tuple[str, ...]:
        """The variants, but for the one whose graphs are those of another."""
        return tuple(variant for variant in self.variants if variant != UNGUARDED)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        values: by column, a variant or another thing that was measured; a text where there is no number.
        compared: whether the ratios to the imperative loop say something.
        x: what the row grows along, and where it stands there.
    """

    section: str
    case: str
    unit: str
    values: dict[str, float | str] = field(default_factory=dict)
    compared: bool = True
    x: tuple[str, float] | None = None
