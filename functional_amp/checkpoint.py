"""A TrainState as a flat dict of named tensors, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype, is_differentiable
from functional_amp.engine.sharded import distributed_as, local
from functional_amp.names import encoded, kind, named, same, shown, walk
from functional_amp.optim import AdamState, EmaState, SGDState, TorchState
from functional_amp.registry import with_fields
from functional_amp.tree import PyTree, flatten, map_tensors
from functional_amp.values.grads import Loss, ScaledGrads
from functional_amp.values.scaler import DynamicScale, NoScale, StaticScale
from functional_amp.values.state import Metrics, TrainState, Window

FORMAT_VERSION = 1

# torch.load(weights_only=True) makes objects of these classes alone, and only from tensors, numbers and containers.
torch.serialization.add_safe_globals(
    [TrainState, Window, Metrics, ScaledGrads, Loss, DynamicScale, StaticScale, NoScale]
    + [AdamState, SGDState, TorchState, EmaState]
)


def state_dict(state: TrainState, **extra: Tensor | float | str) -> dict[str, Tensor]:
    """Write a state as a flat dict of named tensors, for any format that holds tensors by name.

        params/0.weight   opt_state/exp_avg/0.weight   scaler/scale   scaler/growth_interval
        window/grads/tree/0.weight   applied   format_version   extra/position

    A name is the path to the leaf: fields, dict keys and positions, joined by "/". A "/" in a key is
    written %2F, a "%" %25. None has no entry. The numbers that are static fields of the scaler are
    tensors too; text is its UTF-8 bytes. `dim_order/<name>` tells how a leaf lies in memory where
    that is not row by row.

    Args:
        state: the state; its window may be open.
        extra: more to save under `extra/<name>`, such as the position in the data: tensors, numbers, text.

    Returns:
        Contiguous tensors of the same dtypes and devices, each a copy in storage of its own.

    Raises:
        TypeError: for anything but a TrainState, a leaf that is not a strided tensor, a static field or
            an extra of another kind; the name is given.
        ValueError: where two leaves have one name.
        RuntimeError: for a state that was given to a step with donate=True.

    >>> import torch
    >>> from functional_amp import init_state, sgd
    >>> flat = state_dict(init_state({"w": torch.ones(2)}, sgd(lr=0.1)), position=7)
    >>> flat["params/w"], flat["scaler/growth_interval"], flat["extra/position"]
    (tensor([1., 1.]), tensor(2000), tensor(7))
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"state: found {type(state).__name__}, expected a TrainState. "
            "Remedy: save what init_state or a step gave; a step returns the pair (state, metrics)."
        )
    leaves, static = named(state)
    flat = {"format_version": torch.tensor(FORMAT_VERSION), "window_open": torch.tensor(state.window is not None)}
    for name, leaf in leaves.items():
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
            found = leaf.layout if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(
                f"{name}: found {found}, expected a strided tensor or None. "
                "Remedy: wrap a number in torch.tensor(...), call .to_dense() on a sparse leaf."
            )
        copy = leaf.detach().clone().resolve_conj().resolve_neg()
        if (order := _order(local(copy))) != [*range(copy.dim())]:
            flat[f"dim_order/{name}"] = torch.tensor(order)
        flat[name] = copy.contiguous()
    flat.update(static)
    flat.update({f"extra/{name}": encoded(value, f"extra/{name}").clone() for name, value in extra.items()})
    return flat


def load_state_dict(template: TrainState, flat: Mapping[str, Tensor]) -> TrainState:
    """Read a state from its flat dict, into the structure of a template.

    Everything is checked before anything is copied: the version, the names, shapes, dtypes and static fields.
    The template gives the structure and the devices; no value of its leaves is used. The window is open where
    the saved one was, whether the template has one or none. Entries under `extra/` are left to the caller.

    Args:
        template: a state of the same model, optimizer and scaler: what `init_state` gives.
        flat: what `state_dict` gave, also through a file. It is not changed, and shares no storage with the result.

    Returns:
        The saved state, bit for bit, laid out in memory as it was.

    Raises:
        TypeError: for a template that is not a TrainState, a flat that is not a dict.
        ValueError: naming every difference between the two.

    >>> import torch
    >>> from functional_amp import init_state, sgd
    >>> state = init_state({"w": torch.ones(2)}, sgd(lr=0.1))
    >>> template = init_state({"w": torch.zeros(2)}, sgd(lr=0.1))
    >>> load_state_dict(template, state_dict(state)).params
    {'w': tensor([1., 1.])}
    """
    check_template(template)
    if not isinstance(flat, Mapping):
        raise TypeError(
            f"flat: found {type(flat).__name__}, expected the dict that state_dict gave. "
            "Remedy: a state that torch.load gave needs no load_state_dict."
        )
    _check_version(flat)
    template = with_window_of(flat, template)
    leaves, static = named(template)
    differences = [difference for name, leaf in leaves.items() for difference in _leaf_differences(name, leaf, flat)]
    for name, value in static.items():
        if not same(flat.get(name), value):
            differences.append(f"{name}: found {shown(flat.get(name))}, expected {shown(value)}")
    known = {*leaves, *static, *(f"dim_order/{name}" for name in leaves), "format_version", "window_open"}
    differences += [
        f"{name}: found {shown(value)}, expected no such entry"
        for name, value in flat.items()
        if name not in known and not str(name).startswith("extra/")
    ]
    if differences:
        raise ValueError(
            "load_state_dict: the saved state differs from the template:\n  "
            + "\n  ".join(differences)
            + "\nRemedy: build the template with the saved model, optimizer and scaler, and change what is to "
            "change afterwards, by dataclasses.replace. An open window with missing gradients or aux needs a "
            "template with an open window: step.accumulate(template, micro_batch)."
        )
    loaded = [None if leaf is None else _laid_out(name, leaf, flat) for name, leaf in leaves.items()]
    return _one_scale(cast(TrainState, flatten(template).unflatten(loaded)))


def _check_version(flat: Mapping[str, Tensor]) -> None:
    version = flat.get("format_version")
    if not same(version, torch.tensor(FORMAT_VERSION)):
        raise ValueError(
            f"format_version: found {shown(version)}, expected {FORMAT_VERSION}. Remedy: pass a dict that state_dict "
            "of this version of functional_amp gave; read others with the version that wrote them."
        )


def with_window_of(flat: Mapping[str, Tensor], template: TrainState) -> TrainState:
    """The template with a window where the saved state had one, and without where it had none."""
    is_open = flat.get("window_open")
    if not isinstance(is_open, Tensor) or kind(is_open) != "torch.bool of shape ()":
        raise ValueError(
            f"window_open: found {shown(is_open)}, expected True or False. Remedy: load all entries of the file."
        )
    if not is_open:
        return with_fields(template, window=None)
    if template.window is not None:
        return template
    tree = map_tensors(_gradient_of, template.params)
    scale = template.scaler.scale
    half = any(str(name).split("/")[:2] == ["window", "params"] for name in flat)
    params = _in_dtypes_of(flat, template.params) if half else None
    loss, reduction = flat.get("window/loss"), flat.get("window/reduction")
    summed = isinstance(reduction, Tensor) and same(reduction, encoded("sum", "window/reduction"))
    window = Window(
        ScaledGrads(tree, scale),
        torch.zeros_like(scale, dtype=loss.dtype if isinstance(loss, Tensor) else None),
        template.buffers,
        params,
        reduction="sum" if summed else "mean",
    )
    return with_fields(template, window=window)


def _gradient_of(leaf: Tensor) -> Tensor | None:
    """What an open window holds for a parameter."""
    return torch.empty_like(leaf, dtype=accumulation_dtype(leaf.dtype)) if is_differentiable(leaf) else None


def _in_dtypes_of(flat: Mapping[str, Tensor], params: PyTree) -> PyTree:
    """The parameters as an open window holds them: the step's `compute_dtype` is in the file alone."""
    names = [name for name, _, is_static in walk(params, "window/params") if not is_static]
    leaves = flatten(params)
    saved = [flat.get(name) for name in names]
    return leaves.unflatten(
        [
            torch.empty_like(leaf, dtype=half.dtype) if is_differentiable(leaf) and is_differentiable(half) else leaf
            for leaf, half in zip(leaves.leaves, saved, strict=True)
        ]
    )


def _leaf_differences(name: str, leaf: Any, flat: Mapping[str, Tensor]) -> Iterator[str]:
    found, order = flat.get(name), flat.get(f"dim_order/{name}")
    if leaf is None:
        if found is not None:
            yield f"{name}: found {shown(found)}, expected no such entry, as the template has None there"
    elif not isinstance(leaf, Tensor) or leaf.is_meta:
        what = "a meta tensor" if isinstance(leaf, Tensor) else type(leaf).__name__
        yield f"{name}: found {what} in the template, expected a tensor on the device to load to"
    elif not isinstance(found, Tensor):
        yield f"{name}: found {shown(found)}, expected {kind(leaf)}"
    elif kind(found) != kind(leaf):
        yield f"{name}: found {kind(found)}, expected {kind(leaf)}"
    elif order is not None and not _is_order(order, leaf.dim()):
        yield f"dim_order/{name}: found {shown(order)}, expected an order of {leaf.dim()} dimensions"


def _order(leaf: Tensor) -> list[int]:
    """The dimensions of a dense leaf from the outermost to the innermost.

    Those of size 1 count: their strides make a convolution channels last, and so choose its kernel. Of two equal
    strides the inner one is that of such a dimension.
    """
    return sorted(range(leaf.dim()), key=lambda dim: (-leaf.stride(dim), leaf.shape[dim] <= 1))


def _is_order(order: Any, dims: int) -> bool:
    return (
        isinstance(order, Tensor)
        and kind(order) == f"torch.int64 of shape {(dims,)}"
        and sorted(order.tolist()) == list(range(dims))
    )


def _laid_out(name: str, leaf: Tensor, flat: Mapping[str, Tensor]) -> Tensor:
    """A copy of the saved leaf on the template's device, in the layout it was saved with."""
    found, order = flat[name].detach(), flat.get(f"dim_order/{name}")
    if order is not None:
        dims = order.tolist()
        # a clone: to contiguous() the strides of dimensions of size 1 are as good as any
        memory = found.permute(dims).clone(memory_format=torch.contiguous_format)
        found = memory.permute([dims.index(dim) for dim in range(len(dims))])
    return distributed_as(found.to(leaf.device, copy=True), leaf)


def _one_scale(state: TrainState) -> TrainState:
    """The state, whose open window has the very scale of the scaler: the stages ask whether it is one tensor."""
    window, scale = state.window, state.scaler.scale
    if window is None or not torch.equal(window.grads.scale, scale):
        return state
    return with_fields(state, window=with_fields(window, grads=with_fields(window.grads, scale=scale)))


def check_template(template: object) -> None:
    """Raises TypeError for anything but a `TrainState`."""
    if not isinstance(template, TrainState):
        raise TypeError(
            f"template: found {type(template).__name__}, expected a TrainState. Remedy: pass init_state(...) first."
        )
