"""GradScaler's and torch.optim's dicts: runs that change sides go on as torch's own; the rest is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_amp as fa
from tests.models import Transformer
from tests.test_checkpoint import bits

CPU = "cpu"


# GradScaler


@given(st.lists(st.booleans(), max_size=12), st.lists(st.booleans(), max_size=12), st.integers(1, 4))
def test_a_grad_scaler_goes_on_here_and_back(before: list[bool], after: list[bool], interval: int) -> None:
    """The oracle is one GradScaler that sees all the overflows."""
    options = {"init_scale": 2.0**10, "growth_factor": 1.5, "backoff_factor": 0.25, "growth_interval": interval}
    whole, first, last = (torch.amp.GradScaler(CPU, **options) for _ in range(3))
    run(whole, before + after + before)
    run(first, before)
    scaler = fa.DynamicScale.from_state_dict(first.state_dict())
    for overflow in after:
        scaler = fa.update_scale(scaler, torch.tensor(not overflow))
    last.load_state_dict(scaler.state_dict())
    run(last, before)
    assert last.state_dict() == whole.state_dict()


def run(scaler: torch.amp.GradScaler, overflows: list[bool]) -> None:
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    for overflow in overflows:
        parameter.grad = scaler.scale(torch.tensor([math.inf if overflow else 1.0]))
        scaler.step(optimizer)
        scaler.update()


def test_a_dict_that_is_not_a_grad_scalers_is_refused() -> None:
    good = torch.amp.GradScaler(CPU).state_dict()
    with pytest.raises(TypeError, match=r"state: found GradScaler, .*Remedy: pass scaler.state_dict\(\)"):
        fa.DynamicScale.from_state_dict(cast(Any, torch.amp.GradScaler(CPU)))
    with pytest.raises(
        ValueError, match=r"state: found an empty dict, which a disabled GradScaler .*Remedy: use NoScale"
    ):
        fa.DynamicScale.from_state_dict(torch.amp.GradScaler(CPU, enabled=False).state_dict())
    with pytest.raises(ValueError, match=r"state: found the keys \['cur_scale'\], expected .*Remedy"):
        fa.DynamicScale.from_state_dict({"cur_scale": 1.0})
    for scale in (0.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="scale: found"):
            fa.DynamicScale.from_state_dict({**good, "scale": scale})


REFUSED: dict[str, tuple[fa.DynamicScale, Any]] = {
    "hysteresis": (fa.DynamicScale(hysteresis=2), 1),
    "growth_delay": (fa.DynamicScale(growth_delay=1), 0),
    "min_scale": (fa.DynamicScale(min_scale=1.0), torch.finfo(torch.float32).tiny),
    "max_scale": (fa.DynamicScale(max_scale=2.0**24), math.inf),
    "hysteresis_tracker": (fa.DynamicScale(hysteresis_tracker=2), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_grad_scaler_does_not_have_is_refused_and_the_remedy_works(name: str) -> None:
    scaler, remedy = REFUSED[name]
    with pytest.raises(ValueError, match=rf"{name}: found .*expected.*Remedy: dataclasses.replace\(scaler, {name}="):
        scaler.state_dict()
    replaced = dataclasses.replace(scaler, **{name: remedy})
    if name == "hysteresis":
        replaced = dataclasses.replace(replaced, hysteresis_tracker=None)
    torch.amp.GradScaler(CPU).load_state_dict(replaced.state_dict())


# torch.optim

Build = Callable[[Any], torch.optim.Optimizer]
RULES: dict[str, tuple[Build, Callable[[], fa.Optimizer]]] = {
    "sgd": (lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.1), lambda: fa.sgd(0.1, weight_decay=0.1)),
    "momentum": (lambda p: torch.optim.SGD(p, 0.1, 0.9), lambda: fa.sgd(0.1, 0.9)),
    "nesterov": (lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True), lambda: fa.sgd(0.1, 0.9, nesterov=True)),
    "dampening": (lambda p: torch.optim.SGD(p, 0.1, 0.9, dampening=0.5), lambda: fa.sgd(0.1, 0.9, dampening=0.5)),
    "adam": (lambda p: torch.optim.Adam(p, 0.1, weight_decay=0.1), lambda: fa.adam(0.1, weight_decay=0.1)),
    "adamw": (lambda p: torch.optim.AdamW(p, 0.1), lambda: fa.adamw(0.1)),
}


def model_of(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def gradients(model: nn.Module, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def torch_updates(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    for number in numbers:
        for name, parameter in model.named_parameters():
            parameter.grad = gradients(model, number)[name]
        optimizer.step()


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    state = optimizer.state_dict()["state"]
    return [bits({key: value for key, value in state[index].items() if value is not None}) for index in sorted(state)]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("during", [0, 2])
@pytest.mark.parametrize("rule", RULES)
def test_a_run_goes_on_here_and_back_bit_for_bit(rule: str, before: int, during: int, named: bool) -> None:
    """The oracle is one torch.optim optimizer that does all the updates, unfused: the order of operations here."""
    build, ours = RULES[rule]
    whole, moved, back = (model_of() for _ in range(3))

    def torch_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build(model.named_parameters() if named else model.parameters())
        for group in optimizer.param_groups:
            group["foreach"] = False
        return optimizer

    names = None if named else [name for name, _ in moved.named_parameters()]
    whole_optimizer, moved_optimizer, back_optimizer = (torch_optimizer(model) for model in (whole, moved, back))
    torch_updates(whole, whole_optimizer, range(before + during + 2))
    torch_updates(moved, moved_optimizer, range(before))

    params, optimizer = copy_of(moved), ours()
    applied = before if rule in ("sgd", "momentum", "nesterov", "dampening") else None
    theirs = moved_optimizer.state_dict()
    opt_state = fa.opt_state_from_torch(optimizer.init(params), theirs, names, applied=applied)
    assert opt_state.step.item() == before and opt_state.step.dtype == torch.int32
    assert optimizer.step is not None
    for number in range(before, before + during):
        params, opt_state = optimizer.step(gradients(moved, number), opt_state, params)

    back.load_state_dict(params)
    back_optimizer.load_state_dict(fa.opt_state_to_torch(opt_state, back_optimizer, names))
    torch_updates(back, back_optimizer, range(before + during, before + during + 2))
    assert bits(copy_of(back)) == bits(copy_of(whole))
    assert states_of(back_optimizer) == states_of(whole_optimizer)


def test_groups_are_the_labels_of_a_partition() -> None:
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        decay = {name: p for name, p in named.items() if p.dim() > 1}
        plain = {name: p for name, p in named.items() if p.dim() == 1 and name != "1.bias"}
        return torch.optim.AdamW(
            [
                {"params": list(decay.items()), "weight_decay": 0.5},
                {"params": list(plain.items()), "weight_decay": 0.0, "lr": 0.05},
            ],
            lr=0.1,
            foreach=False,
        )

    optimizer = fa.partition(
        {"decay": fa.adamw(0.1, weight_decay=0.5), "plain": fa.adamw(0.05, weight_decay=0.0), "frozen": None},
        lambda path, leaf: "decay" if leaf.dim() > 1 else "frozen" if path == "1.bias" else "plain",
    )
    whole, moved, back = (model_of() for _ in range(3))
    whole_optimizer, moved_optimizer, back_optimizer = grouped(whole), grouped(moved), grouped(back)
    torch_updates(whole, whole_optimizer, range(6))
    torch_updates(moved, moved_optimizer, range(2))
    params = copy_of(moved)
    opt_state = fa.opt_state_from_torch(optimizer.init(params), moved_optimizer.state_dict())
    assert optimizer.step is not None
    for number in range(2, 4):
        params, opt_state = optimizer.step(gradients(moved, number), opt_state, params)
    back.load_state_dict(params)
    written = fa.opt_state_to_torch(opt_state, back_optimizer)
    back_optimizer.load_state_dict(written)
    torch_updates(back, back_optimizer, range(4, 6))
    assert bits(copy_of(back)) == bits(copy_of(whole))
    assert states_of(back_optimizer) == states_of(whole_optimizer)
    assert [group["weight_decay"] for group in written["param_groups"]] == [0.5, 0.0]


def test_tied_weights_have_one_state_by_the_name_that_both_use() -> None:
    model = Transformer()
    _, params, _ = fa.from_module(model)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.zeros(1, 3, dtype=torch.int64)).sum().backward()
    optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    state = fa.opt_state_from_torch(fa.adam().init(params), optimizer.state_dict(), names)
    assert torch.equal(state.exp_avg["embedding.weight"], optimizer.state[model.embedding.weight]["exp_avg"])


def test_results_share_no_storage() -> None:
    model = model_of()
    theirs = torch.optim.Adam(model.named_parameters())
    torch_updates(model, theirs, range(1))
    template = fa.adam().init(copy_of(model))
    ours = fa.opt_state_from_torch(template, theirs.state_dict())
    back = fa.opt_state_to_torch(ours, theirs)
    trees = [ours.exp_avg, template.exp_avg, {i: s["exp_avg"] for i, s in back["state"].items()}]
    trees.append({i: s["exp_avg"] for i, s in theirs.state_dict()["state"].items()})
    places = [leaf.data_ptr() for tree in trees for leaf in tree.values()]
    assert len(set(places)) == len(places)


def test_half_precision_is_widened_and_never_rounded() -> None:
    model = model_of().bfloat16()
    theirs = torch.optim.Adam(model.named_parameters(), foreach=False)
    torch_updates(model, theirs, range(0))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    ours = fa.opt_state_from_torch(fa.adam().init(copy_of(model)), theirs.state_dict())
    assert ours.exp_avg["0.bias"].dtype == torch.float32
    assert torch.equal(ours.exp_avg["0.bias"].bfloat16(), theirs.state_dict()["state"][1]["exp_avg"])
    with pytest.raises(ValueError, match=r"exp_avg of 0.bias: found torch.float32 .*expected torch.bfloat16.*Remedy"):
        fa.opt_state_to_torch(ours, theirs)
    wide = torch.optim.Adam(model.float().named_parameters())  # the remedy
    wide.load_state_dict(fa.opt_state_to_torch(ours, wide))


def stepped(build: Build) -> tuple[nn.Module, dict[str, Any]]:
    model = model_of()
    optimizer = build(model.named_parameters())
    torch_updates(model, optimizer, range(2))
    return model, optimizer.state_dict()


def test_amsgrad_and_maximize_are_refused() -> None:
    for flag in ("amsgrad", "maximize"):
        model, state = stepped(
            lambda p, flag=flag: torch.optim.Adam(p, amsgrad=flag == "amsgrad", maximize=flag == "maximize")
        )
        with pytest.raises(ValueError, match=rf"{flag}: found True, expected False.*Remedy"):
            fa.opt_state_from_torch(fa.adam().init(copy_of(model)), state)
        with pytest.raises(ValueError, match=rf"{flag}: found True, expected False.*Remedy"):
            theirs = torch.optim.Adam(model.named_parameters(), amsgrad=flag == "amsgrad", maximize=flag == "maximize")
            fa.opt_state_to_torch(fa.adam().init(copy_of(model)), theirs)


def test_differing_step_counts_are_refused_and_a_partition_carries_them() -> None:
    model = model_of()
    theirs = torch.optim.Adam(model.named_parameters())
    for names in (["0.bias"], ["0.bias", "0.weight"]):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.ones_like(parameter) if name in names else None
        theirs.step()
    params = copy_of(model)
    with pytest.raises(
        ValueError, match=r"step: found \{'0.bias': 2, '0.weight': 1, '1.bias': 0.*expected one count.*Remedy"
    ):
        fa.opt_state_from_torch(fa.adam().init(params), theirs.state_dict())
    labels = {"0.bias": "two", "0.weight": "one"}
    optimizer = fa.partition(
        {name: fa.adam() for name in ("two", "one", "none")}, lambda path, leaf: labels.get(path, "none")
    )
    state = fa.opt_state_from_torch(optimizer.init(params), theirs.state_dict())
    assert {name: part.step.item() for name, part in state.items()} == {"two": 2, "one": 1, "none": 0}


def test_states_of_another_rule_are_refused() -> None:
    model, sgd_state = stepped(lambda p: torch.optim.SGD(p, 0.1, 0.9))
    params = copy_of(model)
    with pytest.raises(
        TypeError, match=r"0.bias: found \['momentum_buffer'\], expected \['exp_avg', 'exp_avg_sq'\].*Remedy"
    ):
        fa.opt_state_from_torch(fa.adam().init(params), sgd_state)
    with pytest.raises(ValueError, match=r"torch_state: found a state for \['0.weight', .*Remedy"):
        fa.opt_state_from_torch(fa.sgd(0.1).init(params), sgd_state, applied=2)
    with pytest.raises(
        TypeError, match=r"torch_optimizer: found RMSprop, expected torch.optim.SGD, Adam or AdamW.*Remedy"
    ):
        fa.opt_state_to_torch(fa.adam().init(params), torch.optim.RMSprop(model.parameters()))
    with pytest.raises(TypeError, match=r"opt_state: found AdamState, expected SGDState for SGD.*Remedy"):
        fa.opt_state_to_torch(fa.adam().init(params), torch.optim.SGD(model.named_parameters(), 0.1))
    for state in ({"m": torch.ones(1)}, [torch.ones(1)]):
        with pytest.raises(TypeError, match=r"opt_state: found Tensor, expected the state of sgd.*Remedy"):
            fa.opt_state_from_torch(state, sgd_state)
    with pytest.raises(TypeError, match=r"torch_state: found SGD, expected the dict .*Remedy"):
        fa.opt_state_from_torch(fa.sgd(0.1).init(params), cast(Any, torch.optim.SGD(model.parameters(), 0.1)))


def test_sgd_needs_the_count_that_its_dict_does_not_have() -> None:
    model, state = stepped(lambda p: torch.optim.SGD(p, 0.1, 0.9))
    template = fa.sgd(0.1, 0.9).init(copy_of(model))
    for applied, found in ((None, "none"), (0, r"0 with momentum buffers of \['0.bias'")):
        with pytest.raises(
            ValueError, match=rf"applied: found {found}.*expected the number of updates.*Remedy: pass applied"
        ):
            fa.opt_state_from_torch(template, state, applied=applied)
    for bad in (-1, 2.0, True):
        with pytest.raises(ValueError, match=r"applied: found .*expected an int >= 0.*Remedy"):
            fa.opt_state_from_torch(template, state, applied=cast(Any, bad))
    assert fa.opt_state_from_torch(template, state, applied=2).step.item() == 2
    model, state = stepped(torch.optim.Adam)
    with pytest.raises(ValueError, match=r"applied: found 3, expected 2 as torch_state says. Remedy: leave it out"):
        fa.opt_state_from_torch(fa.adam().init(copy_of(model)), state, applied=3)


def test_a_buffer_that_has_not_begun_is_refused_with_dampening_and_zero_without() -> None:
    for dampening in (0.0, 0.5):
        model = model_of()
        theirs = torch.optim.SGD(model.named_parameters(), 0.1, 0.9, dampening=dampening)
        dict(model.named_parameters())["0.bias"].grad = torch.ones(4)
        theirs.step()
        template = fa.sgd(0.1, 0.9, dampening=dampening).init(copy_of(model))
        if dampening:
            with pytest.raises(ValueError, match=r"momentum_buffer: found none for \['0.weight', .*Remedy"):
                fa.opt_state_from_torch(template, theirs.state_dict(), applied=1)
        else:
            state = fa.opt_state_from_torch(template, theirs.state_dict(), applied=1)
            assert state.momentum_buffer["0.bias"].eq(1).all() and state.momentum_buffer["1.bias"].eq(0).all()


def test_names_and_shapes_that_do_not_fit_are_refused() -> None:
    model, state = stepped(torch.optim.Adam)
    params = copy_of(model)
    template, names = fa.adam().init(params), [name for name, _ in model.named_parameters()]
    for wrong in (names[:3], [*names[:3], names[0]], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"names: found \d .*expected 4 different names.*Remedy"):
            fa.opt_state_from_torch(template, state, cast(Any, wrong))
    with pytest.raises(ValueError, match=r"torch_state: found a state for \['head'\].*Remedy"):
        fa.opt_state_from_torch(template, state, [*names[:3], "head"])
    with pytest.raises(ValueError, match=r"names: found no \['extra'\], expected each path in params.*Remedy"):
        fa.opt_state_from_torch(fa.adam().init({**params, "extra": torch.ones(1)}), state)
    with pytest.raises(ValueError, match=r"names: found no 'extra', expected each path in params.*Remedy"):
        fa.opt_state_to_torch(
            fa.adam().init({**params, "extra": torch.ones(1)}), torch.optim.Adam(model.named_parameters())
        )
    with pytest.raises(ValueError, match=r"exp_avg of 0.bias: found torch.float32 of shape \(4, 3\), .*\(4,\).*Remedy"):
        fa.opt_state_from_torch(template, state, [names[1], names[0], *names[2:]])
    anonymous = torch.optim.Adam(model.parameters()).state_dict()
    with pytest.raises(ValueError, match=r"names: found 0 .*expected 4 different names"):
        fa.opt_state_from_torch(template, anonymous)
    assert fa.opt_state_from_torch(template, anonymous, names).step.item() == 0
