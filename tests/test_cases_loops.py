"""Loops of the field: gradients that were silently zero, sums and means, windows, counters and numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa

GRAPH: Any = {"backend": "aot_eager"}
NAN = math.nan

# The compiler itself makes an instance of the class, to look at it.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # forward-mode AD
]


def slowly(*options: Any) -> list[Any]:
    """The options, as parameters that only the slow run takes: each is compiled."""
    return [pytest.param(option, marks=pytest.mark.slow) for option in options]


def run(loss_fn: Callable[..., Any], start: Any, windows: Any, optimizer: Any = None, **options: Any) -> Any:
    """The state after some windows, and the metrics of the last; the scale stays where the test puts it."""
    scaler = options.pop("scaler", fa.StaticScale(8.0))
    buffers = options.pop("buffers", None)
    optimizer = optimizer or fa.sgd(1.0)
    step = fa.make_step(loss_fn, optimizer, **options)
    state, metrics = fa.init_state(start, optimizer, scaler, buffers), None
    for window in windows:
        state, metrics = step(state, window)
    return state, metrics


# L01: stages inside a loss that the engine records


def moved_loss(params: Tensor, x: Tensor) -> Tensor:
    """The loss of the weights after an inner step."""
    inner = fa.sgd(0.1)
    grads = fa.scale_backward(lambda p, x: ((p * x) ** 2).sum(), fa.StaticScale(8.0), params, x).grads
    true_grads, finite = fa.unscale(grads)
    return (fa.maybe_step(inner, params, inner.init(params), true_grads, finite).params ** 2).sum()


META_START, META_X = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.5])
META_EXPECTED = META_START - 2 * META_START * (1 - 0.2 * META_X**2) ** 2  # d/dp (p (1 - 0.2 x^2))^2


@pytest.mark.parametrize(
    "options", [{}, {"backend": "func"}, *slowly({"compile": GRAPH}, {"compile": GRAPH, "donate": True})]
)
def test_L01_differentiating_through_an_update_inside_another_step(options):
    state, _ = run(moved_loss, META_START, [[META_X]], **options)
    torch.testing.assert_close(state.params, META_EXPECTED)


@pytest.mark.parametrize("options", [{"backend": "autograd"}, {"donate": True}, {"donate": True, "backend": "func"}])
def test_L01_differentiating_through_an_update_inside_another_step__engine_refuses(options):
    with pytest.raises(RuntimeError, match=r"scale_backward: found an input that requires grad.*backend='func', don"):
        run(moved_loss, META_START, [[META_X]], **options)
    state, _ = run(moved_loss, META_START, [[META_X]], backend="func", donate=False)
    torch.testing.assert_close(state.params, META_EXPECTED)


def test_L01_differentiating_through_an_update_inside_another_step__engine_refuses_in_a_graph():
    with pytest.raises(Exception, match="Observed exception"):
        run(moved_loss, META_START, [[META_X]], backend="autograd", compile=GRAPH)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_L01_differentiating_through_an_update_inside_another_step__engine_refuses_out_of_a_graph(fresh_dynamo):
    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        print(end="")
        return moved_loss(p, x)

    with pytest.raises(Exception, match=r"found an input that requires grad|Observed exception"):
        run(loss_fn, META_START, [[META_X]], compile={**GRAPH, "fullgraph": False})
    state, _ = run(moved_loss, META_START, [[META_X]], compile=GRAPH)  # nothing is left behind
    torch.testing.assert_close(state.params, META_EXPECTED)


STAGES_ON_PARAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "clip": lambda p: fa.clip(p, 1.0).grads.sum(),
    "global_norm": lambda p: fa.global_norm(p),
    "unscale": lambda p: fa.unscale(fa.ScaledGrads(p, 1.0)).grads.sum(),
    "accumulate": lambda p: fa.accumulate(None, fa.ScaledGrads(p, 1.0)).tree.sum(),
    "add": lambda p: fa.add(None, fa.ScaledGrads(p, 1.0)).tree.sum(),
    "optimizer": lambda p: fa.apply_updates(p, fa.sgd(0.1).update(p, fa.sgd(0.1).init(p), p)[0]).sum(),
    "update": lambda p: run(lambda q, x: (q * x).sum(), p, [[META_X]])[0].params.sum(),
}


@pytest.mark.parametrize("name", STAGES_ON_PARAMS)
def test_L01_differentiating_through_an_update_inside_another_step__each_stage(name):
    loss_fn = lambda p, x: STAGES_ON_PARAMS[name](p)  # noqa: E731
    with pytest.raises(RuntimeError, match="inside a loss that the autograd engine records"):
        fa.scale_backward(loss_fn, fa.NoScale(), META_START, META_X, backend="autograd")
    grads = fa.scale_backward(loss_fn, fa.NoScale(), META_START, META_X, backend="func").grads.tree
    expected = torch.func.grad(lambda p: loss_fn(p, META_X))(META_START)
    assert torch.equal(grads, expected) and bool((grads != 0).any())
    detached = fa.scale_backward(
        lambda p, x: loss_fn(p.detach(), x) + p.sum(), fa.NoScale(), META_START, META_X, backend="autograd"
    )
    assert torch.equal(detached.grads.tree, torch.ones(2))


# L02: no parameter is reached


def no_grad_loss(params: Tensor, x: Tensor) -> Tensor:
    with torch.no_grad():
        return (params * x).sum()


UNREACHED: dict[str, Callable[..., Any]] = {
    "detached": lambda p, x: (p.detach() * x).sum(),
    "no_grad": no_grad_loss,
    "batch_alone": lambda p, x: (x * 2).sum(),
    "rounded": lambda p, x: (p.to(torch.int32) * x).sum(),
    "constant": lambda p, x: torch.tensor(1.0),
    "compared": lambda p, x: (p > x).float().sum(),
}
PATHS: list[dict[str, Any]] = [
    {},
    {"backend": "func"},
    {"backend": "autograd"},
    {"donate": True},
    {"compute_dtype": torch.bfloat16},
    {"compute_dtype": torch.bfloat16, "donate": True},
]


@pytest.mark.parametrize("options", PATHS)
@pytest.mark.parametrize("name", UNREACHED)
def test_L02_no_parameter_is_reached_by_the_loss(name, options):
    x = torch.ones(2, requires_grad=name == "batch_alone")
    with pytest.raises(RuntimeError, match=r"reaches no parameter.*Loss\(value, weight=0\)"):
        run(UNREACHED[name], torch.ones(2), [[x]], **options)
    meant = lambda p, x: fa.Loss(UNREACHED[name](p, x), weight=0)  # noqa: E731
    state, metrics = run(meant, torch.ones(2), [[x]], **options)
    assert torch.equal(state.params, torch.ones(2)) and not metrics.applied and metrics.finite
    assert int(state.skipped) == 1


@pytest.mark.parametrize("options", [{}, {"donate": True}])
def test_L02_no_parameter_is_reached_by_the_loss__in_a_module(options):
    module = nn.Linear(2, 1)
    apply, params, _ = fa.from_module(module)

    def frozen(p: Any, x: Tensor) -> Tensor:
        return apply({name: leaf.detach() for name, leaf in p.items()}, x).sum()

    with pytest.raises(RuntimeError, match="reaches no parameter"):
        run(frozen, params, [[torch.ones(1, 2)]], **options)


def test_L02_no_parameter_is_reached_by_the_loss__one_of_several_micro_batches():
    """A window with a good micro-batch is refused as well, and the caller's state stays."""
    loss_fn = lambda p, x: (p * x).sum() if x[0] == 0 else (p.detach() * x).sum()  # noqa: E731
    step = fa.make_step(loss_fn, fa.sgd(1.0), donate=True)
    state = fa.init_state(torch.ones(2), fa.sgd(1.0))
    with pytest.raises(RuntimeError, match="reaches no parameter"):
        step(state, [torch.zeros(2), torch.ones(2)])
    assert torch.equal(state.params, torch.ones(2))


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_L02_no_parameter_is_reached_by_the_loss__in_a_graph(backend, fresh_dynamo):
    with pytest.raises(Exception, match=r"Observed exception|reaches no parameter"):
        run(UNREACHED["detached"], torch.ones(2), [[torch.ones(2)]], backend=backend, compile=GRAPH)


# L03: derivatives through a skip


def through_two_windows(m: Tensor, *, captured: bool, bad: float = math.inf, backend: str = "func") -> Tensor:
    x = torch.tensor([0.3, 0.7], dtype=m.dtype)

    def loss_fn(p: Tensor, batch: Any) -> Tensor:
        return ((p * batch[0]) ** 2).sum() * (m if captured else batch[1])

    windows = [[(x, m)], [(torch.stack([x[0] * bad, x[1]]), m)]]
    state, _ = run(loss_fn, torch.tensor([1.0, 0.5], dtype=m.dtype), windows, fa.sgd(0.1))
    return (state.params**2).sum()


def central(function: Callable[[Tensor], Tensor], at: float, eps: float = 1e-5) -> Tensor:
    """The derivative by central differences, in float64."""
    ends = [function(torch.tensor(at + sign * eps, dtype=torch.float64)) for sign in (1, -1)]
    return (ends[0] - ends[1]) / (2 * eps)


@pytest.mark.parametrize("bad", [1.0, math.inf, -math.inf, NAN])
def test_L03_skipped_window_and_a_scalar_that_the_loss_captured(bad):
    m = torch.tensor(0.7, dtype=torch.float64)

    def function(m: Tensor) -> Tensor:
        return through_two_windows(m, captured=True, bad=bad)

    expected = central(function, 0.7)
    torch.testing.assert_close(torch.func.grad(function)(m), expected)
    torch.testing.assert_close(torch.func.jvp(function, (m,), (torch.ones_like(m),))[1], expected)
    passed = torch.func.grad(lambda m: through_two_windows(m, captured=False, bad=bad))(m)
    torch.testing.assert_close(passed, expected)
    second = central(lambda m: torch.func.grad(function)(m), 0.7)
    torch.testing.assert_close(torch.func.grad(torch.func.grad(function))(m), second)


def test_L03_skipped_window_and_a_scalar_that_the_loss_captured__each_member_of_a_vmap():
    ms = torch.tensor([0.7, 0.9], dtype=torch.float64)
    function = lambda m: through_two_windows(m, captured=True)  # noqa: E731
    expected = torch.stack([central(function, 0.7), central(function, 0.9)])
    torch.testing.assert_close(torch.vmap(torch.func.grad(function))(ms), expected)


def test_L03_skipped_window_and_a_scalar_that_the_loss_captured__as_a_weight_and_in_buffers():
    """Captured in the weight of the loss, and by stages called by hand."""
    x, optimizer = torch.tensor([0.3, 0.7], dtype=torch.float64), fa.sgd(0.1)

    def function(m: Tensor, stages: bool = False) -> Tensor:
        params, opt_state = torch.tensor([1.0, 0.5], dtype=torch.float64), optimizer.init(torch.ones(2).double())
        scaler = fa.StaticScale(8.0)
        for factor in (1.0, math.inf):
            total = None
            for part in (x, x * factor):
                loss_fn = lambda p, part=part: fa.Loss(((p * part) ** 2).sum() * m, weight=m * m)  # noqa: E731
                total = fa.accumulate(total, fa.scale_backward(loss_fn, scaler, params).grads)
            grads, norm = fa.clip(total, 0.1)
            finite = fa.all_finite(grads, norm=norm)
            params, opt_state = fa.maybe_step(optimizer, params, opt_state, grads, finite)
        return (params**2).sum()

    m = torch.tensor(0.7, dtype=torch.float64)
    expected = central(lambda m: function(m), 0.7, eps=1e-3)  # weights are float32
    torch.testing.assert_close(torch.func.grad(function)(m), expected, rtol=1e-4, atol=1e-6)


# L04: a micro-batch dropped by its weight


def mean_buffer_loss(p: Tensor, x: Tensor, buffers: dict[str, Tensor]) -> fa.Loss:
    value = ((p * x) ** 2).mean()
    mean = 0.9 * buffers["mean"] + 0.1 * x.mean()
    return fa.Loss(value, weight=torch.isfinite(value).float(), buffers={"mean": mean, "n": buffers["n"] + 1})


@pytest.mark.parametrize(
    "options",
    [
        *PATHS,
        *slowly(
            {"compile": GRAPH, "backend": "func"},
            {"compile": GRAPH, "donate": True, "backend": "autograd"},
        ),
    ],
)
def test_L04_micro_batch_dropped_by_its_weight(options, fresh_dynamo):
    good, bad = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])], torch.tensor([NAN, 1.0])
    results = []
    for window in ([good[0], bad, good[1]], good):
        buffers = {"mean": torch.zeros(1), "n": torch.zeros((), dtype=torch.int64)}
        results.append(run(mean_buffer_loss, torch.ones(2), [window], buffers=buffers, **options))
    (state, metrics), (expected, expected_metrics) = results
    assert metrics.finite and metrics.applied and int(state.buffers["n"]) == 2
    torch.testing.assert_close(state.buffers["mean"], 0.09 * torch.tensor([1.5]) + 0.1 * 2.0)
    assert torch.equal(state.buffers["mean"], expected.buffers["mean"])
    assert torch.equal(state.params, expected.params) and torch.equal(metrics.loss, expected_metrics.loss)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0), np.float32(0), 2.0**-151])
def test_L04_micro_batch_dropped_by_its_weight__first_or_last_and_each_kind_of_zero(place, weight):
    """Also the number 0, and in aux; `accumulate(where=)` drops the gradient alone."""

    def loss_fn(p: Tensor, batch: Any, buffers: Tensor) -> fa.Loss:
        x, w = batch
        return fa.Loss((p * x).sum(), weight=w, buffers=x.clone(), aux={"x": x})

    window: list[Any] = [(torch.full((2,), float(i + 1)), 1.0) for i in range(3)]
    window[place] = (torch.full((2,), NAN), weight)
    state, metrics = run(loss_fn, torch.ones(2), [window], buffers=torch.zeros(2))
    kept = [float(i + 1) for i in range(3) if i != place]
    assert metrics.applied
    assert torch.equal(state.buffers, torch.full((2,), kept[-1]))
    assert torch.equal(metrics.aux["x"], torch.full((2,), sum(kept) / 2))
    assert torch.equal(state.params, torch.ones(2) - sum(kept) / 2)


# L06: counters at the end of int32

END = 2**31 - 1


@pytest.mark.parametrize("options", [{}, {"donate": True}, *slowly({"compile": GRAPH})])
@pytest.mark.parametrize("make", [lambda: fa.adam(0.1), lambda: fa.adamw(0.1), lambda: fa.sgd(0.1, momentum=0.9)])
def test_L06_counters_at_the_end_of_int32(make, options, fresh_dynamo):
    optimizer = make()
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, **options)
    state = fa.init_state(torch.ones(2), optimizer, fa.DynamicScale(8.0, growth_interval=2000))
    full = torch.tensor(END, dtype=torch.int32)
    state = fa.TrainState(
        state.params,
        state.opt_state._replace(step=full.clone()),
        state.scaler,
        None,
        None,
        full.clone(),
        full.clone(),
        full.clone(),
    )
    for x, finite in ((1.0, True), (math.inf, False), (math.inf, False), (1.0, True)):
        before = state.params.clone()
        state, metrics = step(state, [torch.full((2,), x)])
        assert bool(metrics.finite) is finite
        assert torch.isfinite(state.params).all() and torch.equal(state.params, before) is not finite
        assert int(state.applied) == int(state.skipped) == int(state.opt_state.step) == END
        assert int(state.skipped_in_a_row) in (0, 1, 2, END)


@pytest.mark.parametrize("interval", [2000, END])
def test_L06_counters_at_the_end_of_int32__of_the_scaler(interval):
    """GradScaler's own tracker grows at its interval, long before."""
    scaler = fa.DynamicScale(8.0, growth_interval=interval)
    tracker = next(name for name in vars(scaler) if "tracker" in name)
    scaler = dataclasses.replace(scaler, **{tracker: torch.tensor(END, dtype=torch.int32)})
    after = fa.update_scale(scaler, torch.tensor(True))
    assert float(after.scale) == 16.0 and int(getattr(after, tracker)) == 0


# L07, L08: sums and means


@pytest.mark.parametrize("options", [*PATHS[:4], *slowly({"compile": GRAPH}, {"compile": GRAPH, "donate": True})])
def test_L07_loss_that_is_already_divided_by_the_window_total(options, fresh_dynamo):
    torch.manual_seed(0)
    lengths, params = [3, 5, 1], torch.randn(4)
    batches = [torch.randn(n, 4) for n in lengths]
    total = sum(lengths)

    def per_item(p: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ p)

    def divided(p: Tensor, x: Tensor) -> fa.Loss:
        return fa.Loss(per_item(p, x).sum() / total, reduction="sum")

    state, metrics = run(divided, params, [batches], **options)
    leaf = params.clone().requires_grad_()
    full = per_item(leaf, torch.cat(batches)).mean()
    full.backward()
    assert leaf.grad is not None
    torch.testing.assert_close(state.params, params - leaf.grad)
    torch.testing.assert_close(metrics.loss, full.detach())
    torch.testing.assert_close(metrics.grad_norm, leaf.grad.norm())


@pytest.mark.parametrize("donate", [False, True])
def test_L07_loss_that_is_already_divided_by_the_window_total__imperative_loop(donate):
    """Sums without a division, of several windows, against torch's own loop; the aux is summed too."""
    torch.manual_seed(0)
    params = torch.randn(4)
    windows = [[torch.randn(n, 4) for n in lengths] for lengths in ([2, 3], [1], [4, 1, 1])]
    loss_fn = lambda p, x: fa.Loss((x @ p).square().sum(), reduction="sum", aux=len(x))  # noqa: E731
    state, metrics = run(loss_fn, params, windows, fa.sgd(0.01), donate=donate)
    leaf = params.clone().requires_grad_()
    optimizer = torch.optim.SGD([leaf], 0.01)
    for window in windows:
        optimizer.zero_grad()
        for x in window:
            (x @ leaf).square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(state.params, leaf.detach())
    assert float(metrics.aux) == 6 and float(metrics.weight) == 1


def test_L07_loss_that_is_already_divided_by_the_window_total__kinds_do_not_mix():
    loss_fn = lambda p, b: fa.Loss((p * b[0]).sum(), reduction=b[1])  # noqa: E731
    x = torch.ones(2)
    for donate in (False, True):
        with pytest.raises(ValueError, match="found reduction 'mean' in a window of 'sum'"):
            run(loss_fn, x, [[(x, "sum"), (x, "mean")]], donate=donate)
    with pytest.raises(ValueError, match=r"found weight 3 with reduction='sum'"):
        run(lambda p, x: fa.Loss((p * x).sum(), weight=3, reduction="sum"), x, [[x]])
    with pytest.raises(ValueError, match="found reduction 'median'"):
        run(loss_fn, x, [[(x, "median")]])


@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_L08_two_losses_of_one_step(backend):
    params, x = torch.tensor([1.0, 0.5]), torch.tensor([0.3, 0.7])
    first, second = fa.DynamicScale(2.0**4), fa.DynamicScale(2.0**14)
    losses: list[Callable[..., Any]] = [lambda p, x: ((p * x) ** 2).sum(), lambda p, x: (p.exp() * x).mean()]
    grads = [
        fa.scale_backward(f, s, params, x, backend=backend).grads for f, s in zip(losses, (first, second), strict=True)
    ]
    true_grads, finite = fa.unscale(fa.add(fa.add(None, grads[0]), grads[1]))
    leaf = params.clone().requires_grad_()
    (losses[0](leaf, x) + losses[1](leaf, x)).backward()
    torch.testing.assert_close(true_grads, leaf.grad)
    swapped = fa.unscale(fa.add(grads[1], grads[0])).grads
    torch.testing.assert_close(swapped, leaf.grad)
    assert finite
    # One overflows: the sum is not applied, and only the scaler of that one backs off.
    overflow = fa.scale_backward(losses[1], second, params, x * math.inf, backend=backend).grads
    finites = [fa.all_finite(grads[0]), fa.all_finite(overflow)]
    assert not fa.unscale(fa.add(grads[0], overflow)).finite
    scalers = [fa.update_scale(s, f) for s, f in zip((first, second), finites, strict=True)]
    assert [float(s.scale) for s in scalers] == [2.0**4, 2.0**13]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 5.0), (0.0, 2.0), (2.0, 0.0)])
def test_L08_two_losses_of_one_step__whatever_their_weights(weights):
    """The gradient of a loss of weight 0 is 0, NaN or not."""
    trees = [torch.tensor([8.0, -2.0]), torch.tensor([1.0, 4.0])]
    scaled = [
        fa.ScaledGrads(t * s * w if w else t * NAN, s, w) for t, s, w in zip(trees, (4.0, 32.0), weights, strict=True)
    ]
    expected = sum((t for t, w in zip(trees, weights, strict=True) if w), torch.zeros(2))
    torch.testing.assert_close(fa.unscale(fa.add(*scaled)).grads, expected)


# L14, L15: numbers


def test_L14_numpy_scalars_as_counts():
    np: Any = numpy  # its types are no Python numbers to a type checker
    x = torch.tensor([1.0, 2.0])
    for weight in (np.int64(3), np.float32(3), np.float64(3), np.int8(3), np.uint16(3)):
        state, metrics = run(lambda p, x, w=weight: fa.Loss((p * x).sum(), weight=w), x, [[x]], fa.sgd(np.float32(0.5)))
        assert float(metrics.weight) == 3 and torch.equal(state.params, x - 0.5 * x)
    for make in (
        lambda n: fa.adam(n(0.125), betas=(n(0.5), n(0.75)), eps=n(0.5), weight_decay=n(0.25)),
        lambda n: fa.sgd(n(0.125), momentum=n(0.5), weight_decay=n(0.25)),
    ):
        results = [run(lambda p, x: (p * x).sum(), x, [[x]] * 3, make(n))[0].params for n in (float, np.float32)]
        assert torch.equal(*results)
    assert torch.equal(fa.clip({"g": x}, np.float64(1.0)).grads["g"], fa.clip({"g": x}, 1.0).grads["g"])
    assert [len(w) for w in fa.windows(range(5), np.int64(2))] == [2, 2, 1]
    assert float(fa.DynamicScale(np.float32(8), growth_interval=np.int32(3)).scale) == 8
    with fa.seeded(np.int64(3)):
        first = torch.rand(1)
    with fa.seeded(3):
        assert torch.equal(torch.rand(1), first)
    flags: list[Any] = [np.bool_(True), True]
    for flag in flags:
        with pytest.raises(TypeError, match="weight: found bool"):
            fa.scale_backward(lambda p: p.sum(), fa.NoScale(), x, weight=flag)


def test_L15_no_warm_up():
    """Against the cosine formula, at both edges: no warm-up, and nothing else."""
    schedule = fa.warmup_cosine(1e-3, 0, 100)
    for count in (0, 1, 50, 99, 100, 150):
        expected = 1e-3 * 0.5 * (1 + math.cos(math.pi * min(count, 100) / 100))
        torch.testing.assert_close(
            schedule(torch.tensor(count)), torch.tensor(expected), rtol=1e-5, atol=1e-9, check_dtype=False
        )
    assert float(schedule(torch.tensor(0))) == pytest.approx(1e-3)
    only = fa.warmup_cosine(1e-3, 100, 100)
    for count in (0, 1, 50, 99, 100):
        value = float(only(torch.tensor(count)))
        assert math.isfinite(value) and value == pytest.approx(1e-3 * count / 100, abs=1e-9)
    x = torch.ones(2)
    state, _ = run(lambda p, x: (p * x).sum(), x, [[x]], fa.sgd(schedule))
    torch.testing.assert_close(state.params, x - 1e-3)


# L18: a custom autograd.Function in a graph


class StraightThrough(torch.autograd.Function):
    """Rounds; the derivative is that of the identity."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0]


class Reversed(StraightThrough):
    """The identity, with a gradient of the other sign."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return -grad_outputs[0]


class Rounded(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.2, 2.3]))

    def forward(self, x: Tensor) -> Tensor:
        return (StraightThrough.apply(self.weight) * x).sum()


L18_OPTIONS = [
    {},
    {"backend": "autograd"},
    {"donate": True},
    {"compute_dtype": torch.bfloat16},
    {"compute_dtype": torch.bfloat16, "donate": True},
]


@pytest.mark.parametrize(
    ("options", "compile"),
    [
        *[(options, False) for options in L18_OPTIONS],
        *[pytest.param(options, GRAPH, marks=pytest.mark.slow) for options in L18_OPTIONS[1::2]],
    ],
)
def test_L18_custom_function_in_a_compiled_func_step(options, compile, fresh_dynamo):
    start, x = torch.tensor([1.2, 2.3]), torch.tensor([2.0, 3.0])
    for function, sign in ((StraightThrough, 1), (Reversed, -1)):
        state, _ = run(lambda p, x, f=function: (f.apply(p) * x).sum(), start, [[x, x]], compile=compile, **options)
        torch.testing.assert_close(state.params, start - sign * x)


@pytest.mark.slow
@pytest.mark.parametrize("options", L18_OPTIONS[::2])  # the others are those of the test before
def test_L18_custom_function_in_a_compiled_func_step__scan_autocast_and_modules(options, fresh_dynamo):
    start, x = torch.tensor([1.2, 2.3]), torch.tensor([2.0, 3.0])
    loss_fn = lambda p, x: (StraightThrough.apply(p) * x).sum()  # noqa: E731
    step = fa.make_step(loss_fn, fa.sgd(1.0), compile=GRAPH, **options)
    initial = fa.init_state(start, fa.sgd(1.0), fa.StaticScale(8.0))
    if options.get("backend") == "autograd":
        with pytest.raises(ValueError, match=r"Call step\(state, micro_batches\) with a list"):
            step.scan(initial, torch.stack([x] * 3))
        state, _ = step(initial, [x] * 3)
    else:
        state, _ = step.scan(initial, torch.stack([x] * 3))
    torch.testing.assert_close(state.params, start - x)
    state, _ = run(fa.autocast(loss_fn, torch.bfloat16), start, [[x]], compile=GRAPH, **options)
    torch.testing.assert_close(state.params, start - x)
    apply, params, _ = fa.from_module(Rounded())
    state, _ = run(lambda p, x: apply(p, x), params, [[x]], compile=GRAPH, **options)
    torch.testing.assert_close(state.params["weight"], start - x)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_L18_custom_function_in_a_compiled_func_step__compiled_by_the_user(backend, fresh_dynamo):
    start, x = torch.tensor([1.2, 2.3]), torch.tensor([2.0, 3.0])
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        graph = torch.compile(
            lambda p, x: (
                fa.scale_backward(
                    lambda p, x: (StraightThrough.apply(p) * x).sum(), fa.StaticScale(8.0), p, x, backend=backend
                ).grads.tree
            ),
            backend="aot_eager",
            fullgraph=True,
        )
        torch.testing.assert_close(graph(start, x), 8 * x)
