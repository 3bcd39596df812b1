"""What `explain` returns, and how it prints: a table that a person can act on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from functional_amp.debug.explain_range import Range

NOT_REPRODUCED = "not reproduced in eager"
NOT_ON_THIS_RANK = "not on this rank"
NO_WEIGHT = "no weight"


@dataclass(frozen=True)
class Explanation:
    """Why a window was not finite.

    Attributes:
        found: whether its loss or its gradients were not finite when it was run again.
        stage: input (a tensor was bad before the loss function touched it), forward, backward, accumulate,
            unscale, norm, "not reproduced in eager", "not on this rank" for a
            step with a mesh, or "no weight" for a window that was skipped for its weight.
        micro_batch: which one of the window, from 0; None where the fault is in none of them.
        source: the bad tensor where the stage is input: `params.w`, `batch.0`, `buffers.mean`, or `a constant`.
        module, module_type: the path of the module inside the one that the loss function called, and its type.
        operator: torch's name of the operator that gave the first bad value, or first used the bad tensor.
        node: the autograd node that it ran in, in the backward.
        file, line: of the code that called it; in the backward, of the forward's.
        inputs, output: the operator's, or the bad tensor itself, as ranges.
        leaves: the gradients that are not finite.
        loss: of that micro-batch.
        scale: the loss scale of the replay.
        largest_good_scale: the largest power of two that the whole window is finite at; None where no scale helps.
        harmless: how many operators gave inf or NaN that has nothing to do with the fault: masks, values not used.
        advice: what to do.
    """

    found: bool
    stage: str
    scale: float
    loss: float
    advice: str
    micro_batch: int | None = None
    source: str = ""
    module: str = ""
    module_type: str = ""
    operator: str = ""
    node: str = ""
    file: str = ""
    line: int | None = None
    inputs: tuple[Range, ...] = ()
    output: Range | None = None
    leaves: tuple[str, ...] = ()
    largest_good_scale: float | None = None
    harmless: int = 0

    @property
    def summary(self) -> str:
        """One line: where, what, and which scale works."""
        if not self.found:
            return f"{self.stage} at a scale of {scale_text(self.scale)}"
        where = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        if self.source:
            what = f"{self.source} is not finite"
        elif self.operator:
            what = f"{self.operator} in {self._module_text}" if self._module_text else self.operator
        else:
            what = "the gradients' units"
        good = self.largest_good_scale
        remedy = "no scale helps" if good is None else f"a scale of {scale_text(good)} works"
        return f"{self.stage}{where}: {what}; {remedy}"

    @property
    def _module_text(self) -> str:
        if not self.module_type:
            return ""
        return f"{self.module or 'the root module'} ({self.module_type})"

    def __str__(self) -> str:
        rows = [("window", self.summary), ("scale", scale_text(self.scale))]
        if self.found:
            good = self.largest_good_scale
            rows += [
                ("module", self._module_text),
                ("operator", self.operator),
                ("autograd node", self.node),
                ("line", f"{self.file}:{self.line}" if self.file else ""),
                *((f"input {index}", f"{given.name}: {given}") for index, given in enumerate(self.inputs)),
                ("output", "" if self.output is None else str(self.output)),
                ("gradients", _listed(self.leaves)),
                ("loss", f"{self.loss:.6g}"),
                ("largest good scale", "none" if good is None else scale_text(good)),
            ]
        if self.harmless:
            text = "operators gave inf or NaN that has nothing to do with it"
            rows.append(("harmless", f"{self.harmless} {text}"))
        rows.append(("advice", self.advice))
        return "\n".join(f"{name:<19}{text}" for name, text in rows if text)


def scale_text(scale: float) -> str:
    """A scale as a power of two, where it is one."""
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _listed(names: tuple[str, ...], most: int = 4) -> str:
    if not names:
        return ""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{len(names)} not finite: {', '.join(names[:most])}{more}"
