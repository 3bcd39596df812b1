"""examples/recipes: what stands around the update, each against torch's imperative loop, Opacus or algebra."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, cast

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import functional_amp as fa
from tests.recipes import assert_close, distance, recipe

dp_sgd, sam, ema, noise = recipe("dp_sgd"), recipe("sam"), recipe("ema"), recipe("noise")
freeze, migrate = recipe("freeze"), recipe("migrate")
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # float16 rounds in another order


@pytest.fixture(autouse=True)
def own_randomness() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(model(batch[0]).float(), batch[1])


def test_sam_is_the_imperative_loop_that_unscales_by_hand():
    """GradScaler refuses a second unscale_ in an iteration (pytorch/pytorch#69668): here both gradients are divided."""
    params, scales = sam.main()
    model, scale = sam.make_model(), 2.0**20
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def gradients(window: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for x, y in window:
            with torch.autocast("cpu", torch.float16):
                loss = cross_entropy(model(x).float(), y)
            grads = torch.autograd.grad(loss * scale, list(model.parameters()))
            total = [t + grad / scale / len(window) for t, grad in zip(total, grads, strict=True)]
        return total

    for window, found in zip(sam.make_windows(), scales, strict=True):
        first = gradients(window)
        norm = torch.cat([grad.flatten() for grad in first]).norm()
        start = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, grad in zip(model.parameters(), first, strict=True):
                p += sam.RHO * grad / (norm + 1e-12)
        second = gradients(window)
        with torch.no_grad():
            for p, before in zip(model.parameters(), start, strict=True):
                p.copy_(before)
        if all(bool(grad.isfinite().all()) for grad in first + second):
            for p, grad in zip(model.parameters(), second, strict=True):
                p.grad = grad
            optimizer.step()
        else:
            scale /= 2
        assert found == scale
    assert scale < 2.0**20
    assert_close(params, dict(model.named_parameters()), **CLOSE)


def test_ema_is_torchs_averaged_model_and_stands_still_on_a_skip():
    state, average = ema.main()
    model = ema.make_model()
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    averaged.update_parameters(model)  # torch's average begins with the first model that it is given
    optimizer, skipped = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), 0
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    for batch in ema.make_batches():
        with torch.autocast("cpu", torch.float16):
            loss = squares(model, batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        if scaler.get_scale() < before:
            skipped += 1
        else:
            averaged.update_parameters(model)
    assert state.skipped == skipped > 0
    assert_close(average, dict(averaged.module.named_parameters()), **CLOSE)


def test_the_average_of_half_precision_parameters_is_float32():
    """0.999 * 1 + 0.001 * 1.0078125 is 1 in bfloat16, and the average would never move."""
    optimizer = fa.chain(fa.ema(0.999), fa.sgd(1.0))
    params = {"w": torch.ones(1, dtype=torch.bfloat16)}
    grads = {"w": torch.tensor([-0.0078125])}
    _, state = fa.maybe_step(optimizer, params, optimizer.init(params), grads, torch.tensor(True))
    torch.testing.assert_close(state[0].average["w"], torch.tensor([1 + 0.001 * 0.0078125]), rtol=1e-7, atol=0)


def test_noise_is_the_imperative_loop_with_the_same_noise():
    eta = 0.01
    state = noise.main(eta)
    model, applied, scale = noise.make_model(), 0, 2.0**19
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    named = sorted(model.named_parameters())
    for number, batch in enumerate(noise.make_batches()):
        with torch.autocast("cpu", torch.float16):
            loss = squares(model, batch)
        grads = torch.autograd.grad(loss * scale, [p for _, p in named])
        if not all(bool(grad.isfinite().all()) for grad in grads):
            scale /= 2
            continue
        for (_, p), grad in zip(named, grads, strict=True):
            p.grad = grad / scale
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.manual_seed(number)
        for _, p in named:
            assert p.grad is not None
            p.grad += (eta / (1 + applied) ** 0.55) ** 0.5 * torch.randn_like(p.grad)
        optimizer.step()
        applied += 1
    assert state.applied == state.opt_state[0] == applied < noise.WINDOWS
    assert_close(state.params, dict(named), **CLOSE)


def test_freezing_is_requires_grad_set_to_false_and_back():
    state = freeze.main()
    model = freeze.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for window, (x, y) in enumerate(freeze.make_batches()):
        model[0].requires_grad_(window >= freeze.FROZEN)
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of what is trained
        optimizer.step()
    assert_close(state.params, dict(model.named_parameters()), rtol=1e-4, atol=1e-6)


def test_migrating_there_and_back_is_the_imperative_run():
    model, scale = migrate.main()
    expected, expected_scale = migrate.main(["imperative"])
    assert scale == expected_scale < 2.0**24
    assert distance(dict(model.named_parameters()), dict(expected.named_parameters())) == 0


# Per-example clipping


def clipped_by_hand(params: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """The mean of the clipped gradients, one example after the other, in float32."""
    model = dp_sgd.make_model()
    model.load_state_dict(params)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row, label in zip(x, y, strict=True):
        model.zero_grad()
        cross_entropy(model(row[None]), label[None]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), dp_sgd.MAX_NORM)
        for name, p in model.named_parameters():
            assert p.grad is not None
            total[name] += p.grad / dp_sgd.BATCH
    return total


def test_clipping_each_example_is_a_loop_over_the_examples():
    params = dp_sgd.main(noise_multiplier=0.0, scaler=fa.StaticScale(2.0**10))
    expected = fa.from_module(dp_sgd.make_model()).params
    for x, y in dp_sgd.make_batches():
        grads = clipped_by_hand(expected, x, y)
        expected = {name: p - 0.5 * grads[name] for name, p in expected.items()}
    assert_close(params, expected, rtol=0, atol=2e-3)


class _Drawn:
    """The noise of the recipe, drawn in its order, for parameters in the order of the model."""

    def __init__(self, names: list[str], shapes: dict[str, torch.Size]) -> None:
        self.random, self.names, self.shapes = torch.Generator().manual_seed(2), names, shapes
        self.waiting: dict[str, Tensor] = {}
        self.order = itertools.cycle(names)

    def __call__(self, std: float, reference: Tensor, **_: Any) -> Tensor:
        if not self.waiting:
            self.waiting = {n: torch.randn(self.shapes[n], generator=self.random) for n in sorted(self.names)}
        return std * self.waiting.pop(next(self.order))


@pytest.mark.slow  # importing Opacus takes seconds
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
@pytest.mark.filterwarnings("ignore")  # Opacus hooks modules in ways that torch deprecates
def test_dp_sgd_is_opacus(noise_multiplier: float, monkeypatch: pytest.MonkeyPatch):
    opacus = pytest.importorskip("opacus", reason='pip install "functional_amp[recipes]"')
    params = dp_sgd.main(noise_multiplier, scaler=fa.StaticScale(2.0**10))
    model = opacus.GradSampleModule(dp_sgd.make_model())
    named = dict(model._module.named_parameters())
    drawn = _Drawn(list(named), {name: p.shape for name, p in named.items()})
    if noise_multiplier:
        monkeypatch.setattr("opacus.optimizers.optimizer._generate_noise", drawn)
    optimizer = opacus.optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.5),
        noise_multiplier=noise_multiplier,
        max_grad_norm=dp_sgd.MAX_NORM,
        expected_batch_size=dp_sgd.BATCH,
    )
    for x, y in dp_sgd.make_batches():
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    assert_close(params, named, rtol=0, atol=5e-3)


def example_grads(scaler: fa.Scaler, max_norm: float) -> tuple[fa.ScaledGrads, dict[str, Tensor]]:
    """Gradients that are clipped one by one and stacked by vmap, and their mean by a loop."""
    x, y = next(dp_sgd.make_batches())
    apply, params, _ = fa.from_module(dp_sgd.make_model())

    def each(x: Tensor, y: Tensor) -> fa.ScaledGrads:
        grads = fa.scale_backward(lambda p: cross_entropy(apply(p, x[None]), y[None]), scaler, params).grads
        return fa.clip(grads, max_norm).grads

    return torch.func.vmap(each)(x, y), clipped_by_hand(params, x, y)


def test_the_mean_of_stacked_gradients_that_were_clipped_apart_is_the_mean_of_the_clipped_gradients():
    """A clip that changed the scale that each example carries would be lost in the mean: it was, by 7 %."""
    stacked, expected = example_grads(fa.DynamicScale(2.0**10), dp_sgd.MAX_NORM)
    mean = fa.unscale(fa.ScaledGrads({n: g.mean(dim=0) for n, g in stacked.tree.items()}, stacked.scale[0]))
    assert_close(mean.grads, expected, rtol=1e-4, atol=1e-6)
    every_leaf: Any = optree.tree_map(lambda leaf: leaf.mean(dim=0), cast(Any, stacked))
    assert_close(fa.unscale(every_leaf).grads, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "stage",
    [
        fa.unscale,
        fa.all_finite,
        fa.global_norm,
        lambda grads: fa.clip(grads, 1.0),
        lambda grads: fa.accumulate(None, grads),
        lambda grads: fa.accumulate(fa.ScaledGrads({"w": torch.ones(2)}, 1.0), grads),
        lambda grads: fa.add(None, grads),
        lambda grads: fa.add(grads, fa.ScaledGrads({"w": torch.ones(2)}, 1.0)),
        lambda grads: fa.maybe_step(fa.sgd(0.1), {"w": torch.ones(2)}, fa.sgd(0.1).init({}), grads, torch.tensor(True)),
    ],
)
def test_stacked_gradients_are_refused_by_every_stage_and_the_remedy_works(stage: Any):
    """Two examples of two features: a scale of shape (2,) would have been broadcast along the wrong dimension."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def each(x: Tensor) -> fa.ScaledGrads:
        scale = fa.StaticScale(8.0)
        return fa.scale_backward(lambda p: (p["w"] * x).sum(), scale, {"w": torch.ones(2)}).grads

    with pytest.raises(ValueError, match=r"stacked by vmap.*shape \(2,\).*Call unscale inside the vmap"):
        stage(torch.func.vmap(each)(x))
    plain = torch.func.vmap(lambda x: fa.unscale(each(x)).grads)(x)
    assert torch.equal(plain["w"].sum(dim=0), torch.tensor([4.0, 6.0]))
