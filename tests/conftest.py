"""Hypothesis profiles, fixtures that more than one test file needs, and other steps for the same tests."""

from __future__ import annotations

import functools
import gc
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

import functional_amp as fa
from functional_amp.engine.storage import cloned
from functional_amp.mode import transformed
from functional_amp.tree import flatten

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
settings.register_profile("default", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile("ci", max_examples=15, derandomize=True, print_blob=True, **_COMMON)
settings.register_profile("deep", max_examples=2000, **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def fresh_dynamo():
    """No compiled code from another test, before and after."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--step",
        choices=["pure", "donated", "compiled"],
        default="pure",
        help="run the tests with steps that donate copies of their states, in eager mode or compiled",
    )


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:  # as many processes as cores: threads would wait for each other
        torch.set_num_threads(1)
    chosen = config.getoption("--step")
    if chosen != "pure":
        options = {"donate": True, "compile": {"backend": "aot_eager"} if chosen == "compiled" else False}
        fa.make_step = functools.partial(_on_copies, fa.make_step, options)


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported stays: a collection in the middle of a trace would walk through all of it


class Halves:
    """A step made of two halves by other hands: `accumulate` folded over a window, then `update`."""

    def __init__(self, accumulate: Any, update: Any, scan: Any = None):
        self.accumulate, self.update, self.scan = accumulate, update, scan

    def __call__(self, state: Any, micro_batches: Any, *, seed: int | None = None) -> Any:
        if seed is not None:
            with fa.seeded(seed):
                return self(state, micro_batches)
        for micro_batch in micro_batches:
            state = self.accumulate(state, micro_batch)
        return self.update(state)


class OnCopies(Halves):
    """A donating step that may be given a state twice, as the pure one: each time it uses up a copy."""

    def __init__(self, step: fa.Step):
        self.step = step
        super().__init__(
            lambda state, batch: step.accumulate(copied(state), batch),
            lambda state: step.update(copied(state)),
            lambda state, batches: step.scan(copied(state), batches),
        )

    def __call__(self, state: Any, micro_batches: Any, **options: Any) -> Any:
        return self.step(copied(state), micro_batches, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)


def copied(state: Any) -> Any:
    if transformed() or not isinstance(state, fa.TrainState):
        return state
    if torch.compiler.is_compiling():
        return cloned(state)
    flat = flatten(state)
    copies = {id(leaf): leaf.clone() for leaf in flat.leaves if isinstance(leaf, torch.Tensor)}
    # Of one tensor at two places one copy: an open window has the scale of its scaler.
    return flat.unflatten([copies.get(id(leaf), leaf) for leaf in flat.leaves])


def _on_copies(make_step: Any, options: dict[str, Any], *args: Any, **given: Any) -> Any:
    if {"donate", "compile"} & set(given):
        return make_step(*args, **given)
    return OnCopies(make_step(*args, **given, **options))
