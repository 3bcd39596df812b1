"""What the suites share: how a list of laws is run, and laws about any pure function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_amp.testing.compare import assert_no_aliases, assert_unwritten, copied, mapped, snapshot
from functional_amp.tree import flatten

Law = Callable[..., None]


def check(subject: str, laws: Sequence[Law], *args: Any) -> None:
    """Runs laws in order.

    Raises:
        AssertionError: at the first that fails, naming it; also where the code under test raises.
    """
    for law in laws:
        name = f"{subject}: {law.__name__.replace('_', ' ')}"
        try:
            law(*args)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error
        except Exception as error:
            raise AssertionError(f"{name}: raised {type(error).__name__}: {error}") from error


def assert_pure(function: Callable[..., Any], *given: Any) -> Any:
    """Raises AssertionError where an input was written to, or an output is a view of one; returns the output."""
    versions, values = snapshot(given)
    output = function(*given)
    assert_unwritten(versions, values, given, "input")
    assert_no_aliases(output, given, "output")
    return output


def in_fake_mode(function: Callable[..., Any], *given: Any) -> Any:
    """Runs a function on tensors without values: a host read raises there.

    Tensors that the function holds itself are taken along as fake ones.
    """
    with torch.random.fork_rng(devices=[]), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return function(*mapped(lambda leaf: mode.from_tensor(leaf) if isinstance(leaf, Tensor) else leaf, given))


def compiled_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """One graph with backend="aot_eager"; every recompilation after the first call is an error.

    Forgets what dynamo has compiled so far: it counts graphs by the source line of a function.
    """
    torch._dynamo.reset()
    graph = torch.compile(function, backend="aot_eager", fullgraph=True)
    first = True

    def run(*args: Any) -> Any:
        nonlocal first
        # trace_autograd_ops: for steps with the autograd backend.
        with torch._dynamo.config.patch(error_on_recompile=not first, trace_autograd_ops=True):
            output = graph(*args)
        first = False
        return output

    return run


def stacked(members: Sequence[Any]) -> Any:
    """Trees of one structure as one tree, each leaf with a first dimension for the members."""
    return mapped(lambda *leaves: torch.stack(leaves), members[0], *members[1:])


def member(tree: Any, index: int) -> Any:
    """One of the trees that `stacked` put together."""
    return mapped(lambda leaf: leaf[index], tree)


def vmapped(function: Callable[..., Any], *trees: Any) -> Any:
    """`torch.func.vmap` over trees with None: torch's pytree treats None as a leaf, and vmap refuses such a leaf."""
    flats = [flatten(tree) for tree in trees]
    output_spec: Any = None

    def on_tensors(*given: list[Tensor]) -> list[Tensor]:
        nonlocal output_spec
        rebuilt = []
        for flat, tensors in zip(flats, given, strict=True):
            present = iter(tensors)
            rebuilt.append(flat.unflatten([None if leaf is None else next(present) for leaf in flat.leaves]))
        leaves, output_spec = optree.tree_flatten(function(*rebuilt))
        return leaves  # pyright: ignore[reportReturnType]

    tensors = [[leaf for leaf in flat.leaves if leaf is not None] for flat in flats]
    leaves = torch.func.vmap(on_tensors)(*tensors)
    return optree.tree_unflatten(output_spec, leaves)


def used_up(state: Any) -> bool:
    """Whether the state was donated: reading it raises RuntimeError then."""
    try:
        copied(state)
    except RuntimeError:
        return True
    return False
