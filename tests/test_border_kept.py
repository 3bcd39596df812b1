"""What modules do that one call does not show: torch's loop is reproduced, or it is refused by name."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import functional_amp as fa
from tests.test_cases_modules import Locked, Net, assert_trains_as_torch, built, drawn, imperative, trained, variants

# Writes that leave the values of the first call as they were


class Bounded(Net):
    """Keeps a weight in a range that it is in already, by `.data`."""

    def __init__(self, write: Any, bound: float = 10.0):
        super().__init__()
        self.write, self.bound = write, bound

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.l, self.bound)
        return super().forward(x)


def _clamped_data(layer: Any, bound: float) -> None:
    layer.weight.data.clamp_(-bound, bound)


def _clamped_rows(layer: Any, bound: float) -> None:
    layer.weight[0].data.clamp_(-bound, bound)


def _given_new_data(layer: Any, bound: float) -> None:
    layer.weight.data = layer.weight.data.clamp(-bound, bound)


in_range = pytest.mark.parametrize("write", [_clamped_data, _clamped_rows, _given_new_data])


@variants
@in_range
def test_a_constraint_that_the_first_call_keeps_already_is_refused(write: Any, backend: Any, donate: bool):
    match = "backend='autograd'" if backend == "func" and write is _given_new_data else r"writes to .*\['l\.weight'\]"
    with pytest.raises(RuntimeError, match=match):
        trained(built(lambda: Bounded(write)), backend, donate)


@pytest.mark.parametrize("write", [_clamped_data, _clamped_rows])
def test_a_constraint_on_a_frozen_weight_never_writes_to_what_is_given(write: Any):
    module = built(lambda: Bounded(write))
    module.l.requires_grad_(False)
    apply, params, buffers = fa.from_module(module)
    apply.with_buffers(params, buffers, drawn(2, 3))
    wide = {**buffers, "l.weight": torch.full_like(buffers["l.weight"], 20.0)}
    _, after = apply.with_buffers(params, wide, drawn(2, 3))
    assert bool((wide["l.weight"] == 20).all())
    module.load_state_dict(apply.state_dict(params, wide))
    module(drawn(2, 3))
    assert torch.equal(after["l.weight"], module.l.weight)


class Following(Net):
    """A target that is a copy of a layer, in every call."""

    def __init__(self):
        super().__init__()
        self.target = copy.deepcopy(self.l).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for mine, its in zip(self.target.parameters(), self.l.parameters(), strict=True):
            mine.data.copy_(its.data)
        return super().forward(x) + self.target(x).mean()


@variants
def test_a_frozen_target_that_begins_as_its_source_trains_as_in_torch(backend: Any, donate: bool):
    assert_trains_as_torch(Following, backend, donate)


def test_an_old_state_keeps_its_target():
    apply, params, buffers = fa.from_module(built(Following))
    apply.with_buffers(params, buffers, drawn(2, 3))
    before = {name: value.clone() for name, value in buffers.items()}
    _, after = apply.with_buffers({name: p + 1 for name, p in params.items()}, buffers, drawn(2, 3))
    assert all(torch.equal(buffers[name], value) for name, value in before.items())
    assert torch.equal(after["target.weight"], params["l.weight"] + 1)


class Floor(Net):
    """Raises a buffer through `.data` where the inputs ask for it."""

    low: Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.low.data.clamp_(min=x.detach().max())
        return super().forward(x) + self.low


def test_the_fixed_form_refuses_a_write_through_data_that_changed_nothing_yet():
    apply, params, _ = fa.from_module(built(Floor))
    with pytest.raises(RuntimeError, match=r"wrote to its buffers \['low'\]"):
        apply(params, -torch.ones(2, 3))


class AtHome(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.to(x.device, x.dtype)
        return super().forward(x)


def test_a_module_that_moves_itself_to_where_it_is_writes_nothing():
    assert_trains_as_torch(AtHome, "autograd", False)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_auto_leaves_to_the_engine_a_module_that_moves_itself():
    with pytest.warns(UserWarning, match=r"x\.data"):
        state = trained(built(AtHome), "auto")
    for name, value in trained(built(AtHome), "autograd").params.items():
        assert torch.equal(state.params[name], value)


# Gradients that a forward asks for


class Asking(Net):
    def __init__(self, ask: Any):
        super().__init__()
        self.ask = ask

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.ask(self.l.weight)


def _by_its_gradient(weight: Tensor) -> Any:
    return 1.0 if weight.grad is None else 1 + weight.grad.abs().mean()


def _hooked(weight: Tensor) -> Any:
    weight.register_hook(lambda grad: grad / 2)  # one more in each call
    return 1.0


def _hooked_after(weight: Tensor) -> Any:
    weight.register_post_accumulate_grad_hook(lambda leaf: None)
    return 1.0


def _emptied(weight: Tensor) -> Any:
    weight.grad = None
    return 1.0


@variants
@pytest.mark.parametrize("ask", [_by_its_gradient, _hooked, _hooked_after, _emptied])
def test_a_forward_that_asks_for_a_gradient_is_refused(ask: Any, backend: Any, donate: bool):
    with pytest.raises(RuntimeError, match=r"asks for the gradient of 'l\.weight'"):
        trained(built(lambda: Asking(ask)), backend, donate)


class HookedOutput(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.l(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: grad / 2)
        return self.o(torch.tanh(hidden))


@variants
def test_the_remedy__a_hook_on_the_output_of_a_layer_trains_as_in_torch(backend: Any, donate: bool):
    assert_trains_as_torch(HookedOutput, backend, donate)


# Other modes


class LowRank(nn.Module):
    """Adds a product to its weight in eval mode, and takes it off again in train mode, as LoRA's layers do."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(1, 3)), nn.Parameter(torch.randn(3, 1))
        self.merged = False

    def train(self, mode: bool = True) -> LowRank:
        super().train(mode)
        if self.merged is mode:
            self.weight.data += (-1 if mode else 1) * self.b @ self.a
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return out if self.merged else out + x @ self.a.T @ self.b.T


class Freezing(Net):
    """Freezes a layer when it is trained."""

    def train(self, mode: bool = True) -> Freezing:
        self.l.requires_grad_(False)
        return super().train(mode)


class Fusing(Net):
    def eval(self) -> Fusing:
        self.l = nn.Linear(3, 4)
        return super().eval()


@pytest.mark.parametrize(
    ("make", "places"), [(LowRank, r"\['weight'\]"), (Freezing, r"\['l\.bias', 'l\.weight'\]"), (Fusing, "l.weight")]
)
def test_a_mode_that_changes_tensors_is_refused(make: Any, places: str):
    apply, params, _ = fa.from_module(built(make))
    before = apply(params, drawn(2, 3))
    with pytest.raises(RuntimeError, match=places + ".*to_module"):
        apply.eval()
    assert torch.equal(apply(params, drawn(2, 3)), before)


def test_the_remedy__the_module_itself_is_evaluated_with_the_trained_numbers():
    module, expected = built(LowRank), built(LowRank)
    apply, params, buffers = fa.from_module(module)
    params = {name: p + 1 for name, p in params.items()}
    fa.to_module(module, params, buffers)
    with torch.no_grad():
        for name, p in expected.named_parameters():
            p.copy_({**params, **buffers}[name])
    assert torch.equal(module.eval()(drawn(2, 3)), expected.eval()(drawn(2, 3)))
    torch.testing.assert_close(module(drawn(2, 3)), apply(params, drawn(2, 3)))


def test_the_remedy__a_module_that_is_frozen_before_changes_its_mode():
    module = built(Freezing).train()
    apply, params, buffers = fa.from_module(module)
    assert set(params) == {"o.weight", "o.bias"}
    assert torch.equal(apply.eval().bind(buffers)(params, drawn(2, 3)), module.eval()(drawn(2, 3)))


class TwoModes(Net):
    """Its own `eval` sets a flag."""

    scale = 1.0

    def eval(self) -> TwoModes:
        self.scale = 2.0
        return super().eval()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def test_eval_calls_the_modules_own_eval_and_train_its_train():
    module = built(TwoModes)
    apply, params, _ = fa.from_module(module)
    evaluated, switched = apply.eval(), apply.train(False)
    assert torch.equal(switched(params, drawn(2, 3)), module.train(False)(drawn(2, 3)))
    assert torch.equal(evaluated(params, drawn(2, 3)), module.eval()(drawn(2, 3)))
    assert torch.equal(apply(params, drawn(2, 3)) * 2, evaluated(params, drawn(2, 3)))


class Handed:
    seen: Any = None


def _plus_seen(layer: Any, args: Any) -> Any:
    return (args[0] + layer.f.seen,)


class Handing(Net):
    def __init__(self):
        super().__init__()
        handed: Any = Handed()
        self.f = self.o.f = handed
        self.l.register_forward_hook(lambda layer, args, out: setattr(handed, "seen", out))
        self.o.register_forward_pre_hook(_plus_seen)


@pytest.mark.parametrize("made", [lambda apply: apply.eval(), copy.deepcopy, lambda apply: copy.deepcopy(apply).eval()])
@pytest.mark.parametrize("make", [Handing, Locked])
def test_what_all_copies_share_is_shared_with_those_of_other_modes_and_with_copies(make: Any, made: Any):
    module = built(make)
    apply, params, _ = fa.from_module(module)
    module(drawn(5, 3))
    assert torch.equal(made(apply)(params, drawn(2, 3)), module(drawn(2, 3)))


# What one mode, method or branch keeps, and another reads


class Keeping(Net):
    """Keeps an average of its inputs where it trains, or where there are several rows, and reads it elsewhere."""

    seen: Any

    def __init__(self, first: Any = None):
        super().__init__()
        if first is not None:
            self.seen = first

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 1:
            self.seen = x.detach().mean()
        return super().forward(x) + self.seen

    def last(self) -> Tensor:
        return super().forward(torch.ones(1, 3)) * self.seen


def _in_eval(apply: Any, params: Any) -> Any:
    return apply.eval()(params, drawn(3, 3))


def _by_method(apply: Any, params: Any) -> Any:
    return apply.method("last")(params)


def _in_a_branch(apply: Any, params: Any) -> Any:
    return apply(params, drawn(1, 3))


def _in_a_copy(apply: Any, params: Any) -> Any:
    return _in_a_branch(copy.deepcopy(apply), params)


def _asked_before(apply: Any, params: Any) -> Any:
    evaluated = apply.eval()
    apply(params, drawn(3, 3))
    return evaluated(params, drawn(3, 3))


@pytest.mark.parametrize("read", [_in_eval, _by_method, _in_a_branch, _in_a_copy, _asked_before])
@pytest.mark.parametrize("first", [None, 0.0, torch.zeros(())])
def test_what_an_earlier_call_has_kept_is_never_read_as_it_was_before(first: Any, read: Any):
    apply, params, _ = fa.from_module(built(lambda: Keeping(first)))
    apply(params, drawn(5, 3))
    with pytest.raises(RuntimeError, match=r"'seen'.*before it is written.*buffer"):
        read(apply, params)
    assert apply(params, drawn(5, 3)).shape == (5, 1)


@pytest.mark.parametrize("first", [None, torch.zeros(())])
def test_a_graph_does_not_read_it_either(first: Any, fresh_dynamo: None):
    apply, params, _ = fa.from_module(built(lambda: Keeping(first)))
    apply(params, drawn(5, 3))
    graphs = [torch.compile(a, backend="eager", fullgraph=True) for a in (apply, apply.eval())]
    torch.testing.assert_close(graphs[0](params, drawn(5, 3)), apply(params, drawn(5, 3)))
    with pytest.raises(Exception, match="Unread"):
        graphs[1](params, drawn(5, 3))


class KeepingInABuffer(Keeping):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))


@pytest.mark.parametrize("rows", [3, 1])
def test_the_remedy__a_buffer_is_read_as_the_last_call_left_it(rows: int):
    module = built(KeepingInABuffer)
    apply, params, buffers = fa.from_module(module)
    _, buffers = apply.with_buffers(params, buffers, drawn(5, 3))
    module(drawn(5, 3))
    if rows == 3:
        module.eval()
        apply = apply.eval()
    assert torch.equal(apply.with_buffers(params, buffers, drawn(rows, 3))[0], module(drawn(rows, 3)))
    assert torch.equal(apply.method("last").with_buffers(params, buffers)[0], module.last())


class Tally(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            self.n = self.n + 1.0
        return x + self.n


class SameName(Net):
    """Writes an attribute before it reads it, under the name of a counter of its layer."""

    def __init__(self):
        super().__init__()
        self.tally, self.n = Tally(), 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.n = float(len(x))
        return self.tally(super().forward(x) * self.n)


def test_an_attribute_that_is_written_first_excuses_none_of_the_same_name_elsewhere():
    apply, params, _ = fa.from_module(built(SameName))
    apply(params, drawn(2, 3))
    with pytest.raises(RuntimeError, match=r"keeps something at \['tally\.n'\]"):
        apply(params, drawn(5, 3))


# Tied places that part, buffers that go, hooks that come and go


class TwoPlaces(Net):
    """A buffer that stands at two places, and is counted at the second."""

    n: Tensor

    def __init__(self, count: Any):
        super().__init__()
        self.count = count
        self.register_buffer("n", torch.zeros(()))
        self.o.register_buffer("n", self.n)

    def forward(self, x: Tensor) -> Tensor:
        self.count(self.o)
        return super().forward(x) + self.n + 2 * self.o.n  # pyright: ignore[reportOperatorIssue]


def _anew(layer: Any) -> None:
    layer.n = layer.n + 1


def _in_place(layer: Any) -> None:
    layer.n.add_(1)


def _rotating(module: Any) -> None:
    module.kept.reverse()


def _dropping(module: Any) -> None:
    module.kept.pop()


def _kept(module: Any) -> None:
    pass


class Listed(Net):
    p: Tensor
    q: Tensor

    def __init__(self, change: Any, *, buffers: bool):
        super().__init__()
        self.change = change
        for name in ("p", "q"):
            self.register_buffer(name, torch.zeros(()))
        self.kept: list[Any] = [self.p, self.q] if buffers else [self.l.bias, self.o.bias]

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return super().forward(x) + self.kept[0].sum()


@variants
@pytest.mark.parametrize(
    "make",
    [
        lambda: TwoPlaces(_anew),
        lambda: Listed(_rotating, buffers=True),
        lambda: Listed(_rotating, buffers=False),
        lambda: Listed(_dropping, buffers=True),
        lambda: Listed(_dropping, buffers=False),
    ],
)
def test_tied_places_that_part_are_refused(make: Any, backend: Any, donate: bool):
    with pytest.raises(RuntimeError, match=r"one of several places of .* anew"):
        trained(built(make), backend, donate)


@variants
def test_the_remedy__a_tied_buffer_written_to_in_place_trains_as_in_torch(backend: Any, donate: bool):
    assert_trains_as_torch(lambda: TwoPlaces(_in_place), backend, donate)


def _anew_later(layer: Any) -> None:
    if layer.weight.sum() > 100:
        _anew(layer)


def test_tied_places_that_part_in_a_later_call_are_refused_and_nothing_is_left_of_it():
    apply, params, buffers = fa.from_module(built(lambda: TwoPlaces(_anew_later)))
    expected = apply.with_buffers(params, buffers, drawn(5, 3))[0]
    with pytest.raises(RuntimeError, match=r"several places of \['n'\]"):
        apply.with_buffers({name: p + 100 for name, p in params.items()}, buffers, drawn(5, 3))
    assert torch.equal(apply.with_buffers(params, buffers, drawn(5, 3))[0], expected)


class Going(Net):
    n: Any

    def __init__(self, go: Any):
        super().__init__()
        self.go = go
        self.register_buffer("n", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x) + (0 if getattr(self, "n", None) is None else self.n)
        self.go(self, x)
        return out


def _to_none(module: Any, x: Tensor) -> None:
    module.n = None


def _deleted(module: Any, x: Tensor) -> None:
    del module.n


def _to_none_later(module: Any, x: Tensor) -> None:
    if len(x) > 5:
        module.n = None


@variants
@pytest.mark.parametrize("go", [_to_none, _deleted, _to_none_later])
def test_a_buffer_that_a_forward_deletes_is_named(go: Any, backend: Any, donate: bool):
    with pytest.raises(RuntimeError, match=r"deletes \['n'\]"):
        trained(built(lambda: Going(go)), backend, donate, [[drawn(5, 3)], [drawn(6, 3)]])


class Hooking(Net):
    """Adds or removes a hook in a later call."""

    def __init__(self, change: Any, rows: int = 5):
        super().__init__()
        self.change, self.rows = change, rows
        self.handle = self.o.register_forward_hook(_doubled)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.rows:
            self.change(self)
        return super().forward(x)


def _doubled(layer: Any, args: Any, out: Tensor) -> Tensor:
    return 2 * out


def _adding(module: Any) -> None:
    module.l.register_forward_hook(_doubled)


def _adding_with_kwargs(module: Any) -> None:
    module.l.register_forward_pre_hook(lambda layer, args, kwargs: None, with_kwargs=True)


def _removing(module: Any) -> None:
    module.handle.remove()


@variants
@pytest.mark.parametrize("change", [_adding, _adding_with_kwargs, _removing])
def test_a_hook_that_a_later_call_adds_or_removes_is_found(change: Any, backend: Any, donate: bool):
    with pytest.raises(RuntimeError, match=r"keeps something at \['[lo]\._\w*hooks"):
        trained(built(lambda: Hooking(change)), backend, donate, [[drawn(5, 3)], [drawn(6, 3)]])


def test_nothing_is_left_of_a_hook_that_was_refused():
    module = built(lambda: Hooking(_adding))
    apply, params, _ = fa.from_module(module)
    expected = apply(params, drawn(5, 3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"keeps something at \['l\._forward_hooks"):
            apply(params, drawn(6, 3))
    assert torch.equal(apply(params, drawn(5, 3)), expected)


# What parameters carry beside their numbers


class Marked(nn.Parameter):
    """A class of one's own."""


class Gains(Net):
    """Reads an attribute of a parameter."""

    def __init__(self, gain: Any = 3.0):
        super().__init__()
        self.l.weight.gain = gain  # pyright: ignore[reportAttributeAccessIssue]
        self.register_buffer("shift", torch.ones(()))
        self.shift.unit = ("m", 2)  # pyright: ignore

    def forward(self, x: Tensor) -> Tensor:
        shift: Any = self.shift
        return super().forward(x) * getattr(self.l.weight, "gain", 1.0) + shift * getattr(shift, "unit", (0, 0))[1]


@variants
def test_numbers_that_parameters_and_buffers_carry_are_read_as_in_torch(backend: Any, donate: bool):
    assert_trains_as_torch(Gains, backend, donate)


def test_what_tensors_carry_is_in_copies_and_other_modes_and_stays_in_no_tensor():
    module = built(Gains)
    apply, params, buffers = fa.from_module(module)
    for each in (apply, apply.eval(), copy.deepcopy(apply), pickle.loads(pickle.dumps(apply))):
        output, after = each.with_buffers(params, buffers, drawn(5, 3))
        assert torch.equal(output, module(drawn(5, 3)))
        assert not any(vars(tensor) for tensor in (*params.values(), *buffers.values(), *after.values()))


@pytest.mark.parametrize("gain", [torch.ones(()), [1.0], {"a": 1.0}, (torch.ones(()),), lambda: 1.0])
def test_other_things_that_parameters_carry_are_refused(gain: Any):
    module = built(lambda: Gains(gain))
    with pytest.raises(TypeError, match=r"attribute 'gain' of 'l\.weight'.*Let the layer hold it"):
        fa.from_module(module)
    del module.l.weight.gain  # the remedy
    apply, params, buffers = fa.from_module(module)
    assert torch.equal(apply.with_buffers(params, buffers, drawn(5, 3))[0], module(drawn(5, 3)))


class Setting(Net):
    def __init__(self, write: Any):
        super().__init__()
        self.write = write
        self.l.weight.count = 0  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.write(self.l.weight)


def _counted(weight: Any) -> float:
    weight.count += 1
    return weight.count


def _made_once(weight: Any) -> Tensor:
    if not hasattr(weight, "direction"):
        weight.direction = torch.randn(())
    return weight.direction


@variants
@pytest.mark.parametrize("write", [_counted, _made_once])
def test_attributes_that_a_forward_sets_on_a_parameter_are_refused(write: Any, backend: Any, donate: bool):
    with pytest.raises(RuntimeError, match=r"sets the attributes .* of 'l\.weight'.*buffer"):
        trained(built(lambda: Setting(write)), backend, donate)


class OfAClass(Net):
    def __init__(self, kind: Any):
        super().__init__()
        self.scale = kind(torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * self.scale if isinstance(self.scale, Marked) else out + self.scale


def test_a_class_of_parameters_that_is_lost_is_refused_and_the_remedy_works():
    with pytest.raises(TypeError, match=r"found a Marked at 'scale'.*nn\.Parameter"):
        fa.from_module(built(lambda: OfAClass(Marked)))
    assert_trains_as_torch(lambda: OfAClass(nn.Parameter), "autograd", False)


class OwnClass(Tensor):
    """A class of tensors that operators keep."""


class WithClass(Net):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 2.0).as_subclass(OwnClass))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (self.scale if isinstance(self.scale, OwnClass) else 100.0)


def test_a_class_of_tensors_that_is_kept_trains_as_in_torch():
    assert_trains_as_torch(WithClass, "autograd", False)


# Functions that torch compiles


class WithCompiled(Net):
    def __init__(self):
        super().__init__()
        self.f = torch.compile(torch.nn.functional.gelu, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.f(super().forward(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_function_as_an_attribute_is_followed(fresh_dynamo: None):
    assert_trains_as_torch(WithCompiled, "func", False)


# Modules whose copies would lack something


class Slotted(Net):
    __slots__ = ("gain",)

    def __init__(self):
        super().__init__()
        self.gain = 3.0  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * getattr(self, "gain", 1.0)


def test_slots_of_a_module_are_refused_for_its_copies_do_not_have_them():
    with pytest.raises(TypeError, match=r"__slots__ \['gain'\] in the Slotted at 'inner'.*Remove __slots__"):
        fa.from_module(nn.ModuleDict({"inner": Slotted()}))


@pytest.mark.filterwarnings("ignore")
def test_the_remedy__what_no_forward_reads_is_deleted():
    module: Any = built(lambda: quantization.QuantWrapper(Net()))
    module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    module = quantization.prepare_qat(module.train())
    with pytest.raises(TypeError, match=r"'the module itself' behind \"qconfig.*delete what no forward reads"):
        fa.from_module(module)
    for layer in module.modules():
        layer.__dict__.pop("qconfig", None)
    with pytest.raises(ValueError, match=r"at 'module\.l\.weight_fake_quant.*run the module once before from_module"):
        trained(module, "autograd")
    module(drawn(5, 3))
    expected = copy.deepcopy(module)
    state, loop = trained(module, "autograd"), imperative(expected)
    assert all(torch.equal(state.params[name], value) for name, value in loop.items())
    assert all(torch.equal(state.buffers[name], value) for name, value in expected.named_buffers())


# Threads and graphs


class AsksItsClass(Net):
    def forward(self, x: Tensor) -> Tensor:
        first = isinstance(self.l.weight, nn.Parameter)
        time.sleep(0.002)  # others come and go meanwhile
        return super().forward(x) * (1 if first and isinstance(self.l.weight, nn.Parameter) else 100)


def test_in_threads_that_share_parameters_these_are_parameters_to_the_end_of_each_call():
    apply, params, _ = fa.from_module(built(AsksItsClass))
    with torch.no_grad():
        expected, found = apply(params, drawn(5, 3)), []

    def calls() -> None:
        with torch.no_grad():
            found.extend(apply(params, drawn(5, 3)) for _ in range(10))

    threads = [threading.Thread(target=calls) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 40 and all(torch.equal(output, expected) for output in found)
    assert not any(vars(p) for p in params.values())


class Deeper(Net):
    """Sets what it sets back."""

    def __init__(self, left: int = 0):
        super().__init__()
        self.depth, self.left = 0, left

    def forward(self, x: Tensor) -> Tensor:
        self.depth += 1
        self.eval()
        out = super().forward(x) * self.depth
        self.train()
        self.depth -= 1 - self.left
        return out


def test_what_a_forward_sets_and_sets_back_is_no_change_in_a_graph_either(fresh_dynamo: None):
    module = built(Deeper)
    apply, params, _ = fa.from_module(module)
    graph: Any = torch.compile(apply, backend="eager", fullgraph=True)
    torch.testing.assert_close(graph(params, drawn(5, 3)), module(drawn(5, 3)))
    apply, params, _ = fa.from_module(built(lambda: Deeper(left=1)))
    with pytest.raises(Exception, match=r"keeps something at \['depth'\]"):
        torch.compile(apply, backend="eager", fullgraph=True)(params, drawn(5, 3))


class WritingTo(Net):
    """Sets an attribute of a parameter."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        setattr(self.l.weight, self.name, 1)
        return super().forward(x)


def private_gains() -> nn.Module:
    module = Net()
    module.l.weight._is_marked = True  # pyright: ignore[reportAttributeAccessIssue]
    module.shift = nn.Buffer(torch.ones(2), persistent=False)
    return module


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: TwoPlaces(_anew), r"several places of \['n'\] anew"),
        (lambda: Listed(_rotating, buffers=True), r"several places of \['p', 'q'\] anew"),
        (lambda: Going(_to_none), r"deletes \['n'\]"),
        (lambda: Going(_deleted), r"deletes \['n'\]"),
        (Gains, r"the attributes \['unit'\] of 'shift' in a graph.*Let the layer hold them"),
        (lambda: Asking(_emptied), r"sets the attributes \['grad'\] of 'l\.weight'"),
        (lambda: WritingTo("count"), r"sets the attributes \['count'\] of 'l\.weight'"),
        (private_gains, None),
        (lambda: TwoPlaces(_in_place), None),
        (lambda: Listed(_kept, buffers=True), None),
    ],
)
def test_a_graph_refuses_it_as_well_and_follows_the_remedies(make: Any, match: str | None, fresh_dynamo: None):
    module = built(make)
    apply, params, buffers = fa.from_module(module)
    graph: Any = torch.compile(apply.with_buffers, backend="eager", fullgraph=True)
    if match is None:
        output, after = graph(params, buffers, drawn(5, 3))
        torch.testing.assert_close(output, module(drawn(5, 3)))
        assert all(torch.equal(after[name], value) for name, value in module.named_buffers())
        return
    with pytest.raises(Exception, match=match):
        graph(params, buffers, drawn(5, 3))


class Scaled(Net):
    def __init__(self):
        super().__init__()
        self.f = torch.full((), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.f


def test_a_mode_that_is_asked_for_in_inference_can_be_differentiated_later():
    module = built(Scaled)
    apply, params, _ = fa.from_module(module)
    with torch.inference_mode():
        apply.eval()(params, drawn(5, 3))
    loss = fa.scale_backward(lambda p: apply.eval()(p, drawn(5, 3)).sum(), fa.NoScale(), params, backend="autograd")
    module(drawn(5, 3)).sum().backward()
    assert all(torch.equal(loss.grads.tree[name], p.grad) for name, p in module.named_parameters())
