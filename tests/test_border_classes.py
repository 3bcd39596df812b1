"""from_torch with classes that write in unusual ways or hide a state: followed to the bit, or refused by name."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits
from tests.test_from_torch import Loop, from_torch

PARAMS = {"v": torch.ones(2), "w": torch.tensor([1.0, -2.0, 0.5])}
GRADS = [
    {name: torch.full_like(leaf, value) * torch.linspace(1.0, -1.5, leaf.numel()) for name, leaf in PARAMS.items()}
    for value in (1.0, 0.4, 0.3, -0.2, 1.0, 0.1)
]


class Plain(torch.optim.Optimizer):
    """Descends; the subclasses say how."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.made()

    def made(self) -> None: ...

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.begin()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, group)

    def begin(self) -> None: ...

    def one(self, p: Any, group: dict[str, Any]) -> None:
        p.sub_(group["lr"] * self.factor(p, group) * p.grad)

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return 1.0


def loss_fn(params: Any, x: Any) -> Tensor:
    """Its gradients are `x`."""
    return (params["v"] * x["v"]).sum() + (params["w"] * x["w"]).sum()


def counted(optimizer: Any, p: Any) -> int:
    """Counts the updates of a parameter in its state."""
    state = optimizer.state[p]
    state["step"] = state.get("step", 0) + 1
    return state["step"]


# Followed


class AssignsData(Plain):
    def one(self, p: Any, group: dict[str, Any]) -> None:
        momentum = self.state[p].setdefault("m", torch.zeros_like(p))
        momentum.mul_(0.9).add_(p.grad)
        p.data = p.data - group["lr"] * momentum


class Sets(Plain):
    def one(self, p: Any, group: dict[str, Any]) -> None:
        p.set_(p - group["lr"] * p.grad)


class AsksForGrad(Plain):
    def one(self, p: Any, group: dict[str, Any]) -> None:
        if p.requires_grad and p.is_leaf:
            p.sub_(p.grad, alpha=group["lr"] / counted(self, p))


class WithoutNoGrad(Plain):
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("m", torch.zeros_like(p.data))
                momentum.mul_(0.9).add_(p.grad + 0.1 * p.detach())
                p.data.sub_(momentum, alpha=group["lr"])


class WrapsItsStep(Plain):
    def made(self) -> None:
        inner = self.step
        self.step: Any = lambda closure=None: inner(closure)

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return 1 / counted(self, p)


class DecoratesItsStep(Plain):
    def made(self) -> None:
        self.step: Any = torch.enable_grad()(self.step)


class KeepsAMethod(Plain):
    def made(self) -> None:
        self.rule = self.counting

    def counting(self, p: Any) -> float:
        return 1 / counted(self, p)

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return self.rule(p)


class RateOfEachStep(Plain):
    """The remedy for a number of a group that changes late: it is assigned in each step."""

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        group["lr"] = group["lr"] * (0.1 if counted(self, p) == 3 else 1.0)
        return 1.0


FOLLOWED = [
    AssignsData,
    Sets,
    AsksForGrad,
    WithoutNoGrad,
    WrapsItsStep,
    DecoratesItsStep,
    KeepsAMethod,
    RateOfEachStep,
]


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("cls", FOLLOWED)
def test_a_class_that_writes_in_its_own_way_has_the_bits_of_the_loop(cls: Any, donate: bool):
    loop = Loop(cls, PARAMS, {"lr": 0.1})
    for leaf in loop.params.values():
        leaf.requires_grad_()
    step = fa.make_step(loss_fn, from_torch(cls, lr=0.1), donate=donate)
    state = fa.init_state(PARAMS, step.optimizer, fa.NoScale())
    for grads in GRADS:
        state, _ = step(state, [grads])
        loop.step(grads)
        assert_same_bits(state.params, {name: leaf.detach() for name, leaf in loop.params.items()})
    assert not any(leaf.requires_grad for leaf in state.params.values())


@pytest.mark.parametrize("cls", FOLLOWED)
def test_two_runs_with_one_optimizer_know_nothing_of_each_other(cls: Any):
    optimizer = from_torch(cls, lr=0.1)
    runs = [(PARAMS, optimizer.init(PARAMS)) for _ in range(2)]
    for grads in GRADS[:3]:
        runs = [optimizer.step(grads, state, params) for params, state in runs]
    assert_same_bits(*runs)


def test_threads_take_turns_at_one_optimizer():
    from concurrent.futures import ThreadPoolExecutor

    optimizer = from_torch(AssignsData, lr=0.1)
    state = optimizer.init(PARAMS)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: optimizer.step(GRADS[number % 2], state, PARAMS), range(40)))
    for number, result in enumerate(found):
        assert_same_bits(result, optimizer.step(GRADS[number % 2], state, PARAMS))


# Refused from init


class Count:
    n = 0


class InAList(Plain):
    def made(self) -> None:
        self.count: Any = [0]

    def begin(self) -> None:
        self.count[0] += 1


class InADict(Plain):
    def made(self) -> None:
        self.count: dict[str, int] = {}

    def begin(self) -> None:
        self.count["n"] = self.count.get("n", 0) + 1


class InADeque(Plain):
    def made(self) -> None:
        self.count: Any = collections.deque(maxlen=2)

    def begin(self) -> None:
        self.count.append(1)


class InAnObject(Plain):
    def made(self) -> None:
        self.count = Count()

    def begin(self) -> None:
        self.count.n += 1


class InAFunction(Plain):
    def made(self) -> None:
        n = 0

        def count() -> None:
            nonlocal n
            n += 1

        self.count = count

    def begin(self) -> None:
        self.count()


class InASlot(Plain):
    __slots__ = ("count",)

    def made(self) -> None:
        self.count = 0

    def begin(self) -> None:
        self.count += 1


class InTheClass(Plain):
    count = 0

    def begin(self) -> None:
        type(self).count += 1


class InAGenerator(Plain):
    def made(self) -> None:
        self.count = torch.Generator().manual_seed(0)

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return torch.rand((), generator=self.count)


class InPythonsGenerator(Plain):
    def made(self) -> None:
        self.count = random.Random(0)

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return self.count.random()


class InDefaults(Plain):
    def begin(self) -> None:
        self.defaults["count"] = self.defaults.get("count", 0) + 1


class InAListOfAGroup(Plain):
    def made(self) -> None:
        for group in self.param_groups:
            group["count"] = [0]

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        group["count"][0] += 1
        return 1 / group["count"][0]


class ById(Plain):
    def made(self) -> None:
        self.count = {id(p): 2.0 for group in self.param_groups for p in group["params"]}

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return self.count.get(id(p), 1.0)


class ByParameter(Plain):
    def made(self) -> None:
        self.count = {p: 2.0 for group in self.param_groups for p in group["params"]}

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return self.count.get(p, 1.0)


class InAnIterator(Plain):
    def made(self) -> None:
        self.count = (1 / n for n in range(1, 100))

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        return next(self.count)


HIDING: list[Any] = [
    InAList,
    InADict,
    InADeque,
    InAnObject,
    InAFunction,
    InASlot,
    InTheClass,
    InAGenerator,
    InPythonsGenerator,
    InDefaults,
    InAListOfAGroup,
    ById,
    ByParameter,
    InAnIterator,
]


@pytest.mark.parametrize("cls", HIDING)
def test_a_class_that_hides_a_state_is_refused_at_init(cls: Any):
    with pytest.raises(
        TypeError, match=rf"from_torch: found .*'(\w+\.)?(count|defaults)'.*{cls.__name__}.*Write an Opt"
    ):
        from_torch(cls).init(PARAMS)


# Refused where it shows


class RateFalls(Plain):
    late = 5

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        if counted(self, p) == self.late:
            group["lr"] *= 0.5
        return 1.0


class AttributeFalls(RateFalls):
    def made(self) -> None:
        self.rate = 1.0

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        if counted(self, p) == self.late:
            self.rate = 0.1
        return self.rate


class ListGrows(RateFalls):
    def made(self) -> None:
        self.seen: list[int] = []

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        if counted(self, p) == self.late:
            self.seen.append(1)
        return 1 / (1 + len(self.seen))


class EntryGrows(RateFalls):
    def made(self) -> None:
        for group in self.param_groups:
            group["seen"] = []

    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        if counted(self, p) == self.late:
            group["seen"].append(1)
        return 1 / (1 + len(group["seen"]))


class EntryComes(RateFalls):
    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        if counted(self, p) == self.late:
            group["new"] = 3.0
        return group.get("new", 1.0)


class AttributeComes(RateFalls):
    def factor(self, p: Any, group: dict[str, Any]) -> Any:
        if counted(self, p) == self.late:
            self.new = 3.0
        return getattr(self, "new", 1.0)


LATE: dict[Any, str] = {
    RateFalls: "an entry 'lr' of a group.*Let its step assign the entry in each update",
    AttributeFalls: "an attribute 'rate'",
    ListGrows: "an attribute 'seen'",
    EntryGrows: "an entry 'seen' of a group",
    EntryComes: "an entry 'new' of a group",
    AttributeComes: "an attribute 'new'",
}


@pytest.mark.parametrize("cls", LATE)
def test_what_a_class_changes_late_is_refused_at_that_update_and_after(cls: Any):
    optimizer = from_torch(cls, lr=0.1)
    loop, params, state = Loop(cls, PARAMS, {"lr": 0.1}), PARAMS, optimizer.init(PARAMS)
    for grads in GRADS[:4]:
        params, state = optimizer.step(grads, state, params)
        loop.step(grads)
        assert_same_bits(params, loop.params)
    for _ in range(2):
        with pytest.raises(TypeError, match=f"from_torch: found {LATE[cls]}"):
            optimizer.step(GRADS[4], state, params)


def test_a_schedule_of_an_entry_that_the_class_assigns_is_refused():
    with pytest.raises(TypeError, match="a schedule of 'lr', which each step of the class assigns"):
        from_torch(RateOfEachStep, lr=fa.linear(1.0, 0.5, 4)).init(PARAMS)
    from_torch(RateOfEachStep, lr=1.0).init(PARAMS)


def test_other_shapes_in_place_of_a_parameter_are_refused():
    class Narrows(Plain):
        def one(self, p: Any, group: dict[str, Any]) -> None:
            p.data = (p.data - group["lr"] * p.grad).half()

    optimizer: Callable[..., Any] = from_torch(Narrows).step
    with pytest.raises(TypeError, match=r"float16 of shape .* in place of a parameter of torch.float32"):
        optimizer(GRADS[0], from_torch(Narrows).init(PARAMS), PARAMS)


def test_parameters_and_state_share_no_memory_with_the_optimizer():
    optimizer = from_torch(AssignsData)
    params, state = optimizer.step(GRADS[0], optimizer.init(PARAMS), PARAMS)
    places = [leaf.data_ptr() for leaf in (*params.values(), *state.state["m"].values()) if isinstance(leaf, Tensor)]
    again, state = optimizer.step(GRADS[1], state, params)
    places += [leaf.data_ptr() for leaf in (*again.values(), *state.state["m"].values())]
    assert len(set(places)) == len(places)
