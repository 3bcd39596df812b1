"""kill -9 at random moments of a training script: each run ends with the bits of an uninterrupted one.

KILL_ROUNDS=50 python -m pytest -m slow tests/test_kill.py makes 50 rounds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import functional_amp as fa
from tests.killable import train, train_on_ranks
from tests.on_ranks import on_ranks, outcomes
from tests.test_checkpoint import bits

ROUNDS = int(os.environ.get("KILL_ROUNDS", "3"))
KILLS = 3  # in a round, before the run may end


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork, to start hundreds of runs")
def test_every_resume_after_kill_9_ends_bit_identical(tmp_path: Path) -> None:
    start = time.monotonic()
    whole = bits(fa.state_dict(train(tmp_path / "whole.ckpt")))
    duration = time.monotonic() - start
    assert whole["skipped"] == bits({"skipped": torch.tensor(2, dtype=torch.int32)})["skipped"]
    rng, killed, resumed = random.Random(0), 0, 0
    for number in range(ROUNDS):
        path = tmp_path / f"{number}.ckpt"
        for attempt in range(KILLS + 1):
            resumed += path.exists()
            limit = rng.uniform(0, duration / 2) if attempt < KILLS else None
            killed += run_and_kill(path, limit)
        assert bits(fa.load(path)) == {**whole, "extra/position": bits({"": torch.tensor(90)})[""]}
        for name in (".tmp", ".previous.tmp"):
            assert not Path(f"{path}{name}").exists()
    print(f"{ROUNDS} rounds, {killed} kills, {resumed} resumes")
    assert killed > ROUNDS and resumed > ROUNDS


@pytest.mark.slow
def test_a_script_that_was_killed_goes_on_in_a_new_process(tmp_path: Path) -> None:
    path = tmp_path / "run.ckpt"
    command = [sys.executable, "-m", "tests.killable", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent) as script:
        assert script.stdout is not None and script.stdout.readline() == b"ready\n"
        while not path.exists():
            time.sleep(0.001)
        script.kill()
    position = int(fa.load(path)["extra/position"])
    assert 0 < position < 90
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parent.parent, stdout=subprocess.DEVNULL)
    assert int(fa.load(path)["extra/position"]) == 90
    assert bits(fa.state_dict(train(path))) == bits(fa.state_dict(train(tmp_path / "whole.ckpt")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_was_killed_ends_the_others_and_both_resume_bit_identical(tmp_path: Path, kind: str) -> None:
    whole = tmp_path / "whole.ckpt"
    duration = max(on_ranks(train_on_ranks, tmp_path / "once", 2, whole, kind))
    rng, rounds, killed, resumed = random.Random(1), max(2, ROUNDS // 2), 0, 0  # rounds of each kind
    for number in range(rounds):
        path = tmp_path / f"{number}.ckpt"
        for _ in range(2):
            resumed += path.exists()
            victim, limit = rng.randrange(2), rng.uniform(0, duration)
            begin = time.monotonic()
            found = outcomes(train_on_ranks, tmp_path / str(number), 2, path, kind, timeout=10, kill=(victim, limit))
            assert time.monotonic() - begin < limit + 20  # the other one does not wait for ever
            assert found[victim][0] or found[victim] == (False, "exit code -9")
            killed += not found[victim][0]
        resumed += path.exists()
        on_ranks(train_on_ranks, tmp_path / str(number), 2, path, kind)
        assert bits(fa.load(path)) == bits(fa.load(whole))
    print(f"{kind}: {rounds} rounds, {killed} kills, {resumed} resumes")
    assert killed and resumed


def run_and_kill(path: Path, limit: float | None) -> bool:
    """Trains in a child and kills it after some seconds; whether it was still running."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork of a process with threads: the child uses none of them
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            train(path)
            os._exit(0)
        finally:
            os._exit(1)
    if limit is not None:
        time.sleep(limit)
        os.kill(child, 9)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == (0 if limit is None else -9) or status == 0
    return status == -9
