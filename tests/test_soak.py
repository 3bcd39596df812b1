"""Thousands of updates, many of which overflow: nothing grows, nothing drifts, nothing is miscounted.

Bit for bit equal to torch's loop, for the reasons in test_oracle.py: the scale is a power of two, one
micro-batch a window, no clipping, the fused kernels on both sides, a learning rate that is a float.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa
from functional_amp.testing import assert_same_bits, references
from tests.test_oracle import Optim

START, FLOOR, CEILING, INTERVAL = 2.0**16, 2.0**4, 2.0**20, 8
SNAPSHOT = 1000  # later roundings might make runs equal again that were not: not the end alone is compared


class Batch(NamedTuple):
    x: Tensor
    y: Tensor
    gain: Tensor


def loss_fn(params: Any, batch: Batch) -> Tensor:
    return batch.gain * ((batch.x @ params["w"] + params["b"] - batch.y) ** 2).mean()


def first_params() -> dict[str, Tensor]:
    return {"w": torch.tensor([[0.5], [-1.0], [0.25]]), "b": torch.zeros(1)}


def drawn_overflows(updates: int) -> list[bool]:
    """250 updates of which one in fifty overflows, 250 of which every other one does, and so on."""
    generator = torch.Generator().manual_seed(0)
    rate = torch.tensor([0.02, 0.5]).repeat_interleave(250).repeat(updates // 500)
    return (torch.rand(updates, generator=generator) < rate).tolist()


def batches(overflows: list[bool]) -> Iterator[Batch]:
    """Noisy micro-batches in turn, so that no gradient becomes small; their gain is inf where an update overflows."""
    generator = torch.Generator().manual_seed(1)
    drawn = [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(7)]
    good, bad = torch.tensor(1.0), torch.tensor(torch.inf)
    for index, overflow in enumerate(overflows):
        yield Batch(*drawn[index % 7], bad if overflow else good)


class Held(NamedTuple):
    """What the process holds: tensors, blocks of Python's allocator, bytes of memory."""

    tensors: int
    blocks: int
    resident: int


def held() -> Held:
    gc.collect()
    tensors = sum(issubclass(type(value), Tensor) for value in gc.get_objects())
    statm = Path("/proc/self/statm")  # Linux; elsewhere the other two stand alone
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return Held(tensors, sys.getallocatedblocks(), pages * os.sysconf("SC_PAGE_SIZE") if pages else 0)


def values(params: Any) -> list[float]:
    return [value for name in ("b", "w") for value in params[name].flatten().tolist()]


def imperative(optim: Optim, overflows: list[bool]) -> tuple[dict[str, Tensor], Any, float, list[list[float]]]:
    """torch's loop, its scale kept between floor and ceiling by hand: parameters, optimizer, scale, snapshots."""
    params = {name: nn.Parameter(leaf) for name, leaf in first_params().items()}
    optimizer = optim.theirs(list(params.values()))
    scaler = torch.amp.GradScaler("cpu", init_scale=START, growth_interval=INTERVAL)
    snapshots = []
    for index, batch in enumerate(batches(overflows), start=1):
        scaler.scale(loss_fn(params, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
        scaler.update(min(max(scaler.get_scale(), FLOOR), CEILING))
        optimizer.zero_grad(set_to_none=True)
        if index % SNAPSHOT == 0:
            snapshots.append(values(params))
    return {name: leaf.detach() for name, leaf in params.items()}, optimizer, scaler.get_scale(), snapshots


ADAMW = Optim("AdamW", {"lr": 1e-3, "weight_decay": 0.1})
MOMENTUM = Optim("SGD", {"lr": 1e-3, "momentum": 0.9})


@pytest.mark.slow
@pytest.mark.parametrize(
    "donate, optim, updates, warm",
    [(True, ADAMW, 6_000, 2_000), (False, MOMENTUM, 3_000, 1_000)],
    ids=["donated adamw", "pure momentum"],
)
def test_a_long_run_with_overflows_holds_no_more_memory_and_stays_exact(donate, optim, updates, warm):
    with ProcessPoolExecutor(1, get_context("spawn")) as alone:  # what other tests have left would be counted too
        alone.submit(soak, donate, optim, updates, warm).result()


def soak(donate: bool, optim: Optim, updates: int, warm: int) -> None:
    overflows = drawn_overflows(updates)
    scales = references.scales(references.Apex(START, window=INTERVAL, minimum=FLOOR, maximum=CEILING), overflows)
    assert (min(scales), max(scales)) == (FLOOR, CEILING)  # the run shows what it is to show

    optimizer = optim.ours()
    step = fa.make_step(loss_fn, optimizer, donate=donate)
    scaler = fa.DynamicScale(START, growth_interval=INTERVAL, min_scale=FLOOR, max_scale=CEILING)
    state = fa.init_state(first_params(), optimizer, scaler)
    applied = skipped = in_a_row = 0
    used, snapshots, memory = START, [], []
    for index, (batch, overflow) in enumerate(zip(batches(overflows), overflows, strict=True), start=1):
        state, metrics = step(state, [batch])
        applied, skipped, in_a_row = applied + (not overflow), skipped + overflow, (in_a_row + 1) * overflow
        assert metrics.finite.item() is not overflow and metrics.scale.item() == used
        counters = [state.applied, state.skipped, state.skipped_in_a_row, state.opt_state.step]
        assert [counter.item() for counter in counters] == [applied, skipped, in_a_row, applied]
        used = scales[index - 1]
        assert state.scaler.scale.item() == used and FLOOR <= used <= CEILING
        if index % SNAPSHOT == 0:
            snapshots.append(values(state.params))
        if index in (warm, updates):
            memory.append(held())

    before, after = memory
    assert after.tensors == before.tensors
    # A block an update would be thousands, and the smallest tensor an update megabytes.
    assert after.blocks - before.blocks < 1000
    assert after.resident - before.resident < 2**21

    params, theirs, scale, their_snapshots = imperative(optim, overflows)
    assert snapshots == their_snapshots and state.scaler.scale.item() == scale
    assert_same_bits(state.params, params, "params")
    slots = {"SGD": ["momentum_buffer"], "AdamW": ["exp_avg", "exp_avg_sq"]}[optim.name]
    for slot in slots:
        torch_slot = dict(zip(params, [theirs.state[leaf][slot] for leaf in theirs.param_groups[0]["params"]]))
        assert_same_bits(getattr(state.opt_state, slot), torch_slot, slot)
