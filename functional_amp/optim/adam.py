"""Adam, with L2 penalty and with decoupled weight decay."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from functional_amp.checks import check_non_negative, check_unit_interval
from functional_amp.dtypes import counted, like, scalar_dtype
from functional_amp.engine.operators import materialized
from functional_amp.mode import sqrt
from functional_amp.optim.base import Optimizer
from functional_amp.optim.kernels import Update, run_adam
from functional_amp.optim.leafwise import LeafRule, LeafUpdate, check_state_dtype, leafwise
from functional_amp.optim.schedules import LearningRate, check_learning_rate, kernel_rate, learning_rate
from functional_amp.tree import PyTree

StateDtype: TypeAlias = torch.dtype | tuple[torch.dtype | None, torch.dtype | None] | None


class AdamState(NamedTuple):
    """Applied updates (int32, 0-dim) and the averages of the gradients and of their squares."""

    step: Tensor
    exp_avg: PyTree
    exp_avg_sq: PyTree


def adam(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    state_dtype: StateDtype = None,
) -> Optimizer:
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980), as `torch.optim.Adam` does it.

        g = g + weight_decay * p
        m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g**2
        p = p - lr / (1 - beta1**t) * m / (sqrt(v / (1 - beta2**t)) + eps)

    t counts the applied updates of the whole tree, this one included.

    Args:
        lr: a number, a 0-dim tensor, or a function of the number of applied updates.
        betas: each in [0, 1).
        eps: >= 0.
        weight_decay: L2 penalty, >= 0.
        state_dtype: what the averages are kept in, rounded once an update; a pair for the first and the second one;
            None for the dtype of the arithmetic. What it costs: docs/optimizers.md.

    Returns:
        An `Optimizer`. With an lr that is a number its `step` equals
        `torch.optim.Adam(foreach=False, fused=False)` bit for bit in float32 and float64 on a CPU.

    Raises:
        TypeError, ValueError: for a hyperparameter outside its domain.

    >>> import torch
    >>> optimizer = adam(lr=0.1)
    >>> params, state = optimizer.step(torch.tensor([1.0]), optimizer.init(torch.tensor([1.0])), torch.tensor([1.0]))
    >>> params
    tensor([0.9000])
    """
    return _adam(lr, betas, eps, weight_decay, state_dtype, decoupled=False)


def adamw(
    lr: LearningRate = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    state_dtype: StateDtype = None,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), as `torch.optim.AdamW` does it.

        p = p * (1 - lr * weight_decay), then Adam's update

    Args, Returns and Raises are those of `adam`; the weight decay does not enter the gradient.

    >>> import torch
    >>> optimizer = adamw(lr=0.1, weight_decay=0.5)
    >>> params, state = optimizer.step(torch.tensor([1.0]), optimizer.init(torch.tensor([1.0])), torch.tensor([1.0]))
    >>> params
    tensor([0.8500])
    """
    return _adam(lr, betas, eps, weight_decay, state_dtype, decoupled=True)


def _adam(
    lr: LearningRate,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    state_dtype: StateDtype,
    *,
    decoupled: bool,
) -> Optimizer:
    check_learning_rate(lr)
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas: found {betas!r}, expected two numbers in [0, 1).")
    beta1, beta2 = check_unit_interval(betas[0], "betas[0]"), check_unit_interval(betas[1], "betas[1]")
    eps = check_non_negative(eps, "eps")
    weight_decay = check_non_negative(weight_decay, "weight_decay")
    state_dtypes = state_dtype if isinstance(state_dtype, (tuple, list)) else (state_dtype, state_dtype)
    if len(state_dtypes) != 2:
        raise TypeError(f"state_dtype: found {state_dtype!r}, expected a dtype, or one for each of the two averages.")
    for each in state_dtypes:
        check_state_dtype(each)

    def rule(count: Tensor) -> LeafRule:
        # In double, as torch's Python floats are: 1 - 0.999**t in float32 keeps 10 of 24 bits at t = 1.
        t = counted(count).to(scalar_dtype(count.device))
        rate = learning_rate(lr, count)
        rate = like(rate, t).to(t.dtype) if isinstance(rate, Tensor) else rate
        # As Python rounds them: number / tensor is a reciprocal times the number, and a root is no power of 0.5.
        step_size = materialized((rate if isinstance(rate, Tensor) else torch.full_like(t, rate)) / (1 - beta1**t))
        correction = materialized(torch.pow(1 - beta2**t, torch.full_like(t, 0.5)))
        decay = materialized(rate * weight_decay if decoupled else 0.0)

        def leaf_rule(param: Tensor, grad: Tensor, m: Tensor, v: Tensor) -> tuple[LeafUpdate, tuple[Tensor, Tensor]]:
            def scalar(value: float | Tensor) -> float | Tensor:
                return like(value, param).to(param.real.dtype) if isinstance(value, Tensor) else value

            if weight_decay and not decoupled:
                grad = torch.add(grad, param, alpha=weight_decay)
            if param.is_complex():
                grad, m, v = (torch.view_as_real(z.resolve_conj()) for z in (grad, m, v))
            m = torch.lerp(m, grad, 1 - beta1)
            v = torch.addcmul(v * beta2, grad, grad, value=1 - beta2)
            direction = scalar(-step_size) * m / (sqrt(v) / scalar(correction) + eps)
            if param.is_complex():
                direction, m, v = torch.view_as_complex(direction), torch.view_as_complex(m), torch.view_as_complex(v)
            return LeafUpdate(scalar(decay), 1.0, direction), (m, v)

        return leaf_rule

    def kernel(count: Tensor) -> Update:
        rate = kernel_rate(lr, count)
        return lambda params, grads, slots, divisor, skip: run_adam(
            params, grads, slots[0], slots[1], count, rate, (beta1, beta2), weight_decay, eps, decoupled, divisor, skip
        )

    return leafwise(AdamState, state_dtypes, rule, kernel)
