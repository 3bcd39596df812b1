"""`python -m functional_amp`: what it prints, and that its self-check finds a step that computes something else."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import functional_amp as fa
from functional_amp import __main__ as program

CPU = torch.device("cpu")


def test_the_self_check_passes_here():
    assert program.self_check(CPU) == []


def test_the_self_check_finds_another_learning_rate(monkeypatch):
    monkeypatch.setattr(program, "adamw", lambda lr: fa.adamw(2 * lr))
    assert any("off by" in found for found in program.self_check(CPU))


def test_the_self_check_finds_another_rule_of_the_scale(monkeypatch):
    monkeypatch.setattr(program, "DynamicScale", lambda scale, growth_interval: fa.DynamicScale(scale))
    assert any("scale" in found for found in program.self_check(CPU))


def test_the_self_check_finds_an_overflow_that_is_applied(monkeypatch):
    def make_step(*args, **options):
        step = fa.make_step(*args, **options)

        def applied(state, window):
            state, metrics = step(state, window)
            return state, metrics._replace(applied=torch.tensor(True))

        return applied

    monkeypatch.setattr(program, "make_step", make_step)
    assert program.self_check(CPU) == ["window 2: applied is True"]


def test_a_failed_check_is_printed_and_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(program, "speeds", lambda device: {torch.bfloat16: 2.0, torch.float16: 1.0})
    assert program.main(lambda device: ["0.weight: off by 1"]) == 1
    out = capsys.readouterr().out
    assert "self-check      failed" in out and "  0.weight: off by 1" in out
    assert re.search(r"^bfloat16 +fast here", out, re.MULTILINE)
    assert re.search(r"^float16 +no faster than float32 here", out, re.MULTILINE)


@pytest.mark.slow
def test_the_program_runs_and_names_its_versions():
    result = subprocess.run([sys.executable, "-m", "functional_amp"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for pattern in (r"^torch +" + re.escape(torch.__version__), r"^device +c", r"^float16 +\w", r"^self-check +passed"):
        assert re.search(pattern, result.stdout, re.MULTILINE), result.stdout
