"""One call that raises where a run no longer moves."""

from __future__ import annotations

from functional_amp.debug.health import skips_in_a_row
from functional_amp.debug.nonfinite import nonfinite_paths
from functional_amp.tree import PyTree
from functional_amp.values.grads import ScaledGrads
from functional_amp.values.state import TrainState


def check_progress(state: TrainState, *, max_skipped: int = 100, grads: ScaledGrads | PyTree = None) -> None:
    """Raise where the run has skipped so many updates in a row that it is stuck.

    The finding `skips in a row` of `check_health`, alone and as an error, and later: after 100 skips, not 30. It
    reads three numbers on the host, and waits for the device to get there: call it now and then.

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
    stuck = skips_in_a_row(state, max_skipped)
    if stuck:
        where = f" Not finite: {nonfinite_paths(grads)}." if grads is not None else ""
        raise FloatingPointError(f"{stuck[0].found}{where} {stuck[0].advice}")
