"""At the border: numbers beyond a dtype, windows without weight, and what is refused there."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.debug import check_health, explain, init_history, record
from functional_amp.ranks import stop_on
from functional_amp.testing import assert_same_bits

np = pytest.importorskip("numpy")

PARAMS = {"w": torch.ones(3)}


def adaptively(grads: Any, params: Any, *given: float, **options: float) -> Tensor:
    update: Any = fa.adaptive_clip(*given, **options).update
    return update(grads, (), params)[0]["w"]


def square(params: Any, x: Any) -> Tensor:
    return (params["w"] ** 2).sum()


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e20, 1e38])
def test_adaptive_clip_keeps_its_ratio_at_every_size_of_gradients_and_weights(size: float) -> None:
    params, grads = {"w": torch.tensor([[3.0, 4.0]])}, {"w": torch.tensor([[2.0 * size, 0.0]])}
    clipped = adaptively(grads, params, 0.1, eps=1e-30)
    torch.testing.assert_close(clipped, torch.tensor([[min(0.5, 2.0 * size), 0.0]]))
    large = {"w": torch.tensor([[3.0 * size, 0.0]])}
    clipped = adaptively(grads, large, 0.1, eps=1e-30)
    torch.testing.assert_close(clipped, torch.tensor([[0.3 * size, 0.0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_adaptive_clip_of_other_dtypes_gives_torchs_numbers(dtype: torch.dtype) -> None:
    grad, param = torch.tensor([[4.0, 3.0]], dtype=dtype), torch.tensor([[1.0, 0.0]], dtype=dtype)
    clipped = adaptively({"w": grad}, {"w": param}, 0.5)
    torch.testing.assert_close(clipped.to(dtype), grad * 0.1)


def test_a_float16_moment_ends_at_its_largest_number_and_comes_back() -> None:
    optimizer: Any = fa.sgd(1e-6, momentum=0.9, state_dtype=torch.float16)
    state, params = optimizer.init({"w": torch.ones(1)}), {"w": torch.ones(1)}
    for grad in (*[8e3] * 40, *[0.0] * 200):
        params, state = optimizer.step({"w": torch.tensor([grad])}, state, params)
        assert abs(state.momentum_buffer["w"]).item() <= 65504
        assert params["w"].isfinite().all()
    assert state.momentum_buffer["w"].item() < 1.0


def test_a_learning_rate_beyond_float32_is_refused() -> None:
    for make in (fa.sgd, fa.adam, fa.adamw):
        with pytest.raises(ValueError, match=r"lr: found 1e\+39, expected a number >= 0 within float32"):
            make(1e39)


@pytest.mark.parametrize("value", [-0.1, 1e39, math.inf, math.nan])
def test_a_number_that_a_schedule_gives_is_checked_as_a_constant_is(value: float) -> None:
    optimizer: Any = fa.sgd(cast(Any, lambda count: value))
    with pytest.raises(ValueError, match=r"lr: (found|the schedule)"):
        optimizer.step({"w": torch.ones(3)}, optimizer.init(PARAMS), PARAMS)
    average: Any = fa.ema(cast(Any, lambda count: value))
    with pytest.raises(ValueError, match="decay: found"):
        average.after(PARAMS, average.init(PARAMS))


# Windows without weight


def weighted(weight: float) -> Any:
    step = fa.make_step(lambda p, x: fa.Loss(square(p, x), weight=torch.tensor(weight)), fa.sgd(0.1))
    return step, fa.init_state(PARAMS, fa.sgd(0.1))


@pytest.mark.parametrize("weight", [0.0, -3.0])
def test_a_window_that_was_skipped_for_its_weight_is_explained_by_it(weight: float) -> None:
    step, state = weighted(weight)
    skipped, metrics = step(state, [None])
    assert not metrics.applied
    why = explain(step, skipped, [None], scale=metrics.scale)
    assert (why.found, why.stage) == (False, "no weight")
    assert f"sum to {weight:g}" in why.advice


def test_windows_without_weight_are_no_windows_with_inf() -> None:
    step, state = weighted(0.0)
    history, metrics = init_history(state, n=50), None
    for _ in range(40):
        state, metrics = step(state, [None])
        history = record(history, metrics)
    for seen in (history, metrics):
        (finding,) = check_health(state, seen)
        assert finding.name == "skips in a row" and "its weight is 0" in finding.found
    (finding,) = check_health(state)
    assert "windows without weight" in finding.advice
    _, applied = weighted(1.0)[0](state, [None])
    assert "weight is 0" not in check_health(state, applied)[0].found


# Files


def opened(loss_fn: Any, params: Any) -> fa.TrainState:
    step = fa.make_step(loss_fn, fa.sgd(0.1))
    return step.accumulate(fa.init_state(params, fa.sgd(0.1), fa.NoScale()), torch.ones(3))


@pytest.mark.parametrize("kind", ["sum", "float64"])
def test_an_open_window_of_any_kind_loads_into_a_closed_template(kind: str) -> None:
    params = {"w": torch.ones(3, dtype=torch.float64 if kind == "float64" else torch.float32)}
    state = opened(lambda p, x: fa.Loss(square(p, x), reduction="sum" if kind == "sum" else "mean"), params)
    template = fa.init_state(params, fa.sgd(0.1), fa.NoScale())
    loaded = fa.load_state_dict(template, fa.state_dict(state))
    assert loaded.window is not None and state.window is not None
    assert loaded.window.reduction == state.window.reduction
    assert_same_bits(loaded, state)


OPTIMIZERS = {
    "from_torch": lambda: fa.from_torch(torch.optim.NAdam),
    "chain": lambda: fa.chain(fa.ema(0.9), fa.sgd(0.1)),
    "partition": lambda: fa.partition({"a": fa.adamw(1e-3)}, lambda path, leaf: "a"),
    "adaptive": lambda: fa.chain(fa.adaptive_clip(), fa.add_noise(0.1), fa.adam(1e-3)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_saved_state_loads_under_weights_only(name: str, tmp_path: Path) -> None:
    state = fa.init_state(PARAMS, OPTIMIZERS[name]())
    torch.save((state, init_history(state)), tmp_path / "state.pt")
    loaded, history = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same_bits(loaded, state)
    assert history.paths == ("w",)


def test_numbers_of_numpy_are_saved_as_the_numbers_that_they_are() -> None:
    state = fa.init_state(PARAMS, fa.sgd(0.1))
    flat = fa.state_dict(state, **cast(Any, {"best": np.float32(0.5), "at": np.int64(7), "double": np.float64(0.1)}))
    assert [flat[f"extra/{name}"].item() for name in ("best", "at", "double")] == [0.5, 7, 0.1]


def test_what_is_no_number_is_refused_with_remedies_that_work() -> None:
    state = fa.init_state(PARAMS, fa.sgd(0.1))
    sparse, array, settings = torch.eye(2).to_sparse(), np.arange(3), {"lr": 0.1}
    for value in (sparse, array, settings, np.random.RandomState(0).get_state()):
        with pytest.raises(TypeError, match=r"(?s)extra/x: found .*json\.dumps.*repr.*as_tensor.*to_dense"):
            fa.state_dict(state, x=cast(Any, value))
    flat = fa.state_dict(
        state, a=sparse.to_dense(), b=torch.as_tensor(array), c=json.dumps(settings), d=repr(np.random.get_state())
    )
    assert flat["extra/b"].tolist() == [0, 1, 2]


# Signals, the command line


def test_what_is_no_signal_is_refused_and_so_is_another_thread() -> None:
    with pytest.raises(TypeError, match=r"signals: found 'SIGTERM', expected a signal\. Write stop_on\(signal"):
        stop_on(cast(Any, "SIGTERM")).__enter__()
    found: list[BaseException] = []

    def enter() -> None:
        try:
            stop_on().__enter__()
        except ValueError as error:
            found.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert "another thread than the main one" in str(found[0])


@pytest.mark.slow
def test_the_command_line_knows_its_help_and_refuses_what_it_does_not_know() -> None:
    def run(argument: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "functional_amp", argument], capture_output=True, text=True)

    assert "usage: python -m functional_amp" in run("--help").stdout
    assert run("--hepl").returncode == 2
