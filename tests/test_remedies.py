"""Each remedy that an error message names is applied, and what raised before succeeds.

Elsewhere: those of torch.func's limits and of containers (test_cases_loops_graphs.py), of modules that are wrapped or
keep something (test_cases_modules.py), of DTensors (test_explain_windows.py), of a changed hyperparameter
(test_checkpoint.py), of GradScaler's dict (test_interop.py).
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from functional_amp import debug, testing

api: Any = fa
tools: Any = debug
"""The same, for calls that the types forbid."""

Call = Callable[[], Any]


class Row(NamedTuple):
    """A call that raises, the remedy in its message, and the call that follows it."""

    wrong: Call
    error: type[Exception]
    remedy: str
    right: Call


ROWS: dict[str, Row] = {}


def row(name: str, wrong: Call, error: type[Exception], remedy: str, right: Call) -> None:
    assert name not in ROWS
    ROWS[name] = Row(wrong, error, remedy, right)


def loss_fn(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


def params() -> dict[str, Any]:
    return {"w": torch.ones(3)}


X = torch.tensor([1.0, 2.0, 3.0])
SGD, ADAM = fa.sgd(0.1), fa.adam(0.1)
STEP: Any = fa.make_step(loss_fn, SGD)
SCALER = fa.StaticScale(8.0)


def state(optimizer: Any = SGD, scaler: Any = SCALER, **given: Any) -> fa.TrainState:
    return fa.init_state(given.pop("params", params()), optimizer, scaler, **given)


def scaled(tree: Any = None, scale: float = 8.0) -> fa.ScaledGrads:
    return fa.ScaledGrads({"w": X} if tree is None else tree, scale)


def applied(result: Any) -> bool:
    """Whether a step's result is an applied window."""
    return bool(result[1].applied)


def file() -> Path:
    return Path(tempfile.mkdtemp()) / "state"


# Trees.

row(
    "a number as a leaf",
    lambda: fa.all_finite({"w": 3.0}),
    TypeError,
    "torch.tensor(...)",
    lambda: fa.all_finite({"w": torch.tensor(3.0)}),
)
row(
    "a generator as a tree",
    lambda: fa.all_finite(x for x in [X]),
    TypeError,
    "list(...)",
    lambda: fa.all_finite(list(x for x in [X])),
)
row(
    "a sparse leaf",
    lambda: fa.all_finite({"w": torch.eye(2).to_sparse()}),
    TypeError,
    "call .to_dense() on the leaf",
    lambda: fa.all_finite({"w": torch.eye(2).to_sparse().to_dense()}),
)
row(
    "a missing leaf",
    lambda: fa.maybe_step(SGD, {"v": X, **params()}, SGD.init({"v": X, **params()}), scaled(), torch.tensor(True)),
    ValueError,
    "with None where a leaf is missing",
    lambda: fa.maybe_step(
        SGD, {"v": X, **params()}, SGD.init({"v": X, **params()}), scaled({"v": None, "w": X}), torch.tensor(True)
    ),
)
row(
    "another shape",
    lambda: fa.apply_updates({"w": X}, {"w": X[:, None]}),
    ValueError,
    "Reshape it",
    lambda: fa.apply_updates({"w": X}, {"w": X[:, None].reshape(3)}),
)
row(
    "another dtype",
    lambda: fa.select(torch.tensor(True), {"w": X.half()}, {"w": X}),
    TypeError,
    "Cast it with .to(torch.float32)",
    lambda: fa.select(torch.tensor(True), {"w": X.half().to(torch.float32)}, {"w": X}),
)
row(
    "a count that is a Python number",
    lambda: fa.select(torch.tensor(True), {"n": 2}, {"n": 1}),
    TypeError,
    "keep counters and flags as 0-dim tensors",
    lambda: fa.select(torch.tensor(True), {"n": torch.tensor(2)}, {"n": torch.tensor(1)}),
)
row("nothing to merge", lambda: fa.merge(), ValueError, "the trees that split gave", lambda: fa.merge({"w": X}))


class Pair:
    """No dataclass."""

    def __init__(self, a: Any, b: Any):
        self.a, self.b = a, b


def data_pair() -> Any:
    return dataclasses.make_dataclass("DataPair", ["a", "b"], frozen=True)


row(
    "a class that is no dataclass",
    lambda: fa.register(Pair, ("a", "b")),
    TypeError,
    "Decorate it with @dataclass(frozen=True)",
    lambda: fa.register(data_pair(), ("a", "b")),
)
row(
    "a field that is not named",
    lambda: fa.register(data_pair(), ("a",)),
    ValueError,
    "Name it in children or in static",
    lambda: fa.register(data_pair(), ("a",), ("b",)),
)

# Losses.

row(
    "a loss in place of its function",
    lambda: api.scale_backward(X.sum(), SCALER, params()),
    TypeError,
    "Pass the function itself",
    lambda: fa.scale_backward(loss_fn, SCALER, params(), X),
)
row(
    "a pair in place of a loss",
    lambda: api.scale_backward(lambda p: (p["w"].sum(), X), SCALER, params()),
    TypeError,
    "Loss(..., aux=...)",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), aux=X), SCALER, params()),
)
row(
    "a loss for each item",
    lambda: fa.scale_backward(lambda p: p["w"] * X, SCALER, params()),
    ValueError,
    "Reduce it with .mean() and give the number of items as Loss(..., weight=...)",
    lambda: fa.scale_backward(lambda p: fa.Loss((p["w"] * X).mean(), weight=3), SCALER, params()),
)
row(
    "two weights",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), weight=2), SCALER, params(), weight=3.0),
    ValueError,
    "Drop the argument",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), weight=2), SCALER, params()),
)
row(
    "a weight for each item",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), weight=X), SCALER, params()),
    ValueError,
    "Sum it",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), weight=X.sum()), SCALER, params()),
)
row(
    "a weight of a sum",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), weight=2, reduction="sum"), SCALER, params()),
    ValueError,
    "Leave the weight out, or return the mean with reduction='mean'",
    lambda: (
        fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), reduction="sum"), SCALER, params()),
        fa.scale_backward(lambda p: fa.Loss(p["w"].mean(), weight=2, reduction="mean"), SCALER, params()),
    ),
)
row(
    "a loss that reaches no parameter",
    lambda: fa.scale_backward(lambda p: p["w"].detach().sum(), SCALER, params()),
    RuntimeError,
    "return Loss(value, weight=0)",
    lambda: fa.scale_backward(lambda p: fa.Loss(p["w"].detach().sum(), weight=0), SCALER, params()),
)
row(
    "parameters that are integers",
    lambda: fa.scale_backward(lambda p: p["w"].float().sum(), SCALER, {"w": torch.arange(3)}),
    TypeError,
    "Cast the parameters to float32",
    lambda: fa.scale_backward(lambda p: p["w"].float().sum(), SCALER, {"w": torch.arange(3).to(torch.float32)}),
)
row(
    "a sparse gradient",
    lambda: fa.scale_backward(lambda p: F.embedding(torch.tensor([0]), p, sparse=True).sum(), SCALER, torch.ones(2, 2)),
    TypeError,
    "Embedding(sparse=False)",
    lambda: fa.scale_backward(lambda p: F.embedding(torch.tensor([0]), p).sum(), SCALER, torch.ones(2, 2)),
)


class Scattered(torch.autograd.Function):
    """Takes a row, and gives its gradient as a sparse tensor or as what to_dense() makes of it."""

    @staticmethod
    def forward(weight: Tensor, dense: bool) -> Tensor:
        return weight[:1].clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.dense = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = torch.cat([grads[0], 0 * grads[0]]).to_sparse()
        return grad.to_dense() if ctx.dense else grad, None


def scattered(dense: bool) -> Any:
    def loss(p: Tensor) -> Tensor:
        taken: Any = Scattered.apply(p, dense)
        return taken.sum()

    return fa.scale_backward(loss, SCALER, torch.ones(2, 2)).grads


row(
    "a sparse gradient of an autograd.Function",
    lambda: scattered(dense=False),
    TypeError,
    "an autograd.Function returns grad.to_dense()",
    lambda: scattered(dense=True),
)
row(
    "stacked scalers",
    lambda: fa.scale_backward(lambda p: p.sum(), fa.StaticScale(torch.ones(2)), torch.ones(2, 3)),
    ValueError,
    "torch.vmap together with stacked parameters",
    lambda: torch.vmap(lambda scaler, p: fa.scale_backward(lambda p: p.sum(), scaler, p).grads)(
        fa.StaticScale(torch.ones(2)), torch.ones(2, 3)
    ),
)


def in_inference_mode(backend: Any) -> Any:
    with torch.inference_mode():
        return fa.scale_backward(loss_fn, SCALER, params(), X, backend=backend)


row(
    "the engine in inference mode",
    lambda: in_inference_mode("autograd"),
    RuntimeError,
    "use backend='func', which works in it",
    lambda: in_inference_mode("func"),
)
row(
    "func where the graph may be left",
    lambda: fa.make_step(loss_fn, SGD, backend="func", compile={"fullgraph": False}),
    ValueError,
    "Use backend='autograd'",
    lambda: fa.make_step(loss_fn, SGD, backend="autograd", compile={"fullgraph": False}),
)


def learned(backend: Any) -> Tensor:
    """A loss that contains a stage, which is to be differentiated."""

    def outer(p: Tensor) -> Tensor:
        return fa.unscale(fa.ScaledGrads(p * X, 8.0)).grads.sum()

    return fa.scale_backward(outer, SCALER, torch.ones(3), backend=backend).grads.tree


row(
    "a stage inside a loss of the engine",
    lambda: learned("autograd"),
    RuntimeError,
    "Differentiate this loss with backend='func'",
    lambda: bool((learned("func") == X).all()),
)

# Sums and flags.

row(
    "units inside a tree",
    lambda: fa.global_norm({"a": scaled()}),
    TypeError,
    "unscale each of them first",
    lambda: fa.global_norm({"a": fa.unscale(scaled()).grads}),
)
row(
    "gradients without units",
    lambda: api.accumulate(None, {"w": X}),
    TypeError,
    "ScaledGrads(tree, scale, weight)",
    lambda: fa.accumulate(None, fa.ScaledGrads({"w": X}, 1.0, 1.0)),
)
row(
    "a Python bool as a flag",
    lambda: api.maybe_step(SGD, params(), SGD.init(params()), scaled(), True),
    TypeError,
    "or write torch.tensor(True)",
    lambda: fa.maybe_step(SGD, params(), SGD.init(params()), scaled(), torch.tensor(True)),
)
row(
    "a flag for each leaf",
    lambda: fa.maybe_step(SGD, params(), SGD.init(params()), scaled(), torch.ones(2) > 0),
    ValueError,
    "Reduce it with torch.all",
    lambda: fa.maybe_step(SGD, params(), SGD.init(params()), scaled(), torch.all(torch.ones(2) > 0)),
)
row(
    "flags of several trees for one scale",
    lambda: fa.update_scale(fa.DynamicScale(), torch.ones(2) > 0),
    ValueError,
    "torch.all",
    lambda: fa.update_scale(fa.DynamicScale(), torch.all(torch.ones(2) > 0)),
)
row(
    "a max_norm of 0",
    lambda: fa.clip(scaled(), 0.0),
    ValueError,
    "Use None to turn clipping off",
    lambda: fa.clip(scaled(), None),
)

# Scalers.

row(
    "an integer scale",
    lambda: fa.StaticScale(torch.tensor(8)),
    TypeError,
    "Cast it with .float()",
    lambda: fa.StaticScale(torch.tensor(8).float()),
)
row(
    "a tracker of int64",
    lambda: fa.DynamicScale(8.0, growth_tracker=torch.tensor(3)),
    TypeError,
    "Cast it with .int()",
    lambda: fa.DynamicScale(8.0, growth_tracker=torch.tensor(3).int()),
)
row(
    "no scale, but one",
    lambda: fa.NoScale(2.0),
    ValueError,
    "use StaticScale(2.0)",
    lambda: fa.StaticScale(2.0),
)
row(
    "torch's scaler",
    lambda: api.init_state(params(), SGD, torch.amp.GradScaler("cpu")),
    TypeError,
    "use DynamicScale()",
    lambda: fa.init_state(params(), SGD, fa.DynamicScale()),
)

# The step and its window.

row(
    "a tensor in place of a window",
    lambda: STEP(state(), X),
    TypeError,
    "step(state, [micro_batch])",
    lambda: applied(STEP(state(), [X])),
)
row(
    "an update without a window",
    lambda: STEP.update(state()),
    ValueError,
    "step.accumulate(state, micro_batch) before it",
    lambda: applied(STEP.update(STEP.accumulate(state(), X))),
)
row(
    "the pair that a step returned",
    lambda: STEP(STEP(state(), [X]), [X]),
    TypeError,
    "A step returns the pair (state, metrics)",
    lambda: applied(STEP(STEP(state(), [X])[0], [X])),
)
row(
    "a window that is none",
    lambda: STEP.update(dataclasses.replace(state(), window=3)),
    TypeError,
    "Go on with dataclasses.replace(state, window=None), and repeat the window",
    lambda: applied(STEP(dataclasses.replace(dataclasses.replace(state(), window=None)), [X])),
)
row(
    "micro-batches that are not stacked",
    lambda: STEP.scan(state(), [X, X[:2]]),
    ValueError,
    "optree.tree_map(lambda *leaves: torch.stack([*map(torch.as_tensor, leaves)]), *window)",
    lambda: applied(
        STEP.scan(state(), optree.tree_map(lambda *leaves: torch.stack([*map(torch.as_tensor, leaves)]), *WINDOW))
    ),
)

WINDOW: list[Any] = [X, X]
PAIRS = fa.make_step(lambda p, batch: (p["w"] * batch[0] * batch[1]).sum(), SGD)
row(
    "a batch in place of a window",
    lambda: PAIRS(state(), [X, X[:2].int()]),
    TypeError,
    "write step(state, [[x, y]])",
    lambda: applied(PAIRS(state(), [[X, X.int()]])),
)


def one_by_one(window: list[Any]) -> Any:
    step = fa.make_step(lambda p, batch: loss_fn(p, batch.float()), SGD)
    current = state()
    for micro_batch in window:
        current = step.accumulate(current, micro_batch)
    return step.update(current)


row(
    "micro-batches that differ",
    lambda: fa.make_step(lambda p, batch: loss_fn(p, batch.float()), SGD)(state(), [X, X.int()]),
    TypeError,
    "step.accumulate(state, micro_batch) for each, then step.update(state)",
    lambda: applied(one_by_one([X, X.int()])),
)


def with_buffers(params: Any, x: Tensor, *buffers: Any) -> fa.Loss:
    return fa.Loss(loss_fn(params, x), buffers={"seen": x.sum()})


row(
    "buffers of a state without any",
    lambda: fa.make_step(with_buffers, SGD)(state(), [X]),
    ValueError,
    "Pass init_state(..., buffers=buffers)",
    lambda: applied(fa.make_step(with_buffers, SGD)(state(buffers={"seen": torch.zeros(())}), [X])),
)


def writing(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
    buffers["seen"].add_(x.sum())
    return fa.Loss(loss_fn(params, x), buffers=buffers)


def replacing(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
    return fa.Loss(loss_fn(params, x), buffers={**buffers, "seen": buffers["seen"] + x.sum()})


row(
    "a loss that writes to its buffers",
    lambda: fa.make_step(writing, SGD)(state(buffers={"seen": torch.zeros(())}), [X]),
    RuntimeError,
    "Loss(value, buffers={**buffers, name: new})",
    lambda: bool(fa.make_step(replacing, SGD)(state(buffers={"seen": torch.zeros(())}), [X])[0].buffers["seen"] == 6),
)


def noted(params: Any, x: Tensor, note: Any) -> fa.Loss:
    return fa.Loss(loss_fn(params, x), aux={"note": note})


def handed_out() -> Any:
    return fa.scale_backward(noted, SCALER, params(), X, "a text").aux["note"]


row(
    "a text among the aux",
    lambda: fa.make_step(lambda p, x: noted(p, x, "a text"), SGD)(state(), [X]),
    TypeError,
    "Return it from scale_backward in a loop of your own, or leave it out",
    lambda: handed_out() == "a text" and applied(fa.make_step(loss_fn, SGD)(state(), [X])),
)
row(
    "a loader that is none",
    lambda: api.windows(3, 2),
    TypeError,
    "Pass a DataLoader or a list of micro-batches",
    lambda: len(list(fa.windows([X] * 3, 2))) == 2,
)
row(
    "the length of a generator's windows",
    lambda: len(api.windows((x for x in [X]), 2)),
    TypeError,
    "Pass a list",
    lambda: len(api.windows([X], 2)) == 1,
)


def seeded(seed: int) -> bool:
    with fa.seeded(seed):
        return True


row(
    "a seed of more than 64 bits",
    lambda: seeded(2**70 + 3),
    ValueError,
    "Take it modulo 2**64",
    lambda: seeded((2**70 + 3) % 2**64),
)

# Optimizers.


def returning(returned: Any) -> fa.Optimizer:
    return fa.Optimizer(lambda params: (), lambda grads, opt_state, params: returned(grads, opt_state))


row(
    "updates without a state",
    lambda: fa.make_step(loss_fn, returning(lambda grads, opt_state: grads))(state(), [X]),
    TypeError,
    "Write `return updates, opt_state`",
    lambda: applied(fa.make_step(loss_fn, returning(lambda grads, opt_state: (grads, opt_state)))(state(), [X])),
)
row(
    "torch's optimizer",
    lambda: fa.make_step(loss_fn, torch.optim.SGD([nn.Parameter(X)], 0.1)),
    TypeError,
    "use functional_amp.sgd, adam or adamw",
    lambda: fa.make_step(loss_fn, fa.sgd(0.1)),
)
row(
    "the state of another optimizer",
    lambda: fa.maybe_step(ADAM, params(), SGD.init(params()), scaled(), torch.tensor(True)),
    TypeError,
    "Take it from the init of this optimizer",
    lambda: fa.maybe_step(ADAM, params(), ADAM.init(params()), scaled(), torch.tensor(True)),
)
row(
    "a count that is no tensor",
    lambda: fa.maybe_step(ADAM, params(), ADAM.init(params())._replace(step=3), scaled(), torch.tensor(True)),
    TypeError,
    "Write torch.tensor(...)",
    lambda: fa.maybe_step(
        ADAM,
        params(),
        ADAM.init(params())._replace(step=torch.tensor(3, dtype=torch.int32)),
        scaled(),
        torch.tensor(True),
    ),
)
row(
    "moments that were cast",
    lambda: fa.maybe_step(
        ADAM, params(), ADAM.init(params())._replace(exp_avg={"w": X.half()}), scaled(), torch.tensor(True)
    ),
    TypeError,
    "Take the state from the init of this very optimizer, and do not cast it",
    lambda: fa.maybe_step(ADAM, params(), ADAM.init(params()), scaled(), torch.tensor(True)),
)
row(
    "a label without an optimizer",
    lambda: fa.partition({"a": SGD}, lambda path, leaf: "b").init(params()),
    ValueError,
    "Add an optimizer for it, or None to freeze its leaves",
    lambda: (
        fa.partition({"a": SGD, "b": ADAM}, lambda path, leaf: "b").init(params()),
        fa.partition({"a": SGD, "b": None}, lambda path, leaf: "b").init(params()),
    ),
)
row(
    "an integer learning rate",
    lambda: fa.sgd(torch.tensor(1)),
    TypeError,
    "Cast it with .float()",
    lambda: applied(fa.make_step(loss_fn, fa.sgd(torch.tensor(1).float()))(state(), [X])),
)
row(
    "a scheduler of torch",
    lambda: api.sgd(torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD([nn.Parameter(X)], 0.1))),
    TypeError,
    "make one: from_torch_schedule(cls, lr=, steps=, ...)",
    lambda: fa.sgd(fa.from_torch_schedule(torch.optim.lr_scheduler.ConstantLR, lr=0.1, steps=9)),
)

# Modules.


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def norm(use: Callable[[Any, Any, Any], Any]) -> Any:
    return use(*fa.from_module(Norm()))


row(
    "statistics that are not given",
    lambda: norm(lambda apply, p, b: apply.eval()(p, BATCH)),
    RuntimeError,
    "apply.bind(buffers)(params, ...)",
    lambda: norm(lambda apply, p, b: apply.eval().bind(b)(p, BATCH)),
)
row(
    "statistics that are given and move",
    lambda: norm(lambda apply, p, b: apply.bind(b)(p, BATCH)),
    RuntimeError,
    "Use output, buffers = apply.with_buffers(params, buffers, ...)",
    lambda: norm(lambda apply, p, b: bool(apply.with_buffers(p, b, BATCH)[1]["norm.num_batches_tracked"] == 1)),
)
row(
    "a method that is not there",
    lambda: norm(lambda apply, p, b: apply.method("thrice")),
    AttributeError,
    "Give the name of a method, as a string",
    lambda: norm(lambda apply, p, b: apply.method("twice")),
)
row(
    "one name for scratch",
    lambda: api.from_module(Norm(), scratch="log"),
    TypeError,
    "Write ('log',)",
    lambda: fa.from_module(Norm(), scratch=("log",)),
)
row(
    "a layer without a shape",
    lambda: fa.from_module(nn.LazyLinear(2)),
    TypeError,
    "Run the module on one batch first",
    lambda: fa.from_module(run(nn.LazyLinear(2))),
)


def run(module: nn.Module) -> nn.Module:
    module(BATCH)
    return module


def hooked() -> tuple[nn.Linear, Any]:
    module = nn.Linear(3, 1)
    return module, module.weight.register_hook(lambda grad: 2 * grad)


def unhooked() -> nn.Linear:
    module, handle = hooked()
    handle.remove()
    return module


row(
    "a gradient hook",
    lambda: fa.from_module(hooked()[0]),
    TypeError,
    "Remove it (handle.remove())",
    lambda: fa.from_module(unhooked()),
)


def frozen_row() -> bool:
    """What the hook did, said in the loss function: the first row does not move."""
    apply, given, _ = fa.from_module(nn.Linear(3, 2))
    mask = torch.tensor([[False], [True]])

    def frozen(p: Any, x: Tensor) -> Tensor:
        return apply({**p, "weight": torch.where(mask, p["weight"], p["weight"].detach())}, x).sum()

    grads: Any = fa.scale_backward(frozen, SCALER, given, BATCH).grads.tree
    return bool((grads["weight"][0] == 0).all() and (grads["weight"][1] != 0).all())


row(
    "a gradient hook that freezes a row",
    lambda: fa.from_module(hooked()[0]),
    TypeError,
    "torch.where(mask, weight, weight.detach())",
    frozen_row,
)


class Tied(nn.Module):
    def __init__(self, by_memory: bool):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if by_memory:
            self.b.weight.data = self.a.weight.data
        else:
            self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


row(
    "weights tied by their memory",
    lambda: fa.from_module(Tied(True)),
    TypeError,
    "Tie them by the parameter itself: decoder.weight = encoder.weight",
    lambda: sorted(fa.from_module(Tied(False)).params) == ["a.bias", "a.weight", "b.bias"],
)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool):
        super().__init__()
        self.linear, self.reentrant = nn.Linear(3, 3), reentrant

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.linear, x, use_reentrant=self.reentrant)


def checkpointed(reentrant: bool) -> Any:
    apply, given, _ = fa.from_module(Checkpointed(reentrant))
    return fa.scale_backward(lambda p, x: apply(p, x).sum(), SCALER, given, BATCH, backend="autograd")


row(
    "a reentrant checkpoint",
    lambda: checkpointed(True),
    RuntimeError,
    "Call checkpoint(..., use_reentrant=False)",
    lambda: checkpointed(False),
)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, parts: Any) -> Tensor:
        return sum((self.linear(part) for part in parts), torch.zeros(()))


def summed(parts: Any) -> Tensor:
    apply, given, _ = fa.from_module(Sums())
    return apply(given, parts)


row(
    "a generator as an argument",
    lambda: summed(x for x in [BATCH]),
    TypeError,
    "Pass a list in place of a generator",
    lambda: summed([BATCH]),
)


def constrained(where: str) -> Any:
    """The embedding's max_norm, which writes to its weight, or the same in the loss function."""
    module = nn.Embedding(4, 3, max_norm=1.0 if where == "in the module" else None)
    apply, given, _ = fa.from_module(module)

    def loss(p: Any, x: Tensor) -> Tensor:
        weight = p["weight"]
        if where == "in the loss function":
            weight = weight * (1 / weight.norm(dim=1, keepdim=True)).clamp(max=1.0)
        return apply({**p, "weight": weight}, x).sum()

    return fa.scale_backward(loss, SCALER, given, torch.tensor([0, 1]))


row(
    "a constraint in the module",
    lambda: constrained("in the module"),
    RuntimeError,
    "Apply a constraint (max_norm, say) to the params in the loss function, before apply",
    lambda: constrained("in the loss function"),
)
row(
    "values of another size",
    lambda: fa.to_module(nn.Linear(3, 1), fa.from_module(nn.Linear(4, 1)).params),
    ValueError,
    "Pass the values of a module built with the same sizes",
    lambda: fa.to_module(nn.Linear(3, 1), fa.from_module(nn.Linear(3, 1)).params),
)


class Global(nn.Module):
    """Reads a layer that it is not given, or one of its own."""

    def __init__(self, own: bool):
        super().__init__()
        self.layer, self.own = nn.Linear(3, 1), own
        LAYERS["last"] = self.layer

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer if self.own else LAYERS["last"])(x)


LAYERS: dict[str, nn.Module] = {}


def read(own: bool) -> Tensor:
    apply, given, _ = fa.from_module(Global(own))
    return apply(given, BATCH)


row(
    "a layer that is read through a global",
    lambda: read(own=False),
    RuntimeError,
    "Read it through self",
    lambda: read(own=True),
)


class Counts(nn.Module):
    """Counts its calls in a checkpointed part, in one of two ways."""

    n: Tensor

    def __init__(self, in_place: bool):
        super().__init__()
        self.linear, self.in_place = nn.Linear(3, 1), in_place
        self.register_buffer("n", torch.zeros(()))

    def part(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.n.add_(1)
        else:
            self.n = self.n + 1
        return self.linear(x)

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.part, x, use_reentrant=False)


def counted(in_place: bool) -> bool:
    apply, given, buffers = fa.from_module(Counts(in_place))

    def loss(p: Any, x: Tensor, b: Any) -> fa.Loss:
        out, after = apply.with_buffers(p, b, x)
        return fa.Loss(out.sum(), buffers=after)

    step = fa.make_step(loss, SGD, backend="autograd")
    return applied(step(state(params=given, buffers=buffers), [BATCH, BATCH]))


row(
    "a buffer that a checkpointed part assigns",
    lambda: counted(in_place=False),
    RuntimeError,
    "Write self.n.add_(1), not self.n = self.n + 1",
    lambda: counted(in_place=True),
)

# Files and checkpoints.


def loaded_by_torch() -> fa.TrainState:
    """A whole state, as torch.save and torch.load take it."""
    path = file()
    torch.save(state(), path)
    return torch.load(path, weights_only=False)


row(
    "a state that torch.load gave",
    lambda: fa.load_state_dict(state(), cast(Any, loaded_by_torch())),
    TypeError,
    "a state that torch.load gave needs no load_state_dict",
    lambda: applied(STEP(loaded_by_torch(), [X])),
)
row(
    "a dict without its version",
    lambda: fa.load_state_dict(state(), {"params/w": X}),
    ValueError,
    "pass a dict that state_dict of this version of functional_amp gave",
    lambda: fa.load_state_dict(state(), fa.state_dict(state())),
)
row(
    "a part of a file",
    lambda: fa.load_state_dict(state(), {"format_version": fa.state_dict(state())["format_version"]}),
    ValueError,
    "load all entries of the file",
    lambda: fa.load_state_dict(state(), dict(fa.state_dict(state()).items())),
)
row(
    "a sparse tensor in a file",
    lambda: fa.save(file(), {"w": torch.eye(2).to_sparse()}),
    TypeError,
    "state_dict(state) makes them",
    lambda: fa.save(file(), fa.state_dict(state(params={"w": torch.eye(2)}))),
)
row(
    "a name that the format takes for itself",
    lambda: fa.save(file(), {"__metadata__": X}),
    TypeError,
    "rename it",
    lambda: fa.save(file(), {"metadata": X}),
)


row(
    "the pair that a step returned, to save",
    lambda: api.state_dict(STEP(state(), [X])),
    TypeError,
    "a step returns the pair (state, metrics)",
    lambda: fa.state_dict(STEP(state(), [X])[0]),
)
row(
    "parameters as a template",
    lambda: api.load_state_dict(params(), api.state_dict(state())),
    TypeError,
    "pass init_state(...) first",
    lambda: fa.load_state_dict(fa.init_state(params(), SGD, SCALER), fa.state_dict(state())),
)
row(
    "a state in place of its dict",
    lambda: api.save(file(), state()),
    TypeError,
    "save(path, state_dict(state))",
    lambda: fa.save(file(), fa.state_dict(state())),
)
row(
    "something that a file can't hold",
    lambda: api.state_dict(state(), settings={"a": 1}),
    TypeError,
    "save json.dumps(...) of it",
    lambda: fa.state_dict(state(), settings='{"a": 1}'),
)
row(
    "two leaves of one name",
    lambda: fa.state_dict(state(params={"1": X, 1: X})),
    ValueError,
    "give dicts keys that differ as text",
    lambda: fa.state_dict(state(params={"1": X, "2": X})),
)
row(
    "a dtype that the format does not have",
    lambda: fa.save(file(), {"w": torch.ones(2).to(torch.float8_e4m3fnuz)}),
    TypeError,
    "torch.save(flat, path) and torch.load(path) keep every dtype",
    lambda: kept_by_torch({"w": torch.ones(2).to(torch.float8_e4m3fnuz)}),
)


def kept_by_torch(flat: dict[str, Tensor]) -> bool:
    path = file()
    torch.save(flat, path)
    return torch.load(path)["w"].dtype == flat["w"].dtype


MODEL = nn.Linear(3, 1)
OURS = dict(MODEL.named_parameters())


def theirs(**given: Any) -> torch.optim.Optimizer:
    """An optimizer of torch after one update, whose groups have no names."""
    optimizer = torch.optim.AdamW(MODEL.parameters(), lr=0.0, **given)
    for parameter in MODEL.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


row(
    "an optimizer in place of its dict",
    lambda: api.opt_state_from_torch(ADAM.init(OURS), theirs()),
    TypeError,
    "pass torch_optimizer.state_dict()",
    lambda: fa.opt_state_from_torch(ADAM.init(OURS), theirs().state_dict(), list(OURS)),
)
row(
    "groups without names",
    lambda: fa.opt_state_from_torch(ADAM.init(OURS), theirs().state_dict()),
    ValueError,
    "[name for name, _ in model.named_parameters()]",
    lambda: fa.opt_state_from_torch(
        ADAM.init(OURS), theirs().state_dict(), [name for name, _ in MODEL.named_parameters()]
    ),
)
row(
    "parameters in place of an optimizer state",
    lambda: fa.opt_state_from_torch(OURS, theirs().state_dict(), list(OURS)),
    TypeError,
    "pass optimizer.init(params)",
    lambda: fa.opt_state_from_torch(fa.adamw().init(OURS), theirs().state_dict(), list(OURS)),
)
row(
    "the dict of another rule",
    lambda: fa.opt_state_to_torch(fa.sgd(0.1, momentum=0.9).init(OURS), theirs(), list(OURS)),
    TypeError,
    "pass the torch optimizer of the same rule",
    lambda: fa.opt_state_to_torch(
        fa.sgd(0.1, momentum=0.9).init(OURS), torch.optim.SGD(MODEL.parameters(), 0.1, momentum=0.9), list(OURS)
    ),
)

row(
    "the dict of another optimizer of torch",
    lambda: fa.opt_state_from_torch(fa.sgd(0.1, momentum=0.9).init(OURS), theirs().state_dict(), list(OURS), applied=1),
    TypeError,
    "pass the state of the same rule, or let the optimizer start",
    lambda: (
        fa.opt_state_from_torch(fa.adamw().init(OURS), theirs().state_dict(), list(OURS)),
        fa.sgd(0.1, momentum=0.9).init(OURS),
    ),
)
row(
    "amsgrad",
    lambda: fa.opt_state_from_torch(ADAM.init(OURS), theirs(amsgrad=True).state_dict(), list(OURS)),
    ValueError,
    "carry the parameters alone, and let the optimizer start without amsgrad",
    lambda: applied(fa.make_step(lambda p, x: (p["weight"] * x).sum(), ADAM)(state(ADAM, params=OURS), [X])),
)
row(
    "a count that the dict has already",
    lambda: fa.opt_state_from_torch(ADAM.init(OURS), theirs().state_dict(), list(OURS), applied=7),
    ValueError,
    "leave it out",
    lambda: bool(fa.opt_state_from_torch(ADAM.init(OURS), theirs().state_dict(), list(OURS)).step == 1),
)
row(
    "momentum where this optimizer keeps none",
    lambda: fa.maybe_step(SGD, params(), fa.sgd(0.1, momentum=0.9).init(params()), scaled(), torch.tensor(True)),
    TypeError,
    "Take the state from the init of this very optimizer",
    lambda: fa.maybe_step(SGD, params(), SGD.init(params()), scaled(), torch.tensor(True)),
)

# The tools.

FINITE = [torch.ones(3)]
HISTORY, METRICS = debug.init_history(state()), STEP(state(), FINITE)[1]
row(
    "flags that are no tensor",
    lambda: tools.record(HISTORY, METRICS, [False]),
    TypeError,
    "nonfinite_leaves(window.grads)",
    lambda: debug.record(HISTORY, METRICS, debug.nonfinite_leaves(scaled())),
)
row(
    "a history without a window",
    lambda: HISTORY.plot(file().with_suffix(".png")),
    ValueError,
    "record(history, metrics)",
    lambda: debug.record(HISTORY, METRICS).plot(file().with_suffix(".png")),
)
row(
    "no trajectory",
    lambda: debug.plot_scale(path=file().with_suffix(".png")),
    ValueError,
    "plot_scale(simulate(...))",
    lambda: debug.plot_scale(debug.simulate(fa.DynamicScale(), [True]), path=file().with_suffix(".png")),
)
row(
    "a tensor of overflows",
    lambda: tools.simulate(api.DynamicScale(), torch.tensor([True])),
    TypeError,
    ".tolist()",
    lambda: debug.simulate(fa.DynamicScale(), torch.tensor([True]).tolist()),
)
row(
    "a function without a number of steps",
    lambda: debug.simulate(fa.DynamicScale(), lambda step, scale: False),
    ValueError,
    "steps=1000",
    lambda: debug.simulate(fa.DynamicScale(), lambda step, scale: False, steps=1000),
)
row(
    "more steps than overflows",
    lambda: debug.simulate(fa.DynamicScale(), [True], 2),
    ValueError,
    "a function (step, scale), or a longer list",
    lambda: (
        debug.simulate(fa.DynamicScale(), [True, False], 2),
        debug.simulate(fa.DynamicScale(), lambda step, scale: step == 0, 2),
    ),
)
HALF: Any = fa.autocast(lambda p, x: (x @ p["w"]).float().sum(), torch.float16)
ROOT_OF_ZERO = torch.tensor([0.0, 1.0, 4.0])


def square_root(p: Any, x: Tensor) -> Tensor:
    return (p["w"] * x).sqrt().sum()


row(
    "a loss that casts by itself",
    lambda: debug.underflow_report(HALF, params(), BATCH, dtype=torch.float16),
    ValueError,
    "loss_fn.__wrapped__",
    lambda: debug.underflow_report(HALF.__wrapped__, params(), BATCH, dtype=torch.float16),
)
row(
    "parameters in half precision",
    lambda: debug.underflow_report(loss_fn, {"w": X.half()}, X, dtype=torch.float16),
    TypeError,
    "cast_floating(params, torch.float32)",
    lambda: debug.underflow_report(loss_fn, fa.cast_floating({"w": X.half()}, torch.float32), X, dtype=torch.float16),
)
row(
    "a single scale",
    lambda: debug.underflow_report(loss_fn, params(), X, dtype=torch.float16, scales=[1.0]),
    ValueError,
    "[2.0**k for k in range(0, 25, 2)]",
    lambda: debug.underflow_report(loss_fn, params(), X, dtype=torch.float16, scales=[2.0**k for k in range(0, 25, 2)]),
)
row(
    "a gradient that is not finite in float32",
    lambda: debug.underflow_report(square_root, params(), ROOT_OF_ZERO, dtype=torch.float16),
    ValueError,
    "run explain(loss_fn, state, [batch]), or pass another batch",
    lambda: (
        debug.explain(square_root, state(), [ROOT_OF_ZERO]).found
        and debug.underflow_report(square_root, params(), X, dtype=torch.float16)
    ),
)


def by_items(p: Any, x: Tensor) -> fa.Loss:
    return fa.Loss((p["w"] * x).sum(), weight=(x > 0).sum())


row(
    "a batch without weight",
    lambda: debug.underflow_report(by_items, params(), 0 * X, dtype=torch.float16),
    ValueError,
    "pass a batch with items that count",
    lambda: debug.underflow_report(by_items, params(), X, dtype=torch.float16),
)
row(
    "bare parameters to explain",
    lambda: tools.explain(loss_fn, params(), [X]),
    TypeError,
    "init_state(params, sgd(0.1))",
    lambda: debug.explain(loss_fn, fa.init_state(params(), fa.sgd(0.1)), [X]),
)
row(
    "a bare micro-batch to explain",
    lambda: debug.explain(loss_fn, state(), X),
    TypeError,
    "explain(loss_fn, state, [micro_batch])",
    lambda: debug.explain(loss_fn, state(), [X]),
)
row(
    "options beside a step",
    lambda: debug.explain(STEP, state(), [X], backend="func"),
    ValueError,
    "leave them out",
    lambda: debug.explain(STEP, state(), [X]),
)
row(
    "an index without its micro-batch",
    lambda: testing.faulty(loss_fn, value=float("nan"), index=lambda x: x[0]),
    ValueError,
    "Write micro_batch=2, index=...",
    lambda: testing.faulty(loss_fn, value=float("nan"), micro_batch=2, index=lambda x: x[0]),
)


@pytest.mark.parametrize("name", ROWS)
def test_what_raised_succeeds_once_the_remedy_is_applied(name: str) -> None:
    wrong, error, remedy, right = ROWS[name]
    with pytest.raises(error) as raised:
        wrong()
    assert remedy in str(raised.value)
    assert right() is not False


@pytest.mark.slow
def test_a_scan_that_the_engine_differentiates_in_a_graph_is_a_list_instead(fresh_dynamo: None) -> None:
    step = fa.make_step(loss_fn, SGD, backend="autograd", compile={"backend": "aot_eager"})
    with pytest.raises(ValueError, match=r"Call step\(state, micro_batches\) with a list"):
        step.scan(state(), torch.stack([X, X]))
    assert applied(step(state(), [X, X]))
