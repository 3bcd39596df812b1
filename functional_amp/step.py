"""The composed step: Step, make_step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import check_bool
from functional_amp.dtypes import counted, like
from functional_amp.engine.graphs import Compile, check_compile
from functional_amp.engine.limits import naming_limits
from functional_amp.engine.random import seeded
from functional_amp.engine.runs import Runs
from functional_amp.engine.scan import scan_window
from functional_amp.engine.storage import FRESH, Storage
from functional_amp.optim.base import Optimizer, check_optimizer
from functional_amp.optim.transaction import maybe_step
from functional_amp.precision import check_dtype, naming_frozen, working_copies
from functional_amp.ranks.agree import naming_ranks, over_ranks
from functional_amp.ranks.mesh import Inner, Ranks, as_ranks, inner_groups, loss_groups
from functional_amp.registry import with_fields
from functional_amp.selection import select
from functional_amp.stages.accumulate import alike, is_window
from functional_amp.stages.aux import aux_mean, aux_sum
from functional_amp.stages.clip import check_clip, clip
from functional_amp.stages.differentiate import (
    Backend,
    backend_in_graphs,
    check_backend,
    check_loop_in_graph,
)
from functional_amp.stages.streaming import accumulate_backward, windowed
from functional_amp.stages.unscale import all_finite
from functional_amp.tree import PyTree
from functional_amp.values.grads import Loss, check_loss_fn
from functional_amp.values.scaler import update_scale
from functional_amp.values.state import Metrics, TrainState, Window


@dataclass(frozen=True, eq=False)
class Step:
    """The composed step, as a value: its options, and a body made of the public stages.

        for micro_batch in window:
            grads, loss, aux = scale_backward(loss_fn, scaler, params, micro_batch)
            total = accumulate(total, grads)
        grads, norm = clip(total, max_norm)
        finite = all_finite(grads, norm=norm)
        params, opt_state = maybe_step(optimizer, params, opt_state, grads, finite)
        scaler = update_scale(scaler, finite)

    `make_step` makes one, and `dataclasses.replace(step, max_norm=1.0)` another.

    Attributes (beside the arguments of `make_step`):
        accumulate: `(state, micro_batch) -> state`: adds a micro-batch to the open window.
        update: `state -> (state, metrics)`: closes the window.
    """

    loss_fn: Callable[..., Tensor | Loss]
    optimizer: Optimizer | Any
    max_norm: float | None = None
    norm_type: float = 2.0
    clip_eps: float = 0.0
    backend: Backend = "auto"
    compute_dtype: torch.dtype | None = None
    donate: bool = False
    compile: Compile = False
    mesh: Any = None
    accumulate: Callable[[TrainState, Any], TrainState] = field(init=False, repr=False)
    update: Callable[[TrainState], tuple[TrainState, Metrics]] = field(init=False, repr=False)
    _loss: Callable[..., Loss] = field(init=False, repr=False)
    _backend: Backend = field(init=False, repr=False)
    _window: Callable[..., tuple[TrainState, Metrics]] = field(init=False, repr=False)
    _scan: Callable[..., tuple[TrainState, Metrics]] = field(init=False, repr=False)
    _ranks: Ranks | None = field(init=False, repr=False)
    _inner: Inner = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_loss_fn(self.loss_fn)
        check_optimizer(self.optimizer)
        check_clip(self.max_norm, self.norm_type, self.clip_eps)
        check_backend(self.backend)
        if self.compute_dtype is not None:
            check_dtype(self.compute_dtype, "compute_dtype")
        check_bool(self.donate, "donate")
        check_compile(self.compile)
        ranks = as_ranks(self.mesh)
        bodies = self._accumulated, self._updated, self._scanned
        runs = Runs(*bodies, donate=self.donate, compile=self.compile, may_be_empty=ranks is not None)

        def named(part: Callable[..., Any]) -> Callable[..., Any]:
            part = part if self.compute_dtype is None else naming_frozen(part)
            return naming_ranks(naming_limits(part, self.compile), ranks)

        parts = {
            "accumulate": named(runs.accumulate),
            "update": naming_ranks(runs.update, ranks),
            "_window": named(runs.window),
            "_scan": named(runs.scan),
            "_loss": windowed(self.loss_fn),
            "_backend": backend_in_graphs(self.backend, self.compile, sharded=bool(loss_groups(self.loss_fn))),
            "_ranks": ranks,
            "_inner": frozenset() if ranks is None else inner_groups(self.loss_fn, ranks),
        }
        for name, part in parts.items():
            object.__setattr__(self, name, part)

    def __call__(
        self, state: TrainState, micro_batches: Iterable[Any], *, seed: int | None = None
    ) -> tuple[TrainState, Metrics]:
        """One update from a window of micro-batches.

        Args:
            state: the state so far; it is not changed and may be used again, unless the step donates.
            micro_batches: one or more micro-batches, each any pytree.
            seed: makes the window's random numbers (dropout) depend on it alone, and leaves torch's
                global generators as they were. Outside a compiled step only: there, write
                `with seeded(seed): compiled(state, micro_batches)`.

        Returns:
            The next state, and the metrics of the window.

        Raises:
            ValueError: for a window without micro-batches.
            TypeError: for a tensor, a dict or a NamedTuple in place of a list of micro-batches, or for
                micro-batches of different structure or dtypes.
        """
        if not is_window(micro_batches):
            raise TypeError(
                f"micro_batches: found {type(micro_batches).__name__}, expected a list of micro-batches. "
                "For a window of one write step(state, [micro_batch])."
            )
        if seed is not None:
            with seeded(seed):
                return self(state, micro_batches)
        return self._window(state, alike(micro_batches))

    def scan(self, state: TrainState, micro_batches: PyTree) -> tuple[TrainState, Metrics]:
        """One update from micro-batches that are stacked along a first dimension.

        Compiled it is one graph with one micro-step in it, whatever the length of the window.

        Raises:
            ValueError: for leaves that are not tensors of one first size, naming them; for an empty window; for a
                compiled step whose loss the autograd engine differentiates.
        """
        check_loop_in_graph(self._loss, self._backend, self.compile)
        return self._scan(state, micro_batches)

    def _accumulated(self, state: TrainState, micro_batch: Any, storage: Storage = FRESH) -> TrainState:
        """The body of `accumulate`: scale_backward, then accumulate."""
        window = state.window
        params = working_copies(state.params, None if window is None else window.params, self.compute_dtype)
        if window is None:
            total, loss_sum, buffers, aux = None, None, state.buffers, None
        else:
            total, loss_sum, buffers, aux = window.grads, window.loss, window.buffers, window.aux
        grads, weight, loss, out = accumulate_backward(
            total,
            self._loss,
            state.scaler,
            params,
            micro_batch,
            buffers,
            backend=self._backend,
            storage=storage,
        )
        if window is not None and out.reduction != window.reduction:
            raise ValueError(
                f"loss_fn: found reduction {out.reduction!r} in a window of {window.reduction!r}, expected one for all "
                "micro-batches of a window. One that counts for nothing is Loss(value, weight=0, reduction=...)."
            )
        if out.may_vanish:  # a weight of 0 leaves nothing behind, NaN or not
            loss = (loss * like(weight, loss)).masked_fill(like(weight == 0, loss), 0)
            out = out._replace(buffers=select(weight > 0, out.buffers, buffers, "buffers"))
        return with_fields(
            state,
            window=Window(
                grads,
                loss.clone() if loss_sum is None else loss_sum + loss,  # the loss may be an element of a parameter
                out.buffers,
                None if self.compute_dtype is None else params,
                aux_sum(aux, out.aux, weight, first=window is None),
                out.reduction,
            ),
        )

    def _updated(self, state: TrainState, storage: Storage = FRESH) -> tuple[TrainState, Metrics]:
        """The body of `update`: clip, all_finite, maybe_step, update_scale."""
        stop: Any = ()
        if self._ranks is not None:
            state, stop = over_ranks(self._ranks, self._inner, state, storage, self.compute_dtype)
        window = state.window
        if window is None:
            raise ValueError("update: found no open window, expected step.accumulate(state, micro_batch) before it.")
        grads, norm = clip(window.grads, self.max_norm, norm_type=self.norm_type, eps=self.clip_eps)
        finite = storage.begin(all_finite(grads, norm=norm))
        applied = finite & (grads.weight > 0)
        # Before the update: what raises here has not written to a donated state yet.
        buffers = select(applied, window.buffers, state.buffers, "buffers")
        scaler = update_scale(state.scaler, finite)
        params, opt_state = maybe_step(self.optimizer, state.params, state.opt_state, grads, finite, storage=storage)
        weight = grads.weight.masked_fill(grads.weight == 0, 1)
        metrics = Metrics(
            loss=window.loss / weight,
            grad_norm=norm,
            finite=finite,
            applied=applied,
            scale=state.scaler.scale,
            weight=grads.weight,
            aux=aux_mean(window.aux, weight),
            stop=stop,
        )
        next_state = TrainState(
            params,
            opt_state,
            scaler,
            storage.put(state.buffers, buffers),
            window=None,
            applied=counted(state.applied, applied),
            skipped=counted(state.skipped, ~applied),
            skipped_in_a_row=counted(state.skipped_in_a_row).masked_fill(applied, 0),
        )
        return next_state, metrics

    def _scanned(self, state: TrainState, micro_batches: Any, storage: Storage = FRESH) -> tuple[TrainState, Metrics]:
        def accumulated(state: TrainState, micro_batch: Any) -> TrainState:
            return self._accumulated(state, micro_batch, storage if storage.streams else FRESH)

        return self._updated(scan_window(accumulated, state, micro_batches), storage)


def make_step(
    loss_fn: Callable[..., Tensor | Loss],
    optimizer: Optimizer | Any,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    clip_eps: float = 0.0,
    backend: Backend = "auto",
    compute_dtype: torch.dtype | None = None,
    donate: bool = False,
    compile: Compile = False,
    mesh: Any = None,
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
            values at the peak memory of an imperative loop. Reading, copying or saving a state that was
            given away raises RuntimeError. An exception gives it back, unless it falls in the middle of an
            update's writes. In eager mode the autograd engine adds each gradient as it is made, with every
            backend; they differ where autocast casts one weight several times.
        compile: True compiles the step: a window of one is one graph, one of two is two, a longer one
            three. A dict is passed on to `torch.compile` (`{"mode": "max-autotune"}`). A window of
            micro-batches stays a Python loop, never unrolled. `{"unsafe_skip_guards": True}` looks at no
            guard while state and micro-batch have the structure, shapes and dtypes of the last call, in
            the same modes of torch: what it misses is a change of Python values that the loss reads.
        mesh: the `DeviceMesh` of the ranks that train together, or `Ranks(mesh, ...)` of functional_amp.ranks.
            `update` adds the windows of all ranks before the norm is measured; `accumulate` sends nothing. A
            rank may have a window of any length, an empty one too. See docs/distributed.md.

    Returns:
        A `Step`. A window without weight is not applied; the scale then counts it as a clean one. A
        window whose norm is outside float32 counts as overflow.

    Raises:
        TypeError, ValueError: for a loss function or an optimizer that is not one, bad hyperparameters, at once.

    >>> import torch
    >>> from functional_amp import StaticScale, init_state, sgd
    >>> optimizer = sgd(lr=0.5)
    >>> step = make_step(lambda p, x: ((p - x) ** 2).mean(), optimizer)
    >>> state = init_state(torch.zeros(1), optimizer, StaticScale(8.0))
    >>> state, metrics = step(state, [torch.tensor([1.0]), torch.tensor([3.0])])
    >>> state.params, metrics.loss
    (tensor([2.]), tensor(5.))
    """
    return Step(loss_fn, optimizer, max_norm, norm_type, clip_eps, backend, compute_dtype, donate, compile, mesh)
