"""Train a byte-level GPT on the sources of Python's standard library, in float16 by default.

The loss scale climbs until the float16 gradients overflow. That update is skipped, the scale is
halved, and training goes on: watch it in the bar, and in the picture that is drawn at the end.
The first update that is skipped is run again, to say which operator overflowed.
Ctrl-C ends the run after the update at hand, with its figures and its picture (exit code 130).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
import torch.nn.functional as F
from gpt import GPT
from options import SIZES, Options, parse
from report import Recent, Report, draw
from text import byte_entropy, even_batches, random_batches, standard_library
from torch import Tensor

import functional_amp as fa
from functional_amp.debug import init_history, record

LossFn = Callable[[dict[str, Tensor], Tensor], Tensor]

MAX_NORM = 1.0
READ_EVERY = 10  # updates between two looks at the history
VALIDATIONS = 8  # in a run


def next_byte_loss(apply: fa.Apply) -> LossFn:
    """The mean loss, in nats, of predicting each byte from those before it."""

    def loss_fn(params: dict[str, Tensor], micro_batch: Tensor) -> Tensor:
        logits = apply(params, micro_batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), micro_batch[:, 1:].flatten())

    return loss_fn


def in_precision(loss_fn: LossFn, dtype: torch.dtype) -> LossFn:
    """The same loss with its matrix products in `dtype`; the parameters stay float32."""
    return loss_fn if dtype == torch.float32 else fa.autocast(loss_fn, dtype)


def make_optimizer(learning_rate: float, steps: int) -> fa.Optimizer:
    """AdamW with warm-up and cosine; biases and norms do not decay."""
    warmup = max(1, steps // 10)
    schedule = fa.warmup_cosine(learning_rate, warmup, max(steps, warmup + 1))
    return fa.partition(
        {
            "decay": fa.adamw(schedule, betas=(0.9, 0.95), weight_decay=0.1),
            "no decay": fa.adamw(schedule, betas=(0.9, 0.95), weight_decay=0.0),
        },
        lambda path, leaf: "decay" if leaf.ndim > 1 else "no decay",
    )


def make_scaler(dtype: torch.dtype, steps: int) -> fa.Scaler:
    """A loss scale for float16; bfloat16 has the range of float32 and needs none."""
    if dtype != torch.float16:
        return fa.NoScale()
    # The default interval of 2000 outlasts the run; with this one the scale finds its limit early in it.
    return fa.DynamicScale(growth_interval=max(5, steps // 12))


def train(options: Options, stop: threading.Event) -> Report:
    """Trains to the end, or until the event is set and the update at hand is done."""
    size, dtype, device = SIZES[options.size], getattr(torch, options.dtype), torch.device(options.device)
    torch.manual_seed(options.seed)
    if options.size == "tiny":
        torch.set_num_threads(1)  # on a CPU: so small that threads spend their time waiting for each other
    training, validation = (part.to(device) for part in standard_library())
    micro_batches = random_batches(training, size.batch, size.shape.context, options.seed)
    windows = islice(fa.windows(micro_batches, options.accumulate), options.steps)
    held_out = even_batches(validation, 16, 16, size.shape.context)

    apply, params, _ = fa.from_module(GPT(size.shape).to(device))
    optimizer = make_optimizer(size.learning_rate, options.steps)
    loss_fn = in_precision(next_byte_loss(apply), dtype)
    step = fa.make_step(loss_fn, optimizer, max_norm=MAX_NORM, compile=options.compile)
    state = fa.init_state(params, optimizer, make_scaler(dtype, options.steps))
    history = init_history(state, options.steps)
    evaluate = in_precision(next_byte_loss(apply.eval()), dtype)

    def validation_loss() -> float:
        return torch.stack([evaluate(state.params, batch) for batch in held_out]).mean().item()

    report = Report(title(options, params), options.dtype, options.steps, byte_entropy(validation), options.explain)
    recent = Recent(step, state, 1)
    with report.bar:
        for update, window in enumerate(windows, 1):
            recent.add(window, options.seed + update)
            state, metrics = step(state, window, seed=options.seed + update)
            history = record(history, metrics)
            stopping = stop.is_set() or update == options.steps
            validating = stopping or update % max(1, options.steps // VALIDATIONS) == 0
            if validating or update % READ_EVERY == 0:
                report.read(history, recent.explain)
                recent = Recent(step, state, update + 1)
                fa.check_progress(state)
            if validating:
                report.validated(validation_loss())
            if stopping:
                break
    return report


def title(options: Options, params: dict[str, Tensor]) -> str:
    count = sum(param.numel() for param in params.values())
    return f"{options.size} GPT, {count:,} parameters, {options.dtype} on {options.device}, seed {options.seed}"


@contextmanager
def first_ctrl_c() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event, to look at between two updates; a second one interrupts."""
    event = threading.Event()

    def handler(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    options = parse(__doc__ or "", arguments)
    start = time.monotonic()
    try:
        with first_ctrl_c() as stop:
            report = train(options, stop)
    except KeyboardInterrupt:
        print("stopped at once, without a picture")
        return 130
    draw(report, options.out, MAX_NORM)
    print(report.summary(time.monotonic() - start, options.out))
    return 0 if report.complete else 130


if __name__ == "__main__":
    sys.exit(main())
