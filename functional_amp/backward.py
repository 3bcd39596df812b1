"""The backward of a scaled loss: Loss, ScaledGrads, scale_backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import optree
import torch
from torch import Tensor

from functional_amp.checks import check_number
from functional_amp.loans import lending
from functional_amp.scaler import FLOAT32_MAX, FLOAT32_TINY, Scaler, check_scaler, scale_tensor
from functional_amp.transform import finite_cotangents, stage
from functional_amp.tree import (
    Flat,
    PyTree,
    accumulation_dtype,
    flatten,
    flatten_tensors,
    is_differentiable,
    like,
    new,
    path_name,
    paths,
    register,
)

Backend = Literal["func", "autograd"]


@dataclass(frozen=True, eq=False)
class Loss:
    """What a loss function may return instead of a scalar.

    Attributes:
        value: 0-dim float tensor, the mean over the micro-batch.
        weight: how many items it is the mean of (tokens, say): a number >= 0 or a 0-dim tensor.
            The gradient of a window is `sum(weight * grad) / sum(weight)`.
        aux: any pytree to hand out.
        buffers: the new buffers, for a step whose state has buffers.

    >>> import torch
    >>> Loss(torch.tensor(2.0), weight=4).weight
    4
    """

    value: Tensor
    weight: float | Tensor = 1.0
    aux: PyTree = None
    buffers: PyTree = None


register(Loss, ("value", "weight", "aux", "buffers"))


@dataclass(frozen=True, eq=False, init=False)
class ScaledGrads:
    """Gradients that carry their units: the gradient meant is `tree / (scale * weight)`.

    Sums of scaled gradients with their weights form a commutative monoid, whose addition is
    `accumulate`. A weight of 0 stands for no gradient at all: the tree becomes zero, NaN or not.

    Args:
        tree: a pytree of tensors, with None where a gradient is missing.
        scale: the loss scale; a number > 0 or a 0-dim float32 tensor.
        weight: the number of items; a number >= 0 or a 0-dim float32 tensor.

    Raises:
        TypeError, ValueError: for a scale or weight of the wrong type, shape or value, a leaf that is no
            tensor, ScaledGrads inside the tree.

    >>> import torch
    >>> ScaledGrads({"w": torch.tensor([24.0])}, scale=8.0, weight=1.0)  # a gradient of 3
    ScaledGrads(tree={'w': tensor([24.])}, scale=tensor(8.), weight=tensor(1.))
    """

    tree: PyTree
    scale: Tensor
    weight: Tensor

    def __init__(self, tree: PyTree, scale: float | Tensor, weight: float | Tensor = 1.0):
        check_plain(tree, "tree")
        flat = flatten_tensors(tree, "tree")
        scale = scale_tensor(scale, "scale", FLOAT32_TINY, FLOAT32_MAX)
        if scale.dim() != 0:
            raise ValueError(f"scale: found shape {tuple(scale.shape)}, expected a number or a 0-dim tensor.")
        device = next((leaf.device for leaf in flat.leaves if leaf is not None), None)
        scale = scale if device is None else scale.to(device)
        carried = weight_tensor(weight, scale)
        # The stages rely on it that the tree of a weight of 0 is zero.
        if isinstance(weight, Tensor) or _vanishes(weight):
            zero = carried == 0
            tree = flat.unflatten(
                [torch.where(like(zero, leaf), 0, leaf) if is_differentiable(leaf) else leaf for leaf in flat.leaves]
            )
        object.__setattr__(self, "tree", tree)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "weight", carried)


register(ScaledGrads, ("tree", "scale", "weight"))


class ScaledBackward(NamedTuple):
    """The gradients with their units, the unscaled loss, and what the loss function handed out."""

    grads: ScaledGrads
    loss: Tensor
    aux: PyTree


@stage
@lending
def scale_backward(
    loss_fn: Callable[..., Tensor | Loss],
    scaler: Scaler,
    params: PyTree,
    *batch: Any,
    weight: float | Tensor = 1.0,
    backend: Backend = "func",
) -> ScaledBackward:
    """Differentiates `scale * loss` with respect to the parameters.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar tensor or a `Loss`.
        scaler: gives the scale; it is not changed.
        params: a pytree of tensors. Float and complex leaves are differentiated; integer and bool
            leaves and None have no gradient (None).
        batch: whatever the loss function takes after the parameters.
        weight: the weight of this micro-batch, where the loss function returns a plain scalar.
        backend: "func" is `torch.func.grad_and_value`; "autograd" gives the same values through
            `torch.autograd.grad`, for activation checkpointing and for `autograd.Function`s without
            `setup_context`. The latter can not be transformed by `torch.func` from outside.

    Returns:
        grads: `ScaledGrads` whose tree has the structure and dtypes of `params` (float32 where
            a weight other than the number 1 was multiplied in: `weight * scale * gradient`).
        loss: 0-dim float32 (float64 stays), unscaled and unweighted.
        aux: the `aux` of the `Loss`; if it has buffers, the pair `(aux, buffers)`.

        A custom backward must be linear in the incoming gradient, as the scale arrives through it.

    Raises:
        TypeError: for a leaf that is no tensor, parameters without a float leaf, a loss that is no
            real floating-point tensor.
        RuntimeError: for backend="autograd" inside `torch.inference_mode()`.
        ValueError: for a loss that is not 0-dim, a bad weight, an unknown backend.

    >>> import torch
    >>> from functional_amp import StaticScale
    >>> grads, loss, aux = scale_backward(lambda p, x: (p * x).mean(), StaticScale(8.0), torch.ones(2), torch.ones(2))
    >>> grads.tree, loss
    (tensor([4., 4.]), tensor(1.))
    """
    check_backend(backend)
    problem = Problem(loss_fn, scaler, params, batch, weight)
    differentiate = _func_grad if backend == "func" else _autograd_grad
    grads, (value, tensors) = differentiate(problem.scaled_loss, finite_cotangents(problem.leaves))
    loss_weight, aux = problem.handed_out(tensors)
    for place, grad in enumerate(grads):
        problem.check_strided(grad, place)
    tree = problem.tree([weighted(grad, loss_weight) for grad in grads])
    scaled = new(ScaledGrads, tree=tree, scale=scaler.scale, weight=weight_tensor(loss_weight, scaler.scale))
    return ScaledBackward(scaled, value, aux)


class Problem:
    """The scaled loss as a function of the leaves to differentiate, and the way back to trees.

    Attributes:
        leaves: the float and complex leaves of the parameters.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Tensor | Loss],
        scaler: Scaler,
        params: PyTree,
        batch: tuple[Any, ...],
        weight: float | Tensor = 1.0,
    ):
        check_loss_fn(loss_fn)
        check_scaler(scaler)
        if scaler.scale.dim() != 0:
            raise ValueError(
                f"scaler: found a scale of shape {tuple(scaler.scale.shape)}, expected a 0-dim one. "
                "Stacked scalers go through torch.vmap together with stacked parameters."
            )
        self._loss_fn, self._params, self._weight = loss_fn, params, weight
        self._flat = flatten_tensors(params, "params")
        self._wanted = [index for index, leaf in enumerate(self._flat.leaves) if is_differentiable(leaf)]
        if not self._wanted:
            found = {
                path: str(leaf.dtype)
                for path, leaf in zip(paths(params), self._flat.leaves, strict=True)
                if leaf is not None
            }
            raise TypeError(
                f"params: found no floating-point leaf to differentiate, only {found or 'an empty tree'}. "
                "Cast the parameters to float32, or pass the tree that holds them."
            )
        self._batch, self._scale = finite_cotangents((batch, _normal(scaler.scale)))
        self._structure: list[Any] = []
        self.leaves = self.of(self._flat.leaves)

    def of(self, leaves: list[Any]) -> list[Any]:
        """Of all leaves of a tree like the parameters, those that are differentiated."""
        return [leaves[index] for index in self._wanted]

    def tree(self, leaves: list[Any]) -> PyTree:
        """A tree like the parameters, with None where nothing is differentiated."""
        every: list[Any] = [None] * len(self._flat.leaves)
        for index, leaf in zip(self._wanted, leaves, strict=True):
            every[index] = leaf
        return self._flat.unflatten(every)

    def scaled_loss(self, leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """The loss times the scale; the loss itself, and the tensors that the loss function handed out."""
        every = list(self._flat.leaves)
        for index, leaf in zip(self._wanted, leaves, strict=True):
            every[index] = leaf
        loss = as_loss(self._loss_fn(self._flat.unflatten(every), *self._batch), self._weight)
        # A half-precision loss times the scale would overflow: 65504 is its largest number.
        value = loss.value.to(accumulation_dtype(loss.value.dtype))
        # torch.func hands out tensors alone: the structure and the other leaves go by the object.
        out = flatten((loss.weight, loss.aux, loss.buffers))
        is_tensor = [isinstance(leaf, Tensor) for leaf in out.leaves]
        self._structure[:] = [
            out.spec,
            is_tensor,
            [None if held else leaf for leaf, held in zip(out.leaves, is_tensor, strict=True)],
            loss.buffers is not None,
        ]
        return value * like(self._scale, value), (value, [leaf for leaf in out.leaves if isinstance(leaf, Tensor)])

    def handed_out(self, tensors: list[Tensor]) -> tuple[float | Tensor, PyTree]:
        """The weight, and the aux of `scale_backward`, after the scaled loss has been called."""
        spec, is_tensor, leaves, has_buffers = self._structure
        remaining = iter(tensors)
        leaves = [next(remaining) if held else leaf for leaf, held in zip(leaves, is_tensor, strict=True)]
        weight, aux, buffers = cast(tuple[Any, Any, Any], Flat([], spec).unflatten(leaves))
        return weight, (aux, buffers) if has_buffers else aux

    def check_strided(self, grad: Tensor, place: int) -> None:
        """Raises TypeError for a sparse gradient of the leaf at a place."""
        if grad.layout != torch.strided:
            raise TypeError(
                f"loss_fn: found a sparse gradient ({grad.layout}) at {paths(self._params)[self._wanted[place]]!r}, "
                "expected a strided one. Use Embedding(sparse=False), or call .to_dense() in the loss function."
            )


def check_loss_fn(loss_fn: Any) -> None:
    """Raises TypeError unless the loss function can be called."""
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: found {type(loss_fn).__name__}, expected a function `loss_fn(params, *batch)`. "
            "Pass the function itself, not the loss that it gives."
        )


def check_backend(backend: Any) -> None:
    """Raises ValueError for an unknown backend."""
    if not isinstance(backend, str) or backend not in ("func", "autograd"):
        raise ValueError(f"backend: found {backend!r}, expected 'func' or 'autograd'.")


def as_loss(returned: Any, weight: float | Tensor = 1.0) -> Loss:
    """The loss function's result as a checked `Loss`."""
    loss = returned if isinstance(returned, Loss) else Loss(returned)
    value = loss.value
    if not isinstance(value, Tensor):
        raise TypeError(
            f"loss_fn: found {type(value).__name__}, expected a 0-dim tensor or Loss(value, weight, aux, buffers). "
            "Return what else you need as Loss(..., aux=...)."
        )
    if value.dim() != 0:
        raise ValueError(
            f"loss_fn: found a loss of shape {tuple(value.shape)}, expected a scalar of shape (). "
            "Reduce it with .mean() and give the number of items as Loss(..., weight=...)."
        )
    if not value.is_floating_point():
        raise TypeError(f"loss_fn: found a loss of {value.dtype}, expected a real floating-point one.")
    if not is_one(weight):
        if not is_one(loss.weight):
            raise ValueError(
                "weight: found one in the Loss and one as argument, expected one of them. "
                "Drop the argument, or leave the weight of the Loss at 1."
            )
        loss = Loss(value, weight, loss.aux, loss.buffers)
    check_weight(loss.weight)
    return loss


def is_one(weight: Any) -> bool:
    """True for the number 1, for which no pass over the gradients is spent."""
    return isinstance(weight, (int, float)) and not isinstance(weight, bool) and weight == 1


def _vanishes(weight: float) -> bool:
    """True for a number that float32 rounds to 0: such a weight is one of 0 to every stage."""
    return weight <= 2.0**-150


def _func_grad(scaled_loss: Callable[..., Any], leaves: list[Tensor]) -> tuple[list[Tensor], Any]:
    grad_fn = torch.func.grad_and_value(scaled_loss, has_aux=True)
    if torch.compiler.is_compiling():
        grads, (_, aux) = grad_fn(leaves)
        return grads, aux
    try:
        grads, (_, aux) = grad_fn(leaves)
    except RuntimeError as error:
        if any(limit in str(error) for limit in ("setup_context", "saved tensor hooks", "expected scalar type")):
            raise RuntimeError(
                f"{error}\n\nActivation checkpointing, autograd.Functions without setup_context, and, on a CPU, "
                "attention with dropout under autocast do not work under torch.func. "
                "Use backend='autograd', which gives the same values."
            ) from error
        raise
    return grads, aux


def _autograd_grad(scaled_loss: Callable[..., Any], leaves: list[Tensor]) -> tuple[list[Tensor], Any]:
    leaves, scaled, (value, tensors) = recorded(scaled_loss, leaves)
    if scaled.requires_grad:
        grads = list(torch.autograd.grad(scaled, leaves, allow_unused=True, materialize_grads=True))
    else:  # a loss that ignores every parameter: zeros, as torch.func gives
        grads = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
    return grads, (value.detach(), [tensor.detach() for tensor in tensors])


def recorded(scaled_loss: Callable[..., Any], leaves: list[Tensor]) -> tuple[list[Tensor], Tensor, Any]:
    """The scaled loss with its autograd graph, and the leaves of that graph."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "backend='autograd' records nothing inside torch.inference_mode(), and every gradient would be zero. "
            "Leave the inference mode, or use backend='func', which works in it."
        )
    leaves = [_normal(leaf).detach().requires_grad_() for leaf in leaves]
    with torch.enable_grad():
        scaled, out = scaled_loss(leaves)
    return leaves, scaled, out


def _normal(tensor: Tensor) -> Tensor:
    """A tensor that the engine can record with: those of an inference mode must be copied."""
    return tensor.clone() if not torch.compiler.is_compiling() and tensor.is_inference() else tensor


def weighted(grad: Tensor, weight: float | Tensor) -> Tensor:
    """`weight * grad`, in float32; zero where the weight is, even if the gradient is NaN."""
    if is_one(weight):
        return grad
    wide = grad.to(accumulation_dtype(grad.dtype))
    if not isinstance(weight, Tensor):
        return torch.zeros_like(wide) if _vanishes(weight) else wide * float(weight)
    factor = like(weight, wide).to(torch.float32)
    return torch.where(factor == 0, 0, wide * factor)


def check_weight(weight: Any) -> None:
    """Raises unless a weight is a finite number >= 0 or a real 0-dim tensor (whose value is not read)."""
    if isinstance(weight, Tensor):
        if weight.dim() != 0:
            raise ValueError(f"weight: found shape {tuple(weight.shape)}, expected a number or a 0-dim tensor. Sum it.")
        if weight.is_complex() or weight.dtype == torch.bool:
            raise TypeError(f"weight: found a {weight.dtype} tensor, expected a count or a real number.")
        return
    check_number(weight, "weight", "a number or a 0-dim tensor")
    if not 0 <= weight <= FLOAT32_MAX:
        raise ValueError(f"weight: found {weight!r}, expected a finite number >= 0 that float32 can hold.")


def weight_tensor(weight: float | Tensor, scale: Tensor) -> Tensor:
    """A weight as a float32 tensor on the device of the scale."""
    check_weight(weight)
    if isinstance(weight, Tensor):
        return weight.to(scale.device, torch.float32)
    return torch.full_like(scale, float(weight))


def check_scaled(grads: Any, what: str) -> None:
    """Raises TypeError unless the gradients carry their scale."""
    if not isinstance(grads, ScaledGrads):
        raise TypeError(
            f"{what}: found {type(grads).__name__}, expected ScaledGrads. Take it from scale_backward or accumulate, "
            "or write ScaledGrads(tree, scale, weight); gradients without a scale are unscaled already."
        )


def check_plain(tree: Any, what: str) -> None:
    """Raises TypeError where ScaledGrads stand inside a tree: their scale would count as a gradient."""

    def is_scaled(node: Any) -> bool:
        return isinstance(node, ScaledGrads)

    nodes: list[Any] = []
    optree.tree_map(nodes.append, tree, is_leaf=is_scaled, none_is_leaf=True)
    for index, node in enumerate(nodes):
        if is_scaled(node):
            path = path_name(optree.tree_paths(tree, is_leaf=is_scaled, none_is_leaf=True)[index])
            raise TypeError(
                f"{what}: found ScaledGrads at {path!r}, expected a tensor or None. Their units differ from leaf to "
                "leaf: unscale each of them first, or put the parameters into one tree and differentiate that."
            )


def denominator(grads: ScaledGrads) -> Tensor:
    """What the tree is to be divided by: `scale * weight`, and 1 where the weight is 0."""
    return torch.where(grads.weight == 0, 1.0, grads.scale * grads.weight)
