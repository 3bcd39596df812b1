"""Trees compared leaf by leaf: bits, shapes and dtypes, with messages that name the path and both values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree
import torch
from torch import Tensor

from functional_amp.tree import flatten, paths


def leaves_of(tree: Any) -> list[Any]:
    """All leaves in optree's order, None included.

    >>> leaves_of({"b": 2, "a": [None, 1]})
    [None, 1, 2]
    """
    return optree.tree_leaves(tree, none_is_leaf=True)


def mapped(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Maps over the leaves that are not None.

    >>> mapped(lambda leaf: leaf + 1, {"a": 1, "b": None})
    {'a': 2, 'b': None}
    """
    return optree.tree_map(
        lambda leaf, *others: None if leaf is None else function(leaf, *others), tree, *rest, none_is_leaf=True
    )


def same_bits(a: Any, b: Any) -> bool:
    """Equal in structure, dtype, shape and every bit, NaN included.

    >>> import torch
    >>> same_bits(torch.tensor([float("nan")]), torch.tensor([float("nan")]))
    True
    >>> same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    False
    """
    first, second = flatten(a), flatten(b)
    return first.spec == second.spec and all(map(_same_leaf, first.leaves, second.leaves))


def assert_same_bits(found: Any, expected: Any, what: str = "the tree") -> None:
    """Raises AssertionError, with the path and both values, unless two trees are the same bit for bit.

    >>> import torch
    >>> assert_same_bits({"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([1.0, 4.0])}, "params")
    Traceback (most recent call last):
        ...
    AssertionError: params: at 'w'[1]: found 2.0, expected 4.0.
    """
    assert_alike(found, expected, what)
    for path, a, b in _pairs(found, expected):
        if not _same_leaf(a, b):
            _fail(what, path, *_first(a, b, isinstance(a, Tensor) and (_bits(a) != _bits(b)).any(-1)))


def assert_alike(found: Any, expected: Any, what: str = "the tree") -> None:
    """Raises AssertionError, with the path, unless two trees have the same structure, shapes, dtypes and devices.

    >>> import torch
    >>> assert_alike({"w": torch.ones(2).half()}, {"w": torch.ones(2)}, "params")
    Traceback (most recent call last):
        ...
    AssertionError: params: at 'w': found float16 of shape (2,), expected float32 of shape (2,).
    """
    if flatten(found).spec != flatten(expected).spec:
        missing, extra = (
            sorted(set(paths(one)) - set(paths(other))) for one, other in ((expected, found), (found, expected))
        )
        raise AssertionError(
            f"{what}: the structure differs: missing {missing}, extra {extra}; "
            f"found {flatten(found).spec}, expected {flatten(expected).spec}."
        )
    for path, a, b in _pairs(found, expected):
        if _described(a) != _described(b):
            _fail(what, path, "", _described(a), _described(b))


def assert_close(found: Any, expected: Any, what: str = "the tree", *, ulps: float = 64) -> None:
    """Raises AssertionError unless float leaves come within so many ulps of their largest magnitude, or of 1.

    >>> import torch
    >>> assert_close(torch.tensor(1.0 + 1e-6), torch.tensor(1.0))
    """
    assert_alike(found, expected, what)
    for path, a, b in _pairs(found, expected):
        if not (isinstance(b, Tensor) and (b.is_floating_point() or b.is_complex())):
            if not _same_leaf(a, b):
                _fail(what, path, *_first(a, b, a != b))
        elif b.numel():
            largest = torch.nan_to_num(b.abs(), posinf=0.0).max().clamp(min=1).item()
            far = ~torch.isclose(a, b, rtol=0.0, atol=ulps * torch.finfo(b.dtype).eps * largest, equal_nan=True)
            if far.any():
                _fail(what, path, *_first(a, b, far))


def assert_unwritten(versions: list[int], values: Any, now: Any, what: str) -> None:
    """Raises AssertionError where a tree is no longer what `snapshot` saw."""
    assert_same_bits(now, values, what)
    for path, leaf, version in zip(paths(now), leaves_of(now), versions, strict=True):
        if isinstance(leaf, Tensor) and leaf._version != version:
            _fail(what, path, "", f"a tensor written to {leaf._version - version} times", "none")


def snapshot(tree: Any) -> tuple[list[int], Any]:
    """The version counter of each leaf, and a copy of the tree, for `assert_unwritten`."""
    versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves_of(tree)]
    return versions, copied(tree)


def copied(tree: Any) -> Any:
    """The tree with a clone of each tensor."""
    return mapped(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def assert_no_aliases(output: Any, given: Any, what: str) -> None:
    """Raises AssertionError where an output shares storage with an input without being that very tensor."""
    storages: dict[int, list[tuple[str, Tensor]]] = {}
    for path, leaf in _tensors(given):
        storages.setdefault(leaf.untyped_storage().data_ptr(), []).append((path, leaf))
    for path, leaf in _tensors(output):
        sharing = storages.get(leaf.untyped_storage().data_ptr(), [])
        if sharing and not any(_view(leaf) == _view(other) for _, other in sharing):
            where = sharing[0][0]
            _fail(what, path, "", f"a view of the input {where!r}", "a tensor of its own, or that input unchanged")


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """The tensors that have elements, with their paths."""
    pairs = zip(paths(tree), leaves_of(tree), strict=True)
    return [(path, leaf) for path, leaf in pairs if isinstance(leaf, Tensor) and leaf.numel()]


def _pairs(found: Any, expected: Any) -> list[tuple[str, Any, Any]]:
    return list(zip(paths(expected), leaves_of(found), leaves_of(expected), strict=True))


def _fail(what: str, path: str, place: str, found: Any, expected: Any) -> None:
    raise AssertionError(f"{what}: at {path!r}{place}: found {found}, expected {expected}.")


def _described(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return type(leaf).__name__
    device = "" if leaf.device.type == "cpu" else f" on {leaf.device}"
    return f"{str(leaf.dtype).removeprefix('torch.')} of shape {tuple(leaf.shape)}{device}"


def _first(a: Any, b: Any, differ: Any) -> tuple[str, Any, Any]:
    """Where two leaves differ first, as `[1, 2]`, and the two elements."""
    if not isinstance(differ, Tensor):
        return "", a, b
    index = tuple(torch.nonzero(differ.reshape(a.shape))[0].tolist())
    return (str(list(index)) if index else ""), a[index].item(), b[index].item()


def _same_leaf(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    """The bytes, the last dimension being those of an element."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1, 1).contiguous()
    return flat.view(torch.uint8)
