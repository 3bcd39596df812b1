"""Faults hunted with adversarial inputs: states used at once or again, odd modes, extreme numbers, odd gradients."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.testing import same_bits

BACKENDS: tuple[Any, ...] = ("func", "autograd")
GOOD = torch.tensor(True)
OPTIMIZERS: dict[str, Callable[..., fa.Optimizer]] = {
    "sgd": fa.sgd,
    "momentum": lambda lr: fa.sgd(lr, momentum=0.9, weight_decay=0.1, nesterov=True),
    "dampening": lambda lr: fa.sgd(lr, momentum=0.9, dampening=0.1),
    "adam": lambda lr: fa.adam(lr, weight_decay=0.1),
    "adamw": fa.adamw,
}
optimizers = pytest.mark.parametrize("optimizer", OPTIMIZERS)
donations = pytest.mark.parametrize("donate", [False, True])
backends = pytest.mark.parametrize("backend", BACKENDS)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def two_layers(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (torch.tanh(x @ params["w"]) @ params["v"]).square().mean()


def run(step: fa.Step, state: fa.TrainState, windows: list[list[Any]]) -> tuple[fa.TrainState, list[fa.Metrics]]:
    seen = []
    for window in windows:
        state, metrics = step(state, window)
        seen.append(metrics)
    return state, seen


# Threads


@contextmanager
def eager_switches() -> Iterator[None]:
    """Threads take turns as often as the interpreter can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def module_loss() -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
    with fa.seeded(0):
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    apply, params, _ = fa.from_module(module)
    return lambda p, x: apply(p, x).square().mean(), params


LOSSES: dict[str, Callable[[], tuple[Callable[..., Tensor], dict[str, Tensor]]]] = {
    "a function": lambda: (two_layers, {"w": drawn(4, 4), "v": drawn(4, 4, seed=1)}),
    "a module": module_loss,
}


@donations
@pytest.mark.parametrize("made", LOSSES)
def test_threads_that_share_a_step_get_what_each_gets_alone(made, donate):
    loss_fn, params = LOSSES[made]()
    optimizer = fa.adamw(0.1)
    step = fa.make_step(loss_fn, optimizer, max_norm=1.0, donate=donate)
    windows = [[[drawn(3, 4, seed=100 * i + j)] for j in range(60)] for i in range(3)]

    def state(i: int) -> fa.TrainState:
        return fa.init_state({name: leaf + i for name, leaf in params.items()}, optimizer)

    alone = [run(step, state(i), windows[i])[0] for i in range(3)]
    together: list[Any] = [None] * 3

    def work(i: int) -> None:
        together[i] = run(step, state(i), windows[i])[0]

    with eager_switches():
        threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(same_bits(a, b) for a, b in zip(together, alone, strict=True))


def test_a_module_that_ran_in_threads_keeps_no_tensor_of_theirs():
    apply, params, _ = fa.from_module(nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)]))
    with eager_switches():
        threads = [
            threading.Thread(target=lambda: [apply(params, torch.ones(1, 4)) for _ in range(50)]) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {leaf.device.type for leaf in apply.template.parameters()} == {"meta"}


# One Step object, many states


@optimizers
def test_runs_that_take_turns_with_one_donating_step_are_the_pure_runs(optimizer):
    rule = OPTIMIZERS[optimizer](0.1)
    pure, donating = (fa.make_step(two_layers, rule, max_norm=0.5, donate=donate) for donate in (False, True))
    first = [
        fa.init_state({"w": drawn(4, 4, seed=i), "v": drawn(4, 2 + i, seed=i)}, OPTIMIZERS[optimizer](0.1))
        for i in range(3)
    ]
    a, b = list(first), copy.deepcopy(first)
    for turn in range(12):
        i, window = turn * 5 % 3, [drawn(3, 4, seed=turn)] * (1 + turn % 2)
        if turn % 4 == 1:
            b[i] = copy.deepcopy(b[i])
        if turn % 4 == 2:
            b[i] = dataclasses.replace(b[i], params={name: leaf.clone() for name, leaf in b[i].params.items()})
        (a[i], _), (b[i], _) = pure(a[i], window), donating(b[i], window)
        assert same_bits(a, b)


@optimizers
def test_a_pure_state_may_be_used_again_after_others(optimizer):
    rule = OPTIMIZERS[optimizer](0.1)
    step = fa.make_step(two_layers, rule, max_norm=0.5)
    state, _ = step(fa.init_state({"w": drawn(4, 4), "v": drawn(4, 2)}, rule), [drawn(3, 4)])
    first, second = step(state, [drawn(3, 4, seed=1)]), step(state, [drawn(3, 4, seed=2)])
    assert same_bits(step(state, [drawn(3, 4, seed=1)]), first)
    assert same_bits(step(copy.deepcopy(state), [drawn(3, 4, seed=2)]), second)
    assert not torch.equal(first[0].params["w"], second[0].params["w"])


@backends
@donations
def test_a_loss_function_may_run_the_step_it_is_part_of(donate, backend):
    optimizer = fa.adamw(0.1)
    made: list[fa.Step] = []

    def inner() -> Tensor:
        return made[0](fa.init_state(torch.tensor([5.0]), optimizer), [torch.tensor(2.0)] * 2)[0].params

    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        return (p * (inner() if x.dim() else 1) * x).square().sum()

    made.append(fa.make_step(loss_fn, optimizer, backend=backend, donate=donate))
    factor = inner()
    plain = fa.make_step(lambda p, x: (p * factor * x).square().sum(), optimizer, backend=backend)
    windows = [[torch.tensor([2.0])] * 2] * 3
    found, _ = run(made[0], fa.init_state(torch.tensor([3.0]), optimizer), windows)
    assert same_bits(found, run(plain, fa.init_state(torch.tensor([3.0]), optimizer), windows)[0])


@optimizers
def test_gradients_that_go_missing_or_change_their_layout_are_the_pure_steps(optimizer):
    rule = OPTIMIZERS[optimizer](0.1)
    pure, donating = (fa.make_step(two_layers, rule, max_norm=0.5, donate=donate) for donate in (False, True))
    a, b = (fa.init_state({"w": drawn(4, 4), "v": drawn(4, 4, seed=1)}, rule) for _ in range(2))
    changes: list[Callable[[Tensor], Any]] = [
        *(lambda g: g, lambda g: None, lambda g: g, lambda g: g.t().clone().t(), lambda g: g, lambda g: g.double()),
        *(lambda g: g.half(), lambda g: None, lambda g: g.repeat(2, 1)[::2], lambda g: g, lambda g: g.nan_to_num() * 0),
    ]

    def update(step: fa.Step, state: fa.TrainState, change: Callable[[Tensor], Any], seed: int) -> fa.TrainState:
        state = step.accumulate(state, drawn(3, 4, seed=seed))
        window: Any = state.window
        tree = {name: leaf.contiguous() for name, leaf in window.grads.tree.items()}  # the engine's layout may differ
        grads = fa.ScaledGrads({**tree, "w": change(tree["w"])}, window.grads.scale)
        return step.update(dataclasses.replace(state, window=dataclasses.replace(window, grads=grads)))[0]

    for seed, change in enumerate(changes):
        a, b = update(pure, a, change, seed), update(donating, b, change, seed)
        assert same_bits(a, b)
    assert a.applied.item() + a.skipped.item() == len(changes) and a.applied.item() >= 9


@donations
def test_parameters_whose_elements_overlap_are_updated_each_for_itself(donate):
    unfolded = torch.arange(6.0).unfold(0, 3, 1)
    base = unfolded.clone()
    optimizer = fa.sgd(1.0)
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, donate=donate)
    state = dataclasses.replace(fa.init_state(torch.ones(4, 3), optimizer, fa.StaticScale(8.0)), params=unfolded)
    state, _ = step(state, [torch.arange(12.0).view(4, 3)])
    assert torch.equal(state.params, base - torch.arange(12.0).view(4, 3))


# Modes that surround a step


def with_default_dtype(dtype: torch.dtype) -> Any:
    @contextmanager
    def mode() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return mode()


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], Any]] = {
    "default dtype float64": lambda: with_default_dtype(torch.float64),
    "default dtype float16": lambda: with_default_dtype(torch.float16),
    "default dtype bfloat16": lambda: with_default_dtype(torch.bfloat16),
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "enable_grad": torch.enable_grad,
    "multithreading off": lambda: torch.autograd.set_multithreading_enabled(False),
}


@donations
@optimizers
@pytest.mark.parametrize("mode", MODES)
def test_a_mode_around_everything_changes_no_bit(mode, optimizer, donate):
    def whole() -> Any:
        rate = fa.join([fa.warmup_cosine(0.1, 2, 9, 0.01), fa.linear(0.1, 0.05, 3)], [3])
        rule = OPTIMIZERS[optimizer](rate)
        scaler = fa.DynamicScale(8.0, growth_interval=2)

        def loss_fn(p: dict[str, Tensor], x: Tensor) -> fa.Loss:
            return fa.Loss((p["a"] * x).square().mean() + p["h"].float().sum(), weight=3)

        params = {"a": drawn(40000, 2), "h": torch.tensor([1, 2], dtype=torch.float16)}
        step = fa.make_step(loss_fn, rule, max_norm=1.0, donate=donate)
        x = torch.tensor([1, 3], dtype=torch.float32)
        state, metrics = run(step, fa.init_state(params, rule, scaler), [[x], [x, x / 3], [x * math.inf], [x], [x]])
        clipped = fa.clip(fa.unscale(fa.ScaledGrads({"w": x}, 8.0, 2.0)).grads, 1e-3, norm_type=3)
        return state, metrics, clipped, fa.all_finite({}), fa.global_norm({"w": x}, 3)

    expected = whole()
    with MODES[mode]():
        assert same_bits(whole(), expected)


def drawn_in(mode: Any, make: Callable[[], Any]) -> Any:
    with mode:
        return make()


@donations
@backends
def test_a_state_made_in_inference_mode_trains_outside_of_it(backend, donate):
    optimizer = fa.adamw(0.1)
    step = fa.make_step(two_layers, optimizer, backend=backend, donate=donate)

    def make() -> fa.TrainState:
        return fa.init_state({"w": drawn(4, 4), "v": drawn(4, 2)}, optimizer, fa.DynamicScale(8.0))

    states = [drawn_in(mode, make) for mode in (torch.inference_mode(), nullcontext())]
    windows = [[drawn(3, 4, seed=i)] * 2 for i in range(3)]
    assert same_bits(*[run(step, state, windows)[0] for state in states])


@pytest.mark.filterwarnings("ignore:.torch.jit")  # torch's own, at its first forward mode
@optimizers
def test_every_way_to_differentiate_through_updates_agrees_with_differences(optimizer):
    xs = torch.tensor([[0.1, 0.2], [math.inf, 0.0], [0.3, -0.1]], dtype=torch.float64)

    def end(lr: Tensor) -> Tensor:
        rule = OPTIMIZERS[optimizer](lr)
        step = fa.make_step(lambda p, x: ((p - x) ** 2).sum(), rule, max_norm=1.0, donate=True)
        start = torch.tensor([1.0, 2.0], dtype=torch.float64)
        return run(step, fa.init_state(start, rule, fa.StaticScale(8.0)), [[x] for x in xs])[0].params.sum()

    lr, h = torch.tensor(0.1, dtype=torch.float64), 1e-4
    first = (end(lr + h) - end(lr - h)) / (2 * h)
    second = (end(lr + h) - 2 * end(lr) + end(lr - h)) / h**2
    ways = (torch.func.grad(end), torch.func.jacrev(end), torch.func.jacfwd(end))
    for way in ways:
        torch.testing.assert_close(way(lr), first, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.func.jvp(end, (lr,), (torch.ones_like(lr),))[1], first, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(torch.func.hessian(end)(lr), second, rtol=1e-3, atol=1e-4)
