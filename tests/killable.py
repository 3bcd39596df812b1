"""A training script that saves after every micro-batch and goes on from its file.

Run by test_kill.py: python killable.py FILE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

import functional_amp as fa
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("ready", flush=True)
    train(Path(sys.argv[1]))
    os._exit(0)  # the interpreter's own end takes longer than the training
