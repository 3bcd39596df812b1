"""Faults that people met in public: C clip. See test_cases.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import functional_amp as fa
from tests.test_cases import Operators, assert_same, linear_loss, run_the_stages


def vector(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


CLIPS: dict[str, Callable[..., Any]] = {
    "tree": lambda **options: fa.clip([vector(3.0, 4.0)], **options),
    "scaled": lambda **options: fa.clip(fa.ScaledGrads([vector(3.0, 4.0)], 1.0), **options),
    "step": lambda max_norm, **options: fa.make_step(
        linear_loss, fa.sgd(0.1), max_norm=max_norm, **{f"clip_{k}" if k == "eps" else k: v for k, v in options.items()}
    ),
}


@pytest.mark.parametrize("call", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize("max_norm", [-1.0, -1, -1e-30, -math.inf])
def test_C02_negative_max_norm_flips_the_sign_of_every_gradient(call, max_norm):
    """pytorch/pytorch#31367: a negative bound is a ValueError."""
    with pytest.raises(ValueError, match="max_norm: found -"):
        call(max_norm=max_norm)


@pytest.mark.parametrize("call", CLIPS.values(), ids=CLIPS)
@pytest.mark.parametrize(
    "options, error",
    [
        ({"max_norm": 0}, ValueError),
        ({"max_norm": 0.0}, ValueError),
        ({"max_norm": -0.0}, ValueError),
        ({"max_norm": math.nan}, ValueError),
        ({"max_norm": True}, TypeError),
        ({"max_norm": False}, TypeError),
        ({"max_norm": "1.0"}, TypeError),
        ({"max_norm": [1.0]}, TypeError),
        ({"max_norm": 1.0, "norm_type": True}, TypeError),
        ({"max_norm": 1.0, "norm_type": "inf"}, TypeError),
        ({"max_norm": 1.0, "norm_type": 0}, ValueError),
        ({"max_norm": 1.0, "norm_type": math.nan}, ValueError),
        ({"max_norm": 1.0, "eps": -1e-6}, ValueError),
        ({"max_norm": 1.0, "eps": math.nan}, ValueError),
        ({"max_norm": 1.0, "eps": "0"}, TypeError),
    ],
)
def test_C03_max_norm_0_true_str_nan_are_all_accepted(call, options, error):
    """strands-labs/robots PR#2028: a number that means nothing is an error that names it."""
    with pytest.raises(error, match=rf"^{list(options)[-1]}: found"):
        call(**options)


@pytest.mark.parametrize("max_norm", [None, math.inf, 1.0, 1])
def test_C03_max_norm_0_true_str_nan_are_all_accepted__off(max_norm):
    """strands-labs/robots PR#2028: None and inf turn clipping off, and zeros stay zeros."""
    off = max_norm is None or max_norm == math.inf
    grads, norm = fa.clip(vector(3.0, 4.0), max_norm)
    assert norm.item() == 5.0
    torch.testing.assert_close(grads, vector(3.0, 4.0) if off else vector(0.6, 0.8), rtol=0, atol=0 if off else 1e-6)
    zeros, norm = fa.clip(vector(0.0, 0.0), max_norm)
    assert zeros.tolist() == [0.0, 0.0] and norm.item() == 0.0


@pytest.mark.parametrize(
    "values, dtype, norm, clipped",
    [
        ([300.0], torch.float16, 300.0, [1.0]),
        ([6e4, 6e4], torch.float16, 84852.8137, [0.70711, 0.70711]),
        ([1e-4, 1e-4], torch.float16, 1.41421e-4, [1e-4, 1e-4]),
        ([2e38, 2e38], torch.bfloat16, 2.82843e38, [0.70711, 0.70711]),
        ([2e38, 2e38], torch.float32, 2.82843e38, [0.70711, 0.70711]),
        ([3e-30, 4e-30], torch.float32, 5e-30, [3e-30, 4e-30]),
        ([3e30, 4e30], torch.complex64, 5e30, [0.6, 0.8]),
    ],
)
def test_C05_fp16_norm_overflow_turns_finite_gradients_into_zero(values, dtype, norm, clipped):
    """tracel-ai/burn#5699: the norm of finite gradients is finite, at both ends of float32."""
    tolerance = 5e-3 if dtype == torch.bfloat16 else 1e-3
    leaf = vector(*values, dtype=dtype)
    grads, found = fa.clip({"w": leaf}, 1.0)
    assert found.dtype == torch.float32 and found.item() == pytest.approx(norm, rel=tolerance)
    assert grads["w"].dtype == dtype
    torch.testing.assert_close(grads["w"], vector(*clipped, dtype=dtype), rtol=tolerance, atol=0)
    scaled, found = fa.clip(fa.ScaledGrads({"w": leaf}, 1.0), 1.0)
    assert found.item() == pytest.approx(norm, rel=tolerance)
    torch.testing.assert_close(
        fa.unscale(scaled).grads["w"].real, vector(*clipped).to(grads["w"].real.dtype).float(), rtol=tolerance, atol=0
    )


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device beside the CPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("first", ["cpu", "cuda"])
def test_C06_parameters_on_different_devices(first, dtype):
    """pytorch/pytorch#38605: one norm over two devices, each leaf clipped on its own."""
    second = "cuda" if first == "cpu" else "cpu"
    tree = [torch.tensor([3.0], device=first), torch.tensor([4.0], device=second, dtype=dtype)]
    for grads, norm in (fa.clip(tree, 1.0), fa.clip(fa.ScaledGrads([8 * leaf for leaf in tree], 8.0), 1.0)):
        assert norm.item() == pytest.approx(5.0, abs=1e-6) and norm.device.type == first
        clipped = fa.unscale(grads).grads if isinstance(grads, fa.ScaledGrads) else grads
        assert [leaf.device.type for leaf in clipped] == [first, second]
        assert [leaf.item() for leaf in clipped] == pytest.approx([0.6, 0.8], rel=1e-3)


@pytest.mark.parametrize(
    "one, other, norm_dtype",
    [
        (torch.float32, torch.float16, torch.float32),
        (torch.float64, torch.bfloat16, torch.float64),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.complex64, torch.float16, torch.float32),
        (torch.float32, torch.complex128, torch.float64),
    ],
)
def test_C07_gradients_of_mixed_dtypes(one, other, norm_dtype):
    """pytorch/pytorch#12159: one norm over all dtypes, and every leaf keeps its own."""
    tree = {"a": vector(3.0, dtype=one), "b": vector(4.0, dtype=other), "n": torch.tensor([7])}
    grads, norm = fa.clip(tree, 1.0)
    assert norm.dtype == norm_dtype and norm.item() == pytest.approx(5.0, abs=1e-6)
    for name, expected in (("a", 0.6), ("b", 0.8)):
        leaf = grads[name]
        assert leaf.dtype == tree[name].dtype
        assert leaf.real.item() == pytest.approx(expected, rel=torch.finfo(leaf.real.dtype).eps + 1e-15)
    assert grads["n"] is tree["n"]


@pytest.mark.parametrize("tree", [{}, {"a": None}, [], None, [None, {"b": None}], {"a": torch.ones(0)}])
def test_C09_no_gradients_at_all(tree):
    """pytorch/pytorch PR#35753: the norm of nothing is a float32 zero on the default device."""
    for grads in (tree, fa.ScaledGrads(tree, 8.0)):
        clipped, norm = fa.clip(grads, 1.0)
        torch.testing.assert_close(norm, torch.tensor(0.0), rtol=0, atol=0)
        assert_same(clipped, grads)
        torch.testing.assert_close(fa.global_norm(grads), torch.tensor(0.0), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda leaves: (leaf for leaf in leaves),
        iter,
        lambda leaves: map(lambda leaf: leaf, leaves),
        lambda leaves: {"w": iter(leaves)},
        lambda leaves: dict(enumerate(leaves)).values(),
        set,
        lambda leaves: [[3.0, 4.0]],
        lambda leaves: torch.nn.ParameterList(leaves),
    ],
)
def test_C10_an_exhausted_generator_means_no_clipping_silently(make):
    """pytorch/pytorch#148259: what is no pytree of tensors is refused, and not consumed."""
    leaves = [vector(3.0, 4.0), vector(1.0)]
    given = make(leaves)
    for call in (lambda: fa.clip(given, 1.0), lambda: fa.global_norm(given), lambda: fa.all_finite(given)):
        with pytest.raises(TypeError, match="grads: found"):
            call()
    if hasattr(given, "__next__"):
        assert len(list(given)) == 2


@pytest.mark.parametrize(
    "wrap",
    [lambda g: g, lambda g: [g], lambda g: {"a": (g,)}, torch.nn.Parameter, lambda g: {"a": g, "b": None}],
)
def test_C11_passing_gradients_where_parameters_are_expected_clips_nothing(wrap):
    """huggingface/transformers PR#46113: clip takes gradients, in any tree or bare, and never looks at .grad."""
    grads, norm = fa.clip(wrap(vector(3.0, 4.0)), 1.0)
    (leaf,) = optree.tree_leaves(grads)
    torch.testing.assert_close(leaf, vector(0.6, 0.8), rtol=0, atol=2e-6)
    assert norm.item() == 5.0 and not leaf.requires_grad


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_C12_reported_norm_is_larger_than_the_clip_value(scale):
    """verl-project/verl#2282: the norm is the one before clipping, in true units, in the metrics too."""
    assert fa.clip(vector(3.0, 4.0), 1.0).norm.item() == 5.0
    assert fa.clip(fa.ScaledGrads(vector(3.0, 4.0) * scale, scale), 1.0).norm.item() == 5.0
    optimizer = fa.sgd(1.0)
    step = fa.make_step(linear_loss, optimizer, max_norm=1.0)
    state = fa.init_state({"w": torch.zeros(2)}, optimizer, fa.StaticScale(scale))
    state, metrics = step(state, [vector(3.0, 4.0)])
    assert metrics.grad_norm.item() == 5.0
    torch.testing.assert_close(state.params["w"], vector(-0.6, -0.8), rtol=0, atol=2e-6)


def test_C13_per_group_instead_of_global_norm():
    """huggingface/transformers PR#614: the norm is over the whole tree; a group's own norm is had by asking."""
    tree = {"body": vector(3.0), "head": vector(4.0)}
    grads, _ = fa.clip(tree, 1.0)
    assert [grads["body"].item(), grads["head"].item()] == pytest.approx([0.6, 0.8], abs=2e-6)
    assert [fa.clip(leaf, 1.0).grads.item() for leaf in tree.values()] == [1.0, 1.0]

    groups = fa.partition({"body": fa.sgd(1.0), "head": fa.sgd(1.0)}, lambda path, leaf: path)
    step = fa.make_step(lambda p, x: (p["body"] * 3 + p["head"] * 4).sum(), groups, max_norm=1.0)
    state, _ = step(fa.init_state({"body": vector(0.0), "head": vector(0.0)}, groups), [None])
    found = [state.params["body"].item(), state.params["head"].item()]
    assert found == pytest.approx([-0.6, -0.8], abs=2e-6)


def test_C14_tied_weight_counted_twice_in_the_norm():
    """NVIDIA/Megatron-LM PR#7227: a tied weight is one leaf of from_module; a tensor at two leaves counts twice."""

    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = torch.nn.Linear(2, 1, bias=False)
            self.out = torch.nn.Linear(2, 1, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, x):
            return self.embed(x) + self.out(x)

    apply, params, _ = fa.from_module(Tied())
    grads = fa.scale_backward(lambda p, x: apply(p, x).sum(), fa.StaticScale(8.0), params, vector(10.0, 10.0)).grads
    assert fa.global_norm(grads).item() == pytest.approx(800**0.5, abs=1e-5)

    leaf = vector(20.0, 20.0)
    assert fa.global_norm({"embed": leaf}).item() == pytest.approx(28.284271, abs=1e-5)
    assert fa.global_norm({"embed": leaf, "out": leaf}).item() == pytest.approx(40.0, abs=1e-5)
    assert fa.global_norm({"embed": leaf, "out": leaf.clone()}).item() == pytest.approx(40.0, abs=1e-5)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("make", [lambda: fa.sgd(0.1, momentum=0.9), lambda: fa.adamw(fa.warmup_cosine(0.1, 2, 9))])
@pytest.mark.parametrize("x", [1.0, math.inf])
def test_C17_host_device_sync_in_clip_and_finiteness_check(make, norm_type, x):
    """deepmodeling/deepmd-kit PR#5519: no stage reads a tensor on the host, on either path."""
    params, batch = {"w": torch.ones(2)}, torch.tensor([x, 1.0])
    state = make().init(params)
    with Operators() as seen:
        run_the_stages(make(), params, state, batch, norm_type)
        assert seen.reads == []
        batch[0].item()
        assert len(seen.reads) == 1  # the control


@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("make", [lambda: fa.sgd(0.1, momentum=0.9), lambda: fa.adamw(0.1)])
def test_C17_host_device_sync_in_clip_and_finiteness_check__fake(make, backend):
    """deepmodeling/deepmd-kit PR#5519: the whole step runs where a host read would raise."""
    step = fa.make_step(linear_loss, make(), max_norm=1.0, backend=backend)
    with FakeTensorMode():
        state = fa.init_state({"w": torch.ones(2, dtype=torch.float16)}, make())
        state, metrics = step(state, [torch.ones(2), torch.ones(2)])
        state, metrics = step(state, [torch.ones(2)])
        with pytest.raises(Exception, match=r"local_scalar_dense|item"):
            bool(metrics.finite)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_C18_one_nan_leaf_poisons_every_other_leaf(dtype, norm_type, bad):
    """pytorch/pytorch#46849: a norm that is not finite changes no gradient, and the culprit can be named."""
    tree = [vector(1.0, 2.0, dtype=dtype), vector(bad, dtype=dtype), vector(3.0, dtype=dtype)]
    grads, norm = fa.clip(tree, 1.0, norm_type=norm_type)
    assert_same(grads, tree)
    assert torch.isnan(norm) if math.isnan(bad) else torch.isinf(norm)
    assert not fa.all_finite(grads) and fa.nonfinite_paths(grads) == ["1"]

    scaled = fa.ScaledGrads(tree, 8.0)
    clipped, norm = fa.clip(scaled, 1.0, norm_type=norm_type)
    assert_same(clipped, scaled)
    assert not torch.isfinite(norm) and fa.nonfinite_paths(clipped) == ["1"]


@pytest.mark.parametrize("values, max_norm", [([0.03, 0.04], 0.01), ([3e-7, 4e-7], 1e-7), ([3e7, 4e7], 1.0)])
def test_C19_1e_6_in_the_clip_denominator_differs_from_optax(values, max_norm):
    """goodfire-ai/spd#643: eps 0, the default, gives the norm asked for; 1e-6 gives torch's gradients."""
    exact, _ = fa.clip(vector(*values), max_norm)
    assert exact.double().norm().item() == pytest.approx(max_norm, rel=1e-6)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = vector(*values)
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    like_torch, _ = fa.clip(vector(*values), max_norm, eps=1e-6)
    torch.testing.assert_close(like_torch, parameter.grad, rtol=1e-6, atol=0)
    scaled, _ = fa.clip(fa.ScaledGrads(vector(*values), 1.0), max_norm, eps=1e-6)
    torch.testing.assert_close(fa.unscale(scaled).grads, parameter.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("values, max_norm", [([0.6, 0.8], 1.0), ([3.0, 4.0], 5.0), ([0.1, 0.2], 7.0)])
def test_C19_1e_6_in_the_clip_denominator_differs_from_optax__within(values, max_norm, eps):
    """goodfire-ai/spd#643: gradients within the bound are the same bits."""
    for grads in (vector(*values), fa.ScaledGrads(vector(*values), 8.0)):
        assert_same(fa.clip(grads, max_norm, eps=eps).grads, grads)
