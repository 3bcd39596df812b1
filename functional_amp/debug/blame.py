"""Who is to blame for a value that is not finite: an operator itself, or one of its inputs.

    an input is to blame       where some finite replacement of its bad elements leaves fewer bad outputs
    the operator is to blame   where no replacement of all its bad inputs leaves none

"The first operator with a bad output" would be a mask, or a division whose result is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from functional_amp.debug.explain_range import Range, readable
from functional_amp.debug.locate import Place


@dataclass(eq=False)
class Outside:
    """A tensor that was not finite before the loss function touched it.

    Attributes:
        name: its path (`params.w`, `batch.0`, `buffers.mean`), or `a constant` of the loss function.
    """

    name: str
    range: Range
    index: int = -1


@dataclass(eq=False)
class Event:
    """An operator that gave a value that is not finite.

    Attributes:
        index: its place in the order of time.
        phase: forward, backward, accumulate, unscale or norm.
        itself: whether the operator is to blame.
        parents: the origins of the inputs that are to blame.
        others: the origins of the other inputs that are not finite.
        number: the inf or NaN that it was given as a number.
        written: whether it wrote an infinity on purpose (a fill, a mask), or only moved one that was.
        inputs, output: their ranges; only where the event may be a root.
    """

    index: int
    phase: str
    micro_batch: int
    operator: str
    node: str
    place: Place
    has_nan: bool
    itself: bool
    parents: list[Origin]
    others: list[Origin]
    number: float | None
    written: bool
    inputs: tuple[Range, ...] = ()
    output: Range | None = None


Origin: TypeAlias = Outside | Event

# An infinity that passes through these is still the one that somebody wrote.
_MOVES = frozenset(
    "add add_ addmm alias amax amin baddbmm cat clamp clamp_ clone constant_pad_nd copy copy_ cummax cummin "
    "diagonal div div_ expand fill fill_ flip gather index index_copy index_fill index_put index_put_ "
    "index_select lift_fresh_copy masked_fill masked_fill_ masked_scatter max maximum min minimum mul mul_ neg "
    "new_full permute repeat roll rsub scatter select slice sort stack sub sub_ _to_copy _unsafe_view to topk "
    "tril tril_ triu triu_ where".split()
)
# These are what a mask is made for: where one of them gives NaN, the mask is wrong, not the number in it.
_MASKED = frozenset("_softmax _log_softmax logsumexp logaddexp exp exp_ sub sub_ add add_".split())
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "_fused_sdp")


def count_bad(tensors: Sequence[Tensor]) -> int:
    """How many elements are not finite."""
    return sum(int((~torch.isfinite(readable(tensor))).sum()) for tensor in tensors)


def blame(
    rerun: Callable[[dict[int, Tensor]], list[Tensor] | None], inputs: dict[int, Tensor], outputs: Sequence[Tensor]
) -> tuple[list[int], bool]:
    """Tries an operator again with its bad inputs made finite.

    Args:
        rerun: gives the operator's outputs with some inputs replaced, or None where it can't run.
        inputs: the inputs that are not finite.
        outputs: the outputs that are not finite.

    Returns:
        The inputs that are to blame, and whether the operator is.
    """
    bad = count_bad(outputs)

    def left(suspects: list[int]) -> int:
        """The fewest bad outputs that any replacement of these inputs leaves."""
        fewest = bad
        for replace in _REPLACEMENTS:
            tried = rerun({suspect: replace(inputs[suspect]) for suspect in suspects})
            fewest = fewest if tried is None else min(fewest, count_bad(tried))
            if not fewest:
                break
        return fewest

    everything = list(inputs)
    healed = left(everything)
    if len(everything) == 1:
        return (everything, healed > 0) if healed < bad else ([], True)
    to_blame = [suspect for suspect in everything if left([suspect]) < bad]
    # Each of two bad inputs may be enough: neither heals alone.
    return (to_blame if to_blame or healed == bad else everything), healed > 0


def _replaced(tensor: Tensor, nan: float, posinf: float, neginf: float) -> Tensor:
    if tensor.is_floating_point() and tensor.dtype.itemsize == 1:
        return torch.nan_to_num(tensor.float(), nan, posinf, neginf).to(tensor.dtype)
    return torch.nan_to_num(tensor, nan, posinf, neginf)


def _by_the_largest(tensor: Tensor) -> Tensor:
    finite = readable(tensor)
    finite = finite[torch.isfinite(finite)]
    largest = float(finite.abs().max()) if finite.numel() else 1.0
    return _replaced(tensor, largest, largest, -largest)


# log(-1), 1 / 0 and exp(max) are bad by themselves: what heals any operator that was not to blame is among these.
_REPLACEMENTS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda tensor: _replaced(tensor, 1.0, 1.0, -1.0),
    _by_the_largest,
    lambda tensor: _replaced(tensor, 0.0, 0.0, 0.0),
    lambda tensor: _replaced(tensor, 1.0, 1.0, 1.0),
    lambda tensor: _replaced(tensor, 0.5, 0.5, 0.5),
)


def is_written(origin: Origin) -> bool:
    """Whether an infinity was put there on purpose, and only moved since: a mask."""
    if isinstance(origin, Outside):
        return not origin.range.nan and not origin.name.startswith("params")
    return origin.written


def moves(operator: str, parents: Sequence[Origin]) -> bool:
    """Whether an operator passes on infinities that all were written on purpose."""
    return operator in _MOVES and bool(parents) and all(is_written(parent) for parent in parents)


def roots(origin: Origin) -> list[Origin]:
    """The earliest causes of a value that is not finite."""
    found: list[Origin] = []
    seen: set[int] = set()
    open_origins = [origin]
    while open_origins:
        current = open_origins.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        if isinstance(current, Outside):
            found.append(current)
            continue
        causes = [parent for parent in current.parents if not is_written(parent)]
        open_origins += causes
        if current.itself or not causes:
            found += _consumed(current)
    return found


def _consumed(event: Event) -> list[Origin]:
    """Who is to blame where an operator takes infinities that were written on purpose: who wrote them, or it."""
    if event.itself or _takes_masks(event.operator):
        return [event]
    sources = _sources(event.parents)
    if event.has_nan and not all(isinstance(source, Outside) for source in sources):
        return [event]
    return sources


def _takes_masks(operator: str) -> bool:
    return operator in _MASKED or operator.startswith(_ATTENTION)


def _sources(origins: Sequence[Origin]) -> list[Origin]:
    """Where infinities that only moved came from."""
    found: dict[int, Origin] = {}
    open_origins = list(origins)
    seen: set[int] = set()
    while open_origins:
        origin = open_origins.pop()
        if id(origin) in seen:
            continue
        seen.add(id(origin))
        if isinstance(origin, Outside) or not origin.parents:
            found[id(origin)] = origin
        else:
            open_origins += origin.parents
    return list(found.values())


def ancestors(origins: Sequence[Origin]) -> set[int]:
    """The indices of the events that a value came from or that spoiled it too, written infinities left out."""
    seen: set[int] = set()
    open_origins = list(origins)
    while open_origins:
        origin = open_origins.pop()
        if isinstance(origin, Event) and origin.index not in seen and not is_written(origin):
            seen.add(origin.index)
            open_origins += [*origin.parents, *origin.others]
    return seen
