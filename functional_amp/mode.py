"""How a stage runs: in a graph, under a transform, in inference mode, or plainly.

This is the one room that asks. Everything else asks it, once per half of a step, or uses one of the guards below.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar, cast

import optree
import torch
from torch import Tensor

from functional_amp.innermost import Innermost
from functional_amp.torch_private import functorch_active, levels, torch_pytree

P = ParamSpec("P")
R = TypeVar("R")

Mode: TypeAlias = Literal["graph", "transform", "inference", "eager"]


def in_graph() -> bool:
    """True while `torch.compile` or `torch.export` traces."""
    return torch.compiler.is_compiling()


def transformed() -> bool:
    """True inside `torch.func.grad`, `vmap` and the other functorch transforms, in a graph too."""
    return functorch_active()


def mode() -> Mode:
    """How this thread runs now. A transform counts before a graph: inside both, values must stay differentiable."""
    if transformed():
        return "transform"
    if in_graph():
        return "graph"
    return "inference" if torch.is_inference_mode_enabled() else "eager"


class _Loss:
    """A loss that the autograd engine records, for as long as it does."""


class _Stages(threading.local):
    """How many stages run on this thread, one inside the other."""

    running = 0


_stages = _Stages()
_recording = Innermost[_Loss]()
_traced: list[None] = []
"""The losses in what is being traced into a graph: dynamo follows a list, and no attribute of a thread."""
_looped: list[None] = []
"""Not empty while the body of a loop is traced, which may not write to what is outside."""


@contextmanager
def engine_records() -> Iterator[None]:
    """Marks a loss function that the autograd engine is to differentiate."""
    if in_graph():
        if _looped:
            yield
            return
        _traced.append(None)
        try:
            yield
        finally:
            _traced.pop()
        return
    with _recording.entered(_Loss()):
        yield


@contextmanager
def loop_body() -> Iterator[None]:
    """Around a loop in a graph whose body was traced once before, and looked through for losses that are refused."""
    _looped.append(None)
    yield
    _looped.pop()


def stage(function: Callable[P, R], *, detach: bool = True) -> Callable[P, R]:
    """Keeps the outputs of a pure function free of autograd history.

    `torch.func.grad` ignores a `no_grad` that surrounds it, so differentiation inside the
    stage is unaffected. Under an outer transform the stage stays differentiable.

    Args:
        detach: False where no input has a history that an output could be.

    Raises:
        RuntimeError: from the wrapped function, where the autograd engine records a loss and an input
            requires grad: the outputs would be constants to the engine, and the gradient zero.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if transformed():
            return function(*args, **kwargs)
        recorded = len(_traced) or (
            not in_graph() and _recording.now() is not None
        )  # a traced loss may have left its graph
        if recorded and torch.is_grad_enabled():
            _refuse_history(function.__name__, (args, kwargs))
        if in_graph():  # what is traced under no_grad has no history to give
            with torch.no_grad():
                return function(*args, **kwargs)
        if _stages.running and not torch.is_grad_enabled():  # inside another stage, which does the rest
            return function(*args, **kwargs)
        _stages.running += 1
        try:
            with torch.no_grad():
                output = function(*args, **kwargs)
        finally:
            _stages.running -= 1
        return _detached(output) if detach else output

    return wrapped


def _refuse_history(name: str, given: Any) -> None:
    leaves = torch_pytree.tree_leaves(given) if in_graph() else optree.tree_leaves(given, none_is_leaf=True)
    if any([_has_history(leaf) for leaf in leaves]):
        raise RuntimeError(
            f"{name}: found an input that requires grad inside a loss that the autograd engine records, where the "
            "stages of functional_amp are constants: the gradient through them would be zero. "
            "Differentiate this loss with backend='func', donate=False, or detach the input."
        )


def _has_history(leaf: Any) -> bool:
    return getattr(leaf, "requires_grad", False) is True  # of a class it is a property


def _detached(output: R) -> R:
    """The output without history: a tensor that is returned unchanged may have one of its own; others stay the same."""
    leaves, spec = optree.tree_flatten(cast(Any, output), none_is_leaf=True)
    if not any([_has_history(leaf) for leaf in leaves]):
        return output
    return cast(R, optree.tree_unflatten(spec, [x.detach() if _has_history(x) else x for x in leaves]))


# Guards of outer derivatives: through a branch that is not taken, 0 * NaN is NaN.


class _FiniteCotangent(torch.autograd.Function):
    """The identity, through which neither inf nor NaN flows back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Tensor:
        (cotangent,) = grad_outputs
        return torch.where(torch.isfinite(cotangent), cotangent, 0)


class _FiniteTangent(_FiniteCotangent):
    """The same with a forward mode, which dynamo can not trace."""

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Tensor:
        (tangent,) = grad_inputs
        return torch.where(torch.isfinite(tangent), tangent, 0)


def finite_cotangents(tree: R) -> R:
    """The tree, through whose float leaves neither inf nor NaN flows back under an outer derivative.

    The cotangent of the gradients of a skipped update is 0, but 0 times the NaN of their own derivative is NaN.
    """
    if not transformed():
        return tree
    barrier = _FiniteCotangent if in_graph() else _FiniteTangent

    def guarded(leaf: Any) -> Any:
        return barrier.apply(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return cast(R, optree.tree_map(guarded, cast(Any, tree)))


_GUARDED = "functional_amp: zero stays zero"


def zero_stays_zero(inputs: Any, outputs: Any) -> None:
    """Lets a cotangent of zero flow back as zero from the outputs to all that they were computed from, but the inputs.

    The derivative of zero is zero, but the engine takes it times what it saved, and 0 * NaN is NaN. This is for what
    a loss function captured, through which `finite_cotangents` of its arguments can't reach. A graph has no hooks.
    """
    if not transformed() or in_graph():
        return
    for node in _nodes(inputs):
        node.metadata[_GUARDED] = True
    waiting = list(_nodes(outputs))
    while waiting:
        node = waiting.pop()
        if _GUARDED not in node.metadata:  # each node once, however often a window passes by
            node.metadata[_GUARDED] = True
            node.register_hook(_zero_for_zero)
            waiting += [after for after, _ in node.next_functions if after is not None]


def _nodes(tree: Any) -> Iterator[Any]:
    for leaf in optree.tree_leaves(tree):
        for tensor in levels(leaf) if isinstance(leaf, Tensor) else ():
            if tensor.grad_fn is not None:
                yield tensor.grad_fn


def _zero_for_zero(grad_inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]) -> Any:
    zero = [(grad == 0).all() for grad in grad_outputs if grad is not None]
    if not zero:
        return None
    every = functools.reduce(torch.logical_and, zero)
    return tuple(None if grad is None else torch.where(every.to(grad.device), 0, grad) for grad in grad_inputs)


def stop_gradient_where(bad: Tensor, leaf: Tensor) -> Tensor:
    """The leaf; a constant to an outer derivative where `bad`."""
    return torch.where(bad.to(leaf.device), leaf.detach(), leaf) if transformed() else leaf


def one_unless(condition: Tensor, value: Tensor) -> Tensor:
    """The value; under a transform 1 where the condition does not hold, so that the branch not taken is finite."""
    return torch.where(condition.to(value.device), value, 1) if transformed() else value


def sqrt(value: Tensor) -> Tensor:
    """The square root, with a derivative of 0 instead of inf at 0 under an outer transform."""
    if not transformed():
        return value.sqrt()
    positive = value > 0
    return torch.where(positive, torch.where(positive, value, 1).sqrt(), value)


def one_of_many() -> bool:
    """Whether a value may be one of a batch under vmap, where what it carries beside its tensors is easily lost."""
    return transformed()


def host_readable(value: Tensor) -> bool:
    """Whether looking at a tensor's number is free: a plain one on a CPU, outside any graph or transform."""
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu"
    return plain and not in_graph() and not transformed()


def kept_whole_in_graphs(leaves: list[Tensor]) -> list[Tensor]:
    """In a graph, views of the leaves: the compiler drops a Function's backward on a raw one (pytorch#193279)."""
    return [leaf.view_as(leaf) for leaf in leaves] if in_graph() else leaves


def laid_out(grad: Tensor, leaf: Tensor) -> Tensor:
    """A gradient with the strides that the engine gives it where it adds gradients: noise and norms go by them.

    They are those of a dense leaf, else those of a contiguous one. In a graph the compiler lays out gradients.
    """
    if in_graph() or transformed() or type(grad) is not Tensor or grad.stride() == leaf.stride():
        return grad
    like_leaf = torch.empty_like(leaf, requires_grad=False)
    return like_leaf.copy_(grad) if like_leaf.stride() == leaf.stride() else grad.contiguous()


def normal(tensor: Tensor) -> Tensor:
    """A tensor that the engine can record with: those of an inference mode must be copied."""
    return tensor.clone() if not in_graph() and tensor.is_inference() else tensor
