"""Lending templates to calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from functional_amp.engine.carried import note_carried
from functional_amp.engine.moved import note_moves
from functional_amp.engine.unwritten import versions_below, versions_of
from functional_amp.mode import transformed
from functional_amp.module.copies import lists_of_weights, shared
from functional_amp.module.loan import Loan
from functional_amp.module.modes import Known, in_mode
from functional_amp.module.reach import Absent, Unread, absent, walk
from functional_amp.module.rehearsal import refuse_changes, refuse_gone, refuse_writes, written_to
from functional_amp.module.templates import Template, Tensors, registered, slots
from functional_amp.module.trials import Call, Rehearsal
from functional_amp.module.watched import hold, holders
from functional_amp.torch_private import is_fake, norm_layers

_TAKEN_OUT = (
    "where its numbers are not, expected it to be read in the call, as an attribute or in a list or dict. Take it out "
    "of tuples, sets and slots; differentiate checkpoints with scale_backward(..., backend='autograd'). Where the "
    "output calls the module later (a function, a generator, a distribution), return tensors, or put what calls it "
    "into a method, apply.method(name)."
)


class Lender:
    """The templates of one module in one mode, and what rehearsals found out about it.

    Attributes:
        master: the module with its tensors on the meta device, of which the templates are copied.
        names: the name of each tensor of the master, by its id.
        plan, scratch: the slots and the scratch of the master itself, for graphs, which are traced with it.
        parameters: the names of what is a parameter, frozen ones included.
        constants: the tensors that are neither parameters nor buffers, by path.
        places: the name of the tensor at each attribute path, where there are no other slots; else empty.
        statistics: the buffers in which normalization layers keep running statistics.
        written: the buffers that the forward writes to.
        parametrized: whether a layer has parametrizations.
        traced: what a trace found before the forward: its graph, version counters by name and of what the graph read
            by source, and what had been set on tensors.
    """

    def __init__(self, master: nn.Module, known: Known):
        self.master, self.known = master, known
        self.written: set[str] = set()
        self._unseen: set[str] = set()
        self._read: dict[tuple[str, frozenset[str]], bool] = {}
        self.traced: tuple[Any, dict[str, int], dict[str, int], set[Any]] = None, {}, {}, set()
        self.names: dict[int, str] = {}
        self._rehearsed: set[tuple[str, bool]] = set()
        self._memo: dict[int, Any] = shared(master)
        self._absent: dict[int, str] = {}
        for place, tensor in registered(master):
            if id(tensor) not in self.names:
                made = absent(place, _TAKEN_OUT, tensor.shape, tensor.dtype, isinstance(tensor, nn.Parameter))
                self.names[id(tensor)] = self._absent[id(made)] = place
                self._memo[id(tensor)] = made
        self.parameters = {self.names[id(p)] for p in master.parameters()}
        # What stands for a stale value can't be read: a forward that passes has written it first.
        self._anew = {path for path, obj in walk(master) if isinstance(obj, Absent)} | lists_of_weights(master)
        self.constants: Tensors = {
            path: obj
            for path, obj in walk(master)
            if isinstance(obj, Tensor) and not isinstance(obj, Absent) and id(obj) not in self.names
        }
        self._memo.update({id(constant): constant for constant in self.constants.values()})
        self._as_made = versions_of(self.constants.values())
        self.plan = slots(master, self.names)
        attributes = {place: self.names[id(tensor)] for place, tensor in registered(master)}
        made_later = any(buffer is None for layer in master.modules() for buffer in layer._buffers.values())
        self.places = attributes if len(attributes) == len(self.plan) and not made_later else {}
        norms = [layer for layer in master.modules() if isinstance(layer, norm_layers())]
        norms = [layer for layer in norms if layer.track_running_stats]
        self.writes_statistics = any(layer.training for layer in norms)
        self.statistics = {self.names[id(b)] for layer in norms for b in layer._buffers.values() if b is not None}
        self.parametrized = any(map(is_parametrized, master.modules()))
        self._seal()
        self._free = [self._make({})]
        self._late: list[RuntimeError] = []

    def __getstate__(self) -> dict[str, Any]:
        return {"master": self.master, "known": self.known._replace(origin={})}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    def __deepcopy__(self, memo: dict[int, Any]) -> Lender:
        memo.update(shared(self.master))
        return Lender(copy.deepcopy(self.master, memo), self.known)

    def in_mode(self, switch: Callable[[nn.Module], Any]) -> Lender:
        """The lender of the same module in another mode."""
        return Lender(in_mode(self.master, switch), self.known)

    def call(
        self,
        params: Tensors,
        buffers: Tensors,
        frozen: frozenset[str],
        method: str,
        args: Any,
        kwargs: Any,
        *,
        returned: bool,
    ) -> tuple[Any, Tensors, set[str]]:
        """Runs the forward with the tensors in their places.

        Args:
            params, buffers: the tensors by name. The forward gets copies of the buffers.
            frozen: the names among the buffers that are copied only where the forward is known to write to them.
            method: the name of a method, or "" for the module's call.
            returned: whether the caller gets the buffers: what a backward writes to others is lost.

        Returns:
            The output, the buffers after it, and the names of those that this call wrote to.

        Raises:
            RuntimeError: where the forward wrote to anything but buffers, or the backward of an earlier call.
        """
        if self._late:
            raise self._late.pop()
        if (method, torch.is_grad_enabled()) not in self._rehearsed:
            self._rehearse(Call({**params, **buffers}, params, method, args, kwargs))
        if len(self.known.kept) != self._sealed:
            self._seal()
        fixed = frozen - self.written if self.written else frozen
        tensors = {**params, **{name: b if name in fixed else b.clone() for name, b in buffers.items()}}
        try:
            template = self._free.pop()
        except IndexError:
            template = self._make({})
        versions = versions_of(tensors.values())
        quiet = {name: tensors[name] for name in buffers if name not in self.written} if transformed() else {}
        below = versions_below(quiet.values())
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
        written = written_to(tensors, after, versions)
        if quiet and (now := versions_below(quiet.values())) != below:  # by a write to a list, or an out=
            written |= {name for name, old, new in zip(quiet, below, now, strict=True) if old != new}
        try:
            if written:
                refuse_gone(written, after)
                refuse_writes(written & {*params, *fixed})
            moved = [] if versions_of(self.constants.values()) == self._as_made else list(self.constants)
            refuse_changes([*moved, *(change.name for change in changes if not self.is_scratch(change.name))])
        except RuntimeError:
            self._free.append(template)
            raise
        self.written |= written
        self.known.moved.update(written)
        lent = {**tensors, **{name: after[name].detach() for name in written}}
        Loan(
            template,
            lent,
            followed=buffers.keys() - fixed if returned else (),
            buffers=buffers,
            is_scratch=self.is_scratch,
            back=self._free.append,
            late=self._late.append,
        ).begin(output)
        if returned:
            note_moves(written | self._unseen)
            if left := [name for name in written if after[name].requires_grad]:
                if self._reads(left, Call({**params, **buffers}, params, method, args, kwargs)):
                    note_carried(after[name] for name in left)
        return output, {name: after[name] for name in buffers}, written

    def state_dict(self, tensors: Tensors) -> dict[str, Any]:
        """The module's own state dict, of the given tensors."""
        template = self._make({})
        template.place(tensors)
        return template.module.state_dict()

    def _make(self, constants: Mapping[int, Tensor]) -> Template:
        return Template(self.master, {**self._memo, **constants}, self._absent, self.known.marks)

    def _take_back(self, template: Template) -> None:
        template.take_out()
        template.put_back()
        self._free.append(template)

    def alive(self) -> dict[str, Tensor]:
        """The tensors of the original module, as far as it still exists."""
        found = {name: tensor() for name, tensor in self.known.origin.items()}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def is_scratch(self, name: str) -> bool:
        """True for the place of an attribute that a forward may write."""
        if name in self.known.kept or name in self._anew:
            return True
        return not self.known.scratch.isdisjoint({name, *name.replace("[", ".").split(".")})

    def _seal(self) -> None:
        """Lets no call read what an earlier one has kept; but for objects that all copies share with the original."""
        objects = [(path, obj) for path, obj in walk(self.master) if self._memo.get(id(obj)) is not obj]
        entries = (entry for path, obj in objects for entry in holders(path, obj))
        hold(entries, {name: Unread(name) for name in self.known.kept})
        self._sealed, self._free = len(self.known.kept), []
        self.scratch = self._places_of_scratch()

    def _places_of_scratch(self) -> list[tuple[nn.Module, str, Any, bool]]:
        """The layer and the name of each attribute that a forward writes, what it held, and whether it was there."""
        layers, found = dict(self.master.named_modules()), []
        for name in sorted({*self.known.scratch, *self.known.kept, *self._anew}):
            path, _, key = name.rpartition(".")
            if path in layers:
                before = vars(layers[path]).get(key)
                if isinstance(before, Tensor):
                    before = Unread(name) if isinstance(before, Absent) else None
                found.append((layers[path], key, before, key in vars(layers[path])))
        return found

    def _rehearsal(self) -> Rehearsal:
        return Rehearsal(self.constants, self._make, self.alive, self.is_scratch, self.known)

    def _reads(self, left: list[str], call: Call) -> bool:
        """True if a forward computes its output, differentiably, from buffers that it leaves with a history."""
        key = call.method, frozenset(left)
        if key not in self._read:
            self._read[key] = self._rehearsal().reads(left, call)
        return self._read[key]

    def _rehearse(self, call: Call) -> None:
        rehearsal = self._rehearsal()
        rehearsal.run(call)
        self.written |= rehearsal.written
        self._unseen |= rehearsal.unseen
        if not any(is_fake(tensor) or tensor.is_meta for tensor in call.tensors.values()):  # which have no values
            self._rehearsed.add((call.method, torch.is_grad_enabled()))
