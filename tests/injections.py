"""Faults put into a random module of any model: the truth is known by construction.

INJECTIONS=230 python -m pytest -m slow tests/test_explain_*.py puts in more of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from functional_amp.tree import flatten, same_leaves
from tests.explained import Case, bad_leaves, check_scale, explained, step_is_finite

TRIALS = int(os.environ.get("INJECTIONS", "80"))

KINDS = {
    "forward inf": ("forward", ("reciprocal",)),
    "forward overflow": ("forward", ("exp",)),
    "forward nan": ("forward", ("log",)),
    "backward nan": ("backward", ("reciprocal",)),
    "backward overflow": ("backward", ("_to_copy",)),
}


class Spoiled(torch.autograd.Function):
    """The identity, whose backward is not finite: at any scale, or at a large one."""

    @staticmethod
    def forward(x: Tensor, injection: Injection) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.injection = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.injection.kind == "backward nan":
            return torch.zeros_like(grad).reciprocal() * 0, None
        if ctx.injection.factor is None:  # at the first call, whose largest element becomes 2**20
            largest = grad.abs().max().item()
            ctx.injection.factor = 2.0**20 / largest if largest else None
        return (grad.double() * (ctx.injection.factor or 1.0)).half().to(grad.dtype), None


def spoil(tensor: Tensor, injection: Injection) -> Any:
    """A tensor with the fault of an injection."""
    kind = injection.kind
    if kind == "forward inf":
        return tensor + torch.reciprocal(tensor * 0)
    if kind == "forward overflow":
        largest = 89.6 if tensor.dtype in (torch.float32, torch.bfloat16) else 11.2
        return torch.exp(tensor - tensor.max() + largest)
    if kind == "forward nan":
        return torch.log(tensor - tensor.max() - 1)
    return Spoiled.apply(tensor, injection)


@dataclass
class Injection:
    """Where and what is injected.

    Attributes:
        active: while the micro-batch that is meant runs.
        factor: by which the backward multiplies, for its result to be too large for float16.
    """

    module: str
    kind: str
    active: bool = False
    factor: float | None = None


def as_function(module: nn.Module) -> tuple[Callable[..., tuple[Any, dict[str, Tensor]]], dict[str, Tensor], Any]:
    """A module as `apply(params, buffers, *args) -> (output, buffers)`, by torch's own functional call.

    It takes a module that is spoiled from outside afterwards, as `from_module` would not.
    """
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in module.named_buffers()}

    def apply(params: Any, buffers: Any, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Tensor]]:
        after = {name: b.clone() for name, b in buffers.items()}
        return torch.func.functional_call(module, {**params, **after}, args, kwargs), after

    return apply, params, buffers


def inject(template: nn.Module, draw: random.Random, leaves: list[str]) -> Injection:
    """Spoils the output of one of these modules, drawn at random, while the injection is active."""
    injection = Injection(draw.choice(leaves), draw.choice(list(KINDS)))
    module = template.get_submodule(injection.module)
    forward = module.forward

    def spoiled(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        if not injection.active or not isinstance(first, Tensor):
            return out
        first = spoil(first, injection)
        return (first, *out[1:]) if isinstance(out, tuple) else first

    module.forward = spoiled  # pyright: ignore[reportAttributeAccessIssue]
    return injection


def check_injection(make: Callable[[random.Random], tuple[Case, nn.Module, list[str]]], trial: int) -> bool:
    """Injects one fault and checks what explain says of it.

    Args:
        make: gives a clean case, the module whose forward it runs, and the names of modules to spoil.

    Returns:
        Whether the fault reached a gradient or the loss.
    """
    draw = random.Random(trial)
    torch.manual_seed(trial)
    clean, template, leaves = make(draw)
    injection = inject(template, draw, leaves)
    spoiled_at = draw.randrange(len(clean.window))

    def loss_fn(params: Any, batch: Any, *buffers: Any) -> Any:
        injection.active = same_leaves(flatten(batch).leaves, flatten(clean.window[spoiled_at]).leaves)
        try:
            return clean.loss_fn(params, batch, *buffers)
        finally:
            injection.active = False

    case = Case(loss_fn, clean.params, clean.window, clean.scale, clean.buffers)
    backend = draw.choice(["autograd", "func"])
    why = explained(case, backend)
    if not why.found:
        assert step_is_finite(case, case.scale, backend)
        return False
    stage, operator = KINDS[injection.kind]
    found = (why.stage, why.module, why.micro_batch)
    assert found == (stage, injection.module, spoiled_at), (trial, injection, why)
    assert why.operator in operator and why.file.endswith("injections.py"), (trial, injection, str(why))
    assert why.module_type == type(template.get_submodule(injection.module)).__name__
    assert why.leaves == bad_leaves(case, spoiled_at, backend)
    assert (why.largest_good_scale is not None) == (injection.kind == "backward overflow")
    check_scale(case, why, backend)
    return True
