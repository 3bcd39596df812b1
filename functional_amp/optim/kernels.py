"""torch's fused kernels for lists of leaves in place, and the same as operators in a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from functional_amp.dtypes import counted, scalar_dtype
from functional_amp.engine.operators import announce_writing, implement, operator
from functional_amp.torch_private import fused_adam, fused_sgd

Update: TypeAlias = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], Tensor | None, Tensor], None]
"""`run(params, grads, slots, divisor, skip)`, in place; `skip` is 1.0 or 0.0."""
Kernel: TypeAlias = Callable[[Tensor], Update]
"""`kernel(count)` gives a run; what can raise, a schedule, is asked here, before anything is written."""

Tensors: TypeAlias = list[Tensor]


def run_sgd(
    params: Tensors,
    grads: Tensors,
    buffers: Tensors,
    lr: float | Tensor,
    momentum: float,
    weight_decay: float,
    nesterov: bool,
    divisor: Tensor | None,
    skip: Tensor,
) -> None:
    """SGD without dampening. Buffers start at zero, so the first one is momentum * 0 + gradient."""
    in_a_graph = operator("sgd_")
    if in_a_graph is not None:
        lr = _as_operand(lr, skip)
        in_a_graph(params, grads, buffers, lr, momentum, weight_decay, nesterov, divisor, skip)
        return
    fused_sgd(
        params,
        grads,
        buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        grad_scale=divisor,
        found_inf=skip,
    )


def run_adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    count: Tensor,
    lr: float | Tensor,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
    decoupled: bool,
    divisor: Tensor | None,
    skip: Tensor,
) -> None:
    """Adam and AdamW; `count` is the number of updates before this one."""
    in_a_graph = operator("adam_")
    if in_a_graph is not None:
        lr, slots = _as_operand(lr, skip), (exp_avgs, exp_avg_sqs)
        in_a_graph(params, grads, *slots, count, lr, *betas, weight_decay, eps, decoupled, divisor, skip)
        return
    fused_adam(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [counted(count).float()] * len(params),
        decoupled=decoupled,
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        grad_scale=divisor,
        found_inf=skip,
    )


def _as_operand(lr: float | Tensor, skip: Tensor) -> Tensor:
    # A CPU kernel asks for the number, in double; the others read a float32 at the address.
    dtype = scalar_dtype(skip.device) if skip.is_cpu else torch.float32
    return lr.to(dtype) if isinstance(lr, Tensor) else torch.full((), lr, dtype=dtype, device=skip.device)


def _sgd_operator(*args: Any) -> None:
    announce_writing()
    run_sgd(*args)


def _adam_operator(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    count: Tensor,
    lr: Tensor,
    beta1: float,
    beta2: float,
    *rest: Any,
) -> None:
    announce_writing()
    run_adam(params, grads, exp_avgs, exp_avg_sqs, count, lr, (beta1, beta2), *rest)


implement("sgd_", _sgd_operator, "CompositeExplicitAutograd", lambda *args: None)
implement("adam_", _adam_operator, "CompositeExplicitAutograd", lambda *args: None)
