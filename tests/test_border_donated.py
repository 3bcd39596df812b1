"""What functions of users keep of what they were given, where a step donates: the pure step's values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits, mapped

Tree = dict[str, Tensor]
EAGER = {"compile": False}
COMPILED = {"compile": {"backend": "aot_eager"}}


def zeros(params: Tree) -> Tree:
    return {name: torch.zeros_like(leaf) for name, leaf in params.items()}


def looked_back(grads: Tree, before: Tree, params: Tree) -> tuple[Tree, Tree]:
    return {name: grads[name] + 0.1 * (params[name] - before[name]) for name in grads}, dict(params)


def gradient_difference(grads: Tree, before: Tree, params: Tree) -> tuple[Tree, Tree]:
    return {name: 2 * grads[name] - before[name] for name in grads}, dict(grads)


def viewed(grads: Tree, before: Tree, params: Tree) -> tuple[Tree, Tree]:
    return looked_back(grads, before, params)[0], {name: leaf.view_as(leaf) for name, leaf in params.items()}


def previous_but_one(params: Tree, state: dict[str, Tree]) -> dict[str, Tree]:
    return {"last": dict(params), "before": state["last"]}


MEMBERS = {
    "the parameters": fa.Transform(zeros, looked_back),
    "views of the parameters": fa.Transform(zeros, viewed),
    "the gradients": fa.Transform(zeros, gradient_difference),
    "the new parameters": fa.Transform(zeros, None, lambda params, state: dict(params)),
    "those of two updates": fa.Transform(lambda p: {"last": zeros(p), "before": zeros(p)}, None, previous_but_one),
}


def plain(grads: Tree, state: Any, params: Tree) -> tuple[Tree, Any]:
    return {name: -0.25 * grad for name, grad in grads.items()}, state


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda: fa.sgd(0.25, momentum=0.9),
    "adamw": lambda: fa.adamw(0.25),
    "from_torch": lambda: fa.from_torch(torch.optim.SGD, lr=0.25),
    "plain": lambda: fa.Optimizer(lambda params: (), plain),
    "a chain": lambda: fa.chain(fa.clip_by_value(0.5), fa.sgd(0.25)),
    "a partition": lambda: fa.partition({"a": fa.adamw(0.25)}, lambda path, leaf: "a"),
}


def loss_fn(params: Tree, x: Tensor) -> Tensor:
    return (params["w"] * x).square().sum() + params["b"].sin()


def trained(optimizer: Any, **options: Any) -> Any:
    """The state after each of some updates, one of them skipped."""
    params = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor(0.5)}
    state, states = fa.init_state(params, optimizer, fa.StaticScale(8.0)), []
    step = fa.make_step(loss_fn, optimizer, backend="autograd", **options)
    for factor in (1.0, 2.0, float("nan"), 3.0):
        state, _ = step(state, [torch.tensor([0.5, 1.0]) * factor])
        states.append(mapped(torch.clone, (state.params, state.opt_state)))
    return states


@pytest.mark.parametrize("last", OPTIMIZERS)
@pytest.mark.parametrize("kept", MEMBERS)
def test_a_member_of_a_chain_that_keeps_what_it_was_given_keeps_those_numbers_where_a_step_donates(
    kept: str, last: str
):
    optimizer = fa.chain(MEMBERS[kept], OPTIMIZERS[last]())
    assert_same_bits(trained(optimizer, donate=True), trained(optimizer))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    "last", [pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adamw", "plain", "a partition")]
)
def test_a_member_that_keeps_what_it_was_given_does_so_in_a_graph_that_donates(last: str):
    optimizer = fa.chain(MEMBERS["the parameters"], OPTIMIZERS[last]())
    mapped(torch.testing.assert_close, trained(optimizer, donate=True, **COMPILED), trained(optimizer))


@pytest.mark.parametrize("whole", [False, True], ids=["update", "step"])
@pytest.mark.parametrize("options", [EAGER, pytest.param(COMPILED, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_an_optimizer_that_keeps_the_parameters_it_was_given_keeps_those_numbers_where_a_step_donates(
    options: Any, whole: bool
):
    def update(grads: Tree, before: Tree, params: Tree) -> tuple[Tree, Tree]:
        grads, kept = looked_back(grads, before, params)
        return {name: -0.25 * grad for name, grad in grads.items()}, kept

    def step(grads: Tree, before: Tree, params: Tree) -> tuple[Tree, Tree]:
        updates, kept = update(grads, before, params)
        return {name: params[name] + updates[name] for name in params}, kept

    optimizer = fa.Optimizer(zeros, update, step if whole else None)
    mapped(torch.testing.assert_close, trained(optimizer, donate=True, **options), trained(optimizer))


@pytest.mark.parametrize("options", [EAGER, pytest.param(COMPILED, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_buffers_and_aux_that_are_the_parameters_are_those_before_the_update_where_a_step_donates(options: Any):
    def loss(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        value = (params["w"] * x + 0.1 * buffers["before"]).square().sum()
        return fa.Loss(value, aux=params["w"], buffers={"before": params["w"], "older": buffers["before"]})

    optimizer, results = fa.sgd(0.25, momentum=0.9), []
    for donate in (False, True):
        params, old = {"w": torch.tensor([1.0, 2.0])}, torch.zeros(2)
        buffers = {"before": old, "older": old.clone()}
        state, seen = fa.init_state(params, optimizer, fa.StaticScale(8.0), buffers=buffers), []
        step = fa.make_step(loss, optimizer, donate=donate, **(options if donate else {}))
        for factor in (1.0, 2.0, float("nan"), 3.0):
            state, metrics = step(state, [torch.tensor([0.5, 1.0]) * factor])
            seen.append(mapped(torch.clone, (state.params, state.buffers, metrics.aux)))
        results.append(seen)
    mapped(lambda a, b: torch.testing.assert_close(a, b, equal_nan=True), *reversed(results))


STRIDED = {
    "contiguous": lambda: torch.randn(50, 30),
    "transposed": lambda: torch.randn(30, 50).t(),
    "permuted": lambda: torch.randn(5, 30, 10).permute(0, 2, 1).flatten(0, 1),
    "sliced": lambda: torch.randn(100, 90)[::2, ::3],
    "expanded": lambda: torch.randn(50, 1).expand(50, 30),
}
ENDS: dict[str, Any] = {
    "sgd": lambda: fa.sgd(0.1, momentum=0.9),
    "noise": lambda: fa.chain(fa.add_noise(0.1), fa.adamw(0.1)),
    "adaptive clip": lambda: fa.chain(fa.adaptive_clip(), fa.sgd(0.1)),
    "from_torch": lambda: fa.from_torch(torch.optim.Adam, lr=0.1),
}


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("layout", STRIDED)
def test_donation_changes_no_bit_of_norm_clipping_and_noise_however_a_parameter_lies_in_memory(
    layout: str, end: str, backend: Any
):
    torch.manual_seed(0)
    weight, results = STRIDED[layout](), []
    micro_batches = [torch.randn(30) for _ in range(4)]
    every: list[dict[str, Any]] = [{"backend": backend}, {"donate": True}]
    for options in every:
        optimizer = ENDS[end]()
        state, norms = fa.init_state({"w": weight}, optimizer, fa.NoScale()), []
        step = fa.make_step(lambda p, x: (p["w"] @ x).sin().mean(), optimizer, max_norm=0.1, **options)
        for seed, window in enumerate((micro_batches[:1], micro_batches[1:3], micro_batches[3:])):
            state, metrics = step(state, window, seed=seed)
            norms.append(metrics.grad_norm)
        results.append((mapped(torch.clone, state.params), norms))
    assert_same_bits(*results)


def test_a_gradient_lies_in_memory_as_its_leaf_does_and_is_not_copied_where_it_does():
    made: list[Tensor] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            made.append(torch.full((4, 3), 2.0))
            return made[-1]

    for leaf, copied in ((torch.ones(4, 3), False), (torch.ones(3, 4).t(), True)):
        grads = fa.scale_backward(lambda p: Twice.apply(p).sum(), fa.NoScale(), leaf, backend="autograd").grads.tree
        assert grads.stride() == leaf.stride()
        assert (grads.data_ptr() != made[-1].data_ptr()) is copied
