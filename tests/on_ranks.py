"""Running a function on several processes that form a process group, under a time limit."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor  # once in the server that the processes are forked from
from torch.utils._python_dispatch import TorchDispatchMode

import functional_amp.ranks  # noqa: F401

LIMIT = 60.0
"""Seconds for all processes of one call."""


def on_ranks(work: Callable[..., Any], folder: Path, ranks: int, *args: Any, limit: float = LIMIT) -> list[Any]:
    """What `work(rank, *args)` returns on each of the processes.

    They find each other through a file in the folder: each takes a port that is free, and no two tests take the same.

    Raises:
        AssertionError: with the traceback of the first that raised, or for one that did not end in time.
    """
    results = outcomes(work, folder, ranks, *args, limit=limit)
    for rank, (ok, value) in enumerate(results):
        assert ok, f"rank {rank}: {value}"
    return [value for _, value in results]


def outcomes(
    work: Callable[..., Any],
    folder: Path,
    ranks: int,
    *args: Any,
    limit: float = LIMIT,
    timeout: float | None = None,
    kill: tuple[int, float] | None = None,
) -> list[tuple[bool, Any]]:
    """For each process whether it returned, and what: or the traceback, or how it ended.

    Args:
        limit: seconds until all of them are killed.
        timeout: of the process group; the limit where None.
        kill: a rank that is killed, and how many seconds after it joined the group.
    """
    folder.mkdir(parents=True, exist_ok=True)
    store = folder / f"store{len(list(folder.glob('store*')))}"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.on_ranks"])
    given = (str(store), ranks, work, args, timeout or limit)
    processes = [context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(ranks)]
    deadline = time.monotonic() + limit
    try:
        for process in processes:
            process.start()
        if kill is not None:
            while not Path(f"{store}.{kill[0]}.joined").exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            processes[kill[0]].join(kill[1])
            processes[kill[0]].kill()
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    found = []
    for rank, process in enumerate(processes):
        path = Path(f"{store}.{rank}.pt")
        result = torch.load(path, weights_only=False) if path.exists() else (False, f"exit code {process.exitcode}")
        found.append(result)
    return found


def _rank(rank: int, store: str, ranks: int, work: Callable[..., Any], args: Any, timeout: float) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    Path(f"{store}.{rank}.joined").touch()
    try:
        result = True, work(rank, *args)
    except Exception:
        result = False, traceback.format_exc()
    torch.save(result, f"{store}.{rank}.part")
    os.replace(f"{store}.{rank}.part", f"{store}.{rank}.pt")
    if result[0]:
        dist.destroy_process_group()
    os._exit(0)  # a group that lost a rank would wait for it


class Collectives(TorchDispatchMode):
    """Counts the collectives that are called, and the bytes that a rank gives to them."""

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func).split(".")[1]
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in name and "wrap" not in name:
            self.seen.append(name)
            given = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            self.bytes += sum(x.nbytes for x in given if isinstance(x, torch.Tensor))
        return func(*args, **(kwargs or {}))
