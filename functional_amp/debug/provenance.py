"""Where values that are not finite come from: a record of the operators that gave them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import functional_amp.debug.torch_private as torch_private
from functional_amp.debug.blame import Event, Origin, Outside, ancestors, blame, moves
from functional_amp.debug.explain_range import is_finite, range_of, readable
from functional_amp.debug.locate import Locator, Place
from functional_amp.debug.provenance_call import Call, tensors_of, traits_of

_UNINITIALISED = frozenset(
    "empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ empty_quantized".split()
)
_COPIES = frozenset("clone copy_ _to_copy lift_fresh_copy".split())
_OVERWRITES = frozenset("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_".split())


class Provenance(torch_private.DispatchMode):
    """Records every operator with an output that is not finite, with whatever is to blame for it.

    Values are followed by the memory they lie in. Only bad ones are: an operator with finite outputs costs one
    sum over each. The record keeps bad tensors alive, so that no address is used twice.

    Args:
        locator: tells the place of an operator.
        named: tensors of the caller with their names.

    Attributes:
        phase, micro_batch: what is running; whoever drives the replay sets them.
    """

    supports_higher_order_operators = True

    def __init__(self, locator: Locator, named: Iterable[tuple[str, Tensor]]):
        super().__init__()
        self.phase, self.micro_batch = "forward", 0
        self.events: list[Event] = []
        self._locator = locator
        self._named: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in named:
            self._named.setdefault(torch_private.storage_key(tensor), []).append((name, tensor))
        self._marks: dict[int, list[tuple[Origin, Tensor]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(torch_private.is_traced, types)):
            return func(*args, **(kwargs or {}))
        if any(map(torch_private.dispatches_itself, types)):  # it calls plain operators, which are followed
            return NotImplemented
        kwargs = kwargs or {}
        traits = traits_of(func)
        if self.phase == "forward":
            self._locator.note_forward()
        if traits.view:
            return func(*args, **kwargs)
        if not traits.writes:
            out = func(*args, **kwargs)
            bad = [tensor for tensor in tensors_of(out) if not is_finite(tensor)]
            if bad:
                self._record(Call(func, traits, args, kwargs), bad)
            return out
        call = Call(func, traits, args, kwargs, copies=traits.name not in _OVERWRITES)
        out = func(*args, **kwargs)
        outputs = call.outputs(out, call.given)
        bad = [tensor for tensor in outputs if not is_finite(tensor)]
        if bad:
            self._record(call, bad)
        for tensor in outputs:
            if _covers(tensor) and not any(tensor is one for one in bad):
                self._marks.pop(torch_private.storage_key(tensor), None)
        return out

    def origins(self, tensor: Tensor, values: Tensor | None = None) -> list[Origin]:
        """Who is to blame for the bad elements of a tensor.

        Args:
            values: what the tensor held before an operator wrote to it.
        """
        key = torch_private.storage_key(tensor)
        marks = self._marks.setdefault(key, [])
        if len(marks) == 1 and _covers(marks[0][1]):
            return [marks[0][0]]
        values = tensor if values is None else values
        whole = readable(values) if values.dtype.itemsize == 1 else values  # complex elements stay one
        places = _places(tensor, ~torch.isfinite(whole))
        found: list[Origin] = []
        for origin, region in reversed(marks):  # the last one that wrote to a place counts
            taken = _lies_in(places, region)
            if bool(taken.any()):
                found.append(origin)
                places = places[~taken]
        if places.numel():
            name = self._name_of(tensor) or "a constant"
            outside = Outside(name, range_of(values, name))
            marks.insert(0, (outside, tensor))
            found.append(outside)
        return found

    def first_use(self, outside: Outside) -> Event | None:
        """The first operator that made something bad of a tensor that was bad before, copies left out."""
        copies: list[Origin] = [outside]
        for event in self.events:
            if any(parent is copy for parent in event.parents for copy in copies):
                if event.operator not in _COPIES:
                    return event
                copies.append(event)
        return None

    def harmless(self, origins: Iterable[Origin]) -> int:
        """How many operators gave inf or NaN that neither led to these, nor came from what did."""
        guilty = ancestors(list(origins))
        for event in self.events:
            if any(isinstance(parent, Event) and parent.index in guilty for parent in event.parents):
                guilty.add(event.index)
        return sum(event.index not in guilty and event.operator not in _UNINITIALISED for event in self.events)

    def _record(self, call: Call, bad: list[Tensor]) -> None:
        suspects = {slot: tensor for slot, tensor in enumerate(call.values) if not is_finite(tensor)}
        origins = {slot: self.origins(call.given[slot], call.values[slot]) for slot in suspects}
        if suspects:
            to_blame, itself = blame(call.again, suspects, bad)
        else:
            to_blame, itself = [], True
        parents = _each_once(origin for slot in to_blame for origin in origins[slot])
        others = _each_once(origin for slot in suspects if slot not in to_blame for origin in origins[slot])
        has_nan = any(bool(torch.isnan(readable(tensor)).any()) for tensor in bad)
        name = call.traits.name
        number = call.number_that_is_not_finite
        wrote = not suspects and number is not None and not math.isnan(number)
        written = not has_nan and (wrote or (not itself and moves(name, parents)))
        phase, node, place = self._whereabouts()
        event = Event(
            index=len(self.events),
            phase=phase,
            micro_batch=self.micro_batch,
            operator=name,
            node=node,
            place=place,
            has_nan=has_nan,
            itself=itself,
            parents=parents,
            others=others,
            number=number,
            written=written,
        )
        if itself or all(isinstance(parent, Outside) or parent.written for parent in parents):
            named = [self._name_of(tensor) or label for label, tensor in zip(call.labels, call.given, strict=True)]
            event.inputs = tuple(range_of(tensor, label) for label, tensor in zip(named, call.values, strict=True))
            worst = max(bad, key=lambda tensor: (int(torch.isnan(readable(tensor)).sum()), tensor.numel()))
            event.output = range_of(worst, "output")
        self.events.append(event)
        for tensor in bad:
            marks = self._marks.setdefault(torch_private.storage_key(tensor), [])
            if _covers(tensor):
                marks.clear()
            marks.append((event, tensor))

    def _name_of(self, tensor: Tensor) -> str:
        """The name of the caller's tensor that a tensor is a view of, or ""."""
        if not torch_private.has_memory(tensor):
            return ""
        known = self._named.get(torch_private.storage_key(tensor), [])
        if len(known) < 2:
            return known[0][0] if known else ""
        places = _places(tensor, torch.ones(tensor.shape, dtype=torch.bool, device=tensor.device))
        return next((name for name, other in known if bool(_lies_in(places, other).any())), "")

    def _whereabouts(self) -> tuple[str, str, Place]:
        """The phase, the autograd node and the place of the operator that has just run."""
        if self.phase not in ("forward", "backward"):
            return self.phase, "", Place()
        node = torch_private.running_node()
        if self.phase == "forward" and node is None:
            return "forward", "", self._locator.in_forward()
        if node is None:  # after the backward: scale_backward multiplies by the weight
            return "accumulate", "", Place()
        place, repeated = self._locator.in_backward(torch_private.sequence_number(node))
        return ("forward" if repeated else self.phase), node.name(), place


def _each_once(origins: Iterable[Origin]) -> list[Origin]:
    return list({id(origin): origin for origin in origins}.values())


def _covers(tensor: Tensor) -> bool:
    """Whether a tensor is all of its memory."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _places(tensor: Tensor, chosen: Tensor) -> Tensor:
    """Where in their memory the chosen elements of a tensor lie, as bytes."""
    strides = torch.tensor(tensor.stride(), dtype=torch.int64, device=tensor.device)
    places = (chosen.nonzero() * strides).sum(-1) + int(tensor.storage_offset())
    return places * tensor.element_size()


def _lies_in(places: Tensor, region: Tensor) -> Tensor:
    """Which of these places in a memory belong to a tensor."""
    if _covers(region):
        return torch.ones_like(places, dtype=torch.bool)
    if region.is_contiguous():
        start = int(region.storage_offset()) * region.element_size()
        return (places >= start) & (places < start + region.numel() * region.element_size())
    every = torch.ones(region.shape, dtype=torch.bool, device=region.device)
    return torch.isin(places, _places(region, every))
