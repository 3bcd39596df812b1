"""Bad inputs to every public function raise what names path, finding and remedy, and nothing is half-written."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from itertools import islice
from types import ModuleType
from typing import Any, NamedTuple, cast

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_amp as fa

GOOD = torch.tensor(True)
GRID = torch.ones(2, 3)


def loss_fn(params: Any, *batch: Any) -> Tensor:
    return params["w"].sum() + params["b"][0].sum()


def params() -> dict[str, Any]:
    return {"w": torch.full((2, 3), 0.5), "b": [torch.zeros(3)]}


def with_w(leaf: Any) -> dict[str, Any]:
    return {**params(), "w": leaf}


def counted(state: Any) -> fa.Optimizer:
    """An optimizer whose state is a dict of a counter, and whatever `state` makes of it next."""
    return fa.Optimizer(
        init=lambda params: {"count": torch.zeros(())},
        update=lambda grads, opt_state, params: (grads, state(opt_state["count"])),
    )


class Inputs:
    """Good inputs, made anew for each call, and what they were when they were made."""

    def __init__(self):
        self.params, self.grads = params(), with_w(GRID.clone())
        self.scaled = fa.ScaledGrads(with_w(GRID.clone()), scale=8.0, weight=2.0)
        self.static, self.dynamic = fa.StaticScale(8.0), fa.DynamicScale(8.0)
        self.optimizer = fa.adam(0.1)
        self.opt_state = self.optimizer.init(self.params)
        self.step = fa.make_step(loss_fn, self.optimizer)
        self.state = fa.init_state(self.params, self.optimizer, self.dynamic)
        self.open = self.step.accumulate(self.state, 0)
        self.module = nn.Linear(1, 1)
        self.apply, self.module_params, self.buffers = fa.from_module(self.module)
        self._trees = self._all()
        self._before = [(leaf, leaf.clone(), leaf._version) for leaf in _tensors(self._trees)]
        self._structure = _structure(self._trees)

    def _all(self) -> list[Any]:
        trees = [getattr(self, name) for name in ("params", "grads", "scaled", "static", "dynamic", "opt_state")]
        module = dict(self.module.state_dict(keep_vars=True))
        return [*trees, self.state, self.open, module, self.module_params, self.buffers]

    def check_unchanged(self) -> None:
        assert _structure(self._trees) == self._structure
        after = _tensors(self._trees)
        for leaf, (same, value, version) in zip(after, self._before, strict=True):
            assert leaf is same and leaf._version == version and torch.equal(leaf, value)


def _structure(tree: Any) -> Any:
    return optree.tree_structure(tree, none_is_leaf=True)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in optree.tree_leaves(tree) if isinstance(leaf, Tensor)]


ROWS: dict[str, tuple[Callable[[Inputs], Any], type[Exception], str]] = {}


def row(name: str, call: Callable[[Any], Any], error: type[Exception], message: str) -> None:
    """`name` is `function: what is wrong`; `message` is what must be said, in this order, with gaps at `…`."""
    assert name not in ROWS
    ROWS[name] = (call, error, message)


def make(leaves: Any) -> Any:
    """A generator, which optree takes for a leaf."""
    yield from leaves


SPARSE = torch.eye(2, 3).to_sparse()
NO_TENSOR: dict[str, tuple[Callable[[], Any], str]] = {
    "a generator": (lambda: make([GRID]), "generator … '<root>' … expected a tensor or None … list(...)"),
    "an iterator": (lambda: iter([GRID]), "list_iterator … '<root>' … list(...)"),
    "a float leaf": (lambda: with_w(3.0), "float 3.0 … 'w' … torch.tensor(...)"),
    "a bool leaf": (lambda: {**params(), "b": [True]}, "bool True … 'b.0' … torch.tensor(...)"),
    "a str leaf": (lambda: with_w("x"), "str 'x' … 'w' … Pass a pytree"),
    "a numpy leaf": (lambda: with_w(np.ones((2, 3))), "ndarray … 'w' … Pass a pytree"),
    "a module": (lambda: nn.Identity(), "Identity … '<root>' … Pass a pytree"),
    "a sparse leaf": (lambda: with_w(SPARSE), "torch.sparse_coo … 'w' … strided … sparse=False … to_dense()"),
}
TAKES_A_TREE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "ScaledGrads": (lambda i, tree: fa.ScaledGrads(tree, 8.0), "tree"),
    "scale_backward": (lambda i, tree: fa.scale_backward(loss_fn, i.static, tree), "params"),
    "all_finite": (lambda i, tree: fa.all_finite(tree), "grads"),
    "global_norm": (lambda i, tree: fa.global_norm(tree), "grads"),
    "clip": (lambda i, tree: fa.clip(tree, 1.0), "grads"),
    "maybe_step": (lambda i, tree: fa.maybe_step(i.optimizer, i.params, i.opt_state, tree, GOOD), "grads"),
    "init_state": (lambda i, tree: fa.init_state(tree, i.optimizer), "params"),
    "unreached_paths": (lambda i, tree: fa.unreached_paths(loss_fn, tree), "params"),
    "apply_updates": (lambda i, tree: fa.apply_updates(i.params, tree), "updates"),
    "split": (lambda i, tree: fa.split(tree, lambda path, leaf: True), "tree"),
    "ravel": (lambda i, tree: fa.ravel(tree), "tree"),
    "nonfinite_paths": (lambda i, tree: fa.nonfinite_paths(tree), "tree"),
}
for _function, (_call, _what) in TAKES_A_TREE.items():
    for _name, (_tree, _message) in NO_TENSOR.items():
        row(
            f"{_function}: {_name}",
            lambda i, call=_call, tree=_tree: call(i, tree()),
            TypeError,
            f"{_what}: found … {_message}",
        )
row(
    "init_state: buffers with a number",
    lambda i: fa.init_state(i.params, i.optimizer, buffers={"n": 1}),
    TypeError,
    "buffers: found int 1 at 'n' … torch.tensor",
)
row(
    "maybe_step: a number among the parameters",
    lambda i: fa.maybe_step(i.optimizer, with_w(1.0), i.opt_state, i.grads, GOOD),
    TypeError,
    "params: found float 1.0 at 'w' … torch.tensor",
)

# Structure, shapes and dtypes

STRUCTURES: dict[str, tuple[Callable[[], Any], str]] = {
    "a missing leaf": (lambda: {"w": GRID}, "missing ['b.0']"),
    "an extra leaf": (lambda: {**params(), "z": GRID}, "extra ['z']"),
    "a renamed leaf": (lambda: {"v": GRID, "b": [torch.zeros(3)]}, "missing ['w'] … extra ['v']"),
    "a tuple for a list": (lambda: {"w": GRID, "b": (torch.zeros(3),)}, "found PyTreeSpec … expected PyTreeSpec"),
}
REMEDY = "the same containers and keys, with None where a leaf is missing"
TAKES_TWO_TREES: dict[str, tuple[Callable[[Any, Any], Any], str, str]] = {
    "accumulate": (lambda i, tree: fa.accumulate(i.scaled, fa.ScaledGrads(tree, 8.0)), "grads", "total"),
    "maybe_step": (lambda i, tree: fa.maybe_step(i.optimizer, i.params, i.opt_state, tree, GOOD), "grads", "params"),
    "apply_updates": (lambda i, tree: fa.apply_updates(i.params, tree), "updates", "params"),
    "select": (lambda i, tree: fa.select(GOOD, tree, i.params), "select", "the tree before"),
    "merge": (lambda i, tree: fa.merge(i.params, tree), "merge", "the first tree"),
    "adam": (lambda i, tree: i.optimizer.update(tree, i.opt_state, i.params), "grads", "params"),
}
for _function, (_call, _what, _other) in TAKES_TWO_TREES.items():
    for _name, (_tree, _message) in STRUCTURES.items():
        row(
            f"{_function}: {_name}",
            lambda i, call=_call, tree=_tree: call(i, tree()),
            ValueError,
            f"{_what}: the tree does not have the structure of {_other} … {_message} … {REMEDY}",
        )
    if _function != "merge":
        row(
            f"{_function}: another shape",
            lambda i, call=_call: call(i, with_w(torch.ones(3, 2))),
            ValueError,
            f"{_what}: found shape (3, 2) at 'w', expected (2, 3) as in {_other} … Reshape it",
        )
row(
    "add: no ScaledGrads",
    lambda i: fa.add(None, i.grads),
    TypeError,
    "add: grads: found dict, expected ScaledGrads … scale_backward",
)
row(
    "add: another structure",
    lambda i: fa.add(i.scaled, fa.ScaledGrads({"v": GRID}, 8.0)),
    ValueError,
    "grads: the tree does not have the structure of total … 'v'",
)
row(
    "accumulate: another dtype",
    lambda i: fa.accumulate(i.scaled, fa.ScaledGrads(with_w(GRID.double()), 8.0)),
    TypeError,
    "grads: found torch.float64 at 'w', expected torch.float32 as in total … .to(torch.float32)",
)
row(
    "accumulate: an integer leaf to a float sum",
    lambda i: fa.accumulate(i.scaled, fa.ScaledGrads(with_w(GRID.int()), 8.0)),
    TypeError,
    "grads: found torch.int32 at 'w', expected torch.float32 … .to(torch.float32)",
)
row(
    "accumulate: another device",
    lambda i: fa.accumulate(i.scaled, fa.ScaledGrads(with_w(GRID.to("meta")), 8.0)),
    ValueError,
    "grads: found device meta at 'w', expected cpu as in total … .to(device)",
)
row(
    "select: another dtype",
    lambda i: fa.select(GOOD, with_w(GRID.half()), i.params),
    TypeError,
    "select: found torch.float16 at 'w', expected torch.float32 … .to(torch.float32)",
)
row(
    "select: a number",
    lambda i: fa.select(GOOD, {"n": 1}, {"n": 2}),
    TypeError,
    "select: found int 1 at 'n' where int 2 was before … 0-dim tensors",
)
row(
    "maybe_step: integer gradients",
    lambda i: fa.maybe_step(i.optimizer, i.params, i.opt_state, with_w(GRID.int()), GOOD),
    TypeError,
    "grads: found torch.int32 at 'w' … torch.float32 … Cast it",
)
row(
    "maybe_step: complex gradients",
    lambda i: fa.maybe_step(i.optimizer, i.params, i.opt_state, with_w(GRID + 0j), GOOD),
    TypeError,
    "grads: found torch.complex64 at 'w' … torch.float32 … Cast it",
)
row(
    "maybe_step: a gradient where the parameter is None",
    lambda i: fa.maybe_step(i.optimizer, with_w(None), i.opt_state, i.grads, GOOD),
    ValueError,
    "grads: found a tensor at 'w', expected None as in params",
)
for _name, _dtype in (("integer", torch.int64), ("bool", torch.bool)):
    row(
        f"maybe_step: a float gradient for an {_name} parameter",
        lambda i, dtype=_dtype: fa.maybe_step(i.optimizer, with_w(GRID.to(dtype)), i.opt_state, i.grads, GOOD),
        TypeError,
        f"grads: found torch.float32 at 'w' for a parameter of {_dtype} … Cast it",
    )
    row(
        f"apply_updates: a float update for an {_name} parameter",
        lambda i, dtype=_dtype: fa.apply_updates(with_w(GRID.to(dtype)), i.grads),
        TypeError,
        f"updates: found torch.float32 at 'w' for a parameter of {_dtype} … Cast it",
    )
row(
    "apply_updates: complex",
    lambda i: fa.apply_updates(i.params, with_w(GRID + 0j)),
    TypeError,
    "updates: found torch.complex64 at 'w' … torch.float32 … Cast it",
)
row("merge: no tree", lambda i: fa.merge(), ValueError, "merge: found no tree … at least one … split")
row(
    "split: no function",
    lambda i: fa.split(i.params, cast(Any, "w")),
    TypeError,
    "predicate: found str 'w' … predicate(path, leaf)",
)

# Gradients of the wrong type: their units are part of the value

for _name, _grads in {
    "a plain tree": params,
    "None": lambda: None,
    "a tensor": lambda: GRID,
    "a pair": lambda: (1, 2),
}.items():
    row(
        f"unscale: {_name}",
        lambda i, grads=_grads: fa.unscale(cast(Any, grads())),
        TypeError,
        "unscale: grads: found … expected ScaledGrads … ScaledGrads(tree, scale, weight) … unscaled already",
    )
    row(
        f"accumulate: {_name}",
        lambda i, grads=_grads: fa.accumulate(i.scaled, cast(Any, grads())),
        TypeError,
        "accumulate: grads: found … expected ScaledGrads",
    )
row(
    "accumulate: a plain tree as total",
    lambda i: fa.accumulate(i.params, i.scaled),
    TypeError,
    "accumulate: total: found dict … expected ScaledGrads",
)
row(
    "unscale: twice",
    lambda i: fa.unscale(cast(Any, fa.unscale(i.scaled))),
    TypeError,
    "found Unscaled … expected ScaledGrads … unscaled already",
)
for _function in ("all_finite", "global_norm", "clip", "ScaledGrads"):
    row(
        f"{_function}: ScaledGrads inside a tree",
        lambda i, call=TAKES_A_TREE[_function][0]: call(i, {"model": [i.scaled]}),
        TypeError,
        "found ScaledGrads at 'model.0' … expected a tensor or None … unscale each of them",
    )
row(
    "ScaledGrads: of ScaledGrads",
    lambda i: fa.ScaledGrads(i.scaled, 8.0),
    TypeError,
    "tree: found ScaledGrads at '<root>' … unscale",
)

# Parameters and losses

for _name, _tree, _found in (
    ("integer parameters", {"n": torch.ones(2, dtype=torch.int64)}, "{'n': 'torch.int64'}"),
    ("bool parameters", [torch.ones(2, dtype=torch.bool)], "{'0': 'torch.bool'}"),
    ("no parameters", {}, "an empty tree"),
    ("parameters of None", {"w": None}, "an empty tree"),
):
    row(
        f"scale_backward: {_name}",
        lambda i, tree=_tree: fa.scale_backward(loss_fn, i.static, tree),
        TypeError,
        f"params: found no floating-point leaf … {_found} … Cast the parameters to float32",
    )

LOSSES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "a vector": (lambda p: p["b"][0], ValueError, "found a loss of shape (3,) … shape () … .mean()"),
    "one element": (lambda p: p["w"].sum().reshape(1), ValueError, "found a loss of shape (1,) … shape () … .mean()"),
    "a float": (lambda p: 1.0, TypeError, "found float … 0-dim tensor … Loss"),
    "None": (lambda p: None, TypeError, "found NoneType … 0-dim tensor"),
    "a tuple": (lambda p: (p["w"].sum(), 1), TypeError, "found tuple … Loss(..., aux=...)"),
    "a dict": (lambda p: {"loss": p["w"].sum()}, TypeError, "found dict … Loss(..., aux=...)"),
    "an integer": (lambda p: p["w"].sum().long(), TypeError, "found a loss of torch.int64 … real floating-point"),
    "a bool": (lambda p: p["w"].sum() > 0, TypeError, "found a loss of torch.bool … real floating-point"),
    "a complex number": (lambda p: p["w"].sum() + 0j, TypeError, "found a loss of torch.complex64 … floating-point"),
    "a Loss of None": (lambda p: fa.Loss(cast(Any, None)), TypeError, "found NoneType … 0-dim tensor"),
    "a Loss of a Loss": (lambda p: fa.Loss(cast(Any, fa.Loss(p["w"].sum()))), TypeError, "found Loss"),
}
for _backend in ("func", "autograd"):
    for _name, (_loss, _error, _message) in LOSSES.items():
        row(
            f"scale_backward: {_backend}, a loss that is {_name}",
            lambda i, loss=_loss, backend=_backend: fa.scale_backward(loss, i.static, i.params, backend=backend),
            _error,
            f"loss_fn: {_message}",
        )


class Doubled(torch.autograd.Function):
    """Written before there was a setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return 2 * grads[0]


def checkpointed(params: Any) -> Any:
    return checkpoint(torch.sum, params["w"], use_reentrant=False)


def in_inference_mode(inputs: Inputs) -> fa.ScaledBackward:
    with torch.inference_mode():
        return fa.scale_backward(loss_fn, inputs.static, inputs.params, backend="autograd")


row(
    "scale_backward: checkpointing under torch.func",
    lambda i: fa.scale_backward(checkpointed, i.static, i.params, backend="func"),
    RuntimeError,
    "activation checkpointing … does not work under torch.func. Use backend='autograd'",
)
row(
    "scale_backward: a Function without setup_context under torch.func",
    lambda i: fa.scale_backward(lambda p: cast(Any, Doubled.apply(p["w"].sum())), i.static, i.params, backend="func"),
    RuntimeError,
    "an autograd.Function without setup_context … does not work under torch.func. Use backend='autograd'",
)
row("scale_backward: inference mode", in_inference_mode, RuntimeError, "torch.inference_mode() … backend='func'")
for _function, _call in {
    "scale_backward": lambda i, f: fa.scale_backward(f, i.static, i.params),
    "make_step": lambda i, f: fa.make_step(f, i.optimizer),
    "autocast": lambda i, f: fa.autocast(f, torch.float16),
    "with_policy": lambda i, f: fa.with_policy(f, "f32"),
    "freeze": lambda i, f: fa.freeze(f, lambda path, leaf: True),
}.items():
    row(
        f"{_function}: the loss for the loss function",
        lambda i, call=_call: call(i, loss_fn(i.params)),
        TypeError,
        "loss_fn: found Tensor … loss_fn(params, *batch) … the function itself",
    )
for _backend in ("fucn", None, 1):
    row(
        f"scale_backward: backend {_backend}",
        lambda i, b=_backend: fa.scale_backward(loss_fn, i.static, i.params, backend=cast(Any, b)),
        ValueError,
        f"backend: found {_backend!r} … 'func' or 'autograd'",
    )
    row(
        f"make_step: backend {_backend}",
        lambda i, b=_backend: fa.make_step(loss_fn, i.optimizer, backend=cast(Any, b)),
        ValueError,
        f"backend: found {_backend!r} … 'func' or 'autograd'",
    )

# Weights

WEIGHTS: list[tuple[Any, type[Exception], str]] = [
    (-1, ValueError, "found -1 … >= 0"),
    (math.nan, ValueError, "found nan … finite"),
    (math.inf, ValueError, "found inf … finite"),
    (1e39, ValueError, "found 1e+39 … float32"),
    (10**400, ValueError, "found 1000 … float32"),
    (True, TypeError, "found bool True … a number or a 0-dim tensor"),
    ("1", TypeError, "found str '1' … a number or a 0-dim tensor"),
    (None, TypeError, "found NoneType … a number or a 0-dim tensor"),
    (1j, TypeError, "found complex … a number or a 0-dim tensor"),
    (torch.ones(2), ValueError, "found shape (2,) … Sum it"),
    (torch.tensor(1j), TypeError, "found a torch.complex64 tensor … a real number"),
    (GOOD, TypeError, "found a torch.bool tensor … a count"),
]
for _index, (_weight, _error, _message) in enumerate(WEIGHTS):
    for _name, _call in {
        "ScaledGrads: weight": lambda i, weight: fa.ScaledGrads(i.grads, 8.0, weight),
        "scale_backward: weight": lambda i, weight: fa.scale_backward(loss_fn, i.static, i.params, weight=weight),
        "scale_backward: Loss of weight": lambda i, weight: fa.scale_backward(
            lambda p: fa.Loss(loss_fn(p), weight=weight), i.static, i.params
        ),
    }.items():
        row(
            f"{_name} {type(_weight).__name__} {_index}",
            lambda i, call=_call, weight=_weight: call(i, weight),
            _error,
            f"weight: {_message}",
        )
for _name, _inner, _outer in (("numbers", 2, 3), ("tensors", torch.tensor(2.0), torch.tensor(3.0))):
    row(
        f"scale_backward: weight given twice, {_name}",
        lambda i, inner=_inner, outer=_outer: fa.scale_backward(
            lambda p: fa.Loss(loss_fn(p), weight=inner), i.static, i.params, weight=outer
        ),
        ValueError,
        "weight: found one in the Loss and one as argument … one of them … Drop the argument",
    )

# Scalers

for _value, _error, _found in (
    (0, ValueError, "found 0"),
    (-1.0, ValueError, "found -1.0"),
    (math.nan, ValueError, "found nan"),
    (math.inf, ValueError, "found inf"),
    (1e-40, ValueError, "found 1e-40"),
    (1e39, ValueError, "found 1e+39"),
    (torch.tensor(0.0), ValueError, "found 0.0"),
    (torch.tensor(math.inf), ValueError, "found inf"),
    (torch.tensor([1.0, math.nan]), ValueError, "found nan"),
    (torch.tensor(8.0, dtype=torch.float64), TypeError, "torch.float64"),
    (torch.tensor(8), TypeError, "torch.int64"),
    (True, TypeError, "found bool True"),
    ("8", TypeError, "found str '8'"),
    (None, TypeError, "found NoneType None"),
    (8j, TypeError, "found complex"),
):
    for _name, _call in {
        "DynamicScale": lambda i, scale: fa.DynamicScale(scale),
        "StaticScale": lambda i, scale: fa.StaticScale(scale),
        "ScaledGrads": lambda i, scale: fa.ScaledGrads(i.grads, scale),
    }.items():
        row(
            f"{_name}: scale {_value!r}",
            lambda i, call=_call, value=_value: call(i, value),
            _error,
            f"scale: … {_found} … expected",
        )
row(
    "ScaledGrads: scale of a shape",
    lambda i: fa.ScaledGrads(i.grads, torch.ones(1)),
    ValueError,
    "scale: found shape (1,) … 0-dim",
)
row("NoScale: another scale", lambda i: fa.NoScale(2.0), ValueError, "scale: found 2.0 … expected 1 … StaticScale(2.0)")
row("NoScale: a tensor", lambda i: fa.NoScale(torch.tensor(2.0)), ValueError, "scale: found 2.0 … from 1.0 to 1.0")

NUMBERS: list[
    tuple[str, list[Any], list[Any]]
] = [  # the argument, what is outside its domain, what is of no right kind
    ("growth_factor", [1.0, 0.5, math.inf, math.nan, 10**400], [True, "2", None, torch.tensor(2.0)]),
    ("backoff_factor", [0.0, 1, 2.0, -0.5, math.nan], [False, "0.5", None]),
    ("growth_interval", [0, -1, 2**31], [2.0, True, "3", None]),
    ("min_scale", [0.0, -1.0, 1e-40, math.inf, math.nan], [True, "1", None]),
    ("max_scale", [0.0, math.nan, 1e39, 10**400], [True, "1", None]),
    ("hysteresis", [0, -2, 2**31], [1.5, True, None]),
    ("growth_delay", [-1, 2**31], [0.5, True, None]),
    (
        "growth_tracker",
        [2**31, torch.zeros(2, dtype=torch.int32)],
        [1.0, True, "0", torch.tensor(1), torch.tensor(1.0)],
    ),
    ("hysteresis_tracker", [-(2**40), torch.ones(1, dtype=torch.int32)], [1.0, False, torch.tensor(1)]),
]
for _name, _values, _kinds in NUMBERS:
    for _error, _list in ((ValueError, _values), (TypeError, _kinds)):
        for _value in _list:
            row(
                f"DynamicScale: {_name} {str(_value)[:20]} {type(_value).__name__}",
                lambda i, name=_name, value=_value: fa.DynamicScale(**{name: value}),
                _error,
                f"{_name}: found … expected",
            )
row(
    "DynamicScale: refill",
    lambda i: fa.DynamicScale(refill=cast(Any, "bad")),
    ValueError,
    "refill: found 'bad' … 'growth' or 'good'",
)
row(
    "DynamicScale: a scale below the floor",
    lambda i: fa.DynamicScale(0.5, min_scale=1.0),
    ValueError,
    "scale: found 0.5 … from 1.0",
)
row(
    "DynamicScale: a scale above the ceiling",
    lambda i: fa.DynamicScale.apex(2.0**25),
    ValueError,
    f"scale: found 33554432.0 … to {2.0**24}",
)
row(
    "DynamicScale: a ceiling below the floor",
    lambda i: fa.DynamicScale(1.0, min_scale=2.0, max_scale=1.0),
    ValueError,
    "max_scale: found 1.0 … min_scale",
)
for _name, _call, _error in (
    ("scale_window", lambda i: fa.DynamicScale.deepspeed(scale_window=0), ValueError),
    ("consecutive_hysteresis", lambda i: fa.DynamicScale.deepspeed(consecutive_hysteresis=cast(Any, "no")), TypeError),
    ("scale_window", lambda i: fa.DynamicScale.apex(scale_window=cast(Any, 2.0)), TypeError),
    ("period", lambda i: fa.DynamicScale.jmp(period=0), ValueError),
    ("factor", lambda i: fa.DynamicScale.jmp(factor=1.0), ValueError),
    ("factor", lambda i: fa.DynamicScale.jmp(factor=cast(Any, "2")), TypeError),
    ("growth_interval", lambda i: fa.DynamicScale.flax(growth_interval=0), ValueError),
    ("hysteresis", lambda i: fa.DynamicScale.megatron(hysteresis=0), ValueError),
):
    row(f"DynamicScale: of a name, {_name} {len(ROWS)}", _call, _error, f"{_name}: found … expected")


@dataclasses.dataclass(frozen=True)
class Wide:
    """A scaler of someone's own that keeps its scale in float64."""

    scale: Tensor = dataclasses.field(default_factory=lambda: torch.tensor(8.0, dtype=torch.float64))

    def update(self, finite: Tensor) -> Wide:
        return self


TAKES_A_SCALER: dict[str, Callable[[Any, Any], Any]] = {
    "scale_backward": lambda i, scaler: fa.scale_backward(loss_fn, scaler, i.params),
    "update_scale": lambda i, scaler: fa.update_scale(scaler, GOOD),
    "init_state": lambda i, scaler: fa.init_state(i.params, i.optimizer, scaler),
}
for _function, _call in TAKES_A_SCALER.items():
    for _name, _scaler, _message in (
        ("a GradScaler", lambda: torch.amp.GradScaler("cpu"), "found GradScaler … stateful … use DynamicScale()"),
        ("a number", lambda: 8.0, "found float … expected DynamicScale()"),
        ("a class", lambda: fa.DynamicScale, "found the class DynamicScale … expected DynamicScale()"),
        ("a str", lambda: "dynamic", "found str … expected DynamicScale()"),
        ("a float64 scale", Wide, "torch.float64 … expected float32 … .float()"),
    ):
        row(
            f"{_function}: {_name} as scaler",
            lambda i, call=_call, scaler=_scaler: call(i, scaler()),
            TypeError,
            f"scaler: … {_message}",
        )
for _backend in ("func", "autograd"):
    row(
        f"scale_backward: stacked scalers, {_backend}",
        lambda i, b=_backend: fa.scale_backward(loss_fn, fa.StaticScale(torch.ones(3)), i.params, backend=b),
        ValueError,
        "scaler: found a scale of shape (3,) … 0-dim … torch.vmap",
    )

# Flags

FLAGS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "update_scale": (lambda i, flag: fa.update_scale(i.dynamic, flag), "finite"),
    "maybe_step": (lambda i, flag: fa.maybe_step(i.optimizer, i.params, i.opt_state, i.grads, flag), "finite"),
    "accumulate": (lambda i, flag: fa.accumulate(None, i.scaled, where=flag), "where"),
    "select": (lambda i, flag: fa.select(flag, i.params, i.params), "condition"),
}
for _function, (_call, _what) in FLAGS.items():
    for _flag, _found in (
        (True, "bool True"),
        (1.0, "float 1.0"),
        ("yes", "str 'yes'"),
        (torch.tensor(1.0), "torch.float32"),
        (torch.tensor(1), "torch.int64"),
        *([(None, "NoneType")] if _function != "accumulate" else []),
    ):
        row(
            f"{_function}: {_what} {_flag!r}",
            lambda i, call=_call, flag=_flag: call(i, flag),
            TypeError,
            f"{_what}: found {_found} … bool tensor … torch.tensor(True)",
        )
    row(
        f"{_function}: {_what} of shape (2,)",
        lambda i, call=_call: call(i, torch.ones(2).bool()),
        ValueError,
        f"{_what}: found shape (2,) … expected … torch.all",
    )
row(
    "update_scale: a 0-dim flag for stacked scalers",
    lambda i: fa.update_scale(fa.StaticScale(torch.ones(2)), GOOD),
    ValueError,
    "finite: found shape () … expected (2,) … torch.all",
)

# Clipping

for _function, _call in {
    "clip": lambda i, **options: fa.clip(i.grads, **options),
    "make_step": lambda i, eps=0.0, **options: fa.make_step(loss_fn, i.optimizer, clip_eps=eps, **options),
}.items():
    for _option, _value, _error, _remedy in (
        ("max_norm", 0, ValueError, "Use None"),
        ("max_norm", -1, ValueError, "Use None"),
        ("max_norm", -math.inf, ValueError, "Use None"),
        ("max_norm", math.nan, ValueError, "Use None"),
        ("max_norm", 10**400, ValueError, "Use None"),
        ("max_norm", True, TypeError, "None turns clipping off"),
        ("max_norm", "1.0", TypeError, "None turns clipping off"),
        ("max_norm", 1j, TypeError, "None turns clipping off"),
        ("max_norm", torch.tensor(1.0), TypeError, "None turns clipping off"),
        ("norm_type", 0.5, ValueError, ">= 1 or inf"),
        ("norm_type", math.nan, ValueError, ">= 1 or inf"),
        ("norm_type", 10**400, ValueError, ">= 1 or inf"),
        ("norm_type", "2", TypeError, ">= 1 or inf"),
        ("norm_type", True, TypeError, ">= 1 or inf"),
        ("norm_type", None, TypeError, ">= 1 or inf"),
        ("eps", -1e-6, ValueError, ">= 0"),
        ("eps", math.inf, ValueError, ">= 0"),
        ("eps", math.nan, ValueError, ">= 0"),
        ("eps", "0", TypeError, ">= 0"),
        ("eps", None, TypeError, ">= 0"),
    ):
        row(
            f"{_function}: {_option} {str(_value)[:9]} {type(_value).__name__}",
            lambda i, call=_call, options={"max_norm": 1.0, _option: _value}: call(i, **options),
            _error,
            f"{_option}: found … {str(_value)[:5]} … expected … {_remedy}",
        )
for _value, _error in ((0.5, ValueError), (math.nan, ValueError), ("2", TypeError), (True, TypeError)):
    row(
        f"global_norm: norm_type {_value!r}",
        lambda i, value=_value: fa.global_norm(i.grads, cast(Any, value)),
        _error,
        f"norm_type: found … {_value!r} … >= 1 or inf",
    )

# Optimizers

TAKES_AN_OPTIMIZER: dict[str, Callable[[Any, Any], Any]] = {
    "maybe_step": lambda i, optimizer: fa.maybe_step(optimizer, i.params, i.opt_state, i.grads, GOOD),
    "init_state": lambda i, optimizer: fa.init_state(i.params, optimizer),
    "make_step": lambda i, optimizer: fa.make_step(loss_fn, optimizer),
}
for _function, _call in TAKES_AN_OPTIMIZER.items():
    for _name, _optimizer, _found in (
        ("of torch.optim", lambda: torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1), "found SGD"),
        ("class of torch.optim", lambda: torch.optim.AdamW, "found AdamW"),
        ("of None", lambda: None, "found NoneType"),
        ("of a dict", lambda: {"lr": 0.1}, "found dict"),
        ("of a GradScaler", lambda: torch.amp.GradScaler("cpu"), "found GradScaler"),
        ("of one function", lambda: (fa.sgd,), "found tuple"),
        ("of no functions", lambda: (1, 2), "found tuple"),
    ):
        row(
            f"{_function}: optimizer {_name}",
            lambda i, call=_call, optimizer=_optimizer: call(i, optimizer()),
            TypeError,
            f"optimizer: {_found} … expected Optimizer(init, update) … functional_amp.sgd",
        )
row(
    "init_state: a function for the optimizer",
    lambda i: fa.init_state(i.params, fa.sgd),
    TypeError,
    "optimizer: found sgd … expected Optimizer(init, update)",
)

for _name, _next, _error, _message in (
    ("another structure", lambda count: {"steps": count}, ValueError, "missing ['count']; extra ['steps']"),
    ("an extra leaf", lambda count: {"count": count, "m": count}, ValueError, "the tree before: extra ['m']"),
    ("another dtype", lambda count: {"count": count.double()}, TypeError, "torch.float64 at 'count' … torch.float32"),
    ("another shape", lambda count: {"count": count[None]}, ValueError, "shape (1,) at 'count' … expected ()"),
    ("a number", lambda count: {"count": 1}, TypeError, "int 1 at 'count' … 0-dim tensors"),
    ("None", lambda count: {"count": None}, TypeError, "NoneType at 'count' … 0-dim tensors"),
):
    row(
        f"maybe_step: a state of {_name}",
        lambda i, next=_next: fa.maybe_step(counted(next), i.params, {"count": torch.zeros(())}, i.grads, GOOD),
        _error,
        f"opt_state:  … {_message}",
    )
    row(
        f"Step: a state of {_name}",
        lambda i, next=_next: fa.make_step(loss_fn, counted(next))(fa.init_state(i.params, counted(next)), [0]),
        _error,
        f"opt_state:  … {_message}",
    )
for _name, _update, _message in (
    ("None", lambda *_: None, "update returned NoneType … the pair (updates, opt_state)"),
    ("updates alone", lambda grads, *_: grads, "update returned dict … the pair (updates, opt_state)"),
    ("three", lambda *trees: trees, "update returned tuple … the pair (updates, opt_state)"),
):
    row(
        f"maybe_step: an update that gives {_name}",
        lambda i, update=_update: fa.maybe_step(update, i.params, None, i.grads, GOOD),
        TypeError,
        f"optimizer:  … {_message} … Write `return updates, opt_state`",
    )
row(
    "maybe_step: updates of another structure",
    lambda i: fa.maybe_step(lambda g, s, p: ([g], s), i.params, None, i.grads, GOOD),
    ValueError,
    "updates: the tree does not have the structure of params … missing ['b.0', 'w'] … extra",
)
row(
    "maybe_step: a step that gives parameters of another dtype",
    lambda i: fa.maybe_step(
        i.optimizer._replace(step=lambda g, s, p: (with_w(GRID.half()), s)), i.params, None, i.grads, GOOD
    ),
    TypeError,
    "params: found torch.float16 at 'w' … torch.float32 … .to(torch.float32)",
)

STATES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "None": (lambda i: None, TypeError, "opt_state: found NoneType … AdamState … init"),
    "a dict": (lambda i: {}, TypeError, "opt_state: found dict … AdamState … init"),
    "another optimizer's": (lambda i: fa.sgd(0.1).init(i.params), TypeError, "found SGDState … AdamState"),
    "other parameters'": (
        lambda i: i.optimizer.init({"w": GRID}),
        ValueError,
        "opt_state.exp_avg: the tree … missing ['b.0']",
    ),
    "other shapes": (
        lambda i: i.optimizer.init(with_w(torch.ones(1, 3))),
        ValueError,
        "opt_state.exp_avg: found shape (1, 3) at 'w' … expected (2, 3) as in params",
    ),
    "half precision": (
        lambda i: i.opt_state._replace(exp_avg_sq=with_w(GRID.half())),
        TypeError,
        "opt_state.exp_avg_sq: found torch.float16 at 'w' … expected torch.float32 … do not cast it",
    ),
    "no moments": (
        lambda i: i.opt_state._replace(exp_avg=with_w(None)),
        TypeError,
        "opt_state.exp_avg: found None at 'w' … expected torch.float32 … init",
    ),
    "a count that is a number": (
        lambda i: i.opt_state._replace(step=3),
        TypeError,
        "opt_state.step: found 3 … a 0-dim int32 tensor … torch.tensor(...)",
    ),
}
for _name, (_state, _error, _message) in STATES.items():
    row(
        f"adam: state of {_name}",
        lambda i, state=_state: i.optimizer.update(i.grads, state(i), i.params),
        _error,
        _message,
    )
    row(
        f"maybe_step: optimizer state of {_name}",
        lambda i, state=_state: fa.maybe_step(i.optimizer, i.params, state(i), i.grads, GOOD),
        _error,
        _message,
    )
row(
    "sgd: a state without momentum for an optimizer with",
    lambda i: fa.sgd(0.1, momentum=0.9).update(i.grads, fa.sgd(0.1).init(i.params), i.params),
    ValueError,
    "opt_state.momentum_buffer … structure of params … missing ['b.0', 'w']",
)
row(
    "sgd: a state with momentum for an optimizer without",
    lambda i: fa.sgd(0.1).update(i.grads, fa.sgd(0.1, momentum=0.9).init(i.params), i.params),
    TypeError,
    "opt_state.momentum_buffer: found a tree … expected () … init",
)

HYPERPARAMETERS: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("sgd", "momentum", [-0.1, math.inf, math.nan], [True, "0.9", None]),
    ("sgd", "dampening", [-0.1, 1.1, math.nan], [True, "0", None]),
    ("sgd", "weight_decay", [-1e-4, math.inf, math.nan], [True, "0", None]),
    ("sgd", "nesterov", [True], ["no", None, 1]),
    ("adam", "eps", [-1e-8, math.inf, math.nan, 10**400], [True, "0", None]),
    ("adam", "weight_decay", [-1e-4, math.inf], [False, "0", None]),
    ("adamw", "eps", [-1e-8], ["0"]),
    ("adamw", "weight_decay", [-1e-2, math.nan], [True, "0", None]),
]
for _function, _option, _values, _kinds in HYPERPARAMETERS:
    for _error, _list in ((ValueError, _values), (TypeError, _kinds)):
        for _value in _list:
            row(
                f"{_function}: {_option} {str(_value)[:9]} {type(_value).__name__}",
                lambda i, f=_function, o=_option, v=_value: getattr(fa, f)(0.1, **{o: v}),
                _error,
                f"{_option}: found … {str(_value)[:5]} … expected",
            )
for _function in ("adam", "adamw"):
    for _betas, _error, _message in (
        ((1.0, 0.9), ValueError, "betas[0]: found 1.0 … [0, 1)"),
        ((0.9, -0.1), ValueError, "betas[1]: found -0.1 … [0, 1)"),
        ((0.9, math.nan), ValueError, "betas[1]: found nan … [0, 1)"),
        (("0.9", 0.9), TypeError, "betas[0]: found str '0.9' … a number"),
        ((0.9,), TypeError, "betas: found (0.9,) … two numbers"),
        (0.9, TypeError, "betas: found 0.9 … two numbers"),
        (None, TypeError, "betas: found None … two numbers"),
    ):
        row(f"{_function}: betas {_betas}", lambda i, f=_function, b=_betas: getattr(fa, f)(betas=b), _error, _message)
for _function in ("sgd", "adam", "adamw"):
    for _lr, _error, _message in (
        (-0.1, ValueError, "found -0.1 … >= 0"),
        (math.nan, ValueError, "found nan … finite"),
        (math.inf, ValueError, "found inf … finite"),
        (10**400, ValueError, "found 1000 … finite"),
        (True, TypeError, "found bool … a number, a 0-dim tensor or a function"),
        ("0.1", TypeError, "found str … a number, a 0-dim tensor or a function"),
        (None, TypeError, "found NoneType … from_torch_schedule"),
        ({"lr": 0.1}, TypeError, "found dict … a number, a 0-dim tensor or a function"),
        (torch.ones(1), ValueError, "shape (1,) … 0-dim"),
        (torch.tensor(1), TypeError, "torch.int64 … floating-point … .float()"),
        (torch.tensor(1j), TypeError, "torch.complex64 … floating-point"),
    ):
        row(
            f"{_function}: lr {str(_lr)[:12]} {type(_lr).__name__}",
            lambda i, f=_function, lr=_lr: getattr(fa, f)(lr),
            _error,
            f"lr: … {_message}",
        )
    for _rate, _error, _message in (
        (None, TypeError, "schedule's value: found NoneType … a number"),
        ("0.1", TypeError, "schedule's value: found str … a number"),
        (math.nan, ValueError, "schedule's value: found nan … finite"),
        (torch.ones(1), ValueError, "the schedule returned … shape (1,) … 0-dim"),
        (torch.tensor(1), TypeError, "the schedule returned … torch.int64 … .float()"),
    ):
        row(
            f"{_function}: a schedule that gives {_rate!r}",
            lambda i, f=_function, rate=_rate: getattr(fa, f)(lambda count: rate).update(
                i.grads, getattr(fa, f)().init(i.params) if f != "sgd" else fa.sgd(0.1).init(i.params), i.params
            ),
            _error,
            f"lr:  … {_message}",
        )
row(
    "sgd: a torch scheduler as lr",
    lambda i: fa.sgd(
        cast(Any, torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1, requires_grad=True)]), 1))
    ),
    TypeError,
    "lr: found StepLR … Of a scheduler of torch.optim, make one … from_torch_schedule",
)

# Schedules

for _name, _call, _what in (
    ("constant", lambda value: fa.constant(value), "value"),
    ("linear", lambda value: fa.linear(value, 1.0, 2), "start"),
    ("linear", lambda value: fa.linear(0.0, value, 2), "end"),
    ("cosine", lambda value: fa.cosine(value, 2), "start"),
    ("cosine", lambda value: fa.cosine(1.0, 2, value), "end"),
    ("warmup_cosine", lambda value: fa.warmup_cosine(value, 1, 2), "peak"),
):
    for _value, _error in (
        (math.nan, ValueError),
        (math.inf, ValueError),
        (10**400, ValueError),
        (True, TypeError),
        ("1", TypeError),
        (None, TypeError),
        (torch.tensor(1.0), TypeError),
    ):
        row(
            f"{_name}: {_what} {str(_value)[:9]} {type(_value).__name__}",
            lambda i, c=_call, v=_value: c(v),
            _error,
            f"{_what}: found … expected",
        )
for _name, _call, _what in (
    ("linear", lambda steps: fa.linear(0.0, 1.0, steps), "steps"),
    ("cosine", lambda steps: fa.cosine(1.0, steps), "steps"),
    ("warmup_cosine", lambda steps: fa.warmup_cosine(1.0, -1 if steps == 0 else steps, 2**32), "warmup_steps"),
    ("warmup_cosine", lambda steps: fa.warmup_cosine(1.0, 1, steps), "steps"),
    ("join", lambda steps: fa.join([fa.constant(0.1)] * 2, [steps]), "boundaries"),
):
    for _value, _error in (
        (0, ValueError),
        (-1, ValueError),
        (2**31, ValueError),
        (2.5, TypeError),
        (True, TypeError),
        ("2", TypeError),
        (None, TypeError),
        (torch.tensor(2), TypeError),
    ):
        row(f"{_name}: {_what} {_value!r}", lambda i, c=_call, v=_value: c(v), _error, f"{_what}: found … expected")
row(
    "warmup_cosine: no steps after the warm-up",
    lambda i: fa.warmup_cosine(1.0, 4, 3),
    ValueError,
    "steps: found 3 … at least warmup_steps=4",
)
for _name, _schedules, _boundaries, _error, _message in (
    ("nothing", [], [], ValueError, "found 0 for 0 … one fewer than schedules"),
    ("too few boundaries", [fa.constant(1.0)] * 3, [1], ValueError, "found 1 for 3 … one fewer than schedules"),
    ("descending", [fa.constant(1.0)] * 3, [5, 2], ValueError, "boundaries: found [5, 2] … ascending"),
    ("a number", [fa.constant(1.0), 0.1], [5], TypeError, "schedules: found 0.1 … constant(...)"),
    ("a bare schedule", fa.constant(1.0), [], TypeError, "schedules: found function … a list"),
    ("a bare boundary", [fa.constant(1.0)] * 2, 5, TypeError, "boundaries: found int … a list"),
):
    row(f"join: {_name}", lambda i, s=_schedules, b=_boundaries: fa.join(cast(Any, s), cast(Any, b)), _error, _message)

# partition

LABELS = {"a": fa.sgd(0.1), "b": None}
for _name, _optimizers, _label, _error, _message in (
    ("a list", [fa.sgd(0.1)], lambda path, leaf: "a", TypeError, "optimizers: found list … a dict from labels"),
    ("a torch optimizer", {"a": torch.optim.SGD}, lambda path, leaf: "a", TypeError, "optimizers['a']: found SGD"),
    (
        "a number",
        {"a": 0.1},
        lambda path, leaf: "a",
        TypeError,
        "optimizers['a']: found float … Optimizer(init, update)",
    ),
    ("no function", LABELS, "a", TypeError, "label: found str … label(path, leaf)"),
    ("an unknown label", LABELS, lambda path, leaf: "c", ValueError, "label: found 'c' at 'b.0' … ['a', 'b'] … Add an"),
    ("no label", LABELS, lambda path, leaf: None, ValueError, "label: found None at 'b.0' … ['a', 'b'] … Add an"),
    ("a list of labels", LABELS, lambda path, leaf: ["a"], ValueError, "label: found ['a'] at 'b.0' … ['a', 'b']"),
):
    row(
        f"partition: {_name}",
        lambda i, o=_optimizers, label=_label: fa.partition(cast(Any, o), cast(Any, label)).init(i.params),
        _error,
        _message,
    )
for _name, _state, _found in (
    ("None", None, "NoneType"),
    ("other labels", {"a": None}, "['a']"),
    ("a tuple", (), "tuple"),
):
    row(
        f"partition: state of {_name}",
        lambda i, s=_state: fa.partition(LABELS, lambda path, leaf: "a").update(i.grads, s, i.params),
        ValueError,
        f"opt_state: found {_found} … the labels ['a', 'b'] … init",
    )

# The composed step


class Batch(NamedTuple):
    x: Tensor
    y: Tensor


for _name, _batches in (
    ("a tensor", torch.ones(2, 3)),
    ("a dict", {"x": GRID}),
    ("a NamedTuple", Batch(GRID, GRID)),
    ("a str", "ab"),
    ("bytes", b"ab"),
    ("a number", 3),
    ("None", None),
):
    row(
        f"Step: {_name} as micro_batches",
        lambda i, b=_batches: i.step(i.state, cast(Any, b)),
        TypeError,
        f"micro_batches: found {type(_batches).__name__} … expected a list of micro-batches … [micro_batch]",
    )
row("Step: an empty window", lambda i: i.step(i.state, []), ValueError, "empty window … at least one micro-batch")
row("Step: an exhausted window", lambda i: i.step(i.state, iter(())), ValueError, "empty window … at least one")
row(
    "Step: update without a window",
    lambda i: i.step.update(i.state),
    ValueError,
    "update: found no open window … step.accumulate(state, micro_batch) before it",
)
for _name, _call in {
    "call": lambda i, state: i.step(state, [0]),
    "accumulate": lambda i, state: i.step.accumulate(state, 0),
    "update": lambda i, state: i.step.update(state),
}.items():
    row(
        f"Step: {_name} of the pair (state, metrics)",
        lambda i, call=_call: call(i, i.step(i.state, [0])),
        TypeError,
        "state: found tuple … expected the TrainState … pair (state, metrics)",
    )
    row(
        f"Step: {_name} of the parameters",
        lambda i, call=_call: call(i, i.params),
        TypeError,
        "state: found dict … expected the TrainState",
    )

BUFFERS = {"mean": torch.zeros(2)}


def buffered(after: Any) -> Callable[..., fa.Loss]:
    return lambda params, batch, buffers=None: fa.Loss(loss_fn(params), buffers=after)


row(
    "make_step: buffers without any in the state",
    lambda i: fa.make_step(buffered(BUFFERS), i.optimizer)(i.state, [0]),
    ValueError,
    "loss_fn: found buffers in the Loss … the state has none … init_state(..., buffers=buffers)",
)
for _name, _after, _error, _message in (
    ("structure", {"var": torch.zeros(2)}, ValueError, f"missing ['mean'] … extra ['var'] … {REMEDY}"),
    ("dtype", {"mean": torch.zeros(2).half()}, TypeError, "torch.float16 at 'mean' … torch.float32 … .to("),
    ("shape", {"mean": torch.zeros(3)}, ValueError, "shape (3,) at 'mean' … expected (2,) … Reshape"),
    ("kind", {"mean": 0.0}, TypeError, "float 0.0 at 'mean' … 0-dim tensors"),
):
    row(
        f"make_step: buffers of another {_name}",
        lambda i, after=_after: fa.make_step(buffered(after), i.optimizer)(
            fa.init_state(i.params, i.optimizer, buffers=BUFFERS), [0]
        ),
        _error,
        f"buffers:  … {_message}",
    )
for _backend in ("func", "autograd"):
    row(
        f"make_step: a vector loss, {_backend}",
        lambda i, b=_backend: fa.make_step(lambda p, x: p["b"][0], i.optimizer, backend=b)(i.state, [0]),
        ValueError,
        "loss_fn: found a loss of shape (3,) … .mean()",
    )

# windows

for _n, _error, _message in (
    (0, ValueError, "n: found 0 … at least 1"),
    (-1, ValueError, "n: found -1 … at least 1"),
    (True, TypeError, "n: found bool True … an int"),
    (2.5, TypeError, "n: found float 2.5 … an int"),
    ("2", TypeError, "n: found str '2' … an int"),
    (None, TypeError, "n: found NoneType … an int"),
):
    row(f"windows: n {_n!r}", lambda i, n=_n: fa.windows([1, 2], cast(Any, n)), _error, _message)
for _loader in (None, 3, {"x": 1}, "ab"):
    row(
        f"windows: loader {_loader!r}",
        lambda i, loader=_loader: fa.windows(cast(Any, loader), 2),
        TypeError,
        f"loader: found {type(_loader).__name__} … an iterable of micro-batches … a list",
    )

# Seeds

for _seed, _error, _message in (
    (1.0, TypeError, "found float 1.0 … an int"),
    (True, TypeError, "found bool True … an int"),
    ("0", TypeError, "found str '0' … an int"),
    (torch.tensor(0), TypeError, "found Tensor … an int"),
    (2**64, ValueError, "found 18446744073709551616 … modulo 2**64"),
    (-(2**63) - 1, ValueError, "found -9223372036854775809 … modulo 2**64"),
):
    row(
        f"Step: seed {_seed!r}",
        lambda i, seed=_seed: i.step(i.state, [0], seed=cast(Any, seed)),
        _error,
        f"seed: … {_message}",
    )
    row(
        f"seeded: {_seed!r}",
        lambda i, seed=_seed: fa.seeded(cast(Any, seed)).__enter__(),
        _error,
        f"seed: … {_message}",
    )
row("seeded: None", lambda i: fa.seeded(cast(Any, None)).__enter__(), TypeError, "seed: found NoneType … an int")

# Precision

for _name, _call, _error, _message in (
    ("Policy: an integer dtype", lambda i: fa.Policy(torch.int32), TypeError, "param_dtype: found torch.int32"),
    ("Policy: a complex dtype", lambda i: fa.Policy(compute_dtype=torch.complex64), TypeError, "compute_dtype: found"),
    ("Policy: a str", lambda i: fa.Policy(output_dtype=cast(Any, "half")), TypeError, "output_dtype: found 'half'"),
    (
        "Policy: parse a dtype",
        lambda i: fa.Policy.parse("params=float33"),
        ValueError,
        "found dtype 'float33' … float32",
    ),
    ("Policy: parse a part", lambda i: fa.Policy.parse("compte=f16"), ValueError, "'compte=f16' … compute="),
    ("Policy: parse twice", lambda i: fa.Policy.parse("p=f32,p=f16"), ValueError, "'p' twice … once"),
    ("Policy: parse nothing", lambda i: fa.Policy.parse(""), ValueError, "found dtype '' … float32"),
    ("Policy: parse a comma", lambda i: fa.Policy.parse("p=f32,"), ValueError, "found '' … params="),
    (
        "Policy: parse a dtype object",
        lambda i: fa.Policy.parse(cast(Any, torch.float16)),
        TypeError,
        "found dtype … str",
    ),
    (
        "with_policy: a dtype",
        lambda i: fa.with_policy(loss_fn, cast(Any, torch.float16)),
        TypeError,
        "found dtype … Policy",
    ),
    ("with_policy: a typo", lambda i: fa.with_policy(loss_fn, "c=fp16"), ValueError, "'fp16' … f16"),
    (
        "freeze: a path in place of a predicate",
        lambda i: fa.freeze(loss_fn, cast(Any, "body")),
        TypeError,
        "frozen: found str 'body' … `frozen(path, leaf)`",
    ),
    ("autocast: a str", lambda i: fa.autocast(loss_fn, cast(Any, "float16")), TypeError, "'float16' … torch.float16"),
    ("autocast: an integer", lambda i: fa.autocast(loss_fn, torch.int8), TypeError, "torch.int8 … floating-point"),
    (
        "autocast: a device",
        lambda i: fa.autocast(loss_fn, torch.float16, device_type=cast(Any, 0)),
        TypeError,
        "device_type: found 0 … 'cuda'",
    ),
    (
        "cast_floating: an integer dtype",
        lambda i: fa.cast_floating(i.params, torch.int64),
        TypeError,
        "dtype: found torch.int64",
    ),
    (
        "cast_floating: a device",
        lambda i: fa.cast_floating(i.params, cast(Any, "cpu")),
        TypeError,
        "dtype: found 'cpu'",
    ),
    (
        "cast_floating: a tensor",
        lambda i: fa.cast_floating(i.params, cast(Any, GRID)),
        TypeError,
        "dtype: found … torch.dtype",
    ),
):
    row(_name, _call, _error, _message)

# Modules


def batch_norm(x: Tensor) -> Tensor:
    apply, params, _ = fa.from_module(nn.BatchNorm1d(2))
    return apply(params, x)


NAMES = "the dict that from_module gave"
for _name, _call, _error, _message in (
    (
        "from_module: a class",
        lambda i: fa.from_module(cast(Any, nn.Linear)),
        TypeError,
        "module: found type … nn.Module",
    ),
    (
        "from_module: a lazy module",
        lambda i: fa.from_module(nn.LazyLinear(1)),
        TypeError,
        "'weight' has no shape … one batch",
    ),
    (
        "to_module: no module",
        lambda i: fa.to_module(cast(Any, None), {}),
        TypeError,
        "module: found NoneType … nn.Module",
    ),
    (
        "to_module: a missing name",
        lambda i: fa.to_module(i.module, {"weight": torch.ones(1, 1)}),
        ValueError,
        f"params:  … missing ['bias'] … {NAMES}",
    ),
    (
        "to_module: an extra name",
        lambda i: fa.to_module(i.module, {**i.module_params, "z": GRID}),
        ValueError,
        f"params:  … extra ['z'] … {NAMES}",
    ),
    (
        "to_module: extra buffers",
        lambda i: fa.to_module(i.module, i.module_params, {"z": GRID}),
        ValueError,
        f"buffers:  … extra ['z'] … {NAMES}",
    ),
    (
        "to_module: a list",
        lambda i: fa.to_module(i.module, cast(Any, [1])),
        TypeError,
        "params: found list … from_module gives",
    ),
    (
        "to_module: a number",
        lambda i: fa.to_module(i.module, {"bias": torch.ones(1), "weight": cast(Any, 1.0)}),
        TypeError,
        f"found float at 'weight' … {NAMES}",
    ),
    (
        "to_module: None",
        lambda i: fa.to_module(i.module, {"bias": torch.ones(1), "weight": cast(Any, None)}),
        TypeError,
        "found NoneType at 'weight' … split",
    ),
    (
        "to_module: a shape",
        lambda i: fa.to_module(i.module, {"bias": torch.ones(1), "weight": GRID}),
        ValueError,
        "found shape (2, 3) at 'weight' … expected (1, 1) … same sizes",
    ),
    (
        "to_module: complex",
        lambda i: fa.to_module(i.module, {"bias": torch.ones(1), "weight": torch.ones(1, 1) + 0j}),
        TypeError,
        "torch.complex64 … 'weight' … torch.float32",
    ),
    (
        "to_module: sparse",
        lambda i: fa.to_module(i.module, {"bias": torch.ones(1), "weight": torch.ones(1, 1).to_sparse()}),
        TypeError,
        "sparse_coo … 'weight' … dense",
    ),
    (
        "to_module: meta",
        lambda i: fa.to_module(i.module, {"bias": torch.ones(1), "weight": torch.ones(1, 1, device="meta")}),
        TypeError,
        "meta … 'weight'",
    ),
    (
        "Apply: a missing name",
        lambda i: i.apply({"weight": torch.ones(1, 1)}, GRID),
        ValueError,
        f"params:  … missing ['bias'] … {NAMES}",
    ),
    (
        "Apply: an extra name",
        lambda i: i.apply({**i.module_params, "z": GRID}, GRID),
        ValueError,
        f"params:  … extra ['z'] … {NAMES}",
    ),
    ("Apply: a list", lambda i: i.apply([GRID], GRID), TypeError, "params: found list … from_module gives"),
    (
        "Apply: half of a split",
        lambda i: i.apply(fa.split(i.module_params, lambda path, leaf: path == "bias")[0], GRID),
        TypeError,
        "found NoneType at 'weight' … merge what split took apart",
    ),
    (
        "Apply: buffers",
        lambda i: i.apply.with_buffers(i.module_params, {"z": GRID}, GRID),
        ValueError,
        f"buffers:  … extra ['z'] … {NAMES}",
    ),
    (
        "Apply: buffers of None",
        lambda i: i.apply.with_buffers(i.module_params, None, GRID),
        TypeError,
        "buffers: found NoneType … from_module gives",
    ),
    (
        "Apply: a BatchNorm in train mode",
        lambda i: batch_norm(torch.ones(4, 2)),
        RuntimeError,
        "wrote to its buffers ['running_mean', 'running_var', 'num_batches_tracked'] … with_buffers … apply.eval()",
    ),
):
    row(_name, _call, _error, _message)

# The host side

for _name, _call, _error, _message in (
    ("no state", lambda i: fa.check_progress(cast(Any, i.params)), TypeError, "state: found dict … TrainState"),
    (
        "a float",
        lambda i: fa.check_progress(i.state, max_skipped=cast(Any, 1.5)),
        TypeError,
        "max_skipped: found float 1.5",
    ),
    (
        "a bool",
        lambda i: fa.check_progress(i.state, max_skipped=True),
        TypeError,
        "max_skipped: found bool True … an int",
    ),
    (
        "negative",
        lambda i: fa.check_progress(i.state, max_skipped=-1),
        ValueError,
        "max_skipped: found -1 … at least 0",
    ),
    (
        "a stuck run",
        lambda i: fa.check_progress(
            dataclasses.replace(i.state, skipped_in_a_row=torch.tensor(9)),
            max_skipped=8,
            grads={"w": torch.tensor(math.nan)},
        ),
        FloatingPointError,
        "9 updates in a row … loss scale is down to 8 … ['w'] … look for inf or NaN in the data",
    ),
):
    row(f"check_progress: {_name}", _call, _error, _message)


@dataclasses.dataclass(frozen=True)
class Pair:
    left: Any
    right: Any


for _name, _call, _error, _message in (
    (
        "no class",
        lambda i: fa.register(cast(Any, Pair(1, 2)), ("left",)),
        TypeError,
        "expected a dataclass … @dataclass",
    ),
    ("no dataclass", lambda i: fa.register(dict, ("left",)), TypeError, "dict … expected a dataclass … @dataclass"),
    (
        "a forgotten field",
        lambda i: fa.register(Pair, ("left",)),
        ValueError,
        "['left'] for Pair … ['left', 'right'] … lost",
    ),
    ("a field too many", lambda i: fa.register(Pair, ("left", "right"), ("x",)), ValueError, "'x' … ['left', 'right']"),
    (
        "a field twice",
        lambda i: fa.register(Pair, ("left", "right"), ("left",)),
        ValueError,
        "['left', 'right'] once",
    ),
):
    row(f"register: {_name}", _call, _error, f"register: found … {_message}")


for _name, _call, _error, _message in (
    (
        "state_dict: the pair of a step",
        lambda i: fa.state_dict(cast(Any, (i.state, None))),
        TypeError,
        "state: found tuple",
    ),
    (
        "state_dict: an extra that is a dict",
        lambda i: fa.state_dict(i.state, loader=cast(Any, {"epoch": 1})),
        TypeError,
        "extra/loader: found dict … Remedy: save json.dumps",
    ),
    (
        "state_dict: two leaves of one name",
        lambda i: fa.state_dict(dataclasses.replace(i.state, params={1: GRID, "1": GRID})),
        ValueError,
        "params/1: found two leaves of this name, expected one. Remedy",
    ),
    (
        "load_state_dict: a state",
        lambda i: fa.load_state_dict(i.state, cast(Any, i.state)),
        TypeError,
        "flat: found TrainState",
    ),
    (
        "load_state_dict: no template",
        lambda i: fa.load_state_dict(cast(Any, {}), {}),
        TypeError,
        "template: found dict … init_state",
    ),
    ("load_state_dict: empty", lambda i: fa.load_state_dict(i.state, {}), ValueError, "format_version: found nothing"),
    (
        "load_state_dict: another model",
        lambda i: fa.load_state_dict(i.state, fa.state_dict(fa.init_state({"w": GRID}, i.optimizer, i.dynamic))),
        ValueError,
        "params/b/0: found nothing, expected torch.float32 of shape (3,) … Remedy: build the template",
    ),
    (
        "save: a state",
        lambda i: fa.save("x", cast(Any, i.state)),
        TypeError,
        "flat: found TrainState … state_dict(state)",
    ),
    ("save: a sparse tensor", lambda i: fa.save("x", {"a": SPARSE}), TypeError, "flat['a']: found torch.sparse_coo"),
    (
        "load_shards: no folder",
        lambda i: fa.load_shards("no such folder", i.state),
        FileNotFoundError,
        "no such folder: found no .metadata, expected … Remedy: pass its checkpoint_id",
    ),
    (
        "load_shards: no template",
        lambda i: fa.load_shards("no such folder", cast(Any, {})),
        TypeError,
        "template: found dict … init_state",
    ),
    (
        "load: no file",
        lambda i: fa.load("no such file"),
        FileNotFoundError,
        "no such file: found no such file … Remedy",
    ),
    ("load: a file of others", lambda i: fa.load(__file__), ValueError, "test_errors.py: found … not written by save"),
    (
        "opt_state_from_torch: the optimizer itself",
        lambda i: fa.opt_state_from_torch(i.opt_state, cast(Any, torch.optim.Adam(i.module.parameters()))),
        TypeError,
        "torch_state: found Adam … Remedy: pass torch_optimizer.state_dict()",
    ),
    (
        "opt_state_from_torch: no names",
        lambda i: fa.opt_state_from_torch(i.opt_state, torch.optim.Adam(i.module.parameters()).state_dict()),
        ValueError,
        "names: found 0 … expected 2 different names … Remedy",
    ),
    (
        "opt_state_to_torch: another optimizer",
        lambda i: fa.opt_state_to_torch(i.opt_state, torch.optim.RMSprop(i.module.parameters())),
        TypeError,
        "torch_optimizer: found RMSprop … Remedy",
    ),
    (
        "DynamicScale: another dict",
        lambda i: fa.DynamicScale.from_state_dict({"cur_scale": 1.0}),
        ValueError,
        "state: found the keys ['cur_scale'] … Remedy",
    ),
):
    row(_name, _call, _error, _message)


# Optimizers of others, chains and their schedules

ANY: Any = fa  # without types: what is given is wrong
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau
for _name, _call, _error, _message in (
    (
        "from_torch: an instance",
        lambda i: ANY.from_torch(torch.optim.SGD([GRID])),
        TypeError,
        "cls: found SGD … Pass the class",
    ),
    ("from_torch: a closure", lambda i: ANY.from_torch(torch.optim.LBFGS), TypeError, "cls: found LBFGS … closure"),
    (
        "from_torch: groups",
        lambda i: ANY.from_torch(torch.optim.SGD, groups={}),
        TypeError,
        "groups: found dict … a function",
    ),
    (
        "from_torch: sparse gradients alone",
        lambda i: ANY.from_torch(torch.optim.SparseAdam).init(i.params),
        TypeError,
        "from_torch: SparseAdam raised RuntimeError … dense gradients",
    ),
    (
        "from_torch: another state",
        lambda i: ANY.from_torch(torch.optim.Adam).update(i.grads, i.opt_state, i.params),
        TypeError,
        "opt_state: found AdamState, expected TorchState … init of this optimizer",
    ),
    (
        "from_torch_schedule: no class",
        lambda i: ANY.from_torch_schedule(3, lr=0.1, steps=2),
        TypeError,
        "scheduler: found int",
    ),
    (
        "from_torch_schedule: of a loss",
        lambda i: ANY.from_torch_schedule(PLATEAU, lr=0.1, steps=2),
        TypeError,
        "scheduler: found ReduceLROnPlateau … examples/recipes/reduce_on_plateau.py",
    ),
    ("chain: nothing", lambda i: ANY.chain(), TypeError, "chain: found no optimizer … sgd(0.1)"),
    (
        "chain: no optimizer last",
        lambda i: ANY.chain(fa.ema(0.5)),
        TypeError,
        "chain: found a Transform as the last … Put one",
    ),
    (
        "chain: no member",
        lambda i: ANY.chain(1.0, fa.sgd(0.1)),
        TypeError,
        "chain: found float at place 0 … clip_by_value",
    ),
    (
        "chain: another state",
        lambda i: ANY.chain(fa.ema(0.5), i.optimizer).update(i.grads, (), i.params),
        TypeError,
        "opt_state: found tuple, expected the tuple of 2 states … init",
    ),
    ("clip_by_value: zero", lambda i: fa.clip_by_value(0.0), ValueError, "limit: found 0.0, expected a number > 0"),
    (
        "adaptive_clip: negative",
        lambda i: fa.adaptive_clip(-1.0),
        ValueError,
        "clipping: found -1.0, expected a number > 0",
    ),
    ("adaptive_clip: eps", lambda i: fa.adaptive_clip(0.1, 0.0), ValueError, "eps: found 0.0, expected a number > 0"),
    ("add_noise: negative", lambda i: fa.add_noise(-1.0), ValueError, "std: found -1.0, expected a finite number >= 0"),
    ("ema: above 1", lambda i: fa.ema(1.5), ValueError, "decay: found 1.5, expected a number in [0, 1]"),
    ("exponential: decay", lambda i: fa.exponential(1.0, 0.0), ValueError, "decay: found 0.0, expected a number > 0"),
    ("exponential: steps", lambda i: fa.exponential(1.0, 0.5, 0), ValueError, "steps: found 0"),
    ("polynomial: power", lambda i: fa.polynomial(1.0, 0.0, 5, -1.0), ValueError, "power: found -1.0"),
    (
        "one_cycle: pct_start",
        lambda i: fa.one_cycle(1.0, 10, 1.5),
        ValueError,
        "pct_start: found 1.5, expected a number in [0, 1]",
    ),
    ("one_cycle: div_factor", lambda i: fa.one_cycle(1.0, 10, div_factor=0.0), ValueError, "div_factor: found 0.0"),
    (
        "cosine_restarts: factor",
        lambda i: fa.cosine_restarts(1.0, 5, 0),
        ValueError,
        "factor: found 0, expected an int >= 1",
    ),
    (
        "warmup: a number",
        lambda i: ANY.warmup(3, 0.1),
        TypeError,
        "schedule: found 0.1, expected a function of the count",
    ),
):
    row(_name, cast(Any, _call), _error, _message)


@pytest.mark.parametrize(("call", "error", "message"), ROWS.values(), ids=ROWS.keys())
def test_a_bad_input_raises_naming_path_finding_and_remedy_and_writes_nothing(call, error, message):
    inputs = Inputs()
    generator = torch.get_rng_state()
    with pytest.raises(error, match="(?s)" + ".*".join(map(re.escape, message.split(" … ")))) as raised:
        call(inputs)
    assert type(raised.value) is error
    inputs.check_unchanged()
    assert torch.equal(torch.get_rng_state(), generator)


DATA = {  # nothing to check: records, and types that name something
    *("AdamState", "Clipped", "FromModule", "Loss", "Metrics", "Optimizer", "PyTree", "SGDState", "ScaledBackward"),
    *("EmaState", "Scaler", "Stepped", "TorchState", "TrainState", "Transform", "Unscaled", "Window"),
}


def test_every_public_function_has_rows():
    public = {name for name, value in vars(fa).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert public - DATA == {name.partition(":")[0] for name in ROWS}


# Random malformed calls


def any_loss(params: Any, *batch: Any) -> Tensor:
    """A loss of whatever tree of tensors arrives."""
    return sum(((leaf.real if leaf.is_complex() else leaf).float().sum() for leaf in _tensors(params)), torch.zeros(()))


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 2**31, 2**70, 10**400, 0.5, -2.5, 1e39, 1e300, math.nan, math.inf, 1j),
    *("", "1", "func", "p=f32", b"x", (), (1,), (1, 2), [], [1, 2], {}, {1}, CYCLE, range(2), object()),
    *(
        float,
        dict,
        fa.NoScale,
        torch.optim.SGD,
        torch.float16,
        torch.int32,
        torch.device("cpu"),
        np.float32(2),
        any_loss,
    ),
    *(torch.tensor(value) for value in (1.0, math.nan, -1.0, True, 2, 1j, [1.0, 2.0], [], [True, False])),
    *(torch.ones(2, 3), torch.ones(2).half(), torch.ones(2).double(), torch.ones(2).to(torch.float8_e4m3fn), SPARSE),
    *(torch.ones(2, 3, device="meta"), nn.Parameter(torch.ones(2, 3)), nn.UninitializedParameter(), np.ones((2, 3))),
    *(with_w(leaf) for leaf in (None, 1.0, "w", [GRID], GRID.half(), GRID.double(), GRID + 0j, GRID.int(), GRID > 0)),
    *(with_w(torch.ones(shape)) for shape in ((3, 2), (1,), (), (0, 3))),
    *(with_w(torch.ones(2, 3, device="meta")), {1: GRID, "a": GRID, None: GRID}, Pair(GRID, GRID), fa.Policy()),
    *(lambda *args, **kwargs: None, lambda *args, **kwargs: args, lambda first, *rest, **kwargs: first),
    *(lambda *args, **kwargs: torch.zeros(()), lambda *args, **kwargs: args[1:], nn.Identity()),
    *(torch.amp.GradScaler("cpu"), torch.optim.SGD([torch.ones(1, requires_grad=True)], 0.1)),
    *(fa.Loss(torch.tensor(1.0), weight=2), fa.sgd(0.1, momentum=0.9), fa.DynamicScale(torch.ones(2))),
    fa.sgd(0.1, momentum=0.9).init(params()),
]
OWN = (
    "params",
    "grads",
    "scaled",
    "static",
    "optimizer",
    "opt_state",
    "state",
    "open",
    "step",
    "apply",
    "module_params",
)


def used(make: Callable[..., fa.Optimizer]) -> Callable[..., Any]:
    """Makes an optimizer and updates with it: what is taken must work, or be refused by then."""

    def call(*args: Any, **kwargs: Any) -> Any:
        optimizer = make(*args, **kwargs)
        return optimizer.update(params(), optimizer.init(params()), params())

    return call


def at_two(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: make(*args)(torch.tensor(2))


def trained(*args: Any, **kwargs: Any) -> Any:
    return fa.make_step(*args, **kwargs)(fa.init_state(params(), fa.sgd(0.1)), [0])


def seeded(seed: Any) -> None:
    with fa.seeded(seed):
        torch.rand(())


def registered(children: Any, static: Any) -> Any:
    cls = fa.register(dataclasses.make_dataclass("New", ["left", "right"]), children, static)
    return optree.tree_map(lambda leaf: leaf, cls(1, 2))


CALLS: dict[str, Callable[[Inputs], tuple[Callable[..., Any], list[Any], dict[str, Any]]]] = {
    "accumulate": lambda i: (fa.accumulate, [i.scaled, i.scaled], {"where": GOOD}),
    "adam": lambda i: (used(fa.adam), [0.1, (0.9, 0.99), 1e-8, 0.1], {}),
    "adamw": lambda i: (used(fa.adamw), [fa.constant(0.1), (0.9, 0.99), 1e-8, 0.1], {}),
    "all_finite": lambda i: (fa.all_finite, [i.grads], {}),
    "Apply": lambda i: (i.apply, [i.module_params, torch.ones(1, 1)], {}),
    "Apply.with_buffers": lambda i: (i.apply.with_buffers, [i.module_params, i.buffers, torch.ones(1, 1)], {}),
    "apply_updates": lambda i: (fa.apply_updates, [i.params, i.grads], {}),
    "autocast": lambda i: (
        lambda *args, **kwargs: fa.autocast(*args, **kwargs)(i.params),
        [any_loss, torch.bfloat16],
        {},
    ),
    "cast_floating": lambda i: (fa.cast_floating, [i.params, torch.float16], {}),
    "check_progress": lambda i: (fa.check_progress, [i.state], {"max_skipped": 3, "grads": i.grads}),
    "clip": lambda i: (fa.clip, [i.grads, 1.0], {"norm_type": 2.0, "eps": 0.0}),
    "clip scaled": lambda i: (fa.clip, [i.scaled, 1.0], {"norm_type": 3, "eps": 1e-6}),
    "constant": lambda i: (at_two(fa.constant), [0.1], {}),
    "cosine": lambda i: (at_two(fa.cosine), [1.0, 5, 0.1], {}),
    "DynamicScale": lambda i: (
        lambda **kwargs: fa.update_scale(fa.DynamicScale(**kwargs), GOOD),
        [],
        dict.fromkeys(list(fa.DynamicScale.__dataclass_fields__), None)
        | {"scale": 8.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 3, "min_scale": 1.0}
        | {"max_scale": 2.0**24, "hysteresis": 2, "refill": "good", "growth_delay": 1},
    ),
    "chain": lambda i: (used(fa.chain), [fa.clip_by_value(1.0), fa.sgd(0.1)], {}),
    "clip_by_value": lambda i: (used(lambda *v: fa.chain(fa.clip_by_value(*v), i.optimizer)), [1.0], {}),
    "adaptive_clip": lambda i: (used(lambda *v: fa.chain(fa.adaptive_clip(*v), i.optimizer)), [0.1, 1e-3], {}),
    "ema": lambda i: (used(lambda *v: fa.chain(fa.ema(*v), i.optimizer)), [0.9], {}),
    "exponential": lambda i: (at_two(fa.exponential), [1.0, 0.5, 3], {}),
    "polynomial": lambda i: (at_two(fa.polynomial), [1.0, 0.1, 3, 2.0], {}),
    "one_cycle": lambda i: (at_two(fa.one_cycle), [1.0, 10, 0.3, 25.0, 1e4], {}),
    "cosine_restarts": lambda i: (at_two(fa.cosine_restarts), [1.0, 3, 2, 0.1], {}),
    "warmup": lambda i: (at_two(fa.warmup), [3, fa.constant(0.1), 0.0], {}),
    "adam in fewer bits": lambda i: (used(fa.adam), [0.1], {"state_dtype": torch.bfloat16}),
    "from_torch": lambda i: (used(fa.from_torch), [torch.optim.SGD], {"groups": None, "lr": 0.1}),
    "from_module": lambda i: (fa.from_module, [i.module], {}),
    "global_norm": lambda i: (fa.global_norm, [i.grads, 2.0], {}),
    "init_state": lambda i: (fa.init_state, [i.params, i.optimizer, i.dynamic, {"mean": GRID}], {}),
    "join": lambda i: (at_two(fa.join), [[fa.constant(0.1), fa.constant(0.2)], [1]], {}),
    "linear": lambda i: (at_two(fa.linear), [0.0, 1.0, 5], {}),
    "make_step": lambda i: (
        trained,
        [any_loss, fa.sgd(0.1)],
        {"max_norm": 1.0, "norm_type": 2.0, "clip_eps": 0.0, "backend": "func"},
    ),
    "maybe_step": lambda i: (fa.maybe_step, [i.optimizer, i.params, i.opt_state, i.grads, GOOD], {}),
    "merge": lambda i: (fa.merge, [i.params, with_w(None)], {}),
    "nonfinite_paths": lambda i: (fa.nonfinite_paths, [i.grads], {}),
    "partition": lambda i: (used(fa.partition), [{"a": fa.sgd(0.1), "b": None}, lambda path, leaf: "a"], {}),
    "partition values": lambda i: (
        used(lambda *v: fa.partition({"a": v[0], v[1]: None}, lambda *_: v[2])),
        [i.optimizer, "b", "a"],
        {},
    ),
    "Policy": lambda i: (fa.Policy, [torch.float32, torch.float16, torch.float32], {}),
    "Policy.parse": lambda i: (fa.Policy.parse, ["p=f32"], {}),
    "register": lambda i: (registered, [("left",), ("right",)], {}),
    "scale_backward": lambda i: (
        fa.scale_backward,
        [any_loss, i.static, i.params, torch.ones(1)],
        {"weight": 2.0, "backend": "func"},
    ),
    "scale_backward returned": lambda i: (
        lambda *fields, backend: fa.scale_backward(lambda p: fa.Loss(*fields), i.static, i.params, backend=backend),
        [torch.tensor(1.0), 2.0, {"a": 1}, {"mean": GRID}],
        {"backend": "autograd"},
    ),
    "ScaledGrads": lambda i: (fa.ScaledGrads, [i.grads, 8.0, 2.0], {}),
    "seeded": lambda i: (seeded, [0], {}),
    "select": lambda i: (fa.select, [GOOD, i.grads, i.params], {}),
    "sgd": lambda i: (used(fa.sgd), [0.1, 0.9, 0.0, 0.1, True], {}),
    "sgd schedule": lambda i: (used(lambda rate: fa.sgd(lambda count: rate)), [torch.tensor(0.1)], {}),
    "sgd update": lambda i: (fa.sgd(0.1, 0.9).update, [i.grads, fa.sgd(0.1, 0.9).init(i.params), i.params], {}),
    "split": lambda i: (fa.split, [i.params, lambda path, leaf: True], {}),
    "ravel": lambda i: (fa.ravel, [i.params], {}),
    "StaticScale": lambda i: (fa.StaticScale, [8.0], {}),
    "NoScale": lambda i: (fa.NoScale, [1.0], {}),
    "Step": lambda i: (i.step, [i.state, [0, 1]], {"seed": 0}),
    "Step.accumulate": lambda i: (i.step.accumulate, [i.open, 0], {}),
    "Step.update": lambda i: (i.step.update, [i.open], {}),
    "to_module": lambda i: (lambda *values: fa.to_module(nn.Linear(1, 1), *values), [i.module_params, i.buffers], {}),
    "to_module values": lambda i: (
        lambda *values: fa.to_module(nn.Linear(1, 1), dict(zip(("weight", "bias"), values, strict=True))),
        [torch.ones(1, 1), torch.ones(1)],
        {},
    ),
    "state_dict": lambda i: (fa.state_dict, [i.open], {"position": 3}),
    "load_state_dict": lambda i: (fa.load_state_dict, [i.state, fa.state_dict(i.open)], {}),
    "load_state_dict entries": lambda i: (
        lambda **flat: fa.load_state_dict(i.state, flat),
        [],
        cast(dict[str, Any], fa.state_dict(i.open)),
    ),
    "opt_state_from_torch": lambda i: (
        fa.opt_state_from_torch,
        [fa.adam().init(i.module_params), torch.optim.Adam(i.module.parameters()).state_dict(), ["weight", "bias"]],
        {"applied": 0},
    ),
    "opt_state_to_torch": lambda i: (
        fa.opt_state_to_torch,
        [fa.adam().init(i.module_params), torch.optim.Adam(i.module.parameters()), ["weight", "bias"]],
        {},
    ),
    "DynamicScale.from_state_dict": lambda i: (
        lambda **state: fa.update_scale(fa.DynamicScale.from_state_dict(state), GOOD),
        [],
        torch.amp.GradScaler("cpu").state_dict(),
    ),
    "unscale": lambda i: (fa.unscale, [i.scaled], {}),
    "unreached_paths": lambda i: (fa.unreached_paths, [any_loss, i.params, torch.ones(1)], {}),
    "update_scale": lambda i: (fa.update_scale, [i.dynamic, GOOD], {}),
    "warmup_cosine": lambda i: (at_two(fa.warmup_cosine), [1.0, 2, 5, 0.1], {}),
    "windows": lambda i: (lambda *args: list(islice(fa.windows(*args), 3)), [[1, 2, 3], 2], {}),
    "with_policy": lambda i: (lambda *args: fa.with_policy(*args)(i.params), [any_loss, "p=f32"], {}),
    "freeze": lambda i: (lambda *args: fa.freeze(*args)(i.params), [any_loss, lambda path, leaf: True], {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_malformed_call_returns_or_raises_what_is_documented_and_writes_nothing(name):
    inputs = Inputs()
    values = [*VALUES, *(getattr(inputs, own) for own in OWN)]
    function, good, options = CALLS[name](inputs)

    @given(st.data())
    def check(data: st.DataObject):
        args: dict[int | str, Any] = {**dict(enumerate(good)), **options}
        for place in data.draw(st.sets(st.sampled_from(list(args)), min_size=1, max_size=2)):
            args[place] = values[data.draw(st.integers(0, len(values) - 1), label=str(place))]
        given = [args[place] for place in range(len(good))]
        try:
            function(*given, **{place: args[place] for place in options})
        except (TypeError, ValueError, RuntimeError, FloatingPointError):
            pass
        inputs.check_unchanged()

    check()
