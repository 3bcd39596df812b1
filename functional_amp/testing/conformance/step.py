"""The laws of a whole step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from functional_amp import Metrics, TrainState, seeded, update_scale
from functional_amp.dtypes import is_differentiable
from functional_amp.testing.compare import (
    assert_alike,
    assert_no_aliases,
    assert_same_bits,
    assert_unwritten,
    copied,
    leaves_of,
    mapped,
    snapshot,
)
from functional_amp.testing.conformance.laws import check, in_fake_mode, used_up

Stepper = Callable[[TrainState, list[Any]], tuple[TrainState, Metrics]]


def check_step(step: Stepper, state: TrainState, batch: Any, *, bad_batch: Any = None, host: bool = True) -> None:
    """Checks the laws of a step; one line makes a test of it.

    - it is pure, or it donates: the state given raises RuntimeError when it is read again
    - the state keeps its structure, shapes and dtypes, with the window closed
    - a skip is a transaction: parameters, optimizer state and buffers come back bit for bit, the
      scaler moves as `update_scale` moves it, and the counters count
    - one bad micro-batch spoils its window, the first as well as the last, and leaves no trace in the next window
    - it replays bit for bit from a seed
    - the metrics are 0-dim tensors of the right types, and the scale is that of this window
    - no tensor is read on the host

    Args:
        step: `step(state, micro_batches) -> (state, metrics)`: a `Step`, or your own composition.
        state: a state between two windows. A donating step gets copies of it.
        batch: a micro-batch with finite gradients; windows of two are made of it.
        bad_batch: one whose gradients are not finite; by default `batch` with NaN in its float
            leaves, or, where it has none, `batch` on parameters that are NaN.
        host: whether to look for host reads. A compiled step cannot run on fake tensors: pass False.

    Raises:
        AssertionError: naming the law, the path of the leaf, what was found and what was expected.

    >>> import torch
    >>> import functional_amp as fa
    >>> optimizer = fa.sgd(0.1, momentum=0.9)
    >>> step = fa.make_step(lambda p, x: ((p - x) ** 2).mean(), optimizer)
    >>> check_step(step, fa.init_state(torch.zeros(2), optimizer), torch.ones(2))
    """
    poisoned_state, bad = poison(state, batch) if bad_batch is None else (state, bad_batch)
    check("check_step", LAWS, step, state, batch)
    check("check_step", SKIP_LAWS, step, poisoned_state, bad)
    if poisoned_state is state:
        check("check_step", PLACE_LAWS, step, state, batch, bad)
    if host:
        check("check_step", HOST_LAWS, step, state, batch)


def poison(state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """A state and a micro-batch whose gradients are not finite."""

    def nan(leaf: Any) -> Any:
        return torch.full_like(leaf, math.nan) if is_differentiable(leaf) else leaf

    if any(is_differentiable(leaf) for leaf in leaves_of(batch)):
        return state, mapped(nan, batch)
    return replace(state, params=mapped(nan, state.params)), batch


def run(step: Stepper, state: TrainState, batch: Any, last: Any = None) -> tuple[TrainState, Metrics]:
    """A window of two, on a copy of the state, with the same random numbers each time."""
    with seeded(0):
        return step(copied(state), [batch, batch if last is None else last])


def it_is_pure_or_donates_and_says_so(step: Stepper, state: TrainState, batch: Any) -> None:
    given, batch = copied(state), copied(batch)
    versions, values = snapshot({"state": given, "batch": batch})
    with seeded(0):
        output = step(given, [batch, batch])
    if used_up(given):
        assert_same_bits(batch, values["batch"], "batch")
        return
    assert_unwritten(versions, values, {"state": given, "batch": batch}, "a state that can still be read")
    assert_no_aliases(output, {"state": given, "batch": batch}, "output")


def the_state_keeps_its_structure_shapes_and_dtypes(step: Stepper, state: TrainState, batch: Any) -> None:
    after, _ = run(step, state, batch)
    assert_alike(after, state, "state")
    again, _ = run(step, after, batch)
    assert_alike(again, state, "state after two windows")


def it_replays_bit_for_bit(step: Stepper, state: TrainState, batch: Any) -> None:
    assert_same_bits(run(step, state, batch), run(step, state, batch), "the second of two runs")


def the_metrics_are_what_they_should_be(step: Stepper, state: TrainState, batch: Any) -> None:
    after, metrics = run(step, state, batch)
    for name in [field for field in Metrics._fields if field not in Metrics._field_defaults]:  # aux may be anything
        found, flag = cast(Any, getattr(metrics, name, None)), name in ("finite", "applied")
        right = isinstance(found, Tensor) and found.dim() == 0
        if not right or not (found.dtype == torch.bool if flag else found.is_floating_point()):
            kind = "bool" if flag else "floating-point"
            raise AssertionError(f"metrics: at {name!r}: found {found!r}, expected a 0-dim {kind} tensor.")
    assert_same_bits(metrics.scale, state.scaler.scale, "metrics.scale, the scale that this window used")
    if not bool(metrics.finite):
        raise AssertionError("metrics: at 'finite': found False, expected True: pass a batch with finite gradients.")
    counters = {name: getattr(state, name) for name in ("applied", "skipped", "skipped_in_a_row")}
    expected = {**counters, "applied": counters["applied"] + 1, "skipped_in_a_row": counters["skipped_in_a_row"] * 0}
    assert_same_bits({name: getattr(after, name) for name in counters}, expected, "state")
    assert_same_bits(after.scaler, update_scale(state.scaler, torch.tensor(True)), "scaler")


def a_skip_is_a_transaction(step: Stepper, state: TrainState, batch: Any) -> None:
    for round_number in (1, 2):
        after, metrics = run(step, state, batch)
        if bool(metrics.finite):
            raise AssertionError("metrics: at 'finite': found True for a window with NaN, expected False.")
        for name in ("params", "opt_state", "buffers"):
            assert_same_bits(getattr(after, name), getattr(state, name), name)
        assert_same_bits(after.scaler, update_scale(state.scaler, torch.tensor(False)), "scaler")
        assert_same_bits(after.applied, state.applied, "state.applied")
        for name in ("skipped", "skipped_in_a_row"):
            assert_same_bits(getattr(after, name), getattr(state, name) + 1, f"state.{name}, skip {round_number}")
        state = after


def one_bad_micro_batch_spoils_its_window_and_no_other(step: Stepper, state: TrainState, batch: Any, bad: Any) -> None:
    expected, _ = run(step, state, batch)
    for place, window in (("first", (bad, batch)), ("last", (batch, bad))):
        after, metrics = run(step, state, *window)
        if bool(metrics.finite):
            raise AssertionError(f"metrics: at 'finite': found True where the {place} of two is bad, expected False.")
        for name in ("params", "opt_state", "buffers"):
            assert_same_bits(getattr(after, name), getattr(state, name), f"{name}, where the {place} of two is bad")
        # What the step keeps outside its state shows here.
        assert_same_bits(run(step, state, batch)[0], expected, "the state after the window after the skipped one")


def no_tensor_is_read_on_the_host(step: Stepper, state: TrainState, batch: Any) -> None:
    in_fake_mode(lambda state, batch: step(state, [batch, batch]), state, batch)


LAWS = (
    it_is_pure_or_donates_and_says_so,
    the_state_keeps_its_structure_shapes_and_dtypes,
    it_replays_bit_for_bit,
    the_metrics_are_what_they_should_be,
)
SKIP_LAWS = (a_skip_is_a_transaction,)
PLACE_LAWS = (one_bad_micro_batch_spoils_its_window_and_no_other,)
HOST_LAWS = (no_tensor_is_read_on_the_host,)
