"""Infinities that lead to nothing are never blamed, alone or beside an overflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.debug import explain

INF = float("inf")
HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {}


def harmless(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of (2, 6, 8) features, with an inf or a NaN inside and finite values and gradients."""
    HARMLESS[function.__name__] = function
    return function


def causal(h: Tensor) -> Tensor:
    return torch.full((h.shape[-2], h.shape[-2]), -INF).triu(1)


def scores(h: Tensor) -> Tensor:
    return h @ h.transpose(-1, -2)


@harmless
def mask_that_is_added(h: Tensor) -> Tensor:
    return (scores(h) + causal(h)).softmax(-1).to(h.dtype) @ h


@harmless
def mask_that_is_filled_in(h: Tensor) -> Tensor:
    return scores(h).masked_fill(causal(h) < 0, -INF).softmax(-1).to(h.dtype) @ h


@harmless
def mask_that_is_filled_in_place(h: Tensor) -> Tensor:
    return scores(h).masked_fill_(causal(h) < 0, -INF).softmax(-1).to(h.dtype) @ h


@harmless
def mask_by_where(h: Tensor) -> Tensor:
    return torch.where(causal(h) == 0, scores(h), -INF).softmax(-1).to(h.dtype) @ h


@harmless
def mask_from_a_logarithm(h: Tensor) -> Tensor:
    allowed = (causal(h) == 0).float()
    return (scores(h) + allowed.log()).softmax(-1).to(h.dtype) @ h


@harmless
def fused_attention_with_a_float_mask(h: Tensor) -> Tensor:
    h = h[:, None]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=causal(h).to(h.dtype))[:, 0]


@harmless
def fused_attention_with_a_bool_mask(h: Tensor) -> Tensor:
    h = h[:, None]
    return F.scaled_dot_product_attention(h, h, h, attn_mask=causal(h) == 0)[:, 0]


@harmless
def fused_causal_attention(h: Tensor) -> Tensor:
    h = h[:, None]
    return F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0]


@harmless
def mask_of_the_smallest_float16_that_overflows(h: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float16).min
    mask = torch.zeros_like(causal(h), dtype=torch.float16).masked_fill(causal(h) < 0, lowest)
    return (scores(h).half() - 50 + mask).softmax(-1).to(h.dtype) @ h


@harmless
def padding_mask_over_keys(h: Tensor) -> Tensor:
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    return scores(h).float().masked_fill(padding[:, None], -INF).softmax(-1).to(h.dtype) @ h


@harmless
def multihead_attention_with_padding(h: Tensor) -> Tensor:
    padding = torch.tensor([[0.0] * 6, [0.0] * 4 + [-INF] * 2])
    weight = torch.eye(8).repeat(3, 1)
    out, _ = F.multi_head_attention_forward(
        *(h.float().transpose(0, 1) for _ in range(3)),
        embed_dim_to_check=8,
        num_heads=2,
        in_proj_weight=weight,
        in_proj_bias=None,
        bias_k=None,
        bias_v=None,
        add_zero_attn=False,
        dropout_p=0.0,
        out_proj_weight=torch.eye(8),
        out_proj_bias=None,  # pyright: ignore[reportArgumentType]
        key_padding_mask=padding,
    )
    return out.transpose(0, 1)


@harmless
def logsumexp_of_masked_scores(h: Tensor) -> Tensor:
    padding = torch.tensor([0.0] * 5 + [-INF] * 3)
    return h * torch.logsumexp(h.float() + padding, -1, keepdim=True)


@harmless
def masked_cross_entropy(h: Tensor) -> Tensor:
    logits = h.float().masked_fill(torch.arange(8) > 5, -INF)
    return h * F.cross_entropy(logits.flatten(0, 1), torch.zeros(12, dtype=torch.long))


@harmless
def online_softmax(h: Tensor) -> Tensor:
    maximum, total = torch.full(h.shape[:-1], -INF), torch.zeros(h.shape[:-1])
    for column in h[..., :4].float().unbind(-1):
        larger = torch.maximum(maximum, column.detach())
        total = total * torch.exp(maximum - larger) + torch.exp(column - larger)
        maximum = larger
    return h * (maximum + total.log())[..., None]


@harmless
def logarithm_made_safe_on_both_sides(h: Tensor) -> Tensor:
    x = h.float()
    return torch.where(x > 0, torch.where(x > 0, x, 1.0).log(), 0.0) + x


@harmless
def constant_that_where_does_not_take(h: Tensor) -> Tensor:
    return torch.where(torch.ones(h.shape[-1]) > 0, h.float(), torch.zeros(h.shape[-1]).log())


@harmless
def one_over_infinity(h: Tensor) -> Tensor:
    return h * (1 + 1 / torch.tensor(INF))


@harmless
def infinity_that_is_clamped(h: Tensor) -> Tensor:
    return h + torch.log(torch.zeros(1)).clamp(min=-1.0)


@harmless
def nan_that_nothing_uses(h: Tensor) -> Tensor:
    _ = torch.zeros(3) / torch.zeros(3)
    return h * 1.0


@harmless
def logged_value_that_is_nan(h: Tensor) -> Tensor:
    with torch.no_grad():
        _ = (h - h).float().std() / (h - h).float().mean()
    return h * 1.0


@harmless
def uninitialised_memory_that_is_filled(h: Tensor) -> Tensor:
    out = torch.full(h.shape, float("nan"))
    out.copy_(h)
    return out


@harmless
def memory_with_nan_that_is_filled_in_parts(h: Tensor) -> Tensor:
    out = torch.full(h.shape, float("nan"))
    for index in range(h.shape[1]):
        out[:, index] = h[:, index]
    return out


@harmless
def nan_that_is_replaced(h: Tensor) -> Tensor:
    return torch.nan_to_num((h.float() / 0.0).detach(), 0.0, 0.0, 0.0) + h


@harmless
def running_minimum_from_infinity(h: Tensor) -> Tensor:
    return h + torch.minimum(torch.full((8,), INF), h.float().detach())


@harmless
def gates_of_the_largest_two(h: Tensor) -> Tensor:
    values, indices = h.float().topk(2, -1)
    gates = torch.full_like(h.float(), -INF).scatter(-1, indices, values)
    return gates.softmax(-1) * h.float() + h


@harmless
def pooling_over_padding(h: Tensor) -> Tensor:
    return F.max_pool1d(h.float(), 3, 1, 1) + h


@harmless
def running_maximum_after_padding(h: Tensor) -> Tensor:
    return torch.cummax(F.pad(h.float(), (1, 0), value=-INF), -1).values[..., 1:] + h


@harmless
def sorting_with_sentinels(h: Tensor) -> Tensor:
    padded = torch.cat([h.float(), torch.full((*h.shape[:-1], 2), INF)], -1)
    return padded.sort(-1).values[..., :8] + h


@harmless
def distances_with_an_infinite_diagonal(h: Tensor) -> Tensor:
    apart = (h[:, :, None].float() - h[:, None].float()).square().sum(-1)
    nearest = apart.masked_fill(torch.eye(6, dtype=torch.bool), INF).amin(-1)
    return h * (1 + nearest[..., None])


@harmless
def sigmoid_of_infinity(h: Tensor) -> Tensor:
    return h * torch.sigmoid(torch.full((8,), INF))


class Around(nn.Module):
    """A harmless infinity between two linear layers."""

    def __init__(self, inside: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(8, 8), inside, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(self.first(x)))


def problem(name: str, factor: float = 1.0) -> tuple[Callable[..., Tensor], Any, Tensor]:
    torch.manual_seed(0)
    module = Around(HARMLESS[name])
    module.last.weight.data.mul_(factor)
    apply, params, _ = fa.from_module(module)
    loss_fn = fa.autocast(lambda p, b: apply(p, b).float().mean() * factor, torch.float16)
    return loss_fn, params, torch.randn(2, 6, 8)


def state_of(params: Any, scale: float) -> fa.TrainState:
    return fa.init_state(params, fa.sgd(0.1), fa.StaticScale(scale))


def finite_at(loss_fn: Any, params: Any, x: Tensor, scale: float, backend: Any) -> bool:
    step = fa.make_step(loss_fn, fa.sgd(0.1), backend=backend)
    return bool(step(state_of(params, scale), [x])[1].finite)


@pytest.mark.parametrize("backend", ["autograd", "func"])
@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_infinity_is_no_culprit(name: str, backend: Any) -> None:
    loss_fn, params, x = problem(name)
    assert finite_at(loss_fn, params, x, 16.0, backend)
    why = explain(loss_fn, state_of(params, 16.0), [x], backend=backend)
    assert not why.found and why.stage == "not reproduced in eager"


@pytest.mark.parametrize("backend", ["autograd", "func"])
@pytest.mark.parametrize("name", HARMLESS)
def test_an_overflow_beside_a_harmless_infinity_is_the_culprit(name: str, backend: Any) -> None:
    loss_fn, params, x = problem(name, factor=50.0)
    scale = 2.0**4  # then the smallest power of two that overflows, found by the step itself
    while finite_at(loss_fn, params, x, scale, backend):
        scale *= 2
    why = explain(loss_fn, state_of(params, scale), [x], backend=backend)
    assert why.found and why.stage == "backward" and why.largest_good_scale == scale / 2
    assert why.output is not None and not any(given.nan + given.inf for given in why.inputs)
    assert why.module in ("", "last", "first")
    assert (why.module_type == "Linear") == (why.module in ("last", "first"))


def test_harmless_infinities_are_counted() -> None:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        mask = torch.full((3,), -INF)  # one
        masked = torch.where(torch.tensor([False, False, True]), mask, x * params)  # two
        unused = torch.log(x - x)  # three
        assert unused is not None
        return masked.softmax(0)[0]

    why = explain(loss_fn, state_of(torch.ones(3), 1.0), [torch.ones(3)])
    assert (why.found, why.harmless) == (False, 3)


def test_a_micro_batch_without_weight_may_hold_anything() -> None:
    def loss_fn(params: Any, batch: Any) -> fa.Loss:
        losses = (params * batch["x"]).square() * batch["mask"]
        return fa.Loss(losses.sum() / batch["mask"].sum(), weight=batch["mask"].sum())

    full = {"x": torch.ones(3), "mask": torch.ones(3)}
    empty = {"x": torch.ones(3), "mask": torch.zeros(3)}  # 0 / 0
    assert not explain(loss_fn, state_of(torch.ones(3), 1.0), [full, empty]).found
    why = explain(loss_fn, state_of(torch.ones(3), 1.0), [full, {**full, "x": full["x"] / 0}])
    assert (why.stage, why.micro_batch, why.source) == ("input", 1, "batch.x")


def test_a_harmless_infinity_in_the_data_is_no_culprit() -> None:
    def loss_fn(params: Any, batch: Any) -> Tensor:
        return (params * batch["x"] + batch["mask"]).softmax(-1)[0] * batch["scale"]

    mask = torch.tensor([0.0, 0.0, -INF])
    batch = {"x": torch.ones(3), "mask": mask, "scale": torch.ones(())}
    assert not explain(loss_fn, state_of(torch.ones(3), 1.0), [batch]).found
    why = explain(loss_fn, state_of(torch.ones(3), 1.0), [{**batch, "scale": torch.tensor(float("nan"))}])
    assert (why.stage, why.source) == ("input", "batch.scale")
    why = explain(loss_fn, state_of(torch.ones(3), 1.0), [{**batch, "mask": mask - INF}])
    assert (why.stage, why.operator) == ("forward", "_softmax")


@pytest.mark.parametrize("backend", ["autograd", "func"])
def test_a_nan_in_a_masked_place_is_to_blame_and_not_the_mask(backend: Any) -> None:
    """The mask alone would give -inf there."""
    mask = torch.full((3, 3), -INF).triu(1)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return (params * x + mask).softmax(-1)[:, 0].sum()

    x = torch.ones(3, 3)
    x[1, 2] = float("nan")
    why = explain(loss_fn, state_of(torch.ones(3, 3), 1.0), [torch.ones(3, 3), x], backend=backend)
    assert (why.stage, why.source, why.micro_batch) == ("input", "batch", 1)
