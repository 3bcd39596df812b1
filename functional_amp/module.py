"""From an `nn.Module` to a pure function with its parameters and buffers, and back."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_amp.registry import with_fields

Tensors = dict[str, Tensor]


class FromModule(NamedTuple):
    """The forward as a function, the trainable parameters, and everything else the forward reads."""

    apply: Apply
    params: Tensors
    buffers: Tensors


@dataclass(frozen=True, eq=False)
class Apply:
    """The forward of a module as a pure function of its tensors.

        output          = apply(params, *args)                          # fixed buffers
        output, buffers = apply.with_buffers(params, buffers, *args)    # new ones are returned

    `apply.train()` and `apply.eval()` are the same function in the other mode.
    """

    template: nn.Module
    """A private copy on the meta device: the structure without the numbers."""
    places: Mapping[str, str]
    """Where each tensor goes: every attribute path of the module -> the name of its leaf."""
    buffers: Tensors
    frozen: frozenset[str]
    """The names among `buffers` that are parameters with requires_grad=False."""

    def __call__(self, params: Tensors, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with the buffers as they were in the module.

        Raises:
            RuntimeError: if the forward wrote to a buffer (BatchNorm in train mode does).
            ValueError: if names are missing among `params` or too many.
            TypeError: for a value that is no tensor.
        """
        given = self._copies(self.buffers)
        versions = {} if torch.compiler.is_compiling() else {name: b._version for name, b in given.items()}
        output, after = self._run(params, given, args, kwargs)
        compiling = torch.compiler.is_compiling()
        written = {name for name, b in given.items() if after[name] is not b}
        if not compiling:  # there are no version counters in a graph
            written |= {name for name, b in given.items() if b._version != versions[name]}
        # BatchNorm's kernel moves no version counter: its count of batches tells, where there is one to read.
        written |= set(_running_statistics(self.template, counted=compiling or bool(written)))
        written = [name for name in given if name in written]
        if written:
            raise RuntimeError(
                f"apply: the module wrote to its buffers {written}, and this form does not return them. "
                "Use output, buffers = apply.with_buffers(params, buffers, ...), or apply.eval()."
            )
        return output

    def with_buffers(self, params: Tensors, buffers: Tensors, /, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        """Runs the forward with the given buffers, which are not changed.

        Returns:
            The output, and the buffers after it under the same names.

        Raises:
            ValueError: if names are missing among `params` or `buffers`, or too many.
        """
        _check_names(buffers, set(self.buffers), "buffers")
        return self._run(params, self._copies(buffers), args, kwargs)

    def train(self, mode: bool = True) -> Apply:
        """The same function in train mode (dropout on, BatchNorm on batch statistics)."""
        with _alone_in(self.template):
            template = copy.deepcopy(self.template)
        return with_fields(self, template=template.train(mode))

    def eval(self) -> Apply:
        """The same function in eval mode."""
        return self.train(False)

    def _copies(self, buffers: Tensors) -> Tensors:
        """functional_call lets the module write into what it is given."""
        return {name: b if name in self.frozen else b.clone() for name, b in buffers.items()}

    def _run(
        self, params: Tensors, buffers: Tensors, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Tensors]:
        _check_names(params, set(self.places.values()) - set(self.buffers), "params")
        tensors = {**params, **buffers}
        placed = {place: tensors[name] for place, name in self.places.items()}
        # Each attribute is named once, so that shared submodules are restored after the call.
        with _alone_in(self.template):
            output = torch.func.functional_call(self.template, placed, args, kwargs, tie_weights=False)
        # A buffer that the module assigned anew stands in `placed` now; of tied ones the first counts.
        return output, {name: placed[name] for name in buffers}


_LOCKS: MutableMapping[nn.Module, Any] = weakref.WeakKeyDictionary()
_MAKING = threading.Lock()


def _alone_in(template: nn.Module) -> AbstractContextManager[Any]:
    """Keeps other threads out of a template: while `functional_call` runs, its tensors are those of one caller."""
    if torch.compiler.is_compiling():  # a graph puts nothing into the module
        return nullcontext()
    with _MAKING:
        return _LOCKS.setdefault(template, threading.RLock())


def from_module(module: nn.Module) -> FromModule:
    """Takes a module apart into a pure function and its tensors. The module is never changed.

    Args:
        module: any `nn.Module`, in the mode (train or eval) that the function is to have. Lazy modules
            must have seen an input.

    Returns:
        apply: the forward; see `Apply`.
        params: the trainable parameters by name, detached copies; tied weights are one leaf.
        buffers: the buffers by name, and the frozen parameters (`requires_grad=False`): what is not
            differentiated, not in the norm and not decayed.

    Raises:
        TypeError: for anything that is no module, or a lazy module without shapes.

    >>> import torch
    >>> apply, params, buffers = from_module(torch.nn.Linear(2, 1))
    >>> sorted(params), apply(params, torch.ones(3, 2)).shape
    (['bias', 'weight'], torch.Size([3, 1]))
    """
    _check_module(module)
    places, params, buffers, frozen = {}, {}, {}, set()
    names: dict[int, str] = {}
    meta: dict[int, Any] = {}
    for place, tensor in _attributes(module):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise TypeError(f"module: {place!r} has no shape yet. Run the module on one batch first.")
        first = names.setdefault(id(tensor), place)
        places[place] = first
        if first != place:
            continue
        if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
            params[place] = tensor.detach().clone()
        else:
            buffers[place] = tensor.detach().clone()
        if isinstance(tensor, nn.Parameter):
            frozen |= set() if tensor.requires_grad else {place}
            meta[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
        else:
            meta[id(tensor)] = tensor.detach().to("meta")
    template = copy.deepcopy(module, meta)
    return FromModule(Apply(template, places, dict(buffers), frozenset(frozen)), params, buffers)


def to_module(module: nn.Module, params: Tensors, buffers: Tensors | None = None) -> None:
    """Copies trained values into a module, in place: the way back from `from_module`.

    Args:
        module: the module that `from_module` was given, or one built alike.
        params: the parameters by name.
        buffers: the buffers by name, or None to leave the module's as they are.

    Raises:
        TypeError, ValueError: if names, shapes or kinds of number do not fit; nothing has been written then.

    >>> import torch
    >>> module = torch.nn.Linear(1, 1)
    >>> apply, params, buffers = from_module(module)
    >>> to_module(module, {"weight": torch.full((1, 1), 3.0), "bias": torch.zeros(1)})
    >>> module.weight.item()
    3.0
    """
    _check_module(module)
    tensors: Tensors = {}
    names: set[int] = set()
    for place, tensor in _attributes(module):
        if id(tensor) not in names:
            names.add(id(tensor))
            tensors[place] = tensor
    trainable = {name for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    _check_names(params, trainable, "params")
    if buffers is not None:
        _check_names(buffers, set(tensors) - trainable, "buffers")
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


def _attributes(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Every parameter and buffer attribute once, submodules that stand at two names under the first."""
    return [
        (f"{prefix}.{name}" if prefix else name, tensor)
        for prefix, submodule in module.named_modules()
        for tensors in (submodule._parameters, submodule._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]


def _running_statistics(module: nn.Module, *, counted: bool) -> list[str]:
    """The buffers that normalization layers in train mode write to; without those that count batches, unless asked."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.training and layer.track_running_stats
        if counted or layer.num_batches_tracked is None
        for name in layer._buffers
    ]


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: found {type(module).__name__}, expected a torch.nn.Module.")


def _check_names(found: Any, expected: set[str], what: str) -> None:
    if not isinstance(found, Mapping):
        raise TypeError(
            f"{what}: found {type(found).__name__}, expected a dict from names to tensors as from_module gives."
        )
    missing, extra = sorted(expected - set(found)), sorted(set(found) - expected)
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
