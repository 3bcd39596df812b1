"""The step, its windows and what stands around them: more that was silently different from an imperative loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import optree
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch.utils import _pytree as torch_pytree
from torch.utils.data import DataLoader, IterableDataset

import functional_amp as fa
from functional_amp.debug import check_health, explain, init_history, record, underflow_report
from functional_amp.ranks import broadcast, gather, shard, sharded
from tests.on_ranks import on_ranks

AOT = {"backend": "aot_eager"}


class Stream(IterableDataset[Tensor]):
    """Micro-batches that nobody can count."""

    def __iter__(self) -> Any:
        return iter(torch.arange(5.0))


@pytest.mark.parametrize("batch_size", [None, 2])
def test_the_windows_of_a_stream_are_those_of_its_loader(batch_size: int | None):
    loader = DataLoader(Stream(), batch_size=batch_size)
    windows = fa.windows(loader, 2)
    with pytest.raises(TypeError, match="the loader has no length"):
        len(windows)
    taken = list(windows)
    assert [len(window) for window in taken] == ([2, 2, 1] if batch_size is None else [2, 1])
    assert torch.equal(torch.cat([x.reshape(-1) for window in taken for x in window]), torch.arange(5.0))


def test_a_second_epoch_over_windows_that_are_used_up_is_refused():
    loader = [1, 2, 3]
    windows = fa.windows(loader, 2)
    assert next(windows) == [1, 2] and [*windows] == [[3]]
    with pytest.raises(RuntimeError, match=r"gave its 2 windows.*Call windows") as caught:
        list(windows)
    assert "for each epoch" in str(caught.value)
    assert [window for _ in range(2) for window in fa.windows(loader, 2)] == [[1, 2], [3]] * 2
    empty = fa.windows([], 2)
    assert [*empty, *empty] == []


# Sums, of which one does not count


def sums(params: Any, x: Tensor) -> fa.Loss:
    """A sum over items; a micro-batch of zeros has none, and its loss reaches no parameter."""
    if not x.any():
        return fa.Loss(x.sum() / 0, weight=0, aux=x.sum() / 0, reduction="sum")
    value = (params["w"] * x).square().sum()
    return fa.Loss(value, aux=value.detach(), reduction="sum")


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("options", [{}, {"donate": True}, {"backend": "autograd"}])
def test_a_sum_without_items_leaves_nothing_behind(place: int, options: dict[str, Any]):
    optimizer, params = fa.sgd(0.1, momentum=0.9), {"w": torch.tensor([1.0, 2.0])}
    step = fa.make_step(sums, optimizer, max_norm=10.0, **options)
    state, expected = (fa.init_state(params, optimizer, fa.StaticScale(8.0)) for _ in range(2))
    for size in (1.0, 2.0):
        window = [torch.full((2,), size), torch.tensor([0.5, size])]
        expected, told = step(expected, window)
        state, metrics = step(state, [*window[:place], torch.zeros(2), *window[place:]])
        assert torch.equal(state.params["w"], expected.params["w"])
        for name in ("loss", "aux", "grad_norm", "weight", "applied"):
            assert torch.equal(getattr(metrics, name), getattr(told, name)), name
    after, metrics = step(state, [torch.zeros(2)] * 2)
    assert metrics.weight == 0 and metrics.finite and not metrics.applied
    assert torch.equal(after.params["w"], expected.params["w"])


def test_the_message_about_reductions_tells_how_to_leave_a_sum_out():
    def loss_fn(params: Any, x: Tensor) -> fa.Loss:
        return sums(params, x) if x.any() else fa.Loss(x.sum(), weight=0)

    optimizer, params = fa.sgd(0.1), {"w": torch.ones(2)}
    state = fa.init_state(params, optimizer, fa.NoScale())
    with pytest.raises(ValueError, match=r"found reduction 'mean'.*Loss\(value, weight=0, reduction=...\)"):
        fa.make_step(loss_fn, optimizer)(state, [torch.ones(2), torch.zeros(2)])
    assert fa.make_step(sums, optimizer)(state, [torch.ones(2), torch.zeros(2)])[1].applied


def squares(params: Any, x: Tensor) -> fa.Loss:
    value = (x @ gather(params["w"])).square().sum()
    return fa.Loss(value, aux={"squares": value.detach(), "items": len(x)}, reduction="sum")


def summed_on(rank: int) -> tuple[Any, Tensor, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    optimizer = fa.sgd(0.01)
    step = fa.make_step(sharded(squares, mesh), optimizer, mesh=mesh)
    state = fa.init_state(shard({"w": torch.ones(2, 1)}, mesh), optimizer, fa.NoScale())
    state, metrics = step(state, [torch.full((rank + 1, 2), float(rank + 1))])
    return metrics.aux, metrics.loss, state.params["w"].full_tensor()


@pytest.mark.slow
def test_the_aux_of_a_sharded_sum_is_the_sum_over_ranks(tmp_path: Path):
    optimizer = fa.sgd(0.01)
    state = fa.init_state({"w": torch.ones(2, 1)}, optimizer, fa.NoScale())
    window = [torch.full((rank + 1, 2), float(rank + 1)) for rank in range(2)]
    state, metrics = fa.make_step(squares, optimizer)(state, window)
    for aux, loss, w in on_ranks(summed_on, tmp_path, 2):
        torch.testing.assert_close((aux, loss, w), (metrics.aux, metrics.loss, state.params["w"]))


# Arguments with defaults of their own, as closures over a loop's variable have


@pytest.mark.parametrize("options", [{}, {"donate": True}, pytest.param({"compile": AOT}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_a_captured_default_of_an_update_is_not_taken_for_the_parameters(lr: Any, options: dict[str, Any]):
    optimizer = (lambda params: (), lambda grads, state, lr=lr: (-lr * grads, state))
    step = fa.make_step(lambda p, x: (p * x).sum(), optimizer, **options)
    state, _ = step(fa.init_state(torch.full((2,), 7.0), optimizer, fa.NoScale()), [torch.ones(2)])
    assert state.params.tolist() == [6.5, 6.5]


def decayed(grads: Tensor, state: Any, params: Tensor | None = None) -> tuple[Tensor, Any]:
    assert params is not None
    return -0.5 * (grads + params), state


def decayed_with_a_factor(grads: Tensor, state: Any, params: Tensor, factor: float = 0.5) -> tuple[Tensor, Any]:
    return -factor * (grads + params), state


@pytest.mark.parametrize("update", [decayed, decayed_with_a_factor])
def test_a_third_argument_without_a_value_of_its_own_is_the_parameters(update: Any):
    params = torch.ones(2)
    new, _ = fa.maybe_step(update, params, (), torch.ones(2), torch.tensor(True))
    assert new.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("options", [{}, {"donate": True}, {"backend": "autograd"}])
def test_buffers_are_not_passed_as_an_option_of_the_loss(options: dict[str, Any]):
    def wrong(params: Tensor, x: Tensor, training: bool = False) -> Tensor:
        return (params * x).sum() * (2 if training else 1)

    def right(params: Tensor, x: Tensor, buffers: Any, training: bool = False) -> Tensor:
        return wrong(params, x, training)

    optimizer = fa.sgd(0.5)
    state = fa.init_state(torch.ones(2), optimizer, fa.NoScale(), {"n": torch.zeros(())})
    with pytest.raises(TypeError, match=r"third argument 'training'.*loss_fn\(params, micro_batch, buffers, training="):
        fa.make_step(wrong, optimizer, **options)(state, [torch.ones(2)])
    assert fa.make_step(right, optimizer, **options)(state, [torch.ones(2)])[0].params.tolist() == [0.5, 0.5]


# A loss that requires grad, and not by the parameters

CONSTANTS = {
    "a tensor made of a number": lambda p, x: torch.tensor(float(x.sum()), requires_grad=True),
    "that, and more": lambda p, x: torch.tensor(float(x.sum()), requires_grad=True) * 2 + x.sum(),
    "a parameter made of a value": lambda p, x: torch.nn.Parameter(p["w"].detach()).square().sum(),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("options", [{}, {"backend": "func"}, {"backend": "autograd"}, {"donate": True}])
def test_a_loss_that_only_looks_as_if_it_had_a_gradient_is_refused(name: str, options: dict[str, Any]):
    optimizer = fa.adamw(0.1)
    state = fa.init_state({"w": torch.ones(2)}, optimizer, fa.NoScale())
    step = fa.make_step(CONSTANTS[name], optimizer, **options)
    with pytest.raises(RuntimeError, match="reaches no parameter"):
        step(state, [torch.ones(2)])
    with pytest.raises(RuntimeError, match="reaches no parameter"):
        step.scan(state, torch.ones(2, 2))


def test_a_loss_that_is_made_anew_in_a_later_micro_batch_is_refused():
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        loss = (params["w"] * x).sum()
        return loss if len(x) == 2 else torch.tensor(loss.item(), requires_grad=True)

    step = fa.make_step(loss_fn, fa.sgd(0.1))
    state = fa.init_state({"w": torch.ones(1)}, fa.sgd(0.1), fa.NoScale())
    state = step.accumulate(state, torch.ones(2))
    with pytest.raises(RuntimeError, match="reaches no parameter"):
        step.accumulate(state, torch.ones(3))


def test_a_loss_that_is_a_parameter_or_a_transform_of_one_is_differentiated():
    def of_a_function(params: Tensor, x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: (params * y**2).sum())(x).sum()

    def in_a_batch(params: Tensor, x: Tensor) -> Tensor:
        return torch.vmap(lambda y: (params * y).sum())(x[None]).mean()

    for loss_fn, expected in ((lambda p, x: p, 1.0), (of_a_function, 2.0), (in_a_batch, 1.0)):
        for params in (torch.tensor(3.0), torch.tensor(3.0, dtype=torch.float16)):
            grads = fa.scale_backward(loss_fn, fa.NoScale(), params, torch.ones(1, dtype=params.dtype), backend="func")
            assert grads.grads.tree.item() == expected


# The state of another class


def square(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).square().sum()


def updated(optimizer: Any, params: Any, opt_state: Any) -> Any:
    return fa.maybe_step(optimizer, params, opt_state, params, torch.tensor(True)).params


LOOKALIKES = [(torch.optim.Adam, torch.optim.Adamax), (torch.optim.Adadelta, torch.optim.Adam)]


@pytest.mark.parametrize("options", [{}, {"donate": True}, pytest.param({"compile": AOT}, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("cls", "other"), LOOKALIKES)
def test_a_state_of_another_class_is_refused_whose_tensors_have_the_same_shapes(
    cls: Any, other: Any, options: Any, fresh_dynamo: None
):
    first, second = fa.from_torch(cls, lr=0.1), fa.from_torch(other, lr=0.1)
    step = fa.make_step(square, first, **options)
    state, _ = step(fa.init_state({"w": torch.ones(2)}, first, fa.NoScale()), [torch.ones(2)])
    changed = dataclasses.replace(step, optimizer=second)
    with pytest.raises(ValueError, match=r"opt_state: found .*as .* keeps it. Take it from the init of this very"):
        changed(state, [torch.ones(2)])
    if options:  # a donating step has begun to write, and a compiled one runs the update as an operator
        state, _ = step(fa.init_state({"w": torch.ones(2)}, first, fa.NoScale()), [torch.ones(2)])
    state = dataclasses.replace(state, opt_state=second.init(state.params))
    assert changed(state, [torch.ones(2)])[1].applied
    with pytest.raises(ValueError, match="opt_state: found"):
        torch.vmap(lambda w: updated(second, {"w": w}, first.init({"w": torch.ones(2)}))["w"])(torch.ones(3, 2))


def test_adams_state_is_radams_and_that_of_adamw_as_in_torch():
    params = {"w": torch.ones(2)}
    state = fa.from_torch(torch.optim.Adam).init(params)
    for cls in (torch.optim.AdamW, torch.optim.RAdam):
        assert updated(fa.from_torch(cls), params, state)["w"].isfinite().all()


# What is said about a run


@pytest.mark.parametrize("scaler", [fa.DynamicScale(1.0, min_scale=1.0), fa.DynamicScale(0.5)])
def test_windows_without_weight_say_nothing_about_the_scale(scaler: fa.DynamicScale):
    optimizer = fa.sgd(0.1)

    def run(step: fa.Step) -> list[str]:
        state, history = fa.init_state({"w": torch.ones(2)}, optimizer, scaler), None
        for _ in range(3):
            state, metrics = step(state, [torch.ones(2)])
            history = record(init_history(state) if history is None else history, metrics)
            assert [f.name for f in check_health(state, metrics)] == [f.name for f in check_health(state, history)]
        assert state.skipped == 3
        return [finding.name for finding in check_health(state, history)]

    assert run(fa.make_step(lambda p, x: fa.Loss(square(p, x), weight=0), optimizer)) == []
    overflow = run(fa.make_step(lambda p, x: square(p, x) * torch.inf, optimizer))
    assert overflow == (["floor"] if scaler.min_scale == 1 else ["scale below 1"])


# Files


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_to_a_file_stays_a_link_as_with_torch_save(tmp_path: Path, dangling: bool):
    target, link = tmp_path / "run.7", tmp_path / "latest"
    if not dangling:
        fa.save(target, {"w": torch.zeros(2)})
    link.symlink_to(target.name)
    for value in (1.0, 2.0):
        fa.save(link, {"w": torch.full((2,), value)})
        assert link.is_symlink()
        assert fa.load(target)["w"].tolist() == fa.load(link)["w"].tolist() == [value] * 2
    target.write_bytes(target.read_bytes()[:-1])
    with pytest.warns(UserWarning, match="is read in its place"):
        assert fa.load(link)["w"].tolist() == [1.0, 1.0]


def test_a_file_keeps_its_permissions_as_with_torch_save(tmp_path: Path):
    path = tmp_path / "run"
    for saved in (lambda: torch.save({}, path), lambda: fa.save(path, {"w": torch.zeros(2)})):
        saved()
        path.chmod(0o600)
        saved()
        assert path.stat().st_mode & 0o777 == 0o600


# Ranks whose optimizer draws


def drawing_on(rank: int) -> tuple[Tensor, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh

    optimizer = fa.chain(fa.add_noise(0.5), fa.sgd(0.1))
    step = fa.make_step(
        lambda p, x: torch.nn.functional.dropout(p["w"] * x, 0.5).sum(), optimizer, mesh=init_device_mesh("cpu", (2,))
    )
    state = fa.init_state({"w": torch.ones(64)}, optimizer, fa.NoScale())
    with fa.seeded(1000 + rank):
        state = step.accumulate(state, torch.ones(64))
    assert state.window is not None
    with fa.seeded(1):
        return state.window.grads.tree["w"], step.update(state)[0].params["w"]


@pytest.mark.slow
def test_ranks_with_a_seed_each_and_one_for_the_update_stay_the_same(tmp_path: Path):
    (masked, w), (other, other_w) = on_ranks(drawing_on, tmp_path, 2)
    assert not torch.equal(masked, other)
    assert torch.equal(w, other_w)


# Remedies


def test_an_array_is_one_batch_and_no_window_as_a_tensor_is():
    step = fa.make_step(lambda p, x: square(p, torch.from_numpy(x)), fa.sgd(0.1))
    state, batch = fa.init_state({"w": torch.ones(2)}, fa.sgd(0.1), fa.NoScale()), numpy.ones((3, 2), numpy.float32)
    for window in (batch, torch.from_numpy(batch)):
        with pytest.raises(TypeError, match=r"micro_batches: found .*write step\(state, \[micro_batch\]\)"):
            step(state, window)
        with pytest.raises(TypeError, match=r"window: found .*For a window of one"):
            explain(step, state, window)
    assert step(state, [batch])[1].loss == 6


def test_the_remedy__micro_batches_with_numbers_are_stacked_for_scan():
    step = fa.make_step(lambda p, b: square(p, b["x"]) * b["n"], fa.sgd(0.1))
    state = fa.init_state({"w": torch.ones(2)}, fa.sgd(0.1), fa.NoScale())
    window = [{"x": torch.full((2,), value), "n": 2 * value, "none": None} for value in (1.0, 2.0)]
    with pytest.raises(ValueError, match="Stack the micro-batches, numbers too: ") as caught:
        step.scan(state, {**window[0], "x": torch.ones(2, 2)})
    remedy = str(caught.value).partition("numbers too: ")[2].rstrip(".")
    stacked = eval(remedy, {"optree": optree, "torch": torch, "window": window})
    found, expected = step.scan(state, stacked)[0], step(state, window)[0]
    assert torch.equal(found.params["w"], expected.params["w"])


def test_the_remedy__the_scale_that_explain_names_is_the_very_one_that_works():
    """65519.9 is the last tenth below what float16 rounds to inf: a scale 4e-6 above the power of two is too large."""
    step = fa.make_step(lambda p, x: (p["w"].half().float() * x).sum(), fa.sgd(0.1))
    state = fa.init_state({"w": torch.ones(1)}, fa.sgd(0.1), fa.StaticScale(2.0**21))
    window = [torch.tensor([65519.9 / 2**20])]
    why = explain(step, state, window)
    assert why.largest_good_scale == 2.0**20
    remedy = why.advice.partition("by itself: ")[2].partition(")).")[0] + "))"
    state = eval(remedy, {"dataclasses": dataclasses, "state": state, "DynamicScale": fa.DynamicScale})
    assert step(state, window)[1].applied


@pytest.mark.parametrize("options", [{}, {"donate": True}])
def test_the_state_of_another_chain_is_refused_by_name(options: dict[str, Any]):
    members = {"ema": fa.ema(0.9), "add_noise": fa.add_noise(0.1), "": fa.clip_by_value(1.0)}
    for name, member in members.items():
        for other in ("ema", "add_noise"):
            if name == other:
                continue
            first, second = fa.chain(member, fa.sgd(0.1)), fa.chain(members[other], fa.sgd(0.1))
            state = fa.init_state({"w": torch.ones(2)}, first, fa.NoScale())
            with pytest.raises(TypeError, match=rf"opt_state: found \w+ for {other}, expected"):
                fa.make_step(square, second, **options)(state, [torch.ones(2)])


def test_histories_that_vmap_has_stacked_are_told_and_read_one_by_one():
    optimizer = fa.sgd(0.1)
    step = fa.make_step(square, optimizer)
    state = fa.init_state({"w": torch.ones(2)}, optimizer, fa.NoScale())
    states, histories = (
        torch_pytree.tree_map(lambda leaf: torch.stack([leaf] * 2), x) for x in (state, init_history(state))
    )
    _, metrics = torch.vmap(lambda state, x: step(state, [x]))(states, torch.ones(2, 2))
    with pytest.raises(ValueError, match="Call record inside the vmap"):
        record(init_history(state), metrics)
    histories = torch.vmap(record)(histories, metrics)
    with pytest.raises(ValueError, match="Read one member: ") as caught:
        str(histories)
    with pytest.raises(ValueError, match="Read one member: "):
        histories.overflowing_leaves()
    remedy = str(caught.value).partition("Read one member: ")[2].rstrip(".")
    assert eval(remedy, {"optree": optree, "history": histories}).to_dict()["loss"] == [2.0]


# Weights

COMPILED = pytest.param({"compile": AOT}, marks=pytest.mark.slow)
BACKENDS = [{}, {"backend": "func"}, {"backend": "autograd"}, {"donate": True}, COMPILED]


def error(params: Any, x: Tensor) -> Tensor:
    return (params["w"] * x).sum()


def confidence(params: Any, x: Tensor) -> Tensor:
    return error(params, x).exp()


@pytest.mark.parametrize("options", BACKENDS)
def test_a_weight_computed_from_the_parameters_is_refused_and_its_remedies_work(options: dict[str, Any]):
    optimizer, window = fa.sgd(0.1), [torch.full((2,), value) for value in (0.1, 0.2)]

    def updated(loss_fn: Any) -> Tensor:
        state = fa.init_state({"w": torch.ones(2)}, optimizer, fa.StaticScale(8.0))
        return fa.make_step(loss_fn, optimizer, **options)(state, window)[0].params["w"]

    error_type, refused = ValueError, "found one computed from the parameters"
    if options.get("compile"):
        error_type, refused = Unsupported, "Observed exception"
    with pytest.raises(error_type, match=refused):
        updated(lambda p, x: fa.Loss(error(p, x), weight=confidence(p, x)))

    w = torch.ones(2, requires_grad=True)
    errors, weights = (torch.stack([f({"w": w}, x) for x in window]) for f in (error, confidence))
    (grad,) = torch.autograd.grad((errors * weights.detach()).sum() / weights.detach().sum(), w, retain_graph=True)
    found = updated(lambda p, x: fa.Loss(error(p, x), weight=confidence(p, x).detach()))
    torch.testing.assert_close(found, 1 - 0.1 * grad)
    (grad,) = torch.autograd.grad((errors * weights).sum(), w)
    found = updated(lambda p, x: fa.Loss(confidence(p, x) * error(p, x), reduction="sum"))
    torch.testing.assert_close(found, 1 - 0.1 * grad)


def test_a_weight_that_an_outer_derivative_learns_is_a_weight():
    """Of sum(w * l) / sum(w) with losses 2 and 8 of parameters 1, the derivative by the first weight at 1 and 1."""

    def after(weight: Tensor) -> Tensor:
        step = fa.make_step(lambda p, b: fa.Loss((p * b[0]).sum(), weight=b[1]), fa.sgd(0.1))
        state = fa.init_state(torch.ones(1), fa.sgd(0.1), fa.NoScale())
        window = [(torch.tensor([2.0]), weight), (torch.tensor([8.0]), torch.tensor(1.0))]
        return step(state, window)[0].params.sum()

    assert torch.func.grad(after)(torch.tensor(1.0)).item() == pytest.approx(-0.1 * (2 * 2 - (2 + 8)) / 4)


def test_a_step_in_place_of_a_loss_function_is_told_and_its_loss_function_is_the_remedy():
    params, x = {"w": torch.ones(2)}, torch.ones(2)
    step: Any = fa.make_step(square, fa.sgd(0.1))
    uses = {
        "scale_backward": lambda f: fa.scale_backward(f, fa.NoScale(), params, x),
        "unreached_paths": lambda f: fa.unreached_paths(f, params, x),
        "underflow_report": lambda f: underflow_report(f, params, x, dtype=torch.float16),
        "make_step": lambda f: fa.make_step(f, fa.sgd(0.1)),
        "autocast": lambda f: fa.autocast(f, torch.bfloat16),
        "freeze": lambda f: fa.freeze(f, lambda path, leaf: False),
    }
    for use in uses.values():
        with pytest.raises(TypeError, match=r"found a step.*step\.loss_fn"):
            use(step)
        use(step.loss_fn)


def sent_on(rank: int) -> list[tuple[Any, list[float]]]:
    from torch.distributed.device_mesh import init_device_mesh

    rows = torch.arange(6.0).view(2, 3) + 10 * rank
    images = (torch.arange(16.0).view(1, 2, 2, 4) + 10 * rank).to(memory_format=torch.channels_last)
    given = [rows, rows.t(), images, rows[0, 0].expand(3)]
    return [(leaf.stride(), leaf.flatten().tolist()) for leaf in broadcast(given, init_device_mesh("cpu", (2,)))]


@pytest.mark.slow
def test_what_is_broadcast_lies_in_memory_as_before(tmp_path: Path):
    rows, images = torch.arange(6.0).view(2, 3), torch.arange(16.0).view(1, 2, 2, 4)
    given = [rows, rows.t(), images.to(memory_format=torch.channels_last), torch.zeros(3)]
    for found in on_ranks(sent_on, tmp_path, 2):
        assert found == [(leaf.stride(), leaf.flatten().tolist()) for leaf in given]
