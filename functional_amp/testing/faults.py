"""Fault injection: gradients or losses that are not finite, or an exception, where and when you say."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.dtypes import is_differentiable
from functional_amp.engine.frozen import frozen_by, show
from functional_amp.registry import with_fields
from functional_amp.tree import flatten, paths
from functional_amp.values.grads import Loss, as_loss, check_loss_fn


class Faulty:
    """A loss function with a fault in it; what `faulty` returns.

    Attributes:
        calls: the index of the next micro-batch, where calls are counted: a `micro_batch` without
            `index`, in eager mode. A Python int, which you may set: `loss_fn.calls = 0`.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        leaf: str | None,
        micro_batch: int | None,
        rank: int | None,
        value: float | BaseException,
        index: Callable[..., Any] | None,
    ):
        self.loss_fn, self.leaf, self.micro_batch, self.rank = loss_fn, leaf, micro_batch, rank
        self.value, self.index, self.calls = value, index, 0
        show(self, frozen_by(loss_fn))

    def __call__(self, params: Any, *batch: Any) -> Any:
        hit = self._hit(batch)
        if hit is False:
            return self.loss_fn(params, *batch)
        if isinstance(self.value, BaseException):
            self._raise(hit)
            return self.loss_fn(params, *batch)
        loss = as_loss(self.loss_fn(params, *batch))
        if self.leaf is None:
            return _spoiled(loss, hit, self.value)
        return _with_bad_gradient(loss, params, self.leaf, hit, self.value)

    def _hit(self, batch: tuple[Any, ...]) -> bool | Tensor:
        if self.rank is not None and self.rank != _rank():
            return False
        if self.index is not None:
            hit = self.index(*batch) == self.micro_batch
            return hit if isinstance(hit, Tensor) else bool(hit)
        if self.micro_batch is None:
            return True
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "faulty: a compiled graph runs the loss function once, when it is traced, and can not count calls. "
                "Put the index of the micro-batch into the batch and pass index=lambda batch: batch['index']."
            )
        self.calls += 1
        return self.calls - 1 == self.micro_batch

    def _raise(self, hit: bool | Tensor) -> None:
        if torch.compiler.is_compiling():
            raise RuntimeError("faulty: a compiled graph can not raise an exception. Run the step in eager mode.")
        if bool(hit):  # a host read, in eager mode
            raise self.value  # pyright: ignore[reportGeneralTypeIssues]


def faulty(
    loss_fn: Callable[..., Tensor | Loss],
    *,
    leaf: str | None = None,
    micro_batch: int | None = None,
    rank: int | None = None,
    value: float | BaseException = math.nan,
    index: Callable[..., Any] | None = None,
) -> Faulty:
    """Makes a loss function go wrong at a chosen leaf, micro-batch or rank.

    With a `leaf`, the loss is as it was and every element of that leaf's gradient becomes `value`.
    Without one, the loss is multiplied with `value`, and the gradients with it. An exception is
    raised when the loss function is called.

    Works under torch.func, with the autograd backend and in a compiled graph. What it cannot do:

    - Count in a graph. The wrapper counts its own calls in the Python int `calls`, across windows
      and never back; a graph is traced once, so there a `micro_batch` needs `index`. Calls are also
      counted where activation checkpointing or your own code calls the loss function again.
    - Raise in a graph, or under vmap when `index` is a tensor: there is nothing to raise for one member.
    - Leave the sign of a zero alone: with a tensor for an index, a gradient of -0.0 becomes 0.0 on
      the micro-batches without the fault. Everything else of theirs is bit for bit what it was.
    - Show at a weight of 0: such a micro-batch contributes nothing, faulty or not.

    Args:
        loss_fn: `loss_fn(params, *batch)`, returning a scalar or a `Loss`.
        leaf: the path of a float leaf of the parameters, as `blocks.0.weight`.
        micro_batch: which one, from 0; by default every one.
        rank: on which rank of `torch.distributed`; by default on every one. Without a process group
            the rank is 0.
        value: NaN, inf, -inf or an exception.
        index: `index(*batch)`, the number of a micro-batch, from its data: an int or a 0-dim integer
            tensor. By default the calls are counted.

    Raises:
        ValueError: for a value that is finite, an index without a micro_batch, and, when it is
            called, for a path at which no float leaf stands.
        TypeError: for a value that is neither a number nor an exception.

    >>> import functional_amp as fa
    >>> loss_fn = faulty(lambda p, x: (p["w"] * x).sum() + p["b"], leaf="w", micro_batch=1)
    >>> params = {"w": torch.ones(2), "b": torch.zeros(())}
    >>> for _ in range(2):
    ...     grads, loss, _ = fa.scale_backward(loss_fn, fa.NoScale(), params, torch.ones(2))
    ...     print(loss.item(), fa.nonfinite_paths(grads))
    2.0 []
    2.0 ['w']
    """
    check_loss_fn(loss_fn)
    if not isinstance(value, BaseException):
        check_number(value, "value", "NaN, inf, -inf or an exception")
        if math.isfinite(value):
            raise ValueError(f"value: found {value!r}, expected NaN, inf, -inf or an exception.")
    for name, number in (("micro_batch", micro_batch), ("rank", rank)):
        if number is not None:
            check_number(number, name, "an int from 0", integer=True)
    if index is not None and micro_batch is None:
        raise ValueError("index: found one without a micro_batch, expected both. Write micro_batch=2, index=...")
    return Faulty(loss_fn, leaf, micro_batch, rank, value, index)


def _rank() -> int:
    distributed = torch.distributed
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


def _spoiled(loss: Loss, hit: bool | Tensor, value: float) -> Loss:
    """The loss times the value."""
    factor = torch.where(hit, value, 1.0) if isinstance(hit, Tensor) else value
    return with_fields(loss, value=loss.value * factor)


def _with_bad_gradient(loss: Loss, params: Any, leaf: str, hit: bool | Tensor, value: float) -> Loss:
    """The loss plus a zero whose derivative by the leaf is the value."""
    flat, names = flatten(params), paths(params)
    if leaf not in names or not is_differentiable(flat.leaves[names.index(leaf)]):
        raise ValueError(f"leaf: found {leaf!r}, expected the path of a float leaf of the parameters: {names}.")
    one = flat.leaves[names.index(leaf)]
    one = torch.view_as_real(one) if one.is_complex() else one
    zero = one - one.detach()
    # Where there is no hit, the derivative must be finite as well: 0 * inf is NaN.
    zero = torch.where(hit.to(one.device), zero, 1) if isinstance(hit, Tensor) else zero
    # The derivative of the square root at 0 is inf; times 0 it is NaN.
    term = (zero.sqrt() * (0.0 if math.isnan(value) else math.copysign(1.0, value))).sum().to(loss.value.device)
    term = torch.where(hit, term, 0) if isinstance(hit, Tensor) else term
    return with_fields(loss, value=loss.value + term.to(loss.value.dtype))
