"""The way back from a pure function to a module: trained values, copied in place."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from functional_amp.engine.sharded import local
from functional_amp.engine.storage import overlaps
from functional_amp.module.followed import check_memory, check_module
from functional_amp.module.templates import Tensors, registered
from functional_amp.torch_private import norm_layers, storage_key


def to_module(module: nn.Module, params: Tensors, buffers: Tensors | None = None) -> None:
    """Copies trained values into a module, in place: the way back from `from_module`.

    Args:
        module: the module that `from_module` was given, or one built alike.
        params: the parameters by name.
        buffers: the buffers by name, or None to leave the module's as they are, where none are running statistics.

    Raises:
        TypeError, ValueError: if names, shapes or kinds of number (bool, int, float, complex) do not fit, torch can not
            copy a value, or running statistics are left out; nothing has been written then.

    >>> import torch
    >>> module = torch.nn.Linear(1, 1)
    >>> to_module(module, {"weight": torch.full((1, 1), 3.0), "bias": torch.zeros(1)})
    >>> module.weight.item()
    3.0
    """
    check_module(module)
    tensors: Tensors = {}
    names: set[int] = set()
    for place, tensor in registered(module):
        if id(tensor) not in names:
            names.add(id(tensor))
            tensors[place] = tensor
    trainable = {name for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    check_names(params, trainable, "params")
    if buffers is None:
        _check_no_statistics(module)
    else:
        check_names(buffers, set(tensors) - trainable, "buffers")
    values = {**params, **(buffers or {})}
    for name, value in values.items():
        _check_target(name, tensors[name])
        _check_value(name, value, tensors[name])
    check_memory(tensors)
    taken = {storage_key(local(tensor)) for tensor in tensors.values()}
    with torch.no_grad():  # what lies in the memory of the module is read before any of it is written
        values = {name: v.clone() if storage_key(local(v)) in taken else v for name, v in values.items()}
        for name, value in values.items():
            tensors[name].copy_(value)


def _check_target(name: str, tensor: Tensor) -> None:
    """Raises TypeError for a tensor of the module that can not hold any values."""
    found = remedy = None
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        found, remedy = "no shape yet", "Run the module on one batch first"
    elif tensor.is_meta:
        found, remedy = "a meta tensor", "Give the module memory: module.to_empty(device=...)"
    elif tensor.is_inference() and not torch.is_inference_mode_enabled():
        found, remedy = "an inference tensor", "Call to_module inside torch.inference_mode()"
    elif tensor.layout == torch.strided and overlaps(local(tensor)):
        found = "several elements on the same bytes"
        remedy = "Give the module a copy: tensor.detach().clone(memory_format=torch.contiguous_format)"
    if found:
        raise TypeError(f"to_module: found {found} at {name!r} of the module, expected one to copy into. {remedy}.")


def _check_value(name: str, value: Tensor, tensor: Tensor) -> None:
    """Raises TypeError or ValueError for a value that does not fit a tensor of the module."""
    if value.shape != tensor.shape:
        raise ValueError(
            f"to_module: found shape {tuple(value.shape)} at {name!r}, expected {tuple(tensor.shape)}. "
            "Pass the values of a module built with the same sizes."
        )
    error = ""
    if value.layout == torch.strided and not value.is_meta and torch.can_cast(value.dtype, tensor.dtype):
        try:
            tensor.detach().clone().copy_(value.detach())
            return
        except (RuntimeError, TypeError, NotImplementedError) as refused:  # before anything is written
            error = f" ({refused})"
    raise TypeError(
        f"to_module: found a {value.dtype} tensor ({value.layout}, {value.device}) at {name!r}, expected one to copy "
        f"into {tensor.dtype}. Pass dense values of the same kind of number.{error}"
    )


def _check_no_statistics(module: nn.Module) -> None:
    """Raises ValueError for a module whose evaluation reads running statistics: training has moved them too."""
    for name, layer in module.named_modules():
        if isinstance(layer, norm_layers()) and layer.running_mean is not None:
            raise ValueError(
                f"to_module: found no buffers for the running statistics of {name!r}, expected those of training. Call "
                "to_module(module, state.params, state.buffers), or pass from_module(module).buffers to leave them."
            )


def check_names(found: Any, expected: Set[str], what: str) -> None:
    """Raises TypeError or ValueError unless tensors are given under exactly the names that are expected."""
    if not torch.compiler.is_compiling() and isinstance(found, dict):  # the rule, without a loop in Python
        if found.keys() == expected and set(map(type, found.values())) <= {Tensor, nn.Parameter}:
            return
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{what}: found {type(found).__name__}, expected a dict from names to tensors as from_module gives."
        )
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    if missing or extra:
        detail = "; ".join(f"{name} {places}" for name, places in (("missing", missing), ("extra", extra)) if places)
        raise ValueError(
            f"{what}: the names are not the module's: {detail}. Pass the dict that from_module gave, or its successor."
        )
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{what}: found {type(value).__name__} at {name!r}, expected a tensor. "
                "Pass the dict that from_module gave, or its successor; merge what split took apart."
            )
