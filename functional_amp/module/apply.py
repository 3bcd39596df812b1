"""From an `nn.Module` to a pure function with its parameters and buffers, and back."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from functional_amp.module.back import check_names
from functional_amp.module.followed import check_kinds, check_memory, check_module, check_tensor, marks_of, own_copy
from functional_amp.module.gathered import layouts_of, read_gathered
from functional_amp.module.lender import Lender
from functional_amp.module.modes import Known
from functional_amp.module.reach import Closed
from functional_amp.module.rehearsal import refuse_lost, refuse_statistics
from functional_amp.module.templates import Tensors, registered
from functional_amp.module.traced import traced_call
from functional_amp.torch_private import parametrizations_cached


class FromModule(NamedTuple):
    """The forward as a function, the trainable parameters, and everything else the forward reads."""

    apply: Apply
    params: Tensors
    buffers: Tensors


@dataclass(frozen=True, eq=False)
class Apply(Closed):
    """The forward of a module as a pure function of its tensors.

        output          = apply(params, *args)                          # fixed buffers
        output, buffers = apply.with_buffers(params, buffers, *args)    # new ones are returned

    `apply.train()` and `apply.eval()` are the same function in the other mode, `apply.bind(buffers)` is
    the one with other fixed buffers, `apply.method("decode")` calls another method.

    The first call is a rehearsal on copies: a forward that writes to parameters, or keeps something that
    the next call would read, is refused before anything of the caller's has been touched. Later calls compare
    version counters and attributes. docs/followed.md lists what is followed and what is refused.
    """

    trainable: frozenset[str]
    """The names of the parameters."""
    buffers: Tensors
    frozen: frozenset[str]
    """The names among `buffers` that are parameters with requires_grad=False."""
    lender: Lender
    modes: dict[bool | None, Lender]
    """The lenders of train(True), train(False) and eval() (None), once they have been asked for."""
    name: str = ""
    """The method that is called; the module itself where it is empty."""
    bound: bool = False

    @property
    def template(self) -> nn.Module:
        """A private copy on the meta device: the structure without the numbers."""
        return self.lender.master

    def __call__(self, params: Tensors, /, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward with fixed buffers: those that were bound, or those that the module had.

        Raises:
            RuntimeError: if the forward wrote to a buffer (BatchNorm in train mode does), or reads running
                statistics that are not bound; see also `Apply`.
            ValueError: if names are missing among `params` or too many.
            TypeError: for a value that is no tensor.
        """
        if not (self.bound or self.lender.writes_statistics or self.lender.written):
            self._check_statistics()
        output, _, written = self._run(params, self.buffers, args, kwargs, returned=False)
        written |= self.lender.written
        refuse_lost([name for name in self.buffers if name in written])
        return output

    def with_buffers(self, params: Tensors, buffers: Tensors, /, *args: Any, **kwargs: Any) -> tuple[Any, Tensors]:
        """Runs the forward with the given buffers, which are not changed.

        Returns:
            The output, and the buffers after it under the same names.

        Raises:
            ValueError: if names are missing among `params` or `buffers`, or too many.
        """
        check_names(buffers, set(self.buffers), "buffers")
        return self._run(params, buffers, args, kwargs, returned=True)[:2]

    def train(self, mode: bool = True) -> Apply:
        """The same function in train mode (dropout on, BatchNorm on batch statistics).

        Raises:
            RuntimeError: for a module whose own `train()` does more than to set flags: one that merges weights, say.
        """
        return self._in_mode(mode, lambda module: module.train(mode))

    def eval(self) -> Apply:
        """The same function in eval mode; see `train`."""
        return self._in_mode(None, lambda module: module.eval())

    def bind(self, buffers: Tensors) -> Apply:
        """The function with other fixed buffers, which are copied: those of a trained state, for evaluation.

        Raises:
            ValueError: if names are missing among `buffers` or too many.

        >>> import torch
        >>> apply, params, buffers = from_module(torch.nn.BatchNorm1d(1))
        >>> _, trained = apply.with_buffers(params, buffers, torch.tensor([[1.0], [3.0]]))
        >>> apply.eval().bind(trained)(params, torch.tensor([[0.2]])).abs() < 1e-6
        tensor([[True]])
        """
        check_names(buffers, set(self.buffers), "buffers")
        copies = {name: buffers[name].detach().clone() for name in self.buffers}
        return dataclasses.replace(self, buffers=copies, bound=True)

    def method(self, name: str) -> Apply:
        """The function that calls another method of the module, `decode` of an autoencoder say.

        Raises:
            AttributeError: if the module has no such method.
            ValueError: for a method of every module, such as `parameters` or `half`: what it gives is not computed.
        """
        if not callable(getattr(self.template, name, None)):
            raise AttributeError(
                f"apply.method: found no method {name!r} of {type(self.template).__name__}, expected one of its class. "
                "Give the name of a method, as a string."
            )
        if name != "__call__" and getattr(type(self.template), name, None) is getattr(nn.Module, name, self):
            raise ValueError(
                f"apply.method: found {name!r}, which every module has, expected a method that computes: the module "
                "holds no numbers between calls. Ask the module itself, or look into params and buffers."
            )
        return dataclasses.replace(self, name=name)

    def state_dict(self, params: Tensors, buffers: Tensors | None = None) -> dict[str, Any]:
        """What `module.load_state_dict` takes, with the given tensors: tied weights at each of their names.

        Args:
            params: the parameters by name.
            buffers: the buffers by name; None for those of the module, or those bound.

        >>> import torch
        >>> module = torch.nn.Linear(1, 1)
        >>> apply, params, buffers = from_module(module)
        >>> module.load_state_dict(apply.state_dict(params, buffers))
        <All keys matched successfully>
        """
        buffers = self.buffers if buffers is None else buffers
        check_names(params, self.trainable, "params")
        check_names(buffers, set(self.buffers), "buffers")
        return self.lender.state_dict({**params, **buffers})

    def _in_mode(self, mode: bool | None, switch: Callable[[nn.Module], Any]) -> Apply:
        if mode not in self.modes:
            self.modes[mode] = self.lender.in_mode(switch)
        return dataclasses.replace(self, lender=self.modes[mode])

    def _check_statistics(self) -> None:
        """Raises where fixed buffers would be running statistics that training has moved, or may have."""
        names = [name for name in self.buffers if name in self.lender.statistics or name in self.lender.known.moved]
        refuse_statistics(names)

    def _run(
        self, params: Tensors, buffers: Tensors, args: Any, kwargs: Any, *, returned: bool
    ) -> tuple[Any, Tensors, set[str]]:
        check_names(params, self.trainable, "params")
        if self.lender.parametrized and parametrizations_cached():
            raise RuntimeError(
                "apply: found parametrize.cached() around the call, expected none: torch caches by the layer, whose "
                "tensors each call replaces. Enter it in the forward of the module."
            )
        if not torch.compiler.is_compiling():
            return self.lender.call(params, buffers, self.frozen, self.name, args, kwargs, returned=returned)
        fixed = [name for name in self.frozen if name not in self.lender.written]
        copies = {name: b.clone() for name, b in buffers.items() if name not in fixed}
        given = {**params, **{name: buffers[name] for name in fixed}}
        output, after = traced_call(self.lender, given, copies, self.name, args, kwargs, returned=returned)
        return output, {name: buffers[name] if name in fixed else after[name] for name in buffers}, set()


def from_module(module: nn.Module, *, scratch: Iterable[str] = (), gather: torch.dtype | None = None) -> FromModule:
    """Takes a module apart into a pure function and its tensors. The module is never changed.

    Args:
        module: any `nn.Module`, in the mode (train or eval) that the function is to have. Lazy modules
            must have seen an input.
        scratch: the names of attributes that the forward writes for others to read (`self.aux = ...`); they
            are put back after each call. Those that are written before they are read are found by themselves.
        gather: for parameters that `functional_amp.ranks.shard` distributes: each layer makes its own whole where
            its forward reads them, in this dtype. Plain parameters are cast.

    Returns:
        apply: the forward; see `Apply`.
        params: the trainable parameters by name, detached copies; tied weights are one leaf.
        buffers: the buffers by name, and the frozen parameters (`requires_grad=False`): what is not
            differentiated, not in the norm and not decayed.

    Raises:
        TypeError: for anything that is no module, a lazy module without shapes, a wrapper of a module, and
            what a copy can't follow: see docs/followed.md.

    >>> import torch
    >>> apply, params, buffers = from_module(torch.nn.Linear(2, 1))
    >>> sorted(params), apply(params, torch.ones(3, 2)).shape
    (['bias', 'weight'], torch.Size([3, 1]))
    """
    check_module(module)
    check_kinds(module)
    if isinstance(scratch, str):
        raise TypeError(f"scratch: found the string {scratch!r}, expected several names. Write ({scratch!r},).")
    tensors: dict[str, Tensor] = {}
    for place, tensor in registered(module):
        check_tensor(place, tensor)
        if not any(tensor is other for other in tensors.values()):
            tensors[place] = tensor
    check_memory(tensors)
    trainable = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}
    marks = {name: found for name, tensor in tensors.items() if (found := marks_of(name, tensor))}
    others = {name: t.detach().clone() for name, t in tensors.items() if name not in trainable}
    frozen = frozenset(name for name in others if isinstance(tensors[name], nn.Parameter))
    origin = {name: weakref.ref(tensor) for name, tensor in tensors.items()}
    master = own_copy(module)
    if gather is not None:
        read_gathered(master, gather, layouts_of(module))
    lender = Lender(master, Known(origin, frozenset(scratch), set(), set(), marks))
    apply = Apply(frozenset(trainable), dict(others), frozen, lender, {})
    return FromModule(apply, {name: t.detach().clone() for name, t in trainable.items()}, others)
