"""examples/recipes: whole runs, each against torch's imperative loop, separate runs or algebra."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import functional_amp as fa
from tests.recipes import assert_close, imperative, recipe

ensemble, maml, learned_rate = recipe("ensemble"), recipe("maml"), recipe("learned_rate")
retry, out_of_memory, checkpointing = recipe("retry"), recipe("out_of_memory"), recipe("checkpointing")
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-4}  # float16 rounds in another order


@pytest.fixture(autouse=True)
def own_randomness() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def adamw(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return mse_loss(model(batch[0]).float(), batch[1])


# Ensembles and derivatives through updates


@pytest.mark.slow
def test_an_ensemble_is_its_members_trained_apart_and_one_alone_skips():
    found = ensemble.main()
    for index, model in enumerate(ensemble.make_models()):
        windows = [[(x[index], y[index])] for x, y in ensemble.make_batches()]
        records = imperative(model, squares, adamw, windows, 2.0**10, max_norm=1.0, autocast=torch.float16)
        mine: Any = optree.tree_map(lambda leaf, index=index: leaf[index], found)
        assert mine.skipped == sum(record.skipped for record in records) == (index == 1)
        assert mine.scaler.scale == records[-1].scale
        assert_close(mine.params, records[-1].params, rtol=5e-3, atol=5e-4)


@pytest.mark.slow
def test_maml_is_the_second_derivative_of_the_engine():
    """As in the imperative code of MAML: create_graph=True through the inner update."""
    state = maml.main()
    model = maml.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, fused=True)

    def loss_of(params: dict[str, Tensor], data: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mse_loss(torch.func.functional_call(model, params, data[0]).float(), data[1])

    for tasks in maml.make_windows():
        optimizer.zero_grad()
        for support, query in tasks:
            params = dict(model.named_parameters())
            grads = torch.autograd.grad(loss_of(params, support), list(params.values()), create_graph=True)
            moved = {n: p - maml.INNER_RATE * g for (n, p), g in zip(params.items(), grads, strict=True)}
            (loss_of(moved, query) / len(tasks)).backward()
        optimizer.step()
    assert_close(state.params, dict(model.named_parameters()), rtol=0, atol=2e-2)  # bfloat16 has 8 bits


@pytest.mark.slow
def test_a_learned_rate_follows_the_closed_form_through_a_skipped_window():
    """Of h w^2 / 2 the weight after n applied updates is (1 - lr h)^n w, so d loss / d lr is known."""
    rate, derivatives = learned_rate.main()
    h, start, n = learned_rate.CURVATURE.double(), torch.tensor([1.0, 2.0]).double(), learned_rate.INNER - 1
    log_rate = torch.tensor(0.1).double().log()
    for found in derivatives:
        lr = log_rate.exp()
        left = 1 - lr * h
        slope = (h * start.square() * left ** (2 * n - 1) * -n * h).sum() * lr
        assert found == pytest.approx(slope.item(), rel=1e-3, abs=1e-5)
        log_rate = log_rate - 0.5 * slope
    assert rate == pytest.approx(log_rate.exp().item(), rel=1e-4)


# Trying again


def test_a_window_tried_again_is_the_window_at_a_scale_that_fits():
    """A power of two changes no bit, so the run is that of the last scale from the start; dropout repeats."""
    state = retry.main()
    expected = retry.main(fa.StaticScale(state.scaler.scale))
    assert state.applied == retry.WINDOWS and state.skipped > 0 == expected.skipped
    assert_close(state.params, expected.params, rtol=1e-4, atol=1e-6)  # numbers below 2**-24 round


def test_a_window_that_overflows_at_every_scale_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(retry, "make_windows", lambda: [[(torch.full((4, 4), torch.nan), torch.zeros(4, 1))]])
    with pytest.raises(RuntimeError, match="overflowed 30 times"):
        retry.main()


@pytest.mark.parametrize("donate", [True, False])
def test_a_batch_in_smaller_pieces_is_the_whole_batch(donate: bool):
    state, rows = out_of_memory.main(donate)
    assert rows == [64, 16, 16, 16]
    windows = [[batch] for batch in out_of_memory.make_batches()]  # as if there were memory
    records = imperative(out_of_memory.make_model(), squares, adamw, windows, max_norm=1.0)
    assert_close(state.params, records[-1].params, rtol=1e-4, atol=1e-6)


# Models


def test_recomputed_activations_are_the_kept_ones():
    state, kept = checkpointing.main(recompute=True), checkpointing.main(recompute=False)
    assert state.applied == checkpointing.WINDOWS
    assert_close(state.params, kept.params, rtol=0, atol=0)

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        return mse_loss(model(x).float(), x.flip(1))

    windows = [[x] for x in checkpointing.make_batches()]
    options: dict[str, Any] = {"autocast": torch.float16, "seeded": True}
    records = imperative(checkpointing.Blocks(True), loss_of, adamw, windows, 2.0**10, **options)
    assert_close(state.params, records[-1].params, rtol=0, atol=0)


def test_recomputing_keeps_a_fraction_of_the_activations():
    kept = []
    for recompute in (True, False):
        sizes: list[int] = []
        apply, params, _ = fa.from_module(checkpointing.Blocks(recompute))
        leaves = {name: p.requires_grad_() for name, p in params.items()}

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            apply(leaves, torch.randn(64, checkpointing.WIDTH)).sum()
        kept.append(sum(sizes))
    assert kept[0] < 0.2 * kept[1]


@pytest.mark.slow
def test_digits_with_batchnorm_are_the_imperative_loop():
    pytest.importorskip("sklearn", reason='pip install "functional_amp[recipes]"')
    digits = recipe("digits")
    state, accuracy = digits.main()

    def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return cross_entropy(model(batch[0]).float(), batch[1])

    model = digits.make_model()
    training, (images, labels) = digits.make_data()
    windows = [[batch] for batch in digits.make_batches(training)]
    records = imperative(model, loss_of, adamw, windows, 2.0**12, autocast=torch.float16, restore_buffers=True)
    assert state.skipped == sum(record.skipped for record in records)
    expected = (model.eval()(images).argmax(dim=1) == labels).float().mean().item()
    assert accuracy == pytest.approx(expected, abs=0.01) and accuracy > 0.9
    first = digits.EPOCHS * len(windows) // 100 + 2  # the last bits of float16 grow from window to window
    digits.make_batches = lambda data: iter([window[0] for window in windows[:first]])
    start, _ = digits.main()
    assert_close(start.params, records[first - 1].params, rtol=0, atol=5e-3)
    assert_close(start.buffers, records[first - 1].buffers, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers and PEFT warn of themselves
def test_lora_on_a_half_precision_base_is_pefts_imperative_loop(tmp_path: Path):
    for library in ("transformers", "peft"):
        pytest.importorskip(library, reason='pip install "functional_amp[models]"')
    lora = recipe("lora")
    start = {name: p.clone() for name, p in lora.make_model().named_parameters()}
    state, trained = lora.main()
    model = lora.make_model()
    adapters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(adapters.values(), lr=5e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**23)  # it scales loss / 2
    for window in lora.make_windows():
        for tokens in window:
            logits = model(tokens).logits.float()
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss / len(window)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(adapters.values(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert set(state.params) == set(adapters) and all(p.dtype == torch.float32 for p in adapters.values())
    assert state.skipped > 0 and state.scaler.scale * 2 == scaler.get_scale()
    assert_close(state.params, adapters, rtol=0, atol=2e-2)
    for name, p in trained.named_parameters():
        assert torch.equal(p, state.params[name] if name in adapters else start[name])

    trained.save_pretrained(tmp_path)
    saved = pytest.importorskip("safetensors.torch").load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == len(state.params)
    for name, p in state.params.items():
        assert torch.equal(saved[name.replace(".default", "")], p)
    (tokens, *_), *_ = lora.make_windows()
    before = trained(tokens).logits
    torch.testing.assert_close(trained.merge_and_unload()(tokens).logits, before, rtol=0, atol=2e-2)


def test_early_stopping_keeps_the_best_state_and_tensorboard_has_each_number(tmp_path: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    early_stopping = recipe("early_stopping")
    best, losses = early_stopping.main(tmp_path)
    lowest = min(range(len(losses)), key=losses.__getitem__)
    assert 0 < lowest < len(losses) - 1 < early_stopping.EPOCHS - 1
    assert len(losses) - 1 - lowest == early_stopping.PATIENCE

    training, (x, y) = early_stopping.make_data()
    assert best.applied + best.skipped == (lowest + 1) * len(training)
    model = early_stopping.make_model().eval()
    fa.to_module(model, best.params)
    assert mse_loss(model(x), y).item() == pytest.approx(min(losses), rel=1e-5)

    events = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("validation/loss")] == pytest.approx(losses)
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == list(range(1, len(losses) * len(training) + 1))
