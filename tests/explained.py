"""What `explain` says of a case, checked against the step and the plain backward."""

from __future__ import annotations

import linecache
import math
from typing import Any

import torch

import functional_amp as fa
from functional_amp.debug import Explanation, explain
from tests.plants import Case, Plant


def state_of(case: Case, scale: float | None = None) -> fa.TrainState:
    scaler = fa.StaticScale(case.scale if scale is None else scale)
    return fa.init_state(case.params, fa.sgd(0.1), scaler, case.buffers)


def explained(case: Case, backend: Any) -> Explanation:
    return explain(
        case.loss_fn,
        state_of(case),
        case.window,
        seed=case.seed,
        backend=backend,
        compute_dtype=case.compute_dtype,
    )


def step_is_finite(case: Case, scale: float, backend: Any) -> bool:
    """What the step itself says: the oracle of every scale."""
    step = fa.make_step(case.loss_fn, fa.sgd(0.1), backend=backend, compute_dtype=case.compute_dtype)
    with torch.random.fork_rng():
        _, metrics = step(state_of(case, scale), case.window, seed=case.seed)
    return bool(metrics.finite)


def bad_leaves(case: Case, micro_batch: int, backend: Any) -> tuple[str, ...]:
    """The gradients of one micro-batch that are not finite, without instruments."""
    params, buffers = case.params, case.buffers
    params = params if case.compute_dtype is None else fa.cast_floating(params, case.compute_dtype)
    grads = None
    with torch.random.fork_rng():
        for batch in case.window[: micro_batch + 1]:
            given = (batch,) if buffers is None else (batch, buffers)
            out = fa.scale_backward(case.loss_fn, fa.StaticScale(case.scale), params, *given, backend=backend)
            grads, buffers = out.grads, None if buffers is None else out.aux[1]
    return tuple(fa.nonfinite_paths(grads))


def check_scale(case: Case, why: Explanation, backend: Any) -> None:
    """The remedy, tried on the step."""
    good = why.largest_good_scale
    if good is not None:
        assert math.log2(good).is_integer()
        assert step_is_finite(case, good, backend)
        assert not step_is_finite(case, 2 * good, backend)
    else:
        assert not math.isfinite(why.loss) or not step_is_finite(case, 2.0**-24, backend)


def check_answers(plant: Plant, case: Case, why: Explanation, backend: Any) -> None:
    assert why.found
    assert (why.stage, why.micro_batch, why.source) == (plant.stage, plant.micro_batch, plant.source)
    assert why.module == plant.module
    assert why.operator in plant.operator or (plant.stage == "input" and not plant.operator)
    assert why.node.startswith(plant.node)
    assert bool(why.node) == (plant.stage == "backward")
    assert plant.line in linecache.getline(why.file, why.line or 0)
    assert (why.largest_good_scale is not None) == plant.scalable
    if plant.stage in ("forward", "backward", "input"):
        assert plant.micro_batch is not None
        assert why.leaves == bad_leaves(case, plant.micro_batch, backend)
    if why.source:
        assert why.output is not None and why.output.name == why.source
    elif why.operator:  # finite in, not finite out: the operator itself
        assert why.output is not None and why.output.nan + why.output.inf
        assert not any(given.nan for given in why.inputs)
    check_scale(case, why, backend)
