"""Train a byte-level GPT on the sources of Python's standard library, in float16 by default.

The loss scale climbs until the float16 gradients overflow. That update is skipped, the scale is
halved, and training goes on: watch it in the bar, and in the picture that is drawn at the end.
The first update that is skipped is run again, to say which operator overflowed.
Ctrl-C ends the run after the update at hand, with its figures and its picture (exit code 130). So does SIGTERM,
on any of the processes of torchrun --nproc-per-node=2 train_gpt.py --parallel ddp; --save and --resume go on there.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
import torch.nn.functional as F
from gpt import GPT
from options import SIZES, Options, parse
from parallel import Parallel, processes
from report import Recent, Report, draw
from text import byte_entropy, even_batches, random_batches, standard_library
from torch import Tensor

import functional_amp as fa
from functional_amp.debug import init_history, record
from functional_amp.ranks import stop_on

LossFn = Callable[[dict[str, Tensor], Tensor], Tensor]

MAX_NORM = 1.0
READ_EVERY = 10  # updates between two looks at the history
VALIDATIONS = 8  # in a run
ALONE = Parallel()


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


def train(options: Options, stop: Tensor, parallel: Parallel = ALONE) -> Report:
    """Trains to the end, or until the flag is set on one of the processes and the update at hand is done."""
    size, dtype, device = SIZES[options.size], getattr(torch, options.dtype), torch.device(options.device)
    torch.manual_seed(options.seed)
    if options.size == "tiny":
        torch.set_num_threads(1)  # on a CPU: so small that threads spend their time waiting for each other
    training, validation = (part.to(device) for part in standard_library())
    micro_batches = random_batches(training, size.batch, size.shape.context, options.seed)
    held_out = even_batches(validation, 16, 16, size.shape.context)

    apply, params, _ = fa.from_module(GPT(size.shape).to(device), gather=parallel.gather)
    name = title(options, params)
    optimizer = make_optimizer(size.learning_rate, options.steps)
    loss_fn = in_precision(next_byte_loss(apply), dtype)
    mesh = parallel.ranks(stop)
    step = fa.make_step(parallel.loss(loss_fn), optimizer, max_norm=MAX_NORM, compile=options.compile, mesh=mesh)
    state = fa.init_state(parallel.params(params), optimizer, make_scaler(dtype, options.steps))
    if options.resume and options.save and options.save.exists():
        state = fa.load_state_dict(state, fa.load(options.save))
    done = int(state.applied + state.skipped)
    # Each process takes its turn at the micro-batches; those of the updates that are done have been seen.
    mine = islice(micro_batches, done * options.accumulate * parallel.size + parallel.rank, None, parallel.size)
    windows = islice(fa.windows(mine, options.accumulate), options.steps - done)
    history = init_history(state, options.steps)
    evaluate = in_precision(next_byte_loss(apply.eval()), dtype)

    def validation_loss() -> float:
        return torch.stack([evaluate(state.params, batch) for batch in held_out]).mean().item()

    report = Report(name, options.dtype, options.steps - done, byte_entropy(validation), options.explain)
    recent = Recent(step, state, 1)
    with report.bar:
        for count, window in enumerate(windows, 1):
            update = done + count
            seed = options.seed + update + 2**20 * parallel.rank
            recent.add(window, seed)
            state, metrics = step(state, window, seed=seed)
            history = record(history, metrics)
            stopping = bool(stop if mesh is None else metrics.stop) or update == options.steps
            validating = stopping or update % max(1, options.steps // VALIDATIONS) == 0
            if validating or update % READ_EVERY == 0:
                report.read(history, recent.explain if mesh is None else None)
                recent = Recent(step, state, count + 1)
                fa.check_progress(state)
            if validating:
                report.validated(validation_loss())
                if options.save:
                    parallel.save(options.save, state)
            if stopping:
                break
    return report


def title(options: Options, params: dict[str, Tensor]) -> str:
    count = sum(param.numel() for param in params.values())
    return f"{options.size} GPT, {count:,} parameters, {options.dtype} on {options.device}, seed {options.seed}"


@contextmanager
def first_signal() -> Iterator[Tensor]:
    """Turns the first Ctrl-C, and SIGTERM, into a flag to look at between two updates; a second Ctrl-C interrupts."""

    def handler(*_: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.signal(signal.SIGINT, before)

    with stop_on(signal.SIGTERM) as flag:
        before = signal.signal(signal.SIGINT, handler)
        try:
            yield flag
        finally:
            signal.signal(signal.SIGINT, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    options = parse(__doc__ or "", arguments)
    start = time.monotonic()
    try:
        with first_signal() as stop, processes(options.parallel, options.device) as parallel:
            report = train(options, stop, parallel)
    except KeyboardInterrupt:
        print("stopped at once, without a picture")
        return 130
    if parallel.rank:
        return 0 if report.complete else 130
    draw(report, options.out, MAX_NORM)
    print(report.summary(time.monotonic() - start, options.out))
    return 0 if report.complete else 130


if __name__ == "__main__":
    sys.exit(main())
