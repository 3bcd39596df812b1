"""The example on two processes: the same run as on one, stopped by a signal to one of them, and resumed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import functional_amp as fa

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "train_gpt.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
LIMIT = 240  # seconds for a run


def arguments(folder: Path, *given: str) -> list[str]:
    common = ["--device=cpu", "--dtype=float32", "--size=tiny", f"--out={folder / 'run.png'}"]
    return [*common, f"--save={folder / 'run.ckpt'}", *given]


def run(folder: Path, *given: str, processes: int = 1) -> str:
    program = [sys.executable, EXAMPLE]
    if processes > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        program = [*launcher, EXAMPLE]
    folder.mkdir(exist_ok=True)
    command = [*program, *arguments(folder, *given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def saved(folder: Path) -> dict[str, torch.Tensor]:
    return fa.load(folder / "run.ckpt")


def assert_same_run(found: Path, expected: Path) -> None:
    """Up to the order in which floats were added, which Adam's first updates may blow up."""
    one, other = saved(found), saved(expected)
    assert one.keys() == other.keys()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-3, atol=1e-3)
    assert one["applied"].equal(other["applied"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_train_as_one_does_and_print_once(tmp_path, kind):
    alone = run(tmp_path / "one", "--steps=4", "--accumulate=2")
    together = run(tmp_path / kind, "--steps=4", "--accumulate=1", f"--parallel={kind}", processes=2)
    assert_same_run(tmp_path / kind, tmp_path / "one")
    assert together.count("4 applied, 0 skipped") == alone.count("4 applied, 0 skipped") == 1
    assert together.count("byte entropy of the held-out files") == 1


@pytest.mark.slow
def test_a_signal_to_one_process_stops_both_which_save_and_resume_elsewhere(tmp_path):
    command = [sys.executable, EXAMPLE, *arguments(tmp_path, "--steps=100000", "--accumulate=1", "--parallel=fsdp")]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**ENVIRONMENT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**common, "RANK": rank, "LOCAL_RANK": rank},
        )
        for rank in ("0", "1")
    ]
    try:
        assert ranks[0].stdout is not None
        assert "tiny GPT" in ranks[0].stdout.readline()
        ranks[1].send_signal(signal.SIGTERM)
        output = ranks[0].communicate(timeout=LIMIT)[0]
        ranks[1].communicate(timeout=LIMIT)
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [130, 130], output
    stopped = re.search(r"^stopped after update (\d+) of 100000$", output, re.MULTILINE)
    assert stopped, output
    done = int(stopped[1])
    assert saved(tmp_path)["applied"] == done
    run(tmp_path, f"--steps={done + 2}", "--accumulate=2", "--resume")  # by one process
    assert saved(tmp_path)["applied"] == done + 2


@pytest.mark.slow
def test_parallel_without_torchrun_and_resume_without_save_say_what_to_do(tmp_path):
    command = [sys.executable, EXAMPLE, "--parallel=ddp", "--device=cpu"]
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "RANK"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert done.returncode == 1 and "expected torchrun --nproc-per-node=2" in done.stderr
    command = [sys.executable, EXAMPLE, "--resume", "--device=cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2 and "--resume: found no --save FILE" in done.stderr
