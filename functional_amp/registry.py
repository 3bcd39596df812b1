"""Registering dataclasses as pytree nodes, with optree and with torch alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import optree

from functional_amp.torch_private import GLOBAL_NAMESPACE, torch_pytree

T = TypeVar("T")


def register(cls: type[T], children: tuple[str, ...], static: tuple[str, ...] = ()) -> type[T]:
    """Registers a dataclass as a pytree node with optree and with `torch.utils._pytree`.

    Both libraries get the same children in the same order, and the static fields as context, so
    that a `tree_map` loses no field. Unflattening does not run `__post_init__`: the children may
    be anything then (vmap and tree_map put placeholders there).

    Args:
        cls: the dataclass.
        children: the names of the fields that are subtrees.
        static: the names of the fields that are hashable metadata.

    Returns:
        The class.

    Raises:
        TypeError: for anything that is not a dataclass.
        ValueError: for a field that is not named, or a name that is not a field.
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

    # torch counts None as a leaf, and vmap refuses it: there, a field that is None goes into the context.
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
        namespace=GLOBAL_NAMESPACE,
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
