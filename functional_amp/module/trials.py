"""The rehearsal of a call: it runs on copies of everything, and what it leaves behind is refused or noted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_amp.engine.random import all_generators_kept
from functional_amp.engine.statistics import same_bits
from functional_amp.engine.unwritten import versions_of
from functional_amp.module.modes import Known
from functional_amp.module.reach import Absent, children, walk
from functional_amp.module.rehearsal import (
    Watch,
    copied,
    own_leaf,
    refuse_changes,
    refuse_gone,
    refuse_marks,
    refuse_writes,
    unseen_by_checkpoints,
    written_to,
)
from functional_amp.module.templates import Template, Tensors, unread
from functional_amp.module.watched import Change
from functional_amp.torch_private import reaches_this_level

_PLAIN = (bool, int, float, complex, str, type(None))


class Call(NamedTuple):
    """What is called, with what."""

    tensors: Tensors
    trainable: Collection[str]
    method: str
    args: Any
    kwargs: Any


class Rehearsal:
    """What the trials of one module in one mode find out.

    Args:
        constants: the tensors that are neither parameters nor buffers, by path.
        make: a template with other tensors at the ids of constants.
        original: the tensors of the original module, as far as it still exists.
        is_scratch: whether a place is one of an attribute that a forward may write.
        known: what is known of the module in all modes.

    Attributes:
        written: the buffers that the forward writes to.
        unseen: those among them of which no version counter tells: the statistics of `F.batch_norm`, say.
    """

    def __init__(
        self,
        constants: Tensors,
        make: Callable[[Mapping[int, Tensor]], Template],
        original: Callable[[], Tensors],
        is_scratch: Callable[[str], bool],
        known: Known,
    ):
        self._constants, self._make, self._original = constants, make, original
        self._is_scratch, self._known = is_scratch, known
        self.written: set[str] = set()
        self.unseen: set[str] = set()

    def run(self, call: Call) -> None:
        """Runs a forward, and refuses what it leaves behind.

        What it writes to attributes before it reads them is no matter: it runs as well where they can't be read. But
        it may ask whether one is there, or is None, without reading it: so it must give the same as at first also
        where they are what a call leaves, and what another mode has left.
        """
        first, known = _Trial(self), {*self._known.kept}
        changes = first.run(call)
        asked = [change for change in changes if not self._is_scratch(change.name)]
        refuse_changes([change.name for change in asked if not change.namespace])
        new = {change.name for change in asked}
        if new or known:
            left = {change.name: change.now for change in changes if change.name in new | known}
            seen = [first.seen()]
            others = [(_Trial(self), {name: unread(name) for name in new}), (first, left)]
            for trial, held in [*others, (first, dict.fromkeys(known))]:
                if held:
                    if not self._passes(trial, call, held, new):
                        refuse_changes(held)
                    seen.append(trial.seen())
            if differing := set().union(*(_differing(seen[0], other) for other in seen[1:])):
                first.run(call)  # what differs by itself, an order of additions or a time, tells nothing
                if differing - _differing(seen[0], first.seen()):
                    refuse_changes(new | known)
        self._known.kept.update(new)

    def reads(self, left: Collection[str], call: Call) -> bool:
        """True if the output depends, differentiably, on buffers that the forward leaves with a history.

        They get one in a `torch.func.vjp` around a trial: what depends on it reaches its level, and nothing else does.
        """
        names, reaching = set(left), False

        def probe(histories: Tensors) -> Tensor:
            nonlocal reaching
            trial = _Trial(self)
            given = {name: call.tensors[name].detach() + history for name, history in histories.items()}
            trial.run(call._replace(tensors={**call.tensors, **given}))
            output, after = trial.left
            reaching = any(isinstance(obj, Tensor) and reaches_this_level(obj) for _, obj in walk(output))
            names.update(name for name, tensor in after.items() if reaches_this_level(tensor))
            return torch.zeros(())

        while True:  # those that it leaves with a history once others have one
            before = {*names}
            try:
                torch.func.vjp(probe, {name: torch.zeros_like(call.tensors[name].detach()) for name in names})
            except Exception:  # torch.func can't follow it
                return True
            if reaching or names == before:
                return reaching

    def _passes(self, trial: _Trial, call: Call, held: Mapping[str, Any], new: Collection[str]) -> bool:
        """True if the forward runs with other attributes; where these can't be read, it must write every one."""
        try:
            changes = trial.run(call, held)
        except Exception:  # it ran without: what it raises now comes of reading
            return False
        sealed = {name for name, value in held.items() if isinstance(value, Absent)}
        written = {change.name for change in changes if not isinstance(change.now, Absent)}
        others = [change for change in changes if change.name not in new and not self._is_scratch(change.name)]
        return sealed <= written and not others


class _Trial:
    """A template of its own, in which a forward runs on copies of everything."""

    def __init__(self, rehearsal: Rehearsal):
        self._rehearsal, constants = rehearsal, rehearsal._constants
        self._constants = {path: constant.clone() for path, constant in constants.items()}
        self._template = rehearsal._make({id(old): self._constants[path] for path, old in constants.items()})
        self.left: Any = None

    def run(self, call: Call, held: Mapping[str, Any] = MappingProxyType({})) -> list[Change]:
        """Runs the forward, and gives what it has changed.

        Args:
            held: other values of attributes, by their places.
        """
        with all_generators_kept():
            return self._run(call, held)

    def _run(self, call: Call, held: Mapping[str, Any]) -> list[Change]:
        rehearsal, template, constants = self._rehearsal, self._template, self._constants
        args, kwargs = copied((call.args, call.kwargs))
        copies = {name: own_leaf(tensor) for name, tensor in call.tensors.items()}
        both = {**copies, **constants}
        versions = versions_of(both.values())
        template.hold(held)
        template.place(copies)
        try:
            with Watch(rehearsal._original(), copies, call.trainable) as watch, unseen_by_checkpoints():
                output = template.run(call.method, args, kwargs)
            after = template.take_out()
            changes = template.changes()
        finally:
            template.take_out()
            template.put_back()  # closures are shared with the original
        self.left = output, after
        refuse_marks(copies)
        written = written_to(both, {**constants, **after}, versions)
        refuse_gone(written.difference(constants), after)
        originals = {**call.tensors, **rehearsal._constants}
        moved = {name for name, old in originals.items() if not same_bits(both[name], old)}
        rehearsal.unseen |= moved - written
        written |= moved | watch.written
        refuse_writes(written.intersection(call.trainable))
        refuse_changes(written.intersection(constants))
        rehearsal.written |= written
        rehearsal._known.moved.update(written)
        return changes

    def seen(self) -> list[Any]:
        """What the last run gave: the tensors and the plain values in its output, and the tensors after it."""
        found: list[Any] = []
        for _, obj in walk(self.left, lambda obj: isinstance(obj, nn.Module)):
            found.append(obj if isinstance(obj, Tensor) else type(obj))
            if not isinstance(obj, (Tensor, nn.Module)):
                found += [child for _, child in children(obj) if isinstance(child, _PLAIN)]
        return found


def _differing(a: list[Any], b: list[Any]) -> set[int]:
    """Where two lists of what was seen differ; -1 where they are of different lengths."""
    different = {index for index, (one, other) in enumerate(zip(a, b, strict=False)) if not _equal(one, other)}
    return different if len(a) == len(b) else {-1, *different}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and same_bits(one, other)
    return type(one) is type(other) and bool(one == other or one != one)
