"""What no noise of the machine can change: operators, tensors, host reads, graphs and recompilations."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import functional_amp as fa
from benchmarks import tail
from benchmarks.loops import make_functional, make_loop, make_options
from benchmarks.measure import Call, seconds_of
from benchmarks.setup import Row, Setup
from benchmarks.work import task
from functional_amp.registry import with_fields

HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"}
COMPILED_WINDOWS = (1, 2, 16)


class Counter(TorchDispatchMode):
    """Counts dispatched operators, the tensors that they allocate, and reads by the host.

    A foreach or fused kernel over all leaves is one operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.tensors = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(leaf) for leaf in _tensors((args, kwargs))}
        devices = {leaf.device.type for leaf in _tensors((args, kwargs))}
        output = func(*args, **(kwargs or {}))
        made = _tensors(output)
        self.operators += 1
        self.tensors += len({_storage(leaf) for leaf in made} - given)
        to_host = "cuda" in devices and any(leaf.device.type == "cpu" for leaf in made)
        self.reads += func._schema.name in HOST_READS or to_host
        return output


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _storage(tensor: Tensor) -> int:
    # Not by `untyped_storage()`: that Python object is another holder of the storage, which a step then does not own.
    return torch._C._storage_id(tensor)  # pyright: ignore[reportAttributeAccessIssue]


def measure(setup: Setup) -> list[Row]:
    return [*eager_rows(setup), *graph_rows(setup), *compile_rows(setup)]


def eager_rows(setup: Setup) -> list[Row]:
    """Counts of one call, after one that made optimizer states."""
    eager = [variant for variant in setup.variants if not variant.endswith("-compiled")]
    work = task("transformer", setup.smoke)
    window = work.window(2, setup.seed + 1, setup.device)
    case, shapes = next(iter(tail.shapes_of(setup.smoke).items()))

    def step_call(variant: str) -> Callable[[], Call]:
        loop = make_loop(variant, work, setup)
        return lambda: lambda: loop.run(window)

    def tail_call(variant: str) -> Callable[[], Call]:
        update = tail.make_tail(variant, shapes, setup)
        return lambda: update.prepare(tail.random_tensors(shapes, setup, setup.seed + 1))

    rows = []
    for name, prepared in (("transformer, window of 2", step_call), (f"tail of {case}", tail_call)):
        counters = {variant: count(prepared(variant)) for variant in eager}
        for unit in ("operators", "tensors", "reads"):
            values: dict[str, float | str] = {variant: getattr(found, unit) for variant, found in counters.items()}
            label = {"operators": "operators", "tensors": "tensors allocated", "reads": "host reads"}[unit]
            rows.append(Row("counts", f"{name}: {label}", "", values, compared=unit != "reads"))
    return rows


def count(prepare: Callable[[], Call]) -> Counter:
    prepare()()
    call = prepare()
    with Counter() as counter:
        call()
    return counter


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graph_rows(setup: Setup) -> list[Row]:
    """Graphs of windows of each length, and those added when everything changes that may change."""
    steps = [variant for variant in setup.of_own_graphs if not variant.startswith("imperative")]
    compiled = [variant for variant in steps if make_options(variant)["compile"]]
    found = {variant: graph_counts(variant, setup) for variant in compiled}
    labels = list(next(iter(found.values()), {}))
    return [
        Row("counts", f"mlp: {label}", "", {variant: row[label] for variant, row in found.items()}, compared=False)
        for label in labels
    ]


def graph_counts(variant: str, setup: Setup) -> dict[str, int]:
    work = task("mlp", setup.smoke)
    window = work.window(4, setup.seed + 1, setup.device)
    schedule = fa.linear(1e-3, 0.0, 100)  # another learning rate after every applied update
    model = work.seeded_model(setup.seed, setup.device)
    counts = {}
    for length in (1, 2, 4):
        fresh_compiler()
        step, state, _ = make_functional(model, setup, schedule, **make_options(variant))
        state, _ = step(state, window[:length])
        counts[f"graphs, window of {length}"] = graphs()
    for length in (1, 2):
        state, _ = step(state, window[:length])
    counts["graphs, windows of 1, 2 and more"] = before = graphs()
    poisoned = [(torch.full_like(x, torch.nan), y) for x, y in window[:1]]
    for number, micro_batches in enumerate((window, window[:1], poisoned, window[:2], window)):
        scale = torch.full_like(state.scaler.scale, 2.0**number)
        state = with_fields(state, scaler=with_fields(state.scaler, scale=scale))
        state, _ = step(state, micro_batches)
    counts["graph breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    counts["recompilations in five other windows"] = graphs() - before
    return counts


def compile_rows(setup: Setup) -> list[Row]:
    """Seconds that the first window takes longer than the next ones, with empty caches of the compiler."""
    from torch._inductor.utils import fresh_cache

    compiled = [variant for variant in setup.of_own_graphs if variant.endswith("-compiled")]
    work, rows = task("mlp", setup.smoke), []
    for length in COMPILED_WINDOWS if compiled else ():
        values: dict[str, float | str] = {}
        for variant in compiled:
            fresh_compiler()
            loop = make_loop(variant, work, setup)
            window = work.window(length, setup.seed + 1, setup.device)
            with fresh_cache():
                first, *later = (seconds_of(partial(loop.run, window), setup.device) for _ in range(4))
            values[variant] = first - statistics.median(later)
        rows.append(Row("counts", f"mlp: compilation, window of {length}", "s", values, compared=False))
    return rows
