"""The whole step: maybe_step, make_step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from functional_amp.accumulate import accumulate
from functional_amp.backward import (
    Backend,
    Loss,
    ScaledGrads,
    as_loss,
    check_backend,
    check_loss_fn,
    denominator,
    scale_backward,
)
from functional_amp.clip import check_clip, measured
from functional_amp.compiled import Compile, compiled, with_own_code
from functional_amp.donate import Added, Lineage, accumulate_in_place, donated
from functional_amp.inplace import cloned, into
from functional_amp.optim.base import Optimizer, check_optimizer, transact
from functional_amp.precision import cast_floating, check_dtype
from functional_amp.random import seeded
from functional_amp.scaler import check_finite, update_scale
from functional_amp.scan import scan_window
from functional_amp.state import Metrics, TrainState, Window
from functional_amp.transform import stage, transformed
from functional_amp.tree import PyTree, like, select, with_fields

R = TypeVar("R")


class Stepped(NamedTuple):
    """The parameters and the optimizer state after an update, or as they were."""

    params: PyTree
    opt_state: PyTree


@stage
def maybe_step(
    optimizer: Optimizer | Any, params: PyTree, opt_state: PyTree, grads: ScaledGrads | PyTree, finite: Tensor
) -> Stepped:
    """Applies the optimizer where the gradients are finite; a transaction.

    Args:
        optimizer: an `Optimizer`, any pair of `(init, update)`, or an update function.
        params: a pytree of tensors.
        opt_state: what `optimizer.init(params)` gave, or the state since.
        grads: gradients in true units, or ScaledGrads, whose units are taken off. The parameter of
            a missing gradient (None) is left alone.
        finite: 0-dim bool tensor. Where False, parameters and optimizer state come back bit for
            bit: moments, step count and with it the schedule.

    Returns:
        The new parameters and optimizer state: same structure, shapes and dtypes.

    Raises:
        TypeError: if `finite` is no bool tensor, the optimizer is none, or a dtype would change.
        ValueError: if the gradients, or what the optimizer returns, do not have the structure and
            shapes of the parameters or of the state; the path is named.

    >>> import torch
    >>> from functional_amp import sgd
    >>> optimizer, params = sgd(lr=0.1), {"w": torch.tensor([1.0])}
    >>> opt_state, grads = optimizer.init(params), {"w": torch.tensor([float("nan")])}
    >>> maybe_step(optimizer, params, opt_state, grads, torch.tensor(False)).params
    {'w': tensor([1.])}
    """
    check_finite(finite)
    if finite.dim() != 0:
        raise ValueError(f"finite: found shape {tuple(finite.shape)}, expected a 0-dim flag. Reduce it with torch.all.")
    tree, divisor = (grads.tree, denominator(grads)) if isinstance(grads, ScaledGrads) else (grads, None)
    return Stepped(*transact(optimizer, tree, opt_state, params, divisor, finite, donate=False))


@dataclass(frozen=True, eq=False)
class Step:
    """The composed step: `accumulate` folded over a window, then `update`.

    Attributes:
        accumulate: `(state, micro_batch) -> state`.
        update: `state -> (state, metrics)`; closes the window.
        scanned: what `scan` runs in place of the two, where it is compiled by itself.
    """

    accumulate: Callable[[TrainState, Any], TrainState]
    update: Callable[[TrainState], tuple[TrainState, Metrics]]
    scanned: Callable[[TrainState, Any], tuple[TrainState, Metrics]] | None = None

    def __call__(
        self, state: TrainState, micro_batches: Iterable[Any], *, seed: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """One update from a window of micro-batches.

        Args:
            state: the state so far; it is not changed and may be used again.
            micro_batches: one or more micro-batches, each any pytree.
            seed: makes the window's random numbers (dropout) depend on it alone, and leaves the
                global generators as they were. Outside a compiled step only: there, write
                `with seeded(seed): compiled(state, micro_batches)`.

        Returns:
            The next state, and the metrics of the window.

        Raises:
            ValueError: for a window without micro-batches.
            TypeError: for a tensor, a dict or a NamedTuple in place of a list of micro-batches.
        """
        one = isinstance(micro_batches, (Tensor, Mapping, str, bytes)) or hasattr(micro_batches, "_fields")
        if one or not isinstance(micro_batches, Iterable):
            raise TypeError(
                f"micro_batches: found {type(micro_batches).__name__}, expected a list of micro-batches. "
                "For a window of one write step(state, [micro_batch])."
            )
        if seed is not None:
            with seeded(seed):
                return self(state, micro_batches)
        empty = True
        for micro_batch in micro_batches:
            state, empty = self.accumulate(state, micro_batch), False
        if empty:
            raise ValueError("micro_batches: found an empty window, expected at least one micro-batch.")
        return self.update(state)

    def scan(self, state: TrainState, micro_batches: PyTree) -> tuple[TrainState, Metrics]:
        """One update from micro-batches that are stacked along a first dimension.

        Compiled it is one graph with one micro-step in it, whatever the length of the window.

        Raises:
            ValueError: for leaves that are not tensors of one first size, naming them; for an empty window.
        """
        if self.scanned is not None:
            return self.scanned(state, micro_batches)
        return self.update(scan_window(self.accumulate, state, micro_batches))


def make_step(
    loss_fn: Callable[..., Tensor | Loss],
    optimizer: Optimizer | Any,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_eps: float = 0.0,
    backend: Backend = "func",
    compute_dtype: torch.dtype | None = None,
    donate: bool = False,
    compile: Compile = False,
) -> Step:
    """Composes the six functions into a step.

    Args:
        loss_fn: `loss_fn(params, micro_batch)` returns a scalar or a `Loss`; where the state has
            buffers, `loss_fn(params, micro_batch, buffers)`, and new buffers come back in the `Loss`.
        optimizer: an `Optimizer`, or any pair of `(init, update)`.
        max_norm: the largest global norm of the gradients, in true units; None turns clipping off.
        norm_type, clip_eps: `clip`'s `norm_type` and `eps`.
        backend: `scale_backward`'s.
        compute_dtype: the loss function is given copies of the float parameters in this dtype, made
            once a window; their gradients are added in float32.
        donate: the state that is passed in is used up, and its storage holds the next one: the same
            values at the peak memory of an imperative loop. Reading a state that was given away
            raises RuntimeError. In eager mode the autograd engine adds each gradient as it is made,
            with both backends; they differ where autocast casts one weight several times.
        compile: True compiles `accumulate`, `update` and `scan`, each at its first call and to one
            graph; a dict is passed on to `torch.compile` (`{"mode": "max-autotune"}`). A window of
            micro-batches stays a Python loop, never unrolled.

    Returns:
        A `Step`. A window without weight is not applied; the scale then counts it as a clean one. A
        window whose norm is no float32 counts as overflow.

    Raises:
        TypeError, ValueError: for a loss function or an optimizer that is none, bad hyperparameters, at once.

    >>> import torch
    >>> from functional_amp import StaticScale, init_state, sgd
    >>> optimizer = sgd(lr=0.5)
    >>> step = make_step(lambda p, x: ((p - x) ** 2).mean(), optimizer)
    >>> state = init_state(torch.zeros(1), optimizer, StaticScale(8.0))
    >>> state, metrics = step(state, [torch.tensor([1.0]), torch.tensor([3.0])])
    >>> state.params, metrics.loss
    (tensor([2.]), tensor(5.))
    """
    check_loss_fn(loss_fn)
    check_optimizer(optimizer)
    check_clip(max_norm, norm_type, clip_eps)
    check_backend(backend)
    if compute_dtype is not None:
        check_dtype(compute_dtype, "compute_dtype")
    if not isinstance(donate, bool):
        raise TypeError(f"donate: found {type(donate).__name__} {donate!r}, expected True or False.")

    def windowed_loss(params: PyTree, micro_batch: Any, buffers: PyTree) -> Loss:
        loss = as_loss(loss_fn(params, micro_batch) if buffers is None else loss_fn(params, micro_batch, buffers))
        if buffers is None and loss.buffers is not None:
            raise ValueError(
                "loss_fn: found buffers in the Loss, but the state has none. Pass init_state(..., buffers=buffers)."
            )
        return with_fields(loss, aux=buffers if loss.buffers is None else loss.buffers, buffers=None)

    def add(donate: bool, total: ScaledGrads | None, state: TrainState, params: PyTree, *batch: Any) -> Added:
        if donate and not torch.compiler.is_compiling() and not transformed() and not torch.is_inference_mode_enabled():
            return accumulate_in_place(windowed_loss, state.scaler, params, total, *batch)
        grads, loss, aux = scale_backward(windowed_loss, state.scaler, params, *batch, backend=backend)
        added = accumulate(total, grads)
        if donate and (torch.compiler.is_compiling() or torch.is_inference_mode_enabled()):
            # The first sum may be a view of a tensor of the loss function's; the compiler drops a needless copy.
            tree = cloned(added.tree) if total is None else into(total.tree, added.tree)
            added = with_fields(added, tree=tree)
        return Added(added, grads.weight, loss, aux)

    def accumulate_window(state: TrainState, micro_batch: Any, donate: bool = donate) -> TrainState:
        window = state.window
        if window is None:
            params = state.params if compute_dtype is None else cast_floating(state.params, compute_dtype)
            grads, weight, loss, buffers = add(donate, None, state, params, micro_batch, state.buffers)
        else:
            params = state.params if window.params is None else window.params
            grads, weight, loss, buffers = add(donate, window.grads, state, params, micro_batch, window.buffers)
        loss = torch.where(weight == 0, 0, loss * like(weight, loss))
        loss = loss if window is None else window.loss + loss
        return with_fields(state, window=Window(grads, loss, buffers, None if compute_dtype is None else params))

    def update(state: TrainState) -> tuple[TrainState, Metrics]:
        window = state.window
        if window is None:
            raise ValueError("update: found no open window, expected step.accumulate(state, micro_batch) before it.")
        weight = window.grads.weight
        divisor, norm, finite = measured(window.grads, max_norm, norm_type=norm_type, eps=clip_eps)
        applied = finite & (weight > 0)
        scaler = update_scale(state.scaler, finite)
        buffers = select(applied, window.buffers, state.buffers, "buffers")
        # Last: where buffers do not fit, a donated state has not been written to yet.
        params, opt_state = transact(
            optimizer, window.grads.tree, state.opt_state, state.params, divisor, applied, donate=donate
        )
        next_state = TrainState(
            params,
            opt_state,
            scaler,
            buffers=into(state.buffers, buffers) if donate and not transformed() else buffers,
            window=None,
            applied=state.applied + applied,
            skipped=state.skipped + ~applied,
            skipped_in_a_row=torch.where(applied, 0, state.skipped_in_a_row + 1),
        )
        loss = window.loss / torch.where(weight == 0, 1, weight)
        return next_state, Metrics(loss, norm, finite, state.scaler.scale, weight)

    def scanned(state: TrainState, micro_batches: Any) -> tuple[TrainState, Metrics]:
        in_place = donate and not torch.compiler.is_compiling()  # the body of a scan may write to nothing
        return update(scan_window(functools.partial(accumulate_window, donate=in_place), state, micro_batches))

    lineage: Lineage = []

    def finished(half: Callable[..., R], *, closes: bool) -> Callable[..., R]:
        half = compiled(stage(half, detach=not donate), compile, backend)
        return _on_state(donated(half, lineage, closes=closes, in_graph=compile is not False) if donate else half)

    return Step(
        finished(accumulate_window, closes=False), finished(update, closes=True), finished(scanned, closes=True)
    )


def _on_state(function: Callable[..., R]) -> Callable[..., R]:
    """Refuses anything but a `TrainState` before the function runs."""

    @with_own_code
    @functools.wraps(function)
    def wrapped(state: TrainState, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state: found {type(state).__name__}, expected the TrainState that init_state or the last step gave. "
                "A step returns the pair (state, metrics)."
            )
        window = vars(state).get("window")
        if window is not None and not (isinstance(window, Window) and isinstance(window.grads, ScaledGrads)):
            raise TypeError(
                f"state.window: found {type(window).__name__}, expected None or what step.accumulate opened. "
                "Go on with dataclasses.replace(state, window=None), and repeat the window."
            )
        return function(state, *args, **kwargs)

    return wrapped
