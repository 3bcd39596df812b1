"""Values on the way back into a module: written all, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa


class Holder(nn.Module):
    """One parameter and one buffer of a kind, and a parameter that is written first."""

    def __init__(self, parameter: Tensor | None = None, buffer: Tensor | None = None):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(2))
        if parameter is not None:
            self.second = nn.Parameter(parameter)
        self.register_buffer("last", buffer)


def refused(module: nn.Module, params: Any, buffers: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        fa.to_module(module, params, buffers)
    assert torch.equal(module.get_parameter("first"), torch.zeros(2))  # nothing has been written


@pytest.mark.parametrize(
    ("held", "given"),
    [
        (torch.tensor(1), torch.tensor(1.7)),
        (torch.tensor(False), torch.tensor(0.3)),
        (torch.tensor(False), torch.tensor(2)),
        (torch.tensor(1.0), torch.tensor(1 + 1j)),
        (torch.tensor(1), torch.tensor(1 + 1j)),
    ],
)
def test_a_number_of_a_wider_kind_is_refused(held: Tensor, given: Tensor):
    module = Holder(buffer=held)
    refused(module, {"first": torch.ones(2)}, {"last": given}, "at 'last', expected one to copy into")
    fa.to_module(module, {"first": torch.ones(2)}, {"last": torch.ones_like(held)})
    assert torch.equal(module.get_buffer("last"), torch.ones_like(held))


@pytest.mark.parametrize(
    ("held", "given"),
    [
        (torch.tensor(1.0), torch.tensor(3)),
        (torch.tensor(1, dtype=torch.int64), torch.tensor(3, dtype=torch.int32)),
        (torch.tensor(1.0), torch.tensor(0.1, dtype=torch.float64)),
        (torch.tensor(1.0).half(), torch.tensor(0.1)),
        (torch.tensor(1j), torch.tensor(0.5)),
    ],
)
def test_a_number_of_the_same_kind_or_a_narrower_one_is_copied_as_torch_does(held: Tensor, given: Tensor):
    expected = held.clone().copy_(given)
    module = Holder(buffer=held)
    fa.to_module(module, {"first": torch.ones(2)}, {"last": given})
    assert torch.equal(module.get_buffer("last"), expected)


def test_the_modules_own_tensors_may_be_permuted():
    one, other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    module = nn.ModuleDict({"one": one, "other": other})
    first, second = one.weight.detach().clone(), other.weight.detach().clone()
    fa.to_module(module, {"one.weight": other.weight.detach(), "other.weight": one.weight})
    assert torch.equal(one.weight, second) and torch.equal(other.weight, first)
    fa.to_module(module, {"one.weight": one.weight.t(), "other.weight": other.weight.detach()})  # in its own memory
    assert torch.equal(one.weight, second.t()) and torch.equal(other.weight, first)


def inference() -> nn.Module:
    with torch.inference_mode():
        return Holder(torch.zeros(3))


WITHOUT_ROOM = {
    "expanded": (lambda: Holder(torch.zeros(1).expand(3)), "'second' of the module.*clone"),
    "unfolded": (lambda: Holder(torch.zeros(4).unfold(0, 2, 1)), "several elements on the same bytes at 'second'"),
    "inference": (inference, "an inference tensor at 'first'.*inside torch.inference_mode"),
    "meta": (lambda: Holder(torch.zeros(3, device="meta")), "a meta tensor at 'second'.*to_empty"),
}


@pytest.mark.parametrize("make, match", WITHOUT_ROOM.values(), ids=WITHOUT_ROOM)
def test_a_tensor_of_the_module_that_can_not_be_written_to_is_refused_first(make: Callable[[], nn.Module], match: str):
    module = make()
    refused(module, {name: torch.ones(held.shape) for name, held in module.named_parameters()}, None, match)


def test_the_remedies_for_tensors_without_room_work():
    values = {"first": torch.ones(2), "second": torch.ones(3)}
    expanded, on_meta = WITHOUT_ROOM["expanded"][0](), WITHOUT_ROOM["meta"][0]()
    dense = expanded.get_parameter("second").detach().clone(memory_format=torch.contiguous_format)
    expanded.register_parameter("second", nn.Parameter(dense))
    fa.to_module(expanded, values)
    on_meta.to_empty(device="cpu")
    fa.to_module(on_meta, values)
    other = inference()
    with torch.inference_mode():
        fa.to_module(other, values)
    for module in (expanded, on_meta, other):
        assert all(torch.equal(module.get_parameter(name), value) for name, value in values.items())


def test_a_module_without_shapes_is_refused_until_it_has_them():
    layer = nn.LazyLinear(2, bias=False)
    module = nn.ModuleDict({"lazy": layer})
    with pytest.raises(TypeError, match=r"no shape yet at 'lazy.weight'.*Run the module on one batch"):
        fa.to_module(module, {"lazy.weight": torch.ones(2, 3)})
    layer(torch.ones(1, 3))
    fa.to_module(module, {"lazy.weight": torch.ones(2, 3)})
    assert torch.equal(module.get_parameter("lazy.weight"), torch.ones(2, 3))


def test_two_tensors_over_one_memory_are_refused_as_by_from_module():
    memory = torch.zeros(3)
    module = Holder(memory, memory[:2])
    with pytest.raises(TypeError, match="one memory under"):
        fa.from_module(module)
    refused(module, {"first": torch.ones(2), "second": torch.ones(3)}, {"last": torch.ones(2)}, "one memory under")


def test_what_torch_can_not_copy_is_refused_first():
    module = Holder(torch.zeros(2).to(torch.float8_e4m3fn).view(torch.float4_e2m1fn_x2))
    refused(module, {"first": torch.ones(2), "second": torch.ones(2)}, None, "at 'second', expected one to copy into")


def test_a_gradient_hook_of_the_module_is_no_obstacle():
    module = Holder()
    module.get_parameter("first").register_hook(lambda grad: grad)
    fa.to_module(module, {"first": torch.ones(2)})
    assert torch.equal(module.get_parameter("first"), torch.ones(2))
