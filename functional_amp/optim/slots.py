"""What an imperative optimizer keeps under a key, as plain tensors: a tensor, a number, a tensor made of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_amp.checks import is_number
from functional_amp.engine.sharded import is_sharded
from functional_amp.torch_private import is_wrapper

_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Python's numbers are kept exactly, on the CPU, where torch keeps them too."""


class Slot(NamedTuple):
    """How a value is kept.

    Attributes:
        key: the optimizer's name for it.
        names: of the tensors that it is kept as; none for a constant.
        number: bool, int or float where it is a Python number.
        value: the constant, or a sample of a tensor made of others.
    """

    key: str
    names: tuple[str, ...]
    number: type | None = None
    value: Any = None

    def encoded(self, value: Any) -> dict[str, Tensor]:
        """The tensors that a value is kept as."""
        if self.number is not None:
            return {self.key: torch.tensor(value, dtype=_NUMBERS[self.number], device="cpu")}
        if not self.names:
            return {}
        return dict(zip(self.names, _parts(value), strict=True))

    def decoded(self, tensors: Mapping[str, Tensor]) -> Any:
        """The value, which shares the memory of the tensors."""
        if self.number is not None:
            return tensors[self.key].item()
        if not self.names:
            return self.value
        if self.names == (self.key,):
            return tensors[self.key]
        inner, context = self.value.__tensor_flatten__()
        parts = {name: tensors[full] for name, full in zip(inner, self.names, strict=True)}
        return type(self.value).__tensor_unflatten__(parts, context, self.value.shape, self.value.stride())

    def write(self, value: Any, tensors: Mapping[str, Tensor]) -> bool:
        """Writes a value into the tensors that it is kept as; False where it is of another kind than before."""
        if isinstance(value, Tensor) and tensors.get(self.key) is value:  # written in place
            return True
        if self.number is not None:
            if is_number(value) or isinstance(value, bool):
                tensors[self.key].fill_(value)
                return True
            return False
        if not self.names:
            return value is self.value or (not isinstance(value, Tensor) and value == self.value)
        if not isinstance(value, Tensor):
            return False
        parts = _parts(value)
        if [_kind(part) for part in parts] != [_kind(tensors[name]) for name in self.names]:
            return False
        for part, name in zip(parts, self.names, strict=True):
            if part is not tensors[name]:
                tensors[name].copy_(part)
        return True


def slot_of(key: Any, first: Any, after: Any) -> Slot | None:
    """How to keep what was `first` and is `after` one step; None where it is neither tensor, number nor constant."""
    if not isinstance(key, str):
        return None
    if isinstance(after, Tensor):
        if not _is_wrapper(after):
            return Slot(key, (key,))
        inner = after.__tensor_flatten__()[0]  # pyright: ignore[reportAttributeAccessIssue]
        plain = all([not is_wrapper(getattr(after, name)) for name in inner])
        return Slot(key, tuple(f"{key}.{name}" for name in inner), value=kept(after)) if plain else None
    numbers = [type(value) for value in (first, after) if value is not None]
    if numbers and all([number in _NUMBERS for number in numbers]):
        return Slot(key, (key,), number=max(numbers, key=list(_NUMBERS).index))
    return Slot(key, (), value=after) if after is None or (isinstance(after, str) and first == after) else None


def kept(value: Any) -> Any:
    """A copy of a value as it is now."""
    if not isinstance(value, Tensor):
        return value
    if not _is_wrapper(value):
        return value.detach().clone()
    inner, context = value.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    parts = {name: getattr(value, name).clone() for name in inner}
    return type(value).__tensor_unflatten__(  # pyright: ignore[reportAttributeAccessIssue]
        parts, context, value.shape, value.stride()
    )


def _parts(value: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor is made of: itself, or those inside a wrapper."""
    if not _is_wrapper(value):
        return [value]
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]  # pyright: ignore[reportAttributeAccessIssue]


def _is_wrapper(value: Tensor) -> bool:
    if type(value) in (Tensor, nn.Parameter) or is_sharded(value):
        return False
    return is_wrapper(value)


def _kind(tensor: Tensor) -> Any:
    return tensor.shape, tensor.dtype, tensor.device
