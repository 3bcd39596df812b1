"""The scalers against torch, against the other systems' rules, and their state as a value."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
import functional_amp.testing as own
from functional_amp.testing import references as reference

TINY = torch.finfo(torch.float32).tiny
HUGE = torch.finfo(torch.float32).max
GOOD, BAD = torch.tensor(True), torch.tensor(False)


def updated(scaler: Any, overflow: bool) -> Any:
    return fa.update_scale(scaler, BAD if overflow else GOOD)


def trajectory(scaler: Any, overflows: Iterable[bool]) -> list[Any]:
    """The scaler after each step."""
    after = []
    for overflow in overflows:
        scaler = updated(scaler, overflow)
        after.append(scaler)
    return after


def scales(scaler: Any, overflows: Iterable[bool]) -> list[float]:
    return [scaler.scale.item() for scaler in trajectory(scaler, overflows)]


def ulps(a: float, b: float) -> int:
    """How many float32 numbers lie between two positive ones."""
    bits = torch.tensor([a, b], dtype=torch.float32).view(torch.int32).tolist()
    return abs(bits[0] - bits[1])


# The published vectors


PATTERN = [bool(int(digit)) for digit in "101100011"]
START = {"scale": 8.0, "growth_interval": 3}
VECTORS = {
    "torch": (
        lambda: fa.DynamicScale(**START),
        lambda: reference.Torch(8.0, interval=3),
        [4, 4, 2, 1, 1, 1, 2, 1, 0.5],
        [8, 8, 16, 16, 16, 32, 32],
    ),
    "apex": (
        lambda: fa.DynamicScale.apex(8.0, scale_window=3),
        lambda: reference.Apex(8.0, window=3),
        [4, 4, 2, 1, 1, 1, 2, 1, 0.5],
        [8, 8, 16, 16, 16, 32, 32],
    ),
    "megatron": (
        lambda: fa.DynamicScale.megatron(8.0, growth_interval=3),
        lambda: reference.Megatron(8.0, interval=3),
        [8, 8, 4, 2, 2, 2, 4, 4, 2],
        [8, 8, 16, 16, 16, 32, 32],
    ),
    "deepspeed": (
        lambda: fa.DynamicScale.deepspeed(8.0, scale_window=3),
        lambda: reference.DeepSpeed(8.0, window=3),
        [8, 8, 4, 2, 2, 2, 2, 1, 1],
        [8, 8, 8, 16, 16, 16, 32],
    ),
    "deepspeed, consecutive": (
        lambda: fa.DynamicScale.deepspeed(8.0, scale_window=3, consecutive_hysteresis=True),
        lambda: reference.DeepSpeed(8.0, window=3, consecutive=True),
        [8, 8, 8, 4, 4, 4, 4, 4, 2],
        [8, 8, 8, 16, 16, 16, 32],
    ),
    "apex, hysteresis kernel": (
        lambda: fa.DynamicScale.apex(8.0, scale_window=3, hysteresis=2),
        lambda: reference.ApexHysteresis(8.0, interval=3),
        [8, 8, 8, 4, 4, 4, 8, 8, 4],
        [8, 8, 16, 16, 16, 32, 32],
    ),
}


@pytest.mark.parametrize("rule", VECTORS)
def test_each_rule_gives_its_published_vectors(rule: str):
    ours, theirs, mixed, clean = VECTORS[rule]
    assert reference.scales(theirs(), PATTERN) == scales(ours(), PATTERN) == mixed
    assert reference.scales(theirs(), [False] * 7) == scales(ours(), [False] * 7) == clean


COUNTED_VECTORS = {
    "jmp": (
        lambda: fa.DynamicScale.jmp(8.0, period=2, min_scale=0.25),
        lambda: reference.Jmp(8.0, period=2, minimum=0.25),
        "counter",
        "0001001111111",
        [8, 16, 16, 8, 8, 16, 8, 4, 2, 1, 0.5, 0.25, 0.25],
        [1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
    ),
    "flax": (
        lambda: fa.DynamicScale.flax(8.0, growth_interval=3),
        lambda: reference.Flax(8.0, interval=3),
        "fin_steps",
        "00000000100010",
        [8, 8, 8, 16, 16, 16, 16, 32, 16, 16, 16, 16, 8, 8],
        [1, 2, 3, 0, 1, 2, 3, 0, 0, 1, 2, 3, 0, 1],
    ),
}


@pytest.mark.parametrize("rule", COUNTED_VECTORS)
def test_each_rule_gives_its_published_scales_and_counters(rule: str):
    ours, theirs, counter, digits, expected_scales, expected_counts = COUNTED_VECTORS[rule]
    overflows = [digit == "1" for digit in digits]
    after = trajectory(ours(), overflows)
    assert [scaler.scale.item() for scaler in after] == expected_scales
    assert [scaler.growth_tracker.item() for scaler in after] == expected_counts
    model = theirs()
    found = []
    for overflow in overflows:
        model.update(overflow)
        found.append((model.scale, getattr(model, counter)))
    assert found == list(zip(expected_scales, expected_counts))


# torch


def amp_update(scale: float, tracker: int, overflow: bool, growth: float, backoff: float, interval: int):
    """`torch._amp_update_scale_` on fresh tensors."""
    scale_tensor, tracker_tensor = torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32)
    torch._amp_update_scale_(scale_tensor, tracker_tensor, torch.tensor(float(overflow)), growth, backoff, interval)
    return scale_tensor.item(), int(tracker_tensor.item())


@given(
    scale=own.loss_scales(),
    growth=own.growth_factors(),
    backoff=own.backoff_factors(),
    interval=st.integers(1, 6),
    overflows=own.overflow_patterns(),
)
def test_update_scale_equals_torch_amp_update_scale_bit_for_bit(
    scale: float, growth: float, backoff: float, interval: int, overflows: list[bool]
):
    scaler = fa.DynamicScale(scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    tracker = 0
    for overflow in overflows:
        scaler = updated(scaler, overflow)
        scale, tracker = amp_update(scale, tracker, overflow, growth, backoff, interval)
        scale = max(scale, TINY)  # torch's goes on to subnormals and to 0
        assert (scaler.scale.item(), scaler.growth_tracker.item()) == (scale, tracker)


@given(
    scale=own.loss_scales(low=2.0**-100, high=2.0**100),
    growth=own.growth_factors(exact=False),
    backoff=st.floats(0.001, 0.999),
    interval=st.integers(1, 3),
    tracker=st.integers(0, 2),
    overflow=st.booleans(),
)
def test_factors_that_float32_does_not_hold_come_within_one_ulp_of_torch(
    scale: float, growth: float, backoff: float, interval: int, tracker: int, overflow: bool
):
    tracker %= interval
    after = updated(
        fa.DynamicScale(scale, tracker, growth_factor=growth, backoff_factor=backoff, growth_interval=interval),
        overflow,
    )
    expected, expected_tracker = amp_update(scale, tracker, overflow, growth, backoff, interval)
    assert ulps(after.scale.item(), expected) <= 1
    assert after.growth_tracker.item() == expected_tracker


class ImperativeLoop:
    """The seed loop around `torch.amp.GradScaler`, on one parameter whose gradient is given."""

    def __init__(self, **arguments: Any):
        self.scaler = torch.amp.GradScaler("cpu", **arguments)
        self.scaler.scale(torch.zeros(()))
        self.parameter = torch.nn.Parameter(torch.zeros(()))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)

    def update(self, overflow: bool) -> tuple[float, int]:
        self.parameter.grad = torch.tensor(math.inf if overflow else 1.0)
        self.scaler.unscale_(self.optimizer)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


@given(
    scale=own.powers_of_two(-20, 60),
    growth=own.growth_factors(),
    backoff=st.sampled_from([0.5, 0.25, 0.75, 0.625]),
    interval=st.integers(1, 6),
    overflows=own.overflow_patterns(),
)
def test_dynamic_scale_equals_grad_scaler(
    scale: float, growth: float, backoff: float, interval: int, overflows: list[bool]
):
    loop = ImperativeLoop(init_scale=scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    scaler = fa.DynamicScale(scale, growth_factor=growth, backoff_factor=backoff, growth_interval=interval)
    after = trajectory(scaler, overflows)
    found = [(scaler.scale.item(), scaler.growth_tracker.item()) for scaler in after]
    assert found == [loop.update(overflow) for overflow in overflows]


@given(start=st.integers(1985, 1999), overflows=own.overflow_patterns())
def test_the_defaults_are_grad_scalers(start: int, overflows: list[bool]):
    loop = ImperativeLoop()
    scaler = fa.DynamicScale()
    assert scaler.scale.item() == loop.scaler.state_dict()["scale"]
    loop.scaler.load_state_dict({**loop.scaler.state_dict(), "_growth_tracker": start})
    scaler = dataclasses.replace(scaler, growth_tracker=start)
    found = [(scaler.scale.item(), scaler.growth_tracker.item()) for scaler in trajectory(scaler, overflows)]
    assert found == [loop.update(overflow) for overflow in overflows]


@pytest.mark.parametrize("tracker", [3, 4, 100])
def test_an_interval_lowered_below_the_tracker_still_grows(tracker: int):
    scaler = fa.DynamicScale(8.0, tracker, growth_interval=1000)
    lowered = dataclasses.replace(scaler, growth_interval=3)
    assert scales(lowered, [False] * 4) == [16, 16, 16, 32]
    assert amp_update(8.0, tracker, False, 2.0, 0.5, 3) == (8.0, tracker + 1)  # what is different in torch


# The other systems; on random sequences they run in test_conformance.py


@given(
    scale=own.loss_scales(low=1.0, high=2.0**100),
    factor=own.growth_factors(exact=False),
    period=st.integers(1, 5),
    counter=st.integers(0, 4),
    overflow=st.booleans(),
)
def test_jmp_comes_within_one_ulp_of_its_reference_for_any_factor(
    scale: float, factor: float, period: int, counter: int, overflow: bool
):
    counter %= period
    ours = dataclasses.replace(fa.DynamicScale.jmp(scale, period=period, factor=factor), growth_tracker=counter)
    theirs = reference.Jmp(scale, period, factor, counter=counter)
    ours = updated(ours, overflow)
    theirs.update(overflow)
    assert ulps(ours.scale.item(), theirs.scale) <= 1
    assert ours.growth_tracker.item() == theirs.counter


DEFAULTS: dict[str, tuple[Callable[[], fa.DynamicScale], Callable[[], reference.Reference], int]] = {
    "torch": (fa.DynamicScale, reference.Torch, 2000),
    "megatron": (fa.DynamicScale.megatron, reference.Megatron, 1000),
    "deepspeed": (fa.DynamicScale.deepspeed, reference.DeepSpeed, 1000),
    "apex": (fa.DynamicScale.apex, reference.Apex, 2000),
    "jmp": (fa.DynamicScale.jmp, reference.Jmp, 2000),
    "flax": (fa.DynamicScale.flax, reference.Flax, 2000),
}


@pytest.mark.parametrize("rule", DEFAULTS)
def test_the_defaults_of_each_rule_are_its_systems(rule: str):
    ours, theirs, interval = DEFAULTS[rule]
    assert ours().scale.item() == theirs().scale
    overflows = [True] * 3 + [False] * (interval + 2) + [True] * 40
    assert scales(ours(), overflows) == reference.scales(theirs(), overflows)


# Where the scale must not go


@given(arguments=own.hyperparameters(), overflows=own.overflow_patterns())
def test_the_scale_stays_a_normal_float32_within_its_bounds(arguments: dict[str, Any], overflows: list[bool]):
    for scaler in trajectory(fa.DynamicScale(**arguments), overflows):
        scale = scaler.scale.item()
        assert TINY <= scale <= HUGE
        assert arguments["min_scale"] <= scale <= arguments["max_scale"]
        assert -arguments["growth_delay"] <= scaler.growth_tracker.item() < arguments["growth_interval"]
        assert 0 <= scaler.hysteresis_tracker.item() <= arguments["hysteresis"]


@pytest.mark.parametrize("floor", [TINY, 2.0**-10, 1.0])
def test_a_thousand_overflows_end_at_the_floor_and_good_data_brings_the_scale_back(floor: float):
    scaler = fa.DynamicScale(min_scale=floor, growth_interval=1)
    for _ in range(1000):
        scaler = updated(scaler, True)
    assert scaler.scale.item() == floor
    assert scales(scaler, [False] * 3) == [2 * floor, 4 * floor, 8 * floor]


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_four_hundred_growths_stay_finite_and_an_overflow_still_lowers_the_scale(factor: float):
    scaler = fa.DynamicScale(growth_factor=factor, growth_interval=1)
    for _ in range(400):
        scaler = updated(scaler, False)
    top = scaler.scale.item()
    assert math.isfinite(top)
    assert scaler.growth_tracker.item() == 0
    assert scales(scaler, [True]) == [top / 2]


def test_a_refused_growth_resets_the_tracker():
    after = updated(fa.DynamicScale(2.0**127, growth_interval=1), False)
    assert (after.scale.item(), after.growth_tracker.item()) == (2.0**127, 0)


def test_the_ceiling_is_reached_exactly():
    assert scales(fa.DynamicScale(8.0, growth_interval=1, max_scale=20.0), [False] * 3) == [16, 20, 20]


HUGE_ARGUMENTS = {
    "max_scale": (1e39, [16.0]),
    "growth_interval": (2**40, [8.0]),
    "hysteresis": (2**40, [16.0]),
    "growth_delay": (2**40, [8.0]),
    "growth_tracker": (2**40, [16.0]),
    "hysteresis_tracker": (2**40, [16.0]),
}


@pytest.mark.parametrize("name", HUGE_ARGUMENTS)
def test_a_number_beyond_its_dtype_is_refused_at_once_or_works(name: str):
    value, expected = HUGE_ARGUMENTS[name]
    try:
        scaler = fa.DynamicScale(8.0, **{"growth_interval": 1, name: value})
    except ValueError as error:
        assert name in str(error)
        return
    assert scales(scaler, [False]) == expected


@given(
    scaler=st.one_of(own.loss_scales().map(fa.StaticScale), st.builds(fa.NoScale)), overflows=own.overflow_patterns()
)
def test_static_scales_never_move(scaler: Any, overflows: list[bool]):
    assert set(scales(scaler, overflows)) <= {scaler.scale.item()}


def test_no_scale_is_exactly_one():
    assert fa.NoScale().scale.item() == 1.0


# Hysteresis


def test_hysteresis_is_visible_state():
    after = trajectory(fa.DynamicScale(8.0, hysteresis=3), [True] * 4)
    assert [scaler.hysteresis_tracker.item() for scaler in after] == [2, 1, 0, 0]
    assert [scaler.scale.item() for scaler in after] == [8, 8, 4, 2]


@pytest.mark.parametrize(("refill", "left"), [("good", [2, 3, 3, 3]), ("growth", [2, 2, 2, 3])])
def test_hysteresis_is_refilled_at_each_clean_step_or_at_a_growth(refill: Any, left: list[int]):
    after = trajectory(
        fa.DynamicScale(8.0, hysteresis=3, refill=refill, growth_interval=3), [True, False, False, False]
    )
    assert [scaler.hysteresis_tracker.item() for scaler in after] == left


def test_a_run_can_be_continued_from_the_trackers():
    scaler = fa.DynamicScale(8.0, hysteresis=2, growth_interval=4, growth_delay=1)
    overflows = [False, False, True, False, False, False, True, True, False]
    expected = scales(scaler, overflows)
    after = trajectory(scaler, overflows[:4])[-1]
    restored = fa.DynamicScale(
        after.scale.item(),
        int(after.growth_tracker.item()),
        int(after.hysteresis_tracker.item()),
        hysteresis=2,
        growth_interval=4,
        growth_delay=1,
    )
    assert scales(restored, overflows[4:]) == expected[4:]


# The scaler as a value


ODD: dict[str, Any] = {
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "min_scale": 0.125,
    "max_scale": 2.0**30,
    "hysteresis": 3,
    "refill": "good",
    "growth_delay": 2,
}
"""Every static field away from its default."""


def odd_scaler() -> Any:
    return fa.DynamicScale(24.0, 5, 2, **ODD)


def fields(scaler: Any) -> dict[str, Any]:
    """All fields, tensors as their dtype, shape and value."""
    return {
        name: (value.dtype, value.shape, value.tolist()) if isinstance(value, Tensor) else value
        for name, value in vars(scaler).items()
    }


def by_torch_save(scaler: Any, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(scaler, file)
    file.seek(0)
    with torch.serialization.safe_globals([fa.DynamicScale, fa.StaticScale, fa.NoScale]):
        return torch.load(file, weights_only=weights_only)


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "optree.tree_map": lambda scaler: optree.tree_map(torch.clone, scaler),
    "torch.utils._pytree.tree_map": lambda scaler: torch_pytree.tree_map(torch.clone, scaler),
    "dataclasses.replace": dataclasses.replace,
    "torch.save": lambda scaler: by_torch_save(scaler, weights_only=False),
    "torch.save, weights only": lambda scaler: by_torch_save(scaler, weights_only=True),
}
"""Those beside `check_scaler`'s."""


@pytest.mark.parametrize("way", ROUND_TRIPS)
@pytest.mark.parametrize("make", [odd_scaler, lambda: fa.StaticScale(24.0), fa.NoScale])
def test_every_field_survives_a_round_trip(make: Callable[[], Any], way: str):
    scaler = make()
    back = ROUND_TRIPS[way](scaler)
    assert type(back) is type(scaler)
    assert fields(back) == fields(scaler)
    assert scales(back, PATTERN) == scales(scaler, PATTERN)


def test_the_odd_scaler_differs_from_the_default_in_every_field():
    odd, default = fields(odd_scaler()), fields(fa.DynamicScale())
    assert odd.keys() == default.keys()
    assert not [name for name in odd if odd[name] == default[name]]


def test_both_pytree_libraries_see_the_same_leaves_in_the_same_order():
    scaler = odd_scaler()
    ours, theirs = optree.tree_leaves(scaler), torch_pytree.tree_leaves(scaler)
    assert len(ours) == 3
    assert all(a is b for a, b in zip(ours, theirs, strict=True))
    assert [leaf.dtype for leaf in ours] == [torch.float32, torch.int32, torch.int32]


def test_scalers_with_other_hyperparameters_have_other_structures():
    scaler = odd_scaler()
    for name, value in ODD.items():
        other = dataclasses.replace(scaler, **{name: "growth" if name == "refill" else value * 2})
        assert optree.tree_structure(other) != optree.tree_structure(scaler)
        assert torch_pytree.tree_structure(other) != torch_pytree.tree_structure(scaler)


def stacked(members: Sequence[Any]) -> Any:
    return optree.tree_map(lambda *leaves: torch.stack(leaves), *members)


def test_vmap_moves_each_scaler_of_an_ensemble_by_its_own_flag_and_keeps_the_fields():
    members: list[Any] = [dataclasses.replace(odd_scaler(), scale=scale) for scale in (8.0, 24.0, 1024.0)]
    flags = [True, False, True]
    after = torch.func.vmap(fa.update_scale)(stacked(members), torch.tensor(flags))
    assert {name: getattr(after, name) for name in ODD} == ODD
    for index, (member, flag) in enumerate(zip(members, flags, strict=True)):
        alone = updated(member, not flag)
        assert fields(optree.tree_map(lambda leaf, index=index: leaf[index], after)) == fields(alone)


def test_an_ensemble_needs_no_vmap():
    ensemble = stacked([fa.DynamicScale(8.0), fa.DynamicScale(16.0)])
    assert fa.update_scale(ensemble, torch.tensor([False, True])).scale.tolist() == [4.0, 16.0]


@given(scaler=own.scalers(), overflow=st.booleans())
def test_update_scale_is_pure_and_keeps_structure_shapes_and_dtypes(scaler: Any, overflow: bool):
    before, versions = fields(scaler), [leaf._version for leaf in optree.tree_leaves(scaler)]
    after = updated(scaler, overflow)
    assert fields(scaler) == before
    assert [leaf._version for leaf in optree.tree_leaves(scaler)] == versions
    assert optree.tree_structure(after) == optree.tree_structure(scaler)
    for new, old in zip(optree.tree_leaves(after), optree.tree_leaves(scaler), strict=True):
        assert (new.dtype, new.shape, new.device) == (old.dtype, old.shape, old.device)


def test_scalers_are_frozen():
    for scaler in (fa.DynamicScale(), fa.StaticScale(2.0), fa.NoScale()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            scaler.scale = torch.tensor(1.0)  # pyright: ignore[reportAttributeAccessIssue]


@dataclasses.dataclass(frozen=True)
class Halving:
    """A scaler from outside: it halves at an overflow and never grows."""

    scale: Tensor

    def update(self, finite: Tensor) -> Halving:
        return Halving(torch.where(finite, self.scale, self.scale / 2))


def test_a_scaler_of_ones_own_fits():
    assert scales(Halving(torch.tensor(8.0)), [True, False, True]) == [4, 4, 2]


# What is refused


BAD_SCALES = {
    "inf": (math.inf, ValueError),
    "negative inf": (-math.inf, ValueError),
    "nan": (math.nan, ValueError),
    "zero": (0.0, ValueError),
    "int zero": (0, ValueError),
    "negative": (-8.0, ValueError),
    "above float32": (1e39, ValueError),
    "subnormal": (1e-40, ValueError),
    "None": (None, TypeError),
    "str": ("8", TypeError),
    "bool": (True, TypeError),
    "complex": (8j, TypeError),
    "list": ([8.0], TypeError),
    "tensor inf": (torch.tensor(math.inf), ValueError),
    "tensor nan": (torch.tensor(math.nan), ValueError),
    "tensor zero": (torch.tensor(0.0), ValueError),
    "tensor negative": (torch.tensor(-8.0), ValueError),
    "tensor subnormal": (torch.tensor(1e-40), ValueError),
    "one bad of an ensemble": (torch.tensor([8.0, math.nan]), ValueError),
    "float64 tensor": (torch.tensor(8.0, dtype=torch.float64), TypeError),
    "float16 tensor": (torch.tensor(8.0, dtype=torch.float16), TypeError),
    "int tensor": (torch.tensor(8), TypeError),
    "bool tensor": (torch.tensor(True), TypeError),
}
CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "DynamicScale": fa.DynamicScale,
    "StaticScale": fa.StaticScale,
    "megatron": fa.DynamicScale.megatron,
    "deepspeed": fa.DynamicScale.deepspeed,
    "apex": fa.DynamicScale.apex,
    "jmp": fa.DynamicScale.jmp,
    "flax": fa.DynamicScale.flax,
}


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
@pytest.mark.parametrize("case", BAD_SCALES)
def test_a_scale_that_is_no_finite_positive_float32_is_refused(constructor: str, case: str):
    value, error = BAD_SCALES[case]
    with pytest.raises(error, match=r"^scale: found .*, expected "):
        CONSTRUCTORS[constructor](value)


@pytest.mark.parametrize("constructor", CONSTRUCTORS)
def test_numbers_and_tensors_give_the_same_scaler(constructor: str):
    make = CONSTRUCTORS[constructor]
    assert fields(make(8)) == fields(make(8.0)) == fields(make(torch.tensor(8.0)))


@pytest.mark.parametrize("value", [2.0, 0.0, math.nan, torch.tensor(2.0), torch.tensor(math.inf)])
def test_no_scale_takes_no_other_scale_than_one(value: Any):
    with pytest.raises(ValueError, match=r"^scale: found .*, expected "):
        fa.NoScale(value)


OUT_OF_DOMAIN = {
    "growth_factor": [1.0, 0.5, 0.0, -2.0, math.inf, math.nan],
    "backoff_factor": [0.0, 1.0, 2.0, -0.5, math.inf, math.nan],
    "growth_interval": [0, -1],
    "min_scale": [0.0, -1.0, 1e-40, 1e39, math.inf, math.nan],
    "max_scale": [0.0, -1.0, math.nan, -math.inf],
    "hysteresis": [0, -1],
    "growth_delay": [-1],
    "refill": ["never", "", None, True],
}
WRONG_TYPE = {
    "growth_factor": ["2", None, True, 2j, torch.tensor(2.0)],
    "backoff_factor": ["0.5", None, False, torch.tensor(0.5)],
    "growth_interval": ["3", None, True, 2.0, torch.tensor(3)],
    "min_scale": ["1", None, True, torch.tensor(1.0)],
    "max_scale": ["1", None, True, torch.tensor(1.0)],
    "hysteresis": ["1", None, True, 1.5],
    "growth_delay": ["1", None, True, 1.5],
    "growth_tracker": ["1", True, 1.5, torch.tensor(1), torch.tensor(1.0)],
    "hysteresis_tracker": ["1", True, 1.5, torch.tensor(1), torch.tensor(1.0)],
}
BAD_HYPERPARAMETERS = [(name, value, ValueError) for name, values in OUT_OF_DOMAIN.items() for value in values] + [
    (name, value, TypeError) for name, values in WRONG_TYPE.items() for value in values
]


@pytest.mark.parametrize(("name", "value", "error"), BAD_HYPERPARAMETERS)
def test_a_bad_hyperparameter_is_refused_by_name(name: str, value: Any, error: type[Exception]):
    with pytest.raises(error, match=f"^{name}: found .*, expected "):
        fa.DynamicScale(8.0, **{name: value})


BAD_NAMED = {
    "megatron": {"growth_interval": 0, "hysteresis": 0, "min_scale": 0.0, "growth_factor": 1.0, "backoff_factor": 1.0},
    "deepspeed": {"scale_window": 0, "hysteresis": 0, "min_scale": 0.0},
    "apex": {"scale_window": 0, "hysteresis": 0, "min_scale": 0.0, "max_scale": math.nan},
    "jmp": {"period": 0, "factor": 1.0, "min_scale": 0.0},
    "flax": {"growth_interval": 0, "min_scale": 0.0, "growth_factor": 1.0, "backoff_factor": 1.0},
}


@pytest.mark.parametrize(("constructor", "name"), [(c, name) for c, names in BAD_NAMED.items() for name in names])
def test_a_bad_hyperparameter_of_a_named_constructor_is_refused(constructor: str, name: str):
    # deepspeed's `scale_window` and jmp's `period` are called growth_interval in the message.
    with pytest.raises(ValueError, match=r"^[a-z_]+: found .*, expected "):
        CONSTRUCTORS[constructor](8.0, **{name: BAD_NAMED[constructor][name]})


@pytest.mark.parametrize(
    "make", [lambda: fa.DynamicScale(2.0, min_scale=4.0), lambda: fa.DynamicScale(8.0, max_scale=4.0)]
)
def test_a_scale_outside_its_bounds_is_refused(make: Callable[[], Any]):
    with pytest.raises(ValueError, match=r"^scale: found .*, expected .* from .* to "):
        make()


@pytest.mark.parametrize("finite", [True, False, 1, None, torch.tensor(1.0), torch.tensor(1)])
def test_a_flag_that_is_no_bool_tensor_is_refused(finite: Any):
    with pytest.raises(TypeError, match=r"^finite: found .*, expected a bool tensor"):
        fa.update_scale(fa.DynamicScale(), finite)


@pytest.mark.parametrize("shape", [(1,), (2,)])
def test_a_flag_of_another_shape_than_the_scale_is_refused(shape: tuple[int, ...]):
    with pytest.raises(ValueError, match=r"^finite: found shape .*, expected "):
        fa.update_scale(fa.DynamicScale(), torch.ones(shape, dtype=torch.bool))


def test_the_flag_can_not_be_forgotten():
    with pytest.raises(TypeError, match="finite"):
        fa.update_scale(fa.DynamicScale())  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("scaler", [None, 65536.0, torch.tensor(65536.0), fa.DynamicScale])
def test_something_that_is_no_scaler_is_refused(scaler: Any):
    with pytest.raises(TypeError, match=r"^scaler: found .*, expected "):
        fa.update_scale(scaler, GOOD)


def test_torchs_scaler_is_refused_with_a_remedy():
    with pytest.raises(TypeError, match=r"GradScaler.*use DynamicScale\(\)"):
        fa.update_scale(torch.amp.GradScaler("cpu"), GOOD)  # pyright: ignore[reportArgumentType]
