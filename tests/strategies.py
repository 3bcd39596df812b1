"""Hypothesis strategies that the tests share: trees of tensors, gradients, scalers, overflow patterns, weights.

A tree is drawn in two steps. `layouts` draws its structure with a `Leaf` (shape and dtype) at each
leaf; `filled` draws the numbers. Several trees of one structure, as the gradients of the
micro-batches of a window are, share their layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa

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

    @property
    def is_gradient(self) -> bool:
        """Whether there is an element that could be inf or NaN."""
        return self.dtype.is_floating_point and math.prod(self.shape) > 0


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def leaves_of(tree: Any) -> list[Any]:
    """All leaves in optree's order, None included."""
    return optree.tree_leaves(tree, none_is_leaf=True)


def mapped(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps over the leaves that are not None."""
    return optree.tree_map(
        lambda leaf, *others: None if leaf is None else function(leaf, *others), tree, *rest, none_is_leaf=True
    )


def same_bits(a: Any, b: Any) -> bool:
    """Equal in structure, dtype, shape and every bit, NaN included."""
    leaves_a, spec_a = optree.tree_flatten(a, none_is_leaf=True)
    leaves_b, spec_b = optree.tree_flatten(b, none_is_leaf=True)
    return spec_a == spec_b and all(map(_same_leaf, leaves_a, leaves_b))


def _same_leaf(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


# Layouts


def leaf_layouts(dtypes: tuple[torch.dtype, ...] = FLOATS) -> st.SearchStrategy[Leaf]:
    return st.builds(Leaf, st.sampled_from(SHAPES), st.sampled_from(dtypes))


def layouts(
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    *,
    rest: tuple[torch.dtype, ...] = (),
    none: bool = True,
    gradients: bool = True,
    max_leaves: int = 6,
) -> st.SearchStrategy[Any]:
    """Nested dicts, lists, tuples and NamedTuples of `Leaf`.

    Args:
        dtypes, rest: of the leaves; `rest` (integers and bool) adds to the first.
        none: whether leaves may be None.
        gradients: whether there must be at least one float element.
    """
    one = leaf_layouts(dtypes + rest)
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


# Numbers


def numbers(layout: Any, seed: int, low: float = 1e-3, high: float = 1e3) -> Any:
    """Random numbers of both signs for a layout, log-uniform in magnitude and within each dtype."""
    generator = torch.Generator().manual_seed(seed)

    def draw(leaf: Leaf) -> Tensor:
        if leaf.dtype == torch.bool:
            return torch.rand(leaf.shape, generator=generator) < 0.5
        if not leaf.dtype.is_floating_point:
            return torch.randint(-5, 6, leaf.shape, generator=generator, dtype=leaf.dtype)
        info = torch.finfo(leaf.dtype)
        bounds = math.log(max(low, info.tiny)), math.log(min(high, info.max / 2))
        share = torch.rand(leaf.shape, generator=generator, dtype=torch.float64)
        sign = torch.randint(0, 2, leaf.shape, generator=generator) * 2 - 1
        return (sign * torch.exp(bounds[0] + share * (bounds[1] - bounds[0]))).to(leaf.dtype)

    return mapped(draw, layout)


def seeds() -> st.SearchStrategy[int]:
    """Seeds for a torch.Generator."""
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
    """Trees of tensors; see `layouts` and `filled`."""
    return layouts(dtypes, rest=rest, none=none, gradients=gradients).flatmap(
        lambda layout: filled(layout, low=low, high=high)
    )


@st.composite
def poisoned(draw: st.DrawFn, tree: Any) -> Any:
    """A copy of a tree with one element of one float leaf, each chosen, made inf or NaN."""
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    places = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel()
    ]
    place = draw(st.sampled_from(places), label="leaf")
    broken = leaves[place].clone()
    element = draw(st.integers(0, broken.numel() - 1), label="element")
    broken.view(-1)[element] = draw(st.sampled_from(NONFINITE), label="value")
    return optree.tree_unflatten(spec, [broken if index == place else leaf for index, leaf in enumerate(leaves)])


def powers_of_two(low: int = -10, high: int = 20) -> st.SearchStrategy[float]:
    return st.integers(low, high).map(lambda exponent: 2.0**exponent)


def float32s(low: float, high: float, **bounds: Any) -> st.SearchStrategy[float]:
    """Numbers that float32 holds exactly."""
    return st.floats(low, high, width=32, **bounds)


def weights() -> st.SearchStrategy[float]:
    """Weights of a micro-batch: nothing, a few items, many tokens, a fraction."""
    return st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.integers(1, 4096).map(float), float32s(0.125, 8.0))


def overflows(max_size: int = 40) -> st.SearchStrategy[list[bool]]:
    """Patterns of overflow: short bursts between clean runs of any length."""
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 8)), min_size=1, max_size=10)
    return runs.map(lambda pairs: [bad for bad, length in pairs for _ in range(length)][:max_size])


# Scalers


def growth_factors(exact: bool = True) -> st.SearchStrategy[float]:
    """Growth factors; exact ones are float32 numbers."""
    known = st.sampled_from([2.0, 4.0, 1.5, 1.25])
    drawn = float32s(1.0, 10.0, exclude_min=True) if exact else st.floats(1.0, 10.0, exclude_min=True)
    return st.one_of(known, drawn)


def backoff_factors(exact: bool = True) -> st.SearchStrategy[float]:
    """Backoff factors; exact ones are float32 numbers."""
    known = st.sampled_from([0.5, 0.25, 0.75])
    bounds: dict[str, Any] = {"exclude_min": True, "exclude_max": True}
    drawn = float32s(0.0, 1.0, **bounds) if exact else st.floats(0.0, 1.0, **bounds)
    return st.one_of(known, drawn)


def loss_scales(low: float = 2.0**-126, high: float = 2.0**127) -> st.SearchStrategy[float]:
    """Loss scales: float32 numbers, powers of two more often than not."""
    exponents = st.integers(round(math.log2(low)), round(math.log2(high))).map(lambda exponent: 2.0**exponent)
    return st.one_of(exponents, float32s(low, high))


@st.composite
def hyperparameters(draw: st.DrawFn, *, exact: bool = True) -> dict[str, Any]:
    """Keyword arguments of `DynamicScale` within its domain, the scale among them."""
    floor = draw(st.one_of(st.just(2.0**-126), loss_scales(high=2.0**20)), label="floor")
    ceiling = draw(st.one_of(st.just(math.inf), loss_scales(low=2.0**20)), label="ceiling")
    return {
        "scale": draw(loss_scales().map(lambda scale: min(max(scale, floor), ceiling)), label="scale"),
        "growth_factor": draw(growth_factors(exact)),
        "backoff_factor": draw(backoff_factors(exact)),
        "growth_interval": draw(st.integers(1, 6)),
        "min_scale": floor,
        "max_scale": ceiling,
        "hysteresis": draw(st.integers(1, 4)),
        "refill": draw(st.sampled_from(["growth", "good"])),
        "growth_delay": draw(st.integers(0, 3)),
    }


def dynamic_scales() -> st.SearchStrategy[fa.DynamicScale]:
    """Any `DynamicScale` within its domain."""
    return hyperparameters().map(lambda arguments: fa.DynamicScale(**arguments))


def scalers() -> st.SearchStrategy[fa.DynamicScale | fa.StaticScale | fa.NoScale]:
    """Scalers of all three kinds."""
    return st.one_of(dynamic_scales(), loss_scales().map(fa.StaticScale), st.builds(fa.NoScale))
