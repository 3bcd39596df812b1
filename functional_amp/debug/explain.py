"""Why a window was not finite: `explain`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from functional_amp.debug.blame import Origin, Outside, roots
from functional_amp.debug.draws import Draws
from functional_amp.debug.explain_advice import APPLIED, OTHER_RANKS, PRECISION, WEIGHT, advise
from functional_amp.debug.explain_table import NO_WEIGHT, NOT_ON_THIS_RANK, NOT_REPRODUCED, Explanation
from functional_amp.debug.replay import (
    Options,
    Replay,
    instrumented,
    is_finite_at,
    largest_good_scale,
    options_of,
    settled,
)
from functional_amp.engine.sharded import is_sharded
from functional_amp.stages.accumulate import is_window
from functional_amp.stages.differentiate import Backend, check_backend
from functional_amp.step import Step
from functional_amp.tree import flatten, paths
from functional_amp.values.grads import Loss, check_loss_fn
from functional_amp.values.scale import Scaler
from functional_amp.values.scaler import StaticScale
from functional_amp.values.state import TrainState


def explain(
    loss_fn: Callable[..., Tensor | Loss] | Step,
    state: TrainState,
    window: Iterable[Any],
    *,
    scale: float | Tensor | None = None,
    seed: int | None = None,
    backend: Backend = "autograd",
    compute_dtype: torch.dtype | None = None,
) -> Explanation:
    """Runs a window again with instruments, and names what made it not finite.

        replay     forward, backward, accumulate, unscale, norm; stop at the first bad value
        record     each operator that gives inf or NaN, and which of its inputs is to blame
        slice      from the bad gradients and the loss back to the earliest cause
        search     the largest power of two at which the whole window is finite

    The replay has the values of an eager step, bit for bit. A mask of -inf, or a NaN that nothing uses, is counted
    as harmless. Reads tensors on the host, and runs the window up to ten times: it is for the window that failed.

    Args:
        loss_fn: the loss function, or the `Step` itself, whose options are used then. With a mesh, what is run
            again is this rank's part of the window: nothing is sent, and the scale that works is this part's.
        state: the state that the window was given. After a skip the state that came back does as well: its
            parameters are the same, bit for bit (pass `scale`). A window that is open in it is left alone.
        window: its micro-batches.
        scale: the loss scale of the window, `metrics.scale`. By default the state's own, which has backed off
            already in a state that came back from a skip.
        seed: the seed that the step was given, if any.
        backend, compute_dtype: as for `make_step`, where a loss function is given.

    Returns:
        An `Explanation`; `print` it. Nothing is changed: not the state, the batch, the generators or the hooks.

    Raises:
        TypeError, ValueError: for a state, window, scale or option of the wrong kind; sharded parameters.
        Exception: whatever the loss function raises.

    >>> import torch
    >>> from functional_amp import DynamicScale, autocast, init_state, sgd
    >>> loss_fn = autocast(lambda w, x: (x @ w).float().sum(), torch.float16)
    >>> state = init_state(torch.ones(2, 1), sgd(0.1), DynamicScale(2.0**16))
    >>> why = explain(loss_fn, state, [torch.ones(3, 2)])
    >>> why.stage, why.micro_batch, why.leaves, why.largest_good_scale
    ('backward', 0, ('<root>',), 16384.0)
    """
    micro_batches = _checked(state, window)
    options = _options(loss_fn, backend, compute_dtype)
    at = _scale(state.scaler.scale if scale is None else scale)
    draws = Draws(seed)
    options = settled(options, state, micro_batches, draws)
    replay = instrumented(options, state, micro_batches, draws, at)
    finite = not replay.leaves and is_finite_at(options, state, micro_batches, draws, at)
    if not replay.stage and replay.weight <= 0:
        return Explanation(False, NO_WEIGHT, at, replay.loss, WEIGHT.format(weight=replay.weight))
    if not replay.stage and finite:
        harmless = replay.provenance.harmless([])
        if isinstance(loss_fn, Step) and loss_fn.mesh is not None:
            return Explanation(False, NOT_ON_THIS_RANK, at, replay.loss, OTHER_RANKS + PRECISION, harmless=harmless)
        return Explanation(False, NOT_REPRODUCED, at, replay.loss, PRECISION, harmless=harmless)
    if not replay.stage:
        good = largest_good_scale(options, state, micro_batches, draws, at)
        return _explained(replay, "norm", None, at, good, state.scaler)
    root = _earliest(replay.origins)
    stage = replay.stage if root is None else "input" if isinstance(root, Outside) else root.phase
    hopeless = replay.counts and not math.isfinite(replay.loss)
    good = None if hopeless else largest_good_scale(options, state, micro_batches, draws, at)
    why = _explained(replay, stage, root, at, good, state.scaler)
    return replace(why, advice=f"{why.advice} {APPLIED}") if finite else why


def _earliest(origins: Sequence[Origin]) -> Origin | None:
    causes = [root for origin in origins for root in roots(origin)]
    return min(causes, key=lambda root: root.index, default=None)


def _explained(
    replay: Replay, stage: str, root: Origin | None, scale: float, good: float | None, scaler: Scaler
) -> Explanation:
    micro_batch, harmless = replay.micro_batch, replay.provenance.harmless(replay.origins)
    advice = advise(root, stage, scale, good, scaler)
    found: dict[str, Any] = {"output": root.range, "source": root.name} if isinstance(root, Outside) else {}
    event = replay.provenance.first_use(root) if isinstance(root, Outside) else root
    if event is not None:
        micro_batch = None if micro_batch is None else event.micro_batch
        found = {**vars(event.place), "operator": event.operator, "node": event.node, "inputs": event.inputs} | found
        found.setdefault("output", event.output)
    return Explanation(
        True,
        stage,
        scale,
        replay.loss,
        advice,
        micro_batch,
        leaves=replay.leaves,
        largest_good_scale=good,
        harmless=harmless,
        **found,
    )


def _options(loss_fn: Any, backend: Any, compute_dtype: Any) -> Options:
    if isinstance(loss_fn, Step) and (backend != "autograd" or compute_dtype is not None):
        raise ValueError(
            f"explain: found backend={backend!r}, compute_dtype={compute_dtype!r} beside a Step, expected neither. "
            "A Step's own options are used: leave them out."
        )
    options = options_of(loss_fn, backend, compute_dtype)
    check_loss_fn(options.loss_fn)
    check_backend(options.backend)
    return options


def _scale(scale: Any) -> float:
    if isinstance(scale, Tensor) and scale.dim():
        raise ValueError(
            f"scale: found shape {tuple(scale.shape)}, expected a number or a 0-dim tensor. "
            "Explain one member of an ensemble: its state and window, each leaf at the member's index."
        )
    return StaticScale(scale).scale.item()


def _checked(state: Any, window: Any) -> list[Any]:
    """The micro-batches, after checks of both arguments."""
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state: found {type(state).__name__}, expected the TrainState of init_state or of a step. "
            "Build one from bare parameters: init_state(params, sgd(0.1))."
        )
    sharded = [
        path
        for path, leaf in zip(paths(state.params), flatten(state.params).leaves, strict=True)
        if leaf is not None and is_sharded(leaf)
    ]
    if sharded:
        raise TypeError(
            f"state: found DTensors at {sharded[:3]} in params, expected plain tensors: operators on their parts are "
            "not followed. Explain it on one rank, with leaf.full_tensor() in place of each."
        )
    if not is_window(window):
        raise TypeError(
            f"window: found {type(window).__name__}, expected a list of micro-batches. "
            "For a window of one write explain(loss_fn, state, [micro_batch]). For the stacked window of step.scan: "
            "[optree.tree_map(lambda leaf: leaf[i], stacked) for i in range(n)]."
        )
    micro_batches = list(window)
    if not micro_batches:
        raise ValueError("window: found no micro-batch, expected those of the step that was skipped, at least one.")
    return micro_batches
