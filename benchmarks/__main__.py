"""Measures the functional step against the imperative loop: one table, a JSON file and a picture."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks import counts, explain, growth, history, memory, options, peers, picture, report, steps, tail
from benchmarks.setup import Row, Setup


def main(arguments: Sequence[str] | None = None) -> None:
    given = options.parse(__doc__ or "", arguments)
    if given.markdown:
        print(report.markdown(given.markdown))
        return
    setup = Setup(
        device=given.device,
        dtype=torch.float16 if given.device.type == "cuda" else torch.bfloat16,  # no fast fp16 on a CPU
        rounds=given.rounds,
        warmup=1 if given.smoke else 3,
        seed=given.seed,
        variants=given.variants,
        compiled_leaves=given.compiled_leaves,
        smoke=given.smoke,
    )
    given.out.mkdir(parents=True, exist_ok=True)  # better known before the measurements than after them
    rows: list[Row] = []
    sections: dict[str, Callable[[], list[Row]]] = {
        "tail": lambda: tail.measure(setup),
        "limit": lambda: tail.limits(setup, [row for row in rows if row.section == "tail"]),
        "step": lambda: steps.measure(setup),
        "peers": lambda: peers.measure(setup),
        "counts": lambda: counts.measure(setup),
        "memory": lambda: memory.measure(setup),
        "growth": lambda: growth.measure(setup),
        "history": lambda: history.measure(setup),
        "explain": lambda: explain.measure(setup),
    }
    for name in given.sections:
        print(f"measuring: {name}", file=sys.stderr, flush=True)
        rows += sections[name]()
    machine = report.machine_of(setup)
    stem = given.out / f"{machine['date']}-{setup.device.type}"
    report.write(stem.with_suffix(".json"), rows, machine)
    picture.draw(rows, report.machine_line(machine), stem.with_suffix(".png"))
    report.show(rows, machine)
    print(f"written: {stem.with_suffix('.json')}, {stem.with_suffix('.png')}")


if __name__ == "__main__":
    main()
