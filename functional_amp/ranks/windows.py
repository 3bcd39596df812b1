"""The open window of a run on several ranks: joined to be saved, and parted after it was loaded."""

from __future__ import annotations

from typing import Any

import torch

from functional_amp.engine.sharded import any_sharded, is_sharded
from functional_amp.engine.sharded import whole as whole_leaf
from functional_amp.engine.storage import FRESH
from functional_amp.precision import cast_floating
from functional_amp.ranks.agree import REDUCTIONS, over_ranks
from functional_amp.ranks.mesh import Inner, Ranks, as_ranks, inner_groups
from functional_amp.registry import with_fields
from functional_amp.torch_private import all_gathered
from functional_amp.tree import PyTree, flatten, map_tensors
from functional_amp.values.state import TrainState


def join_window(step: Any, state: TrainState) -> TrainState:
    """Add the open windows of all ranks, so that the state is the same on each of them and can be saved once.

    Args:
        step: the step of the run, with a mesh. All its ranks call.
        state: this rank's; it is not changed. Go on with it after saving, not with what is returned.

    Returns:
        The state with one window, that of all micro-batches so far; without one where no rank has one open.

    Raises:
        ValueError: for a step without a mesh.
        RuntimeError: as `step.update` does, where the ranks are not at the same window.
    """
    ranks, inner = _ranks_of(step)
    opened = state.window
    code = torch.full_like(state.scaler.scale, REDUCTIONS.index(None if opened is None else opened.reduction))
    for group in ranks.groups:
        code = all_gathered(code, group.size, group.name).amax()
    reduction = REDUCTIONS[int(code)]
    if reduction is None:
        return state
    with torch.no_grad():
        joined = over_ranks(ranks, inner, state, FRESH, step.compute_dtype).state
    window, params = joined.window, None
    assert window is not None
    if step.compute_dtype is not None:
        params = cast_floating(state.params, step.compute_dtype)
    return with_fields(joined, window=with_fields(window, reduction=reduction, params=params))


def part_window(step: Any, state: TrainState) -> TrainState:
    """Leave the open window of a loaded state to one rank, so that it is counted once.

    Args:
        step: the step of the run, with a mesh, of any number of ranks.
        state: what all ranks have loaded.

    Returns:
        The state as it is on the first rank, and without a window on the others. Ranks that share shards keep
        their parts of it, and the first of them the leaves that are whole.

    Raises:
        ValueError: for a step without a mesh.
    """
    ranks, inner = _ranks_of(step)
    window, coordinate = state.window, ranks.mesh.get_coordinate()
    assert coordinate is not None
    if window is None:
        return state
    places = list(zip(ranks.groups, coordinate, strict=True))
    if any([place != 0 for group, place in places if group.ranks not in inner]):
        return with_fields(state, window=None)
    if all([place == 0 for _, place in places]):
        return state
    tree = map_tensors(lambda leaf: leaf if is_sharded(leaf) else torch.zeros_like(leaf), window.grads.tree)
    return with_fields(state, window=with_fields(window, grads=with_fields(window.grads, tree=tree)))


def whole(tree: PyTree) -> PyTree:
    """Gather each DTensor of a tree, a state or a flat dict to whole tensors. All ranks must call.

    The way from a sharded run to one file: `save(path, whole(state_dict(state)))` on one rank. Each rank holds
    all of it for that long; `torch.distributed.checkpoint` saves the parts where they are.
    """
    if not any_sharded(flatten(tree).leaves):
        return tree
    with torch.no_grad():
        return map_tensors(whole_leaf, tree)


def _ranks_of(step: Any) -> tuple[Ranks, Inner]:
    ranks = as_ranks(step.mesh)
    if ranks is None:
        raise ValueError("step: found no mesh, expected one. Use make_step(..., mesh=mesh) on several ranks.")
    return ranks, inner_groups(step.loss_fn, ranks)
