"""A module in another mode: `train()` and `eval()` may set flags, of a copy that has no numbers."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from functional_amp.module.copies import shared
from functional_amp.module.reach import KNOWN, walk
from functional_amp.module.rehearsal import FLAGS
from functional_amp.module.templates import registered


class Known(NamedTuple):
    """What is known of a module in all its modes.

    Attributes:
        origin: the tensors of the module that `from_module` was given, by name, held weakly.
        scratch: the attributes that a forward may write, as the user names them.
        kept: the places of those that rehearsals find to be written before they are read.
        moved: the buffers that a forward writes to.
        marks: the attributes of parameters and buffers, by the names of these.
    """

    origin: Mapping[str, weakref.ref[Tensor]]
    scratch: frozenset[str]
    kept: set[str]
    moved: set[str]
    marks: Mapping[str, dict[str, Any]]


class _Untouched(TorchFunctionMode):
    """Refuses whatever computes with tensors of a module."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KNOWN and func not in FLAGS:
            for _, found in walk((args, kwargs)):
                if id(found) in self._names:
                    _refuse([self._names[id(found)]])
        return func(*args, **(kwargs or {}))


def in_mode(master: nn.Module, switch: Callable[[nn.Module], Any]) -> nn.Module:
    """A copy of a private copy of a module, on which `train()` or `eval()` has been called.

    Raises:
        RuntimeError: where these compute with tensors, replace them, or freeze them.
    """
    with torch.inference_mode(False):  # its constants are used by derivatives too
        switched = copy.deepcopy(master, shared(master))
    before = registered(switched)
    flags = [tensor.requires_grad for _, tensor in before]
    with _Untouched({id(tensor): place for place, tensor in before}):
        switch(switched)
    after = {place: (id(tensor), tensor.requires_grad) for place, tensor in registered(switched)}
    known = {place: (id(tensor), flag) for (place, tensor), flag in zip(before, flags, strict=True)}
    _refuse(sorted(place for place in {**known, **after} if known.get(place) != after.get(place)))
    return switched


def _refuse(places: list[str]) -> None:
    if places:
        raise RuntimeError(
            f"apply: found that train() or eval() of the module changes {places} or computes with them, expected that "
            "they set flags alone: between calls there are no numbers. Freeze, merge or fuse before from_module; or "
            "write to_module(module, params, buffers) and call module.eval(), to evaluate the module itself."
        )
