"""What forwards do beside giving an output: what torch's loop makes of it is reproduced, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from tests.test_cases_modules import (
    Net,
    assert_trains_as_torch,
    built,
    drawn,
    variants,
)

# torch.func in the forward


class Forces(Net):
    """The derivative of an energy by its inputs."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda v: super(Forces, self).forward(v).sum()))(x)


class Curvature(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.hessian(lambda v: super(Curvature, self).forward(v).sum()))(x).sum(1)


class Tangent(Net):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))[1]


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@variants
@pytest.mark.parametrize("make", [Forces, Curvature, Tangent])
def test_a_forward_that_differentiates_by_torch_func_trains_as_in_torch(make: Any, backend: Any, donate: bool):
    assert_trains_as_torch(make, backend, donate)


@pytest.mark.filterwarnings("ignore:.torch.jit.script")
@pytest.mark.parametrize("make", [Forces, Curvature, Tangent])
def test_a_forward_that_differentiates_by_torch_func_is_evaluated_as_in_torch(make: Any):
    module = built(make)
    apply, params, _ = fa.from_module(module)
    assert torch.equal(apply(params, drawn(5, 3)), module(drawn(5, 3)))


def test_the_rehearsal_is_unseen_by_a_checkpoint_around_a_batched_call():
    apply, params, _ = fa.from_module(built(Net))
    leaves, x = [p.requires_grad_() for p in params.values()], drawn(5, 3)
    rows = torch.vmap(lambda row: apply(params, row))
    found = torch.autograd.grad(checkpoint(rows, x, use_reentrant=False).square().sum(), leaves)
    expected = torch.autograd.grad(rows(x).square().sum(), leaves)
    assert all(map(torch.equal, found, expected))


# What a compiled call writes to


class Counting(Net):
    """Counts in a buffer, in one of several ways."""

    n: Tensor

    def __init__(self, write: Any):
        super().__init__()
        self.write = write
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor, *, counts: bool = True) -> Tensor:
        if counts:
            self.write(self)
        return super().forward(x) * (1 + self.n)


def _in_place(module: Any) -> None:
    module.n.add_(1)


def _by_copy(module: Any) -> None:
    module.n.copy_(module.n + 1)


def _by_data(module: Any) -> None:
    module.n.data.add_(1)


def _detached(module: Any) -> None:
    module.n.detach().add_(1)


def _anew(module: Any) -> None:
    module.n = module.n + 1


writes = pytest.mark.parametrize("write", [_in_place, _by_copy, _by_data, _detached, _anew])


def graph_of(function: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="eager")


@writes
def test_the_fixed_form_refuses_a_write_to_a_buffer_in_a_graph(fresh_dynamo: None, write: Any):
    apply, params, buffers = fa.from_module(built(lambda: Counting(write)))
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \['n'\].*apply\.with_buffers"):
        graph_of(lambda p, x: apply(p, x))(params, drawn(5, 3))
    assert buffers["n"] == 0


@writes
def test_the_fixed_form_refuses_it_in_a_graph_after_a_call_outside_that_took_another_branch(
    fresh_dynamo: None, write: Any
):
    apply, params, _ = fa.from_module(built(lambda: Counting(write)))
    apply(params, drawn(5, 3), counts=False)
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \['n'\].*apply\.with_buffers"):
        graph_of(lambda p, x: apply(p, x))(params, drawn(5, 3))


@writes
def test_the_remedy__with_buffers_follows_the_write_in_a_graph(fresh_dynamo: None, write: Any):
    module, x = built(lambda: Counting(write)), drawn(5, 3)
    apply, params, buffers = fa.from_module(module)
    out, after = graph_of(lambda p, b, x: apply.with_buffers(p, b, x))(params, buffers, x)
    assert torch.equal(out, module(x)) and after["n"] == 1 and buffers["n"] == 0


class Centered(nn.Module):
    """Takes off a mean, which training moves."""

    mean: Tensor

    def __init__(self):
        super().__init__()
        self.l = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.5)
        return self.l(x - self.mean)


@pytest.mark.parametrize("before", [False, True], ids=["", "evaluated in a graph before"])
def test_buffers_that_a_graph_moved_are_asked_for_in_evaluation(fresh_dynamo: None, before: bool):
    apply, params, buffers = fa.from_module(built(Centered))
    evaluation, x = apply.eval(), drawn(5, 3)
    evaluate = graph_of(lambda p, x: evaluation(p, x))
    if before:
        evaluate(params, x)  # what training has not moved yet
    _, after = graph_of(lambda p, b, x: apply.with_buffers(p, b, x))(params, buffers, x)
    for call in (evaluation, evaluate):
        with pytest.raises(RuntimeError, match=r"running statistics \['mean'\] as they were.*apply\.bind"):
            call(params, x)
    expected = built(Centered)
    expected(x)
    assert torch.equal(evaluation.bind(after)(params, x), expected.eval()(x))


def test_buffers_that_a_graph_moves_and_reads_as_they_were_are_asked_for(fresh_dynamo: None):
    apply, params, buffers = fa.from_module(built(Centered))
    evaluation = apply.eval()
    with pytest.raises(RuntimeError, match=r"running statistics \['mean'\] as they were.*apply\.bind"):
        graph_of(lambda p, b, x: evaluation(p, x) + apply.with_buffers(p, b, x)[0])(params, buffers, drawn(5, 3))


def test_the_loss_function_may_not_write_through_data_in_a_graph(fresh_dynamo: None):
    def loss_fn(p: Any, x: Tensor, buffers: Any) -> Tensor:
        buffers["c"].data.add_(1)
        return (p * x).sum()

    state = fa.init_state(torch.ones(2), fa.sgd(1.0), fa.NoScale(), {"c": torch.zeros(1)})
    step = fa.make_step(loss_fn, fa.sgd(1.0), backend="autograd", compile={"backend": "aot_eager"})
    with pytest.raises(RuntimeError, match="write in place"):
        step(state, [torch.ones(2)])
    assert state.buffers["c"] == 0


# Globals that are tensors of the original module


class ReadsAGlobal(Net):
    """Reads a parameter, or what lies in its memory, through a global."""

    shared: Any = None

    def __init__(self, alias: Any):
        super().__init__()
        ReadsAGlobal.shared = alias(self.l.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + ReadsAGlobal.shared.sum()


aliases = pytest.mark.parametrize("alias", [lambda w: w, lambda w: w.t(), lambda w: w.detach(), lambda w: w.data[1:]])


@aliases
def test_a_global_that_is_a_parameter_or_lies_in_its_memory_is_refused(alias: Any):
    module = built(lambda: ReadsAGlobal(alias))
    apply, params, _ = fa.from_module(module)
    with pytest.raises(RuntimeError, match=r"reads 'l\.weight' of the original module.*through self"):
        apply(params, drawn(5, 3))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@aliases
def test_a_global_that_is_a_parameter_or_lies_in_its_memory_is_refused_in_a_graph(fresh_dynamo: None, alias: Any):
    module = built(lambda: ReadsAGlobal(alias))
    apply, params, _ = fa.from_module(module)
    with pytest.raises(RuntimeError, match=r"reads 'l\.weight' of the original module.*through self"):
        graph_of(lambda p, x: apply(p, x))(params, drawn(5, 3))


class TakesAWeight(Net):
    def forward(self, x: Tensor, weight: Any = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x) + weight.sum()


def test_the_remedy__a_view_of_a_parameter_as_an_argument_is_followed(fresh_dynamo: None):
    module, x = built(TakesAWeight), drawn(5, 3)
    apply, params, _ = fa.from_module(module)
    view = module.l.weight.detach().t()
    assert torch.equal(graph_of(lambda p, x, w: apply(p, x, w))(params, x, view), module(x, view))
    assert torch.equal(graph_of(lambda p, x: apply(p, x, view))(params, x), module(x, view))
    assert torch.equal(apply(params, x, view), module(x, view))


# Errors in a graph that was left


class Leaves(Net):
    """Leaves the graph in the middle, and does not like seven rows."""

    def encode(self, x: Tensor) -> Tensor:
        hidden = self.l(x)
        torch._dynamo.graph_break()
        if x.shape[0] == 7:
            raise ValueError("seven rows")
        return self.o(torch.tanh(hidden))


def test_an_error_outside_of_the_graph_leaves_nothing_in_the_module(fresh_dynamo: None):
    apply, params, _ = fa.from_module(built(Leaves))
    encode, x = apply.method("encode"), drawn(5, 3)
    expected = built(Leaves).encode(x)
    with pytest.raises(ValueError, match="seven rows"):
        torch.compile(lambda p, x: encode(p, x), backend="eager")(params, drawn(7, 3))
    assert all(tensor.is_meta for tensor in apply.template.parameters())
    held = [encode(p, x) for p in [{name: p.clone().requires_grad_() for name, p in params.items()}] * 2]
    assert all(torch.equal(out, expected) for out in [*held, apply.eval().method("encode")(params, x)])
