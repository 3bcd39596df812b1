"""A run on several processes: each has its share of the data, and all or a part of the parameters."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import functional_amp as fa
from functional_amp.ranks import Ranks, shard, sharded, whole


@dataclass(frozen=True)
class Parallel:
    """The processes of a run; by default this one alone.

    Attributes:
        kind: "ddp", where each process has all parameters; "fsdp", where each has a part; None for one process.
        mesh: the processes as torch knows them.
    """

    kind: str | None = None
    mesh: Any = None
    rank: int = 0
    size: int = 1

    def ranks(self, stop: Tensor) -> Ranks | None:
        """For `make_step(..., mesh=)`; `stop` is this process's wish to stop."""
        return None if self.mesh is None else Ranks(self.mesh, stop=stop)

    def params(self, params: dict[str, Tensor]) -> dict[str, Any]:
        """What of the parameters is kept here."""
        return shard(params, self.mesh) if self.kind == "fsdp" else params

    def loss(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The loss as the step takes it."""
        return sharded(loss_fn, self.mesh) if self.kind == "fsdp" else loss_fn

    @property
    def gather(self) -> torch.dtype | None:
        """For `from_module`: autocast decides the precision, so parameters are sent as they are."""
        return torch.float32 if self.kind == "fsdp" else None

    def save(self, path: Path, state: fa.TrainState) -> None:
        """Writes one file, which can be resumed on any number of processes, of either kind."""
        flat = whole(fa.state_dict(state))  # all processes give their parts
        if self.rank == 0:
            fa.save(path, flat)


@contextmanager
def processes(kind: str | None, device: str) -> Iterator[Parallel]:
    """Joins the processes that torchrun has started. Only the first of them prints."""
    if kind is None:
        yield Parallel()
        return
    if "RANK" not in os.environ:
        raise SystemExit(f"--parallel {kind}: found one process, expected torchrun --nproc-per-node=2 train_gpt.py ...")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device.startswith("cuda"):
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    before = sys.stdout
    if rank:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    try:
        yield Parallel(kind, init_device_mesh(device.partition(":")[0], (size,)), rank, size)
    finally:
        sys.stdout = before
    dist.destroy_process_group()
