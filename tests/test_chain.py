"""chain and its members, against torch, the published formulas and optax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.testing import assert_same_bits, check_optimizer, mapped

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def tree(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"bias": (3,), "conv": (4, 3, 2, 2), "linear": (4, 3), "scale": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def loss_fn(params: Any, batch: Any) -> Tensor:
    return sum(((params[name] * batch) ** 2).sum() for name in params)  # pyright: ignore[reportReturnType]


CHAINS: dict[str, Any] = {
    "clip_by_value": lambda: fa.chain(fa.clip_by_value(0.5), fa.adamw(0.1)),
    "adaptive_clip": lambda: fa.chain(fa.adaptive_clip(0.1), fa.sgd(0.1, momentum=0.9)),
    "ema": lambda: fa.chain(fa.ema(0.9), fa.adamw(0.1)),
    "all": lambda: fa.chain(fa.clip_by_value(0.5), fa.ema(fa.linear(0.5, 0.9, 3)), fa.adaptive_clip(), fa.adam(0.1)),
    "of a partition": lambda: fa.chain(
        fa.clip_by_value(1.0), fa.partition({"a": fa.sgd(0.1), "b": None}, lambda path, leaf: "ab"[leaf.ndim == 0])
    ),
    "of a torch.optim class": lambda: fa.chain(
        fa.clip_by_value(1.0), fa.ema(0.5), fa.from_torch(torch.optim.SGD, lr=0.1)
    ),
    "of nothing": lambda: fa.chain(fa.sgd(0.1)),
}


LAWFUL = [name for name in CHAINS if name != "of a torch.optim class"]  # that updates halves in their own dtype
QUICK = ("all", "of nothing")


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in QUICK)) for n in LAWFUL])
def test_a_chain_keeps_the_laws_of_an_optimizer(name: str):
    check_optimizer(CHAINS[name](), compiled=False)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("name", "donate"), [*((name, True) for name in CHAINS), ("all", False)])
def test_a_compiled_chain_has_the_values_of_eager_mode(name: str, donate: bool):
    optimizer, params = CHAINS[name](), tree(0)
    eager = fa.make_step(loss_fn, optimizer)
    compiled = fa.make_step(loss_fn, optimizer, donate=donate, compile={"backend": "aot_eager"})
    expected, state = (fa.init_state(params, optimizer, fa.DynamicScale(8.0)) for _ in range(2))
    for factor in (1.0, math.inf, 2.0):
        expected, _ = eager(expected, [torch.tensor(factor)])
        state, _ = compiled(state, [torch.tensor(factor)])
    mapped(lambda a, b: torch.testing.assert_close(a, b), state.params, expected.params)
    mapped(lambda a, b: torch.testing.assert_close(a, b), state.opt_state, expected.opt_state)


@pytest.mark.parametrize("name", CHAINS)
def test_a_donated_chain_writes_in_place_and_has_the_bits_of_the_pure_one(name: str):
    optimizer = CHAINS[name]()
    pure, donated = (fa.make_step(loss_fn, optimizer, donate=donate) for donate in (False, True))
    expected, state = (fa.init_state(tree(0), optimizer, fa.DynamicScale(8.0)) for _ in range(2))
    places = mapped(Tensor.data_ptr, state.params)
    for factor in (1.0, math.inf, 2.0):
        expected, _ = pure(expected, [torch.tensor(factor)])
        state, _ = donated(state, [torch.tensor(factor)])
        assert_same_bits(state, expected)
    assert {n: state.params[n].data_ptr() for n in ("conv", "linear")} == {n: places[n] for n in ("conv", "linear")}


def test_a_chain_has_the_bits_of_its_optimizer_on_the_changed_gradients():
    alone = fa.adamw(0.1)
    optimizer, params = fa.chain(fa.clip_by_value(0.5), alone), tree(0)
    grads = fa.ScaledGrads(mapped(lambda leaf: 8 * leaf, tree(1)), 8.0)
    found = fa.maybe_step(optimizer, params, optimizer.init(params), grads, GOOD)
    clipped = mapped(lambda leaf: leaf.clamp(-0.5, 0.5), tree(1))
    expected = fa.maybe_step(alone, params, alone.init(params), clipped, GOOD)
    assert_same_bits(found.params, expected.params)
    assert_same_bits(found.opt_state[1], expected.opt_state)


def test_units_are_left_to_the_optimizer_where_no_member_changes_gradients():
    alone = fa.adamw(0.1)
    optimizer, params = fa.chain(fa.ema(0.9), alone), tree(0)
    grads = fa.ScaledGrads(mapped(lambda leaf: 3 * leaf, tree(1)), 3.0)  # a division that rounds
    found = fa.maybe_step(optimizer, params, optimizer.init(params), grads, GOOD)
    assert_same_bits(found.params, fa.maybe_step(alone, params, alone.init(params), grads, GOOD).params)


# Members


def test_clip_by_value_is_torchs_clip_grad_value():
    grads = {**tree(0), "complex": torch.complex(torch.tensor([3.0, -0.2]), torch.tensor([-4.0, 0.1]))}
    found, _ = fa.clip_by_value(0.5).update(grads, (), None)  # pyright: ignore[reportOptionalCall]
    leaves = {name: nn.Parameter(torch.zeros_like(leaf)) for name, leaf in grads.items()}
    for name, leaf in leaves.items():
        leaf.grad = grads[name].clone()
    real = [leaf for leaf in leaves.values() if not leaf.is_complex()]
    nn.utils.clip_grad_value_(real, 0.5)
    assert_same_bits({n: found[n] for n in tree(0)}, {n: leaves[n].grad for n in tree(0)})
    assert found["complex"].tolist() == [0.5 - 0.5j, pytest.approx(-0.2 + 0.1j)]


def brock(grad: Tensor, weight: Tensor, clipping: float, eps: float) -> Tensor:
    """Equation 3 of Brock et al. 2021, unit by unit."""
    if grad.ndim <= 1:
        ratio = grad.norm() / max(weight.norm().item(), eps)
        return clipping * grad / ratio if ratio > clipping else grad
    return torch.stack(
        [brock(g.flatten(), w.flatten(), clipping, eps).view_as(g) for g, w in zip(grad, weight, strict=True)]
    )


@pytest.mark.parametrize("clipping", [0.01, 1.0, 100.0])
def test_adaptive_clip_is_the_published_formula(clipping: float):
    params, grads = {**tree(0), "zero": torch.zeros(2, 2)}, {**tree(1), "zero": torch.ones(2, 2)}
    found, _ = fa.adaptive_clip(clipping).update(grads, (), params)  # pyright: ignore[reportOptionalCall]
    for name, grad in grads.items():
        torch.testing.assert_close(found[name], brock(grad, params[name], clipping, 1e-3))
        if clipping == 100.0 and name != "zero":
            assert torch.equal(found[name], grad)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adaptive_clip_is_optaxs():
    optax, numpy = pytest.importorskip("optax"), pytest.importorskip("numpy")
    params, grads = tree(0), tree(1)
    found, _ = fa.adaptive_clip(0.1).update(grads, (), params)  # pyright: ignore[reportOptionalCall]

    def outputs_last(leaf: Tensor) -> Any:  # as flax keeps them: (in, out) and (in, height, width, out)
        return numpy.asarray(leaf.movedim(0, -1) if leaf.ndim > 1 else leaf)

    theirs = {"p": mapped(outputs_last, params), "g": mapped(outputs_last, grads)}
    clipped, _ = optax.adaptive_grad_clip(0.1).update(theirs["g"], optax.EmptyState(), theirs["p"])
    for name, leaf in clipped.items():
        leaf = torch.tensor(numpy.asarray(leaf))
        leaf = leaf.movedim(-1, 0) if leaf.ndim > 1 else leaf
        torch.testing.assert_close(found[name], leaf)


def test_noise_has_its_spread_and_is_fixed_by_a_seed():
    params = {"w": torch.zeros(20_000)}
    optimizer = fa.chain(fa.add_noise(lambda count: 0.5 / (1 + count)), fa.sgd(1.0))
    step = fa.make_step(lambda p, x: (p["w"] * x).sum(), optimizer)
    state = fa.init_state(params, optimizer, fa.StaticScale(8.0))
    first, _ = step(state, [torch.tensor(0.0)], seed=1)
    again, _ = step(state, [torch.tensor(0.0)], seed=1)
    other, _ = step(state, [torch.tensor(0.0)], seed=2)
    assert torch.equal(first.params["w"], again.params["w"]) and not torch.equal(first.params["w"], other.params["w"])
    assert first.params["w"].std().item() == pytest.approx(0.5, rel=0.03)  # in true units: the scale is 8
    skipped, _ = step(first, [torch.tensor(math.inf)], seed=3)
    assert_same_bits(skipped.opt_state, first.opt_state)
    second, _ = step(first, [torch.tensor(0.0)], seed=4)
    assert (second.params["w"] - first.params["w"]).std().item() == pytest.approx(0.25, rel=0.03)


def test_ema_is_torchs_averaged_model_and_moves_on_applied_windows_only():
    params = tree(0)
    module = nn.ParameterDict({name: nn.Parameter(leaf.clone()) for name, leaf in params.items()})
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(module)  # the first call copies
    optimizer, loop = fa.chain(fa.ema(0.9), fa.sgd(0.1)), torch.optim.SGD(module.parameters(), 0.1, foreach=False)
    state = optimizer.init(params)
    for seed in range(1, 4):
        params, state = fa.maybe_step(optimizer, params, state, tree(seed), GOOD)
        params, state = fa.maybe_step(optimizer, params, state, mapped(lambda g: g * math.nan, tree(seed)), BAD)
        for name, leaf in module.items():
            leaf.grad = tree(seed)[name]
        loop.step()
        averaged.update_parameters(module)
        for name, leaf in averaged.module.items():  # pyright: ignore
            torch.testing.assert_close(state[0].average[name], leaf.detach(), rtol=1e-6, atol=1e-7)


def test_ema_is_float32_whatever_the_parameters_are():
    params = {"w": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(1)}
    optimizer = fa.chain(fa.ema(0.999), fa.sgd(2.0**-7))
    state = optimizer.init(params)
    for _ in range(2):
        params, state = fa.maybe_step(optimizer, params, state, {"w": torch.ones(2), "n": None}, GOOD)
    # 1 - 1/128, then 1 - 2/128: in bfloat16 the average would stay at 1
    expected = 0.999 * (0.999 + 0.001 * (1 - 1 / 128)) + 0.001 * (1 - 2 / 128)
    assert state[0].average["w"].dtype == torch.float32 and state[0].average["n"] is None
    torch.testing.assert_close(state[0].average["w"], torch.full((2,), expected))


def test_a_missing_gradient_stays_missing():
    params, grads = tree(0), {**tree(1), "bias": None}
    optimizer: Any = fa.chain(fa.clip_by_value(1.0), fa.adaptive_clip(), fa.add_noise(0.1), fa.adamw(0.1))
    moved, _ = optimizer.step(grads, optimizer.init(params), params)
    assert torch.equal(moved["bias"], params["bias"])


def test_pairs_of_others_are_members_too():
    halve = (lambda params: (), lambda grads, state: (mapped(lambda g: g / 2, grads), state))
    optimizer = fa.chain(halve, fa.sgd(1.0))
    params = {"w": torch.ones(2)}
    moved = fa.maybe_step(optimizer, params, optimizer.init(params), {"w": torch.ones(2)}, GOOD).params
    assert moved["w"].tolist() == [0.5, 0.5]


def test_what_is_no_member_is_refused():
    with pytest.raises(TypeError, match="found no optimizer"):
        fa.chain()
    with pytest.raises(TypeError, match=r"found a Transform as the last member.*Put one after it"):
        fa.chain(fa.clip_by_value(1.0))
    with pytest.raises(TypeError, match=r"found float at place 0.*Write clip_by_value"):
        fa.chain(1.0, fa.sgd(0.1))
    with pytest.raises(TypeError, match="opt_state: found tuple, expected the tuple of 2"):
        fa.chain(fa.ema(0.5), fa.sgd(0.1)).update({"w": torch.ones(1)}, (), {"w": torch.ones(1)})
    for make in (
        lambda: fa.clip_by_value(0.0),
        lambda: fa.adaptive_clip(-1.0),
        lambda: fa.adaptive_clip(0.1, 0.0),
        lambda: fa.add_noise(-1.0),
        lambda: fa.ema(1.5),
    ):
        with pytest.raises(ValueError, match=r"found .*expected"):
            make()


@pytest.mark.parametrize(
    "make",
    [
        fa.clip_by_value,
        lambda number: fa.adaptive_clip(number, 1e-3),
        lambda number: fa.adaptive_clip(0.01, number),
    ],
    ids=["limit", "clipping", "eps"],
)
def test_an_int_of_any_size_is_the_float_that_it_is(make: Any):
    grads, params = {"w": torch.tensor([[3.0, -4.0]])}, {"w": torch.tensor([[1.0, 2.0]])}
    found, expected = (make(number).update(grads, (), params)[0] for number in (10**30, 1e30))
    assert torch.equal(found["w"], expected["w"])
