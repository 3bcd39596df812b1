"""Many leaves in one tensor, so that the cost of a step per leaf is paid once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import is_differentiable
from functional_amp.tree import PyTree, flatten, flatten_tensors

Flat = dict[str, Any]


class Raveled(NamedTuple):
    """A tree in few tensors, and the function that gives the tree back as views of them."""

    flat: Flat
    unravel: Callable[[Flat], PyTree]


def ravel(tree: PyTree) -> Raveled:
    """Puts the leaves of a tree into one 1-D tensor for each dtype and device.

    A step takes the flat parameters as any others, and the loss function unravels them. Elementwise
    optimizers give the same values; whatever looks at whole leaves (`partition`, a norm of each) sees one flat leaf.

    Args:
        tree: a pytree of tensors. Integer and bool leaves are kept as they are, under "rest".

    Returns:
        flat: a dict from names such as "float32 cpu" to 1-D tensors, copies of the leaves in optree's order.
        unravel: from such a dict to a tree like the first; works in `torch.func` and in compiled graphs.

    Raises:
        TypeError: for a leaf that is not a tensor; the path is named.

    The name is that of `jax.flatten_util.ravel_pytree`.

    >>> import torch
    >>> flat, unravel = ravel({"w": torch.ones(2, 1), "b": torch.zeros(1)})
    >>> flat
    {'float32 cpu': tensor([0., 1., 1.])}
    >>> unravel({"float32 cpu": torch.tensor([5.0, 6.0, 7.0])})
    {'w': tensor([[6.],
            [7.]]), 'b': tensor([5.])}
    """
    leaves = flatten_tensors(tree, "tree")
    groups: dict[str, list[Tensor]] = {}
    rest: list[Tensor] = []
    places: list[tuple[str, int] | None] = []
    for leaf in leaves.leaves:
        if not is_differentiable(leaf):
            places.append(None if leaf is None else ("rest", len(rest)))
            rest += [] if leaf is None else [leaf]
            continue
        name = f"{str(leaf.dtype).removeprefix('torch.')} {leaf.device}"
        places.append((name, len(groups.setdefault(name, []))))
        groups[name].append(leaf)
    sizes = {name: [leaf.numel() for leaf in group] for name, group in groups.items()}
    shapes = {name: [tuple(leaf.shape) for leaf in group] for name, group in groups.items()}
    template = leaves.unflatten(range(len(places)))

    def unravel(flat: Flat) -> PyTree:
        views: dict[str, Any] = {"rest": flat.get("rest")}
        for name, lengths in sizes.items():
            pieces = torch.split(flat[name], lengths)
            views[name] = [piece.view(shape) for piece, shape in zip(pieces, shapes[name], strict=True)]

        numbers = flatten(template)  # in a graph too, where the structure that was found above is unknown
        found = [places[number] for number in numbers.leaves]
        return numbers.unflatten([None if place is None else views[place[0]][place[1]] for place in found])

    flat: Flat = {name: torch.cat([leaf.detach().reshape(-1) for leaf in group]) for name, group in groups.items()}
    return Raveled({**flat, "rest": rest} if rest else flat, unravel)
