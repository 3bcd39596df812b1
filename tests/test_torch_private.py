"""What each private name of torch and optree is for, and what breaks here when it moves."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

import functional_amp as fa
from functional_amp import torch_private as private
from tests.on_ranks import Collectives

PACKAGE = Path(fa.__file__).parent


def test_GLOBAL_NAMESPACE_is_seen_by_trees_that_name_no_namespace():
    # When it moves, no state of ours can be flattened by a user's optree.tree_map.
    window = fa.ScaledGrads({"w": torch.ones(2)}, 8.0)
    assert len(optree.tree_leaves(window)) == 3  # pyright: ignore[reportArgumentType]
    assert len(optree.tree_leaves(window, namespace="someone else's")) == 3  # pyright: ignore[reportArgumentType]


def test_torch_pytree_is_where_torch_func_and_the_compiler_look():
    # When they look elsewhere, vmap refuses a state, and torch.compile a step.
    assert private.torch_pytree is _pytree
    grads = fa.ScaledGrads({"w": torch.ones(2)}, 8.0)
    entries, _ = private.torch_pytree.tree_flatten_with_path(grads)
    assert [private.torch_pytree.keystr(path) for path, _ in entries] == [".tree['w']", ".scale", ".weight"]
    doubled = torch.vmap(lambda g, x: fa.accumulate(None, g), in_dims=(None, 0))(grads, torch.ones(3))
    assert doubled.tree["w"].shape == (3, 2)


def test_is_wrapper_knows_a_tensor_that_holds_others():
    # When it moves, the state of a low-bit optimizer is not taken apart: a skip or a copy fails on its class.
    class Pair(Tensor):
        def __tensor_flatten__(self):
            return ["left"], None

        @staticmethod
        def __tensor_unflatten__(inner, context, size, stride):
            return inner["left"]

    assert private.is_wrapper(torch.ones(2).as_subclass(Pair)) and not private.is_wrapper(torch.ones(2))


def test_functorch_active_inside_each_transform_and_nowhere_else():
    # When it moves, a stage cuts the outer derivative off: a zero gradient without a word.
    def seen(x: Tensor) -> Tensor:
        found.append(private.functorch_active())
        return x.sum()

    found: list[bool] = []
    x = torch.ones(2)
    for transform in (torch.func.grad, torch.func.jacrev, torch.vmap):
        transform(seen)(x[None] if transform is torch.vmap else x)
    torch.func.vjp(seen, x)
    assert len(found) == 4 and all(found) and not private.functorch_active()


def test_storage_use_count_counts_the_tensors_on_a_storage():
    # When it counts otherwise, a donated sum is copied each time, or a user's tensor is written to.
    tensor = torch.ones(2)
    assert private.storage_use_count(tensor) == 1
    view = tensor.view(2)
    assert private.storage_use_count(tensor) == 2
    del view
    assert private.storage_use_count(tensor) == 1


def test_levels_are_those_of_the_transforms_around_a_tensor():
    # When they move, a captured tensor of an outer derivative gets NaN through a skipped window.
    plain = torch.ones(2)
    assert list(private.levels(plain)) == [plain]
    seen = []

    def inner(x):
        seen.append(len(list(private.levels(x))))
        return x.sum()

    torch.func.grad(inner)(plain)
    torch.func.grad(lambda x: torch.func.grad(inner)(x).sum() * x.sum())(plain)
    assert seen == [2, 3]


def test_keeping_saved_tensor_hooks_allows_them_again_after_an_exception():
    # When it moves, activation checkpointing fails after a compilation that failed.
    autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009
    with pytest.raises(ValueError, match="a trace that fails"), private.keeping_saved_tensor_hooks():
        autograd._saved_tensors_hooks_disable("forbidden")
        raise ValueError("a trace that fails")
    assert autograd._saved_tensors_hooks_is_enabled()


def test_saved_tensors_are_hooked_inside_hooks_and_nowhere_else():
    # When it moves, a first call inside a checkpoint is counted twice, or one with torch.func in it is refused.
    assert not private.saved_tensors_are_hooked()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        assert private.saved_tensors_are_hooked()
    assert not private.saved_tensors_are_hooked()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storage_key_is_one_for_tensors_on_one_storage(device):
    # When it moves, two parameters that are views of one tensor are both written to.
    a, b = (torch.ones(4, device=device) for _ in range(2))
    assert private.storage_key(a) == private.storage_key(a[2:]) == private.storage_key(a.t())
    assert private.storage_key(a) != private.storage_key(b)


def test_below_modes_hides_from_modes_what_a_kernel_asks():
    # When it moves, the norm's look at its own number shows as a host read of the step.
    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x = torch.ones(())
    with Watching():
        with private.below_modes():
            x.item()
        assert seen == []
        x.item()
    assert len(seen) == 1


def test_any_watching_knows_the_modes_that_see_operators():
    # When it moves, a mode that makes fake tensors sees the norm look at a number that is not there.
    assert not private.any_watching()
    with FakeTensorMode():
        assert private.any_watching()
    assert not private.any_watching()


@pytest.mark.parametrize("scale", [None, 8.0])
def test_fused_sgd_is_the_kernel_of_torch_optim_sgd(scale):
    # When an argument moves, every SGD update fails or follows another rule.
    expected = torch.tensor([1.0, -2.0], requires_grad=True)
    expected.grad = torch.tensor([0.3, 0.7])
    theirs = torch.optim.SGD([expected], 0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=True)
    theirs.step()
    found, buffer = torch.tensor([1.0, -2.0]), torch.zeros(2)
    grads = [torch.tensor([0.3, 0.7]) * (scale or 1)]
    options = {"weight_decay": 0.01, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": True, "maximize": False}
    divisor = None if scale is None else torch.tensor(scale)
    for skip in (1.0, 0.0):
        private.fused_sgd(
            [found], grads, [buffer], **options, is_first_step=False, grad_scale=divisor, found_inf=torch.tensor(skip)
        )
        assert skip == 0 or (found.tolist() == [1.0, -2.0] and buffer.tolist() == [0.0, 0.0])
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(buffer, theirs.state[expected]["momentum_buffer"], rtol=1e-6, atol=0)


@pytest.mark.parametrize("decoupled", [False, True])
def test_fused_adam_is_the_kernel_of_torch_optim_adam_and_adamw(decoupled):
    # When an argument moves, every Adam update fails or follows another rule.
    expected = torch.tensor([1.0, -2.0], requires_grad=True)
    expected.grad = torch.tensor([0.3, 0.7])
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    kind([expected], 0.1, weight_decay=0.5, fused=True).step()
    found = torch.tensor([1.0, -2.0])
    for skip in (1.0, 0.0):
        private.fused_adam(
            [found],
            [torch.tensor([2.4, 5.6])],
            [torch.zeros(2)],
            [torch.zeros(2)],
            [],
            [torch.ones(())],
            decoupled=decoupled,
            lr=0.1,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.5,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=torch.tensor(8.0),
            found_inf=torch.tensor(skip),
        )
        assert skip == 0 or found.tolist() == [1.0, -2.0]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=0)


def test_foreach_norm_adds_in_the_dtype_that_is_named():
    # When it moves, the norm of half-precision gradients overflows: 300**2 is not a float16.
    norms = private.foreach_norm([torch.tensor([300.0, 400.0]).half(), torch.tensor([1e30])], torch.float64)
    assert [(norm.dtype, norm.dim()) for norm in norms] == [(torch.float64, 0)] * 2
    torch.testing.assert_close(torch.stack(norms), torch.tensor([500.0, 1e30]).double(), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("fresh_dynamo")
def test_tracing_autograd_lets_dynamo_trace_the_engine():
    # When it moves, a compiled step with backend="autograd" breaks its graph, and fullgraph refuses.
    def derivative(x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad((leaf**2).sum(), leaf)[0]

    with private.tracing_autograd():
        found = torch.compile(derivative, backend="eager", fullgraph=True)(torch.ones(2))
    assert found.tolist() == [2.0, 2.0]


@pytest.mark.usefixtures("fresh_dynamo")
def test_dynamo_exception_is_what_a_graph_that_can_not_be_made_raises():
    # When it moves, a donated state is declared lost by a graph that has never run.
    def broken(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(private.dynamo_exception()):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(2))


@pytest.mark.usefixtures("fresh_dynamo")
def test_the_frame_by_which_an_exception_of_compiling_is_known_is_there():
    # engine/lease.py looks for it in a traceback: what a user's loss raises while it is traced may be of any type.
    def backend(graph: Any, inputs: Any) -> Any:
        names.extend(frame.frame.f_globals.get("__name__") for frame in inspect.stack())
        return graph

    from functional_amp.engine.lease import _while_compiling

    names: list[Any] = []
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    assert "torch._dynamo.convert_frame" in names
    assert not _while_compiling(ValueError())


@pytest.mark.usefixtures("fresh_dynamo")
def test_scan_is_a_loop_in_a_graph():
    # When it moves, step.scan can not be compiled.
    def total(x: Tensor) -> Tensor:
        return private.scan(lambda carry, each: (carry + each, []), torch.zeros(2), x, dim=0)[0]

    assert torch.compile(total, backend="eager", fullgraph=True)(torch.ones(5, 2)).tolist() == [5.0, 5.0]


def test_hooks_made_counts_those_of_modules():
    # When it stands still, a hook that a later call registers stays in one copy of the module, without a word.
    before = private.hooks_made()
    torch.nn.Linear(1, 1).register_forward_hook(lambda layer, args, out: None).remove()
    assert private.hooks_made() == before + 1


def test_norm_layers_are_those_with_running_statistics():
    # When it moves, a layer whose statistics a module trains is not found.
    nn = torch.nn
    for layer in (nn.BatchNorm1d(2), nn.BatchNorm3d(2), nn.InstanceNorm2d(2), nn.SyncBatchNorm(2)):
        assert isinstance(layer, private.norm_layers())
    for layer in (nn.LayerNorm(2), nn.GroupNorm(1, 2), nn.Linear(2, 2)):
        assert not isinstance(layer, private.norm_layers())


def test_parametrizations_cached_inside_cached_and_nowhere_else():
    # When it moves, two calls inside of parametrize.cached() read one another's weights.
    assert not private.parametrizations_cached()
    with torch.nn.utils.parametrize.cached():
        assert private.parametrizations_cached()
    assert not private.parametrizations_cached()


def test_reaches_this_level_tells_a_constant_loss_from_one_of_an_outer_level():
    # When it moves, a loss that reaches no parameter gives zeros in place of an error.
    def inner(y: Tensor, x: Tensor) -> Tensor:
        found.append([private.reaches_this_level(value) for value in (y.sum(), x.sum(), torch.ones(()), y.detach())])
        return y.sum()

    found: list[list[bool]] = []
    x = torch.ones(2)
    torch.func.grad(lambda x: torch.func.grad(inner)(x * 2, x).sum() + x.sum())(x)
    torch.func.grad(inner)(x, x)
    assert found == [[True, False, False, False]] * 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_reaches_this_level_in_a_graph_asks_whether_a_tensor_requires_grad():
    def reaches(x: Tensor) -> Tensor:
        def loss(y: Tensor) -> Tensor:
            assert private.reaches_this_level(y.sum())
            assert not private.reaches_this_level(x.sum())
            return y.sum()

        return torch.func.grad(loss)(x)

    assert torch.compile(reaches, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [1.0, 1.0]


# The one room


def public_names(module: Any) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in tree.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in defined if not name.startswith("_")}


def test_has_derivative_by_torch_func_or_by_the_engine():
    """`_C._functorch`: a loss weight that is computed from the parameters would be taken for a count."""
    found = []

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found.append([private.has_derivative(value) for value in (x * 2, y, x.detach())])
        return (x * y).sum()

    x, y = torch.ones(2), torch.ones(2)
    torch.func.grad(lambda y: torch.func.grad(loss)(x, y).sum())(y)  # y is of the outer derivative alone
    loss(x.requires_grad_(), y)
    assert found == [[True, False, False]] * 2


def test_each_name_of_the_room_has_a_test_that_says_what_breaks():
    tests = [name for name in globals() if name.startswith("test_")]
    untested = [name for name in public_names(private) if not any(name in test for test in tests)]
    assert untested == []


OUTSIDE = {
    # The names of modules in a traceback or of a class, not the modules.
    "engine/lease.py": {"torch._dynamo.convert_frame"},
    "module/reach.py": {"torch._dynamo."},
}
"""Private names beyond the one room, by file."""

EXEMPT = ("torch_private.py", "debug/torch_private.py", "testing/")
"""The room itself, and that of explain (tests in test_explain_private.py); the testing tools."""


def private_names(source: str) -> set[str]:
    """Names of torch and optree with a part that begins with an underscore: used, imported, or in a string.

    Python's own, such as `torch.__version__`, are public.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.add(node.value)
    found = {name for name in found if not re.search(r"\.__\w+__$", name)}
    return {name for name in found if re.fullmatch(r"(torch|optree|nn)(\.\w+)*\._[\w.]*", name)}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("from torch._C import x", {"torch._C.x"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("torch._foreach_norm(x)", {"torch._foreach_norm"}),
        ("nn.modules.batchnorm._NormBase", {"nn.modules.batchnorm._NormBase"}),
        ("from optree.registry import __GLOBAL_NAMESPACE", {"optree.registry.__GLOBAL_NAMESPACE"}),
        ("torch.__version__", set()),
        ("'a docstring on torch._C'; torch.nn.Linear", set()),
    ],
)
def test_private_names_are_found(source, names):
    assert private_names(source) == names


def test_private_names_of_torch_and_optree_stand_in_one_file():
    found = {}
    for path in PACKAGE.rglob("*.py"):
        file = path.relative_to(PACKAGE).as_posix()
        names = private_names(path.read_text(encoding="utf-8")) - OUTSIDE.get(file, set())
        if names and not file.startswith(EXEMPT):
            found[file] = names
    assert found == {}


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.vmap(f)(x[None]).sum()])
def test_is_wrapped_of_what_a_transform_differentiates_or_maps_alone(transform):
    # When it moves, a write by an `out=` to what an outer transform maps over is not seen.
    captured, found = torch.ones(2), []

    def loss(x):
        found.append((private.is_wrapped(x), private.is_wrapped(captured)))
        return (x * x).sum()

    transform(loss)(torch.ones(2))
    assert found == [(True, False)]


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: lambda x: torch.vmap(f)(x[None]).sum()])
def test_unwrapped_is_the_tensor_below_all_transforms(transform):
    # When it moves, the rehearsal of a module under torch.func compares nothing.
    x = torch.ones(2)
    found = []

    def loss(x):
        found.append(private.unwrapped(x))
        return (x * x).sum()

    transform(loss)(x)
    assert type(found[0]) is Tensor and found[0].data_ptr() == x.data_ptr()


def test_is_fake_and_below_dispatch_modes_tell_tensors_without_values():
    # When they move, a module that is first called under fake tensors counts as rehearsed, or has a fake placeholder.
    with FakeTensorMode():
        assert private.is_fake(torch.ones(1))
        with private.below_dispatch_modes():
            assert not private.is_fake(torch.ones(1))
    assert not private.is_fake(torch.ones(1))


def test_below_subclasses_treats_a_subclass_as_a_tensor():
    # When it moves, a placeholder of an absent tensor can't tell its own shape.
    class Refusing(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    refusing = Tensor._make_subclass(Refusing, torch.ones(3))
    with pytest.raises(AssertionError):
        refusing.size()
    with private.below_subclasses():
        assert refusing.size() == (3,)


def test_traced_effects_knows_which_object_was_written_to_while_a_graph_is_traced(fresh_dynamo):
    # When it moves, a compiled call of a module does not see that its forward changed an attribute.
    class Thing:
        value = 0

    thing, modified = Thing(), []

    def look(context):
        effects = private.traced_effects(context)
        variable = effects.id_to_variable.get(id(thing))
        modified.append(variable is not None and effects.is_modified(variable))

    def function(x):
        private.comptime()(look)
        thing.value = 1
        private.comptime()(look)
        return x + 1

    torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(1))
    assert modified == [False, True]


def test_comptime_traced_locals_and_traced_versions_show_a_write_while_a_graph_is_traced(fresh_dynamo):
    # When they move, a compiled loss function writes to the buffers of a state, and a skip can't take it back.
    seen = []

    def look(context):
        seen.append(private.traced_versions(private.traced_locals(context)["watched"].items))

    def compare(watched):
        private.comptime()(look)

    def function(x, y, z):
        compare([x, y, z])
        x.add_(1)
        y.data.add_(1)
        compare([x, y, z])
        return x + y + z

    torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    assert [new - old for old, new in zip(*seen, strict=True)] == [1, 1, 0]


def test_traced_items_traced_value_and_traced_inputs_are_what_a_graph_has_and_reads(fresh_dynamo):
    # When they move, a compiled forward that assigns a buffer anew, or reads a global of the original, passes.
    given, found = {"a": torch.zeros(1), "b": torch.ones(1)}, []

    def look(context):
        tensors = private.traced_items(private.traced_locals(context)["tensors"])
        found.append({name: private.traced_value(variable) for name, variable in tensors.items()})
        found.append([(name, id(tensor), version) for name, tensor, version in private.traced_inputs(context)])

    def compare(tensors):
        private.comptime()(look)

    def function(tensors):
        tensors = dict(tensors)
        compare(tensors)
        tensors["a"] = tensors["a"] + 1
        tensors["b"].add_(1)
        compare(tensors)
        return tensors["a"]

    torch.compile(function, fullgraph=True, backend="eager")(given)
    assert [found[0][name] is found[2][name] for name in "ab"] == [False, True]
    assert found[1] == [(f"L['tensors']['{name}']", id(tensor), 0) for name, tensor in given.items()]
    assert [version for _, _, version in found[3]] == [0, 1]


@pytest.mark.parametrize("fullgraph", [True, False])
def test_traced_fully_is_what_compile_was_told(fresh_dynamo, fullgraph):
    # When it moves, a plain average of BatchNorm is an error of the compiler's, or is refused where it works.
    seen = []

    def look(context):
        seen.append(private.traced_fully(context))

    def inner(x):
        private.comptime()(look)
        return x + 1

    torch.compile(lambda x: inner(x) * 2, fullgraph=fullgraph, backend="eager")(torch.zeros(1))
    assert seen == [fullgraph]


def test_traced_graph_is_one_until_the_compiler_leaves_it(fresh_dynamo):
    # When it moves, a loss function that leaves its graph is refused for writes that it has not made.
    seen = []

    def look(context):
        seen.append(private.traced_graph(context))

    def looked(x):
        private.comptime()(look)
        return x + 1

    def twice(x):
        return looked(looked(x))

    torch.compile(twice, fullgraph=True, backend="eager")(torch.zeros(1))
    assert len(seen) == 2 and seen[0] == seen[1]
    seen.clear()

    def broken(x):
        x = looked(x)
        torch._dynamo.graph_break()
        return looked(x)

    torch.compile(broken, backend="eager")(torch.zeros(1))
    assert len(seen) > 1 and seen[0] != seen[-1]


def test_traced_class_is_what_isinstance_finds_in_a_graph(fresh_dynamo):
    # When it moves, a forward that asks for nn.Parameter takes another branch in a compiled step.
    kinds = iter((torch.nn.Parameter, Tensor))

    def look(context):
        private.traced_class(private.traced_locals(context)["tensors"].items, next(kinds))

    def marked(tensors):
        private.comptime()(look)

    def function(x):
        marked([x])
        inside = isinstance(x, torch.nn.Parameter)
        marked([x])
        return x + 10 * inside + isinstance(x, torch.nn.Parameter)

    assert torch.compile(function, fullgraph=True, backend="eager")(torch.zeros(1)) == 10


def test_traced_input_writes_are_those_to_tensors_outside_of_a_graph(fresh_dynamo):
    # When they move, a compiled forward that counts in a constant passes.
    read, counted, found = torch.zeros(2, 3).add_(1).T[1:], torch.zeros(1).add_(1), []

    def look(context):
        found.append(private.traced_input_writes(context))

    def compare():
        private.comptime()(look)

    def function(x):
        counted.add_(1)
        compare()
        return x + read.sum() + counted

    torch.compile(function, fullgraph=True, backend="eager")(torch.ones(1))
    assert [id(tensor) for _, tensor in found[0]] == [id(counted)]


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_all_reduced_and_all_gathered_are_one_collective_each(alone):
    # When they move, an update sends nothing, or a message for each leaf.
    group = torch.distributed.init_device_mesh("cpu", (1,)).get_group().group_name
    leaves = [torch.ones(2), torch.ones(2, 3)]
    with Collectives() as sent:
        totals = private.all_reduced(leaves, group)
        same = private.all_reduced(leaves, group, in_place=True)
        gathered = private.all_gathered(leaves[1], 1, group)
    assert sent.seen == ["all_reduce_coalesced", "all_reduce_coalesced_", "all_gather_into_tensor"]
    assert [total is leaf for total, leaf in zip(totals + same, leaves * 2, strict=True)] == [False] * 2 + [True] * 2
    assert gathered.shape == (1, 2, 3)


def test_assert_on_device_raises_in_a_graph_too(fresh_dynamo):
    # When it moves, ranks that are not at one window go on as if they were.
    def checked(flag):
        private.assert_on_device(flag, "not at one window")
        return flag

    for function in (checked, torch.compile(checked, fullgraph=True, backend="aot_eager")):
        function(torch.tensor(True))
        with pytest.raises(RuntimeError, match="not at one window"):
            function(torch.tensor(False))


def test_part_of_dtensor_is_what_from_local_makes(alone):
    # When it moves, the new state of a sharded run has other shapes, or none.
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    like = distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.arange(8.0).reshape(4, 2).to(dtype)
        made, expected = private.part_of_dtensor(part, like), DTensor.from_local(part, mesh, [Shard(0)])
        with torch.no_grad():
            assert made.to_local().data_ptr() == part.data_ptr()
        assert (made.shape, made.stride(), made.dtype) == (expected.shape, expected.stride(), expected.dtype)
        assert made.placements == expected.placements and made.full_tensor().equal(part)
        assert (made + expected).full_tensor().equal(2 * part)


def test_ranks_of_group_are_its_own_and_constant_in_a_graph(alone, fresh_dynamo):
    # When it moves, a sharded leaf is summed over the ranks that hold its other parts.
    name = torch.distributed.init_device_mesh("cpu", (1,)).get_group().group_name

    def first(x):
        return x + private.ranks_of_group(name)[0]

    assert private.ranks_of_group(name) == (0,)
    assert torch.compile(first, fullgraph=True, backend="eager")(torch.ones(1)) == 1


def test_root_mesh_has_all_dimensions(alone):
    # When it moves, tensor-parallel parameters can't be sharded further.
    mesh = torch.distributed.init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert private.root_mesh(mesh["tp"]) == mesh
