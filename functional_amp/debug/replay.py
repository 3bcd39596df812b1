"""A window run again: with instruments, or plainly at another scale."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import functional_amp.debug.torch_private as torch_private
from functional_amp.debug.blame import Origin
from functional_amp.debug.draws import Draws
from functional_amp.debug.explain_range import is_finite
from functional_amp.debug.locate import Locator
from functional_amp.debug.nonfinite import nonfinite_paths
from functional_amp.debug.provenance import Provenance
from functional_amp.engine.limits import limit_of
from functional_amp.optim import Optimizer
from functional_amp.precision import cast_floating
from functional_amp.registry import with_fields
from functional_amp.stages.accumulate import accumulate, add
from functional_amp.stages.backward import scale_backward
from functional_amp.stages.clip import global_norm
from functional_amp.stages.differentiate import backend_in_graphs, known_limit
from functional_amp.stages.streaming import windowed
from functional_amp.stages.unscale import unscale
from functional_amp.step import Step, make_step
from functional_amp.tree import PyTree, flatten, map_tensors, paths
from functional_amp.values.grads import Loss, denominator
from functional_amp.values.scaler import StaticScale
from functional_amp.values.state import TrainState

LOWEST = -24
"""log2 of the scale at which a gradient that still isn't finite is no matter of the scale."""


@dataclass(frozen=True)
class Options:
    """What makes a window's gradients: the options of a step that have a say in whether they are finite."""

    loss_fn: Callable[..., Tensor | Loss]
    backend: Any
    compute_dtype: torch.dtype | None
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_eps: float = 0.0


@dataclass(frozen=True)
class Replay:
    """What an instrumented window gave.

    Attributes:
        stage: where it stopped being finite; "" where it did not.
        micro_batch: the one that did, None for a stage after all of them.
        leaves: the gradients that are not finite.
        origins: what their bad elements, and the loss's, came from.
        loss: of that micro-batch, or of the last.
        counts: whether that loss has a weight other than 0.
        weight: of all micro-batches together, as far as they were run.
        provenance: the record.
    """

    stage: str
    micro_batch: int | None
    leaves: tuple[str, ...]
    origins: tuple[Origin, ...]
    loss: float
    counts: bool
    weight: float
    provenance: Provenance


def options_of(loss_fn: Any, backend: Any, compute_dtype: torch.dtype | None) -> Options:
    """The options of a step, or those given beside a loss function."""
    if not isinstance(loss_fn, Step):
        return Options(loss_fn, backend, compute_dtype)
    step = loss_fn
    # A donating step takes its gradients from the engine, and so does one whose graph may be left.
    backend = "autograd" if step.donate else backend_in_graphs(step.backend, step.compile)
    return Options(step.loss_fn, backend, step.compute_dtype, step.max_norm, step.norm_type, step.clip_eps)


def settled(options: Options, state: TrainState, window: Sequence[Any], draws: Draws) -> Options:
    """The options with what "auto" stands for: the engine for a loss that torch.func can't differentiate.

    A plain run of the window tells, and meets what must not be in a record: the rehearsal of a module that was
    never called, and the generators of the loss function's own.
    """
    func = replace(options, backend="func") if options.backend == "auto" else options
    engine = replace(options, backend="autograd")
    if options.backend == "auto" and known_limit(options.loss_fn):
        func = engine
    try:
        with draws.watched():
            _step_of(func)(_state_at(state, 1.0), window)
    except (RuntimeError, NotImplementedError) as error:
        if options.backend != "auto" or limit_of(error) is None:
            raise
        return engine
    return func


def is_finite_at(options: Options, state: TrainState, window: Sequence[Any], draws: Draws, scale: float) -> bool:
    """Whether a plain step at this scale would be applied, as `make_step` itself says."""
    with draws.again():
        _, metrics = _step_of(options)(_state_at(state, scale), window)
    return bool(metrics.finite)


def _step_of(options: Options) -> Step:
    return make_step(
        options.loss_fn,
        _STILL,
        max_norm=options.max_norm,
        norm_type=options.norm_type,
        clip_eps=options.clip_eps,
        backend=options.backend,
        compute_dtype=options.compute_dtype,
    )


def _state_at(state: TrainState, scale: float) -> TrainState:
    return with_fields(state, scaler=_static(scale, state), opt_state=(), window=None)


def largest_good_scale(
    options: Options, state: TrainState, window: Sequence[Any], draws: Draws, scale: float
) -> float | None:
    """The largest power of two at which the window is finite and at twice which it is not.

    Returns:
        None where the window is not finite at 2**-24 either.
    """

    def good(exponent: int) -> bool:
        return is_finite_at(options, state, window, draws, 2.0**exponent)

    if not good(LOWEST):
        return None
    low, high = LOWEST, max(math.ceil(math.log2(scale)), LOWEST + 1)
    while high <= 127 and good(high):  # of a scale that is no power of two, the next one was not tried yet
        low, high = high, high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if good(middle) else (low, middle)
    return 2.0**low


def instrumented(options: Options, state: TrainState, window: Sequence[Any], draws: Draws, scale: float) -> Replay:
    """Runs the window's stages under a record, up to the first value that is not finite."""
    named = [*_named("params", state.params), *_named("buffers", state.buffers)]
    named += [pair for micro_batch in window for pair in _named("batch", micro_batch)]
    locator = Locator(instrumented.__code__)
    record = Provenance(locator, named)
    loss, counts, weight = torch.nan, True, 0.0
    with draws.again(), locator:
        for check in _checks(options, state, window, _static(scale, state), record):
            if check.loss is not None:
                loss, counts, weight = float(check.loss), check.weight != 0, weight + check.weight
            leaves = [leaf for leaf in flatten(check.grads).leaves if leaf is not None]
            bad = [tensor for tensor in (*leaves, *check.values) if not is_finite(tensor)]
            if bad:
                origins = tuple(origin for tensor in bad for origin in record.origins(tensor))
                names = tuple(nonfinite_paths(check.grads))
                return Replay(check.stage, check.micro_batch, names, origins, loss, counts, weight, record)
    return Replay("", None, (), (), loss, counts, weight, record)


@dataclass(frozen=True)
class _Check:
    """What one stage gave, to be looked at.

    Attributes:
        stage, micro_batch: as in `Replay`.
        grads: a tree of gradients.
        values: other tensors that must be finite.
        loss: of a micro-batch, where the stage has one.
        weight: of that micro-batch.
    """

    stage: str
    micro_batch: int | None
    grads: PyTree
    values: tuple[Tensor, ...] = ()
    loss: Tensor | None = None
    weight: float = 1.0


def _checks(
    options: Options, state: TrainState, window: Sequence[Any], scaler: StaticScale, record: Provenance
) -> Iterator[_Check]:
    """The stages of the step, one after the other, under the record."""
    params, buffers, total = state.params, state.buffers, None
    loss_fn = windowed(_watched(options.loss_fn, record))
    if options.compute_dtype is not None:
        with record:
            params = cast_floating(params, options.compute_dtype)
    for index, micro_batch in enumerate(window):
        record.phase, record.micro_batch = "forward", index
        with record:
            grads, loss, out = scale_backward(loss_fn, scaler, params, micro_batch, buffers, backend=options.backend)
        weight = float(grads.weight)  # a loss without weight counts as little as its gradient
        buffers = out.buffers if weight else buffers
        yield _Check("backward", index, grads.tree, (loss,) if weight else (), loss, weight)
        record.phase = "accumulate"
        with record:
            total = (add if out.reduction == "sum" else accumulate)(total, grads)
        yield _Check("accumulate", index, total.tree)
    assert total is not None  # a window has at least one micro-batch
    record.phase = "unscale"
    with record:
        divisor, (unscaled, _) = denominator(total), unscale(total)
    yield _Check("unscale", None, unscaled, (divisor,))
    record.phase = "norm"
    with record:
        norm = global_norm(total, options.norm_type)
    yield _Check("norm", None, None, (norm,))


def _watched(loss_fn: Callable[..., Tensor | Loss], record: Provenance) -> Callable[..., Tensor | Loss]:
    """The loss function, which tells the record when it runs."""

    @functools.wraps(loss_fn)
    def watched(*args: Any) -> Any:
        record.phase = "forward"
        try:
            return loss_fn(*args)
        finally:
            record.phase = "backward"

    return watched


def _still(grads: PyTree, opt_state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
    return map_tensors(torch.zeros_like, params), opt_state


_STILL = Optimizer(lambda params: (), _still)


def _static(scale: float, state: TrainState) -> StaticScale:
    device = next((leaf.device for leaf in flatten(state.params).leaves if leaf is not None), None)
    return StaticScale(torch.tensor(scale, dtype=torch.float32, device=device))


def _named(name: str, tree: PyTree) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in zip(paths(tree), flatten(tree).leaves, strict=True):
        if isinstance(leaf, Tensor) and torch_private.has_memory(leaf):
            yield (name if path == "<root>" else f"{name}.{path}"), leaf
