"""The tail of a step alone: unscale, clip, optimizer and scaler update on ready-made scaled gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import functional_amp as fa
from benchmarks.loops import LEARNING_RATE, MAX_NORM, make_options
from benchmarks.measure import Call, bandwidths, interleaved
from benchmarks.setup import Row, Setup
from benchmarks.work import Transformer

Shapes = Sequence[tuple[int, ...]]
TAIL = "least, 32 B"
MOVED = {TAIL: 32, "with a half copy, 34 B": 34, "norm taken while adding, 30 B": 30}
"""Bytes that must move per float32 parameter: the norm reads the gradient (4); AdamW reads gradient, parameter and two
moments (16) and writes all but the gradient (12). The half copy for the next forward writes 2 more. A norm that is
taken while the last micro-batch is added reads no gradient: 34 - 4."""


OPTIONS: dict[str, Any] = {"max_norm": MAX_NORM}


class Tail(NamedTuple):
    """An update that keeps its own state.

    Attributes:
        prepare: takes scaled gradients and gives the call that does the update; they are used up.
        params: the parameters as they are now.
    """

    prepare: Callable[[list[Tensor]], Call]
    params: Callable[[], list[Tensor]]


def shapes_of(smoke: bool) -> dict[str, Shapes]:
    if smoke:
        return {"3 x 4x4": [(4, 4)] * 3}
    with torch.device("meta"):
        gpt = Transformer(layers=12, width=256, tokens=4096, length=256)
    leaves = [tuple(parameter.shape) for parameter in gpt.parameters()]
    return {
        "100 x 64x64": [(64, 64)] * 100,
        "48 x 512x512": [(512, 512)] * 48,
        "12 x 1024x1024": [(1024, 1024)] * 12,
        f"transformer, {len(leaves)} leaves": leaves,
    }


def make_tail(variant: str, shapes: Shapes, setup: Setup) -> Tail:
    params = random_tensors(shapes, setup, setup.seed)
    if variant.startswith("imperative"):
        return imperative(params, setup)
    return functional(params, flat=variant.endswith("-flat"), **make_options(variant))


def random_tensors(shapes: Shapes, setup: Setup, seed: int) -> list[Tensor]:
    generator = torch.Generator(setup.device).manual_seed(seed)
    return [torch.randn(shape, device=setup.device, generator=generator) for shape in shapes]


def imperative(values: list[Tensor], setup: Setup) -> Tail:
    params = [nn.Parameter(value) for value in values]
    optimizer = torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True)
    scaler = torch.amp.GradScaler(setup.device.type)
    scaler.scale(torch.ones((), device=setup.device))  # the first call makes the scale

    def update() -> None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    def prepare(grads: list[Tensor]) -> Call:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        return update

    return Tail(prepare, lambda: [param.detach() for param in params])


def functional(params: list[Tensor], *, flat: bool = False, **options: Any) -> Tail:
    optimizer = fa.adamw(LEARNING_RATE)
    given, unravel = fa.ravel(params) if flat else (params, lambda params: params)
    step = fa.make_step(lambda params, grads: _Ready.apply(grads, *leaves(params)), optimizer, **OPTIONS, **options)
    # The backward belongs to no tail: it runs in eager mode, and writes into the state of the same step.
    opening = fa.make_step(lambda params, grads: _Ready.apply(grads, *leaves(params)), optimizer, **OPTIONS)
    donates = options.get("donate", False)
    accumulate = step.accumulate if donates and not options.get("compile") else opening.accumulate
    state = fa.init_state(given, optimizer)
    del params, given

    def update() -> None:
        nonlocal state
        state, _ = step.update(state)

    def prepare(grads: list[Tensor]) -> Call:
        nonlocal state  # nothing else may hold the old state: its memory is free as soon as the update lets go of it
        state = accumulate(state, [torch.cat([grad.flatten() for grad in grads])] if flat else grads)
        return update

    return Tail(prepare, lambda: list(unravel(state.params)))


def leaves(params: Any) -> list[Tensor]:
    return params if isinstance(params, list) else list(params.values())


class _Ready(torch.autograd.Function):
    """A loss whose gradients are given: as they are, without the scale."""

    @staticmethod
    def forward(grads: list[Tensor], *params: Tensor) -> Tensor:
        return torch.zeros((), device=params[0].device)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.grads = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grads, ctx.grads = ctx.grads, None  # nobody but the state is to hold them
        return None, *grads


def measure(setup: Setup) -> list[Row]:
    return [Row("tail", case, "ms", dict(medians(shapes, setup))) for case, shapes in shapes_of(setup.smoke).items()]


def medians(shapes: Shapes, setup: Setup) -> dict[str, float]:
    """Milliseconds of the tail of each variant."""
    torch._dynamo.reset()  # shapes that change between cases would be compiled as dynamic ones
    variants = [variant for variant in setup.variants if variant != "imperative-compiled"]  # no model here
    grads = [grad * 2.0**16 for grad in random_tensors(shapes, setup, setup.seed + 1)]

    def preparing(tail: Tail) -> Callable[[], Call]:
        return lambda: tail.prepare([grad.clone() for grad in grads])

    calls = {variant: preparing(make_tail(variant, shapes, setup)) for variant in variants}
    seconds = interleaved(calls, setup.device, setup.rounds, setup.warmup)
    return {variant: 1e3 * value for variant, value in seconds.items()}


def limits(setup: Setup, tails: Sequence[Row]) -> list[Row]:
    """Each tail's time as a multiple of the least that the bandwidth of memory allows."""

    def row(case: str, unit: str, limit: float, values: dict[str, float] | None = None) -> Row:
        return Row("limit", case, unit, {**(values or {}), "limit": limit}, compared=False)

    measured = bandwidths(setup.device, megabytes=1 if setup.smoke else 256)
    rows = [row(f"bandwidth, {kernel}", "GB/s", value / 1e9) for kernel, value in measured.items()]
    times = {tail.case: tail.values for tail in tails or measure(setup)}
    for case, shapes in shapes_of(setup.smoke).items():
        count = sum(torch.Size(shape).numel() for shape in shapes)
        milliseconds = {variant: ms for variant, ms in times[case].items() if not isinstance(ms, str)}
        for kernel, bandwidth in measured.items():
            for name, moved in MOVED.items():
                rows.append(row(f"{case}, {kernel}: {name}", "ms", 1e3 * count * moved / bandwidth))
            least = 1e3 * count * MOVED[TAIL] / bandwidth
            ratios = {variant: ms / least for variant, ms in milliseconds.items()}
            rows.append(row(f"{case}, {kernel}: times the least", "x", 1.0, ratios))
    return rows
