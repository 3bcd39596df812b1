"""Random programs: a window is found wherever the step skips it, and the scale that is named works."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_amp as fa
from functional_amp.debug import explain

INF = float("inf")
OPERATIONS: list[Any] = [
    lambda h, p: torch.tanh(h @ p["a"]),
    lambda h, p: h * p["b"],
    lambda h, p: F.softmax(h, -1),
    lambda h, p: F.layer_norm(h, (4,)),
    lambda h, p: F.gelu(h),
    lambda h, p: F.dropout(h, 0.3),
    lambda h, p: F.normalize(h, dim=-1),
    lambda h, p: h.cumsum(-1),
    lambda h, p: h.sort(-1).values,
    lambda h, p: torch.where(h > 0, h, 0 * h),
    lambda h, p: h.exp(),
    lambda h, p: h.abs().sqrt(),
    lambda h, p: h.square(),
    lambda h, p: h.clamp(min=0).log1p(),
    lambda h, p: h / h.sum(-1, keepdim=True),
    lambda h, p: torch.linalg.norm(h, dim=-1, keepdim=True) + h,
    lambda h, p: h.half().to(h.dtype),
    lambda h, p: (h.half() * 200).to(h.dtype),
    lambda h, p: h * 1e4,
    lambda h, p: h * 1e-4,
    lambda h, p: (h + torch.full((4, 4), -INF).triu(1)).softmax(-1) + h,
    lambda h, p: torch.einsum("ij,jk->ik", h, p["a"]),
]


def check(trial: int) -> bool:
    """Compares what explain says of a random window with the step itself; tells whether anything was found."""
    draw = random.Random(trial)
    torch.manual_seed(trial)
    operations, weighted = draw.choices(OPERATIONS, k=draw.randint(2, 6)), draw.random() < 0.3

    def loss_fn(p: Any, x: Tensor) -> Any:
        h = x.to(p["a"].dtype)
        for operation in operations:
            h = operation(h, p).to(p["a"].dtype)
        value = (h * p["b"]).float().sum()
        return fa.Loss(value, weight=(x > 0).sum()) if weighted else value

    params = {"a": torch.randn(4, 4), "b": torch.randn(4)}
    window = [torch.randn(4, 4) * draw.choice([1, 1, 100, 0]) for _ in range(draw.randint(1, 3))]
    if draw.random() < 0.15:
        window[-1][0, 0] = draw.choice([INF, float("nan")])
    step = fa.make_step(
        loss_fn,
        fa.sgd(0.1),
        max_norm=draw.choice([None, 1.0, INF]),
        compute_dtype=draw.choice([None, None, torch.float16, torch.bfloat16]),
        backend=draw.choice(["func", "autograd", "auto"]),
        donate=draw.random() < 0.2,
    )

    def state(scale: float) -> fa.TrainState:
        return fa.init_state(params, fa.sgd(0.1), fa.StaticScale(scale))

    def finite_at(scale: float) -> bool:
        return bool(step(state(scale), window, seed=trial)[1].finite)

    scale = 2.0 ** draw.choice([0, 4, 10, 16, 24])
    why, finite = explain(step, state(scale), window, seed=trial), finite_at(scale)
    assert why.found is not finite or (not math.isfinite(why.loss) and "the step applies it" in why.advice)
    if why.largest_good_scale is not None:
        assert finite_at(why.largest_good_scale) and not finite_at(2 * why.largest_good_scale)
    elif why.found and math.isfinite(why.loss):
        assert not finite_at(2.0**-24)
    if why.found and why.stage in ("forward", "backward"):
        assert why.output is not None and why.output.nan + why.output.inf > 0
        assert not any(given.nan for given in why.inputs)
        assert why.operator and why.file == __file__
    return why.found


def test_a_random_window_is_found_exactly_where_the_step_skips_it() -> None:
    assert any([check(trial) for trial in range(6)])


@pytest.mark.slow
def test_every_random_window_is_found_exactly_where_the_step_skips_it() -> None:
    assert sum(check(trial) for trial in range(6, 206)) > 50


def test_dataclasses_of_a_step_are_followed() -> None:
    """An option that was replaced has its say."""
    step = fa.make_step(lambda p, x: (p * x).sum(), fa.sgd(0.1))
    state, window = fa.init_state(torch.ones(2), fa.sgd(0.1), fa.StaticScale(2.0**20)), [torch.full((2,), 1e10)]
    assert not explain(step, state, window).found
    assert explain(dataclasses.replace(step, max_norm=1e-30), state, window).found
