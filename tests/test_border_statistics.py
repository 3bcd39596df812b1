"""Running statistics that nobody hands on: by a loss, or on the way back into a module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_amp as fa


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def drawn() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(5, 3, generator=generator) for _ in range(2)]


def imperative(window: list[Tensor]) -> nn.Module:
    """torch's loop over one window."""
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x in window:
        (module(x).square().mean() / len(window)).backward()
    optimizer.step()
    return module


LEFT_OUT = {
    "a scalar": lambda loss, new, given: loss,
    "a Loss without buffers": lambda loss, new, given: fa.Loss(loss, aux=1.0),
}
HANDED_OUT = {
    "in the Loss": lambda loss, new, given: fa.Loss(loss, buffers=new),
    "assigned": lambda loss, new, given: given.update(new) or fa.Loss(loss),
}


def stepped(handed: Any, **options: Any) -> tuple[nn.Module, fa.TrainState]:
    module = model()
    apply, params, buffers = fa.from_module(module)

    def loss_fn(params: Any, x: Tensor, buffers: Any) -> Any:
        out, new = apply.with_buffers(params, buffers, x)
        return handed(out.square().mean(), new, buffers)

    optimizer = fa.sgd(0.1)
    step = fa.make_step(loss_fn, optimizer, **options)
    state, _ = step(fa.init_state(params, optimizer, fa.NoScale(), buffers), drawn())
    return module, state


OPTIONS = [
    {"backend": "func"},
    {"backend": "autograd"},
    {"donate": True},
    pytest.param({"compile": {"backend": "eager"}}, marks=pytest.mark.slow),
    pytest.param({"compile": {"backend": "eager"}, "backend": "autograd", "donate": True}, marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def forgets_graphs(fresh_dynamo: None) -> None:
    """Each test makes its graphs anew."""


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_statistics_that_a_loss_moves_and_does_not_hand_out_are_refused(name: str, options: Any):
    with pytest.raises(RuntimeError, match=r"moved \['1\.num_batches_tracked'.*buffers=new"):
        stepped(LEFT_OUT[name], **options)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", HANDED_OUT)
def test_the_remedy_moves_the_statistics_as_torch_does(name: str, options: Any):
    _, state = stepped(HANDED_OUT[name], **options)
    for key, buffer in imperative(drawn()).named_buffers():
        torch.testing.assert_close(state.buffers[key], buffer)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_other_remedy_leaves_the_statistics_as_they_were(options: Any):
    _, state = stepped(lambda loss, new, given: fa.Loss(loss, buffers=given), **options)
    for key, buffer in model().named_buffers():
        assert torch.equal(state.buffers[key], buffer)


def test_a_loss_whose_forward_moves_no_buffer_need_not_hand_them_out():
    apply, params, buffers = fa.from_module(model().eval())
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x, b: apply.with_buffers(p, b, x)[0].square().mean(), optimizer)
    state, _ = step(fa.init_state(params, optimizer, fa.NoScale(), buffers), drawn())
    assert all(torch.equal(state.buffers[name], buffers[name]) for name in buffers)


def test_instance_norm_has_running_statistics_too():
    apply, params, buffers = fa.from_module(nn.InstanceNorm1d(4, affine=True, track_running_stats=True))
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, x, b: apply.with_buffers(p, b, x)[0].square().mean(), optimizer)
    with pytest.raises(RuntimeError, match=r"moved .*running_mean"):
        step(fa.init_state(params, optimizer, fa.NoScale(), buffers), [torch.randn(5, 4, 3)])


def test_a_loss_inside_a_loss_notes_its_own_moves():
    apply, params, buffers = fa.from_module(model())

    def inner(p: Any, x: Tensor, b: Any) -> fa.Loss:
        out, new = apply.with_buffers(p, b, x)
        return fa.Loss(out.square().mean(), buffers=new)

    optimizer = fa.sgd(0.1)
    inside = fa.make_step(inner, optimizer, backend="func")

    def loss_fn(p: Any, x: Tensor, b: Any) -> Tensor:
        state, _ = inside(fa.init_state(p, optimizer, fa.NoScale(), buffers), [x])
        return state.params["0.weight"].square().sum()

    step = fa.make_step(loss_fn, optimizer, backend="func")
    state, metrics = step(fa.init_state(params, optimizer, fa.NoScale(), {"own": torch.ones(1)}), drawn())
    assert metrics.applied and state.buffers["own"] == 1


def test_the_way_back_into_a_module_needs_its_statistics():
    module, state = stepped(HANDED_OUT["in the Loss"])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"running statistics of '1'.*state\.buffers"):
        fa.to_module(module, state.params)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())

    fa.to_module(module, state.params, fa.from_module(module).buffers)  # the second remedy
    assert torch.equal(module.get_buffer("1.running_mean"), before["1.running_mean"])
    fa.to_module(module, state.params, state.buffers)  # the first
    for name, tensor in imperative(drawn()).state_dict().items():
        torch.testing.assert_close(module.state_dict()[name], tensor)
