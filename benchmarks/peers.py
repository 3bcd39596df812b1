"""Other libraries on the same work: the MLP, AdamW, clipping to the same norm, the same dtype."""

# pyright: reportMissingImports=false
# They are no dependencies: each is measured where somebody has installed it.

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.loops import LEARNING_RATE, MAX_NORM, Loop, make_loops
from benchmarks.measure import Call, interleaved
from benchmarks.setup import Row, Setup
from benchmarks.work import Batch, Task, task

WEIGHT_DECAY = 1e-2  # torch's default, and not everyone's


def torchopt(work: Task, setup: Setup) -> Loop:
    """Functional optimizers over `torch.func.grad`; no loss scaling there."""
    import torchopt

    model = work.seeded_model(setup.seed, setup.device)
    optimizer = torchopt.chain(
        torchopt.clip.clip_grad_norm(MAX_NORM), torchopt.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    )
    params = {name: parameter.detach() for name, parameter in model.named_parameters()}
    opt_state = optimizer.init(params)

    def loss_fn(params: dict[str, Tensor], batch: Batch) -> Tensor:
        x, y = batch
        with torch.autocast(setup.device.type, setup.dtype):
            return F.cross_entropy(torch.func.functional_call(model, params, (x,)), y)

    def run(window: Sequence[Batch]) -> None:
        nonlocal params, opt_state
        grads = torch.func.grad(loss_fn)(params, window[0])
        updates, opt_state = optimizer.update(grads, opt_state, params=params)
        params = torchopt.apply_updates(params, updates, inplace=False)

    return Loop(run, lambda: params)


def fabric(work: Task, setup: Setup) -> Loop:
    """Lightning Fabric: scales the loss for fp16 only."""
    from lightning_fabric import Fabric

    precision = "16-mixed" if setup.dtype == torch.float16 else "bf16-mixed"
    runner = Fabric(accelerator=setup.device.type, devices=1, precision=precision)
    model = work.seeded_model(setup.seed, setup.device)
    # In fp16 Fabric refuses to clip for a fused optimizer.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=setup.dtype != torch.float16)
    module, wrapped = runner.setup(model, optimizer)

    def run(window: Sequence[Batch]) -> None:
        ((x, y),) = window
        runner.backward(F.cross_entropy(module(x), y))
        runner.clip_gradients(module, wrapped, max_norm=MAX_NORM)
        wrapped.step()
        wrapped.zero_grad(set_to_none=True)

    return Loop(run, lambda: {name: tensor.detach() for name, tensor in model.named_parameters()})


def accelerate(work: Task, setup: Setup) -> Loop:
    """Hugging Face Accelerate: scales the loss for fp16 only."""
    from accelerate import Accelerator

    runner = Accelerator(
        cpu=setup.device.type == "cpu", mixed_precision="fp16" if setup.dtype == torch.float16 else "bf16"
    )
    model = work.seeded_model(setup.seed, setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    module, wrapped = runner.prepare(model, optimizer)

    def run(window: Sequence[Batch]) -> None:
        ((x, y),) = window
        runner.backward(F.cross_entropy(module(x), y))
        runner.clip_grad_norm_(module.parameters(), MAX_NORM)
        wrapped.step()
        wrapped.zero_grad(set_to_none=True)

    return Loop(run, lambda: {name: tensor.detach() for name, tensor in model.named_parameters()})


def flax(work: Task, setup: Setup) -> Loop:
    """flax's DynamicScale and optax under one `jax.jit` with donated state: JAX's step for the same work."""
    import jax
    import numpy as np
    import optax
    from flax.training.dynamic_scale import DynamicScale
    from jax import numpy as jnp

    kind = "gpu" if setup.device.type == "cuda" else "cpu"
    jax_device = jax.devices(kind)[0]
    half = jnp.float16 if setup.dtype == torch.float16 else jnp.bfloat16
    model = work.seeded_model(setup.seed, setup.device)
    values = [parameter.detach().cpu().numpy() for parameter in model.parameters()]
    params = jax.device_put(list(zip(values[::2], values[1::2], strict=True)), jax_device)
    optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE, weight_decay=WEIGHT_DECAY))

    def loss_fn(params: Any, x: Any, y: Any) -> Any:
        *hidden, (weight, bias) = params
        x = x.astype(half)
        for w, b in hidden:
            x = jax.nn.gelu(x @ w.astype(half).T + b.astype(half), approximate=False)
        logits = x @ weight.astype(half).T + bias.astype(half)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y).mean()

    def step(state: Any, x: Any, y: Any) -> Any:
        params, opt_state, scale = state
        scale, finite, _, grads = scale.value_and_grad(loss_fn)(params, x, y)
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, (params, opt_state))
        return params, opt_state, scale

    state = params, optimizer.init(params), DynamicScale(scale=2.0**16)
    jitted = jax.jit(step, donate_argnums=0)
    data: dict[int, Any] = {}

    def run(window: Sequence[Batch]) -> None:
        nonlocal state
        batch = window[0]
        if id(batch) not in data:
            data[id(batch)] = [jax.device_put(t.cpu().numpy(), jax_device) for t in batch]
        state = jax.block_until_ready(jitted(state, *data[id(batch)]))

    def tensors() -> dict[str, Tensor]:
        leaves = [torch.from_numpy(np.array(leaf)) for leaf in jax.tree.leaves(state[0])]
        return dict(zip([name for name, _ in model.named_parameters()], leaves, strict=True))

    return Loop(run, tensors)


PEERS: dict[str, tuple[tuple[str, ...], Callable[[Task, Setup], Loop]]] = {
    "TorchOpt": (("torchopt",), torchopt),
    "Lightning Fabric": (("lightning_fabric",), fabric),
    "Accelerate": (("accelerate",), accelerate),
    "flax + optax": (("flax", "optax"), flax),
}
"""What each is called and imports."""


def measure(setup: Setup) -> list[Row]:
    """All peers that run, in turn with the variants; those that do not are named with the reason."""
    torch._dynamo.reset()
    work = task("mlp", setup.smoke)
    window = work.window(1, setup.seed + 1, setup.device)
    peers, reasons = started(work, window, setup)
    loops = {**make_loops(work, setup), **peers}

    def preparing(loop: Loop) -> Callable[[], Call]:
        return lambda: lambda: loop.run(window)

    seconds = interleaved(
        {name: preparing(loop) for name, loop in loops.items()}, setup.device, setup.rounds, setup.warmup
    )
    times: dict[str, float | str] = {name: 1e3 * value for name, value in seconds.items()}
    rows = [Row("peers", "mlp, functional_amp", "ms", {variant: times[variant] for variant in setup.variants})]
    for name, (modules, _) in PEERS.items():
        base = {"imperative": times["imperative"]} if "imperative" in times else {}
        value = times[name] if name in times else reasons[name]
        rows.append(Row("peers", f"mlp, {name} {versions(modules)}".rstrip(), "ms", {**base, "peer": value}))
    return rows


def started(work: Task, window: Sequence[Batch], setup: Setup) -> tuple[dict[str, Loop], dict[str, str]]:
    """The peers that did a window, and why the others did not."""
    loops, reasons = {}, {}
    for name, (modules, make) in PEERS.items():
        missing = [module for module in modules if importlib.util.find_spec(module) is None]
        if missing:
            reasons[name] = f"absent: no {', '.join(missing)}"
            continue
        try:
            loop = make(work, setup)
            loop.run(window)
        except Exception as error:  # whatever a foreign release raises with this torch is a result of the table
            first_line = str(error).partition("\n")[0]
            reasons[name] = f"does not run: {type(error).__name__}: {first_line}"
            continue
        loops[name] = loop
    return loops, reasons


def versions(modules: Sequence[str]) -> str:
    """Those of the installed ones; a distribution is called like its module, but for - in place of _."""
    names = [module.replace("_", "-") for module in modules if importlib.util.find_spec(module) is not None]
    return ", ".join(importlib.metadata.version(name) for name in names)
