"""The operators that a compiled graph can hold: one library, one place.

- `norm`: the 2-norm of a list of leaves, read once
- `materialize`: a scalar that is computed once, not at each element
- `announce`: says that a graph begins to write; what is written depends on what it gives back
- `read_first_`: has what reads some leaves computed before the next operator writes to them
- `sgd_`, `adam_`: torch's fused kernels for a list of leaves, in place
- `imperative_`: an optimizer of torch.optim, in place
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from functional_amp.mode import in_graph, mode

T = TypeVar("T")

_LIBRARY = torch.library.Library("functional_amp", "FRAGMENT")
_LIBRARY.define("norm(Tensor[] leaves) -> Tensor")
_LIBRARY.define("materialize(Tensor scalar) -> Tensor")
_LIBRARY.define("announce(Tensor flag) -> Tensor")
_LIBRARY.define("read_first_(Tensor(a!)[] leaves) -> ()")
_LIBRARY.define(
    "sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] buffers, Tensor lr, float momentum, "
    "float weight_decay, bool nesterov, Tensor? divisor, Tensor skip) -> ()"
)
_LIBRARY.define(
    "adam_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, Tensor count, "
    "Tensor lr, float beta1, float beta2, float weight_decay, float eps, bool decoupled, Tensor? divisor, "
    "Tensor skip) -> ()"
)
_LIBRARY.define(
    "imperative_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] kept, bool[] missing, Tensor count, "
    "Tensor? divisor, Tensor? applied, str[] paths, str[] names, int number) -> ()"
)
_LIBRARY.impl("materialize", torch.clone, "CompositeExplicitAutograd")
_LIBRARY.impl("materialize", torch.empty_like, "Meta")


before_writing: list[Callable[[], None]] = []
"""Called by the operators that write, before they do: what a graph has begun to write to, nobody else can see."""


def announce_writing() -> None:
    """Tells those who keep books that something is about to be written to."""
    for note in before_writing:
        note()


def _announce(flag: Tensor) -> Tensor:
    announce_writing()
    return flag.clone()


_LIBRARY.impl("announce", _announce, "CompositeExplicitAutograd")
_LIBRARY.impl("announce", torch.empty_like, "Meta")


def announced(flag: Tensor) -> Tensor:
    """The same flag in a graph, behind an operator that says that the graph begins to write.

    Whatever is written must be selected by what this returns: so no write is moved before it.
    """
    return torch.ops.functional_amp.announce(flag)


def read_first(leaves: Sequence[Tensor]) -> None:
    """In a graph, has all that reads these leaves computed before an operator writes to them in place.

    Inductor computes lazily. It looks for the readers of what an operator writes to when that operator stands in
    its list already: what they read then is the new value. In front of this one, which writes nothing, they come in
    between.
    """
    torch.ops.functional_amp.read_first_(list(leaves))


def implement(name: str, kernel: Callable[..., Any], key: str, meta: Callable[..., Any] | None = None) -> None:
    """Gives an operator its kernel for a dispatch key, and what it does to tensors without numbers."""
    _LIBRARY.impl(name, kernel, key)
    if meta is not None:
        _LIBRARY.impl(name, meta, "Meta")


implement("read_first_", lambda leaves: None, "CompositeExplicitAutograd", lambda leaves: None)


def materialized(scalar: T) -> T:
    """The same 0-dim tensor, behind an operator that the compiler can not look into.

    Inductor repeats the arithmetic of a scalar in the loop over each tensor that it is used with,
    and a C++ compiler does not move a `pow` out of a loop that writes.
    """
    if not isinstance(scalar, Tensor) or mode() != "graph":
        return scalar
    return cast(T, torch.ops.functional_amp.materialize(scalar))


def can_write_in_place() -> bool:
    """Whether a kernel may write to a tensor now: under a transform it stands for several, or has a derivative."""
    return mode() != "transform"


def operator(name: str) -> Callable[..., Any] | None:
    """The operator of a name, in a graph; None outside, where its kernel is called without it."""
    return getattr(torch.ops.functional_amp, name) if in_graph() else None
