"""What explain takes from torch without a promise: each test says what breaks when it moves."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor  # pyright: ignore[reportMissingImports]
from torch.nn.modules import module as torch_module
from torch.testing._internal.two_tensor import TwoTensor

from functional_amp.debug import torch_private


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
    assert [r.alias_info.is_write for r in aten.view.default._schema.returns] == [False]
    assert aten.add_.Tensor._schema.arguments[0].alias_info.is_write
    assert aten.add.Tensor._schema.returns[0].alias_info is None
    assert torch.Tag.nondeterministic_seeded in aten.native_dropout.default.tags
