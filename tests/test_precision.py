"""Precision as a transformation of the loss function: the values of casting, and of torch.autocast, by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_amp as fa
from tests.models import PROBLEMS, Problem, conv_net, criterion, mlp, overflowing, transformer

BACKENDS = ["func", "autograd"]
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, needs_cuda])]


def mse(params: Any, batch: Any) -> Tensor:
    """A loss with two matrix products, in whatever dtype comes in."""
    hidden = torch.tanh(batch["x"] @ params["w1"] + params["b1"])
    return ((hidden @ params["w2"] - batch["y"]) ** 2).mean()


def mse_params(dtype: torch.dtype = F32, device: str = "cpu") -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"w1": (4, 8), "b1": (8,), "w2": (8, 2)}
    return {name: torch.randn(shape, generator=g).to(device, dtype) for name, shape in shapes.items()}


def mse_batch(seed: int = 0, device: str = "cpu") -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(100 + seed)
    return {"x": torch.randn(6, 4, generator=g).to(device), "y": torch.randn(6, 2, generator=g).to(device)}


def imperative(
    loss_fn: Callable[..., Tensor], params: dict[str, Tensor], *batch: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and its gradients by torch's own backward."""
    leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
    loss = loss_fn(leaves, *batch)
    loss.backward()
    return loss.detach(), {
        name: leaf.grad if leaf.grad is not None else torch.zeros_like(leaf) for name, leaf in leaves.items()
    }


def cast_by_hand(loss_fn: Callable[..., Tensor], dtype: torch.dtype) -> Callable[..., Tensor]:
    def by_hand(params: Any, batch: Any) -> Tensor:
        batch = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
        return loss_fn({name: p.to(dtype) for name, p in params.items()}, batch).float()

    return by_hand


def autocast_by_hand(loss_fn: Callable[..., Tensor], dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    def by_hand(params: Any, batch: Any) -> Tensor:
        with torch.autocast(device, dtype=dtype):
            return loss_fn(params, batch)

    return by_hand


# Policy


@pytest.mark.parametrize(
    ("text", "dtypes"),
    [
        ("params=float32,compute=float16,output=float32", (F32, F16, F32)),
        ("p=f32,c=f16,o=f32", (F32, F16, F32)),
        ("o=float32, c=bfloat16, p=f64", (F64, BF16, F32)),
        (" params = full , compute = half , output = bf16 ", (F32, F16, BF16)),
        ("float32", (F32, F32, F32)),
        ("full", (F32, F32, F32)),
        ("f32", (F32, F32, F32)),
        ("half", (F16, F16, F16)),
        ("f16", (F16, F16, F16)),
        ("float16", (F16, F16, F16)),
        ("bf16", (BF16, BF16, BF16)),
        ("bfloat16", (BF16, BF16, BF16)),
        ("float64", (F64, F64, F64)),
        (" f64 ", (F64, F64, F64)),
        # What is left out, by jmp's rule: params are float32, compute follows params, output follows compute.
        ("c=f16", (F32, F16, F16)),
        ("p=f16,c=f16", (F16, F16, F16)),
        ("p=f16,c=bf16", (F16, BF16, BF16)),
        ("p=bf16", (BF16, BF16, BF16)),
        ("o=f16", (F32, F32, F16)),
        ("p=f16,o=f32", (F16, F16, F32)),
    ],
)
def test_a_policy_is_read_from_its_long_short_and_single_form(text: str, dtypes: tuple[torch.dtype, ...]):
    policy = fa.Policy.parse(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == dtypes
    assert policy == fa.Policy(*dtypes) and hash(policy) == hash(fa.Policy(*dtypes))


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("", ValueError, r"found dtype '', expected one of float32"),
        ("float8", ValueError, r"found dtype 'float8', expected one of float32"),
        ("int32", ValueError, r"found dtype 'int32'"),
        ("p=f32,c=f99", ValueError, r"found dtype 'f99'"),
        ("p=", ValueError, r"found dtype ''"),
        ("x=f32", ValueError, r"found 'x=f32' in 'x=f32', expected params=, compute= or output="),
        ("p=f32,f16", ValueError, r"found 'f16' in"),
        ("p=f32,", ValueError, r"found '' in"),
        ("p=f32,p=f16", ValueError, r"found 'p' twice"),
        ("p=f32,params=f16", ValueError, r"found 'params' twice"),
        ("p=f32;c=f16", ValueError, r"found dtype 'f32;c=f16'"),
        ("P=f32", ValueError, r"found 'P=f32'"),
        (torch.float16, TypeError, r"policy: found dtype torch.float16, expected a str"),
        (None, TypeError, r"policy: found NoneType None, expected a str"),
    ],
)
def test_a_policy_that_can_not_be_read_says_what_it_knows(text: Any, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        fa.Policy.parse(text)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "float16", None, float])
@pytest.mark.parametrize("field", ["param_dtype", "compute_dtype", "output_dtype"])
def test_a_policy_of_anything_but_floating_point_dtypes_is_refused(field: str, dtype: Any):
    with pytest.raises(TypeError, match=rf"{field}: found .*, expected a floating-point torch\.dtype"):
        fa.Policy(**{field: dtype})


@pytest.mark.parametrize("method", ["cast_to_param", "cast_to_compute", "cast_to_output"])
def test_a_cast_touches_floating_point_leaves_alone(method: str):
    policy = fa.Policy(F64, F16, BF16)
    dtype = {"cast_to_param": F64, "cast_to_compute": F16, "cast_to_output": BF16}[method]
    leaves = {"int": torch.arange(3), "flag": torch.tensor(True), "byte": torch.ones(2, dtype=torch.uint8)}
    leaves |= {"complex": torch.ones(2, dtype=torch.complex64)}
    tree = {"x": torch.tensor([1 / 3, 2.0]), "more": [torch.ones((), dtype=F16), None, leaves]}
    found = getattr(policy, method)(tree)
    assert torch.equal(found["x"], tree["x"].to(dtype)) and found["x"].dtype == dtype
    assert found["more"][0].dtype == dtype and found["more"][1] is None
    assert all(found["more"][2][name] is leaf for name, leaf in leaves.items())
    assert tree["x"].dtype == F32


def test_a_cast_to_the_dtype_there_is_hands_the_leaf_back():
    leaf = torch.ones(2, dtype=F16)
    assert fa.cast_floating([leaf], F16)[0] is leaf


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, "float16", None])
def test_a_cast_to_anything_but_a_floating_point_dtype_is_refused(dtype: Any):
    with pytest.raises(TypeError, match=r"dtype: found .*, expected a floating-point torch\.dtype"):
        fa.cast_floating({"x": torch.ones(1)}, dtype)


# with_policy


class Spy:
    """A loss function that keeps the dtypes it was called with; an object, not a function."""

    def __init__(self):
        self.seen: dict[str, Any] = {}

    def __call__(self, params: Any, batch: Any, buffers: Any = None, *, temperature: Any = None) -> fa.Loss:
        self.seen = {
            "params": {name: p.dtype for name, p in params.items()},
            "batch": {name: t.dtype for name, t in batch.items()},
            "buffers": None if buffers is None else {name: b.dtype for name, b in buffers.items()},
            "temperature": None if temperature is None else temperature.dtype,
        }
        return fa.Loss(
            sum(p.sum() for p in params.values()) * batch["x"].sum(), weight=3, aux={"n": 7}, buffers=buffers
        )


def spy_inputs() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    params = {"a": torch.ones(2), "b": torch.ones(2, dtype=F64)}
    batch = {"x": torch.ones(2), "tokens": torch.arange(3), "mask": torch.tensor([True])}
    return params, batch, {"mean": torch.ones(2), "count": torch.tensor(4)}


SPY_CALLS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "positional": lambda loss_fn, p, x, b: loss_fn(p, x, b),
    "keyword": lambda loss_fn, p, x, b: loss_fn(p, x, buffers=b),
    "all keywords": lambda loss_fn, p, x, b: loss_fn(params=p, batch=x, buffers=b),
}


@pytest.mark.parametrize("call", SPY_CALLS)
def test_params_and_inputs_are_cast_but_no_buffers_and_no_integers(call: str):
    spy, (params, batch, buffers) = Spy(), spy_inputs()
    out = SPY_CALLS[call](fa.with_policy(spy, "p=f32,c=bf16,o=f32"), params, batch, buffers)
    assert spy.seen["params"] == {"a": BF16, "b": BF16}
    assert spy.seen["batch"] == {"x": BF16, "tokens": torch.int64, "mask": torch.bool}
    assert spy.seen["buffers"] == {"mean": F32, "count": torch.int64}
    assert isinstance(out, fa.Loss) and out.value.dtype == F32
    assert (out.weight, out.aux, out.buffers) == (3, {"n": 7}, buffers)


def test_every_other_keyword_is_an_input():
    spy, (params, batch, _) = Spy(), spy_inputs()
    fa.with_policy(spy, "half")(params, batch, temperature=torch.tensor(2.0))
    assert spy.seen["temperature"] == F16


class Trainer:
    def loss(self, params: Any, batch: Any, buffers: Any) -> fa.Loss:
        return Spy()(params, batch, buffers)


def scaled(factor: float, params: Any, batch: Any, buffers: Any) -> fa.Loss:
    return fa.Loss(factor * params["a"].sum(), buffers={name: b + 1 for name, b in buffers.items()})


@pytest.mark.parametrize(
    "loss_fn",
    [
        Spy(),
        Trainer().loss,
        functools.partial(scaled, 2.0),
        lambda params, batch, buffers: scaled(2.0, params, batch, buffers),
        fa.autocast(Spy(), BF16),
        fa.with_policy(fa.autocast(functools.partial(scaled, 2.0), BF16), "p=f32,c=f32,o=f32"),
    ],
)
def test_buffers_are_found_in_every_kind_of_callable(loss_fn: Callable[..., Any]):
    params, batch, buffers = spy_inputs()
    out = fa.with_policy(loss_fn, "p=f32,c=bf16,o=f32")(params, batch, buffers)
    assert out.value.dtype == F32 and out.buffers["mean"].dtype == F32


def test_partials_and_callable_objects_go_through_the_step():
    def squared(scale: float, params: Any, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return (scale * (params - x) + shift).square().mean()

    class Squared:
        def __call__(self, params: Any, x: Tensor) -> Tensor:
            return squared(1.0, params, x)

    optimizer, x = fa.sgd(0.5), torch.tensor([1.0, 3.0])
    for loss_fn in (functools.partial(squared, 1.0), functools.partial(squared, 1.0, shift=0.0), Squared()):
        for transform in (
            lambda f: f,
            lambda f: fa.with_policy(f, "p=f32,c=bf16,o=f32"),
            lambda f: fa.autocast(f, BF16),
        ):
            step = fa.make_step(transform(loss_fn), optimizer)
            state, _ = step(fa.init_state(torch.zeros(2), optimizer), [x])
            assert torch.equal(state.params, 0.5 * x)  # p - 0.5 * 2 (p - x) / 2, exact in bf16


def test_the_name_and_signature_of_the_loss_function_are_kept():
    assert fa.with_policy(mse, "half").__name__ == fa.autocast(mse, BF16).__name__ == "mse"
    assert fa.with_policy(mse, "half").__doc__ == mse.__doc__


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("param_dtype", [F16, F32, F64])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_with_policy_is_casting_by_hand_and_gradients_keep_the_dtype_of_the_params(
    dtype: torch.dtype, param_dtype: torch.dtype, backend: Any, device: str
):
    params, batch = mse_params(param_dtype, device), mse_batch(0, device)
    policy = fa.Policy(param_dtype, dtype, F32)
    grads, loss, _ = fa.scale_backward(fa.with_policy(mse, policy), fa.NoScale(), params, batch, backend=backend)
    expected_loss, expected = imperative(cast_by_hand(mse, dtype), params, batch)
    assert loss.dtype == F32 and torch.equal(loss, expected_loss)
    for name, param in params.items():
        assert grads.tree[name].dtype == param.dtype
        assert torch.equal(grads.tree[name], expected[name])


def test_output_dtype_is_that_of_the_loss():
    params, batch = mse_params(), mse_batch()
    for dtype in (F16, BF16, F32, F64):
        assert fa.with_policy(mse, fa.Policy(F32, F32, dtype))(params, batch).dtype == dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_loss_scale_saves_the_gradients_that_float16_would_flush_to_zero(backend: Any):
    # d/dp of p * 2**-12 * 2**-14 is 2**-26; float16 has nothing between 0 and 2**-24.
    def loss_fn(params: Tensor, factors: Tensor) -> Tensor:
        return (params * factors[0] * factors[1]).sum()

    policy, factors = fa.with_policy(loss_fn, "p=f32,c=f16,o=f32"), torch.tensor([2.0**-12, 2.0**-14])
    for scaler, expected in ((fa.NoScale(), 0.0), (fa.StaticScale(2.0**8), 2.0**-26)):
        grads, _, _ = fa.scale_backward(policy, scaler, torch.ones(3), factors, backend=backend)
        assert fa.unscale(grads).grads.tolist() == [expected] * 3


# autocast


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_autocast_is_torch_autocast_by_hand(dtype: torch.dtype, backend: Any, device: str):
    params, batch = mse_params(F32, device), mse_batch(0, device)
    grads, loss, _ = fa.scale_backward(fa.autocast(mse, dtype), fa.NoScale(), params, batch, backend=backend)
    expected_loss, expected = imperative(autocast_by_hand(mse, dtype, device), params, batch)
    assert loss.dtype == F32 and torch.equal(loss, expected_loss.float())
    for name, param in params.items():
        assert grads.tree[name].dtype == param.dtype == F32
        assert torch.equal(grads.tree[name], expected[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make_problem", [mlp, transformer])
def test_autocast_of_a_module_is_torch_autocast_around_it(make_problem: Callable[[], Problem], backend: Any):
    # A bfloat16 number has 8 bits, and the tied weight's contributions may be summed before or after rounding.
    problem = make_problem()
    batch = problem.batch(0)
    grads, loss, _ = fa.scale_backward(
        fa.autocast(problem.loss_fn, BF16), fa.StaticScale(2.0**10), problem.params, batch, backend=backend
    )
    with torch.autocast("cpu", dtype=BF16):
        expected = criterion(problem.module(batch["x"]), batch)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in problem.module.named_parameters():
        torch.testing.assert_close(fa.unscale(grads).grads[name], parameter.grad, rtol=2**-7, atol=1e-4)


def test_autocast_takes_the_device_of_the_params_or_the_one_that_is_named():
    seen: list[tuple[bool, torch.dtype]] = []

    def loss_fn(params: Any, *_: Any) -> Tensor:
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return params["w"].sum()

    params = {"count": torch.tensor(1), "missing": None, "w": torch.ones(1)}
    fa.autocast(loss_fn, BF16)(params)
    fa.autocast(loss_fn, F16, device_type="cpu")(params)
    assert seen == [(True, BF16), (True, F16)]
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_ends_with_the_loss_function_even_if_it_raises():
    def failing(params: Any) -> Tensor:
        assert torch.is_autocast_enabled("cpu")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fa.autocast(failing, BF16)(torch.ones(1))
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_passes_a_loss_object_through():
    params, batch, buffers = spy_inputs()
    out = fa.autocast(Spy(), BF16)(params, batch, buffers=buffers, temperature=torch.ones(()))
    assert (out.weight, out.aux) == (3, {"n": 7}) and out.buffers is buffers


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda fa: fa.autocast(mse, torch.int32), TypeError, r"dtype: found torch.int32, expected a floating-point"),
        (lambda fa: fa.autocast(mse, "bfloat16"), TypeError, r"dtype: found 'bfloat16', expected a floating-point"),
        (lambda fa: fa.autocast(mse, BF16, device_type=torch.device("cpu")), TypeError, r"device_type: found device"),
        (lambda fa: fa.autocast(None, BF16), TypeError, r"loss_fn: found NoneType"),
        (
            lambda fa: fa.with_policy(mse, torch.float16),
            TypeError,
            r"policy: found dtype, expected a Policy or its text",
        ),
        (lambda fa: fa.with_policy(mse, None), TypeError, r"policy: found NoneType, expected a Policy or its text"),
        (lambda fa: fa.with_policy(mse, "f99"), ValueError, r"found dtype 'f99'"),
        (lambda fa: fa.with_policy("half", mse), TypeError, r"policy: found function"),
        (lambda fa: fa.with_policy(torch.ones(1), "half"), TypeError, r"loss_fn: found Tensor"),
    ],
)
def test_wrong_arguments_are_refused_at_once(call: Callable[[Any], Any], error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        call(fa)


# In the step


TRANSFORMS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "autocast": (fa.autocast, lambda f, dtype: autocast_by_hand(f, dtype, "cpu")),
    "policy": (lambda f, dtype: fa.with_policy(f, fa.Policy(F32, dtype, F32)), cast_by_hand),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_run_in_half_precision_is_the_imperative_loop_in_half_precision(
    transform: str, dtype: torch.dtype, backend: Any
):
    ours, by_hand = (make(mse, dtype) for make in TRANSFORMS[transform])
    optimizer = fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(ours, optimizer, max_norm=1.0, clip_eps=1e-6, backend=backend)
    state = fa.init_state(mse_params(), optimizer, fa.DynamicScale(2.0**14, growth_interval=2))
    masters = {name: p.clone().requires_grad_() for name, p in mse_params().items()}
    imperative_optimizer = torch.optim.SGD(masters.values(), 0.1, momentum=0.9, foreach=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=2)
    scales = []
    for number in range(6):
        state, metrics = step(state, [mse_batch(2 * number), mse_batch(2 * number + 1)])
        for seed in (2 * number, 2 * number + 1):
            scaler.scale(by_hand(masters, mse_batch(seed))).backward()
        scaler.unscale_(imperative_optimizer)
        for master in masters.values():
            assert master.grad is not None
            master.grad /= 2  # the window's mean; dividing before the scaling would round in half precision
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0, foreach=False)
        scaler.step(imperative_optimizer)
        scaler.update()
        imperative_optimizer.zero_grad()
        scales.append(metrics.scale.item())
        assert metrics.loss.dtype == metrics.grad_norm.dtype == F32
        assert state.scaler.scale.item() == scaler.get_scale()
        for name, master in masters.items():
            assert state.params[name].dtype == F32
            torch.testing.assert_close(state.params[name], master.detach(), rtol=1e-5, atol=1e-6)
    assert len(set(scales)) > 1
    assert (state.skipped > 0) == (dtype == F16)  # 2**16 times a gradient near 1 is no float16


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_around_the_step_is_autocast_inside_the_loss(backend: Any):
    # The arithmetic of scaling, norm and optimizer stays in float32: autocast chooses none of its operators.
    problem, optimizer = mlp(), fa.adamw(0.01)
    inside = fa.make_step(fa.autocast(problem.loss_fn, BF16), optimizer, max_norm=0.1, backend=backend)
    around = fa.make_step(problem.loss_fn, optimizer, max_norm=0.1, backend=backend)
    state, window = fa.init_state(problem.params, optimizer), [problem.batch(0), problem.batch(1)]
    expected, _ = inside(state, window)
    with torch.autocast("cpu", dtype=BF16):
        found, _ = around(state, window)
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "transform", "backend"),
    [
        ("mlp", "policy", "func"),
        ("mlp", "autocast", "autograd"),
        ("conv_net", "autocast", "func"),
        ("conv_net", "autocast", "autograd"),
        ("transformer", "policy", "autograd"),
        ("transformer", "autocast", "func"),
    ],
)
def test_each_model_learns_and_skips_in_bfloat16_with_a_float32_state(name: str, transform: str, backend: Any):
    problem, optimizer = PROBLEMS[name](), fa.adam(0.03)
    step = fa.make_step(TRANSFORMS[transform][0](problem.loss_fn, BF16), optimizer, max_norm=1.0, backend=backend)
    state = fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**8), problem.buffers)
    window = [problem.batch(0), problem.batch(1)]
    losses = []
    for _ in range(6):
        state, metrics = step(state, window)
        losses.append(metrics.loss.item())
    assert losses[-1] < 0.9 * losses[0]
    skipped, metrics = step(state, [window[0], overflowing(window[1])])
    assert not metrics.finite
    for before, after in ((state.params, skipped.params), (state.buffers or {}, skipped.buffers or {})):
        for key, value in before.items():
            assert torch.equal(after[key], value) and after[key].dtype == value.dtype
            assert value.dtype in (F32, torch.int64)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_batch_norm_statistics_stay_in_float32(transform: str):
    problem = conv_net()

    def loss_fn(params: Any, batch: Any, buffers: Any) -> fa.Loss:
        # torch's BatchNorm takes half-precision inputs with float32 weights and statistics, and no other mixture.
        params = {name: p.float() if ".1." in name else p for name, p in params.items()}
        return problem.loss_fn(params, batch, buffers)

    after = TRANSFORMS[transform][0](loss_fn, BF16)(problem.params, problem.batch(0), problem.buffers).buffers
    x, params = problem.batch(0)["x"].to(BF16), fa.cast_floating(problem.params, BF16)
    first = F.conv2d(x, params["first.0.weight"], params["first.0.bias"], padding=1).float()
    # 0.1 of the batch's mean: the statistics started at 0 and BatchNorm's momentum is 0.1.
    torch.testing.assert_close(after["first.1.running_mean"], 0.1 * first.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    assert all(b.dtype in (F32, torch.int64) for b in after.values())


def test_policy_cast_to_param_gives_half_precision_masters_that_stay_so():
    policy = fa.Policy.parse("p=bf16,c=bf16,o=f32")
    optimizer, params = fa.adam(0.01), policy.cast_to_param(mse_params())
    step = fa.make_step(fa.with_policy(mse, policy), optimizer)
    state, metrics = step(fa.init_state(params, optimizer), [mse_batch(0), mse_batch(1)])
    assert all(p.dtype == BF16 for p in state.params.values())
    assert all(m.dtype == F32 for m in state.opt_state.exp_avg.values())
    assert metrics.loss.dtype == F32
    assert any(not torch.equal(state.params[name], params[name]) for name in params)


@pytest.mark.cuda
@needs_cuda
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "transform"),
    [("mlp", "policy"), ("conv_net", "autocast"), ("transformer", "autocast"), ("transformer", "policy")],
)
def test_each_model_learns_and_skips_in_float16_on_cuda(name: str, transform: str, backend: Any):
    makers: dict[str, Callable[..., Problem]] = {"mlp": mlp, "conv_net": conv_net, "transformer": transformer}
    problem, optimizer = makers[name](device="cuda"), fa.adam(0.03)
    step = fa.make_step(TRANSFORMS[transform][0](problem.loss_fn, F16), optimizer, max_norm=1.0, backend=backend)
    state = fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**8), problem.buffers)
    window = [problem.batch(0), problem.batch(1)]
    losses = []
    for _ in range(6):
        state, metrics = step(state, window)
        losses.append(metrics.loss.item())
    assert losses[-1] < 0.9 * losses[0]
    skipped, metrics = step(state, [window[0], overflowing(window[1])])
    assert not metrics.finite and skipped.scaler.scale.item() == state.scaler.scale.item() / 2
    assert all(torch.equal(skipped.params[key], value) for key, value in state.params.items())
