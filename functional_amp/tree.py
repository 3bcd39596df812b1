"""Pytrees: flattening in one order, paths and checks.

Every function here flattens with optree (dict keys sorted) and counts None as a leaf, so that
a missing gradient stands at the place of its parameter.
"""

from __future__ import annotations

import copy
import operator
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from functional_amp.mode import in_graph
from functional_amp.torch_private import torch_pytree
from functional_amp.traced_tree import TracedSpec, flatten_traced

PyTree: TypeAlias = Any
"""Nested dicts, lists, tuples, NamedTuples and registered nodes with tensors or None at the leaves."""


class Flat(NamedTuple):
    """A flattened tree: leaves (tensors or None) and the structure that puts them back."""

    leaves: list[Any]
    spec: optree.PyTreeSpec | TracedSpec

    def unflatten(self, leaves: Iterable[Any]) -> PyTree:
        if isinstance(self.spec, TracedSpec):
            return self.spec.unflatten(leaves)
        return optree.tree_unflatten(self.spec, leaves)


def flatten(tree: PyTree) -> Flat:
    """Flattens in optree's order, None being a leaf."""
    return Flat(*(flatten_traced(tree) if in_graph() else optree.tree_flatten(tree, none_is_leaf=True)))


def flatten_again(tree: PyTree, spec: optree.PyTreeSpec | TracedSpec | None) -> Flat:
    """Flattens at a sixth of the cost a tree that has a known structure; a dict may be of another kind."""
    if spec is None or isinstance(spec, TracedSpec):
        return flatten(tree)
    try:
        leaves = spec.flatten_up_to(tree)
    except ValueError:
        return flatten(tree)
    return Flat(leaves, spec) if set(map(type, leaves)) <= _LEAVES else flatten(tree)


_LEAVES = {Tensor, torch.nn.Parameter, type(None)}


def with_own_containers(tree: PyTree) -> PyTree:
    """The same leaves in new containers: what is assigned to them, or taken out, is seen by nobody else.

    In a graph the containers are as they were: the compiler refuses to trace a write to those that a loss is given.
    """
    if in_graph():
        return tree
    leaves, spec = optree.tree_flatten(tree, none_is_leaf=True)
    return optree.tree_unflatten(spec, [copy.copy(leaf) if isinstance(leaf, UserDict) else leaf for leaf in leaves])


def paths(tree: PyTree) -> list[str]:
    """The path of each leaf, as `blocks.0.weight`; a bare leaf is `<root>`."""
    found = flatten(tree).spec.paths()
    return [path_name(path) for path in found]


def same_leaves(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two lists hold the very same objects."""
    return len(some) == len(others) and all(map(operator.is_, some, others))


def path_name(path: tuple[Any, ...]) -> str:
    return ".".join(str(entry) for entry in path) or "<root>"


def map_tensors(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps over the tensor leaves; None stays None. `rest` must have the structure of `tree`."""
    if not rest:
        flat = flatten(tree)
        return flat.unflatten([None if leaf is None else function(leaf) for leaf in flat.leaves])
    return optree.tree_map(
        lambda leaf, *others: None if leaf is None else function(leaf, *others), tree, *rest, none_is_leaf=True
    )


def flatten_tensors(tree: PyTree, what: str) -> Flat:
    """Flattens and checks that each leaf is None or a strided tensor.

    Raises:
        TypeError: naming the path, for any other leaf.
    """
    flat = flatten(tree)
    if all([type(leaf) is Tensor and leaf.layout is torch.strided for leaf in flat.leaves]):
        return flat
    for index, leaf in enumerate(flat.leaves):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"{what}: found {described(leaf)} at {paths(tree)[index]!r}, expected a tensor or None. {_remedy(leaf)}"
            )
        if leaf.layout != torch.strided:
            raise TypeError(
                f"{what}: found a sparse tensor ({leaf.layout}) at {paths(tree)[index]!r}, expected a strided one. "
                "Use Embedding(sparse=False), or call .to_dense() on the leaf first."
            )
    return flat


def opened(leaves: Sequence[Any], place: Callable[[int], str]) -> tuple[list[Any], list[Any]]:
    """Leaves, with those among them replaced by their own that are containers which torch's pytree alone knows.

    Args:
        leaves: of a tree that optree has flattened.
        place: the path of a leaf, by its index, for the message.

    Returns:
        The leaves, and what `closed` needs to put them back.

    Raises:
        TypeError: for a container that neither knows and that holds a tensor: it would be passed by.
    """
    found: list[Any] = []
    specs: list[Any] = []
    for index, leaf in enumerate(leaves):
        parts, spec = [leaf], None
        if not isinstance(leaf, _PLAIN):
            if type(leaf) in torch_pytree.SUPPORTED_NODES:
                parts, spec = torch_pytree.tree_flatten(leaf)
            if any([not isinstance(part, _PLAIN) and _holds_tensor(part) for part in parts]):
                raise TypeError(
                    f"{place(index)}: found {type(leaf).__name__}, expected containers that are known as pytrees: the "
                    "tensors in this one would be passed by. Pass a dict of them, or register the class: "
                    "functional_amp.register(cls, fields) for a dataclass, torch.utils._pytree.register_pytree_node "
                    "for any other."
                )
        found += parts
        specs.append(spec)
    return found, specs


def closed(leaves: Iterable[Any], specs: Sequence[Any]) -> list[Any]:
    """The leaves that `opened` was given, from as many as it gave."""
    remaining = iter(leaves)
    return [
        next(remaining)
        if spec is None
        else torch_pytree.tree_unflatten([next(remaining) for _ in range(spec.num_leaves)], spec)
        for spec in specs
    ]


_PLAIN = (Tensor, type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


def _holds_tensor(value: Any, depth: int = 3) -> bool:
    """Whether there is a tensor in an object that no tree library knows; functions and classes hold none."""
    if isinstance(value, Tensor):
        return True
    if depth == 0 or isinstance(value, (*_PLAIN, type, torch.nn.Module)):
        return False
    inside = list(vars(value).values()) if hasattr(value, "__dict__") else []
    if isinstance(value, Mapping):
        inside += value.values()
    elif isinstance(value, (Sequence, Set)):
        inside += value
    if is_dataclass(value):
        inside += [getattr(value, field.name, None) for field in fields(value)]
    return any([_holds_tensor(part, depth - 1) for part in inside])


def described(leaf: Any) -> str:
    return f"{type(leaf).__name__} {leaf!r}" if isinstance(leaf, (bool, int, float, str)) else type(leaf).__name__


def _remedy(leaf: Any) -> str:
    if hasattr(leaf, "__next__"):
        return "An iterator is not a pytree: pass list(...) or dict(...) of it."
    if isinstance(leaf, (bool, int, float)):
        return "Wrap the number: torch.tensor(...)."
    return "Pass a pytree (dicts, lists, tuples, NamedTuples, registered nodes) of tensors."


def check_structure(
    tree: PyTree, flat: Flat, reference: PyTree, reference_flat: Flat, what: str, expected: str
) -> None:
    """Raises ValueError naming the missing and the extra paths where two structures differ."""
    if flat.spec == reference_flat.spec:
        return
    found, wanted = paths(tree), paths(reference)
    missing = [path for path in wanted if path not in set(found)]
    extra = [path for path in found if path not in set(wanted)]
    if missing or extra:
        detail = "; ".join(f"{name} {places}" for name, places in (("missing", missing), ("extra", extra)) if places)
    else:
        detail = f"found {flat.spec}, expected {reference_flat.spec}"
    raise ValueError(
        f"{what}: the tree does not have the structure of {expected}: {detail}. "
        f"Pass a tree with the same containers and keys, with None where a leaf is missing."
    )


def check_leaf(
    leaf: Tensor, reference: Tensor, path: Callable[[], str], what: str, expected: str, *, dtype: bool
) -> None:
    """Raises ValueError or TypeError where a leaf's shape (dtype) is not its reference's."""
    if leaf.shape != reference.shape:
        raise ValueError(
            f"{what}: found shape {tuple(leaf.shape)} at {path()!r}, "
            f"expected {tuple(reference.shape)} as in {expected}. "
            "Reshape it, or build both from the same parameters"
            + ("; where a forward shapes it, run the module once before from_module." if what == "buffers" else ".")
        )
    if dtype and leaf.dtype != reference.dtype:
        raise TypeError(
            f"{what}: found {leaf.dtype} at {path()!r}, expected {reference.dtype} as in {expected}. "
            f"Cast it with .to({reference.dtype}): dtypes must not change from step to step."
        )
