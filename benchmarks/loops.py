"""The two ways to do a window of a task: the imperative loop, and the step of functional_amp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import functional_amp as fa
from benchmarks.setup import UNGUARDED, Setup
from benchmarks.work import Batch, Task

LEARNING_RATE = 1e-4
MAX_NORM = 1.0


class Loop(NamedTuple):
    """A training loop that keeps its own state.

    Attributes:
        run: does one window: an update from its micro-batches.
        tensors: the parameters and buffers by name, as they are now.
    """

    run: Callable[[Sequence[Batch]], Any]
    tensors: Callable[[], dict[str, Tensor]]


def make_options(variant: str) -> dict[str, Any]:
    """The options of `make_step` that a functional variant stands for."""
    compiled = {"unsafe_skip_guards": True} if variant == UNGUARDED else variant.endswith("-compiled")
    return {"donate": variant.startswith("donated"), "compile": compiled}


def make_loop(variant: str, task: Task, setup: Setup) -> Loop:
    """A variant of the task from its first parameters on; all variants start with equal ones, none shares them."""
    model = task.seeded_model(setup.seed, setup.device)
    if variant.startswith("imperative"):
        return imperative(model, setup, compiled=variant.endswith("-compiled"))
    return functional(model, setup, LEARNING_RATE, flat=variant.endswith("-flat"), **make_options(variant))


def make_loops(task: Task, setup: Setup) -> dict[str, Loop]:
    return {variant: make_loop(variant, task, setup) for variant in setup.variants}


def imperative(model: nn.Module, setup: Setup, *, compiled: bool = False) -> Loop:
    """The imperative loop at its best: fused AdamW, which takes the scaler's flag without a host read."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(setup.device.type)
    forward = torch.compile(model) if compiled else model

    def run(micro_batches: Sequence[Batch]) -> None:
        for x, y in micro_batches:
            with torch.autocast(setup.device.type, setup.dtype):
                loss = F.cross_entropy(forward(x), y) / len(micro_batches)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Loop(run, lambda: {name: tensor.detach() for name, tensor in model.state_dict().items()})


def functional(model: nn.Module, setup: Setup, lr: Any, *, flat: bool = False, **options: Any) -> Loop:
    """The same with `make_step`; `options` are those of it that the variants differ in."""
    step, state, unravel = make_functional(model, setup, lr, flat=flat, **options)

    def run(micro_batches: Sequence[Batch]) -> None:
        nonlocal state
        state, _ = step(state, micro_batches)

    return Loop(run, lambda: {**unravel(state.params), **(state.buffers or {})})


def make_functional(
    model: nn.Module, setup: Setup, lr: Any, *, flat: bool = False, **options: Any
) -> tuple[fa.Step, fa.TrainState, Callable[[Any], dict[str, Tensor]]]:
    """The step, its first state, and what gives the parameters by name from those of a state."""
    apply, params, buffers = fa.from_module(model)
    given, unravel = fa.ravel(params) if flat else (params, lambda params: params)

    def loss_fn(params: Any, batch: Batch, buffers: Any = None) -> Tensor | fa.Loss:
        (x, y), params = batch, unravel(params)
        if buffers is None:
            return F.cross_entropy(apply(params, x), y)
        output, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(F.cross_entropy(output, y), buffers=buffers)

    optimizer = fa.adamw(lr)
    step = fa.make_step(fa.autocast(loss_fn, setup.dtype), optimizer, max_norm=MAX_NORM, **options)
    return step, fa.init_state(given, optimizer, buffers=buffers or None), unravel
