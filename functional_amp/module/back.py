"""The way back from a pure function to a module: trained values, copied in place."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from functional_amp.module.followed import check_module
from functional_amp.module.templates import Tensors, registered
from functional_amp.torch_private import norm_layers


def to_module(module: nn.Module, params: Tensors, buffers: Tensors | None = None) -> None:
    """Copies trained values into a module, in place: the way back from `from_module`.

    Args:
        module: the module that `from_module` was given, or one built alike.
        params: the parameters by name.
        buffers: the buffers by name, or None to leave the module's as they are, where none are running statistics.

    Raises:
        TypeError, ValueError: if names, shapes or kinds of number do not fit, or running statistics are left out;
            nothing has been written then.

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
        if value.shape != tensors[name].shape:
            raise ValueError(
                f"to_module: found shape {tuple(value.shape)} at {name!r}, expected {tuple(tensors[name].shape)}. "
                "Pass the values of a module built with the same sizes."
            )
        if value.layout != torch.strided or value.is_meta or (value.is_complex() and not tensors[name].is_complex()):
            raise TypeError(
                f"to_module: found a {value.dtype} tensor ({value.layout}, {value.device}) at {name!r}, expected one "
                f"to copy into {tensors[name].dtype}. Pass dense values of the same kind of number."
            )
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


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
