"""examples/minimal.py: it learns, and a run in two parts ends with the file of a run in one."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def minimal(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("minimal")


@pytest.mark.slow
def test_a_run_in_two_parts_ends_as_a_run_in_one(minimal: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    parts, whole = tmp_path / "parts.ckpt", tmp_path / "whole.ckpt"
    with torch.random.fork_rng():
        minimal.main(["--file", str(parts), "--windows", "90"])  # ten windows after its last file
        accuracy = minimal.main(["--file", str(parts)])
        assert "goes on at window 80" in capsys.readouterr().out
        assert accuracy == minimal.main(["--file", str(whole)]) > 0.9
    assert parts.read_bytes() == whole.read_bytes()
    assert "skipped 1" in capsys.readouterr().out  # the scale has found its limit


def test_it_is_short() -> None:
    assert len((EXAMPLES / "minimal.py").read_text().splitlines()) <= 65
