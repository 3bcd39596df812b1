"""Fault injection: the fault is where and when it was asked for, and nowhere else."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import faulty, same_bits

BACKENDS = ["func", "autograd"]
PARAMS = {"w": torch.tensor([1.0, -2.0]), "blocks": [{"b": torch.tensor(0.5)}], "count": torch.tensor(3)}


def loss_fn(params: Any, batch: Any) -> Tensor:
    return (params["w"] * batch["x"]).sum() + params["blocks"][0]["b"] * batch["x"].sum()


def micro_batch(index: int) -> dict[str, Tensor]:
    return {"x": torch.tensor([1.0, 3.0]) + index, "index": torch.tensor(index)}


def by_index(batch: Any) -> Tensor:
    return batch["index"]


def backward(function: Any, batch: Any, backend: Any = "func") -> Any:
    return fa.scale_backward(function, fa.StaticScale(8.0), PARAMS, batch, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_the_chosen_leaf_has_the_fault_and_the_loss_is_as_it_was(value: float, backend: Any):
    grads, loss, _ = backward(faulty(loss_fn, leaf="w", value=value), micro_batch(0), backend)
    expected = backward(loss_fn, micro_batch(0), backend)
    assert torch.equal(loss, expected.loss)
    assert torch.equal(grads.tree["blocks"][0]["b"], expected.grads.tree["blocks"][0]["b"])
    torch.testing.assert_close(grads.tree["w"], torch.full((2,), value), rtol=0, atol=0, equal_nan=True)
    assert fa.nonfinite_paths(grads) == ["w"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_without_a_leaf_the_loss_itself_goes_wrong(value: float, backend: Any):
    grads, loss, _ = backward(faulty(loss_fn, value=value), micro_batch(0), backend)
    assert not loss.isfinite()
    assert fa.nonfinite_paths(grads) == ["blocks.0.b", "w"]


def test_an_exception_is_raised_at_its_micro_batch():
    function = faulty(loss_fn, micro_batch=1, value=KeyError("lost"))
    backward(function, micro_batch(0))
    with pytest.raises(KeyError, match="lost"):
        backward(function, micro_batch(1))
    by_data = faulty(loss_fn, micro_batch=1, value=KeyError("lost"), index=by_index)
    backward(by_data, micro_batch(0))
    with pytest.raises(KeyError, match="lost"):
        backward(by_data, micro_batch(1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("leaf", ["w", None])
def test_the_fault_comes_at_its_micro_batch_and_never_again(leaf: str | None, counted: bool, backend: Any):
    function = faulty(loss_fn, leaf=leaf, micro_batch=2, index=None if counted else by_index)
    for index in range(4):
        found, expected = (backward(f, micro_batch(index), backend) for f in (function, loss_fn))
        assert bool(fa.all_finite(found.grads)) is (index != 2)
        if index != 2:
            assert same_bits(found, expected)
    assert function.calls == (4 if counted else 0)


def test_the_count_can_be_set_back():
    function = faulty(loss_fn, leaf="w", micro_batch=0)
    flags = []
    for _ in range(2):
        function.calls = 0
        flags += [bool(fa.all_finite(backward(function, micro_batch(i)).grads)) for i in range(2)]
    assert flags == [False, True, False, True]


def test_other_ranks_have_no_fault(monkeypatch: pytest.MonkeyPatch):
    assert not fa.all_finite(backward(faulty(loss_fn, leaf="w", rank=0), micro_batch(0)).grads)
    assert fa.all_finite(backward(faulty(loss_fn, leaf="w", rank=1), micro_batch(0)).grads)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    assert fa.all_finite(backward(faulty(loss_fn, leaf="w", rank=0), micro_batch(0)).grads)
    assert not fa.all_finite(backward(faulty(loss_fn, leaf="w", rank=1), micro_batch(0)).grads)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_skips_the_window_with_the_fault(backend: Any):
    optimizer = fa.adam(0.1)
    step = fa.make_step(faulty(loss_fn, leaf="blocks.0.b", micro_batch=3), optimizer, backend=backend)
    state = fa.init_state(PARAMS, optimizer)
    flags = []
    for window in fa.windows([micro_batch(i) for i in range(6)], 2):
        state, metrics = step(state, window)
        flags.append(bool(metrics.finite))
    assert flags == [True, False, True]
    assert (state.applied.item(), state.skipped.item()) == (2, 1)


@pytest.mark.parametrize(("leaf", "backend"), [("w", "func"), ("w", "autograd"), (None, "func")])
def test_a_graph_takes_the_fault_by_index(leaf: str | None, backend: Any, fresh_dynamo: None):
    function = faulty(loss_fn, leaf=leaf, micro_batch=1, index=by_index)
    graph = torch.compile(
        lambda batch: fa.all_finite(backward(function, batch, backend).grads), backend="aot_eager", fullgraph=True
    )
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert [bool(graph(micro_batch(index))) for index in range(3)] == [True, False, True]


def test_what_a_graph_can_not_do_is_said(fresh_dynamo: None):
    for fault, message in (
        (faulty(loss_fn, leaf="w", micro_batch=1), "can not count calls"),
        (faulty(loss_fn, value=ValueError()), "can not raise an exception"),
    ):
        graph = torch.compile(lambda p, b, f=fault: f(p, b), backend="aot_eager", fullgraph=True)
        with pytest.raises(Exception, match=message):
            graph(PARAMS, micro_batch(0))


def test_an_ensemble_has_the_fault_at_the_members_whose_index_it_is():
    function = faulty(lambda p, b: (p["w"] * b["x"]).sum(), leaf="w", micro_batch=1, index=by_index)

    def finite(batch: Any) -> Tensor:
        return fa.all_finite(fa.scale_backward(function, fa.NoScale(), {"w": torch.ones(2)}, batch).grads)

    batches = {name: torch.stack([micro_batch(i)[name] for i in range(3)]) for name in ("x", "index")}
    assert torch.func.vmap(finite)(batches).tolist() == [True, False, True]


def test_weight_aux_and_buffers_go_through():
    def with_all(params: Any, batch: Any) -> fa.Loss:
        return fa.Loss(loss_fn(params, batch), weight=3.0, aux={"seen": batch["x"]}, buffers={"n": torch.ones(())})

    grads, loss, (aux, buffers) = backward(faulty(with_all), micro_batch(0))
    assert loss.isnan() and grads.weight == 3 and buffers["n"] == 1 and torch.equal(aux["seen"], micro_batch(0)["x"])
    weightless = faulty(lambda p, b: fa.Loss(loss_fn(p, b), weight=0.0), leaf="w")
    assert fa.all_finite(backward(weightless, micro_batch(0)).grads)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"value": 1.0}, ValueError, "value: found 1.0, expected NaN, inf"),
        ({"value": "nan"}, TypeError, "value: found str"),
        ({"micro_batch": 1.5}, TypeError, "micro_batch: found float"),
        ({"rank": "0"}, TypeError, "rank: found str"),
        ({"index": by_index}, ValueError, "index: found one without a micro_batch"),
    ],
)
def test_a_bad_argument_is_refused_at_once(arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=f"^{message}"):
        faulty(loss_fn, **arguments)


@pytest.mark.parametrize("leaf", ["missing", "count", "blocks"])
def test_a_leaf_that_is_no_float_leaf_is_named(leaf: str):
    with pytest.raises(ValueError, match=f"^leaf: found '{leaf}', expected the path of a float leaf .*blocks.0.b"):
        backward(faulty(loss_fn, leaf=leaf), micro_batch(0))
