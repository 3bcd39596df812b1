"""The imperative mixed-precision loop, as it is written with torch alone: the oracle of the step.

    for micro_batch in window: scaler.scale(loss).backward()
    scaler.unscale_; clip_grad_norm_; scaler.step; scaler.update; zero_grad

Nothing of functional_amp is used here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

Tensors = dict[str, Tensor]


class Record(NamedTuple):
    """The run after one window."""

    params: Tensors
    buffers: Tensors
    loss: float
    norm: Tensor
    used_scale: float
    scale: float
    growth_tracker: int
    skipped: bool


def train(
    model: nn.Module,
    loss_of: Callable[[nn.Module, Any], Tensor],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    windows: Iterable[Sequence[Any]],
    scaler: torch.amp.GradScaler,
    *,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    divide: Literal["loss", "grads"] = "loss",
    autocast: torch.dtype | None = None,
    restore_buffers: bool = False,
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    seeded: bool = False,
) -> list[Record]:
    """Trains the model in place and records it after every window.

    Args:
        loss_of: the mean loss of a micro-batch, which has a `weight`.
        divide: the two usual ways to take the mean over a window of total weight W: each loss times
            w / W before its backward, or each loss times w and the gradients divided by W at the end.
        autocast: the dtype of the `torch.autocast` around each forward.
        restore_buffers: put the buffers back where the update is skipped. torch's loop does not.
        make_schedule: a scheduler, stepped after each update that was not skipped.
        seeded: seed the global generator with the number of the window at its start.
    """
    # In the order of their names, which is the order in which the norms of the leaves are added up.
    params = [parameter for _, parameter in sorted(model.named_parameters())]
    optimizer = make_optimizer(params)
    schedule = make_schedule(optimizer) if make_schedule else None
    records = []
    for index, window in enumerate(windows):
        if seeded:
            torch.manual_seed(index)
        buffers = _copies(model.named_buffers())
        total = sum(micro_batch.weight for micro_batch in window)
        loss_sum = 0.0
        for micro_batch in window:
            with nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast):
                loss = loss_of(model, micro_batch)
            factor = micro_batch.weight / total if divide == "loss" else micro_batch.weight
            scaler.scale(loss * factor).backward()
            loss_sum += loss.item() * micro_batch.weight
        scaler.unscale_(optimizer)
        grads = [parameter.grad for parameter in params if parameter.grad is not None]
        if divide == "grads":
            for grad in grads:
                grad.div_(total)
        if max_norm is None:
            norm = nn.utils.get_total_norm(grads, norm_type, foreach=False)
        else:
            norm = nn.utils.clip_grad_norm_(params, max_norm, norm_type, foreach=False)
        found_inf = scaler._found_inf_per_device(optimizer) if scaler.is_enabled() else {}
        skipped = any(found.item() for found in found_inf.values())
        used_scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        if skipped and restore_buffers:
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        if schedule is not None and not skipped:
            schedule.step()
        records.append(
            Record(
                _copies(model.named_parameters()),
                _copies(model.named_buffers()),
                loss_sum / total,
                norm.detach(),
                used_scale,
                scaler.get_scale(),
                scaler._get_growth_tracker(),
                skipped,
            )
        )
    return records


def _copies(named: Iterable[tuple[str, Tensor]]) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in named}
