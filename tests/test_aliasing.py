"""Aliased and odd tensors through every stage: the results of fresh copies, inputs unchanged, no storage shared."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import functional_amp as fa
from functional_amp.tree import flatten, map_tensors

GOOD, BAD = torch.tensor(True), torch.tensor(False)


def counted(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """1, 2, 3, ...: sums of them are exact in any order, so that the layout may not matter."""
    return torch.arange(1, 1 + math.prod(shape)).reshape(shape).to(dtype)


def pythagorean(*shape: int) -> Tensor:
    """3 + 4j, 6 + 8j, ...: of integer absolute values."""
    return torch.complex(3 * counted(*shape), 4 * counted(*shape))


def twice(leaf: Tensor) -> dict[str, Tensor]:
    return {"a": leaf, "b": leaf}


def filled(value: float, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"a": torch.full((2, 3), value, dtype=dtype), "b": torch.full((3,), -value, dtype=dtype)}


def overlapping() -> dict[str, Tensor]:
    base = counted(10)
    return {"a": base[:6].view(2, 3), "b": base[3:9].view(2, 3)}


def inference() -> dict[str, Tensor]:
    with torch.inference_mode():
        return {"a": counted(2, 3), "b": counted(3)}


ODD: dict[str, Callable[[], dict[str, Tensor]]] = {
    "one tensor at two leaves": lambda: twice(counted(2, 3)),
    "stride 0": lambda: {"a": torch.tensor(2.0).expand(2, 3), "b": torch.tensor([3.0]).expand(4)},
    "one stride-0 tensor at two leaves": lambda: twice(torch.tensor(2.0).expand(2, 3)),
    "stride 0 in one dimension": lambda: {"a": counted(3).expand(2, 3), "b": counted(2, 1).expand(2, 3)},
    "views of one storage": lambda: dict(zip("ab", counted(2, 5).unbind(), strict=True)),
    "overlapping views": overlapping,
    "a tensor and its transpose": lambda: {"a": (base := counted(3, 3)), "b": base.t()},
    "transposed": lambda: {"a": counted(3, 2).t(), "b": counted(2, 3, 4).permute(2, 0, 1)},
    "strided": lambda: {"a": counted(4, 6)[::2, ::3], "b": counted(9)[1::4]},
    "channels last": lambda: twice(counted(2, 3, 2, 2).to(memory_format=torch.channels_last)),
    "an element of a large storage": lambda: {"a": counted(100)[41:42], "b": counted(100)[7]},
    "half, transposed": lambda: {"a": counted(3, 2, dtype=torch.float16).t(), "b": counted(4).to(torch.bfloat16)[::2]},
    "float64, stride 0": lambda: twice(torch.tensor(2.0, dtype=torch.float64).expand(2, 3)),
    "complex, transposed": lambda: {"a": pythagorean(3, 2).t(), "b": counted(2) + 0j},
    "conjugated": lambda: {"a": pythagorean(2, 3).conj(), "b": counted(2)},
    "negated": lambda: {"a": pythagorean(2, 3).conj().imag, "b": counted(2)},
    "parts of one complex tensor": lambda: {"a": (z := pythagorean(2)).real, "b": z.imag},
    "zero size": lambda: {"a": torch.ones(0, 3), "b": counted(2)},
    "zero size alone": lambda: {"a": torch.ones(0), "b": torch.ones(2, 0).t()},
    "0-dim": lambda: {"a": torch.tensor(3.0), "b": torch.tensor(4.0)},
    "0-dim, views": lambda: dict(zip("ab", counted(2).unbind(), strict=True)),
    "subnormal": lambda: filled(1e-42, torch.float32),
    "subnormal half": lambda: filled(6e-8, torch.float16),
    "subnormal bfloat16": lambda: filled(1e-40, torch.bfloat16),
    "subnormal float64": lambda: filled(5e-324, torch.float64),
    "the smallest normal": lambda: filled(torch.finfo(torch.float32).tiny, torch.float32),
    "the largest": lambda: filled(torch.finfo(torch.float32).max, torch.float32),
    "the largest half": lambda: filled(torch.finfo(torch.float16).max, torch.float16),
    "the largest bfloat16": lambda: filled(torch.finfo(torch.bfloat16).max, torch.bfloat16),
    "the largest float64": lambda: filled(torch.finfo(torch.float64).max, torch.float64),
    "inf and nan, stride 0": lambda: {"a": torch.tensor(math.inf).expand(3), "b": torch.tensor(math.nan).expand(2)},
    "negative zero": lambda: filled(-0.0, torch.float32),
    "that require grad": lambda: {"a": torch.nn.Parameter(counted(2, 3)), "b": counted(3).requires_grad_()},
    "not leaves of autograd": lambda: {"a": 2 * counted(2, 3).requires_grad_(), "b": counted(3)},
    "made in inference mode": inference,
}


def copies(tree: Any) -> Any:
    """The oracle's input: no aliasing, contiguous, no lazy bits."""
    return map_tensors(lambda leaf: leaf.detach().resolve_conj().resolve_neg().clone().contiguous(), tree)


def mean_square(params: dict[str, Tensor], *batch: Any) -> Tensor:
    return sum((leaf.abs().double() ** 2).sum() for leaf in params.values()) / 4.0  # type: ignore[return-value]


def plain(like: dict[str, Tensor], value: float = 1.0) -> dict[str, Tensor]:
    return {name: torch.full(leaf.shape, value, dtype=leaf.dtype) for name, leaf in like.items()}


def scaled(tree: Any, scale: float = 4.0, weight: float = 2.0) -> fa.ScaledGrads:
    return fa.ScaledGrads(tree, scale, weight)


ADAM, MOMENTUM = fa.adam(0.5, weight_decay=0.1), fa.sgd(0.5, momentum=0.5, dampening=0.25, weight_decay=0.1)
STAGES: dict[str, Callable[[Any], Any]] = {
    "ScaledGrads": scaled,
    "ScaledGrads of weight 0": lambda t: scaled(t, weight=0),
    "ScaledGrads of a weight tensor": lambda t: fa.ScaledGrads(t, 4.0, torch.tensor(2.0)),
    "accumulate the first": lambda t: fa.accumulate(None, scaled(t)),
    "accumulate onto": lambda t: fa.accumulate(scaled(plain(t)), scaled(t, 8.0)),
    "accumulate to": lambda t: fa.accumulate(scaled(t), scaled(plain(t), 8.0)),
    "accumulate itself": lambda t: fa.accumulate(scaled(t), scaled(t)),
    "accumulate where not": lambda t: fa.accumulate(scaled(plain(t)), scaled(t), where=BAD),
    "accumulate the first where": lambda t: fa.accumulate(None, scaled(t), where=GOOD),
    "all_finite": fa.all_finite,
    "all_finite, scaled": lambda t: fa.all_finite(scaled(t)),
    "unscale": lambda t: fa.unscale(scaled(t)),
    "unscale by 1": lambda t: fa.unscale(scaled(t, 1.0, 1.0)),
    "global_norm 1": lambda t: fa.global_norm(t, 1),
    "global_norm 2": fa.global_norm,
    "global_norm inf": lambda t: fa.global_norm(t, math.inf),
    "clip": lambda t: fa.clip(t, 0.5, norm_type=1.0),
    "clip nothing": lambda t: fa.clip(t, math.inf),
    "clip off": lambda t: fa.clip(t, None),
    "clip, scaled": lambda t: fa.clip(scaled(t), 0.5, norm_type=1.0),
    "clip nothing, scaled": lambda t: fa.clip(scaled(t), math.inf),
    "maybe_step with gradients": lambda t: fa.maybe_step(ADAM, plain(t), ADAM.init(plain(t)), t, GOOD),
    "maybe_step with scaled gradients": lambda t: fa.maybe_step(
        MOMENTUM, plain(t), MOMENTUM.init(plain(t)), scaled(t), GOOD
    ),
    "maybe_step with parameters": lambda t: fa.maybe_step(ADAM, t, ADAM.init(t), plain(t), GOOD),
    "maybe_step not": lambda t: fa.maybe_step(MOMENTUM, t, MOMENTUM.init(t), plain(t, math.nan), BAD),
    "maybe_step with both": lambda t: fa.maybe_step(MOMENTUM, t, MOMENTUM.init(t), t, GOOD),
    "maybe_step with moments": lambda t: fa.maybe_step(
        MOMENTUM, plain(t), MOMENTUM.init(plain(t))._replace(momentum_buffer=fa.unscale(scaled(t, 1.0, 1.0)).grads),
        plain(t), GOOD,
    ),
    "update": lambda t: ADAM.update(t, ADAM.init(t), t),
    "update without decay": lambda t: fa.adam().update(t, fa.adam().init(t), t),
    "update by plain descent": lambda t: fa.sgd(0.5).update(t, fa.sgd(0.5).init(t), t),
    "partition": lambda t: (o := fa.partition({"x": ADAM, "frozen": None}, lambda p, _: "x" if p == "a" else "frozen"))
    .update(t, o.init(t), t),
    "apply_updates to": lambda t: fa.apply_updates(t, plain(t)),
    "apply_updates of": lambda t: fa.apply_updates(plain(t), t),
    "apply_updates of None": lambda t: fa.apply_updates(t, dict.fromkeys(t)),
    "select": lambda t: fa.select(GOOD, t, plain(t)),
    "select the other": lambda t: fa.select(BAD, t, plain(t)),
    "select itself": lambda t: fa.select(GOOD, t, t),
    "split": lambda t: fa.split(t, lambda path, leaf: path == "a"),
    "merge": lambda t: fa.merge({"a": None, "b": t["b"]}, t),
    "cast_floating": lambda t: fa.cast_floating(t, torch.bfloat16),
    "cast_floating to what it is": lambda t: fa.cast_floating(t, torch.float32),
    "scale_backward, func": lambda t: fa.scale_backward(mean_square, fa.StaticScale(4.0), t),
    "scale_backward, autograd": lambda t: fa.scale_backward(mean_square, fa.StaticScale(4.0), t, backend="autograd"),
    "scale_backward, weighted": lambda t: fa.scale_backward(mean_square, fa.StaticScale(4.0), t, weight=3),
    "scale_backward of aux": lambda t: fa.scale_backward(
        lambda p, x: fa.Loss(p["w"].sum(), aux=x), fa.StaticScale(4.0), {"w": torch.ones(2)}, t
    ),
    "init_state": lambda t: fa.init_state(t, ADAM, buffers=t),
    "nonfinite_paths": fa.nonfinite_paths,
}  # fmt: skip


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in flatten(tree).leaves if isinstance(leaf, Tensor)]


def version(leaf: Tensor) -> int:
    return 0 if leaf.is_inference() else leaf._version


def assert_same(found: Any, expected: Any) -> None:
    """Equal bit for bit, NaN included: structure, dtypes and values (and anything that is no tensor)."""
    found, expected = flatten(found), flatten(expected)
    assert found.spec == expected.spec
    for ours, theirs in zip(found.leaves, expected.leaves, strict=True):
        if not isinstance(theirs, Tensor):
            assert ours == theirs
            continue
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        assert torch.equal(bits(ours), bits(theirs))


def bits(leaf: Tensor) -> Tensor:
    """Integers that tell -0 from 0; all NaN are one."""
    leaf = leaf.detach().resolve_conj().resolve_neg().contiguous()
    leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
    leaf = torch.where(torch.isnan(leaf), torch.nan, leaf) if leaf.is_floating_point() else leaf
    return leaf.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[leaf.dtype.itemsize])


class Snapshot(NamedTuple):
    leaf: Tensor
    version: int
    value: Tensor


def snapshot(tree: Any) -> list[Snapshot]:
    return [Snapshot(leaf, version(leaf), copies(leaf)) for leaf in tensors(tree)]


def assert_unchanged(inputs: list[Snapshot]) -> None:
    for leaf, before, value in inputs:
        assert version(leaf) == before
        assert_same(leaf, value)


def assert_no_shared_storage(out: Any, inputs: list[Snapshot]) -> None:
    """An output that lies in the storage of an input is that input: same place, same strides, same values."""
    for leaf in tensors(out):
        if leaf.untyped_storage().nbytes() == 0:
            continue
        sharing = [i for i in inputs if i.leaf.untyped_storage().data_ptr() == leaf.untyped_storage().data_ptr()]
        place = (leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype, leaf.is_conj(), leaf.is_neg())
        for each in sharing:
            other = each.leaf
            if place == (
                other.storage_offset(),
                other.shape,
                other.stride(),
                other.dtype,
                other.is_conj(),
                other.is_neg(),
            ):
                break
        else:
            assert not sharing


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_odd_tensors_give_what_fresh_copies_give_and_are_left_alone(make, stage):
    tree = make()
    inputs = snapshot(tree)
    out = stage(tree)
    assert_unchanged(inputs)
    assert_no_shared_storage(out, inputs)
    assert_same(out, stage(copies(tree)))
    assert_unchanged(inputs)


NARROW = {torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32, torch.complex32: torch.complex64}


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize(("dtype", "wide"), NARROW.items(), ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "accumulate onto",
        "all_finite",
        "all_finite, scaled",
        "unscale",
        "global_norm 2",
        "clip, scaled",
        "nonfinite_paths",
    ],
)
def test_the_narrowest_types_give_what_their_widened_copies_give(name, dtype, wide):
    tree = {
        "a": (pythagorean(2, 3) if wide.is_complex else counted(2, 3)).to(dtype),
        "b": torch.full((2,), 2.0).to(dtype),
    }
    inputs = snapshot(tree)
    out = STAGES[name](tree)
    assert_unchanged(inputs)
    if isinstance(out, fa.Clipped):  # the tree is returned as it is; the norm and the scale tell
        out = (out.grads.scale, out.norm)
    expected = STAGES[name](map_tensors(lambda leaf: leaf.to(wide), tree))
    assert_same(out, (expected.grads.scale, expected.norm) if isinstance(expected, fa.Clipped) else expected)


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize(
    ("loss_fn", "slope"),
    [(lambda p, x: ((p["a"] + p["b"]) ** 2).sum() / 2, 1.0), (lambda p, x: (p["a"] + p["b"]).sum(), 0.0)],
    ids=["one gradient for two leaves", "stride-0 gradients"],
)
def test_gradients_that_the_backward_shares_between_leaves_are_applied_once_each(loss_fn, slope, backend):
    # d/da = d/db = slope * (a + b) + (1 - slope), of one micro-batch or of the mean of two
    params = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0, 4.0])}
    grad = torch.tensor([4.0, 6.0]) if slope else torch.ones(2)
    optimizer = fa.sgd(0.5)
    step = fa.make_step(loss_fn, optimizer, max_norm=100.0, backend=backend)
    for window in ([0], [0, 0]):
        state, metrics = step(fa.init_state(params, optimizer, fa.StaticScale(8.0)), window)
        assert_same(state.params, {name: p - 0.5 * grad for name, p in params.items()})
        assert metrics.grad_norm.item() == pytest.approx(math.sqrt(2 * grad.square().sum().item()))


def tied(params: Any, x: Tensor) -> Tensor:
    return ((params["a"] * x).sum() - (params["b"] * x).sum() + 1) ** 2


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("optimizer", [ADAM, MOMENTUM], ids=["adam", "sgd"])
def test_a_state_of_aliased_leaves_steps_as_a_state_of_copies_does(optimizer, backend):
    leaf, batches = counted(2, 3), [torch.full((2, 3), value) for value in (1.0, -2.0)]
    step = fa.make_step(tied, optimizer, max_norm=1.0, backend=backend)
    aliased = fa.init_state(twice(leaf), optimizer, fa.DynamicScale(8.0, growth_interval=1))
    zero = torch.zeros(2, 3)
    slots = {name: twice(zero) for name in aliased.opt_state._fields[1:]}
    aliased = dataclasses.replace(aliased, opt_state=aliased.opt_state._replace(**slots))
    fresh = copies(aliased)
    for window in (batches, [batches[0], batches[0] * math.nan], batches):
        before = snapshot(aliased)
        fresh, expected = step(fresh, window)
        after, metrics = step(aliased, window)
        assert_unchanged(before)
        assert_same((after, metrics), (fresh, expected))
        aliased = after
    assert aliased.applied.item() == 2 and aliased.skipped.item() == 1


def test_a_micro_batch_and_buffers_may_be_views_of_the_parameters():
    params = {"a": counted(2, 3), "b": counted(3)}
    optimizer = fa.sgd(0.5)

    def loss_fn(params: Any, batch: Tensor, buffers: Any) -> fa.Loss:
        loss = (params["a"] * batch).sum() + (params["b"] * buffers["mean"]).sum()
        return fa.Loss(loss, aux=params, buffers={"mean": buffers["mean"] + params["b"]})

    def run(params: Any, batch: Tensor, mean: Tensor) -> Any:
        state = fa.init_state(params, optimizer, fa.StaticScale(8.0), buffers={"mean": mean})
        return fa.make_step(loss_fn, optimizer)(state, [batch, batch])

    inputs = snapshot(params)
    out = run(params, params["a"][:, :1], params["a"][0])
    assert_unchanged(inputs)
    assert_same(out, run(*copies((params, params["a"][:, :1], params["a"][0]))))
