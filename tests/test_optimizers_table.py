"""The table of docs/optimizers.md: what each optimizer of torch.optim does here, found out by running it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import functional_amp as fa
from functional_amp.testing import assert_same_bits, mapped
from functional_amp.testing.conformance import optimizer as laws
from tests.test_cases_ranks import on_ranks
from tests.test_from_torch import CLASSES, OPTIM, from_torch, gradients, params_of

DOC = Path(__file__).parent.parent / "docs" / "optimizers.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
COLUMNS: dict[str, Callable[[Any, Any], None]] = {
    "one graph": laws.it_compiles_to_one_graph,
    "vmap": laws.an_ensemble_under_vmap_is_its_members,
    "donation": laws.donated_step_equals_pure_step,
    "skip": laws.a_skipped_update_is_a_transaction,
}


def holds(law: Callable[..., None], *given: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            law(*given)
        except (AssertionError, RuntimeError, TypeError):
            return False
    return True


def has_a_derivative(cls: Any, params: dict[str, Tensor]) -> None:
    """The derivative of an update by a gradient, against a difference."""
    optimizer = from_torch(cls, differentiable=True)
    params = mapped(Tensor.double, params)
    grads = mapped(Tensor.double, gradients(params, 0))
    state = optimizer.step(grads, optimizer.init(params), params)[1]

    def after(x: Tensor) -> Tensor:
        return optimizer.step({**grads, "p0": x}, state, params)[0]["p0"].sum()

    found, h = torch.func.grad(after)(grads["p0"])[0, 0], 1e-6
    shifted = [grads["p0"].clone(), grads["p0"].clone()]
    shifted[0][0, 0] += h
    shifted[1][0, 0] -= h
    expected = (after(shifted[0]) - after(shifted[1])) / (2 * h)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-8)


def on_shards(rank: int) -> dict[str, bool]:
    """Whether two updates of DTensors have the bits of the imperative optimizer on the same DTensors."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}

    def sharded(tree: dict[str, Tensor]) -> dict[str, Any]:
        return mapped(lambda leaf: distribute_tensor(leaf, mesh, [Shard(0)]) if leaf.ndim else leaf, tree)

    def local(tree: dict[str, Any]) -> dict[str, Tensor]:
        return mapped(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, tree)

    def check(cls: Any) -> None:
        params = sharded(params_of(cls))
        optimizer, theirs = from_torch(cls), mapped(lambda leaf: leaf.detach().clone(), params)
        loop, state = cls(list(theirs.values())), optimizer.init(params)
        for seed in range(2):
            grads = sharded(gradients(params_of(cls), seed))
            scaled = fa.ScaledGrads(mapped(lambda leaf: leaf * 8, grads), 8.0)
            params, state = fa.maybe_step(optimizer, params, state, scaled, torch.tensor(True))
            for leaf, grad in zip(theirs.values(), grads.values(), strict=True):
                leaf.grad = grad
            loop.step()
        assert all(type(params[name]) is type(leaf) for name, leaf in theirs.items())
        assert_same_bits(local(params), local(theirs))

    for name in CLASSES:
        found[name] = holds(check, getattr(OPTIM, name))
    return found


def table(folder: Path) -> str:
    shards = on_ranks(on_shards, folder)
    lines = [f"| optimizer | {' | '.join(COLUMNS)} | DTensors | derivative |", f"|---|{'---|' * (len(COLUMNS) + 2)}"]
    for name in CLASSES:
        cls = getattr(OPTIM, name)
        params = params_of(cls)
        cells = [holds(law, from_torch(cls), params) for law in COLUMNS.values()]
        cells += [all(of_rank[name] for of_rank in shards), holds(has_a_derivative, cls, params)]
        lines.append(f"| {name} | {' | '.join('yes' if cell else 'no' for cell in cells)} |")
    return "\n".join(lines) + "\n"


def written(text: str, new: str) -> str:
    before, rest = text.split(BEGIN)
    return before + BEGIN + new + END + rest.split(END)[1]


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_the_table_in_the_docs_is_what_the_optimizers_do(tmp_path: Path):
    text = DOC.read_text(encoding="utf-8")
    assert written(text, table(tmp_path)) == text, "write it anew: python -m tests.test_optimizers_table"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        new = table(Path(directory))
    sys.stdout.write(new)
    DOC.write_text(written(DOC.read_text(encoding="utf-8"), new), encoding="utf-8")
