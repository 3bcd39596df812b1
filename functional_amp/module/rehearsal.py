"""What a rehearsal needs: copies, a watch over what is read, a comparison, and the errors for what it finds."""

from __future__ import annotations

import bisect
import copy
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from functional_amp.engine.unwritten import versions_of
from functional_amp.mode import transformed
from functional_amp.module.copies import memory
from functional_amp.module.reach import walk
from functional_amp.module.templates import Tensors
from functional_amp.torch_private import norm_layers, saved_tensors_are_hooked, unwrapped


class Originals:
    """The tensors of the original module, and where they lie."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = dict(tensors)  # alive meanwhile: what is freed gives its id and its memory to others
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        spans = sorted((*span, name) for name, tensor in tensors.items() if (span := memory(unwrapped(tensor))))
        self._starts, self._spans = [start for start, _, _ in spans], spans

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of one of them, and of what lies in the memory of one: a view or a detached alias."""
        name = self._names.get(id(tensor))
        if name is None and (span := memory(unwrapped(tensor))):
            index = bisect.bisect_left(self._starts, span[1]) - 1  # the last one that starts before it ends
            if index >= 0 and self._spans[index][1] > span[0]:
                name = self._spans[index][2]
        return name

    def refuse(self, tensor: Tensor) -> None:
        """Raises RuntimeError for one of them, or for what lies in its memory."""
        if (name := self.name_of(tensor)) is not None:
            raise RuntimeError(
                f"apply: found that the forward reads {name!r} of the original module (through a global, say), "
                "expected attributes of its own. Read it through self, or pass it as an argument."
            )


FLAGS = (Tensor.requires_grad_, cast(Any, Tensor.requires_grad).__set__)
_GRAD = cast(Any, Tensor.grad)
_OF_GRADIENTS = (_GRAD.__get__, _GRAD.__set__, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
_DATA, _NEW_DATA = cast(Any, Tensor.data).__get__, cast(Any, Tensor.data).__set__


class Watch(TorchFunctionMode):
    """Refuses what a copy can not follow: the original's own tensors, and checkpoints that give no gradient."""

    def __init__(self, original: Mapping[str, Tensor], placed: Mapping[str, Tensor], trainable: Collection[str]):
        super().__init__()
        self._originals = Originals(original)
        self._placed, self._copies = {id(tensor): name for name, tensor in placed.items()}, Originals(placed)
        self._trainable = trainable
        self._data: list[tuple[str, Tensor, list[int]]] = []
        self._given_memory: set[str] = set()

    @property
    def written(self) -> set[str]:
        """What was written to through `.data`, which moves no version counter of the tensor's own."""
        return self._given_memory | {name for name, data, before in self._data if versions_of([data]) != before}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for found in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(found, Tensor):
                    self._originals.refuse(found)
        if func in FLAGS and (name := self._placed.get(id(args[0]))) is not None:
            if name in self._trainable or (*args[1:], *kwargs.values(), True)[0]:
                _refuse_flag(name)
        if func in _OF_GRADIENTS and (name := self._placed.get(id(args[0]))) in self._trainable:
            if sys._getframe(1).f_code.co_name != "_apply":  # that of module.to(), which moves a gradient as well
                _refuse_gradient(name)
        if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
            raise RuntimeError(
                "apply: found a reentrant checkpoint, expected one that gives gradients to parameters. Call "
                "checkpoint(..., use_reentrant=False); in transformers "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
        if func not in (_DATA, _NEW_DATA):
            return func(*args, **kwargs)
        name = self._copies.name_of(args[0])
        if func == _DATA:
            data = func(*args, **kwargs)
            if name is not None:
                self._data.append((name, data, versions_of([data])))
            return data
        if name is not None and memory(unwrapped(args[0])) != memory(unwrapped(args[1])):
            self._given_memory.add(name)
        return func(*args, **kwargs)


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def unseen_by_checkpoints() -> Iterator[None]:
    """Keeps what a trial saves for a backward from the hooks of a checkpoint around the call, which count it."""
    if not saved_tensors_are_hooked():  # and torch.func in the forward forbids hooks
        yield
        return
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
        yield
    saved.clear()  # an output that its own node saves would keep itself alive


def copied(arguments: Any) -> Any:
    """A copy of the arguments, in which tensors with a history keep it."""
    memo = {id(obj): obj.clone() for _, obj in walk(arguments) if isinstance(obj, Tensor)}
    try:
        return copy.deepcopy(arguments, memo)
    except Exception as error:
        raise TypeError(
            f"apply: found an argument that can't be copied ({type(error).__name__}: {error}), expected tensors and "
            "plain values: the first call is rehearsed on copies. Pass a list in place of a generator or an iterator."
        ) from error


def own_leaf(tensor: Tensor) -> Tensor:
    """A copy of a tensor, which is a leaf where it is one."""
    if not tensor.is_leaf or transformed():
        return tensor.clone()
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def written_to(given: Tensors, after: Mapping[str, Any], versions: list[int]) -> set[str]:
    """The names of what was written to in place, and of what was assigned anew."""
    if versions_of(given.values()) == versions and all(map(is_, map(after.get, given), given.values())):
        return set()
    return {
        name
        for (name, tensor), old, new in zip(given.items(), versions, versions_of(given.values()), strict=True)
        if old != new or after[name] is not tensor
    }


def refuse_marks(copies: Tensors) -> None:
    for name, tensor in copies.items():
        own = vars(tensor).keys() - {"_is_param"}  # of a function that the module calls, which lends until the backward
        if type(tensor) is Tensor and own:
            refuse_set(name, sorted(own))


def refuse_set(name: str, attributes: list[str]) -> None:
    raise RuntimeError(
        f"apply: found that the forward sets the attributes {attributes} of {name!r}, expected one that leaves it: the "
        "next call lays another tensor in. Register a buffer in __init__ for what is kept; hook the output of a layer."
    )


def refuse_public(marks: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises RuntimeError for attributes of parameters: a graph lays in none. Private ones are marks of libraries."""
    for name, found in marks.items():
        if public := sorted(key for key in found if not key.startswith("_")):
            raise RuntimeError(
                f"apply: found the attributes {public} of {name!r} in a graph, expected none: a graph has the tensors "
                "alone. Let the layer hold them; or remove them (del) before from_module, if no forward reads them."
            )


def refuse_gone(written: Iterable[str], after: Mapping[str, Any]) -> None:
    if names := sorted(name for name in written if not isinstance(after[name], Tensor)):
        raise RuntimeError(
            f"apply: found that the forward deletes {names} or sets them to None, expected tensors: a state keeps its "
            "structure. Write zeros in place, and keep whether they count in a second buffer."
        )


def _refuse_flag(name: str) -> None:
    raise RuntimeError(
        f"apply: found that the forward sets requires_grad of {name!r}, expected one that leaves it: parameters are "
        "values here, and the caller's. To freeze a layer for one use, write torch.func.functional_call(self.layer, "
        "{name: p.detach() for name, p in self.layer.named_parameters()}, x); for good, freeze it before from_module."
    )


def _refuse_gradient(name: str | None) -> None:
    raise RuntimeError(
        f"apply: found that the forward asks for the gradient of {name!r} or hooks it, expected one that leaves it: "
        "gradients are values here, and none is kept at a parameter. Hook the output of the layer; change "
        "gradients in a Transform of chain; where a forward reads some, pass them as an argument."
    )


def refuse_lost(names: Iterable[str]) -> None:
    if names := list(names):
        raise RuntimeError(
            f"apply: found that the module wrote to its buffers {names}, expected fixed ones: this form does "
            "not return them. Use output, buffers = apply.with_buffers(params, buffers, ...), or apply.eval()."
        )


def refuse_statistics(names: list[str]) -> None:
    if names:
        raise RuntimeError(
            f"apply: found running statistics {names} as they were in the module, expected to be told which: "
            "training moves them. Use apply.bind(buffers)(params, ...) with the buffers of the state, or those "
            "that from_module gave; or apply.with_buffers(params, buffers, ...)."
        )


def refuse_writes(names: set[str], hint: str = "") -> None:
    if names:
        raise RuntimeError(
            f"apply: found that the forward writes to its parameters {sorted(names)}, expected one that reads them: "
            "what is given is never changed. Apply a constraint (max_norm, say) to the params in the loss function, "
            "before apply." + hint
        )


def refuse_changes(names: Iterable[str], hint: str = "") -> None:
    if names := sorted(names):
        raise RuntimeError(
            f"apply: found that the forward keeps something at {names}, expected state in buffers: the next call would "
            "not find it. Register a buffer in __init__ and use apply.with_buffers; where it is a cache, run the "
            "module once before from_module; if it is only kept for others to read, from_module(module, scratch=(...))."
            + hint
        )


def refuse_in_backward(names: Iterable[str]) -> None:
    if names := sorted(names):
        raise RuntimeError(
            f"apply: found that the backward (a hook, say) keeps something at {names}, expected state in buffers: the "
            "next call would not find it. Register a buffer in __init__, write to it in place and use "
            "apply.with_buffers; if it is only kept for others to read, from_module(module, scratch=(...))."
        )


def refuse_averages(module: nn.Module) -> None:
    """Raises RuntimeError for layers that read on the host which number a batch has: a graph can't be left for it."""
    for name, layer in module.named_modules():
        if isinstance(layer, norm_layers()) and layer.momentum is None and layer.training and layer.track_running_stats:
            raise RuntimeError(
                f"apply: found momentum=None of the {type(layer).__name__} at {name!r} in a graph, expected a number: "
                "the factor of a plain average is read on the host. Set a momentum such as 0.1 before from_module; or "
                "leave the graph for it, compile={'fullgraph': False}; or do not compile."
            )
