"""State <-> flat dict: names, round trips bit for bit, and every difference named."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa
from tests.models import conv_net, mlp


def bits(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of a flat dict in a form that == compares bit for bit, NaN and the sign of zero included."""
    return {
        name: (leaf.dtype, tuple(leaf.shape), bytes(leaf.detach().contiguous().flatten().view(torch.uint8).tolist()))
        for name, leaf in tree.items()
    }


def mid_window_state() -> tuple[fa.TrainState, fa.TrainState, fa.Step]:
    """A state with an open window after two others, one of them skipped; a template for it; its step."""
    problem = conv_net()
    optimizer = fa.partition(
        {"decay": fa.adamw(0.01), "plain": fa.sgd(0.01, momentum=0.9, dampening=0.5), "frozen": None},
        lambda path, leaf: "frozen" if path.startswith("second.1") else "decay" if leaf.ndim > 1 else "plain",
    )
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0)
    scaler = fa.DynamicScale(256.0, growth_interval=3)
    template = fa.init_state({name: torch.zeros_like(p) for name, p in problem.params.items()}, optimizer, scaler)
    template = dataclasses.replace(template, buffers={k: torch.zeros_like(b) for k, b in problem.buffers.items()})
    state = fa.init_state(problem.params, optimizer, scaler, problem.buffers)
    bad = {**problem.batch(1), "gain": torch.tensor(math.inf)}
    for batches in ([problem.batch(0)], [bad]):
        state, _ = step(state, batches)
    return step.accumulate(state, problem.batch(2)), template, step


class Pair(NamedTuple):
    first: Any
    second: Any


DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]
KEYS = st.text(st.sampled_from("aw0./%"), max_size=3)
SCALERS: list[Callable[[], fa.Scaler]] = [
    fa.NoScale,
    fa.DynamicScale.deepspeed,
    lambda: fa.StaticScale(8.0),
    lambda: fa.DynamicScale(2.0**-20, 5, growth_factor=1.1, max_scale=4.0),
]
OPTIMIZERS: dict[str, Callable[[], fa.Optimizer]] = {
    "sgd": lambda: fa.sgd(0.1),
    "dampening": lambda: fa.sgd(0.1, momentum=0.9, dampening=0.5),
    "adam": fa.adam,
    "partition": lambda: fa.partition(
        {"matrix": fa.adamw(), "a/b": fa.sgd(0.1, 0.9), "frozen": None},
        lambda path, leaf: "matrix" if leaf.ndim > 1 else "a/b" if leaf.is_floating_point() else "frozen",
    ),
}


@st.composite
def leaves(draw: st.DrawFn) -> Tensor | None:
    """A tensor of any bits, NaN among them, laid out by rows or by columns; or None."""
    if draw(st.integers(0, 5)) == 0:
        return None
    return random_like(torch.empty(draw(st.lists(st.integers(0, 3), max_size=3)), dtype=draw(st.sampled_from(DTYPES))))


def random_like(leaf: Tensor) -> Tensor:
    raw = torch.randint(0, 256, (leaf.numel() * leaf.dtype.itemsize,), dtype=torch.uint8)
    if leaf.dtype == torch.bool:
        raw = raw % 2
    values = raw.view(leaf.dtype).view(leaf.shape)
    return values if raw.numel() % 2 else values.mT.contiguous().mT if leaf.dim() > 1 else values


TREES = st.recursive(
    leaves(),
    lambda tree: (
        st.dictionaries(KEYS, tree, max_size=3)
        | st.lists(tree, max_size=3)
        | st.tuples(tree, tree)
        | st.builds(Pair, tree, tree)
    ),
    max_leaves=6,
)


def each(function: Callable[[Tensor], Any], tree: Any) -> Any:
    return optree.tree_map(lambda leaf: None if leaf is None else function(leaf), tree, none_is_leaf=True)


def gradient_like(leaf: Tensor) -> Tensor | None:
    wide = {torch.float64: torch.float64, torch.complex64: torch.complex64}
    floating = leaf.is_floating_point() or leaf.is_complex()
    return random_like(leaf.to(wide.get(leaf.dtype, torch.float32))) if floating else None


@st.composite
def states(draw: st.DrawFn) -> tuple[fa.TrainState, fa.TrainState]:
    """A state of random bits, and a template of other values for it."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    optimizer = OPTIMIZERS[draw(st.sampled_from(sorted(OPTIMIZERS)))]()
    params, buffers = {"root": draw(TREES)}, draw(st.none() | TREES)
    template = fa.init_state(params, optimizer, draw(st.sampled_from(SCALERS))(), buffers)
    opt_state = each(random_like, template.opt_state)
    window = None
    if draw(st.booleans()):
        grads = fa.ScaledGrads({"root": None}, template.scaler.scale, torch.rand(()))
        object.__setattr__(grads, "tree", each(gradient_like, params))  # the constructor would read the random bits
        half = each(lambda leaf: leaf.to(torch.float16) if leaf.is_floating_point() else leaf, params)
        window = fa.Window(
            grads, torch.rand(()), buffers, draw(st.sampled_from([None, half])) if optree.tree_leaves(half) else None
        )
    counters = {name: torch.randint(0, 100, (), dtype=torch.int32) for name in ("applied", "skipped")}
    return dataclasses.replace(template, opt_state=opt_state, window=window, **counters), template


def layouts(state: fa.TrainState) -> list[tuple[int, ...]]:
    """The strides of the leaves as far as they matter: copies are dense."""
    return [leaf.clone().stride() for leaf in optree.tree_leaves(cast(Any, state))]


@given(states(), st.booleans())
def test_a_round_trip_keeps_every_bit_and_layout(pair: tuple[fa.TrainState, fa.TrainState], opened: bool) -> None:
    state, template = pair
    if opened:
        template = dataclasses.replace(template, window=state.window)
    flat = fa.state_dict(state, position=3)
    before = bits(flat)
    loaded = fa.load_state_dict(template, flat)
    assert optree.tree_structure(cast(Any, loaded)) == optree.tree_structure(cast(Any, state))
    assert layouts(loaded) == layouts(state)
    assert bits(fa.state_dict(loaded, position=3)) == before == bits(flat)
    if loaded.window is not None:
        assert loaded.window.grads.scale is loaded.scaler.scale


@given(states())
def test_no_two_tensors_share_storage(pair: tuple[fa.TrainState, fa.TrainState]) -> None:
    state, template = pair
    flat = fa.state_dict(state, given=state.applied)
    loaded = optree.tree_leaves(cast(Any, fa.load_state_dict(template, flat)))
    given_leaves = optree.tree_leaves(cast(Any, state))
    distinct = {id(leaf): leaf for leaf in [*given_leaves, *flat.values(), *loaded]}
    own = [leaf for leaf in distinct.values() if leaf.nbytes and not any(leaf is x for x in given_leaves)]
    places = [leaf.untyped_storage().data_ptr() for leaf in own]
    theirs = {leaf.untyped_storage().data_ptr() for leaf in given_leaves}
    assert len(set(places)) == len(places) and not theirs & set(places)
    assert all(leaf.is_contiguous() and not leaf.requires_grad for leaf in flat.values())


def test_names_are_the_paths() -> None:
    state, _, _ = mid_window_state()
    names = set(fa.state_dict(state, position=1))
    assert {
        "params/first.0.weight",
        "buffers/first.1.running_mean",
        "opt_state/decay/exp_avg/first.0.weight",
        "opt_state/plain/momentum_buffer/head.bias",
        "opt_state/plain/step",
        "scaler/scale",
        "scaler/growth_interval",
        "window/grads/tree/head.bias",
        "window/grads/weight",
        "window/buffers/first.1.running_mean",
        "applied",
        "format_version",
        "extra/position",
    } <= names


@pytest.mark.parametrize("half", [None, torch.bfloat16])
@pytest.mark.parametrize("opened", [False, True])
def test_a_window_goes_on_bit_for_bit_in_a_template_with_or_without_one(half: Any, opened: bool) -> None:
    problem, optimizer = mlp(), fa.adamw(0.01)
    step = fa.make_step(
        lambda params, batch: problem.loss_fn(params, {**batch, "x": batch["x"].to(half or torch.float32)}),
        optimizer,
        max_norm=0.1,
        compute_dtype=half,
    )
    state = step.accumulate(fa.init_state(problem.params, optimizer), problem.batch(0))
    template = fa.init_state(problem.params, optimizer)
    template = step.accumulate(template, problem.batch(5)) if opened else template
    loaded = fa.load_state_dict(template, fa.state_dict(state))
    for run in range(2):
        loaded, state = (step.update(step.accumulate(s, problem.batch(1 + run)))[0] for s in (loaded, state))
        assert bits(fa.state_dict(loaded)) == bits(fa.state_dict(state))
    closed = fa.load_state_dict(step.accumulate(loaded, problem.batch(3)), fa.state_dict(state))
    assert closed.window is None


def test_the_layout_of_an_open_window_decides_the_last_bit_of_the_norm_and_is_kept() -> None:
    params = {"w": torch.randn(64, 48)}
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: (p["w"].t() @ x).square().sum(), optimizer, max_norm=1.0)
    state = step.accumulate(fa.init_state(params, optimizer), torch.randn(64, 5))
    assert state.window is not None
    transposed = state.window.grads.tree["w"].t().contiguous().t()
    grads = dataclasses.replace(state.window, grads=fa.ScaledGrads({"w": transposed}, state.scaler.scale))
    state = dataclasses.replace(state, window=grads)
    flat = fa.state_dict(state)
    assert flat["dim_order/window/grads/tree/w"].tolist() == [1, 0] and flat["window/grads/tree/w"].is_contiguous()
    loaded = fa.load_state_dict(fa.init_state(params, optimizer), flat)
    assert loaded.window is not None and loaded.window.grads.tree["w"].stride() == (1, 64)


def changed(flat: dict[str, Tensor], **values: Any) -> dict[str, Any]:
    return {name: value for name, value in {**flat, **values}.items() if value is not None}


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"params/w": None}, "params/w: found nothing, expected torch.float32 of shape (2, 3)"),
    "extra": ({"params/v": torch.ones(1)}, "params/v: found torch.float32 of shape (1,), expected no such entry"),
    "shape": ({"params/w": torch.ones(6)}, "params/w: found torch.float32 of shape (6,), expected"),
    "dtype": (
        {"opt_state/step": torch.tensor(1)},
        "opt_state/step: found torch.int64 of shape (), expected torch.int32",
    ),
    "kind": ({"applied": 3}, "applied: found int, expected torch.int32 of shape ()"),
    "static": ({"scaler/growth_interval": torch.tensor(7)}, "scaler/growth_interval: found 7, expected 2000"),
    "static dtype": (
        {"scaler/growth_interval": torch.tensor(2e3)},
        "scaler/growth_interval: found 2000.0, expected 2000",
    ),
    "text": ({"scaler/refill": torch.tensor(list(b"good"), dtype=torch.uint8)}, "found 'good', expected 'growth'"),
    "class": ({"scaler/class": None}, "scaler/class: found nothing, expected 'DynamicScale'"),
    "version": ({"format_version": torch.tensor(2)}, "format_version: found 2, expected 1"),
    "no version": ({"format_version": None}, "format_version: found nothing, expected 1"),
    "window": ({"window_open": torch.tensor(True)}, "window/loss: found nothing, expected torch.float32 of shape ()"),
    "no window": ({"window_open": None}, "window_open: found nothing, expected True or False"),
    "order": (
        {"dim_order/params/w": torch.tensor([0, 0])},
        "dim_order/params/w: found torch.int64 of shape (2,), expected",
    ),
    "order of nothing": (
        {"dim_order/v": torch.tensor([0])},
        "dim_order/v: found torch.int64 of shape (1,), expected no",
    ),
}


def small_state() -> fa.TrainState:
    return fa.init_state({"w": torch.ones(2, 3)}, fa.adam())


@pytest.mark.parametrize("change", DIFFERENCES)
def test_a_difference_is_named(change: str) -> None:
    values, message = DIFFERENCES[change]
    flat = fa.state_dict(small_state())
    with pytest.raises(ValueError) as raised:
        fa.load_state_dict(small_state(), changed(flat, **values))
    assert message in str(raised.value) and "Remedy: " in str(raised.value)


def test_every_difference_is_named_at_once() -> None:
    flat = fa.state_dict(small_state())
    other = fa.init_state({"w": torch.ones(2, 4), "b": torch.ones(1)}, fa.sgd(0.1, 0.9), fa.StaticScale(2.0))
    with pytest.raises(ValueError) as raised:
        fa.load_state_dict(other, flat)
    named = {line.strip().split(": ")[0] for line in str(raised.value).splitlines()}
    wanted = fa.state_dict(other)
    assert {"params/w", "scaler/class"} | (flat.keys() ^ wanted.keys()) <= named


def test_the_remedy_for_a_changed_hyperparameter() -> None:
    flat = fa.state_dict(small_state())
    wanted = fa.DynamicScale(growth_interval=100)
    with pytest.raises(ValueError, match=r"growth_interval: found 2000, expected 100\n.*dataclasses.replace"):
        fa.load_state_dict(dataclasses.replace(small_state(), scaler=wanted), flat)
    loaded = fa.load_state_dict(small_state(), flat)
    loaded = dataclasses.replace(loaded, scaler=dataclasses.replace(loaded.scaler, growth_interval=100))
    assert loaded.scaler.growth_interval == 100


def test_a_missing_gradient_in_an_open_window_needs_a_template_with_one() -> None:
    state = small_state()
    grads = fa.ScaledGrads({"w": None}, state.scaler.scale)
    state = dataclasses.replace(state, window=fa.Window(grads, torch.zeros(()), None))
    flat = fa.state_dict(state)
    with pytest.raises(ValueError, match=r"window/grads/tree/w: found nothing(.|\n)*template with an open window"):
        fa.load_state_dict(small_state(), flat)
    loaded = fa.load_state_dict(state, flat)
    assert loaded.window is not None and loaded.window.grads.tree == {"w": None}


def test_a_given_away_state_is_not_saved() -> None:
    problem, optimizer = mlp(), fa.sgd(0.1)
    state = fa.init_state(problem.params, optimizer)
    fa.make_step(problem.loss_fn, optimizer, donate=True)(state, [problem.batch(0)])
    with pytest.raises(RuntimeError, match="donated"):
        fa.state_dict(state)
    with pytest.raises(RuntimeError, match="donated"):
        fa.load_state_dict(state, fa.state_dict(fa.init_state(problem.params, optimizer)))


def test_a_donating_step_takes_a_loaded_state() -> None:
    problem, optimizer = mlp(), fa.adamw(0.1)
    pure, donating = (fa.make_step(problem.loss_fn, optimizer, donate=donate) for donate in (False, True))
    state = pure.accumulate(fa.init_state(problem.params, optimizer), problem.batch(0))
    flat = fa.state_dict(state)
    before = bits(flat)
    loaded = donating.accumulate(fa.load_state_dict(state, flat), problem.batch(1))
    loaded, _ = donating.update(loaded)
    assert bits(flat) == before
    for name, leaf in pure.update(pure.accumulate(state, problem.batch(1)))[0].params.items():
        torch.testing.assert_close(loaded.params[name], leaf)


def test_wrong_arguments_are_refused() -> None:
    state = small_state()
    with pytest.raises(TypeError, match=r"state: found tuple, expected a TrainState. Remedy"):
        fa.state_dict(cast(Any, (state, None)))
    with pytest.raises(TypeError, match=r"template: found dict, expected a TrainState. Remedy"):
        fa.load_state_dict(cast(Any, fa.state_dict(state)), fa.state_dict(state))
    with pytest.raises(TypeError, match=r"flat: found TrainState, expected the dict that state_dict gave. Remedy"):
        fa.load_state_dict(state, cast(Any, state))
    with pytest.raises(TypeError, match=r"extra/loader: found dict .* Remedy: save json.dumps"):
        fa.state_dict(state, loader=cast(Any, {"epoch": 1}))
    with pytest.raises(TypeError, match=r"extra/seed: found int .* number within int64"):
        fa.state_dict(state, seed=2**63)
    for leaf, found in ((3, "int"), (torch.ones(2, 2).to_sparse(), "torch.sparse_coo")):
        with pytest.raises(TypeError, match=f"opt_state/m: found {found}, expected a strided tensor or None. Remedy"):
            fa.state_dict(dataclasses.replace(state, opt_state={"m": leaf}))
    with pytest.raises(ValueError, match=r"params/1: found two leaves of this name"):
        fa.state_dict(dataclasses.replace(state, params={1: torch.ones(1), "1": torch.ones(1)}))
    meta = fa.init_state({"w": torch.ones(2, 3, device="meta")}, fa.adam())
    with pytest.raises(ValueError, match="params/w: found a meta tensor in the template"):
        fa.load_state_dict(meta, fa.state_dict(state))


def test_extras_come_back_as_they_were() -> None:
    flat = fa.state_dict(small_state(), epoch=3, lr=0.1, done=True, loader='{"é": 1}', ema=torch.ones(2).bfloat16())
    assert (flat["extra/epoch"].item(), flat["extra/lr"].item(), flat["extra/done"].item()) == (3, 0.1, True)
    assert bytes(flat["extra/loader"].tolist()).decode() == '{"é": 1}'
    assert flat["extra/ema"].dtype == torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A user's scaler with static fields of its own."""

    scale: Tensor
    dtype: torch.dtype
    rule: Any

    def update(self, finite: Tensor) -> Scheduled:
        return self


fa.register(Scheduled, ("scale",), ("dtype", "rule"))


def test_static_fields_of_a_users_scaler_are_saved_and_checked() -> None:
    def state(rule: Any, dtype: torch.dtype = torch.float16) -> fa.TrainState:
        return fa.init_state({"w": torch.ones(1)}, fa.sgd(0.1), Scheduled(torch.tensor(2.0), dtype, rule))

    flat = fa.state_dict(state("cosine"))
    assert isinstance(fa.load_state_dict(state("cosine"), flat).scaler, Scheduled)
    with pytest.raises(ValueError, match=r"scaler/dtype: found 'torch.float16', expected 'torch.bfloat16'"):
        fa.load_state_dict(state("cosine", torch.bfloat16), flat)
    with pytest.raises(ValueError, match=r"scaler/rule: found 'cosine', expected 'None'"):
        fa.load_state_dict(state(None), flat)
    with pytest.raises(TypeError, match=r"scaler/rule: found builtin_function_or_method .* Remedy"):
        fa.state_dict(state(math.cos))


@pytest.mark.slow
def test_the_flat_dict_goes_through_dcp_on_one_process(tmp_path: Path) -> None:
    """In a process of its own: torch.distributed.checkpoint takes seconds to import, and warns of its own."""
    script = Path(__file__).with_name("dcp_round_trip.py")
    command = [sys.executable, "-W", "ignore", str(script), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
