"""Faults that people met in public: F functional transforms and compilation. See test_cases.py."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, cast

import optree
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from tests.test_cases import BAD, GOOD, assert_same, linear_loss

BACKENDS: list[Any] = ["func", "autograd"]
compiles = pytest.mark.usefixtures("fresh_dynamo")


def traceable(backend: str) -> contextlib.AbstractContextManager[Any]:
    """What `torch.autograd.grad` needs to be traced into a graph."""
    return torch._dynamo.config.patch(trace_autograd_ops=True) if backend == "autograd" else contextlib.nullcontext()


def gradient(loss: Callable[..., Any], params: Any, *batch: Any, backend: Any = "func", scaler: Any = None) -> Any:
    """In true units, through the scaled backward."""
    scaler = fa.StaticScale(1024.0) if scaler is None else scaler
    return fa.unscale(fa.scale_backward(loss, scaler, params, *batch, backend=backend).grads).grads


@compiles
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("times", [1, 2])
def test_F01_compile_of_func_grad_silently_wrong(times, backend, compiler):
    """pytorch/pytorch#136662: repeated writes into slices count every time, compiled or not."""

    def loss(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for _ in range(times):
            y[:, 0] += x[:, 2].abs()
        return y.sum()

    def run(x: Tensor) -> Tensor:
        return gradient(loss, x, backend=backend)

    x = torch.tensor([[1.0, 2.0, -3.0], [4.0, 5.0, 6.0]])
    expected = torch.tensor([[0.0, 0.0, -times], [0.0, 0.0, times]])
    with traceable(backend):
        for found in (run(x), torch.compile(run, fullgraph=True, backend=compiler)(x)):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def norm_and_linear() -> tuple[Callable[..., Any], Any]:
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3)))
    return apply, params


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own, of jvp
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 1e-2), (torch.bfloat16, 5e-2)])
def test_F02_linearize_and_jvp_with_autocast(dtype, tolerance):
    """pytorch/pytorch#172383: jvp through an autocast loss is finite, and agrees with the gradient."""
    apply, params = norm_and_linear()
    loss = fa.autocast(lambda p, x: apply(p, x).float().square().mean(), dtype)
    x, tangents = torch.randn(5, 4), {name: torch.randn_like(leaf) for name, leaf in params.items()}
    tangent = torch.func.jvp(lambda p: loss(p, x), (params,), (tangents,))[1]
    grads = gradient(loss, params, x, scaler=fa.StaticScale(8.0))
    expected = torch.stack([(grads[name] * tangents[name]).sum() for name in params]).sum()
    assert torch.isfinite(tangent)
    assert tangent.item() == pytest.approx(expected.item(), rel=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_F03_autocast_under_grad_and_vmap(dtype, backend):
    """pytorch/pytorch#187265: the loss computes in half precision inside grad and vmap, the gradients are float32."""
    seen = []

    def forward(params: Any, x: Tensor) -> Tensor:
        out = x @ params["w"]
        seen.append(out.dtype)
        return out.float().square().sum()

    torch.manual_seed(0)
    params, x = {"w": torch.randn(4, 3)}, torch.randn(6, 4)
    loss = fa.autocast(forward, dtype)
    whole = gradient(loss, params, x, backend=backend, scaler=fa.StaticScale(8.0))["w"]
    assert seen == [dtype] and whole.dtype == torch.float32
    if backend == "func":
        each = vmap(lambda row: gradient(loss, params, row[None], scaler=fa.StaticScale(8.0))["w"])(x)
        assert seen == [dtype] * 2 and each.shape == (6, 4, 3) and each.dtype == torch.float32
        torch.testing.assert_close(each.sum(0), whole, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("norm", [nn.LayerNorm(8), nn.GroupNorm(2, 8)])
def test_F04_per_sample_gradients_through_norm_layers_under_autocast(norm):
    """meta-pytorch/opacus#740: vmap over a norm layer works where the norm runs in float32 outside autocast."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 8), norm, nn.Linear(8, 2)

        def forward(self, x):
            x = self.first(x)
            with torch.autocast("cpu", enabled=False):
                x = self.norm(x.float())
            return self.last(x)

    torch.manual_seed(0)
    apply, params, _ = fa.from_module(Model())
    loss, x = fa.autocast(lambda p, x: apply(p, x).float().square().mean(), torch.bfloat16), torch.randn(3, 4)
    each = vmap(lambda row: gradient(loss, params, row[None]))(x)
    for index in range(3):
        alone = gradient(loss, params, x[index : index + 1])
        for name in params:
            torch.testing.assert_close(each[name][index], alone[name], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_F05_autocast_weight_cache(backend):
    """pytorch/pytorch#158232: neither a warm-up without gradient nor an update leaves a stale cast behind."""
    loss = fa.autocast(lambda p, x: nn.functional.linear(x, p["w"]).float().sum(), torch.bfloat16)
    params, x = {"w": torch.ones(2, 2)}, torch.ones(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            assert loss(params, x).item() == 4.0
        assert gradient(loss, params, x, backend=backend)["w"].tolist() == [[1.0, 1.0], [1.0, 1.0]]

        optimizer = fa.sgd(4.0)
        step = fa.make_step(loss, optimizer, backend=backend)
        state = fa.init_state({"w": torch.ones(1, 1)}, optimizer, fa.StaticScale(8.0))
        losses = []
        for _ in range(3):
            state, metrics = step(state, [-torch.ones(1, 1)])
            losses.append(metrics.loss.item())
    assert losses == [-1.0, -5.0, -9.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_F06_batchnorm_buffers_under_functional_transforms(backend):
    """pytorch/pytorch#85533: new buffers are returned, the given ones stay, a captured one is named."""
    apply, params, buffers = fa.from_module(nn.BatchNorm1d(1))
    x, before = torch.tensor([[0.0], [2.0]]), {name: b.clone() for name, b in buffers.items()}

    def loss(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(out.square().mean(), buffers=buffers)

    _, _, (_, after) = fa.scale_backward(loss, fa.StaticScale(8.0), params, x, buffers, backend=backend)
    found = [after[name].item() for name in ("running_mean", "running_var", "num_batches_tracked")]
    assert found == pytest.approx([0.1, 1.1, 1], abs=1e-6)
    assert after["num_batches_tracked"].dtype == torch.int64
    assert_same(buffers, before)
    with pytest.raises(RuntimeError, match=r"running_mean.*with_buffers"):
        gradient(lambda p, x: apply(p, x).sum(), params, x, backend=backend)
    assert_same(buffers, before)

    everything = {**params, **buffers}
    grads = gradient(lambda p: (p["weight"] * p["running_var"]).sum(), everything, backend=backend)
    assert grads["num_batches_tracked"] is None and grads["weight"].item() == 1.0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0]))
        self.t = self.w

    def forward(self, x):
        return (self.w * self.t * x).sum()


@pytest.mark.parametrize("backend", BACKENDS)
def test_F07_tied_weights_with_functional_call(backend):
    """pytorch/pytorch#86708: tied weights are one leaf whose gradient sums both uses; two are refused."""
    apply, params, _ = fa.from_module(Tied())
    assert list(params) == ["w"]
    grads, loss, _ = fa.scale_backward(apply, fa.StaticScale(8.0), params, torch.ones(1), backend=backend)
    assert loss.item() == 4.0 and fa.unscale(grads).grads["w"].item() == 4.0
    with pytest.raises(ValueError, match=r"extra \['t'\]"):
        apply({"w": torch.ones(1), "t": torch.zeros(1)}, torch.ones(1))
    with pytest.raises(ValueError, match=r"missing \['w'\]"):
        apply({"t": torch.ones(1)}, torch.ones(1))

    module = Tied()
    module.t = nn.Parameter(torch.tensor([2.0]))
    apart, params, _ = fa.from_module(module)
    grads = gradient(apart, params, torch.ones(1), backend=backend)
    assert (grads["w"].item(), grads["t"].item()) == (2.0, 2.0)


def dropout_loss(params: Any, x: Tensor) -> Tensor:
    return (torch.dropout(x, 0.5, True) * params["w"]).sum()


def test_F09_randomness_repeat_retry_per_sample():
    """pytorch/functorch#408: the same seed gives the same bits on both backends, and the generator is left alone."""
    params, x = {"w": torch.ones(64)}, torch.ones(64)
    torch.manual_seed(0)
    first, second = gradient(dropout_loss, params, x), gradient(dropout_loss, params, x)
    assert not torch.equal(first["w"], second["w"])

    optimizer = fa.sgd(1.0)
    results = []
    for backend in BACKENDS * 2:
        step = fa.make_step(dropout_loss, optimizer, backend=backend)
        before = torch.get_rng_state()
        results.append(step(fa.init_state(params, optimizer), [x, x], seed=7))
        assert torch.equal(torch.get_rng_state(), before)
    for result in results[1:]:
        assert_same(result, results[0])

    w = torch.ones(64, requires_grad=True)
    with fa.seeded(7):
        (expected,) = torch.autograd.grad(dropout_loss({"w": w}, x) + dropout_loss({"w": w}, x), w)
    assert torch.equal(1 - results[0][0].params["w"], expected / 2)


@pytest.mark.parametrize("make", [lambda: fa.sgd(0.1), lambda: fa.adamw(0.1)])
def test_F09_randomness_repeat_retry_per_sample__neutral(make):
    """pytorch/functorch#408: no function of the library draws a random number."""
    before = torch.get_rng_state()
    optimizer = make()
    step = fa.make_step(linear_loss, optimizer, max_norm=1.0)
    state = fa.init_state({"w": torch.ones(2)}, optimizer)
    for x in (1.0, math.inf):
        state, _ = step(state, [torch.full((2,), x)] * 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_F09_randomness_repeat_retry_per_sample__vmap():
    """pytorch/functorch#408: vmap's own choice of randomness goes through, and so does its error."""
    params, x = {"w": torch.ones(16)}, torch.ones(4, 16)

    def each(row: Tensor) -> Tensor:
        return gradient(dropout_loss, params, row)["w"]

    with pytest.raises(RuntimeError, match="randomness"):
        vmap(each)(x)
    with fa.seeded(0):
        assert len(vmap(each, randomness="same")(x).unique(dim=0)) == 1
        assert len(vmap(each, randomness="different")(x).unique(dim=0)) == 4


def test_F10_activation_checkpointing_inside_torch_func():
    """pytorch/pytorch#122729: the autograd backend checkpoints; the func backend says which one to use."""

    def loss(x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(torch.sin, x, use_reentrant=False))

    one = torch.tensor(1.0)
    assert gradient(loss, one, backend="autograd").item() == pytest.approx(0.5403023, abs=1e-6)
    with pytest.raises(RuntimeError, match="backend='autograd'"):
        gradient(loss, one)


def test_F10_activation_checkpointing_inside_torch_func__reentrant():
    """pytorch/pytorch#122729: reentrant checkpoints know no torch.autograd.grad; both errors tell a way out."""

    def loss(x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(torch.sin, x, use_reentrant=True))

    with pytest.raises(RuntimeError, match="backend='autograd'"):
        gradient(loss, torch.tensor(1.0))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        gradient(loss, torch.tensor(1.0), backend="autograd")


def test_F10_activation_checkpointing_inside_torch_func__window():
    """pytorch/pytorch#122729: a checkpointed model trains with the values of the same model without checkpoints."""
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.5), nn.Linear(4, 1)))
    optimizer, x = fa.adam(0.1), torch.randn(5, 3)

    def run(forward: Callable[..., Any]) -> Any:
        step = fa.make_step(lambda p, x: forward(p, x).square().mean(), optimizer, backend="autograd")
        return step(fa.init_state(params, optimizer), [x, x + 1], seed=1)

    assert_same(run(lambda p, x: checkpoint(apply, p, x, use_reentrant=False)), run(apply))


def test_F11_legacy_autograd_function_inside_torch_func():
    """pytorch/pytorch#170496: a Function without setup_context works on the autograd backend."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            return 2 * grad

    def loss(x: Tensor) -> Tensor:
        return cast(Tensor, Double.apply(x))

    assert gradient(loss, torch.tensor(1.0), backend="autograd").item() == 2.0
    with pytest.raises(RuntimeError, match=r"setup_context.*backend='autograd'"):
        gradient(loss, torch.tensor(1.0))


@compiles
@pytest.mark.parametrize("backend", BACKENDS)
def test_F12_functional_call_and_grad_under_compile(backend):
    """pytorch/pytorch#100105: the compiled gradient of a module is the eager one, bit for bit."""
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(nn.Linear(3, 2))

    def run(params: Any, x: Tensor) -> Any:
        return fa.scale_backward(
            lambda p, x: apply(p, x).square().mean(), fa.StaticScale(8.0), params, x, backend=backend
        )

    x = torch.randn(4, 3)
    with traceable(backend):
        assert_same(torch.compile(run, fullgraph=True, backend="aot_eager")(params, x), run(params, x))


@compiles
@pytest.mark.parametrize(
    "make",
    [
        lambda: fa.sgd(lambda count: 0.5**count, momentum=0.9),
        pytest.param(lambda: fa.adamw(fa.warmup_cosine(0.1, 5, 30)), marks=pytest.mark.slow),
    ],
)
def test_F13_recompilation_when_the_scale_or_lr_changes(make):
    """pytorch/pytorch#171320: one compilation over 20 windows in which scale, rate and all counters move."""
    optimizer = make()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(fa.make_step(linear_loss, optimizer, max_norm=1.0), fullgraph=True, backend=counter)
    state = fa.init_state({"w": torch.ones(2)}, optimizer, fa.DynamicScale(8.0, growth_interval=2))
    scales = set()
    for index in range(20):
        state, metrics = step(state, [torch.full((2,), math.inf if index % 7 == 3 else 0.5)])
        scales.add(metrics.scale.item())
    assert counter.frame_count == 1
    assert len(scales) > 3 and state.applied.item() == 17 and state.skipped.item() == 3


@compiles
def test_F13_recompilation_when_the_scale_or_lr_changes__stages():
    """pytorch/pytorch#171320: the same where the rate is a tensor argument of the caller's own step."""
    counter = CompileCounterWithBackend("aot_eager")

    def run(params: Any, scaler: Any, lr: Tensor, x: Tensor) -> Any:
        optimizer = fa.sgd(lr)
        grads, finite = fa.unscale(fa.scale_backward(linear_loss, scaler, params, x).grads)
        params, _ = fa.maybe_step(optimizer, params, optimizer.init(params), grads, finite)
        return params, fa.update_scale(scaler, finite)

    compiled = torch.compile(run, fullgraph=True, backend=counter)
    params, scaler, expected = {"w": torch.zeros(1)}, fa.DynamicScale(8.0, growth_interval=3), 0.0
    for index in range(20):
        x = math.inf if index == 5 else 1.0
        params, scaler = compiled(params, scaler, torch.tensor(2.0**-index), torch.tensor([x]))
        expected -= 0.0 if index == 5 else 2.0**-index
        assert params["w"].item() == pytest.approx(expected, abs=1e-6)
    assert counter.frame_count == 1


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device to capture a graph on")
def test_F14_cuda_graph_capture_needs_static_scale_storage():
    """pytorch/pytorch PR#55562: one captured step, its new state copied into the old one's storage, replays."""
    optimizer = fa.adam(0.1)
    step = fa.make_step(lambda p, x: (p["w"] * x).square().mean(), optimizer, max_norm=1.0)
    batches = [torch.full((4,), x, device="cuda") for x in (0.5, 1.0, math.inf, 2.0, 0.25)]

    def start() -> fa.TrainState:
        params = {"w": torch.linspace(-1, 1, 4, device="cuda")}
        return fa.init_state(params, optimizer, fa.DynamicScale(8.0, growth_interval=2))

    expected, state = [], start()
    for batch in batches:
        state, metrics = step(state, [batch])
        expected.append((state, metrics))

    # Every leaf in storage of its own: the counters of a fresh state may share theirs.
    static = cast(Any, optree.tree_map(torch.clone, cast(Any, start())))
    static_batch = batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels load and libraries set up before the capture
        for _ in range(3):
            step(static, [static_batch])
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        after, captured = step(static, [static_batch])
        # The scale among the metrics is the old state's own tensor, which is about to be overwritten.
        captured = cast(Any, optree.tree_map(torch.clone, cast(Any, captured)))
        for old, new in zip(optree.tree_leaves(static), optree.tree_leaves(cast(Any, after)), strict=True):
            old.copy_(new)
    for batch, (state, metrics) in zip(batches, expected, strict=True):
        static_batch.copy_(batch)
        graph.replay()
        torch.cuda.synchronize()
        assert_same(static, state)
        assert_same(captured, metrics)
    assert (static.applied.item(), static.skipped.item()) == (4, 1)


@compiles
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("value, finite", [(8.0, True), (math.inf, False), (math.nan, False)])
def test_F15_private_amp_op_inside_compile(value, finite, compiler):
    """pytorch/pytorch#138412: unscaling and its flag are plain operators, which every compiler takes."""

    def run(tree: Any, scale: Tensor) -> fa.Unscaled:
        return fa.unscale(fa.ScaledGrads(tree, scale))

    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    grads, flag = compiled([torch.tensor([value])], torch.tensor(8.0))
    assert bool(flag) is finite
    assert grads[0].item() == pytest.approx(value / 8, nan_ok=True)


@compiles
@pytest.mark.parametrize("backend", ["func", pytest.param("autograd", marks=pytest.mark.slow)])
def test_F16_whole_step_compile_breaks_at_backward_and_optimizer(backend):
    """pytorch/pytorch#120814: one graph from the loss to the scale, and eager mode's trajectory with an overflow."""
    torch.manual_seed(0)
    apply, params, _ = fa.from_module(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    optimizer = fa.adamw(0.05)
    step = fa.make_step(lambda p, x: apply(p, x).square().mean(), optimizer, max_norm=0.5, backend=backend)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter)
    eager = state = fa.init_state(params, optimizer, fa.DynamicScale(2.0**10, growth_interval=3))
    for index in range(10):
        window = [torch.randn(2, 3), torch.randn(2, 3) * (math.inf if index == 4 else 1.0)]
        with traceable(backend):
            state, metrics = compiled(state, window)
        eager, eager_metrics = step(eager, window)
        for found, expected in ((state, eager), (metrics, eager_metrics)):
            pairs = zip(optree.tree_leaves(cast(Any, found)), optree.tree_leaves(cast(Any, expected)), strict=True)
            for ours, theirs in pairs:
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert counter.frame_count == 1
    assert (state.applied.item(), state.skipped.item(), state.scaler.scale.item()) == (9, 1, 2.0**11)


def whole_tree(lr: float) -> fa.Optimizer:
    return fa.partition({"all": fa.adamw(lr)}, lambda path, leaf: "all")


@compiles
@pytest.mark.parametrize(
    "make, tree, buffers",
    [
        (fa.sgd, {"w": 1.0}, None),
        (fa.sgd, [{"w": None}, {"w": 1.0}], {"mean": None}),
        (fa.adamw, {"w": 1.0, "none": None}, {}),  # what from_module gives for a module without buffers
        (fa.adamw, {"head": {"w": 1.0}, "body": {"w": None, "b": None}}, None),
        pytest.param(whole_tree, {"head": {"w": 1.0}, "body": {"w": None, "b": None}}, None, marks=pytest.mark.slow),
    ],
)
def test_F16_whole_step_compile_breaks_at_backward_and_optimizer__trees(make, tree, buffers):
    """pytorch/pytorch#120814: missing leaves, whole branches of them and empty trees are no reason for a break."""
    params = optree.tree_map(lambda leaf: None if leaf is None else torch.tensor([leaf]), tree, none_is_leaf=True)
    optimizer = make(0.5)

    def loss(params: Any, x: Tensor, buffers: Any = None) -> fa.Loss:
        (leaf,) = [leaf for leaf in tree_leaves(params) if leaf is not None]
        return fa.Loss((leaf * x).sum(), aux={"epoch": 3}, buffers=buffers)

    step = fa.make_step(loss, optimizer, max_norm=1.0)
    state = fa.init_state(params, optimizer, fa.StaticScale(8.0), buffers)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(state, [torch.tensor(2.0)])
    leaves, structure = optree.tree_flatten(cast(Any, found), none_is_leaf=True)
    expected, expected_structure = optree.tree_flatten(cast(Any, step(state, [torch.tensor(2.0)])), none_is_leaf=True)
    assert structure == expected_structure
    torch.testing.assert_close(leaves, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    "loss, gradient",
    [
        (lambda p: ((p["a"] + p["b"]) ** 2).sum(), [8.0, 12.0]),
        (lambda p: (p["a"] + p["b"]).sum(), [1.0, 1.0]),
        (lambda p: (p["a"] + p["b"]).mean(), [0.5, 0.5]),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_F18_two_leaves_of_torch_func_grad_are_the_same_tensor(backend, loss, gradient):
    """pytorch/pytorch#46168: shared and expanded gradients pass every stage once, and are not written to."""
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    tree = torch.func.grad(loss)(params)
    for scaled in (
        fa.ScaledGrads(tree, scale=2.0),
        fa.scale_backward(loss, fa.StaticScale(2.0), params, backend=backend).grads,
    ):
        true = (torch.tensor(gradient) * scaled.tree["a"][0] / gradient[0] / 2).tolist()
        before = {name: leaf.clone() for name, leaf in scaled.tree.items()}
        versions = {name: leaf._version for name, leaf in scaled.tree.items()}

        grads, finite = fa.unscale(scaled)
        assert finite and grads["a"].tolist() == true and grads["b"].tolist() == true
        total = fa.accumulate(fa.accumulate(None, scaled), scaled)
        doubled = fa.unscale(total).grads
        assert doubled["a"].tolist() == true and doubled["b"].tolist() == true
        for clipped in (fa.clip(grads, 1e-3).grads, fa.unscale(fa.clip(scaled, 1e-3).grads).grads):
            assert fa.global_norm(clipped).item() == pytest.approx(1e-3, rel=1e-5)
        optimizer = fa.sgd(1.0, momentum=0.9)
        moved = fa.maybe_step(optimizer, params, optimizer.init(params), scaled, finite).params
        for name in params:
            torch.testing.assert_close(moved[name], params[name] - torch.tensor(true), rtol=0, atol=0)

        assert_same({name: leaf + 0 for name, leaf in scaled.tree.items()}, before)
        assert {name: leaf._version for name, leaf in scaled.tree.items()} == versions
    assert params["a"].tolist() == [1.0, 2.0] and params["b"].tolist() == [3.0, 4.0]


def test_F18_two_leaves_of_torch_func_grad_are_the_same_tensor__case():
    """pytorch/pytorch#46168: the numbers of the case: [8, 12] unscaled by 2 is [4, 6] at both leaves."""
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    tree = torch.func.grad(lambda p: ((p["a"] + p["b"]) ** 2).sum())(params)
    assert tree["a"].tolist() == [8.0, 12.0]
    grads = fa.unscale(fa.ScaledGrads(tree, scale=2.0)).grads
    assert grads["a"].tolist() == [4.0, 6.0] and grads["b"].tolist() == [4.0, 6.0]
    assert tree["a"].tolist() == [8.0, 12.0] and tree["b"].tolist() == [8.0, 12.0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("make", [lambda: fa.sgd(0.1, momentum=0.9), lambda: fa.adamw(0.1)])
def test_F19_gradients_keep_the_autograd_graph_alive(make, weight, backend):
    """pytorch/functorch#639: nothing that comes out requires grad, though the parameters that went in do."""
    optimizer = make()
    params = {"w": nn.Parameter(torch.ones(2)), "b": torch.ones(1, requires_grad=True) * 2}
    step = fa.make_step(
        lambda p, x: fa.Loss((p["w"] * x).sum() + p["b"].sum(), weight, aux=p["w"]), optimizer, backend=backend
    )
    state = fa.init_state(params, optimizer)
    seen: list[Any] = [state]
    scaled = fa.scale_backward(lambda p: fa.Loss(p["w"].sum(), aux=p["w"] * 2), state.scaler, params, backend=backend)
    grads, finite = fa.unscale(scaled.grads)
    seen += [
        scaled,
        grads,
        fa.accumulate(scaled.grads, scaled.grads),
        fa.clip(grads, 0.1),
        fa.update_scale(state.scaler, finite),
    ]
    for flag in (GOOD, BAD):
        for given in (grads, {**grads, "w": None}):
            seen.append(fa.maybe_step(optimizer, params, optimizer.init(params), given, flag))
    for _ in range(3):
        state = step.accumulate(state, torch.ones(2, requires_grad=True))
        seen.append(state)
        state, metrics = step.update(state)
        seen += [state, metrics]
    for leaf in optree.tree_leaves(cast(Any, seen)):
        assert not leaf.requires_grad and leaf.grad_fn is None
    assert params["w"].requires_grad and params["b"].grad_fn is not None


@pytest.mark.parametrize("flag, expected", [(GOOD, -3.0), (BAD, 0.0)])
def test_F19_gradients_keep_the_autograd_graph_alive__differentiable(flag, expected):
    """pytorch/functorch#639: history is kept where an outer torch.func.grad asks for it: d(w - lr * 3) / d lr."""

    def trained(lr: Tensor) -> Tensor:
        params, scaler, optimizer = {"w": torch.ones(1)}, fa.StaticScale(8.0), fa.sgd(lr)
        grads, finite = fa.unscale(fa.scale_backward(lambda p: 3 * p["w"].sum(), scaler, params).grads)
        return fa.maybe_step(optimizer, params, optimizer.init(params), grads, finite & flag).params["w"].sum()

    assert torch.func.grad(trained)(torch.tensor(0.1)).item() == expected


@pytest.mark.parametrize("make", [lambda: fa.adamw(0.1), lambda: fa.sgd(0.1, momentum=0.9, weight_decay=0.5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_F20_frozen_leaves_still_get_gradients_norm_share_and_weight_decay(backend, make):
    """ahrefs/ocannl#673: what split leaves out has no gradient, no share in the norm and no weight decay."""
    params = {"train": torch.ones(1), "frozen": torch.ones(1)}
    trainable, frozen = fa.split(params, lambda path, leaf: path == "train")

    def loss(trainable: Any, x: Tensor) -> Tensor:
        return sum((leaf**2).sum() for leaf in fa.merge(trainable, frozen).values()) * x  # pyright: ignore

    optimizer = make()
    step = fa.make_step(loss, optimizer, max_norm=1.0, backend=backend)
    state, metrics = step(fa.init_state(trainable, optimizer), [torch.tensor(1.0)])
    assert metrics.grad_norm.item() == 2.0
    after = fa.merge(state.params, frozen)
    assert after["frozen"] is params["frozen"] and after["train"].item() < 1.0


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        self.moving = nn.Parameter(torch.ones(1))
        self.frozen = nn.Parameter(torch.ones(1))

    def forward(self):
        return (self.moving**2 + self.frozen**2).sum()


@pytest.mark.parametrize("make", [lambda: fa.adamw(0.1), lambda: fa.sgd(0.1, momentum=0.9, weight_decay=0.5)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_F20_frozen_leaves_still_get_gradients_norm_share_and_weight_decay__module(backend, make):
    """ahrefs/ocannl#673: requires_grad=False of a module is kept: such a parameter is among the buffers."""
    module = Squares()
    module.frozen.requires_grad_(False)
    apply, params, buffers = fa.from_module(module)
    assert list(params) == ["moving"] and list(buffers) == ["frozen"]

    def loss(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers)
        return fa.Loss(out * x, buffers=buffers)

    optimizer = make()
    step = fa.make_step(loss, optimizer, max_norm=1.0, backend=backend)
    state, metrics = step(fa.init_state(params, optimizer, buffers=buffers), [torch.tensor(1.0)])
    assert metrics.grad_norm.item() == 2.0
    assert state.buffers["frozen"].item() == 1.0 and state.params["moving"].item() < 1.0


def adam_by_hand(lr: float = 0.1) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """An optax-style pair: init(params) and update(grads, state, params), straight from the paper."""

    def init(params: Any) -> Any:
        zero = {name: torch.zeros_like(leaf) for name, leaf in params.items()}
        return {"t": torch.tensor(0), "m": zero, "v": zero}

    def update(grads: Any, state: Any, params: Any) -> Any:
        t = state["t"] + 1
        first, second = (1 - 0.9 ** t.double()).float(), (1 - 0.999 ** t.double()).float()
        m = {name: 0.9 * state["m"][name] + 0.1 * g for name, g in grads.items()}
        v = {name: 0.999 * state["v"][name] + 0.001 * g**2 for name, g in grads.items()}
        updates = {name: -lr * (m[name] / first) / ((v[name] / second).sqrt() + 1e-8) for name in grads}
        return updates, {"t": t, "m": m, "v": v}

    return init, update


@pytest.mark.parametrize("form", ["Optimizer", "update only", "pair", "function"])
def test_F23_functional_optimizers_that_users_have_to_write_themselves(form):
    """pytorch/functorch#372: five steps of each form are five steps of torch.optim.Adam."""
    ours = fa.adam(0.1)
    optimizer, init = {
        "Optimizer": (ours, ours.init),
        "update only": (fa.Optimizer(ours.init, ours.update), ours.init),
        "pair": (adam_by_hand(), adam_by_hand()[0]),
        "function": (adam_by_hand()[1], adam_by_hand()[0]),
    }[form]
    torch.manual_seed(0)
    start = torch.randn(5)
    weight = nn.Parameter(start.clone())
    reference = torch.optim.Adam([weight], lr=0.1)
    params, opt_state = {"w": start}, init({"w": start})
    for _ in range(5):
        grad = torch.randn(5)
        params, opt_state = fa.maybe_step(optimizer, params, opt_state, {"w": grad}, GOOD)
        weight.grad = grad
        reference.step()
        torch.testing.assert_close(params["w"], weight.detach(), rtol=0, atol=1e-6)


def test_F23_functional_optimizers_that_users_have_to_write_themselves__function_without_state():
    """pytorch/functorch#372: params - lr * g as a plain function, without a state."""
    params = {"w": torch.ones(1)}

    def update(grads: Any, state: Any, params: Any) -> Any:
        return {"w": -0.1 * grads["w"]}, state

    for flag, expected in ((GOOD, 0.9), (BAD, 1.0)):
        after, state = fa.maybe_step(update, params, None, {"w": torch.ones(1)}, flag)
        assert after["w"].item() == pytest.approx(expected) and state is None


@pytest.mark.parametrize("given", [torch.optim.Adam, torch.optim.Adam([nn.Parameter(torch.ones(1))]), None, 0.1])
def test_F23_functional_optimizers_that_users_have_to_write_themselves__torch_optim(given):
    """pytorch/functorch#372: what can not be a pure update is refused, with what to use."""
    params = {"w": torch.ones(1)}
    with pytest.raises(TypeError, match=r"optimizer: found.*functional_amp\.sgd, adam"):
        fa.maybe_step(given, params, None, params, GOOD)
    with pytest.raises(TypeError, match=r"optimizer: found.*functional_amp\.sgd, adam"):
        fa.init_state(params, given)
