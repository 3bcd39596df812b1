"""An update by an optimizer of torch.optim in eager mode, in a graph, and under a transform."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from functional_amp.dtypes import divided
from functional_amp.engine.operators import announce_writing, can_write_in_place, implement, operator
from functional_amp.engine.storage import Storage, copied, versioned
from functional_amp.mode import host_readable
from functional_amp.optim.imperative import Imperative, known, laid_out
from functional_amp.torch_private import levels


class Given(NamedTuple):
    """What an update is given: tensors, the count of updates before it, where the parameters are, the state's names."""

    params: list[Tensor]
    grads: list[Tensor | None]
    kept: list[Tensor]
    updates: Tensor
    paths: list[str]
    names: list[str]


def updated(
    imperative: Imperative, given: Given, divisor: Tensor | None, applied: Tensor | None, storage: Storage
) -> tuple[list[Tensor], list[Tensor]]:
    """The new parameters and what is kept: on copies, or on the leaves themselves where the storage says so."""
    if not can_write_in_place():
        return _updated_in_transform(imperative, given)
    own = given._replace(params=_working(given.params, storage), kept=_working(given.kept, storage))
    written = [leaf for leaf in (*own.params, *own.kept) if leaf.dim()]
    _update_in_place(imperative, own, divisor, applied, lambda: storage.writing_to(versioned(written)))
    return own.params, own.kept


def _working(leaves: list[Tensor], storage: Storage) -> list[Tensor]:
    """What the optimizer writes to."""
    if not storage.writes:
        return [copied(leaf) for leaf in leaves]
    return [leaf if leaf.dim() else leaf.clone() for leaf in leaves]  # a 0-dim leaf may be held elsewhere


def _update_in_place(
    imperative: Imperative,
    given: Given,
    divisor: Tensor | None,
    applied: Tensor | None,
    writing: Callable[[], None],
) -> None:
    """One update of the parameters and the tensors that are kept, where `applied` holds; an operator in a graph.

    `writing` is called before the first write: a schedule that raises has written nothing.

    The flag is looked at where that is free, and where the optimizer counts its steps on the host, so that the host
    has to know. Else the update is made, and taken back by selection.
    """
    params, grads, kept, count, paths, names = given
    in_a_graph = operator("imperative_")
    if in_a_graph is not None:
        present, missing = [grad for grad in grads if grad is not None], [grad is None for grad in grads]
        writing()
        in_a_graph(params, present, kept, missing, count, divisor, applied, paths, names, imperative.number)
        return
    before: list[Tensor] = []
    if applied is not None:
        counts_on_host = any([tensor.is_cpu for tensor in kept]) and not applied.is_cpu
        if host_readable(applied) or counts_on_host:
            if not applied:
                return
        else:
            before = [tensor.clone() for tensor in (*params, *kept)]
    own = [None if g is None else _own(g, p, divisor) for p, g in zip(params, grads, strict=True)]
    imperative.step([param.detach() for param in params], own, kept, count, paths, names, writing)
    for old, new in zip(before, (*params, *kept)):
        assert applied is not None
        new.copy_(torch.where(applied.to(old.device), new, old))


def _own(grad: Tensor, param: Tensor, divisor: Tensor | None) -> Tensor:
    """A gradient in true units, of the parameter's dtype, that an optimizer may write to.

    It lies in memory as the parameter does, as autograd leaves it in an imperative loop.
    """
    grad = grad.clone() if divisor is None else divided(grad, divisor)
    return laid_out(grad.to(param.dtype), param)


def _operator(
    params: list[Tensor],
    present: list[Tensor],
    kept: list[Tensor],
    missing: list[bool],
    count: Tensor,
    divisor: Tensor | None,
    applied: Tensor | None,
    paths: list[str],
    names: list[str],
    number: int,
) -> None:
    imperative = known[number]()
    assert imperative is not None, "a graph outlived the optimizer that it was made for"
    waiting = iter(present)
    grads = [None if absent else next(waiting) for absent in missing]
    with torch.no_grad():
        _update_in_place(
            imperative, Given(params, grads, kept, count, paths, names), divisor, applied, announce_writing
        )


implement("imperative_", _operator, "CompositeExplicitAutograd", lambda *args: None)


class _Call(NamedTuple):
    """An update as a function of a flat list: parameters, what is kept, gradients, count."""

    imperative: Imperative
    missing: tuple[bool, ...]
    n_kept: int
    paths: list[str]
    names: list[str]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        n = len(self.missing)
        new = [tensor.clone() for tensor in tensors[: n + self.n_kept]]
        present = iter(tensors[n + self.n_kept : -1])
        grads = [None if absent else _own(next(present), p, None) for absent, p in zip(self.missing, new)]
        self.imperative.step(new[:n], grads, new[n:], tensors[-1], self.paths, self.names)
        return tuple(new)


class _Members(torch.autograd.Function):
    """The update of each member of an ensemble, one after the other: an imperative optimizer knows no vmap."""

    @staticmethod
    def forward(call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            return call(*[tensor.detach() for tensor in tensors])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        call, *tensors = args
        results = []
        for member in range(info.batch_size):
            own = [t if dim is None else t.select(dim, member) for t, dim in zip(tensors, in_dims[1:], strict=True)]
            results.append(_Members.apply(call, *own))
        stacked = tuple([torch.stack(leaves) for leaves in zip(*results, strict=True)])
        return stacked, tuple([0] * len(stacked))


def _updated_in_transform(imperative: Imperative, given: Given) -> tuple[list[Tensor], list[Tensor]]:
    """The same under `torch.func`: member by member, or with a derivative.

    Raises:
        RuntimeError: in a graph, and for a derivative that the class would make zero.
    """
    name = imperative.cls.__name__
    if operator("imperative_") is not None:
        raise RuntimeError(
            f"from_torch: found {name} in a graph under a torch.func transform, expected one of them. Compile the "
            "update of one member, or use functional_amp.sgd, adam or adamw."
        )
    params, grads, kept, count, paths, names = given
    call = _Call(imperative, tuple([grad is None for grad in grads]), len(kept), paths, names)
    tensors = [*params, *kept, *[grad for grad in grads if grad is not None], count]
    learned = [value for value in imperative.hyper.values() if isinstance(value, Tensor)]
    if not any([level.requires_grad for tensor in (*tensors, *learned) for level in levels(tensor)]):
        results: Any = _Members.apply(call, *tensors)
    elif imperative.hyper.get("differentiable"):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            results = call(*tensors)
    else:
        raise RuntimeError(
            f"from_torch: found a derivative through {name}, expected none: it would be zero. "
            "Pass differentiable=True where the class has it, or use functional_amp.sgd, adam or adamw."
        )
    return list(results[: len(params)]), list(results[len(params) :])
