"""Pytrees: flattening in one order, paths, checks, selection and registration.

Every function here flattens with optree (dict keys sorted) and counts None as a leaf, so that
a missing gradient stands at the place of its parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias, TypeGuard, TypeVar, cast

import optree
import torch
from optree.registry import __GLOBAL_NAMESPACE as _GLOBAL
from torch import Tensor
from torch.utils import _pytree as torch_pytree

from functional_amp.transform import stage

PyTree: TypeAlias = Any
"""Nested dicts, lists, tuples, NamedTuples and registered nodes with tensors or None at the leaves."""

T = TypeVar("T")

_ACCUMULATION_DTYPES = {
    torch.float64: torch.float64,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}


def register(cls: type[T], children: tuple[str, ...], static: tuple[str, ...] = ()) -> type[T]:
    """Registers a dataclass as a pytree node with optree and with `torch.utils._pytree`.

    Both libraries get the same children in the same order, and the static fields as context, so
    that none is lost in a `tree_map`. Unflattening does not run `__post_init__`: the children may
    be anything then (vmap and tree_map put placeholders there).

    Args:
        cls: the dataclass.
        children: the names of the fields that are subtrees.
        static: the names of the fields that are hashable metadata.

    Returns:
        The class.

    Raises:
        TypeError: for anything that is no dataclass.
        ValueError: for a field that is missing among the names, or a name that is no field.
    """
    if not isinstance(cls, type) or not is_dataclass(cls):
        raise TypeError(f"register: found {cls!r}, expected a dataclass. Decorate it with @dataclass(frozen=True).")
    found, expected = [*children, *static], [field.name for field in fields(cls)]
    if sorted(found) != sorted(expected):
        raise ValueError(
            f"register: found {found} for {cls.__name__}, expected each of its fields {expected} once. "
            "Name it in children or in static: what is in neither is lost in a tree_map."
        )
    children, static = tuple(children), tuple(static)

    def context(node: Any) -> tuple[Any, ...]:
        return tuple(getattr(node, name) for name in static)

    def unflatten(values: Iterable[Any], metadata: Any) -> Any:
        return new(cls, **dict(zip(children + static, (*values, *metadata), strict=True)))

    # torch counts None as a leaf, and vmap takes none: there, a field that is None goes into the context.
    def torch_flatten(node: Any) -> tuple[list[Any], Any]:
        present = tuple(name for name in children if getattr(node, name) is not None)
        return [getattr(node, name) for name in present], (present, context(node))

    def torch_unflatten(values: Iterable[Any], metadata: Any) -> Any:
        present, static_values = metadata
        given = dict(zip(present, values, strict=True))
        return unflatten([given.get(name) for name in children], static_values)

    def with_keys(node: Any) -> Any:
        values, metadata = torch_flatten(node)
        return [(torch_pytree.GetAttrKey(n), value) for n, value in zip(metadata[0], values, strict=True)], metadata

    optree.register_pytree_node(
        cast(Any, cls),
        lambda node: (tuple(getattr(node, name) for name in children), context(node), children),
        lambda metadata, values: unflatten(values, metadata),
        path_entry_type=optree.GetAttrEntry,
        namespace=_GLOBAL,
    )
    torch_pytree.register_pytree_node(
        cls,
        torch_flatten,
        torch_unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=with_keys,
    )
    return cls


def new(cls: type[T], **values: Any) -> T:
    """A registered dataclass from its fields as they are: nothing is converted or validated."""
    node = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(node, name, value)
    return node


def with_fields(node: T, **values: Any) -> T:
    """A copy of a registered dataclass with some fields replaced, as `new` makes it."""
    return new(type(node), **{**vars(node), **values})


class Flat(NamedTuple):
    """A flattened tree: leaves (tensors or None) and the structure that puts them back."""

    leaves: list[Any]
    spec: optree.PyTreeSpec

    def unflatten(self, leaves: Iterable[Any]) -> PyTree:
        if not torch.compiler.is_compiling():
            return optree.tree_unflatten(self.spec, leaves)
        boxed = optree.tree_unflatten(self.spec, [Box(leaf) for leaf in leaves])
        return optree.tree_map(_unboxed, boxed, is_leaf=_is_empty, none_is_leaf=True)


def flatten(tree: PyTree) -> Flat:
    """Flattens in optree's order, None being a leaf."""
    if not torch.compiler.is_compiling():
        return Flat(*optree.tree_flatten(tree, none_is_leaf=True))
    boxes, spec = optree.tree_flatten(_boxed(tree), none_is_leaf=True)
    return Flat([_unboxed(box) for box in boxes], spec)


def paths(tree: PyTree) -> list[str]:
    """The path of each leaf, as `blocks.0.weight`; a bare leaf is `<root>`."""
    tree = _boxed(tree) if torch.compiler.is_compiling() else tree
    return [path_name(path) for path in optree.tree_paths(tree, none_is_leaf=True)]


class Box:
    """A leaf that dynamo takes for no constant: it can neither flatten nor build a dict of constants."""

    def __init__(self, leaf: Any):
        self.leaf = leaf


@dataclass(frozen=True, eq=False)
class _Empty:
    """In place of an empty dict, which is a constant as well."""


register(_Empty, ())


def _boxed(tree: PyTree) -> PyTree:
    return optree.tree_map(
        lambda leaf: _Empty() if _is_empty(leaf) else Box(leaf), tree, is_leaf=_is_empty, none_is_leaf=True
    )


def _unboxed(node: Any) -> Any:
    return {} if isinstance(node, _Empty) else node.leaf


def _is_empty(node: Any) -> bool:
    return isinstance(node, _Empty) or (type(node) is dict and not node)


def path_name(path: tuple[Any, ...]) -> str:
    return ".".join(str(entry) for entry in path) or "<root>"


def map_tensors(function: Callable[..., Any], tree: PyTree, *rest: PyTree) -> PyTree:
    """Maps over the tensor leaves; None stays None. `rest` must have the structure of `tree`."""
    return optree.tree_map(
        lambda leaf, *others: None if leaf is None else function(leaf, *others), tree, *rest, none_is_leaf=True
    )


def is_differentiable(leaf: Any) -> TypeGuard[Tensor]:
    """A float or complex tensor. Integer and bool tensors ride along in a tree untouched."""
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every real type of 32 bits or fewer; float64 and complex keep theirs."""
    return _ACCUMULATION_DTYPES.get(dtype, torch.float32)


def widened(leaf: Any) -> Any:
    """A leaf in the dtype of sums and updates: 512 bf16 additions of 2**-9 to 1 would leave 1."""
    return leaf.to(accumulation_dtype(leaf.dtype)) if is_differentiable(leaf) else leaf


def divided(leaf: Any, divisor: Tensor) -> Any:
    """A float or complex leaf over a 0-dim divisor, widened first."""
    if not is_differentiable(leaf):
        return leaf
    wide = widened(leaf)
    return wide / like(divisor, wide).to(wide.real.dtype)  # a compiler would widen all elements to the divisor's dtype


def scalar_dtype(device: torch.device) -> torch.dtype:
    """The dtype for 0-dim arithmetic that Python would do in double: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def like(scalar: Tensor, leaf: Tensor) -> Tensor:
    """A 0-dim tensor on the device of a leaf (parameters may live on several)."""
    return scalar.to(leaf.device)


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
                f"{what}: found {_describe(leaf)} at {paths(tree)[index]!r}, expected a tensor or None. {_remedy(leaf)}"
            )
        if leaf.layout != torch.strided:
            raise TypeError(
                f"{what}: found a sparse tensor ({leaf.layout}) at {paths(tree)[index]!r}, expected a strided one. "
                "Use Embedding(sparse=False), or call .to_dense() on the leaf first."
            )
    return flat


def _describe(leaf: Any) -> str:
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
            "Reshape it, or build both from the same parameters."
        )
    if dtype and leaf.dtype != reference.dtype:
        raise TypeError(
            f"{what}: found {leaf.dtype} at {path()!r}, expected {reference.dtype} as in {expected}. "
            f"Cast it with .to({reference.dtype}): dtypes must not change from step to step."
        )


@stage
def select(condition: Tensor, new: PyTree, old: PyTree, what: str = "select") -> PyTree:
    """`new` where the condition holds, else `old`, for whole trees at once and without a host read.

    Args:
        condition: 0-dim bool tensor.
        new: a pytree of tensors or None.
        old: a pytree of the same structure, shapes and dtypes.
        what: the name of the tree in error messages.

    Returns:
        A tree of the same structure. A leaf that is the same object in both is returned as it is.
        Selection is by `torch.where`: NaN on the side that is not taken does not leak.

    Raises:
        ValueError, TypeError: if the trees differ in structure, shape or dtype; the path is named.
            Also for a condition that is no 0-dim bool tensor.

    >>> import torch
    >>> select(torch.tensor(False), {"w": torch.tensor([float("nan")])}, {"w": torch.tensor([1.0])})
    {'w': tensor([1.])}
    """
    if not isinstance(condition, Tensor) or condition.dtype != torch.bool:
        found = str(condition.dtype) if isinstance(condition, Tensor) else _describe(condition)
        raise TypeError(f"condition: found {found}, expected a 0-dim bool tensor. Write torch.tensor(True).")
    if condition.dim() != 0:
        raise ValueError(
            f"condition: found shape {tuple(condition.shape)}, expected a 0-dim flag: one for all leaves. "
            "Reduce it with torch.all."
        )
    new_flat, old_flat = flatten(new), flatten(old)
    check_structure(new, new_flat, old, old_flat, what, "the tree before")
    selected = []
    for index, (after, before) in enumerate(zip(new_flat.leaves, old_flat.leaves, strict=True)):
        if after is before:
            selected.append(after)
            continue

        def path(index: int = index) -> str:
            return paths(old)[index]

        if not (isinstance(after, Tensor) and isinstance(before, Tensor)):
            raise TypeError(
                f"{what}: found {_describe(after)} at {path()!r} where {_describe(before)} was before. "
                "Only tensors can be selected without a host read: keep counters and flags as 0-dim tensors."
            )
        check_leaf(after, before, path, what, "the tree before", dtype=True)
        selected.append(torch.where(like(condition, before), after, before))
    return new_flat.unflatten(selected)


def split(tree: PyTree, predicate: Callable[[str, Any], bool]) -> tuple[PyTree, PyTree]:
    """Splits a tree in two of the same structure, each with None at the other's leaves.

    The way to say which leaves are trainable: differentiate the first tree, merge in the loss.

    Args:
        tree: a pytree of tensors.
        predicate: called with the path (`blocks.0.weight`) and the leaf; not for None.

    Returns:
        The tree of the leaves where the predicate holds, and the tree of the others.

    Raises:
        TypeError: for a leaf that is no tensor (the path is named), a predicate that is no function.

    >>> import torch
    >>> params = {"head": torch.ones(1), "body": torch.zeros(1)}
    >>> trainable, frozen = split(params, lambda path, leaf: path == "head")
    >>> trainable, frozen
    ({'head': tensor([1.]), 'body': None}, {'head': None, 'body': tensor([0.])})
    """
    if not callable(predicate):
        raise TypeError(f"predicate: found {_describe(predicate)}, expected a function `predicate(path, leaf)`.")
    flat = flatten_tensors(tree, "tree")
    chosen = [
        leaf is not None and bool(predicate(path, leaf)) for path, leaf in zip(paths(tree), flat.leaves, strict=True)
    ]
    return (
        flat.unflatten([leaf if keep else None for leaf, keep in zip(flat.leaves, chosen, strict=True)]),
        flat.unflatten([None if keep else leaf for leaf, keep in zip(flat.leaves, chosen, strict=True)]),
    )


def merge(*trees: PyTree) -> PyTree:
    """Puts together what `split` took apart: at each leaf, the first that is not None.

    Raises:
        ValueError: if the structures differ (the paths are named), or without any tree.

    >>> import torch
    >>> merge({"a": torch.ones(1), "b": None}, {"a": None, "b": torch.zeros(1)})
    {'a': tensor([1.]), 'b': tensor([0.])}
    """
    if not trees:
        raise ValueError("merge: found no tree, expected at least one. Pass the trees that split gave.")
    flats = [flatten(tree) for tree in trees]
    for tree, flat in zip(trees[1:], flats[1:], strict=True):
        check_structure(tree, flat, trees[0], flats[0], "merge", "the first tree")
    return flats[0].unflatten(
        [
            next((leaf for leaf in leaves if leaf is not None), None)
            for leaves in zip(*(flat.leaves for flat in flats), strict=True)
        ]
    )
