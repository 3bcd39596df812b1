"""A small model on several ranks and in one process, with windows that differ from rank to rank."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import functional_amp as fa
from functional_amp.ranks import Ranks, shard, sharded
from functional_amp.testing import mapped

Batch = tuple[Tensor, Tensor, Tensor]


@dataclasses.dataclass(frozen=True)
class Setup:
    """One configuration of a run."""

    optimizer: str = "adamw"
    donate: bool = False
    compile: Any = False
    compute_dtype: torch.dtype | None = None
    backend: Any = "auto"
    max_norm: float | None = 0.3


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def optimizer_of(name: str) -> fa.Optimizer:
    if name == "partition":
        return fa.partition(
            {"matrix": fa.adamw(fa.warmup_cosine(1e-2, 2, 8)), "vector": fa.sgd(1e-2, momentum=0.9)},
            lambda path, leaf: "matrix" if leaf.ndim > 1 else "vector",
        )
    return {"adamw": fa.adamw(1e-2), "sgd": fa.sgd(1e-1, momentum=0.9)}[name]


def loss_of(apply: Any, gather: torch.dtype | None = None) -> Any:
    def loss_fn(params: Any, batch: Batch) -> fa.Loss:
        x, y, bad = batch
        dtype = next(iter(params.values())).dtype if gather is None else gather
        total = cross_entropy(apply(params, x.to(dtype)).float(), y, reduction="sum") / max(len(x), 1)
        return fa.Loss(total + bad * (x.sum() + 1) * total, weight=torch.tensor(float(len(x))))

    return loss_fn


def windows_of(seed: int, ranks: int, n: int = 6, *, even: bool = False, longest: int = 4) -> list[list[list[Batch]]]:
    """For each window and rank its micro-batches, of 1 to 5 items (0 to 5 where all ranks have equally many).

    In the third window one micro-batch of one rank gives NaN.
    """
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    windows = []
    for index in range(n):
        same = number(1, longest)
        counts = [same if even else number(0, longest) for _ in range(ranks)]
        if index == 2:
            counts = [max(count, 1) for count in counts]
        window = []
        for count in counts:
            batches = []
            for _ in range(count):
                items = number(0 if even else 1, 5)
                x, y = torch.randn(items, 6, generator=generator), torch.randint(3, (items,), generator=generator)
                batches.append((x, y, torch.zeros(())))
            window.append(batches)
        windows.append(window)
    place = seed % ranks
    windows[2][place][0] = (torch.ones(1, 6), torch.zeros(1, dtype=torch.long), torch.tensor(math.nan))
    return windows


def options(setup: Setup) -> dict[str, Any]:
    return {
        "max_norm": setup.max_norm,
        "donate": setup.donate,
        "compile": setup.compile,
        "compute_dtype": setup.compute_dtype,
        "backend": setup.backend,
    }


def scaler() -> fa.DynamicScale:
    return fa.DynamicScale(2.0**12, growth_interval=2)


def single(windows: list[list[list[Batch]]], setup: Setup) -> list[tuple[fa.TrainState, fa.Metrics]]:
    """One process on all micro-batches, in the order of the ranks, by the pure eager step."""
    apply, params, _ = fa.from_module(model())
    optimizer = optimizer_of(setup.optimizer)
    step = fa.make_step(loss_of(apply), optimizer, max_norm=setup.max_norm, compute_dtype=setup.compute_dtype)
    state = fa.init_state(params, optimizer, scaler())
    results = []
    for window in windows:
        batches = [batch for batches in window for batch in batches]
        if not batches:  # a micro-batch without items stands for an empty window
            batches = [(torch.zeros(0, 6), torch.zeros(0, dtype=torch.long), torch.zeros(()))]
        state, metrics = step(state, batches)
        results.append((state, metrics))
    return results


def data_parallel(rank: int, windows: Any, setup: Setup, reduce_dtype: Any = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (len(windows[0]),))
    apply, params, _ = fa.from_module(model())
    optimizer = optimizer_of(setup.optimizer)
    step = fa.make_step(loss_of(apply), optimizer, mesh=Ranks(mesh, reduce_dtype), **options(setup))
    return run(rank, step, fa.init_state(params, optimizer, scaler()), windows)


def sharded_run(rank: int, windows: Any, setup: Setup, kind: str = "fsdp") -> Any:
    """Parameters sharded over all ranks ("fsdp"), over pairs of them ("hsdp"), with the last layer plain ("mixed")."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks = len(windows[0])
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        inner = mesh["shard"]
    else:
        mesh = inner = init_device_mesh("cpu", (ranks,))
    apply, params, _ = fa.from_module(model(), gather=torch.float32)
    params = shard(params, mesh)
    if kind == "mixed":
        params["4.weight"], params["4.bias"] = params["4.weight"].full_tensor(), params["4.bias"].full_tensor()
    optimizer = optimizer_of(setup.optimizer)
    loss_fn = sharded(loss_of(apply, torch.float32), inner)
    step = fa.make_step(loss_fn, optimizer, mesh=mesh, **options(setup))
    return run(rank, step, fa.init_state(params, optimizer, scaler()), windows)


def tensor_parallel(rank: int, windows: Any, setup: Setup, kind: str) -> Any:
    """Two data-parallel groups of two ranks that split the layers; "tp fsdp" shards each half over the groups too."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    split = parallelize_module(model(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    apply, params, _ = fa.from_module(split, gather=torch.float32 if kind == "tp fsdp" else None)
    loss_fn = loss_of(apply, torch.float32)
    if kind == "tp fsdp":
        params, loss_fn = shard(params, mesh["dp"]), sharded(loss_fn, mesh["dp"])
    optimizer = optimizer_of(setup.optimizer)
    step = fa.make_step(loss_fn, optimizer, mesh=mesh["dp"], **options(setup))
    return run(rank // 2, step, fa.init_state(params, optimizer, scaler()), windows)


def run(rank: int, step: fa.Step, state: fa.TrainState, windows: Any) -> Any:
    results = []
    for window in windows:
        state, metrics = step(state, window[rank])
        results.append((whole(state), metrics))
    return results


def whole(tree: Any) -> Any:
    """A copy of a state with whole leaves."""
    return mapped(lambda leaf: (leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf).clone(), tree)
