"""The backward of a scaled loss: scale_backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype, is_differentiable, like
from functional_amp.engine.carried import refuse_carried
from functional_amp.engine.frozen import call
from functional_amp.engine.loans import lending
from functional_amp.engine.random import random_state
from functional_amp.engine.unwritten import check_marks, check_params, compare_params, counted_params
from functional_amp.mode import finite_cotangents, in_graph, laid_out, normal, stage, zero_stays_zero
from functional_amp.registry import new
from functional_amp.stages.differentiate import (
    Backend,
    check_backend,
    differentiate,
    record_loss,
    recording,
)
from functional_amp.stages.freeze import frozen_leaves
from functional_amp.torch_private import torch_pytree
from functional_amp.tree import Flat, PyTree, closed, flatten, flatten_tensors, opened, paths, with_own_containers
from functional_amp.values.grads import Loss, ScaledGrads, as_loss, check_loss_fn, is_zero, weight_tensor, weighted
from functional_amp.values.scaler import NoScale, Scaler, check_scaler


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
    backend: Backend = "auto",
) -> ScaledBackward:
    """Differentiates `scale * loss` with respect to the parameters.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar tensor or a `Loss`.
        scaler: gives the scale; it is not changed.
        params: a pytree of tensors. Float and complex leaves are differentiated; integer and bool
            leaves, leaves that `freeze` names and None have no gradient (None).
        batch: whatever the loss function takes after the parameters.
        weight: the weight of this micro-batch, where the loss function returns a plain scalar.
        backend: "func" is `torch.func.grad_and_value`. "autograd" gives the same values through the
            engine, for activation checkpointing, for `autograd.Function`s without `setup_context`, for
            hooks; `torch.func` can not transform it from outside. "auto" is "func", and the engine
            from the first call on that torch.func can't differentiate, which a warning says once.

    Returns:
        grads: `ScaledGrads` whose tree has the structure and dtypes of `params` (float32 where
            a weight other than the number 1 was multiplied in: `weight * scale * gradient`).
        loss: 0-dim float32 (float64 stays), unscaled and unweighted.
        aux: the `aux` of the `Loss`; if it has buffers, the pair `(aux, buffers)`.

        A custom backward must be linear in the incoming gradient, as the scale arrives through it.

    Raises:
        TypeError: for a leaf that is not a tensor, parameters without a float leaf, a loss that is not
            a real floating-point tensor.
        RuntimeError: for a loss that reaches no parameter, and for backend="autograd" inside
            `torch.inference_mode()`.
        ValueError: for a loss that is not 0-dim, a bad weight, an unknown backend.

    >>> import torch
    >>> from functional_amp import StaticScale
    >>> grads, loss, aux = scale_backward(lambda p, x: (p * x).mean(), StaticScale(8.0), torch.ones(2), torch.ones(2))
    >>> grads.tree, loss
    (tensor([4., 4.]), tensor(1.))
    """
    check_backend(backend)
    scaled = ScaledLoss(loss_fn, scaler, params, batch, weight)
    leaves = finite_cotangents(scaled.leaves)
    grads, (value, tensors) = differentiate(scaled, leaves, backend)
    scaled.check_unwritten()
    loss_weight, aux = scaled.weight_and_aux(tensors)
    for place, grad in enumerate(grads):
        scaled.check_strided(grad, place)
    pairs = zip(grads, leaves, strict=True)
    tree = scaled.tree([weighted(laid_out(grad, leaf), loss_weight) for grad, leaf in pairs])
    carried = new(ScaledGrads, tree=tree, scale=scaler.scale, weight=weight_tensor(loss_weight, scaler.scale))
    zero_stays_zero((leaves, scaled.guarded), (carried, value, aux))
    return ScaledBackward(carried, value, aux)


def _named(path: str) -> str:
    """The path of something that a `Loss` hands out."""
    place, *rest = path.split(".")
    return ".".join([("weight", "aux", "buffers")[int(place)], *rest])


def _look_at_floats(batch: Any) -> None:
    """Lets the compiler make inputs of Python floats: first met under torch.func, each would be a constant."""
    for leaf in torch_pytree.tree_leaves(batch):
        if isinstance(leaf, float):
            _ = leaf * 1.0


@lending
def unreached_paths(loss_fn: Callable[..., Tensor | Loss], params: PyTree, *batch: Any) -> list[str]:
    """Lists the parameters that a loss leaves out: their gradients are zero whatever the numbers are.

    For the host, once before training: a head that is never used, a branch behind a detach. It is no error, as
    frozen and unused parameters are common; a loss that reaches no parameter at all is one in `scale_backward`.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar tensor or a `Loss`; it is called once, and torch's
            generators are put back.
        params: a pytree of tensors.
        batch: whatever the loss function takes after the parameters.

    Returns:
        The paths of the float and complex leaves that the loss does not depend on, in the order of the tree.

    Raises:
        TypeError, ValueError: as `scale_backward` does.
        RuntimeError: inside `torch.inference_mode()`, where nothing is recorded.

    >>> import torch
    >>> unreached_paths(lambda p: p["used"].sum(), {"used": torch.ones(2), "head": {"bias": torch.zeros(2)}})
    ['head.bias']
    """
    scaled = ScaledLoss(loss_fn, NoScale(), params, batch)
    leaves = recording(scaled.leaves)
    before = random_state()
    try:
        value, _ = record_loss(scaled, leaves)
        scaled.check_unwritten()
        grads = torch.autograd.grad(value, leaves, allow_unused=True) if value.requires_grad else [None] * len(leaves)
    finally:
        before.restore()
    return [scaled.path(place) for place, grad in enumerate(grads) if grad is None]


class ScaledLoss:
    """The scaled loss as a function of the leaves to differentiate, and the way back to trees.

    Attributes:
        leaves: the float and complex leaves of the parameters.
        loss_fn: the loss function, unscaled.
        guarded: the batch and the scale, with the guards of outer derivatives.
        may_be_constant: whether the last call said that no parameter is to be reached: by the number 0 as weight.
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
        self.loss_fn, self._params, self._weight = loss_fn, params, weight
        if in_graph():
            _look_at_floats(batch)
        self._flat = flatten_tensors(params, "params")
        kept = frozen_leaves(loss_fn, params, self._flat.leaves)
        self._wanted = [i for i, leaf in enumerate(self._flat.leaves) if is_differentiable(leaf) and not kept[i]]
        if not self._wanted:
            found = {
                path: str(leaf.dtype)
                for path, leaf in zip(paths(params), self._flat.leaves, strict=True)
                if leaf is not None
            }
            raise TypeError(
                f"params: found no floating-point leaf to differentiate, only {found or 'an empty tree'}. "
                "Cast the parameters to float32, or pass the tree that holds them; leave some out of freeze."
            )
        self.guarded = self._batch, self._scale = finite_cotangents((batch, normal(scaler.scale)))
        self._before = counted_params(self._flat.leaves)
        self._structure: list[Any] = []
        self.may_be_constant = False
        self.leaves = self.select(self._flat.leaves)

    def select(self, leaves: list[Any]) -> list[Any]:
        """Of all leaves of a tree like the parameters, those that are differentiated."""
        return [leaves[index] for index in self._wanted]

    def tree(self, leaves: list[Any], others: list[Any] | None = None) -> PyTree:
        """A tree like the parameters, with the leaf of `others`, or None, where nothing is differentiated."""
        every: list[Any] = [None] * len(self._flat.leaves) if others is None else list(others)
        for index, leaf in zip(self._wanted, leaves, strict=True):
            every[index] = leaf
        return self._flat.unflatten(every)

    def __call__(self, leaves: list[Tensor]) -> tuple[Tensor, tuple[Tensor, list[Tensor]]]:
        """The loss times the scale; the loss itself, and the tensors that the loss function handed out."""
        every = list(self._flat.leaves)
        for index, leaf in zip(self._wanted, leaves, strict=True):
            every[index] = leaf
        compare_params(every, False)
        batch = with_own_containers(self._batch)
        loss = as_loss(call(self.loss_fn, self._flat.unflatten(every), *batch), self._weight)
        compare_params(every, True)
        check_marks(leaves, self.path)
        self.may_be_constant = is_zero(loss.weight)
        # A half-precision loss times the scale would overflow: 65504 is its largest number.
        value = loss.value.to(accumulation_dtype(loss.value.dtype))
        # torch.func hands out tensors alone: the structure and the other leaves go by the object.
        handed_out = (loss.weight, loss.aux, loss.buffers)
        out = flatten(handed_out)
        refuse_carried(out.leaves, lambda index: _named(paths(handed_out)[index]))
        found, specs = opened(out.leaves, lambda index: f"loss_fn: {_named(paths(handed_out)[index])}")
        is_tensor = [isinstance(leaf, Tensor) for leaf in found]
        self._structure[:] = [
            out.spec,
            specs,
            is_tensor,
            [None if held else leaf for leaf, held in zip(found, is_tensor, strict=True)],
            loss.buffers is not None,
        ]
        return value * like(self._scale, value), (value, [leaf for leaf in found if isinstance(leaf, Tensor)])

    def weight_and_aux(self, tensors: list[Tensor]) -> tuple[float | Tensor, PyTree]:
        """The weight, and the aux of `scale_backward`, after the scaled loss has been called."""
        spec, specs, is_tensor, leaves, has_buffers = self._structure
        remaining = iter(tensors)
        leaves = [next(remaining) if held else leaf for leaf, held in zip(leaves, is_tensor, strict=True)]
        weight, aux, buffers = cast(tuple[Any, Any, Any], Flat([], spec).unflatten(closed(leaves, specs)))
        return weight, (aux, buffers) if has_buffers else aux

    def path(self, place: int) -> str:
        """The path of the differentiated leaf at a place."""
        return paths(self._params)[self._wanted[place]]

    def check_unwritten(self) -> None:
        """Raises RuntimeError where the loss function has written in place to the parameters."""
        check_params(self._params, self._flat.leaves, self._before)

    def check_strided(self, grad: Tensor, place: int) -> None:
        """Raises TypeError for a sparse gradient of the leaf at a place."""
        if grad.layout != torch.strided:
            raise TypeError(
                f"loss_fn: found a sparse gradient ({grad.layout}) at {self.path(place)!r}, "
                "expected a strided one. Use Embedding(sparse=False); an autograd.Function returns grad.to_dense()."
            )
