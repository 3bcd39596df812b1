"""The parts of torch without a promise of stability that `explain` stands on, each in one place."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""A context in which every operator passes through `__torch_dispatch__`, below autograd and torch.func."""

flatten = torch_pytree.tree_flatten
unflatten = torch_pytree.tree_unflatten


def running_node() -> Any:
    """The autograd node whose backward runs in this thread, or None."""
    return torch._C._current_autograd_node()


def next_sequence_number() -> int:
    """The number that the next autograd node made in this thread will get."""
    return torch.autograd._get_sequence_nr()


def sequence_number(node: Any) -> int:
    """The number that an autograd node got when the forward made it."""
    return node._sequence_nr()


def storage_key(tensor: Tensor) -> int:
    """One number for all the views of a memory; unique while any of them is alive."""
    return tensor.untyped_storage()._cdata


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor has elements to read. Forward mode makes zeros that have none: reading one crashes."""
    return tensor.layout == torch.strided and not tensor.is_meta and not tensor._is_zerotensor()


@functools.cache
def dispatches_itself(kind: type) -> bool:
    """Whether a class of tensors has operators of its own, made of plain ones."""
    own = getattr(kind, "__torch_dispatch__", None)
    return kind is not Tensor and own is not torch._C._disabled_torch_dispatch_impl


@functools.cache
def is_traced(kind: type) -> bool:
    """Whether a class of tensors has no values: torch traces a higher-order operator (a scan) with them."""
    return issubclass(kind, (FakeTensor, FunctionalTensor))
