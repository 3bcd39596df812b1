"""Loops of the field: graphs, containers, windows, the bits of Adam, and the remedies that messages name."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as torch_pytree
from torch.utils.checkpoint import checkpoint

import functional_amp as fa

GRAPH: Any = {"backend": "aot_eager"}
BREAKS: Any = {"backend": "aot_eager", "fullgraph": False}

# The compiler looks at .grad of what it takes over from the frame that it left.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def n_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


# L09: Python numbers that change from call to call


def scaled_by_number(p: Tensor, batch: Any) -> Tensor:
    x, number = batch
    return ((p * x) ** 2).mean() * number


def weighted_by_number(p: Tensor, batch: Any) -> fa.Loss:
    x, number = batch
    return fa.Loss(((p * x) ** 2).mean(), weight=number)


def in_a_dict(p: Tensor, batch: Any) -> Tensor:
    return ((p * batch[0]["x"]) ** 2).mean() * batch[0]["beta"][0] + (p * batch[1]).sum()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["func", "autograd"])
@pytest.mark.parametrize("number", [float, int])
@pytest.mark.parametrize("loss_fn", [scaled_by_number, weighted_by_number])
def test_L09_python_floats_that_change_from_call_to_call_compiled(loss_fn, number, backend, fresh_dynamo):
    optimizer = fa.sgd(0.1)
    graph = fa.make_step(loss_fn, optimizer, backend=backend, compile=GRAPH)
    eager = fa.make_step(loss_fn, optimizer, backend=backend)
    state = expected = fa.init_state(torch.tensor([1.0, 0.5]), optimizer, fa.StaticScale(8.0))
    made = []
    for i in range(12):
        values = [number(i + 2), number(2 * i + 3)] if number is int else [0.1 * i + 0.05, 0.2 * i + 0.15]
        window = [(torch.tensor([0.3, 0.7]) * (i + 1), values[0]), (torch.tensor([0.3, 0.1]), values[1])]
        state, metrics = graph(state, window)
        expected, expected_metrics = eager(expected, window)
        torch.testing.assert_close(state.params, expected.params, rtol=1e-6, atol=0)
        assert torch.equal(metrics.weight, expected_metrics.weight)
        made.append(n_graphs())
    assert made[-1] - made[0] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["func", "autograd"])
def test_L09_python_floats_that_change_from_call_to_call_compiled__inside_a_batch(backend, fresh_dynamo):
    optimizer = fa.sgd(0.1)
    graph, eager = [fa.make_step(in_a_dict, optimizer, backend=backend, compile=compile) for compile in (GRAPH, False)]
    state = expected = fa.init_state(torch.tensor([1.0, 0.5]), optimizer, fa.StaticScale(8.0))
    made = []
    for i in range(12):
        window = [({"x": torch.tensor([0.3, 0.7]), "beta": [0.1 * i + 0.05]}, 0.25 * i + 0.1)]
        state, _ = graph(state, window)
        expected, _ = eager(expected, window)
        torch.testing.assert_close(state.params, expected.params, rtol=1e-6, atol=0)
        made.append(n_graphs())
    assert made[-1] - made[0] <= 2


# L10: graph breaks in the loss


def broken_loss(p: dict[str, Any], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ p["w"] + p["nested"]["b"])
    print(".", end="")
    return (hidden**2).mean()


def read_loss(p: dict[str, Any], x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ p["w"] + p["nested"]["b"])
    return (hidden**2).mean() if hidden.sum().item() > 0 else (hidden**4).mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "loss_fn"),
    [
        ({"backend": "autograd"}, broken_loss),
        ({"donate": True}, read_loss),
    ],
)
def test_L10_fullgraph_false_with_a_graph_break(options, loss_fn, fresh_dynamo):
    torch.manual_seed(0)
    params = {"w": torch.randn(3, 2), "nested": {"b": torch.zeros(2)}}
    windows = [[torch.randn(4, 3) for _ in range(3)] for _ in range(3)]
    optimizer = fa.sgd(0.1, momentum=0.9)
    step = fa.make_step(loss_fn, optimizer, max_norm=0.05, compile=BREAKS, **options)
    state = fa.init_state(params, optimizer, fa.DynamicScale(8.0))
    leaves = {"w": params["w"].clone().requires_grad_(), "nested": {"b": params["nested"]["b"].clone()}}
    leaves["nested"]["b"].requires_grad_()
    flat = [leaves["w"], leaves["nested"]["b"]]
    torch_optimizer = torch.optim.SGD(flat, 0.1, momentum=0.9)
    for window in windows:
        state, metrics = step(state, window)
        torch_optimizer.zero_grad()
        for x in window:
            (loss_fn(leaves, x) / len(window)).backward()
        norm = nn.utils.clip_grad_norm_(flat, 0.05)
        torch_optimizer.step()
        torch.testing.assert_close(metrics.grad_norm, norm)
    torch.testing.assert_close(state.params["w"], leaves["w"].detach())
    torch.testing.assert_close(state.params["nested"]["b"], leaves["nested"]["b"].detach())


def test_L10_fullgraph_false_with_a_graph_break__func_is_refused():
    with pytest.raises(ValueError, match=r"backend: found 'func'.*Use backend='autograd'"):
        fa.make_step(broken_loss, fa.sgd(0.1), backend="func", compile=BREAKS)
    fa.make_step(broken_loss, fa.sgd(0.1), backend="autograd", compile=BREAKS)
    fa.make_step(broken_loss, fa.sgd(0.1), backend="func", compile={"fullgraph": True})


# L11, L12: containers that optree does not know


class ModelOutput(OrderedDict):
    """As transformers has it: a dict with attributes, which torch's pytree knows."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


torch_pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
    serialized_type_name="tests.ModelOutput",
)


class Unknown(dict):
    """A dict of a class that nobody has registered."""


class Encoding(UserDict):
    """As a tokenizer gives it."""


@dataclass
class Batch:
    x: Tensor
    n: int = 1


class Bag:
    """An object with tensors among its attributes, and below."""

    def __init__(self, x: Tensor):
        self.inside = {"deep": [x]}


UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "dict subclass": lambda x: Unknown(x=x),
    "UserDict": lambda x: Encoding(x=x),
    "dataclass": lambda x: Batch(x),
    "object": Bag,
    "set": lambda x: {x},
    "list subclass": lambda x: type("Items", (list,), {})([x]),
    "distribution": lambda x: torch.distributions.Normal(x, torch.ones_like(x)),
    "inside a known one": lambda x: ModelOutput(x=Encoding(x=x)),
}
BACKENDS: list[Any] = ["func", "autograd"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_L11_aux_in_a_container_that_the_tree_library_does_not_know(backend):
    def loss_fn(p: Tensor, x: Tensor) -> fa.Loss:
        logits = p * x
        output = ModelOutput(loss=logits.sum(), logits=logits, hidden=(logits * 2, None), name="m")
        return fa.Loss(output.loss, aux={"output": output, "n": 3})

    p, x = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0, 4.0])
    grads, loss, aux = fa.scale_backward(loss_fn, fa.StaticScale(8.0), p, x, backend=backend)
    output = aux["output"]
    assert type(output) is ModelOutput and list(output) == ["loss", "logits", "hidden", "name"]
    assert output.name == "m" and output.hidden[1] is None and aux["n"] == 3
    for tensor in (output.loss, output.logits, output.hidden[0], loss, grads.tree):
        assert type(tensor) is Tensor and not tensor.requires_grad
        assert tensor.numpy() is not None  # a tensor that torch.func has left behind has no numbers
    assert torch.equal(output.hidden[0], 2 * p.detach() * x) and torch.equal(grads.tree, 8 * x)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_L11_aux_in_a_container_that_the_tree_library_does_not_know__refused_by_path(name, backend):
    def loss_fn(p: Tensor, x: Tensor) -> fa.Loss:
        return fa.Loss((p * x).sum(), aux={"out": [1, UNKNOWN[name](p * x)]})

    x = torch.ones(2)
    with pytest.raises(TypeError, match=r"loss_fn: aux\.out\.1: found .*Pass a dict of them"):
        fa.scale_backward(loss_fn, fa.NoScale(), x, x, backend=backend)
    plain = lambda p, x: fa.Loss((p * x).sum(), aux={"out": [1, {"x": p * x}]})  # noqa: E731
    aux = fa.scale_backward(plain, fa.NoScale(), x, x, backend=backend).aux
    assert torch.equal(aux["out"][1]["x"], x)


@pytest.mark.parametrize("donate", [False, True])
def test_L11_aux_in_a_container_that_the_tree_library_does_not_know__in_a_step(donate):
    """The mean over a window is of numbers in containers that optree knows."""
    x = torch.ones(2)
    for make in (lambda v: ModelOutput(a=v), lambda v: Unknown(a=v)):
        step = fa.make_step(lambda p, x, m=make: fa.Loss((p * x).sum(), aux=m(p * x)), fa.sgd(0.1), donate=donate)
        with pytest.raises(TypeError, match="aux"):
            step(fa.init_state(x, fa.sgd(0.1)), [x])
    step = fa.make_step(lambda p, x: fa.Loss((p * x).sum(), aux=dict(ModelOutput(a=p * x))), fa.sgd(0.1), donate=donate)
    assert torch.equal(step(fa.init_state(x, fa.sgd(0.1), fa.NoScale()), [x, 3 * x])[1].aux["a"], 2 * x)


def test_L11_aux_in_a_container_that_the_tree_library_does_not_know__what_holds_no_tensor_passes():
    aux = {"text": "s", "set": {1}, "unknown": Unknown(a=1), "call": torch.relu, "type": Tensor, "range": range(3)}
    x = torch.ones(2)
    for backend in BACKENDS:
        found = fa.scale_backward(lambda p: fa.Loss(p.sum(), aux=aux), fa.NoScale(), x, backend=backend).aux
        assert found == aux


def seen_dtypes(batch: Any) -> list[torch.dtype]:
    """What a loss under a policy is given."""
    seen: list[torch.dtype] = []

    def loss_fn(p: Tensor, batch: Any) -> Tensor:
        tensors = [leaf for leaf in torch_pytree.tree_leaves(batch) if isinstance(leaf, Tensor)]
        seen.extend(leaf.dtype for leaf in tensors)
        return p.sum() + sum(leaf.sum() for leaf in tensors)

    fa.scale_backward(fa.with_policy(loss_fn, "p=f32,c=bf16,o=f32"), fa.NoScale(), torch.ones(2), batch)
    return seen


def test_L12_batch_in_a_container_that_the_tree_library_does_not_know():
    x, n = torch.ones(2), torch.ones(2, dtype=torch.int64)
    for batch in (ModelOutput(x=x, n=n), {"in": [ModelOutput(x=x, n=n)]}, {"n": n, "x": x}):
        assert sorted(map(str, seen_dtypes(batch))) == ["torch.bfloat16", "torch.int64"]
    cast = fa.cast_floating({"in": ModelOutput(x=x, n=n, s="s")}, torch.float16)["in"]
    assert type(cast) is ModelOutput and cast.x.dtype == torch.float16 and cast.n is n and cast.s == "s"


@pytest.mark.parametrize("name", UNKNOWN)
def test_L12_batch_in_a_container_that_the_tree_library_does_not_know__refused_by_path(name):
    batch = UNKNOWN[name](torch.ones(2))
    with pytest.raises(TypeError, match=r"loss_fn: argument 1: at 'b': found .*, expected containers.*register"):
        seen_dtypes({"a": torch.ones(1), "b": batch})
    with pytest.raises(TypeError, match=r"tree: at '<root>': found"):
        fa.cast_floating(batch, torch.float16)
    # Where nothing is to be cast, a loss function may take what it likes.
    loss_fn = lambda p, b: p.sum() if type(b) is type(batch) else p.prod()  # noqa: E731
    for backend in BACKENDS:
        grads = fa.scale_backward(loss_fn, fa.NoScale(), torch.full((2,), 3.0), batch, backend=backend).grads.tree
        assert torch.equal(grads, torch.ones(2))


def test_L12_batch_in_a_container_that_the_tree_library_does_not_know__the_remedies_work():
    x = torch.ones(2)
    assert seen_dtypes(dict(Encoding(x=x))) == [torch.bfloat16]
    assert seen_dtypes({**vars(Batch(x))}) == [torch.bfloat16]

    @dataclass
    class Registered:
        x: Tensor
        n: int = 1

    fa.register(Registered, ("x",), ("n",))
    assert seen_dtypes(Registered(x)) == [torch.bfloat16]


# L13: a batch in place of a window


@pytest.mark.parametrize("options", [{}, {"donate": True}, pytest.param({"compile": GRAPH}, marks=pytest.mark.slow)])
def test_L13_dataloader_batch_in_place_of_a_window(options):
    x, y = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1])
    loss_fn = lambda p, batch: F.cross_entropy(batch[0] @ p, batch[1])  # noqa: E731
    pair = lambda p, b: loss_fn(p, b) if isinstance(b, (list, tuple)) else (p * b.float().mean()).sum()  # noqa: E731
    optimizer = fa.sgd(0.1)
    step = fa.make_step(pair, optimizer, **options)
    state = fa.init_state(torch.eye(2), optimizer, fa.StaticScale(8.0))
    with pytest.raises(TypeError, match=r"micro_batches: found .*int64.* at 1.*write step\(state, \[\[x, y\]\]\)"):
        step(state, [x, y])
    assert torch.equal(state.params, torch.eye(2))
    state, _ = step(state, [[x, y]])
    leaf = torch.eye(2, requires_grad=True)
    loss_fn(leaf, (x, y)).backward()
    assert leaf.grad is not None
    torch.testing.assert_close(state.params, torch.eye(2) - 0.1 * leaf.grad)


KINDS: dict[str, list[Any]] = {
    "structure": [{"x": torch.ones(2)}, torch.ones(2)],
    "keys": [{"x": torch.ones(2)}, {"y": torch.ones(2)}],
    "dtypes": [torch.ones(2), torch.ones(2).double()],
    "a bool": [torch.ones(2), torch.ones(2, dtype=torch.bool)],
}


@pytest.mark.parametrize("name", KINDS)
def test_L13_dataloader_batch_in_place_of_a_window__each_kind_and_the_remedy(name):
    def loss_fn(p: Tensor, batch: Any) -> Tensor:
        return sum(((p * leaf).sum() for leaf in torch_pytree.tree_leaves(batch) if leaf is not None), p.sum() * 0)

    optimizer = fa.sgd(0.1)
    step = fa.make_step(loss_fn, optimizer)
    state = fa.init_state(torch.ones(2), optimizer, fa.StaticScale(8.0))
    with pytest.raises(TypeError, match=r"micro_batches: found .*step.accumulate\(state, micro_batch\)"):
        step(state, KINDS[name])
    for micro_batch in KINDS[name]:
        state = step.accumulate(state, micro_batch)
    state, metrics = step.update(state)
    assert metrics.applied and float(metrics.weight) == 2


LENGTHS: list[Any] = [("a", 3), ("bcd", torch.tensor(5)), ("", 1)]


def test_L13_dataloader_batch_in_place_of_a_window__lengths_may_vary():
    """And a number may stand where another micro-batch has a tensor, or nothing."""
    torch.manual_seed(0)
    optimizer = fa.sgd(0.1)
    step = fa.make_step(lambda p, b: (p * b["x"].mean()).sum() * b["n"], optimizer)
    window = [{"x": torch.randn(len(n) + 1), "n": number, "id": n} for n, number in LENGTHS]
    state, _ = step(fa.init_state(torch.ones(2), optimizer, fa.StaticScale(8.0)), iter(window))
    expected = 1 - 0.1 * sum(float(b["x"].mean()) * b["n"] for b in window) / 3
    torch.testing.assert_close(state.params, torch.full((2,), expected))


# L16: the bits of Adam


def optimizers(lr: float) -> dict[str, tuple[fa.Optimizer, Callable[..., torch.optim.Optimizer]]]:
    adam: dict[str, Any] = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
    sgd: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    return {
        "adam": (fa.adam(lr), lambda p, **o: torch.optim.Adam(p, lr, **o)),
        "adam with all": (fa.adam(lr, **adam), lambda p, **o: torch.optim.Adam(p, lr, **adam, **o)),
        "adamw": (fa.adamw(lr), lambda p, **o: torch.optim.AdamW(p, lr, **o)),
        "adamw with all": (fa.adamw(lr, **adam), lambda p, **o: torch.optim.AdamW(p, lr, **adam, **o)),
        "sgd": (fa.sgd(lr), lambda p, **o: torch.optim.SGD(p, lr, **o)),
        "sgd with all": (fa.sgd(lr, **sgd), lambda p, **o: torch.optim.SGD(p, lr, **sgd, **o)),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
@pytest.mark.parametrize("lr", [1e-3, 0.013, 0.1])
@pytest.mark.parametrize("name", optimizers(0.1))
def test_L16_adam_in_float64(name, lr, dtype):
    optimizer, make = optimizers(lr)[name]
    torch.manual_seed(0)
    params = {"a": torch.randn(7, 5, dtype=dtype), "b": torch.randn(33, dtype=dtype)}
    leaves = {key: leaf.clone().requires_grad_() for key, leaf in params.items()}
    theirs = make(list(leaves.values()), foreach=False, fused=False)
    state = optimizer.init(params)
    for count in range(60):
        grads = {key: torch.randn_like(leaf) for key, leaf in params.items()}
        for key, leaf in leaves.items():
            leaf.grad = grads[key].clone()
        theirs.step()
        assert optimizer.step is not None
        params, state = optimizer.step(grads, state, params)
        for key, leaf in leaves.items():
            assert torch.equal(leaf.detach(), params[key]), count


# L17: remedies


class Old(torch.autograd.Function):
    """Without setup_context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * ctx.saved_tensors[0].cos()


LSTM = nn.LSTM(2, 3, batch_first=True)


def checkpointed(p: Any, x: Tensor) -> Tensor:
    hidden = checkpoint(lambda x: F.dropout(x * p["w"]).sin(), x, use_reentrant=False)
    assert isinstance(hidden, Tensor)
    return hidden.sum()


def saved_on_cpu(p: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return F.dropout(p["w"] * x).sin().sum()


def attention_under_autocast(p: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        q = (x @ p["w"]).view(1, 1, 2, 2)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5).float().sum()


def packed(p: Any, x: Tensor) -> Tensor:
    lengths = torch.tensor([2])
    sequence = nn.utils.rnn.pack_padded_sequence(F.dropout(x @ p["w"]).view(1, 2, 2), lengths, batch_first=True)
    return torch.func.functional_call(LSTM, p["lstm"], (sequence,))[0].data.sum()


def module_hook(p: Any, x: Tensor) -> Tensor:
    layer = nn.Linear(2, 2)
    layer.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    return F.dropout(torch.func.functional_call(layer, {"weight": p["w"]}, (x * p["w"],))).sum()


def inner_gradient(p: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (force,) = torch.autograd.grad((F.dropout(p["w"]) * x**2).sum(), x, create_graph=True)
    return (force**2).sum()


def inner_backward(p: Any, x: Tensor) -> Tensor:
    hidden = F.dropout(p["w"] * x)
    hidden.sum().backward(retain_graph=True)
    return hidden.sum()


def retained(p: Any, x: Tensor) -> Tensor:
    hidden = F.dropout(p["w"] * x)
    hidden.retain_grad()
    return hidden.sum()


def through_numpy(p: Any, x: Tensor) -> Tensor:
    hidden = F.dropout(p["w"] * x)
    return hidden.sum() * float(hidden.detach().numpy().max())


def pickled(p: Any, x: Tensor) -> Tensor:
    import copy

    return (F.dropout(p["w"]) * copy.deepcopy(p["w"].detach()) * x).sum()


def nested(p: Any, x: Tensor) -> Tensor:
    jagged = torch.nested.nested_tensor([x[0], x[1, :1]], layout=torch.jagged)
    return (jagged * F.dropout(p["w"]).sum()).values().sum()


def strided_nested(p: Any, x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, says torch
        both = torch.nested.as_nested_tensor([x[0] * F.dropout(p["w"])[0], x[1, :1] * p["w"][1, :1]])
        return torch.nested.to_padded_tensor(both, 0.0).sum()


BEYOND_FUNC: dict[str, tuple[Callable[..., Any], str]] = {
    "checkpoint": (checkpointed, "activation checkpointing"),
    "saved-tensor hooks": (saved_on_cpu, "saved-tensor hooks"),
    "Function without setup_context": (lambda p, x: Old.apply(F.dropout(p["w"] * x)).sum(), "setup_context"),
    "attention": (attention_under_autocast, "attention with dropout or a mask under autocast on a CPU"),
    "packed sequences": (packed, "packed sequences"),
    "module hook": (module_hook, "setup_context"),
    "inner gradient": (inner_gradient, "requires_grad_"),
    "inner backward": (inner_backward, "a backward inside the loss"),
    "retain_grad": (retained, "retain_grad"),
    "numpy": (through_numpy, "numpy"),
    "storage": (pickled, "deepcopy"),
    "jagged": (nested, ""),
    "nested": (strided_nested, "nested tensors"),
}
X = torch.tensor([[0.5, -1.0], [2.0, 0.25]])


def start() -> dict[str, Any]:
    torch.manual_seed(3)
    return {"w": torch.randn(2, 2), "lstm": {name: leaf.detach().clone() for name, leaf in LSTM.named_parameters()}}


def gradients(loss_fn: Any, backend: Any, seed: int = 5) -> tuple[list[Tensor], Tensor]:
    params = start()
    with fa.seeded(seed):
        grads = fa.scale_backward(loss_fn, fa.StaticScale(8.0), params, X.clone(), backend=backend).grads
        return [grads.tree["w"], *grads.tree["lstm"].values()], torch.get_rng_state()


@pytest.mark.parametrize("name", BEYOND_FUNC)
def test_L17_remedy_in_an_error_message_is_tried(name):
    """`func` raises and names the engine, which works; `auto` takes it by itself, with the same random numbers."""
    given, cause = BEYOND_FUNC[name]
    loss_fn = lambda p, x: given(p, x)  # a new one: what is known of a function lasts  # noqa: E731
    with pytest.raises((RuntimeError, NotImplementedError), match=f"(?s){cause}.*Use backend='autograd'"):
        gradients(loss_fn, "func")
    expected, rng = gradients(loss_fn, "autograd")
    with pytest.warns(UserWarning, match=f"backend='auto': torch.func can't differentiate this loss .*{cause}") as told:
        found, rng_after = gradients(loss_fn, "auto")
    assert len(told) == 1
    assert torch.equal(rng, rng_after) and all(map(torch.equal, found, expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, _ = gradients(loss_fn, "auto")  # said once
    assert all(map(torch.equal, again, expected))
    step = fa.make_step(loss_fn, fa.sgd(1.0))
    state, _ = step(fa.init_state(start(), fa.sgd(1.0), fa.StaticScale(8.0)), [X.clone()], seed=5)
    torch.testing.assert_close(state.params["w"], start()["w"] - expected[0] / 8)


@pytest.mark.parametrize("name", ["checkpoint", "Function without setup_context"])
def test_L17_remedy_in_an_error_message_is_tried__under_a_transform_it_stays_func(name):
    loss_fn = lambda p, x: BEYOND_FUNC[name][0](p, x)  # noqa: E731
    with pytest.warns(UserWarning, match="backend='auto'"):
        gradients(loss_fn, "auto")

    def outer(factor: Tensor) -> Tensor:
        return fa.scale_backward(loss_fn, fa.NoScale(), start(), X * factor).loss

    with pytest.raises(RuntimeError, match=r"does not work under torch\.func"):
        torch.func.grad(outer)(torch.tensor(1.0))


def test_L17_remedy_in_an_error_message_is_tried__an_error_of_the_loss_stays_its_own():
    """What the engine can't do either is raised as it is; the loss is not remembered, and nothing is said."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        Old.apply(p["w"])
        raise KeyError("the loss's own")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError, match="the loss's own"):
            gradients(loss_fn, "auto")
        with pytest.raises(RuntimeError, match="size mismatch"):
            gradients(lambda p, x: (p["w"] @ torch.ones(3)).sum(), "auto")


def test_L17_remedy_in_an_error_message_is_tried__a_window_of_the_step_warns_once():
    loss_fn = lambda p, x: Old.apply(p * x).sum()  # noqa: E731
    step = fa.make_step(loss_fn, fa.sgd(1.0))
    state = fa.init_state(X, fa.sgd(1.0), fa.StaticScale(8.0))
    with pytest.warns(UserWarning, match="backend='auto'") as told:
        for _ in range(2):
            state, _ = step(state, [X, X])
    assert len(told) == 1


def test_L17_remedy_in_an_error_message_is_tried__hooks_of_a_loss_do_not_pile_up():
    """A donated step keeps the leaves that the engine records with; a hook is of one micro-batch."""

    def loss_fn(p: Tensor, x: Tensor) -> Tensor:
        p.register_hook(lambda grad: 2 * grad)
        return (p * x).sum()

    every: list[Any] = [{}, {"donate": True}, {"backend": "autograd"}]
    for options in every:
        step = fa.make_step(loss_fn, fa.sgd(0.1), **options)
        state = fa.init_state(X, fa.sgd(0.1), fa.StaticScale(8.0))
        for _ in range(2):
            state, _ = step(state, [X, X])
        torch.testing.assert_close(state.params, X - 2 * 0.1 * 2 * X)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "part"), [("checkpoint", "accumulate"), ("attention", "scan")])
def test_L17_remedy_in_an_error_message_is_tried__compiled(name, part, fresh_dynamo):
    loss_fn = lambda p, x: BEYOND_FUNC[name][0](p, x)  # noqa: E731
    optimizer = fa.sgd(1.0)

    def run(**options: Any) -> Tensor:
        step = fa.make_step(loss_fn, optimizer, **options)
        state = fa.init_state(start(), optimizer, fa.StaticScale(8.0))
        with fa.seeded(5):
            if part == "window":
                return step(state, [X])[0].params["w"]
            if part == "scan":
                return step.scan(state, X[None])[0].params["w"]
            return step.update(step.accumulate(state, X))[0].params["w"]

    with pytest.raises(RuntimeError, match=r"does not work in one graph.*Use compile=\{'fullgraph': False\}"):
        run(compile=GRAPH)
    torch.testing.assert_close(run(compile=BREAKS), run(backend="autograd"))
    torch.testing.assert_close(run(compile=BREAKS, donate=True), run(backend="autograd"))


# Which parameters a loss leaves out


def test_L02_no_parameter_is_reached_by_the_loss__unreached_paths():
    params = {"a": torch.ones(2), "b": [torch.ones(2), torch.zeros(1)], "n": torch.ones(1, dtype=torch.int64)}
    generator = torch.get_rng_state()
    assert fa.unreached_paths(lambda p, x: (F.dropout(p["a"]) * x).sum(), params, torch.ones(2)) == ["b.0", "b.1"]
    assert torch.equal(torch.get_rng_state(), generator)
    assert fa.unreached_paths(lambda p: p["a"].sum() + p["b"][0].sum() * 0 + p["b"][1].sum(), params) == []
    assert fa.unreached_paths(lambda p: p["a"].detach().sum(), params) == ["a", "b.0", "b.1"]
    assert fa.unreached_paths(checkpointed, start(), X)[0].startswith("lstm.")
    module = nn.ModuleDict({"used": nn.Linear(2, 1), "head": nn.Linear(2, 1)})
    for name, leaf in module.named_parameters():
        assert leaf.grad is None, name
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference_mode"):
        fa.unreached_paths(lambda p: p["a"].sum(), params)
