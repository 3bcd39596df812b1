"""Which leaves of a tree hold inf or NaN, and where."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from functional_amp.debug.table import table
from functional_amp.dtypes import is_differentiable
from functional_amp.engine.norm import max_abs
from functional_amp.engine.sharded import whole
from functional_amp.tree import PyTree, flatten_tensors, paths
from functional_amp.values.grads import ScaledGrads


@dataclass(frozen=True)
class NonfiniteLeaf:
    """A leaf that is not finite.

    Attributes:
        path, shape, dtype: of the leaf.
        nan, positive_inf, negative_inf: how many of its elements are. A complex number counts once: as
            NaN if a part of it is, else by the sign of its real part, else of its imaginary part.
        first: the index of the first of these elements; () in a leaf of no dimensions.
        largest_finite: the largest absolute value among the others; 0 without others.
    """

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nan: int
    positive_inf: int
    negative_inf: int
    first: tuple[int, ...]
    largest_finite: float

    @property
    def elements(self) -> int:
        """How many elements are not finite."""
        return self.nan + self.positive_inf + self.negative_inf


@dataclass(frozen=True)
class NonfiniteReport:
    """What `nonfinite_report` found.

    Attributes:
        leaves: the leaves with inf or NaN, in the order of the tree; () where all is finite.
        checked: how many floating-point and complex leaves were looked at.
    """

    leaves: tuple[NonfiniteLeaf, ...]
    checked: int

    @property
    def found(self) -> bool:
        """Whether any leaf is not finite."""
        return bool(self.leaves)

    def __str__(self) -> str:
        if not self.leaves:
            return f"all {self.checked} leaves are finite"
        rows = [
            [
                leaf.path,
                str(leaf.dtype).removeprefix("torch."),
                "x".join(map(str, leaf.shape)) or "scalar",
                str(leaf.nan),
                str(leaf.positive_inf),
                str(leaf.negative_inf),
                f"{leaf.elements / max(1, _numel(leaf.shape)):.1%}",
                ",".join(map(str, leaf.first)),
                f"{leaf.largest_finite:.3g}",
            ]
            for leaf in self.leaves
        ]
        header = ["leaf", "dtype", "shape", "nan", "+inf", "-inf", "share", "first at", "largest finite"]
        return f"{len(self.leaves)} of {self.checked} leaves are not finite\n{table(header, rows)}"


def nonfinite_report(tree: ScaledGrads | PyTree) -> NonfiniteReport:
    """Count the inf and NaN of each leaf; reads the tree on the host.

    Args:
        tree: gradients, parameters, a state, or any pytree of tensors. Those of ScaledGrads are taken
            as they are stored, with the scale on them. None, integer and bool leaves do not count.
            All ranks must ask about a sharded leaf.

    Returns:
        A `NonfiniteReport`; printed, it is a table.

    Raises:
        TypeError: for a leaf that is no tensor; the path is named.

    >>> import torch
    >>> report = nonfinite_report({"a": torch.ones(1), "b": [torch.tensor([3.0, float("nan")])]})
    >>> report.found, report.leaves[0].path, report.leaves[0].first
    (True, 'b.0', (1,))
    """
    bad, checked = _nonfinite(tree)
    return NonfiniteReport(tuple(_count(path, leaf) for path, leaf in bad), checked)


def nonfinite_paths(tree: ScaledGrads | PyTree) -> list[str]:
    """The paths of the leaves that hold inf or NaN, in the order of the tree.

    Args:
        tree: gradients, parameters, or any pytree of tensors.

    Raises:
        TypeError: for a leaf that is no tensor; the path is named.

    >>> import torch
    >>> nonfinite_paths({"a": torch.ones(1), "b": [torch.tensor([float("nan")])]})
    ['b.0']
    """
    return [path for path, _ in _nonfinite(tree)[0]]


def _nonfinite(tree: ScaledGrads | PyTree) -> tuple[list[tuple[str, Tensor]], int]:
    """The leaves that are not finite, and how many were looked at."""
    tree = tree.tree if isinstance(tree, ScaledGrads) else tree
    named = zip(paths(tree), flatten_tensors(tree, "tree").leaves, strict=True)
    floating = [(path, leaf) for path, leaf in named if is_differentiable(leaf)]
    return [(path, leaf) for path, leaf in floating if not torch.isfinite(max_abs([leaf]))], len(floating)


def _count(path: str, leaf: Tensor) -> NonfiniteLeaf:
    values = whole(leaf.detach())
    values = values.float() if values.dtype.itemsize == 1 else values  # isfinite does not take float8
    finite = torch.isfinite(values)
    bad = values[~finite]
    nan = torch.isnan(bad)
    signs = bad[~nan]
    if signs.is_complex():
        signs = torch.where(torch.isinf(signs.real), signs.real, signs.imag)
    positive = int((signs > 0).sum())
    return NonfiniteLeaf(
        path=path,
        shape=tuple(leaf.shape),
        dtype=leaf.dtype,
        nan=int(nan.sum()),
        positive_inf=positive,
        negative_inf=signs.numel() - positive,
        first=tuple((~finite).nonzero()[0].tolist()),
        largest_finite=float(values[finite].abs().max()) if finite.any() else 0.0,
    )


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
