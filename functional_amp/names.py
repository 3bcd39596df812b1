"""What the leaves of a state are called in a file, and static fields as tensors."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from functional_amp.checks import check_number, is_number
from functional_amp.tree import PyTree


class Named(NamedTuple):
    """The leaves of a tree by name, in the order of `flatten`, and its static fields as tensors."""

    leaves: dict[str, Any]
    static: dict[str, Tensor]


def named(state: Any) -> Named:
    """The leaves and static fields of a TrainState, the scaler's class among them."""
    leaves, static = {}, {}
    for name, value, is_static in walk(state, ""):
        into = static if is_static else leaves
        if name in into:
            raise ValueError(
                f"{name}: found two leaves of this name, expected one. "
                "Remedy: give dicts keys that differ as text: 1 and '1' do not."
            )
        into[name] = encoded(value, name) if is_static else value
    static["scaler/class"] = encoded(type(state.scaler).__name__, "scaler/class")
    return Named(leaves, static)


def walk(node: PyTree, name: str) -> Iterator[tuple[str, Any, bool]]:
    """The leaves and the static fields below a node: name, value, whether it is static."""
    if optree.tree_is_leaf(node, none_is_leaf=True):
        yield name, node, False
        return
    children, _, entries, _ = optree.tree_flatten_one_level(node, none_is_leaf=True)
    if optree.is_namedtuple(node):
        entries = type(node)._fields
    prefix = f"{name}/" if name else ""
    for entry, child in zip(entries, children, strict=True):
        yield from walk(child, prefix + str(entry).replace("%", "%25").replace("/", "%2F"))
    for field in dataclasses.fields(node) if dataclasses.is_dataclass(node) else ():
        if field.name not in entries:
            yield prefix + field.name, getattr(node, field.name), True


def encoded(value: Any, name: str) -> Tensor:
    """A number or a text as a tensor."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return value.detach().resolve_conj().resolve_neg().contiguous()
    if is_number(value):
        value = check_number(value, name)  # numpy's are the numbers that they are
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    if isinstance(value, int) and -(2**63) <= value < 2**63:  # a bool too, which gives a bool tensor
        return torch.tensor(value)
    if isinstance(value, (str, torch.dtype)) or value is None:
        return torch.tensor(list(str(value).encode()), dtype=torch.uint8)
    found = str(value.layout) if isinstance(value, Tensor) else f"{type(value).__name__} {reprlib.repr(value)}"
    raise TypeError(
        f"{name}: found {found}, expected a strided tensor, a number within int64, a bool, a text, a dtype or None. "
        "Remedy: save json.dumps(...) of it, or repr(...); of an array torch.as_tensor(...), of a sparse tensor "
        ".to_dense()."
    )


def same(found: Any, value: Tensor) -> bool:
    """Whether a saved value is this tensor, dtype and shape included."""
    return isinstance(found, Tensor) and kind(found) == kind(value) and torch.equal(found.cpu(), value)


def kind(leaf: Tensor) -> str:
    """What two tensors must agree in."""
    text = f"{leaf.dtype} of shape {tuple(leaf.shape)}"
    if leaf.layout != torch.strided:
        return f"{leaf.layout} {text}"
    return f"{text} on meta" if leaf.is_meta else text


def shown(value: Any) -> str:
    """A tensor in an error message: a number or a text as such, anything larger by its shape."""
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_meta or value.layout != torch.strided or value.dim() > 1:
        return kind(value)
    if value.dtype == torch.uint8 and value.dim() == 1 and value.numel() <= 64:
        return repr(bytes(value.tolist()).decode(errors="replace"))
    return repr(value.item()) if value.dim() == 0 else kind(value)
