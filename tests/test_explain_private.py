"""What explain takes from torch without a promise: each test says what breaks when it moves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch._subclasses import FakeTensorMode
from torch.nn.modules import module as torch_module
from torch.testing._internal.two_tensor import TwoTensor

from functional_amp.debug import torch_private
from tests.test_torch_private import public_names


def test_the_running_node_is_known_in_the_backward_alone() -> None:
    """Without it a backward operator has neither node nor module."""
    seen: list[tuple[str, str]] = []

    class Watch(torch_private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            node = torch_private.running_node()
            seen.append((func._schema.name, "" if node is None else node.name()))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch():
        torch.autograd.grad(x.exp().sum(), x)
    assert ("aten::exp", "") in seen and ("aten::mul", "ExpBackward0") in seen


def test_nodes_are_numbered_as_the_forward_makes_them() -> None:
    """Without it a node of the backward can't be put into its module or on its line."""
    x = torch.ones(2, requires_grad=True)
    before = torch_private.next_sequence_number()
    y = x.exp()
    assert before <= torch_private.sequence_number(y.grad_fn) < torch_private.next_sequence_number()


def test_the_number_is_the_newest_inside_an_operator() -> None:
    """Without it the line of a node is that of the operator before it."""
    found: list[int] = []

    class Watch(torch_private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(torch_private.next_sequence_number() - 1)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    with Watch():
        y = x.exp()
    assert set(found) == {torch_private.sequence_number(y.grad_fn)}


def test_views_share_a_storage_key() -> None:
    """Without it a bad value is lost at the first view, or found in memory that only was at its address."""
    x = torch.ones(4)
    assert torch_private.storage_key(x[1:]) == torch_private.storage_key(x.view(2, 2))
    assert torch_private.storage_key(x) != torch_private.storage_key(torch.ones(4))


def test_the_mode_sees_plain_tensors_below_torch_func() -> None:
    """Without it backend='func' would show wrappers, whose memory is nobody's."""
    wrapped: list[bool] = []

    class Watch(torch_private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [leaf for leaf in torch_private.flatten(args)[0] if isinstance(leaf, Tensor)]
            wrapped.extend(is_functorch_wrapped_tensor(leaf) for leaf in given)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.func.grad(lambda x: torch.vmap(lambda row: row.exp().sum())(x).sum())(torch.ones(2, 3))
    assert wrapped and not any(wrapped)


def test_global_hooks_see_every_module_and_an_exception() -> None:
    """Without them an operator has no module, or keeps the one that raised."""
    events: list[str] = []

    class Raises(nn.Module):
        def forward(self) -> None:
            raise KeyError

    hooks = [
        torch_module.register_module_forward_pre_hook(lambda module, args: events.append("enter")),
        torch_module.register_module_forward_hook(lambda module, args, out: events.append("leave"), always_call=True),
    ]
    try:
        Raises()()
    except KeyError:
        events.append("raised")
    finally:
        for hook in hooks:
            hook.remove()
    assert events == ["enter", "leave", "raised"]


def test_a_subclass_with_operators_of_its_own_is_told_from_a_plain_tensor() -> None:
    """Without it an overflow inside a subclass would be taken for a constant that was bad before."""
    assert torch_private.dispatches_itself(TwoTensor)
    assert not torch_private.dispatches_itself(Tensor) and not torch_private.dispatches_itself(nn.Parameter)


def test_schemas_say_what_is_a_view_and_what_is_written() -> None:
    """Without it views would be taken for new values, and in-place operators for pure ones."""
    aten: Any = torch.ops.aten
    schema_of = torch_private.schema_of
    assert [r.alias_info.is_write for r in schema_of(aten.view.default).returns] == [False]
    assert schema_of(aten.add_.Tensor).arguments[0].alias_info.is_write and schema_of(aten.add_.Tensor).is_mutable
    assert schema_of(aten.add.Tensor).returns[0].alias_info is None
    assert schema_of(torch.ops.higher_order.cond) is None
    assert torch.Tag.nondeterministic_seeded in aten.native_dropout.default.tags


def test_tensors_without_memory_are_known() -> None:
    """Without it reading a zero of forward mode crashes the process, and one of a sparse or meta tensor raises."""
    assert torch_private.has_memory(torch.ones(2))
    assert not torch_private.has_memory(torch._efficientzerotensor((2,)))
    assert not torch_private.has_memory(torch.ones(2, device="meta"))
    assert not torch_private.has_memory(torch.ones(2).to_sparse())


def test_traced_tensors_are_told_from_those_with_values() -> None:
    """Without it explain would read the values of a scan's trace, which has none."""
    with FakeTensorMode():
        assert torch_private.is_traced(type(torch.ones(2)))
    assert not torch_private.is_traced(Tensor) and not torch_private.is_traced(TwoTensor)


def test_a_cast_is_one_operator() -> None:
    """Without it no cast would be counted in the forward table of an underflow report."""
    seen: list[Any] = []

    class Watch(torch_private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch(), torch.autocast("cpu", torch.float16):
        torch.ones(2).half()
        torch.ones(2, 2).mm(torch.ones(2, 2))
    assert seen.count(torch_private.to_copy) == 3


def test_arguments_are_flattened_in_their_order_and_back() -> None:
    """Without it an operator would be run again with other arguments than it had."""
    arguments = ((1, [2, None]), {"b": 3, "a": 4})
    leaves, spec = torch_private.flatten(arguments)
    assert leaves == [1, 2, None, 3, 4] and torch_private.unflatten(leaves, spec) == arguments


def test_each_private_name_has_a_test() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    assert [name for name in public_names(torch_private) if f"torch_private.{name}" not in source] == []


@pytest.mark.slow
def test_the_compiler_is_loaded_only_once_it_was_imported() -> None:
    """Without it each explanation would import the compiler, or run a compiled module of the loss compiled."""
    code = (
        "from functional_amp.debug import torch_private; print(torch_private.compiler_is_loaded()); "
        "import torch._dynamo; print(torch_private.compiler_is_loaded())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
