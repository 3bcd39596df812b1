"""Odd objects at every argument of every public function: they work or raise what is documented, and write nothing."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import fractions
import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_amp as fa
from tests.test_errors import CALLS, GRID, Inputs, with_w

DOCUMENTED = (TypeError, ValueError, RuntimeError, FloatingPointError)
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*quantiz.*"),
    pytest.mark.filterwarnings("ignore:backend='auto':UserWarning"),
]


class Unequal:
    """Can neither be compared nor hashed."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    def __hash__(self) -> int:
        raise TypeError("not hashable")


class Subclass(Tensor):
    pass


def deep(depth: int, wrap: Callable[[Any], Any] = lambda tree: [tree]) -> Any:
    tree: Any = torch.ones(1)
    for _ in range(depth):
        tree = wrap(tree)
    return tree


def cyclic() -> Any:
    tree: dict[str, Any] = {}
    tree["w"] = tree
    return tree


def nested(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=layout)


def quantized() -> Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)


def of_inference() -> Tensor:
    with torch.inference_mode():
        return torch.ones(2, 3)


def failing(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("the caller's own")


# Their flattening, or their repr in a message, may exceed the recursion limit, which Python and optree then say.
ENDLESS: dict[str, Callable[[], Any]] = {
    "a tree of 5000 levels": lambda: deep(5000),
    "dicts of 3000 levels": lambda: deep(3000, lambda tree: {"w": tree}),
    "a dict that holds itself": cyclic,
}
LEAVES: dict[str, Callable[[], Any]] = {
    "nested": lambda: nested(torch.strided),
    "jagged": lambda: nested(torch.jagged),
    "quantized": quantized,
    "csr": lambda: torch.eye(2, 3).to_sparse_csr(),
    "subclass": lambda: torch.ones(2, 3).as_subclass(Subclass),
    "unequal": Unequal,
    "float8": lambda: GRID.to(torch.float8_e4m3fn),
    "complex32": lambda: GRID.to(torch.complex32),
    "uint64": lambda: torch.tensor(2**63, dtype=torch.uint64),
    "int64": lambda: torch.tensor(2**40),
    "of inference": of_inference,
    "expanded": lambda: torch.ones(1).expand(2, 3),
    "negated": lambda: torch._neg_view(torch.ones(2, 3)),
    "a numpy scalar": lambda: np.float64(math.nan),
    "a numpy int": lambda: np.int64(3),
    "a numpy bool": lambda: np.bool_(True),
    "a numpy 0-dim": lambda: np.array(2.0),
    "Decimal": lambda: decimal.Decimal(1),
    "Fraction": lambda: fractions.Fraction(1, 2),
    "10**5000": lambda: 10**5000,
    "-10**400": lambda: -(10**400),
    "a storage": lambda: torch.ones(2).untyped_storage(),
    "Ellipsis": lambda: ...,
    "NotImplemented": lambda: NotImplemented,
    "an exception": lambda: ValueError("x"),
    "a long str": lambda: "x" * 10_000,
    "a surrogate": lambda: "\ud800",
}
OTHERS: dict[str, Callable[[], Any]] = {
    "a tree of 500 levels": lambda: deep(500),
    "ParameterDict": lambda: nn.ParameterDict({"w": torch.ones(2, 3)}),
    "ParameterList": lambda: nn.ParameterList([torch.ones(2)]),
    "a meta module": lambda: nn.Linear(1, 1, device="meta"),
    "OrderedDict": lambda: collections.OrderedDict(w=GRID, b=[torch.zeros(3)]),
    "defaultdict": lambda: collections.defaultdict(list, w=GRID, b=[torch.zeros(3)]),
    "deque": lambda: collections.deque([GRID]),
    "MappingProxy": lambda: types.MappingProxyType({"w": GRID}),
    "ChainMap": lambda: collections.ChainMap({"w": GRID}),
    "Size": lambda: torch.Size([2, 3]),
    "a generator": lambda: (leaf for leaf in [GRID]),
    "a generator that raises": lambda: (failing() for _ in range(2)),
    "a module of Python": lambda: math,
    "bytearray": lambda: bytearray(b"ab"),
    "memoryview": lambda: memoryview(b"ab"),
    "slice": lambda: slice(1),
    "frozenset": lambda: frozenset([1]),
    "Generator": torch.Generator,
    "device": lambda: torch.device("meta"),
    "layout": lambda: torch.strided,
    "keys of all kinds": lambda: {1: GRID, "a": GRID, None: GRID, (1, 2): GRID, 2.5: None},
    "a NaN key": lambda: {math.nan: GRID},
    "an object key": lambda: {object(): GRID},
    "leaves of all kinds": lambda: [GRID, None, 1, "x", [GRID]],
    "strings": lambda: ["w", "b"],
    "Metrics": lambda: fa.Metrics(*[torch.tensor(1.0)] * 6),
    "Window": lambda: fa.Window(fa.ScaledGrads(GRID, 1.0), torch.tensor(0.0), None),
    "a function that raises": lambda: failing,
    "a function of a bool": lambda: lambda *args, **kwargs: torch.tensor(True),
    "a function of NaN": lambda: lambda *args, **kwargs: torch.tensor(math.nan),
    "a function of a str": lambda: lambda *args, **kwargs: "x",
    "a function of itself": lambda: lambda *args, **kwargs: args[:1],
    "len": lambda: len,
    "a method": lambda: dict.get,
}
ODD = {**LEAVES, **OTHERS, **{f"w: {name}": lambda make=make: with_w(make()) for name, make in LEAVES.items()}}


def says_so(call: Callable[[], Any], what: str, *, endless: bool = False) -> None:
    """Works, or raises a documented error with a message."""
    try:
        call()
    except DOCUMENTED as error:
        assert str(error), f"{what}: {type(error).__name__} without a message"
        assert endless or not isinstance(error, RecursionError), f"{what}: {error!r}"
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error


@pytest.mark.parametrize("name", CALLS)
def test_an_odd_object_at_one_place_works_or_raises_what_is_documented(name):
    inputs = Inputs()
    for what, make in {**ODD, **ENDLESS}.items():
        function, good, options = CALLS[name](inputs)
        for place in [*range(len(good)), *options]:
            args: dict[Any, Any] = {**dict(enumerate(good)), **options, place: make()}
            given_args = [args[index] for index in range(len(good))]
            given_options = {key: args[key] for key in options}
            says_so(
                lambda f=function, a=given_args, k=given_options: f(*a, **k),
                f"{name}, {what} at {place}",
                endless=what in ENDLESS,
            )
    inputs.check_unchanged()


@given(st.data())
def test_odd_objects_at_several_places_work_or_raise_what_is_documented(data: st.DataObject):
    name = data.draw(st.sampled_from(sorted(CALLS)))
    inputs = Inputs()
    function, good, options = CALLS[name](inputs)
    args: dict[Any, Any] = {**dict(enumerate(good)), **options}
    for place in data.draw(st.sets(st.sampled_from(list(args)), min_size=min(2, len(args)))):
        args[place] = ODD[data.draw(st.sampled_from(sorted(ODD)))]()
    says_so(lambda: function(*[args[i] for i in range(len(good))], **{key: args[key] for key in options}), name)
    inputs.check_unchanged()


# What only a step has


@pytest.mark.parametrize("what", ODD)
def test_odd_stacked_micro_batches_and_options_of_a_step(what):
    optimizer = fa.sgd(0.1)

    def loss_fn(p: dict[str, Tensor], x: Any) -> Tensor:
        return p["w"].sum() + p["b"].sum()

    def state() -> fa.TrainState:
        return fa.init_state({"w": torch.ones(2, 3), "b": torch.ones(3)}, optimizer)

    step = fa.make_step(loss_fn, optimizer)
    says_so(lambda: step.scan(state(), ODD[what]()), "scan")
    for name in ("max_norm", "norm_type", "clip_eps", "backend", "donate", "compute_dtype"):
        options: dict[str, Any] = {name: ODD[what]()}
        says_so(lambda o=options: fa.make_step(loss_fn, optimizer, **o)(state(), [0, 1]), name)
    if not isinstance(compile_option := ODD[what](), dict):
        says_so(lambda: fa.make_step(loss_fn, optimizer, compile=compile_option), "compile")


@pytest.mark.parametrize("what", ODD)
def test_a_state_with_an_odd_field_works_or_is_refused(what):
    optimizer = fa.adam(0.1)
    step = fa.make_step(lambda p, x, *buffers: fa.Loss(torch.zeros(()), weight=0), optimizer)
    for field in ("params", "opt_state", "scaler", "buffers"):
        state = fa.init_state({"w": torch.ones(2, 3), "b": [torch.ones(3)]}, optimizer, fa.DynamicScale(8.0))
        odd = dataclasses.replace(state, **{field: ODD[what]()})
        says_so(lambda s=odd: step(s, [0, 1]), field)
        says_so(lambda s=odd: step.scan(s, torch.zeros(2)), field)
