"""Train a byte-level GPT on the sources of Python's standard library, in float16 by default.

The loss scale climbs until the float16 gradients overflow. That update is skipped, the scale is
halved, and training goes on: watch it in the bar, and in the picture that is drawn at the end.
Ctrl-C ends the run after the update at hand, with its figures and its picture (exit code 130).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from gpt import GPT, Shape
from report import Report, draw
from text import byte_entropy, even_batches, random_batches, standard_library
from torch import Tensor

import functional_amp as fa

LossFn = Callable[[dict[str, Tensor], Tensor], Tensor]

DTYPES = ("float16", "bfloat16", "float32")
READ_EVERY = 10  # updates between two looks at the metrics
VALIDATIONS = 8  # in a run


@dataclass(frozen=True)
class Size:
    """A model, and what suits it. `batch` is the sequences of a micro-batch, `accumulate` the micro-batches."""

    shape: Shape
    batch: int
    accumulate: int
    steps: int
    learning_rate: float


SIZES = {
    "tiny": Size(Shape(layers=2, heads=4, width=48, context=64), batch=8, accumulate=2, steps=400, learning_rate=1e-2),
    "small": Size(Shape(4, 4, 128, 128), batch=16, accumulate=2, steps=600, learning_rate=4e-3),
    "full": Size(Shape(6, 6, 384, 256, dropout=0.1), batch=32, accumulate=2, steps=600, learning_rate=1e-3),
}


def next_byte_loss(apply: fa.Apply) -> LossFn:
    """The mean loss, in nats, of predicting each byte from those before it."""

    def loss_fn(params: dict[str, Tensor], micro_batch: Tensor) -> Tensor:
        logits = apply(params, micro_batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), micro_batch[:, 1:].flatten())

    return loss_fn


def in_precision(loss_fn: LossFn, dtype: torch.dtype) -> LossFn:
    """The same loss with its matrix products in `dtype`. The parameters stay float32."""
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
    """Loss scaling is for float16; bfloat16 has the range of float32."""
    if dtype != torch.float16:
        return fa.NoScale()
    # The usual 2000 clean updates would outlast the run: with this it finds its limit in a third of it.
    return fa.DynamicScale(growth_interval=max(5, steps // 12))


def mean_loss(loss_fn: LossFn, params: dict[str, Tensor], batches: Sequence[Tensor]) -> float:
    return torch.stack([loss_fn(params, batch) for batch in batches]).mean().item()


def train(options: Options) -> Report:
    """Trains, and reports on it."""
    size, dtype, device = SIZES[options.size], getattr(torch, options.dtype), torch.device(options.device)
    torch.manual_seed(options.seed)
    training, validation = (part.to(device) for part in standard_library())
    held_out = even_batches(validation, 16, 16, size.shape.context)
    micro_batches = random_batches(training, size.batch, size.shape.context, options.seed)
    windows = islice(fa.windows(micro_batches, options.accumulate), options.steps)

    apply, params, _ = fa.from_module(GPT(size.shape).to(device))
    loss_fn = in_precision(next_byte_loss(apply), dtype)
    evaluate = in_precision(next_byte_loss(apply.eval()), dtype)
    optimizer = make_optimizer(size.learning_rate, options.steps)
    step = fa.make_step(loss_fn, optimizer, max_norm=1.0)
    if options.compile:
        step = fa.Step(torch.compile(step.accumulate, fullgraph=True), torch.compile(step.update, fullgraph=True))
    state = fa.init_state(params, optimizer, make_scaler(dtype, options.steps))

    title = f"{options.size} GPT, {sum(map(Tensor.numel, params.values())):,} parameters, {options.dtype} on {device}"
    report = Report(title, options.dtype, options.steps, byte_entropy(validation))
    with report.bar, first_ctrl_c() as stop:
        for update, window in enumerate(windows, 1):
            state, metrics = step(state, window, seed=options.seed + update)
            report.add(metrics)
            if update % READ_EVERY == 0:
                report.read()
                fa.check_progress(state)
            if update % max(1, options.steps // VALIDATIONS) == 0 and update < options.steps:
                report.validated(mean_loss(evaluate, state.params, held_out))
            if stop.is_set():
                break
        report.validated(mean_loss(evaluate, state.params, held_out))
    return report


@contextmanager
def first_ctrl_c() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C into an event that the loop looks at between updates; a second one interrupts."""
    event = threading.Event()

    def handler(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(frozen=True)
class Options:
    """The command line, complete and checked."""

    dtype: str
    size: str
    steps: int
    accumulate: int
    device: str
    seed: int
    compile: bool
    out: Path


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line; what is wrong with it is said, and the program ends with code 2."""
    shapes = {name: size.shape for name, size in SIZES.items()}
    sizes = ", ".join(f"{name} ({s.layers} layers, {s.width} wide, {s.context} bytes)" for name, s in shapes.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        default="float16",
        help="of the matrix products (float16)",
    )
    add("--size", choices=SIZES, help=f"{sizes}; by default full on CUDA and tiny on a CPU, where float16 is slow")
    add("--steps", type=at_least(1), metavar="N", help="updates, skipped ones included (as suits the size)")
    add("--accumulate", type=at_least(1), metavar="N", help="micro-batches of an update (as suits the size)")
    add("--device", type=available_device, help="cpu, cuda or cuda:N; by default CUDA if there is any")
    add("--seed", type=at_least(0), default=0, metavar="N", help="of initial parameters, data and dropout (0)")
    add("--compile", action="store_true", help="compile both halves of the step: a slow start, then faster")
    add("--out", type=writable_png, default="train_gpt.png", metavar="PNG", help="the picture (train_gpt.png)")
    given = vars(parser.parse_args(arguments))
    given["device"] = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    given["size"] = given["size"] or ("tiny" if given["device"] == "cpu" else "full")
    given["steps"] = given["steps"] or SIZES[given["size"]].steps
    given["accumulate"] = given["accumulate"] or SIZES[given["size"]].accumulate
    return Options(**given)


def at_least(least: int) -> Callable[[str], int]:
    """An argument that is a whole number from `least` on."""

    def number(text: str) -> int:
        if not text.lstrip("+-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number, at least {least}")
        return int(text)

    return number


def available_device(text: str) -> str:
    """An argument that names a device which this machine has."""
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()) or (kind == "cpu" and index):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"found {text!r}, but torch sees no CUDA device here: use --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"found {text!r}, but there are only {torch.cuda.device_count()} CUDA devices")
    return text


def writable_png(text: str) -> Path:
    """An argument that names a PNG file in a folder that can be written to: better known now than after the run."""
    path = Path(text)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the name of a .png file")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"found {text!r}, but {path.parent} is no folder that can be written to")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The program; returns its exit code."""
    options = parse(arguments)
    start = time.monotonic()
    try:
        report = train(options)
    except KeyboardInterrupt:
        print("stopped without a picture")
        return 130
    draw(report, options.out)
    print(report.summary(time.monotonic() - start, options.out))
    return 0 if report.complete else 130


if __name__ == "__main__":
    sys.exit(main())
