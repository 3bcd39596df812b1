"""Training that saves and goes on from its file: a script that saves after every micro-batch, and two ranks.

Run by test_kill.py: python killable.py FILE
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import functional_amp as fa
from functional_amp.ranks import shard, sharded, whole
from tests.distributed_runs import loss_of, model, optimizer_of, scaler, windows_of
from tests.models import mlp, overflowing

WINDOWS, K = 30, 3


def train(path: Path) -> fa.TrainState:
    """30 windows of 3 micro-batches with dropout, two of the windows with an overflow."""
    problem, optimizer = mlp(dropout=0.2), fa.adamw(fa.warmup_cosine(1e-2, 5, WINDOWS))
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=0.5, donate=True)
    state, start = fa.init_state(problem.params, optimizer, fa.DynamicScale(growth_interval=4)), 0
    if path.exists():
        flat = fa.load(path)
        state, start = fa.load_state_dict(state, flat), int(flat["extra/position"])
    for position in range(start, WINDOWS * K):
        batch = problem.batch(position)
        with fa.seeded(position):
            state = step.accumulate(state, overflowing(batch) if position in (20, 50) else batch)
        if position % K == K - 1:
            state, _ = step.update(state)
        fa.save(path, fa.state_dict(state, position=position + 1))
    return state


def train_on_ranks(rank: int, path: Path, kind: str) -> float:
    """12 windows on each of two ranks, "ddp" or "fsdp", one of them with a NaN; the first rank saves every state.

    Returns:
        The seconds that it took.
    """
    from torch.distributed.device_mesh import init_device_mesh

    begin = time.monotonic()
    mesh, gathered = init_device_mesh("cpu", (2,)), torch.float32 if kind == "fsdp" else None
    apply, params, _ = fa.from_module(model(), gather=gathered)
    loss_fn, optimizer = loss_of(apply, gathered), optimizer_of("adamw")
    if kind == "fsdp":
        params, loss_fn = shard(params, mesh), sharded(loss_fn, mesh)
    step = fa.make_step(loss_fn, optimizer, max_norm=0.3, donate=True, mesh=mesh)
    state, start = fa.init_state(params, optimizer, scaler()), 0
    if path.exists():
        flat = fa.load(path)
        state, start = fa.load_state_dict(state, flat), int(flat["extra/position"])
    for position, window in enumerate(windows_of(1, 2, n=12, even=kind == "fsdp")):
        if position < start:
            continue
        state, _ = step(state, window[rank])
        flat = whole(fa.state_dict(state, position=position + 1))
        if rank == 0:
            fa.save(path, flat)
    return time.monotonic() - begin


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ready", flush=True)
    train(Path(sys.argv[1]))
    os._exit(0)  # the interpreter's own end takes longer than the training
