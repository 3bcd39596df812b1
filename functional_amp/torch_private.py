"""Every private name of torch and optree that the package uses; tests/test_torch_private.py says what each is for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.utils.parametrize
from optree.registry import __GLOBAL_NAMESPACE as _GLOBAL
from torch import Tensor
from torch.utils import _python_dispatch, _pytree

GLOBAL_NAMESPACE = _GLOBAL
"""optree's namespace of nodes that every caller sees."""

torch_pytree: Any = _pytree
"""The registry that torch.func and torch.compile look into; `torch.utils.pytree` has no paths for nodes yet."""

_functorch: Any = cast(Any, torch._C)._functorch
is_wrapped: Any = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor is the wrapper of a transform around another."""


def functorch_active() -> bool:
    """Whether a `torch.func` transform runs on this thread; dynamo knows this function."""
    return torch._C._are_functorch_transforms_active()


def storage_use_count(tensor: Tensor) -> int:
    """How many tensors hold the storage of a plain one. Asking for the storage itself would cost ten times as much."""
    return torch._C._storage_Use_Count(cast(Any, torch._C)._storage_id(tensor))


def storage_key(tensor: Tensor) -> int:
    """Equal for two tensors on one storage, also where there is no address (meta, fake)."""
    return tensor.untyped_storage()._cdata


def is_wrapper(tensor: Tensor) -> bool:
    """Whether a tensor is of a class that holds other tensors, which `__tensor_flatten__` names."""
    return _python_dispatch.is_traceable_wrapper_subclass(tensor)


def below_modes() -> Any:
    """A context in which modes that watch calls of torch functions see nothing, as inside a kernel."""
    return torch._C.DisableTorchFunction()


def any_watching() -> bool:
    """Whether a mode on this thread sees, or replaces, what each operator does."""
    return torch._C._len_torch_dispatch_stack() > 0


def fused_sgd(*args: Any, **kwargs: Any) -> Any:
    """torch's kernel for a list of leaves, in place; the one `torch.optim.SGD(fused=True)` runs."""
    return torch._fused_sgd_(*args, **kwargs)


def fused_adam(*args: Any, decoupled: bool, **kwargs: Any) -> Any:
    """torch's kernel of Adam or AdamW for a list of leaves, in place."""
    return cast(Any, torch._fused_adamw_ if decoupled else torch._fused_adam_)(*args, **kwargs)


def foreach_norm(leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each leaf, accumulated in a dtype."""
    return list(torch._foreach_norm(leaves, 2, dtype=dtype))


def tracing_autograd() -> Any:
    """A context in which dynamo traces `torch.autograd.grad` into a graph."""
    return torch._dynamo.config.patch(trace_autograd_ops=True)


@contextmanager
def keeping_saved_tensor_hooks() -> Iterator[None]:
    """Allows them again after an exception: a trace of `torch.func.grad` that fails leaves them forbidden for good."""
    autograd: Any = cast(Any, torch._C)._autograd
    allowed = autograd._saved_tensors_hooks_is_enabled()
    try:
        yield
    except BaseException:
        if allowed:
            autograd._saved_tensors_hooks_enable()
        raise


def saved_tensors_are_hooked() -> bool:
    """Whether hooks see what is saved for a backward here, as those of a checkpoint do."""
    return cast(Any, torch._C)._autograd._top_saved_tensors_default_hooks(True) is not None


def dynamo_exception() -> type[BaseException]:
    """What the compiler raises; importing it takes a second."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def scan(*args: Any, **kwargs: Any) -> Any:
    """torch's loop in a graph; importing it takes a second."""
    from torch._higher_order_ops.scan import scan as torch_scan

    return torch_scan(*args, **kwargs)


def norm_layers() -> type[torch.nn.Module]:
    """The base class of layers with running statistics."""
    return torch.nn.modules.batchnorm._NormBase


def hooks_made() -> int:
    """How many hooks have been registered so far, of modules and of tensors, in this process."""
    return torch.utils.hooks.RemovableHandle.next_id


def parametrizations_cached() -> bool:
    """True inside `torch.nn.utils.parametrize.cached()`."""
    return torch.nn.utils.parametrize._cache_enabled > 0


def reaches_this_level(tensor: Tensor) -> bool:
    """Whether a tensor depends on what the innermost `torch.func.grad` differentiates."""
    if torch.compiler.is_compiling():  # dynamo does not know levels
        return tensor.requires_grad
    level = _functorch.maybe_current_level()
    while is_wrapped(tensor) and _functorch.maybe_get_level(tensor) > level:
        tensor = _functorch.get_unwrapped(tensor)
    return _functorch.maybe_get_level(tensor) == level and tensor.requires_grad


def has_derivative(tensor: Tensor) -> bool:
    """Whether a tensor depends on what is being differentiated now, by torch.func or by the engine."""
    return reaches_this_level(tensor) if functorch_active() else tensor.requires_grad


def levels(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor as each `torch.func` transform around it sees it: the innermost first, without any last."""
    while is_wrapped(tensor):
        yield tensor
        tensor = _functorch.get_unwrapped(tensor)
    yield tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below the wrappers of all transforms."""
    return list(levels(tensor))[-1]


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values, as those that the compiler traces with."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def below_dispatch_modes() -> Any:
    """A context in which no dispatch mode sees the operators: under fake tensors, tensors are real ones."""
    return _python_dispatch._disable_current_modes()


def below_subclasses() -> Any:
    """A context in which a tensor subclass is treated as a plain tensor."""
    return torch._C.DisableTorchFunctionSubclass()


def comptime() -> Any:
    """What has a function called once by dynamo, where it is called itself; importing it takes a second."""
    from torch._dynamo.comptime import comptime

    return comptime


def _translator(context: Any) -> Any:
    """What traces the code that called `comptime`."""
    return context._i_will_not_complain_if_bc_breaks_InstructionTranslator()


def traced_locals(context: Any) -> Any:
    """What dynamo knows of the local variables where `comptime` was called, all of it: it looks at some late."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    return LazyVariableTracker.realize_all(_translator(context).symbolic_locals)


def traced_effects(context: Any) -> Any:
    """What dynamo has noted of writes to attributes and containers."""
    return _translator(context).output.side_effects


def traced_graph(context: Any) -> weakref.ref[Any]:
    """The graph that dynamo is making. Where it leaves one, it makes another for what comes after."""
    return weakref.ref(_translator(context).output)


def traced_fully(context: Any) -> bool:
    """Whether what dynamo traces may not leave the graph."""
    return _translator(context).output.root_tx.one_graph


def traced_items(variable: Any) -> dict[str, Any]:
    """What dynamo knows of the values of a dict with strings for keys."""
    return {key.vt.as_python_constant(): value for key, value in variable.items.items()}


def traced_value(variable: Any) -> Tensor | None:
    """The stand-in of a traced tensor; None for anything else."""
    return None if (proxy := getattr(variable, "proxy", None)) is None else proxy.node.meta["example_value"]


def traced_class(variables: Iterable[Any], kind: type[Tensor]) -> None:
    """Makes a class what `isinstance` finds of traced tensors that are plain ones."""
    for variable in variables:
        if variable.class_type in (Tensor, torch.nn.Parameter):
            variable.class_type = kind


def traced_versions(variables: Iterable[Any]) -> list[int]:
    """The version counters of the stand-ins of traced tensors, each with those of its `.data`, which has its own."""
    return _versions([variable.proxy.node for variable in variables])


def traced_inputs(context: Any) -> list[tuple[str, Tensor, int]]:
    """What a graph reads so far: dynamo's name of the source, the tensor outside of the graph, the version inside."""
    tracer = _translator(context).output.root_tracer
    nodes = tracer.graph.find_nodes(op="placeholder")
    found = [node for node in nodes if isinstance(getattr(node.meta.get("grapharg"), "example", None), Tensor)]
    given = [node.meta["grapharg"] for node in found]
    return [(str(g.source.name), g.example, v) for g, v in zip(given, _versions(found), strict=True)]


def _versions(nodes: list[Any]) -> list[int]:
    of_data = Counter[int]()
    for node in nodes[0].graph.nodes if nodes else ():
        if node.target is cast(Any, torch._C)._autograd._get_data_attr:
            data = unwrapped(node.meta["example_value"])
            of_data[storage_key(data)] += data._version
    values = [unwrapped(node.meta["example_value"]) for node in nodes]
    return [value._version + (of_data[storage_key(value)] if of_data else 0) for value in values]


def traced_input_writes(context: Any) -> list[tuple[str, Tensor]]:
    """Those among `traced_inputs` that the graph has written to so far."""
    from torch._subclasses import FakeTensorMode

    mode = FakeTensorMode()  # of a stand-in that nothing has written to: that of a view does not begin at 0
    return [
        (source, tensor)
        for source, tensor, version in traced_inputs(context)
        if not tensor.is_inference() and not is_wrapper(tensor) and version != mode.from_tensor(tensor)._version
    ]


def all_reduced(tensors: list[Tensor], group: str, *, in_place: bool = False) -> list[Tensor]:
    """The sums over the ranks of a group, of contiguous tensors of one dtype: one collective, also in a graph."""
    operators: Any = torch.ops._c10d_functional
    add = operators.all_reduce_coalesced_ if in_place else operators.all_reduce_coalesced
    return [operators.wait_tensor(total) for total in add(tensors, "sum", group)]


def all_gathered(tensor: Tensor, size: int, group: str) -> Tensor:
    """The tensors of all ranks of a group, along a new first dimension."""
    operators: Any = torch.ops._c10d_functional
    gathered = operators.wait_tensor(operators.all_gather_into_tensor(tensor.reshape(-1), size, group))
    return gathered.reshape(size, *tensor.shape)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Raises where a 0-dim bool tensor is False, without a host read: later and less clearly on an accelerator."""
    torch._assert_async(condition, message)


def ranks_of_group(name: str) -> tuple[int, ...]:
    """The ranks of a process group, by its name; a graph takes them for constant."""
    from torch.distributed import distributed_c10d

    return tuple(distributed_c10d.get_process_group_ranks(distributed_c10d._resolve_process_group(cast(Any, name))))


# What torch.compiler.assume_constant_result does; asking that imports the compiler, which takes a second.
cast(Any, ranks_of_group)._dynamo_marked_constant = True


def root_mesh(mesh: Any) -> Any:
    """The mesh of all dimensions that a dimension was sliced out of."""
    return mesh._get_root_mesh()


def part_of_dtensor(part: Tensor, like: Any) -> Any:
    """A part as the DTensor that another one is, without the checks of `from_local`, which take ten times as long."""
    from torch.distributed.tensor import DTensor

    if torch.compiler.is_compiling() or part.dtype != like.dtype or part.requires_grad:
        mesh, placements = like.device_mesh, like.placements
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())
    return cast(Any, DTensor)(part, like._spec, requires_grad=False)
