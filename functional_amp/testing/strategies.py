"""Strategies for what flows through a step: gradients near the edges of their dtypes, overflows, windows.

Those for trees are in `tensors`, those for scalers in `scales`; `functional_amp.testing` has them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor

from functional_amp import ScaledGrads
from functional_amp.testing.compare import mapped
from functional_amp.testing.scales import loss_scales
from functional_amp.testing.tensors import FLOATS, NONFINITE, filled, float32s, layouts
from functional_amp.tree import paths

_HALF, _SINGLE = torch.finfo(torch.float16), torch.finfo(torch.float32)
MAGNITUDES: dict[str, tuple[float, float]] = {
    "ordinary": (1e-3, 1e3),
    "float16's largest": (_HALF.max / 2, _HALF.max),
    "float16's smallest": (_HALF.tiny, 2 * _HALF.tiny),
    "float16's subnormals": (_HALF.tiny * _HALF.eps, _HALF.tiny),
    "below float16": (1e-12, _HALF.tiny * _HALF.eps / 2),
    "above float16": (2 * _HALF.max, 1e12),
    "float32's largest": (_SINGLE.max / 2, _SINGLE.max),
    "float32's smallest": (_SINGLE.tiny, 2 * _SINGLE.tiny),
    "float32's subnormals": (_SINGLE.tiny * _SINGLE.eps, _SINGLE.tiny),
}
"""Ranges of magnitudes by name; a leaf whose dtype has no such numbers gets the nearest that it has."""


@st.composite
def gradients(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    *,
    scaled: bool = True,
    magnitudes: Iterable[str] = tuple(MAGNITUDES),
    nonfinite: bool = False,
    leaf: str | None = None,
    scales: st.SearchStrategy[float] | None = None,
    layout: Any = None,
) -> Any:
    """Gradients near the edges of their dtypes.

    Args:
        dtypes: of the leaves.
        scaled: ScaledGrads with a scale and a weight, else a plain tree.
        magnitudes: names among `MAGNITUDES`; each leaf draws one.
        nonfinite: whether one element of one leaf is inf or NaN.
        leaf: the path of that leaf; by default any.
        scales: of ScaledGrads; by default powers of two and others from 2**-20 to 2**40.
        layout: the tree of `Leaf` to fill; by default any.

    >>> from hypothesis import find
    >>> from functional_amp.testing import Leaf
    >>> leaf = Leaf((), torch.float32)
    >>> grads = find(gradients(layout={"w": leaf}, magnitudes=["above float16"]), lambda grads: True)
    >>> grads.tree["w"].abs() > 65504, grads.scale, grads.weight
    (tensor(True), tensor(1.), tensor(1.))
    """
    names = list(magnitudes)
    layout = draw(layouts(dtypes)) if layout is None else layout

    def fill(one: Any) -> Tensor:
        low, high = MAGNITUDES[draw(st.sampled_from(names), label="magnitude")]
        return draw(filled(one, low=low, high=high))

    tree = mapped(fill, layout)
    if nonfinite:
        tree = draw(poisoned(tree, leaf=leaf))
    if not scaled:
        return tree
    scale = draw(loss_scales(2.0**-20, 2.0**40) if scales is None else scales, label="scale")
    return ScaledGrads(tree, scale, draw(weights().filter(bool), label="weight"))


@st.composite
def poisoned(draw: st.DrawFn, tree: Any, *, leaf: str | None = None, values: Sequence[float] = NONFINITE) -> Any:
    """A copy of a tree with one element of one float leaf made inf or NaN.

    Args:
        tree: a tree with at least one float element.
        leaf: the path of the leaf; by default any.
        values: those that the element may become.

    >>> from hypothesis import find
    >>> tree = {"a": torch.ones(1), "b": [torch.ones(2)]}
    >>> find(poisoned(tree, leaf="b.0"), lambda tree: True)
    {'a': tensor([1.]), 'b': [tensor([nan, 1.])]}
    """
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    places = [
        index
        for index, (path, one) in enumerate(zip(paths(tree), leaves, strict=True))
        if isinstance(one, Tensor) and one.is_floating_point() and one.numel() and leaf in (None, path)
    ]
    if not places:
        raise ValueError(f"poisoned: found no float element at {leaf!r} among {paths(tree)}, expected one.")
    place = draw(st.sampled_from(places), label="leaf")
    broken = leaves[place].clone()
    element = draw(st.integers(0, broken.numel() - 1), label="element")
    broken.view(-1)[element] = draw(st.sampled_from(values), label="value")
    return optree.tree_unflatten(spec, [broken if index == place else one for index, one in enumerate(leaves)])


def overflow_patterns(max_size: int = 40) -> st.SearchStrategy[list[bool]]:
    """Patterns of overflow, True where a window overflows: short bursts between clean runs of any length.

    >>> from hypothesis import find
    >>> find(overflow_patterns(), lambda overflows: sum(overflows) == 2 and not overflows[-1])
    [True, True, False]
    """
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 8)), min_size=1, max_size=10)
    return runs.map(lambda pairs: [bad for bad, length in pairs for _ in range(length)][:max_size])


def weights() -> st.SearchStrategy[float]:
    """Weights of a micro-batch: nothing, a few items, many tokens, a fraction.

    >>> from hypothesis import find
    >>> find(weights(), lambda weight: 0 < weight < 1)
    0.5
    """
    return st.one_of(st.just(0.0), st.integers(0, 9).map(float), st.integers(1, 4096).map(float), float32s(0.125, 8.0))


def windows(
    batches: st.SearchStrategy[Any] | None = None,
    *,
    min_size: int = 1,
    max_size: int = 4,
    empty: bool = True,
) -> st.SearchStrategy[list[Any]]:
    """Windows of any length: the weights of their micro-batches, zero among them.

    Args:
        batches: gives the micro-batches, for windows of pairs `(batch, weight)`.
        min_size, max_size: of a window.
        empty: whether all of its weights may be zero.

    >>> from hypothesis import find
    >>> find(windows(), lambda window: len(window) == 2 and sum(window) > 0)
    [0.0, 1.0]
    """
    drawn = st.lists(weights(), min_size=min_size, max_size=max_size)
    drawn = drawn if empty else drawn.filter(any)
    if batches is None:
        return drawn

    def with_batches(window: list[float]) -> st.SearchStrategy[list[Any]]:
        return st.tuples(*[st.tuples(batches, st.just(weight)) for weight in window]).map(list)

    return drawn.flatmap(with_batches)
