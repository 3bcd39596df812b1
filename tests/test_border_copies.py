"""The copy of a module is the module: what it shares, what it is keyed by, and what its classes say about copies."""

from __future__ import annotations

import array
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa
from tests.test_cases_modules import Net, assert_trains_as_torch, drawn, variants

ROWS = drawn(5, 3)


# One object behind an attribute and behind a hook


class Flag:
    scale = 1.0


class SharedDict(Net):
    def __init__(self):
        super().__init__()
        context: dict[str, float] = {"scale": 1.0}
        self.context = context

        def scaled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out * context["scale"]

        self.l.register_forward_hook(scaled)

    def forward(self, x: Tensor) -> Tensor:
        self.context["scale"] = 3.0
        out = super().forward(x)
        self.context["scale"] = 1.0
        return out


class SharedObject(Net):
    def __init__(self):
        super().__init__()
        flag: Any = Flag()
        self.flag = [flag]

        def scaled(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            return out * flag.scale

        self.l.register_forward_hook(scaled)

    def forward(self, x: Tensor) -> Tensor:
        self.flag[0].scale = 3.0
        out = super().forward(x)
        self.flag[0].scale = 1.0
        return out


class SharedByAWeakReference(Net):
    def __init__(self):
        super().__init__()
        self.flag = Flag()
        self.seen = weakref.ref(self.flag)

    def forward(self, x: Tensor) -> Tensor:
        self.flag.scale = 3.0
        seen = self.seen()
        assert seen is not None
        return super().forward(x) * seen.scale


class SharedDefault(Net):
    def __init__(self):
        super().__init__()
        self.kept = kept = [1.0]

        def scaled(out: Tensor, kept: list[float] = kept) -> Tensor:
            return out * kept[0]

        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        self.kept[0] = 3.0
        out = self.scaled(super().forward(x))
        self.kept[0] = 1.0
        return out


@variants
@pytest.mark.parametrize("make", [SharedDict, SharedObject, SharedByAWeakReference, SharedDefault])
def test_what_a_module_shares_with_its_hooks_stays_one_object(make: Any, backend: Any, donate: bool):
    assert_trains_as_torch(make, backend, donate)


class Features(Net):
    """A hook hands features over in a dict that the module holds."""

    def __init__(self, first: Any = None):
        super().__init__()
        features: dict[str, Any] = {} if first is None else {"f": first}
        self.features = features
        self.l.register_forward_hook(lambda module, args, out: features.update(f=out))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.features["f"].sum()


@pytest.mark.parametrize("first", [None, torch.zeros(4)])
def test_features_that_a_hook_hands_over_are_scratch(first: Any):
    net = Features(first)
    apply, params, _ = fa.from_module(net)
    with pytest.raises(RuntimeError, match=r"keeps something at \[\"features\['f'\]\"\].*scratch="):
        apply(params, ROWS)
    apply, params, _ = fa.from_module(net, scratch=("features",))
    for _ in range(2):
        assert torch.equal(apply(params, ROWS), net(ROWS))


# The memory of a parameter behind something else


class Viewing(Net):
    def __init__(self, view: Callable[[Tensor], Any]):
        super().__init__()
        self.register_buffer("n", torch.zeros(3))
        self.view = view(self.l.weight.detach()), view(self.get_buffer("n"))


@pytest.mark.parametrize(
    "view",
    [
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.numpy()[::-1],
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: tensor.untyped_storage(),
    ],
)
def test_an_array_over_the_memory_of_a_parameter_is_refused(view: Any):
    with pytest.raises(TypeError, match=r"memory of a parameter or buffer behind the \w+ at 'view\[0\]', expected"):
        fa.from_module(Viewing(view))


def test_an_array_that_the_forward_makes_is_followed():
    class Made(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * float(self.l.weight.detach().numpy().sum())

    assert_trains_as_torch(Made, "autograd", False)


# Tables


class Table(Net):
    """Scales a layer by a table, in which others have the scale 1."""

    def __init__(self, make: Callable[[Net], Any], find: Callable[[Net], Any]):
        super().__init__()
        self.table, self.find = make(self), find

    def forward(self, x: Tensor) -> Tensor:
        scale = 3.0 if self.find(self) in self.table else 1.0
        return self.o(torch.tanh(self.l(x) * scale))


BY_ID = {
    "dict": lambda net: {id(net.l): 3.0},
    "set": lambda net: {id(net.l)},
    "list of pairs": lambda net: [id(net.l), (id(net.l), 3.0)],
    "of a parameter": lambda net: {id(net.l.weight): 3.0},
    "address": lambda net: {net.l.weight.data_ptr(): 3.0},
}


@pytest.mark.parametrize("name", BY_ID)
def test_a_table_of_ids_is_refused(name: str):
    with pytest.raises(TypeError, match=r"found the id or the address of a part .* at 'table.*Use the layer itself"):
        fa.from_module(Table(BY_ID[name], lambda net: id(net.l)))


@pytest.mark.parametrize("make", [lambda net: {net.l.weight: 3.0}, lambda net: frozenset([net.l.weight])])
def test_a_table_of_parameters_is_refused(make: Any):
    with pytest.raises(TypeError, match=r"found 'l.weight' as a key of 'table', expected names.*Use the names"):
        fa.from_module(Table(make, lambda net: net.l.weight))


@pytest.mark.parametrize(
    ("make", "find"),
    [
        (lambda net: {net.l: 3.0}, lambda net: net.l),
        (lambda net: {net.l}, lambda net: net.l),
        (lambda net: {"l.weight": 3.0}, lambda net: "l.weight"),
        (lambda net: [net.l.weight], lambda net: net.l.weight),
    ],
)
def test_a_table_of_layers_or_names_is_followed(make: Any, find: Any):
    if isinstance(make(Net()), list):
        find = _is_first
    assert_trains_as_torch(lambda: Table(make, find), "func", False)


def _is_first(net: Any) -> Any:
    return net.table[0] if net.table[0] is net.l.weight else None


# Classes that say how they are copied


class Fresh(Net):
    def __deepcopy__(self, memo: Any) -> Fresh:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        return made


class Tie(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.b.weight = self.a.weight

    def __deepcopy__(self, memo: Any) -> Tie:
        made = Tie.__new__(Tie)
        memo[id(self)] = made
        made.__dict__ = copy.deepcopy(self.__dict__, memo)
        made.b.weight = nn.Parameter(made.a.weight.detach().clone())
        return made


class Forgetful(Net):
    cache: Any = None

    def __init__(self, cache: Any):
        super().__init__()
        self.cache = cache

    def __getstate__(self) -> Any:
        return {**self.__dict__, "cache": None}


class Dropping(Net):
    def __init__(self):
        super().__init__()
        self.scale = 3.0

    def __getstate__(self) -> Any:
        return {key: value for key, value in self.__dict__.items() if key != "scale"}


class Held:
    """No module, and forgets."""

    def __init__(self, n: int = 0):
        self.n = n

    def __reduce__(self) -> Any:
        return Held, ()


def _holding() -> nn.Module:
    net = Net()
    net.f = Held(2)
    return net


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (Fresh, ""),
        (lambda: nn.Sequential(nn.Tanh(), Fresh()), "1"),
        (Tie, "b.weight"),
        (lambda: Forgetful(torch.ones(4)), "cache"),
        (lambda: Forgetful(2.0), "cache"),
        (lambda: Forgetful({"a": 1}), "cache"),
        (Dropping, "scale"),
        (_holding, "f.n"),
    ],
)
def test_a_class_whose_copies_hold_something_else_is_refused(make: Any, place: str):
    with pytest.raises(TypeError, match=rf"copy.deepcopy gives something else at '{place}.*Remove __deepcopy__, __get"):
        fa.from_module(make())


def test_a_deepcopy_that_copies_every_attribute_with_the_memo_is_followed():
    class Whole(Fresh):
        def __deepcopy__(self, memo: Any) -> Any:
            made = type(self).__new__(type(self))
            memo[id(self)] = made
            made.__dict__ = copy.deepcopy(self.__dict__, memo)
            return made

    class Kept(Forgetful):
        def __getstate__(self) -> Any:
            return self.__dict__

    assert_trains_as_torch(Whole, "func", False)
    assert_trains_as_torch(lambda: Kept(array.array("d", [1.0])), "func", False)
    assert_trains_as_torch(lambda: Forgetful(None), "func", False)


def test_a_traced_graph_module_is_followed():
    assert_trains_as_torch(lambda: torch.fx.symbolic_trace(Net()), "func", False)
