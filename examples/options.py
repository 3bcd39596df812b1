"""The command line of train_gpt.py, and the sizes to choose from."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from gpt import Shape

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Size:
    """A model and what suits it: the sequences of a micro-batch, the micro-batches of an update, and so on."""

    shape: Shape
    batch: int
    accumulate: int
    steps: int
    learning_rate: float

    def __str__(self) -> str:
        shape = self.shape
        return f"{shape.layers} layers, {shape.width} wide, {shape.context} bytes of context, {self.steps} updates"


SIZES = {
    "tiny": Size(Shape(layers=2, heads=4, width=48, context=64), batch=8, accumulate=2, steps=400, learning_rate=1e-2),
    "small": Size(Shape(4, 4, 128, 128), batch=16, accumulate=2, steps=600, learning_rate=4e-3),
    "full": Size(Shape(6, 6, 384, 256, dropout=0.1), batch=32, accumulate=2, steps=600, learning_rate=1e-3),
}


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
    parallel: str | None
    save: Path | None
    resume: bool
    explain: bool
    out: Path


def parse(description: str, arguments: Sequence[str] | None = None) -> Options:
    """Reads the command line. Where it is wrong, the program ends with a message and exit code 2."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = "; ".join(f"{name}: {size}" for name, size in SIZES.items())
    by_size = "by default what suits the size"
    add("--dtype", choices=DTYPES, default="float16", help="of the matrix products, by default float16")
    add("--size", choices=SIZES, help=f"by default full on CUDA, and tiny on a CPU, where float16 is slow. {sizes}")
    add("--steps", type=_whole(1), metavar="N", help=f"updates, skipped ones included; {by_size}")
    add("--accumulate", type=_whole(1), metavar="N", help=f"micro-batches of an update; {by_size}")
    add("--device", type=_device, help="cpu, cuda or cuda:N; by default CUDA where there is any")
    add("--seed", type=_whole(0), default=0, metavar="N", help="of parameters, data and dropout; by default 0")
    add("--compile", action="store_true", help="compile both halves of the step: a slow start, then faster")
    add("--parallel", choices=("ddp", "fsdp"), help="under torchrun: whole parameters on each process, or a part")
    add("--save", type=Path, metavar="FILE", help="write the state there: at the end, on SIGTERM, at each validation")
    add("--resume", action="store_true", help="go on from the file of --save, where there is one")
    add("--explain", action="store_true", help="at the first overflow, print all that is known of it, not one line")
    add("--out", type=_png, default="train_gpt.png", metavar="PNG", help="the picture, by default train_gpt.png")
    given = vars(parser.parse_args(arguments))
    if given["resume"] and not given["save"]:
        parser.error("--resume: found no --save FILE to resume from")
    if given["explain"] and given["parallel"]:
        parser.error("--explain: found --parallel, expected one process: each has a share of the window alone")
    given["device"] = given["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    given["size"] = given["size"] or ("tiny" if given["device"] == "cpu" else "full")
    given["steps"] = given["steps"] or SIZES[given["size"]].steps
    given["accumulate"] = given["accumulate"] or SIZES[given["size"]].accumulate
    return Options(**given)


def _whole(least: int, most: int = 2**31) -> Callable[[str], int]:
    """A whole number from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from {least} to {most}")
        return value

    return number


def _device(text: str) -> str:
    """A device that is there."""
    kind, colon, index = text.partition(":")
    if text != "cpu" and (kind != "cuda" or (colon and not index.isdecimal())):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"found {text!r}, but torch.cuda.is_available() is False: use --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(f"found {text!r}, but the devices end at {torch.cuda.device_count() - 1}")
    return text


def _png(text: str) -> Path:
    """A file that can be written: better known before the training than after it."""
    path = Path(text)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a file name that ends in .png")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"found {text!r}, but there is no folder {str(path.parent)!r}: make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"found {text!r}, which can not be written to: choose another place")
    return path
