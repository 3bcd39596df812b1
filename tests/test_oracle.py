"""Whole training runs against the imperative loop with torch.amp.GradScaler and torch.optim.

Bit for bit, on a CPU in eager mode, are runs in which both sides round the same real numbers:

- the scale is a power of two at all times, so that scaling and unscaling round nothing;
- the weights of the micro-batches are powers of two, and either the total weight of a window is one
  too, or the loop divides the gradients at the end of the window (not each loss at its start);
- the norm is measured and clips nothing (torch multiplies each gradient by a rounded number, here
  it is divided by one), and the loop lists the parameters in the order of their names;
- torch.optim is asked for its fused kernels;
- the learning rate is a Python float.

Everything else differs in the rounding alone; the tolerances are with the tests. Two differences
are wanted: a norm just below max_norm clips nothing, and a skipped window keeps no buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import functional_amp as fa
from functional_amp.stages.differentiate import Backend
from tests.reference import loop

BACKENDS: tuple[Backend, ...] = ("func", "autograd")
both_backends = pytest.mark.parametrize("backend", BACKENDS)

Fault = Literal["inf loss", "nan loss", "inf gradient", "nan input"]
FAULTS: tuple[Fault, ...] = ("inf loss", "nan loss", "inf gradient")


class MicroBatch(NamedTuple):
    """`factor` multiplies the loss; `exponent` 0.5 makes the gradient of one leaf infinite, and no loss."""

    inputs: Tensor
    targets: Tensor
    factor: Tensor
    exponent: Tensor
    weight: float


class Net(nn.Module):
    """A body, and a bias through which a gradient can be spoilt behind a finite loss."""

    def __init__(self, body: nn.Module, outputs: int):
        super().__init__()
        self.body = body
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, inputs: Tensor, exponent: Tensor) -> Tensor:
        # Zero; its derivative is 1 for the exponent 1 and infinite for 0.5.
        nothing = (self.bias - self.bias.detach()) ** exponent
        return self.body(inputs) + self.bias.detach() + nothing


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x))[:, None].chunk(3, dim=-1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.dropout(self.out(heads[:, 0]))


class Transformer(nn.Module):
    """One block with LayerNorm, causal attention, dropout and tied embeddings."""

    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.block = nn.Sequential(Attention(width), nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, tokens, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens)).mean(dim=1))


def build(model: str) -> nn.Module:
    if model == "mlp":
        return Net(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 5)), 5)
    if model == "batchnorm":
        convolution = nn.Conv2d(1, 2, 3, padding=1, bias=False)
        return Net(nn.Sequential(convolution, nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5)), 5)
    return Net(Transformer(tokens=5, width=4), 5)


def build_batch(model: str, generator: torch.Generator, weight: float, fault: Fault | None) -> MicroBatch:
    if model == "transformer":
        inputs = torch.randint(5, (4, 3), generator=generator)
    else:
        inputs = torch.randn((4, 3) if model == "mlp" else (4, 1, 4, 4), generator=generator)
    if fault == "nan input":
        inputs[0, 0] = math.nan
    factor = {"inf loss": math.inf, "nan loss": math.nan}.get(fault or "", 1.0)
    exponent = 0.5 if fault == "inf gradient" else 1.0
    targets = torch.randint(5, (4,), generator=generator)
    return MicroBatch(inputs, targets, torch.tensor(factor), torch.tensor(exponent), weight)


@dataclass(frozen=True)
class Optim:
    """An optimizer by its name in torch.optim, and its hyperparameters, which have torch's names."""

    name: str
    hyperparameters: dict[str, Any]

    def ours(self) -> fa.Optimizer:
        return getattr(fa, self.name.lower())(**self.hyperparameters)

    def theirs(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        # The fused kernel where the composed step has it too: with dampening, the first step is one of its own.
        fused = not self.hyperparameters.get("dampening")
        optimizer = getattr(torch.optim, self.name)(params, **self.hyperparameters, foreach=False, fused=fused)
        if fused and self.hyperparameters.get("momentum"):
            # torch leaves the buffer uninitialized where a fused first step is skipped, and reads it at the second.
            for param in params:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        return optimizer


@dataclass(frozen=True)
class Run:
    """A training run: `weights` are those of the micro-batches of each window, `faults` stand at their places."""

    model: str
    optim: Optim
    weights: Sequence[Sequence[float]]
    scaling: dict[str, Any]
    faults: dict[tuple[int, int], Fault]
    max_norm: float | None = None
    divide: Literal["loss", "grads"] = "grads"
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    seed: int = 0

    def module(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return build(self.model).to(self.dtype)

    def windows(self) -> list[list[MicroBatch]]:
        generator = torch.Generator().manual_seed(self.seed)
        return [
            [
                build_batch(self.model, generator, weight, self.faults.get((i, j)))
                for j, weight in enumerate(window_weights)
            ]
            for i, window_weights in enumerate(self.weights)
        ]


def objective(output: Tensor, batch: MicroBatch) -> Tensor:
    wide = output if output.dtype == torch.float64 else output.float()
    return F.cross_entropy(wide, batch.targets) * batch.factor


def cast_inputs(batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    return batch.inputs.to(dtype) if batch.inputs.is_floating_point() else batch.inputs


def imperative(run: Run, **options: Any) -> list[loop.Record]:
    """The run by the reference loop."""
    scaling = {{"scale": "init_scale"}.get(name, name): value for name, value in run.scaling.items()}
    return loop.train(
        run.module(),
        lambda model, batch: objective(model(cast_inputs(batch, run.dtype), batch.exponent), batch),
        run.optim.theirs,
        run.windows(),
        torch.amp.GradScaler("cpu", **scaling),
        max_norm=run.max_norm,
        divide=run.divide,
        autocast=run.autocast,
        seeded=True,
        **{"restore_buffers": True, **options},
    )


def functional(
    run: Run, backend: Backend, *, optimizer: fa.Optimizer | None = None, scaler: fa.Scaler | None = None
) -> list[tuple[fa.TrainState, fa.Metrics]]:
    """The run by the composed step; all states are kept, so that one written to later would show."""
    apply, params, buffers = fa.from_module(run.module())

    def loss_fn(params: fa.PyTree, batch: MicroBatch, buffers: fa.PyTree) -> fa.Loss:
        output, buffers = apply.with_buffers(params, buffers, cast_inputs(batch, run.dtype), batch.exponent)
        return fa.Loss(objective(output, batch), batch.weight, buffers=buffers)

    optimizer = optimizer or run.optim.ours()
    step = fa.make_step(
        loss_fn if run.autocast is None else fa.autocast(loss_fn, run.autocast),
        optimizer,
        max_norm=run.max_norm,
        clip_eps=1e-6,
        backend=backend,
    )
    state = fa.init_state(params, optimizer, scaler or fa.DynamicScale(**run.scaling), buffers)
    results = []
    for index, window in enumerate(run.windows()):
        state, metrics = step(state, window, seed=index)
        results.append((state, metrics))
    return results


def assert_same_decisions(ours: list[tuple[fa.TrainState, fa.Metrics]], theirs: list[loop.Record]) -> None:
    """Scale, tracker and skips, exactly, whatever the rounding elsewhere."""
    for (state, metrics), record in zip(ours, theirs, strict=True):
        assert state.scaler.scale.item() == record.scale
        assert state.scaler.growth_tracker.item() == record.growth_tracker
        assert metrics.scale.item() == record.used_scale
        assert metrics.finite.item() is not record.skipped
    assert ours[-1][0].skipped.item() == sum(record.skipped for record in theirs)
    assert ours[-1][0].applied.item() == sum(not record.skipped for record in theirs)


def assert_same_trajectory(ours: list[tuple[fa.TrainState, fa.Metrics]], theirs: list[loop.Record]) -> None:
    """Everything bit for bit; the norm up to its division by the weight, which comes after the sum here."""
    assert_same_decisions(ours, theirs)
    for (state, metrics), record in zip(ours, theirs, strict=True):
        torch.testing.assert_close(state.params, record.params, rtol=0, atol=0)
        torch.testing.assert_close(state.buffers, record.buffers, rtol=0, atol=0)
        torch.testing.assert_close(metrics.grad_norm, record.norm, rtol=2.0**-22, atol=0, equal_nan=True)
        assert metrics.loss.item() == pytest.approx(record.loss, rel=1e-6, nan_ok=True)


@st.composite
def optims(draw: st.DrawFn, names: Sequence[str] = ("SGD", "Adam", "AdamW")) -> Optim:
    name = draw(st.sampled_from(names))
    hyperparameters: dict[str, Any] = {
        "lr": draw(st.floats(1e-4, 0.1)),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
    }
    if name == "SGD":
        momentum = draw(st.sampled_from([0.0, 0.5, 0.9]))
        nesterov = momentum > 0 and draw(st.booleans())
        dampening = 0.0 if nesterov else draw(st.sampled_from([0.0, 0.3]))
        hyperparameters |= {"momentum": momentum, "nesterov": nesterov, "dampening": dampening}
    else:
        betas = draw(st.sampled_from([(0.9, 0.999), (0.8, 0.95), (0.0, 0.9)]))
        hyperparameters |= {"betas": betas, "eps": draw(st.sampled_from([1e-8, 1e-4]))}
    return Optim(name, hyperparameters)


@st.composite
def windows_of(draw: st.DrawFn, weights: st.SearchStrategy[float], lengths: Sequence[int]) -> list[list[float]]:
    """Five to seven windows of one length, and a last one that may be shorter."""
    length = draw(st.sampled_from(lengths))
    windows = draw(st.lists(st.lists(weights, min_size=length, max_size=length), min_size=5, max_size=7))
    return [*windows, draw(st.lists(weights, min_size=1, max_size=length))]


@st.composite
def faults_in(draw: st.DrawFn, windows: Sequence[Sequence[float]]) -> dict[tuple[int, int], Fault]:
    places = [(i, j) for i, window in enumerate(windows) for j in range(len(window))]
    return draw(st.dictionaries(st.sampled_from(places), st.sampled_from(FAULTS), max_size=5))


MODELS = ("mlp", "batchnorm", "transformer")


@st.composite
def exact_runs(draw: st.DrawFn) -> Run:
    """Runs in which both sides round the same numbers; see the top of this file."""
    divide: Literal["loss", "grads"] = draw(st.sampled_from(["loss", "grads"]))
    if divide == "loss":
        windows = draw(windows_of(st.just(1), (1, 2, 4)))
        windows[-1] = windows[-1][: 1 << (len(windows[-1]).bit_length() - 1)]
    else:
        windows = draw(windows_of(st.sampled_from([1, 1, 1.0, 2, 4, 0.5]), (1, 2, 3, 4)))
    return Run(
        model=draw(st.sampled_from(MODELS)),
        optim=draw(optims()),
        weights=windows,
        scaling={
            "scale": 2.0 ** draw(st.integers(0, 20)),
            "growth_interval": draw(st.integers(1, 3)),
            "growth_factor": draw(st.sampled_from([2.0, 4.0])),
            "backoff_factor": draw(st.sampled_from([0.5, 0.25])),
        },
        faults=draw(faults_in(windows)),
        max_norm=draw(st.sampled_from([None, 2.0**60, math.inf])),
        divide=divide,
        seed=draw(st.integers(0, 2**16)),
    )


def rounded_runs(
    optim: st.SearchStrategy[Optim], scaling: st.SearchStrategy[dict[str, Any]], dtype: torch.dtype
) -> st.SearchStrategy[Run]:
    """Runs with any weights, window lengths and max_norm."""
    return windows_of(st.integers(1, 9) | st.integers(1, 31).map(lambda n: n / 4), (1, 3, 5)).flatmap(
        lambda windows: st.builds(
            Run,
            model=st.sampled_from(MODELS),
            optim=optim,
            weights=st.just(windows),
            scaling=scaling,
            faults=faults_in(windows),
            max_norm=st.none() | st.floats(0.01, 2.0),
            divide=st.sampled_from(["loss", "grads"]),
            dtype=st.just(dtype),
            seed=st.integers(0, 2**16),
        )
    )


def distance(ours: loop.Tensors, theirs: loop.Tensors) -> float:
    """The largest difference at any leaf, in units of the largest magnitude there (of 2**-7 at least)."""
    return max(
        ((ours[name] - value).abs().max() / value.abs().max().clamp(min=2.0**-7)).item()
        for name, value in theirs.items()
    )


@both_backends
@given(run=exact_runs())
def test_a_run_equals_the_imperative_loop_bit_for_bit(backend, run):
    assert_same_trajectory(functional(run, backend), imperative(run))


@given(backend=st.sampled_from(BACKENDS), run=exact_runs())
def test_a_bfloat16_autocast_run_equals_the_imperative_loop_bit_for_bit(backend, run):
    run = replace(run, autocast=torch.bfloat16)
    assert_same_trajectory(functional(run, backend), imperative(run))


@given(backend=st.sampled_from(BACKENDS), run=exact_runs())
def test_a_float16_autocast_run_equals_the_imperative_loop_bit_for_bit(backend, run):
    # The weights enter here after the backward, there before it: in float16 that decides what overflows.
    unweighted = [[1.0] * len(window) for window in run.weights]
    run = replace(run, autocast=torch.float16, weights=unweighted, divide="grads")
    assert_same_trajectory(functional(run, backend), imperative(run))


@both_backends
@pytest.mark.parametrize("model", MODELS)
def test_a_float16_run_overflows_by_itself_where_the_imperative_loop_does(backend, model):
    run = Run(
        model=model,
        optim=Optim("AdamW", {"lr": 0.01}),
        weights=[[1.0] * 3] * 12 + [[1.0]],
        scaling={"scale": 2.0**21, "growth_interval": 2},
        faults={},
        max_norm=2.0**60,
        autocast=torch.float16,
    )
    theirs = imperative(run)
    scales = [theirs[0].used_scale, *(record.scale for record in theirs)]
    changes = [after / before for before, after in pairwise(scales)]
    assert 0.5 in changes and 2.0 in changes and 1.0 in changes  # the run shows what it is to show
    assert_same_trajectory(functional(run, backend), theirs)


@given(
    backend=st.sampled_from(BACKENDS),
    run=rounded_runs(
        optims(names=["SGD"]),
        st.fixed_dictionaries(
            {
                "scale": st.floats(1.0, 2.0**18, width=32),
                "growth_interval": st.integers(1, 3),
                "growth_factor": st.sampled_from([1.25, 1.5, 3.0]),
                "backoff_factor": st.sampled_from([0.25, 0.625, 0.75]),
            }
        ),
        torch.float32,
    ),
)
def test_any_scale_weight_and_max_norm_change_an_sgd_run_by_roundings_alone(backend, run):
    ours, theirs = functional(run, backend), imperative(run)
    assert_same_decisions(ours, theirs)
    for (state, _), record in zip(ours, theirs, strict=True):
        assert distance(state.params, record.params) <= 64 * 2.0**-24


@given(
    backend=st.sampled_from(BACKENDS),
    run=rounded_runs(
        optims(names=["Adam", "AdamW"]),
        # GradScaler's 1 / scale is a float32 number: only powers of two leave float64 gradients exact.
        st.fixed_dictionaries(
            {"scale": st.integers(0, 18).map(lambda exponent: 2.0**exponent), "growth_interval": st.integers(1, 3)}
        ),
        torch.float64,
    ),
)
def test_any_weight_and_max_norm_change_a_float64_adam_run_by_roundings_alone(backend, run):
    # float64: Adam divides an element by its own size, and makes as much of the noise of a gradient that is zero.
    ours, theirs = functional(run, backend), imperative(run)
    assert_same_decisions(ours, theirs)
    for (state, _), record in zip(ours, theirs, strict=True):
        assert distance(state.params, record.params) <= 1e-9


@both_backends
def test_a_scheduled_run_counts_applied_updates_as_a_loop_that_steps_the_schedule_after_them(backend):
    run = Run(
        model="mlp",
        optim=Optim("SGD", {"lr": 0.2, "momentum": 0.9}),
        weights=[[1.0, 1.0]] * 10,
        scaling={"scale": 2.0**10, "growth_interval": 2},
        faults={(0, 0): "inf loss", (2, 1): "inf gradient", (5, 0): "nan loss", (6, 0): "nan loss"},
    )
    theirs = imperative(
        run,
        make_schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: (n + 1) / 4 if n < 3 else 1
        ),
    )
    ours = functional(run, backend, optimizer=fa.sgd(fa.linear(0.05, 0.2, 3), momentum=0.9))
    assert_same_decisions(ours, theirs)
    for (state, _), record in zip(ours, theirs, strict=True):
        assert distance(state.params, record.params) <= 64 * 2.0**-24


@given(backend=st.sampled_from(BACKENDS), run=exact_runs())
def test_no_scale_equals_the_loop_with_a_disabled_scaler(backend, run):
    run = replace(run, faults={}, scaling={"enabled": False})
    for (state, metrics), record in zip(functional(run, backend, scaler=fa.NoScale()), imperative(run), strict=True):
        torch.testing.assert_close(state.params, record.params, rtol=0, atol=0)
        torch.testing.assert_close(metrics.grad_norm, record.norm, rtol=2.0**-22, atol=0)
        assert metrics.scale.item() == state.scaler.scale.item() == 1


@both_backends
@pytest.mark.parametrize("model", MODELS)
def test_a_hundred_bad_windows_change_nothing_but_the_scale(backend, model):
    faults = FAULTS if model == "transformer" else (*FAULTS, "nan input")  # tokens can not be NaN
    run = Run(
        model=model,
        optim=Optim("AdamW", {"lr": 0.01}),
        weights=[[1.0]] * 103,
        scaling={"scale": 2.0**16, "growth_interval": 2},
        faults={(i, 0): faults[i % len(faults)] for i in range(2, 102)},
        max_norm=2.0**60,
    )
    ours, theirs = functional(run, backend), imperative(run)
    assert_same_trajectory(ours, theirs)
    before, after, end = ours[1][0], ours[101][0], ours[102][0]
    torch.testing.assert_close(after.params, before.params, rtol=0, atol=0)
    torch.testing.assert_close(after.buffers, before.buffers, rtol=0, atol=0)
    torch.testing.assert_close(after.opt_state, before.opt_state, rtol=0, atol=0)
    assert after.scaler.scale.item() == 2.0**17 * 0.5**100 and after.skipped_in_a_row.item() == 100
    assert end.applied.item() == 3 and end.skipped_in_a_row.item() == 0


@both_backends
@pytest.mark.parametrize("fault", ["inf loss", "nan input"])
def test_a_skipped_window_keeps_no_batchnorm_statistics_where_the_imperative_loop_does(backend, fault):
    run = Run(
        model="batchnorm",
        optim=Optim("SGD", {"lr": 0.1}),
        weights=[[1.0, 1.0]] * 3,
        scaling={"scale": 2.0**10},
        faults={(1, 1): fault},
    )
    (first, _), (skipped, _), (last, _) = functional(run, backend)
    torch.testing.assert_close(skipped.buffers, first.buffers, rtol=0, atol=0)
    kept = imperative(run, restore_buffers=False)
    counted = "body.1.num_batches_tracked"
    assert last.buffers[counted].item() == 4 and kept[-1].buffers[counted].item() == 6
    assert torch.isfinite(last.buffers["body.1.running_var"]).all()
    if fault == "nan input":  # one bad sample, and torch's loop has no statistics any more
        assert torch.isnan(kept[-1].buffers["body.1.running_var"]).all()


@both_backends
def test_a_norm_that_is_max_norm_clips_nothing_where_torch_multiplies(backend):
    gradient, max_norm = torch.tensor([0.6, 0.8]), 1.0
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_([parameter], max_norm)
    assert norm.item() == max_norm and not torch.equal(parameter.grad, gradient)

    optimizer = fa.sgd(1.0)
    step = fa.make_step(lambda p, g: (p * g).sum(), optimizer, max_norm=max_norm, clip_eps=1e-6, backend=backend)
    state, metrics = step(fa.init_state(torch.zeros(2), optimizer), [gradient])
    assert metrics.grad_norm.item() == max_norm
    torch.testing.assert_close(state.params, -gradient, rtol=0, atol=0)


def test_a_weight_used_twice_in_autocast_is_cast_once_by_autograd_and_twice_by_func():
    torch.manual_seed(0)
    weight, x = torch.randn(4, 4), torch.randn(3, 4)

    def loss_fn(weight: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, weight)), weight).float().square().mean()

    leaf = weight.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(leaf)
    loss.backward()
    half = fa.autocast(loss_fn, torch.bfloat16)
    # torch's cache makes one bfloat16 copy, whose two gradients are added in bfloat16.
    same = fa.scale_backward(half, fa.NoScale(), weight, backend="autograd").grads.tree
    torch.testing.assert_close(same, leaf.grad, rtol=0, atol=0)
    # torch.func has no cache: each gradient is cast to float32 first. That is one bfloat16 rounding apart.
    close = fa.scale_backward(half, fa.NoScale(), weight, backend="func").grads.tree
    torch.testing.assert_close(close, leaf.grad, rtol=2.0**-8, atol=0)


def test_attention_dropout_in_autocast_equals_torch_with_the_autograd_backend():
    # Under torch.func this fails in torch 2.13 itself: attention's fallback kernel mixes dtypes in autocast.
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 1, 3, 4, generator=torch.Generator().manual_seed(1))

    def loss_fn(weight: Tensor) -> Tensor:
        projected = x @ weight
        return F.scaled_dot_product_attention(projected, projected, projected, dropout_p=0.3).float().square().mean()

    leaf = weight.clone().requires_grad_()
    with fa.seeded(0), torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(leaf)
    loss.backward()
    with fa.seeded(0):
        grads, loss_again, _ = fa.scale_backward(
            fa.autocast(loss_fn, torch.bfloat16), fa.NoScale(), weight, backend="autograd"
        )
    torch.testing.assert_close(loss_again, loss.detach(), rtol=0, atol=0)
    torch.testing.assert_close(grads.tree, leaf.grad, rtol=0, atol=0)
