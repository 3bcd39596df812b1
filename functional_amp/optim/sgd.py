"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from functional_amp.checks import check_bool, check_non_negative, check_unit_interval
from functional_amp.dtypes import like
from functional_amp.engine.operators import materialized
from functional_amp.optim.base import Optimizer
from functional_amp.optim.kernels import Update, run_sgd
from functional_amp.optim.leafwise import LeafRule, LeafUpdate, check_state_dtype, leafwise
from functional_amp.optim.schedules import LearningRate, check_learning_rate, kernel_rate, learning_rate
from functional_amp.tree import PyTree


class SGDState(NamedTuple):
    """Applied updates (int32, 0-dim) and the momentum buffers (() without momentum)."""

    step: Tensor
    momentum_buffer: PyTree = ()


def sgd(
    lr: LearningRate,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    *,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Stochastic gradient descent, as `torch.optim.SGD` does it.

        g = g + weight_decay * p
        b = g at the first update, then momentum * b + (1 - dampening) * g
        p = p - lr * (g + momentum * b if nesterov else b)

    Args:
        lr: a number, a 0-dim tensor, or a function of the number of applied updates.
        momentum: >= 0; from 1 on the buffer grows without end, as in torch.
        dampening: in [0, 1].
        weight_decay: L2 penalty, >= 0.
        nesterov: looks ahead; needs momentum and no dampening.
        state_dtype: what the momentum buffers are kept in, rounded once an update; None for the dtype of the
            arithmetic. What it costs: docs/optimizers.md.

    Returns:
        An `Optimizer`. With an lr that is a number its `step` equals
        `torch.optim.SGD(foreach=False, fused=False)` bit for bit in float32 and float64 on a CPU.

    Raises:
        TypeError, ValueError: for a hyperparameter outside its domain.

    >>> import torch
    >>> optimizer = sgd(lr=0.1)
    >>> params, state = optimizer.step(torch.tensor([1.0]), optimizer.init(torch.tensor([1.0])), torch.tensor([1.0]))
    >>> params
    tensor([0.9000])
    """
    check_learning_rate(lr)
    momentum = check_non_negative(momentum, "momentum")
    dampening = check_unit_interval(dampening, "dampening", closed=True)
    weight_decay = check_non_negative(weight_decay, "weight_decay")
    check_bool(nesterov, "nesterov")
    check_state_dtype(state_dtype)
    if nesterov and (momentum == 0 or dampening != 0):
        raise ValueError("nesterov: found True, expected momentum above 0 and dampening 0 with it.")

    def rule(count: Tensor) -> LeafRule:
        rate = materialized(learning_rate(lr, count))

        def leaf_rule(
            param: Tensor, grad: Tensor, buffer: Tensor | None = None
        ) -> tuple[LeafUpdate, tuple[Tensor, ...]]:
            if weight_decay:
                grad = torch.add(grad, param, alpha=weight_decay)
            if buffer is not None:
                decayed = torch.add(buffer * momentum, grad, alpha=1 - dampening)
                # torch starts the buffer at the first gradient, which dampening does not touch.
                buffer = torch.where(like(count, grad) == 0, grad, decayed) if dampening else decayed
                grad = torch.add(grad, buffer, alpha=momentum) if nesterov else buffer
            alpha = -like(rate, param).to(param.real.dtype) if isinstance(rate, Tensor) else -rate
            return LeafUpdate(0.0, alpha, grad), () if buffer is None else (buffer,)

        return leaf_rule

    def kernel(count: Tensor) -> Update:
        rate = kernel_rate(lr, count)
        return lambda params, grads, slots, divisor, skip: run_sgd(
            params, grads, slots[0] if momentum else [], rate, momentum, weight_decay, nesterov, divisor, skip
        )

    # With dampening the first step differs, and the host may not ask whether this is the first: no kernel.
    return leafwise(SGDState, [state_dtype] if momentum else [], rule, None if dampening else kernel)
