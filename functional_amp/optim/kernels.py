"""torch's fused kernels for lists of leaves in place, and as operators that a compiled graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

Kernel: TypeAlias = Callable[[list[Tensor], list[Tensor], list[list[Tensor]], Tensor, Tensor | None, Tensor], None]
"""`kernel(params, grads, slots, count, divisor, skip)`, in place; `skip` is 1.0 or 0.0."""

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
    """SGD without dampening: momentum * 0 + gradient is the first buffer."""
    if torch.compiler.is_compiling():
        lr = _tensor(lr, skip)
        torch.ops.functional_amp.sgd_(params, grads, buffers, lr, momentum, weight_decay, nesterov, divisor, skip)
        return
    torch._fused_sgd_(
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
    if torch.compiler.is_compiling():
        lr, slots = _tensor(lr, skip), (exp_avgs, exp_avg_sqs)
        torch.ops.functional_amp.adam_(
            params, grads, *slots, count, lr, *betas, weight_decay, eps, decoupled, divisor, skip
        )
        return
    fused: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    fused(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        [(count + 1).float()] * len(params),
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


def _tensor(lr: float | Tensor, like: Tensor) -> Tensor:
    # A CPU kernel asks for the number; the others read a float32 at the address.
    dtype = torch.float64 if like.is_cpu else torch.float32
    return lr.to(dtype) if isinstance(lr, Tensor) else torch.full((), lr, dtype=dtype, device=like.device)


def _adam(
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
    run_adam(params, grads, exp_avgs, exp_avg_sqs, count, lr, (beta1, beta2), *rest)


_LIBRARY = torch.library.Library("functional_amp", "FRAGMENT")
_LIBRARY.define(
    "sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] buffers, Tensor lr, float momentum, "
    "float weight_decay, bool nesterov, Tensor? divisor, Tensor skip) -> ()"
)
_LIBRARY.define(
    "adam_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, Tensor count, "
    "Tensor lr, float beta1, float beta2, float weight_decay, float eps, bool decoupled, Tensor? divisor, "
    "Tensor skip) -> ()"
)
for _name, _kernel in (("sgd_", run_sgd), ("adam_", _adam)):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, lambda *args: None, "Meta")
