"""How leaves lie in memory after a file: as before, dimensions of size 0 and 1 included."""

from __future__ import annotations

import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa

SHAPES = [(), (1,), (3,), *itertools.product((0, 1, 3), repeat=2), (2, 1, 3), (0, 1, 2), (8, 1, 3, 3), (1, 8, 3, 3)]


def in_every_order(shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Leaves of one shape, which lie in memory in every order of their dimensions."""
    leaves = {}
    for way in itertools.permutations(range(len(shape))):
        back = [way.index(dim) for dim in range(len(shape))]
        leaves[f"w{''.join(map(str, way))}"] = torch.randn([shape[dim] for dim in way]).permute(back)
    return leaves


def state_of(params: Any) -> fa.TrainState:
    return fa.init_state(params, fa.adam(), fa.NoScale())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_file_gives_each_leaf_its_strides_back(shape: tuple[int, ...], tmp_path: Path):
    state = state_of(in_every_order(shape))
    fa.save(tmp_path / "run.ckpt", fa.state_dict(state))
    blank = state_of({name: torch.zeros(shape) for name in state.params})
    loaded = fa.load_state_dict(blank, fa.load(tmp_path / "run.ckpt"))
    for name, leaf in state.params.items():
        assert loaded.params[name].stride() == leaf.stride(), name
        assert torch.equal(loaded.params[name], leaf)
        assert loaded.opt_state.exp_avg[name].stride() == state.opt_state.exp_avg[name].stride()


def test_torchs_own_formats_and_copies_keep_the_strides_too(tmp_path: Path):
    state = state_of(in_every_order((8, 1, 3, 3)))
    torch.save(fa.state_dict(state), tmp_path / "flat.pt")
    flat = fa.load_state_dict(state_of(state.params), torch.load(tmp_path / "flat.pt"))
    for other in (flat, copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
        for name, leaf in state.params.items():
            assert other.params[name].stride() == leaf.stride()


def test_a_flat_dict_without_the_order_of_a_dimension_of_size_one_still_loads():
    """Files that were written before it was recorded."""
    state = state_of({"w": torch.randn(8, 1, 3, 3).to(memory_format=torch.channels_last)})
    old = {name: leaf for name, leaf in fa.state_dict(state).items() if not name.startswith("dim_order/")}
    assert torch.equal(fa.load_state_dict(state, old).params["w"], state.params["w"])


def test_an_expanded_leaf_is_saved_row_by_row():
    flat = fa.state_dict(state_of({"w": torch.ones(2, 3), "v": torch.arange(3.0).expand(2, 3)}))
    assert not any(name.startswith("dim_order/") for name in flat)
    assert torch.equal(flat["params/v"], torch.arange(3.0).expand(2, 3))


def test_a_convolution_over_grey_images_goes_on_with_the_same_bits(tmp_path: Path):
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2)
    module: Any = nn.Sequential(*layers)
    apply, params, _ = fa.from_module(module.to(memory_format=torch.channels_last))
    optimizer = fa.adamw(1e-2)
    step = fa.make_step(lambda p, x: apply(p, x).square().mean(), optimizer)
    kept = fa.init_state(params, optimizer, fa.NoScale())
    fa.save(tmp_path / "run.ckpt", fa.state_dict(kept))
    resumed = fa.load_state_dict(fa.init_state(params, optimizer, fa.NoScale()), fa.load(tmp_path / "run.ckpt"))
    for _ in range(6):
        x = torch.randn(4, 1, 8, 8)
        kept, resumed = step(kept, [x])[0], step(resumed, [x])[0]
    assert all(torch.equal(kept.params[name], resumed.params[name]) for name in params)
