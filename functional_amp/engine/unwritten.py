"""What functions of users are given and must not write to.

A loss function: the buffers, and the leaves that are not differentiated. An optimizer: all of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from functional_amp.dtypes import is_differentiable
from functional_amp.mode import in_graph, mode
from functional_amp.torch_private import comptime, traced_locals, traced_versions
from functional_amp.tree import PyTree, flatten, paths

_CAPTURED = "would mutate a captured Tensor"
"""How torch.func says it."""


@contextmanager
def unwritten(given: tuple[PyTree, PyTree], unseen: list[None]) -> Iterator[tuple[PyTree, PyTree]]:
    """Raises where a loss function writes in place to the buffers or to an integer leaf that it is given.

    A skip could not take such a write back.

    Args:
        given: the parameters and the buffers.
        unseen: empty after a first call in eager mode. That one is given copies, so that a loss function that
            is refused has written to nothing of the state. Later calls compare version counters alone.

    Raises:
        RuntimeError: naming the leaves.
    """
    how = mode()
    if in_graph():
        if how == "transform":
            yield given  # torch.func refuses such a write, and the compiler what catches the refusal
            return
        watched = [leaf for leaf in _watched(given).values()]
        _compare(watched, False)
        yield given
        _compare(watched, True)
        return
    if how != "eager":
        try:
            yield given
        except RuntimeError as error:
            if _CAPTURED in str(error):
                raise RuntimeError(f"{_message('what it was given')}\n\n{error}") from error
            raise
        return
    on_copies, flat = bool(unseen), flatten(given)
    watched = {i: leaf.clone() if on_copies else leaf for i, leaf in _watched(given).items() if not leaf.is_inference()}
    if not watched:
        yield given
        return
    before = {index: leaf._version for index, leaf in watched.items()}
    leaves: list[Any] = [watched.get(index, leaf) for index, leaf in enumerate(flat.leaves)]
    yield flat.unflatten(leaves)
    if on_copies:
        unseen.clear()
    written = [index for index, leaf in watched.items() if leaf._version != before[index]]
    if written:
        names = [*paths(given[0]), *paths(given[1])]
        raise RuntimeError(_message(str([names[index] for index in written])))


@contextmanager
def unwritten_by_optimizer(**given: PyTree) -> Iterator[None]:
    """Raises RuntimeError where an optimizer writes in place to what it is given; in eager mode alone.

    Version counters are compared. A write through `.data` moves none.
    """
    if mode() != "eager":
        yield
        return
    flats = {name: flatten(tree) for name, tree in given.items()}
    before = {name: [_counter(leaf) for leaf in flat.leaves] for name, flat in flats.items()}
    yield
    for name, flat in flats.items():
        written = [i for i, leaf in enumerate(flat.leaves) if _counter(leaf) != before[name][i]]
        if written:
            names = paths(given[name])
            raise RuntimeError(
                f"optimizer: found a write in place to {name} at {[names[index] for index in written]}, expected new "
                "tensors: a window that is skipped could not take the write back. Return x.mul(0.9), not "
                "x.mul_(0.9), or pass a torch.optim class to from_torch."
            )


def _counter(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def _watched(given: tuple[PyTree, PyTree]) -> dict[int, Tensor]:
    """The tensors that a loss function must not write to, by their places."""
    leaves, trained = flatten(given).leaves, len(flatten(given[0]).leaves)
    return {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (index >= trained or not is_differentiable(leaf))
    }


_traced: list[list[int]] = []
"""The version counters of what is watched, while a graph is traced."""


def _compare(watched: list[Tensor], done: bool) -> None:
    """The same while a graph is traced, by the counters of the compiler's stand-ins; nothing is left in the graph."""
    comptime()(_look)


def _look(context: Any) -> None:
    local = traced_locals(context)
    versions = traced_versions(local["watched"].items)
    if not local["done"].as_python_constant():
        _traced.append(versions)
    elif _traced.pop() != versions:
        raise RuntimeError(_message("what it was given"))


def _message(what: str) -> str:
    return (
        f"loss_fn: found a write in place to {what}, expected new buffers in the Loss: a window that is skipped could "
        "not take the write back. Write `Loss(value, buffers={**buffers, name: new})`, with new tensors."
    )
