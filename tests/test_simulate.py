"""Simulated scales against the rules in plain Python, and their picture."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import functional_amp as fa
from functional_amp.debug import plot_scale, simulate
from functional_amp.testing import references

PAIRS = {
    "torch": (lambda: fa.DynamicScale(8.0, growth_interval=3), lambda: references.Torch(8.0, interval=3)),
    "megatron": (
        lambda: fa.DynamicScale.megatron(8.0, growth_interval=3),
        lambda: references.Megatron(8.0, interval=3),
    ),
    "deepspeed": (
        lambda: fa.DynamicScale.deepspeed(8.0, scale_window=3),
        lambda: references.DeepSpeed(8.0, window=3),
    ),
    "apex": (lambda: fa.DynamicScale.apex(8.0, scale_window=3), lambda: references.Apex(8.0, window=3)),
    "jmp": (lambda: fa.DynamicScale.jmp(8.0, period=3), lambda: references.Jmp(8.0, period=3)),
    "flax": (lambda: fa.DynamicScale.flax(8.0, growth_interval=3), lambda: references.Flax(8.0, interval=3)),
    "static": (lambda: fa.StaticScale(8.0), lambda: references.Static(8.0)),
    "none": (fa.NoScale, references.Static),
}


@pytest.mark.parametrize("rule", PAIRS)
@given(overflows=st.lists(st.booleans(), max_size=20))
def test_each_rule_goes_the_way_of_its_reference(rule: str, overflows: list[bool]):
    scaler, reference = (make() for make in PAIRS[rule])
    first = reference.scale
    after = references.scales(reference, overflows)
    trajectory = simulate(scaler, overflows)
    assert [*trajectory.scales, trajectory.scaler.scale.item()] == [first, *after]
    assert trajectory.overflows == tuple(overflows) and trajectory.skipped == sum(overflows)


@pytest.mark.parametrize("rule", PAIRS)
def test_a_function_of_step_and_scale_decides_as_a_reference_would_in_a_loop(rule: str):
    def overflows(step: int, scale: float) -> bool:
        return scale > 2.0 ** (4 + 2 * math.sin(step / 5))

    scaler, reference = (make() for make in PAIRS[rule])
    trajectory = simulate(scaler, overflows, steps=60)
    for step in range(60):
        assert trajectory.scales[step] == reference.scale
        overflow = overflows(step, reference.scale)
        assert trajectory.overflows[step] == overflow
        reference.update(overflow)


def test_the_given_scaler_stays_as_it_was_and_the_last_one_goes_on():
    scaler = fa.DynamicScale(8.0, growth_interval=2)
    flags = [False, True, False, False, False]
    first, whole = simulate(scaler, flags, steps=3), simulate(scaler, flags)
    assert scaler.scale.item() == 8.0
    assert first.scales + simulate(first.scaler, flags[3:]).scales == whole.scales


def test_names_tell_what_differs_from_the_defaults():
    assert simulate(fa.DynamicScale(), []).name == "DynamicScale()"
    assert simulate(fa.DynamicScale(growth_interval=50, backoff_factor=0.25), []).name == (
        "DynamicScale(backoff_factor=0.25, growth_interval=50)"
    )
    assert str(simulate(fa.StaticScale(8.0), [True, False])) == (
        "StaticScale(): 2 windows, 1 skipped (50.0%); scale from 2^3 to 2^3, then 2^3"
    )
    assert str(simulate(fa.NoScale(), [])) == "NoScale(): no window"


@pytest.mark.parametrize("count", [1, 4, 7])
def test_the_picture_has_a_line_and_its_skips_for_each_trajectory(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    figure = pytest.importorskip("matplotlib.figure").Figure
    figures, save = [], figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, path: (figures.append(self), save(self, path))[1])
    trajectories = [
        dataclasses.replace(
            simulate(fa.DynamicScale(8.0, growth_interval=2 + i), [j % 5 == i for j in range(30)]), name=f"rule {i}"
        )
        for i in range(count)
    ]
    plot_scale(*trajectories, path=tmp_path / "scales.png")
    top, bottom = figures[0].axes
    for trajectory, line, marks in zip(trajectories, top.lines, bottom.lines, strict=True):
        assert list(line.get_ydata()) == [math.log2(scale) for scale in trajectory.scales]
        assert list(marks.get_xdata()) == [i for i, bad in enumerate(trajectory.overflows, 1) if bad]
    assert figures[0].bbox.width == 800
    texts = figures[0].legends[0].get_texts()
    assert [text.get_text().split(":")[0] for text in texts] == [f"rule {i}" for i in range(count)]
    assert all(text.get_window_extent().x1 <= 800 for text in texts)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: simulate(cast(Any, "torch"), []), TypeError, "scaler: found str"),
        (lambda: simulate(fa.NoScale(), lambda i, s: True), ValueError, r"steps: found None.*steps=1000"),
        (lambda: simulate(fa.NoScale(), [True], 2), ValueError, "steps: found 2, expected at most the 1"),
        (lambda: simulate(fa.NoScale(), [True], -1), ValueError, "steps: found -1, expected at least 0"),
        (lambda: simulate(fa.NoScale(), [True], True), TypeError, "steps: found bool True"),
        (lambda: simulate(fa.NoScale(), cast(Any, 3)), TypeError, "overflows: found int, expected a list of bools"),
        (lambda: plot_scale(path="never.png"), ValueError, "plot_scale: found no trajectory"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()
