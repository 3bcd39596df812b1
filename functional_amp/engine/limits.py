"""What torch.func can't differentiate, and how its messages are told from errors of the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from functional_amp.engine.graphs import Compile
from functional_amp.mode import in_graph

P = ParamSpec("P")
R = TypeVar("R")

LIMITS = {
    "setup_context": "an autograd.Function without setup_context, such as a custom kernel or an old extension",
    "saved tensor hooks": "activation checkpointing, or another user of saved-tensor hooks",
    "expected scalar type": "attention with dropout or a mask under autocast on a CPU",
    "Cannot access data pointer of Tensor that doesn't have storage": "a kernel that asks for addresses, such as "
    "those of packed sequences, or numpy",
    "Cannot access storage of TensorWrapper": "something that asks for the storage, such as pickle or deepcopy",
    "NestedTensorImpl doesn't support": "nested tensors",
    "backward() called inside a functorch transform": "a backward inside the loss",
    "You are attempting to call Tensor.requires_grad_()": "requires_grad_() inside the loss",
    "You are attempting to call Tensor.retain_grad()": "retain_grad() inside the loss",
    "mutating directly with `.data` inside functorch": "an assignment to x.data, such as that of module.to()",
    "would mutate a captured Tensor": "a write in place to what is not a parameter, such as its batch (x = x / 2 "
    "writes to nothing) or its buffers (new tensors come back in the Loss)",
    "appears to not have been used in the graph": "a derivative with respect to something that required grad before "
    "the loss was called, such as its batch",
    "Cannot set version_counter for inference tensor": "inference_mode() inside the loss",
    "does not have a vjp": "an operator without a derivative under torch.func",
}
"""What torch.func can't differentiate: a part of the message it raises, and what that comes from."""


def limit_of(error: BaseException) -> str | None:
    """What a message of torch.func comes from; None for any other error, and while a graph is traced."""
    text = "" if in_graph() else str(error)
    return next((cause for part, cause in LIMITS.items() if part in text), None)


def naming_limits(function: Callable[P, R], compile: Compile) -> Callable[P, R]:
    """A part of a compiled step, which says what to do where the compiler meets a limit of torch.func."""
    if compile is False:
        return function

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            cause = limit_of(error)
            if cause is None:
                raise
            raise RuntimeError(
                f"{error}\n\nThe loss uses {cause}, which does not work in one graph under torch.func. "
                "Use compile={'fullgraph': False}, which lets the loss leave the graph, and the autograd engine "
                "differentiate it: the same values."
            ) from error

    return wrapped
