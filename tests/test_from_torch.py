"""Optimizers of torch.optim through from_torch, against the imperative ones, bit for bit."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.testing import assert_same_bits, check_optimizer, leaves_of, mapped
from functional_amp.testing.conformance.laws import vmapped

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
OPTIM: Any = torch.optim
from_torch: Any = fa.from_torch
GOOD, BAD = torch.tensor(True), torch.tensor(False)


def params_of(cls: type) -> dict[str, Tensor]:
    """Parameters of several shapes; Muon takes matrices alone."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5, 2)] if cls.__name__ == "Muon" else [(3, 4), (5,), ()]
    return {f"p{index}": torch.randn(shape, generator=generator) for index, shape in enumerate(shapes)}


def gradients(params: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=generator, dtype=p.dtype) for name, p in params.items()}


class Loop:
    """The imperative loop: parameters and an optimizer."""

    def __init__(self, cls: Any, params: dict[str, Tensor], hyper: dict[str, Any], groups: Any = None):
        self.params = {name: leaf.clone() for name, leaf in params.items()}
        given = list(self.params.values()) if groups is None else groups(self.params)
        self.optimizer = cls(given, **copy.deepcopy(hyper))
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def step(self, grads: Any) -> None:
        for name, grad in grads.items():
            self.params[name].grad = None if grad is None else grad.clone()
        self.optimizer.step()

    def assert_is(self, params: Any, state: fa.TorchState) -> None:
        """The same parameters, and the same state under each of torch's names."""
        assert_same_bits(params, {name: leaf.detach() for name, leaf in self.params.items()}, "params")
        for name, leaf in self.params.items():
            for key, value in self.optimizer.state[leaf].items():
                if type(value) is Tensor:
                    assert_same_bits(state.state[key][name], value, f"{key} of {name}")
                elif isinstance(value, (int, float)):
                    assert state.state[key][name].item() == value


def check(cls: Any, hyper: dict[str, Any], params: Any = None, updates: int = 3) -> None:
    """Updates, each with a skipped one after it that leaves no trace."""
    params = params_of(cls) if params is None else params
    optimizer, loop = from_torch(cls, **hyper), Loop(cls, params, hyper)
    state = optimizer.init(params)
    for seed in range(updates):
        grads = gradients(params, seed)
        params, state = fa.maybe_step(optimizer, params, state, grads, GOOD)
        skipped = fa.maybe_step(optimizer, params, state, mapped(lambda g: g * math.nan, grads), BAD)
        assert_same_bits(tuple(skipped), (params, state))
        loop.step(grads)
        loop.assert_is(params, state)


def named(info: Any) -> str:
    return info.optim_cls.__name__


CLASSES = "Adadelta Adafactor Adagrad Adam AdamW Adamax ASGD Muon NAdam RAdam RMSprop Rprop SGD".split()
"""All of torch.optim that step from dense gradients, without a closure."""


@pytest.mark.parametrize("name", CLASSES)
def test_each_optimizer_has_the_bits_of_the_imperative_loop(name: str):
    check(getattr(OPTIM, name), {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLASSES)
def test_each_of_torchs_own_configurations_has_the_bits_of_the_imperative_loop(name: str):
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_optimizers import optim_db

    (info,) = [each for each in optim_db if named(each) == name]
    for given in info.optim_inputs_func(device="cpu"):
        for way in ({}, *[{way: True} for way in info.supported_impls]):
            check(info.optim_cls, {**given.kwargs, **way})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_dense_optimizer_without_a_closure_is_among_them():
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_optimizers import optim_db

    dense = [info for info in optim_db if not info.only_supports_sparse_grads and not info.step_requires_closure]
    assert {named(info) for info in dense} == set(CLASSES)
    assert {named(info) for info in optim_db} - set(CLASSES) == {"LBFGS", "SparseAdam"}


# The state

FIRST = {
    "NAdam": ({}, "mu_product", 1.0),
    "Rprop": ({"lr": 0.25}, "step_size", 0.25),
    "Adagrad": ({"initial_accumulator_value": 0.5}, "sum", 0.5),
    "ASGD": ({"lr": 0.25}, "eta", 0.25),
    "SGD": ({"lr": 0.1, "momentum": 0.9}, "momentum_buffer", 0.0),
}


@pytest.mark.parametrize("name", FIRST)
def test_the_state_is_complete_from_init_on(name: str):
    hyper, key, value = FIRST[name]
    params = params_of(torch.optim.Adam)
    first = from_torch(getattr(OPTIM, name), **hyper).init(params)
    for leaf in first.state[key].values():
        assert torch.equal(leaf, torch.full_like(leaf, value))


def test_a_trial_leaves_generators_and_parameters_alone():
    params = params_of(OPTIM.Adam)
    before, given = torch.get_rng_state(), {name: (leaf, leaf._version) for name, leaf in params.items()}
    from_torch(OPTIM.Adam).init(params)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(params[name] is leaf and leaf._version == version for name, (leaf, version) in given.items())
    assert all(leaf.grad is None for leaf in params.values())


def test_a_parameter_that_gets_its_first_gradient_late_begins_then():
    params, hyper = params_of(OPTIM.SGD), {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    optimizer, loop = from_torch(OPTIM.SGD, **hyper), Loop(OPTIM.SGD, params, hyper)
    state = optimizer.init(params)
    for seed in range(4):
        grads: Any = gradients(params, seed)
        if seed < 2 or seed == 3:
            grads["p1"] = None
        params, state = optimizer.step(grads, state, params)
        loop.step(grads)
        assert_same_bits(params, {name: leaf.detach() for name, leaf in loop.params.items()})
    assert {name: flag.item() for name, flag in state.begun.items()} == {"p0": True, "p1": True, "p2": True}


def test_integers_and_missing_leaves_ride_along():
    params = {"w": torch.ones(2), "n": torch.tensor(3), "gone": None}
    optimizer = from_torch(OPTIM.Adam)
    moved, state = optimizer.step({"w": torch.ones(2), "n": None, "gone": None}, optimizer.init(params), params)
    assert moved["n"] is params["n"] and moved["gone"] is None and state.state["exp_avg"]["n"] is None
    nothing = {"n": torch.tensor(3)}
    moved, state = optimizer.step({"n": None}, optimizer.init(nothing), nothing)
    assert moved["n"] is nothing["n"] and state.step == 1


# Hyperparameters


def test_a_schedule_is_a_function_of_applied_updates():
    params, schedule = params_of(OPTIM.AdamW), fa.linear(0.1, 0.5, 4)
    optimizer = from_torch(OPTIM.AdamW, lr=schedule, betas=(fa.linear(0.9, 0.5, 4), 0.99))
    loop, state = Loop(OPTIM.AdamW, params, {"lr": 0.1, "betas": (0.9, 0.99)}), optimizer.init(params)
    for applied in range(3):
        grads = gradients(params, applied)
        params, state = fa.maybe_step(optimizer, params, state, grads, BAD)  # moves neither rate nor momentum
        params, state = fa.maybe_step(optimizer, params, state, grads, GOOD)
        count = torch.tensor(applied)
        loop.optimizer.param_groups[0]["lr"] = schedule(count).item()
        loop.optimizer.param_groups[0]["betas"] = (fa.linear(0.9, 0.5, 4)(count).item(), 0.99)
        loop.step(grads)
        loop.assert_is(params, state)


def test_groups_have_their_own_hyperparameters_and_schedules():
    params = params_of(OPTIM.AdamW)
    decayed = {"weight_decay": 0.5, "lr": fa.linear(0.1, 0.2, 1)}
    optimizer = from_torch(OPTIM.AdamW, lr=0.01, groups=lambda path, leaf: decayed if leaf.ndim > 1 else {})
    loop = Loop(
        OPTIM.AdamW,
        params,
        {"lr": 0.01},
        lambda p: [{"params": [p["p0"]], "weight_decay": 0.5, "lr": 0.1}, {"params": [p["p1"], p["p2"]]}],
    )
    state = optimizer.init(params)
    for seed in range(2):
        params, state = optimizer.step(gradients(params, seed), state, params)
        loop.step(gradients(params, seed))
        loop.optimizer.param_groups[0]["lr"] = fa.linear(0.1, 0.2, 1)(torch.tensor(1)).item()
        loop.assert_is(params, state)


def test_partition_gives_each_leaf_to_its_optimizer():
    params = params_of(OPTIM.Adam)
    optimizer = fa.partition(
        {"matrices": from_torch(OPTIM.Muon, lr=0.01), "rest": from_torch(OPTIM.NAdam, lr=0.01), "none": None},
        lambda path, leaf: ("none", "rest", "matrices")[leaf.ndim],
    )
    muon = Loop(OPTIM.Muon, {"p0": params["p0"]}, {"lr": 0.01})
    nadam = Loop(OPTIM.NAdam, {"p1": params["p1"]}, {"lr": 0.01})
    given, state = params, optimizer.init(params)
    for seed in range(2):
        grads = gradients(params, seed)
        params, state = fa.maybe_step(optimizer, params, state, grads, GOOD)
        muon.step({"p0": grads["p0"]})
        nadam.step({"p1": grads["p1"]})
    assert torch.equal(params["p0"], muon.params["p0"]) and torch.equal(params["p1"], nadam.params["p1"])
    assert params["p2"] is given["p2"]


def test_half_precision_parameters_are_updated_as_torch_does_it():
    params = {name: leaf.bfloat16() for name, leaf in params_of(OPTIM.Adam).items()}
    optimizer, loop = from_torch(OPTIM.Adam, lr=0.1), Loop(OPTIM.Adam, params, {"lr": 0.1})
    state = optimizer.init(params)
    for seed in range(3):
        grads = gradients(params, seed)
        params, state = optimizer.step(grads, state, params)
        loop.step(grads)
        loop.assert_is(params, state)


# In a step


LAWS_OF = ("SGD", "NAdam", "Rprop", "ASGD")


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "SGD")) for n in LAWS_OF])
def test_the_laws_of_an_optimizer_hold(name: str):
    hyper = {"lr": fa.cosine(0.1, 9), "momentum": 0.9} if name == "SGD" else {}
    check_optimizer(from_torch(getattr(OPTIM, name), **hyper), compiled=False, halves=False)


@pytest.mark.parametrize("name", ["NAdam", "Adagrad", "Rprop", "Adadelta"])
def test_the_step_has_the_bits_of_a_loop_with_grad_scaler(name: str):
    overflows = (False, True, False, False, True, True, False, False, False)
    cls, params = getattr(OPTIM, name), params_of(OPTIM.Adam)
    leaves = {key: nn.Parameter(leaf.clone()) for key, leaf in params.items()}
    optimizer, scaler = cls(leaves.values()), torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    step = fa.make_step(loss_fn, from_torch(cls))
    state = fa.init_state(params, step.optimizer, fa.DynamicScale(2.0**10, growth_interval=2))
    for number, overflow in enumerate(overflows):
        batch = torch.full((2, 4), math.inf if overflow else 0.1 * number)
        optimizer.zero_grad()
        scaler.scale(loss_fn(leaves, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        state, metrics = step(state, [batch])
        assert metrics.applied.item() is not overflow
        assert state.scaler.scale.item() == scaler.get_scale()
        assert_same_bits(state.params, mapped(Tensor.detach, leaves))


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    hidden = torch.tanh(batch @ params["p0"].T)
    return (hidden.sum(1) * params["p2"] + (params["p1"] ** 2).sum()).pow(2).mean()


@pytest.mark.parametrize("name", ["SGD", "NAdam", "Adagrad", "Rprop", "Adafactor"])
def test_a_donated_step_writes_in_place_and_has_the_bits_of_the_pure_one(name: str):
    hyper = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {}
    optimizer, params = from_torch(getattr(OPTIM, name), **hyper), params_of(OPTIM.Adam)
    pure, donated = (fa.make_step(loss_fn, optimizer, max_norm=1.0, donate=donate) for donate in (False, True))
    expected, state = (fa.init_state(params, optimizer, fa.DynamicScale(8.0)) for _ in range(2))
    place = state.params["p0"].data_ptr()
    kept = [leaf.data_ptr() for leaf in state.opt_state.state.get("exp_avg", {}).values() if leaf.ndim]
    for factor in (1.0, math.inf, 1.0):
        batch = factor * torch.ones(2, 4)
        expected, _ = pure(expected, [batch])
        state, _ = donated(state, [batch])
        assert_same_bits(state, expected)
    assert state.params["p0"].data_ptr() == place
    assert kept == [leaf.data_ptr() for leaf in state.opt_state.state.get("exp_avg", {}).values() if leaf.ndim]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("name", ["SGD", "NAdam", "Adafactor"])
def test_a_compiled_step_has_one_operator_for_the_update_and_the_bits_of_the_eager_one(name: str, donate: bool):
    hyper = {"lr": fa.linear(0.1, 0.2, 3), "momentum": 0.9} if name == "SGD" else {}
    optimizer, params = from_torch(getattr(OPTIM, name), **hyper), params_of(OPTIM.Adam)
    eager = fa.make_step(loss_fn, optimizer)
    compiled = fa.make_step(loss_fn, optimizer, donate=donate, compile={"backend": "aot_eager"})
    expected, state = (fa.init_state(params, optimizer, fa.DynamicScale(8.0)) for _ in range(2))
    for number, factor in enumerate((1.0, math.inf, 1.0, 2.0)):
        batch = factor * torch.ones(2, 4)
        expected, _ = eager(expected, [batch])
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            state, _ = compiled(state, [batch])
        assert_same_bits(state, expected)


def test_members_of_an_ensemble_are_updated_one_by_one_each_with_its_own_skip():
    optimizer = from_torch(OPTIM.NAdam, lr=0.1)
    members = [params_of(OPTIM.Adam), mapped(lambda leaf: leaf + 1, params_of(OPTIM.Adam))]
    states = [optimizer.init(each) for each in members]
    stacked = mapped(lambda *leaves: torch.stack(leaves), members[0], members[1])
    stacked_state = torch.func.vmap(optimizer.init)(stacked)
    assert_same_bits(stacked_state, mapped(lambda *leaves: torch.stack(leaves), *states))
    flags = torch.tensor([True, False])
    for seed in range(2):
        grads = [gradients(members[0], 2 * seed + index) for index in range(2)]
        stacked, stacked_state = vmapped(
            lambda p, s, g, f: tuple(fa.maybe_step(optimizer, p, s, g, f)),
            stacked,
            stacked_state,
            mapped(lambda *leaves: torch.stack(leaves), *grads),
            flags,
        )
        for index in range(2):
            members[index], states[index] = fa.maybe_step(
                optimizer, members[index], states[index], grads[index], flags[index]
            )
            assert_same_bits(
                mapped(lambda leaf, i=index: leaf[i], (stacked, stacked_state)), (members[index], states[index])
            )


def test_a_derivative_goes_through_a_differentiable_optimizer_and_is_refused_elsewhere():
    params, grads = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([0.5, -1.0])}

    def after(lr: Tensor, cls: Any, **hyper: Any) -> Tensor:
        optimizer = from_torch(cls, lr=lr, **hyper)
        return fa.maybe_step(optimizer, params, optimizer.init(params), grads, GOOD).params["w"].sum()

    # p - lr * g: the derivative by the rate is the sum of -g
    found = torch.func.grad(lambda lr: after(lr, OPTIM.SGD, differentiable=True))(torch.tensor(0.1))
    assert found == -grads["w"].sum()
    with pytest.raises(RuntimeError, match=r"a derivative through SGD, expected none.*differentiable=True"):
        torch.func.grad(lambda lr: after(lr, OPTIM.SGD))(torch.tensor(0.1))


@pytest.mark.parametrize("name", ["NAdam", "SGD", "Adafactor"])
def test_where_the_flag_may_not_be_looked_at_the_update_is_taken_back_by_selection(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("functional_amp.optim.in_place.host_readable", lambda flag: False)  # as on an accelerator
    check(getattr(OPTIM, name), {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {})


@pytest.mark.parametrize("cls", [OPTIM.NAdam, OPTIM.SGD])
def test_a_run_goes_on_from_a_file_with_an_optimizer_that_is_made_anew(cls: Any, tmp_path: Path):
    hyper = {"lr": 0.1, "momentum": 0.9} if cls is OPTIM.SGD else {}
    batch = torch.ones(2, 4)
    step = fa.make_step(loss_fn, from_torch(cls, **hyper))
    state, _ = step(fa.init_state(params_of(OPTIM.Adam), step.optimizer), [batch])
    fa.save(tmp_path / "run", fa.state_dict(state))
    expected, _ = step(state, [batch])
    again = fa.make_step(loss_fn, from_torch(cls, **hyper))  # has seen no parameters
    template = fa.init_state(params_of(OPTIM.Adam), step.optimizer)
    loaded = fa.load_state_dict(template, fa.load(tmp_path / "run"))
    assert_same_bits(again(loaded, [batch])[0], expected)
    assert_same_bits(again(pickle.loads(pickle.dumps(state)), [batch])[0], expected)


def test_a_float64_tree_and_a_strided_leaf_have_torchs_bits():
    params = {"w": torch.randn(4, 3, dtype=torch.float64).T, "z": torch.randn(2, dtype=torch.complex64)}
    optimizer, loop = from_torch(OPTIM.Adam, lr=0.1), Loop(OPTIM.Adam, params, {"lr": 0.1})
    state = optimizer.init(params)
    for seed in range(2):
        grads = mapped(lambda p, seed=seed: torch.full_like(p, 1.0 + seed), params)
        params, state = optimizer.step(grads, state, params)
        loop.step(grads)
        loop.assert_is(params, state)
    assert params["w"].stride() == (1, 3)


def test_an_optimizer_that_raises_in_the_middle_of_its_writes_says_that_a_donated_state_is_lost():
    class Breaking(OPTIM.SGD):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:
            super().step()
            if not any([p.grad is not None and p.grad.isnan().any() for p in self.param_groups[0]["params"]]):
                raise RuntimeError("disk full")

    for donate, message in ((False, None), (True, "lost")):
        step = fa.make_step(loss_fn, from_torch(Breaking, lr=0.1), donate=donate)
        state = fa.init_state(params_of(OPTIM.Adam), step.optimizer)
        with pytest.raises(RuntimeError, match="disk full"):
            step(state, [torch.ones(2, 4)])
        if message is None:
            assert_same_bits(state.params, params_of(OPTIM.Adam))
        else:
            with pytest.raises(RuntimeError, match=message):
                assert state.params


# What is refused


def test_what_can_not_be_followed_is_refused_by_name():
    with pytest.raises(TypeError, match="found LBFGS, whose step calls a closure"):
        from_torch(OPTIM.LBFGS)
    with pytest.raises(TypeError, match=r"SparseAdam raised RuntimeError in a trial step.*dense gradients"):
        from_torch(OPTIM.SparseAdam).init({"w": torch.ones(2, 2)})
    with pytest.raises(TypeError, match=r"cls: found SGD, expected a subclass.*Pass the class"):
        from_torch(OPTIM.SGD([torch.ones(1)]))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="cls: found sgd"):
        from_torch(fa.sgd)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Invalid learning rate"):
        from_torch(OPTIM.Adam, lr=-1.0)
    with pytest.raises(TypeError, match="found list for 'w', expected a dict"):
        from_torch(OPTIM.Adam, groups=lambda path, leaf: []).init({"w": torch.ones(1)})  # pyright: ignore
    optimizer: Any = from_torch(OPTIM.Adam)
    params = {"w": torch.ones(2)}
    with pytest.raises(TypeError, match="grads: found a sparse tensor"):
        optimizer.step({"w": torch.ones(2).to_sparse()}, optimizer.init(params), params)
    with pytest.raises(TypeError, match="opt_state: found dict, expected TorchState"):
        optimizer.step(params, {}, params)
    with pytest.raises(ValueError, match=r"opt_state: found .*expected .*init of this very optimizer"):
        optimizer.step(params, from_torch(OPTIM.RMSprop).init(params), params)


class Odd(torch.optim.Optimizer):
    """Keeps things at odd places."""

    def __init__(self, params: Any, where: str, lr: float = 0.1):
        super().__init__(params, {"where": where, "lr": lr})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        shared = torch.zeros(1)
        for group in self.param_groups:
            for p in group["params"]:
                where = group["where"]
                if where == "attribute":
                    self.calls += 1
                elif where == "list":
                    self.state[p]["history"] = [p.grad]
                elif where == "stranger":
                    self.state["total"] = {}  # pyright: ignore[reportArgumentType]
                elif where == "shared":
                    self.state[p]["count"] = shared
                p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("attribute", "an attribute 'calls' that a step changes"),
        ("list", "a list at 'history'"),
        ("stranger", "a state under str 'total'"),
        ("shared", "one tensor at two places"),
    ],
)
def test_an_optimizer_that_keeps_things_elsewhere_is_refused_at_init(where: str, message: str):
    with pytest.raises(TypeError, match=f"from_torch: found {message}.*Write an Optimizer"):
        from_torch(Odd, where=where).init({"a": torch.ones(1), "b": torch.ones(1)})


# Optimizers of others


class Numbers(torch.optim.Optimizer):
    """Keeps Python numbers in its groups and in the state of its parameters."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr, "k": 0, "total": 0.0, "on": False})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            group["k"] += 1
            group["total"] = group["total"] + group["lr"] / group["k"]
            group["on"] = not group["on"]
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["seen"] = state.get("seen", 0) + 1
                    p.sub_(p.grad, alpha=group["total"] / state["seen"] * (2 if group["on"] else 1))


def test_numbers_in_groups_and_in_the_state_are_carried():
    params = params_of(OPTIM.SGD)
    optimizer, loop = from_torch(Numbers, lr=0.1), Loop(Numbers, params, {"lr": 0.1})
    state = optimizer.init(params)
    assert {key: value.item() for key, value in state.groups[0].items()} == {"k": 0, "total": 0.0, "on": False}
    for seed in range(3):
        grads = gradients(params, seed)
        params, state = fa.maybe_step(optimizer, params, state, grads, GOOD)
        params, state = fa.maybe_step(optimizer, params, state, grads, BAD)
        loop.step(grads)
        assert_same_bits(params, loop.params)
        group = loop.optimizer.param_groups[0]
        assert {key: value.item() for key, value in state.groups[0].items()} == {
            k: group[k] for k in ("k", "total", "on")
        }


def optimi(name: str) -> Callable[[], Any]:
    return lambda: getattr(pytest.importorskip("optimi"), name)


def schedulefree(name: str) -> Callable[[], Any]:
    return lambda: getattr(pytest.importorskip("schedulefree"), name)


OTHERS: dict[str, tuple[Callable[[], Any], dict[str, Any], torch.dtype]] = {
    **{
        f"optimi.{n}": (optimi(n), {"lr": 0.01}, torch.float32)
        for n in ("Adam", "AdamW", "Adan", "Lion", "RAdam", "Ranger", "SGD")
    },
    # Where triton is installed it is chosen without a look at the device of the parameters.
    "optimi.StableAdamW": (optimi("StableAdamW"), {"lr": 0.01, "triton": False}, torch.float32),
    "optimi.AdamW, Kahan": (optimi("AdamW"), {"lr": 0.01}, torch.bfloat16),
    "optimi.Lion, foreach": (optimi("Lion"), {"lr": 0.01, "triton": False, "foreach": False}, torch.float32),
    **{
        f"schedulefree.{n}": (
            schedulefree(n),
            {"lr": 0.1, **({} if n == "RAdamScheduleFree" else {"warmup_steps": 2})},
            torch.float32,
        )
        for n in ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree")
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_of_others_have_the_bits_of_the_imperative_loop(name: str):
    make, hyper, dtype = OTHERS[name]
    params = {name: leaf.to(dtype) for name, leaf in params_of(OPTIM.Adam).items()}
    check(make(), hyper, params, updates=4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_low_bit_states_are_kept_as_the_tensors_they_are_made_of(name: str):
    cls = getattr(pytest.importorskip("torchao.optim"), name)
    params = {"w": torch.randn(64, 128), "b": torch.randn(5)}
    schedule = fa.linear(0.1, 0.2, 3)
    optimizer, loop = from_torch(cls, lr=schedule), Loop(cls, params, {"lr": 0.1})
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its update
        state = optimizer.init(params)
        assert all(type(leaf) is Tensor for leaf in leaves_of(state) if leaf is not None)
        for seed in range(3):
            grads = gradients(params, seed)
            params, state = fa.maybe_step(optimizer, params, state, grads, GOOD)
            skipped = fa.maybe_step(optimizer, params, state, mapped(lambda g: g * math.nan, grads), BAD)
            assert_same_bits(tuple(skipped), (params, state))
            loop.optimizer.param_groups[0]["lr"].fill_(schedule(torch.tensor(seed)).item())
            loop.step(grads)
            assert_same_bits(params, loop.params)
            codes = loop.optimizer.state[loop.params["w"]]["exp_avg"].codes
            assert_same_bits(state.state["exp_avg.codes"]["w"], codes)


def test_a_schedule_free_optimizer_is_evaluated_at_its_average():
    cls = schedulefree("SGDScheduleFree")()
    params = params_of(OPTIM.SGD)
    optimizer, loop = from_torch(cls, lr=0.1, momentum=0.9), Loop(cls, params, {"lr": 0.1, "momentum": 0.9})
    state = optimizer.init(params)
    for seed in range(3):
        params, state = optimizer.step(gradients(params, seed), state, params)
        loop.step(gradients(params, seed))
    loop.optimizer.eval()
    average = mapped(lambda p, z: p.lerp(z, 1 - 1 / 0.9), params, state.state["z"])
    assert_same_bits(average, loop.params)


def test_a_pure_graph_takes_parameters_of_any_size(fresh_dynamo: None):
    optimizer = from_torch(torch.optim.Adagrad, lr=0.1)
    graph = torch.compile(
        lambda grads, state, params: fa.maybe_step(optimizer, params, state, grads, GOOD),
        backend="eager",
        fullgraph=True,
        dynamic=True,
    )
    for size in (2, 3, 5):
        params, grads = {"w": torch.ones(size, 2)}, {"w": torch.full((size, 2), 3.0)}
        state = optimizer.init(params)
        assert_same_bits(graph(grads, state, params), fa.maybe_step(optimizer, params, state, grads, GOOD))
