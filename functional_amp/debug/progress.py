"""Looking at a run from the host: which leaf is not finite, and is the run still moving.

These functions read tensors on the host; none of them belongs inside a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from functional_amp.backward import ScaledGrads
from functional_amp.checks import check_number
from functional_amp.state import TrainState
from functional_amp.tree import PyTree, flatten_tensors, is_differentiable, paths
from functional_amp.unscale import largest


def nonfinite_paths(tree: ScaledGrads | PyTree) -> list[str]:
    """The paths of the leaves that hold inf or NaN, in the order of the tree.

    Args:
        tree: gradients, parameters, or any pytree of tensors.

    Raises:
        TypeError: for a leaf that is no tensor; the path is named.

    >>> import torch
    >>> nonfinite_paths({"a": torch.ones(1), "b": [torch.tensor([float("nan")])]})
    ['b.0']
    """
    tree = tree.tree if isinstance(tree, ScaledGrads) else tree
    return [
        path
        for path, leaf in zip(paths(tree), flatten_tensors(tree, "tree").leaves, strict=True)
        if is_differentiable(leaf) and not bool(torch.isfinite(largest([leaf])))
    ]


def check_progress(state: TrainState, *, max_skipped: int = 100, grads: ScaledGrads | PyTree = None) -> None:
    """Raises where the run has skipped so many updates in a row that it is stuck.

    Call it now and then: it reads one counter on the host, and waits for the device to get there.

    Args:
        state: the state after an update.
        max_skipped: how many skipped updates in a row are still nothing to worry about. A start at
            2**16 costs a few; more than 30 mean that no scale helps.
        grads: the last gradients, if at hand, to name the leaves that are not finite.

    Raises:
        FloatingPointError: if more updates in a row were skipped.
        TypeError, ValueError: for a state that is no TrainState, a max_skipped that is no int >= 0.

    >>> import torch
    >>> from functional_amp import init_state, sgd
    >>> check_progress(init_state(torch.ones(1), sgd(0.1)))
    """
    if not isinstance(state, TrainState):
        raise TypeError(f"state: found {type(state).__name__}, expected the TrainState of init_state or of a step.")
    check_number(max_skipped, "max_skipped", "an int", integer=True)
    if max_skipped < 0:
        raise ValueError(f"max_skipped: found {max_skipped}, expected at least 0.")
    skipped = _read(state.skipped_in_a_row)
    if skipped <= max_skipped:
        return
    where = f" Not finite: {nonfinite_paths(grads)}." if grads is not None else ""
    raise FloatingPointError(
        f"{int(skipped)} updates in a row were skipped; the loss scale is down to {_read(state.scaler.scale):g} "
        f"after {int(_read(state.applied))} applied updates.{where} A scale that low does not help: "
        "look for inf or NaN in the data, the parameters or the loss itself."
    )


def _read(scalar: Tensor) -> float:
    return scalar.detach().max().item()
