"""A donating step gives the pure step's values, in the storage of the state that it was given."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import math
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as torch_pytree
from torch.utils._python_dispatch import TorchDispatchMode

import functional_amp as fa
from functional_amp.testing import same_bits
from functional_amp.tree import flatten, map_tensors
from tests.models import PROBLEMS, Problem, mlp, overflowing, transformer

BACKENDS: tuple[Any, ...] = ("func", "autograd")
OPTIMIZERS: dict[str, Callable[[], fa.Optimizer]] = {
    "sgd": lambda: fa.sgd(0.1),
    "momentum": lambda: fa.sgd(0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "dampening": lambda: fa.sgd(0.1, momentum=0.9, dampening=0.1),
    "adam, lr tensor": lambda: fa.adam(torch.tensor(1e-2), weight_decay=0.1),
    "adamw, schedule": lambda: fa.adamw(fa.warmup_cosine(1e-2, 2, 9)),
    "partition": lambda: fa.partition(
        {"decay": fa.adamw(1e-2), "plain": fa.sgd(fa.constant(0.1)), "frozen": None},
        lambda path, leaf: "frozen" if path == "head.bias" else "decay" if leaf.ndim > 1 else "plain",
    ),
    "by hand": lambda: fa.Optimizer(
        lambda params: {"seen": torch.zeros(1)},
        lambda grads, state, params: (map_tensors(lambda g: -0.1 * g, grads), {"seen": state["seen"] + 1}),
    ),
}
LENGTHS = (1, 3, 2, 1, 2)


def windows(problem: Problem, bad: int = 2) -> list[list[Any]]:
    """Windows of several lengths, one of which overflows."""
    drawn = [[problem.batch(10 * i + j) for j in range(length)] for i, length in enumerate(LENGTHS)]
    drawn[bad] = [*drawn[bad][:-1], overflowing(drawn[bad][-1])]
    return drawn


def both(problem: Problem, optimizer: fa.Optimizer, **options: Any) -> None:
    """Runs the pure and the donating step side by side, bit for bit."""
    options = {"max_norm": 0.5, **options}
    pure, donating = (fa.make_step(problem.loss_fn, optimizer, **options, donate=donate) for donate in (False, True))
    a, b = (fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**10), problem.buffers) for _ in range(2))
    for index, window in enumerate(windows(problem)):
        a, measured = pure(a, window, seed=index)
        b, measured_too = donating(b, window, seed=index)
        assert same_bits(a, b) and same_bits(tuple(measured), tuple(measured_too))
    assert a.applied.item() == 4 and a.skipped.item() == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("problem", PROBLEMS)
def test_donated_equals_pure_bit_for_bit(problem, optimizer, backend):
    both(PROBLEMS[problem](), OPTIMIZERS[optimizer](), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [lambda: mlp(dropout=0.5), lambda: transformer(dropout=0.5)])
def test_donated_equals_pure_with_dropout(make, backend):
    both(make(), fa.adamw(1e-2), backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{"norm_type": 1.0}, {"norm_type": math.inf}, {"max_norm": None}])
def test_donated_equals_pure_for_any_norm(options, backend):
    both(mlp(), fa.adamw(1e-2), backend=backend, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_donated_equals_pure_under_autocast_with_a_weight_used_twice(backend):
    def loss_fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.tanh(x @ params["w"]) @ params["w"] + params["b"]).float().square().mean()

    optimizer = fa.adamw(1e-2)
    half = fa.autocast(loss_fn, torch.bfloat16)
    params = {"w": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)), "b": torch.zeros(4)}
    a, b = fa.init_state(params, optimizer), fa.init_state(params, optimizer)
    for seed in range(3):
        window = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed + k)) for k in range(2)]
        # torch.func may cast the weight at each use, and adds the gradients of the uses in float32 then.
        a, _ = fa.make_step(half, optimizer, backend="autograd")(a, window)
        b, _ = fa.make_step(half, optimizer, backend=backend, donate=True)(b, window)
        assert same_bits(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_donated_equals_pure_for_other_dtypes_and_mixtures(dtype):
    torch.manual_seed(0)
    params = {"a": torch.randn(3, 2).to(dtype), "b": torch.randn(4), "n": torch.arange(3), "none": None}

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return ((p["a"].abs() ** 2).sum() * x).float() + (p["b"] * x).square().mean()

    for optimizer in (fa.adamw(1e-2), fa.sgd(0.1, momentum=0.9)):
        pure, donating = (fa.make_step(loss_fn, optimizer, max_norm=1.0, donate=donate) for donate in (False, True))
        a, b = (fa.init_state(params, optimizer, fa.StaticScale(16.0)) for _ in range(2))
        for value in (1.0, 0.5, math.inf, 2.0):
            window = [torch.tensor(value), torch.tensor(0.25)]
            (a, _), (b, _) = pure(a, window), donating(b, window)
            assert same_bits(a, b)
        assert a.params["n"].dtype == torch.int64 and a.applied.item() == 3


def weighted_problem() -> tuple[Callable[..., fa.Loss], dict[str, Tensor]]:
    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Any]) -> fa.Loss:
        x, weight = batch
        return fa.Loss((params["w"] * x).square().mean(), weight)

    return loss_fn, {"w": torch.tensor([1.0, -2.0, 3.0]), "unused": torch.ones(2)}


@pytest.mark.parametrize("weights", [[3, 0, 2.5], [torch.tensor(0.0), torch.tensor(4)], [0, 0], [1e-30, 1e30]])
def test_donated_equals_pure_for_any_weights(weights):
    loss_fn, params = weighted_problem()
    optimizer = fa.adamw(1e-2)
    a, b = fa.init_state(params, optimizer), fa.init_state(params, optimizer)
    window = [(torch.tensor([0.5, 1.0, 2.0]) * (k + 1), weight) for k, weight in enumerate(weights)]
    for _ in range(2):
        a, measured = fa.make_step(loss_fn, optimizer)(a, window)
        b, measured_too = fa.make_step(loss_fn, optimizer, donate=True)(b, window)
        assert same_bits(a, b) and same_bits(tuple(measured), tuple(measured_too))


@pytest.mark.parametrize("later", [1, 2])
def test_a_scale_that_changes_within_a_window_is_a_change_of_units(later):
    loss_fn, params = weighted_problem()
    optimizer = fa.sgd(0.1)
    results = []
    for donate in (False, True):
        step = fa.make_step(loss_fn, optimizer, donate=donate)
        state = step.accumulate(fa.init_state(params, optimizer, fa.StaticScale(8.0)), (torch.ones(3), 1))
        state = dataclasses.replace(state, scaler=fa.StaticScale(32.0))
        results.append(step.update(step.accumulate(state, (torch.ones(3), later)))[0])
    assert same_bits(*results)


# What is reused, and what is not


def storages(tree: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in flatten(tree).leaves if isinstance(leaf, Tensor) and leaf.dim()]


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_next_state_lies_in_the_storage_of_the_last(optimizer, problem):
    made = PROBLEMS[problem]()
    rule = OPTIMIZERS[optimizer]()
    step = fa.make_step(made.loss_fn, rule, donate=True)
    state = fa.init_state(made.params, rule, buffers=made.buffers)
    for window in windows(made):
        before = [storages(tree) for tree in (state.params, state.opt_state, state.buffers)]
        state, _ = step(state, window)
        assert [storages(tree) for tree in (state.params, state.opt_state, state.buffers)] == before


def test_the_sum_of_a_window_stays_in_one_storage_and_one_gradient_lives_beside_it():
    made = mlp()
    optimizer = fa.adamw()
    step = fa.make_step(made.loss_fn, optimizer, donate=True)
    state = step.accumulate(fa.init_state(made.params, optimizer), made.batch(0))
    assert state.window is not None
    before = storages(state.window.grads.tree)
    state = step.accumulate(state, made.batch(1))
    assert state.window is not None and storages(state.window.grads.tree) == before


def test_nothing_of_the_callers_is_written_to():
    made = PROBLEMS["conv_net"]()
    optimizer = fa.adamw(0.1)
    scaler = fa.DynamicScale(2.0**10, growth_interval=1)
    batch = made.batch(0)
    theirs = (dict(made.module.state_dict()), made.params, made.buffers, scaler, batch)
    before = copy.deepcopy(theirs)
    state = fa.init_state(made.params, optimizer, scaler, made.buffers)
    step = fa.make_step(made.loss_fn, optimizer, max_norm=0.1, donate=True)
    for _ in range(3):
        state, _ = step(state, [batch, batch])
    assert same_bits(theirs, before)


class Handing(torch.autograd.Function):
    """Its gradient is a view of a tensor of the user's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(p: Tensor, given: Tensor) -> Tensor:
        return (p * 0).sum() + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.given = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return ctx.given.view_as(ctx.given), None


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw, schedule", "by hand"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_a_view_of_a_users_tensor_is_not_written_to(backend, optimizer, length):
    given = torch.tensor([2.0, 4.0])
    rule = OPTIMIZERS[optimizer]()
    step = fa.make_step(lambda p, x: Handing.apply(p, x), rule, max_norm=0.1, backend=backend, donate=True)
    state = fa.init_state(torch.ones(2), rule, fa.StaticScale(4.0))
    state, _ = step(state, [given] * length)
    assert given.tolist() == [2.0, 4.0]


def test_two_leaves_that_are_one_tensor_are_updated_as_two():
    shared = torch.ones(3)
    params = {"u": shared, "v": shared.expand(2, 3)}
    optimizer = fa.adamw(0.1)

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return (p["u"] * x).sum() + (p["v"] ** 2 * x).sum()

    expected, _ = fa.make_step(loss_fn, optimizer)(fa.init_state(params, optimizer), [torch.tensor(2.0)])
    given = shared.clone()  # handed over within a state by other hands
    own = dataclasses.replace(fa.init_state(params, optimizer), params={"u": given, "v": given.expand(2, 3)})
    for state in (fa.init_state(params, optimizer), own):
        donated, _ = fa.make_step(loss_fn, optimizer, donate=True)(state, [torch.tensor(2.0)])
        assert same_bits(donated.params, expected.params)
    assert shared.tolist() == [1.0, 1.0, 1.0]


def test_an_optimizer_whose_state_is_one_tensor_twice_is_updated_as_two():
    def init(params: Tensor) -> Any:
        zeros = torch.zeros(2)
        return {"a": zeros, "b": zeros, "p": params}

    def update(grads: Tensor, state: Any, params: Tensor) -> Any:
        return -grads, {"a": state["a"] + 1, "b": state["b"] + 2, "p": params - grads}

    optimizer = fa.Optimizer(init, update)
    params = torch.zeros(2)
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, donate=True)
    state, _ = step(fa.init_state(params, optimizer, fa.NoScale()), [torch.ones(2)])
    assert state.opt_state["a"].tolist() == [1, 1] and state.opt_state["b"].tolist() == [2, 2]
    assert state.opt_state["p"].tolist() == [-1, -1] and params.tolist() == [0, 0]


# A state that was given away


def ready(loss_fn: Any = None, optimizer: Any = None, **options: Any) -> tuple[fa.Step, fa.TrainState]:
    optimizer = optimizer or fa.adamw(0.1)
    step = fa.make_step(loss_fn or (lambda p, x: (p * x).square().sum()), optimizer, donate=True, **options)
    return step, fa.init_state(torch.ones(2), optimizer)


USES: dict[str, Callable[[fa.TrainState, fa.Step], Any]] = {
    "a field": lambda state, step: state.params,
    "a counter": lambda state, step: state.applied,
    "accumulate": lambda state, step: step.accumulate(state, torch.ones(2)),
    "update": lambda state, step: step.update(state),
    "the step": lambda state, step: step(state, [torch.ones(2)]),
    "flattening": lambda state, step: flatten(state),
    "torch's flattening": lambda state, step: torch_pytree.tree_flatten(state),
    "replace": lambda state, step: dataclasses.replace(state, window=None),
    "a copy": lambda state, step: copy.deepcopy(state),
    "saving": lambda state, step: torch.save(state, io.BytesIO()),
    "pickling": lambda state, step: pickle.dumps(state),
    "check_progress": lambda state, step: fa.check_progress(state),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("given_to", ["accumulate", "step"])
def test_a_state_that_was_given_away_says_so_and_names_the_remedy(given_to, use):
    step, state = ready()
    if given_to == "accumulate":
        step.accumulate(state, torch.ones(2))
    else:
        step(state, [torch.ones(2)])
    with pytest.raises(RuntimeError, match=r"donated.*state that the step returned.*donate=False"):
        USES[use](state, step)


def test_a_state_has_no_other_attributes_and_a_donated_one_is_still_a_state():
    step, state = ready()
    assert not hasattr(state, "parameters")
    step(state, [torch.ones(2)])
    assert isinstance(state, fa.TrainState) and not hasattr(state, "__array__")


def test_a_donated_state_keeps_no_tensor_alive():
    step, state = ready()
    leaf = weakref.ref(state.skipped_in_a_row)
    after, _ = step(state, [torch.ones(2)])
    gc.collect()
    assert leaf() is None or any(leaf() is kept for kept in flatten(after).leaves)


# When something raises


class Trouble(Exception):
    pass


def test_a_loss_that_raises_leaves_the_state_as_it_was():
    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        if x.dim() == 0:
            raise Trouble
        return (p * x).square().sum()

    step, state = ready(loss_fn)
    state = step.accumulate(state, torch.ones(2))
    before = copy.deepcopy(state)
    with pytest.raises(Trouble):
        step.accumulate(state, torch.tensor(1.0))
    assert same_bits(state, before)
    step.update(step.accumulate(state, torch.ones(2)))


class Raising(torch.autograd.Function):
    """Raises in the backward, after the gradient of what came later has been added."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise Trouble


def test_a_backward_that_raises_half_way_loses_the_window_and_nothing_else():
    def loss_fn(p: dict[str, Tensor], bad: bool) -> Tensor:
        first = Raising.apply(p["first"] * 2) if bad else p["first"] * 2
        return (first * p["last"]).sum()

    optimizer = fa.adamw(0.1)
    step = fa.make_step(loss_fn, optimizer, backend="autograd", donate=True)
    state = step.accumulate(fa.init_state({"first": torch.ones(2), "last": torch.ones(2)}, optimizer), False)
    before = copy.deepcopy(dataclasses.replace(state, window=None))
    with pytest.raises(Trouble):
        step.accumulate(state, True)
    with pytest.raises(RuntimeError, match=r"window.*lost.*dataclasses.replace\(state, window=None\)"):
        step.update(state)
    again = dataclasses.replace(state, window=None)
    assert same_bits(again, before)
    step(again, [False])


def test_an_optimizer_that_raises_leaves_the_state_as_it_was():
    def update(grads: Any, state: Any, params: Any) -> Any:
        raise Trouble

    step, state = ready(optimizer=fa.Optimizer(lambda params: (), update))
    state = step.accumulate(state, torch.ones(2))
    before = copy.deepcopy(state)
    with pytest.raises(Trouble):
        step.update(state)
    assert same_bits(state, before)


def test_an_update_that_raises_half_way_says_that_the_state_is_lost():
    def update(grads: Any, state: Any, params: Any) -> Any:
        raise Trouble

    optimizer = fa.partition(
        {"a": fa.adamw(0.1), "z": fa.Optimizer(lambda params: (), update)}, lambda path, leaf: path
    )
    step = fa.make_step(lambda p, x: (p["a"] * p["z"] * x).sum(), optimizer, donate=True)
    state = step.accumulate(fa.init_state({"a": torch.ones(2), "z": torch.ones(2)}, optimizer), torch.ones(2))
    with pytest.raises(Trouble):
        step.update(state)
    with pytest.raises(RuntimeError, match=r"lost.*checkpoint.*donate=False"):
        _ = state.params


def test_bad_arguments_leave_the_state_as_it_was():
    step, state = ready()
    with pytest.raises(ValueError, match="no open window"):
        step.update(state)
    with pytest.raises(TypeError, match="TrainState"):
        step.accumulate((state, None), torch.ones(2))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="empty window"):
        step(state, [])
    step(state, [torch.ones(2)])


@pytest.mark.parametrize("bad", [1, "yes", None])
def test_donate_is_a_bool(bad):
    with pytest.raises(TypeError, match=r"donate: found .* expected True or False"):
        fa.make_step(lambda p, x: (p * x).sum(), fa.sgd(0.1), donate=bad)


# Where nothing can be written in place


def test_under_vmap_and_grad_a_donating_step_is_the_pure_one():
    optimizer = fa.adamw(0.1)
    pure, donating = (
        fa.make_step(lambda p, x: (p * x).square().mean(), optimizer, max_norm=0.1, donate=donate)
        for donate in (False, True)
    )
    x = torch.tensor([[1.0, 2.0], [3.0, math.inf]])

    def run(step: fa.Step, x: Tensor) -> Tensor:
        state, _ = step(fa.init_state(torch.ones(2), optimizer), [x, x])
        return state.params

    assert same_bits(torch.vmap(lambda x: run(donating, x))(x), torch.vmap(lambda x: run(pure, x))(x))

    def end(step: fa.Step, x: Tensor) -> Tensor:
        return run(step, x).sum()

    assert same_bits(torch.func.grad(lambda x: end(donating, x))(x[0]), torch.func.grad(lambda x: end(pure, x))(x[0]))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_a_donating_step_works_in_any_grad_mode(mode):
    made = mlp()
    optimizer = fa.adamw(0.1)
    pure, donating = (fa.make_step(made.loss_fn, optimizer, donate=donate) for donate in (False, True))
    expected, _ = pure(fa.init_state(made.params, optimizer), [made.batch(0), made.batch(1)])
    with mode():
        state, _ = donating(fa.init_state(made.params, optimizer), [made.batch(0), made.batch(1)])
    assert same_bits(state.params, expected.params)
    assert not any(leaf.requires_grad for leaf in flatten(state).leaves if isinstance(leaf, Tensor))


# compute_dtype


def test_compute_dtype_equals_a_policy_that_casts_in_the_loss_bit_for_bit():
    made = mlp()
    optimizer = fa.adamw(0.1)

    def cast(batch: Any) -> Any:
        return {**batch, "x": batch["x"].bfloat16()}

    inside = fa.with_policy(made.loss_fn, "params=float32,compute=bfloat16,output=float32")
    for donate in (False, True):
        once = fa.make_step(
            lambda p, b: made.loss_fn(p, cast(b)), optimizer, compute_dtype=torch.bfloat16, donate=donate
        )
        each = fa.make_step(inside, optimizer)
        a, b = fa.init_state(made.params, optimizer), fa.init_state(made.params, optimizer)
        for window in windows(made):
            a, _ = each(a, window)
            b, _ = once(b, window)
            assert same_bits(a, b)
        assert all(leaf.dtype == torch.float32 for leaf in b.params.values())


def test_compute_dtype_casts_each_parameter_once_a_window():
    class Casts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            narrow = (kwargs or {}).get("dtype") == torch.bfloat16
            self.found += func is torch.ops.aten._to_copy.default and narrow and args[0].dim() == 1
            return func(*args, **(kwargs or {}))

    optimizer = fa.adamw(0.1)
    step = fa.make_step(lambda p, x: (p["a"] * p["b"] * x).sum(), optimizer, compute_dtype=torch.bfloat16)
    state = fa.init_state({"a": torch.ones(2), "b": torch.ones(2)}, optimizer)
    for length in (1, 4):
        with Casts() as casts:
            state, _ = step(state, [torch.ones(2, dtype=torch.bfloat16)] * length)
        assert casts.found == 2


def test_compute_dtype_must_be_a_floating_dtype():
    for bad in (torch.int32, "float16"):
        with pytest.raises((TypeError, ValueError), match="compute_dtype"):
            fa.make_step(lambda p, x: (p * x).sum(), fa.sgd(0.1), compute_dtype=bad)  # pyright: ignore
