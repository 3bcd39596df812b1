"""What a loss function writes to of what it is given: refused by name, by whatever torch offers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import functional_amp as fa
from functional_amp.testing import assert_same_bits, mapped

Tree = dict[str, Tensor]
OPTIONS: dict[str, Any] = {
    "auto": {},
    "func": {"backend": "func"},
    "autograd": {"backend": "autograd"},
    "donate": {"donate": True},
}
COMPILED: dict[str, Any] = {
    "compiled": {"compile": {"backend": "aot_eager"}},
    "compiled and donated": {"compile": {"backend": "aot_eager"}, "donate": True},
    "compiled, by the engine": {"compile": {"backend": "aot_eager"}, "backend": "autograd"},
}
slow = pytest.mark.slow
eager = pytest.mark.parametrize("options", OPTIONS)
PARAMS, BUFFERS = {"w": torch.eye(4)}, {"mean": torch.zeros(4), "var": torch.ones(4), "n": torch.tensor(0)}


def norm(h: Tensor, b: Tree) -> Tensor:
    return F.batch_norm(h, b["mean"], b["var"], training=True)


def norm_by_name(h: Tensor, b: Tree) -> Tensor:
    return F.batch_norm(input=h, running_mean=b["mean"], running_var=b["var"], training=True)


def torchs_norm(h: Tensor, b: Tree) -> Tensor:
    return torch.batch_norm(h, None, None, b["mean"], b["var"], True, 0.1, 1e-5, False)


def native_norm(h: Tensor, b: Tree) -> Tensor:
    return torch.native_batch_norm(h, None, None, b["mean"], b["var"], True, 0.1, 1e-5)[0]


def norm_of_a_view(h: Tensor, b: Tree) -> Tensor:
    return F.batch_norm(h, b["mean"].view(4), b["var"].detach(), training=True)


def instance_norm(h: Tensor, b: Tree) -> Tensor:
    return F.instance_norm(h[:, :, None].expand(-1, -1, 3) * torch.arange(3.0), b["mean"], b["var"])


def observer(h: Tensor, b: Tree) -> Tensor:
    on, scale, zero = torch.ones(1, dtype=torch.long), torch.ones(1), torch.zeros(1, dtype=torch.int)
    low, high = b["mean"][:1], b["var"][:1]
    return torch.fused_moving_avg_obs_fake_quant(h, on, on, low, high, scale, zero, 0.1, 0, 255, 0)  # pyright: ignore[reportCallIssue]


KERNELS = [norm, norm_by_name, torchs_norm, native_norm, norm_of_a_view, instance_norm, observer]


def by_out(h: Tensor, b: Tree) -> Tensor:
    torch.add(b["mean"].clone(), 1, out=b["mean"])
    return h


def by_a_list(h: Tensor, b: Tree) -> Tensor:
    torch._foreach_add_([b["mean"]], 1.0)
    return h


def by_a_list_of_counters(h: Tensor, b: Tree) -> Tensor:
    torch._foreach_add_([b["n"]], 1)
    return h


def by_swapping(h: Tensor, b: Tree) -> Tensor:
    torch.utils.swap_tensors(b["mean"], b["mean"] + 1)
    return h


def by_setting(h: Tensor, b: Tree) -> Tensor:
    b["mean"].set_(torch.ones(4))  # pyright: ignore[reportArgumentType]
    return h


def in_place(h: Tensor, b: Tree) -> Tensor:
    b["mean"].add_(1)
    return h


WRITES = [by_out, by_a_list, by_a_list_of_counters, by_swapping, by_setting, in_place]


def with_loss(forward: Any, **options: Any) -> tuple[Any, Any]:
    def loss_fn(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        return fa.Loss(forward(x @ params["w"], buffers).square().sin().mean(), buffers=buffers)

    params, buffers = mapped(torch.clone, (PARAMS, BUFFERS))
    state = fa.init_state(params, fa.sgd(0.1), fa.NoScale(), buffers=buffers)
    return fa.make_step(loss_fn, fa.sgd(0.1), **options), state


def assert_refused(forward: Any, options: dict[str, Any]) -> None:
    step, state = with_loss(forward, **options)
    for _ in range(2):  # who tries again is told again
        with pytest.raises(Exception, match="loss_fn: found a write in place to"):
            step(state, [torch.arange(12.0).reshape(3, 4).sin()])
        assert_same_bits(state.buffers, BUFFERS)


@eager
@pytest.mark.parametrize("forward", [*KERNELS, *WRITES], ids=lambda forward: forward.__name__)
@pytest.mark.filterwarnings("ignore:backend='auto'")
def test_a_loss_that_writes_to_its_buffers_is_refused_and_the_state_is_as_it_was(forward: Any, options: str):
    if options == "func" and forward in (in_place, by_setting):  # torch.func refuses it in its own words
        step, state = with_loss(forward, backend="func")
        with pytest.raises(RuntimeError):
            step(state, [torch.ones(3, 4)])
        assert_same_bits(state.buffers, BUFFERS)
        return
    assert_refused(forward, OPTIONS[options])


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(
    ("forward", "options"),
    [
        pytest.param(
            forward, options, marks=[slow] * ((forward, options) not in ((norm, "compiled"), (by_out, "compiled")))
        )
        for forward in (*KERNELS, by_out, by_a_list)
        for options in COMPILED
    ],
)
def test_a_compiled_loss_that_writes_to_its_buffers_is_refused(forward: Any, options: str):
    assert_refused(forward, COMPILED[options])


@pytest.mark.parametrize("options", OPTIONS)
def test_a_parameter_that_is_written_to_as_one_of_a_list_is_refused(options: str):
    def loss_fn(params: Tree, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._foreach_clamp_min_([params["w"]], 5.0)
        return (x @ params["w"]).mean()

    state = fa.init_state(mapped(torch.clone, PARAMS), fa.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"write in place to the parameters at \['w'\]"):
        fa.make_step(loss_fn, fa.sgd(0.1), **OPTIONS[options])(state, [torch.ones(3, 4)])


def using(h: Tensor, b: Tree) -> Tensor:
    return F.batch_norm(h, b["mean"], b["var"])


def scaling(h: Tensor, b: Tree) -> Tensor:
    return F.batch_norm(h, None, None, b["var"], b["mean"], True)


def torchs_scaling(h: Tensor, b: Tree) -> Tensor:
    return torch.batch_norm(h, b["var"], b["mean"], None, None, True, 0.1, 1e-5, False)


def using_as_instance(h: Tensor, b: Tree) -> Tensor:
    return F.instance_norm(h[:, :, None].expand(-1, -1, 3), b["mean"], b["var"], use_input_stats=False)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("forward", [using, scaling, torchs_scaling, using_as_instance])
@pytest.mark.parametrize("options", [*OPTIONS, *(pytest.param(name, marks=slow) for name in COMPILED)])
def test_a_loss_that_only_reads_statistics_is_not_refused(forward: Any, options: str):
    step, state = with_loss(forward, **{**OPTIONS, **COMPILED}[options])
    for factor in (1.0, float("nan"), 2.0):
        state, _ = step(state, [factor * torch.arange(12.0).reshape(3, 4).sin()])
    assert_same_bits(state.buffers, BUFFERS)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("options", [*OPTIONS, "compiled", *(pytest.param(o, marks=slow) for o in list(COMPILED)[1:])])
def test_the_remedy__copies_that_the_kernel_updates_have_the_statistics_of_the_loop(options: str):
    def loss_fn(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        new = {name: leaf.clone() for name, leaf in buffers.items()}
        return fa.Loss(norm(x @ params["w"], new).square().sin().mean(), buffers={**buffers, **new})

    params, buffers = mapped(torch.clone, (PARAMS, BUFFERS))
    state = fa.init_state(params, fa.sgd(0.1), fa.NoScale(), buffers=buffers)
    step = fa.make_step(loss_fn, fa.sgd(0.1), **{**OPTIONS, **COMPILED}[options])
    w, loop = PARAMS["w"].clone().requires_grad_(), mapped(torch.clone, BUFFERS)
    for factor in (1.0, 2.0):
        x = factor * torch.arange(12.0).reshape(3, 4).sin()
        state, _ = step(state, [x])
        (grad,) = torch.autograd.grad(norm(x @ w, loop).square().sin().mean(), w)
        w = (w - 0.1 * grad).detach().requires_grad_()
    kept = {name: leaf.clone() for name, leaf in state.buffers.items()}
    torch.testing.assert_close((kept["mean"], kept["var"]), (loop["mean"], loop["var"]))
    state, metrics = step(state, [torch.full((3, 4), float("nan"))])
    assert not metrics.applied
    assert_same_bits(state.buffers, kept)


@eager
def test_a_loss_without_the_buffers_that_a_forward_moved_is_refused_in_the_first_window_too(options: str):
    apply, params, buffers = fa.from_module(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        return fa.Loss(apply.with_buffers(params, buffers, x)[0].square().mean())

    step, state = (
        fa.make_step(loss_fn, fa.sgd(0.1), **OPTIONS[options]),
        fa.init_state(params, fa.sgd(0.1), buffers=buffers),
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="found a forward that moved"):
            step(state, [torch.arange(12.0).reshape(3, 4)])


@eager
@pytest.mark.parametrize("hands_out", [False, True])
def test_buffers_that_a_loss_leaves_are_the_very_tensors_of_the_state_after_the_first_call_too(
    options: str, hands_out: bool
):
    def loss_fn(params: Tree, x: Tensor, buffers: Tree) -> fa.Loss:
        value = (x @ params["w"] + buffers["mean"]).sin().mean()
        return fa.Loss(value, buffers={**buffers, "n": buffers["n"] + 1} if hands_out else None)

    _, state = with_loss(using)
    step, given = fa.make_step(loss_fn, fa.sgd(0.1), **OPTIONS[options]), dict(state.buffers)
    window: Any = step.accumulate(state, torch.ones(3, 4)).window
    assert window.buffers["mean"] is given["mean"]
    assert (window.buffers["n"] is given["n"]) is not hands_out


def test_an_outer_map_over_states_refuses_a_write_by_out():
    step, state = with_loss(by_out)
    stacked = mapped(lambda leaf: torch.stack([leaf, leaf]), state)
    with pytest.raises(RuntimeError):
        torch.vmap(lambda state: step(state, [torch.ones(3, 4)]))(stacked)
    assert_same_bits(stacked.buffers, mapped(lambda leaf: torch.stack([leaf, leaf]), BUFFERS))


def test_an_outer_derivative_refuses_a_write_by_out():
    step, state = with_loss(by_out)

    def loss_after(w: Tensor) -> Tensor:
        moved = fa.init_state({"w": w}, fa.sgd(0.1), fa.NoScale(), buffers=state.buffers)
        return step(moved, [torch.ones(3, 4)])[1].loss

    with pytest.raises(RuntimeError, match="loss_fn: found a write in place to"):
        torch.func.grad(loss_after)(PARAMS["w"])
    assert_same_bits(state.buffers, BUFFERS)


@eager
def test_what_was_written_to_before_the_step_is_not_refused(options: str):
    apply, params, _ = fa.from_module(nn.Linear(4, 4))
    with torch.no_grad():
        params["weight"].copy_(torch.eye(4))
    step = fa.make_step(lambda p, x: apply(p, x).square().mean(), fa.sgd(0.1), **OPTIONS[options])
    state, metrics = step(fa.init_state(params, fa.sgd(0.1)), [torch.ones(3, 4)])
    assert metrics.applied and torch.isfinite(state.params["weight"]).all()
