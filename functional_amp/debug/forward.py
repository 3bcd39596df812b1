"""What a forward loses in half precision, module by module: casts that flush numbers, and outputs near the maximum."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

import functional_amp.debug.torch_private as torch_private
from functional_amp.tree import flatten

OUTSIDE = "<loss function>"


@dataclass(frozen=True)
class ModuleRange:
    """What the operators of a module do in half precision; those of its submodules count there.

    Attributes:
        module: the path from the outermost module that the loss function calls (`<root>` is that
            module itself); `<loss function>` for what runs outside of any.
        kind: the name of its class.
        casts: how many non-zero elements were cast to half precision.
        flushed: the share of them that became zero.
        largest: the largest absolute value of an output in half precision; an infinity that was
            written on purpose, as into a mask, does not count.
        bits_left: from `largest` to the largest number of the dtype, in powers of two; inf where all
            outputs are 0, -inf where an operator made inf or NaN of finite numbers.
    """

    module: str
    kind: str
    casts: int
    flushed: float
    largest: float
    bits_left: float


@dataclass
class _Counts:
    kind: str
    casts: int = 0
    flushed: int = 0
    largest: float = 0.0


@dataclass
class _Place:
    """A module in its forward, with the names of those below the outermost one."""

    path: str
    kind: str
    names: dict[int, str] = field(default_factory=dict)


class ForwardRanges(torch_private.DispatchMode):
    """Watches the operators of a forward; enter it around the loss function alone.

    Nothing is changed: the operators run as they are, and the hooks on `nn.Module` go when it ends.
    """

    def __init__(self, *dtypes: torch.dtype):
        super().__init__()
        self._dtypes = dtypes
        self._counts: dict[str, _Counts] = {}
        self._open: list[_Place] = []
        self._hooks: list[Any] = []

    def ranges(self) -> tuple[ModuleRange, ...]:
        """One for each module that computed in half precision, in the order of their first operators."""
        largest = min(torch.finfo(dtype).max for dtype in self._dtypes)
        return tuple(
            ModuleRange(
                module=path,
                kind=counts.kind,
                casts=counts.casts,
                flushed=counts.flushed / max(1, counts.casts),
                largest=counts.largest,
                bits_left=math.log2(largest / counts.largest) if 0 < counts.largest < math.inf else _edge(counts),
            )
            for path, counts in self._counts.items()
        )

    def __enter__(self):
        self._hooks = [
            global_hooks.register_module_forward_pre_hook(self._enter_module),
            global_hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *exception: Any):
        super().__exit__(*exception)
        for hook in self._hooks:
            hook.remove()
        self._open.clear()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        names = self._open[0].names if self._open else {id(child): name for name, child in module.named_modules()}
        path = names.get(id(module), type(module).__name__) or "<root>"
        self._open.append(_Place(path, type(module).__name__, names))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open:
            self._open.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        finite_before = _all_finite((args, kwargs)) if torch_private.schema_of(func).is_mutable else None
        out = func(*args, **kwargs)
        if "empty" in func.overloadpacket.__name__:  # memory that nobody has written to yet
            return out
        for tensor in flatten(out).leaves:
            if isinstance(tensor, Tensor) and tensor.dtype in self._dtypes and tensor.numel():
                self._look(func, args, kwargs, tensor.detach(), finite_before)
        return out

    def _look(self, func: Any, args: Any, kwargs: Any, out: Tensor, finite_before: bool | None) -> None:
        place = self._open[-1] if self._open else _Place(OUTSIDE, "")
        counts = self._counts.setdefault(place.path, _Counts(place.kind))
        finite = torch.isfinite(out)
        peak = float(out[finite].abs().max()) if finite.any() else 0.0
        if not finite.all() and (_all_finite((args, kwargs)) if finite_before is None else finite_before):
            peak = math.inf  # this operator made it: the -inf of a mask is written on purpose, or only moved
        counts.largest = max(counts.largest, peak)
        source = args[0] if args and isinstance(args[0], Tensor) else None
        if func is torch_private.to_copy and source is not None and source.dtype not in self._dtypes:
            nonzero = source.detach() != 0
            counts.casts += int(nonzero.sum())
            counts.flushed += int((nonzero & (out == 0)).sum())


def _all_finite(arguments: Any) -> bool:
    """Whether an operator reads floating-point tensors, and neither they nor its numbers hold inf or NaN."""
    leaves = flatten(arguments).leaves
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    numbers = [leaf for leaf in leaves if isinstance(leaf, float)]
    return bool(tensors) and all(map(math.isfinite, numbers)) and all(bool(torch.isfinite(t).all()) for t in tensors)


def _edge(counts: _Counts) -> float:
    return -math.inf if counts.largest == math.inf else math.inf
