"""States of from_torch from and to dicts of torch: groups by their parameters, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits
from tests.test_from_torch import OPTIM, Numbers, from_torch, schedulefree

PARAMS = {"bias": torch.ones(1), "weight": torch.full((2, 2), 2.0)}
RATES = {"bias": 1.0, "weight": 0.01}
convert: Any = fa.opt_state_from_torch
back: Any = fa.opt_state_to_torch


class Late(Numbers):
    """Its groups get their numbers in the first step."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, lr)
        for group in self.param_groups:
            del group["total"]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            group["total"] = group.get("total", 0.0) + group["lr"]
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["total"])


def trained(cls: Any, updates: int = 1, params: Any = None, **hyper: Any) -> tuple[dict[str, Tensor], Any]:
    """Parameters with names, one optimizer of torch for all, after some updates."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in (PARAMS if params is None else params).items()}
    optimizer = cls(list(leaves.items()), **hyper)
    for number in range(updates):
        update(leaves, optimizer, number)
    return leaves, optimizer


def grouped(cls: Any, updates: int) -> tuple[dict[str, Tensor], Any]:
    """The same with two groups, weights first, each with its rate."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    optimizer = cls([{"params": [(name, leaves[name])], "lr": RATES[name]} for name in ("weight", "bias")])
    if hasattr(optimizer, "train"):
        optimizer.train()
    for number in range(updates):
        update(leaves, optimizer, number)
    return leaves, optimizer


def update(leaves: dict[str, Tensor], optimizer: Any, number: int) -> None:
    for leaf in leaves.values():
        leaf.grad = torch.full_like(leaf, 1.0 - 0.3 * number)
    optimizer.step()


def values(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: leaf.detach().clone() for name, leaf in leaves.items()}


@pytest.mark.parametrize("cls", ["Numbers", "AdamWScheduleFree", "SGDScheduleFree"])
def test_the_numbers_of_groups_go_with_their_parameters_whatever_the_order(cls: str):
    made: Any = Numbers if cls == "Numbers" else schedulefree(cls)()
    optimizer = from_torch(made, groups=lambda path, leaf: {"lr": RATES[path]})
    leaves, loop = grouped(made, 3)
    params = values(leaves)
    state = convert(optimizer.init(params), loop.state_dict(), applied=3)
    for number in range(3, 5):
        update(leaves, loop, number)
        params, state = optimizer.step(
            {name: torch.full_like(leaf, 1.0 - 0.3 * number) for name, leaf in params.items()}, state, params
        )
        assert_same_bits(params, values(leaves))
    moved, other = grouped(made, 0)
    with torch.no_grad():
        for name, leaf in moved.items():
            leaf.copy_(params[name])
    other.load_state_dict(back(state, other))
    update(leaves, loop, 5)
    update(moved, other, 5)
    assert_same_bits(values(moved), values(leaves))


def test_groups_that_can_not_be_matched_are_refused_and_the_remedies_work():
    one, two = (from_torch(Numbers, groups=groups).init(PARAMS) for groups in (None, lambda p, x: {"lr": RATES[p]}))
    with pytest.raises(ValueError, match=r"param_groups: found 2, expected 1 as in opt_state.*the same groups"):
        convert(one, grouped(Numbers, 1)[1].state_dict(), applied=1)
    convert(two, grouped(Numbers, 1)[1].state_dict(), applied=1)
    with pytest.raises(ValueError, match=r"param_groups: found 1, expected 2"):
        back(two, trained(Numbers)[1])
    late = from_torch(Late, groups=lambda p, x: {"lr": RATES[p]}).init(PARAMS)
    with pytest.raises(ValueError, match=r"param_groups: found 2 with numbers, expected one, or a state of each"):
        convert(late, grouped(Late, 1)[1].state_dict(), applied=1)
    late = from_torch(Late).init(PARAMS)
    assert convert(late, trained(Late)[1].state_dict(), applied=1).groups[0]["total"] == 0.1
    assert convert(late, trained(Late, 0)[1].state_dict(), applied=0).groups[0]["total"] == 0.0
    assert back(late, trained(Late, 0)[1])["param_groups"][0]["total"] == 0.0


def init(cls: Any, params: Any = None, **hyper: Any) -> Any:
    return from_torch(cls, **hyper).init(PARAMS if params is None else params)


MORE = {**PARAMS, "z": torch.ones(2)}
IN: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a parameter more": (init, ("NAdam",), {"params": MORE}, r"torch_state: found a state for \['z'\], expected none"),
    "another class": (init, ("Adam", "NAdam"), {}, r"bias: found \['mu_product'\], expected .* alone.*same class"),
    "amsgrad": (init, ("Adam",), {"amsgrad": True}, r"bias: found \['max_exp_avg_sq'\], expected"),
}


@pytest.mark.parametrize("name", IN)
def test_a_dict_of_another_optimizer_is_refused(name: str):
    make, classes, given, message = IN[name]
    with pytest.raises(ValueError, match=message):
        convert(make(getattr(OPTIM, classes[0])), trained(getattr(OPTIM, classes[-1]), **given)[1].state_dict())


def test_the_count_is_as_the_dict_says_or_is_asked_for():
    adam, sgd = trained(OPTIM.Adam, 2)[1].state_dict(), trained(OPTIM.SGD, lr=0.1)[1].state_dict()
    for wrong in (-5, True, 1.0):
        with pytest.raises(ValueError, match=r"applied: found .*expected an int >= 0"):
            convert(init(OPTIM.Adam), adam, applied=wrong)
    for wrong in (1, 7):
        with pytest.raises(ValueError, match=rf"applied: found {wrong}, expected 2 as torch_state says.*leave it out"):
            convert(init(OPTIM.Adam), adam, applied=wrong)
    assert convert(init(OPTIM.Adam), adam).step == 2
    with pytest.raises(ValueError, match=r"applied: found none.*Remedy: pass applied="):
        convert(init(OPTIM.SGD, lr=0.1), sgd)
    assert convert(init(OPTIM.SGD, lr=0.1), sgd, applied=1).step == 1
    assert convert(init(OPTIM.Adam), trained(OPTIM.Adam, 0)[1].state_dict()).step == 0


def test_a_parameter_that_missed_updates_has_its_own_count():
    leaves, optimizer = trained(OPTIM.Adam)
    leaves["bias"].grad = None
    optimizer.step()
    state = convert(init(OPTIM.Adam), optimizer.state_dict())
    assert state.step == 2 and state.state["step"]["bias"] == 1
    with pytest.raises(ValueError, match=r"applied: found 1, expected 2"):
        convert(init(OPTIM.Adam), optimizer.state_dict(), applied=1)
    assert convert(init(OPTIM.Adam), optimizer.state_dict(), applied=5).step == 5  # one in which none had a gradient


def after_a_step(cls: Any, **hyper: Any) -> Any:
    optimizer = from_torch(cls, **hyper)
    return optimizer.step(PARAMS, optimizer.init(PARAMS), PARAMS)[1]


HALF = {name: leaf.half() for name, leaf in PARAMS.items()}
LARGE = {name: torch.ones(3, 3) for name in PARAMS}
OUT: dict[str, tuple[Any, Any, type[Exception], str]] = {
    "half precision": (OPTIM.Adam, lambda: trained(OPTIM.Adam, 0, HALF), ValueError, "exp_avg of bias: .*float16"),
    "other shapes": (OPTIM.Adam, lambda: trained(OPTIM.Adam, 0, LARGE), ValueError, r"exp_avg of bias: .*\(3, 3\)"),
    "another class": (
        OPTIM.Adam,
        lambda: trained(OPTIM.SGD, 0, momentum=0.9),
        TypeError,
        r"bias: found .*'exp_avg'.*expected \['momentum_buffer'\] as SGD keeps it",
    ),
    "amsgrad": (OPTIM.Adam, lambda: trained(OPTIM.Adam, 0, amsgrad=True), TypeError, "'max_exp_avg_sq'.* as Adam"),
    "a parameter more": (OPTIM.NAdam, lambda: trained(OPTIM.NAdam, 0, MORE), ValueError, r"found \['z'\], expected"),
    "a closure": (OPTIM.Adam, lambda: trained(OPTIM.LBFGS, 0), TypeError, "LBFGS, which raised TypeError in a step"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OUT)
def test_an_optimizer_that_keeps_other_things_is_refused(name: str):
    cls, make, error, message = OUT[name]
    params = dict(list(PARAMS.items())[:1]) if name == "a closure" else PARAMS
    optimizer = from_torch(cls)
    state = optimizer.step(params, optimizer.init(params), params)[1]
    theirs = trained(OPTIM.LBFGS, 0, params)[1] if name == "a closure" else make()[1]
    before = theirs.state_dict()
    with pytest.raises(error, match=message):
        back(state, theirs)
    assert str(theirs.state_dict()) == str(before)


@pytest.mark.parametrize("ours", [fa.adam(), from_torch(OPTIM.Adam)])
def test_a_parameter_that_torch_alone_has_is_refused_and_one_that_is_not_trained_is_not(ours: Any):
    state = ours.step(PARAMS, ours.init(PARAMS), PARAMS)[1]
    leaves, theirs = trained(OPTIM.Adam, 0, MORE)
    with pytest.raises(ValueError, match=r"torch_optimizer: found \['z'\], expected the parameters of opt_state alone"):
        back(state, theirs)
    leaves["z"].requires_grad_(False)
    theirs.load_state_dict(back(state, theirs))
    assert set(theirs.state_dict()["state"]) == {0, 1}


@pytest.mark.parametrize("name", ["Adagrad", "Rprop", "NAdam", "RMSprop", "Adafactor"])
def test_the_optimizer_that_is_asked_stays_as_it_was(name: str):
    cls = getattr(OPTIM, name)
    calls: list[Any] = []
    leaves, theirs = trained(cls, 2)
    theirs.register_step_pre_hook(lambda *given: calls.append(given))
    before, generator, params = theirs.state_dict(), torch.get_rng_state(), values(leaves)
    texts, groups = str(before), theirs.param_groups
    written = back(convert(from_torch(cls).init(params), before, applied=2), theirs)
    assert str(written) == str(before) == texts == str(theirs.state_dict())
    assert not calls and theirs.param_groups is groups and torch.equal(torch.get_rng_state(), generator)
    assert_same_bits(values(leaves), params)
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in leaves.values())


def test_a_number_stays_a_number_and_a_tensor_a_tensor():
    params = {"w": torch.tensor(1.0, dtype=torch.float64)}
    leaves, theirs = trained(OPTIM.Adam, 1, params)
    written = back(convert(init(OPTIM.Adam, params), theirs.state_dict()), theirs)
    assert isinstance(written["state"][0]["exp_avg"], Tensor)
    theirs.load_state_dict(written)
    update(leaves, theirs, 1)
    kept = back(convert(init(Numbers), trained(Numbers)[1].state_dict(), applied=1), trained(Numbers, 0)[1])
    assert type(kept["state"][0]["seen"]) is int and type(kept["param_groups"][0]["on"]) is bool


def test_what_is_no_optimizer_and_no_dict_of_one_is_named():
    for wrong in (None, trained(OPTIM.Adam)[1].state_dict()):
        with pytest.raises(TypeError, match=r"torch_optimizer: found (NoneType|dict), expected.*the optimizer itself"):
            back(init(OPTIM.Adam), wrong)
    for template in (init(OPTIM.Adam), fa.adam().init(PARAMS)):
        with pytest.raises(TypeError, match=r"torch_state: found a group without 'params'.*torch_optimizer.state_dict"):
            convert(template, {"state": {}, "param_groups": [{}]})


def test_a_part_of_a_chain_or_a_partition_is_carried_alone_as_the_message_says():
    theirs = trained(OPTIM.AdamW)[1].state_dict()
    message = r"expected the state of sgd.*carry the part alone: opt_state\[-1\], or opt_state\[label\]"
    chained = fa.chain(fa.ema(0.9), fa.adamw()).init(PARAMS)
    with pytest.raises(TypeError, match=message):
        convert(chained, theirs)
    assert convert(chained[-1], theirs).step == 1
    parts = {"torch": from_torch(OPTIM.NAdam), "ours": fa.adamw()}
    parted = fa.partition(parts, lambda path, leaf: "torch" if leaf.ndim > 1 else "ours").init(PARAMS)
    with pytest.raises(TypeError, match=message):
        convert(parted, theirs)
    alone = trained(OPTIM.NAdam, 1, {"weight": PARAMS["weight"]})[1].state_dict()
    assert convert(parted["torch"], alone).step == 1


def test_moments_in_fewer_bits_are_not_rounded_into_and_the_remedy_works():
    theirs = trained(OPTIM.AdamW)[1].state_dict()
    with pytest.raises(
        ValueError, match=r"found torch.float32, expected torch.bfloat16, the state_dtype here.*without"
    ):
        convert(fa.adamw(state_dtype=torch.bfloat16).init(PARAMS), theirs)
    assert convert(fa.adamw().init(PARAMS), theirs).step == 1
