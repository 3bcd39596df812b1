"""Flattening while the compiler traces: optree's order and paths, in Python that dynamo follows at little cost.

Dynamo traces optree's own functions as Python that makes an object for each leaf: some 20 ms a container, where
these loops take one. What is not a plain dict, defaultdict, list or tuple is opened by optree, as it
was registered.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import optree
from torch import Tensor

_LEAVES = (Tensor, type(None), bool, int, float, str)


class TracedSpec:
    """The structure of a tree that was flattened in a graph.

    Attributes:
        root: None for a leaf, `(type, entries, metadata, children)` for a container.
        rest: for each container, in order of traversal, what does not count in a comparison: the order in which the
            keys of a dict were inserted, or what builds a container that optree has opened.
    """

    def __init__(self, root: Any, rest: list[Any]):
        self.root = root
        self.rest = rest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedSpec) and self.root == other.root

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        return _built(self.root, iter(leaves), iter(self.rest))

    def paths(self) -> list[tuple[Any, ...]]:
        return _paths(self.root, ())


def flatten_traced(tree: Any) -> tuple[list[Any], TracedSpec]:
    """The leaves of a tree, None being one, and its structure."""
    leaves: list[Any] = []
    rest: list[Any] = []
    root = _node(tree, leaves, rest)
    return leaves, TracedSpec(root, rest)


def _node(node: Any, leaves: list[Any], rest: list[Any]) -> Any:
    kind = type(node)
    metadata = None
    if kind is dict or kind is defaultdict:
        # dynamo itself sorts strings; what else stands for a key is sorted by optree, which takes longer.
        plain = all([type(key) is str for key in node])
        entries = tuple(sorted(node)) if plain else optree.tree_flatten_one_level(node, none_is_leaf=True)[2]
        values = [node[key] for key in entries]
        if kind is defaultdict:
            metadata = node.default_factory
        rest.append(tuple(node))
    elif kind is list or kind is tuple:
        entries, values = tuple(range(len(node))), list(node)
        rest.append(None)
    elif isinstance(node, _LEAVES) or optree.tree_is_leaf(node, none_is_leaf=True):
        leaves.append(node)
        return None
    else:
        values, metadata, entries, build = optree.tree_flatten_one_level(node, none_is_leaf=True)
        rest.append(build)
    children = []
    for value in values:  # most are leaves: without a call for each
        if isinstance(value, _LEAVES):
            leaves.append(value)
            children.append(None)
        else:
            children.append(_node(value, leaves, rest))
    return kind, entries, metadata, tuple(children)


def _built(node: Any, leaves: Iterator[Any], rest: Iterator[Any]) -> Any:
    if node is None:
        return next(leaves)
    kind, entries, metadata, children = node
    own = next(rest)
    values = [next(leaves) if child is None else _built(child, leaves, rest) for child in children]
    if kind is dict or kind is defaultdict:
        named = dict(zip(entries, values, strict=True))
        named = named if own == entries else {key: named[key] for key in own}
        return named if kind is dict else defaultdict(metadata, named)
    if kind is deque:
        raise TypeError(
            "found a deque in a compiled step, expected a list or a tuple: the compiler loses the maxlen of a deque. "
            "Pass list(...) of it."
        )
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    return own(metadata, values)


def _paths(node: Any, before: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    if node is None:
        return [before]
    _, entries, _, children = node
    return [path for entry, child in zip(entries, children, strict=True) for path in _paths(child, (*before, entry))]
