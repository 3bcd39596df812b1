"""Cases from the field about saving and about moving between GradScaler and this library."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_amp as fa
from tests.models import MLP, Batch, Problem, criterion, mlp, overflowing
from tests.test_checkpoint import bits, mid_window_state

LOADER = """
import sys, torch, functional_amp
state = torch.load(sys.argv[1])
assert state.window is None or state.window.grads.scale is state.scaler.scale
torch.save(functional_amp.state_dict(state), sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("open_window", [False, True])
def test_P11_torch_load_with_its_default(tmp_path: Path, open_window: bool) -> None:
    """modelscope/ms-swift#5808, mlfoundations/open_clip#1150: weights_only=True in a new process, in mid-window too."""
    state, _, step = mid_window_state()
    state = state if open_window else step.update(state)[0]
    torch.save(state, tmp_path / "state.pt")
    command = [sys.executable, "-c", LOADER, str(tmp_path / "state.pt"), str(tmp_path / "flat.pt")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert bits(torch.load(tmp_path / "flat.pt")) == bits(fa.state_dict(state))


def test_P11_torch_load_with_its_default__every_value_class(tmp_path: Path) -> None:
    state, _, step = mid_window_state()
    values: dict[str, Any] = {"state": state, "metrics": step.update(state)[1], "loss": fa.Loss(torch.ones(()))}
    values |= {"scalers": [fa.NoScale(), fa.StaticScale(2.0), fa.DynamicScale.deepspeed()]}
    values |= {"states": [fa.sgd(0.1, 0.9).init(state.params), fa.adam().init(state.params)]}
    torch.save(values, tmp_path / "values.pt")
    loaded = torch.load(tmp_path / "values.pt", weights_only=True)
    assert bits(fa.state_dict(loaded["state"])) == bits(fa.state_dict(state))
    assert isinstance(loaded["metrics"], fa.Metrics) and isinstance(loaded["loss"], fa.Loss)
    assert loaded["scalers"][2].growth_delay == 1 and isinstance(loaded["states"][1], fa.AdamState)


def test_P12_safetensors_in_mid_window(tmp_path: Path) -> None:
    """The scale of the scaler and that of the open window are one tensor in a state, and two in its flat dict."""
    safetensors = pytest.importorskip("safetensors.torch")
    state, template, step = mid_window_state()
    assert state.window is not None and state.window.grads.scale is state.scaler.scale
    flat = fa.state_dict(state)
    safetensors.save_file(flat, tmp_path / "state.safetensors")
    loaded = safetensors.load_file(tmp_path / "state.safetensors")
    assert bits(loaded) == bits(flat)
    resumed = fa.load_state_dict(template, loaded)
    assert resumed.window is not None and resumed.window.grads.scale is resumed.scaler.scale
    assert bits(fa.state_dict(step.update(resumed)[0])) == bits(fa.state_dict(step.update(state)[0]))


def test_D16_scaler_state_in_the_checkpoint(tmp_path: Path) -> None:
    """huggingface/transformers#34053 (256 became 65536), facebookresearch/metaseq#3: all of the scaler comes back."""
    problem, optimizer = mlp(), fa.adamw()
    scaler = fa.DynamicScale(256.0, 17, growth_factor=1.5, backoff_factor=0.25, growth_interval=40, max_scale=2.0**20)
    state = fa.init_state(problem.params, optimizer, scaler)
    fa.save(tmp_path / "run.ckpt", fa.state_dict(state))
    flat = fa.load(tmp_path / "run.ckpt")
    loaded = fa.load_state_dict(state, flat).scaler
    assert vars(loaded).keys() == vars(scaler).keys()
    assert loaded.scale.item() == 256.0 and loaded.growth_tracker.item() == 17
    for name, value in vars(scaler).items():
        found = getattr(loaded, name)
        assert found.equal(value) if isinstance(value, torch.Tensor) else found == value, name
        assert f"scaler/{name}" in flat
    with pytest.raises(ValueError, match=r"scaler/growth_interval: found 40, expected 2000"):
        fa.load_state_dict(fa.init_state(problem.params, optimizer), flat)


class Imperative:
    """The imperative loop: fused AdamW, GradScaler, the loss divided by the length of the window."""

    def __init__(self, model: torch.nn.Module, k: int):
        self.model, self.k = model, k
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    def window(self, batches: list[Batch]) -> None:
        for batch in batches:
            self.scaler.scale(criterion(self.model(batch["x"]), batch) / self.k).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)


def windows_of(problem: Problem, k: int) -> list[list[Batch]]:
    """18 windows, of which 4, one or two in each third, overflow."""
    plain = [[problem.batch(k * window + position) for position in range(k)] for window in range(18)]
    return [
        [overflowing(batch) if window in (2, 7, 8, 15) and position == 1 else batch for position, batch in enumerate(w)]
        for window, w in enumerate(plain)
    ]


@pytest.mark.parametrize("donate", [False, True])
def test_P13_moving_between_gradscaler_and_this(donate: bool) -> None:
    """huggingface/transformers#34053, huggingface/accelerate#4289: there and back in mid-run, bit for bit."""
    k, problem = 2, mlp()
    runs = []
    for _ in range(2):
        model = MLP()
        model.load_state_dict(problem.module.state_dict())
        runs.append(Imperative(model, k))
    whole, moved = runs
    windows = windows_of(problem, k)
    for window in windows:
        whole.window(window)

    for window in windows[:6]:
        moved.window(window)
    names = [name for name, _ in moved.model.named_parameters()]
    apply, params, _ = fa.from_module(moved.model)
    optimizer = fa.adamw(1e-2)
    grad_scaler = moved.scaler.state_dict()
    scaler = fa.DynamicScale.from_state_dict({**grad_scaler, "scale": grad_scaler["scale"] / k})
    state = fa.init_state(params, optimizer, scaler)
    theirs = moved.optimizer.state_dict()
    state = dataclasses.replace(state, opt_state=fa.opt_state_from_torch(state.opt_state, theirs, names))
    step = fa.make_step(lambda p, batch: criterion(apply(p, batch["x"]), batch), optimizer, donate=donate)
    for window in windows[6:12]:
        state, _ = step(state, window)
    assert state.skipped.item() == 2

    back = Imperative(MLP(), k)
    back.model.load_state_dict(state.params)
    back.optimizer.load_state_dict(fa.opt_state_to_torch(state.opt_state, back.optimizer, names))
    ours = state.scaler.state_dict()
    back.scaler.load_state_dict({**ours, "scale": ours["scale"] * k})
    for window in windows[12:]:
        back.window(window)

    pairs = zip(back.model.parameters(), whole.model.parameters(), strict=True)
    assert max((a - b).abs().max().item() for a, b in pairs) == 0.0
    assert bits(dict(back.model.named_parameters())) == bits(dict(whole.model.named_parameters()))
    assert back.scaler.state_dict() == whole.scaler.state_dict()
    for ours_state, torch_state in zip(
        back.optimizer.state_dict()["state"].values(), whole.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert bits(ours_state) == bits(torch_state)
        assert ours_state["step"].item() == 14
