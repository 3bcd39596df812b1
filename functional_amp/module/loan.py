"""A template that is lent beyond its call: a backward may run parts of the forward again, and its hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from functional_amp.engine.loans import kept
from functional_amp.engine.unwritten import versions_of
from functional_amp.mode import transformed
from functional_amp.module.reach import walk
from functional_amp.module.rehearsal import refuse_in_backward, refuse_lost, refuse_writes
from functional_amp.module.templates import Template, Tensors


class Loan:
    """The tensors of a call, in the template that it used, and what to compare when the template comes back.

    Args:
        tensors: what lies in the template.
        followed: the names of what the backward may write to: the buffers that the caller gets.
        buffers: the names of all buffers.
        back: takes the template.
        late: takes the error where there is no call to raise it in.
    """

    def __init__(
        self,
        template: Template,
        tensors: Tensors,
        followed: Collection[str],
        buffers: Collection[str],
        is_scratch: Callable[[str], bool],
        back: Callable[[Template], None],
        late: Callable[[RuntimeError], None],
    ):
        self._template, self._tensors, self._followed, self._buffers = template, tensors, followed, buffers
        self._is_scratch, self._back, self._late = is_scratch, back, late
        self._versions: list[int] = []

    def begin(self, output: Any) -> None:
        """Lends the template until the step has its gradients; elsewhere as long as the graph of the output lives."""
        if kept(self.end):
            self._lend()
            return
        nodes = _nodes(output) if torch.is_grad_enabled() and not transformed() else []
        if not nodes:
            self._back(self._template)
            return
        self._lend()
        # An optimizer may write to the parameters meanwhile.
        self._followed = {*self._followed, *(name for name in self._tensors if name not in self._buffers)}
        held = _Held(self)
        for node in nodes:
            node.metadata.setdefault(__name__, []).append(held)

    def end(self) -> None:
        """Gives the template back.

        Raises:
            RuntimeError: for what the backward has changed, and the next call would not find.
        """
        after = self._template.take_out()
        changes = [] if self._template.unchanged() else self._template.changes()
        if changes:
            self._template.put_back()
        self._back(self._template)
        if anew := sorted(name for name, tensor in self._tensors.items() if after[name] is not tensor):
            raise RuntimeError(
                f"apply: found that the backward (a checkpointed part, which runs again, or a hook) assigns {anew} "
                "anew, expected writes in place: torch keeps what it assigns, and here it would be lost. Write "
                "self.n.add_(1), not self.n = self.n + 1, or take it out of the checkpoint or the hook."
            )
        refuse_in_backward([change.name for change in changes if not self._is_scratch(change.name)])
        if (versions := versions_of(self._tensors.values())) != self._versions:
            pairs = zip(self._tensors, self._versions, versions, strict=True)
            written = {name for name, old, new in pairs if old != new and name not in self._followed}
            refuse_writes(written.difference(self._buffers))
            refuse_lost(sorted(written))

    def end_late(self) -> None:
        """The same, where nothing can be raised: the next call does."""
        try:
            self.end()
        except RuntimeError as error:
            self._late(error)

    def _lend(self) -> None:
        self._template.place(self._tensors)
        self._versions = versions_of(self._tensors.values())


class _Held:
    """Ends a loan when the graph that may need it is gone."""

    def __init__(self, loan: Loan):
        self._loan = loan

    def __del__(self) -> None:
        self._loan.end_late()


def _nodes(output: Any) -> list[Any]:
    """The nodes of the graph that made the output."""
    tensors = [output] if isinstance(output, Tensor) else [x for _, x in walk(output) if isinstance(x, Tensor)]
    return [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
