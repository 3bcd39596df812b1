"""Optimizers against torch.optim (foreach=False, fused=False) on the same gradients.

Bit for bit on a CPU in eager mode are the `step`s of sgd, adam and adamw with an lr that is a float,
for parameters of at most 32 bits a real (half precision: the float32 run rounded each step), and of
sgd for all others. What is not says its tolerance; there the operations stand in another order, or a
power of beta is taken by another library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.testing import leaves_of, mapped, same_bits

Tensors = dict[str, Tensor]
GOOD, BAD = torch.tensor(True), torch.tensor(False)

# Vectorized body, its tail, a scalar and nothing at all.
SHAPES = {"matrix": (7, 5), "vector": (33,), "scalar": (), "empty": (0, 3)}
N = 50


@dataclass(frozen=True)
class Rule:
    """An optimizer by its name in torch.optim, with the hyperparameters, which have torch's names."""

    name: str
    hyper: dict[str, Any] = field(default_factory=dict)

    def ours(self, **replaced: Any) -> fa.Optimizer:
        return getattr(fa, self.name.lower())(**{**self.hyper, **replaced})

    def theirs(self, params: Any, **replaced: Any) -> torch.optim.Optimizer:
        return getattr(torch.optim, self.name)(params, **{"foreach": False, "fused": False, **self.hyper, **replaced})


RULES = (
    Rule("SGD", {"lr": 0.1}),
    Rule("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    Rule("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Rule("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    Rule("AdamW", {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
)
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join([rule.name, *rule.hyper]))


@st.composite
def sgd_rules(draw: st.DrawFn) -> Rule:
    momentum = draw(st.just(0.0) | st.floats(0.01, 0.99))
    nesterov = momentum > 0 and draw(st.booleans())
    return Rule(
        "SGD",
        {
            "lr": draw(st.just(0.0) | st.floats(1e-4, 1.0)),
            "momentum": momentum,
            "nesterov": nesterov,
            "dampening": 0.0 if nesterov else draw(st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0)),
            "weight_decay": draw(st.just(0.0) | st.floats(1e-5, 1.0)),
        },
    )


@st.composite
def adam_rules(draw: st.DrawFn, name: str, *, decays: bool = True) -> Rule:
    beta = st.just(0.0) | st.floats(0.0, 0.99) | st.floats(0.99, 0.99999)
    return Rule(
        name,
        {
            "lr": draw(st.just(0.0) | st.floats(1e-5, 1.0)),
            "betas": (draw(beta), draw(beta)),
            "eps": draw(st.floats(1e-10, 1e-2)),
            "weight_decay": draw(st.just(0.0) | st.floats(1e-5, 1.0)) if decays else 0.0,
        },
    )


rules = st.one_of(sgd_rules(), adam_rules("Adam"), adam_rules("AdamW"))
# Adam with an L2 penalty divides the rounding of a parameter by eps in the next update: no tolerance holds.
steady_rules = st.one_of(sgd_rules(), adam_rules("Adam", decays=False), adam_rules("AdamW"))
seeds = st.integers(0, 2**16)


def draws(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensors, list[Tensors]]:
    """Parameters, and N trees of gradients of very different sizes, some elements zero."""
    generator = torch.Generator().manual_seed(seed)

    def grads() -> Tensors:
        size = 10 ** (6 * torch.rand((), generator=generator, dtype=torch.float64).item() - 4)
        return {
            name: torch.where(
                torch.rand(shape, generator=generator) < 0.1, 0, torch.randn(shape, generator=generator) * size
            ).to(dtype)
            if not dtype.is_complex
            else torch.randn(shape, generator=generator, dtype=dtype) * size
            for name, shape in SHAPES.items()
        }

    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64 if not dtype.is_complex else dtype).to(dtype)
        for name, shape in SHAPES.items()
    }
    return params, [grads() for _ in range(N)]


def run_theirs(
    rule: Rule,
    params: Tensors,
    updates: Sequence[Mapping[str, Tensor | None]],
    *,
    groups: Callable[[dict[str, nn.Parameter]], Any] = lambda leaves: list(leaves.values()),
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, index: None,
    fused: bool = False,
) -> tuple[list[Tensors], torch.optim.Optimizer, dict[str, nn.Parameter]]:
    """The parameters after each update by torch.optim; a gradient of None is `grad = None`."""
    leaves = {name: nn.Parameter(value.clone()) for name, value in params.items()}
    optimizer = rule.theirs(groups(leaves), fused=fused)
    trajectory = []
    for index, grads in enumerate(updates):
        before_step(optimizer, index)
        for name, leaf in leaves.items():
            grad = grads[name]
            leaf.grad = None if grad is None else grad.clone()
        optimizer.step()
        trajectory.append({name: leaf.detach().clone() for name, leaf in leaves.items()})
    return trajectory, optimizer, leaves


def run_ours(optimizer: fa.Optimizer, params: Any, updates: Sequence[Any]) -> tuple[list[Any], Any]:
    """The parameters after each `step`, and the last state."""
    assert optimizer.step is not None
    opt_state = optimizer.init(params)
    trajectory = []
    for grads in updates:
        params, opt_state = optimizer.step(grads, opt_state, params)
        trajectory.append(params)
    return trajectory, opt_state


def run_updates(optimizer: fa.Optimizer, params: Any, updates: Sequence[Any]) -> list[Any]:
    """The parameters after each `update` and `apply_updates`."""
    opt_state = optimizer.init(params)
    trajectory = []
    for grads in updates:
        moved, opt_state = optimizer.update(grads, opt_state, params)
        params = fa.apply_updates(params, moved)
        trajectory.append(params)
    return trajectory


def slots_of(opt_state: Any) -> dict[str, Any]:
    """The trees of a state by their names, which are torch's; without those that hold no tensor."""
    return {
        name: tree
        for name, tree in opt_state._asdict().items()
        if name != "step" and any(leaf is not None for leaf in leaves_of(tree))
    }


def assert_bits(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def assert_within_ulps(
    params: Tensors, found: Sequence[Tensors], expected: Sequence[Tensors], ulps_an_update: float
) -> None:
    """The distance after k updates is at most k times so many ulps of the largest magnitude that the leaf ever had."""
    for name, start in params.items():
        largest, dtype = start.abs().max() if start.numel() else torch.zeros(()), start.real.dtype
        for k, (ours, theirs) in enumerate(zip(found, expected, strict=True), start=1):
            assert ours[name].dtype == theirs[name].dtype and ours[name].shape == theirs[name].shape
            if theirs[name].numel():
                largest = torch.maximum(largest, theirs[name].abs().max())
                distance = (ours[name] - theirs[name]).abs().max()
                assert distance <= k * ulps_an_update * torch.finfo(dtype).eps * largest, (name, k)


# Against torch.optim


@given(rule=rules, seed=seeds)
def test_fifty_steps_equal_torch_optim_bit_for_bit(rule, seed):
    params, updates = draws(seed)
    expected, optimizer, leaves = run_theirs(rule, params, updates)
    found, opt_state = run_ours(rule.ours(), params, updates)
    assert_bits(found, expected)
    assert opt_state.step.item() == N
    for slot, tree in slots_of(opt_state).items():
        assert_bits(tree, {name: optimizer.state[leaf][slot] for name, leaf in leaves.items()})


@given(rule=steady_rules, seed=seeds)
def test_update_and_apply_updates_equal_torch_optim_within_two_ulps_an_update(rule, seed):
    # The update is rounded before it is added, and once more with decoupled decay.
    params, updates = draws(seed)
    expected, _, _ = run_theirs(rule, params, updates)
    assert_within_ulps(params, run_updates(rule.ours(), params, updates), expected, 2)


@given(rule=steady_rules, seed=seeds, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_a_learning_rate_tensor_equals_the_float_of_its_value_within_two_ulps_an_update(rule, seed, dtype):
    lr = torch.tensor(rule.hyper["lr"], dtype=dtype)
    params, updates = draws(seed)
    expected, _, _ = run_theirs(Rule(rule.name, {**rule.hyper, "lr": lr.item()}), params, updates)
    found, _ = run_ours(rule.ours(lr=lr), params, updates)
    assert_within_ulps(params, found, expected, 2)


@given(rule=steady_rules, seed=seeds)
def test_a_schedule_equals_torch_optim_with_its_lr_set_before_each_step(rule, seed):
    peak = rule.hyper["lr"]

    def set_lr(optimizer: torch.optim.Optimizer, index: int) -> None:
        optimizer.param_groups[0]["lr"] = peak * min(index, 10) / 10

    params, updates = draws(seed)
    expected, _, _ = run_theirs(rule, params, updates, before_step=set_lr)
    found, _ = run_ours(rule.ours(lr=fa.linear(0.0, peak, 10)), params, updates)
    assert_within_ulps(params, found, expected, 4)


@every_rule
def test_a_schedule_equals_torch_optim_with_lambda_lr(rule):
    params, updates = draws(0)
    schedulers: list[torch.optim.lr_scheduler.LambdaLR] = []

    def advance(optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 0:
            schedulers.append(torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5 ** (n // 10)))
        else:
            schedulers[0].step()

    expected, _, _ = run_theirs(rule, params, updates, before_step=advance)
    halved = fa.join([fa.constant(rule.hyper["lr"] * 0.5**k) for k in range(5)], [10, 20, 30, 40])
    found, _ = run_ours(rule.ours(lr=halved), params, updates)
    assert_within_ulps(params, found, expected, 4)


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_wide_and_complex_parameters_equal_torch_optim(rule, dtype, seed):
    params, updates = draws(seed, dtype)
    expected, _, _ = run_theirs(rule, params, updates)
    found, _ = run_ours(rule.ours(), params, updates)
    if rule.name == "SGD" or dtype == torch.complex64:
        assert_bits(found, expected)
    else:  # beta**t in float64 is torch.pow's here and Python's there
        assert_within_ulps(params, found, expected, 1)
    assert_within_ulps(params, run_updates(rule.ours(), params, updates), expected, 2)


@given(rule=rules, seed=seeds, dtype=st.sampled_from([torch.float16, torch.bfloat16]))
def test_half_precision_parameters_are_the_float32_run_rounded_after_each_step(rule, seed, dtype):
    params, updates = draws(seed, dtype)
    leaves = {name: nn.Parameter(value.float()) for name, value in params.items()}
    optimizer = rule.theirs(list(leaves.values()))
    expected = []
    for grads in updates:
        for name, leaf in leaves.items():
            leaf.grad = grads[name].float()
        optimizer.step()
        expected.append({name: leaf.detach().to(dtype) for name, leaf in leaves.items()})
        for name, leaf in leaves.items():
            leaf.data.copy_(expected[-1][name])
    found, opt_state = run_ours(rule.ours(), params, updates)
    assert_bits(found, expected)
    assert all(leaf.dtype == torch.float32 for leaf in leaves_of(slots_of(opt_state)))


@every_rule
def test_half_precision_gradients_of_float32_parameters_are_widened_first(rule):
    params, updates = draws(1)
    half = [mapped(lambda g: g.half(), grads) for grads in updates]
    expected, _, _ = run_theirs(rule, params, [mapped(lambda g: g.float(), grads) for grads in half])
    assert_bits(run_ours(rule.ours(), params, half)[0], expected)


def test_apply_updates_rounds_a_half_precision_parameter_once():
    # 1 + 2**-8 lies half way between two bfloat16 numbers; in float32 the 2**-17 decides, in bfloat16 it is lost.
    params, updates = torch.ones(1, dtype=torch.bfloat16), torch.tensor([2.0**-8 + 2.0**-17])
    assert fa.apply_updates(params, updates).item() == 1 + 2.0**-7
    assert (params + updates.bfloat16()).item() == 1.0


# Missing gradients, and leaves that are no parameters


@every_rule
def test_a_leaf_that_never_gets_a_gradient_is_left_alone_as_torch_leaves_it(rule):
    params, updates = draws(2)
    updates = [{**grads, "vector": None} for grads in updates]
    expected, _, _ = run_theirs(rule, params, updates)
    found, opt_state = run_ours(rule.ours(), params, updates)
    assert_bits(found, expected)
    assert all(not tree["vector"].any() for tree in slots_of(opt_state).values())


@every_rule
def test_a_leaf_without_a_gradient_keeps_its_tensors(rule):
    optimizer = rule.ours()
    params, updates = draws(3)
    _, opt_state = run_ours(optimizer, params, updates[:3])
    grads = {**updates[3], "matrix": None}
    moved, after = optimizer.step(grads, opt_state, params)
    assert moved["matrix"] is params["matrix"] and not torch.equal(moved["vector"], params["vector"])
    for slot, tree in slots_of(after).items():
        assert tree["matrix"] is getattr(opt_state, slot)["matrix"]
        assert not torch.equal(tree["vector"], getattr(opt_state, slot)["vector"])
    update, again = optimizer.update(grads, opt_state, params)
    assert update["matrix"] is None and same_bits(again, after)
    # maybe_step may run another kernel, and changes as little.
    stepped = fa.maybe_step(optimizer, params, opt_state, grads, GOOD)
    assert stepped.params["matrix"] is params["matrix"]
    torch.testing.assert_close(tuple(stepped), (moved, after), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rule", [rule for rule in RULES if "dampening" not in rule.hyper], ids=lambda rule: rule.name)
def test_gradients_that_come_and_go_equal_torch_optim_with_one_count_for_all(rule):
    # torch counts for each parameter by itself; here t is that of the tree, so torch is told the count.
    params, updates = draws(4)
    updates = [
        {name: None if name == "vector" and i % 3 == 0 else grad for name, grad in grads.items()}
        for i, grads in enumerate(updates)
    ]

    def same_count(optimizer: torch.optim.Optimizer, index: int) -> None:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"].fill_(index)

    def started(optimizer: torch.optim.Optimizer, index: int) -> None:
        if index == 0 and rule.name != "SGD":  # torch makes the state of a leaf at its first gradient
            for leaf in optimizer.param_groups[0]["params"]:
                zeros = torch.zeros_like(leaf)
                optimizer.state[leaf] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}
        same_count(optimizer, index)

    expected, _, _ = run_theirs(rule, params, updates, before_step=started)
    assert_bits(run_ours(rule.ours(), params, updates)[0], expected)


@every_rule
def test_integer_leaves_and_missing_parameters_ride_along(rule):
    optimizer = rule.ours()
    params = {"w": torch.ones(2), "count": torch.tensor(2**24 + 1), "mask": torch.tensor([True]), "gone": None}
    grads = {"w": torch.ones(2), "count": None, "mask": None, "gone": None}
    opt_state = optimizer.init(params)
    moved, after = optimizer.step(grads, opt_state, params)
    assert moved["count"] is params["count"] and moved["mask"] is params["mask"] and moved["gone"] is None
    alone, _ = optimizer.step({"w": grads["w"]}, optimizer.init({"w": params["w"]}), {"w": params["w"]})
    assert same_bits(moved["w"], alone["w"])
    assert all(tree[name] is None for tree in slots_of(after).values() for name in ("count", "mask", "gone"))
    # An update of zero for a whole number must not go through float32, where 2**24 + 1 is none.
    zero = {"w": torch.zeros(2), "count": torch.tensor(0), "mask": torch.tensor([False]), "gone": None}
    assert same_bits(fa.apply_updates(params, zero), params)


@every_rule
@pytest.mark.parametrize("tree", [{}, [], (), {"a": {}, "b": []}, None, {"a": None}], ids=repr)
def test_trees_without_tensors_step(rule, tree):
    optimizer = rule.ours()
    opt_state = optimizer.init(tree)
    params, after = fa.maybe_step(optimizer, tree, opt_state, tree, GOOD)
    assert params == tree and after.step.item() == 1
    assert fa.maybe_step(optimizer, tree, opt_state, tree, BAD).opt_state.step.item() == 0


@pytest.mark.parametrize("make", [torch.ones, lambda n: [torch.ones(n)], lambda n: ({"w": torch.ones(n)},)])
@every_rule
def test_the_containers_are_those_of_the_parameters(rule, make):
    params = make(2)
    optimizer = rule.ours()
    opt_state = optimizer.init(params)
    moved, after = optimizer.step(params, opt_state, params)
    updates, _ = optimizer.update(params, opt_state, params)
    structure = optree.tree_structure(params)
    assert optree.tree_structure(moved) == optree.tree_structure(updates) == structure
    assert optree.tree_structure(after) == optree.tree_structure(opt_state)


# The contract of all optimizers; most of its laws are checked in test_conformance.py


LABELS = {"decay": fa.adamw(0.01), "plain": fa.sgd(0.1, momentum=0.9), "frozen": None}


def by_shape(path: str, leaf: Tensor) -> str:
    return "frozen" if leaf.ndim == 0 else "decay" if leaf.ndim > 1 else "plain"


EVERY: dict[str, fa.Optimizer] = {
    **{f"{index}-{rule.name}": rule.ours() for index, rule in enumerate(RULES)},
    "tensor lr": fa.adamw(torch.tensor(0.01)),
    "schedule": fa.sgd(fa.warmup_cosine(0.1, 2, 9), momentum=0.9),
    "partition": fa.partition(LABELS, by_shape),
}
every_optimizer = pytest.mark.parametrize("name", EVERY)


def mixed(seed: int) -> tuple[Any, list[Any]]:
    """A nested tree of many dtypes with None and integer leaves, and gradients for it."""
    generator = torch.Generator().manual_seed(seed)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    def tree(count: Tensor | None) -> dict[str, Any]:
        return {
            "block": [
                {"w": tensor(2, 3), "b": tensor(3, dtype=torch.float64)},
                (tensor(), tensor(2).half(), tensor(0)),
            ],
            "z": tensor(2, dtype=torch.complex64),
            "count": count,
        }

    params = {**tree(torch.tensor(7)), "late": tensor(2)}
    return params, [{**tree(None), "late": None if i == 0 else tensor(2)} for i in range(6)]


@every_optimizer
def test_outputs_carry_no_graph_for_parameters_that_require_grad(name):
    optimizer = EVERY[name]
    params = {
        "w": nn.Parameter(torch.ones(2, 2)),
        "b": nn.Parameter(torch.ones(2)),
        "late": nn.Parameter(torch.ones(3)),
    }
    opt_state = optimizer.init(params)
    grads = {"w": torch.ones(2, 2, requires_grad=True), "b": torch.ones(2), "late": None}
    updates, after = optimizer.update(grads, opt_state, params)
    results = (opt_state, updates, after, fa.maybe_step(optimizer, params, opt_state, grads, GOOD))
    assert not any(leaf.requires_grad for leaf in leaves_of(results) if leaf is not None)


# Skipped updates


@given(rule=rules, seed=seeds, good=st.lists(st.booleans(), min_size=N, max_size=N))
def test_skipped_updates_leave_no_trace_in_a_run(rule, seed, good):
    params, updates = draws(seed)
    taken = [grads for grads, flag in zip(updates, good, strict=True) if flag]
    # maybe_step runs torch's fused kernels; with dampening, the first step is one of its own.
    expected, optimizer, leaves = run_theirs(rule, params, taken, fused=not rule.hyper.get("dampening"))

    ours = rule.ours()
    opt_state, end = ours.init(params), params
    for grads, flag in zip(updates, good, strict=True):
        grads = grads if flag else mapped(lambda g: torch.full_like(g, math.nan), grads)
        before = end, opt_state
        end, opt_state = fa.maybe_step(ours, end, opt_state, grads, torch.tensor(flag))
        assert flag or same_bits((end, opt_state), before)
    assert_bits(end, expected[-1] if expected else params)
    assert opt_state.step.item() == len(taken)
    if taken:
        for slot, tree in slots_of(opt_state).items():
            assert_bits(tree, {name: optimizer.state[leaf][slot] for name, leaf in leaves.items()})


@every_rule
def test_a_schedule_does_not_move_on_a_skipped_update(rule):
    asked: list[int] = []

    def schedule(count: Tensor) -> Tensor:
        asked.append(int(count))
        return torch.tensor(0.1)

    optimizer = rule.ours(lr=schedule)
    params = torch.ones(2)
    opt_state = optimizer.init(params)
    for flag in (True, False, False, True, True):
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, torch.ones(2), torch.tensor(flag))
    assert asked == [0, 1, 1, 1, 2] and opt_state.step.item() == 3


# Partition


def test_decay_no_decay_and_frozen_equal_torch_param_groups_bit_for_bit():
    params, updates = draws(5)
    expected, _, _ = run_theirs(
        Rule("AdamW", {"lr": 0.01}),
        params,
        updates,
        groups=lambda leaves: [
            {"params": [leaves["matrix"], leaves["empty"]], "weight_decay": 0.1},
            {"params": [leaves["vector"]], "weight_decay": 0.0, "lr": 0.05},
        ],
    )
    optimizer = fa.partition(
        {"decay": fa.adamw(0.01, weight_decay=0.1), "no_decay": fa.adamw(0.05, weight_decay=0.0), "frozen": None},
        lambda path, leaf: "decay" if leaf.ndim > 1 else "no_decay" if leaf.ndim == 1 else "frozen",
    )
    found, opt_state = run_ours(optimizer, params, updates)
    assert_bits(found, expected)
    assert found[-1]["scalar"] is params["scalar"]
    assert opt_state["frozen"] is None and opt_state["decay"].exp_avg["scalar"] is None
    assert_within_ulps(params, run_updates(optimizer, params, updates), expected, 2)


def test_different_rules_side_by_side_equal_two_torch_optimizers_bit_for_bit():
    params, updates = draws(6)
    sgd, adam = RULES[1], RULES[3]

    def only(names: Sequence[str]) -> tuple[Tensors, list[Tensors]]:
        return {n: params[n] for n in names}, [{n: grads[n] for n in names} for grads in updates]

    first, _, _ = run_theirs(sgd, *only(["matrix", "scalar"]))
    second, _, _ = run_theirs(adam, *only(["vector", "empty"]))
    optimizer = fa.partition(
        {"sgd": sgd.ours(), "adam": adam.ours()}, lambda path, leaf: "sgd" if path in ("matrix", "scalar") else "adam"
    )
    found, _ = run_ours(optimizer, params, updates)
    assert_bits(found, [{**a, **b} for a, b in zip(first, second, strict=True)])


def test_one_label_for_all_leaves_is_the_optimizer_itself():
    params, updates = mixed(4)
    for optimizer in (rule.ours() for rule in RULES):
        alone = run_ours(optimizer, params, updates)
        together = run_ours(fa.partition({"all": optimizer}, lambda path, leaf: "all"), params, updates)
        assert same_bits(together[0], alone[0]) and same_bits(together[1]["all"], alone[1])


def test_partitions_nest():
    params, updates = draws(7)
    inner = fa.partition(
        {"matrix": RULES[3].ours(), "rest": RULES[0].ours()}, lambda path, leaf: "matrix" if leaf.ndim > 1 else "rest"
    )
    outer = fa.partition({"on": inner, "off": None}, lambda path, leaf: "off" if path == "scalar" else "on")
    found, _ = run_ours(outer, params, updates)
    matrices, _ = run_ours(RULES[3].ours(), params, updates)
    vectors, _ = run_ours(RULES[0].ours(), params, updates)
    for name, source in (("matrix", matrices), ("empty", matrices), ("vector", vectors)):
        assert same_bits(found[-1][name], source[-1][name])
    assert found[-1]["scalar"] is params["scalar"]


def test_the_label_sees_each_leaf_with_its_path():
    seen: dict[str, Any] = {}
    params = {"blocks": [{"weight": torch.ones(2, 2), "bias": None}, (torch.ones(1),)], "a": {"b": torch.tensor(1)}}

    def label(path: str, leaf: Tensor) -> str:
        seen[path] = leaf
        return "all"

    fa.partition({"all": fa.sgd(0.1)}, label).init(params)
    assert set(seen) == {"blocks.0.weight", "blocks.1.0", "a.b"}
    assert seen["blocks.0.weight"] is params["blocks"][0]["weight"] and seen["a.b"] is params["a"]["b"]


def test_an_unused_label_keeps_a_state_of_its_own():
    params, updates = draws(8)
    optimizer = fa.partition({"used": fa.adam(0.1), "unused": fa.adam(0.1)}, lambda path, leaf: "used")
    found, opt_state = run_ours(optimizer, params, updates)
    assert same_bits(found, run_ours(fa.adam(0.1), params, updates)[0])
    assert all(leaf is None for leaf in leaves_of(opt_state["unused"].exp_avg))


@pytest.mark.parametrize("function", ["update", "step"])
def test_partition_errors_name_the_path(function):
    params = {"layers": [{"weight": torch.ones(2, 2)}, {"weight": torch.ones(2, 2)}]}
    optimizer = fa.partition({"decay": fa.sgd(0.1)}, lambda path, leaf: "decay")
    opt_state = optimizer.init(params)
    call = getattr(optimizer, function)
    with pytest.raises(ValueError, match=r"grads.*missing.*layers\.1\.weight"):
        call({"layers": [{"weight": torch.ones(2, 2)}]}, opt_state, params)
    with pytest.raises(ValueError, match=r"shape \(3,\) at 'layers\.1\.weight'"):
        call({"layers": [{"weight": torch.ones(2, 2)}, {"weight": torch.ones(3)}]}, opt_state, params)
    with pytest.raises(ValueError, match=r"opt_state.*decay"):
        call(params, {"other": None}, params)
    unknown = fa.partition({"decay": fa.sgd(0.1)}, lambda path, leaf: "decay" if ".0." in path else "plain")
    with pytest.raises(ValueError, match=r"'plain' at 'layers\.1\.weight', expected one of \['decay'\]"):
        unknown.init(params)
    with pytest.raises(ValueError, match=r"'plain' at 'layers\.1\.weight'"):
        getattr(unknown, function)(params, opt_state, params)


# Under transforms


def stacked(trees: Sequence[Any]) -> Any:
    return mapped(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])


def member(tree: Any, index: int) -> Any:
    return mapped(lambda leaf: leaf[index], tree)


@every_rule
@pytest.mark.parametrize("schedule", [False, True])
def test_an_ensemble_under_vmap_is_its_members(rule, schedule):
    optimizer = rule.ours(lr=fa.linear(0.1, 0.01, 5)) if schedule else rule.ours()
    members = [draws(seed) for seed in range(3)]
    good = torch.tensor([[True, True, False], [False, True, True], [True, False, False], [True, True, True]])

    params = stacked([params for params, _ in members])
    opt_state = torch.vmap(optimizer.init)(params)
    for index, flags in enumerate(good):
        grads = stacked([updates[index] for _, updates in members])
        params, opt_state = torch.vmap(partial(fa.maybe_step, optimizer))(params, opt_state, grads, flags)

    for k, (alone, updates) in enumerate(members):
        alone_state = optimizer.init(alone)
        for index in range(len(good)):
            alone, alone_state = fa.maybe_step(optimizer, alone, alone_state, updates[index], good[index, k])
        torch.testing.assert_close(member(params, k), alone, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(member(opt_state, k), alone_state, rtol=1e-6, atol=1e-12)


@every_rule
def test_a_grid_of_learning_rates_under_vmap_is_a_run_for_each(rule):
    params, updates = draws(9)
    rates = torch.tensor([0.001, 0.01, 0.1])

    def train(lr: Tensor) -> Any:
        return run_ours(rule.ours(lr=lr), params, updates[:5])[0][-1]

    found = torch.vmap(train)(rates)
    for k, lr in enumerate(rates):
        torch.testing.assert_close(member(found, k), train(lr), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("skip", [False, True])
def test_the_derivative_of_sgd_by_its_learning_rate_is_that_of_the_closed_form(skip):
    # On p**2 / 2 an update is p * (1 - lr), and a skipped one leaves p alone.
    def trained(lr: Tensor) -> Tensor:
        optimizer, params = fa.sgd(lr), torch.tensor(3.0, dtype=torch.float64)
        opt_state = optimizer.init(params)
        for index in range(5):
            bad = skip and index == 2
            grads = torch.full_like(params, math.nan) if bad else params
            params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, torch.tensor(not bad))
        return params

    lr, n = torch.tensor(0.1, dtype=torch.float64), 4 if skip else 5
    derivative, value = torch.func.grad_and_value(trained)(lr)
    torch.testing.assert_close(value, 3 * (1 - lr) ** n)
    torch.testing.assert_close(derivative, -3 * n * (1 - lr) ** (n - 1))


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_derivative_of_adam_by_its_learning_rate_is_that_of_the_first_update(name):
    # The first update is lr * g / (|g| + eps), and lr * decay * p where the decay is decoupled.
    params = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    grads = torch.tensor([2.0, -1e-3, 5.0, 0.0], dtype=torch.float64)

    def trained(lr: Tensor) -> Tensor:
        optimizer = getattr(fa, name)(lr, eps=1e-4, weight_decay=0.0 if name == "adam" else 0.3)
        return fa.maybe_step(optimizer, params, optimizer.init(params), grads, GOOD).params.sum()

    expected = -grads / (grads.abs() + 1e-4) - (0 if name == "adam" else 0.3) * params
    derivative = torch.func.grad(trained)(torch.tensor(0.01, dtype=torch.float64))
    torch.testing.assert_close(derivative, expected.sum())


@every_rule
def test_the_derivative_by_the_learning_rate_is_that_of_differences(rule):
    params, updates = draws(11, torch.float64)
    updates = [mapped(lambda g: g / (1 + g.abs()), grads) for grads in updates[:6]]

    def trained(lr: Tensor) -> Tensor:
        end = run_ours(rule.ours(lr=lr), params, updates)[0][-1]
        return sum((leaf.square().sum() for leaf in end.values()), torch.zeros(()))

    lr, h = torch.tensor(0.05, dtype=torch.float64), 1e-5
    differences = (trained(lr + h) - trained(lr - h)) / (2 * h)
    torch.testing.assert_close(torch.func.grad(trained)(lr), differences, rtol=1e-6, atol=0)


@every_rule
def test_a_skipped_update_has_finite_derivatives(rule):
    params = torch.tensor([1.0, 2.0])

    def trained(lr: Tensor, params: Tensor, grads: Tensor) -> Tensor:
        optimizer = rule.ours(lr=lr)
        return fa.maybe_step(optimizer, params, optimizer.init(params), grads, BAD).params.sum()

    for poison in (math.nan, math.inf, 0.0):
        grads = torch.tensor([poison, 1.0])
        by_lr, by_params, by_grads = torch.func.grad(trained, argnums=(0, 1, 2))(torch.tensor(0.1), params, grads)
        assert by_lr.item() == 0 and by_params.tolist() == [1.0, 1.0] and by_grads.tolist() == [0.0, 0.0]


# Optimizers of other kinds


class Pair(NamedTuple):
    """The shape of an optax transformation."""

    init: Callable[[Any], Any]
    update: Callable[..., Any]


class Count(NamedTuple):
    updates: Tensor


def lion_init(params: Any) -> dict[str, Any]:
    return {"m": mapped(torch.zeros_like, params), "count": Count(torch.tensor(0))}


def lion_update(grads: Any, opt_state: Any, params: Any = None) -> tuple[Any, Any]:
    """Lion, https://arxiv.org/abs/2302.06675: a rule that this package has not."""
    updates = mapped(lambda g, m: -0.25 * torch.sign(0.5 * m + 0.5 * g), grads, opt_state["m"])
    m = mapped(lambda g, m: 0.5 * m + 0.5 * g, grads, opt_state["m"])
    return updates, {"m": m, "count": Count(opt_state["count"].updates + 1)}


OTHERS = {
    "plain function": lion_update,
    "pair": (lion_init, lion_update),
    "named pair": Pair(lion_init, lion_update),
    "object": SimpleNamespace(init=lion_init, update=lion_update),
    "Optimizer without step": fa.Optimizer(lion_init, lion_update),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_shapes_of_optimizers_step_and_skip(kind):
    optimizer: Any = OTHERS[kind]
    params = {"w": torch.tensor([1.0, 2.0])}
    opt_state = lion_init(params)
    grads = {"w": torch.tensor([4.0, -4.0])}
    stepped = fa.maybe_step(optimizer, params, opt_state, grads, GOOD)
    assert stepped.params["w"].tolist() == [0.75, 2.25]
    assert stepped.opt_state["m"]["w"].tolist() == [2.0, -2.0] and stepped.opt_state["count"].updates.item() == 1
    nan = {"w": torch.tensor([math.nan, 1.0])}
    assert same_bits(tuple(fa.maybe_step(optimizer, stepped.params, stepped.opt_state, nan, BAD)), tuple(stepped))


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "plain function"])
def test_other_shapes_of_optimizers_train_in_the_step(kind):
    optimizer: Any = OTHERS[kind]
    step = fa.make_step(lambda p, x: (p["w"] * x).sum(), optimizer)
    state = fa.init_state({"w": torch.tensor([1.0, 2.0])}, optimizer, fa.StaticScale(8.0))
    state, _ = step(state, [torch.tensor([1.0, -2.0])])
    assert state.params["w"].tolist() == [0.75, 2.25] and state.opt_state["count"].updates.item() == 1


@pytest.mark.parametrize("kind", ["named pair", "object", "Optimizer without step"])
def test_partition_takes_other_objects_with_init_and_update(kind):
    optimizer = fa.partition({"lion": cast(Any, OTHERS[kind]), "sgd": fa.sgd(0.5)}, lambda path, leaf: path)
    params = {"lion": torch.tensor([1.0]), "sgd": torch.tensor([1.0])}
    grads = {"lion": torch.tensor([4.0]), "sgd": torch.tensor([4.0])}
    assert run_ours(optimizer, params, [grads])[0] == [{"lion": torch.tensor([0.75]), "sgd": torch.tensor([-1.0])}]
    assert same_bits(run_updates(optimizer, params, [grads]), run_ours(optimizer, params, [grads])[0])


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("instance", [False, True])
def test_optimizers_of_torch_are_refused_with_the_remedy(rule, instance):
    optimizer: Any = rule.theirs([nn.Parameter(torch.ones(1))]) if instance else getattr(torch.optim, rule.name)
    params = {"w": torch.ones(1)}
    for call in (
        lambda: fa.init_state(params, optimizer),
        lambda: fa.make_step(lambda p, x: p["w"].sum(), optimizer),
        lambda: fa.maybe_step(optimizer, params, None, params, GOOD),
    ):
        with pytest.raises(TypeError, match=rf"found {rule.name}, .*functional_amp\.sgd, adam or adamw"):
            call()
    with pytest.raises(TypeError, match=rf"optimizers\['all'\]: found {rule.name}"):
        fa.partition({"all": optimizer}, lambda path, leaf: "all")


@pytest.mark.parametrize(
    "optimizer", [None, 3, "adam", {"init": None}, (1, 2), object()], ids=lambda value: repr(value).split(" at ")[0]
)
def test_what_is_no_optimizer_is_refused(optimizer):
    with pytest.raises(TypeError, match=r"optimizer: found .*expected Optimizer"):
        fa.maybe_step(optimizer, torch.ones(1), None, torch.ones(1), GOOD)
    with pytest.raises(TypeError, match=r"optimizer: found .*expected Optimizer"):
        fa.init_state(torch.ones(1), optimizer)


# Errors


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fa.sgd(-0.1), ValueError, "lr"),
        (lambda: fa.sgd(math.nan), ValueError, "lr"),
        (lambda: fa.sgd(math.inf), ValueError, "lr"),
        (lambda: fa.sgd(cast(Any, "0.1")), TypeError, "lr"),
        (lambda: fa.sgd(True), TypeError, "lr"),
        (lambda: fa.sgd(cast(Any, None)), TypeError, "lr"),
        (lambda: fa.sgd(torch.ones(2)), ValueError, "lr"),
        (lambda: fa.sgd(torch.tensor(1)), TypeError, "lr"),
        (lambda: fa.adam(torch.ones(1)), ValueError, "lr"),
        (lambda: fa.adamw(-1.0), ValueError, "lr"),
        (lambda: fa.sgd(0.1, momentum=-0.1), ValueError, "momentum"),
        (lambda: fa.sgd(0.1, momentum=math.inf), ValueError, "momentum"),
        (lambda: fa.sgd(0.1, momentum=math.nan), ValueError, "momentum"),
        (lambda: fa.sgd(0.1, momentum=cast(Any, "0.9")), TypeError, "momentum"),
        (lambda: fa.sgd(0.1, momentum=True), TypeError, "momentum"),
        (lambda: fa.sgd(0.1, momentum=cast(Any, torch.tensor(0.9))), TypeError, "momentum"),
        (lambda: fa.sgd(0.1, 0.9, dampening=-0.1), ValueError, "dampening"),
        (lambda: fa.sgd(0.1, 0.9, dampening=1.1), ValueError, "dampening"),
        (lambda: fa.sgd(0.1, weight_decay=-1e-4), ValueError, "weight_decay"),
        (lambda: fa.sgd(0.1, weight_decay=math.nan), ValueError, "weight_decay"),
        (lambda: fa.sgd(0.1, weight_decay=math.inf), ValueError, "weight_decay"),
        (lambda: fa.sgd(0.1, nesterov=True), ValueError, "nesterov"),
        (lambda: fa.sgd(0.1, 0.9, 0.1, nesterov=True), ValueError, "nesterov"),
        (lambda: fa.sgd(0.1, 0.9, nesterov=cast(Any, 1)), TypeError, "nesterov"),
        (lambda: fa.adam(betas=cast(Any, 0.9)), TypeError, "betas"),
        (lambda: fa.adam(betas=cast(Any, (0.9,))), TypeError, "betas"),
        (lambda: fa.adam(betas=(1.0, 0.9)), ValueError, r"betas\[0\]"),
        (lambda: fa.adam(betas=(0.9, 1.0)), ValueError, r"betas\[1\]"),
        (lambda: fa.adamw(betas=(-0.1, 0.9)), ValueError, r"betas\[0\]"),
        (lambda: fa.adamw(betas=(0.9, math.nan)), ValueError, r"betas\[1\]"),
        (lambda: fa.adam(eps=-1e-8), ValueError, "eps"),
        (lambda: fa.adam(eps=math.nan), ValueError, "eps"),
        (lambda: fa.adam(eps=cast(Any, "1e-8")), TypeError, "eps"),
        (lambda: fa.adam(weight_decay=-1.0), ValueError, "weight_decay"),
        (lambda: fa.adamw(weight_decay=cast(Any, None)), TypeError, "weight_decay"),
        (lambda: fa.partition(cast(Any, fa.sgd(0.1)), by_shape), TypeError, "optimizers"),
        (lambda: fa.partition({"all": cast(Any, 0.1)}, by_shape), TypeError, r"optimizers\['all'\]"),
        (lambda: fa.partition({"all": fa.sgd(0.1)}, cast(Any, "all")), TypeError, "label"),
    ],
)
def test_a_bad_hyperparameter_is_refused_at_once_and_named(make, error, message):
    with pytest.raises(error, match=f"^{message}: found .*(expected|a learning rate)"):
        make()


@pytest.mark.parametrize("value", [0, 1])
def test_whole_numbers_are_numbers(value):
    params, updates = draws(12)
    as_int = run_ours(fa.adamw(value, betas=(0, 0), eps=1, weight_decay=value), params, updates[:3])
    as_float = run_ours(
        fa.adamw(float(value), betas=(0.0, 0.0), eps=1.0, weight_decay=float(value)), params, updates[:3]
    )
    assert same_bits(as_int, as_float)


@pytest.mark.parametrize("function", ["update", "step"])
@every_rule
def test_gradients_and_states_that_do_not_fit_are_named(rule, function):
    optimizer = rule.ours()
    call = getattr(optimizer, function)
    params = {"a": [torch.ones(2), torch.ones(3)]}
    opt_state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"grads.*missing \['a\.1'\]"):
        call({"a": [torch.ones(2)]}, opt_state, params)
    with pytest.raises(ValueError, match=r"grads: found shape \(4,\) at 'a\.1', expected \(3,\)"):
        call({"a": [torch.ones(2), torch.ones(4)]}, opt_state, params)
    with pytest.raises(TypeError, match=r"grads: found torch\.int64 at 'a\.1'"):
        call({"a": [torch.ones(2), torch.ones(3, dtype=torch.int64)]}, opt_state, params)
    with pytest.raises(TypeError, match=r"grads: found torch\.complex64 at 'a\.1'"):
        call({"a": [torch.ones(2), torch.ones(3, dtype=torch.complex64)]}, opt_state, params)
    with pytest.raises(TypeError, match=r"grads: found float 1\.0 at 'a\.1'"):
        call({"a": [torch.ones(2), 1.0]}, opt_state, params)
    other = fa.adam(0.1) if rule.name == "SGD" else fa.sgd(0.1, 0.9)
    with pytest.raises(TypeError, match=r"opt_state: found .*State, expected .*State"):
        call(params, other.init(params), params)
    if slots_of(opt_state):
        with pytest.raises(ValueError, match=r"opt_state.*extra \['a\.2'\]"):
            call(params, optimizer.init({"a": [torch.ones(2), torch.ones(3), torch.ones(1)]}), params)


def test_updates_that_do_not_fit_are_named():
    params = {"a": torch.ones(2), "b": None}
    with pytest.raises(ValueError, match=r"updates: found shape \(1,\) at 'a'"):
        fa.apply_updates(params, {"a": torch.ones(1), "b": None})
    with pytest.raises(ValueError, match="updates: found a tensor at 'b', expected None"):
        fa.apply_updates(params, {"a": torch.ones(2), "b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"updates.*missing \['b'\]"):
        fa.apply_updates(params, {"a": torch.ones(2)})
