"""Laws of a run on several ranks: agreement, errors, messages, buffers, aux, stop, memory."""

from __future__ import annotations

import functools
import math
import os
import random
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import functional_amp as fa
from functional_amp.debug import explain
from functional_amp.ranks import Ranks, gather, shard, sharded, stop_on
from functional_amp.testing import assert_same_bits, leaves_of, mapped
from tests.distributed_runs import Setup, data_parallel, model, sharded_run, single, tensor_parallel, windows_of
from tests.on_ranks import Collectives, on_ranks, outcomes
from tests.test_cases import linear_loss
from tests.test_cases_distributed import close

AOT = {"backend": "aot_eager"}


def mesh_of(*sizes: int, names: Any = None) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def linear(mesh: Any, **options: Any) -> tuple[fa.Step, fa.TrainState]:
    optimizer = fa.sgd(1.0)
    step = fa.make_step(linear_loss, optimizer, mesh=mesh, **options)
    return step, fa.init_state({"w": torch.zeros(1)}, optimizer, fa.DynamicScale(8.0))


# What must agree with one process

CONFIGURATIONS = [
    (2, Setup(optimizer="partition", donate=True)),
    (4, Setup(compute_dtype=torch.bfloat16)),
    (4, Setup(backend="func", max_norm=None)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "setup"), CONFIGURATIONS, ids=repr)
@pytest.mark.parametrize("seed", [0, 1])
def test_data_parallel_ranks_agree_with_one_process(tmp_path, ranks, setup, seed):
    windows = windows_of(seed, ranks)
    results = on_ranks(data_parallel, tmp_path, ranks, windows, setup)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    close(results[0], single(windows, setup))


def random_setups(seed: int, n: int) -> list[tuple[str, int, Setup]]:
    """A kind of parallelism, the seed of its windows, and options of a run on four ranks."""
    chance = random.Random(seed)
    setups = []
    for index in range(n):
        kind = chance.choice(["data parallel", "fsdp", "mixed", "hsdp"])
        plain = kind == "data parallel"
        setup = Setup(
            optimizer=chance.choice(["adamw", "sgd", "partition"]),
            donate=chance.random() < 0.5,
            compute_dtype=chance.choice([None, torch.bfloat16]) if plain else None,
            backend=chance.choice(["auto", "func", "autograd"]) if plain else "auto",
            max_norm=chance.choice([None, 0.1, 0.5, math.inf]),
        )
        setups.append((kind, seed * n + index, setup))
    return setups


def of_kind(kind: str, seed: int) -> Any:
    return windows_of(seed, 4, 4, even=kind != "data parallel")


def several(rank: int, setups: Any) -> Any:
    results = []
    for kind, seed, setup in setups:
        run = data_parallel if kind == "data parallel" else functools.partial(sharded_run, kind=kind)
        results.append(run(rank, of_kind(kind, seed), setup))
    return results


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_configurations_agree_with_one_process(tmp_path, seed):
    setups = random_setups(seed, 8)
    ranks = on_ranks(several, tmp_path, 4, setups, limit=240)
    for index, (kind, window_seed, setup) in enumerate(setups):
        for other in ranks[1:]:
            assert_same_bits(other[index], ranks[0][index])
        close(ranks[0][index], single(of_kind(kind, window_seed), setup))


SHARDED = [
    ("fsdp", 2, Setup()),
    ("fsdp", 4, Setup(donate=True)),
    ("mixed", 2, Setup(optimizer="partition", donate=True)),
    ("hsdp", 4, Setup(donate=True, max_norm=None)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks", "setup"), SHARDED, ids=repr)
def test_sharded_ranks_agree_with_one_process(tmp_path, kind, ranks, setup):
    windows = windows_of(ranks, ranks, even=True)
    results = on_ranks(sharded_run, tmp_path, ranks, windows, setup, kind)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    close(results[0], single(windows, setup))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tp", "tp fsdp"])
def test_tensor_parallel_ranks_agree_with_one_process(tmp_path, kind):
    windows, setup = windows_of(0, 2, even=kind == "tp fsdp"), Setup(donate=True)
    results = on_ranks(tensor_parallel, tmp_path, 4, windows, setup, kind)
    for other in results[1:]:
        assert_same_bits(other, results[0])
    close(results[0], single(windows, setup))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "donate"), [("data parallel", False), ("fsdp", True)])
def test_compiled_ranks_agree_with_one_process_in_three_graphs(tmp_path, kind, donate):
    setup = Setup(compile=AOT, donate=donate)
    windows = [[(batches * 3)[:3] for batches in window] for window in windows_of(0, 2, 4, longest=2)]
    alike = [[[same_shape(batch) for batch in batches] for batches in window] for window in windows if all(window)]
    results = on_ranks(compiled_run, tmp_path, 2, alike, setup, kind, limit=400)
    assert [graphs for _, graphs in results] == [3, 3]
    assert_same_bits(results[0][0], results[1][0])
    close(results[0][0], single(alike, setup))


def same_shape(batch: Any) -> Any:
    """A micro-batch of four items: another shape is another graph."""
    x, y, bad = batch
    return x.repeat(4, 1)[:4], y.repeat(4)[:4], bad


def compiled_run(rank: int, windows: Any, setup: Setup, kind: str) -> Any:
    run = data_parallel if kind == "data parallel" else sharded_run
    results = run(rank, windows, setup)
    return results, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def bfloat16_reduction(rank: int) -> Any:
    mesh = mesh_of(2)
    results = []
    for donate in (False, True):
        step, state = linear(Ranks(mesh, torch.bfloat16), donate=donate)
        with Collectives() as seen:
            state, metrics = step(state, [torch.tensor([1.0 + rank / 256])])
        results.append((state, metrics, seen.bytes))
    return results


@pytest.mark.slow
def test_gradients_may_be_sent_in_bfloat16(tmp_path):
    first, second = on_ranks(bfloat16_reduction, tmp_path, 2)
    assert_same_bits(first, second)
    for state, metrics, _ in first:
        sent = torch.tensor([8.0, 8 + 8 / 256]).bfloat16()  # 8.03125 has no bfloat16
        assert state.params["w"].item() == -(sent[0] + sent[1]).item() / 16 == -1.0
        assert metrics.weight.item() == 2.0


@pytest.mark.slow
def test_overflow_in_the_sum_alone_skips_on_all_ranks(tmp_path):
    first, second = on_ranks(large_on_each, tmp_path, 2)
    assert_same_bits(first, second)
    before, (after, metrics) = first
    assert not metrics.finite and after.skipped == 1 and after.scaler.scale == 4.0
    assert_same_bits(after.params, before)


def large_on_each(rank: int) -> Any:
    step, state = linear(mesh_of(2))
    x = torch.tensor([3e37])  # times a scale of 8 a float32, but not the sum of two
    assert step.accumulate(state, x).window.grads.tree["w"].isfinite()  # pyright: ignore[reportOptionalMemberAccess]
    return state.params, step(state, [x])


# What rides along


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


def batch_norm(rank: int) -> Any:
    apply, params, buffers = fa.from_module(Normed())

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        output, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(output.square().mean() + params["norm.bias"].sum(), len(x), x.sum(), buffers)

    optimizer = fa.sgd(0.1)
    results = []
    for donate in (False, True):
        step = fa.make_step(loss_fn, optimizer, mesh=mesh_of(2), donate=donate)
        state = fa.init_state(params, optimizer, fa.NoScale(), buffers)
        results.append(step(state, [normal(rank)]))
    return results


def normal(rank: int) -> Tensor:
    return torch.randn(4 + 8 * rank, 3, generator=torch.Generator().manual_seed(rank))


@pytest.mark.slow
def test_buffers_are_the_weighted_mean_and_aux_too(tmp_path):
    first, second = on_ranks(batch_norm, tmp_path, 2)
    assert_same_bits(first, second)
    parts = [normal(0), normal(1)]
    for state, metrics in first:
        for name, statistic in (("norm.running_mean", lambda x: x.mean(0)), ("norm.running_var", lambda x: x.var(0))):
            start = 0.0 if "mean" in name else 1.0
            mean = (4 * statistic(parts[0]) + 12 * statistic(parts[1])) / 16
            torch.testing.assert_close(state.buffers[name], 0.5 * start + 0.5 * mean, rtol=1e-5, atol=1e-6)
        assert state.buffers["norm.num_batches_tracked"] == 1
        assert_same_bits(state.buffers["mask"], torch.tensor([0.0, -torch.inf]))  # what nobody changed
        aux = (4 * parts[0].sum() + 12 * parts[1].sum()) / 16
        torch.testing.assert_close(metrics.aux, aux, rtol=1e-5, atol=1e-5)


def stopped(rank: int) -> list[int]:
    """The windows after which each rank stops; the second is told to by a signal in its third."""
    with stop_on(signal.SIGTERM) as flag:
        step, state = linear(Ranks(mesh_of(2), stop=flag))
        for window in range(10):
            if (rank, window) == (1, 2):
                os.kill(os.getpid(), signal.SIGTERM)
            state, metrics = step(state, [torch.ones(1)])
            if metrics.stop:
                return [window, int(state.applied)]
    return []


@pytest.mark.slow
def test_a_signal_on_one_rank_stops_all_at_the_same_window(tmp_path):
    assert on_ranks(stopped, tmp_path, 2) == [[2, 3], [2, 3]]


# Messages


def messages(rank: int) -> Any:
    mesh, results = mesh_of(2), {}
    many = {f"{index:03}": torch.ones(64) for index in range(100)}
    for name, donate in (("pure", False), ("donated", True)):
        optimizer = fa.adamw(1e-3)
        step = fa.make_step(sum_of_squares, optimizer, max_norm=1.0, mesh=mesh, donate=donate)
        state = fa.init_state(many, optimizer)
        with Collectives() as accumulating:
            for _ in range(3):
                state = step.accumulate(state, torch.ones(()))
        with Collectives() as updating:
            state, _ = step.update(state)
        results[name] = accumulating.seen, updating.seen, updating.bytes
    loss = sharded(lambda params, x: sum_of_squares({name: gather(leaf) for name, leaf in params.items()}, x), mesh)
    optimizer = fa.adamw(1e-3)
    step = fa.make_step(loss, optimizer, max_norm=1.0, mesh=mesh)
    state = fa.init_state(shard(many, mesh), optimizer)
    with Collectives() as accumulating:
        state = step.accumulate(state, torch.ones(()))
    with Collectives() as updating:
        step.update(state)
    results["sharded"] = accumulating.seen, updating.seen, updating.bytes
    return results


def sum_of_squares(params: Any, x: Tensor) -> Tensor:
    return x * torch.stack([leaf.square().sum() for leaf in params.values()]).sum()


@pytest.mark.slow
def test_messages_of_a_window(tmp_path):
    """docs/distributed.md: accumulate sends nothing; update one small message, and one for each 25 MB."""
    for found in on_ranks(messages, tmp_path, 2):
        for name in ("pure", "donated"):
            silent, update, sent = found[name]
            assert silent == []
            assert sorted(update) == ["all_gather_into_tensor", f"all_reduce_coalesced{'_' * (name == 'donated')}"]
            assert sent == 100 * 64 * 4 + small_message(fa.DynamicScale())
        accumulating, update, sent = found["sharded"]
        counts = {kind: accumulating.count(kind) for kind in set(accumulating)}
        assert counts.pop("all_reduce_coalesced") == 1  # the weight, the loss and the aux
        assert counts == {"all_gather_into_tensor": 100, "reduce_scatter_tensor": 100}  # one each for each leaf
        assert sorted(update) == ["all_gather_into_tensor", "all_reduce_coalesced"]
        assert sent == small_message(fa.DynamicScale()) + 8  # the norm


def small_message(scaler: fa.Scaler) -> int:
    """Ten numbers and those of the scaler, in float64."""
    return 8 * (10 + len(leaves_of(scaler)))


# Errors


def refusals(rank: int) -> list[str]:
    """Each error, and after its remedy none."""
    mesh, pairs = mesh_of(2), mesh_of(1, 2, names=("replicate", "shard"))
    found = []

    def refused(call: Any, remedy: Any) -> None:
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing")
        remedy()

    step, state = linear(mesh)
    ahead = mapped(lambda leaf: leaf, state)
    if rank == 1:
        ahead = step_alone(ahead)
    batch = [torch.ones(1)]
    refused(lambda: step(ahead, batch), lambda: step(state, batch))

    optimizer = fa.sgd(0.1)
    with_aux = fa.make_step(lambda p, x: fa.Loss(linear_loss(p, x), aux=x.sum()), optimizer, mesh=mesh)
    padded = fa.make_step(lambda p, x: fa.Loss(linear_loss(p, x), weight=len(x) - 1, aux=x.sum()), optimizer, mesh=mesh)
    refused(
        lambda: with_aux(state, [batch[0]] * rank),
        lambda: padded(state, [torch.ones(1 + rank)]),
    )

    two = fa.init_state({"w": torch.zeros(1), "v": torch.zeros(1)}, optimizer, fa.NoScale(), {"a": BUFFER, "b": BUFFER})

    def both(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        return fa.Loss((params["w"] * params["v"] * x).sum(), buffers={**buffers, "ab"[rank]: x.detach()})

    def alike(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        return fa.Loss((params["w"] * params["v"] * x).sum(), buffers={"a": x.detach(), "b": x.detach()})

    freezing = fa.freeze(alike, lambda path, leaf: path == "w")
    steps = {
        name: fa.make_step(f, optimizer, mesh=mesh) for name, f in (("both", both), ("alike", alike), ("w", freezing))
    }
    refused(lambda: steps["both"](two, batch), lambda: steps["alike"](two, batch))
    refused(lambda: steps["w" if rank else "alike"](two, batch), lambda: steps["w"](two, batch))

    params = shard({"w": torch.ones(4)}, mesh)

    def loss(params: Any, x: Tensor) -> Tensor:
        return (gather(params["w"]) * x).sum()

    parted = fa.init_state(params, optimizer)
    good = fa.make_step(sharded(loss, mesh), optimizer, mesh=mesh)
    plain = fa.make_step(loss, optimizer, mesh=mesh)
    refused(lambda: plain(parted, batch), lambda: good(parted, batch))
    refused(
        lambda: fa.make_step(sharded(loss, mesh), optimizer, mesh=mesh, backend="func"),
        lambda: fa.make_step(sharded(loss, mesh), optimizer, mesh=mesh, backend="autograd")(parted, batch),
    )
    refused(
        lambda: fa.scale_backward(loss, fa.NoScale(), params, batch[0], backend="func"),
        lambda: fa.scale_backward(loss, fa.NoScale(), params, batch[0], backend="autograd"),
    )
    refused(
        lambda: fa.make_step(sharded(loss, mesh), optimizer, mesh=pairs["replicate"]),
        lambda: fa.make_step(sharded(loss, pairs["shard"]), optimizer, mesh=pairs),
    )
    refused(lambda: shard(params, mesh_of(1, 2)), lambda: shard({"w": torch.ones(4)}, pairs))
    refused(lambda: fa.make_step(loss, optimizer, mesh=2), lambda: fa.make_step(loss, optimizer, mesh=mesh))
    refused(lambda: Ranks(mesh, torch.float16), lambda: Ranks(mesh, torch.bfloat16))
    refused(lambda: fa.save("never", fa.state_dict(parted)), lambda: None)
    return found


def step_alone(state: fa.TrainState) -> fa.TrainState:
    optimizer = fa.sgd(1.0)
    return fa.make_step(linear_loss, optimizer)(state, [torch.ones(1)])[0]


BUFFER = torch.zeros(1)
MESSAGES = [
    r"RuntimeError: update: found ranks that have closed different numbers of windows.*ranks have \[0.0, 1.0\]",
    r"RuntimeError: loss_fn: found ranks with aux at different leaves.*weight=0",
    r"RuntimeError: loss_fn: found ranks with buffers at different leaves",
    r"RuntimeError: loss_fn: found ranks with gradients at different leaves.*frozen alike",
    r"TypeError: params: found 'w' sharded over the ranks.*Use make_step\(sharded\(loss_fn, mesh\)",
    r"ValueError: backend: found 'func' with sharded parameters.*Use backend='autograd'",
    r"ValueError: backend: found 'func' with sharded parameters",
    r"ValueError: mesh: found a mesh without the dimensions that sharded",
    r"ValueError: mesh: found 2 dimensions without names.*mesh_dim_names",
    r"TypeError: mesh: found int, expected a DeviceMesh",
    r"TypeError: reduce_dtype: found torch.float16.*Use torch.bfloat16",
    r"TypeError: flat\['.*'\]: found DTensor",
]


@pytest.mark.slow
def test_what_is_refused_and_that_the_remedies_work(tmp_path):
    for found in on_ranks(refusals, tmp_path, 2):
        assert len(found) == len(MESSAGES)
        for message, pattern in zip(found, MESSAGES, strict=True):
            assert re.match(pattern, message, re.DOTALL), message


def lost(rank: int, how: str) -> str:
    step, state = linear(mesh_of(2), donate=True)
    state, _ = step(state, [torch.ones(1)])
    if rank == 1:
        if how == "raises":
            raise KeyError("a bug of one rank")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    begin = time.monotonic()
    try:
        step(state, [torch.ones(1)])
    except RuntimeError as error:
        assert state.applied == 1  # given back
        return f"{time.monotonic() - begin < 20} {error}"
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "dies", "hangs"])
def test_a_lost_rank_is_an_error_on_the_others_within_the_timeout(tmp_path, how):
    (ok, message), (other_ok, _) = outcomes(lost, tmp_path, 2, how, limit=40, timeout=5)
    assert ok and not other_ok, message
    assert message.startswith("True update: found that a rank did not take part")


# What a rank can say about a window that was skipped


def explained(rank: int, bad: float) -> tuple[bool, str, bool, str]:
    step, state = linear(mesh_of(2))
    window = [torch.full((1,), 3e37 if math.isfinite(bad) else bad if rank else 1.0)]
    skipped, metrics = step(state, window)
    why = explain(step, skipped, window, scale=metrics.scale)
    return bool(metrics.applied), why.stage, why.found, why.advice


@pytest.mark.slow
def test_a_skipped_window_is_explained_by_the_rank_that_had_the_bad_micro_batch(tmp_path):
    first, second = on_ranks(explained, tmp_path / "inf", 2, math.inf)
    assert first[:3] == (False, "not on this rank", False) and "Call explain on every rank" in first[3]
    assert second[:3] == (False, "input", True)
    for found in on_ranks(explained, tmp_path / "sum", 2, 0.0):
        assert found[:3] == (False, "not on this rank", False) and "sum over the ranks left float32" in found[3]


# Addresses


def addresses(rank: int, compile: Any) -> list[bool]:
    mesh = mesh_of(2)
    params = shard({"a": torch.ones(4, 3), "b": torch.ones(3)}, mesh)
    loss = sharded(lambda p, x: (gather(p["a"]) * x + gather(p["b"])).square().mean(), mesh)
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(loss, optimizer, max_norm=1.0, mesh=mesh, donate=True, compile=compile)
    state = fa.init_state(params, optimizer)

    def places(state: fa.TrainState) -> list[int]:
        leaves = [*state.params.values(), *state.opt_state.exp_avg.values()]
        return [leaf.to_local().data_ptr() for leaf in leaves]

    same = []
    for _ in range(3):
        before = places(state)
        state, _ = step(state, [torch.ones(4, 3)])
        same.append(before == places(state))
    return same


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, AOT], ids=["eager", "compiled"])
def test_donated_sharded_states_are_written_in_place(tmp_path, compile):
    assert on_ranks(addresses, tmp_path, 2, compile, limit=300) == [[True] * 3] * 2


def held_by(rank: int) -> Any:
    """What a rank holds of parameters, moments and sums."""
    mesh = mesh_of(4)
    apply, params, _ = fa.from_module(model(), gather=torch.float32)
    loss = sharded(lambda p, x: apply(p, x).square().mean(), mesh)
    optimizer = fa.adamw(1e-3)
    step = fa.make_step(loss, optimizer, mesh=mesh)
    state = step.accumulate(fa.init_state(shard(params, mesh), optimizer), torch.ones(2, 6))
    window = state.window
    assert window is not None
    trees = state.params, state.opt_state.exp_avg, state.opt_state.exp_avg_sq, window.grads.tree
    return [sum(leaf.to_local().numel() for leaf in tree.values()) for tree in trees]


@pytest.mark.slow
def test_parameters_moments_and_sums_are_an_nth_on_each_rank(tmp_path):
    total = sum(parameter.numel() for parameter in model().parameters())
    held = on_ranks(held_by, tmp_path, 4)
    for place in range(4):
        assert sum(rank[place] for rank in held) == total
        assert max(rank[place] for rank in held) <= total / 4 + 16 + 1  # uneven leaves: the last bias has 3 elements


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_one_rank_on_cuda_by_nccl(tmp_path):
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        optimizer = fa.adamw(1e-2)
        alone = fa.make_step(linear_loss, optimizer, max_norm=1.0)
        together = fa.make_step(linear_loss, optimizer, max_norm=1.0, mesh=mesh)
        state = other = fa.init_state({"w": torch.ones(3, device="cuda")}, optimizer)
        for _ in range(3):
            x = torch.randn(3, device="cuda")
            state, metrics = alone(state, [x])
            other, others = together(other, [x])
            assert_same_bits(other, state)
            assert_same_bits(others._replace(stop=()), metrics)
    finally:
        dist.destroy_process_group()


def test_a_signal_inside_a_transform_sets_the_flag():
    def loss(x: Tensor) -> Tensor:
        signal.raise_signal(signal.SIGTERM)
        return x.sum()

    with stop_on() as flag, torch.inference_mode():
        assert not flag
        torch.func.grad(loss)(torch.ones(2))
        assert flag
