"""The parts of torch without a promise of stability that `explain` stands on, each in one place."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from functional_amp.torch_private import storage_key as storage_key
from functional_amp.torch_private import torch_pytree

DispatchMode = TorchDispatchMode
"""A context in which every operator passes through `__torch_dispatch__`, below autograd and torch.func."""

to_copy: Any = torch.ops.aten._to_copy.default
"""The operator of a cast to another dtype."""

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


def schema_of(operator: Any) -> Any:
    """What an operator's arguments and results are, and which of them it writes to; None for a higher-order one."""
    return getattr(operator, "_schema", None)


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled in this process: importing the compiler takes a second."""
    return "torch._dynamo" in sys.modules


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
