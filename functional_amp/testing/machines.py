"""State machines: a scaler or a whole step, driven through random windows beside a reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from functional_amp import init_state, make_step, sgd, update_scale
from functional_amp.testing.compare import assert_alike, assert_same_bits, copied
from functional_amp.testing.linear import linear_loss
from functional_amp.testing.references import Reference
from functional_amp.testing.tensors import NONFINITE


def scaler_machine(
    make_scaler: Callable[..., Any],
    make_reference: Callable[..., Reference],
    *,
    update: Callable[[Any, torch.Tensor], Any] = update_scale,
    arguments: st.SearchStrategy[Any] | None = None,
) -> type[RuleBasedStateMachine]:
    """A machine that drives a scaler through good and bad windows beside a reference.

    After each window the scale must be the reference's, and the scaler of the same structure and
    dtypes. A counterexample shrinks to the shortest list of windows that tells the two apart.

    Args:
        make_scaler: `make_scaler()` gives the scaler at its start.
        make_reference: `make_reference()` gives the rule in plain Python (see `references`).
        update: `update(scaler, finite)`, where it is not `functional_amp.update_scale`.
        arguments: gives a value for both `make_scaler(value)` and `make_reference(value)`.

    Returns:
        The machine; `TestMyScale = scaler_machine(...).TestCase` is a test, and
        `hypothesis.stateful.run_state_machine_as_test` runs it on the spot.

    >>> import functional_amp as fa
    >>> from functional_amp.testing import references
    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> run_state_machine_as_test(
    ...     scaler_machine(
    ...         lambda: fa.DynamicScale.jmp(8.0, period=2), lambda: references.Jmp(8.0, period=2)
    ...     ),
    ...     settings=settings(max_examples=5),
    ... )
    """

    class ScalerMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[str] = []
            if arguments is None:
                self.start()

        def start(self, *value: Any) -> None:
            self.scaler, self.reference = make_scaler(*value), make_reference(*value)

        @rule()
        def good_window(self) -> None:
            self.move(True)

        @rule()
        def bad_window(self) -> None:
            self.move(False)

        def move(self, finite: bool) -> None:
            self.history.append("good" if finite else "bad")
            before, self.scaler = self.scaler, update(self.scaler, torch.tensor(finite))
            self.reference.update(not finite)
            assert_alike(self.scaler, before, f"scaler_machine: after {' '.join(self.history)}: the scaler")
            _assert_scale(self.scaler, self.reference, "scaler_machine", self.history)

    if arguments is None:
        return ScalerMachine

    class StartedScalerMachine(ScalerMachine):
        @initialize(value=arguments)
        def started(self, value: Any) -> None:
            self.start(value)

    return StartedScalerMachine


LEARNING_RATE, MOMENTUM = 0.5, 0.5


class _Sgd:
    """Two parameters under SGD with momentum, in plain Python floats."""

    def __init__(self) -> None:
        self.params = {"a": 0.0, "b": 1.0}
        self.momentum = {"a": 0.0, "b": 0.0}

    def update(self, grads: dict[str, float]) -> None:
        for name, grad in grads.items():
            self.momentum[name] = MOMENTUM * self.momentum[name] + grad
            self.params[name] -= LEARNING_RATE * self.momentum[name]


def step_machine(
    make_scaler: Callable[[], Any],
    make_reference: Callable[[], Reference],
    *,
    make_step: Callable[..., Callable[..., Any]] = make_step,
) -> type[RuleBasedStateMachine]:
    """A machine that drives a whole step through good, non-finite and weightless windows beside a reference.

    The parameters are two tensors, the optimizer SGD with momentum, and the loss `linear_loss`, so
    that a machine in plain floats knows what each window must do. After each:

    - the scale is the reference's, and the metrics have the one before, the weight and the flag;
    - a good window moves the parameters by its weighted mean gradient, whatever the scale;
    - one with inf or NaN, or without weight, leaves parameters and optimizer state bit for bit;
    - `applied`, `skipped` and `skipped_in_a_row` count.

    Args:
        make_scaler, make_reference: as those of `scaler_machine`. A scale outside 2**-100 to 2**100
            sees no good windows: the gradients themselves would leave float32 there.
        make_step: `make_step(loss_fn, optimizer)` gives `step(state, micro_batches) -> (state, metrics)`
            on the state of `functional_amp.init_state`; your own in place of `functional_amp.make_step`.

    Returns:
        The machine, as `scaler_machine` returns it.

    >>> import functional_amp as fa
    >>> from functional_amp.testing import references
    >>> from hypothesis import settings
    >>> from hypothesis.stateful import run_state_machine_as_test
    >>> machine = step_machine(
    ...     lambda: fa.DynamicScale(8.0, growth_interval=2), lambda: references.Torch(8.0, interval=2)
    ... )
    >>> run_state_machine_as_test(machine, settings=settings(max_examples=2, stateful_step_count=5))
    """
    gradients = st.integers(-4, 4)
    weights = st.sampled_from([1.0, 0.0, 2.0, 3.0])
    micro_batches = st.lists(st.tuples(gradients, gradients, weights), min_size=1, max_size=3)
    optimizer = sgd(LEARNING_RATE, MOMENTUM)
    step = make_step(linear_loss, optimizer)

    class StepMachine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.history: list[str] = []
            self.model, self.reference = _Sgd(), make_reference()
            params = {name: torch.full((2,), value) for name, value in self.model.params.items()}
            self.state = init_state(params, optimizer, make_scaler())
            self.counts = {"applied": 0, "skipped": 0, "skipped_in_a_row": 0}

        @precondition(lambda self: 2.0**-100 < self.reference.scale < 2.0**100)
        @rule(window=micro_batches.filter(lambda window: any(weight for *_, weight in window)))
        def good_window(self, window: list[tuple[float, float, float]]) -> None:
            self.run("good", window)
            total = sum(weight for *_, weight in window)
            means = [sum(grads[place] * grads[2] for grads in window) / total for place in (0, 1)]
            self.model.update(dict(zip("ab", means, strict=True)))
            for name, expected in self.model.params.items():
                found = self.state.params[name]
                if not torch.allclose(found, torch.full((2,), expected), rtol=1e-5, atol=1e-5):
                    self.fail(f"state.params: at {name!r}", found.tolist(), [expected] * 2)

        @rule(
            value=st.sampled_from(NONFINITE),
            leaf=st.sampled_from("ab"),
            good_before=st.integers(0, 1),
            good_after=st.integers(0, 1),
        )
        def bad_window(self, value: float, leaf: str, good_before: int, good_after: int) -> None:
            good = (1.0, 1.0, 1.0)
            bad = (value, 1.0, 1.0) if leaf == "a" else (1.0, value, 1.0)
            self.run("bad", [good] * good_before + [bad] + [good] * good_after)

        @rule(length=st.integers(1, 2))
        def empty_window(self, length: int) -> None:
            self.run("empty", [(math.nan, 1.0, 0.0)] * length)

        def run(self, kind: str, window: list[tuple[float, float, float]]) -> None:
            self.history.append(kind)
            before, used = self.state, self.state.scaler.scale.item()
            kept = copied({"params": before.params, "opt_state": before.opt_state})  # the step may write into its state
            self.state, metrics = step(
                before,
                [
                    {"grads": {"a": torch.full((2,), float(a)), "b": torch.full((2,), float(b))}, "weight": w}
                    for a, b, w in window
                ],
            )
            applied = kind == "good"
            self.counts = {
                "applied": self.counts["applied"] + applied,
                "skipped": self.counts["skipped"] + (not applied),
                "skipped_in_a_row": 0 if applied else self.counts["skipped_in_a_row"] + 1,
            }
            self.reference.update(kind == "bad")
            if not applied:
                now = {"params": self.state.params, "opt_state": self.state.opt_state}
                assert_same_bits(now, kept, f"step_machine: after {self.told()}: a skip is a transaction")
            for name, expected in self.counts.items():
                self.expect(f"state.{name}", getattr(self.state, name).item(), expected)
            self.expect("metrics.finite", metrics.finite.item(), kind != "bad")
            self.expect("metrics.scale", metrics.scale.item(), used)
            self.expect("metrics.weight", metrics.weight.item(), sum(weight for *_, weight in window))
            _assert_scale(self.state.scaler, self.reference, "step_machine", self.history)

        def told(self) -> str:
            return " ".join(self.history)

        def expect(self, what: str, found: Any, expected: Any) -> None:
            if found != expected:
                self.fail(what, found, expected)

        def fail(self, what: str, found: Any, expected: Any) -> None:
            raise AssertionError(f"step_machine: after {self.told()}: {what}: found {found}, expected {expected}.")

    return StepMachine


def _assert_scale(scaler: Any, reference: Reference, machine: str, history: list[str]) -> None:
    found = scaler.scale.item()
    if found != reference.scale:
        raise AssertionError(
            f"{machine}: after {' '.join(history)}: scale: found {found}, expected {reference.scale} "
            f"as {type(reference).__name__} has it."
        )
