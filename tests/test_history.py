"""The history: what is recorded, without a host read, in a graph and under vmap; and what is read from it."""

from __future__ import annotations

import copy
import csv
import math
import pickle
import sys
from pathlib import Path
from typing import Any, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
from functional_amp.debug import History, init_history, nonfinite_leaves, record
from functional_amp.dtypes import is_differentiable
from functional_amp.testing import gradients, poisoned
from functional_amp.tree import flatten, paths
from tests.models import mlp
from tests.test_host_reads import HostReads, faked

Params = dict[str, Tensor]


def loss_fn(params: Params, x: Tensor) -> Tensor:
    return (params["a"] * x).sum() + params["b"].sum()


PARAMS = {"a": torch.ones(2), "b": torch.ones(1)}
OPTIMIZER = fa.sgd(0.1)
STEP = fa.make_step(loss_fn, OPTIMIZER)
BATCHES = [[1.0, 2.0], [math.inf, 1.0], [3.0, math.nan], [4.0, 4.0], [5.0, 0.0]]


def start(**options: Any) -> fa.TrainState:
    return fa.init_state(PARAMS, OPTIMIZER, fa.DynamicScale(8.0, **options))


def run(
    state: fa.TrainState, history: History, batches: list[list[float]], step: Any = STEP
) -> tuple[fa.TrainState, History, list[fa.Metrics]]:
    seen = []
    for x in batches:
        state = step.accumulate(state, torch.tensor(x))
        nonfinite = nonfinite_leaves(cast(fa.Window, state.window).grads)
        state, metrics = step.update(state)
        history = record(history, metrics, nonfinite)
        seen.append(metrics)
    return state, history, seen


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(a == b or (a != a and b != b) for a, b in zip(found, expected))


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4, 5, 9])
def test_the_last_n_windows_are_kept_as_their_metrics_were(n: int):
    state = start()
    _, history, seen = run(state, init_history(state, n), BATCHES)
    kept = seen[-n:]
    columns = history.to_dict()
    assert list(columns) == ["window", "loss", "grad_norm", "scale", "finite", "applied"]
    assert columns["window"] == [1, 2, 3, 4, 5][-n:]
    for name in ("loss", "grad_norm", "scale", "finite"):
        assert same(columns[name], [getattr(metrics, name).item() for metrics in kept]), name
    assert columns["applied"] == [True, False, False, True, True][-n:]
    assert columns["finite"] == columns["applied"]
    assert int(history.count) == 5


def test_leaves_are_counted_in_the_windows_in_which_they_are_not_finite():
    state = start()
    _, history, _ = run(state, init_history(state, 2), BATCHES)
    assert history.overflowing_leaves() == {"a": 2}
    assert "not finite: a in 2" in str(history)


def test_a_window_without_weight_is_finite_and_not_applied():
    step = fa.make_step(lambda p, x: fa.Loss(loss_fn(p, x), weight=x[0]), OPTIMIZER)
    state = start()
    _, history, _ = run(state, init_history(state), [[0.0, 1.0], [1.0, 1.0]], step)
    assert history.to_dict()["finite"] == [True, True] and history.to_dict()["applied"] == [False, True]


def test_without_flags_no_leaf_is_counted():
    state = start()
    history = init_history(state)
    _, metrics = STEP(state, [torch.tensor([math.nan, 0.0])])
    assert record(history, metrics).overflowing_leaves() == {}


def test_an_empty_history_reads_as_empty():
    history = init_history(start())
    assert set(map(len, history.to_dict().values())) == {0}
    assert history.overflowing_leaves() == {} and str(history) == "no window recorded"


def test_recording_changes_no_history_that_was_given():
    state = start()
    history = init_history(state, 3)
    copies = [leaf.clone() for leaf in flatten(history).leaves]
    _, after, _ = run(state, history, BATCHES)
    for leaf, before in zip(flatten(history).leaves, copies, strict=True):
        assert torch.equal(leaf.nan_to_num(7.0), before.nan_to_num(7.0))
    storages = {leaf.untyped_storage().data_ptr() for leaf in flatten(history).leaves}
    assert not storages & {leaf.untyped_storage().data_ptr() for leaf in flatten(after).leaves}


def test_a_history_keeps_no_graph_alive():
    loss = torch.ones((), requires_grad=True) * 2
    _, metrics = STEP(start(), [torch.ones(2)])
    after = record(init_history(start()), metrics._replace(loss=loss))
    assert not any(leaf.requires_grad for leaf in flatten(after).leaves) and after.to_dict()["loss"] == [2.0]


def test_metrics_of_other_dtypes_are_kept_in_float32():
    _, metrics = STEP(start(), [torch.tensor([1.0, 2.0])])
    wide = metrics._replace(
        loss=metrics.loss.double(), grad_norm=metrics.grad_norm.double(), scale=metrics.scale.half()
    )
    history = record(init_history(start()), wide)
    assert history.rows.dtype == torch.float32
    assert history.to_dict() == record(init_history(start()), metrics).to_dict()


@given(st.data())
def test_flags_are_those_of_isfinite_for_any_gradients(data: st.DataObject):
    grads = data.draw(gradients(nonfinite=True))
    leaves = flatten(grads.tree).leaves
    expected = [is_differentiable(leaf) and not bool(torch.isfinite(leaf).all()) for leaf in leaves]
    assert nonfinite_leaves(grads).tolist() == expected


@given(st.data())
def test_a_poisoned_leaf_is_the_one_that_is_flagged(data: st.DataObject):
    tree = {"a": torch.ones(3), "b": [torch.ones(2, 2), None, torch.ones(1)]}
    flags = nonfinite_leaves(fa.ScaledGrads(data.draw(poisoned(tree, leaf="b.0")), 8.0))
    assert [path for path, flag in zip(paths(tree), flags.tolist(), strict=True) if flag] == ["b.0"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e5m2],
)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_flags_of_each_dtype(dtype: torch.dtype, bad: float):
    top = torch.finfo(dtype).max
    tree = {
        "bad": torch.tensor([1.0, bad, 0.0]).to(dtype),
        "count": torch.arange(2),
        "empty": torch.ones(0).to(dtype),
        "none": None,
        "top": torch.tensor([top, -top], dtype=torch.float64).to(dtype),  # its squares leave float32
    }
    assert nonfinite_leaves(fa.ScaledGrads(tree, 8.0)).tolist() == [True, False, False, False, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_flags_by_the_kernels_of_a_gpu(dtype: torch.dtype, bad: float, monkeypatch: pytest.MonkeyPatch):
    """The foreach norm in float64, which runs on a CPU as well."""
    monkeypatch.setattr("functional_amp.debug.flags._take_foreach", lambda leaves: True)
    top = torch.full((4096,), torch.finfo(dtype).max, dtype=dtype)
    tree = {"bad": torch.tensor([1.0, bad], dtype=dtype), "empty": top[:0], "none": None, "top": top, "zero": 0 * top}
    assert nonfinite_leaves(fa.ScaledGrads(tree, 8.0)).tolist() == [True, False, False, False, False]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_flags_on_a_gpu(bad: float):
    tree = {"bad": torch.tensor([1.0, bad]).cuda(), "half": torch.full((9,), 65504.0).half().cuda(), "none": None}
    flags = nonfinite_leaves(fa.ScaledGrads(tree, torch.tensor(8.0).cuda()))
    assert flags.is_cuda and flags.tolist() == [True, False, False]


def test_missing_and_integer_leaves_keep_their_places():
    params = {"a": torch.ones(2), "frozen": None, "steps": torch.arange(2), "z": torch.ones(1)}
    step = fa.make_step(lambda p, x: (p["a"] * x).sum() + p["z"].sum() * x.sum(), OPTIMIZER)
    state = fa.init_state(params, OPTIMIZER)
    _, history, _ = run(state, init_history(state), [[math.inf, 1.0]], step)
    assert history.paths == ("a", "frozen", "steps", "z")
    assert history.overflowing_leaves() == {"a": 1, "z": 1}


# --- without a host read, in a graph, donated, under vmap -----------------------------------------


def test_nothing_is_read_on_the_host_and_all_runs_under_fake_tensors():
    problem = mlp()
    step, state = fa.make_step(problem.loss_fn, OPTIMIZER), fa.init_state(problem.params, OPTIMIZER)

    def window(state: Any, history: History, batch: Any) -> History:
        state = step.accumulate(state, batch)
        nonfinite = nonfinite_leaves(state.window.grads)
        return record(history, step.update(state)[1], nonfinite)

    window(state, init_history(state, 4), problem.batch(0))  # the first call of a module is a rehearsal, on the host
    with HostReads() as reads:
        history = window(state, init_history(state, 4), problem.batch(0))
    assert not reads.found
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        fake = faked(mode, state)
        after = window(fake, init_history(fake, 4), faked(mode, problem.batch(0)))
        assert flatten(after).spec == flatten(history).spec
        for new, old in zip(flatten(after).leaves, flatten(history).leaves, strict=True):
            assert isinstance(new, FakeTensor) and (new.shape, new.dtype) == (old.shape, old.dtype)


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True])
def test_the_step_and_its_history_compile_to_one_graph_that_is_never_made_again(donate: bool, fresh_dynamo: None):
    step = fa.make_step(loss_fn, OPTIMIZER, donate=donate)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def window(state: Any, history: History, x: Tensor) -> Any:
        state = step.accumulate(state, x)
        nonfinite = nonfinite_leaves(state.window.grads)
        state, metrics = step.update(state)
        return state, record(history, metrics, nonfinite)

    state, history = start(), init_history(start(), 3)
    expected_state, expected, _ = run(start(), init_history(start(), 3), BATCHES)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for x in BATCHES:
            state, history = window(state, history, torch.tensor(x))
    assert all(same(history.to_dict()[name], column) for name, column in expected.to_dict().items())
    assert history.overflowing_leaves() == expected.overflowing_leaves() == {"a": 2}
    assert torch.equal(state.params["a"], expected_state.params["a"])


def test_recording_alone_compiles(fresh_dynamo: None):
    compiled = torch.compile(record, fullgraph=True, backend="aot_eager")
    state, history = start(), init_history(start(), 3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for x in BATCHES:
            state, metrics = STEP(state, [torch.tensor(x)])
            history = compiled(history, metrics)
    assert history.to_dict()["applied"] == [False, True, True]


def test_a_donating_step_has_the_same_history():
    _, expected, _ = run(start(), init_history(start()), BATCHES)
    _, history, _ = run(start(), init_history(start()), BATCHES, fa.make_step(loss_fn, OPTIMIZER, donate=True))
    assert all(same(history.to_dict()[name], column) for name, column in expected.to_dict().items())
    assert history.overflowing_leaves() == expected.overflowing_leaves()


def test_each_member_of_an_ensemble_has_its_history():
    batches = torch.tensor([[1.0, 2.0], [math.inf, 1.0]])
    states = torch_pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), start())
    histories = torch_pytree.tree_map(lambda leaf: torch.stack([leaf, leaf]), init_history(start(), 3))

    def window(state: Any, history: History, x: Tensor) -> History:
        state = STEP.accumulate(state, x)
        nonfinite = nonfinite_leaves(state.window.grads)
        return record(history, STEP.update(state)[1], nonfinite)

    together = torch.vmap(window)(states, histories, batches)
    for member in range(2):
        one = torch_pytree.tree_map(lambda leaf, member=member: leaf[member], together)
        alone = window(start(), init_history(start(), 3), batches[member])
        assert one.paths == ("a", "b")
        assert all(same(one.to_dict()[name], column) for name, column in alone.to_dict().items())
        assert one.overflowing_leaves() == alone.overflowing_leaves()


def test_every_field_is_there_after_a_tree_map_a_copy_and_a_pickle():
    _, history, _ = run(start(), init_history(start(), 3), BATCHES)
    copies: list[Any] = [
        optree.tree_map(torch.clone, cast(Any, history)),
        torch_pytree.tree_map(torch.clone, history),
        copy.deepcopy(history),
        pickle.loads(pickle.dumps(history)),
    ]
    for again in copies:
        assert same(again.to_dict()["loss"], history.to_dict()["loss"])
        assert again.overflowing_leaves() == {"a": 2}


# --- what is read ---------------------------------------------------------------------------------


def test_the_file_has_the_columns(tmp_path: Path):
    _, history, _ = run(start(), init_history(start(), 3), BATCHES)
    history.to_csv(tmp_path / "run.csv")
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, column in history.to_dict().items():
        assert [row[name] for row in rows] == [str(value) for value in column]
    assert same([float(row["loss"]) for row in rows], history.to_dict()["loss"])


def test_tensorboard_reads_each_window_once(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    state, history = start(), init_history(start(), 3)
    for batches in (BATCHES[:3], BATCHES[2:]):
        state, history, _ = run(state, history, batches)
        history.to_tensorboard(tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Tags()["scalars"] == [f"train/{name}" for name in ("loss", "grad_norm", "scale", "finite", "applied")]
    assert [event.step for event in events.Scalars("train/scale")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("train/scale")] == [8.0, 8.0, 4.0, 2.0, 1.0, 1.0]
    assert [event.value for event in events.Scalars("train/applied")] == [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]


def test_without_tensorboard_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        init_history(start()).to_tensorboard(tmp_path)


@pytest.mark.parametrize("batches", [BATCHES, [[math.nan, 0.0]] * 3, [[0.0, 0.0]]])
def test_the_picture_is_drawn_whatever_the_numbers(batches: list[list[float]], tmp_path: Path):
    matplotlib = pytest.importorskip("matplotlib.image")
    _, history, _ = run(start(), init_history(start()), batches)
    history.plot(tmp_path / "history.png")
    assert matplotlib.imread(tmp_path / "history.png").shape[1] == 800


# --- errors ---------------------------------------------------------------------------------------


init: Any = init_history
add: Any = record
flag: Any = nonfinite_leaves


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda s, h, m: init(s.params), TypeError, "state: found dict, expected the TrainState"),
        (lambda s, h, m: init(s, 0), ValueError, "n: found 0, expected at least 1"),
        (lambda s, h, m: init(s, 2.0), TypeError, "n: found float 2.0, expected an int"),
        (lambda s, h, m: add(m, h), TypeError, "history: found Metrics, expected the History"),
        (lambda s, h, m: add(h, s), TypeError, "metrics: found TrainState, expected the Metrics"),
        (lambda s, h, m: add(h, m, [True]), TypeError, "nonfinite: found list, expected a bool tensor"),
        (lambda s, h, m: add(h, m, torch.ones(2)), TypeError, "nonfinite: found torch.float32"),
        (
            lambda s, h, m: add(h, m, torch.ones(3).bool()),
            ValueError,
            r"nonfinite: found shape \(3,\), expected \(2,\)",
        ),
        (lambda s, h, m: flag(s.params), TypeError, "grads: found dict, expected the ScaledGrads"),
        (lambda s, h, m: h.plot("never.png"), ValueError, r"history: found no window.*record\(history, metrics\)"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, error: type[Exception], message: str):
    state = start()
    _, metrics = STEP(state, [torch.ones(2)])
    with pytest.raises(error, match=message):
        call(state, init_history(state), metrics)
