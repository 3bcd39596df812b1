"""The laws of the stages and of the step, over random trees: algebra is the oracle, in float64."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import optree
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree

import functional_amp as fa
import functional_amp.testing as own

EPS = torch.finfo(torch.float32).eps
INF, NAN = math.inf, math.nan
DOUBLE = torch.float64
TRUE, FALSE = torch.tensor(True), torch.tensor(False)
NORM_TYPES = (1, 1.5, 2, 3, INF)
BACKENDS: tuple[Any, ...] = ("func", "autograd")
OPTIMIZERS: dict[str, Callable[[Any], fa.Optimizer]] = {
    "sgd": lambda lr: fa.sgd(lr),
    "momentum": lambda lr: fa.sgd(lr, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda lr: fa.sgd(lr, momentum=0.9, nesterov=True),
    "adam": lambda lr: fa.adam(lr, weight_decay=0.01),
    "adamw": lambda lr: fa.adamw(lr),
}


def tensors(*trees: Any) -> list[Tensor]:
    return [leaf for tree in trees for leaf in own.leaves_of(tree) if isinstance(leaf, Tensor)]


def gradients(tree: Any) -> list[Tensor]:
    """The float leaves in float64."""
    return [leaf.double() for leaf in tensors(tree) if leaf.is_floating_point()]


def norm(tree: Any, norm_type: float) -> float:
    """The p-norm in float64; divided by the largest element first, as (1e300)**2 is not a float64."""
    elements = torch.cat([torch.zeros(1, dtype=torch.float64), *(leaf.reshape(-1) for leaf in gradients(tree))]).abs()
    peak = elements.max().item()
    if peak == 0 or not math.isfinite(peak):
        return peak
    return peak * torch.linalg.vector_norm(elements / peak, norm_type).item()


def near(expected: float, share: float) -> Any:
    """Within a share of the number; pytest's own absolute tolerance would let 0 pass for 1e-30."""
    return pytest.approx(expected, rel=share, abs=2.0**-149)


def assert_close(found: Any, expected: list[Tensor], bounds: list[Tensor], share: float = 16 * EPS) -> None:
    """Each element within a share of its bound: the sum of the magnitudes that went into it."""
    for leaf, other, bound in zip(gradients(found), expected, bounds, strict=True):
        assert ((leaf - other).abs() <= share * bound + 2.0**-148).all(), (leaf, other)


def assert_alike(found: Any, expected: Any) -> None:
    """The same structure, shapes, dtypes and devices."""
    assert optree.tree_structure(found, none_is_leaf=True) == optree.tree_structure(expected, none_is_leaf=True)
    for a, b in zip(own.leaves_of(found), own.leaves_of(expected), strict=True):
        if isinstance(a, Tensor):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


# Accumulation


class Micro(NamedTuple):
    """A micro-batch as the algebra sees it: what is stored, with its units."""

    tree: Any
    scale: float
    weight: float

    def grads(self, as_tensor: bool = False) -> fa.ScaledGrads:
        return fa.ScaledGrads(self.tree, self.scale, torch.tensor(self.weight) if as_tensor else self.weight)


@st.composite
def micro_batches(
    draw: st.DrawFn, min_size: int = 1, max_size: int = 4, scales: Any = None, dtypes: Any = own.FLOATS
) -> list[Micro]:
    """Scaled gradients of one structure with any scales and weights; those of weight 0 hold NaN."""
    layout = draw(own.layouts(dtypes, rest=own.REST))
    scales = own.float32s(2.0**-10, 2.0**20) if scales is None else scales
    micros = draw(
        st.lists(st.builds(Micro, own.filled(layout), scales, own.weights()), min_size=min_size, max_size=max_size)
    )
    return [micro if micro.weight else micro._replace(tree=own.mapped(poison, micro.tree)) for micro in micros]


def poison(leaf: Tensor) -> Tensor:
    return leaf * NAN if leaf.is_floating_point() else leaf


def accumulated(micros: list[Micro], as_tensor: bool = False) -> fa.ScaledGrads:
    total = None
    for micro in micros:
        total = fa.accumulate(total, micro.grads(as_tensor))
    assert total is not None
    return total


def weighted_mean(micros: list[Micro]) -> tuple[list[Tensor], list[Tensor]]:
    """`sum(tree / scale) / sum(weight)` in float64, and the same of the magnitudes."""
    weight = sum(micro.weight for micro in micros) or 1.0
    zeros = [torch.zeros_like(leaf) for leaf in gradients(micros[0].tree)]
    sums, magnitudes = zeros, zeros
    for micro in micros:
        if micro.weight:
            true = [leaf / micro.scale / weight for leaf in gradients(micro.tree)]
            sums = [a + b for a, b in zip(sums, true, strict=True)]
            magnitudes = [a + b.abs() for a, b in zip(magnitudes, true, strict=True)]
    return sums, magnitudes


@given(micros=micro_batches(), as_tensor=st.booleans())
def test_micro_batches_of_any_weights_and_scales_add_up_to_the_weighted_mean(micros: list[Micro], as_tensor: bool):
    total = accumulated(micros, as_tensor)
    assert total.weight.item() == near(sum(micro.weight for micro in micros), 4 * EPS)
    grads, finite = fa.unscale(total)
    assert finite.item() is True
    assert_close(grads, *weighted_mean(micros))


@given(micros=micro_batches(scales=own.powers_of_two(), dtypes=(torch.float64,)))
def test_float64_leaves_keep_float64s_precision(micros: list[Micro]):
    assume(all(micro.weight == int(micro.weight) for micro in micros))
    grads = fa.unscale(accumulated(micros)).grads
    assert_close(grads, *weighted_mean(micros), share=16 * torch.finfo(torch.float64).eps)


@given(micros=micro_batches(), as_tensor=st.booleans())
def test_integer_and_bool_leaves_ride_along_through_every_stage(micros: list[Micro], as_tensor: bool):
    def rest(tree: Any) -> list[Tensor]:
        return [leaf for leaf in tensors(tree) if not leaf.is_floating_point()]

    total = accumulated(micros, as_tensor)
    grads = fa.unscale(total).grads
    clipped = fa.clip(grads, 1e-3).grads
    for tree in (total.tree, grads, clipped):
        assert own.same_bits(rest(tree), rest(micros[0].tree))


@given(micros=micro_batches(min_size=3, max_size=3))
def test_accumulate_is_associative_up_to_rounding(micros: list[Micro]):
    a, b, c = (micro.grads() for micro in micros)
    left = fa.accumulate(fa.accumulate(a, b), c)
    right = fa.accumulate(a, fa.accumulate(b, c))
    assert left.weight.item() == near(right.weight.item(), 4 * EPS)
    assert_close(fa.unscale(left).grads, gradients(fa.unscale(right).grads), weighted_mean(micros)[1])


@given(micros=micro_batches(min_size=2, max_size=4), data=st.data())
def test_accumulate_is_commutative_up_to_rounding(micros: list[Micro], data: st.DataObject):
    shuffled = data.draw(st.permutations(micros))
    found, expected = fa.unscale(accumulated(shuffled)), fa.unscale(accumulated(micros))
    assert_close(found.grads, gradients(expected.grads), weighted_mean(micros)[1])


@given(micros=micro_batches(min_size=2, max_size=2, scales=st.just(8.0)))
def test_accumulate_is_commutative_bit_for_bit_at_one_scale(micros: list[Micro]):
    micros = [micro._replace(tree=fa.split(micro.tree, lambda path, leaf: is_float(leaf))[0]) for micro in micros]
    assert own.same_bits(accumulated(micros), accumulated(micros[::-1]))


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


@given(micros=micro_batches(max_size=1))
def test_none_is_the_identity_of_accumulate(micros: list[Micro]):
    grads = micros[0].grads()
    total = fa.accumulate(None, grads)
    assert own.same_bits((total.scale, total.weight), (grads.scale, grads.weight))
    assert own.same_bits(fa.unscale(total), fa.unscale(grads))


@given(micros=micro_batches(max_size=3), scale=own.powers_of_two())
def test_a_micro_batch_without_weight_changes_nothing_even_if_it_is_nan(micros: list[Micro], scale: float):
    total = accumulated(micros)
    empty = fa.ScaledGrads(own.mapped(poison, micros[0].tree), scale, 0.0)
    assert own.same_bits(fa.unscale(fa.accumulate(total, empty)), fa.unscale(total))


@given(micros=micro_batches(min_size=2, scales=own.powers_of_two(0, 10)), data=st.data())
def test_where_drops_a_micro_batch_with_its_weight(micros: list[Micro], data: st.DataObject):
    micros = [micro for micro in micros if micro.weight]
    assume(micros)
    bad = data.draw(st.lists(st.booleans(), min_size=len(micros), max_size=len(micros)), label="bad")
    broken = [
        micro._replace(tree=data.draw(own.poisoned(micro.tree))) if is_bad else micro
        for micro, is_bad in zip(micros, bad, strict=True)
    ]
    total = None
    for micro in broken:
        grads = micro.grads()
        total = fa.accumulate(total, grads, where=fa.all_finite(grads))
    good = [micro for micro, is_bad in zip(micros, bad, strict=True) if not is_bad]
    assert total is not None
    grads, finite = fa.unscale(total)
    assert finite.item() is True
    if good:
        expected = accumulated(good)
        assert own.same_bits(total.weight, expected.weight)
        assert own.same_bits(gradients(grads), gradients(fa.unscale(expected).grads))
    else:
        assert total.weight.item() == 0.0
        assert not any(leaf.any() for leaf in gradients(grads))


@given(micros=micro_batches(min_size=2, max_size=2))
def test_where_true_keeps_the_micro_batch_as_it_is(micros: list[Micro]):
    first, second = (micro.grads() for micro in micros)
    assert own.same_bits(fa.accumulate(None, first, where=TRUE), fa.accumulate(None, first))
    assert own.same_bits(fa.accumulate(first, second, where=TRUE), fa.accumulate(first, second))
    kept = fa.accumulate(fa.accumulate(None, first), second, where=FALSE)
    assert own.same_bits(kept, fa.accumulate(None, first))


def test_gradients_of_different_scales_add_up():
    first = fa.ScaledGrads(torch.tensor(1.0 * 1024), 1024.0)
    second = fa.ScaledGrads(torch.tensor(3.0 * 2048), 2048.0)
    for total in (fa.accumulate(first, second), fa.accumulate(second, first)):
        assert fa.unscale(total).grads.item() == 2.0


def test_missing_gradients_stay_missing_and_add_nothing():
    total = fa.accumulate(fa.ScaledGrads([None, torch.ones(1)], 1.0), fa.ScaledGrads([None, None], 1.0))
    assert total.tree[0] is None
    assert total.tree[1].item() == 1.0
    assert fa.accumulate(fa.ScaledGrads([None], 2.0), fa.ScaledGrads([torch.ones(1)], 1.0)).tree[0].item() == 2.0


# Full batches


class Regression(NamedTuple):
    """Least squares on items: a mean loss whose micro-batches differ in length."""

    params: dict[str, Tensor]
    batches: list[tuple[Tensor, Tensor, float]]

    def full_batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of all items together and its gradient: torch's autograd in float64."""
        params = {name: leaf.double().requires_grad_() for name, leaf in self.params.items()}
        counted = [(x.double(), y.double()) for x, y, weight in self.batches if weight]
        loss = squared_error(params, torch.cat([x for x, _ in counted]), torch.cat([y for _, y in counted]))
        return loss.detach(), dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))


def squared_error(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return ((torch.tanh(x @ params["w"]) + params["b"] - y) ** 2).mean()


@st.composite
def regressions(draw: st.DrawFn) -> Regression:
    """Micro-batches of 1 to 5 items, some of them all padding: weight 0 and NaN."""
    generator = torch.Generator().manual_seed(draw(own.seeds()))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), label="items")
    batches = []
    for size in sizes:
        x, y = torch.randn(size or 2, 3, generator=generator), torch.randn(size or 2, 2, generator=generator)
        batches.append((x, y, float(size)) if size else (x * NAN, y, 0.0))
    params = {"w": torch.randn(3, 2, generator=generator), "b": torch.randn(2, generator=generator)}
    return Regression(params, batches)


def items(weight: float, as_tensor: bool) -> Any:
    """A count as a user may hold it."""
    return torch.tensor(int(weight)) if as_tensor else weight


@given(
    problem=regressions(), scale=own.powers_of_two(0, 16), as_tensor=st.booleans(), backend=st.sampled_from(BACKENDS)
)
def test_micro_batches_give_the_gradient_of_the_full_batch(
    problem: Regression, scale: float, as_tensor: bool, backend: Any
):
    total = None
    for x, y, weight in problem.batches:
        grads, _, _ = fa.scale_backward(
            squared_error,
            fa.StaticScale(scale),
            problem.params,
            x,
            y,
            weight=items(weight, as_tensor),
            backend=backend,
        )
        total = fa.accumulate(total, grads)
    assert total is not None
    found, expected = fa.unscale(total).grads, problem.full_batch()[1]
    for name, grad in expected.items():
        torch.testing.assert_close(found[name].double(), grad, rtol=1e-5, atol=1e-5)


@given(problem=regressions(), as_tensor=st.booleans(), backend=st.sampled_from(BACKENDS))
def test_a_step_over_micro_batches_is_a_step_over_the_full_batch(problem: Regression, as_tensor: bool, backend: Any):
    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor, Any]) -> fa.Loss:
        x, y, weight = batch
        return fa.Loss(squared_error(params, x, y), weight)

    optimizer = fa.sgd(lr=1.0)
    step = fa.make_step(loss_fn, optimizer, backend=backend)
    state = fa.init_state(problem.params, optimizer, fa.DynamicScale(1024.0))
    state, metrics = step(state, [(x, y, items(weight, as_tensor)) for x, y, weight in problem.batches])
    loss, grads = problem.full_batch()
    for name, grad in grads.items():
        torch.testing.assert_close(state.params[name].double(), problem.params[name] - grad, rtol=1e-5, atol=1e-5)
    assert metrics.loss.item() == near(loss.item(), 1e-5)
    assert metrics.grad_norm.item() == pytest.approx(norm(grads, 2), rel=1e-4, abs=1e-5)
    assert metrics.weight.item() == sum(weight for _, _, weight in problem.batches)
    assert metrics.finite.item() is True


# Independence of the scale


WIDE_RANGE = (torch.float32, torch.bfloat16, torch.float64)
"""The dtypes in which a product with 2**20 neither over- nor underflows."""


@given(
    tree=own.trees(WIDE_RANGE),
    weight=own.float32s(0.125, 4096.0),
    shift=own.powers_of_two(-20, 20),
    max_norm=st.sampled_from([None, 1e-2, 1.0, 1e9]),
    norm_type=st.sampled_from(NORM_TYPES),
)
def test_stages_do_not_depend_on_a_power_of_two_scale_bit_for_bit(
    tree: Any, weight: float, shift: float, max_norm: float | None, norm_type: float
):
    grads = fa.ScaledGrads(tree, 1.0, weight)
    shifted = fa.ScaledGrads(own.mapped(lambda leaf: leaf * shift, tree), shift, weight)
    assert own.same_bits(fa.unscale(shifted), fa.unscale(grads))
    assert own.same_bits(fa.all_finite(shifted), fa.all_finite(grads))
    assert own.same_bits(fa.global_norm(shifted, norm_type), fa.global_norm(grads, norm_type))
    found, expected = (fa.clip(g, max_norm, norm_type=norm_type) for g in (shifted, grads))
    assert own.same_bits(found.norm, expected.norm)
    assert own.same_bits(fa.unscale(found.grads), fa.unscale(expected.grads))


@pytest.mark.parametrize("policy", ["f32", "p=f32,c=bf16,o=f32"])
@given(
    problem=regressions(),
    exponents=st.tuples(st.integers(-15, 40), st.integers(-15, 40)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    max_norm=st.sampled_from([None, 0.1]),
    backend=st.sampled_from(BACKENDS),
)
def test_a_run_does_not_depend_on_a_power_of_two_scale_bit_for_bit(
    policy: str, problem: Regression, exponents: tuple[int, int], optimizer: str, max_norm: float | None, backend: Any
):
    def run(scale: float) -> Any:
        def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor, float]) -> fa.Loss:
            x, y, weight = batch
            return fa.Loss(fa.with_policy(squared_error, policy)(params, x, y), weight)

        step = fa.make_step(loss_fn, OPTIMIZERS[optimizer](0.1), max_norm=max_norm, backend=backend)
        state = fa.init_state(problem.params, OPTIMIZERS[optimizer](0.1), fa.StaticScale(scale))
        results = []
        for _ in range(2):
            state, metrics = step(state, problem.batches)
            results.append((state.params, state.opt_state, metrics._replace(scale=None)))
        return results

    assert own.same_bits(*(run(2.0**exponent) for exponent in exponents))


# The norm and clipping


@given(tree=own.trees(rest=own.REST), norm_type=st.sampled_from((*NORM_TYPES, 4, 20)), data=st.data())
def test_global_norm_is_float64s_norm(tree: Any, norm_type: float, data: st.DataObject):
    # One decade in 70 for all the leaves: from the subnormals to the end of float32.
    shift = 10.0 ** data.draw(st.integers(-35, 34), label="shift")
    tree = own.mapped(lambda leaf: leaf * shift if leaf.dtype in WIDE_RANGE else leaf, tree)
    found = fa.global_norm(tree, norm_type)
    wide = any(leaf.dtype == torch.float64 for leaf in tensors(tree) if leaf.numel())
    assert found.dtype == (torch.float64 if wide else torch.float32)
    assert found.shape == ()
    assert found.item() == near(norm(tree, norm_type), 32 * EPS)


@given(tree=own.trees((torch.float64,)), decade=st.integers(-295, 295), norm_type=st.sampled_from(NORM_TYPES))
def test_global_norm_of_float64_leaves_has_float64s_range_and_precision(tree: Any, decade: int, norm_type: float):
    tree = own.mapped(lambda leaf: leaf * 10.0**decade, tree)
    assert fa.global_norm(tree, norm_type).item() == pytest.approx(norm(tree, norm_type), rel=1e-13, abs=0.0)


@st.composite
def scaled_trees(draw: st.DrawFn) -> fa.ScaledGrads:
    """Gradients with any scale and weight, both the stored and the true ones inside float32's range."""
    scale = draw(own.loss_scales(2.0**-90, 2.0**90), label="scale")
    weight = draw(own.float32s(0.125, 4096.0), label="weight")
    stored = draw(st.integers(-28, 28), label="decade")
    assume(-28 < stored - math.log10(scale * weight) < 28)
    tree = draw(own.trees(rest=own.REST))
    tree = own.mapped(lambda leaf: leaf * 10.0**stored if leaf.dtype in WIDE_RANGE else 0 * leaf, tree)
    assume(norm(tree, INF) > 0)
    return fa.ScaledGrads(tree, scale, weight)


@given(grads=scaled_trees(), norm_type=st.sampled_from(NORM_TYPES))
def test_global_norm_of_scaled_gradients_is_in_true_units(grads: fa.ScaledGrads, norm_type: float):
    expected = norm(grads.tree, norm_type) / (grads.scale.item() * grads.weight.item())
    assert fa.global_norm(grads, norm_type).item() == near(expected, 32 * EPS)


NORMS: dict[str, tuple[Any, float, float]] = {
    "the squares of 300 and 400 are no float16": (torch.tensor([300.0, 400.0], dtype=torch.float16), 2, 500.0),
    "the largest float16": (torch.full((4,), 65504.0, dtype=torch.float16), 2, 131008.0),
    "a sum of 4096 bfloat16 ones": (torch.ones(4096, dtype=torch.bfloat16), 2, 64.0),
    "a count of 4096 bfloat16 ones": (torch.ones(4096, dtype=torch.bfloat16), 1, 4096.0),
    "tiny": (torch.tensor([3e-30, 4e-30]), 2, 5e-30),
    "huge": (torch.tensor([3e30, 4e30]), 2, 5e30),
    "tiny beside huge": ([torch.tensor([3e30]), torch.tensor([1e-30, 4e30])], 2, 5e30),
    "the smallest subnormals": (torch.tensor([3 * 2.0**-149, 4 * 2.0**-149]), 2, 5 * 2.0**-149),
    "the end of float32": (torch.tensor([1.5e38, 2e38]), 2, 2.5e38),
    "cubes of tiny": (torch.tensor([1e-30, 1e-30]), 3, 2 ** (1 / 3) * 1e-30),
    "cubes of huge": (torch.tensor([1e30, 1e30]), 3, 2 ** (1 / 3) * 1e30),
    "a high power": (torch.tensor([100.0, 1.0]), 20, 100.0),
    "the largest": ([torch.tensor([-3.0]), torch.tensor([2.0], dtype=torch.float16)], INF, 3.0),
    "mixed dtypes": ([torch.tensor([3.0], dtype=torch.float64), torch.tensor([4.0], dtype=torch.bfloat16)], 2, 5.0),
    "complex": (torch.tensor([3.0 + 4.0j]), 2, 5.0),
    "zeros": (torch.zeros(3), 2, 0.0),
    "nothing": ({"a": None, "b": torch.zeros(0)}, 2, 0.0),
    "integers do not count": ([torch.tensor([7]), torch.tensor([True]), torch.tensor([5.0])], 2, 5.0),
    "a tensor at two leaves counts twice": ([torch.tensor([20.0, 20.0])] * 2, 2, 40.0),
}


@pytest.mark.parametrize("case", NORMS)
def test_global_norm_of_known_gradients(case: str):
    tree, norm_type, expected = NORMS[case]
    assert fa.global_norm(tree, norm_type).item() == near(expected, 4 * EPS)


@given(
    grads=scaled_trees(),
    share=st.floats(1e-6, 10.0),
    norm_type=st.sampled_from(NORM_TYPES),
    eps=st.sampled_from([0.0, 1e-6]),
)
def test_clip_commutes_with_unscale(grads: fa.ScaledGrads, share: float, norm_type: float, eps: float):
    unscaled = fa.unscale(grads).grads
    max_norm = share * norm(unscaled, norm_type)
    before = fa.clip(grads, max_norm, norm_type=norm_type, eps=eps)
    after = fa.clip(unscaled, max_norm, norm_type=norm_type, eps=eps)
    assume(2.0**-126 < grads.scale.item() * (norm(unscaled, norm_type) + eps) / max_norm < 2.0**116)
    assert before.norm.item() == near(after.norm.item(), 32 * EPS)
    expected = gradients(after.grads)
    assert_close(fa.unscale(before.grads).grads, expected, [leaf.abs() for leaf in expected], share=64 * EPS)


@st.composite
def trees_of_any_size(draw: st.DrawFn) -> Any:
    """Trees whose largest element is at any decade of float32."""
    shift = 10.0 ** draw(st.integers(-34, 34), label="shift")
    tree = draw(own.trees(rest=own.REST))
    return own.mapped(lambda leaf: leaf * shift if leaf.dtype in WIDE_RANGE else leaf, tree)


@given(tree=trees_of_any_size(), share=st.floats(1e-6, 10.0), norm_type=st.sampled_from(NORM_TYPES))
def test_after_clip_the_norm_is_at_most_max_norm_and_the_direction_is_kept(tree: Any, share: float, norm_type: float):
    before = norm(tree, norm_type)
    max_norm = share * before
    assume(1e-37 < max_norm < 3e38)
    clipped, found = fa.clip(tree, max_norm, norm_type=norm_type)
    assert found.item() == near(before, 32 * EPS)
    # Each element is rounded once to its dtype: by half an ulp, or half of the smallest subnormal.
    infos = [torch.finfo(leaf.dtype) for leaf in tensors(tree) if leaf.is_floating_point() and leaf.numel()]
    relative = max(max(info.eps for info in infos), 32 * EPS)
    absolute = max(info.tiny * info.eps for info in infos)
    count = sum(leaf.numel() for leaf in gradients(tree))
    assert norm(clipped, norm_type) <= max_norm * (1 + relative) + count * absolute
    for leaf, given_leaf in zip(gradients(clipped), gradients(tree), strict=True):
        expected = given_leaf * min(1.0, share)
        assert ((leaf - expected).abs() <= relative * expected.abs() + absolute).all()


@given(tree=trees_of_any_size(), norm_type=st.sampled_from(NORM_TYPES), share=st.floats(1.0, 4.0))
def test_clip_leaves_gradients_bitwise_alone_where_the_norm_is_at_most_max_norm(
    tree: Any, norm_type: float, share: float
):
    max_norm = fa.global_norm(tree, norm_type).item() * share
    assume(max_norm > 0)
    assert own.same_bits(fa.clip(tree, max_norm, norm_type=norm_type).grads, tree)
    scaled = fa.ScaledGrads(tree, 1024.0, 3.0)
    max_norm = fa.global_norm(scaled, norm_type).item() * share
    assume(max_norm > 0)
    assert same_gradients(fa.clip(scaled, max_norm, norm_type=norm_type).grads, scaled)


def same_gradients(found: fa.ScaledGrads, given: fa.ScaledGrads) -> bool:
    """The same bits; the scale may be a float64 of the same value, as that of clipped float64 gradients is."""
    return own.same_bits(found.tree, given.tree) and bool(found.scale == given.scale and found.weight == given.weight)


def one_nan(leaf: Tensor) -> Tensor:
    """The leaf with one pattern of bits for NaN: a cast to float32 and back may change its payload."""
    return torch.where(leaf.isnan(), NAN, leaf) if leaf.is_floating_point() else leaf


@given(tree=own.trees(rest=own.REST), max_norm=st.sampled_from([None, 1e-3, 1.0, INF]), data=st.data())
def test_clip_changes_nothing_where_an_element_is_not_finite(tree: Any, max_norm: float | None, data: st.DataObject):
    broken = data.draw(own.poisoned(tree))
    norm_type = data.draw(st.sampled_from(NORM_TYPES))
    clipped, found = fa.clip(broken, max_norm, norm_type=norm_type)
    assert own.same_bits(*(own.mapped(one_nan, tree) for tree in (clipped, broken)))
    assert not math.isfinite(found.item())
    scaled = fa.ScaledGrads(broken, 8.0)
    assert same_gradients(fa.clip(scaled, max_norm, norm_type=norm_type).grads, scaled)


@given(tree=own.trees(rest=own.REST))
def test_clip_with_none_or_inf_only_measures(tree: Any):
    for max_norm in (None, INF):
        clipped, found = fa.clip(tree, max_norm)
        assert own.same_bits(clipped, tree)
        assert own.same_bits(found, fa.global_norm(tree))


def test_clip_is_the_seeds_formula_and_with_eps_torchs():
    grads = [torch.tensor([0.03, 0.04])]
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = grads[0].clone()
    expected_norm = nn.utils.clip_grad_norm_([parameter], 0.01)
    found, found_norm = fa.clip(grads, 0.01, eps=1e-6)
    assert torch.equal(found_norm, expected_norm)
    torch.testing.assert_close(found[0], parameter.grad, rtol=2 * EPS, atol=0)
    assert norm(fa.clip(grads, 0.01).grads, 2) == near(0.01, 2 * EPS)


@given(tree=own.trees(rest=own.REST), data=st.data())
def test_all_finite_sees_any_element_at_any_leaf(tree: Any, data: st.DataObject):
    assert fa.all_finite(tree).item() is True
    assert fa.all_finite(fa.ScaledGrads(tree, 8.0, 3.0)).item() is True
    broken = data.draw(own.poisoned(tree))
    assert fa.all_finite(broken).item() is False
    assert fa.unscale(fa.ScaledGrads(broken, 8.0, 3.0)).finite.item() is False
    assert fa.all_finite(fa.ScaledGrads(broken, 8.0, 3.0)).item() is False


@given(tree=own.trees(WIDE_RANGE), decade=st.integers(28, 34), scale=own.powers_of_two(-20, 4), weight=own.weights())
@example(tree=[torch.ones(1, dtype=DOUBLE), torch.ones(1)], decade=34, scale=2.0**-20, weight=1.0)
def test_finite_says_whether_every_unscaled_element_is(tree: Any, decade: int, scale: float, weight: float):
    # At the end of float32 a division by a scale below 1 may overflow.
    grads = fa.ScaledGrads(own.mapped(lambda leaf: leaf * 10.0**decade, tree), scale, weight)
    unscaled, finite = fa.unscale(grads)
    assert finite.item() is all(bool(leaf.isfinite().all()) for leaf in gradients(unscaled))
    assert own.same_bits(fa.all_finite(grads), finite)


# Complex leaves


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_complex_leaf_moves_as_its_real_and_imaginary_parts(optimizer: str, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(0)
    params, first, second = (torch.randn(3, generator=generator, dtype=dtype) for _ in range(3))

    def run(view: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        transform = OPTIMIZERS[optimizer](0.1)
        leaf, opt_state, measured = view(params), transform.init(view(params)), torch.zeros(())
        for _ in range(2):
            total = fa.accumulate(None, fa.ScaledGrads(view(first) * 8, 8.0))
            total = fa.accumulate(total, fa.ScaledGrads(view(second) * 16 * 3, 16.0, 3.0))
            grads, finite = fa.unscale(total)
            grads, measured = fa.clip(grads, 0.5)
            leaf, opt_state = fa.maybe_step(transform, leaf, opt_state, grads, finite)
        return leaf, measured

    (leaf, measured), (expected, expected_norm) = run(lambda leaf: leaf), run(torch.view_as_real)
    assert leaf.dtype == dtype
    torch.testing.assert_close(torch.view_as_real(leaf), expected, rtol=16 * EPS, atol=0)
    torch.testing.assert_close(measured, expected_norm, rtol=16 * EPS, atol=0)


@pytest.mark.parametrize("part", [0, 1])
@pytest.mark.parametrize("value", own.NONFINITE)
def test_a_non_finite_part_of_a_complex_element_is_seen(part: int, value: float):
    grads = torch.ones(2, dtype=torch.complex64)
    torch.view_as_real(grads)[1, part] = value
    assert fa.all_finite(grads).item() is False
    assert fa.unscale(fa.ScaledGrads(grads, 8.0)).finite.item() is False


@pytest.mark.parametrize("backend", BACKENDS)
def test_complex_parameters_have_torchs_gradient(backend: Any):
    params = torch.tensor([1.0 + 2.0j, -0.5j])
    grads = fa.scale_backward(lambda p: (p * p).abs().sum(), fa.StaticScale(8.0), params, backend=backend).grads
    leaf = params.clone().requires_grad_()
    expected = torch.autograd.grad((leaf * leaf).abs().sum(), leaf)[0]
    torch.testing.assert_close(fa.unscale(grads).grads, expected)


# The step is a transaction


Batch = dict[str, Any]


def linear_loss(params: Any, batch: Batch, buffers: Any = None) -> fa.Loss:
    """`<params, batch>`: the gradient is the batch, so that any leaf can be given any gradient."""
    value = torch.zeros(())
    for leaf, grad in zip(tensors(params), tensors(batch["grads"]), strict=True):
        if leaf.is_floating_point():
            value = value + (leaf.float() * grad.float()).sum()
    if buffers is None:
        return fa.Loss(value, batch["weight"])
    seen = {"count": buffers["count"] + 1, "mean": 0.9 * buffers["mean"] + 0.1 * value.detach()}
    return fa.Loss(value, batch["weight"], buffers=seen)


@st.composite
def runs(draw: st.DrawFn, windows: int = 2) -> tuple[Any, list[list[Batch]]]:
    """Parameters and windows of micro-batches that give them random gradients."""
    layout = draw(own.layouts(rest=own.REST))
    params = draw(own.filled(layout))
    batch = st.builds(
        lambda tree, weight: {"grads": tree, "weight": weight}, own.filled(layout), st.sampled_from([1.0, 3.0])
    )
    return params, [draw(st.lists(batch, min_size=1, max_size=3)) for _ in range(windows)]


def start_buffers() -> dict[str, Tensor]:
    return {"count": torch.tensor(0), "mean": torch.tensor(0.5)}


def new_state(params: Any, optimizer: Any, with_buffers: bool, scale: float = 8.0) -> fa.TrainState:
    scaler = fa.DynamicScale(scale, growth_interval=2, hysteresis=2)
    return fa.init_state(params, optimizer, scaler, buffers=start_buffers() if with_buffers else None)


@given(
    run=runs(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    with_buffers=st.booleans(),
    backend=st.sampled_from(BACKENDS),
    max_norm=st.sampled_from([None, 1.0]),
    data=st.data(),
)
def test_a_non_finite_element_leaves_everything_but_scaler_and_counters_bit_identical(
    run: Any, optimizer: str, with_buffers: bool, backend: Any, max_norm: float | None, data: st.DataObject
):
    params, (good, bad) = run
    step = fa.make_step(linear_loss, OPTIMIZERS[optimizer](0.01), max_norm=max_norm, backend=backend)
    before, metrics = step(new_state(params, OPTIMIZERS[optimizer](0.01), with_buffers), good)
    assert metrics.finite.item() is True

    place = data.draw(st.integers(0, len(bad) - 1), label="micro-batch")
    bad[place] = {**bad[place], "grads": data.draw(own.poisoned(bad[place]["grads"]))}
    after, metrics = step(before, bad)

    assert metrics.finite.item() is False
    for name in ("params", "opt_state", "buffers"):
        assert own.same_bits(getattr(after, name), getattr(before, name))
    assert after.window is None
    assert own.same_bits(after.scaler, fa.update_scale(before.scaler, FALSE))
    assert (after.applied.item(), after.skipped.item(), after.skipped_in_a_row.item()) == (1, 1, 1)

    again, _ = step(after, good)
    assert (again.applied.item(), again.skipped.item(), again.skipped_in_a_row.item()) == (2, 1, 0)


@given(run=runs(windows=1), optimizer=st.sampled_from(list(OPTIMIZERS)))
def test_a_window_without_weight_is_not_applied(run: Any, optimizer: str):
    params, (window,) = run
    step = fa.make_step(linear_loss, OPTIMIZERS[optimizer](0.01))
    before = new_state(params, OPTIMIZERS[optimizer](0.01), with_buffers=True)
    after, metrics = step(before, [{**batch, "weight": 0.0} for batch in window])
    for name in ("params", "opt_state", "buffers"):
        assert own.same_bits(getattr(after, name), getattr(before, name))
    assert (metrics.loss.item(), metrics.weight.item(), metrics.grad_norm.item()) == (0.0, 0.0, 0.0)
    assert (after.applied.item(), after.skipped.item()) == (0, 1)


@given(
    run=runs(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    with_buffers=st.booleans(),
    backend=st.sampled_from(BACKENDS),
    bad=st.booleans(),
)
def test_state_out_has_the_structure_shapes_and_dtypes_of_state_in(
    run: Any, optimizer: str, with_buffers: bool, backend: Any, bad: bool
):
    params, windows = run
    step = fa.make_step(linear_loss, OPTIMIZERS[optimizer](0.01), max_norm=1.0, backend=backend)
    state = new_state(params, OPTIMIZERS[optimizer](0.01), with_buffers)
    assert_alike(state.params, params)
    for window in windows:
        if bad:
            window = [{**batch, "grads": own.mapped(poison, batch["grads"])} for batch in window]
        opened = None
        for batch in window:
            open_state = step.accumulate(state if opened is None else opened, batch)
            if opened is not None:
                assert_alike(open_state, opened)
            opened = open_state
        assert opened is not None
        closed, _ = step.update(opened)
        assert_alike(closed, state)
        state = closed


@given(run=runs(), optimizer=st.sampled_from(list(OPTIMIZERS)), applied=st.booleans())
def test_each_stage_keeps_structure_shapes_and_dtypes(run: Any, optimizer: str, applied: bool):
    params, windows = run
    grads = windows[0][0]["grads"]
    scaled = fa.ScaledGrads(grads, 8.0)
    total = fa.accumulate(None, scaled)
    wide = own.mapped(lambda leaf: leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf, grads)
    assert_alike(total, fa.ScaledGrads(wide, 8.0))
    assert_alike(fa.accumulate(total, scaled), total)
    assert_alike(fa.unscale(scaled).grads, wide)
    assert_alike(fa.clip(grads, 1.0).grads, grads)
    assert_alike(fa.clip(scaled, 1.0).grads.tree, grads)
    transform = OPTIMIZERS[optimizer](0.01)
    opt_state = transform.init(params)
    stepped = fa.maybe_step(transform, params, opt_state, grads, torch.tensor(applied))
    assert_alike(stepped, fa.Stepped(params, opt_state))


def test_a_hundred_bad_windows_cost_nothing_and_training_goes_on():
    target, optimizer = torch.tensor([1.0, -2.0]), fa.adamw(0.1)
    step = fa.make_step(lambda params, x: ((params["w"] * x - target) ** 2).mean(), optimizer, max_norm=1.0)
    state = fa.init_state({"w": torch.zeros(2)}, optimizer)
    good, bad = [torch.ones(2), torch.ones(2)], [torch.ones(2), torch.full((2,), NAN)]
    for _ in range(3):
        state, _ = step(state, good)
    before = state
    for _ in range(100):
        state, metrics = step(state, bad)
        assert metrics.finite.item() is False
        assert 0 < state.scaler.scale.item() < INF
    assert own.same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert state.skipped_in_a_row.item() == 100
    # 2**16 halved a hundred times; the floor of float32 is not reached yet.
    assert state.scaler.scale.item() == 2.0**-84
    losses = []
    for _ in range(60):
        state, metrics = step(state, good)
        losses.append(metrics.loss.item())
    assert state.skipped_in_a_row.item() == 0
    assert losses[-1] < 0.01 * losses[0]


# Purity


@contextmanager
def untouched(*trees: Any) -> Iterator[None]:
    """Fails where a tensor of the trees was written to, by its version counter and its value."""
    leaves = tensors(*trees)
    before = [(leaf._version, leaf.detach().clone()) for leaf in leaves]
    yield
    for leaf, (version, value) in zip(leaves, before, strict=True):
        assert leaf._version == version
        assert own.same_bits(leaf.detach(), value)


def assert_no_aliases(outputs: Any, *inputs: Any) -> None:
    """An output that shares storage with an input is that input, unchanged."""
    storages: dict[int, list[Tensor]] = {}
    for leaf in tensors(*inputs):
        if leaf.numel():
            storages.setdefault(leaf.untyped_storage().data_ptr(), []).append(leaf)
    for leaf in tensors(outputs):
        sharing = storages.get(leaf.untyped_storage().data_ptr(), []) if leaf.numel() else []
        assert not sharing or any(
            leaf.data_ptr() == other.data_ptr() and leaf.shape == other.shape and leaf.stride() == other.stride()
            for other in sharing
        )


@given(run=runs(), optimizer=st.sampled_from(list(OPTIMIZERS)), applied=st.booleans(), where=st.booleans())
def test_no_stage_writes_to_its_inputs(run: Any, optimizer: str, applied: bool, where: bool):
    params, windows = run
    first, second = (fa.ScaledGrads(window[0]["grads"], scale, 3.0) for window, scale in zip(windows, (8.0, 16.0)))
    wide = fa.unscale(first).grads
    transform = OPTIMIZERS[optimizer](0.01)
    opt_state = transform.init(params)
    finite = torch.tensor(applied)
    stages: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "accumulate": (fa.accumulate, (first, second)),
        "accumulate, first": (lambda g: fa.accumulate(None, g), (first,)),
        "accumulate, where": (lambda a, b, w: fa.accumulate(a, b, where=w), (first, second, torch.tensor(where))),
        "all_finite": (fa.all_finite, (first,)),
        "unscale": (fa.unscale, (first,)),
        "global_norm": (fa.global_norm, (wide,)),
        "clip": (lambda g: fa.clip(g, 1e-3), (wide,)),
        "clip, scaled": (lambda g: fa.clip(g, 1e-3), (first,)),
        "maybe_step": (lambda p, o, g, f: fa.maybe_step(transform, p, o, g, f), (params, opt_state, wide, finite)),
        "maybe_step, scaled": (
            lambda p, o, g, f: fa.maybe_step(transform, p, o, g, f),
            (params, opt_state, first, finite),
        ),
        "init": (transform.init, (params,)),
        "update": (transform.update, (wide, opt_state, params)),
        "init_state": (lambda p: fa.init_state(p, transform), (params,)),
    }
    for stage, inputs in stages.values():
        with untouched(*inputs):
            output = stage(*inputs)
        assert_no_aliases(output, *inputs)


@given(
    run=runs(),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    with_buffers=st.booleans(),
    backend=st.sampled_from(BACKENDS),
)
def test_the_step_writes_to_neither_state_nor_batch_and_can_be_replayed(
    run: Any, optimizer: str, with_buffers: bool, backend: Any
):
    params, windows = run
    step = fa.make_step(linear_loss, OPTIMIZERS[optimizer](0.01), max_norm=1.0, backend=backend)
    state = new_state(params, OPTIMIZERS[optimizer](0.01), with_buffers)
    with untouched(state, params, windows):
        first = step.accumulate(state, windows[0][0])
        with untouched(first):
            second = step.accumulate(first, windows[1][0])
            with untouched(second):
                once = step.update(second)
                with untouched(once):
                    twice = step.update(second)
    assert own.same_bits(once, twice)
    assert own.same_bits(second, step.accumulate(step.accumulate(state, windows[0][0]), windows[1][0]))


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.linear(x))))


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norm_buffers_move_by_value_and_a_skipped_window_keeps_them(backend: Any):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        module = BatchNormNet()
        x = torch.randn(8, 3)
    apply, params, buffers = fa.from_module(module)

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        output, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss((output**2).mean(), buffers=buffers)

    optimizer = fa.sgd(0.1)
    step = fa.make_step(loss_fn, optimizer, backend=backend)
    state = fa.init_state(params, optimizer, fa.DynamicScale(8.0), buffers=buffers)
    with untouched(state, params, buffers, module.state_dict(), apply.buffers, x):
        after, _ = step(state, [x, x + 1])
        skipped, metrics = step(after, [x, x * INF])
    assert metrics.finite.item() is False
    assert own.same_bits(skipped.buffers, after.buffers)
    # The oracle: the module itself, run on the same two micro-batches.
    for micro_batch in (x, x + 1):
        module(micro_batch)
    for name, buffer in module.named_buffers():
        assert own.same_bits(after.buffers[name], buffer.detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_leaves_that_share_one_gradient_tensor_are_updated_each_for_itself(backend: Any):
    params = {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(())}
    optimizer = fa.sgd(1.0, momentum=0.5)
    # The gradients of a and b may be one tensor, or expanded from one number.
    step = fa.make_step(lambda p, x: (p["a"] + p["b"] + p["c"]).sum() * x, optimizer, max_norm=10.0, backend=backend)
    state = fa.init_state(params, optimizer, fa.StaticScale(4.0))
    state, _ = step(state, [torch.tensor(1.0), torch.tensor(1.0)])
    assert {name: leaf.tolist() for name, leaf in state.params.items()} == {"a": [-1.0] * 3, "b": [-1.0] * 3, "c": -3.0}


def graph_free(tree: Any) -> bool:
    return not any(leaf.requires_grad or leaf.grad_fn is not None for leaf in tensors(tree))


@pytest.fixture
def learned() -> dict[str, Any]:
    """Parameters and gradients that autograd follows, as a user's own loop may hold them."""
    params = {"w": nn.Parameter(torch.ones(2)), "b": nn.Parameter(torch.ones(2, dtype=torch.float16))}
    return {"params": params, "grads": {name: leaf * 2 for name, leaf in params.items()}}


def loss_with_aux(params: Any, x: Tensor) -> fa.Loss:
    output = params["w"] * params["b"] * x
    return fa.Loss(output.sum(), x.sum(), aux={"output": output, "w": params["w"]})


def loss_with_buffers(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
    return fa.Loss(loss_with_aux(params, x).value, buffers={"mean": buffers["mean"] + params["w"].mean()})


GRAPH_FREE: dict[str, Callable[[Any, Any], Any]] = {
    "scale_backward": lambda p, g: fa.scale_backward(loss_with_aux, fa.DynamicScale(8.0), p, torch.ones(2)),
    "scale_backward, autograd": lambda p, g: fa.scale_backward(
        loss_with_aux, fa.DynamicScale(8.0), p, torch.ones(2), backend="autograd"
    ),
    "accumulate, first": lambda p, g: fa.accumulate(None, fa.ScaledGrads(g, 8.0)),
    "accumulate": lambda p, g: fa.accumulate(fa.ScaledGrads(g, 8.0), fa.ScaledGrads(g, 16.0, 2.0)),
    "accumulate, missing": lambda p, g: fa.accumulate(
        fa.ScaledGrads(g, 8.0), fa.ScaledGrads(own.mapped(lambda _: None, g), 8.0)
    ),
    "unscale": lambda p, g: fa.unscale(fa.ScaledGrads(g, 8.0)),
    "all_finite": lambda p, g: fa.all_finite(g),
    "global_norm": lambda p, g: fa.global_norm(g),
    "clip": lambda p, g: fa.clip(g, 1.0),
    "clip, off": lambda p, g: fa.clip(g, None),
    "clip, scaled": lambda p, g: fa.clip(fa.ScaledGrads(g, 8.0), 1.0),
    "maybe_step": lambda p, g: fa.maybe_step(fa.adam(0.1), p, fa.adam(0.1).init(p), g, TRUE),
    "maybe_step, skipped": lambda p, g: fa.maybe_step(fa.adam(0.1), p, fa.adam(0.1).init(p), g, FALSE),
    "maybe_step, missing": lambda p, g: fa.maybe_step(
        fa.sgd(0.1), p, fa.sgd(0.1).init(p), own.mapped(lambda _: None, g), TRUE
    ),
    "update_scale": lambda p, g: fa.update_scale(fa.DynamicScale(nn.Parameter(torch.tensor(8.0))), TRUE),
    "update_scale, static": lambda p, g: fa.update_scale(fa.StaticScale(nn.Parameter(torch.tensor(8.0))), TRUE),
    "optimizer": lambda p, g: fa.adamw(0.1).update(g, fa.adamw(0.1).init(p), p),
    "apply_updates": lambda p, g: fa.apply_updates(p, g),
    "learned rate": lambda p, g: fa.maybe_step(
        fa.adam(nn.Parameter(torch.tensor(0.1))), p, fa.adam(0.1).init(p), g, TRUE
    ),
    "init_state": lambda p, g: fa.init_state(p, fa.adam(0.1), buffers={"mean": g["w"].mean()}),
    "step": lambda p, g: fa.make_step(loss_with_aux, fa.adam(0.1), max_norm=1.0)(
        fa.init_state(p, fa.adam(0.1)), [torch.ones(2)] * 2
    ),
    "step, autograd": lambda p, g: fa.make_step(loss_with_aux, fa.adam(0.1), backend="autograd")(
        fa.init_state(p, fa.adam(0.1)), [torch.ones(2)] * 2
    ),
    "step, buffers": lambda p, g: fa.make_step(loss_with_buffers, fa.adam(0.1))(
        fa.init_state(p, fa.adam(0.1), buffers={"mean": g["w"].mean()}), [torch.ones(2)] * 2
    ),
}


@pytest.mark.parametrize("stage", GRAPH_FREE)
def test_outputs_carry_no_graph(stage: str, learned: dict[str, Any]):
    output = GRAPH_FREE[stage](learned["params"], learned["grads"])
    assert tensors(output)
    assert graph_free(output)


# Values go round


def values(params: Any, window: list[Batch]) -> dict[str, Any]:
    """One of each kind of value, from a run with buffers."""
    optimizer = fa.adam(0.01)
    step = fa.make_step(linear_loss, optimizer)
    closed, metrics = step(new_state(params, optimizer, with_buffers=True), window)
    opened = step.accumulate(closed, window[0])
    assert opened.window is not None
    return {
        "ScaledGrads": opened.window.grads,
        "Window": opened.window,
        "TrainState": closed,
        "TrainState, open": opened,
        "Metrics": metrics,
        "Loss": linear_loss(params, window[0], start_buffers()),
    }


def by_torch_save(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def by_optree(value: Any) -> Any:
    leaves, spec = optree.tree_flatten(value)
    return optree.tree_unflatten(spec, leaves)


def by_torch_pytree(value: Any) -> Any:
    leaves, spec = torch_pytree.tree_flatten(value)
    return torch_pytree.tree_unflatten(leaves, spec)


def cloned(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


ROUND_TRIPS: dict[str, Callable[[Any], Any]] = {
    "optree.tree_map": lambda value: optree.tree_map(cloned, value),
    "optree flatten": by_optree,
    "torch.utils._pytree.tree_map": lambda value: torch_pytree.tree_map(cloned, value),
    "torch.utils._pytree flatten": by_torch_pytree,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": by_torch_save,
}


def assert_survives(value: Any, way: str) -> None:
    back = ROUND_TRIPS[way](value)
    assert type(back) is type(value)
    # The structure holds the scaler's static fields.
    assert own.same_bits(back, value)
    for field in vars(value) if hasattr(value, "__dict__") else value._fields:
        assert own.same_bits(getattr(back, field), getattr(value, field))


@pytest.mark.parametrize("way", ROUND_TRIPS)
@pytest.mark.parametrize("name", ["ScaledGrads", "Window", "TrainState", "TrainState, open", "Metrics", "Loss"])
def test_every_value_survives_every_round_trip_with_all_its_fields(name: str, way: str):
    params = {"b": None, "a": [torch.ones(2), own.Pair(torch.ones(1, dtype=torch.float16), torch.tensor(3))]}
    assert_survives(values(params, [{"grads": params, "weight": 2.0}])[name], way)


@given(run=runs(windows=1), way=st.sampled_from(list(ROUND_TRIPS)))
def test_values_over_any_tree_survive_a_round_trip(run: Any, way: str):
    params, (window,) = run
    for value in values(params, window).values():
        assert_survives(value, way)


@given(run=runs(windows=1))
def test_a_run_goes_on_from_a_pickle_bit_for_bit(run: Any):
    params, (window,) = run
    optimizer = fa.adam(0.01)
    step = fa.make_step(linear_loss, optimizer)
    opened = step.accumulate(new_state(params, optimizer, with_buffers=True), window[0])
    back = pickle.loads(pickle.dumps(opened))
    assert own.same_bits(step.update(back), step.update(opened))


# Under an outer derivative


def finite_difference(function: Callable[[Tensor], Tensor], at: Tensor, h: float = 1e-6) -> Tensor:
    """The gradient by central differences."""
    shifts = torch.eye(at.numel(), dtype=at.dtype).view(-1, *at.shape) * h
    slopes = [(function(at + shift) - function(at - shift)) / (2 * h) for shift in shifts]
    return torch.stack(slopes).view(at.shape)


def assert_derivative(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    found = torch.func.grad(function)(at)
    torch.testing.assert_close(found, finite_difference(function, at), rtol=1e-5, atol=1e-7)
    return found


VECTOR = torch.tensor([0.5, -1.5, 2.0], dtype=DOUBLE)
COTANGENT = torch.tensor([1.0, 3.0, -2.0], dtype=DOUBLE)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("max_norm", [0.1, 100.0, None])
def test_clip_is_differentiable(norm_type: float, max_norm: float | None):
    def clipped(g: Tensor) -> Tensor:
        return (fa.clip({"w": g}, max_norm, norm_type=norm_type).grads["w"] * COTANGENT).sum()

    def clipped_scaled(g: Tensor) -> Tensor:
        grads = fa.clip(fa.ScaledGrads({"w": g * 8.0}, 8.0), max_norm, norm_type=norm_type).grads
        return (fa.unscale(grads).grads["w"] * COTANGENT).sum()

    assert_derivative(clipped, VECTOR)
    # The carried scale is a float32 number, too coarse for finite differences.
    found, expected = torch.func.grad(clipped_scaled)(VECTOR), torch.func.grad(clipped)(VECTOR)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-30, 1e30])
def test_the_derivative_of_norm_and_clip_is_finite_at_both_ends_of_float32(norm_type: float, size: float):
    grads = torch.tensor([1.0, -2.0, 0.0]) * size
    for max_norm in (1e-3, 1e3):
        clipped = torch.func.grad(lambda g, m=max_norm: fa.clip(g, m, norm_type=norm_type).grads.sum())(grads)
        assert torch.isfinite(clipped).all()
        if size < 1e-3:
            assert clipped.tolist() == [1.0, 1.0, 1.0]
    measured = torch.func.grad(lambda g: fa.global_norm(g, norm_type))(grads)
    assert torch.isfinite(measured).all()


def test_unscale_and_accumulate_are_differentiable():
    def total(g: Tensor) -> Tensor:
        first = fa.ScaledGrads({"w": g}, 8.0, 1.0)
        second = fa.ScaledGrads({"w": g * g}, 16.0, 3.0)
        return (fa.unscale(fa.accumulate(first, second)).grads["w"] * COTANGENT).sum()

    # (g / 8 + g**2 / 16) / 4
    torch.testing.assert_close(torch.func.grad(total)(VECTOR), COTANGENT * (1 / 8 + VECTOR / 8) / 4)


@pytest.mark.parametrize(("finite", "factor"), [(True, 2.0), (False, 0.5)])
def test_update_scale_is_differentiable(finite: bool, factor: float):
    def next_scale(scale: Tensor) -> Tensor:
        return fa.update_scale(fa.DynamicScale(scale, growth_interval=1), torch.tensor(finite)).scale

    assert torch.func.grad(next_scale)(torch.tensor(8.0)).item() == factor


def test_scale_backward_is_differentiable():
    def slope(p: Tensor) -> Tensor:
        grads = fa.scale_backward(lambda p: (p**3).sum(), fa.StaticScale(4.0), p).grads
        return (fa.unscale(grads).grads * COTANGENT).sum()

    torch.testing.assert_close(torch.func.grad(slope)(VECTOR), 6 * VECTOR * COTANGENT)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [1.0, NAN, INF])
def test_maybe_step_is_differentiable_with_respect_to_the_rate_whatever_the_gradient(optimizer: str, value: float):
    params, grads = VECTOR, torch.full_like(VECTOR, value)
    finite = torch.tensor(math.isfinite(value))

    def moved(lr: Tensor) -> Tensor:
        transform = OPTIMIZERS[optimizer](lr)
        return fa.maybe_step(transform, params, transform.init(params), grads, finite).params.sum()

    found = assert_derivative(moved, torch.tensor(0.1, dtype=DOUBLE))
    assert (found != 0).item() is math.isfinite(value)


class Outer(NamedTuple):
    """A short run as a function of its learning rate or of its first parameters."""

    optimizer: str
    pattern: str
    max_norm: float | None

    def run(self, lr: Tensor, params: Tensor) -> Tensor:
        optimizer = OPTIMIZERS[self.optimizer](lr)
        step = fa.make_step(lambda p, x: ((p * x - 1) ** 2).mean(), optimizer, max_norm=self.max_norm)
        state = fa.init_state(params, optimizer, fa.DynamicScale(8.0, growth_interval=2))
        for index, kind in enumerate(self.pattern):
            x = torch.tensor([1.0, 2.0, -0.5], dtype=DOUBLE) + 0.1 * index
            bad = {"g": 1.0, "n": NAN, "i": INF}[kind]
            state, _ = step(state, [x, x * torch.tensor([bad, 1.0, 1.0], dtype=DOUBLE)])
        assert state.skipped.shape == ()
        return (state.params**2).sum()


PATTERNS = ["g", "ggg", "ng", "gng", "gig", "gnnig", "gn"]


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_learning_rate_is_learned_through_applied_and_skipped_updates(
    optimizer: str, pattern: str, max_norm: float | None
):
    outer = Outer(optimizer, pattern, max_norm)
    assert_derivative(lambda lr: outer.run(lr, VECTOR), torch.tensor(0.1, dtype=DOUBLE))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_first_parameters_are_learned_through_applied_and_skipped_updates(optimizer: str, pattern: str):
    outer = Outer(optimizer, pattern, None)
    assert_derivative(lambda params: outer.run(torch.tensor(0.1, dtype=DOUBLE), params), VECTOR)


@pytest.mark.parametrize("pattern", ["gg", "gng", "gig"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_are_learned_and_the_scale_has_no_influence(optimizer: str, pattern: str):
    def run(weight: Tensor, scale: Tensor) -> Tensor:
        transform = OPTIMIZERS[optimizer](0.1)

        def loss_fn(params: Tensor, batch: tuple[Tensor, Any]) -> fa.Loss:
            return fa.Loss(((params * batch[0] - 1) ** 2).mean(), batch[1])

        step = fa.make_step(loss_fn, transform, max_norm=1.0)
        state = fa.init_state(VECTOR, transform, fa.DynamicScale(scale))
        for index, kind in enumerate(pattern):
            bad = {"g": 1.0, "n": NAN, "i": INF}[kind]
            x = torch.tensor([1.0, 2.0, -0.5], dtype=DOUBLE) + 0.1 * index
            state, _ = step(state, [(x, 1.0), (2 * bad * x, weight)])
        return (state.params**2).sum()

    weight, scale = torch.tensor(3.0, dtype=DOUBLE), torch.tensor(8.0)
    by_weight, by_scale = torch.func.grad(run, argnums=(0, 1))(weight, scale)
    # Weights are float32 numbers: a wide difference, and a few digits of it.
    expected = finite_difference(lambda weight: run(weight, scale), weight, h=1e-2)
    torch.testing.assert_close(by_weight, expected, rtol=1e-2, atol=1e-6)
    assert abs(by_scale.item()) < 1e-6


@pytest.mark.parametrize("x", [[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_of_zero_leave_the_outer_derivative_finite(optimizer: str, x: list[float]):
    inputs = torch.tensor(x, dtype=DOUBLE)

    def run(lr: Tensor, params: Tensor) -> Tensor:
        transform = OPTIMIZERS[optimizer](lr)
        step = fa.make_step(lambda p, x: ((p * x - 1) ** 2).mean(), transform, max_norm=0.1)
        state = fa.init_state(params, transform, fa.StaticScale(8.0))
        for _ in range(3):
            state, _ = step(state, [inputs, inputs])
        return (state.params**2).sum()

    assert_derivative(lambda lr: run(lr, VECTOR), torch.tensor(0.1, dtype=DOUBLE))
    assert torch.isfinite(torch.func.grad(run, argnums=1)(torch.tensor(0.1, dtype=DOUBLE), VECTOR)).all()


def test_the_derivative_of_one_sgd_update_is_minus_the_gradient():
    def moved(lr: Tensor) -> Tensor:
        optimizer = fa.sgd(lr)
        step = fa.make_step(lambda p, x: (p * p * x).sum(), optimizer)
        state, _ = step(fa.init_state(torch.tensor([1.0, 2.0]), optimizer), [torch.tensor([3.0, 5.0])])
        return (state.params * torch.tensor([1.0, 10.0])).sum()

    assert torch.func.grad(moved)(torch.tensor(0.25)).item() == -(2 * 1 * 3 + 10 * 2 * 2 * 5)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learning_through_an_overflow_of_float16_is_finite(optimizer: str):
    def run(lr: Tensor) -> Tensor:
        transform = OPTIMIZERS[optimizer](lr)
        loss_fn = fa.with_policy(lambda p, x: ((p * x - 1) ** 2).mean(), "p=f32,c=f16,o=f32")
        step = fa.make_step(loss_fn, transform, max_norm=1.0)
        state = fa.init_state(torch.tensor([0.5, -1.5]), transform, fa.DynamicScale(2.0**18, growth_interval=2))
        for _ in range(8):
            state, _ = step(state, [torch.tensor([1.0, 2.0])])
        return (state.params**2).sum() + state.skipped * 100

    slope, value = torch.func.grad_and_value(run)(torch.tensor(0.1))
    assert value.item() > 100  # there was an overflow
    assert math.isfinite(slope.item())
    assert slope.item() != 0


def test_an_ensemble_of_learning_rates_is_differentiated_member_by_member():
    rates = torch.tensor([0.01, 0.1, 0.3], dtype=DOUBLE)
    outer = Outer("adamw", "gng", 0.1)
    slope = torch.func.grad(lambda lr: outer.run(lr, VECTOR))
    torch.testing.assert_close(torch.func.vmap(slope)(rates), torch.stack([slope(lr) for lr in rates]))
