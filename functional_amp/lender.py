"""Lending templates to calls; and the rehearsal, in which a module shows what it does beside giving an output."""

from __future__ import annotations

import copy
import random
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from functional_amp.loans import kept
from functional_amp.reach import Absent, absent, is_object, walk
from functional_amp.templates import Change, Template, Tensors, registered, slots, uncopyable
from functional_amp.transform import transformed

_TAKEN_OUT = (
    "where its numbers are not, expected it to be read in the call, as an attribute or in a list or dict. Take it out "
    "of tuples, sets and slots; differentiate checkpoints with scale_backward(..., backend='autograd')."
)


class Lender:
    """The templates of one module in one mode, and what rehearsals found out about it.

    Attributes:
        master: the module with its tensors on the meta device, of which the templates are copied.
        origin: the tensors of the module that `from_module` was given, by name, held weakly.
        scratch: the attributes that a forward may write: those that the user names, and those that a
            rehearsal finds to be written before they are read.
        names: the name of each tensor of the master, by its id.
        plan, kept: the slots and the scratch of the master itself, for graphs, which are traced with it.
        statistics: the buffers in which normalization layers keep running statistics.
        written: the buffers that the forward writes to.
        moved: the same, for all modes together.
    """

    def __init__(
        self, master: nn.Module, origin: Mapping[str, weakref.ref[Tensor]], scratch: Iterable[str], moved: set[str]
    ):
        self.master, self.origin, self.scratch, self.moved = master, origin, set(scratch), moved
        self.written: set[str] = set()
        self.names: dict[int, str] = {}
        self._rehearsed: set[tuple[str, bool]] = set()
        self._memo: dict[int, Any] = uncopyable(master)
        self._absent: dict[int, str] = {}
        for place, tensor in registered(master):
            if id(tensor) not in self.names:
                made = absent(place, _TAKEN_OUT, tensor.shape, tensor.dtype, isinstance(tensor, nn.Parameter))
                self.names[id(tensor)] = self._absent[id(made)] = place
                self._memo[id(tensor)] = made
        self._shared = {id(obj) for _, obj in walk(master)}
        # What stands for a stale value can't be read: a forward that passes has written it first.
        self.scratch |= {path for path, obj in walk(master) if isinstance(obj, Absent)}
        self._constants = {
            path: obj
            for path, obj in walk(master, lambda obj: is_object(obj) and not isinstance(obj, nn.Module))
            if isinstance(obj, Tensor) and not isinstance(obj, Absent) and id(obj) not in self.names
        }
        self._memo.update({id(constant): constant for constant in self._constants.values()})
        self._as_made = _versions(self._constants.values())
        self.plan = slots(master, self.names)
        self.kept = self._places_of_scratch()
        norms = [layer for layer in master.modules() if isinstance(layer, nn.modules.batchnorm._NormBase)]
        norms = [layer for layer in norms if layer.track_running_stats]
        self.writes_statistics = any(layer.training for layer in norms)
        self.statistics = {self.names[id(b)] for layer in norms for b in layer._buffers.values() if b is not None}
        self._free = [self._make({})]

    def __getstate__(self) -> dict[str, Any]:
        return {"master": self.master, "scratch": self.scratch, "moved": self.moved}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["master"], {}, state["scratch"], state["moved"])

    def __deepcopy__(self, memo: Any) -> Lender:
        return Lender(copy.deepcopy(self.master, memo), self.origin, self.scratch, self.moved)

    def call(
        self, params: Tensors, buffers: Tensors, frozen: frozenset[str], method: str, args: Any, kwargs: Any
    ) -> tuple[Any, Tensors, set[str]]:
        """Runs the forward with the tensors in their places.

        Args:
            params, buffers: the tensors by name. The forward gets copies of the buffers.
            frozen: the names among the buffers that are copied only where the forward is known to write to them.
            method: the name of a method, or "" for the module's call.

        Returns:
            The output, the buffers after it, and the names of those that this call wrote to.

        Raises:
            RuntimeError: where the forward wrote to anything but buffers.
        """
        if (method, torch.is_grad_enabled()) not in self._rehearsed:
            self._rehearse({**params, **buffers}, params, method, args, kwargs)
        fixed = frozen - self.written if self.written else frozen
        tensors = {**params, **{name: b if name in fixed else b.clone() for name, b in buffers.items()}}
        try:
            template = self._free.pop()
        except IndexError:
            template = self._make({})
        versions = _versions(tensors.values())
        template.place(tensors)
        try:
            output = template.run(method, args, kwargs)
        except BaseException:
            self._take_back(template)
            raise
        after = template.take_out()
        changes = [] if template.unchanged() else template.changes()
        if changes:
            template.put_back()
        written = _written(tensors, after, versions)
        try:
            if written:
                refuse_writes(written & {*params, *fixed})
            moved = [] if _versions(self._constants.values()) == self._as_made else list(self._constants)
            refuse_changes([*moved, *(change.name for change in changes if not self.is_scratch(change.name))])
        except RuntimeError:
            self._free.append(template)
            raise
        self.written |= written
        self.moved |= written
        self._lend(template, {**tensors, **{name: after[name].detach() for name in written}}, output)
        return output, {name: after[name] for name in buffers}, written

    def state_dict(self, tensors: Tensors) -> dict[str, Any]:
        """The module's own state dict, of the given tensors."""
        template = self._make({})
        template.place(tensors)
        return template.module.state_dict()

    def _make(self, constants: Mapping[int, Tensor]) -> Template:
        return Template(self.master, {**self._memo, **constants}, self._absent, self._shared)

    def _take_back(self, template: Template) -> None:
        template.take_out()
        template.put_back()
        self._free.append(template)

    def _lend(self, template: Template, tensors: Tensors, output: Any) -> None:
        """Leaves the tensors in the template for as long as a backward may run parts of the forward again."""
        if kept(lambda: self._take_back(template)):
            template.place(tensors)
            return
        nodes = _nodes(output) if torch.is_grad_enabled() and not transformed() else []
        if not nodes:
            self._free.append(template)
            return
        template.place(tensors)
        loan = _Loan(self, template)
        for node in nodes:
            node.metadata.setdefault(__name__, []).append(loan)

    def alive(self) -> dict[str, Tensor]:
        """The tensors of the original module, as far as it still exists."""
        found = {name: tensor() for name, tensor in self.origin.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def is_scratch(self, name: str) -> bool:
        """True for the place of an attribute that a forward may write."""
        return not self.scratch.isdisjoint({name, *name.replace("[", ".").split(".")})

    def _places_of_scratch(self) -> list[tuple[nn.Module, str, Any, bool]]:
        """The layer and the name of each attribute that a forward writes, what it held, and whether it was there."""
        layers, found = dict(self.master.named_modules()), []
        for name in sorted(self.scratch):
            path, _, key = name.rpartition(".")
            if path in layers:
                before = vars(layers[path]).get(key)
                known = None if isinstance(before, Tensor) else before
                found.append((layers[path], key, known, key in vars(layers[path])))
        return found

    # The rehearsal

    def _rehearse(self, tensors: Tensors, trainable: Iterable[str], method: str, args: Any, kwargs: Any) -> None:
        """Runs the forward on copies of everything, and refuses what it leaves behind."""
        with _random_state_put_back():
            changes = self._trial(tensors, trainable, method, args, kwargs, ())
            asked = [change for change in changes if not self.is_scratch(change.name)]
            refuse_changes([change.name for change in asked if not change.namespace])
            unread = {change.name for change in asked}
            if unread and not self._writes_first(unread, tensors, trainable, method, args, kwargs):
                refuse_changes(unread)
            self.scratch |= {change.name for change in changes}
            self.kept = self._places_of_scratch()
        if not any(isinstance(tensor, FakeTensor) for tensor in tensors.values()):  # which have no values to compare
            self._rehearsed.add((method, torch.is_grad_enabled()))

    def _writes_first(self, unread: set[str], *call: Any) -> bool:
        """True if the forward runs where the attributes can't be read, and writes every one of them."""
        try:
            changes = self._trial(*call, unread)
        except Exception:  # it ran without: what it raises now comes of reading
            return False
        written = {change.name for change in changes if not isinstance(change.now, Absent)}
        others = [change for change in changes if change.name not in unread and not self.is_scratch(change.name)]
        return unread <= written and not others

    def _trial(
        self,
        tensors: Tensors,
        trainable: Iterable[str],
        method: str,
        args: Any,
        kwargs: Any,
        unread: Iterable[str],
    ) -> list[Change]:
        constants = {path: constant.clone() for path, constant in self._constants.items()}
        template = self._make({id(old): constants[path] for path, old in self._constants.items()})
        args, kwargs = _copied((args, kwargs))
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        both = {**copies, **constants}
        versions = _versions(both.values())
        template.seal(unread)
        template.place(copies)
        try:
            with _Watch(self.alive()), _unseen_by_checkpoints():
                template.run(method, args, kwargs)
            after = template.take_out()
            changes = template.changes()
        finally:
            template.take_out()
            template.put_back()  # closures are shared with the original
        written = _written(both, {**constants, **after}, versions)
        written |= {name for name, old in {**tensors, **self._constants}.items() if not _same_bits(both[name], old)}
        refuse_writes(written.intersection(trainable))
        refuse_changes(written.intersection(constants))
        self.written |= written
        self.moved |= written
        return changes


class _Loan:
    """Gives a template back when the graph that may need it is gone."""

    def __init__(self, lender: Lender, template: Template):
        self._lender, self._template = lender, template

    def __del__(self) -> None:
        self._lender._take_back(self._template)


class _Watch(TorchFunctionMode):
    """Refuses what a copy can not follow: the original's own tensors, and checkpoints that give no gradient."""

    def __init__(self, original: Mapping[str, Tensor]):
        super().__init__()
        self._names = {id(tensor): name for name, tensor in original.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            for found in value if isinstance(value, (list, tuple)) else (value,):
                if id(found) in self._names:
                    refuse_foreign(self._names[id(found)])
        if not torch.is_grad_enabled() and _in_reentrant_checkpoint():
            raise RuntimeError(
                "apply: found a reentrant checkpoint, expected one that gives gradients to parameters. Call "
                "checkpoint(..., use_reentrant=False); in transformers "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
        return func(*args, **kwargs)


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _random_state_put_back() -> Iterator[None]:
    """Leaves torch's, Python's and numpy's random numbers as they were."""
    numpy = sys.modules.get("numpy.random")
    states = random.getstate(), numpy and numpy.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else range(0)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy:
            numpy.set_state(states[1])


@contextmanager
def _unseen_by_checkpoints() -> Iterator[None]:
    """Keeps what a trial saves for a backward from the hooks of a checkpoint around the call, which count it."""
    if transformed():  # where there are no checkpoints
        yield
        return
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
        yield
    saved.clear()  # an output that its own node saves would keep itself alive


def _copied(arguments: Any) -> Any:
    """A copy of the arguments, in which tensors with a history keep it."""
    memo = {id(obj): obj.clone() for _, obj in walk(arguments) if isinstance(obj, Tensor)}
    try:
        return copy.deepcopy(arguments, memo)
    except Exception as error:
        raise TypeError(
            f"apply: found an argument that can't be copied ({type(error).__name__}: {error}), expected tensors and "
            "plain values: the first call is rehearsed on copies. Pass a list in place of a generator or an iterator."
        ) from error


def _versions(tensors: Iterable[Tensor]) -> list[int]:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # tensors of an inference mode count no writes
        return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _written(given: Tensors, after: Mapping[str, Any], versions: list[int]) -> set[str]:
    """The names of what was written to in place, and of what was assigned anew."""
    if _versions(given.values()) == versions and all(map(is_, map(after.get, given), given.values())):
        return set()
    return {
        name
        for (name, tensor), old, new in zip(given.items(), versions, _versions(given.values()), strict=True)
        if old != new or after[name] is not tensor
    }


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """True for equal values, NaN included; tensors whose values can't be compared count as equal."""
    while torch._C._functorch.is_functorch_wrapped_tensor(a):
        a = torch._C._functorch.get_unwrapped(a)
    while torch._C._functorch.is_functorch_wrapped_tensor(b):
        b = torch._C._functorch.get_unwrapped(b)
    if type(a) not in (Tensor, nn.Parameter) or a.layout is not torch.strided or a.is_meta:
        return True
    return a.shape == b.shape and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def _nodes(output: Any) -> list[Any]:
    """The nodes of the graph that made the output."""
    tensors = [output] if isinstance(output, Tensor) else [x for _, x in walk(output) if isinstance(x, Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]


def refuse_foreign(name: str) -> None:
    raise RuntimeError(
        f"apply: found that the forward reads {name!r} of the original module (through a global, say), expected "
        "attributes of its own. Read it through self, or pass it as an argument."
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
