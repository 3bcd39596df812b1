"""A whole window at once: one micro-step in the graph, whatever the length of the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from functional_amp.mode import in_graph, loop_body
from functional_amp.registry import with_fields
from functional_amp.torch_private import scan
from functional_amp.tree import Flat, PyTree, flatten, map_tensors, paths
from functional_amp.values.state import TrainState

Accumulate = Callable[[TrainState, Any], TrainState]


def scan_window(accumulate: Accumulate, state: TrainState, micro_batches: PyTree) -> TrainState:
    """Folds `accumulate` over the first dimension of stacked micro-batches.

    In a graph by torch's `scan`, after a first micro-batch that opens the window; in eager mode by a loop.
    """
    flat = flatten(micro_batches)
    n = _length(micro_batches, flat)
    if not in_graph():
        for index in range(n):
            state = accumulate(state, map_tensors(lambda leaf, index=index: leaf[index], micro_batches))
        return state

    state = accumulate(state, flat.unflatten([leaf if leaf is None else leaf[0] for leaf in flat.leaves]))
    if n == 1:
        return state
    opened = state.window
    window = flatten(opened)
    places = [place for place, leaf in enumerate(window.leaves) if leaf is not None]
    batch_places = [place for place, leaf in enumerate(flat.leaves) if leaf is not None]

    def with_window(values: list[Tensor]) -> TrainState:
        return with_fields(state, window=window.unflatten(_at(window, places, values)))

    def body(carry: list[Tensor], batch: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        after = accumulate(with_window(carry), flat.unflatten(_at(flat, batch_places, batch)))
        leaves = flatten(after.window).leaves
        return [leaves[place].clone() for place in places], []  # scan takes no output that is an input

    start = [window.leaves[place].clone() for place in places]
    with loop_body():
        carry, _ = scan(body, start, [flat.leaves[place][1:] for place in batch_places], dim=0)
    return with_window(carry)


def _at(flat: Flat, places: list[int], values: list[Tensor]) -> list[Any]:
    leaves: list[Any] = [None] * len(flat.leaves)
    for place, value in zip(places, values, strict=True):
        leaves[place] = value
    return leaves


def _length(micro_batches: PyTree, flat: Flat) -> int:
    sizes: dict[str, Any] = {}
    for index, leaf in enumerate(flat.leaves):
        if leaf is not None:
            stacked = isinstance(leaf, Tensor) and leaf.dim() > 0
            sizes[paths(micro_batches)[index]] = leaf.shape[0] if stacked else None
    found = set(sizes.values())
    if len(found) != 1 or None in found:
        raise ValueError(
            f"micro_batches: found the first sizes {sizes}, expected tensors with one first size, the length of the "
            "window. Stack the micro-batches, numbers too: "
            "optree.tree_map(lambda *leaves: torch.stack([*map(torch.as_tensor, leaves)]), *window)."
        )
    (n,) = found
    if n == 0:
        raise ValueError("micro_batches: found an empty window, expected at least one micro-batch.")
    return n
