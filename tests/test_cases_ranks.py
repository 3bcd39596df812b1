"""Faults that people met in public: D, those that need two processes.

See test_cases.py. The reduction over ranks is written out here: it is the addition of `accumulate`, done by
`all_reduce`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

import functional_amp as fa
from functional_amp.testing import mapped
from tests.test_cases import assert_same, linear_loss

RANKS, LIMIT = 2, 120.0  # seconds for both processes together, their imports included


def on_ranks(work: Callable[[int], Any], folder: Path) -> list[Any]:
    """What `work(rank)` returns in each of the processes; they are killed when the time is up."""
    deadline = time.monotonic() + LIMIT
    context = torch.multiprocessing.spawn(_rank, (work, str(folder)), nprocs=RANKS, join=False)
    assert context is not None
    try:
        while not context.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"the ranks did not end within {LIMIT} s"
    finally:
        for process in filter(None, context.processes):
            process.kill()
            process.join()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _rank(rank: int, work: Callable[[int], Any], folder: str) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # The ranks find each other through a file: each takes a port that is free, and no two tests take the same.
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT)
    )
    torch.save(work(rank), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def all_reduced(tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """The reduction over all ranks, in new storage."""
    tensor = tensor.clone()
    dist.all_reduce(tensor, op)
    return tensor


def reduced(grads: fa.ScaledGrads) -> fa.ScaledGrads:
    """The sum of `accumulate` over the ranks: trees brought to the smallest scale, and weights."""
    scale = all_reduced(grads.scale, dist.ReduceOp.MIN)
    tree = mapped(lambda leaf: all_reduced(leaf * (scale / grads.scale)), grads.tree)
    return fa.ScaledGrads(tree, scale, all_reduced(grads.weight))


class Collectives(TorchDispatchMode):
    """Records the collectives that are called."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def taken_gradient(model: nn.Module) -> float:
    (weight,) = model.parameters()
    assert weight.grad is not None
    gradient, weight.grad = weight.grad.item(), None
    return gradient


def local_gradients(rank: int) -> dict[str, Any]:
    """A window of two micro-batches with all the stages, and one reduction, by the functions and by DDP."""
    x, optimizer = torch.tensor([1.0 + 2 * rank]), fa.sgd(1.0, momentum=0.5)
    step = fa.make_step(linear_loss, optimizer, max_norm=100.0)
    state = fa.init_state({"w": torch.zeros(1)}, optimizer, fa.DynamicScale(8.0 * 2**rank))
    scaled = fa.accumulate(None, fa.scale_backward(linear_loss, state.scaler, state.params, x).grads)
    with Collectives() as stages:
        opened = step.accumulate(step.accumulate(state, x), x)
        window = opened.window
        assert window is not None
        clipped = fa.clip(window.grads, 100.0).grads
        local, finite = fa.unscale(clipped)
        fa.maybe_step(optimizer, state.params, state.opt_state, local, finite)
        fa.update_scale(state.scaler, finite)
        step.update(opened)
    with Collectives() as reduction:
        total = reduced(scaled)

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.no_sync():
        model(x[None]).sum().backward()
    inside = taken_gradient(model)
    outputs = model(x[None])
    with model.no_sync():
        outputs.sum().backward()
    outside = taken_gradient(model)
    return {
        "local": local["w"].item(),
        "mean": fa.unscale(total).grads["w"].item(),
        "total": total,
        "stages": stages.seen,
        "reduction": reduction.seen,
        "forward inside no_sync": inside,
        "forward outside no_sync": outside,
    }


@pytest.mark.slow
def test_D02_no_sync_must_cover_the_forward(tmp_path):
    """facebookresearch/ClassyVision PR#706: no stage communicates: gradients are local until the one reduction."""
    ranks = on_ranks(local_gradients, tmp_path)
    assert [rank["local"] for rank in ranks] == [rank["forward inside no_sync"] for rank in ranks] == [1.0, 3.0]
    assert [rank["mean"] for rank in ranks] == [rank["forward outside no_sync"] for rank in ranks] == [2.0, 2.0]
    for rank in ranks:
        assert rank["stages"] == []
        assert len(rank["reduction"]) == 3  # the control: scale, leaf, weight
    # 1 at a scale of 8 and 3 at a scale of 16: their sum at a scale of 8.
    assert_same(ranks[0]["total"], fa.ScaledGrads({"w": torch.tensor([32.0])}, 8.0, 2.0))
    assert_same(ranks[1]["total"], ranks[0]["total"])


def mixed_trees(rank: int) -> dict[tuple[str, float], Any]:
    """The stages on trees of plain leaves and leaves of two meshes, the last of which has an empty part."""
    one, other = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (1, RANKS))

    def sharded(tree: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            "column": distribute_tensor(tree["column"], one, [Shard(0)]),
            "plain": tree["plain"],
            "row": distribute_tensor(tree["row"], other, [Replicate(), Shard(0)]),
        }

    results = {}
    for name, tree in mixed_values().items():
        for norm_type in NORM_TYPES:
            mixed = fa.ScaledGrads(sharded(tree), 8.0)
            clipped, norm = fa.clip(mixed, 1.0, norm_type=norm_type)
            plain, norm_of_plain = fa.clip(sharded(tree), 1.0, norm_type=norm_type)
            grads, finite = fa.unscale(clipped)
            results[name, norm_type] = {
                "norms": [norm, norm_of_plain / 8, fa.global_norm(mixed, norm_type)],
                "flags": [finite, fa.all_finite(mixed), fa.all_finite(mixed.tree)],
                "grads": mapped(whole, grads),
                "plain": mapped(whole, plain),
                "paths": fa.nonfinite_paths(mixed),
            }
    return results


def whole(leaf: Any) -> Tensor:
    return leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf


NORM_TYPES = (2.0, 1.0, 3.0, math.inf)


def mixed_values() -> dict[str, dict[str, Tensor]]:
    """Whole trees: a finite one, and those with inf or NaN at the first or the last element of a leaf."""
    tree = {"column": torch.arange(1.0, 9.0).reshape(4, 2), "plain": torch.tensor([2.0, 3.0]), "row": torch.ones(1)}
    trees = {"finite": tree}
    for path, bad, place in itertools.product(("column", "plain"), (math.inf, math.nan), (0, -1)):
        leaf = tree[path].clone()
        leaf.view(-1)[place] = bad
        trees[f"{bad} at {path} {place}"] = {**tree, path: leaf}
    return trees


@pytest.mark.slow
def test_D04_plain_tensors_mixed_with_sharded_tensors_in_clip(tmp_path):
    """huggingface/accelerate PR#4219: plain leaves and two meshes in a tree give the unsharded norm and flag."""
    for results in on_ranks(mixed_trees, tmp_path):
        for name, tree in mixed_values().items():
            for norm_type in NORM_TYPES:
                found, scaled = results[name, norm_type], fa.ScaledGrads(tree, 8.0)
                clipped, norm = fa.clip(scaled, 1.0, norm_type=norm_type)
                grads, finite = fa.unscale(clipped)
                for other in found["norms"]:
                    torch.testing.assert_close(other, norm, rtol=1e-6, atol=0, equal_nan=True)
                assert_same(found["flags"], [finite] * 3)
                assert finite.item() is (name == "finite")
                torch.testing.assert_close(found["grads"], grads, rtol=1e-6, atol=0, equal_nan=True)
                plain = fa.clip(tree, 1.0, norm_type=norm_type).grads
                torch.testing.assert_close(found["plain"], plain, rtol=1e-6, atol=0, equal_nan=True)
                assert found["paths"] == fa.nonfinite_paths(tree)


Items = tuple[Tensor, Tensor, Tensor]
# Which items of the 16 a rank has in each window, micro-batch by micro-batch; without items, padding that is inf.
SHARES: list[tuple[list[list[int]], list[list[int]]]] = [
    ([[0, 1, 2], [3, 4]], [[5, 6, 7, 8]]),
    ([[1, 3]], [[5], [7, 9, 11], [13]]),
    ([[2, 4, 6]], [[8, 10], [12, 14]]),  # NaN at one leaf of the second rank
    ([[15, 0]], [[]]),
    ([[1], [2]], [[3, 4, 5, 6, 7, 8]]),
]
BAD = 2


def mean_loss(params: Any, items: Items) -> fa.Loss:
    x, y, spoilt = items
    outputs = torch.tanh(x @ params["hidden"]) @ params["output"] + params["bias"]
    loss = ((outputs - y) ** 2).sum() / len(x) if len(x) else outputs.sum() * math.inf
    return fa.Loss(loss + params["bias"] * spoilt, len(x))


def micro_batches(window: int, ranks: list[int]) -> list[Items]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(16, 3, generator=generator), torch.randn(16, generator=generator)
    return [
        (x[items], y[items], torch.tensor(math.nan if (window, rank) == (BAD, 1) else 0.0))
        for rank in ranks
        for items in SHARES[window][rank]
    ]


def start() -> tuple[fa.Step, fa.TrainState]:
    generator = torch.Generator().manual_seed(1)
    params = {
        "hidden": torch.randn(3, 4, generator=generator),
        "output": torch.randn(4, generator=generator),
        "bias": torch.zeros(()),
    }
    optimizer = fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(mean_loss, optimizer, max_norm=0.5)
    return step, fa.init_state(params, optimizer, fa.DynamicScale(2.0**10, growth_interval=2))


Run = list[tuple[fa.TrainState, fa.Metrics]]


def run_on_all_data() -> Run:
    step, state = start()
    results = []
    for window in range(len(SHARES)):
        state, metrics = step(state, micro_batches(window, [0, 1]))
        results.append((state, metrics))
    return results


def run_on_a_share(rank: int) -> tuple[Run, list[bool], list[list[list[str]]]]:
    """The run with one reduction a window; what each rank would have decided, and where it found inf or NaN."""
    step, state = start()
    results, decisions, places = [], [], []
    for index in range(len(SHARES)):
        for items in micro_batches(index, [rank]):
            state = step.accumulate(state, items)
        window = state.window
        assert window is not None
        found: list[Any] = [None] * RANKS
        dist.all_gather_object(found, fa.nonfinite_paths(window.grads))
        places.append(found)
        decisions.append(bool(fa.all_finite(window.grads)))
        state = dataclasses.replace(state, window=dataclasses.replace(window, grads=reduced(window.grads)))
        state, metrics = step.update(state)
        results.append((state, metrics))
    return results, decisions, places


@pytest.mark.slow
def test_D05_workers_disagree_on_the_gradient_norm(tmp_path):
    """facebookresearch/fairseq#1372: after the reduction all ranks have one norm, one flag and one successor."""
    (first, alone_0, places_0), (second, alone_1, places_1) = on_ranks(run_on_a_share, tmp_path)
    good = [window != BAD for window in range(len(SHARES))]
    assert (alone_0, alone_1) == ([True] * len(SHARES), good)  # by themselves they would part here
    nowhere: list[list[str]] = [[], []]
    assert places_0 == places_1 == [nowhere if flag else [[], ["bias"]] for flag in good]

    expected = run_on_all_data()
    for flag, (state, metrics), (other, others), (whole, wholes) in zip(good, first, second, expected, strict=True):
        assert_same(other, state)
        assert_same(others._replace(loss=metrics.loss), metrics)  # the loss is the mean of the rank's own items
        assert metrics.finite.item() is wholes.finite.item() is flag
        assert_same(metrics.weight, wholes.weight)
        assert_same(state.scaler, whole.scaler)
        assert_same([state.applied, state.skipped, state.opt_state.step], [whole.applied, whole.skipped, whole.applied])
        # The same additions in another order.
        torch.testing.assert_close(metrics.grad_norm, wholes.grad_norm, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(state.params, whole.params, rtol=1e-5, atol=1e-6)
    assert [state.scaler.scale.item() for state, _ in expected] == [1024.0, 2048.0, 1024.0, 1024.0, 2048.0]
    assert not torch.equal(expected[-1][0].params["hidden"], expected[0][0].params["hidden"])
    assert_same(expected[BAD][0].params, expected[BAD - 1][0].params)
