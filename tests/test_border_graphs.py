"""Graphs and what changes around them: the order of reads and writes, guards, and the opt-in without guards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

AOT: dict[str, Any] = {"backend": "aot_eager"}
X = torch.arange(3.0)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda lr: fa.sgd(lr, momentum=0.9),
    "adamw": fa.adamw,
    "from_torch": lambda lr: fa.from_torch(torch.optim.AdamW, lr=lr),
    "partition": lambda lr: fa.partition(
        {"a": fa.adamw(lr), "b": fa.sgd(lr)}, lambda path, leaf: "a" if path == "w" else "b"
    ),
}


# What reads the parameters, and the update that writes to them


def readers(params: dict[str, Tensor], x: Tensor, buffers: dict[str, Tensor]) -> fa.Loss:
    """Loss, aux and buffers are arithmetic on the parameters, which a compiler may do when it likes."""
    loss = (params["one"] * x.sum()).sum() + (params["w"] * params["scale"].exp() * x).sum()
    average = {"average": 0.5 * buffers["average"] + 0.5 * params["w"].detach(), "target": params["w"].detach()}
    return fa.Loss(loss, aux={"scale": params["scale"].exp(), "w": 2 * params["w"]}, buffers=average)


@pytest.mark.slow
@pytest.mark.parametrize("rule", OPTIMIZERS)
def test_what_reads_the_parameters_of_a_graph_reads_them_before_its_update(rule: str):
    optimizer = OPTIMIZERS[rule](0.1)

    def start() -> fa.TrainState:
        params = {"one": torch.ones(1), "w": torch.tensor([1.0, -2.0, 3.0]), "scale": torch.tensor(1.0)}
        buffers = {"average": torch.zeros(3), "target": torch.zeros(3)}
        return fa.init_state(params, optimizer, fa.StaticScale(8.0), buffers=buffers)

    eager = fa.make_step(readers, optimizer, max_norm=1.0)
    step = fa.make_step(readers, optimizer, max_norm=1.0, donate=True, compile=True)
    expected, state = start(), start()
    for window in ([torch.ones(3)], [torch.ones(3), torch.full((3,), 2.0)]):
        expected, theirs = eager(expected, window)
        state, metrics = step(state, window)
        torch.testing.assert_close(metrics.loss, theirs.loss)
        torch.testing.assert_close(metrics.aux, theirs.aux)
        torch.testing.assert_close(state.buffers, expected.buffers)
        torch.testing.assert_close(state.params, expected.params)


@pytest.mark.parametrize(
    ("rule", "compile"),
    [("sgd", False), ("adamw", False), ("from_torch", False), pytest.param("adamw", AOT, marks=pytest.mark.slow)],
)
def test_a_learning_rate_that_raises_has_written_nothing(rule: str, compile: Any):
    fails = False

    def rate(count: Tensor) -> float:
        if fails:
            raise KeyError("no rate")
        return 0.1

    optimizer = OPTIMIZERS[rule](rate)
    step = fa.make_step(lambda p, x: (p["w"] * x).sum(), optimizer, donate=True, compile=compile)
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.NoScale())
    if not compile:  # a graph asks when it is made
        state, _ = step(state, [torch.ones(3)])
    before = {name: leaf.clone() for name, leaf in state.params.items()}
    fails = True
    with pytest.raises(Exception, match="no rate"):
        step(state, [torch.ones(3)])
    fails = False
    torch.testing.assert_close(state.params, before, rtol=0, atol=0)  # it can be read: it was given back
    after, _ = step(state, [torch.ones(3)])
    assert not torch.equal(after.params["w"], before["w"])


@pytest.mark.parametrize("compile", [False, pytest.param(AOT, marks=pytest.mark.slow)], ids=["eager", "compiled"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_loss_and_a_weight_that_are_elements_of_the_state_are_told_as_they_were(by_hand: bool, compile: Any):
    optimizer = fa.sgd(0.5)

    def loss_fn(params: dict[str, Tensor], x: Tensor, buffers: dict[str, Tensor]) -> fa.Loss:
        return fa.Loss(params["w"][0], weight=buffers["n"][0], buffers={"n": buffers["n"] + 1})

    step = fa.make_step(loss_fn, optimizer, donate=True, compile=compile)
    params, buffers = {"w": torch.tensor([3.0, 4.0])}, {"n": torch.ones(2)}
    state = fa.init_state(params, optimizer, fa.NoScale(), buffers=buffers)
    told = []
    for _ in range(2):
        if by_hand:
            state, metrics = step.update(step.accumulate(state, X))
        else:
            state, metrics = step(state, [X])
        told.append((metrics.loss.item(), metrics.weight.item()))
    assert told == [(3.0, 1.0), (2.5, 2.0)]


# What a graph is guarded by


@pytest.mark.slow
def test_a_function_of_torch_that_is_replaced_is_seen(monkeypatch: pytest.MonkeyPatch):
    # Of this module the library itself uses torch, by which the compiler names what the loss reads too.
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: torch.nn.functional.gelu(p["w"] * x).sum(), optimizer, compile=AOT)
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.NoScale())
    state, _ = step(state, [torch.arange(3.0)])
    monkeypatch.setattr(torch.nn.functional, "gelu", torch.relu)
    w = state.params["w"].clone()
    assert step(state, [torch.arange(3.0)])[1].loss == torch.relu(w * torch.arange(3.0)).sum()


@pytest.mark.slow
def test_a_setting_of_torch_that_a_loss_reads_is_seen(monkeypatch: pytest.MonkeyPatch):
    optimizer = fa.sgd(0.0)
    step = fa.make_step(
        lambda p, x: (p["w"] * x * (2 if torch.backends.cudnn.benchmark else 3)).sum(), optimizer, compile=AOT
    )
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.NoScale())
    for benchmark, factor in ((False, 3), (True, 2), (False, 3)):
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
        assert step(state, [torch.ones(3)])[1].loss.item() == 3 * factor


# Without guards


UNGUARDED: dict[str, Any] = {**AOT, "unsafe_skip_guards": True}


def product(params: dict[str, Tensor], x: Any) -> Tensor:
    some, others = x if isinstance(x, tuple) else (x, 1.0)
    return (params["w"] * some * others).sum()


def another_scaler(state: fa.TrainState) -> tuple[fa.TrainState, Any, Any]:
    return dataclasses.replace(state, scaler=fa.DynamicScale(8.0, growth_interval=2)), X, nullcontext()


def another_kind_of_scaler(state: fa.TrainState) -> tuple[fa.TrainState, Any, Any]:
    return dataclasses.replace(state, scaler=fa.StaticScale(4.0)), X, nullcontext()


def other_shapes(state: fa.TrainState) -> tuple[fa.TrainState, Any, Any]:
    return fa.init_state({"w": torch.ones(1)}, fa.sgd(0.1), fa.DynamicScale(8.0)), X, nullcontext()


def another_structure(state: fa.TrainState) -> tuple[fa.TrainState, Any, Any]:
    params = {"w": torch.ones(3), "v": torch.ones(2)}
    return fa.init_state(params, fa.sgd(0.1), fa.DynamicScale(8.0)), X, nullcontext()


def one_tensor_twice(state: fa.TrainState) -> tuple[fa.TrainState, Any, Any]:
    return state, (X, X), nullcontext()


def in_autocast(state: fa.TrainState) -> tuple[fa.TrainState, Any, Any]:
    return state, X, torch.autocast("cpu", torch.bfloat16)


CHANGES = [another_scaler, another_kind_of_scaler, other_shapes, another_structure, one_tensor_twice, in_autocast]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "donate"), [*((change, True) for change in CHANGES), (another_scaler, False), (in_autocast, False)]
)
def test_without_guards_a_change_of_state_batch_or_mode_is_seen(change: Callable[..., Any], donate: bool):
    ends = []
    for compile in (False, UNGUARDED):
        optimizer = fa.sgd(0.1)
        step = fa.make_step(product, optimizer, donate=donate, compile=compile)
        state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.DynamicScale(8.0, growth_interval=2000))
        batch: Any = (X, X + 1) if change is one_tensor_twice else X
        for _ in range(3):
            state, _ = step(state, [batch])
        held = state  # whoever holds the old state must not make a difference
        state, batch, mode = change(state)
        with mode:
            for _ in range(3):
                state, _ = step(state, [batch])
        ends.append(state)
        del held
    expected, found = ends
    torch.testing.assert_close(found.params, expected.params)
    assert type(found.scaler) is type(expected.scaler) and found.scaler.scale == expected.scaler.scale


@pytest.mark.slow
def test_without_guards_a_python_value_that_the_loss_reads_is_missed_as_the_docs_say():
    factor = [1.0]
    optimizer = fa.sgd(0.0)
    step = fa.make_step(lambda p, x: (p["w"] * x).sum() * factor[0], optimizer, donate=True, compile=UNGUARDED)
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.NoScale())
    losses = []
    for value in (1.0, 1.0, 2.0):
        factor[0] = value
        state, metrics = step(state, [X])
        losses.append(metrics.loss.item())
    assert losses == [3.0, 3.0, 3.0]
