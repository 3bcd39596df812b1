"""What modules do that one call does not show: torch's loop is reproduced, or it is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, built, drawn, trained, variants

# Writes that leave the values of the first call as they were


class Bounded(Net):
    """Keeps a weight in a range that it is in already, by `.data`."""

    def __init__(self, write: Any, bound: float = 10.0):
        super().__init__()
        self.write, self.bound = write, bound

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.l, self.bound)
        return super().forward(x)


def _clamped_data(layer: Any, bound: float) -> None:
    layer.weight.data.clamp_(-bound, bound)


def _clamped_rows(layer: Any, bound: float) -> None:
    layer.weight[0].data.clamp_(-bound, bound)


def _given_new_data(layer: Any, bound: float) -> None:
    layer.weight.data = layer.weight.data.clamp(-bound, bound)


in_range = pytest.mark.parametrize("write", [_clamped_data, _clamped_rows, _given_new_data])


@variants
@in_range
def test_a_constraint_that_the_first_call_keeps_already_is_refused(write: Any, backend: Any, donate: bool):
    match = "backend='autograd'" if backend == "func" and write is _given_new_data else r"writes to .*\['l\.weight'\]"
    with pytest.raises(RuntimeError, match=match):
        trained(built(lambda: Bounded(write)), backend, donate)


@pytest.mark.parametrize("write", [_clamped_data, _clamped_rows])
def test_a_constraint_on_a_frozen_weight_never_writes_to_what_is_given(write: Any):
    module = built(lambda: Bounded(write))
    module.l.requires_grad_(False)
    apply, params, buffers = fa.from_module(module)
    apply.with_buffers(params, buffers, drawn(2, 3))
    wide = {**buffers, "l.weight": torch.full_like(buffers["l.weight"], 20.0)}
    _, after = apply.with_buffers(params, wide, drawn(2, 3))
    assert bool((wide["l.weight"] == 20).all())
    module.load_state_dict(apply.state_dict(params, wide))
    module(drawn(2, 3))
    assert torch.equal(after["l.weight"], module.l.weight)


class Following(Net):
    """A target that is a copy of a layer, in every call."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.l).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for mine, its in zip(self.target.parameters(), self.l.parameters(), strict=True):
            mine.data.copy_(its.data)
        return super().forward(x) + self.target(x).mean()


@variants
def test_a_frozen_target_that_begins_as_its_source_trains_as_in_torch(backend: Any, donate: bool):
    assert_trains_as_torch(Following, backend, donate)


def test_an_old_state_keeps_its_target():
    apply, params, buffers = fa.from_module(built(Following))
    apply.with_buffers(params, buffers, drawn(2, 3))
    before = {name: value.clone() for name, value in buffers.items()}
    _, after = apply.with_buffers({name: p + 1 for name, p in params.items()}, buffers, drawn(2, 3))
    assert all(torch.equal(buffers[name], value) for name, value in before.items())
    assert torch.equal(after["target.weight"], params["l.weight"] + 1)


class Floor(Net):
    """Raises a buffer through `.data` where the inputs ask for it."""

    low: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.low.data.clamp_(min=x.detach().max())
        return super().forward(x) + self.low


def test_the_fixed_form_refuses_a_write_through_data_that_changed_nothing_yet():
    apply, params, _ = fa.from_module(built(Floor))
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \['low'\]"):
        apply(params, -torch.ones(2, 3))


class AtHome(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.to(x.device, x.dtype)
        return super().forward(x)


def test_a_module_that_moves_itself_to_where_it_is_writes_nothing():
    assert_trains_as_torch(AtHome, "autograd", False)
