"""Precision as a transformation of the loss function: autocast, Policy, with_policy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from functional_amp.registry import with_fields
from functional_amp.tree import PyTree, closed, flatten, opened, paths
from functional_amp.values.grads import Loss, check_loss_fn

LossFn = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])

_DTYPES = {
    "float32": torch.float32,
    "f32": torch.float32,
    "full": torch.float32,
    "float16": torch.float16,
    "f16": torch.float16,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float64": torch.float64,
    "f64": torch.float64,
}
_FIELDS = {
    "params": "param_dtype",
    "p": "param_dtype",
    "compute": "compute_dtype",
    "c": "compute_dtype",
    "output": "output_dtype",
    "o": "output_dtype",
}


@dataclass(frozen=True)
class Policy:
    """Which dtype the parameters are kept in, computed with, and returned in (jmp's policy).

    Attributes:
        param_dtype: of the parameters that are kept and updated; see `cast_to_param`.
        compute_dtype: that `with_policy` casts parameters and inputs to.
        output_dtype: that `with_policy` casts the loss to.

    Raises:
        TypeError: for a dtype that is not a floating-point `torch.dtype`.
    """

    param_dtype: torch.dtype = torch.float32
    compute_dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype", "output_dtype"):
            check_dtype(getattr(self, name), name)

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads `params=float32,compute=float16,output=float32`, `p=f32,c=f16,o=f32` or one dtype for all.

        Dtypes: float32 (f32, full), float16 (f16, half), bfloat16 (bf16), float64 (f64). Of the parts that
        are left out, params are float32, compute follows params and output follows compute, as in jmp.

        Raises:
            ValueError: for anything else, with the words it knows.

        >>> Policy.parse("p=f32,c=bf16,o=f32").compute_dtype
        torch.bfloat16
        """
        if not isinstance(text, str):
            raise TypeError(f"policy: found {type(text).__name__} {text!r}, expected a str.")
        if "=" not in text:
            dtype = _dtype(text)
            return cls(dtype, dtype, dtype)
        fields: dict[str, torch.dtype] = {}
        for part in text.split(","):
            key, separator, value = part.partition("=")
            field = _FIELDS.get(key.strip())
            if not separator or field is None:
                raise ValueError(
                    f"policy: found {part.strip()!r} in {text!r}, expected params=, compute= or output= (p=, c=, o=)."
                )
            if field in fields:
                raise ValueError(f"policy: found {key.strip()!r} twice in {text!r}, expected each part once.")
            fields[field] = _dtype(value)
        params = fields.get("param_dtype", torch.float32)
        compute = fields.get("compute_dtype", params)
        return cls(params, compute, fields.get("output_dtype", compute))

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """The tree with its float leaves in `param_dtype`."""
        return cast_floating(tree, self.param_dtype)

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """The tree with its float leaves in `compute_dtype`."""
        return cast_floating(tree, self.compute_dtype)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """The tree with its float leaves in `output_dtype`."""
        return cast_floating(tree, self.output_dtype)


def cast_floating(tree: PyTree, dtype: torch.dtype) -> PyTree:
    """Casts the real floating-point tensors of a tree; all other leaves stay as they are.

    Containers may be those that optree knows or that torch's pytree knows.

    Raises:
        TypeError: for a dtype that is not a floating-point one; for another container that holds tensors.

    >>> import torch
    >>> cast_floating({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.float16)
    {'x': tensor([1.], dtype=torch.float16), 'n': tensor([1])}
    """
    check_dtype(dtype, "dtype")
    return _cast(tree, dtype, "tree")


def _cast(tree: PyTree, dtype: torch.dtype, what: str) -> PyTree:
    flat = flatten(tree)
    leaves, specs = opened(flat.leaves, lambda index: f"{what}: at {paths(tree)[index]!r}")
    leaves = [leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf for leaf in leaves]
    return flat.unflatten(closed(leaves, specs))


def working_copies(params: PyTree, copies: PyTree, dtype: torch.dtype | None) -> PyTree:
    """What a loss function is given of the parameters: the copies of an open window, if they are in this dtype."""
    if dtype is None:
        return params
    if copies is not None and all([_is_in(leaf, dtype) for leaf in flatten(copies).leaves]):
        return copies
    return cast_floating(params, dtype)


def _is_in(leaf: Any, dtype: torch.dtype) -> bool:
    return not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype == dtype


_MIXED = ("must have the same dtype", "should be the same")
"""How torch's layers say that a weight and an input are of two dtypes."""


def naming_frozen(function: F) -> F:
    """A function that calls a loss function with cast parameters, and says what is not cast where dtypes don't fit."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not any([part in str(error) for part in _MIXED]):
                raise
            raise RuntimeError(
                f"{error}\n\nloss_fn: found a layer with inputs and weights of two dtypes, expected one. Parameters "
                "are cast; buffers are not, nor the frozen parameters that from_module puts among them. Cast frozen "
                "layers before it (`layer.to(torch.bfloat16)`), or freeze them by functional_amp.freeze instead of "
                "requires_grad_(False). A compute_dtype casts no inputs: cast them in the loss."
            ) from error

    return cast(F, wrapped)


def with_policy(loss_fn: LossFn, policy: Policy | str) -> LossFn:
    """Runs a loss function in the compute dtype of a policy.

    Casts the parameters and every floating-point input to `compute_dtype` and the loss to
    `output_dtype`. Gradients flow back through the casts: they have the dtype of the parameters that were
    given. An argument of `loss_fn` named `buffers` is not cast: running statistics need float32.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar or a `Loss`.
        policy: a `Policy` or the text of one.

    Returns:
        A loss function of the same signature.

    The idea is that of jmp, https://github.com/google-deepmind/jmp.

    >>> import torch
    >>> half = with_policy(lambda p, x: (p * x).sum(), "p=f32,c=f16,o=f32")
    >>> half(torch.tensor([0.1]), torch.ones(1))
    tensor(0.1000)
    """
    policy = Policy.parse(policy) if isinstance(policy, str) else policy
    if not isinstance(policy, Policy):
        raise TypeError(f"policy: found {type(policy).__name__}, expected a Policy or its text.")
    check_loss_fn(loss_fn)
    kept = _position(loss_fn, "buffers")

    @functools.wraps(loss_fn)
    @naming_frozen
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        dtype = policy.compute_dtype
        args = tuple(
            a if index == kept else _cast(a, dtype, f"loss_fn: argument {index}") for index, a in enumerate(args)
        )
        kwargs = {name: a if name == "buffers" else _cast(a, dtype, f"loss_fn: {name}") for name, a in kwargs.items()}
        out = loss_fn(*args, **kwargs)
        if isinstance(out, Loss):
            return with_fields(out, value=policy.cast_to_output(out.value))
        return policy.cast_to_output(out)

    return wrapped


def autocast(loss_fn: LossFn, dtype: torch.dtype, *, device_type: str | None = None) -> LossFn:
    """Runs a loss function under `torch.autocast`, which chooses the dtype op by op.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar or a `Loss`.
        dtype: float16 or bfloat16.
        device_type: "cuda" or "cpu"; by default that of the first tensor among the parameters.

    Returns:
        A loss function of the same signature. The gradients have the dtype of the parameters.

    Raises:
        TypeError: for a dtype that is not a floating-point `torch.dtype`.

    >>> import torch
    >>> autocast(lambda p, x: (x @ p).float().sum(), torch.bfloat16)(torch.ones(2, 1), torch.ones(1, 2))
    tensor(2.)
    """
    check_loss_fn(loss_fn)
    check_dtype(dtype, "dtype")
    if device_type is not None and not isinstance(device_type, str):
        raise TypeError(f"device_type: found {device_type!r}, expected 'cuda', 'cpu' or None for the parameters' own.")

    @functools.wraps(loss_fn)
    def wrapped(params: PyTree, *args: Any, **kwargs: Any) -> Any:
        device = device_type or next((p.device.type for p in flatten(params).leaves if isinstance(p, Tensor)), "cpu")
        with torch.autocast(device, dtype=dtype):
            return loss_fn(params, *args, **kwargs)

    return wrapped


def _position(function: Callable[..., Any], name: str) -> int | None:
    """The position of the parameter of that name; None without one, or where the signature cannot be read."""
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None
    return names.index(name) if name in names else None


def check_dtype(dtype: Any, name: str) -> None:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"{name}: found {dtype!r}, expected a floating-point torch.dtype such as torch.float16.")


def _dtype(name: str) -> torch.dtype:
    dtype = _DTYPES.get(name.strip())
    if dtype is None:
        raise ValueError(f"policy: found dtype {name.strip()!r}, expected one of {', '.join(_DTYPES)}.")
    return dtype
