"""save and load: every bit, every kind of damage noticed, the last good file used, a crash survived anywhere."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_amp as fa
from functional_amp import files
from tests.test_checkpoint import bits, random_like, small_state

SAVED = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128, torch.bool]
SAVED += [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SAVED += [torch.float8_e4m3fn, torch.float8_e5m2]

SHAPES = st.lists(st.integers(0, 3), max_size=3)
FLATS = st.dictionaries(st.text(max_size=8), st.tuples(st.sampled_from(SAVED), SHAPES), max_size=5)


def tensors(described: dict[str, tuple[torch.dtype, list[int]]], seed: int) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {name: random_like(torch.empty(shape, dtype=dtype)) for name, (dtype, shape) in described.items()}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files") / "run.ckpt"


@given(FLATS, st.integers(0, 2**32))
def test_every_bit_comes_back(path: Path, described: Any, seed: int) -> None:
    flat = tensors(described, seed)
    fa.save(path, flat)
    loaded = fa.load(path)
    assert bits(loaded) == bits(flat) and list(loaded) == list(flat)
    places = [leaf.untyped_storage().data_ptr() for leaf in loaded.values() if leaf.nbytes]
    assert len(set(places)) == len(places)


@given(FLATS, st.integers(0, 2**32))
def test_safetensors_reads_the_file(path: Path, described: Any, seed: int) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    described = {name: (dtype, shape) for name, (dtype, shape) in described.items() if dtype != torch.complex128}
    flat = tensors(described, seed)
    fa.save(path, flat)
    assert bits(safetensors.load_file(path)) == bits({name: flat[name] for name in sorted(flat)})


def test_conjugates_views_parameters_and_expanded_tensors_are_saved_by_value(path: Path) -> None:
    z = torch.randn(2, 3, dtype=torch.complex64)
    flat = {"conj": z.conj(), "t": z.t(), "imag": z.conj().imag, "p": torch.nn.Parameter(torch.ones(2))}
    flat["expanded"] = torch.ones(1).expand(4)
    fa.save(path, flat)
    loaded = fa.load(path)
    assert all(torch.equal(loaded[name], leaf) for name, leaf in flat.items())


def saved_twice(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    path, old, new = folder / "run.ckpt", {"w": torch.zeros(40)}, {"w": torch.ones(40), "b": torch.ones(3)}
    fa.save(path, old)
    fa.save(path, new)
    return path, old, new


def previous(path: Path) -> Path:
    return path.with_name(path.name + ".previous")


def test_the_last_good_file_is_kept(tmp_path: Path) -> None:
    path, old, new = saved_twice(tmp_path)
    assert bits(fa.load(path)) == bits(new) and bits(fa.load(previous(path))) == bits(old)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.ckpt", "run.ckpt.previous"]


def test_every_truncation_is_noticed_and_the_previous_file_read(tmp_path: Path) -> None:
    path, old, _ = saved_twice(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.warns(UserWarning, match=rf"run.ckpt: found {length} bytes, .*run.ckpt.previous.* is read"):
            assert bits(fa.load(path)) == bits(old)


def test_every_flipped_bit_is_noticed_and_the_previous_file_read(tmp_path: Path) -> None:
    path, old, _ = saved_twice(tmp_path)
    whole = path.read_bytes()
    for position in range(len(whole)):
        flipped = bytearray(whole)
        flipped[position] ^= 1 << (position % 8)
        path.write_bytes(flipped)
        with pytest.warns(UserWarning, match=r"run.ckpt.previous, the one saved before it, is read in its place"):
            assert bits(fa.load(path)) == bits(old), position


@pytest.mark.parametrize("tail", [b"\0", b"more"])
def test_bytes_after_the_end_are_noticed(tmp_path: Path, tail: bytes) -> None:
    path, old, _ = saved_twice(tmp_path)
    path.write_bytes(path.read_bytes() + tail)
    with pytest.warns(UserWarning, match="found another checksum"):
        assert bits(fa.load(path)) == bits(old)


def test_a_missing_file_gives_the_previous_one_and_neither_an_error(tmp_path: Path) -> None:
    path, old, _ = saved_twice(tmp_path)
    path.unlink()
    with pytest.warns(UserWarning, match="found no such file"):
        assert bits(fa.load(path)) == bits(old)
    previous(path).unlink()
    with pytest.raises(FileNotFoundError, match=r"run.ckpt: found no such file, nor .*run.ckpt.previous. Remedy"):
        fa.load(path)


def test_two_damaged_files_are_both_named(tmp_path: Path) -> None:
    path, _, _ = saved_twice(tmp_path)
    path.write_bytes(b"")
    previous(path).write_bytes(previous(path).read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"run.ckpt: found 0 bytes.*run.ckpt.previous: found \d+ bytes.*Remedy: "):
        fa.load(path)


def test_a_damaged_file_never_takes_the_place_of_the_last_good_one(tmp_path: Path) -> None:
    path, old, new = saved_twice(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    fa.save(path, new)
    assert bits(fa.load(path)) == bits(new) and bits(fa.load(previous(path))) == bits(old)


def header_of(description: Any) -> bytes:
    text = description if isinstance(description, bytes) else json.dumps(description).encode()
    return len(text).to_bytes(8, "little") + text


METADATA = {"__metadata__": {"sha256": "0" * 64}}
CRAFTED = {
    "a pickle": b"\x80\x02cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
    "no JSON": header_of(b"{"),
    "deep JSON": header_of(b"[" * 100_000),
    "another JSON": header_of([1]),
    "no checksum": header_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
    "unknown dtype": header_of({**METADATA, "w": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}) + bytes(4),
    "huge": header_of({**METADATA, "w": {"dtype": "F64", "shape": [2**60], "data_offsets": [0, 2**63]}}),
    "negative": header_of({**METADATA, "w": {"dtype": "U8", "shape": [-1, -4], "data_offsets": [0, 4]}}) + bytes(4),
    "no ints": header_of({**METADATA, "w": {"dtype": "U8", "shape": ["4"], "data_offsets": [0, 4]}}) + bytes(4),
    "overlapping": header_of({**METADATA, "w": {"dtype": "U8", "shape": [4], "data_offsets": [1, 5]}}) + bytes(5),
    "huge header": (2**62).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "run.ckpt"
    path.write_bytes(CRAFTED[what])
    with pytest.raises(ValueError, match=r"run.ckpt: found .*Expected a file that save wrote"):
        fa.load(path)


def test_a_torch_file_is_refused_unread(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1)}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"not written by save"):
        fa.load(tmp_path / "run.pt")


class Interrupted(BaseException):
    """Stands for Ctrl-C."""


CALLS = ["fsync", "link", "replace", "remove", "open"]


@pytest.mark.parametrize("call", CALLS)
def test_an_interruption_before_or_after_any_call_leaves_a_good_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The file is the old or the new one, whole, and the next save works; test_kill.py does it by kill -9."""
    for nth in range(4):
        for after in (False, True):
            folder = tmp_path / f"{call}{nth}{after}"
            folder.mkdir()
            path, _, new = saved_twice(folder)
            newest = {"w": torch.full((40,), 2.0)}
            real, calls = getattr(os, call), iter(range(100))

            def crashing(*args: Any, real: Any = real, calls: Any = calls, nth: int = nth, after: bool = after) -> Any:
                if next(calls) != nth:
                    return real(*args)
                if after:
                    real(*args)
                raise Interrupted

            with monkeypatch.context() as patch:
                patch.setattr(os, call, crashing)
                try:
                    fa.save(path, newest)
                except Interrupted:
                    pass
            assert bits(fa.load(path)) in (bits(new), bits(newest))
            fa.save(path, newest)
            assert bits(fa.load(path)) == bits(newest)


def test_an_error_while_writing_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _, new = saved_twice(tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "_write", full)
    with pytest.raises(OSError, match="No space left"):
        fa.save(path, {"w": torch.zeros(1)})
    assert bits(fa.load(path)) == bits(new)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.ckpt", "run.ckpt.previous"]


def test_a_file_system_without_links_gets_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", unsupported)
    path, old, new = saved_twice(tmp_path)
    assert bits(fa.load(path)) == bits(new) and bits(fa.load(previous(path))) == bits(old)


def test_what_cannot_be_saved_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path, _, new = saved_twice(tmp_path)
    with pytest.raises(TypeError, match=r"flat: found TrainState, .*Remedy: save\(path, state_dict\(state\)\)"):
        fa.save(path, cast(Any, small_state()))
    refused: dict[str, Any] = {
        "found int": 3,
        "found a meta tensor": torch.ones(1, device="meta"),
        "found torch.sparse_coo": torch.ones(1).to_sparse(),
        "found torch.float8_e5m2fnuz": torch.ones(1).to(torch.float8_e5m2fnuz),
    }
    for found, leaf in refused.items():
        with pytest.raises(TypeError, match=rf"flat\['x'\]: {found}.*Remedy: "):
            fa.save(path, {"x": leaf})
    for name in (3, "__metadata__"):
        with pytest.raises(TypeError, match=r"flat: found the name .*Remedy: rename it"):
            fa.save(path, cast(Any, {name: torch.ones(1)}))
    assert bits(fa.load(path)) == bits(new)
    torch.save({"x": refused["found torch.float8_e5m2fnuz"]}, path)  # the remedy
    assert torch.load(path)["x"].dtype == torch.float8_e5m2fnuz


def test_a_state_through_a_file(tmp_path: Path) -> None:
    state = small_state()
    fa.save(tmp_path / "run.ckpt", fa.state_dict(state, position=3))
    flat = fa.load(str(tmp_path / "run.ckpt"))
    assert flat["extra/position"].item() == 3
    assert bits(fa.state_dict(fa.load_state_dict(state, flat))) == bits(fa.state_dict(state))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def loader() -> Any:
        generator = torch.Generator().manual_seed(0)
        return stateful.StatefulDataLoader(
            [torch.tensor([float(i)]) for i in range(20)],
            batch_size=2,
            shuffle=True,
            num_workers=workers,
            generator=generator,
        )

    def to_bytes(value: Any) -> Tensor:
        file = io.BytesIO()
        torch.save(value, file)
        return torch.tensor(list(file.getvalue()), dtype=torch.uint8)

    first = loader()
    batches = iter(first)
    for _ in range(3):
        next(batches)
    fa.save(tmp_path / "run.ckpt", fa.state_dict(small_state(), loader=to_bytes(first.state_dict())))
    rest = [batch.tolist() for batch in batches]

    second = loader()
    saved = fa.load(tmp_path / "run.ckpt")["extra/loader"]
    second.load_state_dict(torch.load(io.BytesIO(bytes(saved.tolist())), weights_only=True))
    assert [batch.tolist() for batch in second] == rest and len(rest) == 7
