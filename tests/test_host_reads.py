"""No stage reads a tensor on the host: neither under fake tensors, which have no values, nor in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import functional_amp as fa
from functional_amp.tree import flatten, map_tensors
from tests.models import PROBLEMS, Problem, mlp, transformer

BACKENDS = ["func", "autograd"]
PROBLEM_MAKERS: dict[str, Callable[[], Problem]] = {
    **PROBLEMS,
    "mlp with dropout": lambda: mlp(dropout=0.5),
    "transformer with dropout": lambda: transformer(dropout=0.5),
}
SCALERS: dict[str, Callable[[], fa.Scaler]] = {
    "torch": fa.DynamicScale,
    "megatron": fa.DynamicScale.megatron,
    "deepspeed": fa.DynamicScale.deepspeed,
    "deepspeed, consecutive": lambda: fa.DynamicScale.deepspeed(consecutive_hysteresis=True),
    "apex": fa.DynamicScale.apex,
    "apex, hysteresis": lambda: fa.DynamicScale.apex(hysteresis=2),
    "jmp": fa.DynamicScale.jmp,
    "flax": fa.DynamicScale.flax,
    "static": lambda: fa.StaticScale(8.0),
    "none": fa.NoScale,
}
OPTIMIZERS: dict[str, Callable[[], fa.Optimizer]] = {
    "sgd": lambda: fa.sgd(0.1),
    "sgd with everything": lambda: fa.sgd(fa.linear(0.1, 0.0, 9), momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda: fa.sgd(torch.tensor(0.1), momentum=0.9, nesterov=True),
    "adam": lambda: fa.adam(fa.warmup_cosine(1e-2, 2, 9), weight_decay=0.1),
    "adamw": lambda: fa.adamw(torch.tensor(0.1)),
    "partition": lambda: fa.partition(
        {"decay": fa.adamw(1e-2), "plain": fa.sgd(fa.constant(0.1)), "frozen": None},
        lambda path, leaf: "frozen" if path == "head.bias" else "decay" if leaf.ndim > 1 else "plain",
    ),
}

_READERS = {"item", "tolist", "numpy", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__", "__index__"}
_READS = {"_local_scalar_dense", "is_nonzero", "item", "equal"}


class HostReads(TorchFunctionMode):
    """Records every method of a tensor that brings its values to Python, and every operator that does."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []
        self._operators = _Operators(self.found)

    def __enter__(self):
        self._operators.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any):
        super().__exit__(*exception)
        self._operators.__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _READERS:
            self.found.append(func.__name__)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in _READS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


class Float64Tensors(TorchDispatchMode):
    """Records the operators that made a float64 or complex128 tensor; with scalars=False, 0-dim ones apart."""

    def __init__(self, *, scalars: bool = True):
        super().__init__()
        self.found: list[str] = []
        self._scalars = scalars

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        wide = (torch.float64, torch.complex128)
        tensors = [t for t in flatten(out).leaves if isinstance(t, Tensor) and (self._scalars or t.dim())]
        if any(t.dtype in wide for t in tensors):
            self.found.append(str(func))
        return out


def faked(mode: FakeTensorMode, tree: Any) -> Any:
    return map_tensors(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def run_fake(
    problem: Problem, make_optimizer: Callable[[], fa.Optimizer], scaler: fa.Scaler, backend: Any = "func"
) -> None:
    """Two windows on tensors without values; what comes out has the structure, shapes and dtypes that went in."""
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=False) as mode:
        optimizer = make_optimizer()  # here, so that a learning-rate tensor is fake as well
        step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
        state = fa.init_state(faked(mode, problem.params), optimizer, faked(mode, scaler), faked(mode, problem.buffers))
        window = [faked(mode, problem.batch(seed)) for seed in range(2)]
        after, metrics = step(*step(state, window)[:1], window)
        assert flatten(after).spec == flatten(state).spec
        for new, old in zip(flatten(after).leaves, flatten(state).leaves, strict=True):
            assert old is None or (isinstance(new, FakeTensor) and (new.shape, new.dtype) == (old.shape, old.dtype))
        assert all(isinstance(leaf, FakeTensor) and leaf.dim() == 0 for leaf in metrics[:6])


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: bool(t > 0),
        lambda t: float(t),
        lambda t: int(t),
        lambda t: t.tolist(),
        lambda t: t.numpy(),
        lambda t: [0, 1][t.int()],
        lambda t: 1 if t else 0,
        lambda t: torch.is_nonzero(t),
        lambda t: torch.equal(t, t),
    ],
)
def test_the_recorder_sees_each_kind_of_host_read(read: Callable[[Tensor], Any]):
    with HostReads() as reads:
        read(torch.ones(()))
    assert reads.found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROBLEM_MAKERS)
def test_the_step_of_each_model_runs_under_fake_tensors(name: str, backend: str):
    run_fake(PROBLEM_MAKERS[name](), lambda: fa.adamw(fa.warmup_cosine(1e-2, 2, 10)), fa.DynamicScale(), backend)


@pytest.mark.parametrize("scaler", SCALERS)
def test_the_step_with_each_scaler_runs_under_fake_tensors(scaler: str):
    run_fake(mlp(), OPTIMIZERS["sgd"], SCALERS[scaler]())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_step_with_each_optimizer_runs_under_fake_tensors(optimizer: str):
    run_fake(mlp(), OPTIMIZERS[optimizer], fa.DynamicScale())


@pytest.mark.parametrize("precision", ["autocast", "policy"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_precision_transforms_run_under_fake_tensors(precision: str, backend: str):
    problem = PROBLEMS["conv_net"]()
    if precision == "autocast":
        loss_fn = fa.autocast(problem.loss_fn, torch.bfloat16)
    else:
        loss_fn = fa.with_policy(problem.loss_fn, "p=f32,c=bf16,o=f32")
    run_fake(problem._replace(loss_fn=loss_fn), OPTIMIZERS["sgd"], fa.DynamicScale(), backend)


def stage_calls(problem: Problem, optimizer: fa.Optimizer, scaler: Any, backend: Any) -> dict[str, Callable[[], Any]]:
    """Each public stage on real tensors, its arguments made beforehand."""
    params, buffers, batch = problem.params, problem.buffers, problem.batch(0)
    arguments = (batch,) if buffers is None else (batch, buffers)
    flag, opt_state = torch.tensor(True), optimizer.init(params)
    grads = fa.scale_backward(problem.loss_fn, scaler, params, *arguments, backend=backend).grads
    plain = fa.unscale(grads).grads
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, backend=backend)
    state = fa.init_state(params, optimizer, scaler, buffers)
    opened = step.accumulate(state, batch)
    return {
        "init_state": lambda: fa.init_state(params, optimizer, scaler, buffers),
        "scale_backward": lambda: fa.scale_backward(problem.loss_fn, scaler, params, *arguments, backend=backend),
        "scale_backward, weight": lambda: fa.scale_backward(
            lambda *a: 0.0 * next(iter(a[0].values())).sum(), scaler, params, batch, weight=torch.ones(())
        ),
        "accumulate, first": lambda: fa.accumulate(None, grads, where=flag),
        "accumulate": lambda: fa.accumulate(grads, grads),
        "accumulate, where": lambda: fa.accumulate(grads, grads, where=flag),
        "all_finite": lambda: fa.all_finite(grads) & fa.all_finite(plain),
        "unscale": lambda: fa.unscale(grads),
        "global_norm": lambda: [fa.global_norm(g, p) for g in (grads, plain) for p in (1.0, 2.0, 3.5, float("inf"))],
        "clip": lambda: [fa.clip(g, m) for g in (grads, plain) for m in (None, 1.0, float("inf"))],
        "maybe_step": lambda: fa.maybe_step(optimizer, params, opt_state, plain, flag),
        "maybe_step, scaled": lambda: fa.maybe_step(optimizer, params, opt_state, grads, flag),
        "update_scale": lambda: fa.update_scale(scaler, flag),
        "select": lambda: fa.select(flag, params, params),
        "apply_updates": lambda: fa.apply_updates(params, optimizer.update(plain, opt_state, params)[0]),
        "step.accumulate, first": lambda: step.accumulate(state, batch),
        "step.accumulate": lambda: step.accumulate(opened, batch),
        "step.update": lambda: step.update(opened),
        "step": lambda: step(state, [batch, batch]),
        "step, seeded": lambda: step(state, [batch, batch], seed=0),
        "cast_floating": lambda: fa.cast_floating(params, torch.bfloat16),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PROBLEM_MAKERS)
def test_no_stage_reads_a_tensor_in_eager_mode(name: str, backend: str):
    problem = PROBLEM_MAKERS[name]()
    calls = stage_calls(problem, fa.adamw(fa.warmup_cosine(1e-2, 2, 10)), fa.DynamicScale(), backend)
    for stage, call in calls.items():
        with HostReads() as reads:
            call()
        assert not reads.found, stage


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_optimizer_reads_a_tensor_in_eager_mode(optimizer: str):
    problem, chosen = mlp(), OPTIMIZERS[optimizer]()
    step, state = fa.make_step(problem.loss_fn, chosen, max_norm=1.0), fa.init_state(problem.params, chosen)
    window = [problem.batch(0), problem.batch(1)]
    step(state, window)  # the first call of a module is rehearsed, and what it writes to is compared on the host
    with HostReads() as reads:
        step(state, window)
    assert not reads.found


@pytest.mark.parametrize("scaler", SCALERS)
def test_no_scaler_reads_a_tensor_or_makes_a_float64_one(scaler: str):
    state = SCALERS[scaler]()
    for flag in (torch.tensor(True), torch.tensor(False)):
        with HostReads() as reads, Float64Tensors() as wide:
            fa.update_scale(state, flag)
        assert not reads.found and not wide.found


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.complex64])
def test_no_array_of_float64_where_no_leaf_is_float64(dtype: torch.dtype):
    leaf = torch.randn(3).to(dtype)
    grads = fa.ScaledGrads({"a": leaf, "b": [leaf, None, torch.arange(2)]}, 8.0, 2.0)
    with Float64Tensors(scalars=False) as wide:
        more = fa.accumulate(grads, grads, where=torch.tensor(True))
        fa.all_finite(more)
        plain, _ = fa.unscale(more)
        for norm_type in (1.0, 2.0, 3.5, float("inf")):
            fa.global_norm(plain, norm_type)
            fa.clip(more, 0.1, norm_type=norm_type)
            fa.clip(plain, 0.1, norm_type=norm_type)
        fa.scale_backward(lambda p, w: (p.abs() ** 2).sum() * w, fa.StaticScale(8.0), leaf, 2, weight=3.0)
    assert not wide.found


def test_the_float64_recorder_sees_one():
    with Float64Tensors() as wide:
        torch.ones(2).double()
    assert wide.found


def test_a_step_on_fake_tensors_leaves_the_real_module_alone():
    problem = PROBLEMS["conv_net"]()
    before = copy.deepcopy(problem.module.state_dict())
    run_fake(problem, OPTIMIZERS["sgd"], fa.DynamicScale())
    for name, value in problem.module.state_dict().items():
        assert torch.equal(value, before[name])
