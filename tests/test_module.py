"""from_module: the module's own outputs, gradients and buffers, and the module itself never changed."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import functional_amp as fa
from tests.models import MLP, ConvNet, Transformer, conv_net, criterion, overflowing

BACKENDS = ["func", "autograd"]
# One graph differentiated by two engines: sums of several contributions may be taken in another order.
CLOSE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-7}


class SharedAndTied(nn.Module):
    """One layer at two names, and its weight in a third layer as well."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.tied(torch.tanh(self.again(torch.tanh(self.first(x)))))


class Counting(nn.Module):
    """Assigns one buffer anew, writes into another and has one that is in no state_dict."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("hidden", torch.full((4,), 2.0), persistent=False)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        self.get_buffer("written").add_(x.mean(0))
        return self.linear(x) * self.hidden


class Averaging(nn.Module):
    """Keeps a running mean that depends on the parameters."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * hidden.mean(0)
        return hidden - self.mean


class Listed(nn.Module):
    """Parameters in containers, and an attribute that is a plain tensor."""

    def __init__(self):
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.randn(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": nn.Parameter(torch.randn(4))})
        self.constant = torch.tensor(3.0)

    def forward(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return (x * self.several[0] + self.several[1] * self.named["a"]) * self.constant + self.named["b"] + shift


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x.unsqueeze(1))[0].squeeze(1)


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 4))


def spectral_normed() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())


def half_frozen() -> nn.Module:
    module: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    module[0].requires_grad_(False)
    return module


def rows(seed: int = 0) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def images(seed: int = 0) -> Tensor:
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(seed))


def built(make: Callable[[], nn.Module]) -> Any:
    with fa.seeded(0):
        return make()


def snapshot(module: nn.Module) -> dict[str, Any]:
    """All that must not change: which objects there are, what is in them and in which mode the layers are."""
    tensors = {
        f"{prefix}.{name}": tensor
        for prefix, layer in module.named_modules(remove_duplicate=False)
        for name, tensor in (*layer._parameters.items(), *layer._buffers.items())
    }
    return {
        "identities": {name: id(tensor) for name, tensor in tensors.items()},
        "types": {name: type(tensor) for name, tensor in tensors.items()},
        "values": {
            name: None if t is None else (t.detach().clone(), t._version, t.requires_grad, t.grad)
            for name, t in tensors.items()
        },
        "modes": {name: layer.training for name, layer in module.named_modules()},
        "attributes": {name: sorted(vars(layer)) for name, layer in module.named_modules()},
    }


def assert_unchanged(module: nn.Module, before: dict[str, Any]) -> None:
    after = snapshot(module)
    values, old_values = after.pop("values"), before["values"]
    assert after == {key: value for key, value in before.items() if key != "values"}
    for name, value in values.items():
        if value is not None:
            assert torch.equal(value[0], old_values[name][0]), name
            assert value[1:] == old_values[name][1:], name


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (lambda: MLP(), lambda: F.pad(rows(), (0, 2))),
    "mlp with dropout": (lambda: MLP(0.5), lambda: F.pad(rows(), (0, 2))),
    "conv net in eval mode": (lambda: ConvNet().eval(), images),
    "transformer": (lambda: Transformer(), tokens),
    "transformer with dropout": (lambda: Transformer(0.5), tokens),
    "transformer in eval mode": (lambda: Transformer(0.5).eval(), tokens),
    "shared and tied": (SharedAndTied, rows),
    "listed": (Listed, rows),
    "recurrent": (Recurrent, rows),
    "weight norm": (weight_normed, rows),
    "spectral norm in eval mode": (lambda: spectral_normed().eval(), rows),
    "half frozen": (half_frozen, rows),
    "torch's encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), lambda: rows().unsqueeze(0)),
}


@pytest.mark.parametrize("name", MODULES)
def test_apply_gives_the_output_of_the_module(name: str):
    make, inputs = MODULES[name]
    module, x = built(make), inputs()
    before = snapshot(module)
    apply, params, buffers = fa.from_module(module)
    with fa.seeded(1):
        found = apply.bind(buffers)(params, x)
    assert_unchanged(module, before)
    with fa.seeded(1):
        expected = module(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODULES)
def test_the_gradients_are_those_of_imperative_autograd(name: str, backend: Any):
    make, inputs = MODULES[name]
    module, x = built(make), inputs()
    before = snapshot(module)
    apply, params, buffers = fa.from_module(module)
    apply = apply.bind(buffers)
    weights = torch.randn(module(x).shape, generator=torch.Generator().manual_seed(2))
    with fa.seeded(1):
        grads = fa.scale_backward(
            lambda p, x: (apply(p, x) * weights).sum(), fa.NoScale(), params, x, backend=backend
        ).grads.tree
    assert_unchanged(module, before)

    with fa.seeded(1):
        (module(x) * weights).sum().backward()
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert set(grads) == set(params) == set(trainable)
    for name, parameter in trainable.items():
        assert torch.equal(params[name], parameter)
        torch.testing.assert_close(grads[name], parameter.grad, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_tied_weights_are_one_leaf_with_the_sum_of_their_gradients():
    module = built(lambda: Transformer(vocabulary=7, width=4))
    apply, params, buffers = fa.from_module(module)
    assert "head.weight" not in params and params["embedding.weight"].shape == (7, 4) and not buffers
    x = torch.tensor([[1, 2, 2]])
    grad = torch.func.grad(lambda p: apply(p, x).square().sum())(params)["embedding.weight"]

    untied = copy.deepcopy(module)
    untied.head.weight = nn.Parameter(module.head.weight.detach().clone())
    untied(x).square().sum().backward()
    expected = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(grad, expected, **CLOSE)


def test_a_shared_layer_with_a_tied_weight_has_each_tensor_once():
    module = built(SharedAndTied)
    apply, params, buffers = fa.from_module(module)
    assert sorted(params) == ["first.bias", "first.weight", "tied.bias"] and not buffers
    x = rows()
    for _ in range(2):  # a second call would show what the first one left behind
        grads = torch.func.grad(lambda p: apply(p, x).sum())(params)
        module.zero_grad()
        module(x).sum().backward()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, **CLOSE)
    doubled = {name: 2 * value for name, value in params.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    assert torch.equal(apply(doubled, x), module(x))
    assert module.again is module.first and module.tied.weight is module.first.weight


def test_a_tied_buffer_is_one_leaf():
    module: Any = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    module[1].running_mean = module[0].running_mean
    apply, params, buffers = fa.from_module(module)
    assert "1.running_mean" not in buffers
    _, after = apply.with_buffers(params, buffers, rows())
    module(rows())
    assert torch.equal(after["0.running_mean"], module[0].running_mean)


# Frozen parameters


@pytest.mark.parametrize("backend", BACKENDS)
def test_frozen_parameters_are_buffers_outside_the_norm_and_the_decay(backend: Any):
    module = built(half_frozen)
    apply, params, buffers = fa.from_module(module)
    assert set(params) == {"2.weight", "2.bias"} and set(buffers) == {"0.weight", "0.bias"}
    x, optimizer = rows(), fa.adamw(lr=0.1, weight_decay=0.5)
    step = fa.make_step(
        lambda p, x: apply(p, x).square().mean(), optimizer, max_norm=0.1, clip_eps=1e-6, backend=backend
    )
    state, metrics = step(fa.init_state(params, optimizer, fa.NoScale()), [x])

    trainable = [p for p in module.parameters() if p.requires_grad]
    torch_optimizer = torch.optim.AdamW(trainable, lr=0.1, weight_decay=0.5)
    module(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(trainable, 0.1)
    torch_optimizer.step()
    torch.testing.assert_close(metrics.grad_norm, norm)
    fa_module = built(half_frozen)
    fa.to_module(fa_module, state.params)
    for ours, theirs in zip(fa_module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(fa_module[0].weight, module[0].weight)


def test_frozen_parameters_ride_along_in_the_buffers_of_the_state():
    module = built(lambda: nn.Sequential(half_frozen(), nn.BatchNorm1d(4)))
    apply, params, buffers = fa.from_module(module)

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(out.square().mean(), buffers=buffers)

    optimizer = fa.adamw(0.1)
    state = fa.init_state(params, optimizer, buffers=buffers)
    after, _ = fa.make_step(loss_fn, optimizer)(state, [rows()])
    assert torch.equal(after.buffers["0.0.weight"], module[0][0].weight)
    assert not torch.equal(after.buffers["1.running_mean"], state.buffers["1.running_mean"])
    moved = {**buffers, "0.0.weight": 2 * buffers["0.0.weight"]}
    assert not torch.equal(apply.with_buffers(params, moved, rows())[0], apply.with_buffers(params, buffers, rows())[0])


def test_a_module_without_trainable_parameters_has_no_params():
    apply, params, buffers = fa.from_module(built(half_frozen).requires_grad_(False))
    assert params == {} and len(buffers) == 4
    assert apply({}, rows()).shape == (5, 4)


# Buffers


@pytest.mark.parametrize("make", [ConvNet, lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=None))])
def test_with_buffers_returns_what_the_module_would_hold(make: Callable[[], nn.Module]):
    module = built(make)
    apply, params, buffers = fa.from_module(module)
    before, values = snapshot(module), {name: b.clone() for name, b in buffers.items()}
    expected = copy.deepcopy(module)
    for seed in range(3):
        out, after = apply.with_buffers(params, buffers, images(seed))
        for name, given in buffers.items():
            assert torch.equal(given, values[name]) and given._version == 0
            assert after[name].data_ptr() != given.data_ptr()
        assert torch.equal(out, expected(images(seed)))
        assert after.keys() == buffers.keys() == dict(expected.named_buffers()).keys()
        for name, buffer in expected.named_buffers():
            assert torch.equal(after[name], buffer) and after[name].dtype == buffer.dtype
        buffers, values = after, {name: b.clone() for name, b in after.items()}
        for buffer in buffers.values():
            assert buffer.requires_grad is False
        buffers = {name: b.clone() for name, b in buffers.items()}
    assert_unchanged(module, before)


@pytest.mark.parametrize("backend", BACKENDS)
def test_batch_norm_statistics_are_those_of_the_module_and_the_given_ones_stay(backend: Any):
    problem = conv_net()
    values = {name: b.clone() for name, b in problem.buffers.items()}
    batch = problem.batch(0)
    _, _, (_, after) = fa.scale_backward(
        problem.loss_fn, fa.DynamicScale(), problem.params, batch, problem.buffers, backend=backend
    )
    problem.module(batch["x"])
    for name, buffer in problem.module.named_buffers():
        assert torch.equal(after[name], buffer) and not after[name].requires_grad
        assert torch.equal(problem.buffers[name], values[name])


def test_spectral_norm_writes_its_vectors_to_the_new_buffers():
    module = built(spectral_normed)
    apply, params, buffers = fa.from_module(module)
    out, after = apply.with_buffers(params, buffers, rows())
    with pytest.raises(RuntimeError, match="with_buffers"):
        apply(params, rows())
    assert torch.equal(out, module(rows()))
    for name, buffer in module.named_buffers():
        assert torch.equal(after[name], buffer)


def test_the_form_without_buffers_refuses_a_module_that_writes_them():
    problem = conv_net()
    with pytest.raises(RuntimeError, match=r"first\.1\.running_mean.*apply\.with_buffers.*apply\.eval\(\)"):
        problem.apply(problem.params, problem.batch(0)["x"])


def _without_a_count() -> nn.Module:
    module = nn.BatchNorm1d(4)
    module.num_batches_tracked = None
    return module


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (_without_a_count, rows()),
        (lambda: nn.InstanceNorm1d(4, track_running_stats=True), rows().unsqueeze(-1).expand(-1, -1, 3)),
    ],
)
def test_the_form_without_buffers_refuses_every_norm_that_writes_statistics(make: Callable[[], nn.Module], x: Tensor):
    apply, params, buffers = fa.from_module(make())
    _, after = apply.with_buffers(params, buffers, x)
    assert any(not torch.equal(after[name], buffers[name]) for name in buffers)
    with pytest.raises(RuntimeError, match=r"with_buffers"):
        apply(params, x)
    apply.eval().bind(buffers)(params, x)


@pytest.mark.parametrize(("make", "x"), [(ConvNet, images()), (_without_a_count, rows()), (Averaging, rows())])
def test_the_form_without_buffers_refuses_under_compile_as_well(
    fresh_dynamo: None, make: Callable[[], nn.Module], x: Tensor
):
    apply, params, _ = fa.from_module(built(make))
    with pytest.raises(RuntimeError, match="with_buffers"):
        torch.compile(apply, fullgraph=True, backend="eager")(params, x)


def test_eval_mode_reads_the_statistics_and_writes_none(fresh_dynamo: None):
    problem = conv_net()
    x = problem.batch(0)["x"]
    apply = problem.apply.eval().bind(problem.buffers)
    out = apply(problem.params, x)
    assert torch.equal(out, copy.deepcopy(problem.module).eval()(x))
    assert torch.equal(torch.compile(apply, fullgraph=True, backend="eager")(problem.params, x), out)
    _, after = apply.with_buffers(problem.params, problem.buffers, x)
    for name, buffer in problem.buffers.items():
        assert torch.equal(after[name], buffer)


def test_buffers_assigned_anew_written_to_and_non_persistent_ones():
    module = built(Counting)
    before = snapshot(module)
    apply, params, buffers = fa.from_module(module)
    assert set(buffers) == {"calls", "written", "hidden"} and set(params) == {"linear.weight"}
    with pytest.raises(RuntimeError, match=r"\['calls', 'written'\]"):
        apply(params, rows())
    _, once = apply.with_buffers(params, buffers, rows())
    out, twice = apply.with_buffers(params, once, rows(1))
    assert_unchanged(module, before)
    assert (buffers["calls"].item(), once["calls"].item(), twice["calls"].item()) == (0, 1, 2)
    module(rows())
    assert torch.equal(out, module(rows(1)))
    assert torch.equal(twice["written"], module.get_buffer("written"))
    assert torch.equal(once["written"], rows().mean(0)) and buffers["written"].count_nonzero() == 0
    doubled = {**buffers, "hidden": 2 * buffers["hidden"]}
    assert torch.equal(
        apply.with_buffers(params, doubled, rows())[0], 2 * apply.with_buffers(params, buffers, rows())[0]
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_that_depend_on_the_parameters_keep_no_graph_alive(backend: Any):
    module = built(Averaging)
    apply, params, buffers = fa.from_module(module)

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(out.square().mean(), buffers={name: b.detach() for name, b in buffers.items()})

    optimizer = fa.sgd(0.1)
    step = fa.make_step(loss_fn, optimizer, backend=backend)
    state, theirs = fa.init_state(params, optimizer, fa.NoScale(), buffers), torch.optim.SGD(module.parameters(), 0.1)
    for seed in range(3):
        state, _ = step(state, [rows(seed)])
        module.mean = module.mean.detach()
        theirs.zero_grad()
        module(rows(seed)).square().mean().backward()
        theirs.step()
        assert state.buffers["mean"].grad_fn is None and not state.buffers["mean"].requires_grad
        torch.testing.assert_close(state.buffers["mean"], module.mean.detach())
    torch.testing.assert_close(state.params["linear.weight"], module.linear.weight.detach())


# Modes


def test_train_and_eval_give_the_function_in_that_mode_and_change_no_other():
    module = built(lambda: MLP(0.5))
    apply, params, _ = fa.from_module(module)
    x = F.pad(rows(), (0, 2))
    evaluated, trained = apply.eval(), apply.eval().train()
    with fa.seeded(0):
        dropped = apply(params, x)
    with fa.seeded(0):
        assert torch.equal(trained(params, x), dropped)
    assert module.training
    assert torch.equal(evaluated(params, x), copy.deepcopy(module).eval()(x))
    assert not torch.equal(evaluated(params, x), dropped)


def test_the_mode_of_each_layer_is_taken_from_the_module():
    module = built(ConvNet)
    module.second.eval()
    apply, params, buffers = fa.from_module(module)
    _, after = apply.with_buffers(params, buffers, images())
    assert torch.equal(after["second.1.running_mean"], buffers["second.1.running_mean"])
    assert not torch.equal(after["first.1.running_mean"], buffers["first.1.running_mean"])


# Isolation


def test_params_are_copies_that_the_module_does_not_see():
    module = built(lambda: MLP())
    before = snapshot(module)
    apply, params, _ = fa.from_module(module)
    assert all(type(p) is Tensor and not p.requires_grad and p.is_leaf for p in params.values())
    for parameter in params.values():
        parameter.zero_()
    assert_unchanged(module, before)
    assert apply(params, F.pad(rows(), (0, 2))).count_nonzero() == 0


def test_a_module_changed_afterwards_does_not_change_the_function():
    module, x = built(lambda: MLP()), F.pad(rows(), (0, 2))
    apply, params, _ = fa.from_module(module)
    expected = module(x)
    with torch.no_grad():
        module.hidden.weight.zero_()
    module.head = nn.Linear(8, 1)
    assert torch.equal(apply(params, x), expected)


def test_a_forward_that_raises_leaves_function_and_module_whole():
    module = built(SharedAndTied)
    before = snapshot(module)
    apply, params, _ = fa.from_module(module)
    with pytest.raises(RuntimeError):
        apply(params, torch.ones(5, 3))
    assert_unchanged(module, before)
    assert torch.equal(apply(params, rows()), module(rows()))


def test_keyword_arguments_reach_the_forward():
    module = built(Listed)
    apply, params, _ = fa.from_module(module)
    assert torch.equal(apply(params, rows(), shift=2.0), module(rows(), shift=2.0))
    assert torch.equal(apply(params, x=rows()), module(x=rows()))


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda a: pickle.loads(pickle.dumps(a))])
def test_apply_can_be_copied_and_pickled(copier: Callable[[Any], Any]):
    problem = conv_net()
    copied = copier(problem.apply)
    found = copied.with_buffers(problem.params, problem.buffers, images())
    expected = problem.apply.with_buffers(problem.params, problem.buffers, images())
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[1][name], expected[1][name]) for name in expected[1])
    found, expected = (
        apply.eval().bind(problem.buffers)(problem.params, images()) for apply in (copied, problem.apply)
    )
    assert torch.equal(found, expected)


def test_params_and_buffers_can_be_saved_like_a_state_dict():
    problem = conv_net()
    file = io.BytesIO()
    torch.save({"params": problem.params, "buffers": problem.buffers}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    out, _ = problem.apply.with_buffers(loaded["params"], loaded["buffers"], images())
    assert torch.equal(out, problem.apply.with_buffers(problem.params, problem.buffers, images())[0])


# And back


@pytest.mark.parametrize(
    "make", [MLP, ConvNet, Transformer, SharedAndTied, Counting, Recurrent, weight_normed, spectral_normed, half_frozen]
)
def test_to_module_is_the_inverse_of_from_module_bit_for_bit(make: Callable[[], nn.Module]):
    source = built(make)
    _, params, buffers = fa.from_module(source)
    with fa.seeded(5):
        target = make()
    before = snapshot(target)
    fa.to_module(target, params, buffers)
    for name, value in source.state_dict().items():
        assert torch.equal(target.state_dict()[name], value), name
    assert snapshot(target)["identities"] == before["identities"]
    again = fa.from_module(target)
    for ours, theirs in ((again.params, params), (again.buffers, buffers)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_to_module_without_buffers_leaves_those_of_the_module():
    target = nn.Linear(2, 1)
    target.register_buffer("mask", torch.ones(2))
    params = fa.from_module(target).params
    fa.to_module(target, {name: 2 * p for name, p in params.items()})
    assert torch.equal(target.get_buffer("mask"), torch.ones(2))
    assert torch.equal(target.weight, 2 * params["weight"])


def _without(tree: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: value for key, value in tree.items() if key != name}


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda p, b: (_without(p, "head.bias"), b), ValueError, r"params: .*missing \['head.bias'\]"),
        (lambda p, b: ({**p, "extra": torch.ones(1)}, b), ValueError, r"params: .*extra \['extra'\]"),
        (
            lambda p, b: (p, _without(b, "first.1.running_var")),
            ValueError,
            r"buffers: .*missing \['first.1.running_var'\]",
        ),
        (lambda p, b: (p, {}), ValueError, r"buffers: .*missing"),
        (lambda p, b: (b, p), ValueError, r"params: "),
        (lambda p, b: ({**p, "head.bias": torch.ones(4)}, b), ValueError, r"\(4,\) at 'head.bias', expected \(3,\)"),
        (
            lambda p, b: (p, {**b, "second.1.running_var": torch.ones(1)}),
            ValueError,
            r"\(1,\) at 'second.1.running_var'",
        ),
        (lambda p, b: ([*p.values()], b), TypeError, r"params: found list, expected a dict"),
        (lambda p, b: ({**p, "head.bias": 0.0}, b), TypeError, r"head.bias"),
        (lambda p, b: ({**p, "head.bias": None}, b), TypeError, r"head.bias"),
    ],
)
def test_to_module_refuses_what_does_not_fit_and_has_written_nothing(change: Any, error: type[Exception], match: str):
    problem, target = conv_net(), built(lambda: ConvNet())
    before = snapshot(target)
    params = {name: p + 1 for name, p in problem.params.items()}
    with pytest.raises(error, match=match):
        fa.to_module(target, *change(params, problem.buffers))
    assert_unchanged(target, before)


# Errors


@pytest.mark.parametrize("wrong", [{"weight": torch.ones(1)}, None, nn.Linear, F.relu, torch.ones(2)])
def test_what_is_no_module_is_refused(wrong: Any):
    with pytest.raises(TypeError, match=r"module: found .*, expected a torch\.nn\.Module"):
        fa.from_module(wrong)
    with pytest.raises(TypeError, match=r"module: found .*, expected a torch\.nn\.Module"):
        fa.to_module(wrong, {})


@pytest.mark.parametrize("make", [lambda: nn.LazyLinear(3), lambda: nn.Sequential(nn.LazyBatchNorm1d())])
def test_a_lazy_module_without_shapes_is_refused_until_it_has_them(make: Callable[[], nn.Module]):
    module = make()
    with pytest.raises(TypeError, match=r"has no shape yet\. Run the module on one batch first"):
        fa.from_module(module)
    module(rows())
    assert "weight" in next(iter(fa.from_module(module).params))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda a, p, b: a(_without(p, "head.bias"), images()), ValueError, r"params: .*missing \['head.bias'\]"),
        (lambda a, p, b: a({**p, "x": torch.ones(1)}, images()), ValueError, r"params: .*extra \['x'\]"),
        (lambda a, p, b: a({**p, **b}, images()), ValueError, r"params: .*extra \['first.1.num_batches_tracked'"),
        (lambda a, p, b: a((p, b), images()), TypeError, r"params: found tuple, expected a dict"),
        (lambda a, p, b: a(images(), p), TypeError, r"params: found Tensor"),
        (
            lambda a, p, b: a.with_buffers(p, {}, images()),
            ValueError,
            r"buffers: .*missing \['first.1.num_batches_tracked'",
        ),
        (lambda a, p, b: a.with_buffers(p, None, images()), TypeError, r"buffers: found NoneType, expected a dict"),
        (lambda a, p, b: a.with_buffers(p, images()), TypeError, r"buffers: found Tensor"),
        (lambda a, p, b: a.with_buffers(p, {**b, **p}, images()), ValueError, r"buffers: .*extra \['first.0.bias'"),
        (lambda a, p, b: a({**p, "head.bias": None}, images()), TypeError, r"head.bias"),
    ],
)
def test_wrong_names_and_values_are_refused(call: Any, error: type[Exception], match: str):
    problem = conv_net()
    with pytest.raises(error, match=match):
        call(problem.apply, problem.params, problem.buffers)


# In the step


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_norm_net_trains_as_in_the_imperative_loop_and_a_skip_restores_its_statistics(backend: Any):
    problem = conv_net()
    module, optimizer = problem.module, fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(problem.loss_fn, optimizer, max_norm=1.0, clip_eps=1e-6, backend=backend)
    state = fa.init_state(problem.params, optimizer, fa.DynamicScale(2.0**8, growth_interval=2), problem.buffers)
    imperative = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for number in range(5):
        window = [problem.batch(2 * number), problem.batch(2 * number + 1)]
        if number == 2:
            window[1] = overflowing(window[1])
        before, statistics = state, {name: b.clone() for name, b in module.named_buffers()}
        state, metrics = step(state, window)
        for batch in window:
            scaler.scale(criterion(module(batch["x"]), batch) / len(window)).backward()
        scaler.unscale_(imperative)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        scaler.step(imperative)
        scaler.update()
        imperative.zero_grad()
        if number == 2:
            assert not metrics.finite
            for name, buffer in state.buffers.items():
                assert torch.equal(buffer, before.buffers[name])
            for name, buffer in module.named_buffers():  # torch's loop does not take a skip back from the statistics
                buffer.copy_(statistics[name])
        assert state.scaler.scale.item() == scaler.get_scale()
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(state.params[name], parameter.detach(), rtol=1e-5, atol=1e-6)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(state.buffers[name], buffer, rtol=1e-5, atol=1e-6)
    assert state.buffers["first.1.num_batches_tracked"] == 8


def test_the_trained_values_go_back_into_the_module():
    problem = conv_net()
    optimizer = fa.adam(0.01)
    step, state = (
        fa.make_step(problem.loss_fn, optimizer),
        fa.init_state(problem.params, optimizer, None, problem.buffers),
    )
    for seed in range(3):
        state, _ = step(state, [problem.batch(seed)])
    fa.to_module(problem.module, state.params, state.buffers)
    x = problem.batch(9)["x"]
    assert torch.equal(problem.module(x), problem.apply.with_buffers(state.params, state.buffers, x)[0])


def test_a_skip_restores_every_kind_of_buffer():
    apply, params, buffers = fa.from_module(built(Counting))

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> fa.Loss:
        out, buffers = apply.with_buffers(params, buffers, x)
        return fa.Loss(out.square().mean(), buffers=buffers)

    optimizer = fa.sgd(0.1)
    step, state = fa.make_step(loss_fn, optimizer), fa.init_state(params, optimizer, buffers=buffers)
    state, _ = step(state, [rows(0), rows(1)])
    skipped, metrics = step(state, [rows(2), torch.full((5, 4), torch.nan)])
    assert not metrics.finite and skipped.skipped == 1
    assert state.buffers["calls"] == skipped.buffers["calls"] == 2
    assert torch.equal(skipped.buffers["written"], state.buffers["written"])
    torch.testing.assert_close(state.buffers["written"], rows(0).mean(0) + rows(1).mean(0))
