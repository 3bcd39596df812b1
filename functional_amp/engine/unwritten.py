"""What functions of users are given and must not write to.

A loss function: the parameters and the buffers. An optimizer: all of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from functional_amp.dtypes import is_differentiable
from functional_amp.engine.statistics import same_bits, traced_statistics_writes
from functional_amp.mode import in_graph, mode, transformed
from functional_amp.torch_private import comptime, is_wrapped, levels, traced_graph, traced_locals, traced_versions
from functional_amp.tree import Flat, PyTree, flatten, paths

GIVEN = "what it was given"
_version = operator.attrgetter("_version")


class Handed(NamedTuple):
    """What a loss function is given: the parameters and the buffers.

    Attributes:
        tree: with containers of its own, and in a first call with copies in it.
        originals: of each copy that the loss has not written to, by its id.
    """

    tree: tuple[PyTree, PyTree]
    originals: dict[int, Tensor]

    def back(self, tree: PyTree) -> PyTree:
        """A tree with the originals in place of the copies."""
        if not self.originals:
            return tree
        flat = flatten(tree)
        return flat.unflatten([self.originals.get(id(leaf), leaf) for leaf in flat.leaves])


@contextmanager
def unwritten(given: tuple[PyTree, PyTree], unseen: list[None]) -> Iterator[Handed]:
    """Raises where a loss function writes in place to the buffers or to an integer leaf that it is given.

    A skip could not take such a write back.

    Args:
        given: the parameters and the buffers.
        unseen: empty after a first call outside of a graph. That one is given copies, whose values are compared
            afterwards: a loss function that is refused has written to nothing of the state, and a kernel that
            moves no version counter is found too. Later calls compare version counters alone.

    Raises:
        RuntimeError: naming the leaves.
    """
    if in_graph():
        flat = flatten(given[1])
        given = given[0], flat.unflatten(flat.leaves)  # containers of its own, as outside a graph
        watched = list(_watched(given, flatten(given)).values())
        _compare(watched, False, GIVEN)
        yield Handed(given, {})
        _compare(watched, True, GIVEN)
        return
    on_copies, flat = bool(unseen), flatten(given)
    found = {i: leaf for i, leaf in _watched(given, flat).items() if not leaf.is_inference()}
    if not found:
        yield Handed(given, {})
        return
    watched = {i: _copy_of(leaf) for i, leaf in found.items()} if on_copies else found
    before = versions_below(watched.values())
    leaves: list[Any] = [watched.get(index, leaf) for index, leaf in enumerate(flat.leaves)]
    handed = Handed(flat.unflatten(leaves), {id(watched[i]): leaf for i, leaf in found.items()} if on_copies else {})
    yield handed
    changed = {i for i, old, new in zip(watched, before, versions_below(watched.values()), strict=True) if old != new}
    if on_copies:
        changed |= {i for i, leaf in found.items() if not same_bits(watched[i], leaf)}
    if changed:
        names = [*paths(given[0]), *paths(given[1])]
        raise RuntimeError(_message(str([names[i] for i in sorted(changed)])))
    unseen.clear()


def _copy_of(leaf: Tensor) -> Tensor:
    """A copy that a transform sees as it sees the leaf: it refuses a write in place to what is not its own."""
    copy = leaf.clone()
    return list(levels(copy))[-len(list(levels(leaf)))]


@contextmanager
def unwritten_by_optimizer(**given: PyTree) -> Iterator[list[PyTree]]:
    """Gives an optimizer containers of its own, and raises where it writes in place to a tensor in them.

    What it assigns to its containers (`state["m"] = ...`) touches nothing of what was given. Version counters are
    compared in eager mode alone. A write through `.data` moves none.

    Raises:
        RuntimeError: naming the leaves.
    """
    flats = {name: flatten(tree) for name, tree in given.items()}
    own = [flat.unflatten(flat.leaves) for flat in flats.values()]
    if mode() != "eager":
        yield own
        return
    before = {name: versions_of(flat.leaves) for name, flat in flats.items()}
    yield own
    for name, flat in flats.items():
        if versions_of(flat.leaves) != before[name]:
            raise RuntimeError(
                f"optimizer: found a write in place to {name} at {_written(given[name], before[name])}, expected new "
                "tensors: a window that is skipped could not take the write back. Return x.mul(0.9), not "
                "x.mul_(0.9), or pass a torch.optim class to from_torch."
            )


def counted_params(leaves: list[Any]) -> list[int]:
    """The counters of the parameters of a loss function; none in a graph."""
    return [] if in_graph() else versions_below(leaves)


def check_params(params: PyTree, leaves: list[Any], before: list[int]) -> None:
    """Raises RuntimeError where a loss function has written in place to the parameters, by any backend.

    A write through `.data` under the autograd engine moves no version counter, and is not seen.
    """
    if before and versions_below(leaves) != before:
        raise RuntimeError(_params_message(f" at {_written(params, before)}"))


def check_marks(leaves: list[Tensor], path: Callable[[int], str]) -> None:
    """Raises RuntimeError where a loss function has marked a leaf that it is given in a way that others forget.

    The leaves are those of one call: what is differentiated was chosen before, and no gradient is kept at them.
    """
    if in_graph():
        return
    for index, leaf in enumerate(leaves):
        if not leaf.requires_grad:
            raise RuntimeError(
                f"loss_fn: found requires_grad_(False) called on the parameter {path(index)!r}, expected it to be left "
                "as it was. Use its .detach() in the loss, or freeze(loss_fn, lambda path, leaf: ...)."
            )
        if leaf._post_accumulate_grad_hooks:
            raise RuntimeError(
                f"loss_fn: found a post-accumulate-grad hook registered on the parameter {path(index)!r}, expected "
                "none: no gradient is accumulated at it. Use its register_hook in the loss, or change gradients in a "
                "Transform of chain."
            )


def versions_of(leaves: Iterable[Any]) -> list[int]:
    """The version counters of leaves, which each write in place moves, also one without a gradient."""
    leaves = list(leaves)
    try:
        return list(map(_version, leaves))  # a third of the time of asking each leaf first
    except (AttributeError, RuntimeError):  # of None, and of a tensor of an inference mode
        return list(map(_counter, leaves))


def _counter(leaf: Any) -> int:
    return leaf._version if isinstance(leaf, Tensor) and not leaf.is_inference() else 0


def versions_below(leaves: Iterable[Any]) -> list[int]:
    """The same with those below a transform's wrappers, which an `out=` or a write to a list moves alone.

    To be compared within one transform: a wrapper does not outlive it.
    """
    leaves = list(leaves)
    if transformed() and any(map(is_wrapped, [leaf for leaf in leaves if isinstance(leaf, Tensor)])):
        return [sum(map(_counter, levels(leaf))) if isinstance(leaf, Tensor) else 0 for leaf in leaves]
    return versions_of(leaves)


def _written(tree: PyTree, before: list[int]) -> list[str]:
    """The paths of the leaves that have been written to since."""
    now = versions_below(flatten(tree).leaves)
    return [path for path, old, new in zip(paths(tree), before, now, strict=True) if old != new]


def _watched(given: tuple[PyTree, PyTree], flat: Flat) -> dict[int, Tensor]:
    """The buffers and the integer leaves, by their places."""
    leaves, trained = flat.leaves, len(flat.leaves) - len(flatten(given[1]).leaves)
    return {
        index: leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and (index >= trained or not is_differentiable(leaf))
    }


_traced: list[tuple[Any, list[int]]] = []
"""The graph, and the version counters of what is watched, while it is traced."""


def compare_params(params: list[Tensor | None], done: bool) -> None:
    """In a graph, notes the counters of parameters before a loss function is called, and compares them after."""
    if in_graph():
        _compare([leaf for leaf in params if leaf is not None], done, None)


def _compare(watched: list[Tensor], done: bool, what: str | None) -> None:
    """The same while a graph is traced, by the counters of the compiler's stand-ins; nothing is left in the graph.

    Where the loss function leaves the graph, the stand-ins after it are others, and nothing can be told.
    """
    comptime()(_look)


def _look(context: Any) -> None:
    local = traced_locals(context)
    items = local["watched"].items
    now = traced_graph(context), [*traced_versions(items), traced_statistics_writes(items)]
    if not local["done"].as_python_constant():
        _traced.append(now)
        return
    before = _traced.pop()
    if before[0] == now[0] and before[1] != now[1]:
        what = local["what"].as_python_constant()
        raise RuntimeError(_params_message("") if what is None else _message(what))


def _message(what: str) -> str:
    return (
        f"loss_fn: found a write in place to {what}, expected new buffers in the Loss: a window that is skipped could "
        "not take the write back. Write `Loss(value, buffers={**buffers, name: new})`, with new tensors, such as a "
        "`buffers[name].clone()` that a kernel updates."
    )


def _params_message(where: str) -> str:
    return (
        f"loss_fn: found a write in place to the parameters{where}, expected new tensors: a window that is skipped "
        "could not take the write back. They hold it now. Write `w = w.clamp(-1, 1)` in the loss, or change the "
        "parameters between updates: `dataclasses.replace(state, params=...)`."
    )
