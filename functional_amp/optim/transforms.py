"""Members of a chain: clip_by_value, adaptive_clip, add_noise, ema."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.checks import check_non_negative, check_positive, check_unit_interval
from functional_amp.dtypes import accumulation_dtype, counted, is_differentiable, like, scalar_dtype, widened
from functional_amp.optim.chain import Transform
from functional_amp.optim.leafwise import zero_count
from functional_amp.optim.schedules import Schedule
from functional_amp.tree import PyTree, flatten, flatten_tensors, map_tensors


def clip_by_value(limit: float) -> Transform:
    """Clips each element of the gradients to `[-limit, limit]`, as `torch.nn.utils.clip_grad_value_` does it.

    Args:
        limit: > 0, in true units. Of a complex element both parts are clipped.

    >>> import torch
    >>> clip_by_value(1.0).update({"w": torch.tensor([3.0, -0.5])}, (), None)[0]
    {'w': tensor([ 1.0000, -0.5000])}
    """
    limit = check_positive(limit, "limit")

    def clipped(grad: Tensor) -> Tensor:
        if not is_differentiable(grad):
            return grad
        if grad.is_complex():
            return torch.view_as_complex(torch.view_as_real(grad.resolve_conj()).clamp(-limit, limit))
        return grad.clamp(-limit, limit)

    return Transform(lambda params: (), lambda grads, state, params: (map_tensors(clipped, grads), state))


def adaptive_clip(clipping: float = 0.01, eps: float = 1e-3) -> Transform:
    """Clips each unit's gradient by the norm of its weights (Brock et al. 2021, https://arxiv.org/abs/2102.06171).

        g = clipping * max(|w|, eps) / |g| * g    where |g| > clipping * max(|w|, eps)

    A unit is a row of a matrix, an output channel of a convolution, a whole vector or scalar. The authors leave the
    last linear layer out: give it another optimizer by `partition`.

    Args:
        clipping: the largest ratio of the norms, > 0.
        eps: the smallest norm of weights, > 0, so that zeros can move.

    >>> import torch
    >>> params, grads = {"w": torch.tensor([[3.0, 4.0]])}, {"w": torch.tensor([[0.0, 2.0]])}
    >>> adaptive_clip(0.1).update(grads, (), params)[0]
    {'w': tensor([[0.0000, 0.5000]])}
    """
    clipping, eps = check_positive(clipping, "clipping"), check_positive(eps, "eps")

    def clipped(grad: Tensor, param: Tensor) -> Tensor:
        if not is_differentiable(grad):
            return grad
        largest = clipping * _unit_norm(param).clamp(min=eps)
        norm = _unit_norm(grad)
        over = norm > largest
        ratio = torch.where(over, largest / torch.where(over, norm, 1), 1)
        wide = widened(grad)
        return wide * ratio.to(wide.real.dtype)

    def update(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        flat = flatten(grads)
        pairs = zip(flat.leaves, flatten(params).leaves, strict=True)
        return flat.unflatten([grad if grad is None else clipped(grad, param) for grad, param in pairs]), state

    return Transform(lambda params: (), update)


def add_noise(std: float | Schedule) -> Transform:
    """Adds normal noise to the gradients (Neelakantan et al. 2015, https://arxiv.org/abs/1511.06807).

    Args:
        std: the standard deviation in true units, >= 0, or a function of the number of applied updates; theirs is
            `lambda count: (eta / (1 + count) ** 0.55) ** 0.5`.

    The noise is drawn from torch's generators: `step(state, micro_batches, seed=...)` fixes it.

    >>> import torch
    >>> noise = add_noise(0.0)
    >>> noise.update({"w": torch.ones(2)}, noise.init({"w": torch.ones(2)}), None)[0]
    {'w': tensor([1., 1.])}
    """
    if not callable(std):
        std = check_non_negative(std, "std")

    def update(grads: PyTree, count: Tensor, params: PyTree) -> tuple[PyTree, Tensor]:
        _check_state(count, Tensor, "add_noise")
        spread = _at(std, count, lambda value: check_non_negative(value, "std"))

        def noisy(grad: Tensor) -> Tensor:
            if not is_differentiable(grad):
                return grad
            return grad + torch.randn_like(grad) * (like(spread, grad) if isinstance(spread, Tensor) else spread)

        return map_tensors(noisy, grads), counted(count)

    return Transform(zero_count, update)


class EmaState(NamedTuple):
    """Applied updates (int32, 0-dim), and the average of the parameters, in float32; None elsewhere."""

    step: Tensor
    average: PyTree


def ema(decay: float | Schedule) -> Transform:
    """Keeps an exponential average of the parameters, for evaluation.

        average = decay * average + (1 - decay) * params    after each applied update

    It starts as the parameters do, and is float32 whatever their dtype is. Its state is the `EmaState` at its place
    in the chain: `state.opt_state[0].average` for `chain(ema(0.999), adamw(1e-3))`.

    Args:
        decay: in [0, 1], or a function of the number of applied updates, this one not counted.

    >>> import torch
    >>> from functional_amp import chain, sgd
    >>> optimizer = chain(ema(0.5), sgd(lr=1.0))
    >>> params = {"w": torch.tensor([4.0])}
    >>> params, state = optimizer.step({"w": torch.tensor([2.0])}, optimizer.init(params), params)
    >>> params, state[0].average
    ({'w': tensor([2.])}, {'w': tensor([3.])})
    """
    if not callable(decay):
        decay = check_unit_interval(decay, "decay", closed=True)

    def copied(leaf: Tensor) -> Tensor | None:
        dtype = accumulation_dtype(leaf.dtype)
        return leaf.detach().to(dtype, copy=True) if is_differentiable(leaf) else None

    def after(params: PyTree, state: EmaState) -> EmaState:
        _check_state(state, EmaState, "ema")
        now = _at(decay, state.step, lambda value: check_unit_interval(value, "decay", closed=True))
        flat = flatten(state.average)

        def moved(average: Tensor, param: Tensor) -> Tensor:
            weight: Any = 1 - now
            weight = like(weight, average).to(average.real.dtype) if isinstance(weight, Tensor) else weight
            return torch.lerp(average, param.to(average.dtype), weight)

        pairs = zip(flat.leaves, flatten(params).leaves, strict=True)
        leaves = [None if average is None else moved(average, param) for average, param in pairs]
        return EmaState(counted(state.step), flat.unflatten(leaves))

    def init(params: PyTree) -> EmaState:
        flat = flatten_tensors(params, "params")
        return EmaState(zero_count(params), flat.unflatten([None if x is None else copied(x) for x in flat.leaves]))

    return Transform(init, None, after)


def _check_state(state: Any, kind: type, name: str) -> None:
    """Raises TypeError for the state of another member of a chain."""
    if not isinstance(state, kind):
        raise TypeError(
            f"opt_state: found {type(state).__name__} for {name}, expected {kind.__name__}. Take it from the init of "
            "this very chain: a state belongs to a place in it."
        )


def _at(value: float | Callable[[Tensor], Any], count: Tensor, check: Callable[[Any], float]) -> Any:
    """The value at a count. What a function gives as a number is checked as a constant is."""
    if not callable(value):
        return value
    now = value(count)
    return now if isinstance(now, Tensor) else check(now)


def _unit_norm(leaf: Tensor) -> Tensor:
    """The norm of each row or channel, broadcast over it; of a vector or a scalar, its own.

    In float64, where the square of no float32 overflows.
    """
    dims, dtype = tuple(range(1, leaf.dim())) if leaf.dim() > 1 else None, scalar_dtype(leaf.device)
    wide = torch.promote_types(leaf.dtype, dtype)
    return torch.linalg.vector_norm(leaf, dim=dims, keepdim=leaf.dim() > 1, dtype=wide)
