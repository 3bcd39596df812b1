"""Deliberately wrong scalers: each is rejected by the right law, each wrong rule by the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optree
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from optree.registry import __GLOBAL_NAMESPACE as _GLOBAL
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
import functional_amp.testing as kit
from functional_amp.registry import with_fields
from functional_amp.testing import references

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@dataclass(frozen=True, eq=False)
class Scale:
    """A right scaler in the small, from which the wrong ones differ by a line."""

    scale: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(8.0))
    tracker: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(0, dtype=torch.int32))
    growth_interval: int = 3
    note: Any = "kept"

    def update(self, finite: Tensor) -> Any:
        tracker = torch.where(finite, self.tracker + 1, 0)
        grow = self.due(tracker)
        grown = torch.where(grow, (self.scale * 2).clamp(max=2.0**24), self.scale)
        scale = torch.where(finite, grown, (self.scale / 2).clamp(min=2.0**-14))
        return with_fields(self, scale=scale, tracker=torch.where(grow, 0, tracker))

    def due(self, tracker: Tensor) -> Tensor:
        return self.growth_interval <= tracker


fa.register(Scale, ("scale", "tracker"), ("growth_interval", "note"))


VARIANTS: list[Any] = []


def variant(
    update: Callable[[Any, Tensor], Any] | None = None, due: Callable[[Any, Tensor], Tensor] | None = None
) -> Any:
    """A scaler that differs in its update, or in when it grows."""
    members = {"update": update, "due": due}
    cls: Any = type("Variant", (Scale,), {name: member for name, member in members.items() if member is not None})
    globals()[f"Variant{len(VARIANTS)}"] = cls  # so that it can be pickled
    cls.__qualname__ = f"Variant{len(VARIANTS)}"
    VARIANTS.append(cls)
    return fa.register(cls, ("scale", "tracker"), ("growth_interval", "note"))()


def then(**fields: Callable[[Any], Any]) -> Any:
    """The right update, and then a change of some fields."""

    def update(self: Any, finite: Tensor) -> Any:
        after = Scale.update(self, finite)
        return with_fields(after, **{name: change(after) for name, change in fields.items()})

    return variant(update)


@dataclass(frozen=True, eq=False)
class Forgetful(Scale):
    """Its note is lost when it is flattened."""


optree.register_pytree_node(
    Forgetful,  # pyright: ignore[reportArgumentType]
    lambda node: ((node.scale, node.tracker), (node.growth_interval,)),  # pyright: ignore
    lambda static, leaves: Forgetful(*leaves, *static),  # pyright: ignore
    namespace=_GLOBAL,
)
torch_pytree.register_pytree_node(
    Forgetful,
    lambda node: ([node.scale, node.tracker], (node.growth_interval,)),
    lambda leaves, static: Forgetful(*leaves, *static),  # pyright: ignore
)


@dataclass(frozen=True)
class Unregistered:
    scale: Tensor

    def update(self, finite: Tensor) -> Unregistered:
        return Unregistered(torch.where(finite, self.scale, self.scale / 2))


def scale_in_place(self: Any, finite: Tensor) -> Any:
    self.scale.mul_(torch.where(finite, 1.0, 0.5))
    return self


def reads_the_host(self: Any, finite: Tensor) -> Any:
    return Scale.update(self, torch.tensor(bool(finite)))


def keeps_its_tracker(self: Any, finite: Tensor) -> Any:
    after = Scale.update(self, finite)
    return with_fields(after, tracker=torch.where(finite, after.tracker, self.tracker))


def breaks_the_graph(self: Any, finite: Tensor) -> Any:
    torch._dynamo.graph_break()
    return Scale.update(self, finite)


WRONG_SCALERS: dict[str, tuple[Callable[[], Any], str]] = {
    "no pytree": (lambda: Unregistered(torch.tensor(8.0)), "it is a pytree of tensors: optree found a leaf Unreg"),
    "in place": (
        lambda: variant(scale_in_place),
        "the update is pure: input: at '.*scale': found a tensor written to 1 times",
    ),
    "float64": (
        lambda: then(scale=lambda s: s.scale.double()),
        "every update keeps .*at 'scale': found float64 of shape .*, expected float32",
    ),
    "a shape": (
        lambda: then(tracker=lambda s: s.tracker[None]),
        r"every update keeps .*at 'tracker': found int32 of shape \(1,\)",
    ),
    "a Python counter": (
        lambda: then(growth_interval=lambda s: s.growth_interval + 1),
        "every update keeps .*at 'growth_interval': found 4, expected 3",
    ),
    "another type": (
        lambda: variant(lambda self, finite: Scale.update(Scale(self.scale, self.tracker), finite)),
        "every update keeps .*found Scale, expected Variant",
    ),
    "no floor": (
        lambda: variant(lambda self, finite: with_fields(self, scale=torch.where(finite, self.scale, self.scale / 2))),
        "the scale stays positive .*at 'scale': found 0.0 after .* overflows in a row",
    ),
    "no ceiling": (
        lambda: variant(lambda self, finite: with_fields(self, scale=torch.where(finite, self.scale * 2, self.scale))),
        "the scale stays positive .*at 'scale': found inf after .* clean windows in a row",
    ),
    "a static lost in flatten": (
        lambda: Forgetful(note="odd"),
        "every field survives a round trip: by optree: at 'note': found 'kept', expected 'odd'",
    ),
    "a static that can not be pickled": (
        lambda: dataclasses.replace(Scale(), note=lambda: None),
        "every field survives a round trip: raised",
    ),
    "a host read": (lambda: variant(reads_the_host), "no tensor is read on the host: raised DataDependent"),
    "a graph break": (lambda: variant(breaks_the_graph), "it compiles to one graph: raised"),
}


@pytest.mark.parametrize("name", WRONG_SCALERS)
def test_a_wrong_scaler_is_rejected_by_the_right_law(name: str):
    make, message = WRONG_SCALERS[name]
    with pytest.raises(AssertionError, match=f"(?s)^check_scaler: ({message})"):
        kit.check_scaler(make())


def test_the_scaler_that_they_are_made_from_is_right():
    kit.check_scaler(Scale())
    machine = kit.scaler_machine(Scale, lambda: references.Jmp(8.0, period=3, minimum=2.0**-14))
    run_state_machine_as_test(machine, settings=settings(max_examples=10))


WRONG_RULES: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "< for <= in the growth interval": (
        lambda: variant(due=lambda self, tracker: self.growth_interval < tracker),
        lambda: references.Torch(8.0, interval=3),
        "after good good good: scale: found 8.0, expected 16.0 as Torch has it",
    ),
    "an overflow does not restart the interval": (
        lambda: variant(
            lambda self, finite: with_fields(
                Scale.update(self, finite),
                tracker=torch.where(finite, Scale.update(self, finite).tracker, self.tracker),
            )
        ),
        lambda: references.Torch(8.0, interval=2),
        "after good good: scale|after good bad good: scale|after good good",
    ),
    "no floor of 1": (
        lambda: fa.DynamicScale(2.0, growth_interval=3),
        lambda: references.Jmp(2.0, period=3),
        "after bad bad: scale: found 0.5, expected 1.0 as Jmp has it",
    ),
    "no hysteresis": (
        lambda: fa.DynamicScale(8.0, growth_interval=3),
        lambda: references.Megatron(8.0, interval=3),
        "after bad: scale: found 4.0, expected 8.0 as Megatron has it",
    ),
    "hysteresis refilled at each clean step": (
        lambda: fa.DynamicScale(8.0, growth_interval=9, hysteresis=2, refill="good"),
        lambda: references.Megatron(8.0, interval=9),
        "after bad good bad: scale: found 8.0, expected 4.0",
    ),
    "one clean step too early": (
        lambda: fa.DynamicScale(8.0, growth_interval=2),
        lambda: references.Flax(8.0, interval=2),
        "after good good: scale: found 16.0, expected 8.0 as Flax has it",
    ),
    "DeepSpeed without its extra step": (
        lambda: fa.DynamicScale(8.0, growth_interval=2, hysteresis=2),
        lambda: references.DeepSpeed(8.0, window=2),
        "after good good: scale: found 16.0, expected 8.0",
    ),
    "apex without its ceiling": (
        lambda: fa.DynamicScale(2.0**24, growth_interval=1),
        lambda: references.Apex(2.0**24, window=1),
        "after good: scale: found 33554432.0, expected 16777216.0",
    ),
}


@pytest.mark.parametrize("name", WRONG_RULES)
def test_the_machine_shrinks_a_wrong_rule_to_the_shortest_history(name: str):
    make_scaler, make_reference, message = WRONG_RULES[name]
    with pytest.raises(AssertionError, match=f"^scaler_machine: {message}"):
        run_state_machine_as_test(kit.scaler_machine(make_scaler, make_reference))


def test_the_update_of_a_machine_can_be_replaced():
    def upside_down(scaler: Any, finite: Tensor) -> Any:
        return fa.update_scale(scaler, ~finite)

    machine = kit.scaler_machine(fa.DynamicScale, references.Torch, update=upside_down)
    with pytest.raises(AssertionError, match=r"after (good|bad): scale"):
        run_state_machine_as_test(machine)
