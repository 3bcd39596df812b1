"""Strategies for trees of tensors.

A tree is drawn in two steps. `layouts` draws its structure with a `Leaf` (shape and dtype) at each
leaf; `filled` draws the numbers. Several trees of one structure, as the gradients of the
micro-batches of a window are, share their layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_amp.testing.compare import mapped

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
REST = (torch.int64, torch.int32, torch.bool)
SHAPES = ((), (1,), (3,), (2, 3), (0,), (2, 0))
NONFINITE = (math.nan, math.inf, -math.inf)


class Pair(NamedTuple):
    """A container like those of optimizer states."""

    first: Any
    second: Any


@dataclass(frozen=True)
class Leaf:
    """What a tensor is like, without its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def layouts(
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    *,
    rest: tuple[torch.dtype, ...] = (),
    none: bool = True,
    gradients: bool = True,
    max_leaves: int = 6,
) -> st.SearchStrategy[Any]:
    """Nested dicts, lists, tuples and NamedTuples of `Leaf`, of zero-size tensors too.

    Args:
        dtypes: of the float leaves, mixed within a tree.
        rest: dtypes of further leaves (integers and bool).
        none: whether leaves may be None.
        gradients: whether there must be at least one float element.
        max_leaves: how large a tree may get, about.

    >>> from hypothesis import find
    >>> find(layouts((torch.float16,)), lambda layout: True)
    Leaf(shape=(), dtype=torch.float16)
    """
    one = st.builds(Leaf, st.sampled_from(SHAPES), st.sampled_from(dtypes + rest))
    leaves: st.SearchStrategy[Any] = st.one_of(one, one, st.none()) if none else one
    names = st.sampled_from(["weight", "bias", "10", "9", "z", "a"])

    def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(
            st.dictionaries(names, children, max_size=3),
            st.lists(children, max_size=3),
            st.lists(children, min_size=1, max_size=3).map(tuple),
            st.builds(Pair, children, children),
        )

    trees = st.recursive(leaves, containers, max_leaves=max_leaves)
    if not gradients:
        return trees
    # Built rather than filtered: most small trees have no float element.
    certain = st.builds(Leaf, st.sampled_from([shape for shape in SHAPES if math.prod(shape)]), st.sampled_from(dtypes))
    return st.one_of(
        certain,
        st.builds(lambda leaf, tree: {"weight": leaf, "rest": tree}, certain, trees),
        st.builds(lambda tree, leaf: [tree, leaf], trees, certain),
        st.builds(Pair, trees, certain),
    )


def numbers(layout: Any, seed: int, low: float = 1e-3, high: float = 1e3) -> Any:
    """Random numbers of both signs for a layout, log-uniform in magnitude and within each dtype.

    Args:
        layout: a tree of `Leaf`, as `layouts` gives it.
        seed: of the generator; the same gives the same numbers.
        low, high: the magnitudes, clamped to those of each leaf's dtype, subnormals included.

    >>> numbers({"w": Leaf((2,), torch.float32), "b": None}, seed=0, low=4.0, high=4.0)["w"].abs()
    tensor([4., 4.])
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Leaf) -> Tensor:
        if leaf.dtype == torch.bool:
            return torch.rand(leaf.shape, generator=generator) < 0.5
        if not leaf.dtype.is_floating_point:
            return torch.randint(-5, 6, leaf.shape, generator=generator, dtype=leaf.dtype)
        info = torch.finfo(leaf.dtype)
        top = min(high, info.max)
        bounds = math.log(min(max(low, info.tiny * info.eps), top)), math.log(top)
        share = torch.rand(leaf.shape, generator=generator, dtype=torch.float64)
        sign = torch.randint(0, 2, leaf.shape, generator=generator) * 2 - 1
        magnitude = torch.exp(bounds[0] + share * (bounds[1] - bounds[0]))
        return (sign * magnitude.clamp(max=info.max)).to(leaf.dtype)

    return mapped(draw, layout)


def seeds() -> st.SearchStrategy[int]:
    """Seeds for a `torch.Generator`."""
    return st.integers(0, 2**31 - 1)


def filled(layout: Any, *, low: float = 1e-3, high: float = 1e3) -> st.SearchStrategy[Any]:
    """Trees of tensors of one layout, elements between `low` and `high` in magnitude."""
    return st.builds(lambda seed: numbers(layout, seed, low, high), seeds())


def trees(
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    *,
    rest: tuple[torch.dtype, ...] = (),
    none: bool = True,
    gradients: bool = True,
    low: float = 1e-3,
    high: float = 1e3,
) -> st.SearchStrategy[Any]:
    """Trees of tensors: nested containers, None leaves, zero-size tensors, mixed dtypes.

    The arguments are those of `layouts` and `filled`.

    >>> from hypothesis import find
    >>> find(trees((torch.float32,)), lambda tree: True).shape
    torch.Size([])
    """
    return layouts(dtypes, rest=rest, none=none, gradients=gradients).flatmap(
        lambda layout: filled(layout, low=low, high=high)
    )


def powers_of_two(low: int = -10, high: int = 20) -> st.SearchStrategy[float]:
    """Powers of two, between two exponents: scales that round nothing."""
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


def float32s(low: float, high: float, **bounds: Any) -> st.SearchStrategy[float]:
    """Numbers that float32 holds exactly."""
    return st.floats(low, high, width=32, **bounds)
