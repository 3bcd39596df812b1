"""The whole step: maybe_step, TrainState, init_state, make_step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from functional_amp.accumulate import accumulate
from functional_amp.backward import Backend, Loss, ScaledGrads, as_loss, check_backend, check_loss_fn, scale_backward
from functional_amp.clip import check_clip, clip
from functional_amp.optim.base import Optimizer, check_optimizer, init_with, matched, step_with
from functional_amp.random import seeded
from functional_amp.scaler import DynamicScale, Scaler, check_finite, check_scaler, update_scale
from functional_amp.transform import stage, transformed
from functional_amp.tree import (
    PyTree,
    flatten_tensors,
    is_differentiable,
    like,
    map_tensors,
    register,
    select,
    with_fields,
)
from functional_amp.unscale import unscale

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
    if isinstance(grads, ScaledGrads):
        grads = unscale(grads).grads
    matched(params, grads, "grads")
    if transformed():
        # Under an outer derivative the branch not taken must be finite as well: 0 * NaN is NaN.
        grads = map_tensors(lambda g: torch.where(like(finite, g), g, 1) if is_differentiable(g) else g, grads)
    else:
        params = map_tensors(lambda p: p.detach() if p.requires_grad else p, params)
    new_params, new_opt_state = step_with(optimizer, grads, opt_state, params)
    return Stepped(select(finite, new_params, params, "params"), select(finite, new_opt_state, opt_state, "opt_state"))


@dataclass(frozen=True, eq=False)
class Window:
    """The open window: what its micro-batches have given so far.

    Attributes:
        grads: the sum of their gradients, with its scale and weight.
        loss: float32, 0-dim; the weighted sum of their losses.
        buffers: the buffers after the last one; those of the state are kept until the window closes.
    """

    grads: ScaledGrads
    loss: Tensor
    buffers: PyTree


@dataclass(frozen=True, eq=False)
class TrainState:
    """All the state of a training run, as one value.

    Attributes:
        params, opt_state, scaler, buffers: as of the last applied update.
        window: the open window, None between windows.
        applied, skipped, skipped_in_a_row: int32, 0-dim; windows that moved the parameters, windows
            that did not, and how many of these came last.
    """

    params: PyTree
    opt_state: PyTree
    scaler: Any
    buffers: PyTree
    window: Window | None
    applied: Tensor
    skipped: Tensor
    skipped_in_a_row: Tensor


register(Window, ("grads", "loss", "buffers"))
register(TrainState, ("params", "opt_state", "scaler", "buffers", "window", "applied", "skipped", "skipped_in_a_row"))


class Metrics(NamedTuple):
    """What a window was like: 0-dim tensors on the device, for nobody in the step to read.

    Attributes:
        loss: the weighted mean of the losses of its micro-batches, unscaled; 0 without weight.
        grad_norm: the global norm before clipping, in true units.
        finite: whether the gradients were.
        scale: the loss scale that this window used.
        weight: its total weight.
    """

    loss: Tensor
    grad_norm: Tensor
    finite: Tensor
    scale: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Step:
    """The composed step: `accumulate` folded over a window, then `update`.

    Attributes:
        accumulate: `(state, micro_batch) -> state`.
        update: `state -> (state, metrics)`; closes the window.
    """

    accumulate: Callable[[TrainState, Any], TrainState]
    update: Callable[[TrainState], tuple[TrainState, Metrics]]

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


@stage
def init_state(
    params: PyTree, optimizer: Optimizer | Any, scaler: Scaler | None = None, buffers: PyTree = None
) -> TrainState:
    """The state before the first window.

    Args:
        params: a pytree of tensors; those that require grad are detached.
        optimizer: gives the optimizer state by its `init`.
        scaler: by default `DynamicScale()`. It moves to the device of the parameters.
        buffers: a pytree of tensors that the loss function takes and returns, or None.

    Raises:
        TypeError: for leaves that are no tensors, something that is no scaler or optimizer.

    >>> import torch
    >>> from functional_amp import sgd
    >>> init_state({"w": torch.ones(2)}, sgd(lr=0.1)).scaler.scale
    tensor(65536.)
    """
    scaler = DynamicScale() if scaler is None else scaler
    check_scaler(scaler)
    leaves = [leaf for leaf in flatten_tensors(params, "params").leaves if leaf is not None]
    flatten_tensors(buffers, "buffers")
    if leaves:
        scaler = cast(Scaler, map_tensors(lambda leaf: leaf.to(leaves[0].device), scaler))
    if not transformed():
        params = map_tensors(lambda leaf: leaf.detach(), params)
        buffers = map_tensors(lambda leaf: leaf.detach(), buffers)
    # One tensor each: torch.compile guards on two inputs being the same object, and they never are again.
    counters = [torch.zeros_like(scaler.scale, dtype=torch.int32) for _ in range(3)]
    return TrainState(params, init_with(optimizer, params), scaler, buffers, None, *counters)


def make_step(
    loss_fn: Callable[..., Tensor | Loss],
    optimizer: Optimizer | Any,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_eps: float = 0.0,
    backend: Backend = "func",
) -> Step:
    """Composes the six functions into a step.

    Args:
        loss_fn: `loss_fn(params, micro_batch)` returns a scalar or a `Loss`; where the state has
            buffers, `loss_fn(params, micro_batch, buffers)`, and new buffers come back in the `Loss`.
        optimizer: an `Optimizer`, or any pair of `(init, update)`.
        max_norm: the largest global norm of the gradients, in true units; None turns clipping off.
        norm_type, clip_eps: `clip`'s `norm_type` and `eps`.
        backend: `scale_backward`'s.

    Returns:
        A `Step`. A window without weight is not applied; the scale then counts it as a clean one.

    Raises:
        TypeError, ValueError: for a loss function or an optimizer that is none, bad hyperparameters, at once.

    >>> import torch
    >>> from functional_amp import StaticScale, sgd
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

    def windowed_loss(params: PyTree, micro_batch: Any, buffers: PyTree) -> Loss:
        loss = as_loss(loss_fn(params, micro_batch) if buffers is None else loss_fn(params, micro_batch, buffers))
        if buffers is None and loss.buffers is not None:
            raise ValueError(
                "loss_fn: found buffers in the Loss, but the state has none. Pass init_state(..., buffers=buffers)."
            )
        return with_fields(loss, aux=buffers if loss.buffers is None else loss.buffers, buffers=None)

    @stage
    def accumulate_window(state: TrainState, micro_batch: Any) -> TrainState:
        window = state.window
        buffers = state.buffers if window is None else window.buffers
        grads, loss, buffers = scale_backward(
            windowed_loss, state.scaler, state.params, micro_batch, buffers, backend=backend
        )
        loss = torch.where(grads.weight == 0, 0, loss * like(grads.weight, loss))
        if window is None:
            return with_fields(state, window=Window(accumulate(None, grads), loss, buffers))
        return with_fields(state, window=Window(accumulate(window.grads, grads), window.loss + loss, buffers))

    @stage
    def update(state: TrainState) -> tuple[TrainState, Metrics]:
        window = state.window
        if window is None:
            raise ValueError("update: found no open window, expected step.accumulate(state, micro_batch) before it.")
        weight = window.grads.weight
        grads, finite = unscale(window.grads)
        grads, norm = clip(grads, max_norm, norm_type=norm_type, eps=clip_eps)
        applied = finite & (weight > 0)
        params, opt_state = maybe_step(optimizer, state.params, state.opt_state, grads, applied)
        scaler = update_scale(state.scaler, finite)
        next_state = TrainState(
            params,
            opt_state,
            scaler,
            buffers=select(applied, window.buffers, state.buffers, "buffers"),
            window=None,
            applied=state.applied + applied,
            skipped=state.skipped + ~applied,
            skipped_in_a_row=torch.where(applied, 0, state.skipped_in_a_row + 1),
        )
        loss = window.loss / torch.where(weight == 0, 1, weight)
        return next_state, Metrics(loss, norm, finite, state.scaler.scale, weight)

    return Step(_on_state(accumulate_window), _on_state(update))


def _on_state(function: Callable[..., R]) -> Callable[..., R]:
    """Refuses anything but a `TrainState` before the function runs."""

    @functools.wraps(function)
    def wrapped(state: TrainState, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"state: found {type(state).__name__}, expected the TrainState that init_state or the last step gave. "
                "A step returns the pair (state, metrics)."
            )
        return function(state, *args, **kwargs)

    return wrapped
