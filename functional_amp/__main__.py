"""What is installed, what is fast here, and whether the step computes what it should: python -m functional_amp"""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
import shutil
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from functional_amp.initial import init_state
from functional_amp.module import from_module
from functional_amp.optim import adamw
from functional_amp.precision import autocast
from functional_amp.step import make_step
from functional_amp.values.scaler import DynamicScale

Batch = tuple[Tensor, Tensor]


def versions() -> Iterator[tuple[str, str]]:
    """Names and versions: ours, Python's, and those of what the core needs."""
    yield "functional_amp", _version("functional_amp")
    yield "Python", platform.python_version()
    yield "torch", torch.__version__
    yield "optree", _version("optree")
    compiler = next(filter(None, map(shutil.which, ("g++", "clang++", "cl"))), None)
    yield "C++ compiler", compiler or "none: torch.compile on a CPU needs one"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return f"cuda, {torch.cuda.get_device_name(device)}"
    return f"cpu, {torch.get_num_threads()} threads"


def speeds(device: torch.device, size: int = 512) -> dict[torch.dtype, float]:
    """How many times faster than in float32 a matrix product is, by dtype."""
    seconds = {dtype: _seconds(dtype, device, size) for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    return {dtype: seconds[torch.float32] / taken for dtype, taken in seconds.items() if dtype != torch.float32}


def _seconds(dtype: torch.dtype, device: torch.device, size: int) -> float:
    x = torch.randn(size, size, device=device).to(dtype)
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(x, x)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken.append(time.perf_counter() - start)
    return min(taken)  # the first one finds its kernel, and others wait for other programs


def self_check(device: torch.device) -> list[str]:
    """Trains a small model in float16 by the step and by torch's own loop, through an overflow.

    Returns:
        What differs: nothing where all is well. Parameters may differ by the rounding of float16 gradients.
    """
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.to(device)
    windows = [
        [(torch.randn(4, 8, generator=generator).to(device), torch.arange(4, device=device)) for _ in range(2)]
        for _ in range(6)
    ]
    windows[2][1][0].fill_(torch.inf)
    return _differences(model, windows, device)


def _differences(model: nn.Module, windows: list[list[Batch]], device: torch.device) -> list[str]:
    apply, params, _ = from_module(model)

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(apply(params, x).float(), y)

    optimizer = adamw(1e-2)
    step = make_step(autocast(loss_fn, torch.float16), optimizer, max_norm=0.1, clip_eps=1e-6)
    state = init_state(params, optimizer, DynamicScale(2.0**10, growth_interval=2))

    theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
    grad_scaler = torch.amp.GradScaler(device.type, init_scale=2.0**11, growth_interval=2)  # of the loss / 2
    found = []
    for number, window in enumerate(windows):
        state, metrics = step(state, window)
        for x, y in window:
            with torch.autocast(device.type, torch.float16):
                output = model(x)
            grad_scaler.scale(nn.functional.cross_entropy(output.float(), y) / 2).backward()
        grad_scaler.unscale_(theirs)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        grad_scaler.step(theirs)
        grad_scaler.update()
        theirs.zero_grad(set_to_none=True)
        if bool(metrics.applied) != (number != 2):
            found.append(f"window {number}: applied is {bool(metrics.applied)}")
        if 2 * float(state.scaler.scale) != grad_scaler.get_scale():
            found.append(f"window {number}: scale {float(state.scaler.scale)}, torch's {grad_scaler.get_scale()} / 2")
    for name, parameter in model.named_parameters():
        error = float((state.params[name] - parameter).detach().abs().max())
        if not error < 1e-4:  # of a way of 0.05
            found.append(f"{name}: off by {error:.2g} from torch's own loop")
    return found


def main(check: Callable[[torch.device], list[str]] = self_check) -> int:
    """Prints the report.

    Returns:
        0 where the self-check has passed, 1 where it has not.
    """
    here = device()
    lines = [*versions(), ("device", device_name(here))]
    for dtype, ratio in speeds(here).items():
        verdict = "fast here" if ratio > 1.1 else "no faster than float32 here" if ratio > 0.9 else "slow here"
        lines.append(
            (str(dtype).removeprefix("torch."), f"{verdict}: a matrix product at {ratio:.2g} times float32's speed")
        )
    start = time.perf_counter()
    found = check(here)
    seconds = time.perf_counter() - start
    lines.append(("self-check", "failed" if found else f"passed in {seconds:.1f} s: the step equals torch's own loop"))
    for name, text in lines:
        print(f"{name:15} {text}")
    for text in found:
        print(f"  {text}")
    return 1 if found else 0


if __name__ == "__main__":
    argparse.ArgumentParser("python -m functional_amp", description=__doc__).parse_args()
    sys.exit(main())
