"""The laws of a scaler."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from functional_amp.dtypes import FLOAT32_MAX
from functional_amp.registry import with_fields
from functional_amp.testing.compare import assert_alike, assert_same_bits, leaves_of
from functional_amp.testing.conformance.laws import assert_pure, check, compiled_once, in_fake_mode
from functional_amp.values.scaler import update_scale

PATTERN = [flag == "1" for flag in "1101110010111110"]
"""Whether each window is finite."""


def check_scaler(scaler: Any) -> None:
    """Checks the laws of a scaler; one line makes a test of it.

    - every update keeps type, structure, dtypes and hyperparameters
    - the scale stays positive, finite and within `min_scale` and `max_scale`, where it has them
    - the update writes to nothing and returns no view of its inputs
    - every field survives optree, torch's pytree, copy and pickle
    - no tensor is read on the host
    - it compiles to one graph, never recompiles and gives the bits of eager mode

    Whether the rule is the right one is for `scaler_machine` to say. A field that is lost on the
    way can only be seen where it differs from its default: give each an odd value.

    Args:
        scaler: a scaler, with the fields it starts with.

    Raises:
        AssertionError: naming the law, the path of the leaf, what was found and what was expected.

    Compiling resets dynamo, and so drops what the process has compiled.

    >>> import functional_amp as fa
    >>> check_scaler(fa.DynamicScale(growth_interval=3, hysteresis=2))
    """
    check("check_scaler", LAWS, scaler)


def updated(scaler: Any, finite: bool) -> Any:
    return update_scale(scaler, torch.tensor(finite))


def statics(scaler: Any) -> dict[str, Any]:
    """The fields that hold no tensor."""
    fields = vars(scaler) if hasattr(scaler, "__dict__") else getattr(scaler, "_asdict", dict)()
    return {name: value for name, value in fields.items() if not isinstance(value, Tensor)}


def assert_same_scaler(found: Any, expected: Any, what: str) -> None:
    assert_same_kind(found, expected, what)
    assert_same_bits(found, expected, what)


def assert_same_kind(found: Any, expected: Any, what: str) -> None:
    """The same type, statics, structure and dtypes."""
    if type(found) is not type(expected):
        raise AssertionError(f"{what}: found {type(found).__name__}, expected {type(expected).__name__}.")
    before, after = statics(expected), statics(found)
    for name in sorted(before.keys() | after.keys()):
        if name not in after or name not in before or before[name] != after[name]:
            left, right = after.get(name, "nothing"), before.get(name, "nothing")
            raise AssertionError(f"{what}: at {name!r}: found {left!r}, expected {right!r}.")
    assert_alike(found, expected, what)


def it_is_a_pytree_of_tensors(scaler: Any) -> None:
    for library, leaves in (("optree", leaves_of(scaler)), ("torch's pytree", torch_pytree.tree_leaves(scaler))):
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                raise AssertionError(
                    f"{library} found a leaf {type(leaf).__name__}, expected tensors. "
                    "Register the class: functional_amp.register(cls, children, static)."
                )


def every_update_keeps_type_structure_dtypes_and_hyperparameters(scaler: Any) -> None:
    after = scaler
    for index, finite in enumerate(PATTERN):
        after = updated(after, finite)
        assert_same_kind(after, scaler, f"after {index + 1} updates")


def the_scale_stays_positive_finite_and_within_its_bounds(scaler: Any) -> None:
    low, high = getattr(scaler, "min_scale", 0.0), getattr(scaler, "max_scale", math.inf)
    for finite, start in ((False, scaler), (True, scaler), (True, about_to_grow(scaler, high))):
        after = start
        for index in range(300):
            after = updated(after, finite)
            scale = after.scale.item()
            if not (0 < scale < math.inf and low <= scale <= high):
                kind = "clean windows" if finite else "overflows"
                raise AssertionError(
                    f"at 'scale': found {scale} after {index + 1} {kind} in a row, expected a finite number > 0 "
                    f"from {low} to {high}."
                )


def about_to_grow(scaler: Any, high: float) -> Any:
    """The scaler at the largest scale that it may have, growing at each clean window where an interval says so."""
    top = min(high, FLOAT32_MAX)
    raised = optree.tree_map(lambda leaf: torch.full_like(leaf, top) if leaf is scaler.scale else leaf, scaler)
    return with_fields(raised, growth_interval=1) if "growth_interval" in statics(scaler) else raised


def the_update_is_pure(scaler: Any) -> None:
    for finite in (True, False):
        once = assert_pure(update_scale, scaler, torch.tensor(finite))
        assert_same_bits(updated(scaler, finite), once, "the second of two calls")


def by_optree(scaler: Any) -> Any:
    leaves, spec = optree.tree_flatten(scaler)
    return optree.tree_unflatten(spec, leaves)


def by_torch_pytree(scaler: Any) -> Any:
    leaves, spec = torch_pytree.tree_flatten(scaler)
    return torch_pytree.tree_unflatten(leaves, spec)


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "optree": by_optree,
    "torch.utils._pytree": by_torch_pytree,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda scaler: pickle.loads(pickle.dumps(scaler)),
}


def every_field_survives_a_round_trip(scaler: Any) -> None:
    scaler = updated(updated(scaler, True), False)
    for way, travel in ROUND_TRIPS.items():
        back = travel(scaler)
        assert_same_scaler(back, scaler, f"by {way}")
        for finite in PATTERN[:4]:  # what is kept outside the fields shows in the run
            back, expected = updated(back, finite), updated(scaler, finite)
            assert_same_scaler(back, expected, f"after a round trip by {way}")
            scaler = expected


def no_tensor_is_read_on_the_host(scaler: Any) -> None:
    for finite in (True, False):
        in_fake_mode(update_scale, scaler, torch.tensor(finite))


def it_compiles_to_one_graph(scaler: Any) -> None:
    run = compiled_once(lambda scaler, finite: update_scale(scaler, finite))
    found = expected = scaler
    for index, finite in enumerate(PATTERN):
        found, expected = run(found, torch.tensor(finite)), updated(expected, finite)
        assert_same_scaler(found, expected, f"compiled, after {index + 1} updates")


LAWS = (
    it_is_a_pytree_of_tensors,
    the_update_is_pure,
    every_update_keeps_type_structure_dtypes_and_hyperparameters,
    the_scale_stays_positive_finite_and_within_its_bounds,
    every_field_survives_a_round_trip,
    no_tensor_is_read_on_the_host,
    it_compiles_to_one_graph,
)
