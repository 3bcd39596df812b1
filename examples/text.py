"""The text to train on: the sources of Python's standard library, byte by byte."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

# Tests, tables and what pip installed: the library proper is some 8 MB.
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
HELD_OUT_EVERY = 10


class Text(NamedTuple):
    """The bytes of the files to train on, and of the files held out for validation; uint8."""

    training: Tensor
    validation: Tensor


def standard_library() -> Text:
    """Reads the sources of the standard library; every tenth file is held out.

    Raises:
        FileNotFoundError: where Python was installed without its sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(folder.rglob("*.py")) if not LEFT_OUT & set(path.relative_to(folder).parts)]
    if len(files) < 2 * HELD_OUT_EVERY:
        raise FileNotFoundError(f"found {len(files)} Python sources in {folder}: this Python came without them")
    held_out = set(files[::HELD_OUT_EVERY])
    return Text(_read([path for path in files if path not in held_out]), _read(sorted(held_out)))


def _read(files: list[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in files)), dtype=torch.uint8)


def byte_entropy(text: Tensor) -> float:
    """The entropy of single bytes, in nats: the least loss of a model that knows only how frequent each byte is."""
    frequency = torch.bincount(text.long(), minlength=256) / len(text)
    return torch.special.entr(frequency).sum().item()


def random_batches(text: Tensor, batch: int, context: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of shape (batch, context + 1): `context` bytes and, one on, the bytes to predict."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (batch,), generator=generator)
        yield _excerpts(text, starts, context)


def even_batches(text: Tensor, count: int, batch: int, context: int) -> list[Tensor]:
    """`count` batches of the same shape, spread evenly over the text: the same ones each time."""
    starts = torch.linspace(0, len(text) - context - 1, count * batch).long()
    return [_excerpts(text, part, context) for part in starts.split(batch)]


def _excerpts(text: Tensor, starts: Tensor, context: int) -> Tensor:
    places = starts.unsqueeze(1) + torch.arange(context + 1)
    return text[places.to(text.device)].long()
