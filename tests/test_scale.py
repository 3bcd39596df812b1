"""The formulas of docs/scale.md, against what small runs store and send."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from functional_amp.ranks import shard, sharded
from functional_amp.testing import leaves_of
from tests.on_ranks import Collectives, on_ranks

LAYERS, WIDTH, RANKS, K = 6, 64, 2, 3


def formulas() -> dict[str, Any]:
    text = (Path(__file__).parent.parent / "docs" / "scale.md").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    return names


class Blocks(nn.Module):
    def __init__(self, again: bool):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


class Peak(Collectives):
    """Also watches how many bytes of tensors that are as large as a layer live at once."""

    def __init__(self):
        super().__init__()
        self.given: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self.bytes, len(self.seen)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if len(self.seen) > before[1]:
            self.given[self.seen[-1]] = self.given.get(self.seen[-1], 0) + self.bytes - before[0]
        return result


def counted(rank: int, kind: str, again: bool) -> Any:
    mesh = init_device_mesh("cpu", (RANKS,))
    torch.manual_seed(0)
    in_parts = kind == "sharded"
    apply, params, _ = fa.from_module(Blocks(again), gather=torch.bfloat16 if in_parts else None)

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        return apply(params, x.bfloat16() if in_parts else x).float().square().mean()

    optimizer = fa.adamw(1e-3)
    step = fa.make_step(sharded(loss_fn, mesh) if in_parts else loss_fn, optimizer, mesh=mesh, donate=True)
    state = fa.init_state(shard(params, mesh) if in_parts else params, optimizer)
    state, _ = step(state, [torch.ones(2, WIDTH)])  # the first call is a rehearsal as well
    with Peak() as sent:
        for _ in range(K):
            state = step.accumulate(state, torch.ones(2, WIDTH))
        window = state.window
        assert window is not None
        trees = {"parameters": state.params, "moments": state.opt_state[1:], "sums": window.grads.tree}
        held = {name: sum(map(local_bytes, leaves_of(tree))) for name, tree in trees.items()}
        step.update(state)
    return held, sent.given, len(sent.seen)


def local_bytes(leaf: Any) -> int:
    return (leaf.to_local() if hasattr(leaf, "to_local") else leaf).nbytes


# docs/distributed.md: 10 numbers and those of the scaler, which are a scale and two trackers
SMALL = {"data parallel": 8 * 13, "sharded": 8 * 13}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "again"), [("data parallel", False), ("sharded", False), ("sharded", True)])
def test_formulas_are_what_a_run_stores_and_sends(tmp_path, kind, again):
    names, p = formulas(), LAYERS * WIDTH**2
    n = RANKS if kind == "sharded" else 1
    expected = names["stored"](p, n)
    for held, given, count in on_ranks(counted, tmp_path, RANKS, kind, again):
        assert held == {name: expected[name] for name in held}
        gathers = given.pop("all_gather_into_tensor")
        if kind == "data parallel":
            assert given == {"all_reduce_coalesced_": names["given_data_parallel"](p)}
            assert gathers == SMALL[kind]
            assert count == names["messages"](LAYERS, 1, K)
            continue
        sent = names["given_sharded"](p, n, K, c=2, again=int(again))
        assert gathers - SMALL[kind] == sent["gathers"]
        assert given.pop("reduce_scatter_tensor") == sent["reduce-scatters"]
        assert given == {"all_reduce_coalesced": K * 16 + 8}  # weight and loss; the norm
        assert count == names["messages"](LAYERS, 1, K, again=int(again), sharded=True)


def peak_of_a_micro_batch(rank: int) -> float:
    """The bytes alive at most in one micro-batch, above those before it, over the bytes of all parameters."""
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile

    mesh = init_device_mesh("cpu", (RANKS,))
    apply, params, _ = fa.from_module(Blocks(True), gather=torch.float32)
    loss = sharded(lambda params, x: apply(params, x).square().mean(), mesh)
    optimizer = fa.sgd(1e-3)
    step = fa.make_step(loss, optimizer, mesh=mesh, donate=True)
    state = step.accumulate(fa.init_state(shard(params, mesh), optimizer), torch.ones(1, WIDTH))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True) as profiled:
        state = step.accumulate(state, torch.ones(1, WIDTH))
    nodes = list(profiled.profiler.kineto_results.experimental_event_tree())  # pyright: ignore
    allocations = []
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.tag == _EventType.Allocation:
            allocations.append((node.start_time_ns, getattr(node.extra_fields, "alloc_size", 0)))
    alive, peak = 0, 0
    for _, size in sorted(allocations):
        alive += size
        peak = max(peak, alive)
    return peak / (4 * LAYERS * WIDTH**2)


@pytest.mark.slow
def test_the_peak_of_a_micro_batch_with_blocks_that_gather_again(tmp_path):
    """Parameters that are whole live one layer at a time: less than half of them for six layers, with gradients."""
    for peak in on_ranks(peak_of_a_micro_batch, tmp_path, RANKS):
        assert 1 / LAYERS < peak < 1.1
