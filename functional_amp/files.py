"""Named tensors in a file that survives a crash: written whole or not at all, checked when read.

The layout is that of safetensors (https://github.com/huggingface/safetensors): 8 bytes with the length of the
header, the header (JSON: dtype, shape and place of each tensor), the elements. Nothing in such a file is ever
executed or unpickled. The header's metadata holds the SHA-256 of the file, taken with 64 zeros in its own place.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import math
import operator
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "C128": torch.complex128,  # not one of safetensors' own: its library refuses a file with complex128
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_ZEROS = b"0" * 64
_METADATA = "__metadata__"


def save(path: str | os.PathLike[str], flat: Mapping[str, Tensor]) -> None:
    """Write named tensors to a file, so that a crash at any moment leaves a good one.

        write path.tmp; fsync; keep the old file as path.previous, if it is good; rename path.tmp to path

    The old file is read once to find out whether it is good: a damaged one never takes the place of the last good
    one. At most three files exist at a time, each of the size of the tensors. One process may write a path. A link
    stays one, and what it leads to is written; the permissions of an old file are those of the new one.

    Args:
        path: where to; `path.tmp` and `path.previous` beside it are used too.
        flat: strided tensors by name, on any devices: what `state_dict` gave. One is copied to the CPU at a time.

    Raises:
        TypeError: for anything but a dict from str to plain tensors of the dtypes of safetensors and complex128.
        OSError: where the file cannot be written; the old one stays.

    >>> import os, tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(os.path.join(folder, "run.ckpt"), {"w": torch.ones(2)})
    ...     load(os.path.join(folder, "run.ckpt"))
    {'w': tensor([1., 1.])}
    """
    path = _target(path)
    _check_flat(flat)
    temporary, previous = f"{path}.tmp", f"{path}.previous"
    try:
        with open(temporary, "wb") as file:
            _write(file, flat)
            file.flush()
            os.fsync(file.fileno())
        if os.path.exists(path):
            shutil.copymode(path, temporary)
        if _is_good(path):
            _keep(path, previous)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.remove(temporary)
        raise
    if hasattr(os, "O_DIRECTORY"):  # a rename is safe once its directory is on the disk
        directory = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def load(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read what `save` wrote: the newest good file.

    Where the file is missing, truncated or damaged, `path.previous` is read, with a warning that names both.

    Args:
        path: the path given to `save`.

    Returns:
        The tensors by name, on the CPU, each in storage of its own.

    Raises:
        FileNotFoundError: where there is neither.
        ValueError: where neither is good; what is wrong with each is said.
    """
    path = _target(path)
    previous = f"{path}.previous"
    if not os.path.exists(path) and not os.path.exists(previous):
        raise FileNotFoundError(f"{path}: found no such file, nor {previous}. Remedy: pass the path given to save.")
    try:
        return dict(_tensors(path))
    except (_Damaged, FileNotFoundError) as error:
        newest = "found no such file" if isinstance(error, FileNotFoundError) else str(error)
    try:
        flat = dict(_tensors(previous))
    except (_Damaged, FileNotFoundError) as error:
        older = "found no such file" if isinstance(error, FileNotFoundError) else str(error)
        raise ValueError(
            f"{path}: {newest}; {previous}: {older}. Expected a file that save wrote, whole. "
            "Remedy: take a copy from a backup, or start again; safetensors.torch.load_file reads the files of others."
        ) from None
    warnings.warn(f"{path}: {newest}. {previous}, the one saved before it, is read in its place.", stacklevel=2)
    return flat


def _target(path: str | os.PathLike[str]) -> str:
    """Where a link leads to: a rename would take the place of the link, and leave the file behind it as it was."""
    path = os.fspath(path)
    return os.path.realpath(path) if os.path.islink(path) else path


class _Damaged(ValueError):
    """What is wrong with a file."""


def _check_flat(flat: Any) -> None:
    if not isinstance(flat, Mapping):
        raise TypeError(
            f"flat: found {type(flat).__name__}, expected a dict of tensors by name. "
            "Remedy: save(path, state_dict(state))."
        )
    for name, leaf in flat.items():
        if not isinstance(name, str) or name == _METADATA:
            raise TypeError(
                f"flat: found the name {name!r}, expected a str other than {_METADATA!r}. Remedy: rename it."
            )
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.layout != torch.strided or leaf.is_meta:
            found = leaf.layout if type(leaf) is Tensor and leaf.layout != torch.strided else type(leaf).__name__
            found = "a meta tensor" if isinstance(leaf, Tensor) and leaf.is_meta else found
            raise TypeError(
                f"flat[{name!r}]: found {found}, expected a plain strided tensor. "
                "Remedy: state_dict(state) makes them; for DTensors use torch.distributed.checkpoint."
            )
        if leaf.dtype not in _NAMES:
            raise TypeError(
                f"flat[{name!r}]: found {leaf.dtype}, expected one of {', '.join(map(str, _NAMES))}. "
                "Remedy: torch.save(flat, path) and torch.load(path) keep every dtype."
            )


def _write(file: BinaryIO, flat: Mapping[str, Tensor]) -> None:
    entries, start = {}, 0
    for name, leaf in flat.items():
        entries[name] = {
            "dtype": _NAMES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [start, start + leaf.nbytes],
        }
        start += leaf.nbytes
    metadata = {"format": "pt", "sha256": _ZEROS.decode()}
    header = json.dumps({_METADATA: metadata, **entries}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the elements start at a multiple of 8 bytes
    digest = hashlib.sha256()
    for part in (len(header).to_bytes(8, "little"), header):
        digest.update(part)
        file.write(part)
    for leaf in flat.values():
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
        elements = _bytes_of(plain)
        digest.update(elements)
        file.write(elements)
    file.seek(8 + header.index(_ZEROS))  # the metadata comes first
    file.write(digest.hexdigest().encode())


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file; raises at its end, or before, where it is not what was written."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise _Damaged(f"found {size} bytes, expected more: it is truncated, or not written by save")
        header = file.read(length)
        entries, recorded = _parsed(header)
        digest = hashlib.sha256(length.to_bytes(8, "little") + header.replace(recorded, _ZEROS, 1))
        end = 8 + length
        for name, dtype, shape, nbytes in entries:
            end += nbytes
            if end > size:
                raise _Damaged(f"found {size} bytes, expected more: it is truncated")
            leaf = torch.empty(shape, dtype=dtype)
            elements = _bytes_of(leaf)
            file.readinto(elements)
            digest.update(elements)
            yield name, leaf
        if end != size or digest.hexdigest().encode() != recorded:
            raise _Damaged("found another checksum than it was written with: it is damaged")


def _parsed(header: bytes) -> tuple[list[tuple[str, torch.dtype, list[int], int]], bytes]:
    """Name, dtype, shape and bytes of each tensor in the order of the file, and the checksum."""
    try:
        described = json.loads(header)
        recorded = described.pop(_METADATA)["sha256"].encode()
        entries, start = [], 0
        for name, entry in described.items():
            dtype, shape = _DTYPES[entry["dtype"]], [operator.index(size) for size in entry["shape"]]
            nbytes = math.prod(shape) * dtype.itemsize
            if min(shape, default=0) < 0 or entry["data_offsets"] != [start, start + nbytes]:
                raise _Damaged(f"found {name!r} in a place of another size: it is damaged, or not written by save")
            start += nbytes
            entries.append((name, dtype, shape, nbytes))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, _Damaged):
            raise
        raise _Damaged("found no header with a checksum: it is damaged, or not written by save") from error
    return entries, recorded


def _is_good(path: str) -> bool:
    try:
        for _ in _tensors(path):
            pass
    except (_Damaged, FileNotFoundError):
        return False
    return True


def _keep(path: str, previous: str) -> None:
    """Gives the file a second name; where the file system has no links, a copy. The first name stays at all times."""
    temporary = f"{previous}.tmp"
    if os.path.exists(temporary):
        os.remove(temporary)
    try:
        os.link(path, temporary)
    except OSError:
        shutil.copyfile(path, temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
    os.replace(temporary, previous)


def _bytes_of(leaf: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, which must outlive the view. numpy would know too, but not bfloat16."""
    if leaf.nbytes == 0:
        return memoryview(bytearray())
    return memoryview((ctypes.c_ubyte * leaf.nbytes).from_address(leaf.data_ptr())).cast("B")
