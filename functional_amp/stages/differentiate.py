"""Who differentiates a loss: torch.func, or the autograd engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar
from weakref import ref

import torch
from torch import Tensor

from functional_amp.engine.graphs import Compile, leaves_graphs
from functional_amp.engine.limits import limit_of
from functional_amp.engine.random import other_random_state, random_state
from functional_amp.engine.reached import reaches_any
from functional_amp.engine.sharded import is_sharded
from functional_amp.mode import engine_records, in_graph, kept_whole_in_graphs, mode, normal

P = ParamSpec("P")
R = TypeVar("R")

Backend: TypeAlias = Literal["auto", "func", "autograd"]

_by_engine: set[ref[Any]] = set()
"""The loss functions that torch.func has been found unable to differentiate."""
_draws_torchs_alone: set[ref[Any]] = set()
"""Those that drew nothing from Python's and numpy's generators when torch.func differentiated them first."""


def check_backend(backend: Any) -> None:
    """Raises ValueError for an unknown backend."""
    if not isinstance(backend, str) or backend not in ("auto", "func", "autograd"):
        raise ValueError(f"backend: found {backend!r}, expected 'auto', 'func' or 'autograd'.")


def backend_in_graphs(backend: Backend, compile: Compile, *, sharded: bool = False) -> Backend:
    """The backend of a step, by its options: where a loss may leave the graph or is `sharded`, "auto" is the engine.

    Raises:
        ValueError: for "func" where it may.
    """
    if sharded:
        _refuse_func(backend)
        return "autograd"
    if not leaves_graphs(compile):
        return backend
    if backend == "func":
        raise ValueError(
            "backend: found 'func' with compile={'fullgraph': False}, expected 'auto' or 'autograd': no graph can be "
            "left in the middle of torch.func.grad. Use backend='autograd', which gives the same values."
        )
    return "autograd"


def _refuse_func(backend: Backend) -> None:
    if backend == "func":
        raise ValueError(
            "backend: found 'func' with sharded parameters, expected 'auto' or 'autograd': torch.func can't "
            "differentiate what DTensors do. Use backend='autograd', which gives the same values."
        )


def check_loop_in_graph(loss_fn: Any, backend: Backend, compile: Compile) -> None:
    """Raises ValueError for a loss that the engine would have to record inside a loop of a graph."""
    in_one = in_graph() or (compile is not False and not leaves_graphs(compile))
    if in_one and (backend == "autograd" or known_limit(loss_fn)):
        raise ValueError(
            "scan: found a loss that the autograd engine differentiates in a compiled step, expected backend='auto' or "
            "'func': no engine records inside a loop of a graph. Call step(state, micro_batches) with a list of "
            "micro-batches: that is three graphs at most. Or use compile={'fullgraph': False}."
        )


def differentiate(scaled_loss: Any, leaves: list[Tensor], backend: Backend) -> tuple[list[Tensor], Any]:
    """The gradients of a `ScaledLoss` at its leaves, and what it returned beside the scaled loss, without history."""
    if any([is_sharded(leaf) for leaf in leaves]):
        _refuse_func(backend)
        backend = "autograd"
    if backend == "autograd" or (backend == "auto" and known_limit(scaled_loss.loss_fn)):
        return _by_autograd(scaled_loss, leaves)
    retries = backend == "auto" and mode() in ("eager", "inference")
    before = random_state() if retries else None
    others = other_random_state() if retries and not _known(_draws_torchs_alone, scaled_loss.loss_fn) else None
    try:
        grads = _by_func(scaled_loss, leaves)
        if others is not None and others.is_current():
            _note(_draws_torchs_alone, scaled_loss.loss_fn)
        return grads
    except RuntimeError as error:
        cause = limit_of(error)
        if cause is None:
            raise
        if before is None:
            raise RuntimeError(
                f"{error}\n\nThe loss uses {cause}, which does not work under torch.func. "
                "Use backend='autograd', which gives the same values."
            ) from error
    before.restore()
    if others is not None:
        others.restore()
    grads = _by_autograd(scaled_loss, leaves)  # who fails here too has found an error of the loss
    _remember_limit(scaled_loss.loss_fn, cause)
    return grads


def known_limit(loss_fn: Any) -> bool:
    """Whether "auto" has found that a loss function needs the engine; never under a transform."""
    return _known(_by_engine, loss_fn) and mode() != "transform"


def _known(noted: set[ref[Any]], loss_fn: Any) -> bool:
    try:
        return ref(_given(loss_fn)) in noted
    except TypeError:  # a callable that can not be hashed, or held weakly, is tried each time
        return False


def _note(noted: set[ref[Any]], loss_fn: Any) -> None:
    """Adds a loss function, and takes out those that are gone: no others do, as a compiler may be reading the set."""
    try:
        noted.add(ref(_given(loss_fn)))
        noted -= {other for other in noted if other() is None}
    except TypeError:
        pass


def _given(loss_fn: Any) -> Any:
    """The user's function: each step wraps it in one of its own."""
    return getattr(loss_fn, "given", loss_fn)


def _remember_limit(loss_fn: Any, cause: str) -> None:
    _note(_by_engine, loss_fn)
    warnings.warn(
        f"backend='auto': torch.func can't differentiate this loss ({cause}); the autograd engine does it "
        "from now on, with the same values. Say backend='autograd' to choose it at once.",
        stacklevel=2,
    )


def _by_func(scaled_loss: Any, leaves: list[Tensor]) -> tuple[list[Tensor], Any]:
    def reaching(leaves: list[Tensor]) -> Any:
        scaled, out = scaled_loss(kept_whole_in_graphs(leaves))
        if not scaled_loss.may_be_constant and not reaches_any(leaves, scaled, out[0], _given(scaled_loss.loss_fn)):
            _refuse_constant()
        return scaled, out

    grads, (_, aux) = torch.func.grad_and_value(reaching, has_aux=True)(leaves)
    return grads, aux


def _by_autograd(scaled_loss: Any, leaves: list[Tensor]) -> tuple[list[Tensor], Any]:
    leaves = recording(leaves)
    scaled, (value, tensors) = record_loss(scaled_loss, leaves)
    found: list[Tensor | None] = [None] * len(leaves)
    if scaled.requires_grad:
        found = list(torch.autograd.grad(scaled, leaves, allow_unused=True))
    if not scaled_loss.may_be_constant and all([grad is None for grad in found]):
        _refuse_constant()
    grads = [
        torch.zeros_like(leaf, requires_grad=False) if grad is None else grad
        for grad, leaf in zip(found, leaves, strict=True)
    ]
    return grads, (value.detach(), without_history(tensors))


def recording(leaves: list[Tensor]) -> list[Tensor]:
    """The leaves of the engine's graph: the same numbers, which require grad."""
    return [normal(leaf).detach().requires_grad_() for leaf in leaves]


def without_history(tensors: list[Tensor]) -> list[Tensor]:
    """What a loss has handed out; the very tensors that had no history: what it leaves as it was is known by that."""
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def record_loss(scaled_loss: Callable[..., Any], leaves: list[Tensor]) -> tuple[Tensor, Any]:
    """The scaled loss with its autograd graph."""
    if mode() == "inference":
        raise RuntimeError(
            "backend='autograd' records nothing inside torch.inference_mode(), and every gradient would be zero. "
            "Leave the inference mode, or use backend='func', which works in it."
        )
    with torch.enable_grad(), engine_records():
        return scaled_loss(leaves)


def check_reached(scaled_loss: Any, reached: bool) -> None:
    """Raises RuntimeError for a loss that reaches no parameter, unless it has said that this is meant."""
    if not reached and not scaled_loss.may_be_constant:
        _refuse_constant()


def _refuse_constant() -> None:
    raise RuntimeError(
        "loss_fn: found a loss that reaches no parameter, expected one that depends on them: every gradient would be "
        "zero. Look for a detach, a no_grad or a copy of the parameters in the loss; where it is meant, return "
        "Loss(value, weight=0), with the reduction of its window."
    )
