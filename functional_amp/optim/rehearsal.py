"""The first updates by from_torch beside those of the imperative optimizer: what differs shows before a run."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from functional_amp.engine.operators import can_write_in_place
from functional_amp.engine.random import all_generators_kept
from functional_amp.engine.sharded import is_sharded, local
from functional_amp.optim.imperative import Imperative, set_schedules
from functional_amp.optim.trial import refuse
from functional_amp.torch_private import is_fake, is_wrapper

FACTORS = (1.0, 0.4, -0.3, 0.7)
"""Of the gradients of each update; enough for a moment to grow, and for its sign to turn."""


def rehearse(imperative: Imperative, params: Sequence[Tensor], paths: Sequence[str]) -> None:
    """Compares a few updates with those of the imperative optimizer, on stand-ins of one leaf of each kind.

    Raises:
        TypeError: where the parameters differ.
    """
    members = imperative.grouped(params, paths)[0]
    places = _one_of_each_kind(members, params)
    if not can_write_in_place() or any([_has_no_numbers(params[place]) for place in places]):
        return
    names = [paths[place] for place in places]
    ours, theirs = ([_numbers(params[place], 1.0) for place in places] for _ in range(2))
    with all_generators_kept():
        layout, first = imperative.begin(ours, names)
    members, hypers = imperative.grouped(ours, names)
    loop = imperative.built(imperative.as_parameters(theirs), members, hypers)
    kept = first.tensors()
    for update, factor in enumerate(FACTORS):
        before = [leaf.detach().clone() for leaf in theirs]
        count = torch.tensor(update, dtype=torch.int32, device=local(ours[0]).device)
        set_schedules(loop.param_groups, hypers, count)
        for leaf in theirs:
            leaf.grad = _numbers(leaf, factor)
        with all_generators_kept():
            try:
                loop.step()
            except Exception:  # what the class itself raises, it also raises in the run
                return
        with all_generators_kept():
            imperative.apply(layout, ours, [_numbers(leaf, factor) for leaf in ours], kept, count)
        for found, expected, start in zip(ours, theirs, before, strict=True):
            if not _is_alike(local(found), local(expected.detach()), local(start)):
                refuse(
                    imperative.cls,
                    f"other parameters of shape {tuple(found.shape)} in a rehearsal than the class makes in its loop, "
                    f"at update {update + 1}: it keeps what does not show, or begins it from the gradient unseen",
                )


def _one_of_each_kind(members: Sequence[Sequence[int]], params: Sequence[Tensor]) -> list[int]:
    """The first place of each group, class, shape, dtype and device."""
    kinds: dict[object, int] = {}
    for number, places in enumerate(members):
        for place in places:
            leaf = params[place]
            kinds.setdefault((number, type(leaf), leaf.shape, leaf.dtype, leaf.device), place)
    return sorted(kinds.values())


def _has_no_numbers(leaf: Tensor) -> bool:
    """Whether a leaf has a shape alone, or is made of others."""
    return leaf.is_meta or is_fake(leaf) or (is_wrapper(leaf) and not is_sharded(leaf))


def _numbers(like: Tensor, factor: float) -> Tensor:
    """Numbers of both signs, in the place of a leaf."""
    leaf = torch.zeros_like(like.detach())
    part = local(leaf)
    part.copy_(torch.linspace(-factor, 1.5 * factor, part.numel(), device=part.device).view(part.shape))
    return leaf


def _is_alike(found: Tensor, expected: Tensor, start: Tensor) -> bool:
    """Whether two updates are the same, up to what kernels leave open between two runs."""
    if torch.equal(found, expected):
        return True
    if not torch.equal(found.isnan(), expected.isnan()):
        return False
    off, moved = ((some - expected).abs().nan_to_num(0.0, 0.0, 0.0).max() for some in (found, start))
    return bool(off <= 1e-3 * moved)
