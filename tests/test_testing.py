"""The strategies of the test kit, and its import."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa
import functional_amp.testing as kit
from functional_amp.testing import leaves_of, references


@given(grads=kit.gradients(nonfinite=True), plain=kit.gradients(scaled=False))
@settings(max_examples=20)
def test_gradients_are_finite_or_not_as_asked(grads: fa.ScaledGrads, plain: Any):
    assert not all(leaf is None or bool(leaf.isfinite().all()) for leaf in leaves_of(grads.tree))
    assert all(leaf is None or bool(leaf.isfinite().all()) for leaf in leaves_of(plain))


@pytest.mark.parametrize("name", kit.MAGNITUDES)
def test_each_magnitude_is_within_its_range(name: str):
    low, high = kit.MAGNITUDES[name]

    @settings(max_examples=5)
    @given(grads=kit.gradients(layout=kit.Leaf((3,), torch.float64), magnitudes=[name], scaled=False))
    def check(grads: Tensor) -> None:
        assert ((grads.abs() >= low * (1 - 1e-12)) & (grads.abs() <= high * (1 + 1e-12))).all()

    check()


@settings(max_examples=10)
@given(grads=kit.gradients((torch.float16,), magnitudes=["float16's subnormals"], scaled=False))
def test_subnormals_are_not_flushed_and_not_normal(grads: Any):
    for leaf in leaves_of(grads):
        if leaf is not None:
            assert ((leaf != 0) & (leaf.abs() <= torch.finfo(torch.float16).tiny)).all()


@given(data=st.data())
@settings(max_examples=10)
def test_the_poisoned_leaf_is_the_one_chosen(data: st.DataObject):
    tree = {"a": torch.ones(2), "b": [torch.ones(3), torch.tensor(1)]}
    assert fa.nonfinite_paths(data.draw(kit.poisoned(tree, leaf="b.0"))) == ["b.0"]
    with pytest.raises(ValueError, match=r"found no float element at 'b\.1'"):
        data.draw(kit.poisoned(tree, leaf="b.1"))


@settings(max_examples=30)
@given(scaler=kit.scalers(), window=kit.windows(st.just("x"), empty=False), lengths=kit.windows(max_size=2))
def test_scalers_and_windows_are_within_their_domains(scaler: Any, window: list[Any], lengths: list[float]):
    assert fa.update_scale(scaler, torch.tensor(False)).scale > 0
    assert sum(weight for _, weight in window) > 0
    assert 1 <= len(lengths) <= 2 and min(lengths) >= 0


# The import


def test_without_hypothesis_the_import_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError("No module named 'hypothesis'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="pip install hypothesis"):
        importlib.reload(kit)


def test_the_references_import_nothing_of_the_package():
    tree = ast.parse(inspect.getsource(references))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in imports if isinstance(node, ast.ImportFrom)}
    assert names <= {"__future__", "collections.abc", "dataclasses", "math", "struct", "typing"}


@pytest.mark.slow
def test_the_package_does_not_import_the_kit():

    code = (
        "import sys, functional_amp; sys.exit('functional_amp.testing' in sys.modules or 'hypothesis' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
