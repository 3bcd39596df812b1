"""Moments in fewer bits: torch's arithmetic in float32, and each moment rounded once an update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits, check_optimizer, mapped

GOOD = torch.tensor(True)
HALF, PAIR = torch.bfloat16, (torch.bfloat16, torch.float32)
OURS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "sgd": (
        lambda dtype: fa.sgd(0.1, momentum=0.9, state_dtype=dtype),
        lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, foreach=False),
        ("momentum_buffer",),
    ),
    "adam": (
        lambda dtype: fa.adam(0.1, weight_decay=0.1, state_dtype=dtype),
        lambda ps: torch.optim.Adam(ps, 0.1, weight_decay=0.1, foreach=False),
        ("exp_avg", "exp_avg_sq"),
    ),
    "adamw": (
        lambda dtype: fa.adamw(0.1, state_dtype=dtype),
        lambda ps: torch.optim.AdamW(ps, 0.1, foreach=False),
        ("exp_avg", "exp_avg_sq"),
    ),
}


def tree(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 4, generator=generator), "b": torch.randn(5, generator=generator)}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, (torch.bfloat16, torch.float32)])
@pytest.mark.parametrize("name", OURS)
def test_moments_are_rounded_once_after_torchs_update_in_float32(name: str, dtype: Any):
    make, theirs, slots = OURS[name]
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    if name == "sgd":
        dtype = dtypes[0]
    optimizer, params = make(dtype), tree(0)
    leaves = mapped(Tensor.clone, params)
    loop, state = theirs(list(leaves.values())), optimizer.init(params)
    for seed in range(1, 5):
        params, state = fa.maybe_step(optimizer, params, state, tree(seed), GOOD)
        for key, leaf in leaves.items():
            leaf.grad = tree(seed)[key]
        loop.step()
        for leaf in leaves.values():
            for slot, kept in zip(slots, dtypes):
                loop.state[leaf][slot].copy_(loop.state[leaf][slot].to(kept))
        assert_same_bits(params, leaves)
        for slot, kept in zip(slots, dtypes):
            assert_same_bits(getattr(state, slot), mapped(lambda p, s=slot, k=kept: loop.state[p][s].to(k), leaves))


@pytest.mark.parametrize("name", ["sgd", pytest.param("adamw", marks=pytest.mark.slow)])
def test_the_laws_hold(name: str):
    check_optimizer(OURS[name][0](HALF), compiled=False)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_it_compiles_and_donates():
    params, optimizer = tree(0), fa.adamw(0.1, state_dtype=PAIR)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x).pow(2).sum() + (params["b"] * x).pow(2).sum()

    steps = [fa.make_step(loss_fn, optimizer), fa.make_step(loss_fn, optimizer, donate=True)]
    steps.append(fa.make_step(loss_fn, optimizer, donate=True, compile={"backend": "aot_eager"}))
    states = [fa.init_state(params, optimizer, fa.DynamicScale(8.0)) for _ in steps]
    for factor in (1.0, math.inf, 2.0):
        states = [step(state, [torch.tensor(factor)])[0] for step, state in zip(steps, states, strict=True)]
    assert_same_bits(states[1], states[0])
    assert states[2].opt_state.exp_avg["w"].dtype == torch.bfloat16
    mapped(lambda a, b: torch.testing.assert_close(a, b), states[2].params, states[0].params)


def test_complex_moments_stay_complex():
    params = {"z": torch.ones(2, dtype=torch.complex64)}
    assert fa.adam(0.1, state_dtype=HALF).init(params).exp_avg["z"].dtype == torch.complex64


@pytest.mark.parametrize(("dtype", "beta2", "decays"), [(HALF, 0.999, False), (HALF, 0.99, True), (PAIR, 0.999, True)])
def test_a_second_moment_in_bfloat16_does_not_decay_with_the_usual_beta(dtype: Any, beta2: float, decays: bool):
    # 8 bits: 0.999 * v is nearer to v than to the number below it. The docs say so.
    optimizer, params = fa.adam(1e-3, (0.9, beta2), state_dtype=dtype), {"w": torch.ones(1)}
    state = optimizer.init(params)._replace(
        exp_avg_sq={"w": torch.ones(1, dtype=HALF if dtype is HALF else torch.float32)}
    )
    for _ in range(1000):
        params, state = fa.maybe_step(optimizer, params, state, {"w": torch.zeros(1)}, GOOD)
    assert (state.exp_avg_sq["w"].item() < 0.5) == decays


def test_a_second_moment_in_float16_loses_small_gradients():
    # 0.001 * g**2 is below half of float16's smallest number. The docs say so.
    params, moments = {"w": torch.ones(1)}, {}
    for grad in (4e-3, 8e-3):
        optimizer = fa.adam(1e-3, state_dtype=torch.float16)
        _, state = fa.maybe_step(optimizer, params, optimizer.init(params), {"w": torch.full((1,), grad)}, GOOD)
        moments[grad] = state.exp_avg_sq["w"].item()
    assert moments[4e-3] == 0 and moments[8e-3] > 0


def test_what_is_no_dtype_is_refused():
    for bad in (torch.int32, torch.complex64, "bfloat16", torch.float8_e4m3fn):
        with pytest.raises(TypeError, match=r"state_dtype: found .*expected"):
            fa.sgd(0.1, momentum=0.9, state_dtype=bad)  # pyright: ignore[reportArgumentType]
        with pytest.raises(TypeError, match=r"state_dtype: found .*expected"):
            fa.adam(0.1, state_dtype=(None, bad))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="one for each of the two"):
        fa.adam(0.1, state_dtype=(HALF,))  # pyright: ignore[reportArgumentType]
    params = {"w": torch.ones(1)}
    with pytest.raises(TypeError, match=r"opt_state.exp_avg: found torch.float32 at 'w', expected torch.bfloat16"):
        fa.adam(state_dtype=HALF).update(params, fa.adam().init(params), params)
