"""Parameters that are made whole where the forward reads them: what `from_module(..., gather=dtype)` adds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from functional_amp.engine.sharded import is_sharded
from functional_amp.ranks.shard import gather


class Layout(NamedTuple):
    """How a parameter of the module is sharded already, by tensor parallelism."""

    device_mesh: Any
    placements: Any


def layouts_of(module: nn.Module) -> dict[str, Layout]:
    """The layouts of the parameters that are DTensors, by their places."""
    parameters: Any = module.named_parameters(remove_duplicate=False)
    return {place: Layout(p.device_mesh, p.placements) for place, p in parameters if is_sharded(p)}


def read_gathered(module: nn.Module, dtype: Any, layouts: dict[str, Layout]) -> None:
    """Lets each layer of a private copy of a module gather a parameter when its forward reads it.

    Each reading gathers: what autograd keeps for the backward is whole, unless a checkpoint around the block
    drops it, and reads again in the backward.

    Raises:
        TypeError: for a dtype that is no floating-point one; for layers that read their weights in other ways.
    """
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(
            f"gather: found {dtype!r}, expected the dtype to compute in, such as torch.bfloat16; torch.float32 casts "
            "nothing."
        )
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.RNNBase):
            raise TypeError(
                f"gather: found {type(layer).__name__} at {prefix!r}, which keeps its weights in a list of its own, "
                "expected layers that read them as attributes. Use a loop over nn.LSTMCell, or leave gather out and "
                "gather the tree in the loss function: functional_amp.ranks.gather for each leaf."
            )
        names = [name for name, parameter in layer._parameters.items() if parameter is not None]
        if names:
            kind: Any = type(layer)
            readers = {name: _reader(name, dtype, layouts.get(f"{prefix}.{name}".lstrip("."))) for name in names}
            reading = type(kind.__name__, (kind,), {"__module__": kind.__module__, **readers})
            object.__setattr__(layer, "__class__", reading)


def _reader(name: str, dtype: torch.dtype, layout: Layout | None) -> property:
    def read(layer: Any) -> Any:
        return gather(layer._parameters[name], dtype, layout)

    return property(read)
