"""What `from_module` takes: a copy of a module that reaches nothing of the original, or an error that says why not."""

from __future__ import annotations

import copy
import types
import weakref
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from functional_amp.module.copies import (
    can_be_copied,
    detach_recurrent,
    memory,
    refuse_loss,
    refuse_moving,
    refuse_tables,
    shared,
)
from functional_amp.module.reach import Slots, absent, walk
from functional_amp.module.templates import Tensors, registered
from functional_amp.module.watched import is_buffer

_KINDS = {
    "DataParallel": "Pass its .module; each process or device then has a step of its own",
    "DistributedDataParallel": "Pass its .module, and add the gradients of the ranks in the step",
    "FullyShardedDataParallel": "Pass the module before it is wrapped, and shard the params as DTensors",
    "FSDPModule": "Pass the module before fully_shard, and shard the params as DTensors",
    "ScriptModule": "Pass the module that was scripted or traced, and compile the step",
    "OptimizedModule": "Pass its ._orig_mod, and compile the step: make_step(..., compile=True)",
}
_STALE = (
    "before it is computed, expected the forward to compute it first: it is a view of a parameter, or was computed "
    "from one, and a copy of the module has no numbers of its own. Compute it in the forward."
)


_LINKS = (
    "expected a module that reaches itself through attributes, lists, dicts, bound methods and partials alone. "
    "Make the function a method, or write functools.partial(function, self); hold the module in a list; delete what "
    "no forward reads."
)


def own_copy(module: nn.Module) -> nn.Module:
    """A copy of a module that reaches nothing of the original, with its tensors on the meta device.

    Constants (tensors that are neither parameters nor buffers) keep their values. What can not be copied
    and leads nowhere, a lock or a script function, is shared.

    Raises:
        TypeError: for what can not be copied, and for a copy that would reach the original.
    """
    tensors = {id(tensor): tensor for _, tensor in registered(module)}
    places = {id(tensor): place for place, tensor in reversed(registered(module))}
    taken = sorted(span for tensor in tensors.values() if (span := memory(tensor)))
    memo: dict[int, Any] = {}
    for key, tensor in tensors.items():
        meta = tensor.detach().to("meta")
        memo[key] = nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta
    for path, obj in walk(module):
        if type(obj) in weakref.ProxyTypes:
            raise TypeError(f"module: found a weak proxy at {path!r}, {_LINKS}")
        if isinstance(obj, types.BuiltinMethodType) and (isinstance(obj.__self__, Tensor) or is_buffer(obj.__self__)):
            raise TypeError(f"module: found a method of a {type(obj.__self__).__name__} at {path!r}, {_LINKS}")
        if id(obj) in memo:
            continue
        span = memory(obj)
        overlaps = span is not None and any(span[0] < end and start < span[1] for start, end in taken)
        if isinstance(obj, Tensor):
            if overlaps or not obj.is_leaf:
                memo[id(obj)] = absent(path, _STALE, obj.shape, obj.dtype)
        elif overlaps:
            raise TypeError(
                f"module: found the memory of a parameter or buffer behind the {type(obj).__name__} at {path!r}, "
                "expected tensors alone: each call has other ones. Make it in the forward, of the tensor itself."
            )
    memo |= shared(module)
    copies = dict(memo)
    try:
        copied = copy.deepcopy(module, copies)
    except Exception as error:
        raise TypeError(
            f"module: found {_unfollowed(module, memo)!r}, of which copy.deepcopy gives {type(error).__name__} "
            f"({error}), expected attributes that can be copied. Give its class a __deepcopy__, make it in the "
            "forward, or hold a list in its place."
        ) from error
    detach_recurrent(copied)
    _refuse_links(copied, {id(layer): "the module itself" for layer in module.modules()} | places)
    refuse_moving(module, copied)
    refuse_tables(module, places, copies)
    refuse_loss(module, copies)
    return copied


def _refuse_links(copied: nn.Module, original: dict[int, str]) -> None:
    for path, obj in walk(copied):
        if id(obj) in original:
            raise TypeError(f"module: found {original[id(obj)]!r} behind {path!r}, {_LINKS}")


def _unfollowed(module: nn.Module, memo: dict[int, Any]) -> str:
    """The first attribute that deepcopy refuses."""
    for prefix, layer in module.named_modules():
        for key, value in vars(layer).items():
            if key != "_modules" and not can_be_copied(value, dict(memo)):
                return f"{prefix}.{key}".removeprefix(".")
    return type(module).__name__


def check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: found {type(module).__name__}, expected a torch.nn.Module.")


def check_kinds(module: nn.Module) -> None:
    for place, layer in module.named_modules():
        for kind in type(layer).__mro__:
            if kind.__name__ in _KINDS and kind.__module__.startswith("torch."):
                raise TypeError(
                    f"module: found {kind.__name__} at {place!r}, expected a plain module. {_KINDS[kind.__name__]}."
                )
        if slots := list(Slots(layer)):
            raise TypeError(
                f"module: found __slots__ {slots} in the {type(layer).__name__} at {place!r}, expected attributes: "
                "copy.deepcopy of a module leaves them out. Remove __slots__ from the class."
            )


def check_tensor(place: str, tensor: Tensor) -> None:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        raise TypeError(f"module: {place!r} has no shape yet. Run the module on one batch first.")
    if type(tensor) is not nn.Parameter and type(tensor.detach()) is not type(tensor):
        raise TypeError(
            f"module: found a {type(tensor).__name__} at {place!r}, expected an nn.Parameter, or a class of tensors "
            "that detach() keeps: each call lays other tensors in. Make it an nn.Parameter; its layer may hold more."
        )
    if not tensor.is_leaf:
        raise TypeError(
            f"module: found a history behind {place!r}: it was computed from what requires grad, expected numbers "
            "alone: a gradient would stop at it. Register its .detach(), or compute it in the forward."
        )
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise TypeError(
            f"module: found a gradient hook on {place!r}, expected none: gradients are values here, and pass no hook. "
            "Remove it (handle.remove()), and say the same in the loss function: to freeze rows, give apply "
            "torch.where(mask, weight, weight.detach())."
        )


def marks_of(place: str, tensor: Tensor) -> dict[str, Any]:
    """The attributes of a plain tensor, as people set them on parameters.

    Raises:
        TypeError: for more than numbers, strings and tuples of them.
    """
    found = dict(vars(tensor)) if type(tensor) in (Tensor, nn.Parameter) else {}
    if "_is_buffer" in found:  # of nn.Buffer, for the layer that registers it
        found.pop("persistent", None)
    for name, value in found.items():
        if not all(isinstance(obj, (tuple, frozenset)) for _, obj in walk((value,))):
            raise TypeError(
                f"module: found a {type(value).__name__} as the attribute {name!r} of {place!r}, expected numbers, "
                "strings or tuples of them: each call lays other tensors in. Let the layer hold it, or remove it."
            )
    return found


def check_memory(tensors: Tensors) -> None:
    """Raises TypeError for two tensors over one memory, which would be two leaves from now on."""
    spans = [(span, name) for name, tensor in tensors.items() if (span := memory(tensor))]
    spans.sort(key=lambda entry: entry[0])
    for ((_, end), first), ((start, _), second) in pairwise(spans):
        if start < end:
            raise TypeError(
                f"module: found one memory under {first!r} and {second!r}, expected one tensor at both places. "
                "Tie them by the parameter itself: decoder.weight = encoder.weight."
            )
