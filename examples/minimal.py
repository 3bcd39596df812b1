"""Train a small classifier in float16, save it, and go on from the file when run again: minimal.py --windows 120."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa

TOTAL, K, SAVE_EVERY = 200, 4, 20  # windows, micro-batches in a window (accumulation steps), windows between two files


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    """Points in four rings around the origin; the class is the ring."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(64, 2, generator=generator)
    return x, (x.norm(dim=1) / 0.7).long().clamp(max=3)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains up to --windows and gives the accuracy on points that training does not see."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=TOTAL, help=f"stop after so many of {TOTAL}")
    parser.add_argument("--file", type=Path, default=Path("minimal.ckpt"))
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.GELU(), nn.Dropout(0.05), nn.Linear(64, 4))
    apply, params, _ = fa.from_module(model)

    def loss_fn(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return cross_entropy(apply(params, x).float(), y)

    optimizer = fa.adamw(fa.warmup_cosine(1e-2, warmup_steps=20, steps=TOTAL))
    step = fa.make_step(fa.autocast(loss_fn, torch.float16), optimizer, max_norm=1.0)
    state, start = fa.init_state(params, optimizer, fa.DynamicScale(growth_interval=50)), 0

    if options.file.exists():
        flat = fa.load(options.file)
        state, start = fa.load_state_dict(state, flat), int(flat["extra/window"])
        print(f"goes on at window {start} of {options.file}")
    for window in range(start, options.windows):
        state, metrics = step(state, [micro_batch(window * K + i) for i in range(K)], seed=window)
        if (window + 1) % SAVE_EVERY == 0:
            fa.save(options.file, fa.state_dict(state, window=window + 1))
            print(f"window {window + 1}: loss {metrics.loss:.3f}, scale {metrics.scale:.0f}, skipped {state.skipped}")

    x, y = micro_batch(TOTAL * K)
    accuracy = (apply.eval()(state.params, x).argmax(1) == y).float().mean().item()
    print(f"accuracy {accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    main()
