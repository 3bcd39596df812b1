"""Faults that people met in public: D, those about a run on several ranks.

See test_cases.py; the ids are in the names. The ranks are processes that speak by gloo.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import functional_amp as fa
from functional_amp.ranks import gather, join_window, part_window, shard, sharded
from functional_amp.testing import assert_same_bits
from tests.distributed_runs import Setup, data_parallel, single, whole, windows_of
from tests.on_ranks import on_ranks
from tests.test_cases import linear_loss


def scales_that_differ(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    results = []
    for donate in (False, True):
        optimizer = fa.sgd(1.0)
        step = fa.make_step(linear_loss, optimizer, mesh=mesh, donate=donate)
        scaler = fa.DynamicScale(8.0 * 2**rank, growth_interval=4)
        scaler = dataclasses.replace(scaler, growth_tracker=torch.tensor(2 * rank, dtype=torch.int32))
        state = fa.init_state({"w": torch.zeros(1)}, optimizer, scaler)
        state = step.accumulate(state, torch.tensor([1.0 + 2 * rank]))
        joined = join_window(step, state).window
        assert joined is not None
        results.append((joined.grads, *step.update(state)))
    return results


def test_D11_scales_that_differ_between_ranks(tmp_path):
    """pytorch/pytorch#136009: sums are brought to the smaller scale, and all go on with the scaler that has it."""
    ranks = on_ranks(scales_that_differ, tmp_path, 2)
    assert_same_bits(ranks[0], ranks[1])
    for grads, state, metrics in ranks[0]:
        assert_same_bits(grads, fa.ScaledGrads({"w": torch.tensor([32.0])}, 8.0, 2.0))
        assert state.params["w"].item() == -2.0
        assert (metrics.scale.item(), metrics.weight.item(), metrics.grad_norm.item()) == (8.0, 2.0, 2.0)
        assert (state.scaler.scale.item(), state.scaler.growth_tracker.item()) == (8.0, 1)


def inf_on_one_rank(rank: int) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    optimizer = fa.sgd(1.0, momentum=0.9)
    step = fa.make_step(linear_loss, optimizer, mesh=mesh)
    results = []
    for bad in ([0], [1], [0, 1]):
        before = fa.init_state({"w": torch.ones(1)}, optimizer, fa.DynamicScale(2.0))
        results.append((before, *step(before, [torch.tensor([math.inf if rank in bad else 1.0])])))
    return results


def test_D12_inf_on_one_rank(tmp_path):
    """pytorch/pytorch PR#115710: all ranks skip, whichever has it, and all back off."""
    first, second = on_ranks(inf_on_one_rank, tmp_path, 2)
    assert_same_bits(first, second)
    for before, after, metrics in first:
        assert not metrics.finite and not metrics.applied
        assert after.scaler.scale.item() == 1.0
        assert_same_bits((after.params, after.opt_state), (before.params, before.opt_state))


def close(found: list[Any], expected: list[Any]) -> None:
    """The law: parameters within 2e-7, decisions and counters exactly, loss 1e-5, norm 1e-4."""
    for (state, metrics), (want, wanted) in zip(found, expected, strict=True):
        torch.testing.assert_close(state.params, want.params, rtol=0, atol=2e-7)
        assert_same_bits(state.scaler, want.scaler)
        counters = "applied", "skipped", "skipped_in_a_row"
        assert_same_bits([getattr(state, name) for name in counters], [getattr(want, name) for name in counters])
        for name in ("finite", "applied", "scale", "weight"):
            assert_same_bits(getattr(metrics, name), getattr(wanted, name))
        torch.testing.assert_close(metrics.loss, wanted.loss, rtol=1e-5, atol=0, equal_nan=True)
        torch.testing.assert_close(metrics.grad_norm, wanted.grad_norm, rtol=1e-4, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_D13_token_mean_over_ranks_and_micro_batches(tmp_path, ranks):
    """huggingface/transformers#34242: uneven token counts give what one process gives on all tokens."""
    windows, setup = windows_of(3, ranks), Setup(donate=True)
    results = on_ranks(data_parallel, tmp_path, ranks, windows, setup)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    close(results[0], single(windows, setup))


LEAVES = {"bias": torch.tensor([3.0]), "weight": torch.tensor([[4.0], [12.0], [84.0]])}  # of norm 85.1


def mixed_tree(bad: float | None = None) -> dict[str, Tensor]:
    tree = {name: leaf.clone() for name, leaf in LEAVES.items()}
    if bad is not None:
        tree["weight"][2, 0] = bad
    return tree


def stages(scaled: fa.ScaledGrads) -> Any:
    clipped, norm = fa.clip(scaled, 1.0)
    finite = fa.all_finite(scaled)
    grads, flag = fa.unscale(clipped)
    optimizer = fa.adamw(0.1)
    params = {name: torch.ones_like(leaf) for name, leaf in scaled.tree.items()}
    after, _ = fa.maybe_step(optimizer, params, optimizer.init(params), clipped, finite)
    plain = fa.clip(scaled.tree, 1.0)
    return norm, finite, flag, fa.global_norm(scaled, math.inf), fa.global_norm(scaled, 3.0), grads, after, plain


def one_norm(rank: int, compiled: bool) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    run = torch.compile(stages, fullgraph=True, backend="aot_eager") if compiled else stages
    results = {}
    for bad in (None, math.nan, math.inf):
        tree = mixed_tree(bad)
        tree["weight"] = distribute_tensor(tree["weight"], mesh, [Shard(0)])
        results[str(bad)] = whole(run(fa.ScaledGrads(tree, 8.0)))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_D14_one_norm_for_all_shards(tmp_path, compiled):
    """pytorch/pytorch#170862: sharded leaves beside plain ones: one norm, one flag, plain, on all ranks."""
    ranks = on_ranks(one_norm, tmp_path, 2, compiled, limit=300)
    assert_same_bits(ranks[0], ranks[1])
    for bad, found in ranks[0].items():
        expected = stages(fa.ScaledGrads(mixed_tree(None if bad == "None" else float(bad)), 8.0))
        assert [type(number) for number in found[:5]] == [Tensor] * 5
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0, equal_nan=True)
        assert bool(found[1]) is bool(found[2]) is (bad == "None")


def start(ranks: int, kind: str) -> tuple[fa.Step, fa.TrainState]:
    """A step and its first state: the loss is the mean over all items, whoever has them."""

    def loss_fn(params: Any, x: Tensor) -> fa.Loss:
        output = torch.tanh(x @ gather(params["weight"]).T) @ gather(params["head"]) + params["bias"]
        return fa.Loss(output.square().mean(), weight=len(x))

    generator = torch.Generator().manual_seed(5)
    params: Any = {"weight": torch.randn(5, 3, generator=generator), "head": torch.randn(5, generator=generator)}
    params["bias"] = torch.zeros(())
    optimizer, scaler = fa.adamw(1e-2), fa.DynamicScale(2.0**10, growth_interval=2)
    if kind == "one process":
        return fa.make_step(loss_fn, optimizer), fa.init_state(params, optimizer, scaler)
    mesh: Any = init_device_mesh("cpu", (ranks,))
    inner: Any = mesh
    if kind == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
        inner = mesh["shard"]
    if kind != "data parallel":
        params, loss_fn = shard(params, mesh), sharded(loss_fn, inner)
    return fa.make_step(loss_fn, optimizer, mesh=mesh), fa.init_state(params, optimizer, scaler)


def items(window: int) -> Tensor:
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(window))


def share(window: int, rank: int, ranks: int) -> list[Tensor]:
    """The micro-batches of a rank: two in each window, of the 16 items of the window."""
    return list(items(window).chunk(2 * ranks))[2 * rank : 2 * rank + 2]


def saved_in_mid_window(rank: int, ranks: int, kind: str, folder: Path, asynchronous: bool) -> Any:
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    step, state = start(ranks, kind)
    state, _ = step(state, share(0, rank, ranks))
    first, second = share(1, rank, ranks)
    state = step.accumulate(state, first)
    flat = fa.state_dict(join_window(step, state), position=1)
    if asynchronous:
        group: Any = dist.new_group(backend="gloo")
        saving: Any = dcp.async_save(flat, checkpoint_id=folder, process_group=group)
    else:
        saving = None
        dcp.save(flat, checkpoint_id=folder)
    state = step.accumulate(state, second)  # beside the saving
    state, metrics = step.update(state)
    if saving is not None:
        saving.result()
    return whole(flat), whole(state), metrics


def resumed(rank: int, ranks: int, kind: str, folder: Path, saved_by: int) -> Any:
    step, template = start(ranks, kind)
    state, extra = fa.load_shards(folder, template)
    assert extra["extra/position"].item() == 1
    flat = whole(fa.state_dict(state))
    mine = part_window(step, state) if step.mesh is not None else state
    rest = [share(1, other, saved_by)[1] for other in range(saved_by)]  # what had not been seen
    parts = torch.cat(rest).chunk(ranks)
    state = step.accumulate(mine, parts[rank])
    state, metrics = step.update(state)
    return flat, whole(state), metrics


RESUMED_ON = [(1, "one process"), (2, "data parallel"), (2, "fsdp"), (4, "fsdp"), (4, "hsdp")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "kind", "asynchronous"),
    [(2, "data parallel", False), (2, "fsdp", False), (2, "fsdp", True), (4, "hsdp", False)],
)
def test_D15_resume_on_another_number_of_ranks(tmp_path, ranks, kind, asynchronous):
    """pytorch/torchtitan#811, Fast-LLM#436: saved in mid-window, loaded on 1, 2 and 4 ranks."""
    folder = tmp_path / "shards"
    saved = on_ranks(saved_in_mid_window, tmp_path / "save", ranks, ranks, kind, folder, asynchronous)
    expected, state, metrics = saved[0]
    for other in saved[1:]:
        assert_same_bits(other, saved[0])
    del expected["extra/position"]
    for number, how in RESUMED_ON:
        found = on_ranks(resumed, tmp_path / f"{number} {how}", number, number, how, folder, ranks)
        for flat, after, after_metrics in found:
            assert_same_bits(flat, expected)  # parameters, moments, counters, and the open window
            torch.testing.assert_close(after.params, state.params, rtol=0, atol=2e-7)
            assert_same_bits(after.scaler, state.scaler)
            assert_same_bits(after_metrics.weight, metrics.weight)
            torch.testing.assert_close(after_metrics.loss, metrics.loss, rtol=1e-5, atol=0)


def out_of_batches(rank: int, donate: bool) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(regression, optimizer, mesh=mesh, max_norm=0.5, donate=donate)
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.DynamicScale(2.0**10))
    results = []
    for counts in WINDOWS:
        batches = items(sum(counts)).split(2)
        mine = batches[: counts[0]] if rank == 0 else batches[counts[0] : counts[0] + counts[1]]
        state, metrics = step(state, list(mine))
        results.append((dataclasses.replace(state) if not donate else whole(state), metrics))
    return results


WINDOWS = [(0, 3), (2, 1), (0, 0), (1, 0)]


def regression(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"] - 1).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_D17_a_rank_that_runs_out_of_batches(tmp_path, donate):
    """pytorch/pytorch#38174, Lightning-AI/pytorch-lightning#20404: windows of other lengths, and of none."""
    first, second = on_ranks(out_of_batches, tmp_path, 2, donate)
    assert_same_bits(first, second)
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(regression, optimizer, max_norm=0.5)
    state = fa.init_state({"w": torch.ones(3)}, optimizer, fa.DynamicScale(2.0**10))
    expected = []
    for counts in WINDOWS:
        if sum(counts):
            state, metrics = step(state, list(items(sum(counts)).split(2)[: sum(counts)]))
            expected.append((state, metrics))
    found = [result for result, counts in zip(first, WINDOWS, strict=True) if sum(counts)]
    for (after, metrics), (want, wanted) in zip(found, expected, strict=True):
        torch.testing.assert_close(after.params, want.params, rtol=0, atol=2e-7)
        assert_same_bits(metrics.weight, wanted.weight)
        torch.testing.assert_close(metrics.loss, wanted.loss, rtol=1e-5, atol=0)
    empty, metrics = first[2]
    assert not metrics.applied and metrics.weight == 0  # a window of nobody is not applied
    assert_same_bits(empty.params, first[1][0].params)
