"""What the ranks agree on before an update: one small message for each dimension of the mesh."""

from __future__ import annotations

import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from functional_amp.dtypes import accumulation_dtype, is_differentiable, like, scalar_dtype
from functional_amp.mode import host_readable
from functional_amp.ranks.mesh import Inner, Ranks
from functional_amp.ranks.reduce import buffers_over, summed_over
from functional_amp.registry import new, with_fields
from functional_amp.torch_private import all_gathered, assert_on_device
from functional_amp.tree import flatten, map_tensors
from functional_amp.values.grads import ScaledGrads
from functional_amp.values.state import TrainState, Window

P = ParamSpec("P")
R = TypeVar("R")

REDUCTIONS = (None, "mean", "sum")
"""By number, as ranks tell each other; None for a window without micro-batches."""
_DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class OverRanks(NamedTuple):
    """The state whose window is that of all ranks, and whether one of them wants to stop."""

    state: TrainState
    stop: Tensor


def over_ranks(
    ranks: Ranks, inner: Inner, state: TrainState, storage: Any, compute_dtype: torch.dtype | None
) -> OverRanks:
    """The state with the sum of all ranks' windows, which is the same on each of them.

    Gradients, weight, loss and aux are added as `accumulate` adds them; the smallest scale becomes that of all,
    with its scaler; buffers by `buffers_over`.

    Args:
        inner: the groups over which the loss sums by itself: weight and loss are those of all their ranks already.
        storage: where the sums lie.
        compute_dtype: of the step; it decides the dtypes of an empty window.

    Raises:
        RuntimeError: where the ranks are not at the same window, or their windows are not of one kind. The same
            error on all of them, and nothing has been written to.
    """
    empty = state.window is None
    window = _empty_window(state, compute_dtype) if state.window is None else state.window
    own, scaler = _numbers(ranks, state, window, empty), flatten(state.scaler)
    names, device = list(own), window.grads.scale.device
    wide = scalar_dtype(device)
    kept = [torch.as_tensor(leaf) for leaf in scaler.leaves if leaf is not None]
    vector = torch.cat([torch.stack([value.to(device, wide) for value in own.values()]), *_flat(kept, device, wide)])
    rows = vector
    for group in reversed(ranks.groups):
        rows = all_gathered(rows, group.size, group.name)
    every = rows.reshape(-1, vector.numel())
    _check({name: every[:, place] for place, name in enumerate(names)})
    for dim, group in enumerate(ranks.groups):
        if group.ranks in inner:
            first = rows.narrow(dim, 0, 1)
            _check_inner(rows[..., names.index("scale")], first[..., names.index("scale")])
            rows = first
    rows = rows.reshape(-1, vector.numel())
    column = {name: rows[:, place] for place, name in enumerate(names)}

    scale, grads = column["scale"].amin().to(torch.float32), window.grads
    total = column["weight"].sum()
    weight = torch.where((column["reduction"] == 2).any(), column["weight"].amax(), total).to(torch.float32)
    share = grads.weight / torch.where(total == 0, 1, total).to(torch.float32)
    chosen = rows.index_select(0, column["scaler"].argmin().reshape(1))[0, len(names) :]
    outer = [group for group in ranks.groups if group.ranks not in inner]
    tree = summed_over(
        grads.tree,
        ranks.groups,
        inner=inner,
        ratio=scale / grads.scale,
        dtype=ranks.reduce_dtype,
        storage=storage,
    )
    window = with_fields(
        window,
        grads=with_fields(grads, tree=tree, scale=scale, weight=weight),
        loss=column["loss"].sum().to(window.loss.dtype),
        buffers=buffers_over(state.buffers, window.buffers, share, outer),
        aux=summed_over(window.aux, outer),
    )
    leaves = iter(_unflat(chosen, kept))
    scaler = scaler.unflatten([None if leaf is None else next(leaves) for leaf in scaler.leaves])
    return OverRanks(with_fields(state, window=window, scaler=scaler), every[:, names.index("stop")].amax() > 0)


def _numbers(ranks: Ranks, state: TrainState, window: Window, empty: bool) -> dict[str, Tensor]:
    """What this rank tells the others."""
    grads = window.grads
    buffers = zip(flatten(window.buffers).leaves, flatten(state.buffers).leaves, strict=True)

    def number(value: float) -> Tensor:
        return torch.full_like(grads.scale, value)

    return {
        "windows": state.applied.to(scalar_dtype(grads.scale.device)) + state.skipped,
        "reduction": number(REDUCTIONS.index(None if empty else window.reduction)),
        "gradients": number(_kinds(flatten(grads.tree).leaves)),
        "aux": number(_kinds(flatten(window.aux).leaves)),
        "buffers": number(_kinds([None if after is before else after for after, before in buffers])),
        "stop": number(0) if ranks.stop is None else ranks.stop,
        "scale": grads.scale,
        "scaler": state.scaler.scale,
        "weight": grads.weight,
        "loss": window.loss,
    }


def _check(column: dict[str, Tensor]) -> None:
    """Raises on all ranks where they are not at one window, or their windows are not of one kind."""
    windows, kinds = column["windows"], column["reduction"]
    _require(
        (windows == windows[0]).all(),
        windows,
        "update: found ranks that have closed different numbers of windows, expected one number for all: one has "
        "skipped an update or was resumed from another checkpoint. Call update once a window on each rank, where "
        "there are no micro-batches too, and resume all of them from one checkpoint.",
    )
    _require(
        ((kinds == 0) | (kinds == kinds.amax())).all(),
        kinds,
        "loss_fn: found reduction 'sum' on some ranks and 'mean' on others (1 is 'mean', 2 is 'sum', 0 an empty "
        "window), expected one for all. Use one loss function on all ranks.",
    )
    for name in ("gradients", "aux", "buffers"):
        kinds = column[name]
        _require(
            (kinds == kinds[0]).all(),
            None,
            f"loss_fn: found ranks with {name} at different leaves, or of different shapes or dtypes, expected the "
            "same on all. Use one loss function on all ranks, frozen alike; a rank without micro-batches has neither "
            "aux nor new buffers, and gradients everywhere: let it give Loss(..., weight=0) of the same reduction.",
        )


def _check_inner(scales: Tensor, first: Tensor) -> None:
    _require(
        (scales == first).all(),
        scales.reshape(-1),
        "scaler: found different scales on ranks that share the shards of the parameters, expected one: their "
        "gradients were added in the backward. Start all ranks with the same scaler.",
    )


def _kinds(leaves: list[Any]) -> int:
    """A number below 2**24 that tells leaves at other places, of other shapes or dtypes apart; 0 for none at all."""
    number = 0
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            (dtype,) = [index for index, known in enumerate(_DTYPES) if known == leaf.dtype] or [len(_DTYPES)]
            for part in (place, leaf.dim(), *leaf.shape, dtype):
                number = (number * 1_000_003 + part + 1) % (2**24 - 3)  # a prime: exact in float32 too
    return number


def _require(condition: Tensor, found: Tensor | None, message: str) -> None:
    if not host_readable(condition):
        assert_on_device(condition, message)
    elif not condition:
        rows = "" if found is None else f" The ranks have {[float(f'{value:.9g}') for value in found.tolist()]}."
        raise RuntimeError(f"{message}{rows}")


def _empty_window(state: TrainState, compute_dtype: torch.dtype | None) -> Window:
    """The window of a rank without micro-batches."""

    def zero(leaf: Tensor) -> Tensor | None:
        if not is_differentiable(leaf):
            return None
        dtype = leaf.dtype if compute_dtype is None or leaf.is_complex() else compute_dtype
        return torch.zeros_like(leaf, dtype=accumulation_dtype(dtype))

    scale = state.scaler.scale
    tree, weight = map_tensors(zero, state.params), torch.zeros_like(scale)
    return Window(new(ScaledGrads, tree=tree, scale=scale, weight=weight), torch.zeros_like(scale), state.buffers)


def _flat(leaves: list[Tensor], device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [leaf.reshape(-1).to(device, dtype) for leaf in leaves]


def _unflat(vector: Tensor, likes: list[Tensor]) -> list[Tensor]:
    parts = vector.split([leaf.numel() for leaf in likes])
    return [
        like(part, leaf).to(leaf.dtype).reshape(leaf.shape).clone() for part, leaf in zip(parts, likes, strict=True)
    ]


_LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "process group", "processgroup", "socket")


def naming_ranks(function: Callable[P, R], ranks: Ranks | None) -> Callable[P, R]:
    """A part of a step over ranks, which says what it means where another rank is gone."""
    if ranks is None:
        return function

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            if not any(word in str(error).lower() for word in _LOST):
                raise
            raise RuntimeError(
                f"update: found that a rank did not take part in a sum over ranks, expected all of "
                f"{ranks.mesh!r}: it has raised, was killed, or hangs, or the ranks have windows of different "
                "lengths with a sharded loss. Look at its log; end this process, and resume all ranks from the last "
                f"checkpoint. The group says: {error}"
            ) from error

    return wrapped


@contextmanager
def stop_on(*signals: signal.Signals) -> Iterator[Tensor]:
    """A flag that a signal sets on this rank, for `Ranks(mesh, stop=flag)`; SIGTERM where none is named.

    Schedulers send SIGTERM to one process or to all, some time before they kill. With the flag, all ranks
    stop at the same window, with states that are the same: `if metrics.stop: save, and leave the loop`.

    Returns:
        A context manager that gives a 0-dim bool tensor; outside it the old handlers are back.

    Raises:
        TypeError: for what is not a signal.
        ValueError: outside the main thread, where Python takes no handlers.

    >>> import os
    >>> with stop_on(signal.SIGTERM) as stop:
    ...     os.kill(os.getpid(), signal.SIGTERM)
    ...     stop
    tensor(True)
    """
    if wrong := [number for number in signals if not isinstance(number, int)]:
        raise TypeError(f"signals: found {wrong[0]!r}, expected a signal. Write stop_on(signal.SIGTERM).")
    if threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "stop_on: found another thread than the main one, expected that one: Python takes handlers of signals "
            "there alone. Enter it there, and pass the flag on."
        )
    memory = bytearray(1)
    flag = torch.frombuffer(memory, dtype=torch.bool).view(())
    before = {}

    def handler(*_: Any) -> None:
        memory[0] = True  # no operator of torch: the signal may come inside a transform, which would refuse it

    try:
        for number in signals or (signal.SIGTERM,):
            before[number] = signal.signal(number, handler)
        yield flag
    finally:
        for number, old in before.items():
            signal.signal(number, old)
