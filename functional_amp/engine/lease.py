"""The storage of a donated state: what a step owns of the state it returned last, and the way back."""

from __future__ import annotations

import threading
import traceback
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from functional_amp.engine.operators import before_writing
from functional_amp.engine.sharded import locals_of
from functional_amp.engine.storage import (
    Fresh,
    cloned,
    dense,
    is_disjoint,
    is_sole_owner,
    unshared,
    write_into,
)
from functional_amp.registry import new, with_fields
from functional_amp.torch_private import dynamo_exception
from functional_amp.tree import PyTree, flatten_again, same_leaves
from functional_amp.values.state import GIVEN, LOST, LOST_WINDOW, TrainState

R = TypeVar("R")
T = TypeVar("T")


class Lease(Fresh):
    """The right to write into the leaves of a state, for as long as they are the last ones returned.

    Attributes:
        written: what has been written to since the lease was taken up: nothing, the sums of the window that
            was handed in, or the state itself.
    """

    writes = True
    streams = True

    def __init__(self) -> None:
        self.written: Literal["nothing", "window", "state"] = "nothing"
        self._held: list[Any] = []
        self._specs: list[Any] = []
        self._seen: list[Any] = [None, None]
        self._places: list[list[Any]] = [[], [], []]
        self._remembered: dict[Hashable, Any] = {}
        self._recorded: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._sums: list[Tensor | None] = []

    def holds(self, state: TrainState) -> bool:
        """Whether a state has the very leaves that were returned last, in the places where they were."""
        leaves, specs = self._flattened(state)
        return same_leaves(leaves, self._held) and specs == self._specs and _places(leaves) == self._places

    def hold(self, state: TrainState) -> None:
        """Takes note of a state that is about to be returned."""
        leaves, specs = self._flattened(state)
        if state.window is None:
            self._close_window(leaves)
        # Nothing here moves a tensor: whoever did it meanwhile is found by `holds`.
        known = min(len(self._held), len(leaves))
        fresh = [index for index in range(known) if leaves[index] is not self._held[index]]
        fresh += range(known, len(leaves))
        opened = [leaves[index] for index in fresh]
        if all([type(leaf) is Tensor for leaf in opened if isinstance(leaf, Tensor)]):
            self._held, self._specs = leaves, specs
            for places, looks in zip(self._places, _places(opened), strict=True):
                places[known:] = [None] * (len(leaves) - known)
                for index, look in zip(fresh, looks, strict=True):
                    places[index] = look

    def writing(self, what: Literal["window", "state"]) -> None:
        """To be called before a write."""
        if self.written != "state":
            self.written = what

    @contextmanager
    def in_graph(self, what: Literal["window", "state"]) -> Iterator[None]:
        """Around a graph, which announces its writes to a state, but none to the sums of a window.

        Where it raises while it is made, nothing has run.
        """
        try:
            yield
        except BaseException as error:
            if not _while_compiling(error):
                self.writing("window")
            raise
        self.writing(what)

    # What a storage does

    def add(self, old: Tensor | None, new: Tensor) -> Tensor:
        if old is None:
            return new
        if not self.may_write(old):
            return old + new
        self.writing("window")
        return old.add_(new)

    def put(self, old: PyTree, new: PyTree) -> PyTree:
        return write_into(old, new, lambda: self.writing("state"))

    def put_sum(self, old: PyTree | None, new: PyTree) -> PyTree:
        return cloned(new) if old is None else write_into(old, new, lambda: self.writing("window"))

    def working(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return [dense(leaf) for leaf in leaves]

    def writing_to(self, leaves: Sequence[Tensor]) -> None:
        self.writing("state")
        torch.autograd.graph.increment_version(leaves)  # the kernels themselves move no version counter

    def scratch(self, grads: Sequence[Tensor]) -> list[Tensor]:
        if same_leaves(grads, self._sums) or set(map(id, grads)) <= set(map(id, self._sums)):
            return list(grads)
        return [grad if is_sole_owner(grad) else grad.clone() for grad in grads]

    def summing(self, sums: Sequence[Tensor]) -> list[Tensor] | None:
        self.writing("window")
        return self.scratch([leaf.contiguous() for leaf in sums])

    def settled(self, old: Tensor, work: Tensor) -> Tensor:
        return old if work is old else old.copy_(work)

    def recall(self, owner: Hashable, leaves: Sequence[Any], make: Callable[[bool], T], fits: Callable[[T], bool]) -> T:
        key = (owner, next((id(leaf) for leaf in leaves if leaf is not None), None))
        known = self._remembered.get(key)
        if known is None or not fits(known):
            known = self._remembered[key] = make(True)
        return known

    # What the streaming backward asks

    def recording(self, leaves: list[Tensor], make: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """The leaves that the engine records with: made once, and kept while the parameters are the same tensors."""
        known, recorded = self._recorded
        if not same_leaves(known, leaves):
            recorded = make(leaves)
            if not any([leaf.is_inference() for leaf in leaves]):  # of those the engine records copies
                self._recorded = (leaves, recorded)
        # An autocast around the training loop keeps its copies of leaves: of these, they would be older than an update.
        torch.clear_autocast_cache()
        return recorded

    def owns(self, sums: list[Tensor | None]) -> bool:
        """Whether these sums are known to be nobody else's."""
        return bool(sums) and same_leaves(sums, self._sums)

    def may_write(self, old: Tensor) -> bool:
        """Whether a sum is nobody else's: the first gradient may be a view of a user's tensor."""
        return not old.is_inference() and is_sole_owner(old)

    def own(self, sums: list[Tensor | None]) -> None:
        """Takes note that these sums are nobody else's."""
        self._sums = sums

    def _flattened(self, state: TrainState) -> tuple[list[Any], list[Any]]:
        """What is written to, or recorded with, by what was made for the last state, and the structures of that."""
        window = state.window
        trees: list[Any] = [(state.params, state.opt_state, state.buffers)]
        trees += [] if window is None else [(window.grads.tree, window.params)]
        flats = [flatten_again(tree, seen) for tree, seen in zip(trees, self._seen)]
        specs = [flat.spec for flat in flats]
        self._seen[: len(specs)] = specs
        return locals_of([leaf for flat in flats for leaf in flat.leaves]), specs

    def _close_window(self, leaves: list[Any]) -> None:
        """Lets go of the sums, and of copies that the engine recorded with in place of the state's own leaves."""
        self._sums = []
        if not set(map(id, locals_of(self._recorded[0]))) <= set(map(id, leaves)):
            self._recorded = ([], [])


class Leases:
    """The lease of one step: the last one, until it is taken up or the state that it is for is gone.

    Who takes it up takes it out: two threads, or a step inside itself, do not meet in one.
    """

    def __init__(self) -> None:
        self._last: list[tuple[Lease, weakref.ref[TrainState]]] = []

    def lend(self, state: TrainState, body: Callable[[TrainState, Lease, bool], R]) -> R:
        """Runs a part of a window on a state that is taken away from the caller.

        Where it raises before anything of the caller's was written to, the caller's state is as it was. Where
        the sums of a window that was handed in have been added to, that window is lost; where the
        parameters were being written, the state is. Reading what is lost raises.

        Args:
            body: `body(state, lease, known)` returns a state, or a pair with a state first; `known` says
                that the state is the one that this step returned last.
        """
        fields = dict(vars(state))
        taken = new(TrainState, **fields)
        lease, known = self._take(taken)
        lease.written = "nothing"
        try:
            _replace(state, {"_gone": GIVEN})
            if not known:
                taken = _own(taken)
            with running(lease):
                result = body(taken, lease, known)
            last = result if isinstance(result, TrainState) else cast(Any, result)[0]
            lease.hold(last)
            self._last[:] = [(lease, weakref.ref(last, self._drop))]
            return result  # in here: a result that an interrupt keeps from the caller is lost
        except BaseException:
            if lease.written == "state":
                _replace(state, {"_gone": LOST})
            elif lease.written == "window" and fields["window"] is not None:
                del fields["window"]
                _replace(state, {**fields, "_gone": LOST_WINDOW})
            else:
                _replace(state, fields)
            raise

    def _take(self, state: TrainState) -> tuple[Lease, bool]:
        try:
            lease, _ = self._last.pop()
        except IndexError:
            return Lease(), False
        return (lease, True) if lease.holds(state) else (Lease(), False)

    def _drop(self, gone: weakref.ref[TrainState]) -> None:
        self._last[:] = [entry for entry in self._last if entry[1] is not gone]


class _Running(threading.local):
    lease: Lease | None = None


_running = _Running()


@contextmanager
def running(lease: Lease) -> Iterator[None]:
    """Says on this thread whose leaves the operators of a graph write to."""
    outer, _running.lease = _running.lease, lease
    try:
        yield
    finally:
        _running.lease = outer


def _note_write() -> None:
    if _running.lease is not None:
        _running.lease.writing("state")


before_writing.append(_note_write)


def _own(state: TrainState) -> TrainState:
    """The state, of which no two tensors that will be written to lie on the same bytes."""
    window = state.window
    written = (state.params, state.opt_state, state.buffers, None if window is None else window.grads.tree)
    if is_disjoint(written):
        return state
    params, opt_state, buffers, tree = unshared(written)
    if window is not None:
        window = with_fields(window, grads=with_fields(window.grads, tree=tree))
    return with_fields(state, params=params, opt_state=opt_state, buffers=buffers, window=window)


def _replace(state: TrainState, fields: dict[str, Any]) -> None:
    held = vars(state)
    held.update(fields)  # first: an interrupt between the two must find the fields
    for name in held.keys() - fields.keys():
        del held[name]


def _while_compiling(error: BaseException) -> bool:
    if isinstance(error, dynamo_exception()):
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__") == "torch._dynamo.convert_frame" for frame, _ in frames)


def _places(leaves: list[Any]) -> list[list[Any]]:
    """Where the tensors lie: `leaf.data = ...` keeps a tensor, and changes its address or its strides."""
    tensors = [leaf if isinstance(leaf, Tensor) else _NOWHERE for leaf in leaves]
    return [list(map(look, tensors)) for look in (Tensor.data_ptr, Tensor.size, Tensor.stride)]


_NOWHERE = torch.empty(0)
