"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.setup import EAGER, VARIANTS

SECTIONS = ("tail", "limit", "step", "peers", "counts", "memory", "growth", "history", "explain")
SMOKE_SECTIONS = ("tail", "step", "counts")


def parse(description: str, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line, complete and checked. Where it is wrong, the program ends with a message and code 2."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=description)
    add = parser.add_argument
    add("--sections", type=_some_of(SECTIONS), metavar="A,B", help=f"of {', '.join(SECTIONS)}; by default all")
    add("--variants", type=_some_of(VARIANTS), metavar="A,B", help=f"of {', '.join(VARIANTS)}; by default all")
    add("--rounds", type=_whole(1), metavar="N", help="timed calls of each variant, by default 24; medians are shown")
    add("--device", type=_device, help="cpu or cuda; by default cuda where there is any")
    add("--seed", type=_whole(0), default=0, metavar="N", help="of parameters and data, by default 0")
    add("--out", type=Path, default=Path("benchmarks/results"), metavar="DIR", help="for the JSON and the PNG")
    add(
        "--compiled-leaves",
        type=_whole(0),
        default=100,
        metavar="N",
        help="growth leaves the compiled variants out above so many leaves, by default 100: compilation is slow there",
    )
    add(
        "--smoke",
        action="store_true",
        help=f"the smallest sizes, one round; by default {', '.join(SMOKE_SECTIONS)} and no compiled variant",
    )
    add(
        "--markdown", type=_file, metavar="JSON", help="print the tables of an earlier run as markdown; measure nothing"
    )
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out: found {str(options.out)!r}, which is a file, expected a folder")
    options.sections = options.sections or (SMOKE_SECTIONS if options.smoke else SECTIONS)
    options.variants = options.variants or (EAGER if options.smoke else VARIANTS)
    options.rounds = options.rounds or (1 if options.smoke else 24)
    options.device = options.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return options


def _some_of(names: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """A choice among names, in their order, each once."""

    def choice(text: str) -> tuple[str, ...]:
        chosen = [name.strip() for name in text.split(",")]
        for name in chosen:
            if name not in names:
                raise argparse.ArgumentTypeError(f"found {name!r}, expected some of {', '.join(names)}")
        return tuple(name for name in names if name in chosen)

    return choice


def _whole(least: int) -> Callable[[str], int]:
    """A whole number from `least` on."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"found {text!r}, expected a whole number from {least} on")
        return int(text)

    return number


def _device(text: str) -> torch.device:
    """A device that is there."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected cpu or cuda")
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"found {text!r}, but torch.cuda.is_available() is False: use --device cpu")
    return torch.device(text)


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"found {text!r}, expected the JSON file of an earlier run")
    return Path(text)
