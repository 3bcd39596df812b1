"""The report of what is not finite: counts, places, and the table."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import functional_amp as fa
from functional_amp.debug import nonfinite_report
from functional_amp.dtypes import is_differentiable
from functional_amp.testing import gradients
from functional_amp.tree import flatten, paths

INF, NAN = math.inf, math.nan


@given(st.data())
def test_counts_places_and_peaks_are_those_of_a_loop_over_the_elements(data: st.DataObject):
    grads = data.draw(gradients(nonfinite=True))
    report = nonfinite_report(grads)
    leaves = [
        (path, leaf)
        for path, leaf in zip(paths(grads.tree), flatten(grads.tree).leaves, strict=True)
        if is_differentiable(leaf)
    ]
    assert report.checked == len(leaves)
    bad = {path: leaf for path, leaf in leaves if not all(map(cmath_finite, leaf.flatten().tolist()))}
    assert [leaf.path for leaf in report.leaves] == list(bad) == fa.nonfinite_paths(grads)
    assert report.found == bool(bad)
    for found in report.leaves:
        leaf = bad[found.path]
        elements = leaf.flatten().tolist()
        assert found.elements == sum(not cmath_finite(x) for x in elements)
        assert found.nan == sum(x != x for x in elements)
        assert (found.shape, found.dtype) == (tuple(leaf.shape), leaf.dtype)
        first = next(i for i, x in enumerate(elements) if not cmath_finite(x))
        assert found.first == tuple(int(i) for i in torch.unravel_index(torch.tensor(first), leaf.shape))
        peak = max((abs(x) for x in elements if cmath_finite(x)), default=0.0)
        assert found.largest_finite == pytest.approx(peak, rel=1e-6)


def cmath_finite(x: complex) -> bool:
    return math.isfinite(x.real) and math.isfinite(x.imag)


def test_signs_are_told_apart():
    tree = {
        "a": torch.tensor([[INF, 1.0, -INF], [NAN, INF, -2.0]]),
        "b": torch.ones(2),
        "n": torch.arange(2),
        "o": None,
    }
    (leaf,) = nonfinite_report(tree).leaves
    assert (leaf.nan, leaf.positive_inf, leaf.negative_inf, leaf.elements) == (1, 2, 1, 4)
    assert (leaf.first, leaf.largest_finite) == ((0, 0), 2.0)


def test_a_complex_element_counts_once():
    (leaf,) = nonfinite_report(torch.tensor([complex(NAN, INF), complex(0, -INF), complex(INF, 1), 1j])).leaves
    assert (leaf.nan, leaf.positive_inf, leaf.negative_inf, leaf.largest_finite) == (1, 1, 1, 1.0)


def test_scalars_and_narrow_types_are_counted():
    (scalar,) = nonfinite_report(torch.tensor(NAN)).leaves
    assert (scalar.path, scalar.shape, scalar.first, scalar.largest_finite) == ("<root>", (), (), 0.0)
    (narrow,) = nonfinite_report([torch.tensor([1.0, INF]).to(torch.float8_e5m2)]).leaves
    assert (narrow.positive_inf, narrow.first, narrow.largest_finite) == (1, (1,), 1.0)


def test_a_whole_state_can_be_looked_at():
    state = fa.init_state({"w": torch.tensor([1.0, NAN])}, fa.sgd(0.1, momentum=0.9))
    assert [leaf.path for leaf in nonfinite_report(state).leaves] == ["params.w"]


def test_the_table_tells_each_leaf():
    text = str(nonfinite_report({"a": torch.tensor([INF, 2.0]), "b": torch.ones(1)}))
    assert text.splitlines()[0] == "1 of 2 leaves are not finite"
    assert text.splitlines()[2].split() == ["a", "float32", "2", "0", "1", "0", "50.0%", "0", "2"]
    assert str(nonfinite_report({"b": torch.ones(1)})) == "all 1 leaves are finite"


def test_what_is_no_tensor_is_refused_with_its_path():
    with pytest.raises(TypeError, match=r"tree: found float 1.0 at 'a\.1', expected a tensor"):
        nonfinite_report({"a": [torch.ones(1), cast(Any, 1.0)]})
