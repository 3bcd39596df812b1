"""freeze: requires_grad_(False) as a transformation of the loss function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import functional_amp as fa
from functional_amp import debug
from tests.recipes import assert_close


def body(path: str, leaf: Tensor) -> bool:
    return path.startswith("0.")


def make_model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def make_batches() -> list[tuple[Tensor, Tensor]]:
    xs = torch.randn(6, 16, 3, generator=torch.Generator().manual_seed(1))
    return [(x, x.prod(dim=1, keepdim=True)) for x in xs]


APPLY, PARAMS, _ = fa.from_module(make_model())


def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(APPLY(params, batch[0]).float(), batch[1])


PLACES: dict[str, Callable[[Any], Any]] = {
    "alone": lambda loss: fa.freeze(loss, body),
    "inside autocast": lambda loss: fa.autocast(fa.freeze(loss, body), torch.bfloat16),
    "around autocast": lambda loss: fa.freeze(fa.autocast(loss, torch.bfloat16), body),
    "inside a policy": lambda loss: fa.with_policy(fa.freeze(loss, body), "p=f32,c=bf16,o=f32"),
    "in two parts": lambda loss: fa.freeze(fa.freeze(loss, lambda p, _: p == "0.weight"), lambda p, _: p == "0.bias"),
}


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("place", PLACES)
def test_a_frozen_leaf_has_no_gradient_and_the_others_have_theirs(place: str, backend: Any):
    frozen = PLACES[place](loss_fn)
    scaler = fa.StaticScale(8.0)
    grads = fa.scale_backward(frozen, scaler, PARAMS, make_batches()[0], backend=backend).grads.tree
    assert grads["0.weight"] is None and grads["0.bias"] is None
    leaves = {name: p.clone().requires_grad_() for name, p in PARAMS.items()}
    expected = torch.autograd.grad(8 * frozen(leaves, make_batches()[0]), [leaves["2.weight"], leaves["2.bias"]])
    torch.testing.assert_close([grads["2.weight"], grads["2.bias"]], list(expected), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("donate", [False, True])
def test_freezing_and_unfreezing_in_mid_training_is_torchs_loop(donate: bool, momentum: float):
    """With weight decay, momentum and clipping, which must all pass the frozen parameters by."""
    optimizer = fa.sgd(0.1, momentum=momentum, weight_decay=0.1)
    step = fa.make_step(loss_fn, optimizer, max_norm=0.1, donate=donate)
    frozen = dataclasses.replace(step, loss_fn=fa.freeze(loss_fn, body))
    state, model = fa.init_state(PARAMS, optimizer), make_model()
    theirs = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, weight_decay=0.1)
    for number, (x, y) in enumerate(make_batches()):
        freezes = 2 <= number < 4
        state, metrics = (frozen if freezes else step)(state, [(x, y)])
        model[0].requires_grad_(not freezes)
        theirs.zero_grad()
        mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        theirs.step()
        torch.testing.assert_close(metrics.grad_norm, norm)
        assert_close(state.params, {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw"])
@pytest.mark.parametrize("donate", [False, True])
def test_the_bias_correction_of_a_part_begins_with_its_first_gradient(name: str, donate: bool):
    ours, torchs = {"adam": (fa.adam, torch.optim.Adam), "adamw": (fa.adamw, torch.optim.AdamW)}[name]
    parts = {"body": ours(0.01), "head": ours(0.01)}
    optimizer = fa.partition(parts, lambda path, leaf: "body" if body(path, leaf) else "head")
    step = fa.make_step(fa.freeze(loss_fn, body), optimizer, donate=donate)
    state, model = fa.init_state(PARAMS, optimizer), make_model()
    theirs = torchs(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(make_batches()):
        if number == 3:
            step = dataclasses.replace(step, loss_fn=loss_fn)
        state, _ = step(state, [(x, y)])
        model[0].requires_grad_(number >= 3)
        theirs.zero_grad()
        mse_loss(model(x), y).backward()
        theirs.step()
    assert (state.opt_state["body"].step, state.opt_state["head"].step) == (3, 6)
    assert_close(state.params, {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-4, atol=1e-6)


def test_a_window_of_frozen_and_other_micro_batches_is_the_sum_that_there_is():
    step = fa.make_step(fa.freeze(loss_fn, body), fa.sgd(0.1))
    state = fa.init_state(PARAMS, fa.sgd(0.1), fa.NoScale())
    first, second = make_batches()[:2]
    state, metrics = step(state, [first, second])
    mean = torch.stack([loss_fn(PARAMS, first), loss_fn(PARAMS, second)]).mean()
    torch.testing.assert_close(metrics.loss, mean)
    assert torch.equal(state.params["0.weight"], PARAMS["0.weight"])


@pytest.mark.slow
def test_it_compiles_and_runs_under_vmap(fresh_dynamo: None):
    step = fa.make_step(fa.freeze(loss_fn, body), fa.sgd(0.1))
    compiled = dataclasses.replace(step, compile={"backend": "aot_eager"})
    state = fa.init_state(PARAMS, fa.sgd(0.1))
    expected, _ = step(state, [make_batches()[0]])
    found, _ = compiled(state, [make_batches()[0]])
    assert_close(found.params, expected.params, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.params["0.weight"], PARAMS["0.weight"])

    batches = [tuple(torch.stack(part) for part in zip(*make_batches()[:2], strict=True))]
    each = torch.func.vmap(lambda batch: step(state, [batch])[0].params)(*batches)
    assert_close({n: p[0] for n, p in each.items()}, expected.params, rtol=1e-5, atol=1e-6)


def test_a_function_that_hides_the_frozen_one_is_refused_and_the_remedies_work():
    frozen = fa.freeze(loss_fn, body)

    def doubled(params: Any, batch: Any) -> Tensor:
        return 2 * frozen(params, batch)

    batch = make_batches()[0]
    with pytest.raises(RuntimeError, match=r"inside another one that hides what is frozen.*functools.wraps"):
        fa.scale_backward(doubled, fa.NoScale(), PARAMS, batch)
    for shown in (functools.wraps(frozen)(doubled), fa.freeze(lambda p, b: 2 * loss_fn(p, b), body)):
        assert fa.scale_backward(shown, fa.NoScale(), PARAMS, batch).grads.tree["0.weight"] is None
    assert torch.equal(frozen(PARAMS, batch), loss_fn(PARAMS, batch))  # by itself it is the loss


@pytest.mark.parametrize("given", [(None, body), (loss_fn, "0."), (loss_fn, None)])
def test_what_is_not_a_function_is_refused(given: tuple[Any, Any]):
    with pytest.raises(TypeError, match="expected a function"):
        fa.freeze(*given)


def test_freezing_all_is_refused():
    with pytest.raises(TypeError, match=r"no floating-point leaf to differentiate.*freeze"):
        fa.scale_backward(fa.freeze(loss_fn, lambda path, leaf: True), fa.NoScale(), PARAMS, make_batches()[0])


@pytest.mark.parametrize("first", ["frozen", "free"])
@pytest.mark.parametrize("donate", [False, True])
def test_freezing_in_mid_window_keeps_what_the_window_has(first: str, donate: bool):
    """torch's loop: requires_grad set between two backwards; what has accumulated stays in .grad."""
    optimizer = fa.sgd(0.1)
    free = fa.make_step(loss_fn, optimizer, donate=donate)
    frozen = dataclasses.replace(free, loss_fn=fa.freeze(loss_fn, body))
    state, model = fa.init_state(PARAMS, optimizer, fa.NoScale()), make_model()
    order = [frozen, free, frozen] if first == "frozen" else [free, frozen, free]
    for step, (x, y) in zip(order, make_batches(), strict=False):
        state = step.accumulate(state, (x, y))
        model[0].requires_grad_(step is free)
        (mse_loss(model(x), y) / 3).backward()
    state, _ = free.update(state)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert_close(state.params, {n: p.detach() for n, p in model.named_parameters()}, rtol=1e-5, atol=1e-6)


def test_the_tools_that_look_at_a_loss_look_at_a_frozen_one():
    frozen, batch = fa.freeze(loss_fn, body), make_batches()[0]
    step = fa.make_step(fa.autocast(frozen, torch.float16), fa.sgd(0.1))
    state = fa.init_state(PARAMS, fa.sgd(0.1))
    assert fa.unreached_paths(frozen, PARAMS, batch) == []
    report = debug.underflow_report(frozen, PARAMS, batch, dtype=torch.float16)
    assert "2.weight" in str(report) and "0.weight" not in str(report)
    assert "2." in str(debug.explain(step, state, [(batch[0] * torch.inf, batch[1])]))
