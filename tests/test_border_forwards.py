"""What forwards do beside giving an output: what torch's loop makes of it is reproduced, or refused by name."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import functional_amp as fa
from tests import test_cases_modules as cases
from tests.test_cases_modules import (
    Net,
    assert_trains_as_torch,
    built,
    drawn,
    trained,
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


class Holding(Counting):
    """Counts in a tensor that is no buffer."""

    def __init__(self, write: Any):
        super().__init__(write)
        del self.n
        self.n = torch.zeros(())


@pytest.mark.parametrize("write", [_in_place, _by_data])
def test_a_write_to_a_tensor_that_is_no_buffer_is_refused_in_a_graph(fresh_dynamo: None, write: Any):
    apply, params, buffers = fa.from_module(built(lambda: Holding(write)))
    with pytest.raises(RuntimeError, match=r"keeps something at \['n'\].*apply\.with_buffers"):
        graph_of(lambda p, x: apply.with_buffers(p, buffers, x))(params, drawn(5, 3))


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


# What a backward keeps


class Balanced(Net):
    """A hook of the backward changes what the next forward reads."""

    scale: Any

    def __init__(self, change: Any, held: Any):
        super().__init__()
        self.change = change
        if isinstance(held, Tensor):
            self.register_buffer("scale", held)
        else:
            self.scale = held
        self.hook()

    def hook(self) -> None:
        self.o.register_full_backward_hook(self.called)

    def called(self, *_: Any) -> None:
        self.change(self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.scale + 0)


class OnATensor(Balanced):
    """The same by a hook on a tensor of the forward."""

    def hook(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.l(x)
        hidden.register_hook(lambda grad: self.change(self))
        return self.o(torch.tanh(hidden)) * (self.scale + 0)


class _CountedInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any, **_: Any) -> Tensor:
        ctx.change = args[1]
        return args[0].clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        ctx.change()
        return grad_outputs[0], None


class ByAFunction(OnATensor):
    """The same by the backward of an autograd.Function."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(_CountedInBackward.apply(self.l(x), lambda: self.change(self))) * (self.scale + 0)


def _halve_anew(module: Any) -> None:
    module.scale = module.scale * 0.5


def _halve_in_place(module: Any) -> None:
    module.scale.mul_(0.5)


backwards = pytest.mark.parametrize("kind", [Balanced, OnATensor, ByAFunction])


def a_step(module: nn.Module, **options: Any) -> Any:
    """A step of the fixed form, and its state."""
    apply, params, _ = fa.from_module(module)
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x: apply(p, x).square().mean(), optimizer, **options)
    return step, fa.init_state(params, optimizer, fa.NoScale())


@variants
@backwards
def test_an_attribute_that_the_backward_keeps_is_refused(kind: Any, backend: Any, donate: bool):
    if kind is not OnATensor and backend == "func":
        pytest.skip("torch.func takes no such Function, and module hooks are made of one")
    with pytest.raises(RuntimeError, match=r"backward \(a hook, say\) keeps something at \['scale'\].*with_buffers"):
        trained(built(lambda: kind(_halve_anew, 1.0)), backend, donate)


@variants
@backwards
def test_the_remedy__a_buffer_written_to_in_place_by_the_backward_trains_as_in_torch(
    kind: Any, backend: Any, donate: bool
):
    if kind is not OnATensor and backend == "func":
        pytest.skip("torch.func takes no such Function, and module hooks are made of one")
    assert_trains_as_torch(lambda: kind(_halve_in_place, torch.ones(())), backend, donate)


@pytest.mark.parametrize("donate", [False, True])
@backwards
def test_the_fixed_form_refuses_a_buffer_that_the_backward_writes_to(kind: Any, donate: bool):
    step, state = a_step(built(lambda: kind(_halve_in_place, torch.ones(()))), backend="autograd", donate=donate)
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \['scale'\].*apply\.with_buffers"):
        step(state, [drawn(5, 3)])


def test_a_buffer_that_a_hook_of_the_backward_assigns_anew_is_refused_by_its_name():
    with pytest.raises(RuntimeError, match=r"or a hook\) assigns \['scale'\] anew.*self\.n\.add_\(1\)"):
        trained(built(lambda: Balanced(_halve_anew, torch.ones(()))), "autograd")


def test_a_parameter_that_a_hook_of_the_backward_writes_to_is_refused():
    def clamp(module: Any) -> None:
        with torch.no_grad():
            module.o.weight.clamp_(-0.1, 0.1)

    with pytest.raises(RuntimeError, match=r"(writes to its parameters|in place to the parameters at) \['o\.weight'\]"):
        trained(built(lambda: Balanced(clamp, 1.0)), "autograd")


@pytest.mark.parametrize(
    ("change", "held", "match"),
    [
        (_halve_anew, 1.0, r"keeps something at \['scale'\]"),
        (_halve_in_place, torch.ones(()), r"wrote to its buffers \['scale'\]"),
    ],
)
def test_in_a_loop_of_ones_own_a_later_call_refuses_what_the_backward_kept(change: Any, held: Any, match: str):
    apply, params, _ = fa.from_module(built(lambda: Balanced(change, held)))
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    optimizer = torch.optim.SGD(leaves.values(), 0.1)
    apply(leaves, drawn(5, 3)).square().mean().backward()
    optimizer.step()  # a write to parameters, which is no fault
    with pytest.raises(RuntimeError, match=match):
        apply(leaves, drawn(5, 3))


def test_what_is_only_kept_for_others_by_a_hook_is_named_as_scratch():
    def keep(module: Any) -> None:
        module.seen = module.scale

    module = built(lambda: Balanced(keep, 1.0))
    with pytest.raises(RuntimeError, match=r"keeps something at \['seen'\].*scratch="):
        step, state = a_step(module, backend="autograd")
        step(state, [drawn(5, 3)])
    apply, params, _ = fa.from_module(module, scratch=("seen",))
    loss = fa.scale_backward(lambda p, x: apply(p, x).sum(), fa.NoScale(), params, drawn(5, 3), backend="autograd")
    grads = loss.grads.tree
    module(drawn(5, 3)).sum().backward()
    torch.testing.assert_close(grads["l.weight"], module.l.weight.grad)


# Parameters in the forward


class Penalized(Net):
    """Adds a penalty over what is an nn.Parameter."""

    def forward(self, x: Tensor) -> Tensor:
        found = [p for layer in self.modules() for p in layer._parameters.values() if isinstance(p, nn.Parameter)]
        assert self.get_parameter("l.weight") is self.l.weight
        return super().forward(x) + sum(p.square().sum() for p in found)


def half_frozen() -> nn.Module:
    module = Penalized()
    module.l.requires_grad_(False)
    return module


@variants
@pytest.mark.parametrize("make", [Penalized, half_frozen])
def test_parameters_are_parameters_in_the_forward(make: Any, backend: Any, donate: bool):
    assert_trains_as_torch(make, backend, donate)


@pytest.mark.parametrize("make", [Penalized, half_frozen])
def test_parameters_are_parameters_in_a_graph(fresh_dynamo: None, make: Any):
    module, x = built(make), drawn(5, 3)
    apply, params, buffers = fa.from_module(module)

    def loss(params: Any, x: Tensor) -> Tensor:
        return apply.with_buffers(params, buffers, x)[0].sum() + isinstance(params["o.bias"], nn.Parameter)

    grads = graph_of(lambda p, x: torch.func.grad_and_value(loss)(p, x))(params, x)
    torch.testing.assert_close(grads[1], module(x).sum())
    module(x).sum().backward()
    torch.testing.assert_close(grads[0]["o.weight"], module.o.weight.grad)


@variants
def test_what_is_given_and_what_is_returned_is_no_parameter(backend: Any, donate: bool):
    apply, params, buffers = fa.from_module(built(half_frozen))
    _, after = apply.with_buffers(params, buffers, drawn(5, 3))

    def failing(p: Any, x: Tensor) -> Tensor:
        apply(p, x)
        raise ValueError("after the forward")

    with pytest.raises(ValueError, match="after the forward"):
        fa.scale_backward(failing, fa.NoScale(), params, drawn(5, 3), backend=backend)
    state = trained(built(half_frozen), backend, donate)
    for tensors in (params, buffers, after, state.params, state.buffers):
        assert not any(isinstance(tensor, nn.Parameter) for tensor in tensors.values())


class Switching(Net):
    """Switches requires_grad in the forward, in one of several ways."""

    def __init__(self, switch: Any):
        super().__init__()
        self.switch = switch

    def forward(self, x: Tensor) -> Tensor:
        self.switch(self.l)
        return super().forward(x)


def _off_and_on(layer: nn.Module) -> None:
    layer.requires_grad_(False)
    layer.requires_grad_(True)


def _by_attribute(layer: Any) -> None:
    layer.weight.requires_grad = False


@variants
@pytest.mark.parametrize("switch", [_off_and_on, _by_attribute, lambda layer: layer.weight.requires_grad_()])
def test_a_forward_that_sets_requires_grad_is_refused(switch: Any, backend: Any, donate: bool):
    with pytest.raises(RuntimeError, match=r"sets requires_grad of 'l\.weight'.*functional_call"):
        trained(built(lambda: Switching(switch)), backend, donate)


class FrozenForOneUse(Net):
    """The remedy, or torch's way."""

    def __init__(self, remedy: bool):
        super().__init__()
        self.remedy = remedy

    def forward(self, x: Tensor) -> Tensor:
        if self.remedy:
            detached = {name: p.detach() for name, p in self.l.named_parameters()}
            hidden = torch.func.functional_call(self.l, detached, x)
        else:
            self.l.requires_grad_(False)
            hidden = self.l(x)
            self.l.requires_grad_(True)
        return self.o(torch.tanh(self.l(x + hidden.sum())))


@variants
def test_the_remedy__detached_parameters_freeze_a_layer_for_one_use(backend: Any, donate: bool):
    loop = cases.imperative(built(lambda: FrozenForOneUse(False)))
    state = trained(built(lambda: FrozenForOneUse(True)), backend, donate)
    for name, value in loop.items():
        torch.testing.assert_close(state.params[name], value, rtol=0, atol=1e-6)


class CopiesALayer(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = copy.deepcopy(self.l)(x).mean()
        return super().forward(x) + shift


@pytest.mark.parametrize("donate", [False, True])
def test_a_forward_that_copies_a_layer_trains_as_in_torch(donate: bool):
    assert_trains_as_torch(CopiesALayer, "autograd", donate)


# What is named


class Lazily(Net):
    """Gives a function that calls the module later; and the remedy."""

    def forward(self, x: Tensor) -> Any:
        return lambda y: self.l(x) * y

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x)(y)


def test_an_output_that_calls_the_module_later_is_named_and_the_remedy_gives_it():
    module, x = built(Lazily), drawn(5, 3)
    apply, params, _ = fa.from_module(module)
    with pytest.raises(RuntimeError, match=r"use of 'l\.weight'.*the output calls the module later.*apply\.method"):
        apply(params, x)(2.0)
    assert torch.equal(apply.method("product")(params, x, torch.tensor(2.0)), module(x)(2.0))


def test_a_first_call_on_meta_tensors_is_no_rehearsal():
    apply, params, buffers = fa.from_module(built(lambda: Counting(_by_data)))
    meta = [{name: tensor.to("meta") for name, tensor in given.items()} for given in (params, buffers)]
    apply.with_buffers(*meta, drawn(5, 3).to("meta"))
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \['n'\]"):
        apply(params, drawn(5, 3))


def _average(momentum: float | None) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=momentum))


def _averaged(momentum: float | None, **options: Any) -> Any:
    apply, params, buffers = fa.from_module(built(lambda: _average(momentum)))
    call = torch.compile(lambda p, b, x: apply.with_buffers(p, b, x), backend="eager", **options)
    return call(params, buffers, drawn(5, 3))[1]


@pytest.mark.parametrize(("momentum", "options"), [(0.1, {"fullgraph": True}), (None, {"fullgraph": False})])
def test_a_plain_average_is_refused_in_a_graph_and_the_remedies_give_it(
    fresh_dynamo: None, momentum: Any, options: Any
):
    with pytest.raises(RuntimeError, match=r"momentum=None of the BatchNorm1d at '1'.*Set a momentum.*fullgraph"):
        _averaged(None, fullgraph=True)
    torch._dynamo.reset()
    expected = built(lambda: _average(momentum))
    expected(drawn(5, 3))
    assert torch.equal(
        _averaged(momentum, **options)["1.running_mean"], dict(expected.named_buffers())["1.running_mean"]
    )


@pytest.mark.parametrize("name", ["parameters", "named_parameters", "state_dict", "eval", "half", "zero_grad", "apply"])
def test_a_method_that_every_module_has_is_refused(name: str):
    apply, params, _ = fa.from_module(built(Net))
    with pytest.raises(ValueError, match=f"apply.method: found '{name}', which every module has.*params and buffers"):
        apply.method(name)
    x = drawn(5, 3)
    assert torch.equal(apply.method("forward")(params, x), apply.method("__call__")(params, x))


class LeavesTheGraph(Net):
    """Reads a number on the host, which ends a graph."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.l(x))
        return self.o(hidden if hidden.sum().item() > 0 else -hidden)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # the compiler looks
def test_a_forward_that_leaves_its_graph_trains_as_in_torch(fresh_dynamo: None):
    apply, params, _ = fa.from_module(built(LeavesTheGraph))
    compile = {"backend": "aot_eager", "fullgraph": False}
    optimizer, x = fa.sgd(0.1), drawn(5, 3)
    runs = []
    for options in ({"compile": compile, "donate": True}, {"backend": "autograd"}):
        step = fa.make_step(lambda p, x: apply(p, x).square().mean(), optimizer, **cast(Any, options))
        state = fa.init_state({name: p.clone() for name, p in params.items()}, optimizer, fa.NoScale())
        for _ in range(2):
            state, _ = step(state, [x, 2 * x])
        runs.append(state.params)
    for name, p in runs[1].items():
        torch.testing.assert_close(runs[0][name], p)
